"""Checkpoints that are complete or absent, and exports that other tools load."""
