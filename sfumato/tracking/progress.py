"""The progress of a run: a bar in a terminal, plain lines in a log file, and no bars of libraries between them."""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, TypeVar

from sfumato.config.characters import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Item = TypeVar("Item")


class Progress:
    """Shows steps, a few values and the time that is left, on stderr.

    In a terminal this is a bar. Elsewhere it is lines such as
    ``pretrain  step 120/1000  loss 0.4321  lr 1.0e-03  eta 3m12s``: the first and the last step, and between them
    at most one line every ``interval_s``.

    Args:
        total_steps: the step at which the run ends.
        start_step: finished steps at the start; more than 0 for a resumed run.
        label: stands in front of every line.
        enabled: False shows nothing; only rank 0 shows.
        interval_s: seconds between plain lines.
        stream: where to write; None is ``sys.stderr``.
        clock: seconds that never go back; tests pass their own.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        label: str = "train",
        *,
        enabled: bool = True,
        interval_s: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.label = label
        self.enabled = enabled
        self.interval_s = interval_s
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._last_step = start_step
        self._last_time = clock()
        self._seconds_per_step: deque[float] = deque(maxlen=30)
        self._shown_at: float | None = None
        self._pending: dict[str, float] | None = None
        """Values of the last step, when its line has not been written."""
        self._bar = _build_bar(self._stream) if enabled and self._stream.isatty() else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(label, total=total_steps, completed=start_step, values="", eta="")

    def update(self, step: int, **shown_values: float) -> None:
        """Shows that ``step`` steps are finished, and values in the order in which they are passed."""
        if not self.enabled:
            return
        now = self._clock()
        if step > self._last_step:
            self._seconds_per_step.append((now - self._last_time) / (step - self._last_step))
        self._last_step = step
        self._last_time = now
        is_last = step >= self.total_steps
        if self._bar is not None:
            values, eta = self._format_state(shown_values)
            self._bar.update(self._task, completed=step, values=values, eta=eta)
            if is_last or self._is_due(now, 0.1):  # no background thread draws: it would not survive a fork
                self._bar.refresh()
                self._shown_at = now
            return
        self._pending = shown_values
        if is_last or self._is_due(now, self.interval_s):
            self._write_pending()
            self._shown_at = now

    @property
    def eta_s(self) -> float | None:
        """Seconds that remain, by the median of the last 30 steps, which a single slow step (a compile or a save) does
        not change."""
        if not self._seconds_per_step:
            return None
        return statistics.median(self._seconds_per_step) * max(self.total_steps - self._last_step, 0)

    def message(self, text: str) -> None:
        """Shows a line of text at once, above the bar if there is one."""
        if not self.enabled:
            return
        text = printable(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(text)

    def close(self) -> None:
        """Shows the last step if it has not been shown (a run that stops early) and gives the terminal back."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None
        elif self._pending is not None:
            self._write_pending()
        self._pending = None
        self.enabled = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_due(self, now: float, interval_s: float) -> bool:
        return self._shown_at is None or now - self._shown_at >= interval_s

    def _format_state(self, shown_values: dict[str, float]) -> tuple[str, str]:
        """The values of the last step, and the time that remains, as text."""
        values = "  ".join(f"{name} {format_value(value)}" for name, value in shown_values.items())
        seconds_left = None if self._last_step >= self.total_steps else self.eta_s
        return values, "" if seconds_left is None else f"eta {format_duration(seconds_left)}"

    def _write_pending(self) -> None:
        values, eta = self._format_state(self._pending or {})
        parts = (self.label, f"step {self._last_step}/{self.total_steps}", values, eta)
        self._write("  ".join(part for part in parts if part))
        self._pending = None

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def show_progress(items: Iterable[Item], count: int, label: str, enabled: bool = True) -> Iterator[Item]:
    """Passes on ``count`` items, and shows the progress over them; see ``Progress``."""
    with Progress(count, 0, label, enabled=enabled) as progress:
        for number, item in enumerate(items, start=1):
            yield item
            progress.update(number)


def format_value(value: float) -> str:
    """A number in a few characters: 0.4321, 1.0e-03, 1.23e-03, 812.25, 65536."""
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == int(value) and size < 1e7:
        return str(int(value))
    if size < 0.01 or size >= 1e6:
        short = f"{value:.1e}"  # a round number, such as most learning rates
        return short if float(short) == value else f"{value:.2e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}" if size < 10_000 else f"{value:.0f}"


def digits_after_point(*values: float) -> int:
    """Digits behind the point that show three of the largest value, at least 3 and at most 9."""
    largest = max((abs(value) for value in values if math.isfinite(value) and value), default=1.0)
    return min(max(3, 2 - math.floor(math.log10(largest))), 9)


def format_duration(seconds: float) -> str:
    """Seconds in a short form: 42s, 3m12s, 5h07m, 2d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _build_bar(stream: TextIO) -> RichProgress:
    """The bar of a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[eta]}", markup=False),
        TextColumn("{task.fields[values]}", markup=False),
        console=Console(file=stream),
        auto_refresh=False,
        # What a script prints to a file or a pipe must arrive there, not on the terminal of the bar.
        redirect_stdout=sys.stdout.isatty(),
    )


def quiet_other_bars() -> None:
    """Turns off the progress bars of libraries, here and in processes that are started from here."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):  # transformers obeys the first
        os.environ.setdefault(name, "1")
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


def quiet_libraries() -> None:
    """Turns off the notices and progress bars of libraries; their errors are still shown."""
    quiet_other_bars()
    import diffusers
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that cannot be written to


class MessageHandler(logging.Handler):
    """Says what is logged."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """As ``logging.Handler``."""
        self._say(self.format(record))


def say_messages(say: Callable[[str], None] | None) -> None:
    """Has ``say`` called with what modules of this library log, from information on; None: no more of it."""
    logger = logging.getLogger("sfumato")
    logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, MessageHandler)]
    if say is not None:
        logger.addHandler(MessageHandler(say))
        logger.setLevel(logging.INFO)
