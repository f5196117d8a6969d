"""A folder that is replaced is never missing: in one system call, or put back by the next start."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sfumato.tracking import atomic_folders as envelope
from sfumato.tracking.atomic_folders import exchange, replace_folder, restore_folder
from tests.faults.test_disk_full import make as checkpointer_of

KILLED = 77


def fill(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "weights").write_text(text, encoding="utf-8")


def content(folder: Path) -> str:
    return (folder / "weights").read_text(encoding="utf-8")


def in_child(act: Callable[[], object]) -> int:
    """Runs in a process of its own and returns its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        act()
    finally:
        os._exit(1)


def killed_at_rename(number: int) -> Callable[..., None]:
    """``os.replace`` in whose place the process dies the given time that it is called."""
    rename, calls = os.replace, []

    def replace(*names: object) -> None:
        calls.append(names)
        if len(calls) == number:
            os._exit(KILLED)
        rename(*names)

    return replace


@pytest.fixture
def kernel_that_cannot(monkeypatch):
    monkeypatch.setattr(envelope, "exchange", lambda left, right: False)


def test_the_kernel_exchanges_two_folders_in_one_call(tmp_path, monkeypatch):
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        fill(name)(tmp_path / name)
    if not exchange(tmp_path / "left", tmp_path / "right"):
        pytest.skip("this kernel or file system cannot exchange names")
    assert (content(tmp_path / "left"), content(tmp_path / "right")) == ("right", "left")
    with pytest.raises(OSError, match="left") as error:
        exchange(tmp_path / "left", tmp_path / "nowhere")
    assert error.value.errno == errno.ENOENT

    replace_folder(tmp_path / "out", fill("first"))
    renamed = []
    monkeypatch.setattr(os, "replace", lambda *names: renamed.append(names))
    replace_folder(tmp_path / "out", fill("second"))
    assert content(tmp_path / "out") == "second" and not renamed
    assert {path.name for path in tmp_path.iterdir()} == {"left", "right", "out"}


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_kill_between_two_renames_left_is_put_back(tmp_path, monkeypatch, kernel_that_cannot, number):
    folder = tmp_path / "hf_ckpt"
    replace_folder(folder, fill("first"))
    with monkeypatch.context() as dying:
        dying.setattr(os, "replace", killed_at_rename(number))
        assert in_child(lambda: replace_folder(folder, fill("second"))) == KILLED
    assert folder.exists() == (number == 1)
    restore_folder(folder)
    assert content(folder) == ("first" if number == 1 else "second")
    restore_folder(folder)
    replace_folder(folder, fill("third"))
    assert content(folder) == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["hf_ckpt"]


def test_a_kill_after_both_renames_leaves_nothing_in_the_way(tmp_path, monkeypatch, kernel_that_cannot):
    folder = tmp_path / "hf_ckpt"
    replace_folder(folder, fill("first"))
    with monkeypatch.context() as dying:
        dying.setattr(envelope, "flush", lambda path: path == tmp_path and os._exit(KILLED))
        dying.setattr(envelope.shutil, "rmtree", lambda *_, **__: None)
        assert in_child(lambda: replace_folder(folder, fill("second"))) == KILLED
    assert len(list(tmp_path.iterdir())) == 2
    restore_folder(folder)
    assert content(folder) == "second" and [path.name for path in tmp_path.iterdir()] == ["hf_ckpt"]


def test_an_export_that_fails_leaves_the_one_before_and_no_remains(tmp_path):
    folder = tmp_path / "hf_ckpt"
    replace_folder(folder, fill("first"))

    def fail(building: Path) -> None:
        fill("half")(building)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_folder(folder, fail)
    assert content(folder) == "first" and [path.name for path in tmp_path.iterdir()] == ["hf_ckpt"]


def test_folders_of_somebody_else_with_like_names_are_left_alone(tmp_path):
    for name in ("out.old", "out.tmp"):
        (tmp_path / name).mkdir()
        fill(name)(tmp_path / name)
    for text in ("first", "second"):
        replace_folder(tmp_path / "out", fill(text))
    assert {path.name: content(path) for path in tmp_path.iterdir()} == {
        "out": "second",
        "out.old": "out.old",
        "out.tmp": "out.tmp",
    }


def test_the_next_start_puts_the_export_back(tmp_path, monkeypatch, kernel_that_cannot):
    folder = tmp_path / "hf_ckpt"
    replace_folder(folder, fill("first"))
    with monkeypatch.context() as dying:
        dying.setattr(os, "replace", killed_at_rename(2))
        assert in_child(lambda: replace_folder(folder, fill("second"))) == KILLED
    checkpointer_of(tmp_path)
    assert content(folder) == "second"
