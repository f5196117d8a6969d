"""Schedulers of pipelines: whose noise levels are followed, beside diffusers' own sampling, and which are refused."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from torch.testing import assert_close

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.sections import ModelConfig
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.diffusion import schedulers
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model, find_families
from sfumato.models.diffusion.schedulers import check_flow_scheduler, check_unet_scheduler
from sfumato.models.estimate.meta_models import diffusion_model_on_meta
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from tests import tiny_families
from tests.family_rows import ROWS, keep_latents, wake
from tests.tiny import write_tiny_pipeline

PROMPTS = ['write "AB"', 'write "C"']
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def build(name: str, scheduler: Any = None, **settings: Any) -> DiffusionModel:
    """A tiny model of a family with another scheduler of its pipeline."""
    description = ROWS[name].describe()
    family = find_families()[description["pipeline"]]
    pipeline = family.build(description, seed=0)
    if scheduler is not None:
        pipeline.scheduler = getattr(diffusers, scheduler)(**settings)
    model = family(pipeline, max_sequence_length=ROWS[name].tokens)
    wake(model)
    pipeline.set_progress_bar_config(disable=True)
    return model


def by_sfumato(model: DiffusionModel, name: str, num_steps: int = 4, **more: Any) -> torch.Tensor:
    row = ROWS[name]
    settings = {"dynamics": EulerODE(), "trained_steps": (), "guidance_scale": 1.0, "seed": 11, "iteration": 0}
    conditioning = model.encode_prompts(PROMPTS)
    return sample_trajectories(model, conditioning, [0, 1], size=row.size, num_steps=num_steps, **{**settings, **more})[
        0
    ]


def by_diffusers(model: DiffusionModel, name: str) -> torch.Tensor:
    row = ROWS[name]
    start = keyed_normal(row.latent_shape, 11, "latent", 0, [0, 1])
    row.call(row, model.pipeline, PROMPTS, start, 1.0, None)
    last = model.pipeline.last_latents
    return row.unpack(last, *row.latent_shape[-2:]) if last.ndim == 3 else last


EULER = "FlowMatchEulerDiscreteScheduler"
DYNAMIC = {"use_dynamic_shifting": True, "max_shift": 0.9, "base_image_seq_len": 8, "max_image_seq_len": 64}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sd3", {"shift": 3.0, "use_karras_sigmas": True}),
        ("sd3", {**DYNAMIC, "time_shift_type": "linear"}),
        ("sd3", {"num_train_timesteps": 500, "shift": 2.0}),
        ("flux", {**DYNAMIC, "use_exponential_sigmas": True}),
        ("flux", {**DYNAMIC, "shift_terminal": 0.1, "time_shift_type": "linear"}),
        ("flux", {"num_train_timesteps": 800, "shift": 1.5}),
        ("flux_schnell", {"shift": 2.0, "use_beta_sigmas": True}),
        ("z_image", {"num_train_timesteps": 900, "shift": 3.0}),
        ("qwen_image", {**DYNAMIC, "num_train_timesteps": 900}),
    ],
)
def test_settings_of_flow_matching_give_the_samples_of_the_pipeline(name: str, settings: dict[str, Any]) -> None:
    model, published = build(name, EULER, **settings), build(name)
    latents = by_sfumato(model, name)
    assert (latents - by_sfumato(published, name)).abs().max() > 1e-3, "the settings change the samples"
    assert_close(latents, by_diffusers(model, name), atol=2e-4, rtol=2e-4)


def test_levels_of_ideogram_are_those_of_a_square_of_512_shifted() -> None:
    """Training draws logits of the same distribution, and shifts them."""
    model = build("ideogram4")
    unshifted = model.sigmas(6, (16, 128, 128))  # the tiny autoencoder makes a quarter of a side
    quantiles = torch.special.ndtri(torch.linspace(1, 0, 7)[1:-1])
    assert_close(unshifted[1:-1], torch.sigmoid(1.5 * quantiles), atol=1e-6, rtol=0)
    assert model.shift_at((16, 128, 128)) == 1 and model.shift == 4
    shape = (16, 64, 512)
    shift = model.shift_at(shape)
    assert shift == pytest.approx(2**0.5)
    assert_close(
        model.sigmas(6, shape)[1:-1], (shift * unshifted / (1 + (shift - 1) * unshifted))[1:-1], atol=1e-6, rtol=0
    )


def test_levels_that_a_pipeline_names_are_those_of_as_many_steps() -> None:
    pytest.importorskip("torchvision")
    name, levels = "qwen_image21", [1.0, 0.75, 0.4, 0.1]
    model, shape = build(name, EULER, **DYNAMIC), ROWS[name].latent_shape
    straight = [model.sigmas(num_steps, shape) for num_steps in (4, 5)]
    model.pipeline.register_to_config(sample_sigmas=levels)
    by_diffusers(model, name)
    assert_close(model.sigmas(4, shape), model.pipeline.scheduler.sigmas, atol=2e-6, rtol=0)
    assert (model.sigmas(4, shape) - straight[0]).abs().max() > 1e-2
    assert torch.equal(model.sigmas(5, shape), straight[1])


@pytest.mark.parametrize(
    ("name", "scheduler", "settings"),
    [
        ("sd3", "FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
        ("sd3", "UniPCMultistepScheduler", {**FLOW, "flow_shift": 3.0}),
        ("sd3", "DPMSolverMultistepScheduler", {**FLOW, "flow_shift": 2.0}),
        ("flux", "UniPCMultistepScheduler", {**FLOW, "use_dynamic_shifting": True}),
        ("flux", "DPMSolverMultistepScheduler", {**FLOW, "use_dynamic_shifting": True}),
        ("qwen_image", "UniPCMultistepScheduler", {**FLOW, "use_dynamic_shifting": True}),
        ("wan", "DPMSolverSinglestepScheduler", {**FLOW, "flow_shift": 3.0}),
        ("wan", "UniPCMultistepScheduler", {**FLOW, "use_karras_sigmas": True}),
        ("wan", EULER, {"shift": 5.0}),
    ],
)
def test_levels_are_those_that_the_pipeline_steps_through(name: str, scheduler: str, settings: dict[str, Any]) -> None:
    model = build(name, scheduler, **settings)
    levels = model.sigmas(4, ROWS[name].latent_shape)
    assert (levels[:-1] > levels[1:]).all() and levels[-1] == 0
    by_diffusers_without_grid(model, name)
    stepped = torch.unique_consecutive(model.pipeline.scheduler.sigmas)
    assert_close(levels, stepped.float(), atol=2e-6, rtol=0)


def by_diffusers_without_grid(model: DiffusionModel, name: str) -> None:
    """Runs the pipeline with the steps of its own scheduler."""
    height, width = ROWS[name].size
    more = {"num_frames": 1} if name == "wan" else {}
    embeds = {"prompt": PROMPTS[:1]} if name != "wan" else {"prompt_embeds": torch.zeros(1, 7, 16)}
    if name == "wan":
        embeds["prompt_embeds"] = model.embed_prompts(PROMPTS[:1])["prompt_embeds"]
    model.pipeline(
        **embeds,
        **more,
        height=height,
        width=width,
        guidance_scale=1.0,
        num_inference_steps=4,
        output_type="latent",
        max_sequence_length=ROWS[name].tokens,
    )


def test_heun_of_flux_which_the_pipeline_itself_cannot_run_has_the_levels_of_euler() -> None:
    shape = ROWS["flux"].latent_shape
    heun, euler = build("flux", "FlowMatchHeunDiscreteScheduler", shift=2.5), build("flux", EULER, shift=2.5)
    assert torch.equal(heun.sigmas(5, shape), euler.sigmas(5, shape))
    assert heun.shift_at(shape) == euler.shift_at(shape) == 2.5


@pytest.mark.parametrize(
    ("name", "scheduler", "settings"),
    [
        ("sd3", EULER, {**DYNAMIC, "shift": 3.0}),
        ("sd3", EULER, {**DYNAMIC, "time_shift_type": "linear"}),
        ("sd3", "FlowMatchHeunDiscreteScheduler", {"shift": 2.0}),
        ("sd3", "UniPCMultistepScheduler", {**FLOW, "flow_shift": 4.0}),
        ("sd3", "UniPCMultistepScheduler", {**FLOW, "use_dynamic_shifting": True}),
        ("flux", EULER, DYNAMIC),
        ("qwen_image", EULER, {**DYNAMIC, "time_shift_type": "linear"}),
        ("wan", EULER, {"shift": 5.0}),
    ],
)
def test_training_shifts_as_sampling_does(name: str, scheduler: str, settings: dict[str, Any]) -> None:
    """The middle level of a trajectory of many steps is that of 1/2 under the shift of training."""
    model = build(name, scheduler, **settings)
    shift = {shape: model.shift_at(shape) for shape in (ROWS[name].latent_shape, (4, *[1] * (name == "wan"), 8, 32))}
    for shape, factor in shift.items():
        levels = model.sigmas(2000, shape)
        plain = levels / (factor - (factor - 1) * levels)  # the shift undone
        steps = plain[:-1] - plain[1:]
        if name in ("sd3", "wan") and "Flow" in scheduler and not settings.get("use_dynamic_shifting"):
            continue  # diffusers' own grid ends at the shifted smallest level and is shifted again
        assert steps.std() < 0.05 * steps.mean()
    if settings.get("use_dynamic_shifting") and "Flow" in scheduler:
        assert len(set(shift.values())) == 2, "the shift follows the size"
    elif not settings.get("use_dynamic_shifting"):
        assert set(shift.values()) == {settings.get("shift", settings.get("flow_shift"))}


def test_sd3_with_a_dynamic_shift_trains_with_it() -> None:
    model = build("sd3", EULER, use_dynamic_shifting=True, shift=3.0)
    mu = 0.5 + (16 - 256) * (1.15 - 0.5) / (4096 - 256)  # 4 x 4 tokens
    assert model.shift_at(ROWS["sd3"].latent_shape) == pytest.approx(math.exp(mu))


UNET = [
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    ("EulerDiscreteScheduler", {"use_exponential_sigmas": True, "timestep_spacing": "leading"}),
    ("EulerDiscreteScheduler", {"use_beta_sigmas": True, "timestep_spacing": "trailing"}),
    ("EulerDiscreteScheduler", {"timestep_spacing": "linspace", "interpolation_type": "log_linear"}),
    ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ("DPMSolverMultistepScheduler", {"solver_order": 1, "use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {"solver_order": 1, "timestep_spacing": "leading"}),
    ("DPMSolverMultistepScheduler", {"solver_order": 1, "use_lu_lambdas": True}),
    ("UniPCMultistepScheduler", {"solver_order": 1, "disable_corrector": list(range(9))}),
    ("DDIMScheduler", {"clip_sample": False, "beta_schedule": "squaredcos_cap_v2"}),
]


@pytest.mark.parametrize(("scheduler", "settings"), UNET)
def test_settings_of_unets_give_the_samples_of_the_pipeline(scheduler: str, settings: dict[str, Any]) -> None:
    model = build("stable_diffusion", scheduler, **{**BETAS, **settings})
    start = keyed_normal((4, 8, 8), 11, "latent", 0, [0, 1])
    latents = by_sfumato(model, "stable_diffusion", num_steps=6)
    expected = model.pipeline(
        PROMPTS,
        height=16,
        width=16,
        num_inference_steps=6,
        latents=start,
        output_type="latent",
        guidance_scale=1.0,
        callback_on_step_end=keep_latents,
    ).images
    # between two timesteps the solvers round, or interpolate, the one that the network is told
    assert (latents - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("scheduler", ["HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "DEISMultistepScheduler"])
def test_solvers_of_higher_order_have_their_own_levels(scheduler: str) -> None:
    model = build("stable_diffusion", scheduler, **BETAS, timestep_spacing="leading")
    euler = build("stable_diffusion", "EulerDiscreteScheduler", **BETAS, timestep_spacing="leading")
    levels = model.sigmas(5, (4, 8, 8))
    assert len(levels) == 6 and (levels[:-1] > levels[1:]).all()
    if scheduler != "DEISMultistepScheduler":
        assert_close(levels, euler.sigmas(5, (4, 8, 8)), atol=1e-6, rtol=0)


def test_fields_of_another_class_in_the_file_are_not_read() -> None:
    leftover = {**BETAS, "skip_prk_steps": True, "clip_sample": True, "rescale_betas_zero_snr": True}
    scheduler = diffusers.PNDMScheduler.from_config(leftover)
    assert scheduler.config.clip_sample is True
    check_unet_scheduler(scheduler)
    plain = diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True)
    assert torch.equal(schedulers.unet_levels(scheduler), schedulers.unet_levels(plain))


@pytest.mark.parametrize(
    ("scheduler", "settings", "message"),
    [
        ("FlowMatchLCMScheduler", {}, "FlowMatchLCMScheduler is none of a flow model.*FlowMatchEulerDiscreteScheduler"),
        ("EulerDiscreteScheduler", {}, "EulerDiscreteScheduler is none of a flow model"),
        ("DDIMScheduler", {}, "DDIMScheduler is none of"),
        ("FlowMapEulerDiscreteScheduler", {}, "FlowMapEulerDiscreteScheduler is none of"),
        ("SCMScheduler", {}, "SCMScheduler is none of"),
        ("DEISMultistepScheduler", FLOW, "DEISMultistepScheduler is none of"),
        (EULER, {"invert_sigmas": True}, "needs invert_sigmas False; True is not known"),
        (EULER, {"stochastic_sampling": True}, "needs stochastic_sampling False"),
        ("UniPCMultistepScheduler", {}, "needs prediction_type 'flow_prediction'"),
        ("UniPCMultistepScheduler", {"prediction_type": "flow_prediction"}, "needs use_flow_sigmas True"),
        ("UniPCMultistepScheduler", {"use_flow_sigmas": True}, "needs prediction_type 'flow_prediction'"),
        ("UniPCMultistepScheduler", {**FLOW, "use_beta_sigmas": True}, "needs use_beta_sigmas False"),
        ("UniPCMultistepScheduler", {**FLOW, "final_sigmas_type": "sigma_min"}, "needs final_sigmas_type 'zero'"),
        ("UniPCMultistepScheduler", {**FLOW, "thresholding": True}, "needs thresholding False"),
        ("DPMSolverMultistepScheduler", {**FLOW, "use_karras_sigmas": True}, "needs use_karras_sigmas False"),
        (
            "DPMSolverMultistepScheduler",
            {**FLOW, "use_dynamic_shifting": True, "time_shift_type": "linear"},
            "needs time_shift_type 'exponential'",
        ),
    ],
)
def test_flow_models_refuse_what_they_would_not_follow(scheduler: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_flow_scheduler(getattr(diffusers, scheduler)(**settings))


@pytest.mark.parametrize(
    ("scheduler", "settings", "message"),
    [
        ("EDMEulerScheduler", {}, "EDMEulerScheduler is none of a UNet.*DDIMScheduler"),
        ("EDMDPMSolverMultistepScheduler", {}, "EDMDPMSolverMultistepScheduler is none of"),
        ("LCMScheduler", {}, "LCMScheduler is none of"),
        ("TCDScheduler", {}, "TCDScheduler is none of"),
        (EULER, {}, "FlowMatchEulerDiscreteScheduler is none of a UNet"),
        ("DDIMScheduler", {}, "needs clip_sample False; True is not known"),
        ("DDPMScheduler", {"clip_sample": False, "variance_type": "learned_range"}, "needs variance_type None"),
        ("DDIMScheduler", {"clip_sample": False, "thresholding": True}, "needs thresholding False"),
        ("DDPMScheduler", {"clip_sample": False, "beta_schedule": "sigmoid"}, "needs beta_schedule 'linear'"),
        ("EulerDiscreteScheduler", {"timestep_type": "continuous"}, "needs timestep_type 'discrete'"),
        ("EulerDiscreteScheduler", {"prediction_type": "sample"}, "'sample' is not known"),
        ("EulerDiscreteScheduler", {"rescale_betas_zero_snr": True}, "zero_snr.*v_prediction"),
        ("UniPCMultistepScheduler", FLOW, "needs prediction_type 'epsilon' or 'v_prediction'"),
        ("DPMSolverMultistepScheduler", {"use_flow_sigmas": True}, "needs use_flow_sigmas False"),
    ],
)
def test_unets_refuse_what_they_would_not_follow(scheduler: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_unet_scheduler(getattr(diffusers, scheduler)(**settings))


def test_wan_whose_pipeline_does_not_know_the_size_refuses_a_dynamic_shift() -> None:
    with pytest.raises(ConfigError, match="needs use_dynamic_shifting False"):
        build("wan", "UniPCMultistepScheduler", **FLOW, use_dynamic_shifting=True)


def test_levels_that_would_rise_are_refused() -> None:
    """UniPC turns the levels round that the pipeline of Qwen-Image gives it."""
    with pytest.raises(ConfigError, match="needs use_karras_sigmas False"):
        build("qwen_image", "UniPCMultistepScheduler", **FLOW, use_karras_sigmas=True)


@pytest.mark.parametrize(
    ("classes", "used"),
    [
        (schedulers.FLOW_MATCHING, schedulers.FLOW_FIELDS),
        (schedulers.MULTISTEP, schedulers.FLOW_FIELDS | schedulers.BETAS | schedulers.OF_STEPS),
        ((*schedulers.OF_TIMESTEPS, *schedulers.OF_SIGMAS), schedulers.UNET_FIELDS | schedulers.OF_STEPS),
    ],
)
def test_every_field_is_used_or_of_the_steps_or_needs_a_value(classes: tuple[str, ...], used: set[str]) -> None:
    needed = {*schedulers.NEEDED, *schedulers.FLOW_NEEDED, *schedulers.UNET_NEEDED}
    for name in classes:
        fields = set(inspect.signature(getattr(diffusers, name).__init__).parameters) - {"self"}
        assert fields <= used | needed, (name, fields - used - needed)


def test_the_scheduler_is_refused_where_the_folder_is_loaded_and_by_check(tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipe")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"][1] = "FlowMatchLCMScheduler"
    (folder / "model_index.json").write_text(json.dumps(index))
    config = ModelConfig(model_path=str(folder), max_sequence_length=7)
    for load in (build_diffusion_model, lambda config: diffusion_model_on_meta(config, "no")):
        with pytest.raises(ConfigError, match="FlowMatchLCMScheduler is none of") as raised:
            load(config)
    assert "name it, such as FlowMatchEulerDiscreteScheduler, in model_index.json" in str(raised.value)
    index["scheduler"][1] = EULER  # the remedy
    (folder / "model_index.json").write_text(json.dumps(index))
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_class_name": EULER}))
    assert build_diffusion_model(config).shift > 0


def test_a_description_with_a_scheduler_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_families.tiny_flux() | {"scheduler": {"stochastic_sampling": True}}))
    with pytest.raises(ConfigError, match="needs stochastic_sampling False"):
        build_diffusion_model(ModelConfig(config_path=str(path)))


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (EULER, {"use_beta_sigmas": True}, "use_beta_sigmas"),
        ("LMSDiscreteScheduler", {}, "its steps"),
        ("UniPCMultistepScheduler", {"use_beta_sigmas": True}, "use_beta_sigmas"),
    ],
)
def test_a_scheduler_that_needs_scipy_says_so_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any], reason: str
) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipe")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"][1] = name
    (folder / "model_index.json").write_text(json.dumps(index))
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": name} | fields))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == "scipy" else real(package))
    config = ModelConfig(model_path=str(folder), max_sequence_length=7)
    for load in (build_diffusion_model, lambda config: diffusion_model_on_meta(config, "no")):
        with pytest.raises(MissingDependencyError, match=f"{name} needs the package scipy for {reason}.*pip install"):
            load(config)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_families.tiny_flux() | {"scheduler": {"use_beta_sigmas": True}}))
    with pytest.raises(MissingDependencyError, match="needs the package scipy"):
        build_diffusion_model(ModelConfig(config_path=str(path)))
