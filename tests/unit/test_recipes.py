"""Every recipe on every model family: two iterations of the real task, then the adapter in diffusers.

A cell of the matrix is a family (a row of ``ROWS``) and a recipe (an entry of ``DIFFUSION_RECIPES``): both are found.
Each recipe runs with a family, and each family that is not made of others' parts; the other cells are marked slow.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from sfumato.algorithms.noise import keyed_normal
from sfumato.config.diffusion_rl import ForwardAlgorithmConfig
from sfumato.config.load import merge
from sfumato.config.recipes import DIFFUSION_RECIPES, FORWARD_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.adapter_files import load_from_diffusers, unload_adapters
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.flops import DenoiserFlops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.json_lines import read_jsonl
from tests.family_rows import ROWS, Row, wake
from tests.rows import ROUNDING
from tests.tiny import ROOT, load_task, rl_task, run_task_here, tiny_rl_config

FEW_STEPS, MANY_STEPS = 6, 11
"""Denoising steps; many where a recipe trains six steps or noise levels or more, and never the last."""
HOME = {"ddpo": "stable_diffusion", "dpok": "stable_diffusion", "flow_grpo_wan": "wan"}
"""Recipes of a family with dynamics of its own: these cells are run always, too."""


def kind_of(recipe: str) -> str:
    """trajectories, forward, or groups: of the forward process, where whole groups are needed."""
    if recipe in TRAJECTORY_RECIPES:
        return "trajectories"
    return "groups" if ForwardAlgorithmConfig(recipe=recipe, **FORWARD_RECIPES[recipe]).whole_groups else "forward"


def steps_of(recipe: str, pipeline: Any) -> int:
    """As many denoising steps as a recipe needs: many for two denoisers, one of which both updates must train."""
    parts = DIFFUSION_RECIPES[recipe]
    trained = max(
        part.get(name, 1)
        for part, name in ((parts.get("window", {}), "size"), (parts.get("timesteps", {}), "num"))
        if isinstance(part, dict)
    )
    is_pair = getattr(pipeline, "transformer_2", None) is not None
    return FEW_STEPS if trained < FEW_STEPS and not is_pair else MANY_STEPS


def quick_cells() -> set[tuple[str, str]]:
    """(family, recipe): every recipe with a family, every family with parts of its own with a recipe."""
    families = [name for name, row in ROWS.items() if not row.brief]
    recipes = list(DIFFUSION_RECIPES)
    result = {(family, recipe) for recipe, family in HOME.items()}
    for index in range(max(len(families), len(recipes))):
        result.add((families[index % len(families)], recipes[index % len(recipes)]))
    return result


def cells() -> Iterator[Any]:
    """All cells as parameters of a test, family by family."""
    quick = quick_cells()
    replayed_families = set()
    for family in ROWS:
        for recipe in DIFFUSION_RECIPES:
            marks = [] if (family, recipe) in quick else [pytest.mark.slow]
            # what is replayed, on both kinds of kernels: which operations these compute depends on the family alone
            if not marks and kind_of(recipe) == "trajectories" and family not in replayed_families:
                replayed_families.add(family)
                marks.append(pytest.mark.exact)
            yield pytest.param(family, recipe, marks=marks, id=f"{family}-{recipe}")


@dataclass
class Family:
    """A tiny pipeline on disk, and what diffusers makes of it."""

    row: Row
    folder: Path
    pipeline: Any

    def velocity(self, model: DiffusionModel) -> torch.Tensor:
        """The model's prediction at a high and a low noise level."""
        height, width = self.row.size
        model.frames = self.row.num_frames
        latents = keyed_normal(model.latent_shape(height, width, model.frames), 11, "latent", 0, range(2))
        with torch.no_grad():
            images = model.blank_images(2, height, width)
            conditioning = model.encode_prompts(['write "AB"', 'write "C"'], with_negative=False, images=images)
            return model.predict_velocity(latents, torch.tensor([0.95, 0.3]), conditioning)

    def velocity_of_diffusers(self, model: DiffusionModel, adapter: Path | None = None) -> torch.Tensor:
        """The same of diffusers' pipeline, with the adapter that it loads from a folder and drops again."""
        if adapter is not None:
            load_from_diffusers(self.pipeline, adapter)
        try:
            return self.velocity(type(model)(copy.copy(self.pipeline), max_sequence_length=self.row.tokens))
        finally:
            unload_adapters(self.pipeline)


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes families by name, once each."""

    @functools.cache
    def make(name: str) -> Family:
        row = ROWS[name]
        if row.needs:
            pytest.importorskip(row.needs)
        folder = tmp_path_factory.mktemp(name)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
        model = build_diffusion_model(ModelConfig(config_path=str(folder / "tiny.yaml"), from_images=row.from_images))
        wake(model)
        model.save_pipeline(folder / "pipeline")
        return Family(row, folder / "pipeline", model.pipeline_type().from_pretrained(folder / "pipeline"))

    return make


@pytest.fixture(autouse=True)
def no_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations, which ``test_families.py`` counts for every family, go into rates alone."""
    monkeypatch.setattr("tests.tiny.flops_counted_once", lambda *_: DenoiserFlops(forward=1, training=3))


