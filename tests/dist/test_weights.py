"""Weights in and out of modules on every mesh, against the plain module: bit for bit."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sfumato.errors import ConfigError
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel import keyed_weights, random_weights, weight_files, weights
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import parallelize, shard_data_parallel
from sfumato.parallel.plan import find_blocks
from sfumato.parallel.random_weights import build_with_random_weights, initialise_on_meta
from sfumato.parallel.shards import all_parameters, gather_whole, local_shard, persistent_buffers, ranges_of, shard_of
from sfumato.parallel.weights import (
    build_on_meta,
    each_whole_weight,
    load_weights,
    load_whole,
    real_stand_ins,
    whole_weights,
)
from tests.dist.cases import CASES, build, dense, make_mesh

COLUMNS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")
ROWS = ("o_proj.weight", "down_proj.weight")

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp": (2, "dense", {"data_parallel_mode": "ddp"}),
    "fsdp2": (2, "tied", {}),
    "uneven": (4, "wan", {}),
    "hsdp": (4, "sd3", {"data_parallel_replicate_size": 2}),
    "tp": (2, "dense", {"tensor_parallel_size": 2, "data_parallel_mode": "ddp"}),
    "fsdp2 x tp": (4, "tied", {"tensor_parallel_size": 2}),
    "ep": (2, "moe", {"expert_parallel_size": 2}),
    "efsdp x ep": (4, "moe", {"expert_parallel_size": 2}),
}


def make(kind: str) -> nn.Module:
    if kind != "tied":
        return build(kind)
    module = dense()
    module.config.tie_word_embeddings = True
    torch.manual_seed(0)
    return type(module)(module.config)


def cut(module: nn.Module, kind: str, mesh: Mesh, parsed: Any) -> nn.Module:
    """Puts a module on a mesh; matrices are cut by hand over tensor parallelism, tied ones twice."""
    plan = CASES["dense" if kind == "tied" else kind].plan(module)
    if mesh.layout.tp == 1:
        return parallelize(module, mesh, parsed, plan)
    ranks = mesh.device_mesh("tp")
    for name, tensor in list(module.named_parameters(remove_duplicate=False)):
        if name.endswith((*COLUMNS, *ROWS, "embed_tokens.weight")):
            owner, _, key = name.rpartition(".")
            placement = Shard(1) if name.endswith(ROWS) else Shard(0)
            piece = nn.Parameter(distribute_tensor(tensor.detach(), ranks, [placement]))
            module.get_submodule(owner).register_parameter(key, piece)
    return shard_data_parallel(module, mesh, parsed, find_blocks(module, plan))


def unequal(module: nn.Module, truth: nn.Module) -> list[str]:
    """Names of weights and buffers whose wholes are not those of the plain module."""
    expected = dict(truth.named_parameters()) | dict(truth.named_buffers())
    actual = all_parameters(module) | dict(module.named_buffers())
    names = actual.keys() ^ (expected.keys() | (actual.keys() & {"lm_head.weight"}))
    plain = dict(truth.named_parameters(remove_duplicate=False)) | expected
    return [
        *names,
        *(name for name, value in actual.items() if not torch.equal(gather_whole(value.detach()), plain[name])),
    ]


class Meter:
    """Counts what is read of files."""

    def __init__(self, stored: Any) -> None:
        self.num_bytes, self.read = 0, stored.read

    def __call__(self, source: Any, box: Any) -> torch.Tensor:
        tensor = self.read(source, box)
        self.num_bytes += tensor.nbytes
        return tensor


def load(kind: str, folder: str, from_rank0: bool = False, **config: Any) -> tuple[list[str], int, int]:
    """What differs after loading, the bytes this rank read, and the bytes it holds."""
    mesh, parsed = make_mesh(**config)
    module = cut(build_on_meta(functools.partial(make, kind)), kind, mesh, parsed)
    if from_rank0 and not mesh.is_first:
        folder = "/nonexistent"
    meter = Meter(weight_files.FileTensor)
    weight_files.FileTensor.read = lambda source, box: meter(source, box)
    try:
        load_weights(module, Path(folder), mesh, from_rank0)
    finally:
        weight_files.FileTensor.read = meter.read
    holds = sum(local_shard(parameter.detach()).nbytes for parameter in all_parameters(module).values())
    holds += sum(persistent_buffer.nbytes for persistent_buffer in weights.persistent_buffers(module).values())
    return unequal(module, make(kind)), meter.num_bytes, holds


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder with several files for each kind, which transformers or diffusers wrote."""
    root = tmp_path_factory.mktemp("weights")
    for kind in ("dense", "tied", "moe", "sd3", "wan"):
        make(kind).save_pretrained(root / kind, max_shard_size="60KB")
        assert len(list((root / kind).glob("*.safetensors"))) > 1
    make("moe").save_pretrained(root / "moe fused", save_original_format=False)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_reads_its_part(layout, folders, ranks):
    num_ranks, kind, config = LAYOUTS[layout]
    for differing, num_read, num_held in ranks.run(
        num_ranks, functools.partial(load, kind, str(folders[kind]), **config)
    ):
        assert differing == []
        assert num_read == num_held


