"""Families of diffusion models, one file each: a file with a subclass of DiffusionModel is found by itself."""
