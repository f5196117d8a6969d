"""The matrix kernels of the CPU: a row of a product is the same, however many rows there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sfumato import kernels
from tests.rows import counts_that_differ, kernels_heed_the_setting

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.exact

TASK = """
import json, os
from typing import ClassVar
import torch
from sfumato.config.base import Section
from sfumato.tracking.task import run_task

class Empty(Section):
    "Nothing."
    usage: ClassVar[str] = ""

def main(config):
    from tests.rows import counts_that_differ  # which computes
    print(json.dumps([os.environ["MKL_CBWR"], counts_that_differ()]))

run_task(main, Empty)
"""

needs_avx2 = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or not torch.cpu._is_avx2_supported(),
    reason="the setting is that of MKL, and works from AVX2 on",
)

FEW = [] if kernels_heed_the_setting() else [1, 2, 3]
"""Numbers of rows with which a row is another one than with many."""


def test_a_choice_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert kernels.choose_kernels() == {"MKL_CBWR": "COMPATIBLE"}
    monkeypatch.delenv("MKL_CBWR")
    assert kernels.choose_kernels() == {"MKL_CBWR": "AUTO,STRICT"} and os.environ["MKL_CBWR"] == "AUTO,STRICT"


@needs_avx2
def test_rows_of_a_product_are_the_same_whatever_their_number() -> None:
    assert counts_that_differ() == FEW


@needs_avx2
def test_a_task_that_is_started_without_the_launcher_chooses_them_too(tmp_path: Path) -> None:
    """With the kernels of AVX2, which differ by the number of rows on every CPU unless they are told not to."""
    (tmp_path / "empty.yaml").write_text("{}")
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run(
        [sys.executable, "-c", TASK, str(tmp_path / "empty.yaml")],
        env={**environment, "PYTHONPATH": str(ROOT), "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["AUTO,STRICT", FEW]
