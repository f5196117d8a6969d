"""What a folder of a language model holds beyond plain weights of one dtype: kept by an export, left out aloud, or
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from sfumato.checkpoint.export import export_model
from sfumato.commands.check_config import check_config
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config
from sfumato.config.sections import LoraConfig
from sfumato.config.text import LanguageModelConfig, TrainTextConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.media.image_conversation import ImageConversation
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_language_model
from sfumato.models.language.parts import build_byte_tokenizer, read_model_config
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.survey.test_tiny_configs import NAMES
from tests.survey.tiny_configs import tiny_config
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config, tiny_text_rl_config, write_config
from tests.tiny_vision import tiny_vision_description

BF16: dict[str, Any] = {"mixed_precision": "bf16", "max_steps": 1, "lr": 1e-30, "lr_warmup_steps": 0}


def write_model(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    """A bf16 folder as transformers writes it; weights that its class keeps in float32 are."""
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "flint"])  # a buffer; parameters
def test_frozen_weights_are_float32_where_transformers_loads_them_so_also_on_meta(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3") if kind == "deepseek_v3" else tmp_path / "model"
    if kind != "deepseek_v3":
        AutoModelForCausalLM.from_config(tiny_config(kind)).save_pretrained(folder)
    model_config = LanguageModelConfig(
        model_path=str(folder), tokenizer_path="bytes", dtype="bf16", lora=LoraConfig(rank=2)
    )
    expected, found = {}, {}
    for device, tensors in (("cpu", expected), ("meta", found)):
        train = TextTrainConfig(output_dir="unused", init_device=device)
        model = build_language_model(model_config, train)
        model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
        tensors |= {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    kept = "e_score_correction_bias" if kind == "deepseek_v3" else "gate.weight"
    assert {tensor.dtype for name, tensor in expected.items() if name.endswith(kept)} == {torch.float32}
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
        assert tensor.requires_grad == found[name].requires_grad, name


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora merged"])
def test_weights_that_a_class_keeps_in_float32_stay_so(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    biases = [weight for name, weight in weights(folder).items() if name.endswith("e_score_correction_bias")]
    assert biases and all(bias.dtype == torch.float32 and bias.unique().numel() == 4 for bias in biases)
    run = run_task_here("train_text", config_of(tmp_path, folder, lora=lora))
    if lora is not None:
        export_checkpoint(run, tmp_path / "merged", merge=True)
    assert_same_weights(folder, run / "hf_ckpt" if lora is None else tmp_path / "merged")


@pytest.mark.slow
def test_rl_exports_them_as_float32_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    config = tiny_text_rl_config(tmp_path, train=BF16)
    run = run_task_here("rl_text", config | {"model": {"model_path": str(folder)}})
    assert_same_weights(folder, run / "hf_ckpt")


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
    from transformers import Mxfp4Config

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


@pytest.mark.parametrize("keys", [("quantization",), ("quantization_config",), ("quantization", "quantization_config")])
def test_folders_of_mlx_are_refused_by_name(tmp_path: Path, keys: tuple[str, ...]) -> None:
    folder = write_model(tmp_path / "model")
    edit_config(folder, **{key: {"group_size": 64, "bits": 4} for key in keys})
    with pytest.raises(ConfigError, match=r"quantised by MLX.*take the folder of the same model that is not quantised"):
        run_task_here("train_text", config_of(tmp_path, folder))


def write_code(folder: Path) -> None:
    """Code beside a model, as a folder on the hub has it."""
    (folder / "configuration_x.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass XConfig(LlamaConfig):\n    model_type = 'x'\n"
    )
    (folder / "modeling_x.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_x import XConfig\n\n\n"
        "class XForCausalLM(LlamaForCausalLM):\n    config_class = XConfig\n"
    )
    edit_config(
        folder, auto_map={"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    )


def test_code_that_transformers_stands_in_for_is_not_named_by_an_export(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / "model")
    write_code(folder)
    tokenizer_path = folder / "tokenizer_config.json"
    code = {"AutoTokenizer": [None, "tokenization_x.XTokenizer"]}
    tokenizer_path.write_text(json.dumps({**json.loads(tokenizer_path.read_text()), "auto_map": code}))
    run = run_task_here("train_text", config_of(tmp_path, folder))
    assert "config.json names Python code (auto_map)" in capsys.readouterr().err
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((run / "hf_ckpt" / name).read_text())
    assert_same_weights(folder, run / "hf_ckpt")


def test_code_of_a_model_is_exported_beside_its_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_code(folder)
    edit_config(folder, model_type="x", architectures=["XForCausalLM"])
    run = run_task_here("train_text", config_of(tmp_path, folder, trust_remote_code=True))
    exported = AutoModelForCausalLM.from_pretrained(run / "hf_ckpt", trust_remote_code=True)
    assert type(exported).__name__ == "XForCausalLM"


def test_layers_for_further_tokens_are_not_counted_by_an_export(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    edit_config(folder, num_nextn_predict_layers=1)
    config = config_of(tmp_path, folder)
    run = run_task_here("train_text", config)
    assert "num_nextn_predict_layers 1" in capsys.readouterr().err
    checked = check_config(write_config(config, tmp_path / "config.yaml"))
    assert any("num_nextn_predict_layers 1" in note for note in checked.notes)
    assert json.loads((run / "hf_ckpt/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_an_encoder_that_training_on_texts_leaves_out_is_said(tmp_path: Path) -> None:
    described = tiny_vision_description("qwen3_5")  # whose published folders all see
    config = CONFIG_MAPPING[described.pop("model_type")](**described)
    with torch.device("meta"):
        AutoModelForMultimodalLM.from_config(config).to_empty(device="cpu").save_pretrained(tmp_path)
    settings = LanguageModelConfig(model_path=str(tmp_path), tokenizer_path="bytes")
    train = TextTrainConfig(output_dir="unused", init_device="meta")
    (note,) = build_language_model(settings, train).notes
    assert "vision_config is neither trained nor exported" in note and "Qwen3_5ForCausalLM" in note
    assert build_language_model(settings, train, data_type=ImageConversation()).notes == ()


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


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_a_head_that_only_a_class_ties_by_default_is_the_folders_as_of_mistral_small(
    tmp_path: Path, init_device: Literal["cpu", "meta"]
) -> None:
    described = tiny_vision_description("gemma3")
    config = CONFIG_MAPPING[described.pop("model_type")](**described)
    AutoModelForMultimodalLM.from_config(config).save_pretrained(tmp_path)
    stored = weights(tmp_path)
    (embedding,) = (name for name in stored if name.endswith("embed_tokens.weight"))
    head = torch.randn(stored[embedding].shape)
    save_file(stored | {"language_model.lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    settings = LanguageModelConfig(model_path=str(tmp_path), tokenizer_path="bytes")
    train = TextTrainConfig(output_dir="unused", init_device=init_device)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings true, but language_model\.lm_head\.weight"):
        build_language_model(settings, train)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "tie_word_embeddings"}))
    with torch.device("meta"):  # as `sfumato check`
        assert read_model_config(settings).tie_word_embeddings is False
    model = build_language_model(settings, train)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
    assert torch.equal(model.plain.get_output_embeddings().weight, head)
    assert torch.equal(model.plain.get_input_embeddings().weight, stored[embedding])
    assert model.plain.config.tie_word_embeddings is False


def test_adapters_on_a_tied_head_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tie_word_embeddings=True)
    lora = {"rank": 2, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ConfigError, match=r"'lm_head' of LlamaForCausalLM is tied to the embedding"):
        run_task_here("train_text", config_of(tmp_path, folder, lora=lora))


@pytest.mark.parametrize("task", ["rl_text", "train_text_dpo", "train_text_kto", "train_text_reward"])
@pytest.mark.parametrize("kind", ["folder", "description"])
def test_an_auxiliary_loss_that_a_task_does_not_add_is_refused(tmp_path: Path, task: str, kind: str) -> None:
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    if task == "rl_text":
        config = tiny_text_rl_config(tmp_path, "qwen3_moe")
    else:
        data_type = "unpaired" if task == "train_text_kto" else "preference"
        config = tiny_text_config(tmp_path, "qwen3_moe", data={"data_type": data_type})
    description = write_config(tiny_language_description("qwen3_moe") | asks, tmp_path / "asks.yaml")
    model = {"config_path": str(description), "tokenizer_path": "bytes"}
    if kind == "folder":
        model = {"model_path": str(write_model(tmp_path / "model", "qwen3_moe", **asks))}
    config["model"] = model
    if task == "train_text_reward":
        config["reward"] = {"objective": "bradley_terry"}
    with pytest.raises(ConfigError, match=r"weight of 0\.02 asks for .* set output_router_logits to false"):
        run_task_here(task, config)
    result = check_config(write_config(config, tmp_path / "c.yaml"), task=task)
    assert any("auxiliary loss" in problem for problem in result.problems)


def test_a_class_without_an_auxiliary_loss_is_trained_and_that_is_said(tmp_path: Path, capsys: Any) -> None:
    folder = write_model(tmp_path / "model", "deepseek_v3")
    edit_config(folder, output_router_logits=True, router_aux_loss_coef=0.02)
    run_task_here("train_text", config_of(tmp_path, folder))
    assert "transformers' DeepseekV3ForCausalLM has none, so none is added" in capsys.readouterr().err


QUICK = ("mamba", "mixtral")
NOT_READ_BACK = ("emu3", "mllama")
"""Of which transformers writes a part's configuration alone, that it does not know as a causal model's."""
EAGER_ALONE = ("git",)


def write_mixed(folder: Path, name: str) -> Path:
    """A folder of any architecture in bf16, of which every second vector, and what its class keeps so, is float32."""
    config = tiny_config(name)
    config.get_text_config().vocab_size = 259
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for index, (key, tensor) in enumerate(sorted(tensors.items())):
            if "balancing_biases" in key:  # transformers writes -1 over the last one whenever it loads Zaya
                continue
            if "e_score_correction_bias" in key or (tensor.ndim == 1 and tensor.is_floating_point() and index % 2):
                tensor.data = tensor.data.float() + 1e-4 * torch.rand(tensor.shape)
    model.save_pretrained(folder)
    return folder


def load_in_bf16(folder: Path, attention: str = "packed") -> Any:
    train = load_config(TrainTextConfig, None, tiny_text_config(folder.parent)).train
    train = train.model_copy(update={"mixed_precision": "bf16", "init_device": "cpu"})
    section = LanguageModelConfig(model_path=str(folder), tokenizer_path="bytes", attention=attention)
    return build_language_model(section, train)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_an_export_without_a_step_is_the_source(name: str, tmp_path: Path) -> None:
    """Of every architecture of transformers, tensor by tensor: dtype and bits."""
    source = write_mixed(tmp_path / "source", name)
    if name in NOT_READ_BACK:
        with pytest.raises(ConfigError, match="transformers' AutoModelForCausalLM knows no"):
            load_in_bf16(source)
        return
    if name in EAGER_ALONE:
        with pytest.raises(ConfigError, match=r"cannot load it with model\.attention \w+, set it to eager"):
            load_in_bf16(source)
    model = load_in_bf16(source, "eager" if name in EAGER_ALONE else "packed")
    export_model(model, None, tmp_path / "out", Mesh(Layout(), torch.device("cpu")))
    before, after = (
        {key: weight for file in sorted(folder.glob("*.safetensors")) for key, weight in load_file(file).items()}
        for folder in (source, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert [k for k in before if before[k].dtype != after[k].dtype or not torch.equal(before[k], after[k])] == []


def test_fp8_weights_are_exported_as_plain_numbers(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3")
    stored, expected = weights(source), {}
    for name, weight in [*stored.items()]:
        if ".layers." in name and name.endswith("proj.weight"):
            stored[name] = weight.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full([-(-size // 16) for size in weight.shape], 0.5)
            expected[name] = stored[name].float() * 0.5
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    export_model(load_in_bf16(source), None, tmp_path / "out", Mesh(Layout(), torch.device("cpu")))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    exported = weights(tmp_path / "out")
    assert expected
    assert all(torch.equal(exported[name].float(), weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("params.json", "Mistral's or Meta's own layout"),
        ("consolidated.safetensors", "Mistral's own layout"),
        ("original/params.json", "Meta's own layout"),
        ("model-q4.gguf", "GGUF files"),
    ],
)
def test_folders_in_other_layouts_are_refused_with_the_remedy(file: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    with pytest.raises(ConfigError, match=f"holds {said}"):
        read_model_config(LanguageModelConfig(model_path=str(tmp_path / "model")))
    with pytest.raises(ConfigError, match="is a file, not a model folder"):
        read_model_config(LanguageModelConfig(model_path=str(path)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("output_attentions", True, "config.json: output_attentions true changes .*: set output_attentions to false"),
        ("return_dict", False, "config.json: return_dict false changes .*: set return_dict to true"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "transformers cannot load it: .*NoneType"),
    ],
)
def test_settings_with_which_a_run_or_its_export_would_fail_are_refused_before_it(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=said):
        build_language_model(LanguageModelConfig(model_path=str(folder)), TextTrainConfig(output_dir="unused"))


def test_adapters_beside_a_model_are_refused(tmp_path: Path) -> None:
    """transformers adds them to the model that it reads, so that they alone would be trained."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds adapters \(adapter_config.json\) beside the model"):
        read_model_config(LanguageModelConfig(model_path=str(tmp_path)))


def test_a_name_on_the_hub_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some-owner--Model-1.5"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    folder = write_model(cached / "snapshots" / ("a" * 40))
    section = LanguageModelConfig(model_path="some-owner/Model-1.5", tokenizer_path="bytes")
    assert section.model_path == str(folder)
    assert read_model_config(section).model_type == "llama"
    with pytest.raises(ConfigError, match="hf download some-owner/other"):
        read_model_config(LanguageModelConfig(model_path="some-owner/other"))
