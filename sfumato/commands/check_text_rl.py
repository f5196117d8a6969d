"""Memory that RL of language models takes beside the policy and its update: critic, engine, previous weights."""

from __future__ import annotations

import torch

from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.models.estimate.engine_memory import engine_memory
from sfumato.models.estimate.kv_memory import KEYS_AND_VALUES, DrawingLoad, drawing_bytes
from sfumato.models.estimate.memory_plan import Planned, RankMemory, plan_memory
from sfumato.models.estimate.meta_models import plan_critic
from sfumato.parallel.layout import Layout
from sfumato.rollout.engines.served_settings import ServedSettings
from sfumato.rollout.engines.settings import Embedded

PASSING = (
    "gathered weights",
    "whole gradients",
    "activations of blocks",
    "one block computed again",
    "weights in autocast's precision",
    "activations outside blocks",
    "loss",
)
"""Parts of the memory that exist during a forward and backward pass alone. The critic's passes follow the policy's, so
of these parts the larger ones count, and not the sum."""


def add_critic(
    memory: RankMemory, config: TextRLConfig, policy: LanguageModelConfig, layout: Layout, on_gpu: bool
) -> None:
    """Adds the memory that a critic holds all the time, and what its passes take beyond those of the policy.

    Args:
        memory: of the rank, with the policy.
        config: of the task.
        policy: the model section, of a model that is there or described.
        layout: the mesh.
        on_gpu: whether it will run on GPUs.

    Raises:
        ConfigError: as ``plan_critic``.
    """
    if not config.algorithm.token_advantage.needs_values:
        return
    samples = config.train.global_batch_size or config.rollout.num_prompts * config.rollout.n
    # a critic takes the optimiser's settings from train, but none that belong to the policy's weights or logits
    overrides = {"param_groups": [], "ema_decay": 0.0, "chunked_loss": False, "expert_bias_rate": 0.0}
    critic_train = config.train.model_copy(update=overrides)
    section = config.critic.derive_from(policy)
    planned = plan_critic(section, config.max_seq_len, samples, critic_train, layout, on_gpu)
    (critic,) = plan_memory(planned, critic_train, layout.size)
    passing = sum(critic.parts.get(name, 0) for name in PASSING) - sum(memory.parts.get(name, 0) for name in PASSING)
    memory.parts |= {f"critic: {name}": size for name, size in critic.parts.items() if name not in PASSING}
    memory.parts |= {"critic: passes beyond the policy's": passing} if passing > 0 else {}
    memory.host |= {f"critic: {name}": size for name, size in critic.host.items()}


def add_previous(memory: RankMemory, config: TextRLConfig) -> None:
    """Adds the copy of the trained weights from before the last update, which a sampler that lags behind needs."""
    if config.rollout.staleness > 0:
        for where in (memory.parts, memory.host):
            if "gradients" in where:  # as many numbers of the same precision
                where["policy before the last update"] = where["gradients"]


def drawn_at_a_time(config: TextRLConfig, layout: Layout) -> DrawingLoad:
    """The largest load of the embedded engine in a rank of the actor.

    That is the samples of an iteration, unless a sampler of its own draws them, or the answers of an evaluation.
    """
    rollout = config.rollout
    settings = config.rollout.engine
    embedded = settings if isinstance(settings, Embedded) else Embedded()
    groups = (rollout.over_sampling_batch_size or rollout.num_prompts) if rollout.hybrid_engine else 0
    trained, evaluated = (-(-count // layout.data) for count in (groups, config.eval.num_prompts))
    prompt = config.data.max_prompt_tokens
    longest = config.eval.max_new_tokens or rollout.max_new_tokens
    if rollout.hybrid_engine and rollout.load_dump is None:
        longest = max(longest, rollout.max_new_tokens)
    count = min(max(trained * rollout.n, evaluated), embedded.max_batch_size)
    limit = None if embedded.cache_gb is None else int(embedded.cache_gb * 2**30)
    return DrawingLoad(count, prompt + longest, limit)


def describe_engine(
    config: TextRLConfig, planned: Planned, layout: Layout, device_bytes: int | None
) -> tuple[str, bool]:
    """What an engine with weights of its own has room for on each of its GPUs, and whether one request fits at least.

    Args:
        config: of the task, with such an engine.
        planned: the policy.
        layout: the mesh of the actor, whose ranks each have an engine where roles share processes.
        device_bytes: memory of a GPU; None is not known.
    """
    rollout = config.rollout
    engine = rollout.engine
    kind = engine.type
    if device_bytes is None or not isinstance(engine, ServedSettings):
        return f"not predicted: the memory of rollout.engine {kind}", True
    dtype: torch.dtype = getattr(torch, engine.dtype)
    parts = engine_memory(planned, dtype, engine.tensor_parallel_size, device_bytes, engine.gpu_memory_utilization)
    told = (
        f"rollout.engine {kind} on a GPU of {device_bytes / 2**30:.0f} GiB: {parts.weight_bytes / 2**30:.1f} "
        f"GiB of {engine.dtype} weights, about {max(parts.free_bytes, 0) / 2**30:.1f} GiB left for keys and values"
    )
    if parts.token_bytes is None:
        return f"{told}, which are not predicted for this model", parts.free_bytes > 0
    length = engine.max_model_len or config.max_seq_len
    fitting = parts.requests_of(length)
    groups = rollout.over_sampling_batch_size or rollout.num_prompts
    engines = config.runtime.pools.sampler.processes if config.runtime.backend == "ray" else layout.size
    wanted = min(-(-groups * rollout.n // engines), engine.max_requests)
    told += (
        f": {parts.token_bytes / 2**10:.0f} KiB a token, room for {fitting:,.1f} requests of {length:,} tokens at a "
        f"time, of {wanted} that are drawn by each engine"
    )
    if fitting < 1:
        remedy = "raise tensor_parallel_size or gpu_memory_utilization, or lower max_model_len"
        return f"{told}: it would not start; {remedy}", False
    mean = fitting * length / wanted
    return told + (f"; with all {wanted} at a time {mean:,.0f} tokens each" if fitting < wanted else ""), True


def add_drawing(memory: RankMemory, config: TextRLConfig, planned: Planned, layout: Layout, limit: int | None) -> None:
    """Adds the memory of the embedded engine in the actor.

    The actor evaluates with it even where another sampler draws for training, unless that sampler is a server, which
    draws the evaluations, too.

    Args:
        memory: of the rank, with all that is there before the first token is drawn.
        config: of the task.
        planned: the policy.
        layout: the mesh.
        limit: bytes of the rank's device; None is not known. Without ``cache_gb`` keys and values take half of what is
            free when the first is drawn.
    """
    if config.sampler_evaluates:
        return
    drawn = drawn_at_a_time(config, layout)
    drawing_parts = drawing_bytes(planned, drawn, layout, config.train.data_parallel_mode)
    if drawn.cache_bytes is None and limit is not None and KEYS_AND_VALUES in drawing_parts:
        resident = ("weights", "critic: weights", "frozen reference", "moving average")
        # keys and values get half of what the weights, and the other parts of the engine, leave free
        held = sum(memory.parts.get(name, 0) for name in resident)
        free = limit - held - sum(size for name, size in drawing_parts.items() if name != KEYS_AND_VALUES)
        drawing_parts[KEYS_AND_VALUES] = min(drawing_parts[KEYS_AND_VALUES], max(free, 0) // 2)
    memory.parts |= drawing_parts
