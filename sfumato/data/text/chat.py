"""Chat templates: the tokens of a conversation, and a loss mask of those that the assistant generates."""

from __future__ import annotations

import datetime
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from sfumato.config.open_mappings import Keywords
from sfumato.data.files.compressed import read_text
from sfumato.data.text.answer_end import EXAMPLE_TOOL, facts_of, measure_answer_end
from sfumato.data.text.chat_date import with_date
from sfumato.data.text.chat_message import Message, check_messages
from sfumato.data.text.generation_blocks import GENERATION, check_blocks, is_in_blocks
from sfumato.data.text.messages import with_text_arguments
from sfumato.data.text.shown_messages import (
    TEMPLATES,
    advise_tool_template,
    find_problem,
    join_blocks,
    opening_of,
    repeated_tag,
    shows_message,
    template_names,
    texts_in,
    tool_names,
)
from sfumato.data.text.tokenise import Asking, Encoder, Tokens, ask_alone, begins_texts, check_fast
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_THINKING = "give enable_thinking another value in data.chat_template_options, or "
OWN = "the tokenizer's own"
"""What error messages call the template that comes with the tokenizer."""

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids, int32 ``[L]``, and their loss mask, bool ``[L]``."""
Span = tuple[int, int]
"""First character and, exclusive, last character of a part of a text."""
Rendered = tuple[str, list[Span], int]
"""A rendered text, the spans of its answers in the loss, and how many messages it renders."""
Expand = Callable[[str, list[Span], int], tuple[str, list[Span]]]
"""Inserts what stands for media into a text that renders so many messages, and shifts its spans accordingly."""
Result = TypeVar("Result")

BEGIN = "{{- bos_token }}"
"""What writes the token that begins a text, in front of templates that lack it."""

_TRACKER = threading.Lock()  # transformers tracks generation blocks in the compiled template, which threads share


class ChatTemplate:
    """Encodes conversations as the Jinja template of a tokenizer renders them.

    The loss mask holds the tokens that the model has to generate: those in ``{% generation %}`` blocks where the
    template has such blocks; else all tokens from the end of the prompt, as the template renders it for inference, up
    to and with the token that ends the turn, which is appended where the template writes none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, text: str, tool_text: str, name: str, options: Keywords | None = None
    ) -> None:
        """Finds out how answers end, by rendering test conversations.

        Args:
            tokenizer: a fast one.
            text: the Jinja source.
            tool_text: the source for conversations with tools, often the same.
            name: of the template, for messages.
            options: values of variables of the template.

        Raises:
            ConfigError: when generation blocks leave out the token that ends an answer, or the template writes today's
                date in a form that cannot be fixed, or as ``with_options``.
        """
        self.tokenizer = tokenizer
        self.name = name
        self.options = dict(options or {})
        if self.options:
            from sfumato.data.text.template_options import with_options

            text, tool_text = with_options([text, tool_text], self.options, tokenizer)
        self._sources = {"default": text, "tool_use": tool_text}
        facts = facts_of(tokenizer)
        date = facts.date or datetime.date.today()
        dated = [with_date(template_text, name, date) for template_text in (text, tool_text)]
        # not in ``_sources``: the processor of an export adds the token itself
        self.text, self.tool_text = (_begin_as_processor(template_text, tokenizer) for template_text in dated)
        self.encoder = Encoder(tokenizer, with_offsets=True)
        """Encodes the texts that ``asks`` yields."""
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) if specials else r"(?!)")
        self._special_ids = np.array(sorted(cast(list[int], tokenizer.convert_tokens_to_ids(specials))), dtype=np.int64)
        end = measure_answer_end(tokenizer, self._render_whole)
        notes = [f"the chat template is rendered with {key} {value!r}" for key, value in self.options.items()]
        if dated[0] != text:
            notes.append(f"the chat template writes the date of the run's first start, {date}")
        self.answer_end = replace(end, notes=(*end.notes, *notes))
        """How answers end."""
        facts.fingerprint = self.answer_end.fingerprint(facts.appends_end)
        self._stops = [token.text for token in self.answer_end.tokens]
        for template, tools in {self.tool_text: [EXAMPLE_TOOL], self.text: None}.items():
            if GENERATION.search(template):
                check_blocks(name, self.answer_end, partial(self._render_marked, tools), tokenizer)

    def adopt(self) -> None:
        """Makes this template the tokenizer's own, so that exports carry the template that was trained with."""
        facts_of(self.tokenizer).answer_end = self.answer_end
        current = self.tokenizer.chat_template
        if self.name == OWN and isinstance(current, dict):  # several templates by name, as transformers calls them
            self.tokenizer.chat_template = {key: self._sources.get(key, text) for key, text in current.items()}
        else:
            self.tokenizer.chat_template = self._sources["default"]

    def encode(
        self, messages: list[Message], where: str, tools: Sequence[Mapping[str, object]] | None = None
    ) -> list[Encoded]:
        """Encodes a conversation.

        Args:
            messages: with ``role`` and ``content``; ``loss_mask`` 0 on an assistant message keeps it out of
                the loss.
            where: file and row, for messages.
            tools: JSON schemas, for templates that show them to the model.

        Returns:
            Pairs ``(input_ids, loss_mask)``, int32 ``[L]`` and bool ``[L]``: usually one. A template that renders an
            answer otherwise once more messages follow (Qwen3 leaves out its thoughts) gives one for each answer in the
            loss, with the history as the model sees it at inference.

        Raises:
            DataError: for an unknown role, a message that the template refuses or leaves out, or when there is nothing
                to learn; it names ``where`` and the message.
        """
        return ask_alone(self.asks(messages, where, tools), self.encoder)

    def asks(
        self,
        messages: list[Message],
        where: str,
        tools: Sequence[Mapping[str, object]] | None = None,
        expand: Expand | None = None,
    ) -> Asking[list[Encoded]]:
        """As ``encode``, as a generator, so that texts of several conversations can be encoded together.

        It yields texts, is sent their tokens, and returns what ``encode`` returns. With ``expand`` contents of messages
        may be lists of parts.
        """
        trained = check_messages(messages, where, parts=expand is not None)
        # Templates get the messages without ``loss_mask``, which is no part of the conversation.
        shown_messages = [{key: value for key, value in message.items() if key != "loss_mask"} for message in messages]
        chat = _Chat(self, shown_messages, tools, where)
        texts = chat.render_marked_texts(trained) if GENERATION.search(chat.template) else chat.prefixed_texts(trained)
        whole = [(text, spans) if expand is None else expand(text, spans, count) for text, spans, count in texts]
        tokens_of_texts = yield [text for text, _ in whole]
        encoded = []
        for (text, spans), tokens in zip(whole, tokens_of_texts, strict=True):
            encoded.append((yield from self._make_mask(text, spans, tokens, where)))
        return encoded

    def render(
        self,
        messages: list[Message],
        where: str,
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Renders a conversation as for inference.

        Args:
            messages: with ``role`` and ``content``.
            where: file and row, for messages.
            tools: JSON schemas, for templates that show them to the model.
            prompt: whether to add the beginning of an answer.

        Raises:
            DataError: when the template refuses a message or leaves it out; names ``where`` and the message.
        """
        chat = _Chat(self, messages, tools, where)
        text = chat.render(len(messages), prompt)
        chat.check_shown(text, {})
        return text

    @cached_property
    def joins_arguments(self) -> bool:
        """Whether the template fails on arguments of calls that are mappings, and takes them as JSON texts."""
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

        def renders(messages: list[Message]) -> bool:
            try:
                self.tokenizer.apply_chat_template(messages, chat_template=self.tool_text, tokenize=False)
            except Exception:  # a template may raise anything
                return False
            return True

        return not renders(messages) and renders(with_text_arguments(messages))

    def _render_whole(self, messages: list[Message], tools: Sequence[Mapping[str, object]] | None) -> str:
        return _Chat(self, messages, tools, "").apply(len(messages))

    def _render_marked(
        self, tools: Sequence[Mapping[str, object]] | None, messages: list[Message]
    ) -> tuple[str, list[Span]]:
        return _Chat(self, messages, tools, "").render_marked()

    def ended(self, text: str, start: int, following: str, calls: bool) -> tuple[str, int]:
        """Finds where the last answer of a text ends, with the token that ends it.

        Args:
            text: of a conversation whose last message is the answer.
            start: first character of the answer.
            following: the text of the whole conversation.
            calls: whether the answer calls tools.

        Returns:
            The text, to which the token that ends the answer was appended where the template writes none; and the
            position in it after that token. White space that the template adds behind the token is not in the answer.
        """
        answer_end = self.answer_end
        if answer_end.tail_end and answer_end.tail and text.endswith(answer_end.tail, start):
            return text, len(text) - len(answer_end.tail) + answer_end.tail_end
        markers: list[re.Match[str]] = []  # special tokens at the end, with nothing but white space between them
        for marker in reversed(list(self._special.finditer(text, start))):
            if text[marker.end() : markers[0].start() if markers else len(text)].strip():
                break
            markers.insert(0, marker)
        ending = next((marker for marker in markers if marker.group() in self._stops), markers[-1] if markers else None)
        missing = answer_end.taught_after_call if calls else None
        missing = missing or (answer_end.taught if answer_end.is_appended else None)
        if ending is not None and (ending.group() in self._stops or missing is None):
            return text, ending.end()
        if missing is None or not facts_of(self.tokenizer).appends_end:
            return text, len(text)
        appended = next((stop for stop in self._stops if following.startswith(text + stop)), missing.text)
        return text + appended, len(text + appended)

    def _make_mask(self, text: str, spans: list[Span], tokens: Tokens, where: str) -> Asking[Encoded]:
        """The tokens of a text, and the loss mask of those that begin within a span.

        At inference the prompt is tokenised without the answer. Where the tokenizer would join the end of the prompt
        and the beginning of the answer in one token, the two are tokenised separately, so that training sees the tokens
        of inference.
        """
        input_ids, starts, ends = tokens
        assert starts is not None and ends is not None  # ``encoder`` gives offsets
        begins = _token_begins(starts, ends)
        if not all(((ends[:-1] == start) & (starts[1:] == start)).any() for start, _ in spans):
            bounds = [0, *(start for start, _ in spans), len(text)]
            # A boundary of a prompt is not one of tokens: tokenise the pieces between the boundaries.
            parts = yield [text[start:end] for start, end in itertools.pairwise(bounds)]
            parted_ids = np.concatenate([part[0] for part in parts])
            plain = ~np.isin(input_ids, self._special_ids)
            # Used only if they decode to the same text: some tokenizers put a space in front of every piece.
            if self._decode(parted_ids) == self._decode(input_ids):
                input_ids = parted_ids
                begins = np.concatenate(
                    [
                        first + _token_begins(*cast(tuple[np.ndarray, np.ndarray], part[1:]))
                        for first, part in zip(bounds, parts, strict=False)
                    ]
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
        loss_mask[:1] = False  # nothing predicts the first token
        if not loss_mask.any():
            raise DataError(f"{where}: the conversation has nothing to learn from: no token of an answer")
        return input_ids, loss_mask

    def _decode(self, input_ids: np.ndarray) -> str:
        return cast(str, self.tokenizer.decode(input_ids.tolist(), clean_up_tokenization_spaces=False))


class _Chat:
    """One conversation, and the rendered texts in which its answers are trained on."""

    def __init__(
        self,
        owner: ChatTemplate,
        messages: list[Message],
        tools: Sequence[Mapping[str, object]] | None,
        where: str,
    ) -> None:
        self.owner = owner
        self.tools = tools
        self.where = where
        has_calls = any(message.get("tool_calls") for message in messages)
        self.messages = with_text_arguments(messages) if has_calls and owner.joins_arguments else messages
        self.template = owner.tool_text if tools else owner.text

    def render_marked(self, count: int | None = None) -> tuple[str, list[Span]]:
        """Renders the first ``count`` messages (None: all). Returns the text and the spans of its generation blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _TRACKER:
            texts, blocks = render_jinja_template(
                conversations=[self.messages[:count]],
                tools=self.tools,  # pyright: ignore[reportArgumentType]
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.owner.tokenizer.special_tokens_map,  # pyright: ignore[reportArgumentType]
            )
        return texts[0], cast(list[Span], blocks[0])

    def render_marked_texts(self, trained: list[int]) -> list[Rendered]:
        """The texts to train on, for a template with generation blocks.

        It is the whole conversation, or one text for each answer where the template leaves out some of an earlier
        answer, such as its thoughts, once more messages follow.

        Args:
            trained: indices of the messages in the loss.
        """
        text, blocks = self._render_checked(self.render_marked)
        # A tag that the prompt opens stands in front of the blocks, and may be repeated in the data.
        opening = opening_of(text[: blocks[0][0]]).strip() if blocks else ""
        for index in trained:
            contents = [content.strip().removeprefix(opening) for content in texts_in(self.messages[index])]
            if not all(is_in_blocks(content, text, blocks) for content in contents):
                raise self._template_error(
                    index, "the generation blocks of the chat template leave out some of what it says: widen them"
                )
        self.check_shown(text, {})
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        by_answer = dict(zip(answers, blocks, strict=True)) if len(blocks) == len(answers) else None
        for index in trained:
            answer_blocks = blocks if by_answer is None else [by_answer[index]]
            if find_problem(self.messages[index], _restore_blocks(text, answer_blocks)) is not None:
                return [self._marked_answer(index) for index in trained]
        if len(trained) < len(answers):
            if by_answer is None:  # which block belongs to which message could not be told
                raise DataError(
                    f"{self.where}: loss_mask cannot be followed: the chat template has {len(blocks)} generation "
                    f"blocks for {len(answers)} assistant messages"
                )
            blocks = [by_answer[index] for index in trained]
        return [(text, blocks, len(self.messages))]

    def _marked_answer(self, index: int) -> Rendered:
        """The text of the conversation up to an answer, with the generation blocks of that answer.

        Raises DataError when the template leaves out some of the answer.
        """
        text, blocks = self._render_checked(lambda: self.render_marked(index + 1), index + 1)
        num_before = len(self._render_checked(lambda: self.render_marked(index), index)[1]) if index else 0
        answer_blocks = blocks[num_before:]
        problem = find_problem(self.messages[index], _restore_blocks(text, answer_blocks))
        if problem is not None:
            raise self._template_error(index, problem)
        return text, answer_blocks, index + 1

    def prefixed_texts(self, trained: list[int]) -> list[Rendered]:
        """The texts to train on, for a template without generation blocks.

        It is the whole conversation with the spans of all answers, or one text for each answer where the template
        renders an earlier answer otherwise once more messages follow.

        Args:
            trained: indices of the messages in the loss.
        """
        whole = self.render(len(self.messages))
        prompts = {index: self.render(index, prompt=True) for index in trained}
        last = len(self.messages) - 1
        texts = {index: whole if index == last else self.render(index + 1) for index in trained}
        for index in trained:
            if not texts[index].startswith(prompts[index]):
                opens = opening_of(prompts[index]).strip() == "<think>"
                raise self._template_error(
                    index,
                    "the chat template does not begin the answer as it does at inference"
                    + (f" with data.chat_template_options {self.owner.options}" if self.owner.options else "")
                    + (", where the prompt opens <think>, which is not shown here" if opens else "")
                    + ", so that its tokens cannot be told apart; "
                    + ("give the answer thoughts (reasoning_content), or " if opens else "")
                    + (OTHER_THINKING if "enable_thinking" in self.template else "")
                    + "mark them with {% generation %} blocks in a template of your own (data.chat_template)",
                )
        spans = {}
        for index in trained:
            start = len(prompts[index])
            calls = bool(self.messages[index].get("tool_calls"))
            texts[index], end = self.owner.ended(texts[index], start, whole, calls)
            spans[index] = (start, end)
        whole = texts.get(last, whole)
        self.check_shown(
            whole, {index: opening_of(prompts[index]) + texts[index][slice(*spans[index])] for index in trained}
        )
        # True unless the template renders an earlier answer, or the history before it, otherwise in the whole text.
        if all(whole.startswith(texts[index][: spans[index][1]]) for index in trained):
            return [(whole, list(spans.values()), len(self.messages))]
        return [(texts[index], [spans[index]], index + 1) for index in trained]

    def render(self, count: int, prompt: bool = False) -> str:
        """Renders the first ``count`` messages; ``prompt`` adds the beginning of an answer.

        Raises DataError when the template refuses a message.
        """
        if count == 0:
            raise self._template_error(
                0, "a conversation cannot begin with an answer: remove it or set its loss_mask to 0"
            )
        return self._render_checked(lambda: self.apply(count, prompt), count)

    def apply(self, count: int, prompt: bool = False) -> str:
        """As ``render``, but raises what the template raises."""
        with _TRACKER:
            text = self.owner.tokenizer.apply_chat_template(
                self.messages[:count],
                tools=self.tools,  # pyright: ignore[reportArgumentType]
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        return cast(str, text)

    def _render_checked(self, render: Callable[[], Result], count: int | None = None) -> Result:
        """Returns what ``render`` returns, under the limits for templates.

        Raises:
            DataError: when the template refuses the first ``count`` messages (None: all), naming the message that it
                refuses: the one after the longest beginning that it renders.
        """
        import jinja2

        from sfumato.data.text.template_limits import EXPRESSION_ERRORS, TemplateLimitError, limit_rendering

        refusals = (jinja2.TemplateError, *EXPRESSION_ERRORS)
        try:
            with limit_rendering(self.template):
                return render()
        except TemplateLimitError as error:
            raise DataError(f"{self.where}: the chat template {error}") from error
        except refusals as error:
            # The longest beginning that the template renders ends before the message that it refuses.
            for num_accepted in range((count or len(self.messages)) - 1, 0, -1):
                try:
                    self.apply(num_accepted)
                except refusals:
                    continue
                break
            else:
                num_accepted = 0
            raise self._template_error(num_accepted, f"the chat template refuses it: {error}") from error

    def check_shown(self, text: str, answers: dict[int, str]) -> None:
        """Raises DataError when the template leaves out a message, an answer in the loss, or a tool."""
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                if not shows_message(message, text):
                    raise self._template_error(index, "the chat template leaves it out")
                if message["role"] == "tool" and (tag := repeated_tag(message, text)):
                    raise self._template_error(
                        index, f"begins with {tag}, which the chat template writes, too: remove it"
                    )
            elif index in answers:
                problem = find_problem(message, answers[index])
                if problem is not None:
                    raise self._template_error(index, problem)
        for name in tool_names(self.tools or []):
            if name not in text:
                raise DataError(f"{self.where}: the chat template leaves out the tool {name!r}{advise_tool_template()}")

    def _template_error(self, index: int, problem: str) -> DataError:
        return DataError(f"{self.where}: message {index + 1} ({self.messages[index]['role']}): {problem}")


def build_chat_template(
    name: str | None, tokenizer: PreTrainedTokenizerBase, options: Keywords | None = None
) -> ChatTemplate:
    """Builds the chat template of a configuration.

    Args:
        name: of a template of sfumato, a Jinja file, or None for the tokenizer's own.
        tokenizer: a fast tokenizer.
        options: values of variables of the template, such as ``enable_thinking``.

    Raises:
        ConfigError: when there is no such template, it is no valid Jinja, or it does not fit tokenizer or options.
    """
    check_fast(tokenizer)
    if name is None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer has no chat template: set data.chat_template to {', '.join(template_names())} or to a "
                "Jinja file"
            )
        try:
            texts = [tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])]
        except ValueError as error:
            raise ConfigError(f"data.chat_template: {error}") from error
    else:
        # The templates that come with sfumato do not write the token that begins a text.
        begins = BEGIN if (TEMPLATES / f"{name}.jinja").is_file() and begins_texts(tokenizer) else ""
        texts = [begins + _read_template(name)] * 2
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_vocab()]
    if name in ("chatml", "hermes") and missing:
        raise ConfigError(f"data.chat_template {name} needs the tokens {' and '.join(missing)} in the tokenizer")
    for text in texts:
        _check_syntax(text, name or OWN)
    text, tool_text = cast(list[str], texts)
    return ChatTemplate(tokenizer, text, tool_text, name or OWN, options)


