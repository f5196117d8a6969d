"""Rewards for the length of an answer."""

import numpy as np
import pytest

from sfumato.config.base import find_variants
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.length import Length, Overlong


def answers(*lengths):
    return [Sample(prompt="p", group_id=0, text="x", num_tokens=length) for length in lengths]


LENGTHS = (0, 80, 81, 90, 100, 110, 140)


@pytest.mark.parametrize(
    ("capped", "expected"),
    [(True, [0, 0, -0.05, -0.5, -1, -1, -1]), (False, [0, 0, -0.05, -0.5, -1, -1.5, -3])],
)
def test_overlong_answers_are_punished_in_the_buffer(capped, expected):
    actual = Overlong(max_length=100, buffer=20, capped=capped).score(answers(*LENGTHS))
    assert actual == pytest.approx(expected)


def test_lengths_near_a_target_or_up_to_it():
    assert Length(target=100).score(answers(0, 50, 100, 125, 200, 500)) == pytest.approx([0, 0.5, 1, 0.75, 0, 0])
    assert Length(target=100, form="at_most").score(answers(0, 100, 101)) == [1, 1, 0]


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Overlong, {"max_length": 0, "buffer": 1}),
        (Overlong, {"max_length": 10, "buffer": 0}),
        (Overlong, {"max_length": 10, "buffer": 11}),
        (Length, {"target": 0}),
    ],
)
def test_lengths_that_make_no_sense_are_refused(cls, fields):
    with pytest.raises(ConfigError, match="of reward"):
        cls(**fields)


@pytest.mark.parametrize("reward", [Overlong(max_length=10, buffer=2), Length(target=5)])
def test_images_have_no_tokens(reward):
    assert find_variants("sfumato.rewards")[reward.type] is type(reward)
    with pytest.raises(DataError, match="scores texts"):
        reward.score([Sample(prompt="a cat", group_id=0, image=np.zeros((2, 2, 3), np.uint8))])
