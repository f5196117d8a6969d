"""A format of text data that is in no room of the library: a question, and the answer, which is trained on."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sfumato.data.files.rows import text_field
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import TextFormat, fingerprint_of, fit


@dataclass(frozen=True)
class QuestionAnswer(TextFormat):
    """Rows with columns question and answer."""

    type: ClassVar[str] = "question_answer"
    ignores: ClassVar[tuple[str, ...]] = ("chat_template", "text_keys")

    separator: str = " "
    """What stands between them."""

    def transform(self, config, tokenizer):
        return Transform(self.separator, tokenizer, config, fingerprint_of(config, tokenizer, []))


@dataclass(frozen=True)
class Transform:
    documents_per_sample: ClassVar[int] = 1
    separator: str
    tokenizer: Any
    config: Any
    fingerprint: str

    def __call__(self, row, where):
        question, answer = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (text_field(row, "question", where) + self.separator, text_field(row, "answer", where))
        )
        answer = [*answer, self.tokenizer.eos_token_id]
        input_ids = np.array([*question, *answer], np.int32)
        loss_mask = np.arange(len(input_ids)) >= len(question)
        config = self.config
        document: Document = fit((input_ids, loss_mask), config.max_seq_len, config.overlong, where)
        return [TextSample((document,))]


class NotAFormat:
    """No dataclass."""


@dataclass(frozen=True)
class Unfinished(TextFormat):
    """Makes no transform."""

    type: ClassVar[str] = "unfinished"
