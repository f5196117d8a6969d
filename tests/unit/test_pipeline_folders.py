"""Pipeline folders as people have them: which are loaded, and which are refused by load and check with a remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sfumato.config.sections import ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.frozen_parts import image_autoencoder
from sfumato.models.diffusion.load import build_diffusion_model, find_families
from sfumato.models.estimate.meta_models import diffusion_model_on_meta
from tests.family_rows import ROWS

FAMILIES = ("sd3", "flux", "stable_diffusion", "stable_diffusion_xl", "wan_image")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, results = tmp_path_factory.mktemp("pipelines"), {}
    for name in FAMILIES:
        description = ROWS[name].describe()
        find_families()[description["pipeline"]].build(description, 0).save_pretrained(base / name)
        results[name] = base / name
    return results


def load(folder: Path, name: str) -> DiffusionModel:
    """What a run loads; ``sfumato check`` takes the same folders."""
    config = ModelConfig(model_path=str(folder), max_sequence_length=ROWS[name].tokens)
    diffusion_model_on_meta(config, "no")
    return build_diffusion_model(config)


def refusal(folder: Path, name: str) -> str:
    """What both load and check say."""
    config, said = ModelConfig(model_path=str(folder), max_sequence_length=ROWS[name].tokens), []
    for refuse in (build_diffusion_model, lambda config: diffusion_model_on_meta(config, "no")):
        with pytest.raises(ConfigError) as raised:
            refuse(config)
        said.append(str(raised.value))
    assert said[0].replace("cannot load it", "cannot read it") == said[1]
    return said[0]


def edit(folder: Path, file: str = "model_index.json", **changes: Any) -> None:
    path = folder / file
    described = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in described.items() if value != "absent"}))


def rename_weights(folder: Path, part: str, variant: str) -> None:
    for path in list((folder / part).glob("*.safetensors")):
        path.rename(path.with_name(f"{path.name.removesuffix('.safetensors')}.{variant}.safetensors"))


def shard(folder: Path, part: str, variant: str = "") -> None:
    """Splits the weights of a part into two files with an index, as ``save_pretrained`` writes them."""
    (path,) = (folder / part).glob("*.safetensors")
    tensors, stem, dot = load_file(path), path.name.removesuffix(".safetensors"), variant and f".{variant}"
    names = sorted(tensors)
    files = [f"{stem}{dot}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in names[number::2]}, folder / part / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: files[n % 2] for n, name in enumerate(names)}}
    (folder / part / f"{stem}.safetensors.index{dot}.json").write_text(json.dumps(index))
    path.unlink()


@pytest.mark.parametrize("variant", ["fp16", "bf16"])
@pytest.mark.parametrize("parts", [["transformer"], ["text_encoder"], ["transformer", "vae", "text_encoder"], "shards"])
def test_the_remedy_for_a_variant_works(folders: Any, parts: Any, variant: str, tmp_path: Path) -> None:
    folder = tmp_path / "pipe"
    shutil.copytree(folders["sd3"], folder)
    if parts == "shards":
        shard(folder, "transformer", variant)
    else:
        for part in parts:
            rename_weights(folder, part, variant)
    message = refusal(folder, "sd3")
    assert f"the variant {variant} alone" in message
    command = re.search(r'python -c "import diffusers; (.*)", and give FOLDER', message)
    assert command is not None
    exec(command[1].replace("FOLDER", str(tmp_path / "whole")), {"diffusers": diffusers})
    actual, expected = (load(path, "sd3").denoiser.state_dict() for path in (tmp_path / "whole", folders["sd3"]))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sd3", lambda folder: shard(folder, "transformer")),
        ("sd3", lambda folder: shard(folder, "text_encoder")),
        ("sd3", lambda folder: edit(folder, text_encoder_3=[None, None], tokenizer_3=[None, None])),
        ("sd3", lambda folder: edit(folder, _diffusers_version="absent")),
        ("stable_diffusion", lambda folder: edit(folder, safety_checker="absent", feature_extractor="absent")),
        ("stable_diffusion", lambda folder: shutil.copytree(folder / "unet", folder / "unet_ema") and None),
        ("stable_diffusion", lambda folder: edit(folder, image_encoder=[None, None])),
        ("stable_diffusion_xl", lambda folder: edit(folder, requires_aesthetics_score=True)),
        (
            "sd3",
            lambda folder: (
                shutil.copy(
                    folder / "vae/diffusion_pytorch_model.safetensors",
                    folder / "vae/diffusion_pytorch_model.fp16.safetensors",
                )
                and None
            ),
        ),
    ],
)
def test_folders_that_are_whole_are_loaded(
    folders: Any, name: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    shutil.copytree(folders[name], folder := tmp_path / "pipe")
    change(folder)
    actual, expected = (load(path, name).denoiser.state_dict() for path in (folder, folders[name]))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def without_weights(folder: Path) -> None:
    for path in (folder / "transformer").glob("*.safetensors"):
        path.unlink()


def only_bin(folder: Path) -> None:
    (path,) = (folder / "transformer").glob("*.safetensors")
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()


NULL = [None, None]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("flux", lambda f: edit(f, text_encoder_2=NULL, tokenizer_2=NULL), "needs text_encoder_2, tokenizer_2"),
        ("flux", lambda f: edit(f, text_encoder_2="absent", tokenizer_2="absent"), "needs text_encoder_2"),
        ("sd3", lambda f: edit(f, text_encoder_2=NULL), "needs text_encoder_2"),
        ("sd3", lambda f: edit(f, tokenizer=NULL), "needs tokenizer"),
        ("sd3", lambda f: edit(f, vae=NULL), "needs vae"),
        ("sd3", lambda f: edit(f, scheduler=NULL), "needs scheduler"),
        ("stable_diffusion_xl", lambda f: edit(f, text_encoder=NULL, tokenizer=NULL), "needs text_encoder, tokenizer"),
        ("wan_image", lambda f: edit(f, image_encoder=NULL, image_processor=NULL), "no image_encoder"),
        ("stable_diffusion", lambda f: edit(f, image_encoder=None), "null of image_encoder.*write \\[null, null\\]"),
        (
            "stable_diffusion",
            lambda f: edit(f, safety_checker=["stable_diffusion", "StableDiffusionSafetyChecker"]),
            "safety_checker is missing.*write \\[null, null\\]",
        ),
        ("stable_diffusion_xl", lambda f: edit(f, _class_name="StableDiffusionXLInpaintPipeline"), "not known"),
        ("stable_diffusion_xl", lambda f: edit(f, _class_name="StableDiffusionXLImg2ImgPipeline"), "not known"),
        ("flux", lambda f: edit(f, _class_name="FluxControlPipeline"), "'FluxControlPipeline' is not known"),
        ("sd3", only_bin, "is not read, since it may run a program"),
        ("sd3", lambda f: rename_weights(f, "vae", "x"), "variant x alone"),
        (
            "sd3",
            lambda f: edit(f, "transformer/config.json", quantization_config={"quant_method": "bitsandbytes"}),
            "transformer is quantised \\(bitsandbytes",
        ),
        (
            "flux",
            lambda f: edit(f, "text_encoder_2/config.json", quantization_config={"quant_method": "gptq"}),
            "text_encoder_2 is quantised \\(gptq",
        ),
    ],
)
def test_folders_that_cannot_be_used_are_refused_before_anything_is_encoded(
    folders: Any, name: str, change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    shutil.copytree(folders[name], folder := tmp_path / "pipe")
    change(folder)
    assert re.search(message, refusal(folder, name))


def rename_tensors(folder: Path, part: str, rename: Callable[[str], str | None]) -> None:
    """Writes the weights of a part by other names; those that ``rename`` gives None are left out."""
    (path,) = (folder / part).glob("*.safetensors")
    named = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in named.items() if name is not None}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("part", "rename", "message"),
    [
        ("text_encoder", lambda name: f"module.{name}", ".* and 1[0-9] more, which"),
        ("text_encoder_3", lambda name: f"_orig_mod.{name}", "encoder.block.0"),
        ("text_encoder_2", lambda name: None if name == "text_projection.weight" else name, "text_projection"),
        ("text_encoder_3", lambda name: None if "SelfAttention.v" in name else name, "encoder.block.0.*, which"),
    ],
)
def test_encoders_whose_files_lack_weights_are_refused(
    folders: Any, part: str, rename: Callable[[str], str | None], message: str, tmp_path: Path
) -> None:
    # transformers draws such weights at random, and every prompt would be another one in each run
    shutil.copytree(folders["sd3"], folder := tmp_path / "pipe")
    rename_tensors(folder, part, rename)
    with pytest.raises(ConfigError, match=rf"^model.model_path \S+: the files of {part} lack {message}"):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=ROWS["sd3"].tokens))


def as_float8(folder: Path, part: str, scaled: bool) -> None:
    """The matrices of a part in 8 bits, perhaps with scales as ComfyUI's files have them."""
    (path,) = (folder / part).glob("*.safetensors")
    tensors = load_file(path)
    for name in [name for name, tensor in tensors.items() if tensor.ndim > 1 and name.endswith(".weight")]:
        scale = tensors[name].abs().max() / 448 if scaled else torch.ones(())
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        if scaled:
            tensors[name.replace(".weight", ".scale_weight")] = scale
    save_file(tensors, path, {"format": "pt"})


