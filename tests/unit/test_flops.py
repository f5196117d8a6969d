"""Counted operations against those that torch counts while a model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.flops import FlopCount, causal_pairs
from sfumato.models.lora import ADAPTER, add_lora, inject_adapter
from tests.survey.tiny_configs import tiny_config
from tests.tiny import write_tiny_pipeline

LENGTH = 24
SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}

KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES | HEADS,
    "qwen2": SIZES | HEADS | {"tie_word_embeddings": True},
    "qwen3": SIZES | HEADS | {"head_dim": 16},
    "qwen3_moe": SIZES | HEADS | EXPERTS | {"num_experts": 8, "mlp_only_layers": [0]},
    "deepseek_v2": SIZES | EXPERTS | LATENT | ROUTED | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "deepseek_v3": SIZES | EXPERTS | LATENT | ROUTED | {"num_attention_heads": 4, "num_key_value_heads": 4},
}


def build(kind: str, attention: str = "eager", **more: Any) -> nn.Module:
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind] | more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def grouped_mm(rows: torch.Size, other: torch.Size, *args: Any, **kwargs: Any) -> int:
    """For torch's counter, which does not know this operation: ``[T, k] [E, k, n]``, or ``[k, T] [T, n]`` in groups."""
    return 2 * rows[0] * rows[1] * other[-1]


def counted(model: nn.Module, length: int, backward: bool) -> int:
    """What torch counts for one document; its attention computes all pairs, causal or not.

    Angles of rotary embeddings are left out: one for each position, which some versions of transformers multiply as
    matrices.
    """
    ids = torch.arange(length)[None] % 48
    custom_flops = {torch.ops.aten._grouped_mm: grouped_mm}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=custom_flops) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    by_module = counter.get_flop_counts().items()
    angles = sum(sum(counts.values()) for name, counts in by_module if name.endswith(".rotary_emb"))
    return counter.get_total_flops() - angles


def all_pairs(count: FlopCount, length: int) -> int:
    """Operations of attention when every token is paired with every token."""
    return sum(count.attention.values()) * length**2


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_and_attention_are_those_that_torch_counts(kind: str, experts: str) -> None:
    model = build(kind)
    if "num_experts_per_tok" not in KINDS[kind]:
        if experts != "eager":
            pytest.skip("no experts")
    else:
        model.set_experts_implementation(experts)
    count = FlopCount(model)
    matrices = count.forward([LENGTH]) - sum(count.attention.values()) * causal_pairs(LENGTH)
    assert matrices + all_pairs(count, LENGTH) == counted(model, LENGTH, backward=False)
    assert 3 * (matrices + all_pairs(count, LENGTH)) == counted(model, LENGTH, backward=True)
    assert count.training([LENGTH]) == 3 * count.forward([LENGTH])


@pytest.mark.parametrize("kind", ["falcon", "jetmoe", "laguna"])
def test_other_attention_and_experts_are_those_that_torch_counts(kind: str) -> None:
    """Attention without ``scaling``, experts without transformers' interface, layers with other numbers of heads."""
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager")
    count = FlopCount(model)
    matrices = count.forward([LENGTH]) - count._attention([LENGTH])
    assert matrices + all_pairs(count, LENGTH) == counted(model, LENGTH, backward=False)


