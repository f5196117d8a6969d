"""Checksums that add up over pieces, buckets, and weight synchronisation within one process."""

import copy
import itertools
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.errors import ConfigError, NonFiniteError, RoleLostError, WeightSyncError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Chunk, Shards, chunks_of_range, whole_chunk
from sfumato.rollout.engines.served.tensor_file import TensorFile
from sfumato.runtime.weight_sync import sender
from sfumato.runtime.weight_sync.buckets import plan_buckets
from sfumato.runtime.weight_sync.checksum import (
    BLOCK,
    BLOCKS_KEY,
    MODULUS,
    NUM_KNOWN,
    UNIT,
    Spec,
    add_up,
    blocks_by_numbers,
    blocks_by_words,
    compare,
    local_checksums,
    shard_checksum,
)
from sfumato.runtime.weight_sync.places import (
    ADDRESS_VARIABLE,
    Place,
    check_reachable,
    first_of_each_machine,
    open_store,
    own_address,
    reach_store,
    wait_for_all,
)
from sfumato.runtime.weight_sync.sender import Sent
from sfumato.runtime.weight_sync.sync import WeightSync
from sfumato.runtime.weight_sync.transports import Ends, Settings, broadcast, choose, ipc
from sfumato.runtime.weight_sync.transports.ipc import match

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 50
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a whole plain tensor."""
    return int(shard_checksum(tuple(tensor.shape), tensor, [whole_chunk(tensor.shape)])) % MODULUS


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Chunk]:
    """Boxes of a tensor that is cut in every dimension, unevenly; each is a piece of its own."""
    along = []
    for size, count in zip(shape, cuts, strict=True):
        starts = [size * index * index // count**2 for index in range(count)] + [size]
        along.append([(start, stop - start) for start, stop in itertools.pairwise(starts)])
    results = []
    for spans in itertools.product(*along):
        sizes = tuple(size for _, size in spans)
        results.append(Chunk(tuple(start for start, _ in spans), sizes, slices((0,) * len(sizes), sizes)))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [((), ()), ((7,), (3,)), ((6, 5), (2, 1)), ((6, 5), (3, 2)), ((1, 300, 140), (1, 4, 1)), ((4, 9, 6), (2, 1, 3))],
)
def test_checksums_of_pieces_add_up(shape, cuts, dtype):
    tensor = values(shape, dtype)
    boxes = grid(shape, cuts)
    parts = [tensor[slices(box.offsets, box.sizes)] for box in boxes]
    total = sum(int(shard_checksum(shape, part, [box])) for part, box in zip(parts, boxes, strict=True))
    assert total % MODULUS == tensor_checksum(tensor)


def mixed(index: int) -> int:
    """The mixing of ``checksum.py`` in integers without bounds."""
    mixed_once = index * -7046029254386353131 % MODULUS
    return (mixed_once ^ (mixed_once >> 32)) * -4658895280553007687 % MODULUS | 1


def by_the_formula(data: bytes) -> int:
    """Sum of numbers of four bytes times their weights, one after the other."""
    total = 0
    for position in range(-(-len(data) // UNIT)):
        block, place = divmod(position, BLOCK)
        weight = mixed(place) + (mixed(place - 1) << 32 if place else 0)
        assert weight % 2
        number = int.from_bytes(data[position * UNIT : (position + 1) * UNIT], "little")
        total += number * weight * mixed(block + BLOCKS_KEY)
    return total % MODULUS


@pytest.mark.parametrize("num_bytes", [0, 8, UNIT * BLOCK, UNIT * (2 * BLOCK + 3), UNIT * 3 * BLOCK + 16])
def test_the_checksum_is_the_formulas_whatever_the_dtype(num_bytes):
    data = torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    wanted = by_the_formula(data.numpy().tobytes())
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        if num_bytes % dtype.itemsize == 0:
            assert tensor_checksum(data.view(dtype)) == wanted, dtype
    for size in (num_bytes - 1, num_bytes - 6):  # the last number is there in part
        if size > 0:
            assert tensor_checksum(data[:size]) == by_the_formula(data[:size].numpy().tobytes())


def test_words_of_two_numbers_give_the_sums_of_the_numbers():
    numbers = values((11 * BLOCK + 1,)).view(torch.uint32)[1:]
    assert torch.equal(blocks_by_words(numbers), blocks_by_numbers(numbers))


def test_blocks_far_behind_the_first_have_weights_by_the_same_rule():
    shape, start = (2 * NUM_KNOWN, BLOCK), NUM_KNOWN - 1
    rows = values((3, BLOCK))
    parts = [Chunk((start + index, 0), (1, BLOCK), (slice(index, index + 1),)) for index in range(3)]
    together = Chunk((start, 0), (3, BLOCK), (slice(0, 3),))
    total = sum(int(shard_checksum(shape, rows, [part])) for part in parts)
    assert total % MODULUS == int(shard_checksum(shape, rows, [together])) % MODULUS


@pytest.mark.parametrize("start", [1, 2, 3, 5])
def test_where_a_tensor_lies_in_memory_does_not_matter(start):
    memory = values((3 * BLOCK + start,), torch.bfloat16)
    assert tensor_checksum(memory[start:]) == tensor_checksum(memory[start:].clone())
    wide = memory.float()
    assert tensor_checksum(wide[start:]) == tensor_checksum(wide[start:].clone())


def test_two_signs_and_what_is_swapped_between_blocks_are_seen():
    tensor = values((4 * BLOCK,))
    truth, seen = tensor_checksum(tensor), tensor.view(torch.int32)
    sign = -(2**31)
    for first, second in itertools.product((0, 1, BLOCK - 2, BLOCK - 1), (2, 3, BLOCK, BLOCK + 1, 3 * BLOCK - 1)):
        seen[first] ^= sign
        seen[second] ^= sign
        assert tensor_checksum(tensor) != truth, (first, second)
        seen[first] ^= sign
        seen[second] ^= sign
        swapped = tensor.clone()
        swapped[[first, second]] = swapped[[second, first]]
        assert tensor_checksum(swapped) != truth, (first, second)
    blocks = tensor.view(4, BLOCK)
    assert tensor_checksum(blocks[[1, 0, 2, 3]]) != truth == tensor_checksum(blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("cut", [0, 1, BLOCK - 1, BLOCK, BLOCK + 7, 3 * BLOCK + 100])
def test_long_tensors_are_taken_block_by_block(cut, dtype):
    tensor = values((5, BLOCK), dtype)
    flat, result = tensor.flatten(), 0
    for start, stop in ((0, cut), (cut, flat.numel())):
        position = start
        for offsets, sizes in chunks_of_range(tensor.shape, start, stop):
            count = torch.Size(sizes).numel()
            place = (slice(position - start, position - start + count),)
            result += int(shard_checksum(tensor.shape, flat[start:stop], [Chunk(offsets, sizes, place)]))
            position += count
    assert result % MODULUS == tensor_checksum(tensor)
    columns = sum(
        int(
            shard_checksum(tensor.shape, tensor[:, part], [Chunk((0, part.start), (5, part.stop - part.start), (...,))])
        )
        for part in (slice(0, 1000), slice(1000, BLOCK))
    )
    assert columns % MODULUS == tensor_checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_change_is_seen(dtype):
    tensor = values((40, 50), dtype)
    truth = tensor_checksum(tensor)
    seen = tensor.view(torch.uint8)
    for index in range(0, seen.numel(), 97):
        for bit in (1, 128) if dtype != torch.bool else (1,):
            seen.view(-1)[index] ^= bit
            assert tensor_checksum(tensor) != truth, (index, bit)
            seen.view(-1)[index] ^= bit
    assert tensor_checksum(tensor) == truth
    assert tensor_checksum(tensor.flip(0)) != truth
    seen.view(-1)[tensor.element_size() - 1] ^= 128 if dtype != torch.bool else 1  # two signs at once
    seen.view(-1)[2 * tensor.element_size() - 1] ^= 128 if dtype != torch.bool else 1
    assert tensor_checksum(tensor) != truth


def test_shape_and_strides_of_a_view_do_not_matter():
    tensor = values((30, 20))
    assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.view(-1)) == tensor_checksum(tensor)
    assert tensor_checksum(torch.empty(0, 3)) == 0


WHOLE = (((0,), (4,)),)
LEFT, RIGHT = (((0,), (2,)),), (((2,), (2,)),)


def test_copies_that_differ_and_lacking_pieces_are_named():
    shapes = {"w": (4,)}
    assert add_up([{"w": (LEFT, 5)}, {"w": (RIGHT, MODULUS - 2)}, {"w": (LEFT, 5)}], shapes, "here") == {"w": 3}
    with pytest.raises(WeightSyncError, match=r"^here: w \(rank 0, 2\) differs between ranks that hold the same part"):
        add_up([{"w": (LEFT, 5)}, {"w": (RIGHT, 1)}, {"w": (LEFT, 6)}], shapes, "here")
    with pytest.raises(WeightSyncError, match=r"w .* is not there as a whole"):
        add_up([{"w": (LEFT, 5)}, {"w": ((), 0)}], shapes, "here")


def test_the_rank_that_is_wrong_is_named_where_it_can_be_known():
    shapes = {"w": (4,)}
    compare([{"w": (LEFT, 5)}, {"w": (RIGHT, 2)}], {"w": 7}, shapes, "there")
    with pytest.raises(WeightSyncError, match=r"there: w \(rank 1\) is not what was sent"):
        compare([{"w": (WHOLE, 7)}, {"w": (WHOLE, 8)}], {"w": 7}, shapes, "there")
    halves = [{"w": (LEFT, 5)}, {"w": (RIGHT, 2)}, {"w": (LEFT, 5)}, {"w": (RIGHT, 9)}]
    with pytest.raises(WeightSyncError, match=r"w \(rank 3\)"):
        compare(halves, {"w": 7}, shapes, "there")
    with pytest.raises(WeightSyncError, match=r"w \(rank 0, 1\)"):
        compare([{"w": (LEFT, 5)}, {"w": (RIGHT, 3)}], {"w": 7}, shapes, "there")
    names = dict.fromkeys("abcd", (4,))
    with pytest.raises(WeightSyncError, match=r"a \(rank 0\).*b \(rank 0\).*c \(rank 0\).*and 1 more. Do this"):
        compare([dict.fromkeys("abcd", (WHOLE, 1))], dict.fromkeys("abcd", 2), names, "there", "Do this")


def test_buckets_are_full_aligned_and_hold_large_tensors_alone():
    shapes = {"a": (3,), "b": (5,), "large": (100,), "c": (2, 2), "empty": (0, 3), "scalar": ()}
    specs = {name: Spec(shape, torch.bfloat16 if name == "b" else torch.float32) for name, shape in shapes.items()}
    buckets = plan_buckets(specs, 64)
    assert [[item.name for item in bucket.items] for bucket in buckets] == [
        ["a", "b"],
        ["large"],
        ["c", "empty", "scalar"],
    ]
    assert [bucket.num_bytes for bucket in buckets] == [26, 400, 20]
    memory = torch.zeros(400, dtype=torch.uint8)
    for bucket in buckets:
        result = dict(bucket.tensors(memory))
        for index, (name, value) in enumerate(result.items()):
            assert value.shape == specs[name].shape and value.dtype == specs[name].dtype
            value.fill_(index + 1)
        assert all((value == index + 1).all() for index, value in enumerate(result.values()))
    assert plan_buckets({}, 64) == ()


class Here:
    """A role in this thread."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def call(self, function: Any, *args: Any, kind: str = "other") -> Future:
        future: Future = Future()
        future.set_result(function(self.state, *args))
        return future

    call_concurrently = call


