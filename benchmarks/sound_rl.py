"""RL of a tiny model of sound by a reward that hears, over seeds: the pictures of docs/sound.md.

    python benchmarks/sound_rl.py [--seeds 1 2 3] [--only-pictures]

Runs the first commands of the page: the data, pretraining, then Flow-GRPO-Fast and DiffusionNFT with each seed, which
chooses the noise of the samples that are learned from. Finished runs stay, and interrupted ones go on. Prints the
evaluations, and draws their curves and the spectra of one sound of each key before and after.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from PIL import Image
from seed_curves import draw_seed_curves

from sfumato.config.load import read_yaml
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples, step_folder

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "sound"
PROMPTS = RUNS / "tones" / "prompts.jsonl"
CURVES = ROOT / "docs" / "images" / "sound_rl.svg"
SPECTRA = ROOT / "docs" / "images" / "sound_rl_spectra.webp"
REWARD = "eval/reward/total"
ALGORITHMS = {  # by title: the task, and its configuration in configs/sound
    "Flow-GRPO-Fast": ("rl_diffusion", "tones_rl"),
    "DiffusionNFT": ("rl_diffusion_forward", "tones_nft"),
}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only-pictures", action="store_true", help="draw them from the runs that are there")
    options = parser.parse_args()
    if not options.only_pictures:
        run_all(options.seeds)
    curves_of = {
        title: [evaluations(run_folder(config, seed)) for seed in options.seeds]
        for title, (_, config) in ALGORITHMS.items()
    }
    for title, curves in curves_of.items():
        for step, values in zip(
            [step for step, _ in curves[0]],
            zip(*([value for _, value in curve] for curve in curves), strict=True),
            strict=True,
        ):
            print(f"{title}  iteration {step}: {statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
    draw_seed_curves(curves_of, CURVES, ("iterations", "power at the tone"), 2.4, (0, 0.6))
    draw_spectra(run_folder("tones_rl", options.seeds[0]))


def run_folder(config: str, seed: int) -> Path:
    """Of the run of a configuration with a seed."""
    return RUNS / f"{config}_seed_{seed}"


def run_all(seeds: list[int]) -> None:
    """Makes the data, and runs what is not finished."""
    if not PROMPTS.is_file():
        subprocess.run([sys.executable, "docs/examples/tones.py", str(RUNS / "tones")], check=True, cwd=ROOT)
    launch("train_dit", "tones_pretrain", RUNS / "pretrain")
    for task, config in ALGORITHMS.values():
        for seed in seeds:
            launch(task, config, run_folder(config, seed), "--train.seed", str(seed))


def launch(task: str, config: str, folder: Path, *overrides: str) -> None:
    """Runs a configuration of configs/sound, unless its run is finished."""
    if (folder / "hf_ckpt").is_dir():
        return
    command = [sys.executable, "-m", "sfumato.cli", "launch", f"tasks/{task}.py", f"configs/sound/{config}.yaml"]
    more = ["--train.output_dir", str(folder), "--train.load_checkpoint_path", "auto", *overrides]
    subprocess.run([*command, *more], check=True, cwd=ROOT)


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Iterations of a run, and the reward of their evaluations."""
    return [(row["step"], row[REWARD]) for row in read_jsonl(folder / "metrics.jsonl") if REWARD in row]


def draw_spectra(folder: Path) -> None:
    """Draws the spectra of the first sound of each key in the first and the last evaluation, one below the other."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    samples = read_samples(folder)
    wanted = [float(str(row["hertz"])) for row in read_jsonl(PROMPTS)]
    rate = read_yaml(str(ROOT / "configs/sound/tiny_stable_audio3.yaml"))["vae"]["sampling_rate"]
    figure, panels = plt.subplots(2, len(wanted), figsize=(9, 3.4), sharex=True, sharey=True, layout="constrained")
    for row, step in zip(panels, (min(samples), max(samples)), strict=True):
        shown = [sample for sample in samples[step] if sample["kind"] == "eval"]
        for panel, hertz, sample in zip(row, wanted, shown, strict=False):
            rewards = sample["rewards"]
            assert isinstance(rewards, dict)
            with Image.open(step_folder(folder, step) / str(sample["file"])) as picture:
                panel.imshow(picture.convert("RGB"), extent=(0, 1, 0, rate / 2), aspect="auto")
            panel.axhline(hertz, color="white", linewidth=0.6, linestyle=":")
            panel.set_title(f"{sample['prompt']}: {rewards['hears_tone']:.2f}", fontsize=8)
            panel.set_xticks([])
        row[0].set_ylabel(f"iteration {step}, Hz", fontsize=8)
    figure.savefig(SPECTRA, dpi=80, pil_kwargs={"quality": 80})


if __name__ == "__main__":
    main()
