"""Architectures that are new in packed rows on every mesh: what one process computes, or a sentence that refuses it.

Each cell goes the way of a run: the model is put on the mesh, the probe finds how documents reach it, and a step of
documents that differ from rank to rank is compared with the same step in one process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sfumato.config.load import load_config
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language import load as language_load
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe import Checks, probe
from sfumato.models.language.scores import TokenScores
from sfumato.models.language.tolerance import Tolerance
from sfumato.parallel import mesh as mesh_module
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import gather_whole, trainable_parameters
from tests.dist.ranks import RankError
from tests.survey.tiny_configs import tiny_config

TOLERANCE = 1e-5
LENGTHS = ((9, 14, 5), (61, 2, 40, 12), (30, 7), (13, 13, 13, 3))
"""Documents of the four micro-batches of a step: in rows of their own the second one needs three calls, others one."""
LONGEST = 64

MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel_mode": "ddp"},
    "fsdp2": {},
    "tp": {"data_parallel_mode": "ddp", "tensor_parallel_size": 2},
    "ep": {"expert_parallel_size": 2},
    "ulysses": {"ulysses_parallel_size": 2},
    "ring": {"context_parallel_size": 2},
    "pp": {"data_parallel_mode": "ddp", "pipeline_parallel_size": 2},
}
"""Of two ranks each."""

NO_EXPERTS = "has no experts of transformers' interface"
NO_STAGES = "cannot be cut into pipeline stages"
NO_PLAN = "has no plan for tensor parallelism: set train.tensor_parallel_size to 1"
TIED = "the embedding and the head share one weight"
STOPPED = "A row for each document may be right, for which set train."
LONGEST_ROW = "depend on the longest row beyond 16 tokens: set train."


NO_RING = "has sliding_attention, unknown to sequence parallelism: set train.context_parallel_size and "


def _not_shared(layers: str) -> dict[str, str]:
    return dict.fromkeys(("ulysses", "ring"), f"has {layers}, unknown to sequence parallelism")


REFUSED: dict[str, dict[str, str]] = {
    "afmoe": {"ring": NO_RING, "pp": "changes hidden states outside its embedding, layers, norm and head"},
    "mistral": {"ep": NO_EXPERTS, "ring": NO_RING},
    "gemma2": {"ep": NO_EXPERTS, "pp": TIED, "ring": NO_RING},
    "gemma3_text": {"ep": NO_EXPERTS, "pp": TIED, "ring": NO_RING},
    "gpt_oss": {"ring": NO_RING},
    "olmo3": {"ep": NO_EXPERTS, "ring": NO_RING},
    "cohere2": {"ep": NO_EXPERTS, "pp": TIED, "ring": NO_RING},
    "llama4_text": {"ep": NO_EXPERTS, "pp": NO_STAGES, **_not_shared("chunked_attention")},
    "mamba2": {
        "tp": NO_PLAN,
        "ep": NO_EXPERTS,
        "pp": NO_STAGES,
        **dict.fromkeys(("ulysses", "ring"), "has no attention, whose heads or keys ranks could share"),
    },
    "qwen3_next": {"pp": STOPPED, **_not_shared("linear_attention")},
    "lfm2": {"ep": NO_EXPERTS, "pp": NO_STAGES, **_not_shared("conv")},
    "granitemoehybrid": {"pp": NO_STAGES, **_not_shared("linear_attention")},
    "falcon_h1": {"ep": NO_EXPERTS, "pp": NO_STAGES, **_not_shared("hybrid")},
    "bloom": {
        "tp": NO_PLAN,
        "ep": NO_EXPERTS,
        "pp": NO_STAGES,
        **dict.fromkeys(("ulysses", "ring"), "does not let its attention be replaced"),
    },
    "phi3 longrope": {"ep": NO_EXPERTS, **dict.fromkeys(("ulysses", "ring", "pp"), LONGEST_ROW)},
}
"""Of each architecture, the meshes that it cannot be put on, with a part of the message; on all others it is equal."""

QUICK = {
    ("afmoe", "ulysses"),
    ("gemma2", "tp"),
    ("gpt_oss", "tp"),
    ("gpt_oss", "ep"),
    ("gpt_oss", "ulysses"),
    ("gpt_oss", "ring"),
    ("olmo3", "pp"),
    ("llama4_text", "tp"),
    ("mamba2", "fsdp2"),
    ("mamba2", "ulysses"),
    ("qwen3_next", "ep"),
    ("qwen3_next", "pp"),
    ("granitemoehybrid", "ddp"),
    ("bloom", "fsdp2"),
    ("bloom", "tp"),
    ("phi3 longrope", "fsdp2"),
}
"""Cells that are always tested; others are close to one of them."""


@dataclass
class Outcome:
    """What a mesh made of a step."""

    loss: float
    grad_norm: float
    log_probs: Tensor
    """Of the labels of all micro-batches."""
    gradients: dict[str, Tensor]
    way: str
    """How documents went through the model."""


def build(kind: str, train: TextTrainConfig) -> LanguageModel:
    """A tiny model in which no weight is zero, or like its neighbours."""
    section = LanguageModelConfig(config_path="unused", tokenizer_path="bytes")
    with mock.patch.multiple(
        language_load,
        read_model_config=lambda *_: tiny_config(kind),
        describe_other_keys=lambda _: (),
    ):
        model = language_load.build_language_model(section, train)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def micro_batch(index: int) -> TokenBatch:
    generator = np.random.default_rng(index)
    samples = []
    for length in LENGTHS[index]:
        tokens = generator.integers(3, 259, length).astype(np.int32)
        loss_mask = generator.random(length) < 0.7
        loss_mask[-1] = True
        samples.append(TextSample((Document(tokens, loss_mask),)))
    return make_batch(samples, list(range(len(samples))), [0] * len(samples), True, 0, 2)


def train(kind: str, **settings: Any) -> Outcome | str:
    """A step of four micro-batches on this process's mesh, or the sentence that refuses it."""
    config = load_config(TextTrainConfig, overrides={"output_dir": "unused", "device": "cpu", **settings})
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    try:
        mesh = Mesh(Layout.resolve(config, size), torch.device("cpu"), rank)
        model = build(kind, config)
        model.parallelize(mesh, config)
        section = LanguageModelConfig(config_path="unused", tokenizer_path="bytes")
        probe(model, section, config, LONGEST, lambda *_: None)
    except ConfigError as error:
        return str(error)
    every = [micro_batch(index) for index in range(len(LENGTHS))]
    mine = [every[index] for index in mesh.range_of_rank(len(every))]
    count = sum(batch.num_labels for batch in every)

    def loss_fn(scores: TokenScores, batch: TokenBatch) -> Tensor:
        return -scores.log_probs(batch.labels).sum() / count

    result = zip(model.token_log_probs(mine), mine, strict=True)
    log_probs = [values[batch.labels != IGNORED] for values, batch in result]
    loss = mesh.sum(sum(model.forward_backward(mine, loss_fn)), over="loss")
    grad_norm = reduce_and_clip(model.trained, float("inf"), mesh, "the step")
    gradients = {
        name: gather_whole(parameter.grad.detach()).clone()
        for name, parameter in trainable_parameters(model.trained).items()
    }
    gradients = mesh.merge(gradients, over="pp")
    return Outcome(
        loss,
        grad_norm,
        torch.cat([part for parts in mesh.gather(log_probs, over="data") for part in parts]),
        gradients,
        f"{model.attention} {model.row_layout.rows} {model.row_layout.same_length}",
    )


