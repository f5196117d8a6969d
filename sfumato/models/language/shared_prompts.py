"""May answers share their prompt in packed rows of this model? Found by trying, as ``probe.py`` finds the rest."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.packed_attention import ATTENTION
from sfumato.models.language.packed_model import PackedModel
from sfumato.models.language.probe import tolerance_of
from sfumato.parallel.expert import has_experts

PROMPTS, ANSWERS = (13, 6), (9, 4, 4, 1)
"""Tokens of the prompts, and of the answers to each, that are tried."""

LOCAL = ("sliding_window", "attention_chunk_size")
"""What transformers' configurations call the tokens that a layer sees, where it does not see all."""


def can_share_prompts(model: PackedModel, max_seq_len: int) -> bool:
    """Whether a packed row in which answers go on after one prompt gives what a row of whole documents gives.

    Call it after ``probe``, on every rank. It is not so for rows of documents, under sequence and pipeline parallelism,
    with windows or chunks that ``max_seq_len`` exceeds, dropout (which belongs to the sample), experts (whose load
    counts tokens) or images, nor on GPUs, whose kernel for documents of different lengths nobody has tried with it.
    """
    layout, config = model.mesh.layout, model.plain.config.get_text_config()
    local = [size for name in LOCAL if (size := getattr(config, name, None)) is not None]
    if model.row_layout.rows != "packed" or model.attention != ATTENTION or layout.cp > 1 or layout.pp > 1:
        return False
    if any(size < max_seq_len for size in local) or model.drops_out or has_experts(model.module):
        return False
    if model.vision is not None or model.mesh.device.type != "cpu":
        return False
    with model.probed():
        expected = _numbers(model, _batch(model, shared=False))
        try:
            found = _numbers(model, _batch(model, shared=True))
        except ConfigError:  # a pattern of the attention that the configuration does not name
            return False
    far = float((found - expected).abs().max()) / tolerance_of(model).allowed(expected)
    return model.mesh.max(far, over="world") <= 1


def _numbers(model: PackedModel, batch: TokenBatch) -> Tensor:
    """Of the labels of all answers, one after the other."""
    return model.compute_probe_values([batch])[0].cpu()[batch.loss_mask]


def _batch(model: PackedModel, shared: bool) -> TokenBatch:
    """Random prompts with answers, as whole documents or with shared prompts."""
    generator = np.random.default_rng(0)
    size = min(model.plain.get_input_embeddings().num_embeddings, len(model.tokenizer))
    documents = []
    for given in PROMPTS:
        prompt = generator.integers(size, size=given, dtype=np.int32)
        documents += [Document(prompt, np.zeros(given, bool))] if shared else []
        for drawn in ANSWERS:
            tokens = np.concatenate([prompt, generator.integers(size, size=drawn, dtype=np.int32)])
            mask, first = np.arange(given + drawn) >= given, given - 1 if shared else 0
            documents.append(Document(tokens[first:], mask[first:], first_position=first))
    samples, count = [TextSample((each,)) for each in documents], len(documents)
    return make_batch(samples, list(range(count)), [0] * count, True, 0, placeholder_tokens(model.mesh))