class Peer:
    """A small module with trained and frozen weights and a buffer."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.received_module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).to(dtype)
        self.received_module[2].requires_grad_(False)
        self.mesh, self.version = Mesh(Layout(), torch.device("cpu")), 0
        self.entered: list[int] = []

    @contextmanager
    def sent_weights(self, version: int):
        self.entered.append(version)
        yield self.received_module


def change(peer: Peer, value: float) -> None:
    with torch.no_grad():
        for parameter in peer.received_module.parameters():
            if parameter.requires_grad:
                parameter.add_(value)


def equal(first: Peer, second: Peer) -> bool:
    pairs = zip(first.received_module.state_dict().values(), second.received_module.state_dict().values(), strict=True)
    return all(torch.equal(left.to(right.dtype), right) for left, right in pairs)


@pytest.mark.parametrize("transport", ["auto", "files"])
def test_versions_within_one_process(transport, tmp_path):
    actor, sampler = Peer(), Peer()
    sync = WeightSync(Here(actor), Here(sampler), transport, folder=tmp_path)
    for version, verified in ((2, 9), (3, 4)):  # frozen weights and buffers are verified once
        change(actor, 0.5)
        report = sync.transfer(version)
        sent = copy.deepcopy(actor.received_module)
        change(actor, 0.25)  # training goes on before the sampler applies it
        sync.apply(version).result()
        actor.received_module = sent
        assert sampler.version == version and equal(actor, sampler)
        assert (report.num_tensors, report.num_verified, report.num_bytes) == (4, verified, 4 * (30 + 5 + 5 + 5))
    assert report.transport == sync.transport == {"auto": "local", "files": "files"}[transport]
    assert actor.entered == [2, 2, 3]
    assert not list(tmp_path.rglob("version_*"))
    sync.close()


def test_a_sampler_of_another_dtype_gets_what_a_cast_gives(tmp_path):
    for transport in ("local", "files"):
        actor, sampler = Peer(), Peer(dtype=torch.bfloat16)
        change(actor, 0.1)
        WeightSync(Here(actor), Here(sampler), transport, folder=tmp_path).publish(1)
        assert equal(actor, sampler)


@pytest.mark.parametrize("transport", ["local", "files"])
def test_versions_come_in_the_same_memory(transport, tmp_path):
    actor, sampler = Peer(), Peer()
    sync = WeightSync(Here(actor), Here(sampler), transport, folder=tmp_path)
    places = []
    for version in (1, 2):
        change(actor, 0.5)
        sync.transfer(version)
        places.append({name: tensor.data_ptr() for name, tensor in sampler.sync.receiver.staged.items()})
        addresses = {
            parameter.data_ptr() for peer in (actor, sampler) for parameter in peer.received_module.parameters()
        }
        assert not addresses & set(places[-1].values())
        sync.apply(version).result()
        assert equal(actor, sampler)
    assert places[0] == places[1] and len(places[0]) == 4
    sending = actor.sync.transport
    sync.close()
    assert transport == "files" or not sending.reused


@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_weights_that_change_while_they_wait_are_not_applied(name):
    sampler = Peer()
    sync = WeightSync(Here(Peer()), Here(sampler))
    sync.publish(1)
    sync.transfer(2)
    sampler.sync.receiver.staged[name].view(torch.int32).view(-1)[-1] ^= 1
    with pytest.raises(WeightSyncError, match=rf"{name} \(rank 0\) is not what was sent"):
        sync.apply(2).result()
    assert sampler.version == 1


def test_a_sampler_that_is_the_actor_has_the_weights():
    role = Here(Peer())
    sync = WeightSync(role, role)
    assert sync.publish(5).num_bytes == 0
    assert role.state.version == 5 and sync.transport == "shared"


def test_versions_out_of_order_are_refused():
    sync = WeightSync(Here(Peer()), Here(Peer()))
    with pytest.raises(WeightSyncError, match=r"version 1 was not transferred to the sampler \(none was\)"):
        sync.apply(1)
    sync.transfer(1)
    with pytest.raises(WeightSyncError, match=r"version 2 came .* before version 1 was applied"):
        sync.transfer(2)
    with pytest.raises(WeightSyncError, match=r"version 1 was not transferred"):
        sync.apply(1)
    sync.reconnect()
    sync.publish(4)
    for version in (4, 3):
        with pytest.raises(WeightSyncError, match=rf"version {version} came .* after version 4 had come"):
            sync.transfer(version)
    sync.reconnect()
    sync.transfer(3)
    sync.apply(3)
    with pytest.raises(WeightSyncError, match="version 3 was applied already by the sampler's rank 0"):
        sync.apply(3)
    assert sync.sampler.state.sync.problem(5) == "version 5 was never received by the sampler's rank 0"


def test_other_models_are_refused():
    actor, sampler = Peer(), Peer()
    sampler.received_module[0] = nn.Linear(7, 5, bias=False)
    with pytest.raises(ConfigError, match=r"the sampler lacks 0.bias; 0.weight has shape \(5, 6\) in the actor and"):
        WeightSync(Here(actor), Here(sampler)).transfer(1)
    actor.received_module.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        WeightSync(Here(actor), Here(Peer())).transfer(1)


@pytest.mark.parametrize("transport", ["local", "files"])
def test_weights_that_are_not_finite_are_not_sent(transport, tmp_path):
    actor, sampler = Peer(), Peer()
    sync = WeightSync(Here(actor), Here(sampler), transport, folder=tmp_path)
    sync.publish(1)
    before = {name: weight.clone() for name, weight in sampler.received_module.state_dict().items()}
    change(actor, 0.1)
    with actor.sent_weights(2) as module, torch.no_grad():
        name, weight = next(
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        )
        weight.view(-1)[-1] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"version 2 in the actor .*{name}.*not sent"):
        sync.publish(2)
    assert sampler.version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in sampler.received_module.state_dict().items())


@pytest.mark.parametrize("name", ["2.weight", "1.running_mean"])
def test_other_base_weights_are_found_at_the_first_version(name):
    actor, sampler = Peer(), Peer()
    sampler.received_module.state_dict()[name].view(-1)[0] += 1e-3
    sync = WeightSync(Here(actor), Here(sampler))
    with pytest.raises(WeightSyncError, match=rf"{name} \(rank 0\).*other base weights.*model.model_path"):
        sync.publish(1)
    assert sampler.version == 0 and WeightSyncError.exit_code == 7


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    tensors = load_file(path)
    tensors["0.weight"].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, path)


def remove(path: Path) -> None:
    path.unlink()


def drop(path: Path) -> None:
    tensors = load_file(path)
    del tensors["0.weight"]
    save_file(tensors, path)
    manifest = path.parent / "manifest.json"
    manifest.write_text(f'{{"files": {{"{path.name}": {path.stat().st_size}}}}}')


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncate, "is not as long as it was written"),
        (flip, r"0.weight \(rank 0\) is not what was sent"),
        (remove, "is damaged"),
        (drop, r"lacks 1 weights: 0\.weight"),
    ],
)
def test_damaged_files_are_refused(damage, text, tmp_path):
    class Damaging(Here):
        def call_concurrently(self, function: Any, *args: Any, kind: str = "other") -> Future:
            damage(files_of(tmp_path)[0])
            return self.call(function, *args)

    sync = WeightSync(Here(Peer()), Damaging(Peer()), "files", folder=tmp_path)
    with pytest.raises(WeightSyncError, match=text):
        sync.publish(1)
    sync.reconnect()
    assert not (tmp_path / "weight_sync").exists()


def test_files_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "weight_sync").write_text("a file stands where the folder should be")
    sync = WeightSync(Here(Peer()), Here(Peer()), "files", folder=tmp_path)
    with pytest.raises(WeightSyncError, match=r"version 1 could not be written into .*weight_sync"):
        sync.transfer(1)
    with pytest.raises(ConfigError, match=r"train.output_dir"):
        WeightSync(Here(Peer()), Here(Peer()), "files").transfer(1)


GPU = [Place("one", pid, f"GPU-{pid % 2}") for pid in range(4)]
CPU = [Place("one", pid, None) for pid in range(4)]
ELSEWHERE = Place("two", 1, None)


def test_the_transport_follows_from_where_the_processes_are():
    assert choose("auto", Ends(CPU[:2], CPU[:2])) == "local"
    assert choose("auto", Ends(CPU[:2], CPU[2:])) == "broadcast"
    assert choose("auto", Ends(GPU[:2], GPU[2:])) == "ipc"
    assert choose("auto", Ends(GPU[:1], GPU[1:2])) == "broadcast"
    assert match(Ends(GPU[:2], GPU[2:])) == (0, 1)
    assert match(Ends(CPU[:2], [*CPU[2:], CPU[0]])) == (0, 1, 0)
    places = [CPU[2], ELSEWHERE, CPU[3], ELSEWHERE]
    takers = first_of_each_machine(places)
    assert takers == (0, 1, 0, 1) and Ends(CPU[:2], places, takers).taking == [CPU[2], ELSEWHERE]
    assert match(Ends(CPU[:2], CPU[2:], (1, 1))) == (1,)
    assert choose("local", Ends(CPU[:2], CPU[:2], (0, 0))) == "local", "the ranks that take nothing count, too"
    with pytest.raises(ConfigError, match=r"sampler's rank 1 \(two, process 1\) has none: set it to broadcast"):
        match(Ends(CPU[:2], [CPU[2], ELSEWHERE]))
    with pytest.raises(ConfigError, match="within a process only"):
        choose("local", Ends(CPU[:1], CPU[1:2]))
    with pytest.raises(ConfigError, match="actor and sampler are in one"):
        choose("broadcast", Ends(CPU[:1], CPU[:1]))
    with pytest.raises(ConfigError, match="'nccl' is unknown: auto, local"):
        choose("nccl", Ends(CPU[:1], CPU[1:2]))


def test_who_does_not_come_is_named():
    store, address = open_store(CPU[:3], 5.0)
    assert address[0] == "127.0.0.1"
    other = reach_store(address, 5.0)
    other.set("here/the sampler's rank 0", "1")
    with pytest.raises(WeightSyncError, match=r"the actor waited .* to be connected with the sampler's rank 1, who"):
        wait_for_all(
            store, "the actor", ["the actor", "the sampler's rank 0", "the sampler's rank 1"], 0.2, threading.Event()
        )
    port = address[1]
    del store, other
    with pytest.raises(WeightSyncError, match=rf"the actor cannot be reached at 127.0.0.1:{port} within 0.5 s"):
        reach_store(("127.0.0.1", port), 0.5)


def test_the_address_is_the_one_that_the_runtime_knows_of_the_node(monkeypatch: pytest.MonkeyPatch):
    """A group within one machine meets at 127.0.0.1, which is no address for the sampler's machine."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    two_machines = [Place("alfa/1", 1, None), Place("bravo/1", 2, None)]
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.77.0.9")
    assert open_store(two_machines, 5.0)[1][0] == "10.77.0.9"
    monkeypatch.delenv(ADDRESS_VARIABLE)
    assert open_store(two_machines, 5.0)[1][0] == own_address()


