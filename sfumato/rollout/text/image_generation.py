"""Images of a model that draws, by the training engine itself: whatever the mesh, the same weights and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sfumato.algorithms.noise import keyed_generator, keyed_normal
from sfumato.config.omni import DrawConfig
from sfumato.config.text_data import TextEvalConfig
from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.loader import AnsweredPrompt
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.omni.flow_head import denoise
from sfumato.models.omni.model import OmniModel
from sfumato.parallel.loss import IGNORED
from sfumato.rewards.base import Failure, Sample
from sfumato.rollout.text.greedy import answer_greedily
from sfumato.tracking.samples import SampleRecord


@torch.no_grad()
def draw_images(
    model: OmniModel, prompts: Sequence[AnsweredPrompt], guidance_scale: float, temperature: float, seed: int
) -> np.ndarray:
    """An image for each of B prompts, code by code. All ranks must call it with the same prompts.

    Logits are ``unconditional + guidance_scale (conditional - unconditional)``, where the unconditional ones are of the
    prompt with padding in the place of its text, as training has seen it (arXiv 2207.12598). Nothing is cached: each
    code costs a pass over all prompts.

    Args:
        model: put on its mesh.
        prompts: with images that they hold.
        guidance_scale: 1 is none.
        temperature: divides the logits; 0 takes the likeliest code.
        seed: of the noise, which belongs to the place among the prompts.

    Returns:
        uint8 ``[B, H, W, 3]``.
    """
    pad, columns = model.tokenizer.pad_token_id, model.image_tokenizer.text.columns
    opening = model.tokenizer(model.image_tokenizer.text.opening, add_special_tokens=False)["input_ids"]
    kinds = [model.vision.reader.kinds(np.array(prompt.input_ids)) for prompt in prompts]
    stays = [
        (kind != 0) | (np.array(prompt.input_ids) == model.kept_token)
        for kind, prompt in zip(kinds, prompts, strict=True)
    ]
    hidden = [np.where(kept, prompt.input_ids, pad) for kept, prompt in zip(stays, prompts, strict=True)]
    rows = [(list(prompt.input_ids), prompt.images) for prompt in prompts]
    if guidance_scale != 1:
        rows += [(row.tolist(), prompt.images) for row, prompt in zip(hidden, prompts, strict=True)]
    if model.has_head:
        return _denoised(
            model, [([*ids, *opening], images) for ids, images in rows], len(prompts), guidance_scale, seed
        )
    generators = [keyed_generator(seed, "drawn codes", index) for index in range(len(prompts))]
    drawn: list[list[int]] = [[] for _ in prompts]
    for place in range(model.image_tokenizer.num_codes):
        if place and model.line_end is not None and place % columns == 0:
            drawn = [[*row, model.line_end] for row in drawn]
        texts = [[*ids, *opening, *drawn[index % len(prompts)]] for index, (ids, _) in enumerate(rows)]
        logits = _next_logits(model, texts, [images for _, images in rows])[:, model.codes.start : model.codes.stop]
        if guidance_scale != 1:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + guidance_scale * (conditional - unconditional)
        for index, generator in enumerate(generators):
            if temperature == 0:
                code = int(logits[index].argmax())
            else:
                code = int(torch.multinomial((logits[index] / temperature).softmax(-1), 1, generator=generator))
            drawn[index].append(model.codes.start + code)
    codes = [[token - model.codes.start for token in row if token in model.codes] for row in drawn]
    return model.image_tokenizer.decode(codes)


def _denoised(
    model: OmniModel, rows: Sequence[tuple[Sequence[int], object]], count: int, scale: float, seed: int
) -> np.ndarray:
    """Images by the flow head, told the hidden states of texts that end where each image begins; the texts without a
    prompt follow the ``count`` others, where ``scale`` guides."""
    codes, shape = list(model.codes)[:-1], model.image_tokenizer.latent_shape
    batch = _batch_of(model, [[*ids, *codes] for ids, _ in rows], [images for _, images in rows])
    labels, ends = torch.full_like(batch.labels, IGNORED), np.cumsum(batch.document_lengths)
    for end in ends[: len(rows)]:
        labels[0, end - len(model.codes) : end] = 0
    batch = replace(batch, labels=labels)
    ((scores, placed),) = model.score([batch])
    hidden = scores.hidden(placed.labels == 0).unflatten(0, (len(rows), -1))
    noise = keyed_normal(shape, seed, "drawn latents", 0, list(range(count)), hidden.device)
    with model.head() as head:
        latents = denoise(head, noise, hidden[:count], hidden[count:] if scale != 1 else None, scale)
    return model.image_tokenizer.decode(latents.cpu())


def _next_logits(model: OmniModel, texts: Sequence[Sequence[int]], images: Sequence[object]) -> torch.Tensor:
    """Logits of the token after each text, float32 ``[N, V]`` on the CPU."""
    batch = _batch_of(model, texts, images)
    labels = batch.labels.clone()
    labels[0, np.cumsum(batch.document_lengths) - 1] = 0  # the output of these tokens alone is asked for
    batch = replace(batch, labels=labels)
    return model.label_logits(batch)


def _batch_of(model: OmniModel, texts: Sequence[Sequence[int]], images: Sequence[object]) -> TokenBatch:
    """Texts with the images that they hold, one after the other in a packed row."""
    documents = [
        Document(np.array(tokens, np.int32), np.zeros(len(tokens), bool), images=own)
        for tokens, own in zip(texts, images, strict=True)
    ]
    samples, ids = [TextSample((each,)) for each in documents], list(range(len(documents)))
    settings = (model.tokenizer.pad_token_id, placeholder_tokens(model.mesh), model.vision)
    return make_batch(samples, ids, [0] * len(ids), True, *settings)


def draw_prompts(
    model: OmniModel, prompts: Sequence[AnsweredPrompt], settings: DrawConfig, seed: int, step: int
) -> list[SampleRecord]:
    """An image for each prompt, with its reward where ``settings`` names one, beside the image that the data has."""
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
        found = settings.reward.score(samples)
        values = [float("nan") if isinstance(value, Failure) else float(value) for value in found]
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
    """Greedy answers to prompts whose answers are text, with whether they are the expected ones; ``stop`` are the
    tokens that end one."""
    if not prompts:
        return []
    inputs, images = [prompt.input_ids for prompt in prompts], [prompt.images for prompt in prompts]
    answers = answer_greedily(model, inputs, settings.max_new_tokens, stop, images, settings.stop)
    return [
        SampleRecord(
            content=model.tokenizer.decode(answer),
            kind="eval",
            prompt=_last_message(model, prompt),
            seed=seed,
            sample_id=10_000 + index,  # after those that are drawn
            rewards={"exact_match": float(answer == prompt.answer)},
            total=float(answer == prompt.answer),
            policy_version=step,
        )
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _last_message(model: OmniModel, prompt: AnsweredPrompt) -> str:
    """The text of a prompt without the tokens that stand around it."""
    text = model.tokenizer.decode(prompt.input_ids, skip_special_tokens=True)
    return text.removesuffix("assistant\n").rpartition("user\n")[2].strip()
