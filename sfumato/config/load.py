"""From a YAML file and dotted overrides to a validated configuration, or to an error that says what to change.

YAML is read strictly; what is made to unpack without end, or to nest without end, is refused.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
import shlex
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from sfumato.config.as_written import with_written_texts
from sfumato.config.base import Section, inner_section, leaves
from sfumato.config.file_checks import file_problem
from sfumato.config.hub import has_hub_names, pin_revisions
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import CHECKPOINT_NAME, refuse_run_among_data
from sfumato.config.secrets import secret_problem
from sfumato.config.shipped import find_beside
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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


SectionT = TypeVar("SectionT", bound=Section)

LONGEST_SHOWN = 80
LONGEST_MESSAGE = 1200
MOST_SHOWN = 20
"""Characters of a given value that a message repeats, characters of a mistake, and mistakes."""

TOO_LARGE = "a whole number must fit into 64 bits"  # torch, numpy and files have no room for it

DEEPEST = 20
"""Dots in the name of an override."""


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


class Overrides(JsonObject):
    """Overrides as a nested mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.written: JsonObject = {}
        """The same mapping, with the text of each scalar as it was written."""


def parse_overrides(arguments: list[str]) -> Overrides:
    """Turns ``--a.b value`` and ``--a.b=value`` into a nested mapping; values are read as YAML.

    Raises ConfigError for an argument that is no override, or that has no value.
    """
    overrides = Overrides()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or len(argument) == 2 or not argument.partition("=")[0].isprintable():
            raise ConfigError(
                f"unexpected argument {shorten(argument)}: after the YAML file come overrides such as --train.lr 1e-4"
            )
        name, equals, value = argument[2:].partition("=")
        short_name = _cut(name, LONGEST_SHOWN)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(
                    f"override --{short_name} has no value: write --{short_name} VALUE (true or false for a switch)"
                )
            value = rest.pop(0)
        if name.count(".") > DEEPEST:
            raise ConfigError(f"--{short_name}: no field lies {name.count('.')} sections deep")
        try:
            parsed = parse_yaml(value, f"the value of --{short_name}")
        except ConfigError as error:
            raise ConfigError(f"{error}{_quoted_text(short_name, value)}") from error
        if isinstance(parsed, str) and _is_plain_line(value):
            parsed = value.strip()  # in which YAML would take ` #` for the begin of a comment
        target: JsonObject = overrides
        written = overrides.written
        *parents, last = name.split(".")
        for depth, parent in enumerate(parents, start=1):
            target = target.setdefault(parent, {})
            written = written.setdefault(parent, {})
            if not isinstance(target, dict):
                above = ".".join(parents[:depth])
                raise ConfigError(f"--{short_name} goes into --{above}, which another override sets to a plain value")
        target[last] = parsed
        written[last] = parse_yaml(value, f"the value of --{short_name}", as_written=True)
    return overrides


def _quoted_text(name: str, value: str) -> str:
    """The end of a message about an override that may be meant as text: how it is written where YAML reads it so."""
    if len(value) > LONGEST_SHOWN or not _is_plain_line(value):
        return ""
    return f"; as a text it is written --{name} {shlex.quote(json.dumps(value, ensure_ascii=False))}"


def _is_plain_line(value: str) -> bool:
    """Whether the text of an override is one line without YAML's quotes, blocks, anchors and tags."""
    return "\n" not in value.strip() and value.strip()[:1] not in {"'", '"', "|", ">", "&", "!"}


def merge(base: object, override: object, path: str = "") -> Any:
    """Lays ``override`` over ``base``: mappings key by key, lists by index when the override names indices.

    A mapping with another ``type`` replaces the base, since the fields of one variant mean nothing to another.
    ``path`` is the dotted place of both, for the message of the ConfigError that a list index out of range raises.
    """
    # --a.0.b changes one entry of a list
    if isinstance(base, list) and isinstance(override, dict) and override and all(str(k).isdigit() for k in override):
        merged_list = list(base)
        for key, value in sorted(override.items(), key=lambda item: int(item[0])):
            if int(key) > len(merged_list):
                raise ConfigError(
                    f"--{path}.{key}: index {key} is out of range: the list has {len(merged_list)} entries, "
                    f"so {len(merged_list)} appends one"
                )
            if int(key) == len(merged_list):
                merged_list.append(value)
            else:
                merged_list[int(key)] = merge(merged_list[int(key)], value, f"{path}.{key}")
        return merged_list
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    if "type" in base and override.get("type", base["type"]) != base["type"]:
        return override
    merged = dict(base)
    for key, value in override.items():
        merged[key] = merge(base[key], value, f"{path}.{key}" if path else str(key)) if key in base else value
    return merged


