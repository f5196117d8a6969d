"""Wan's videos against diffusers' pipelines: one transformer, two, timesteps of tokens; from text and from a frame."""

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
from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.checkpoint.export import export_model
from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.data.images.prompts import Prompt
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel, set_source_images
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import sample_of
from tests import tiny_families
from tests.tiny import run_task_here, tiny_dit_config

PROMPTS = ["write AB", "write C"]
ALONE = Mesh(Layout(), torch.device("cpu"))
STEPS, FRAMES = 4, 5
KINDS = {
    "wan": (tiny_families.tiny_wan, (16, 16), 7),
    "wan_pair": (tiny_families.tiny_wan_pair, (16, 16), 7),
    "wan_small": (tiny_families.tiny_wan_small, (32, 48), 7),
    "wan_image": (tiny_families.tiny_wan_image, (16, 32), 512),
    "wan_image_pair": (tiny_families.tiny_wan_image_pair, (16, 16), 7),
    "wan_image_small": (tiny_families.tiny_wan_image_small, (32, 32), 7),
    "wan_first_last": (tiny_families.tiny_wan_first_last, (16, 32), 512),
    "wan_first_last_pair": (tiny_families.tiny_wan_image_pair, (16, 16), 7),
}


class Built:
    """A tiny model that answers to its inputs, and its folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        describe, self.size, self.tokens = KINDS[kind]
        self.folder = folder / "pipe"
        (folder / "tiny.yaml").write_text(yaml.safe_dump(describe()))
        config = ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=self.tokens)
        self.model = build_diffusion_model(config)
        self.model.frames = FRAMES
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.model.denoiser.parameters():
                if not parameter.any():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.model.save_pipeline(self.folder)
        self.images = None
        if self.model.takes_image:
            numbers = np.random.default_rng(3)
            both = (2,) if "first_last" in kind else ()
            self.images = [numbers.integers(0, 256, (*both, *self.size, 3), dtype=np.uint8) for _ in PROMPTS]
            set_source_images(self.model, 2 if both else 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.model.latent_shape(*self.size, FRAMES)

    def load(self, **config: Any) -> DiffusionModel:
        model = build_diffusion_model(
            ModelConfig(model_path=str(self.folder), max_sequence_length=self.tokens, **config)
        )
        model.frames = FRAMES
        return model

    def conditioning(self, model: DiffusionModel) -> Conditioning:
        return model.encode_prompts(PROMPTS, images=self.images)

    def velocity(self, model: DiffusionModel, sigma: tuple[float, float] = (0.95, 0.3)) -> torch.Tensor:
        latents = keyed_normal(self.shape, 7, "latent", 0, range(2))
        return model.predict_velocity(latents, torch.tensor(sigma), self.conditioning(model))

    def latents(self, scale: float) -> torch.Tensor:
        return sample_trajectories(
            self.model,
            self.conditioning(self.model),
            [0, 1],
            dynamics=EulerODE(),
            trained_steps=(),
            size=(*self.size, FRAMES),
            num_steps=STEPS,
            guidance_scale=scale,
            seed=11,
            iteration=0,
        )[0]

    def by_diffusers(self, scale: float, output_type: str, **more: Any) -> Any:
        """Videos of the pipeline that stands in the folder, by Euler steps along the grid of its scheduler."""
        pipeline = getattr(diffusers, self.model.pipeline_class).from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        sigmas, euler = self.model.sigmas(STEPS, self.shape)[:-1].tolist(), diffusers.FlowMatchEulerDiscreteScheduler()
        along = type(euler).set_timesteps
        euler.set_timesteps = lambda num_steps, device=None: along(euler, sigmas=sigmas, device=device)
        pipeline.scheduler = euler
        noise = keyed_normal(self.shape, 11, "latent", 0, [0, 1])
        results = []
        for index, prompt in enumerate(PROMPTS):
            embeds = [self.model.embed_prompts([text])["prompt_embeds"] for text in (prompt, "")]
            videos = pipeline(
                prompt_embeds=embeds[0],
                negative_prompt_embeds=embeds[1] if scale > 1 else None,
                latents=noise[index : index + 1],
                height=self.size[0],
                width=self.size[1],
                num_frames=FRAMES,
                num_inference_steps=STEPS,
                guidance_scale=scale,
                output_type=output_type,
                **({} if self.images is None else frames_of(self.images[index])),
                **more,
            ).frames
            results.append(videos)
        return torch.cat(results) if output_type == "latent" else np.concatenate(results)


def frames_of(source: np.ndarray) -> dict[str, Image.Image]:
    """The arguments of diffusers' pipeline for a first frame, or for a first and a last one."""
    names = ["image", "last_image"] if source.ndim == 4 else ["image"]
    frames = source if source.ndim == 4 else source[None]
    return {name: Image.fromarray(frame) for name, frame in zip(names, frames, strict=True)}


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built("wan_pair", tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built("wan", tmp_path_factory.mktemp("plain"))


def test_videos_equal_those_of_the_pipeline(built: Built) -> None:
    latents = built.latents(4.0)
    expected = built.by_diffusers(4.0, "latent")
    assert expected.std() > 0.1
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=1e-4)
    pixels = built.model.decode(latents)
    assert pixels.shape == (2, FRAMES, 3, *built.size)
    expected = torch.from_numpy((built.by_diffusers(4.0, "np") * 255).round()).permute(0, 1, 4, 2, 3)
    assert (pixels - expected).abs().max() <= 1


