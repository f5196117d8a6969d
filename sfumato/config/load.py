"""From a YAML file and dotted overrides to a validated configuration, or to an error that says what to change."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from sfumato.config.as_written import with_written_texts
from sfumato.config.base import Section, inner_section, iterate_leaves
from sfumato.config.hub import has_hub_names, pin_revisions
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import CHECKPOINT_NAME, refuse_run_among_data
from sfumato.config.secrets import secret_problem
from sfumato.config.shipped import find_beside
from sfumato.config.yaml_text import parse_yaml, read_yaml
from sfumato.errors import ConfigError, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SectionT = TypeVar("SectionT", bound=Section)

LONGEST_SHOWN = 80
LONGEST_MESSAGE = 1200
MOST_SHOWN = 20
"""Characters of a given value that a message repeats, characters of a mistake, and mistakes."""

TOO_LARGE = "a whole number must fit into 64 bits"  # torch, numpy and files have no room for it

DEEPEST = 20
"""Dots in the name of an override."""


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
        short_name = _cut_text(name, LONGEST_SHOWN)
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
    secrets = {place: secret_problem(place, value) for place, value in iterate_leaves(merged)}
    if any(secrets.values()):
        raise _join_mistakes(
            [f"{_locate_value(place, path, overrides)}: {why}" for place, why in secrets.items() if why]
        )
    # validation takes any whole number, which would fail far from the configuration
    numbers = {place: value for place, value in iterate_leaves(merged) if isinstance(value, int)}
    if too_large := [place for place, value in numbers.items() if not -(2**63) < value < 2**63]:
        raise _join_mistakes([f"{_locate_value(place, path, overrides)}: {TOO_LARGE}" for place in too_large])
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
    parts = [_cut_text(part, 2400) for line in lines for part in line.split("\n")]
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


def _describe(
    error: ErrorDetails, schema: type[BaseModel], path: str | Path | None, overrides: dict[str, object]
) -> str:
    """One mistake as lines of text: where it stands, what is wrong, what would be correct."""
    location = tuple(error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "variant":
        subs = [{**sub, "loc": location + tuple(sub["loc"])} for sub in context["errors"]]
        return "\n".join(
            _describe_one(sub, context["names"], path, overrides) + _name_of_other_tools(sub, schema) for sub in subs
        )
    if error["type"] == "unknown_variant" and "known" in context:
        location += ("type",)
        hint = suggest(context["value"], context["known"])
        return f"{_locate_value(location, path, overrides)}: unknown type {context['name']}{hint}"
    text = _describe_one(error, _field_names(schema, location[:-1]), path, overrides)
    foreign = _name_of_other_tools(error, schema)
    if error["type"] == "extra_forbidden" and (places := _places_of(schema, str(location[-1]), location)):
        meant = " or ".join(f"--{place}" if text.startswith("--") else place for place in places)
        text = f"{text.partition(';')[0]}; did you mean {meant}?"
    elif foreign and not isinstance(error.get("input"), Mapping):
        # what another tool's option is called here is a better answer than a name that looks like it; of a section's
        # name it is no answer
        text = text.partition(";")[0]
    return text + foreign


def _name_of_other_tools(error: Mapping[str, Any], schema: type[BaseModel]) -> str:
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
    where = _locate_value(tuple(error["loc"]), path, overrides)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{suggest(str(error['loc'][-1]), names)}"
    if error["type"] == "missing":
        return f"{where}: required, but not set"
    message = _cut_text(error["msg"].removeprefix("Value error, "), LONGEST_MESSAGE)
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
    return _cut_text(repr(value), LONGEST_SHOWN)


def _cut_text(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]}...{text[-longest // 2 :]}"


def _locate_value(location: tuple[Hashable, ...], path: str | Path | None, overrides: Mapping[str, object]) -> str:
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