def two_saves(folder: Path) -> None:
    """Shards beside an older whole file."""
    (path,) = (folder / "transformer").glob("*.safetensors")
    content = path.read_bytes()
    shard(folder, "transformer")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        # diffusers only warns of weights that a configuration has no place for
        ("flux", lambda f: edit(f, "transformer/config.json", guidance_embeds=False), "no place for .*guidance_emb"),
        ("sd3", lambda f: edit(f, "transformer/config.json", qk_norm=None), "no place for .*norm_k.weight"),
        ("flux", lambda f: edit(f, "transformer/config.json", num_layers=3), "files of transformer lack .*blocks.2"),
        ("sd3", lambda f: as_float8(f, "transformer", scaled=True), "no place for .*scale_weight"),
        ("sd3", lambda f: as_float8(f, "transformer", scaled=False), "weight is quantised .*float8"),
        ("sd3", lambda f: as_float8(f, "text_encoder_3", scaled=True), "text_encoder_3: .* is quantised .*float8"),
        ("sd3", lambda f: as_float8(f, "vae", scaled=False), "vae: .* is quantised .*float8"),
        # diffusers would take the shards, and a model whose weights are on meta the whole file
        ("sd3", two_saves, "shards that .*index.json names, of which one was left by an earlier save"),
    ],
)
def test_weights_that_are_not_those_of_the_configuration_are_refused(
    folders: Any, name: str, change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    shutil.copytree(folders[name], folder := tmp_path / "pipe")
    change(folder)
    with pytest.raises(ConfigError, match=message):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=ROWS[name].tokens))


