"""How far results are apart that should be one: packed rows and transformers' documents one by one, rollout and replay.

At real size, in bf16, eager and compiled. ``compiled`` is what a run does: the first length by itself, then any length.
``static`` compiles each length by itself, ``dynamic`` compiles for any length at once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.rl import rl_config
from benchmarks.gpu.sft import sft_config
from benchmarks.gpu.watched import compiled_for, drawn_on, redraw_zeros
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.language import probe
from sfumato.models.language.load import build_language_model
from sfumato.models.language.probe_documents import make_documents
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.rollout.diffusion.policy import build_policy
from sfumato.rollout.diffusion.self_check import compare_rows
from sfumato.rollout.diffusion.trajectories import replay_trajectories, sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout

GRAPHS: dict[str, dict[str, bool]] = {
    "eager": {},
    "compiled": {},
    "static": {"automatic_dynamic_shapes": False},
    "dynamic": {"assume_static_by_default": False},
}
"""Settings of the compiler by mode."""

BOUNDS = (
    Bound(
        "share_of_allowed",
        0.5,
        "the probe would stop healthy runs: compare the modes; if only compiled ones are off set train.compile false; "
        "else model.attention sdpa, and raise HALF in models/language/probe.py to four times what sdpa gives",
    ),
    Bound("loss_difference", 0.01, "as share_of_allowed; a loss that is off alone points at the output layer"),
    Bound(
        "grad_norm_difference", 0.025, "as share_of_allowed; gradients that are off alone point at attention's backward"
    ),
    Bound(
        "second_pass",
        0.005,
        "something is kept from pass to pass, or adds in no order: train.deterministic true tells which",
    ),
    Bound(
        "share_of_bound",
        1.0,
        "the self-check would stop the run before its first update: take equal batch shapes, train.compile false, or "
        "the wider bound that the differences of rows ask for (ROUNDINGS in rollout/diffusion/self_check.py)",
        cells="self-check",
    ),
    Bound(
        "rows_differ_by",
        0.05,
        "a row depends on its batch by more than bf16 explains: look which layer is named, and pin its kernel",
    ),
)


def cells(setting: Setting) -> dict[str, Cell]:
    modes = ("eager", "compiled") if setting.tiny else GRAPHS
    by_mode = {
        f"{name}/{mode}": partial(measure, mode=mode)
        for mode in modes
        for name, measure in (("probe", measure_probe), ("self-check", measure_self_check))
    }
    return by_mode | {"rows of a batch": measure_rows}


@contextmanager
def graphs_of(mode: str, setting: Setting) -> Iterator[None]:
    """Inside, blocks are compiled as a mode says, from nothing."""
    import torch._dynamo

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**GRAPHS[mode]))
        stack.enter_context(compiled_for(setting))
        yield


def mesh_device(setting: Setting) -> str:
    """What ``train.device`` says."""
    return torch.device(setting.device).type


def measure_probe(setting: Setting, mode: str) -> dict[str, Any]:
    """The probe's own comparison with transformers' module, of which it takes no copy at this size by itself."""
    config = sft_config(setting.scratch / f"probe_{mode}", setting, 1, compile=mode != "eager")
    config["train"] |= {"device": mesh_device(setting), "max_steps": 1}
    parsed = load_config(TrainTextConfig, overrides=config)
    started = time.perf_counter()
    whole_copy = mock.patch.object(probe, "LARGEST_COPY", 2**40)
    with graphs_of(mode, setting), drawn_on(setting.device), whole_copy:
        model = build_language_model(parsed.model, parsed.train)
        model.parallelize(build_mesh(parsed.train), parsed.train)
        documents = make_documents(model, parsed.train, parsed.data.max_seq_len)
        checks = probe.Checks(model, documents, parsed.train, copies=1)
        with model.probed():
            expected = checks.reference()
            assert expected is not None
            measured, again = checks.measure(), checks.measure()
            noise = checks._find_noise(measured)
    allowed = checks.tolerance.log_prob_tolerance(expected.log_probs, noise.log_probs)
    distances = (measured.log_probs - expected.log_probs).abs()
    return {
        "share_of_allowed": float(distances.max()) / allowed,
        "loss_difference": relative(measured.loss, expected.loss),
        "grad_norm_difference": relative(measured.grad_norm, expected.grad_norm),
        "second_pass": relative(again.grad_norm, measured.grad_norm),
        "largest_nats": float(distances.max()),
        "mean_nats": float(distances.mean()),
        "allowed_nats": allowed,
        "noise_nats": noise.log_probs,
        "seconds": time.perf_counter() - started,
    }


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)


def measure_self_check(setting: Setting, mode: str, recipe: str = "flow_grpo") -> dict[str, Any]:
    """The largest log-ratio of a replay with gradients to the rollout, by a policy that has not changed.

    Eager rows that do not depend on their batch must give 0.
    """
    config = policy_config(setting, recipe, mode)
    with graphs_of(mode, setting):
        model, mesh = load_policy(setting, mode)
        return replay_distance(model, config, mesh)


def policy_config(setting: Setting, recipe: str, mode: str) -> TrajectoryRLConfig:
    """The configuration of ``tasks/rl_diffusion.py`` at the size of Stable Diffusion 3.5 medium."""
    config = rl_config(setting.scratch / f"replay_{mode}", setting, "9 steps", "jpeg", 1)
    config["algorithm"] = {"recipe": recipe}
    config["train"] |= {"device": mesh_device(setting), "compile": mode != "eager", "max_steps": 1}
    return load_config(TrajectoryRLConfig, overrides=config)


@functools.cache
def load_policy(setting: Setting, mode: str) -> tuple[DiffusionModel, Mesh]:
    """The policy with random weights on its mesh; adapters, too, are not zero."""
    config = policy_config(setting, "flow_grpo", mode)
    mesh = build_mesh(config.train)
    with drawn_on(setting.device):
        model = build_policy(config, mesh, print)
    redraw_zeros(model.denoiser)
    model.parallelize(mesh, config.train)
    return model, mesh


def replay_distance(model: DiffusionModel, config: TrajectoryRLConfig, mesh: Mesh) -> dict[str, Any]:
    """Draws a micro-batch as the rollout does, and replays it with gradients as the update does."""
    rollout, algorithm = config.rollout, config.algorithm
    steps = algorithm.window.steps(rollout.num_inference_steps, config.train.seed, 0)
    count = config.train.micro_batch_size
    num_drawn = count * len(steps)  # as many rows as a replay has
    example = example_conditioning(model, rollout.height, rollout.width)
    _, drawn = sample_trajectories(
        model,
        example.rows([0] * num_drawn),
        list(range(num_drawn)),
        dynamics=algorithm.dynamics,
        trained_steps=steps,
        size=rollout.size,
        num_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        seed=config.train.seed,
        iteration=0,
    )
    assert drawn is not None
    replayed_rows = drawn.rows(torch.arange(count))
    conditioning = example.rows([0] * count)
    replay = replay_trajectories(model, replayed_rows, conditioning, algorithm.dynamics, rollout.guidance_scale)
    sampled = replayed_rows.sampled_steps()
    log_ratio = algorithm.objective.ratio(replay, sampled).log_ratio
    log_ratio.sum().backward()
    gradients = [parameter.grad for parameter in model.denoiser.parameters() if parameter.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients), "gradients are not finite"
    model.denoiser.zero_grad()
    # as the run's own self-check measures it, for a rollout of this very policy
    rollout_of_now = cast("DiffusionRollout", SimpleNamespace(kept=replayed_rows, versions=[0] * count))
    row_probe = compare_rows(model, config, mesh)
    checked = row_probe.compare(replay, rollout_of_now, model, config, step=0)
    log_ratios, distances = list(checked.errors)[: len(steps)], list(checked.errors)[len(steps) :]
    values = {
        "largest_log_ratio": max(log_ratios),
        "tolerance": algorithm.objective.replay_tolerance,
        "log_ratios": log_ratios,
        "trained_steps": len(steps),
    }
    if checked.largest_distance is not None:
        values |= {"velocities_differ_by": distances, "compiling_changes": row_probe.rounding}
        return values | {"share_of_bound": max(distances) / checked.largest_distance}
    assert checked.bound is not None
    return values | {"share_of_bound": max(log_ratios) / (checked.bound or torch.finfo(torch.float32).tiny)}


def example_conditioning(model: DiffusionModel, height: int, width: int) -> Conditioning:
    """One row of embeddings, and those of the empty prompt."""
    return model.encode_prompts(["a sign that reads 7"], True, model.blank_images(1, height, width)).to(model.device)


def measure_rows(setting: Setting) -> dict[str, Any]:
    """Whether a row of the denoiser's output depends on its batch, as each run measures it for its self-check."""
    model, mesh = load_policy(setting, "eager")
    row_probe = compare_rows(model, policy_config(setting, "flow_grpo", "eager"), mesh)
    return {
        "rows_differ_by": max(row_probe.differences.values()),
        "by_rows": {str(rows): value for rows, value in row_probe.differences.items()},
        "first_layer": row_probe.layer or "none",
    }
