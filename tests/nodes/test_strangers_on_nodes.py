"""What another user of the machine, and another machine, can reach of a run on one machine. Root alone can try it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes.namespaces import Nodes, refusal
from tests.tiny import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")]

TASK = """
import os, sys, time
from pathlib import Path
from sfumato.config.sections import TrainConfig
from sfumato.parallel.mesh import build_mesh, close_mesh
folder = Path(sys.argv[1])
mesh = build_mesh(TrainConfig(device="cpu", output_dir=str(folder)))
links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
inodes = {os.readlink(link) for link in links if link.is_symlink()}
rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
(folder / f"{mesh.rank}.part").write_text(f"{os.environ['SFUMATO_STORE']} {' '.join(map(str, ports))}")
(folder / f"{mesh.rank}.part").rename(folder / f"{mesh.rank}.ports")
total = 0.0
while not (folder / "stop").exists() or mesh.any(not (folder / "stop").exists()):
    total = mesh.sum(1.0) + mesh.gather([mesh.rank])[1][0]
    assert total == 3.0, total
    time.sleep(0.01)
    if mesh.any((folder / "stop").exists()):
        break
close_mesh()
print("unchanged", total)
"""

STRANGER = """
import os, socket, sys
address, store, *ports = sys.argv[1:]
found = []
try:
    open(store, "r+b")
    found.append("store")
except OSError:
    pass
for number in map(int, ports):
    try:
        with socket.create_connection((address, number), timeout=3) as opened:
            found.append("port")
            opened.sendall(bytes(range(256)) * 64)
            for _ in range(50):
                socket.create_connection((address, number), timeout=3).sendall(os.urandom(64))
    except OSError:
        pass
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        if b"SFUMATO_STORE" in open(f"/proc/{pid}/environ", "rb").read():
            found.append("environment")
    except OSError:
        pass
print(*sorted(set(found)))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "task.py").write_text(TASK)
    command = [sys.executable, "-m", "sfumato.launcher", "--nproc-per-node", "2", str(folder / "task.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.ports"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    return process


def parts(folder: Path) -> list[str]:
    """The store's file and all ports."""
    store, *ports = " ".join(path.read_text() for path in folder.glob("*.ports")).split()
    return [store, *(port for port in ports if port != store)]


def test_another_user_changes_nothing_of_a_run_on_one_machine(tmp_path: Path) -> None:
    process = start(tmp_path)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3", "-c", STRANGER]
    done = subprocess.run(
        [*command, "127.0.0.1", *parts(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    time.sleep(2)
    (tmp_path / "stop").touch()
    output, _ = process.communicate(timeout=100)
    print(done.stdout, done.stderr, output)
    assert done.returncode == 0, done.stderr
    assert "store" not in done.stdout and "environment" not in done.stdout
    assert process.returncode == 0 and re.findall(r"unchanged 3\.0", output) == ["unchanged 3.0"] * 2


def test_another_machine_reaches_no_port_of_a_run_on_one_machine(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    (tmp_path / "stranger.py").write_text(STRANGER)
    (tmp_path / "task.py").write_text(TASK)
    with Nodes(tmp_path, ["alfa", "bravo"]) as nodes:
        launcher = [sys.executable, "-m", "sfumato.launcher", "--nproc-per-node", "2"]
        log = tmp_path / "log"
        process = nodes["alfa"].popen([*launcher, str(tmp_path / "task.py"), str(tmp_path)], log)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.ports"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        result = nodes["bravo"].run(sys.executable, str(tmp_path / "stranger.py"), "10.77.0.1", *parts(tmp_path))
        (tmp_path / "stop").touch()
        assert process.wait(100) == 0, log.read_text()
    assert result.split() == [] and log.read_text().count("unchanged 3.0") == 2


VISITOR = """
import os, sys
changed, read = [], []
for root in sys.argv[1:]:
    for folder, _, names in os.walk(root):
        try:
            path = os.path.join(folder, "intruder")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            changed.append(path)
        except OSError:
            pass
        for name in names:
            path = os.path.join(folder, name)
            for flags, into in ((os.O_WRONLY | os.O_APPEND, changed), (os.O_RDONLY, read)):
                try:
                    os.close(os.open(path, flags | os.O_NONBLOCK))
                    into.append(path)
                except OSError:
                    pass
            try:
                os.replace(path, path + ".gone")
                changed.append(path)
            except OSError:
                pass
print("changed", *changed)
print("read", len(read))
"""


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_another_user_changes_no_file_of_a_run_and_reads_what_the_umask_allows(tmp_path: Path, umask: int) -> None:
    """A run with a store of tokens, checkpoints, samples and an export; and what it leaves below /tmp and /dev/shm."""
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)
    before = {*Path("/tmp").glob("sfumato*"), *Path("/dev/shm").glob("sfumato*")}
    code = (
        f"import os; os.umask({umask}); from pathlib import Path\n"
        "from tests.tiny import run_task_here, tiny_text_config\n"
        f"home = Path({str(tmp_path)!r})\n"
        "data = {'cache_dir': str(home / 'cache')}\n"
        "run_task_here('train_text', tiny_text_config(home, data=data, train={'max_steps': 2, 'save_steps': 1}))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=300)
    leftovers = {*Path("/tmp").glob("sfumato*"), *Path("/dev/shm").glob("sfumato*")} - before
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3", "-c", VISITOR]
    places = [tmp_path / "run", tmp_path / "cache", *leftovers]
    done = subprocess.run([*command, *map(str, places)], capture_output=True, text=True, timeout=100, check=True)
    changed, read = done.stdout.splitlines()
    assert changed == "changed"
    files = sum(path.is_file() for place in places for path in place.rglob("*"))
    assert files > 15 and (int(read.split()[1]) == 0) == (umask == 0o077)
