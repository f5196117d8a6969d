"""Predicts device memory, CPU memory and disk of every configuration that is for GPUs, as ``sfumato check`` does.

    python -m benchmarks.memory_of_configs [CONFIG ...] [--write]

Nothing is downloaded. Models are built without weights: language models from the descriptions beside their
configurations, diffusion models from ``published_pipelines.yaml``. With ``--write`` the table goes into
``docs/device_memory.md``; of configurations that are not named the page keeps its lines.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from sfumato.commands.check_config import Findings, check_config
from sfumato.commands.check_model import needed_bytes
from sfumato.errors import ConfigError
from sfumato.models.diffusion.scratch import build_clip_tokenizer, build_qwen_tokenizer, build_t5_tokenizer
from sfumato.models.diffusion.scratch_encoders import (
    build_byt5_tokenizer,
    build_gemma_tokenizer,
    build_qwen3_vl_processor,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "device_memory.md"
START, END = "<!-- configurations by python -m benchmarks.memory_of_configs -->", "<!-- end of the generated table -->"
GIB = 2**30
ENOUGH_GIB = 100_000.0
"""Memory with which every configuration fits, so that no other settings are tried."""
DEVICES = re.compile(r"(\d+|one) GPUs? of (\d+) GB")
PUBLISHED = re.compile(r"(\d+) GPUs")
UNREADABLE = {"Qwen-Image-Edit": "not predicted: its processor needs torchvision"}
"""Pipelines that cannot be built where this page is made."""
if find_spec("torchvision") is None:
    UNREADABLE["Qwen-Image-2.1"] = UNREADABLE["Qwen-Image-Edit"]
TOKENIZERS = {"CLIPTokenizer": build_clip_tokenizer, "T5Tokenizer": build_t5_tokenizer}
TOKENIZERS |= {"Qwen2Tokenizer": build_qwen_tokenizer, "GemmaTokenizer": build_gemma_tokenizer}
TOKENIZERS |= {"ByT5Tokenizer": build_byt5_tokenizer}
TOKENIZERS |= {"Qwen3VLProcessor": lambda: build_qwen3_vl_processor({"tokenizer": build_qwen_tokenizer()})}


@dataclass(frozen=True)
class Line:
    """A configuration's line in the table."""

    config: str
    devices: str
    device_gib: int
    cells: tuple[str, ...]
    """Device memory, bold where it does not fit, CPU memory of a machine, and disk."""

    def row(self) -> str:
        """The row of Markdown."""
        return f"| `{self.config}` | {self.devices} | {' | '.join(self.cells)} |"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, help="configurations (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.configs] or gpu_configs()
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            line = line_of(path, Path(folder))
            print(line.row(), flush=True)
            if options.write:
                PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), line), encoding="utf-8")


def gpu_configs() -> list[Path]:
    """Configurations that are for GPUs: they say so, or their model is a published pipeline."""
    paths = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "models" not in path.parts]
    return [path for path in paths if DEVICES.search(path.read_text(encoding="utf-8")) or pipeline_of(path)]


def pipeline_of(path: Path) -> str | None:
    """Name of the published pipeline of a configuration."""
    model = yaml.safe_load(path.read_text(encoding="utf-8")).get("model") or {}
    name = str(model.get("model_path"))
    return name if name in described_pipelines() or name in UNREADABLE else None


def described_pipelines() -> dict[str, Any]:
    """The content of ``published_pipelines.yaml``."""
    return yaml.safe_load(Path(__file__).with_name("published_pipelines.yaml").read_text(encoding="utf-8"))


def line_of(path: Path, folder: Path) -> Line:
    """Checks a configuration at its devices, and where it states none, at those of the publication, of 80 GB."""
    text = path.read_text(encoding="utf-8")
    stated, published = DEVICES.search(text), PUBLISHED.search(text)
    count, device_gib = (1 if stated[1] == "one" else int(stated[1]), int(stated[2])) if stated else (8, 80)
    counts = [count] if stated else [*([int(published[1]), 16] if published else []), 8, 4, 2, 1]
    pipeline = pipeline_of(path)
    if pipeline in UNREADABLE:
        return Line(
            str(path.relative_to(ROOT / "configs")),
            f"{count} x {device_gib}",
            device_gib,
            (UNREADABLE[pipeline], "", ""),
        )
    if pipeline is not None:
        overrides = {"model": {"model_path": str(write_pipeline(pipeline, folder))}}
    else:
        overrides = {"model": {"model_path": None, "config_path": str(description_of(path)), "tokenizer_path": "bytes"}}
    for ranks in counts:  # the most, up to that number, that the sizes of the configuration allow
        if ranks > counts[0]:
            continue
        try:
            result = check_config(path, overrides, num_ranks=ranks, device_gib=ENOUGH_GIB, with_data=False)
            break
        except ConfigError:
            if stated or ranks == 1:
                raise
    name = str(path.relative_to(ROOT / "configs"))
    devices = f"{result.layout.size} of {count}" if stated and result.layout.size != count else str(result.layout.size)
    devices = f"{devices} x {device_gib}"
    return Line(name, devices, device_gib, cells_of(result, device_gib))


def cells_of(findings: Findings, device_gib: int) -> tuple[str, ...]:
    """The cells of a line."""
    if findings.model is None or findings.host is None:
        return (findings.problems[0] if findings.problems else findings.notes[-1], "", "")
    device = needed_bytes(findings.model.largest, on_gpu=True) / GIB
    disk = sum(findings.host.disk.values()) / GIB
    return (
        f"{device:.1f}" if device <= device_gib else f"**{device:.1f}**",
        f"{findings.host.needed_bytes / GIB:,.0f}",
        f"{disk:,.1f}" if disk < 10 else f"{disk:,.0f}",
    )


def description_of(path: Path) -> Path:
    """The description of a language model for a configuration, whose name begins with that of the description."""
    descriptions = [
        *(ROOT / "configs" / "text" / "models").glob("*"),
        *(ROOT / "configs" / "vision" / "models").glob("*"),
    ]
    return max(
        (description for description in descriptions if path.stem.startswith(description.stem)),
        key=lambda description: len(description.stem),
    )


def write_pipeline(name: str, root: Path) -> Path:
    """Writes the folder of a published pipeline without weights, and returns it."""
    folder = root / name
    described = described_pipelines()
    index: dict[str, Any] = {}
    for part, content in described[name].items():
        if not isinstance(content, list):
            index[part] = content
            continue
        library, class_name, *rest = content
        index[part] = [library, class_name]
        place = folder / part
        place.mkdir(parents=True, exist_ok=True)
        if class_name in TOKENIZERS:
            TOKENIZERS[class_name]().save_pretrained(place)
            continue
        settings = described["components"][rest[0][1:]] if isinstance(rest[0], str) else rest[0]
        title = {"architectures": [class_name]} if library == "transformers" else {"_class_name": class_name}
        file = f"{part}_config.json" if part in ("scheduler", "guider") else "config.json"
        (place / file).write_text(json.dumps({**title, **settings}), encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def filled(page: str, line: Line) -> str:
    """The page with the row of a line in its table, in the place of that of the same configuration."""
    before, start, rest = page.partition(START)
    content, _, after = rest.partition(END)
    head, rows = content.strip().split("\n")[:2], content.strip().split("\n")[2:]
    name = line.row().split("|")[1]
    rows = sorted([*(other for other in rows if other.split("|")[1] != name), line.row()])
    return "\n".join([f"{before}{start}", *head, *rows, f"{END}{after}"])


if __name__ == "__main__":
    sys.exit(main())
