"""What a reward server and its clients send: msgpack maps of plain types, pixels as PNG. Nothing is ever unpickled.

A request:      {version: 2, reward: text, samples: [sample, ...]}
A sample:       {image: PNG or nil, text: text or nil, source: PNG or nil, prompt: text, metadata: JSON text,
                group_id: integer, messages: JSON text or nil, num_tokens: integer, is_truncated: bool}
An answer:      {version: 2, values: [float or nil, ...], failures: [text or nil, ...]}
A description:  {version: 2, rewards: {label: {groupwise: true or false, fingerprint: text}}, max_batch_size: integer,
                max_request_mib: integer}

A sample is an image, a video (a list of PNGs in the place of one) or a text. PNGs are RGB of 8 bits. Each place of an
answer has a value or a failure. Unknown and missing keys, other types, and other versions are refused on both sides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from PIL import Image

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import DataError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.http.message_reader import MessageReader, WireError, import_msgpack
from sfumato.serving.bounded_json import BYTES_OF_A_VALUE, count_values, load_json

VERSION = 2
MEDIA_TYPE = "application/msgpack"
MAX_PIXEL_BYTES = 2**31
"""Decoded pixels of one request."""
MAX_PICTURE_PIXELS = 2**26
"""Pixels of one picture or frame."""
PICTURE_BYTES = 7
"""Bytes that a pixel takes for a while when its picture is decoded: four in Pillow's image, three in its copy."""
MAX_METADATA_BYTES = 2**29
"""Memory of the metadata of one request, as far as values are counted without being read."""
MAX_METADATA_VALUES = 2**20
"""Values in the metadata of one sample, brackets and commas in texts included."""
MAX_SAMPLES = 2**16
MAX_FRAMES = 2**14
MAX_REWARDS = 1000

SAMPLE_FIELDS: dict[str, tuple[type | None, ...]] = {
    "image": (bytes, None),
    "text": (str, None),
    "source": (bytes, None),
    "prompt": (str,),
    "metadata": (str,),
    "group_id": (int,),
    "messages": (str, None),
    "num_tokens": (int,),
    "is_truncated": (bool,),
}
"""Keys of a sample and the types of their values."""

_MAX_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample as it arrived, with pictures, metadata and messages not yet decoded."""

    image: bytes | list[bytes] | None
    text: str | None
    source: bytes | None
    prompt: str
    metadata: str
    group_id: int
    messages: str | None
    num_tokens: int
    is_truncated: bool


@dataclass(frozen=True)
class EncodedRequest:
    """A request as it arrived."""

    reward: str
    samples: list[EncodedSample]
    decoded_bytes: int
    """About the memory that its pictures and metadata will take, at most."""


@dataclass(frozen=True)
class ServedReward:
    """A reward of a server, as clients are told of it."""

    groupwise: bool
    fingerprint: str
    """A digest that is equal for equal settings of equal versions; servers that share a load must agree on it."""


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """The rewards of a server, and the limits of a request."""

    rewards: dict[str, ServedReward]
    max_batch_size: int
    """Samples of a request, unless they are one group."""
    max_request_mib: int
    """Size of a request's body."""


def encode_sample(sample: Sample) -> dict[str, object]:
    """A sample as it is sent, without the sound of a video and the images of a prompt.

    Raises DataError when its metadata cannot be written as JSON.
    """
    return {
        "image": _encode_pixels(sample.image),
        "text": sample.text,
        "source": _encode_pixels(sample.source),
        "prompt": sample.prompt,
        "metadata": encode_metadata(sample.prompt, sample.metadata),
        "group_id": sample.group_id,
        "messages": None if sample.messages is None else json.dumps(sample.messages),
        "num_tokens": int(sample.num_tokens),
        "is_truncated": sample.is_truncated,
    }


def encoded_size(sample: Mapping[str, object]) -> int:
    """An upper bound of the bytes that an encoded sample takes in a request."""
    pictures = [
        sample["source"] or b"",
        *(sample["image"] if isinstance(sample["image"], list) else [sample["image"] or b""]),
    ]
    texts = [sample["text"] or "", sample["prompt"], sample["metadata"], sample["messages"] or ""]
    # a character of UTF-8 takes 4 bytes at most; 8 and 150 are for msgpack's lengths and keys
    return sum(len(picture) + 8 for picture in pictures) + 4 * sum(map(len, texts)) + 150


def pixel_bytes(sample: Sample) -> int:
    """Bytes of a sample's pixels, which count towards MAX_PIXEL_BYTES."""
    return sum(pixels.nbytes for pixels in (sample.image, sample.source) if pixels is not None)


def encode_metadata(prompt: str, metadata: Mapping[str, object]) -> str:
    """Metadata as JSON. Raises DataError that names the prompt and the column that is no JSON."""
    try:
        return json.dumps(metadata)
    except (TypeError, ValueError):  # once more, column by column, to name the one that is to blame
        for name, value in metadata.items():
            try:
                json.dumps({name: value})
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"column {name!r} of prompt {prompt!r} cannot be sent to a reward server: {error}; leave it out of "
                    "the data file"
                ) from error
        raise


