"""Every rollout of a language model in files, as the update learned from it: to be looked at, and to be replayed.

One safetensors file for each iteration and data-parallel rank, ``rollouts/step_000010.rank0.safetensors``. B samples, S
sequences, T tokens, R decisions, each sample by sample:

- ``sample_ids``, ``group_ids``, ``prompt_ids``, int64 ``[B]``, ``is_first``, bool ``[B]``: the requests;
- ``sample_versions``, int64 ``[B]``: of the policy that drew the sample;
- ``advantages``, float32 ``[B]``, ``failed``, ``no_spread``, ``left_out``, bool ``[B]``: as ``Advantages``;
- ``rewards``, ``rewards.NAME``, float64 ``[B]``: the total that is optimised, each reward by itself, NaN if missing;
- ``num_sequences``, int64 ``[B]``, ``lengths``, int64 ``[S]``: sequences of a sample, tokens of a sequence;
- ``finish_reasons``, uint8 ``[S]``: places in ``FINISH_REASONS``;
- ``token_ids``, int32, ``drawn``, bool, ``log_probs``, float32, ``versions``, int32, all ``[T]``: as ``TokenSequence``;
- ``known.NAME``, ``[R]``: a value that the update had for each decision, such as ``known.advantages``, its advantage;
- ``images.*``: the media of prompts, where there are some: files one after the other, with their sizes and kinds.

The file's metadata say the format, the step, the rank, the temperature of the rollout and a digest of its vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sfumato.algorithms.advantages import Advantages
from sfumato.config.writing import write_atomically
from sfumato.data.identity import digest_value
from sfumato.data.media.document_media import MediaRefs, images_of
from sfumato.data.media.kinds import AudioFile, VideoFile
from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import RankBatch, SampleRequest
from sfumato.rollout.engines.base import FinishReason
from sfumato.rollout.text.tokens import TextRollout, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "rollouts"
"""In the run folder."""
FORMAT = "sfumato rollout 1"
FINISH_REASONS = get_args(FinishReason)
NAME = re.compile(r"step_(\d+)\.rank(\d+)\.safetensors")
_TOKEN_VALUES = "known."
_REWARDS = "rewards."
"""Beginnings of the names of tensors."""
_FILE_CLASSES = bytes, VideoFile, AudioFile
"""What the content of a medium's file is read as; ``images.kinds`` holds indices of this tuple. Images are bytes."""
_BY_TOKEN = ("token_ids", "drawn", "log_probs", "versions")


@dataclass(frozen=True)
class RolloutDump:
    """What a file holds."""

    rollout: TextRollout
    """B samples."""
    advantages: Advantages
    """Of these samples, without metrics."""
    step: int
    """The iteration, from 1."""
    temperature: float | None = None
    """That the tokens were drawn with, if the file says so."""
    vocabulary: str | None = None
    """``digest_vocabulary`` of the tokenizer that they are of, if the file says so."""
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """What the update computed for the R tokens that the policy drew: ``[R]`` by name."""

    @property
    def rank_batch(self) -> RankBatch:
        """What an update takes, with ``advantages``; for a dump that holds all samples of an iteration."""
        ids = {sample_id: row for row, sample_id in enumerate(self.rollout.sample_ids)}
        samples = cast(list[Sample], [None] * len(ids))  # what rewards saw is not in a dump
        return RankBatch([self.rollout], [samples], ids)


def dump_path(output_dir: Path, step: int, data_rank: int = 0) -> Path:
    """The file of a run folder for what a data-parallel rank learned from in iteration ``step``, from 1."""
    return Path(output_dir) / FOLDER / f"step_{step:06d}.rank{data_rank}.safetensors"


def digest_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of a tokenizer's tokens and their ids."""
    return digest_value(tokenizer.get_vocab())


