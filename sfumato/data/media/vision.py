"""Images, videos and audio in text: placeholders among its tokens, the model's tensors of them, and rotary positions.

transformers' own processor of the model makes all of these. A document names its media, which are opened when a batch
is made. The preprocessing of the data has found before how many tokens each medium takes, and its grid of patches.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sfumato.config.open_mappings import Keywords
from sfumato.data.media.clips import Clip, VideoProcessor
from sfumato.data.media.document_media import KINDS, MediaRefs, MultimodalInputs, Span, Tensors, join_media
from sfumato.data.media.kinds import NAMES, AudioFile, File, Medium, VideoFile
from sfumato.data.media.pictures import check_image, read_image
from sfumato.data.media.processor_files import save_processor
from sfumato.data.media.sounds import Sound, check_sound, read_sound
from sfumato.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor
    from transformers import BatchFeature

PER_TOKEN = frozenset(("labels", "moe_mm_token_type_ids"))
"""Arguments of transformers' models besides ``KINDS`` that processors give for each token: the answer of PaliGemma,
which alone is causal, and the experts of ERNIE 4.5 VL."""

KIND_OF = {VideoFile: "video", AudioFile: "audio", Clip: "video", Sound: "audio"}
"""The kind of a medium by its type, of files and of opened media; a medium of any other type is an image."""


class MediaProcessor:
    """Turns the media of one document at a time into tokens and tensors, by transformers' processor of the model.

    It can be pickled, since worker processes preprocess data.
    """

    def __init__(
        self,
        processor: Any,
        arguments: Sequence[str],
        patches: tuple[int, float],
        filled_to: int | None = None,
        least_samples: int = 0,
        begins: Iterable[int] = (),
    ) -> None:
        """Use ``build_vision``.

        Args:
            processor: transformers' processor with its tokenizer.
            arguments: names of the arguments that the model's ``forward`` takes.
            patches: edge of a patch in pixels, of models that cut images into tiles of one size; and tokens of the
                language model for each patch.
            filled_to: number of patches that every image is padded to, where the model's processor pads images.
            least_samples: fewest samples of audio; transformers computes shorter audio differently beside longer.
            begins: tokens that stand before media, of models that find media by them.
        """
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.arguments = [name for name in arguments if name not in ("input_ids", "attention_mask")]
        """Arguments of ``forward`` that media may give."""
        self._patch = patches[0]
        self.tokens_per_patch = patches[1]
        """Tokens of the language model for each patch of the encoder."""
        self.filled_to = filled_to
        """Patches that every image is padded to; None where images are not padded."""
        self._least_samples = least_samples
        self._begins = {*begins}
        self.media: tuple[str, ...] = ("image",) if self.sees else ("audio",)
        """Kinds of media that documents may have: image, and video or audio or both, or audio alone."""
        self.is_likely = True
        """Whether the model gives tokens of images a probability above 0."""
        self.draws = False
        """Whether tokens of images are codes that the model may learn to write; otherwise no loss may hold them."""

    @property
    def fingerprint(self) -> str:
        """Identifies how images become tokens and pixels."""
        settings = f"{type(self.processor).__name__} {self.placeholders()[self.media[0]]}"
        if self.sees:
            settings = f"{settings} {self.processor.image_processor.to_json_string()}"
        processor_settings = {
            name: value for name, value in vars(self.processor).items() if isinstance(value, (int, float, str, bool))
        }
        if self.sees and hasattr(self.processor.image_processor, "image_grid_pinpoints"):
            # Older versions counted the padding among the tiles: this word keeps their stored tokens from being used.
            settings += " tiles that are not filled up"
        if "batch_num_images" in self.arguments:  # LLaVA-OneVision, likewise
            settings += " several images without tiles"
        if "video" in self.media:
            settings = f"{settings} {self.processor.video_processor}"
        if "audio" in self.media:
            settings = f"{settings} {self.processor.feature_extractor.to_json_string()}"
        return hashlib.blake2b(f"{settings} {sorted(processor_settings.items())}".encode(), digest_size=16).hexdigest()

    @property
    def sees(self) -> bool:
        """Whether the model takes images; a model that takes none takes audio."""
        return hasattr(self.processor, "image_processor")

    def check_sees(self) -> None:
        """Raises ConfigError for a model that takes no images."""
        if not self.sees:
            raise ConfigError(
                f"data.data_type: the model of {type(self.processor).__name__} hears, and sees no images: take "
                "media_conversation, or media_prompts of RL"
            )

    def placeholders(self) -> dict[str, str]:
        """The text that the chat template writes for a medium, by the kinds that documents may have."""
        return {kind: getattr(self.processor, f"{kind}_token") for kind in self.media}

    def with_media(self, **limits: Any) -> MediaProcessor:
        """A reader that takes videos and audio, too, as far as the model does.

        Args:
            limits: arguments of ``VideoProcessor.limited``.

        Raises:
            ConfigError: when the model takes neither in a way that is supported, or limits contradict each other.
        """
        videos = getattr(self.processor, "video_processor", None)
        takes_videos = isinstance(videos, VideoProcessor)
        takes_audio = getattr(self.processor, "feature_extractor", None) is not None
        video_limits = [name for name, limit in limits.items() if limit is not None]
        if not takes_videos and takes_audio and video_limits:
            raise ConfigError(
                f"data.data_type: {type(self.processor).__name__} takes no videos: remove their limits "
                f"({video_limits[0]})"
            )
        if not takes_videos and not takes_audio:
            raise ConfigError(
                f"data.data_type: the videos of {type(self.processor).__name__} need torchvision in transformers, and "
                "are not supported: take a model of the Qwen2-VL, Qwen2.5-VL or Qwen3-VL family, or data_type "
                "image_conversation"
            )
        reader = copy.copy(self)
        reader.processor = copy.copy(self.processor)
        if takes_videos:
            reader.processor.video_processor = videos.limited(**limits)
        reader.media = (*["image"] * self.sees, *["video"] * takes_videos, *["audio"] * takes_audio)
        return reader

    def open(self, medium: Medium | Clip | Sound, where: str) -> Image.Image | Clip | Sound:
        """Opens a file; what has been opened is returned as it is.

        Raises:
            DataError: when the file is broken, or of a kind that the model does not take.
            ValueError: when the processor refuses a video.
        """
        if isinstance(medium, Clip | Sound):
            return medium
        if (kind := KIND_OF.get(type(medium), "image")) not in self.media:
            raise DataError(
                f"{where}: {NAMES[kind]}: {type(self.processor).__name__} takes {' and '.join(self.media)} alone"
            )
        if isinstance(medium, VideoFile):
            return self.processor.video_processor.read(medium.file, where)
        if isinstance(medium, AudioFile):
            audio = self.processor.feature_extractor
            sound = read_sound(medium.file, audio.sampling_rate, audio.chunk_length, where)
            if len(sound.samples) < self._least_samples:
                rate = audio.sampling_rate
                raise DataError(
                    f"{where}: audio of {len(sound.samples) / rate:.2f} s: this model is trained on "
                    f"{self._least_samples / rate:g} s or more; transformers computes a shorter one otherwise beside "
                    "a longer: fill it up with silence"
                )
            return sound
        return read_image(cast("File", medium), where)  # a ``DrawnFile`` never comes here: no encoder sees it

    def noise(self, seconds: float, generator: np.random.Generator) -> Sound:
        """Random audio of this many seconds, or of the fewest samples that the model takes."""
        count = max(self._least_samples, round(seconds * self.processor.feature_extractor.sampling_rate))
        return Sound(generator.uniform(-0.5, 0.5, count).astype(np.float32))

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> MediaProcessor:
        """A reader that scales images to numbers of pixels within these limits; None keeps the processor's own limit.

        Raises:
            ConfigError: when the processor scales all images to a size of its own.
        """
        if min_pixels is None and max_pixels is None:
            return self
        if not self.sees:
            raise ConfigError(
                f"data.data_type.min_pixels and max_pixels: {type(self.processor).__name__} takes no images: remove "
                "them"
            )
        size = dict(self.processor.image_processor.size or {})
        if not {"shortest_edge", "longest_edge"} <= size.keys() or not self.has_grid:
            raise ConfigError(
                f"data.data_type.min_pixels and max_pixels: {type(self.processor).__name__} scales images to a size of "
                f"its own ({size}): remove them"
            )
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        size |= {name: value for name, value in limits.items() if value is not None}
        if size["shortest_edge"] > size["longest_edge"]:
            raise ConfigError(
                f"data.data_type: images of at least {size['shortest_edge']} pixels and at most "
                f"{size['longest_edge']}: min_pixels must not be above max_pixels (one that is null is the "
                "processor's)"
            )
        reader = copy.copy(self)
        reader.processor = copy.copy(self.processor)
        reader.processor.image_processor = copy.deepcopy(self.processor.image_processor)
        reader.processor.image_processor.size = type(self.processor.image_processor.size)(**size)
        return reader

    def place(self, images: Sequence[Image.Image | Clip | Sound]) -> tuple[list[str], np.ndarray]:
        """The placeholder text of each medium, as many tokens as it takes, and the shapes of ``MediaRefs``.

        Raises:
            ValueError: when the processor refuses one.
        """
        if not images:
            return [], np.zeros((0, 3), np.int32)
        features = self._process(images)
        replacements = [entry["replacement"] for entry in features["text_replacement_offsets"][0]]
        return replacements, self._media_shapes(features, images)

    def place_files(self, files: Sequence[Medium], where: str) -> tuple[list[str], np.ndarray]:
        """Opens files and places them, as ``place``. Raises DataError when one is broken, or refused."""
        try:
            return self.place([self.open(file, where) for file in files])
        except UserError:  # is a ValueError, too, and names the file and row itself
            raise
        except ValueError as error:
            kinds = " or ".join(NAMES[kind] for kind in self.media)
            raise DataError(f"{where}: {type(self.processor).__name__} refuses {kinds}: {error}") from error

    def expand(self, text: str, spans: list[Span], replacements: Sequence[str], where: str) -> tuple[str, list[Span]]:
        """Puts the placeholder texts of media into a rendered conversation, and moves its spans accordingly.

        Args:
            text: as the chat template renders it, with one placeholder for each medium.
            spans: begin and end of stretches of the text, which contain no placeholder in part.
            replacements: the text of each medium, from ``place``.
            where: file and row, for messages.

        Returns:
            The text with the replacements, and where the spans are in it.

        Raises:
            DataError: when there are more or fewer placeholders, or a text holds a token that stands for a part of a
                medium.
        """
        placeholders = self.placeholders().values()
        places = [match.span() for match in re.finditer("|".join(map(re.escape, placeholders)), text)]
        if len(places) != len(replacements):
            raise DataError(
                f"{where}: the conversation has {len(places)} placeholders ({', '.join(placeholders)}) for "
                f"{len(replacements)} {'s and '.join(self.media)}s"
            )
        beginnings = self.tokenizer.convert_ids_to_tokens(sorted(self._begins))
        if beginnings and sum(map(text.count, beginnings)) != len(places):
            raise DataError(
                f"{where}: this model finds media by the tokens before them, and {' and '.join(beginnings)} stand "
                f"{sum(map(text.count, beginnings))} times in a conversation of {len(places)} images, videos and "
                "audios: remove them from texts; the chat template writes one before each"
            )
        parts = []
        new_spans = [list(span) for span in spans]
        last = 0
        for (start, stop), replacement in zip(places, replacements, strict=True):
            parts += [text[last:start], replacement]
            longer = len(replacement) - (stop - start)
            for span, before in zip(new_spans, spans, strict=True):
                span[0] += longer if before[0] >= stop else 0
                span[1] += longer if before[1] >= stop else 0
            last = stop
        expanded = "".join([*parts, text[last:]])
        for token in self._part_tokens():
            if expanded.count(token) != sum(replacement.count(token) for replacement in replacements):
                raise DataError(
                    f"{where}: a text holds {token}, which the model takes for a part of an image, a video or a sound: "
                    "remove it from the row"
                )
        return expanded, [(start, stop) for start, stop in new_spans]

    def _part_tokens(self) -> list[str]:
        """The tokens that stand for a part of a medium, of all kinds that the model's processor knows."""
        lists = (getattr(self.processor, f"{kind}_token_ids", ()) for kind in ("image", "video", "audio"))
        token_ids = {token_id for ids in lists for token_id in ids} - {None, self.tokenizer.unk_token_id}
        return self.tokenizer.convert_ids_to_tokens(sorted(token_ids))

    def tensors(self, images: MediaRefs) -> Tensors:
        """The arguments of the model's ``forward`` that the media of a document give.

        Raises:
            DataError: when one is broken, or has changed since its tokens were made.
        """
        opened = [self.open(medium, images.where) for medium in images.find()]
        features = self._process(opened)
        self.check_shapes(self._media_shapes(features, opened) if opened else np.zeros((0, 3)), images)
        return self._model_inputs(features)

    def check_shapes(self, shapes: np.ndarray, images: MediaRefs) -> None:
        """Raises DataError when media have other shapes than when their tokens were made."""
        if not np.array_equal(shapes, images.shapes):
            kinds = " or ".join(NAMES[kind] for kind in self.media)
            raise DataError(f"{images.where}: {kinds} has another size than when the data was preprocessed")

    def process_opened(self, media: Sequence[Image.Image | Clip | Sound]) -> Tensors:
        """As ``tensors``, for media that have been opened; their shapes are not compared."""
        return self._model_inputs(self._process(media))

    def _model_inputs(self, features: Mapping[str, object]) -> Tensors:
        """The features that the model's ``forward`` takes, as tensors; kinds of tokens are computed elsewhere."""
        names = [name for name in self.arguments if name in features and name not in KINDS]
        if unknown := PER_TOKEN.intersection(names):
            raise ValueError(f"it gives {min(unknown)}, a value for each token of a text, which is unknown here")
        return {name: torch.as_tensor(np.asarray(features[name])) for name in names}

    def kinds(self, input_ids: np.ndarray) -> np.ndarray:
        """The kind of each token: int64 ``[L]``, 0 text, 1 image, 2 video, 3 audio."""
        return np.asarray(self._mark_kinds([input_ids.tolist()])[0], np.int64)

    def _mark_kinds(self, input_ids: list[list[int]]) -> list[list[int]]:
        """``create_mm_token_type_ids`` of the processor, or where that asks for more than tokens (Idefics3, which marks
        those around an image, too) of all processors."""
        from transformers import ProcessorMixin

        if len(inspect.signature(self.processor.create_mm_token_type_ids).parameters) > 1:
            return ProcessorMixin.create_mm_token_type_ids(self.processor, input_ids)
        return self.processor.create_mm_token_type_ids(input_ids)

    def media_tokens(self) -> set[int]:
        """Ids of tokens that stand for a part of a medium, or by which the model finds one."""
        return self._begins | {*self.kinds(np.arange(len(self.tokenizer))).nonzero()[0].tolist()}

    def save(self, folder: Path, source: Path | None) -> None:
        """Writes what transformers loads the processor from: the files of the folder that the model came from."""
        save_processor(self.processor, self.media, folder, source)

    def _process(self, media: Sequence[Image.Image | Clip | Sound]) -> BatchFeature:
        """The features that transformers' processor makes of media, as if they were one text of placeholders."""
        kinds = [KIND_OF.get(type(medium), "image") for medium in media]
        clips = [medium for medium in media if isinstance(medium, Clip)]
        images = [medium for medium, kind in zip(media, kinds, strict=True) if kind == "image"]
        tokens = self.placeholders()
        # nested, as of one text: LLaVA-OneVision cuts no tiles where a text has several images
        inputs: Keywords = {"images": [images]} if images else {}
        if clips:
            inputs |= {
                "videos": [clip.frames for clip in clips],
                "video_metadata": [copy.copy(clip.metadata) for clip in clips],
            }
        if "audio" in kinds:
            inputs["audio"] = [medium.samples for medium in media if isinstance(medium, Sound)]
            inputs["sampling_rate"] = self.processor.feature_extractor.sampling_rate
        text = "".join(tokens[kind] for kind in kinds)
        features = self.processor(text=[text], return_text_replacement_offsets=True, return_tensors="np", **inputs)
        if media and "text_replacement_offsets" not in features:
            raise ValueError("it does not say which tokens stand for it in a text")
        # The processors of omni models assume two frames per second for this, whatever the video has.
        if "video_second_per_grid" in features:
            unit = self.processor.video_processor.temporal_patch_size
            features["video_second_per_grid"] = np.array(
                [unit / clip.metadata.sampled_fps for clip in clips], np.float32
            )
        return features

    @property
    def has_grid(self) -> bool:
        """Whether images are grids of patches of their own size, as those of the Qwen models."""
        return "image_grid_thw" in self.arguments

    def _media_shapes(self, features: BatchFeature, media: Sequence[Image.Image | Clip | Sound]) -> np.ndarray:
        """The shapes of ``MediaRefs``, int32 ``[N, 3]``, from the processor's features of these media."""
        if self.has_grid or not self.sees:
            shapes = {kind: iter(features.get(f"{kind}_grid_thw", ())) for kind in ("image", "video")}
            frames = np.asarray(features.get("feature_attention_mask", np.zeros((0, 0)))).sum(-1)
            shapes["audio"] = iter([(number, 0, 0) for number in frames])
            kinds = (KIND_OF.get(type(medium), "image") for medium in media)
            return np.stack([np.asarray(next(shapes[kind]), np.int32) for kind in kinds])
        count = len(media)
        if "image_position_ids" in features:  # column and row of each patch, and -1 for patches that pad an image
            columns, rows = np.asarray(features["image_position_ids"]).max(axis=1).T + 1
            return np.stack([np.ones_like(rows), rows, columns], axis=1).astype(np.int32)
        pixels = np.asarray(features["pixel_values"])
        if pixels.ndim == 5 and len(pixels) == count:  # images are padded with tiles of zeros to one number of tiles
            tiles = np.maximum(pixels.any(axis=(2, 3, 4)).sum(axis=1), 1)
        else:  # the tiles of all images follow each other; every tile takes the same number of tokens
            # of some models, as Aya Vision, another one than the chat template writes
            token = self.tokenizer.convert_ids_to_tokens(self.processor.image_token_id)
            counts = [entry["replacement"].count(token) for entry in features["text_replacement_offsets"][0]]
            if not all(counts):
                raise ValueError(f"it puts no {token} into a text")
            tiles = np.array(counts) * int(np.prod(pixels.shape[:-3])) // sum(counts)
        rows, columns = (edge // self._patch for edge in pixels.shape[-2:])
        return np.stack([tiles, np.full(count, rows), np.full(count, columns)], axis=1).astype(np.int32)


class Vision:
    """The parts that make batches for a model with media: the reader of these, and the model's rule for positions."""

    def __init__(self, reader: MediaProcessor, positions: Callable[[Tensor, Tensor, Tensors], Tensor] | None) -> None:
        """Use ``build_vision``.

        Args:
            reader: of the media.
            positions: computes rotary positions ``[3, 1, L]`` from int64 ``input_ids``, kinds ``[1, L]`` and the
                tensors of the media; None where the model numbers tokens one after the other.
        """
        self.reader = reader
        self._positions = positions
        self.idle_ids, self._idle = self._make_idle()

    def with_reader(self, reader: MediaProcessor) -> Vision:
        """The same model with another reader, such as one with other limits of images."""
        return Vision(reader, self._positions)

    @property
    def idle_length(self) -> int:
        """Tokens of the small media that are added to a batch which lacks a kind of media; see ``idle``."""
        return len(self.idle_ids)

    def ids_beside_text(self) -> np.ndarray:
        """Token ids that no text may hold: of media of all kinds that the processor knows, and around them."""
        return np.union1d(self.idle_ids, sorted(self.reader.media_tokens()))

    def multimodal_inputs(self, input_ids: np.ndarray, images: MediaRefs | None) -> MultimodalInputs:
        """The model's inputs beside the tokens of a document; waits where threads are opening the media.

        Raises DataError as ``MediaProcessor.tensors``.
        """
        if images is None or not len(images.shapes):
            return self._pad_multimodal(input_ids, {})
        return self._pad_multimodal(
            input_ids, self.reader.tensors(images) if images.opened is None else images.opened.result()
        )

    def multimodal_inputs_of_rows(
        self, rows: Sequence[Sequence[int]], media: Sequence[Tensors], width: int
    ) -> MultimodalInputs:
        """The model's inputs beside documents that have a row each, padded to ``width`` tokens.

        Args:
            rows: token ids of n documents.
            media: for each document what ``MediaProcessor.tensors`` gave; empty for one without media.
            width: tokens of the longest document, or more.

        Returns:
            Tensors of all documents, rotary positions ``[n, width, 3]`` where the model has such, and kinds
            ``[n, width]``.
        """
        documents = [
            self._pad_multimodal(np.array(row, np.int32), tensors) for row, tensors in zip(rows, media, strict=True)
        ]
        kinds = torch.zeros(len(rows), width, dtype=torch.int64)
        positions = None
        if self._positions is not None:
            assert self._idle.rope_positions is not None
            dtype = self._idle.rope_positions.dtype
            positions = torch.arange(width, dtype=dtype)[None, :, None].repeat(len(rows), 1, 3)
        for index, document in enumerate(documents):
            assert document.modality_ids is not None
            kinds[index, : len(document.modality_ids)] = document.modality_ids
            if positions is not None:
                assert document.rope_positions is not None
                positions[index, : len(document.modality_ids)] = document.rope_positions
        return MultimodalInputs(join_media(media), positions, kinds)

    def idle(self) -> MultimodalInputs:
        """The inputs of a small image, and of a small video and audio where documents may have these.

        Their tokens are ``idle_ids``. A batch without media gets them so that the rank takes part in the collectives
        of the encoder on the other ranks, and the encoder's gradients are zero instead of None. An encoder runs once
        for images and once for videos, so a batch that lacks either kind gets both.
        """
        return self._idle

    def is_complete(self, media: Sequence[Tensors]) -> bool:
        """Whether documents together have each kind of media that the model is trained with."""
        return self._idle.tensors.keys() <= {name for tensors in media for name in tensors}

    def _pad_multimodal(self, input_ids: np.ndarray, tensors: Tensors) -> MultimodalInputs:
        kinds = torch.from_numpy(self.reader.kinds(input_ids))
        if self._positions is None:
            return MultimodalInputs(tensors, None, kinds)
        if not tensors:
            assert self._idle.rope_positions is not None
            dtype = self._idle.rope_positions.dtype
            return MultimodalInputs({}, torch.arange(len(input_ids), dtype=dtype)[:, None].expand(-1, 3), kinds)
        ids = torch.from_numpy(input_ids.astype(np.int64))
        return MultimodalInputs(tensors, self._positions(ids[None], kinds[None], tensors)[:, 0].T.contiguous(), kinds)

    def _make_idle(self) -> tuple[np.ndarray, MultimodalInputs]:
        """The token ids of the small media, int32 ``[L]``, and their inputs."""
        from PIL import Image

        media: list[Image.Image | Clip | Sound] = [Image.new("RGB", (32, 32), "white")] * self.reader.sees
        if "video" in self.reader.media:
            media.append(self.reader.processor.video_processor.blank())
        if "audio" in self.reader.media:
            media.append(Sound(np.zeros(self.reader.processor.feature_extractor.sampling_rate // 10, np.float32)))
        texts, _ = self.reader.place(media)
        input_ids = np.array(self.reader.tokenizer("".join(texts), add_special_tokens=False)["input_ids"], np.int32)
        return input_ids, self._pad_multimodal(input_ids, self.reader.process_opened(media))


def check_head(medium: Medium, where: str) -> None:
    """Reads the head of a file. Raises DataError when it is no image, no video or no audio."""
    from sfumato.data.media.videos import check_video

    check = {VideoFile: check_video, AudioFile: check_sound}.get(type(medium))
    if check is None:
        check_image(cast("File", medium), where)
    else:
        check(cast("VideoFile | AudioFile", medium).file, where)
