"""Balancing experts without a loss term: a bias that only chooses (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.errors import CheckpointError, ConfigError
from sfumato.parallel.expert import tokens_per_expert
from sfumato.parallel.expert_modules import find_experts, has_experts
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import plain_name

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names that transformers gives the bias of a router's choice; the first is registered where a router has none."""

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "given": lambda logits: logits,
}
"""From the first output of a router to the scores that it chooses by; ``given`` where that output is the scores."""


class ExpertBalancer:
    """Counts the tokens of each expert and moves a bias so that all get equally many.

    The bias is added to the router's scores when experts are chosen; the weights of the chosen ones do not contain it.
    Routers that have one (``e_score_correction_bias``) keep theirs, others get a persistent buffer of that name, so it
    is part of the module's state dict. Tokens are counted in forward passes that build a graph; passes without
    gradients, and those that activation checkpointing repeats (``use_reentrant=False``), do not count, nor does padding
    of which ``is_token`` tells.

    No token is ever dropped, whatever the loads are, so there is no metric of dropped tokens: it would always be zero.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, rate: float) -> None:
        """Adds hooks to the routers and experts; call it once the module's weights are on their device.

        Args:
            module: a model with experts, before or after ``parallelize``; before it with fsdp1.
            mesh: the ranks; tokens are counted over the view ``loss``.
            rate: how far a bias moves in an update.

        Raises:
            ConfigError: when no stage has experts, or one chooses them by a rule that no bias can be put into.
        """
        self.mesh = mesh
        self.rate = rate
        self.is_token: Tensor | None = None
        """bool ``[tokens]`` on the device, for the next forward pass: false for padding; None counts all."""
        self._routers: dict[str, tuple[nn.Module, str]] = {}
        self._counts: list[Tensor] = []
        any_stage_has_experts = any(mesh.gather(has_experts(module), over="pp"))
        all_experts: Mapping[str, nn.Module] = {}  # all layers of a pipeline stage may be dense
        if has_experts(module) or not any_stage_has_experts:
            all_experts = find_experts(module, "train.expert_bias_rate must be 0")
        for name, experts in all_experts.items():
            num_experts = cast("int", experts.num_experts)
            key, router, bias = _find_router(module, name, num_experts)
            if bias is None:
                bias = BIASES[0]
                _add_bias(key, router, bias, num_experts, mesh.device)
            elif getattr(router, bias).dtype != torch.float32:  # in bfloat16 small steps are lost
                setattr(router, bias, nn.Buffer(getattr(router, bias).float()))
            self._routers[plain_name(f"{key}.{bias}")] = router, bias
            counts = torch.zeros(num_experts, dtype=torch.int64, device=mesh.device)
            self._counts.append(counts)
            experts.register_forward_pre_hook(self._make_counter(counts), with_kwargs=True)

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """Moves each bias by ``rate * sign(mean load - load)``; call it on every rank after the optimiser's step.

        Returns:
            Scalars. ``experts/load_max_over_mean``: tokens of the busiest expert over the mean of its layer, of the
            worst layer; ``experts/without_tokens``: share of experts that got no token. Both over all ranks and all
            micro-batches since the last update.
        """
        none = torch.zeros(0, dtype=torch.int64, device=self.mesh.device)
        counts = torch.cat([*self._counts, none])
        if self.mesh.size_of("loss") > 1:
            dist.all_reduce(counts, group=self.mesh.group("loss"))
        ratios = [none.double().sum()]
        # Layers may have different numbers of experts: one all-reduce sums them all, then they are taken apart again.
        loads = counts.double().split([len(counts) for counts in self._counts])
        for load, (router, bias) in zip(loads, self._routers.values(), strict=True):
            getattr(router, bias).add_((load.mean() - load).sign().float(), alpha=self.rate)
            ratios.append(load.max() / load.mean().clamp_min(1e-9))
        self.forget()
        worst = torch.stack(ratios).max()
        idle = torch.stack([(counts == 0).sum(), counts.new_tensor(len(counts))])
        if self.mesh.size_of("pp") > 1:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh.group("pp"))
            dist.all_reduce(idle, group=self.mesh.group("pp"))
        return {"experts/load_max_over_mean": worst, "experts/without_tokens": idle[0] / idle[1].double()}

    def _make_counter(self, counts: Tensor) -> Callable[..., None]:
        """A hook before experts that adds the choices ``[tokens, k]`` of a forward pass to the layer's counts."""

        def count(experts: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            recomputed = torch._C._current_graph_task_id() != -1  # within a backward pass
            if recomputed or not torch.is_grad_enabled():
                return
            chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            if self.is_token is not None and len(self.is_token) == len(chosen):
                # an id beyond the experts, since choosing tokens by a mask would wait for the device
                chosen = chosen.masked_fill(~self.is_token[:, None], len(counts))
            counts.add_(tokens_per_expert(chosen.flatten().sort().values, len(counts)))

        return cast("Callable[..., None]", torch.compiler.disable(count))

    def forget(self) -> None:
        """Discards the tokens counted since the last update."""
        for counts in self._counts:
            counts.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the biases ``[experts]``, float32, by their names in the plain module's state dict."""
        return {name: getattr(*router).clone() for name, router in self._routers.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores biases ``[experts]`` from a result of ``state_dict``.

        Raises:
            CheckpointError: when one is missing.
        """
        missing = [name for name in self._routers if name not in state]
        if missing:
            raise CheckpointError(
                f"no {missing[0]} in the checkpoint, and {len(missing)} of {len(self._routers)} biases missing: it is "
                "of another model, or of a run with train.expert_bias_rate 0"
            )
        for name, router in self._routers.items():
            getattr(*router).copy_(state[name])


@dataclass(frozen=True)
class _Rule:
    """How a router computes the weights of the chosen experts from its logits."""

    scores: str
    """Key of ``SCORES``."""
    normalised: bool
    """Whether the weights of a token are divided by their sum."""
    scale: float
    """Factor of the weights."""

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Weights ``[tokens, k]`` from scores ``[tokens, experts]`` and indices ``[tokens, k]``."""
        weights = scores.gather(-1, chosen)
        return self.scale * (weights / weights.sum(-1, keepdim=True) if self.normalised else weights)


def _find_router(module: nn.Module, experts: str, num_experts: int) -> tuple[str, nn.Module, str | None]:
    """The name and module of the router of a layer's experts, and the name of its bias if it has one."""
    block = experts.rpartition(".")[0]
    while experts.split(".")[-1] == "base_layer":  # an adapter around the experts
        experts = block
        block = block.rpartition(".")[0]
    parent = dict(module.named_modules())[block]  # get_submodule does not know the stages of a pipeline
    for name, submodule in parent.named_modules(prefix=block):
        for bias in BIASES:
            values = submodule._buffers.get(bias)
            if values is not None and values.shape == (num_experts,):
                return name, submodule, bias
    for name in ("gate", "router"):
        if isinstance(getattr(parent, name, None), nn.Module):
            return f"{block}.{name}".lstrip("."), getattr(parent, name), None
    raise ConfigError(f"{block} has no module gate or router beside its experts: set train.expert_bias_rate to 0")


def _add_bias(name: str, router: nn.Module, bias: str, num_experts: int, device: torch.device) -> None:
    """Registers a bias of zeros, and a hook that chooses experts again with it and computes their weights without."""
    rule = _find_rule(name, router, num_experts)
    router.register_buffer(bias, torch.zeros(num_experts, device=device))

    def choose(router: nn.Module, args: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, chosen = output
        scores = SCORES[rule.scores](logits.float())
        chosen = (scores.detach() + getattr(router, bias)).topk(chosen.shape[-1], dim=-1).indices
        return logits, rule.weights(scores, chosen).to(weights.dtype), chosen

    router.register_forward_hook(choose)


def _find_rule(name: str, router: nn.Module, num_experts: int) -> _Rule:
    """Finds a router's rule by running it with random weights and comparing its choice and weights with each rule.

    Raises:
        ConfigError: when no rule of ``_Rule`` gives the router's result.
    """
    refusal = ConfigError(
        f"{name}: {type(router).__name__} chooses experts by a rule that a bias cannot be put into (not the largest "
        "scores, softmax or sigmoid, of single experts): set train.expert_bias_rate to 0"
    )
    generator = torch.Generator().manual_seed(0)
    tensors = dict(router.named_parameters()) | dict(router.named_buffers())
    random_tensors = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in tensors.items()}
    # The router's matrix is [experts, width], and tells how wide tokens are.
    width = next(
        (tensor.shape[1] for tensor in tensors.values() if tensor.ndim == 2 and tensor.shape[0] == num_experts), None
    )
    if width is None:
        raise refusal
    tokens = torch.randn(64, width, generator=generator) / width**0.5
    try:
        with torch.no_grad():
            output = torch.func.functional_call(router, random_tensors, (tokens,))
    except (TypeError, RuntimeError, AttributeError) as error:
        raise refusal from error
    if not isinstance(output, tuple) or len(output) != 3 or output[0].shape != (len(tokens), num_experts):
        raise refusal
    logits, weights, chosen = output
    # The choice of experts tells the scores; where the router's weights are one multiple of a rule's, it is that rule.
    for kind, function in SCORES.items():
        scores = function(logits.float())
        largest = scores.topk(chosen.shape[-1], dim=-1).indices
        if not torch.equal(largest.sort(-1).values, chosen.sort(-1).values):
            continue
        for normalised in (False, True):
            ratios = weights.float() / _Rule(kind, normalised, 1.0).weights(scores, chosen)
            if torch.allclose(ratios, ratios[:1, :1], rtol=1e-4):
                return _Rule(kind, normalised, float(f"{ratios.mean():.6g}"))
    raise refusal
