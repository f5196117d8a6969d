"""Every causal language model of the installed transformers, trained in every mode and compared with transformers.

``python -m tests.survey.survey --write`` makes docs/architectures.md; with names it surveys these alone and prints
what it finds. A new version of transformers is another run.

A tiny model of each architecture is built as a run builds it and goes through the check before the first step. If that
lets it pass, other documents are trained on, and what comes out is compared with a few plain lines that give
transformers' own module one document at a time.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language import load as language_load
from sfumato.models.language.hf_config import can_set_attention
from sfumato.models.language.model import LanguageModel, Tensors
from sfumato.models.language.packed_attention import ATTENTION
from sfumato.models.language.probe import probe
from sfumato.models.language.scores import TokenScores
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from tests.survey.tiny_configs import NOT_BUILT, VARIANTS, VOCABULARY, tiny_config

PAGE = Path(__file__).parents[2] / "docs/architectures.md"
KNOWN = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NAMES = [name for name in KNOWN if name not in NOT_BUILT] + [name for name in VARIANTS if VARIANTS[name][0] in KNOWN]

LENGTHS = ((17, 3, 40, 26), (7, 31, 3, 12, 22))
"""Tokens of the documents of each micro-batch: other lengths, and other tokens, than those of the check."""

MAX_SEQ_LEN = 64

# In float32 the sums of a longer row, or of rows side by side, are rounded otherwise. A wrong mask, position or state
# moves a log-probability by more than 0.01.
LARGEST_LOG_PROB = 5e-5
"""Nats by which the log-probability of one token may differ."""
LARGEST_LOSS = 1e-5
"""Fraction of the loss."""
LARGEST_NORM = 1e-4
"""Fraction of the norm of the gradient of all parameters."""
LARGEST_GRADIENT = 1e-4
"""Norm of the difference of one parameter's gradients, as a fraction of the norm of the gradient of all."""


@dataclass(frozen=True)
class Mode:
    """A way to train that a user configures."""

    title: str
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


MODES = (
    Mode("packed"),
    Mode("sdpa", model={"attention": "sdpa"}),
    Mode("eager", model={"attention": "eager"}),
    Mode("chunked", train={"chunked_loss": True}),
    Mode("padded", train={"rmpad_with_pos_ids": False, "dyn_bsz": False}),
    Mode("checkpointed", train={"activation_checkpointing": "full"}),
)
PACKED = MODES[0].title


@dataclass(frozen=True)
class Cell:
    """What became of an architecture in a mode."""

    verdict: Literal["equal", "refused", "WRONG", "broken"]
    """``WRONG``: the check let it pass, and training gives something else than transformers. ``broken``: something was
    raised that is no sentence for a user."""
    text: str
    """Equal: the attention, and how rows reach the model. Otherwise a sentence."""
    far: tuple[float, ...] = ()
    """Largest differences found, in the order of the bounds."""

    @property
    def short(self) -> str:
        """For a table."""
        return self.text if self.verdict == "equal" else self.verdict


@dataclass(frozen=True)
class Measured:
    """What training on the documents gives."""

    log_probs: Tensor
    """float32 ``[N]``, of the targets of all documents."""
    loss: float
    """Their mean, negative."""
    gradients: Tensors
    """By the names of transformers' module."""

    @property
    def norm(self) -> float:
        """Of the gradient of all parameters."""
        return float(torch.stack([gradient.double().norm() for gradient in self.gradients.values()]).norm())


@functools.cache
def survey(name: str) -> dict[str, Cell]:
    """Trains one architecture of ``NAMES`` in every mode. Returns what came of it by the mode's title."""
    source = _module(name)
    references: dict[tuple[str, bool], Measured] = {}
    return {mode.title: _cell(name, mode, source, references) for mode in MODES}


