"""Expert parallelism and balancing against one plain process."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sfumato.errors import CheckpointError, ConfigError
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel.balance import ExpertBalancer
from sfumato.parallel.expert import apply_expert_parallel, grouped_matmul, multiply_in_turn
from sfumato.parallel.expert_modules import expert_placement, find_experts
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.plan import language_plan
from sfumato.parallel.shards import gather_whole
from tests.dist import cases
from tests.dist.cases import CASES, ROWS, Case, Outcome, build, difference, make_mesh, packed_row, train

TOLERANCE = 1e-5
ALONE = Mesh(Layout(), torch.device("cpu"))

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {"expert_parallel_size": 2}),
    "4": (4, {"expert_parallel_size": 4}),
    "2 of 4": (4, {"expert_parallel_size": 2}),
    "2, replicated": (4, {"expert_parallel_size": 2, "data_parallel_replicate_size": 2}),
    "2 of 4, recomputed": (4, {"expert_parallel_size": 2, "activation_checkpointing": "selective"}),
}

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    groups = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    module = DeepseekV3ForCausalLM(DeepseekV3Config(moe_intermediate_size=16, **groups, **LATENT, **SMALL))
    for name, buffer in module.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.uniform_(-0.2, 0.2)
    return module


def deepseek_v2(**config: Any) -> nn.Module:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    groups = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
    return DeepseekV2ForCausalLM(DeepseekV2Config(moe_intermediate_size=16, **groups, **config, **LATENT, **SMALL))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=8, **SMALL))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(num_local_experts=8, head_dim=8, **SMALL))


LANGUAGE = {"plan": language_plan, "row": packed_row, "loss": cases.language_loss, "counts_over": "loss"}
OTHERS = {
    "deepseek_v3": Case(deepseek_v3, lora_targets=("q_a_proj",), **LANGUAGE),
    "gpt_oss": Case(gpt_oss, lora_targets=("q_proj",), **LANGUAGE),
}


def train_any(kind: str, lora: bool = False, **config: Any) -> Outcome:
    with mock.patch.dict(CASES, OTHERS):
        return train(kind, lora, **config)


@functools.cache
def truth(kind: str, lora: bool = False) -> Outcome:
    return train_any(kind, lora)


@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(mode, ranks):
    num_ranks, config = MODES[mode]
    for outcome in ranks.run(num_ranks, functools.partial(train, "moe", **config)):
        assert difference(outcome, truth("moe")) < TOLERANCE
        assert outcome.without_gradient == []


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_equal_one_process(kind, ranks):
    for outcome in ranks.run(4, functools.partial(train_any, kind, expert_parallel_size=2)):
        assert difference(outcome, truth(kind)) < TOLERANCE


def test_repeats_bit_by_bit(ranks):
    first, second = (ranks.run(4, functools.partial(train, "moe", expert_parallel_size=2))[0] for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())


def tokens_of(lengths: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, choices (only experts 0, 1, 5 of 8) and weights of each rank."""
    generator = torch.Generator().manual_seed(3)
    results = []
    for length in lengths:
        states = torch.randn(length, 32, generator=generator)
        chosen = torch.tensor([[0, 5], [1, 0], [5, 1]])[torch.randint(0, 3, (length,), generator=generator)]
        results.append((states, chosen, torch.rand(length, 2, generator=generator)))
    return results


def run_layer(lengths: tuple[int, ...], **config: Any) -> dict[str, torch.Tensor]:
    """One layer's experts on tokens that are not spread evenly: outputs and all gradients."""
    mesh, parsed = make_mesh(**config)
    module = build("moe")
    experts = next(iter(find_experts(module, "").values()))
    parallelize(module, mesh, parsed, language_plan(module))
    mine = tokens_of(lengths) if mesh.size == 1 else tokens_of(lengths)[mesh.rank : mesh.rank + 1]
    states, chosen, weights = (torch.cat(parts) for parts in zip(*mine, strict=True))
    output = experts(states.requires_grad_(), chosen, weights.requires_grad_())
    output.square().sum().backward()
    return {
        "output": output.detach(),
        "states": states.grad,
        "weights": weights.grad,
        "gate_up_proj": gather_whole(experts.gate_up_proj.grad),
        "down_proj": gather_whole(experts.down_proj.grad),
    }


