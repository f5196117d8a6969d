"""The examples of RL of language models: runs what is not finished, draws their curves, prints their figures.

    python benchmarks/text_rl_examples.py [--only calculator agent ...] [--seeds 42 43 44] [--only-picture]

Runs the configuration of each example by the command that it prints, with their environments on the path, and draws
``docs/images/text_rl_examples.svg``, and ``docs/images/smollm2_rl.svg`` of the published model. Examples whose packages
are missing end with their message. The figures are those of ``docs/text_rl/examples.md``. Runs of a seed start from one
model, and differ in prompts' order and in what is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seed_curves import save_figure

from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import UserError
from sfumato.tracking.json_lines import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "images"
HELD_OUT, DRAWN = "eval/reward/total", "reward/total"
TITLES = {
    "calculator": "calls of a calculator",
    "agent": "an agent for openai",
    "spell_backward": "reasoning-gym",
    "verifiers": "an environment of verifiers",
    "smollm2_rl": "SmolLM2-135M-Instruct",
}
"""Examples, and what stands above their curves."""
PUBLISHED = ("smollm2_rl",)
"""Examples of published models, among the quickstart's configurations; they have a picture of their own."""


@dataclass(frozen=True)
class Example:
    """The run of one configuration with a seed."""

    name: str
    seed: int

    @property
    def file(self) -> str:
        """The configuration, from the root of the repository."""
        return f"configs/{'quickstart' if self.name in PUBLISHED else 'text_rl'}/{self.name}.yaml"

    @property
    def config(self) -> TextRLConfig:
        """The validated settings."""
        return load_config(TextRLConfig, ROOT / self.file)

    @property
    def folder(self) -> Path:
        """The run folder, which is the configuration's own for its own seed."""
        train = self.config.train
        return ROOT / (train.output_dir if self.seed == train.seed else f"{train.output_dir}_seed_{self.seed}")

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """A metric by iteration, so far."""
        path = self.folder / "metrics.jsonl"
        return [
            (entry["step"], entry[metric]) for entry in (read_jsonl(path) if path.is_file() else []) if metric in entry
        ]

    @property
    def is_finished(self) -> bool:
        """Whether the last evaluation is there."""
        curve = self.curve(HELD_OUT)
        return bool(curve) and curve[-1][0] == self.config.train.max_steps

    def run(self) -> None:
        """Goes on to the end. Raises UserError when it stops before."""
        command = ["bash", "train.sh", "tasks/rl_text.py", self.file, "--train.load_checkpoint_path", "auto"]
        command += ["--train.seed", str(self.seed), "--train.output_dir", str(self.folder.relative_to(ROOT))]
        print(" ".join(command), flush=True)
        path = os.pathsep.join(["docs/examples", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
        if done.returncode != 0:
            raise UserError(f"{' '.join(command)} stopped with exit code {done.returncode}")

    def figures(self) -> dict[str, Any]:
        """What the page says of it; seconds are of all iterations, evaluation included."""
        held_out, drawn = self.curve(HELD_OUT), self.curve(DRAWN)
        timings = read_jsonl(self.folder / "timings.jsonl")
        return {
            "example": self.name,
            "seed": self.seed,
            "iterations": f"{held_out[-1][0]} of {self.config.train.max_steps}",
            "held out": [held_out[0][1], held_out[-1][1]],
            "drawn": [drawn[0][1], drawn[-1][1]],
            "seconds": round(sum(line.get("time/step_s", 0.0) for line in timings)),
        }


def draw(examples: list[Example], path: Path) -> None:
    """Rewards over iterations, a panel for each configuration and a line for each seed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(example.name for example in examples))
    style = {"svg.fonttype": "none", "svg.hashsalt": "sfumato", "font.size": 9, "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            1, len(names), figsize=(2.6 * len(names), 2.3), sharey=True, layout="constrained", squeeze=False
        )
        for panel, name in zip(panels[0], names, strict=True):
            for number, example in enumerate(example for example in examples if example.name == name):
                labels = ("drawn", "held out") if number == 0 else (None, None)
                panel.plot(*zip(*example.curve(DRAWN), strict=True), "C0", alpha=0.3, label=labels[0])
                panel.plot(*zip(*example.curve(HELD_OUT), strict=True), "C1o-", markersize=3, label=labels[1])
            panel.set_title(TITLES[name])
            panel.set_ylim(0, 1.02)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][0].legend(loc="lower right", frameon=False)
        figure.supxlabel("iterations")
        figure.supylabel("mean reward")
        save_figure(figure, path)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TITLES), metavar="NAME", help="run these only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44], metavar="SEED", help="42, 43 and 44")
    parser.add_argument("--only-picture", action="store_true", help="run nothing; draw what is there")
    arguments = parser.parse_args()
    examples = [Example(name, seed) for name in TITLES for seed in arguments.seeds]
    if not arguments.only_picture:
        for example in examples:
            if example.name in (arguments.only or TITLES) and not example.is_finished:
                example.run()
    begun = [example for example in examples if len(example.curve(HELD_OUT)) > 1]
    if not begun:
        raise UserError("no example has run yet: start without --only-picture")
    for picture, is_published in {"text_rl_examples.svg": False, "smollm2_rl.svg": True}.items():
        if shown := [example for example in begun if (example.name in PUBLISHED) == is_published]:
            draw(shown, PICTURES / picture)
    for example in begun:
        print(json.dumps(example.figures()))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