@pytest.mark.parametrize(
    ("kind", "operations"),
    [
        ("dots3_note_text", {None: 2 * 4 * (16 + 8), 8: 2 * 2 * (16 + 8)}),
        ("mistral sliding", {8: 2 * 2 * 4 * (8 + 8)}),
    ],
)
def test_heads_and_windows_that_the_configuration_alone_has(kind: str, operations: dict[int | None, int]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    assert FlopCount(model).attention == operations


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_the_tokens_that_are_learned_from_alone_count(tied: bool) -> None:
    model = build("qwen3", tie_word_embeddings=tied)
    count, head = FlopCount(model), model.get_output_embeddings().weight.numel()
    assert count.forward([LENGTH], LENGTH) == count.forward([LENGTH])
    assert count.forward([LENGTH], 2) == count.forward([LENGTH]) - 2 * (LENGTH - 2) * head
    assert count.training([LENGTH], num_outputs=2) == 3 * count.forward([LENGTH], 2)
    model.requires_grad_(False)
    frozen = FlopCount(model)
    assert frozen.training([LENGTH], num_outputs=2) == frozen.training([LENGTH]) - 4 * (LENGTH - 2) * head


def test_counts_with_picked_tokens_are_those_that_torch_counts() -> None:
    model, logit_places = build("qwen3"), torch.tensor([1, 4])
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    whole, picked = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with whole:
        model(input_ids=ids, use_cache=False)
    with picked:
        model(input_ids=ids, use_cache=False, logits_to_keep=logit_places)
    count = FlopCount(model)
    saved = count.forward([LENGTH]) - count.forward([LENGTH], len(logit_places))
    assert saved == whole.get_total_flops() - picked.get_total_flops() > 0


def test_scaled_dot_product_attention_counts_the_same() -> None:
    eager, sdpa = (counted(build("qwen3", attention), LENGTH, backward=False) for attention in ("eager", "sdpa"))
    assert eager == sdpa


def test_documents_are_counted_on_their_own() -> None:
    count = FlopCount(build("qwen3"))
    assert count.forward([5, 9]) == count.forward([5]) + count.forward([9]) < count.forward([14])
    assert count.forward([]) == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("window", [None, 1, 4, 20])
def test_pairs_within_a_window(length: int, window: int | None) -> None:
    listed = [(i, j) for i in range(length) for j in range(i + 1) if window is None or i - j < window]
    assert causal_pairs(length, window) == len(listed)


def test_windows_are_those_of_the_layers() -> None:
    count = FlopCount(build("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1))
    layer = 2 * 4 * (8 + 8)
    assert count.attention == {None: layer, 4: 2 * layer}
    matrices = 2 * count.active_weights * 10
    assert count.forward([10]) == matrices + layer * (55 + 2 * (1 + 2 + 3 + 7 * 4))


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    model = build("qwen3")
    add_lora(model, LoraConfig(rank=4), ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], seed=0)
    count = FlopCount(model)
    attention = sum(count.attention.values()) * causal_pairs(LENGTH)
    matrices = count.training([LENGTH]) - 3 * attention
    # the inputs of the first block's q, k and v need no gradient: nothing below them is trained
    block = model.model.layers[0].self_attn
    base = sum(layer.base_layer.weight.numel() for layer in (block.q_proj, block.k_proj, block.v_proj))
    low_rank = sum(layer.lora_A["default"].weight.numel() for layer in (block.q_proj, block.k_proj, block.v_proj))
    unneeded = 2 * LENGTH * (base + low_rank)
    assert matrices - unneeded + 3 * all_pairs(count, LENGTH) == counted(model, LENGTH, backward=True)
    assert count.trained_weights == sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )


def test_adapters_of_experts_count_for_the_experts_of_a_token() -> None:
    from peft import LoraConfig as PeftConfig

    model = build("qwen3_moe")
    before = FlopCount(model)
    inject_adapter(model, PeftConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"]), ADAPTER)
    after = FlopCount(model)
    assert after.frozen_weights == before.active_weights
    assert after.trained_weights == 2 * 2 * 4 * (32 + 32)  # layers, experts of a token, rank, in + out


def test_real_sizes_are_counted_on_meta() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    block = 2048 * (2048 * 2 + 1024 * 2) + 3 * 2048 * 6144
    matrices = 28 * block + 2048 * 151936
    assert FlopCount(model).active_weights == matrices
    assert FlopCount(model).training([8192]) == 6 * matrices * 8192 + 3 * 28 * 4 * 2048 * (8192 * 8193 // 2)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_denoiser_on_meta_counts_what_the_real_one_does(tmp_path: Path, lora: LoraConfig | None) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7, lora=lora))
    latents, conditioning = torch.randn(1, 4, 8, 8), model.encode_prompts(["write"])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict_velocity(latents, torch.ones(1), conditioning).sum().backward()
    result = denoiser_flops(model, 16, 16).training
    assert result == counter.get_total_flops()
    assert not any(parameter.is_meta for parameter in model.denoiser.parameters()), "the model itself stays as it is"
    assert denoiser_flops(model, 32, 32).training > 2 * result


def test_a_denoiser_with_channels_for_a_control_image_is_refused(tmp_path: Path) -> None:
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    folder = write_tiny_pipeline(tmp_path / "pipe")
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))
    model.set_denoiser(SD3Transformer2DModel(**{**model.denoiser.config, "in_channels": 8}))
    with pytest.raises(ConfigError, match="transformer has other inputs than StableDiffusion3Pipeline gives it"):
        denoiser_flops(model, 16, 16)
