"""``tasks/rl_text.py`` with vLLM as its engine, for real: weights reach it, and its log-probs are the actor's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from sfumato.models.language_load import build_byte_tokenizer
from sfumato.tracking.trackers import read_jsonl
from tests.engines.served_model import CPU_ENVIRONMENT, PYTHON_VARIABLE
from tests.tiny import run_task_here, tiny_language_description, tiny_text_rl_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON_VARIABLE not in os.environ,
        reason=f"{PYTHON_VARIABLE} does not name the python of an environment with vLLM",
    ),
]


def test_a_run_draws_with_vllm(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    described = {**tiny_language_description("qwen3"), "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    config = CONFIG_MAPPING["qwen3"](**{name: value for name, value in described.items() if name != "model_type"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    build_byte_tokenizer().save_pretrained(tmp_path / "model")
    engine = {
        "type": "vllm",
        "program": str(Path(os.environ[PYTHON_VARIABLE]).with_name("vllm")),
        "arguments": ["--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
        "dtype": "float32",
        "max_model_len": 128,
    }
    settings = {
        "model": {"config_path": None, "tokenizer_path": None, "model_path": str(tmp_path / "model")},
        "rollout": {"hybrid_engine": False, "engine": engine, "tolerance": 1e-3, "temperature": 0.8},
        "train": {"max_steps": 3, "lr": 1e-2},
    }
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "mismatch/log_ratio_max" in line]
    assert len(lines) == 3 and all(0 < line["mismatch/log_ratio_max"] < 3e-5 for line in lines)
    assert [line["staleness/max"] for line in lines] == [0.0, 0.0, 0.0]
