"""Weights from an actor of some layout to a sampler of another, in processes of their own: bit for bit, verified."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sfumato.errors import WeightSyncError
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import load_whole, whole_weights
from sfumato.runtime.weight_sync.sync import SyncReport, WeightSync
from tests.dist.cases import CASES, build, make_mesh
from tests.dist.process_roles import ProcessRole, ProcessRoles

FSDP2, FSDP1, DDP = {}, {"data_parallel_mode": "fsdp1"}, {"data_parallel_mode": "ddp"}
TP = {"tensor_parallel_size": 2, **DDP}
STREAMS = ("broadcast", "ipc")
SMALL = 0.02
"""MiB of a bucket: dozens of buckets, and some tensors that are larger."""


class Peer:
    """A module on a mesh; it can send and receive."""

    def __init__(self, config: dict[str, Any], lora: bool, dtype: torch.dtype, kind: str = "sd3") -> None:
        torch.use_deterministic_algorithms(True)
        self.mesh, parsed = make_mesh(**config)
        self.kind, self.version, self.seed = kind, 0, 0
        module = build(kind, lora).to(dtype)
        self.received_module = parallelize(module, self.mesh, parsed, CASES[kind].plan(module))

    @contextmanager
    def sent_weights(self, version: int):
        """Other weights than the module has outside, as averages are."""
        before = whole_weights(self.received_module, self.mesh, only_trainable=True)
        load_whole(self.received_module, self.trained(version), self.mesh)
        try:
            yield self.received_module
        finally:
            load_whole(self.received_module, before, self.mesh, from_rank0=True)

    def trained(self, version: int) -> dict[str, torch.Tensor]:
        """Whole trained weights of a version."""
        from sfumato.parallel.shards import whole_shapes

        return weights_of_version(self.received_module, whole_shapes(self.received_module), version)


def weights_of_version(module: nn.Module, shapes: Any, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shapes[name], generator=generator).to(parameter.dtype)
        for name, parameter in trainable_parameters(module).items()
    }


def held(peer: Peer) -> tuple[int, dict[str, torch.Tensor]]:
    return peer.version, whole_weights(peer.received_module, peer.mesh)


def expected(
    lora: bool, dtype: torch.dtype, version: int, sent: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    module = build("sd3", lora).to(sent)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    plain = dict(module.named_parameters()) | {"pos_embed.pos_embed": module.pos_embed.pos_embed}
    result = {name: value.detach() for name, value in plain.items()} | weights_of_version(module, shapes, version)
    return {name: value.to(dtype) for name, value in result.items()}


def check(sampler: ProcessRole, version: int, wanted: dict[str, torch.Tensor]) -> None:
    has, weights = sampler.all(held)[0]
    assert has == version
    assert weights.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(weights[name], value)]


def publish_three(
    ranks: Any,
    folder: Any,
    actor: tuple[int, dict[str, Any]],
    sampler: tuple[int, dict[str, Any]],
    transport: str,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[SyncReport]:
    """Three versions with buckets smaller than the largest tensors; the sampler has exactly what was sent."""
    with ProcessRoles(ranks, folder, actor=actor[0], sampler=sampler[0]) as roles:
        roles.actor.build(Peer, actor[1], lora, torch.float32)
        roles.sampler.build(Peer, sampler[1], lora, dtype)
        sync = WeightSync(roles.actor, roles.sampler, transport, SMALL, folder, timeout_s=30)
        reports = []
        for version in (3, 4, 7):
            reports.append(sync.publish(version))
            check(roles.sampler, version, expected(lora, dtype, version))
        assert not list((folder / "weight_sync").glob("*"))
        sync.close()
    assert reports[0].num_verified == len(expected(lora, dtype, 3))
    assert [report.num_verified for report in reports[1:]] == [reports[0].num_tensors] * 2
    return reports


LAYOUTS = {
    "fsdp2 to tp": ((2, FSDP2), (2, TP)),
    "tp to one": ((2, TP), (1, DDP)),
    "one to fsdp2": ((1, DDP), (2, FSDP2)),
    "fsdp1 to ddp": ((2, FSDP1), (2, DDP)),
    "ddp to fsdp1": ((2, DDP), (2, FSDP1)),
    "one to one": ((1, DDP), (1, DDP)),
}


def test_full_weights_from_fsdp2_to_tensor_parallelism(ranks, tmp_path):
    reports = publish_three(ranks, tmp_path, *LAYOUTS["fsdp2 to tp"], "broadcast")
    module = build("sd3")
    assert reports[0].num_bytes == sum(
        parameter.numel() * 4 for parameter in module.parameters() if parameter.requires_grad
    )
    assert reports[0].num_tensors > 50 and reports[0].seconds > 0


def test_adapters_alone_through_shared_memory(ranks, tmp_path):
    reports = publish_three(ranks, tmp_path, *LAYOUTS["tp to one"], "ipc", lora=True)
    assert reports[1].num_tensors < reports[0].num_verified / 2


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("transport", ["broadcast", "ipc", "files"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_over_every_transport(layout, transport, lora, ranks, tmp_path):
    publish_three(ranks, tmp_path, *LAYOUTS[layout], transport, lora)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc", "files"])
def test_a_sampler_in_bf16_gets_what_a_cast_gives(transport, ranks, tmp_path):
    publish_three(ranks, tmp_path, *LAYOUTS["fsdp2 to tp"], transport, dtype=torch.bfloat16)


def outputs_until_staged(peer: Peer, version: int) -> tuple[int, list[torch.Tensor]]:
    """Forward passes in the main thread, with the role's own collectives, until a version is staged on all ranks."""
    row, results = CASES[peer.kind].row(0), []
    deadline = time.monotonic() + 30
    while True:
        results.append(CASES[peer.kind].loss(peer.received_module, row, peer.mesh)[0])
        staged = peer.sync.staged == version
        if not peer.mesh.any(not staged):
            return len(results), results
        assert time.monotonic() < deadline


