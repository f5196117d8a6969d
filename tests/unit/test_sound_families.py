"""Families that make sound, against diffusers' own pipelines with the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.checkpoint.export import export_model
from sfumato.config.recipes import FORWARD_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.sections import LoraConfig, ModelConfig, sound_size
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel, set_output
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.waveforms import FULL_SCALE, Waveform
from tests.family_rows import wake
from tests.sound_rows import ROWS, SECONDS, SEED, STEPS, SoundRow
from tests.tiny import rl_task, run_task_here, write_tiny_pipeline
from tests.tiny_sound import tiny_ace_step

ALONE = Mesh(Layout(), torch.device("cpu"))


@dataclass(frozen=True)
class Built:
    row: SoundRow
    model: DiffusionModel
    folder: Path

    def load(self, **settings: Any) -> DiffusionModel:
        config = ModelConfig(model_path=str(self.folder), max_sequence_length=self.row.tokens, **settings)
        model = build_diffusion_model(config)
        set_output(model, sound_size(SECONDS), "rollout")
        return model

    def pipeline(self) -> Any:
        pipeline = self.model.pipeline_type().from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


@pytest.fixture(scope="module", params=ROWS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    row = ROWS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
    model = build_diffusion_model(ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=row.tokens))
    set_output(model, sound_size(SECONDS), "rollout")
    wake(model)
    model.save_pipeline(folder / "pipe")
    return Built(row, model, folder / "pipe")


def test_sounds_equal_those_of_the_diffusers_pipeline(built: Built) -> None:
    pipeline, row = built.pipeline(), built.row
    ids = list(range(len(row.prompts)))
    start = keyed_normal(row.latent_shape, SEED, "latent", 0, ids)
    conditioning = built.model.encode_prompts(row.prompts)
    common: dict[str, Any] = {"size": sound_size(SECONDS), "num_steps": STEPS, "seed": SEED}
    drawn = []
    for scale in row.scales:
        latents, _ = sample_trajectories(
            built.model,
            conditioning,
            ids,
            dynamics=EulerODE(),
            trained_steps=(),
            iteration=0,
            guidance_scale=scale,
            **common,
        )
        expected = [
            row.call(pipeline, [prompt], start[index : index + 1], scale, "latent")
            for index, prompt in enumerate(row.prompts)
        ]
        torch.testing.assert_close(latents, torch.cat(expected), atol=1e-4, rtol=1e-4)
        drawn.append(latents)
    assert len(drawn) == 1 or (drawn[0] - drawn[-1]).abs().max() > 2e-3, "guidance must matter"

    scale = row.scales[-1]
    sounds = sample_images(built.model, conditioning, ids, micro_batch_size=8, guidance_scale=scale, **common)
    for index, (prompt, sound) in enumerate(zip(row.prompts, sounds, strict=True)):
        waveform = row.call(pipeline, [prompt], start[index : index + 1], scale, "np")[0]
        assert isinstance(sound, Waveform)
        assert sound.samples.shape == waveform.shape == (2, int(SECONDS * 8000))
        assert sound.samples.std() > 100, "silence proves nothing"
        assert np.abs(sound.samples - waveform * FULL_SCALE).max() <= 4


def test_a_loss_and_its_gradients_are_those_of_the_plain_loop(built: Built) -> None:
    """The network is called with what diffusers' own pipeline gave it in its first step, and once by sfumato."""
    row = built.row
    pipeline = built.pipeline()
    start = keyed_normal(row.latent_shape, SEED, "latent", 0, [0])
    calls: list[Any] = []

    def stop_at_first_step(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise InterruptedError

    hook = pipeline.transformer.register_forward_pre_hook(stop_at_first_step, with_kwargs=True)
    with pytest.raises(InterruptedError):
        row.call(pipeline, [row.prompts[0]], start, 1.0, "latent")
    hook.remove()
    args, kwargs = calls[0]
    target = keyed_normal(row.latent_shape, SEED, "target", 0, [0])
    pipeline.transformer.requires_grad_(True)
    output = pipeline.transformer(*args, **kwargs)[0]
    plain = ((output if output.shape == target.shape else output.mT) - target).square().mean()
    plain.backward()
    model = built.load()
    velocity = model.predict_velocity(
        start, model.sigmas(STEPS, row.latent_shape)[:1], model.encode_prompts(row.prompts[:1])
    )
    loss = (velocity - target).square().mean()
    loss.backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    expected = dict(pipeline.transformer.named_parameters())
    with_gradient = 0
    for name, parameter in model.denoiser.named_parameters():
        if parameter.grad is None or expected[name].grad is None:
            assert parameter.grad is expected[name].grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)
            with_gradient += 1
    assert with_gradient > 20


