"""Cross entropy and log-probabilities in chunks against the plain computation."""

import pytest
import torch
from torch.nn import functional

from sfumato.models.language.scores import TokenScores
from sfumato.parallel.loss import (
    cross_entropy_sum,
    linear_cross_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
)

V, H = 37, 8


def make(tokens: int = 23, dtype: torch.dtype = torch.float32, ignore: bool = True) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias (leaves) and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (tokens,), generator=generator)
    if ignore:
        labels[::4] = -100
    return hidden, weight, bias, labels


def plain(hidden, weight, bias, labels, temperature=1.0):
    """Log-probabilities and entropies with all logits."""
    log_p = (functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
    counts = labels != -100
    chosen = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(counts, chosen, 0), torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0)


def chunked_sum(*tensors, **settings):
    return linear_cross_entropy(*tensors, **settings)[0]


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("chunk", [1, 7, 23, 1024])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_sum_and_its_gradients_are_those_of_cross_entropy(chunk, with_bias):
    hidden, weight, bias, labels = make()
    bias = bias if with_bias else None
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    truth = functional.cross_entropy(functional.linear(hidden, weight, bias), labels, reduction="sum")
    loss = chunked_sum(hidden, weight, labels, bias, chunk_tokens=chunk)
    assert loss.dtype == torch.float32 and float(loss.detach()) == pytest.approx(float(truth.detach()), rel=1e-6)
    for ours, theirs in zip(gradients(loss / 7, *leaves), gradients(truth / 7, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    logits = functional.linear(hidden, weight, bias)
    assert torch.equal(cross_entropy_sum(logits[None], labels[None]), truth)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_have_gradients_of_their_own(temperature):
    hidden, weight, bias, labels = make()
    upstream = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(1))
    ours = token_log_probs_and_entropy(hidden, weight, labels, temperature, bias, chunk_tokens=5)
    theirs = plain(hidden, weight, bias, labels, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    leaves = hidden, weight, bias
    actual = gradients((torch.stack(ours) * upstream).sum(), *leaves)
    expected = gradients((torch.stack(theirs) * upstream).sum(), *leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    alone = token_log_probs(hidden, weight, labels, temperature, bias, chunk_tokens=5)
    assert torch.equal(alone, ours[0])
    theirs = plain(hidden, weight, bias, labels, temperature)
    expected = gradients((theirs[0] * upstream[0]).sum(), *leaves)
    torch.testing.assert_close(gradients((alone * upstream[0]).sum(), *leaves), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_token_that_is_ruled_out_has_no_part_in_the_entropy(least):
    hidden, weight, bias, labels = make()
    labels = labels.clamp(max=V - 3)
    upstream = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(1))
    theirs = plain(hidden, weight[:-2], bias[:-2], labels, 0.6)
    expected = gradients((torch.stack(theirs) * upstream).sum(), hidden, weight, bias)
    with torch.no_grad():
        bias[-2:] = least
    in_chunks = token_log_probs_and_entropy(hidden, weight, labels, 0.6, bias, chunk_tokens=5)
    scores = TokenScores(functional.linear(hidden, weight, bias)[None], (1, len(labels)))
    of_logits = [values[0] for values in scores.log_probs_and_entropy(labels[None], 0.6)]
    for ours in (in_chunks, of_logits):
        torch.testing.assert_close(torch.stack([*ours]), torch.stack(theirs), rtol=1e-5, atol=1e-5)
        actual = gradients((torch.stack([*ours]) * upstream).sum(), hidden, weight, bias)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    labels[3] = V - 1  # a label that is ruled out has no probability, and -100 counts for nothing all the same
    labels[4] = -100
    in_chunks = token_log_probs_and_entropy(hidden, weight, labels, 0.6, bias, chunk_tokens=5)[0]
    assert in_chunks[3] == scores.log_probs_and_entropy(labels[None], 0.6)[0][0, 3] == -torch.inf
    assert in_chunks[4] == scores.log_probs_and_entropy(labels[None], 0.6)[0][0, 4] == 0


def test_bf16_has_the_softmax_in_float32():
    hidden, weight, _, labels = make(tokens=64, dtype=torch.bfloat16)
    truth = cross_entropy_sum(functional.linear(hidden, weight), labels)
    loss = chunked_sum(hidden, weight, labels, chunk_tokens=16)
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), rel=1e-6)
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(truth, hidden, weight), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_autocast_decides_the_dtype_of_products():
    hidden, weight, bias, labels = make()
    with torch.autocast("cpu", torch.bfloat16):
        truth = cross_entropy_sum(functional.linear(hidden, weight, bias), labels)
        loss = chunked_sum(hidden, weight, labels, bias)
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), rel=1e-6)
    actual = gradients(loss, hidden, weight, bias)
    assert {tensor.dtype for tensor in actual} == {torch.float32}
    torch.testing.assert_close(actual, gradients(truth, hidden, weight, bias), rtol=2e-2, atol=2e-2)


