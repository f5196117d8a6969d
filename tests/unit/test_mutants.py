"""The tool that breaks lines of the library: what it makes of them is still Python, and other Python."""

from __future__ import annotations

import ast

import yaml

from tests.mutation.campaign import EQUIVALENT
from tests.mutation.mutants import mutants_of
from tests.mutation.nearest import nearest_test_files
from tests.tiny import ROOT

SOURCE = b"""
def share(rows: list[int], most: int | None = None) -> float:
    \"\"\"Of 3 rows.\"\"\"
    if most is not None and len(rows) > most:
        raise ValueError(f"{len(rows) + 1} rows")
    run.say("more than 2")
    save(rows, strict=True)
    return max(rows) / (len(rows) - 1)
"""


def test_each_change_is_one_that_a_test_should_notice():
    result = {(mutant.line, mutant.change) for mutant in mutants_of("share.py", SOURCE)}
    assert result == {
        (4, "most is not None and len(rows) > most -> ((most is not None) or (len(rows) > most))"),
        (4, "most is not None -> (most is None)"),
        (4, "len(rows) > most -> (len(rows) >= most)"),
        (5, 'raise ValueError(f"{len(rows) + 1} rows") -> pass'),
        (7, "save(rows, strict=True) -> pass"),
        (8, "max(rows) / (len(rows) - 1) -> (max(rows) * (len(rows) - 1))"),
        (8, "max -> min"),
        (8, "len(rows) - 1 -> (len(rows) + 1)"),
        (8, "1 -> 2"),
    }


def test_what_is_changed_is_still_python():
    path = "sfumato/runtime/stream.py"
    source = (ROOT / path).read_bytes()
    mutants = mutants_of(path, source)
    assert len(mutants) > 100
    for mutant in mutants:
        assert mutant.applied(source) != source
        ast.parse(mutant.applied(source))


def test_tests_of_lines_that_keep_no_record_are_found_by_imports():
    assert "tests/unit/test_stream.py" in nearest_test_files("sfumato/runtime/stream.py", ROOT)
    assert nearest_test_files("sfumato/runtime/states.py", ROOT)


def test_every_explained_change_is_one_that_can_be_made():
    explained = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8"))
    for entry in explained:
        source = (ROOT / entry["path"]).read_bytes()
        lines = ["", *(line.strip() for line in source.decode().splitlines())]
        changed = [mutant.line for mutant in mutants_of(entry["path"], source) if mutant.change == entry["change"]]
        places = [line for line in changed if lines[line] == entry["line"]]
        assert [line for line in places if entry.get("above", lines[line - 1]) == lines[line - 1]], entry
        assert entry["why"]
