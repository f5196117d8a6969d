"""Mutated files and messages for everything that reads bytes of strangers: ``python -m tests.fuzz --minutes 60``."""
