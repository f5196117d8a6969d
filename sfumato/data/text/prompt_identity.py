"""What a resume must find unchanged of the prompts of a language model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.identity import content_of_media, content_of_model_file, digest_value
from sfumato.data.media.pictures import File
from sfumato.data.media.vision import Images
from sfumato.data.text.prompts import TextPrompt
from sfumato.tracking.identity import Identity, identify


def identify_text_prompts(config: Any, prompts: list[TextPrompt], eval_prompts: list[TextPrompt]) -> Identity:
    """The identity of a task of RL of language models; see ``identify``. Prompts count with their tokens."""

    def content(some: list[TextPrompt]) -> str:
        return digest_value([[prompt.token_ids, prompt.metadata, *_media(prompt.images)] for prompt in some])

    names = {"data.train_path": content(prompts), "data.eval_path": content(eval_prompts)}
    media = [file for prompt in prompts for file in _files_of(prompt.images)]
    names |= content_of_media(config, media, "data.train_path (its images and other media)")
    names |= content_of_named_files(config, content_of_model_file)
    sizes = ("num_prompts", "n", "over_sampling_batch_size", "partial_rollout")
    return identify(config, names, {f"rollout.{name}": getattr(config.rollout, name) for name in sizes})


def _media(images: Images | None) -> list[Any]:
    """Of images what they hold, or the names and sizes of their files; what these hold is compared beside it."""
    return [
        [str(file), file.stat().st_size] if isinstance(file, Path) else hashlib.blake2b(file).hexdigest()
        for file in _files_of(images)
    ]


def _files_of(images: Images | None) -> list[File]:
    return [getattr(each, "file", each) for each in ([] if images is None else images.find())]
