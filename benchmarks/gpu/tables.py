"""The tables of docs/performance.md and docs/gpu.md with what the GPU suite has measured.

    python -m benchmarks.gpu.tables [RESULTS ...] [--write]

RESULTS are ``results.jsonl`` files of the suite, or their folders. With ``--write`` they are kept beside the earlier
ones in benchmarks/gpu/measured, and the tables of all of them take the place of those on the pages, between the lines
``<!-- gpu NAME -->`` and ``<!-- end -->``; without, the tables are printed. Of several figures of one cell the last
counts. A cell without a figure has a hyphen, or what became of it; rows, columns and bounds without any are left out,
which is said below the table. Each table names commit, date, device and command of its figures. Runs with ``--tiny``
are refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Bound
from benchmarks.gpu.results import BEGUN, LISTED, ROOT, WITH_FIGURES, last_of_each, read
from benchmarks.gpu.run import STAGES

PAGE = ROOT / "docs" / "performance.md"
BOUNDS_PAGE = ROOT / "docs" / "gpu.md"
MEASURED_FOLDER = Path(__file__).with_name("measured")
NOT_MEASURED = "-"

Lines = dict[tuple[str, str], dict[str, Any]]
"""The last line of each stage and cell."""


@dataclass(frozen=True)
class Column:
    """A figure of a cell."""

    title: str
    name: str
    form: str = "{:.3g}"
    factor: float = 1.0
    of: str = ""
    """What follows the row's name in the cell's, where columns are cells, too."""

    def text(self, line: dict[str, Any] | None) -> str:
        """The figure, or why there is none."""
        if line is None:
            return NOT_MEASURED
        if line["status"] not in WITH_FIGURES:
            return line["status"]
        value = line["values"].get(self.name)
        if value is None:
            return NOT_MEASURED
        return str(value) if isinstance(value, str | bool) else self.form.format(value * self.factor)


@dataclass(frozen=True)
class Table:
    """Rows are cells of one stage."""

    stage: str
    first: str
    """Title of the first column."""
    cells: tuple[tuple[str, str], ...]
    """What stands in the first column, and the cell's name."""
    columns: tuple[Column, ...]

    def render(self, lines: Lines) -> str:
        """Markdown, with the origin of the figures below."""
        rows: list[list[str]] = []
        used = []
        for label, cell in self.cells:
            row = [lines.get((self.stage, f"{cell}{column.of}")) for column in self.columns]
            used += row
            texts = [column.text(line) for column, line in zip(self.columns, row, strict=True)]
            if set(texts) != {NOT_MEASURED}:
                rows.append([label, *texts])
        if not rows:
            return "Not measured."
        titles = [self.first, *(column.title for column in self.columns)]
        shown = [number for number in range(len(titles)) if any(row[number] != NOT_MEASURED for row in rows)]
        table = [[cells[number] for number in shown] for cells in (titles, *rows)]
        head, *body = [f"| {' | '.join(cells)} |" for cells in table]
        missing = ["Further rows were not measured.", ""] if len(rows) < len(self.cells) else []
        return "\n".join([head, "|" + "---|" * len(shown), *body, "", *missing, origin(used)])

    def cell_names(self) -> set[str]:
        """The cells that it shows."""
        return {f"{cell}{column.of}" for _, cell in self.cells for column in self.columns}


def origin(used: list[dict[str, Any] | None]) -> str:
    """Where the figures of a table come from."""
    commits: dict[tuple[str, ...], list[str]] = {}
    for line in used:
        if line and line["status"] in WITH_FIGURES:
            run = tuple(str(line[name]) for name in ("device", "torch", "date", "command"))
            of_run = commits.setdefault(run, [])
            if line["commit"] not in of_run:
                of_run.append(line["commit"])
    parts = [
        f"{device}, torch {torch}, {date}, commit {', '.join(of_run)}, `{command}`"
        for (device, torch, date, command), of_run in commits.items()
    ]
    return f"Origin: {'; '.join(parts)}."


