"""Builds a configuration's model on the meta device and predicts the memory of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.algorithms.decay import FROZEN
from sfumato.commands.check_diffusion_rl import add_phases
from sfumato.commands.check_text_rl import add_critic, add_drawing, add_previous
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitDpoConfig
from sfumato.config.load import load_maker
from sfumato.config.open_mappings import Keywords
from sfumato.config.parallel import ParallelConfig
from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.config.text import LanguageModelConfig, TrainTextConfig, TrainTextDpoConfig, TrainTextKtoConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import ConfigError, UserError
from sfumato.models.diffusion.base import DiffusionModel, set_output, set_source_images
from sfumato.models.diffusion.encoders import check_data_type
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.estimate.memory_plan import Planned, RankMemory, counts_compiled, plan_memory
from sfumato.models.estimate.meta_models import (
    diffusion_model_on_meta,
    plan_autoencoder,
    plan_diffusion_model,
    plan_language_model,
    plan_scalar_model,
    plan_text_policy,
)
from sfumato.parallel.dropout import refuse_unkeyed_dropout
from sfumato.parallel.layout import Layout
from sfumato.rollout.diffusion.policy import check_rewards
from sfumato.tracking.progress import Progress

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
    from sfumato.config.dit import TrainDitConfig
    from sfumato.config.tasks import TaskConfig
    from sfumato.config.text_data import TextTrainConfig
    from sfumato.config.text_rl import TextRLTrainConfig

MOST_RANKS = 4096
"""Most ranks that are tried when none are given."""

CONTEXT_BYTES = 2**30
"""CUDA context, NCCL and kernels' workspaces of one process: an estimate."""

FRAGMENTED = 0.05
"""Fraction of memory that is lost between allocations: an estimate."""

NOTABLY_LESS = 0.95
"""Fraction of what is needed now under which a change is worth mentioning."""


@dataclass
class ModelFindings:
    """Size of the model, its memory in each rank, and what would need less."""

    kind: str = ""
    num_parameters: int = 0
    num_trained: int = 0
    whole_bytes: int = 0
    """Bytes of all weights of the model, in the precision in which it is built."""
    largest_weight: int = 0
    """Numbers in the largest weight."""
    frozen_bytes: int = 0
    """Bytes of other networks, which are whole in each rank."""
    num_active: int | None = None
    """Parameters of matrices that a token is multiplied with; None for diffusion models."""
    flops_per_token: float | None = None
    """Operations of training for each token, in documents of data.max_seq_len tokens."""
    ranks: list[RankMemory] = field(default_factory=list)
    """The first rank of each pipeline stage."""
    counts_uncompiled: bool = False
    """Whether blocks will be compiled, but are counted as if they were not: they will need less."""
    advice: list[tuple[str, int]] = field(default_factory=list)
    """Settings that would help, and the bytes that are needed with them."""

    @property
    def largest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


def smallest_number_of_ranks(config: ParallelConfig) -> int:
    """The fewest processes that the configured parallel sizes allow.

    Raises:
        ConfigError: when no number up to ``MOST_RANKS`` does; the last reason.
    """
    error: ConfigError | None = None
    for count in range(config.ranks_per_sample, MOST_RANKS + 1, config.ranks_per_sample):
        try:
            Layout.resolve(config, count)
        except ConfigError as size_error:
            error = size_error
            continue
        return count
    raise error or ConfigError(f"train: the sizes need more than {MOST_RANKS} processes")


