"""One call of a reward: the function that it names, what it returned, checked, or what went wrong, in words."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import numbers
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sfumato.errors import ConfigError, UserError
from sfumato.rewards.base import Failure, Reward, Sample

_lock = threading.RLock()


@functools.cache
def import_function(path: str) -> Callable[..., Any]:
    """The function at ``my_package.my_module:my_function`` or ``folder/file.py:my_function``.

    Raises:
        ConfigError: there is none; the message names the path.
    """
    where, colon, name = path.rpartition(":")
    if not (colon and where and name):
        raise ConfigError(f"{path!r} is no function: write my_module:my_function or folder/file.py:my_function")
    try:
        with _lock:
            module = _load_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
        function = getattr(module, name)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot import function {path!r}: there is no file {error.filename}") from error
    except Exception as error:  # whatever a module of one's own raises when it is imported
        raise ConfigError(f"cannot import function {path!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"cannot import function {path!r}: {name} is a {type(function).__name__}")
    return function


def _load_file(path: Path) -> ModuleType:
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


TIMED_OUT = "timed out"
"""How the reason of a call that took too long begins."""

Checked = list[tuple[float, str]]
"""For each sample its value and "", or NaN and the reason why it has none."""


@dataclass(frozen=True)
class Outcome:
    """What came of a call."""

    values: Checked
    is_lost: bool = False
    """The thread or the process of the call was lost with it."""


def score_batch(reward: Reward, samples: list[Sample]) -> Checked:
    """Calls ``score`` here and now, on samples that it may change.

    Raises:
        UserError: what the reward raised as such; anything else that it raises is a reason.
    """
    num_samples = len(samples)  # the list is the reward's, which may empty it
    try:
        return check_values(reward.score(samples), num_samples)
    except UserError:
        raise
    except BaseException as error:  # whatever a reward raises, sys.exit included, is an unscored batch
        return failed(describe_error(error, reward.source_file), num_samples)


def failed(reason: str, num_samples: int) -> Checked:
    """So many samples without a value."""
    return [(math.nan, reason)] * num_samples


def describe_error(error: BaseException, own_file: str | None) -> str:
    """Kind, text and place of an error: in ``own_file`` where possible, since that is the one to look into."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # of an error whose text cannot be had, the kind must do
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == own_file), frames[-1])
    return f"{text} (at {frame.filename}:{frame.lineno})"


def check_values(result: Any, num_samples: int) -> Checked:
    """What a reward returned, value by value."""
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        return failed(f"returned a {type(result).__name__}, not a list of numbers", num_samples)
    if len(result) != num_samples:
        return failed(f"returned {len(result)} values for {num_samples} samples", num_samples)
    return [_check_value(value) for value in result]


def _check_value(value: Any) -> tuple[float, str]:
    if isinstance(value, Failure):
        return math.nan, value.reason or "failed for no stated reason"
    if getattr(value, "shape", None) == ():  # an array's or a tensor's element
        value = value.item()
    if not isinstance(value, numbers.Real):
        return math.nan, f"returned a {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if math.isnan(number):
        return math.nan, "returned NaN"
    if math.isinf(number):
        return math.nan, "returned an infinite value"
    return number, ""
