"""Sampling from a language model: token sequences, their packing, greedy answers, images drawn token by token."""
