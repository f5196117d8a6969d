"""Tiny runs of RL and of preference training of a model that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import merge, tiny_text_rl_config, write_config
from tests.tiny_vision import (
    TOKENS,
    audio_row,
    image_row,
    media_row,
    sound_row,
    tiny_vision_config,
    tiny_vision_description,
)


def prompt_row(index: int) -> dict[str, Any]:
    """A prompt with 0, 1 or 2 pictures, as ``image_row`` has them."""
    return {"prompt": image_row(index)["messages"][:1], "answer": str(index)}


def write_prompts(path: Path, count: int, start: int = 0) -> Path:
    """A .jsonl file of such prompts."""
    rows = (json.dumps(prompt_row(start + index)) for index in range(count))
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def tiny_vision_rl_config(tmp_path: Path, kind: str = "qwen3_vl", **overrides: Any) -> dict[str, Any]:
    """A ``tasks/rl_text.py`` run like ``tiny_text_rl_config``, whose prompts have 0, 1 or 2 pictures each."""
    description = write_config(tiny_vision_description(kind), tmp_path / f"{kind}.yaml")
    limits = {"min_pixels": 64, "max_pixels": 1024} if kind.startswith("qwen") else {}
    base = tiny_text_rl_config(tmp_path)
    base["model"] = {"config_path": str(description), "tokenizer_path": "bytes"}
    base["data"] = {
        "data_type": {"type": "image_prompts", **limits},
        "train_path": str(write_prompts(tmp_path / "prompts.jsonl", 12)),
        "eval_path": str(write_prompts(tmp_path / "held_out_prompts.jsonl", 5, 50)),
        "max_prompt_tokens": TOKENS.get(kind, 160),
    }
    return merge(base, overrides)


def media_prompt_row(kind: str, index: int) -> dict[str, Any]:
    """A prompt with the media that a kind of model takes: sounds, pictures and videos, or of a thinker one with all."""
    if kind == "qwen2_audio":
        row = sound_row(index)
    elif kind.endswith("_thinker"):
        row = audio_row(index, least=1.0)
        if index % 3 == 1:
            row["messages"][0]["content"].insert(1, media_row(1)["messages"][0]["content"][0])
    else:
        row = media_row(index)
    return {"prompt": row["messages"][:1], "answer": str(index)}


def tiny_media_rl_config(tmp_path: Path, kind: str, **overrides: Any) -> dict[str, Any]:
    """The same of prompts some of which have videos or audio."""
    result = tiny_vision_rl_config(tmp_path, kind)
    limits = {} if kind == "qwen2_audio" else {"min_pixels": 64, "max_pixels": 1024}
    limits |= {} if kind == "qwen2_audio" else {"max_frames": 6, "video_min_pixels": 64, "video_max_pixels": 2048}
    result["data"] |= {"data_type": {"type": "media_prompts", **limits}, "max_prompt_tokens": 320}
    for name, count, start in (("prompts", 12, 0), ("held_out_prompts", 5, 50)):
        rows = (json.dumps(media_prompt_row(kind, start + index)) for index in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return merge(result, overrides)


def pair_row(index: int) -> dict[str, Any]:
    """A pair of answers to a prompt with 0, 1 or 2 pictures."""
    prompt = image_row(index)["messages"][:1]
    return {"prompt": prompt, "chosen": f"It is {index}.", "rejected": f"I cannot see {index} there."}


def tiny_vision_pairs_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_text_dpo.py`` run of a tiny Qwen3-VL on such pairs."""
    result = tiny_vision_config(tmp_path, "qwen3_vl")
    for name, start, count in (("rows", 0, 12), ("held_out", 50, 5)):
        lines = (json.dumps(pair_row(start + index)) for index in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result["data"]["data_type"]["type"] = "image_preference"
    result["eval"] = {"every_steps": 0, "num_rows": 5}
    return merge(result, overrides)
