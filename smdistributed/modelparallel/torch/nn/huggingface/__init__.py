"""Translations between states of tensor-parallel models and those of Hugging Face's classes."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
