"""Whether a model's config.json asks for the auxiliary loss of routers (``router_loss.py``), and who adds it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FUNCTION = "load_balancing_loss_func"
"""The name of transformers' function for the loss, which the modelling file of each family defines."""

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of transformers' causal models, or their configurations, that hold the weight of the loss."""

REMEDY = "set output_router_logits to false in its config.json, and balance experts by train.expert_bias_rate"


def router_loss_coefficient(config: PreTrainedConfig) -> float:
    """The weight of the auxiliary loss in transformers' configuration; 0 where it does not ask for the loss."""
    parts = (config, config.get_text_config())
    # of a model that sees, either the whole configuration or that of its text holds the fields
    if not any(getattr(part, "output_router_logits", False) for part in parts):
        return 0.0
    values = [getattr(part, name, None) for part in parts for name in COEFFICIENTS]
    values.append(getattr(getattr(config, "ffn_config", None), "moe_loss_weight", None))  # of DBRX
    return next((float(value) for value in values if value is not None), 0.0)


def adds_router_loss(cls: type[nn.Module]) -> bool:
    """Whether transformers' class of a model adds an auxiliary loss where its configuration asks for one."""
    return any(hasattr(sys.modules.get(base.__module__), FUNCTION) for base in cls.__mro__)


def describe_router_loss(cls: type[nn.Module], config: PreTrainedConfig) -> tuple[str, ...]:
    """A line for the log about the loss, where a configuration asks for it; else none."""
    coefficient = router_loss_coefficient(config)
    if not coefficient:
        return ()
    asks = f"config.json asks for the auxiliary loss of routers (output_router_logits, weight {coefficient:g})"
    if not adds_router_loss(cls):
        return (f"{asks}: transformers' {cls.__name__} has none, so none is added",)
    return (
        f"{asks}: it is added, over the tokens of each forward pass as in transformers, so that it depends on "
        "train.micro_batch_size and the number of ranks",
    )


def refuse_router_loss(cls: type[nn.Module] | None, config: PreTrainedConfig, where: str) -> None:
    """Refuses a configuration that asks for the auxiliary loss, for tasks that do not add it.

    Args:
        cls: transformers' class of the model; None where the class is not one of transformers'.
        config: transformers' configuration.
        where: the file of the configuration, for the message.

    Raises:
        ConfigError: when transformers would add the loss, or may.
    """
    coefficient = router_loss_coefficient(config)
    if coefficient and (cls is None or adds_router_loss(cls)):
        raise ConfigError(
            f"{where}: output_router_logits with a weight of {coefficient:g} asks for an auxiliary loss of routers, "
            f"which tasks/train_text.py alone adds: {REMEDY}"
        )
