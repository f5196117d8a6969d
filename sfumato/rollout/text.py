"""Answers of a language model, by the training engine itself: whatever the mesh, the same weights and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sfumato.data.packing import TextBatch, make_batch, placeholder_tokens
from sfumato.data.text import Document, TextSample
from sfumato.data.vision import Images
from sfumato.models.language import LanguageModel


def answer_greedily(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Iterable[int],
    images: Sequence[Images | None] | None = None,
) -> list[list[int]]:
    """The likeliest next token, again and again. All ranks must call it with the same prompts.

    Nothing is cached: each token costs a pass over all prompts. It is for a look at a few samples on any mesh; rollout
    engines are for many.

    Args:
        model: put on its mesh.
        prompts: token ids, at least one in each.
        max_new_tokens: longest answer.
        stop: tokens that end an answer; they are part of it.
        images: that stand in each prompt.

    Returns:
        The answers' token ids.
    """
    stop = set(stop)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        open_ones = [index for index, answer in enumerate(answers) if not (answer and answer[-1] in stop)]
        if not open_ones:
            break
        texts = [[*prompts[index], *answers[index]] for index in open_ones]
        batch = _packed(texts, None if images is None else [images[index] for index in open_ones], model)
        predicted = model.predictions([batch])[0][0]
        end = -1
        for index, length in zip(open_ones, batch.lengths, strict=True):
            end += length
            answers[index].append(int(predicted[end]))
    return answers


def _packed(texts: Sequence[Sequence[int]], images: Sequence[Images | None] | None, model: LanguageModel) -> TextBatch:
    documents = [
        Document(np.array(tokens, np.int32), np.zeros(len(tokens), bool), images=images and images[index])
        for index, tokens in enumerate(texts)
    ]
    samples, ids = [TextSample((document,)) for document in documents], list(range(len(texts)))
    pad, least = model.tokenizer.pad_token_id, placeholder_tokens(model.mesh)
    return make_batch(samples, ids, [0] * len(texts), True, pad, least, model.vision)
