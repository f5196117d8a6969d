"""How processes share the work, and how they were started: what torchrun or a scheduler writes into the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.errors import ConfigError


class ParallelConfig(Section):
    """Data, tensor, sequence, expert and pipeline parallelism; memory; compilation.

    The number of processes is the product of the sizes; what is left over is data parallel.
    """

    data_parallel_mode: Literal["ddp", "fsdp1", "fsdp2"] = "fsdp2"
    """ddp keeps a whole model in each process; fsdp1 and fsdp2 shard weights, gradients and optimiser state."""
    data_parallel_replicate_size: int = Field(1, ge=1)
    """Groups of processes that each hold one sharded copy (HSDP); 1 shards over all."""
    ulysses_parallel_size: int = Field(1, ge=1)
    """Ranks that share a sequence by exchanging attention heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share a sequence by passing keys and values round (ring attention, arXiv 2310.01889)."""
    cfg_parallel_size: Literal[1, 2] = 1
    """2 computes the two branches of classifier-free guidance on two ranks."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share each matrix (Megatron-LM, arXiv 1909.08053)."""
    sequence_parallel: bool = False
    """With tensor parallelism: also share the activations between the matrices (arXiv 2205.05198)."""
    expert_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_bias_rate: float = Field(0.0, ge=0)
    """Step of the routing bias that balances experts without a loss term (arXiv 2408.15664); 0 leaves routing alone."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages into which the layers are cut."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = "1f1b"
    """Order of forward and backward passes; interleaved_1f1b, zero_bubble and zbv hold two stages in each rank."""
    init_device: Literal["cpu", "cuda", "meta"] = "cpu"
    """Where the trained model's weights are before they are sharded: cuda, cpu, or nowhere: meta reads each rank's
    shards straight from the files of model.model_path."""
    broadcast_model_weights_from_rank0: bool = False
    """Only rank 0 reads weight files, the others receive them; for slow shared disks."""
    enable_reshard_after_forward: bool = True
    """fsdp1, fsdp2: free the gathered weights after the forward pass and gather them again in the backward pass."""
    enable_reduce_every_micro_batch: bool = False
    """fsdp2: reduce gradients after each micro-batch, so that no rank keeps whole ones until the last; HSDP sums over
    its copies with the last all the same."""
    enable_fsdp_offload: bool = False
    """fsdp1, fsdp2: keep weights, gradients and optimiser state in CPU memory; with fsdp2 in one process, too."""
    enable_forward_prefetch: bool = False
    """fsdp1, fsdp2: gather the next block's weights while this one computes, ordered by hand."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: full keeps block inputs only, selective also keeps attention and half the matrix
    products."""
    enable_activation_offload: bool = False
    """Keep activations that wait for the backward pass in CPU memory."""
    compile: bool | None = None
    """torch.compile of each block; null: on GPUs, without a pipeline."""

    def compiles(self, device: str) -> bool:
        """Whether blocks are compiled on a type of device (cuda, cpu)."""
        return self.compile if self.compile is not None else device == "cuda" and self.pipeline_parallel_size == 1

    def shards(self, num_processes: int) -> bool:
        """Whether fsdp holds the weights: of several processes, or of one that keeps them in CPU memory."""
        return self.data_parallel_mode != "ddp" and (num_processes > 1 or self.enable_fsdp_offload)

    @model_validator(mode="after")
    def _modes_fit(self) -> ParallelConfig:
        mode = self.data_parallel_mode
        if self.init_device == "meta" and mode == "fsdp1":
            raise ValueError("train.init_device meta and train.data_parallel_mode fsdp1 do not go together; take fsdp2")
        sharded = ["enable_reshard_after_forward", "enable_fsdp_offload", "enable_forward_prefetch"]
        if mode != "fsdp2":
            names = [*(sharded if mode == "ddp" else []), "enable_reduce_every_micro_batch"]
            refuse_needless(self, "train", names, f"with train.data_parallel_mode {mode}: remove it, or take fsdp2")
        if self.pipeline_parallel_size == 1:
            why = "with train.pipeline_parallel_size 1: remove it, or raise pipeline_parallel_size"
            refuse_needless(self, "train", ("pipeline_schedule",), why)
        if self.init_device != "meta":
            why = f"with train.init_device {self.init_device}, where every process reads files: remove it, or take meta"
            refuse_needless(self, "train", ("broadcast_model_weights_from_rank0",), why)
        return self

    @property
    def ranks_per_sample(self) -> int:
        """Processes that work on the same samples; the others are data parallel."""
        return (
            self.pipeline_parallel_size
            * self.cfg_parallel_size
            * self.context_parallel_size
            * self.ulysses_parallel_size
            * self.tensor_parallel_size
        )


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Its number on this machine: which GPU it takes."""


def world_size() -> int:
    """Processes that were started together. Raises ConfigError when WORLD_SIZE is no number of processes."""
    return _read_number("WORLD_SIZE", default=1, least=1)


def read_launched() -> Launched:
    """This process's place.

    Raises:
        ConfigError: when the environment contradicts itself, or lacks what processes need to find each other.
    """
    launched = Launched(world_size(), _read_number("RANK", 0, 0), _read_number("LOCAL_RANK", 0, 0))
    if launched.rank >= launched.world_size:
        raise ConfigError(
            f"RANK is {launched.rank}, but WORLD_SIZE {launched.world_size}: ranks count from 0 to WORLD_SIZE - 1"
        )
    if launched.world_size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {launched.world_size}, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set: start several processes with train.sh "
                f"(NPROC_PER_NODE={launched.world_size}) or torchrun, or unset WORLD_SIZE for one process"
            )
        _read_number("MASTER_PORT", 0, 0)
    return launched


def _read_number(name: str, default: int, least: int) -> int:
    # isdigit alone takes digits of all scripts and superscripts, some of which int() refuses
    text = os.environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            f"the environment variable {name} must be a whole number from {least}, not {os.environ[name]!r}: unset it, "
            "or start with train.sh or torchrun, which set it"
        )
    return int(text)
