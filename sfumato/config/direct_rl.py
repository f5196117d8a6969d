"""Configuration of ``tasks/rl_diffusion_direct.py``: RL of diffusion models by the gradient of rewards."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Variant, find_variants, refuse_needless
from sfumato.config.diffusion_rl import DiffusionRLConfig, DiffusionRolloutConfig
from sfumato.config.open_mappings import JsonObject
from sfumato.config.presets import RecipeAlgorithmConfig
from sfumato.config.recipes import DIFFUSION_RECIPES, DIRECT_RECIPES

# Nothing is compared within groups, and nothing is drawn by another process: what other tasks choose for that is no
# field here, but a constant that shared code reads.
# pyright: reportIncompatibleVariableOverride=false


class DirectRolloutConfig(DiffusionRolloutConfig):
    """How images or videos are drawn from the policy, with gradient."""

    n: int = Field(1, ge=1)
    """Samples per prompt."""
    micro_batch_size: int = Field(8, ge=1)
    """Samples that an evaluation draws together; training draws train.micro_batch_size."""
    num_inference_steps: int = Field(20, ge=1, le=1000)
    """Denoising steps during training."""
    with_reward: ClassVar[bool] = True
    hybrid_engine: ClassVar[bool] = True
    async_strategy: ClassVar[str] = "sync"
    max_staleness: ClassVar[None] = None


class DirectAlgorithmConfig(RecipeAlgorithmConfig):
    """Which steps the gradient of the reward flows through; a recipe presets it."""

    recipe: Literal[tuple(DIRECT_RECIPES)] = "draft"  # type: ignore[valid-type]
    """Preset of the fields below; any of them can be overridden."""
    steps: Annotated[Any, Variant("sfumato.algorithms.reward_gradients")]
    """The differentiated steps."""
    solver: Annotated[Any, Variant("sfumato.algorithms.solvers")]
    """The deterministic sampler."""
    reward_limit: float | None = None
    """Total reward from which on a sample has no gradient; null: none. The loss is then max(limit - reward, 0)."""
    control_words: list[str] | None = Field(None, min_length=2, max_length=2)
    """Two texts, [positive, negative], that are put in front of the prompt, and the difference of whose rewards is
    optimised (SRPO, arXiv 2509.06942), such as ["Realistic photo.", "CG render."]."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the penalty that keeps the policy near the model before training: the mean squared difference of their
    velocities at the differentiated steps, where they see the same latents."""
    advantage: ClassVar[None] = None
    drop_no_spread: ClassVar[bool] = True

    @classmethod
    def recipes(cls) -> dict[str, JsonObject]:
        """Presets by name."""
        return DIRECT_RECIPES

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_task(cls, data: object) -> object:
        recipe = cls.recipe_in(data)
        if isinstance(recipe, str) and recipe in DIFFUSION_RECIPES:
            raise ValueError(
                f"algorithm.recipe {recipe!r} is a recipe of another task: run tasks/rl_diffusion.py or "
                "tasks/rl_diffusion_forward.py"
            )
        return data

    @model_validator(mode="after")
    def _has_words_for_both_directions(self) -> DirectAlgorithmConfig:
        if self.steps.type == "direct_align" and self.control_words is None:
            raise ValueError(
                "algorithm.steps direct_align scores a sample by the difference that algorithm.control_words make: set "
                'two texts, [positive, negative], such as ["Realistic photo.", "CG render."]'
            )
        return self

    @property
    def num_passes(self) -> int:
        """Backward passes of each sample in an iteration."""
        return self.steps.num_passes

    @property
    def compared(self) -> frozenset[str]:
        """Policies whose predictions the loss takes besides those of the trained one."""
        return frozenset({"reference"} if self.kl_coef > 0 else ())

    @property
    def other_policies(self) -> dict[str, Any]:
        """Decays of the policies that are kept besides the trained one, by name."""
        frozen = find_variants("sfumato.algorithms.decay")["constant"]()
        return dict.fromkeys(self.compared, frozen)

    def rows_per_sample(self, num_steps: int) -> int:
        """Most forward passes of a sample that wait for the backward pass. Raises ValueError for a short schedule."""
        return self.steps.max_differentiated(num_steps)


class DirectRLConfig(DiffusionRLConfig):
    """Reinforcement learning of diffusion models by the gradient of differentiable rewards: DRaFT and its relatives."""

    rollout: DirectRolloutConfig
    """Rollout."""
    algorithm: DirectAlgorithmConfig
    """Algorithm."""

    @property
    def trained_guidance_scale(self) -> float:
        """The rollout's, since its steps are differentiated."""
        return self.rollout.guidance_scale

    @property
    def optimised_rewards(self) -> list[Any]:
        """The rewards whose gradient is followed."""
        return [reward for reward in self.reward.rewards if not reward.evaluation_only and reward.weight != 0]

    @model_validator(mode="after")
    def _schedule_fits(self) -> DirectRLConfig:
        try:
            self.algorithm.rows_per_sample(self.rollout.num_inference_steps)
        except ValueError as error:
            raise ValueError(f"algorithm.steps and rollout.num_inference_steps: {error}") from error
        return self

    @model_validator(mode="after")
    def _rewards_have_gradients(self) -> DirectRLConfig:
        for number, reward in enumerate(self.reward.rewards):
            if reward not in self.optimised_rewards:
                continue
            if not hasattr(reward, "score_pixels"):
                differentiable = [
                    name for name, cls in find_variants("sfumato.rewards").items() if hasattr(cls, "score_pixels")
                ]
                raise ValueError(
                    f"reward.rewards.{number}: {reward.type} has no gradient: set its evaluation_only, and optimise "
                    f"one of {', '.join(differentiable)}; other rewards are for tasks/rl_diffusion.py"
                )
            if self.algorithm.control_words is not None and not getattr(reward, "reads_prompt", False):
                raise ValueError(
                    f"algorithm.control_words: {reward.type} does not read the prompt, so that the difference would be "
                    f"0: leave reward.rewards.{number} out, or the words"
                )
            if reward.normalise in ("group", "batch"):
                raise ValueError(
                    f"reward.rewards.{number}.normalise {reward.normalise} makes rewards of other samples part of the "
                    "gradient: take none or a range [low, high]"
                )
        if self.reward.combination.type != "weighted_sum":
            raise ValueError(
                f"reward.combination {self.reward.combination.type} has no gradient here: take weighted_sum"
            )
        return self

    @model_validator(mode="after")
    def _stays_in_this_process(self) -> DirectRLConfig:
        if self.runtime.non_defaults:
            raise ValueError(
                "runtime: this task draws, scores and learns in one pass, so that it has no roles to place: remove the "
                "section; several processes are started by torchrun (bash train.sh)"
            )
        if self.train.ranks_per_sample > 1:
            raise ValueError(
                "train: gradients flow back through latents here, which ranks that share a sample (cfg, tensor, "
                "ulysses, ring, pipeline parallelism) do not add up: set those sizes to 1, and share the model by "
                "train.data_parallel_mode fsdp2"
            )
        if self.train.data_parallel_mode == "fsdp1":
            raise ValueError(
                "train.data_parallel_mode fsdp1 reduces gradients once for each backward pass, in which the model "
                "runs several times here: take fsdp2"
            )
        if self.model.offload_idle:
            raise ValueError(
                "model.offload_idle would put the autoencoder aside before the backward pass through it: leave it out"
            )
        refuse_needless(
            self.train,
            "train",
            ("global_batch_size",),
            "here, where an iteration is one optimiser step on rollout.num_prompts x rollout.n samples: remove it",
        )
        return self
