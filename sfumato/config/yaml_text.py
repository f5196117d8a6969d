"""YAML as values, and values as YAML.

YAML is read strictly; what is made to unpack without end, or to nest without end, is refused.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from sfumato.config.base import Section
from sfumato.config.file_checks import file_problem
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError

MAX_BYTES = 2**20
"""Size of the largest text that is read."""

MAX_DEPTH = 50
"""Most levels of lists and mappings."""

MAX_VALUES = 20_000
"""Most values, where one that an alias repeats counts each time."""


NO_TEXTS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "null", "timestamp")}
"""Tags that YAML gives to scalars without quotes where they are no texts."""


class _Loader(yaml.SafeLoader):
    """``1e-5`` is a number, a key that stands twice is an error; depth and number of values are bounded."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counts levels and values while the tree of nodes is built.

        Aliases cost nothing there; only objects made from the tree would take the memory, so the count comes first.
        """
        event = self.peek_event()
        depth, self.depth = getattr(self, "depth", 0), getattr(self, "depth", 0) + 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f"{_format_mark(event.start_mark)}: nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth = depth
        sizes = self.__dict__.setdefault("sizes", {})
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in sizes:
                raise ConfigError(f"{_format_mark(event.start_mark)}: *{event.anchor} stands within what it repeats")
            return node
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in below for part in (child if isinstance(child, tuple) else (child,))]
        sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
        if sizes[id(node)] > MAX_VALUES:
            raise ConfigError(
                f"{_format_mark(event.start_mark)}: stands for more than {MAX_VALUES:,} values, with all that aliases "
                "repeat"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """A mapping without keys that stand twice; keys are texts, as they are written."""
        seen: set[Hashable] = set()
        node.value = [(_as_text(key_node), value_node) for key_node, value_node in node.value]
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # another is refused below
                if key in seen:
                    raise ConfigError(f"{_format_mark(key_node.start_mark)}: key {key!r} stands twice")
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _as_text(node: yaml.Node) -> yaml.Node:
    """The node of a scalar as one of text, where YAML would take it for something else."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in NO_TEXTS:
        return node
    return yaml.ScalarNode("tag:yaml.org,2002:str", node.value, node.start_mark, node.end_mark)


class _TextLoader(_Loader):
    """Every scalar is the text that stands for it."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        return super().construct_object(_as_text(node), deep)


def _construct_int(_: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number, in which a leading zero means nothing."""
    text = node.value.replace("_", "").lower()
    return int(text, 16 if "0x" in text else 2 if "0b" in text else 10)


# Numbers are those of YAML 1.2. YAML 1.1 reads 1e-5 as a text, 010 as 8 and 1:30 as 90, the last two of which nobody
# means who writes a configuration.
NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)",
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|"
        r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag not in NUMBERS]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str, name: str, as_written: bool = False) -> Any:
    """The value of a YAML text.

    Args:
        text: of one document.
        name: where it is from, for messages.
        as_written: give each scalar as text; `no` is then not false.

    Raises:
        ConfigError: when it is broken, too large, nested too deep, or repeats too much by aliases.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: has {len(text):,} characters, more than the {MAX_BYTES:,} that are read")
    try:
        return copy.deepcopy(_construct(text, name, _TextLoader if as_written else _Loader))
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None)
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None or "\n" not in text.strip() else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{where} is not valid YAML: {problem or ' '.join(str(error).split())}") from error
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        # what the constructors of dates, numbers and tags raise for a text that is none
        raise ConfigError(f"{name} is not valid YAML: a value that its tag or form does not allow: {error}") from error


@functools.lru_cache(maxsize=64)
def _construct(text: str, name: str, loader_class: type[_Loader]) -> object:
    """The value of a YAML text. It is remembered: a configuration whose task is looked for is read once for each."""
    loader = loader_class(text)
    loader.name = name
    return loader.get_single_data()


def _format_mark(mark: yaml.Mark) -> str:
    return f"{mark.name}:{mark.line + 1}"


def read_yaml(path: str | Path, as_written: bool = False) -> JsonObject:
    """Reads a YAML file that holds a mapping; ``as_written`` as for ``parse_yaml``.

    Raises ConfigError that names the file and the line.
    """
    path = Path(path)
    problem = file_problem(path, MAX_BYTES)
    if problem == "does not exist":
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"configuration file not found: {path}{hint}")
    if problem is not None:
        raise ConfigError(f"configuration file {path} {problem}")
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8-sig"), str(path), as_written)
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(loaded).__name__}")
    return loaded


def config_text(config: Section) -> str:
    """The resolved configuration as YAML, which can be run again as it is."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
