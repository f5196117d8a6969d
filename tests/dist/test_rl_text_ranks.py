"""Reinforcement learning of language models on several ranks, against the same task in one process."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sfumato.config.load import merge
from sfumato.data.text.prompts import TextPrompt
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import EngineError, Sampling
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.oversampling.first_finished import AnswerKey, FirstFinished
from sfumato.rollout.oversampling.unfinished import Group
from sfumato.rollout.text.tokens import GrowingSequence
from sfumato.tracking.json_lines import read_jsonl
from tests.dist.ranks import RankPool
from tests.dist.test_tasks import LAST_BITS, PLAIN, STEPS, assert_equal_runs, run_rank
from tests.dist.test_text_tasks import NO_CUTS
from tests.many_ends import partial_config
from tests.plain_engine import tiny_model
from tests.tiny import run_task_here, run_task_process, tiny_text_config, tiny_text_rl_config, write_config

MESHES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "ddp": (2, "qwen3", {"data_parallel_mode": "ddp"}, {}),
    "fsdp2, tokens a micro-batch, returns": (
        2,
        "qwen3",
        {"max_tokens_per_micro_batch": 96, "ema_decay": 0.5},
        {"algorithm": {"recipe": "reinforce_pp"}},
    ),
    "ulysses, gspo": (
        2,
        "qwen3",
        {"ulysses_parallel_size": 2},
        {"algorithm": {"recipe": "gspo", "objective": {"gradient": "sequence"}}},
    ),
    "ddp, KL before the baseline": (
        2,
        "qwen3",
        {"data_parallel_mode": "ddp"},
        {
            "algorithm": {
                "recipe": "rloo",
                "kl": {"coef": 0.5, "estimator": "k1", "where": "reward"},
                "advantage": {"std": "global"},  # over the answers of all ranks
                "drop_no_spread": False,
            }
        },
    ),
    "tp": (2, "qwen3", {"tensor_parallel_size": 2}, {}),
    "fsdp2 x ep": (4, "qwen3_moe", {"expert_parallel_size": 2}, {}),
    "fsdp2, adapters": (2, "qwen3", {}, {"model": {"lora": {"rank": 4}}}),
    "fsdp2 x ring, chunked loss": (4, "qwen3", {"context_parallel_size": 2, "chunked_loss": True}, {}),
}
FAST = ("ulysses, gspo",)

ROUNDING = {"mismatch/log_ratio_max": 1e-5, "mismatch/kl_k1": 1e-6}
"""What is the rounding of kernels alone."""


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh in FAST else pytest.mark.slow) for mesh in MESHES]
)
def test_a_mesh_equals_one_process(mesh: str, ranks: RankPool, tmp_path: Path) -> None:
    num_ranks, kind, train, settings = MESHES[mesh]
    train = {"max_steps": STEPS, "eps": 1e-4, "global_batch_size": 8, **train}
    config = merge(tiny_text_rl_config(tmp_path, kind, train=train), settings)
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "rl_text"), merge(config, many))
    run_task_here("rl_text", merge(merge(config, {"train": NO_CUTS | PLAIN}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, LAST_BITS | ROUNDING)


@pytest.mark.slow
def test_ranks_share_the_rollouts_that_one_process_has_dumped(ranks: RankPool, tmp_path: Path) -> None:
    train = {"max_steps": STEPS, "eps": 1e-4, "global_batch_size": 8, "data_parallel_mode": "ddp"}
    config = tiny_text_rl_config(tmp_path, rollout={"rollout_only": True}, train=train)
    drawn, many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("drawn", "many", "one"))
    run_task_here("rl_text", merge(config, drawn))
    config["rollout"] |= {"rollout_only": False, "load_dump": str(tmp_path / "drawn")}
    ranks.run(2, functools.partial(run_rank, "rl_text"), merge(config, many))
    run_task_here("rl_text", merge(merge(config, {"train": NO_CUTS | PLAIN}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, LAST_BITS | ROUNDING)


PARTIAL_MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel_mode": "ddp"}),
    "fsdp2": (2, {}),
    "ddp x tp": (4, {"data_parallel_mode": "ddp", "tensor_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh_name, marks=() if mesh_name == "ddp" else pytest.mark.slow) for mesh_name in PARTIAL_MESHES],
)
def test_ranks_share_answers_that_are_under_way(mesh: str, ranks: RankPool, tmp_path: Path) -> None:
    """They take the groups of one process, and what they have saved one process goes on with."""
    num_ranks, train = PARTIAL_MESHES[mesh]
    few = {"engine": {"type": "embedded", "max_batch_size": 10}}  # so that some wait, and others run ahead
    train = {"max_steps": STEPS, "eps": 1e-4, "global_batch_size": 8, "save_steps": 1, **train}
    config = partial_config(tmp_path, train=train, rollout=few)
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "rl_text"), merge(config, many))
    plain = merge(config, {"train": NO_CUTS | PLAIN, "rollout": {"engine": "embedded"}})
    run_task_here("rl_text", merge(plain, one))
    lines = read_jsonl(tmp_path / "one" / "metrics.jsonl")[1:]
    assert max(line["staleness/max"] for line in lines) > 0 and all(line["rollout/kept_groups"] == 3 for line in lines)
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, LAST_BITS | ROUNDING)
    middle = min((tmp_path / "many" / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name[12:]))
    going_on = {"train": {"output_dir": str(tmp_path / "many"), "load_checkpoint_path": str(middle)}}
    resumed = run_task_here("rl_text", merge(plain, going_on))
    assert_equal_runs(tmp_path / "one", resumed, 1e-5, LAST_BITS | ROUNDING)


def race_that_fails_on_a_rank() -> tuple[str, str]:
    """What each of two ranks hears when the engine of one fails while the other is in the middle of its answers."""
    mesh = Mesh(Layout(dp_replicate=2), torch.device("cpu"), dist.get_rank())
    engine = EmbeddedEngine(tiny_model(), max_length=250)
    step, steps = engine._step, iter(range(5))
    if mesh.rank == 1:
        engine._step = lambda: step() if next(steps, None) is not None else 1 / 0
    race = FirstFinished(engine, Sampling(), 1, [Group(mesh.rank, 0, [GrowingSequence()])], mesh)
    key = AnswerKey(TextPrompt((5, 6, 7), "", None), 1, 240)
    try:
        asyncio.run(race.run([[key]]))
    except EngineError as error:
        assert not engine._num_open  # nothing is drawn any more
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_hear_that_drawing_has_failed_on_one(ranks: RankPool) -> None:
    other, failed = ranks.run(2, race_that_fails_on_a_rank)
    assert failed[0] == "EngineError" and "ZeroDivision" in failed[1]
    assert other == ("OtherRankError", f"rank 1: {failed[1]}")


def given_and_received() -> list[Any]:
    mesh = Mesh(Layout(dp_replicate=3), torch.device("cpu"), dist.get_rank())
    return mesh.exchange([[f"{mesh.rank} to {to}"] * (to + mesh.rank) for to in range(3)])


def test_ranks_exchange_values_of_any_size(ranks: RankPool) -> None:
    expected = [[[f"{index} to {to}"] * (to + index) for index in range(3)] for to in range(3)]
    assert ranks.run(3, given_and_received) == expected


def config_with_maker(tmp_path: Path) -> dict[str, Any]:
    """A run of one iteration whose model is made first, by one step of pretraining."""
    maker = tiny_text_config(tmp_path / "maker", train={"max_steps": 1})
    config = tiny_text_rl_config(tmp_path, train={"max_steps": 1})
    made = Path(maker["train"]["output_dir"]) / "hf_ckpt"
    config["model"] = {"model_path": str(made), "made_by": str(write_config(maker, tmp_path / "maker.yaml"))}
    return config


@pytest.mark.slow
def test_ranks_make_a_model_that_is_missing(tmp_path: Path) -> None:
    path = write_config(config_with_maker(tmp_path), tmp_path / "run.yaml")
    done = run_task_process("rl_text", path, num_processes=2, timeout_s=500)
    assert done.returncode == 0, done.output
    assert [line["step"] for line in done.metrics()] == [0, 1]
    assert (tmp_path / "maker/run/hf_ckpt/model.safetensors").is_file()
