"""Prompts of judges: Jinja templates in which a picture is a variable like a text."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.http.chat_completions import Content, image_part

_SHIPPED = Path(__file__).parent / "templates"


class JudgeTemplate:
    """A template that was checked.

    Args:
        source: name of a template that is shipped, path of a file, or the text itself, told by its braces.
        required: variables that it must use.
        optional: variables that it may use besides.

    Raises:
        ConfigError: no such file, wrong syntax, an unknown variable, or a required one that is not used.
    """

    def __init__(self, source: str, required: Iterable[str], optional: Iterable[str]) -> None:
        import jinja2.meta
        import jinja2.sandbox

        self.name, text = _read_source(source)
        self._required = tuple(required)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        try:
            used = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise ConfigError(f"{self.name} is not valid Jinja: {where}{error}") from error
        allowed = sorted({*self._required, *optional})
        for name in sorted(used.difference(allowed)):
            raise ConfigError(f"{self.name} uses the unknown variable {name!r}; there are: {', '.join(allowed)}")
        for name in self._required:
            if name not in used:
                raise ConfigError(f"{self.name} does not use {{{{ {name} }}}}, so the judge would not see it")

    def fill(self, values: Mapping[str, object], pictures: Mapping[str, Collection[np.ndarray]]) -> Content:
        """What the judge is asked.

        Args:
            values: texts, numbers and mappings by the name of their variable.
            pictures: the same of images, uint8 [H, W, 3], which follow one another where the variable stands.

        Raises:
            DataError: the template needs a variable or a column that is not there, or does not show a sample as it is.
        """
        import jinja2

        mark = secrets.token_hex(16)  # no prompt can contain it
        images = [image for shown in pictures.values() for image in shown]
        numbers = iter(range(len(images)))
        marks = {name: "".join(f"{mark}{next(numbers)};" for _ in shown) for name, shown in pictures.items()}
        try:
            text = self._template.render({**values, **marks})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise DataError(
                f"{self.name} cannot be filled for prompt {values['prompt']!r}: {error}: correct it, or give the row "
                "what it needs"
            ) from error
        if not images:
            return text.strip()
        for name in self._required:
            if marks.get(name, "") not in text:
                raise DataError(
                    f"{self.name} does not show {{{{ {name} }}}} for prompt {values['prompt']!r}: let it stand there "
                    "as it is, without filter or condition"
                )
        pieces = re.split(f"{mark}(\\d+);", text)  # texts, with the numbers of images between them
        parts = [
            image_part(images[int(piece)]) if place % 2 else {"type": "text", "text": piece.strip()}
            for place, piece in enumerate(pieces)
        ]
        return [part for part in parts if part.get("text") != ""]


load_template = functools.cache(JudgeTemplate)
"""The template of these arguments, read once per process."""


def read_file(path: Path) -> str:
    """Reads a text file. Raises ConfigError when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def _read_source(source: str) -> tuple[str, str]:
    """A name of the template for messages, and its text.

    Args:
        source: the text itself, if it has Jinja's braces; else the name of a shipped template, or a path.

    Raises:
        ConfigError: there is no such file.
    """
    if "{{" in source or "{%" in source:
        return "the judge's template", source
    shipped = _SHIPPED / f"{source}.jinja"
    path = shipped if shipped.is_file() else Path(source).expanduser()
    if not path.is_file():
        names = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.jinja")))
        raise ConfigError(f"template: no Jinja file {source}; the templates with a name are {names}")
    return f"template {path}", read_file(path)
