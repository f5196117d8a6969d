"""Weights that a folder holds as float32 beside half precision, exported from several ranks: those of the folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.test_tasks import run_rank
from tests.unit.test_source_folder import assert_same_weights, config_of, weights, write_model

MESHES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, meta": {"init_device": "meta"},
    "ep": {"expert_parallel_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("fsdp2", "ep") else pytest.mark.slow) for name in MESHES]
)
def test_an_export_has_the_bits_of_the_folder(name: str, ranks: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    assert any(weight.dtype == torch.float32 for weight in weights(folder).values())
    config = config_of(tmp_path, folder)
    config["train"] |= MESHES[name]
    ranks.run(2, functools.partial(run_rank, "train_text"), config)
    assert_same_weights(folder, tmp_path / "run" / "hf_ckpt")
    assert json.loads((tmp_path / "run/hf_ckpt/config.json").read_text())["dtype"] == "bfloat16"
