"""The self-check: replay and rollout are one function of the same weights, as far as the kernels here allow.

When a run starts it is measured whether a row of what the model computes depends on the batch that it is in. Kernels of
matrix products and convolutions may be chosen by the shape of a batch, and then round differently. Rollout and replay
put the same rows into batches of different shape or order: where rows do not depend on that, the log-ratio before the
first update is exactly 0, and that is checked there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.reading import Numbers
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.errors import SelfCheckError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.parallel.mesh import Mesh, range_of_rank
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout

ROUNDINGS = 256
"""What the self-check allows where rows depend on their batch, in units of the dtype's precision: 3e-5 in float32."""


@dataclass(frozen=True)
class RowProbe:
    """What was measured."""

    differences: Mapping[int, float] = field(default_factory=dict)
    """Largest absolute difference of the velocity's rows by the size of the batch, in rows; empty: not measured."""
    sampled: tuple[int, ...] = ()
    """The sizes in which this run samples; the others are those of replays."""
    layer: str = ""
    """In the output of which layer a difference was seen first."""
    reason: str = ""
    """Why nothing was measured."""

    @property
    def is_exact(self) -> bool | None:
        """Whether no row differs; None where nothing was measured."""
        return not any(self.differences.values()) if self.differences else None

    def bound(self, rows: int, tolerance: float, dtype: torch.dtype) -> float:
        """The largest log-ratio that the self-check lets pass.

        Args:
            rows: of the replayed micro-batch.
            tolerance: a tenth of the objective's clip range, which is never exceeded.
            dtype: in which the model computes.
        """
        if self.is_exact is None:
            return tolerance
        if not any(self.differences.get(size, 1.0) for size in (*self.sampled, rows)):
            return 0.0
        return min(tolerance, ROUNDINGS * torch.finfo(dtype).eps)

    def compare(
        self,
        log_ratio: torch.Tensor,
        rollout: DiffusionRollout,
        model: DiffusionModel,
        config: TrajectoryRLConfig,
        step: int,
    ) -> Replay:
        """What ``check_replay`` looks at before the first optimiser step of an update, and does when it is asked.

        Args:
            log_ratio: float32 ``[R]`` of the policy to the one that sampled.
            rollout: the replayed micro-batch; only samples of this very policy must agree.
            model: the policy.
            config: of the task.
            step: finished iterations.
        """
        bound, dtype = None, model.compute_dtype
        if config.algorithm.self_check and set(rollout.versions) == {step}:
            bound = self.bound(len(log_ratio), config.algorithm.objective.replay_tolerance, dtype)
        return Replay(replay_errors(log_ratio, rollout.kept.steps), rollout.kept.steps, dtype, bound)

    @property
    def environment(self) -> dict[str, Any]:
        """What belongs into ``environment.json``."""
        found: dict[str, Any] = {"rows_independent_of_batch": self.is_exact}
        if self.differences:
            found["differences"] = {f"{rows} rows": value for rows, value in self.differences.items()}
        found |= {name: text for name in ("layer", "reason") if (text := getattr(self, name))}
        return {"row_probe": found}

    @property
    def message(self) -> str:
        """What a person should know; empty where rows are independent, or nothing was measured."""
        if self.is_exact is not False:
            return ""
        rows, worst = max(self.differences.items(), key=lambda item: item[1])
        return (
            f"rows of the model's output depend on the batch here, by up to {worst:.1e} in one of {rows} rows"
            f"{f', first seen in {self.layer}' if self.layer else ''}: replay and rollout differ by rounding, and the "
            "self-check allows the rounding of the dtype instead of 0"
        )


def probe_rows(actor: Any, config: TrajectoryRLConfig) -> RowProbe:
    """``compare_rows`` of the policy that samples, in the processes of an actor."""
    with actor.policy() as model:
        return compare_rows(model, config, actor.mesh)


