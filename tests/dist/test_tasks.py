"""Whole tasks on several ranks, chosen by configuration only, against the same task in one process."""

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from sfumato.config.load import merge
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run
from tests.tiny import rl_task, run_task_here, tiny_dit_config, tiny_dit_dpo_config, tiny_rl_config, write_tiny_pipeline
from tests.tiny_families import tiny_flux_kontext

STEPS = 4
PLAIN = {
    "init_device": "cpu",
    "broadcast_model_weights_from_rank0": False,
    "data_parallel_mode": "fsdp2",
    "activation_checkpointing": "none",
    "data_parallel_replicate_size": 1,
    "ulysses_parallel_size": 1,
    "context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "cfg_parallel_size": 1,
}
"""What one process runs with."""
DIT = {
    "fsdp1": (2, {"data_parallel_mode": "fsdp1", "ema_decay": 0.9}),
    "fsdp2": (2, {"ema_decay": 0.9, "enable_reshard_after_forward": False}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
    "ulysses": (2, {"ulysses_parallel_size": 2}),
    "fsdp2 x ring": (4, {"context_parallel_size": 2}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "meta": (2, {"init_device": "meta"}),
    "meta from rank 0": (2, {"init_device": "meta", "broadcast_model_weights_from_rank0": True}),
    "offload": (2, {"init_device": "meta", "enable_fsdp_offload": True}),
    "recompute": (2, {"activation_checkpointing": "full"}),
    "dropout": (2, {}, {"model": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}}),
}
DPO = {
    "fsdp2 with a reference": (2, {}, {}),
    "fsdp2 with adapters": (2, {}, {"model": {"lora": {"rank": 4, "alpha": 8}}}),
    "meta": (2, {"init_device": "meta"}, {}),
    "ulysses": (2, {"ulysses_parallel_size": 2}, {}),
    "tp with adapters": (2, {"tensor_parallel_size": 2}, {"model": {"lora": {"rank": 4, "alpha": 8}}}),
    "dropout": (2, {}, {"model": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}}),
}
"""Preference training from pairs; all but the first two are close to others and left to the slow tests."""
COARSE = {"reward": {"rewards": [{"type": "tests.dist.rewards:CoarseBrightness"}]}}
NFT = {"recipe": "diffusion_nft", "old": {"type": "constant", "value": 0.5}, "timesteps": {"num": 2}}
RL = {
    "fsdp2 with a reference": (2, {}, {"algorithm": {"kl": {"type": "flow_grpo", "coef": 0.04}}}),
    "fsdp2 with adapters and a reference": (
        2,
        {},
        {"algorithm": {"kl": {"type": "gaussian", "coef": 0.04}}, "model": {"lora": {"rank": 4, "alpha": 8}}},
    ),
    "meta with adapters": (2, {"init_device": "meta"}, {"model": {"lora": {"rank": 4, "alpha": 8}}}),
    "fsdp1 with adapters": (2, {"data_parallel_mode": "fsdp1"}, {"model": {"lora": {"rank": 4, "alpha": 8}}}),
    "cfg": (2, {"cfg_parallel_size": 2}, {"rollout": {"guidance_scale": 3.0}}),
    "ulysses": (2, {"ulysses_parallel_size": 2}, {}),
    "fsdp2 with an old policy and adapters": (2, {}, {"algorithm": NFT, "model": {"lora": {"rank": 4, "alpha": 8}}}),
    "fsdp2 with an old policy": (2, {"init_device": "meta"}, {"algorithm": NFT}),
    "fsdp1 with an old policy": (2, {"data_parallel_mode": "fsdp1", "micro_batch_size": 2}, {"algorithm": NFT}),
    "fsdp1 with an average": (2, {"data_parallel_mode": "fsdp1", "ema_decay": 0.9}, {}),
    "fsdp2 with whole groups": (2, {}, {"algorithm": {"recipe": "flow_dpo", "reference": {"every": 2}}}),
    "uneven ddp": (2, {"data_parallel_mode": "ddp"}, {"rollout": {"num_prompts": 3}, "eval": {"num_prompts": 2}}),
}


