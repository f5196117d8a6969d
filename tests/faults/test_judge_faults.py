"""A matrix of what judges do wrong, against a real server process: no value is invented, everything is counted."""

from __future__ import annotations

import math
import signal
import time
import urllib.request

import numpy as np
import pytest

from sfumato.errors import ConfigError, RewardError
from sfumato.rewards.base import Sample
from sfumato.rewards.judges import PairwisePreference, RubricReward, UnifiedReward, YesProbability
from sfumato.rewards.scoring.one_reward import score_with
from sfumato.rewards.scoring.scorer import Scorer
from tests.reward_servers import start_judge_server

FINAL = "no 'Final Score:' with a number from 1 to 5"


@pytest.fixture(scope="module")
def server():
    started = start_judge_server()
    yield started
    started.end(signal.SIGTERM)


def judge(cls, model, server, **fields):
    patience = {"timeout_s": 20.0, "request_timeout_s": 10.0, "retry_for_s": 0.3, "allow_private": True}
    return cls(base_urls=(server.url,), model=model, **{**patience, **fields})


def greys(*levels):
    return [Sample(image=np.full((4, 4, 3), level, np.uint8), prompt="a sky", group_id=0) for level in levels]


def requests_to(server, name):
    with urllib.request.urlopen(server.url.removesuffix("/v1") + f"/count/{name}", timeout=10) as answer:
        return int(answer.read())


# model, reward, what the failure says, requests that one sample cost, share of parse failures
MATRIX = [
    ("garbage", UnifiedReward, "the answer is no chat completion (body: Invalid JSON", 3, math.nan),
    ("empty", UnifiedReward, "the answer is no chat completion (choices: Field required): '{}'", 3, math.nan),
    ("choiceless", UnifiedReward, "the answer is no chat completion (choices: List should have", 3, math.nan),
    ("error_with_200", UnifiedReward, "upstream is down", 3, math.nan),
    ("infinite", YesProbability, "(choices.0.logprobs.content.0.top_logprobs.0.logprob: Input should be", 3, math.nan),
    ("deep", UnifiedReward, "(body: Invalid JSON: nested more than 100 times", 3, math.nan),
    ("missing", UnifiedReward, "model 'missing': URL: HTTP status 404", 1, math.nan),
    ("overfull", UnifiedReward, "HTTP status 400: {\"error\": {\"message\": \"This model's", 1, math.nan),
    ("declining", UnifiedReward, "unreadable reply (the judge refused), such as 'I cannot judge people.'", 1, 1.0),
    ("filtered", UnifiedReward, "unreadable reply (the judge refused), such as 'Final Score: 5'", 1, 1.0),
    ("cut", UnifiedReward, "unreadable reply (the reply was cut off at max_tokens), such as 'Final", 1, 1.0),
    ("unsure", UnifiedReward, f"unreadable reply ({FINAL}), such as 'I would rather not say", 1, 1.0),
    ("unsure", PairwisePreference, "unreadable reply (no 'Answer:' with 1, 2 or tie), such as 'I would", 2, 1.0),
    ("unlogged", YesProbability, "unreadable reply (no top_logprobs), such as 'Yes'", 1, 1.0),
    ("other_words", YesProbability, "neither Yes nor No among the 1 likeliest first tokens), such as 'Maybe'", 1, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "cls", "reason", "num_requests", "share"), MATRIX)
def test_what_is_no_judgement_is_no_value(server, fault, cls, reason, num_requests, share):
    reward = judge(cls, fault, server)
    samples = greys(1, 2)
    before = requests_to(server, fault)
    scores = Scorer([reward]).score(samples)
    assert np.isnan(scores.total).all()
    assert all(reason.replace("URL", server.url) in failure for failure in scores.failures), scores.failures
    assert len(scores.failures) == 1 and scores.failures[0].endswith("(2 of 2 samples)")
    expected = num_requests * len(samples) if cls is not PairwisePreference else 2
    assert requests_to(server, fault) - before == expected
    assert scores.metrics("")[f"judge/{reward.label}/parse_failures"] == pytest.approx(share, nan_ok=True)
    with pytest.raises(RewardError, match="2 of 2 samples have no reward"):
        Scorer([reward]).check_budget(scores)


@pytest.mark.parametrize("fault", ["busy", "reset", "error_with_200"])
def test_a_judge_that_recovers_gives_what_an_undisturbed_one_gives(server, fault):
    undisturbed = judge(UnifiedReward, "rate", server).score(greys(0, 100, 255))
    reward = judge(UnifiedReward, f"{fault}-2", server, retry_for_s=10.0)
    assert reward.score(greys(0, 100, 255)) == undisturbed
    assert len(reward.take_notes()) == 1  # the attempts that failed


def test_values_that_arrived_are_kept_beside_failures(server):
    values, reasons = score_with(judge(UnifiedReward, "sometimes", server), greys(255, 0, 200))
    assert np.isnan(values).tolist() == [False, True, False] and [bool(reason) for reason in reasons] == [
        False,
        True,
        False,
    ]


def test_a_sample_that_the_judge_refuses_costs_no_other_its_win_rate(server):
    reward = judge(PairwisePreference, "queasy", server)
    values, reasons = score_with(reward, greys(10, 255, 30, 20))
    np.testing.assert_array_equal(values, [0.0, math.nan, 1.0, 0.5])
    assert "the judge refused" in reasons[1] and not any(reasons[:1] + reasons[2:])
    assert [note for note in reward.take_notes() if "pair" in note] == [
        "a pair without verdict: unreadable reply (the judge refused), such as 'I cannot look at this.' (3)"
    ]
    assert reward.take_counts() == {"judge/pairwise_preference/parse_failures": (6, 12)} and not reward.take_notes()


@pytest.mark.parametrize(
    ("model", "cls", "message"),
    [
        ("missing", RubricReward, "model 'missing': URL: HTTP status 404: {\"error\": {\"message\": \"The"),
        ("unlogged", YesProbability, "the server of model 'unlogged' gives no top_logprobs"),
    ],
)  # fmt: skip
def test_a_run_does_not_start_with_a_judge_that_cannot_answer(server, model, cls, message):
    fields = {"rubric": "X"} if cls is RubricReward else {}
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        judge(cls, model, server, retry_for_s=15.0, **fields).prepare()
    assert message.replace("URL", server.url) in str(caught.value) and time.monotonic() - started < 5


def test_a_run_does_not_start_without_a_server_or_its_private_address(server):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1, which is refused: set allow_private: true"):
        judge(UnifiedReward, "rate", server, allow_private=False).prepare()
    gone = UnifiedReward(base_urls=("http://127.0.0.1:9/v1",), model="rate", allow_private=True, retry_for_s=0.2)
    with pytest.raises(ConfigError, match=r"reward 'unified_reward' cannot ask its judge: model 'rate': .*refused"):
        gone.prepare()
