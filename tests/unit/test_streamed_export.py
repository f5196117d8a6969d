"""Exports whose weights come one at a time, against the files of transformers' ``save_pretrained``."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sfumato.models.language import streamed_export
from sfumato.models.language.hf_config import give_weights
from sfumato.models.language.streamed_export import lay_out, set_dtypes, write_streamed
from sfumato.parallel.weights import build_on_meta
from tests.survey.tiny_configs import tiny_config

GROUPS = {"qwen3_moe": 1, "deepseek_v3": 1, "gemma3_text": 1, "gpt_oss": 1, "hrm_text": 2}
"""Architectures (experts, tied embeddings, biases) and the most weights that are converted together."""


@pytest.mark.parametrize("kind", GROUPS)
def test_the_files_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    build = functools.partial(AutoModelForCausalLM.from_config, tiny_config(kind), dtype=torch.float32)
    torch.manual_seed(0)
    module = build()
    state = module.state_dict()
    float32 = {next(iter(state))}
    weights = {
        name: state[name] if name in float32 or state[name].dtype != torch.float32 else state[name].bfloat16()
        for name in [*dict(module.named_parameters()), *(state.keys() & dict(module.named_buffers()).keys())]
    }
    at_once = build_on_meta(build)
    give_weights(at_once, dict(weights))
    at_once.config.dtype = torch.bfloat16
    at_once.save_pretrained(tmp_path / "at once")

    plain = build_on_meta(build)
    set_dtypes(plain, torch.bfloat16, float32)
    layout = lay_out(plain)
    assert layout is not None and max(map(len, layout.groups.values())) >= GROUPS[kind]
    if GROUPS[kind] == 1:
        assert max(map(len, layout.groups.values())) == 1
    plain.config.dtype = torch.bfloat16
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def arriving() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, weight in {**weights, "not of the module": torch.ones(1)}.items():
            copy = weight.clone()
            alive.add(copy)
            yield name, copy
            del copy
            most = max(most, len(alive))

    assert {*write_streamed(plain, layout, arriving(), tmp_path / "one by one")} == {"not of the module"}
    assert most <= max(map(len, layout.groups.values())) + 1
    files = sorted(path.name for path in (tmp_path / "at once").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "one by one").iterdir())
    for name in files:
        assert (tmp_path / "at once" / name).read_bytes() == (tmp_path / "one by one" / name).read_bytes()


def test_several_files_have_an_index(tmp_path: Path) -> None:
    build = functools.partial(AutoModelForCausalLM.from_config, tiny_config("qwen3_moe"), dtype=torch.float32)
    torch.manual_seed(0)
    module = build()
    module.save_pretrained(tmp_path / "at once", max_shard_size="40KB")
    plain = build_on_meta(build)
    layout = lay_out(plain)
    assert layout is not None
    with mock.patch.object(streamed_export, "LARGEST_FILE", "40KB"):
        write_streamed(plain, layout, dict(module.named_parameters()).items(), tmp_path / "one by one")
    index, expected = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        for folder in ("one by one", "at once")
    )
    assert {*index["weight_map"]} == {*expected["weight_map"]} and index["metadata"] == expected["metadata"]
    assert len({*index["weight_map"].values()}) > 2
    for name, file in index["weight_map"].items():
        stored = load_file(tmp_path / "one by one" / file)[name]
        assert torch.equal(stored, load_file(tmp_path / "at once" / expected["weight_map"][name])[name])
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "one by one").lm_head.weight, module.lm_head.weight
    )
