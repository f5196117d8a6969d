"""Prompts for reinforcement learning of language models: their tokens, and which of them an iteration samples."""

from __future__ import annotations

import copy
import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.files.row_table import FiledRow, RowTable, read_row_with_folder
from sfumato.data.media.document_media import MediaRefs, images_of
from sfumato.data.prompt_loader import PromptLoader
from sfumato.data.shared_rows import shared_line
from sfumato.data.text.chat_message import Messages, as_text
from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.data.text.shown_messages import tool_names
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfumato.data.text.prompt_formats.base import PromptRow

LOOKED_AT = 64
"""Rows from the beginning of a split whose format is told in the log."""

Curriculum = Callable[[int, list[dict[str, object]], int], object]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt, with the metadata that its reward needs."""

    token_ids: tuple[int, ...]
    """The tokens that the policy continues: the whole rendered prompt, with tools and the beginning of the answer."""
    text: str
    """The prompt as people read it: a plain text, or the user's last message."""
    messages: Messages | None
    """The whole conversation; None for a plain text that is not rendered by a chat template."""
    metadata: dict[str, object] = field(default_factory=dict)
    """What rewards need, such as ``answer``."""
    where: str = ""
    """File and row, for messages."""
    tools: Tools | None = None
    """JSON schemas of the tools that the rendered prompt lists."""
    images: MediaRefs | None = None
    """The media in the prompt."""

    def copy_for_sample(self) -> TextPrompt:
        """The same for a user's code, which may change what it is given without changing it for other samples."""
        metadata, messages, tools = copy.deepcopy((self.metadata, self.messages, self.tools))
        return replace(self, metadata=metadata, messages=messages, tools=tools)


def load_text_prompts(
    config: TextPromptDataConfig,
    template: PromptTemplate,
    split: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    tools: Tools | None = None,
    log: Callable[[str], None] = print,
) -> list[TextPrompt]:
    """Reads and encodes all prompts of a split.

    Args:
        config: the data section.
        template: of ``build_prompt_template``.
        split: "train" or "eval".
        seed: of problems that are made in code.
        limit: how many prompts to read, the first of the split; None: all. For evaluation it is eval.num_prompts.
        tools: JSON schemas of the rollout's tools, shown with each prompt whose row has no tools.
        log: takes messages, such as how many prompts were too long.

    Raises:
        DataError: when a file or row is missing or broken, a prompt is longer than ``max_prompt_tokens`` and
            ``data.overlong`` makes that an error, or there are fewer than ``limit`` usable prompts.
    """
    rows, read = _open_rows(config, split, seed)
    if config.synthetic is None and not config.data_type.makes_rows:
        from sfumato.data.files.folders import describe_left_out

        for line in describe_left_out(getattr(config, f"{split}_path"), f"data.{split}_path", split == "eval"):
            log(line)
        num_described = min(len(rows), LOOKED_AT, limit or LOOKED_AT)
        described = Counter(config.data_type.describe(rows[index]) for index in range(num_described))
        log(f"data.{split}_path: rows read as {' and '.join(described)}")
    prompts = []
    too_long = []
    index = 0
    while index < len(rows) and (limit is None or len(prompts) < limit):
        size = min(512, len(rows) - index) if limit is None else min(limit - len(prompts), len(rows) - index)
        # Up to 512 rows a time, which one call of the tokenizer encodes; no more than may still be needed.
        for prompt in encode_rows(range(index, index + size), rows, read, template, tools):
            if len(prompt.token_ids) > config.max_prompt_tokens:
                too_long.append(f"{prompt.where} ({len(prompt.token_ids)} tokens)")
                prompt = _fit_prompt(prompt, config)
            if prompt is not None:
                prompts.append(prompt)
        index += size
    if too_long:
        action = "left out" if config.overlong == "drop" else f"cut to their last {config.max_prompt_tokens} tokens"
        log(
            f"data.{split}_path: {len(too_long)} of {index} prompts are longer than data.max_prompt_tokens "
            f"{config.max_prompt_tokens} and were {action}; the first is {too_long[0]}"
        )
    if template.chat is not None:
        from sfumato.data.text.turn_markers import RENDERED_PROMPTS, describe_turn_markers

        contents = ((prompt.where, prompt.messages) for prompt in prompts)
        for line in describe_turn_markers(f"data.{split}_path", contents, template.chat, RENDERED_PROMPTS):
            log(line)
    if not prompts or (limit is not None and len(prompts) < limit):
        shortfall = "" if limit is None else f", but {limit} are asked for (eval.num_prompts)"
        dropped = f" and {len(too_long)} too long" if too_long and config.overlong == "drop" else ""
        raise DataError(f"{_option_of_split(config, split)}: has {len(prompts)} usable prompts{dropped}{shortfall}")
    return prompts


