"""kohya's names of adapters, against diffusers' own readers, and back."""

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, QwenImagePipeline, StableDiffusionPipeline, StableDiffusionXLPipeline, WanPipeline
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft
from safetensors.torch import load_file, save_file

from sfumato.commands.export_formats import import_lora
from sfumato.errors import ConfigError
from sfumato.models.diffusion.kohya import from_kohya, to_kohya
from tests.unit.test_lora_files import trained

READERS = {
    "stable_diffusion": ("StableDiffusionPipeline", StableDiffusionPipeline),
    "stable_diffusion_2": ("StableDiffusionPipeline", StableDiffusionPipeline),
    "stable_diffusion_xl": ("StableDiffusionXLPipeline", StableDiffusionXLPipeline),
    "qwen_image": ("QwenImagePipeline", QwenImagePipeline),
    "wan": ("WanPipeline", WanPipeline),
}


WHOLE_BLOCKS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
"""What diffusers' reader of kohya's files for Wan expects to be there."""


def exported_layers(name, folder):
    trained(name, folder, rank=2, alpha=4, **({"target_modules": WHOLE_BLOCKS} if name == "wan" else {}))
    return load_file(folder / "out" / "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize("name", READERS)
def test_diffusers_reads_what_is_written_bit_for_bit(name, tmp_path: Path):
    class_name, pipeline = READERS[name]
    layers = exported_layers(name, tmp_path)
    stored = to_kohya(layers, class_name)
    assert all(key.startswith("lora_unet_") for key in stored)
    downs = [key for key in stored if key.endswith("lora_down.weight")]
    assert len(downs) == len(layers) // 2
    for key in downs:
        assert stored[key.replace("lora_down.weight", "alpha")] == stored[key].shape[0] == 2
    save_file(stored, tmp_path / "kohya.safetensors")

    read = pipeline.lora_state_dict(str(tmp_path / "kohya.safetensors"))
    read = read[0] if isinstance(read, tuple) else read
    if name.startswith("stable_diffusion"):
        # diffusers reads these by its names of before peft; how often each matrix comes is compared
        by_bits = sorted(value.numpy().tobytes() for value in read.values())
        assert by_bits == sorted(value.numpy().tobytes() for value in layers.values())
    else:
        assert read.keys() == layers.keys()
        assert all(torch.equal(read[key], layers[key]) for key in layers)

    back = from_kohya(load_file(tmp_path / "kohya.safetensors"))
    assert back.keys() == layers.keys()
    assert all(torch.equal(back[key], layers[key]) for key in layers)


def flux_layers(block, names, rows, columns):
    generator = torch.Generator().manual_seed(len(block))
    return {
        f"transformer.{block}.{name}.lora_{matrix}.weight": torch.randn(shape, generator=generator)
        for name in names
        for matrix, shape in (("A", (2, columns)), ("B", (rows.get(name, 8), 2)))
    }


def test_flux_has_fused_matrices_as_diffusers_reads_them():
    """Rows of the real model, which diffusers' reader expects of single blocks."""
    attention = ["attn.to_q", "attn.to_k", "attn.to_v"]
    added = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]
    double = [*attention, *added, "attn.to_out.0", "ff.net.2", "norm1.linear"]
    layers = flux_layers("transformer_blocks.3", double, {}, 8)
    rows = {**dict.fromkeys(attention, 3072), "proj_mlp": 12288}
    layers |= flux_layers("single_transformer_blocks.11", [*attention, "proj_mlp", "proj_out"], rows, 8)
    stored = to_kohya(layers, "FluxPipeline")
    assert stored["lora_unet_single_blocks_11_linear1.lora_up.weight"].shape == (3 * 3072 + 12288, 8)
    assert stored["lora_unet_single_blocks_11_linear1.alpha"] == 8
    read = FluxPipeline.lora_state_dict(stored)
    read = read[0] if isinstance(read, tuple) else read
    assert read.keys() == layers.keys()
    assert all(torch.equal(read[name], layers[name]) for name in layers)

    some = {name: weight for name, weight in layers.items() if "to_k" not in name and "proj_mlp" not in name}
    back = from_kohya(to_kohya(some, "FluxPipeline"))
    assert back.keys() == some.keys()
    assert all(torch.equal(back[name], some[name]) for name in some)
    with pytest.raises(ConfigError, match=r"no name for transformer\.x_embedder"):
        to_kohya({"transformer.x_embedder.lora_A.weight": torch.ones(2, 2)}, "FluxPipeline")


