"""Weights for an engine in another process: safetensors with the tensor names of the model's own files, in memory that
both map or in files."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import nn

from sfumato.config.writing import make_new_folder, open_new, remove
from sfumato.errors import WeightSyncError
from sfumato.models.lora import save_adapter
from sfumato.parallel.shards import Spec, all_parameters
from sfumato.rollout.engines.host_memory import free_host_bytes
from sfumato.rollout.engines.served.tensor_file import TensorFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FILE_BYTES = 2**31
"""A file takes no more tensors when these have so many bytes."""

NUM_VERSIONS = 2
"""That there may be at a time: the one in use, and the next."""

LOGGER = logging.getLogger(__name__)

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
    """Hands over versions of a model's weights, or of its adapters alone, in folders."""

    def __init__(
        self,
        template: nn.Module,
        dtype: torch.dtype,
        folder: Path,
        base: str = "",
        in_memory: bool = False,
        run_folder: Path | None = None,
    ) -> None:
        """
        Args:
            template: transformers' module as the actor has it, on meta, with adapters if adapters are trained.
            dtype: that the engine computes in.
            folder: where versions are written to; both processes must see it.
            base: folder of the model without adapters, named in those that are written.
            in_memory: keep the weights in memory where there is room for two versions. Its pages serve one version
                after the other, and the folder has links to it, which processes of this user on this machine can open
                while this one lives. It has no name, so the kernel frees it when the last process that has it open
                ends, however that ends. Adapters are always in files.
            run_folder: tells the versions of this run from those that another one sends to the same engine.
        """
        self.run = hashlib.blake2b(str((run_folder or folder).absolute()).encode(), digest_size=4).hexdigest()
        """Which run sends them: the same for all its ranks."""
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
        self.in_memory = in_memory and not self.are_adapters and hasattr(os, "memfd_create")  # which Linux has
        self._slots: list[list[IO[bytes]]] = []
        """Memory of versions: for each the files that it consists of."""
        self._slot_of: dict[Path, int] = {}
        """Which memory the versions have that were not removed, by their folders."""

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
        folder = self.folder_of(version)
        unfinished = folder.with_suffix(".tmp")
        try:
            self.remove(folder)
            make_new_folder(unfinished)
            if self.are_adapters:
                # Copies: each tensor is valid only until the next is asked for.
                held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
                save_adapter(self.template, held, unfinished, self.base)
            else:
                if not self._slots:
                    self._choose_place()
                slot = self._free_slot()
                self._write_files(tensors, unfinished, version, slot)
                self._slot_of[folder] = slot
            unfinished.rename(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise WeightSyncError(
                f"version {version} of the weights could not be written to {self.folder}: {error}. Make room, or give "
                "the engine another weights_folder"
            ) from error
        return folder

    def label_of(self, version: int) -> str:
        """What the engine calls a version."""
        return f"{self.run}-{version}"

    def folder_of(self, version: int) -> Path:
        """The folder that a version is written to."""
        return self.folder / f"version_{version:06d}"

    def _choose_place(self) -> None:
        """Decides where versions lie, when the first is about to be written, and says so."""
        num_bytes = sum(prod(spec.shape) * spec.dtype.itemsize for spec in self.specs.values())
        size, room = (f"{count / 1e9:.3g} GB" for count in (NUM_VERSIONS * num_bytes, free_host_bytes()))
        has_room = NUM_VERSIONS * num_bytes <= free_host_bytes()
        if self.in_memory and not has_room:
            LOGGER.info(
                "weights for the engine are handed over in %s: two versions in memory need %s of %s that are free",
                self.folder,
                size,
                room,
            )
        else:
            place = "memory" if self.in_memory else str(self.folder)
            LOGGER.info("weights for the engine are handed over in %s (%s for two versions)", place, size)
        self.in_memory = self.in_memory and has_room

    def _free_slot(self) -> int:
        """Number of a memory that no version has."""
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slot_of.values())
        if slot == len(self._slots):
            self._slots.append([])
        return slot

    def _write_files(self, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, version: int, slot: int) -> None:
        metadata = {"format": "pt", "version": str(version)}
        files: list[TensorFile] = []
        try:
            for name, tensor in self._under_names_of_files(tensors):
                if not files or files[-1].num_bytes >= FILE_BYTES or not files[-1].has_room(name, tensor):
                    files.append(TensorFile(self._open(folder, len(files) + 1, slot), metadata))
                files[-1].append(name, tensor)
            for file in files:
                file.finish()
        finally:
            # Memory lives as long as this process has it open.
            for file in files if not self.in_memory else ():
                file.file.close()

    def _open(self, folder: Path, number: int, slot: int) -> IO[bytes]:
        """A file of a version, to be filled from its beginning."""
        path = folder / f"model-{number:05d}.safetensors"
        if not self.in_memory:
            return open_new(path)
        memory = self._slots[slot]
        if number > len(memory):
            memory.append(os.fdopen(os.memfd_create(path.name), "w+b"))
        memory[number - 1].seek(0)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{memory[number - 1].fileno()}")
        return memory[number - 1]

    def _under_names_of_files(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as the model's own files have them: transformers loads some models with merged or renamed ones.

        Each is valid until the next is asked for.
        """
        from transformers.core_model_loading import revert_weight_conversion

        module = cast("PreTrainedModel", self.template)
        held: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            members = self._converted_together[name]
            if len(members) == 1:
                yield from revert_weight_conversion(module, {name: tensor.detach()}).items()
                continue
            group = held.setdefault(members[0], {})
            group[name] = tensor.detach().to("cpu", copy=True)
            if len(group) == len(members):
                yield from revert_weight_conversion(module, held.pop(members[0])).items()
        for group in held.values():  # of which some members are not trained
            yield from revert_weight_conversion(module, group).items()

    @cached_property
    def _converted_together(self) -> dict[str, tuple[str, ...]]:
        """For each tensor all those that the model's own files have in one tensor with it, itself among them."""
        from transformers.core_model_loading import revert_weight_conversion

        module = cast("PreTrainedModel", self.template)
        stand_ins = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in self.specs.items()
        }
        shapes = {name: tensor.shape for name, tensor in revert_weight_conversion(module, stand_ins).items()}

        def converts(names: Sequence[str]) -> bool:
            """Whether these tensors alone become what they become among all."""
            converted = revert_weight_conversion(module, {name: stand_ins[name] for name in names})
            return all(shapes.get(name) == tensor.shape for name, tensor in converted.items())

        joined = [name for name in stand_ins if not converts([name])]
        layers: dict[str, list[str]] = {}
        for name in joined:
            layers.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
        groups = list(layers.values()) if all(map(converts, layers.values())) else [joined]
        return {name: (name,) for name in stand_ins} | {name: tuple(group) for group in groups for name in group}

    def remove(self, folder: Path | None) -> None:
        """Removes a version that nobody needs any more; its memory is there for the next."""
        if folder is not None and folder.parent == self.folder:  # others are of another rank, which removes them
            self._slot_of.pop(folder, None)
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes all versions."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._slot_of = {}
        for memory in self._slots:
            for file in memory:
                file.close()
        self._slots = []
