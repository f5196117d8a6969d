"""Exports: what the run wrote, what is written later from a checkpoint, and adapters that are merged."""

import json
import re
import shutil
import types
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from sfumato.checkpoint.export import export_model
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config, merge
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.config.tasks import schema_of
from sfumato.errors import CheckpointError, ConfigError
from sfumato.evaluation.model_files import check_model_is_here
from sfumato.evaluation.sources import find_sources
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.optim.ema import Ema
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import whole_weights
from sfumato.tracking.atomic_folders import list_checkpoints
from tests.tiny import (
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    weights_in,
)

ALONE = Mesh(Layout(), torch.device("cpu"))
LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}}
RUNS = {
    "train_dit, averaged": ("train_dit", tiny_dit_config, {"train": {"ema_decay": 0.9}}),
    "train_dit, adapters": ("train_dit", tiny_dit_config, LORA),
    "train_dit_dpo": ("train_dit_dpo", tiny_dit_dpo_config, {}),
    "rl_diffusion": ("rl_diffusion", tiny_rl_config, {"train": {"max_steps": 2}, "eval": {"every_steps": 2}}),
    "train_text": ("train_text", tiny_text_config, {}),
    "train_text, adapters": ("train_text", tiny_text_config, LORA),
    "train_text, experts": ("train_text", tiny_text_config, {"kind": "qwen3_moe", "train": {"expert_bias_rate": 0.01}}),
    "train_text_dpo": ("train_text_dpo", tiny_text_config, {"data": {"data_type": "preference"}}),
    "train_text_kto": ("train_text_kto", tiny_text_config, {"data": {"data_type": "unpaired"}}),
    "rl_text": ("rl_text", tiny_text_rl_config, {"train": {"max_steps": 2}}),
    "rl_text, adapters": ("rl_text", tiny_text_rl_config, LORA | {"train": {"max_steps": 1}}),
}


QUICK = ("train_dit, averaged", "train_text, adapters", "train_text, experts", "train_text_dpo", "rl_text, adapters")


@pytest.mark.parametrize("name", [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow) for run in RUNS])
def test_a_checkpoint_is_exported_as_the_run_did_it(name, tmp_path):
    task, config, overrides = RUNS[name]
    run = run_task_here(task, config(tmp_path, **overrides))
    said = export_checkpoint(run, tmp_path / "out")
    assert weights_in(tmp_path / "out") == weights_in(run / "hf_ckpt")
    files = [
        {str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (tmp_path / "out", run / "hf_ckpt")
    ]
    assert files[0] == files[1] - {"README.md"}  # the model card
    for path in [*run.glob("hf_ckpt/config.json"), *tmp_path.glob("out/config.json")]:
        settings = json.loads(path.read_text())
        if "rope_parameters" in settings:  # of a language model, not of diffusers
            assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    averaged = "averaged" if "averaged" in name else "trained"
    assert said == f"{tmp_path / 'out'}: {averaged} weights of {max(list_checkpoints(run / 'checkpoints').items())[1]}"


def test_adapters_are_merged_on_request(tmp_path):
    run = run_task_here("train_dit", tiny_dit_config(tmp_path, **merge(LORA, {"train": {"lr": 0.05}})))
    export_checkpoint(run, tmp_path / "merged", merge=True)
    base = StableDiffusion3Pipeline.from_pretrained(tmp_path / "pipeline").transformer.state_dict()
    merged = StableDiffusion3Pipeline.from_pretrained(tmp_path / "merged").transformer.state_dict()
    adapter = load_file(next((run / "hf_ckpt").glob("*.safetensors")))
    assert merged.keys() == base.keys()
    changed = 0
    for name, value in base.items():
        key = f"transformer.{name.removesuffix('.weight')}"
        update = 0.0
        if f"{key}.lora_A.weight" in adapter:
            update = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]  # alpha / rank is part of it
            changed += bool(update.any())
        torch.testing.assert_close(merged[name], value + update)
    assert changed > 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return run_task_here("train_dit", tiny_dit_config(folder, train={"max_steps": 3, "save_steps": 1}))


def test_one_of_several_checkpoints(finished, tmp_path):
    for step, folder in list_checkpoints(finished / "checkpoints").items():
        export_checkpoint(folder, tmp_path / str(step))
    assert weights_in(tmp_path / "1") != weights_in(tmp_path / "2") != weights_in(finished / "hf_ckpt")
    assert weights_in(tmp_path / "3") == weights_in(finished / "hf_ckpt")


