"""Rows that are tokenised together: each has the samples, or the error, that it has alone, and in the same order."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import processors

from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.sources import Sources
from sfumato.data.text import row_samples
from sfumato.data.text.format import build_transform
from sfumato.data.text.formats import PlainTextTransform
from sfumato.data.text.row_samples import samples_of
from sfumato.data.text.token_source import TextStream
from sfumato.data.text.token_store import build_token_store
from sfumato.data.text.tokenise import Encoder
from sfumato.errors import DataError, OverlongError
from tests.tiny_tokenizers import SPECIALS, build_tokenizer
from tests.token_rows import ListRows, NumberTransform, rows_of
from tests.unit.test_chat import ALTERNATING, CHATML, CONTENTS, MARKED, THINKING

KINDS = ("byte_level", "qwen", "trimmed", "metaspace", "words")
TEXTS = [*CONTENTS, "", " ", "".join(SPECIALS), "Sort the letters of cab. " * 40]


def transform_of(data_type, tokenizer, **config):
    config = TextDataConfig(**{"synthetic": SyntheticTextConfig(), "data_type": data_type, **config})
    return build_transform(config, tokenizer)


def plain(samples):
    """Samples as lists; errors as their kind and text."""
    if isinstance(samples, DataError):
        return type(samples), str(samples)
    return [
        [(document.input_ids.tolist(), document.loss_mask.tolist()) for document in sample.documents]
        for sample in samples
    ]


def alone(transform, rows):
    """What each row gives in a call of its own."""
    results = []
    for index in range(len(rows)):
        try:
            results.append((index, plain(transform(rows[index], rows.describe(index)))))
        except DataError as error:
            results.append((index, plain(error)))
    return results


def together(transform, rows, indices=None):
    indices = range(len(rows)) if indices is None else indices
    return [(index, plain(samples)) for index, samples in samples_of(transform, rows, indices)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_offsets", [False, True])
def test_texts_have_the_tokens_of_a_call_of_the_tokenizer(kind, with_offsets):
    tokenizer = build_tokenizer(kind)
    wanted = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in TEXTS]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer("long " * 20, truncation=True, max_length=4, padding="max_length")  # leaves the backend in this state
    assert tokenizer.backend_tokenizer.truncation and tokenizer.backend_tokenizer.padding
    actual = Encoder(tokenizer, with_offsets)(TEXTS)
    assert [tokens.input_ids.tolist() for tokens in actual] == [entry["input_ids"] for entry in wanted]
    assert {tokens.input_ids.dtype for tokens in actual} == {np.dtype(np.int32)}
    if with_offsets:
        offsets = [list(zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True)) for tokens in actual]
        assert offsets == [entry["offset_mapping"] for entry in wanted]
    else:
        assert {(tokens.starts, tokens.ends) for tokens in actual} == {(None, None)}


def test_special_tokens_are_split_when_the_tokenizer_says_so():
    tokenizer = build_tokenizer()
    whole = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    tokenizer.split_special_tokens = True
    (tokens,) = Encoder(tokenizer, False)(["<|im_end|>"])
    assert len(tokens.input_ids) > len(whole) == 1
    assert tokens.input_ids.tolist() == tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("with_offsets", [False, True])
def test_a_tokenizer_with_an_encoding_of_its_own_is_asked(with_offsets):
    tokenizer = build_tokenizer()

    class Lower(type(tokenizer)):
        def __call__(self, text, **options):
            return super().__call__(text.lower(), **options)

    begin = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    assert tokenizer("abc")["input_ids"][0] == begin[1]
    lowering_tokenizer = copy.copy(tokenizer)
    lowering_tokenizer.__class__ = Lower
    actual = Encoder(lowering_tokenizer, with_offsets)(["ABC", "abc"])
    wanted = Encoder(tokenizer, with_offsets)(["abc", "abc"])
    for tokens, other in zip(actual, wanted, strict=True):
        assert tokens.input_ids.tolist() == other.input_ids.tolist()
        assert not with_offsets or (tokens.starts.tolist(), tokens.ends.tolist()) == (
            other.starts.tolist(),
            other.ends.tolist(),
        )


TEXT_ROWS = ListRows(
    [{"text": text} for text in TEXTS] + [{"other": "x"}, {"text": 7}] + [{"text": "The answer is here. " * 9}] * 5
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [{}, {"BATCH_ROWS": 3}, {"BATCH_CHARACTERS": 40}])
def test_plain_texts_become_what_they_become_alone(kind, limit, monkeypatch):
    for name, value in limit.items():
        monkeypatch.setattr(row_samples, name, value)
    transform = transform_of("plaintext", build_tokenizer(kind), max_seq_len=16)
    result = together(transform, TEXT_ROWS)
    assert result == alone(transform, TEXT_ROWS)
    assert sum(isinstance(samples, tuple) for _, samples in result) >= 3  # of which there is nothing to make
    order = [9, 3, 3, 0, 12, 5]
    assert together(transform, TEXT_ROWS, order) == [result[index] for index in order]


def test_a_plain_text_that_carries_its_own_end_has_one():
    transform = transform_of("plaintext", build_tokenizer())
    ((ended,), (plain,)) = (transform({"text": text}, "row") for text in ("The answer<|endoftext|>", "The answer"))
    assert ended.documents[0].input_ids.tolist() == plain.documents[0].input_ids.tolist()
    assert ended.documents[0].input_ids.tolist().count(transform.tokenizer.eos_token_id) == 1


def conversations():
    rows = []
    for number, content in enumerate(CONTENTS):
        user, said = {"role": "user", "content": content}, {"role": "assistant", "content": CONTENTS[number - 3]}
        rows += [{"messages": [user, said] * turns} for turns in (1, 2, 3)]
        rows.append({"messages": [user, {**said, "loss_mask": 0}, user, said]})
    broken = [
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "first"}]},
        {"messages": "{"},
        {"messages": [{"role": "user", "content": "x"}]},
        {},
    ]
    for number, row in enumerate(broken):
        rows.insert(7 * number + 2, row)
    return ListRows(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, ALTERNATING])
def test_conversations_become_what_they_become_alone(kind, template, monkeypatch):
    monkeypatch.setattr(row_samples, "BATCH_ROWS", 7)
    transform = transform_of("conversation", build_tokenizer(kind, chat_template=template), max_seq_len=60)
    rows = conversations()
    result = together(transform, rows)
    assert result == alone(transform, rows)
    refused = [samples for _, samples in result if isinstance(samples, tuple)]
    assert 4 <= len(refused) < len(rows) and any(kind is OverlongError for kind, _ in refused)


def test_texts_that_are_encoded_a_second_time_are_so_together():
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " Sort the letters"}]
    rows = ListRows([{"messages": said}, {"messages": []}, {"messages": said * 2}])
    joined = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"
    joined += "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
    transform = transform_of("conversation", build_tokenizer("qwen", chat_template=joined))
    called = []

    class Counted:
        def asks(self, row, where):
            return transform.asks(row, where)

        def encode(self, texts):
            called.append(len(texts))
            return transform.encode(texts)

    assert together(Counted(), rows) == alone(transform, rows)
    assert called[0] == 3 and len(called) <= 2  # a text for each answer, since this template ends none


def test_pairs_become_what_they_become_alone():
    transform = transform_of("preference", build_tokenizer(chat_template=CHATML), max_seq_len=64)
    rows = [{"prompt": "hi", "chosen": content, "rejected": "no " * number} for number, content in enumerate(CONTENTS)]
    rows = ListRows([*rows, {"prompt": "hi", "chosen": "same", "rejected": "same"}])
    result = together(transform, rows)
    assert result == alone(transform, rows)
    assert {type(samples) for _, samples in result} == {list, tuple}


def test_a_transform_without_texts_is_called_when_a_row_is_wanted():
    transform = NumberTransform()
    samples = samples_of(transform, rows_of([3, "broken", 4, 5]), [2, 1, 0, 3])
    assert next(samples)[0] == 2 and transform.seen == [2]
    index, error = next(samples)
    assert index == 1 and isinstance(error, DataError) and transform.seen == [2, 1]


def test_a_class_that_changes_the_call_only_is_called():
    class Upper(PlainTextTransform):
        def __call__(self, row, where):
            return super().__call__({"text": row["text"].upper()}, where)

    class Same(Upper):
        pass

    base = transform_of("plaintext", build_tokenizer())
    fields = (base.tokenizer, base.keys, base.max_seq_len, base.fingerprint)
    rows, wanted = ListRows([{"text": "abc"}]), together(base, ListRows([{"text": "ABC"}]))
    assert together(Upper(*fields), rows) == together(Same(*fields), rows) == wanted != together(base, rows)


class Faulty:
    """Fails on some rows in ways that are no fault of the data."""

    documents_per_sample, fingerprint = 1, "faulty"

    def encode(self, texts):
        if "cannot be encoded" in texts:
            raise TypeError("of the tokenizer")
        return [text.upper() for text in texts]

    def asks(self, row, where):
        if row == "stops":
            raise DataError(f"{where} stops")
        if row == "fails":
            raise KeyError("a programming error")
        (answer,) = yield [row]
        if row == "fails later":
            raise KeyError("a programming error")
        return [answer]


@pytest.mark.parametrize(
    ("row", "kind"), [("fails", KeyError), ("fails later", KeyError), ("cannot be encoded", TypeError)]
)
def test_an_error_that_is_not_of_the_data_comes_when_its_row_does(row, kind):
    samples, produced = samples_of(Faulty(), ListRows(["a", "stops", "b", row, "c"]), range(5)), []
    with pytest.raises(kind):
        produced.extend((index, str(samples)) for index, samples in samples)
    assert produced == [(0, "['A']"), (1, "rows, row 2 stops"), (2, "['B']")]


def test_a_row_that_cannot_be_read_spoils_no_other():
    class Torn(ListRows):
        def __getitem__(self, index):
            if index % 3 == 1:
                raise DataError(f"{self.describe(index)}: torn")
            return super().__getitem__(index)

    transform, rows = transform_of("plaintext", build_tokenizer()), Torn([{"text": f"text {n}"} for n in range(9)])
    result = together(transform, rows)
    assert [index for index, samples in result if isinstance(samples, tuple)] == [1, 4, 7]
    whole = together(transform, ListRows(rows.rows))
    assert [one for one in result if one[0] % 3 != 1] == [one for one in whole if one[0] % 3 != 1]


def test_batches_are_bounded_by_rows_and_by_characters(monkeypatch):
    sizes = []

    class Sized:
        def encode(self, texts):
            sizes.append([len(text) for text in texts])
            return texts

        def asks(self, row, where):
            yield [row]
            return []

    monkeypatch.setattr(row_samples, "BATCH_ROWS", 3)
    monkeypatch.setattr(row_samples, "BATCH_CHARACTERS", 100)
    rows = ListRows(["x" * size for size in (1, 2, 3, 4, 99, 5, 200, 6)])
    assert [index for index, _ in samples_of(Sized(), rows, range(8))] == list(range(8))
    assert sizes == [[1, 2, 3], [4, 99], [5, 200], [6]]


def test_a_stream_goes_on_at_any_sample_with_bad_rows_left_out():
    rows = ListRows([{"text": f"row {n}: " + "cab " * (n % 7)} for n in range(40)])
    rows.rows[5] = rows.rows[23] = {"text": " "}
    transform = transform_of("plaintext", build_tokenizer(), max_seq_len=8)

    def read(state=None, count=150, said=None, how=transform):
        bad = BadRows(4, [].append if said is None else said.append)
        stream = TextStream(Sources(["rows"], [rows], None), how, 3, True, 16, bad)
        state, produced = state or {"samples": 0, **stream.begin()}, []
        for _, numbered in zip(range(count), stream.read(state), strict=False):
            state = {**stream.move(state, numbered), "samples": state["samples"] + 1}
            produced.append((plain([numbered.sample]), state))
        return produced

    said, said_alone = [], []
    whole = read(said=said)

    class ByRow:
        documents_per_sample, fingerprint = 1, transform.fingerprint

        def __call__(self, row, where):
            return transform(row, where)

    assert whole == read(said=said_alone, how=ByRow()) and said == said_alone and len(said) == 2
    for start in (1, 7, 60, 149):
        assert read(whole[start - 1][1], 150 - start) == whole[start:]


def test_a_store_names_the_bad_rows_of_a_batch_and_keeps_the_others(tmp_path):
    rows = ListRows([{"text": "" if n in (3, 70) else f"text {n}"} for n in range(300)])
    transform, sources, said = transform_of("plaintext", build_tokenizer()), Sources(["rows"], [rows], None), []
    store = build_token_store(sources, transform, tmp_path / "enough", 1, 2, said.append)
    assert len(store) == 298 and [line.split(":")[1] for line in said[:2]] == [" rows, row 4", " rows, row 71"]
    with pytest.raises(DataError, match=r"row 71.*max_bad_rows is 1"):
        build_token_store(sources, transform, tmp_path / "less", 1, 1, said.append)


@pytest.mark.slow
def test_tokenizers_start_no_threads_unless_a_person_says_so():
    code = """if True:
        import os, threading
        from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
        from sfumato.data.text.format import build_transform
        from tests.tiny_tokenizers import build_tokenizer
        config = TextDataConfig(synthetic=SyntheticTextConfig(), data_type="plaintext")
        tokenizer = build_tokenizer()
        os.environ.update(GIVEN)
        before = len(os.listdir("/proc/self/task"))
        build_transform(config, tokenizer).encode(["some text"] * 500)
        print(len(os.listdir("/proc/self/task")) - before, os.environ["TOKENIZERS_PARALLELISM"])
        """
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    for added, value in (({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, "true")):
        command = [sys.executable, "-c", code.replace("GIVEN", repr(added))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        threads, setting = done.stdout.split()
        assert setting == value and (int(threads) == 0 if value == "false" else int(threads) >= 0)