def run_rank(task: str, config: dict[str, Any]) -> None:
    """One rank of a task, in the group that the pool has made."""
    import torch.distributed as dist

    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # what a launcher says too; the group is there already
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        with mock.patch.object(Run, "write_report"):
            run_task_here(task, config)
    finally:
        for name in place:
            del os.environ[name]


def weights(output_dir: Path) -> dict[str, Any]:
    results = {}
    for path in sorted((output_dir / "hf_ckpt").rglob("*.safetensors")):
        if "vae" not in str(path) and "text_encoder" not in str(path):
            results |= load_file(path)
    assert results
    return results


def assert_equal_runs(path: Path, many: Path, relative: float, absolute: dict[str, float]) -> None:
    """Metrics of every step, and what was exported."""
    lines, others = read_jsonl(path / "metrics.jsonl"), read_jsonl(many / "metrics.jsonl")
    assert [line["step"] for line in lines] == [other["step"] for other in others]
    assert lines[-1]["step"] == STEPS
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            wanted = pytest.approx(value, rel=relative, abs=absolute.get(name, 1e-12))
            assert other[name] == wanted, f"{name} of step {line['step']}"
    left, right = weights(path), weights(many)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert float((right[name] - tensor).float().norm()) <= relative * float(tensor.float().norm()) + 1e-6, name


LAST_BITS = {
    "loss/policy": 1e-5,
    "ratio/approx_kl": 1e-8,
    "ratio/replay_error": 2e-5,
    "kl/reference": 1e-7,
    "mismatch/kl_k1": 1e-8,
    "mismatch/kl_k3": 1e-8,
    "mismatch/log_ratio_max": 2e-5,
    "diversity/pixels": 1e-5,
    "dpo/margin": 5e-5,  # 100 times a difference of flow-matching errors near 1: roundings of 1e-7 are 1e-5 here
}
"""What is 0 but for the order of sums, on which log-probabilities of a step depend."""

CLOSE_TO_OTHERS = {
    "hsdp",
    "offload",
    "recompute",
    "fsdp1 with adapters",
    "fsdp1 with an average",
    "fsdp1 with an old policy",
    "fsdp2 with an old policy and adapters",
    "fsdp2 with whole groups",
    "meta with adapters",
    "fsdp2 with adapters",
    "fsdp2 with adapters and a reference",
    "fsdp2 x ring",
    "meta from rank 0",
    "fsdp1",
    "ulysses",
    "fsdp2 with an old policy",
}
"""Left to the slow tests."""


def marked(modes: Iterable[str]) -> list[Any]:
    return [pytest.param(mode, marks=pytest.mark.slow if mode in CLOSE_TO_OTHERS else ()) for mode in modes]


@pytest.mark.parametrize("mode", marked(DIT))
def test_pretraining(mode, ranks, tmp_path):
    num_ranks, train, *settings = DIT[mode]
    config = tiny_dit_config(tmp_path, train={"max_steps": STEPS, "save_steps": 2, "micro_batch_size": 1, **train})
    config = merge(config, *settings) if settings else config
    ranks.run(num_ranks, functools.partial(run_rank, "train_dit"), merge(config, _in(tmp_path / "many")))
    plain = {"train": PLAIN}
    one = run_task_here("train_dit", merge(merge(config, plain), _in(tmp_path / "one")))
    assert_equal_runs(one, tmp_path / "many", 1e-5, {})
    # what several ranks saved, one goes on with
    resume = {"train": {"output_dir": str(tmp_path / "many"), "load_checkpoint_path": _first(tmp_path / "many")}}
    resumed = run_task_here("train_dit", merge(merge(config, plain), resume))
    assert_equal_runs(one, resumed, 1e-5, {})


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if n < 2 else pytest.mark.slow) for n, mode in enumerate(DPO)]
)
def test_preferences(mode, ranks, tmp_path):
    num_ranks, train, settings = DPO[mode]
    config = tiny_dit_dpo_config(tmp_path, train={"max_steps": STEPS, "micro_batch_size": 1, **train})
    config = merge(config, {"eval": {"every_steps": 2, "num_rows": 3}, "dpo": {"beta": 10.0}})
    config = merge(config, settings)
    ranks.run(num_ranks, functools.partial(run_rank, "train_dit_dpo"), merge(config, _in(tmp_path / "many")))
    one = run_task_here("train_dit_dpo", merge(merge(config, {"train": PLAIN}), _in(tmp_path / "one")))
    rewards = [
        f"{kind}/{name}" for kind in ("pairs", "eval") for name in ("margin", "reward_chosen", "reward_rejected")
    ]
    assert_equal_runs(one, tmp_path / "many", 1e-5, dict.fromkeys(rewards, 1e-5))


