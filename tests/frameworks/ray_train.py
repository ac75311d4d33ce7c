"""Ray Train starts two workers, and calls init_process_group in each.

python ray_train.py --backend smddp
"""

from __future__ import annotations

import argparse
import os
import tempfile

import outcome
import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn, optim


def train(_: dict[str, str]) -> None:
    """Trains for 20 steps, on each worker."""
    outcome.start()
    rank, size = get_context().get_world_rank(), get_context().get_world_size()
    model = prepare_model(outcome.network())
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (each.chunk(size)[rank] for each in outcome.data().tensors)
    for _step in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    outcome.report(float(mean) / size, model.parameters())


def main() -> None:
    """Starts Ray on this machine, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    arguments = parser.parse_args()
    variables = {
        name: os.environ[name]
        for name in ("PYTHONPATH", "FRAMEWORKS_OUTPUT", "OMP_NUM_THREADS")
        if name in os.environ
    }
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={},
            torch_config=TorchConfig(backend=arguments.backend),
            scaling_config=ScalingConfig(
                num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}
            ),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
