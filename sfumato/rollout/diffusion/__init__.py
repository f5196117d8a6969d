"""Sampling from a diffusion model: trajectories and final images, evaluation, the self-check."""
