"""The Trainer of Hugging Face's transformers: a tiny GPT-2 with random weights.

SMDDP_INSTEAD_OF=gloo torchrun --nproc-per-node 2 transformers_trainer.py
"""

from __future__ import annotations

import tempfile

import outcome
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random sequences that repeat."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 5 + 1) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(use_cpu: bool = True) -> None:
    """Trains for two epochs."""
    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=use_cpu,
                num_train_epochs=2,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Texts(),
        )
        outcome.start()
        result = trainer.train()
    outcome.report(result.training_loss, model.parameters())


if __name__ == "__main__":
    main()
