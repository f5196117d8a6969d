"""Whether the packages are there that the GPU suite needs, and how to bring those that are not.

    python -m benchmarks.gpu.pins [--fetch FOLDER] [--python 3.12]

Reads the requirements of pyproject.toml and follows what they require themselves. ``--fetch``, on a machine with a
package index, downloads the wheels of what a machine with torch, transformers, peft, accelerate, onnxruntime and opencv
still lacks, in the versions of constraints.txt; they are installed there with

    python -m pip install --no-index --no-deps --target site FOLDER/*.whl && export PYTHONPATH=site:.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NEEDED_FOR = {
    "datasets": "nothing that is measured",
    "tensorboard": "nothing that is measured",
    "matplotlib": "reports, which are left out without it",
    "rapidocr": "OCR in the RL grid",
    "onnxruntime": "OCR in the RL grid",
    "torchao": "8-bit AdamW",
    "pytest": "the stage tests",
    "pytest-timeout": "the stage tests",
}
"""What else than everything needs a package."""

CARRIED = (
    "diffusers",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "importlib_metadata",
    "lazy-importer",
    "zipp",
    "rapidocr",
    "pyclipper",
    "shapely",
    "omegaconf",
    "colorlog",
)
"""What is fetched; with what rapidocr needs, about 40 MB."""

PLATFORMS = [f"manylinux_2_{minor}" for minor in (34, 31, 28, 27, 24, 17)] + ["manylinux2014", "manylinux1"]
"""pip takes wheels of just these."""


def problems(installed: Callable[[str], str] = metadata.version) -> dict[str, list[str]]:
    """What is missing or of another version: sentences by kind, "needed" and "optional".

    Args:
        installed: the version of a package, or PackageNotFoundError.
    """
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = [*extras["ocr"], *extras["low-memory"], "pytest>=8.0", "pytest-timeout>=2.3"]
    actual: dict[str, list[str]] = {"needed": [], "optional": []}
    for text in [*project["dependencies"], *optional]:
        wanted = Requirement(text)
        why = NEEDED_FOR.get(wanted.name, "")
        kind = "optional" if why else "needed"
        try:
            version = installed(wanted.name)
        except metadata.PackageNotFoundError:
            actual[kind].append(f"{wanted} is missing" + (f" ({why})" if why else ""))
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            actual[kind].append(f"{wanted} is wanted, {version} is installed" + (f" ({why})" if why else ""))
        elif wanted.name in CARRIED:
            # without requests, for one, diffusers cannot be imported
            actual[kind] += [
                f"{package}, which {wanted.name} requires, is missing" for package in missing_below(wanted.name)
            ]
    return actual


def missing_below(name: str) -> list[str]:
    """Packages that an installed one requires, and theirs, that are not installed."""
    from packaging.requirements import Requirement

    waiting, seen, missing = [name], set[str](), []
    while waiting:
        package = waiting.pop()
        key = normalised(package)
        if key in seen:
            continue
        seen.add(key)
        try:
            requires = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            missing.append(package)
            continue
        parsed = (Requirement(text) for text in requires)
        waiting += [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return sorted(missing)


def told(actual: dict[str, list[str]]) -> str:
    """The problems as text, with the remedy; empty when all is there."""
    lines = [f"  {kind}: {sentence}" for kind, sentences in actual.items() for sentence in sentences]
    if not lines:
        return ""
    remedy = (
        "  On a machine with a package index: python -m benchmarks.gpu.pins --fetch FOLDER. Bring FOLDER here, then:\n"
        "  python -m pip install --no-index --no-deps --target site FOLDER/*.whl && export PYTHONPATH=site:."
    )
    return "\n".join(["packages:", *lines, remedy])


def normalised(name: str) -> str:
    """A package's name in lower case with hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Versions of constraints.txt by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalised(name): version.strip() for name, version in pairs}


def fetch(folder: Path, python: str) -> int:
    """Downloads the wheels. Returns pip's exit code."""
    versions = pinned()
    wanted = [f"{name}=={versions[normalised(name)]}" for name in CARRIED]
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    choice = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *choice, "--dest", str(folder), *wanted]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        size = sum(path.stat().st_size for path in folder.glob("*.whl"))
        print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB, in {folder}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download wheels to this folder")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU")
    arguments = parser.parse_args()
    if arguments.fetch is not None:
        return fetch(arguments.fetch, arguments.python)
    result = problems()
    print(told(result) or "all packages are there")
    return 1 if result["needed"] else 0


if __name__ == "__main__":
    sys.exit(main())
