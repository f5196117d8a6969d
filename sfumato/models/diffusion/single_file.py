"""A transformer's weights as one file with the names of who published the model, which ComfyUI loads.

diffusers has converters from such files; here are their inverses. They check each file before it is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sfumato.errors import ConfigError

Layers = Mapping[str, tuple[str, ...]]
"""For each layer of the file those of diffusers whose rows it holds, one after the other."""


@dataclass(frozen=True)
class SingleFileNames:
    """How a file names what a transformer of diffusers has."""

    layers: Layers = field(default_factory=dict)
    """Outside of blocks."""
    blocks: Mapping[str, tuple[str, Layers]] = field(default_factory=dict)
    """For each list of blocks of diffusers its name in the file, and the layers of a block."""
    swapped: tuple[str, ...] = ()
    """Layers of the file that hold shift and scale, where diffusers has scale and shift."""
    swapped_in_last: tuple[str, ...] = ()
    """The same in the last block of the first list alone."""
    scales: tuple[str, ...] = ()
    """Ends of layers whose ``weight`` the file calls ``scale``."""
    same: tuple[str, ...] = ()
    """Begins of names that both have; an empty one: all others."""


IMAGE_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")
"""Layers of diffusers' attention: queries, keys, values, the output, the norms of queries and of keys."""
TEXT_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")
"""The same for the text in an attention of text and image."""


def _attention_layers(prefix: str, layers: tuple[str, ...], norms: tuple[str, str], name: str = "attn") -> Layers:
    """The layers of an attention, with queries, keys and values in one matrix.

    Args:
        prefix: of the names in the file.
        layers: names in diffusers, as in ``IMAGE_ATTENTION``.
        norms: names in the file of the norms of queries and of keys.
        name: of the attention in diffusers.
    """
    query, key, value, output, norm_query, norm_key = (f"{name}.{layer}" for layer in layers)
    return {
        f"{prefix}.qkv": (query, key, value),
        f"{prefix}.proj": (output,),
        f"{prefix}.{norms[0]}": (norm_query,),
        f"{prefix}.{norms[1]}": (norm_key,),
    }


_FLUX_NORMS = ("norm.query_norm", "norm.key_norm")
_FLUX_ATTENTIONS = {
    **_attention_layers("img_attn", IMAGE_ATTENTION, _FLUX_NORMS),
    **_attention_layers("txt_attn", TEXT_ATTENTION, _FLUX_NORMS),
}

_FLUX = SingleFileNames(
    layers={
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        **{
            f"{name}.{place}_layer": (f"time_text_embed.{embedder}.linear_{number}",)
            for name, embedder in (
                ("time_in", "timestep_embedder"),
                ("vector_in", "text_embedder"),
                ("guidance_in", "guidance_embedder"),
            )
            for number, place in ((1, "in"), (2, "out"))
        },
    },
    blocks={
        "transformer_blocks": (
            "double_blocks",
            {
                **_FLUX_ATTENTIONS,
                "img_mod.lin": ("norm1.linear",),
                "txt_mod.lin": ("norm1_context.linear",),
                "img_mlp.0": ("ff.net.0.proj",),
                "img_mlp.2": ("ff.net.2",),
                "txt_mlp.0": ("ff_context.net.0.proj",),
                "txt_mlp.2": ("ff_context.net.2",),
            },
        ),
        "single_transformer_blocks": (
            "single_blocks",
            {
                "modulation.lin": ("norm.linear",),
                "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                "linear2": ("proj_out",),
                "norm.query_norm": ("attn.norm_q",),
                "norm.key_norm": ("attn.norm_k",),
            },
        ),
    },
    swapped=("final_layer.adaLN_modulation.1",),
    scales=("query_norm", "key_norm"),
)

_FLUX2 = SingleFileNames(
    layers={
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        **{
            f"{name}_in.{place}_layer": (f"time_guidance_embed.{embedder}.linear_{number}",)
            for name, embedder in (("time", "timestep_embedder"), ("guidance", "guidance_embedder"))
            for number, place in ((1, "in"), (2, "out"))
        },
        **{
            f"{name}.lin": (f"{name}.linear",)
            for name in (
                "double_stream_modulation_img",
                "double_stream_modulation_txt",
                "single_stream_modulation",
            )
        },
    },
    blocks={
        "transformer_blocks": (
            "double_blocks",
            {
                **_FLUX_ATTENTIONS,
                "img_mlp.0": ("ff.linear_in",),
                "img_mlp.2": ("ff.linear_out",),
                "txt_mlp.0": ("ff_context.linear_in",),
                "txt_mlp.2": ("ff_context.linear_out",),
            },
        ),
        "single_transformer_blocks": (
            "single_blocks",
            {
                "linear1": ("attn.to_qkv_mlp_proj",),
                "linear2": ("attn.to_out",),
                "norm.query_norm": ("attn.norm_q",),
                "norm.key_norm": ("attn.norm_k",),
            },
        ),
    },
    swapped=("final_layer.adaLN_modulation.1",),
    scales=("query_norm", "key_norm"),
)

