"""Which dropout of a model gets masks that belong to samples (``keyed_dropout.py``), and which is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.parallel.keyed_dropout import DropoutKeys

FUNCTIONAL = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "activation_dropout",
    "layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
"""Settings of model configurations whose dropout happens inside of functions, where no key reaches it."""


def keyed_dropout(module: nn.Module, seed: int) -> DropoutKeys | None:
    """Makes every ``nn.Dropout`` of a model with p > 0 draw its masks from keys. In evaluation nothing is dropped.

    Call it after adapters are added and before ``parallelize``: modules are known by their names.

    Args:
        module: a transformers or diffusers model; changed in place.
        seed: the run's seed.

    Returns:
        The object that sets the keys of a batch, or None when the model has no dropout.

    Raises:
        ConfigError: when the model has dropout that cannot be keyed.
    """
    refuse_unkeyed_dropout(module)
    dropouts = {
        name: cast("nn.Dropout", submodule)
        for name, submodule in module.named_modules()
        if _can_be_keyed(type(submodule)) and cast("nn.Dropout", submodule).p > 0
    }
    if not dropouts:
        return None
    from sfumato.parallel.keyed_dropout import DropoutKeys

    return DropoutKeys.of_modules(module, dropouts, seed)


def refuse_unkeyed_dropout(module: nn.Module) -> None:
    """Raises for dropout that is not an ``nn.Dropout``."""
    for name, submodule in module.named_modules():
        label = name or type(module).__name__
        kind = type(submodule)
        if issubclass(kind, _DropoutNd) and not _can_be_keyed(kind) and cast("_DropoutNd", submodule).p > 0:
            raise ConfigError(f"{label} is a {kind.__name__}, whose masks cannot belong to samples: set its p to 0")
        if isinstance(submodule, nn.MultiheadAttention | nn.RNNBase) and submodule.dropout > 0:
            raise ConfigError(
                f"{label} drops with probability {submodule.dropout:g} inside of torch, where masks cannot belong to "
                "samples: set its dropout to 0"
            )
        # Of encoders such as Whisper's, which drop inside of functions. Asked for the attribute, models of diffusers
        # would look it up in their configuration, with a warning.
        rate = vars(submodule).get("dropout")
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{label} drops with probability {rate:g} inside of functions, where masks cannot belong to samples: "
                "set dropout of its configuration to 0"
            )
        config = getattr(submodule, "config", None)
        values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        for key in FUNCTIONAL:
            value = values.get(key)
            if isinstance(value, int | float) and value > 0:
                raise ConfigError(
                    f"the configuration of {label} has {key} {value:g}, which drops inside of functions, where masks "
                    f"cannot belong to samples: set {key} to 0"
                )


def _can_be_keyed(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are torch's own dropout, which ``keyed_dropout`` may have keyed before."""
    return kind is nn.Dropout or getattr(kind, "is_keyed", False)
