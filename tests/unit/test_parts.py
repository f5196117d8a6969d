"""Parts of algorithms: what they are when nothing is given, and which values they refuse.

Runs that say nothing rest on the defaults, and papers give them: whoever changes one changes ``parts.yaml`` too, and
sees it.
"""

import dataclasses
from pathlib import Path

import pytest
import yaml

from sfumato.config.base import Variant, find_variants

KINDS = {
    "advantages": "sfumato.algorithms.advantages",
    "combinations": "sfumato.rewards.scoring.combinations",
    "engines": "sfumato.rollout.engines",
    "kinds": "sfumato.rollout.kinds",
    "text_formats": "sfumato.data.text.formats",
    "text_prompt_formats": "sfumato.data.text.prompt_formats",
    "decay": "sfumato.algorithms.decay",
    "dynamics": "sfumato.algorithms.dynamics",
    "forward_kl": "sfumato.algorithms.forward_kl",
    "forward_process": "sfumato.algorithms.forward_process",
    "kl": "sfumato.algorithms.kl",
    "objectives": "sfumato.algorithms.objectives",
    "off_policy": "sfumato.algorithms.off_policy",
    "solvers": "sfumato.algorithms.solvers",
    "timesteps": "sfumato.algorithms.timesteps",
    "token_advantages": "sfumato.algorithms.token_advantages",
    "token_kl": "sfumato.algorithms.token_kl",
    "token_objectives": "sfumato.algorithms.token_objectives",
    "reward_gradients": "sfumato.algorithms.reward_gradients",
    "windows": "sfumato.algorithms.windows",
}
EXPECTED = yaml.safe_load((Path(__file__).parent / "parts.yaml").read_text(encoding="utf-8"))


