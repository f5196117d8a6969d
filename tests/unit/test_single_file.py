"""One-file weights for ComfyUI: what diffusers' own converter reads of them is the exported model, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file
from torch import Tensor

from sfumato.cli import main
from sfumato.errors import ConfigError
from sfumato.models.diffusion import single_file
from sfumato.models.diffusion.single_file import NAMES, to_single_file
from tests.tiny import run_task_here, tiny_dit_config, write_tiny_pipeline
from tests.tiny_families import (
    tiny_flux2_klein,
    tiny_qwen_image,
    tiny_sd3,
    tiny_stable_diffusion,
    tiny_wan,
    tiny_wan_image,
    tiny_wan_image_small,
    tiny_wan_pair,
    tiny_z_image,
)

FAMILIES = {
    "stable diffusion 3": tiny_sd3,
    "wan": tiny_wan,
    "wan, two models": tiny_wan_pair,
    "wan, from an image": tiny_wan_image,
    "wan 2.2, small": tiny_wan_image_small,
    "qwen-image": tiny_qwen_image,
    "z-image": tiny_z_image,
    "flux.2 klein": tiny_flux2_klein,
}


def published(class_name: str, **sizes: Any) -> dict[str, Tensor]:
    """Random weights as a published model has them, one column of each matrix: its converter knows its sizes."""
    with torch.device("meta"):
        module = getattr(diffusers, class_name)(**sizes)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in module.state_dict().items():
        shape = (len(weight), *(1 for _ in weight.shape[1:]))
        weights[name] = torch.randn(shape, generator=generator)
    return weights


def class_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["_class_name"]


def read_back(written: dict[str, Tensor], class_name: str) -> dict[str, Tensor]:
    return SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"](checkpoint=dict(written))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_pipeline_comes_back_from_one_file(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline", described=FAMILIES[family]())
    out = tmp_path / "out"
    assert main(["export", str(folder), str(out), "--comfyui"]) == 0, capsys.readouterr().err
    files = sorted(out.glob("comfyui_*.safetensors"))
    assert [file.stem.removeprefix("comfyui_") for file in files] == sorted(
        path.name for path in folder.glob("transformer*")
    )
    for file in files:
        part = file.stem.removeprefix("comfyui_")
        expected = {}
        for path in (folder / part).glob("*.safetensors"):
            expected |= load_file(path)
        class_name = class_of(folder / part)
        converted = read_back(load_file(file), class_name)
        assert converted.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(converted[name], weight), name


@pytest.mark.parametrize("family", ["stable diffusion 3", "wan", "z-image", "flux.2 klein"])
def test_diffusers_loads_the_file_itself(family: str, tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline", described=FAMILIES[family]())
    assert main(["export", str(folder), str(tmp_path / "out"), "--comfyui"]) == 0
    cls = getattr(diffusers, class_of(folder / "transformer"))
    file = tmp_path / "out" / "comfyui_transformer.safetensors"
    loaded = cls.from_single_file(str(file), config=str(folder), subfolder="transformer", local_files_only=True)
    expected = cls.from_pretrained(folder, subfolder="transformer").state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize("guidance", [True, False])
def test_flux_1_of_the_published_size_comes_back(guidance: bool) -> None:
    weights = published("FluxTransformer2DModel", num_layers=2, num_single_layers=2, guidance_embeds=guidance)
    written = to_single_file(weights, "FluxTransformer2DModel")
    assert "double_blocks.1.img_attn.qkv.weight" in written and "single_blocks.0.linear1.bias" in written
    assert written["double_blocks.0.txt_attn.norm.key_norm.scale"].shape == (128,)
    converted = read_back(written, "FluxTransformer2DModel")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())


def test_sizes_that_the_converter_does_not_know_are_refused() -> None:
    weights = published("FluxTransformer2DModel", num_layers=1, num_single_layers=1, num_attention_heads=2)
    with pytest.raises(ConfigError, match="takes the published sizes, does not read it"):
        to_single_file(weights, "FluxTransformer2DModel")


def test_what_is_read_as_something_else_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale and shift in diffusers' order load without an error, and draw noise."""
    weights = published("FluxTransformer2DModel", num_layers=1, num_single_layers=1)
    names = dataclasses.replace(NAMES["FluxTransformer2DModel"], swapped=())
    monkeypatch.setitem(single_file.NAMES, "FluxTransformer2DModel", names)
    with pytest.raises(ConfigError, match=r"reads 2 weights of it as others, such as norm_out\.linear\.bias"):
        to_single_file(weights, "FluxTransformer2DModel")


def test_weights_without_a_place_and_missing_rows_are_named() -> None:
    weights = published("WanTransformer3DModel", num_layers=1, num_attention_heads=2, ffn_dim=32)
    with pytest.raises(ConfigError, match=r"extra\.weight has no place there"):
        to_single_file(weights | {"extra.weight": torch.ones(1, 1)}, "WanTransformer3DModel")
    flux = published("FluxTransformer2DModel", num_layers=1, num_single_layers=1)
    del flux["transformer_blocks.0.attn.to_k.weight"]
    with pytest.raises(ConfigError, match=r"double_blocks\.0\.img_attn\.qkv\.weight would lack a part"):
        to_single_file(flux, "FluxTransformer2DModel")


def test_adapters_are_merged_first_and_other_models_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_task_here("train_dit", tiny_dit_config(tmp_path, model={"lora": {"rank": 2}}, train={"max_steps": 1}))
    assert main(["export", str(run), str(tmp_path / "adapters"), "--comfyui"]) == 2
    assert "add --merge" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge", "--comfyui", "--dtype", "bf16"]) == 0
    file = load_file(tmp_path / "merged" / "comfyui_transformer.safetensors")
    assert {weight.dtype for weight in file.values()} == {torch.bfloat16}
    unet = write_tiny_pipeline(tmp_path / "unet", described=tiny_stable_diffusion())
    assert main(["export", str(unet), str(tmp_path / "none"), "--comfyui"]) == 2
    assert "has no transformer: one file holds FLUX.1" in capsys.readouterr().err and not (tmp_path / "none").exists()
