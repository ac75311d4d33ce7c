"""Generates text with a model that transformers divides over the ranks (tp_plan="auto").

torchrun --nproc-per-node 2 tensor_parallel.py --backend smddp [--train]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import outcome
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

NEW_TOKENS = 64
STEPS = 20


def generate(model: Any, prompt: torch.Tensor) -> None:
    """Reports the tokens that follow the prompt."""
    options = {"do_sample": False, "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    with torch.no_grad():
        loss = float(model(prompt, labels=prompt).loss)
        model.generate(prompt, **options)  # first calls are slow
        outcome.start()
        tokens = model.generate(prompt, **options)
        outcome.report(loss, [tokens.float()], tokens=NEW_TOKENS)


def train(model: Any, prompt: torch.Tensor) -> None:
    """Reports the weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(prompt, labels=prompt).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    step()  # the first call is slow
    outcome.start()
    losses = [step() for _ in range(STEPS)]
    assert losses[-1] < losses[0] - 0.1, losses
    outcome.report(losses[-1], model.parameters(), tokens=STEPS * prompt.numel())


def main() -> None:
    """Writes a small Llama with random weights, loads it in parts, and generates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="smddp")
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder[0])
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    prompt = torch.arange(16)[None] * 7
    (train if arguments.train else generate)(model, prompt)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(folder[0]).iterdir():
            os.remove(file)
        os.rmdir(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
