"""The gradient of a reward through autoencoder and denoising steps, and the task that follows it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.noise import keyed_normal, keyed_uniform
from sfumato.algorithms.reward_gradients import (
    DirectAlign,
    LastSteps,
    PredictedImage,
    RandomLastSteps,
    recover_sample,
    reward_loss,
)
from sfumato.algorithms.solvers import DPMSolver2, Euler
from sfumato.config.direct_rl import DirectRLConfig
from sfumato.config.load import load_config, merge
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel, set_output
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.differentiable import DifferentiableReward, score_differentiably
from sfumato.rewards.pixels import Brightness, Colour, Sharpness, Symmetry
from sfumato.rollout.diffusion.differentiable import draw_differentiably, sample_differentiably
from sfumato.tracking.json_lines import read_jsonl
from tests.family_rows import ROWS
from tests.tiny import run_task_here, tiny_rl_config, weights_in, write_tiny_pipeline

ALONE = Mesh(Layout(), torch.device("cpu"))
PROMPTS = ['write "AB"', 'write "CD"']
IDS = [3, 5]
NUM_STEPS = 4


def direct_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/rl_diffusion_direct.py`` run of 6 iterations of 4 samples; in ``tmp_path/run``."""
    config = tiny_rl_config(tmp_path)
    del config["algorithm"]
    del config["train"]["global_batch_size"]
    config["rollout"] |= {"n": 1, "num_inference_steps": NUM_STEPS}
    config["train"]["micro_batch_size"] = 2
    return merge(config, {"algorithm": {"recipe": "draft"}, **overrides})


def policies_in(folder: Path, lora: bool = False, reference: bool = False, **train: Any) -> Policies[DiffusionModel]:
    adapters = LoraConfig.model_validate({"rank": 4, "alpha": 8}) if lora else None
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7, lora=adapters))
    model.denoiser.eval()
    config = load_config(DirectRLConfig, overrides=direct_config(folder.parent, train=train))
    policies = Policies(model, config.algorithm.other_policies if not reference else {"reference": FROZEN})
    policies.parallelize(ALONE, config.train)
    return policies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("direct") / "pipeline")


def sample(policies: Policies[DiffusionModel], steps: range, scale: float = 1.0, **settings: Any) -> Any:
    conditioning = policies.model.encode_prompts(PROMPTS)
    chosen: dict[str, Any] = {"solver": Euler(), "compares": False, "num_steps": NUM_STEPS, "size": (16, 16, 1)}
    chosen |= {"seed": 7, "iteration": 2, "guidance_scale": scale, **settings}
    return sample_differentiably(policies, conditioning, IDS, steps=steps, **chosen)


def weighted(pixels: torch.Tensor) -> torch.Tensor:
    """A reward ``[B]`` with another gradient at each pixel."""
    weights = torch.linspace(-1, 1, pixels[0].numel(), dtype=pixels.dtype).view(pixels[0].shape)
    return (pixels.square() * weights).flatten(1).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class Light(DifferentiableReward):
    """Mean of the pixels, of which a prompt that begins with ``dark`` wants half as little, weighted by place."""

    type: ClassVar[str] = "light"
    modality: ClassVar[str] = "image"

    @property
    def reads_prompt(self) -> bool:
        return True

    def score(self, samples: list[Sample]) -> list[float]:
        pixels = np.stack([sample.pixels for sample in samples]).astype(np.float32).transpose(0, 3, 1, 2) / 255
        return self.score_pixels(torch.from_numpy(pixels), [sample.prompt for sample in samples]).tolist()

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        signs = torch.tensor([-0.5 if prompt.startswith("dark") else 1.0 for prompt in prompts], dtype=pixels.dtype)
        weights = torch.linspace(0.5, 1.5, pixels.shape[-1], dtype=pixels.dtype)
        return signs * (pixels * weights).flatten(1).mean(dim=1)


SRPO = {"recipe": "srpo", "control_words": ["light", "dark"], "reward_limit": 5.0}
LIGHT = {"rewards": [{"type": "tests.unit.test_reward_gradients:Light"}]}


