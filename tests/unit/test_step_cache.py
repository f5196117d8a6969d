"""Evaluation that leaves denoising steps out: what it saves, what it costs, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.step_cache import StepCache
from sfumato.tracking.json_lines import read_jsonl
from tests import tiny_families
from tests.tiny import run_task_here, tiny_rl_config

PROMPTS, STEPS = ["write a", "write b", "write c"], 10
ALWAYS, NEVER = 1e3, 1e-12
"""Thresholds: all that may be left out (never the first fifth, three in a row at most), and nothing."""
LEFT_OUT = 0.6
"""Of 10 steps: 2, 3, 4 and 6, 7, 8."""

FAMILIES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "sd3": (tiny_families.tiny_sd3, 7),
    "flux": (tiny_families.tiny_flux, 7),
    "qwen_image": (tiny_families.tiny_qwen_image, 24),
    "wan": (tiny_families.tiny_wan, 7),
}


def build(tmp_path: Path, describe: Callable[[], dict[str, Any]], tokens: int, **config: Any) -> DiffusionModel:
    """A tiny model of small random weights that answers to its inputs."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(describe()))
    model = build_diffusion_model(
        ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=tokens, **config)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def images_of(model: DiffusionModel, cache: StepCache | None = None) -> np.ndarray:
    conditioning = model.encode_prompts(PROMPTS)
    settings = {"size": (16, 16), "num_steps": STEPS, "guidance_scale": 3.0, "seed": 3, "micro_batch_size": 2}
    return np.stack(sample_images(model, conditioning, [0, 1, 2], **settings, cache=cache))


def traces(model: DiffusionModel) -> list[str]:
    return [
        name
        for name, module in model.denoiser.named_modules()
        if "_diffusers_hook" in vars(module) or "forward" in vars(module) or module._forward_hooks
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_left_out_and_no_trace_remains(family: str, tmp_path: Path) -> None:
    model = build(tmp_path, *FAMILIES[family])
    exact = images_of(model)
    cache = StepCache(model, ALWAYS, STEPS)
    cached = images_of(model, cache)
    result = cache.metrics()
    assert result["eval/cached_steps"] == pytest.approx(LEFT_OUT)
    assert not np.array_equal(exact, cached), "the blocks were left out"
    assert result["eval/cache_error"] == pytest.approx(np.abs(exact[0].astype(float) - cached[0]).mean() / 255)
    assert traces(model) == []
    assert np.array_equal(images_of(model), exact)


def test_a_threshold_that_nothing_meets_changes_nothing(tmp_path: Path) -> None:
    model = build(tmp_path, *FAMILIES["sd3"])
    cache = StepCache(model, NEVER, STEPS)
    assert np.array_equal(images_of(model, cache), images_of(model))
    assert cache.metrics()["eval/cached_steps"] == 0


def test_the_error_grows_with_the_threshold(tmp_path: Path) -> None:
    model = build(tmp_path, *FAMILIES["sd3"])
    results = []
    for threshold in (NEVER, 0.02, ALWAYS):
        cache = StepCache(model, threshold, STEPS)
        images_of(model, cache)
        results.append(cache.metrics())
    shares, errors = ([metrics[name] for metrics in results] for name in ("eval/cached_steps", "eval/cache_error"))
    assert shares == sorted(shares) and 0 < shares[1] <= shares[2]
    assert errors == sorted(errors) and errors[2] > errors[0]


def test_adapters_and_recomputed_blocks_are_as_before(tmp_path: Path) -> None:
    model = build(tmp_path, *FAMILIES["flux"], lora=LoraConfig(rank=2))
    train = TrainConfig(output_dir=str(tmp_path), activation_checkpointing="full")
    model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
    exact, before = images_of(model), traces(model)
    forwards = [vars(module).get("forward") for module in model.denoiser.modules()]
    cache = StepCache(model, ALWAYS, STEPS)
    images_of(model, cache)
    assert cache.metrics()["eval/cached_steps"] == pytest.approx(LEFT_OUT)
    assert traces(model) == before
    assert [vars(module).get("forward") for module in model.denoiser.modules()] == forwards
    assert np.array_equal(images_of(model), exact)


def test_a_failure_leaves_no_trace(tmp_path: Path) -> None:
    model = build(tmp_path, *FAMILIES["sd3"])
    cache = StepCache(model, ALWAYS, STEPS)
    images_of(model, cache)

    def fail() -> None:
        with cache.active():
            assert traces(model) != []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert traces(model) == []


@pytest.mark.parametrize(
    ("describe", "tokens"),
    [(tiny_families.tiny_z_image, 40), (tiny_families.tiny_wan_pair, 7), (tiny_families.tiny_stable_diffusion, 7)],
)
def test_models_that_it_does_not_fit_are_refused(
    tmp_path: Path, describe: Callable[[], dict[str, Any]], tokens: int
) -> None:
    with pytest.raises(ConfigError, match=r"eval\.step_cache.*fits the transformers of Stable Diffusion 3, FLUX"):
        StepCache(build(tmp_path, describe, tokens), ALWAYS, STEPS)


@pytest.mark.slow
def test_a_run_reports_it_and_trains_as_without(tmp_path: Path) -> None:
    lines = {}
    for threshold in (0.0, ALWAYS):
        config = tiny_rl_config(
            tmp_path,
            train={"output_dir": str(tmp_path / f"run{threshold}"), "max_steps": 1},
            eval={"every_steps": 1, "num_inference_steps": STEPS, "step_cache": threshold},
        )
        run_task_here("rl_diffusion", config)
        lines[threshold] = read_jsonl(tmp_path / f"run{threshold}" / "metrics.jsonl")
    for plain, cached in zip(*lines.values(), strict=True):
        assert cached["eval/cached_steps"] == pytest.approx(LEFT_OUT)
        assert "eval/cached_steps" not in plain
        training = [name for name in plain if not name.startswith("eval/")]
        assert [plain[name] for name in training] == [cached[name] for name in training]
    timings = read_jsonl(tmp_path / "run0.0" / "timings.jsonl")[1]
    assert timings["time/generate_per_image_s"] == pytest.approx(timings["time/generate_s"] / 16)
    assert timings["time/update_per_image_s"] == pytest.approx(timings["time/update_s"] / 16)
    assert timings["throughput/update_flops_per_s"] > 0
