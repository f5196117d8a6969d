"""Objectives on final samples: whose samples, which noise, which policies predict, and what goes together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.algorithms.decay import FROZEN, Constant, Linear, Refresh
from sfumato.algorithms.flow_matching import add_noise
from sfumato.algorithms.solvers import DPMSolver2, Euler
from sfumato.algorithms.timesteps import LogitNormalTimesteps, SamplerGrid, UniformTimesteps
from sfumato.commands.check_config import check_config
from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.diffusion.final_samples import FinalSamples, predict_noised, sample_final
from sfumato.rollout.diffusion.trajectories import Trajectories, sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout
from sfumato.runtime.update import micro_batches, optimizer_batches
from tests.tiny import run_task_here, tiny_rl_config, write_config, write_tiny_pipeline
from tests.tiny_families import tiny_flux, tiny_stable_diffusion

ALONE = Mesh(Layout(), torch.device("cpu"))
PROMPTS = [f'write "{letter}B"' for letter in "ABCD"]
IDS, GROUPS = [4, 5, 6, 7, 8, 9], [2, 2, 2, 3, 3, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("final") / "pipeline")


def model_in(folder: Path, lora: bool = False) -> DiffusionModel:
    adapters = LoraConfig(rank=4, alpha=8) if lora else None
    return build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7, lora=adapters))


def policies_in(folder: Path, lora: bool = False, **decays: Any) -> Policies:
    config = load_config(TrajectoryRLConfig, overrides=tiny_rl_config(folder.parent)).train
    policies = Policies(model_in(folder, lora), decays)
    policies.parallelize(ALONE, config)
    return policies


@torch.no_grad()
def change(policies: Policies, by: float) -> None:
    for parameter in trainable_parameters(policies.model.denoiser).values():
        parameter.add_(by)
    policies.policy_changed()


def weights(model: DiffusionModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainable_parameters(model.denoiser).values()])


def draw(model: DiffusionModel, ids: Sequence[int] = IDS, groups: Sequence[int] = GROUPS, **changes: Any) -> Any:
    settings = {
        "solver": Euler(),
        "timesteps": SamplerGrid(num=3),
        "shared_noise": False,
        "size": (16, 16),
        "num_steps": 5,
        "guidance_scale": 1.0,
        "seed": 1,
        "iteration": 2,
    } | changes
    conditioning = model.encode_prompts([PROMPTS[group] for group in groups])
    return sample_final(model, conditioning, ids, groups, **settings)


def predict(policies: Policies, samples: FinalSamples, compared: Sequence[str] = (), **changes: Any) -> Any:
    conditioning = policies.model.encode_prompts([PROMPTS[group_id] for group_id in samples.group_ids.tolist()])
    settings = {"guidance_scale": 1.0, "reference_guidance_scale": None, "seed": 1, "iteration": 2} | changes
    return predict_noised(policies, samples, conditioning, compared=compared, **settings)


def test_euler_samples_are_those_of_trajectories_without_a_window(folder: Path) -> None:
    model = model_in(folder)
    conditioning = model.encode_prompts([PROMPTS[group] for group in GROUPS])
    keys = {"size": (16, 16), "num_steps": 5, "guidance_scale": 1.0, "seed": 1, "iteration": 2}
    latents, _ = sample_trajectories(model, conditioning, IDS, dynamics=None, trained_steps=(), **keys)
    assert torch.equal(draw(model).latents, latents)
    better = draw(model, solver=DPMSolver2()).latents
    assert better.dtype == torch.float32 and not torch.allclose(better, latents)


@pytest.mark.parametrize("shared", [False, True])
def test_noise_and_levels_belong_to_samples_or_are_shared_by_groups(folder: Path, shared: bool) -> None:
    policies = policies_in(folder)
    samples = draw(policies.model, shared_noise=shared)
    result = predict(policies, samples)
    assert result.levels.tolist() == [0, 1, 2] * 6
    assert result.group_ids.tolist() == [2] * 9 + [3] * 9
    assert torch.equal(result.sigma, samples.sigmas.flatten())
    assert torch.equal(result.x0[::3], samples.latents)
    noise, sigma = result.noise.unflatten(0, (6, 3)), samples.sigmas
    assert torch.equal(noise[0], noise[1]) == shared and not torch.equal(noise[0], noise[3])
    assert torch.equal(sigma[0], sigma[1]) == shared
    assert not torch.equal(noise[0, 0], noise[0, 1]), "levels have noise of their own"

    index = torch.tensor([4, 1])  # a micro-batch of its own gives the same rows
    alone = predict(policies, draw(policies.model, shared_noise=shared).rows(index))
    assert torch.equal(alone.noise, noise[index].flatten(0, 1)) and torch.equal(alone.sigma, sigma[index].flatten())
    joined = FinalSamples.cat([samples.rows(torch.tensor([0, 1])), samples.rows(torch.tensor([2, 3, 4, 5]))])
    assert torch.equal(joined.latents, samples.latents) and torch.equal(joined.sigmas, samples.sigmas)
    other = predict(policies, samples, iteration=3)
    assert not torch.allclose(other.noise, result.noise)


def test_a_reference_that_never_moves_is_a_copy_or_the_model_without_its_adapter(folder: Path) -> None:
    for lora in (False, True):
        policies = policies_in(folder, lora, reference=FROZEN)
        assert (policies.frozen_weights is None) == lora and not policies.moving
        samples = draw(policies.model)
        before = predict(policies, samples).velocity.detach()
        change(policies, 0.01)
        policies.update_averages()
        result = predict(policies, samples, ["reference"])
        torch.testing.assert_close(result.reference_velocity, before, atol=0, rtol=0)
        assert not torch.allclose(result.velocity, before)


@pytest.mark.parametrize("lora", [False, True])
def test_other_policies_follow_by_their_decay(folder: Path, lora: bool) -> None:
    policies = policies_in(folder, lora, old=Constant(0.25), reference=Refresh(2), ema=Linear(slope=0.5, limit=1.0))
    start = weights(policies.model)
    samples = draw(policies.model)
    before = predict(policies, samples).velocity.detach()
    expected = {"old": [0.75, 1.6875], "reference": [0.0, 2.0], "ema": [1.0, 1.5]}
    for iteration in range(2):
        change(policies, 1.0)
        policies.update_averages()
        mine = weights(policies.model)
        for name, moved in expected.items():
            with policies.active(name) as other:
                torch.testing.assert_close(weights(other), start + moved[iteration])
            assert torch.equal(weights(policies.model), mine), "the trained weights are back"
        if iteration == 0:
            actual = predict(policies, samples, ["old", "reference", "ema"])
            assert torch.equal(actual.reference_velocity, before) and not torch.equal(actual.velocity, before)
            assert torch.equal(actual.ema_velocity, actual.velocity) and not torch.equal(actual.old_velocity, before)
            assert actual.velocity.requires_grad and not actual.old_velocity.requires_grad


def test_a_policy_that_is_the_trained_one_is_not_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = policies_in(folder, old=Constant(0.0), ema=Constant(0.5))
    samples, calls = draw(policies.model), []
    monkeypatch.setattr(
        policies.model, "denoise", lambda *args, of=policies.model.denoise: calls.append(1) or of(*args)
    )

    def computed(name: str) -> int:
        calls.clear()
        result = predict(policies, samples, [name])
        if len(calls) == 1:
            assert torch.equal(getattr(result, f"{name}_velocity"), result.velocity)
        return len(calls)

    assert computed("old") == computed("ema") == 1, "in the beginning"
    change(policies, 0.01)
    assert computed("old") == 2, "after an optimiser step"
    policies.update_averages()
    assert (computed("old"), computed("ema")) == (1, 2), "after an iteration"


def test_only_the_prompts_branch_predicts_and_the_reference_may_be_guided(folder: Path) -> None:
    policies = policies_in(folder, reference=FROZEN)
    samples = draw(policies.model, guidance_scale=3.0)
    plain = predict(policies, samples, ["reference"], guidance_scale=3.0)
    assert torch.equal(plain.velocity, plain.reference_velocity)
    guided = predict(policies, samples, ["reference"], guidance_scale=3.0, reference_guidance_scale=4.5)
    conditioning = policies.model.encode_prompts([PROMPTS[group] for group in GROUPS]).repeat_interleave(3)
    noisy = add_noise(plain.x0, plain.noise, plain.sigma)
    wanted = policies.model.predict_velocity(noisy, plain.sigma, conditioning, 4.5)
    torch.testing.assert_close(guided.reference_velocity, wanted)
    assert not torch.allclose(guided.reference_velocity, plain.velocity)


def test_a_network_that_predicts_noise_has_its_own_levels_and_weights(tmp_path: Path) -> None:
    path = write_config(tiny_stable_diffusion(), tmp_path / "unet.yaml")
    model = build_diffusion_model(ModelConfig(config_path=str(path)))
    density = draw(model, timesteps=LogitNormalTimesteps(num=2))
    drawn = LogitNormalTimesteps(num=2).draw(torch.tensor([1.0, 0.0]), 1, 2, IDS)
    assert torch.equal(density.sigmas, model.training_sigma(drawn)) and not torch.equal(density.sigmas, drawn)
    shape = model.latent_shape(16, 16)
    assert set(draw(model).sigmas.flatten().tolist()) <= set(model.sigmas(5, shape).tolist()), "of its own schedule"
    result = predict(Policies(model, {}), density)
    torch.testing.assert_close(result.error_weight, (1 - result.sigma) ** 2)


@pytest.mark.parametrize("recipe", ["diffusion_nft", "flow_dpo"])
@pytest.mark.parametrize("family", [tiny_flux, tiny_stable_diffusion])
def test_other_families(tmp_path: Path, family: Any, recipe: str) -> None:
    path = write_config(family(), tmp_path / "family.yaml")
    config = tiny_rl_config(tmp_path, rollout={"guidance_scale": 3.5}, train={"max_steps": 2})
    model = {"config_path": str(path), "max_sequence_length": 7}
    run = run_task_here("rl_diffusion_forward", {**config, "model": model, "algorithm": {"recipe": recipe}})
    assert (run / "hf_ckpt" / "model_index.json").is_file()


# Which samples go together


def rl_config(tmp_path: Path, recipe: str, **train: Any) -> ForwardRLConfig:
    config = tiny_rl_config(tmp_path, train={"global_batch_size": 8, **train})
    return load_config(ForwardRLConfig, overrides={**config, "algorithm": {"recipe": recipe}})


REQUESTS = [SampleRequest(sample, sample // 4, 0) for sample in range(16)]


@pytest.mark.parametrize("recipe", ["diffusion_nft", "dgpo"])
def test_every_useful_sample_is_learnt_from_once_whatever_the_ranks(tmp_path: Path, recipe: str) -> None:
    config = rl_config(tmp_path, recipe)
    useful = torch.ones(16, dtype=torch.bool)
    useful[[3, 9]] = False

    def batches(requests: list[SampleRequest]) -> list[set[int]]:
        rows = useful[[request.sample_id for request in requests]]
        result = optimizer_batches(requests, rows, config, iteration=5)
        return [{requests[row].sample_id for unit in part for row in unit.tolist()} for part in result]

    whole = batches(REQUESTS)
    assert len(whole) == 2 and set.union(*whole) == set(range(16)) - {3, 9} and not whole[0] & whole[1]
    shared = zip(batches(REQUESTS[:8]), batches(REQUESTS[8:]), strict=True)
    assert [first | second for first, second in shared] == whole
    if recipe == "dgpo":
        groups = [{sample // 4 for sample in part} for part in whole]
        assert len(groups[0]) == len(groups[1]) == 2 and not groups[0] & groups[1]


@pytest.mark.parametrize(
    ("recipe", "micro_batch_size", "num_passes"),
    [("dgpo", 4, 4), ("dgpo", 8, 2), ("flow_dpo", 4, 2), ("diffusion_nft", 4, 4)],
)
def test_micro_batches_keep_groups_whole(tmp_path: Path, recipe: str, micro_batch_size: int, num_passes: int) -> None:
    useful = torch.ones(16, dtype=torch.bool)
    useful[[0, 1, 5]] = False
    config = rl_config(tmp_path, recipe, micro_batch_size=micro_batch_size, global_batch_size=16)
    (units,) = optimizer_batches(REQUESTS, useful, config, iteration=0)
    parts = micro_batches(units, config, ALONE)
    assert len(parts) == num_passes
    assert sorted(torch.cat(parts).tolist()) == useful.nonzero().flatten().tolist()
    if config.algorithm.whole_groups:
        assert sum(len({row // 4 for row in part.tolist()}) for part in parts) == 4, "no group is in two of them"
    else:
        assert max(len(part) for part in parts) <= micro_batch_size


def test_nothing_to_learn_from_gives_an_empty_batch(tmp_path: Path) -> None:
    config = rl_config(tmp_path, "dgpo")
    assert [
        len(optimizer_batch) for optimizer_batch in optimizer_batches(REQUESTS, torch.zeros(16), config, iteration=0)
    ] == [0, 0]


def test_the_check_counts_noise_levels_and_other_policies(tmp_path: Path) -> None:
    config = tiny_rl_config(tmp_path)
    config["algorithm"] = {"recipe": "awm", "timesteps": {"num": 2}}
    result = check_config(write_config(config, tmp_path / "run.yaml"))
    assert result.problems == []
    parts = result.model.largest.parts
    assert parts["other policies"] == 3 * parts["gradients"] and parts["frozen reference"] == parts["gradients"]


@pytest.mark.parametrize("kind", ["trajectory", "sample"])
def test_what_is_damaged_becomes_zeros_and_nothing_else_changes(kind: str) -> None:
    """A row that only keeps other ranks company is multiplied by 0, and 0 x NaN is NaN."""
    nan, latents = float("nan"), torch.randn(3, 4, 2, 2)
    latents[1] = nan
    if kind == "sample":
        sampled = FinalSamples(latents, torch.rand(3, 2), torch.arange(3), torch.tensor([0, 1, 1]))
    else:
        steps = torch.randn(3, 2, 4, 2, 2)
        means, log_probs = steps.clone(), torch.randn(3, 2)
        means[1, 1, 0, 0, 0] = log_probs[1, 0] = float("inf")
        sampled = Trajectories([0, 1], torch.linspace(1, 0, 4), steps, steps + 1, means, log_probs)
    assert sampled.is_finite().tolist() == [True, False, True]
    embedded = torch.randn(2, 5)
    embedded[1] = nan
    requests = [
        SampleRequest(row, group, group, first) for row, group, first in ((0, 0, True), (1, 1, True), (2, 1, False))
    ]
    conditioning = Conditioning({"prompt": embedded, "mask": torch.ones(2, 5, dtype=torch.bool)})
    made = DiffusionRollout.from_samples(
        requests, sampled, conditioning, [0, 1], latents, 7, ["", "its latents are NaN", ""]
    )
    assert made.kept.is_finite().all() and made.latents.isfinite().all()
    for name in ("latents", "means") if kind == "trajectory" else ("latents",):
        assert torch.equal(getattr(made.kept, name)[[0, 2]], getattr(sampled, name)[[0, 2]])
        assert not getattr(made.kept, name)[1].any()
    assert torch.equal(made.conditioning.tensors["prompt"], torch.stack([embedded[0], torch.zeros(5)]))
    assert made.conditioning.tensors["mask"].all()


@pytest.mark.parametrize(
    "wrong", [{"num": 0}, {"shift": 0.0}, {"low": -0.1}, {"low": 0.5, "high": 0.5}, {"high": 1.01}], ids=str
)
def test_levels_outside_the_schedule_are_refused(wrong):
    with pytest.raises(ValueError, match="num must be at least 1, 0 <= low < high <= 1, and shift above 0"):
        UniformTimesteps(**wrong)


def test_a_stratum_that_rounds_up_to_its_end_draws_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sfumato.algorithms.timesteps._draw_stratified_uniforms", lambda *_: torch.tensor([[0.0, 1.0]]).double()
    )
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    drawn = SamplerGrid(num=2, stratified=True).draw(sigmas, 1, 2, [5])
    assert drawn.tolist() == [[1.0, 0.25]], "of the sampler's levels, without the 0 that it ends at"
