"""Predicted pieces of weights, gradients and optimiser state against those of real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.config.load import load_config
from sfumato.config.sections import TrainConfig
from sfumato.models.estimate.memory_plan import Planned, plan_memory
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.pipeline import build_pipeline
from sfumato.parallel.plan import language_plan
from sfumato.parallel.shards import local_shard, trainable_parameters
from sfumato.parallel.weights import build_on_meta
from tests.dist.cases import dense, moe

LAYOUTS = {
    "ddp": (dense, {"data_parallel_mode": "ddp"}),
    "fsdp1": (dense, {"data_parallel_mode": "fsdp1"}),
    "fsdp2": (dense, {}),
    "hsdp": (dense, {"data_parallel_replicate_size": 2}),
    "tp x fsdp2": (dense, {"tensor_parallel_size": 2}),
    "ulysses x fsdp2": (dense, {"ulysses_parallel_size": 2}),
    "pp x fsdp2": (dense, {"pipeline_parallel_size": 2}),
    "ep x fsdp2": (moe, {"expert_parallel_size": 2}),
    "muon": (moe, {"optimizer": "muon"}),
}


def section(folder: str, settings: dict[str, Any]) -> TrainConfig:
    return load_config(TrainConfig, overrides={"output_dir": folder, **settings})


def real_bytes(build: Any, folder: str, settings: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of weights and buffers, of gradients, and of optimiser state of this rank."""
    config, module = section(folder, settings), build()
    mesh = Mesh(Layout.resolve(config, 4), torch.device("cpu"), torch.distributed.get_rank())
    plan = language_plan(module)
    if mesh.layout.pp > 1:
        module = build_pipeline(module, mesh, config, plan).module
    else:
        module = parallelize(module, mesh, config, plan)
    weights = sum(local_shard(parameter).nbytes for parameter in (*module.parameters(), *module.buffers()))
    for parameter in trainable_parameters(module).values():
        parameter.grad = torch.zeros_like(parameter)
    gradients = sum(local_shard(parameter.grad).nbytes for parameter in trainable_parameters(module).values())
    optimizer, _ = build_optimizer(module, config, 1, mesh)
    optimizer.step()
    state = [local_shard(value) for values in optimizer.state.values() for value in values.values()]
    return weights, gradients, sum(tensor.nbytes for tensor in state if torch.is_tensor(tensor))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_rank_of_each_stage_has_what_is_predicted(ranks: Any, tmp_path: Path, name: str) -> None:
    build, settings = LAYOUTS[name]
    result = ranks.run(4, real_bytes, build, str(tmp_path), settings)
    planned = Planned(
        build=lambda: build_on_meta(build),
        plan=language_plan(build()),
        dtype=None,
        run=lambda module: module(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False),
        loss_bytes=0,
        num_micro_batches=4,
    )
    stages = plan_memory(planned, section(str(tmp_path), settings), 4)
    for stage, memory in enumerate(stages):
        weights, gradients, state = result[stage * 4 // len(stages)]
        predicted = [memory.parts[name] for name in ("weights", "gradients", "optimiser state")]
        assert predicted == pytest.approx([weights, gradients, state], rel=0.001 if name == "fsdp1" else 0, abs=200)
        assert memory.parts["weights"] >= max(rank_bytes[0] for rank_bytes in result) * (name != "pp x fsdp2")
