"""The model card of an export, made from a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from sfumato.tracking.model_card import write_card

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps from a model of the hub's cache, whose card names a licence."""
    base = tmp_path / "models--some-owner--Model-1.5" / "snapshots" / REVISION
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# The base\n")
    folder = tmp_path / "letters"
    folder.mkdir()
    config = {"model": {"model_path": str(base)}, "data": {"train_path": "/home/somebody/rows.jsonl"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"algorithm": {"recipe": "grpo"}}))
    (folder / "environment.json").write_text(json.dumps({"task": "rl_text", "packages": {"torch": "2.13.0"}}))
    lines = [{"step": step, "loss": 1.0 / (step + 1), "eval/reward/total": 0.25 * step} for step in (0, 1, 2)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_the_hubs_own_reader_understands_it(run: Path, tmp_path: Path) -> None:
    export = tmp_path / "exported"
    export.mkdir()
    (export / "adapter_config.json").write_text("{}")
    write_card(run, export)
    card = ModelCard.load(export / "README.md")
    fields = card.data.to_dict()
    assert fields["base_model"] == "some-owner/Model-1.5" and fields["license"] == "apache-2.0"
    assert fields["library_name"] == "peft" and fields["base_model_relation"] == "adapter"
    assert fields["tags"] == ["sfumato", "reinforcement-learning", "lora"]
    assert f"from some-owner/Model-1.5 at revision {REVISION}" in card.text
    assert "| `reward/total` | 0 | 0.5 | 0 to 2 |" in card.text and "recipe: grpo" in card.text
    assert "somebody" not in card.text and "train_path: rows.jsonl" in card.text
    with Image.open(export / "curves.png") as picture:
        assert picture.size[0] > 400


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/somebody/my rows/train.jsonl", "train.jsonl"),
        ("/home/somebody/a.jsonl,/home/somebody/b.jsonl", "a.jsonl,b.jsonl"),
        ("~/somebody/rows/", "rows/"),
        ("s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl"),
    ],
)
def test_a_card_names_no_folders_of_the_machine(run: Path, tmp_path: Path, path: str, shown: str) -> None:
    rewards = [
        {"type": "function", "path": "/home/somebody/judge.py:ask"},
        {"type": "judge", "rubric": "Think and/or do."},
    ]
    config = {"data": {"train_path": path}, "reward": {"rewards": rewards}, "prompts": ["/home/somebody/one.txt"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    export = tmp_path / "exported"
    export.mkdir()
    write_card(run, export)
    text = (export / "README.md").read_text()
    assert "somebody" not in text and f"train_path: {shown}\n" in text
    assert "path: judge.py:ask\n" in text and "Think and/or do." in text and "- one.txt\n" in text


def test_what_the_run_does_not_know_is_left_out(run: Path, tmp_path: Path) -> None:
    """No licence and no base model are made up."""
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"config_path": "tiny.yaml"}}))
    (run / "metrics.jsonl").unlink()
    export = tmp_path / "exported"
    export.mkdir()
    (export / "model_index.json").write_text("{}")
    write_card(run, export)
    fields = ModelCard.load(export / "README.md").data.to_dict()
    assert fields == {"library_name": "diffusers", "tags": ["sfumato", "reinforcement-learning"]}
    assert not (export / "curves.png").exists() and "Evaluation" not in (export / "README.md").read_text()
