"""A reward that writes into what it is given spoils nothing of what others see."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from sfumato.data.images.prompts import Prompt
from sfumato.data.prompt_loader import check_prompts
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.pixels import Brightness
from sfumato.rewards.scoring.combinations import FunctionCombination
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.workers import close_workers
from sfumato.rewards.server.batching import score_requests
from sfumato.tracking.json_lines import read_jsonl
from tests.odd_rewards import Spoiler
from tests.tiny import run_task_here, tiny_rl_config


@pytest.fixture(scope="module", autouse=True)
def _end_workers():
    yield
    close_workers()


def some_samples(video: bool = False) -> list[Sample]:
    """Two groups; samples of a group have one source image and one row of the data."""
    rng, shape = np.random.default_rng(0), (5, 8, 8, 3) if video else (8, 8, 3)
    sources = [rng.integers(0, 256, (8, 8, 3), np.uint8) for _ in range(2)]
    rows = [{"target": f"t{group}", "list": [1, {"deep": group}]} for group in range(2)]
    return [
        Sample(
            image=rng.integers(0, 256, shape, np.uint8),
            prompt=f"p{group}",
            source=sources[group],
            metadata=rows[group],
            group_id=group,
        )
        for group in (0, 0, 1, 1)
    ]


def assert_untouched(samples: list[Sample], before: list[Sample]) -> None:
    for now, then in zip(samples, before, strict=True):
        assert np.array_equal(now.image, then.image) and np.array_equal(now.source, then.source)
        assert (now.prompt, now.metadata) == (then.prompt, then.metadata)


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("video", [False, True], ids=["images", "videos"])
def test_what_a_reward_writes_reaches_nobody(video: bool, process: bool) -> None:
    samples, first, last = some_samples(video), Brightness(name="first"), Brightness(name="last")
    before = copy.deepcopy(samples)
    rewards: list[Reward] = [first, Spoiler(process=process, weight=2.0), last]
    scores = Scorer(rewards).score(samples)
    assert scores.failures == []
    assert scores.components["Spoiler"].tolist() == [1.0] * 4
    assert scores.components["first"].tolist() == scores.components["last"].tolist()
    assert scores.components["last"].min() > 0.2
    assert_untouched(samples, before)


def test_requests_to_a_server_and_rows_of_the_data_stay_as_they_are() -> None:
    samples = some_samples()
    before = copy.deepcopy(samples)
    assert score_requests(Spoiler(), [samples[:2], samples[2:]], 8) == [([1.0, 1.0], ["", ""])] * 2
    assert_untouched(samples, before)
    prompt = Prompt(text="p", metadata={"target": "t"}, where="row 1")
    check_prompts([prompt], [Spoiler().check_row])
    assert prompt.metadata == {"target": "t"}


def test_a_combination_changes_neither_values_nor_rows() -> None:
    samples = some_samples()
    before = copy.deepcopy(samples)
    scorer = Scorer([Brightness()], combination=FunctionCombination(path="tests.odd_rewards:spoil"))
    scores = scorer.finish(scorer.score(samples), [0, 0, 1, 1])
    assert scores.components["brightness"].max() < 1 and scores.total.tolist() == [1.0] * 4
    assert_untouched(samples, before)


@pytest.mark.slow
def test_pictures_of_a_run_are_those_that_were_sampled(tmp_path) -> None:
    """The first reward of the list blackens its pictures; diversity and the next reward see them as they were."""
    quiet = {"max_steps": 1}
    plain = run_task_here("rl_diffusion", tiny_rl_config(tmp_path / "plain", train=quiet))
    spoiler = {"type": "tests.odd_rewards:Blackener", "weight": 1e-9}
    rewards = {"rewards": [spoiler, {"type": "brightness"}]}
    spoiled = run_task_here("rl_diffusion", tiny_rl_config(tmp_path / "spoiled", train=quiet, reward=rewards))
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (spoiled, plain))
    for name in ("reward/brightness", "eval/reward/brightness", "diversity/pixels"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs], name
    pictures = sorted(path.relative_to(plain) for path in plain.rglob("samples/*/*.png"))
    assert len(pictures) > 8
    assert all((plain / picture).read_bytes() == (spoiled / picture).read_bytes() for picture in pictures)
