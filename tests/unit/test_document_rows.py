"""Packed rows of every kind of model: documents see what they would see alone, whichever way they take."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.language.document_rows import document_lengths, group_documents
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.models.language.packed_model import RowLayout
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.survey.tiny_configs import tiny_config

LENGTHS = (13, 5, 21, 21, 9, 2, 33, 8, 9)
SIDE_BY_SIDE = (
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "olmo3",
    "cohere2",
    "exaone4",
    "modernbert-decoder",
    "afmoe",
)
APART = ("mamba2", "qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "recurrent_gemma", "bloom", "llama4_text")


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(259, (length,), generator=generator) for length in LENGTHS]


def packed() -> TokenBatch:
    samples = [TextSample((Document(ids.numpy().astype(np.int32), np.arange(len(ids)) > 0),)) for ids in documents()]
    return make_batch(samples, list(range(len(samples))), [0] * len(samples), True, 0, 2)


def model(kind: str, attention: str, rows: RowLayout, chunked: bool = False) -> LanguageModel:
    config = copy.deepcopy(tiny_config(kind))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    language_model = LanguageModel(module, build_byte_tokenizer(), None, lambda: module, None, chunked)
    language_model._mesh, language_model.row_layout = Mesh(Layout(), torch.device("cpu")), rows
    return language_model


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def check(kind: str, attention: str, rows: RowLayout, chunked: bool = False) -> None:
    """Against transformers' own module with its own attention, one document after the other."""
    actual, seen, count = model(kind, attention, rows, chunked), [], sum(LENGTHS) - len(LENGTHS)

    def loss(scores, batch):
        seen.append(scores.log_probs(batch.labels))
        return -seen[-1].sum() / count

    total = sum(actual.forward_backward([packed()], loss))
    plain = model(kind, "eager", rows).module
    alone = []
    for ids in documents():
        logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        alone.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        (-alone[-1].sum() / count).backward()
    theirs = torch.cat(alone).detach()
    ours = seen[0].detach()[packed().labels != -100]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=3e-5)
    assert total == pytest.approx(-float(theirs.mean()), rel=1e-5)
    expected = gradients(plain)
    for name, gradient in gradients(actual.module).items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_windows_chunks_caps_and_sinks_side_by_side(kind: str) -> None:
    check(kind, register_packed_attention(), RowLayout("packed"))


@pytest.mark.parametrize("kind", APART)
def test_what_cannot_be_told_apart_in_one_row_has_rows_of_its_own(kind: str) -> None:
    check(kind, "eager", RowLayout("documents"))


@pytest.mark.parametrize("kind", ["llama dynamic rope", "phi3 longrope"])
def test_positions_that_depend_on_the_longest_row_are_those_of_the_document(kind: str) -> None:
    check(kind, "sdpa", RowLayout("documents", same_length=True))


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "nanochat", "falcon_h1", "mamba2"])
def test_logits_in_chunks_are_scaled_and_capped_as_the_model_does(kind: str) -> None:
    check(kind, "eager", RowLayout("documents"), chunked=True)


def test_documents_of_rows_are_those_of_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert document_lengths(positions) == [3, 2, 1, 6]


def test_documents_of_about_one_length_share_a_call() -> None:
    lengths = [100, 10, 80, 31, 40, 74]
    groups = group_documents(lengths, same_length=False)
    assert [sizes for _, sizes in groups] == [[100, 80], [74], [40, 31], [10]]
    assert groups[0][0] == [0, 110], "where each begins"
    assert [sizes for _, sizes in group_documents([5, 7, 5], same_length=True)] == [[7], [5, 5]]
    assert [sizes for _, sizes in group_documents([30, 2, 9], same_length=False)] == [[30, 9, 2]], "short ones all"
