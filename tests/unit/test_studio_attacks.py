"""What strangers may try with the studio: other hosts, other pages, no token, paths that lead out, floods, links."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zlib
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from sfumato.errors import ConfigError, DataError
from sfumato.serving.requests import RefusedRequestError
from sfumato.studio import live
from sfumato.studio.app import Studio, build_app
from sfumato.studio.control import COMMANDS, Control
from sfumato.studio.runs import RunsFolder
from sfumato.studio.serve import find_token, serve
from sfumato.studio.thumbnails import Thumbnails
from sfumato.tracking.control_files import ControlFolder
from sfumato.tracking.lock import _machine_id
from tests.studio_runs import HOST, TOKEN, write_run
from tests.unit.test_studio import read, write_lock


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    write_run(root / "a")
    (tmp_path / "secret.png").write_bytes((root / "a" / "samples" / "step_000004" / "eval_0000.png").read_bytes())
    (tmp_path / "secret.txt").write_text("outside\n")
    return root


def build(root, tmp_path, may_control=False, token=TOKEN):
    studio = Studio(root, Thumbnails(tmp_path / "thumbnails"))
    app = build_app(studio, TOKEN, more=Control(studio.runs, may_control).routes())
    client = TestClient(app, base_url=HOST)
    if token:
        client.get("/", params={"token": token})
    return client


@pytest.fixture
def client(runs, tmp_path):
    return build(runs, tmp_path)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "user@localhost", ""])
def test_another_host_is_refused_also_with_the_cookie(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


def test_pages_of_others_are_refused_and_our_own_are_not(runs, tmp_path):
    client = build(runs, tmp_path, may_control=True)
    for origin in ("http://evil.example", "null", "http://localhost:1", "http://localhost.evil.example:8765"):
        assert client.get("/api/runs", headers={"origin": origin}).status_code == 403
        body = {"run": "a", "command": "stop"}
        assert client.post("/api/control", json=body, headers={"origin": origin}).status_code == 403
    for site in ("cross-site", "same-site"):
        assert client.get("/", headers={"sec-fetch-site": site}).status_code == 403
    assert client.get("/api/runs", headers={"origin": HOST, "sec-fetch-site": "same-origin"}).status_code == 200
    assert not (runs / "a" / "control").exists()


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü"])
def test_without_the_token_nothing_is_answered(runs, tmp_path, token):
    client = build(runs, tmp_path, may_control=True, token=token)
    paths = ["/", "/api/runs", "/static/app.js", "/events", "/thumbnail", "/made?name=x", f"/api/runs?token={TOKEN}"]
    assert {client.get(path).status_code for path in paths} == {401}
    assert client.post("/api/control", json={"run": "a", "command": "save"}).status_code == 401
    assert client.get("/api/runs", headers={"cookie": "sfumato_x=1; a; =; sfumato_=x"}).status_code == 401


def test_the_token_leaves_the_address_and_the_cookie_cannot_be_read(runs, tmp_path):
    client = build(runs, tmp_path, token="")
    answer = client.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_answer_has_the_policy(client):
    for path in ("/", "/static/app.js", "/api/runs", "/nothing", "/api/overview?run=x", "/thumbnail?run=a"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


LOCK = {"host": "h", "born": "", "place": _machine_id(), "since": "", "token": "t"}
EVENT = '{"role": "actor", "rank": 0, "kind": "update", "start": -1e308, "end": 1e308, "step": 1, "version": 0}\n'
PATHS = [
    "../secret",
    "/etc/passwd",
    "..%2fsecret",
    "a/../../x",
    "a\x00b",
    "a" * 1001,
    "....//",
    "~root",
    "\\..\\x",
    "a/",
]


@pytest.mark.parametrize("name", PATHS)
def test_no_parameter_leads_out_of_the_runs(client, name):
    for path in ("/api/overview", "/api/files", "/api/log", "/events", "/api/step?step=4"):
        assert client.get(path, params={"run": name, "step": 4}).status_code in (400, 404), path
    for path in ("/file", "/thumbnail"):
        assert client.get(path, params={"run": "a", "step": 4, "file": name}).status_code in (400, 404)
    for step in (name, "-1", "--1", "-", "1e3", "٤", "9" * 18):
        assert client.get("/file", params={"run": "a", "step": step, "file": "eval_0000.png"}).status_code in (400, 404)
    assert client.get(f"/static/{quote(name)}").status_code in (400, 404)


def test_files_that_rows_name_outside_of_their_folder_are_not_sent(client, runs, tmp_path):
    folder = runs / "a" / "samples" / "step_000004"
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe.png")
    names = ["../../../../secret.png", str(tmp_path / "secret.png"), "link.png", "pipe.png", "samples.jsonl", "", "."]
    rows = [
        {"kind": "eval", "sample_id": 50 + i, "prompt": "p", "seed": 1, "file": name} for i, name in enumerate(names)
    ]
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for name in names:
        for path in ("/file", "/thumbnail"):
            answer = client.get(path, params={"run": "a", "step": 4, "file": name, "width": 128})
            assert answer.status_code in (400, 404), (path, name)
    assert client.get("/file", params={"run": "a", "step": 4, "file": "config.yaml"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.lock", json.dumps({**LOCK, "pid": 2**80})),
        ("run.lock", json.dumps({**LOCK, "pid": "1"})),
        ("run.lock", json.dumps({**LOCK, "born": [], "pid": -1})),
        ("environment.json", '{"total_steps": 1e999, "task": ["\\ud83d"], "finished": {"a": []}}'),
        ("metrics.jsonl", '{"step": 1, "__proto__": 1, "eval/reward/total": 1e308}\n{"step": 2, "loss": 1e999}\n'),
        ("timeline.jsonl", EVENT + EVENT.replace('"actor"', '"run"').replace('"update"', '"step"')),
        ("control.jsonl", '{"id": [1], "command": {"x": 1}, "time": "x", "step": null}\nnull\n'),
        ("config.yaml", "reward: {rewards: [1, {type: [x], weight: .nan}]}\neval: x\n1: 2\n"),
    ],
)
def test_a_crafted_file_of_one_run_stops_no_page(runs, tmp_path, name, text):
    write_run(runs / "crafted")
    (runs / "crafted" / name).write_text(text)
    client = build(runs, tmp_path, may_control=True)
    assert {line["run"] for line in read(client, "/api/runs")["runs"]} == {"a", "crafted"}
    pages = ("overview", "status", "metrics", "gallery", "timeline", "files", "log", "checkpoints", "control")
    for page in (*pages, "why?first=4&last=8", "compare?run=a"):
        assert client.get(f"/api/{page}{'&' if '?' in page else '?'}run=crafted").status_code == 200, page


@pytest.mark.parametrize(
    "name", [b"no \xff utf-8", b"a#b?c&d=%2e%2e", b"<img src=x>", b"two\nlines", " \u202e ".encode()]
)
def test_runs_of_any_name_are_found_by_the_name_that_is_shown(runs, tmp_path, name):
    write_run(runs / "b").rename(os.fsdecode(os.path.join(os.fsencode(runs), name)))
    client = build(runs, tmp_path)
    (shown,) = {line["run"] for line in read(client, "/api/runs")["runs"]} - {"a"}
    assert read(client, "/api/overview", run=shown)["step"] == 12


HOSTILE_FIELDS = [
    {"trained_steps": [10**9], "log_ratio": [0.0]},
    {"trained_steps": [-5, 1e300], "log_ratio": [0, 0]},
    {"trained_steps": "abc", "log_ratio": 5},
    {"noise_levels": [{}]},
    {"tokens": ["a"] * 70_000},
    {"tokens": [{"a": 1}]},
    {"log_ratio": ["x"]},
    {"policy_version": [1]},
    {"rewards": [1]},
    {"total": "<b>"},
    {"group_mean": "x"},
    {"damage": ["x"]},
    {"prompt": {"x": 1}},
]


def test_values_that_would_stop_a_page_are_left_out_and_told(client, runs):
    """A step number of a milliard lays out as many boxes; a prompt that is no text has no place in a table."""
    folder = runs / "a" / "samples" / "step_000004"
    for number, fields in enumerate(HOSTILE_FIELDS):
        row = {"kind": "eval", "sample_id": 50 + number, "prompt": "p", "seed": 1, "text": "t", **fields}
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    for number in range(len(HOSTILE_FIELDS)):
        sample = {"run": "a", "step": 4, "kind": "eval", "id": 50 + number}
        assert client.get("/api/sample", params=sample).status_code == 404
    assert read(client, "/api/why", run="a", first=4, last=8)["differences"]
    problems = read(client, "/api/gallery", run="a")["problems"]
    assert any(f"{len(HOSTILE_FIELDS)} rows hold values that no run has written" in text for text in problems)


def test_pictures_that_are_none_or_too_large_are_not_opened(client, runs):
    folder = runs / "a" / "samples" / "step_000004"
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(10**6))), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    for name in ("page.png", "page.svg", "page.html"):
        (folder / name).write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    names = ("bomb.png", "page.png", "page.svg", "page.html")
    rows = [
        {"kind": "eval", "sample_id": 50 + i, "prompt": "p", "seed": 1, "file": name} for i, name in enumerate(names)
    ]
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for name in names:
        parameters = {"run": "a", "step": 4, "file": name}
        assert client.get("/thumbnail", params={**parameters, "width": 128}).status_code == 404
        answer = client.get("/file", params=parameters)
        assert answer.status_code == 404 if name in names[2:] else answer.headers["content-type"] == "image/png"


def test_links_out_of_the_folder_are_not_followed(client, runs, tmp_path):
    write_run(tmp_path / "elsewhere")
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    (runs / "a" / "samples" / "step_000099").symlink_to(tmp_path / "elsewhere" / "samples" / "step_000004")
    for name in ("log.txt", "environment.json"):
        (runs / "a" / name).unlink()
        (runs / "a" / name).symlink_to(tmp_path / "secret.txt")
    assert [line["run"] for line in read(client, "/api/runs")["runs"]] == ["a"]
    assert 99 not in read(client, "/api/gallery", run="a")["repeated_steps"]
    text = client.get("/api/log", params={"run": "a"}).text + client.get("/api/files", params={"run": "a"}).text
    assert "outside\\n" not in text and "outside of its folder" in text


def test_texts_of_a_run_are_texts(client):
    """The page makes text nodes of them (tests/unit/test_studio_browser.py); no answer is HTML but the page itself."""
    for path in ("/api/gallery?run=a", "/api/step?run=a&step=4", "/api/frames?run=a&id=2"):
        answer = client.get(path)
        assert "script" in answer.text or path.endswith("=4")
        assert answer.headers["content-type"] == "application/json"


def test_parameters_that_ask_for_too_much(client):
    for query in ("width=100000", "width=1", "first=-1", "name=" + "&name=".join("x" * 70)):
        assert client.get(f"/api/curves?run=a&name=loss&{query}").status_code == 400
    assert client.get("/api/cells", params={"run": "a", "steps": ",".join(map(str, range(65)))}).status_code == 400
    assert client.get("/thumbnail?run=a&step=4&file=eval_0000.png&width=127").status_code == 400
    assert client.get("/api/compare", params={"run": ["a"] * 9}).status_code == 400


def test_only_post_changes_anything_and_only_with_control(runs, tmp_path, client):
    write_lock(runs / "a")
    body = {"run": "a", "command": "save"}
    assert client.post("/api/control", json=body).status_code == 404
    assert client.post("/api/replay", json=body).status_code == 404
    assert client.post("/api/runs", json=body).status_code == 405
    assert not (runs / "a" / "control").exists() and not any(read(client, "/api/settings").values())
    controlling = build(runs, tmp_path, may_control=True)
    assert controlling.get("/api/control", params=body).status_code == 200
    assert not (runs / "a" / "control").exists()
    form = controlling.post("/api/control", content=json.dumps(body), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    name = controlling.post("/api/control", json=body).json()["id"]
    assert json.loads((runs / "a" / "control" / f"{name}.json").read_text()) == {"command": "save"}
    assert not list((runs / "a" / "control").glob("*.tmp"))


def test_a_run_takes_what_a_page_has_asked_for(runs, tmp_path):
    client = build(runs, tmp_path, may_control=True)
    write_lock(runs / "a")
    folder = ControlFolder(runs / "a")
    assert not folder.has_news()
    names = [client.post("/api/control", json={"run": "a", "command": command}).json()["id"] for command in COMMANDS]
    assert client.post("/api/watched", json={"run": "a", "prompts": ["a cat", "ein Hündchen"]}).status_code == 200
    assert sorted(read(client, "/api/control", run="a")["waiting"]) == sorted(names)
    taken = {request.id: (request.command, request.problem) for request in folder.take_requests()}
    assert taken == {name: (command, "") for name, command in zip(names, COMMANDS, strict=True)}
    assert folder.read_watched() == (["a cat", "ein Hündchen"], "")
    assert read(client, "/api/control", run="a")["waiting"] == [] and not folder.has_news()


def test_what_control_refuses(runs, tmp_path):
    client = build(runs, tmp_path, may_control=True)
    assert client.post("/api/control", json={"run": "a", "command": "save"}).status_code == 409
    write_lock(runs / "a")
    for body in ({"run": "a", "command": "rm"}, {"run": "../a", "command": "save"}, {"command": "save"}, [1], {"x": 1}):
        assert client.post("/api/control", json=body).status_code in (400, 404)
    large = client.post("/api/control", content=b"[" * 100_000, headers={"content-type": "application/json"})
    assert large.status_code == 413
    deep = client.post("/api/control", content=b"[" * 50_000, headers={"content-type": "application/json"})
    assert deep.status_code == 400
    for prompts in (["x"] * 17, ["x" * 2001], ["#x"], "x", [1]):
        assert client.post("/api/watched", json={"run": "a", "prompts": prompts}).status_code == 400
    assert not (runs / "a" / "control").exists()
    assert client.post("/api/watched", json={"run": "a", "prompts": ["a  cat", "", "ein Hündchen"]}).status_code == 200
    assert (runs / "a" / "control" / "watched_prompts.txt").read_text() == "a cat\nein Hündchen\n"
    assert read(client, "/api/control", run="a")["prompts"] == ["a cat", "ein Hündchen"]
    for body in (
        {"run": "a", "step": "4", "kind": "eval", "id": 0},
        {"run": "a", "step": 4, "kind": "../x", "id": 0},
        {"run": "a", "step": 4, "kind": "eval", "id": 99},
    ):
        assert client.post("/api/replay", json=body).status_code in (400, 404)
    for body in (
        {"run": "a", "prompt": ""},
        {"run": "a", "prompt": "x", "checkpoint": "1; rm"},
        {"run": "a", "prompt": "x", "seed": "1"},
    ):
        assert client.post("/api/playground", json=body).status_code == 400


def test_control_does_not_write_where_a_link_leads(runs, tmp_path):
    client = build(runs, tmp_path, may_control=True)
    write_lock(runs / "a")
    (tmp_path / "elsewhere").mkdir()
    (runs / "a" / "control").symlink_to(tmp_path / "elsewhere")
    answer = client.post("/api/control", json={"run": "a", "command": "save"})
    assert answer.status_code == 422 and "is a link" in answer.json()["error"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_flood_of_streams_is_refused(runs, monkeypatch):
    monkeypatch.setattr(live, "MOST_STREAMS", 3)

    async def flood():
        streams = live.Live(RunsFolder(runs))
        held = [await streams.events("a", "") for _ in range(3)]
        for stream in held:
            await anext(stream)
        with pytest.raises(RefusedRequestError, match="3 pages"):
            await streams.events("a", "")
        await held[0].aclose()
        await streams.events("a", "")

    asyncio.run(flood())


def test_starts_that_are_refused(tmp_path, monkeypatch, runs):
    with pytest.raises(DataError, match="does not exist"):
        serve(tmp_path / "nothing", "127.0.0.1", 0)
    with pytest.raises(DataError, match="is a file"):
        serve(tmp_path / "secret.txt", "127.0.0.1", 0)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        serve(runs, "192.0.2.1", 0)
    monkeypatch.setenv("SFUMATO_STUDIO_TOKEN", "short")
    with pytest.raises(ConfigError, match="16 or more letters"):
        find_token()
