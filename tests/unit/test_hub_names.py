"""A model that is called by its name on the hub, which the local hub cache does not hold, whoever loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sfumato.config.omni import PartConfig
from sfumato.config.sections import ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import code_of_configurations
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_tokenizer
from sfumato.models.language.parts import read_model_config
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


class Hub:
    """What stands in the place of the hub: a repository's files, and what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str]) -> None:
        self.asked: list[str] = []
        self.revisions: list[str | None] = []
        self.folder = tmp_path / "snapshot"

        def snapshot(
            name: str,
            revision: str | None = None,
            allow_patterns: list[str] | None = None,
            local_files_only: bool = False,
        ) -> str:
            self.revisions.append(revision)
            if local_files_only:
                raise OSError("not cached")
            self.asked += allow_patterns or ["everything"]
            return str(self.folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, name, revision: files)


LANGUAGE = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "vocab.txt", "chat_template.jinja"]
LANGUAGE += ["additional_chat_templates/tool_use.jinja"]
PIPELINE = ["model_index.json", "vae/config.json", "vae/model.safetensors", "tokenizer/merges.txt"]
NEVER = ["modeling_x.py", "pytorch_model.bin", "training_args.pt", "README.md"]
OTHER_LAYOUTS = ["original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.safetensors"]
VARIANTS = ["vae/model.fp16.safetensors", "flux1-dev.safetensors", "unet/diffusion_pytorch_model.non_ema.safetensors"]


@pytest.mark.parametrize(
    ("section", "wanted", "others"),
    [(LanguageModelConfig, LANGUAGE, OTHER_LAYOUTS), (ModelConfig, PIPELINE, VARIANTS)],
)
def test_one_setting_downloads_what_is_read_and_no_code(
    section: Any, wanted: list[str], others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, tmp_path, [*NEVER, *wanted, *others])
    assert section(model_path=NAME).model_path == NAME and hub.asked == []
    assert section(model_path=NAME, download=True).model_path == str(hub.folder)
    assert sorted(hub.asked) == sorted(wanted)


def test_nothing_is_downloaded_for_a_folder_for_a_stranger_or_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, tmp_path, [*NEVER, "config.json"])
    assert LanguageModelConfig(model_path=str(tmp_path), download=True).model_path == str(tmp_path)
    with code_of_configurations(trusted=False):
        assert LanguageModelConfig(model_path=NAME, download=True).model_path == NAME
    with pytest.raises(ValueError, match=r"has no safetensors files on the hub"):
        LanguageModelConfig(model_path=NAME, download=True)
    assert hub.asked == []


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"model.download: the hub does not give {NAME}: "):
        LanguageModelConfig(model_path=NAME, download=True)
