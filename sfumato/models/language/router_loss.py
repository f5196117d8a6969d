"""The auxiliary loss of a mixture of experts' routers, where config.json asks for it (``output_router_logits``).

transformers' own functions are called: of one forward pass, with E experts of which k are chosen for each token,

    aux_loss = E * sum over experts e of  f[e] * P[e]

where f[e] is how often a token chose the expert and P[e] the mean of the probability that the router gave it, both over
all tokens of the pass but padding, and over all layers (Switch Transformer, arXiv 2101.03961, equations 4 to 6).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh

FUNCTION = "load_balancing_loss_func"
"""transformers' name of the loss, in the file of each family."""

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of transformers' causal models that hold the loss's weight."""

REMEDY = "set output_router_logits to false in its config.json, and balance experts by train.expert_bias_rate"


@dataclass(frozen=True)
class RouterLogits:
    """What the routers said in the forward pass of a micro-batch."""

    layers: tuple[Tensor, ...]
    """Of each layer with experts ``[N, E]``, a row a token, with graph."""
    places: Tensor | None = None
    """int64 ``[N]``, on the CPU: where in the micro-batch's rows, one after the other, the token of a row stands; -1 of
    padding. None: the rows are those of the micro-batch."""

    @classmethod
    def of_calls(cls, calls: Sequence[tuple[Tensor, ...]], places: Sequence[Tensor]) -> RouterLogits | None:
        """Of the calls of the module for a micro-batch.

        Args:
            calls: what the routers of each layer said; none without gradients, or of a model without the loss.
            places: int64 ``[N, L]`` of each call, see ``forward_per_document``; later calls have no tokens. Empty: one
                call for all.
        """
        if not calls:
            return None
        if not places:
            return cls(calls[0])
        layers = tuple(torch.cat(layer) for layer in zip(*calls[: len(places)], strict=True))
        return cls(layers, torch.cat([place.flatten() for place in places]))


def asked_coefficient(config: Any) -> float:
    """The weight of the auxiliary loss that transformers' configuration asks for; 0 where it asks for none."""
    parts = (config, config.get_text_config())
    if not any(getattr(part, "output_router_logits", False) for part in parts):
        return 0.0
    values = [getattr(part, name, None) for part in parts for name in COEFFICIENTS]
    values.append(getattr(getattr(config, "ffn_config", None), "moe_loss_weight", None))  # of DBRX
    return next((float(value) for value in values if value is not None), 0.0)


def adds_router_loss(cls: type[nn.Module]) -> bool:
    """Whether transformers' class of a model adds an auxiliary loss where its configuration asks for one."""
    return any(hasattr(sys.modules.get(base.__module__), FUNCTION) for base in cls.__mro__)


def describe_router_loss(cls: type[nn.Module], config: Any) -> tuple[str, ...]:
    """A line about what is done where a configuration asks for the loss; none where it does not."""
    coefficient = asked_coefficient(config)
    if not coefficient:
        return ()
    asks = f"config.json asks for the auxiliary loss of routers (output_router_logits, weight {coefficient:g})"
    if not adds_router_loss(cls):
        return (f"{asks}: transformers' {cls.__name__} has none, so none is added",)
    return (
        f"{asks}: it is added, over the tokens of each forward pass as in transformers, so that it depends on "
        "train.micro_batch_size and the number of ranks",
    )


def refuse_router_loss(cls: type[nn.Module] | None, config: Any, where: str) -> None:
    """Whether a task that adds no auxiliary loss would leave one out that the configuration asks for.

    Args:
        cls: transformers' class of the model; None where it is another's.
        config: transformers' configuration.
        where: it stands, for messages.

    Raises:
        ConfigError: when it would.
    """
    coefficient = asked_coefficient(config)
    if coefficient and (cls is None or adds_router_loss(cls)):
        raise ConfigError(
            f"{where}: output_router_logits with a weight of {coefficient:g} asks for an auxiliary loss of routers, "
            f"which tasks/train_text.py alone adds: {REMEDY}"
        )


