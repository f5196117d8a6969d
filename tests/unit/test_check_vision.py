"""``sfumato check`` of models that see: their memory and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from sfumato.commands.check_config import FITS, WRONG, Findings, check_config
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.errors import ConfigError
from sfumato.models.estimate import meta_vision
from sfumato.models.estimate.meta_models import plan_language_model
from sfumato.models.language.load import read_model_config
from sfumato.parallel.layout import Layout
from tests.tiny import ROOT, write_config
from tests.tiny_omni import tiny_omni_config
from tests.tiny_vision import data_url, picture, tiny_media_config, tiny_vision_config
from tests.tiny_vision_rl import tiny_vision_rl_config
from tests.unit.test_memory_plan import Saved

KINDS = ["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "llava_onevision"]
KINDS += ["qwen3_5", "glm4v", "gemma4", "llava", "llava_next", "smolvlm", "idefics3"]


def planned(tmp_path: Path, kind: str, **overrides: Any) -> Any:
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path, kind, **overrides))
    return config, plan_language_model(config.model, config.data, config.train, Layout(), on_gpu=False)


def really_saved(module: nn.Module, images: dict[str, torch.Tensor]) -> int:
    saved = Saved(module)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
        result = tree_leaves(dict(module.get_image_features(**images)))
        loss = torch.stack([leaf.float().sum() for leaf in result if isinstance(leaf, torch.Tensor)]).sum()
    loss.backward()
    return saved.total


@pytest.mark.parametrize("kind", KINDS)
def test_what_encoders_keep_is_that_of_a_real_forward_pass(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    config, plan = planned(tmp_path, kind)
    reader = plan.vision.reader
    pictures = [Image.new("RGB", (32 + 16 * number, 48), "red") for number in range(12)]
    shapes = reader.place(pictures)[1]
    tokens = int(shapes.prod(axis=1).sum() * reader.tokens_per_patch)
    module = AutoModelForImageTextToText.from_config(read_model_config(config.model, sees=True)).train()
    expected = really_saved(module, reader.process_opened(pictures))
    actual = plan.encoder_bytes / config.data.max_seq_len * tokens
    assert actual == pytest.approx(expected, rel=0.15)


def test_an_encoder_of_unknown_form_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_vision, "_counted", {})
    monkeypatch.setattr(meta_vision, "_encoder_blocks", lambda module: {})  # as of PaddleOCR-VL
    with pytest.raises(ConfigError, match=r"LlavaForConditionalGeneration cannot be predicted, .*: start a run"):
        planned(tmp_path, "llava")


@pytest.mark.parametrize(("freeze", "share"), [([], 1.0), ([r"visual\.(blocks|patch_embed|pos_embed)"], 0.5)])
def test_frozen_encoders_keep_less(freeze: list[str], share: float, tmp_path: Path) -> None:
    whole = planned(tmp_path, "qwen3_vl")[1].encoder_bytes
    part = planned(tmp_path, "qwen3_vl", model={"freeze": freeze})[1].encoder_bytes
    assert 0 < part <= share * whole


def checked(tmp_path: Path, config: dict[str, Any], **settings: Any) -> Findings:
    return check_config(write_config(config, tmp_path / "check.yaml"), **settings)


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)])
def test_a_run_that_fits_is_said_to_fit(kind: str, tmp_path: Path) -> None:
    result = checked(tmp_path, tiny_vision_config(tmp_path, kind))
    assert result.problems == [] and result.exit_code == FITS
    assert result.data.training[0].num_tokens > 0 < result.data.training[0].longest
    assert result.model.ranks[0].parts["activations of encoders"] > 0
    assert any("every token were one of an image" in note for note in result.notes)


def test_ranks_share_what_is_not_of_encoders(tmp_path: Path) -> None:
    one = checked(tmp_path, tiny_vision_config(tmp_path, "qwen3_vl"), with_data=False).model.ranks[0].parts
    cut = {"train": {"tensor_parallel_size": 2}}
    two = checked(tmp_path, tiny_vision_config(tmp_path, "qwen3_vl", **cut), with_data=False, num_ranks=2)
    parts = two.model.ranks[0].parts
    assert two.problems == [] and parts["weights"] < one["weights"]
    assert parts["activations of encoders"] == one["activations of encoders"]
    cut = {"train": {"pipeline_parallel_size": 2}}
    stages = checked(tmp_path, tiny_vision_config(tmp_path, "qwen3_vl", **cut), with_data=False, num_ranks=2)
    assert stages.problems == []
    first, last = (rank.parts for rank in stages.model.ranks)
    assert first["activations of encoders"] == 2 * one["activations of encoders"], "of two micro-batches that wait"
    assert "activations of encoders" not in last and last["weights"] < first["weights"]
    assert first["weights"] + last["weights"] == pytest.approx(one["weights"], rel=1e-3), "each has rotary buffers"
    apart = checked(tmp_path, tiny_vision_config(tmp_path, "gemma3", **cut), with_data=False, num_ranks=2)
    assert "pipeline_parallel_size: Gemma3" in apart.problems[0]


def test_rl_with_images_is_predicted_and_its_prompts_are_read(tmp_path: Path) -> None:
    config = tiny_vision_rl_config(tmp_path)
    result = checked(tmp_path, config)
    assert result.problems == [] and result.exit_code == FITS
    assert result.model.ranks[0].parts["activations of encoders"] > 0 < result.data.training[0].num_tokens
    (tmp_path / "broken.jsonl").write_text('{"prompt": "<image>What?", "images": ["none.png"], "answer": "1"}\n')
    config["data"]["train_path"] = str(tmp_path / "broken.jsonl")
    assert "none.png" in checked(tmp_path, config).problems[0]


def test_what_is_not_predicted_is_said(tmp_path: Path) -> None:
    result = checked(tmp_path, tiny_omni_config(tmp_path))
    assert result.exit_code == FITS and result.model is None
    assert (
        "the data was not looked at" in result.notes[0] and "not predicted for tasks/train_omni.py" in result.notes[1]
    )
    notes = check_config(ROOT / "configs/omni/image_tokenizer.yaml").notes
    assert "not predicted for tasks/train_image_tokenizer.py" in notes[0]


def write_rows(path: Path, count: int, broken: dict[int, dict[str, Any]], good: str) -> None:
    rows = []
    for index in range(count):
        part = broken.get(index, {"type": "image", "image": good})
        content = [part, {"type": "text", "text": "What?"}]
        answer = {"role": "assistant", "content": str(index)}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def test_the_head_of_every_image_is_read(tmp_path: Path) -> None:
    config, good = tiny_vision_config(tmp_path, "qwen3_vl"), data_url(picture(16, 16))
    (tmp_path / "page.png").write_text("<html>", encoding="utf-8")
    broken = {
        70: {"type": "image", "path": "none.png"},  # between the rows that are looked at whole
        155: {"type": "image", "path": "page.png"},
        301: {"type": "image", "image": data_url(b"nothing")},
    }
    write_rows(Path(config["data"]["train_path"]), 600, broken, good)
    result = checked(tmp_path, config)
    assert (
        result.exit_code == WRONG and result.data.training[0].num_heads + result.data.training[0].num_looked_at == 600
    )
    said = "\n".join(result.problems)
    for row, name in ((71, "none.png"), (156, "page.png"), (302, "")):
        assert any(f"line {row}:" in line and name in line for line in said.splitlines()), said
    config["data"]["max_bad_rows"] = 3
    assert checked(tmp_path, config).exit_code == FITS


def test_the_heads_of_videos_are_read(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    config = tiny_media_config(tmp_path, "qwen2_5_vl")
    assert checked(tmp_path, config).exit_code == FITS
    (tmp_path / "cut.avi").write_bytes(b"RIFF")
    write_rows(tmp_path / "media.jsonl", 300, {200: {"type": "video", "video": "cut.avi"}}, data_url(picture(16, 16)))
    result = checked(tmp_path, config)
    assert result.exit_code == WRONG and "line 201:" in result.problems[0] and "cut.avi" in result.problems[0]
