"""Rewards against values of the Flow-GRPO implementation."""

import json
from pathlib import Path

import numpy as np
import PIL
import pytest

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.ocr import ocr_target, ocr_text_score
from sfumato.rewards.pixels import JpegCompressibility, JpegIncompressibility

FILE = json.loads((Path(__file__).parent / "data" / "flow_rl.json").read_text(encoding="utf-8"))
GOLDEN = FILE["V12_cpu_rewards"]


@pytest.mark.parametrize("case", GOLDEN["ocr_text_score"], ids=lambda case: "".join(case["recognised_lines"]) or "none")
def test_ocr_score_equals_the_reference(case):
    target = ocr_target(case["prompt"], {})
    assert ocr_text_score("".join(case["recognised_lines"]), target) == pytest.approx(case["reward"], abs=1e-12)


@pytest.mark.parametrize("prompt", GOLDEN["ocr_edge"])
def test_prompts_that_crash_the_reference_are_refused_by_name(prompt):
    with pytest.raises(DataError) as error:
        ocr_target(prompt, {})
    assert repr(prompt) in str(error.value)


def jpeg_samples():
    """The reference's 32 x 32 images: flat, gradient, hash."""
    y, x = np.mgrid[:32, :32]
    images = [
        np.full((32, 32, 3), 128),
        np.stack([8 * x, 8 * y, 4 * (x + y)], axis=-1),
        np.stack([(37 * x + 101 * y) % 256, (7 * x**2 + 13 * y) % 256, (5 * x * y + 17) % 256], axis=-1),
    ]
    return [Sample(image=image.astype(np.uint8), prompt="", group_id=0) for image in images]


@pytest.mark.skipif(
    PIL.__version__ != FILE["meta"]["versions"]["pillow"], reason="JPEG sizes differ between builds of Pillow"
)
def test_jpeg_sizes_equal_the_reference():
    expected = GOLDEN["jpeg"]
    assert JpegIncompressibility().score(jpeg_samples()) == expected["incompressibility (bytes/1000)"]
    got = JpegCompressibility().score(jpeg_samples())
    assert got == pytest.approx(expected["compressibility (-bytes/1000/500)"], abs=1e-12)


def test_jpeg_rewards_order_images_by_detail():
    flat, gradient, noise = JpegIncompressibility().score(jpeg_samples())
    assert 0 < flat < gradient < noise
    flat, gradient, noise = JpegCompressibility().score(jpeg_samples())
    assert 0 > flat > gradient > noise
