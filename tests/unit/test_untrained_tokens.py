"""Tokens of a chat template that a base model has never been trained on, which adapters leave as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sfumato.commands.check_config import check_config
from sfumato.models.language.untrained_tokens import describe_untrained_tokens, untrained_tokens
from tests.tiny import run_task_here, write_config
from tests.tiny_tokenizers import build_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MARKERS = ["<|im_start|>", "<|im_end|>"]


def write_embeddings(folder: Path, embeddings: torch.Tensor) -> Path:
    save_file({"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings + 1}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(chat_template=CHATML)


@pytest.fixture
def embeddings(tokenizer: Any) -> torch.Tensor:
    """Rows around a mean that is not zero, as trained ones lie."""
    generator = torch.Generator().manual_seed(0)
    return 0.3 + torch.randn(len(tokenizer) + 50, 64, generator=generator)


def test_trained_tokens_are_not_named(tokenizer: Any, embeddings: torch.Tensor, tmp_path: Path) -> None:
    assert describe_untrained_tokens(write_embeddings(tmp_path, embeddings), tokenizer) == []


@pytest.mark.parametrize("kind", ["zero", "tiny", "equal", "mean"])
def test_reserved_tokens_are_named(kind: str, tokenizer: Any, embeddings: torch.Tensor, tmp_path: Path) -> None:
    ids = tokenizer.convert_tokens_to_ids([*MARKERS, "[INST]"])  # of the last the template knows nothing
    rows = {"zero": 0.0, "tiny": 1e-4 * embeddings[ids], "equal": embeddings[5].clone(), "mean": embeddings.mean(dim=0)}
    embeddings[ids] = torch.as_tensor(rows[kind])
    assert untrained_tokens(write_embeddings(tmp_path, embeddings.bfloat16()), tokenizer) == MARKERS


def test_one_token_that_was_added_is_named(tokenizer: Any, embeddings: torch.Tensor, tmp_path: Path) -> None:
    embeddings[tokenizer.convert_tokens_to_ids("<|im_end|>")] = embeddings.mean(dim=0)
    (line,) = describe_untrained_tokens(write_embeddings(tmp_path, embeddings), tokenizer)
    assert "writes <|im_end|>, whose embeddings" in line and "take the model's chat version" in line


def test_what_transformers_adds_is_named_by_runs_with_adapters(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **settings))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|finish|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|begin|>{{ m.content }}<|finish|>{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert untrained_tokens(tmp_path, tokenizer) == ["<|begin|>", "<|finish|>"]

    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"model_path": str(tmp_path), "lora": {"rank": 2}},
        "data": {"train_path": str(tmp_path / "rows.jsonl"), "max_seq_len": 64},
        "train": {"output_dir": str(tmp_path / "run"), "device": "cpu", "max_steps": 1},
    }
    line = describe_untrained_tokens(tmp_path, tokenizer)[0]
    assert line in check_config(write_config(config, tmp_path / "run.yaml")).notes
    run_task_here("train_text", config)
    assert line in (tmp_path / "run" / "log.txt").read_text()

    del config["model"]["lora"]
    assert line not in check_config(write_config(config, tmp_path / "run.yaml")).notes, "all of it is trained"


def test_without_a_template_or_weights_nothing_is_said(embeddings: torch.Tensor, tmp_path: Path) -> None:
    assert describe_untrained_tokens(write_embeddings(tmp_path, 0 * embeddings), build_tokenizer()) == []
    assert describe_untrained_tokens(tmp_path / "not_downloaded", build_tokenizer(chat_template=CHATML)) == []
