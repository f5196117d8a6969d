"""What pyproject.toml cannot say: tasks, configurations and examples lie at the top, and in the package when built."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

SHIPPED = {"sfumato.tasks": "tasks", "sfumato.configs": "configs", "sfumato.docs.examples": "docs/examples"}
# setuptools takes each folder for a package, and asks that it is listed
FOLDERS = [path for path in Path("configs").rglob("*") if path.is_dir() and path.name != "__pycache__"]
SHIPPED |= {f"sfumato.{'.'.join(path.parts)}": path.as_posix() for path in FOLDERS}

setup(
    packages=[*find_namespace_packages(include=["sfumato*"]), *SHIPPED],
    package_dir=SHIPPED,
)