def test_a_row_does_not_depend_on_the_others(built: Built) -> None:
    model = built.model
    latents = keyed_normal(built.row.latent_shape, SEED, "latent", 0, [0, 1])
    sigma = torch.tensor([0.9, 0.3])
    conditioning = model.encode_prompts(built.row.prompts)
    together = model.predict_velocity(latents, sigma, conditioning)
    for index in range(2):
        one = slice(index, index + 1)
        alone = model.predict_velocity(latents[one], sigma[one], conditioning.rows(one))
        torch.testing.assert_close(alone, together[one], atol=1e-5, rtol=1e-4)


def test_waveforms_to_latents_and_back(built: Built) -> None:
    model = built.model
    samples = torch.randint(-20000, 20000, (3, model.num_channels, 800), dtype=torch.int16)
    latents = model.encode_pixels(samples)
    assert latents.shape == (3, *built.row.latent_shape)
    assert latents.dtype == torch.float32
    decoded = model.decode(latents)
    assert decoded.shape == samples.shape
    assert decoded.dtype == torch.int16
    assert torch.equal(model.decode(latents[1:2]), decoded[1:2])


def velocity_of(model: DiffusionModel, row: SoundRow, scale: float = 1.0) -> torch.Tensor:
    latents = keyed_normal(row.latent_shape, SEED, "latent", 0, [0, 1])
    return model.predict_velocity(latents, torch.tensor([0.9, 0.3]), model.encode_prompts(row.prompts), scale)


def test_adapters_train_and_diffusers_loads_them(built: Built, tmp_path: Path) -> None:
    if not built.row.takes_lora:
        with pytest.raises(ConfigError, match=r"takes no adapters: leave model.lora out"):
            built.load(lora=LoraConfig(rank=4, alpha=16))
        return
    model = built.load(lora=LoraConfig(rank=4, alpha=16))
    before = velocity_of(model, built.row)
    trained = trainable_parameters(model.denoiser)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    changed = velocity_of(model, built.row)
    assert (changed - before).abs().max() > 1e-3
    changed.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained.values())
    export_model(model, None, tmp_path / "hf_ckpt", ALONE)
    pipeline = built.pipeline()
    pipeline.load_lora_weights(tmp_path / "hf_ckpt")
    loaded = type(model)(pipeline, max_sequence_length=built.row.tokens)
    set_output(loaded, sound_size(SECONDS), "rollout")
    torch.testing.assert_close(velocity_of(loaded, built.row), changed, atol=1e-5, rtol=1e-4)


def test_the_training_shift_is_that_of_the_schedule(built: Built) -> None:
    """From the levels 1, 1 - 1/n, ... of a schedule without a shift; that of Stable Audio 3 has other levels."""
    model = built.model
    levels = model.sigmas(STEPS, built.row.latent_shape)
    assert levels.shape == (STEPS + 1,)
    assert (levels[0], levels[-1]) == (1, 0)
    if built.row.straight:
        even = torch.linspace(1, 0, STEPS + 1)
        torch.testing.assert_close(levels, model.shift * even / (1 + (model.shift - 1) * even))
        assert model.shift_at(built.row.latent_shape) == model.shift == 3.0


def test_a_dropped_prompt_is_the_unconditional_one(built: Built) -> None:
    conditioning = built.model.encode_prompts([*built.row.prompts, ""])
    dropped = conditioning.without_prompt(torch.tensor([True, False, False]))
    for name, tensor in dropped.tensors.items():
        expected = conditioning.tensors[name][-1] if name in (conditioning.negative or {}) else tensor[0]
        assert torch.equal(tensor[0], expected), name
        assert torch.equal(tensor[1], conditioning.tensors[name][1]), name


def ace_step(tmp_path: Path, tokens: int = 256, **transformer: Any) -> DiffusionModel:
    description = tiny_ace_step()
    description["transformer"] |= transformer
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(description))
    model = build_diffusion_model(ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=tokens))
    set_output(model, sound_size(SECONDS), "rollout")
    wake(model)
    return model


def test_a_turbo_model_takes_no_guidance(tmp_path: Path) -> None:
    model = ace_step(tmp_path, is_turbo=True)
    said: list[str] = []
    model.say = said.append
    row = ROWS["ace_step"]
    assert torch.equal(velocity_of(model, row, 7.0), velocity_of(model, row))
    assert velocity_of(model, row, 7.0).shape == (2, 8, 13)
    assert said == ["guidance_scale 7 is not used: the guidance of a turbo model is in its weights"]


