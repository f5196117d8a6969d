"""Losses, advantages and weights of tokens: gradients, masks, sequences that are cut over ranks, what is refused.

Values stand in ``tests/golden/test_text_rl.py``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sfumato.algorithms.aggregation import row_weights
from sfumato.algorithms.off_policy import Decoupled, KLRejection, OffPolicy, Rejection, log_ratio_of
from sfumato.algorithms.row_losses import value_loss
from sfumato.algorithms.sequences import Reduce, Sequences
from sfumato.algorithms.token_advantages import (
    GAE,
    Distillation,
    Returns,
    SampleAdvantage,
    discounted_returns,
    gae,
    subtract_token_penalties,
    token_rewards,
    whitened,
)
from sfumato.algorithms.token_kl import TokenKL, estimate
from sfumato.algorithms.token_objectives import CISPO, GMPO, GSPO, SAPO, PolicyGradient, PPOClip
from sfumato.config.base import find_variants

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.tensor([5, 1, 0, 4, 6])
MASK = torch.tensor([1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1]) > 0  # the second sequence has none
SEQUENCES = Sequences.of_lengths(LENGTHS)
OF_ROW = SEQUENCES.of_row.tolist()
R = len(MASK)
OBJECTIVES = [
    PPOClip(0.2),
    PPOClip(0.2, 0.28, dual_clip=1.5),
    PPOClip(0.2, max_drift=0.05),
    GSPO(0.05, 0.06),
    GSPO(0.05, 0.06, gradient="sequence"),
    GMPO(),
    CISPO(),
    CISPO(0.2, 1.3, "absolute"),
    SAPO(),
    SAPO(level="sequence"),
    PolicyGradient(),
]


@pytest.fixture(autouse=True)
def same_numbers_in_each_test() -> None:
    GENERATOR.manual_seed(0)


def normal(scale: float = 1.0, size: int = R) -> torch.Tensor:
    return torch.randn(size, generator=GENERATOR, dtype=torch.float64) * scale


def named(part: object) -> str:
    return f"{part.type}-{getattr(part, 'gradient', '')}{getattr(part, 'level', '')}{getattr(part, 'bound', '')}"


# Sequences


def test_sums_means_and_counts_are_those_of_each_sequence() -> None:
    values = normal()
    values_of_sequences = [
        [float(values[row]) for row in range(R) if OF_ROW[row] == index and MASK[row]] for index in range(5)
    ]
    assert SEQUENCES.sums(values, MASK).tolist() == pytest.approx(
        [math.fsum(sequence) for sequence in values_of_sequences]
    )
    assert SEQUENCES.counts(MASK).tolist() == [len(sequence) for sequence in values_of_sequences] == [4, 0, 0, 3, 5]
    assert SEQUENCES.means(values, MASK).tolist() == pytest.approx(
        [sum(sequence) / len(sequence) if sequence else 0 for sequence in values_of_sequences]
    )
    assert SEQUENCES.means(values).tolist()[1] == values[5]
    assert SEQUENCES.spread(torch.arange(5.0)).tolist() == OF_ROW
    assert SEQUENCES.sums(values.float(), MASK).dtype == torch.float32
    assert SEQUENCES.sums(torch.full((R,), 0.1), None)[4] == pytest.approx(0.6, rel=1e-7)
    with pytest.raises(ValueError, match=r"must both be \[R\]"):
        SEQUENCES.sums(values[:-1])


def test_names_of_sequences_may_be_any_numbers() -> None:
    named = Sequences.named(torch.tensor([7, -2, 7, 40]))
    assert (named.of_row.tolist(), named.count) == ([1, 0, 1, 2], 3)


def test_what_stands_outside_the_mask_reaches_neither_sums_nor_gradients() -> None:
    values = normal().masked_fill(~MASK, math.nan).requires_grad_(True)
    SEQUENCES.means(values, MASK).square().sum().backward()
    assert torch.isfinite(values.grad).all() and (values.grad[~MASK] == 0).all() and (values.grad[MASK] != 0).all()


def on_two_ranks(compute: Callable[[torch.Tensor, Reduce], torch.Tensor]) -> torch.Tensor:
    """What two ranks compute ``[R]``, of which each holds every other row of all sequences: two threads that meet.

    Gradients pass through the sum over both, as they do through a differentiable all-reduce.
    """
    barrier, parts = threading.Barrier(2, timeout=30), [torch.empty(0)] * 2
    halves = [torch.arange(R)[rank::2] for rank in range(2)]

    def of_rank(rank: int) -> torch.Tensor:
        def reduce(values: torch.Tensor) -> torch.Tensor:
            parts[rank] = values
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

        return compute(halves[rank], reduce)

    with ThreadPoolExecutor(2) as pool:
        result = list(pool.map(of_rank, range(2)))
    return torch.cat(result)[torch.cat(halves).argsort()]


@pytest.mark.parametrize(
    "part",
    [
        Rejection("token", 0.6, 1.7, "token", 1.1),
        Rejection("sequence", 0.6, 1.7, "sequence_mean", 1.1),
        Rejection("sequence_mean", 0.9, 1.7, "sequence", 1.1),
        Decoupled("sequence_mean", 1.1),
        KLRejection("sequence_mean", "k3", 0.117),
    ],
    ids=lambda part: f"{part.type}-{part.level}",
)
def test_corrections_do_not_depend_on_how_a_sequence_is_cut(part: OffPolicy) -> None:
    apart = normal(0.4)
    whole = part.correct(apart, SEQUENCES, MASK).weights
    assert len(whole.unique()) > 2 and (whole == 0).any() == (part.type != "decoupled")

    def weights(rows: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        return part.correct(apart[rows], Sequences(SEQUENCES.of_row[rows], 5, reduce), MASK[rows]).weights

    torch.testing.assert_close(on_two_ranks(weights), whole)


def test_words_for_steps_and_for_tokens_are_the_same_levels() -> None:
    apart = normal(0.4)
    for token, step in (("token", "step"), ("sequence", "trajectory"), ("sequence_mean", "trajectory_mean")):
        results = [log_ratio_of(apart, SEQUENCES.of_row, level, MASK) for level in (token, step)]
        assert torch.equal(*results)


# Objectives


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
def test_while_both_policies_are_one_the_gradient_is_that_of_reinforce(objective: object) -> None:
    """The ratio is exactly 1, and where all tokens of a sequence have one advantage all objectives begin alike."""
    advantages = SEQUENCES.spread(normal(size=5))
    log_ratio = torch.zeros(R, dtype=torch.float64, requires_grad=True)
    losses, stats = objective.loss(log_ratio, advantages, MASK, SEQUENCES)
    assert (losses[~MASK] == 0).all()
    assert stats["ratio/mean"] == MASK.sum() and stats["ratio/approx_kl"] == 0
    assert all(value == 0 for name, value in stats.items() if "clipped" in name)
    lengths = SEQUENCES.spread(SEQUENCES.counts(MASK))
    (row_weights("seq-mean-token-mean", lengths, 12.0, 3.0, 6) * losses).sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.where(MASK, -advantages / lengths / 3, 0.0))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
def test_nothing_outside_the_mask_reaches_a_loss_or_a_gradient(objective: object) -> None:
    log_ratio, advantages = normal(0.3), normal()
    results = []
    for filled in (0.0, math.nan, math.inf):
        filled_log_ratio = log_ratio.masked_fill(~MASK, filled).requires_grad_(True)
        losses, stats = objective.loss(filled_log_ratio, advantages.masked_fill(~MASK, filled), MASK, SEQUENCES)
        losses.sum().backward()
        assert (losses[~MASK] == 0).all() and (filled_log_ratio.grad[~MASK] == 0).all() and losses[MASK].ne(0).any()
        results.append((losses.detach(), filled_log_ratio.grad, torch.stack(list(stats.values()))))
        assert not any(value.requires_grad for value in stats.values())
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "objective",
    [
        objective
        for objective in OBJECTIVES
        if objective.type in ("ppo_clip", "sapo") or getattr(objective, "gradient", "") == "sequence"
    ],
    ids=named,
)
def test_gradients_are_those_of_the_values(objective: object) -> None:
    advantages = normal()
    log_ratio = normal(0.3).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda rows: objective.loss(rows, advantages, MASK, SEQUENCES)[0], [log_ratio])


def test_gmpo_has_the_gradient_of_its_values() -> None:
    advantages, log_ratio = SEQUENCES.spread(normal(size=5)), normal(0.5).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda rows: GMPO().loss(rows, advantages, MASK, SEQUENCES)[0], [log_ratio])


def test_straight_through_the_tokens_of_gspo() -> None:
    """Values are the sequence's; a token's gradient is its own, with its own advantage (GSPO-token)."""
    log_ratio, advantages = normal(0.02).requires_grad_(True), normal()
    losses, _ = GSPO(0.5, 0.5).loss(log_ratio, advantages, MASK, SEQUENCES)
    ratio = SEQUENCES.spread(SEQUENCES.means(log_ratio.detach(), MASK)).exp()
    expected = torch.where(MASK, -advantages * ratio, 0.0)
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    torch.testing.assert_close(log_ratio.grad, expected)


def test_both_gradients_of_gspo_agree_where_a_sequence_has_one_advantage() -> None:
    advantages, apart, results = SEQUENCES.spread(normal(size=5)), normal(0.1), []
    for gradient in ("token", "sequence"):
        log_ratio = apart.clone().requires_grad_(True)
        GSPO(0.05, 0.05, gradient=gradient).loss(log_ratio, advantages, MASK, SEQUENCES)[0].sum().backward()
        results.append(log_ratio.grad)
    torch.testing.assert_close(*results)
    assert results[0].abs().max() > 0


def test_the_weight_of_cispo_has_no_gradient_and_cuts_none() -> None:
    log_ratio = torch.tensor([-1.0, 0.1, 1.0], dtype=torch.float64, requires_grad=True)
    advantages, mask = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), torch.ones(3) > 0
    for objective, weights in (
        (CISPO(0.5, 0.3), [0.5, math.exp(0.1), 1.3]),
        (CISPO(1.0, 1.3, "absolute"), [math.exp(-1), math.exp(0.1), 1.3]),
    ):
        losses, stats = objective.loss(log_ratio, advantages, mask, Sequences(torch.zeros(3, dtype=torch.long), 1))
        (gradient,) = torch.autograd.grad(losses.sum(), log_ratio)
        assert gradient.tolist() == pytest.approx([-1 * weights[0], 2 * weights[1], -3 * weights[2]])
        assert losses.tolist() == gradient.tolist()
        assert stats["ratio/clipped_high"] == 1 and stats["ratio/clipped_low"] == (objective.bound == "one_plus")
    with pytest.raises(ValueError, match="set bound to one_plus"):
        CISPO(0.2, 0.28, "absolute")


def test_the_gate_of_sapo_is_1_at_the_policy_and_closes_on_both_sides() -> None:
    one = torch.ones(1) > 0
    for sign, tau in ((1.0, 2.0), (-1.0, 3.0)):
        objective = SAPO(2.0, 3.0)
        slopes = []
        for at in (-0.5, 0.0, 0.5):
            log_ratio = torch.tensor([at], dtype=torch.float64, requires_grad=True)
            losses, _ = objective.loss(
                log_ratio,
                torch.tensor([sign], dtype=torch.float64),
                one,
                Sequences(torch.zeros(1, dtype=torch.long), 1),
            )
            losses.sum().backward()
            slopes.append(float(log_ratio.grad / math.exp(at)) / -sign)  # with respect to the ratio
        assert slopes[1] == pytest.approx(1.0)
        assert slopes[0] == pytest.approx(
            4 * math.exp(-tau * (math.exp(-0.5) - 1)) / (1 + math.exp(-tau * (math.exp(-0.5) - 1))) ** 2
        )
        assert slopes[2] < 1 and slopes[0] < 1


@pytest.mark.parametrize("objective", [PPOClip(), GSPO(0.2, 0.2), CISPO(), SAPO(), GMPO()], ids=named)
def test_a_ratio_beyond_all_numbers_leaves_losses_and_gradients_finite(objective: object) -> None:
    log_ratio = torch.tensor([200.0, -200.0, 0.0], requires_grad=True)
    advantages, mask = torch.tensor([1.0, 1.0, -1.0]), torch.ones(3) > 0
    losses, _ = objective.loss(log_ratio, advantages, mask, Sequences(torch.arange(3), 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(log_ratio.grad).all()


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    log_ratio = torch.log(torch.tensor([2.0, 5.0, 5.0])).requires_grad_(True)
    advantages, mask = torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3) > 0
    sequences = Sequences(torch.zeros(3, dtype=torch.long), 1)
    losses, stats = PPOClip(0.2, dual_clip=3.0).loss(log_ratio, advantages, mask, sequences)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert log_ratio.grad.tolist() == pytest.approx([2.0, 0.0, 0.0])
    assert stats["ratio/dual_clipped"] == 1 and stats["ratio/clipped"] == 1
    assert PPOClip(0.2).loss(log_ratio, advantages, mask, sequences)[0].tolist() == pytest.approx([2.0, 5.0, -1.2])


def test_sequences_that_the_policy_left_teach_nothing_bad() -> None:
    log_ratio = torch.tensor([-0.3, -0.1, -0.1, 0.3], requires_grad=True)  # means -0.2 and 0.1
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    mask, sequences = torch.ones(4) > 0, Sequences(torch.tensor([0, 0, 1, 1]), 2)
    losses, stats = PPOClip(0.9, max_drift=0.15).loss(log_ratio, advantages, mask, sequences)
    losses.sum().backward()
    ratio = torch.exp(log_ratio.detach())
    torch.testing.assert_close(losses.detach(), torch.tensor([0.0, -1.0, 1.0, -1.0]) * ratio)
    torch.testing.assert_close(log_ratio.grad, losses.detach())
    assert stats["ratio/drifted"] == 1


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
def test_losses_and_gradients_do_not_depend_on_how_a_sequence_is_cut(objective: object) -> None:
    advantages, apart = normal(), normal(0.1)
    whole, cut = (apart.clone().requires_grad_(True) for _ in range(2))
    expected, _ = objective.loss(whole, advantages, MASK, SEQUENCES)
    expected.sum().backward()

    def losses(rows: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        sequences = Sequences(SEQUENCES.of_row[rows], 5, reduce)
        return objective.loss(cut[rows], advantages[rows], MASK[rows], sequences)[0]

    actual = on_two_ranks(losses)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(cut.grad, whole.grad)


def test_objectives_are_found() -> None:
    assert set(find_variants("sfumato.algorithms.token_objectives")) == {objective.type for objective in OBJECTIVES}


# Aggregation


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_parts_of_a_step_add_up_to_the_whole(mode: str) -> None:
    losses, lengths = normal(), SEQUENCES.spread(SEQUENCES.counts(MASK))
    weights = row_weights(mode, lengths, 12.0, 3.0, 6)
    whole = (weights * losses * MASK).sum()
    losses_of_sequences = [losses[(SEQUENCES.of_row == value) & MASK] for value in (0, 3, 4)]
    expected = {
        "token-mean": torch.cat(losses_of_sequences).mean(),
        "seq-mean-token-mean": torch.stack([tensor.mean() for tensor in losses_of_sequences]).mean(),
        "seq-mean-token-sum": torch.stack([tensor.sum() for tensor in losses_of_sequences]).mean(),
        "seq-mean-token-sum-norm": torch.stack([tensor.sum() for tensor in losses_of_sequences]).mean() / 6,
    }[mode]
    torch.testing.assert_close(whole, expected)
    parts = [
        (row_weights(mode, lengths[rows], 12.0, 3.0, 6) * losses[rows] * MASK[rows]).sum()
        for rows in (torch.arange(R) < 3, (torch.arange(R) >= 3) & (torch.arange(R) < 9), torch.arange(R) >= 9)
    ]
    torch.testing.assert_close(sum(parts), expected)


def test_counts_that_are_missing_and_unknown_modes_are_refused() -> None:
    lengths = torch.ones(2)
    for mode, counts, what in (
        ("token-mean", (0.0, 1.0, 1), "num_tokens"),
        ("seq-mean-token-mean", (1.0, 0.0, 1), "num_sequences"),
        ("seq-mean-token-sum-norm", (1.0, 1.0, 0), "max_length"),
        ("token-median", (1.0, 1.0, 1), "unknown aggregation"),
    ):
        with pytest.raises(ValueError, match=what):
            row_weights(mode, lengths, *counts)


# KL


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_estimates_and_their_gradients(estimator: str) -> None:
    apart = normal(0.5)
    expected = {
        "k1": apart,
        "abs": apart.abs(),
        "k2": apart**2 / 2,
        "k3": torch.exp(-apart) - 1 + apart,
    }[estimator]
    torch.testing.assert_close(estimate(apart, estimator), expected)
    log_probs = normal().requires_grad_(True)
    reference = (log_probs.detach() - apart).requires_grad_(True)
    kl = TokenKL(0.1, estimator, gradient="k2")
    actual = kl.penalty(log_probs, reference)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    torch.testing.assert_close(log_probs.grad, apart)  # k2's, whatever the value
    log_probs.grad = None
    TokenKL(0.1, estimator).penalty(log_probs, reference).sum().backward()
    slope = {"k1": torch.ones(R), "abs": apart.sign(), "k2": apart, "k3": 1 - torch.exp(-apart)}[estimator]
    torch.testing.assert_close(log_probs.grad, slope.double())
    assert reference.grad is None  # even of a reference that could learn


def test_k3_of_tokens_that_the_policy_draws_is_the_kl() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy: exact, and so is the weighted form's gradient."""
    logits, reference = normal(size=7).requires_grad_(True), normal(size=7).log_softmax(0)
    log_probs = logits.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    weights = log_probs.exp().detach()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((weights * TokenKL(1.0, estimator).penalty(log_probs, reference)).sum(), exact)
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    kl = TokenKL(1.0, "k3", importance_weighted=True)
    log_ratio = log_probs - log_probs.detach()
    actual = (weights * kl.penalty(log_probs, reference, log_ratio)).sum()
    torch.testing.assert_close(torch.autograd.grad(actual, logits, retain_graph=True)[0], slope)
    k2 = (weights * TokenKL(1.0, "k3", gradient="k2").penalty(log_probs, reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(k2, logits)[0], slope)
    with pytest.raises(ValueError, match="needs the log-ratio"):
        kl.penalty(log_probs, reference)


def test_clamps_of_penalties() -> None:
    apart = torch.tensor([-30.0, 0.5, 30.0])
    reference = torch.zeros(3)
    assert TokenKL(1.0, "k1", clamp=10.0).penalty(apart, reference).tolist() == [-10.0, 0.5, 10.0]
    assert TokenKL(1.0, "k1", log_ratio_clamp=20.0).penalty(apart, reference).tolist() == [-20.0, 0.5, 20.0]
    assert TokenKL(1.0, "k3", log_ratio_clamp=20.0, clamp=10.0).penalty(apart, reference)[0] == 10.0
    with pytest.raises(ValueError, match="leave them out"):
        TokenKL(1.0, where="reward", gradient="k2")
    with pytest.raises(ValueError, match="unknown estimator"):
        estimate(apart, "k4")


# Advantages


def by_hand(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> list[float]:
    """GAE of each sequence without its masked-out rows, one step after the other."""
    result = [0.0] * R
    for index in range(5):
        advantage = following = 0.0
        for row in reversed([row for row in range(R) if OF_ROW[row] == index and MASK[row]]):
            delta = float(rewards[row]) + gamma * following - float(values[row])
            advantage, following = delta + gamma * lam * advantage, float(values[row])
            result[row] = advantage
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.5, 0.0), (0.0, 1.0)])
def test_returns_and_gae_are_those_of_each_sequence_alone(gamma: float, lam: float) -> None:
    rewards, values = normal().masked_fill(~MASK, math.nan), normal().masked_fill(~MASK, math.nan)
    result = gae(rewards, values, SEQUENCES, MASK, gamma, lam)
    assert result.tolist() == pytest.approx(by_hand(rewards, values, gamma, lam))
    zero = torch.zeros(R)
    assert discounted_returns(rewards, SEQUENCES, MASK, gamma).tolist() == pytest.approx(
        by_hand(rewards, zero, gamma, 1.0)
    )


