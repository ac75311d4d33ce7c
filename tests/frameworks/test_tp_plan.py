"""Models of transformers that ship a tp_plan train as in one process.

transformers is in the environment of `make test-frameworks`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from ranks import run_ranks

import smddp.modelparallel.torch as smp

transformers = pytest.importorskip("transformers", reason="run `make test-frameworks`")

pytestmark = [pytest.mark.multiprocess, pytest.mark.exhaustive, pytest.mark.timeout(660)]

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Name -> (class, configuration, layers of a decoder layer that the plan divides).
ATTENTION, MLP = 4, 3
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama": ("Llama", SIZES, ATTENTION + MLP),
    "Qwen2, head of its own": ("Qwen2", {**SIZES, "tie_word_embeddings": False}, ATTENTION + MLP),
    # Rank 1 would have no keys and values.
    "Llama, one head of keys": ("Llama", {**SIZES, "num_key_value_heads": 1}, MLP),
    # Its norms of queries and keys would get a part of their gradients on each rank.
    "Qwen3": ("Qwen3", {**SIZES, "head_dim": 8}, MLP),
}
STEPS = 3


def make(name: str) -> Any:
    kind, options, _ = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def tokens(step: int, replica: int) -> Tensor:
    source = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(3, 60, (4, 7), generator=source)


@smp.step
def train(model: Any, ids: Tensor) -> Any:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.backward(loss)
    return loss


def compare(name: str, model: Any, config: dict[str, Any], planned: int) -> None:
    """Trains a model whose first copy trains in one process."""
    alone = make(name)
    own = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    replicas = smp.rdp_size() if smp.state.cfg.prescaled_batch else smp.dp_size()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (alone, model)]
    optimizers[1] = smp.DistributedOptimizer(optimizers[1])
    kinds = [type(part).__name__ for part in model.distributed_modules()]
    assert kinds.count("Columns") + kinds.count("Contracting") == planned, kinds
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [
            alone(input_ids=ids, labels=ids, use_cache=False).loss
            for ids in (tokens(step, replica) for replica in range(replicas))
        ]
        (sum(losses) / replicas).backward()
        found = train(model, tokens(step, own)).reduce_mean()
        torch.testing.assert_close(found, losses[own].detach(), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    weights = model.state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5, msg=f"{config} {key}")


def job(configs: list[dict[str, Any]], names: list[str]) -> None:
    for config in configs:
        smp.init({"ddp": True, "tensor_parallel_degree": 2, "_match_weights": True, **config})
        for name in names:
            with smp.tensor_parallelism():
                module = make(name)
            model = smp.DistributedModel(module)
            layers = SIZES["num_hidden_layers"] if smp.state.cfg.prescaled_batch else 0
            compare(name, model, config, MODELS[name][2] * layers)
            del model, module
            gc.collect()
        smp.shutdown()


def test_training_equals_one_process() -> None:
    outcomes = run_ranks(job, "2", [{"prescaled_batch": True}, {}], list(MODELS), timeout=500)
    assert all(one.returned for one in outcomes), "\n".join(map(str, outcomes))
    for text in ("k_proj cannot be divided", "q_norm has the style"):
        assert text in outcomes[0].stderr
        assert text not in outcomes[1].stderr


def test_with_partitions() -> None:
    config = {"prescaled_batch": True, "partitions": 2, "microbatches": 2}
    outcomes = run_ranks(job, "4", [config], ["Llama"], timeout=500)
    assert all(one.returned for one in outcomes), "\n".join(map(str, outcomes))