def write_dump(
    path: Path,
    rollout: TextRollout,
    advantages: Advantages,
    token_values: Mapping[str, Tensor],
    step: int,
    data_rank: int = 0,
    temperature: float | None = None,
    vocabulary: str | None = None,
) -> None:
    """Writes one rank's samples of an iteration; the file is complete or absent.

    Args:
        path: of the file; its folder is created.
        rollout: B samples.
        advantages: of these samples.
        token_values: what the update computed for the R tokens that the policy drew: ``[R]`` by name.
        step: the iteration, from 1.
        data_rank: of the rank.
        temperature: that the tokens were drawn with.
        vocabulary: ``digest_vocabulary`` of the tokenizer that they are of.

    Raises:
        OSError: when the disk is full or fails.
    """
    requests = rollout.requests
    sequences = [sequence for sample in rollout.sequences for sequence in sample]
    tensors = {
        "sample_ids": torch.tensor([request.sample_id for request in requests], dtype=torch.int64),
        "group_ids": torch.tensor([request.group_id for request in requests], dtype=torch.int64),
        "prompt_ids": torch.tensor([request.prompt_id for request in requests], dtype=torch.int64),
        "is_first": torch.tensor([request.is_first for request in requests], dtype=torch.bool),
        "sample_versions": torch.tensor(rollout.versions, dtype=torch.int64),
        "advantages": advantages.values,
        "failed": advantages.failed,
        "no_spread": advantages.no_spread,
        "left_out": advantages.left_out,
        "num_sequences": torch.tensor([len(sample) for sample in rollout.sequences], dtype=torch.int64),
        "lengths": torch.tensor([len(sequence.token_ids) for sequence in sequences], dtype=torch.int64),
        "finish_reasons": torch.tensor(
            [FINISH_REASONS.index(sequence.finish_reason) for sequence in sequences], dtype=torch.uint8
        ),
    }
    for name in _BY_TOKEN:
        parts = [torch.from_numpy(np.asarray(getattr(sequence, name))) for sequence in sequences]
        tensors[name] = torch.cat(parts) if parts else torch.zeros(0)
    tensors |= _pack_images([sequence.images for sequence in sequences])
    if advantages.rewards is not None:
        tensors |= {"rewards": advantages.rewards.double()}
    tensors |= {f"{_REWARDS}{name}": values.double() for name, values in advantages.components.items()}
    tensors |= {f"{_TOKEN_VALUES}{name}": values for name, values in token_values.items()}
    tensors = {name: values.detach().cpu().contiguous() for name, values in tensors.items()}
    metadata = {"format": FORMAT, "step": str(step), "data_rank": str(data_rank)}
    metadata |= {} if temperature is None else {"temperature": repr(float(temperature))}
    metadata |= {} if vocabulary is None else {"vocabulary": vocabulary}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, metadata))


def read_dump(path: Path) -> RolloutDump:
    """Reads what ``write_dump`` wrote, equal to the bit.

    Raises:
        DataError: when the file is missing, damaged or no rollout; names it.
    """
    if not Path(path).is_file():
        raise DataError(f"{path} is missing: a run writes its rollouts with rollout.dump: true")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names: list[str] = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is no rollout: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    try:
        written = metadata.get("temperature")  # files of earlier versions lack it
        temperature = None if written is None else float(written)
        token_values = {
            name.removeprefix(_TOKEN_VALUES): values
            for name, values in tensors.items()
            if name.startswith(_TOKEN_VALUES)
        }
        rollout = _rollout_of(tensors)
        advantages = _advantages_of(tensors)
        if any(len(values) != sum(rollout.num_rows) for values in token_values.values()):
            raise ValueError(f"values of tokens that are not {sum(rollout.num_rows)}")
        vocabulary = metadata.get("vocabulary")
        return RolloutDump(rollout, advantages, int(metadata["step"]), temperature, vocabulary, token_values)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} does not hold together: {type(error).__name__} {error}") from error


