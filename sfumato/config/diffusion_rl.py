"""Configuration of RL of diffusion models: ``tasks/rl_diffusion.py`` and ``tasks/rl_diffusion_forward.py``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Variant, find_variants, refuse_needless
from sfumato.config.presets import RecipeAlgorithmConfig, RecipeRLConfig
from sfumato.config.recipes import FORWARD_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.rl import EvalConfig, RolloutConfig
from sfumato.config.sections import MAX_SECONDS, MAX_SIDE, GuidanceScale, ModelConfig, check_size, sound_size
from sfumato.errors import ConfigError

TRAJECTORIES = "sfumato.algorithms.objectives"
FORWARD_PROCESS = "sfumato.algorithms.forward_process"
TASKS = {TRAJECTORIES: "tasks/rl_diffusion.py", FORWARD_PROCESS: "tasks/rl_diffusion_forward.py"}
"""Where objectives stand, and the task that learns by them."""
RECIPES = {TRAJECTORIES: TRAJECTORY_RECIPES, FORWARD_PROCESS: FORWARD_RECIPES}


class DiffusionRolloutConfig(RolloutConfig):
    """How images or videos are drawn from the policy."""

    height: int = Field(512, ge=8, le=MAX_SIDE)
    """Height of the images in pixels."""
    width: int = Field(512, ge=8, le=MAX_SIDE)
    """Width of the images in pixels."""
    num_frames: int = Field(1, ge=1)
    """Frames of a video; 1 makes images."""
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Length of a sound, of a family that makes sound; null makes images or videos."""
    num_inference_steps: int = Field(10, ge=2, le=1000)
    """Denoising steps during training."""
    guidance_scale: GuidanceScale = 4.5
    """Classifier-free guidance in rollout and replay; 1 is none and halves the cost."""
    guidance_scale_2: GuidanceScale | None = None
    """Guidance of the second of two transformers (Wan 2.2, low noise levels), evaluation included; null is the same."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames of a sample; of a sound see ``sound_size``."""
        return (self.height, self.width, self.num_frames) if self.seconds is None else sound_size(self.seconds)

    @model_validator(mode="after")
    def _size_and_guidance_fit(self) -> DiffusionRolloutConfig:
        if self.seconds is not None:
            names = ("height", "width", "num_frames")
            refuse_needless(self, "rollout", names, "on sounds, whose length is rollout.seconds: remove it")
        check_size("rollout", *self.size)
        if self.guidance_scale_2 is not None and self.guidance_scale == 1.0:
            raise ValueError("rollout.guidance_scale_2 means nothing when rollout.guidance_scale is 1: remove it")
        return self


