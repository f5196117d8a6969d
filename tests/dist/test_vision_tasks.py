"""Training of models that see on several ranks, some of which have no image, against the same task in one process."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.parallel.stages import TWO_STAGES
from tests.dist.test_tasks import LAST_BITS, PLAIN, STEPS, assert_equal_runs, run_rank
from tests.dist.test_text_tasks import NO_CUTS, quick_or_slow
from tests.tiny import run_task_here, write_config
from tests.tiny_vision import (
    audio_row,
    image_row,
    media_row,
    sound_row,
    tiny_media_config,
    tiny_sound_config,
    tiny_vision_config,
    tiny_vision_description,
)
from tests.tiny_vision_rl import tiny_media_rl_config, tiny_vision_pairs_config, tiny_vision_rl_config

PARTS = {"model": {"freeze": [r"visual\.blocks", r"embed_tokens"]}}
MODES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "ddp": (2, "qwen2_5_vl", {"data_parallel_mode": "ddp"}, {}),
    "fsdp2": (2, "qwen3_vl", {}, {}),
    "fsdp1": (2, "qwen2_vl", {"data_parallel_mode": "fsdp1"}, {}),
    "hsdp, chunked loss": (4, "qwen2_5_vl", {"data_parallel_replicate_size": 2, "chunked_loss": True}, {}),
    "fsdp2 x ep": (2, "qwen3_vl_moe", {"expert_parallel_size": 2}, {}),
    "tp": (2, "qwen3_vl", {"tensor_parallel_size": 2}, {}),
    "tp of experts": (2, "qwen3_vl_moe", {"tensor_parallel_size": 2}, {}),
    "tp, a row for each document": (2, "gemma3", {"tensor_parallel_size": 2}, {}),
    "tp, tiles": (2, "internvl", {"tensor_parallel_size": 2}, {}),
    "tp, tiles of an image": (2, "llava_onevision", {"tensor_parallel_size": 2}, {"data": {"max_seq_len": 256}}),
    "tp, older positions": (2, "qwen2_vl", {"tensor_parallel_size": 2}, {}),
    "fsdp2 x tp": (4, "qwen2_5_vl", {"tensor_parallel_size": 2}, {}),
    "ulysses": (2, "qwen3_vl", {"ulysses_parallel_size": 2}, {}),
    "ulysses, experts": (2, "qwen3_vl_moe", {"ulysses_parallel_size": 2}, {}),
    "ulysses, positions of one axis": (2, "internvl", {"ulysses_parallel_size": 2}, {}),
    "ring": (2, "qwen3_vl", {"context_parallel_size": 2}, {}),
    "ring, experts": (2, "qwen3_vl_moe", {"context_parallel_size": 2}, {}),
    "ulysses x ring": (4, "qwen2_5_vl", {"ulysses_parallel_size": 2, "context_parallel_size": 2}, {}),
    "fsdp2 x ulysses": (4, "qwen3_vl", {"ulysses_parallel_size": 2}, {}),
    "tp x ulysses": (4, "qwen3_vl", {"tensor_parallel_size": 2, "ulysses_parallel_size": 2}, {}),
    "fsdp2 x ulysses x ep": (4, "qwen3_vl_moe", {"ulysses_parallel_size": 2, "expert_parallel_size": 2}, {}),
    "ring, recompute": (
        2,
        "qwen3_vl",
        {"context_parallel_size": 2, "activation_checkpointing": "full", "chunked_loss": True},
        {},
    ),
    "tp, adapters": (
        2,
        "qwen2_5_vl",
        {"tensor_parallel_size": 2},
        {"model": {"lora": {"rank": 4, "alpha": 8, "init_weights": "default"}}},
    ),
    "fsdp2, a row for each document": (2, "gemma3", {}, {}),
    "fsdp2, padded rows": (2, "qwen2_5_vl", {"dyn_bsz": False, "rmpad_with_pos_ids": False}, {}),
    "fsdp2, tiles": (2, "internvl", {}, {}),
    "fsdp2, layers with states": (2, "qwen3_5", {}, {}),
    "fsdp2 x ep, layers with states": (2, "qwen3_5_moe", {"expert_parallel_size": 2}, {}),
    "tp, layers with states": (2, "qwen3_5", {"tensor_parallel_size": 2}, {}),
    "tp of experts, layers with states": (2, "qwen3_5_moe", {"tensor_parallel_size": 2, "lr": 1e-4}, {}),
    "fsdp2, inputs of each layer": (2, "gemma4", {}, {}),
    "fsdp2, GLM": (2, "glm4v", {}, {}),
    "tp, GLM": (2, "glm4v", {"tensor_parallel_size": 2}, {}),
    "ulysses, GLM": (2, "glm4v", {"ulysses_parallel_size": 2}, {}),
    "ring, GLM": (2, "glm4v", {"context_parallel_size": 2}, {}),
    "tp, a class token": (2, "llava", {"tensor_parallel_size": 2}, {}),
    "ulysses, a class token": (2, "llava", {"ulysses_parallel_size": 2}, {}),
    "fsdp2, a weight beside": (2, "llava_next", {}, {}),
    "ring, a weight beside": (2, "llava_next", {"context_parallel_size": 2}, {}),
    "fsdp2, SmolVLM": (2, "smolvlm", {}, {}),
    "tp, SmolVLM": (2, "smolvlm", {"tensor_parallel_size": 2}, {}),
    "ulysses, SmolVLM": (2, "smolvlm", {"ulysses_parallel_size": 2}, {}),
    "meta, recompute": (2, "qwen2_5_vl", {"init_device": "meta", "activation_checkpointing": "full"}, {}),
    "parts frozen, rate by part": (2, "qwen2_5_vl", {"param_groups": [{"match": "visual", "lr_scale": 0.1}]}, PARTS),
    "adapters": (2, "qwen2_5_vl", {}, {"model": {"lora": {"rank": 4, "alpha": 8, "init_weights": "default"}}}),
    "iterable": (2, "qwen2_5_vl", {}, {"data": {"datasets_type": "iterable", "shuffle_buffer": 5}}),
}


PIPELINES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "pp": (2, "qwen2_5_vl", {}, {}),
    "pp, gpipe, older positions": (2, "qwen2_vl", {"pipeline_schedule": "gpipe"}, {}),
    "pp, zbv": (2, "qwen3_vl", {"pipeline_schedule": "zbv"}, {}),
    "pp, interleaved": (2, "qwen2_5_vl", {"pipeline_schedule": "interleaved_1f1b"}, {}),
    "pp, features of later layers": (2, "qwen3_vl", {}, {}),
    "pp, experts": (2, "qwen3_vl_moe", {}, {}),
    "pp, tiles": (2, "internvl", {}, {}),
    "pp, tiles of an image": (2, "llava_onevision", {}, {}),
    "pp, a weight beside": (2, "llava_next", {}, {}),
    "pp, a class token": (2, "llava", {}, {}),
    "pp, GLM": (2, "glm4v", {}, {}),
    "pp, SmolVLM": (2, "smolvlm", {}, {}),
    "pp, padded rows": (2, "qwen2_5_vl", {"dyn_bsz": False, "rmpad_with_pos_ids": False}, {}),
    "pp, meta, recompute": (2, "qwen2_5_vl", {"init_device": "meta", "activation_checkpointing": "full"}, {}),
    "pp, parts frozen, rate by part": (
        2,
        "qwen2_5_vl",
        {"param_groups": [{"match": "visual", "lr_scale": 0.1}]},
        PARTS,
    ),
    "pp, adapters": (
        2,
        "qwen2_5_vl",
        {},
        {"model": {"lora": {"rank": 4, "alpha": 8, "init_weights": "default"}}},
    ),
    "pp, a weight beside, meta": (2, "llava_next", {"init_device": "meta"}, {}),
    "pp x ep": (4, "qwen3_vl_moe", {"expert_parallel_size": 2}, {}),
    "pp x fsdp2": (4, "qwen3_vl", {}, {}),
    "pp x ddp": (4, "qwen2_5_vl", {"data_parallel_mode": "ddp"}, {}),
    "pp x tp": (4, "qwen2_5_vl", {"tensor_parallel_size": 2}, {}),
    "pp x tp, features of later layers": (4, "qwen3_vl", {"tensor_parallel_size": 2}, {}),
}
MODES |= {
    name: (num, kind, {"pipeline_parallel_size": 2} | train, settings)
    for name, (num, kind, train, settings) in PIPELINES.items()
}


@pytest.mark.parametrize("mode", quick_or_slow(MODES, ("fsdp2", "ulysses", "pp, features of later layers")))
def test_several_ranks_are_one_process_with_images_on_some(mode, ranks, tmp_path):
    num_ranks, kind, train, settings = MODES[mode]
    train = {"max_steps": STEPS, "eps": 1.0e-4, **train}
    config = merge(tiny_vision_config(tmp_path, kind, train=train, eval={"every_steps": 2}), settings)
    if train.get("pipeline_schedule") in TWO_STAGES:
        deep = tiny_vision_description(kind)
        deep["text_config"]["num_hidden_layers"] = 4
        write_config(deep, Path(config["model"]["config_path"]))
    rows = [image_row(index if index % 4 == 2 else 3 * index) for index in range(24)]  # most have no image
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "train_text"), merge(config, many))
    run_task_here("train_text", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})


AUDIO: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2": (2, "qwen2_5_omni_thinker", {}),
    "fsdp2, recompute": (2, "qwen2_5_omni_thinker", {"activation_checkpointing": "full"}),
    "fsdp2, Qwen3": (2, "qwen3_omni_moe_thinker", {}),
    "fsdp2 x ep, Qwen3": (2, "qwen3_omni_moe_thinker", {"expert_parallel_size": 2}),
    "ddp": (2, "qwen2_5_omni_thinker", {"data_parallel_mode": "ddp"}),
    "tp": (2, "qwen2_5_omni_thinker", {"tensor_parallel_size": 2}),
    "ulysses": (2, "qwen2_5_omni_thinker", {"ulysses_parallel_size": 2}),
    "tp, Qwen3": (2, "qwen3_omni_moe_thinker", {"tensor_parallel_size": 2}),
    "ulysses, Qwen3": (2, "qwen3_omni_moe_thinker", {"ulysses_parallel_size": 2}),
    "ring, Qwen3": (2, "qwen3_omni_moe_thinker", {"context_parallel_size": 2}),
    "pp": (2, "qwen2_5_omni_thinker", {"pipeline_parallel_size": 2}),
    "pp, Qwen3": (2, "qwen3_omni_moe_thinker", {"pipeline_parallel_size": 2}),
    "fsdp2, Qwen2-Audio": (2, "qwen2_audio", {}),
    "ddp, Qwen2-Audio": (2, "qwen2_audio", {"data_parallel_mode": "ddp"}),
    "meta, recompute, Qwen2-Audio": (2, "qwen2_audio", {"init_device": "meta", "activation_checkpointing": "full"}),
    "tp, Qwen2-Audio": (2, "qwen2_audio", {"tensor_parallel_size": 2}),
    "ulysses, Qwen2-Audio": (2, "qwen2_audio", {"ulysses_parallel_size": 2}),
    "ring, Qwen2-Audio": (2, "qwen2_audio", {"context_parallel_size": 2}),
}


@pytest.mark.parametrize("mode", quick_or_slow(AUDIO, ("fsdp2, Qwen2-Audio",)))
def test_several_ranks_are_one_process_with_audio_on_some(mode, ranks, tmp_path):
    pytest.importorskip("soundfile", reason="audio needs soundfile and soxr (extra 'audio')")
    num_ranks, kind, train = AUDIO[mode]
    train = {"max_steps": STEPS, "eps": 1.0e-4, **train}
    if kind == "qwen2_audio":
        config = tiny_sound_config(tmp_path, train=train, eval={"every_steps": 2})
        rows = [sound_row(index if index % 4 == 2 else 3 * index) for index in range(12)]  # most have none
    else:
        config = tiny_vision_config(tmp_path, kind, train=train, eval={"every_steps": 2})
        limits = {"video_max_pixels": 2048, "video_min_pixels": 64}
        config["data"]["data_type"] |= {"type": "media_conversation"} | limits
        config["data"]["max_seq_len"] = 256
        rows = [audio_row(index, 1.0) if index % 3 == 1 else image_row(index) for index in range(12)]
    Path(config["data"]["train_path"]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "train_text"), merge(config, many))
    run_task_here("train_text", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})


VIDEOS = {
    "fsdp2": (2, "qwen3_vl", {}),
    "ddp": (2, "qwen2_5_vl", {"data_parallel_mode": "ddp"}),
    "tp": (2, "qwen2_5_vl", {"tensor_parallel_size": 2}),
    "ulysses": (2, "qwen3_vl", {"ulysses_parallel_size": 2}),
    "ring": (2, "qwen3_vl", {"context_parallel_size": 2}),
    "pp": (2, "qwen3_vl", {"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("mode", quick_or_slow(VIDEOS, ()))
def test_several_ranks_are_one_process_with_videos_on_some(mode, ranks, tmp_path):
    pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")
    num_ranks, kind, train = VIDEOS[mode]
    train = {"max_steps": STEPS, "eps": 1.0e-4, **train}
    config = tiny_media_config(tmp_path, kind, train=train, eval={"every_steps": 2})
    rows = [(media_row, image_row, image_row)[index % 3](index if index % 3 else 1) for index in range(12)]
    (tmp_path / "media.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "train_text"), merge(config, many))
    run_task_here("train_text", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})


RL = {
    "ddp": (2, {"data_parallel_mode": "ddp"}, {}),
    "fsdp2": (2, {}, {}),
    "fsdp2, a reference, tokens a micro-batch": (
        2,
        {"max_tokens_per_micro_batch": 160},
        {"algorithm": {"kl": {"coef": 0.1}}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", RL)
def test_rl_on_several_ranks_is_one_process_with_images_in_some_prompts(mode, ranks, tmp_path):
    num_ranks, train, settings = RL[mode]
    train = {"max_steps": STEPS, "eps": 1.0e-4, "global_batch_size": 8, **train}
    config = merge(tiny_vision_rl_config(tmp_path, train=train), settings)
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(num_ranks, functools.partial(run_rank, "rl_text"), merge(config, many))
    run_task_here("rl_text", merge(merge(config, {"train": NO_CUTS | PLAIN}), one))
    rounding = {"mismatch/log_ratio_max": 1e-5, "mismatch/kl_k1": 1e-6}  # of kernels alone
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, LAST_BITS | rounding)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_audio", "qwen3_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_rl_on_several_ranks_is_one_process_with_videos_and_audio_in_some_prompts(kind, ranks, tmp_path):
    pytest.importorskip("soundfile", reason="audio needs soundfile and soxr (extra 'audio')")
    pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")
    train = {"max_steps": STEPS, "eps": 1.0e-4, "global_batch_size": 8}
    config = tiny_media_rl_config(tmp_path, kind, train=train)
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(2, functools.partial(run_rank, "rl_text"), merge(config, many))
    run_task_here("rl_text", merge(merge(config, {"train": NO_CUTS | PLAIN}), one))
    rounding = {"mismatch/log_ratio_max": 1e-5, "mismatch/kl_k1": 1e-6}  # of kernels alone
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, LAST_BITS | rounding)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2", "pp"])
def test_dpo_on_several_ranks_is_one_process_with_images_in_some_prompts(mode, ranks, tmp_path):
    cut = {"pipeline_parallel_size": 2} if mode == "pp" else {"data_parallel_mode": mode}
    train = {"max_steps": STEPS, "eps": 1.0e-4, **cut}
    config = tiny_vision_pairs_config(tmp_path, train=train, eval={"every_steps": 2})
    many, one = ({"train": {"output_dir": str(tmp_path / name)}} for name in ("many", "one"))
    ranks.run(2, functools.partial(run_rank, "train_text_dpo"), merge(config, many))
    run_task_here("train_text_dpo", merge(merge(config, {"train": NO_CUTS}), one))
    assert_equal_runs(tmp_path / "one", tmp_path / "many", 1e-5, {"grad_norm": 1e-7, "loss": 1e-7})
