"""Sampling from a language model: sequences of tokens, their packing, greedy answers, images drawn by tokens."""
