"""A model by its name on the hub: a run that goes on takes the revision that it began with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from sfumato.config.hub import pin_revisions
from sfumato.errors import ConfigError
from sfumato.models.language.parts import build_byte_tokenizer
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config
from tests.unit.test_hub_names import LANGUAGE, NAME, Hub

OLD, NEW = "a" * 40, "b" * 40


def publish(cache: Path, revision: str, seed: int) -> Path:
    """Puts a revision of a tiny model into the hub's cache, as the newest one."""
    repository = cache / "models--some-owner--Model-1.5"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    folder = repository / "snapshots" / revision
    torch.manual_seed(seed)
    described = tiny_language_description("llama")
    described.pop("model_type")
    AutoModelForCausalLM.from_config(LlamaConfig(**described)).save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def config_of(folder: Path, steps: int, **train: Any) -> dict[str, Any]:
    config = tiny_text_config(
        folder, train={"max_steps": steps, "save_steps": 1, "lr_decay_style": "constant", **train}
    )
    return config | {"model": {"model_path": NAME, "lora": {"rank": 2}}, "eval": {"every_steps": 0}}


def model_of(run: Path) -> str:
    return yaml.safe_load((run / "config.yaml").read_text())["model"]["model_path"]


def losses_of(run: Path) -> dict[int, float]:
    lines = read_jsonl(run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_name_that_has_moved_on_is_said_and_the_run_keeps_its_revision(tmp_path: Path, cache: Path) -> None:
    """An adapter on other weights than those that it was trained on would go on without an error."""
    old = publish(cache, OLD, seed=0)
    whole = run_task_here("train_text", config_of(tmp_path / "whole", 2))
    run = run_task_here("train_text", config_of(tmp_path / "stopped", 1))
    assert model_of(run) == str(old)
    new = publish(cache, NEW, seed=1)
    assert run_task_here("train_text", config_of(tmp_path / "stopped", 2, load_checkpoint_path="auto")) == run
    assert model_of(run) == str(old)
    assert losses_of(run) == losses_of(whole) and len(losses_of(run)) == 2
    said = rf"model\.model_path: {NAME} at revision {OLD[:12]}.*hub cache has {NEW[:12]} by now, which a new run takes"
    assert re.search(said, (run / "log.txt").read_text())
    fork = run_task_here("train_text", config_of(tmp_path / "fork", 3, load_checkpoint_path=str(run)))
    assert model_of(fork) == str(old)
    assert model_of(run_task_here("train_text", config_of(tmp_path / "fresh", 1))) == str(new)


def test_a_revision_that_is_gone_is_named_with_the_command_that_brings_it(tmp_path: Path, cache: Path) -> None:
    old = publish(cache, OLD, seed=0)
    run_task_here("train_text", config_of(tmp_path, 1))
    publish(cache, NEW, seed=1)
    old.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"^model\.model_path: .*: hf download {NAME} --revision {OLD}$"):
        run_task_here("train_text", config_of(tmp_path, 2, load_checkpoint_path="auto"))


def test_it_is_downloaded_where_the_setting_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, tmp_path, LANGUAGE)
    recorded = {"model": {"model_path": f"/other/machine/models--some-owner--Model-1.5/snapshots/{OLD}"}}
    pinned = pin_revisions({"model": {"model_path": NAME, "download": True}}, recorded)
    assert pinned["model"]["model_path"] == str(hub.folder) and hub.revisions == [OLD, OLD]
    assert sorted(hub.asked) == sorted(LANGUAGE)


def test_other_names_paths_and_lists_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, tmp_path, LANGUAGE)
    snapshot = f"/hub/models--some-owner--Model-1.5/snapshots/{OLD}"
    fields = {"model": {"model_path": "some-owner/other"}, "models": ["x", {"model_path": "/folder"}, 3], "lr": 0.1}
    recorded = {"model": {"model_path": snapshot}, "models": [snapshot, {"model_path": snapshot}]}
    assert pin_revisions(fields, recorded) == fields and hub.revisions == []
