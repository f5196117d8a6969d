"""Every recipe of RL on every tiny model family: an iteration of the real task each, as a table.

``python -m tests.survey.recipes`` prints it, with names that of these families alone; those whose packages are not
installed are left out. The slow cells of ``tests/unit/test_recipes.py`` look closer and take several times as long;
sounds are here alone.

A cell trains if the iteration's numbers are finite, a gradient other than zero reached the weights, and what was
replayed agrees with what was drawn. It is refused where a ConfigError says so.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from sfumato.config.load import merge
from sfumato.config.recipes import DIFFUSION_RECIPES
from sfumato.config.sections import ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.flops import DenoiserFlops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.tracking.json_lines import read_jsonl
from tests import family_rows, sound_rows
from tests.family_rows import Row, wake
from tests.sound_rows import SECONDS, SoundRow
from tests.tiny import rl_task, run_task_here, tiny_rl_config
from tests.unit.test_recipes import several_sources, steps_of

ROWS: dict[str, Row | SoundRow] = {**family_rows.ROWS, **sound_rows.ROWS}
TRAINS, REFUSED, FAILED = "trains", "refused", "FAILED"
REPLAY_TOLERANCE = 1e-6


def build_folder(name: str, folder: Path) -> Any:
    """Saves a family's tiny pipeline below a folder and returns it."""
    row = ROWS[name]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
    model = build_diffusion_model(
        ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=row.tokens, from_images=row.from_images)
    )
    wake(model)
    model.save_pipeline(folder / "pipeline")
    return model.pipeline


def config_of(name: str, recipe: str, pipeline: Any, folder: Path) -> dict[str, Any]:
    """One iteration with one update of a family whose pipeline is in a folder."""
    row = ROWS[name]
    rollout: dict[str, Any] = {"num_prompts": 2, "micro_batch_size": 4}
    rollout |= {"num_inference_steps": steps_of(recipe, pipeline)}
    lora = {"rank": 4, "alpha": 8} if getattr(row, "takes_lora", True) else None
    config = tiny_rl_config(
        folder,
        model={"lora": lora, "max_sequence_length": row.tokens, "from_images": row.from_images},
        rollout=rollout,
        algorithm={"recipe": recipe},
        train={"max_steps": 1, "global_batch_size": None},
        eval={"every_steps": 2, "num_prompts": 1, "num_inference_steps": 1},
    )
    config["algorithm"] = {"recipe": recipe}
    if isinstance(row, SoundRow):
        del config["rollout"]["height"], config["rollout"]["width"]
        prompts = folder / "prompts.txt"
        prompts.write_text("a low tone\na high tone\n", encoding="utf-8")
        config["data"] = dict.fromkeys(("train_path", "eval_path"), str(prompts))
        return merge(config, {"rollout": {"seconds": SECONDS}, "reward": {"rewards": [{"type": "loudness"}]}})
    height, width = row.size
    if row.sources > 1:
        config["data"] = several_sources(row, folder)
    return merge(config, {"rollout": {"height": height, "width": width, "num_frames": row.num_frames}})


def fault_of(line: dict[str, float]) -> str:
    """What is wrong with an iteration's metrics, or an empty text."""
    if infinite := [key for key, value in line.items() if not math.isfinite(value)]:
        return f"not finite: {', '.join(infinite)}"
    if line["updates"] != 1 or line["rows"] <= 0 or line["grad_norm"] <= 0:
        return f"updates {line['updates']}, rows {line['rows']}, grad_norm {line['grad_norm']}"
    if line.get("ratio/replay_error", 0) > REPLAY_TOLERANCE:
        return f"ratio/replay_error {line['ratio/replay_error']}"
    return ""


def run_cell(name: str, recipe: str, pipeline: Any, folder: Path) -> tuple[str, str]:
    """The outcome of a cell, and the reason of all but TRAINS."""
    try:
        run = run_task_here(rl_task(recipe), config_of(name, recipe, pipeline, folder))
    except ConfigError as error:
        return REFUSED, str(error)
    except Exception:  # the survey goes on with other cells and prints this one's
        return FAILED, traceback.format_exc()
    (_, line) = read_jsonl(run / "metrics.jsonl")
    fault = fault_of(line)
    return (FAILED, fault) if fault else (TRAINS, "")


def survey(name: str, recipes: Iterable[str], say: Callable[[str], None]) -> dict[str, tuple[str, str]]:
    """The outcomes of a family, by recipe."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pipeline = build_folder(name, folder)
        for recipe in recipes:
            start = time.monotonic()
            outcome, reason = outcomes[recipe] = run_cell(name, recipe, pipeline, folder)
            say(f"{name} {recipe}: {outcome}, {time.monotonic() - start:.1f} s{reason and f': {reason}'}")
            shutil.rmtree(folder / "run", ignore_errors=True)
    return outcomes


def main() -> None:
    """Prints a line for each cell, with the reason where it does not train, then a table of families."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="names of rows; without them all that can run here")
    parser.add_argument("--recipes", nargs="*", default=[*DIFFUSION_RECIPES])
    arguments = parser.parse_args()
    names = arguments.families or [*ROWS]
    for name in [name for name in names if ROWS[name].needs and not find_spec(ROWS[name].needs)]:
        print(f"{name} is left out: it needs {ROWS[name].needs}", flush=True)
        names.remove(name)
    counted = DenoiserFlops(forward=1, training=3)  # rates of operations are not looked at
    with mock.patch("tests.tiny.flops_counted_once", return_value=counted):
        outcomes = {name: survey(name, arguments.recipes, lambda line: print(line, flush=True)) for name in names}
    print(f"\n| family | {TRAINS} | {REFUSED} | {FAILED} |\n|---|---|---|---|")
    for name, cells in outcomes.items():
        counts = [sum(outcome == kind for outcome, _ in cells.values()) for kind in (TRAINS, REFUSED, FAILED)]
        print(f"| {name} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