def test_experts_that_are_stored_together(folders, ranks):
    config = {"expert_parallel_size": 2}
    for differing, num_read, num_held in ranks.run(
        4, functools.partial(load, "moe", str(folders["moe fused"]), **config)
    ):
        assert differing == []
        assert num_read == num_held


@pytest.mark.parametrize("layout", ["hsdp", "fsdp2 x tp", "efsdp x ep"])
def test_only_the_first_rank_reads(layout, folders, ranks):
    num_ranks, kind, config = LAYOUTS[layout]
    run = functools.partial(load, kind, str(folders[kind]), True, **config)
    for rank, (differing, num_read, _) in enumerate(ranks.run(num_ranks, run)):
        assert differing == []
        assert (num_read > 0) == (rank == 0)


def load_stages(folder: str) -> list[str]:
    """A pipeline of two stages, each sharded: what differs in its whole weights, seen from rank 0."""
    mesh, parsed = make_mesh(pipeline_parallel_size=2)
    from sfumato.parallel.pipeline import build_pipeline

    differing = []
    for from_rank0 in (False, True):
        module = build_on_meta(functools.partial(build, "moe"))
        stages = build_pipeline(module, mesh, parsed, CASES["moe"].plan(module)).module
        load_weights(stages, Path(folder if mesh.is_first or not from_rank0 else "/nonexistent"), mesh, from_rank0)
        actual, expected = whole_weights(stages, mesh), build("moe").state_dict() if mesh.is_first else {}
        differing += [*(actual.keys() ^ expected.keys()), *unlike(actual, expected)]
        doubled = {name: 2 * weight for name, weight in build("moe").state_dict().items()}
        load_whole(stages, doubled, mesh)
        differing += unlike(whole_weights(stages, mesh), doubled)
    return differing


def unlike(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in actual.items() if not torch.equal(value, expected[name])]


def test_stages_of_a_pipeline(folders, ranks):
    assert ranks.run(4, load_stages, str(folders["moe"])) == [[]] * 4


def load_on_one_rank() -> str:
    mesh, parsed = make_mesh()
    module = cut(build("dense"), "dense", mesh, parsed)
    try:
        load_whole(module, whole_weights(module, mesh), mesh)
    except ConfigError as error:
        return str(error)
    return "loaded"


def test_tensors_of_one_rank_are_not_taken_for_those_of_all(ranks):
    for message in ranks.run(2, load_on_one_rank):
        assert message == "weights: the ranks have 0 to 47 tensors: give all the same, or set from_rank0"


def there_and_back(kind: str, lora: bool, from_rank0: bool, **config: Any) -> tuple[list[str], list[str], list[str]]:
    """Names that rank 0 gathers, trainable ones, and what differs after whole weights were put in."""
    mesh, parsed = make_mesh(**config)
    truth = build(kind, lora)
    module = cut(build(kind, lora), kind, mesh, parsed)
    actual = whole_weights(module, mesh)
    differing = unlike(actual, truth.state_dict())
    buffers = persistent_buffers(truth)
    as_computed = {name: weight.bfloat16() for name, weight in truth.state_dict().items()} | buffers
    gathered = dict(each_whole_weight(module, mesh, torch.bfloat16))
    differing += [*unlike(gathered, as_computed), *(gathered.keys() ^ as_computed.keys())]
    trained = whole_weights(module, mesh, only_trainable=True)
    changed = {name: weight.detach() * 3 for name, weight in truth.state_dict().items()}
    load_whole(module, changed if mesh.is_first or not from_rank0 else {"": torch.zeros(1)}, mesh, from_rank0)
    differing += unlike(whole_weights(module, mesh), changed)
    mine = [name for name, parameter in truth.named_parameters() if parameter.requires_grad]
    gathered = dict(each_whole_weight(module, mesh, with_frozen=False))
    differing += [*unlike(gathered, changed), *(gathered.keys() ^ {*mine, *buffers})]
    load_whole(module, {name: changed[name] / 3 for name in mine}, mesh, from_rank0)
    differing += [
        name
        for name, whole_weight in whole_weights(module, mesh).items()
        if not torch.equal(whole_weight, changed[name] / 3 if name in trained else changed[name])
    ]
    return sorted(actual), sorted(trained), differing


