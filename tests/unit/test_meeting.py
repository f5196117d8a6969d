"""Where processes of a run find each other: which addresses are listened at, and who can open what."""

import os
import resource
import socket
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from sfumato.errors import ConfigError
from sfumato.parallel import rendezvous as meeting
from sfumato.parallel.rendezvous import bound_to_loopback, join_store, raise_descriptors, serve_store
from sfumato.runtime.cluster.token import require_token, send_token
from tests.tiny import ROOT

SOON = timedelta(seconds=20)


def listening(port):
    """Addresses at which this port is listened at, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}


def test_a_store_listens_at_its_address_alone():
    store = serve_store("127.0.0.1", 0, SOON)
    assert listening(store.port) == {"0100007F"}
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=SOON)
    other.set("a", "1")
    assert store.get("a") == b"1"


@pytest.mark.parametrize("address", ["192.0.2.77", "no-such-name.invalid"])
def test_an_address_that_is_not_of_this_machine_needs_every_network(address):
    store = serve_store(address, 0, SOON)
    assert listening(store.port) == {"00000000"}


def test_the_name_of_a_machine_that_leads_to_itself_is_not_for_others(monkeypatch):
    results = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: results)
    assert meeting._address_of("node7") == (socket.AF_INET, "0.0.0.0")
    assert meeting._address_of("localhost") == (socket.AF_INET, "127.0.1.1")


def test_open_files_are_raised_to_what_ranks_need_or_refused_with_the_remedy(monkeypatch):
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        raise_descriptors(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1030, hard)
        raise_descriptors(1)  # lowers nothing
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1030, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(ConfigError, match=r"2048 ranks needs 7168 open files.* limit of this machine is 4096.*ulimit"):
        raise_descriptors(2048)


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        serve_store("127.0.0.1", taken.getsockname()[1], SOON)


def test_ranks_of_one_machine_meet_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_STORE", str(tmp_path / "store"))
    stores = [join_store(rank, 2, SOON) for rank in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value" and isinstance(stores[1], dist.FileStore)


@pytest.mark.parametrize(("ranks_of_this_node", "is_seen"), [("2", False), ("1", True)])
def test_ranks_that_torchrun_starts_anew_do_not_meet_those_before(monkeypatch, ranks_of_this_node, is_seen):
    """On several nodes, each of which counts its restarts for itself, they could miss each other instead."""
    served_by_agent = serve_store("127.0.0.1", 0, SOON)
    monkeypatch.delenv("SFUMATO_STORE", raising=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": served_by_agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in {**variables, "LOCAL_WORLD_SIZE": ranks_of_this_node, "TORCHELASTIC_RESTART_COUNT": 0}.items():
        monkeypatch.setenv(name, str(value))
    join_store(0, 2, SOON).set("address of rank 0", "of a rank that has died")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert join_store(1, 2, SOON).check(["address of rank 0"]) == is_seen


def test_gloo_is_bound_to_loopback_unless_a_person_says_otherwise(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with bound_to_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with bound_to_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_ranks_that_the_launcher_starts_listen_at_loopback_alone(tmp_path):
    (tmp_path / "task.py").write_text(
        "import os, stat, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from sfumato.config.sections import TrainConfig\n"
        "from sfumato.parallel.mesh import build_mesh, close_mesh\n"
        f"mesh = build_mesh(TrainConfig(device='cpu', output_dir={str(tmp_path)!r}))\n"
        "assert mesh.sum(1.0) == 2\n"
        "links = [Path('/proc/self/fd') / name for name in os.listdir('/proc/self/fd')]\n"
        "inodes = {os.readlink(link) for link in links if link.is_symlink()}\n"
        "rows = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/net/{name}').readlines()[1:]]\n"
        "mine = {row[1].rpartition(':')[0] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in inodes}\n"
        "assert mine == {'0100007F'}, mine\n"
        "folder = Path(os.environ['SFUMATO_STORE']).parent\n"
        "assert stat.S_IMODE(folder.stat().st_mode) == 0o700\n"
        "mesh.barrier()\n"
        "close_mesh()\n"
    )
    command = [sys.executable, "-m", "sfumato.launcher", "--nproc-per-node", "2", str(tmp_path / "task.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def token_path(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "put back afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "made" / "auth_token"))
    return tmp_path / "made" / "auth_token"


def test_the_token_of_ray_is_for_nobody_else(token_path):
    said = []
    before = os.umask(0)
    try:
        require_token(said.append)
    finally:
        os.umask(before)
    assert stat.S_IMODE(token_path.stat().st_mode) == 0o600 and stat.S_IMODE(token_path.parent.stat().st_mode) == 0o700
    token = token_path.read_text()
    assert len(token) == 64 and os.environ.get("RAY_AUTH_MODE", "token") == "token"
    require_token(said.append)
    assert token_path.read_text() == token and said == []
    token_path.chmod(0o644)
    require_token(said.append)
    assert stat.S_IMODE(token_path.stat().st_mode) == 0o600 and "others could read the token" in said[0]


def test_a_person_who_wants_no_token_of_ray_gets_none(token_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    require_token(print)
    assert not token_path.exists()


def test_a_cluster_is_sent_the_token_that_is_there(token_path, monkeypatch):
    # Ray reads the environment when it is imported; whether a test before this one has done so is no matter here
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    send_token()
    assert "RAY_AUTH_MODE" not in os.environ, "there is no token"
    token_path.parent.mkdir()
    token_path.write_text("a token")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    send_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled", "a person's choice stays"
    monkeypatch.delenv("RAY_AUTH_MODE")
    send_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
