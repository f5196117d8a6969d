"""Takes the pictures of docs/reading_a_run.md: ``python -m tests.studio_pictures``. Needs chromium and playwright."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sfumato.tracking.json_lines import JsonLines
from sfumato.tracking.samples import SampleRecord, save_samples
from tests.studio_runs import add_decisions
from tests.tiny import ROOT
from tests.unit.test_studio_browser import BROWSER, Studio

PROMPTS = ("a red ball on grass", "a blue ball on sand", "a yellow ball on snow", "a green ball at night")
BALLS = ((214, 69, 56), (58, 109, 201), (235, 190, 60), (66, 158, 94))
GROUNDS = ((120, 160, 90), (222, 200, 150), (235, 240, 245), (40, 44, 70))
STEPS, EVERY = 60, 10
VIEWS = {
    "overview": ("overview?run=balls", "figure canvas", 900),
    "gallery": ("gallery?run=balls&size=middle", "a.cell img", 700),
    "group": ("group?run=balls&step=40", ".tile img", 560),
    "sample": ("sample?run=balls&step=40&kind=train&id=1", ".denoise", 640),
    "why": ("why?run=balls", ".interval", 860),
}


def draw_ball(prompt: int, seed: int, blur: float) -> np.ndarray:
    """A ball on a ground, the more blurred and noisy the larger ``blur``: uint8 ``[96, 96, 3]``."""
    generator = np.random.default_rng(97 * seed + prompt)
    picture = Image.new("RGB", (96, 96), GROUNDS[prompt])
    x, y = generator.integers(30, 66, 2)
    ImageDraw.Draw(picture).ellipse((x - 20, y - 20, x + 20, y + 20), fill=BALLS[prompt])
    pixels = np.asarray(picture, np.float64)
    noise = np.random.default_rng(seed).normal(0, 70, pixels.shape)
    return np.clip((1 - blur) * pixels + blur * (128 + noise), 0, 255).astype(np.uint8)


def write_run(folder: Path) -> None:
    """A made-up run of RL whose pictures become clearer, while a reward that only watches falls a little."""
    folder.mkdir(parents=True)
    rewards = "reward:\n  rewards:\n  - {type: sharpness}\n  - {type: variety, evaluation_only: true}\n"
    (folder / "config.yaml").write_text(f"train:\n  max_steps: 80\n{rewards}eval:\n  num_prompts: 4\n")
    environment = {"run_id": "made up", "task": "rl_diffusion", "date": "2026-11-25", "total_steps": 80}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "log.txt").write_text("")
    generator = np.random.default_rng(0)
    metrics, timings = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "timings.jsonl")
    for step in range(STEPS + 1):
        clear = 1 - 0.85 * np.exp(-step / 25)
        totals = [float(np.clip(clear + 0.1 * generator.normal() - 0.05 * number, 0, 1)) for number in range(4)]
        line = {"step": step, "reward/total": float(clear + 0.03 * generator.normal()), "policy/kl": 0.0004 * step}
        line["reward/sharpness"] = line["reward/total"]
        line |= {"loss": float(0.02 * generator.normal()), "grad_norm": float(1 + 0.1 * generator.normal()), "lr": 2e-4}
        if step % EVERY == 0:
            watched = 0.7 - 0.004 * step
            line |= {"eval/reward/total": float(np.mean(totals)), "eval/reward/sharpness": float(np.mean(totals))}
            line |= {"eval/reward/variety": watched}
            records = [
                SampleRecord(
                    *(draw_ball(number, 7, 1 - clear), "eval", PROMPTS[number], 7, number),
                    rewards={"sharpness": totals[number], "variety": watched + 0.02 * number},
                    total=totals[number],
                )
                for number in range(4)
            ]
            for number in range(8):
                total = float(np.clip(clear + 0.15 * generator.normal(), 0, 1))
                pixels = draw_ball(number // 4, number + 50, 1 - total)
                advantage = float(generator.normal())
                records.append(
                    SampleRecord(
                        pixels,
                        "train",
                        PROMPTS[number // 4],
                        42,
                        number,
                        {"sharpness": total},
                        total,
                        advantage,
                    )
                )
            save_samples(folder, step, records)
            add_decisions(folder, step)
        metrics.write(line)
        timings.write({"step": step, "time/step_s": 12.5})


def main() -> None:
    """Writes the pictures."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        root = Path(name) / "runs"
        write_run(root / "balls")
        browser = playwright.chromium.launch(executable_path=BROWSER or shutil.which("chromium"), args=["--no-sandbox"])
        studio = Studio(root, browser, cache=Path(name) / "cache")
        for (picture, (view, selector, height)), scheme in itertools.product(VIEWS.items(), ("light", "dark")):
            page = studio.tab(view, viewport={"width": 1180, "height": height}, color_scheme=scheme)
            page.wait_for_selector(selector)
            page.wait_for_timeout(1500)
            page.screenshot(path=f"{name}/{picture}.png")
            # the site shows the one or the other: docs/conf.py
            ending = "_dark" if scheme == "dark" else ""
            with Image.open(f"{name}/{picture}.png") as opened:
                path = ROOT / "docs" / "images" / f"studio_{picture}{ending}.webp"
                opened.convert("RGB").save(path, "WEBP", quality=78, method=6)
            page.context.close()
        browser.close()
        studio.close()


if __name__ == "__main__":
    main()
