"""An image for a prompt: its codes are the tokens that the policy draws, and rewards see the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sfumato.config.paths import FilePath
from sfumato.data.drawing import CODE, START
from sfumato.data.prompt_template import PromptTemplate
from sfumato.data.text_prompts import TextPrompt
from sfumato.errors import ConfigError
from sfumato.models.omni.image_tokenizer import ImageTokenizer
from sfumato.rewards.base import load_once
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.base import RolloutKind
from sfumato.rollout.turns import DrawnText, LengthLimits, SampleKeys, SequenceInMaking


@dataclass(frozen=True, kw_only=True)
class DrawingKind(RolloutKind):
    """An image, code by code, of a language model that tasks/train_omni.py exports."""

    type: ClassVar[str] = "drawing"
    modality: ClassVar[str] = "image"

    image_tokenizer: FilePath
    """Folder of the image tokenizer, such as hf_ckpt/image_tokenizer of that export."""

    def prepare(self, template: PromptTemplate) -> None:
        """Raises ConfigError when the tokenizer has not the tokens of this image tokenizer."""
        last = CODE.format(_load(self.image_tokenizer).codebook_size - 1)
        vocabulary = template.tokenizer.get_vocab()
        missing = [name for name in (START, CODE.format(0), last) if name not in vocabulary]
        if missing:
            raise ConfigError(
                f"rollout.kind drawing: the tokenizer of model.model_path has no token {missing[0]}: take the folder "
                "hf_ckpt/foundation of a run of tasks/train_omni.py with this image tokenizer"
            )

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """As ``RolloutKind.draw``. A sample among whose tokens are others than codes has no image; it is a blank one,
        so that the policy learns not to draw such."""
        drawn = _load(self.image_tokenizer)
        start, first = template.tokenizer.convert_tokens_to_ids([START, CODE.format(0)])
        sequence = SequenceInMaking([*prompt.token_ids, start])
        room = min(limits.room(len(sequence), len(sequence)), drawn.num_codes)
        if room < drawn.num_codes:
            raise ConfigError(
                f"rollout.max_new_tokens must be at least {drawn.num_codes}, the codes of an image, and there must be "
                "room for them"
            )
        await sequence.draw(engine, keys.request_seed(), room, sampling)
        tokens = sequence.token_ids[sequence.num_prompt_tokens :]
        codes = [token - first for token in tokens]
        is_whole = len(codes) == drawn.num_codes and all(0 <= code < drawn.codebook_size for code in codes)
        blank = np.full((drawn.height, drawn.width, 3), 255, np.uint8)
        image = drawn.decode([codes])[0] if is_whole else blank
        return DrawnImage([sequence.finished()], "", image=image)


@dataclass(frozen=True)
class DrawnImage(DrawnText):
    """What came of a prompt: an image."""

    image: Any = None
    """uint8 ``[H, W, 3]``."""

    def sample(self, prompt: TextPrompt, group_id: int) -> Any:
        """The sample as rewards see it."""
        return replace(super().sample(prompt, group_id), image=self.image, text=None)


_load = load_once(lambda folder: ImageTokenizer.from_folder(Path(folder)))