def _open_rows(config: TextPromptDataConfig, split: str, seed: int) -> tuple[RowTable, Callable[..., PromptRow]]:
    """Opens the rows of a split. Returns them and the function that reads a row, given the row and its place."""
    if config.synthetic is None:
        return config.data_type.open(config, split, seed), config.data_type.read
    from sfumato.data.synthetic.text import SyntheticRows

    rows = SyntheticRows(config.synthetic, seed, held_out=split == "eval")
    problem_metadata = {"problem": config.synthetic.problem}

    def read(row: FiledRow, where: str) -> PromptRow:
        columns = {name: row[name] for name in ("prompt", "answer", "images", "audios") if name in row}
        return config.data_type.read(FiledRow(columns | problem_metadata), where)

    return rows, read


def _option_of_split(config: TextPromptDataConfig, split: str) -> str:
    """The option that the prompts of a split come from, for messages."""
    if config.synthetic is not None:
        return "data.synthetic"
    return f"data.data_type {config.data_type.type}" if config.data_type.makes_rows else f"data.{split}_path"


def encode_rows(
    indices: range, rows: RowTable, read: Callable[..., PromptRow], template: PromptTemplate, tools: Tools | None
) -> list[TextPrompt]:
    """The prompts of some rows, encoded in one call of the tokenizer."""
    rendered = []
    texts = []
    for index in indices:
        where = rows.describe(index)
        row = read(read_row_with_folder(rows, index), where)
        shown_tools = row.tools or tools
        if tools and (unknown := sorted(set(tool_names(row.tools or ())) - set(tool_names(tools)))):
            raise DataError(
                f"{where}: its column tools offers {unknown[0]}, calls of which nothing would answer: name the "
                "function in rollout.kind.use, or leave the column out"
            )
        messages = template.messages_of(row.content, where)
        images = None
        text = row.content if messages is None else template.render(messages, where, shown_tools)
        if template.reader is not None and messages is not None:
            replacements, shapes = template.reader.place_files(row.images, where)
            text, _ = template.reader.expand(cast(str, text), [], replacements, where)
            images = images_of(row.images, shapes, where)
            messages = [message | {"content": as_text(message.get("content"))} for message in messages]
        texts.append(text)
        rendered.append((row, messages, shown_tools, where, images))
    prompts = []
    media_tokens = template.media_tokens
    for (row, messages, shown_tools, where, images), ids in zip(rendered, template.encode(texts), strict=True):
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of the prompt")
        if ids[-1] in media_tokens:
            raise DataError(
                f"{where}: the prompt ends with an image, a video or audio: let the chat template end it with a text"
            )
        last = next((message["content"] for message in reversed(messages or []) if message["role"] == "user"), None)
        text = row.content if isinstance(row.content, str) else last or cast(Messages, messages)[-1]["content"]
        tools_shown = shown_tools if messages else None
        prompts.append(TextPrompt(tuple(ids), text, messages, row.metadata, where, tools_shown, images))
    return prompts


def _fit_prompt(prompt: TextPrompt, config: TextPromptDataConfig) -> TextPrompt | None:
    """Treats a prompt that is too long as ``data.overlong`` says: cuts it, returns None to drop it, or raises."""
    if config.overlong == "drop":
        return None
    if config.overlong == "truncate_left" and prompt.images is not None:
        raise DataError(
            f"{prompt.where}: cut to data.max_prompt_tokens {config.max_prompt_tokens} the prompt could lose an image "
            "or another medium: raise it, or set data.overlong to drop"
        )
    if config.overlong == "truncate_left":
        return replace(prompt, token_ids=prompt.token_ids[-config.max_prompt_tokens :])
    raise DataError(
        f"{prompt.where}: the prompt has {len(prompt.token_ids)} tokens, more than data.max_prompt_tokens "
        f"{config.max_prompt_tokens}: raise it, or set data.overlong to drop or truncate_left"
    )


def describe_shared_prompts(prompts: Sequence[TextPrompt], eval_prompts: Sequence[TextPrompt]) -> list[str]:
    """A line about evaluation prompts that have the same tokens as a training prompt; none if there are none.

    Prompts with media are not compared, since equal tokens may stand for different media.
    """
    trained: dict[tuple[int, ...], str] = {}
    for prompt in prompts:
        if prompt.images is None:
            trained.setdefault(prompt.token_ids, prompt.where)
    shared = [
        (prompt.where, trained[prompt.token_ids])
        for prompt in eval_prompts
        if prompt.images is None and prompt.token_ids in trained
    ]
    return shared_line(shared, len(eval_prompts))


def _import_curriculum(path: str) -> Curriculum:
    from sfumato.config.user_functions import import_function

    try:
        return import_function(path)
    except ConfigError as error:
        raise ConfigError(f"data.curriculum: {error}") from error


