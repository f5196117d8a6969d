"""docs/metrics.md describes every metric that a run logs, and nothing that no run logs."""

from __future__ import annotations

import ast
import json
import re
from functools import cache

from tests.tiny import ROOT

PAGE = ROOT / "docs" / "metrics.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
DESCRIBED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row.split("|")[1])})


def pattern_of(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, name.split("<name>"))))


@cache
def recorded_names() -> frozenset[str]:
    """Every metric of the runs in the record of tests/same."""
    runs = json.loads((ROOT / "tests" / "same" / "record.json").read_text(encoding="utf-8"))["runs"]
    return frozenset(name for run in runs.values() for line in run["metrics"] for name in line)


@cache
def written_patterns() -> tuple[re.Pattern[str], ...]:
    """Names with a slash that the code writes, with wildcards for what formatted strings put in."""
    patterns = set()
    for folder in ("sfumato", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
                letters = "".join(text for text in texts if isinstance(text, str)).strip("/_")
                if letters and any(isinstance(text, str) and "/" in text for text in texts):
                    patterns.add("".join(re.escape(text) if isinstance(text, str) else "[^/]*" for text in texts))
    return tuple(re.compile(pattern) for pattern in patterns if re.fullmatch(r"[\w/\\\[\]^*<>{}-]+", pattern))


def test_every_metric_that_is_logged_is_described() -> None:
    described = [pattern_of(name) for name in DESCRIBED]
    missing = [name for name in sorted(recorded_names()) if not any(pattern.fullmatch(name) for pattern in described)]
    assert missing == [], f"give each a row in {PAGE}"


def test_every_metric_that_is_described_is_logged() -> None:
    """By a run of the record, or the code writes its name."""
    missing = [
        name
        for name in DESCRIBED
        if not any(pattern_of(name).fullmatch(other) for other in recorded_names())
        and not any(pattern.fullmatch(name.replace("<name>", "x")) for pattern in written_patterns())
    ]
    assert missing == [], f"no run logs them: take them off {PAGE}"
