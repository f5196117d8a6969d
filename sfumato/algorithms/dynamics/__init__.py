"""Denoising steps as Gaussian policies: how the next latent is drawn, and with which probability."""

from sfumato.algorithms.dynamics.step import GaussianStep

__all__ = ["GaussianStep"]
