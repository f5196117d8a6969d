"""Tiny models that see, described in code, and conversations with pictures made in code."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import _train, merge, write_config

IDS = {"vision_start_token_id": 259, "vision_end_token_id": 260, "image_token_id": 261, "video_token_id": 262}

TOKENS = {"gemma4": 768, "glm4v": 384, "llava_next": 384, "llava_onevision": 384, "smolvlm": 768, "idefics3": 768}
"""Tokens that hold a conversation with two pictures, of models that make more than 128 of them."""


def tiny_vision_description(kind: str) -> dict[str, Any]:
    """A model of width 32 with two layers and an encoder of width 16, for the tokenizer of bytes with 4 tokens more.

    Args:
        kind: transformers' ``model_type``; qwen2_audio hears up to a second.
    """
    text = {
        "vocab_size": 263,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
    }
    mrope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    qwen = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "depth": 2}
    if kind == "qwen2_vl":
        vision = qwen | {"embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "initializer_range": 0.1}
        return {"model_type": kind, "text_config": text | mrope, "vision_config": vision, **IDS}
    if kind == "qwen2_5_vl":
        vision = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "window_size": 16}
        vision = qwen | vision | {"fullatt_block_indexes": [1], "initializer_range": 0.1}
        return {"model_type": kind, "text_config": text | mrope, "vision_config": vision, **IDS}
    if kind == "qwen2_5_omni_thinker":
        vision = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "window_size": 16}
        vision = qwen | vision | {"fullatt_block_indexes": [1], "initializer_range": 0.1}
        audio = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
        audio |= {"d_model": 16, "output_dim": 32, "n_window": 10, "initializer_range": 0.1}
        ids = {"image_token_index": 261, "video_token_index": 262, "vision_start_token_id": 259}
        ids |= {"vision_end_token_id": 260, "audio_start_token_id": 263, "audio_end_token_id": 264}
        ids["audio_token_index"] = 265
        parts = {"text_config": text | mrope | {"vocab_size": 266}, "vision_config": vision, "audio_config": audio}
        return {"model_type": kind, **parts, **ids}
    if kind == "qwen3_omni_moe_thinker":
        vision = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        vision = qwen | vision | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        audio = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
        audio |= {"d_model": 16, "output_dim": 32, "n_window_infer": 200, "downsample_hidden_size": 8}
        for part in (vision, audio):
            part["initializer_range"] = 0.1
        mrope["rope_parameters"]["mrope_interleaved"] = True
        text |= mrope | {"vocab_size": 266, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
        ids = {"vision_start_token_id": 259, "vision_end_token_id": 260, "image_token_id": 261, "video_token_id": 262}
        ids |= {"audio_start_token_id": 263, "audio_end_token_id": 264, "audio_token_id": 265}
        parts = {"text_config": text, "vision_config": vision, "audio_config": audio}
        return {"model_type": kind, **parts, **ids, "position_id_per_seconds": 13}
    if kind == "qwen2_audio":
        audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 2, "d_model": 16}
        audio |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 32, "max_source_positions": 50}
        text |= {"model_type": "qwen2", "vocab_size": 262}
        return {
            "model_type": kind,
            "text_config": text,
            "audio_config": audio | {"initializer_range": 0.1},
            "audio_token_index": 261,
        }
    if kind.startswith("qwen3_vl"):
        vision = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        vision = (
            qwen | vision | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "initializer_range": 0.1}
        )
        mrope["rope_parameters"]["mrope_interleaved"] = True
        text |= mrope | {"head_dim": 8}
        if kind == "qwen3_vl_moe":
            text |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
        return {"model_type": kind, "text_config": text, "vision_config": vision, **IDS}
    if kind.startswith("qwen3_5"):
        vision = {"hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        vision = qwen | vision | {"num_position_embeddings": 16, "initializer_range": 0.1}
        mrope["rope_parameters"] |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text |= mrope | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        if kind == "qwen3_5_moe":
            text.pop("intermediate_size")
            text |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
            text["shared_expert_intermediate_size"] = 16
        return {"model_type": kind, "text_config": text, "vision_config": vision, **IDS}
    if kind == "glm4v":
        vision = qwen | {"hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
        vision |= {"image_size": 16, "initializer_range": 0.1}
        ids = {"image_start_token_id": 259, "image_end_token_id": 260, "image_token_id": 261}
        ids |= {"video_token_id": 262, "video_start_token_id": 263, "video_end_token_id": 264}
        mrope["rope_parameters"]["partial_rotary_factor"] = 1.0
        text = text | mrope | {"vocab_size": 265}
        text.pop("bos_token_id")
        text.pop("eos_token_id")
        return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}
    if kind == "gemma4":
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
        vision |= {"position_embedding_size": 1024, "initializer_range": 0.1}
        text |= {"head_dim": 8, "sliding_window": 512, "hidden_size_per_layer_input": 8}
        text |= {"vocab_size": 267, "max_position_embeddings": 1024}
        text |= {"vocab_size_per_layer_input": 267, "use_bidirectional_attention": "vision"}
        text["layer_types"] = ["sliding_attention", "full_attention"]
        text["global_head_dim"] = 8
        ids = {"boi_token_id": 259, "eoi_token_id": 260, "image_token_id": 261, "boa_token_id": 263}
        ids |= {"eoa_token_index": 264, "audio_token_id": 265, "video_token_id": 266}
        return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}
    siglip = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "smolvlm":
        pytest.importorskip("num2words", reason="transformers' processor of SmolVLM asks for it")
        text |= {"model_type": "llama", "max_position_embeddings": 1024}
        vision = siglip | {"image_size": 16, "patch_size": 4, "initializer_range": 0.1}
        return {"model_type": kind, "text_config": text, "vision_config": vision, "image_token_id": 261}
    if kind == "idefics3":  # whose processor adds its three tokens itself
        text |= {"model_type": "llama", "vocab_size": 266, "max_position_embeddings": 1024}
        vision = siglip | {"image_size": 16, "patch_size": 4, "initializer_range": 0.1}
        return {"model_type": kind, "text_config": text, "vision_config": vision, "image_token_id": 264}
    if kind in ("llava", "llava_next"):
        text["model_type"] = "llama"
        vision = siglip | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "projection_dim": 16}
        ids = {"image_token_index": 261}
        if kind == "llava_next":
            ids["image_grid_pinpoints"] = [[16, 32], [32, 16], [32, 32]]
        return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}
    siglip["vision_use_head"] = False
    if kind == "gemma3":
        text |= {"head_dim": 8, "sliding_window": 512, "query_pre_attn_scalar": 8}
        vision = siglip | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
        ids = {"boi_token_index": 259, "eoi_token_index": 260, "image_token_index": 261, "mm_tokens_per_image": 4}
        return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}
    if kind == "janus":
        text["model_type"] = "llama"
        vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
        vision |= {"patch_size": 8, "mlp_ratio": 2.0, "projection_dim": 32, "initializer_range": 0.1}
        codes = {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1]}
        codes |= {"num_res_blocks": 1, "projection_dim": 32, "num_patches": 4}
        return {
            "model_type": kind,
            "text_config": text,
            "vision_config": vision,
            "vq_config": codes,
            "image_token_id": 261,
            "tie_word_embeddings": False,
        }
    text["model_type"] = "qwen2"
    if kind == "internvl":
        vision = siglip | {"image_size": [16, 16], "patch_size": [4, 4]}
        vision.pop("vision_use_head")
        ids = {"image_token_id": 261, "tie_word_embeddings": False}
        return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}
    vision = siglip | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4}
    ids = {"image_token_index": 261, "video_token_index": 262, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
    return {"model_type": kind, "text_config": text, "vision_config": vision, **ids}


def picture(height: int, width: int, seed: int = 0) -> bytes:
    """A PNG file of random colours."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def clip(height: int, width: int, frames: int, seed: int = 0, fps: float = 8.0) -> bytes:
    """An .avi file of random colours, each frame of its own."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.avi"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), fps, (width, height))
        for colors in np.random.default_rng(seed).integers(0, 255, (frames, height // 8, width // 8, 3), np.uint8):
            writer.write(np.ascontiguousarray(colors.repeat(8, 0).repeat(8, 1)))
        writer.release()
        return path.read_bytes()


def sound(seconds: float, seed: int = 0, rate: int = 16000, channels: int = 1, kind: str = "WAV") -> bytes:
    """A file of noise."""
    import soundfile

    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, (round(seconds * rate), channels)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


def audio_row(index: int, least: float = 0.15) -> dict[str, Any]:
    """A conversation with 0, 1 or 2 pictures; of four, one has audio before them, and one after: seconds, at least."""
    row = image_row(index)
    if index % 4 in (1, 2):
        audio = data_url(sound(least + 0.1 * index, index), "audio/wav")
        content = row["messages"][0]["content"]
        content.insert(0 if index % 2 else len(content), {"type": "audio", "audio": audio})
    return row


def sound_row(index: int) -> dict[str, Any]:
    """A conversation with 0, 1 or 2 sounds of lengths of their own, after the question or before it."""
    sounds = [data_url(sound(0.08 + 0.07 * (index % 5 + number), index + number)) for number in range(index % 3)]
    content = [
        {"type": "text", "text": f"What is number {index}?"},
        *({"type": "audio", "audio": sound} for sound in sounds),
    ]
    content = content[:: -1 if index % 2 else 1]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"It is {index}."}]}


def data_url(content: bytes, kind: str = "image/png") -> str:
    """A file as a data: URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_row(index: int) -> dict[str, Any]:
    """A conversation with 0, 1 or 2 pictures of sizes of their own; those of a third are files that lie beside."""
    sizes = [(16 + 8 * (index % 3), 24 + 8 * number) for number in range(index % 3)]
    pictures = [{"type": "image", "image": data_url(picture(*size, index))} for size in sizes]
    content = [*pictures, {"type": "text", "text": f"What is number {index}?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": f"It is {index}."}]}