def config_of(recipe: str, family: Family, folder: Path, **overrides: Any) -> dict[str, Any]:
    """One update in each iteration, so that the policy is always the one that sampled."""
    (folder / "pipeline").symlink_to(family.folder)
    config = tiny_rl_config(
        folder,
        model={
            "lora": {"rank": 4, "alpha": 8},
            "max_sequence_length": family.row.tokens,
            "from_images": family.row.from_images,
        },
        rollout={"num_prompts": 2, "micro_batch_size": 4, "num_inference_steps": steps_of(recipe, family.pipeline)},
        train={"max_steps": 2, "global_batch_size": None},
        eval={"every_steps": 2, "num_prompts": 1, "num_inference_steps": 1},
    )
    height, width = family.row.size
    sized = {"rollout": {"height": height, "width": width, "num_frames": family.row.num_frames}}
    if family.row.sources > 1:
        config["data"] = several_sources(family.row, folder)
    return merge(merge({**config, "algorithm": {"recipe": recipe}}, sized), overrides)


def several_sources(row: Row, folder: Path) -> dict[str, Any]:
    """The data section of prompts with as many source images each as the family takes."""
    for number in range(row.sources):
        pixels = np.zeros((*row.size, 3), np.uint8)
        pixels[:, 4 * number :] = 255 - 60 * number
        Image.fromarray(pixels).save(folder / f"{number}.png")
    sources = [f"{number}.png" for number in range(row.sources)]
    lines = [json.dumps({"prompt": f'write "{letter}"', "source_image": sources}) for letter in "ABCD"]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return {
        "data_type": "prompts",
        "train_path": str(path),
        "eval_path": str(path),
        "max_source_images": row.sources,
    }


@dataclass
class Watched:
    """What became of a model's parameters."""

    model: Any = None
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    reached: list[dict[str, float]] = field(default_factory=list)
    """Parameters with a gradient other than zero, by iteration: its largest element."""

    def changed(self) -> set[str]:
        """Parameters that are not what they were."""
        return {name for name, parameter in self.parameters().items() if not torch.equal(parameter, self.before[name])}

    def parameters(self) -> dict[str, nn.Parameter]:
        """All of the pipeline's, by component and name."""
        return {
            f"{component}.{name}": parameter
            for component, module in self.model.components.items()
            for name, parameter in module.named_parameters()
        }


def run_watched(config: dict[str, Any]) -> tuple[Path, Watched]:
    """Runs the task and looks at what its updates do to the weights."""
    task, watched = load_task(rl_task(config["algorithm"]["recipe"])), Watched()
    build, update = task.build_actor, task.update_policy

    def build_watched(*arguments: Any, **prompts: Any) -> Any:
        actor = build(*arguments, **prompts)
        watched.model = actor.model
        watched.before = {name: parameter.detach().clone() for name, parameter in watched.parameters().items()}
        return actor

    def update_watched(*arguments: Any) -> Any:
        reached: dict[str, float] = {}

        def note(parameter: torch.Tensor, name: str) -> None:
            if parameter.grad is not None and parameter.grad.any():
                reached[name] = float(parameter.grad.abs().max())

        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(note, name=name))
            for name, parameter in watched.parameters().items()
            if parameter.requires_grad
        ]
        metrics = update(*arguments)
        watched.reached.append(reached)
        for hook in hooks:
            hook.remove()
        return metrics

    task.build_actor, task.update_policy = build_watched, update_watched
    return run_task_here(task, config), watched


@pytest.mark.parametrize(("family", "recipe"), cells())
def test_two_iterations(family: str, recipe: str, family_of: Callable[[str], Family], tmp_path: Path) -> None:
    tiny = family_of(family)
    run, watched = run_watched(config_of(recipe, tiny, tmp_path))

    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert [line["updates"] for line in lines] == [1, 1]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rows"] > 0 and line["grad_norm"] > 0
        assert line.get("ratio/replay_error", 0) <= (ROUNDING if tiny.row.exact else 1e-6)
        if "ratio/mean" in line:
            assert abs(line["ratio/mean"] - 1) + line["ratio/approx_kl"] <= (ROUNDING if tiny.row.exact else 1e-6)

    assert_gradients_where_they_belong(watched, tiny.row)
    adapter, base = run / "hf_ckpt", tiny.velocity_of_diffusers(watched.model)
    changed = tiny.velocity_of_diffusers(watched.model, adapter)
    torch.testing.assert_close(changed, tiny.velocity(watched.model), atol=5e-5, rtol=1e-4)
    assert (changed - base).abs().max() > 1e-5
    assert torch.equal(tiny.velocity_of_diffusers(watched.model), base)


