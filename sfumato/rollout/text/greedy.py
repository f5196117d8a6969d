"""Greedy answers of a language model by its training engine: with its weights and kernels, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sfumato.data.media.document_media import MediaRefs
from sfumato.data.text.answer_end import tokens_without_text
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.stop_strings import completes_stop
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import padding_token, whole_decode
from sfumato.models.language.model import LanguageModel


def answer_greedily(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Iterable[int],
    images: Sequence[MediaRefs | None] | None = None,
    stop_texts: Sequence[str] = (),
) -> list[list[int]]:
    """Appends the likeliest next token to each prompt until its answer ends. All ranks must pass the same prompts.

    Keys and values are not cached: each token costs a pass over all prompts. It is for a look at a few samples on any
    mesh; rollout engines are for many.

    Args:
        model: put on its mesh.
        prompts: token ids, at least one in each.
        max_new_tokens: tokens of the longest answer.
        stop: tokens that end an answer; they are part of it. Tokens that stand for an image, which an answer cannot
            show, and ids without text end it, too.
        images: of each prompt.
        stop_texts: texts that end an answer; the token that completes one is its last.

    Returns:
        The answers' token ids.
    """
    stop = {*stop, *tokens_without_text(model.tokenizer, model.vocabulary_size)}
    if model.vision is not None:
        stop |= model.vision.reader.media_tokens()
    decode = whole_decode(model.tokenizer)

    def has_ended(answer: list[int]) -> bool:
        return bool(answer) and (answer[-1] in stop or completes_stop(answer, stop_texts, decode))

    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        unended = [index for index, answer in enumerate(answers) if not has_ended(answer)]
        if not unended:
            break
        texts = [[*prompts[index], *answers[index]] for index in unended]
        batch = _pack_texts(texts, None if images is None else [images[index] for index in unended], model)
        predicted = model.predictions([batch])[0][0]
        last_column = -1  # of the packed row: the last token of each text predicts its next one
        for index, length in zip(unended, batch.document_lengths, strict=True):
            last_column += length
            answers[index].append(int(predicted[last_column]))
    return answers


def _pack_texts(
    texts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None] | None, model: LanguageModel
) -> TokenBatch:
    """One packed row of texts without labels."""
    documents = [
        Document(
            np.array(tokens, np.int32), np.zeros(len(tokens), bool), images=None if images is None else images[index]
        )
        for index, tokens in enumerate(texts)
    ]
    samples = [TextSample((document,)) for document in documents]
    ids = list(range(len(texts)))
    pad = padding_token(model.tokenizer)
    return make_batch(samples, ids, [0] * len(texts), True, pad, placeholder_tokens(model.mesh), model.vision)
