"""No architecture of transformers is trained wrongly in any mode, and docs/architectures.md says what is found."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.survey.survey import KNOWN, NAMES, PACKED, PAGE, survey, table

pytestmark = pytest.mark.slow

AT_LEAST = {
    *("mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text", "olmo3", "mamba2", "lfm2"),
    *("granitemoehybrid", "falcon_h1", "bloom"),
}


@pytest.mark.parametrize("name", NAMES)
def test_architecture_is_trained_like_transformers_or_refused(name: str) -> None:
    result = survey(name)
    wrong = {title: cell.text for title, cell in result.items() if cell.verdict not in ("equal", "refused")}
    assert not wrong


@pytest.mark.timeout(3600)  # run alone, it surveys them all
def test_most_architectures_are_trained_in_packed_rows() -> None:
    equal = {name for name in NAMES if survey(name)[PACKED].verdict == "equal"}
    assert not (AT_LEAST & {*KNOWN}) - equal
    assert len(equal & {*KNOWN}) >= 55


@pytest.mark.timeout(3600)
def test_page_is_what_the_survey_finds() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "python -m tests.survey.survey --write" in text
    (version,) = re.findall(r"transformers (\d[\w.]*) and torch", " ".join(text.split()))
    if version != transformers.__version__:
        pytest.skip(f"docs/architectures.md is about transformers {version}, not {transformers.__version__}")
    start = text.index("| packed | sdpa |")
    assert text[start:].partition("\n\n")[0].splitlines() == table({name: survey(name) for name in NAMES})
