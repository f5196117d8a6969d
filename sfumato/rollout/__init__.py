"""Sampling from a policy, of any modality."""
