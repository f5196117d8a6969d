"""The self-check: rollout and replay compute the same function of the same weights, as far as the kernels here allow.

When a run starts, ``probe_rows`` measures whether a row of the model's output depends on the batch that it is in.
Kernels of matrix products and convolutions may be chosen by the shape of a batch, and then round differently. Rollout
and replay put the same rows into batches of different shape or order. Where rows do not depend on that, the log-ratio
before the first update must be exactly 0, and ``Replay.check`` requires it.

Compiled blocks are different graphs with gradients and without, which round differently. By how much is measured when a
run starts, as the distance of compiled and uncompiled velocities; those of rollout and replay must not be further apart
than some of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from sfumato.algorithms.dynamics import Dynamics, GaussianStep
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.reading import Numbers
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.errors import SelfCheckError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.parallel.mesh import Mesh, range_of_rank
from sfumato.rollout.diffusion.trajectories import Trajectories
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    class _Samples(Protocol):
        """The part of an actor (``runtime/states.py``, on a floor above this one) that is needed here."""

        mesh: Mesh

        def policy(self) -> AbstractContextManager[DiffusionModel]: ...


ROUNDINGS = 256
"""The log-ratio that the self-check allows where rows depend on their batch, in units of the dtype's epsilon: 3e-5 in
float32."""

COMPILED_ROUNDINGS = 2
"""How many times further than compiled and uncompiled velocities those of two compiled graphs may be apart: 0.6 of it
was measured at the size of Stable Diffusion 3.5 medium, in bf16 on an H200 (1.8 and 3.0 % of the velocity)."""

SMALLEST_DISTANCE = 64 * torch.finfo(torch.float32).eps
"""A relative distance of velocities that is allowed in any case: kernels add in different orders."""

STALE_ADVICE = (
    "; ratios of samples of older weights include this: algorithm.off_policy decoupled takes them to the policy of now"
)
"""Of a run whose ratios are those to older weights, of another process's graphs."""

LARGEST_ROUNDING = 0.25
"""Relative distance of compiled and uncompiled velocities that no rounding explains, not that of bf16 either."""


@dataclass(frozen=True)
class RowProbe:
    """Whether rows of the model's output depend on the batch that they are in, as measured."""

    differences: Mapping[int, float] = field(default_factory=dict)
    """Largest absolute difference between rows of the velocity in a batch of a size, in rows, and the same rows in the
    largest batch; by that size. Empty where nothing was measured."""
    sampled: tuple[int, ...] = ()
    """Sizes of the batches in which this run samples; other sizes are those of replays."""
    layer: str = ""
    """The first layer whose output differed."""
    reason: str = ""
    """Why no rows were compared."""
    rounding: float | None = None
    """How far the velocities of compiled and uncompiled blocks are apart, relative to the latter: the largest of the
    rows of a batch. None where nothing is compiled."""
    advice: str = ""
    """What the user may want to change for it."""

    @property
    def is_exact(self) -> bool | None:
        """Whether no row differs; None where nothing was measured."""
        return not any(self.differences.values()) if self.differences else None

    def bound(self, rows: int, tolerance: float, dtype: torch.dtype) -> float:
        """The largest log-ratio that the self-check lets pass where nothing is compiled.

        Args:
            rows: how many the replayed micro-batch has.
            tolerance: a tenth of the objective's clip range; the bound is never above it.
            dtype: in which the model computes.
        """
        if self.is_exact is None:
            return tolerance
        # a size that was not measured counts as one whose rows differ
        if not any(self.differences.get(size, 1.0) for size in (*self.sampled, rows)):
            return 0.0
        return min(tolerance, ROUNDINGS * torch.finfo(dtype).eps)

    @property
    def largest_distance(self) -> float | None:
        """The largest relative distance of velocities that the self-check lets pass; None where nothing is compiled."""
        return None if self.rounding is None else max(COMPILED_ROUNDINGS * self.rounding, SMALLEST_DISTANCE)

    def compare(
        self,
        new: GaussianStep,
        rollout: DiffusionRollout,
        model: DiffusionModel,
        config: TrajectoryRLConfig,
        step: int,
    ) -> Replay:
        """The errors of a replay, which are compared with the bound when ``Replay.check`` is called.

        Args:
            new: the R distributions of the replay.
            rollout: the replayed micro-batch. The bound holds only where all of it was sampled by this very policy.
            model: the policy.
            config: of the task.
            step: finished iterations.
        """
        sampled = rollout.kept
        objective = config.algorithm.objective
        dtype = model.compute_dtype
        with torch.no_grad():
            log_ratio = objective.ratio(new, sampled.sampled_steps()).log_ratio
            errors = largest_of_steps(log_ratio, sampled.steps)
            distances = None
            if self.rounding is not None:
                apart = velocity_distances(new, sampled, config.algorithm.dynamics)
                distances = largest_of_steps(apart, sampled.steps)
        replay = Replay.from_errors(errors, distances, sampled.steps, dtype)
        if not config.algorithm.self_check or set(rollout.versions) != {step}:
            return replay
        if distances is not None:
            return replace(replay, largest_distance=self.largest_distance)
        return replace(replay, bound=self.bound(len(log_ratio), objective.replay_tolerance, dtype))

    @property
    def environment(self) -> dict[str, object]:
        """The entry of ``environment.json``."""
        entry: dict[str, object] = {"rows_independent_of_batch": self.is_exact}
        if self.differences:
            entry["differences"] = {f"{rows} rows": value for rows, value in self.differences.items()}
        entry |= {name: text for name in ("layer", "reason") if (text := getattr(self, name))}
        entry |= {} if self.rounding is None else {"compiled_velocities_differ_by": self.rounding}
        return {"row_probe": entry}

    @property
    def message(self) -> str:
        """A line for the user; empty where rows do not depend on the batch, or nothing was measured."""
        if self.rounding is not None:
            return (
                f"compiled blocks change velocities by up to {self.rounding:.1e} of their size: "
                f"the self-check lets replay and rollout differ by {self.largest_distance:.1e}{self.advice}"
            )
        if self.is_exact is not False:
            return ""
        rows, worst = max(self.differences.items(), key=lambda item: item[1])
        return (
            f"replay and rollout agree up to rounding on this machine (by up to {worst:.1e} in one of {rows} rows"
            f"{f', first seen in {self.layer}' if self.layer else ''}), which the self-check allows for"
        )


