"""A model that is called by its name on the hub, which the local hub cache does not hold, whoever loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sfumato.config.omni import PartConfig
from sfumato.config.sections import ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language_load import build_tokenizer
from sfumato.models.language_parts import read_model_config
from sfumato.models.omni.flow_head import LatentTokenizer, patch_of
from sfumato.models.omni.image_tokenizer import ImageTokenizer
from sfumato.models.omni.load import load_part
from sfumato.rewards.networks.folder import check_folder

NAME = "some-owner/Model-1.5"
LOADERS: dict[str, Any] = {
    "pipeline": lambda: build_diffusion_model(ModelConfig(model_path=NAME)),
    "language model": lambda: read_model_config(LanguageModelConfig(model_path=NAME)),
    "tokenizer": lambda: build_tokenizer(LanguageModelConfig(model_path=NAME)),
    "part of an omni model": lambda: load_part(PartConfig(model_path=NAME), "model.encoder", False),
    "image tokenizer": lambda: ImageTokenizer.from_folder(Path(NAME)),
    "autoencoder": lambda: LatentTokenizer.from_folder(Path(NAME), 2),
    "head": lambda: patch_of(PartConfig(model_path=NAME)),
    "reward": lambda: check_folder(Path(NAME)),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_command_that_downloads_it_is_said(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"not in the local hub cache.* hf download {NAME}"):
        LOADERS[loader]()
