"""Rendered words: reproducible, readable, and honest about what training never shows."""

import itertools

import numpy as np
import pytest
import torch

from sfumato.config.sections import GlyphConfig
from sfumato.data.synthetic.glyphs import (
    GlyphDataset,
    caption_of,
    held_out_words,
    is_held_out,
    source_image,
    training_words,
)
from sfumato.errors import DataError


def make(seed=0, **options):
    return GlyphDataset(GlyphConfig(**options), 32, 40, seed)


def word_of(data, index):
    return data.caption(index).split('"')[1]


def test_held_out_words_never_appear_in_training_images():
    data = make(length=1, held_out=0.5, num_images=400)
    shown = {word_of(data, index) for index in range(len(data))}
    assert len(data) == 400
    assert shown == set(training_words(data.config)), "every training word is shown, and no other"
    assert not any(is_held_out(word, data.config) for word in shown)
    assert 5 < len(shown) < 21


def test_training_and_held_out_words_are_all_words():
    config = GlyphConfig(characters="ABCDEF", length=2, held_out=0.3)
    everything = {"".join(letters) for letters in itertools.product("ABCDEF", repeat=2)}
    training = training_words(config)
    held_out = held_out_words(config, len(everything) - len(training))
    assert len(set(training)) == len(training) and len(set(held_out)) == len(held_out)
    assert set(training).isdisjoint(held_out) and set(training) | set(held_out) == everything


def test_the_share_of_held_out_words_is_what_was_asked_for():
    for share in (0.1, 0.25):
        config = GlyphConfig(held_out=share)
        held_out = 26**3 - len(training_words(config))
        assert abs(held_out / 26**3 - share) < 0.01


def test_which_words_are_held_out_depends_on_the_word_alone():
    assert is_held_out("AAA", GlyphConfig()) == is_held_out(
        "AAA", GlyphConfig(length=5, characters="AB", template="{word}")
    )
    few, many = GlyphConfig(held_out=0.1), GlyphConfig(held_out=0.3)
    words = ["".join(letters) for letters in itertools.product("ABCDE", repeat=3)]
    assert all(is_held_out(word, many) for word in words if is_held_out(word, few))


def test_held_out_words_are_in_a_fixed_order():
    config = GlyphConfig()
    assert held_out_words(config, 10) == held_out_words(config, 30)[:10]
    assert held_out_words(config, 30) != sorted(held_out_words(config, 30))
    assert all(is_held_out(word, config) for word in held_out_words(config, 30))


def test_too_many_words_are_asked_for():
    with pytest.raises(DataError, match=r"fewer than 20 held-out words.*data\.glyphs\.held_out"):
        held_out_words(GlyphConfig(length=1), 20)
    with pytest.raises(DataError, match="456976 words of 4 characters"):
        training_words(GlyphConfig(length=4))


def test_an_image_is_a_function_of_seed_and_index():
    data, again = make(), make()
    for index in (5, 0, 5, 19_999):
        assert torch.equal(data.pixels(index), again.pixels(index)) and data.caption(index) == again.caption(index)
    longer = make(num_images=30_000)
    assert torch.equal(longer.pixels(5), data.pixels(5)), "whatever the number of images"


def test_seeds_and_indices_give_different_words():
    words = {seed: [word_of(make(seed), index) for index in range(40)] for seed in (0, 1)}
    assert sum(a == b for a, b in zip(words[0], words[1], strict=True)) <= 2
    assert len(set(words[0])) > 35


def test_sizes_and_places_vary():
    data = make(characters="A", length=3, held_out=0.01)
    shapes, corners = set(), set()
    for index in range(60):
        rows, columns = np.nonzero(data.pixels(index)[0].numpy() < 128)
        shapes.add((int(np.ptp(rows)), int(np.ptp(columns))))
        corners.add((int(rows.min()), int(columns.min())))
    assert len(shapes) >= 3 and len(corners) >= 10
    still = make(characters="A", length=3, held_out=0.01, font_sizes=[12], jitter=0)
    assert torch.equal(still.pixels(0), still.pixels(1))


def test_pixels_are_black_on_white_and_inside():
    data = make()
    for index in range(30):
        pixels = data.pixels(index)
        assert pixels.shape == (3, 32, 40) and pixels.dtype == torch.uint8 and pixels.is_contiguous()
        assert torch.equal(pixels[0], pixels[1]) and torch.equal(pixels[0], pixels[2])
        assert pixels.min() < 30 and 0.02 < (pixels[0] < 128).float().mean() < 0.35
        border = torch.cat([pixels[0, 0], pixels[0, -1], pixels[0, :, 0], pixels[0, :, -1]])
        assert (border == 255).all(), f"the word of image {index} touches the border"


def test_different_words_look_different():
    data = make(font_sizes=[13], jitter=0, num_images=50)
    images = {word_of(data, index): data.pixels(index).numpy().tobytes() for index in range(50)}
    assert len(set(images.values())) == len(images) > 45


def test_captions_and_examples():
    data = make(template="the word {word}!")
    assert data.caption(0).startswith("the word ") and data.caption(0).endswith("!")
    assert data.example_captions(4) == [caption_of(word, data.config) for word in held_out_words(data.config, 4)]
    assert data.caption(0).split()[2][:-1] in data.describe(0) and "glyph image 0" in data.describe(0)


def test_the_fingerprint_knows_what_matters():
    prints = [make().fingerprint(), make(1).fingerprint(), make(length=4).fingerprint(), make(jitter=1).fingerprint()]
    prints.append(GlyphDataset(GlyphConfig(), 40, 32, 0).fingerprint())
    assert len(set(prints)) == 5 and make().fingerprint() == prints[0]


def test_an_edit_needs_another_word_to_start_from():
    config = GlyphConfig(characters="AA")
    with pytest.raises(DataError, match="'AA' make no other word"):
        source_image("AAA", config, 16, 16)
