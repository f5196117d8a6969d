"""Benchmarks of lm-evaluation-harness with this library's forward passes and engine (extra ``evaluation``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.rollout.agents.turns import request_seed
from sfumato.rollout.engines.base import GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete
from sfumato.rollout.text.policy import stop_tokens

if TYPE_CHECKING:
    from sfumato.evaluation.texts import TextModel
    from sfumato.rollout.engines.embedded.engine import EmbeddedEngine

TOKENS_AT_ONCE = 4096
"""Tokens whose logits are in memory at a time."""

NEW_TOKENS = 256
"""Longest answer where a task does not say, as in the harness."""

DATA_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)
"""What loading a task raises when its data or a package of its metrics is not here."""


@dataclass
class HarnessResults:
    """What the harness found."""

    by_document: dict[str, dict[tuple[Hashable, int], float]] = field(default_factory=dict)
    """Values of each document by metric."""
    aggregated: dict[str, float] = field(default_factory=dict)
    """Metrics that are no mean of values of single documents, such as perplexity."""


def run_tasks(
    model: TextModel,
    tasks: Sequence[str],
    task_folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    with_chat_template: bool = False,
) -> HarnessResults:
    """Runs tasks of the harness on a model.

    Args:
        model: answers, and says how likely texts are.
        tasks: names.
        task_folder: with YAML files of further tasks.
        num_fewshot: examples before each question; None: as each task says.
        limit: documents of each task.
        with_chat_template: show documents as messages of a chat.

    Raises:
        ConfigError: when there is no such task, or its data is not here.
        MissingDependencyError: when the harness is not installed.
    """
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError(
            f"--tasks needs lm-evaluation-harness: pip install 'sfumato[evaluation]' ({error})"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if task_folder is not None and not task_folder.is_dir():
        raise ConfigError(f"--task-folder {task_folder} is no folder")
    names = [name.strip() for name in tasks if name.strip()]
    manager = None
    if task_folder is not None:  # to read the harness's own thousands of files takes half a minute
        manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise ConfigError(f"--tasks: the harness has no task {unknown[0] if unknown else 'without a name'!r}")
    try:
        manager.load(names)
    except DATA_ERRORS as error:
        raise ConfigError(
            f"--tasks {','.join(names)} cannot be loaded: {type(error).__name__}: {str(error)[:300]}; the data of a "
            "task must be in the local cache, or downloadable"
        ) from error
    if with_chat_template and model.template.chat is None:
        raise ConfigError("--apply-chat-template: the model's tokenizer has no chat template: leave it out")
    found = simple_evaluate(
        model=cast(Any, build_language_model(model)),
        tasks=cast(Any, names),
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=with_chat_template,
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert found is not None  # this is the only process
    return _collect(cast("dict[str, Any]", found))


def _collect(found: dict[str, Any]) -> HarnessResults:
    """Values of documents where their mean is what the harness reports, else what it reports."""
    results = HarnessResults()
    for task, samples in found["samples"].items():
        values: dict[tuple[str, str], dict[tuple[Hashable, int], Any]] = {}
        for sample in samples:
            for metric in sample["metrics"]:
                values.setdefault((metric, sample["filter"]), {})[sample["doc_id"], 0] = sample[metric]
        for (metric, filter_name), by_document in values.items():
            name = f"{task} {metric}" if filter_name == "none" else f"{task} {metric} ({filter_name})"
            reported = float(found["results"][task][f"{metric},{filter_name}"])
            scalars = {key: float(value) for key, value in by_document.items() if isinstance(value, (int, float))}
            is_mean = len(scalars) == len(by_document) and math.isclose(
                sum(scalars.values()) / len(scalars), reported, rel_tol=1e-9, abs_tol=1e-12
            )
            if is_mean:
                results.by_document[name] = scalars
            else:
                results.aggregated[name] = reported
    return results


def build_language_model(model: TextModel) -> object:
    """The harness's interface of a model: an ``lm_eval.api.model.LM``."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    tokenizer = cast(Any, model.model.tokenizer)

    class HarnessModel(TemplateLM):
        """Log-likelihoods and answers by the embedded engine."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.max_length = model.longest or 2048
            self._num_drawn = 0

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

        @property
        def tokenizer_name(self) -> str:
            return str(tokenizer.name_or_path).replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
            del kwargs
            bos = tokenizer.bos_token
            if add_special_tokens is None:  # a text that was rendered before may begin with the token already
                add_special_tokens = not (bos and string.startswith(bos))
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: object
        ) -> list[tuple[float, bool]]:
            """For each context and continuation the log-likelihood of the continuation, and whether it is greedy."""
            del kwargs
            # what is longer than the model takes loses its beginning
            sequences = [(context + continuation)[-self.max_length :] for _, context, continuation in requests]
            order = sorted(range(len(requests)), key=lambda index: -len(sequences[index]))
            answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
            engine = cast("EmbeddedEngine", model.engine(max(map(len, sequences))))
            for batch in _batches(order, [len(sequence) for sequence in sequences]):
                scored = engine.score([sequences[index] for index in batch])
                for index, (log_probs, is_likeliest) in zip(batch, scored, strict=True):
                    length = len(requests[index][2])
                    answers[index] = float(log_probs[-length:].sum()), bool(is_likeliest[-length:].all())
            return answers

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
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
            eos = tokenizer.decode([self.eot_token_id])
            answers: list[str] = [""] * len(requests)
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
            for indices in groups.values():
                settings = cast("dict[str, Any]", normalize_gen_kwargs(dict(requests[indices[0]].args[1]), NEW_TOKENS))
                stops = handle_stop_sequences(settings.pop("until", None), eos=eos)
                longest = int(settings.pop("max_gen_toks"))
                texts = [requests[index].args[0] for index in indices]
                for index, answer in zip(indices, self._draw(texts, settings, stops, longest), strict=True):
                    answers[index] = answer
            return answers

        def _draw(self, texts: list[str], settings: dict[str, Any], stops: list[str], longest: int) -> list[str]:
            """Answers to texts with the same settings."""
            samples = settings.get("do_sample", False) or float(settings.get("temperature") or 0.0) > 0
            sampling = Sampling(
                float(settings.get("temperature") or 1.0) if samples else 0.0,
                float(settings.get("top_p") or 1.0) if samples else 1.0,
                int(settings.get("top_k") or 0) if samples else 0,
                stop_token_ids=tuple({*stop_tokens(model.template), self.eot_token_id}),
                stop=tuple(stop for stop in stops if stop),
            )
            room = self.max_length - longest
            if room < 1:
                raise ConfigError(
                    f"a task asks for answers of {longest} tokens, and with the prompt the model takes "
                    f"{self.max_length}"
                )
            prompts = [self.tok_encode(text)[-room:] for text in texts]
            seeds = [
                request_seed(model.settings.seed, "harness", 0, self._num_drawn + row) for row in range(len(texts))
            ]
            self._num_drawn += len(texts)
            drawn = complete(
                model.engine(max(map(len, prompts)) + longest),
                [GenerationRequest(ids, seed, longest) for ids, seed in zip(prompts, seeds, strict=True)],
                sampling,
            )
            answers = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in drawn]
            return [_before(answer, stops) for answer in answers]

    return HarnessModel()


def _before(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts in it."""
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


def _batches(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Indices in order, as batches of at most ``TOKENS_AT_ONCE`` tokens with padding."""
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= TOKENS_AT_ONCE:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
