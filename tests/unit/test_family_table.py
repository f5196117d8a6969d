"""The table of families on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_of_configs import write_pipeline
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.load import find_families
from sfumato.models.estimate.meta_models import diffusion_model_on_meta
from tests.family_rows import ROWS
from tests.family_table import MODELS, PAGE, page, rows_of
from tests.sound_rows import ROWS as SOUND_ROWS


def test_the_table_is_what_the_classes_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tests.family_table"


def test_every_family_has_a_line_and_a_row() -> None:
    assert set(MODELS) == set(find_families())
    of_sound = {row.describe()["pipeline"] for row in SOUND_ROWS.values()}
    assert all(rows_of(name) for name in MODELS if name not in of_sound)
    assert {row.describe()["pipeline"] for row in ROWS.values()} | of_sound == set(MODELS)


@pytest.mark.parametrize(
    ("name", "billions", "size", "shape"),
    [
        ("FLUX.2-klein-base-4B", 3.88, (1024, 1024, 1), (128, 64, 64)),
        ("Qwen-Image-2.1", 7.12, (1024, 1024, 1), (64, 64, 64)),
        ("ideogram-v4", 9.28, (1024, 1024, 1), (128, 64, 64)),
        ("Chroma1-HD", 8.90, (1024, 1024, 1), (16, 128, 128)),
        ("Lumina-Image-2.0", 2.61, (1024, 1024, 1), (16, 128, 128)),
        ("Sana_1600M_1024px_diffusers", 1.60, (1024, 1024, 1), (32, 32, 32)),
        ("HunyuanVideo-1.5-480p_t2v", 8.33, (480, 832, 121), (32, 31, 30, 52)),
        ("CogVideoX-5b", 5.57, (480, 720, 49), (16, 13, 60, 90)),
    ],
)
def test_published_sizes(
    name: str, billions: float, size: tuple[int, int, int], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Of a folder as it is published, without weights, which ``sfumato check`` reads the same way."""
    if name == "Qwen-Image-2.1":
        pytest.importorskip("torchvision")  # of its processor
    config = ModelConfig(model_path=str(write_pipeline(name, tmp_path)))
    model = diffusion_model_on_meta(config, "no")
    assert sum(parameter.numel() for parameter in model.denoiser.parameters()) / 1e9 == pytest.approx(
        billions, rel=0.01
    )
    assert model.latent_shape(*size) == shape
    assert model.embedding_shapes(*size[:2])["prompt_embeds"][0][0] == model.max_sequence_length
