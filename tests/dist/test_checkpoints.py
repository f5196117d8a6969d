"""A checkpoint of one parallelism goes on in another: the same bits after loading, the same training after that."""

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.lr_scheduler import LambdaLR

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import merge
from sfumato.config.sections import TrainConfig
from sfumato.errors import CheckpointError
from sfumato.optim.ema import Ema
from sfumato.parallel.balance import ExpertBalancer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.pipeline import Pipeline, build_pipeline
from sfumato.parallel.shards import Shards, local_shard, trainable_parameters
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from sfumato.tracking.run import Run
from tests.dist.cases import CASES, ROWS, adamw, build, count_all, make_mesh, summed_loss
from tests.dist.matrix import MODES
from tests.dist.test_tasks import run_rank
from tests.tiny import Position, tiny_dit_config, tiny_text_config, weights_in

TOLERANCE = 1e-5
SAVED_AT = 2
RATE = 1e-6
"""Of the biases of experts: too small to change a choice, since pipelines count the tokens of padding too."""


Wholes = dict[str, np.ndarray]
"""Tensors by name, as arrays: a test process would keep a file open for each torch tensor that a rank sends it."""


def assert_same_bits(left: Wholes, right: Wholes) -> None:
    assert left.keys() == right.keys()
    for key, value in right.items():
        assert (left[key].dtype, left[key].shape) == (value.dtype, value.shape), key
        assert left[key].tobytes() == value.tobytes(), key


@dataclass
class Job:
    """A tiny model in training."""

    kind: str
    mesh: Mesh
    module: nn.Module
    pipeline: Pipeline | None
    state: TrainState

    def step(self) -> tuple[float, float]:
        """One training step. Returns loss and gradient norm."""
        case, mesh, state = CASES[self.kind], self.mesh, self.state
        rows = [case.row(state.step * ROWS + index) for index in mesh.range_of_rank(ROWS)]
        num = count_all(case, rows, mesh)
        if self.pipeline is not None:
            losses = self.pipeline.train_step(rows, functools.partial(summed_loss, num=num))
            loss = mesh.sum(sum(losses), over="loss")
        else:
            losses = []
            for row in accumulate(self.module, rows):
                one, _ = case.loss(self.module, row, mesh)
                (one / num).backward()
                losses.append(float(one.detach()))
            loss = mesh.sum(sum(losses), over=case.counts_over) / num
        norm = reduce_and_clip(self.module, 1.0, mesh, f"step {state.step + 1}")
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()
        state.ema.update()
        if state.balancer is not None:
            state.balancer.update()
        state.step += 1
        state.loader.values["rows"] = state.step * ROWS
        return loss, norm

    def wholes(self) -> Wholes:
        """All tensors of the state, whole, gathered without the code that is tested."""
        shards, state = Shards(self.module, self.mesh), self.state
        results = {}
        for name, parameter in shards.parameters.items():
            results[f"model/{name}"] = shards.whole(name, local_shard(parameter.detach()))
            results[f"ema/{name}"] = shards.whole(name, state.ema.averages[name])
            for key, value in state.optimizer.state.get(parameter, {}).items():
                results[f"optimizer/{name}/{key}"] = (
                    value if value.ndim == 0 else shards.whole(name, local_shard(value))
                )
        if state.balancer is not None:
            results |= {f"balancer/{name}": weight for name, weight in state.balancer.state_dict().items()}
        stages = self.mesh.gather({key: value.numpy().copy() for key, value in results.items()}, over="pp")
        return {key: value for stage in stages for key, value in stage.items()}


@dataclass
class Outcome:
    """What came of a job on one rank."""

    loaded: Wholes
    numbers: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    trained: Wholes = field(default_factory=dict)


def start(kind: str, lora: bool = False, **config: Any) -> Job:
    """A job on this process's mesh, from the initial weights."""
    mesh, parsed = make_mesh(**config)
    module = build(kind, lora)
    module.train()
    plan = CASES[kind].plan(module)
    balances = kind == "moe" and not lora
    balancer, pipeline = None, None
    if balances and parsed.data_parallel_mode == "fsdp1":
        balancer = ExpertBalancer(module, mesh, RATE)
    if mesh.layout.pp > 1:
        pipeline = build_pipeline(module, mesh, parsed, plan)
        module = pipeline.module
    else:
        module = parallelize(module, mesh, parsed, plan)
    if balances and balancer is None:
        balancer = ExpertBalancer(module, mesh, RATE)
    optimizer = adamw(trainable_parameters(module).values())
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    state = TrainState(module, optimizer, schedule, Ema(module, 0.9), loader=Position(), balancer=balancer)
    return Job(kind, mesh, module, pipeline, state)


