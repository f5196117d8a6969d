"""Rollout and update of Flow-GRPO: against the straightforward loop, or alone at published sizes.

    python benchmarks/rollout_update.py [--family sd3 flux qwen_image] [--micro-batch 9] [--replay-samples 9]
    python benchmarks/rollout_update.py --family sd3 --together --profile [--text-tokens 264]
    python benchmarks/rollout_update.py --measure --size real --family sd3 --device cuda --precision bf16 --lora-rank 32

The straightforward loop works as the public scripts do: diffusers' transformer, one denoising step at a time, two
forward passes for classifier-free guidance, log-probabilities subtracted. sfumato runs both guidance branches in one
pass and replays all trained steps of a sample in one pass: by default with as many rows as the other side's passes
have, so that both need the same memory; ``--replay-samples`` takes more. Both sides make the same images and the same
gradients, which is checked first; then they take turns, and the ratio is taken pair by pair. With ``--together`` the
other side, too, runs both guidance branches in one pass, as flow_grpo does for SD3. ``--profile`` adds where the time
of both goes: shares of kinds of operations, and of the denoiser's passes when they are run alone.

``--measure`` times sfumato alone: seconds per image, images a second, model FLOPs utilisation and peak memory of
denoising and of forward and backward passes. Encoding prompts, decoding images and the optimiser are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusion_families import FAMILIES, Embeddings, build
from rollout_profile import passes_alone, shares

from sfumato.algorithms.dynamics import FlowSDE
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.objectives import ClippedRatio
from sfumato.config.sections import TrainConfig
from sfumato.kernels import choose_kernels
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.trajectories import Trajectories, replay_trajectories, sample_trajectories
from sfumato.tracking.meters import memory_in_use, peak_flops
from sfumato.tracking.run import quiet_libraries

NUM_STEPS, TRAINED, NOISE, CLIP = 10, list(range(9)), 0.7, 1e-3
SIDES = {"small": 32, "real": 512}
"""Pixels of an image where --resolution is not given."""


class Straightforward:
    """One step at a time, two forwards for guidance, or one of both branches."""

    def __init__(self, model: DiffusionModel, prompts: list[str], arguments: argparse.Namespace) -> None:
        self.model, self.family = model, FAMILIES[arguments.family]
        self.guidance, self.micro_batch, self.together = arguments.guidance, arguments.micro_batch, arguments.together
        self.shape = model.latent_shape(arguments.resolution, arguments.resolution)
        self.embeddings = model.encode_prompts(prompts).tensors
        self.empty = model.encode_prompts([""] * len(prompts)).tensors
        self.sigmas = model.sigmas(NUM_STEPS, self.shape).to(model.device)

    def velocity(self, latents: torch.Tensor, index: int, rows: slice) -> torch.Tensor:
        def forward(*branches: Embeddings) -> torch.Tensor:
            mine = {name: torch.cat([branch[name][rows] for branch in branches]) for name in self.embeddings}
            inputs = torch.cat([latents] * len(branches))
            return self.family.forward(self.model, inputs, self.sigmas[index], mine, self.guidance)

        if self.guidance == 1.0 or self.model.embeds_guidance:
            return forward(self.embeddings)
        if self.together:
            unconditional, conditional = forward(self.empty, self.embeddings).chunk(2)
        else:
            conditional, unconditional = forward(self.embeddings), forward(self.empty)
        guided = unconditional + self.guidance * (conditional - unconditional)
        if self.family.rescales:
            guided = guided * (token_norms(conditional) / token_norms(guided))
        return guided

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
        num_images = len(self.embeddings["prompt_embeds"])
        micro_batches = []
        for start in range(0, num_images, self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            ids = list(range(num_images))[rows]
            latents = keyed_normal(self.shape, 0, "latent", 0, ids, self.model.device)
            steps = []
            for index in range(NUM_STEPS):
                velocity = self.velocity(latents, index, rows)
                if index not in TRAINED:
                    latents = latents + velocity * (self.sigmas[index + 1] - self.sigmas[index])
                    continue
                mean, std = self.step(velocity, latents, index)
                drawn = mean + std * keyed_normal(self.shape, 0, f"step noise {index}", 0, ids, self.model.device)
                steps.append((latents, drawn, self.log_prob(drawn, mean, std)))
                latents = drawn
            micro_batches.append(steps)
        return micro_batches

    def update(self, micro_batches: list, advantages: torch.Tensor) -> None:
        for number, steps in enumerate(micro_batches):
            rows = slice(number * self.micro_batch, (number + 1) * self.micro_batch)
            for index, (latents, drawn, old_log_prob) in zip(TRAINED, steps, strict=True):
                mean, std = self.step(self.velocity(latents, index, rows), latents, index)
                ratio = torch.exp(self.log_prob(drawn, mean, std) - old_log_prob)
                unclipped, clipped = (-advantages[rows] * factor for factor in (ratio, ratio.clamp(1 - CLIP, 1 + CLIP)))
                loss = torch.maximum(unclipped, clipped)
                (loss.sum() / (len(advantages) * len(TRAINED))).backward()

    @staticmethod
    def last_drawn(micro_batches: list) -> torch.Tensor:
        return torch.cat([steps[-1][1] for steps in micro_batches])


class Sfumato:
    """Both guidance branches and all trained steps of a micro-batch in one forward."""

    def __init__(self, model: DiffusionModel, prompts: list[str], arguments: argparse.Namespace) -> None:
        self.model, self.guidance, self.micro_batch = model, arguments.guidance, arguments.micro_batch
        self.size = (arguments.resolution, arguments.resolution)
        self.conditioning = model.encode_prompts(prompts)
        self.replay_batch = arguments.replay_samples or max(arguments.micro_batch // len(TRAINED), 1)
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
                size=self.size,
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
            row_advantages = advantages[rows].repeat_interleave(len(TRAINED))
            objective = ClippedRatio(CLIP)
            loss, _ = objective.loss(objective.ratio(new, part.sampled_steps()), row_advantages)
            (loss.sum() / (len(advantages) * len(TRAINED))).backward()

    @staticmethod
    def last_drawn(sampled: Trajectories) -> torch.Tensor:
        return sampled.next_latents[:, -1]


def token_norms(velocity: torch.Tensor) -> torch.Tensor:
    """Norm of each 2 x 2 token, at all its pixels: ``[B, 1, H, W]``."""
    patches = velocity.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))
    norms = patches.square().sum(dim=(1, 3, 5), keepdim=True).sqrt()
    return norms.expand(-1, 1, -1, 2, -1, 2).flatten(-2).flatten(-3, -2)


def gradients(model: DiffusionModel, work: Callable[[], None]) -> torch.Tensor:
    """All gradients after ``work``, as one vector."""
    model.denoiser.zero_grad()
    work()
    trained = [parameter for parameter in model.denoiser.parameters() if parameter.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu() for p in trained])


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call: that of the CPU, which other programs do not lengthen, and on a GPU that of the clock."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def made(arguments: argparse.Namespace) -> tuple[DiffusionModel, list[str], torch.Tensor]:
    """The model, on its mesh, with prompts and advantages."""
    device = torch.device(arguments.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]
    model = build(arguments.family, arguments.size, device, dtype, arguments.lora_rank, arguments.text_tokens)
    savings = {"activation_checkpointing": arguments.recompute, "compile": arguments.compile}
    model.parallelize(Mesh(Layout(), device), TrainConfig(output_dir="unused", **savings))
    prompts = [f'write "{chr(65 + index % 26)}{chr(65 + index // 26 % 26)}C"' for index in range(arguments.num_images)]
    return model, prompts, torch.linspace(-1, 1, arguments.num_images, device=device)


def relative(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference by that of the second."""
    return float((first - second).norm() / second.norm())


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Checks that both sides agree, then times them in turn."""
    model, prompts, advantages = made(arguments)
    sides = [Sfumato(model, prompts, arguments), Straightforward(model, prompts, arguments)]
    sampled = [side.rollout() for side in sides]
    latents = relative(*(side.last_drawn(output) for side, output in zip(sides, sampled, strict=True)))
    pair = [gradients(model, lambda k=k: sides[k].update(sampled[k], advantages)) for k in range(2)]
    difference = relative(*pair)
    assert latents < 1e-4, f"the two sides make different images: {latents:.1e}"
    assert difference < 1e-3, f"the two sides compute different gradients: {difference:.1e}"

    ratios: dict[str, list[float]] = {"rollout": [], "update": []}
    for _ in range(arguments.repeats):
        for phase in ratios:
            times = []
            for side, trajectories in zip(sides, sampled, strict=True):
                model.denoiser.zero_grad()
                work = side.rollout if phase == "rollout" else lambda s=side, t=trajectories: s.update(t, advantages)
                times.append(seconds(work, model.device))
            ratios[phase].append(times[1] / times[0])
    result = {"latent_difference": latents, "gradient_difference": difference}
    for phase, values in ratios.items():
        result[f"{phase}_speedup"] = statistics.median(values)
        result[f"{phase}_speedup_min"], result[f"{phase}_speedup_max"] = min(values), max(values)
    if arguments.profile:
        result |= profiled(model, sides, sampled, advantages, arguments.repeats)
    return result


def profiled(
    model: DiffusionModel, sides: list[Any], sampled: list[Any], advantages: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Of each side and phase: shares of the time by kind, and that of the denoiser's passes alone (median)."""
    result: dict[str, Any] = {}
    for side, trajectories in zip(sides, sampled, strict=True):
        for phase in ("rollout", "update"):
            work = side.rollout if phase == "rollout" else lambda s=side, t=trajectories: s.update(t, advantages)
            name, alone = f"{type(side).__name__} {phase}", passes_alone(model.denoiser, work)
            pairs = [(seconds(alone, model.device), seconds(work, model.device)) for _ in range(repeats)]
            result |= {f"{name} {kind}": value for kind, value in shares(work).items()}
            result[f"{name} denoiser alone"] = statistics.median(mine / whole for mine, whole in pairs)
            result[f"{name} seconds"] = statistics.median(whole for _, whole in pairs)
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time, utilisation and peak memory of sfumato alone, the first round left out."""
    model, prompts, advantages = made(arguments)
    side, resolution = Sfumato(model, prompts, arguments), arguments.resolution
    forward, training = (denoiser_flops(model, resolution, resolution, backward) for backward in (False, True))
    branches = 1 if arguments.guidance == 1.0 or model.embeds_guidance else 2
    operations = {"rollout": NUM_STEPS * branches * forward, "update": len(TRAINED) * branches * training}
    peak = peak_flops(model.device, "bf16" if arguments.precision == "bf16" else "no", arguments.peak_tflops)
    weights = sum(parameter.numel() for parameter in model.denoiser.parameters())
    result: dict[str, Any] = {"parameters": weights, "images_per_pass": arguments.micro_batch}
    result["rows_per_replay"] = side.replay_batch * len(TRAINED)
    taken: dict[str, list[float]] = {"rollout": [], "update": []}
    memory, sampled = {}, side.rollout()
    work = {"rollout": side.rollout, "update": lambda: side.update(sampled, advantages)}
    for _ in range(arguments.repeats + 1):
        for phase, run in work.items():
            model.denoiser.zero_grad()
            memory_in_use()  # begins a new peak
            taken[phase].append(seconds(run, model.device))
            memory[phase] = memory_in_use()
    for phase, operation in operations.items():
        per_image = statistics.median(taken[phase][1:]) / len(prompts)
        result[f"{phase}_s_per_image"], result[f"{phase}_images_per_s"] = per_image, 1 / per_image
        result[f"{phase}_tflops_per_s"] = operation / per_image / 1e12
        if peak is not None:
            result[f"{phase}_mfu"] = operation / per_image / peak
        if "memory/gpu_peak_mib" in memory[phase]:
            result[f"{phase}_gpu_peak_gib"] = memory[phase]["memory/gpu_peak_mib"] / 1024
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument(
        "--size", choices=list(SIDES), default="small", help="real: SD3.5 medium, FLUX.1 dev, Qwen-Image"
    )
    parser.add_argument("--measure", action="store_true", help="sfumato alone, instead of the comparison")
    parser.add_argument("--together", action="store_true", help="the other side, too, has one pass for both branches")
    parser.add_argument("--profile", action="store_true", help="where the time of both sides goes, on a CPU")
    parser.add_argument("--text-tokens", type=int, help="model.max_sequence_length; default: the family's")
    parser.add_argument("--guidance", type=float, nargs="+", help="default: the family's own")
    parser.add_argument("--resolution", type=int, help="pixels along a side")
    parser.add_argument("--num-images", type=int, default=54)
    parser.add_argument("--micro-batch", type=int, default=18, help="images of one pass of the rollout")
    parser.add_argument(
        "--replay-samples", type=int, help="samples that are replayed in one pass; default: as many rows as a rollout's"
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each block")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU; known GPUs have theirs")
    return parser.parse_args()


def main() -> None:
    choose_kernels()
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quiet_libraries()
    arguments.resolution = arguments.resolution or SIDES[arguments.size]
    families, scales = arguments.family, arguments.guidance
    for family in families:
        for guidance in scales or [FAMILIES[family].guidance]:
            arguments.family, arguments.guidance = family, guidance
            result = measure(arguments) if arguments.measure else compare(arguments)
            shown = {name: value if isinstance(value, int) else float(f"{value:.3g}") for name, value in result.items()}
            print(json.dumps({"family": family, "guidance": guidance, **shown}), flush=True)


if __name__ == "__main__":
    main()
