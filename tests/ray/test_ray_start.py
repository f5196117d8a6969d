"""A Ray that does not start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sfumato.config.runtime import RuntimeConfig
from sfumato.errors import ConfigError, RoleLostError
from sfumato.runtime.cluster.cluster import start_cluster
from tests.ray.conftest import run_in
from tests.tiny import ROOT


def test_it_is_tried_twice_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 120)))  # sockets have no room for their names there
    run = run_in(tmp_path)
    with pytest.raises(RoleLostError, match=r"Ray did not start on this machine: .*; end what else .* logs lie in"):
        start_cluster(RuntimeConfig(backend="ray", object_store_gb=0.2), run, num_cpus=1)
    assert (tmp_path / "log.txt").read_text().count("; trying once more") == 1


def test_an_address_at_which_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^runtime.address 127.0.0.1:1: no cluster .* refused; start one"):
        start_cluster(RuntimeConfig(backend="ray", address="127.0.0.1:1"), run_in(tmp_path))


def test_nothing_is_left_of_a_start_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    get_node = services.get_node
    first: list[psutil.Process] = []
    names: list[str] = []
    earlier = set(psutil.Process().children(recursive=True))  # of other tests

    def fail_once(*arguments: Any) -> Any:
        """What Ray does when its processes have started and do not find each other in time."""
        if first:
            return get_node(*arguments)
        first.extend(set(psutil.Process().children(recursive=True)) - earlier)
        names.extend(process.name() for process in first)
        raise ValueError("the node timed out during startup")

    monkeypatch.setattr(services, "get_node", fail_once)
    with start_cluster(RuntimeConfig(backend="ray", object_store_gb=0.1), run_in(tmp_path), num_cpus=1, num_gpus=0):
        assert {"gcs_server", "raylet"} <= set(names), "it had started them"
        deadline = time.monotonic() + 90  # Ray's agents end when they miss their raylet
        while alive := [
            process for process in first if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
    assert "timed out during startup; trying once more" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow  # tests/ray/test_ray_roles.py looks at the ports, tests/unit/test_meeting.py at the token
def test_all_of_ray_on_one_machine_listens_at_loopback_and_asks_for_a_token(tmp_path):
    """In a process that has not imported Ray, as a task's has not."""
    (tmp_path / "home").mkdir()
    code = (
        "import os, stat, sys\n"
        "from pathlib import Path\n"
        "from sfumato.commands.doctor_reach import open_ports\n"
        "from sfumato.config.runtime import RuntimeConfig\n"
        "from sfumato.runtime.cluster.cluster import start_cluster\n"
        "from tests.ray.conftest import run_in\n"
        "if __name__ == '__main__':\n"
        "    config = RuntimeConfig(backend='ray', object_store_gb=0.1)\n"
        "    before = {port.pid for port in open_ports()}\n"
        "    with start_cluster(config, run_in(Path(sys.argv[1])), num_cpus=1, num_gpus=0):\n"
        "        ports = [port for port in open_ports() if port.pid not in before]\n"
        "        assert len(ports) > 3 and not [port for port in ports if port.is_open], ports\n"
        "        path = Path.home() / '.ray' / 'auth_token'\n"
        "        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.environ['RAY_AUTH_MODE'] == 'token'\n"
        "    print('closed to others')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=200, check=False, cwd=ROOT,
    )  # fmt: skip
    assert "closed to others" in done.stdout, done.stderr
