"""Configuration of ``tasks/rl_diffusion.py``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Variant
from sfumato.config.needless import MAX_SIDE, check_size
from sfumato.config.recipes import DEFAULT_RECIPE, DIFFUSION_RECIPES
from sfumato.config.rl import AlgorithmConfig, EvalConfig, RLConfig, RolloutConfig
from sfumato.config.sections import ModelConfig

TRAJECTORY_PARTS = ("dynamics", "window")
SAMPLE_PARTS = ("solver", "timesteps", "old", "ema")
"""Parts of an algorithm that mean something to objectives of one kind alone."""


class DiffusionRolloutConfig(RolloutConfig):
    """How images or videos are drawn from the policy."""

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

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames of a sample."""
        return self.height, self.width, self.num_frames

    @model_validator(mode="after")
    def _size_fits(self) -> DiffusionRolloutConfig:
        check_size("rollout", *self.size)
        return self

    @model_validator(mode="after")
    def _guidance_fits(self) -> DiffusionRolloutConfig:
        if self.guidance_scale_2 is not None and self.guidance_scale == 1.0:
            raise ValueError("rollout.guidance_scale_2 means nothing when rollout.guidance_scale is 1: remove it")
        return self


class DiffusionAlgorithmConfig(AlgorithmConfig):
    """The RL algorithm as parts; a recipe presets all of them."""

    recipe: Literal[tuple(DIFFUSION_RECIPES)] = DEFAULT_RECIPE  # type: ignore[valid-type]
    """Preset of the parts below; any of their fields can be overridden."""
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
    def _parts_fit(self) -> DiffusionAlgorithmConfig:
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
    def _policies_fit(self) -> DiffusionAlgorithmConfig:
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
    def _policies_have_effect(self) -> DiffusionAlgorithmConfig:
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


class DiffusionEvalConfig(EvalConfig):
    """Evaluation without noise on prompts that training does not see, always with the same seeds."""

    num_inference_steps: int = Field(40, ge=1, le=1000)
    """Denoising steps of the evaluation."""
    guidance_scale: float | None = Field(None, ge=0)
    """Guidance of the evaluation; null takes the rollout's."""
    step_cache: float = Field(0.0, ge=0)
    """Threshold of MagCache (arXiv 2506.09045), which leaves out denoising steps that change little, here and not in
    training; its authors take 0.06 to 0.24, and 0 computes every step."""


class DiffusionRLConfig(RLConfig):
    """Reinforcement learning of diffusion models: Flow-GRPO and its relatives."""

    model: ModelConfig
    """Model."""
    rollout: DiffusionRolloutConfig
    """Rollout."""
    algorithm: DiffusionAlgorithmConfig
    """Algorithm."""
    eval: DiffusionEvalConfig = DiffusionEvalConfig()
    """Evaluation."""

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
        parts = [
            part for part in given if part in DiffusionAlgorithmConfig.model_fields and part not in {"recipe", *over}
        ]
        if recipe not in list(DIFFUSION_RECIPES) or recipe == before or not parts:
            return {}
        reason = (
            f"--algorithm.recipe {recipe}: the file sets {', '.join(parts)} of algorithm for its own recipe, {before}, "
            f"and what it sets lies over the parts of {recipe}: remove these lines from the file"
        )
        return {"algorithm": reason, **{f"algorithm.{part}": reason for part in parts}}

    @model_validator(mode="after")
    def _guidance_is_there(self) -> DiffusionRLConfig:
        if self.train.cfg_parallel_size > 1 and self.rollout.guidance_scale == 1.0:
            raise ValueError(
                "train.cfg_parallel_size shares the two branches of classifier-free guidance, but with "
                "rollout.guidance_scale 1 there is one, and both ranks would compute the same: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _rewards_take_videos(self) -> DiffusionRLConfig:
        for reward in self.reward.rewards if self.rollout.num_frames > 1 else ():
            reward.check_video()
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
