"""Disks for the tests of this folder."""

import subprocess

import pytest


@pytest.fixture
def small_disk(request, tmp_path):
    """A file system of 2 MiB, or of what a test is given as a parameter."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={getattr(request, 'param', '2m')}"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