def encode_request(reward: str, samples: Sequence[Mapping[str, object]]) -> bytes:
    """The body that asks for the values of a reward, of encoded samples."""
    return import_msgpack().packb({"version": VERSION, "reward": reward, "samples": list(samples)})


def read_request(data: bytes | bytearray, is_given_up: Callable[[], bool] = lambda: False) -> EncodedRequest:
    """The samples of a request, whose pictures and metadata are not decoded but counted.

    Args:
        data: the body.
        is_given_up: asked between samples; when it is true nobody waits any more.

    Raises:
        WireError: it is no request, or one of more than a request may hold.
    """
    reader = MessageReader(data)
    reward = ""
    samples = []
    for name in reader.fields("", ("version", "reward", "samples")):
        if name == "version":
            _read_version(reader)
        elif name == "reward":
            reward = reader.value(name, str)
        else:
            for number in reader.items(name, MAX_SAMPLES):
                if is_given_up():
                    raise WireError("nobody waits for it any more")
                samples.append(_read_sample(reader, f"samples.{number}"))
    reader.end()  # nothing may follow the message
    if not samples:
        raise WireError("samples: there must be at least 1 item")
    return EncodedRequest(reward, samples, _decoded_bytes(samples))


def decode_samples(request: EncodedRequest, is_given_up: Callable[[], bool] = lambda: False) -> list[Sample]:
    """The samples of a request. Args and errors as of ``read_request``."""
    decoded = []
    for number, sample in enumerate(request.samples):
        if is_given_up():
            raise WireError("nobody waits for it any more")
        with _prefix_errors(f"samples.{number}"):
            decoded.append(
                Sample(
                    image=_decode_pixels(sample.image),
                    text=sample.text,
                    source=_decode_pixels(sample.source),
                    prompt=sample.prompt,
                    metadata=_decode_metadata(sample.metadata),
                    group_id=sample.group_id,
                    messages=_decode_messages(sample.messages),
                    num_tokens=sample.num_tokens,
                    is_truncated=sample.is_truncated,
                )
            )
    return decoded


def decode_request(data: bytes | bytearray) -> tuple[str, list[Sample]]:
    """The label of the reward and the samples of a request. Raises WireError."""
    request = read_request(data)
    return request.reward, decode_samples(request)


def encode_answer(values: Sequence[float], reasons: Sequence[str]) -> bytes:
    """The body that answers a request.

    Args:
        values: one per sample; NaN where there is a reason.
        reasons: why a sample has no value; "" where it has one.
    """
    numbers = [None if reason else float(value) for value, reason in zip(values, reasons, strict=True)]
    failures = [reason[:_MAX_REASON] or None for reason in reasons]
    return import_msgpack().packb({"version": VERSION, "values": numbers, "failures": failures})


def decode_answer(data: bytes, num_samples: int) -> list[float | Failure]:
    """A server's value, or failure, of each sample. Raises WireError unless there is one for every sample."""
    reader = MessageReader(data)
    lists = {"values": [], "failures": []}
    kinds: dict[str, tuple[type | None, ...]] = {"values": (float, None), "failures": (str, None)}
    for name in reader.fields("", ("version", *lists)):
        if name == "version":
            _read_version(reader)
        else:
            lists[name] = [reader.value(f"{name}.{place}", *kinds[name]) for place in reader.items(name, MAX_SAMPLES)]
            if len(lists[name]) != num_samples:
                raise WireError(f"{len(lists[name])} {name} for {num_samples} samples")
    reader.end()
    return [
        _value_or_failure(value, failure) for value, failure in zip(lists["values"], lists["failures"], strict=True)
    ]


def encode_description(description: ServerDescription) -> bytes:
    """The body that describes a server."""
    return import_msgpack().packb({"version": VERSION, **dataclasses.asdict(description)})


def decode_description(data: bytes) -> ServerDescription:
    """Reads the body that describes a server. Raises WireError."""
    reader = MessageReader(data)
    fields: JsonObject = {}
    for name in reader.fields("", ("version", "rewards", "max_batch_size", "max_request_mib")):
        if name == "version":
            _read_version(reader)
        elif name == "rewards":
            fields[name] = {label: _read_served(reader, label) for label in reader.keys(name, MAX_REWARDS)}
        else:
            fields[name] = reader.value(name, int)
            if fields[name] < 1:
                raise WireError(f"{name}: Input should be greater than or equal to 1")
    reader.end()
    return ServerDescription(**fields)


def _value_or_failure(value: float | None, failure: str | None) -> float | Failure:
    if failure:
        return Failure(f"the server says: {failure[:_MAX_REASON]}")
    if value is None:
        return Failure("the server gave neither value nor reason")
    return value if math.isfinite(value) else Failure(f"the server returned {value}")


