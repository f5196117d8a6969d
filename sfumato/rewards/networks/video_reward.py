"""The network of VideoReward, made of transformers' Qwen2-VL, and its published weights, merged or with an adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.networks.folder import assign_tensors, check_folder, iterate_tensors, loader_of, read_json
from sfumato.rewards.networks.qwen2_vl import (
    INSTRUCTION_FILE,
    PROMPT_FIELD,
    QwenRater,
    build_body,
    format_chat,
    read_instruction,
    rename_weight,
    scaled_size,
)

DIMENSIONS = ("VQ", "MQ", "TA")
REWARD_TOKENS = tuple(f"<|{dimension}_reward|>" for dimension in DIMENSIONS)
SETTINGS_FILE = "model_config.json"
WEIGHTS_FILE = "VideoReward.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
TRAINED_FILE = "non_lora_state_dict.safetensors"
FRAME_MULTIPLE = 2
LEAST_FRAMES = 4
MOST_FRAMES = 768
LEAST_PIXELS = 128 * 28 * 28
LORA_PARTS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class VideoRewardSettings:
    """What ``model_config.json`` says of how videos are prepared, of the adapter and of the published scale."""

    fps: float
    """Frames that are taken of each second."""
    max_pixels: int
    """Most pixels of a frame."""
    lora_scale: float
    """Factor of the product of an adapter's matrices."""
    means: tuple[float, ...]
    stds: tuple[float, ...]
    """Of visual quality, motion quality and text alignment: the scores are standardised by them; 0 and 1 where the
    file has none."""


