"""Denoising steps as Gaussian policies: how the next latent is drawn, and with which probability."""

from sfumato.algorithms.dynamics.step import Dynamics, GaussianStep

__all__ = ["Dynamics", "GaussianStep"]
