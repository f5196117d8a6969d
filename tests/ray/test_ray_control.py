"""Requests to a run whose roles are on Ray: its driver reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.control_requests import answers, write_request
from tests.role_runs import ONE_STEP_OFF, SEPARATE, RoleRun, assert_same, role_config, undisturbed
from tests.tiny import write_config

LIMIT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("where", [SEPARATE, ONE_STEP_OFF], ids=["synchronous", "one-step-off"])
def test_requests_change_no_bit_on_ray(where: dict[str, Any], tmp_path: Path) -> None:
    config = role_config(tmp_path, where, train={"max_steps": 8, "save_steps": 0})
    with RoleRun(write_config(config, tmp_path / "run.yaml")) as run:
        run.wait_for_step(2, LIMIT_S)
        commands = ("pause", "sample", "evaluate", "save", "resume")
        for command in commands:
            write_request(run.folder, command, command)
        assert run.wait(LIMIT_S) == 0, run.output
    assert sorted(command for _, command, result in answers(run.folder) if result == "done") == sorted(commands)
    assert len({step for step, _, _ in answers(run.folder)}) == 1, "all while it was paused"
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))
