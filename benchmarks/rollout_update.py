"""Rollout and update of Flow-GRPO against the straightforward loop, on one small SD3 model, as ratios of one run.

    python benchmarks/rollout_update.py [--micro-batch 9] [--replay-samples 9] [--repeats 5] [--threads 1]

The straightforward loop works as the public scripts do: one denoising step at a time, two forward passes for
classifier-free guidance, log-probabilities subtracted. sfumato runs both guidance branches in one pass and replays
all trained steps of a sample in one pass: by default with as many rows as the other side's passes have, so that both
need the same memory; ``--replay-samples`` takes more. Both sides make the same images and the same gradients, which is
checked first; then they take turns, and the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.algorithms.dynamics.sde import FlowSDE
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.objectives.clipped_ratio import ClippedRatio
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.diffusion import Trajectories, replay_trajectories, sample_trajectories
from sfumato.tracking.run import quiet_libraries

DESCRIPTION = Path(__file__).parents[1] / "configs" / "quickstart" / "tiny_sd3.yaml"
SIZE, NUM_STEPS, TRAINED, NOISE, CLIP = (32, 32), 10, list(range(9)), 0.7, 1e-3


def build(device: str) -> DiffusionModel:
    """The quickstart's model with random weights where it starts at zero, so that every gradient is real."""
    model = build_diffusion_model(ModelConfig(config_path=str(DESCRIPTION), max_sequence_length=1), device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.denoiser.eval()
    return model


class Straightforward:
    """One step at a time, two forwards for guidance."""

    def __init__(self, model: DiffusionModel, prompts: list[str], guidance: float, micro_batch: int) -> None:
        self.model, self.guidance, self.micro_batch = model, guidance, micro_batch
        self.embeddings = model.encode_prompts(prompts).tensors
        self.empty = model.encode_prompts([""] * len(prompts)).tensors
        self.sigmas = model.sigmas(NUM_STEPS, model.latent_shape(*SIZE)).to(model.device)

    def velocity(self, latents: torch.Tensor, index: int, rows: slice) -> torch.Tensor:
        timestep = (self.sigmas[index] * 1000).expand(len(latents))

        def forward(embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model.denoiser(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=embeddings["prompt_embeds"][rows],
                pooled_projections=embeddings["pooled"][rows],
                return_dict=False,
            )[0]

        conditional = forward(self.embeddings)
        if self.guidance == 1.0:
            return conditional
        unconditional = forward(self.empty)
        return unconditional + self.guidance * (conditional - unconditional)

    def step(self, velocity: torch.Tensor, latents: torch.Tensor, index: int) -> tuple[torch.Tensor, float]:
        sigma, following = float(self.sigmas[index]), float(self.sigmas[index + 1])
        dt = following - sigma
        s = math.sqrt(sigma / (1 - (float(self.sigmas[1]) if sigma == 1 else sigma))) * NOISE
        mean = latents * (1 + s**2 / (2 * sigma) * dt) + velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, s * math.sqrt(-dt)

    def log_prob(self, drawn: torch.Tensor, mean: torch.Tensor, std: float) -> torch.Tensor:
        density = -((drawn - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(2 * math.pi) / 2
        return density.flatten(1).mean(1)

    @torch.no_grad()
    def rollout(self) -> list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        num_images, shape = len(self.embeddings["pooled"]), self.model.latent_shape(*SIZE)
        micro_batches = []
        for start in range(0, num_images, self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            ids = list(range(num_images))[rows]
            latents = keyed_normal(shape, 0, "latent", 0, ids, self.model.device)
            kept = []
            for index in range(NUM_STEPS):
                velocity = self.velocity(latents, index, rows)
                if index not in TRAINED:
                    latents = latents + velocity * (self.sigmas[index + 1] - self.sigmas[index])
                    continue
                mean, std = self.step(velocity, latents, index)
                drawn = mean + std * keyed_normal(shape, 0, f"step noise {index}", 0, ids, self.model.device)
                kept.append((latents, drawn, self.log_prob(drawn, mean, std)))
                latents = drawn
            micro_batches.append(kept)
        return micro_batches

    def update(self, micro_batches: list, advantages: torch.Tensor) -> None:
        for number, kept in enumerate(micro_batches):
            rows = slice(number * self.micro_batch, (number + 1) * self.micro_batch)
            for index, (latents, drawn, old_log_prob) in zip(TRAINED, kept, strict=True):
                mean, std = self.step(self.velocity(latents, index, rows), latents, index)
                log_ratio = self.log_prob(drawn, mean, std) - old_log_prob
                loss, _ = ClippedRatio(CLIP).loss(log_ratio, advantages[rows])
                (loss.sum() / (len(advantages) * len(TRAINED))).backward()


class Sfumato:
    """Both guidance branches and all trained steps of a micro-batch in one forward."""

    def __init__(
        self, model: DiffusionModel, prompts: list[str], guidance: float, micro_batch: int, replay_samples: int
    ) -> None:
        self.model, self.guidance, self.micro_batch = model, guidance, micro_batch
        self.conditioning = model.encode_prompts(prompts)
        self.replay_batch = replay_samples
        self.dynamics = FlowSDE(NOISE)

    def rollout(self) -> Trajectories:
        parts = []
        for start in range(0, len(self.conditioning), self.micro_batch):
            rows = range(start, min(start + self.micro_batch, len(self.conditioning)))
            _, sampled = sample_trajectories(
                self.model,
                self.conditioning.rows(list(rows)),
                list(rows),
                dynamics=self.dynamics,
                trained_steps=TRAINED,
                size=SIZE,
                num_steps=NUM_STEPS,
                guidance_scale=self.guidance,
                seed=0,
                iteration=0,
            )
            parts.append(sampled)
        return Trajectories.cat(parts)

    def update(self, sampled: Trajectories, advantages: torch.Tensor) -> None:
        for rows in torch.arange(len(advantages)).split(self.replay_batch):
            part = sampled.rows(rows)
            new = replay_trajectories(self.model, part, self.conditioning.rows(rows), self.dynamics, self.guidance)
            log_ratio = new.log_ratio(part.means.flatten(0, 1), part.next_latents.flatten(0, 1))
            loss, _ = ClippedRatio(CLIP).loss(log_ratio, advantages[rows].repeat_interleave(len(TRAINED)))
            (loss.sum() / (len(advantages) * len(TRAINED))).backward()


def gradients(model: DiffusionModel, work: Callable[[], None]) -> torch.Tensor:
    """All gradients after ``work``, as one vector."""
    model.denoiser.zero_grad()
    work()
    zero = torch.zeros(())
    return torch.cat(
        [(zero.expand(p.shape) if p.grad is None else p.grad).flatten().cpu() for p in model.denoiser.parameters()]
    )


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(guidance: float, arguments: argparse.Namespace) -> dict[str, float]:
    """Checks that both sides agree, then times them in turn."""
    model = build(arguments.device)
    prompts = [f'write "{chr(65 + index % 26)}{chr(65 + index // 26 % 26)}C"' for index in range(arguments.num_images)]
    replay_samples = arguments.replay_samples or max(arguments.micro_batch // len(TRAINED), 1)
    sides = [
        Sfumato(model, prompts, guidance, arguments.micro_batch, replay_samples),
        Straightforward(model, prompts, guidance, arguments.micro_batch),
    ]
    advantages = torch.linspace(-1, 1, arguments.num_images, device=arguments.device)
    sampled = [side.rollout() for side in sides]
    pair = [gradients(model, lambda k=k: sides[k].update(sampled[k], advantages)) for k in range(2)]
    difference = float((pair[0] - pair[1]).norm() / pair[1].norm())
    assert difference < 1e-3, f"the two sides compute different gradients: {difference:.1e}"

    ratios: dict[str, list[float]] = {"rollout": [], "update": []}
    for _ in range(arguments.repeats):
        for phase in ratios:
            times = []
            for side, trajectories in zip(sides, sampled, strict=True):
                model.denoiser.zero_grad()
                work = side.rollout if phase == "rollout" else lambda s=side, t=trajectories: s.update(t, advantages)
                times.append(seconds(work, arguments.device))
            ratios[phase].append(times[1] / times[0])
    result = {"guidance_scale": guidance, "gradient_difference": difference}
    for phase, values in ratios.items():
        result[f"{phase}_speedup"] = statistics.median(values)
        result[f"{phase}_speedup_min"], result[f"{phase}_speedup_max"] = min(values), max(values)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-images", type=int, default=54)
    parser.add_argument("--micro-batch", type=int, default=18, help="rows of the straightforward loop's forward passes")
    parser.add_argument(
        "--replay-samples",
        type=int,
        help="samples that sfumato replays in one pass; default: as many rows as the other",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quiet_libraries()
    for guidance in (1.0, 4.5):
        print(json.dumps({key: float(f"{value:.3g}") for key, value in compare(guidance, arguments).items()}))


if __name__ == "__main__":
    main()
