"""Adapters on language models: where they go, how they start, merged weights, and files that peft reads."""

import copy
import functools
import re
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig as PeftLoraConfig
from torch import nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError
from sfumato.models.lora import (
    ADAPTER,
    add_lora,
    inject_adapter,
    language_targets,
    merge_adapters,
    remove_adapters,
    save_adapter,
    start_magnitudes,
)
from sfumato.parallel.weights import build_on_meta
from tests.dist.cases import build, packed_row
from tests.survey.tiny_configs import tiny_config
from tests.tiny_vision import tiny_vision_description

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def causal(kind: str) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.1,
    }
    if kind.startswith("Deepseek"):
        settings |= {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
        settings |= {"qk_nope_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1}
        settings |= {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    if kind == "GptOss":
        settings |= {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))


MODELS = {"dense": functools.partial(build, "dense"), "moe": functools.partial(build, "moe")}


def adapted(module: nn.Module, seed: int = 0, trained: bool = True, **config: Any) -> nn.Module:
    """A model with adapters; as if trained, they change what it computes."""
    lora = LoraConfig(**{"rank": 4, "alpha": 8.0, **config})
    add_lora(module, lora, language_targets(module), seed)
    if trained:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=generator)
                if "lora_magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return module.eval()


@torch.no_grad()
def logits(module: nn.Module) -> torch.Tensor:
    row = packed_row(0)
    return module(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits


def trained_names(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Llama", DENSE),
        ("Qwen2", DENSE),
        ("Qwen3", DENSE),
        ("Qwen3Moe", ATTENTION),
        ("DeepseekV2", LATENT),
        ("DeepseekV3", LATENT),
    ],
)
def test_default_targets(kind, expected):
    module = causal(kind)
    assert sorted(language_targets(module)) == sorted(expected)
    adapted(module)
    for block in module.model.layers:
        layers = [
            name for name, module in block.named_modules() if type(module).__name__ == "Linear" and "lora" in name
        ]
        assert {name.split(".")[-3] for name in layers} == set(expected)
    assert all(".layers." in name and "lora_" in name for name in trained_names(module))


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("gemma4_text", "router.proj"),
        ("hunyuan_v1_moe", "gate.wg"),
        ("dbrx", "router.layer"),
        ("longcat_flash", "router.classifier"),
        ("deepseek_v32", "indexer.wk"),
        ("deepseek_v4", "o_a_proj"),  # no router: a matrix of which each part multiplies a part of the input
    ],
)
def test_default_targets_leave_routers_out(kind, router):
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(tiny_config(kind))
    linear = [name for name, submodule in module.named_modules() if isinstance(submodule, nn.Linear)]
    targets = tuple(f".{target}" for target in language_targets(module))
    adapted_layers = [name for name in linear if f".{name}".endswith(targets)]
    assert adapted_layers
    assert any(name.endswith(router) for name in linear)
    assert not [name for name in adapted_layers if name.endswith(router)]


@pytest.mark.parametrize("kind", ["gemma4", "gemma3", "qwen2_5_vl", "glm4v", "llava", "idefics3", "qwen2_audio"])
def test_default_adapters_of_a_model_that_sees_or_hears_leave_its_encoder_alone(kind):
    described = tiny_vision_description(kind)
    config = transformers.CONFIG_MAPPING[described.pop("model_type")](**described)
    with torch.device("meta"):
        module = transformers.AutoModelForMultimodalLM.from_config(config)
    add_lora(module, LoraConfig(rank=2, alpha=4.0), language_targets(module), 0)
    layers = {name.partition(".lora_A")[0] for name in trained_names(module) if ".lora_A" in name}
    assert all(re.match(r"model\.(language_model|text_model)\.layers\.", name) for name in layers)
    merged = {"gate_up_proj"} if kind == "glm4v" else {"gate_proj", "up_proj"}
    assert {*ATTENTION, *merged, "down_proj"} <= {name.rpartition(".")[2] for name in layers}


