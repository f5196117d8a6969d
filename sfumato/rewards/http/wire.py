"""What a reward server and its clients send: msgpack maps of plain types, pixels as PNG. Nothing is ever unpickled.

A request:      {version: 1, reward: text, samples: [sample, ...]}
A sample:       {image: PNG or nil, text: text or nil, source: PNG or nil, prompt: text, metadata: JSON text,
                group_id: integer}
An answer:      {version: 1, values: [float or nil, ...], failures: [text or nil, ...]}
A description:  {version: 1, rewards: {label: {groupwise: true or false, fingerprint: text}}, max_batch_size: integer,
                max_request_mib: integer}

A sample is an image, a video (a list of PNGs in the place of one) or a text. PNGs are RGB of 8 bits. Each place of an
answer has a value or a failure. Unknown and missing keys, other types, and other versions are refused on both sides.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sfumato.errors import DataError, MissingDependencyError
from sfumato.rewards.base import Failure, Sample

VERSION = 1
MEDIA_TYPE = "application/msgpack"
MAX_PIXEL_BYTES = 2**31
"""Decoded pixels of one request."""

_MAX_REASON = 500  # characters


class WireError(ValueError):
    """Bytes that are no message of this protocol; the message says what is wrong with them."""


class _WireMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _WireSample(_WireMessage):
    image: bytes | list[bytes] | None
    text: str | None
    source: bytes | None
    prompt: str
    metadata: str
    group_id: int


class _WireRequest(_WireMessage):
    version: Literal[1]
    reward: str
    samples: list[_WireSample] = Field(min_length=1)


class _WireAnswer(_WireMessage):
    version: Literal[1]
    values: list[float | None]
    failures: list[str | None]


class ServedReward(_WireMessage):
    """What a client has to know of a reward of a server."""

    groupwise: bool
    fingerprint: str
    """A digest that is equal for equal settings of equal versions; servers that share a load must agree on it."""


class ServerDescription(_WireMessage):
    """What a server serves, and how much it takes at once."""

    version: Literal[1] = VERSION
    rewards: dict[str, ServedReward]
    max_batch_size: int = Field(ge=1)
    """Samples of a request, unless they are one group."""
    max_request_mib: int = Field(ge=1)
    """Size of a request's body."""


MessageT = TypeVar("MessageT", bound=_WireMessage)


def encode_sample(sample: Sample) -> dict[str, Any]:
    """A sample as it is sent. Raises DataError when its metadata cannot be written as JSON."""
    return {
        "image": _encode_pixels(sample.image),
        "text": sample.text,
        "source": _encode_pixels(sample.source),
        "prompt": sample.prompt,
        "metadata": encode_metadata(sample.prompt, sample.metadata),
        "group_id": sample.group_id,
    }


def encoded_size(sample: dict[str, Any]) -> int:
    """At least as many bytes as an encoded sample takes in a request."""
    pictures = [
        sample["source"] or b"",
        *(sample["image"] if isinstance(sample["image"], list) else [sample["image"] or b""]),
    ]
    texts = [sample["text"] or "", sample["prompt"], sample["metadata"]]
    return sum(len(picture) + 8 for picture in pictures) + 4 * sum(map(len, texts)) + 100


def pixel_bytes(sample: Sample) -> int:
    """What a sample counts towards MAX_PIXEL_BYTES."""
    return sum(pixels.nbytes for pixels in (sample.image, sample.source) if pixels is not None)


def encode_metadata(prompt: str, metadata: dict[str, Any]) -> str:
    """Metadata as JSON. Raises DataError that names the prompt and the column that is no JSON."""
    try:
        return json.dumps(metadata)
    except (TypeError, ValueError):
        for name, value in metadata.items():
            try:
                json.dumps({name: value})
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {name!r} of prompt {prompt!r} cannot be sent to a reward server: {error}; leave it out of "
                    "the data file"
                ) from error
        raise


def encode_request(reward: str, samples: Sequence[dict[str, Any]]) -> bytes:
    """The body that asks for the values of a reward, of encoded samples."""
    return _msgpack().packb({"version": VERSION, "reward": reward, "samples": list(samples)})


