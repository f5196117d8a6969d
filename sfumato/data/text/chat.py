"""Chat templates: a conversation becomes tokens, of which the loss mask holds those that the assistant generates."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sfumato.data.files.rows import read_text
from sfumato.data.text.answer_end import EXAMPLE_TOOL, facts_of, measure_answer_end
from sfumato.data.text.chat_date import with_date
from sfumato.data.text.generation_blocks import GENERATION, check_blocks, is_in_blocks
from sfumato.data.text.messages import with_text_arguments
from sfumato.data.text.tokenise import Asking, Encoder, Tokens, ask_alone, begins_texts
from sfumato.errors import ConfigError, DataError

ROLES = ("system", "user", "assistant", "tool", "developer")
TEMPLATES = Path(__file__).parent / "templates"
OWN = "the tokenizer's own"
"""What messages call a template that no setting names."""

Message = dict[str, Any]
Encoded = tuple[np.ndarray, np.ndarray]
Span = tuple[int, int]
Rendered = tuple[str, list[Span], int]
"""A text, the spans of its answers, and how many messages it renders."""
Expand = Callable[[str, list[Span], int], tuple[str, list[Span]]]
"""Puts what stands for the images of so many messages into their text, and moves spans with it."""
Result = TypeVar("Result")

_TRACKER = threading.Lock()  # transformers tracks generation blocks in the compiled template, which threads share


class ChatTemplate:
    """Encodes conversations as the Jinja template of a tokenizer renders them.

    The loss mask holds the tokens that the model has to generate: those of a ``{% generation %}`` block where the
    template has such blocks, else what stands between the prompt of an answer, as the template renders it for
    inference, and the token that ends the turn, with that token, which is appended where the template writes none.
    """

    def __init__(self, tokenizer: Any, text: str, tool_text: str, name: str) -> None:
        """Asks the template how answers end.

        Args:
            tokenizer: a fast one.
            text: the template.
            tool_text: the one for conversations with tools, often the same.
            name: for messages.

        Raises:
            ConfigError: when blocks of the template leave out what ends an answer, or it writes a date that changes.
        """
        self.tokenizer = tokenizer
        self.name = name
        self._source = text
        facts = facts_of(tokenizer)
        date = facts.date or datetime.date.today()
        self.text, self.tool_text = (with_date(each, name, date) for each in (text, tool_text))
        self.encoder = Encoder(tokenizer, with_offsets=True)
        """Makes the tokens that ``asks`` asks for."""
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) if specials else r"(?!)")
        self._special_ids = np.array(sorted(tokenizer.convert_tokens_to_ids(specials)), dtype=np.int64)
        end = measure_answer_end(tokenizer, self._render_whole)
        if self.text != text:
            end = replace(
                end, notes=(*end.notes, f"the chat template writes the date of the run's first start, {date}")
            )
        self.answer_end = end
        """How answers end."""
        facts.fingerprint = self.answer_end.fingerprint(facts.appends_end)
        self._stops = [token.text for token in self.answer_end.tokens]
        for template, tools in {self.tool_text: [EXAMPLE_TOOL], self.text: None}.items():
            if GENERATION.search(template):
                check_blocks(name, self.answer_end, partial(self._marked, tools), tokenizer)

    def adopt(self) -> None:
        """Makes this template the tokenizer's own, which exports carry: what was trained is what is said then."""
        facts_of(self.tokenizer).answer_end = self.answer_end
        if self.name != OWN:
            self.tokenizer.chat_template = self._source

    def encode(self, messages: list[Message], where: str, tools: list[dict[str, Any]] | None = None) -> list[Encoded]:
        """The tokens of a conversation, and their loss mask.

        Args:
            messages: with ``role`` and ``content``; ``loss_mask`` 0 on an assistant message keeps it out of
                the loss.
            where: file and row, for messages.
            tools: JSON schemas, for templates that show them to the model.

        Returns:
            ``[(input_ids, loss_mask)]``, int32 ``[L]`` and bool ``[L]``, usually one. A template that renders earlier
            answers in another way once more messages follow (Qwen3 leaves out their thoughts) gives one for each
            answer in the loss, with the history as the model sees it at inference.

        Raises:
            DataError: for an unknown role, a message that the template refuses or leaves out, or when there is
                nothing to learn; it names ``where`` and the message.
        """
        return ask_alone(self.asks(messages, where, tools), self.encoder)

    def asks(
        self,
        messages: list[Message],
        where: str,
        tools: list[dict[str, Any]] | None = None,
        expand: Expand | None = None,
    ) -> Asking[list[Encoded]]:
        """As ``encode``, for work whose texts are encoded together with those of other conversations.

        With ``expand`` contents may be lists of parts.
        """
        trained = check_messages(messages, where, parts=expand is not None)
        shown = [{key: value for key, value in message.items() if key != "loss_mask"} for message in messages]
        chat = _Chat(self, shown, tools, where)
        texts = chat.marked_texts(trained) if GENERATION.search(chat.template) else chat.prefixed_texts(trained)
        whole = [(text, spans) if expand is None else expand(text, spans, count) for text, spans, count in texts]
        found = yield [text for text, _ in whole]
        encoded = []
        for (text, spans), tokens in zip(whole, found, strict=True):
            encoded.append((yield from self._mask(text, spans, tokens, where)))
        return encoded

    def render(
        self,
        messages: list[Message],
        where: str,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = True,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The text of a conversation as it is rendered for inference.

        Args:
            messages: with ``role`` and ``content``.
            where: file and row, for messages.
            tools: JSON schemas, for templates that show them to the model.
            prompt: whether the beginning of an answer follows.
            options: variables of the template, such as ``enable_thinking``.

        Raises:
            DataError: when the template refuses a message or leaves it out; names ``where`` and the message.
        """
        chat = _Chat(self, messages, tools, where, options)
        text = chat.render(len(messages), prompt)
        chat.check_shown(text, {})
        return text

    @cached_property
    def joins_arguments(self) -> bool:
        """Whether the template puts arguments of calls into a text as they are, and so takes JSON texts alone."""
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

        def renders(messages: list[Message]) -> bool:
            try:
                self.tokenizer.apply_chat_template(messages, chat_template=self.tool_text, tokenize=False)
            except Exception:  # whatever a template raises
                return False
            return True

        return not renders(messages) and renders(with_text_arguments(messages))

    def _render_whole(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        return _Chat(self, messages, tools, "").apply(len(messages))

    def _marked(self, tools: list[dict[str, Any]] | None, messages: list[Message]) -> tuple[str, list[Span]]:
        return _Chat(self, messages, tools, "").marked()

    def ended(self, text: str, start: int, following: str, calls: bool) -> tuple[str, int]:
        """A text up to the token that ends its last answer, without the white space that the template adds behind it.

        Args:
            text: of a conversation that an answer ends.
            start: of the answer.
            following: the text of the whole conversation.
            calls: whether the answer calls tools.

        Returns:
            The text, to which that token was appended where the template writes none; and where the answer ends in it.
        """
        known = self.answer_end
        if known.tail_end and known.tail and text.endswith(known.tail, start):
            return text, len(text) - len(known.tail) + known.tail_end
        run: list[re.Match[str]] = []  # special tokens at the end
        for marker in reversed(list(self._special.finditer(text, start))):
            if text[marker.end() : run[0].start() if run else len(text)].strip():
                break
            run.insert(0, marker)
        end = next((marker for marker in run if marker.group() in self._stops), run[-1] if run else None)
        missing = known.taught_after_call if calls else None
        missing = missing or (known.taught if known.is_appended else None)
        if end is not None and (end.group() in self._stops or missing is None):
            return text, end.end()
        if missing is None or not facts_of(self.tokenizer).appends_end:
            return text, len(text)
        follows = next((stop for stop in self._stops if following.startswith(text + stop)), missing.text)
        return text + follows, len(text + follows)

    def _mask(self, text: str, spans: list[Span], tokens: Tokens, where: str) -> Asking[Encoded]:
        """Tokens of the text, and the loss mask that holds those that begin within a span.

        At inference the prompt is tokenised without the answer. Where the tokenizer would join the end of one and the
        beginning of the other, they are tokenised apart, so that training sees the same tokens.
        """
        input_ids, starts, ends = tokens
        begins = _begins(starts, ends)
        if not all(((ends[:-1] == start) & (starts[1:] == start)).any() for start, _ in spans):
            bounds = [0, *(start for start, _ in spans), len(text)]
            parts = yield [text[start:end] for start, end in itertools.pairwise(bounds)]
            apart = np.concatenate([part[0] for part in parts])
            plain = ~np.isin(input_ids, self._special_ids)
            if self._decode(apart) == self._decode(input_ids):
                input_ids = apart
                begins = np.concatenate(
                    [first + _begins(*part[1:]) for first, part in zip(bounds, parts, strict=False)]
                )
            elif any((plain & (starts < start) & (start < ends)).any() for start, _ in spans):
                raise DataError(
                    f"{where}: the prompt of an answer ends within a token, and this tokenizer cannot part them: let "
                    "the chat template end the prompt in a special token, and the answer begin with a letter"
                )
            else:
                begins = starts
        loss_mask = np.zeros(len(input_ids), dtype=bool)
        for start, end in spans:
            loss_mask |= (start <= begins) & (begins < end)
        loss_mask[:1] = False  # nothing predicts it
        if not loss_mask.any():
            raise DataError(f"{where}: the conversation has nothing to learn from: no token of an answer")
        return input_ids, loss_mask

    def _decode(self, input_ids: np.ndarray) -> str:
        return self.tokenizer.decode(input_ids.tolist(), clean_up_tokenization_spaces=False)


class _Chat:
    """One conversation, and the texts in which its answers are trained on."""

    def __init__(
        self,
        owner: ChatTemplate,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        where: str,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.owner = owner
        self.tools = tools
        self.where = where
        has_calls = any(message.get("tool_calls") for message in messages)
        self.messages = with_text_arguments(messages) if has_calls and owner.joins_arguments else messages
        self.options = options or {}
        self.template = owner.tool_text if tools else owner.text

    def marked(self) -> tuple[str, list[Span]]:
        """The whole text, and the spans of its generation blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _TRACKER:
            texts, blocks = render_jinja_template(
                conversations=[self.messages],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.owner.tokenizer.special_tokens_map,
            )
        return texts[0], blocks[0]

    def marked_texts(self, trained: list[int]) -> list[Rendered]:
        """The whole text, with the spans of its generation blocks."""
        text, blocks = self._attempt(self.marked)
        for index in trained:
            if not all(is_in_blocks(said, text, blocks) for said in _texts_of(self.messages[index])):
                raise self._error(
                    index, "the generation blocks of the chat template leave out some of what it says: widen them"
                )
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(trained) < len(answers):
            if len(blocks) != len(answers):
                raise DataError(
                    f"{self.where}: loss_mask cannot be followed: the chat template has {len(blocks)} generation "
                    f"blocks for {len(answers)} assistant messages"
                )
            blocks = [block for index, block in zip(answers, blocks, strict=True) if index in trained]
        self.check_shown(text, {})
        return [(text, blocks, len(self.messages))]

    def prefixed_texts(self, trained: list[int]) -> list[Rendered]:
        """The whole text with the spans of the answers, or one text for each answer."""
        whole = self.render(len(self.messages))
        prompts = {index: self.render(index, prompt=True) for index in trained}
        last = len(self.messages) - 1
        texts = {index: whole if index == last else self.render(index + 1) for index in trained}
        for index in trained:
            if not texts[index].startswith(prompts[index]):
                raise self._error(
                    index,
                    "the chat template does not begin the answer as it does at inference, so that its tokens cannot "
                    "be told apart; mark them with {% generation %} blocks in a template of your own "
                    "(data.chat_template)",
                )
        spans = {}
        for index in trained:
            start = len(prompts[index])
            calls = bool(self.messages[index].get("tool_calls"))
            texts[index], end = self.owner.ended(texts[index], start, whole, calls)
            spans[index] = (start, end)
        whole = texts.get(last, whole)
        self.check_shown(whole, {index: texts[index][slice(*spans[index])] for index in trained})
        if all(whole.startswith(texts[index][: spans[index][1]]) for index in trained):
            return [(whole, list(spans.values()), len(self.messages))]
        return [(texts[index], [spans[index]], index + 1) for index in trained]

    def render(self, count: int, prompt: bool = False) -> str:
        """The text of the first messages; ``prompt`` adds the beginning of an answer."""
        if count == 0:
            raise self._error(0, "a conversation cannot begin with an answer: remove it or set its loss_mask to 0")
        return self._attempt(lambda: self.apply(count, prompt), count)

    def apply(self, count: int, prompt: bool = False) -> str:
        """As ``render``, with what the template raises."""
        with _TRACKER:
            return self.owner.tokenizer.apply_chat_template(
                self.messages[:count],
                tools=self.tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.options,
            )

    def _attempt(self, render: Callable[[], Result], count: int | None = None) -> Result:
        """What ``render`` returns; when the template refuses, the message that it does not take is named."""
        import jinja2

        from sfumato.data.text.template_limits import EXPRESSION_ERRORS, TemplateLimitError, limited_rendering

        refusals = (jinja2.TemplateError, *EXPRESSION_ERRORS)
        try:
            with limited_rendering(self.template):
                return render()
        except TemplateLimitError as error:
            raise DataError(f"{self.where}: the chat template {error}") from error
        except refusals as error:
            for fine in range((count or len(self.messages)) - 1, 0, -1):
                try:
                    self.apply(fine)
                except refusals:
                    continue
                break
            else:
                fine = 0
            raise self._error(fine, f"the chat template refuses it: {error}") from error

    def check_shown(self, text: str, answers: dict[int, str]) -> None:
        """Raises DataError when the template leaves out a message, an answer in the loss, or a tool."""
        squeezed = {index: _squeeze(answer) for index, answer in answers.items()}
        for index, message in enumerate(self.messages):
            contents = _texts_of(message)
            if message["role"] != "assistant":
                if any(said.strip() not in text and _in_json(said.strip()) not in text for said in contents):
                    raise self._error(index, "the chat template leaves it out")
            elif index in answers:
                for said in (*contents, message.get("reasoning_content") or ""):
                    if not any(_squeeze(text) in squeezed[index] for text in (said, _in_json(said))):
                        raise self._error(index, "the chat template leaves out some of what it says")
                for name in _tool_names(message.get("tool_calls") or []):
                    if name not in answers[index]:
                        raise self._error(index, f"the chat template leaves out its call of {name!r}")
        for name in _tool_names(self.tools or []):
            if name not in text:
                raise DataError(f"{self.where}: the chat template leaves out the tool {name!r}")

    def _error(self, index: int, what: str) -> DataError:
        return DataError(f"{self.where}: message {index + 1} ({self.messages[index]['role']}): {what}")


def build_chat_template(name: str | None, tokenizer: Any) -> ChatTemplate:
    """The chat template of a configuration.

    Args:
        name: ``chatml``, a Jinja file, or None for the tokenizer's own.
        tokenizer: a fast tokenizer.

    Raises:
        ConfigError: when there is no such template, it is no valid Jinja, or it does not fit the tokenizer.
    """
    check_fast(tokenizer)
    if name is None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: set data.chat_template to chatml or to a Jinja file")
        try:
            texts = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])]
        except ValueError as error:
            raise ConfigError(f"data.chat_template: {error}") from error
    else:
        begins = "{{- bos_token }}" if (TEMPLATES / f"{name}.jinja").is_file() and begins_texts(tokenizer) else ""
        texts = [begins + _read_template(name)] * 2
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_vocab()]
    if name in ("chatml", "hermes") and missing:
        raise ConfigError(f"data.chat_template {name} needs the tokens {' and '.join(missing)} in the tokenizer")
    for text in texts:
        _check_syntax(text, name or OWN)
    return ChatTemplate(tokenizer, *texts, name or OWN)


