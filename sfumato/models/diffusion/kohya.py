"""LoRA adapters with the names of kohya's scripts and an alpha for each layer, and back.

What these files mean is what diffusers' own converters read. For Wan these want adapters of every layer of a block;
files of fewer layers are read here, and by ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from sfumato.errors import ConfigError

KOHYA_FILE = "kohya_lora_weights.safetensors"

_WAN_LAYERS = {
    **{f"self_attn_{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_attn_{name}": f"attn2.to_{name}" for name in "qkv"},
    **{f"cross_attn_{name}_img": f"attn2.add_{name}_proj" for name in "kv"},
    "self_attn_o": "attn1.to_out.0",
    "cross_attn_o": "attn2.to_out.0",
    "ffn_0": "ffn.net.0.proj",
    "ffn_2": "ffn.net.2",
}
"""Layers of a block of Wan in diffusers, by their names in kohya's scripts."""

_FLUX_LAYERS = {
    "transformer_blocks": {
        "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "img_attn_proj": ("attn.to_out.0",),
        "img_mlp_0": ("ff.net.0.proj",),
        "img_mlp_2": ("ff.net.2",),
        "img_mod_lin": ("norm1.linear",),
        "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "txt_attn_proj": ("attn.to_add_out",),
        "txt_mlp_0": ("ff_context.net.0.proj",),
        "txt_mlp_2": ("ff_context.net.2",),
        "txt_mod_lin": ("norm1_context.linear",),
    },
    "single_transformer_blocks": {
        "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "linear2": ("proj_out",),
        "modulation_lin": ("norm.linear",),
    },
}
"""Layers of FLUX.1 in diffusers by block, that one matrix of the original holds, by its name in kohya's scripts."""
MLP_RATIO = 4
"""Rows of ``proj_mlp`` for each row of a query in a single block of FLUX.1."""

SUPPORTED = "Stable Diffusion 1.5 and XL, FLUX.1, Qwen-Image and Wan"

_ORIGINAL_UNET = re.compile(r"lora_unet_(input_blocks|middle_block|output_blocks)_")
"""How layers are named by Stability's own code, whose names kohya's scripts have of Stable Diffusion XL."""

LAYERS_PER_BLOCK = 2
"""Of the UNet of Stable Diffusion XL."""

OTHER_ADAPTERS = {
    "dora_scale": "DoRA",
    "lora_mid": "LoCon with Tucker decomposition",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "oft_": "OFT",
    "diff": "differences of whole weights",
}
"""Adapters that are no pairs of two matrices, by how the names of their tensors begin."""


def to_kohya(layers: Mapping[str, Tensor], pipeline_class: str) -> dict[str, Tensor]:
    """Adapters by kohya's names.

    Args:
        layers: as diffusers stores them, with a scale of 1: ``transformer.X.lora_A.weight`` ``[rank, in]`` and
            ``lora_B`` ``[out, rank]``.
        pipeline_class: of the model, as ``model_index.json`` names it.

    Returns:
        ``lora_unet_X.lora_down.weight``, ``lora_up.weight`` and ``alpha``, which is the rank.

    Raises:
        ConfigError: the model has no names of kohya's that diffusers reads, or a layer has none.
    """
    if any(".lora_magnitude_vector" in name for name in layers):
        raise ConfigError("adapters of variant dora are not written with kohya's names: export a whole model (--merge)")
    if pipeline_class.startswith("StableDiffusion") and not pipeline_class.startswith("StableDiffusion3"):
        from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya

        stored = convert_state_dict_to_kohya(dict(layers))
        # a file of a Stable Diffusion 1.5 has one encoder, lora_te
        return {name: _alpha_like(name, value, stored) for name, value in stored.items()}
    if pipeline_class.startswith("Flux") and not pipeline_class.startswith("Flux2"):
        return _to_flux(layers)
    if not pipeline_class.startswith(("QwenImage", "Wan")):
        raise ConfigError(
            f"no names of kohya's are known for {pipeline_class}, but for {SUPPORTED}; ComfyUI and diffusers read "
            "pytorch_lora_weights.safetensors as it is"
        )
    stored: dict[str, Tensor] = {}
    for name, weight in layers.items():
        layer, _, matrix = name.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        if pipeline_class.startswith("Wan"):
            layer = _wan_name(layer)
        flat = f"lora_unet_{layer.replace('.', '_')}"
        stored[f"{flat}.lora_{'down' if matrix == 'lora_A' else 'up'}.weight"] = weight.contiguous()
        if matrix == "lora_A":
            stored[f"{flat}.alpha"] = torch.tensor(float(weight.shape[0]))
    return stored