@pytest.mark.parametrize("kind", [broadcast.Sending, ipc.Sending])
def test_an_address_that_leads_another_machine_to_itself_is_refused_at_once(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    places = [Place("alfa/1", 1, None), Place("bravo/1", 2, None)]
    senders = places if kind is ipc.Sending else places[:1]  # whose receivers are on the machines of its senders
    mesh = Mesh(Layout(), torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"alfa has told 127\.0\.0\.1 as its address, under which bravo cannot.*NODE_IP"
    ):
        kind(Settings(timeout_s=5.0), mesh, [], Ends(senders, places[1:]))
    check_reachable("127.0.0.1", [places[0], Place("alfa/1", 3, None)])
    check_reachable("10.77.0.1", places)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(("A", "B", "C"), "nccl"), (("A", "B", "B"), "gloo"), (("A", None, "C"), "gloo"), ((None, None, None), "gloo")],
)
def test_nccl_sends_between_gpus_of_their_own(gpus: tuple[str | None, ...], backend: str) -> None:
    first, *others = [Place("alfa/1", number, gpu) for number, gpu in enumerate(gpus)]
    mesh = Mesh(Layout(), torch.device("cpu"))
    sending = broadcast.Sending(Settings(timeout_s=5.0), mesh, plan_buckets({}, 64), Ends([first], others))
    assert sending.access().backend == backend


