"""The protocol that OpenAI's API, vLLM, SGLang and others speak: one question with images, and the reply to it."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from sfumato.config.open_mappings import JsonObject
from sfumato.serving.bounded_json import load_json
from sfumato.serving.outgoing import BadAnswerError

MAX_PIXELS = 1024 * 1024
"""Larger images are scaled down to this."""
MAX_REPLY_VALUES = 2**20
"""Values in the JSON of a reply, brackets and commas in texts included."""
MAX_CANDIDATES = 1000
"""Candidates for the first token that are read."""
_EXCERPT_CHARACTERS = 200

Content = str | list[JsonObject]
"""Content of a message: a text, or a list of parts that are texts and images."""


@dataclass(frozen=True)
class ChatReply:
    """The reply of a model."""

    text: str
    refusal: str
    """Why it did not answer; empty where it did."""
    finish_reason: str
    """``stop``; ``length`` when it was cut off; ``content_filter``; or another word of the server's."""
    first_token: tuple[tuple[str, float], ...]
    """Candidates for its first token with their log-probabilities; empty where they were not given."""

    @property
    def excerpt(self) -> str:
        """The beginning of the refusal or of the text, for messages."""
        return (self.refusal or self.text)[:_EXCERPT_CHARACTERS]


def image_part(image: np.ndarray) -> dict[str, object]:
    """An image, uint8 [H, W, 3], as a part of a message: a data URI of a PNG of at most ``MAX_PIXELS``."""
    picture = Image.fromarray(image)
    if picture.width * picture.height > MAX_PIXELS:
        scale = math.sqrt(MAX_PIXELS / (picture.width * picture.height))
        size = (max(int(picture.width * scale), 1), max(int(picture.height * scale), 1))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def encode_question(model: str, content: Content, max_tokens: int, more: Mapping[str, object]) -> bytes:
    """The body of a request for the likeliest reply.

    Args:
        model: its name on the server.
        content: what the user says.
        max_tokens: length of the reply.
        more: other fields; null removes one.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        **more,
    }
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


def decode_reply(data: bytes) -> ChatReply:
    """The reply in the body of an answer. Raises BadAnswerError when it is no chat completion."""
    excerpt = data[:_EXCERPT_CHARACTERS].decode("utf-8", errors="replace")
    try:
        choice = _Completion.model_validate(_first_only(load_json(data, max_values=MAX_REPLY_VALUES))).choices[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise BadAnswerError(f"the answer is no chat completion ({place}: {first['msg']}): {excerpt!r}") from error
    except ValueError as error:
        raise BadAnswerError(f"the answer is no chat completion (body: Invalid JSON: {error}): {excerpt!r}") from error
    tokens = (choice.logprobs.content if choice.logprobs else None) or []
    return ChatReply(
        text=choice.message.text,
        refusal=choice.message.refusal or "",
        finish_reason=choice.finish_reason or "",
        first_token=tuple((candidate.token, candidate.logprob) for candidate in tokens[0].top_logprobs)
        if tokens
        else (),
    )


def _first_only(reply: object) -> object:
    """A reply cut down to what is read: the first choice, and the first candidates for its first token.

    The rest is not validated, however much of it a server sends.
    """
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        return reply
    choices = reply["choices"][:1]
    for choice in (entry for entry in choices if isinstance(entry, dict)):
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
            logprobs["content"] = tokens = logprobs["content"][:1]
            for token in (entry for entry in tokens if isinstance(entry, dict)):
                if isinstance(token.get("top_logprobs"), list):
                    token["top_logprobs"] = token["top_logprobs"][:MAX_CANDIDATES]
    return {"choices": choices}


class _Candidate(BaseModel):
    token: str
    logprob: FiniteFloat


class _Token(BaseModel):
    top_logprobs: list[_Candidate] = []


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _ContentPart(BaseModel):
    type: str
    text: str = ""


class _ChatMessage(BaseModel):
    content: str | list[_ContentPart] | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """The reply itself. Servers of models that reason may send a list of parts, with the reasoning in one."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if part.type in ("text", "output_text"))
        return self.content or ""


class _Choice(BaseModel):
    message: _ChatMessage
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