MAKERS = {"model_path": "made_by", "image_tokenizer": "image_tokenizer_made_by"}
"""Fields that name a folder, and those beside them that name the configuration which makes it."""


NEEDED_BY = {"config_path": "tokenizer_path", "train_path": "eval_path"}
"""Fields, and those beside them that say more of the same thing, so that null for the one is null for the other."""


def _without_dependent(data: dict[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """The file's values without those that belong to values which an override replaces.

    What a ``MAKERS`` configuration makes would not be used, and it would be run for nothing; the tokenizer of a model
    that is left out would be another model's.
    """
    sections = dict(data)
    for name, override in overrides.items():
        section = sections.get(name)
        if not isinstance(override, Mapping) or not isinstance(section, dict):
            continue
        replaced = {
            maker
            for folder, maker in MAKERS.items()
            if folder in override and override[folder] != section.get(folder) and maker not in override
        }
        replaced |= {
            dependent
            for field, dependent in NEEDED_BY.items()
            if override.get(field, section) is None and section.get(field) is not None and dependent not in override
        }
        sections[name] = {key: value for key, value in section.items() if key not in replaced}
    return sections


def load_config(
    schema: type[SectionT], path: str | Path | None = None, overrides: dict[str, object] | None = None
) -> SectionT:
    """Validates a YAML file with overrides against a schema.

    Args:
        schema: the section class of the task.
        path: the YAML file; None stands for an empty one.
        overrides: nested mapping laid over the file.

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: listing every mistake with file, full path, and the nearest valid name.
    """
    overrides = overrides or {}
    # from below: defaults of the recipe that file or overrides name, the file, the overrides
    data = {} if path is None else _without_dependent(find_beside(read_yaml(path), path), overrides)
    presets = schema.presets(merge(data, overrides))
    merged = _with_revisions_of_run(merge(merge(presets, data), overrides))
    # the same three layers once more with the text of each scalar, for fields that are text
    written = {}
    if path is not None:
        written = _without_dependent(find_beside(read_yaml(path, as_written=True), path), overrides)
    written = merge(merge(presets, written), getattr(overrides, "written", overrides))
    merged = with_written_texts(merged, written, schema)
    # before validation, whose messages repeat values
    secrets = {place: secret_problem(place, value) for place, value in leaves(merged)}
    if any(secrets.values()):
        raise _join_mistakes([f"{_locate(place, path, overrides)}: {why}" for place, why in secrets.items() if why])
    # validation takes any whole number, which would fail far from the configuration
    numbers = {place: value for place, value in leaves(merged) if isinstance(value, int)}
    if too_large := [place for place, value in numbers.items() if not -(2**63) < value < 2**63]:
        raise _join_mistakes([f"{_locate(place, path, overrides)}: {TOO_LARGE}" for place in too_large])
    try:
        # as JSON, in which a strict schema still takes lists for tuples
        config = schema.model_validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        reasons = schema.reasons(data, overrides)
        lines = [
            reasons.get(".".join(map(str, mistake["loc"][:2])) or "-") or _describe(mistake, schema, path, overrides)
            for mistake in error.errors()
        ]
        raise _join_mistakes(lines) from error
    refuse_run_among_data(getattr(config, "data", None), getattr(config, "train", None))
    return config


def _with_revisions_of_run(fields: JsonObject) -> JsonObject:
    """The fields with models of the hub at the revisions with which the run began that is gone on with."""
    train = fields.get("train")
    if not isinstance(train, dict):
        return fields
    wanted = train.get("load_checkpoint_path")
    if not isinstance(wanted, str) or wanted in ("new", "") or not has_hub_names(fields):
        return fields
    folder = Path(str(train.get("output_dir")) if wanted == "auto" else wanted).expanduser()
    if CHECKPOINT_NAME.fullmatch(folder.name):
        folder = folder.absolute().parent.parent
    recorded = folder / "config.yaml"
    return cast("JsonObject", pin_revisions(fields, read_yaml(recorded))) if recorded.is_file() else fields


def load_maker(schema: type[SectionT], path: str | Path, folder: str | Path, option: str) -> SectionT:
    """The configuration of a run that makes a folder which another run takes; it goes on where it was stopped.

    Args:
        schema: of the task that makes it.
        path: its YAML file.
        folder: what is taken.
        option: the field that names the folder, for messages.

    Raises:
        ConfigError: as ``load_config``, and when the run would make another folder.
    """
    maker = load_config(schema, path, {"train": {"load_checkpoint_path": "auto"}})
    output = Path(maker.train.output_dir) / "hf_ckpt"  # type: ignore[attr-defined]
    if output.resolve() != Path(folder).resolve():
        raise ConfigError(
            f"{option} {folder} does not exist, and {path} makes another folder, {output}: name one of both"
        )
    return maker


def asks_for_help(arguments: list[str]) -> bool:
    """Whether the arguments of a task ask for the list of all fields."""
    return "--help" in arguments or "-h" in arguments


def help_part(arguments: list[str]) -> str:
    """What of the fields is asked for: the word behind ``--help``, which may be ``all``; empty for the first ones."""
    place = next(index for index, argument in enumerate(arguments) if argument in ("--help", "-h"))
    following = arguments[place + 1 : place + 2]
    is_part = bool(following) and not following[0].startswith("-") and not following[0].endswith((".yaml", ".yml"))
    return following[0] if is_part else ""


def _join_mistakes(lines: list[str]) -> ConfigError:
    """Mistakes as one error, each once, at most ``MOST_SHOWN`` of them, without characters that a terminal acts on."""
    parts = [_cut(part, 2400) for line in lines for part in line.split("\n")]
    lines = ["".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in part) for part in parts]
    lines = list(dict.fromkeys(lines))
    more = [f"and {len(lines) - MOST_SHOWN} more mistakes"] if len(lines) > MOST_SHOWN else []
    return ConfigError("\n".join([*lines[:MOST_SHOWN], *more]))


def parse_config(schema: type[SectionT], arguments: list[str] | None = None) -> SectionT:
    """Reads ``CONFIG.yaml [--a.b value ...]`` from the command line; ``--help`` prints fields and exits.

    Raises ConfigError for a wrong command line, file or value.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if asks_for_help(arguments):
        from sfumato.config.help import format_help

        print(format_help(schema, help_part(arguments)))
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError("the first argument must be a YAML configuration file; --help lists every field")
    return load_config(schema, arguments[0], parse_overrides(arguments[1:]))


def config_text(config: Section) -> str:
    """The resolved configuration as YAML, which can be run again as it is."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flatten(value: object, name: str = "") -> dict[str, object]:
    """The leaves of nested mappings by dotted name."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {key: leaf for k, item in value.items() for key, leaf in flatten(item, f"{name}.{k}" if name else k).items()}


def _describe(
    error: ErrorDetails, schema: type[BaseModel], path: str | Path | None, overrides: dict[str, object]
) -> str:
    """One mistake as lines of text: where it stands, what is wrong, what would be correct."""
    location = tuple(error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "variant":
        subs = [{**sub, "loc": location + tuple(sub["loc"])} for sub in context["errors"]]
        return "\n".join(_describe_one(sub, context["names"], path, overrides) + _foreign(sub, schema) for sub in subs)
    if error["type"] == "unknown_variant" and "known" in context:
        location += ("type",)
        hint = suggest(context["value"], context["known"])
        return f"{_locate(location, path, overrides)}: unknown type {context['name']}{hint}"
    text = _describe_one(error, _field_names(schema, location[:-1]), path, overrides)
    foreign = _foreign(error, schema)
    if error["type"] == "extra_forbidden" and (places := _places_of(schema, str(location[-1]), location)):
        meant = " or ".join(f"--{place}" if text.startswith("--") else place for place in places)
        text = f"{text.partition(';')[0]}; did you mean {meant}?"
    elif foreign and not isinstance(error.get("input"), Mapping):
        # what another tool's option is called here is a better answer than a name that looks like it; of a section's
        # name it is no answer
        text = text.partition(";")[0]
    return text + foreign


def _foreign(error: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """The end of a message about an unknown key: what it is called here, where it is an option of another tool."""
    if error["type"] != "extra_forbidden":
        return ""
    from sfumato.config.other_tools import explain_option

    return explain_option(".".join(map(str, error["loc"])), error.get("input"), schema)


def _places_of(schema: type[BaseModel], name: str, location: tuple[str | int, ...]) -> list[str]:
    """Where fields of that name are, for one that was given without its section or in another; at most two.

    Empty where a field beside it has nearly the name, which is likelier to be meant.
    """
    if difflib.get_close_matches(name, _field_names(schema, location[:-1]), n=1, cutoff=0.8):
        return []
    places: list[str] = []
    for section, field in schema.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is not None and name in inner.model_fields:
            places.append(f"{section}.{name}")
    return places if len(places) <= 2 else []


def _describe_one(
    error: Mapping[str, Any], names: list[str], path: str | Path | None, overrides: dict[str, object]
) -> str:
    where = _locate(tuple(error["loc"]), path, overrides)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{suggest(str(error['loc'][-1]), names)}"
    if error["type"] == "missing":
        return f"{where}: required, but not set"
    message = _cut(error["msg"].removeprefix("Value error, "), LONGEST_MESSAGE)
    value = error.get("input")
    if where.startswith("--") and error["type"] == "string_type" and isinstance(value, (dict, list)):
        message = (
            f"YAML reads this as a {'list' if isinstance(value, list) else 'mapping'}: write a text in quotes within "
            f"quotes, {where} '\"TEXT\"'"
        )
    elif error["type"] in ("list_type", "tuple_type"):
        message = _explain_list(where, value) or message
    shown = f" (given: {shorten(value)})" if isinstance(value, (str, int, float, bool, type(None))) else ""
    return f"{where}: {message}{shown}"


def _explain_list(where: str, value: object) -> str:
    """What to write in the place of a value that is no list; empty where that is not known."""
    if isinstance(value, dict) and value and all(re.fullmatch("-?[0-9]+", str(key)) for key in value):
        return "the file has no list here whose entries could be changed by their numbers: give the whole list"
    if isinstance(value, str) and value.isprintable():
        text = f"[{value.strip('()')}]"
        return f"a list is written {where} '{text}'" if where.startswith("--") else f"a list is written {text}"
    return ""


def shorten(value: object) -> str:
    """A value as a message shows it, its middle left out where it is long."""
    return _cut(repr(value), LONGEST_SHOWN)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]}...{text[-longest // 2 :]}"


def suggest(name: str, names: list[str]) -> str:
    """The end of a message about an unknown name: the nearest valid name, if one is near, and all valid names."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = f"valid here: {', '.join(names)}" if names else "no keys are valid here"
    return f"; did you mean {near[0]!r}? ({listing})" if near else f"; {listing}"


def _locate(location: tuple[Hashable, ...], path: str | Path | None, overrides: Mapping[str, object]) -> str:
    """The place of a value for a message: ``file: a.b.c`` if it is from the file, ``--a.b.c`` if from an override."""
    dotted = ".".join(str(part) for part in location)
    node: object = overrides
    for part in location:
        if not isinstance(node, dict):
            break  # a plain value, or a list, that an override gave as a whole
        if str(part) not in {str(key) for key in node}:
            return f"{path}: {dotted}" if path is not None else dotted
        node = next(value for key, value in node.items() if str(key) == str(part))
    return f"--{dotted}" if location else str(path or "configuration")


def _field_names(schema: type[BaseModel] | None, location: tuple[str | int, ...]) -> list[str]:
    """Names of the fields of the section at that place."""
    for part in location:
        if isinstance(part, int) or schema is None:
            continue
        field = getattr(schema, "model_fields", {}).get(part)
        schema = None if field is None else inner_section(field.annotation)
    return list(getattr(schema, "model_fields", {}))
