"""Processes that hold a model for the studio, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import signal
import sys
from pathlib import Path

from sfumato.config.characters import printable
from sfumato.serving.requests import RefusedRequestError
from sfumato.studio.runs import RunReader
from sfumato.studio.secrets import hide_in_text

START_S = 300.0
"""How long a checkpoint may take to be loaded."""
ANSWER_S = 600.0
MOST_LINE = 2**22
PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent has ended."""

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Runs in a new process, before its program: has it killed when the studio is gone, however that came."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class PlaygroundProcess:
    """A process that holds the model of a run, and answers prompts with its checkpoints."""

    def __init__(self, reader: RunReader, process: asyncio.subprocess.Process, ready: dict[str, object]) -> None:
        self.folder = reader.folder
        self.run_id = _run_id(reader)
        self.ready = ready
        self._process = process
        self._number = 0

    @classmethod
    async def start(cls, reader: RunReader, outputs: Path, options: tuple[str, ...]) -> PlaygroundProcess:
        """Starts the process. Raises RefusedRequestError when the run has nothing that can be loaded."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sfumato.cli", "playground", str(reader.folder), "--json", "--out", str(outputs)),
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MOST_LINE,
            preexec_fn=end_with_parent,
        )
        playground = cls(reader, process, {})
        try:
            playground.ready = await playground._read(START_S)
        except BaseException:
            await playground.close()
            raise
        if "error" in playground.ready:
            await playground.close()
            raise RefusedRequestError(422, printable(hide_in_text(str(playground.ready["error"])[:2000])))
        return playground

    def serves(self, reader: RunReader) -> bool:
        """Whether the process is alive, and holds the model of this run."""
        # the folder may have been given to another run, and this one moved aside
        is_same = self.folder == reader.folder and self.run_id == _run_id(reader)
        return self._process.returncode is None and is_same

    async def ask(self, question: dict[str, object]) -> tuple[list[dict[str, object]], dict[str, object]]:
        """Answers to a question, one for each model; and what the process says of itself."""
        self._number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": self._number, **question}).encode() + b"\n")
        await self._process.stdin.drain()
        answers: list[dict[str, object]] = []
        while True:
            line = await self._read(ANSWER_S)
            if line.pop("id", None) != self._number:
                continue
            if line.get("done"):
                return answers, line
            answers.append(line)

    async def _read(self, timeout_s: float) -> dict[str, object]:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
            value = json.loads(line)
        except TimeoutError as error:
            raise RefusedRequestError(504, f"the model has not answered within {timeout_s:.0f} s") from error
        except ValueError as error:
            raise RefusedRequestError(
                500, f"the process that holds the model has ended: see sfumato playground {self.folder.name}"
            ) from error
        return value if isinstance(value, dict) else {}

    async def close(self) -> None:
        """Ends the process."""
        await end_process(self._process)


def _run_id(reader: RunReader) -> object:
    return reader.environment().get("run_id")


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Ends a process, at once where it does not end by itself within a second."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 1.0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
