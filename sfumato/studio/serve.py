"""Starts the studio: its token, its address, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path

import uvicorn

from sfumato.config.file_checks import file_problem
from sfumato.errors import ConfigError, DataError
from sfumato.serving.connections import uvicorn_config
from sfumato.studio.alert_watch import AlertWatch
from sfumato.studio.app import Studio, build_app
from sfumato.studio.control import Control
from sfumato.tracking.webhook import webhook_from_environment

TOKEN_VARIABLE = "SFUMATO_STUDIO_TOKEN"
"""Environment variable with a token of one's own, for a studio whose address must stay the same."""
SHORTEST_TOKEN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    folder: Path,
    host: str,
    port: int,
    names: tuple[str, ...] = (),
    *,
    has_control: bool = False,
    trusts_code: bool = False,
) -> int:
    """Serves the runs below a folder until SIGTERM or Ctrl-C.

    Args:
        folder: with runs, or a run folder.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        names: hosts that requests may name, besides those of this machine.
        has_control: whether pages may write into the control folders of runs, and load checkpoints.
        trusts_code: whether code that configurations of runs name runs then.

    Returns:
        The exit code, 0.

    Raises:
        DataError: there is no such folder, or it cannot be read.
        ConfigError: the address cannot be had, the token of the environment is too short, or its webhook is no address.
    """
    problem = file_problem(folder, or_folder=True)
    if problem is None and not folder.is_dir():
        problem = "is a file"
    if problem is not None:
        raise DataError(f"{folder} {problem}: name a folder with runs, such as runs/")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder} cannot be read by this user: change its permissions, or start as its owner")
    token = find_token()
    webhook = webhook_from_environment(lambda text: print(text, file=sys.stderr, flush=True))
    studio = Studio(folder.resolve())
    listener = listen_at(host, port)
    with listener:
        control = Control(studio.runs, has_control, trusts_code)
        app = build_app(studio, token, names if host in LOOPBACK else (*names, host), control.routes())
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
        watching = None if webhook is None else AlertWatch(studio.runs, webhook).watch()
        _serve_until_ended(server, listener, control, watching)
    return 0


def _serve_until_ended(
    server: uvicorn.Server, listener: socket.socket, control: Control, watching: Coroutine[object, object, None] | None
) -> None:
    """Serves, and then ends the processes that hold models."""

    async def serve_and_watch() -> None:
        watch = None if watching is None else asyncio.create_task(watching)
        try:
            await server.serve(sockets=[listener])
        finally:
            if watch is not None:
                watch.cancel()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # uvicorn raises the signal again when it has ended, and SIGTERM would end this process before its children
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with asyncio.Runner() as runner:
            with contextlib.suppress(KeyboardInterrupt):
                runner.run(serve_and_watch())
            runner.run(control.close())
    finally:
        signal.signal(signal.SIGTERM, before)


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


def listen_at(host: str, port: int) -> socket.socket:
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
