"""The auxiliary loss of routers that a model's config.json asks for, against plain transformers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from sfumato.commands.check_config import check_config
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import build_transform
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.hf_config import set_attention
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.packed_model import RowLayout
from sfumato.models.language.router_config import adds_router_loss
from sfumato.models.language.router_loss import RouterLoss, StepRouterLoss
from sfumato.models.language.scores import RouterLogits
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.step_sums import SourceLosses
from tasks.train_text import next_token_loss
from tests.survey.test_tiny_configs import NAMES
from tests.survey.tiny_configs import tiny_config
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config, write_config
from tests.tiny_vision import image_row, tiny_vision_config, tiny_vision_description

ASKS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LENGTHS = (13, 7, 20)


def description(kind: str) -> dict[str, Any]:
    if kind == "mixtral":
        return tiny_language_description("mixtral") | {"num_local_experts": 4, "num_experts_per_tok": 2} | ASKS
    return tiny_language_description(kind) | ASKS


def text_config(tmp_path: Path, kind: str, **overrides: Any) -> dict[str, Any]:
    config = tiny_text_config(tmp_path, "qwen3_moe", **overrides)
    config["model"]["config_path"] = str(write_config(description(kind), tmp_path / f"{kind}.yaml"))
    return config


def build(tmp_path: Path, kind: str, **train: Any) -> tuple[LanguageModel, Mesh]:
    config = load_config(TrainTextConfig, None, text_config(tmp_path, kind, train=train))
    mesh = Mesh(Layout(), torch.device("cpu"))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type, with_router_loss=True)
    model.parallelize(mesh, config.train)
    return model, mesh


def plain_of(model: LanguageModel) -> Any:
    """transformers' own module with the same weights."""
    plain = copy.deepcopy(model.plain_with(model.module.state_dict())).train()
    set_attention(plain, "eager")
    return plain


def samples() -> list[TextSample]:
    random = np.random.default_rng(0)
    return [
        TextSample((Document(random.integers(3, 259, length).astype(np.int64), np.ones(length, bool)),))
        for length in LENGTHS
    ]


def step(model: LanguageModel, mesh: Mesh, batches: list[TokenBatch]) -> tuple[float, dict[str, float]]:
    """Loss and metrics of a step of the task, whose gradients stay in the weights."""
    num_tokens = sum(batch.num_labels for batch in batches)
    aux_loss = StepRouterLoss(model.router_loss, batches, mesh)
    loss_fn = partial(next_token_loss, num_tokens=num_tokens, by_source=SourceLosses(["data"]), aux_loss=aux_loss)
    losses = model.forward_backward(batches, loss_fn)
    return sum(losses), aux_loss.metrics()


def router_gradients(module: torch.nn.Module) -> list[Tensor]:
    return [weight.grad for name, weight in module.named_parameters() if name.endswith("mlp.gate.weight")]


def assert_near(gradients: list[Tensor], expected: list[Tensor]) -> None:
    assert len(gradients) == len(expected) == 2
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "full"}, {"chunked_loss": True}], ids=str)
def test_padded_rows_have_the_loss_and_gradients_of_transformers(tmp_path: Path, kind: str, more: Any) -> None:
    model, mesh = build(tmp_path, kind, rmpad_with_pos_ids=False, dyn_bsz=False, **more)
    plain = plain_of(model)
    batch = make_batch(samples(), [0, 1, 2], [0, 0, 0], False, 0, 2)
    loss, metrics = step(model, mesh, [batch])

    ids = batch.input_ids
    mask = (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    output = plain(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    output.loss.backward()
    assert loss == pytest.approx(float(output.loss.detach()), abs=1e-5)
    assert metrics["aux_loss"] == pytest.approx(float(output.aux_loss.detach()), abs=1e-5)
    assert_near(router_gradients(model.plain), router_gradients(plain))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_packed_rows_have_the_loss_over_the_tokens_of_their_documents(tmp_path: Path, kind: str, rows: Any) -> None:
    """Two micro-batches, the second of them longer than its documents; each counts by its share of the tokens."""
    model, mesh = build(tmp_path, kind)
    model.set_row_layout(model.attention, RowLayout(rows))
    plain = plain_of(model)
    documents = samples()
    batches = [
        make_batch(documents[:2], [0, 1], [0, 0], True, 0, 2),
        make_batch(documents[2:], [2], [0], True, 0, 32),
        make_batch([], [], [], True, 0, 2),
    ]
    loss, metrics = step(model, mesh, batches)

    num_targets, expected, expected_aux = sum(LENGTHS) - len(LENGTHS), torch.zeros(()), 0.0
    for members in (documents[:2], documents[2:]):
        logits = []
        for sample in members:
            ids = torch.from_numpy(sample.documents[0].input_ids)[None]
            output = plain(input_ids=ids, output_router_logits=True)
            log_probs = output.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            expected = expected - log_probs.sum() / num_targets
            logits.append(output.router_logits)
        joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        share = len(joined[0]) / sum(LENGTHS)
        aux = load_balancing_loss_func(joined, 4, 2) * share
        expected, expected_aux = expected + 0.5 * aux, expected_aux + float(aux.detach())
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["aux_loss"] == pytest.approx(expected_aux, abs=1e-5)
    assert_near(router_gradients(model.plain), router_gradients(plain))


QUICK = ("dbrx", "jetmoe")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_the_loss_of_every_family_is_transformers_or_refused(name: str) -> None:
    config = tiny_config(name)
    for part in (config, config.get_text_config()):
        part.output_router_logits = True
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if not adds_router_loss(type(module)):
        ids = torch.randint(3, 50, (1, 16))
        assert getattr(module(input_ids=ids, use_cache=False), "aux_loss", None) is None
        return
    if name == "doge":
        with pytest.raises(ConfigError, match="set output_router_logits to false"):
            RouterLoss(module)
        return
    ids = torch.randint(3, 50, (1, 16))
    output = module(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
    loss = RouterLoss(module)
    assert torch.equal(
        loss.compute(RouterLogits(tuple(output.router_logits)), torch.ones(1, 16).bool()), output.aux_loss
    )
    cross_entropy = torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])
    expected = cross_entropy + loss.coefficient * output.aux_loss
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)


