"""What counts as the load of experts: tokens of documents, and no padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfumato.config.sections import LoraConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.packed_model import RowLayout
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.tiny import tiny_language_description, write_config


@pytest.fixture
def described(tmp_path):
    return str(write_config(tiny_language_description("qwen3_moe"), tmp_path / "moe.yaml"))


def build(described: str, lora: LoraConfig | None = None, **train: object) -> LanguageModel:
    settings = TextTrainConfig(output_dir="unused", expert_bias_rate=0.1, **train)
    config = LanguageModelConfig(config_path=described, tokenizer_path="bytes", lora=lora)
    model = build_language_model(config, settings)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), settings)
    return model


def make_micro_batch(packed: bool = True):
    documents = [torch.arange(start, start + length).int().numpy() for start, length in ((5, 20), (60, 7))]
    samples = [TextSample((Document(ids, ids > 0),)) for ids in documents]
    return make_batch(samples, [0, 1], [0, 0], packed, 0, 1)


def loads(model: LanguageModel, batch) -> list[list[int]]:
    model.forward_backward([batch], lambda scores, placed: scores.cross_entropy(placed.labels)[0])
    assert model.balancer is not None
    return [counts.tolist() for counts in model.balancer._counts]


@pytest.mark.parametrize("layout", [RowLayout("packed"), RowLayout("documents")])
def test_padding_is_no_load_of_experts(described, layout):
    expected = loads(build(described), make_micro_batch())
    assert {sum(counts) for counts in expected} == {27 * 2}
    padded = build(described, pad_to_multiple_of=64)
    padded.set_row_layout(padded.attention, layout)
    assert loads(padded, make_micro_batch()) == expected


def test_padding_of_rows_that_are_not_packed_is_no_load(described):
    model = build(described, rmpad_with_pos_ids=False, dyn_bsz=False)
    assert loads(model, make_micro_batch(packed=False)) == loads(build(described), make_micro_batch())


def test_placeholders_are_no_load(described):
    model = build(described)
    assert loads(model, replace(make_micro_batch(), is_placeholder=True)) == [[0] * 4] * 2
    assert loads(model, make_micro_batch()) == loads(build(described), make_micro_batch())


def test_adapters_go_without_biases_which_their_files_do_not_hold(described):
    with pytest.raises(ConfigError, match=r"train\.expert_bias_rate .*model\.lora.*set it to 0, or train all weights"):
        build(described, LoraConfig(rank=2))