def test_a_long_sequence_is_scanned_like_a_short_one() -> None:
    length = 5000
    rewards = normal(size=length)
    actual = discounted_returns(rewards, Sequences.of_lengths(torch.tensor([length])), torch.ones(length) > 0, 0.999)
    expected, total = torch.zeros(length, dtype=torch.float64), 0.0
    for row in reversed(range(length)):
        total = float(rewards[row]) + 0.999 * total
        expected[row] = total
    torch.testing.assert_close(actual, expected)


def test_the_reward_stands_at_the_last_token_that_was_drawn() -> None:
    rewards, penalties = torch.tensor([1.0, 9.0, 8.0, 2.0, 3.0]), torch.arange(R) / 10
    actual = token_rewards(rewards, SEQUENCES, MASK, penalties)
    expected = -penalties * MASK
    for row, reward in ((4, 1.0), (9, 2.0), (15, 3.0)):
        expected[row] += reward
    torch.testing.assert_close(actual, expected)
    taken = subtract_token_penalties(rewards, penalties, SEQUENCES, MASK)
    torch.testing.assert_close(taken, rewards - SEQUENCES.sums(penalties, MASK))


def test_rows_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="next to each other"):
        Returns().compute(torch.ones(2), Sequences(torch.tensor([0, 1, 0]), 2), torch.ones(3) > 0)
    with pytest.raises(ValueError, match=r"must both be \[R\]"):
        Returns().compute(torch.ones(2), Sequences(torch.tensor([0, 1, 1]), 2), torch.ones(2) > 0)


