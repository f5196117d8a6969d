"""Groups without spread are drawn anew: the same whatever finishes first and however ranks share the work."""

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfumato.algorithms.advantages import GroupAdvantage
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPromptLoader, load_text_prompts
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import SampleRequest, requests_of
from sfumato.rollout.oversampling.dynamic_sampling import (
    DynamicSampling,
    dynamic_sampling,
    rewards_differ,
    sampling_metrics,
)
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import optimizer_batches
from tests.unit.test_stream import Log, apart, make, queued

CONFIG = TextPromptDataConfig(synthetic={"num_rows": 40, "max_length": 3})
PROMPTS = load_text_prompts(CONFIG, build_prompt_template(CONFIG, build_byte_tokenizer()), "train")
N, P = 3, 4


def loader(num_prompts: int = P) -> TextPromptLoader:
    return TextPromptLoader(PROMPTS, num_prompts, N, seed=7)


def rewards_of(requests) -> np.ndarray:
    """By prompt: a third of the prompts have no spread, and of one all samples failed."""
    prompt = requests[0].prompt_id
    if prompt == 5:
        return np.full(len(requests), np.nan)
    return np.array([float(request.sample_id % N == 0 and prompt % 3 > 0) for request in requests])


def scores_of(requests) -> Scores:
    values = rewards_of(requests)
    return Scores(total=values, level=values, components={"a": values})


def generate(log: Log, requests, iteration: int, version: int):
    return list(requests), list(requests)


def score(log: Log, requests) -> Scores:
    by_group: dict = {}
    for request in requests:
        by_group.setdefault(request.group_id, []).append(request)
    return Scores.cat([scores_of(group) for group in by_group.values()])


def drawn(stream: RolloutStream, text_prompt_loader: TextPromptLoader, more: DynamicSampling) -> list:
    """Sample, group and prompt of all samples of each iteration."""
    stream.requests, stream.more_groups = partial(requests_of, text_prompt_loader), more
    stream.generate, stream.score = generate, score
    results = []
    for step, batch in stream.steps():
        made = {
            id_of(request): request
            for part in batch.rank_batches
            for handle in part.rollouts
            for request in handle.fetch()
        }
        places = {place: sample_id for part in batch.rank_batches for sample_id, place in part.sample_ids.items()}
        assert [places[place] for place in range(len(batch.group_ids))] == sorted(made)
        requests = [made[sample_id] for sample_id in sorted(made)]
        levels = np.concatenate([rewards_of([request]) for request in requests])
        np.testing.assert_array_equal(batch.scores.level, levels)
        results.append([(request.sample_id, request.group_id, request.prompt_id) for request in requests])
        stream.publish(version=step + 1)
    return results


def id_of(request) -> int:
    return request.sample_id


def expected(text_prompt_loader: TextPromptLoader, iteration: int, limit: int) -> list:
    """By the rule, place by place, without a stream."""
    replacements, results = text_prompt_loader.replacements(iteration, limit), []
    for place, prompt in enumerate(text_prompt_loader.groups(iteration)):
        group = place
        while True:
            results += [(group * N + member, group, prompt) for member in range(N)]
            if prompt % 3 and prompt != 5:
                break
            group += P
            if group - P >= len(replacements):
                break
            prompt = replacements[group - P]
    return sorted(results)


@pytest.mark.parametrize("limit", [1, 4, 6, 12, 100])
def test_each_place_is_refilled_until_it_differ(limit):
    prompt_loader = loader()
    more = DynamicSampling(prompt_loader, limit)
    one = make(Log(), more_groups=more)
    actual = drawn(one, prompt_loader, more)
    assert actual == [expected(prompt_loader, iteration, limit) for iteration in range(len(actual))]
    for iteration, samples in enumerate(actual):
        prompts = {group: prompt for _, group, prompt in samples}
        assert len(samples) == N * len(prompts) <= N * (P + limit) and len(set(prompts.values())) == len(prompts)
        if limit == 100:  # none is left that differ nothing
            last = {group % P: prompt for group, prompt in sorted(prompts.items())}
            assert len(last) == P and all(prompt % 3 and prompt != 5 for prompt in last.values()), iteration
    extra = [sampling_metrics([group for _, group, _ in samples], P)["rollout/extra_groups"] for samples in actual]
    assert max(extra) >= 1 and max(extra) <= limit


