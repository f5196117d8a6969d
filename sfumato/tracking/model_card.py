"""A model card from what a run folder holds: README.md of an export, as hubs of models read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from sfumato.config.hub import SNAPSHOT
from sfumato.config.paths import ADAPTER_FILES, HUB_NAME
from sfumato.config.writing import replace_file, write_atomically
from sfumato.config.yaml_text import read_yaml
from sfumato.tracking.atomic_folders import read_mapping
from sfumato.tracking.json_lines import Series, finite_points, read_jsonl, series_of

CARD = "README.md"
CURVES = "curves.png"
MOST_CURVES = 6
TAGS = {"rl": "reinforcement-learning", "train": "fine-tuned"}


def write_card(run: Path, export: Path, with_curves: bool = True) -> None:
    """Writes the card, and a picture of curves, into an export.

    Args:
        run: the run folder: its configuration, environment and metrics are read.
        export: the folder with the weights; a card that is there is replaced.
        with_curves: draw the picture, which takes about a second.

    Raises:
        ConfigError: when the run's configuration cannot be read.
    """
    config = read_yaml(run / "config.yaml")
    environment = read_mapping(run / "environment.json")
    metrics_file = run / "metrics.jsonl"
    metrics = series_of(read_jsonl(metrics_file)) if metrics_file.is_file() else {}
    task = str(environment.get("task", "sfumato"))
    front, base = _front_matter(config, export, task)
    parts = [f"---\n{yaml.safe_dump(front, sort_keys=False).rstrip()}\n---", f"# {run.absolute().name}"]
    parts.append(f"Trained with sfumato's task `{task}`{f' from {base}' if base else ''}.")
    if table := _before_and_after(metrics):
        parts.append(f"## Evaluation\n\n{table}")
    if with_curves and draw_curves(metrics, export / CURVES):
        parts.append(f"## Curves\n\n![Metrics over steps]({CURVES})")
    if data := config.get("data"):
        parts.append(f"## Data\n\n```yaml\n{_render_yaml(data)}\n```")
    rest = {name: value for name, value in config.items() if name not in ("data", "runtime")}
    parts.append(f"## Recipe\n\n```yaml\n{_render_yaml(rest)}\n```")
    packages = environment.get("packages")
    if isinstance(packages, dict):
        versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version != "not installed")
        parts.append(f"## Versions\n\n{versions}")
    write_atomically(export / CARD, ("\n\n".join(parts) + "\n").encode())


def _front_matter(config: Mapping[str, object], export: Path, task: str) -> tuple[dict[str, object], str]:
    """The card's fields, and the base model as the text names it: on the hub with its revision, or nothing."""
    section = config.get("model")
    path = section.get("model_path") if isinstance(section, dict) else None
    is_adapter = any((export / name).is_file() for name in ADAPTER_FILES)
    is_diffusion = any((export / name).is_file() for name in ("model_index.json", ADAPTER_FILES[1]))
    library = "diffusers" if is_diffusion else "peft" if is_adapter else "transformers"
    front: dict[str, object] = {"library_name": library}
    tags = ["sfumato", TAGS.get(task.partition("_")[0], "trained"), *(["lora"] if is_adapter else [])]
    name, revision = "", ""
    if isinstance(path, str):
        if snapshot := SNAPSHOT.search(path):
            name, revision = f"{snapshot['owner']}/{snapshot['name']}", snapshot["revision"]
        elif HUB_NAME.fullmatch(path) and not Path(path).exists():
            name = path
        inherited = _front_matter_of(Path(path) / CARD)
        name = name or str(inherited.get("base_model") or "")
        front |= {key: inherited[key] for key in ("license", "license_name", "license_link") if key in inherited}
    if name:
        front["base_model"] = name
        if is_adapter:
            front["base_model_relation"] = "adapter"
    front["tags"] = tags
    return front, f"{name}{f' at revision {revision}' if revision else ''}"


def _front_matter_of(card: Path) -> dict[str, object]:
    """The fields of another card; empty where there is none, or none that can be read."""
    if not card.is_file():
        return {}
    match = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        fields = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _render_yaml(value: object) -> str:
    """A part of the configuration, without paths of the machine that it ran on."""
    return yaml.safe_dump(_without_folders(value), sort_keys=False, allow_unicode=True).rstrip()


def _without_folders(value: object) -> object:
    """A value whose absolute paths, at any depth, are names alone; several may stand in a text with commas between."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return re.sub(r"(^|,\s*)~?/(?:[^/,]+/)+(?=[^/,])", r"\1", value) if isinstance(value, str) else value


def _before_and_after(metrics: Series) -> str:
    """The first and the last value of each evaluation's metric, as a table; empty without evaluations."""
    rows = []
    for name, points in metrics.items():
        values = list(finite_points(points).items())
        if name.startswith("eval/") and len(values) > 1:
            (first_step, first), (last_step, last) = values[0], values[-1]
            rows.append(f"| `{name.removeprefix('eval/')}` | {first:.4g} | {last:.4g} | {first_step} to {last_step} |")
    head = "| metric | before | after | steps |\n|---|---|---|---|\n"
    return head + "\n".join(rows) if rows else ""


def draw_curves(metrics: Series, path: Path) -> bool:
    """Draws evaluations, rewards and losses over steps; returns whether there was one with two points."""
    shown = [
        (name, finite_points(points))
        for name, points in metrics.items()
        if re.match(r"eval/|reward(/|$)|loss$", name) and len(finite_points(points)) > 1
    ][:MOST_CURVES]
    if not shown:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, values) in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.plot(list(values), list(values.values()), linewidth=1.4)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    with replace_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
    return True
