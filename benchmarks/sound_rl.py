"""RL of tiny models of sound, and of video with sound, over seeds: the pictures of docs/sound.md.

    python benchmarks/sound_rl.py [--only tones|clips] [--seeds 1 2 3] [--only-pictures]

Makes the data and pretrains, then runs RL with each seed, which chooses the noise of the samples that are learned
from: tones by Flow-GRPO-Fast and DiffusionNFT with a reward that hears, and clips, videos with sound, by DiffusionNFT
with a reward that sees and one that hears. Finished runs stay, and interrupted ones go on. Prints the evaluations, and
draws their curves, and of tones the spectra of one sound of each key before and after.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from PIL import Image
from seed_curves import draw_seed_curves

from sfumato.config.yaml_text import read_yaml
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples, step_folder

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "sound"
IMAGES = ROOT / "docs" / "images"
PROMPTS = RUNS / "tones" / "prompts.jsonl"
SPECTRA = IMAGES / "sound_rl_spectra.webp"
ALGORITHMS = {  # of tones, by title: the task, and its configuration in configs/sound
    "Flow-GRPO-Fast": ("rl_diffusion", "tones_rl"),
    "DiffusionNFT": ("rl_diffusion_forward", "tones_nft"),
}
REWARDS = {"light of the frames": "sees_light", "level of the sound": "hears_level"}
"""Of clips, by title."""


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tones", "clips"], help="leave the other out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only-pictures", action="store_true", help="draw them from the runs that are there")
    options = parser.parse_args()
    if options.only != "clips":
        compare_algorithms_on_tones(options.seeds, options.only_pictures)
    if options.only != "tones":
        compare_rewards_of_clips(options.seeds, options.only_pictures)


def compare_algorithms_on_tones(seeds: list[int], only_pictures: bool) -> None:
    """Runs what is not finished, prints and draws the total reward of each algorithm, and spectra."""
    if not only_pictures:
        make_data("tones", PROMPTS)
        launch("train_dit", "tones_pretrain", RUNS / "pretrain")
        for task, config in ALGORITHMS.values():
            launch_seeds(task, config, seeds)
    curves_of = {title: read_curves(config, seeds, "total") for title, (_, config) in ALGORITHMS.items()}
    print_curves(curves_of)
    draw_seed_curves(curves_of, IMAGES / "sound_rl.svg", ("iterations", "power at the tone"), 2.4, (0, 0.6))
    draw_spectra(run_folder("tones_rl", seeds[0]))


def compare_rewards_of_clips(seeds: list[int], only_pictures: bool) -> None:
    """Runs what is not finished, prints and draws both parts of the reward of DiffusionNFT."""
    if not only_pictures:
        make_data("clips", RUNS / "clips" / "model" / "model_index.json")
        launch("train_dit", "clips_pretrain", RUNS / "clips_pretrain")
        launch_seeds("rl_diffusion_forward", "clips_nft", seeds)
    curves_of = {title: read_curves("clips_nft", seeds, reward) for title, reward in REWARDS.items()}
    print_curves(curves_of)
    draw_seed_curves(curves_of, IMAGES / "video_sound_rl.svg", ("iterations", "reward"), 2.4, (0, 1))


def make_data(name: str, last: Path) -> None:
    """Runs a script of docs/examples, unless what it writes last is there."""
    if not last.exists():
        subprocess.run([sys.executable, f"docs/examples/{name}.py", str(RUNS / name)], check=True, cwd=ROOT)


def run_folder(config: str, seed: int) -> Path:
    """Of the run of a configuration with a seed."""
    return RUNS / f"{config}_seed_{seed}"


def launch_seeds(task: str, config: str, seeds: list[int]) -> None:
    """Runs a configuration of configs/sound with each seed."""
    for seed in seeds:
        launch(task, config, run_folder(config, seed), "--train.seed", str(seed))


def launch(task: str, config: str, folder: Path, *overrides: str) -> None:
    """Runs a configuration of configs/sound, unless its run is finished."""
    if (folder / "hf_ckpt").is_dir():
        return
    command = [sys.executable, "-m", "sfumato.cli", "launch", f"tasks/{task}.py", f"configs/sound/{config}.yaml"]
    more = ["--train.output_dir", str(folder), "--train.load_checkpoint_path", "auto", *overrides]
    subprocess.run([*command, *more], check=True, cwd=ROOT)


def read_curves(config: str, seeds: list[int], reward: str) -> list[list[tuple[int, float]]]:
    """Of each seed's run the iterations, and a reward of their evaluations."""
    name = f"eval/reward/{reward}"
    rows = [read_jsonl(run_folder(config, seed) / "metrics.jsonl") for seed in seeds]
    return [[(row["step"], row[name]) for row in run if name in row] for run in rows]


def print_curves(curves_of: dict[str, list[list[tuple[int, float]]]]) -> None:
    """Prints mean, lowest and highest of the seeds at each iteration."""
    for title, curves in curves_of.items():
        for points in zip(*curves, strict=True):
            values = [value for _, value in points]
            print(f"{title}  iteration {points[0][0]}: ", end="")
            print(f"{statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]")


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
