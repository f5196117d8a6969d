"""torch.compile before the first step: where it does not work the run goes on without, and what it made is said."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.compiling import compiler_figures, compiler_problem
from sfumato.parallel.layout import Layout
from sfumato.parallel.memory import BlockForward, apply_memory_savings
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.run import Run


@pytest.fixture(autouse=True)
def try_again(monkeypatch):
    """The trial is made once in a process, and graphs are counted for the whole of it."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler_problem.cache_clear()
    yield
    compiler_problem.cache_clear()


def test_without_a_compiler_one_line_says_so_and_blocks_run_as_they_are(monkeypatch, caplog):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setattr(config, "force_disable_caches", True)
    block = nn.Linear(4, 4)
    rows = torch.randn(3, 4)
    expected = block(rows)
    apply_memory_savings(block, ParallelConfig(compile=True), {"block": block})
    (line,) = (record.getMessage() for record in caplog.records if record.name.startswith("sfumato"))
    assert "\n" not in line and "/nowhere/g++" in line and "g++; the environment variable CXX" in line
    assert "train.compile false" in line
    assert torch.equal(block(rows), expected) and not compiler_figures()


def test_all_ranks_go_without_where_one_must(caplog):
    ranks = SimpleNamespace(first_problem=lambda problem: "another rank has no compiler", is_first=False)
    block = nn.Linear(4, 4)
    apply_memory_savings(block, ParallelConfig(compile=True), {"block": block}, "aot_eager", mesh=ranks)
    assert block.forward.backend is None
    assert not [record for record in caplog.records if record.name.startswith("sfumato")]


def test_a_block_that_cannot_be_compiled_is_named():
    def fails(graph: object, inputs: object) -> None:
        raise RuntimeError("no kernel for this")

    block = nn.Linear(4, 4)
    block.forward = BlockForward(block, "none", fails, None)
    with pytest.raises(ConfigError, match=r"cannot compile Linear \(.*no kernel for this\): set train\.compile to"):
        block(torch.randn(3, 4))


def test_graphs_and_seconds_are_reported_when_there_are_more(monkeypatch, tmp_path: Path, capsys):
    run = Run(tmp_path, "test", Mesh(Layout(), torch.device("cpu")))
    figures = {"compile/graphs": 4, "compile/seconds": 61.3}
    monkeypatch.setattr("sfumato.tracking.run.compiler_figures", lambda: dict(figures))
    run.begin(3, 0, [])
    run.log(1, {}, show={})
    figures["compile/graphs"] = 5
    run.log(2, {}, show={})
    run.close()
    log = (tmp_path / "log.txt").read_text()
    assert "torch.compile made 4 graphs in 61 s before step 1" in log and "5 graphs in 61 s by the end of step 2" in log
    assert log.count("torch.compile") == 2
    assert '"compile/graphs": 4' in (tmp_path / "timings.jsonl").read_text().splitlines()[0]
