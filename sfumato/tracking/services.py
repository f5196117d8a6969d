"""Trackers of other makers, which the numbers and images of a run are sent to.

Each is imported when the configuration names it, takes its settings (project, server, offline mode) from its own
environment variables, and stores the run's id in ``<output_dir>/<tracker>/run_id``, so that a resumed run continues the
same curve. Without a variable the project is called sfumato; the run is called like its folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.config.base import flatten
from sfumato.config.writing import write_atomically
from sfumato.errors import ConfigError, MissingDependencyError, UserError

if TYPE_CHECKING:
    from sfumato.tracking.trackers import Tracker

PROJECT = "sfumato"


class _LoggedRun:
    """The base of services whose run takes dictionaries."""

    _run: Any
    """The service's run."""
    _image: Callable[[np.ndarray], object]
    """The service's class that wraps an array as an image."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._run.log(finite_numbers(metrics), step=step)

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._run.log({name: [self._image(image) for image in images]}, step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish()


class WandbTracker(_LoggedRun):
    """Weights & Biases. ``WANDB_MODE=offline`` needs no network; its files lie in ``output_dir/wandb``.

    Offline, a resumed run is a second folder with the same id: ``wandb sync --append`` joins them.
    """

    def __init__(self, output_dir: Path, resumed: bool, config: Mapping[str, object]) -> None:
        wandb = _import("wandb")
        known_id = _read_known_id(output_dir / "wandb", resumed)
        self._image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", _run_name(output_dir)),
            dir=str(output_dir),
            id=known_id or _keep_id(output_dir / "wandb", secrets.token_hex(8)),
            resume="allow" if known_id else "never",
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code)


class SwanlabTracker(_LoggedRun):
    """SwanLab. ``SWANLAB_MODE=local`` or ``offline`` needs no network; files lie in ``output_dir/swanlab``."""

    def __init__(self, output_dir: Path, resumed: bool, config: Mapping[str, object]) -> None:
        swanlab = _import("swanlab")
        mode = os.environ.get("SWANLAB_MODE")
        if mode == "local" and importlib.util.find_spec("swanboard") is None:
            raise MissingDependencyError(
                "train.trackers: swanlab with SWANLAB_MODE=local keeps no index of its runs without swanboard, and "
                "`swanlab watch` shows none: pip install 'swanlab[dashboard]', or set SWANLAB_MODE=offline"
            )
        folder = output_dir / "swanlab"
        known_id = _read_known_id(folder, resumed)
        self._image = swanlab.Image
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=os.environ.get("SWANLAB_NAME", _run_name(output_dir)),
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(folder)),
            id=known_id or _keep_id(folder, secrets.token_hex(8)),
            resume="allow" if known_id else "never",
            mode=mode,
            config=dict(config),
        )


class MlflowTracker:
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, else a database in ``output_dir/mlflow``.

    The database is shown by ``mlflow ui --backend-store-uri sqlite:///output_dir/mlflow/mlflow.db``.
    """

    def __init__(self, output_dir: Path, resumed: bool, config: Mapping[str, object]) -> None:
        mlflow = _import("mlflow")
        from mlflow.entities import Metric, Param

        folder = (output_dir / "mlflow").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server and importlib.util.find_spec("sqlalchemy") is None:  # mlflow-skinny has no databases
            raise MissingDependencyError(
                "train.trackers: mlflow cannot write its database without sqlalchemy, as mlflow-skinny comes: "
                "pip install mlflow, or set MLFLOW_TRACKING_URI to a server"
            )
        self._metric = Metric
        self._client = mlflow.MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = None if server else (folder / "artifacts").as_uri()
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, where)
        self._id = _read_known_id(folder, resumed)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = _keep_id(folder, self._client.create_run(experiment_id, run_name=_run_name(output_dir)).info.run_id)
        params = [Param(mlflow_name(key), str(value)[:6000]) for key, value in flatten(config).items()]
        for start in range(0, len(params), 100):  # most that one request may hold
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            [self._metric(mlflow_name(key), value, now, step) for key, value in finite_numbers(metrics).items()],
        )

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        for index, image in enumerate(images):
            self._client.log_image(self._id, image, artifact_file=f"{name}/step_{step:06d}_{index}.png")

    def close(self, exit_code: int = 0) -> None:
        stopped = 128 + signal.SIGTERM, 128 + signal.SIGINT
        status = "KILLED" if exit_code in stopped else "FAILED" if exit_code else "FINISHED"
        self._client.set_terminated(self._id, status)


class TrackioTracker(_LoggedRun):
    """trackio, which keeps runs on this machine; ``TRACKIO_DIR`` says where, ``trackio show`` shows them."""

    def __init__(self, output_dir: Path, resumed: bool, config: Mapping[str, object]) -> None:
        trackio = _import("trackio")
        known_id = _read_known_id(output_dir / "trackio", resumed)
        # trackio tells runs apart by their names alone, and many run folders have the same name.
        fresh_name = f"{_run_name(output_dir)}-{secrets.token_hex(3)}"
        self._image = trackio.Image
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=known_id or _keep_id(output_dir / "trackio", fresh_name),
            config=dict(config),
            resume="allow" if known_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_images(self, step: int, name: str, images: np.ndarray) -> None:
        self._run.log({f"{name}/{index}": self._image(image) for index, image in enumerate(images)}, step=step)


SERVICES = {"wandb": WandbTracker, "swanlab": SwanlabTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}


def start_service(name: str, output_dir: Path, resumed: bool, config: Mapping[str, object]) -> Tracker:
    """Builds the tracker of a service.

    Args:
        name: a key of ``SERVICES``.
        output_dir: the run folder.
        resumed: whether the run goes on, so that its curve does, too.
        config: the resolved configuration.

    Raises:
        MissingDependencyError: its package, or one that it stores its numbers with, is not installed.
        ConfigError: it does not start: nobody is logged in, its server does not answer, its project was deleted.
    """
    try:
        return SERVICES[name](output_dir, resumed, config)
    except UserError:
        raise
    except Exception as error:  # of another maker's program, which may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"train.trackers: {name} does not start ({reason}): log in, or set what it reads from the environment, or "
            "take it off the list"
        ) from error


def mlflow_name(name: str) -> str:
    """A name of a metric or parameter as mlflow takes it: other characters, as of files and rewards, become ``_``."""
    return re.sub(r"[^\w\-. :/]", "_", name)[-250:]


def finite_numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The finite metrics as Python floats: services refuse None, and each shows NaN and infinity in its own way."""
    numbers = {name: float(value) for name, value in metrics.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def missing_tracker(name: str) -> MissingDependencyError:
    """The error for a tracker that is not installed."""
    return MissingDependencyError(
        f"train.trackers: {name} is not installed: pip install {name}, or take it off the list"
    )


def _import(name: str) -> ModuleType:
    """The module of a service. Raises MissingDependencyError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_tracker(name) from error


def _run_name(output_dir: Path) -> str:
    return output_dir.resolve().name


def _read_known_id(folder: Path, resumed: bool) -> str | None:
    """The stored id of the run that is resumed; None for a new run, or where none was stored."""
    id_file = folder / "run_id"
    return id_file.read_text(encoding="utf-8").strip() if resumed and id_file.exists() else None


def _keep_id(folder: Path, run_id: str) -> str:
    """Stores the id of a new run, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "run_id", run_id.encode())
    return run_id
