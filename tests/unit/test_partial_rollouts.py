"""Oversampling with abort, and partial rollouts: what ends first, what goes on, and by which weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.config.load import load_config, merge
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompt_template import PromptTemplate, build_prompt_template
from sfumato.data.text.prompts import TextPrompt, load_text_prompts
from sfumato.errors import CheckpointError, ConfigError, DataError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.kinds.base import LengthLimits, request_seed
from sfumato.rollout.oversampling.partial import OverSampling
from sfumato.rollout.oversampling.unfinished import UnfinishedGroups, UnfinishedRollouts
from sfumato.rollout.text import policy as text_policy
from sfumato.rollout.text.tokens import TextRollout
from sfumato.tracking.json_lines import read_jsonl
from tests.plain_engine import tiny_model
from tests.tiny import load_task, run_task_here, tiny_text_rl_config, weights_in

STOP = tuple(range(60))
"""Of 259 tokens, so that answers of a model with random weights end at many lengths."""
SAMPLING, LIMITS = Sampling(stop_token_ids=STOP), LengthLimits(16, 100)
PARTIAL = {"over_sampling_batch_size": 7, "partial_rollout": True, "max_new_tokens": 16, "max_staleness": 2}
P, M, N = 4, 7, 4


class Bench:
    """A model in an engine with its groups, iteration after iteration with other weights."""

    def __init__(self, tmp_path: Path, max_batch_size: int = 256, **rollout: Any) -> None:
        few = {"synthetic": {"problem": "add", "max_length": 2, "num_rows": 40}}
        settings = tiny_text_rl_config(tmp_path, data=few, rollout={**PARTIAL, **rollout})
        self.config = load_config(TextRLConfig, overrides=settings)
        self.template: PromptTemplate = build_prompt_template(self.config.data, build_byte_tokenizer())
        self.prompts: list[TextPrompt] = load_text_prompts(self.config.data, self.template, "train")
        self.module: nn.Module = tiny_model()
        self.engine = EmbeddedEngine(self.module, max_length=100, max_batch_size=max_batch_size)
        self.groups = OverSampling(self.config, self.prompts, Mesh(Layout(), torch.device("cpu")))
        self.rollouts = UnfinishedRollouts()

    def draw(self, version: int) -> TextRollout:
        """An iteration, by weights that follow from the version."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        self.engine.flush()
        self.engine.version = version
        unfinished = dataclasses.replace(self.rollouts.groups, iteration=version)
        before = state_tokens(unfinished)
        drawing = (SAMPLING, LIMITS, self.template, version, unfinished, range(P))
        rollout, samples, self.rollouts.groups = self.groups.draw(self.engine, *drawing)
        assert state_tokens(unfinished) == before  # it may be drawn from again
        assert [sample.num_tokens for sample in samples] == rollout.num_rows
        assert rollout.sample_ids == list(range(P * N))
        return rollout

    @property
    def unfinished(self) -> UnfinishedGroups:
        """What goes on in the next iteration."""
        return self.rollouts.groups


def values(rollout: TextRollout) -> list[tuple[Any, ...]]:
    """What was drawn: prompt, tokens, versions, why each ended."""
    return [
        (request.prompt_id, output.token_ids.tolist(), output.versions.tolist(), output.finish_reason)
        for request, (output,) in zip(rollout.requests, rollout.sequences, strict=True)
    ]


def state_tokens(unfinished: UnfinishedGroups) -> list[Any]:
    return [
        (group.number, [(list(answer.token_ids), list(answer.versions)) for answer in group.answers])
        for group in unfinished.groups
    ]


