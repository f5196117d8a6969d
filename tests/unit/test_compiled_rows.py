"""Compiled blocks of language models: few lengths of rows, few graphs, the same numbers."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from sfumato.config.load import load_config
from sfumato.config.parallel import ParallelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.models.language import probe
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe_documents import make_documents
from sfumato.parallel import memory
from sfumato.parallel.compiling import compiler_figures
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import COMPILED_MULTIPLE, row_multiple
from tests.token_batches import batch, samples
from tests.unit.test_language import build, describe, gradients, relative, sum_of_losses

NUM_ROWS, PARTS = 6, 4
"""Rows, and into how many parts attention, which is not compiled, breaks a block."""


@pytest.fixture
def compiler(monkeypatch):
    """A fresh compiler that makes graphs but no machine code, and counts them."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    monkeypatch.setattr(memory, "apply_memory_savings", partial(memory.apply_memory_savings, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


def numbers_of(model: LanguageModel) -> list[float]:
    """Losses of rows of many lengths, one after the other, and log-probabilities without gradients."""
    sample_list = samples()
    rows = [batch(sample_list[: count + 1]) for count in range(NUM_ROWS)]
    results = [*model.forward_backward(rows, sum_of_losses)]
    log_probs = model.token_log_probs(rows[:3])
    assert [log_prob.shape for log_prob in log_probs] == [row.labels.shape for row in rows[:3]]
    return results + [float(log_prob.sum()) for log_prob in log_probs]


@pytest.mark.parametrize(
    ("multiple", "graphs"),
    [pytest.param(1, 2, marks=pytest.mark.slow, id="any lengths"), pytest.param(128, 1, id="one length")],
)
def test_rows_of_many_lengths_take_few_graphs(multiple, graphs, compiler, tmp_path):
    expected = numbers_of(build(describe(tmp_path)))
    model = build(describe(tmp_path), compile=True, pad_to_multiple_of=multiple)
    assert numbers_of(model) == pytest.approx(expected, rel=1e-5)
    actual = compiler["unique_graphs"]
    assert 0 < actual <= 2 * PARTS * graphs  # with gradients and without
    assert numbers_of(model) and compiler["unique_graphs"] == actual  # nothing is compiled again


@pytest.mark.parametrize(("precision", "recompute"), [("bf16", "full"), ("no", "selective")])
def test_recomputed_blocks_are_compiled_and_share_their_graphs(precision, recompute, compiler, tmp_path):
    """Attention is not compiled, and keeps nothing around it from being so. Blocks of one kind share graphs, also where
    their layers convert weights."""
    plain = build(describe(tmp_path), mixed_precision=precision)
    expected = plain.forward_backward([batch(samples())], sum_of_losses)[0]
    train = {"mixed_precision": precision, "activation_checkpointing": recompute, "compile": True}
    model = build(describe(tmp_path), **train, pad_to_multiple_of=128)
    assert model.forward_backward([batch(samples())], sum_of_losses)[0] == pytest.approx(expected, rel=1e-6)
    assert compiler["unique_graphs"] == compiler_figures()["compile/graphs"] == PARTS
    assert compiler_figures()["compile/seconds"] > 0
    expected_gradients = gradients(plain)
    for name, gradient in gradients(model).items():
        assert relative(gradient, expected_gradients[name]) < 1e-5, name


def test_filled_rows_say_the_same(tmp_path):
    plain, filled = build(describe(tmp_path)), build(describe(tmp_path), pad_to_multiple_of=64)
    assert numbers_of(filled) == pytest.approx(numbers_of(plain), rel=1e-6)
    expected = gradients(plain)
    for name, gradient in gradients(filled).items():
        assert relative(gradient, expected[name]) < 1e-5, name


def test_blocks_are_compiled_on_gpus_unless_told():
    config, alone = ParallelConfig(), Mesh(Layout(), torch.device("cpu"))
    assert config.compiles("cuda") and not config.compiles("cpu")
    assert not ParallelConfig(compile=False).compiles("cuda") and ParallelConfig(compile=True).compiles("cpu")
    assert not ParallelConfig(pipeline_parallel_size=2).compiles("cuda")
    on_gpu = Mesh(Layout(), torch.device("cuda"))
    train = load_config(TextTrainConfig, overrides={"output_dir": "unused"})
    assert (row_multiple(train, alone), row_multiple(train, on_gpu)) == (1, COMPILED_MULTIPLE)


def test_an_older_compiler_is_told_how_many_variants_there_are(monkeypatch):
    with torch._dynamo.config.patch(recompile_limit=8):
        monkeypatch.setattr(memory.inspect, "signature", lambda _: SimpleNamespace(parameters={}))
        assert memory._compile_settings() == {}
        assert torch._dynamo.config.recompile_limit == memory.RECOMPILE_LIMIT
        monkeypatch.undo()


def test_the_reference_of_the_probe_is_not_compiled(compiler, tmp_path, monkeypatch):
    """Of a model too large for a copy beside it, the reference comes from the model itself, document by document."""
    monkeypatch.setattr(probe, "LARGEST_COPY", 0)
    train = load_config(TextTrainConfig, overrides={"output_dir": "unused", "compile": True, "pad_to_multiple_of": 128})
    model = build(describe(tmp_path), compile=True, pad_to_multiple_of=128)
    checks = probe.Checks(model, make_documents(model, train, 32), train, copies=1)
    with model.probed():
        expected = checks.reference()
        assert expected is not None and not compiler["unique_graphs"]
        measured = checks.measure()
    assert compiler["unique_graphs"] and measured.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_cache_of_keys_and_values_is_not_compiled(compiler, tmp_path):
    model = build(describe(tmp_path) | {"attention": "sdpa"}, compile=True)
    with torch.no_grad():
        model.module(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=True)
    assert not compiler["unique_graphs"]