_SD3_NORMS = ("ln_q", "ln_k")
_SD3_ATTENTIONS = {
    **_attention_layers("x_block.attn", IMAGE_ATTENTION, _SD3_NORMS),
    **_attention_layers("x_block.attn2", IMAGE_ATTENTION, _SD3_NORMS, name="attn2"),
    **_attention_layers("context_block.attn", TEXT_ATTENTION, _SD3_NORMS),
}

_SD3 = SingleFileNames(
    layers={
        "pos_embed": ("pos_embed.pos_embed",),
        "x_embedder.proj": ("pos_embed.proj",),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    blocks={
        "transformer_blocks": (
            "joint_blocks",
            {
                **_SD3_ATTENTIONS,
                "x_block.adaLN_modulation.1": ("norm1.linear",),
                "context_block.adaLN_modulation.1": ("norm1_context.linear",),
                "x_block.mlp.fc1": ("ff.net.0.proj",),
                "x_block.mlp.fc2": ("ff.net.2",),
                "context_block.mlp.fc1": ("ff_context.net.0.proj",),
                "context_block.mlp.fc2": ("ff_context.net.2",),
            },
        )
    },
    swapped=("final_layer.adaLN_modulation.1",),
    swapped_in_last=("context_block.adaLN_modulation.1",),
    same=("context_embedder.",),
)

_WAN = SingleFileNames(
    layers={
        "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
        "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
        "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
        "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
        "time_projection.1": ("condition_embedder.time_proj",),
        "head.modulation": ("scale_shift_table",),
        "head.head": ("proj_out",),
        "img_emb.proj.0": ("condition_embedder.image_embedder.norm1",),
        "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
        "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
        "img_emb.proj.4": ("condition_embedder.image_embedder.norm2",),
    },
    blocks={
        "blocks": (
            "blocks",
            {
                **{
                    f"{attention}_attn.{layer}": (f"attn{number}.{name}",)
                    for number, attention in ((1, "self"), (2, "cross"))
                    for layer, name in (
                        *((letter, f"to_{letter}") for letter in "qkv"),
                        ("o", "to_out.0"),
                        ("norm_q", "norm_q"),
                        ("norm_k", "norm_k"),
                    )
                },
                "cross_attn.k_img": ("attn2.add_k_proj",),
                "cross_attn.v_img": ("attn2.add_v_proj",),
                "cross_attn.norm_k_img": ("attn2.norm_added_k",),
                "ffn.0": ("ffn.net.0.proj",),
                "ffn.2": ("ffn.net.2",),
                "norm3": ("norm2",),
                "modulation": ("scale_shift_table",),
            },
        )
    },
    same=("patch_embedding.",),
)

_Z_IMAGE_BLOCK = {
    "attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v"),
    "attention.out": ("attention.to_out.0",),
    "attention.q_norm": ("attention.norm_q",),
    "attention.k_norm": ("attention.norm_k",),
}

