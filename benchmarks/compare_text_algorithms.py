"""The RL algorithms for language models side by side: one model, several seeds, one page as result.

    python benchmarks/compare_text_algorithms.py [--only grpo dapo ...] [--seeds 1 2 3] [--jobs 2] [--only-page]

Runs ``configs/quickstart/text_rl.yaml`` with every recipe of ``sfumato/config/text_recipes.py`` and every seed by the
command that it prints, then writes ``docs/text_rl/compared.md`` with a picture of the curves. Finished runs are kept,
and interrupted ones go on where they stopped: start it again. A run whose settings have changed is made anew.
``--only-page`` writes the page from what is there. The model that all start from is made first when it is missing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from seed_curves import draw_seed_curves

from sfumato.config.load import load_config, parse_overrides
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.writing import write_atomically
from sfumato.errors import UserError
from sfumato.tracking.json_lines import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart/text_rl.yaml"
PAGE = ROOT / "docs" / "text_rl" / "compared.md"
PICTURE = ROOT / "docs" / "images" / "text_rl_compared.svg"
RUNS = "runs/compare_text"
GREEDY, SAMPLED = "eval/reward/total", "reward/total"
OUTSIDE = ("ratio/clipped_low", "ratio/clipped_high")
AVERAGED = 3
"""Iterations at the beginning and at the end over which the sampled accuracy is averaged."""

SHARED = ["--train.max_steps", "150", "--train.save_steps", "50", "--eval.every_steps", "25"]
"""What all runs change in the file."""
STEPS = {True: ["--train.global_batch_size", "32", "--train.lr", "5e-4"], False: ["--train.lr", "1e-3"]}
"""Of recipes with a ratio, which take four optimiser steps an iteration, and of those without, which take one."""
TEACHER = f"{RUNS}/teacher"
OWN: dict[str, list[str]] = {
    "reinforce_pp": ["--algorithm.kl.coef", "0.001"],
    "ppo": ["--algorithm.kl.coef", "0.001", "--critic.lr", "0.003"],
    "distillation": ["--algorithm.kl.coef", "1.0", "--algorithm.teacher", f"{TEACHER}/hf_ckpt"],
}
"""What the runs of a recipe change besides, because the quickstart's settings do not suit it."""
TEACHER_STEPS = 400
"""Steps of fine-tuning of the teacher, in the place of the few of the model that all start from."""


@dataclass(frozen=True)
class TextRun:
    """One recipe with one seed."""

    recipe: str
    seed: int

    @property
    def folder(self) -> Path:
        """The run folder."""
        return ROOT / RUNS / f"{self.recipe}_{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What is laid over the file."""
        named = ["--algorithm.recipe", self.recipe, "--train.seed", str(self.seed)]
        named += ["--train.output_dir", f"{RUNS}/{self.folder.name}"]
        has_ratio = TEXT_RECIPES[self.recipe]["objective"]["type"] != "policy_gradient"
        return [*named, *SHARED, *STEPS[has_ratio], *OWN.get(self.recipe, [])]

    @cached_property
    def config(self) -> TextRLConfig:
        """The validated settings."""
        return load_config(TextRLConfig, ROOT / CONFIG, parse_overrides(self.overrides))

    @property
    def is_same_run(self) -> bool:
        """Whether what stands in the run folder was made with these settings."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return False
        where_to = {"train": {"output_dir", "load_checkpoint_path", "trackers"}}
        config = load_config(TextRLConfig, path)
        return config.model_dump(exclude=where_to) == self.config.model_dump(exclude=where_to)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """A metric by iteration, so far."""
        path = self.folder / "metrics.jsonl"
        lines = read_jsonl(path) if self.is_same_run and path.is_file() else []
        return [(line["step"], line[metric]) for line in lines if metric in line]

    @property
    def is_finished(self) -> bool:
        """Whether the last evaluation is there."""
        curve = self.curve(GREEDY)
        return bool(curve) and curve[-1][0] == self.config.train.max_steps

    @property
    def greedy(self) -> tuple[float, float]:
        """Accuracy of greedy answers to held-out problems, before and after."""
        curve = self.curve(GREEDY)
        return curve[0][1], curve[-1][1]

    @property
    def sampled(self) -> tuple[float, float]:
        """Accuracy of the answers that were drawn to learn from, at the beginning and at the end."""
        values = [value for _, value in self.curve(SAMPLED)]
        return statistics.mean(values[:AVERAGED]), statistics.mean(values[-AVERAGED:])

    @property
    def outside(self) -> float | None:
        """Share of tokens whose ratio was outside of the recipe's bounds, mean over the iterations; None without."""
        results = [value for side in OUTSIDE for _, value in self.curve(side)]
        return sum(results) / self.config.train.max_steps if results else None


def make_models(with_teacher: bool) -> None:
    """The model that all runs start from, and the teacher of distillation. Raises UserError when making one fails."""
    model = load_config(TextRLConfig, ROOT / CONFIG).model
    command = ["bash", "train.sh", "tasks/train_text.py", str(model.made_by), "--train.load_checkpoint_path", "auto"]
    if not (ROOT / str(model.model_path)).exists():
        _start(command)
    if with_teacher and not (ROOT / TEACHER / "hf_ckpt").exists():
        longer = ["--train.max_steps", str(TEACHER_STEPS), "--data.synthetic.num_rows", str(TEACHER_STEPS * 32)]
        _start([*command, *longer, "--train.output_dir", TEACHER])


