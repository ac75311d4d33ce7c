"""The Trainer of transformers 4.27, which knows SageMaker's model-parallel library, trains a model.

SM_FRAMEWORK_PARAMS='{"sagemaker_mpi_enabled": true}' SM_HP_MP_PARAMETERS='{"partitions": 2, …}' \
    torchrun --nproc-per-node 4 trainer_smp.py gpt2 folder

Without these variables it trains in one process, as anywhere. Each step gets all of the data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import is_sagemaker_mp_enabled

EXAMPLES, LENGTH, VOCABULARY = 16, 8, 60


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count in steps."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (index % 5 + 1) + index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def make(name: str) -> PreTrainedModel:
    """Returns a small model without dropout."""
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def main() -> None:
    """Trains, evaluates and saves; writes the losses to losses.json in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["gpt2", "bert"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    arguments = parser.parse_args()
    set_seed(7)
    replicas, marks = 1, contextlib.nullcontext()
    if is_sagemaker_mp_enabled():
        import smdistributed.modelparallel.torch as smp

        replicas, marks = smp.dp_size(), smp.tensor_parallelism()
    with marks:
        model = make(arguments.model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.folder),
            no_cuda=True,
            max_steps=arguments.steps,
            per_device_train_batch_size=EXAMPLES // replicas,
            per_device_eval_batch_size=EXAMPLES // replicas,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            optim="sgd",
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(),
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    found = trainer.predict(Texts())
    trainer.save_model(str(arguments.folder / "final"))
    if os.environ.get("RANK", "0") == "0":
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history[:-1]}
        metrics = {"losses": losses, "evaluated": found.metrics["test_loss"]}
        (arguments.folder / "results.json").write_text(json.dumps(metrics))
        torch.save(torch.as_tensor(found.predictions), arguments.folder / "logits.pt")


if __name__ == "__main__":
    main()