def check_model(
    config: TaskConfig, layout: Layout, on_gpu: bool, limit: int | None, show: bool = False
) -> ModelFindings:
    """Builds the model on meta and predicts memory.

    Args:
        config: of any task.
        layout: the mesh.
        on_gpu: whether it will run on GPUs.
        limit: bytes that a rank may take; when it takes more, other settings are tried. None compares nothing.
        show: show how many of these have been tried.

    Raises:
        UserError: when it cannot be built or cut as configured.
    """
    planned = build_planned_model(config, layout, on_gpu)
    module = planned.build()
    if isinstance(config.model, LanguageModelConfig):
        refuse_unkeyed_dropout(module)
    findings = ModelFindings(type(module).__name__)
    findings.num_parameters = sum(parameter.numel() for parameter in module.parameters())
    findings.num_trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    findings.whole_bytes = sum(parameter.nbytes for parameter in module.parameters())
    findings.largest_weight = max(parameter.numel() for parameter in module.parameters())
    findings.frozen_bytes = sum(planned.frozen_bytes.values())
    if isinstance(config, TrainTextConfig):
        flops = FlopCount(module, planned.vision)
        length = config.data.max_seq_len
        findings.num_active = flops.active_weights
        findings.flops_per_token = flops.training([length]) / length
    findings.ranks, findings.counts_uncompiled = _plan_for(config, planned, layout, on_gpu, limit)
    # advice only where it does not fit: each change builds and plans the model once more
    if limit is not None and needed_bytes(findings.largest, on_gpu) > limit:
        changes = _try_changes(config, layout, on_gpu, limit, show)
        findings.advice = [
            change for change in changes if change[1] < NOTABLY_LESS * needed_bytes(findings.largest, on_gpu)
        ]
    return findings


def _plan_for(
    config: TaskConfig, planned: Planned, layout: Layout, on_gpu: bool, limit: int | None
) -> tuple[list[RankMemory], bool]:
    """``_plan_ranks``, and whether blocks were counted as if they were not compiled, though they will be.

    What compiled blocks keep takes a while to count, and is counted only where uncompiled ones are above the limit.
    """
    ranks = _plan_ranks(config, planned, layout, on_gpu, limit)
    is_compiled = not isinstance(config, TrainAutoencoderConfig) and counts_compiled(config.train, layout, on_gpu)
    if limit is None or not is_compiled or max(needed_bytes(rank, on_gpu) for rank in ranks) <= limit:
        return ranks, is_compiled
    return _plan_ranks(config, planned, layout, on_gpu, limit, compiled=True), False


def _plan_ranks(
    config: TaskConfig, planned: Planned, layout: Layout, on_gpu: bool, limit: int | None, compiled: bool = False
) -> list[RankMemory]:
    """The memory of the first rank of each pipeline stage; in RL with what an iteration takes besides the update."""
    ranks = plan_memory(planned, _effective_train(config), layout.size, compiled)
    if isinstance(config, TextRLConfig):
        (rank,) = ranks
        add_previous(rank, config)
        add_critic(rank, config, made_model(config.model), layout, on_gpu)
        add_drawing(rank, config, planned, layout, limit)
    if isinstance(config, DiffusionRLConfig):
        (rank,) = ranks
        add_phases(rank, config, planned, layout)
    return ranks


def build_planned_model(config: TaskConfig, layout: Layout, on_gpu: bool) -> Planned:
    """The model of a configuration, for ``plan_memory``."""
    train = config.train
    if isinstance(config, TrainTextRewardConfig):
        return plan_scalar_model(config.model, config.data, config.train, layout, on_gpu)
    if isinstance(config, TrainTextConfig):
        reference = isinstance(config, TrainTextKtoConfig)
        if isinstance(config, TrainTextDpoConfig):
            reference = config.dpo.has_reference
        return plan_language_model(made_model(config.model), config.data, config.train, layout, on_gpu, reference)
    if isinstance(config, TextRLConfig):
        has_reference = "reference" in config.algorithm.other_policies
        samples = train.global_batch_size or config.rollout.num_prompts * config.rollout.n
        sizes = config.max_seq_len, samples
        rest = layout, on_gpu, has_reference, config.data.data_type, config.algorithm.entropy_coef != 0
        return plan_text_policy(made_model(config.model), *sizes, config.train, *rest)
    # of omni models no memory is predicted: check_config stops before
    config = cast("TrainDitConfig | TrainAutoencoderConfig | TrajectoryRLConfig | ForwardRLConfig", config)
    model = diffusion_model_on_meta(config.model, train.mixed_precision)
    if isinstance(config, TrainAutoencoderConfig):
        return plan_autoencoder(model, train.micro_batch_size, (config.data.height, config.data.width))
    if isinstance(config, DiffusionRLConfig):
        settings = _describe_rl(model, config)
        samples = config.rollout.num_prompts * config.rollout.n
    else:
        settings = _describe_training(model, config)
        samples = train.micro_batch_size * layout.data
    per_rank = (train.global_batch_size or samples) / layout.data
    passes = math.ceil(per_rank / train.micro_batch_size)  # of a step: gradients are added up where it is above 1
    return plan_diffusion_model(
        model,
        layout,
        keep_encoders=config.model.keep_encoders,
        offload_idle=config.model.offload_idle,
        num_micro_batches=passes,
        on_gpu=on_gpu,
        **settings,
    )


