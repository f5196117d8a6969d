"""Draws an image for a prompt: the policy draws its codes as tokens, and rewards see the decoded image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sfumato.config.paths import ModelPath
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt
from sfumato.data.text.token_ids import token_id
from sfumato.errors import ConfigError
from sfumato.models.omni.hf_image_tokenizers import OwnCodes, family_of, read_own_codes
from sfumato.models.omni.image_tokenizer import ImageTokenizer
from sfumato.rewards.base import load_once
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys
from sfumato.rollout.text.tokens import GrowingSequence

if TYPE_CHECKING:
    from sfumato.rewards.base import Sample


@dataclass(frozen=True, kw_only=True)
class DrawingKind(RolloutKind):
    """An image, code by code, of a model that tasks/train_omni.py exports, or of Emu3 or Janus."""

    type: ClassVar[str] = "drawing"
    modality: ClassVar[str] = "image"

    image_tokenizer: ModelPath
    """Folder of the image tokenizer, such as hf_ckpt/image_tokenizer of that export; of Emu3 and Janus that of the
    model."""
    size: tuple[int, int] | None = None
    """Height and width in pixels of what Emu3 draws; null: its own."""

    def __post_init__(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", tuple(self.size))

    def prepare(self, template: PromptTemplate) -> None:
        """Raises ConfigError when the tokenizer has not the tokens of this image tokenizer."""
        if template.reader is not None:
            raise ConfigError(
                "rollout.kind drawing: prompts are text alone: take a data.data_type without images (prompts)"
            )
        image_tokenizer = self._tokenizer
        vocabulary = template.tokenizer.get_vocab()
        names = [image_tokenizer.text.code.format(code) for code in (0, image_tokenizer.codebook_size - 1)]
        missing = [name for name in names if name not in vocabulary]
        if missing:
            raise ConfigError(
                f"rollout.kind drawing: the tokenizer of model.model_path has no token {missing[0]}: take the folder "
                "hf_ckpt/foundation of a run of tasks/train_omni.py with this image tokenizer, or for both the folder "
                "of a model that draws by itself"
            )

    @property
    def _tokenizer(self) -> ImageTokenizer | OwnCodes:
        return _load((self.image_tokenizer, self.size))

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """As ``RolloutKind.draw``. A sample with tokens that are no codes gets a blank image, so that the policy learns
        not to draw such tokens."""
        image_tokenizer = self._tokenizer
        text = image_tokenizer.text
        first = token_id(template.tokenizer, text.code.format(0))
        opening = template.tokenizer(text.opening, add_special_tokens=False)["input_ids"]
        line_end = [token_id(template.tokenizer, text.line_end)] if text.line_end else []
        sequence = GrowingSequence.after_prompt([*prompt.token_ids, *opening])
        columns = text.columns or image_tokenizer.num_codes
        starts = range(0, image_tokenizer.num_codes, columns)
        needed = image_tokenizer.num_codes + len(line_end) * (len(starts) - 1)
        if limits.room(len(sequence), len(sequence)) < needed:
            raise ConfigError(
                f"rollout.max_new_tokens must be at least {needed}, the codes of an image and the ends of its lines, "
                "and there must be room for them"
            )
        codes: list[int] = []
        for start in starts:
            if start:
                sequence.append_given(line_end)
            line = await sequence.draw(engine, keys.request_seed(), columns, sampling, first_position=start)
            codes += [token - first for token in line]  # the tokens of codes have consecutive ids
            if len(codes) < start + columns:  # a token that ends an answer
                break
        has_all_codes = len(codes) == image_tokenizer.num_codes
        is_whole = has_all_codes and all(0 <= code < image_tokenizer.codebook_size for code in codes)
        blank = np.full((image_tokenizer.height, image_tokenizer.width, 3), 255, np.uint8)
        image = image_tokenizer.decode([codes])[0] if is_whole else blank
        return DrawnImage([sequence.freeze()], "", image=image)


@dataclass(frozen=True)
class DrawnImage(DrawnText):
    """A sample whose result is an image."""

    image: np.ndarray | None = None
    """uint8 ``[H, W, 3]``."""

    def sample(self, prompt: TextPrompt, group_id: int) -> Sample:
        """The sample as rewards see it."""
        return replace(super().sample(prompt, group_id), image=self.image, text=None)


def _read(source: tuple[str, tuple[int, int] | None]) -> ImageTokenizer | OwnCodes:
    folder = Path(source[0])
    size = source[1]
    if family_of(folder) is not None:
        return read_own_codes(folder, size)
    if size is not None:
        raise ConfigError("rollout.kind drawing: size is of Emu3; this image tokenizer knows its own: remove it")
    return ImageTokenizer.from_folder(folder)


_load = load_once(_read)
