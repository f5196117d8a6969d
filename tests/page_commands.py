"""Every command that a page shows: in fenced and indented blocks, and between backticks within the text."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [page for folder in ("text_rl", "diffusion_rl") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
PROGRAMS = ("apt-get", "bash", "docker", "make", "pip", "python", "ray", "sbatch", "scp", "sfumato", "torchrun", "vllm")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]+\n)+")
INLINE = re.compile(r"`([^`]+)`")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command, and where it stands."""

    page: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict, compare=False)
    """What is set before the program's name."""

    @property
    def text(self) -> str:
        """The command without what is set for it."""
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page in their order, each once."""
    text, name, results = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), []
    for kind, block in FENCE.findall(text):
        if kind in ("", "bash", "sh"):
            results += _of_block(name, block)
    text = FENCE.sub("", text)
    for block in INDENTED.findall(text):
        results += _of_block(name, block)
    for span in INLINE.findall(INDENTED.sub("", text)):
        words = _split(" ".join(span.split()))
        if len(words) > 1 and _program(words) in PROGRAMS:
            results += _of_block(name, " ".join(span.split()))
    return list(dict.fromkeys(results))


def _of_block(page: str, block: str) -> list[Command]:
    results, variables = [], {}
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = _split(line)
        environment = {}
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            environment[match[1]] = match[2]
            words = words[1:]
        if not words:
            variables |= environment
        elif words[0] in PROGRAMS:
            results.append(Command(page, tuple(words), environment))
    return results


def _program(words: list[str]) -> str:
    return next((word for word in words if not ASSIGNMENT.fullmatch(word)), "")


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation mark of a sentence
        return []
