"""Gradient norm, clipping, and the check that stops a run before weights change."""

import math

import pytest
import torch
from torch import nn

from sfumato.algorithms.reading import Numbers
from sfumato.errors import NonFiniteError
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters

ALONE = Mesh(Layout(), torch.device("cpu"))


def make() -> nn.Sequential:
    """A module with gradients of known size, and a frozen layer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    module[2].requires_grad_(False)
    (100 * module(torch.randn(5, 3)) ** 2).sum().backward()
    return module


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainable_parameters(module).items()}


def test_the_norm_is_torchs_and_gradients_are_scaled_down_to_the_limit():
    module, twin = make(), make()
    expected = nn.utils.clip_grad_norm_(trainable_parameters(twin).values(), 0.7)
    before = gradients(module)
    norm = reduce_and_clip(module, 0.7, ALONE, "step 1")
    assert norm == float(expected) > 0.7
    for name, clipped in gradients(module).items():
        assert torch.equal(clipped, gradients(twin)[name])
        torch.testing.assert_close(clipped, before[name] * (0.7 / norm))
    assert float(nn.utils.get_total_norm(gradients(module).values())) == pytest.approx(0.7, rel=1e-5)


def test_gradients_below_the_limit_stay_as_they_are():
    module = make()
    before = gradients(module)
    norm = reduce_and_clip(module, 1e9, ALONE, "step 1")
    expected = math.sqrt(sum(float((value.double() ** 2).sum()) for value in before.values()))
    assert norm == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(module).items())


def test_a_parameter_without_gradient_counts_as_zero_and_a_frozen_one_gets_none():
    module = make()
    module[1].bias.grad = None
    reduce_and_clip(module, 1.0, ALONE, "step 1")
    assert torch.equal(module[1].bias.grad, torch.zeros(2))
    assert module[2].weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_nothing_changes(value):
    module = make()
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    module[1].weight.grad[1, 2] = value
    before = gradients(module)
    with pytest.raises(NonFiniteError) as error:
        reduce_and_clip(module, 1.0, ALONE, "step 7")
    message = str(error.value)
    assert message.startswith("step 7: ")
    assert "1.weight" in message and "0.weight" not in message and "1.bias" not in message
    assert error.value.exit_code == 4
    assert all(torch.equal(parameter, weights[name]) for name, parameter in module.named_parameters())
    for name, gradient in gradients(module).items():
        torch.testing.assert_close(gradient, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_norm_that_overflows_is_not_finite_either():
    module = make()
    for parameter in trainable_parameters(module).values():
        parameter.grad.fill_(1e30)
    with pytest.raises(NonFiniteError, match="step 2"):
        reduce_and_clip(module, 1.0, ALONE, "step 2")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_named_and_nothing_changes(bad):
    module, losses = make(), Numbers()
    before = gradients(module)
    losses.add(torch.tensor([1.0, -1e38]).sum(), "samples [1]")
    losses.add(torch.tensor([1.0, bad], requires_grad=True).sum(), "step 3, rank 1, samples [4, 5]")
    with pytest.raises(
        NonFiniteError, match=r"^step 3, rank 1, samples \[4, 5\]: the loss is (nan|inf|-inf)\. Nothing"
    ):
        reduce_and_clip(module, 0.1, ALONE, "step 3", losses)
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(module).items())


def test_numbers_are_read_with_the_norm():
    losses, more = Numbers(torch.tensor([1.0, 2.5])), Numbers()
    more.add_all(loss=torch.tensor(3.0), count=2)
    more.add_all(loss=torch.tensor(0.5), count=1)
    reduce_and_clip(make(), 1.0, ALONE, "step 1", losses, more)
    assert not (losses._tensors or more._tensors)
    assert losses == [1.0, 2.5] and sum(losses) == 3.5 and len(losses) == 2 and losses[-1] == 2.5
    assert more.sums() == {"loss": 3.5, "count": 3.0}
    losses.add(torch.tensor(4))
    assert [*losses] == [1.0, 2.5, 4.0]
