"""Tiny published models that see and draw, described in code: Emu3, Janus, Chameleon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import _train, merge, write_config
from tests.tiny_omni import write_omni_rows
from tests.tiny_vision import tiny_vision_config

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def unified_description(kind: str) -> dict[str, Any]:
    """A model of width 32 with two layers; of an image of 16 x 24 (Emu3) or 16 x 16 pixels it makes 6 or 4 codes."""
    if kind == "emu3":
        text = TEXT | {"vocab_size": 284, "attention_dropout": 0.0, "bos_token_id": 259}
        codes = {"codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "temporal_downsample_factor": 2}
        codes |= {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": []}
        codes |= {"hidden_size": 32}
        return {"model_type": kind, "text_config": text, "vq_config": codes}
    if kind == "chameleon":
        codes = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 16, "base_channels": 32}
        codes |= {"channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "attn_resolutions": []}
        return {"model_type": kind, **TEXT, "vocab_size": 284, "bos_token_id": 259, "vq_config": codes}
    text = TEXT | {"model_type": "llama", "vocab_size": 270, "bos_token_id": 259}
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    vision |= {"mlp_ratio": 2.0, "projection_dim": 32, "initializer_range": 0.1, "num_image_tokens": 4}
    codes = {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1]}
    codes |= {"latent_channels": 8, "num_res_blocks": 1, "projection_dim": 32, "num_patches": 2}
    codes |= {"image_token_embed_dim": 32}
    return {"model_type": kind, "text_config": text, "vision_config": vision, "vq_config": codes}


def tiny_unified_config(tmp_path: Path, kind: str, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_omni.py`` run of 6 steps of 4 rows of 128 tokens; in ``tmp_path/run``."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    description = write_config(unified_description(kind), tmp_path / f"{kind}.yaml")
    data_type: dict[str, Any] = {"type": "omni_conversation"}
    size: dict[str, Any] = {}
    if kind == "emu3":
        data_type |= {"min_pixels": 256, "max_pixels": 1024}
        size = {"size": [16, 24]}
    base = {
        "model": {"unified": {"config_path": str(description)}, "tokenizer_path": "bytes"},
        "data": {
            "data_type": data_type,
            "train_path": str(write_omni_rows(tmp_path / "rows.jsonl", list(range(24)))),
            "eval_path": str(write_omni_rows(tmp_path / "held_out.jsonl", list(range(50, 56)))),
            "max_seq_len": 128,
        },
        "draw": {"prompt_dropout": 0.3, **size},
        "train": {**_train(tmp_path), "micro_batch_size": 1, "global_batch_size": 4},
        "eval": {"every_steps": 3, "num_rows": 8, "num_samples": 6, "max_new_tokens": 4},
    }
    return merge(base, overrides)


def tiny_seeing_config(tmp_path: Path, kind: str, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_text.py`` run of 6 steps, of a model that sees pictures as codes; in ``tmp_path/run``."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    config = tiny_vision_config(tmp_path, "janus", **overrides)
    config["model"]["config_path"] = str(write_config(unified_description(kind), tmp_path / f"{kind}.yaml"))
    if kind == "emu3":
        config["data"]["data_type"] |= {"min_pixels": 256, "max_pixels": 1024}
    return config
