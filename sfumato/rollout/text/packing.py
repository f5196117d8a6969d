"""Samples of a language model as packed micro-batches, and values of the tokens that it drew.

A micro-batch is packed once and then goes through every model. Values that a model computes for its labels become
fields of the batch, ``[1, T]`` at the positions of the labels; ``gather_values`` gives them as ``[R]``.

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
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import padding_token
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.model import LanguageModel
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import Passes
from sfumato.rollout.text.tokens import TextRollout, TokenSequence


def pack_update(
    rollout: TextRollout, passes: Sequence[Passes], config: TextRLConfig, model: LanguageModel
) -> list[TokenBatch]:
    """Packs every micro-batch of an update, once for the passes of all policies and of a critic.

    Args:
        rollout: the rank's B samples.
        passes: the optimiser steps, each with the samples of its micro-batches.
        config: of the task; says how the losses of tokens are averaged.
        model: see ``pack_samples``.

    Returns:
        The micro-batches of all optimiser steps in order, with ``rollout_log_probs`` and ``loss_weights``. A pass
        without samples, which this rank makes because other ranks have more, becomes a placeholder: the first sample
        with weights of 0.
    """
    num_drawn = torch.tensor(rollout.num_rows)  # [B]
    first_decisions = num_drawn.cumsum(0) - num_drawn  # [B], of each sample among the R
    log_probs = drawn_log_probs(rollout)  # [R]
    lengths = num_drawn.repeat_interleave(num_drawn)  # [R], decisions of the sample that a token belongs to
    batches = []
    for step in passes:
        totals = step.num_rows, step.num_samples
        weights = row_weights(config.algorithm.aggregation, lengths, *totals, config.rollout.max_new_tokens)
        for samples in step.parts:
            is_placeholder = len(samples) == 0
            samples = torch.zeros(1, dtype=torch.int64) if is_placeholder else samples
            decisions = [
                torch.arange(num_drawn[row]) + first_decisions[row]  # pyright: ignore[reportCallIssue, reportArgumentType]
                for row in samples.tolist()
            ]
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
    """Packs B samples into one row, whose labels are the R tokens that the policy drew.

    Where ``model.shares_prompts``, neighbouring samples with the same prompt share it: the prompt stands once in the
    row, and the rest of each sample goes on from its last token.

    Args:
        rollout: the samples.
        model: has the tokenizer, whose padding is used, and says whether prompts are shared.
        decisions: int64 ``[R]``, the indices of these tokens among all that the rank's samples drew; by default 0 to
            R - 1, for samples that are all of the rank's.

    Returns:
        A batch with ``sample_index`` and ``decision_index``.
    """
    ids = rollout.sample_ids
    pad = padding_token(model.tokenizer)
    media_tokens = [] if model.vision is None else sorted(model.vision.reader.media_tokens())
    inputs = [[_make_input(sequence, media_tokens, pad) for sequence in sequences] for sequences in rollout.sequences]
    samples = _share_prompts(inputs) if model.shares_prompts else _make_documents(inputs)
    batch = make_batch(samples, ids, [0] * len(ids), True, pad, placeholder_tokens(model.mesh), model.vision)
    drawn_tokens = _gather_drawn(rollout, lambda sequence: sequence.token_ids).long()
    decisions = torch.arange(len(drawn_tokens)) if decisions is None else decisions
    owners = [number for number, sample in enumerate(samples) for _ in sample.documents] or [0]
    return replace(
        batch,
        # not the labels that ``make_batch`` shifted from the inputs, where a drawn media token became padding
        labels=batch.labels.masked_scatter(batch.loss_mask, drawn_tokens),
        sample_index=torch.tensor(owners)[batch.document_ids],
        decision_index=torch.full_like(batch.labels, -1).masked_scatter(batch.loss_mask, decisions),
    )


def _make_input(sequence: TokenSequence, media_tokens: list[int], pad: int) -> TokenSequence:
    """A sequence as the model's input, in which drawn tokens that stand for an image are padding.

    A token of ``media_tokens`` ends an answer when the policy draws it. It remains a label, but as an input the model
    would look for the features of an image, of which there is none.
    """
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
    """The documents of each sample, where neighbouring sequences with the same prompt share it.

    The tokens before the first drawn one are a document of the first sequence that has them. A second document holds
    the rest of each sequence, from the last token of its prompt on: there the first drawn token is predicted.
    """
    text_samples = []
    last_prompt = None
    for sequences in samples:
        documents = []
        for sequence in sequences:
            prompt_length = int(sequence.drawn.argmax()) if sequence.drawn.any() else 0
            if prompt_length < 2:  # nothing to share besides the token that is repeated
                last_prompt = None
                documents.append(Document(sequence.token_ids, sequence.drawn))
                continue
            prompt = sequence.token_ids[:prompt_length]
            if last_prompt is None or not np.array_equal(last_prompt, prompt):
                documents.append(Document(prompt, sequence.drawn[:prompt_length]))
                last_prompt = prompt
            last = prompt_length - 1  # the first drawn token is the label of this one
            documents.append(Document(sequence.token_ids[last:], sequence.drawn[last:], first_position=last))
        text_samples.append(TextSample(tuple(documents)))
    return text_samples


def drawn_log_probs(rollout: TextRollout) -> Tensor:
    """Log-probabilities of the samples' decisions as the engine gave them: float32 ``[R]``."""
    return _gather_drawn(rollout, lambda sequence: sequence.log_probs)


