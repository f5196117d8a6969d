"""Images of a model that draws, by its training engine: with its weights and kernels, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sfumato.algorithms.noise import keyed_generator, keyed_normal
from sfumato.config.omni import DrawConfig
from sfumato.config.text_data import TextEvalConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.loader import AnsweredPrompt
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import decode_text, padding_token
from sfumato.models.omni.flow_head import denoise
from sfumato.models.omni.model import OmniModel
from sfumato.parallel.loss import IGNORED
from sfumato.rewards.base import Failure, Sample
from sfumato.rollout.text.greedy import answer_greedily
from sfumato.tracking.samples import SampleRecord

if TYPE_CHECKING:
    from sfumato.data.media.document_media import MediaRefs
    from sfumato.models.omni.flow_head import LatentTokenizer
    from sfumato.models.omni.image_tokenizer import ImageTokenizer


@torch.no_grad()
def draw_images(
    model: OmniModel, prompts: Sequence[AnsweredPrompt], guidance_scale: float, temperature: float, seed: int
) -> np.ndarray:
    """An image for each of B prompts, code by code. All ranks must call it with the same prompts.

    Logits are ``unconditional + guidance_scale (conditional - unconditional)``, where the unconditional ones are of the
    prompt with padding in the place of its text, as prompt dropout trains it (arXiv 2207.12598). Keys and values are
    not cached: each code costs a pass over all prompts.

    Args:
        model: put on its mesh.
        prompts: with their images.
        guidance_scale: 1 is none.
        temperature: divides the logits; 0 takes the likeliest code.
        seed: of the noise, which is keyed by the index of the prompt.

    Returns:
        uint8 ``[B, H, W, 3]``.
    """
    assert model.vision is not None
    pad = padding_token(model.tokenizer)
    columns = model.image_tokenizer.text.columns
    opening = model.tokenizer(model.image_tokenizer.text.opening, add_special_tokens=False)["input_ids"]
    kinds = [model.vision.reader.kinds(np.array(prompt.input_ids)) for prompt in prompts]
    remains = [  # in the unconditional prompt: tokens of media, and the one that begins a text where a model keeps it
        (kind != 0) | (np.array(prompt.input_ids) == model.kept_token)
        for kind, prompt in zip(kinds, prompts, strict=True)
    ]
    unprompted = [np.where(mask, prompt.input_ids, pad) for mask, prompt in zip(remains, prompts, strict=True)]
    rows = [(list(prompt.input_ids), prompt.images) for prompt in prompts]
    if guidance_scale != 1:  # the unconditional rows follow in the same passes
        rows += [(row.tolist(), prompt.images) for row, prompt in zip(unprompted, prompts, strict=True)]
    if model.has_head:
        return _denoise_images(
            model, [([*ids, *opening], images) for ids, images in rows], len(prompts), guidance_scale, seed
        )
    generators = [keyed_generator(seed, "drawn codes", index) for index in range(len(prompts))]
    image_tokens: list[list[int]] = [[] for _ in prompts]
    for position in range(model.image_tokenizer.num_codes):
        if position and model.line_end is not None and position % columns == 0:
            image_tokens = [[*row, model.line_end] for row in image_tokens]
        texts = [[*ids, *opening, *image_tokens[index % len(prompts)]] for index, (ids, _) in enumerate(rows)]
        logits = _next_logits(model, texts, [images for _, images in rows])[:, model.codes.start : model.codes.stop]
        if guidance_scale != 1:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + guidance_scale * (conditional - unconditional)
        for index, generator in enumerate(generators):
            if temperature == 0:
                code = int(logits[index].argmax())
            else:
                code = int(torch.multinomial((logits[index] / temperature).softmax(-1), 1, generator=generator))
            image_tokens[index].append(model.codes.start + code)
    codes = [[token - model.codes.start for token in row if token in model.codes] for row in image_tokens]
    return cast("ImageTokenizer", model.image_tokenizer).decode(codes)


def _denoise_images(
    model: OmniModel, rows: Sequence[tuple[Sequence[int], MediaRefs | None]], count: int, scale: float, seed: int
) -> np.ndarray:
    """Images of the flow head, which is conditioned on the language model's hidden states.

    Args:
        model: with a flow head.
        rows: texts that end where their image begins, with their images: ``count`` conditional ones, then as many
            unconditional ones unless ``scale`` is 1.
        count: how many images are drawn.
        scale: of the guidance.
        seed: of the noise, which is keyed by the index of the image.

    Returns:
        uint8 ``[count, H, W, 3]``.
    """
    image_tokenizer = cast("LatentTokenizer", model.image_tokenizer)
    codes = list(model.codes)[:-1]  # each of an image's K tokens is predicted from the one before: the last is no input
    batch = _pack_texts(model, [[*ids, *codes] for ids, _ in rows], [images for _, images in rows])
    # labels only mark the positions whose hidden states are asked for, K of each text
    labels = torch.full_like(batch.labels, IGNORED)
    ends = np.cumsum(batch.document_lengths)
    for end in ends[: len(rows)]:
        labels[0, end - len(model.codes) : end] = 0
    batch = replace(batch, labels=labels)
    ((scores, placed_batch),) = model.score([batch])
    hidden = scores.hidden(placed_batch.labels == 0).unflatten(0, (len(rows), -1))  # [rows, K, H]
    noise = keyed_normal(image_tokenizer.latent_shape, seed, "drawn latents", 0, list(range(count)), hidden.device)
    with model.head() as head:
        latents = denoise(head, noise, hidden[:count], hidden[count:] if scale != 1 else None, scale)
    return image_tokenizer.decode(latents.cpu())


def _next_logits(model: OmniModel, texts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> torch.Tensor:
    """Logits of the token after each of N texts, float32 ``[N, V]`` on the CPU."""
    batch = _pack_texts(model, texts, images)
    labels = batch.labels.clone()
    labels[0, np.cumsum(batch.document_lengths) - 1] = 0  # any label: logits are computed where there is one
    batch = replace(batch, labels=labels)
    return model.label_logits(batch)


def _pack_texts(model: OmniModel, texts: Sequence[Sequence[int]], images: Sequence[MediaRefs | None]) -> TokenBatch:
    """One packed row of texts with their images, without labels."""
    documents = [
        Document(np.array(tokens, np.int32), np.zeros(len(tokens), bool), images=text_images)
        for tokens, text_images in zip(texts, images, strict=True)
    ]
    samples = [TextSample((document,)) for document in documents]
    ids = list(range(len(documents)))
    settings = (padding_token(model.tokenizer), placeholder_tokens(model.mesh), model.vision)
    return make_batch(samples, ids, [0] * len(ids), True, *settings)


def draw_prompts(
    model: OmniModel, prompts: Sequence[AnsweredPrompt], settings: DrawConfig, seed: int, step: int
) -> list[SampleRecord]:
    """Records of an image drawn for each prompt, with its reward where ``settings`` names one, else NaN."""
    if not prompts:
        return []
    pictures = draw_images(model, prompts, settings.guidance_scale, settings.temperature, seed)
    texts = [_last_message(model, prompt) for prompt in prompts]
    values = [float("nan")] * len(prompts)
    if settings.reward is not None:
        samples = [
            Sample(image=picture, prompt=text, group_id=index)
            for index, (picture, text) in enumerate(zip(pictures, texts, strict=True))
        ]
        scores = settings.reward.score(samples)
        values = [float("nan") if isinstance(score, Failure) else float(score) for score in scores]
    name = "reward" if settings.reward is None else settings.reward.label
    return [
        SampleRecord(picture, "eval", text, seed, index, {name: value}, value, policy_version=step)
        for index, (picture, text, value) in enumerate(zip(pictures, texts, values, strict=True))
    ]


def read_prompts(
    model: OmniModel,
    prompts: Sequence[AnsweredPrompt],
    stop: Sequence[int],
    settings: TextEvalConfig,
    seed: int,
    step: int,
) -> list[SampleRecord]:
    """Records of greedy answers to prompts whose answers are text, and whether each is the expected one.

    ``stop`` are the tokens that end an answer.
    """
    if not prompts:
        return []
    inputs = [prompt.input_ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    answers = answer_greedily(model, inputs, settings.max_new_tokens, stop, images, settings.stop)
    return [
        SampleRecord(
            content=decode_text(model.tokenizer, answer),
            kind="eval",
            prompt=_last_message(model, prompt),
            seed=seed,
            sample_id=10_000 + index,  # after those of drawn images
            rewards={"exact_match": float(answer == prompt.answer)},
            total=float(answer == prompt.answer),
            policy_version=step,
        )
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _last_message(model: OmniModel, prompt: AnsweredPrompt) -> str:
    """The text of the user's last message, without the tokens of the chat template around it."""
    text = decode_text(model.tokenizer, prompt.input_ids, skip_special_tokens=True)
    return text.removesuffix("assistant\n").rpartition("user\n")[2].strip()
