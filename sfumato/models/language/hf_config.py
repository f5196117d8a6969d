"""What is read from, and set in, transformers' own causal models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sfumato.errors import ConfigError


def can_set_attention(module: nn.Module) -> bool:
    """Whether a transformers model computes its attention through transformers' interface."""
    return module._can_set_attn_implementation()


def set_attention(module: nn.Module, attention: str) -> None:
    """Makes a transformers model use another attention.

    Raises:
        ConfigError, ValueError: when it does not know it.
    """
    if module.config.get_text_config()._attn_implementation == attention:
        return
    if not can_set_attention(module):
        raise ConfigError(f"{type(module).__name__} has an attention of its own, and none called {attention}")
    module.set_attn_implementation(attention_by_part(module.config, attention, type(module)))


def attention_by_part(config: Any, attention: str, cls: Any = None) -> str | dict[str, str]:
    """What transformers is told of the attention of a language model; encoders beside it keep torch's, but for a class
    that does not know it."""
    decoder = config.get_text_config()
    parts = {name: getattr(config, name) for name in config.sub_configs}
    if decoder is config or not any(part is decoder for part in parts.values()):
        return attention
    beside = "sdpa" if getattr(cls, "_supports_sdpa", True) else "eager"
    return {"": beside} | {name: attention if part is decoder else beside for name, part in parts.items()}


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Settings of rotary positions: one, or besides it one for each kind of layer; none where there are none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def changing_positions(config: Any) -> int | None:
    """Tokens of a row beyond which all its rotary positions depend on its length; None where they never do."""
    config = config.get_text_config()
    limits = [
        settings.get("original_max_position_embeddings") or config.max_position_embeddings
        for settings in rope_settings(config)
        if settings.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def known_positions(config: Any) -> int | None:
    """Positions that a model knows, those that the scaling of its rotary positions adds among them; None where it knows
    no positions, or any number of them."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for scaling in rope_settings(config):
        own = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        positions = max(positions, round(own * float(scaling.get("factor") or 1)))
    return positions


def check_length(config: Any, max_seq_len: int, what: str = "data.max_seq_len") -> None:
    """Whether a model has as many positions as the longest sample.

    Args:
        config: transformers' configuration of the model.
        max_seq_len: tokens of the longest sample.
        what: where the configuration says so.

    Raises:
        ConfigError: when it has fewer, those that the scaling of its rotary positions adds among them.
    """
    positions = known_positions(config)
    if positions is not None and max_seq_len > positions:
        raise ConfigError(
            f"{what} {max_seq_len} is above the {positions} positions that the model knows "
            f"(max_position_embeddings, and the factor of its rope scaling): lower it, or extend the model"
        )


def give_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Gives a module on meta whole weights, tied ones under any of their names, without copying them."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        known = next((name for name in names if name in weights), None)
        weights.update({name: weights[known] for name in names if known is not None})
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    on_meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    assert not on_meta, f"weights of {on_meta[:3]} were not gathered"
