"""What Stable Diffusion 3 has beyond what every family does (``test_families.py``)."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import StableDiffusion3Pipeline

from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.noise import keyed_normal
from sfumato.checkpoint.export import export_model
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model, find_families
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.rollout.diffusion.evaluation import sample_images
from tests.tiny import tiny_pipeline_description

PROMPTS = ['write "AB"', 'write "C"']
TOKENS = 7
ALONE = Mesh(Layout(), torch.device("cpu"))


def describe(folder: Path, **changes: dict) -> Path:
    """A description file of a tiny pipeline, with changed sections."""
    description = tiny_pipeline_description()
    for section, values in changes.items():
        description[section] = {**description.get(section, {}), **values}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(description))
    return path


def build(folder: Path, changes: dict | None = None, **config: object) -> DiffusionModel:
    """A tiny model that answers to its inputs: what starts at zero gets random weights, and T5 speaks."""
    model = build_diffusion_model(
        ModelConfig(config_path=str(describe(folder, **(changes or {}))), max_sequence_length=TOKENS, **config)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if parameter.ndim and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        model.pipeline.text_encoder_3.encoder.final_layer_norm.weight.fill_(1.0)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    return build(tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="module")
def folder(model: DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "pipe"
    model.save_pipeline(path)
    return path


def by_diffusers(pipeline: StableDiffusion3Pipeline, guidance_scale: float) -> np.ndarray:
    """Images of diffusers' own sampling loop from the latents that ``by_sfumato`` starts from: uint8 [B, H, W, 3]."""
    pipeline.set_progress_bar_config(disable=True)
    latents = keyed_normal((4, 8, 8), 11, "latent", 0, range(len(PROMPTS)))
    images = pipeline(
        PROMPTS,
        height=16,
        width=16,
        num_inference_steps=4,
        guidance_scale=guidance_scale,
        latents=latents,
        max_sequence_length=TOKENS,
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


def by_sfumato(model: DiffusionModel, guidance_scale: float) -> np.ndarray:
    images = sample_images(
        model,
        model.encode_prompts(PROMPTS),
        list(range(len(PROMPTS))),
        size=(16, 16),
        num_steps=4,
        guidance_scale=guidance_scale,
        seed=11,
        micro_batch_size=8,
    )
    return np.stack(images)


def assert_same_images(first: np.ndarray, second: np.ndarray) -> None:
    assert first.shape == second.shape
    assert first.std() > 1, "an empty image proves nothing"
    assert np.abs(first.astype(int) - second.astype(int)).max() <= 1


def test_freed_encoders_serve_known_prompts_and_are_exported_again(folder: Path, tmp_path: Path) -> None:
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=TOKENS, keep_encoders=False))
    before = by_sfumato(model, 2.0)
    model.free_encoders()
    assert "text_encoder" not in model.components
    assert_same_images(before, by_sfumato(model, 2.0))
    with pytest.raises(RuntimeError, match=r"encoders were freed.*new prompt"):
        model.encode_prompts(["a new prompt"])
    export_model(model, None, tmp_path / "hf_ckpt", ALONE)
    assert_same_images(before, by_diffusers(StableDiffusion3Pipeline.from_pretrained(tmp_path / "hf_ckpt"), 2.0))


def test_tokenizers_are_exported_as_they_came(folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    (source / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")  # which transformers 5 does not write
    index = json.loads((source / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]  # an older name of the class
    (source / "model_index.json").write_text(json.dumps(index))
    model = build_diffusion_model(ModelConfig(model_path=str(source), max_sequence_length=TOKENS))
    export_model(model, None, tmp_path / "hf_ckpt", ALONE)
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        files = [path.name for path in (source / name).iterdir()]
        assert sorted(path.name for path in (tmp_path / "hf_ckpt" / name).iterdir()) == sorted(files)
        for file in files:
            assert (tmp_path / "hf_ckpt" / name / file).read_bytes() == (source / name / file).read_bytes()
    exported = json.loads((tmp_path / "hf_ckpt" / "model_index.json").read_text())
    assert {name: exported[name] for name in index} == index
    assert_same_images(
        by_sfumato(model, 2.0), by_diffusers(StableDiffusion3Pipeline.from_pretrained(tmp_path / "hf_ckpt"), 2.0)
    )
    shutil.rmtree(source)  # a run that ends without its model's folder is exported all the same
    export_model(model, None, tmp_path / "later", ALONE)
    assert_same_images(
        by_sfumato(model, 2.0), by_diffusers(StableDiffusion3Pipeline.from_pretrained(tmp_path / "later"), 2.0)
    )


def test_a_pipeline_without_t5_trains_and_loads(tmp_path: Path) -> None:
    description = tiny_pipeline_description()
    description.pop("t5")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(description))
    model = build_diffusion_model(ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=0))
    model.save_pipeline(tmp_path / "pipe")
    loaded = build_diffusion_model(ModelConfig(model_path=str(tmp_path / "pipe"), max_sequence_length=0))
    length = loaded.encode_prompts(PROMPTS).tensors["prompt_embeds"].shape[1]
    assert length == loaded.pipeline.tokenizer.model_max_length, "only CLIP's tokens"


def test_sd35_attention_and_dynamic_shifting(tmp_path: Path) -> None:
    changes = {
        "transformer": {"dual_attention_layers": [0], "qk_norm": "rms_norm"},
        "scheduler": {"use_dynamic_shifting": True, "shift": 3.0},
    }
    model = build(tmp_path, changes)
    model.save_pipeline(tmp_path / "pipe")
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "pipe")
    assert_same_images(by_sfumato(model, 2.0), by_diffusers(pipeline, 2.0))


