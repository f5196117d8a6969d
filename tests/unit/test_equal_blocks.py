"""Of equal blocks two are run, and what is counted is the same as if all were."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from sfumato.config.load import load_config
from sfumato.config.sections import LoraConfig, ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.models.estimate import activation_memory as saved_bytes
from sfumato.models.estimate.activation_memory import SavedBytes, run_some
from sfumato.models.estimate.memory_plan import count_activations
from sfumato.models.estimate.meta_models import diffusion_model_on_meta, plan_diffusion_model, plan_language_model
from sfumato.parallel.layout import Layout
from tests import tiny_families
from tests.unit.test_flops import KINDS

FAMILIES = ("tiny_sd3", "tiny_flux", "tiny_wan", "tiny_qwen_image")
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"mixed_precision": "bf16"}, {"tensor_parallel_size": 2})


def compare(monkeypatch: pytest.MonkeyPatch, count: Callable[[], SavedBytes], fewer: bool = True) -> None:
    """Counts with equal blocks left out, and with all of them run."""
    ran: list[int] = []
    block_left = saved_bytes._Counter.block_left

    def watched(self: Any, index: int, made: list[torch.Tensor]) -> Any:
        ran.append(index)
        return block_left(self, index, made)

    monkeypatch.setattr(saved_bytes._Counter, "block_left", watched)
    some = count()
    num_run = len(ran)
    monkeypatch.setattr(saved_bytes, "RUNS", 1000)
    everything = count()
    assert some == everything
    assert len(ran) - num_run == len(everything.blocks)
    assert (num_run < len(everything.blocks)) == fewer


@pytest.mark.parametrize(("kind", "settings"), zip(KINDS, cycle(SETTINGS)), ids=str)
def test_language_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    fields = {**KINDS[kind], "num_hidden_layers": 6}
    if "layer_types" in fields:
        fields["layer_types"] = (6 * fields["layer_types"])[:6]
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model_type": kind, **fields}))
    lora = LoraConfig(rank=2) if settings.get("mixed_precision") else None
    model = LanguageModelConfig(config_path=str(tmp_path / "model.yaml"), tokenizer_path="none", lora=lora)
    data = TextDataConfig(train_path="none.jsonl", max_seq_len=64)
    train = load_config(TextTrainConfig, overrides={"output_dir": str(tmp_path), **settings})
    layout = Layout.resolve(train, train.tensor_parallel_size)
    planned = plan_language_model(model, data, train, layout, on_gpu=False)
    compare(monkeypatch, lambda: count_activations(planned, train, layout))


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusion_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    description = getattr(tiny_families, family)()
    transformer = description["transformer"]
    transformer |= {name: 5 for name in ("num_layers", "num_single_layers") if name in transformer}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(description))
    config = ModelConfig(config_path=str(tmp_path / "model.yaml"), max_sequence_length=7)
    planned = plan_diffusion_model(diffusion_model_on_meta(config, "no"), Layout(), 2, (32, 32))
    train = load_config(TextTrainConfig, overrides={"output_dir": str(tmp_path)})
    compare(monkeypatch, lambda: count_activations(planned, train, Layout()))


class Block(nn.Module):
    def __init__(self, width: int, times: float = 1.0) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(width, width), times

    def forward(self, hidden: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.linear(hidden) * self.times, text, None


def test_blocks_that_differ_are_run_and_what_is_given_is_given_back() -> None:
    blocks = {str(number): Block(4, times) for number, times in enumerate((1.0, 1.0, 1.0, 2.0, 1.0, 2.0))}
    ran: list[int] = []
    repeated: list[tuple[int, int]] = []
    text = torch.zeros(1)
    hidden = torch.ones(2, 4)
    with run_some(
        blocks,
        lambda index, made: ran.append(index) or index,
        lambda index, made, result: repeated.append((index, result)),
    ):
        for block in blocks.values():
            hidden, same_text, nothing = block(hidden, text)
            assert same_text is text and nothing is None and hidden.shape == (2, 4) and hidden.grad_fn is not None
    # the first gets an input without gradient, so it is of a kind of its own
    assert ran == [0, 1, 2, 3, 5] and repeated == [(4, 2)]
    assert all("forward" not in vars(block) for block in blocks.values())


def test_a_block_that_returns_a_view_of_its_input_is_always_run() -> None:
    class View(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.view(hidden.shape)

    blocks = {str(number): View() for number in range(4)}
    ran: list[int] = []
    hidden = torch.ones(2, 4)
    with run_some(blocks, lambda index, made: ran.append(index), lambda *args: None):
        for block in blocks.values():
            hidden = block(hidden)
    assert ran == [0, 1, 2, 3]