class RouterLoss:
    """The auxiliary loss of one model's routers."""

    def __init__(self, module: nn.Module) -> None:
        """``module`` is transformers' plain model, on meta perhaps.

        Raises:
            ConfigError: when transformers computes the loss of this family in another way than it does of most.
        """
        self._function = family_function(type(module))
        coefficient = _setting(module, *COEFFICIENTS)
        num_experts = _setting(module, "num_experts")
        top_k = _setting(module, "num_experts_per_tok")
        if self._function is None or coefficient is None or num_experts is None or top_k is None:
            raise ConfigError(
                f"output_router_logits: the auxiliary loss of {type(module).__name__}'s routers is not computed here, "
                f"since transformers computes it otherwise than that of most families: {REMEDY}"
            )
        self.coefficient = float(coefficient)
        self._num_experts = int(num_experts)
        self._top_k = int(top_k)

    def of(self, logits: RouterLogits, is_token: Tensor) -> Tensor:
        """The loss of a forward pass, a scalar with graph.

        Args:
            logits: what the routers said.
            is_token: bool ``[B, T]``, on the CPU, false for padding.
        """
        counted = is_token.flatten()
        if logits.places is not None:
            counted = (logits.places >= 0) & counted[logits.places.clamp(min=0)]
        mask = None if bool(counted.all()) else to_device(counted.long(), logits.layers[0].device)
        return self._function(logits.layers, self._num_experts, self._top_k, mask)


def _setting(module: nn.Module, *names: str) -> Any:
    """What transformers' causal model, or else the configuration of its text, has under the first of these names."""
    for holder in (module, module.config.get_text_config()):
        for name in names:
            if getattr(holder, name, None) is not None:
                return getattr(holder, name)
    return None


def family_function(cls: type[nn.Module]) -> Any:
    """transformers' function for the family of a class; None where there is none, or one with other parameters."""
    for base in cls.__mro__:
        function = getattr(sys.modules.get(base.__module__), FUNCTION, None)
        if function is not None:
            return function if list(inspect.signature(function).parameters) == PARAMETERS else None
    return None


def check_router_settings(layout: Layout, is_compiled: bool) -> None:
    """Raises ConfigError for settings under which the routers' logits of a forward pass are not on one rank, or not
    those that transformers' hooks see.

    Args:
        layout: the mesh.
        is_compiled: whether blocks are compiled, in which the hooks give the logits of other layers.
    """
    if is_compiled:
        raise ConfigError(
            "train.compile and the routers' auxiliary loss (output_router_logits in config.json) exclude each other, "
            f"since transformers' hooks do not see the routers in compiled blocks: set it to false; or {REMEDY}"
        )
    sizes = {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "ulysses_parallel_size or context_parallel_size": layout.cp,
        "expert_parallel_size": layout.ep,
    }
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"train.{name} and the routers' auxiliary loss (output_router_logits in config.json) exclude each "
                f"other, since it is computed over the tokens of whole forward passes: set it to 1; or {REMEDY}"
            )


class StepRouterLoss:
    """The auxiliary loss of an optimiser's step: of the micro-batches of all ranks, each by its share of the tokens."""

    def __init__(self, loss: RouterLoss | None, batches: Sequence[TokenBatch], mesh: Mesh) -> None:
        """Call it on every rank.

        Args:
            loss: None for a model without; then all parts are 0 and there is no metric.
            batches: this rank's micro-batches.
            mesh: the ranks.
        """
        self._loss = loss
        self._mesh = mesh
        self.numbers = Numbers()
        """This rank's parts of the loss without its coefficient, as they are on the device."""
        if loss is not None:
            self._num_tokens = mesh.sum(sum(sum(batch.document_lengths) for batch in batches))

    def part(self, logits: RouterLogits | None, batch: TokenBatch) -> Tensor | float:
        """``coefficient * aux_loss * (tokens of this micro-batch / tokens of the step)``, a scalar with graph.

        Tokens are those of documents, in the loss mask or not, as in transformers.
        """
        if self._loss is None or not batch.document_lengths:
            return 0.0
        assert logits is not None
        share = sum(batch.document_lengths) / self._num_tokens
        aux_loss = self._loss.of(logits, _is_token(batch)) * share
        self.numbers.add(aux_loss)
        return self._loss.coefficient * aux_loss

    def metrics(self) -> dict[str, float]:
        """``aux_loss`` over all ranks, without the coefficient."""
        return {} if self._loss is None else {"aux_loss": self._mesh.sum(sum(self.numbers))}


def _is_token(batch: TokenBatch) -> Tensor:
    """Which places of a micro-batch hold a document's token, bool ``[B, T]``."""
    num_rows, length = batch.shape
    columns = torch.arange(length)
    if num_rows == 1:
        return (columns < sum(batch.document_lengths))[None]
    lengths = torch.tensor(batch.document_lengths + [0] * (num_rows - len(batch.document_lengths)))
    return columns < lengths[:, None]
