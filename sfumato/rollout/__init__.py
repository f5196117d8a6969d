"""Sampling from a policy: trajectories with log-probabilities, and their replay."""
