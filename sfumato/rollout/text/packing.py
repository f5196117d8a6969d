"""Samples of a language model as packed micro-batches, and values of the tokens that it drew.

Shapes: B samples, R decisions (tokens that the policy drew, sample by sample), T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.aggregation import row_weights
from sfumato.algorithms.sequences import Sequences
from sfumato.algorithms.token_advantages import penalised
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.model import LanguageModel
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import Passes
from sfumato.rollout.text.tokens import TextRollout, TokenSequence


def pack_update(
    rollout: TextRollout, passes: Sequence[Passes], config: TextRLConfig, model: LanguageModel
) -> list[TokenBatch]:
    """Every micro-batch of an update, packed once: for the passes of all policies and of a critic.

    Args:
        rollout: the rank's B samples.
        passes: the optimiser steps, each with the samples of its micro-batches.
        config: of the task; how the losses of tokens are averaged.
        model: see ``pack_samples``.

    Returns:
        The micro-batches of one optimiser step after the other, with ``rollout_log_probs`` and ``loss_weights``. One
        without samples is a placeholder, the first sample with weights of 0, since all ranks must compute equally
        often.
    """
    num_drawn = torch.tensor(rollout.num_rows)  # [B]
    first_decisions = num_drawn.cumsum(0) - num_drawn
    log_probs = drawn_log_probs(rollout)  # [R]
    lengths = num_drawn.repeat_interleave(num_drawn)  # [R], of the sample that a token is of
    batches = []
    for step in passes:
        in_step = step.num_rows, step.num_samples
        weights = row_weights(config.algorithm.aggregation, lengths, *in_step, config.rollout.max_new_tokens)
        for samples in step.parts:
            is_placeholder = len(samples) == 0
            samples = torch.zeros(1, dtype=torch.int64) if is_placeholder else samples
            decisions = [torch.arange(num_drawn[row]) + first_decisions[row] for row in samples.tolist()]
            batch = pack_samples(rollout.rows(samples), model, torch.cat(decisions))
            batches.append(
                replace(
                    batch,
                    is_placeholder=is_placeholder,
                    rollout_log_probs=batch.scatter_to_labels(log_probs),
                    loss_weights=batch.scatter_to_labels(weights * (not is_placeholder)),
                )
            )
    return batches


def pack_samples(rollout: TextRollout, model: LanguageModel, decisions: Tensor | None = None) -> TokenBatch:
    """One packed row of B samples, whose labels are the R tokens that the policy drew.

    Where the model can, neighbouring samples with one prompt share it: it stands once before what follows its last
    token in each of them.

    Args:
        rollout: the samples.
        model: its tokenizer pads; ``shares_prompts``.
        decisions: int64 ``[R]``, the numbers of these tokens among all that the rank's samples drew; by default they
            are all.

    Returns:
        A batch with ``sample_index`` and ``decision_index``.
    """
    ids, pad = rollout.sample_ids, model.tokenizer.pad_token_id
    media_tokens = [] if model.vision is None else sorted(model.vision.reader.media_tokens())
    inputs = [[_make_input(sequence, media_tokens, pad) for sequence in sequences] for sequences in rollout.sequences]
    samples = _share_prompts(inputs) if model.shares_prompts else _make_documents(inputs)
    batch = make_batch(samples, ids, [0] * len(ids), True, pad, placeholder_tokens(model.mesh), model.vision)
    drawn = _gather_drawn(rollout, lambda sequence: sequence.token_ids).long()
    decisions = torch.arange(len(drawn)) if decisions is None else decisions
    owners = [number for number, sample in enumerate(samples) for _ in sample.documents] or [0]
    return replace(
        batch,
        labels=batch.labels.masked_scatter(batch.loss_mask, drawn),
        sample_index=torch.tensor(owners)[batch.document_ids],
        decision_index=torch.full_like(batch.labels, -1).masked_scatter(batch.loss_mask, decisions),
    )


def _make_input(sequence: TokenSequence, media_tokens: list[int], pad: int) -> TokenSequence:
    """A sequence as the model is given it. A token that stands for an image (one of ``media_tokens``), which ends an
    answer when the policy draws it, is a label and no input: there is no image for it."""
    if not media_tokens:
        return sequence
    has_no_image = sequence.drawn & np.isin(sequence.token_ids, media_tokens)
    return replace(sequence, token_ids=np.where(has_no_image, pad, sequence.token_ids).astype(np.int32))


def _make_documents(samples: Sequence[list[TokenSequence]]) -> list[TextSample]:
    """A document for each sequence of each sample."""
    return [
        TextSample(
            tuple(Document(sequence.token_ids, sequence.drawn, images=sequence.images) for sequence in sequences)
        )
        for sequences in samples
    ]


def _share_prompts(samples: Sequence[list[TokenSequence]]) -> list[TextSample]:
    """The same, but that what stands before the first drawn token is a document of its own, of the first of neighbours
    that have it in common, and what comes after it goes on from its last token."""
    text_samples, last_prompt = [], None
    for sequences in samples:
        documents = []
        for sequence in sequences:
            prompt_length = int(sequence.drawn.argmax()) if sequence.drawn.any() else 0
            if prompt_length < 2:
                last_prompt = None
                documents.append(Document(sequence.token_ids, sequence.drawn))
                continue
            prompt = sequence.token_ids[:prompt_length]
            if last_prompt is None or not np.array_equal(last_prompt, prompt):
                documents.append(Document(prompt, sequence.drawn[:prompt_length]))
                last_prompt = prompt
            last = prompt_length - 1  # its output is what the first drawn token is a label of
            documents.append(Document(sequence.token_ids[last:], sequence.drawn[last:], first_position=last))
        text_samples.append(TextSample(tuple(documents)))
    return text_samples


def drawn_log_probs(rollout: TextRollout) -> Tensor:
    """Log-probabilities of B samples' decisions as the engine gave them: float32 ``[R]``."""
    return _gather_drawn(rollout, lambda sequence: sequence.log_probs)


