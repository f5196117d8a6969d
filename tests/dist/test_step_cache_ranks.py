"""Denoising steps that are left out in an evaluation on several ranks: all leave out the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.step_cache import StepCache
from tests.dist.matrix import MODES
from tests.dist.ranks import RankError, RankPool
from tests.tiny import write_tiny_pipeline

PROMPTS = ["write a", "write b"]
THRESHOLD = 0.06
"""By their own factors the two prompts would leave out one and two of ten steps."""


def sample(folder: str, mode: str) -> tuple[dict[str, float], bool]:
    """Metrics of a cached evaluation, and whether another one without it gives what it gave before."""
    train = TrainConfig(output_dir=folder, **MODES[mode].config)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = Mesh(Layout.resolve(train, size), torch.device("cpu"), rank)
    model = build_diffusion_model(ModelConfig(model_path=folder, max_sequence_length=7))
    model.parallelize(mesh, train)
    prompt = PROMPTS[mesh.data_rank]

    def images(cache: StepCache | None = None) -> np.ndarray:
        settings = {"size": (16, 16), "num_steps": 10, "guidance_scale": 3.0, "seed": 3, "micro_batch_size": 2}
        return np.stack(sample_images(model, model.encode_prompts([prompt]), [mesh.data_rank], **settings, cache=cache))

    before, cache = images(), StepCache(model, THRESHOLD, 10)
    images(cache)
    return cache.metrics(), bool(np.array_equal(images(), before))


@pytest.mark.parametrize("mode", ["fsdp2", "ulysses", pytest.param("tp", marks=pytest.mark.slow)])
def test_ranks_leave_out_the_same_steps(mode: str, ranks: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    (first, same), (second, _) = ranks.run(2, sample, str(folder), mode)
    assert same
    assert first == second
    assert 0 < first["eval/cached_steps"] < 0.8


def test_fsdp1_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    with pytest.raises(RankError, match=r"ConfigError: eval\.step_cache.*fsdp1"):
        ranks.run(2, sample, str(folder), "fsdp1")
