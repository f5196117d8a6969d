"""Text encoders and autoencoder that wait elsewhere: they are on the compute device while they work, and only then.

Without a second device their moves are written down instead of made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from sfumato.config.dit import TrainAutoencoderConfig
from sfumato.config.load import load_config
from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion import frozen_parts
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.memory_plan import plan_memory
from sfumato.models.estimate.meta_models import diffusion_model_on_meta, plan_diffusion_model
from sfumato.parallel.layout import Layout
from tests import tiny_families

WAITING, WORKING = torch.device("meta"), torch.device("cpu")

FAMILIES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "sd3": (tiny_families.tiny_sd3, 7),
    "flux_kontext": (tiny_families.tiny_flux_kontext, 7),
    "stable_diffusion_xl": (tiny_families.tiny_stable_diffusion_xl, 7),
    "qwen_image": (tiny_families.tiny_qwen_image, 24),
    "wan_image": (tiny_families.tiny_wan_image, 512),
}
"""Each kind of embedding and of autoencoder, with the length of prompts."""


class Watched:
    """Where each frozen network of a model would be, and where it was whenever it computed."""

    def __init__(self, model: DiffusionModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.place: dict[nn.Module, torch.device] = {}
        self.moves: list[str] = []
        self.worked: set[str] = set()
        names = (*model.encoder_names, *model.autoencoder_names)
        for name in (name for name in names if name in model.components):
            self._watch(name, model.components[name], monkeypatch)
        monkeypatch.setattr(frozen_parts, "device_of", self.place.__getitem__)

    def _watch(self, name: str, network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place[network] = WAITING

        def move(device: torch.device) -> None:
            self.moves.append(name)
            self.place[network] = device

        def check(*_: Any) -> None:
            self.worked.add(name)
            assert self.place[network] == WORKING, f"{name} computes where it waits"

        monkeypatch.setattr(network, "to", move)
        for part in network.modules():
            part.register_forward_pre_hook(check)

    @property
    def all_wait(self) -> bool:
        return set(self.place.values()) == {WAITING}


@pytest.fixture(params=FAMILIES)
def watched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    describe, tokens = FAMILIES[request.param]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(describe()))
    config = ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=tokens, offload_idle=True)
    model = build_diffusion_model(config)
    assert model.idle_device == torch.device("cpu")
    model.idle_device = WAITING
    return Watched(model, monkeypatch)


def test_what_computes_is_at_work_and_goes_back(watched: Watched) -> None:
    model, size = watched.model, 32
    images = [np.full((size, size, 3), 90, np.uint8)] * 2 if model.takes_image else None
    model.encode_prompts(["write a", "write b"], images=images)
    assert watched.all_wait
    encoders = {encoder_name for encoder_name in model.encoder_names if encoder_name in model.components}
    assert encoders <= watched.worked, "each encoder is looked at"

    moved = list(watched.moves)
    model.encode_prompts(["write b"], images=None if images is None else images[:1])
    assert watched.moves == moved, "what is remembered moves nothing"

    latents = model.encode_pixels(torch.full((1, 3, size, size), 90, dtype=torch.uint8))
    model.decode(latents)
    assert watched.all_wait
    assert watched.moves[len(moved) :] == ["vae"] * 4
    assert "vae" in watched.worked


def test_a_failure_leaves_nothing_at_work(watched: Watched) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        watched.model.decode(torch.zeros(1, 99, 4, 4))
    assert watched.moves == ["vae"] * 2
    assert watched.all_wait


def test_nothing_moves_unless_it_is_asked_for(watched: Watched) -> None:
    watched.model.idle_device = None
    for network in watched.place:
        watched.place[network] = WORKING
    watched.model.decode(torch.zeros(1, *watched.model.latent_shape(32, 32)))
    assert watched.moves == []


def test_an_autoencoder_that_is_trained_does_not_wait(tmp_path: Path) -> None:
    sections = {
        "model": {"config_path": "tiny.yaml", "offload_idle": True},
        "data": {"data_type": "glyphs", "height": 16, "width": 16},
        "train": {"output_dir": str(tmp_path), "max_steps": 1},
    }
    with pytest.raises(ConfigError, match=r"model\.offload_idle"):
        load_config(TrainAutoencoderConfig, overrides=sections)


def test_the_prediction_of_memory_puts_them_aside(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_families.tiny_sd3()))
    model = diffusion_model_on_meta(ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=7), "no")
    train = TrainConfig(output_dir=str(tmp_path))
    here, aside = (
        plan_memory(plan_diffusion_model(model, Layout(), 1, (16, 16), offload_idle=idle), train, 1)[0]
        for idle in (False, True)
    )
    frozen = {"frozen text_encoder", "frozen text_encoder_2", "frozen text_encoder_3", "frozen vae"}
    assert set(here.parts) - set(aside.parts) == frozen == set(aside.host)
    assert here.total - aside.total == sum(aside.host.values()) > 0
