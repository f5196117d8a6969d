"""Code of strangers: who may let it run, and the one way in which folders of other people's models are loaded.

A task that trains runs the code that its configuration names, as a script would. Commands that read somebody's
configuration or run folder run none of it without ``--trust-code`` on their own command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sfumato.config.file_checks import read_json
from sfumato.errors import ConfigError

SWITCH = "--trust-code"

MOST_LAYERS = 100_000
_COUNT = re.compile("layers|blocks|experts|depth")

_trusts_code = True  # a task's configuration is that of the person who starts it

_named_code: dict[str, None] = {}
"""Code that configurations have named in this process, as keys in the order of the naming."""


def trusts_code() -> bool:
    """Whether the configuration is that of the person who starts this process."""
    return _trusts_code


@contextmanager
def code_of_configurations(trusted: bool) -> Iterator[None]:
    """Within the block code that configurations name runs if ``trusted``, and is otherwise refused."""
    global _trusts_code
    previous, _trusts_code = _trusts_code, trusted
    try:
        yield
    finally:
        _trusts_code = previous


def refuse_code(code: str) -> None:
    """Raises ConfigError where code that a configuration names must not run; ``code`` names it."""
    if not _trusts_code:
        raise ConfigError(
            f"{code} is code that this command would run for whoever wrote the configuration: it runs none; if you "
            f"have read that code and trust it, add {SWITCH} to this command"
        )
    _named_code[code] = None


def describe_code() -> list[str]:
    """A line about the code that this process runs for a configuration; none where it runs none."""
    return [f"the configuration runs code of yours or of others: {'; '.join(_named_code)}"] if _named_code else []


def check_trust(trust_remote_code: bool) -> bool:
    """The value of a field ``trust_remote_code``. Raises ConfigError as ``refuse_code``."""
    if trust_remote_code:
        refuse_code("trust_remote_code: true, Python files in the model's folder,")
    return trust_remote_code


def load_pretrained(cls: Any, folder: Path | str, *, trust_remote_code: bool = False, **options: object) -> Any:
    """``cls.from_pretrained`` of a local folder, whose code does not run unless a person allowed it.

    Args:
        cls: a class of transformers or diffusers.
        folder: with its files.
        trust_remote_code: what the configuration says of a language model; no other kind of model has such a field.
        options: further arguments.

    Raises:
        OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError: as the class does; ValueError in the place
            of any other error of a library, which is of files that hold something else than they should.
    """
    _disable_questions()
    _check_counts(Path(folder))
    with _broken_files_as_value_errors():
        return cls.from_pretrained(folder, local_files_only=True, **_trust_argument(cls, trust_remote_code), **options)


def make_from_config(cls: Any, described: object, *, trust_remote_code: bool = False, **options: object) -> Any:
    """``cls.from_config`` with random weights, where the same holds of what the configuration names."""
    _disable_questions()
    with _broken_files_as_value_errors():
        return cls.from_config(described, **_trust_argument(cls, trust_remote_code), **options)


def _check_counts(folder: Path) -> None:
    """Raises ValueError when a model's configuration names more layers, blocks or experts than any model has.

    Libraries make them one by one, or a list of them, before they compare anything with the weights.
    """
    for file in (folder / "config.json", *folder.glob("*/config.json")):
        try:
            pending = [read_json(file)]
        except (OSError, ValueError):
            continue  # whoever loads it says so
        while pending:  # without recursion: the JSON is a stranger's, and may be nested deeply
            value = pending.pop()
            if isinstance(value, dict):
                for name, count in value.items():
                    if _COUNT.search(name) and isinstance(count, int | float) and count > MOST_LAYERS:
                        raise ValueError(
                            f"{file}: {name} is {str(count)[:30]}, and at most {MOST_LAYERS:,} are read here"
                        )
                pending += value.values()
            elif isinstance(value, list):
                pending += value


@contextmanager
def _broken_files_as_value_errors() -> Iterator[None]:
    """Turns unexpected errors of libraries about broken files into a ValueError of one line.

    For such files tokenizers raise a bare Exception, huggingface_hub classes of its own, and code that finds a list
    where it expects a mapping raises any error.
    """
    try:
        yield
    except RecursionError as error:
        raise ValueError("values within values, too deep to be read") from error
    except MemoryError as error:
        raise ValueError("it tells of something larger than the memory of this machine") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}") from error


def _trust_argument(cls: object, trust_remote_code: bool) -> dict[str, bool]:
    """The argument ``trust_remote_code`` for classes that have it; diffusers' models would store it as a field."""
    bases = getattr(cls, "__mro__", ())
    is_diffusers = any(base.__name__ == "ModelMixin" and base.__module__.startswith("diffusers.") for base in bases)
    return {} if is_diffusers else {"trust_remote_code": trust_remote_code}


def _disable_questions() -> None:
    """Keeps transformers from asking on stdin whether code may run.

    It asks where a class within another is loaded without the argument, and runs the code on a yes. Without time for an
    answer it refuses.
    """
    import transformers.dynamic_module_utils

    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