def test_an_output_layer_that_no_prompt_is_read_with_may_be_missing(tmp_path: Path) -> None:
    description = ROWS["hidream"].describe()
    find_families()[description["pipeline"]].build(description, 0).save_pretrained(tmp_path)
    expected = load(tmp_path, "hidream").components["text_encoder_4"].state_dict()
    rename_tensors(tmp_path, "text_encoder_4", lambda name: None if name == "lm_head.weight" else name)
    actual = load(tmp_path, "hidream").components["text_encoder_4"].state_dict()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == ["lm_head.weight"]


def test_a_run_wants_weights_which_a_prediction_does_not_need(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["sd3"], folder := tmp_path / "pipe")
    without_weights(folder)
    config = ModelConfig(model_path=str(folder), max_sequence_length=ROWS["sd3"].tokens)
    with pytest.raises(ConfigError, match="transformer has no weights: copy or download"):
        build_diffusion_model(config)
    assert diffusion_model_on_meta(config, "no")


def test_the_remedy_for_null_works(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["stable_diffusion"], folder := tmp_path / "pipe")
    edit(folder, image_encoder=None)
    assert "write [null, null]" in refusal(folder, "stable_diffusion")
    edit(folder, image_encoder=[None, None])
    assert load(folder, "stable_diffusion")