class Stream:
    """Of a device that there is not; what is put on it ends, or never does."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def wait_stream(self, _other: Any) -> None: ...

    def record_event(self) -> Any:
        return self

    def query(self) -> bool:
        return self.ends


@pytest.fixture
def beside_a_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[broadcast._Group]]:
    """The two sides of a broadcast by gloo, each of which does as by NCCL."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())

    def make(ends: bool, timeout_s: float) -> list[broadcast._Group]:
        store, address = open_store(CPU[:3], 5.0)
        access, mesh = broadcast.Access(address, (0,), "gloo"), Mesh(Layout(), torch.device("cpu"))
        buckets = plan_buckets({"a": Spec((4,), torch.float32)}, 64)
        groups = [
            broadcast._Group(store if rank == 0 else reach_store(address, 5.0), rank, access, mesh, buckets)
            for rank in range(2)
        ]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda group: group.join(5.0), groups)) == [None, None]
        for group in groups:
            group.stream, group.timeout_s = Stream(ends), timeout_s
        return groups

    return make


def test_on_a_device_a_broadcast_begins_when_all_ranks_have_come(beside_a_device: Any) -> None:
    actor, sampler = beside_a_device(ends=True, timeout_s=5.0)
    began: list[int] = []
    launch = actor._launch
    actor._launch = lambda memory: began.append(len(memory)) or launch(memory)
    with ThreadPoolExecutor(2) as threads:
        for version in (1, 2):
            actor.slots[0].fill_(version)
            sending = threads.submit(actor.broadcast, actor.slots[0], 16, version)
            time.sleep(0.1)
            assert len(began) == version - 1 and not sending.done()
            received = sampler.broadcast(sampler.slots[0], 16, version)
            sending.result(5)
            assert received[:16].tolist() == [version] * 16
    assert actor.store.check(["here/the actor, bucket 2"]) and not actor.store.check(["here/the actor, bucket 1"])


