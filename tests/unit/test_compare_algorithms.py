"""The generated comparison of algorithms, from run folders that are made up here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sfumato.config.yaml_text import config_text, read_yaml
from sfumato.errors import ConfigError, UserError
from sfumato.tracking.samples import SampleRecord, save_samples
from tests.tiny import ROOT, write_config


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with its folders below ``tmp_path`` and two algorithms of one shared budget."""
    spec = importlib.util.spec_from_file_location("compare_algorithms", ROOT / "benchmarks" / "compare_algorithms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as when the script is run
    spec.loader.exec_module(module)
    for name, value in {"ROOT": tmp_path, "CONFIGS": tmp_path / "configs"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs/page.md")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "docs/images/curves.svg")
    (tmp_path / "configs").mkdir()
    (tmp_path / "docs").mkdir()
    for name in ("flow_grpo_fast", "diffusion_nft"):
        text = (ROOT / f"configs/quickstart/algorithms/{name}.yaml").read_text()
        (tmp_path / f"configs/{name}.yaml").write_text(text)
    return module


def algorithm(bench: ModuleType, name: str, seed: int | None = None):
    whole = bench.Algorithm(bench.CONFIGS / f"{name}.yaml")
    return whole if seed is None else whole.with_seed(seed, 8)


def finish(
    bench: ModuleType, name: str, rewards: list[float], second: float | None = None, seed: int | None = None
) -> None:
    """A run folder whose evaluations are evenly spaced from the first to the last iteration."""
    contender = algorithm(bench, name, seed)
    contender.folder.mkdir(parents=True)
    (contender.folder / "config.yaml").write_text(config_text(contender.config))
    steps = np.linspace(0, contender.config.train.max_steps, len(rewards)).astype(int).tolist()
    lines = [{"step": step, bench.REWARD: reward} for step, reward in zip(steps, rewards, strict=True)]
    (contender.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    blank = np.full((8, 8, 3), 255, np.uint8)
    records = [SampleRecord(blank, "eval", 'write "ABC"', 0, index, total=index / 3) for index in range(4)]
    save_samples(contender.folder, 0, records)
    if second is not None:
        (contender.folder / "second_reader.json").write_text(json.dumps({"before": 0.25, "after": second}))


def row_of(page: str, title: str) -> list[str]:
    return next(
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if f"| {title} |" in line
    )


def test_the_page_holds_what_the_runs_logged(bench, monkeypatch):
    finish(bench, "flow_grpo_fast", [0.4, 0.62, 0.58], second=0.5)
    finish(bench, "diffusion_nft", [0.4, 0.5, 0.75])
    costs = {"flow_grpo_fast": {"rollout": 2.0, "update": 4.0}, "diffusion_nft": {"rollout": 3.0, "update": 2.0}}
    (bench.ROOT / "runs/quickstart/algorithms/costs.json").write_text(json.dumps(costs))
    monkeypatch.setattr(sys, "argv", ["compare_algorithms.py", "--only-page"])
    bench.main()

    page = bench.PAGE.read_text()
    fast, nft = row_of(page, "Flow-GRPO-Fast"), row_of(page, "DiffusionNFT")
    assert fast[2:] == ["trajectories", "0.40", "**0.58**", "0.62", "0.25", "0.50", "1.0", "1.0"]
    assert nft[2:] == ["final samples", "0.40", "**0.75**", "0.75", "n/a", "n/a", "1.5", "0.5"]
    assert "6,144: 32 iterations of 12 prompts x 16 images" in " ".join(page.split()) and "(images/curves.svg)" in page
    assert "[arXiv 2509.16117](https://arxiv.org/abs/2509.16117)" in page
    picture = bench.PICTURE.read_text()
    assert "0.58  Flow-GRPO-Fast" in picture and "0.75  DiffusionNFT" in picture
    assert "prefers-color-scheme:dark" in picture and "fill: #ffffff" not in picture


def test_the_page_of_several_seeds_has_means_ranges_and_what_was_not_run(bench, monkeypatch):
    monkeypatch.setattr(bench, "SEEDS_PAGE", bench.ROOT / "docs/seeds.md")
    monkeypatch.setattr(bench, "SEEDS_PICTURE", bench.ROOT / "docs/images/seeds.svg")
    made = {"git_commit": "0123456789", "date": "2026-11-26", "cpu_count": 2, "packages": {"torch": "2.13.0"}}
    for seed, after in ((1, 0.5), (2, 0.7)):
        finish(bench, "diffusion_nft", [0.4, 0.45, after], seed=seed)
        (algorithm(bench, "diffusion_nft", seed).folder / "environment.json").write_text(json.dumps(made))
    finish(bench, "flow_grpo_fast", [0.4, 0.6], seed=1)
    monkeypatch.setattr(sys, "argv", ["compare_algorithms.py", "--only-page", "--seeds", "1", "2"])
    bench.main()
    page = bench.SEEDS_PAGE.read_text()
    assert "| 0.40 [0.40, 0.40] | **0.60 [0.50, 0.70]** | 2 of 2 |" in page and "1,536 images: 8 iterations" in page
    assert "Commit 01234567, 2026-11-26, on a machine with 2 CPU cores" in page
    assert "Not run with several seeds: Flow-GRPO-Fast." in page and not bench.PAGE.exists()
    assert "DiffusionNFT" in bench.SEEDS_PICTURE.read_text()


def test_algorithms_by_gradients_show_what_is_optimised_and_what_only_watches(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "DIRECT_CONFIGS", ROOT / "configs/quickstart/direct")
    monkeypatch.setattr(bench, "DIRECT_PICTURE", bench.ROOT / "docs/images/direct.svg")
    for name in ("draft", "refl", "srpo"):
        for seed, after in ((1, 0.5), (2, 0.7)):
            run = bench.Algorithm(bench.DIRECT_CONFIGS / f"{name}.yaml").with_seed(seed, 12)
            run.folder.mkdir(parents=True)
            (run.folder / "config.yaml").write_text(config_text(run.config))
            lines = [{"step": 0, bench.REWARD: 0.1, bench.WATCHED: 0.4}, {"step": 1, "loss/policy": 1.0}]
            lines += [{"step": 12, bench.REWARD: 0.3, bench.WATCHED: after}]
            (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["compare_algorithms.py", "--direct", "--only-page", "--seeds", "1", "2"])
    bench.main()
    printed = capsys.readouterr().out
    assert "DRaFT: optimised  0 images: 0.10 [0.10, 0.10]\nDRaFT: optimised  384 images: 0.30 [0.30, 0.30]" in printed
    assert "SRPO: OCR, watched  384 images: 0.60 [0.50, 0.70]" in printed
    assert "ReFL: OCR, watched" in bench.DIRECT_PICTURE.read_text()


def test_runs_that_are_not_finished_or_of_other_settings_are_left_out(bench, monkeypatch):
    finish(bench, "flow_grpo_fast", [0.4, 0.6])
    finish(bench, "diffusion_nft", [0.4, 0.8])
    path = bench.CONFIGS / "diffusion_nft.yaml"
    path.write_text(path.read_text().replace("lr: 3.0e-4", "lr: 5.0e-4"))
    assert not algorithm(bench, "diffusion_nft").is_same_run
    fast = algorithm(bench, "flow_grpo_fast")
    lines = (fast.folder / "metrics.jsonl").read_text().splitlines()
    assert fast.is_finished
    (fast.folder / "metrics.jsonl").write_text(lines[0] + "\n")
    assert not fast.is_finished and fast.is_same_run, "to be resumed"
    monkeypatch.setattr(sys, "argv", ["compare_algorithms.py", "--only-page"])
    with pytest.raises(UserError, match="no run has finished yet"):
        bench.main()


def test_files_that_cannot_be_compared_are_refused(bench):
    content = read_yaml(bench.CONFIGS / "diffusion_nft.yaml")
    content["eval"]["num_prompts"] = 8
    write_config(content, bench.CONFIGS / "diffusion_nft.yaml")
    both = [algorithm(bench, name) for name in ("flow_grpo_fast", "diffusion_nft")]
    with pytest.raises(ConfigError, match=r"diffusion_nft.yaml: eval differs from .*flow_grpo_fast.yaml"):
        bench.check_comparable(both)
    with pytest.raises(ConfigError, match=r"begin the file with a comment '# TITLE"):
        _ = both[1].heading


def test_every_shipped_algorithm_has_the_same_budget_and_a_folder_of_its_own(bench):
    shipped = [bench.Algorithm(path) for path in sorted((ROOT / "configs/quickstart/algorithms").glob("*.yaml"))]
    bench.check_comparable(shipped)
    assert len({entry.folder for entry in shipped}) == len(shipped) >= 9
    for entry in shipped:
        assert entry.folder.name == entry.name and entry.heading["title"]
        assert entry.config.algorithm.recipe == entry.name


def test_costs_are_measured_on_whole_iterations(bench, tmp_path):
    from tests.tiny import tiny_rl_config

    for name in ("flow_grpo_fast", "diffusion_nft"):
        tiny = tiny_rl_config(tmp_path)
        algorithm_ = {"recipe": name} | ({"window": {"size": 2, "range": [0, 3]}} if name == "flow_grpo_fast" else {})
        write_config({**tiny, "algorithm": algorithm_}, bench.CONFIGS / f"{name}.yaml")
    both = [algorithm(bench, name) for name in ("flow_grpo_fast", "diffusion_nft")]
    costs = bench.measure_costs(both, repeats=1)
    assert set(costs) == {"flow_grpo_fast", "diffusion_nft"}
    assert all(costs[name][phase] > 0 for name in costs for phase in ("rollout", "update"))
