"""Chooses the kind of ``rows.py`` that computes a model's logits rightly: by trying, not by a list of architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from sfumato.data.media.document_media import MediaRefs, Tensors
from sfumato.errors import ConfigError
from sfumato.models.language.hf_config import can_set_attention
from sfumato.models.language.packed_attention import ATTENTION
from sfumato.models.language.probe_documents import with_images
from sfumato.models.language.row_cache import cache_argument
from sfumato.parallel.expert_modules import has_experts
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.embedded.forward import Forward
from sfumato.rollout.engines.embedded.rows import (
    CachedRows,
    GroupedRows,
    RecomputedRows,
    Rows,
    rounded_up,
)

if TYPE_CHECKING:
    from torch import nn

FLOAT32, HALF = (5e-5, 5e-3, 4e-6), (0.3, 3.0, 0.03)
"""Tolerances (least, most, by_size): nats by which rounding may change the log-probability of a likely token. The
bound is ``by_size`` for each nat of the least likely token, since logits are rounded by their size, but no less than
``least`` and no more than ``most``. A wrong mask, position or state makes 0.01 and more. In float32 the bound is also
at least ``TIMES`` the change that one more token at the end of a row makes."""

TIMES = 10

CHECKED_POSITIONS = 512
"""Positions at which the check looks that no token depends on later ones."""
MOST_CHECKED_TOKENS = 512
"""Most tokens of the sequences of that check."""

TEXTS_OF_EXPERTS = 8
"""Sequences among which the positions are spread where experts choose by the tokens: more sequences estimate better how
many tokens are sent elsewhere. Other modules get one, which is cut at more places: what looks ahead does so in every
sequence, and what looks ahead a little shows where a cut is near."""

REROUTED_FRACTION = 0.005
"""With experts, the fraction of tokens that rounding may send to other experts, which changes more than rounding."""

LIKELIEST = 8
"""Tokens of the vocabulary that are compared: in half precision the logits of unlikely ones are rounded by much."""

SIGHT = ((56, 84), (28, 28))
"""For multimodal models, heights and widths in pixels of the images in one of the sequences."""

LONG = 128
"""Tokens from which a text of the comparison goes through the module once, where shorter ones do twice."""

Texts = list[list[int]]


def choose_rows(
    forward: Forward, longest: int, max_tokens: int, is_for_training: bool = True
) -> tuple[Rows, str | None]:
    """Chooses the fastest kind of rows that gives the logits which the module gives for whole sequences.

    A few sequences of random tokens, short ones and one that is as long as the engine's are, so that windows and
    chunks show, go through the module whole, and then through each kind, the fastest first, until one gives the same.

    Args:
        forward: of the module.
        longest: tokens of the longest sequence that is tried.
        max_tokens: in one forward pass.
        is_for_training: whether what is drawn is learned from. Otherwise a model may look ahead, which is not tried and
            takes more than half of the time, and rounding is bounded by the most that is ever allowed.

    Returns:
        The rows, and why faster kinds were not taken; None when the fastest was.

    Raises:
        ConfigError: for training, when the module's logits of a token depend on later tokens.
        EngineError: when the module computes NaN.
    """
    with forward.in_full_precision():
        return _choose(forward, longest, max_tokens, is_for_training)


def _choose(forward: Forward, longest: int, max_tokens: int, is_for_training: bool) -> tuple[Rows, str | None]:
    generator = np.random.default_rng(0)
    num_embeddings = cast("nn.Embedding", forward.module.get_input_embeddings()).num_embeddings
    lengths = sorted({min(length, longest) for length in (13, 5, 2, longest)})
    vocabulary = _plain_tokens(forward, num_embeddings)
    texts = [vocabulary[generator.integers(len(vocabulary), size=length)].tolist() for length in lengths]
    images: list[MediaRefs | None] = [None] * len(texts)
    if forward.vision is not None:
        probe = with_images(vocabulary[generator.integers(len(vocabulary), size=13)], SIGHT, forward.vision)
        if len(probe.input_ids) <= longest:  # of the longest text there is always one
            texts = [probe.input_ids.tolist(), *texts]
            images = [probe.images, *images]
    try:
        expected = _reference_logits(forward, texts, images)
    except ConfigError:  # the attention of packed rows, which wants to be told positions
        forward.gives_positions = True
        expected = _reference_logits(forward, texts, images)
    if expected.isnan().any():
        raise EngineError(f"{type(forward.module).__name__} computes logits that are not finite: look at its weights")
    half = (torch.bfloat16, torch.float16)
    is_half = expected.dtype in half or any(parameter.dtype in half for parameter in forward.module.parameters())
    least, most, of_size = HALF if is_half else FLOAT32
    bound = min(max(of_size * _largest_surprisal(expected), least), most)
    if is_for_training:
        noise = _refuse_looking_ahead(forward, vocabulary, longest, bound if is_half else most)
        bound = bound if is_half else min(max(bound, TIMES * noise), most)
    elif not is_half:
        bound = most
    problems = []
    for build in _row_builders(forward, max_tokens):
        problem, rows = _try(build, forward, texts, images, expected, bound)
        if rows is not None:
            return rows, "; ".join(problems) or None
        problems.append(problem)
    return RecomputedRows(forward, max_tokens), "; ".join(problems)


def _plain_tokens(forward: Forward, size: int) -> np.ndarray:
    """Token ids of a vocabulary of this size without those that stand for media."""
    token_ids = np.arange(size)
    return token_ids if forward.vision is None else np.setdiff1d(token_ids, forward.vision.ids_beside_text())


def _reference_logits(forward: Forward, texts: Texts, images: Sequence[MediaRefs | None]) -> Tensor:
    """The reference: logits ``[2 * n, V]`` that follow the n texts without their last tokens, then the whole texts.

    Short texts are computed without their last tokens, too, since a model may look ahead; long ones, whose time would
    be twice as much, are computed once.
    """

    def last_two(text: list[int], media: Tensors) -> Tensor:
        tokens = torch.tensor([text], device=forward.device)
        if len(text) > LONG:
            return forward.some(tokens, [len(text) - 2, len(text) - 1], [media])[0]
        return torch.cat([forward.last(tokens[:, :-1], [media]), forward.last(tokens, [media])])

    media = [forward.media_of(media_refs) for media_refs in images]
    before_last, of_last = zip(
        *(last_two(text, tensors) for text, tensors in zip(texts, media, strict=True)), strict=True
    )
    return torch.stack([*before_last, *of_last])


def _refuse_looking_ahead(forward: Forward, vocabulary: np.ndarray, length: int, bound: float) -> float:
    """Raises ConfigError when logits of a token change by more than ``bound`` when other tokens follow it.

    Returns:
        The 99th percentile of these changes, which is what rounding makes.
    """
    num_texts = TEXTS_OF_EXPERTS if has_experts(forward.module) else 1
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(vocabulary), (num_texts, min(length, MOST_CHECKED_TOKENS)), generator=generator)
    tokens = torch.from_numpy(vocabulary)[drawn].to(forward.device)
    length = tokens.shape[1]
    lengths_of_cuts = {length - 1, length // 2}
    if num_texts == 1:
        lengths_of_cuts |= {length >> halvings for halvings in range(2, length.bit_length())}
    columns_of_cuts = {
        cut: sorted({*np.linspace(0, cut - 1, CHECKED_POSITIONS // num_texts).astype(int).tolist()})
        for cut in lengths_of_cuts
    }
    all_columns = sorted({column for columns in columns_of_cuts.values() for column in columns})
    whole = forward.some(tokens, all_columns)
    differences_of_cuts = []
    for length_of_cut, columns in columns_of_cuts.items():
        cut = forward.some(tokens[:, :length_of_cut], columns)
        same = whole[:, [all_columns.index(column) for column in columns]]
        differences_of_cuts.append(_log_prob_differences(same.flatten(0, 1), cut.flatten(0, 1)))
    differences = torch.cat(differences_of_cuts)
    noticing = (differences > bound).float().mean()
    if noticing > (REROUTED_FRACTION if has_experts(forward.module) else 0):
        raise ConfigError(
            f"{type(forward.module).__name__}: what it says of a token depends on how many tokens follow, by up to "
            f"{differences.max():.2g} in a log-probability, for {noticing:.0%} of tokens: training could not say again "
            "what was drawn, so such a model cannot draw for RL"
        )
    return float(differences.quantile(0.99))


def _row_builders(forward: Forward, max_tokens: int) -> list[Callable[[int], CachedRows | GroupedRows | str]]:
    """Functions that build a kind of rows, given the bytes of a token, or return why the module cannot have it. The
    fastest comes first."""
    module = forward.module
    name = type(module).__name__

    def cached(cost: int) -> CachedRows | str:
        if not can_set_attention(module):
            return f"{name} has an attention of its own"
        if "position_ids" not in forward.arguments:
            return f"{name} takes no position_ids"
        if cache_argument(forward.arguments) in (None, "cache_params"):  # the latter's is of states alone
            return f"{name} takes no cache of keys and values"
        return CachedRows(forward, max_tokens, cost)

    def grouped(attention: str | None, gives_positions: bool) -> Callable[[int], GroupedRows | str]:
        def make(cost: int) -> GroupedRows | str:
            if cache_argument(forward.arguments) is None:
                return f"{name} takes no cache"
            if forward.vision is not None:
                return f"{name} sees images, whose positions a cache of transformers keeps in the module"
            return GroupedRows(forward, max_tokens, attention, gives_positions, cost)

        return make

    is_packed = module.config.get_text_config()._attn_implementation == ATTENTION  # which knows no caches
    attentions = ("sdpa", "eager") if is_packed else (None,)
    positions = (True, False) if "position_ids" in forward.arguments else (False,)
    return [cached, *(grouped(*settings) for settings in product(attentions, positions))]


def _try(
    build: Callable[[int], CachedRows | GroupedRows | str],
    forward: Forward,
    texts: Texts,
    images: Sequence[MediaRefs | None],
    expected: Tensor,
    bound: float,
) -> tuple[str, Rows | None]:
    """Tries a kind of rows on texts.

    Args:
        build: one of ``_row_builders``.
        forward: of the module.
        texts: token ids.
        images: of each text.
        expected: logits, as ``_reference_logits`` returns them.
        bound: nats by which log-probabilities may differ.

    Returns:
        Why it cannot be taken and None, or an empty text and the rows, empty.
    """
    rows = build(0)
    if isinstance(rows, str):
        return rows, None
    kind = type(rows).__name__
    name = type(forward.module).__name__
    if isinstance(rows, CachedRows):  # the longest text is computed in parts
        rows = CachedRows(forward, max(map(len, texts)) // 2)
    # The first text once more: equal texts share their computation, and one of the two leaves after the first step.
    count = len(texts)
    texts = [*texts, texts[0]]
    images = [*images, images[0]]
    rows.resize(len(texts), rounded_up(max(map(len, texts))))
    try:
        rows.begin(0, [text[:-1] for text in texts], images)
        first = rows.step(*_tokens_from_end(texts, 2, forward.device))[:count]
        rows.move([count], [0], len(texts[0]))
        second = rows.step(*_tokens_from_end(texts[:count], 1, forward.device))
    except Exception as error:  # whatever transformers' modules raise
        return f"{name} does not run as {kind} ({type(error).__name__}: {error})", None
    largest_difference = float(_log_prob_differences(torch.cat([first, second]), expected).max())
    if largest_difference > bound:
        return f"{name} as {kind} differs from whole sequences by {largest_difference:.2g} in a log-probability", None
    cost = rows.bytes_per_token
    if isinstance(rows, GroupedRows):
        cost = rows.held_bytes // sum(map(len, texts[:count]))
    chosen = build(cost)
    assert not isinstance(chosen, str)
    return "", chosen


def _tokens_from_end(texts: Texts, last: int, device: torch.device) -> tuple[Tensor, np.ndarray]:
    """The token at ``[-last]`` of each text, int64 ``[n]``, and its position, int64 ``[n]``."""
    tokens = torch.tensor([text[-last] for text in texts], device=device)
    return tokens, np.array([len(text) - last for text in texts])


def _largest_surprisal(logits: Tensor) -> float:
    """Minus the log-probability of the least likely token, of those whose probability is not 0."""
    log_probs = logits.double().log_softmax(-1)
    return float(log_probs.where(log_probs.isfinite(), 0).abs().max())


def _log_prob_differences(logits: Tensor, expected: Tensor) -> Tensor:
    """Largest differences of the log-probabilities of the likeliest tokens, of logits ``[N, V]``: ``[N]``."""
    actual_log_probs, expected_log_probs = (values.double().log_softmax(-1) for values in (logits, expected))
    likeliest = expected_log_probs.topk(min(LIKELIEST, expected_log_probs.shape[-1])).indices
    differences = (actual_log_probs - expected_log_probs).gather(-1, likeliest).abs()
    # Where the model gives a token no probability at all the difference is NaN: that counts as wrong.
    return differences.amax(-1).nan_to_num(nan=torch.inf)
