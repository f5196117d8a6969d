"""What a run was made with: versions, commit, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from sfumato.parallel.mesh import Mesh

PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy", "safetensors", "pillow", "rapidocr", "onnxruntime")


def environment_of(mesh: Mesh) -> dict[str, Any]:
    """As it is written to ``environment.json``."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    commit = ""
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        commit = found.stdout.strip()
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": commit or None,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_kernels": {"torch": torch.backends.cpu.get_cpu_capability(), "MKL_CBWR": os.environ.get("MKL_CBWR")},
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "num_processes": mesh.size,
        "command": sys.argv,
    }
