"""What a server leaves in shared memory and among temporary files, however it, its owner or the run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from sfumato.rollout.engines.served import owner_process
from sfumato.rollout.engines.served.server_folder import LOCK, ServerFolder, remove_abandoned_folders
from sfumato.rollout.engines.served.server_process import ServerProcess
from tests.engines import segment_server
from tests.tiny import ROOT

SHARED_MEMORY = Path("/dev/shm")

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="shared memory has no names here")


def start_segment_server(log: Path) -> ServerProcess:
    """The server, which is ready when it has said what it has made."""
    command = [sys.executable, segment_server.__file__]
    server = ServerProcess("the server", command, dict(os.environ), log, 60)
    server.start(lambda: log.exists() and log.read_text().endswith("}\n"))
    time.sleep(0.5)  # in which its owner sees the segments
    return server


class Made:
    """What a server has made, by its log."""

    def __init__(self, log: Path) -> None:
        said = json.loads(log.read_text().splitlines()[-1])
        self.segments = [SHARED_MEMORY / name for name in said["segments"]]
        self.socket = Path(said["socket"])
        assert len(self.segments) > 3, "memory and semaphores"
        assert all(path.exists() for path in (*self.segments, self.socket))

    def remaining(self) -> list[Path]:
        return [path for path in (*self.segments, self.socket) if path.exists()]

    def wait_until_removed(self, within_s: float = 15.0) -> None:
        deadline = time.monotonic() + within_s
        while remaining := self.remaining():
            assert time.monotonic() < deadline, remaining
            time.sleep(0.05)


@pytest.fixture
def bystander() -> Iterator[Path]:
    """A segment that another program makes while the server runs."""
    segment = SharedMemory(create=True, size=4096)
    yield SHARED_MEMORY / segment.name
    segment.close()
    segment.unlink()


def kill_all(server: ServerProcess) -> None:
    """The server, its children and its resource tracker, but not the owner."""
    for process in psutil.Process(server.pid).children(recursive=True):
        process.kill()
    assert "ended with code" in server.problem(30)


def kill_owner(server: ServerProcess) -> None:
    owner = psutil.Process(server.pid)
    processes = owner.children(recursive=True)
    owner.kill()
    assert psutil.wait_procs(processes, 20)[1] == [], "they are killed before anybody asks"
    assert "ended with code -9" in server.problem(30)


@pytest.mark.parametrize("kill", [lambda server: None, kill_all, kill_owner], ids=["ends", "killed", "owner killed"])
def test_nothing_is_left_of_a_server(
    kill: Callable[[ServerProcess], None], tmp_path: Path, bystander: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TMPDIR", raising=False)
    server = start_segment_server(tmp_path / "log")
    made = Made(tmp_path / "log")
    later = SharedMemory(create=True, size=4096)
    kill(server)
    server.stop()
    assert made.remaining() == []
    assert bystander.exists() and (SHARED_MEMORY / later.name).exists(), "other programs keep theirs"
    later.close()
    later.unlink()


RUN = """
import sys
from pathlib import Path
from tests.engines.test_server_leftovers import start_segment_server
server = start_segment_server(Path(sys.argv[1]))
print(server.pid, flush=True)
if sys.stdin.read() == "end":
    server.stop()
"""

RUN_WITH_CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from sfumato.rollout.engines.served.server_folder import ServerFolder
from sfumato.rollout.engines.served.server_process import OwnerProcess
from tests.engines import segment_server
log = Path(sys.argv[1])
folder = ServerFolder(os.environ)
owner = OwnerProcess([], folder, [], None, os.environ)
environment = {**os.environ, **folder.temporary_variables(os.environ)}
engine = subprocess.Popen([sys.executable, segment_server.__file__], env=environment, stdout=log.open("wb"))
while not log.read_text().endswith("}\\n"):
    time.sleep(0.05)
time.sleep(1)  # in which the owner sees the processes and the segments
print(owner.pid, flush=True)
if sys.stdin.read() == "end":
    engine.kill()
    engine.wait()
    owner.end()
    folder.remove()
"""


@pytest.fixture(params=[RUN], ids=["server"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run with a server, and the process id of the server's owner."""
    process = subprocess.Popen(
        [sys.executable, "-c", request.param, str(tmp_path / "log")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.parametrize("ending", ["is killed", pytest.param("ends", marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", [RUN, RUN_WITH_CHILD], ids=["server", "child"], indirect=True)
def test_nothing_is_left_of_a_run(run: tuple[subprocess.Popen[str], int], ending: str, tmp_path: Path) -> None:
    process, owner = run
    made = Made(tmp_path / "log")
    parents = [psutil.Process(process.pid), psutil.Process(owner)]
    processes = [child for parent in parents for child in parent.children(recursive=True)]
    assert len(processes) >= 3, "the engine, its child, their tracker"
    if ending == "ends":
        process.communicate("end")
    process.kill()
    made.wait_until_removed()
    assert psutil.wait_procs([parents[1], *processes], 20)[1] == []
    assert not made.socket.parents[1].exists()


def test_the_next_server_removes_what_a_run_left_that_was_killed_with_all_its_processes(
    run: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    process, owner = run
    made = Made(tmp_path / "log")
    folder = made.socket.parents[1]
    remove_abandoned_folders(folder.parent)
    assert len(made.remaining()) == len(made.segments) + 1, "it is in use"
    group = [psutil.Process(owner), *psutil.Process(owner).children(recursive=True)]
    for victim in (psutil.Process(process.pid), *group):  # the owner before the server, so that nobody removes anything
        victim.kill()
    psutil.wait_procs(group, 10)
    assert len(made.remaining()) == len(made.segments) + 1, "nobody was left"
    remove_abandoned_folders(folder.parent)
    assert made.remaining() == [] and not folder.exists()


def test_a_record_names_no_file_but_the_one_that_was_made(tmp_path: Path, bystander: Path) -> None:
    (tmp_path / owner_process.SEGMENTS_FILE).write_text(f"{bystander.stat().st_ino + 1} {bystander.name}\n")
    owner_process.remove_leftovers(tmp_path)
    assert bystander.exists(), "another one has its name"
    (tmp_path / owner_process.SEGMENTS_FILE).write_text(f"{bystander.stat().st_ino} {bystander.name}\n")
    owner_process.remove_leftovers(tmp_path)
    assert bystander.exists(), "a process uses it"
    unused = SHARED_MEMORY / f"unused-{os.getpid()}"
    unused.write_bytes(b"")
    (tmp_path / owner_process.SEGMENTS_FILE).write_text(f"{unused.stat().st_ino} {unused.name}\n{unused.stat().st_ino}")
    owner_process.remove_leftovers(tmp_path)
    assert not unused.exists()


def test_a_folder_of_another_machine_or_program_is_not_abandoned(tmp_path: Path) -> None:
    for name, content in (("sfumato-elsewhere", b"another machine"), ("sfumato-starting", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).write_bytes(content)
    (tmp_path / "sfumato-studio").mkdir()
    remove_abandoned_folders(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_torch_compiles_outlives_the_server() -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = ServerFolder({})
    assert folder.temporary_variables({})["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    variables = folder.temporary_variables({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"})
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    folder.remove()
