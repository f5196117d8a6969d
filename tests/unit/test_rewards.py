"""Rewards themselves: targets, distances, crops, real OCR engines, and how they are chosen in a configuration."""

import importlib.util
import logging
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sfumato.config.base import Section, Variant, find_variants
from sfumato.config.help import attribute_docs
from sfumato.config.load import load_config
from sfumato.config.sections import GlyphConfig
from sfumato.config.yaml_text import config_text
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.ocr import OcrReward, crop_to_ink, levenshtein, ocr_target, ocr_text_score
from sfumato.rewards.pixels import Brightness, JpegCompressibility
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.sound import spoken_words

WORDS = ["HELLO", "ABC"]
needs_tesseract = pytest.mark.skipif(shutil.which("tesseract") is None, reason="the tesseract program is not installed")
ENGINES = ["rapidocr", pytest.param("tesseract", marks=needs_tesseract)]


def render(word, width=64, height=32, size=16, ink=(0, 0, 0), paper=(255, 255, 255)):
    image = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(image)
    draw.text((width / 2, height / 2), word, font=ImageFont.load_default(size), fill=ink, anchor="mm")
    return np.array(image)


def sample(image, prompt="", group_id=0, **metadata):
    return Sample(image=image, prompt=prompt, metadata=metadata, group_id=group_id)


class RewardSection(Section):
    rewards: list[Annotated[Any, Variant("sfumato.rewards")]]


class Settings(Section):
    reward: RewardSection


@pytest.mark.parametrize(
    ("prompt", "metadata", "target"),
    [
        ('a sign "Open" and "Closed"', {}, "Open"),
        ("a sign “Open” and “Closed”", {}, "Open"),
        ('“first” then "second"', {}, "first"),
        ('a sign "Open"', {"target": "Shut"}, "Shut"),
        ('a sign "Open"', {"target": None}, "Open"),
        ("no quotes", {"target": "Shut"}, "Shut"),
    ],
)
def test_target_comes_from_the_row_or_the_first_quotes(prompt, metadata, target):
    assert ocr_target(prompt, metadata) == target


@pytest.mark.parametrize(
    ("prompt", "metadata"),
    [
        ("nothing", {}),
        ('one " quote', {}),
        ('"  "', {}),
        ("“”", {}),
        ('"fine"', {"target": ""}),
        ('"fine"', {"target": 42}),
    ],
)
def test_missing_or_empty_target_names_the_prompt(prompt, metadata):
    with pytest.raises(DataError) as error:
        ocr_target(prompt, metadata)
    assert repr(prompt) in str(error.value)


@pytest.mark.parametrize(
    "prompt", ['a 12" pizza with the text "SALE"', 'a 2" x 4" board', 'it says "A" and "B', '"5\'10""']
)
def test_a_prompt_whose_quotes_are_not_clear_is_refused(prompt):
    """The text between the inches and the quotes was asked for."""
    for read in (ocr_target, spoken_words):
        with pytest.raises(DataError, match="not clear which text is quoted in prompt"):
            read(prompt, {})
        assert read(prompt, {"target": "SALE"}) == "SALE"
    assert ocr_target('a door "ROOM 12" in "B4"', {}) == "ROOM 12"


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_levenshtein(first, second, distance):
    assert levenshtein(first, second) == distance
    assert levenshtein(second, first) == distance


def test_text_score_ignores_case_and_all_spaces_and_stays_within_0_and_1():
    assert ocr_text_score("h e\nL\tlo", "HEL LO") == 1.0
    assert ocr_text_score("HELLP", "hello") == pytest.approx(0.8)
    assert ocr_text_score("x" * 500, "hello") == 0.0
    with pytest.raises(DataError):
        ocr_text_score("anything", " ")


@pytest.mark.parametrize(("text", "target"), [("DON'T", "Don\u2019t"), ("A\uff1aB", "A:B"), ("ＣＡＦÉ", "cafe\u0301")])
def test_characters_that_look_alike_are_one(text, target):
    """Engines write some of them otherwise than a prompt does, so that a picture that is right had less than 1."""
    assert ocr_text_score(text, target) == ocr_text_score(target, text) == 1.0


