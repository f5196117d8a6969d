"""An export of a transformers model whose weights come one at a time: each is written to its place in the files.

The files are those of transformers' ``save_pretrained``. Their layout follows from shapes alone, so that they are laid
out before the first weight is there, and no more than one weight is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from sfumato.parallel.weight_files import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_FILE = "50GB"
"""Size from which weights are spread over several files: transformers' default."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ORDER = ("F8_E4M3", "F8_E5M2", "BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""Types of numbers in the order in which safetensors sorts tensors in a file, the last ones first."""


@dataclass(frozen=True)
class ExportLayout:
    """Which tensors of an export come from which weights of the module."""

    tensors: dict[str, Tensor]
    """The tensors of the files, on meta."""
    groups: dict[str, tuple[str, ...]]
    """For each weight of the module, those that are converted together with it."""


@dataclass(frozen=True)
class TransformersExport:
    """The weights of an export of a transformers model, which are taken one at a time."""

    plain: PreTrainedModel
    """The module on meta, its weights of the dtypes of the export."""
    layout: ExportLayout
    dtype: torch.dtype | None
    """dtype in which float32 weights are exported; None leaves them."""
    float32_weights: frozenset[str]
    """Names of those that stay float32 all the same."""
    begin: Callable[[Path], None]
    """Writes what stands beside the weights, before them."""
    end: Callable[[Path, dict[str, Tensor]], None]
    """Writes what comes after them, given the weights that the module has no place for."""

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a weight is exported; those that the module has no place for keep theirs."""
        is_cast = dtype == torch.float32 and name in self._names and name not in self.float32_weights
        return self.dtype if is_cast and self.dtype is not None else dtype

    def write(self, folder: Path, weights: Iterable[tuple[str, Tensor | None]]) -> None:
        """Writes the folder."""
        self.begin(folder)
        present = ((name, tensor.detach().cpu()) for name, tensor in weights if tensor is not None)
        self.end(folder, write_streamed(self.plain, self.layout, present, folder))

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.plain.state_dict())


def lay_out(plain: PreTrainedModel) -> ExportLayout | None:
    """The layout of an export; None where weights far from each other make up a tensor of the files.

    Args:
        plain: the module on meta, its weights of the dtypes of the export.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = dict(plain.state_dict())
    for name in getattr(plain, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict({name: value.to("meta") for name, value in state.items()}, plain)
    whole = revert_weight_conversion(plain, dict(state))
    by_weight = {name: (name,) for name in state}
    by_block: dict[str, list[str]] = {}
    for name in state:
        by_block.setdefault(_block_of(name), []).append(name)
    # The small groups are tried first: all weights of a group are in memory at a time.
    for groups in (by_weight, {name: tuple(by_block[_block_of(name)]) for name in state}):
        parts: dict[str, Tensor] = {}
        for group in dict.fromkeys(groups.values()):
            parts |= revert_weight_conversion(plain, {name: state[name] for name in group})
        if _shapes_and_dtypes(parts) == _shapes_and_dtypes(whole):
            # parts of one weight would count with the size of all of it
            apart = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in whole.items()
            }
            return ExportLayout(apart, groups)
    return None


def _block_of(name: str) -> str:
    """The part of a weight's name up to its first number, that of its block; the whole name outside of blocks."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else name


def _shapes_and_dtypes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def write_streamed(
    plain: PreTrainedModel, layout: ExportLayout, weights: Iterable[tuple[str, Tensor]], folder: Path
) -> dict[str, Tensor]:
    """Writes the folder of ``save_pretrained`` from weights that come one at a time.

    Args:
        plain: the module on meta.
        layout: its layout.
        weights: name and value of each weight, whole and on the CPU, in the dtypes of the layout.
        folder: where to write.

    Returns:
        The weights that the module has no place for.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain.save_pretrained(folder, state_dict={})  # all but the weights, and an empty file of these
    (folder / "model.safetensors").unlink(missing_ok=True)
    names_of = _names_of_weights(plain)
    waiting: dict[str, Tensor] = {}
    written: set[str] = set()
    others: dict[str, Tensor] = {}
    with _Files(plain, layout.tensors, folder) as files:
        for given_name, tensor in weights:
            name = next((alias for alias in names_of.get(given_name, (given_name,)) if alias in layout.groups), None)
            if name is None:
                if given_name not in names_of:
                    others[given_name] = tensor
                continue
            waiting[name] = tensor
            group = layout.groups[name]
            if name in written or any(part not in waiting for part in group):
                continue
            for stored_name, value in revert_weight_conversion(
                plain, {part: waiting.pop(part) for part in group}
            ).items():
                files.write(stored_name, value)
            written |= {*group}
    missing = layout.groups.keys() - written
    assert not missing, f"weights of {sorted(missing)[:3]} were not gathered"
    return others


def _names_of_weights(plain: PreTrainedModel) -> dict[str, list[str]]:
    """All names of the weight or persistent buffer that has a name."""
    names: dict[int, list[str]] = {}
    for name, tensor in plain.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() for name in group}


class _Files:
    """Safetensors files with room for tensors, which are written in any order."""

    def __init__(self, plain: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        split = split_torch_state_dict_into_shards(
            tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=LARGEST_FILE
        )
        self._files: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._tensors = tensors
        for file_name, names in split.filename_to_tensors.items():
            file = (folder / file_name).open("wb")
            self._files.append(file)
            self._write_header(file, names)
        if split.is_sharded:
            total = {"total_parameters": plain.num_parameters(), **split.metadata}
            index = {"metadata": total, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / "model.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")

    def _write_header(self, file: BinaryIO, names: list[str]) -> None:
        """Writes the header of a file: the tensors in the order of safetensors, with the place of each."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in sorted(names, key=lambda name: (-ORDER.index(DTYPE_NAMES[self._tensors[name].dtype]), name)):
            tensor = self._tensors[name]
            offsets = [position, position + tensor.nbytes]
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            self._places[name] = file, position
            position += tensor.nbytes
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Padded as safetensors does it, so that tensors begin at multiples of eight bytes.
        content += b" " * (-len(content) % 8)
        file.write(len(content).to_bytes(8, "little") + content)
        begin = file.tell()
        for name in names:
            self._places[name] = file, begin + self._places[name][1]
        file.truncate(begin + position)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor to its place."""
        expected = self._tensors[name]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{name} is not as it was laid out"
        file, position = self._places[name]
        file.seek(position)
        file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def set_dtypes(plain: PreTrainedModel, dtype: torch.dtype | None, float32_weights: Iterable[str]) -> None:
    """Gives the weights of a module on meta the dtypes of its export, by which the export's files are laid out.

    Args:
        plain: the module, which is changed.
        dtype: of weights that are float32 now; None leaves them.
        float32_weights: names of those that stay float32.
    """
    excepted = {*float32_weights}
    state = {
        name: tensor.to(dtype) if dtype and tensor.dtype == torch.float32 and name not in excepted else tensor
        for name, tensor in plain.state_dict().items()
    }
    plain.load_state_dict(state, strict=False, assign=True)
    plain.tie_weights()
