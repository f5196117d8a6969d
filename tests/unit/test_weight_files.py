"""Weight files in one process: reading parts, transformers' conversions, modules on meta, and what is refused."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.errors import ConfigError
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.random_weights import initialise_on_meta
from sfumato.parallel.weight_files import Held, Joined, Stacked, Swapped, TensorSource, equal_parts
from sfumato.parallel.weights import build_on_meta, load_weights, load_whole, make_real, real_stand_ins, whole_weights

ALONE = Mesh(Layout(), torch.device("cpu"))
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def qwen(**changes: object) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | {"head_dim": 8, "tie_word_embeddings": False} | changes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=12))


def deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    module = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SMALL,
            moe_intermediate_size=8,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
        )
    )
    module.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(4.0))  # a buffer that is stored
    return module


def assert_equal(module: nn.Module, expected: nn.Module) -> None:
    """Weights and all buffers, also those in no file."""
    left, right = (side.state_dict() | dict(side.named_buffers()) for side in (module, expected))
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def refusal(module: nn.Module, files: Path, **arguments: object) -> str:
    """The error of loading, which changed nothing."""
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(module, files, ALONE, **arguments)
    after = module.state_dict()
    assert all(value.is_meta or torch.equal(value, after[name]) for name, value in before.items())
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "saving"),
    [
        (qwen, {}),
        (functools.partial(qwen, tie_word_embeddings=True), {"max_shard_size": "4KB"}),
        (mixtral, {"max_shard_size": "8KB"}),
        (mixtral, {"save_original_format": False}),
        (deepseek, {"max_shard_size": "4KB"}),
    ],
)
def test_models_on_meta_get_what_transformers_saved(build: Callable[[], nn.Module], saving: dict, tmp_path: Path):
    truth = build()
    truth.save_pretrained(tmp_path, **saving)
    module = build_on_meta(build)
    assert all(parameter.is_meta for parameter in module.parameters())
    load_weights(module, tmp_path, ALONE)
    assert_equal(module, truth)
    tied = truth.get_output_embeddings().weight is truth.get_input_embeddings().weight
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied
    loaded = type(truth).from_pretrained(tmp_path)
    assert_equal(module, loaded)


def test_experts_are_stored_one_by_one(tmp_path: Path):
    mixtral().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("experts.11.w1" in name for name in names) and not any("gate_up" in name for name in names)


def test_a_model_without_its_head_fills_one_with_it(tmp_path: Path):
    truth = qwen(tie_word_embeddings=True)
    truth.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    module = build_on_meta(functools.partial(qwen, tie_word_embeddings=True))
    load_weights(module, tmp_path, ALONE)
    assert_equal(module, truth)


def test_a_converter_that_splits(tmp_path: Path):
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, Interleave, Transpose, WeightConverter

    truth = qwen()
    tensors = truth.state_dict()
    for layer in ("model.layers.0", "model.layers.1"):
        joined = [tensors.pop(f"{layer}.self_attn.{projection}_proj.weight") for projection in "qkv"]
        tensors[f"{layer}.self_attn.qkv.weight"] = torch.cat(joined)
        tensors[f"{layer}.self_attn.out.weight"] = tensors.pop(f"{layer}.self_attn.o_proj.weight").t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    names = [f"self_attn.{projection}_proj.weight" for projection in "qkv"]
    mapping = [
        WeightConverter("self_attn.qkv.weight", names, [Chunk(dim=0)]),
        WeightConverter("self_attn.out.weight", "self_attn.o_proj.weight", [Transpose(0, 1)]),
    ]
    register_checkpoint_conversion_mapping("Qwen3ForCausalLM", mapping, overwrite=True)
    try:
        module = build_on_meta(qwen)
        load_weights(module, tmp_path, ALONE)
        assert_equal(module, truth)
        mapping[0] = WeightConverter("self_attn.qkv.weight", names, [Interleave(dim=0), Chunk(dim=0)])
        message = refusal(build_on_meta(qwen), tmp_path)
        assert "Interleave" in message and "save_original_format=False" in message
    finally:
        register_checkpoint_conversion_mapping("Qwen3ForCausalLM", [], overwrite=True)


def test_parts_are_those_of_the_whole():
    def seeded(*shape: int) -> Held:
        return Held(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))))

    single = [seeded(3, 4), seeded(3, 4), seeded(3, 4)]
    unequal = [seeded(2, 4), seeded(0, 4), seeded(3, 4)]
    first, second, third = equal_parts(seeded(7, 2), 0, 3)
    sources: list[tuple[TensorSource, torch.Tensor]] = [
        (Stacked(single, 0), torch.stack([held.tensor for held in single])),
        (Stacked(single, 1), torch.stack([held.tensor for held in single], 1)),
        (Joined(unequal, 0), torch.cat([held.tensor for held in unequal])),
        (
            Joined([Stacked(single, 0), Stacked(single, 0)], 1),
            torch.stack([held.tensor for held in single]).repeat(1, 2, 1),
        ),
        (Swapped(Stacked(single, 1), 0, 2), torch.stack([held.tensor for held in single], 1).transpose(0, 2)),
        (Joined([first, second, third], 0), seeded(7, 2).tensor),
        (third, seeded(7, 2).tensor[6:]),
    ]
    for source, whole in sources:
        assert source.shape == whole.shape and source.dtype == whole.dtype
        spans = [[(start, stop) for stop in range(size + 1) for start in range(stop + 1)] for size in whole.shape]
        for spanned in itertools.islice(itertools.product(*spans), 0, None, 7):
            box = tuple(slice(*span) for span in spanned)
            assert torch.equal(source.read(box), whole[box]), (source, box)


def test_tensors_of_unequal_shapes_are_not_put_together():
    two = [Held(torch.zeros(3, 4)), Held(torch.zeros(3, 5))]
    for put, how in ((Stacked, "stacked"), (Joined, "joined")):
        with pytest.raises(ConfigError, match=rf"tensors that are {how} have unequal shapes"):
            put(two, 0)


def test_dtypes_are_the_modules(tmp_path: Path):
    truth = qwen().to(torch.bfloat16)
    truth.save_pretrained(tmp_path)
    module = build_on_meta(qwen)
    load_weights(module, tmp_path, ALONE)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    expected = truth.float().state_dict()
    assert [name for name, weight in module.state_dict().items() if not torch.equal(weight, expected[name])] == []


def test_names_can_be_given(tmp_path: Path):
    tensors = {f"net.{name}": weight for name, weight in qwen().state_dict().items()}
    save_file(tensors, tmp_path / "mine.safetensors")
    for rename in (lambda name: name.removeprefix("net."), {name: name.removeprefix("net.") for name in tensors}):
        for files in (
            tmp_path / "mine.safetensors",
            [tmp_path / "mine.safetensors"],
            str(tmp_path / "mine.safetensors"),
        ):
            module = build_on_meta(qwen)
            load_weights(module, files, ALONE, rename=rename)
            assert_equal(module, qwen())
    message = refusal(qwen(), tmp_path / "mine.safetensors", rename=lambda name: "same")
    assert message == "weights: rename gives two tensors of the files the name 'same'"


def test_errors_name_the_tensors(tmp_path: Path):
    tensors = qwen().state_dict()
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if ".mlp." not in name}, path)
    message = refusal(qwen(), tmp_path)
    assert "the files have no model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight" in message
    assert "and 1 more; is this the folder of another model?" in message

    extra = {"model.layers.2.mlp.up_proj.weight": torch.ones(1), "model.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | extra, path)
    message = refusal(qwen(), tmp_path)
    assert message == "weights: the module has no place for model.layers.2.mlp.up_proj.weight of the files"
    module = build_on_meta(qwen)
    load_weights(module, tmp_path, ALONE, strict=False)
    assert_equal(module, qwen())

    save_file(tensors | {"model.norm.weight": torch.ones(15), "lm_head.weight": torch.ones(2, 16)}, path)
    for module in (qwen(), build_on_meta(qwen)):
        message = refusal(module, tmp_path, strict=False)
        assert "model.norm.weight has shape (15,) in the files, the module wants (16,)" in message
        assert "lm_head.weight has shape (2, 16)" in message

    save_file(tensors | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}, path)
    assert "model.norm.weight is quantised in the files (torch.int8)" in refusal(qwen(), tmp_path)


def test_weights_that_are_not_strictly_needed_keep_their_values(tmp_path: Path):
    save_file({"lm_head.weight": torch.ones(32, 16)}, tmp_path / "model.safetensors")
    module = qwen()
    load_weights(module, tmp_path, ALONE, strict=False)
    assert bool((module.lm_head.weight == 1).all())
    assert torch.equal(module.model.embed_tokens.weight, qwen().model.embed_tokens.weight)
    assert "the files have no model.embed_tokens.weight" in refusal(build_on_meta(qwen), tmp_path, strict=False)


def test_damaged_folders_are_named(tmp_path: Path):
    assert "has neither model.safetensors" in refusal(qwen(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert f"{index} is not an index of weights" in refusal(qwen(), tmp_path)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "absent.safetensors"}}))
    assert f"{tmp_path / 'absent.safetensors'} cannot be read" in refusal(qwen(), tmp_path)
    path = tmp_path / "cut.safetensors"
    save_file(qwen().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-10])
    assert f"{path} cannot be read" in refusal(qwen(), path)
    save_file({"lm_head.weight": torch.ones(32, 16)}, path)
    assert "tensor 'lm_head.weight' is in another file too" in refusal(qwen(), [path, path])


def test_only_parameters_go_to_meta():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.first.weight.mark = "kept"
            self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
            self.register_buffer("table", torch.arange(3), persistent=False)

    module = build_on_meta(Shared)
    assert module.second.weight is module.first.weight and module.first.weight.mark == "kept"
    assert module.scale.is_meta and not module.scale.requires_grad and not module.table.is_meta
    make_real(module, ALONE.device)
    assert module.second.weight is module.first.weight and not module.first.weight.is_meta
    assert module.table.tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta


def test_buffers_on_meta_are_refused(tmp_path: Path):
    qwen().save_pretrained(tmp_path)
    with torch.device("meta"):
        module = qwen()
    assert "rotary_emb.inv_freq" in refusal(module, tmp_path) and "build_on_meta" in refusal(module, tmp_path)


def test_random_weights_are_those_of_the_plain_module():
    module = build_on_meta(qwen)
    state = torch.get_rng_state()
    initialise_on_meta(module, lambda: nn.Module.train(qwen()), ALONE, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(module, qwen())
    with pytest.raises(ConfigError, match=r"has no model\.layers\.1\.self_attn"):
        initialise_on_meta(build_on_meta(qwen), functools.partial(qwen, num_hidden_layers=1), ALONE, seed=0)


def test_adapters_beside_weights_on_meta(tmp_path: Path):
    from peft import LoraConfig

    qwen().save_pretrained(tmp_path)

    def adapted(module: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        inject_adapter(module, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"), ADAPTER)
        return module

    module = build_on_meta(qwen)
    with real_stand_ins(module):
        adapted(module)
    load_weights(module, tmp_path, ALONE)
    assert_equal(module, adapted(qwen()))
    assert [parameter.requires_grad for parameter in module.parameters()] == [
        parameter.requires_grad for parameter in adapted(qwen()).parameters()
    ]
    trained = whole_weights(module, ALONE, only_trainable=True)
    assert len(trained) == 4 and all("lora" in name for name in trained)
    assert "adapters are on meta" in refusal(adapted(build_on_meta(qwen)), tmp_path)


def test_whole_tensors_are_checked_before_any_is_copied():
    module = qwen()
    good = torch.zeros(32, 16)
    for tensors, message in (
        ({"lm_head.weight": good, "lm_head.bias": good}, "the module has no lm_head.bias"),
        (
            {"lm_head.weight": good, "model.norm.weight": good},
            r"model.norm.weight has shape \(32, 16\), the module wants \(16,\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load_whole(module, tensors, ALONE)
    assert_equal(module, qwen())
    with pytest.raises(ConfigError, match="are on meta: call load_weights"):
        load_whole(build_on_meta(qwen), {"lm_head.weight": good}, ALONE)
    load_whole(module, {"lm_head.weight": good}, ALONE)
    assert not module.lm_head.weight.any()
    assert not whole_weights(module, ALONE)["lm_head.weight"].any()
