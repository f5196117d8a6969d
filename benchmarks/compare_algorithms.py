"""The RL algorithms side by side: the same pretrained model, prompts, seeds and number of images, one page as result.

    python benchmarks/compare_algorithms.py [--only awm flow_dpo ...] [--only-page] [--without-second-reader]
    python benchmarks/compare_algorithms.py --seeds 1 2 3 [--iterations 8] [--only awm ...] [--only-page]
    python benchmarks/glyph_clip.py runs/quickstart/clip
    python benchmarks/compare_algorithms.py --direct --seeds 1 2 3 [--iterations 12] [--only-page]

Runs every file of ``configs/quickstart/algorithms`` by the command that it prints, one after another, then reads the
evaluation images a second time with Tesseract, which no run was trained on, measures what rollout and update cost, and
writes ``docs/algorithms_compared.md`` with a picture of the curves. Finished runs are kept, and interrupted ones go on
where they stopped: start it again. A file whose settings have changed is run anew. ``--only-page`` writes the page from
what is there. The model that all start from comes from the first two steps of ``make quickstart``.

``--seeds`` runs each file with several seeds and fewer iterations, and writes ``docs/algorithms_over_seeds.md``, of the
algorithms that have finished with all of them, in place of the page above.

``--direct`` does so with the files of ``configs/quickstart/direct``, which follow the gradient of a reward, a tiny CLIP
model, while OCR only watches. It draws both, and prints the figures of their pages.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from seed_curves import draw_seed_curves, save_figure

from sfumato.commands.find_task import load_for_task, schema_of
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.load import load_config, parse_overrides
from sfumato.config.writing import write_atomically
from sfumato.errors import ConfigError, UserError
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples, step_folder

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs" / "quickstart" / "algorithms"
PAGE = ROOT / "docs" / "algorithms_compared.md"
PICTURE = ROOT / "docs" / "images" / "algorithms_compared.svg"
SEEDS_PAGE = ROOT / "docs" / "algorithms_over_seeds.md"
SEEDS_PICTURE = ROOT / "docs" / "images" / "algorithms_over_seeds.svg"
DIRECT_CONFIGS = ROOT / "configs" / "quickstart" / "direct"
DIRECT_PICTURE = ROOT / "docs" / "images" / "direct_over_seeds.svg"
DIRECT_ITERATIONS = 12
WATCHED = "eval/reward/ocr"
SEEDS_RUNS = "runs/quickstart/algorithms_over_seeds"
SEEDS_EVALUATIONS = 4
"""Evaluations of a run of ``--seeds`` after the one before training."""
SEEDS_ITERATIONS = 8
SEEDS_PROMPTS = 128
"""Held-out words of such an evaluation."""
YARDSTICK = "flow_grpo_fast"
"""The costs of the others are given as multiples of this one's."""
REWARD = "eval/reward/total"
KINDS = {"rl_diffusion": "trajectories", "rl_diffusion_forward": "final samples"}
"""What the runs of a task learn from."""
HEADING = re.compile(r"# (?P<title>.+?) \((?P<source>.+?)\): .+")