def product(*parts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Rows of a grid, in order: label and name of the cell."""
    names = [""]
    for part in parts:
        names = [f"{name}/{suffix}".lstrip("/") for name in names for suffix in part]
    return tuple((name.replace("/", ", "), name) for name in names)


def same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


TFLOPS = Column("TFLOP/s", "tflops_per_s", "{:.0f}")
PEAK = Column("GPU memory, GiB", "gpu_peak_gib", "{:.1f}")
MFU = Column("MFU of 790 TFLOP/s", "mfu", "{:.1f} %", 100)

TABLES = {
    "products": Table(
        "ceilings",
        "8192³, random numbers",
        same("products"),
        (
            Column("bf16, TFLOP/s", "bf16_tflops_per_s", "{:.0f}"),
            Column("float32, TFLOP/s", "fp32_tflops_per_s", "{:.0f}"),
        ),
    ),
    "copies": Table(
        "ceilings",
        "GB/s",
        same("copies"),
        (
            Column("within the device, read and written", "device_gb_per_s", "{:.0f}"),
            Column("to pinned CPU memory", "to_cpu_gb_per_s", "{:.0f}"),
            Column("from it", "to_gpu_gb_per_s", "{:.0f}"),
        ),
    ),
    "attention": Table(
        "ceilings",
        "bf16, 8 x 24 heads of 64, 1,280 tokens",
        same("attention"),
        (
            Column("torch takes", "default"),
            Column("flash, TFLOP/s", "flash_tflops_per_s", "{:.0f}"),
            Column("cuDNN, TFLOP/s", "cudnn_tflops_per_s", "{:.0f}"),
            Column("flash: same bits with gradients", "same_bits_with_gradients_flash"),
            Column("cuDNN: same bits with gradients", "same_bits_with_gradients_cudnn"),
        ),
    ),
    "syncs": Table(
        "syncs",
        "tiny run",
        same(
            "train_text",
            "train_text_dpo",
            "train_text_kto",
            "train_text_images",
            "train_text_reward",
            "train_dit",
            "train_dit_dpo",
            "train_autoencoder",
            "rl_diffusion",
            "rl_diffusion_forward",
            "rl_text",
        ),
        tuple(
            Column(mode, "per_step", of=f"/{mode}")
            for mode in (
                "eager",
                "eager, activations offloaded",
                "eager, optimiser offloaded",
                "compile",
                "compile, recomputed",
                "compile, activations offloaded",
            )
        ),
    ),
    "sft": Table(
        "sft",
        "blocks, engine, loss",
        (
            *product(("compile", "eager"), ("one process", "fsdp2"), ("plain", "chunked")),
            *product(("compile", "eager"), ("one process",), ("images",)),
        ),
        (
            Column("tokens of a step", "tokens_of_a_step", "{:.0f}"),
            Column("tokens/s", "tokens_per_s", "{:.0f}"),
            TFLOPS,
            MFU,
            PEAK,
        ),
    ),
    "rl": Table(
        "rl",
        "blocks, trained steps, reward",
        product(("compile", "eager"), ("2 steps", "9 steps"), ("jpeg", "ocr thread", "ocr processes")),
        (
            Column("images/s", "images_per_s"),
            Column("generate, s", "generate_s"),
            Column("wait for rewards, s", "wait_for_rewards_s"),
            Column("update, s", "update_s"),
            TFLOPS,
            PEAK,
            Column("replay error", "replay_error", "{:.0e}"),
        ),
    ),
    "text_rl": Table(
        "text_rl",
        "blocks",
        same("eager", "compile"),
        (
            Column("drawn tokens/s", "drawn_tokens_per_s", "{:.0f}"),
            Column("generate, s", "generate_s"),
            Column("update, s", "update_s"),
            Column("step, s", "step_s"),
            PEAK,
        ),
    ),
    "traces": Table(
        "traces",
        "task, blocks",
        product(("sft", "rl"), ("compile", "eager")),
        (
            Column("GPU busy", "busy", "{:.0f} %", 100),
            Column("products", "products", "{:.0f} %", 100),
            Column("attention", "attention", "{:.0f} %", 100),
            Column("compiled", "compiled", "{:.0f} %", 100),
            Column("kernels", "kernels", "{:.0f}"),
        ),
    ),
}


def region(name: str) -> re.Pattern[str]:
    """What stands on the page between the marks of a table."""
    return re.compile(rf"(<!-- gpu {name} -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, lines: Lines) -> str:
    """The page with tables made of these lines.

    Raises:
        SystemExit: when the page has no place for a table.
    """
    for name, table in TABLES.items():
        made = table.render(lines)
        text, count = region(name).subn(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
        if count != 1:
            raise SystemExit(
                f"error: {PAGE.name} must hold <!-- gpu {name} --> to <!-- end --> once, not {count} times"
            )
    return text


def with_bounds(text: str, lines: Lines) -> str:
    """The page of bounds with a table of them all, and of the worst figure of each.

    Raises:
        SystemExit: when the page has no place for it.
    """
    rows = ["| stage | figure | bound | measured |", "|---|---|---|---|"]
    missing: dict[str, int] = {}
    for stage in STAGES:
        for bound in importlib.import_module(f"benchmarks.gpu.{stage.name}").BOUNDS:
            of = f" ({bound.cells.strip('^$').replace('|', ' or ')})" if bound.cells else ""
            figure = worst(stage.name, bound, lines)
            if figure == NOT_MEASURED:
                missing[stage.name] = missing.get(stage.name, 0) + 1
            else:
                rows.append(f"| {stage.name} | {bound.figure}{of} | {bound.text()} | {figure} |")
    whole = [{**line, "command": "python -m benchmarks.gpu.run"} for line in lines.values()]
    unmeasured = ", ".join(f"{name} {count}" for name, count in missing.items())
    left_out = [f"Bounds without a figure, which the suite prints: {unmeasured}.", ""] if missing else []
    made = "\n".join([*rows, "", *left_out, origin(whole)])
    text, count = region("bounds").subn(lambda match: f"{match[1]}{made}\n{match[2]}", text)
    if count != 1:
        raise SystemExit(
            f"error: {BOUNDS_PAGE.name} must hold <!-- gpu bounds --> to <!-- end --> once, not {count} times"
        )
    return text


def worst(stage: str, bound: Bound, lines: Lines) -> str:
    """The figure of a bound that is furthest beyond it, with its cell; what became of the cells where there is none."""
    values = [
        (float(line["values"][bound.figure]), cell)
        for (name, cell), line in lines.items()
        if name == stage and re.search(bound.cells, cell) and bound.figure in line.get("values", {})
    ]
    if not values:
        return NOT_MEASURED
    value, cell = (min if bound.least else max)(values)
    return f"{value:.3g}, {cell}"


def chosen(lines: list[dict[str, Any]]) -> Lines:
    """The last line of each cell.

    Raises:
        SystemExit: for lines of a run with --tiny.
    """
    if any(line.get("tiny") for line in lines):
        raise SystemExit("error: results of --tiny are no measurements: give those of a run without it")
    return last_of_each(lines)


def kept() -> list[Path]:
    """Files of results that are part of the repository, oldest first."""
    return sorted(MEASURED_FOLDER.glob("*.jsonl"))


def keep(paths: list[Path]) -> None:
    """Adds the lines of each run to a file of its own."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for line in read(paths):
        by_run.setdefault(line["run"], []).append(line)
    chosen([line for lines in by_run.values() for line in lines])
    MEASURED_FOLDER.mkdir(exist_ok=True)
    for run, lines in by_run.items():
        text = "".join(json.dumps(line) + "\n" for line in lines if line["status"] not in (BEGUN, LISTED))
        (MEASURED_FOLDER / f"{run}.jsonl").write_text(text, encoding="utf-8")


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS")
    parser.add_argument("--write", action="store_true", help="keep the results, and fill the page")
    arguments = parser.parse_args(command_line)
    if arguments.write:
        keep(arguments.results)
        text = filled(PAGE.read_text(encoding="utf-8"), chosen(read(kept())))
        PAGE.write_text(text, encoding="utf-8")
        text = with_bounds(BOUNDS_PAGE.read_text(encoding="utf-8"), chosen(read(kept())))
        BOUNDS_PAGE.write_text(text, encoding="utf-8")
        return 0
    lines = chosen(read([*kept(), *arguments.results]))
    for name, table in TABLES.items():
        print(f"{name}\n\n{table.render(lines)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