def test_the_reference_of_adapters_is_the_model_without_them(folder: Path) -> None:
    config = ModelConfig(model_path=str(folder), max_sequence_length=TOKENS, lora=LoraConfig(rank=4, alpha=16))
    model = build_diffusion_model(config)
    base = by_sfumato(model, 1.0)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model.denoiser).items():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    changed = by_sfumato(model, 1.0)
    assert np.abs(changed.astype(int) - base.astype(int)).max() > 1
    with Policies(model, {"reference": FROZEN}).active("reference") as reference:
        assert_same_images(base, by_sfumato(reference, 1.0))
    assert_same_images(changed, by_sfumato(model, 1.0))


def test_the_reference_of_full_fine_tuning_stays_as_it_was(folder: Path) -> None:
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=TOKENS))
    base = by_sfumato(model, 1.0)
    policies = Policies(model, {"reference": FROZEN})
    with torch.no_grad():
        model.denoiser.proj_out.bias.add_(1.0)
    assert np.abs(by_sfumato(model, 1.0).astype(int) - base.astype(int)).max() > 1
    with policies.active("reference") as frozen:
        assert_same_images(base, by_sfumato(frozen, 1.0))
    assert not any(parameter.requires_grad for parameter in policies.frozen_weights.parameters())


def test_encoders_that_are_freed_are_nowhere_kept(folder: Path) -> None:
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=TOKENS))
    model.remember_prompts(PROMPTS)
    encoder = weakref.ref(model.pipeline.text_encoder_3)
    policies = Policies(model, {"reference": FROZEN})
    assert model.pipeline.text_encoder_3 is encoder(), "the model keeps its own until then"
    model.free_encoders()
    gc.collect()
    assert encoder() is None
    conditioning = model.encode_prompts(PROMPTS)
    with policies.active("reference") as frozen, torch.no_grad():
        assert frozen.predict_velocity(torch.randn(2, 4, 8, 8), torch.tensor([0.9, 0.3]), conditioning).isfinite().all()


def test_export_holds_the_averaged_weights(folder: Path, tmp_path: Path) -> None:
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=TOKENS))
    ema = Ema(model.denoiser, 0.9)
    average = {name: average.clone() for name, average in ema.averages.items()}
    with torch.no_grad():
        model.denoiser.proj_out.bias.add_(1.0)
    export_model(model, ema, tmp_path / "hf_ckpt", ALONE)
    exported = StableDiffusion3Pipeline.from_pretrained(tmp_path / "hf_ckpt").transformer
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, average[name])


def test_frozen_parts_take_the_configured_dtype(folder: Path) -> None:
    lora = LoraConfig(rank=2)
    model = build_diffusion_model(
        ModelConfig(model_path=str(folder), max_sequence_length=TOKENS, dtype="bf16", lora=lora)
    )
    assert model.pipeline.text_encoder.dtype == model.pipeline.vae.dtype == torch.bfloat16
    kinds = {("lora_" in name, parameter.dtype) for name, parameter in model.denoiser.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    full = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=TOKENS, dtype="bf16"))
    assert all(parameter.dtype == torch.float32 for parameter in full.denoiser.parameters()), (
        "trained weights stay float32"
    )
    assert by_sfumato(model, 1.0).dtype == np.uint8


def test_wrong_folders_and_targets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_index\.json does not exist"):
        build_diffusion_model(ModelConfig(model_path=str(tmp_path)))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "KolorsPipeline"}))
    with pytest.raises(ConfigError, match=r"KolorsPipeline.*known: .*StableDiffusion3Pipeline"):
        build_diffusion_model(ModelConfig(model_path=str(tmp_path)))
    lora = LoraConfig(target_modules=["attn.to_q", "attn.to_x"])
    with pytest.raises(ConfigError, match=r"attn\.to_x"):
        build_diffusion_model(ModelConfig(model_path=str(folder), lora=lora))


def test_families_are_found_by_their_file_alone() -> None:
    families = find_families()
    assert families["StableDiffusion3Pipeline"].parallel_plan.blocks == ("JointTransformerBlock",)
