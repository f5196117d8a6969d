"""Ray's token: whoever has it can run programs as the user of the cluster, so nobody else may read its file."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from sfumato.errors import ConfigError


def require_token(say: Callable[[str], None]) -> None:
    """Has Ray require a token; call it before Ray is imported. It creates the token's file if there is none, since the
    file that Ray creates could be read by everybody.

    Nothing is changed if the user has set ``RAY_AUTH_MODE`` to another value.

    Args:
        say: shows a line to the user: that others could read the file, and cannot any more.

    Raises:
        ConfigError: the file cannot be created, or belongs to another user.
    """
    # Ray reads the variable when it is imported, and from 2.59 on sets it if there is a file.
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = token_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Created with its mode in one step: at no moment can others read or exchange it.
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


def send_token() -> None:
    """Has Ray send its token to a cluster that is joined, where there is one; call it before Ray is imported.

    Ray itself does so only when it has connected already, and waits 20 s for a cluster that refuses it. Nothing is
    changed if the user has set ``RAY_AUTH_MODE``. A cluster that wants no token takes no notice of one.
    """
    if "ray" not in sys.modules and (os.environ.get("RAY_AUTH_TOKEN") or token_file().is_file()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def token_file() -> Path:
    """Where Ray looks for its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _close_to_others(path: Path, say: Callable[[str], None]) -> None:
    """Makes an existing file unreadable for others. Raises ConfigError when it belongs to another user."""
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