def test_on_a_device_a_rank_that_has_gone_is_named_and_kernels_that_never_end_are_not_waited_for(
    beside_a_device: Any,
) -> None:
    actor, _ = beside_a_device(ends=True, timeout_s=0.3)
    with pytest.raises(WeightSyncError, match=r"version 7: the actor lost a rank of the sampler.*rank 0, bucket 1"):
        actor.broadcast(actor.slots[0], 16, 7)
    actor, sampler = beside_a_device(ends=False, timeout_s=0.5)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(sampler.broadcast, sampler.slots[0], 16, 1)
        with pytest.raises(WeightSyncError, match=r"did not end in 0\.5 s"):
            actor.broadcast(actor.slots[0], 16, 1)
        with pytest.raises(WeightSyncError):
            other.result(5)


def test_a_bucket_is_sent_while_the_next_is_gathered_and_loaded_while_the_next_comes(beside_a_device: Any) -> None:
    """Each side's second bucket must begin before its first has ended, or the test does not."""
    actor, sampler = beside_a_device(ends=True, timeout_s=5.0)
    buckets = plan_buckets({name: Spec((4,), torch.float32) for name in "abc"}, 16)
    values = iter((1, 2, 3))
    second_begun = {"gather": threading.Event(), "receive": threading.Event()}

    def slow(group: broadcast._Group, event: threading.Event) -> Callable[..., torch.Tensor]:
        def wait_then_broadcast(memory: torch.Tensor, *args: Any) -> torch.Tensor:
            assert event.wait(5), "nothing goes on beside it"
            return type(group).broadcast(group, memory, *args)

        return wait_then_broadcast

    class Gathering:
        def gather(self, bucket: Any, memory: torch.Tensor) -> None:
            if memory is actor.slots[1]:
                second_begun["gather"].set()
            memory.view(torch.float32).fill_(next(values))

    for group in (actor, sampler):
        group.slots, group.stream = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)], None
    actor.broadcast = slow(actor, second_begun["gather"])
    sending = object.__new__(broadcast.Sending)
    sending.group, sending.buckets = actor, buckets
    receiving = object.__new__(broadcast.Receiving)
    receiving.group, receiving.buckets = sampler, buckets
    begin = sampler.begin
    sampler.begin = lambda number, *args: (number == 1 and second_begun["receive"].set()) or begin(number, *args)
    received = {}
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sending.send, 1, Gathering())
        for name, tensor in receiving.receive_tensors(1, None):
            assert second_begun["receive"].wait(5)
            received[name] = tensor.tolist()
        sent.result(5)
    assert received == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}