def _module(name: str) -> nn.Module:
    """transformers' own module with random weights. Those that begin as constants, such as biases of 0 and the
    embedding of the padding token, have noise, so that no part of the model is silent."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager")
        for parameter in module.parameters():
            if parameter.numel() and parameter.min() == parameter.max():
                parameter += 0.1 * torch.randn(parameter.shape)
        for submodule in module.modules():
            if isinstance(submodule, nn.Embedding) and submodule.padding_idx is not None:
                submodule.weight[submodule.padding_idx] += 0.1 * torch.randn(submodule.embedding_dim)
    return module


def _with_attention(name: str, source: nn.Module, attention: str) -> nn.Module:
    """transformers' own module with the weights of ``source``."""
    module = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation=attention)
    module.load_state_dict(source.state_dict())
    return module


def _cell(name: str, mode: Mode, source: nn.Module, references: dict[tuple[str, bool], Measured]) -> Cell:
    try:
        with torch.random.fork_rng(devices=[]):
            model = _build(name, mode, source)
            parameters = dict(model.plain.named_parameters())
            config, train = _configs(mode)
            model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
            probe(model, config, train, MAX_SEQ_LEN, lambda *_: None)
            results = []
            for masked in (False, True):
                batches = _documents(masked)
                ours = _train(model, parameters, batches, train.rmpad_with_pos_ids)
                # a model with an attention of its own has others, too, which need not agree with each other
                attention = "eager" if can_set_attention(model.plain) else model.attention
                if (attention, masked) not in references:
                    plain = _with_attention(name, source, attention)
                    references[attention, masked] = one_by_one(plain, [part for batch in batches for part in batch])
                results.append(_differences(ours, references[attention, masked]))
    except ConfigError as error:
        return Cell("refused", str(error))
    except Exception as error:  # whatever transformers' modules raise
        return Cell("broken", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    bounds = (LARGEST_LOG_PROB, LARGEST_LOSS, LARGEST_NORM, LARGEST_GRADIENT)
    far = tuple(max(values) for values in zip(*results, strict=True))
    if not all(value <= bound for differences in results for value, bound in zip(differences, bounds, strict=True)):
        words = "log-probability {:.2g}, loss {:.2g}, gradient norm {:.2g}, gradient of one parameter {:.2g}"
        parts = (f"{words.format(*differences)} ({which})" for differences, which in zip(results, TARGETS, strict=True))
        return Cell("WRONG", f"{_way(model)}: differs from transformers: {'; '.join(parts)}", far)
    return Cell("equal", _way(model), far)


TARGETS = ("all tokens learned", "some tokens learned")


def _configs(mode: Mode) -> tuple[LanguageModelConfig, TextTrainConfig]:
    nowhere = str(Path(tempfile.gettempdir()) / "survey")  # nothing is read from it, or written there
    train = TextTrainConfig(output_dir=nowhere, global_batch_size=1, max_steps=1, mixed_precision="no", **mode.train)
    return LanguageModelConfig(config_path=f"{nowhere}/model.yaml", tokenizer_path="bytes", **mode.model), train


def _build(name: str, mode: Mode, source: nn.Module) -> LanguageModel:
    """As a run builds it, with the weights of ``source``."""
    with patch.multiple(
        language_load,
        read_model_config=lambda *_: tiny_config(name),
        describe_other_keys=lambda _: (),
    ):
        model = language_load.build_language_model(*_configs(mode))
    model.plain.load_state_dict(source.state_dict())
    return model


def _documents(masked: bool) -> list[list[Document]]:
    """The documents of each micro-batch; masked ones have targets here and there, like conversations."""
    generator = np.random.default_rng(7)
    results = []
    for lengths in LENGTHS:
        documents = []
        for length in lengths:
            targets = (generator.random(length) < 0.4) if masked else np.ones(length, bool)
            targets[0] = False
            targets[-1] = True
            documents.append(Document(generator.integers(VOCABULARY, size=length, dtype=np.int32), targets))
        results.append(documents)
    return results


def _train(
    model: LanguageModel, parameters: dict[str, nn.Parameter], documents: list[list[Document]], packed: bool
) -> Measured:
    """What a run makes of micro-batches."""
    batches = [
        make_batch([TextSample((document,)) for document in part], range(len(part)), [0] * len(part), packed, 0, 1)
        for part in documents
    ]
    count = sum(batch.num_labels for batch in batches)

    def loss_fn(scores: TokenScores, batch: TokenBatch) -> Tensor:
        return -scores.log_probs(batch.labels).sum() / count

    log_probs = [
        token_log_prob[batch.labels != IGNORED]
        for token_log_prob, batch in zip(model.token_log_probs(batches), batches, strict=True)
    ]
    loss = sum(model.forward_backward(batches, loss_fn))
    gradients = {name: _gradient(parameter) for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return Measured(torch.cat(log_probs), loss, gradients)


def one_by_one(source: nn.Module, documents: list[Document]) -> Measured:
    """What transformers' module makes of one document after the other. Each goes through a fresh copy, so that nothing
    is carried from one to the next."""
    log_probs, loss = [], 0.0
    gradients = {name: torch.zeros_like(parameter) for name, parameter in source.named_parameters()}
    count = sum(int(document.loss_mask.sum()) for document in documents)
    for document in documents:
        tokens, targets = torch.from_numpy(document.input_ids).long(), torch.from_numpy(document.loss_mask)[1:]
        for training in (False, True):
            module = copy.deepcopy(source).train(training)
            with torch.set_grad_enabled(training):
                logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            result = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][targets]
            if not training:
                log_probs.append(result)
                continue
            part = -result.sum() / count
            part.backward()
            loss += float(part.detach())
            for name, parameter in module.named_parameters():
                gradients[name] += _gradient(parameter)
    return Measured(torch.cat(log_probs), loss, gradients)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _differences(ours: Measured, theirs: Measured) -> tuple[float, float, float, float]:
    """In the order of the bounds."""
    norm = max(theirs.norm, 1e-9)
    each_gradient = [
        float((gradient.double() - theirs.gradients[name].double()).norm()) for name, gradient in ours.gradients.items()
    ]
    return (
        float((ours.log_probs - theirs.log_probs).abs().max()),
        abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1e-9),
        abs(ours.norm - theirs.norm) / norm,
        max(each_gradient) / norm,
    )