class DiffusionAlgorithmConfig(RecipeAlgorithmConfig):
    """What algorithms on trajectories and on the forward process share."""

    objectives: ClassVar[str]
    """Where its objectives stand."""

    objective: Any
    """Policy loss."""
    kl: Any
    """Penalty that keeps the policy near its reference."""
    reference: Annotated[Any, Variant("sfumato.algorithms.decay")] = "constant"
    """How fast the reference follows, once an iteration; a constant 1 leaves it the model before training."""

    @classmethod
    def recipes(cls) -> dict[str, dict[str, object]]:
        """Presets by name."""
        return RECIPES[cls.objectives]

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_task(cls, data: object) -> object:
        recipe = cls.recipe_in(data)
        objective = data.get("objective") if isinstance(data, dict) else None
        kind = objective.get("type") if isinstance(objective, dict) else objective
        for source, task in TASKS.items():
            if source == cls.objectives:
                continue
            if isinstance(recipe, str) and recipe in RECIPES[source]:
                raise ValueError(f"algorithm.recipe {recipe!r} is a recipe of another task: run {task}")
            if isinstance(kind, str) and kind in find_variants(source):
                raise ValueError(f"algorithm.objective: type {kind} is an objective of another task: run {task}")
        return data

    @model_validator(mode="after")
    def _guidance_is_one(self) -> DiffusionAlgorithmConfig:
        if "reference" in self.needed and self.reference_guidance_scale is not None and self.kl.coef > 0:
            raise ValueError(
                f"algorithm.kl.reference_guidance_scale: objective {self.objective.type} compares with the reference, "
                "too, and would see another guidance: set it to null"
            )
        return self

    @property
    def needed(self) -> frozenset[str]:
        """Policies that the objective compares with: of old, ema, reference."""
        return getattr(self.objective, "needs", frozenset())

    @property
    def compared(self) -> frozenset[str]:
        """Policies whose predictions the loss takes besides those of the trained one: of old, ema, reference."""
        return self.needed | ({"reference"} if self.kl.coef > 0 else frozenset())

    @property
    def other_policies(self) -> dict[str, Any]:
        """Decays of the policies that are kept besides the trained one, by name."""
        return {name: getattr(self, name) for name in sorted(self.compared)}

    @property
    def reference_guidance_scale(self) -> float | None:
        """Guidance of the reference's prediction, where the penalty gives it one of its own."""
        return getattr(self.kl, "reference_guidance_scale", None)

    def rows_per_sample(self, num_steps: int) -> int:
        """Trained steps or noise levels of a sample in the first of all iterations.

        Args:
            num_steps: ``rollout.num_inference_steps``.

        Raises:
            ValueError: when the schedule is too short for the window or the noise levels.
        """
        raise NotImplementedError

    def check_schedule(self, num_steps: int) -> None:
        """Raises ValueError when so many denoising steps are too few for the window or the noise levels."""
        self.rows_per_sample(num_steps)

    def _check_effect(self, decays: list[str], why: str = "") -> None:
        """Raises ValueError when the reference moves, or another decay is given, though nothing compares with it."""
        moves = self.reference.type != "constant" or self.reference.value != 1
        for name in [*decays, "reference"] if moves else decays:
            if name not in self.other_policies:
                remedy = "remove it" if name == "reference" else "set it to null"
                raise ValueError(
                    f"algorithm.{name} has no effect: neither objective {self.objective.type} nor algorithm.kl "
                    f"compares with that policy{why}: {remedy}"
                )


class DiffusionEvalConfig(EvalConfig):
    """Evaluation without noise on prompts that training does not see, always with the same seeds."""

    num_inference_steps: int = Field(40, ge=1, le=1000)
    """Denoising steps of the evaluation."""
    guidance_scale: GuidanceScale | None = None
    """Guidance of the evaluation; null takes the rollout's."""
    step_cache: float = Field(0.0, ge=0)
    """Threshold of MagCache (arXiv 2506.09045), which leaves out denoising steps that change little, here and not in
    training; its authors take 0.06 to 0.24, and 0 computes every step."""


class DiffusionRLConfig(RecipeRLConfig):
    """What both tasks share."""

    model: ModelConfig
    """Model."""
    rollout: DiffusionRolloutConfig
    """Rollout."""
    algorithm: DiffusionAlgorithmConfig
    """Algorithm."""
    eval: DiffusionEvalConfig = DiffusionEvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""

    @model_validator(mode="after")
    def _suits_the_rollout(self) -> DiffusionRLConfig:
        if self.train.cfg_parallel_size > 1 and self.rollout.guidance_scale == 1.0:
            raise ValueError(
                "train.cfg_parallel_size shares the two branches of classifier-free guidance, but with "
                "rollout.guidance_scale 1 there is one, and both ranks would compute the same: leave it out"
            )
        for reward in self.reward.rewards:
            if self.rollout.num_frames > 1:
                reward.check_video()
            else:
                reward.check_picture()
        return self

    @property
    def modality(self) -> str:  # type: ignore[override]
        """What is generated: "image", videos too, or "sound"."""
        return "image" if self.rollout.seconds is None else "sound"

    @property
    def scored_modalities(self) -> tuple[str, ...]:
        """As of ``RLConfig``; whether a video has a sound is seen when the model is loaded."""
        return ("image", "sound") if self.rollout.num_frames > 1 else (self.modality,)

    @property
    def trained_guidance_scale(self) -> float:
        """Classifier-free guidance of what the update predicts."""
        raise NotImplementedError

    def _check_schedule(self, part: str) -> None:
        try:
            self.algorithm.check_schedule(self.rollout.num_inference_steps)
        except ValueError as error:
            raise ValueError(f"algorithm.{part} and rollout.num_inference_steps: {error}") from error


