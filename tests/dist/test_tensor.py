"""Tensor and sequence parallelism against one plain process; cut vocabularies; what is refused."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel.parallelize import fsdp_placement
from sfumato.parallel.plan import ParallelPlan, language_plan
from sfumato.parallel.tensor import apply_tensor_parallel, match_plan
from tests.dist.cases import CASES, Case, Outcome, build, difference, language_loss, make_mesh, packed_row, train

TOLERANCE = 1e-5
DDP = {"data_parallel_mode": "ddp"}
TP2 = {"tensor_parallel_size": 2}
SEQUENCE = {**TP2, "sequence_parallel": True}


def causal(name: str, **settings: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "pad_token_id": 66,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config | settings))


def latent_attention() -> nn.Module:
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8}
    return causal("DeepseekV2", **experts, **latent, **groups)


def shared_expert() -> nn.Module:
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    return causal("Qwen2Moe", shared_expert_intermediate_size=32, **experts)


def present(plan: ParallelPlan, **changes: str) -> ParallelPlan:
    """A plan whose patterns need not match, since transformers' are for all models of a kind."""
    styles = {name: style.removesuffix("?") + "?" for name, style in plan.tensor.items()}
    return dataclasses.replace(plan, tensor=styles | changes)


def model(build: Any, loss: Any = language_loss, **changes: str) -> Case:
    return Case(build, lambda module: present(language_plan(module), **changes), packed_row, loss, ("q_proj",), "loss")


MODELS = {
    "tied": model(functools.partial(causal, "Qwen3", tie_word_embeddings=True, pad_token_id=0)),
    "gathered": model(functools.partial(causal, "Phi3")),
    "latent": model(latent_attention),
    "shared": model(shared_expert),
    "biased": model(functools.partial(causal, "Llama", mlp_bias=True)),
}
"""Language models with other styles; their vocabulary of 67 divides by no number of ranks."""


def train_any(kind: str, lora: bool = False, **config: Any) -> Outcome:
    with mock.patch.dict(CASES, MODELS):
        return train(kind, lora, **config)


@functools.cache
def truth(kind: str, lora: bool = False) -> Outcome:
    return train_any(kind, lora)


def check(ranks: Any, num_ranks: int, kind: str, lora: bool = False, **config: Any) -> None:
    outcomes = ranks.run(num_ranks, functools.partial(train_any, kind, lora, **config))
    for outcome in outcomes:
        assert difference(outcome, truth(kind, lora)) < TOLERANCE
        assert not outcome.without_gradient
    for name, value in outcomes[0].frozen.items():
        assert torch.equal(value, truth(kind, lora).frozen[name]), name


def test_cut_sequences_are_recomputed(ranks):
    check(ranks, 2, "dense", **SEQUENCE, **DDP, activation_checkpointing="full")


@pytest.mark.parametrize("config", [{**TP2, **DDP}, {**SEQUENCE, **DDP}], ids=["whole", "sequence"])
@pytest.mark.parametrize("kind", MODELS)
def test_other_language_models_equal_one_process(kind, config, ranks):
    check(ranks, 2, kind, **config)


def test_a_vocabulary_that_does_not_divide_with_fsdp(ranks):
    check(ranks, 4, "tied", **TP2)


def layouts(kind: str) -> dict[str, Any]:
    """What tensor parallelism makes of each parameter of a model with weights and of one on the meta device."""
    mesh, _ = make_mesh(**TP2, **DDP)
    results = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            module = CASES[kind].build()
        apply_tensor_parallel(module, mesh, CASES[kind].plan(module), False)
        results.append(
            {
                name: (tuple(parameter.shape), str(parameter.placements), tuple(parameter.to_local().shape))
                if isinstance(parameter, DTensor)
                else (tuple(parameter.shape), None, None)
                for name, parameter in module.named_parameters()
            }
        )
        assert all(parameter.device.type == device for parameter in module.parameters())
    assert results[0] == results[1]
    return results[1]


def test_meta_weights_are_cut_like_others(ranks):
    moe = ranks.run(2, functools.partial(layouts, "moe"))[1]
    assert moe["model.layers.1.mlp.experts.gate_up_proj"][::2] == ((8, 32, 32), (8, 16, 32))
    assert moe["model.layers.1.mlp.experts.down_proj"][::2] == ((8, 32, 16), (8, 32, 8))
    assert moe["model.layers.1.mlp.gate.weight"] == ((8, 32), None, None)
    flux = ranks.run(2, functools.partial(layouts, "flux"))[0]
    assert flux["single_transformer_blocks.0.proj_out.weight"][::2] == ((32, 160), (32, 80))


