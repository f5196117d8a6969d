"""JSON lines survive crashes and resumes; TensorBoard shows no curve twice."""

import math
import subprocess
import sys
import time
import types
from contextlib import closing

import numpy as np
import pytest
import torch

from sfumato.config.writing import write_atomically
from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.tracking.json_lines import JsonLines, read_jsonl, strict_json
from sfumato.tracking.services import SERVICES
from sfumato.tracking.trackers import KNOWN_TRACKERS, WEBHOOK, build_trackers


def write_steps(path, steps):
    with closing(JsonLines(path)) as lines:
        for step in steps:
            lines.write({"step": step, "loss": 1.0 / step})


def test_lines_are_strict_json_with_sorted_keys_and_full_precision(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    value = 0.1 + 0.2
    with closing(JsonLines(path)) as lines:
        lines.write({"step": 1, "b": value, "a": math.nan, "c": [math.inf, {"d": -math.inf}]})
    text = path.read_text()
    assert text == '{"a": null, "b": 0.30000000000000004, "c": [null, {"d": null}], "step": 1}\n'
    assert read_jsonl(path)[0]["b"] == value


def test_numbers_of_numpy_and_torch_are_written_as_numbers(tmp_path):
    with closing(JsonLines(tmp_path / "m.jsonl")) as lines:
        lines.write({"step": np.int64(3), "a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.float64("nan")})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 3, "a": 0.5, "b": 2.0, "c": None}]
    with pytest.raises(TypeError):
        strict_json({"step": np.zeros(2)})


def test_a_line_reaches_the_file_before_close(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]
    lines.close()


def test_resume_keeps_lines_until_the_step_byte_for_byte_and_appends(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 8))
    before = path.read_bytes().split(b"\n")
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    with closing(JsonLines(path, keep_until_step=4)) as lines:
        lines.write({"step": 5, "loss": 9.0})
    after = path.read_bytes().split(b"\n")
    assert after[:4] == before[:4]
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3, 4, 5]
    assert read_jsonl(path)[-1]["loss"] == 9.0
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_resume_after_a_torn_line_does_not_glue_the_next_line_to_it(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x": 0.')
    with closing(JsonLines(path, keep_until_step=100)) as lines:
        lines.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with closing(JsonLines(path, keep_until_step=2)) as lines:
        lines.write({"step": 3})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3]


def test_no_step_to_keep_starts_an_empty_file(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, [1, 2])
    JsonLines(path).close()
    assert path.read_bytes() == b""
    JsonLines(tmp_path / "absent.jsonl", keep_until_step=5).close()
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2"):
        read_jsonl(path)
    with pytest.raises(DataError, match=r"m\.jsonl:2"):
        JsonLines(path, keep_until_step=9)
    assert '{"step": 3}' in path.read_text()


def test_torn_lines_that_are_not_text_or_no_object_are_dropped(tmp_path):
    for torn in (b"\x00\x00\xff", b"12", b"{", '{"p": "é'.encode()[:-1]):
        (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n' + torn)
        assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]


def test_unicode_line_separators_do_not_cut_a_line(tmp_path):
    (tmp_path / "m.jsonl").write_text(strict_json({"step": 1, "prompt": "a\u2028b"}) + "\n", encoding="utf-8")
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "prompt": "a\u2028b"}]


def test_a_record_without_step_is_refused(tmp_path):
    with closing(JsonLines(tmp_path / "m.jsonl")) as lines, pytest.raises(ValueError, match="step"):
        lines.write({"loss": 1.0})
    (tmp_path / "m.jsonl").write_text('{"loss": 1}\n{"step": 1}\n')
    with pytest.raises(DataError, match="step"):
        JsonLines(tmp_path / "m.jsonl", keep_until_step=1)


def test_write_atomically_leaves_the_old_file_when_the_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def read_scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, round(e.value, 3)) for e in events.Scalars(name)], events.Tags()