def test_a_damaged_checkpoint_is_passed_over_or_refused(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    path = run / "checkpoints" / "global_step_3" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    said = export_checkpoint(run, tmp_path / "out").splitlines()
    assert said[0].startswith(f"checkpoint passed over: {path} has")
    assert said[1].endswith("global_step_2")
    with pytest.raises(CheckpointError, match="bytes instead of"):
        export_checkpoint(path.parent, tmp_path / "other")


def test_a_run_without_an_intact_checkpoint_names_its_export(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in run.glob("checkpoints/*/__0_0.distcp"):
        path.write_bytes(b"")
    has_export = f"; {run / 'hf_ckpt'} has the weights of its last export"
    for use in (lambda: export_checkpoint(run, tmp_path / "out"), lambda: find_sources([str(run)], False, print)):
        with pytest.raises(CheckpointError, match=f"no checkpoint in .* is intact{re.escape(has_export)}"):
            use()
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match=f"has no checkpoints{re.escape(has_export)}"):
        export_checkpoint(run, tmp_path / "out")
    shutil.rmtree(run / "hf_ckpt")
    with pytest.raises(CheckpointError, match="has no checkpoints; the run has no export, either"):
        export_checkpoint(run, tmp_path / "out")


def test_nothing_that_stands_there_is_overwritten(finished, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(finished, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_is_no_run_and_what_needs_its_data(finished, tmp_path):
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    environment = run / "environment.json"
    environment.write_text(json.dumps({"task": "train_autoencoder"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"train_autoencoder needs its data.*load_checkpoint_path auto"):
        export_checkpoint(run, tmp_path / "out")
    newest = max(list_checkpoints(run / "checkpoints"))
    ended = {"task": "train_autoencoder", "finished": "2026-11-28", "total_steps": newest}
    environment.write_text(json.dumps(ended), encoding="utf-8")
    assert "copy of" in export_checkpoint(run, tmp_path / "copy"), "what the run itself says at its end"
    assert (tmp_path / "copy/model_index.json").is_file()
    environment.unlink()
    with pytest.raises(ConfigError, match=r"environment\.json does not name the task"):
        export_checkpoint(run, tmp_path / "out")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="is empty"):
        export_checkpoint(run, tmp_path / "out")


def test_a_checkpoint_of_another_model_is_refused(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    text = (run / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(text.replace("lora: null", "lora: {rank: 4, alpha: 8}"), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"it has no 'model/.*lora_A"):
        export_checkpoint(run, tmp_path / "out")


def test_whole_weights_are_not_copied_and_the_model_stays_as_it_was(finished, tmp_path):
    pipeline = finished.parent / "pipeline"
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline), max_sequence_length=7))
    for name, whole_weight in whole_weights(model.trained, ALONE, share=True).items():
        assert whole_weight.data_ptr() == model.trained.state_dict()[name].data_ptr()
    lora = ModelConfig(model_path=str(pipeline), max_sequence_length=7, lora=LoraConfig(rank=4, alpha=8))
    model = build_diffusion_model(lora)
    ema = Ema(model.trained, 0.9)
    with torch.no_grad():
        for parameter in trainable_parameters(model.trained).values():
            parameter.normal_()
    before = {name: weight.clone() for name, weight in model.trained.state_dict().items()}
    average = {name: average.clone() for name, average in ema.averages.items()}
    for merged in (False, True):
        export_model(model, ema, tmp_path / "out", ALONE, merged)
        assert all(torch.equal(weight, before[name]) for name, weight in model.trained.state_dict().items())
        assert all(torch.equal(value, average[name]) for name, value in ema.averages.items())
    base = StableDiffusion3Pipeline.from_pretrained(pipeline).transformer.state_dict()
    result = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out").transformer.state_dict()
    assert all(torch.equal(value, result[name]) for name, value in base.items()), (
        "the average is of adapters that are zero"
    )


def test_a_part_of_a_model_that_is_not_here_is_named(tmp_path, monkeypatch):
    config = load_config(schema_of("train_omni"), "configs/tiny/train_omni.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.foundation\.config_path .* is not here \(the path starts at"):
        check_model_is_here(types.SimpleNamespace(config=config, folder=tmp_path))