@dataclass(frozen=True)
class Algorithm:
    """One file of ``configs/quickstart/algorithms``, what is laid over it, and the run folder that they name."""

    path: Path
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @cached_property
    def heading(self) -> re.Match[str]:
        """Title and source, from the comment that the file begins with."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        comment = lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))]
        result = HEADING.fullmatch(" ".join([*comment[:1], *(line.removeprefix("#").strip() for line in comment[1:])]))
        if result is None:
            raise ConfigError(f"{self.path}: begin the file with a comment '# TITLE (SOURCE): what it does'")
        return result

    @cached_property
    def task(self) -> str:
        """The task that runs it."""
        return load_for_task(self.path, {})[0]

    @cached_property
    def config(self) -> DiffusionRLConfig:
        """The validated settings."""
        return load_config(schema_of(self.task), self.path, parse_overrides(list(self.overrides)))

    def with_seed(self, seed: int, iterations: int) -> Algorithm:
        """The same with another seed and number of iterations, in a run folder of its own."""
        overrides = ["--train.seed", str(seed), "--train.max_steps", str(iterations)]
        overrides += ["--train.save_steps", "2", "--eval.every_steps", str(max(1, iterations // SEEDS_EVALUATIONS))]
        overrides += ["--eval.num_prompts", str(SEEDS_PROMPTS), "--eval.num_saved", "0"]
        overrides += ["--train.output_dir", f"{SEEDS_RUNS}/{self.name}_{seed}"]
        return Algorithm(self.path, tuple(overrides))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return ROOT / self.config.train.output_dir

    @property
    def images_per_step(self) -> int:
        """Images that an iteration samples and scores."""
        return self.config.rollout.num_prompts * self.config.rollout.n

    @property
    def is_same_run(self) -> bool:
        """Whether what stands in the run folder was made with these settings."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return False
        where_to = {"train": {"output_dir", "load_checkpoint_path", "trackers"}}
        config = load_config(schema_of(self.task), path)
        return config.model_dump(exclude=where_to) == self.config.model_dump(exclude=where_to)

    def curve(self, metric: str = REWARD) -> list[tuple[int, float]]:
        """Images seen and the mean of a reward on held-out prompts, at every evaluation so far."""
        path = self.folder / "metrics.jsonl"
        lines = read_jsonl(path) if self.is_same_run and path.is_file() else []
        return [(line["step"] * self.images_per_step, line[metric]) for line in lines if metric in line]

    @property
    def is_finished(self) -> bool:
        """Whether the last evaluation is there."""
        curve = self.curve()
        return bool(curve) and curve[-1][0] == self.config.train.max_steps * self.images_per_step


def check_comparable(algorithms: Sequence[Algorithm]) -> None:
    """Raises ConfigError where two files differ in what all must share."""

    def shared(config: DiffusionRLConfig) -> dict[str, Any]:
        result = config.model_dump(mode="json", include={"model", "data", "reward", "eval", "train", "rollout"})
        rollout, train = result.pop("rollout"), result.pop("train")
        compared = {"num_prompts", "n", "height", "width", "num_inference_steps", "guidance_scale"}
        result |= {f"rollout.{name}": rollout[name] for name in compared}
        return result | {f"train.{name}": train[name] for name in ("seed", "max_steps", "mixed_precision")}

    first = algorithms[0]
    for other in algorithms[1:]:
        mine, theirs = shared(first.config), shared(other.config)
        for name in mine:
            if mine[name] != theirs[name]:
                raise ConfigError(f"{other.path}: {name} differs from {first.path}, so they cannot be compared")


