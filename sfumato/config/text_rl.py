"""Configuration of ``tasks/rl_text.py``: reinforcement learning of language models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Variant, refuse_needless
from sfumato.config.critic import CriticConfig
from sfumato.config.paths import FilePath, ModelPath
from sfumato.config.presets import RecipeAlgorithmConfig, RecipeRLConfig
from sfumato.config.rl import MAX_SAMPLES, EvalConfig, RolloutConfig
from sfumato.config.runtime import STALENESS
from sfumato.config.sections import TrainConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.errors import ConfigError

SUM_OF_LENGTHS = "the sum of data.max_prompt_tokens and rollout.max_new_tokens (or eval.max_new_tokens)"
"""What a model must have positions for, in messages."""


class TextRolloutConfig(RolloutConfig):
    """How completions are drawn from the policy."""

    n: int = Field(ge=1)
    """Samples per prompt: the group size; 1 only where advantages compare no group."""
    micro_batch_size: int = Field(MAX_SAMPLES, ge=1)
    """Samples that a rank's engine is given together; by default all of an iteration's, which it batches as it has
    room."""
    kind: Annotated[Any, Variant("sfumato.rollout.kinds")] = "single_turn"
    """What a sample is: one completion, or several turns with tools, an environment or an agent."""
    engine: Annotated[Any, Variant("sfumato.rollout.engines")] = "embedded"
    """What generates text: the embedded engine, vLLM or SGLang."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens after the prompt, those that tools gave included."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits, in rollout and update alike."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the likeliest tokens with this probability together are drawn; 1 leaves out none."""
    top_k: int = Field(0, ge=0)
    """Only so many of the likeliest tokens are drawn; 0 leaves out none."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end an answer once it has drawn them, in rollout and evaluation, besides the tokens that end one. The
    tokens of such a text are learned from; for rewards and tools the answer ends before it."""
    dump: bool = False
    """Keep every sample with its tokens, log-probabilities, rewards and advantages in rollouts/ of the run folder."""
    rollout_only: bool = False
    """Draw, score and dump, and learn nothing: the weights stay as they are."""
    load_dump: FilePath | None = None
    """Run folder whose rollouts are learned from, step by step, with their rewards, in the place of drawing."""
    tolerance: float | None = Field(None, gt=0)
    """Largest difference of the log-probability of a token in an engine with weights of its own from the actor's, in
    nats, beyond which the run stops after weights were sent; null measures what rounding does to the model."""
    max_extra_groups: int = Field(0, ge=0)
    """Dynamic sampling (DAPO): most groups of an iteration that are drawn in the place of those without spread."""
    over_sampling_batch_size: int | None = Field(None, ge=2)
    """Groups that are drawn at a time, more than num_prompts: an iteration ends with the num_prompts-th group that has
    ended, and the others are aborted. null draws num_prompts."""
    partial_rollout: bool = False
    """Keep what over_sampling_batch_size leaves: it goes on in the next iteration, under the new weights. Groups with a
    token that more than max_staleness updates are ahead of (4, where that is null) are dropped."""

    @property
    def staleness(self) -> int:
        """How far a sampler may lag behind the actor. With partial rollouts ``max_staleness`` bounds the age of tokens,
        of which a lag takes no more than half: what is under way when it is drawn must have some left to go on."""
        if not self.partial_rollout:
            return super().staleness
        return max(self.max_age // 2, 1) if self.async_strategy == "fully-async" else STALENESS[self.async_strategy]

    @property
    def leaves_unfinished(self) -> bool:
        """Whether an iteration leaves groups to the next, or at least the number of those that were begun."""
        return self.over_sampling_batch_size is not None

    @property
    def is_learned_from(self) -> bool:
        """Whether the policy learns from what is drawn."""
        return not self.rollout_only

    @property
    def max_age(self) -> int:
        """Most updates that the policy may be ahead of a token of a partial rollout."""
        return STALENESS["fully-async"] if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _dumps_fit(self) -> TextRolloutConfig:
        if self.load_dump is None:
            return self
        if self.rollout_only or self.over_sampling_batch_size is not None:
            name = "rollout_only" if self.rollout_only else "over_sampling_batch_size"
            raise ValueError(f"rollout.load_dump draws nothing, so rollout.{name} means nothing: remove one of them")
        if self.engine.type != "embedded" or not self.hybrid_engine:
            raise ValueError(
                "rollout.load_dump draws nothing, so it needs no engine nor sampler of its own: leave rollout.engine "
                "and rollout.hybrid_engine out"
            )
        return self

    @model_validator(mode="after")
    def _over_sampling_fits(self) -> TextRolloutConfig:
        at_a_time = self.over_sampling_batch_size
        if at_a_time is None:
            if self.partial_rollout:
                raise ValueError(
                    "rollout.partial_rollout keeps what rollout.over_sampling_batch_size leaves: set that above "
                    f"num_prompts {self.num_prompts}"
                )
            return self
        if at_a_time <= self.num_prompts or at_a_time * self.n > MAX_SAMPLES:
            raise ValueError(
                f"rollout.over_sampling_batch_size {at_a_time} must be above num_prompts {self.num_prompts}, and with "
                f"n {self.n} at most {MAX_SAMPLES:,} samples: raise it, lower it, or leave it out"
            )
        if self.partial_rollout and self.max_age <= self.staleness:
            raise ValueError(
                f"rollout.max_staleness {self.max_age} drops every partial rollout, which with async_strategy "
                f"{self.async_strategy} is at least {self.staleness + 1} updates old: raise it, or leave it out"
            )
        requirements = {
            "kind": (self.kind.type, "single_turn", "a turn of a tool or an environment cannot be taken up again"),
            "max_extra_groups": (self.max_extra_groups, 0, "groups are not drawn one after the other"),
        }
        for name, (value, needed, why) in requirements.items():
            if value != needed:
                raise ValueError(f"rollout.over_sampling_batch_size is for {name} {needed}, not {value}: {why}")
        if self.micro_batch_size < self.num_prompts * self.n:
            raise ValueError(
                f"rollout.micro_batch_size {self.micro_batch_size} cuts an iteration into parts, but with "
                "rollout.over_sampling_batch_size it is drawn as a whole: leave it out"
            )
        return self


class TextAlgorithmConfig(RecipeAlgorithmConfig):
    """The RL algorithm as parts; a recipe presets all of them."""

    recipe: Literal[tuple(TEXT_RECIPES)] = "grpo"  # type: ignore[valid-type]
    """Preset of the parts below; any of their fields can be overridden."""
    objective: Annotated[Any, Variant("sfumato.algorithms.token_objectives")]
    """Policy loss of each token."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    """How losses of tokens become one: their mean over the optimiser step, the mean over samples of their tokens' mean
    or sum, or of the sum divided by rollout.max_new_tokens (Dr. GRPO)."""
    token_advantage: Annotated[Any, Variant("sfumato.algorithms.token_advantages")] = "sample"
    """From the advantages or rewards of samples to those of their tokens."""
    kl: Annotated[Any, Variant("sfumato.algorithms.token_kl")] = "token"
    """Penalty that keeps the policy near its reference."""
    off_policy: Annotated[Any, Variant("sfumato.algorithms.off_policy")] = "none"
    """What is done about tokens that another policy drew, or the same by other kernels."""
    entropy_coef: float = 0.0
    """Factor of the entropy of each token's distribution, which is added to what is maximised."""
    reference: Annotated[Any, Variant("sfumato.algorithms.decay")] = "constant"
    """How fast the reference follows, once an iteration; a constant 1 leaves it the model before training."""

    teacher: ModelPath | None = None
    """Folder of another model, which then stands in the place of the reference: on-policy distillation."""
    value_clip_range: float | None = Field(0.5, gt=0)
    """A critic's value may move so far from the one before the update; null bounds nothing."""

    @classmethod
    def recipes(cls) -> dict[str, dict[str, object]]:
        """Presets by name."""
        return TEXT_RECIPES

    @property
    def kl_in_reward(self) -> bool:
        """Whether the penalty is taken from rewards."""
        return self.kl.coef > 0 and self.kl.where == "reward"

    @property
    def kl_before_baseline(self) -> bool:
        """Whether it is taken from rewards that are compared within groups then."""
        return self.kl_in_reward and not self.token_advantage.takes_rewards

    @property
    def other_policies(self) -> dict[str, Any]:
        """Decays of the policies that are kept besides the trained one, by name."""
        return {"reference": self.reference} if self.kl.coef > 0 else {}

    @model_validator(mode="after")
    def _parts_fit(self) -> TextAlgorithmConfig:
        raw = self.advantage.type == "raw"
        if self.token_advantage.takes_rewards != raw:
            takes = "takes rewards as they are" if not raw else "takes advantages of samples"
            raise ValueError(
                f"algorithm.token_advantage: type {self.token_advantage.type} {takes}: set algorithm.advantage to "
                f"{'group or rloo' if raw else 'raw'}"
            )
        if self.teacher is not None and (self.kl.coef == 0 or self.reference != type(self.reference)()):
            raise ValueError(
                "algorithm.teacher stands in the place of the reference, which algorithm.kl compares with: set kl.coef "
                "above 0, and leave algorithm.reference out"
            )
        if self.recipe == "distillation" and self.teacher is None:
            raise ValueError("algorithm.teacher: recipe distillation learns from a teacher: give its model folder")
        if not self.token_advantage.needs_values:
            why = "without a critic, which algorithm.token_advantage gae has: remove it"
            refuse_needless(self, "algorithm", ("value_clip_range",), why)
        if self.kl_before_baseline and (self.advantage.type not in ("group", "rloo") or self.drop_no_spread):
            field = "advantage" if self.advantage.type not in ("group", "rloo") else "drop_no_spread"
            raise ValueError(
                f"algorithm.{field}: a penalty in the reward (algorithm.kl.where) is taken before the baseline of "
                "algorithm.advantage group or rloo, and gives all groups spread: set advantage to one of these, and "
                "drop_no_spread to false"
            )
        return self


class TextRLTrainConfig(TrainConfig):
    """The optimiser, the batch, the run folder and the checkpoints."""

    rmpad_with_pos_ids: ClassVar[bool] = True

    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Fill micro-batches up to so many tokens, prompts included, instead of micro_batch_size samples; a longer sample
    has one to itself."""
    share_prompts: bool = True
    """Compute a prompt once for all of its samples in a micro-batch, where the model's attention allows it."""
    chunked_loss: bool = False
    """Compute the logits for some tokens at a time, twice: less memory, some more time."""
    pad_to_multiple_of: int | None = Field(None, ge=1)
    """Fill rows up to a multiple of so many tokens, so that compiled blocks see few lengths; null: 256 where blocks are
    compiled, else 1. With max_tokens_per_micro_batch nearly all rows have one length."""
    probe: Literal["stop", "warn"] = "stop"
    """What to do when, before the first step, a few documents as the run sends them through the model give something
    else than through transformers' own module one by one."""


class TextRLEvalConfig(EvalConfig):
    """Evaluation on prompts that training does not see, always with the same seeds."""

    temperature: float = Field(0.0, ge=0)
    """Temperature of the evaluation; 0 takes the likeliest token each time."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer of the evaluation; null is the rollout's."""


class TextRLConfig(RecipeRLConfig):
    """Reinforcement learning of language models: GRPO and its relatives."""

    model: LanguageModelConfig
    """Model."""
    data: TextPromptDataConfig
    """Prompts."""
    rollout: TextRolloutConfig
    """Rollout."""
    algorithm: TextAlgorithmConfig
    """Algorithm."""
    train: TextRLTrainConfig
    """Training."""
    eval: TextRLEvalConfig = TextRLEvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""
    critic: CriticConfig = CriticConfig()  # pyright: ignore[reportCallIssue]
    """The critic of algorithm.token_advantage gae."""

    @property
    def modality(self) -> str:  # type: ignore[override]
        """What is generated, as rewards name it."""
        return self.rollout.kind.modality

    @property
    def sampler_evaluates(self) -> bool:
        """Whether an engine with weights of its own draws the evaluations, too: not from averages, which it is not
        sent."""
        return self.rollout.engine.is_server and not self.train.ema_decay

    def refuse_described_model(self) -> None:
        """Raises ConfigError where an engine would load a model of which there is a description alone.

        No validator, so that ``sfumato check`` predicts such a run before its model is downloaded.
        """
        if self.rollout.engine.type != "embedded" and self.model.model_path is None:
            raise ConfigError(
                f"rollout.engine {self.rollout.engine.type} loads the model from its folder: set model.model_path in "
                "the place of model.config_path"
            )

    @property
    def num_updates(self) -> int:
        """Optimiser steps of the run, those that have nothing to learn from included."""
        samples = self.rollout.num_prompts * self.rollout.n
        assert self.train.max_steps is not None  # RL has no epochs: a validator asks for it
        return self.train.max_steps * (samples // (self.train.global_batch_size or samples))

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sample, prompt included."""
        return self.data.max_prompt_tokens + max(self.rollout.max_new_tokens, self.eval.max_new_tokens or 0)

    @model_validator(mode="after")
    def _groups_fit(self) -> TextRLConfig:
        algorithm = self.algorithm
        rollout = self.rollout
        if rollout.n == 1 and algorithm.advantage.type != "raw":
            raise ValueError(
                f"rollout.n 1: algorithm.advantage {algorithm.advantage.type} compares the samples of a group, and one "
                "alone teaches nothing: set rollout.n to 2 or more, or take a recipe that compares none, such as ppo"
            )
        if rollout.n == 1 and algorithm.drop_no_spread:
            raise ValueError(
                "rollout.n 1: algorithm.drop_no_spread leaves out groups whose rewards are all equal, which those of "
                "one sample always are: set it to false"
            )
        if rollout.max_extra_groups and not algorithm.drop_no_spread:
            raise ValueError(
                "rollout.max_extra_groups draws groups in the place of those without spread, but "
                "algorithm.drop_no_spread false trains on these: set one of them back"
            )
        return self

    @model_validator(mode="after")
    def _text_fits(self) -> TextRLConfig:
        if (self.rollout.top_p < 1 or self.rollout.top_k > 0) and not self.algorithm.off_policy.uses_proximal:
            raise ValueError(
                "rollout.top_p and rollout.top_k draw from another distribution than the one that is trained: leave "
                "them out, or correct for it with algorithm.off_policy decoupled or rejection"
            )
        default = CriticConfig()  # pyright: ignore[reportCallIssue]
        if not self.algorithm.token_advantage.needs_values and self.critic != default:
            raise ValueError(
                "critic: algorithm.token_advantage "
                f"{self.algorithm.token_advantage.type} has none: remove it, or take gae"
            )
        if self.rollout.engine.type != "embedded" and self.rollout.hybrid_engine:
            raise ValueError(
                f"rollout.engine {self.rollout.engine.type} has weights of its own: set rollout.hybrid_engine to false"
            )
        if self.rollout.load_dump is not None and self.runtime.backend == "ray":
            raise ValueError(
                "rollout.load_dump is for runtime.backend in_process: nothing is drawn that pools could share"
            )
        if self.rollout.rollout_only and self.train.load_checkpoint_path not in (None, "new"):
            raise ValueError(
                "rollout.rollout_only learns nothing, so there is nothing to go on from: give the weights as "
                "model.model_path, and leave train.load_checkpoint_path out"
            )
        if self.train.expert_bias_rate and not self.rollout.hybrid_engine:
            raise ValueError(
                "train.expert_bias_rate moves biases of routers, which a sampler with weights of its own "
                "(rollout.hybrid_engine false) is not sent, so that it would choose other experts: set it to 0"
            )
        if self.data.data_type.has_images:
            self._take_images()
        if self.train.pipeline_parallel_size > 1:
            raise ValueError("train.pipeline_parallel_size: RL of language models takes all other meshes; set it to 1")
        return self

    def _take_images(self) -> None:
        """Raises ValueError for parts that do not know prompts with images."""
        parts = {"rollout.kind": self.rollout.kind, "rollout.engine": self.rollout.engine}
        parts["algorithm.token_advantage"] = self.algorithm.token_advantage
        fitting = {"rollout.kind": "single_turn", "rollout.engine": "embedded", "algorithm.token_advantage": "sample"}
        takes_media = {name: getattr(part, "takes_images", False) for name, part in parts.items()}
        others = {*self.data.data_type.media} - {"image"}
        media = "videos and audio" if others else "images"
        takes_media["rollout.engine"] &= not others or getattr(self.rollout.engine, "takes_other_media", False)
        takes_media[
            "algorithm.token_advantage"
        ] = not self.algorithm.token_advantage.needs_values  # a critic reads text alone
        for name, part in parts.items():
            if not takes_media[name]:
                raise ValueError(
                    f"{name} {part.type} takes no {media} in prompts, which data.data_type {self.data.data_type.type} "
                    f"has: take one that does, such as {fitting[name]}"
                )