class VideoRewardNetwork(QwenRater):
    """Scores videos with their prompts."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        files = (SETTINGS_FILE, INSTRUCTION_FILE, f"{WEIGHTS_FILE}|{ADAPTER_FILE}")
        super().__init__(folder, device, dtype, "qwen2_vl", files, REWARD_TOKENS)
        self.settings = read_settings(folder / SETTINGS_FILE)
        self.instruction = read_instruction(folder / INSTRUCTION_FILE, REWARD_TOKENS)
        weights = merge_adapter(read_weights(folder), self.settings.lora_scale, folder)
        head = {
            name.removeprefix("rm_head."): weights.pop(name).to(device, torch.float32)
            for name in list(weights)
            if name.startswith("rm_head.")
        }
        self.model = build_body(folder, weights, REWARD_TOKENS, len(self.tokenizer), device, dtype)
        # one output for all tokens, or one for each
        num_outputs = len(head["weight"]) if "weight" in head else 1
        if num_outputs not in (1, len(DIMENSIONS)):
            raise ConfigError(f"model_path {folder}: rm_head.weight has {num_outputs} outputs instead of 1 or 3")
        width = self.model.config.text_config.hidden_size
        self.head = assign_tensors(nn.Linear(width, num_outputs, bias=False), head, folder)

    def __call__(self, videos: list[np.ndarray], frame_rates: list[float], prompts: list[str]) -> torch.Tensor:
        """Visual quality, motion quality and text alignment, standardised, float32 ``[B, 3]``.

        Args:
            videos: uint8 ``[F, H, W, 3]`` of at least two frames.
            frame_rates: their frames per second.
            prompts: B texts.

        Raises:
            DataError: a video of one frame.
        """
        prepared = [self._prepare(video, rate) for video, rate in zip(videos, frame_rates, strict=True)]
        patches = torch.cat([patches for patches, _ in prepared])
        grids = torch.tensor([grid for _, grid in prepared])
        texts = [
            format_chat("<|video_pad|>" * count, self.instruction.replace(PROMPT_FIELD, prompt))
            for prompt, count in zip(prompts, self.count_tokens(grids), strict=True)
        ]
        seen = self.model.get_video_features(patches.to(self.device, self.dtype), grids.to(self.device))
        states = self.rated_states(texts, seen, self.model.config.video_token_id)
        logits = self.head(states).view(len(videos), len(DIMENSIONS), -1)
        scores = logits.diagonal(dim1=1, dim2=2) if logits.shape[-1] > 1 else logits[..., 0]
        means, stds = torch.tensor([self.settings.means, self.settings.stds], device=self.device)
        return (scores - means) / stds

    def _prepare(self, video: np.ndarray, frame_rate: float) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Normalised patches of a video, ``[patches, C * span * P * P]``, and how many there are in each direction."""
        chosen = video[choose_frames(len(video), frame_rate, self.settings.fps)]
        height, width = scaled_size(chosen.shape[1], chosen.shape[2], LEAST_PIXELS, self.settings.max_pixels)
        frames = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in chosen]
        batch = self.processor(images=frames, do_resize=False, return_tensors="pt")
        span = self.processor.temporal_patch_size
        # The processor takes each frame for a picture, whose patches hold it ``span`` times: the first is taken of
        # each, and those of ``span`` frames become one patch.
        rows, columns = batch.image_grid_thw[0, 1:].tolist()
        shape = (len(frames) // span, span, rows * columns, len(self.processor.image_mean), span, -1)
        single = batch.pixel_values.reshape(*shape)[..., 0, :]
        return single.permute(0, 2, 3, 1, 4).flatten(2).flatten(0, 1), (len(frames) // span, rows, columns)


load_video_reward = loader_of(VideoRewardNetwork)


def choose_frames(total: int, frame_rate: float, fps: float) -> list[int]:
    """Indices of the frames of a video that are looked at, ascending: evenly spaced, an even number.

    Args:
        total: frames of the video.
        frame_rate: its frames per second.
        fps: frames to take of each second, at least four of a video.

    Raises:
        DataError: a video of one frame.
    """
    if total < FRAME_MULTIPLE:
        raise DataError(f"a video of {total} frame: VideoReward needs at least {FRAME_MULTIPLE}")
    most = min(MOST_FRAMES, total) // FRAME_MULTIPLE * FRAME_MULTIPLE
    count = round(min(max(total / frame_rate * fps, LEAST_FRAMES), most) / FRAME_MULTIPLE) * FRAME_MULTIPLE
    return torch.linspace(0, total - 1, count).round().long().tolist()


def read_settings(path: Path) -> VideoRewardSettings:
    """What ``model_config.json`` of a checkpoint says. Raises ConfigError for a checkpoint of another kind."""
    described = read_json(path)

    def section(name: str) -> JsonObject:
        value = described.get(name)
        if not isinstance(value, dict):
            raise ConfigError(f"{path} has no {name}: take the file beside VideoReward's checkpoint")
        return value

    data = section("data_config")
    expected = (
        ("prompt_template_type", data.get("prompt_template_type"), "detailed_special"),
        ("use_special_tokens", section("model_config").get("use_special_tokens"), True),
        ("sample_type", data.get("sample_type", "uniform"), "uniform"),
        ("num_frames", data.get("num_frames"), None),
    )
    for name, value, supported in expected:
        if value != supported:
            raise ConfigError(f"{path}: {name} is {value!r}, but only {supported!r} is supported")
    lora = described.get("peft_lora_config") or {}
    scale = 1.0
    if lora.get("lora_enable"):
        rank = _read_positive_number(path, lora, "lora_r")
        scale = _read_positive_number(path, lora, "lora_alpha") / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    published = described.get("inference_config")
    means = (0.0,) * len(DIMENSIONS)
    stds = (1.0,) * len(DIMENSIONS)
    if published is not None:
        means = tuple(_read_number(path, published, f"{dimension}_mean") for dimension in DIMENSIONS)
        stds = tuple(_read_positive_number(path, published, f"{dimension}_std") for dimension in DIMENSIONS)
    max_pixels = int(_read_positive_number(path, data, "max_frame_pixels"))
    return VideoRewardSettings(_read_positive_number(path, data, "fps"), max_pixels, scale, means, stds)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder by the names of ``Qwen2VLModel``, without the language head; an adapter's are apart.

    With an adapter these are the base model's, overlaid by those that were trained with it. Raises ConfigError when
    a file is missing or broken.
    """
    files = [folder / WEIGHTS_FILE]
    if not files[0].is_file():
        check_folder(folder, "model*.safetensors", TRAINED_FILE)
        files = [*sorted(folder.glob("model*.safetensors")), folder / TRAINED_FILE, folder / ADAPTER_FILE]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in iterate_tensors(folder, file.name):
            # names of a peft model: a prefix, and the adapted layer as a part of its own
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")
            if not plain.startswith("lm_head."):
                weights[rename_weight(plain)] = tensor
    return weights


def merge_adapter(weights: dict[str, torch.Tensor], scale: float, folder: Path) -> dict[str, torch.Tensor]:
    """Weights in which each product ``scale * B A`` of an adapter is added to its matrix, computed in float32.

    Raises ConfigError for an adapter's matrix without the other, or without the matrix that it changes.
    """
    down, up = LORA_PARTS
    layers = sorted({name.removesuffix(part) for part in LORA_PARTS for name in weights if name.endswith(part)})
    merged = dict(weights)
    for layer in layers:
        missing = [name for name in (layer + down, layer + up, f"{layer}.weight") if name not in weights]
        if missing:
            raise ConfigError(f"model_path {folder}: missing keys: {', '.join(missing)}, for the adapter of {layer}")
        product = merged.pop(layer + up).float() @ merged.pop(layer + down).float()
        base = weights[f"{layer}.weight"]
        merged[f"{layer}.weight"] = (base.float() + scale * product).to(base.dtype)
    return merged


def _read_number(path: Path, section: JsonObject, name: str) -> float:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{path}: {name} must be a number, not {value!r}")
    return float(value)


def _read_positive_number(path: Path, section: JsonObject, name: str) -> float:
    value = _read_number(path, section, name)
    if value <= 0:
        raise ConfigError(f"{path}: {name} must be above 0, not {value:g}")
    return value