def test_a_run_logs_it_says_what_it_is_over_and_exports_the_setting(tmp_path: Path, capsys: Any) -> None:
    config = text_config(tmp_path, "mixtral", train={"max_steps": 2})
    run = run_task_here("train_text", config)
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert rows and all(0.9 < row["aux_loss"] < 4 for row in rows)
    line = "asks for the auxiliary loss of routers (output_router_logits, weight 0.5): it is added, over the tokens"
    assert line in capsys.readouterr().err
    notes = check_config(write_config(config, tmp_path / "config.yaml")).notes
    assert any(line in note for note in notes)
    assert AutoModelForCausalLM.from_pretrained(run / "hf_ckpt").config.output_router_logits
    assert export_checkpoint(run, tmp_path / "again")


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"expert_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"ulysses_parallel_size": 2},
        {"compile": True},
    ],
    ids=str,
)
def test_settings_that_hide_the_routers_of_a_forward_pass_are_refused(tmp_path: Path, settings: Any) -> None:
    config = text_config(tmp_path, "mixtral", train=settings)
    result = check_config(write_config(config, tmp_path / "config.yaml"), num_ranks=2, with_data=False)
    assert any(
        str(next(iter(settings))) in problem and "and the routers' auxiliary loss" in problem
        for problem in result.problems
    )
    if settings == {"compile": True}:
        with pytest.raises(ConfigError, match=r"train\.compile and the routers' auxiliary loss"):
            build(tmp_path, "mixtral", compile=True)


def test_a_model_that_sees_has_the_loss_over_the_tokens_of_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without videos has an idle one, whose tokens do not count."""
    description = tiny_vision_description("qwen3_vl_moe")
    description["text_config"] |= ASKS
    fields = tiny_vision_config(tmp_path, "qwen3_vl_moe", train={"max_steps": 1})
    fields["model"]["config_path"] = str(write_config(description, tmp_path / "model.yaml"))
    outputs = []
    forward = LanguageModel._run_module

    def record(model: LanguageModel, input_ids: Tensor, *inputs: Any, **more: Any) -> Any:
        output = forward(model, input_ids, *inputs, **more)
        outputs.append((input_ids, output))
        return output

    config = load_config(TrainTextConfig, None, fields)
    mesh = Mesh(Layout(), torch.device("cpu"))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type, with_router_loss=True)
    model.parallelize(mesh, config.train)
    transform = build_transform(config.data, model.tokenizer, model.vision.reader)
    (sample,) = transform(FiledRow(image_row(0)), "row 0")
    batch = make_batch([sample], [0], [0], True, 0, 2, model.vision)
    monkeypatch.setattr(LanguageModel, "_run_module", record)
    _, metrics = step(model, mesh, [batch])
    ((ids, output),) = outputs
    length = batch.document_lengths[0]
    assert length < ids.shape[1]
    layers = tuple(layer[:length] for layer in output.router_logits)
    expected = float(load_balancing_loss_func(layers, 4, 2).detach())
    assert metrics["aux_loss"] == pytest.approx(expected, abs=1e-5)
    assert abs(expected - float(output.aux_loss.detach())) > 1e-4