def _begin_as_processor(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A template that writes the token with which the model's processor begins chats (``TokenizerFacts``)."""
    bos = cast("str | None", tokenizer.bos_token)
    if bos is None or not facts_of(tokenizer).begins_chats or bos in text or "bos_token" in text:
        return text
    return BEGIN + text


def _read_template(name: str) -> str:
    """Reads a template of sfumato by its name, or a file. Raises ConfigError when there is none."""
    shipped = TEMPLATES / f"{name}.jinja"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        names = ", ".join(template_names())
        raise ConfigError(f"data.chat_template: no Jinja file {name}; the templates with a name are {names}")
    return read_text(path)


def _check_syntax(text: str, name: str) -> None:
    """Raises ConfigError when a template is not valid Jinja, or exceeds the limits when it is compiled."""
    import jinja2

    from sfumato.data.text.template_limits import TemplateLimitError, limit_template

    try:
        limit_template(text)  # only compiles
    except TemplateLimitError as error:
        raise ConfigError(f"data.chat_template: {name} {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"data.chat_template: {name} is not valid Jinja: line {error.lineno}: {error}") from error


def _token_begins(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The character at which each token begins, counting the space in front of a word to its token.

    Some tokenizers leave that space out of the offsets: a token then begins where the one before it ends.
    """
    return np.minimum(starts, np.concatenate([[0], ends])[: len(starts)])


def _restore_blocks(text: str, blocks: Sequence[Span]) -> str:
    """The text in generation blocks, with the tag in front of the first that begins the answer."""
    return opening_of(text[: blocks[0][0]]) + join_blocks(text, blocks) if blocks else ""