def drawn_versions(rollout: TextRollout) -> Tensor:
    """Versions of the policies that drew them: int32 ``[R]``."""
    return _gather_drawn(rollout, lambda sequence: sequence.versions)


def _gather_drawn(rollout: TextRollout, select: Callable[[TokenSequence], np.ndarray]) -> Tensor:
    values = [
        torch.from_numpy(select(sequence)[sequence.drawn]) for sequences in rollout.sequences for sequence in sequences
    ]
    return torch.cat(values) if values else torch.zeros(0)


def group_by_step(batches: Sequence[TokenBatch], passes: Sequence[Passes]) -> list[list[TokenBatch]]:
    """The micro-batches of each optimiser step."""
    remaining = iter(batches)
    return [[next(remaining) for _ in step.parts] for step in passes]


def add_values(batches: Sequence[TokenBatch], **values: Sequence[Tensor]) -> list[TokenBatch]:
    """Micro-batches with a further field each, by its name a tensor ``[1, T]`` for each of them."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [replace(batch, **row) for batch, row in zip(batches, rows, strict=True)]


def gather_values(batches: Sequence[TokenBatch], name: str, rollout: TextRollout) -> Tensor:
    """A field of micro-batches at the places of their labels, for all R tokens that the rank's samples drew.

    The device is waited for once.

    Returns:
        float32 ``[R]`` in host memory; 0 of samples that are in no micro-batch.
    """
    gathered = torch.zeros(sum(rollout.num_rows))
    if not batches:
        return gathered
    values = [getattr(batch, name) for batch in batches]
    on_host = torch.cat([tensor.detach().flatten() for tensor in values]).cpu()
    for batch, row in zip(batches, on_host.split([tensor.numel() for tensor in values]), strict=True):
        if not batch.is_placeholder:
            index = batch.decision_index.flatten()
            gathered[index[index >= 0]] = row[index >= 0]
    return gathered


def gather_token_values(batches: Sequence[TokenBatch], rollout: TextRollout) -> dict[str, Tensor]:
    """All that micro-batches know of the R tokens that the rank's samples drew, ``[R]`` by name, for dumps."""
    names = ["reference_log_probs", "proximal_log_probs", "values"]
    names = [name for name in names if batches and getattr(batches[0], name) is not None]
    values = {name: gather_values(batches, name, rollout) for name in [*names, "advantages", "returns"]}
    return {"rollout_log_probs": drawn_log_probs(rollout)} | values


