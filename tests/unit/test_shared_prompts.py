"""Answers that share their prompt in a packed row: the same log-probabilities and gradients as whole documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.models.language import shared_prompts
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.models.language.packed_model import RowLayout
from sfumato.models.language.shared_prompts import can_share_prompts
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.text.packing import pack_samples
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from tests.survey.tiny_configs import tiny_config
from tests.token_batches import single_turn
from tests.unit import test_document_rows
from tests.unit.test_document_rows import gradients, model

GIVEN, DRAWN = (11, 11, 11, 1, 7, 7), (5, 1, 5, 4, 9, 2)
"""Three answers to a prompt, one to a prompt of one token, two to a third prompt."""


def sequences() -> list[TokenSequence]:
    generator = np.random.default_rng(3)
    prompts = {length: generator.integers(250, size=length).tolist() for length in set(GIVEN)}
    return [
        single_turn(prompts[length], generator.integers(250, size=drawn).tolist(), [-1.0] * drawn, [0] * drawn, "stop")
        for length, drawn in zip(GIVEN, DRAWN, strict=True)
    ]


def rollout(sequences_of_samples: list[list[TokenSequence]] | None = None) -> TextRollout:
    if sequences_of_samples is None:
        sequences_of_samples = [[sequence] for sequence in sequences()]
    requests = [SampleRequest(number, 0, 0) for number in range(len(sequences_of_samples))]
    return TextRollout(requests=requests, versions=[0] * len(sequences_of_samples), sequences=sequences_of_samples)


def scored(kind: str, shares: bool, drawn: TextRollout) -> tuple[LanguageModel, torch.Tensor, torch.Tensor, int]:
    """Log-probs and entropies of the decisions, after a backward pass; and the tokens of the row."""
    result, seen = model(kind, register_packed_attention(), RowLayout("packed")), []
    result.shares_prompts = shares
    weights = torch.linspace(-1.0, 2.0, sum(drawn.num_rows))
    batch = pack_samples(drawn, result)
    batch = replace(batch, loss_weights=batch.scatter_to_labels(weights))

    def loss(scores, batch):
        seen.extend(scores.log_probs_and_entropy(batch.labels, 0.7))
        return (seen[0] * batch.loss_weights).sum()

    result.forward_backward([batch], loss)
    return result, *(values[batch.loss_mask] for values in seen), sum(batch.document_lengths)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])  # plain; soft caps; sinks
def test_shared_prompts_give_the_log_probs_and_gradients_of_whole_documents(kind: str, monkeypatch) -> None:
    config = tiny_config(kind)
    config.sliding_window = None if kind == "qwen3" else 64
    monkeypatch.setattr(test_document_rows, "tiny_config", lambda _kind: config)
    whole, log_probs, entropies, tokens = scored(kind, False, rollout())
    shared, actual, found_entropies, fewer = scored(kind, True, rollout())
    assert tokens == sum(GIVEN) + sum(DRAWN) and fewer == 11 + (5 + 1 + 5) + 3 + (1 + 4) + 7 + (9 + 2) + 2
    torch.testing.assert_close(actual, log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_entropies, entropies, rtol=0, atol=1e-5)
    expected = gradients(whole.module)
    for name, gradient in gradients(shared.module).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-6, name


def test_what_an_answer_gets_does_not_depend_on_who_shares_its_prompt() -> None:
    _, together, *_ = scored("qwen3", True, rollout())
    first, last = sequences()[0], sequences()[5]
    _, alone, *_ = scored("qwen3", True, rollout([[first], [last]]))
    torch.testing.assert_close(alone, torch.cat([together[:5], together[-2:]]), rtol=0, atol=2e-6)


def test_samples_of_several_sequences_and_without_decisions_stay_in_order() -> None:
    one, two, _, _, _, five = sequences()
    nothing = single_turn(one.token_ids[:11], [], [], [], "abort")
    sequences_of_samples = [[one, five], [nothing], [two], []]
    _, expected, *_ = scored("qwen3", False, rollout(sequences_of_samples))
    shared, actual, *_ = scored("qwen3", True, rollout(sequences_of_samples))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    batch = pack_samples(rollout(sequences_of_samples), shared)
    assert batch.sample_index[batch.loss_mask].tolist() == [0] * (5 + 2) + [2]
    assert batch.decision_index[batch.loss_mask].tolist() == list(range(5 + 2 + 1))


def test_a_model_is_tried_and_refused_where_it_cannot_share(monkeypatch) -> None:
    packed = register_packed_attention()
    assert can_share_prompts(model("qwen3", packed, RowLayout("packed")), 64)
    assert not can_share_prompts(model("qwen3", "sdpa", RowLayout("packed")), 64)
    assert not can_share_prompts(model("qwen3", packed, RowLayout("documents")), 64)
    assert not can_share_prompts(model("gpt_oss", packed, RowLayout("packed")), 64)  # experts and a window
    windows = model("mistral", packed, RowLayout("packed"))
    assert not can_share_prompts(windows, 64)
    monkeypatch.setattr(shared_prompts, "LOCAL", ())  # found by what its attention asks for
    assert not can_share_prompts(windows, 64)


def test_a_branch_without_a_beginning_is_refused() -> None:
    module = model("qwen3", register_packed_attention(), RowLayout("packed")).module
    positions = torch.tensor([[0, 1, 2, 7, 8, 9]])
    with pytest.raises(ConfigError, match="goes on after no other"):
        module(input_ids=positions, position_ids=positions, use_cache=False)


def test_other_branches_and_later_tokens_are_not_seen() -> None:
    module = model("qwen3", register_packed_attention(), RowLayout("packed")).module
    positions = torch.tensor([[0, 1, 2, 3, 3, 4, 5, 3, 4, 0, 1]])
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        before = module(input_ids=tokens, position_ids=positions, use_cache=False).logits
        for changed, moved in ((3, [3]), (5, [5, 6]), (8, [8]), (1, [1, 2, 3, 4, 5, 6, 7, 8])):
            other = tokens.clone()
            other[0, changed] = 77
            after = module(input_ids=other, position_ids=positions, use_cache=False).logits
            differs = (after - before).abs().amax(-1)[0] > 1e-6
            assert differs.nonzero().flatten().tolist() == moved
