"""GenEval's protocol on detections that are written down, and a detector of transformers made in code."""

import numpy as np
import pytest
import torch

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.detections import Detection, is_correct, keep_confident, read_requirements, relative_positions
from sfumato.rewards.geneval import GenEval
from sfumato.rewards.networks.detector import Detector, load_colours
from tests.tiny_reward_models import write_clip


def dog(x, y, score=0.95, name="dog", size=10):
    return Detection(name, score, (x, y, x + size, y + size))


CASES = {
    "two dogs": ([{"class": "dog", "count": 2}], [], [dog(0, 0), dog(30, 0)], True),
    "one dog of two": ([{"class": "dog", "count": 2}], [], [dog(0, 0)], False),
    "three where two are asked for": (
        [{"class": "dog", "count": 2}],
        [{"class": "dog", "count": 3}],
        [dog(0, 0), dog(30, 0), dog(60, 0)],
        False,
    ),
    "a dog that is hardly seen": ([{"class": "dog", "count": 1}], [], [dog(0, 0, score=0.2)], False),
    "left of": (
        [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
        [],
        [dog(0, 0), dog(50, 0, name="cat")],
        True,
    ),
    "not right of": (
        [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}],
        [],
        [dog(0, 0), dog(50, 0, name="cat")],
        False,
    ),
    "a target that is missing": (
        [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
        [],
        [dog(0, 0)],
        False,
    ),
    "red": ([{"class": "dog", "count": 1, "color": "red"}], [], [dog(0, 0)], True),
    "not blue": ([{"class": "dog", "count": 1, "color": "blue"}], [], [dog(0, 0)], False),
    "the first of two is red": ([{"class": "dog", "count": 1, "color": "red"}], [], [dog(0, 0), dog(40, 0, 0.5)], True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_protocol(name):
    include, exclude, detections, expected = CASES[name]
    requirements = read_requirements({"include": include, "exclude": exclude})
    actual = keep_confident(detections, 0.3, 16)
    assert is_correct(*requirements, actual, lambda detection: "red", 0.1) is expected


def test_relations_need_a_clear_offset():
    assert relative_positions(dog(0, 0), dog(1, 0), 0.1) == set()
    assert relative_positions(dog(0, 0), dog(50, 0), 0.1) == {"left of"}
    assert relative_positions(dog(50, 50), dog(0, 0), 0.1) == {"right of", "below"}
    assert relative_positions(dog(0, 0), dog(0, 30), 0.1) == {"above"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no column 'include'"),
        ({"include": [{"class": "dog", "count": 0}]}, "above 0"),
        ({"include": [{"class": "dog", "color": "mauve"}]}, "color of 'dog'"),
        ({"include": [{"class": "dog", "position": ["near", 0]}]}, "position of 'dog'"),
        ({"include": [{"class": "dog", "position": ["above", 3]}]}, "entry 3 of 1"),
    ],
)
def test_rows_that_are_none_of_geneval(row, message):
    with pytest.raises(DataError, match=message):
        read_requirements(row)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A detector of COCO's kind with random weights, and a CLIP."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=4,
        id2label={0: "dog", 1: "cat"},
        label2id={"dog": 0, "cat": 1},
    )
    YolosForObjectDetection(config).save_pretrained(folder / "detector")
    YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "detector")
    write_clip(folder / "clip")
    return folder


def test_a_detector_finds_what_transformers_finds(folders):
    from transformers import AutoImageProcessor, AutoModelForObjectDetection

    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    actual = Detector(folders / "detector", torch.device("cpu")).detect([picture], 0.1)[0]
    model = AutoModelForObjectDetection.from_pretrained(folders / "detector").eval()
    processor = AutoImageProcessor.from_pretrained(folders / "detector", backend="pil")
    with torch.no_grad():
        output = model(**processor(images=[picture], return_tensors="pt"))
    (expected,) = processor.post_process_object_detection(output, 0.1, target_sizes=torch.tensor([[40, 60]]))
    assert len(actual) == len(expected["scores"]) > 0
    assert [detection.score for detection in actual] == pytest.approx(expected["scores"].tolist(), abs=1e-6)
    np.testing.assert_allclose([detection.box for detection in actual], expected["boxes"].numpy(), rtol=1e-5)


def test_the_reward_scores_pictures_and_checks_rows(folders):
    reward = GenEval(detector=str(folders / "detector"), clip=str(folders / "clip"), threshold=0.1, device="cpu")
    reward.prepare()
    picture = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    (seen, *_) = Detector(folders / "detector", torch.device("cpu")).detect([picture], 0.1)[0]
    colour = load_colours(str(folders / "clip"), "cpu").colour(picture, seen.name, seen.box)
    other = {"dog": "cat", "cat": "dog"}[seen.name]
    rows = [
        ({"include": [{"class": seen.name, "count": 1}]}, 1.0),
        ({"include": [{"class": seen.name, "count": 9}]}, 0.0),
        ({"include": [{"class": seen.name, "count": 1}], "exclude": [{"class": seen.name, "count": 1}]}, 0.0),
    ]
    samples = [Sample(image=picture, prompt="a", group_id=0, metadata=row) for row, _ in rows]
    assert reward.score(samples) == [value for _, value in rows]
    assert colour in ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
    reward.check_row("a", {"include": [{"class": other, "color": "red"}]})
    with pytest.raises(DataError, match="knows no 'zebra'"):
        reward.check_row("a", {"include": [{"class": "zebra"}]})
    blind = GenEval(detector=str(folders / "detector"), device="cpu")
    with pytest.raises(DataError, match="needs the field clip"):
        blind.check_row("a", {"include": [{"class": "dog", "color": "red"}]})