def gradients_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def plain_reward(
    pipeline: Any,
    embeddings: dict[str, torch.Tensor],
    negative: dict[str, torch.Tensor] | None,
    steps: range,
    scale: float,
    sigmas: list[float],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Reward ``[B]`` as a loop around diffusers' own modules computes it, in any dtype."""
    x = keyed_normal((4, 8, 8), 7, "latent", 2, IDS, torch.device("cpu")).to(dtype)
    for index in range(steps.stop):
        if index == steps.start:
            x = x.detach()

        def predict(inputs: dict[str, torch.Tensor], x: torch.Tensor = x, index: int = index) -> torch.Tensor:
            return pipeline.transformer(
                hidden_states=x,
                timestep=torch.full((len(x),), sigmas[index] * 1000, dtype=dtype),
                encoder_hidden_states=inputs["prompt_embeds"].to(dtype),
                pooled_projections=inputs["pooled"].to(dtype),
                return_dict=False,
            )[0]

        v = predict(embeddings)
        if negative is not None:
            unconditional = predict(negative)
            v = unconditional + scale * (v - unconditional)
        sigma_next = 0.0 if index + 1 == steps.stop else sigmas[index + 1]
        x = x + v * (sigma_next - sigmas[index])
    vae = pipeline.vae
    decoded = vae.decode(x / vae.config.scaling_factor + (vae.config.shift_factor or 0.0), return_dict=False)[0]
    return weighted((decoded / 2 + 0.5).clamp(0, 1))


def plain_inputs(model: DiffusionModel, guided: bool) -> tuple[Any, Any, list[float]]:
    conditioning = model.encode_prompts(PROMPTS)
    negative = None
    if guided:
        assert conditioning.negative is not None
        negative = {name: value.expand(2, *value.shape[1:]) for name, value in conditioning.negative.items()}
    return conditioning.tensors, negative, model.sigmas(NUM_STEPS, (4, 8, 8)).tolist()


@pytest.mark.parametrize(
    ("steps", "scale"), [(range(0, 4), 1.0), (range(2, 4), 3.0), (range(3, 4), 1.0), (range(1, 2), 1.0)]
)
def test_loss_and_gradients_are_those_of_an_unrolled_plain_loop(folder: Path, steps: range, scale: float) -> None:
    policies = policies_in(folder)
    model = policies.model
    reward = weighted(model.decode_differentiably(sample(policies, steps, scale).latents))
    reward.sum().backward()
    gradients = gradients_of(model.denoiser)

    plain = copy.copy(model.pipeline)
    plain.transformer = copy.deepcopy(model.denoiser)
    plain.transformer.zero_grad()
    expected_reward = plain_reward(
        plain, *plain_inputs(model, scale != 1.0)[:2], steps, scale, plain_inputs(model, False)[2], torch.float32
    )
    expected_reward.sum().backward()
    expected = gradients_of(plain.transformer)
    assert gradients.keys() == expected.keys() and len(gradients) > 20
    torch.testing.assert_close(reward, expected_reward, rtol=1e-5, atol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)


def test_direct_align_is_the_published_loop(folder: Path, tmp_path: Path) -> None:
    """SRPO on two samples: each noised by its own noise, moved by one step down and one up, recovered, scored."""
    steps = {"num_levels": 2, "sigmas": [0.5, 0.9], "denoise_gain": [0.1, 0.3], "inversion_gain": [0.4, 0.2]}
    settings = {"algorithm": {**SRPO, "steps": steps, "kl_coef": 0.5}, "reward": LIGHT, "train": {"seed": 7}}
    config = load_config(DirectRLConfig, overrides=direct_config(tmp_path, **settings))
    policies = policies_in(folder, reference=True)
    with torch.no_grad():
        for parameter in policies.model.denoiser.parameters():
            parameter.mul_(1.02)  # away from the reference
    model = policies.model
    conditioning = model.encode_prompts(PROMPTS)
    losses = []
    for samples in draw_differentiably(policies, conditioning, IDS, config, 2):
        pixels = model.decode_differentiably(samples.latents)
        rewards, _ = score_differentiably([Light()], pixels, PROMPTS, samples.control_words, samples.gains)
        assert samples.reference_distances is not None
        losses.append(reward_loss(rewards, 5.0) + 0.5 * samples.reference_distances)
        losses[-1].sum().backward()

    plain = copy.copy(model.pipeline)
    plain.transformer = copy.deepcopy(model.denoiser)
    plain.transformer.zero_grad()
    inputs, _, sigmas = plain_inputs(model, False)

    def predict(transformer: Any, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return transformer(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=inputs["prompt_embeds"],
            pooled_projections=inputs["pooled"],
            return_dict=False,
        )[0]

    noise = keyed_normal((4, 8, 8), 7, "latent", 2, IDS, torch.device("cpu"))
    x0 = noise
    with torch.no_grad():
        for now, following in itertools.pairwise(sigmas):
            x0 = x0 + (following - now) * predict(plain.transformer, x0, torch.full((2,), now))
    expected = []
    for level in range(2):
        u = keyed_uniform(7, f"direct align {level}", 2, IDS)
        d = torch.tensor([min(0.1, float(uniform), 1 - float(uniform)) for uniform in u], dtype=torch.float64)
        target = (0.5 + 0.4 * u).float().view(-1, 1, 1, 1)
        for inverts in (False, True):
            source = 0.5 + 0.4 * (u - d if inverts else u + d)
            k = 0.4 - 0.2 * (u - d) if inverts else 0.1 + 0.2 * u
            sigma = source.float()
            x = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * noise
            v = predict(plain.transformer, x, sigma)
            moved = x + (target - sigma.view(-1, 1, 1, 1)) * v
            recovered = (moved - target * noise) / (1 - target)
            vae = plain.vae
            z = recovered / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
            image = (vae.decode(z, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
            light = (image * torch.linspace(0.5, 1.5, 16)).flatten(1).mean(dim=1)
            light, dark = light, -0.5 * light
            relative = (1 + k.float()) * dark - light if inverts else (1 + k.float()) * light - dark
            with policies.active("reference") as reference, torch.no_grad():
                v_reference = reference.predict_velocity(x, sigma, conditioning, 1.0)
            penalty = (v - v_reference).square().flatten(1).mean(dim=1)
            expected.append(torch.relu(5.0 - relative) + 0.5 * penalty)
            expected[-1].sum().backward()
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert float(torch.stack(expected).detach().std()) > 0.1
    wanted = gradients_of(plain.transformer)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert gradients_of(model.denoiser).keys() == wanted.keys() and largest > 1e-3
    for name, gradient in gradients_of(model.denoiser).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5 * largest, msg=name)


def test_the_right_velocity_recovers_the_sample_from_any_noise(folder: Path) -> None:
    x0, noise = (keyed_normal((4, 8, 8), 0, name, 0, IDS) for name in ("x0", "noise"))
    jumps = DirectAlign(num_levels=3).jumps(3, 4, IDS)
    assert [jump.is_inversion for jump in jumps] == [False, True] * 3
    for jump in jumps:
        noisy = (1 - jump.start.view(-1, 1, 1, 1)) * x0 + jump.start.view(-1, 1, 1, 1) * noise
        recovered = recover_sample(noisy, noise - x0, noise, jump.start, jump.end)
        torch.testing.assert_close(recovered, x0, rtol=1e-4, atol=1e-4)
        assert ((jump.start < jump.end) == jump.is_inversion).all()
        assert (jump.end >= 0.75).all() and (jump.start <= 0.9643).all() and (jump.start >= 0.75).all()
    assert torch.equal(jumps[0].end, jumps[1].end) and not torch.equal(jumps[0].end, jumps[2].end)
    alone = DirectAlign(num_levels=3).jumps(3, 4, IDS[1:])  # however samples are split
    assert torch.equal(alone[2].start, jumps[2].start[1:])


def test_the_gradient_of_a_weight_is_its_finite_difference(folder: Path) -> None:
    policies = policies_in(folder)
    model = policies.model
    weighted(model.decode_differentiably(sample(policies, range(0, 4)).latents)).sum().backward()
    weight = model.denoiser.proj_out.weight
    row, column = divmod(int(weight.grad.abs().argmax()), weight.shape[1])
    result = float(weight.grad[row, column])

    plain = copy.copy(model.pipeline)
    plain.transformer = copy.deepcopy(model.denoiser).double()
    plain.vae = copy.deepcopy(model.pipeline.vae).double()
    inputs, _, sigmas = plain_inputs(model, False)
    ends = []
    for shift in (1e-5, -1e-5):
        with torch.no_grad():
            plain.transformer.proj_out.weight[row, column] += shift
            ends.append(float(plain_reward(plain, inputs, None, range(0, 4), 1.0, sigmas, torch.float64).sum()))
            plain.transformer.proj_out.weight[row, column] -= shift
    assert abs(result) > 1e-2
    assert result == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


def test_steps_before_the_differentiated_ones_change_the_sample_and_not_its_graph(folder: Path) -> None:
    policies = policies_in(folder)
    latents = [sample(policies, range(start, 4), solver=DPMSolver2()).latents for start in (0, 3)]
    assert torch.equal(*latents)
    gradients = []
    for latent in latents:
        policies.model.denoiser.zero_grad()
        latent.square().sum().backward()
        gradients.append(policies.model.denoiser.proj_out.weight.grad.clone())
    assert not torch.allclose(*gradients, rtol=1e-2)


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_give_the_same_bits(folder: Path, lora: bool) -> None:
    gradients = []
    for recompute in ("none", "full"):
        policies = policies_in(folder, lora, activation_checkpointing=recompute)
        policies.model.recompute_autoencoder(recompute == "full")
        weighted(policies.model.decode_differentiably(sample(policies, range(1, 4)).latents)).sum().backward()
        gradients.append(
            {
                name.replace("._checkpoint_wrapped_module", ""): gradient
                for name, gradient in gradients_of(policies.model.denoiser).items()
            }
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("lora", [False, True])
def test_the_distance_to_the_model_before_training(folder: Path, lora: bool) -> None:
    policies = policies_in(folder, lora, reference=True)
    drawn = sample(policies, range(2, 4), compares=True)
    assert torch.equal(drawn.reference_distances, torch.zeros(2))
    with torch.no_grad():
        for parameter in policies.model.denoiser.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    drawn = sample(policies, range(2, 4), compares=True)
    assert (drawn.reference_distances > 1e-8).all()
    drawn.reference_distances.sum().backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients_of(policies.model.denoiser).values())
    trained = [weight for weight in policies.model.denoiser.parameters() if weight.requires_grad]
    assert trained and sum(weight.grad is not None and bool(weight.grad.any()) for weight in trained) > len(trained) / 2


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if ROWS[name].brief else ()) for name in ROWS]
)
def test_every_family_has_a_gradient(tmp_path: Path, family: str) -> None:
    row = ROWS[family]
    if row.needs:
        pytest.importorskip(row.needs)
    folder = write_tiny_pipeline(tmp_path / "pipeline", described=row.describe(), tokens=row.tokens)
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=row.tokens))
    model.denoiser.eval()
    size = (*row.size, row.num_frames)
    set_output(model, size, "rollout")
    policies = Policies(model, {})
    policies.parallelize(ALONE, load_config(DirectRLConfig, overrides=direct_config(tmp_path)).train)
    images = [np.full((*row.size, 3), 90, np.uint8)] if model.takes_image else None
    conditioning = model.encode_prompts(PROMPTS[:1], images=images)
    settings: dict[str, Any] = {"solver": Euler(), "compares": False, "num_steps": 3, "size": size, "seed": 1}
    drawn = sample_differentiably(
        policies, conditioning, [0], steps=range(1, 3), iteration=0, guidance_scale=row.scales[-1], **settings
    )
    pixels = model.decode_differentiably(drawn.latents)
    assert pixels.shape[-3:] == (3, *row.size) and pixels.shape[0] == 1
    weighted(pixels).sum().backward()
    gradients = gradients_of(model.denoiser)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    # of two transformers of Wan 2.2 the last steps use the second
    trained = [name for name, weight in model.denoiser.named_parameters() if weight.requires_grad]
    reached = [name for name, gradient in gradients.items() if bool(gradient.any())]
    assert len(reached) > len(trained) * (0.3 if "pair" in family or "22" in family else 0.6), (
        family,
        len(reached),
        len(trained),
    )


