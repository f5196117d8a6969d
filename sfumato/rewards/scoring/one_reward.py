"""Scores a batch with one reward, call by call: in threads that are left behind or processes that are ended.

Values of rewards that are ``cached`` are kept by the content of what was scored, so that equal samples are scored once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sfumato.errors import UserError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import TIMED_OUT, Outcome, mark_failed, score_batch
from sfumato.tracking.waveforms import Waveform

if TYPE_CHECKING:
    from sfumato.rewards.scoring.calls import Checked


def score_with(reward: Reward, samples: list[Sample]) -> tuple[np.ndarray, list[str]]:
    """Scores B samples with one reward, failures kept apart as ``Scorer.score`` does.

    After a call that cost its thread the rest of the batch is not tried: it would hang likewise, each call for the full
    timeout. A process is ended, so the rest is tried until two calls in a row have cost theirs.

    Returns:
        Values float64 [B], and for each sample the reason why it has none ("" where it has one).

    Raises:
        UserError: what the reward raised as such.
    """
    values = np.full(len(samples), math.nan)
    reasons = [""] * len(samples)
    given_up = ""
    lost_in_a_row = 0
    most_lost = 2 if reward.process else 1
    for indices in reward.plan_calls(samples):
        # a video may be several samples of the batch: its frames
        parts = [reward.seen(samples[index]) for index in indices]
        batch = [image for part in parts for image in part]
        if given_up:
            outcome = Outcome(mark_failed(given_up, len(batch)))
        else:
            outcome = _call_in_process(reward, batch) if reward.process else _call_in_thread(reward, batch)
            lost_in_a_row = lost_in_a_row + 1 if outcome.is_lost else 0
            given_up = outcome.values[0][1] if lost_in_a_row == most_lost else ""
        rest = iter(outcome.values)
        for index, part in zip(indices, parts, strict=True):
            values[index], reasons[index] = _mean_of_frames([next(rest) for _ in part])
    return values, reasons


class ScoreCache:
    """Values of one reward, the least recently used of which are forgotten. Threads may share it.

    Args:
        max_entries: samples, or groups, that are remembered.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> np.ndarray | None:
        """float64 [n] of the n samples with that digest; None where it is not known."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: bytes, values: np.ndarray) -> None:
        """Remembers values, float64 [n]."""
        with self._lock:
            self._values[key] = values
            self._values.move_to_end(key)
            while len(self._values) > self._max_entries:
                self._values.popitem(last=False)


def digest_samples(samples: Sequence[Sample]) -> bytes:
    """128 bits that identify all that a reward may look at in samples, in their order.

    The number of their group is left out, which says nothing of the sample.
    """
    content = hashlib.blake2b(digest_size=16)
    for sample in samples:
        files = None if sample.images is None else list(sample.images.find())
        for name in _SEEN:
            for piece in _to_buffers(files if name == "images" else getattr(sample, name)):
                content.update(len(piece).to_bytes(8, "little"))
                content.update(piece)
    return content.digest()


_SEEN = tuple(field.name for field in dataclasses.fields(Sample) if field.name not in ("group_id", "damage", "scores"))
"""What rewards see of a sample: a field that is added counts, too."""


def _to_buffers(part: object) -> list[bytes | memoryview]:
    """What identifies a part of a sample: of an array its shape and its bytes, of anything else its pickle."""
    if isinstance(part, Waveform):
        return [*_to_buffers(part.samples), *_to_buffers(part.rate)]
    if isinstance(part, np.ndarray):
        return [repr(part.shape).encode(), np.ascontiguousarray(part).data.cast("B")]
    return [pickle.dumps(part, protocol=5)]  # equal bytes are equal values, whatever types metadata has


def score_remembering(reward: Reward, samples: list[Sample], cache: ScoreCache) -> tuple[np.ndarray, list[str], int]:
    """Scores B samples as ``score_with`` does, but equal samples, or equal groups, once.

    Failures are not remembered: what failed may succeed the next time.

    Returns:
        Values float64 [B], reasons, and the number of samples whose value was known without scoring them.
    """
    units = reward.plan_calls(samples) if reward.groupwise else [[index] for index in range(len(samples))]
    keys = [digest_samples([samples[index] for index in unit]) for unit in units]
    cached_values = {key: cache.get(key) for key in keys}
    new: dict[bytes, list[int]] = {}  # the first unit of each content that is not known
    for key, unit in zip(keys, units, strict=True):
        if cached_values[key] is None:
            new.setdefault(key, unit)
    rows = sorted(index for unit in new.values() for index in unit)
    # all new units in one call, so that a reward can batch them
    new_values, new_reasons = score_with(reward, [samples[index] for index in rows])
    place = {index: row for row, index in enumerate(rows)}
    values = np.full(len(samples), math.nan)
    reasons = [""] * len(samples)
    for key, unit in zip(keys, units, strict=True):
        if key not in new:
            values[unit] = cached_values[key]
            continue
        scored = [place[index] for index in new[key]]
        values[unit] = new_values[scored]
        for index, row in zip(unit, scored, strict=True):
            reasons[index] = new_reasons[row]
        if not any(new_reasons[row] for row in scored):
            cache.put(key, new_values[scored])
    return values, reasons, len(samples) - len(rows)


def _mean_of_frames(checked: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Value and reason of a sample from those of its frames: their mean, or NaN when a frame has no value."""
    reasons = [reason for _, reason in checked if reason]
    return (math.nan, reasons[0]) if reasons else (sum(value for value, _ in checked) / len(checked), "")


def _call_in_process(reward: Reward, batch: list[Sample]) -> Outcome:
    from sfumato.rewards.scoring.workers import pool_of

    return pool_of(reward).call(batch)


def _call_in_thread(reward: Reward, samples: list[Sample]) -> Outcome:
    """A call in a thread of its own. Raises what is a UserError.

    Python cannot stop a thread, so a call that hangs is left behind; as a daemon it does not keep the process alive.
    """
    ended: list[Checked | UserError] = []
    copies = [sample.copy() for sample in samples]  # it may write into them, also when it has been left behind

    def run() -> None:
        try:
            ended.append(score_batch(reward, copies))
        except UserError as error:
            ended.append(error)

    thread = threading.Thread(target=run, name=f"reward-{reward.label}", daemon=True)
    timeout_s = reward.call_timeout_s(len(samples))
    thread.start()
    thread.join(timeout_s)
    if not ended:
        return Outcome(mark_failed(f"{TIMED_OUT} after {timeout_s:g} s", len(samples)), is_lost=True)
    if isinstance(ended[0], UserError):
        raise ended[0]
    return Outcome(ended[0])
