"""The model that a KL is to, of any layout of rows and any architecture: its log-probs are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rollout.debug.dumps import dump_path, read_dump
from tests.survey.tiny_configs import tiny_config
from tests.tiny import run_task_here, tiny_text_rl_config

BOUND = 2e-5


def write_model(folder: Path, name: str, seed: int) -> str:
    """A model of that architecture for the tokenizer of bytes, with weights that say much."""
    config = tiny_config(name)
    config.vocab_size = 259
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return str(folder)


def farthest(folder: Path, step: int, model: str, field: str) -> float:
    """How far a dump's log-probs of drawn tokens are from those of transformers' module for each answer alone."""
    dump = read_dump(dump_path(folder, step))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    for turns in dump.rollout.sequences:
        for sequence in turns:
            tokens = torch.from_numpy(sequence.token_ids).long()[None]
            with torch.no_grad():
                log_probs = plain(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
            actual = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
            expected.append(actual[torch.from_numpy(sequence.drawn[1:])])
    return float((torch.cat(expected) - dump.token_values[field]).abs().max())


def run(tmp_path: Path, policy: str, algorithm: dict[str, Any], **model: Any) -> Path:
    settings = {
        "model": {"config_path": None, "tokenizer_path": None, "model_path": policy, **model},
        "algorithm": algorithm,
        "rollout": {"dump": True},
        "train": {"max_steps": 2, "lr": 1e-2, "probe": "stop"},
        "eval": {"num_prompts": 2},
    }
    return run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("bloom", None),  # ALiBi: the probe finds rows of documents
        ("lfm2", None),  # convolutions: likewise
        ("qwen3", "documents"),
    ],
)
def test_a_reference_has_the_rows_of_the_policy(name: str, rows: str | None, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", name, 0)
    asked = {} if rows is None else {"rows": rows}
    folder = run(tmp_path, policy, {"recipe": "grpo", "kl": {"coef": 0.05}}, **asked)
    for step in (1, 2):  # after an update the policy is another
        assert farthest(folder, step, policy, "reference_log_probs") < BOUND
    assert farthest(folder, 2, policy, "rollout_log_probs") > 1e-3


@pytest.mark.parametrize(
    ("policy", "teacher"),
    [
        ("qwen3", "bloom"),
        pytest.param("bloom", "qwen3", marks=pytest.mark.slow),
        pytest.param("qwen3", "gemma2", marks=pytest.mark.slow),
        pytest.param("qwen3", "lfm2", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_of_another_architecture_has_rows_of_its_own(policy: str, teacher: str, tmp_path: Path) -> None:
    paths = [write_model(tmp_path / name, name, seed) for seed, name in enumerate((policy, teacher))]
    folder = run(tmp_path, paths[0], {"recipe": "distillation", "teacher": paths[1]})
    for step in (1, 2):
        assert farthest(folder, step, paths[1], "reference_log_probs") < BOUND
    assert farthest(folder, 1, paths[0], "rollout_log_probs") < BOUND
