"""What runs inside the sandboxes: the answer in one, its tests in another, with pipes between them.

The process of the tests holds nothing that the answer could reach: it sends calls and gets values back as plain data,
so that an answer can neither see what is expected, nor change ``assert``, nor bring objects that equal everything.
This file is copied into the sandboxes and imports nothing of the library.

    python sandbox_worker.py answer    descriptors 3 (calls) and 4 (values); runs answer.py
    python sandbox_worker.py check     descriptors 3 (results), 4 (values) and 5 (calls); runs tests.json
"""

from __future__ import annotations

import builtins
import copy
import importlib
import json
import operator
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

PLAIN = (str, bool, type(None))
LARGEST = 64 * 2**20


class CannotSendError(Exception):
    """A test gives the answer something that is no plain data, such as a function."""


class AnswerError(Exception):
    """The answer raised something that is no builtin exception, or has ended."""


def send(file: BinaryIO, value: object) -> None:
    """One message: its length, and JSON."""
    content = json.dumps(value).encode()
    file.write(struct.pack("Q", len(content)) + content)
    file.flush()


def receive(file: BinaryIO) -> Any:
    """The next message. Raises EOFError when there is none."""
    header = file.read(8)
    if len(header) < 8:
        raise EOFError
    (length,) = struct.unpack("Q", header)
    if length > LARGEST:
        raise EOFError
    content = file.read(length)
    if len(content) < length:
        raise EOFError
    return json.loads(content)


_LISTS = {"l": list, "t": tuple, "s": set, "z": frozenset}


def encode(value: object, other: Callable[[Any], object]) -> object:
    """A value as JSON: plain data with a tag for its type, which JSON alone would lose.

    A subclass is sent as the builtin type that it derives from.

    Args:
        value: any object.
        other: makes JSON of an object that is no plain data.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, int):
        return ["i", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "a", bytes(value).hex()]
    if isinstance(value, Decimal | Fraction):
        return ["n" if isinstance(value, Decimal) else "q", str(value)]
    if isinstance(value, range):
        return ["r", [encode(item, other) for item in (value.start, value.stop, value.step)]]
    for tag, kind in _LISTS.items():
        if isinstance(value, kind):
            return [tag, [encode(item, other) for item in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(key, other), encode(item, other)] for key, item in dict.items(value)]]
    return other(value)


def decode(value: Any, other: Callable[[object], object]) -> Any:
    """The value that ``encode`` made JSON of, of builtin types only.

    Args:
        value: JSON.
        other: gives the object for JSON with an unknown tag.

    Raises:
        ValueError, TypeError, KeyError: it is no such JSON.
    """
    if type(value) in PLAIN:
        return value
    tag = value[0]
    content = value[1]
    if tag in _LISTS:
        return _LISTS[tag](decode(item, other) for item in content)
    if tag == "d":
        return {decode(key, other): decode(item, other) for key, item in content}
    if tag == "r":
        return range(*(decode(item, other) for item in content))
    if tag == "c":
        return complex(float.fromhex(content), float.fromhex(value[2]))
    simple = {"i": lambda text: int(text, 16), "f": float.fromhex, "b": bytes.fromhex, "n": Decimal, "q": Fraction,
              "a": bytearray.fromhex}  # fmt: skip
    return simple[tag](content) if tag in simple else other(value)


def _run(source: str, name: str, space: dict[str, Any]) -> None:
    """Runs code of somebody else, without the ``annotations`` of this file's first import."""
    exec(compile(source, name, "exec", dont_inherit=True), space)


# The answer