def media_row(index: int) -> dict[str, Any]:
    """A conversation with 0, 1 or 2 pictures; of three, one has a video before them, and one after."""
    row = image_row(index)
    if index % 3:
        video = data_url(clip(32, 24, 8 + 3 * index, index), "video/avi")
        content = row["messages"][0]["content"]
        content.insert(0 if index % 2 else len(content), {"type": "video", "video": video})
    return row


def write_image_rows(path: Path, count: int, start: int = 0, row: Any = image_row) -> Path:
    """A .jsonl file of such conversations."""
    path.write_text("".join(f"{json.dumps(row(start + index))}\n" for index in range(count)), encoding="utf-8")
    return path


def tiny_media_config(tmp_path: Path, kind: str = "qwen2_5_vl", **overrides: Any) -> dict[str, Any]:
    """As ``tiny_vision_config``, of 12 rows some of which have videos."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    write_image_rows(tmp_path / "media.jsonl", 12, row=media_row)
    write_image_rows(tmp_path / "held_out_media.jsonl", 4, 50, media_row)
    limits = {
        "type": "media_conversation",
        "min_pixels": 64,
        "max_pixels": 1024,
        "max_frames": 6,
        "video_min_pixels": 64,
        "video_max_pixels": 2048,
    }
    paths = {"train_path": str(tmp_path / "media.jsonl"), "eval_path": str(tmp_path / "held_out_media.jsonl")}
    media = {"data": {"data_type": limits, **paths, "max_seq_len": 256}}
    return merge(tiny_vision_config(tmp_path, kind, **media), overrides)


def tiny_vision_config(tmp_path: Path, kind: str = "qwen2_5_vl", **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_text.py`` run of 6 steps of 4 rows of 128 tokens with pictures; in ``tmp_path/run``."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    description = write_config(tiny_vision_description(kind), tmp_path / f"{kind}.yaml")
    data_type = {"type": "image_conversation"}
    if kind.startswith("qwen"):
        data_type |= {"min_pixels": 64, "max_pixels": 1024}
    base = {
        "model": {"config_path": str(description), "tokenizer_path": "bytes"},
        "data": {
            "data_type": data_type,
            "train_path": str(write_image_rows(tmp_path / "rows.jsonl", 24)),
            "eval_path": str(write_image_rows(tmp_path / "held_out.jsonl", 5, 50)),
            "max_seq_len": TOKENS.get(kind, 128),
        },
        "train": {**_train(tmp_path), "micro_batch_size": 1, "global_batch_size": 4},
        "eval": {"every_steps": 3, "num_rows": 8, "num_samples": 2, "max_new_tokens": 4},
    }
    return merge(base, overrides)


def tiny_sound_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """As ``tiny_vision_config``, of a tiny Qwen2-Audio and 12 rows some of which have audio."""
    result = tiny_vision_config(tmp_path, "qwen2_audio", data={"max_seq_len": 256})
    result["data"]["data_type"] = {"type": "media_conversation"}
    result["data"]["train_path"] = str(write_image_rows(tmp_path / "sounds.jsonl", 12, row=sound_row))
    result["data"]["eval_path"] = str(write_image_rows(tmp_path / "held_out_sounds.jsonl", 4, 50, sound_row))
    return merge(result, overrides)
