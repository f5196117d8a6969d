"""What is installed: the wheel's files, and in a slow test an environment made of it alone, in which a model trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tiny import ROOT

BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
PROJECT = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built in a copy of it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("sfumato", "tasks", "configs", "docs/examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in PROJECT:
        shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stderr, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_the_wheel_holds_library_tasks_configurations_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"sfumato/tasks/{path.name}" for path in (ROOT / "tasks").glob("*.py")}
    expected |= {f"sfumato/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    expected |= {f"sfumato/docs/examples/{path.name}" for path in (ROOT / "docs" / "examples").glob("*.py")}
    files = subprocess.run(["git", "ls-files", "sfumato"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected |= set(files.splitlines())
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)


def test_the_metadata_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{folder}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata
    assert all(f"Python :: 3.{minor}" in metadata for minor in (11, 12, 13))
    assert "Description-Content-Type: text/markdown" in metadata
    assert "sfumato = sfumato.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()


STEPS = (
    "new my_project --task train_text --config quickstart/text_rl_sft",
    "launch my_project/train_text.py my_project/tiny.yaml --train.output_dir runs/a --train.save_steps 1",
    "launch my_project/train_text.py my_project/tiny.yaml --train.output_dir runs/b --train.seed 2",
    "sample runs/a",
    "chat runs/a",
    "evaluate runs/a runs/b --no-base --reward exact",
    "compare runs/a runs/b",
    "export runs/a exported",
    "report runs/a",
    "recipes dppo",
)


def _runs(python: str) -> bool:
    """Whether it is on PATH and starts: pyenv has a program for versions that are not chosen, too, which only fails."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-V"], check=False, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("installer", "python"),
    [("pip", sys.executable), ("uv", sys.executable), ("uv", "python3.12"), ("uv", "python3.13")],
)
def test_a_model_trains_in_an_environment_of_the_wheel_alone(
    installer: str, python: str, wheel: Path, tmp_path: Path
) -> None:
    """From another folder, with a home that nobody can write to. PATH says where other Pythons are."""
    if not _runs(python):
        pytest.skip(f"no {python} that runs on PATH: `uv python install {python.removeprefix('python')}` brings it")
    environment = tmp_path / "environment"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    bin_folder = environment / "bin"
    pip = [str(bin_folder / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch"], check=True)  # by pip, since uv takes no CPU build
    if installer == "uv":
        subprocess.run([*pip, "uv"], check=True)
        uv = ["uv", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([str(bin_folder / "python"), "-m", *uv, "-p", str(environment), str(wheel)], check=True)
    else:
        subprocess.run([*pip, str(wheel)], check=True)
    folder = tmp_path / "work"
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "HF_"))}
    variables |= {"HOME": "/proc/nobody", "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    for step in STEPS:
        done = subprocess.run(
            [str(environment / "bin" / "sfumato"), *step.split()],
            cwd=folder,
            env=variables,
            input="3 1 2\n",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
        assert not re.search("Traceback|Permission|not writable|temporary cache", done.stdout + done.stderr), step
    assert (folder / "exported" / "model.safetensors").is_file() and (folder / "runs" / "a" / "report.html").is_file()
