"""Sampling from a diffusion model: trajectories and final samples, evaluation, the self-check."""
