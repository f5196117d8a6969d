"""The interface of lm-evaluation-harness to a model of this library.

Imports the harness (extra ``evaluation``) at the top: import this file where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.kinds.base import request_seed
from sfumato.rollout.text.policy import stop_tokens

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from sfumato.evaluation.texts import TextModel
    from sfumato.rollout.engines.embedded.engine import EmbeddedEngine

TOKENS_AT_ONCE = 4096
"""Tokens whose logits are in memory at a time."""

FOLLOWED = ("do_sample", "temperature", "top_p", "top_k")
"""Settings of a task that answers are drawn by."""

UNUSED = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_p": 0.0, "use_cache": True}
"""Other settings, with the values at which they change nothing."""

NEW_TOKENS = 256
"""Longest answer where a task does not say, as in the harness."""


class HarnessModel(TemplateLM):
    """Log-likelihoods and answers by the embedded engine."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = cast(Any, model.model.tokenizer)
        self.max_length = model.longest or 2048
        self._num_drawn = 0

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        del kwargs
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:  # a text that was rendered before may begin with the token already
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        chat = self.model.template.chat
        assert chat is not None, "run_tasks refuses a model without a chat template"
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                chat_template=chat.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except TemplateError as error:
            raise ConfigError(
                f"the chat template does not take the messages of a task ({error}): leave --system-prompt, or "
                "--apply-chat-template, out"
            ) from error

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """For each context and continuation the log-likelihood of the continuation, and whether it is greedy."""
        del kwargs
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ConfigError(f"a task asks how likely {longest} tokens are, and the model takes {self.max_length}")
        # what is longer than the model takes loses its beginning; the last token of all is asked for and not read
        sequences = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda index: -len(sequences[index]))
        answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        engine = cast("EmbeddedEngine", self.model.engine(max(map(len, sequences)) - 1))
        for batch in _batch_by_length(order, [len(sequence) for sequence in sequences]):
            scored = engine.score([sequences[index] for index in batch])
            for index, (log_probs, is_likeliest) in zip(batch, scored, strict=True):
                length = len(requests[index][2])
                answers[index] = float(log_probs[-length:].sum()), bool(is_likeliest[-length:].all())
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's length, as the harness cuts them."""
        del disable_tqdm
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            of_text = [
                (None, *utils.make_disjoint_window(window))
                for window in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            windows += cast(Any, of_text)
            counts.append(len(of_text))
        values = iter(self._loglikelihood_tokens(windows))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers to texts, up to one of the texts that end them."""
        del disable_tqdm
        eos = self.tokenizer.decode([self.eot_token_id])
        answers: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for indices in groups.values():
            settings = cast("Keywords", normalize_gen_kwargs(dict(requests[indices[0]].args[1]), NEW_TOKENS))
            stops = handle_stop_sequences(settings.pop("until", None), eos=eos)
            longest = int(settings.pop("max_gen_toks"))
            texts = [requests[index].args[0] for index in indices]
            for index, answer in zip(indices, self._draw(texts, settings, stops, longest), strict=True):
                answers[index] = answer
        return answers

    def _draw(self, texts: list[str], settings: Keywords, stops: list[str], longest: int) -> list[str]:
        """Answers to texts with the same settings."""
        temperature = read_temperature(settings)
        sampling = Sampling(
            temperature,
            float(settings.get("top_p") or 1.0) if temperature else 1.0,
            int(settings.get("top_k") or 0) if temperature else 0,
            stop_token_ids=tuple({*stop_tokens(self.model.template), self.eot_token_id}),
            stop=tuple(stop for stop in stops if stop),
        )
        room = self.max_length - longest
        if room < 1:
            raise ConfigError(
                f"a task asks for answers of {longest} tokens, and with the prompt the model takes {self.max_length}"
            )
        prompts = [self.tok_encode(text)[-room:] for text in texts]
        seeds = [
            request_seed(self.model.settings.seed, "harness", 0, self._num_drawn + row) for row in range(len(texts))
        ]
        self._num_drawn += len(texts)
        drawn = complete_requests(
            self.model.engine(max(map(len, prompts)) + longest),
            [GenerationRequest(ids, seed, longest) for ids, seed in zip(prompts, seeds, strict=True)],
            sampling,
        )
        answers = [self.tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in drawn]
        return [_cut_at_stops(answer, stops) for answer in answers]


def read_temperature(settings: Keywords) -> float:
    """The temperature that a task draws answers at; 0 takes the likeliest tokens.

    Args:
        settings: of the task, as the harness completes them.

    Raises:
        ConfigError: when the task asks for more than temperature, top_p and top_k, such as beams.
    """
    for name, value in settings.items():
        if name not in FOLLOWED and value not in (None, UNUSED.get(name)):
            raise ConfigError(
                f"a task asks for answers with {name} {value!r}, which are not drawn here: leave it out of the task's "
                "generation_kwargs"
            )
    if not settings.get("do_sample", False):
        return 0.0
    return 1.0 if settings.get("temperature") is None else float(settings["temperature"])


def _cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts in it."""
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


def _batch_by_length(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Indices in order, as batches of at most ``TOKENS_AT_ONCE`` tokens with padding."""
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= TOKENS_AT_ONCE:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
