"""Hugging Face's transformers: which classes are divided, and translations of their states."""