@pytest.mark.parametrize("lengths", [(0, 5, 3, 0), (0, 0, 0, 0)], ids=["some", "none"])
def test_ranks_and_experts_without_tokens(lengths, ranks):
    expected = run_layer(lengths)
    for rank, outcome in enumerate(ranks.run(4, functools.partial(run_layer, lengths, expert_parallel_size=4))):
        for name in ("gate_up_proj", "down_proj"):
            torch.testing.assert_close(outcome[name], expected[name], rtol=1e-5, atol=1e-6)
            assert not outcome[name][[2, 3, 4, 6, 7]].any()
        for name in ("output", "states", "weights"):
            part = expected[name].split(lengths)[rank]
            torch.testing.assert_close(outcome[name], part, rtol=1e-5, atol=1e-6)


def cut_on_meta() -> list[tuple[bool, bool, tuple[int, ...], tuple[int, ...]]]:
    mesh, _ = make_mesh(expert_parallel_size=2)
    with torch.device("meta"):
        module = CASES["moe"].build()
    experts = apply_expert_parallel(module.requires_grad_(False), mesh)
    parameters = [parameter for module in experts.values() for parameter in module.parameters()]
    return [
        (parameter.is_meta, parameter.requires_grad, tuple(parameter.shape), tuple(parameter.to_local().shape))
        for parameter in parameters
    ]