def difference(outcome: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative differences; a gradient's is relative to that of all weights together."""
    assert outcome.gradients.keys() == truth.gradients.keys()
    gradients = {
        name: float((outcome.gradients[name] - gradient).norm()) / truth.grad_norm
        for name, gradient in truth.gradients.items()
    }
    log_probs = (outcome.log_probs - truth.log_probs).abs() / truth.log_probs.abs().clamp_min(1.0)
    return {
        "loss": abs(outcome.loss - truth.loss) / truth.loss,
        "grad_norm": abs(outcome.grad_norm - truth.grad_norm) / truth.grad_norm,
        "log_probs": float(log_probs.max()),
        "gradients": max(gradients.values()),
    }


@functools.cache
def truth(kind: str) -> Outcome:
    outcome = train(kind)
    assert isinstance(outcome, Outcome), outcome
    return outcome


CELLS = [
    pytest.param(kind, mesh, marks=() if (kind, mesh) in QUICK else pytest.mark.slow)
    for kind in REFUSED
    for mesh in MESHES
]


@pytest.mark.parametrize(("kind", "mesh"), CELLS)
def test_equals_one_process_or_is_refused(kind, mesh, ranks):
    outcomes = ranks.run(2, functools.partial(train, kind, **MESHES[mesh]), timeout=60.0)
    for outcome in outcomes:
        if mesh in REFUSED[kind]:
            assert isinstance(outcome, str), f"it is no more refused: {difference(outcome, truth(kind))}"
            assert REFUSED[kind][mesh] in outcome and outcome == outcomes[0]
        else:
            assert isinstance(outcome, Outcome), outcome
            assert max(difference(outcome, truth(kind)).values()) < TOLERANCE
            assert outcome.way == truth(kind).way or mesh == "ulysses"


def train_beside_its_noise(kind: str, **settings: Any) -> str:
    """The way that is taken in bf16, where the model is its own reference, and no difference goes without measuring."""
    exact = Tolerance((1e-6, 5.0), size=0.0, relative=(1e-6, 0.5))
    language = "sfumato.models.language"
    with mock.patch(f"{language}.tolerance.HALF", exact), mock.patch(f"{language}.probe.LARGEST_COPY", 0):
        outcome = train(kind, mixed_precision="bf16", **settings)
    assert isinstance(outcome, Outcome), outcome
    return outcome.way


@pytest.mark.parametrize("mesh", ["fsdp2", "tp"])
def test_ranks_measure_what_rounding_changes(mesh, ranks):
    ways = ranks.run(2, functools.partial(train_beside_its_noise, "gpt_oss", **MESHES[mesh]), timeout=60.0)
    assert ways == [truth("gpt_oss").way] * 2


def train_with_an_opinion(kind: str, **settings: Any) -> Outcome | str:
    """As ``train``, but the second rank finds something wrong with the first way that it sees."""
    original, opinions = Checks._find_difference, ["the second rank does not like it"] * dist.get_rank()

    def difference_of(checks: Checks, *args: Any) -> str | None:
        return original(checks, *args) or (opinions.pop() if opinions else None)

    with mock.patch.object(Checks, "_find_difference", difference_of):
        return train(kind, **settings)


def test_what_one_rank_finds_wrong_no_rank_does(ranks):
    for outcome in ranks.run(2, functools.partial(train_with_an_opinion, "mistral"), timeout=60.0):
        assert outcome.way != truth("mistral").way
        assert max(difference(outcome, truth("mistral")).values()) < TOLERANCE


def train_after_an_error(kind: str, **settings: Any) -> Outcome | str:
    """As ``train``, but the first backward pass of the probe's first way fails in the middle, on every rank."""
    original, failures = LanguageModel.forward_backward, [True]

    def fail(_gradient: Tensor) -> None:
        raise RuntimeError("out of luck")

    def forward_backward(model: LanguageModel, *args: Any) -> list[float]:
        handle = None
        if failures and failures.pop():
            layer = model.plain.model.layers[0]
            handle = layer.register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
        try:
            return original(model, *args)
        finally:
            if handle is not None:
                handle.remove()

    with mock.patch.object(LanguageModel, "forward_backward", forward_backward):
        return train(kind, **settings)


def test_a_way_that_fails_leaves_nothing_behind(ranks):
    for outcome in ranks.run(2, functools.partial(train_after_an_error, "mistral"), timeout=60.0):
        assert isinstance(outcome, Outcome), outcome
        assert outcome.way != truth("mistral").way
        assert max(difference(outcome, truth("mistral")).values()) < TOLERANCE


def train_with_a_failure(kind: str, **settings: Any) -> Outcome | str:
    """As ``train``, but the second rank fails within the probe's passes, while the first one waits for its weights."""
    if dist.get_rank() == 0:
        return train(kind, **settings)
    failing = mock.patch.object(LanguageModel, "compute_probe_values", side_effect=RuntimeError("out of luck"))
    with failing, mock.patch.object(mesh_module, "PATIENCE_S", 0.5):
        message = train(kind, **settings)
    raise RuntimeError(message)


def test_layers_that_cannot_be_shared_are_told_the_remedy(ranks):
    settings = {"tensor_parallel_size": 2, "sequence_parallel": True}
    for outcome in ranks.run(2, functools.partial(train, "dbrx", **settings), timeout=60.0):
        assert "for which set train.sequence_parallel to false" in outcome


def train_with_little_patience(kind: str, **settings: Any) -> None:
    with mock.patch.object(mesh_module, "PATIENCE_S", 0.5):
        raise RuntimeError(train(kind, **settings))


@pytest.mark.slow
def test_a_stage_that_fails_is_told_the_remedy(ranks):
    run = functools.partial(train_with_little_patience, "deepseek_v32", **MESHES["pp"])
    with pytest.raises(RankError, match=r"in a stage of the pipeline: .* not subscriptable; set train\.pipeline"):
        ranks.run(2, run, timeout=60.0)


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_ends_the_run(ranks):
    with pytest.raises(RankError, match="rank 1, and not every rank: RuntimeError: out of luck"):
        ranks.run(2, functools.partial(train_with_a_failure, "mistral"), timeout=60.0)