def test_a_first_frame_with_a_timestep_of_its_own_stays_as_it_was_given(tmp_path: Path) -> None:
    built = Built("wan_image_small", tmp_path)
    first_latents = built.conditioning(built.model).tensors["image_latents"]
    torch.testing.assert_close(built.latents(1.0)[:, :, :1], first_latents, atol=1e-5, rtol=1e-5)
    assert built.model.frame_rate == 24.0


def test_a_last_frame_matters_and_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    built = Built("wan_first_last", tmp_path)
    assert built.images is not None
    shapes = built.model.embedding_shapes(*built.size)
    tensors = built.conditioning(built.model).tensors
    assert {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()} == {
        name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()
    }
    before = built.velocity(built.model)
    built.images = [np.stack([first, 255 - last]) for first, last in built.images]
    assert (built.velocity(built.model) - before).abs().max() > 1e-3
    with pytest.raises(DataError, match=r"1 source images, and this WanImageToVideoPipeline takes 2"):
        built.model.encode_prompts(["a"], images=[built.images[0][0]])
    with pytest.raises(ConfigError, match=r"data\.max_source_images 1: 1 source images, .* takes 2"):
        set_source_images(built.model, 1)
    built.model.frames = 1
    built.model.forget_prompts()
    with pytest.raises(ConfigError, match="set num_frames to more than 1"):
        built.model.encode_prompts(["a"], images=built.images[:1])
    for kind in ("wan_image", "wan_image_small"):
        (tmp_path / kind).mkdir()
        with pytest.raises(ConfigError, match=r"data\.max_source_images 2: 2 source images, .* takes 1"):
            set_source_images(Built(kind, tmp_path / kind).model, 2)


def test_videos_to_latents_and_back(built: Built) -> None:
    pixels = torch.randint(0, 256, (2, 3, FRAMES, *built.size), dtype=torch.uint8)
    latents = built.model.encode_pixels(pixels)
    assert latents.shape == (2, *built.shape)
    config, vae = built.model.pipeline.vae.config, built.model.pipeline.vae
    with torch.no_grad():
        raw = vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (config.latents_mean, config.latents_std))
    torch.testing.assert_close(latents, (raw - mean) / std)
    first = built.model.encode_pixels(pixels[:, :, 0])
    torch.testing.assert_close(first, latents[:, :, :1], msg="a first frame knows nothing of later ones")
    assert built.model.decode(latents).shape == (2, FRAMES, 3, *built.size)
    assert built.model.decode(first).shape == (2, 3, *built.size)