def _rollout_of(tensors: dict[str, Tensor]) -> TextRollout:
    names = ("sample_ids", "group_ids", "prompt_ids", "is_first")
    by_request = zip(*(tensors[name].tolist() for name in names), strict=True)
    requests = [SampleRequest(sample, group, prompt, is_first=first) for sample, group, prompt, first in by_request]
    lengths = tensors["lengths"].tolist()
    counts = tensors["num_sequences"].tolist()
    split = [[part.numpy() for part in tensors[name].split(lengths)] if lengths else [] for name in _BY_TOKEN]
    reasons = [FINISH_REASONS[index] for index in tensors["finish_reasons"].tolist()]
    images = _unpack_images(tensors, len(lengths))
    sequences = [TokenSequence(*values) for values in zip(*split, reasons, images, strict=True)]
    if sum(counts) != len(sequences) or len(counts) != len(requests):
        raise ValueError(f"{len(sequences)} sequences of {len(counts)} samples, {len(requests)} requests")
    remaining = iter(sequences)
    by_sample = [[next(remaining) for _ in range(count)] for count in counts]
    return TextRollout(requests=requests, versions=tensors["sample_versions"].tolist(), sequences=by_sample)


def _pack_images(images: Sequence[MediaRefs | None]) -> dict[str, Tensor]:
    """Tensors with the files of the images and other media of sequences; none where no sequence has some.

    The answers of a group share one ``MediaRefs`` object, whose files are written once; so objects are compared by
    identity.
    """
    distinct = {id(entry): entry for entry in images if entry is not None}
    if not distinct:
        return {}
    media_lists = [list(entry.find()) for entry in distinct.values()]
    all_media = list(chain(*media_lists))
    kinds = [
        _FILE_CLASSES.index(type(medium)) if type(medium) in _FILE_CLASSES else 0 for medium in all_media
    ]  # an image is bytes or the path of its file, and both are read again as bytes
    files = [
        cast(VideoFile | AudioFile, medium).file if kind else cast(bytes | Path, medium)
        for kind, medium in zip(kinds, all_media, strict=True)
    ]
    contents = [file.read_bytes() if isinstance(file, Path) else file for file in files]
    index_of = {identity: index for index, identity in enumerate(distinct)}
    return {
        "images.of_sequences": torch.tensor([index_of.get(id(entry), -1) for entry in images], dtype=torch.int64),
        "images.counts": torch.tensor([len(media) for media in media_lists], dtype=torch.int64),
        "images.shapes": torch.from_numpy(np.concatenate([entry.shapes for entry in distinct.values()])),
        "images.kinds": torch.tensor(kinds, dtype=torch.int64),
        "images.sizes": torch.tensor([len(content) for content in contents], dtype=torch.int64),
        "images.files": torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8),
    }


def _unpack_images(tensors: dict[str, Tensor], count: int) -> list[MediaRefs | None]:
    """The images of each of ``count`` sequences; None of one without images."""
    if "images.files" not in tensors:
        return [None] * count
    parts = tensors["images.files"].split(tensors["images.sizes"].tolist())
    counts = tensors["images.counts"].tolist()
    kinds = tensors["images.kinds"].tolist() if "images.kinds" in tensors else [0] * len(parts)  # of older files
    first = 0
    distinct = []
    for num_files, shapes in zip(counts, tensors["images.shapes"].split(counts), strict=True):
        contents = [
            _FILE_CLASSES[kind](part.numpy().tobytes())
            for kind, part in zip(kinds[first : first + num_files], parts[first : first + num_files], strict=True)
        ]
        distinct.append(images_of(contents, shapes.numpy(), "an image of a rollout"))
        first += num_files
    return [distinct[index] if index >= 0 else None for index in tensors["images.of_sequences"].tolist()]


def _advantages_of(tensors: dict[str, Tensor]) -> Advantages:
    values = tensors["advantages"]
    if len(values) != len(tensors["sample_ids"]):
        raise ValueError(f"{len(values)} advantages of {len(tensors['sample_ids'])} samples")
    flags = tensors["failed"], tensors["no_spread"], tensors["left_out"]
    components = {
        name.removeprefix(_REWARDS): rewards for name, rewards in tensors.items() if name.startswith(_REWARDS)
    }
    return Advantages(values, *flags, metrics={}, rewards=tensors.get("rewards"), components=components)