def test_of_two_sides_that_fail_the_cause_is_raised() -> None:
    def ended(error: Exception | None) -> Future:
        call: Future = Future()
        call.set_exception(error) if error else call.set_result("sent")
        return call

    sync = WeightSync(Here(Peer()), Here(Peer()), grace_s=0.0)
    assert sync._both(ended(None), ended(None)) == "sent"
    lost, followed = RoleLostError("sampler", [0], "killed"), WeightSyncError("the sampler has gone")
    for sending, receiving, cause in (
        (followed, lost, lost),
        (lost, followed, lost),
        (None, lost, lost),
        (followed, None, followed),
    ):
        with pytest.raises(type(cause)) as raised:
            sync._both(ended(sending), ended(receiving))
        assert raised.value is cause


def test_memory_whose_takers_never_come_has_no_name_left() -> None:
    place = Place("alfa/1", 1, None)
    buckets = plan_buckets({"a": Spec((4,), torch.float32)}, 64)
    mesh = Mesh(Layout(), torch.device("cpu"))
    sending = ipc.Sending(Settings(timeout_s=5.0), mesh, buckets, Ends([place], [place]))
    names = list(sending.paths)
    assert names and all(name.exists() for name in names)
    sending.close()
    assert not any(name.exists() for name in names) and sending.slots == []


