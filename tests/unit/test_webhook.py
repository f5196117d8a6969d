"""Alerts to a webhook: a real server of this machine takes them, from a run and from the studio."""

import http.server
import json
import os
import threading
import time

import pytest

from sfumato.errors import ConfigError
from sfumato.studio.alert_watch import AlertWatch
from sfumato.studio.overview import list_alerts
from sfumato.studio.runs import RunReader, RunsFolder
from sfumato.tracking import webhook as module
from sfumato.tracking.alerts import Alert, find_alerts
from sfumato.tracking.json_lines import read_jsonl, series_of
from sfumato.tracking.webhook import PRIVATE_VARIABLE, VARIABLE, Webhook, parse_address
from tests.studio_runs import write_run
from tests.tiny import run_task_here, run_task_process, tiny_rl_config, write_config
from tests.unit.test_studio import write_lock

SECRET = "T000-secret-B000"


class Receiver:
    """A server that keeps what is posted to it."""

    def __init__(self, statuses=(200,), location=""):
        self.bodies = []
        self.paths = []
        pending = list(statuses)
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                status = pending.pop(0) if len(pending) > 1 else pending[0]
                receiver.paths.append(self.path)
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if status == 0:  # hangs up
                    return
                if status < 300:
                    receiver.bodies.append(json.loads(content))
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def log_message(self, *arguments):
                """Says nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}?key={SECRET}"

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "PAUSES_S", (0.01, 0.01, 0.01))


def test_an_alert_arrives_once_with_its_facts():
    said = []
    with Receiver() as receiver:
        webhook = Webhook(receiver.address, said.append)
        for _ in range(3):
            webhook.send(Alert("died", "died: gone", "1 %"), {"run": "a", "step": 3})
        webhook.send(Alert("died", "died: gone"), {"run": "b"})
        assert webhook.flush()
        webhook.forget("b", "died: gone")
        webhook.send(Alert("died", "died: gone"), {"run": "b"})
        assert webhook.flush()
    assert [body["run"] for body in receiver.bodies] == ["a", "b", "b"] and said == []
    first = receiver.bodies[0]
    assert first["text"] == first["content"] == "sfumato: a: died: gone (1 %)"
    assert first["kind"] == "died" and first["step"] == 3 and abs(first["time"] - time.time()) < 60
    assert receiver.paths[0] == f"/services/{SECRET}?key={SECRET}"


@pytest.mark.parametrize(
    ("statuses", "num_tries", "arrives"),
    [((204,), 1, True), ((503, 0, 200), 3, True), ((500,), 4, False), ((403,), 1, False), ((301,), 1, False)],
)
def test_tries_are_bounded_and_the_address_is_never_said(statuses, num_tries, arrives):
    said = []
    with Receiver(statuses, location=f"http://127.0.0.1/{SECRET}" if statuses == (301,) else "") as receiver:
        webhook = Webhook(receiver.address, said.append)
        webhook.send(Alert("died", "died: gone"), {"run": "a"})
        assert webhook.flush()
    assert len(receiver.paths) == num_tries and bool(receiver.bodies) == arrives
    assert bool(said) != arrives and SECRET not in "".join(said)
    if not arrives:
        assert said[0].startswith("webhook: an alert could not be sent to 127.0.0.1: ")


def test_nobody_listens_and_more_alerts_than_wait():
    said = []
    with Receiver() as receiver:
        address = receiver.address
    webhook = Webhook(address, said.append)
    for number in range(module.MOST_WAITING + 10):
        webhook.send(Alert("died", f"trouble {number}"), {"run": "a"})
    assert webhook.flush(60)
    assert any("could not be sent" in text for text in said)
    assert SECRET not in "".join(said)


def test_more_alerts_than_wait_are_dropped_and_counted(monkeypatch):
    said = []
    held = threading.Event()
    monkeypatch.setattr(Webhook, "_deliver", lambda self, body: held.wait(30))
    webhook = Webhook("https://example.com/x", said.append)
    for number in range(module.MOST_WAITING + 3):
        webhook.send(Alert("died", f"trouble {number}"), {"run": "a"})
    assert "alerts were dropped" in said[-1]
    assert webhook.flush(0.1) is False
    held.set()
    assert webhook.flush(10)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.com/x", "must begin with https://"),
        ("ftp://localhost/x", "must begin with https://|must hold an address"),
        ("file:///etc/passwd", "must hold an address"),
        ("https://user:word@example.com/x", "name or password"),
        ("https://example.com/a b", "must hold an address"),
        ("https://example.com/x\r\nHost: other", "must hold an address|holds no address"),
        ("https://example.com:99999/x", "holds no address"),
        ("somewhere", "must hold an address"),
    ],
)
def test_addresses_that_are_refused_and_not_repeated(address, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_address(address)
    assert address not in str(raised.value)


def test_a_private_network_is_refused_unless_it_is_allowed():
    said = []
    webhook = Webhook("https://10.255.255.1/x", said.append)
    webhook.send(Alert("died", "gone"), {"run": "a"})
    assert webhook.flush()
    assert said == [
        f"webhook: an alert could not be sent to 10.255.255.1: private address ({PRIVATE_VARIABLE}=1 allows it)"
    ]


def test_one_function_says_what_pages_and_the_webhook_tell(tmp_path):
    folder = write_run(tmp_path / "a")
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": 13, "reward/failed": 0.25}), file=file)
    reader = RunReader("a", folder)
    reader.refresh()
    alerts = find_alerts(series_of(read_jsonl(folder / "metrics.jsonl")))
    assert [(alert["kind"], alert["text"], alert["details"]) for alert in list_alerts(reader)] == [
        (alert.kind, alert.text, alert.details) for alert in alerts
    ]
    assert alerts[-1] == Alert(
        "reward_failures", "samples of the newest step have no reward", "25.0% of the samples of step 13"
    )


def test_the_studio_tells_of_a_run_that_dies_and_of_none_that_had_died_before(tmp_path):
    runs = tmp_path / "runs"
    for name in ("a", "old", "done"):
        write_run(runs / name)
    write_lock(runs / "a")
    write_lock(runs / "old", pid=2**22 - 1, born="0")
    with Receiver() as receiver:
        webhook = Webhook(receiver.address, print)
        watch = AlertWatch(RunsFolder(runs), webhook)
        watch.look()
        assert webhook.flush() and receiver.bodies == []
        old = time.time() - 3600
        for name in ("metrics.jsonl", "timings.jsonl", "log.txt"):
            os.utime(runs / "a" / name, (old, old))
        for _ in range(2):
            watch.look()
        os.utime(runs / "a" / "log.txt")
        watch.look()
        os.utime(runs / "a" / "log.txt", (old, old))
        watch.look()
        write_lock(runs / "a", pid=2**22 - 1, born="0")
        for _ in range(2):
            watch.look()
        assert webhook.flush()
    assert [body["kind"] for body in receiver.bodies] == ["standing still", "standing still", "died"]
    assert receiver.bodies[0]["run"] == "a" and receiver.bodies[-1]["run_id"] == "a"
    assert str(tmp_path) not in json.dumps(receiver.bodies)


def test_a_run_tells_of_failed_rewards_and_computes_the_same(tmp_path, monkeypatch):
    reward = {"rewards": [{"type": "brightness"}, {"type": "tests.odd_rewards:Fails", "weight": 0.1}]}
    settings = {"train": {"max_steps": 2, "trackers": []}, "reward": {**reward, "max_failed_fraction": 1.0}}
    without = run_task_here("rl_diffusion", tiny_rl_config(tmp_path / "without", **settings))
    with Receiver() as receiver:
        monkeypatch.setenv(VARIABLE, receiver.address)
        settings["train"]["trackers"] = ["webhook"]
        run = run_task_here("rl_diffusion", tiny_rl_config(tmp_path / "with", **settings))
    (body,) = receiver.bodies
    assert body["kind"] == "reward_failures" and body["run"] == "run" and body["task"] == "rl_diffusion"
    assert "of the samples of step 1" in body["text"] and str(tmp_path) not in json.dumps(body)
    assert (run / "metrics.jsonl").read_bytes() == (without / "metrics.jsonl").read_bytes()
    for path in [path for path in run.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes()


def test_a_run_that_ends_with_an_error_says_so(tmp_path):
    settings = {"train": {"max_steps": 2, "trackers": ["webhook"], "lr": 1e30}}
    config = write_config(tiny_rl_config(tmp_path, **settings), tmp_path / "run.yaml")
    with Receiver() as receiver:
        result = run_task_process("rl_diffusion", config, env={VARIABLE: receiver.address})
    assert result.returncode == 4, result.output
    assert [body["kind"] for body in receiver.bodies] == ["stopped"]
    assert "ended with exit code 4" in receiver.bodies[0]["text"] and SECRET not in result.output


def test_a_tracker_without_its_address_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=VARIABLE):
        run_task_here("rl_diffusion", tiny_rl_config(tmp_path, train={"trackers": ["webhook"]}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
