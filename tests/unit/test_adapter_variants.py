"""Adapters of diffusion models other than LoRA: how they start, merged weights, training, and files for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from peft import PeftModel
from torch import nn

from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.lora import is_adapter_name, merge_adapters
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_dit_config, weights_in, write_tiny_pipeline

VARIANTS = ("lokr", "loha", "oft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("variants") / "pipeline")


def model_in(folder: Path, variant: str | None) -> DiffusionModel:
    lora = None if variant is None else LoraConfig.model_validate({"rank": 4, "variant": variant})
    return build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7, lora=lora))


@torch.no_grad()
def change_adapters(module: nn.Module) -> int:
    """Gives adapters values as if trained. Returns how many tensors they are."""
    generator = torch.Generator().manual_seed(3)
    adapters = [weight for name, weight in module.named_parameters() if is_adapter_name(name)]
    for weight in adapters:
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return len(adapters)


@torch.no_grad()
def velocity(denoiser: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return denoiser.eval()(
        hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
        timestep=torch.tensor([300.0, 700.0]),
        encoder_hidden_states=torch.randn(2, 5, denoiser.config.joint_attention_dim, generator=generator),
        pooled_projections=torch.randn(2, denoiser.config.pooled_projection_dim, generator=generator),
        return_dict=False,
    )[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_start_as_the_model_and_merge_into_it(folder: Path, variant: str) -> None:
    plain = model_in(folder, None)
    adapted = model_in(folder, variant)
    before = velocity(plain.denoiser)
    torch.testing.assert_close(velocity(adapted.denoiser), before, rtol=0, atol=1e-6)
    trained = {name for name, weight in adapted.denoiser.named_parameters() if weight.requires_grad}
    assert trained and all(map(is_adapter_name, trained))

    assert change_adapters(adapted.denoiser) == len(trained)
    changed = velocity(adapted.denoiser)
    assert float((changed - before).abs().max()) > 0.003
    weights = {name: weight.clone() for name, weight in adapted.denoiser.state_dict().items()}
    plain.denoiser.load_state_dict(merge_adapters(adapted.plain_denoiser(), weights))
    torch.testing.assert_close(velocity(plain.denoiser), changed, rtol=1e-4, atol=1e-5)
    with adapted.without_adapter():
        torch.testing.assert_close(velocity(adapted.denoiser), before, rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_in_training_draw_no_random_numbers(folder: Path, variant: str) -> None:
    denoiser = model_in(folder, variant).denoiser
    state = torch.get_rng_state()
    denoiser.train()
    denoiser(
        hidden_states=torch.ones(1, 4, 8, 8),
        timestep=torch.tensor([300.0]),
        encoder_hidden_states=torch.ones(1, 5, denoiser.config.joint_attention_dim),
        pooled_projections=torch.ones(1, denoiser.config.pooled_projection_dim),
    )
    dropouts = [getattr(layer, "module_dropout", None) for layer in denoiser.modules()]
    skipped = [dropout for dropout in dropouts if isinstance(dropout, dict)]
    assert all(dropout["default"] < 0 for dropout in skipped)
    assert bool(skipped) == (variant != "oft") and (variant != "oft" or torch.equal(torch.get_rng_state(), state))


@pytest.mark.parametrize(
    "variant", ["lokr", "pissa", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS[1:])]
)
def test_a_run_exports_what_diffusers_and_peft_load_and_resumes(tmp_path: Path, variant: str) -> None:
    train = {"max_steps": 4, "save_steps": 2, "lr": 1e-2}
    config = tiny_dit_config(tmp_path, model={"lora": {"rank": 4, "variant": variant}}, train=train)
    whole = run_task_here("train_dit", config)
    export = whole / "hf_ckpt"
    merged = SD3Transformer2DModel.from_pretrained(export / "transformer")
    base = SD3Transformer2DModel.from_pretrained(Path(config["model"]["model_path"]) / "transformer")
    untrained = velocity(base)
    by_peft = PeftModel.from_pretrained(base, export / "adapter").get_base_model()
    assert float((velocity(merged) - untrained).abs().max()) > 1e-4
    torch.testing.assert_close(velocity(by_peft), velocity(merged), rtol=1e-4, atol=1e-5)

    resume = {"load_checkpoint_path": str(whole / "checkpoints/global_step_2"), "output_dir": str(tmp_path / "again")}
    again = run_task_here("train_dit", {**config, "train": {**config["train"], **resume}})
    assert read_jsonl(again / "metrics.jsonl")[-2:] == read_jsonl(whole / "metrics.jsonl")[-2:]
    assert weights_in(again / "hf_ckpt/adapter") == weights_in(export / "adapter")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"variant": "lokr", "dropout": 0.1}, ["model.lora.dropout has no effect", "lokr"]),
        ({"variant": "oft", "alpha": 8.0}, ["model.lora.alpha has no effect"]),
        ({"variant": "loha", "init_weights": "default"}, ["model.lora.init_weights"]),
        ({"variant": "pissa", "init_weights": "default"}, ["model.lora.init_weights", "pissa"]),
        ({"variant": "lokrr"}, ["variant"]),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, lora: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path, model={"lora": lora}))
    assert all(word in str(caught.value) for word in words)


def test_what_they_cannot_do_is_refused(folder: Path) -> None:
    lora = LoraConfig.model_validate({"rank": 7, "variant": "oft"})
    with pytest.raises(ConfigError, match="rank 7 is the block size"):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7, lora=lora))
    with pytest.raises(ValueError, match="lokr is for diffusion models"):
        LanguageModelConfig.model_validate({"model_path": str(folder), "lora": {"variant": "lokr"}})


def test_pissa_is_that_of_a_plain_peft_loop(folder: Path) -> None:
    """Three steps of AdamW from the largest singular values, and the merged weights after them."""
    from peft import LoraConfig as PeftLoraConfig

    model = model_in(folder, "pissa")
    before = velocity(model_in(folder, None).denoiser)
    torch.testing.assert_close(velocity(model.denoiser), before, rtol=1e-4, atol=1e-5)
    with model.without_adapter():
        assert float((velocity(model.denoiser) - before).abs().max()) > 0.01, "the weights lack what the adapters hold"
    plain = SD3Transformer2DModel.from_pretrained(folder / "transformer").requires_grad_(False)
    targets = [*model.lora_targets]
    plain.add_adapter(PeftLoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights="pissa"))
    losses = []
    for denoiser in (model.denoiser, plain):
        trained = [weight for weight in denoiser.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses.append([])
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            output = denoiser(
                hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
                timestep=torch.tensor([300.0, 700.0]),
                encoder_hidden_states=torch.randn(2, 5, denoiser.config.joint_attention_dim, generator=generator),
                pooled_projections=torch.randn(2, denoiser.config.pooled_projection_dim, generator=generator),
                return_dict=False,
            )[0]
            loss = (output - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][2] < losses[0][0]
    weights = {name: weight.clone() for name, weight in model.denoiser.state_dict().items()}
    merged = model_in(folder, None).denoiser
    merged.load_state_dict(merge_adapters(model.plain_denoiser(), weights))
    torch.testing.assert_close(velocity(merged), velocity(plain), rtol=1e-3, atol=1e-4)


def test_pissa_is_refused_where_it_would_be_wrong(tmp_path: Path, folder: Path) -> None:
    from sfumato.config.diffusion_rl import TrajectoryRLConfig
    from sfumato.config.dit import TrainDitDpoConfig

    lora = {"rank": 4, "variant": "pissa"}
    shared = {"model": {"model_path": str(folder), "lora": lora}, "train": {"output_dir": str(tmp_path / "run")}}
    with pytest.raises(ConfigError, match="is not the reference: take lora"):
        load_config(TrainDitDpoConfig, overrides={**shared, "data": {"data_type": "glyphs"}})
    rl: dict[str, Any] = {
        "rollout": {"num_prompts": 1, "n": 2, "height": 16, "width": 16, "micro_batch_size": 2},
        "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
        "reward": {"rewards": [{"type": "brightness"}]},
    }
    with pytest.raises(ConfigError, match="is not the reference: take lora"):
        load_config(TrajectoryRLConfig, overrides={**shared, **rl, "data": {"data_type": "glyphs"}})
    config = ModelConfig(model_path=str(folder), max_sequence_length=7, lora=LoraConfig.model_validate(lora))
    with pytest.raises(ConfigError, match="init_device meta: adapters of variant pissa are made of the weights"):
        build_diffusion_model(config, init_device="meta")
