"""Whether all machines of a run see one and the same run folder: each reads a token there, and writes one."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from sfumato.config.writing import open_new
from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.lock import make_with_parents

SEE_S = 5.0
"""Seconds after which what another machine has written must be there: network file systems remember what was not."""
PREFIX = ".seen-"

Answer = tuple[str, str]
"""Host, and what is wrong there; empty when nothing is."""


class Token:
    """A file that other machines look for, and what they leave beside it. Take ``close`` in the end."""

    def __init__(self, folder: Path) -> None:
        """Writes it, and the folder where there is none.

        Raises:
            OSError: it cannot be written.
        """
        self.folder = folder
        self.name = f"{PREFIX}{secrets.token_hex(8)}"
        self._made_folders = make_with_parents(folder)
        with open_new(folder / self.name) as file:
            file.write(socket.gethostname().encode())

    def refusal(self, answers: Mapping[str, Answer]) -> str:
        """What is wrong with the folder, by what those who were asked have answered; empty when all see it.

        Args:
            answers: of ``answer``, by who gave it.
        """
        complaint_by_rank = {who: text for who, (_, text) in answers.items() if text}
        for who in answers:
            if who not in complaint_by_rank and not _appears(self.folder, f"{self.name}.{who}"):
                complaint_by_rank[who] = f"writes to a folder of that name which {socket.gethostname()} does not see"
        complaints = "; ".join(f"{answers[who][0]} ({who}) {text}" for who, text in complaint_by_rank.items())
        remedy = "take a folder that all machines share (sfumato doctor --folder DIR on each, docs/cluster.md)"
        return f"train.output_dir {self.folder.resolve()}: {complaints}: {remedy}" if complaint_by_rank else ""

    def close(self, *, undo: bool = False) -> None:
        """Removes what was written; with ``undo`` the folder, too, if it was made here."""
        for path in self.folder.glob(f"{self.name}*"):
            path.unlink(missing_ok=True)
        for folder in reversed(self._made_folders) if undo else ():
            folder.rmdir()


def answer(folder: Path, name: str, who: str) -> Answer:
    """Looks for a token, and leaves an answer beside it. On each machine of the run.

    Args:
        folder: of the run.
        name: of the token.
        who: asks to be told apart, such as ``rank 3``.
    """
    host = socket.gethostname()
    if not _appears(folder, name):
        return host, "does not see what the first process of the run writes there"
    try:
        with open_new(folder / f"{name}.{who}") as file:
            file.write(host.encode())
    except OSError as error:
        return host, f"cannot write there: {error.strerror}"
    return host, ""


def check_shared(folder: Path, mesh: Mesh) -> None:
    """Every rank calls it, before anything is written that the others must see.

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
        answers = dict(mesh.gather((who, answer(folder, name, who)), over="world"))
        problem = mesh.first(token.refusal(answers) if token else "", among="world")
        if token is not None:
            token.close(undo=bool(problem))
    if problem:
        raise ConfigError(problem)


def _appears(folder: Path, name: str) -> bool:
    """Whether a file is there, or comes soon."""
    deadline = time.monotonic() + SEE_S
    while True:
        try:
            if name in os.listdir(folder):
                return True
        except OSError:  # no such folder, or none that may be read: it may still appear
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
