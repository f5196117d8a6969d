"""Memory savings, chunked losses and keyed dropout over several ranks against one process."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel import memory
from sfumato.parallel.dropout import keyed_dropout
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.loss import linear_cross_entropy, token_log_probs_and_entropy
from sfumato.parallel.memory import ActivationOffload
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.shards import gather_whole, trainable_parameters
from tests.dist.cases import CASES, NUM_STEPS, ROWS, Outcome, count_all, difference, make_mesh, train, weights_of

TOLERANCE = 1e-5


@functools.cache
def truth(kind: str) -> Outcome:
    return train(kind)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("dense", {"activation_checkpointing": "full"}),
        ("dense", {"activation_checkpointing": "selective", "data_parallel_mode": "fsdp1"}),
        ("moe", {"activation_checkpointing": "selective"}),
        ("sd3", {"activation_checkpointing": "full"}),
        ("flux", {"activation_checkpointing": "selective", "enable_reshard_after_forward": False}),
        ("wan", {"activation_checkpointing": "full", "data_parallel_mode": "ddp"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_recomputation_equals_one_process(kind, config, ranks):
    for outcome in ranks.run(2, functools.partial(train, kind, **config)):
        assert difference(outcome, truth(kind)) < TOLERANCE


def train_offloaded(kind: str, **config: Any) -> Outcome:
    """Training that also moves tensors which are in CPU memory already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "ActivationOffload", functools.partial(ActivationOffload, min_bytes=64, stay=()))
        return train(kind, enable_activation_offload=True, **config)


@pytest.mark.parametrize("config", [{}, {"activation_checkpointing": "full", "data_parallel_mode": "fsdp1"}], ids=str)
def test_offload_equals_one_process(config, ranks):
    for outcome in ranks.run(2, functools.partial(train_offloaded, "dense", **config)):
        assert difference(outcome, truth("dense")) < TOLERANCE