def test_samples_are_arrays_of_frames(plain: Built) -> None:
    settings: dict[str, Any] = {"num_steps": 2, "guidance_scale": 1.0, "seed": 1, "micro_batch_size": 1}
    conditioning = plain.conditioning(plain.model)
    videos = sample_images(plain.model, conditioning, [0, 1], size=(16, 16, FRAMES), **settings)
    assert [video.shape for video in videos] == [(FRAMES, 16, 16, 3)] * 2
    assert sample_of(Prompt("red", {}, "here"), videos[0], 0, None, "", plain.model.frame_rate).frame_rate == 16.0
    images = sample_images(plain.model, conditioning, [0, 1], size=(16, 16), **settings)
    assert [image.shape for image in images] == [(16, 16, 3)] * 2
    assert sample_of(Prompt("red", {}, "here"), images[0], 0, None, "", plain.model.frame_rate).frame_rate == 0.0


@pytest.mark.parametrize("frames", [0, 2, 4, 6])
def test_frames_that_do_not_divide_are_refused(plain: Built, frames: int) -> None:
    with pytest.raises(ValueError, match=f"frames {frames} must be 1 more than a multiple of 4, such as"):
        plain.model.latent_shape(16, 16, frames)


def test_the_schedule_begins_at_one_and_is_shifted(plain: Built) -> None:
    sigmas = plain.model.sigmas(STEPS, plain.shape)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    linear = torch.linspace(1, 1e-3, STEPS + 1, dtype=torch.float64)[:-1]
    assert plain.model.shift == 3.0
    torch.testing.assert_close(sigmas[:-1], (3 * linear / (1 + 2 * linear)).float())


def test_operations_follow_the_frames(plain: Built) -> None:
    plain.model.frames = 1
    image = denoiser_flops(plain.model, 16, 16)
    plain.model.frames = FRAMES
    assert denoiser_flops(plain.model, 16, 16) > image


def test_each_row_goes_to_the_transformer_of_its_noise_level(pair: Built) -> None:
    model, both = pair.model, pair.model.denoiser
    mixed = pair.velocity(model)
    latents, tensors = keyed_normal(pair.shape, 7, "latent", 0, range(2)), pair.conditioning(model).tensors
    for index, (module, sigma) in enumerate([(both.transformer, 0.95), (both.transformer_2, 0.3)]):
        inputs = {
            "hidden_states": latents[index : index + 1],
            "encoder_hidden_states": tensors["prompt_embeds"][index : index + 1],
        }
        with torch.no_grad():
            expected = module(**inputs, timestep=torch.tensor([sigma * 1000]), return_dict=False)[0]
        torch.testing.assert_close(mixed[index : index + 1], expected, atol=1e-5, rtol=1e-4)
    calls: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name, module in both.named_children()
    ]
    for sigma in ((0.875, 0.876), (0.874, 0.1), (0.1, 0.9)):
        pair.velocity(model, sigma)
    for hook in hooks:
        hook.remove()
    assert calls == ["transformer", "transformer_2", "transformer", "transformer_2"]


def test_gradients_stay_in_the_transformer_of_the_noise_level(pair: Built) -> None:
    model = pair.load()
    pair.velocity(model, (0.5, 0.3)).square().sum().backward()
    assert all(parameter.grad is None for parameter in model.denoiser.transformer.parameters())
    assert all(parameter.grad is not None for parameter in model.denoiser.transformer_2.parameters())


def test_guidance_of_low_noise_may_differ(pair: Built) -> None:
    pair.model.guidance_scale_2 = 2.0
    latents, expected = pair.latents(5.0), pair.by_diffusers(5.0, "latent", guidance_scale_2=2.0)
    pair.model.guidance_scale_2 = None
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(latents, pair.latents(5.0), atol=1e-2)


def test_both_transformers_are_saved_under_their_names(pair: Built, tmp_path: Path) -> None:
    index = json.loads((pair.folder / "model_index.json").read_text())
    assert index["transformer"] == index["transformer_2"] == ["diffusers", "WanTransformer3DModel"]
    assert index["boundary_ratio"] == 0.875
    model = pair.load()
    with torch.no_grad():
        model.denoiser.transformer_2.proj_out.bias.add_(1.0)
    export_model(model, None, tmp_path / "out", ALONE)
    pipeline = diffusers.WanPipeline.from_pretrained(tmp_path / "out")
    for name, module in model.denoiser.named_children():
        for key, tensor in getattr(pipeline, name).state_dict().items():
            assert torch.equal(tensor, module.state_dict()[key]), (name, key)