def slow_down(peer: Peer) -> None:
    """Each tensor takes a while to arrive."""
    take = peer.sync.transport.receive_tensors

    def slowly(version: int, delivery: Any) -> Any:
        for delivered in take(version, delivery):
            time.sleep(0.005)
            yield delivered

    peer.sync.transport.receive_tensors = slowly


def test_the_sampler_goes_on_while_weights_arrive(ranks, tmp_path):
    with ProcessRoles(ranks, tmp_path, actor=1, sampler=2) as roles:
        roles.actor.build(Peer, DDP, False, torch.float32)
        roles.sampler.build(Peer, FSDP2, False, torch.float32)
        sync = WeightSync(roles.actor, roles.sampler, "broadcast", timeout_s=30)
        sync.publish(1)
        roles.sampler.all(slow_down)
        computing = roles.sampler.call(outputs_until_staged, 2)
        sync.transfer(2)
        count, outputs = computing.result()
        assert count > 2
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        check(roles.sampler, 1, expected(False, torch.float32, 1))
        sync.apply(2).result()
        check(roles.sampler, 2, expected(False, torch.float32, 2))
        sync.close()


class Here:
    """A role in this thread of each rank."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def call(self, function: Any, *args: Any, kind: str = "other") -> Future:
        future: Future = Future()
        future.set_result(function(self.state, *args))
        return future

    call_concurrently = call


def within_each_rank(actor: dict[str, Any], sampler: dict[str, Any], transport: str, folder: Any) -> Any:
    """Actor and sampler are two models in the same processes, as under torchrun."""
    sender, receiver = Peer(actor, False, torch.float32), Peer(sampler, False, torch.float32)
    sync = WeightSync(Here(sender), Here(receiver), transport, SMALL, folder)
    sync.publish(1)
    report = sync.publish(2)
    sync.close()
    return report.transport, held(receiver)


@pytest.mark.parametrize(
    ("actor", "sampler", "transport"),
    [
        (FSDP2, TP, "auto"),
        pytest.param(FSDP2, FSDP2, "auto", marks=pytest.mark.slow),
        pytest.param(FSDP1, DDP, "auto", marks=pytest.mark.slow),
        pytest.param(FSDP2, TP, "files", marks=pytest.mark.slow),
    ],
)
def test_two_models_in_the_same_processes(actor, sampler, transport, ranks, tmp_path):
    results = ranks.run(2, within_each_rank, actor, sampler, transport, tmp_path)
    assert {name for name, _ in results} == {"local" if transport == "auto" else transport}
    version, weights = results[0][1]
    wanted = expected(False, torch.float32, 2)
    assert version == 2 and weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())


def flip_a_bit(peer: Peer, bucket: int = 1) -> None:
    """On its way out of the actor's first rank a bucket of the next version is damaged."""
    transport, send = peer.sync.transport, peer.sync.transport.send

    class Damaging:
        def __init__(self, source: Any) -> None:
            self.source, self.count = source, 0
            self.parameters, self.shards = source.parameters, source.shards

        def gather(self, bucket_: Any, memory: torch.Tensor | None) -> None:
            self.source.gather(bucket_, memory)
            if self.count == bucket and memory is not None:
                memory[8] ^= 1
            self.count += 1

    transport.send = lambda version, source: send(version, Damaging(source))


def wrong_piece(peer: Peer, version: int) -> None:
    """The second rank has staged a shard that belongs elsewhere."""
    assert peer.sync.staged == version
    staged = peer.sync.receiver.staged
    if peer.mesh.rank == 1:
        name = next(name for name in staged if name.endswith("attn.to_q.lora_B.default.weight"))
        staged[name] = staged[name].roll(1, 0)


def other_base(peer: Peer) -> None:
    """One element of a frozen weight is another."""
    frozen = next(parameter for parameter in peer.received_module.parameters() if not parameter.requires_grad)
    frozen.data[0] += 1e-3


def apply_everywhere(sync: WeightSync, sampler: ProcessRole) -> list[Any]:
    from sfumato.runtime.weight_sync.receiver import apply

    return sampler.all(apply, sync._sent)


