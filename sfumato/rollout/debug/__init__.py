"""Rollouts in files, learning from them again, and tokens in colour."""
