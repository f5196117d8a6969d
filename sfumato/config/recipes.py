"""Recipes: published settings as presets of an RL algorithm's parts. Any field can be overridden.

Each entry gives its source; settings of model, batch and optimiser that belong to it stand in the YAML files of
``configs/rl``.
"""

from __future__ import annotations

from typing import Any

DEFAULT_RECIPE = "flow_grpo"

DIFFUSION_RECIPES: dict[str, dict[str, Any]] = {
    # Flow-GRPO, arXiv 2505.05470; flow_grpo config/grpo.py, general_ocr_sd3
    "flow_grpo": {
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "all"},
        "advantage": {"type": "group", "std": "global", "clip": 5.0},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-4},
        "kl": {"type": "flow_grpo", "coef": 0.04},
    },
    # Flow-GRPO-Fast: flow_grpo README and config/grpo.py, pickscore_sd3_fast family: a short window, no KL
    "flow_grpo_fast": {
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "random", "size": 3, "range": [0, 5]},
        "advantage": {"type": "group", "std": "global", "clip": 5.0},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-5},
        "kl": {"type": "none"},
    },
    # Flow-CPS, arXiv 2509.05952; flow_grpo config/grpo.py, geneval_sd3_fast_nocfg
    "flow_cps": {
        "dynamics": {"type": "cps", "noise_level": 0.8},
        "window": {"type": "random", "size": 3, "range": [0, 5]},
        "advantage": {"type": "group", "std": "global", "clip": 5.0},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-5},
        "kl": {"type": "none"},
    },
}
