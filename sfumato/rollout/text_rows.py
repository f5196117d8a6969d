"""From samples of a language model to packed rows, and values of their decisions at the places of labels.

Shapes: B samples, R decisions (tokens that the policy drew), T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.sequences import Sequences
from sfumato.algorithms.token_advantages import penalised
from sfumato.data.packing import TextBatch, make_batch, placeholder_tokens
from sfumato.data.text import Document, TextSample
from sfumato.models.flops import FlopCount
from sfumato.models.language import LanguageModel
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.tokens import TextRollout, TokenSequence


def pack_samples(rollout: TextRollout, model: LanguageModel, fields: dict[str, Tensor]) -> TextBatch:
    """One packed row of B samples, whose labels are the R tokens that the policy drew.

    Where the model can, neighbouring samples with one prompt share it: it stands once before what follows its last
    token in each of them.

    Args:
        rollout: the samples.
        model: its tokenizer pads; ``shares_prompts``.
        fields: values ``[R]`` of each decision, sample by sample, by name.

    Returns:
        A batch with ``samples``, int64 ``[1, T]``, the number of each token's sample from 0 to B - 1, and each of the
        fields as ``[1, T]`` at the places of its labels, 0 elsewhere.
    """
    ids, pad = rollout.sample_ids, model.tokenizer.pad_token_id
    media = [] if model.vision is None else sorted(model.vision.reader.media_tokens())
    given = [[_as_input(each, media, pad) for each in own] for own in rollout.sequences]
    samples = (_sharing_prompts if model.shares_prompts else _apart)(given)
    batch = make_batch(samples, ids, [0] * len(ids), True, pad, placeholder_tokens(model.mesh), model.vision)
    labels, drawn = batch.tensors["labels"], _of_drawn(rollout, lambda sequence: sequence.token_ids)
    batch.tensors["labels"] = labels.masked_scatter(labels != IGNORED, drawn.long())
    numbers = [number for number, own in enumerate(samples) for _ in own.documents] or [0]
    batch.tensors["samples"] = torch.tensor(numbers)[batch.tensors["documents"]]
    batch.tensors.update({name: at_labels(values, batch) for name, values in fields.items()})
    return batch


def _as_input(sequence: TokenSequence, media: list[int], pad: int) -> TokenSequence:
    """A sequence as the model is given it. A token that stands for an image (one of ``media``), which ends an answer
    when the policy draws it, is a label and no input: there is no image for it."""
    if not media:
        return sequence
    has_no_image = sequence.drawn & np.isin(sequence.token_ids, media)
    return replace(sequence, token_ids=np.where(has_no_image, pad, sequence.token_ids).astype(np.int32))


def _apart(sequences: Sequence[list[TokenSequence]]) -> list[TextSample]:
    """A document for each sequence of each sample."""
    return [
        TextSample(tuple(Document(each.token_ids, each.drawn, images=each.images) for each in own)) for own in sequences
    ]


def _sharing_prompts(sequences: Sequence[list[TokenSequence]]) -> list[TextSample]:
    """The same, but that what stands before the first drawn token is a document of its own, of the first of neighbours
    that have it in common, and what comes after it goes on from its last token."""
    found, known = [], None
    for own in sequences:
        documents = []
        for each in own:
            given = int(each.drawn.argmax()) if each.drawn.any() else 0
            if given < 2:
                known = None
                documents.append(Document(each.token_ids, each.drawn))
                continue
            prompt = each.token_ids[:given]
            if known is None or not np.array_equal(known, prompt):
                documents.append(Document(prompt, each.drawn[:given]))
                known = prompt
            last = given - 1  # its output is what the first drawn token is a label of
            documents.append(Document(each.token_ids[last:], each.drawn[last:], first_position=last))
        found.append(TextSample(tuple(documents)))
    return found


def at_labels(values: Tensor, batch: TextBatch) -> Tensor:
    """Values ``[R]`` of the decisions of a batch at the places of their labels: ``[1, T]``, 0 elsewhere."""
    labels = batch.tensors["labels"]
    return torch.zeros(labels.shape, dtype=values.dtype).masked_scatter(labels != IGNORED, values.cpu())


def of_decisions(rows: Tensor, batch: TextBatch) -> Tensor:
    """The values ``[R]`` of a tensor ``[1, T]`` on the CPU at the places of labels: the inverse of ``at_labels``."""
    return rows[batch.tensors["labels"] != IGNORED]


def drawn_log_probs(rollout: TextRollout) -> Tensor:
    """Log-probabilities of B samples' decisions as the engine gave them: float32 ``[R]``."""
    return _of_drawn(rollout, lambda sequence: sequence.log_probs)


