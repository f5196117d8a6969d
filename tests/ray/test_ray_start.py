"""A Ray that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.config.runtime import RuntimeConfig
from sfumato.errors import RoleLostError
from sfumato.runtime.cluster.cluster import start_cluster
from tests.ray.conftest import run_in


def test_it_is_tried_twice_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 120)))  # sockets have no room for their names there
    run = run_in(tmp_path)
    with pytest.raises(RoleLostError, match=r"Ray did not start on this machine: .*; end what else .* logs lie in"):
        start_cluster(RuntimeConfig(backend="ray", object_store_gb=0.2), run, num_cpus=1)
    assert (tmp_path / "log.txt").read_text().count("; trying once more") == 1