def test_groups_end_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    """Against every answer drawn to its end by itself: which groups are taken, and where the others are cut."""
    bench = Bench(tmp_path)
    requests = []
    for number in range(M):
        prompt_id = bench.groups._loader.groups(number // P)[number % P]
        for member in range(N):
            seed = request_seed(bench.config.train.seed, "rollout", number // P, number % P * N + member)
            requests.append((prompt_id, GenerationRequest(bench.prompts[prompt_id].token_ids, seed, 16)))
    first = bench.draw(1)
    alone = complete_requests(bench.engine, [request for _, request in requests], SAMPLING)  # by the same weights
    lengths = np.array([len(sequence.token_ids) for sequence in alone]).reshape(M, N)
    ends = lengths.max(axis=1)
    order = sorted(range(M), key=lambda number: (ends[number], number))
    chosen, last = sorted(order[:P]), ends[order[P - 1]]
    assert len(set(ends.tolist())) > 2 and any(ends > last), ends
    expected = [place for number in chosen for place in range(number * N, number * N + N)]
    assert [request.prompt_id for request in first.requests] == [requests[place][0] for place in expected]
    for place, (sequence,) in zip(expected, first.sequences, strict=True):
        assert sequence.token_ids[sequence.drawn].tolist() == alone[place].token_ids
        np.testing.assert_allclose(sequence.log_probs[sequence.drawn], alone[place].log_probs, atol=1e-5)
    for group in bench.unfinished.groups:
        assert group.number not in chosen
        for member, answer in enumerate(group.answers):
            whole = alone[group.number * N + member].token_ids
            assert answer.token_ids == whole[:last]
            assert (answer.finish_reason is None) == (len(whole) > last)
    assert bench.unfinished.metrics["rollout/kept_groups"] == M - P


def test_what_was_kept_goes_on_under_the_new_weights(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.draw(1)
    groups_before = copy.deepcopy(bench.unfinished.groups)
    second = bench.draw(2)
    by_prompt = {group.prompt_id: group for group in groups_before}
    gone_on = 0
    for request, (sequence,) in zip(second.requests, second.sequences, strict=True):
        if request.prompt_id not in by_prompt:
            assert set(sequence.versions[sequence.drawn]) == {2}
            continue
        answer = by_prompt[request.prompt_id].answers[request.sample_id % N]
        count, drawn, log_probs = (
            len(answer.token_ids),
            sequence.token_ids[sequence.drawn],
            sequence.log_probs[sequence.drawn],
        )
        assert drawn[:count].tolist() == answer.token_ids and (log_probs[:count] == np.float32(answer.log_probs)).all()
        assert sequence.versions[sequence.drawn].tolist() == [1] * count + [2] * (len(drawn) - count)
        if len(drawn) > count:
            gone_on += 1
            tokens = torch.from_numpy(sequence.token_ids).long()
            with torch.no_grad():
                logits = bench.module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            said = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][sequence.drawn[1:]]
            np.testing.assert_allclose(log_probs[count:], said[count:], atol=1e-5)
            assert not np.allclose(log_probs[:count], said[:count], atol=1e-3)  # they were other weights
    assert gone_on >= 2 and bench.unfinished.metrics["staleness/max"] == 1
    ages = np.concatenate([2 - sequence.versions[sequence.drawn] for (sequence,) in second.sequences])
    assert bench.unfinished.metrics["staleness/mean"] == ages.mean()


def test_what_ends_first_depends_on_no_batch(tmp_path: Path) -> None:
    """Answers that wait for a row catch up, and those that ran ahead are cut back."""
    together, in_turns = Bench(tmp_path), Bench(tmp_path, max_batch_size=5)
    for version in (1, 2, 3, 4):
        assert values(together.draw(version)) == values(in_turns.draw(version))
        assert state_tokens(together.unfinished) == state_tokens(in_turns.unfinished)


def test_a_state_that_was_saved_goes_on_alike(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for version in (1, 2):
        bench.draw(version)
    state, module = json.loads(json.dumps(bench.rollouts.state())), copy.deepcopy(bench.module.state_dict())
    expected = [bench.draw(version) for version in (3, 4)]
    bench.module.load_state_dict(module)
    bench.rollouts = UnfinishedRollouts()
    bench.rollouts.restore(state)
    for version, whole in zip((3, 4), expected, strict=True):
        again = bench.draw(version)
        assert values(again) == values(whole)
        for (one,), (other,) in zip(again.sequences, whole.sequences, strict=True):
            np.testing.assert_array_equal(one.log_probs, other.log_probs)


def test_an_iteration_that_was_lost_is_drawn_again(tmp_path: Path) -> None:
    """As when its sampler was killed: from the same unfinished, which has been on its way to another process."""
    bench = Bench(tmp_path)
    bench.draw(1)
    module, unfinished = copy.deepcopy(bench.module.state_dict()), pickle.dumps(bench.unfinished)
    whole, after = bench.draw(2), state_tokens(bench.unfinished)
    bench.module.load_state_dict(module)
    bench.rollouts.groups = pickle.loads(unfinished)
    assert values(bench.draw(2)) == values(whole) and state_tokens(bench.unfinished) == after


def test_an_engine_that_fails_leaves_what_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, untouched = Bench(tmp_path), Bench(tmp_path)
    bench.draw(1)
    untouched.draw(1)
    before = state_tokens(bench.unfinished)
    module, step = copy.deepcopy(bench.module.state_dict()), bench.engine._step
    steps = iter(range(4))
    monkeypatch.setattr(bench.engine, "_step", lambda: step() if next(steps, None) is not None else 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        bench.draw(2)
    monkeypatch.undo()
    assert state_tokens(bench.unfinished) == before
    bench.module.load_state_dict(module)
    assert values(bench.draw(2)) == values(untouched.draw(2))


def test_groups_that_became_too_old_are_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_staleness=1)
    dropped, oldest = 0.0, []
    for version in range(1, 9):
        rollout = bench.draw(version)
        oldest.append(version - min(rollout.versions))
        dropped += bench.unfinished.metrics["rollout/too_old_groups"]
        assert all(version - drawn_version <= 1 for drawn_version in rollout.versions)
    assert dropped > 0 and max(oldest) == 1
    longer = Bench(tmp_path, max_staleness=100)
    for version in range(1, 9):
        longer.draw(version)
        assert longer.unfinished.metrics["rollout/too_old_groups"] == 0


def test_every_prompt_is_begun_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_staleness=100)
    learned = [
        request.prompt_id for version in range(6) for request in bench.draw(version).requests if request.is_first
    ]
    learned += [group.prompt_id for group in bench.unfinished.groups]
    begun = [group for iteration in range(8) for group in bench.groups._loader.groups(iteration)][: 6 * P + M - P]
    assert sorted(learned) == sorted(begun)


def test_without_partial_rollout_the_rest_is_thrown_away(tmp_path: Path) -> None:
    settings = {"partial_rollout": False, "max_staleness": None}
    bench = Bench(tmp_path, **settings)
    for version in (1, 2):
        assert set(bench.draw(version).versions) == {version}
        metrics = bench.unfinished.metrics
        assert metrics["rollout/aborted_groups"] == M - P and metrics["rollout/aborted_tokens"] > 0
        assert metrics["staleness/max"] == 0 and bench.unfinished.groups == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "over_sampling_batch_size"),
        ({"under_way": {"iteration": 3, "begun": 1, "groups": [{"number": 1}]}}, "do not hold together"),
        ({"under_way": {"iteration": 3, "begun": 1, "groups": None}}, "do not hold together"),
    ],
)
def test_a_state_of_something_else_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        UnfinishedRollouts().restore(state)