@pytest.mark.parametrize("mode", marked(RL))
def test_rl(mode, ranks, tmp_path):
    num_ranks, train, settings = RL[mode]
    config = tiny_rl_config(tmp_path, train={"max_steps": STEPS, **train}, eval={"every_steps": 2}) | COARSE
    if "recipe" in settings.get("algorithm", {}):
        del config["algorithm"]
    config = merge(config, settings)
    if mode == "uneven ddp":
        config = merge(config, {"train": {"global_batch_size": 6}})
    task = rl_task(config["algorithm"]["recipe"])
    ranks.run(num_ranks, functools.partial(run_rank, task), merge(config, _in(tmp_path / "many")))
    one = run_task_here(task, merge(merge(config, {"train": PLAIN}), _in(tmp_path / "one")))
    assert_equal_runs(one, tmp_path / "many", 1e-5, LAST_BITS)


BUCKETS = {
    "train_dit": {"data_parallel_mode": "fsdp2", "micro_batch_size": 2},
    "train_dit_dpo": {"data_parallel_mode": "ddp", "micro_batch_size": 2},
    "train_dit ulysses": {"ulysses_parallel_size": 2, "micro_batch_size": 2},
}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if n else ()) for n, mode in enumerate(BUCKETS)]
)
def test_buckets(mode, ranks, tmp_path):
    task, rows = mode.split()[0], []
    for index in range(13):
        size = [(20, 21), (16, 30), (40, 22)][index % 7 % 3]
        names = {"image": f"{index}.png", "chosen": f"{index}.png", "rejected": f"{index + 1}.png"}
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (*size, 3), np.uint8)).save(
            tmp_path / names["image"]
        )
        rows.append({**names, "text": f"no {index}", "prompt": f"no {index}"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:-1])))
    make = tiny_dit_dpo_config if task == "train_dit_dpo" else tiny_dit_config
    config = make(tmp_path, train={"max_steps": STEPS, "global_batch_size": 8, **BUCKETS[mode]})
    config["data"] = {"train_path": str(tmp_path / "rows.jsonl"), "height": 16, "width": 16, "buckets": 8}
    if task == "train_dit_dpo":
        config["data"] |= {"eval_path": str(tmp_path / "rows.jsonl")}
        config = merge(config, {"eval": {"every_steps": 2, "num_rows": 5}, "dpo": {"beta": 10.0}})
    ranks.run(2, functools.partial(run_rank, task), merge(config, _in(tmp_path / "many")))
    one = run_task_here(task, merge(merge(config, {"train": PLAIN}), _in(tmp_path / "one")))
    rewards = [
        f"{kind}/{name}" for kind in ("pairs", "eval") for name in ("margin", "reward_chosen", "reward_rejected")
    ]
    assert_equal_runs(one, tmp_path / "many", 1e-5, dict.fromkeys(rewards, 1e-5))


def test_edits(ranks, tmp_path):
    """A model that takes an image: whose rows and negatives belong to samples."""
    write_tiny_pipeline(tmp_path / "pipeline", described=tiny_flux_kontext())
    settings = {"train": {"max_steps": STEPS, "data_parallel_mode": "ddp"}, "rollout": {"guidance_scale": 2.5}}
    config = tiny_rl_config(tmp_path, **settings, eval={"every_steps": 2}) | COARSE
    ranks.run(2, functools.partial(run_rank, "rl_diffusion"), merge(config, _in(tmp_path / "many")))
    one = run_task_here("rl_diffusion", merge(config, _in(tmp_path / "one")))
    assert_equal_runs(one, tmp_path / "many", 1e-5, LAST_BITS)


def _in(folder: Path) -> dict[str, Any]:
    return {"train": {"output_dir": str(folder)}}


def _first(run: Path) -> str:
    return str(run / "checkpoints" / "global_step_2")