BACK = {
    "ddp": (2, "dense", True, False, {"data_parallel_mode": "ddp"}),
    "fsdp1": (2, "sd3", True, True, {"data_parallel_mode": "fsdp1"}),
    "fsdp1 hsdp": (4, "dense", False, False, {"data_parallel_mode": "fsdp1", "data_parallel_replicate_size": 2}),
    "hsdp": (4, "sd3", True, True, {"data_parallel_replicate_size": 2}),
    "fsdp2 x tp": (4, "dense", False, False, {"tensor_parallel_size": 2}),
    "efsdp x ep": (4, "moe", True, True, {"expert_parallel_size": 2}),
}


@pytest.mark.parametrize("mode", BACK)
def test_whole_weights_there_and_back(mode, ranks):
    num_ranks, kind, lora, from_rank0, config = BACK[mode]
    results = ranks.run(num_ranks, functools.partial(there_and_back, kind, lora, from_rank0, **config))
    truth = build(kind, lora)
    names, trained, differing = results[0]
    assert names == sorted(truth.state_dict())
    assert trained == sorted(name for name, parameter in truth.named_parameters() if parameter.requires_grad)
    assert differing == []
    assert results[1:] == [([], [], [])] * (num_ranks - 1)


def start_on_meta(kind: str, **config: Any) -> list[str]:
    mesh, parsed = make_mesh(**config)
    module = cut(build_on_meta(functools.partial(build, kind)), kind, mesh, parsed)
    initialise_on_meta(module, CASES[kind].build, mesh, seed=0)
    differing = unequal(module, build(kind))
    case = CASES[kind]
    with torch.no_grad():
        actual, expected = (case.loss(model, case.row(0), mesh)[0] for model in (module, build(kind)))
    return differing if abs(actual - expected) < 1e-5 * expected else [*differing, f"loss {actual}, not {expected}"]


@pytest.mark.parametrize(("kind", "config"), [("wan", {}), ("moe", {"expert_parallel_size": 2})])
def test_random_weights_do_not_depend_on_the_mesh(kind, config, ranks):
    assert ranks.run(4, functools.partial(start_on_meta, kind, **config)) == [[]] * 4


def draw_in_parts(kind: str, smallest: int, **config: Any) -> list[str]:
    """What differs from one process where weights count as too many to be drawn in sequence."""
    with mock.patch.multiple(random_weights, LARGEST_IN_SEQUENCE=0, SMALL=smallest):
        mesh, parsed = make_mesh(**config)
        module = cut(build_on_meta(functools.partial(make, kind)), kind, mesh, parsed)
        with mock.patch.object(keyed_weights, "PIECE", 97):
            initialise_on_meta(module, functools.partial(make, kind), mesh, seed=7)
        return unequal(module, build_with_random_weights(functools.partial(make, kind), seed=7))


@pytest.mark.parametrize(
    ("kind", "smallest", "config"),
    [
        ("wan", 1000, {}),
        ("moe", 200, {"expert_parallel_size": 2}),
        ("tied", 0, {"tensor_parallel_size": 2}),
    ],
)
def test_weights_that_are_drawn_in_parts_do_not_depend_on_the_mesh(kind, smallest, config, ranks):
    assert ranks.run(4, functools.partial(draw_in_parts, kind, smallest, **config)) == [[]] * 4


def load_beside_adapters(folder: str) -> list[str]:
    from peft import LoraConfig

    mesh, parsed = make_mesh()
    module = build_on_meta(functools.partial(build, "moe"))
    module.requires_grad_(False)
    torch.manual_seed(1)
    targets = list(CASES["moe"].lora_targets)
    with real_stand_ins(module):
        inject_adapter(module, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False), ADAPTER)
    assert all(parameter.is_meta != parameter.requires_grad for parameter in module.parameters())
    module = cut(module, "moe", mesh, parsed)
    load_weights(module, Path(folder), mesh)
    return unequal(module, build("moe", lora=True))


def test_adapters_keep_their_values(folders, ranks):
    assert ranks.run(2, load_beside_adapters, str(folders["moe"])) == [[], []]


