"""Whether answers may share their prompt in packed rows of a model: found by trying, as ``probe.py`` finds the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.packed_attention import ATTENTION
from sfumato.models.language.packed_model import PackedModel
from sfumato.models.language.tolerance import tolerance_of
from sfumato.parallel.expert_modules import has_experts

if TYPE_CHECKING:
    from torch import nn

PROMPTS = (13, 6)
"""Lengths in tokens of the prompts that are tried."""

ANSWERS = (9, 4, 4, 1)
"""Lengths in tokens of the answers to each of them."""

LOCAL = ("sliding_window", "attention_chunk_size")
"""Fields of transformers' configurations for the number of tokens that a layer sees, where it does not see all."""


def can_share_prompts(model: PackedModel, max_seq_len: int) -> bool:
    """Whether a packed row whose answers share a prompt gives what a row of whole documents gives.

    Call it after ``probe``, on every rank. False without trying: for rows of documents, under sequence and pipeline
    parallelism, with windows or chunks shorter than ``max_seq_len``, with dropout (which belongs to the sample), with
    experts (whose load counts tokens) or images, and on GPUs, whose kernel for documents of different lengths has not
    been tried with shared prompts.

    Args:
        model: on its mesh.
        max_seq_len: tokens of the longest sequence.
    """
    layout = model.mesh.layout
    config = model.plain.config.get_text_config()
    local_sizes = [size for name in LOCAL if (size := getattr(config, name, None)) is not None]
    if model.row_layout.rows != "packed" or model.attention != ATTENTION or layout.cp > 1 or layout.pp > 1:
        return False
    if any(size < max_seq_len for size in local_sizes) or model.drops_out or has_experts(model.module):
        return False
    if model.vision is not None or model.mesh.device.type != "cpu":
        return False
    with model.probed():
        # the same weights, tokens and labels in both layouts: differences beyond rounding are mistakes
        expected = _compute_label_values(model, _make_batch(model, shared=False))
        try:
            values = _compute_label_values(model, _make_batch(model, shared=True))
        except ConfigError:  # a pattern of the attention that the configuration does not name
            return False
    difference_over_tolerance = float((values - expected).abs().max()) / tolerance_of(model).log_prob_tolerance(
        expected
    )
    # ranks must agree: they pack their micro-batches in the same way
    return model.mesh.max(difference_over_tolerance, over="world") <= 1


def _compute_label_values(model: PackedModel, batch: TokenBatch) -> Tensor:
    """``probe_values`` of the labels of all answers, one answer after the other: float32 ``[N]`` on the CPU."""
    return model.compute_probe_values([batch])[0].cpu()[batch.loss_mask]


def _make_batch(model: PackedModel, shared: bool) -> TokenBatch:
    """Random prompts with answers, as whole documents or with shared prompts; always the same tokens."""
    generator = np.random.default_rng(0)
    size = min(cast("nn.Embedding", model.plain.get_input_embeddings()).num_embeddings, len(model.tokenizer))
    documents: list[Document] = []
    for prompt_length in PROMPTS:
        prompt = generator.integers(size, size=prompt_length, dtype=np.int32)
        documents += [Document(prompt, np.zeros(prompt_length, bool))] if shared else []
        for answer_length in ANSWERS:
            tokens = np.concatenate([prompt, generator.integers(size, size=answer_length, dtype=np.int32)])
            mask = np.arange(prompt_length + answer_length) >= prompt_length
            # a branch repeats the last token of the prompt, whose output predicts the answer's first token
            first = prompt_length - 1 if shared else 0
            documents.append(Document(tokens[first:], mask[first:], first_position=first))
    samples = [TextSample((document,)) for document in documents]
    count = len(documents)
    return make_batch(samples, list(range(count)), [0] * count, True, 0, placeholder_tokens(model.mesh))
