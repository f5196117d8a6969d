"""Settings that are read from, and set in, transformers' own causal models: attention, positions, weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.models.language.encoder_attention import reads_segments, register_segment_attention
from sfumato.models.language.packed_attention import ATTENTION as PACKED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def can_set_attention(module: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether a transformers model computes its attention through transformers' attention interface."""
    return module._can_set_attn_implementation()


def set_attention(module: PreTrainedModel, attention: str) -> None:
    """Makes a transformers model use another attention, by transformers' name for it.

    Raises:
        ConfigError: when the model has an attention of its own.
        ValueError: from transformers, when the model does not support this attention.
    """
    if module.config.get_text_config()._attn_implementation == attention:
        return
    if not can_set_attention(module):
        raise ConfigError(f"{type(module).__name__} has an attention of its own, and none called {attention}")
    module.set_attn_implementation(attention_by_part(module.config, attention, type(module)))
    attend_in_segments(module)


def attention_by_part(config: PreTrainedConfig, attention: str, cls: type | None = None) -> str | dict[str, str]:
    """The value of ``attn_implementation`` that gives the decoder of a model this attention.

    Encoders beside the decoder get torch's (``sdpa``), or ``eager`` where the model's class does not support that.

    Args:
        config: transformers' configuration of the whole model.
        attention: transformers' name of the attention.
        cls: transformers' class of the model; None stands for one that supports sdpa.

    Returns:
        ``attention`` itself where the model is a decoder alone, else a name for each of the parts, "" being the whole.
    """
    decoder = config.get_text_config()
    # transformers takes one name for all parts unless it is told of each
    parts = {name: getattr(config, name) for name in config.sub_configs}
    if decoder is config or not any(part is decoder for part in parts.values()):
        return attention
    encoder_attention = "sdpa" if getattr(cls, "_supports_sdpa", True) else "eager"
    return {"": encoder_attention} | {
        name: attention if part is decoder else encoder_attention for name, part in parts.items()
    }


def attend_in_segments(module: PreTrainedModel) -> None:
    """Gives the encoders of a model with the attention of packed rows that of segments, where they read these."""
    decoder = module.config.get_text_config()
    if decoder._attn_implementation != PACKED or not reads_segments(type(module)):
        return
    for name in module.config.sub_configs:
        part = getattr(module.config, name)
        if part is not decoder and getattr(part, "_attn_implementation", None) == "sdpa":
            # not by ``set_attn_implementation``, which would look for a package of this name
            part._attn_implementation = register_segment_attention()


def rope_settings(config: PreTrainedConfig) -> list[Keywords]:
    """All settings of rotary positions: ``rope_parameters``, followed by those in it for single kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def changing_positions(config: PreTrainedConfig) -> int | None:
    """The row length in tokens beyond which all rotary positions of a row depend on its length; None without one."""
    config = config.get_text_config()
    # dynamic and longrope change the frequencies of all positions once a row is longer than the original maximum
    limits = [
        settings.get("original_max_position_embeddings") or config.max_position_embeddings
        for settings in rope_settings(config)
        if settings.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def max_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions that a model supports, with those that the scaling of its rotary positions adds.

    None where the configuration names no limit.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    # max_position_embeddings counts the positions before scaling in some folders, and after it in others
    for scaling in rope_settings(config):
        unscaled = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        positions = max(positions, round(unscaled * float(scaling.get("factor") or 1)))
    return positions


def check_length(config: PreTrainedConfig, max_seq_len: int, what: str = "data.max_seq_len") -> None:
    """Checks that a model has positions for the longest sample.

    Args:
        config: transformers' configuration of the model.
        max_seq_len: tokens of the longest sample.
        what: the setting that limits samples to this length, for the message.

    Raises:
        ConfigError: when the model has fewer positions, even with those that the scaling of its rotary positions adds.
    """
    positions = max_positions(config)
    if positions is not None and max_seq_len > positions:
        raise ConfigError(
            f"{what} {max_seq_len} is above the {positions} positions that the model knows "
            f"(max_position_embeddings, and the factor of its rope scaling): lower it, or extend the model"
        )


def give_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Gives a transformers module on meta its whole weights, which are not copied.

    A tied weight may stand under any one of its names. Asserts that no parameter stays on meta.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        given_name = next((name for name in names if name in weights), None)
        weights.update({name: weights[given_name] for name in names if given_name is not None})
    module.load_state_dict(weights, strict=False, assign=True)
    # ``assign`` puts a parameter of its own under each name: the names of one weight are tied again
    module.tie_weights()  # pyright: ignore[reportCallIssue]  (of transformers' modules)
    on_meta = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    assert not on_meta, f"weights of {on_meta[:3]} were not gathered"
