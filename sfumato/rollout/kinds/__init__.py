"""Kinds of rollout, chosen by ``rollout.kind``: how a sample comes of a prompt and an engine."""