def run(runs: Sequence[TextRun], jobs: int) -> None:
    """Runs what is not finished, so many at a time. Raises UserError when one fails or was stopped."""

    def one(text_run: TextRun) -> None:
        if not text_run.is_finished:
            command = ["bash", "train.sh", "tasks/rl_text.py", CONFIG, *text_run.overrides]
            _start([*command, "--train.load_checkpoint_path", "auto" if text_run.is_same_run else "new"])
        print(f"{text_run.folder.name}: finished", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, run) for run in runs]:
            future.result()


def _start(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} stopped with exit code {done.returncode}:\n{done.stderr[-2000:]}")


def draw(by_recipe: dict[str, list[TextRun]], path: Path) -> None:
    """Held-out accuracy over iterations: mean and range over the seeds, a panel for each recipe."""
    curves_of = {recipe: [run.curve(GREEDY) for run in runs] for recipe, runs in by_recipe.items()}
    draw_seed_curves(curves_of, path, ("iterations", "greedy accuracy, held out"), 2.0, (0, 1))


def page(by_recipe: dict[str, list[TextRun]], missing: Iterable[str], picture: str) -> str:
    """The page as Markdown.

    Args:
        by_recipe: finished runs.
        missing: recipes without.
        picture: address of the picture, relative to the page.
    """
    first = next(iter(by_recipe.values()))[0].config
    seeds = sorted({run.seed for runs in by_recipe.values() for run in runs})
    rollout, problems = first.rollout, first.data.synthetic
    introduction = f"""Each recipe improves the model of the [quickstart](README.md), which fine-tuning left unfinished:
{first.train.max_steps} iterations of {rollout.num_prompts} problems x {rollout.n} answers, `{problems.problem}` with
{problems.min_length} to {problems.max_length} letters, and the reward is 1 for a correct answer, else 0. All start from
the same weights; the {len(seeds)} seeds ({", ".join(map(str, seeds))}) choose problems, noise and the
{first.eval.num_prompts} held-out problems. No held-out problem is trained on, by pretraining or by RL. Learning rates
were tried out, but not searched: **this says that each recipe works here, not which is best elsewhere.**"""
    legend = f"""*Greedy*: accuracy of the likeliest answer to held-out problems, mean over the seeds and in brackets
the lowest and the highest. *Rose*: seeds with which it rose. *Sampled*: accuracy of the answers that were drawn to
learn from, mean over the first and the last {AVERAGED} iterations and the seeds. Standard error of a single greedy
accuracy: at most {0.5 / first.eval.num_prompts**0.5:.2f}. The teacher of `distillation` is the same model after
{TEACHER_STEPS} steps of fine-tuning. *Steps*: optimiser steps in which an iteration's answers are learned from; with
more than one, ratios leave 1 from the second on, and what a recipe does with them counts. `rloo` and `distillation`
have no ratio and take one ([why](rloo.md#curve)). *Outside*: share of tokens whose ratio, of `gspo` their answer's, was
outside of the recipe's bounds, mean over iterations and seeds; `none` where it has none."""
    names = ", ".join(f"`{name}`" for name in missing)
    return f"""# The algorithms compared

Made by `python benchmarks/compare_text_algorithms.py`: do not edit it by hand.

{_filled(introduction)}

![Held-out accuracy over iterations]({picture})

*Mean and range over the seeds.*

{_filled(legend)}

{_results(by_recipe)}
{f"{chr(10)}Not run: {names}.{chr(10)}" if names else ""}"""


def _results(by_recipe: dict[str, list[TextRun]]) -> str:
    rows = []
    for recipe, runs in sorted(by_recipe.items(), key=lambda item: -statistics.mean(r.greedy[1] for r in item[1])):
        before, after = ([run.greedy[which] for run in runs] for which in (0, 1))
        drawn = [statistics.mean(run.sampled[which] for run in runs) for which in (0, 1)]
        outside = [run.outside for run in runs if run.outside is not None]
        rose = sum(run.greedy[1] > run.greedy[0] for run in runs)
        rows.append(
            [
                f"`{recipe}`",
                f"{runs[0].config.num_updates // runs[0].config.train.max_steps}",
                f"{runs[0].config.train.lr:g}",
                f"{runs[0].config.algorithm.kl.coef:g}",
                _ranged(before),
                f"**{_ranged(after)}**",
                f"{rose} of {len(runs)}",
                f"{drawn[0]:.2f}",
                f"{drawn[1]:.2f}",
                f"{statistics.mean(outside):.3f}" if outside else "none",
            ]
        )
    columns = [
        "recipe",
        "steps",
        "lr",
        "kl.coef",
        "greedy before",
        "greedy after",
        "rose",
        "sampled first",
        "last",
        "outside",
    ]
    return _table(columns, rows)


def _ranged(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(TEXT_RECIPES)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="run these only, write no page")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of each recipe")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--only-page", action="store_true", help="run nothing; write the page from finished runs")
    arguments = parser.parse_args()
    if not arguments.only_page:
        make_models("distillation" in (arguments.only or names))
        run([TextRun(name, seed) for seed in arguments.seeds for name in arguments.only or names], arguments.jobs)
        if arguments.only:
            return
    of_seeds = {name: [TextRun(name, seed) for seed in arguments.seeds] for name in names}
    finished = {name: runs for name, runs in of_seeds.items() if all(run.is_finished for run in runs)}
    if not finished:
        raise UserError("no recipe has finished with all seeds yet: start without --only-page")
    draw(finished, PICTURE)
    unfinished = [name for name in names if name not in finished]
    write_atomically(PAGE, page(finished, unfinished, f"../images/{PICTURE.name}").encode())
    print(f"{len(finished)} of {len(names)} recipes: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
