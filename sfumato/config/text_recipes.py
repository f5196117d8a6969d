"""Recipes of RL of language models: published settings as presets of an algorithm's parts. Any field can be overridden.

Settings of model, batch and optimiser stand in the YAML files of ``configs/text_rl``.
"""

from __future__ import annotations

_PLAIN = {"kl": {"type": "token"}, "off_policy": {"type": "decoupled", "level": "token", "cap": 2.0}}
_KL_AS_REWARD = {"kl": {"type": "token", "coef": 0.001, "estimator": "k1", "where": "reward"}, "drop_no_spread": False}
_CLIP = {"type": "ppo_clip", "clip_range": 0.2}
_GROUP = {"type": "group", "std": "group", "ddof": 1, "eps": 1e-6, "clip": None}
_MEAN = {"type": "group", "std": "none", "clip": None}

TEXT_RECIPES: dict[str, dict[str, object]] = {
    # GRPO, arXiv 2402.03300: the mean over samples of their tokens' mean, KL k3 in the loss; coef 0.04 in the paper
    "grpo": {
        **_PLAIN,
        "advantage": _GROUP,
        "objective": _CLIP,
        "aggregation": "seq-mean-token-mean",
        "kl": {"type": "token", "coef": 0.001, "estimator": "k3"},
    },
    # Dr. GRPO, arXiv 2503.20783: no division by the standard deviation, nor by the length
    "dr_grpo": {
        **_PLAIN,
        "advantage": _MEAN,
        "objective": _CLIP,
        "aggregation": "seq-mean-token-sum-norm",
    },
    # DAPO, arXiv 2503.14476: clip-higher, token-level loss; with dynamic sampling (rollout.max_extra_groups) and
    # overlong shaping (reward overlong)
    "dapo": {
        **_PLAIN,
        "advantage": _GROUP,
        "objective": {"type": "ppo_clip", "clip_range": 0.2, "clip_range_high": 0.28},
        "aggregation": "token-mean",
    },
    # RLOO, arXiv 2402.14740: leave-one-out baseline, REINFORCE over the whole answer
    "rloo": {
        **_PLAIN,
        "advantage": {"type": "rloo", "clip": None},
        "objective": {"type": "policy_gradient"},
        "aggregation": "seq-mean-token-sum",
    },
    # REINFORCE++, arXiv 2501.03262: returns of tokens with a KL in the reward, whitened over the step
    "reinforce_pp": {
        **_PLAIN,
        "advantage": {"type": "raw"},
        "token_advantage": {"type": "returns"},
        "objective": _CLIP,
        "aggregation": "token-mean",
        **_KL_AS_REWARD,
    },
    # REINFORCE++-baseline, arXiv 2501.03262: the group's mean as a baseline, whitened over the step
    "reinforce_pp_baseline": {
        **_PLAIN,
        "advantage": _MEAN,
        "token_advantage": {"type": "sample", "whiten": True},
        "objective": _CLIP,
        "aggregation": "token-mean",
    },
    # PPO, arXiv 1707.06347, as for language models in arXiv 2203.02155: a critic, GAE with gamma and lambda 1 as in
    # verl and OpenRLHF, and a KL in the reward
    "ppo": {
        **_PLAIN,
        "advantage": {"type": "raw"},
        "token_advantage": {"type": "gae"},
        "objective": _CLIP,
        "aggregation": "token-mean",
        **_KL_AS_REWARD,
    },
    # On-policy distillation, arXiv 2306.13649 and 2306.08543: a token's advantage is how much likelier
    # algorithm.teacher finds it than the policy does; rewards are watched only
    "distillation": {
        **_PLAIN,
        "advantage": {"type": "raw"},
        "token_advantage": {"type": "distillation"},
        "objective": {"type": "policy_gradient"},
        "aggregation": "token-mean",
        "kl": {"type": "token", "coef": 1.0, "estimator": "k1", "where": "reward"},
        "drop_no_spread": False,
    },
    # GSPO, arXiv 2507.18071: the ratio of a whole sequence
    "gspo": {
        **_PLAIN,
        "advantage": _GROUP,
        "objective": {"type": "gspo"},
        "aggregation": "seq-mean-token-mean",
    },
    # CISPO, arXiv 2506.13585: the bounded ratio is a weight of the policy gradient
    "cispo": {
        **_PLAIN,
        "advantage": _GROUP,
        "objective": {"type": "cispo"},
        "aggregation": "token-mean",
    },
    # SAPO, arXiv 2511.20347: a soft gate in the place of the clip
    "sapo": {
        **_PLAIN,
        "advantage": _GROUP,
        "objective": {"type": "sapo"},
        "aggregation": "seq-mean-token-mean",
    },
}
