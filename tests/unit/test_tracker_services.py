"""Trackers of other makers, without a network: what was logged is read back from their files. Skipped where absent.

Those that need a tracker are slow: what trackers require contradicts ``constraints.txt``, so ``make slow-test``
installs them apart."""

import importlib.util
import json
import math
import sqlite3
import sys
import time
import types

import numpy as np
import pytest

from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.tracking import trackers
from sfumato.tracking.services import SERVICES, finite_numbers, mlflow_name, start_service

CONFIG = {"train": {"lr": 1e-3, "trackers": ["x"]}, "model": {"lora": None}}
IMAGES = np.zeros((2, 8, 8, 3), np.uint8)


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    for name in ("WANDB_PROJECT", "WANDB_NAME", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def log_and_resume(service, folder, pause_s=0.0):
    """Two steps, and after a pause and a resume two more. Returns the ids that were kept."""
    ids = []
    for resumed, steps in ((False, (1, 2)), (True, (3, 4))):
        tracker = SERVICES[service](folder, resumed, CONFIG)
        ids.append((folder / service / "run_id").read_text())
        for step in steps:
            tracker.log(step, {"loss": 1 / step, "odd/nan": math.nan, "odd/none": None})
        tracker.log_images(steps[-1], "samples/eval", IMAGES)
        tracker.close()
        time.sleep(pause_s)
    return ids


def leveldb_records(content, start=7, block=32768):
    """Records of a log in LevelDB's format, as wandb's files are after a header: crc 4, length 2, type 1, data."""
    record, place = b"", start
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_what_is_no_finite_number_is_left_out():
    settings = {"a": np.float32(0.5), "b": None, "c": math.nan, "d": -math.inf, "e": 3}
    assert finite_numbers(settings) == {"a": 0.5, "e": 3.0} and type(finite_numbers(settings)["a"]) is float


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_tracker_that_is_not_installed_is_named_with_its_command(service, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(MissingDependencyError, match=f"pip install {service}"):
        SERVICES[service](tmp_path, False, CONFIG)


@pytest.fixture
def fake_mlflow(monkeypatch):
    """mlflow as it is imported, whose client cannot be made."""

    def refuse(uri):
        raise KeyError(f"no store\nfor {uri}")

    entities = types.SimpleNamespace(Metric=None, Param=None)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=refuse, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)


@pytest.mark.usefixtures("fake_mlflow")
def test_mlflow_skinny_is_told_from_mlflow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"without sqlalchemy.*pip install mlflow, or set MLFLOW_TRACKING"):
        start_service("mlflow", tmp_path, False, CONFIG)


@pytest.mark.usefixtures("fake_mlflow")
def test_a_service_that_does_not_start_is_an_error_in_one_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nobody.invalid")
    monkeypatch.setattr(trackers, "check_trackers", lambda names: None)  # looks for a module's file
    with pytest.raises(ConfigError, match=r"mlflow does not start \(KeyError: .*no store.*nobody.*take it off"):
        trackers.build_trackers(["mlflow"], tmp_path)


def test_swanlab_without_the_dashboard_that_its_local_mode_needs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", types.SimpleNamespace())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"swanlab\[dashboard\].*or set SWANLAB_MODE=offline"):
        start_service("swanlab", tmp_path, False, CONFIG)


def test_names_that_mlflow_refuses_are_changed():
    assert mlflow_name("eval/loss/data (1)@v2") == "eval/loss/data _1__v2"
    assert mlflow_name("reward/clip+ocr") == "reward/clip_ocr" and len(mlflow_name("x" * 300)) == 250
    assert mlflow_name("perf/tokens_per_s: a-b.c") == "perf/tokens_per_s: a-b.c"


@pytest.mark.slow
def test_wandb_offline_keeps_the_run_id(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    first, second = log_and_resume("wandb", tmp_path, pause_s=1.1)  # its folders are named by the second
    assert first == second
    values = {}
    for path in sorted(tmp_path.glob(f"wandb/offline-run-*/run-{first}.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                values |= {int(items["_step"]): float(items["loss"])} if "loss" in items else {}
                assert "odd/nan" not in items
    assert values == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png"))) >= 2


@pytest.mark.slow
def test_swanlab_local_keeps_the_run_id(tmp_path):
    pytest.importorskip("swanlab")
    pytest.importorskip("swanboard")
    first, second = log_and_resume("swanlab", tmp_path)
    assert first == second
    lines = [
        json.loads(line) for path in tmp_path.glob("swanlab/**/logs/**/*.log") for line in path.read_text().splitlines()
    ]
    scalars = sorted((line["index"], line["data"]) for line in lines if isinstance(line.get("data"), float))
    assert scalars == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 0.25)]


@pytest.mark.slow
def test_mlflow_writes_a_database_below_the_run_folder(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    first, second = log_and_resume("mlflow", tmp_path)
    assert first == second
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    assert [(metric.step, metric.value) for metric in client.get_metric_history(first, "loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (4, 0.25),
    ]
    run = client.get_run(first)
    assert run.data.params["train.lr"] == "0.001" and run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name and "odd/nan" not in run.data.metrics
    assert "samples/eval/step_000004_1.png" in {
        artifact.path for artifact in client.list_artifacts(first, "samples/eval")
    }


@pytest.mark.slow
def test_trackio_keeps_the_run_name(tmp_path):
    pytest.importorskip("trackio")
    first, second = log_and_resume("trackio", tmp_path)
    assert first == second
    with sqlite3.connect(tmp_path / "trackio" / "sfumato.db") as database:
        result = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    losses = {step: json.loads(text)["loss"] for name, step, text in result if "loss" in json.loads(text)}
    assert losses == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25} and {name for name, _, _ in result} == {first}
    other = tmp_path / "elsewhere" / tmp_path.name
    other.mkdir(parents=True)
    assert log_and_resume("trackio", other)[0] != first
