"""Checkpoints that somebody made up, with a manifest that fits: one clear line, no program, no unbounded memory."""

import dataclasses
import hashlib
import json
import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from sfumato.checkpoint import state as state_module
from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import CheckpointError
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import verify_checkpoint

ALONE = Mesh(Layout(), torch.device("cpu"))


def made() -> TrainState:
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    optimizer, schedule = build_optimizer(module, DitTrainConfig(output_dir="unused"), 5)
    return TrainState(module, optimizer, schedule, step=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that is whole."""
    saving = Saving(tmp_path, made(), ALONE)
    saving.write()
    saving.finish(keep=1)
    return tmp_path / "global_step_1"


def fit_manifest(folder: Path) -> None:
    """Lists the files as they are now."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "files": files}))
    verify_checkpoint(folder)


def refusal(folder: Path) -> str:
    """The one line with which the checkpoint is refused, though its manifest fits."""
    fit_manifest(folder)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as caught:
        state_module.load_state(made(), StoredCheckpoint(folder), ALONE)
    assert "\n" not in str(caught.value)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    return str(caught.value)


def test_what_is_not_changed_loads(folder: Path) -> None:
    fit_manifest(folder)
    state_module.load_state(made(), StoredCheckpoint(folder), ALONE)


def of_weight(metadata: Metadata, **changes: Any) -> Metadata:
    """Says something else of the weight."""
    entries = metadata.state_dict_metadata
    return dataclasses.replace(
        metadata,
        state_dict_metadata=entries | {"model/weight": dataclasses.replace(entries["model/weight"], **changes)},
    )


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def at_weight(metadata: Metadata, **changes: Any) -> Metadata:
    """Says that the weight lies somewhere else."""
    places = {
        index: dataclasses.replace(info, **changes) if index.fqn == "model/weight" else info
        for index, info in metadata.storage_data.items()
    }
    return dataclasses.replace(metadata, storage_data=places)


HUGE = (10**9, 10**6)
CRAFTED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "another file": (lambda m: at_weight(m, relative_path="../../secret"), "is said to lie in '../../secret'"),
    "a file of the system": (lambda m: at_weight(m, relative_path="/etc/passwd"), "is said to lie in '/etc/passwd'"),
    "behind the end": (lambda m: at_weight(m, offset=10**12), "is said to lie beyond the end of __0_0.distcp"),
    "below the start": (lambda m: at_weight(m, offset=-8), "is said to lie beyond the end"),
    "an endless length": (lambda m: at_weight(m, length=2**62), "is said to lie beyond the end"),
    "somewhere else in the file": (lambda m: at_weight(m, offset=3), "its files do not hold what its .metadata says"),
    "packed": (lambda m: at_weight(m, transform_descriptors=["zstd"]), "is packed as ['zstd']"),
    "a gigantic shape": (
        lambda m: of_weight(m, size=torch.Size(HUGE), chunks=[box((0, 0), HUGE)]),
        "is larger than all files together",
    ),
    "a shape below zero": (lambda m: of_weight(m, size=(-4, 3)), "has dtype torch.float32 and shape (-4, 3)"),
    "a box outside": (lambda m: of_weight(m, chunks=[box((1, 0), (3, 4))]), "lies outside of its shape (3, 4)"),
    "a hole": (lambda m: of_weight(m, chunks=[box((0, 0), (2, 4))]), "its chunks hold 8 elements of 12"),
    "a box twice": (lambda m: of_weight(m, chunks=[box((0, 0), (3, 4))] * 2), "its chunks hold 24 elements of 12"),
    "a box over another": (
        lambda m: of_weight(m, chunks=[box((0, 0), (2, 4)), box((1, 0), (1, 4))]),
        "model/weight of shape (3, 4): its chunks at (0, 0) and (1, 0) overlap",
    ),
    "the same box, and a hole": (
        lambda m: of_weight(m, chunks=[box((0, 0), (1, 4)), box((2, 0), (1, 4)), box((2, 0), (1, 4))]),
        "its chunks at (2, 0) and (2, 0) overlap",
    ),
    "another shape": (
        lambda m: of_weight(m, size=torch.Size((4, 3)), chunks=[box((0, 0), (4, 3))]),
        "has shape (4, 3)",
    ),
    "no place": (lambda m: dataclasses.replace(m, storage_data={}), "its files do not hold what its .metadata says"),
    "no tensor": (lambda m: dataclasses.replace(m, state_dict_metadata={}), "it has no 'model/bias'"),
    "no description": (lambda m: dataclasses.replace(m, state_dict_metadata={"model/weight": 3}), "is int"),
    "a number": (lambda m: 3, "it holds a int"),
    "a place": (lambda m: _StorageInfo("x", 0, 1), "it holds a _StorageInfo"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_metadata_that_does_not_fit_the_files(folder: Path, name: str) -> None:
    change, message = CRAFTED[name]
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    assert message in refusal(folder)


BYTES = {
    "empty": b"",
    "junk": b"\xff" * 100,
    "half": b"\x80\x04\x95",
    "a place for two thousand million objects": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a text of an exabyte": b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "lists in lists": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a class that is changed": (
        b"\x80\x04\x8c\x29torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x08__init__Ns\x86b."
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_metadata(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(BYTES[name])
    message = refusal(folder)
    assert "was not written by torch" in message or "does not describe the files" in message
    assert callable(Metadata.__init__)


VALUES = {
    "no JSON": ("{", "is not valid JSON"),
    "deep": ("[" * 100_000, "is not valid JSON"),
    "a list": ("[]", "not a JSON object"),
    "nothing": ("{}", "step is 'None', which no run can have saved"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_none(folder: Path, name: str) -> None:
    (folder / "state.json").write_text(VALUES[name][0])
    assert VALUES[name][1] in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", -1), ("step", True), ("step", "1"), ("schedule_steps", None), ("optimizer", []), ("random", 3)],
)
def test_values_of_another_kind(folder: Path, key: str, value: Any) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"{key} is '{value}', which no run can have saved" in refusal(folder)


@pytest.mark.parametrize("value", [{}, {"python": [3, [1], None], "numpy": {}}, {"python": 1}])
def test_random_generators_that_cannot_stand_there(folder: Path, value: Any) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"random": value}))
    assert "random generators cannot be put in place" in refusal(folder)


def test_pipes_and_paths_in_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "/etc/passwd"):
        (folder / "manifest.json").write_text(json.dumps({"files": {name: {"bytes": 1, "sha256": ""}}}))
        with pytest.raises(CheckpointError, match="which is no file of the checkpoint"):
            verify_checkpoint(folder)
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_checkpoint(folder)
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")
    with pytest.raises(CheckpointError, match=r"state\.json is a named pipe, not a file"):
        StoredCheckpoint(folder)
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"state\.json is a device, not a file"):
        StoredCheckpoint(folder)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_said(folder: Path) -> None:
    stored = StoredCheckpoint(folder)
    shutil.rmtree(folder)
    for read in (lambda: StoredCheckpoint(folder), lambda: stored.read_whole({"weight": "model/weight"})):
        with pytest.raises(CheckpointError, match=r"was removed meanwhile; .* train\.max_checkpoints"):
            read()


def test_a_pickle_among_the_tensors_does_not_run(folder: Path, tmp_path: Path) -> None:
    """In the place of the weight lies a pickle of the same length that would make a file."""
    mark, path = tmp_path / "mark", folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    harm = b"cbuiltins\nopen\n(V" + str(mark).encode() + b"\nVw\ntR."
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    data = folder / places["model/weight"].relative_path
    content = bytearray(data.read_bytes())
    content += harm
    data.write_bytes(content)
    path.write_bytes(pickle.dumps(at_weight(metadata, offset=len(content) - len(harm), length=len(harm))))
    assert "its files do not hold what its .metadata says" in refusal(folder)
    assert not mark.exists()
    pickle.loads(harm)
    assert mark.exists()


def nested(levels: int, key: bytes) -> bytes:
    """A pickle of a mapping with a key that holds itself twice in each level; ``key`` is what makes it of the tuple."""
    return b"\x80\x02}(K\x01" + b"2\x86" * levels + key + b"K\x01u."


INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
NESTED = {
    "a key": nested(60, b""),
    "a key by itself": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s.",
    "a place within a place": b"\x80\x02}" + INDEX + b")\x81}X\x03\x00\x00\x00fqnK\x01" + b"2\x86" * 60 + b"sbK\x01s.",
    "an argument": b"\x80\x02ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x01"
    + b"2\x86" * 60
    + b"\x85R.",
    "an argument of a new object": b"\x80\x02ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x01"
    + b"2\x86" * 60
    + b"\x85\x81.",
    "a set": b"\x80\x04\x8f(K\x01" + b"2\x86" * 60 + b"\x90.",
    "an object of an old kind": b"(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x01"
    + b"2\x86" * 60
    + b"o.",
    "a mapping of an old kind": b"\x80\x02(K\x01" + b"2\x86" * 60 + b"K\x01d.",
}


@pytest.mark.parametrize("name", NESTED)
def test_what_would_take_two_to_the_sixty_steps_to_hash(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(NESTED[name])
    assert "was not written by torch: it " in refusal(folder) or "nested" in refusal(folder)