def load_by_class_name(folder: str) -> list[str]:
    """Loads a sharded model whose conversion transformers finds by the name of its class."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renaming = [WeightRenaming(r"old_proj", "q_proj")]
    register_checkpoint_conversion_mapping("Qwen3ForCausalLM", renaming, overwrite=True)
    mesh, parsed = make_mesh()
    module = cut(build_on_meta(functools.partial(build, "dense")), "dense", mesh, parsed)
    before = [type(part) for part in module.modules()]
    try:
        load_weights(module, Path(folder), mesh)
    finally:
        register_checkpoint_conversion_mapping("Qwen3ForCausalLM", [], overwrite=True)
    assert [type(part) for part in module.modules()] == before
    return unequal(module, build("dense"))


def test_conversions_of_a_class(tmp_path, ranks):
    tensors = {name.replace("q_proj", "old_proj"): weight for name, weight in build("dense").state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert ranks.run(2, load_by_class_name, str(tmp_path)) == [[], []]


def refusal(folder: str, from_rank0: bool, **config: Any) -> str:
    mesh, parsed = make_mesh(**config)
    module = cut(build("dense"), "dense", mesh, parsed)
    try:
        load_weights(module, Path(folder), mesh, from_rank0)
    except ConfigError as error:
        differing = "" if config else unequal(module, build("dense"))
        return f"{error} {differing or ''}".strip()
    return "loaded"


@pytest.mark.parametrize("from_rank0", [False, True])
def test_a_wrong_folder_is_refused_on_every_rank(from_rank0, folders, tmp_path, ranks):
    (message, *others) = ranks.run(2, refusal, str(folders["tied"]), from_rank0)
    assert message == "weights: the files have no lm_head.weight; is this the folder of another model?"
    assert others == [message]
    (message, *others) = ranks.run(2, refusal, str(tmp_path), from_rank0)
    assert message.startswith(f"weights: {tmp_path} has neither model.safetensors")
    assert others == [message]


def test_fsdp1_is_refused(folders, ranks):
    for message in ranks.run(2, functools.partial(refusal, str(folders["dense"]), False, data_parallel_mode="fsdp1")):
        assert "train.init_device cpu" in message


def pieces() -> list[str]:
    """Cuts whose pieces are not what the DTensor has."""
    mesh, _ = make_mesh(tensor_parallel_size=2)
    both = mesh.device_mesh("fsdp", "tp")
    wrong = []
    for shape in ((1, 3), (7, 6), (5, 9), (8, 8), (3,), (0, 2), (13, 2, 5)):
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
        last = len(shape) - 1
        for placements in (
            [Shard(0), Shard(0)],
            [Shard(0), Shard(last)],
            [Shard(last), Replicate()],
            [Replicate(), Shard(0)],
            [_StridedShard(0, split_factor=2), Shard(0)],
        ):
            like = distribute_tensor(tensor, both, placements, src_data_rank=None)
            piece = shard_of(tensor, like)
            back = DTensor.from_local(piece, both, placements, shape=tensor.shape, stride=tensor.stride())
            if not torch.equal(piece, local_shard(like)) or not torch.equal(back.full_tensor(), tensor):
                wrong.append(f"{shape} {placements}")
            elif torch.Size([sum(stop - start for start, stop in ranges) for ranges in ranges_of(like)]) != piece.shape:
                wrong.append(f"ranges of {shape} {placements}")
    return wrong


def test_pieces_are_those_of_dtensor(ranks):
    assert ranks.run(4, pieces) == [[]] * 4


def pieces_of_fused() -> list[tuple[int, int]]:
    """Fused matrices, cut in blocks over tensor parallelism and then by fsdp2, whose pieces are not understood."""
    mesh, _ = make_mesh(tensor_parallel_size=2)
    wrong = []
    for rows, blocks in ((8, 2), (20, 5), (24, 3), (16, 4)):
        module = nn.Linear(3, rows)
        tensors = {
            name: parameter.detach().copy_(torch.arange(parameter.numel()).view_as(parameter))
            for name, parameter in module.named_parameters()
        }
        for name, tensor in tensors.items():
            cut_in_blocks = [_StridedShard(0, split_factor=blocks)]
            piece = distribute_tensor(tensor, mesh.device_mesh("tp"), cut_in_blocks, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(piece))
        fully_shard(module, mesh=mesh.device_mesh("fsdp"))
        for name, parameter in module.named_parameters():
            result = gather_whole(parameter.detach())
            if not torch.equal(result, tensors[name]) or not torch.equal(
                shard_of(result, parameter), local_shard(parameter.detach())
            ):
                wrong.append((rows, blocks))
    return wrong


def test_pieces_of_fused_matrices(ranks):
    assert ranks.run(4, pieces_of_fused) == [[]] * 4
