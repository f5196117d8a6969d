"""What every task of reinforcement learning shares, whatever it generates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant, refuse_needless
from sfumato.config.paths import FilePath
from sfumato.config.runtime import STALENESS, RuntimeConfig, Strategy
from sfumato.config.sections import CHANGED_WEIGHTS, MOST_SOURCE_IMAGES, GlyphConfig, TrainConfig


class PromptDataConfig(Section):
    """Prompts to train and to evaluate on."""

    data_type: Literal["prompts", "glyphs"] = "prompts"
    """prompts reads files; glyphs makes captions of words, training on some and evaluating on held-out ones."""
    train_path: FilePath | None = None
    """Prompts: a .txt file with one a line, or .jsonl / .parquet with a column `prompt`; other columns are metadata."""
    eval_path: FilePath | None = None
    """Prompts of the evaluation, in the same format."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    source_image_key: str = "source_image"
    """Column of the image that is edited or animated, if the model takes one: a path relative to the file, or bytes. A
    list holds several images."""
    max_source_images: int = Field(1, ge=1, le=MOST_SOURCE_IMAGES)
    """Most source images of a prompt; more than 1 for models that take several, where all prompts have equally many."""
    glyphs: GlyphConfig = GlyphConfig()  # pyright: ignore[reportCallIssue]
    """Words when data_type is glyphs."""

    @model_validator(mode="after")
    def _has_source(self) -> PromptDataConfig:
        if self.data_type == "prompts" and (self.train_path is None or self.eval_path is None):
            raise ValueError("data.train_path and data.eval_path are required when data.data_type is prompts")
        if self.data_type == "glyphs":
            why = "when data.data_type is glyphs, which makes words and reads no file: remove it, or take prompts"
            refuse_needless(self, "data", ("train_path", "eval_path", "max_source_images"), why)
        return self


MAX_SAMPLES = 2**20
"""Most samples of one iteration."""


class RolloutConfig(Section):
    """How many samples are drawn from the policy, and by which processes."""

    num_prompts: int = Field(ge=1)
    """Prompts (groups) of one iteration, over all processes."""
    n: int = Field(ge=2)
    """Samples per prompt: the group size."""
    micro_batch_size: int = Field(ge=1)
    """Samples generated together in one process."""
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
    def staleness(self) -> int:
        """``max_staleness``, given or preset."""
        return STALENESS[self.async_strategy] if self.max_staleness is None else self.max_staleness

    @property
    def is_learned_from(self) -> bool:
        """Whether the policy learns from what is drawn."""
        return True

    @property
    def leaves_unfinished(self) -> bool:
        """Whether an iteration leaves samples to the next that are under way."""
        return False

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
    def _number_fits(self) -> RolloutConfig:
        if self.num_prompts * self.n > MAX_SAMPLES:
            raise ValueError(
                f"rollout.num_prompts {self.num_prompts} x rollout.n {self.n} are {self.num_prompts * self.n:,} "
                f"samples of one iteration, more than {MAX_SAMPLES:,}: lower one of them"
            )
        return self


class RewardConfig(Section):
    """What is optimised and what is watched."""

    rewards: list[Annotated[Any, Variant("sfumato.rewards")]] = Field(min_length=1)
    """Rewards; what is optimised is a combination of those that are not evaluation_only."""
    combination: Annotated[Any, Variant("sfumato.rewards.scoring.combinations")] = "weighted_sum"
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
    """The RL algorithm: what all have, however the policy learns from advantages."""

    advantage: Annotated[Any, Variant("sfumato.algorithms.advantages")]
    """Function from rewards to advantages."""
    drop_no_spread: bool = True
    """Leave out groups whose rewards are all equal; false trains on them where there is a KL penalty."""

    @property
    def whole_groups(self) -> bool:
        """Whether all trained samples of a group must be in one micro-batch."""
        return False

    def samples_per_group(self, group_size: int) -> int:
        """Most samples of a group of that size that are trained on."""
        chosen = getattr(self.advantage, "top", group_size) + getattr(self.advantage, "bottom", 0)
        return min(chosen, group_size)


class EvalConfig(Section):
    """Evaluation on prompts that training does not see, always with the same seeds."""

    every_steps: int = Field(10, ge=1)
    """Iterations between evaluations; there is one before the first and one after the last."""
    num_prompts: int = Field(64, ge=1)
    """Prompts evaluated, the first of the evaluation set."""
    num_saved: int = Field(12, ge=0)
    """Evaluation samples kept at each evaluation, for the report."""
    num_saved_groups: int = Field(2, ge=0)
    """Groups of training samples kept at each evaluation: the iteration's first ones, over all processes."""
    seed: int = Field(1234, ge=0)
    """Seed of the evaluation's samples."""


