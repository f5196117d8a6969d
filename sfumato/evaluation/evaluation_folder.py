"""What an evaluation writes and prints: JSON, markdown, a page, and a table in the terminal."""

from __future__ import annotations

from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sfumato.config.characters import in_one_line, printable
from sfumato.config.writing import write_atomically
from sfumato.evaluation.results import Evaluation, as_json, as_markdown, rows_of
from sfumato.evaluation.samples_folder import SamplesFolder, write_sections
from sfumato.tracking.json_lines import strict_json
from sfumato.tracking.report_tables import numbers_table, render_section

INTERVALS = "Brackets hold 95 % bootstrap intervals over prompts; differences are over pairs of equal prompt and seed."


def write_evaluation(folder: Path, evaluation: Evaluation, samples: SamplesFolder | None = None) -> Path:
    """Writes ``evaluation.json``, ``evaluation.md`` and the page, whose path is returned.

    Args:
        folder: where to.
        evaluation: results.
        samples: that were written to the same folder, for the page.
    """
    write_atomically(folder / "evaluation.json", f"{strict_json(as_json(evaluation))}\n".encode())
    write_atomically(folder / "evaluation.md", printable(as_markdown(evaluation)).encode())
    sections = [_results_table(evaluation)]
    if samples is not None:
        sections.append(samples.grid())
    return write_sections(folder, "Evaluation", evaluation.notes, sections)


def print_table(evaluation: Evaluation, as_json_text: bool) -> None:
    """Prints the results: a table, or JSON."""
    if as_json_text:
        print(strict_json(as_json(evaluation)))
        return
    columns, rows = rows_of(evaluation)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        # folded, not cut off: of a log of 80 columns nothing else is kept
        table.add_column(Text(in_one_line(column)), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(in_one_line(cell)) for cell in row))
    Console().print(table)


def _results_table(evaluation: Evaluation) -> str:
    """The table on the page."""
    columns, rows = rows_of(evaluation)
    body = "".join(f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return render_section("Results", INTERVALS, numbers_table([escape(printable(column)) for column in columns], body))
