"""Names of modules and classes that version 0.1 had and that work for one release more."""

from __future__ import annotations

import importlib
import sys

import pytest

from sfumato.data import text
from sfumato.data.text import format
from sfumato.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module_and_says_so(old: str) -> None:
    for name in [name for name in MOVED if name.startswith(old)]:
        sys.modules.pop(name, None)
    with pytest.warns(FutureWarning, match=MOVED[old]):
        module = importlib.import_module(old)
    assert module is sys.modules[MOVED[old]]
    assert module.__name__ == module.__spec__.name == MOVED[old]


def test_names_of_formats_stay_where_pages_had_them() -> None:
    assert {"Document", "TextFormat", "TextSample", "fingerprint_of", "fit", "find_key"} <= {*text.FROM_FORMAT}
    assert all(getattr(text, name) is getattr(format, name) for name in text.FROM_FORMAT)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = text.Nothing
