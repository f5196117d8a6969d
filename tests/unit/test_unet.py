"""Stable Diffusion in flow coordinates: its schedule, DDIM, DDPO's step, and what its network was trained by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.dynamics import DDIM, EulerODE
from sfumato.algorithms.flow_matching import add_noise, flow_matching_loss
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.dit import FlowConfig, TrainDitDpoConfig
from sfumato.config.image_data import ImageTextDataConfig, PairDataConfig
from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.images.image_text import open_image_pairs, open_image_text
from sfumato.data.loader import IndexBatch
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import OnlineEncoder
from sfumato.models.diffusion.families.cogvideox import CogVideoX
from sfumato.models.diffusion.families.sd3 import StableDiffusion3
from sfumato.models.diffusion.families.stable_diffusion import StableDiffusion
from sfumato.models.diffusion.families.stable_diffusion_xl import StableDiffusionXL
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.trajectories import replay_trajectories, sample_trajectories
from sfumato.tracking.json_lines import read_jsonl
from tests import tiny_families
from tests.tiny import load_task, run_task_here, tiny_dit_config, tiny_dit_dpo_config, write_config

PROMPTS = ['write "AB"', 'write "C"']
SHAPE = (4, 8, 8)


def build(description: dict[str, Any]) -> DiffusionModel:
    family = StableDiffusionXL if "XL" in description["pipeline"] else StableDiffusion
    model = family(family.build(description, seed=0))
    model.pipeline.set_progress_bar_config(disable=True)
    return model


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return build(tiny_families.tiny_stable_diffusion())


@pytest.fixture(scope="module")
def v_model() -> DiffusionModel:
    return build(tiny_families.tiny_stable_diffusion_2())


def sample(model: DiffusionModel, num_steps: int, **changes: Any) -> tuple[torch.Tensor, Any]:
    settings: dict[str, Any] = {"dynamics": EulerODE(), "trained_steps": (), "guidance_scale": 1.0}
    return sample_trajectories(
        model,
        model.encode_prompts(PROMPTS),
        [0, 1],
        size=(16, 16),
        num_steps=num_steps,
        seed=11,
        iteration=0,
        **(settings | changes),
    )


def by_diffusers(pipeline: Any, num_steps: int, **more: Any) -> torch.Tensor:
    noise = keyed_normal(SHAPE, 11, "latent", 0, [0, 1])
    return pipeline(
        PROMPTS, height=16, width=16, num_inference_steps=num_steps, latents=noise, output_type="latent", **more
    ).images


@pytest.mark.parametrize(("kind", "num_steps"), [("model", 1), ("model", 7), ("model", 50), ("v_model", 8)])
def test_latents_equal_those_of_ddim(kind: str, num_steps: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    latents, _ = sample(model, num_steps, guidance_scale=3.0)
    expected = by_diffusers(model.pipeline, num_steps, guidance_scale=3.0)
    assert expected.std() > 0.1
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=1e-4)


def test_latents_equal_those_of_xl_as_it_is_published() -> None:
    description = tiny_families.tiny_stable_diffusion_xl() | {"scheduler": {"set_alpha_to_one": False}}
    model = build(description)
    settings = {name: value for name, value in model.pipeline.scheduler.config.items() if not name.startswith("_")}
    model.pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(settings)
    latents, _ = sample(model, 5, guidance_scale=3.0)
    expected = by_diffusers(model.pipeline, 5, guidance_scale=3.0)
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=1e-4)


def test_the_empty_prompt_of_xl_is_zero_where_the_pipeline_says_so() -> None:
    model = build(tiny_families.tiny_stable_diffusion_xl())
    negative = model.encode_prompts(PROMPTS).negative
    assert all(not value.any() for value in negative.values())
    model.pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    model.forget_prompts()
    assert all(value.any() for value in model.encode_prompts(PROMPTS).negative.values())


def test_the_schedule_is_that_of_the_pipelines_scheduler(model: DiffusionModel) -> None:
    alphas = model.pipeline.scheduler.alphas_cumprod.double()
    expected = (1 - alphas).sqrt() / (alphas.sqrt() + (1 - alphas).sqrt())
    torch.testing.assert_close(model.sigmas(4, SHAPE)[:-1].double(), expected[[751, 501, 251, 1]], atol=1e-7, rtol=0)
    assert model.sigmas(4, SHAPE)[-1] == 0
    published = build(tiny_families.tiny_stable_diffusion() | {"scheduler": {}})
    settings = {name: value for name, value in published.pipeline.scheduler.config.items() if not name.startswith("_")}
    published.pipeline.scheduler = diffusers.PNDMScheduler.from_config({**settings, "skip_prk_steps": True})
    assert torch.equal(published.sigmas(4, SHAPE), model.sigmas(4, SHAPE)), "1.5 comes with PNDM"


@pytest.mark.parametrize("kind", ["model", "v_model"])
def test_noise_levels_of_timesteps_give_exactly_these_timesteps(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    assert torch.equal(model.timestep(model.levels.float()), torch.arange(1000.0))
    between = (model.levels[500] + model.levels[501]) / 2
    assert 500.4 < float(model.timestep(between.float()[None])) < 500.6
    assert model.timestep(torch.tensor([0.0, 1.0])).tolist() == [0.0, 999.0]


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_the_step_of_ddpo_is_that_of_the_scheduler(model: DiffusionModel, eta: float) -> None:
    """Latents are those of the scheduler times sqrt((1 - s)^2 + s^2), log-densities less the logarithm of this."""
    scheduler, sigmas = model.schedule(), model.sigmas(10, SHAPE)
    scheduler.set_timesteps(10)
    generator = torch.Generator().manual_seed(0)
    latents, predicted = torch.randn(2, 2, *SHAPE, generator=generator)
    for index, timestep in enumerate(scheduler.timesteps[:-1]):
        sigma, sigma_next = sigmas[index].expand(2), sigmas[index + 1].expand(2)
        norm, norm_next = (torch.sqrt((1 - level[0]) ** 2 + level[0] ** 2) for level in (sigma, sigma_next))
        velocity = (predicted - latents * norm) / (1 - sigma[0])
        step = DDIM(eta).step(velocity, latents * norm, sigma, sigma_next, 1.0)
        mean, above = (
            scheduler.step(predicted, timestep, latents, eta=eta, variance_noise=torch.full_like(latents, value))[0]
            for value in (0.0, 1.0)
        )
        torch.testing.assert_close(step.mean, mean * norm_next, atol=2e-5, rtol=1e-4)
        std = (above - mean)[:, 0, 0, 0]
        torch.testing.assert_close(step.std, std * norm_next, atol=1e-6, rtol=1e-4)
        noise = torch.randn(2, *SHAPE, generator=generator)
        drawn = scheduler.step(predicted, timestep, latents, eta=eta, variance_noise=noise)[0]
        torch.testing.assert_close(step.draw(noise), drawn * norm_next, atol=2e-5, rtol=1e-4)
        density = torch.distributions.Normal(mean, std[:, None, None, None]).log_prob(drawn).flatten(1).mean(1)
        torch.testing.assert_close(step.log_prob(drawn * norm_next), density - norm_next.log(), atol=1e-3, rtol=1e-4)


def test_ddpo_samples_and_replays(model: DiffusionModel) -> None:
    _, trajectories = sample(model, 6, dynamics=DDIM(), trained_steps=range(5))
    with torch.no_grad():
        replay = replay_trajectories(model, trajectories, model.encode_prompts(PROMPTS), DDIM(), 1.0)
    assert (
        replay.log_ratio(trajectories.means.flatten(0, 1), trajectories.next_latents.flatten(0, 1)).abs().max() < 1e-4
    )
    assert torch.isfinite(trajectories.log_probs).all()


@pytest.mark.parametrize("kind", ["model", "v_model"])
def test_the_weighted_loss_is_the_one_that_the_network_was_trained_by(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    generator = torch.Generator().manual_seed(1)
    clean, noise = torch.randn(2, 4, *SHAPE, generator=generator)
    timesteps = torch.tensor([1, 250, 700, 990])
    sigma = model.training_sigma(timesteps / 999)
    torch.testing.assert_close(model.timestep(sigma), timesteps.float())
    predictions = []
    hook = model.denoiser.register_forward_hook(lambda _module, _args, output: predictions.append(output[0]))
    conditioning = model.encode_prompts(PROMPTS * 2)
    with torch.no_grad():
        velocity = model.predict_velocity(add_noise(clean, noise, sigma), sigma, conditioning)
    hook.remove()
    ours = flow_matching_loss(velocity, clean, noise) * model.loss_weight(sigma)
    scheduler = model.pipeline.scheduler
    target = noise if kind == "model" else scheduler.get_velocity(clean, noise, timesteps)
    torch.testing.assert_close(ours, ((predictions[0] - target) ** 2).flatten(1).mean(1), atol=1e-4, rtol=1e-4)


def test_noise_levels_for_training_stay_inside_the_schedule(model: DiffusionModel) -> None:
    sigma = model.training_sigma(torch.tensor([0.0, 0.5, 1.0]))
    middle = (model.levels[499] + model.levels[500]) / 2
    torch.testing.assert_close(sigma, torch.stack([model.levels[0], middle, model.levels[-1]]).float())
    assert 0.9 < float(model.levels[-1]) < 1


def test_beyond_the_schedule_the_velocity_is_finite(model: DiffusionModel, v_model: DiffusionModel) -> None:
    for unet_model in (model, v_model):
        latents, sigma = torch.randn(2, *SHAPE), torch.tensor([1.0, 0.0])
        assert torch.isfinite(unet_model.predict_velocity(latents, sigma, unet_model.encode_prompts(PROMPTS))).all()


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [({"prediction_type": "sample"}, "'sample' is not known"), ({"rescale_betas_zero_snr": True}, "zero_snr.*v_pred")],
)
def test_schedulers_that_are_no_flow_are_refused(scheduler: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_families.tiny_stable_diffusion() | {"scheduler": scheduler}))
    with pytest.raises(ConfigError, match=message):
        build_diffusion_model(ModelConfig(config_path=str(path)))


def test_unets_with_further_inputs_are_refused() -> None:
    description = tiny_families.tiny_stable_diffusion()
    for changes in ({"in_channels": 9}, {"time_cond_proj_dim": 8}):
        with pytest.raises(ConfigError, match="takes more than 4 channels"):
            build({**description, "unet": {**description["unet"], **changes}})


def test_an_image_that_is_cut_over_ranks_is_refused(model: DiffusionModel, tmp_path: Path) -> None:
    mesh = Mesh(replace(Layout(), ulysses=2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"ulysses_parallel_size.*convolutions.*set both to 1"):
        model.parallelize(mesh, TrainConfig(output_dir=str(tmp_path)))


def test_the_task_trains_it_by_its_own_loss(tmp_path: Path) -> None:
    description = write_config(tiny_families.tiny_stable_diffusion(), tmp_path / "tiny.yaml")
    config = tiny_dit_config(tmp_path, train={"max_steps": 2})
    config["model"] = {"config_path": str(description)}
    folder = run_task_here("train_dit", config)
    first, _ = read_jsonl(folder / "metrics.jsonl")
    assert 0.9 < first["loss"] < 2, "the error of the noise; that of the velocity would be larger by far"
    assert diffusers.StableDiffusionPipeline.from_pretrained(folder / "hf_ckpt").unet is not None


def test_videos_are_refused(model: DiffusionModel) -> None:
    with pytest.raises(ValueError, match="single images"):
        model.latent_shape(16, 16, 5)


def seen_sizes(model: DiffusionModel, compute: Any) -> torch.Tensor:
    """The sizes and crops ``[B, 6]`` that the network of XL is told while ``compute`` runs."""
    seen: list[torch.Tensor] = []
    hook = model.denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["added_cond_kwargs"]["time_ids"]), with_kwargs=True
    )
    compute()
    hook.remove()
    return torch.cat(seen)


SIZES = [(48, 24), (24, 72), (16, 16), (32, 16)]
"""Height and width of pictures that are brought to 16 x 16."""


def sizes_in_diffusers(height: int, width: int) -> list[int]:
    """What train_text_to_image_sdxl.py says of a picture whose shorter side is scaled and whose middle is cut out."""
    scale = 16 / min(height, width)
    scaled = round(height * scale), round(width * scale)
    crop = [max(0, round((side - 16) / 2.0)) for side in scaled]
    return [height, width, *crop, 16, 16]


@pytest.mark.parametrize("cached", [False, True])
def test_xl_is_told_how_large_each_picture_was_and_what_was_cut_off(cached: bool, tmp_path: Path) -> None:
    model, rows = build(tiny_families.tiny_stable_diffusion_xl()), []
    for number, size in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "text": f"write {number}"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ImageTextDataConfig(train_path=str(tmp_path / "rows.jsonl"), height=16, width=16)
    data, bad_rows = open_image_text(config, 0), BadRows(0, print)
    encoder = open_cache(tmp_path / "cache", data, model, bad_rows) if cached else OnlineEncoder(data, model, bad_rows)
    batch = encoder.batch(IndexBatch([3, 1, 0, 2], [0, 1, 2, 3]))
    task = load_task("train_dit")
    seen = seen_sizes(model, lambda: task.denoising_losses(model, batch, FlowConfig(prompt_dropout=0.9), 0, 0))
    assert seen.tolist() == [sizes_in_diffusers(*SIZES[index]) for index in (3, 1, 0, 2)]
    conditioning = model.with_framing(batch.conditioning, batch.framing)
    latents, sigma = torch.zeros(4, *SHAPE), torch.full((4,), 0.5)
    guided = seen_sizes(model, lambda: model.predict_velocity(latents, sigma, conditioning, 3.0))
    assert torch.equal(guided, torch.cat([seen, seen])), "both branches are told"
    drawn = seen_sizes(model, lambda: sample(model, 2, guidance_scale=2.0))
    assert (drawn == torch.tensor([16.0, 16, 0, 0, 16, 16])).all(), "what is drawn is whole"


@pytest.mark.parametrize(
    ("family", "flow", "density"),
    [
        (StableDiffusion, {}, "uniform"),
        (StableDiffusion, {"logit_std": 2.0}, "logit_normal"),
        (StableDiffusion, {"timestep_sampling": "logit_normal"}, "logit_normal"),
        (CogVideoX, {}, "uniform"),
        (StableDiffusion3, {}, "logit_normal"),
        (StableDiffusion3, {"timestep_sampling": "uniform"}, "uniform"),
    ],
)
def test_noise_levels_are_drawn_as_the_model_was_trained(
    family: type[DiffusionModel], flow: dict[str, Any], density: str
) -> None:
    assert FlowConfig(**flow).density(family.timestep_sampling) == density


def test_both_pictures_of_a_pair_have_their_own_size_in_xl(tmp_path: Path) -> None:
    model, rows = build(tiny_families.tiny_stable_diffusion_xl()), []
    for number in range(2):
        names = []
        for side, size in enumerate(SIZES[number : number + 2]):
            pixels = np.random.default_rng(2 * number + side).integers(0, 256, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}_{side}.png")
            names.append(f"{number}_{side}.png")
        rows.append({"prompt": "write", "better": names[0], "worse": names[1]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"text_key": "prompt", "chosen_key": "better", "rejected_key": "worse", "label_key": None}
    config = PairDataConfig(train_path=str(tmp_path / "rows.jsonl"), height=16, width=16, **keys)
    data = open_image_pairs(config, 0, print)
    batch = OnlineEncoder(data, model, BadRows(0, print)).batch(IndexBatch([0, 1], [0, 1]))
    settings = tiny_dit_dpo_config(tmp_path, data=config.model_dump(mode="json"))
    task, policies = load_task("train_dit_dpo"), Policies(model, {"reference": FROZEN})
    dpo = TrainDitDpoConfig.model_validate({name: part for name, part in settings.items() if name != "eval"})
    seen = seen_sizes(model, lambda: task.predict_pairs(policies, batch, dpo, 0))
    pairs = [SIZES[index] for index in (0, 1, 1, 2)]
    assert seen[-4:].tolist() == [sizes_in_diffusers(*size) for size in pairs]
