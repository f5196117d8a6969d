"""What ``make quick-test`` leaves out."""

from __future__ import annotations

from tests.conftest import LONG_FILES


def test_the_list_names_files_that_there_are_once_each_and_in_order() -> None:
    names = LONG_FILES.read_text(encoding="utf-8").split()
    assert names == sorted(set(names))
    assert not [name for name in names if not (LONG_FILES.parent / f"{name}.py").is_file()]
    assert len(names) < len(list(LONG_FILES.parent.glob("test_*.py"))) / 2
