"""YAML as people write it, read strictly; what is made to unpack without end, or to nest without end, is refused."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from sfumato.errors import ConfigError

MAX_BYTES = 2**20
"""Size of the largest text that is read."""

MAX_DEPTH = 50
"""Most levels of lists and mappings."""

MAX_VALUES = 20_000
"""Most values, where one that an alias repeats counts each time."""


class _Loader(yaml.SafeLoader):
    """``1e-5`` is a number, a key that stands twice is an error; depth and number of values are bounded."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Counts levels and values while the tree is made, before anything is made of it."""
        event = self.peek_event()
        depth, self.depth = getattr(self, "depth", 0), getattr(self, "depth", 0) + 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{_place(event.start_mark)}: nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth = depth
        sizes = self.__dict__.setdefault("sizes", {})
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in sizes:
                raise ConfigError(f"{_place(event.start_mark)}: *{event.anchor} stands within what it repeats")
            return node
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in below for part in (each if isinstance(each, tuple) else (each,))]
        sizes[id(node)] = 1 + sum(sizes[id(each)] for each in parts)
        if sizes[id(node)] > MAX_VALUES:
            raise ConfigError(
                f"{_place(event.start_mark)}: stands for more than {MAX_VALUES:,} values, with all that aliases repeat"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping without keys that stand twice."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # another is refused below
                if key in seen:
                    raise ConfigError(f"{_place(key_node.start_mark)}: key {key!r} stands twice")
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(  # YAML 1.1 reads 1e-5 as a string; this is the float of YAML 1.2
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, name: str) -> Any:
    """What a YAML text stands for.

    Args:
        text: of one document.
        name: where it is from, for messages.

    Raises:
        ConfigError: when it is broken, too large, nested too deep, or repeats too much by aliases.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: has {len(text):,} characters, more than the {MAX_BYTES:,} that are read")
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        where = name if mark is None or "\n" not in text.strip() else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{where} is not valid YAML: {problem or ' '.join(str(error).split())}") from error
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        # what the constructors of dates, numbers and tags raise for a text that is none
        raise ConfigError(f"{name} is not valid YAML: a value that its tag or form does not allow: {error}") from error


def _place(mark: Any) -> str:
    return f"{mark.name}:{mark.line + 1}"
