"""What may lie in the folder ``control`` of a run: requests, and things that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sfumato.tracking.control_files import MOST_BYTES, MOST_PROMPTS, MOST_REQUESTS, ControlFolder, ControlRequest
from tests.control_requests import write_request


@pytest.fixture
def control(tmp_path: Path) -> ControlFolder:
    (tmp_path / "control").mkdir()
    return ControlFolder(tmp_path)


def take_one(control: ControlFolder) -> ControlRequest:
    """The only request, whose file is gone then."""
    assert control.has_news()
    (request,) = control.take_requests()
    assert not control.has_news()
    return request


def test_requests_come_in_their_order_and_once(control: ControlFolder, tmp_path: Path) -> None:
    for number, command in enumerate(("save", "sample", "stop")):
        write_request(tmp_path, f"z{9 - number}", command)
        os.utime(tmp_path / "control" / f"z{9 - number}.json", ns=(number, number))
    assert [request.command for request in control.take_requests()] == ["save", "sample", "stop"]
    assert control.take_requests() == []


def test_without_a_folder_there_is_no_news(tmp_path: Path) -> None:
    assert not ControlFolder(tmp_path).has_news()


def test_a_file_under_way_is_left_alone(control: ControlFolder) -> None:
    (control.path / "a.tmp").write_text('{"comm')
    assert not control.has_news()
    assert (control.path / "a.tmp").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"command": "sa', "is no JSON"),
        (b"", "is no JSON"),
        (b"[" * 20_000, "is no JSON"),
        (b'["save"]', 'has no text "command"'),
        (b'{"command": 3}', 'has no text "command"'),
        (b'{"command": "save", "path": "/etc"}', "which no request has"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"command": "save"}' + b" " * MOST_BYTES, "at most 65,536 are read"),
    ],
)
def test_a_file_that_is_no_request_is_refused(control: ControlFolder, content: bytes, problem: str) -> None:
    (control.path / "a.json").write_bytes(content)
    request = take_one(control)
    assert request.id == "a" and problem in request.problem


def test_a_link_is_not_followed(control: ControlFolder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('{"command": "stop"}')
    (control.path / "a.json").symlink_to(target)
    assert take_one(control) == ControlRequest("a", "", "control/a.json is a link")
    assert target.exists()


def test_a_pipe_and_a_folder_are_refused(control: ControlFolder) -> None:
    os.mkfifo(control.path / "a.json")
    assert "is no plain file" in take_one(control).problem
    (control.path / "b.json").mkdir()
    assert "is no plain file" in take_one(control).problem


def test_a_folder_that_is_a_link_is_no_control(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "control").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "a.json").write_text('{"command": "stop"}')
    assert not ControlFolder(tmp_path / "run").has_news()


def test_a_name_cannot_act_on_what_shows_it(control: ControlFolder) -> None:
    (control.path / "\x1b[2J\n.json").write_text('{"command": "save"}')
    request = take_one(control)
    assert "\x1b" not in request.id and "\n" not in request.id and "has a name of other characters" in request.problem


def test_a_flood_is_taken_in_parts(control: ControlFolder, tmp_path: Path) -> None:
    for number in range(MOST_REQUESTS + 5):
        write_request(tmp_path, f"a{number}", "save")
    assert len(control.take_requests()) == MOST_REQUESTS
    assert len(control.take_requests()) == 5


def test_watched_prompts_are_read_when_they_change(control: ControlFolder) -> None:
    path = control.path / "watched_prompts.txt"
    path.write_text("# first\n a cat \n\nein Bär\n", encoding="utf-8")
    assert control.has_news()
    watched = control.read_watched()
    assert watched is not None and watched.prompts == ["a cat", "ein Bär"]
    assert control.read_watched() is None and not control.has_news()
    path.write_text("x\n" * (MOST_PROMPTS + 1), encoding="utf-8")
    watched = control.read_watched()
    assert watched is not None and "17 prompts" in watched.problem
    path.unlink()
    watched = control.read_watched()
    assert watched is not None and watched.prompts == [] and not watched.problem