def assert_gradients_where_they_belong(watched: Watched, row: Row) -> None:
    """Adapters alone move, just when they have gradients, and all of them that can matter have some."""
    model, parameters = watched.model, watched.parameters()
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {f"{model.denoiser_name}.{name}" for name in trainable_parameters(model.denoiser)}
    assert all("lora_" in name for name in trained)
    assert all(parameter.grad is None for name, parameter in parameters.items() if name not in trained)
    first, second = watched.reached
    changed = watched.changed()
    assert changed <= first.keys() | second.keys()
    unmoved = (first.keys() | second.keys()) - changed
    largest = max([*first.values(), *second.values()])
    # Adam's epsilon leaves of a tiny gradient a step below the parameter's rounding
    assert all(max(first.get(name, 0), second.get(name, 0)) < 1e-6 * largest for name in unmoved)
    parts = model.split_denoiser(model.denoiser)
    prefixes = [model.denoiser_name] if len(parts) == 1 else [f"{model.denoiser_name}.{part}" for part in parts]
    used = 0
    for prefix in prefixes:  # a part that no trained noise level needs is left alone; a first update moves B, not A
        of_part = {name for name in trained if name.startswith(f"{prefix}.")}
        if of_part & first.keys() and of_part & second.keys():
            assert {
                name for name in of_part - first.keys() - second.keys() if not re.search(row.never_used, name)
            } == set()
            used += 1
    assert used > 0


def test_the_quick_cells_cover_families_and_recipes() -> None:
    quick = quick_cells()
    assert {recipe for _, recipe in quick} == set(DIFFUSION_RECIPES)
    assert {family for family, _ in quick} == {name for name, row in ROWS.items() if not row.brief}
    assert len(quick) <= 28, "in every run; the others are slow"


def test_a_reference_that_is_renewed(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    algorithm = {"reference": {"type": "refresh", "every": 2}}
    config = config_of("flow_grpo", family_of("sd3"), tmp_path, algorithm=algorithm, train={"max_steps": 4})
    lines = read_jsonl(run_task_here(rl_task(config["algorithm"]["recipe"]), config) / "metrics.jsonl")[1:]
    assert [line["kl/reference"] > 0 for line in lines] == [False, True, False, True]


def test_advantages_that_look_at_every_reward(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    algorithm = {"advantage": {"type": "gdpo"}}
    config = config_of("diffusion_nft", family_of("sd3"), tmp_path, algorithm=algorithm, train={"max_steps": 1})
    watched = {"type": "jpeg_incompressibility", "evaluation_only": True}
    config["reward"] = {"rewards": [{"type": "brightness"}, {"type": "jpeg_compressibility", "weight": 0.5}, watched]}
    line = read_jsonl(run_task_here(rl_task(config["algorithm"]["recipe"]), config) / "metrics.jsonl")[1]
    assert line["advantage/abs_mean"] > 0 and math.isfinite(line["loss/policy"])


def test_kinds_are_shown_by_what_is_logged(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    config = config_of("diffusion_nft", family_of("sd3"), tmp_path, train={"max_steps": 1})
    line = read_jsonl(run_task_here(rl_task(config["algorithm"]["recipe"]), config) / "metrics.jsonl")[1]
    assert "nft/old_distance" in line and "kl/reference" in line and "ratio/replay_error" not in line
    assert line["rows"] == 8 * 9, "samples x noise levels"


def test_the_documentation_names_every_recipe_and_metric() -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rl_diffusion.md", "metrics.md"))
    assert [name for name in DIFFUSION_RECIPES if f"| `{name}` |" not in text] == []
    files = [
        path for path in (ROOT / "sfumato" / "algorithms").rglob("*.py") if not path.name.startswith(("token_", "row_"))
    ]
    sources = [file.read_text(encoding="utf-8") for file in files]
    logged = {
        name
        for source in [*sources, (ROOT / "tasks" / "rl_diffusion.py").read_text()]
        for name in re.findall(r'"([a-z]+/[a-z_]+)"', source)
    }
    assert len(logged) > 15 and {name for name in logged if f"`{name}`" not in text and "eval" not in name} == set()