def test_some_layers_of_wan_are_read_back():
    layers = {
        f"transformer.blocks.{block}.attn2.to_out.0.lora_{matrix}.weight": torch.randn(shape)
        for block in (0, 11)
        for matrix, shape in (("A", (2, 3)), ("B", (5, 2)))
    }
    stored = to_kohya(layers, "WanPipeline")
    assert "lora_unet_blocks_11_cross_attn_o.alpha" in stored
    back = from_kohya(stored)
    assert back.keys() == layers.keys()
    assert all(torch.equal(back[key], layers[key]) for key in layers)
    with pytest.raises(ConfigError, match="no layer of Wan has the name lora_unet_blocks_0_self_attn_x"):
        from_kohya({"lora_unet_blocks_0_self_attn_x.lora_down.weight": torch.ones(2, 2)})


def test_alphas_of_others_are_multiplied_in():
    layers = {
        "lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight": torch.ones(2, 3),
        "lora_unet_transformer_blocks_0_attn_to_q.lora_up.weight": torch.ones(4, 2),
        "lora_unet_transformer_blocks_0_attn_to_q.alpha": torch.tensor(1.0),
    }
    back = from_kohya(layers)
    up, down = (back[f"transformer.transformer_blocks.0.attn.to_q.lora_{matrix}.weight"] for matrix in "BA")
    assert torch.equal(up @ down, torch.full((4, 3), 1.0))


def kohya_pair(name, rows, columns, alpha):
    generator = torch.Generator().manual_seed(len(name))
    return {
        f"{name}.lora_down.weight": torch.randn(2, columns, generator=generator),
        f"{name}.lora_up.weight": torch.randn(rows, 2, generator=generator),
        f"{name}.alpha": torch.tensor(alpha),
    }


def test_layers_of_flux_outside_of_the_blocks_keep_their_place_and_scale():
    names = {
        "img_in": "x_embedder",
        "final_layer_linear": "proj_out",
        "double_blocks_3_img_attn_proj": "transformer_blocks.3.attn.to_out.0",
    }
    stored = {}
    for name in names:
        stored |= kohya_pair(f"lora_unet_{name}", 4, 3, alpha=0.5)
    back = from_kohya(stored)
    assert {name.partition(".lora")[0] for name in back} == {f"transformer.{layer}" for layer in names.values()}
    for name, layer in names.items():
        down, up = (stored[f"lora_unet_{name}.lora_{matrix}.weight"] for matrix in ("down", "up"))
        assert torch.equal(
            back[f"transformer.{layer}.lora_B.weight"] @ back[f"transformer.{layer}.lora_A.weight"],
            up @ down * 0.25,
        )


def test_stable_diffusion_xl_has_the_names_of_its_original():
    """The layers of the published model, whose places in diffusers its conversion script gives."""
    names = {
        "input_blocks_4_1_transformer_blocks_0_attn1_to_q": (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
        ),
        "input_blocks_8_1_proj_in": "down_blocks.2.attentions.1.proj_in",
        "middle_block_1_transformer_blocks_9_ff_net_2": "mid_block.attentions.0.transformer_blocks.9.ff.net.2",
        "output_blocks_5_1_transformer_blocks_1_attn2_to_out_0": (
            "up_blocks.1.attentions.2.transformer_blocks.1.attn2.to_out.0"
        ),
    }
    stored = {}
    for name in names:
        stored |= kohya_pair(f"lora_unet_{name}", 4, 3, alpha=1.0)
    stored |= kohya_pair("lora_te2_text_model_encoder_layers_0_mlp_fc1", 4, 3, alpha=1.0)
    back = from_kohya(stored)
    unet = {name.partition(".lora")[0] for name in back if name.startswith("unet.")}
    assert unet == {f"unet.{layer}" for layer in names.values()}
    for name, layer in names.items():
        assert torch.equal(back[f"unet.{layer}.lora_A.weight"], stored[f"lora_unet_{name}.lora_down.weight"] / 2)
    assert any(name.startswith("text_encoder_2.") for name in back)
    with pytest.raises(ConfigError, match="names of two kinds"):
        from_kohya(stored | kohya_pair("lora_unet_down_blocks_1_attentions_0_proj_in", 4, 3, alpha=1.0))


