"""Rows and transforms whose tokens say where they come from, and meshes of ranks that are not there."""

import json

import numpy as np
import torch

from sfumato.config.sections import EpochTrainConfig
from sfumato.data.files.sources import Sources
from sfumato.data.loader import IndexLoader
from sfumato.data.text.document import Document, TextSample
from sfumato.errors import DataError, OverlongError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh


class ListRows:
    """Rows that are given."""

    def __init__(self, rows, name="rows"):
        self.rows, self.name = rows, name

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def describe(self, index):
        return f"{self.name}, row {index + 1}"

    def fingerprint(self):
        return json.dumps([self.name, self.rows])


class NumberTransform:
    """A row ``{"number": 7, "lengths": [3, 2]}`` gives samples of 3 and 2 tokens, which begin with 7000 and 7001."""

    def __init__(self, documents_per_sample=1, fingerprint="numbers"):
        self.documents_per_sample, self.fingerprint = documents_per_sample, fingerprint
        self.seen = []

    def __call__(self, row, where):
        self.seen.append(row["number"])
        if "bad" in row:
            raise (OverlongError if row["bad"] == "overlong" else DataError)(f"{where}: {row['bad']}")
        return [
            TextSample(
                tuple(document(1000 * row["number"] + piece, length + 2 * k) for k in range(self.documents_per_sample))
            )
            for piece, length in enumerate(row["lengths"])
        ]


def document(first, length):
    ids = np.arange(first, first + length, dtype=np.int32)
    return Document(ids, np.arange(length) % 3 > 0)


def rows_of(lengths, first=0, name="rows"):
    """One row for each entry: a length, several, or the reason why it is broken."""
    made = []
    for number, length in enumerate(lengths, start=first):
        if isinstance(length, str):
            made.append({"number": number, "bad": length})
        else:
            made.append({"number": number, "lengths": [length] if isinstance(length, int) else list(length)})
    return ListRows(made, name)


def random_lengths(count, seed=0, longest=16):
    return np.random.default_rng(seed).integers(2, longest + 1, count).tolist()


def one_source(lengths):
    return Sources(["rows"], [rows_of(lengths)], None)


def weighted(parts, weights, level="sample", stopping="first_exhausted"):
    """Sources whose rows are numbered from 0, 1000, 2000, ..."""
    rows = [rows_of(part, 1000 * source, f"rows{source}") for source, part in enumerate(parts)]
    return Sources([f"s{source}" for source in range(len(parts))], rows, weights, level, stopping)


class AloneMesh(Mesh):
    """One rank of a layout whose others are not there."""

    def barrier(self):
        pass


def mesh_of(rank=0, ranks=1, **axes):
    return AloneMesh(Layout(dp_shard=ranks, **axes), torch.device("cpu"), rank)


def index_loader(num_rows, global_batch, micro_batch, seed=0, steps=None, epochs=1, rank=0, ranks=1):
    """The loader of one of several ranks."""
    train = EpochTrainConfig(
        output_dir="nowhere",
        global_batch_size=global_batch,
        micro_batch_size=micro_batch,
        seed=seed,
        max_steps=steps,
        num_train_epochs=epochs,
    )
    return IndexLoader(num_rows, train, mesh_of(rank, ranks))
