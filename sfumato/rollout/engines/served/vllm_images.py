"""Images of prompts for a vLLM server: scaled here, made into features by vLLM's processor."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from sfumato.data.media.document_media import MediaRefs
from sfumato.data.media.vision import MediaProcessor
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import UNEXPECTED_ANSWER, EngineError
from sfumato.rollout.engines.served.http_server import NOT_SENT

MAX_CACHED_PROMPTS = 64
"""Prompts whose rendered images are cached."""


class RenderedImages:
    """Makes the features (vLLM's word) of the images of prompts, with a cache.

    Images are scaled here to the size that training uses. vLLM's processor leaves that size as it is, so it sees the
    same pixels. The tokens of a prompt stay those of the run; vLLM must count as many tokens for each image.
    """

    def __init__(self, reader: MediaProcessor, render: Callable[[list[bytes]], Awaitable[Any]]) -> None:
        """
        Args:
            reader: of the run.
            render: ``ServerCalls.render``.

        Raises:
            ConfigError: for a model whose image tokens are not contiguous, or which is not known to work.
        """
        if not reader.has_grid or not type(reader.processor.image_processor).__name__.startswith("Qwen"):
            raise ConfigError(
                f"rollout.engine vllm: prompts with images are known of the Qwen models alone, not of those with "
                f"{type(reader.processor).__name__}: take rollout.engine embedded"
            )
        self.reader = reader
        self._render = render
        # By id of the ``MediaRefs``, which the entry keeps alive so that no other object gets the same id.
        self._rendered_features: dict[int, tuple[MediaRefs, object]] = {}
        self._under_way: dict[int, asyncio.Task[object]] = {}

    async def render_features(self, prompt_ids: Sequence[int], images: MediaRefs) -> object:
        """The features of the images in ``prompt_ids``; ``NOT_SENT`` when all requests were ended meanwhile.

        Raises:
            DataError: when an image is broken.
            EngineError: when vLLM counts another number of tokens for an image than this run.
        """
        if id(images) in self._rendered_features:
            return self._rendered_features[id(images)][1]
        if id(images) not in self._under_way:  # the samples of a group ask for the same images at the same time
            task = asyncio.ensure_future(self._render_prompt(prompt_ids, images))
            self._under_way[id(images)] = task
            task.add_done_callback(lambda _: self._under_way.pop(id(images)))
        return await asyncio.shield(self._under_way[id(images)])  # others wait for it if this caller is cancelled

    async def _render_prompt(self, prompt_ids: Sequence[int], images: MediaRefs) -> object:
        answer = await self._render(self._scale_images(images))
        if answer is NOT_SENT:
            return NOT_SENT
        spans = token_runs(self.reader.kinds(np.array(prompt_ids, np.int32)) == 1)
        try:
            features = dict(answer["features"])
            lengths = [span["length"] for span in features["mm_placeholders"]["image"]]
        except UNEXPECTED_ANSWER as error:
            raise EngineError(f"vLLM rendered images in a way that is not known: {str(answer)[:300]}") from error
        if lengths != [length for _, length in spans]:
            raise EngineError(
                f"{images.where}: vLLM makes {lengths} tokens of the images, the run "
                f"{[length for _, length in spans]}: start it with --mm-processor-kwargs '{limits_of(self.reader)}'"
            )
        features["mm_placeholders"] = {"image": [{"offset": start, "length": length} for start, length in spans]}
        if len(self._rendered_features) >= MAX_CACHED_PROMPTS:
            self._rendered_features.pop(next(iter(self._rendered_features)))
        self._rendered_features[id(images)] = images, features
        return features

    def _scale_images(self, images: MediaRefs) -> list[bytes]:
        """PNG files of the images in the sizes that training uses."""
        processor = self.reader.processor.image_processor
        files = []
        for file, (_, rows, columns) in zip(images.find(), images.shapes.tolist(), strict=True):
            image = self.reader.open(file, images.where)
            assert isinstance(image, Image.Image)
            size = columns * processor.patch_size, rows * processor.patch_size
            scaled = io.BytesIO()
            (image if image.size == size else image.resize(size, processor.resample)).save(scaled, "PNG")
            files.append(scaled.getvalue())
        return files


def limits_of(reader: MediaProcessor) -> str:
    """The limits of the area of images, for vLLM's option ``--mm-processor-kwargs``."""
    size = reader.processor.image_processor.size
    return json.dumps({"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]})


def render_request(images: Sequence[bytes]) -> dict[str, object]:
    """The body of a request to ``/v1/chat/completions/render``: a conversation of PNG files alone."""
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": content}]}


def token_runs(wanted: np.ndarray) -> list[tuple[int, int]]:
    """Begin and length of each run of true values of bool ``[L]``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    return [(int(begin), int(end - begin)) for begin, end in edges.reshape(-1, 2)]
