"""A Ray cluster on this machine for each test module, with 4 CPUs and 2 made-up GPUs, and a driver's run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sfumato.config.runtime import RuntimeConfig
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.cluster.cluster import Cluster, start_cluster
from sfumato.tracking.run import Run


def run_in(folder: Path) -> Run:
    """The driver's run."""
    return Run(folder, "test", Mesh(Layout(), torch.device("cpu")))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = RuntimeConfig(backend="ray", object_store_gb=0.5, heartbeat_s=5.0, call_timeout_s=120.0)
    os.environ.pop("MKL_CBWR", None)  # processes get it whatever the driver was started with
    with start_cluster(config, run_in(tmp_path_factory.mktemp("run")), num_cpus=4, num_gpus=2) as started:
        yield started
