"""Files of adapters: diffusers' loader and a reading after ComfyUI's rule give the weights that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from sfumato.checkpoint.export import export_model
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.models.diffusion.adapter_files import COMFYUI_FILE
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.lora import merge_adapters
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.family_rows import ROWS, wake

ALONE = Mesh(Layout(), torch.device("cpu"))
OWN_NAMES = ("stable_diffusion", "stable_diffusion_xl", "wan", "wan_image", "wan_pair")
"""Families whose names in diffusers are not known to ComfyUI."""


def trained(name: str, folder: Path, **lora: Any) -> DiffusionModel:
    """A family with adapters that are not zero, exported to ``folder / "out"``."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(ROWS[name].describe()))
    tokens = ROWS[name].tokens
    base = build_diffusion_model(ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=tokens))
    wake(base)
    base.save_pipeline(folder / "pipe")
    config = ModelConfig(model_path=str(folder / "pipe"), max_sequence_length=tokens, lora=LoraConfig(**lora))
    model = build_diffusion_model(config)
    with torch.no_grad():
        for number, (key, parameter) in enumerate(model.denoiser.named_parameters()):
            if "lora_B" in key:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(number))
            if "lora_magnitude" in key:
                parameter.mul_(1.3)
    export_model(model, None, folder / "out", ALONE)
    return model


