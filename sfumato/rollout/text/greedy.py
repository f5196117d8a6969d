"""Answers of a language model, by the training engine itself: whatever the mesh, the same weights and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from sfumato.data.media.vision import Images
from sfumato.data.text.answer_end import tokens_without_text
from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.stop_strings import completes_stop
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.language.model import LanguageModel


def answer_greedily(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Iterable[int],
    images: Sequence[Images | None] | None = None,
    stop_texts: Sequence[str] = (),
) -> list[list[int]]:
    """The likeliest next token, again and again. All ranks must call it with the same prompts.

    Nothing is cached: each token costs a pass over all prompts. It is for a look at a few samples on any mesh; rollout
    engines are for many.

    Args:
        model: put on its mesh.
        prompts: token ids, at least one in each.
        max_new_tokens: longest answer.
        stop: tokens that end an answer; they are part of it. So do those that stand for an image, of which there is
            none, or for no text.
        images: that stand in each prompt.
        stop_texts: that end an answer; the token that completes one is its last.

    Returns:
        The answers' token ids.
    """
    stop = {*stop, *tokens_without_text(model.tokenizer, model.vocabulary_size)}
    if model.vision is not None:
        stop |= model.vision.reader.media_tokens()
    decode = partial(model.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def has_ended(answer: list[int]) -> bool:
        return bool(answer) and (answer[-1] in stop or completes_stop(answer, stop_texts, decode))

    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        open_ones = [index for index, answer in enumerate(answers) if not has_ended(answer)]
        if not open_ones:
            break
        texts = [[*prompts[index], *answers[index]] for index in open_ones]
        batch = _packed(texts, None if images is None else [images[index] for index in open_ones], model)
        predicted = model.predictions([batch])[0][0]
        end = -1
        for index, length in zip(open_ones, batch.document_lengths, strict=True):
            end += length
            answers[index].append(int(predicted[end]))
    return answers


def _packed(texts: Sequence[Sequence[int]], images: Sequence[Images | None] | None, model: LanguageModel) -> TokenBatch:
    documents = [
        Document(np.array(tokens, np.int32), np.zeros(len(tokens), bool), images=images and images[index])
        for index, tokens in enumerate(texts)
    ]
    samples, ids = [TextSample((document,)) for document in documents], list(range(len(texts)))
    pad, least = model.tokenizer.pad_token_id, placeholder_tokens(model.mesh)
    return make_batch(samples, ids, [0] * len(texts), True, pad, least, model.vision)
