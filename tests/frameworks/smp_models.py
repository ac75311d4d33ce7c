"""Trains small models of Hugging Face's transformers with what smp has for large ones.

torchrun --nproc-per-node 2 smp_models.py '{"config": {"sharded_data_parallel_degree": 2}}'

Without a launcher it trains them in one process, the ordinary way, on the data of --replicas.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import smdistributed.modelparallel.torch as smp

STEPS, MICROBATCHES, BATCH, LENGTH, VOCABULARY = 6, 2, 4, 8, 64
# Smaller parameters stay whole on every rank: biases and norms here.
THRESHOLD = 100


def gpt2(dropout: float) -> nn.Module:
    """Returns a small GPT-2, whose embedding is also its head."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=3, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def bert(dropout: float) -> nn.Module:
    """Returns a small BERT with the head of a masked language model."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def t5(dropout: float) -> nn.Module:
    """Returns a small T5: the decoder attends to what the encoder returns."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2,
            num_heads=2, dropout_rate=dropout, feed_forward_proj="gated-gelu",
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def llama(dropout: float) -> nn.Module:
    """Returns a small Llama, where two heads share keys and values."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
            attention_dropout=dropout, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


# Name -> (makes the model, returns the layers that get activation checkpointing).
MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[Any], list[nn.Module]]]] = {
    "gpt2": (gpt2, lambda net: list(net.transformer.h)),
    "bert": (bert, lambda net: list(net.bert.encoder.layer)),
    "t5": (t5, lambda net: [*net.encoder.block, *net.decoder.block]),
    "llama": (llama, lambda net: list(net.model.layers)),
}


def make(name: str, dropout: float) -> nn.Module:
    """Returns the same model on every rank."""
    torch.manual_seed(7)
    model = MODELS[name][0](dropout)
    return model.train()


def tokens(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tokens, the attention mask and the labels of a replica's batch."""
    source = torch.Generator().manual_seed(1000 * step + replica)
    begin = torch.randint(VOCABULARY, (BATCH, 1), generator=source)
    found = (begin + 3 * torch.arange(LENGTH)) % VOCABULARY
    mask = torch.ones_like(found)
    mask[0, -2:] = 0
    return found, mask, found.where(mask.bool(), -100)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that enlarges no rounding errors, as Adam would."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(name: str, replicas: int) -> dict[str, Any]:
    """Trains a model in one process; returns the losses of the first replica, and the weights."""
    model = make(name, 0.0)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            total = 0.0
            chunks = [tensor.chunk(MICROBATCHES) for tensor in tokens(step, replica)]
            for ids, mask, labels in zip(*chunks, strict=True):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                (loss / MICROBATCHES / replicas).backward()
                total += loss.item() / MICROBATCHES
            if replica == 0:
                losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"losses": losses, "weights": dict(model.state_dict())}


@smp.step
def train_step(model: Any, ids: Any, mask: Any, labels: Any) -> Any:
    """Runs one microbatch."""
    loss = model(input_ids=ids, attention_mask=mask, labels=labels)["loss"]
    model.backward(loss)
    return loss


def marked(layers: list[nn.Module], marks: str) -> list[nn.Module]:
    """Returns the modules that get activation checkpointing."""
    if marks != "parts":
        return layers if marks == "layers" else []
    parts = [part for layer in layers for part in layer.children()]
    # A T5 block has a list of parts, and nobody calls a list.
    return [
        one
        for part in parts
        for one in (part.children() if isinstance(part, nn.ModuleList) else [part])
    ]


def parallel(name: str, dropout: float, marks: str) -> dict[str, Any]:
    """Trains a model with smp; returns what `alone` returns."""
    with smp.model_creation():
        module = make(name, dropout)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model))
    for part in marked(MODELS[name][1](model.get_module()), marks):
        smp.set_activation_checkpointing(part)
    losses = []
    torch.manual_seed(smp.dp_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(train_step(model, *tokens(step, smp.dp_rank())).reduce_mean()))
        optimizer.step()
    # A state dict has a shared weight under each of its names.
    weights = {key: value.float().clone() for key, value in model.state_dict().items()}
    del model, optimizer, module
    gc.collect()
    return {"losses": losses, "weights": weights}


def main() -> None:
    """Trains the models; writes results to the file that FRAMEWORKS_OUTPUT names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--replicas", type=int, default=1, help="without a launcher")
    parser.add_argument(
        "jobs",
        nargs="*",
        type=json.loads,
        help='as JSON: "config" of smp.init, "dropout", "marks" (what is computed again)',
    )
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    results = []
    if "RANK" not in os.environ:
        results = [{name: alone(name, arguments.replicas) for name in names}]
    for job in arguments.jobs:
        config = {"sdp_param_persistence_threshold": THRESHOLD, **job["config"]}
        smp.init({"ddp": True, "microbatches": MICROBATCHES, **config})
        dropout, marks = job.get("dropout", 0.0), job.get("marks", "layers")
        results.append({name: parallel(name, dropout, marks) for name in names})
        smp.shutdown()
    if os.environ.get("RANK", "0") == "0":
        for result in results:
            for name, one in result.items():
                print(name, *(f"{loss:.6f}" for loss in one["losses"]), flush=True)
        if "FRAMEWORKS_OUTPUT" in os.environ:
            torch.save(results, os.environ["FRAMEWORKS_OUTPUT"])


if __name__ == "__main__":
    main()