# Rewards


def pictures(count: int = 3, side: int = 24) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(30, 220, (side, side, 3), np.uint8) for _ in range(count)]


@pytest.mark.parametrize("reward", [Brightness(), Sharpness(), Symmetry(), Colour(), Colour(colour="blue")])
def test_a_reward_of_pixels_is_the_same_with_gradient(reward: Any) -> None:
    images = pictures()
    prompts = ["red", "a green cat", "blue"]
    samples = [Sample(image=image, prompt=prompt, group_id=0) for image, prompt in zip(images, prompts, strict=True)]
    pixels = torch.stack([torch.from_numpy(image).permute(2, 0, 1).double() / 255 for image in images])
    pixels.requires_grad_()
    values = reward.score_pixels(pixels, prompts)
    assert values.tolist() == pytest.approx(reward.score(samples), rel=1e-6)
    (gradient,) = torch.autograd.grad(values.sum(), pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = [reward.score_pixels(pixels.detach() + sign * 1e-7 * direction, prompts).sum() for sign in (1, -1)]
    assert float((gradient * direction).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2e-7, rel=1e-4, abs=1e-6)


def test_a_pixel_of_just_the_colour_has_no_nan(tmp_path: Path) -> None:
    pixels = torch.zeros(1, 3, 4, 4)
    pixels[:, 2] = 1
    pixels.requires_grad_()
    Colour(colour="blue").score_pixels(pixels, [""]).sum().backward()
    assert pixels.grad is not None and not pixels.grad.any()


def test_weights_ranges_and_frames() -> None:
    videos = torch.rand(2, 5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    rewards = [
        Brightness(weight=2.0, normalise=(0.25, 0.75), frame_step=2),
        Sharpness(weight=-1.0, frame_step=4),
    ]
    total, values = score_differentiably(rewards, videos, ["a", "b"])
    brightness = videos[:, ::2].flatten(1).mean(dim=1)
    torch.testing.assert_close(values["brightness"], brightness)
    torch.testing.assert_close(total, 2 * (brightness - 0.25) / 0.5 - values["sharpness"])
    frames = [Sharpness().score_pixels(videos[:, frame], ["", ""]) for frame in (0, 4)]
    torch.testing.assert_close(values["sharpness"], (frames[0] + frames[1]) / 2)


def test_control_words_score_the_difference() -> None:
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    total, _ = score_differentiably([Colour(weight=2.0)], pixels, ["cat", "dog"], ("blue", "a red"))
    blue, red = (Colour(colour=name).score_pixels(pixels, ["", ""]) for name in ("blue", "red"))
    torch.testing.assert_close(total, 2 * (blue - red))


# Parts of the algorithm


def test_differentiated_steps() -> None:
    assert LastSteps(3).steps(10, 0, 0) == range(7, 10)
    ks = {len(RandomLastSteps(3).steps(10, 1, iteration)) for iteration in range(40)}
    assert ks == {1, 2, 3} and RandomLastSteps(3).steps(10, 1, 5).stop == 10
    starts = {PredictedImage(4).steps(10, 1, iteration) for iteration in range(60)}
    assert starts == {range(start, start + 1) for start in (6, 7, 8, 9)}
    assert RandomLastSteps(9).steps(10, 2, 3) == RandomLastSteps(9).steps(10, 2, 3)
    for part in (LastSteps(11), RandomLastSteps(11), PredictedImage(11)):
        with pytest.raises(ValueError, match="more than the 10 denoising steps"):
            part.max_differentiated(10)
    with pytest.raises(ValueError, match="k must be at least 1"):
        LastSteps(0)


def test_a_limit_ends_the_gradient() -> None:
    rewards = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    losses = reward_loss(rewards, 2.0)
    assert losses.tolist() == [1.0, 0.0, 0.0]
    losses.sum().backward()
    assert rewards.grad is not None and rewards.grad.tolist() == [-1.0, 0.0, 0.0]
    assert reward_loss(rewards).tolist() == [-1.0, -2.0, -5.0]


# The task


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (
            "draft",
            {
                "algorithm": {"steps": {"k": 2}, "kl_coef": 0.01},
                "model": {"lora": {"rank": 4, "alpha": 8}},
                "train": {"lr": 0.1},
            },
        ),
        pytest.param(
            "srpo",
            {"algorithm": {k: v for k, v in SRPO.items() if k != "recipe"}, "reward": LIGHT},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "align_prop",
            {"algorithm": {"steps": {"max_k": 4}}, "train": {"activation_checkpointing": "full"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "refl",
            {"algorithm": {"steps": {"last": 2}}, "rollout": {"guidance_scale": 2.0, "n": 2}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_reward_rises_and_a_resumed_run_has_the_same_bits(
    tmp_path: Path, recipe: str, settings: dict[str, Any]
) -> None:
    more = {"train": {"lr": 1e-2, "max_steps": 6, "save_steps": 3}}
    more["reward"] = {"rewards": [{"type": "brightness"}, {"type": "sharpness", "evaluation_only": True}]}
    config = merge(direct_config(tmp_path, **more), merge(settings, {"algorithm": {"recipe": recipe}}))
    whole = run_task_here("rl_diffusion_direct", merge(config, {"train": {"output_dir": str(tmp_path / "whole")}}))
    lines = read_jsonl(whole / "metrics.jsonl")
    assert lines[-1]["eval/reward/total"] > lines[0]["eval/reward/total"] + (5e-4 if "model" in settings else 5e-3)
    if recipe != "srpo":
        assert "eval/reward/sharpness" in lines[-1] and "reward/sharpness" not in lines[-1]
    checkpoint = str(whole / "checkpoints" / "global_step_3")
    resume = {"train": {"output_dir": str(tmp_path / "again"), "load_checkpoint_path": checkpoint}}
    again = run_task_here("rl_diffusion_direct", merge(config, resume))
    assert read_jsonl(again / "metrics.jsonl")[-3:] == lines[-3:]
    assert weights_in(again / "hf_ckpt") == weights_in(whole / "hf_ckpt")


def test_an_iteration_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    runs = []
    for size in (1, 4):
        train = {"micro_batch_size": size, "max_steps": 2, "output_dir": str(tmp_path / f"of_{size}")}
        runs.append(
            read_jsonl(run_task_here("rl_diffusion_direct", direct_config(tmp_path, train=train)) / "metrics.jsonl")
        )
    for line, other in zip(*runs, strict=True):
        assert {name: pytest.approx(value, rel=1e-4) for name, value in line.items()} == other


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"reward": {"rewards": [{"type": "jpeg_compressibility"}]}},
            ["jpeg_compressibility has no gradient", "brightness", "clip_score", "evaluation_only"],
        ),
        ({"reward": {"rewards": [{"type": "brightness", "normalise": "group"}]}}, ["normalise group", "range"]),
        ({"algorithm": {"steps": {"type": "last", "k": 9}}}, ["k 9 is more than the 4 denoising steps"]),
        ({"algorithm": {"recipe": "flow_grpo"}}, ["another task"]),
        ({"algorithm": {"control_words": ["a"]}}, ["algorithm.control_words", "at least 2"]),
        ({"algorithm": {"control_words": ["a", "b"]}}, ["control_words", "brightness does not read the prompt"]),
        ({"algorithm": {"steps": {"type": "direct_align"}}}, ["direct_align scores", "algorithm.control_words"]),
        (
            {"algorithm": {"steps": {"type": "direct_align", "sigmas": [0.5, 1.0]}}},
            ["0 <= low < high < 1, not [0.5, 1.0]"],
        ),
        ({"algorithm": {"steps": {"type": "direct_align", "distance": 0.0}}}, ["distance must be above 0"]),
        ({"train": {"ulysses_parallel_size": 2}}, ["ranks that share a sample", "fsdp2"]),
        ({"train": {"cfg_parallel_size": 2}, "rollout": {"guidance_scale": 2.0}}, ["ranks that share a sample"]),
        ({"train": {"data_parallel_mode": "fsdp1"}}, ["fsdp1", "fsdp2"]),
        ({"train": {"global_batch_size": 4}}, ["train.global_batch_size has no effect"]),
        ({"runtime": {"backend": "ray"}}, ["runtime", "torchrun"]),
        ({"model": {"offload_idle": True}}, ["model.offload_idle"]),
        ({"rollout": {"hybrid_engine": False}}, ["hybrid_engine"]),
        ({"algorithm": {"advantage": "group"}}, ["advantage"]),
    ],
)
def test_refusals(tmp_path: Path, overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DirectRLConfig, overrides=direct_config(tmp_path, **overrides))
    for word in words:
        assert word in str(caught.value)
