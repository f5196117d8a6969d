"""What every diffusion model family must do, against diffusers' own pipeline. A new family is one row of ``ROWS``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.checkpoint.export import export_model
from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel, set_output, set_source_images
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.memory_plan import plan_memory
from sfumato.models.estimate.meta_models import diffusion_model_on_meta, plan_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import find_blocks, find_modules
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.tensor import match_plan
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from tests.family_rows import ROWS, SEED, STEPS, Row, copied, wake

PROMPTS = ['write "AB" in red', 'write "C"']
ALONE = Mesh(Layout(), torch.device("cpu"))


@dataclass
class Built:
    """A tiny model of a row, with the folder that it was saved to."""

    row: Row
    model: DiffusionModel
    folder: Path
    images: list[np.ndarray] | None = field(default=None)

    def load(self, **config: Any) -> DiffusionModel:
        precision = config.pop("mixed_precision", "no")
        settings = {"max_sequence_length": self.row.tokens, "from_images": self.row.from_images, **config}
        model = build_diffusion_model(ModelConfig(model_path=str(self.folder), **settings), mixed_precision=precision)
        set_source_images(model, self.row.sources)
        set_output(model, self.row.sample_size, "rollout")  # as every task does
        return model

    def pipeline(self) -> Any:
        pipeline = getattr(diffusers, self.model.pipeline_class).from_pretrained(self.folder)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def conditioning(self, model: DiffusionModel, rows: slice = slice(None)) -> Conditioning:
        return model.encode_prompts(PROMPTS[rows], images=None if self.images is None else self.images[rows])

    def velocity(self, model: DiffusionModel, scale: float = 1.0, rows: slice = slice(None)) -> torch.Tensor:
        latents = keyed_normal(model.latent_shape(*self.row.sample_size), SEED, "latent", 0, range(len(PROMPTS)))
        sigma = torch.tensor([0.9, 0.3])
        return model.predict_velocity(latents[rows], sigma[rows], self.conditioning(model, rows), scale)

    def by_sfumato(self, model: DiffusionModel, scale: float) -> tuple[np.ndarray, torch.Tensor]:
        """Images [B, H, W, 3], and the latents that they were decoded from."""
        conditioning, ids = self.conditioning(model), list(range(len(PROMPTS)))
        common = {"size": self.row.sample_size, "num_steps": STEPS, "guidance_scale": scale, "seed": SEED}
        images = sample_images(model, conditioning, ids, micro_batch_size=8, **common)
        latents, _ = sample_trajectories(
            model, conditioning, ids, dynamics=EulerODE(), trained_steps=(), iteration=0, **common
        )
        return np.stack([getattr(image, "frames", image) for image in images]), latents

    def by_diffusers(self, pipeline: Any, scale: float, together: bool) -> tuple[np.ndarray, torch.Tensor]:
        """The same of diffusers' own sampling loop."""
        start = keyed_normal(self.row.latent_shape, SEED, "latent", 0, range(len(PROMPTS)))
        images = None if self.images is None else [as_pictures(image) for image in self.images]
        parts = [slice(None)] if together else [slice(index, index + 1) for index in range(len(PROMPTS))]
        results, latents = [], []
        for part in parts:
            results.append(
                self.row.call(self.row, pipeline, PROMPTS[part], start[part], scale, images and images[part])
            )
            last = pipeline.last_latents
            latents.append(self.row.unpack(last, *self.row.latent_shape[-2:]) if last.ndim == 3 else last)
        return (np.concatenate(results) * 255).round().astype(np.uint8), torch.cat(latents)


def as_pictures(source: np.ndarray) -> Image.Image | list[Image.Image]:
    return Image.fromarray(source) if source.ndim == 3 else [Image.fromarray(frame) for frame in source]