def test_two_ranks_of_one_driver_and_a_queue_draw_the_same():
    prompt_loader = loader()
    more = DynamicSampling(prompt_loader, 12)
    expected_ = [expected(prompt_loader, iteration, 12) for iteration in range(3)]
    assert drawn(apart(max_staleness=1, more_groups=more)[0], prompt_loader, more) == expected_
    assert drawn(queued(max_staleness=1, more_groups=more)[0], prompt_loader, more) == expected_


def test_ranks_that_decide_by_themselves_draw_the_same():
    """As under torchrun: each rank is shown its own groups, and asks for its own."""
    prompt_loader, size, meeting = loader(), 2, threading.Barrier(2, timeout=60)
    boxes: list = [None] * size
    actual: dict = {}

    def rank_of(rank: int) -> None:
        more = DynamicSampling(loader(), 12)
        stream = make(Log(), more_groups=more)
        stream.roles.actor.data_ranks, stream.roles.actor.num_data_ranks = [rank], size

        def together(value):
            boxes[rank] = value
            meeting.wait()
            everyone = list(boxes)
            meeting.wait()
            return everyone

        stream.roles = dataclasses.replace(stream.roles, together=together)
        stream.requests, stream.generate, stream.score = partial(requests_of, loader()), generate, score
        actual[rank] = []
        for step, batch in stream.steps():
            ids = batch.rank_batches[0].sample_ids
            made = {id_of(request): request for handle in batch.rank_batches[0].rollouts for request in handle.fetch()}
            assert set(made) == set(ids)
            levels = [rewards_of([made[sample_id]])[0] for sample_id in ids]
            np.testing.assert_array_equal(batch.scores.level[list(ids.values())], levels)
            actual[rank].append([(value.sample_id, value.group_id, value.prompt_id) for value in made.values()])
            stream.publish(version=step + 1)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    together = [sorted(first + second) for first, second in zip(actual[0], actual[1], strict=True)]
    assert together == [expected(prompt_loader, iteration, 12) for iteration in range(3)]
    assert all(actual[rank] for rank in range(size))


def test_optimiser_steps_hold_the_groups_that_teach_in_the_places_of_those_that_do_not():
    prompt_loader = loader()
    samples = next(
        drawn for drawn in (expected(prompt_loader, number, 100) for number in range(9)) if len(drawn) > N * P
    )
    requests = [SampleRequest(*sample) for sample in samples]
    rewards = np.concatenate([rewards_of([request]) for request in requests])
    advantages = GroupAdvantage().compute(
        torch.tensor(rewards), torch.tensor([request.group_id for request in requests])
    )
    config = SimpleNamespace(
        rollout=SimpleNamespace(num_prompts=P, n=N),
        algorithm=SimpleNamespace(whole_groups=False),
        train=SimpleNamespace(global_batch_size=6, seed=0),
    )
    useful = advantages.useful(keep_no_spread=False)
    steps = list(optimizer_batches(requests, useful, config, 0))
    assert [sum(len(unit) for unit in units) for units in steps] == [6, 6], "full steps, as without replacements"
    rows = [int(row) for units in steps for unit in units for row in unit]
    assert sorted(rows) == useful.nonzero().flatten().tolist()
    assert {requests[row].group_id for row in rows} != set(range(P)), "some were replaced"


def test_spread():
    assert rewards_differ(np.array([0.0, 1.0])) and rewards_differ(np.array([np.nan, 0.0, 1.0]))
    for values in ([0.5, 0.5], [0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0], [np.nan, 1.0], [np.nan, np.nan], [1.0]):
        assert not rewards_differ(np.array(values))


def settings(backend="in_process", ranks=1):
    return SimpleNamespace(
        runtime=SimpleNamespace(backend=backend),
        train=SimpleNamespace(ranks_per_sample=ranks),
    )


def test_what_does_not_go_together_is_refused():
    prompt_loader = loader()
    assert dynamic_sampling(settings(ranks=2), prompt_loader, 0) is None
    assert dynamic_sampling(settings("ray", ranks=2), prompt_loader, 3) == DynamicSampling(prompt_loader, 3)
    with pytest.raises(ConfigError, match="the 2 ranks that share a sample would each decide"):
        dynamic_sampling(settings(ranks=2), prompt_loader, 3)