def from_kohya(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by diffusers' names, with a scale of 1: alphas are multiplied into the matrices.

    Raises:
        ConfigError: the names are of no model that is supported, the file lacks a matrix, or it has adapters of another
            kind, or of an encoder that diffusers gives none.
    """
    from diffusers.loaders import lora_conversion_utils as converters

    _refuse_other_adapters(stored)
    copy = {name: weight.clone() for name, weight in stored.items()}
    names = " ".join(copy)
    if unread := next((name for name in copy if re.match(r"lora_te(?!_|1_|2_)", name)), None):
        raise ConfigError(
            f"{unread} is of a text encoder that diffusers gives no adapters, such as T5: what it has learned would be "
            "lost without a word; remove the names that begin so if that is meant"
        )
    try:
        if "lora_unet_transformer_blocks_" in names:
            return converters._convert_non_diffusers_qwen_lora_to_diffusers(copy)
        if re.search(r"lora_unet_blocks_\d+_(self_attn|cross_attn|ffn)_", names):
            return _from_wan(copy)
        if re.search(r"lora_unet_(double|single)_blocks_", names):
            return _from_flux(converters, copy)
        if re.search(r"lora_unet_(down|mid|up|input|middle|output)_block", names):
            return _from_stable_diffusion(converters, copy)
    except (KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"these adapters cannot be read as kohya's: {error}") from error
    raise ConfigError(f"these are no adapters with names of kohya's for {SUPPORTED}")


def _refuse_other_adapters(stored: Mapping[str, Tensor]) -> None:
    """Raises ConfigError for adapters that diffusers' pairs of matrices do not hold."""
    for name in stored:
        matrix = name.partition(".")[2]
        kind = next((kind for begin, kind in OTHER_ADAPTERS.items() if matrix.startswith(begin)), None)
        if kind is not None:
            raise ConfigError(
                f"{name} is of {kind}, and LoRA alone is read, pairs of lora_down and lora_up: merge such adapters "
                "into their model with the program that trained them"
            )


def _from_flux(converters: object, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    # diffusers' converter forgets the alphas of the final layers, and the prefix of all layers outside of the blocks
    for name in [key for key in stored if key.startswith("lora_unet_final_layer_") and key.endswith(".alpha")]:
        _fold_alpha(stored, name.removesuffix(".alpha"))
    layers = converters._convert_kohya_flux_lora_to_diffusers(stored)  # type: ignore[attr-defined]
    encoders = _of_text_encoders(layers)
    prefixed = {
        name if name.startswith("transformer.") else f"transformer.{name}": weight
        for name, weight in layers.items()
        if not name.startswith("text_encoder.")
    }
    return _without_padding(prefixed) | encoders


def _fold_alpha(stored: dict[str, Tensor], layer: str) -> None:
    """Multiplies the scale of a layer's adapter into its down matrix, and removes its alpha."""
    down = f"{layer}.lora_down.weight"
    stored[down] = stored[down] * (stored.pop(f"{layer}.alpha").item() / len(stored[down]))


def _to_flux(layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters of layers that the original holds in one matrix as one adapter: its up matrix is block diagonal."""
    remaining = dict(layers)
    stored: dict[str, Tensor] = {}
    blocks = dict.fromkeys(
        (match[1], match[2])
        for name in layers
        if (match := re.match(r"transformer\.((?:single_)?transformer_blocks)\.(\d+)\.", name))
    )
    for kind, number in blocks:
        original = "double_blocks" if kind == "transformer_blocks" else "single_blocks"
        for flat, members in _FLUX_LAYERS[kind].items():
            pairs = [
                tuple(
                    remaining.pop(f"transformer.{kind}.{number}.{member}.lora_{matrix}.weight", None)
                    for matrix in ("A", "B")
                )
                for member in members
            ]
            if all(down is None for down, _ in pairs):
                continue
            down, up = _join_adapters(pairs, members)
            name = f"lora_unet_{original}_{number}_{flat}"
            stored[f"{name}.lora_down.weight"] = down
            stored[f"{name}.lora_up.weight"] = up
            stored[f"{name}.alpha"] = torch.tensor(float(len(down)))
    if remaining:
        raise ConfigError(f"kohya's scripts have no name for {next(iter(remaining))} of FLUX.1")
    return stored


def _join_adapters(pairs: list[tuple[Tensor | None, ...]], members: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """The adapter of the matrix whose rows are those of several layers; a layer without one has zeros."""
    present = [(member, down, up) for member, (down, up) in zip(members, pairs, strict=True) if down is not None]
    member, down, up = present[0]
    assert down is not None and up is not None
    query_rows = len(up) // (MLP_RATIO if member == "proj_mlp" else 1)
    downs = []
    ups = []
    for other, (other_down, other_up) in zip(members, pairs, strict=True):
        rows = query_rows * (MLP_RATIO if other == "proj_mlp" else 1)
        downs.append(torch.zeros_like(down) if other_down is None else other_down)
        ups.append(up.new_zeros(rows, len(down)) if other_up is None else other_up)
    if len({len(matrix) for matrix in downs}) > 1:
        raise ConfigError(f"adapters of {', '.join(members)} have different ranks, but are one matrix in kohya's file")
    return torch.cat(downs).contiguous(), torch.block_diag(*ups).contiguous()


def _without_padding(layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters but for those of zeros alone, which stand for layers that were not trained."""
    padding = {
        name.removesuffix("lora_A.weight")
        for name, weight in layers.items()
        if name.endswith("lora_A.weight") and not weight.any() and not layers[name.replace("lora_A.", "lora_B.")].any()
    }
    return {name: weight for name, weight in layers.items() if name.rpartition("lora_")[0] not in padding}


def _from_wan(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layers = {}
    for name in [key for key in stored if key.endswith(".lora_down.weight")]:
        flat = name.removesuffix(".lora_down.weight")
        block = re.fullmatch(r"lora_unet_blocks_(\d+)_(\w+)", flat)
        layer = None if block is None else _WAN_LAYERS.get(block[2])
        if block is None or layer is None:
            raise ValueError(f"no layer of Wan has the name {flat}")
        down = stored[name]
        alpha = stored[f"{flat}.alpha"].item() if f"{flat}.alpha" in stored else len(down)
        target = f"transformer.blocks.{block[1]}.{layer}"
        layers[f"{target}.lora_A.weight"] = down * (alpha / len(down))
        layers[f"{target}.lora_B.weight"] = stored[f"{flat}.lora_up.weight"]
    if len(layers) != sum(not name.endswith(".alpha") for name in stored):
        raise ValueError("it holds more than pairs of matrices and their alphas")
    return layers


def _from_stable_diffusion(converters: object, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    for name in [key for key in stored if key.endswith(".alpha")]:
        _fold_alpha(stored, name.removesuffix(".alpha"))
    if any(map(_ORIGINAL_UNET.match, stored)):
        if any(re.match(r"lora_unet_(down|up)_blocks_|lora_unet_mid_block_", name) for name in stored):
            raise ValueError("layers of the UNet have names of two kinds, such as input_blocks and down_blocks")
        rename = converters._maybe_map_sgm_blocks_to_diffusers  # type: ignore[attr-defined]
        stored = rename(stored, SimpleNamespace(layers_per_block=LAYERS_PER_BLOCK))
    convert = converters._convert_non_diffusers_lora_to_diffusers  # type: ignore[attr-defined]
    layers, _ = convert(stored)
    unet = {name: weight for name, weight in layers.items() if name.startswith("unet.")}
    return convert_unet_state_dict_to_peft(unet) | _of_text_encoders(layers)


def _of_text_encoders(layers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters of text encoders among those that a converter of diffusers returned, as its scripts name them now.

    Their layers are called otherwise than a UNet's: q_proj, and not to_q.
    """
    from diffusers.utils.state_dict_utils import StateDictType, convert_state_dict_to_diffusers

    encoders = {name: weight for name, weight in layers.items() if name.startswith("text_encoder")}
    return convert_state_dict_to_diffusers(encoders, StateDictType.DIFFUSERS_OLD)


def _alpha_like(name: str, value: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """An alpha as a float number, other tensors as they are in memory."""
    return value.float() if name.endswith(".alpha") else value.contiguous()


def _wan_name(layer: str) -> str:
    """The name of a layer of Wan in kohya's scripts. Raises ConfigError for one that has none."""
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    names = {path: name for name, path in _WAN_LAYERS.items()}
    if block is None or block[2] not in names:
        raise ConfigError(f"kohya's scripts have no name for the layer {layer} of Wan: train adapters of others alone")
    return f"blocks_{block[1]}_{names[block[2]]}"