@pytest.fixture(scope="module", params=ROWS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    row = ROWS[request.param]
    if row.needs:
        pytest.importorskip(row.needs)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
    config = ModelConfig(
        config_path=str(folder / "tiny.yaml"), max_sequence_length=row.tokens, from_images=row.from_images
    )
    model = build_diffusion_model(config)
    set_source_images(model, row.sources)
    wake(model)
    set_output(model, row.sample_size, "rollout")
    model.save_pipeline(folder / "pipe")
    images = None
    if model.takes_image:
        generator = np.random.default_rng(3)
        several = (row.sources,) if row.sources > 1 else ()
        images = [generator.integers(0, 256, (*several, *row.size, 3), dtype=np.uint8) for _ in PROMPTS]
    return Built(row, model, folder / "pipe", images)


def assert_same_images(first: np.ndarray, second: np.ndarray) -> None:
    assert first.shape == second.shape
    assert first.std() > 1, "an empty image proves nothing"
    assert np.abs(first.astype(int) - second.astype(int)).max() <= 1


def assert_close(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, atol=5e-5, rtol=1e-4)


def test_images_equal_those_of_the_diffusers_pipeline(built: Built) -> None:
    pipeline = built.pipeline()
    actual = []
    for scale in built.row.scales:
        images, latents = built.by_sfumato(built.model, scale)
        together = built.row.batched and scale == built.row.scales[-1]
        expected = built.by_diffusers(pipeline, scale, together)
        assert_same_images(images, expected[0])
        torch.testing.assert_close(latents, expected[1], atol=1e-4, rtol=1e-4)
        actual.append(latents)
    assert (actual[0] - actual[-1]).abs().max() > 2e-3, "guidance must matter"


PREDICTS_OTHERWISE = (
    *("z_image", "stable_diffusion", "stable_diffusion_2", "stable_diffusion_xl"),
    *("ltx2_image", "kandinsky5_video_image"),
)
"""Families whose networks return lists, predictions that other tests compare with DDIM, or no velocity of what is given
(``test_first_frames.py``)."""


def test_a_loss_and_its_gradients_are_those_of_the_plain_loop(built: Built) -> None:
    """The network is called with what diffusers' own pipeline gave it in its first step, and once by sfumato."""
    row, pipeline = built.row, built.pipeline()
    if any(row is ROWS[name] for name in PREDICTS_OTHERWISE) or getattr(pipeline, "transformer_2", None) is not None:
        pytest.skip("the velocity is not what the network returns, or there are two networks")
    calls: list[Any] = []

    def stop_at_first_step(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, copied(kwargs)))
        raise InterruptedError

    hook = pipeline.transformer.register_forward_pre_hook(stop_at_first_step, with_kwargs=True)
    with pytest.raises(InterruptedError):
        built.by_diffusers(pipeline, 1.0, together=False)
    hook.remove()
    args, kwargs = calls[0]
    target = keyed_normal(row.latent_shape, SEED, "target", 0, [0])
    pipeline.transformer.requires_grad_(True).train()
    outputs = pipeline.transformer(*args, **{**kwargs, "return_dict": False})
    output = torch.cat(outputs, dim=1) if isinstance(outputs, tuple) else outputs  # parts: of video and sound
    plain = (row.velocity(output, row.latent_shape) - target).square().mean()
    plain.backward()
    model = built.load()
    latents = keyed_normal(row.latent_shape, SEED, "latent", 0, [0])
    velocity = model.predict_velocity(
        latents, model.sigmas(STEPS, row.latent_shape)[:1], built.conditioning(model, slice(0, 1))
    )
    loss = (velocity - target).square().mean()
    loss.backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    expected = dict(pipeline.transformer.named_parameters())
    for name, parameter in model.denoiser.named_parameters():
        if parameter.grad is None or expected[name].grad is None:
            assert parameter.grad is expected[name].grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)


def test_pixels_to_latents_and_back_as_the_pipeline_does(built: Built) -> None:
    model, (height, width, frames) = built.model, built.row.sample_size
    assert model.latent_shape(height, width, frames) == built.row.latent_shape
    several = (frames,) if frames > 1 else ()
    pixels = torch.randint(0, 256, (2, 3, *several, height, width), dtype=torch.uint8)
    latents = model.encode_pixels(pixels)
    assert latents.shape == (2, *built.row.latent_shape)
    assert latents.dtype == torch.float32
    decoded = model.decode(latents)
    assert decoded.shape == (pixels.transpose(1, 2) if frames > 1 else pixels).shape
    assert decoded.dtype == torch.uint8
    side = model.probe_size
    assert model.encode_pixels(pixels[:1, ..., :side, :side]).shape[1:] == model.latent_shape(side, side, frames)


