"""States of the generators of random numbers that a model may draw from: they are compared and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restores the states of the generators of random numbers afterwards."""
    states = generator_states()
    try:
        yield
    finally:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def generator_states() -> dict[str, Any]:
    """States of the generators of random numbers, by the name of the library or device."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of one generator, tensors or tuples with arrays in them, are equal."""
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    if isinstance(state, tuple):
        return all(np.array_equal(entry, other_entry) for entry, other_entry in zip(state, other, strict=True))
    return state == other
