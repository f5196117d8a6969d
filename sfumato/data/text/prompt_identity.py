"""What a resumed run of RL must find unchanged about the prompts of a language model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.identity import content_of_media, content_of_model_file, digest_value
from sfumato.data.media.document_media import MediaRefs
from sfumato.data.media.kinds import File
from sfumato.data.text.prompts import TextPrompt
from sfumato.tracking.identity import Identity, identify

if TYPE_CHECKING:
    from sfumato.config.rl import RLConfig


def identify_text_prompts(config: RLConfig, prompts: list[TextPrompt], eval_prompts: list[TextPrompt]) -> Identity:
    """The identity of a task of RL of language models; see ``identify``. Prompts are compared by their tokens."""

    def digest(split: list[TextPrompt]) -> str:
        return digest_value([[prompt.token_ids, prompt.metadata, *_digest_media(prompt.images)] for prompt in split])

    names = {"data.train_path": digest(prompts), "data.eval_path": digest(eval_prompts)}
    media = [file for prompt in prompts for file in _files_of(prompt.images)]
    names |= content_of_media(config, media, "data.train_path (its images and other media)")
    names |= content_of_named_files(config, content_of_model_file)
    sizes = ("num_prompts", "n", "over_sampling_batch_size", "partial_rollout")
    return identify(config, names, {f"rollout.{name}": getattr(config.rollout, name) for name in sizes})


def _digest_media(images: MediaRefs | None) -> list[object]:
    """Name and size of each file of the media, or a digest of a medium that is in no file.

    ``content_of_media`` compares the content of the files.
    """
    return [
        [str(file), file.stat().st_size] if isinstance(file, Path) else hashlib.blake2b(file).hexdigest()
        for file in _files_of(images)
    ]


def _files_of(images: MediaRefs | None) -> list[File]:
    media = [] if images is None else images.find()
    return [cast(File, getattr(medium, "file", medium)) for medium in media]