def _way(model: LanguageModel) -> str:
    """The attention, and how rows reach the model, as the page's legend explains."""
    kernel = "packed" if model.attention == ATTENTION else model.attention
    if model.row_layout.rows == "packed":
        return kernel
    return f"{kernel} by length" if model.row_layout.same_length else f"{kernel} by document"


NO_SDPA = "with model.attention sdpa: set it to eager"
"""What the page says once of all architectures that transformers cannot make so."""

HEAD = """\
# Architectures of language models

Which of transformers' causal language models `tasks/train_text.py` trains exactly as transformers would. Made with
transformers {transformers} and torch {torch} on a CPU in float32, {date}, by `python -m tests.survey.survey --write`,
which takes minutes: a new version of either is another run.

A tiny model of each architecture is built as a run builds it, in each mode, and goes through the
[check before the first step](text.md). If that lets it pass, two micro-batches of {count} other documents of 3 to 40
tokens are trained on, with every token as a target and with some. Log-probabilities, loss, gradient norm and the
gradient of every parameter are compared with transformers' own module and its simplest attention (or the model's own),
given one document at a time.

- **A kernel's name**: equal. No log-probability differs by more than {log_prob:g} nats, the loss by more than
  {loss:g} of itself, the gradient norm and the gradient of any parameter by more than {norm:g} of the gradient norm
  (largest: {far_log_prob:.0e}, {far_loss:.0e} and {far_norm:.0e}, which is rounding; a wrong mask, position or state
  makes 0.01 and more). The name is that of the attention. A name alone: documents share rows as they are made;
  **by document**: each in a row of its own; **by length**: so, and only those of one length in a call.
- **refused**: the run stops before its first step, with a sentence that stands [below](#refused).
- **WRONG**, **broken**: trained, and differs from transformers; or stopped with an error that says nothing to a user.
  None may be here: `tests/survey/test_survey.py` fails.

| column | setting |
|---|---|
| packed | none: documents share rows without padding, `model.attention packed` |
| sdpa | `model.attention sdpa` |
| eager | `model.attention eager` |
| chunked | `train.chunked_loss true` |
| padded | `train.rmpad_with_pos_ids false`, `train.dyn_bsz false`: one document a row, padded |
| checkpointed | `train.activation_checkpointing full` |

In packed rows {equal} of {all} are equal. A name of several words is an architecture with other settings (`VARIANTS` in
`tests/survey`). A refusal under sdpa that is not below: transformers has no such attention for it, take eager.

"""