def offload_dtensor() -> tuple[int, torch.Tensor]:
    """Copies made, and the gradient of a product of DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]).requires_grad_()
    offload = ActivationOffload(min_bytes=1, stay=())
    with offload.hold(nn.Identity()):
        y = x * 2
        out = (y * y).sum()
    num_copies = len(offload._last().copies)
    out.backward()
    return num_copies, x.grad.full_tensor()


def test_offload_moves_the_local_part_of_a_dtensor(ranks):
    for num_copies, gradient in ranks.run(2, offload_dtensor):
        assert num_copies == 1
        assert torch.equal(gradient, 8 * torch.arange(12.0).view(4, 3))


VOCABULARY, HIDDEN, TOKENS = 37, 8, 23


def tensors() -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((TOKENS, 8), (VOCABULARY, 8), (37,)))
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def log_probs_and_gradients(cut: bool, num_ruled_out: int = 0) -> tuple[torch.Tensor, ...]:
    """Of an uneven cut of the vocabulary over all ranks; gradients of weight and bias are joined."""
    hidden, weight, bias, labels = tensors()
    if num_ruled_out:
        labels = labels.clamp(max=VOCABULARY - num_ruled_out - 1)
        with torch.no_grad():
            bias[-num_ruled_out:] = -torch.inf
    upstream = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    group = None
    if cut:
        group, size = dist.group.WORLD, dist.get_world_size()
        sizes = [VOCABULARY // size + (3 if rank == 0 else 0) for rank in range(size)]
        sizes[-1] += VOCABULARY - sum(sizes)
        weight, bias = (tensor.detach().split(sizes)[dist.get_rank()].requires_grad_() for tensor in (weight, bias))
    out = token_log_probs_and_entropy(hidden, weight, labels, 0.7, bias, chunk_tokens=5, group=group)
    (torch.stack(out) * upstream).sum().backward()
    parts = [weight.grad, bias.grad]
    if cut:
        gathered = [None] * size
        dist.all_gather_object(gathered, parts)
        parts = [torch.cat(pieces) for pieces in zip(*gathered, strict=True)]
    return *(tensor.detach() for tensor in out), hidden.grad, *parts


@pytest.mark.parametrize(("num_ranks", "num_ruled_out"), [(2, 0), (4, 0), (2, 16), (4, 20)])  # all of the last rank's
def test_a_vocabulary_that_is_cut_gives_the_same(num_ranks, num_ruled_out, ranks):
    expected = log_probs_and_gradients(False, num_ruled_out)
    assert all(tensor.isfinite().all() for tensor in expected)
    for actual in ranks.run(num_ranks, log_probs_and_gradients, True, num_ruled_out):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def label_outside() -> float:
    hidden, weight, _, labels = tensors()
    labels[1] = 99
    rows = weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
    return float(linear_cross_entropy(hidden, rows, labels, group=dist.group.WORLD)[0].detach())


def test_a_label_outside_the_vocabulary_is_not_finite(ranks):
    assert ranks.run(2, label_outside) == [float("inf")] * 2


class Head(nn.Module):
    """A model whose loss uses the weight of its head outside of its forward pass."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(HIDDEN))
            self.lm_head.weight.copy_(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


def sharded_head(tp: int, fsdp: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients with the head's weight sharded by fsdp, cut along the vocabulary, or both."""
    hidden, weight, _, labels = tensors()
    module, group = Head(weight), None
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        group = mesh["tp"].get_group()
        module.lm_head.weight = nn.Parameter(distribute_tensor(module.lm_head.weight.data, mesh["tp"], [Shard(0)]))
    if fsdp > 1:
        fully_shard(module, mesh=mesh["fsdp"], reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    mine = slice(mesh["fsdp"].get_local_rank(), None, fsdp)  # different tokens on each fsdp rank
    loss = linear_cross_entropy(module(hidden[mine]), module.lm_head.weight, labels[mine], None, 4, group=group)[0]
    loss.backward()
    assert isinstance(module.lm_head.weight, DTensor)
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["fsdp"].get_group())
    return float(total), {name: gather_whole(parameter.grad) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("tp", "fsdp"), [(1, 2), (2, 1), (2, 2)])
def test_a_sharded_weight_gets_its_whole_gradient(tp, fsdp, ranks):
    hidden, weight, _, labels = tensors()
    module = Head(weight)
    expected = functional.cross_entropy(module.lm_head(module(hidden)), labels, reduction="sum")
    expected.backward()
    for loss, gradients in ranks.run(tp * fsdp, sharded_head, tp, fsdp):
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def train_with_dropout(rows_at_once: int = 1, keyed: bool = True, **config: Any) -> Outcome:
    """Adapters with dropout on SD3, three steps."""
    from peft import LoraConfig

    mesh, parsed = make_mesh(**config)
    case = CASES["sd3"]
    module = case.build().requires_grad_(False)
    torch.manual_seed(1)
    targets = list(case.lora_targets)
    inject_adapter(module, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.3), ADAPTER)
    keys = keyed_dropout(module.train(), seed=3)
    module = parallelize(module, mesh, parsed, case.plan(module))
    optimizer = torch.optim.AdamW(trainable_parameters(module).values(), lr=1e-2, eps=1e-4)
    outcome = Outcome()
    for step in range(NUM_STEPS):
        mine = [step * ROWS + index for index in mesh.range_of_rank(ROWS)]
        num = count_all(case, [case.row(index) for index in mine], mesh)
        losses = []
        batches = [mine[start : start + rows_at_once] for start in range(0, len(mine), rows_at_once)]
        for ids in accumulate(module, batches):
            rows = [case.row(index) for index in ids]
            row = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            with keys.batch(step if keyed else dist.get_rank(), ids):
                loss = case.loss(module, row, mesh)[0] * len(ids)  # the case's loss is a mean over elements
                (loss / num).backward()
            losses.append(float(loss.detach()))
        outcome.norms.append(reduce_and_clip(module, 1.0, mesh, f"step {step + 1}"))
        outcome.losses.append(mesh.sum(sum(losses)) / num)
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights, outcome.frozen = weights_of(module)
    return outcome


def test_dropout_does_not_depend_on_ranks_batches_or_recomputation(ranks):
    expected = train_with_dropout()
    assert difference(train_with_dropout(rows_at_once=2), expected) < TOLERANCE
    recomputed = functools.partial(train_with_dropout, data_parallel_mode="ddp", activation_checkpointing="full")
    assert difference(ranks.run(2, recomputed)[1], expected) < TOLERANCE
    assert difference(ranks.run(2, train_with_dropout, 2)[0], expected) < TOLERANCE  # fsdp2
    other = functools.partial(train_with_dropout, keyed=False, data_parallel_mode="ddp")
    assert difference(ranks.run(2, other)[0], expected) > 1e-3
