"""The GPU suite, on a CPU at tiny sizes: its processes, limits and crashes, its cells, the tables of its figures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import typing
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    attention,
    distances,
    doctor,
    experts,
    families,
    memory,
    pins,
    results,
    rl,
    run,
    sft,
    syncs,
    tables,
    text_rl,
    traces,
)
from benchmarks.gpu import resume as resume_stage
from benchmarks.gpu.cells import Bound, Setting, judge
from benchmarks.gpu.results import (
    BEGUN,
    BROKEN,
    CRASHED,
    EXCEEDED,
    FAILED,
    LATE,
    LEFT_OUT,
    LISTED,
    MEASURED,
    NOT_HERE,
    Writer,
    is_settled,
    read,
)
from benchmarks.gpu.watched import compiled_for, drawn_on, largest_that_fits, task_module
from sfumato.config.load import load_config
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.meta_models import diffusion_model_on_meta
from sfumato.parallel.memory import apply_memory_savings
from tests.pretended_device import pretend_device
from tests.tiny import ROOT


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path, tmp_path / "scratch", time.monotonic() + 600)


def suite(output: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.run",
        "--tiny",
        "--output",
        str(output),
        "--commit",
        "abc",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )


def statuses(output: Path) -> dict[tuple[str, str], str]:
    return {key: line["status"] for key, line in results.last_of_each(read([output])).items()}


def test_two_stages_run_and_a_crash_costs_one_cell(tmp_path):
    chosen = ("--only", "ceilings", "kernels", "--cells", "machine", "copies", "dropout", "--crash", "ceilings")
    done = suite(tmp_path, *chosen, "--budget", "2000", timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(tmp_path) == {
        ("ceilings", "machine"): CRASHED,
        ("ceilings", "copies"): MEASURED,
        ("kernels", "dropout"): MEASURED,
    }
    crashed = next(line for line in read([tmp_path]) if line["status"] == CRASHED)
    assert crashed["reason"].startswith("ended by SIGSEGV") and crashed["commit"] == "abc" and crashed["tiny"]
    cells = [line.split() for line in done.stdout.splitlines() if line.startswith(("crashed", "measured "))]
    assert [(words[0], *words[3:5]) for words in cells] == [
        ("measured", "ceilings:", "copies"),
        ("measured", "kernels:", "dropout"),
        ("crashed", "ceilings:", "machine"),
    ]


RAY_CELLS = ("actor and sampler, half a GPU each", "the same, idle roles offloaded")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_whole_suite_runs_from_start_to_end_and_goes_on_where_it_was_left(tmp_path):
    done = suite(tmp_path, "--crash", "sft", "--budget", "2700", timeout=2900)
    assert done.returncode == 1, done.stdout + done.stderr
    result = statuses(tmp_path)
    first = ("sft", "compile/one process/plain")
    assert [key for key, status in result.items() if status in BROKEN] == [first], done.stdout
    assert {stage for stage, _ in result} == {stage.name for stage in run.STAGES}
    not_here = {cell for (_, cell), status in result.items() if status in (NOT_HERE, LEFT_OUT)}
    assert not_here <= {"memory moves", "adamw8bit", "eager/9 steps/ocr processes", "in process", "server", *RAY_CELLS}
    assert (tmp_path / "trace_sft_eager.json.gz").exists() and (tmp_path / "trace_rl_eager.json.gz").exists()
    again = suite(tmp_path, "--only", "sft", "ceilings", "--budget", "900", "--commit", "mended", timeout=950)
    assert again.returncode == 0, again.stdout + again.stderr
    assert statuses(tmp_path)[first] == MEASURED and "measured before: ceilings" in again.stdout
    second = [line for line in read([tmp_path]) if line["run"] == read([tmp_path])[-1]["run"]]
    assert {line["cell"] for line in second if line["status"] != LISTED} == {first[1]}  # the others are known


def test_packages_are_looked_at_before_any_of_them_is_imported():
    code = "import sys, benchmarks.gpu.run; print({'torch', 'diffusers', 'transformers', 'sfumato'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_process_is_ended_at_its_limit_with_all_that_it_started(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        assert run.run_process(["bash", "-c", "sleep 600 & echo $!; wait"], dict(os.environ), log, 1.0) is None
    child = int((tmp_path / "log").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("a process of the stage was left running")


def test_what_became_of_a_cell_whose_process_died_is_written(tmp_path):
    path, about = tmp_path / results.FILE, {"run": "r", "tiny": True, "commit": "abc"}
    writer = Writer(path, about)
    writer.write("sft", "one", BEGUN)
    writer.write("sft", "one", MEASURED, values={"loss": 1.23456789, "rate": float("nan")}, seconds=1.0)
    assert not run.close_begun(path, "sft", "r", 1, "")
    writer.write("sft", "two", BEGUN)
    assert run.close_begun(path, "sft", "r", None, "said")
    lines = read([tmp_path])
    assert (lines[-1]["cell"], lines[-1]["status"], lines[-1]["run"]) == ("two", LATE, "r")
    assert lines[1]["values"] == {"loss": 1.2346, "rate": "nan"}
    arguments = run.parse(["--tiny"])
    assert run.skips(lines[1], "another", arguments) and not run.skips(lines[-1], "another", arguments)
    assert run.skips(lines[-1], "r", arguments)


def test_a_cell_that_fails_or_has_no_time_costs_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # which another test may have imported

    def fail(_: Setting) -> dict[str, Any]:
        raise ValueError("of this cell alone")

    writer = Writer(tmp_path / results.FILE, {"run": "r", "tiny": True})
    arguments = run.parse(["--tiny"])
    clock = SimpleNamespace(left_s=100.0, on_gpu=False, tiny=True)

    def work(its_clock: Any) -> dict[str, Any]:
        its_clock.left_s = 0.0
        return {"x": 1.0, "speed": 0.0}

    def exceed(_: Setting) -> dict[str, Any]:
        return {"x": float("nan")}

    bounds = (
        Bound("x", 2, "look here"),
        Bound("x", 0, "or here", least=True),
        Bound("speed", 9, "on a GPU alone", least=True, real=True),
    )
    cells = {"fails": fail, "exceeds": exceed, "works": work, "too late": work}
    run.measure_all(cells, "sft", clock, writer, arguments, bounds)
    lines = {cell: line for (_, cell), line in results.last_of_each(read([tmp_path])).items()}
    assert [line["status"] for line in lines.values()] == [FAILED, EXCEEDED, MEASURED, LEFT_OUT]
    assert lines["fails"]["reason"] == "ValueError: of this cell alone" and "Traceback" in capsys.readouterr().err
    shown = results.table(lines.values())
    assert "x nan, bound <= 2  EXCEEDED: look here" in shown and "x 1.0, bound <= 2\n    x 1.0, bound >= 0" in shown


def test_bounds_are_judged_where_they_hold(setting):
    real = Setting("cuda", False, setting.output, setting.scratch, setting.until)
    bounds = (Bound("mfu", 0.5, "remedy", least=True, cells="^compile/", real=True), Bound("error", 0.1, "remedy"))
    values = {"mfu": 0.6, "error": 0.2}
    assert [verdict["met"] for verdict in judge(bounds, "compile/plain", values, real)] == [True, False]
    assert [verdict["figure"] for verdict in judge(bounds, "eager/compile/plain", values, real)] == ["error"]
    assert [verdict["figure"] for verdict in judge(bounds, "compile/plain", values, setting)] == ["error"]
    assert not judge(bounds, "compile/plain", {"other": 1.0}, real)


def test_a_call_begins_with_what_is_not_settled_yet(tmp_path):
    about = {"run": "r", "tiny": True, "commit": "abc"}
    writer = Writer(tmp_path / results.FILE, about)
    for stage, names in {"sft": ["one", "two"], "rl": ["three"], "served": ["four"], "traces": ["five"]}.items():
        writer.write(stage, "all", LISTED, values={"cells": names})
    writer.write("sft", "one", MEASURED, values={})
    writer.write("sft", "two", FAILED)
    writer.write("rl", "three", LATE)
    writer.write("served", "four", NOT_HERE)
    chosen = ["--tiny", "--output", str(tmp_path), "--only", "sft", "rl", "served", "traces", "syncs"]

    def waiting(*more: str) -> list[str]:
        return [stage.name for stage in run.waiting_stages(run.parse([*chosen, *more]))]

    assert waiting("--commit", "abc") == ["syncs", "rl", "traces"]
    assert waiting("--commit", "mended") == ["syncs", "sft", "rl", "traces"]
    assert waiting("--again") == ["served", "syncs", "sft", "rl", "traces"]
    assert not is_settled({"status": LATE, "commit": "abc"}, "abc")


def test_results_that_are_broken_are_refused_and_a_cut_last_line_is_not(tmp_path):
    path = tmp_path / results.FILE
    path.write_text('{"a": 1}\n{"b": ')
    assert read([path]) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(SystemExit, match="line 2"):
        read([path])
    with pytest.raises(SystemExit, match="does not exist"):
        read([tmp_path / "none"])


def test_packages_that_are_missing_are_named_with_what_for():
    def installed(name: str) -> str:
        if name in ("diffusers", "datasets", "rapidocr"):
            raise metadata.PackageNotFoundError(name)
        return "2.9.0" if name == "torch" else metadata.version(name)

    result = pins.problems(installed)
    assert any("diffusers" in line and "missing" in line for line in result["needed"])
    assert any("torch" in line and "2.9.0 is installed" in line for line in result["needed"])
    assert any("datasets" in line and "nothing that is measured" in line for line in result["optional"])
    assert any("rapidocr" in line and "OCR" in line for line in result["optional"])
    assert "--fetch" in pins.told(result) and pins.told({"needed": [], "optional": []}) == ""
    assert {"diffusers", "rapidocr", "pydantic-core"} <= pins.pinned().keys()
    assert pins.missing_below("diffusers") == [] and pins.missing_below("no-such-package") == ["no-such-package"]


def test_the_page_holds_the_tables_of_the_results_that_are_kept():
    page = tables.PAGE.read_text(encoding="utf-8")
    lines = tables.chosen(read(tables.kept()))
    assert tables.filled(page, lines) == page, "python -m benchmarks.gpu.tables --write"
    page = tables.BOUNDS_PAGE.read_text(encoding="utf-8")
    assert tables.with_bounds(page, lines) == page, "python -m benchmarks.gpu.tables --write"


def test_figures_come_to_the_page_with_their_origin(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(tables, "BOUNDS_PAGE", tmp_path / "bounds.md")
    tables.BOUNDS_PAGE.write_text("<!-- gpu bounds -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(tables, "MEASURED_FOLDER", tmp_path / "measured")
    tables.PAGE.write_text("".join(f"<!-- gpu {name} -->\n<!-- end -->\n" for name in tables.TABLES), encoding="utf-8")
    about = {
        "run": "r1",
        "commit": "c0ffee",
        "date": "2026-12-01",
        "device": "G",
        "torch": "9",
        "command": "cmd",
        "tiny": False,
    }
    writer = Writer(tmp_path / results.FILE, about)
    writer.write("sft", "compile/one process/plain", BEGUN)
    writer.write(
        "sft", "compile/one process/plain", MEASURED, values={"tokens_per_s": 30123.4, "mfu": 0.5623}, seconds=9.0
    )
    writer.write("sft", "eager/one process/plain", CRASHED, reason="ended by SIGSEGV; ")
    tables.main([str(tmp_path), "--write"])
    page = tables.PAGE.read_text(encoding="utf-8")
    assert "| compile, one process, plain | - | 30123 | - | 56.2 % | - |" in page
    assert "| eager, one process, plain | crashed | crashed | crashed | crashed | crashed |" in page
    assert "Origin: G, torch 9, 2026-12-01, commit c0ffee, `cmd`." in page
    bounds = tables.BOUNDS_PAGE.read_text(encoding="utf-8")
    assert "| sft | mfu (compile/.*/plain) | >= 0.55 | 0.562, compile/one process/plain |" in bounds
    tables.main(["--write"])  # what is kept is enough
    assert tables.PAGE.read_text(encoding="utf-8") == page
    Writer(tmp_path / results.FILE, about | {"tiny": True}).write("sft", "eager/fsdp2/plain", MEASURED, values={})
    with pytest.raises(SystemExit, match="tiny"):
        tables.main([str(tmp_path), "--write"])


def test_every_cell_of_a_table_is_a_cell_of_its_stage(setting):
    real = Setting("cuda", False, setting.output, setting.scratch, setting.until)
    modules = {"sft": sft, "rl": rl, "syncs": syncs, "traces": traces}
    for name, module in modules.items():
        # a task that neither compiles nor recomputes has columns without cells
        shown = {
            cell for cell in tables.TABLES[name].cell_names() if not re.match("train_autoencoder/(?!eager$)", cell)
        }
        assert shown == set(module.cells(real)), name


def test_every_mode_of_a_task_is_a_configuration_that_it_takes(setting, tmp_path):
    real = Setting("cuda", False, setting.output, setting.scratch, setting.until)
    for name, chosen in syncs.TASKS.items():
        config = chosen.config(tmp_path)
        schema = typing.get_type_hints(task_module(chosen.task).main)["config"]
        for mode in (cell.partition("/")[2] for cell in syncs.cells(real) if cell.startswith(f"{name}/")):
            load_config(schema, overrides=config | {"train": config["train"] | syncs.MODES[mode]})


@pytest.mark.slow
def test_models_at_real_size_are_those_that_were_published(setting, tmp_path):
    real = Setting("cuda", False, tmp_path, tmp_path, setting.until)
    billions = {"FLUX.1 dev": 11.9, "Qwen-Image": 20.4, "Wan 2.1 1.3 B": 1.42, "Wan 2.2 5 B": 5.0}
    latents = {"FLUX.1 dev": (16, 64, 64), "Wan 2.1 1.3 B": (16, 9, 30, 52), "Wan 2.2 5 B": (48, 3, 44, 80)}
    for name, published in billions.items():
        config = families.family_config(real, name)
        config["train"]["max_steps"] = 1
        parsed = load_config(task_module("rl_diffusion").TrajectoryRLConfig, overrides=config)
        model = diffusion_model_on_meta(parsed.model, parsed.train.mixed_precision)
        base = sum(weight.numel() for key, weight in model.denoiser.named_parameters() if "lora_" not in key)
        assert base / 1e9 == pytest.approx(published, rel=0.02), name
        assert model.latent_shape(*parsed.rollout.size) == latents.get(name, (16, 64, 64))


def test_fine_tuning_is_timed_and_broken_off(setting):
    result = sft.measure(setting, "eager", "one process", "plain")
    assert result["tokens_per_s"] > 0 and result["tflops_per_s"] > 0 and 5 < result["loss"] < 8
    assert not list((setting.scratch / "eager_one_process_plain_2/run").glob("checkpoints/global_step_*"))


def test_weights_are_drawn_where_they_are_used_and_none_is_all_zero(setting):
    config = rl.rl_config(setting.scratch, setting, "2 steps", "jpeg", 2)
    config["train"]["max_steps"] = 1
    module = task_module("rl_diffusion")
    parsed = load_config(module.TrajectoryRLConfig, overrides=config)
    with drawn_on("cpu"):
        model = build_diffusion_model(parsed.model)
    zeros = [name for name, parameter in model.denoiser.named_parameters() if not parameter.any()]
    assert zeros and all("lora_B" in name for name in zeros)
    plain = build_diffusion_model(parsed.model)
    assert any(not parameter.any() for name, parameter in plain.denoiser.named_parameters() if "lora_" not in name)


def test_only_a_gpu_gets_generated_code(setting):
    with compiled_for(setting):
        assert apply_memory_savings.__defaults__[0] == "aot_eager"
    assert apply_memory_savings.__defaults__[0] == "inductor"


def test_what_does_not_fit_into_memory_is_measured_smaller():
    sizes: list[int] = []

    def measure(size: int) -> int:
        sizes.append(size)
        if size > 4:
            raise torch.OutOfMemoryError("too large")
        return size

    assert largest_that_fits((16, 8, 4, 2), measure) == 4 and sizes == [16, 8, 4]
    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits((16, 8), measure)


@pytest.mark.parametrize(
    ("module", "cell"),
    [
        (distances, "probe/eager"),
        (distances, "self-check/eager"),
        (attention, "sinks, window"),
        (experts, "one in sixteen"),
    ],
)
def test_a_cell_keeps_its_tensors_on_one_device_and_its_figures_within_their_bounds(module, cell, setting):
    pretended = Setting("cpu:0", True, setting.output, setting.scratch, setting.until)
    with pretend_device() as device:
        values = module.cells(pretended)[cell](pretended)
    assert device.waits  # figures are read from the device
    verdicts = judge(module.BOUNDS, cell, values, pretended)
    assert verdicts and all(verdict["met"] for verdict in verdicts), values


def test_a_tensor_of_another_device_is_noticed(setting, monkeypatch):
    pretended = Setting("cpu:0", True, setting.output, setting.scratch, setting.until)
    monkeypatch.setattr(attention, "tokens_of", lambda positions: torch.ones(positions.shape, dtype=torch.int64))
    with pretend_device(), pytest.raises(RuntimeError, match="of the device and of the host"):
        attention.cells(pretended)["plain"](pretended)


@pytest.mark.parametrize(
    ("module", "cell"),
    [
        (resume_stage, "8 B, adapters"),
        (text_rl, "eager"),
        pytest.param(doctor, "one compiled block", marks=pytest.mark.slow),
        pytest.param(memory, "Stable Diffusion 3.5 medium, Flow-GRPO", marks=pytest.mark.slow),
        pytest.param(syncs, "train_text/eager", marks=pytest.mark.slow),
    ],
)
def test_a_cell_of_a_run_keeps_its_bounds_at_tiny_size(module, cell, setting):
    values = module.cells(setting)[cell](setting)
    assert all(verdict["met"] for verdict in judge(module.BOUNDS, cell, values, setting)), values


def test_warnings_of_a_gpu_are_counted_each_time_and_the_suites_own_waits_are_not(setting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    on_gpu = Setting("cuda", True, setting.output, setting.scratch, setting.until)
    with syncs.Waits() as waits:
        waits.after_step(2)
        on_gpu.wait()
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
        torch.cuda.synchronize()
    assert waits.lines.total() == 4, waits.lines


def test_a_trace_says_how_long_the_gpu_is_busy_and_with_what():
    kernel = {"ph": "X", "cat": "kernel"}
    events = [
        kernel | {"name": "sm90_xmma_gemm_bf16", "ts": 0, "dur": 40},
        kernel | {"name": "flash_fwd_kernel", "ts": 20, "dur": 30},
        kernel | {"name": "vectorized_elementwise", "ts": 80, "dur": 10},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        {"ph": "i", "name": "mark", "ts": 5},
    ]
    result = traces.shares(events, on_gpu=True)
    assert result["busy"] == pytest.approx(0.6) and result["kernels"] == 3
    assert result["products"] == pytest.approx(0.5) and result["attention"] == pytest.approx(30 / 80)
    assert max(result["longest"], key=result["longest"].get) == "sm90_xmma_gemm_bf16"
    assert json.dumps(result) and result["others"] == pytest.approx(1 / 8)
