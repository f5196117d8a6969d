"""Pipelines of every schedule against one plain process: losses, gradient norms and weights of three training steps."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import pad_together
from sfumato.parallel.pipeline import build_pipeline, split_layers
from sfumato.parallel.plan import ParallelPlan, language_plan
from sfumato.parallel.random_weights import initialise_on_meta
from sfumato.parallel.shards import gather_whole, trainable_parameters
from sfumato.parallel.weights import build_on_meta
from tests.dist.cases import (
    CASES,
    ROWS,
    Outcome,
    build,
    difference,
    make_mesh,
    merged,
    summed_loss,
    train,
    train_pipeline,
    train_steps,
)

TOLERANCE = 1e-5


@functools.cache
def truth(kind: str, lora: bool = False) -> Outcome:
    return train(kind, lora)


SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv")

MODES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "pp4": (4, False, {"pipeline_parallel_size": 4}),
    "pp4_gpipe": (4, False, {"pipeline_parallel_size": 4, "pipeline_schedule": "gpipe"}),
    "fsdp2_zero_bubble": (4, False, {"pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble"}),
    "fsdp2_zbv": (4, False, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "tp_fsdp2_zbv": (4, False, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "tp_sequence": (4, False, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "ring": (4, False, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
    "recomputed": (
        2,
        False,
        {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv", "activation_checkpointing": "full"},
    ),
    "new_length_each_step": (2, False, {"pipeline_parallel_size": 2, "multiple": 1}),
    "lora_zbv": (2, True, {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}),
}


@pytest.mark.parametrize("mode", MODES)
def test_mode_equals_one_process(mode, ranks):
    num_ranks, lora, config = MODES[mode]
    for outcome in ranks.run(num_ranks, functools.partial(train_pipeline, "dense", lora, **config)):
        assert difference(outcome, truth("dense", lora)) < TOLERANCE


ROWS_OF_STEP = [CASES["dense"].row(index) for index in range(ROWS)]
WIDE_ROWS = [
    {name: torch.cat([value, value.roll(1, 1) if name == "input_ids" else value]) for name, value in row.items()}
    for row in ROWS_OF_STEP[:2]
] + ROWS_OF_STEP[2:]
EQUAL_ROWS = [{name: value[:, :24] for name, value in row.items()} for row in ROWS_OF_STEP]


def tiny(kind: str, **more: Any) -> nn.Module:
    """Other models of transformers, three layers each."""
    import transformers

    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if kind == "DeepseekV3":
        settings |= {
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        }
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings, **more))


def only_layer(index: int) -> nn.Module:
    """The dense model, of which one layer is trained."""
    module = build("dense")
    module.requires_grad_(False)
    module.model.layers[index].requires_grad_(True)
    return module


def gradients(module: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    return merged(
        mesh, {name: gather_whole(parameter.grad).clone() for name, parameter in trainable_parameters(module).items()}
    )


def plain_step(
    make: Callable[[], nn.Module], rows: list[dict[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, mesh, losses = make(), make_mesh()[0], []
    for row in rows:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            logits = module(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
            loss = summed_loss(logits, row, num=50)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, gradients(module, mesh)


def pipeline_step(
    make: Callable[[], nn.Module], rows: list[dict[str, torch.Tensor]], dtype: torch.dtype | None = None, **config: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    mesh, parsed = make_mesh(pipeline_parallel_size=2, data_parallel_mode="ddp", **config)
    module = make()
    pipeline = build_pipeline(module, mesh, parsed, language_plan(module), length_multiple=1)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        losses = pipeline.train_step(rows, functools.partial(summed_loss, num=50))
    return losses, gradients(pipeline.module, mesh)


def assert_same_step(actual: tuple, wanted: tuple) -> None:
    assert actual[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    assert actual[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert (actual[1][name] - value).norm() <= TOLERANCE * value.norm(), name


def tied_model(trained: bool = True) -> nn.Module:
    """The head is the embedding; if that is frozen, the third layer is trained."""
    module = build("dense") if trained else only_layer(2)
    module.lm_head.weight = module.model.embed_tokens.weight
    return module


STEPS: dict[str, tuple[Callable[[], nn.Module], list, torch.dtype | None, dict[str, Any]]] = {
    "llama": (functools.partial(tiny, "Llama"), ROWS_OF_STEP, None, {}),
    "qwen2": (functools.partial(tiny, "Qwen2"), ROWS_OF_STEP, None, {}),
    "deepseek": (functools.partial(tiny, "DeepseekV3"), ROWS_OF_STEP, None, {}),
    "rows_of_several_sizes": (functools.partial(build, "dense"), WIDE_ROWS, None, {}),
    "first_stage_frozen": (functools.partial(only_layer, 3), ROWS_OF_STEP, None, {}),
    "first_stage_frozen_zbv": (functools.partial(only_layer, 2), ROWS_OF_STEP, None, {"pipeline_schedule": "zbv"}),
    "last_stage_frozen": (functools.partial(only_layer, 0), ROWS_OF_STEP, None, {}),
    "last_stage_frozen_zbv": (functools.partial(only_layer, 0), ROWS_OF_STEP, None, {"pipeline_schedule": "zbv"}),
    "frozen_tie": (functools.partial(tied_model, trained=False), ROWS_OF_STEP, None, {}),
    "autocast": (functools.partial(build, "dense"), EQUAL_ROWS, torch.bfloat16, {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_step_equals_one_process(name, ranks):
    make, rows, dtype, config = STEPS[name]
    wanted = plain_step(make, rows, dtype)
    for actual in ranks.run(2, functools.partial(pipeline_step, make, rows, dtype, **config)):
        assert_same_step(actual, wanted)


def evaluate_and_train(**config: Any) -> tuple[list[torch.Tensor] | None, bool, Outcome]:
    mesh, parsed = make_mesh(pipeline_parallel_size=2, **config)
    module = build("dense")
    pipeline = build_pipeline(module, mesh, parsed, language_plan(module))
    logits = pipeline.forward(WIDE_ROWS[1:])
    return logits, pipeline.has_last, train_steps(pipeline, mesh, "dense")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_forward_gives_logits_on_the_last_stage(schedule, ranks):
    module = build("dense")
    with torch.no_grad():
        wanted = [
            module(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
            for row in WIDE_ROWS[1:]
        ]
    actual = ranks.run(4, functools.partial(evaluate_and_train, pipeline_schedule=schedule))
    assert [has_last for _, has_last, _ in actual] == [schedule == "zbv"] * 2 + [schedule != "zbv"] * 2
    for logits, has_last, outcome in actual:
        assert (logits is not None) == has_last
        for left, right in zip(logits or [], wanted if has_last else [], strict=True):
            assert left.shape == right.shape and (left - right).abs().max() < TOLERANCE
        assert difference(outcome, truth("dense")) < TOLERANCE


def train_from_meta(**config: Any) -> tuple[int, Outcome]:
    mesh, parsed = make_mesh(pipeline_parallel_size=2, **config)
    make = functools.partial(build, "dense")
    module = build_on_meta(make)
    pipeline = build_pipeline(module, mesh, parsed, language_plan(module))
    numel = sum(parameter.numel() for parameter in pipeline.module.parameters())
    initialise_on_meta(pipeline.module, make, mesh, seed=0)
    return numel, train_steps(pipeline, mesh, "dense")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_meta_makes_only_this_ranks_stages(schedule, ranks):
    actual = ranks.run(2, functools.partial(train_from_meta, pipeline_schedule=schedule))
    assert sum(numel for numel, _ in actual) == sum(parameter.numel() for parameter in build("dense").parameters())
    for _, outcome in actual:
        assert difference(outcome, truth("dense")) < TOLERANCE


def with_another_weight() -> nn.Module:
    module = build("dense")
    module.model.scale = nn.Parameter(torch.ones(1))
    return module


def masked(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return row | {"attention_mask": torch.ones_like(row["input_ids"])}


DENSE = functools.partial(build, "dense")
REFUSALS: dict[str, tuple[Callable[[], nn.Module], list, dict[str, Any], str]] = {
    "tied": (tied_model, ROWS_OF_STEP, {}, "share one weight"),
    "diffusion": (functools.partial(build, "sd3"), ROWS_OF_STEP, {}, "SD3Transformer2DModel cannot be cut"),
    "scaled": (
        functools.partial(tiny, "Granite", embedding_multiplier=2.0),
        ROWS_OF_STEP,
        {},
        "GraniteForCausalLM changes hidden states",
    ),
    "another_weight": (with_another_weight, ROWS_OF_STEP, {}, r"has weights \(model.scale\)"),
    "few_layers": (functools.partial(tiny, "Llama"), ROWS_OF_STEP, {"pipeline_schedule": "zbv"}, "3 layers .* 4 st"),
    "compiled": (DENSE, ROWS_OF_STEP, {"pipeline_schedule": "zero_bubble", "compile": True}, "train.compile cannot"),
    "selective": (
        DENSE,
        ROWS_OF_STEP,
        {"pipeline_schedule": "zbv", "activation_checkpointing": "selective"},
        "take full",
    ),
    "few_micro_batches": (DENSE, ROWS_OF_STEP[:1], {}, "has 1 micro-batches"),
    "uneven_rounds": (DENSE, [*ROWS_OF_STEP, ROWS_OF_STEP[0]], {"pipeline_schedule": "zero_bubble"}, "5 / 2 = 2.5"),
    "masked": (DENSE, [masked(row) for row in ROWS_OF_STEP], {}, "no attention_mask"),
}


def refusals() -> dict[str, str]:
    results = {}
    for name, (make, rows, config, _) in REFUSALS.items():
        mesh, parsed = make_mesh(pipeline_parallel_size=2, **config)
        module = make()
        plan = CASES["sd3" if name == "diffusion" else "dense"].plan(module)
        try:
            build_pipeline(module, mesh, parsed, plan).train_step(rows, functools.partial(summed_loss, num=1))
        except ConfigError as error:
            results[name] = str(error)
    return results


def test_what_cannot_be_cut_is_refused_before_the_first_step(ranks):
    for messages in ranks.run(2, refusals):
        for name, (_, _, _, message) in REFUSALS.items():
            assert re.search(message, messages[name]), name


def test_one_rank_is_no_pipeline():
    mesh, parsed = make_mesh()
    with pytest.raises(ConfigError, match="pipeline_parallel_size above 1"):
        build_pipeline(build("dense"), mesh, parsed, ParallelPlan(("Qwen3DecoderLayer",)))


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (4, 2, [2, 2]),
        (4, 4, [1, 1, 1, 1]),
        (5, 4, [1, 1, 2, 1]),
        (32, 4, [8, 9, 8, 7]),
        (28, 8, [3, 4, 4, 4, 4, 4, 3, 2]),
    ],
)
def test_layers_are_shared_out_beside_embedding_and_head(layers, stages, sizes):
    assert split_layers(layers, stages) == sizes


def test_padding_is_a_document_of_its_own():
    batches = [
        {
            "input_ids": torch.ones(1, 3, dtype=torch.int64),
            "position_ids": torch.tensor([[0, 1, 0]]),
            "id": torch.ones(1),
        },
        {"input_ids": torch.ones(2, 5, dtype=torch.int64), "position_ids": torch.arange(5).repeat(2, 1)},
    ]
    for batch in batches:
        batch["labels"] = batch["input_ids"].clone()
    first, second = pad_together(batches, 4)
    assert first["input_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0] * 8]
    assert first["labels"].tolist() == [[1, 1, 1, -100, -100, -100, -100, -100], [-100] * 8]
    assert first["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2, 3, 4], [*range(8)]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert first["id"].tolist() == [1]