def run(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, task: Any = "rl_text") -> Path:
    monkeypatch.setattr(text_policy, "stop_tokens", lambda template: (*STOP, template.tokenizer.eos_token_id))
    return run_task_here(task, config)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tiny_text_rl_config(tmp_path / "whole", rollout=PARTIAL), monkeypatch)
    lines = [line for line in read_jsonl(whole / "metrics.jsonl") if line["step"]]
    assert max(line["staleness/max"] for line in lines) > 0 == lines[0]["staleness/max"]
    assert [line["rollout/kept_groups"] for line in lines] == [M - P] * len(lines)
    assert lines[1]["mismatch/log_ratio_max"] > 1e-3 > lines[0]["mismatch/log_ratio_max"]  # other weights drew a part

    config, task = (
        tiny_text_rl_config(tmp_path / "more", rollout=PARTIAL, train={"save_steps": 1}),
        load_task("rl_text"),
    )
    update = task.update_policy

    def interrupted(actor: Any, part: Any, advantages: Any, config: Any, step: int) -> dict[str, float]:
        if step == 2:
            raise KeyboardInterrupt
        return update(actor, part, advantages, config, step)

    monkeypatch.setattr(task, "update_policy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, monkeypatch, task)
    going_on = merge(config, {"train": {"load_checkpoint_path": "auto"}})
    with pytest.raises(CheckpointError, match="over_sampling_batch_size was 7, is 8"):
        run(merge(going_on, {"rollout": {"over_sampling_batch_size": 8}}), monkeypatch)
    resumed = run(going_on, monkeypatch)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert weights_in(resumed / "hf_ckpt") == weights_in(whole / "hf_ckpt")


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"rollout": {"over_sampling_batch_size": None}}, "set that above num_prompts 4"),
    ({"rollout": {"over_sampling_batch_size": 4}}, "above num_prompts 4"),
    ({"rollout": {"max_staleness": 0}}, "drops every partial rollout"),
    (
        {"rollout": {"max_staleness": 1, "hybrid_engine": False, "async_strategy": "one-step-off"}},
        "at least 2 updates old",
    ),
    ({"rollout": {"kind": "tools"}}, "for kind single_turn"),
    ({"rollout": {"max_extra_groups": 2}}, "for max_extra_groups 0"),
    ({"rollout": {"micro_batch_size": 8}}, "micro_batch_size 8"),
    ({"rollout": {"partial_rollout": False}}, "max_staleness"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = merge(tiny_text_rl_config(tmp_path, rollout=PARTIAL), settings)
    with pytest.raises(ConfigError, match=message):
        load_config(TextRLConfig, overrides=config)


@pytest.mark.parametrize(
    ("rollout", "bounds"),
    [
        ({}, (4, 0)),
        ({"hybrid_engine": False, "async_strategy": "one-step-off"}, (4, 1)),
        ({"hybrid_engine": False, "async_strategy": "one-step-off", "max_staleness": 3}, (3, 1)),
        ({"hybrid_engine": False, "async_strategy": "fully-async", "max_staleness": 2}, (2, 1)),
        ({"hybrid_engine": False, "async_strategy": "fully-async"}, (4, 2)),
    ],
)
def test_bounds_of_staleness(rollout: dict[str, Any], bounds: tuple[int, int], tmp_path: Path) -> None:
    """Of tokens, and of the sampler's weights."""
    config = tiny_text_rl_config(tmp_path, rollout={**PARTIAL, "max_staleness": None, **rollout})
    result = load_config(TextRLConfig, overrides=config).rollout
    assert (result.max_age, result.staleness) == bounds
