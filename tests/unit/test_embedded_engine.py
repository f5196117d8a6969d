"""The embedded engine: what is drawn belongs to request and position, and is what training says of it."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3ForCausalLM

from sfumato.config.sections import LoraConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_language_model
from sfumato.models.language.row_cache import cache_argument
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import Completion, EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.engines.embedded.forward import Forward
from sfumato.rollout.engines.embedded.row_choice import choose_rows
from tests.survey.tiny_configs import tiny_config
from tests.tiny import tiny_language_description, write_config

WARM = Sampling(temperature=0.7, stop_token_ids=(2, 7, 9))


def make_module(kind: str = "qwen3", seed: int = 0) -> nn.Module:
    described = tiny_language_description(kind)
    del described["model_type"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**described))


def make_requests(groups: int = 4, n: int = 4, max_new_tokens: int = 24) -> list[GenerationRequest]:
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 259, size=generator.integers(1, 40)).tolist() for _ in range(groups)]
    return [
        GenerationRequest(prompt, 100 * number + member, max_new_tokens)
        for number, prompt in enumerate(prompts)
        for member in range(n)
    ]


def plain_log_probs(module: nn.Module, request: GenerationRequest, drawn: Sequence[int], temperature: float) -> Tensor:
    """Of the drawn tokens, by one forward pass over the whole sequence."""
    tokens = torch.tensor([[*request.prompt_ids, *drawn]])
    was = module.training
    with torch.no_grad():
        logits = module.eval()(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
    module.train(was)
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[len(request.prompt_ids) - 1 :, 0]


def farthest(
    module: nn.Module, requests: Sequence[GenerationRequest], actual: Sequence[Completion], temperature: float
) -> float:
    return max(
        float(
            (plain_log_probs(module, request, sequence.token_ids, temperature) - torch.tensor(sequence.log_probs))
            .abs()
            .max()
        )
        for request, sequence in zip(requests, actual, strict=True)
    )


def change(module: nn.Module, seed: int) -> None:
    """Another module's weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "deepseek_v3"])
def test_log_probs_are_those_of_one_forward_pass_before_and_after_updates(kind: str) -> None:
    module, requests = make_module(kind).train(), make_requests()
    engine = EmbeddedEngine(module)
    for version in range(3):
        engine.version = version
        result = complete_requests(engine, requests, WARM)
        assert farthest(module, requests, result, 0.7) < 1e-5
        assert {version for completion in result for version in completion.versions} == {version}
        assert all(len(sequence.token_ids) == len(sequence.log_probs) == len(sequence.versions) for sequence in result)
        assert module.training
        change(module, version)
        engine.flush()


class RenamedCache(Qwen3ForCausalLM):
    """Takes its cache by the name that transformers gives it since 5.24, whichever is installed."""

    def forward(self, input_ids, position_ids=None, cache=None, use_cache=None, logits_to_keep=0):
        argument = cache_argument(inspect.signature(Qwen3ForCausalLM.forward).parameters)
        arguments = {"use_cache": use_cache, "logits_to_keep": logits_to_keep, argument: cache}
        return super().forward(input_ids, position_ids=position_ids, **arguments)


