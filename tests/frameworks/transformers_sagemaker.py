"""The Trainer of transformers with the variables of SageMaker's data-parallel library.

torchrun --nproc-per-node 2 transformers_sagemaker.py --backend smddp

transformers then imports smdistributed.dataparallel.torch.torch_smddp, and asks for smddp by name.
In this mode it gives DDP the number of a GPU. Without GPUs the lines below leave that out.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import transformers_trainer
from torch import nn

DDP = nn.parallel.DistributedDataParallel


class OnCpu(DDP):
    """DDP without the number of a GPU."""

    def __init__(self, model: nn.Module, device_ids: list[int], **options: Any) -> None:
        assert device_ids == [int(os.environ["LOCAL_RANK"])]
        super().__init__(model, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    sagemaker = parser.parse_args().backend == "smddp"
    if sagemaker:
        os.environ["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_distributed_dataparallel_enabled": true}'
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        nn.parallel.DistributedDataParallel = OnCpu  # type: ignore[misc]
    transformers_trainer.main(use_cpu=not sagemaker)
