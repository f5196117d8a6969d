"""Families that make sound, against diffusers' own pipelines with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.sections import LoraConfig, ModelConfig, sound_size
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel, set_output
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.tracking.waveforms import FULL_SCALE, Waveform
from tests.family_rows import wake
from tests.sound_rows import PROMPTS, ROWS, SECONDS, SEED, STEPS, SoundRow


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
    pipeline = built.pipeline()
    ids = list(range(len(PROMPTS)))
    start = keyed_normal(built.row.latent_shape, SEED, "latent", 0, ids)
    drawn = []
    for scale in built.row.scales:
        common: dict[str, Any] = {
            "size": sound_size(SECONDS),
            "num_steps": STEPS,
            "guidance_scale": scale,
            "seed": SEED,
        }
        conditioning = built.model.encode_prompts(PROMPTS)
        latents, _ = sample_trajectories(
            built.model, conditioning, ids, dynamics=EulerODE(), trained_steps=(), iteration=0, **common
        )
        sounds = sample_images(built.model, conditioning, ids, micro_batch_size=8, **common)
        for index, prompt in enumerate(PROMPTS):
            one = slice(index, index + 1)
            expected = built.row.call(pipeline, [prompt], start[one], scale, "latent")
            torch.testing.assert_close(latents[one], expected, atol=1e-4, rtol=1e-4)
            waveform = built.row.call(pipeline, [prompt], start[one], scale, "np")[0]
            assert isinstance(sounds[index], Waveform)
            samples = sounds[index].samples
            assert samples.shape == waveform.shape == (2, int(SECONDS * 8000))
            assert samples.std() > 100, "silence proves nothing"
            assert np.abs(samples - waveform * FULL_SCALE).max() <= 4
        drawn.append(latents)
    assert len(drawn) == 1 or (drawn[0] - drawn[-1]).abs().max() > 2e-3, "guidance must matter"


def test_a_loss_and_its_gradients_are_those_of_the_plain_loop(built: Built) -> None:
    """The network is called with what diffusers' own pipeline gave it in its first step, and once by sfumato."""
    row = built.row
    pipeline = built.pipeline()
    start = keyed_normal(row.latent_shape, SEED, "latent", 0, [0])
    calls: list[Any] = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    row.call(pipeline, PROMPTS[:1], start, 1.0, "latent")
    hook.remove()
    args, kwargs = calls[0]
    target = keyed_normal(row.latent_shape, SEED, "target", 0, [0])
    pipeline.transformer.requires_grad_(True)
    output = pipeline.transformer(*args, **kwargs)[0]
    plain = ((output if output.shape == target.shape else output.mT) - target).square().mean()
    plain.backward()
    model = built.load()
    velocity = model.predict_velocity(
        start, model.sigmas(STEPS, row.latent_shape)[:1], model.encode_prompts(PROMPTS[:1])
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
    conditioning = model.encode_prompts(PROMPTS)
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


def test_adapters_train_and_diffusers_loads_them(built: Built, tmp_path: Path) -> None:
    if not built.row.takes_lora:
        with pytest.raises(ConfigError, match=r"takes no adapters: leave model.lora out"):
            built.load(lora=LoraConfig(rank=4, alpha=16))
        return
    raise NotImplementedError


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((64, 64, 1), "it makes sound: set `seconds`"),
        (sound_size(99.0), "a sound of 99 s: it makes at most 4 s"),
    ],
)
def test_sizes_that_it_cannot_make_are_refused(built: Built, size: tuple[int, int, int], message: str) -> None:
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
    embedded = built.model.embed_prompts(PROMPTS)
    assert {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()} == {
        name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in embedded.items()
    }
