"""A saved answer of a run, drawn again: by itself, and if it is another then, with those that it was drawn with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompts import TextPrompt, TextPromptLoader, load_text_prompts
from sfumato.evaluation.options import GenerationOptions, ignore_line
from sfumato.evaluation.recorded import RecordedSample, Redrawn
from sfumato.evaluation.redraw_units import check_prompt, evaluated_rows, place_of, training_unit
from sfumato.evaluation.sources import ModelSource
from sfumato.evaluation.texts import TextModel, TextSettings, text_models, text_prompts
from sfumato.rollout.kinds.base import SampleKeys
from sfumato.rollout.text.policy import EVALUATION
from sfumato.rollout.text.watched import encode_watched

TRAINING = "rollout"
"""The purpose of samples that are learned from."""


def redraw_text(recorded: RecordedSample, source: ModelSource, options: GenerationOptions) -> Iterator[Redrawn]:
    """Draws an answer again.

    Args:
        recorded: the sample.
        source: the weights.
        options: have the device and the sample's seed.

    Yields:
        The answer, drawn alone; then drawn with the others of its batch, whose size may choose other kernels.

    Raises:
        DataError: when the run's data has other prompts now.
        UserError: as loading weights and data does.
    """
    ((_, model),) = text_models([source], options)
    if recorded.kind == "train":
        prompts, ids, settings = _training_batch(recorded, model)
        keys = [SampleKeys(recorded.seed, recorded.step - 1, sample_id, TRAINING) for sample_id in ids]
    else:
        prompts, ids = _evaluation_batch(recorded, model, source)
        settings = model.settings
        keys = [SampleKeys(recorded.seed, 0, sample_id, EVALUATION) for sample_id in ids]
    place = place_of(ids, recorded)
    check_prompt(recorded, prompts[place].text)
    yield _draw(model, prompts[place : place + 1], keys[place : place + 1], settings, 0, "")
    if len(prompts) > 1:
        how = f"drawn with the {len(prompts)} samples of its batch, as the run did"
        yield _draw(model, prompts, keys, settings, place, how)


def _draw(
    model: TextModel,
    prompts: Sequence[TextPrompt],
    keys: Sequence[SampleKeys],
    settings: TextSettings,
    place: int,
    how: str,
) -> Redrawn:
    drawn = model.draw_texts(prompts, keys, settings)[place]
    sample = drawn.sample(prompts[place], 0)
    tokens = [sequence.token_ids[sequence.drawn] for sequence in drawn.sequences]
    log_probs = [sequence.log_probs[sequence.drawn] for sequence in drawn.sequences]
    if not tokens:
        return Redrawn(sample, how=how)
    return Redrawn(sample, (*np.concatenate(tokens).tolist(),), (*np.concatenate(log_probs).tolist(),), how)


def _training_batch(recorded: RecordedSample, model: TextModel) -> tuple[list[TextPrompt], list[int], TextSettings]:
    config = recorded.run.config
    assert isinstance(config, TextRLConfig)
    tools = model.settings.kind.tools()
    settings = {"seed": config.train.seed, "tools": tools, "log": ignore_line}
    prompts = load_text_prompts(config.data, model.template, "train", **settings)
    requests = training_unit(recorded, TextPromptLoader.from_config(prompts, config))
    rollout = config.rollout
    drawing = replace(
        model.settings.sampling, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
    )
    text_settings = replace(model.settings, sampling=drawing, max_new_tokens=rollout.max_new_tokens)
    ids = [request.sample_id for request in requests]
    return [prompts[request.prompt_id] for request in requests], ids, text_settings


def _evaluation_batch(
    recorded: RecordedSample, model: TextModel, source: ModelSource
) -> tuple[list[TextPrompt], list[int]]:
    if recorded.kind == "watched":
        config = recorded.run.config
        longest = config.data.max_prompt_tokens if isinstance(config, TextRLConfig) else 2**31
        texts = [str(row["prompt"]) for row in recorded.siblings]
        ids = [cast(int, row["sample_id"]) for row in recorded.siblings]
        return encode_watched(texts, model.template, longest), ids
    prompts = text_prompts(model, [source], None)
    rows = evaluated_rows(recorded, len(prompts))
    return [prompts[row] for row in rows], rows