class TrajectoryRolloutConfig(DiffusionRolloutConfig):
    """How trajectories of images or videos are drawn from the policy."""

    same_latent: bool = False
    """Start all samples of a group from the same latent, so that only the SDE noise tells them apart."""


class TrajectoryAlgorithmConfig(DiffusionAlgorithmConfig):
    """The RL algorithm as parts; a recipe presets all of them."""

    objectives: ClassVar[str] = TRAJECTORIES
    sample_with: ClassVar[str] = "policy"

    recipe: Literal[tuple(TRAJECTORY_RECIPES)] = "flow_grpo"  # type: ignore[valid-type]
    """Preset of the parts below; any of their fields can be overridden."""
    objective: Annotated[Any, Variant(TRAJECTORIES)]
    """Policy loss on the trained steps of trajectories."""
    kl: Annotated[Any, Variant("sfumato.algorithms.kl")]
    """Penalty that keeps the policy near its reference."""
    dynamics: Annotated[Any, Variant("sfumato.algorithms.dynamics")]
    """The stochastic denoising step."""
    window: Annotated[Any, Variant("sfumato.algorithms.windows")]
    """Which denoising steps are stochastic and trained."""
    off_policy: Annotated[Any, Variant("sfumato.algorithms.off_policy")] = "none"
    """What is done about samples of an older policy."""
    self_check: bool = True
    """Stop before the first update if replay and rollout differ by over a tenth of the clip range."""

    @model_validator(mode="after")
    def _parts_fit(self) -> TrajectoryAlgorithmConfig:
        if self.dynamics.type == "ode":
            raise ValueError(
                "algorithm.dynamics: type ode has no log-probabilities, which the objective needs; use sde or cps"
            )
        self._check_effect([])
        return self

    def check_schedule(self, num_steps: int) -> None:
        """As in ``DiffusionAlgorithmConfig``. Draws no window, for which torch would be loaded."""
        self.window.check(num_steps)

    def rows_per_sample(self, num_steps: int) -> int:
        """Trained steps of a sample; see ``DiffusionAlgorithmConfig``."""
        self.check_schedule(num_steps)
        return len(self.window.steps(num_steps, seed=0, iteration=0))


class TrajectoryRLConfig(DiffusionRLConfig):
    """Reinforcement learning of diffusion models on trajectories: Flow-GRPO and its relatives."""

    rollout: TrajectoryRolloutConfig
    """Rollout."""
    algorithm: TrajectoryAlgorithmConfig
    """Algorithm."""

    @property
    def trained_guidance_scale(self) -> float:
        """The rollout's, since its steps are replayed."""
        return self.rollout.guidance_scale

    @model_validator(mode="after")
    def _suits_the_window(self) -> TrajectoryRLConfig:
        self._check_schedule("window")
        return self