def test_crop_keeps_two_pixels_around_the_ink():
    image = np.full((40, 60, 3), 200, np.uint8)
    image[10:15, 20:30] = 20
    assert crop_to_ink(image).shape == (9, 14, 3)
    image[:, :, :] = 200
    image[0, 59] = 0  # ink in a corner: the margin ends at the image's edge
    assert crop_to_ink(image).shape == (3, 3, 3)


def test_crop_of_blank_and_faintly_noisy_images_is_nothing():
    rng = np.random.default_rng(0)
    assert crop_to_ink(np.full((32, 32, 3), 77, np.uint8)) is None
    assert crop_to_ink(rng.integers(120, 136, (32, 32, 3), dtype=np.uint8)) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("detect", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_real_ocr_tells_right_from_wrong_words(engine, detect):
    reward = OcrReward(engine=engine, detect=detect)
    reward.prepare()
    size = {"width": 256, "height": 96, "size": 40} if detect else {}
    hello, abc = (render(word, **size) for word in WORDS)
    blank = np.full_like(hello, 255)
    assert reward.read([hello, blank, abc]) == ["HELLO", "", "ABC"]
    samples = [sample(hello, '"hello"'), sample(abc, '"hello"'), sample(blank, '"hello"'), sample(abc, target="ABC")]
    assert reward.score(samples) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_real_ocr_reads_coloured_text_on_a_coloured_ground(engine):
    image = render("HELLO", ink=(250, 220, 40), paper=(20, 40, 120))
    assert OcrReward(engine=engine, detect=False).read([image]) == ["HELLO"]


def test_text_of_a_line_does_not_depend_on_its_neighbours():
    reward = OcrReward(detect=False)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 3)) for _ in range(24)]
    # noise makes reading uncertain, so that the padding that a long neighbour brings would change the text
    noisy = [render(word, width=32, size=12) + rng.normal(0, 60, (32, 32, 3)) for word in words]
    noisy = [np.clip(image, 0, 255).astype(np.uint8) for image in noisy]
    sentence = "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG"
    images = [*noisy, render("HELLO"), render(sentence, width=600)]
    together = reward.read(images)
    assert together == [reward.read([image])[0] for image in images]
    assert together[-2] == "HELLO" and ocr_text_score(together[-1], sentence) > 0.9


def test_real_ocr_of_a_video_is_the_mean_over_its_frames():
    config = GlyphConfig(characters="ABC", length=3, font_sizes=[24], jitter=0)
    data = GlyphDataset(config, 48, 128, seed=0, num_frames=5)
    word = data.caption(0).split('"')[1]
    right = data.pixels(0).permute(1, 2, 3, 0).numpy()
    half = np.concatenate([right[:3], np.full_like(right[:2], 255)])
    samples = [Sample(image=video, prompt=f'write "{word}"', group_id=0) for video in (right, half)]
    result = Scorer([OcrReward(detect=False, frame_step=2)]).score(samples).total
    assert result.tolist() == pytest.approx([1, 2 / 3])
    assert np.abs(np.diff(right.astype(int), axis=0)).max() > 100, "the word moves"


def test_rapidocr_logs_nothing_below_error(capfd):
    OcrReward(detect=True, num_threads=2).score([sample(np.full((64, 64, 3), 255, np.uint8), '"x"')])
    assert logging.getLogger("RapidOCR").level >= logging.ERROR
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_examples_of_the_documentation_work(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "my_package" in block)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    examples = re.findall(r"```yaml\nreward:\n(  rewards:.*?)(?:  max_failed_fraction.*?)?```", text, re.DOTALL)
    assert len(examples) >= 4
    scorers = []
    for example in examples:
        (tmp_path / "reward.yaml").write_text(f"reward:\n{example}")
        scorers.append(Scorer(load_config(Settings, tmp_path / "reward.yaml").reward.rewards))
    red = np.zeros((2, 2, 3), np.uint8)
    red[..., 0] = 255
    scores = scorers[-1].score([sample(red), sample(255 - red)])
    np.testing.assert_allclose(scores.components["Redness"], [2.0, -2.0])


