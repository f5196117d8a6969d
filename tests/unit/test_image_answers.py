"""Images that are drawn: tokens that a row's own texts may not hold, and sizes that come back; pixels of encoders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from sfumato.config.load import load_config
from sfumato.config.omni import PartConfig, TrainOmniConfig
from sfumato.data.media.image_answers import DrawingReader, ImageText
from sfumato.errors import ConfigError, DataError
from sfumato.models.omni.image_tokenizer import ImageTokenizer, VqModel, build_vq_model
from sfumato.models.omni.load import build_omni_model, load_part
from tests.pretended_device import DEVICE, pretend_device
from tests.tiny import ROOT
from tests.tiny_omni import tiny_image_tokenizer, tiny_omni_config

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
    vq.set_size(32, 48)  # the export's images are as large as those that it was trained on
    assert ImageTokenizer(vq.trained, ROOT).shape == (8, 12)
    with pytest.raises(ConfigError, match=r"data\.height 18 .* images of 16 x 24 pixels: take multiples of 4"):
        vq.set_size(18, 24)


def test_a_vq_model_whose_decoder_looks_codes_up_gives_the_same_images(tmp_path: Path) -> None:
    plain = build_vq_model(PartConfig(model_path=str(tiny_image_tokenizer(tmp_path))))
    looking_up = build_vq_model(PartConfig(model_path=str(tmp_path)))
    looking_up.register_to_config(lookup_from_codebook=True)
    images = [ImageTokenizer(model, tmp_path).decode([[0, 1, 2, 3]]) for model in (plain, looking_up)]
    assert (images[0] == images[1]).all()
    VqModel(looking_up).set_size(8, 8)  # decodes, too


def test_a_codebook_begins_among_latents_of_a_device() -> None:
    vq = VqModel(build_vq_model(PartConfig(config_path=str(ROOT / "configs/tiny/vq.yaml"))))
    images = torch.arange(2 * 3 * 16 * 24, dtype=torch.uint8).view(2, 3, 16, 24)
    with pretend_device():
        vq.trained.to(DEVICE)
        vq.start_codebook(images.to(DEVICE) / 127.5 - 1, seed=0)
        pairs, num_used = vq.reconstruct(images)
    assert pairs.shape == (2, 16, 48, 3) and num_used > 1


def test_pixels_are_normalised_as_the_folder_of_the_encoder_says(tmp_path: Path) -> None:
    settings = tiny_omni_config(tmp_path)
    described = settings["model"]["encoder"].pop("config_path")
    encoder = load_part(PartConfig(config_path=described), "model.encoder", causal=False)
    encoder.save_pretrained(tmp_path / "siglip")
    (tmp_path / "siglip/preprocessor_config.json").write_text('{"image_mean": [0.4, 0.5, 0.6], "image_std": [1, 1, 1]}')
    settings["model"]["encoder"]["model_path"] = str(tmp_path / "siglip")
    vision = build_omni_model(load_config(TrainOmniConfig, overrides=settings)).vision
    assert vision is not None
    pixels = vision.reader.process_opened([Image.new("RGB", (16, 16), "white")])["pixel_values"]
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([0.6, 0.5, 0.4])
