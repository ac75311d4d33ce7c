"""Translations between states of tensor-parallel models and those of Hugging Face's classes.

What is not divided: layers and encoders with another `attn_implementation` than "sdpa" and "eager",
those of BERT and RoBERTa with relative positions, those of GPT-J without `rotary_dim`, and those
whose activation is neither ReLU nor GELU (exact or by tanh). A GPT-2 or GPT-Neo with
`tie_word_embeddings=False`, and a GPT-J with True, is divided without its head. Only the layers are
divided if the configuration has `output_attentions`, `output_hidden_states` or `return_dict=False`.
"""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
