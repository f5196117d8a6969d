"""The table of a language model's best and worst answers in a report, collapsed and of bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from sfumato.config.characters import printable
from sfumato.config.open_mappings import JsonObject
from sfumato.tracking.progress import format_value
from sfumato.tracking.report_tables import render_section
from sfumato.tracking.samples import embedded_picture

MAX_ANSWERS = 8
"""Best answers of a kind that are shown, and as many of the worst."""
MAX_TEXT = 20_000
"""Characters that the page holds of a prompt or an answer: the beginning and the end of a longer one."""
MAX_GRID_TEXT = 4_000
"""Characters that it holds of one in the grid of all evaluations."""
MAX_PIXELS = 256
"""Width and height of the images of a prompt, at most."""
MAX_SUMMARY = 140
"""Characters of a text that are shown before it is opened."""

Row = JsonObject


def render_answers(samples: Mapping[int, Sequence[Row]], output_dir: Path) -> str:
    """Tables of the last evaluation and the last iteration whose samples have texts and rewards; else nothing.

    Args:
        samples: rows of ``samples.jsonl`` by step.
        output_dir: the run folder, where the images of prompts are.
    """
    kinds = (("eval", "evaluation"), ("train", "iteration"))
    return "".join(_render_table(samples, kind, name, output_dir) for kind, name in kinds)


def shorten_text(text: str, limit: int) -> str:
    """A text; of one longer than ``limit`` characters its beginning and end, and how many are left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def in_html(text: str, limit: int = MAX_GRID_TEXT) -> str:
    """A text as escaped HTML, ``shorten_text`` where it is long."""
    return escape(printable(shorten_text(text, limit)))


def fold_text(text: str, limit: int = MAX_GRID_TEXT) -> str:
    """A text as ``in_html`` gives it; a long one is collapsed and opens on a click."""
    if not text:
        return '<span class="gap">empty</span>'
    whole = in_html(text, limit)
    line = " ".join(printable(text[: 2 * MAX_SUMMARY]).split())
    if len(text) <= MAX_SUMMARY and "\n" not in text.strip():
        return f'<div class="text">{whole}</div>'
    return (
        f"<details><summary>{escape(line[:MAX_SUMMARY])} … <small>{len(text):,} characters</small></summary>"
        f'<div class="text">{whole}</div></details>'
    )


def _render_table(samples: Mapping[int, Sequence[Row]], kind: str, name: str, output_dir: Path) -> str:
    """The table of the newest step whose samples of a kind are texts; empty where none has a reward."""

    def select_kind(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row.get("kind") == kind and isinstance(row.get("text"), str)]

    step = max((step for step, rows in samples.items() if select_kind(rows)), default=None)
    if step is None:
        return ""
    samples_of_kind = select_kind(samples[step])
    scored = sorted((row for row in samples_of_kind if row.get("total") is not None), key=lambda row: -row["total"])
    if not scored:
        return ""
    num_best = min(MAX_ANSWERS, -(-len(scored) // 2))
    num_worst = min(MAX_ANSWERS, len(scored) - num_best)
    shown = [("best", row) for row in scored[:num_best]]
    shown += [("worst", row) for row in scored[len(scored) - num_worst :]]
    columns = ("", "reward", "answer", "prompt")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(
        f"<tr><td>{label}<br><small>sample {row.get('sample_id', 0)}</small></td><td>{_render_rewards(row)}</td>"
        f"<td>{fold_text(row['text'], MAX_TEXT)}</td>"
        f"<td>{_render_images(output_dir, step, row)}{fold_text(str(row.get('prompt', '')), MAX_TEXT)}</td></tr>"
        for label, row in shown
    )
    failed = f" · {len(samples_of_kind) - len(scored)} without a reward" if len(scored) < len(samples_of_kind) else ""
    note = f"Step {step} · {len(shown)} of the {len(samples_of_kind)} samples that were kept, by their reward{failed}"
    table = f'<table class="answers" data-kind="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return render_section(f"Best and worst answers of the last {name}", note, f'<div class="scroll">{table}</div>')


def _render_images(output_dir: Path, step: int, row: Row) -> str:
    """The images of the prompt in one picture; empty where it has none, or the picture cannot be shown."""
    shown = embedded_picture(output_dir, step, row["source"], MAX_PIXELS) if "source" in row else ""
    if isinstance(shown, str):
        return ""
    uri, width, height = shown
    return f'<img src="{uri}" width="{width}" height="{height}" alt="the images of the prompt">'


def _render_rewards(row: Row) -> str:
    """The total reward of a sample, its parts, and its advantage, a line each."""
    parts = [("reward", row["total"]), *(row.get("rewards") or {}).items()]
    if row.get("advantage") is not None:
        parts.append(("advantage", row["advantage"]))
    lines = [
        f"<small>{escape(printable(name))}</small> {'failed' if value is None else format_value(value)}"
        for name, value in parts
    ]
    return "<br>".join(lines)


ANSWERS_CSS = """
.answers{width:100%;min-width:720px;table-layout:fixed;font-size:13.5px}
.answers th{text-align:left;color:var(--muted)}.answers td,.answers th{padding:6px 14px 6px 0;vertical-align:top}
.answers td{border-bottom:1px solid var(--line);overflow-wrap:anywhere;unicode-bidi:isolate}
.answers th:nth-child(1){width:90px}.answers th:nth-child(2){width:170px}.answers th:nth-child(4){width:30%}
.answers img{display:block;max-width:100%;height:auto;min-width:64px;image-rendering:auto;margin-bottom:6px}
"""