def defaults_of(cls: type) -> dict:
    """Fields that may be left out, and their values, as YAML would hold them."""
    results = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            results[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            results[field.name] = field.default
        if dataclasses.is_dataclass(results.get(field.name)):
            part = results[field.name]
            results[field.name] = {"type": part.type, **dataclasses.asdict(part)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in results.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_what_they_were(kind):
    results = {name: defaults_of(cls) for name, cls in find_variants(KINDS[kind]).items()}
    assert results == EXPECTED[kind]


def test_every_kind_of_part_is_looked_at():
    from tests.unit.test_config import SCHEMAS, fields_of

    sources = {
        variant.source for schema in SCHEMAS for _, variant, _, _ in fields_of(schema) if isinstance(variant, Variant)
    }
    assert sources - {"sfumato.rewards"} == set(KINDS.values())


BOUNDS = [  # kind, type, field, values that are taken, values beyond
    ("advantages", "best_worst", "top", [1], [0]),
    ("advantages", "best_worst", "bottom", [1], [0]),
    ("reward_gradients", "last", "k", [1], [0]),
    ("reward_gradients", "random_last", "max_k", [1], [0]),
    ("reward_gradients", "predicted", "last", [1], [0]),
    ("decay", "constant", "value", [0.0, 1.0], [-0.01, 1.01]),
    ("decay", "linear", "first", [0.0, 1.0], [-0.01, 1.01]),
    ("decay", "linear", "limit", [0.0, 1.0], [-0.01, 1.01]),
    ("decay", "linear", "slope", [0.0], [-0.01]),
    ("decay", "refresh", "every", [1], [0]),
    ("decay", "warm_up", "limit", [0.0, 0.99], [-0.01, 1.0]),
    ("dynamics", "cps", "noise_level", [0.01, 1.0], [0.0, 1.01]),
    ("dynamics", "dance", "noise_level", [0.01], [0.0]),
    ("dynamics", "ddim", "eta", [0.01, 1.0], [0.0, 1.01]),
    ("dynamics", "sde", "noise_level", [0.01], [0.0]),
    ("forward_kl", "velocity_mse", "floor", [0.0, 0.0001], [-1e-6, 0.00011]),
    ("forward_process", "awm", "advantage_clip", [0.1], [0.0]),
    ("forward_process", "awm", "ema_coef", [0.0], [-0.1]),
    ("forward_process", "awm", "power", [0.1], [0.0]),
    ("forward_process", "crd", "advantage_clip", [0.1], [0.0]),
    ("forward_process", "crd", "beta", [0.1], [0.0]),
    ("forward_process", "crd", "temperature", [0.1], [-0.1]),
    ("forward_process", "dgpo", "beta", [0.1], [0.0]),
    ("forward_process", "dpo", "beta", [0.1], [0.0]),
    ("forward_process", "dpo", "label_smoothing", [0.0, 0.49], [-0.01, 0.5]),
    ("objectives", "dppo", "kl_threshold", [1e-9], [0.0]),
    ("forward_process", "nft", "advantage_clip", [0.1], [0.0]),
    ("forward_process", "nft", "beta", [0.1], [0.0]),
    ("forward_process", "rwr", "temperature", [0.1], [0.0]),
    ("off_policy", "decoupled", "floor", [0.0, 1.0], [-0.01, 1.01]),
    ("off_policy", "kl_rejection", "cap", [1.0], [0.99]),
    ("off_policy", "kl_rejection", "max_kl", [0.01], [0.0]),
    ("off_policy", "rejection", "max_ratio", [1.0], [0.99]),
    ("off_policy", "rejection", "min_ratio", [0.0, 1.0], [-0.01, 1.01]),
    ("timesteps", "logit_normal", "num", [1], [0]),
    ("timesteps", "logit_normal", "shift", [0.01], [0.0]),
    ("timesteps", "logit_normal", "std", [0.01], [0.0]),
    ("timesteps", "sampler_grid", "first", [0], [-1]),
    ("timesteps", "sampler_grid", "fraction", [0.01, 1.0], [0.0, 1.01]),
    ("timesteps", "sampler_grid", "num", [1], [0]),
    ("timesteps", "uniform", "high", [0.01, 1.0], [0.0, 1.01]),
    ("timesteps", "uniform", "low", [0.0, 0.99], [-0.01, 1.0]),
    ("timesteps", "uniform", "num", [1], [0]),
    ("timesteps", "uniform", "shift", [0.01], [0.0]),
    ("token_advantages", "gae", "gamma", [0.0, 1.0], [-0.01, 1.01]),
    ("token_advantages", "gae", "lam", [0.0, 1.0], [-0.01, 1.01]),
    ("token_advantages", "returns", "gamma", [0.0, 1.0], [-0.01, 1.01]),
    ("token_kl", "token", "clamp", [0.01, None], [0.0]),
    ("token_kl", "token", "coef", [0.0], [-0.01]),
    ("token_kl", "token", "log_ratio_clamp", [0.01, None], [0.0]),
    ("token_objectives", "cispo", "clip_range", [0.01, 1.0], [0.0]),
    ("token_objectives", "cispo", "clip_range_high", [0.01], [0.0]),
    ("token_objectives", "cispo", "log_ratio_clamp", [0.01, None], [0.0]),
    ("token_objectives", "gmpo", "clip_range", [0.01], [0.0]),
    ("token_objectives", "gspo", "clip_range", [0.01], [0.0]),
    ("token_objectives", "gspo", "clip_range_high", [0.01, None], [0.0]),
    ("token_objectives", "gspo", "dual_clip", [1.01, None], [1.0]),
    ("token_objectives", "ppo_clip", "clip_range", [0.01], [0.0]),
    ("token_objectives", "ppo_clip", "dual_clip", [1.01, None], [1.0]),
    ("token_objectives", "ppo_clip", "log_ratio_clamp", [0.01, None], [0.0]),
    ("token_objectives", "ppo_clip", "max_drift", [0.01, None], [0.0]),
    ("token_objectives", "sapo", "log_ratio_clamp", [0.01, None], [0.0]),
    ("token_objectives", "sapo", "tau_neg", [0.01], [0.0]),
    ("token_objectives", "sapo", "tau_pos", [0.01], [0.0]),
    ("windows", "random", "range", [(0, 3)], [(0, 2), (-1, 3)]),
    ("windows", "random", "size", [1, 5], [0, 6]),
    ("windows", "sliding", "iters_per_group", [1], [0]),
    ("windows", "sliding", "range", [(0, 4)], [(4, 4), (-1, 4)]),
    ("windows", "sliding", "size", [1], [0]),
    ("windows", "subset", "among", [(0, 1)], [(-1, 1), (1, 1), ()]),
    ("windows", "subset", "size", [1], [0]),
]


@pytest.mark.parametrize(("kind", "name", "field", "taken", "beyond"), BOUNDS)
def test_values_beyond_a_bound_are_refused(kind, name, field, taken, beyond):
    cls = find_variants(KINDS[kind])[name]
    for value in taken:
        assert getattr(cls(**{field: value}), field) == value
    for value in beyond:
        with pytest.raises(ValueError, match=r"\w"):
            cls(**{field: value})