def table(actual: dict[str, dict[str, Cell]]) -> list[str]:
    """Lines of the page's table, which know neither numbers nor sentences: on any CPU they are the same."""
    architectures: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(actual):
        architectures.setdefault(tuple(actual[name][mode.title].short for mode in MODES), []).append(name)
    lines = [f"| {' | '.join(mode.title for mode in MODES)} | architectures |", "|---" * (len(MODES) + 1) + "|"]
    for row, names in sorted(architectures.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {' | '.join(row)} | {', '.join(names)} |")
    return lines


def page(actual: dict[str, dict[str, Cell]]) -> str:
    """The text of docs/architectures.md."""
    cells = [cell for modes in actual.values() for cell in modes.values() if cell.verdict == "equal"]
    log_prob, loss, *norms = (max(values) for values in zip(*(cell.far for cell in cells), strict=True))
    head = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        date=datetime.date.today().isoformat(),
        count=sum(map(len, LENGTHS)),
        log_prob=LARGEST_LOG_PROB,
        loss=LARGEST_LOSS,
        norm=LARGEST_NORM,
        far_log_prob=log_prob,
        far_loss=loss,
        far_norm=max(norms),
        equal=sum(modes[PACKED].verdict == "equal" for modes in actual.values()),
        all=len(actual),
    )
    left_out = [f"**{name}**: {why}" for name, why in sorted(NOT_BUILT.items()) if name in KNOWN]
    parts = [
        head + "\n".join(table(actual)),
        "## Refused",
        "\n".join(_entry(sentence) for sentence in _sentences(actual)),
        "## Not tried",
        "\n".join(_entry(line) for line in left_out),
    ]
    return "\n\n".join(parts) + "\n"


def _sentences(actual: dict[str, dict[str, Cell]]) -> Iterator[str]:
    """What is said about cells that are not equal: each sentence once, with the architectures and modes it is for."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for name in sorted(actual):
        modes_of: dict[str, list[str]] = {}
        for title, cell in actual[name].items():
            if cell.verdict != "equal" and NO_SDPA not in cell.text:
                # transformers goes on about its issues and its own options
                sentence = cell.text.partition(" Please request the support")[0].removesuffix(
                    " (train.probe warn goes on all the same)"
                )
                sentence = shorten_sentence(sentence.replace(f"make this {name} with", "make it with"))
                modes_of.setdefault(sentence, []).append(title)
        for sentence, titles in modes_of.items():
            where = "" if len(titles) == len(MODES) else f" ({', '.join(titles)})"
            names_of.setdefault((where, sentence), []).append(name)
    for (where, sentence), names in names_of.items():
        yield f"**{', '.join(names)}**{where}: {sentence}"


def shorten_sentence(sentence: str) -> str:
    """What a refusal says of its reason: without what all of them say, further reasons and advice."""
    reason = re.sub(r"^\w+ is not trained as transformers would: ", "", sentence)
    return reason.partition("; or, ")[0].partition(" train.rmpad_with_pos_ids true, which sends")[0].rstrip(".") + "."


def _entry(text: str) -> str:
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Surveys architectures, and prints what became of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.survey.survey", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="architectures; all, when none is given")
    parser.add_argument("--write", action="store_true", help="write docs/architectures.md")
    options = parser.parse_args(arguments)
    if options.write and options.names:
        parser.error("--write takes all architectures")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    for number, name in enumerate(options.names or NAMES, 1):
        began = time.perf_counter()
        results[name] = survey(name)
        seconds = time.perf_counter() - began
        print(f"{number:3d} {name:26s}{seconds:6.1f} s  {' | '.join(cell.short for cell in results[name].values())}")
        for title, cell in results[name].items():
            if cell.verdict != "equal" and (options.names or cell.verdict != "refused"):
                print(f"      {title}: {cell.text}")
    if options.write:
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
