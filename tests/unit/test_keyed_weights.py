"""Random weights that are drawn in parts, against torch's and transformers' own initialisation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, RwkvConfig, RwkvForCausalLM

from sfumato.errors import ConfigError
from sfumato.parallel import keyed_weights, random_weights
from sfumato.parallel.keyed_weights import NOT_ON_META, draw_chunk, problems_of, record_initialisation
from sfumato.parallel.random_weights import build_with_random_weights
from sfumato.parallel.shards import whole_chunk
from sfumato.parallel.weights import build_on_meta

FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "uniform_": functools.partial(nn.init.uniform_, a=-0.2, b=0.7),
    "normal_": functools.partial(nn.init.normal_, mean=0.3, std=0.02),
    "trunc_normal_": functools.partial(nn.init.trunc_normal_, std=0.2, a=-0.3, b=0.1),
    "constant_": functools.partial(nn.init.constant_, val=3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "dirac_": lambda weight: nn.init.dirac_(weight[..., None]),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": lambda weight: nn.init.orthogonal_(weight),
    "sparse_": lambda weight: nn.init.sparse_(weight, sparsity=0.5),
}
SHAPE = (240, 160)


def made(initialise: Callable[[Tensor], object]) -> nn.Module:
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    with torch.no_grad():
        initialise(layer.weight)
    return layer


def drawn(build: Callable[[], nn.Module], seed: int = 3) -> Tensor:
    """The weight, drawn in pieces of a prime number of elements at most."""
    _, recipes = record_initialisation(functools.partial(build_on_meta, build), seed)
    assert problems_of(recipes) == []
    weight = torch.full(SHAPE, torch.nan)
    with mock.patch.object(keyed_weights, "PIECE", 1009):
        draw_chunk(weight, whole_chunk(SHAPE), recipes["weight"], seed)
    return weight


def test_every_function_of_torch_is_tried() -> None:
    names = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
    assert names == {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_distribution_is_that_of_torch_or_refused(name: str) -> None:
    build = functools.partial(made, FUNCTIONS[name])
    if name in (*NOT_ON_META, "eye_"):
        _, recipes = record_initialisation(functools.partial(build_on_meta, build), 3)
        assert "is initialised by " in problems_of(recipes)[0]
        return
    weight, torchs = drawn(build), build().weight.detach()
    # both have 38,400 numbers; the largest distance of two such samples of one distribution is below 0.014 (p < 0.001)
    values = torch.cat([weight.flatten(), torchs.flatten()]).sort().values
    ranks = [torch.searchsorted(sample.flatten().sort().values, values, right=True) for sample in (weight, torchs)]
    assert (ranks[0] - ranks[1]).abs().max() / weight.numel() < 0.014
    assert torch.equal(weight, drawn(build))
    is_random = len(torchs.unique()) > 1
    assert torch.equal(weight, drawn(build, seed=4)) != is_random
    if is_random:  # rows and columns are independent of each other
        assert abs(torch.corrcoef(torch.stack([weight[:-1].flatten(), weight[1:].flatten()]))[0, 1]) < 0.025
        assert abs(torch.corrcoef(torch.stack([weight[:, :-1].flatten(), weight[:, 1:].flatten()]))[0, 1]) < 0.025


def deepseek() -> nn.Module:
    config = DeepseekV3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, pad_token_id=5,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def test_a_model_has_what_transformers_gives_it() -> None:
    torch.manual_seed(0)
    plain = dict(deepseek().named_parameters())
    with mock.patch.multiple(random_weights, LARGEST_IN_SEQUENCE=0, SMALL=600):
        module = build_with_random_weights(deepseek, seed=0)
    assert not dict(module.named_parameters())["model.embed_tokens.weight"][5].any()  # of padding
    for name, weight in module.named_parameters():
        close = 6 / weight.numel() ** 0.5
        assert abs(weight.std(correction=0) - plain[name].std(correction=0)) <= close * plain[name].std(correction=0)
        assert abs(weight.mean() - plain[name].mean()) <= close * plain[name].std(correction=0)


def test_an_initialisation_that_has_no_parts_is_refused() -> None:
    def rwkv() -> nn.Module:
        return RwkvForCausalLM(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32))

    with mock.patch.multiple(random_weights, LARGEST_IN_SEQUENCE=0, SMALL=999), pytest.raises(ConfigError) as error:
        build_with_random_weights(rwkv, seed=0)
    assert "rwkv.embeddings.weight is initialised by orthogonal_ (and " in str(error.value)
    assert "model.model_path" in str(error.value)
