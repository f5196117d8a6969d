"""Fine-tuning of a language model of 1.7 B: tokens a second and MFU, compiled or not, plain or by fsdp2, and with
the output layer in chunks; and of a model of 3 B that sees.

A Qwen3 of the published shape with random weights; conversations, of which answers are learned, packed to rows of
16,384 tokens; AdamW in float32, bf16 products. ``one process`` is what ``train.sh`` starts on one GPU;
``fsdp2`` has a process group of one rank, as on several. ``images`` is a Qwen2.5-VL of the published shape with rows of
4,096 tokens, of which pictures of several sizes fill most.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.watched import Steps, group_of_one, largest_that_fits, run_steps
from tests.tiny_vision import IDS, data_url, picture, tiny_vision_description

PEAK_TFLOPS = 790.0
"""Measured bf16 products of random numbers on an H200; MFU here is the share of this (the data sheet says 989)."""

QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1.0e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
QWEN3_0_6B = QWEN3_1_7B | {"hidden_size": 1024, "intermediate_size": 3072}
QWEN2_5_VL_3B = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1.0e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": True,
    **IDS,
}
TINY = QWEN3_1_7B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


BOUNDS = (
    Bound(
        "mfu",
        0.55,
        "stages traces and syncs say whether kernels or waits take the time; against the target, try chunked_loss, "
        "pad_to_multiple_of 512 and longer rows",
        least=True,
        cells="^compile/.*/plain$",
        real=True,
    ),
    Bound("mfu", 0.4, "as compiled; eager is about 41 % on paper", least=True, cells="^eager/.*/plain$", real=True),
    Bound("gpu_peak_gib", 76, "leaves no room for fragments on 80 GB: train.micro_batch_size, chunked_loss", real=True),
)


def cells(setting: Setting) -> dict[str, Cell]:
    """The grid; what compiling gains comes first."""
    grid = itertools.product(("one process", "fsdp2"), ("plain", "chunked"), ("compile", "eager"))
    choices = [(compiled, engine, loss) for engine, loss, compiled in grid]
    texts = {
        "/".join(choice): partial(measure, compiled=choice[0], engine=choice[1], loss=choice[2])
        for choice in choices
        if not setting.tiny or choice[0] == "eager" or choice == ("compile", "one process", "plain")
    }
    images = {f"{mode}/one process/images": partial(measure_images, compiled=mode) for mode in ("compile", "eager")}
    return texts | images


def measure(setting: Setting, compiled: str, engine: str, loss: str) -> dict[str, Any]:
    """Rates of one cell, with rows of 16,384 tokens, or of fewer where memory does not suffice."""

    def measured(rows: int) -> dict[str, Any]:
        folder = setting.scratch / f"{compiled}_{engine}_{loss}_{rows}".replace(" ", "_")
        config = sft_config(folder, setting, rows, compile=compiled == "compile", chunked_loss=loss == "chunked")
        with group_of_one(setting.on_gpu) if engine == "fsdp2" else contextlib.nullcontext():
            return figures(run_steps("train_text", config, setting, setting.size(4, 1), setting.size(6, 1)))

    return largest_that_fits(setting.size((4, 2), (2,)), measured)


def measure_images(setting: Setting, compiled: str) -> dict[str, Any]:
    """Rates of the model that sees."""
    config = images_config(setting.scratch / f"{compiled}_images", setting)
    config["train"]["compile"] = compiled == "compile"
    return figures(run_steps("train_text", config, setting, setting.size(4, 1), setting.size(6, 1)))


def figures(steps: Steps) -> dict[str, Any]:
    rates = steps.rates("tokens")
    rates["tokens_of_a_step"] = steps.amounts["tokens"] / steps.count
    return rates | {"mfu": rates["tflops_per_s"] / PEAK_TFLOPS, "loss": steps.metrics[-1]["loss"]}


def sft_config(folder: Path, setting: Setting, rows: int, **train: Any) -> dict[str, Any]:
    """The configuration of ``tasks/train_text.py``, with its files in ``folder``; a step packs ``rows`` times 4,096
    tokens into one row."""
    folder.mkdir(parents=True, exist_ok=True)
    row = setting.size(4096, 64)
    train_path = folder / "train.jsonl"
    write_conversations(train_path, longest=row, tokens=setting.size(16, 8) * row * rows)
    return {
        "model": {
            "config_path": write_yaml(folder / "model.yaml", setting.size(QWEN3_1_7B, TINY)),
            "tokenizer_path": "bytes",
        },
        "data": {"data_type": "conversation", "train_path": str(train_path), "max_seq_len": row},
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": rows,
            "global_batch_size": rows,
            "lr": 1.0e-5,
            "mixed_precision": "bf16",
            **train,
        },
    }


def images_config(folder: Path, setting: Setting) -> dict[str, Any]:
    """The same for the model that sees: one row of up to 4,096 tokens a step."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = setting.size(((448, 672), (616, 448), (1008, 728), (280, 280)), ((16, 24), (24, 32)))
    rows = [conversation_of(index, sides) for index in range(setting.size(32, 16))]
    train_path = folder / "train.jsonl"
    train_path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    description = setting.size(QWEN2_5_VL_3B, tiny_vision_description("qwen2_5_vl"))
    return {
        "model": {"config_path": write_yaml(folder / "model.yaml", description), "tokenizer_path": "bytes"},
        "data": {
            "data_type": {"type": "image_conversation", "min_pixels": setting.size(3136, 64)},
            "train_path": str(train_path),
            "max_seq_len": setting.size(4096, 256),
        },
        "train": {
            "output_dir": str(folder / "run"),
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "lr": 1.0e-5,
            "mixed_precision": "bf16",
        },
    }


def conversation_of(index: int, sides: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """A conversation of one to three pictures of random colours, whose heights and widths take turns."""
    pictures = [picture(*sides[(index + number) % len(sides)], seed=index) for number in range(1 + index % 3)]
    content = [{"type": "image", "image": data_url(content)} for content in pictures]
    content.append({"type": "text", "text": f"What is number {index}?"})
    answer = f"It is {index}. " * (3 + index % 5)
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_conversations(path: Path, longest: int, tokens: int) -> None:
    """Conversations of random letters, a fifth of each the question; lengths spread up to a row.

    Args:
        path: the file.
        longest: most tokens of one; the tokenizer of bytes makes one of each letter, and some of the template.
        tokens: about so many in all.
    """
    source, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < tokens:
            length = int(longest * source.uniform(0.4, 0.6)) - 32
            letters = "".join(source.choices("abcdefghij ", k=max(length, 10)))
            question, answer = letters[: len(letters) // 5], letters[len(letters) // 5 :]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
            written += len(letters) + 32


def write_yaml(path: Path, values: dict[str, Any]) -> str:
    """Writes a description; returns its path."""
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return str(path)
