"""Trains a small GPT on the text of smddp's documentation, partitioned over ranks.

    torchrun --nproc-per-node 2 examples/smp_gpt.py --partitions 2
    torchrun --nproc-per-node 4 examples/smp_gpt.py --partitions 2 --sharding 2 --checkpointing

The model is written as for a single process: a loop over a list of blocks, and an output layer that
shares its weight with the embedding. --sharding divides parameters, gradients and what the
optimizer keeps over so many replicas, and --checkpointing computes the activations of blocks again
in the backward pass. --report draws the partition and the timeline of one step, and counts memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
LENGTH = 64


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns hidden states of the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of characters."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@smp.step
def train_step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """The forward and backward pass of a microbatch."""
    loss = model(ids, labels=labels)
    model.backward(loss)
    return loss


def main() -> None:
    """Trains, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sharding", type=int, default=1, help="sharded_data_parallel_degree")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--report", type=Path, help="folder for drawings")
    options = parser.parse_args()
    config = {"partitions": options.partitions, "microbatches": options.microbatches, "ddp": True}
    if options.sharding > 1:
        config |= {
            "sharded_data_parallel_degree": options.sharding,
            # The defaults are for models of billions of parameters; this one has 400,000.
            "sdp_param_persistence_threshold": 1000,
            "sdp_reduce_bucket_size": 20_000,
        }
    smp.init({**config, "optimize": "speed"})
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = "".join(file.read_text() for file in sorted(DOCUMENTS.glob("*.md")))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = smp.DistributedModel(GPT(len(letters), 64, options.layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for block in model.get_module().blocks if options.checkpointing else ():
        smp.set_activation_checkpointing(block)
    places = torch.Generator().manual_seed(smp.dp_rank())
    for number in range(options.steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (16,), generator=places)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        rows = rows.to(device)
        optimizer.zero_grad()
        loss = train_step(model, rows[:, :-1], rows[:, 1:]).reduce_mean()
        if options.sharding == 1:
            smp.clip_grad_norm(1.0)  # with sharding, optimizer.step() clips to 1.0
        optimizer.step()
        if smp.rank() == 0 and (number % 20 == 0 or number == options.steps - 1):
            print(f"step {number}: loss {float(loss):.3f}")
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        report = smp.timeline(str(options.report / "step.svg"))
        memory = smp.memory()
        if smp.rank() == 0:
            print(memory)
            print(smp.explain(str(options.report / "partition.svg")))
            print(report)


if __name__ == "__main__":
    main()
