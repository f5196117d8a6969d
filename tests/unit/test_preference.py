"""Preference losses against formulas written out."""

import math

import pytest
import torch

from sfumato.algorithms.preference import preference_loss

CHOSEN, REJECTED = torch.tensor([0.3, -1.2, 4.0]), torch.tensor([-0.5, 0.9, 4.0])


def expected(function):
    return torch.tensor([function(c, r) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sigmoid_is_equation_7(smoothing):
    def loss(chosen, rejected):
        likely = 1 / (1 + math.exp(-0.4 * (chosen - rejected)))
        return -(1 - smoothing) * math.log(likely) - smoothing * math.log(1 - likely)

    found = preference_loss(CHOSEN, REJECTED, 0.4, "sigmoid", smoothing)
    torch.testing.assert_close(found, expected(loss))


def test_hinge():
    found = preference_loss(CHOSEN, REJECTED, 0.4, "hinge")
    torch.testing.assert_close(found, expected(lambda c, r: max(0.0, 1 - 0.4 * (c - r))))


def test_ipo_takes_means_over_tokens():
    lengths = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([4.0, 1.0, 5.0])
    found = preference_loss(CHOSEN, REJECTED, 0.4, "ipo", lengths=lengths)
    by_hand = [(0.15 + 0.125 - 1.25) ** 2, (-0.4 - 0.9 - 1.25) ** 2, 1.25**2]
    torch.testing.assert_close(found, torch.tensor(by_hand))
    with pytest.raises(ValueError, match="lengths"):
        preference_loss(CHOSEN, REJECTED, 0.4, "ipo")


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="known: sigmoid, ipo, hinge"):
        preference_loss(CHOSEN, REJECTED, 0.4, "sigmoidal")


def test_at_the_reference_the_gradient_raises_the_better_answer():
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    preference_loss(chosen, rejected, 0.5).sum().backward()
    assert float(chosen.grad) == pytest.approx(-0.25) and float(rejected.grad) == pytest.approx(0.25)
