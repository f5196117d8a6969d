"""Samples of a report: evaluations over the steps, and the best and worst of training."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from sfumato.config.file_checks import path_inside
from sfumato.config.open_mappings import JsonObject
from sfumato.tracking.progress import digits_after_point, format_value
from sfumato.tracking.report_answers import fold_text, in_html
from sfumato.tracking.report_tables import render_section
from sfumato.tracking.samples import choose_evenly, embedded_picture, embedded_sound, step_folder

TEXT_CELL = 220
"""Least width of a sample that is a text, in pixels: a line of a narrower one has too few words to be read."""
MAX_ROWS, MAX_COLUMNS, MAX_GROUPS, MAX_PIXELS = 12, 8, 6, 256


def evaluation_grid(output_dir: Path, samples: dict[int, list[JsonObject]]) -> str:
    """The samples of evaluations: a row for each prompt and seed, a column for each step."""
    # The key holds prompt and seed too: an image must never stand beside a prompt that did not make it.
    cells: dict[tuple[int, str, int], dict[int, JsonObject]] = {}
    for step, rows in samples.items():
        for row in rows:
            if row.get("kind") == "eval":
                key = (row.get("sample_id", 0), row.get("prompt", ""), row.get("seed", 0))
                cells.setdefault(key, {})[step] = row
    if not cells:
        return ""
    steps = choose_evenly(sorted({step for by_step in cells.values() for step in by_step}), MAX_COLUMNS)
    shown = sorted(cells)[:MAX_ROWS]
    chips = RewardChips([cells[key][step] for key in shown for step in steps if step in cells[key]])
    head = "".join(f'<th scope="col" data-step="{step}">step {step}</th>' for step in steps)
    body = []
    for key in shown:
        sample_id, prompt, seed = key
        images = [sample_cell(output_dir, step, cells[key].get(step), chips) for step in steps]
        source = sample_source(output_dir, *next(iter(cells[key].items())))
        body.append(prompt_rows(prompt, seed, source, images, f' data-sample="{escape(str(sample_id))}"'))
    hidden = f" · {len(shown)} of {len(cells)} samples" if len(shown) < len(cells) else ""
    has_texts = any("text" in row for key in shown for row in cells[key].values())
    width = max(TEXT_CELL if has_texts else 104, min(MAX_PIXELS, 1080 // len(steps) - 10))
    table = grid_table(head, body, width, has_texts)
    note = f"The reward stands under each sample{hidden}." if chips.has_rewards else hidden.removeprefix(" · ")
    return render_section("Same prompts and seeds over training", note, table)


def prompt_rows(prompt: str, seed: object, source: str, cells: Sequence[str], attribute: str = "") -> str:
    """Two rows of a grid: a prompt with its seed and its image, and below it the samples.

    Args:
        prompt, seed: of the samples.
        source, cells: HTML of the prompt's image, and of each sample.
        attribute: HTML of an attribute of the prompt's cell.
    """
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr class="prompt"><th colspan="{len(cells)}"{attribute}><span>{in_html(prompt)} '
        f"<small>seed {escape(str(seed))}</small>{source}</span></th></tr><tr>{row}</tr>"
    )


def grid_table(head: str, rows: Sequence[str], width: int, has_texts: bool = False) -> str:
    """A grid of samples, ``width`` pixels each; ``head`` and ``rows`` are HTML."""
    return (
        f'<div class="scroll"><table class="{"grid texts" if has_texts else "grid"}" style="--cell:{width}px">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def training_samples(output_dir: Path, samples: dict[int, list[JsonObject]]) -> str:
    """The best and the worst training sample of some groups of the newest step; a group has one prompt."""
    step = max((s for s, rows in samples.items() if any(r.get("kind") == "train" for r in rows)), default=None)
    if step is None:
        return ""
    rows = [row for row in samples[step] if row.get("kind") == "train"]
    groups: dict[str, list[JsonObject]] = {}
    for row in rows:
        groups.setdefault(row.get("prompt", ""), []).append(row)
    chips = RewardChips(rows)
    html = []
    for prompt, members in list(groups.items())[:MAX_GROUPS]:
        scored = sorted((r for r in members if r.get("total") is not None), key=lambda r: r["total"], reverse=True)
        chosen = [("best ", scored[0]), ("worst ", scored[-1])] if len(scored) > 1 else [("", r) for r in members[:1]]
        figures = "".join(f"<div>{sample_cell(output_dir, step, row, chips, label)}</div>" for label, row in chosen)
        html.append(
            f'<div class="group"><p>{in_html(prompt)} <small>{len(members)} samples</small></p>'
            f'<div class="pair">{sample_source(output_dir, step, members[0])}{figures}</div></div>'
        )
    hidden = f" · {len(html)} of {len(groups)} groups" if len(html) < len(groups) else ""
    note = f"Step {step} · best and worst of each group{hidden}"
    return render_section("Latest training samples", note, f'<div class="groups">{"".join(html)}</div>')


class RewardChips:
    """Labels of rewards, coloured from red to green over 0 to 1, or over the range of the values if that is wider."""

    def __init__(self, rows: Sequence[JsonObject]) -> None:
        """``rows`` are the samples that are shown."""
        values = [row["total"] for row in rows if row.get("total") is not None]
        has_rewards = any(row.get("rewards") for row in rows)
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.has_rewards = bool(values) or has_rewards
        self.digits = digits_after_point(low, high) - 1
        self.low, self.high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high)

    def render(self, row: JsonObject) -> str:
        """The label of a sample; empty where no sample has a reward."""
        if row.get("damage"):
            return f'<span class="warn">{escape(row["damage"])}</span>'
        if not self.has_rewards:
            return ""
        rewards = row.get("rewards") or {}
        title = escape(", ".join(f"{k} {'failed' if v is None else format_value(v)}" for k, v in rewards.items()))
        total = row.get("total")
        if total is None:
            return f'<span class="chip none" title="{title}">no reward</span>'
        part = (total - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return f'<span class="chip" style="--hue:{120 * part:.0f}" title="{title}">{total:.{self.digits}f}</span>'


def sample_cell(output_dir: Path, step: int, row: JsonObject | None, chips: RewardChips, label: str = "") -> str:
    """A sample's picture or text, with its reward and advantage below."""
    if row is None:
        return '<span class="gap">absent</span>'
    if "text" in row:
        image = f'<div class="text">{fold_text(row["text"])}</div>'
    else:
        image = _render_picture(output_dir, step, row.get("file", ""), row.get("prompt", "")) + _render_player(
            output_dir, step, row
        )
    advantage = row.get("advantage")
    note = "" if advantage is None else f"<small>advantage {advantage:+.2f}</small>"
    return f"{image}<small>{label}</small>{chips.render(row)}{note}"


