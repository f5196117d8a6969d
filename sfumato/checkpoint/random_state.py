"""Where the random generators stand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


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
    """Puts the generators where ``random_state`` found them."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    numbers = values["numpy"]
    np.random.set_state(("MT19937", tensors["numpy"].numpy(), numbers["pos"], numbers["has_gauss"], numbers["gauss"]))
