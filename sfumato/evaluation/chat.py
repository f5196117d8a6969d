"""A conversation with a language model, whose answers are shown while they are drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sfumato.config.writing import open_new
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, DataError
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.sources import ModelSource
from sfumato.evaluation.texts import TextModel, generation_settings, replaced_settings
from sfumato.rollout.engines.base import GenerationRequest
from sfumato.rollout.kinds.base import request_seed

UNFINISHED = "\ufffd"
"""What the decoder shows at the end for a character of which some bytes are not drawn yet."""


@dataclass(frozen=True)
class Answer:
    """What a model answered."""

    text: str
    ending: str
    """``stop``, ``length`` (it reached a limit), or ``interrupted``."""


class ChatSession:
    """The messages so far. A turn that fails leaves them as they were."""

    def __init__(self, model: TextModel) -> None:
        """Begins anew; the system prompt is in the model's template."""
        self.model = model
        self.messages: list[dict[str, object]] = []
        self._num_turns = 0

    def reset(self) -> None:
        """Forgets everything: the same messages then get the same answers again."""
        self.messages = []
        self._num_turns = 0

    def undo(self) -> bool:
        """Removes the last message of the user with its answer. Returns whether there was one."""
        if not self.messages:
            return False
        self.messages = self.messages[:-2]
        return True

    def say(self, text: str, images: list[Path], show: Callable[[str], None]) -> Answer:
        """Draws the answer to a message.

        Args:
            text: of the user.
            images: that precede it.
            show: is given the answer in pieces, while it is drawn.

        Returns:
            The answer; one that was interrupted (Ctrl-C) stays in the conversation as far as it came, an empty one does
            not, nor the message that it answers.

        Raises:
            UserError: when an image is broken or not taken, or the conversation is longer than the model takes.
        """
        content: str | list[dict[str, str]] = text
        if self.model.data_type.has_images:  # in a text by itself <image> would ask for an image
            content = [{"type": "image", "path": str(image.absolute())} for image in images]
            content.append({"type": "text", "text": text})
        elif images:
            raise DataError("this model sees no images: its folder has no processor for them")
        messages = [*self.messages, {"role": "user", "content": content}]
        (prompt,) = self.model.prompts_of([{"prompt": messages}])
        answer = self._draw(prompt, show)
        self._num_turns += 1
        if answer.text.strip():
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def save(self, path: Path) -> None:
        """Writes the conversation as a row of messages, as training reads it.

        Raises:
            DataError: when there is nothing to write, or the file is there already or cannot be written.
        """
        if not self.messages:
            raise DataError("there is nothing to save yet")
        row = json.dumps({"messages": self.messages}, ensure_ascii=False)
        if path.exists():
            raise DataError(f"{path} is there already: name another file")
        try:
            with open_new(path) as file:
                file.write(f"{row}\n".encode("utf-8", "replace"))
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error

    def _draw(self, prompt: TextPrompt, show: Callable[[str], None]) -> Answer:
        model = self.model
        settings = model.settings
        limits = model.limits(len(prompt.token_ids))
        room = limits.room(len(prompt.token_ids), len(prompt.token_ids))
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt.token_ids)} tokens, and the model takes {model.longest}: /undo "
                "or /reset"
            )
        engine = model.engine(len(prompt.token_ids) + room, is_for_training=False)
        token_ids: list[int] = []
        shown = ""

        def show_token(token: int) -> None:
            nonlocal shown
            token_ids.append(token)
            text = model.template.decode(token_ids)
            if not text.endswith(UNFINISHED) and text.startswith(shown):
                show(text[len(shown) :])
                shown = text

        seed = request_seed(settings.seed, "chat", self._num_turns, 0)
        request = GenerationRequest(prompt.token_ids, seed, room, images=prompt.images, on_token=show_token)
        try:
            ending: str = asyncio.run(engine.generate(request, settings.sampling)).finish_reason
        except KeyboardInterrupt:
            ending = "interrupted"
            model.drop_engine()  # a second Ctrl-C may have come in the middle of a step
        text = model.template.decode(token_ids)
        if text.startswith(shown):
            show(text[len(shown) :])
        return Answer(text, ending)


def prepare_chat(model: TextModel, source: ModelSource, options: GenerationOptions) -> None:
    """Sets how a model answers in a chat: as the folder that it comes from says, not as a run evaluates.

    Raises:
        ConfigError: when its tokenizer has no chat template.
    """
    if model.template.chat is None:
        raise ConfigError(
            f"{source.folder}: its tokenizer has no chat template, so it continues texts and does not chat: give "
            "--chat-template chatml, or take `sfumato sample --prompt TEXT`"
        )
    folder = source.folder
    if source.run is not None and source.kind != "transformers" and source.run.config.model.model_path is not None:
        folder = Path(source.run.config.model.model_path)
    settings = generation_settings(folder, model.template)
    model.settings = replaced_settings(settings, options)
    if options.system_prompt is not None:
        model.template = replace(model.template, system_prompt=options.system_prompt)
