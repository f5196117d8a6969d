"""Alerts to a webhook: a POST of JSON to an address that an environment variable holds, since such addresses are keys.

Nothing here raises once it stands: alerts wait in a short queue for a thread, which tries each a few times.
"""

from __future__ import annotations

import os
import queue
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sfumato.config.characters import printable
from sfumato.errors import ConfigError
from sfumato.serving.outgoing import AttemptError, BadAnswerError, BaseUrl, Limits, RefusedError, exchange
from sfumato.tracking.alerts import FAILED, Alert, failure_alerts
from sfumato.tracking.atomic_folders import read_mapping
from sfumato.tracking.json_lines import strict_json

VARIABLE = "SFUMATO_WEBHOOK"
"""Environment variable with the address."""
PRIVATE_VARIABLE = "SFUMATO_WEBHOOK_PRIVATE"
"""Set to 1, addresses of private networks are posted to, too."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")

REQUEST_S = 10.0
"""Seconds that a try may take."""
PAUSES_S = (1.0, 4.0, 16.0)
"""Between tries, of which there is one more."""
MOST_WAITING = 32
"""Alerts that wait; more are dropped, and counted."""
FLUSH_S = 15.0
"""Seconds for which the end of a run waits for its alerts."""
MOST_ANSWER_BYTES = 2**16
MOST_TEXT = 2000
"""Characters of an alert."""


class Webhook:
    """Sends alerts, each once.

    Args:
        address: https, or http of this machine.
        say: takes a line when an alert could not be sent, without the address.
        allow_private: whether a private network may be posted to.

    Raises:
        ConfigError: for another address; it is not repeated.
    """

    def __init__(self, address: str, say: Callable[[str], None], allow_private: bool = False) -> None:
        self._base, self._path = parse_address(address)
        self._say = say
        self._allow_private = allow_private or self._base.host in LOOPBACK
        self._tls = ssl.create_default_context() if self._base.scheme == "https" else None
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._sent: set[tuple[str, str]] = set()
        self._num_dropped = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, alert: Alert, facts: Mapping[str, object]) -> None:
        """Has an alert sent, unless the same one of this run was before.

        Args:
            alert: of a run.
            facts: of the run: ``run``, and what else a program may want to know.
        """
        run = str(facts.get("run", ""))
        if (run, alert.text) in self._sent:
            return
        self._sent.add((run, alert.text))
        line = f"sfumato: {run}: {alert.text}" + (f" ({alert.details})" if alert.details else "")
        line = printable(line[:MOST_TEXT])
        body = {"text": line, "content": line, "kind": alert.kind, **facts, "time": time.time()}
        try:
            self._waiting.put_nowait(strict_json(body).encode("utf-8", "replace"))
        except queue.Full:
            self._num_dropped += 1
            self._say(f"webhook: {self._num_dropped} alerts were dropped, since {MOST_WAITING} are waiting")
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_messages, name="webhook", daemon=True)
                self._thread.start()

    def forget(self, run: str, text: str) -> None:
        """Has an alert of a trouble that is over be sent again when it comes back."""
        self._sent.discard((run, text))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Waits until alerts are sent, or given up; returns whether they are."""
        deadline = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._waiting.unfinished_tasks

    def _send_messages(self) -> None:
        while True:
            body = self._waiting.get()
            try:
                self._deliver(body)
            finally:
                self._waiting.task_done()

    def _deliver(self, body: bytes) -> None:
        problem = ""
        for pause_s in (*PAUSES_S, None):
            limits = Limits(
                deadline=time.monotonic() + REQUEST_S,
                max_response_bytes=MOST_ANSWER_BYTES,
                allow_private=self._allow_private,
            )
            try:
                exchange(self._base, "POST", self._path, body, {"Content-Type": "application/json"}, limits, self._tls)
                return
            except BadAnswerError:  # it came with a status of success: services answer with 204, or with anything
                return
            except RefusedError as error:
                problem = error.kind  # never the message, which has parts of the address
                break
            except AttemptError as error:
                problem = error.kind
            if pause_s is not None:
                time.sleep(pause_s)
        remedy = f" ({PRIVATE_VARIABLE}=1 allows it)" if problem == "private address" else ""
        self._say(f"webhook: an alert could not be sent to {self._base.host}: {problem}{remedy}")


def parse_address(address: str) -> tuple[BaseUrl, str]:
    """The server of an address, and path with query. Raises ConfigError, which does not repeat the address."""
    try:
        parts = urllib.parse.urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        host = parts.hostname or ""
        host.encode("idna")  # what connecting would do
    except ValueError as error:
        raise ConfigError(f"{VARIABLE} holds no address") from error
    if not host or not port or not all("!" <= letter <= "~" for letter in address) or parts.fragment:
        raise ConfigError(f"{VARIABLE} must hold an address such as https://hooks.example.com/services/KEY")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{VARIABLE}: an address with a name or password is not posted to: leave them out")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in LOOPBACK):
        raise ConfigError(f"{VARIABLE} must begin with https://; http:// is for this machine alone (localhost)")
    shown = f"[{host}]" if ":" in host else host
    base = BaseUrl(f"{parts.scheme}://{shown}:{port}", parts.scheme, host, port, "")
    return base, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def webhook_from_environment(say: Callable[[str], None]) -> Webhook | None:
    """The webhook that the environment names; None without one. Raises ConfigError for an address that is none."""
    address = os.environ.get(VARIABLE, "").strip()
    if not address:
        return None
    return Webhook(address, say, os.environ.get(PRIVATE_VARIABLE, "") == "1")


class WebhookTracker:
    """Sends the alerts of a run. Numbers and images go elsewhere."""

    def __init__(self, output_dir: Path, say: Callable[[str], None]) -> None:
        """Raises ConfigError as ``required_webhook`` does."""
        self._webhook = required_webhook(say)
        self._facts = run_facts(output_dir)
        self._step = 0

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Looks for samples without a reward."""
        self._step = step
        for alert in failure_alerts(step, metrics.get(FAILED)):
            self.alert(alert)

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        """Sends none."""

    def alert(self, alert: Alert) -> None:
        """Has an alert sent, once in a run."""
        self._webhook.send(alert, {**self._facts, "step": self._step})

    def close(self, exit_code: int = 0) -> None:
        """Waits for what is on its way, for at most ``FLUSH_S``."""
        self._webhook.flush()


def run_facts(folder: Path) -> dict[str, object]:
    """What alerts say of a run: names and numbers, no path and no setting."""
    environment = read_mapping(folder / "environment.json")
    texts = {name: environment[name] for name in ("run_id", "task") if isinstance(environment.get(name), str)}
    return {"run": folder.absolute().name, **texts, "host": socket.gethostname()}


def required_webhook(say: Callable[[str], None]) -> Webhook:
    """The webhook of a run that names one. Raises ConfigError where the environment has no address, or none that may be
    posted to."""
    webhook = webhook_from_environment(say)
    if webhook is None:
        raise ConfigError(
            f"train.trackers names webhook: put its address into the environment variable {VARIABLE}, such as "
            "https://hooks.example.com/services/KEY"
        )
    return webhook