def drawn_versions(rollout: TextRollout) -> Tensor:
    """Versions of the policies that drew them: int32 ``[R]``."""
    return _of_drawn(rollout, lambda sequence: sequence.versions)


def _of_drawn(rollout: TextRollout, of_sequence: Callable) -> Tensor:
    parts = [torch.from_numpy(of_sequence(each)[each.drawn]) for own in rollout.sequences for each in own]
    return torch.cat(parts) if parts else torch.zeros(0)


def of_all_decisions(
    rollout: TextRollout,
    parts: Sequence[Tensor],
    model: LanguageModel,
    compute: Callable[[list[TextBatch]], list[Tensor]],
) -> Tensor:
    """What a model says of the decisions of B samples, without gradients.

    Args:
        rollout: the samples.
        parts: int64, those of each micro-batch, perhaps none; as many micro-batches on every rank.
        model: its tokenizer pads.
        compute: from micro-batches to a number for each token, float32 ``[1, T]`` for each micro-batch, such as the
            log-probabilities of labels, or a critic's values.

    Returns:
        float32 ``[R]`` on the CPU; 0 of samples that are in no part.
    """
    given = [rollout.rows(part if len(part) else torch.zeros(1, dtype=torch.int64)) for part in parts]
    batches = [pack_samples(some, model, {}) for some in given]
    found = [torch.zeros(count) for count in rollout.num_rows]
    computed = compute(batches)  # which are brought to the CPU in one copy
    sizes, shapes = [rows.numel() for rows in computed], [rows.shape for rows in computed]
    whole = torch.cat([rows.detach().flatten() for rows in computed]).cpu() if computed else torch.zeros(0)
    on_host = [rows.view(shape) for rows, shape in zip(whole.split(sizes), shapes, strict=True)]
    for part, some, batch, rows in zip(parts, given, batches, on_host, strict=True):
        split = of_decisions(rows, batch).split(some.num_rows)
        for sample, values in zip(part.tolist(), split, strict=False):
            found[sample] = values
    return torch.cat(found)


def baselined(update: Any, penalties: Tensor, sequences: Sequences, mask: Tensor) -> tuple[Advantages, None]:
    """Advantages of rewards less the sum of their tokens' penalties, compared over all ranks, which all call it.

    So a KL in the reward comes before the baseline of a group, as in verl (``use_kl_in_reward``) and TRL (RLOO).

    Args:
        update: its B samples with their rewards, and the configuration.
        penalties: ``[R]`` of the decisions.
        sequences: of these, one for each sample.
        mask: bool ``[R]``: those that are learned from.

    Returns:
        Of this rank's samples, with their rewards before the penalty; and no penalties, since they are taken.
    """
    mesh, own = update.actor.mesh, update.advantages
    groups = torch.tensor([request.group_id for request in update.batch.requests])
    everyone = mesh.gather((penalised(own.rewards, penalties, sequences, mask), groups))
    rewards, groups = (torch.cat(parts) for parts in zip(*everyone, strict=True))
    first = sum(len(part) for part, _ in everyone[: mesh.data_rank])
    found = update.config.algorithm.advantage.compute(rewards, groups)
    return replace(
        found.rows(range(first, first + len(update.batch))), rewards=own.rewards, components=own.components
    ), None


def rows_in(parts: Sequence[Tensor], count: int) -> Tensor:
    """Which of so many samples are in a micro-batch: bool ``[count]``."""
    found = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        found[part] = True
    return found


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
