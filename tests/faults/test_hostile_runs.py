"""Values that a schema accepts, however odd: a run makes its first step with them, or refuses them in one line."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from sfumato.config.load import parse_config
from sfumato.config.tasks import schema_of
from sfumato.errors import ConfigError
from tests.hostile_runs import run_hostile
from tests.hostile_values import hostile_arguments
from tests.tiny import load_task, tiny_dit_config, tiny_rl_config, tiny_text_config, write_config

TASKS = {"train_text": tiny_text_config, "train_dit": tiny_dit_config, "rl_diffusion": tiny_rl_config}
NUM_RUNS = 80
ELSEWHERE = ("output_dir=/", "cache_dir=/", "output_dir=..", "cache_dir=..")
"""Ends of overrides that would write outside of the test's folder."""


def accepted(task: str, path: Path) -> list[list[str]]:
    """Overrides from the table that the schema accepts, in an order of chance that is always the same."""
    results = []
    for arguments in hostile_arguments(schema_of(task), every=7):
        if arguments[-1].endswith(ELSEWHERE):
            continue
        try:
            parse_config(schema_of(task), [str(path), *arguments])
        except ConfigError:
            continue
        results.append(arguments)
    random.Random(0).shuffle(results)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_what_is_accepted_runs_or_is_refused(task: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # threads would not survive the fork
    settings = TASKS[task](tmp_path)
    settings["train"] |= {"output_dir": "run", "max_steps": 2}
    path = write_config(settings, tmp_path / "config.yaml")
    problems, codes = [], []
    for number, arguments in enumerate([[], *accepted(task, path)[:NUM_RUNS]]):
        folder = tmp_path / f"{number}" / "inner"
        folder.mkdir(parents=True)
        ending = run_hostile(load_task(task), schema_of(task), [str(path), *arguments], folder)
        codes.append(ending.code)
        if ending.problem is not None:
            problems.append(f"{' '.join(arguments)[:200]}: {ending.problem}: {ending.log[-600:]}")
    print(f"{task}: {len(codes)} runs, {codes.count(None) + codes.count(0)} made a step", file=sys.stderr)
    assert not problems, "\n\n".join(problems)
    # most values that are drawn name a reward, whose folder or server is not there
    assert codes[0] in (None, 0) and codes.count(None) + codes.count(0) > len(codes) / 8
