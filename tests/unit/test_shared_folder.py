"""A run folder that not all machines see is found before the first step, and named with the machine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sfumato.errors import ConfigError
from sfumato.tracking import shared_folder
from sfumato.tracking.shared_folder import Token, answer_token, check_shared


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "SEE_S", 0.3)


def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    token = Token(tmp_path / "runs" / "one")
    answers = {who: answer_token(token.folder, token.name, who) for who in ("rank 0", "rank 1")}
    assert token.refusal(answers) == ""
    token.close()
    assert token.folder.is_dir() and not list(token.folder.iterdir())


def test_a_machine_that_does_not_see_the_folder_or_another_one_is_named(tmp_path: Path) -> None:
    token = Token(tmp_path / "runs" / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / token.name).touch()  # the machine sees the token, and its own answer is not seen
    answers = {
        "rank 1": ("bravo", answer_token(tmp_path / "none", token.name, "rank 1")[1]),
        "rank 2": ("carol", answer_token(tmp_path / "other", token.name, "rank 2")[1]),
        "rank 3": answer_token(token.folder, token.name, "rank 3"),
    }
    text = token.refusal(answers)
    assert text.startswith(f"train.output_dir {tmp_path}/runs/one: bravo (rank 1) does not see what the first process")
    assert "; carol (rank 2) writes to a folder of that name which" in text and "rank 3" not in text
    assert "sfumato doctor --folder" in text
    token.close(undo=True)
    assert not (tmp_path / "runs").exists(), "a refused start changes nothing"


class Together:
    """A mesh of threads."""

    def __init__(self, size: int) -> None:
        self.size, self._values, self._barrier = size, [None] * size, threading.Barrier(size, timeout=20)

    def rank(self, rank: int) -> Any:
        together = self

        class Mesh:
            size, is_first = together.size, rank == 0

            def gather(self, value: Any, over: str) -> list[Any]:
                together._values[rank] = value
                together._barrier.wait()
                values = list(together._values)
                together._barrier.wait()
                return values

            def first(self, value: Any, among: str) -> Any:
                return self.gather(value, among)[0]

        Mesh.rank = rank
        return Mesh()


def check_on(folders: list[Path]) -> list[str]:
    """What each rank says, with its folder; empty for nothing."""
    together = Together(len(folders))

    def check(rank: int) -> str:
        try:
            check_shared(folders[rank], together.rank(rank))
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(check, range(len(folders))))


def test_all_ranks_refuse_what_one_does_not_see(tmp_path: Path) -> None:
    assert check_on([tmp_path / "run"] * 3) == [""] * 3
    said = check_on([tmp_path / "new", tmp_path / "new", tmp_path / "elsewhere"])
    assert len(set(said)) == 1 and "(rank 2) does not see" in said[0] and "rank 1" not in said[0]
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_said_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = check_on([tmp_path / "file" / "run"] * 2)
    assert len(set(said)) == 1 and "cannot be written to" in said[0]
