"""Reads msgpack of strangers piece by piece, as a message says what comes next.

Containers are entered only where a message has one, and only with as many entries as it may have; anything else is a
single value. So what is made of bytes is never deeper or longer than the message; the first mistake ends the reading.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from sfumato.errors import MissingDependencyError

WANTED = {
    bytes: "bytes",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}


class WireError(ValueError):
    """Bytes that are no message of this protocol; the message says what is wrong with them."""


class MessageReader:
    """One message.

    Args:
        data: all of it.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._unpacker = import_msgpack().Unpacker(
            io.BytesIO(data),
            max_buffer_size=max(len(data), 1),
            max_array_len=0,  # of what ``value`` reads: containers are read by the methods that count them
            max_map_len=0,
            max_ext_len=0,
        )

    def fields(self, place: str, names: Sequence[str]) -> Iterator[str]:
        """The keys of a map that has exactly these, in the order in which they come; the value must be read in between.

        Args:
            place: of the map, for errors; empty for the message.
            names: of its keys.

        Raises:
            WireError: it is no map, or has other keys.
        """
        before = f"{place}." if place else ""
        missing = dict.fromkeys(names)
        for _ in range(self._map_size(place)):
            name = self.value(f"{before}key", str)
            if name not in missing:
                raise WireError(f"{before}{name[:40]}: Extra inputs are not permitted, or it stands twice")
            del missing[name]
            yield name
        if missing:
            if not place:
                self.end()  # bytes of another kind that begin as an empty map does are none of this protocol
            raise WireError(f"{before}{next(iter(missing))}: Field required")

    def keys(self, place: str, most: int) -> Iterator[str]:
        """As ``fields``, of a map with any different keys, but with so many at most."""
        size = self._map_size(place)
        if size > most:
            raise WireError(f"{place}: {size} keys, and there may be {most}")
        seen: set[str] = set()
        for _ in range(size):
            name = self.value(f"{place}.key", str)
            if name in seen:
                raise WireError(f"{place}.{name[:40]}: stands twice")
            seen.add(name)
            yield name

    def items(self, place: str, most: int) -> Iterator[int]:
        """The places of a list, from 0 on; the item must be read in between.

        Args:
            place: of the list, for errors.
            most: items that it may have.

        Raises:
            WireError: it is no list, or a longer one.
        """
        with self._prefix_errors(place):
            try:
                size = self._unpacker.read_array_header()
            except ValueError as error:
                raise WireError("Input should be a valid list") from error
            if size > most:
                raise WireError(f"{size} items, and there may be {most}")
            if size > len(self._data) - self._unpacker.tell():  # an item is a byte at least
                raise WireError("not msgpack: it is cut off")
        yield from range(size)

    def value(self, place: str, *kinds: type | None) -> Any:
        """The next value, which is no container.

        Args:
            place: of the value, for errors.
            kinds: the types that it may have; None for nil.

        Raises:
            WireError: it is of another type.
        """
        with self._prefix_errors(place):
            try:
                value = self._unpacker.unpack()
            except ValueError as error:
                if "exceeds max_" not in str(error):
                    raise
                raise WireError(f"Input should be a valid {WANTED[kinds[0]]}") from error  # type: ignore[index]
            if type(value) in kinds or (value is None and None in kinds):
                return value
            if type(value) is int and float in kinds:
                return float(value)
            raise WireError(f"Input should be a valid {WANTED[kinds[0]]}")  # type: ignore[index]

    def is_list(self) -> bool:
        """Whether a list comes next."""
        place = self._unpacker.tell()
        return place < len(self._data) and (self._data[place] & 0xF0 == 0x90 or self._data[place] in (0xDC, 0xDD))

    def end(self) -> None:
        """Raises WireError when something is left."""
        if self._unpacker.tell() != len(self._data):
            raise WireError("not msgpack: there is more after the message")

    def _map_size(self, place: str) -> int:
        with self._prefix_errors(place or "not msgpack, or not this protocol"):
            try:
                return int(self._unpacker.read_map_header())
            except ValueError as error:
                raise WireError("Input should be a valid dictionary") from error

    @contextlib.contextmanager
    def _prefix_errors(self, place: str) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            raise WireError(f"{place}: {error}") from error
        except Exception as error:  # msgpack raises errors of many kinds for bytes that are none of its own
            raise WireError(f"{place}: not msgpack: {type(error).__name__}") from error


def import_msgpack() -> ModuleType:
    """The package. Raises MissingDependencyError."""
    try:
        import msgpack
    except ImportError as error:
        raise MissingDependencyError(
            "a reward server and its clients need a package that is missing: pip install msgpack"
        ) from error
    return msgpack