def test_weights_on_meta_stay_there(ranks):
    for experts in ranks.run(2, cut_on_meta):
        assert experts == 3 * [(True, False, (8, 32, 32), (4, 32, 32)), (True, False, (8, 32, 16), (4, 32, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 5], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("size", [8, 6], ids=["kernel", "unaligned"])
def test_groups_equal_a_loop(counts, dtype, size):
    results = []
    for function in (grouped_matmul, multiply_in_turn):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(sum(counts), size, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(4, 2 * size, size, generator=generator).to(dtype).requires_grad_()
        output = function(rows, weight.transpose(1, 2), torch.tensor(counts))
        (output * torch.arange(2 * size).to(dtype)).sum().backward()
        results.append((output, rows.grad, weight.grad))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def balance(kind: str, **config: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Three updates of the biases alone, with a forward pass in between that must not count."""
    mesh, parsed = make_mesh(**config)
    with mock.patch.dict(CASES, OTHERS):
        module = build(kind).train()
    plan = language_plan(module)
    if parsed.data_parallel_mode == "fsdp1":
        balancer = ExpertBalancer(module, mesh, 0.05)
        module = parallelize(module, mesh, parsed, plan)
    else:
        module = parallelize(module, mesh, parsed, plan)
        balancer = ExpertBalancer(module, mesh, 0.05)
    metrics = []
    for step in range(3):
        rows = [packed_row(step * ROWS + index) for index in mesh.range_of_rank(ROWS)]
        for row in accumulate(module, rows):
            cases.language_loss(module, row, mesh)[0].backward()
        with torch.no_grad():
            cases.language_loss(module, packed_row(0), mesh)
        metrics.append(balancer.update())
    result = balancer.state_dict()
    state = module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in result.items())
    return metrics, result


@pytest.mark.parametrize("kind", ["moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "config",
    [{"expert_parallel_size": 2}, {"activation_checkpointing": "full"}, {"data_parallel_mode": "fsdp1"}],
    ids=["experts", "recomputed", "fsdp1"],
)
def test_biases_are_those_of_one_process(kind, config, ranks):
    metrics, biases = balance(kind)
    assert all(bias.abs().max() > 0.04 for bias in biases.values())
    for actual_metrics, actual_biases in ranks.run(4, functools.partial(balance, kind, **config)):
        assert actual_metrics == metrics
        assert actual_biases.keys() == biases.keys()
        assert all(torch.equal(value, biases[name]) for name, value in actual_biases.items())


def test_counts_and_moves():
    module = build("moe")
    balancer = ExpertBalancer(module, ALONE, 0.1)
    experts = list(find_experts(module, "").values())
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]])
    states, weights = torch.randn(4, 32), torch.ones(4, 2)
    for expert in experts:
        expert(states[:2], chosen[:2], weights[:2])
        checkpoint(expert, states[2:], chosen[2:], weights[2:], use_reentrant=False).sum().backward()
        with torch.no_grad():
            expert(states[:2], chosen[:2], weights[:2])
    assert balancer.update() == {"experts/load_max_over_mean": 4.0, "experts/without_tokens": 5 / 8}
    moved = torch.tensor([-0.1, -0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert all(torch.allclose(value, moved) for value in balancer.state_dict().values())
    assert len(balancer.state_dict()) == 3
    other = ExpertBalancer(build("moe"), ALONE, 0.1)
    other.load_state_dict(balancer.state_dict())
    assert all(torch.allclose(value, moved) for value in other.state_dict().values())


def test_loads_become_even():
    module = build("moe")
    for name, parameter in module.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data[0] *= 6
    balancer = ExpertBalancer(module, ALONE, 0.01)
    results = []
    for _ in range(25):
        for index in range(3):
            cases.language_loss(module, packed_row(index), ALONE)
        results.append(balancer.update()["experts/load_max_over_mean"])
    assert results[0] > 2 and max(results[-3:]) < 0.75 * results[0], results


@pytest.mark.parametrize("make", [CASES["moe"].build, mixtral, deepseek_v2, gpt_oss])
def test_a_bias_chooses_but_does_not_weigh(make):
    module = make()
    experts = next(iter(find_experts(module, "")))
    parent = module.get_submodule(experts.rpartition(".")[0])
    router = getattr(parent, "gate", None) or parent.router
    tokens = torch.randn(20, 32)
    logits, weights, chosen = router(tokens)
    balancer = ExpertBalancer(module, ALONE, 0.1)
    for left, right in zip(router(tokens), (logits, weights, chosen), strict=True):
        torch.testing.assert_close(left, right)
    scores = logits.float().softmax(-1)
    chosen_scores = scores.gather(1, chosen)
    factor = (weights / chosen_scores)[:, :1] * (chosen_scores.sum(1, keepdim=True) if make is not deepseek_v2 else 1)
    router.e_score_correction_bias[6] = 5.0
    _, weights, chosen = router(tokens)
    assert (chosen == 6).any(1).all()
    expected = scores.gather(1, chosen)
    expected = factor * (expected / expected.sum(1, keepdim=True) if make is not deepseek_v2 else expected)
    torch.testing.assert_close(weights, expected)
    assert balancer.state_dict()


def test_errors_name_the_remedy():
    dense, three = build("dense"), Mesh(Layout(dp_shard=3, ep=3), torch.device("cpu"))
    for call in (
        lambda: apply_expert_parallel(dense, three),
        lambda: ExpertBalancer(dense, ALONE, 0.1),
    ):
        with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts"):
            call()
    with pytest.raises(ConfigError, match=r"size 3 does not divide the 8 experts of .*: 8 / 3 = 2"):
        apply_expert_parallel(build("moe"), three)
    with pytest.raises(ConfigError, match=r"shape \(8, 32, 16\) cannot be cut evenly over 3 ranks"):
        expert_placement(build("moe").model.layers[1].mlp.experts.down_proj, 3)
    with pytest.raises(ConfigError, match=r"DeepseekV2TopkRouter chooses.*train.expert_bias_rate to 0"):
        ExpertBalancer(deepseek_v2(topk_method="group_limited_greedy", n_group=4, topk_group=1), ALONE, 0.1)


def test_biases_that_are_not_in_a_checkpoint():
    balancer = ExpertBalancer(build("moe"), ALONE, 0.1)
    with pytest.raises(CheckpointError, match=r"no model\.layers\.1\.mlp\.gate\.e_score_correction_bias .*3 of 3"):
        balancer.load_state_dict({})


def test_adapters_on_experts_are_refused():
    from peft import LoraConfig

    module = build("moe")
    inject_adapter(
        module, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]), ADAPTER
    )
    with pytest.raises(ConfigError, match=r"experts\.base_layer: adapters on experts' weights"):
        apply_expert_parallel(module, Mesh(Layout(dp_shard=2, ep=2), torch.device("cpu")))
