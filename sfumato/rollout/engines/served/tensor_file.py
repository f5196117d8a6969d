"""A safetensors file that is filled tensor by tensor, without a second copy of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import torch

from sfumato.errors import WeightSyncError

HEADER_BYTES = 2**20
"""Room for names, shapes and places, which stand before the tensors and are known after them; the rest is blanks."""

LENGTH_BYTES = 8
"""Of the number at the beginning of the file, which says how long the header is."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Dtypes of weights, by their names in the format."""


class TensorFile:
    """Its tensors are written where they will stay, and its header at the end into room that was left for it."""

    def __init__(self, file: IO[bytes], metadata: Mapping[str, str]) -> None:
        """
        Args:
            file: open for writing, at its beginning. What it has from before is overwritten, and cut off at the end.
            metadata: of the file.
        """
        self.file = file
        self.num_bytes = 0
        """Bytes of the tensors so far."""
        self._header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._header_bytes = len(json.dumps(self._header))
        file.seek(LENGTH_BYTES + HEADER_BYTES)

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the header has room for the tensor's name and shape."""
        return self._header_bytes + self._entry_bytes(name, tensor) <= HEADER_BYTES

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor. Raises OSError when there is no room, WeightSyncError for a dtype without a name."""
        if tensor.dtype not in DTYPES:
            raise WeightSyncError(f"{name} has dtype {tensor.dtype}, in which no weights are sent")
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self.file.write(data.numpy().data)
        self._header_bytes += self._entry_bytes(name, tensor)
        end = self.num_bytes + data.nbytes
        self._header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.num_bytes, end],
        }
        self.num_bytes = end

    def finish(self) -> None:
        """Writes the header."""
        self.file.truncate()
        self.file.seek(0)
        self.file.write(HEADER_BYTES.to_bytes(LENGTH_BYTES, "little"))
        self.file.write(json.dumps(self._header).encode().ljust(HEADER_BYTES))
        self.file.flush()

    def _entry_bytes(self, name: str, tensor: torch.Tensor) -> int:
        """Most bytes of a tensor's entry in the header, whose numbers have 20 digits at most."""
        # JSON may write a character as an escape of six bytes.
        return 6 * len(name) + 22 * (len(tensor.shape) + 2) + 64