def encoder_layers(layers):
    """The adapters of text encoders, by the names that diffusers' loader gives them."""
    encoders = {name: weight for name, weight in layers.items() if name.startswith("text_encoder")}
    return convert_state_dict_to_peft(convert_state_dict_to_diffusers(encoders))


@pytest.mark.parametrize(
    ("pipeline", "layer"),
    [
        (StableDiffusionPipeline, "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"),
        (FluxPipeline, "lora_unet_double_blocks_3_img_attn_proj"),
    ],
)
def test_attention_of_text_encoders_keeps_its_adapters(pipeline, layer):
    """diffusers loads adapters whose names it does not find without a word."""
    encoder = "lora_te1_text_model_encoder_layers_0"
    stored = kohya_pair(layer, 4, 3, alpha=2.0)
    for name in ("self_attn_q_proj", "self_attn_out_proj", "mlp_fc1"):
        stored |= kohya_pair(f"{encoder}_{name}", 4, 3, alpha=2.0)  # the rank, so that the scale is 1
    direct = pipeline.lora_state_dict({name: weight.clone() for name, weight in stored.items()})
    expected = encoder_layers(direct[0] if isinstance(direct, tuple) else direct)
    read = encoder_layers(from_kohya(stored))
    assert read.keys() == expected.keys()
    assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in read
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_a_matrix_of_several_layers_is_written_for_each(tmp_path: Path):
    stored = kohya_pair("lora_unet_double_blocks_3_img_attn_qkv", 12, 3, alpha=2.0)
    save_file(stored, tmp_path / "flux.safetensors")
    layers = load_file(import_lora(tmp_path / "flux.safetensors", tmp_path / "out"))
    down = stored["lora_unet_double_blocks_3_img_attn_qkv.lora_down.weight"]
    for name in ("to_q", "to_k", "to_v"):
        assert torch.equal(layers[f"transformer.transformer_blocks.3.attn.{name}.lora_A.weight"], down)


@pytest.mark.parametrize(("matrix", "kind"), [("dora_scale", "DoRA"), ("hada_w1_a", "LoHa"), ("diff", "differences")])
def test_adapters_that_are_no_pairs_of_matrices_are_refused_by_their_kind(matrix, kind):
    layer = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    stored = kohya_pair(layer, 4, 3, alpha=1.0) | {f"{layer}.{matrix}": torch.ones(4, 1)}
    with pytest.raises(ConfigError, match=f"{matrix} is of {kind}.*merge such adapters"):
        from_kohya(stored)


def test_adapters_that_diffusers_would_lose_are_refused():
    stored = kohya_pair("lora_unet_double_blocks_0_img_attn_proj", 4, 3, alpha=1.0)
    with pytest.raises(ConfigError, match=r"lora_te3_encoder_block_0_layer_0_SelfAttention_q.*such as T5"):
        from_kohya(stored | kohya_pair("lora_te3_encoder_block_0_layer_0_SelfAttention_q", 4, 3, alpha=1.0))


def test_models_without_names_are_refused():
    layers = {"transformer.x.lora_A.weight": torch.ones(2, 2), "transformer.x.lora_B.weight": torch.ones(2, 2)}
    for name in ("StableDiffusion3Pipeline", "Flux2Pipeline", "ZImagePipeline"):
        with pytest.raises(ConfigError, match=f"no names of kohya's are known for {name}"):
            to_kohya(layers, name)
    with pytest.raises(ConfigError, match="no name for the layer proj_out of Wan"):
        to_kohya({"transformer.proj_out.lora_A.weight": torch.ones(2, 2)}, "WanPipeline")
    with pytest.raises(ConfigError, match="these are no adapters"):
        from_kohya({"weight": torch.ones(2)})
    with pytest.raises(ConfigError, match="cannot be read as kohya's"):
        from_kohya({"lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight": torch.ones(2, 3)})