def test_a_cache_has_the_name_that_the_module_gives_it() -> None:
    plain = make_module()
    module = RenamedCache(plain.config)
    module.load_state_dict(plain.state_dict())
    requests = make_requests()
    engine = EmbeddedEngine(module)
    completions = complete_requests(engine, requests, WARM)
    assert type(engine._rows).__name__ == "CachedRows"
    assert completions == complete_requests(EmbeddedEngine(plain), requests, WARM)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma2", "CachedRows"),  # windows, a cap on scores
        ("gpt_oss", "CachedRows"),  # windows, sinks
        ("lfm2", "GroupedRows"),  # convolutions
        ("bloom", "GroupedRows"),  # no positions
        ("camembert", "RecomputedRows"),  # positions that a cache would change
    ],
)
def test_other_architectures_are_drawn_with_in_the_way_that_is_right(name: str, kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager")
    requests = make_requests()
    engine = EmbeddedEngine(module, max_length=80)
    result = complete_requests(engine, requests, WARM)
    assert type(engine._rows).__name__ == kind
    assert farthest(module, requests, result, 0.7) < 1e-5
    few = EmbeddedEngine(module, max_length=80, max_batch_size=3)
    assert [sequence.token_ids for sequence in complete_requests(few, requests, WARM)] == [
        sequence.token_ids for sequence in result
    ]
    change(module, 1)
    engine.flush()
    assert farthest(module, requests, complete_requests(engine, requests, WARM), 0.7) < 1e-5


def test_a_model_that_looks_ahead_is_refused() -> None:
    class LooksAhead(type(make_module())):
        def forward(self, input_ids: Tensor, **more: Any) -> Any:
            result = super().forward(input_ids, **more)
            result.logits = result.logits + 0.001 * input_ids.shape[1] * torch.arange(259)
            return result

    module = make_module()
    module.__class__ = LooksAhead
    with pytest.raises(ConfigError, match="how many tokens follow"):
        complete_requests(EmbeddedEngine(module), make_requests(), WARM)

    chat = EmbeddedEngine(module, max_length=80, is_for_training=False)  # where nothing is learned it may
    (request,) = make_requests(1, 1)
    (answer,) = complete_requests(chat, [request], Sampling(temperature=0))
    assert type(chat._rows).__name__ == "RecomputedRows"
    tokens = list(request.prompt_ids)
    for token in answer.token_ids:
        with torch.no_grad():
            assert token == int(module(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)


def _block(tokens: Tensor) -> Tensor:
    """Attention in both directions within blocks of 12 tokens."""
    blocks = torch.arange(tokens.shape[1]) // 12
    return torch.stack([tokens[:, blocks == block].float().mean(1) for block in blocks], 1)


def _next_of_some(tokens: Tensor) -> Tensor:
    """What a layer sees that lets a part of the tokens see the next one."""
    following = torch.cat([tokens[:, 1:], 0 * tokens[:, :1]], 1)
    return torch.where(tokens % 2 == 0, following, 0).float()


def _last_at_first(tokens: Tensor) -> Tensor:
    """The first token sees the last one, however far it is."""
    seen = torch.zeros(tokens.shape)
    seen[:, 0] = tokens[:, -1]
    return seen


@pytest.mark.parametrize("longest", [24, 512])
@pytest.mark.parametrize("seen", [_block, _next_of_some, _last_at_first])
def test_a_model_that_looks_ahead_a_little_or_far_is_refused(seen: Callable[[Tensor], Tensor], longest: int) -> None:
    class LooksAhead(type(make_module())):
        def forward(self, input_ids: Tensor, logits_to_keep: Any = 0, **more: Any) -> Any:
            result = super().forward(input_ids, **more)
            result.logits = result.logits + 1e-4 * seen(input_ids)[..., None] * torch.arange(259)
            if isinstance(logits_to_keep, Tensor):
                result.logits = result.logits[:, logits_to_keep]
            return result

    module = make_module()
    module.__class__ = LooksAhead
    with pytest.raises(ConfigError, match="how many tokens follow"):
        choose_rows(Forward(module, nullcontext), longest, 1024)
    rows, why_not = choose_rows(Forward(module, nullcontext), longest, 1024, is_for_training=False)
    assert type(rows).__name__ == "RecomputedRows" and why_not is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_are_rounded_by_their_size(dtype: torch.dtype) -> None:
    module = make_module()
    with torch.no_grad():
        module.lm_head.weight.mul_(25)  # log-probabilities down to about -100
    engine = EmbeddedEngine(module.to(dtype))
    assert complete_requests(engine, make_requests(1, 1), WARM)[0].token_ids
    assert type(engine._rows).__name__ == "CachedRows"


def test_long_prompts_are_computed_in_parts_and_in_half_precision() -> None:
    module, requests = make_module(), make_requests()
    whole = complete_requests(EmbeddedEngine(module), requests, WARM)
    parts = complete_requests(EmbeddedEngine(module, max_prefill_tokens=32), requests, WARM)
    assert [part.token_ids for part in parts] == [sequence.token_ids for sequence in whole]
    for engine in (
        EmbeddedEngine(copy.deepcopy(module).bfloat16()),
        EmbeddedEngine(module, around=lambda: torch.autocast("cpu", torch.bfloat16)),
    ):
        result = complete_requests(engine, requests, WARM)
        assert type(engine._rows).__name__ == "CachedRows"
        assert 1e-3 < farthest(module, requests, result, 0.7) < 0.3


def test_float32_adapters_beside_a_model_in_bf16_are_drawn_with(tmp_path: Path) -> None:
    described = write_config(tiny_language_description(), tmp_path / "model.yaml")
    config = LanguageModelConfig(
        config_path=str(described), tokenizer_path="bytes", dtype="bf16", lora=LoraConfig(rank=2)
    )
    train = TextTrainConfig(output_dir="unused", mixed_precision="bf16")
    model = build_language_model(config, train)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
    assert {parameter.dtype for parameter in model.plain.parameters()} == {torch.float32, torch.bfloat16}
    _, why_not = choose_rows(Forward(model.plain, model.autocast), 24, 1024)
    assert why_not is None


def test_completions_end_at_stop_tokens_and_at_their_limit() -> None:
    requests = make_requests(max_new_tokens=40)
    result = complete_requests(EmbeddedEngine(make_module()), requests, WARM)
    assert {output.finish_reason for output in result} == {"stop", "length"}
    for output in result:
        stops = [index for index, token in enumerate(output.token_ids) if token in WARM.stop_token_ids]
        assert stops == ([len(output.token_ids) - 1] if output.finish_reason == "stop" else [])
        assert output.finish_reason == "stop" or len(output.token_ids) == 40


def test_completions_do_not_depend_on_the_batch() -> None:
    module, requests = make_module(), make_requests(groups=5, max_new_tokens=10)
    whole = complete_requests(EmbeddedEngine(module), requests, WARM)
    assert len({tuple(sequence.token_ids) for sequence in whole}) == len(whole)
    for size in (1, 7):
        other = complete_requests(EmbeddedEngine(module, max_batch_size=size), requests[::-1], WARM)[::-1]
        assert [sequence.token_ids for sequence in other] == [sequence.token_ids for sequence in whole]
    assert complete_requests(EmbeddedEngine(module), requests, WARM) == whole


def test_what_was_interrupted_goes_on_as_if_it_had_not_been() -> None:
    module, requests = make_module(), make_requests()
    engine = EmbeddedEngine(module)
    for request, whole in zip(requests, complete_requests(engine, requests, WARM), strict=True):
        cut = len(whole.token_ids) // 2
        begun = [*request.prompt_ids, *whole.token_ids[:cut]]
        rest = replace(request, prompt_ids=begun, first_position=cut, max_new_tokens=24 - cut)
        assert complete_requests(engine, [rest], WARM)[0].token_ids == whole.token_ids[cut:]
        if cut:
            other = replace(rest, first_position=0)
            assert (
                complete_requests(engine, [other], WARM)[0].token_ids != whole.token_ids[cut:]
                or len(whole.token_ids) < 6
            )


def test_an_update_in_the_middle_needs_a_flush() -> None:
    request = GenerationRequest(list(range(10, 40)), 3, 30)
    cold = Sampling(0.7)

    async def interrupted(flush: bool) -> tuple[nn.Module, Completion]:
        module = make_module()
        engine = EmbeddedEngine(module)
        waiting = asyncio.create_task(engine.generate(request, cold))
        for _ in range(12):
            await asyncio.sleep(0)
        engine.pause("keep")
        change(module, 1)
        engine.version = 1
        if flush:
            engine.flush()
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.resume()
        return module, await waiting

    module, actual = asyncio.run(interrupted(True))
    new = actual.versions.index(1)
    assert 5 < new < 20 and actual.versions == [0] * new + [1] * (30 - new)
    expected = plain_log_probs(module, request, actual.token_ids, 0.7)
    assert (expected - torch.tensor(actual.log_probs))[new:].abs().max() < 1e-5
    assert (expected - torch.tensor(actual.log_probs))[:new].abs().max() > 0.01
    module, stale = asyncio.run(interrupted(False))
    expected = plain_log_probs(module, request, stale.token_ids, 0.7)
    assert (expected - torch.tensor(stale.log_probs))[new + 1 :].abs().max() > 1e-3


def test_abort_hands_over_what_was_drawn() -> None:
    async def aborted() -> list[Completion]:
        engine = EmbeddedEngine(make_module(), max_batch_size=2)
        tasks = [asyncio.create_task(engine.generate(request, Sampling())) for request in make_requests(n=1)]
        for _ in range(6):
            await asyncio.sleep(0)
        engine.pause("abort")
        return [await task for task in tasks]

    result = asyncio.run(aborted())
    assert [output.finish_reason for output in result] == ["abort"] * 4
    whole = complete_requests(EmbeddedEngine(make_module()), make_requests(n=1), Sampling())
    for sequence, other in zip(result, whole, strict=True):
        assert sequence.token_ids == other.token_ids[: len(sequence.token_ids)]
    assert [bool(sequence.token_ids) for sequence in result] == [True, True, False, False]


def test_requests_join_and_others_run_in_between() -> None:
    module = make_module()
    first, late = make_requests(groups=2, n=1, max_new_tokens=20)

    async def together() -> list[Completion]:
        engine = EmbeddedEngine(module)
        order = []

        async def late_one() -> Completion:
            for _ in range(8):
                await asyncio.sleep(0)
            order.append("asked")
            return await engine.generate(replace(late, max_new_tokens=2), Sampling())

        async def first_one() -> Completion:
            result = await engine.generate(first, Sampling())
            order.append("first ended")
            return result

        result = await asyncio.gather(first_one(), late_one())
        assert order == ["asked", "first ended"]
        return result

    result = asyncio.run(together())
    alone = [
        complete_requests(EmbeddedEngine(module), [one], Sampling())[0]
        for one in (first, replace(late, max_new_tokens=2))
    ]
    assert [sequence.token_ids for sequence in result] == [sequence.token_ids for sequence in alone]


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    module, requests = make_module(), make_requests(n=2)

    async def cancelled() -> list[Completion]:
        engine = EmbeddedEngine(module, max_batch_size=4)
        tasks = [asyncio.create_task(engine.generate(request, Sampling())) for request in requests]
        for _ in range(6):
            await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[6].cancel()
        return [await task for index, task in enumerate(tasks) if index not in (1, 6)]

    whole = complete_requests(EmbeddedEngine(module), requests, Sampling())
    uncancelled = [sequence.token_ids for index, sequence in enumerate(whole) if index not in (1, 6)]
    assert [sequence.token_ids for sequence in asyncio.run(cancelled())] == uncancelled


def test_without_memory_requests_wait_or_are_computed_again() -> None:
    module, requests = make_module(), make_requests(max_new_tokens=60)
    engine = EmbeddedEngine(module)
    whole = complete_requests(engine, requests, WARM)
    per_token = engine._prepared().bytes_per_token
    assert per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, their width, bytes
    small = EmbeddedEngine(module, cache_bytes=per_token * 3 * 128)
    assert [sequence.token_ids for sequence in complete_requests(small, requests, WARM)] == [
        sequence.token_ids for sequence in whole
    ]
    request = GenerationRequest([5] * 40, 0, 60)
    with pytest.raises(ConfigError, match="sequence of 100 tokens take 32768 bytes, and cache_bytes is 24576"):
        complete_requests(EmbeddedEngine(module, cache_bytes=per_token * 96), [request], WARM)


def test_out_of_memory_halves_the_batch() -> None:
    calls = 0

    @contextmanager
    def device() -> Iterator[None]:
        nonlocal calls
        calls += 1
        if calls in (4, 14):
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    module, requests = make_module(), make_requests()
    whole = complete_requests(EmbeddedEngine(module), requests, WARM)
    engine = EmbeddedEngine(module, around=device)
    calls = -1000
    complete_requests(engine, requests[:1], WARM)  # the passes with which the engine chooses how it draws
    calls = 0
    assert [sequence.token_ids for sequence in complete_requests(engine, requests, WARM)] == [
        sequence.token_ids for sequence in whole
    ]
    assert engine._max_batch_size < 16


@pytest.mark.parametrize("part", ["resize", "move"])
def test_no_request_is_lost_where_rows_find_no_memory(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that join while the cache grows, nor those that end while other rows take their places."""
    module, requests = make_module(), make_requests()
    whole = complete_requests(EmbeddedEngine(module), requests, WARM)
    engine = EmbeddedEngine(module)
    complete_requests(engine, requests[:1], WARM)
    engine._capacity = (0, 0)
    rows_class = type(engine._prepared())
    grow_or_move, failures = getattr(rows_class, part), []

    def without_memory(self: Any, *arguments: Any) -> Any:
        # rows that share a prompt are copied to later ones, and those that take free places to earlier ones
        is_tried = part == "resize" or arguments[0][0] > arguments[1][0]
        if is_tried and len(failures) < 2:
            failures.append(arguments)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grow_or_move(self, *arguments)

    monkeypatch.setattr(rows_class, part, without_memory)

    async def draw_all() -> list[Any]:
        drawing = asyncio.gather(*(engine.generate(request, WARM) for request in requests))
        return await asyncio.wait_for(drawing, timeout=20)

    assert [sequence.token_ids for sequence in asyncio.run(draw_all())] == [sequence.token_ids for sequence in whole]
    assert len(failures) == 2 and engine._max_batch_size < 16


def test_what_cannot_be_drawn_is_refused() -> None:
    module = make_module()
    engine = EmbeddedEngine(module, max_length=50)
    for request, sampling, text in (
        (GenerationRequest([5] * 30, 0, 21), WARM, "30 tokens and max_new_tokens 21 .* 50 tokens"),
        (GenerationRequest([5, 400], 0, 2), WARM, "0 to 258"),
        (GenerationRequest([], 0, 2), WARM, "at least one token"),
        (GenerationRequest([5], 0, 2), Sampling(temperature=-1.0), "temperature"),
        (GenerationRequest([5], 0, 2), Sampling(top_p=0.0), "top_p"),
    ):
        with pytest.raises(ConfigError, match=text):
            complete_requests(engine, [request], sampling)
    with pytest.raises(ConfigError, match="300 is above the 256 positions"):
        EmbeddedEngine(module, max_length=300)
    with torch.no_grad():
        module.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        complete_requests(engine, [GenerationRequest([5], 0, 2)], WARM)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        complete_requests(engine, [GenerationRequest([5], 0, 2)], WARM)


def test_top_p_and_top_k_leave_tokens_out_and_scale_the_rest() -> None:
    module, requests = make_module(), make_requests()
    for sampling in (Sampling(0.9, top_p=0.6), Sampling(0.9, top_k=5), Sampling(0.9, top_p=0.7, top_k=8)):
        for request, sequence in zip(
            requests, complete_requests(EmbeddedEngine(module), requests, sampling), strict=True
        ):
            tokens = torch.tensor([[*request.prompt_ids, *sequence.token_ids]])
            with torch.no_grad():
                logits = module(input_ids=tokens).logits[0, len(request.prompt_ids) - 1 : -1].double() / 0.9
            probs = logits.softmax(-1)
            for row, token, log_prob in zip(probs, sequence.token_ids, sequence.log_probs, strict=True):
                ordered = sorted(((float(p), -index) for index, p in enumerate(row)), reverse=True)
                candidates = ordered[: sampling.top_k or None]
                total = sum(p for p, _ in candidates)
                nucleus, reached = [], 0.0
                for p, index in candidates:
                    if reached < sampling.top_p:
                        nucleus.append((p, -index))
                    reached += p / total
                mass = sum(p for p, _ in nucleus)
                assert log_prob == pytest.approx(np.log({index: p for p, index in nucleus}[token] / mass), abs=1e-5)


def test_rescoring_gives_all_tokens_but_the_first() -> None:
    module, requests = make_module(), make_requests(n=1)
    engine = EmbeddedEngine(module)
    sequences = [list(request.prompt_ids) for request in requests] + [list(range(100))]
    for tokens, tensor in zip(sequences, engine.rescore(sequences, 0.5), strict=True):
        expected = plain_log_probs(module, GenerationRequest(tokens[:1], 0, 1), tokens[1:], 0.5)
        assert tensor.shape == (len(tokens) - 1,) and (len(tokens) == 1 or (tensor - expected).abs().max() < 1e-5)


def test_memory_is_given_back() -> None:
    engine = EmbeddedEngine(make_module())
    before = complete_requests(engine, make_requests(), WARM)
    assert engine._rows._cache.layers
    engine.release()
    assert not engine._rows._cache.layers
    engine.restore()
    assert complete_requests(engine, make_requests(), WARM) == before


def test_dropout_is_off_while_tokens_are_drawn() -> None:
    module = make_module("llama")
    module.config.attention_dropout = 0.5
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    module.train()
    requests = make_requests()
    assert farthest(module, requests, complete_requests(EmbeddedEngine(module), requests, WARM), 0.7) < 1e-5
    assert all(submodule.training for submodule in module.modules())


def test_the_module_is_left_as_it_was() -> None:
    module = make_module()
    before = copy.deepcopy(module.state_dict()), module.config._attn_implementation
    complete_requests(EmbeddedEngine(module), make_requests(), WARM)
    assert module.config._attn_implementation == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    logits = module(input_ids=torch.tensor([[5, 6, 7]])).logits
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
