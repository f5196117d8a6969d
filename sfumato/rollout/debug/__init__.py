"""Rollouts in files, training on them again, and tokens in colour."""
