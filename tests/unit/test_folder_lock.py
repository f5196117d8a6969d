"""The lock of a run folder: one holder, also of those that start at once; a dead one's is taken over, and said."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sfumato.errors import FolderError
from sfumato.tracking import lock as module
from sfumato.tracking.lock import NAME, FolderLock, lock_folder, release_locks

HOLD = """
import sys, time
from pathlib import Path
from sfumato.tracking.lock import lock_folder
lock_folder(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release_locks()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(module, "STALE_S", 1.0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds ``tmp_path/run``."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def lock_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / NAME).read_text())


def elsewhere(folder: Path) -> None:
    """Makes the lock in a folder look as if its process ran on another machine."""
    path = folder / NAME
    path.write_text(json.dumps({**lock_of(folder), "host": "far", "place": "another machine"}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_lock_says_who_holds_it_and_is_gone_afterwards(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "a/b/run", print)
    result = lock_of(tmp_path / "a/b/run")
    assert result["pid"] == os.getpid() and result["host"] and result["since"] and result["born"]
    assert names(tmp_path / "a/b/run") == [NAME]
    lock.check()
    lock.release()
    assert names(tmp_path) == [], "folders that were made for the lock alone"


def test_a_folder_with_files_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock_folder(tmp_path / "run", print).release()
    lock = lock_folder(tmp_path / "run", print)
    (tmp_path / "run/mark").touch()
    lock.release()
    assert names(tmp_path / "run") == ["mark"]


def test_a_living_holder_is_named(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    before = (tmp_path / "run" / NAME).read_bytes()
    with pytest.raises(FolderError) as caught:
        lock_folder(tmp_path / "run", print)
    text = str(caught.value)
    for part in (str(tmp_path / "run"), f"process {holder.pid} on ", "since ", "train.output_dir", f"remove {NAME}"):
        assert part in text
    assert "\n" not in text and caught.value.exit_code == 2
    assert names(tmp_path / "run") == [NAME] and (tmp_path / "run" / NAME).read_bytes() == before


def test_a_lock_that_a_kill_left_is_taken_over_and_that_is_said(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)  # nobody has waited for it yet: the system still knows the id
    while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    said: list[str] = []
    lock_folder(tmp_path / "run", said.append)
    assert lock_of(tmp_path / "run")["pid"] == os.getpid()
    assert len(said) == 1 and f"process {holder.pid}" in said[0] and "taken over" in said[0]
    assert names(tmp_path / "run") == [NAME]


def test_what_another_took_over_meanwhile_is_not_taken_from_it(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a dead process's lock and taking it."""
    look, looks = module._wait_for_death, []

    def late(*args: object) -> object:
        looks.append(look)
        if len(looks) == 1:
            dead = replace(module.Owner(**lock_of(tmp_path / "run")), token="dead")  # type: ignore[arg-type]
            return (dead, 1.0), "it is dead"
        return look(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_wait_for_death", late)
    with pytest.raises(FolderError, match=f"process {holder.pid} on "):
        lock_folder(tmp_path / "run", print)
    assert len(looks) == 2


def test_another_process_with_the_same_id_is_not_the_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "run" / NAME
    path.write_text(json.dumps({**lock_of(tmp_path / "run"), "born": "1"}))
    said: list[str] = []
    lock_folder(tmp_path / "run", said.append)
    assert "taken over" in said[0]


@pytest.mark.usefixtures("quick")
def test_a_holder_on_another_machine_that_renews_its_lock_is_alive(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "run", print)
    elsewhere(tmp_path / "run")
    started, stop = time.monotonic(), time.monotonic() + 30
    renewing = multiprocessing.get_context("fork").Process(target=renew, args=(tmp_path / "run" / NAME, stop))
    renewing.start()
    said: list[str] = []
    with pytest.raises(FolderError, match=r"process .* on far"):
        lock_folder(tmp_path / "run", said.append)
    renewing.kill()
    renewing.join()
    assert time.monotonic() - started < 10
    assert len(said) == 1 and "waiting for its next sign of life" in said[0]
    lock.abandon()


def renew(path: Path, stop: float) -> None:
    while time.monotonic() < stop:
        os.utime(path)
        time.sleep(0.05)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ahead_s", [0, 3600])  # of a clock that was set back
def test_a_lock_of_another_machine_that_is_not_renewed_is_taken_over(tmp_path: Path, ahead_s: float) -> None:
    lock_folder(tmp_path / "run", print).abandon()
    elsewhere(tmp_path / "run")
    os.utime(tmp_path / "run" / NAME, (time.time() + ahead_s,) * 2)
    said: list[str] = []
    lock_folder(tmp_path / "run", said.append)
    assert "waiting" in said[0] and "far" in said[1] and "not renewed it for" in said[1] and "taken over" in said[1]
    assert lock_of(tmp_path / "run")["pid"] == os.getpid()


@pytest.mark.usefixtures("quick")
def test_the_lock_is_renewed_while_it_is_held(tmp_path: Path) -> None:
    lock_folder(tmp_path / "run", print)
    path = tmp_path / "run" / NAME
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 20
    while path.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - path.stat().st_mtime < 20


@pytest.mark.usefixtures("quick")
def test_a_file_that_names_nobody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).touch()  # of a machine that died between making and filling it
    said: list[str] = []
    lock_folder(tmp_path / "run", said.append)
    assert "did not write its name" in said[-1]


@pytest.mark.parametrize("take", [lambda path: path.unlink(), lambda path: elsewhere(path.parent)])
def test_a_holder_that_lost_its_lock_is_told(tmp_path: Path, take: Callable[[Path], None]) -> None:
    lock = lock_folder(tmp_path / "run", print)
    path = tmp_path / "run" / NAME
    take(path)
    if path.exists():
        path.write_text(path.read_text().replace(lock.owner.token, "another"))
    with pytest.raises(FolderError, match="two runs do not write into one folder"):
        lock.check()
    lock.release()
    assert path.exists() == ("another" in (path.read_text() if path.exists() else "")), "another's lock stays"


def test_a_run_of_this_process_that_ended_with_an_error_is_no_other_run(tmp_path: Path) -> None:
    first, said = lock_folder(tmp_path / "run", print), []
    second = lock_folder(tmp_path / "run", said.append)
    first.release()
    second.check()
    assert said == []


def test_a_fork_does_not_give_its_parents_folder_back(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "run", print)
    child = multiprocessing.get_context("fork").Process(target=release_locks)
    child.start()
    child.join()
    lock.check()


def test_a_run_that_was_killed_still_says_so_where_its_folder_is_moved_to(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    os.utime(tmp_path / "run" / NAME, (1e9, 1e9))
    before = lock_of(tmp_path / "run")
    lock = lock_folder(tmp_path / "run", print)
    lock.move_folder(tmp_path / "run.1")
    assert lock_of(tmp_path / "run.1") == before and (tmp_path / "run.1" / NAME).stat().st_mtime == 1e9
    assert names(tmp_path / "run.1") == names(tmp_path / "run") == [NAME]
    lock.check()
    lock.move_folder(tmp_path / "run.2")
    assert names(tmp_path / "run.2") == [], "the dead process was not in this one"


def test_a_folder_that_is_moved_leaves_a_held_one(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "run", print)
    (tmp_path / "run/mark").touch()
    lock.move_folder(tmp_path / "run.1")
    assert names(tmp_path / "run.1") == ["mark"] and names(tmp_path / "run") == [NAME]
    lock.check()


@pytest.mark.parametrize(
    ("stale", "without_links"),
    [
        pytest.param(False, False, id="free, links", marks=pytest.mark.slow),
        pytest.param(False, True, id="free, no links", marks=pytest.mark.slow),
        pytest.param(True, False, id="stale, links"),
        pytest.param(True, True, id="stale, no links", marks=pytest.mark.slow),
    ],
)
def test_of_those_that_start_at_once_exactly_one_wins(tmp_path: Path, stale: bool, without_links: bool) -> None:
    context = multiprocessing.get_context("fork")  # starts at once, since nothing has to be imported
    for number in range(10):
        folder = tmp_path / f"run{number}"
        if stale:
            lock_folder(folder, print).abandon()
            path = folder / NAME
            path.write_text(json.dumps({**lock_of(folder), "born": "1"}))
        barrier, results = context.Barrier(6), context.SimpleQueue()
        racers = [context.Process(target=race, args=(folder, barrier, results, without_links)) for _ in range(6)]
        for racer in racers:
            racer.start()
        outcomes = [results.get() for _ in racers]
        for racer in racers:
            racer.join()
        assert sorted(outcomes) == ["held"] + ["refused"] * 5, outcomes
        assert names(folder) == [NAME]


def race(folder: Path, barrier: object, results: object, without_links: bool) -> None:
    if without_links:
        os.link = no_link  # type: ignore[assignment]
    barrier.wait()  # type: ignore[attr-defined]
    lock: FolderLock | None = None
    try:
        lock = lock_folder(folder, lambda _text: None)
        results.put("held")  # type: ignore[attr-defined]
    except FolderError as error:
        results.put("refused" if "in use by another run" in str(error) else repr(error))  # type: ignore[attr-defined]
    except BaseException as error:
        results.put(repr(error))  # type: ignore[attr-defined]
    barrier.wait()  # type: ignore[attr-defined]
    if lock is not None:
        lock.check()


def no_link(*_: object) -> None:
    raise PermissionError("this file system has no hard links")


@pytest.mark.parametrize("kind", ["file", "too long"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    folder = {"file": tmp_path / "file", "too long": tmp_path / ("x" * 300)}[kind]
    with pytest.raises(FolderError, match=r"^train\.output_dir .* cannot be made: [^\n]*$"):
        lock_folder(folder, print)


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_link_whose_disk_is_not_there_is_named(tmp_path: Path, inside: str) -> None:
    (tmp_path / "runs").symlink_to("/nowhere/scratch")
    with pytest.raises(FolderError, match="runs is a link to /nowhere/scratch, which is not there"):
        lock_folder(tmp_path / "runs" / inside, print)