def _describe_training(model: DiffusionModel, config: TrainDitConfig) -> Keywords:
    """Arguments of ``plan_diffusion_model`` for training on data, which the model is prepared for."""
    data = config.data
    set_output(model, data.size, "data", data.sizes)
    set_source_images(model, data.max_source_images)
    check_data_type(model, data)
    is_dpo = isinstance(config, TrainDitDpoConfig)
    return {
        "rows": config.train.micro_batch_size * (2 if is_dpo else 1),
        "size": max(data.sizes or [data.size[:2]], key=math.prod),  # of all buckets the one that takes most memory
        "has_reference": is_dpo,
    }


def _describe_rl(model: DiffusionModel, config: DiffusionRLConfig) -> Keywords:
    """Arguments of ``plan_diffusion_model`` for RL, which the model is prepared for."""
    rollout = config.rollout
    set_output(model, rollout.size, "rollout", [])
    set_source_images(model, config.data.max_source_images)
    check_rewards(model, config)
    others = config.algorithm.other_policies
    is_frozen = others.get("reference") == FROZEN
    return {
        "rows": config.train.micro_batch_size * config.algorithm.rows_per_sample(rollout.num_inference_steps),
        "size": rollout.size[:2],
        "guidance_scale": config.trained_guidance_scale,
        "has_reference": is_frozen,
        "num_policies": len(others) - is_frozen,
        "drawn": (rollout.micro_batch_size, max(rollout.guidance_scale, config.eval.guidance_scale or 0.0)),
    }


def made_model(model: LanguageModelConfig) -> LanguageModelConfig:
    """The model section, or when its folder is still to be made, that of the configuration that makes it."""
    if model.made_by is None or Path(str(model.model_path)).exists():
        return model
    maker = made_model(load_maker(TrainTextConfig, model.made_by, str(model.model_path), "model.model_path").model)
    return maker.model_copy(update={"lora": model.lora, "dtype": model.dtype, "attention": model.attention})


def needed_bytes(memory: RankMemory, on_gpu: bool) -> int:
    """Bytes that a rank needs on its device, with estimates of what is not predicted."""
    return round(memory.total * (1 + FRAGMENTED)) + CONTEXT_BYTES if on_gpu else memory.total


def _effective_train(config: TaskConfig) -> TrainConfig:
    """The section train as its task uses it: an autoencoder is replicated, and keeps all activations."""
    if not isinstance(config, TrainAutoencoderConfig):
        return config.train
    return config.train.model_copy(update={"data_parallel_mode": "ddp", "activation_checkpointing": "none"})


def _try_changes(
    config: TaskConfig, layout: Layout, on_gpu: bool, limit: int, show: bool = False
) -> Iterator[tuple[str, int]]:
    """Settings that may help, and the bytes that a rank needs with them.

    Yields each change by itself, then all that can be combined at once, then two, four and eight times the processes.
    """
    combined: dict[str, object] = {}
    changes = list(_list_changes(config, layout))
    progress = Progress(len(changes), 0, "check: what would need less memory", enabled=show)
    for number, (name, settings, is_combined) in enumerate(changes, start=1):
        combined |= settings if is_combined else {}
        try:
            yield name, _bytes_with_changes(config, settings, layout, on_gpu, limit)
        except UserError:  # a change that this model does not allow is no advice
            continue
        finally:
            progress.update(number)
    progress.close()
    if len(combined) > 1:
        yield "these together: " + ", ".join(combined), _bytes_with_changes(config, combined, layout, on_gpu, limit)
    # more processes do not help where each holds the whole model
    if config.train.data_parallel_mode == "ddp":
        return
    for times in (2, 4, 8):
        more = Layout.resolve(config.train, layout.size * times)
        yield (
            f"{more.size} processes instead of {layout.size}",
            (size := _bytes_with_changes(config, {}, more, on_gpu, limit)),
        )
        if size <= limit:
            return


