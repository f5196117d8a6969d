"""Requests to runs of several ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.tracking.atomic_folders import list_checkpoints
from tests.control_requests import answers, scripted
from tests.dist.ranks import RankPool
from tests.dist.test_tasks import run_rank
from tests.tiny import tiny_dit_config, tiny_rl_config, tiny_text_config, weights_in

SCRIPT = {1: ["sample", "save", "pause"], 2: ["evaluate"]}
RARELY = {"train": {"max_steps": 3}, "eval": {"every_steps": 100}}


def run_rank_asked(task: str, config: dict[str, Any]) -> None:
    with scripted(SCRIPT):
        run_rank(task, config)


@pytest.mark.parametrize(
    "task", ["rl_diffusion", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train_dit", "train_text"))]
)
def test_requests_change_no_bit_of_two_ranks(task: str, ranks: RankPool, tmp_path: Path) -> None:
    settings = {
        "rl_diffusion": lambda: tiny_rl_config(tmp_path, **RARELY),
        "train_dit": lambda: tiny_dit_config(tmp_path, train=RARELY["train"]),
        "train_text": lambda: tiny_text_config(tmp_path, **RARELY),
    }[task]()
    plain, asked = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("plain", "asked"))
    ranks.run(2, functools.partial(run_rank, task), merge(settings, plain))
    ranks.run(2, functools.partial(run_rank_asked, task), merge(settings, asked))
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (tmp_path / "asked" / "metrics.jsonl").read_bytes()
    assert weights_in(tmp_path / "plain" / "hf_ckpt") == weights_in(tmp_path / "asked" / "hf_ckpt")
    evaluated = "refused" if task == "train_dit" else "done"
    assert answers(tmp_path / "asked") == [
        (1, "sample", "done"),
        (1, "save", "done"),
        (1, "pause", "done"),
        (1, "resume", "done"),
        (2, "evaluate", evaluated),
    ]
    assert 1 in list_checkpoints(tmp_path / "asked" / "checkpoints")