def test_lyrics_count_towards_the_limit_and_padding_has_no_effect(tmp_path: Path) -> None:
    row = ROWS["ace_step"]
    model = ace_step(tmp_path)
    whole = model.encode_prompts(row.prompts)
    counts = whole.tensors["prompt_mask"].sum(1)
    assert len(model.pipeline.tokenizer(model.prompt_as_read(row.prompts[0]))["input_ids"]) + 1 == counts[0]
    velocity = velocity_of(model, row)
    noise = torch.randn_like(whole.tensors["prompt_embeds"]) * ~whole.tensors["prompt_mask"][..., None]
    latents = keyed_normal(row.latent_shape, SEED, "latent", 0, [0, 1])
    noisy = replace(whole, tensors={**whole.tensors, "prompt_embeds": whole.tensors["prompt_embeds"] + noise})
    assert torch.equal(model.predict_velocity(latents, torch.tensor([0.9, 0.3]), noisy), velocity)
    short = ace_step(tmp_path, int(counts[0]) - 3)
    said: list[str] = []
    short.say = said.append
    (mask, _) = short.encode_prompts(row.prompts).tensors["prompt_mask"]
    assert mask.all(), "the last two tokens of the lyrics are cut"
    assert f"reads the first {counts[0] - 3} tokens of a prompt (model.max_sequence_length)" in said[0]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((64, 64, 1), "it makes sound: set `seconds`"),
        (sound_size(999.0), "a sound of 999 s: it makes at most {longest:g} s"),
    ],
)
def test_sizes_that_it_cannot_make_are_refused(built: Built, size: tuple[int, int, int], message: str) -> None:
    message = message.replace("{longest:g}", f"{built.row.longest:g}")
    with pytest.raises(ConfigError, match=message):
        set_output(built.model, size, "rollout")


def test_a_model_of_pictures_makes_no_sound(tmp_path: Path) -> None:
    from tests.tiny_families import tiny_sd3

    (tmp_path / "sd3.yaml").write_text(yaml.safe_dump(tiny_sd3()))
    model = build_diffusion_model(ModelConfig(config_path=str(tmp_path / "sd3.yaml"), max_sequence_length=7))
    with pytest.raises(ConfigError, match=r"rollout.seconds 2: StableDiffusion3Pipeline makes no sound"):
        set_output(model, sound_size(2.0), "rollout")


def test_memory_is_predicted_without_weights(built: Built) -> None:
    from sfumato.models.estimate.frozen_passes import decoding_bytes, encoding_bytes
    from sfumato.models.estimate.meta_models import diffusion_model_on_meta

    model = diffusion_model_on_meta(ModelConfig(model_path=str(built.folder)), "no")
    size = sound_size(SECONDS)
    set_output(model, size, "rollout")
    assert decoding_bytes(model, size[:2]) > 4 * model.num_channels * model.num_samples(size[1])
    assert encoding_bytes(model, size[:2]) > 0
    shapes = model.embedding_shapes(*size[:2])
    embedded = built.model.embed_prompts([*built.row.prompts])
    assert {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()} == {
        name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in embedded.items()
    }


QUICK_RECIPE = "flow_grpo_fast"


def learn(folder: Path, recipe: str, steps: int, **train: Any) -> list[dict[str, Any]]:
    """Metrics of iterations of RL on a tiny ACE-Step with adapters, whose tones are to be loud."""
    folder.mkdir(exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text("a low tone\na high tone\n", encoding="utf-8")
    pipeline = write_tiny_pipeline(folder / "pipeline", described=tiny_ace_step(), tokens=200)
    group = {"num_prompts": 1, "n": 4, "micro_batch_size": 4}
    config = {
        "model": {"model_path": str(pipeline), "max_sequence_length": 200, "lora": {"rank": 4, "alpha": 8}},
        "data": dict.fromkeys(("train_path", "eval_path"), str(prompts)),
        "rollout": {
            **group,
            "seconds": SECONDS,
            "num_inference_steps": 6 if recipe == QUICK_RECIPE else 11,
            "guidance_scale": 2.0,
        },
        "reward": {"rewards": [{"type": "loudness"}]},
        "algorithm": {"recipe": recipe},
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": 4,
            "global_batch_size": 4,
            "max_steps": steps,
            "num_threads": 1,
            **train,
        },
        "eval": {"num_prompts": 1, "num_inference_steps": 2},
    }
    run = run_task_here(rl_task(recipe), config)
    assert (run / "hf_ckpt" / "pytorch_lora_weights.safetensors").is_file()
    return read_jsonl(run / "metrics.jsonl")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=() if recipe == QUICK_RECIPE else pytest.mark.slow)
        for recipe in (*TRAJECTORY_RECIPES, *FORWARD_RECIPES)
        if recipe not in ("ddpo", "dpok")  # of networks that predict noise
    ],
)
def test_ace_step_learns_by_rl(recipe: str, tmp_path: Path) -> None:
    if recipe == "rwr":  # it weighs by rewards themselves, and a loudness is below 0
        with pytest.raises(ConfigError, match=r"rwr .* set algorithm\.objective\.temperature"):
            learn(tmp_path, recipe, 1)
        return
    rows = learn(tmp_path, recipe, 1 if recipe == QUICK_RECIPE else 2)
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    assert all(row.get("ratio/replay_error", 0) < 1e-4 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.exact
def test_a_run_of_ace_step_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = learn(tmp_path / "whole", QUICK_RECIPE, 2)
    learn(tmp_path / "parts", QUICK_RECIPE, 1, save_steps=1)
    parts = learn(tmp_path / "parts", QUICK_RECIPE, 2, load_checkpoint_path="auto")
    for first, second in zip(whole, parts, strict=True):  # the shorter run evaluated at its end
        assert {name: second[name] for name in first} == first