def _render_picture(output_dir: Path, step: int, name: str, alt: str) -> str:
    """A picture of a step, embedded; or its name, and why it is not shown."""
    shown = embedded_picture(output_dir, step, name, MAX_PIXELS)
    if isinstance(shown, str):
        return f'<span class="gap">{escape(Path(name).name)}{shown}</span><br>'
    return picture_tag(*shown, alt)


def picture_tag(uri: str, width: int, height: int, alt: str) -> str:
    """An embedded picture; a small one with hard pixels."""
    kind = ' class="pixels"' if max(width, height) <= MAX_PIXELS // 2 else ""
    return f'<img{kind} src="{uri}" width="{width}" height="{height}" alt="{escape(alt)}">'


def _render_player(output_dir: Path, step: int, row: JsonObject) -> str:
    """A player of a sample's sound; empty where it has none, or where its file is missing."""
    folder = step_folder(output_dir, step)
    path = path_inside(folder, row["sound"]) if "sound" in row else None
    return audio_player(path, "" if path is None else f"samples/{folder.name}/{path.name}")


def audio_player(path: Path | None, href: str) -> str:
    """A player of a WAV file; empty where there is none. A long sound stays in its file, ``href`` of the page."""
    address = embedded_sound(path, href)
    return f'<br><audio controls preload="none" src="{escape(address)}"></audio><br>' if address else ""


def sample_source(output_dir: Path, step: int, row: JsonObject) -> str:
    """The source image of a sample; empty where it has none."""
    if "source" not in row:
        return ""
    picture = _render_picture(output_dir, step, row["source"], f"source: {row.get('prompt', '')}")
    return f'<div class="source">{picture}<small>source</small></div>'