def test_brightness_is_the_mean_of_the_pixels():
    half = np.zeros((2, 2, 3), np.uint8)
    half[0] = 255
    samples = [sample(np.full((4, 4, 3), value, np.uint8)) for value in (0, 51, 255)] + [sample(half)]
    assert Brightness().score(samples) == pytest.approx([0.0, 0.2, 1.0, 0.5])


def test_rewards_are_found_without_registration():
    variants = find_variants("sfumato.rewards")
    assert list(variants) == sorted(variants)
    assert {"brightness", "clip_score", "jpeg_compressibility", "jpeg_incompressibility", "ocr"} <= set(variants)
    assert all(issubclass(cls, Reward) for cls in variants.values())
    fields = {
        "name",
        "weight",
        "evaluation_only",
        "timeout_s",
        "frame_step",
        "normalise",
        "process",
        "engine",
        "detect",
        "num_threads",
        "batch_size",
    }
    assert set(attribute_docs(variants["ocr"])) == fields


def test_rewards_are_built_from_yaml_and_dumped_to_the_same(tmp_path):
    path = tmp_path / "reward.yaml"
    path.write_text(
        "reward: {rewards: [{type: ocr, engine: tesseract, detect: false}, {type: jpeg_compressibility, weight: 0.1}]}"
    )
    config = load_config(Settings, path)
    expected = [OcrReward(engine="tesseract", detect=False), JpegCompressibility(weight=0.1)]
    assert config.reward.rewards == expected
    assert [reward.label for reward in config.reward.rewards] == ["ocr", "jpeg_compressibility"]
    (tmp_path / "dumped.yaml").write_text(config_text(config))
    assert load_config(Settings, tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"type": "ocr", "engine": "abacus"}, "engine"),
        ({"type": "ocr", "detekt": False}, "detect"),
        ({"type": "ocr", "num_threads": 0}, "num_threads"),
        ({"type": "ocr", "batch_size": -1}, "batch_size"),
        ({"type": "brightness", "weight": float("nan")}, "weight"),
        ({"type": "brightness", "weight": float("inf")}, "weight"),
        ({"type": "brightness", "timeout_s": 0}, "timeout_s"),
        ({"type": "brightnes"}, "brightness"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        load_config(Settings, overrides={"reward": {"rewards": [fields]}})


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 5), (4, 4, 4)])
def test_sample_refuses_images_of_another_shape(shape):
    with pytest.raises(AssertionError, match="uint8"):
        sample(np.zeros(shape, np.uint8))


def test_sample_refuses_images_of_another_type():
    with pytest.raises(AssertionError, match="float32"):
        sample(np.zeros((4, 4, 3), np.float32))
    with pytest.raises(AssertionError, match="float32"):
        Sample(image=np.zeros((4, 4, 3), np.uint8), source=np.zeros((4, 4, 3), np.float32), prompt="", group_id=0)


def test_sample_is_either_an_image_or_a_text():
    assert Sample(text="", prompt="", group_id=0).image is None
    for both in ({}, {"image": np.zeros((4, 4, 3), np.uint8), "text": "a"}):
        with pytest.raises(AssertionError, match="an image, a text, a sound, or a video with sound"):
            Sample(prompt="", group_id=0, **both)


def test_paddle_is_asked_for_with_its_command_or_reads():
    if importlib.util.find_spec("paddleocr") is None:
        with pytest.raises(MissingDependencyError, match=r"pip install 'paddleocr>=3.0' paddlepaddle"):
            OcrReward(engine="paddleocr").prepare()
    else:
        images = [render(word, width=256, height=96, size=40) for word in WORDS]
        assert OcrReward(engine="paddleocr").read(images) == WORDS