def save(root: Path, kind: str, lora: bool, config: dict[str, Any]) -> Wholes:
    """Trains for some steps and saves. Returns what was saved."""
    job = start(kind, lora, **config)
    for _ in range(SAVED_AT):
        job.step()
    saving = Saving(root, job.state, job.mesh)
    saving.write()
    saving.finish(keep=1)
    return job.wholes()


def load(root: Path, kind: str, lora: bool, config: dict[str, Any]) -> Outcome:
    """Loads what another job has saved, and trains for a step."""
    job = start(kind, lora, **config)
    job.step()  # what loading must replace
    folder = root / f"global_step_{SAVED_AT}"
    verify_checkpoint(folder)
    load_state(job.state, StoredCheckpoint(folder), job.mesh)
    outcome = Outcome(job.wholes())
    state = job.state
    outcome.numbers = [state.step, state.loader.state(), state.ema.num_updates, state.schedule.last_epoch]
    loss, norm = job.step()
    outcome.losses, outcome.norms, outcome.trained = [loss], [norm], job.wholes()
    return outcome


@functools.cache
def truth(kind: str, lora: bool) -> Outcome:
    """The undisturbed run, in one plain process."""
    job = start(kind, lora)
    outcome = Outcome({})
    for _ in range(SAVED_AT + 1):
        loss, norm = job.step()
    outcome.losses, outcome.norms, outcome.trained = [loss], [norm], job.wholes()
    return outcome


ALONE = "one process"


