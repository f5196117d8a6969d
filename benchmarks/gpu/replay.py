"""The replay error of Flow-GRPO and its relatives at the size of Stable Diffusion 3.5 medium, eager and in bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu import distances
from benchmarks.gpu.cells import Bound, Cell, Setting

RECIPES = ("flow_grpo", "flow_grpo_fast", "grpo_guard", "flow_cps", "mix_grpo", "dance_grpo", "dppo")

BOUNDS = (
    Bound(
        "share_of_bound",
        1.0,
        "this recipe's self-check would stop its run before the first update: widen algorithm.objective's clip range, "
        "or compute the policy in float32; algorithm.self_check false goes on with a ratio that is off by as much",
    ),
)


def cells(setting: Setting) -> dict[str, Cell]:
    recipes = RECIPES[:2] if setting.tiny else RECIPES
    return {recipe: partial(measure, recipe=recipe) for recipe in recipes}


def measure(setting: Setting, recipe: str) -> dict[str, Any]:
    return distances.measure_self_check(setting, "eager", recipe)
