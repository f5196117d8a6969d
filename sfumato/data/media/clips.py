"""Videos in text: which frames of a file a model is given, the size they are scaled to, and the tensors they become.

The rules are those of transformers' video processors for the Qwen models. These need torchvision; here Pillow scales
the frames, as it scales images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.data.media.kinds import File
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import BatchFeature
    from transformers.video_utils import VideoMetadata

    from sfumato.data.media.video_files import VideoHead

CONFIG_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Files of a transformers folder that may hold the settings of videos: the first that has some counts. Older folders
have them in the last."""

FRAMES_PER_SECOND = 2.0
"""Frames that are taken of each second where the folder does not say it."""


@dataclass(frozen=True)
class Clip:
    """The frames of a video that a model is given."""

    frames: np.ndarray
    """uint8 ``[T, H, W, 3]``, scaled."""
    metadata: VideoMetadata
    """Of the file: number of frames, frames per second, and the indices of the frames that were taken."""


@dataclass(frozen=True)
class VideoProcessor:
    """Stands for a transformers processor's ``video_processor``, of the Qwen models."""

    by_frame: bool
    """Whether ``size`` limits the pixels of each frame, as Qwen2-VL and Qwen2.5-VL have it, or of all together, as
    Qwen3-VL has it."""
    size: dict[str, int]
    """Least (shortest_edge) and most (longest_edge) pixels."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    image_mean: Sequence[float]
    image_std: Sequence[float]
    fps: float = FRAMES_PER_SECOND
    """Frames that are taken of each second."""
    min_frames: int = 4
    max_frames: int = 768

    def limited(
        self,
        fps: float | None,
        min_frames: int | None,
        max_frames: int | None,
        min_pixels: int | None,
        max_pixels: int | None,
    ) -> VideoProcessor:
        """The same processor with other limits; a limit that is None stays as it is.

        Raises:
            ConfigError: when a least number is above the most.
        """
        edges = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        size = self.size | {name: value for name, value in edges.items() if value is not None}
        frame_limits = {"fps": fps, "min_frames": min_frames, "max_frames": max_frames}
        frame_limits = {name: limit for name, limit in frame_limits.items() if limit is not None}
        processor = replace(self, size=size, **frame_limits)
        if processor.min_frames > processor.max_frames or size["shortest_edge"] > size["longest_edge"]:
            raise ConfigError(
                f"data.data_type: videos of {processor.min_frames} to {processor.max_frames} frames and "
                f"{size['shortest_edge']} to {size['longest_edge']} pixels: the first must not be above the second "
                "(one that is null is the processor's)"
            )
        return processor

    def choose(self, total: int, fps: float) -> list[int]:
        """The indices of the frames that are taken, ascending.

        Args:
            total: frames of the video.
            fps: frames per second of the video.
        """
        unit = self.temporal_patch_size
        if not self.by_frame:
            number = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, number).round().astype(int).tolist()
        most = min(self.max_frames, total) // unit * unit
        number = math.floor(min(max(total / fps * self.fps, self.min_frames), most) / unit) * unit
        return torch.arange(0, total, total / number).int().tolist()[:number]

    def scaled(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that frames are scaled to: multiples of a merged patch, within the limits of pixels.

        Args:
            num_frames: frames that were taken.
            height, width: of the file's frames.

        Raises:
            ValueError: when one side is more than 200 times the other.
        """
        factor = self.patch_size * self.merge_size
        unit = self.temporal_patch_size
        if not self.by_frame and min(height, width) < factor:
            larger = max(factor / height, factor / width)
            height, width = int(height * larger), int(width * larger)
        if max(height, width) / min(height, width) > 200:
            raise ValueError(f"frames of {width}x{height} pixels: the longer side is more than 200 times the shorter")
        # Qwen3-VL limits the pixels of all frames together, Qwen2-VL and Qwen2.5-VL those of each frame. As in
        # transformers, the scale is computed with the frames as they are, the comparison with rounded ones.
        counted, rounded = (1, 1) if self.by_frame else (num_frames, round(num_frames / unit) * unit)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        least, most = self.size["shortest_edge"], self.size["longest_edge"]
        if rounded * rows * columns > most:
            scale = math.sqrt(counted * height * width / most)
            rows, columns = (max(factor, math.floor(edge / scale / factor) * factor) for edge in (height, width))
        elif rounded * rows * columns < least:
            scale = math.sqrt(least / (counted * height * width))
            rows, columns = (math.ceil(edge * scale / factor) * factor for edge in (height, width))
        return rows, columns

    def read(self, source: File, where: str) -> Clip:
        """The frames of a file that the model is given, scaled.

        Args:
            source: the file, or what it holds.
            where: file and row, for messages.

        Raises:
            DataError: when it is broken or too short.
            MissingDependencyError: when OpenCV is missing.
        """
        from PIL import Image
        from transformers.video_utils import VideoMetadata

        from sfumato.data.media.videos import read_video

        def choose(head: VideoHead) -> list[int]:
            total, fps = head.num_frames, head.fps
            if total < self.temporal_patch_size:
                raise DataError(f"{where}: the video has {total} frame; the model takes at least two: give an image")
            if not fps > 0:
                raise DataError(f"{where}: the video does not say how many frames it has per second")
            return self.choose(total, fps)

        video = read_video(source, where, choose)
        frames = []
        for frame in video.frames:
            if not frames:
                height, width = self.scaled(len(video.indices), frame.height, frame.width)
            frames.append(np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC)))
        indices = np.array(video.indices)  # transformers makes timestamps of an array, whatever its annotation says
        metadata = VideoMetadata(video.total, fps=video.fps, frames_indices=indices)  # pyright: ignore[reportArgumentType]
        return Clip(np.stack(frames), metadata)

    def blank(self) -> Clip:
        """The smallest video that the model takes, white: one merged patch in each direction."""
        from transformers.video_utils import VideoMetadata

        edge = self.patch_size * self.merge_size
        count = self.temporal_patch_size
        indices = np.arange(count)
        metadata = VideoMetadata(count, fps=self.fps, frames_indices=indices)  # pyright: ignore[reportArgumentType]
        return Clip(np.full((count, edge, edge, 3), 255, np.uint8), metadata)

    def noise(self, generator: np.random.Generator) -> Clip:
        """A video as small as ``blank``, of random colours."""
        blank = self.blank()
        return replace(blank, frames=generator.integers(0, 255, blank.frames.shape, np.uint8))

    def __call__(
        self, videos: Sequence[np.ndarray], video_metadata: Sequence[VideoMetadata], **_: object
    ) -> BatchFeature:
        """Patches of scaled frames, in the order and under the names that transformers gives them.

        Args:
            videos: the frames of each video, uint8 ``[T, H, W, 3]``.
            video_metadata: of each video; passed on.
        """
        from transformers import BatchFeature

        videos_patches = [self._cut_patches(frames) for frames in videos]
        return BatchFeature(
            {
                "pixel_values_videos": np.concatenate([patches for patches, _ in videos_patches]),
                "video_grid_thw": np.array([grid for _, grid in videos_patches], np.int64),
                "video_metadata": list(video_metadata),
            }
        )

    def to_dict(self) -> dict[str, object]:
        """The content of ``video_preprocessor_config.json``, from which transformers builds its own processor."""
        fields = asdict(self)
        kind = "Qwen2VLVideoProcessor" if fields.pop("by_frame") else "Qwen3VLVideoProcessor"
        return {"video_processor_type": kind, "do_sample_frames": True, **fields}

    def _cut_patches(self, frames: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Normalised patches of a video, float32 ``[patches, 3 * temporal * size * size]``, and the grid of patches.

        The last frame is repeated up to a whole temporal patch. Patches that the model merges into one token follow
        each other.
        """
        size = self.patch_size
        merged = self.merge_size
        unit = self.temporal_patch_size
        mean, std = np.array(self.image_mean, np.float32), np.array(self.image_std, np.float32)
        pixels = (frames.astype(np.float32) / 255 - mean) / std
        num_missing = -len(pixels) % unit
        pixels = np.concatenate([pixels, np.repeat(pixels[-1:], num_missing, axis=0)]).transpose(0, 3, 1, 2)
        parts = len(pixels) // unit
        rows = pixels.shape[2] // size
        columns = pixels.shape[3] // size
        grid = pixels.reshape(parts, unit, 3, rows // merged, merged, size, columns // merged, merged, size)
        patches = grid.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(parts * rows * columns, -1)
        return patches, (parts, rows, columns)


def build_videos(kind: str, images: Any, folder: Path | None) -> VideoProcessor | None:
    """The video processor of a kind of model; None where its rules are not known here.

    Args:
        kind: transformers' ``model_type``.
        images: the image processor of the model, whose patches and normalisation videos share.
        folder: the model's files; None where the model is described by a configuration alone.

    Raises:
        ConfigError: when the folder asks for a setting that is not supported.
    """
    families = {
        "qwen2_vl": True,
        "qwen2_5_vl": True,
        "qwen2_5_omni_thinker": True,
        "qwen3_omni_moe_thinker": True,
        "qwen3_vl": False,
        "qwen3_vl_moe": False,
        "qwen3_5": False,
        "qwen3_5_moe": False,
    }
    if kind not in families:
        return None
    by_frame = families[kind]
    settings = _read_video_settings(folder)
    edge = (images.patch_size * images.merge_size) ** 2
    size = {"shortest_edge": 128 * edge, "longest_edge": 768 * edge}
    # The processors of omni models ignore the sizes that their folder states, and use these defaults.
    if not kind.endswith("_thinker"):
        older = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
        size |= dict(settings.get("size") or {}) | {name: value for name, value in older.items() if value is not None}
    if settings.get("cap_pixels_per_frame"):
        raise ConfigError(f"model.model_path {folder}: cap_pixels_per_frame of videos is not supported")
    return VideoProcessor(
        by_frame=by_frame,
        size={name: int(size[name]) for name in ("shortest_edge", "longest_edge")},
        patch_size=images.patch_size,
        temporal_patch_size=images.temporal_patch_size,
        merge_size=images.merge_size,
        image_mean=tuple(images.image_mean),
        image_std=tuple(images.image_std),
        fps=float(settings.get("fps") or FRAMES_PER_SECOND),
        min_frames=int(settings.get("min_frames") or 4),
        max_frames=int(settings.get("max_frames") or 768),
    )


def _read_video_settings(folder: Path | None) -> JsonObject:
    """The settings of videos in a model's folder; empty where it has none."""
    if folder is None:
        return {}
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            settings = read_json_object(folder / name)
            settings = settings.get("video_processor") if name == "processor_config.json" else settings
            if settings:
                return settings
    return {}
