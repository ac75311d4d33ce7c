"""Translations between states of tensor-parallel models and those of Hugging Face's classes.

No model is split over tensor-parallel ranks in this version, so all states have the names of the
model: there is nothing to change.
"""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
