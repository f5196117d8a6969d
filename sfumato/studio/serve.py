"""Starts the studio: its token, its address, and its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from pathlib import Path

import uvicorn

from sfumato.config.file_checks import file_problem
from sfumato.errors import ConfigError, DataError
from sfumato.serving.connections import uvicorn_config
from sfumato.studio.app import Studio, build_app
from sfumato.studio.control import Control

TOKEN_VARIABLE = "SFUMATO_STUDIO_TOKEN"
"""Environment variable with a token of one's own, for a studio whose address must stay the same."""
SHORTEST_TOKEN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(folder: Path, host: str, port: int, names: tuple[str, ...] = (), *, has_control: bool = False) -> int:
    """Serves the runs below a folder until SIGTERM or Ctrl-C.

    Args:
        folder: with runs, or a run folder.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        names: hosts that requests may name, besides those of this machine.
        has_control: whether pages may write into the control folders of runs.

    Returns:
        The exit code, 0.

    Raises:
        DataError: there is no such folder, or it cannot be read.
        ConfigError: the address cannot be had, or the token of the environment is too short.
    """
    problem = file_problem(folder, or_folder=True)
    if problem is None and not folder.is_dir():
        problem = "is a file"
    if problem is not None:
        raise DataError(f"{folder} {problem}: name a folder with runs, such as runs/")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder} cannot be read by this user: change its permissions, or start as its owner")
    token = find_token()
    studio = Studio(folder.resolve())
    control = Control(studio.runs, has_control)
    app = build_app(studio, token, names if host in LOOPBACK else (*names, host), control.routes())
    listener = listen(host, port)
    with listener:
        shown_host = "localhost" if host in (*LOOPBACK, "0.0.0.0", "::") else host
        address = f"http://{f'[{shown_host}]' if ':' in shown_host else shown_host}:{listener.getsockname()[1]}"
        num_runs = len(studio.runs.names())
        print(f"{num_runs} {'run' if num_runs == 1 else 'runs'} in {folder}")
        print(f"open {address}/?token={token}")
        if host not in LOOPBACK:
            print(
                f"listening at {host}: whoever sees the network's traffic sees the token; ssh -L "
                f"{port}:localhost:{port} needs no --host",
                file=sys.stderr,
            )
        print("Ctrl-C ends the studio; runs go on", flush=True)
        server = uvicorn.Server(uvicorn_config(app, grace_s=1))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has ended
            server.run(sockets=[listener])
    return 0


def find_token() -> str:
    """The token of the environment, or a new one. Raises ConfigError for one that could be guessed."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return secrets.token_urlsafe(24)
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{TOKEN_VARIABLE} must have {SHORTEST_TOKEN} or more letters of ASCII: unset it, and a token is made"
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError when the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        remedy = "choose another one with --port" if port else "see --host"
        raise ConfigError(f"{host}:{port} cannot be listened on: {error.strerror or error}; {remedy}") from error
    return listener
