"""Configuration of ``tasks/rl_diffusion.py``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant
from sfumato.config.needless import MAX_SIDE, check_size, refuse_needless
from sfumato.config.prompt_data import PromptDataConfig
from sfumato.config.recipes import DEFAULT_RECIPE, DIFFUSION_RECIPES
from sfumato.config.runtime import STALENESS, RuntimeConfig, Strategy
from sfumato.config.sections import ModelConfig, TrainConfig

TRAJECTORY_PARTS = ("dynamics", "window")
SAMPLE_PARTS = ("solver", "timesteps", "old", "ema")
"""Parts of an algorithm that mean something to objectives of one kind alone."""


MAX_SAMPLES = 2**20
"""Most samples of one iteration."""


class RolloutConfig(Section):
    """How samples are drawn from the policy."""

    num_prompts: int = Field(ge=1)
    """Prompts (groups) of one iteration, over all processes."""
    n: int = Field(ge=2)
    """Samples per prompt: the group size."""
    micro_batch_size: int = Field(ge=1)
    """Samples denoised together in one process."""
    height: int = Field(512, ge=8, le=MAX_SIDE)
    """Height of the images in pixels."""
    width: int = Field(512, ge=8, le=MAX_SIDE)
    """Width of the images in pixels."""
    num_frames: int = Field(1, ge=1)
    """Frames of a video; 1 makes images."""
    num_inference_steps: int = Field(10, ge=2, le=1000)
    """Denoising steps during training."""
    guidance_scale: float = Field(4.5, ge=0)
    """Classifier-free guidance in rollout and replay; 1 is none and halves the cost."""
    guidance_scale_2: float | None = Field(None, ge=0)
    """Guidance of the second of two transformers (Wan 2.2, low noise levels), evaluation included; null is the same."""
    same_latent: bool = False
    """Start all samples of a group from the same latent, so that only the SDE noise tells them apart."""
    with_reward: bool = True
    """Score finished micro-batches while the next ones are generated; false scores after generation."""
    hybrid_engine: bool = True
    """The sampler is the actor: same process, same weights. false gives it a model of its own, which is sent the
    weights; with runtime.backend ray in processes of its own."""
    async_strategy: Strategy = "sync"
    """What generation may overlap with, without hybrid_engine: nothing; one-step-off, the update of the samples before;
    fully-async, several updates. They preset max_staleness to 0, 1 and 4."""
    max_staleness: int | None = Field(None, ge=0)
    """Most updates that the policy may be ahead of the samples that it learns from; null as async_strategy says."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames of a sample."""
        return self.height, self.width, self.num_frames

    @property
    def staleness(self) -> int:
        """``max_staleness``, given or preset."""
        return STALENESS[self.async_strategy] if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _strategy_fits(self) -> RolloutConfig:
        if self.hybrid_engine and self.staleness:
            name = "async_strategy" if self.max_staleness is None else "max_staleness"
            raise ValueError(
                f"rollout.{name} lets the sampler lag behind the actor, but with rollout.hybrid_engine they are one: "
                "set hybrid_engine to false"
            )
        if self.async_strategy == "sync" and self.staleness:
            raise ValueError(
                "rollout.max_staleness above 0 is not synchronous: set rollout.async_strategy to one-step-off or "
                "fully-async"
            )
        if self.async_strategy == "one-step-off" and self.staleness != 1:
            raise ValueError("rollout.async_strategy one-step-off means a max_staleness of 1: leave max_staleness out")
        return self

    @model_validator(mode="after")
    def _size_fits(self) -> RolloutConfig:
        check_size("rollout", *self.size)
        if self.num_prompts * self.n > MAX_SAMPLES:
            raise ValueError(
                f"rollout.num_prompts {self.num_prompts} x rollout.n {self.n} are {self.num_prompts * self.n:,} "
                f"samples of one iteration, more than {MAX_SAMPLES:,}: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _guidance_fits(self) -> RolloutConfig:
        if self.guidance_scale_2 is not None and self.guidance_scale == 1.0:
            raise ValueError("rollout.guidance_scale_2 means nothing when rollout.guidance_scale is 1: remove it")
        return self


class RewardConfig(Section):
    """What is optimised and what is watched."""

    rewards: list[Annotated[Any, Variant("sfumato.rewards")]] = Field(min_length=1)
    """Rewards; what is optimised is a combination of those that are not evaluation_only."""
    combination: Annotated[Any, Variant("sfumato.rewards.combinations")] = "weighted_sum"
    """What is optimised, made of the values, each normalised as its reward says."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """The run stops, after a checkpoint, when more than this share of an iteration's samples could not be scored."""
    num_workers: int = Field(1, ge=1)
    """Micro-batches that a rank scores at the same time, in threads or, where a reward says so, processes."""
    max_pending: int = Field(8, ge=1)
    """Micro-batches that may wait for their rewards before generation waits for them."""
    cache_size: int = Field(65_536, ge=0)
    """Values that each of the costly rewards remembers, so that equal samples are scored once; 0 remembers none."""


class AlgorithmConfig(Section):
    """The RL algorithm as parts; a recipe presets all of them."""

    recipe: Literal[tuple(DIFFUSION_RECIPES)] = DEFAULT_RECIPE  # type: ignore[valid-type]
    """Preset of the parts below; any of their fields can be overridden."""
    advantage: Annotated[Any, Variant("sfumato.algorithms.advantages")]
    """From rewards to advantages."""
    objective: Annotated[Any, Variant("sfumato.algorithms.objectives")]
    """Policy loss, on the steps of trajectories (kind trajectory) or on noised final samples (kind sample)."""
    kl: Annotated[Any, Variant("sfumato.algorithms.kl")]
    """Penalty that keeps the policy near its reference."""
    dynamics: Annotated[Any, Variant("sfumato.algorithms.dynamics", optional=True)] = None
    """Trajectories: the stochastic denoising step."""
    window: Annotated[Any, Variant("sfumato.algorithms.windows", optional=True)] = None
    """Trajectories: which denoising steps are stochastic and trained."""
    solver: Annotated[Any, Variant("sfumato.algorithms.solvers", optional=True)] = None
    """Final samples: the deterministic sampler."""
    timesteps: Annotated[Any, Variant("sfumato.algorithms.timesteps", optional=True)] = None
    """Final samples: the noise levels at which they are trained."""
    old: Annotated[Any, Variant("sfumato.algorithms.decay", optional=True)] = None
    """Final samples: how fast the old policy follows, once an iteration; kept where it is needed or samples."""
    ema: Annotated[Any, Variant("sfumato.algorithms.decay", optional=True)] = None
    """Final samples: the same for an averaged policy, which is not the average that train.ema_decay evaluates."""
    reference: Annotated[Any, Variant("sfumato.algorithms.decay")] = "constant"
    """How fast the reference follows, once an iteration; a constant 1 leaves it the model before training."""
    sample_with: Literal["policy", "old", "ema"] = "policy"
    """Final samples: whose they are."""
    off_policy: Annotated[Any, Variant("sfumato.algorithms.off_policy")] = "none"
    """Trajectories: what is done about samples of an older policy."""
    drop_no_spread: bool = True
    """Leave out groups whose rewards are all equal; false trains on them where there is a KL penalty."""
    self_check: bool = True
    """Trajectories: stop before the first update if replay and rollout differ by over a tenth of the clip range."""

    @model_validator(mode="before")
    @classmethod
    def _known_recipe(cls, data: Any) -> Any:
        recipe = data.get("recipe", DEFAULT_RECIPE) if isinstance(data, dict) else DEFAULT_RECIPE
        if not isinstance(recipe, str) or recipe not in DIFFUSION_RECIPES:
            raise ValueError(f"algorithm.recipe {recipe!r} is not known; known: {', '.join(DIFFUSION_RECIPES)}")
        return data

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmConfig:
        kind, name = self.objective.kind, self.objective.type
        own, others = TRAJECTORY_PARTS, SAMPLE_PARTS
        if kind == "sample":
            own, others = ("solver", "timesteps"), TRAJECTORY_PARTS
        if missing := [part for part in own if getattr(self, part) is None]:
            raise ValueError(f"algorithm.{missing[0]} is required by objective {name}, which is of kind {kind}")
        if needless := [part for part in others if getattr(self, part) is not None]:
            raise ValueError(
                f"algorithm.{needless[0]} means nothing to objective {name}, which is of kind {kind}: set it to null, "
                "or take a recipe of that objective"
            )
        if kind == "trajectory" and self.dynamics.type == "ode":
            raise ValueError(
                "algorithm.dynamics: type ode has no log-probabilities, which the objective needs; use sde or cps"
            )
        if kind not in self.kl.kinds:
            raise ValueError(
                f"algorithm.kl: type {self.kl.type} does not fit objective {name}, which is of kind {kind}: "
                f"use {'velocity_mse' if kind == 'sample' else 'gaussian'} or none"
            )
        if kind not in self.off_policy.kinds:
            raise ValueError(
                f"algorithm.off_policy: type {self.off_policy.type} weighs by probabilities, and objective {name}, "
                f"which is of kind {kind}, has none of its samples: use none, and keep rollout.max_staleness low"
            )
        takes, has = (
            getattr(part, attribute, None)
            for part, attribute in ((self.objective, "takes_both_signs"), (self.advantage, "has_both_signs"))
        )
        if None not in (takes, has) and takes != has:
            what = "compares samples above 0 with samples below" if takes else "takes no advantage below 0"
            raise ValueError(
                f"algorithm.advantage: type {self.advantage.type} does not fit objective {name}, which {what}: use "
                f"{'best_worst or group' if takes else 'raw or best, or set algorithm.objective.temperature'}"
            )
        return self

    @model_validator(mode="after")
    def _policies_fit(self) -> AlgorithmConfig:
        if self.objective.kind == "trajectory" and self.sample_with != "policy":
            raise ValueError("algorithm.sample_with must be policy where trajectories are replayed")
        for policy, decay in self.other_policies.items():
            if decay is None:
                why = "algorithm.sample_with" if policy == self.sample_with else f"objective {self.objective.type}"
                raise ValueError(f"algorithm.{policy} is required by {why}: give the decay of that policy")
        if "reference" in self._needed and self.reference_guidance_scale is not None and self.kl.coef > 0:
            raise ValueError(
                f"algorithm.kl.reference_guidance_scale: objective {self.objective.type} compares with the reference, "
                "too, and would see another guidance: set it to null"
            )
        return self

    @model_validator(mode="after")
    def _policies_have_effect(self) -> AlgorithmConfig:
        kept = self.other_policies
        moves = self.reference.type != "constant" or self.reference.value != 1
        for name in ("old", "ema", "reference"):
            is_given = moves if name == "reference" else getattr(self, name) is not None
            if is_given and name not in kept:
                remedy = "remove it" if name == "reference" else "set it to null"
                raise ValueError(
                    f"algorithm.{name} has no effect: neither objective {self.objective.type} nor algorithm.kl "
                    f"compares with that policy, and algorithm.sample_with is {self.sample_with}: {remedy}"
                )
        return self

    @property
    def _needed(self) -> frozenset[str]:
        return self.objective.needs if self.objective.kind == "sample" else frozenset()

    @property
    def compared(self) -> frozenset[str]:
        """Policies whose predictions the loss takes besides those of the trained one: of old, ema, reference."""
        return self._needed | ({"reference"} if self.kl.coef > 0 else frozenset())

    @property
    def other_policies(self) -> dict[str, Any]:
        """Decays of the policies that are kept besides the trained one, by name."""
        return {name: getattr(self, name) for name in sorted(self.compared | {self.sample_with} - {"policy"})}

    @property
    def reference_guidance_scale(self) -> float | None:
        """Guidance of the reference's prediction, where the penalty gives it one of its own."""
        return getattr(self.kl, "reference_guidance_scale", None)

    def check_schedule(self, num_steps: int) -> None:
        """Raises ValueError when so many denoising steps are too few for the window or the noise levels."""
        if self.objective.kind == "sample":
            self.timesteps.num_levels(num_steps)
        else:
            self.window.check(num_steps)

    def rows_per_sample(self, num_steps: int) -> int:
        """Trained steps or noise levels of a sample in the first of all iterations.

        Args:
            num_steps: ``rollout.num_inference_steps``.

        Raises:
            ValueError: when the schedule is too short for the window or the noise levels.
        """
        if self.objective.kind == "sample":
            return self.timesteps.num_levels(num_steps)
        self.window.check(num_steps)
        return len(self.window.steps(num_steps, seed=0, iteration=0))

    @property
    def whole_groups(self) -> bool:
        """Whether all trained samples of a group must be in one micro-batch."""
        return self.objective.kind == "sample" and self.objective.whole_groups

    def samples_per_group(self, group_size: int) -> int:
        """Most samples of a group of that size that are trained on."""
        chosen = getattr(self.advantage, "top", group_size) + getattr(self.advantage, "bottom", 0)
        return min(chosen, group_size)


class EvalConfig(Section):
    """Evaluation without noise on prompts that training does not see, always with the same seeds."""

    every_steps: int = Field(10, ge=1)
    """Iterations between evaluations; there is one before the first and one after the last."""
    num_prompts: int = Field(64, ge=1)
    """Prompts evaluated, the first of the evaluation set."""
    num_inference_steps: int = Field(40, ge=1, le=1000)
    """Denoising steps of the evaluation."""
    guidance_scale: float | None = Field(None, ge=0)
    """Guidance of the evaluation; null takes the rollout's."""
    num_saved: int = Field(12, ge=0)
    """Evaluation images kept at each evaluation, for the report."""
    step_cache: float = Field(0.0, ge=0)
    """Threshold of MagCache (arXiv 2506.09045), which leaves out denoising steps that change little, here and not in
    training; its authors take 0.06 to 0.24, and 0 computes every step."""
    seed: int = Field(1234, ge=0)
    """Seed of the evaluation's latents."""


class DiffusionRLConfig(Section):
    """Reinforcement learning of diffusion models: Flow-GRPO and its relatives."""

    model: ModelConfig
    """Model."""
    data: PromptDataConfig
    """Prompts."""
    rollout: RolloutConfig
    """Rollout."""
    reward: RewardConfig
    """Rewards."""
    algorithm: AlgorithmConfig
    """Algorithm."""
    train: TrainConfig
    """Training."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Processes."""

    @classmethod
    def presets(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The parts of the recipe that ``data`` names."""
        algorithm = data.get("algorithm")
        recipe = algorithm.get("recipe", DEFAULT_RECIPE) if isinstance(algorithm, dict) else DEFAULT_RECIPE
        known = isinstance(recipe, str) and recipe in DIFFUSION_RECIPES
        return {"algorithm": DIFFUSION_RECIPES[recipe]} if known else {}

    @classmethod
    def reasons(cls, data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, str]:
        """Parts that the file sets for its own recipe do not fit the parts of another one."""
        given, over = data.get("algorithm"), overrides.get("algorithm")
        if not isinstance(given, dict) or not isinstance(over, dict):
            return {}
        before, recipe = given.get("recipe", DEFAULT_RECIPE), over.get("recipe")
        parts = [part for part in given if part in AlgorithmConfig.model_fields and part not in {"recipe", *over}]
        if recipe not in list(DIFFUSION_RECIPES) or recipe == before or not parts:
            return {}
        reason = (
            f"--algorithm.recipe {recipe}: the file sets {', '.join(parts)} of algorithm for its own recipe, {before}, "
            f"and what it sets lies over the parts of {recipe}: remove these lines from the file"
        )
        return {"algorithm": reason, **{f"algorithm.{part}": reason for part in parts}}

    @model_validator(mode="after")
    def _fits(self) -> DiffusionRLConfig:
        if self.train.max_steps is None:
            raise ValueError("train.max_steps (the number of RL iterations) is required")
        num_ranks = max(self.runtime.actor_processes // self.train.ranks_per_sample, 1)
        for name, count in (("rollout", self.rollout.num_prompts), ("eval", self.eval.num_prompts)):
            if count < num_ranks:
                raise ValueError(
                    f"{name}.num_prompts {count} leaves some of the {num_ranks} data-parallel processes without work"
                )
        if self.train.data_parallel_mode != "ddp" and self.rollout.num_prompts % num_ranks:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} is not a multiple of the {num_ranks} data-parallel "
                f"processes: with train.data_parallel_mode {self.train.data_parallel_mode} all of them must make "
                "equally many forward passes; change it, or take ddp"
            )
        num_samples = self.rollout.num_prompts * self.rollout.n
        batch = self.train.global_batch_size
        if batch is not None and num_samples % batch:
            raise ValueError(
                f"the {num_samples} samples of an iteration (rollout.num_prompts {self.rollout.num_prompts} x "
                f"rollout.n {self.rollout.n}) do not divide into optimiser steps of train.global_batch_size {batch}"
            )
        if not self.rollout.with_reward:
            why = "with rollout.with_reward false, where nothing is generated while rewards are awaited: remove it"
            refuse_needless(self.reward, "reward", ("max_pending",), why)
        for number, each in enumerate(self.reward.rewards):
            if each.evaluation_only and (each.weight != 1 or each.normalise != "none"):
                name = "weight" if each.weight != 1 else "normalise"
                raise ValueError(
                    f"reward.rewards.{number}.{name} has no effect, since {each.label!r} is evaluation_only: "
                    "remove one of them"
                )
        if all(each.evaluation_only for each in self.reward.rewards):
            raise ValueError("reward.rewards: all rewards are evaluation_only, so nothing would be optimised")
        standardised = [each.label for each in self.reward.rewards if each.normalise != "none"]
        if getattr(self.algorithm.advantage, "by_reward", False) and (
            standardised or self.reward.combination.type != "weighted_sum"
        ):
            what = f"normalise of {standardised[0]!r}" if standardised else "reward.combination"
            raise ValueError(
                f"algorithm.advantage: type {self.algorithm.advantage.type} standardises and adds up the rewards by "
                f"itself, so {what} would mean nothing: leave it out"
            )
        if self.train.cfg_parallel_size > 1 and self.rollout.guidance_scale == 1.0:
            raise ValueError(
                "train.cfg_parallel_size shares the two branches of classifier-free guidance, but with "
                "rollout.guidance_scale 1 there is one, and both ranks would compute the same: leave it out"
            )
        if self.model.lora is not None and self.model.lora.dropout > 0:
            raise ValueError("model.lora.dropout must be 0 in RL: replay and rollout would be different policies")
        groupwise = [each.label for each in self.reward.rewards if each.groupwise]
        if groupwise and self.rollout.micro_batch_size % self.rollout.n:
            raise ValueError(
                f"reward {groupwise[0]!r} scores whole groups, so rollout.micro_batch_size "
                f"{self.rollout.micro_batch_size} must be a multiple of rollout.n {self.rollout.n}"
            )
        for reward in self.reward.rewards if self.rollout.num_frames > 1 else ():
            reward.check_video()
        return self

    @model_validator(mode="after")
    def _roles_fit(self) -> DiffusionRLConfig:
        pool, runtime = self.runtime.pools.sampler, self.runtime
        if self.rollout.hybrid_engine and "sampler" in runtime.pools.given:
            raise ValueError(
                "runtime.pools.sampler: with rollout.hybrid_engine the actor's processes sample: remove it, or set "
                "hybrid_engine to false"
            )
        if self.rollout.hybrid_engine and "weight_sync" in runtime.given:
            raise ValueError(
                "runtime.weight_sync: with rollout.hybrid_engine the sampler has the actor's weights: remove it"
            )
        if runtime.backend == "in_process" and runtime.actor_processes > 1 and self.rollout.staleness:
            raise ValueError(
                f"rollout.async_strategy {self.rollout.async_strategy}: under torchrun every rank generates and "
                "updates in turns, so nothing could overlap, and ranks would part: set runtime.backend to ray"
            )
        if runtime.backend == "ray" and self.train.device == "cuda" and not runtime.pools.actor.gpus:
            raise ValueError(
                "runtime.pools.actor.gpus is 0, so the actor's processes see no GPU, but train.device is cuda: give "
                "them GPUs, such as {processes: 8, gpus: 1}"
            )
        if runtime.offload_idle and self.rollout.staleness:
            raise ValueError(
                f"runtime.offload_idle has actor and sampler use their GPUs in turns, but with rollout.async_strategy "
                f"{self.rollout.async_strategy} they work at the same time: set one of them back"
            )
        if self.rollout.hybrid_engine or runtime.backend == "in_process":
            return self
        parallel = runtime.sampler_train(self.train)
        if pool.processes % parallel.ranks_per_sample:
            raise ValueError(
                f"runtime.pools.sampler.processes {pool.processes} is not a multiple of the "
                f"{parallel.ranks_per_sample} processes that share a sample (runtime.pools.sampler.parallel)"
            )
        shares = pool.processes // parallel.ranks_per_sample
        if self.rollout.num_prompts < shares:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} leaves some of the sampler's {shares} data-parallel "
                "processes without work"
            )
        if parallel.data_parallel_mode != "ddp" and self.rollout.num_prompts % shares:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} is not a multiple of the sampler's {shares} "
                f"data-parallel processes, which make their passes together with data_parallel_mode "
                f"{parallel.data_parallel_mode}: change it, or take runtime.pools.sampler.parallel "
                "{data_parallel_mode: ddp}"
            )
        return self

    @model_validator(mode="after")
    def _suits_the_objective(self) -> DiffusionRLConfig:
        algorithm, group_size = self.algorithm, self.rollout.n
        part = "window" if algorithm.objective.kind == "trajectory" else "timesteps"
        try:
            algorithm.check_schedule(self.rollout.num_inference_steps)
        except ValueError as error:
            raise ValueError(f"algorithm.{part} and rollout.num_inference_steps: {error}") from error
        if part == "window":
            return self
        name = algorithm.objective.type
        if self.rollout.same_latent:
            raise ValueError(
                f"rollout.same_latent makes all samples of a group the same: objective {name} samples without noise"
            )
        if not algorithm.whole_groups:
            return self
        if (self.train.global_batch_size or 0) % group_size:
            raise ValueError(
                f"objective {name} needs whole groups, so train.global_batch_size {self.train.global_batch_size} must "
                f"be a multiple of rollout.n {group_size}"
            )
        together = algorithm.samples_per_group(group_size)
        if self.train.micro_batch_size < together:
            raise ValueError(
                f"objective {name} needs whole groups, so train.micro_batch_size {self.train.micro_batch_size} must be "
                f"at least the {together} trained samples of a group"
            )
        return self