class RLConfig(Section):
    """Sections of every RL task. A task narrows those that know what is generated: model, rollout, algorithm, eval."""

    modality: ClassVar[str] = ""
    """What is generated, as rewards name it in their ``modality``; empty leaves that open."""

    model: Section
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
    eval: EvalConfig = EvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""
    runtime: RuntimeConfig = RuntimeConfig()  # pyright: ignore[reportCallIssue]
    """Processes."""

    @property
    def sampler_evaluates(self) -> bool:
        """Whether a sampler of its own draws the evaluations, too, and not the actor."""
        return False

    @model_validator(mode="after")
    def _batches_fit(self) -> RLConfig:
        if self.train.max_steps is None:
            raise ValueError("train.max_steps (the number of RL iterations) is required")
        num_ranks = max(self.runtime.actor_processes // self.train.ranks_per_sample, 1)
        for name, count in (("rollout", self.rollout.num_prompts), ("eval", self.eval.num_prompts)):
            if count < num_ranks:
                raise ValueError(
                    f"{name}.num_prompts {count} leaves some of the {num_ranks} data-parallel processes without work"
                )
        if self.eval.num_saved_groups > self.rollout.num_prompts and "num_saved_groups" in self.eval.non_defaults:
            raise ValueError(
                f"eval.num_saved_groups {self.eval.num_saved_groups}: an iteration has rollout.num_prompts "
                f"{self.rollout.num_prompts} groups"
            )
        # all ranks gather sharded weights together: one with fewer forward passes would leave the others waiting
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
        if getattr(getattr(self.model, "lora", None), "dropout", 0) > 0:
            raise ValueError("model.lora.dropout must be 0 in RL: replay and rollout would be different policies")
        if getattr(getattr(self.model, "lora", None), "changes_weights", False):
            raise ValueError(f"model.lora.variant: {CHANGED_WEIGHTS}")
        return self

    @property
    def scored_modalities(self) -> tuple[str, ...]:
        """The kinds of samples that rewards may score here."""
        return (self.modality,)

    @model_validator(mode="after")
    def _rewards_fit(self) -> RLConfig:
        if not self.rollout.with_reward:
            why = "with rollout.with_reward false, where nothing is generated while rewards are awaited: remove it"
            refuse_needless(self.reward, "reward", ("max_pending",), why)
        for number, reward in enumerate(self.reward.rewards):
            if self.modality and not any(map(reward.scores, self.scored_modalities)):
                raise ValueError(
                    f"reward.rewards.{number}: {reward.type} scores samples of another kind ({reward.kinds}) than this "
                    f"task generates ({self.modality}): remove it"
                )
            if reward.evaluation_only and (reward.weight != 1 or reward.normalise != "none"):
                name = "weight" if reward.weight != 1 else "normalise"
                raise ValueError(
                    f"reward.rewards.{number}.{name} has no effect, since {reward.label!r} is evaluation_only: "
                    "remove one of them"
                )
        if all(reward.evaluation_only for reward in self.reward.rewards):
            raise ValueError("reward.rewards: all rewards are evaluation_only, so nothing would be optimised")
        standardised = [reward.label for reward in self.reward.rewards if reward.normalise != "none"]
        if getattr(self.algorithm.advantage, "by_reward", False) and (
            standardised or self.reward.combination.type != "weighted_sum"
        ):
            setting = f"normalise of {standardised[0]!r}" if standardised else "reward.combination"
            raise ValueError(
                f"algorithm.advantage: type {self.algorithm.advantage.type} standardises and adds up the rewards by "
                f"itself, so {setting} would mean nothing: leave it out"
            )
        # rewards score micro-batches, so one must hold whole groups
        groupwise = [reward.label for reward in self.reward.rewards if reward.groupwise]
        if groupwise and self.rollout.micro_batch_size % self.rollout.n:
            raise ValueError(
                f"reward {groupwise[0]!r} scores whole groups, so rollout.micro_batch_size "
                f"{self.rollout.micro_batch_size} must be a multiple of rollout.n {self.rollout.n}"
            )
        return self

    @model_validator(mode="after")
    def _roles_fit(self) -> RLConfig:
        pool = self.runtime.pools.sampler
        runtime = self.runtime
        if self.rollout.hybrid_engine and "sampler" in runtime.pools.non_defaults:
            raise ValueError(
                "runtime.pools.sampler: with rollout.hybrid_engine the actor's processes sample: remove it, or set "
                "hybrid_engine to false"
            )
        if self.rollout.hybrid_engine and "weight_sync" in runtime.non_defaults:
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
        num_ranks = pool.processes // parallel.ranks_per_sample
        if self.rollout.num_prompts < num_ranks:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} leaves some of the sampler's {num_ranks} "
                "data-parallel processes without work"
            )
        if parallel.data_parallel_mode != "ddp" and self.rollout.num_prompts % num_ranks:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} is not a multiple of the sampler's {num_ranks} "
                f"data-parallel processes, which make their passes together with data_parallel_mode "
                f"{parallel.data_parallel_mode}: change it, or take runtime.pools.sampler.parallel "
                "{data_parallel_mode: ddp}"
            )
        return self
