"""Pages of the site that are made from the code: every field of every task's configuration."""

from __future__ import annotations

import inspect
from pathlib import Path

from sfumato.config.help import FieldHelp, SectionHelp, describe_sections
from sfumato.config.tasks import TASKS, schema_of


def write_configuration_pages(folder: Path) -> None:
    """Writes a page for each task and one that lists them. Files whose text is the same are left alone."""
    folder.mkdir(exist_ok=True)
    names = list(TASKS)
    for name in names:
        _write(folder / f"{name}.md", _configuration_page(name))
    listed = "\n".join(f"- [{name}]({name}.md): {_summary(name)}" for name in names)
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    _write(
        folder / "index.md",
        "# Every field\n\nMade from the schema, as `--help` is. How files, overrides and recipes work:"
        f" [configuration](../configuration.md).\n\n{listed}\n\n{toctree}\n",
    )


def _summary(name: str) -> str:
    return inspect.cleandoc(schema_of(name).__doc__ or "").splitlines()[0]


def _configuration_page(name: str) -> str:
    sections = describe_sections(schema_of(name))
    lines = [f"# {name}", "", _summary(name), "", "```", f"bash train.sh tasks/{name}.py --help", "```", ""]
    for section in sections:
        lines += _section_lines(section)
    return "\n".join(lines) + "\n"


def _section_lines(section: SectionHelp) -> list[str]:
    if not section.fields:
        return []
    lines = [f"## `{section.path or 'top level'}`", "", section.summary, ""]
    for field in section.fields:
        lines += _field_lines(field)
    return lines


def _field_lines(field: FieldHelp) -> list[str]:
    lines = [f"`{field.path}`: {_code(field.kind)}, default {_code(field.default)}", ""]
    if field.text:
        lines += [f": {' '.join(_plain(field.text).split())}", ""]
    for variant in field.variants:
        lines += [f"- {_code(f'type: {variant.type}')} {_plain(variant.summary)}"]
        lines += [f"  - {_code(f'{name} = {default}')} {_plain(text)}" for name, default, text in variant.fields]
    return [*lines, ""] if field.variants else lines


def _code(text: str) -> str:
    """As code; a longer fence where the text has backticks of its own."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    """Text of a docstring as Markdown: double backticks are code, and nothing else is markup."""
    parts = text.replace("``", "`").split("`")
    for index in range(0, len(parts), 2):
        for sign in "\\*_<>[]{}$|":
            parts[index] = parts[index].replace(sign, f"\\{sign}")
    return "`".join(parts)


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
