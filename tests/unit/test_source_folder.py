"""What a folder of a language model holds beyond plain weights of one dtype: kept by an export, left out aloud, or
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.commands.check import check_config
from sfumato.errors import ConfigError
from sfumato.models.language_parts import build_byte_tokenizer
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config, tiny_text_rl_config, write_config

BF16: dict[str, Any] = {"mixed_precision": "bf16", "max_steps": 1, "lr": 1e-30, "lr_warmup_steps": 0}


def write_model(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    """A bf16 folder as transformers writes it; weights that its class keeps in float32 are."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    described = tiny_language_description(kind) | fields
    config = CONFIG_MAPPING[described.pop("model_type")](**described)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(6.8170 + 1e-4 * torch.arange(len(buffer)))
    module.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


def config_of(tmp_path: Path, folder: Path, **model: Any) -> dict[str, Any]:
    config = tiny_text_config(tmp_path, train=BF16, eval={"every_steps": 0})
    return config | {"model": {"model_path": str(folder), **model}}


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(source: Path, export: Path) -> None:
    before, after = weights(source), weights(export)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype and torch.equal(weight, after[name]), name


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora merged"])
def test_weights_that_a_class_keeps_in_float32_stay_so(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    from sfumato.checkpoint.export import export_checkpoint

    folder = write_model(tmp_path / "model", "deepseek_v3")
    biases = [weight for name, weight in weights(folder).items() if name.endswith("e_score_correction_bias")]
    assert biases and all(bias.dtype == torch.float32 and bias.unique().numel() == 4 for bias in biases)
    run = run_task_here("train_text", config_of(tmp_path, folder, lora=lora))
    if lora is not None:
        export_checkpoint(run, tmp_path / "merged", merge=True)
    assert_same_weights(folder, run / "hf_ckpt" if lora is None else tmp_path / "merged")


def test_what_a_folder_holds_as_float32_among_others_stays_so(tmp_path: Path) -> None:
    """Such as routers or norms, by the decision of who published it."""
    folder = write_model(tmp_path / "model")
    stored = {name: weight.float() if "norm" in name else weight for name, weight in weights(folder).items()}
    stored["model.norm.weight"] += 1e-4
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    run = run_task_here("train_text", config_of(tmp_path, folder))
    assert_same_weights(folder, run / "hf_ckpt")


def test_a_folder_of_float32_is_exported_in_the_precision_of_the_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    save_file({name: weight.float() for name, weight in weights(folder).items()}, folder / "model.safetensors")
    run = run_task_here("train_text", config_of(tmp_path, folder))
    assert {weight.dtype for weight in weights(run / "hf_ckpt").values()} == {torch.bfloat16}


def write_mxfp4(folder: Path) -> Path:
    """A tiny gpt-oss whose experts are quantised as those that were published."""
    from transformers import GptOssConfig, GptOssForCausalLM

    fields = tiny_language_description("llama") | {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    fields |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}
    fields.pop("model_type")
    torch.manual_seed(0)
    GptOssForCausalLM(GptOssConfig(**fields)).to(torch.bfloat16).save_pretrained(folder)
    stored = weights(folder)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        stored[f"{name}_blocks"] = blocks
        stored[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 122, dtype=torch.uint8)  # 2^-5
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    build_byte_tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_quantised_base_is_trained_and_exported_as_plain_numbers_and_says_so(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder = write_mxfp4(tmp_path / "model")
    run = run_task_here("train_text", config_of(tmp_path, folder))
    assert "quantised by mxfp4" in capsys.readouterr().err
    assert "quantization_config" not in json.loads((run / "hf_ckpt/config.json").read_text())
    plain = Mxfp4Config(dequantize=True)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=plain)
    exported = AutoModelForCausalLM.from_pretrained(run / "hf_ckpt", dtype=torch.bfloat16)
    for name, weight in expected.state_dict().items():
        assert torch.allclose(weight, exported.state_dict()[name], rtol=0, atol=1e-20), name  # zeros move by lr


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"load_in_8bit": True},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "something_new"},
    ],
)
def test_quantised_weights_that_cannot_be_trained_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model")
    edit_config(folder, quantization_config=settings)
    for lora in (None, {"rank": 2}):
        with pytest.raises(
            ConfigError, match=r"quantised by .*take the folder of the same model that is not quantised"
        ):
            run_task_here("train_text", config_of(tmp_path, folder, lora=lora))


def test_layers_for_further_tokens_are_not_counted_by_an_export(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    edit_config(folder, num_nextn_predict_layers=1)
    config = config_of(tmp_path, folder)
    run = run_task_here("train_text", config)
    assert "num_nextn_predict_layers 1" in capsys.readouterr().err
    checked = check_config(write_config(config, tmp_path / "config.yaml"))
    assert any("num_nextn_predict_layers 1" in note for note in checked.notes)
    assert json.loads((run / "hf_ckpt/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_head_of_its_own_beside_a_tied_embedding_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    stored = weights(folder)
    embedding = stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    run_task_here("train_text", config_of(tmp_path / "equal", folder))  # stored twice, which is no contradiction
    save_file(stored | {"lm_head.weight": embedding + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"tie_word_embeddings true, but lm_head\.weight in model\.safetensors is anoth"
    ):
        run_task_here("train_text", config_of(tmp_path / "other", folder))


def test_adapters_on_a_tied_head_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    lora = {"rank": 2, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ConfigError, match=r"'lm_head' of LlamaForCausalLM is tied to the embedding"):
        run_task_here("train_text", config_of(tmp_path, folder, lora=lora))


@pytest.mark.parametrize("make", [tiny_text_config, tiny_text_rl_config])
@pytest.mark.parametrize("kind", ["folder", "description"])
def test_an_auxiliary_loss_that_is_not_added_is_refused(tmp_path: Path, make: Any, kind: str) -> None:
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    config = make(tmp_path, "qwen3_moe")
    description = write_config(tiny_language_description("qwen3_moe") | asks, tmp_path / "asks.yaml")
    model = {"config_path": str(description), "tokenizer_path": "bytes"}
    if kind == "folder":
        model = {"model_path": str(write_model(tmp_path / "model", "qwen3_moe", **asks))}
    config["model"] = model
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef 0\.02 asks for .* set output_router_logits to false"):
        run_task_here("rl_text" if make is tiny_text_rl_config else "train_text", config)
    assert any(
        "auxiliary loss" in problem for problem in check_config(write_config(config, tmp_path / "c.yaml")).problems
    )