def test_memory_of_the_way_before_is_given_back_when_roles_are_connected_again() -> None:
    sampler = Peer()
    sync = WeightSync(Here(Peer()), Here(sampler))
    sync.transfer(1)
    closed = []
    sampler.sync.transport.close = lambda: closed.append("sampler")
    sync.connect(2)
    assert closed == ["sampler"]
    sender.close_way(sampler)
    assert sampler.sync is None


def test_a_pipeline_of_stages_is_refused_on_both_sides() -> None:
    staged = Peer()
    staged.mesh = SimpleNamespace(layout=Layout(pp=2))
    for actor, sampler, role in ((staged, Peer(), "actor"), (Peer(), staged, "sampler")):
        with pytest.raises(ConfigError, match=rf"pipeline of stages \({role}\): set pipeline_parallel_size to 1"):
            WeightSync(Here(actor), Here(sampler)).transfer(1)


def test_tensors_see_the_dtype_that_the_sampler_has():
    peer = Peer()
    parameters = dict(peer.received_module.named_parameters())
    specs = {name: Spec(tuple(parameter.shape), torch.bfloat16) for name, parameter in parameters.items()}
    shards = Shards(peer.received_module, peer.mesh, parameters)
    result = local_checksums(shards, peer.mesh.device, parameters, specs=specs)
    assert result["0.weight"][1] == tensor_checksum(parameters["0.weight"].detach().bfloat16())
    assert result["0.weight"][0] == (((0, 0), (5, 6)),)


