"""Whatever changes the tokens of a data set changes the name of their store, so that none is stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.data.files.sources import open_sources
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.format import build_transform
from sfumato.data.text.token_store import TokenStore, build_token_store
from tests.tiny_tokenizers import build_tokenizer
from tests.unit.test_chat import CHATML, assistant, user

OTHER = "{{- mood | default('') }}" + CHATML
ROWS: list[dict[str, Any]] = [
    {
        "messages": [user(f"q{index}"), assistant("words " * (1 + 40 * (index == 1)))],
        "others": [user("r"), assistant("b")],
        "text": "Plain text, of some words",
        "prompt": "q",
        "chosen": "a",
        "rejected": "b",
        "margin": index,
        "completion": "c",
        "label": True,
        "steps": ["a", "b"],
        "labels": [1, 0],
    }
    for index in range(6)
]

CHANGES: dict[str, Any] = {
    "train_path": "more.jsonl",
    "eval_path": "more.jsonl",
    "synthetic": None,  # each of its fields below
    "data_type": "preference",
    "datasets_type": "iterable",
    "text_keys": ["others"],
    "chat_template": "other.jinja",
    "chat_template_options": {"mood": "glad"},
    "max_seq_len": 48,
    "overlong": "skip",
    "max_bad_rows": 3,
    "train_size": 100,
    "shuffle": False,
    "shuffle_buffer": 5,
    "num_workers": 2,
    "cache_dir": "cache",
    "cache_media": True,
}
SYNTHETIC: dict[str, Any] = {
    "problem": "sort",
    "min_length": 3,
    "max_length": 5,
    "num_rows": 9,
    "held_out": 0.3,
    "turns": 2,
    "calculator_calls": 0.5,
}

PROCESS = {"type": "process", "steps_by": "line"}
FORMATS: list[Any] = ["plaintext", "conversation", "preference", "preference_margin", "unpaired", "process", PROCESS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("rows.jsonl", ROWS), ("more.jsonl", [*ROWS, ROWS[0]])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text("{{- 'hello' }}" + OTHER)
    (tmp_path / "other.jinja").write_text(OTHER)
    return tmp_path


def content(store: TokenStore) -> list[Any]:
    return [
        [
            (document.input_ids.tolist(), document.loss_mask.tolist(), repr(document.numbers))
            for document in store.sample(index).documents
        ]
        for index in range(len(store))
    ]


def build(values: dict[str, Any], cache: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> list[Any]:
    config = TextDataConfig(**values)
    transform = build_transform(config, tokenizer or build_tokenizer())
    sources = open_sources(config.model_copy(update={"datasets_type": "mapping"}))
    return content(build_token_store(sources, transform, cache, 1, 10, lambda text: None))


def check(values: dict[str, Any], changed: dict[str, Any], folder: Path, **tokenizers: Any) -> bool:
    """Whether a change makes other tokens; a second run beside the first must then have them, too."""
    before = build(values, folder / "cache", tokenizers.get("before"))
    expected = build(changed, folder / "fresh", tokenizers.get("after"))
    assert build(changed, folder / "cache", tokenizers.get("after")) == expected, "a stale store"
    return expected != before


def test_a_setting_that_changes_tokens_is_not_given_the_store_of_another(folder: Path) -> None:
    assert set(CHANGES) == set(TextDataConfig.model_fields), "a field that is new here"
    base: dict[str, Any] = {"train_path": "rows.jsonl", "max_seq_len": 300, "chat_template": "chat.jinja"}
    changing = set()
    for name, value in CHANGES.items():
        if name in ("synthetic", "cache_media"):  # the latter needs images, and tests/unit/test_media_cache.py has them
            continue
        values = base | ({"datasets_type": "iterable"} if name == "shuffle_buffer" else {})
        values |= {"max_seq_len": 48} if name == "overlong" else {}
        first = values | ({"overlong": "truncate"} if name in ("overlong", "max_seq_len") else {})
        if check(first, (first if name == "max_seq_len" else values) | {name: value}, folder):
            changing.add(name)
    assert changing == {
        "train_path",
        "data_type",
        "text_keys",
        "chat_template",
        "chat_template_options",
        "max_seq_len",
        "overlong",
    }


def test_each_format_has_a_store_of_its_own(folder: Path) -> None:
    made = []
    for data_type in FORMATS:
        values = {"train_path": "rows.jsonl", "data_type": data_type, "text_keys": []}
        if data_type != "plaintext":
            values["chat_template"] = "chat.jinja"
        made.append(build(values, folder / "cache"))
        assert made[-1] == build(values, folder / "fresh" / str(len(made)))
    assert len({repr(store) for store in made}) >= len(FORMATS) - 1, "lines and empty lines end other tokens"


def test_settings_of_made_problems_have_stores_of_their_own(folder: Path) -> None:
    assert set(SYNTHETIC) == set(SyntheticTextConfig.model_fields), "a field that is new here"
    base: dict[str, Any] = {"problem": "reverse", "num_rows": 12, "min_length": 2, "max_length": 4, "held_out": 0.1}
    for name, value in SYNTHETIC.items():
        first = base | ({"problem": "add"} if name == "calculator_calls" else {})
        first, changed = (
            {"chat_template": "chat.jinja", "synthetic": problem} for problem in (first, first | {name: value})
        )
        assert check(first, changed, folder), name


def normalised(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def split_otherwise(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def begin_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.bos_token = "<s>"
    place = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=place)


def add_word(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens([AddedToken("words")])


def end_otherwise(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = "</s>"


def own_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "m.content + '!'")


def append_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    facts_of(tokenizer).appends_end = False


TOKENIZERS = [normalised, split_otherwise, begin_texts, add_word, end_otherwise, own_template, append_nothing]


@pytest.mark.parametrize("change", TOKENIZERS)
def test_a_tokenizer_that_makes_other_tokens_is_not_given_the_store_of_another(folder: Path, change: Any) -> None:
    template = "{%- for m in messages %}{{- m.role + ':' + m.content }}{%- endfor %}"
    changing = False
    for data_type in ("plaintext", "conversation"):
        before, after = build_tokenizer("byte_level", bos_token=None), build_tokenizer("byte_level", bos_token=None)
        for tokenizer in (before, after):
            tokenizer.chat_template = template
        change(after)
        values = {"train_path": "rows.jsonl", "data_type": data_type}
        changing |= check(values, values, folder, before=before, after=after)
    assert changing
