"""Rewards of the pixels: hand-made images, and prompts with and without the word that is looked for."""

import numpy as np
import pytest

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.pixels import Colour, Placement, Sharpness, Symmetry

RED, WHITE = (255, 0, 0), (255, 255, 255)


def plain(colour, height=6, width=6):
    return np.full((height, width, 3), colour, np.uint8)


def scores(reward, *images, prompt=""):
    return reward.score([Sample(image=image, prompt=prompt, group_id=0) for image in images])


def test_sharpness_is_the_mean_step_between_neighbours():
    board = plain((0, 0, 0))
    board[::2, ::2] = board[1::2, 1::2] = 255
    edge = plain((0, 0, 0), width=2)
    edge[:, 1] = 51  # 6 steps of 0.2 to the right, 10 of nothing downwards
    values = scores(Sharpness(), plain(RED), board, edge, plain(RED, 1, 1))
    assert values == pytest.approx([0.0, 1.0, 6 * 0.2 / 16, 0.0])


def test_symmetry_compares_with_the_mirror_image():
    half = plain((0, 0, 0))
    half[:, :3] = 255
    band = plain((0, 0, 0))
    band[:2] = 255
    slight = plain((100, 100, 100))
    slight[:, 0] = 151  # 51 of 255 in two of six columns
    assert scores(Symmetry(), half, band, slight) == pytest.approx([0.0, 1.0, 1 - 0.2 / 3])


def test_colour_is_the_mean_nearness_of_the_pixels():
    half = plain(RED)
    half[:3] = 0
    values = scores(Colour(colour="red"), plain(RED), half, plain((0, 255, 255)))
    assert values == pytest.approx([1.0, 1 - 0.5 / 3**0.5, 0.0])


def test_colour_is_found_in_the_prompt():
    reward = Colour()
    assert scores(reward, plain(RED), prompt="A Red, not blue house") == [1.0]
    assert scores(reward, plain(RED), prompt="a bored man in white")[0] < 0.5  # no word, only a part of one
    for check in (lambda: scores(reward, plain(RED), prompt="a house"), lambda: reward.check_row("a house", {})):
        with pytest.raises(DataError, match="'a house'"):
            check()


@pytest.mark.parametrize(("side", "share"), [("left", 0.75), ("right", 0.25), ("top", 1.0), ("bottom", 0.0)])
def test_placement_is_the_share_of_ink_in_a_half(side, share):
    image = plain(WHITE, 20, 20)
    image[4:8, 4:7] = 0
    image[4:8, 14:15] = 0
    assert scores(Placement(side=side), image) == pytest.approx([share])
    assert scores(Placement(), image, prompt=f"a dot on the {side}") == pytest.approx([share])


def test_placement_of_nothing_and_of_the_middle_is_a_half():
    image = plain(WHITE, 5, 5)
    image[2, 2] = RED
    for side in ("left", "right", "top", "bottom"):
        assert scores(Placement(side=side), plain(RED), image) == [0.5, 0.5]


@pytest.mark.parametrize("build", [lambda: Colour(colour="mauve"), lambda: Placement(side="north")])
def test_unknown_words_are_refused_with_the_known_ones(build):
    with pytest.raises(ConfigError, match=r"must be one of (black, white|left, right).*not '(mauve|north)'"):
        build()
