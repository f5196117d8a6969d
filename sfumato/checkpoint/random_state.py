"""Where the random generators stand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from sfumato.errors import CheckpointError


def random_state(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and numbers of the generators of torch (CPU, and the GPU of this process), numpy and Python."""
    numpy_state = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_state["state"]["key"].copy())}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    numbers = {
        "pos": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    return tensors, {"python": random.getstate(), "numpy": numbers}


def restore_random(tensors: dict[str, torch.Tensor], values: dict[str, Any], device: torch.device) -> None:
    """Puts the generators where ``random_state`` found them. Raises CheckpointError for what no generator has."""
    try:
        torch.set_rng_state(tensors["torch"])
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], device)
        version, internal, gauss = values["python"]
        random.setstate((version, tuple(internal), gauss))
        key, its = tensors["numpy"].numpy(), values["numpy"]
        np.random.set_state(("MT19937", key, its["pos"], its["has_gauss"], its["gauss"]))
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint's random generators cannot be put in place: {error}") from error
