"""Trackers that the user names: programs and services that show the numbers of a run, or hear its alerts."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sfumato.errors import ConfigError, UserError

if TYPE_CHECKING:
    from sfumato.tracking.alerts import Alert
    from sfumato.tracking.webhook import WebhookTracker

WEBHOOK = "webhook"
"""Gets no numbers, but alerts."""

CLOSING_S = 8.0
"""Seconds within which trackers are told of an end that is none of success; the launcher kills ranks after 10."""

KNOWN_TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio", WEBHOOK)


class Tracker(Protocol):
    """The interface of a tracker. All steps are numbers of finished optimisation steps."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Records named scalars of one step; those that are None are left out."""

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        """Records images, uint8 [N, H, W, 3], under one name."""

    def close(self, exit_code: int = 0) -> None:
        """Writes what is still buffered, and how the run ended. Nothing may be logged afterwards."""


class TensorBoardTracker:
    """Writes TensorBoard event files.

    Args:
        folder: receives the event files; made if absent.
        purge_step: the first step that will be logged again, that is the resumed step + 1. TensorBoard then hides
            what an earlier process logged from this step on, so that a resumed run shows no doubled curves.
            None for a fresh run.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """One event with all values: an event for each costs more than a small step may."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if value is not None
        ]
        if values:
            assert self._writer.file_writer is not None  # until close
            self._writer.file_writer.add_summary(self._summary(value=values), step)

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise ValueError(f"images {name!r} must be uint8 [N, H, W, 3], not {images.dtype} {list(images.shape)}")
        if len(images):
            self._writer.add_images(name, images, step, dataformats="NHWC")

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()


def check_trackers(names: Sequence[str]) -> None:
    """Checks that there are trackers with these names, without importing any.

    Raises:
        ConfigError: a name is unknown or stands twice, or the environment names no webhook.
        MissingDependencyError: a tracker's package is not installed.
    """
    for name in names:
        if name not in KNOWN_TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}; known trackers: {', '.join(KNOWN_TRACKERS)}")
        if name not in ("tensorboard", WEBHOOK) and importlib.util.find_spec(name) is None:
            from sfumato.tracking.services import missing_tracker

            raise missing_tracker(name)
        if name == WEBHOOK:
            from sfumato.tracking.webhook import required_webhook

            required_webhook(print)
    if len(set(names)) != len(names):
        raise ConfigError(f"a tracker stands twice in {list(names)}; name each one once")


def build_trackers(
    names: Sequence[str],
    output_dir: Path,
    purge_step: int | None = None,
    config: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
) -> list[Tracker]:
    """Builds the trackers with these names.

    Args:
        names: from ``KNOWN_TRACKERS``; may be empty.
        output_dir: the run folder; each tracker writes into a folder of its own below it.
        purge_step: see ``TensorBoardTracker``.
        config: the resolved configuration, which services show beside the curves.
        say: takes a line when a tracker cannot write, or an alert could not be sent.

    Raises:
        UserError: as ``check_trackers``; or a tracker of another maker does not start.
    """
    check_trackers(names)
    folder = Path(output_dir)
    trackers: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            try:
                trackers.append(TensorBoardTracker(folder / name, purge_step))
            except OSError as error:  # it writes at once, and the disk may be full
                say(_describe_failure(name, error))
        elif name == WEBHOOK:
            from sfumato.tracking.webhook import WebhookTracker

            trackers.append(WebhookTracker(folder, say))
        else:
            from sfumato.tracking.services import start_service

            try:
                trackers.append(start_service(name, folder, purge_step is not None, config or {}))
            except UserError:
                Trackers(trackers, say).close(1)  # what has started would keep threads and files open
                raise
    return trackers


class Trackers:
    """The trackers of a run. One that fails gets nothing more, since its curves would have gaps; the run goes on."""

    def __init__(self, trackers: list[Tracker], say: Callable[[str], None]) -> None:
        self.all = trackers
        self._say = say

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """As ``Tracker.log``, for each tracker."""
        self._tell(lambda tracker: tracker.log(step, metrics))

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        """As ``Tracker.log_images``, for each tracker."""
        self._tell(lambda tracker: tracker.log_images(step, name, images))

    @property
    def _webhooks(self) -> list[WebhookTracker]:
        from sfumato.tracking.webhook import WebhookTracker

        return [tracker for tracker in self.all if isinstance(tracker, WebhookTracker)]

    def alert(self, alert: Alert) -> None:
        """Passes an alert of the run to the webhook, where there is one."""
        for webhook in self._webhooks:
            webhook.alert(alert)

    def flush_alerts(self) -> None:
        """Waits until alerts are sent, or given up."""
        for webhook in self._webhooks:
            webhook.close()

    def close(self, exit_code: int = 0) -> None:
        """As ``Tracker.close``, for each tracker, once; alerts alone may follow.

        Args:
            exit_code: of the run. One that did not finish waits ``CLOSING_S`` at most, since its process has to end.
        """
        closing = threading.Thread(
            target=self._tell, args=(lambda tracker: tracker.close(exit_code),), name="trackers", daemon=True
        )
        closing.start()
        closing.join(CLOSING_S if exit_code else None)
        if closing.is_alive():
            self._say(f"trackers were not told the end of the run within {CLOSING_S:.0f} s")
        self.all = list[Tracker](self._webhooks)

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self.all):
            try:
                tell(tracker)
            except Exception as error:  # of another maker's program, which must not end the run
                self.all.remove(tracker)
                name = type(tracker).__name__.removesuffix("Tracker").lower()
                self._say(_describe_failure(name, error))


def _describe_failure(name: str, error: Exception) -> str:
    return (
        f"tracker {name} failed and is told nothing more ({type(error).__name__}: {error}); the run goes on, and "
        "metrics.jsonl has all numbers"
    )


def __getattr__(name: str) -> object:
    """``read_jsonl``, which scripts of one's own may import from here by the name that it had in version 0.1."""
    if name != "read_jsonl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sfumato.tracking.json_lines import read_jsonl

    text = "sfumato.tracking.trackers.read_jsonl is in sfumato.tracking.json_lines now; the old name goes with 0.3"
    warnings.warn(text, FutureWarning, stacklevel=2)
    return read_jsonl
