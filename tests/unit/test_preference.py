"""Preference losses against formulas written out."""

import math

import pytest
import torch

from sfumato.algorithms.preference import kto_loss, log1mexp, preference_loss
from sfumato.algorithms.reward_models import bradley_terry_loss, step_loss

CHOSEN, REJECTED = torch.tensor([0.3, -1.2, 4.0]), torch.tensor([-0.5, 0.9, 4.0])


def expected(function):
    return torch.tensor([function(c, r) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid_is_equation_7(smoothing):
    def loss(chosen, rejected):
        likely = 1 / (1 + math.exp(-0.4 * (chosen - rejected)))
        return -(1 - smoothing) * math.log(likely) - smoothing * math.log(1 - likely)

    actual = preference_loss(CHOSEN, REJECTED, 0.4, "sigmoid", smoothing)
    torch.testing.assert_close(actual, expected(loss))


def test_hinge():
    actual = preference_loss(CHOSEN, REJECTED, 0.4, "hinge")
    torch.testing.assert_close(actual, expected(lambda c, r: max(0.0, 1 - 0.4 * (c - r))))


def test_ipo_takes_means_over_tokens():
    lengths = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([4.0, 1.0, 5.0])
    result = preference_loss(CHOSEN, REJECTED, 0.4, "ipo", lengths=lengths)
    by_hand = [(0.15 + 0.125 - 1.25) ** 2, (-0.4 - 0.9 - 1.25) ** 2, 1.25**2]
    torch.testing.assert_close(result, torch.tensor(by_hand))
    with pytest.raises(ValueError, match="lengths"):
        preference_loss(CHOSEN, REJECTED, 0.4, "ipo")


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="known: sigmoid, ipo, hinge, simpo, orpo"):
        preference_loss(CHOSEN, REJECTED, 0.4, "sigmoidal")


def test_at_the_reference_the_gradient_raises_the_better_answer():
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    preference_loss(chosen, rejected, 0.5).sum().backward()
    assert float(chosen.grad) == pytest.approx(-0.25) and float(rejected.grad) == pytest.approx(0.25)


def test_simpo_is_equation_6():
    actual = preference_loss(CHOSEN, REJECTED, 2.0, "simpo", gamma=0.5)
    torch.testing.assert_close(actual, expected(lambda c, r: -math.log(1 / (1 + math.exp(-(2.0 * (c - r) - 0.5))))))


def test_orpo_is_equation_7():
    def loss(chosen, rejected):
        odds = [math.exp(value) / (1 - math.exp(value)) for value in (chosen, rejected)]
        return -0.3 * math.log(1 / (1 + odds[1] / odds[0]))

    chosen, rejected = torch.tensor([-0.2, -1.5, -3.0]), torch.tensor([-0.9, -0.1, -3.0])
    result = preference_loss(chosen, rejected, 0.3, "orpo")
    by_hand = [loss(*pair) for pair in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    torch.testing.assert_close(result, torch.tensor(by_hand))


def test_the_probability_of_other_answers_is_exact_at_both_ends():
    log_p = torch.tensor([-1e-30, -1e-6, -0.5, -0.7, -30.0, 0.0], requires_grad=True)
    exact = torch.tensor([-69.07755, -13.815511, -0.932752, -0.686341, -9.357623e-14])
    result = log1mexp(log_p)
    torch.testing.assert_close(result[:5], exact, rtol=1e-5, atol=0.0)
    result.sum().backward()
    assert torch.isfinite(result).all() and torch.isfinite(log_p.grad[1:5]).all()


def test_kto_is_equation_8():
    log_ratios, labels = torch.tensor([1.2, -0.4, 0.3, 2.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    result = kto_loss(log_ratios, labels, 0.5, 0.4, 1.5, 0.8)

    def value(margin):
        return 1 - 1 / (1 + math.exp(-0.4 * margin))

    by_hand = [1.5 * value(0.7), 1.5 * value(-0.9), 0.8 * value(0.2), 0.8 * value(-1.5)]
    torch.testing.assert_close(result, torch.tensor(by_hand))


def test_bradley_terry_is_the_log_likelihood_of_the_preference():
    chosen, rejected, margin = torch.tensor([1.0, -0.5]), torch.tensor([0.2, 0.7]), torch.tensor([0.5, 0.0])
    result = bradley_terry_loss(chosen, rejected, margin, 0.1)
    by_hand = [math.log(1 + math.exp(-0.3)) + 0.1 * 1.2**2, math.log(1 + math.exp(1.2)) + 0.1 * 0.2**2]
    torch.testing.assert_close(result, torch.tensor(by_hand))


def test_the_loss_of_steps_is_the_cross_entropy_of_two_classes():
    values, labels = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.25])
    two = torch.stack([torch.zeros(3), values], dim=1)
    shares = torch.stack([1 - labels, labels], dim=1)
    expected_losses = torch.nn.functional.cross_entropy(two, shares, reduction="none")
    torch.testing.assert_close(step_loss(values, labels), expected_losses)
