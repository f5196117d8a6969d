"""Deterministic samplers: for objectives that need only the final sample, and for steps outside the trained window."""

from sfumato.algorithms.solvers.solver import Solver

__all__ = ["Solver"]