def decode_request(data: bytes) -> tuple[str, list[Sample]]:
    """The label of the reward and the samples of a request. Raises WireError."""
    message = _decode(_WireRequest, data)
    samples, rest = [], MAX_PIXEL_BYTES
    for number, sample in enumerate(message.samples):
        try:
            if (sample.image is None) == (sample.text is None):
                raise WireError("not either an image or a text")
            image = _decode_pixels(sample.image, rest)
            source = _decode_pixels(sample.source, rest - (0 if image is None else image.nbytes))
            metadata = json.loads(sample.metadata)
            if not isinstance(metadata, dict):
                raise WireError("metadata is no JSON object")
        except (ValueError, RecursionError) as error:
            raise WireError(f"samples.{number}: {error}") from error
        about = {"prompt": sample.prompt, "metadata": metadata, "group_id": sample.group_id}
        samples.append(Sample(image=image, text=sample.text, source=source, **about))
        rest -= pixel_bytes(samples[-1])
    return message.reward, samples


def encode_answer(values: Sequence[float], reasons: Sequence[str]) -> bytes:
    """The body that answers a request.

    Args:
        values: one per sample; NaN where there is a reason.
        reasons: why a sample has no value; "" where it has one.
    """
    known = [None if reason else float(value) for value, reason in zip(values, reasons, strict=True)]
    failures = [reason[:_MAX_REASON] or None for reason in reasons]
    return _msgpack().packb({"version": VERSION, "values": known, "failures": failures})


def decode_answer(data: bytes, num_samples: int) -> list[float | Failure]:
    """What a server says of each sample. Raises WireError for anything but one value or failure per sample."""
    message = _decode(_WireAnswer, data)
    for name in ("values", "failures"):
        if len(getattr(message, name)) != num_samples:
            raise WireError(f"{len(getattr(message, name))} {name} for {num_samples} samples")
    return [_value(value, failure) for value, failure in zip(message.values, message.failures, strict=True)]


def encode_description(description: ServerDescription) -> bytes:
    """The body that says what a server serves."""
    return _msgpack().packb(description.model_dump())


def decode_description(data: bytes) -> ServerDescription:
    """What a server serves. Raises WireError."""
    return _decode(ServerDescription, data)


def _value(value: float | None, failure: str | None) -> float | Failure:
    if failure:
        return Failure(f"the server says: {failure[:_MAX_REASON]}")
    if value is None:
        return Failure("the server gave neither value nor reason")
    return value if math.isfinite(value) else Failure(f"the server returned {value}")


def _decode(kind: type[MessageT], data: bytes) -> MessageT:
    try:
        plain = _msgpack().unpackb(data)
    except Exception as error:  # msgpack raises errors of many kinds for bytes that are none of its own
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error
    if isinstance(plain, dict) and plain.get("version", VERSION) != VERSION:
        raise WireError(
            f"version {str(plain['version'])[:20]} of the protocol, not {VERSION}: install one sfumato at both ends"
        )
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "message"
        raise WireError(f"{place}: {first['msg']}") from error


def _encode_pixels(pixels: np.ndarray | None) -> bytes | list[bytes] | None:
    if pixels is None or pixels.ndim == 3:
        return None if pixels is None else _encode_png(pixels)
    return [_encode_png(frame) for frame in pixels]


def _encode_png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _decode_pixels(data: bytes | list[bytes] | None, max_bytes: int) -> np.ndarray | None:
    """uint8 [H, W, 3] of a PNG, [F, H, W, 3] of a list of them."""
    if data is None or isinstance(data, bytes):
        return None if data is None else _decode_png(data, max_bytes)
    frames: list[np.ndarray] = []
    for png in data:
        frames.append(_decode_png(png, max_bytes))
        max_bytes -= frames[-1].nbytes
        if frames[-1].shape != frames[0].shape:
            raise WireError("the frames of a video differ in size")
    if not frames:
        raise WireError("a video without frames")
    return np.stack(frames)


def _decode_png(data: bytes, max_bytes: int) -> np.ndarray:
    """uint8 [H, W, 3]; its size is checked before anything is decompressed."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.mode != "RGB":
                raise WireError(f"a PNG of mode {image.mode}, not RGB with 8 bits")
            if image.width * image.height * 3 > max_bytes:
                raise WireError(f"more than {MAX_PIXEL_BYTES / 2**20:g} MiB of pixels in a request: send fewer samples")
            return np.array(image)
    except WireError:
        raise
    except Exception as error:  # Pillow raises errors of many kinds for broken files
        raise WireError(f"no readable PNG ({type(error).__name__})") from error


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MissingDependencyError(
            "a reward server and its clients need a package that is missing: pip install msgpack"
        ) from error
    return msgpack
