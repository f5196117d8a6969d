"""Containers of samples: selecting, joining and moving follow from the declared axes, and nothing is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.data.images.prompts import Prompt
from sfumato.models.diffusion.base import Conditioning
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import RankBatch, SampleRequest, join_rollouts
from sfumato.rollout.diffusion.trajectories import Trajectories
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout
from tests.tiny import load_task, rl_task, run_task_here, tiny_rl_config


def trajectories(rows: int, proximal: bool = False, steps: tuple[int, ...] = (1, 2)) -> Trajectories:
    latents = torch.randn(rows, 2, 3)
    means = latents + 3 if proximal else None
    return Trajectories([*steps], torch.linspace(1, 0, 5), latents, latents + 1, latents + 2, latents[..., 0], means)


def rollout(groups: list[int], first_id: int, sampled: Any) -> DiffusionRollout:
    """Samples of which the first of each group brings its conditioning."""
    begins = [group not in groups[:row] for row, group in enumerate(groups)]
    requests = [
        SampleRequest(first_id + row, group, 0, is_first=begin)
        for row, (group, begin) in enumerate(zip(groups, begins, strict=True))
    ]
    names = list(dict.fromkeys(groups))
    conditioning = Conditioning({"prompt": torch.tensor(names)[:, None].float()})
    return DiffusionRollout.from_samples(requests, sampled, conditioning, names, sampled.latents, 3, [""] * len(groups))


def test_nothing_is_dropped_when_micro_batches_are_joined() -> None:
    parts = trajectories(2, proximal=True), trajectories(1, proximal=True)
    joined = Trajectories.cat(parts)
    for name in ("latents", "next_latents", "means", "log_probs", "proximal_means"):
        assert torch.equal(getattr(joined, name), torch.cat([getattr(part, name) for part in parts])), name
    assert Trajectories.cat([trajectories(2), trajectories(1)]).proximal_means is None
    with pytest.raises(ValueError, match="proximal_means is there in 1 of 2 parts only"):
        Trajectories.cat([trajectories(2, proximal=True), trajectories(1)])
    with pytest.raises(ValueError, match="steps must be the same in all parts"):
        Trajectories.cat([trajectories(2), trajectories(1, steps=(0, 1))])


def test_tensors_go_to_a_device_and_stay_where_they_are() -> None:
    sampled = trajectories(2)
    assert sampled.to(torch.device("cpu")).latents is sampled.latents
    there = rollout([0, 0], 0, sampled).to(torch.device("meta"))
    result = there.latents, there.kept.sigmas, there.kept.means, there.conditioning.tensors["prompt"]
    assert {tensor.device.type for tensor in result} == {"meta"} and there.versions == [3, 3]


def test_a_rank_learns_from_its_samples_in_the_order_of_their_ids() -> None:
    parts = rollout([1, 1], 2, trajectories(2)), rollout([0, 0], 0, trajectories(2))
    samples = [[Sample(text=str(sample_id), prompt="", group_id=0) for sample_id in part.sample_ids] for part in parts]
    whole = join_rollouts(RankBatch(parts, samples, {0: 0, 1: 1, 3: 2}), torch.device("cpu"))
    assert whole.sample_ids == [0, 1, 3] and [sample.text for sample in whole.samples] == ["0", "1", "3"]
    assert torch.equal(whole.latents[2], parts[0].latents[1]) and torch.equal(whole.kept.latents, whole.latents)
    assert whole.row_conditioning.tensors["prompt"].flatten().tolist() == [0, 0, 1]
    late = dataclasses.replace(parts[0], conditioning=None, conditioning_groups=[])
    assert DiffusionRollout.cat([late, parts[1]]).conditioning_groups == [0]


@pytest.mark.parametrize("recipe", ["flow_grpo_fast", pytest.param("diffusion_nft", marks=pytest.mark.slow)])
def test_no_role_opens_the_prompts_again(tmp_path: Path, recipe: str) -> None:
    """They are gone when the roles are built: here the actor and a sampler of its own."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f'write "{word}"' for word in ("AB", "BC", "CD", "DE")), encoding="utf-8")
    overrides = {"train": {"max_steps": 1}, "rollout": {"hybrid_engine": False, "num_inference_steps": 6}}
    config = tiny_rl_config(tmp_path, **overrides) | {"algorithm": {"recipe": recipe}}
    config["data"] = {"train_path": str(prompts), "eval_path": str(prompts)}
    task = load_task(rl_task(recipe))
    identify = task.identify_prompts

    def identified(config: Any, *loaded: list[Prompt]) -> Any:
        identity = identify(config, *loaded)
        prompts.unlink()
        return identity

    task.identify_prompts = identified
    assert (run_task_here(task, config) / "hf_ckpt").is_dir()
