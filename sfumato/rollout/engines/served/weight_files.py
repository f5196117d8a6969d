"""Weights for an engine in another process, written as safetensors files with the tensor names of the model's own
files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from sfumato.config.writing import make_new_folder, remove
from sfumato.errors import WeightSyncError
from sfumato.models.lora import save_adapter
from sfumato.parallel.shards import Spec, all_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FILE_BYTES = 2**31
"""A file is written when its tensors have so many bytes; until then they are held in memory."""

_SECRET = secrets.token_hex(8)


def process_name() -> str:
    """A name of this process among those that share a folder: each rank has an engine of its own."""
    return f"{socket.gethostname()}-{os.getpid()}"


def own_folder(shared: Path) -> Path:
    """The subfolder of this process in a folder that several processes, perhaps of other users, write weights to.

    Its name cannot be guessed. Subfolders of dead processes of this machine are removed.
    """
    host = f"{socket.gethostname()}-"
    for part in shared.glob(f"{host}*"):
        number = part.name.removeprefix(host).partition("-")[0]
        if number.isdecimal() and not Path("/proc", number).exists():
            with contextlib.suppress(OSError):  # another user's
                remove(part)
    return shared / f"{process_name()}-{_SECRET}"


class WeightFiles:
    """Writes versions of a model's weights, or of its adapters alone, into folders."""

    def __init__(self, template: nn.Module, dtype: torch.dtype, folder: Path, base: str = "") -> None:
        """
        Args:
            template: transformers' module as the actor has it, on meta, with adapters if adapters are trained.
            dtype: that the engine computes in.
            folder: where versions are written to; both processes must see it. Memory (/dev/shm) is quickest.
            base: folder of the model without adapters, named in those that are written.
        """
        self.template = template
        self.folder = folder
        self.base = base
        parameters = all_parameters(template)
        adapters = {name: parameter for name, parameter in parameters.items() if ".lora_" in name}
        self.are_adapters = bool(adapters)
        """Whether adapters alone are written."""
        self.specs = {
            name: Spec(tuple(parameter.shape), torch.float32 if adapters else dtype)
            for name, parameter in (adapters or parameters).items()
        }
        """Shapes and dtypes of the tensors to be written, by the actor's names for them."""

    def write(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> Path:
        """Writes a version; its folder appears complete or not at all.

        Args:
            tensors: names and whole tensors, each valid until the next is asked for.
            version: of the weights.

        Returns:
            Its folder.

        Raises:
            WeightSyncError: when it cannot be written.
        """
        folder = self.folder / f"version_{version:06d}"
        unfinished = folder.with_suffix(".tmp")
        try:
            remove(folder)
            make_new_folder(unfinished)
            if self.are_adapters:
                # Copies: each tensor is valid only until the next is asked for.
                held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
                save_adapter(self.template, held, unfinished, self.base)
            else:
                self._write_files(tensors, unfinished)
            unfinished.rename(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise WeightSyncError(
                f"version {version} of the weights could not be written to {self.folder}: {error}. Make room, or give "
                "the engine another weights_folder"
            ) from error
        return folder

    def _write_files(self, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
        held: dict[str, torch.Tensor] = {}
        count = 0
        for name, tensor in tensors:
            held[name] = tensor.detach().to("cpu", copy=True)
            if sum(held_tensor.nbytes for held_tensor in held.values()) >= FILE_BYTES:
                self._write_file(held, folder, count := count + 1)
                held = {}
        if held:
            self._write_file(held, folder, count + 1)

    def _write_file(self, held: dict[str, torch.Tensor], folder: Path, number: int) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        # transformers loads some models with merged or renamed tensors: back to what the model's files have.
        named = revert_weight_conversion(cast("PreTrainedModel", self.template), held)
        whole = {name: tensor.contiguous() for name, tensor in named.items()}
        save_file(whole, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})

    def close(self) -> None:
        """Removes all versions."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove(self, folder: Path | None) -> None:
        """Removes a version that nobody needs any more."""
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