def probe_rows(actor: _Samples, config: TrajectoryRLConfig) -> RowProbe:
    """``compare_rows`` for the policy that samples, in the processes of an actor."""
    with actor.policy() as model:
        return compare_rows(model, config, actor.mesh)


def compare_rows(model: DiffusionModel, config: TrajectoryRLConfig, mesh: Mesh) -> RowProbe:
    """Compares rows of one large batch with the same rows in batches of the sizes of this run, in another order.

    It takes a forward pass for each size, or where blocks are compiled one with them and one without. All ranks call
    it.

    Args:
        model: the policy, which samples and is trained.
        config: of the run.
        mesh: of the actor's processes.

    Raises:
        SelfCheckError: when compiled blocks compute something else, or velocities are not finite; not where
            ``algorithm.self_check`` is off.
    """
    if _is_compiled(model):
        rounding = mesh.max(_compiled_distance(model, config, mesh), over="world")
        if config.algorithm.self_check and math.isnan(rounding):
            raise SelfCheckError(
                f"the policy's velocity is not finite before anything was trained (model in {model.compute_dtype}): "
                "look at its weights, or set model.dtype fp32; algorithm.self_check: false goes on anyway"
            )
        if config.algorithm.self_check and rounding > LARGEST_ROUNDING:
            raise SelfCheckError(
                f"compiled blocks compute something else than uncompiled ones: the velocity differs by {rounding:.1%} "
                f"of its size (model in {model.compute_dtype}): set train.compile false"
            )
        stale = config.rollout.staleness > 0 and not config.algorithm.off_policy.uses_proximal
        return RowProbe(
            reason="compiled blocks round differently with gradients",
            rounding=rounding,
            advice=STALE_ADVICE if stale else "",
        )
    reason = _why_not_measured(model, config)
    if reason:
        return RowProbe(reason=reason)
    sampled, replayed = batch_sizes(config, mesh.data_size)
    sizes = sorted({*sampled, *replayed})
    is_split = mesh.layout.cfg > 1
    guided = config.rollout.guidance_scale != 1.0 and not model.embeds_guidance and not is_split
    count = max(sizes)
    latents, sigma = _example_rows(model, config, 2 * count)
    example = _example_conditioning(model, config)

    def velocity(rows: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # with guidance the model computes both branches in one batch, so it has twice as many rows
        rows = rows + [count + row for row in rows] if guided else rows
        conditioning = example.rows([0] * len(rows))
        with torch.no_grad(), model.evaluating(), _row_sums(model.denoiser.named_modules(), len(rows)) as sums:
            return model.predict_velocity(latents[rows], sigma[rows], conditioning), sums

    order = list(range(count))
    whole, whole_sums = velocity(order)
    differences: dict[int, float] = {}
    layer = ""
    for size in sizes:
        rows = order[::-1][:size]  # another order than in the large batch
        part, part_sums = velocity(rows)
        whole_rows = rows + [count + row for row in rows] if guided else rows
        largest = float((part - whole[whole_rows]).abs().max())
        differences[size] = mesh.max(largest, over="world")
        if largest and not layer:
            layer = _find_differing_layer(model, whole_sums, part_sums, whole_rows)
    return RowProbe(differences, tuple(sampled), layer)


def _is_compiled(model: DiffusionModel) -> bool:
    from sfumato.parallel.memory import BlockForward  # which has been loaded where anything is compiled

    forwards = (vars(block).get("forward") for block in model.denoiser.modules())
    return any(isinstance(forward, BlockForward) and forward.backend is not None for forward in forwards)


def _compiled_distance(model: DiffusionModel, config: TrajectoryRLConfig, mesh: Mesh) -> float:
    """The largest relative distance of a row's compiled velocity from its uncompiled one, in a batch of the rollout."""
    count = max(batch_sizes(config, mesh.data_size)[0])
    latents, sigma = _example_rows(model, config, count)
    example = _example_conditioning(model, config)
    # guidance enlarges what rounding has made of two branches, so they must not be one
    other = {name: value.flip(-1) if value.is_floating_point() else value for name, value in example.tensors.items()}
    conditioning = replace(example.rows([0] * count), negative=other)

    def velocity() -> torch.Tensor:
        with torch.no_grad(), model.evaluating():
            return model.predict_velocity(latents, sigma, conditioning, config.rollout.guidance_scale)

    compiled = velocity()
    with torch.compiler.set_stance("force_eager"):
        uncompiled = velocity()
    return float(_relative_distances(compiled, uncompiled, uncompiled).max())


def _relative_distances(left: torch.Tensor, right: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """``|left - right| / |size|`` of each row of ``[R, ...]``; 0 of equal rows, also where a new model gives 0."""
    smallest = torch.finfo(torch.float32).tiny
    return (left - right).flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1).clamp(min=smallest)


def _example_rows(model: DiffusionModel, config: TrajectoryRLConfig, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents ``[count, ...]`` and noise levels ``[count]`` of a probe."""
    shape = model.latent_shape(*config.rollout.size)
    latents = keyed_normal(shape, 0, "row probe", 0, range(count), model.device)
    return latents, torch.linspace(0.1, 0.9, count, device=model.device)


def _example_conditioning(model: DiffusionModel, config: TrajectoryRLConfig) -> Conditioning:
    """One row of embeddings that no prompt has."""
    return Conditioning(model.example_embeddings(*config.rollout.size[:2])).to(model.device)


def velocity_distances(new: GaussianStep, sampled: Trajectories, dynamics: Dynamics) -> torch.Tensor:
    """How far the velocities of a replay are from those of the rollout, relative to their size.

    A rollout keeps means, not velocities; but a mean is affine in the velocity.

    Args:
        new: the B x W distributions of the replay, sample by sample.
        sampled: the B trajectories.
        dynamics: of both.

    Returns:
        float32 ``[B x W]``.
    """
    at_rest = dynamics.step(torch.zeros_like(new.velocity), *sampled.levels()).mean
    return _relative_distances(new.mean, sampled.means.flatten(0, 1), new.mean - at_rest)


def batch_sizes(config: TrajectoryRLConfig, num_data_ranks: int) -> tuple[list[int], list[int]]:
    """Sizes in rows of the batches of the rollout, and of the largest and the smallest batch of the replay.

    They are rows of one guidance branch, of batches that any of the data-parallel ranks has.
    """
    rollout = config.rollout
    train = config.train
    samples_of_ranks = {
        len(range_of_rank(rollout.num_prompts, rank, num_data_ranks)) * rollout.n for rank in range(num_data_ranks)
    }
    steps = len(config.algorithm.window.steps(rollout.num_inference_steps, train.seed, 0))
    whole = {min(count, rollout.micro_batch_size) for count in samples_of_ranks}
    rest = {count % rollout.micro_batch_size for count in samples_of_ranks}
    return sorted((whole | rest) - {0}), sorted({steps * samples for samples in (1, train.micro_batch_size)})


@dataclass(frozen=True)
class Replay:
    """Differences between replay and rollout before an update. They stay on the device until ``check`` reads them."""

    errors: Numbers = field(default_factory=Numbers)
    """The largest absolute log-ratio of each of the W trained steps; empty where nothing was compared. Behind them,
    where blocks are compiled, the largest relative distance of velocities of each."""
    steps: Sequence[int] = ()
    """The W trained steps."""
    dtype: torch.dtype = torch.float32
    """In which the model computes, for the message."""
    bound: float | None = None
    """The largest log-ratio that is allowed; None allows all."""
    largest_distance: float | None = None
    """The largest relative distance of velocities that is allowed; None allows all."""

    @classmethod
    def from_errors(
        cls, errors: torch.Tensor, distances: torch.Tensor | None, steps: Sequence[int], dtype: torch.dtype
    ) -> Replay:
        """Log-ratios, and distances of velocities where they are asked for, ``[W]`` each, as they are on the device."""
        return cls(Numbers(errors, *([] if distances is None else [distances])), steps, dtype)

    def check(self) -> float:
        """The largest log-ratio, 0 where nothing was compared. To be called before the optimiser's step.

        Raises:
            SelfCheckError: where something is above its bound or NaN; names the denoising step and the dtype.
        """
        values = list(self.errors)
        if not values:
            return 0.0
        log_ratios, distances = values[: len(self.steps)], values[len(self.steps) :]
        largest, step = self._worst_step(log_ratios)
        where = "before the first update, replay and rollout differ at denoising step"
        if self.bound is not None and not largest <= self.bound:  # so NaN is refused, too
            raise SelfCheckError(
                f"{where} {step} by a log-ratio of {largest:.2e} (allowed: {self.bound:.2e}; model in {self.dtype}). "
                "Use one batch shape in both (rollout.micro_batch_size = train.micro_batch_size x trained steps), "
                "float32, or a wider clip range; algorithm.self_check: false goes on anyway"
            )
        if self.largest_distance is not None:
            distance, step = self._worst_step(distances)
            if not distance <= self.largest_distance:
                raise SelfCheckError(
                    f"{where} {step} by {distance:.1e} of the velocity (allowed: {self.largest_distance:.1e}, by what "
                    f"compiling changes in this model; model in {self.dtype}). Set train.compile false, which must "
                    "agree exactly; algorithm.self_check: false goes on anyway"
                )
        return largest

    def _worst_step(self, values: Sequence[float]) -> tuple[float, int]:
        """The largest of the W values, or one that is NaN, and its denoising step."""
        worst = max(range(len(values)), key=lambda index: (math.isnan(values[index]), values[index]))
        return values[worst], self.steps[worst]


def largest_of_steps(values: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    """The largest absolute value of each of W steps, ``[W]``, from those of a replay, ``[B x W]`` sample by sample."""
    return values.detach().abs().reshape(-1, len(steps)).amax(dim=0)


def _why_not_measured(model: DiffusionModel, config: TrajectoryRLConfig) -> str:
    """Why comparing rows would say nothing about rollout and replay; empty where it does."""
    if not config.rollout.hybrid_engine:
        return "another process samples"
    if len(model.split_denoiser(model.denoiser)) > 1:
        return "which rows go through which transformer depends on their noise levels"
    return ""


@contextmanager
def _row_sums(modules: Iterable[tuple[str, torch.nn.Module]], rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Inside the block, collects a checksum of each row of every layer's output, by the layer's name.

    A checksum is the sum of a row's bits as integers: outputs need not be kept to be
    compared. The order is that of computation, so that the first layer that differs can be named.
    """
    sums: dict[str, torch.Tensor] = {}

    def sum_rows_of(name: str) -> Callable[..., None]:
        def hook(_module: object, _args: object, output: object) -> None:
            # only outputs with one row per sample, and of a layer that runs twice the first
            if isinstance(output, torch.Tensor) and output.ndim > 1 and len(output) == rows and name not in sums:
                sums[name] = output.float().contiguous().view(torch.int32).flatten(1).sum(1)

        return hook

    leaves = [(name, module) for name, module in modules if not list(module.children())]
    hooks = [module.register_forward_hook(sum_rows_of(name)) for name, module in leaves]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def _find_differing_layer(
    model: DiffusionModel,
    whole_sums: dict[str, torch.Tensor],
    part_sums: dict[str, torch.Tensor],
    whole_rows: list[int],
) -> str:
    """Name and class of the first layer whose rows differ from the same rows in the large batch; empty if none does.

    Args:
        model: the policy.
        whole_sums, part_sums: of ``_row_sums`` in the large batch, and in a smaller one.
        whole_rows: the rows of the large batch that the smaller one has, in its order.
    """
    for name, sums in part_sums.items():
        if name in whole_sums and not torch.equal(sums, whole_sums[name][whole_rows]):
            kind = type(model.denoiser.get_submodule(name)).__name__
            return f"{name} ({kind})"
    return ""
