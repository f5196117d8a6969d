"""Tiny models that understand and draw images, described in code, and conversations with pictures of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import _train, merge, write_config
from tests.tiny_vision import data_url, picture

TEXT = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
}


def tiny_image_tokenizer(folder: Path) -> Path:
    """A VQ model with random weights: 4 of 8 codes for an image of 8 x 8 pixels."""
    from diffusers import VQModel

    sizes = {"block_out_channels": (8, 8, 8), "norm_num_groups": 2, "latent_channels": 4, "num_vq_embeddings": 8}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VQModel(**sizes, **blocks, mid_block_add_attention=False, sample_size=8)
        model.quantize.embedding.weight.data.normal_()
    model.save_pretrained(folder)
    return folder


def omni_row(index: int) -> dict[str, Any]:
    """A conversation that is text alone, sees a picture, draws one, or does both."""
    seen = {"type": "image", "image": data_url(picture(16, 16, index))}
    drawn = {"type": "image", "image": data_url(picture(8, 8, 100 + index))}
    content: list[Any] = [seen] if index % 4 in (1, 3) else []
    answer: list[Any] = [drawn] if index % 4 in (2, 3) else [{"type": "text", "text": f"It is {index}."}]
    content = [*content, {"type": "text", "text": f"What is number {index}?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_omni_rows(path: Path, indices: list[int]) -> Path:
    """A .jsonl file of such conversations."""
    path.write_text("".join(f"{json.dumps(omni_row(index))}\n" for index in indices), encoding="utf-8")
    return path


def tiny_omni_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_omni.py`` run of 6 steps of 4 rows of 128 tokens; in ``tmp_path/run``."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    base = {
        "model": {
            "foundation": {"config_path": str(write_config(TEXT, tmp_path / "llama.yaml"))},
            "encoder": {"config_path": str(write_config(SIGLIP, tmp_path / "siglip.yaml"))},
            "image_tokenizer": str(tiny_image_tokenizer(tmp_path / "image_tokenizer")),
            "tokenizer_path": "bytes",
        },
        "data": {
            "data_type": "omni_conversation",
            "train_path": str(write_omni_rows(tmp_path / "rows.jsonl", list(range(24)))),
            "eval_path": str(write_omni_rows(tmp_path / "held_out.jsonl", list(range(50, 56)))),
            "max_seq_len": 128,
        },
        "draw": {"prompt_dropout": 0.3},
        "train": {**_train(tmp_path), "micro_batch_size": 1, "global_batch_size": 4},
        "eval": {"every_steps": 3, "num_rows": 8, "num_samples": 6, "max_new_tokens": 4},
    }
    return merge(base, overrides)


def tiny_flow_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """The same with images as latents, which a flow head draws: four patches of 2 x 2 latents of 8 x 8 pixels."""
    from sfumato.models.diffusion.scratch import build_autoencoder

    config = tiny_omni_config(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = build_autoencoder((8, 8, 8), 4, norm_groups=2, sample_size=8)
    vae.save_pretrained(tmp_path / "vae")
    head = {"sample_size": 2, "patch_size": 1, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    head |= {"caption_projection_dim": 16, "pos_embed_max_size": 2}
    path = str(write_config(head, tmp_path / "head.yaml"))
    config["model"] |= {"image_tokenizer": str(tmp_path / "vae"), "head": {"config_path": path}}
    return merge(config, overrides)
