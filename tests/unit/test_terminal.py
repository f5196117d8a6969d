"""What becomes of a process whose terminal, pipe or log goes away."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.tracking.progress import Progress
from sfumato.tracking.terminal import BestEffortStream, hangup_signals, outlive_readers
from tests.tiny import ROOT


def broken_pipe() -> io.TextIOWrapper:
    """A stream into a pipe that nobody reads, as standard error is flushed: at the end of each line."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1)


def full_disk() -> io.TextIOWrapper:
    return open("/dev/full", "w", buffering=1)


@pytest.mark.parametrize("lost", [broken_pipe, full_disk])
def test_steps_are_shown_until_nobody_reads_them(lost: object, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = lost()  # pyright: ignore[reportCallIssue]
    with pytest.raises(OSError, match=r"Broken pipe|No space left"):
        print("one", file=stream, flush=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    outlive_readers()
    outlive_readers()
    assert isinstance(sys.stderr, BestEffortStream) and sys.stderr._stream is stream
    with Progress(3) as progress:
        progress.message("nobody sees this")
        for step in (1, 2, 3):
            progress.update(step, loss=0.5)
    print("nor that", flush=True)
    assert not sys.stderr.isatty() and sys.stderr.encoding == stream.encoding


def test_what_somebody_reads_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    outlive_readers()
    print("a line")
    assert stream.getvalue() == "a line\n"


def test_letters_that_the_terminal_does_not_have_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(written := io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    outlive_readers()
    print("h\u00e4 \u6f22 \udcff", flush=True)
    assert written.getvalue() == b"h\xe4 \\u6f22 \\udcff\n"


SCRIPT = """
import os, sys
from sfumato.tracking.terminal import outlive_readers
outlive_readers()
opened = open(sys.argv[1], "w")
print("lost")
print("lost, too", file=sys.stderr)
sys.stdout.flush()
os.write(2, b"what a library says")
opened.write(str(opened.fileno()))
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", ">&-"])
def test_closed_standard_streams_are_no_file_of_the_run(closed: str, tmp_path: Path) -> None:
    path = tmp_path / "opened"
    command = ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, SCRIPT, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0
    assert int(path.read_text()) > 2


def test_under_nohup_a_lost_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
    try:
        assert hangup_signals() == [signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert hangup_signals() == []
    finally:
        signal.signal(signal.SIGHUP, before)
