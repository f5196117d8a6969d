"""How a run of the tests shares them out."""

import os
import shutil
import subprocess
import sys

from tests.tiny import ROOT

TEST = """
import os, pathlib, pytest, time

@pytest.mark.parametrize("number", range(4))
def test_writes_its_worker(number):
    time.sleep(0.05)  # so that the other worker has time to take a test of this file
    with open({log!r}, "a") as file:
        print(pathlib.Path(__file__).relative_to({root!r}), os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_a_file_is_one_workers_and_so_are_all_tests_of_ranks(tmp_path):
    """Else each worker makes the fixtures of every module anew, and two groups of ranks compete for the cores."""
    names = ["tests/dist/test_a.py", "tests/dist/test_b.py", "tests/unit/test_c.py", "tests/unit/test_d.py"]
    log = tmp_path / "log.txt"
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST.format(log=str(log), root=str(tmp_path)))
    for name in ("conftest.py", "slow_cases.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nnorecursedirs = .git\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    workers: dict[str, set[str]] = {}
    for line in log.read_text().splitlines():
        name, worker = line.split()
        workers.setdefault(name, set()).add(worker)
    assert sorted(workers) == names and all(len(worker) == 1 for worker in workers.values())
    assert workers[names[0]] == workers[names[1]] != workers[names[2]]
