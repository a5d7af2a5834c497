"""Tiny instances of every causal language model that transformers has, and what mmrl does with each."""