def refusals() -> dict[str, str]:
    """Messages of what is refused on three ranks."""
    mesh, _ = make_mesh(tensor_parallel_size=3, **DDP)
    dense, flux = language_plan(build("dense")), plans.FLUX
    attempts = {
        "heads": ("dense", dense, False),
        "diffusers heads": ("flux", flux, False),
        "matrix": ("dense", ParallelPlan(dense.blocks, {"model.layers.*.mlp.up_proj": "colwise"}), False),
        "packed": ("dense", ParallelPlan(dense.blocks, {"model.layers.*.mlp.up_proj": "packed_colwise"}), False),
        "style": ("dense", ParallelPlan(dense.blocks, {"lm_head": "diagonal"}), False),
        "nothing": ("dense", ParallelPlan(dense.blocks, {"model.layers.*.mlp.gate": "colwise"}), False),
        "type": ("dense", ParallelPlan(dense.blocks, {"model.norm": "colwise"}), False),
        "owner": ("moe", ParallelPlan(dense.blocks, {"model.layers.1.mlp.experts.down_proj": "rowwise"}), False),
        "plan": ("dense", ParallelPlan(dense.blocks), False),
        "sequence": ("flux", flux, True),
    }
    results = {}
    for name, (kind, plan, sequence) in attempts.items():
        try:
            apply_tensor_parallel(
                build(kind), mesh, dataclasses.replace(plan, blocks=CASES[kind].plan(build(kind)).blocks), sequence
            )
        except ConfigError as error:
            results[name] = str(error)
    return results


def test_what_cannot_be_cut_is_named(ranks):
    result = ranks.run(3, refusals)[0]
    assert "self_attn.q_proj has 8 heads" in result["heads"] and "8 / 3 = 2.66667" in result["heads"]
    assert "attn.to_q has 4 heads" in result["diffusers heads"]
    assert "mlp.up_proj.weight: dimension 0 of (64, 32)" in result["matrix"]
    assert "6 equal shards" in result["packed"]
    assert "'lm_head' has the unknown style 'diagonal'" in result["style"]
    assert "'model.layers.*.mlp.gate' (colwise) matches nothing" in result["nothing"]
    assert "model.norm is a Qwen3RMSNorm" in result["type"]
    assert "experts needs the style moe_tp_experts" in result["owner"]
    assert all("set train.tensor_parallel_size to 1" in result[name] for name in ("style", "nothing", "type", "owner"))
    assert "Qwen3ForCausalLM has no plan" in result["plan"]
    assert "train.sequence_parallel is for language models" in result["sequence"]


def adapter_refusal() -> str:
    from peft import LoraConfig

    mesh, _ = make_mesh(**TP2, **DDP)
    module = build("dense")
    inject_adapter(module, LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), ADAPTER)
    with pytest.raises(ConfigError) as caught:
        apply_tensor_parallel(module, mesh, language_plan(module), False)
    return str(caught.value)


def test_other_adapters_are_refused(ranks):
    assert "q_proj: tensor parallelism cuts plain LoRA adapters only" in ranks.run(2, adapter_refusal)[0]


def test_numbers_in_patterns_are_numbers_and_stars_are_layers():
    result = match_plan(build("sd3"), plans.SD3.tensor)
    assert result["transformer_blocks.2.attn.to_out.0"].kind == "rowwise"
    assert "transformer_blocks.2.attn.to_add_out" not in result and "transformer_blocks.1.attn2.to_q" not in result


def placements() -> list[Shard | None]:
    mesh, _ = make_mesh(**TP2, **DDP)
    module = CASES["flux"].build()
    apply_tensor_parallel(module, mesh, plans.FLUX, False)
    block = module.single_transformer_blocks[0]
    weights = (block.proj_mlp.weight, block.proj_mlp.bias, block.proj_out.weight, block.attn.to_q.weight)
    with pytest.raises(ConfigError, match=r"32 / 3 = 10.6667"):
        fsdp_placement(block.proj_mlp.weight, 3)
    return [fsdp_placement(weight, 2) for weight in weights]


def test_fsdp_cuts_fused_matrices_along_their_other_dimension(ranks):
    assert ranks.run(2, placements)[0] == [Shard(1), None, None, None]