_Z_IMAGE = SingleFileNames(
    layers={
        "x_embedder": ("all_x_embedder.2-1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
    },
    blocks={name: (name, _Z_IMAGE_BLOCK) for name in ("layers", "noise_refiner", "context_refiner")},
    same=("",),
)

NAMES = {
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX2,
    "SD3Transformer2DModel": _SD3,
    "WanTransformer3DModel": _WAN,
    "ZImageTransformer2DModel": _Z_IMAGE,
    "QwenImageTransformer2DModel": SingleFileNames(same=("",)),
}
"""Classes of diffusers whose converter is inverted here."""

SUPPORTED = "FLUX.1, FLUX.2, Stable Diffusion 3, Wan, Z-Image and Qwen-Image"


def to_single_file(weights: Mapping[str, Tensor], class_name: str) -> dict[str, Tensor]:
    """The weights of a transformer by the names of its one-file form.

    Args:
        weights: as diffusers names them.
        class_name: of the transformer.

    Returns:
        The same numbers; matrices that the file fuses are joined along their rows.

    Raises:
        ConfigError: for another class, a weight without a name there, or when diffusers' own converter does not give
            back these weights.
    """
    if class_name not in NAMES:
        raise ConfigError(f"one file of {class_name} is not written here, only of {SUPPORTED}")
    names = NAMES[class_name]
    last_block = _last_block(weights, names)
    parts: dict[str, dict[int, Tensor]] = {}
    counts: dict[str, int] = {}
    for name, weight in weights.items():
        place = _place_of(name, names, last_block)
        if place is None:
            raise ConfigError(f"{class_name} as one file: {name} has no place there: the model has layers of its own")
        target, index, count, is_swapped = place
        if is_swapped:
            scale, shift = weight.chunk(2)
            weight = torch.cat([shift, scale])
        parts.setdefault(target, {})[index] = weight
        counts[target] = count
    lacking = [target for target, rows in parts.items() if len(rows) != counts[target]]
    if lacking:
        raise ConfigError(f"{class_name} as one file: {lacking[0]} would lack a part of its rows")
    written = {
        target: next(iter(rows.values())) if len(rows) == 1 else torch.cat([rows[index] for index in sorted(rows)])
        for target, rows in parts.items()
    }
    _check(written, weights, class_name)
    return written


def name_in_file(layer: str, class_name: str) -> str:
    """The name of a transformer's layer in its one-file form; the layer's own where it has none there."""
    place = _place_of(layer, NAMES[class_name], last_block=-1)
    return layer if place is None else place[0]


def _last_block(weights: Mapping[str, Tensor], names: SingleFileNames) -> int:
    """The highest index of the first list of blocks; -1 without one."""
    first = next(iter(names.blocks), None)
    matches = [re.match(rf"{first}\.(\d+)\.", name) for name in weights] if first else []
    return max((int(match[1]) for match in matches if match), default=-1)


def _place_of(name: str, names: SingleFileNames, last_block: int) -> tuple[str, int, int, bool] | None:
    """Name in the file, which part of it, of how many, and whether halves are swapped; None where there is none."""
    prefix = ""
    inner = name
    layers = names.layers
    is_last = False
    if (match := re.match(r"(\w+)\.(\d+)\.(.+)", name)) and match[1] in names.blocks:
        target, layers = names.blocks[match[1]]
        prefix = f"{target}.{match[2]}."
        inner = match[3]
        is_last = match[1] == next(iter(names.blocks)) and int(match[2]) == last_block
    for layer, sources in layers.items():
        for index, source in enumerate(sources):
            if inner != source and not inner.startswith(f"{source}."):
                continue
            end = inner.removeprefix(source)
            if end == ".weight" and layer.endswith(names.scales or ("\0",)):
                end = ".scale"
            is_swapped = layer in (names.swapped_in_last if is_last else () if prefix else names.swapped)
            return f"{prefix}{layer}{end}", index, len(sources), is_swapped
    return (name, 0, 1, False) if any(name.startswith(begin) for begin in names.same) else None


def _check(written: Mapping[str, Tensor], weights: Mapping[str, Tensor], class_name: str) -> None:
    """Has diffusers convert the file back, and compares; a column of each matrix is enough, since rows alone move.

    Raises:
        ConfigError: when something differs.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    convert = SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    try:
        converted = convert(checkpoint={name: _first_column(weight) for name, weight in written.items()})
    except Exception as error:  # the converters take sizes of the published models for granted
        raise ConfigError(
            f"{class_name} as one file: diffusers' converter, which takes the published sizes, does not read it: "
            f"{type(error).__name__}: {error}"
        ) from error
    expected = {name: _first_column(weight) for name, weight in weights.items()}
    differing = [name for name in expected.keys() | converted.keys() if not _are_equal(expected, converted, name)]
    if differing:
        raise ConfigError(
            f"{class_name} as one file: diffusers reads {len(differing)} weights of it as others, such as "
            f"{min(differing)}"
        )


def _first_column(weight: Tensor) -> Tensor:
    return weight[:, :1] if weight.ndim > 1 else weight


def _are_equal(expected: Mapping[str, Tensor], converted: Mapping[str, Tensor], name: str) -> bool:
    return name in expected and name in converted and torch.equal(expected[name], converted[name])