@pytest.mark.parametrize(("ddof", "shift_mean"), [(0, True), (1, True), (1, False)])
def test_whitening_is_over_all_ranks(ddof: int, shift_mean: bool) -> None:
    values = normal(3.0) + 2
    whole = whitened(values.masked_fill(~MASK, math.nan), MASK, ddof=ddof, shift_mean=shift_mean)
    valid_values = values[MASK]
    mean, std = valid_values.mean(), (valid_values.var(correction=ddof) + 1e-8).sqrt()
    expected = (valid_values - mean) / std + (0 if shift_mean else mean)
    torch.testing.assert_close(whole[MASK], expected)
    assert (whole[~MASK] == 0).all()
    actual = on_two_ranks(lambda rows, reduce: whitened(values[rows], MASK[rows], reduce, ddof, shift_mean=shift_mean))
    torch.testing.assert_close(actual, whole)


def test_whitening_where_there_is_too_little_to_compare() -> None:
    assert whitened(torch.tensor([3.0, 5.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whitened(torch.tensor([3.0]), torch.tensor([False])).tolist() == [0.0]
    assert whitened(torch.ones(3), torch.ones(3) > 0).tolist() == [0.0, 0.0, 0.0]


def test_parts_give_what_their_functions_say() -> None:
    rewards, penalties, values = normal(size=5), normal(0.1), normal()
    same = SampleAdvantage().compute(rewards, SEQUENCES, MASK)
    torch.testing.assert_close(same.values, torch.where(MASK, SEQUENCES.spread(rewards), 0.0))
    result = GAE(whiten=False, gamma=0.9, lam=0.8).compute(rewards, SEQUENCES, MASK, penalties, values)
    tokens = token_rewards(rewards, SEQUENCES, MASK, penalties)
    torch.testing.assert_close(result.values, gae(tokens, values, SEQUENCES, MASK, 0.9, 0.8))
    torch.testing.assert_close(result.returns, torch.where(MASK, result.values + values, 0.0))
    white = GAE(gamma=0.9, lam=0.8).compute(rewards, SEQUENCES, MASK, penalties, values)
    torch.testing.assert_close(white.values, whitened(result.values, MASK))
    assert torch.equal(white.returns, result.returns)
    with pytest.raises(ValueError, match="critic's values"):
        GAE().compute(rewards, SEQUENCES, MASK)
    with pytest.raises(ValueError, match="see penalised"):
        SampleAdvantage().compute(rewards, SEQUENCES, MASK, penalties)


def test_the_expected_gradient_of_distillation_is_that_of_the_kl_to_the_teacher() -> None:
    """Over all tokens of a small vocabulary, weighted by the student."""
    logits, teacher = normal(size=7).requires_grad_(True), normal(size=7).log_softmax(0)
    log_probs = logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    actual = Distillation().compute(
        torch.zeros(1),
        Sequences.of_lengths(torch.tensor([7])),
        torch.ones(7) > 0,
        TokenKL(1.0, "k1", "reward").penalty(log_probs.detach(), teacher),
    )
    advantages = actual.values
    for objective in (PolicyGradient(), PPOClip()):
        losses, _ = objective.loss(
            log_probs - log_probs.detach(),
            advantages,
            torch.ones(7) > 0,
            Sequences(torch.zeros(7, dtype=torch.long), 1),
        )
        (actual,) = torch.autograd.grad((log_probs.exp().detach() * losses).sum(), logits, retain_graph=True)
        torch.testing.assert_close(actual, expected)


def test_distillation_is_returns_without_a_future_and_a_penalty_of_k1() -> None:
    student, teacher = normal(), normal()
    penalties = TokenKL(1.0, "k1", "reward").penalty(student, teacher)
    result = Returns(whiten=False, gamma=0.0).compute(torch.zeros(5, dtype=torch.float64), SEQUENCES, MASK, penalties)
    torch.testing.assert_close(result.values, torch.where(MASK, teacher - student, 0.0))


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_the_value_loss_is_clipped_around_the_old_values(factor: float) -> None:
    mask = torch.tensor([True, True, True, False])
    values = torch.tensor([1.0, 3.0, 0.1, math.nan], requires_grad=True)
    losses, stats = value_loss(values, torch.zeros(4), torch.tensor([0.0, 4.0, 1.0, math.nan]), mask, 0.5, factor)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([factor * value for value in (1.0, 3.5**2, 0.9**2, 0.0)])
    assert values.grad.tolist() == pytest.approx([factor * value for value in (2.0, 0.0, -1.8, 0.0)])
    assert stats["value/clipped"] == 1 and stats["value/error"] == pytest.approx(1 + 1 + 0.81)
    plain, _ = value_loss(values, torch.zeros(4), torch.tensor([0.0, 4.0, 1.0, 0.0]), mask, None, factor)
    assert plain.tolist() == pytest.approx([factor * value for value in (1.0, 1.0, 0.81, 0.0)])
    with pytest.raises(ValueError, match="must be above 0"):
        value_loss(values, values, values, mask, 0.0)


# Corrections


def test_weights_have_a_floor_and_a_cap() -> None:
    apart = torch.log(torch.tensor([0.1, 0.9, 8.0]))
    result = Decoupled("token", 5.0, 0.5).correct(apart, torch.arange(3))
    assert result.weights.tolist() == pytest.approx([0.5, 0.9, 5.0])
    assert result.truncated.tolist() == [True, False, True]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_sequences_far_from_the_behaviour_policy_are_left_out_though_signs_cancel(estimator: str) -> None:
    apart = torch.tensor([0.5, -0.5, 0.01, 0.02])
    ids = torch.tensor([0, 0, 1, 1])
    assert not Rejection("sequence_mean", 0.9, 1.1).correct(apart, ids).rejected.any()
    result = KLRejection("sequence_mean", estimator, 0.05).correct(apart, ids)
    assert result.rejected.tolist() == [True, True, False, False]
    assert result.weights.tolist() == pytest.approx([0, 0, math.exp(0.01), math.exp(0.02)])
    far = KLRejection("token", estimator, 0.5, None).correct(torch.tensor([0.97, -0.97]), torch.arange(2))
    assert far.rejected.tolist() == [estimator == "k3", False]  # exp(l) - 1 - l: 0.668 and 0.349; l^2 / 2: 0.470
    unweighted = KLRejection("token", estimator, 0.05, None).correct(
        torch.tensor([0.5, 0.1, math.nan]), torch.arange(3)
    )
    assert unweighted.weights[:2].tolist() == [0.0, 1.0] and unweighted.weights[2].isnan()