def _gather_drawn(rollout: TextRollout, select: Callable[[TokenSequence], np.ndarray]) -> Tensor:
    """An array of each sequence, which ``select`` gives, at the tokens that the policy drew: ``[R]``."""
    values = [
        torch.from_numpy(select(sequence)[sequence.drawn]) for sequences in rollout.sequences for sequence in sequences
    ]
    return torch.cat(values) if values else torch.zeros(0)


def group_by_step(batches: Sequence[TokenBatch], passes: Sequence[Passes]) -> list[list[TokenBatch]]:
    """The micro-batches of ``pack_update``, a list for each optimiser step."""
    remaining = iter(batches)
    return [[next(remaining) for _ in step.parts] for step in passes]


def add_values(batches: Sequence[TokenBatch], **values: Sequence[Tensor]) -> list[TokenBatch]:
    """Micro-batches with more fields: by the name of each field a tensor ``[1, T]`` for every micro-batch."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [replace(batch, **row) for batch, row in zip(batches, rows, strict=True)]


def gather_values(batches: Sequence[TokenBatch], name: str, rollout: TextRollout) -> Tensor:
    """A field of micro-batches at the positions of their labels, for all R tokens that the rank's samples drew.

    All values are brought to the host by one copy, so that the device is waited for once.

    Returns:
        float32 ``[R]`` in host memory; 0 of samples that are in no micro-batch.
    """
    gathered = torch.zeros(sum(rollout.num_rows))
    if not batches:
        return gathered
    values = [getattr(batch, name) for batch in batches]
    on_host = torch.cat([tensor.detach().flatten() for tensor in values]).cpu()
    for batch, row in zip(batches, on_host.split([tensor.numel() for tensor in values]), strict=True):
        if not batch.is_placeholder:  # it holds a sample of another pass, whose values stand there
            assert batch.decision_index is not None
            index = batch.decision_index.flatten()
            gathered[index[index >= 0]] = row[index >= 0]
    return gathered


def gather_token_values(batches: Sequence[TokenBatch], rollout: TextRollout) -> dict[str, Tensor]:
    """All values of the R tokens that the rank's samples drew, ``[R]`` by name, as dumps hold them."""
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
    """Advantages computed anew, from each sample's reward less the sum of its tokens' penalties. All ranks call it.

    So a KL in the reward comes before the baseline of a group, as in verl (``use_kl_in_reward``) and TRL (RLOO).

    Args:
        advantages: of the rank's B samples, with their rewards.
        rollout: these samples.
        penalties: ``[R]``, of the decisions.
        sequences: one for each sample, of its decisions.
        mask: bool ``[R]``: decisions that are learned from.
        config: of the task.
        mesh: of the ranks, over which the samples of a group may be spread.

    Returns:
        The advantages of this rank's samples; ``rewards`` in them are those before the penalty.
    """
    from sfumato.algorithms.token_advantages import subtract_token_penalties

    assert advantages.rewards is not None
    groups = torch.tensor([request.group_id for request in rollout.requests])
    by_rank = mesh.gather((subtract_token_penalties(advantages.rewards, penalties, sequences, mask), groups))
    rewards, groups = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
    first = sum(len(rank_rewards) for rank_rewards, _ in by_rank[: mesh.data_rank])
    compared = config.algorithm.advantage.compute(rewards, groups).rows(range(first, first + len(rollout)))
    return replace(compared, rewards=advantages.rewards, components=advantages.components)


def mark_rows(parts: Sequence[Tensor], count: int) -> Tensor:
    """Which of ``count`` samples are in a micro-batch: bool ``[count]``."""
    is_in = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        is_in[part] = True
    return is_in


def token_counts(rollout: TextRollout, flops: FlopCount, passes: int, mesh: Mesh) -> dict[str, float]:
    """Metrics of the samples of all ranks: tokens that were drawn, and operations that drawing and learning took.

    Args:
        rollout: this rank's B samples.
        flops: of the policy.
        passes: how many other policies make a forward pass over each sample that the trained one learns from.
        mesh: of the ranks.
    """
    num_drawn = rollout.num_rows
    lengths = [len(sequence.token_ids) for sequences in rollout.sequences for sequence in sequences]
    num_truncated = sum(sequences[-1].finish_reason == "length" for sequences in rollout.sequences if sequences)
    shapes = [
        sequence.images.shapes
        for sequences in rollout.sequences
        for sequence in sequences
        if sequence.images is not None
    ]
    shapes_in_drawing = [  # when answers are drawn, a prompt's images are encoded once for the group
        sequence.images.shapes
        for request, sequences in zip(rollout.requests, rollout.sequences, strict=True)
        for sequence in sequences
        if sequence.images is not None and request.is_first
    ]
    sums = {
        "tokens": float(sum(num_drawn)),
        "samples": float(len(num_drawn)),
        "truncated": float(num_truncated),
        "generate": float(flops.forward(lengths, sum(num_drawn), shapes_in_drawing)),
        "update": float(
            flops.training(lengths, shapes, sum(num_drawn)) + passes * flops.forward(lengths, sum(num_drawn), shapes)
        ),
    }
    sums = mesh.sum_dict(sums)
    longest = mesh.max(max(num_drawn, default=0))
    return {
        "rollout/tokens": sums["tokens"],
        "rollout/tokens_per_sample": sums["tokens"] / max(sums["samples"], 1),
        "rollout/tokens_longest": longest,
        "rollout/truncated": sums["truncated"] / max(sums["samples"], 1),
        "flops/generate": sums["generate"],
        "flops/update": sums["update"],
    }
