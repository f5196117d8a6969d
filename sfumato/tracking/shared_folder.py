"""Checks that all machines of a run share the run folder: each reads a token in it, and writes an answer beside it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sfumato.config.writing import open_new
from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.lock import make_with_parents

SEE_S = 5.0
"""Seconds until a file of another machine must be visible: network file systems cache that a file is absent."""
PREFIX = ".seen-"

Answer = tuple[str, str]
"""The name of a host, and what is wrong there; empty when nothing is."""


class Token:
    """A file that other machines look for, and the answers that they write beside it. Call ``close`` in the end."""

    def __init__(self, folder: Path) -> None:
        """Writes the token, and makes the folder if it is missing.

        Raises:
            OSError: when it cannot be written.
        """
        self.folder = folder
        self.name = f"{PREFIX}{secrets.token_hex(8)}"
        self._made_folders = make_with_parents(folder)
        with open_new(folder / self.name) as file:
            file.write(socket.gethostname().encode())

    def refusal(self, answers: Mapping[str, Answer]) -> str:
        """The problem with the folder by the answers of all ranks; empty when all of them share it.

        Args:
            answers: what ``answer_token`` returned, by the name of the rank.
        """
        complaint_by_rank = {who: text for who, (_, text) in answers.items() if text}
        rank_of_file = {f"{self.name}.{who}": who for who in answers if who not in complaint_by_rank}
        for name in sorted(_missing_files(self.folder, rank_of_file)):
            complaint_by_rank[rank_of_file[name]] = (
                f"writes to a folder of that name which {socket.gethostname()} does not see"
            )
        complaints = "; ".join(f"{answers[who][0]} ({who}) {text}" for who, text in complaint_by_rank.items())
        remedy = "take a folder that all machines share (sfumato doctor --folder DIR on each, docs/cluster.md)"
        return f"train.output_dir {self.folder.resolve()}: {complaints}: {remedy}" if complaint_by_rank else ""

    def close(self, *, undo: bool = False) -> None:
        """Removes the token and the answers; with ``undo``, also the folders that were made for the token."""
        for path in self.folder.glob(f"{self.name}*"):
            path.unlink(missing_ok=True)
        for folder in reversed(self._made_folders) if undo else ():
            folder.rmdir()


def answer_token(folder: Path, name: str, who: str) -> Answer:
    """Looks for a token, and writes an answer beside it; called on each machine of the run.

    Args:
        folder: of the run.
        name: of the token.
        who: the name of the rank, such as ``rank 3``, which is part of the answer's file name.
    """
    host = socket.gethostname()
    if _missing_files(folder, [name]):
        return host, "does not see what the first process of the run writes there"
    try:
        with open_new(folder / f"{name}.{who}") as file:
            file.write(host.encode())
    except OSError as error:
        return host, f"cannot write there: {error.strerror}"
    return host, ""


def check_shared(folder: Path, mesh: Mesh) -> None:
    """Checks that all machines share the run folder. Every rank must call it, before anything is written there.

    Raises:
        ConfigError: on every rank; names the hosts that do not share the folder.
    """
    if mesh.size == 1:
        return
    token = None
    problem = ""
    name = ""
    if mesh.is_first:
        try:
            token = Token(folder)
            name = token.name
        except OSError as error:
            problem = f"train.output_dir {folder} cannot be written to: {error.strerror}"
    name, problem = mesh.first((name, problem), among="world")
    if not problem:
        who = f"rank {mesh.rank}"
        answers = dict(mesh.gather((who, answer_token(folder, name, who)), over="world"))
        problem = mesh.first(token.refusal(answers) if token else "", among="world")
        if token is not None:
            token.close(undo=bool(problem))
    if problem:
        raise ConfigError(problem)


def _missing_files(folder: Path, names: Iterable[str]) -> set[str]:
    """Those of some files that are not in a folder, and do not appear there within ``SEE_S`` seconds.

    It lists the folder and does not ask for the files, since a network file system would cache that one is absent; once
    for all of them, since a listing is as long as there are ranks.
    """
    missing = set(names)
    deadline = time.monotonic() + SEE_S
    while True:
        with contextlib.suppress(OSError):  # no such folder, or none that may be read: it may still appear
            missing.difference_update(os.listdir(folder))
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)
