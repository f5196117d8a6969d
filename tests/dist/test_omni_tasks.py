"""Training of models that see and draw on several ranks, some of which have no image, against one process."""

import functools

import pytest

from sfumato.config.load import merge
from tests.dist.test_tasks import STEPS, assert_equal_runs, run_rank
from tests.dist.test_text_tasks import NO_CUTS, quick_or_slow
from tests.tiny import run_task_here, write_config
from tests.tiny_omni import TEXT, tiny_flow_config, tiny_omni_config, write_omni_rows
from tests.tiny_unified import tiny_unified_config

MODES = {
    "fsdp2": {},
    "ddp": {"data_parallel_mode": "ddp"},
    "fsdp2, chunked loss": {"chunked_loss": True},
    "fsdp2, flow head": {},
    "ddp, flow head": {"data_parallel_mode": "ddp"},
    "tp": {"tensor_parallel_size": 2},
    "Ulysses": {"ulysses_parallel_size": 2},
    "ring": {"context_parallel_size": 2},
    "tp, chunked loss": {"tensor_parallel_size": 2, "chunked_loss": True},
    "fsdp2 x tp": {"tensor_parallel_size": 2},
    "tp x Ulysses": {"tensor_parallel_size": 2, "ulysses_parallel_size": 2},
    "fsdp2 x ring": {"context_parallel_size": 2},
    "ep of a mixture of experts": {"expert_parallel_size": 2},
    "ep x Ulysses of a mixture of experts": {"expert_parallel_size": 2, "ulysses_parallel_size": 2},
    "Ulysses x ring": {"ulysses_parallel_size": 2, "context_parallel_size": 2},
}


@pytest.mark.parametrize("mode", quick_or_slow(MODES, ("fsdp2",)))
def test_several_ranks_are_one_process_with_images_on_some(mode, ranks, tmp_path):
    train = {"max_steps": STEPS, "eps": 1.0e-4, **MODES[mode]}
    coefs = {"text_coef": 0.7, "image_coef": 1.5}  # sums of ranks alone would not show means that are mixed up
    tiny = tiny_flow_config if "flow" in mode else tiny_omni_config
    config = merge(tiny(tmp_path, train=train, eval={"every_steps": 2}), coefs)
    if "experts" in mode:
        moe = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
        moe |= {"head_dim": 8}
        config["model"]["foundation"] = {"config_path": str(write_config(TEXT | moe, tmp_path / "moe.yaml"))}
    rows = [4 * index if index % 4 else index // 4 for index in range(24)]  # three of four are text alone
    write_omni_rows(tmp_path / "rows.jsonl", rows)
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(4 if " x " in mode else 2, functools.partial(run_rank, "train_omni"), merge(config, many))
    run_task_here("train_omni", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
@pytest.mark.parametrize("kind", ["emu3", "janus"])
def test_published_models_on_two_ranks_are_one_process(kind, mode, ranks, tmp_path):
    """With weights that are frozen beside those that are trained."""
    train = {"max_steps": STEPS, "eps": 1.0e-4, "data_parallel_mode": mode}
    config = tiny_unified_config(tmp_path, kind, train=train, eval={"every_steps": 2})
    config = merge(config, {"text_coef": 0.7, "image_coef": 1.5})
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(2, functools.partial(run_rank, "train_omni"), merge(config, many))
    run_task_here("train_omni", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})
