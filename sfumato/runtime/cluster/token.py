"""Ray's token: who has it can run programs as the user of the cluster, so nobody else may read the file."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from sfumato.errors import ConfigError


def require_token(say: Callable[[str], None]) -> None:
    """Makes Ray ask for a token, before it is imported, and the file with it where there is none: Ray's
    own could be read by everybody.

    Whoever has set ``RAY_AUTH_MODE`` to something else has decided otherwise.

    Args:
        say: tells a person that the file was readable for others, and is not any more.

    Raises:
        ConfigError: the file cannot be made, or belongs to somebody else.
    """
    if "ray" not in sys.modules:  # which reads it when it is imported, and from 2.59 on sets it where there is a file
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            _close_to_others(path, say)
            return
        with os.fdopen(opened, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise ConfigError(
            f"the token of Ray cannot be kept in {path} ({error.strerror}): set RAY_AUTH_TOKEN_PATH to a file in a "
            "folder of your own"
        ) from error


def _close_to_others(path: Path, say: Callable[[str], None]) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the token of Ray in {path} belongs to another user, who could run programs as you: set "
            "RAY_AUTH_TOKEN_PATH to a file of your own"
        )
    if status.st_mode & 0o077:
        path.chmod(0o600)
        say(
            f"others could read the token of Ray in {path}, which is closed to them now: when no cluster of yours "
            "runs, remove it, and the next run makes another"
        )
