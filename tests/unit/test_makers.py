"""Configurations that make what another run takes: when they are run, and what replaces them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sfumato.commands.check_model import made_model
from sfumato.config.load import load_config, load_maker, parse_overrides
from sfumato.config.omni import TrainOmniConfig
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import ConfigError
from tests.tiny import ROOT, load_task, run_task_here, tiny_text_config, write_config

SHIPPED: list[tuple[Any, str, str, str]] = [
    (TextRLConfig, "quickstart/text_rl.yaml", "model_path", "made_by"),
    (TrainTextConfig, "quickstart/text_sft.yaml", "model_path", "made_by"),
    (TrainOmniConfig, "omni/numbers.yaml", "image_tokenizer", "image_tokenizer_made_by"),
]


@pytest.mark.parametrize(("schema", "file", "folder", "maker"), SHIPPED)
def test_a_folder_on_the_command_line_takes_the_place_of_what_the_file_would_make(
    schema: Any, file: str, folder: str, maker: str
) -> None:
    path = ROOT / "configs" / file
    assert getattr(load_config(schema, path).model, maker) is not None
    overridden = load_config(schema, path, parse_overrides([f"--model.{folder}", "my/model"])).model
    assert getattr(overridden, maker) is None and getattr(overridden, folder) == "my/model"
    both = parse_overrides([f"--model.{folder}", "my/model", f"--model.{maker}", "my/maker.yaml"])
    assert getattr(load_config(schema, path, both).model, maker) == "my/maker.yaml"
    other = load_config(schema, path, parse_overrides(["--train.seed", "1"])).model
    assert getattr(other, maker) is not None


def second_config(tmp_path: Path, folder: Path) -> dict[str, Any]:
    maker = tiny_text_config(tmp_path / "maker", train={"max_steps": 1})
    made_by = str(write_config(maker, tmp_path / "maker.yaml"))
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(folder), "made_by": made_by}
    return tiny_text_config(tmp_path / "second", model=model, train={"max_steps": 1})


def test_a_maker_of_another_folder_is_refused_before_it_trains(tmp_path: Path) -> None:
    config = second_config(tmp_path, tmp_path / "maker/run/hf_ckpd")
    task = load_task("train_text")
    for refused in (
        lambda: run_task_here(task, config),
        lambda: made_model(load_config(TrainTextConfig, overrides=config).model),
    ):
        with pytest.raises(
            ConfigError, match=r"hf_ckpd does not exist, and .*maker\.yaml makes another folder.*hf_ckpt"
        ):
            refused()
    assert not (tmp_path / "maker/run").exists()


def test_a_maker_of_the_folder_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    config = second_config(tmp_path, tmp_path / "maker" / "." / "run" / "hf_ckpt")
    model = load_config(TrainTextConfig, overrides=config).model
    maker = load_maker(TrainTextConfig, str(model.made_by), str(model.model_path), "model.model_path")
    assert maker.train.load_checkpoint_path == "auto"
