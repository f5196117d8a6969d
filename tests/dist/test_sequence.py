"""Sequence parallelism against one plain process: the attention function, whole models, and what is refused."""

import copy
import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.parallel.attention import SequenceGroups, causal_schedule, full_schedule, sequence_attention
from sfumato.parallel.kernels import attend, attend_backward, choose_kernel
from sfumato.parallel.packed_rows import head_tail_chunks, shard_sequence
from sfumato.parallel.plan import Gather, ParallelPlan, Split, language_plan
from sfumato.parallel.sequence import apply_sequence_parallel
from tests.dist.cases import Outcome, build, difference, make_mesh, train

U, R, DDP = "ulysses_parallel_size", "context_parallel_size", {"data_parallel_mode": "ddp"}
TOLERANCE = 1e-5

SHAPES: dict[str, tuple[int, dict[str, int]]] = {
    "ulysses2": (2, {U: 2}),
    "ring2": (2, {R: 2}),
    "ring2 x ulysses2": (4, {R: 2, U: 2}),
    "ring4": (4, {R: 4}),
    "ulysses4": (4, {U: 4}),
}


def seeded(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The attention function


class Problem:
    """Heads, key heads, widths of keys and values; documents by row (causal) or lengths by rank (not causal)."""

    def __init__(self, heads, key_heads, widths, rows=1, documents=None, lengths=None, dtype=torch.float32, mask=False):
        self.heads, self.key_heads, self.widths, self.rows = heads, key_heads, widths, rows
        self.documents, self.lengths, self.dtype, self.mask = documents, lengths, dtype, mask


PROBLEMS = {
    "causal": Problem(8, 8, (8, 8), rows=2, documents=[[37]]),
    "packed, grouped heads": Problem(8, 4, (8, 8), documents=[[9, 14, 1, 1, 1, 5]]),
    "rows differ, one key head, widths differ": Problem(
        8, 1, (12, 7), rows=4, documents=[[9, 14, 5], [7] * 4, [7] * 4, [28]]
    ),
    "key heads do not divide": Problem(12, 4, (8, 8), documents=[[3, 20]]),
    "full, uneven": Problem(8, 8, (8, 8), rows=2, lengths=([5, 4, 3, 7], [5, 4, 3, 7])),
    "cross, uneven, none on a rank": Problem(8, 2, (8, 8), lengths=([5, 4, 4, 4], [3, 0, 2, 7])),
    "padding mask": Problem(8, 8, (8, 8), rows=2, lengths=([5, 4, 3, 7], [5, 4, 3, 7]), mask=True),
    "bf16": Problem(8, 2, (16, 16), documents=[[9, 14, 5, 40]], dtype=torch.bfloat16),
}


def solve_in_parts(config: dict[str, int]) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each problem: (this rank's part, the same from torch in float32) of the output and the gradients."""
    groups = SequenceGroups.from_mesh(make_mesh(**config)[0])
    return {name: solve(problem, groups) for name, problem in PROBLEMS.items()}


def solve(problem: Problem, groups: SequenceGroups) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if problem.documents:
        total = num_keys = sum(problem.documents[0])
        chunks = head_tail_chunks(total, groups.size)
        mine = [*chunks[groups.rank], *chunks[-1 - groups.rank]]
        ours = mine
        schedule = causal_schedule(groups, problem.documents)
        ids = torch.stack([torch.repeat_interleave(torch.tensor(document)) for document in problem.documents])
        mask = ((ids[:, :, None] == ids[:, None]) & torch.ones(total, total, dtype=torch.bool).tril())[:, None]
    else:
        lengths, key_lengths = (length[: groups.size] for length in problem.lengths)
        total, num_keys = sum(lengths), sum(key_lengths)
        mine, ours = (torch.arange(sum(sizes)).split(sizes)[groups.rank] for sizes in (lengths, key_lengths))
        schedule = full_schedule(groups, lengths, key_lengths)
        mask = (seeded(problem.rows, num_keys, seed=9) > 0)[:, None, None] if problem.mask else None
    shapes = [(problem.heads, total), (problem.key_heads, num_keys), (problem.key_heads, num_keys)]
    widths = (problem.widths[0], *problem.widths)
    whole = [
        seeded(problem.rows, *shape, width, seed=seed).to(problem.dtype).requires_grad_()
        for seed, (shape, width) in enumerate(zip(shapes, widths, strict=True))
    ]
    weight = seeded(problem.rows, problem.heads, total, problem.widths[1], seed=5).to(problem.dtype)
    wide = [tensor.float() for tensor in whole]
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad((expected * weight).sum(), wide)
    places = (mine, ours, ours)
    parts = [tensor.detach()[:, :, place].requires_grad_() for tensor, place in zip(whole, places, strict=True)]
    key_mask = mask[:, 0, 0][:, ours] if problem.mask else None
    actual = sequence_attention(*parts, schedule, 0.3, key_mask)
    found_gradients = torch.autograd.grad((actual * weight[:, :, mine]).sum(), parts)
    pairs = [(actual.detach(), expected.detach()[:, :, mine])]
    return pairs + [
        (part, gradient[:, :, place]) for part, gradient, place in zip(found_gradients, gradients, places, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_parts_is_that_of_one_process(shape, ranks):
    num_ranks, config = SHAPES[shape]
    for solved in ranks.run(num_ranks, solve_in_parts, config):
        for name, pairs in solved.items():
            for tensor, expected in pairs:
                assert tensor.dtype == PROBLEMS[name].dtype and tensor.shape == expected.shape, name
                half = name == "bf16"  # relative to the largest: gradients of grouped heads are sums over heads
                atol = 2e-2 * float(expected.abs().max()) if half else TOLERANCE
                torch.testing.assert_close(tensor.float(), expected, rtol=0 if half else TOLERANCE, atol=atol, msg=name)


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_agree_with_mathematics(causal):
    query, key, value, grad = (
        seeded(2, heads, 11, width, seed=width + heads) for heads, width in ((6, 8), (2, 8), (2, 5), (6, 5))
    )
    expected = attend(query, key, value, 0.4, causal, "math")
    actual = attend(query, key, value, 0.4, causal)
    torch.testing.assert_close(actual, expected)
    back = [attend_backward(grad, (query, key, value), expected, 0.4, causal, kernel) for kernel in ("math", None)]
    torch.testing.assert_close(back[0], back[1], rtol=1e-5, atol=1e-5)
    assert [tensor.shape for tensor in back[0]] == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_causal_work_is_even(size):
    chunks = head_tail_chunks(16 * size, size)
    assert [token for chunk in chunks for token in chunk] == list(range(16 * size))
    work = [sum(token + 1 for chunk in (chunks[rank], chunks[-1 - rank]) for token in chunk) for rank in range(size)]
    assert len(set(work)) == 1
    for total in range(2, 40):
        lengths = [len(head_tail_chunk) for head_tail_chunk in head_tail_chunks(total, size)]
        parts = [lengths[rank] + lengths[-1 - rank] for rank in range(size)]
        assert sum(parts) == total and max(parts) - min(parts) <= 1


def no_tile_is_computed_in_vain() -> list[int]:
    """Scores that this rank computes of three documents on ring 4."""
    groups = SequenceGroups.from_mesh(make_mesh(**{R: 4})[0])
    tiles = [tile for step_tiles in causal_schedule(groups, [[40, 24, 8, 8]]).tiles for tile in step_tiles]
    return [tile.num_queries * tile.num_keys * tile.repeat // (2 if tile.causal else 1) for tile in tiles]


def test_what_is_masked_is_not_computed(ranks):
    computed = sum(sum(scores) for scores in ranks.run(4, no_tile_is_computed_in_vain))
    assert computed == sum(length**2 // 2 for length in (40, 24, 8, 8))


# Whole models


@functools.cache
def truth(kind: str, lora: bool = False) -> Outcome:
    return train(kind, lora)


@pytest.mark.parametrize(
    "kind", ["dense", "sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("moe", "flux", "wan"))]
)
def test_recomputation_on_replicas_equals_one_process(kind, ranks):
    config = {R: 2, "data_parallel_replicate_size": 2, "activation_checkpointing": "full"}
    for outcome in ranks.run(4, functools.partial(train, kind, **config)):
        assert difference(outcome, truth(kind)) < TOLERANCE


LANGUAGE_MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 1},
    "Qwen3Moe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV2": {"q_lora_rank": None, "kv_lora_rank": 8, "first_k_dense_replace": 2},
    "DeepseekV3": {"q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 2},
}


def language_model(family: str, **settings: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6} if "Deepseek" in family else {"head_dim": 8}
    config = getattr(transformers, f"{family}Config")(
        **{
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1},
            **heads,
            **LANGUAGE_MODELS[family],
            **settings,
        }
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def two_rows() -> dict[str, torch.Tensor]:
    """Rows with different documents, of a length that does not divide."""
    input_ids = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(1))
    positions = [torch.cat([torch.arange(length) for length in row]) for row in ((9, 12), (4, 4, 13))]
    return {"input_ids": input_ids, "position_ids": torch.stack(positions)}


def logits_and_gradients(module: nn.Module, batch: dict[str, torch.Tensor], weight: torch.Tensor) -> tuple[Any, Any]:
    """Logits without gradients (a rollout), and the gradients of a weighted sum of them."""
    with torch.no_grad():
        result = module(**batch, use_cache=False).logits
    (module(**batch, use_cache=False).logits * weight).sum().backward()
    return result, {name: parameter.grad for name, parameter in module.named_parameters()}


def language_models_in_parts(config: dict[str, int]) -> dict[str, float]:
    """The largest error of logits and of gradients (relative to the largest) over all families."""
    mesh, _ = make_mesh(**config)
    batch, weight = two_rows(), seeded(2, 21, 64, seed=3)
    part = shard_sequence(batch | {"weight": weight}, mesh)
    where = shard_sequence({"input_ids": torch.arange(21)[None]}, mesh)["input_ids"][0]
    weight_part, errors = part.pop("weight"), {}
    for family in LANGUAGE_MODELS:
        logits, gradients = logits_and_gradients(language_model(family), batch, weight)
        module = language_model(family)
        apply_sequence_parallel(module, mesh, language_plan(module))
        result, found_gradients = logits_and_gradients(module, part, weight_part)
        error = float((result - logits[:, where]).abs().max())
        for name, gradient in gradients.items():
            if gradient is not None:
                dist.all_reduce(found_gradients[name])
                error = max(
                    error, float((found_gradients[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1))
                )
        errors[family] = error
    return errors


@pytest.mark.parametrize("shape", ["ring2", "ring2 x ulysses2"])
def test_language_models_of_all_families(shape, ranks):
    num_ranks, config = SHAPES[shape]
    for errors in ranks.run(num_ranks, language_models_in_parts, config):
        assert errors.keys() == LANGUAGE_MODELS.keys()
        assert max(errors.values()) < TOLERANCE, errors


def images(num_tokens: int, rows: int) -> dict[str, torch.Tensor]:
    ids = torch.stack([torch.zeros(num_tokens), torch.arange(num_tokens), torch.zeros(num_tokens)], dim=1)
    return {
        "hidden_states": seeded(rows, num_tokens, 16, seed=num_tokens),
        "encoder_hidden_states": seeded(rows, 7, 16, seed=8),
        "pooled_projections": seeded(rows, 16, seed=9),
        "timestep": torch.full((rows,), 0.5),
        "guidance": torch.full((rows,), 3.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(7, 3),
        "return_dict": False,
    }


def two_sizes_then_backward(config: dict[str, Any]) -> Outcome:
    """Gradients when batches of two sizes are computed before either is recomputed; 16 and 15 tokens cut alike."""
    from sfumato.parallel.parallelize import parallelize

    mesh, parsed = make_mesh(**config)
    module = build("flux")
    if mesh.distributed:
        module = parallelize(module, mesh, parsed, plans.FLUX)
    outputs = [module(**images(num_tokens, rows=2))[0] for num_tokens in (15, 16)]
    sum((output**2).sum() for output in outputs).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    if mesh.distributed:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return Outcome([float(output.detach().sum()) for output in outputs], [], gradients)


def test_recomputation_after_a_batch_of_another_size(ranks):
    expected = two_sizes_then_backward({})
    config = {R: 4, "activation_checkpointing": "full"} | DDP
    for outcome in ranks.run(4, two_sizes_then_backward, config):
        assert difference(outcome, expected) < TOLERANCE


# What is refused


class ByHand(nn.Module):
    """Softmax of scores, without torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


class HandAttention(ByHand):
    """The same, with a name that says what it is."""


class Direct(nn.Module):
    """torch's function without a processor, beside an attention that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = WithProcessor(lambda module, x: functional.scaled_dot_product_attention(x, x, x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x) + self.other(x)


class WithProcessor(nn.Module):
    """As diffusers' attention modules are."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.processor(self, x.unflatten(2, (2, -1)).transpose(1, 2))
        return heads.transpose(1, 2).flatten(2)


class ToyBlock(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(x)


class Toy(nn.Module):
    def __init__(self, *mixers: nn.Module) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(ToyBlock(mixer) for mixer in mixers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def attention_with(**settings: Any) -> WithProcessor:
    return WithProcessor(lambda module, x: functional.scaled_dot_product_attention(x, x, x, **settings))


TOY = ParallelPlan(("ToyBlock",), sequence={"embed": {0: Split(1, output=True)}, "out": Gather(1)})
LATE = ParallelPlan(("ToyBlock",), sequence={"out": {0: Split(1, output=True)}})
WRONG = ParallelPlan(("ToyBlock",), sequence={"embed": {"no_such": Split(1)}})
MISSING = ParallelPlan(("ToyBlock",), sequence={"nowhere": {0: Split(1, output=True)}})

MASKED = replace(TOY, sequence={**TOY.sequence, "": {"is_read": Split(1)}}, masks="pairs")
WHOLE = replace(TOY, masks="whole")

BYPASSES = {
    "by hand": (lambda: Toy(attention_with(), ByHand()), TOY, "blocks.1 ran without the distributed attention"),
    "by hand, named": (lambda: Toy(HandAttention()), TOY, "blocks.0.mixer is a HandAttention without processor"),
    "direct": (lambda: Toy(Direct()), TOY, "calls scaled_dot_product_attention outside of a processor"),
    "other backend": (lambda: Toy(WithProcessor(lambda module, x: x)), TOY, "mixer does not call torch's scaled_dot"),
    "mask": (
        lambda: Toy(attention_with(attn_mask=torch.zeros(4, 4))),
        TOY,
        r"attn_mask \[1, 1, 4, 4\] of torch.float32",
    ),
    "causal": (lambda: Toy(attention_with(is_causal=True)), TOY, "blocks.0.mixer uses is_causal"),
    "dropout": (lambda: Toy(attention_with(dropout_p=0.1)), TOY, "blocks.0.mixer uses dropout"),
    "no pairs": (
        lambda: Toy(attention_with(attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())),
        replace(TOY, masks="pairs"),
        r"attn_mask \[1, 1, 4, 4\] of torch.bool that is not 1 where queries and keys are no padding",
    ),
    "not whole": (
        lambda: Toy(attention_with(attn_mask=torch.zeros(4, 4))),
        WHOLE,
        r"attn_mask \[1, 1, 4, 4\], which is not that of its 8 tokens",
    ),
    "not cut": (lambda: Toy(attention_with()), LATE, "blocks.0.mixer ran before the sequence was cut"),
    "no input": (lambda: Toy(attention_with()), WRONG, "embed has no input no_such"),
    "no module": (lambda: Toy(attention_with()), MISSING, "no module 'nowhere'"),
}


def refusal(build_model: Any, plan: Any, forward: Any) -> str:
    """What ConfigError says when a model is made sequence parallel and runs once."""
    mesh, _ = make_mesh(**{U: 2})
    module = build_model()
    try:
        apply_sequence_parallel(module, mesh, plan or language_plan(module))
        forward(module, mesh)
    except ConfigError as error:
        assert torch._C._len_torch_function_stack() == 0
        return str(error)
    return "nothing was refused"


def refused_bypasses() -> dict[str, str]:
    return {
        name: refusal(model, plan, lambda module, mesh: module(seeded(1, 8, 4, seed=1)))
        for name, (model, plan, _) in BYPASSES.items()
    }


class PaddedAttention(nn.Module):
    """Attention in which only those that are read see each other; ``is_read`` [B, S] is set before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.processor: Any = self.attend
        self.is_read: torch.Tensor | None = None

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    @staticmethod
    def attend(module: Any, x: torch.Tensor) -> torch.Tensor:
        mask = module.is_read[:, None, :, None] * module.is_read[:, None, None]
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(self, x.unflatten(2, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


class PaddedToy(Toy):
    def forward(self, x: torch.Tensor, is_read: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.mixer.is_read = is_read
        return super().forward(x)


def masked_toys() -> dict[str, float]:
    """Relative differences of outputs and gradients of the inputs from one process, with masks of several kinds."""
    is_read = torch.tensor([[True] * 5 + [False, True], [True] * 3 + [False] * 4])
    scores = seeded(2, 2, 7, 7, seed=2).masked_fill(torch.ones(7, 7).triu(2) > 0, -torch.inf)
    cases = {
        "pairs": (PaddedToy, [PaddedAttention(), PaddedAttention()], MASKED, {"is_read": is_read}, {R: 2}),
        "numbers": (PaddedToy, [PaddedAttention()], MASKED, {"is_read": is_read.float()}, {U: 2}),
        "whole": (Toy, [attention_with(attn_mask=scores, scale=0.4)], WHOLE, {}, {U: 2}),
    }
    differences = {}
    for name, (kind, mixers, plan, inputs, sizes) in cases.items():
        torch.manual_seed(0)
        module = kind(*mixers)
        outcomes = []
        for is_shared in (False, True):
            if is_shared:
                apply_sequence_parallel(module, make_mesh(**sizes)[0], plan)
            x = seeded(2, 7, 4, seed=1).requires_grad_()
            output = module(x, **inputs)
            output.square().sum().backward()
            if is_shared:
                dist.all_reduce(x.grad)
            outcomes.append(torch.cat([output.detach(), x.grad]))
        differences[name] = float((outcomes[1] - outcomes[0]).norm() / outcomes[0].norm())
    return differences


def test_masks_are_those_of_one_process(ranks):
    for differences in ranks.run(2, masked_toys):
        assert differences.keys() == {"pairs", "numbers", "whole"}
        assert max(differences.values()) < 2e-6, differences


class SeesPadding(PaddedAttention):
    """Here padding sees padding, so that its masks are products only where there is none."""

    @staticmethod
    def attend(module: Any, x: torch.Tensor) -> torch.Tensor:
        mask = module.is_read[:, None, :, None] == module.is_read[:, None, None]
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_later_mask_that_is_no_product_is_refused(ranks):
    for error in ranks.run(2, later_mask):
        assert "blocks.0.mixer has an attn_mask" in error and "is not 1 where queries and keys are no padding" in error


def later_mask() -> str:
    module = PaddedToy(SeesPadding())
    apply_sequence_parallel(module, make_mesh(**{U: 1, R: 2})[0], MASKED)
    x, is_read = seeded(2, 7, 4, seed=1), torch.ones(2, 7, dtype=torch.bool)
    for _ in range(2):
        module(x, is_read=is_read)
    is_read[1, [3, 6]] = False  # some of each rank
    with pytest.raises(ConfigError) as error:
        module(x, is_read=is_read)
    return str(error.value)


def test_a_ring_takes_no_whole_masks(ranks):
    (error, _) = ranks.run(2, ring_with_whole_masks)
    assert "masks that differ from query to query, unknown to a ring" in error


def ring_with_whole_masks() -> str:
    with pytest.raises(ConfigError) as error:
        apply_sequence_parallel(Toy(attention_with()), make_mesh(**{U: 1, R: 2})[0], WHOLE)
    return str(error.value)


def accepted_toy() -> float:
    x = seeded(2, 7, 4, seed=1)
    torch.manual_seed(0)
    module = Toy(attention_with(), attention_with())
    expected = module(x)
    apply_sequence_parallel(module, make_mesh(**{U: 1, R: 2})[0], TOY)
    return float((module(x) - expected).detach().abs().max())


def test_attention_that_bypasses_the_engine_is_found(ranks):
    for errors in ranks.run(2, refused_bypasses):
        for name, (_, _, expected) in BYPASSES.items():
            assert re.search(expected, errors[name]), (name, errors[name])
    assert max(ranks.run(2, accepted_toy)) < 1e-6


def call(module: nn.Module, mesh: Any, **changes: Any) -> None:
    part = shard_sequence(two_rows(), mesh)
    module(**{name: change for name, change in (part | changes).items() if change is not None}, use_cache=False)


LANGUAGE_REFUSALS = {
    "heads": (
        functools.partial(language_model, "Llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1),
        {},
        "LlamaForCausalLM: 3 query heads / train.ulysses_parallel_size 2 is not whole",
    ),
    "dropout": (functools.partial(language_model, "Qwen2", attention_dropout=0.1), {}, "attention_dropout 0.1"),
    "window": (
        functools.partial(language_model, "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
        {},
        "sliding_attention, unknown to sequence parallelism",
    ),
    "positions": (functools.partial(language_model, "Llama"), {"position_ids": None}, "called without position_ids"),
    "padding": (
        functools.partial(language_model, "Llama"),
        {"attention_mask": torch.tensor([[0] * 3 + [1] * 8] * 2)},
        "knows no padding mask",
    ),
    "cut": (
        functools.partial(language_model, "Llama"),
        {"input_ids": torch.zeros(1, 5, dtype=torch.long), "position_ids": torch.arange(5)[None]},
        "nothing was refused",
    ),
}


def refused_language_models() -> dict[str, str]:
    return {
        name: refusal(model, None, functools.partial(call, **changes))
        for name, (model, changes, _) in LANGUAGE_REFUSALS.items()
    }


def uneven_by_hand() -> str:
    """Ranks hold halves that shard_sequence would not have cut."""
    length = 3 if dist.get_rank() == 0 else 6
    ids = torch.arange(length)[None]
    return refusal(
        functools.partial(language_model, "Llama"),
        None,
        functools.partial(call, input_ids=ids, position_ids=ids),
    )


def test_language_models_that_cannot_be_shared_are_refused(ranks):
    for errors in ranks.run(2, refused_language_models):
        for name, (_, _, expected) in LANGUAGE_REFUSALS.items():
            assert expected in errors[name], (name, errors[name])
    for error in ranks.run(2, uneven_by_hand):
        assert "ranks hold [3, 6] tokens, which is no cut of shard_sequence" in error


def copied(module: nn.Module, mesh: Any) -> None:
    copy.deepcopy(module)


def too_short(module: nn.Module, mesh: Any) -> None:
    shard_sequence({"input_ids": torch.zeros(1, 1)}, mesh)


def without_plan() -> nn.Module:
    return nn.Sequential(ToyBlock(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("model", "plan", "forward", "expected"),
    [
        (functools.partial(language_model, "Llama"), None, copied, "cannot be copied after it has been made sequence"),
        (functools.partial(language_model, "Llama"), None, too_short, "1 tokens cannot be shared by the 2 ranks"),
        (without_plan, ParallelPlan(("ToyBlock",)), copied, "Sequential is no transformers model: give its plan a seq"),
    ],
)
def test_other_mistakes_are_refused(model, plan, forward, expected, ranks):
    for error in ranks.run(2, refusal, model, plan, forward):
        assert expected in error


def test_the_kernel_of_a_cpu_keeps_no_whole_score_matrix():
    assert choose_kernel(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)) == "cpu_flash"
