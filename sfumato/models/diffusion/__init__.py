"""Diffusion models, as wrappers of diffusers pipelines: what families share, parts and what they make once."""