def compare_rows(model: DiffusionModel, config: TrajectoryRLConfig, mesh: Mesh) -> RowProbe:
    """Compares rows of one large batch with the same rows in batches of the sizes of this run, in another order.

    It takes a forward pass for each size. All ranks call it.

    Args:
        model: what samples and is trained.
        config: the run's.
        mesh: the actor's processes.
    """
    reason = _unmeasured(model, config)
    if reason:
        return RowProbe(reason=reason)
    sampled, replayed = batch_sizes(config, mesh.data_size)
    sizes = sorted({*sampled, *replayed})
    is_split = mesh.layout.cfg > 1
    guided = config.rollout.guidance_scale != 1.0 and not model.embeds_guidance and not is_split
    count = max(sizes)
    latents = keyed_normal(model.latent_shape(*config.rollout.size), 0, "row probe", 0, range(2 * count), model.device)
    sigma = torch.linspace(0.1, 0.9, 2 * count, device=model.device)
    given = Conditioning(model.example_embeddings(config.rollout.height, config.rollout.width)).to(model.device)

    def velocity(rows: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = rows + [count + row for row in rows] if guided else rows
        conditioning = given.rows([0] * len(rows))
        with torch.no_grad(), model.evaluating(), _row_sums(model.denoiser.named_modules(), len(rows)) as sums:
            return model.predict_velocity(latents[rows], sigma[rows], conditioning), sums

    order = list(range(count))
    whole, whole_sums = velocity(order)
    differences, layer = {}, ""
    for size in sizes:
        rows = order[::-1][:size]
        part, sums = velocity(rows)
        place = rows + [count + row for row in rows] if guided else rows
        largest = float((part - whole[place]).abs().max())
        differences[size] = mesh.max(largest, over="world")
        if largest and not layer:
            layer = _first_that_differs(model, whole_sums, sums, place)
    return RowProbe(differences, tuple(sampled), layer)


def batch_sizes(config: TrajectoryRLConfig, num_data_ranks: int) -> tuple[list[int], list[int]]:
    """Rows of the batches of the rollout, and of whole and of the smallest batches of the replay.

    They are rows of one guidance branch, for any of the data-parallel ranks.
    """
    rollout, train = config.rollout, config.train
    sizes = {
        len(range_of_rank(rollout.num_prompts, rank, num_data_ranks)) * rollout.n for rank in range(num_data_ranks)
    }
    steps = len(config.algorithm.window.steps(rollout.num_inference_steps, train.seed, 0))
    whole = {min(size, rollout.micro_batch_size) for size in sizes}
    rest = {size % rollout.micro_batch_size for size in sizes}
    return sorted((whole | rest) - {0}), sorted({steps * samples for samples in (1, train.micro_batch_size)})


@dataclass(frozen=True)
class Replay:
    """Replay against rollout before an update. ``errors`` are read when they are checked."""

    errors: Numbers = field(default_factory=Numbers)
    """The largest absolute log-ratio of each of the W trained steps; none where nothing was compared."""
    steps: Sequence[int] = ()
    """These steps."""
    dtype: torch.dtype = torch.float32
    """The model's."""
    bound: float | None = None
    """The largest log-ratio that passes; None passes all."""

    def check(self) -> float:
        """The largest of them, 0 without any. Ask before the optimiser's step.

        Raises:
            SelfCheckError: where it is above the bound; names the denoising step and the dtype.
        """
        values = list(self.errors)
        if not values:
            return 0.0
        worst = max(range(len(values)), key=lambda index: (math.isnan(values[index]), values[index]))
        largest = values[worst]
        if self.bound is not None and not largest <= self.bound:
            raise SelfCheckError(
                f"before the first update, replay and rollout differ at denoising step {self.steps[worst]} by a "
                f"log-ratio of {largest:.2e} (allowed: {self.bound:.2e}; model in {self.dtype}). Use one batch shape "
                "in both (rollout.micro_batch_size = train.micro_batch_size x trained steps), float32, or a wider clip "
                "range; algorithm.self_check: false goes on anyway"
            )
        return largest


def replay_errors(log_ratio: torch.Tensor, steps: Sequence[int]) -> Numbers:
    """The largest absolute log-ratio of each of W steps, from those of a replay, ``[B x W]`` sample by sample."""
    return Numbers(log_ratio.detach().abs().reshape(-1, len(steps)).amax(dim=0))


def check_replay(log_ratio: torch.Tensor, steps: Sequence[int], dtype: torch.dtype, bound: float | None) -> float:
    """Compares replay and rollout before an update, when the policy is still the one that sampled.

    Args:
        log_ratio: ``[B x W]`` of the replay, sample by sample.
        steps: the W trained steps.
        dtype: the model's, for the message.
        bound: largest log-ratio that passes; None passes all.

    Returns:
        The largest absolute log-ratio.

    Raises:
        SelfCheckError: naming the denoising step and the dtype.
    """
    return Replay(replay_errors(log_ratio, steps), steps, dtype, bound).check()


def _unmeasured(model: DiffusionModel, config: TrajectoryRLConfig) -> str:
    """Why rows say nothing of rollout and replay; empty when they do."""
    if config.train.compiles(model.device.type):
        return "compiled blocks are compiled anew for each shape and for gradients"
    if not config.rollout.hybrid_engine:
        return "another process samples"
    if len(model.split_denoiser(model.denoiser)) > 1:
        return "which rows go through which transformer depends on their noise levels"
    return ""


@contextmanager
def _row_sums(modules: Iterable[tuple[str, torch.nn.Module]], rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, collects sums of the bits of each row of what layers give, by name in the order of computation."""
    sums: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim > 1 and len(output) == rows and name not in sums:
                sums[name] = output.float().contiguous().view(torch.int32).flatten(1).sum(1)

        return hook

    leaves = [(name, module) for name, module in modules if not list(module.children())]
    hooks = [module.register_forward_hook(note(name)) for name, module in leaves]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _first_that_differs(
    model: DiffusionModel, whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], place: list[int]
) -> str:
    for name, sums in part.items():
        if name in whole and not torch.equal(sums, whole[name][place]):
            kind = type(model.denoiser.get_submodule(name)).__name__
            return f"{name} ({kind})"
    return ""