def test_tensorboard_hides_what_a_resumed_run_logs_again(tmp_path):
    (tracker,) = build_trackers(["tensorboard"], tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"loss": float(step)})
    tracker.close()
    time.sleep(1.01)  # names of tensorboard's files hold whole seconds, then a number that is sorted as a text
    (tracker,) = build_trackers(["tensorboard"], tmp_path, purge_step=4)
    for step in range(4, 7):
        tracker.log(step, {"loss": step + 0.5})
    tracker.log_images(6, "eval", np.zeros((2, 8, 8, 3), np.uint8))
    tracker.close()
    points, tags = read_scalars(tmp_path / "tensorboard", "loss")
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5)]
    assert tags["images"] == ["eval"]


def test_tensorboard_has_every_value_of_a_step_but_those_that_are_none(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (tracker,) = build_trackers(["tensorboard"], tmp_path)
    tracker.log(1, {"loss": 0.1, "lr": 1e-9, "tokens": 128, "of torch": torch.tensor(2.5), "missing": None})
    tracker.log(2, {"missing": None})
    tracker.log(3, {"loss": 0.2})
    tracker.close()
    points, tags = read_scalars(tmp_path / "tensorboard", "loss")
    assert points == [(1, 0.1), (3, 0.2)] and sorted(tags["scalars"]) == ["loss", "lr", "of torch", "tokens"]
    (path,) = (tmp_path / "tensorboard").iterdir()
    steps = [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert steps == [1, 3], "one event for each step"


def test_a_run_goes_on_without_tensorboard_where_it_cannot_write(tmp_path):
    (tmp_path / "tensorboard").write_text("")  # as on a full disk, its folder cannot be made
    said = []
    assert build_trackers(["tensorboard"], tmp_path, say=said.append) == []
    assert "tracker tensorboard failed" in said[0] and "the run goes on" in said[0]


def test_tensorboard_refuses_images_of_another_layout(tmp_path):
    (tracker,) = build_trackers(["tensorboard"], tmp_path)
    for images in (np.zeros((2, 3, 8, 8), np.uint8), np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match="eval"):
            tracker.log_images(1, "eval", images)
    tracker.close()


def test_every_service_is_known_and_nothing_else():
    """The names are written out where they are checked, since most runs load no service."""
    assert set(KNOWN_TRACKERS) == {"tensorboard", *SERVICES, WEBHOOK}


def test_unknown_and_doubled_trackers_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"'wandbb'.*tensorboard"):
        build_trackers(["tensorboard", "wandbb"], tmp_path)
    with pytest.raises(ConfigError, match="twice"):
        build_trackers(["tensorboard", "tensorboard"], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert build_trackers([], tmp_path) == []


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        build_trackers(["tensorboard", "wandb"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_beside_a_package_that_does_not_fit_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    class Stale(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("protobuf 5.29.6 is older than 6.31.1")

    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.summary_pb2", Stale("summary_pb2"))
    with pytest.raises(MissingDependencyError, match=r"cannot be imported \(RuntimeError: .*older.*pip install -U"):
        build_trackers(["tensorboard"], tmp_path)


def test_values_that_are_none_are_left_out(tmp_path):
    (tracker,) = build_trackers(["tensorboard"], tmp_path)
    tracker.log(1, {"loss": 0.5, "none": None, "nan": math.nan})
    tracker.close()
    assert set(read_scalars(tmp_path / "tensorboard", "loss")[1]["scalars"]) == {"loss", "nan"}


def test_importing_the_tracking_modules_loads_nothing_heavy():
    code = (
        "import sys; import sfumato.tracking.report, sfumato.tracking.progress, sfumato.tracking.trackers,"
        " sfumato.tracking.samples;"
        "print([m for m in ('torch', 'matplotlib', 'tensorboard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reader_of_lines_has_its_old_name_for_a_release():
    with pytest.warns(FutureWarning, match="in sfumato.tracking.json_lines now"):
        from sfumato.tracking.trackers import read_jsonl as by_old_name
    assert by_old_name is read_jsonl