def subtract_penalties(
    advantages: Advantages,
    rollout: TextRollout,
    penalties: Tensor,
    sequences: Sequences,
    mask: Tensor,
    config: TextRLConfig,
    mesh: Mesh,
) -> Advantages:
    """Advantages of rewards less the sum of their tokens' penalties, compared over all ranks, which all call it.

    So a KL in the reward comes before the baseline of a group, as in verl (``use_kl_in_reward``) and TRL (RLOO).

    Args:
        advantages: of the rank's B samples, with their rewards.
        rollout: these samples.
        penalties: ``[R]`` of the decisions.
        sequences: of these, one for each sample.
        mask: bool ``[R]``: those that are learned from.
        config: of the task.
        mesh: of the ranks.

    Returns:
        Of this rank's samples, with their rewards before the penalty.
    """
    groups = torch.tensor([request.group_id for request in rollout.requests])
    by_rank = mesh.gather((penalised(advantages.rewards, penalties, sequences, mask), groups))
    rewards, groups = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
    first = sum(len(part) for part, _ in by_rank[: mesh.data_rank])
    compared = config.algorithm.advantage.compute(rewards, groups).rows(range(first, first + len(rollout)))
    return replace(compared, rewards=advantages.rewards, components=advantages.components)


def mark_rows(parts: Sequence[Tensor], count: int) -> Tensor:
    """Which of so many samples are in a micro-batch: bool ``[count]``."""
    is_in = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        is_in[part] = True
    return is_in


def token_counts(rollout: TextRollout, flops: FlopCount, passes: int, mesh: Mesh) -> dict[str, float]:
    """Metrics of all ranks' samples: tokens that were drawn, and operations that drawing and learning took.

    Args:
        rollout: this rank's B samples.
        flops: of the policy.
        passes: forward passes of other policies for each of the trained one.
        mesh: of the ranks.
    """
    drawn, lengths = rollout.num_rows, [len(each.token_ids) for own in rollout.sequences for each in own]
    cut = sum(own[-1].finish_reason == "length" for own in rollout.sequences if own)
    shapes = [each.images.shapes for own in rollout.sequences for each in own if each.images is not None]
    once = [  # a prompt's images are encoded once for the group
        each.images.shapes
        for request, own in zip(rollout.requests, rollout.sequences, strict=True)
        for each in own
        if each.images is not None and request.is_first
    ]
    sums = {
        "tokens": float(sum(drawn)),
        "samples": float(len(drawn)),
        "truncated": float(cut),
        "generate": float(flops.forward(lengths, sum(drawn), once)),
        "update": float(
            flops.training(lengths, shapes, sum(drawn)) + passes * flops.forward(lengths, sum(drawn), shapes)
        ),
    }
    sums, longest = mesh.sum_dict(sums), mesh.max(max(drawn, default=0))
    return {
        "rollout/tokens": sums["tokens"],
        "rollout/tokens_per_sample": sums["tokens"] / max(sums["samples"], 1),
        "rollout/tokens_longest": longest,
        "rollout/truncated": sums["truncated"] / max(sums["samples"], 1),
        "flops/generate": sums["generate"],
        "flops/update": sums["update"],
    }