class TextPromptLoader(PromptLoader):
    """The prompts of each iteration, shuffled anew in each epoch or in a curriculum's order, and replacements for them.

    Everything is a function of (seed, iteration), so that a resumed run continues as if it had never stopped.
    """

    def __init__(
        self, prompts: Sequence[TextPrompt], num_prompts: int, group_size: int, seed: int, curriculum: str | None = None
    ) -> None:
        """Plans the groups.

        Args:
            prompts: those of training.
            num_prompts: groups of one iteration.
            group_size: samples of a group.
            seed: of the order.
            curriculum: import path of a function ``(iteration, metadata, seed)``. ``metadata`` is a list with the
                metadata of each prompt. It returns row numbers in the order in which they are to be taken (integers),
                or a weight for each row (floats, at least 0), by which rows are drawn without repetition.

        Raises:
            ConfigError: when there is no such function.
            DataError: when an iteration takes each prompt over ``MOST_TIMES`` times.
        """
        super().__init__(len(prompts), num_prompts, group_size, seed)
        self.count = len(prompts)
        self.seed = seed
        self.path = curriculum
        self._curriculum: Curriculum | None = None if curriculum is None else _import_curriculum(curriculum)
        self._metadata = [prompt.metadata for prompt in prompts]
        self._latest_order: tuple[int, list[int]] = (-1, [])

    @classmethod
    def from_config(cls, prompts: Sequence[TextPrompt], config: Any) -> TextPromptLoader:
        """The loader of a run of RL, from its configuration. Raises as the class itself."""
        rollout = config.rollout
        return cls(prompts, rollout.num_prompts, rollout.n, config.train.seed, config.data.curriculum)

    def groups(self, iteration: int) -> list[int]:
        """Indices of the prompts of one iteration; the i-th is that of group i.

        Raises ConfigError when the curriculum raises, or returns something wrong.
        """
        if self._curriculum is None:
            return super().groups(iteration)
        order = self._ask_curriculum(iteration)
        if len(order) < self.num_prompts:
            raise ConfigError(
                f"data.curriculum {self.path}: gave {len(order)} rows for iteration {iteration}, fewer than "
                f"rollout.num_prompts {self.num_prompts}"
            )
        return order[: self.num_prompts]

    def replacements(self, iteration: int, count: int) -> list[int]:
        """Indices of prompts that may replace some of the iteration: at most ``count``, each once, none of its own.

        With a curriculum they are the next ones in its order. Otherwise they are drawn from all prompts, so that the
        next iteration is the same whether or not they are used.
        """
        group_rows = set(self.groups(iteration))
        if self._curriculum is not None:
            order = self._ask_curriculum(iteration)
        else:
            generator = keyed_generator(self.seed, "replacement prompts", iteration)
            # A key of its own: taking the next prompts of the epoch would change later iterations.
            order = torch.randperm(self.count, generator=generator).tolist()
        return [row for row in dict.fromkeys(order) if row not in group_rows][:count]

    def _ask_curriculum(self, iteration: int) -> list[int]:
        """The order that the curriculum gives for an iteration; the latest one is kept, so that it is asked once."""
        if self._latest_order[0] != iteration:
            assert self._curriculum is not None
            try:
                order = self._curriculum(iteration, copy.deepcopy(self._metadata), self.seed)
            except Exception as error:  # a user's function may raise anything
                raise ConfigError(
                    f"data.curriculum {self.path}: raised {type(error).__name__}: {error} for iteration {iteration}"
                ) from error
            self._latest_order = (iteration, self._check_order(order, iteration))
        return self._latest_order[1]

    def _check_order(self, order: Any, iteration: int) -> list[int]:
        """Checks what the curriculum returned. Returns row numbers in order, drawn by weight where it gave weights."""
        name = f"data.curriculum {self.path}: for iteration {iteration}"
        values = order.tolist() if hasattr(order, "tolist") else list(order) if isinstance(order, Sequence) else None
        if values is None or not all(
            isinstance(value, numbers.Real) and not isinstance(value, bool) for value in values
        ):
            raise ConfigError(f"{name} it must return a list of row numbers or of weights, not {type(order).__name__}")
        if all(isinstance(value, numbers.Integral) for value in values):
            wrong = [value for value in values if not 0 <= value < self.count]
            if wrong:
                raise ConfigError(f"{name} it gave row {wrong[0]}, but rows are 0 to {self.count - 1}")
            return [int(value) for value in values]
        if len(values) != self.count:
            raise ConfigError(f"{name} it gave {len(values)} weights for {self.count} rows")
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigError(f"{name} it gave a weight that is negative or not finite")
        return draw_by_weight(values, keyed_generator(self.seed, "curriculum", iteration))


def draw_by_weight(weights: Sequence[float], generator: torch.Generator) -> list[int]:
    """Rows of positive weight in a random order, each drawn by its share of the weights that are left.

    It sorts exponential variables divided by the weights, which gives the same distribution (Efraimidis and Spirakis,
    2006).
    """
    uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64).numpy()
    weight_array = np.asarray(weights, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        keys = np.where(weight_array > 0, -np.log1p(-uniform) / weight_array, np.inf)
    order = np.argsort(keys, kind="stable")
    return [int(row) for row in order if weight_array[row] > 0]
