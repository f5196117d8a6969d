"""``tasks/rl_text.py`` with vLLM as its engine and images in the prompts, for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sfumato.config.load import merge
from sfumato.tracking.json_lines import read_jsonl
from tests.engines.served_model import CPU_ENVIRONMENT, NEEDS_VLLM, vllm_program
from tests.tiny import run_task_here, write_config
from tests.tiny_vision import tiny_vision_config, tiny_vision_description
from tests.tiny_vision_rl import tiny_vision_rl_config

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL in files, whose heads vLLM has kernels for."""
    folder = tmp_path_factory.mktemp("model")
    described = tiny_vision_description("qwen3_vl")
    described["text_config"] |= {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    described["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
    described["vision_config"] |= {"out_hidden_size": 64, "hidden_size": 64}
    config = tiny_vision_config(folder, "qwen3_vl", train={"max_steps": 1}, eval={"every_steps": 0})
    config["model"]["config_path"] = str(write_config(described, folder / "model.yaml"))
    return run_task_here("train_text", config) / "hf_ckpt"


def test_what_vllm_draws_for_images_has_the_log_probs_of_training(model: Path, tmp_path: Path) -> None:
    vllm = {
        "type": "vllm",
        "program": vllm_program(),
        "arguments": ["--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
        "dtype": "float32",
        "max_model_len": 256,
    }
    settings = {
        "model": {"config_path": None, "tokenizer_path": None, "model_path": str(model)},
        "rollout": {"hybrid_engine": False, "engine": vllm, "tolerance": 1e-3},
        "train": {"max_steps": 3, "lr": 1e-2},
    }
    folder = run_task_here("rl_text", merge(tiny_vision_rl_config(tmp_path), settings))
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "mismatch/log_ratio_max" in line]
    results = [line["mismatch/log_ratio_max"] for line in lines]
    print(results)
    assert len(results) == 3 and max(results) < 3e-5
    moved, first = load_file(folder / "hf_ckpt/model.safetensors"), load_file(model / "model.safetensors")
    assert any(not torch.equal(moved[name], first[name]) for name in first if "visual" in name)