def run_answer() -> None:
    """Runs the answer, then what the tests ask of it."""
    calls = os.fdopen(3, "rb")
    values = os.fdopen(4, "wb")
    # a module that can be looked up, as dataclasses and typing look for the one of a class
    module = sys.modules["answer"] = types.ModuleType("answer")
    space = module.__dict__
    with open("/tmp/answer.py", encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    handles: list[object] = []

    def to_handle(value: object) -> object:
        handles.append(value)
        return ["h", len(handles) - 1]

    def from_handle(value: Any) -> object:
        return handles[value[1]]

    try:
        _run(source, "answer.py", space)
        problem = None
    except BaseException as error:
        problem = _describe(error)
    while True:
        verb, target, arguments, named = receive(calls)
        try:
            if problem:
                send(values, {"error": problem})
                continue
            positional = [decode(argument, from_handle) for argument in arguments]
            keywords = {name: decode(argument, from_handle) for name, argument in named.items()}
            if isinstance(target, str) and not target.isidentifier() and target not in space:
                # an entry point such as Solution().add: of one object for all calls
                space[target] = eval(target, space)
            receiver = handles[target] if isinstance(target, int) else space[target]
            result = _perform(verb, receiver, positional, keywords)
            reply = {"value": encode(result, to_handle)}
            if result is None:
                reply["arguments"] = [encode(argument, to_handle) for argument in positional]
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the answer are its own, too
            reply = {"error": _describe(error)}
        send(values, reply)


def _perform(verb: str, receiver: Any, positional: list[object], keywords: dict[str, object]) -> object:
    if verb == "call":
        return receiver(*positional, **keywords)
    if verb == "next":
        try:
            return [next(receiver)]
        except StopIteration:
            return []
    functions = {"getattr": getattr, "getitem": operator.getitem, "setitem": operator.setitem, "len": len, "str": str,
                 "repr": repr, "iter": iter, "bool": bool}  # fmt: skip
    return functions[verb](receiver, *positional)


def _describe(error: BaseException) -> list[str]:
    try:
        return [type(error).__name__, str(error)[:300]]
    except BaseException:
        return ["Exception", ""]


# The tests


class Remote:
    """Stands in the tests for an object of the answer that is no plain data.

    Calls, attributes and items are asked of the answer's process. It equals itself alone: a comparison that the answer
    defines would let it pass any test.
    """

    def __init__(self, target: object, pipes: tuple[BinaryIO, BinaryIO]) -> None:
        self.__dict__["_target"] = target
        self.__dict__["_pipes"] = pipes

    def __call__(self, *positional: object, **keywords: object) -> object:
        return self._ask("call", positional, keywords)

    def __getattr__(self, name: str) -> object:
        return self._ask("getattr", (name,))

    def __getitem__(self, key: object) -> object:
        return self._ask("getitem", (key,))

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("setitem", (key, value))

    def __len__(self) -> int:
        return self._ask("len", ())

    def __bool__(self) -> bool:
        return self._ask("bool", ()) is True

    def __str__(self) -> str:
        return self._ask("str", ())

    def __repr__(self) -> str:
        return self._ask("repr", ())

    def __deepcopy__(self, memo: object) -> object:
        return self

    def __iter__(self) -> Iterator[object]:
        iterator = self._ask("iter", ())
        while items := iterator._ask("next", ()):
            yield items[0]

    def _ask(self, verb: str, positional: tuple[object, ...], keywords: Mapping[str, object] | None = None) -> Any:
        values, calls = self.__dict__["_pipes"]
        arguments = [encode(argument, _refer_to) for argument in positional]
        named = {name: encode(argument, _refer_to) for name, argument in (keywords or {}).items()}

        def remote_of(value: Any) -> Remote:
            return Remote(int(value[1]), (values, calls))

        try:
            send(calls, [verb, self.__dict__["_target"], arguments, named])
            reply = receive(values)
            if "error" not in reply:
                result = decode(reply["value"], remote_of)
                if result is None and verb == "call":
                    _take_over(positional, [decode(argument, remote_of) for argument in reply["arguments"]])
                return result
            name, text = (str(argument) for argument in reply["error"])
        except Exception as error:
            raise AnswerError(f"the answer has ended, or sent no values: {type(error).__name__}") from None
        raise _rebuild_exception(name, text)


def _rebuild_exception(name: str, text: str) -> Exception:
    """The builtin exception of that name, if there is one that is made of a text."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # it is made of more than a text: the line below has its name and text
            pass
    return AnswerError(f"{name}: {text}")


def _refer_to(value: object) -> object:
    if isinstance(value, Remote):
        return ["h", value.__dict__["_target"]]
    raise CannotSendError(f"a test gives the answer a {type(value).__name__}, which cannot be sent to it")


def _take_over(before: tuple[Any, ...], after: list[object]) -> None:
    """Brings lists, dicts and sets of the test to the state in which the answer's function left its copies.

    Only for a call that returned None, as a function that sorts in place does.
    """
    for old, new in zip(before, after, strict=True):
        if type(old) is list and type(new) is list:
            old[:] = new
        elif type(old) in (dict, set) and type(new) is type(old):
            old.clear()
            old.update(new)  # pyright: ignore[reportAttributeAccessIssue]  # a dict or a set: type() narrows nothing


class Space(dict):
    """Names of the tests. One that they do not define is a module of the standard library, or the answer's."""

    def __init__(self, entry_point: str, pipes: tuple[BinaryIO, BinaryIO]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.entry_point = entry_point
        self.pipes = pipes

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        if self.entry_point and name != self.entry_point:
            raise KeyError(name)
        return Remote(name, self.pipes)


def check() -> None:
    """Runs the tests one after the other, and writes a line for each: true, false, or why it cannot be run."""
    results = os.fdopen(3, "w")
    pipes = (os.fdopen(4, "rb"), os.fdopen(5, "wb"))
    with open("/tmp/tests.json", encoding="utf-8") as file:
        request = json.load(file)
    entry_point = request["entry_point"]
    space = Space(entry_point, pipes)
    _run(request["setup"], "setup", space)
    if entry_point:
        space[entry_point] = Remote(entry_point, pipes)
    for source in request["tests"]:
        try:
            _run(source, "test", space)
            if "check" in space and entry_point and "def check" in source:
                space["check"](space[entry_point])
            line: object = True
        except CannotSendError as error:
            line = str(error)
        except BaseException:  # whatever a test raises, it has not passed; SystemExit too
            line = False
        results.write(json.dumps(line) + "\n")
        results.flush()


if __name__ == "__main__":
    copy.deepcopy(None)  # loads what tests use most before any time counts
    {"answer": run_answer, "check": check}[sys.argv[1]]()