def test_damage_on_the_way_is_found_and_the_roles_can_begin_anew(ranks, tmp_path):
    with ProcessRoles(ranks, tmp_path, actor=2, sampler=2) as roles:
        roles.actor.build(Peer, DDP, True, torch.float32)
        roles.sampler.build(Peer, TP, True, torch.float32)
        sync = WeightSync(roles.actor, roles.sampler, "files", folder=tmp_path, timeout_s=30)
        roles.sampler.all(other_base)
        sync.transfer(1)
        errors = apply_everywhere(sync, roles.sampler)
        assert all(isinstance(error, WeightSyncError) and "model.model_path" in str(error) for error in errors)
        assert "not trained" in str(errors[0]) and "version 1" in str(errors[0])

        roles.sampler.build(Peer, TP, True, torch.float32)  # a process that was started anew knows nothing
        sync = WeightSync(roles.actor, roles.sampler, "broadcast", SMALL / 10, timeout_s=30)
        sync.publish(2)
        check(roles.sampler, 2, expected(True, torch.float32, 2))
        roles.actor.all(flip_a_bit)
        sync.transfer(3)
        errors = apply_everywhere(sync, roles.sampler)
        assert all(isinstance(error, WeightSyncError) and "version 3 in the sampler" in str(error) for error in errors)
        assert "lora" in str(errors[0]) and "runtime.weight_sync" in str(errors[0])

        sync.reconnect()
        sync.transfer(4)
        roles.sampler.all(wrong_piece, 4)
        errors = apply_everywhere(sync, roles.sampler)
        assert all(isinstance(error, WeightSyncError) and "rank 0, 1" in str(error) for error in errors)
        assert roles.sampler.all(held)[0][0] == 2
        sync.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "ipc", "files"])
def test_one_flipped_bit_is_found_over_every_transport(transport, ranks, tmp_path):
    with ProcessRoles(ranks, tmp_path, actor=2, sampler=2) as roles:
        roles.actor.build(Peer, FSDP2, False, torch.float32)
        roles.sampler.build(Peer, TP, False, torch.float32)
        sync = WeightSync(roles.actor, roles.sampler, transport, SMALL, tmp_path, timeout_s=30)
        sync.publish(1)
        roles.actor.all(flip_a_bit)
        sync.transfer(2)
        with pytest.raises(WeightSyncError, match="version 2 in the sampler"):
            sync.apply(2).result()
        sync.close()


def fail_while_sending(peer: Peer) -> None:
    """The actor breaks off after the second bucket."""
    send = peer.sync.transport.send

    class Failing:
        def __init__(self, source: Any) -> None:
            self.source, self.count = source, 0

        def gather(self, bucket: Any, memory: torch.Tensor | None) -> None:
            self.count += 1
            if self.count == 3:
                raise OSError("the actor broke off")
            self.source.gather(bucket, memory)

    peer.sync.transport.send = lambda version, source: send(version, Failing(source))


@pytest.mark.slow
@pytest.mark.parametrize("transport", STREAMS)
def test_receivers_do_not_wait_for_an_actor_that_failed(transport, ranks, tmp_path):
    fails_and_goes_on(ranks, tmp_path, transport, "actor", fail_while_sending)


def leave_while_receiving(peer: Peer) -> None:
    """The second rank breaks off at its fourth tensor."""
    take = peer.sync.transport.receive_tensors

    def broken(version: int, delivery: Any) -> Any:
        for number, delivered in enumerate(take(version, delivery)):
            if number == 3 and peer.mesh.rank == 1:
                raise OSError("the sampler broke off")
            yield delivered

    peer.sync.transport.receive_tensors = broken


@pytest.mark.parametrize("transport", STREAMS)
def test_the_actor_does_not_wait_for_a_receiver_that_failed(transport, ranks, tmp_path):
    fails_and_goes_on(ranks, tmp_path, transport, "sampler", leave_while_receiving)


def fails_and_goes_on(ranks: Any, tmp_path: Path, transport: str, side: str, fail: Callable[[Peer], None]) -> None:
    """Neither side waits for the other, and both can be connected anew."""
    with ProcessRoles(ranks, tmp_path, actor=1, sampler=2) as roles:
        roles.actor.build(Peer, DDP, False, torch.float32)
        roles.sampler.build(Peer, DDP, False, torch.float32)
        sync = WeightSync(roles.actor, roles.sampler, transport, SMALL, timeout_s=60)
        sync.publish(1)
        getattr(roles, side).all(fail)
        started = time.monotonic()
        with pytest.raises((OSError, WeightSyncError), match=r"broke off|lost|did not go on"):
            sync.transfer(2)
        with pytest.raises(WeightSyncError, match="not connected"):
            sync.transfer(2)
        sync.reconnect()
        sync.publish(2)
        assert time.monotonic() - started < 30
        check(roles.sampler, 2, expected(False, torch.float32, 2))
        sync.close()
