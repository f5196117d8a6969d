"""Functions of the user's that a configuration names by import path."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sfumato.config.trust import refuse_code
from sfumato.errors import ConfigError

_lock = threading.RLock()


def import_function(path: str) -> Callable[..., Any]:
    """The function, or class, at ``my_package.my_module:my_function`` or ``folder/file.py:my_function``.

    Raises:
        ConfigError: there is none, or no code of a configuration may run here; the message names the path.
    """
    refuse_code(f"function {path}")
    return _import_function(path)


@functools.cache
def _import_function(path: str) -> Callable[..., object]:
    where, colon, name = path.rpartition(":")
    if not (colon and where and name):
        raise ConfigError(f"{path!r} is no function: write my_module:my_function or folder/file.py:my_function")
    try:
        with _lock:  # two threads that ask at once must not execute a file twice
            module = _load_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
        function = getattr(module, name)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot import function {path!r}: there is no file {error.filename}") from error
    except Exception as error:  # whatever a module of one's own raises when it is imported
        missing_package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        # no package can be installed for a module of the user's that is missing
        is_own = where.partition(".")[0] == missing_package
        remedy = f"; install the package that has {missing_package}" if missing_package and not is_own else ""
        place = _place_of(error)
        raise ConfigError(f"cannot import function {path!r}: {type(error).__name__}: {error}{place}{remedy}") from error
    if not callable(function):
        raise ConfigError(f"cannot import function {path!r}: {name} is a {type(function).__name__}")
    return function


def _place_of(error: BaseException) -> str:
    """File and line of the user's code that could not be imported, as the end of a message; empty where it has none."""
    if isinstance(error, SyntaxError):
        return ""  # its text names them
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f" (at {user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""


def _load_file(path: Path) -> ModuleType:
    name = str(path.resolve())
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        # under its path, so that a file is executed once, however many fields name functions of it
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
