"""Two processes against one: the ranks' sums and gradients, and whole runs of the tasks."""

import math
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from sfumato.config.dit import DitTrainConfig
from sfumato.config.load import merge
from sfumato.errors import NonFiniteError
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.parallel.parallelize import broadcast_parameters
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples
from tests.forked import fork_server
from tests.rows import ROUNDING
from tests.tiny import run_task_here, run_task_process, tiny_dit_config, tiny_rl_config, write_config

ALONE = Mesh(Layout(), torch.device("cpu"))
INPUTS = torch.arange(24, dtype=torch.float32).reshape(8, 3).sin()


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 1))
    module[3].requires_grad_(False)
    return module


def backward(module: nn.Module, rows: range) -> None:
    """Gradients of these rows' part of the mean over all rows."""
    if len(rows):
        (module(INPUTS[rows.start : rows.stop]) ** 2).sum().mul(50 / len(INPUTS)).backward()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainable_parameters(module).items()}


def work(rank: int, folder: str) -> None:
    """What each of two ranks does; the results are compared in the tests below."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = build_mesh(DitTrainConfig(output_dir="unused", device="cpu", num_threads=1))
    results = {
        "place": [mesh.rank, mesh.size, mesh.is_first],
        "sum": [mesh.sum(rank + 1.5), mesh.sum(2**40 + rank)],
        "any": [mesh.any(False), mesh.any(rank == 0), mesh.any(rank == 1), mesh.any(True)],
        "gather": mesh.gather({"rank": rank, "names": ["x"] * rank}),
        "sum_dict": mesh.sum_dict({"both": 1.0, "first": 2.0} if rank == 0 else {"both": 10.0, "second": 3.0}),
        "share": list(mesh.range_of_rank(5)),
    }
    mark = Path(folder) / "made by the first rank"
    with mesh.first_rank_first():
        if mesh.is_first:
            time.sleep(0.2)
            mark.touch()
        results["first_rank_first"] = mark.exists()

    module = make()
    backward(module, mesh.range_of_rank(len(INPUTS)))
    results["norm"], results["gradients"] = reduce_and_clip(module, 0.5, mesh, "step 1"), gradients(module)

    module = make()
    backward(module, range(8) if rank == 0 else range(0))
    results["norm_of_one"], results["gradients_of_one"] = (
        reduce_and_clip(module, 0.5, mesh, "step 1"),
        gradients(module),
    )

    module = make()
    backward(module, mesh.range_of_rank(len(INPUTS)))
    if rank == 1:
        module[2].bias.grad[0] = math.nan
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        reduce_and_clip(module, 0.5, mesh, "step 9")
    except NonFiniteError as error:
        results["error"] = str(error)
    results["unchanged"] = all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))
    results["in_step"] = mesh.sum(1)

    module = make(seed=rank)
    broadcast_parameters(module, mesh)
    results["broadcast"] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_server()
    torch.multiprocessing.start_processes(work, args=(str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_mesh_knows_the_ranks(ranks):
    assert [rank["place"] for rank in ranks] == [[0, 2, True], [1, 2, False]]


def test_sums_are_exact_and_equal_on_all_ranks(ranks):
    for rank in ranks:
        assert rank["sum"] == [4.0, 2.0**41 + 1]
        assert rank["sum_dict"] == {"both": 11.0, "first": 2.0, "second": 3.0}
        assert rank["any"] == [False, True, True, True]
        assert rank["gather"] == [{"rank": 0, "names": []}, {"rank": 1, "names": ["x"]}]


def test_one_process_is_the_identity():
    assert ALONE.sum(3) == 3 and ALONE.gather("x") == ["x"] and ALONE.sum_dict({"a": 1.0}) == {"a": 1.0}
    assert ALONE.any(True) and not ALONE.any(False)
    assert list(ALONE.range_of_rank(3)) == [0, 1, 2]
    ALONE.barrier()


def test_shares_are_contiguous_and_even(ranks):
    assert [rank["share"] for rank in ranks] == [[0, 1, 2], [3, 4]]
    for size in (1, 2, 3, 7):
        for count in (0, 1, 2, 6, 7, 20):
            shares = [
                list(Mesh(Layout(dp_shard=size), ALONE.device, rank).range_of_rank(count)) for rank in range(size)
            ]
            assert sum(shares, []) == list(range(count))  # noqa: RUF017
            lengths = [len(share) for share in shares]
            assert max(lengths) - min(lengths) <= 1


def test_the_first_rank_goes_first(ranks):
    assert [rank["first_rank_first"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("suffix", ["", "_of_one"])
def test_gradients_are_summed_over_ranks_and_clipped_once(ranks, suffix):
    module = make()
    backward(module, range(8))
    norm = reduce_and_clip(module, 0.5, ALONE, "step 1")
    assert norm > 0.5
    for rank in ranks:
        assert rank["norm" + suffix] == pytest.approx(norm, rel=1e-6)
        for name, expected in gradients(module).items():
            torch.testing.assert_close(rank["gradients" + suffix][name], expected, rtol=1e-5, atol=1e-7)
            assert torch.equal(rank["gradients" + suffix][name], ranks[0]["gradients" + suffix][name])


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(ranks):
    for rank in ranks:
        assert rank["error"].startswith("step 9: ") and "ranks [1]" in rank["error"]
        assert rank["unchanged"]
        assert rank["in_step"] == 2
    assert "2.bias" in ranks[1]["error"] and "0.weight" not in ranks[1]["error"]
    assert "none on this rank" in ranks[0]["error"]


def test_trained_parameters_are_those_of_the_first_rank(ranks):
    first, second = make(seed=0), make(seed=1)
    for name, value in ranks[1]["broadcast"].items():
        expected = (first if name in trainable_parameters(first) else second).get_parameter(name)
        assert torch.equal(value, expected), name


class Runs:
    """The same run with one process and with two, and the latter resumed in the middle with one."""

    def __init__(self, folder: Path, task: str, config: dict, **double_train) -> None:
        self.single = run_task_here(task, config)
        double = merge(config, {"train": {"output_dir": str(folder / "double"), **double_train}})
        result = run_task_process(task, write_config(double, folder / "double.yaml"), num_processes=2)
        assert result.returncode == 0, result.output
        self.double = result.output_dir
        resumed = Path(shutil.copytree(self.double, folder / "resumed"))
        for step, checkpoint in list_checkpoints(resumed / "checkpoints").items():
            if step > 2:
                shutil.rmtree(checkpoint)
        again = {"output_dir": str(resumed), "load_checkpoint_path": "auto"}
        self.resumed = run_task_here(task, merge(config, {"train": again}))


@pytest.fixture(scope="module")
def dit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dit")
    settings = {"train": {"max_steps": 4, "save_steps": 2, "micro_batch_size": 4}}
    return Runs(folder, "train_dit", tiny_dit_config(folder, **settings), micro_batch_size=2)


@pytest.fixture(scope="module")
def rl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    settings = {"train": {"max_steps": 4, "save_steps": 2}, "eval": {"every_steps": 1}}
    return Runs(folder, "rl_diffusion", tiny_rl_config(folder, **settings))


def assert_close(left: Path, right: Path, tolerance: dict[str, float], later: float = 1e-5) -> None:
    """Compares metrics line by line, or what ``tolerance`` allows a metric absolutely.

    Up to the first step they agree within 1e-5 relative, after it within ``later``: sums over ranks have another order,
    and a last bit in a weight can round a pixel, from which a reward is computed, to the next of its 256 values.
    """
    left_lines, right_lines = read_jsonl(left / "metrics.jsonl"), read_jsonl(right / "metrics.jsonl")
    assert [left_line["step"] for left_line in left_lines] == [right_line["step"] for right_line in right_lines]
    assert left_lines[-1]["step"] == 4
    for left_line, right_line in zip(left_lines, right_lines, strict=True):
        assert left_line.keys() == right_line.keys()
        for name, value in left_line.items():
            relative = 1e-5 if left_line["step"] <= 1 else later
            expected = pytest.approx(right_line[name], rel=relative, abs=tolerance.get(name, 1e-12))
            assert value == expected, f"{name} of step {left_line['step']}"


def largest_difference(left: Path, right: Path) -> float:
    """Between the exported denoisers."""
    name = "hf_ckpt/transformer/diffusion_pytorch_model.safetensors"
    weights, others = load_file(left / name), load_file(right / name)
    assert weights.keys() == others.keys()
    return max(float((weights[weight] - others[weight]).abs().max()) for weight in weights)


@pytest.mark.parametrize("other", ["double", "resumed"])
def test_pretraining_is_the_same_with_two_processes(dit, other):
    assert_close(getattr(dit, other), dit.single, {})
    assert largest_difference(getattr(dit, other), dit.single) < 1e-5  # a hundredth of the learning rate


@pytest.mark.slow
@pytest.mark.parametrize("other", ["double", "resumed"])
def test_rl_is_the_same_with_two_processes(rl, other):
    tolerance = {"loss/policy": 1e-5, "ratio/approx_kl": 1e-9, "ratio/replay_error": 1e-5}
    # two processes have fewer rows in a batch, which some CPUs round otherwise
    names = read_jsonl(rl.single / "metrics.jsonl")[-1]
    tolerance |= {name: max(ROUNDING, 1e-12) for name in names if name.startswith("mismatch/")}
    assert_close(getattr(rl, other), rl.single, tolerance, later=1e-2)
    assert largest_difference(getattr(rl, other), rl.single) < 1e-4


@pytest.mark.slow
def test_the_first_iteration_has_the_same_rewards_and_advantages(rl):
    single, double = (read_samples(run)[1] for run in (rl.single, rl.double))
    assert sum(entry["kind"] == "train" for entry in single) == 8
    ratios = [[entry.pop("log_ratio", None) for entry in entries] for entries in (single, double)]
    assert single == double
    for left, right in zip(*ratios, strict=True):  # measured after an update, whose sums over ranks have another order
        assert left == pytest.approx(right, abs=1e-6)
