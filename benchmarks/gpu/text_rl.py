"""GRPO of a language model of 0.6 B with the embedded engine: tokens drawn and trained a second, seconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.sft import QWEN3_0_6B, TINY, write_yaml
from benchmarks.gpu.watched import run_steps
from sfumato.models.language.load import build_byte_tokenizer

BOUNDS = (
    Bound(
        "drawn_tokens_per_s",
        3000,
        "the embedded engine is bound by launches: draw more answers at a time, or take vLLM",
        least=True,
        real=True,
    ),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {
        mode: lambda cell_setting, mode=mode: measure(cell_setting, mode)
        for mode in ("eager", "compile")[: 1 if setting.tiny else 2]
    }


def measure(setting: Setting, mode: str) -> dict[str, Any]:
    """Rates of one cell."""
    config = text_rl_config(setting.scratch / mode, setting)
    config["train"]["compile"] = mode == "compile"
    steps = run_steps("rl_text", config, setting, 1, setting.size(2, 1))
    rates = steps.rates("tokens")
    drawn = [line["rollout/tokens"] for line in steps.metrics if "rollout/tokens" in line][-steps.count :]
    generate, update = steps.mean("time/generate_s"), steps.mean("time/update_s")
    mean_drawn = sum(drawn) / len(drawn)
    rates |= {"generate_s": generate, "update_s": update, "drawn_tokens": mean_drawn}
    return rates | {"drawn_tokens_per_s": mean_drawn / generate}


def text_rl_config(folder: Path, setting: Setting) -> dict[str, Any]:
    """The configuration of ``tasks/rl_text.py``: 128 answers of up to 128 tokens, which random weights seldom end."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, group, tokens = setting.size((16, 8, 128), (2, 4, 8))
    description = setting.size(QWEN3_0_6B, TINY)
    return {
        "model": {
            "config_path": write_yaml(folder / "model.yaml", description),
            "tokenizer_path": write_tokenizer(folder / "tokenizer", description["vocab_size"]),
        },
        "data": {
            "synthetic": {"problem": "add", "max_length": 2, "num_rows": 256},
            "max_prompt_tokens": 64,
            "chat_template": "none",
        },
        "rollout": {"num_prompts": prompts, "n": group, "max_new_tokens": tokens},
        "reward": {"rewards": [{"type": "tests.text_rewards:Ascii"}]},
        "algorithm": {"recipe": "grpo"},
        "train": {
            "output_dir": str(folder / "run"),
            "max_tokens_per_micro_batch": setting.size(16_384, 256),
            "lr": 1.0e-6,
            "mixed_precision": "bf16",
        },
        "eval": {"num_prompts": 2, "max_new_tokens": 4},
    }


def write_tokenizer(folder: Path, size: int) -> str:
    """Saves the tokenizer of bytes, filled up to a model's vocabulary: an answer with a token that the tokenizer lacks
    is not scored, and random weights draw all of them. Returns its folder."""
    build_byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"w{token}": token for token in range(len(vocabulary), size)}
    path.write_text(json.dumps(described), encoding="utf-8")
    return str(folder)