def _read_version(reader: MessageReader) -> None:
    version = reader.value("version", int)
    if version != VERSION:
        raise WireError(f"version {str(version)[:20]} of the protocol, not {VERSION}: install one sfumato at both ends")


def _read_served(reader: MessageReader, label: str) -> ServedReward:
    fields: JsonObject = {}
    for name in reader.fields(f"rewards.{label[:40]}", ("groupwise", "fingerprint")):
        fields[name] = reader.value(f"rewards.{label[:40]}.{name}", bool if name == "groupwise" else str)
    return ServedReward(**fields)


def _read_sample(reader: MessageReader, place: str) -> EncodedSample:
    fields: JsonObject = {}
    for name in reader.fields(place, tuple(SAMPLE_FIELDS)):
        field_place = f"{place}.{name}"
        if name == "image" and reader.is_list():
            fields[name] = [
                reader.value(f"{field_place}.{frame}", bytes) for frame in reader.items(field_place, MAX_FRAMES)
            ]
        else:
            fields[name] = reader.value(field_place, *SAMPLE_FIELDS[name])
    if (fields["image"] is None) == (fields["text"] is None):
        raise WireError(f"{place}: not either an image or a text")
    return EncodedSample(**fields)


def _decoded_bytes(samples: Sequence[EncodedSample]) -> int:
    """About the memory that decoding will take, from the headers of the PNGs and the count of values in metadata.

    Nothing is decoded here, so a small body that would unpack to much is refused before it does. Raises WireError.
    """
    pixel_bytes = metadata_bytes = largest = 0
    for number, sample in enumerate(samples):
        with _prefix_errors(f"samples.{number}"):
            frames = sample.image if isinstance(sample.image, list) else [sample.image]
            sizes = [_size_of_png(data) for data in (*frames, sample.source) if data is not None]
            pixel_bytes = pixel_bytes + sum(sizes)
            largest = max(largest, *sizes, 0)
            if pixel_bytes > MAX_PIXEL_BYTES:
                raise WireError(f"more than {MAX_PIXEL_BYTES / 2**20:g} MiB of pixels in a request: send fewer samples")
            num_values = count_values(sample.metadata) + count_values(sample.messages or "")
            metadata_bytes += BYTES_OF_A_VALUE * num_values
            if metadata_bytes > MAX_METADATA_BYTES:
                raise WireError("more metadata than a request may hold: send fewer samples")
    return pixel_bytes + metadata_bytes + largest * PICTURE_BYTES // 3


@contextlib.contextmanager
def _prefix_errors(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise WireError(f"{place}: {error}") from error


def _decode_metadata(text: str) -> dict[str, object]:
    metadata = load_json(text, max_values=MAX_METADATA_VALUES)
    if not isinstance(metadata, dict):
        raise WireError("metadata is no JSON object")
    return metadata


def _decode_messages(text: str | None) -> list[JsonObject] | None:
    if text is None:
        return None
    messages = load_json(text, max_values=MAX_METADATA_VALUES)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise WireError("messages are no list of JSON objects")
    return cast("list[JsonObject]", messages)


def _encode_pixels(pixels: np.ndarray | None) -> bytes | list[bytes] | None:
    if pixels is None or pixels.ndim == 3:
        return None if pixels is None else encode_png(pixels)
    return [encode_png(frame) for frame in pixels]


def encode_png(image: np.ndarray) -> bytes:
    """The PNG file of an image, uint8 [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _decode_pixels(data: bytes | list[bytes] | None) -> np.ndarray | None:
    """uint8 [H, W, 3] of a PNG, [F, H, W, 3] of a list of them."""
    if data is None or isinstance(data, bytes):
        return None if data is None else _decode_png(data)
    if not data:
        raise WireError("a video without frames")
    # one array for all frames, so that they are not held twice
    first = _decode_png(data[0])
    frames = np.empty((len(data), *first.shape), np.uint8)
    for number, png in enumerate(data):
        frame = first if number == 0 else _decode_png(png)
        if frame.shape != first.shape:
            raise WireError("the frames of a video differ in size")
        frames[number] = frame
    return frames


def _size_of_png(data: bytes) -> int:
    """Bytes of its pixels, read from its header."""
    with _open_png(data) as image:
        return image.width * image.height * 3


def _decode_png(data: bytes) -> np.ndarray:
    """uint8 [H, W, 3]."""
    with _open_png(data) as image:
        return np.array(image)


@contextlib.contextmanager
def _open_png(data: bytes) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.mode != "RGB":
                raise WireError(f"a PNG of mode {image.mode}, not RGB with 8 bits")
            if image.width * image.height > MAX_PICTURE_PIXELS:
                raise WireError(f"a PNG of {image.width} x {image.height} pixels, more than {MAX_PICTURE_PIXELS:,}")
            yield image
    except WireError:
        raise
    except Exception as error:  # Pillow raises errors of many kinds for broken files
        raise WireError(f"no readable PNG ({type(error).__name__})") from error