def test_no_label_that_counts_gives_zero_and_zero_gradients():
    hidden, weight, _, labels = make()
    for tokens in (len(labels), 0):
        part = hidden[:tokens]
        loss = chunked_sum(part, weight, torch.full((tokens,), -100))
        assert float(loss.detach()) == 0
        assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))
    logits = functional.linear(hidden, weight)
    assert not gradients(cross_entropy_sum(logits, torch.full_like(labels, -100)), weight)[0].any()


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, bias, labels = make()
    expected = gradients(chunked_sum(hidden, weight, labels, bias), hidden)[0]
    frozen = weight.detach()
    chunked_sum(hidden, frozen, labels, bias.detach()).backward()
    assert frozen.grad is None and torch.equal(hidden.grad, expected)
    hidden, weight, _, labels = make()
    chunked_sum(hidden.detach(), weight, labels).backward()
    assert hidden.grad is None and weight.grad.any()


def test_rows_of_tokens_keep_their_shape():
    hidden, weight, _, labels = make(tokens=24)
    rows = token_log_probs(hidden.view(4, 6, H), weight, labels.view(4, 6))
    assert torch.equal(rows.flatten(), token_log_probs(hidden, weight, labels))


def by_log_probs(*tensors, **size):
    return -token_log_probs(*tensors, **size).sum()


@pytest.mark.parametrize("loss_of", [chunked_sum, by_log_probs])
def test_what_waits_for_the_backward_pass_does_not_grow_with_the_vocabulary(loss_of):
    """Bytes that autograd saves, and the largest tensor that is made on the way."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    def measure(tokens: int, vocabulary: int) -> tuple[int, int]:
        hidden, weight = torch.randn(tokens, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
        inputs = {hidden.data_ptr(), weight.data_ptr()}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in inputs:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Largest() as largest:
            loss_of(hidden, weight, torch.arange(tokens), chunk_tokens=64).backward()
        return sum(saved.values()), largest.elements

    few, many = measure(512, 1000), measure(512, 4000)
    assert few[0] == many[0] <= 512 * (8 + 4 + 1) + 64  # labels, log-sum-exp, which of them count
    assert many[1] == 64 * 4000
    assert measure(1024, 4000)[1] == 64 * 4000


def test_shapes_that_do_not_fit_are_named():
    hidden, weight, _, labels = make()
    with pytest.raises(ValueError, match=r"hidden \(23, 8\), weight \(37, 8\) and labels \(22,\)"):
        token_log_probs(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="temperature 0"):
        token_log_probs(hidden, weight, labels, temperature=0)
    with pytest.raises((IndexError, RuntimeError)):
        token_log_probs(hidden, weight, labels.clamp(min=V))


def test_losses_of_tokens_come_beside_their_sum_and_the_gradient_is_given_once():
    hidden, weight, bias, labels = make()
    total, losses = linear_cross_entropy(hidden, weight, labels, bias, chunk_tokens=5)
    torch.testing.assert_close(losses, -plain(hidden, weight, bias, labels)[0], rtol=1e-5, atol=1e-5)
    assert not losses.requires_grad and torch.equal(losses.sum(), total.detach())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given once"):
        total.backward()
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, bias, chunk_tokens=5)[0], total.detach())