def test_trained_weights_of_both_are_float32(pair: Built) -> None:
    model = pair.load(dtype="bf16")
    assert {parameter.dtype for parameter in model.denoiser.parameters()} == {torch.float32}
    assert model.pipeline.text_encoder.dtype == torch.bfloat16


def test_adapters_of_both_train_switch_off_and_merge(pair: Built, tmp_path: Path) -> None:
    model = pair.load(lora=LoraConfig(rank=4, alpha=16))
    base = pair.velocity(model)
    trained = trainable_parameters(model.denoiser)
    assert {name.partition(".")[0] for name in trained} == {"transformer", "transformer_2"}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    changed = pair.velocity(model)
    assert ((changed - base).abs().amax(dim=(1, 2, 3, 4)) > 1e-3).all(), "both transformers have adapters"
    with Policies(model, {"reference": FROZEN}).active("reference") as reference:
        assert torch.equal(pair.velocity(reference), base)
    export_model(model, None, tmp_path / "out", ALONE, merge=True)
    pipeline = diffusers.WanPipeline.from_pretrained(tmp_path / "out")
    merged = type(model)(pipeline, max_sequence_length=pair.tokens)
    torch.testing.assert_close(pair.velocity(merged), changed, atol=1e-4, rtol=1e-4)


def test_the_task_trains_both_on_images(pair: Built, tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, flow={"timestep_sampling": "uniform"})
    config["model"] = {"model_path": str(pair.folder), "max_sequence_length": pair.tokens}
    folder = run_task_here("train_dit", config)
    pipeline = diffusers.WanPipeline.from_pretrained(folder / "hf_ckpt")
    for name, module in pair.model.denoiser.named_children():
        changed = [
            not torch.equal(a, b)
            for a, b in zip(module.parameters(), getattr(pipeline, name).parameters(), strict=True)
        ]
        assert all(changed), name


def test_what_two_transformers_cannot_do_is_refused(pair: Built, tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="enable_forward_prefetch"):
        pair.load().parallelize(ALONE, config.model_copy(update={"enable_forward_prefetch": True}))
    with pytest.raises(ConfigError, match="fsdp1 loses gradients"):
        pair.load().parallelize(ALONE, config.model_copy(update={"data_parallel_mode": "fsdp1"}))
    with pytest.raises(ConfigError, match=r"lora\.dropout"):
        pair.load(lora=LoraConfig(rank=2, dropout=0.1)).parallelize(ALONE, config)
    description = tiny_families.tiny_wan_pair()
    del description["boundary_ratio"]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(description))
    with pytest.raises(ConfigError, match="transformer_2 needs transformer and boundary_ratio"):
        build_diffusion_model(ModelConfig(config_path=str(tmp_path / "tiny.yaml")))


def test_schedulers_that_are_no_flow_are_refused(tmp_path: Path) -> None:
    description = {**tiny_families.tiny_wan(), "scheduler": {"use_flow_sigmas": False}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(description))
    with pytest.raises(ConfigError, match="needs use_flow_sigmas"):
        build_diffusion_model(ModelConfig(config_path=str(tmp_path / "tiny.yaml")))


def test_a_first_frame_asks_for_its_settings(tmp_path: Path) -> None:
    model = Built("wan_image", tmp_path).model
    image = np.zeros((16, 16, 3), np.uint8)
    conditioning = model.encode_prompts(["a"], images=[image])
    other = torch.zeros(1, *model.latent_shape(16, 16, 9))
    with pytest.raises(ValueError, match=r"embedded for \(2, 4, 4\): set model\.frames"):
        model.predict_velocity(other, torch.tensor([0.5]), conditioning)
    model.max_sequence_length = 7
    model.forget_prompts()
    with pytest.raises(ConfigError, match=r"max_sequence_length 7.*set it to 512"):
        model.encode_prompts(["a"], images=[image])
    small = Built("wan_image_small", tmp_path).model
    mesh = Mesh(replace(Layout(), ulysses=2), torch.device("cpu"))
    with pytest.raises(ConfigError, match="expand_timesteps"):
        small.parallelize(mesh, TrainConfig(output_dir=str(tmp_path)))
