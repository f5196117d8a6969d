"""How a run of several ranks ends: one exit code, one message, nobody left behind. These ranks are plain scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfumato import launcher
from sfumato.launcher import End, summarise_ends
from tests.tiny import ROOT

TELL = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])

def end(code, text="", kind="own", stacks=""):
    path = pathlib.Path(os.environ["SFUMATO_ENDS"]) / f"{rank}.json"
    path.write_text(json.dumps({"text": text, "kind": kind, "at": time.time(), "stacks": stacks}))
    os._exit(code)
"""


class Started:
    """A launcher with two ranks that run a script."""

    def __init__(self, folder: Path, script: str, *before: str) -> None:
        self.folder = folder
        (folder / "task.py").write_text(TELL + f"folder = pathlib.Path({str(folder)!r})\n" + script)
        command = [*before, sys.executable, "-m", "sfumato.launcher", "--nproc-per-node", "2", str(folder / "task.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def wait_for(self, *names: str) -> None:
        """Until the ranks have made files of these names."""
        deadline = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said; temporary files are gone then."""
        said, errors = self.process.communicate(timeout=60)
        assert not said and not list(self.folder.glob("sfumato_ends_*"))
        return self.process.returncode, errors


def ended(tmp_path: Path, script: str) -> tuple[int, str]:
    return Started(tmp_path, script).end()


@pytest.mark.parametrize("code", [2, 143])
def test_what_both_say_is_said_once_and_the_code_comes_through(tmp_path, code):
    assert ended(tmp_path, f"end({code}, 'error: a mistake')") == (code, "error: a mistake\n")


def test_success_and_its_opposite_without_a_word(tmp_path):
    assert ended(tmp_path, "") == (0, "")
    assert ended(tmp_path, "sys.exit(5 * rank)") == (5, "")


def test_the_cause_is_said_and_not_what_followed_from_it(tmp_path):
    script = """
if rank == 0:
    end(8, "stopped: rank 0 has lost the connection", "lost", "Traceback ...")
time.sleep(0.5)
end(2, "error: a broken row")
"""
    assert ended(tmp_path, script) == (2, "rank 1: error: a broken row\n")


def test_a_rank_that_was_killed_is_named(tmp_path):
    script = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3)
end(8, "stopped: rank 0 has lost the connection", "lost")
"""
    code, said = ended(tmp_path, script)
    assert code == 8
    assert said.startswith("stopped: rank 1 was ended by SIGKILL, as the system does when memory runs out; to go on,")
    assert len(said.splitlines()) == 1


ASKED = """
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(time.monotonic()))
(folder / f"ready{rank}").touch()
while not seen:
    time.sleep(0.01)
step_ends = seen[0] + 2 + rank
while time.monotonic() < step_ends:
    time.sleep(0.1)
end(143, "stopped by signal after step 1; the state is saved")
"""


def test_a_rank_that_was_asked_to_stop_has_as_long_as_its_step_takes(tmp_path):
    """Here the steps take 2 and 3 s, and the grace is for ranks that do not follow one that failed."""
    started = Started(tmp_path, ASKED)
    started.wait_for("ready0", "ready1")
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == (143, "stopped by signal after step 1; the state is saved\n")


@pytest.fixture
def not_under_nohup():
    """What is started hears SIGHUP, though these tests may themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_stop_before_the_ranks_listen_is_a_stop(tmp_path, not_under_nohup):
    started = Started(tmp_path, "(folder / f'ready{rank}').touch()\ntime.sleep(60)")
    started.wait_for("ready0", "ready1")
    started.process.send_signal(signal.SIGHUP)
    assert started.end() == (143, "stopped by signal before the run began; nothing was trained\n")


def test_under_nohup_ranks_go_on_when_the_terminal_is_lost(tmp_path):
    """As of torchrun, which stops them: nohup has the launcher ignore the signal."""
    script = "(folder / f'ready{rank}').touch()\nwhile not (folder / 'done').exists():\n    time.sleep(0.01)"
    started = Started(tmp_path, script, "nohup")
    started.wait_for("ready0", "ready1")
    started.process.send_signal(signal.SIGHUP)
    (tmp_path / "done").touch()
    code, said = started.end()
    assert code == 0 and "stopped" not in said


def test_a_stop_after_the_run_has_ended_does_not_say_that_nothing_was_trained(tmp_path):
    """As when an interpreter takes long to end."""
    ended = "from sfumato.tracking.exit import name_log\nname_log(folder / 'log.txt')"
    started = Started(tmp_path, f"{ended}\n(folder / f'ready{{rank}}').touch()\ntime.sleep(60)")
    started.wait_for("ready0", "ready1")
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == (143, "stopped by signal after the run had ended\n")


def test_ranks_do_not_outlive_the_launcher(tmp_path):
    started = Started(tmp_path, "(folder / f'pid{rank}').write_text(str(os.getpid()))\ntime.sleep(60)")
    started.wait_for("pid0", "pid1")
    time.sleep(0.1)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    started.process.kill()
    started.process.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_rank_that_hangs_is_killed_and_shows_where_it_was(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "log.txt").write_text("so far\n")
    script = f"""
import faulthandler
folder = pathlib.Path(os.environ["SFUMATO_ENDS"])
(folder / "log").write_text({str(tmp_path / "log.txt")!r})
faulthandler.register(signal.SIGQUIT, (folder / f"{{rank}}.stacks").open("w"))

def deadlock():
    time.sleep(60)

if rank == 1:
    deadlock()
time.sleep(0.5)
end(8, "stopped: rank 0 has waited", "hang", "Traceback of rank 0")
"""
    (tmp_path / "task.py").write_text(TELL + script)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert launcher.main(["--nproc-per-node", "2", str(tmp_path / "task.py")]) == 8
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capfd.readouterr().err
    assert said.startswith(
        "stopped: rank 0 has waited; rank 1 did not answer\nstacks of rank 0:\nTraceback of rank 0\n"
    )
    assert "stacks of rank 1:" in said and "in deadlock" in said
    assert (tmp_path / "log.txt").read_text() == "so far\n" + said


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 7, 8, 130, 143])
def test_every_exit_code_is_that_of_the_run(code):
    assert summarise_ends([End(rank, code, "error: a mistake", at=1.0 + rank) for rank in (0, 1)]) == (
        code,
        "error: a mistake",
    )


def test_of_several_causes_the_first_counts():
    lost = End(0, 8, "lost", "lost", at=1.0)
    late, early = End(1, 4, "late", at=3.0), End(2, 5, "early", at=2.0)
    killed = End(3, 8, kind="killed")
    assert summarise_ends([lost, late, early, killed]) == (5, "rank 2: early")
    assert summarise_ends([lost, killed]) == (8, "lost")
    assert summarise_ends([End(0, 0), End(1, 0)]) == (0, "")
