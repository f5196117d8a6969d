"""Diffusion model families, one file each, as wrappers of diffusers pipelines."""