def check_fast(tokenizer: Any) -> None:
    """Raises ConfigError when the tokenizer does not say which characters a token comes from."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} does not say which characters a token comes from: "
            "model.tokenizer_path needs a fast one, with a tokenizer.json"
        )


def check_messages(messages: list[Message], where: str, parts: bool = False) -> list[int]:
    """The indices of the answers that are trained on. With ``parts`` a content may be a list of text and images.

    Raises:
        DataError: for an unknown role, missing content, a wrong ``loss_mask``, or when no answer is trained on.
    """
    trained = []
    for index, message in enumerate(messages):
        role = message.get("role")
        content = message.get("content")
        mask = message.get("loss_mask")
        place = f"{where}: message {index + 1}"
        if role not in ROLES:
            raise DataError(f"{place}: unknown role {role!r}; known are {', '.join(ROLES)}")
        place = f"{place} ({role})"
        if not has_content(message) and not (parts and isinstance(content, list) and content):
            raise DataError(f"{place}: content must be a non-empty text, not {content!r}")
        if mask not in (None, 0, 1):
            raise DataError(f"{place}: loss_mask must be 0 or 1, not {mask!r}")
        if mask and role != "assistant":
            raise DataError(f"{place}: loss_mask is 1, but only what the assistant says can be learned")
        if role == "assistant" and mask != 0:
            trained.append(index)
    if not trained:
        raise DataError(f"{where}: the conversation has nothing to learn from: no assistant message with loss_mask 1")
    return trained


def has_content(message: Message) -> bool:
    """Whether a message says what one of its role must: a system message, the result of a tool, and the text beside
    calls of tools may be empty."""
    content = message.get("content")
    if message.get("role") == "assistant" and message.get("tool_calls"):
        return content is None or isinstance(content, str | list)
    may_be_empty = message.get("role") in ("system", "developer", "tool")
    return isinstance(content, str) and (may_be_empty or bool(content.strip()))


def _read_template(name: str) -> str:
    shipped = TEMPLATES / f"{name}.jinja"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
        raise ConfigError(f"data.chat_template: no Jinja file {name}; the templates with a name are {known}")
    return read_text(path)


def _check_syntax(text: str, name: str) -> None:
    import jinja2

    from sfumato.data.text.template_limits import TemplateLimitError, limit_template

    try:
        limit_template(text)  # only compiles
    except TemplateLimitError as error:
        raise ConfigError(f"data.chat_template: {name} {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"data.chat_template: {name} is not valid Jinja: line {error.lineno}: {error}") from error


def _begins(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Where tokens begin when the space in front of a word, which some offsets leave out, is part of its token."""
    return np.minimum(starts, np.concatenate([[0], ends])[: len(starts)])


def _tool_names(tools: Any) -> list[str]:
    """Names of tools, or of calls of them; they stand at the top or below ``function``."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def _texts_of(message: Message) -> list[str]:
    """What a message says, its images left out."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _squeeze(text: str) -> str:
    return "".join(text.split())
