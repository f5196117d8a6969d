"""The survey of recipes tells a cell that trains from one that fails and from one whose numbers are wrong."""

from __future__ import annotations

import math
import re
import sys

import pytest

from tests.survey import recipes


def test_cells_are_run_and_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes", "sd3", "--recipes", "flow_grpo_fast", "no_recipe"])
    recipes.main()
    lines = capsys.readouterr().out
    assert "| sd3 | 1 | 0 | 1 |" in lines
    assert re.search(r"sd3 no_recipe: FAILED, \d+.\d s: Traceback", lines)
    assert "KeyError: 'no_recipe'" in lines


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({}, ""),
        ({"loss/policy": math.nan}, "not finite: loss/policy"),
        ({"grad_norm": 0.0}, "updates 1, rows 8, grad_norm 0.0"),
        ({"ratio/replay_error": 1e-3}, "ratio/replay_error 0.001"),
    ],
)
def test_wrong_numbers_are_faults(wrong: dict[str, float], fault: str) -> None:
    line = {"updates": 1, "rows": 8, "grad_norm": 0.1, "loss/policy": 0.2, "ratio/replay_error": 0.0}
    assert recipes.fault_of(line | wrong) == fault
