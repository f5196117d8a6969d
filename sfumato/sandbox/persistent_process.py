"""A program in the sandbox that stays and answers lines, where starting it for each question would take longest."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence

from sfumato.sandbox.sandbox import Running, Sandbox, SandboxError, describe_end

_END_S = 20.0
"""Seconds that the sandbox of a program that has ended may take to report it."""
_TOLD_BYTES = 4096
"""Last bytes of the standard error that are read for a message."""


class KeptProgram:
    """A program at work that is asked again and again, by one thread at a time."""

    def __init__(self, sandbox: Sandbox, command: Sequence[str], files: Mapping[str, bytes]) -> None:
        """Starts it.

        Args:
            sandbox: its limits are for the whole life of the program.
            command: the path of a program within, and its arguments. It answers each line of its standard input with
                one line.
            files: what lies in /tmp, by name.

        Raises:
            SandboxError: it could not be started.
        """
        child_input, self._input = os.pipe()
        self._output, child_output = os.pipe()
        self._errors = os.memfd_create("stderr", os.MFD_CLOEXEC)
        self._running: Running | None = None
        try:
            self._running = sandbox.start(command, [child_input, child_output, self._errors], files)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(child_input)
            os.close(child_output)

    def ask(self, line: bytes, timeout_s: float, most: int) -> bytes:
        """Gives it a line, and returns the one that it answers.

        Args:
            line: without its end.
            timeout_s: for the whole answer.
            most: bytes of an answer.

        Raises:
            SandboxError: it has ended, takes too long or writes too much. The program is ended then; make another one.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._write(line + b"\n", deadline)
            answer = self._read(deadline, most)
        except BaseException:  # even when interrupted: its answer would come as that to the next question
            self.close()
            raise
        return answer

    def _write(self, content: bytes, deadline: float) -> None:
        os.set_blocking(self._input, False)
        while content:
            _, ready, _ = select.select([], [self._input], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise SandboxError("it was ended for its time")
            try:
                content = content[os.write(self._input, content) :]
            except BrokenPipeError:
                raise SandboxError(self._why_ended()) from None

    def _read(self, deadline: float, most: int) -> bytes:
        answer = bytearray()
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._output], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise SandboxError("it was ended for its time")
            part = os.read(self._output, 65536)
            if not part:
                raise SandboxError(self._why_ended())
            answer += part
            if len(answer) > most:
                raise SandboxError("it was ended for its output")
        return bytes(answer[:-1])

    def _why_ended(self) -> str:
        """How it ended by itself, with the last line of its standard error."""
        assert self._running is not None
        report = self._running.wait(_END_S)
        size = os.fstat(self._errors).st_size
        stderr = os.pread(self._errors, _TOLD_BYTES, max(size - _TOLD_BYTES, 0))
        return describe_end(report["why"], report["code"] or 0, stderr)

    def close(self) -> None:
        """Ends the program. May be called several times."""
        if self._running is not None:
            self._running.close()
        for descriptor in (self._input, self._output, self._errors):
            if descriptor >= 0:
                os.close(descriptor)
        self._running = None
        self._input = self._output = self._errors = -1
