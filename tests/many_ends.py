"""Runs of RL of a language model with partial rollouts, whose answers end at many lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sfumato.config.load import merge
from sfumato.models.language.load import build_byte_tokenizer
from tests.tiny import tiny_language_description, tiny_text_rl_config

P, M, N = 4, 7, 4
"""Groups of an iteration, groups that are drawn at a time, answers of a group."""

PARTIAL = {
    "num_prompts": P,
    "n": N,
    "over_sampling_batch_size": M,
    "partial_rollout": True,
    "max_new_tokens": 24,
    "max_staleness": 2,
}


def write_model(folder: Path) -> Path:
    """Saves a model with random weights that likes to end, but not everywhere, and returns its folder."""
    if not folder.exists():
        description = tiny_language_description()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[description["model_type"]](**description))
        with torch.no_grad():
            model.lm_head.weight[description["eos_token_id"]] *= 5
        model.save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
    return folder


def partial_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A run of ``tasks/rl_text.py`` of 4 iterations; its folder is ``tmp_path/run``."""
    config = tiny_text_rl_config(tmp_path, rollout=PARTIAL)
    config["model"] = {"model_path": str(write_model(tmp_path / "model"))}
    return merge(config, overrides)