def _list_changes(config: TaskConfig, layout: Layout) -> Iterator[tuple[str, dict[str, object], bool]]:
    """Settings that may take less memory: a description, the changed fields, and whether they can be combined."""
    train = config.train
    is_text = isinstance(config, (TrainTextConfig, TextRLConfig))
    modes = ("none", "selective", "full")
    # only modes that keep fewer activations than the present one
    for mode in modes[modes.index(train.activation_checkpointing) + 1 :]:
        yield f"train.activation_checkpointing {mode}", {"activation_checkpointing": mode}, mode == "full"
    has_logits = is_text and not isinstance(config, TrainTextRewardConfig)
    if has_logits and not cast("TextTrainConfig | TextRLTrainConfig", train).chunked_loss and layout.pp == 1:
        yield "train.chunked_loss true", {"chunked_loss": True}, True
    if train.micro_batch_size > 1:
        yield "train.micro_batch_size 1", {"micro_batch_size": 1}, True
    is_packed = isinstance(config, TrainTextConfig) and config.train.dyn_bsz
    if is_packed and layout.data > 1 and train.data_parallel_mode != "ddp":
        batch = train.micro_batch_size * layout.data  # one micro-batch a step: no gradients are added up
        changes = {"dyn_bsz": False, "global_batch_size": batch}
        yield f"train.dyn_bsz false and train.global_batch_size {batch}", changes, False
    if train.data_parallel_mode == "ddp" and layout.data > 1:
        yield "train.data_parallel_mode fsdp2", {"data_parallel_mode": "fsdp2"}, True
    if train.optimizer == "adamw":
        yield "train.optimizer adamw8bit", {"optimizer": "adamw8bit"}, False
    can_offload = train.data_parallel_mode == "fsdp2" or (train.data_parallel_mode == "fsdp1" and layout.size > 1)
    if can_offload and not train.enable_fsdp_offload:
        yield "train.enable_fsdp_offload true", {"enable_fsdp_offload": True}, False
    model = cast("LanguageModelConfig | ModelConfig", config.model)
    if isinstance(model, ModelConfig) and not model.offload_idle and not isinstance(config, TrainAutoencoderConfig):
        yield "model.offload_idle true", {"model.offload_idle": True}, True
    is_sharded = layout.size > 1 and train.data_parallel_mode == "fsdp2"
    if is_sharded and not train.enable_reduce_every_micro_batch and layout.pp == 1:
        name = "enable_reduce_every_micro_batch"
        yield f"train.{name} true", {name: True}, False
    if model.lora is None:
        yield "model.lora {} and model.dtype bf16", {"model.lora": LoraConfig()}, False  # pyright: ignore[reportCallIssue]


def _bytes_with_changes(
    config: TaskConfig, changes: Mapping[str, object], layout: Layout, on_gpu: bool, limit: int
) -> int:
    """Bytes that the largest rank needs with changed fields of ``train`` or ``model``."""
    changes = dict(changes)
    model = config.model
    if (lora := changes.pop("model.lora", None)) is not None:
        model = model.model_copy(update={"lora": lora, "dtype": "bf16"})
    if (offload_idle := changes.pop("model.offload_idle", None)) is not None:
        model = model.model_copy(update={"offload_idle": offload_idle})
    train = config.train.model_copy(update=changes)
    changed = config.model_copy(update={"train": train, "model": model})
    layout = Layout.resolve(train, layout.size)
    ranks, _ = _plan_for(changed, build_planned_model(changed, layout, on_gpu), layout, on_gpu, limit)
    return max(needed_bytes(rank, on_gpu) for rank in ranks)