def test_a_picture_does_not_depend_on_its_batch(built: Built) -> None:
    """What the decoder gives before pixels are rounded has the same bits alone, and anywhere among others."""
    generator, decoded = torch.Generator().manual_seed(4), []
    latents = torch.randn(9, *built.row.latent_shape, generator=generator)
    hook = built.model.pipeline.vae.decoder.register_forward_hook(
        lambda _, args, output: decoded.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        pixels, outputs = built.model.decode(latents), list(decoded)
        decoded.clear()
        built.model.decode(latents[:1])
        calls = len(decoded)  # of the decoder for what is decoded at a time: several for a video
        together = built.model.decoded_at_a_time(latents)
        for rows in ([0], [4, 0], [0, 8, 7, 6, 5, 4, 3]):
            decoded.clear()
            assert torch.equal(built.model.decode(latents[rows]), pixels[rows])
            chunk, place = divmod(rows.index(0), together)
            for ours, wanted in zip(decoded[chunk * calls : (chunk + 1) * calls], outputs, strict=False):
                assert torch.equal(ours[place], wanted[0]), rows
    finally:
        hook.remove()


def test_a_saved_pipeline_loads_again_with_the_same_velocity(built: Built) -> None:
    loaded = built.load()
    assert list(loaded.components) == list(built.model.components)
    assert torch.equal(built.velocity(loaded, 2.0), built.velocity(built.model, 2.0))


def test_text_encoders_of_a_saved_pipeline_have_the_names_that_transformers_4_reads(built: Built) -> None:
    for part in built.folder.iterdir():
        if (part / "config.json").is_file():
            config = json.loads((part / "config.json").read_text())
            for settings in (config, config.get("text_config", {})):
                rope = settings.get("rope_parameters") or {}
                assert settings.get("rope_theta") == rope.get("rope_theta", settings.get("rope_theta"))
        if (part / "tokenizer_config.json").is_file():
            config = json.loads((part / "tokenizer_config.json").read_text())
            assert config["tokenizer_class"] != "TokenizersBackend"


def test_adapters_train_and_diffusers_loads_them(built: Built, tmp_path: Path) -> None:
    model = built.load(lora=LoraConfig(rank=4, alpha=16))
    base = built.velocity(model)
    trained = trainable_parameters(model.denoiser)
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    changed = built.velocity(model)
    assert (changed - base).abs().max() > 1e-3
    changed.square().sum().backward()
    assert silent(model, built.row) == []

    export_model(model, None, tmp_path / "hf_ckpt", ALONE)
    pipeline = built.pipeline()
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(tmp_path / "hf_ckpt")
    else:
        pipeline.transformer.load_lora_adapter(tmp_path / "hf_ckpt", weight_name="pytorch_lora_weights.safetensors")
    if (tmp_path / "hf_ckpt" / "transformer_2").is_dir():
        pipeline.load_lora_weights(tmp_path / "hf_ckpt" / "transformer_2", load_into_transformer_2=True)
    assert_close(built.velocity(type(model)(pipeline, max_sequence_length=built.row.tokens)), changed)


def test_unknown_keys_of_a_description_are_named(built: Built) -> None:
    family, description = type(built.model), built.row.describe()
    with pytest.raises(ValueError, match="schedular: unknown key"):
        family.build({**description, "schedular": {}}, 0)
    for section, values in description.items():
        if isinstance(values, dict):
            with pytest.raises(ValueError, match=rf"{section}\.wrong_key: unknown key"):
                family.build({**description, section: {**values, "wrong_key": 1}}, 0)


def silent(model: DiffusionModel, row: Row) -> list[str]:
    """Trainable parameters without gradient."""
    names = [
        name
        for name, parameter in trainable_parameters(model.denoiser).items()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    ]
    return [name for name in names if not re.search(row.never_used, name)]


def test_gradients_reach_every_parameter(built: Built) -> None:
    model = built.load()
    for scale in built.row.scales:
        built.velocity(model, scale).square().sum().backward()
        assert silent(model, built.row) == []


def test_a_row_does_not_depend_on_the_others(built: Built) -> None:
    for scale in built.row.scales:
        together = built.velocity(built.model, scale)
        for index in range(len(PROMPTS)):
            assert_close(built.velocity(built.model, scale, slice(index, index + 1)), together[index : index + 1])


def test_a_conditioning_follows_its_rows(built: Built) -> None:
    model, scale = built.model, built.row.scales[-1]
    latents = keyed_normal(built.row.latent_shape, SEED, "latent", 0, range(len(PROMPTS)))
    sigma, conditioning, velocity = torch.tensor([0.9, 0.3]), built.conditioning(model), built.velocity(model, scale)
    swapped = Conditioning.cat([conditioning.rows([1]), conditioning.rows(slice(0, 1))])
    assert_close(model.predict_velocity(latents.flip(0), sigma.flip(0), swapped, scale), velocity.flip(0))
    latents, sigma = (tensor.repeat_interleave(2, dim=0) for tensor in (latents, sigma))
    doubled = model.predict_velocity(latents, sigma, conditioning.repeat_interleave(2), scale)
    assert_close(doubled, velocity.repeat_interleave(2, dim=0))


def test_a_conditioning_without_the_empty_prompt_follows_its_rows(built: Built) -> None:
    alone = built.model.encode_prompts(PROMPTS, with_negative=False, images=built.images)
    swapped = Conditioning.cat([alone.rows([1]), alone.rows(slice(0, 1))]).repeat_interleave(2)
    assert swapped.negative is None
    for name, tensor in built.conditioning(built.model).tensors.items():
        assert torch.equal(swapped.tensors[name], tensor[[1, 1, 0, 0]]), name


def test_a_dropped_prompt_is_the_empty_one(built: Built) -> None:
    empty = built.model.encode_prompts([""] * len(PROMPTS), images=built.images)
    dropped = built.conditioning(built.model).without_prompt(torch.tensor([True, False]))
    for name, tensor in dropped.tensors.items():
        assert torch.equal(tensor[0], empty.tensors[name][0]), name
        assert torch.equal(tensor[1], built.conditioning(built.model).tensors[name][1]), name


def test_an_embedding_does_not_depend_on_its_batch(built: Built) -> None:
    built.model.forget_prompts()
    together = built.conditioning(built.model)
    for index in range(len(PROMPTS)):
        built.model.forget_prompts()
        alone = built.conditioning(built.model, slice(index, index + 1))
        for name, tensor in alone.tensors.items():
            assert torch.equal(tensor[0], together.tensors[name][index]), name


def test_low_precision_is_close_and_gives_float32(built: Built) -> None:
    exact, rounded = built.velocity(built.model), built.velocity(built.load(mixed_precision="bf16"))
    assert exact.dtype == rounded.dtype == torch.float32
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max() + 0.05


def test_adapters_over_frozen_weights_in_low_precision(built: Built) -> None:
    model = built.load(dtype="bf16", lora=LoraConfig(rank=2))
    velocity, exact = built.velocity(model), built.velocity(built.model)
    assert velocity.dtype == torch.float32
    assert 0 < (velocity - exact).abs().max() < 0.1 * exact.abs().max() + 0.05
    velocity.square().sum().backward()
    trained = trainable_parameters(model.denoiser)
    assert all(value.dtype == torch.float32 for value in trained.values())
    assert sum(float(value.grad.abs().sum()) for value in trained.values() if value.grad is not None) > 0


def test_weights_are_read_where_they_are_needed(built: Built) -> None:
    config = ModelConfig(
        model_path=str(built.folder), max_sequence_length=built.row.tokens, from_images=built.row.from_images
    )
    model = build_diffusion_model(config, init_device="meta")
    assert all(parameter.is_meta for parameter in model.denoiser.parameters())
    model.parallelize(ALONE, TrainConfig(output_dir=str(built.folder)))
    assert torch.equal(built.velocity(model), built.velocity(built.model))


def test_sizes_that_do_not_divide_are_refused(built: Built) -> None:
    height, width = built.row.size
    with pytest.raises(ValueError, match=f"multiples of {built.row.unit} pixels"):
        built.model.latent_shape(height + built.row.unit // 2, width)
    path = built.folder.parent / "wrong.yaml"
    path.write_text(yaml.safe_dump({**built.row.describe(), "nothing": 1}))
    with pytest.raises(ConfigError, match=r"cannot build .*nothing: unknown key"):
        build_diffusion_model(ModelConfig(config_path=str(path)))


def test_sizes_beyond_the_positions_are_refused(built: Built) -> None:
    model, unit = built.model, built.row.unit

    def velocity(shape: tuple[int, ...]) -> torch.Tensor:
        return model.predict_velocity(torch.zeros(1, *shape), torch.tensor([0.5]), conditioning, 1.0)

    if model.takes_image:
        pytest.skip("the same family is tried without images, which would have to be embedded for every size")
    conditioning = model.encode_prompts(PROMPTS[:1])
    with torch.no_grad():
        try:
            shape = model.latent_shape(unit, 300 * unit)
        except ValueError as error:
            longest = int(re.search(r"may be (\d+) pixels at most: it has no more positions", str(error)).group(1))
            *rest, width = model.latent_shape(unit, longest)
            velocity((*rest, width))
            with pytest.raises((ValueError, RuntimeError, IndexError)):  # what diffusers says
                velocity((*rest, width + width * unit // longest))
        else:
            velocity(shape)


def test_images_are_asked_for_where_they_are_needed(built: Built) -> None:
    least = built.model.least_source_images
    image = np.zeros((*([least] if least > 1 else []), *built.row.size, 3), np.uint8)
    if not built.model.takes_image:
        with pytest.raises(DataError, match="takes no images"):
            built.model.encode_prompts(PROMPTS, images=[image] * len(PROMPTS))
        return
    with pytest.raises(DataError, match="needs an image with every prompt"):
        built.model.encode_prompts(PROMPTS)
    with pytest.raises(DataError, match="2 prompts with 1 images"):
        built.model.encode_prompts(PROMPTS, images=[image])
    with pytest.raises(DataError, match="of one size"):
        built.model.encode_prompts(PROMPTS, images=[image, image[..., :-1, :, :]])
    one_more = np.zeros((least + 1, *built.row.size, 3), np.uint8)
    takes_more = built.model.most_source_images > least
    with pytest.raises(
        DataError, match="of one size and number" if takes_more else f"{least + 1} source images, and .* takes"
    ):
        built.model.encode_prompts(PROMPTS, images=[image, one_more])
    with pytest.raises(ValueError, match="multiples of"):
        built.model.encode_prompts(PROMPTS[:1], images=[image[..., :-1, :, :]])
    assert built.images is not None
    swapped = built.model.encode_prompts(PROMPTS, images=built.images[::-1])
    latents, sigma = torch.zeros(2, *built.row.latent_shape), torch.tensor([0.9, 0.3])
    mine = built.model.predict_velocity(latents, sigma, built.conditioning(built.model))
    assert not torch.allclose(built.model.predict_velocity(latents, sigma, swapped), mine), "the image must matter"


def test_the_parallel_plan_fits_the_denoiser(built: Built) -> None:
    denoiser, plan = built.model.denoiser, built.model.parallel_plan
    assert find_blocks(denoiser, plan)
    for part in [denoiser.get_submodule(name) for name in plan.parts] or [denoiser]:
        match_plan(part, plan.tensor)
        for pattern in (*plan.sequence, *plan.replicated_context):
            assert find_modules(part, pattern), pattern


def test_memory_is_predicted_without_weights(built: Built, tmp_path: Path) -> None:
    row, train = built.row, TrainConfig(output_dir=str(tmp_path), micro_batch_size=2)
    config = ModelConfig(model_path=str(built.folder), max_sequence_length=row.tokens, from_images=row.from_images)
    model = diffusion_model_on_meta(config, "no")
    set_source_images(model, row.sources)
    model.frames = row.frames
    real = built.conditioning(built.model, slice(0, 1)).tensors
    results = {name: (tuple(shape), dtype) for name, (shape, dtype) in model.embedding_shapes(*row.size).items()}
    assert results == {name: (tuple(value.shape[1:]), value.dtype) for name, value in real.items()}
    (memory,) = plan_memory(plan_diffusion_model(model, Layout(), 2, row.size), train, 1)
    denoiser = built.model.denoiser
    assert memory.parts["weights"] == sum(
        parameter.nbytes for parameter in (*denoiser.parameters(), *denoiser.buffers())
    )
    assert memory.parts["activations of blocks"] > 0


def test_operations_are_counted(built: Built) -> None:
    height, width = built.row.size
    single = denoiser_flops(built.model, height, width)
    assert denoiser_flops(built.model, 4 * height, width).training > single.training > single.forward > 0


def test_a_schedule_may_have_one_step(built: Built) -> None:
    start, end = built.model.sigmas(1, built.row.latent_shape).tolist()
    assert 0 < start <= 1 and end == 0


def test_the_training_shift_is_that_of_the_schedule(built: Built) -> None:
    model, settings = built.model, built.model.pipeline.scheduler.config
    if not built.row.straight or not hasattr(settings, "shift") or settings.get("shift_terminal"):
        pytest.skip("the schedule is not a shifted straight line")
    linear = torch.linspace(1, 0, built.row.shift_steps + 1)
    shift = model.shift_at(built.row.latent_shape)
    assert_close(
        model.sigmas(built.row.shift_steps, built.row.latent_shape), shift * linear / (1 + (shift - 1) * linear)
    )