@pytest.mark.parametrize("file", ["model.safetensors", "v1-5.ckpt"])
def test_a_single_file_is_refused_with_what_makes_a_folder_of_it(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    message = refusal(tmp_path / file, "sd3")
    assert "is a file, not a pipeline folder" in message
    assert f"from_single_file('{tmp_path / file}').save_pretrained('FOLDER')" in message


def test_adapters_of_any_name_and_a_single_part_are_no_pipelines(folders: Any, tmp_path: Path) -> None:
    save_file({"transformer.x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "my_style.safetensors")
    assert "holds adapters (LoRA)" in refusal(tmp_path, "sd3")
    message = refusal(folders["sd3"] / "transformer", "sd3")
    assert "It holds a single part (SD3Transformer2DModel)" in message
    assert "It holds a single part (CLIPTextModelWithProjection)" in refusal(folders["sd3"] / "text_encoder", "sd3")


def test_an_autoencoder_without_a_shift_has_none(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["sd3"], folder := tmp_path / "pipe")
    edit(folder, "vae/config.json", shift_factor=None)
    model = load(folder, "sd3")
    latents = model.encode_pixels(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    expected = model.pipeline.vae.encode(torch.full((1, 3, 16, 16), -1.0)).latent_dist.mode()
    torch.testing.assert_close(latents, expected * model.pipeline.vae.config.scaling_factor)


def test_a_tokenizer_without_a_limit_is_refused(folders, tmp_path: Path) -> None:
    """It ended with an OverflowError of tokenizers when the first prompt was embedded."""
    folder = shutil.copytree(folders["stable_diffusion_xl"], tmp_path / "folder")
    edit(folder, "tokenizer_2/tokenizer_config.json", model_max_length="absent")
    message = refusal(folder, "stable_diffusion_xl")
    assert re.search(r'text_encoder_2 has 8 positions: write "model_max_length": 8 into tokenizer_2/', message)


def test_tokens_that_the_encoder_has_no_embedding_for_are_refused(folders, tmp_path: Path) -> None:
    """As textual inversion leaves them where the tokenizer alone is saved; a run ended with an IndexError."""
    folder = shutil.copytree(folders["stable_diffusion"], tmp_path / "folder")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_tokens(["<my-cat>"])
    tokenizer.save_pretrained(folder / "tokenizer")
    message = refusal(folder, "stable_diffusion")
    assert re.search(r"tokenizer has \d+ tokens, and text_encoder embeddings of \d+: save the encoder, too", message)


def test_an_autoencoder_for_previews_is_refused(folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders["stable_diffusion"], tmp_path / "folder")
    shutil.rmtree(folder / "vae")
    settings: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        settings |= {f"{part}_block_out_channels": (4, 4), f"num_{part}_blocks": (1, 1)}
    diffusers.AutoencoderTiny(**settings, latent_channels=4).save_pretrained(folder / "vae")
    edit(folder, vae=["diffusers", "AutoencoderTiny"])
    assert "AutoencoderTiny, which is for previews" in refusal(folder, "stable_diffusion")


@pytest.mark.parametrize("name", ["wan", "sana", "flux2_klein"])
def test_autoencoders_of_other_classes_are_not_trained(name: str) -> None:
    """Training ended with an error of torch; the latents of FLUX.2 are not scaled by what is measured at the end."""
    description = ROWS[name].describe()
    pipeline = find_families()[description["pipeline"]].build(description, 0)
    class_name = type(pipeline.components["vae"]).__name__
    with pytest.raises(ConfigError, match=f"AutoencoderKL alone is trained here, and the vae of .* is a {class_name}"):
        image_autoencoder(pipeline)


def test_an_autoencoder_with_means_of_its_latents_is_not_trained(folders) -> None:
    """They would go on scaling the latents of the trained one."""
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folders["stable_diffusion"])
    pipeline.vae.register_to_config(latents_mean=[0.1] * 4, latents_std=[2.0] * 4)
    with pytest.raises(ConfigError, match=r"latents_mean and latents_std .* set both to null"):
        image_autoencoder(pipeline)