def merged_as_comfyui(file: Path, weights: dict[str, torch.Tensor], map_of: Any) -> dict[str, torch.Tensor]:
    """weight + alpha / rank * up @ down, alpha / rank being 1 where a file has no alpha."""
    stored, merged, used = load_file(file), dict(weights), set()
    for key in weights:
        for name in map_of(key):
            for up, down in (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight")):
                if f"{name}.{up}" in stored:
                    low, high = stored[f"{name}.{down}"], stored[f"{name}.{up}"]
                    scale = stored[f"{name}.alpha"].item() / len(low) if f"{name}.alpha" in stored else 1.0
                    merged[key] = weights[key] + scale * high @ low
                    used |= {f"{name}.{up}", f"{name}.{down}", f"{name}.alpha"}
    assert set(stored) <= used, "ComfyUI would not know these"
    return merged


def comfyui_names(name: str, model: DiffusionModel) -> Any:
    """What ComfyUI calls the layer of a weight, by the name of the weight in diffusers."""
    if name.startswith("stable"):
        return lambda key: [f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"]
    if name.startswith("wan"):
        blocks = ("self_attn", "cross_attn")
        layers = ("q", "k", "v", "o", "k_img", "v_img")
        published = [f"blocks.{b}.{block}.{layer}.weight" for b in range(2) for block in blocks for layer in layers]
        published_names = {
            new: old for old in published for new in convert_wan_transformer_to_diffusers({old: torch.zeros(1)})
        }
        return lambda key: (
            [f"diffusion_model.{published_names[key].removesuffix('.weight')}"] if key in published_names else []
        )
    return lambda key: [f"transformer.{key.removesuffix('.weight')}"]


@pytest.mark.parametrize("variant", ["lora", "rslora"])
@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image", "z_image", *OWN_NAMES])
def test_a_reading_after_comfyuis_rule_gives_the_trained_weights(name: str, variant: str, tmp_path: Path) -> None:
    model = trained(name, tmp_path, rank=4, alpha=24.0, variant=variant)
    parts = model.split_denoiser(model.denoiser)
    for part, denoiser in parts.items():
        folder = tmp_path / "out" if part == model.denoiser_name else tmp_path / "out" / part
        file = folder / (COMFYUI_FILE if name in OWN_NAMES else "pytorch_lora_weights.safetensors")
        assert (folder / COMFYUI_FILE).exists() == (name in OWN_NAMES)
        plain = {key.replace(".base_layer", ""): weight for key, weight in denoiser.state_dict().items()}
        base = {key: weight for key, weight in plain.items() if ".lora_" not in key}
        expected = merge_adapters(denoiser)
        assert any(not torch.equal(expected[key], base[key]) for key in base)
        actual = merged_as_comfyui(file, base, comfyui_names(name, model))
        assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sd3", "flux", "stable_diffusion_xl", "wan_pair"])
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_diffusers_loads_what_was_trained(name: str, variant: str, tmp_path: Path) -> None:
    model = trained(name, tmp_path, rank=4, alpha=24.0, variant=variant)
    files = sorted(tmp_path.glob("out/*.safetensors")) + sorted(tmp_path.glob("out/*/*.safetensors"))
    assert any(file.name == COMFYUI_FILE for file in files) == (name in OWN_NAMES and variant != "dora")
    for weight_name in {file.name for file in files} - ({COMFYUI_FILE} if name == "wan_pair" else set()):
        pipeline = type(model).pipeline_type().from_pretrained(tmp_path / "pipe")
        pipeline.load_lora_weights(tmp_path / "out", weight_name=weight_name)
        if (tmp_path / "out" / "transformer_2").is_dir():
            second = {"load_into_transformer_2": True, "weight_name": weight_name}
            pipeline.load_lora_weights(tmp_path / "out" / "transformer_2", **second)
        result = type(model)(pipeline, max_sequence_length=ROWS[name].tokens)
        with torch.no_grad():
            velocities = [velocity(compared, name) for compared in (model, result)]
        assert_same(velocities[1], velocities[0])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """But for rounding, which networks of these weights enlarge; a scale that is wrong changes the first digit."""
    assert expected.std() > 1e-2
    assert (actual - expected).abs().max() < 1e-3 * expected.abs().max()


def velocity(model: DiffusionModel, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(2, *ROWS[name].latent_shape, generator=generator)
    return model.predict_velocity(latents, torch.tensor([0.9, 0.3]), model.encode_prompts(["write a", "write b"]))


def test_the_folder_alone_is_enough_for_diffusers_beside_a_second_file(tmp_path: Path) -> None:
    model = trained("stable_diffusion", tmp_path, rank=2, alpha=6.0)
    pipeline = type(model).pipeline_type().from_pretrained(tmp_path / "pipe")
    pipeline.load_lora_weights(tmp_path / "out")
    result = type(model)(pipeline, max_sequence_length=7)
    with torch.no_grad():
        assert_same(velocity(result, "stable_diffusion"), velocity(model, "stable_diffusion"))


def test_the_head_of_a_language_model_that_draws_has_files_of_adapters_too(tmp_path: Path) -> None:
    from sfumato.models.omni.pipeline import LanguageToImagePipeline

    model = trained("sd3", tmp_path, rank=2, alpha=6.0)
    parts = model.pipeline.components
    scratch = {"text_encoder": None, "tokenizer": None}
    model.pipeline = LanguageToImagePipeline(parts["transformer"], parts["scheduler"], parts["vae"], **scratch)
    export_model(model, None, tmp_path / "head", ALONE)
    base = type(model).pipeline_type().from_pretrained(tmp_path / "pipe")
    language_to_image_pipeline = LanguageToImagePipeline(base.transformer, base.scheduler, base.vae, **scratch)
    language_to_image_pipeline.load_lora_weights(tmp_path / "head")
    expected = merge_adapters(model.denoiser)
    language_to_image_pipeline.fuse_lora()
    language_to_image_pipeline.unload_lora_weights()
    assert_close(language_to_image_pipeline.transformer.state_dict(), expected, rtol=1e-5, atol=1e-6)


def test_the_header_says_the_scale_that_the_file_has(tmp_path: Path) -> None:
    trained("sd3", tmp_path, rank=4, alpha=24.0, variant="rslora")
    with safe_open(tmp_path / "out" / "pytorch_lora_weights.safetensors", "pt") as file:
        described = json.loads(file.metadata()["lora_adapter_metadata"])
    assert described["transformer.r"] == described["transformer.lora_alpha"] == 4
    assert described["transformer.use_rslora"] is False


def test_dora_says_that_it_is_for_diffusers(tmp_path: Path) -> None:
    model, said = trained("stable_diffusion", tmp_path, rank=4, variant="dora"), []
    model.say = said.append
    export_model(model, None, tmp_path / "again", ALONE)
    assert len(said) == 1 and "variant dora" in said[0] and "--merge" in said[0]
    assert not (tmp_path / "again" / COMFYUI_FILE).exists()


@pytest.mark.parametrize("name", ["stable_diffusion", "wan"])
def test_other_layers_have_comfyuis_names_too(name: str, tmp_path: Path) -> None:
    targets = ["to_q", "ff.net.0.proj", "ff.net.2"] if name != "wan" else ["to_q", "ffn.net.0.proj", "ffn.net.2"]
    model = trained(name, tmp_path, rank=4, alpha=24.0, target_modules=targets)
    pipeline = type(model).pipeline_type().from_pretrained(tmp_path / "pipe")
    pipeline.load_lora_weights(tmp_path / "out", weight_name=COMFYUI_FILE)
    with torch.no_grad():
        actual, expected = (
            velocity(type(model)(pipeline, max_sequence_length=ROWS[name].tokens), name),
            velocity(model, name),
        )
    assert_same(actual, expected)