def run_mode(ranks, mode: str, function, *args):
    """Runs a job as a mode says. Returns what came of it on every rank."""
    if mode == ALONE:
        return [function(*args, {})]
    return ranks.run(MODES[mode].ranks, function, *args, MODES[mode].config)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Checkpoints by kind of model, adapters and mode, each made once."""

    @functools.cache
    def make(kind: str, lora: bool, mode: str) -> tuple[Path, Wholes]:
        root = tmp_path_factory.mktemp("checkpoints")
        return root, run_mode(ranks, mode, save, root, kind, lora)[0]

    return make


QUICK = [
    ("dense", False, "fsdp2", ALONE),
    ("dense", False, "fsdp1", "fsdp2 x tp"),
    ("dense", False, ALONE, "pp, interleaved 1f1b"),
    ("moe", False, "fsdp2 x ep", ALONE),
]
"""Kind of model, adapters, the mode that saves and the mode that loads."""

FURTHER = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("dense", False, "fsdp2", "ulysses x ring"),
        ("dense", False, "tp x pp", "hsdp"),
        ("moe", False, "pp x fsdp2", "ep"),
        ("dense", False, "fsdp2 x tp", "fsdp1"),
        ("dense", True, "fsdp2 x tp", "ddp"),
        ("moe", False, ALONE, "fsdp2 x ulysses x ep"),
        ("moe", False, "fsdp2 x ep", "fsdp2 x tp"),
        ("flux", False, "fsdp1", "fsdp2 x tp"),
        ("flux", False, "fsdp2 x tp", "fsdp1"),  # matrices and biases of fused layers, cut in blocks
    )
]

FROM_AND_TO_ONE = [
    pytest.param(kind, lora, *pair, marks=pytest.mark.slow)
    for kind, lora in (("dense", False), ("moe", False), ("flux", False), ("moe", True))
    for mode in MODES
    if kind not in MODES[mode].refused
    for pair in ((mode, ALONE), (ALONE, mode))
    if (kind, lora, *pair) not in QUICK
]


@pytest.mark.parametrize(("kind", "lora", "before", "after"), [*QUICK, *FURTHER, *FROM_AND_TO_ONE])
def test_training_goes_on_in_another_parallelism(kind, lora, before, after, ranks, saved):
    root, expected = saved(kind, lora, before)
    undisturbed = truth(kind, lora)
    assert {key.split("/")[0] for key in expected} >= {"model", "optimizer", "ema"}
    for outcome in run_mode(ranks, after, load, root, kind, lora):
        assert_same_bits(outcome.loaded, expected)
        assert outcome.numbers == [SAVED_AT, {"rows": SAVED_AT * ROWS}, SAVED_AT, SAVED_AT]
        assert outcome.losses == pytest.approx(undisturbed.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(undisturbed.norms, rel=TOLERANCE)
        assert outcome.trained.keys() == undisturbed.trained.keys()
        padded = any(mode.startswith(("pp", "tp x pp")) for mode in (before, after))
        for key, value in undisturbed.trained.items():
            if padded and key.startswith("balancer/"):
                continue
            difference = np.linalg.norm(outcome.trained[key] - value)
            assert difference <= 10 * TOLERANCE * max(np.linalg.norm(value), 1e-6), key


def test_each_rank_writes_its_part_and_replicas_share_the_work(saved):
    for mode in ("fsdp2", "fsdp2 x tp"):
        root, tensors = saved("dense", False, mode)
        sizes = [path.stat().st_size for path in sorted(root.rglob("*.distcp"))]
        assert len(sizes) == 4
        assert max(sizes) < 0.4 * sum(sizes)
        assert sum(sizes) < 3 * sum(tensor.nbytes for tensor in tensors.values()), (
            "tiny tensors, each with torch's header"
        )


def load_other(root: Path, kind: str) -> str:
    job = start(kind)
    before = job.wholes()
    with pytest.raises(CheckpointError) as error:
        load_state(job.state, StoredCheckpoint(root / f"global_step_{SAVED_AT}"), job.mesh)
    assert_same_bits(job.wholes(), before)
    return str(error.value)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(saved, ranks):
    root, _ = saved("moe", False, "fsdp2 x ep")
    messages = ranks.run(2, load_other, root, "dense")
    assert len(set(messages)) == 1
    assert "has one expert bias (train.expert_bias_rate), but this configuration wants none" in messages[0]
    root, _ = saved("dense", False, "fsdp2")
    messages = ranks.run(2, load_other, root, "flux")
    assert len(set(messages)) == 1
    assert "(a Qwen3ForCausalLM, here a FluxTransformer2DModel): it has no 'ema/context_embedder.bias'" in messages[0]


def checkpointer_of(root: Path, job: Job, **settings: Any) -> Checkpointer:
    config = TrainConfig(output_dir=str(root), max_steps=100, save_steps=1, **settings)
    return Checkpointer(config, Run(root, "test", job.mesh), job.mesh, 100)


def save_beside_training(root: Path, save_async: bool) -> list[list[int]]:
    """Steps and saves on a disk that is slow for one rank and full for the other, once. Returns checkpoints seen."""
    job = start("dense")
    checkpointer = checkpointer_of(root, job, save_async=save_async)
    write = FileSystemWriter.write_data
    seen = []

    def fail_once(writer, plan, planner):
        if job.mesh.rank == 1:
            time.sleep(0.3)
            if "global_step_2." in str(writer.path):
                raise OSError(28, "No space left on device")
        return write(writer, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", fail_once):
        for _ in range(4):
            job.step()
            checkpointer.after_step(job.state)
        checkpointer.save(job.state)
    seen.append([*list_checkpoints(checkpointer.root)])
    resumed = start("dense")
    checkpointer_of(root, resumed, load_checkpoint_path="auto").resume(resumed.state)
    assert_same_bits(resumed.wholes(), job.wholes())
    return seen


@pytest.mark.parametrize("save_async", [False, True])
def test_ranks_agree_on_what_was_saved(save_async, ranks, tmp_path):
    seen = ranks.run(2, save_beside_training, tmp_path, save_async)
    assert seen == [[[1, 3, 4]]] * 2
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "checkpoint of step 2 could not be written: rank 1: [Errno 28] No space left on device" in said
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def resume_past_damage(root: Path) -> int:
    job = start("dense")
    checkpointer_of(root, job, load_checkpoint_path="auto").resume(job.state)
    return job.state.step


def make_two(root: Path) -> None:
    job = start("dense")
    checkpointer = checkpointer_of(root, job)
    for _ in range(2):
        job.step()
        checkpointer.after_step(job.state)


def test_a_damaged_file_of_any_rank_is_passed_over_by_all(ranks, tmp_path):
    ranks.run(4, make_two, tmp_path)
    path = tmp_path / "checkpoints" / "global_step_2" / "__2_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert ranks.run(2, resume_past_damage, tmp_path) == [1, 1]
    assert f"checkpoint passed over: {path} is damaged" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("task", "config", "num_ranks", "settings"),
    [
        ("train_dit", tiny_dit_config, 4, {"train": {"tensor_parallel_size": 2, "ema_decay": 0.9}}),
        ("train_text", tiny_text_config, 2, {"train": {"pipeline_parallel_size": 2}}),
        ("train_text", tiny_text_config, 2, {"model": {"lora": {"rank": 4}}, "train": {"data_parallel_mode": "fsdp1"}}),
    ],
    ids=["fsdp2 x tp", "pp", "adapters, fsdp1"],
)
def test_one_process_exports_what_several_saved(task, config, num_ranks, settings, ranks, tmp_path):
    config = merge(config(tmp_path), merge(settings, {"train": {"micro_batch_size": 1}}))
    ranks.run(num_ranks, run_rank, task, config)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert weights_in(tmp_path / "out") == weights_in(tmp_path / "run" / "hf_ckpt")