def test_what_the_driver_is_told_is_equally_long_whatever_the_checksums():
    small, large = Sent(3, {"a": 0, "b": 5}), Sent(3, {"a": MODULUS - 1, "b": 1 << 63})
    assert len(pickle.dumps(small)) == len(pickle.dumps(large))
    assert [pickle.loads(pickle.dumps(sent)) for sent in (small, large)] == [small, large]


class Lost:
    """A role whose processes have died: its calls raise, as those of a role on Ray."""

    def call(self, function: Any, *args: Any, kind: str = "other") -> Any:
        raise RoleLostError("actor", [0], "killed")

    call_concurrently = call


class Endless:
    """A call that waits for somebody who does not come."""

    def done(self) -> bool:
        return False

    def result(self) -> Any:
        raise AssertionError("it does not end")


def test_a_sampler_does_not_wait_for_an_actor_that_died_when_it_was_idle() -> None:
    sync = WeightSync(Lost(), Lost())
    with pytest.raises(RoleLostError, match="role actor, rank 0: killed"):
        sync._while_actor_lives(Endless())


def test_of_what_gloo_says_the_reason_is_quoted_without_its_source_file():
    said = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:4321. More"
    assert broadcast._first_sentence(RuntimeError(said)) == "Connection closed by peer [10.0.0.2]:4321"
    assert broadcast._first_sentence(RuntimeError("NCCL error\nwith details")) == "NCCL error"


def test_a_dtype_that_no_weights_have_is_named(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(WeightSyncError, match=r"a.b has dtype torch.int64"):
        TensorFile(file, {}).append("a.b", torch.zeros(2, dtype=torch.int64))


def test_roles_that_are_not_connected_say_what_connects_them() -> None:
    with pytest.raises(WeightSyncError, match=r"not connected .*reconnect\(\) first"):
        ipc._wait(None, ["key"], 1, "sampler", 1.0, threading.Event())
