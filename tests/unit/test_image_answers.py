"""Images that are drawn: tokens that a row's own texts may not hold, and sizes that come back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfumato.config.omni import PartConfig
from sfumato.data.media.image_answers import DrawingReader, ImageText
from sfumato.errors import ConfigError, DataError
from sfumato.models.omni.image_tokenizer import VqModel, build_vq_model
from tests.tiny import ROOT

EMU3 = ImageText("<|image start|>2*3<|image token|>", "<|image end|>", "<|visual token {:06d}|>", 3, "<|extra_200|>")


@pytest.mark.parametrize(
    ("written", "text", "token"),
    [
        (ImageText(), "What is <|draw_31|>?", "<|draw_31|>"),
        (ImageText(), "Draw <|draw_start|>", "<|draw_start|>"),
        (EMU3, "a <|visual token 000007|> b", "<|visual token 000007|>"),
    ],
)
def test_a_text_with_codes_of_its_own_is_a_broken_row(written: ImageText, text: str, token: str) -> None:
    reader = DrawingReader.__new__(DrawingReader)
    reader.image_tokenizer = SimpleNamespace(text=written)
    with pytest.raises(DataError, match=r"row 1: a text holds .*a part of an image that is drawn"):
        reader.expand(text, [], [], "row 1")
    assert written.find_in(text) == token


@pytest.mark.parametrize("written", [ImageText(), EMU3])
def test_texts_without_codes_are_left_alone(written: ImageText) -> None:
    assert written.find_in("draw_3 and <|draw_{}|>, a visual token") is None
    assert written.find_in(written.of(range(6))) == written.opening


def test_images_that_would_come_back_at_another_size_are_refused() -> None:
    vq = VqModel(build_vq_model(PartConfig(config_path=str(ROOT / "configs/tiny/vq.yaml"))))
    vq.check_size(16, 24)
    with pytest.raises(ConfigError, match=r"data\.height 18 .* images of 16 x 24 pixels: take multiples of 4"):
        vq.check_size(18, 24)