class ForwardAlgorithmConfig(DiffusionAlgorithmConfig):
    """The RL algorithm as parts; a recipe presets all of them."""

    objectives: ClassVar[str] = FORWARD_PROCESS

    recipe: Literal[tuple(FORWARD_RECIPES)] = "diffusion_nft"  # type: ignore[valid-type]
    """Preset of the parts below; any of their fields can be overridden."""
    objective: Annotated[Any, Variant(FORWARD_PROCESS)]
    """Policy loss on final samples that are noised anew."""
    kl: Annotated[Any, Variant("sfumato.algorithms.forward_kl")]
    """Penalty that keeps the policy near its reference."""
    solver: Annotated[Any, Variant("sfumato.algorithms.solvers")]
    """The deterministic sampler."""
    timesteps: Annotated[Any, Variant("sfumato.algorithms.timesteps")]
    """The noise levels at which samples are trained."""
    old: Annotated[Any, Variant("sfumato.algorithms.decay", optional=True)] = None
    """How fast the old policy follows, once an iteration; kept where it is needed or samples."""
    ema: Annotated[Any, Variant("sfumato.algorithms.decay", optional=True)] = None
    """The same for an averaged policy, which is not the average that train.ema_decay evaluates."""
    sample_with: Literal["policy", "old", "ema"] = "policy"
    """Whose samples are learned from."""

    @model_validator(mode="after")
    def _advantage_fits(self) -> ForwardAlgorithmConfig:
        takes = getattr(self.objective, "takes_both_signs", None)
        has = getattr(self.advantage, "has_both_signs", None)
        if None not in (takes, has) and takes != has:
            demand = "compares samples above 0 with samples below" if takes else "takes no advantage below 0"
            raise ValueError(
                f"algorithm.advantage: type {self.advantage.type} does not fit objective {self.objective.type}, which "
                f"{demand}: use "
                f"{'best_worst or group' if takes else 'raw or best, or set algorithm.objective.temperature'}"
            )
        return self

    @model_validator(mode="after")
    def _policies_fit(self) -> ForwardAlgorithmConfig:
        for policy, decay in self.other_policies.items():
            if decay is None:
                why = "algorithm.sample_with" if policy == self.sample_with else f"objective {self.objective.type}"
                raise ValueError(f"algorithm.{policy} is required by {why}: give the decay of that policy")
        decays = [name for name in ("old", "ema") if getattr(self, name) is not None]
        self._check_effect(decays, f", and algorithm.sample_with is {self.sample_with}")
        return self

    def check_lowest_advantage(self, lowest: float) -> None:
        """Raises ConfigError for an advantage below 0 where the objective weighs errors by it: that loss would have no
        lower bound."""
        if lowest < 0 and getattr(self.objective, "takes_both_signs", None) is False:
            raise ConfigError(
                f"algorithm.objective: {self.objective.type} weighs samples by their advantages, and one is "
                f"{lowest:.3g}: set algorithm.objective.temperature, or take rewards that are never below 0"
            )

    @property
    def other_policies(self) -> dict[str, Any]:
        """Decays of the policies that are kept besides the trained one, by name."""
        return {name: getattr(self, name) for name in sorted(self.compared | {self.sample_with} - {"policy"})}

    @property
    def whole_groups(self) -> bool:
        """Whether all trained samples of a group must be in one micro-batch."""
        return self.objective.whole_groups

    def rows_per_sample(self, num_steps: int) -> int:
        """Noise levels of a sample; see ``DiffusionAlgorithmConfig``."""
        return self.timesteps.num_levels(num_steps)


class ForwardRLConfig(DiffusionRLConfig):
    """Reinforcement learning of diffusion models on the forward process: DiffusionNFT and its relatives."""

    algorithm: ForwardAlgorithmConfig
    """Algorithm."""

    @property
    def trained_guidance_scale(self) -> float:
        """None: the prompt's branch predicts alone."""
        return 1.0

    @model_validator(mode="after")
    def _groups_fit(self) -> ForwardRLConfig:
        self._check_schedule("timesteps")
        algorithm = self.algorithm
        name = self.algorithm.objective.type
        group_size = self.rollout.n
        if not algorithm.whole_groups:
            return self
        if (self.train.global_batch_size or 0) % group_size:
            raise ValueError(
                f"objective {name} needs whole groups, so train.global_batch_size {self.train.global_batch_size} must "
                f"be a multiple of rollout.n {group_size}"
            )
        samples_per_group = algorithm.samples_per_group(group_size)
        if self.train.micro_batch_size < samples_per_group:
            raise ValueError(
                f"objective {name} needs whole groups, so train.micro_batch_size {self.train.micro_batch_size} must be "
                f"at least the {samples_per_group} trained samples of a group"
            )
        return self