def run(algorithms: Sequence[Algorithm]) -> None:
    """Runs what is not finished. Raises UserError when a run fails or was stopped."""
    start = ROOT / (algorithms[0].config.model.model_path or "")
    if not (start / "model_index.json").is_file():
        raise UserError(
            f"{start} is not there: make it by the first two steps of the quickstart, "
            "`bash train.sh tasks/train_autoencoder.py configs/quickstart/autoencoder.yaml` and "
            "`bash train.sh tasks/train_dit.py configs/quickstart/pretrain.yaml`"
        )
    for number, algorithm in enumerate(algorithms, start=1):
        config = str(algorithm.path.relative_to(ROOT))
        if algorithm.is_finished:
            print(f"[{number}/{len(algorithms)}] {algorithm.folder.name}: finished", flush=True)
            continue
        command = ["bash", "train.sh", f"tasks/{algorithm.task}.py", config, *algorithm.overrides]
        command += ["--train.load_checkpoint_path", "auto" if algorithm.is_same_run else "new"]
        print(f"[{number}/{len(algorithms)}] {' '.join(command)}", flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code != 0:
            raise UserError(f"{config} stopped with exit code {code}; start again to go on with it")


def read_again(algorithms: Sequence[Algorithm]) -> None:
    """Reads first and last evaluation images with Tesseract, into ``second_reader.json`` of each run folder.

    All runs start from the same weights and latents, so the images before training are read once.
    """
    from sfumato.rewards.ocr import OcrReward

    reader = OcrReward(engine="tesseract", detect=False, evaluation_only=True, timeout_s=3600.0)
    reader.prepare()
    before = None
    for algorithm in algorithms:
        path = algorithm.folder / "second_reader.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        run_id = {"mtime": (algorithm.folder / "metrics.jsonl").stat().st_mtime, "curve": algorithm.curve()}
        if stored.get("run") == json.loads(json.dumps(run_id)):
            before = stored["before"]
            continue
        print(f"{algorithm.name}: reading again with Tesseract", flush=True)
        before = _mean_reading(reader, algorithm, step=0) if before is None else before
        after = _mean_reading(reader, algorithm, step=algorithm.config.train.max_steps)
        write_atomically(path, json.dumps({"run": run_id, "before": before, "after": after}).encode())


def _mean_reading(reader: Any, algorithm: Algorithm, step: int) -> float:
    import numpy as np
    from PIL import Image

    from sfumato.rewards.base import Sample

    rows = [row for row in read_samples(algorithm.folder)[step] if row["kind"] == "eval"]
    folder = step_folder(algorithm.folder, step)
    samples = [
        Sample(
            image=np.asarray(Image.open(folder / row["file"], formats=["PNG"])),
            prompt=row["prompt"],
            metadata={},
            group_id=0,
        )
        for row in rows
    ]
    return statistics.mean(reader.score(samples))


def measure_costs(algorithms: Sequence[Algorithm], repeats: int = 2) -> dict[str, dict[str, float]]:
    """CPU seconds per image of rollout and update, scoring left out: medians of whole iterations taken in turns.

    Rewards are drawn: of three letters, 0 to 3 are right. The first iteration of each is not counted.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    from sfumato.data.images.prompts import load_prompts
    from sfumato.data.prompt_loader import PromptLoader
    from sfumato.parallel.mesh import build_mesh
    from sfumato.rollout.batch import RankBatch
    from sfumato.rollout.diffusion.self_check import RowProbe
    from sfumato.tracking.run import Run, quiet_libraries
    from tasks import rl_diffusion, rl_diffusion_forward

    quiet_libraries()
    tasks = {"rl_diffusion": rl_diffusion, "rl_diffusion_forward": rl_diffusion_forward}
    further = {"rl_diffusion": [RowProbe()], "rl_diffusion_forward": []}  # arguments of its update
    config = algorithms[0].config
    mesh = build_mesh(config.train)
    train_prompts = load_prompts(config.data, "train")
    prompts = PromptLoader(len(train_prompts), config.rollout.num_prompts, config.rollout.n, config.train.seed)
    seconds: dict[str, dict[str, list[float]]] = {
        algorithm.name: {"rollout": [], "update": []} for algorithm in algorithms
    }
    with tempfile.TemporaryDirectory() as folder:
        actors = {
            algorithm.name: tasks[algorithm.task].build_actor(
                algorithm.config, mesh, Run(Path(folder), "", mesh), prompts=train_prompts, eval_prompts=[], identity={}
            )
            for algorithm in algorithms
        }
        for step in range(repeats + 1):
            requests = rl_diffusion.requests_of(prompts, step, 0, 1)
            rewards = torch.randint(4, (len(requests),), generator=torch.Generator().manual_seed(step)) / 3
            groups = torch.tensor([request.group_id for request in requests])
            for algorithm in algorithms:
                print(f"costs: iteration {step + 1} of {repeats + 1}, {algorithm.name}", flush=True)
                task, actor, size = (
                    tasks[algorithm.task],
                    actors[algorithm.name],
                    algorithm.config.rollout.micro_batch_size,
                )
                parts = [requests[start : start + size] for start in range(0, len(requests), size)]
                begun = time.process_time()
                batches, samples = zip(
                    *(task.generate(actor, part, step, step, algorithm.config) for part in parts), strict=True
                )
                sampled = time.process_time()
                advantages = algorithm.config.algorithm.advantage.compute(
                    rewards, groups, {"ocr": rewards}, {"ocr": 1.0}
                )
                share = RankBatch(
                    batches, samples, {request.sample_id: place for place, request in enumerate(requests)}
                )
                task.update_policy(actor, share, advantages, algorithm.config, step, *further[algorithm.task])
                if step > 0:
                    seconds[algorithm.name]["rollout"].append((sampled - begun) / len(requests))
                    seconds[algorithm.name]["update"].append((time.process_time() - sampled) / len(requests))
    return {name: {phase: statistics.median(of) for phase, of in both.items()} for name, both in seconds.items()}


def draw(algorithms: Sequence[Algorithm], path: Path) -> None:
    """Held-out reward over images, one line per algorithm, the two kinds beside each other."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "sfumato", "font.size": 9, "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
        for panel, (kind, label) in zip(panels, KINDS.items(), strict=True):
            for number, algorithm in enumerate(_ranked(entry for entry in algorithms if entry.task == kind)):
                images, rewards = zip(*algorithm.curve(), strict=True)
                marker, colour = "osD^vPX*<>"[number % 10], f"C{number % 10}"
                label_ = f"{rewards[-1]:.2f}  {algorithm.heading['title']}"
                panel.plot(images, rewards, marker=marker, markersize=4, color=colour, label=label_)
            panel.set_title(f"learning from {label}")
            panel.set_xlabel("images sampled and scored")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(loc="best", title="reward at the end", frameon=False)
        panels[0].set_ylabel("mean OCR reward on held-out words")
        save_figure(figure, path)
        plt.close(figure)


def page(algorithms: Sequence[Algorithm], costs: dict[str, dict[str, float]], picture: str) -> str:
    """The page as Markdown.

    Args:
        algorithms: with finished runs.
        costs: what ``measure_costs`` returned; those that are not in it stand without.
        picture: address of the picture, relative to the page.
    """
    first = algorithms[0]
    rollout, evaluation, steps = first.config.rollout, first.config.eval, first.config.train.max_steps
    totals = [row["total"] for row in read_samples(first.folder)[0]]
    error = statistics.stdev(totals) / len(totals) ** 0.5
    ranked = [algorithm for kind in KINDS for algorithm in _ranked(entry for entry in algorithms if entry.task == kind)]
    introduction = f"""Each algorithm improves the model of the quickstart, which pretraining left mediocre, on two CPU
cores. All start from the same weights and get the same prompts, the same seed ({first.config.train.seed}) and the same
number of images, {steps * first.images_per_step:,}: {steps} iterations of {rollout.num_prompts} prompts x {rollout.n}
images of {rollout.num_inference_steps} denoising steps. What differs are each algorithm's own settings. They were tried
out on this task, but not searched: **this says that each algorithm works here, not which is best elsewhere.** One seed
each; the choice of words alone gives a figure a standard error of about {error:.2f}."""
    caption = f"""*Evaluated {len(first.curve())} times on {evaluation.num_prompts} held-out words, always from the same
latents, with {evaluation.num_inference_steps} steps without noise.*"""
    return f"""# The algorithms compared

Made by `python benchmarks/compare_algorithms.py`: do not edit it by hand.

{_filled(introduction)}

![Held-out reward over images]({picture})

{_filled(caption)}

## Results

*Before*, *after*, *best*: mean reward of the evaluation, read by RapidOCR, as the training's rewards are. *Second
reader*: the first and the last evaluation's images read by Tesseract, which no run was trained on; it would stay behind
if a run learned the habits of one reader rather than to write. *Rollout*, *update*: CPU seconds per image as multiples
of {_title(YARDSTICK, algorithms)}'s, scoring left out: early iterations of all, taken in turns in one process.

{_results(ranked, costs)}

## Settings

The files of `configs/quickstart/algorithms` say what is changed in a recipe, why, and
what else was tried. Run one that learns from trajectories by
`bash train.sh tasks/rl_diffusion.py configs/quickstart/algorithms/NAME.yaml`, one that learns from final samples by
`bash train.sh tasks/rl_diffusion_forward.py configs/quickstart/algorithms/NAME.yaml`.
"""


def draw_seeds(by_name: dict[str, list[Algorithm]], path: Path) -> None:
    """Held-out reward over images: mean and range over the seeds, a panel for each algorithm."""
    curves_of = {runs[0].heading["title"]: [run.curve() for run in runs] for runs in by_name.values()}
    draw_seed_curves(curves_of, path, ("images sampled and scored", "mean OCR reward, held out"))


def page_of_seeds(by_name: dict[str, list[Algorithm]], missing: Sequence[Algorithm], picture: str) -> str:
    """The page of ``--seeds`` as Markdown.

    Args:
        by_name: the runs of each algorithm that has finished with all seeds.
        missing: algorithms that have not.
        picture: address of the picture, relative to the page.
    """
    runs = [run for of_name in by_name.values() for run in of_name]
    config = runs[0].config
    seeds = sorted({run.config.train.seed for run in runs})
    environments = [json.loads((run.folder / "environment.json").read_text(encoding="utf-8")) for run in runs]
    commits = sorted({environment["git_commit"][:8] for environment in environments})
    dates = sorted({environment["date"] for environment in environments})
    machine = environments[0]
    introduction = f"""Each algorithm improves the model of the quickstart with {len(seeds)} seeds
({", ".join(map(str, seeds))}) and {config.train.max_steps * runs[0].images_per_step:,} images: {config.train.max_steps}
iterations of {config.rollout.num_prompts} prompts x {config.rollout.n} images, a part of what they are
[compared](algorithms_compared.md) with. A seed chooses prompts and noise; the weights that all start from are the same,
and so are the {config.eval.num_prompts} held-out words of the evaluation and their first latents."""
    made = f"""Commit {", ".join(commits)}, {" to ".join(dict.fromkeys([dates[0], dates[-1]]))}, on a machine with
{machine["cpu_count"]} CPU cores, torch {machine["packages"]["torch"]}, one thread a run. Mean reward of the evaluation,
in brackets the lowest and the highest seed:"""
    rows = []
    for of_name in sorted(by_name.values(), key=lambda of_name: -_mean_reward(of_name, -1)):
        before = [run.curve()[0][1] for run in of_name]
        after = [run.curve()[-1][1] for run in of_name]
        rose = sum(last > first for first, last in zip(before, after, strict=True))
        title = f"[{of_name[0].heading['title']}](diffusion_rl/{of_name[0].name}.md)"
        rows.append([title, _ranged(before), f"**{_ranged(after)}**", f"{rose} of {len(of_name)}"])
    titles = ", ".join(algorithm.heading["title"] for algorithm in missing)
    not_run = _filled(f"Not run with several seeds: {titles}.") + "\n" if missing else ""
    return f"""# The algorithms over several seeds

Made by `python benchmarks/compare_algorithms.py --seeds {" ".join(map(str, seeds))}`: do not edit it by hand.

{_filled(introduction)}

![Held-out reward over images, mean and range over the seeds]({picture})

*Mean and range over the seeds.*

{_filled(made)}

{_table(["algorithm", "before", "after", "rose"], rows)}
{chr(10) if not_run else ""}{not_run}"""


def _mean_reward(runs: Sequence[Algorithm], evaluation: int) -> float:
    return statistics.mean(run.curve()[evaluation][1] for run in runs)


def _ranged(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _results(algorithms: Sequence[Algorithm], costs: dict[str, dict[str, float]]) -> str:
    rows = []
    for algorithm in algorithms:
        rewards = [reward for _, reward in algorithm.curve()]
        path = algorithm.folder / "second_reader.json"
        second = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        read = [f"{second[when]:.2f}" if second else "n/a" for when in ("before", "after")]
        cost = ["n/a", "n/a"]
        if algorithm.name in costs and YARDSTICK in costs:
            cost = [f"{costs[algorithm.name][phase] / costs[YARDSTICK][phase]:.1f}" for phase in ("rollout", "update")]
        figures = [f"{rewards[0]:.2f}", f"**{rewards[-1]:.2f}**", f"{max(rewards):.2f}", *read, *cost]
        rows.append([algorithm.heading["title"], _linked(algorithm.heading["source"]), KINDS[algorithm.task], *figures])
    columns = ["algorithm", "source", "learns from", "before", "after", "best"]
    return _table([*columns, "second reader before", "after", "rollout", "update"], rows)


def _linked(source: str) -> str:
    return re.sub(r"arXiv (\S+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, subsequent_indent=indent)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ranked(algorithms: Iterable[Algorithm]) -> list[Algorithm]:
    return sorted(algorithms, key=lambda algorithm: -algorithm.curve()[-1][1])


def _title(name: str, algorithms: Sequence[Algorithm]) -> str:
    return next((algorithm.heading["title"] for algorithm in algorithms if algorithm.name == name), name)


def compare_seeds(arguments: argparse.Namespace) -> None:
    """Runs what is not finished with each seed, and writes the page of all algorithms that are."""
    every = [Algorithm(path) for path in sorted(CONFIGS.glob("*.yaml"))]
    by_name = {
        algorithm.name: [
            algorithm.with_seed(seed, arguments.iterations or SEEDS_ITERATIONS)
            for seed in dict.fromkeys(arguments.seeds)
        ]
        for algorithm in every
    }
    if not arguments.only_page:
        run([run_of_seed for name in arguments.only or by_name for run_of_seed in by_name[name]])
        if arguments.only:
            return
    finished = {name: runs for name, runs in by_name.items() if all(run_of_seed.is_finished for run_of_seed in runs)}
    if not finished:
        raise UserError("no algorithm has finished with all seeds yet: start without --only-page")
    draw_seeds(finished, SEEDS_PICTURE)
    missing = [algorithm for algorithm in every if algorithm.name not in finished]
    write_atomically(SEEDS_PAGE, page_of_seeds(finished, missing, f"images/{SEEDS_PICTURE.name}").encode())
    print(f"{len(finished)} of {len(every)} algorithms: {SEEDS_PAGE.relative_to(ROOT)}")


def compare_direct_seeds(arguments: argparse.Namespace) -> None:
    """Runs what is not finished with each seed, draws optimised and watched rewards, and prints their means."""
    iterations = arguments.iterations or DIRECT_ITERATIONS
    by_title = {
        algorithm.heading["title"]: [algorithm.with_seed(seed, iterations) for seed in dict.fromkeys(arguments.seeds)]
        for algorithm in map(Algorithm, sorted(DIRECT_CONFIGS.glob("*.yaml")))
    }
    if not arguments.only_page:
        run([run_of_seed for runs in by_title.values() for run_of_seed in runs])
    panels: dict[str, list[list[tuple[int, float]]]] = {}
    for metric, name in ((REWARD, "optimised"), (WATCHED, "OCR, watched")):
        for title, runs in by_title.items():
            panels[f"{title}: {name}"] = [run_of_seed.curve(metric) for run_of_seed in runs]
    for title, curves in panels.items():
        for evaluation in zip(*curves, strict=True):
            print(f"{title}  {evaluation[0][0]} images: {_ranged([value for _, value in evaluation])}")
    draw_seed_curves(panels, DIRECT_PICTURE, ("images", "mean, held out"), rows_of=len(by_title))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {path.stem: Algorithm(path) for path in sorted(CONFIGS.glob("*.yaml"))}
    parser.add_argument("--only", nargs="+", choices=list(every), metavar="NAME", help="run these only, write no page")
    parser.add_argument("--only-page", action="store_true", help="run nothing; write the page from finished runs")
    parser.add_argument("--without-second-reader", action="store_true", help="do not read images with Tesseract")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="run with these, and write their page")
    parser.add_argument("--iterations", type=int, help="of each run of --seeds (8; with --direct 12)")
    parser.add_argument("--direct", action="store_true", help="with --seeds: algorithms that follow a gradient")
    arguments = parser.parse_args()
    if arguments.direct:
        compare_direct_seeds(arguments)
        return
    algorithms = list(every.values())
    check_comparable(algorithms)
    if arguments.seeds:
        compare_seeds(arguments)
        return
    if not arguments.only_page:
        run([every[name] for name in arguments.only or every])
        if arguments.only:
            return
    finished = [algorithm for algorithm in algorithms if algorithm.is_finished]
    if not finished:
        raise UserError("no run has finished yet: start without --only-page")
    if not arguments.only_page and not arguments.without_second_reader:
        read_again(finished)
    costs_file = finished[0].folder.parent / "costs.json"
    if not arguments.only_page:
        write_atomically(costs_file, json.dumps(measure_costs(finished), indent=1).encode())
    costs = json.loads(costs_file.read_text(encoding="utf-8")) if costs_file.is_file() else {}
    draw(finished, PICTURE)
    write_atomically(PAGE, page(finished, costs, f"images/{PICTURE.name}").encode())
    print(f"{len(finished)} of {len(algorithms)} algorithms: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
