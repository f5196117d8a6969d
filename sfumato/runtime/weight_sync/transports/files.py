"""Transport through a folder that all processes see.

Safetensors files and a manifest with their sizes are written into a temporary folder, which is then renamed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sfumato.config.file_checks import read_json_object
from sfumato.config.writing import make_new_folder, remove, write_atomically
from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards
from sfumato.runtime.weight_sync import transports
from sfumato.runtime.weight_sync.buckets import NUM_SLOTS, Bucket, Source, empty_slots
from sfumato.runtime.weight_sync.transports import Ends, Settings

FOLDER = "weight_sync"
"""Within the run folder."""

MANIFEST = "manifest.json"

VISIBLE_S = 10.0
"""Seconds after which a network file system shows a folder that another node has renamed."""


class Sending(transports.Sending):
    """The actor's side. Only its first rank writes."""

    streams = False

    def __init__(self, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], ends: Ends) -> None:
        del ends
        if settings.folder is None:
            raise ConfigError("weights travel through files only with a folder: set train.output_dir")
        self.root = Path(settings.folder) / FOLDER
        self.mesh = mesh
        self.buckets = buckets
        self.slots: list[torch.Tensor] = []
        if mesh.is_first:
            for leftover in self.root.glob("version_*"):  # of a run that was killed
                remove(leftover)
            self.slots = empty_slots(buckets)

    def send(self, version: int, source: Source) -> str:
        """Writes the buckets of a version; returns its folder, on every rank."""
        try:
            written = self._write(version, source)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"version {version} could not be written into {self.root}: {error}") from error
        return self.mesh.first(written, among="world")

    def _write(self, version: int, source: Source) -> str | None:
        """Gathers and writes all buckets. Returns the folder on the first rank; the others only gather."""
        final = self.root / f"version_{version}"
        building = final.with_suffix(".tmp")
        if not self.slots:
            for bucket in self.buckets:
                source.gather(bucket, None)
            return None
        make_new_folder(building)
        files: dict[str, int] = {}
        writing: Future[None] | None = None
        with ThreadPoolExecutor(1) as thread:
            for number, bucket in enumerate(self.buckets):
                slot = self.slots[number % NUM_SLOTS]
                source.gather(bucket, slot)  # while the one before is written
                if writing is not None:
                    writing.result()
                path = building / f"bucket_{number:05d}.safetensors"
                writing = thread.submit(_write_bucket, bucket, slot, path, files)
            if writing is not None:
                writing.result()
        # The manifest is written last and the folder renamed after it: what receivers see is complete.
        text = json.dumps({"version": version, "files": files}, indent=1)
        write_atomically(building / MANIFEST, text.encode())
        remove(final)
        building.rename(final)
        return str(final.resolve())

    def release(self, version: int) -> None:
        """Removes a version, when all ranks of this role have come: they may be the receivers, too."""
        self.mesh.barrier()
        if self.slots:
            shutil.rmtree(self.root / f"version_{version}")

    def close(self) -> None:
        """Removes the folder with all versions."""
        if self.slots:
            shutil.rmtree(self.root, ignore_errors=True)


def _write_bucket(bucket: Bucket, memory: torch.Tensor, path: Path, files: dict[str, int]) -> None:
    """Writes a bucket's tensors into a file, and adds its size to ``files``, by its name."""
    # Copies, since safetensors refuses tensors that share memory.
    save_file({name: tensor.clone() for name, tensor in bucket.tensors(memory)}, path)
    files[path.name] = path.stat().st_size


class Receiving(transports.Receiving):
    """The sampler's side."""

    def __init__(
        self, access: None, settings: Settings, mesh: Mesh, buckets: Sequence[Bucket], shards: Shards | None
    ) -> None:
        del access, settings, mesh, shards
        self.names = [item.name for bucket in buckets for item in bucket.items]

    def receive_tensors(self, version: int, delivery: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time."""
        folder = Path(delivery)
        deadline = time.monotonic() + VISIBLE_S
        while not (folder / MANIFEST).is_file():
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"version {version}: {folder} was written by the actor, but cannot be seen here: train.output_dir "
                    "must lie on a file system that all nodes share; or take runtime.weight_sync broadcast"
                )
            time.sleep(0.1)
        received_names: set[str] = set()
        try:
            num_bytes_by_file = read_json_object(folder / MANIFEST)["files"]
            for name, num_bytes in num_bytes_by_file.items():
                if (folder / name).stat().st_size != num_bytes:
                    raise WeightSyncError(f"version {version}: {folder / name} is not as long as it was written")
                with safe_open(folder / name, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 (it is no dict)
                        received_names.add(key)
                        yield key, file.get_tensor(key)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise WeightSyncError(f"version {version}: {folder} is damaged: {error}") from error
        if lacking := [name for name in self.names if name not in received_names]:
            raise WeightSyncError(f"version {version}: {folder} lacks {len(lacking)} weights: {', '.join(lacking[:3])}")