def test_default_targets_are_found_where_a_class_calls_its_head_the_decoder():
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(tiny_config("modernbert-decoder"))
    assert {*language_targets(module)} == {"q_proj", "k_proj", "v_proj", "Wo", "Wi"}


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2", "nemotron_h", "jamba"])
def test_default_adapters_of_mamba_merge_to_the_same(kind):
    module = adapted(transformers.AutoModelForCausalLM.from_config(tiny_config(kind)))
    token_ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        expected = module(input_ids=token_ids, use_cache=False).logits
        merged = transformers.AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
        merged.load_state_dict(merge_adapters(module))
        torch.testing.assert_close(merged(input_ids=token_ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


CASES = {
    "lora": ("dense", {}),
    "rslora": ("dense", {"variant": "rslora"}),
    "dora": ("dense", {"variant": "dora"}),
    "experts": ("moe", {"target_parameters": EXPERTS}),
    "one of the experts": ("moe", {"target_parameters": EXPERTS[1:], "target_modules": []}),
    "experts, rslora": ("moe", {"target_parameters": EXPERTS, "variant": "rslora"}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_starts_as_the_model_without_adapters(case):
    kind, config = CASES[case]
    truth = logits(MODELS[kind]().eval())
    module = adapted(MODELS[kind](), trained=False, **config)
    torch.testing.assert_close(logits(module), truth, rtol=1e-6, atol=1e-6)
    changed = logits(adapted(MODELS[kind](), **config))
    assert (changed - truth).abs().max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_compute_the_same(case):
    kind, config = CASES[case]
    module = adapted(MODELS[kind](), **config)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    weights = merge_adapters(module)
    plain = MODELS[kind]().eval()
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    torch.testing.assert_close(logits(plain), logits(module), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


def test_transposed_experts_and_biases_are_merged():
    module = adapted(causal("GptOss"), target_parameters=EXPERTS, target_modules=["q_proj"])
    assert module.model.layers[0].mlp.experts.get_base_layer().is_transposed
    plain = causal("GptOss").eval()
    plain.load_state_dict(merge_adapters(module))
    torch.testing.assert_close(logits(plain), logits(module), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(causal("GptOss").eval()), logits(module), atol=1e-2)


def test_merging_rounds_once():
    module = adapted(build("dense").to(torch.bfloat16))
    weight, layer = merge_adapters(module)["model.layers.0.mlp.up_proj.weight"], module.model.layers[0].mlp.up_proj
    update = layer.lora_B.default.weight @ layer.lora_A.default.weight * 2.0
    assert torch.equal(weight, (layer.base_layer.weight.float() + update).to(torch.bfloat16))
    assert layer.lora_A.default.weight.dtype == torch.float32


def test_merging_takes_whole_weights_one_by_one_and_a_module_on_meta():
    module = adapted(build("moe"), target_parameters=EXPERTS)
    expected = merge_adapters(module)
    weights = dict(module.state_dict())
    on_meta = adapted(build_on_meta(MODELS["moe"]), trained=False, target_parameters=EXPERTS)
    adapters = merge_adapters(on_meta, weights)
    assert not weights
    assert adapters.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in adapters.items())


@pytest.mark.parametrize("case", CASES)
def test_on_meta_the_adapters_are_real_and_the_same(case):
    kind, config = CASES[case]
    truth = adapted(MODELS[kind](), trained=False, seed=3, **config)
    module = adapted(build_on_meta(MODELS[kind]), trained=False, seed=3, **config)
    assert trained_names(module) == trained_names(truth)
    for name in trained_names(module):
        parameter = module.get_parameter(name)
        assert parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        if "magnitude" in name:
            assert parameter.isnan().all()
        else:
            assert torch.equal(parameter, truth.get_parameter(name)), name
    assert all(parameter.is_meta for parameter in module.parameters() if not parameter.requires_grad)
    for name, parameter in truth.named_parameters():
        owner, _, key = name.rpartition(".")
        if not parameter.requires_grad:
            module.get_submodule(owner)._parameters[key] = parameter
    start_magnitudes(module)
    assert all(torch.equal(module.get_parameter(name), parameter) for name, parameter in truth.named_parameters())


def test_the_seed_decides():
    def drawn(seed):
        module = adapted(build("dense"), trained=False, seed=seed)
        return module.model.layers[1].mlp.down_proj.lora_A.default.weight

    assert torch.equal(drawn(4), drawn(4))
    assert not torch.equal(drawn(4), drawn(5))
    module, state = build("dense"), torch.get_rng_state()
    adapted(module, trained=False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", CASES)
def test_saved_adapters_load_with_peft_and_with_transformers(case, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind, config = CASES[case]
    base, folder = tmp_path / "base", tmp_path / "adapter"
    folder.mkdir()
    MODELS[kind]().save_pretrained(base)
    module = adapted(AutoModelForCausalLM.from_pretrained(base), **config)
    save_adapter(module, module.state_dict(), folder, str(base))
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    plain = AutoModelForCausalLM.from_pretrained(base)
    for loaded in (PeftModel.from_pretrained(plain, folder), AutoModelForCausalLM.from_pretrained(folder)):
        torch.testing.assert_close(logits(loaded.eval()), logits(module), rtol=1e-5, atol=1e-5)


def test_an_adapter_needs_no_peft_newer_than_transformers_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 refuses each peft below 0.22 in its own method."""
    from transformers.integrations import peft

    def refuse(min_version: str) -> None:
        raise ValueError(f"please use a version >= {min_version}")

    monkeypatch.setattr(peft, "check_peft_version", lambda min_version: None)
    by_transformers = build("dense")
    by_transformers.add_adapter(PeftLoraConfig(r=4, target_modules=ATTENTION))
    monkeypatch.setattr(peft, "check_peft_version", refuse)
    module = build("dense")
    inject_adapter(module, PeftLoraConfig(r=4, target_modules=ATTENTION), ADAPTER)
    assert trained_names(module) == trained_names(by_transformers) != set()
    assert module.peft_config[ADAPTER].to_dict() == by_transformers.peft_config[ADAPTER].to_dict()
    inject_adapter(module, PeftLoraConfig(r=2, target_modules=["q_proj"]), "second")
    assert all(".second." in name for name in trained_names(module)), "the newest adapter alone is trained"
    remove_adapters(module)
    assert not [name for name in module.state_dict() if "lora_" in name]
    inject_adapter(module, PeftLoraConfig(r=4, target_modules=ATTENTION), ADAPTER)
    assert trained_names(module) == trained_names(by_transformers), "another adapter takes its place"


REFUSED = {
    "layer": (
        "dense",
        {"target_modules": ["q_proj", "query"]},
        r"target_modules: 'query' matches no layer of Qwen3.*q_p",
    ),
    "block": ("dense", {"target_modules": ["mlp"]}, r"target_modules: 'mlp' is a Qwen3MLP, no linear layer"),
    "embedding": ("dense", {"target_modules": ["embed_tokens"]}, r"'embed_tokens' is a Embedding, no linear layer"),
    "nothing": ("dense", {"target_modules": []}, r"both target_modules and target_parameters are empty"),
    "no experts": ("dense", {"target_parameters": EXPERTS}, r"holds no experts of Qwen3ForCausalLM; it has no such"),
    "experts": (
        "moe",
        {"target_parameters": ["experts.up"]},
        r"'experts.up' holds no experts .*mlp\.experts\.down_proj",
    ),
    "dropout": ("moe", {"target_parameters": EXPERTS, "dropout": 0.1}, r"lora\.dropout and model\.lora\.target_param"),
    "dora": ("moe", {"target_parameters": EXPERTS, "variant": "dora"}, r"variant dora and model\.lora\.target_param"),
    "dense layers": (
        "moe",
        {"target_modules": DENSE},
        r"peft takes gate_proj, .* for the experts, not for dense layers",
    ),
    "half of them": ("moe", {"target_modules": ["up_proj"]}, r"peft cannot add it to Qwen3Moe.*without also targeting"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_named(case):
    kind, config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        adapted(MODELS[kind](), **config)


def test_adapters_train_and_the_base_stays():
    for kind, config in CASES.values():
        module = adapted(MODELS[kind](), **config).train()
        before = copy.deepcopy(dict(module.named_parameters()))
        optimizer = torch.optim.SGD([parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.1)
        row = packed_row(0)
        output = module(input_ids=row["input_ids"], position_ids=row["position_ids"], labels=row["labels"])
        output.loss.backward()
        optimizer.step()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
