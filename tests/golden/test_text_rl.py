"""RL of language models against what verl, slime, OpenRLHF, ROLL, AReaL and TRL compute (``data/text_rl.json``).

Every case is tested here, or stands in ``LISTED`` with the reason. Inputs are padded matrices; what is tested takes
the rows of their masks, flattened. Where a convention differs, the test says how one turns into the other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sfumato.algorithms.advantages import GroupAdvantage, LeaveOneOut
from sfumato.algorithms.aggregation import row_weights
from sfumato.algorithms.off_policy import Decoupled, KLRejection, OffPolicy, Rejection
from sfumato.algorithms.preference import preference_loss
from sfumato.algorithms.row_losses import value_loss
from sfumato.algorithms.sequences import Sequences
from sfumato.algorithms.token_advantages import (
    GAE,
    Returns,
    SampleAdvantage,
    discounted_returns,
    gae,
    token_rewards,
    whitened,
)
from sfumato.algorithms.token_kl import TokenKL
from sfumato.algorithms.token_objectives import (
    CISPO,
    GMPO,
    GSPO,
    SAPO,
    PolicyGradient,
    PPOClip,
    TokenObjective,
    sequence_log_ratio,
)
from sfumato.parallel.bin_packing import pack

FILE = json.loads((Path(__file__).parent / "data" / "text_rl.json").read_text(encoding="utf-8"))
INPUTS = {name: torch.tensor(value, dtype=torch.float64) for name, value in FILE["inputs"].items()}
INDEX = torch.tensor(FILE["inputs"]["index"])
CASES = {case["id"]: case for case in FILE["cases"]}
TOKENS = {"mode": "token-mean"}

LISTED = {
    r"verl/adv/opo/": "OPO's baseline weighs rewards by length: no advantage of this library",
    r"verl/adv/grpo_passk/": "the best against the second best of a group: no advantage of this library",
    r"verl/adv/remax/": "ReMax draws a greedy answer for each prompt: no advantage of this library",
    r"verl/adv/gdpo_single/": "verl whitens GDPO over tokens, so that long answers count more; here over samples",
    r"verl/policy/(dppo_tv|dppo_kl)/": "DPPO of tokens needs their probabilities, not only the ratios",
    r"verl/policy/dro/": "DRO: no objective of this library",
    r"verl/policy/(kl_cov|clip_cov)/": "picks tokens by their covariance with the advantage: no objective here",
    r"verl/rollout_corr/.*bn=True": "weights over the mean of the whole batch: no choice of this library",
    r"trl/grpo_loss/loss_type=(vespo|luspo)": "no objective of this library",
    r"trl/.*top_entropy_quantile": "a mask by the quantile of entropies: not a choice of this library",
    r"trl/dpo/(nca_pair|bco_pair|aot|aot_unpaired|apo_zero|apo_down|discopop|exo_pair|sft|robust|sigmoid_norm)\b": (
        "no preference loss of this library"
    ),
    r"trl/dpo/.*(f_divergence_type|ld_alpha|use_weighting)": "no preference loss of this library",
    r"trl/pack/": "how documents of pretraining fill rows, not a loss; rows here hold whole documents, or their pieces",
    r"verl/seqlen/.*equal=True": "parts of equally many samples: here they are equal by cost alone",
}


def listed(name: str) -> bool:
    return any(re.match(pattern, name) for pattern in LISTED)


TESTED: set[str] = set()


def some(*patterns: str) -> pytest.MarkDecorator:
    """The cases of these names that are not listed."""
    chosen = [
        case
        for name, case in CASES.items()
        if any(re.match(pattern, name) for pattern in patterns) and not listed(name)
    ]
    assert chosen
    TESTED.update(case["id"] for case in chosen)
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def close(actual: object, expected: object, case: dict) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    rtol, atol = (1e-4, 1e-6) if case["dtype"] == "float32" else (1e-6, 1e-9)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


class Padded:
    """The rows of a mask ``[B, T]``, all of them or those that count."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.matrix = mask.bool()
        self.mask = self.matrix.flatten()
        size, length = self.matrix.shape
        self.sequences = Sequences.of_lengths(torch.full((size,), length))
        self.lengths = self.sequences.spread(self.sequences.counts(self.mask))
        self.num_tokens = float(self.mask.sum())
        self.num_sequences = float(self.matrix.any(1).sum())

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """``[R]``; what stands outside the mask is NaN, so that nothing of it can be used."""
        values = values if values.ndim == 2 else values[:, None].expand(self.matrix.shape)
        return values.masked_fill(~self.matrix, math.nan).flatten()

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(self.matrix.shape)

    def aggregated(self, losses: torch.Tensor, mode: str, **counts: float) -> torch.Tensor:
        counts = {"num_tokens": self.num_tokens, "num_sequences": self.num_sequences, "max_length": 6} | counts
        return (row_weights(mode, self.lengths, **counts) * losses * self.mask).sum()


def padded(case: dict) -> Padded:
    names = ("response_mask", "loss_mask", "action_mask", "mask")
    return Padded(INPUTS[next(case["inputs"][name] for name in names if name in case["inputs"])])


# Aggregation


@some("verl/agg/", "roll/agg/")
def test_aggregation(case: dict) -> None:
    """verl multiplies by the ranks, over which gradients are then averaged; token-sum is token-mean of one token.

    ROLL's token-mean leaves the mask out, its -norm is no mean over sequences, and its means over sequences count
    those without tokens, too.
    """
    rows, params = padded(case), dict(case["params"])
    mode = params.pop("loss_agg_mode")
    ranks = params.get("dp_size", 1)
    counts = {
        name: params[parameter]
        for name, parameter in (
            ("num_tokens", "batch_num_tokens"),
            ("num_sequences", "global_batch_size"),
            ("max_length", "loss_scale_factor"),
        )
        if params.get(parameter) is not None
    }
    if mode == "token-sum":
        mode, counts["num_tokens"] = "token-mean", 1.0
    losses = INPUTS["loss_mat"].clone().requires_grad_(True)
    row_losses, expected = rows.rows(losses), torch.tensor(case["outputs"]["loss"])
    if case["id"].startswith("roll/") and mode == "token-mean":
        close(losses.sum() / rows.num_tokens, expected, case)  # what no mean over the mask can be
        assert abs(float(rows.aggregated(row_losses.detach().nan_to_num(), mode)) - float(expected)) > 1e-4
        return
    if case["id"].startswith("roll/") and mode == "seq-mean-token-sum-norm":
        expected = expected / len(rows.matrix)
    elif case["id"].startswith("roll/"):
        counts["num_sequences"] = len(rows.matrix)
    actual = rows.aggregated(row_losses.nan_to_num(), mode, **counts) * ranks
    close(actual, expected, case)
    if "grad_loss_mat" in case["outputs"]:
        actual.backward()
        close(losses.grad, case["outputs"]["grad_loss_mat"], case)


# Policy losses


def log_ratio_rows(rows: Padded, new: str = "logp", old: str = "old_logp") -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities with gradients, and rows of their log-ratio."""
    log_probs = INPUTS[new].clone().requires_grad_(True)
    return log_probs, rows.rows(log_probs - INPUTS[old])


def check_loss(case: dict, loss: torch.Tensor, log_probs: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    """A loss and its gradient, which is 0 outside the mask."""
    close(loss, case["outputs"]["loss"] if expected is None else expected, case)
    loss.backward()
    name = next(output for output in case["outputs"] if output.startswith("grad_"))
    close(log_probs.grad, case["outputs"][name], case)


def check_score_loss(case: dict, loss: torch.Tensor, log_probs: torch.Tensor) -> None:
    """The same where others return -w A log p as value: its gradient times log p."""
    loss.backward()
    name = next(output for output in case["outputs"] if output.startswith("grad_"))
    close(log_probs.grad, case["outputs"][name], case)
    close((log_probs.grad * log_probs).sum(), case["outputs"]["loss"], case)


def mean_of(case: dict, rows: Padded, losses: torch.Tensor) -> torch.Tensor:
    """verl's geo_mean has one weight for a sequence, the geometric mean, and counts sequences without tokens."""
    kind, weights, counts = case["id"].split("/")[2], case["inputs"].get("rollout_is_weights"), {}
    if kind == "geo_mean":
        counts["num_sequences"] = len(rows.matrix)
    if weights:  # corrections are factors of the losses
        logs = rows.rows(INPUTS[weights]).log()
        part = Decoupled("sequence_mean" if kind == "geo_mean" else "token", None)
        losses = losses * part.correct(logs, rows.sequences, rows.mask).weights
    mode = "seq-mean-token-mean" if kind in ("gspo", "sapo", "geo_mean") else case["params"]["loss_agg_mode"]
    return rows.aggregated(losses, mode, **counts)


def of_verl(case: dict) -> TokenObjective:
    params = case["params"]
    ranges = {"clip_range": params.get("clip_ratio_low"), "clip_range_high": params.get("clip_ratio_high")}
    kinds: dict[str, Callable[[], TokenObjective]] = {
        "vanilla": lambda: PPOClip(**ranges, dual_clip=params["clip_ratio_c"]),
        "gspo": lambda: GSPO(**ranges),
        "sapo": lambda: SAPO(tau_pos=params["tau_pos"], tau_neg=params["tau_neg"]),
        "cispo": lambda: CISPO(**ranges),
        "gpg": PolicyGradient,
        "geo_mean": lambda: GMPO(**ranges),
    }
    return kinds[case["id"].split("/")[2]]()


@some("verl/policy/")
def test_policy_losses_of_verl(case: dict) -> None:
    rows, objective = padded(case), of_verl(case)
    log_probs, log_ratio = log_ratio_rows(rows)
    advantages = rows.rows(INPUTS[case["inputs"]["advantages"]])
    losses, stats = objective.loss(log_ratio, advantages, rows.mask, rows.sequences)
    check = check_score_loss if objective.type in ("cispo", "policy_gradient") else check_loss
    check(case, mean_of(case, rows, losses), log_probs)
    metrics = case["outputs"]["metrics"]
    if "actor/pg_clipfrac" in metrics and objective.type not in ("sapo", "gmpo"):  # no clip; counted otherwise
        clipped = stats["ratio/clipped"] if objective.type != "cispo" else None
        clipped = stats["ratio/clipped_high"] + stats["ratio/clipped_low"] if clipped is None else clipped
        close(clipped / rows.num_tokens, metrics["actor/pg_clipfrac"], case)
        dual = stats.get("ratio/dual_clipped", torch.zeros(()))
        close(dual / rows.num_tokens, metrics["actor/pg_clipfrac_lower"], case)


@some("slime/policy/")
def test_policy_losses_of_slime(case: dict) -> None:
    params, rows = case["params"], Padded(torch.ones_like(INPUTS["mask"]))
    objective = PPOClip(params["eps_clip"], params["eps_clip_high"], dual_clip=params["eps_clip_c"])
    log_probs, log_ratio = log_ratio_rows(rows)
    losses, stats = objective.loss(log_ratio, INPUTS["adv_tok"].flatten(), rows.mask, rows.sequences)
    close(rows.back(losses.detach()), case["outputs"]["pg_losses"], case)
    close(stats["ratio/clipped"], torch.tensor(case["outputs"]["clipfrac"]).sum(), case)
    (losses * INPUTS["mask"].flatten()).sum().backward()
    close(log_probs.grad, case["outputs"]["grad_log_probs"], case)


@some("openrlhf/policy/")
def test_policy_losses_of_openrlhf(case: dict) -> None:
    """icepop leaves out by token; seq-mask-tis by geometric mean of sequences, with ratios of tokens uncut."""
    params, rows = case["params"], padded(case)
    low, high = params.get("clip_eps_low", 0.2), params.get("clip_eps_high", 0.2)
    objective: TokenObjective = PPOClip(low, high, dual_clip=params.get("dual_clip"))
    if params.get("policy_loss_type") == "gspo":
        objective = GSPO(low, high, None, "sequence", params.get("dual_clip"))
    log_probs, log_ratio = log_ratio_rows(rows)
    losses, _ = objective.loss(log_ratio, rows.rows(INPUTS["adv_tok"]), rows.mask, rows.sequences)
    if params.get("enable_vllm_is_correction"):
        least, most = params["vllm_is_truncated_threshold"]
        part: OffPolicy = {
            "tis": Decoupled("token", most, least),
            "icepop": Rejection("token", least, most, cap=None),
            "seq-mask-tis": Rejection("sequence_mean", least, most, cap=None),
        }[params["vllm_is_correction_type"]]
        apart = rows.rows(INPUTS["old_logp"] - INPUTS["rollout_logp"])
        losses = losses * part.correct(apart, rows.sequences, rows.mask).weights
    by_token = params.get("token_level_loss", True) and params.get("policy_loss_type") != "gspo"
    check_loss(case, rows.aggregated(losses, "token-mean" if by_token else "seq-mean-token-mean"), log_probs)


@some("areal/ppo_actor/", "areal/sapo", "areal/cispo")
def test_policy_losses_of_areal(case: dict) -> None:
    """token-mean for every level; with these settings the policy that drew the tokens has no part."""
    params, rows = case["params"], padded(case)
    log_probs, log_ratio = log_ratio_rows(rows)
    advantages = rows.rows(INPUTS["adv_tok"])
    ranges = (params.get("eps_clip"), params.get("eps_clip_higher"))
    objective: TokenObjective
    if "sapo" in case["id"]:
        objective = SAPO(params["tau_pos"], params["tau_neg"])
    elif "cispo" in case["id"]:
        objective = CISPO(*ranges)
    elif params.get("importance_sampling_level") == "sequence":
        objective = GSPO(*ranges, None, "sequence", params.get("c_clip"))
    else:
        objective = PPOClip(*ranges, dual_clip=params.get("c_clip"))
    losses, _ = objective.loss(log_ratio, advantages, rows.mask, rows.sequences)
    check = check_score_loss if objective.type == "cispo" else check_loss
    check(case, rows.aggregated(losses, "token-mean"), log_probs)


@some("trl/grpo_loss/")
def test_policy_losses_of_trl(case: dict) -> None:
    params, rows, inputs = case["params"], padded(case), case["inputs"]
    kind, low = params["loss_type"], params["epsilon_low"]
    high = params.get("epsilon_high", low)
    gradient = params.get("importance_sampling_level", "token")
    objective: TokenObjective = PPOClip(low, high, None, params.get("delta"), params.get("off_policy_mask_threshold"))
    if kind == "sapo":
        taus = (params.get("sapo_temperature_pos", 1.0), params.get("sapo_temperature_neg", 1.05))
        objective = SAPO(*taus, level=gradient, log_ratio_clamp=None)
    elif kind == "cispo":
        objective = CISPO(1.0, high, "absolute", None)
    elif gradient == "sequence":
        objective = GSPO(low, high, None, "sequence", params.get("delta"))
    log_probs, log_ratio = log_ratio_rows(rows)
    losses, _ = objective.loss(log_ratio, rows.rows(INPUTS[inputs["advantages"]]), rows.mask, rows.sequences)
    if params.get("beta"):
        kl = TokenKL(params["beta"], "k3", importance_weighted=params.get("use_bias_correction_kl", True))
        if gradient == "sequence":  # weighted by the sequence's ratio
            log_ratio = sequence_log_ratio(log_ratio, rows.mask, rows.sequences, "sequence")
        penalty = kl.penalty(rows.rows(log_probs), rows.rows(INPUTS["ref_logp"]), log_ratio)
        losses = losses + kl.coef * torch.where(rows.mask, penalty, 0.0)
    mode = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    counts = {"max_length": params["max_completion_length"]}
    if kind in ("dapo", "cispo"):
        counts["num_tokens"] = params["num_items_in_batch"] / params["num_processes"]
    mode = mode.get(kind, "token-mean")
    loss = rows.aggregated(losses, mode, **counts) / params["grad_accum"]
    if params.get("entropy_bonus_enabled"):
        loss = loss - params["entropy_coef"] * rows.aggregated(rows.rows(INPUTS["entropies"]).nan_to_num(), mode)
    (check_score_loss if kind == "cispo" else check_loss)(case, loss, log_probs)


# Advantages of samples


@some("verl/adv/grpo", "verl/adv/rloo")
def test_advantages_of_verl(case: dict) -> None:
    """A group of one has no advantage here; there it has its reward (but 0 in rloo_vectorized).

    A group of equals has 0; in grpo_vectorized rounding of its mean in float32 is divided by epsilon.
    """
    params, rows = case["params"], padded(case)
    rewards = (INPUTS[case["inputs"]["token_level_rewards"]]).sum(1)
    part = LeaveOneOut(clip=None)
    if "/grpo" in case["id"]:
        std = "group" if params["norm_adv_by_std_in_grpo"] else "none"
        part = GroupAdvantage(std, None, 1, params["epsilon"])
    actual = part.compute(rewards, INDEX)
    single = INDEX == 3
    assert (actual.values[single] == 0).all() and actual.no_spread[single].all() and actual.no_spread[INDEX == 1].all()
    tokens = SampleAdvantage().compute(actual.values.double(), rows.sequences, rows.mask).values
    spread = ~actual.no_spread[:, None].expand(rows.matrix.shape) & rows.matrix
    expected = torch.tensor(case["outputs"]["advantages"], dtype=torch.float64)
    torch.testing.assert_close(rows.back(tokens)[spread], expected[spread], rtol=1e-6, atol=1e-7)  # float32 here


@some("trl/grpo_adv/", "trl/rloo_adv/")
def test_advantages_of_trl(case: dict) -> None:
    params = case["params"]
    rewards = torch.tensor(
        [[math.nan if reward is None else reward for reward in row] for row in case["inputs"]["rewards"]]
    )
    weights = torch.tensor(params["reward_weights"] or [1.0] * len(rewards))
    ids = torch.arange(rewards.shape[1]) // params["num_generations"]
    std = {"group": "group", "batch": "global", "none": "none"}[params.get("scale_rewards", "none")]
    part: object = GroupAdvantage(std, None, 1, params.get("eps", 1e-4))
    if "rloo" in case["id"]:
        part = LeaveOneOut(None, "global" if params["normalize_advantages"] else "none", 1)
    if params.get("multi_objective_aggregation") == "normalize_then_sum":
        parts = [part.compute(row, ids).values * weight for row, weight in zip(rewards, weights, strict=True)]
        result = GroupAdvantage("global", None, 1, 1e-4).compute(sum(parts), ids).values  # GDPO with TRL's epsilons
        close(result, case["outputs"]["advantages"], case)
        return
    result = part.compute((rewards.double() * weights[:, None]).sum(0), ids).values
    close(result, case["outputs"]["advantages"], case)


# Advantages of tokens


def tokens_of(case: dict, part: object) -> tuple[Padded, torch.Tensor, torch.Tensor]:
    """What a part makes of dense rewards: all but the last token's reward are penalties with the other sign."""
    rows = padded(case) if "response_mask" in case["inputs"] else Padded(torch.ones_like(INPUTS["mask"]))
    dense = INPUTS[case["inputs"]["token_level_rewards"]]
    values = INPUTS.get(case["inputs"].get("values"))
    result = part.compute(
        torch.zeros(len(dense), dtype=torch.float64),
        rows.sequences,
        rows.mask,
        -rows.rows(dense),
        None if values is None else rows.rows(values),
    )
    return rows, rows.back(result.values), rows.back(result.returns)


def check_tokens(case: dict, rows: Padded, advantages: torch.Tensor, returns: torch.Tensor) -> None:
    """At masked-in tokens; elsewhere ours are 0. ROLL computes in float32."""
    case = case | {"dtype": "float32"} if case["id"].startswith("roll/") else case
    for name, actual in (("advantages", advantages), ("returns", returns)):
        assert (actual[~rows.matrix] == 0).all()
        expected = torch.tensor(case["outputs"][name], dtype=torch.float64)
        close(actual[rows.matrix], expected[rows.matrix], case)


@some("verl/adv/reinforce_plus_plus/")
def test_returns_of_verl(case: dict) -> None:
    check_tokens(case, *tokens_of(case, Returns(gamma=case["params"]["gamma"])))


@some("verl/adv/gae/")
def test_gae_of_verl(case: dict) -> None:
    check_tokens(case, *tokens_of(case, GAE(gamma=case["params"]["gamma"], lam=case["params"]["lam"])))


@some("roll/gae", "roll/reinforce_return")
def test_returns_and_gae_of_roll(case: dict) -> None:
    params = case["params"]
    part = Returns(False, gamma=params["gamma"])
    if "gae" in case["id"]:
        part = GAE(False, gamma=params["gamma"], lam=params["lambd"])
    check_tokens(case, *tokens_of(case, part))


@some("slime/gae/")
def test_gae_of_slime(case: dict) -> None:
    rows = Padded(torch.arange(6) < INPUTS["lengths"][:, None])
    params = case["params"]
    dense, values = rows.rows(INPUTS["tlr_dense"]), rows.rows(INPUTS["values"])
    result = gae(dense, values, rows.sequences, rows.mask, params["gamma"], params["lambd"])
    returns = torch.where(rows.mask, result + values, 0.0)
    check_ragged(case, rows, {"advantages": rows.back(result), "returns": rows.back(returns)})


def check_ragged(case: dict, rows: Padded, actual: dict[str, torch.Tensor]) -> None:
    for name, values in actual.items():
        expected = torch.zeros(rows.matrix.shape, dtype=torch.float64)
        for row, numbers in enumerate(case["outputs"][name]):
            expected[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        close(values[rows.matrix], expected[rows.matrix], case)


@some("slime/reinforce_pp_returns/")
def test_returns_of_slime(case: dict) -> None:
    """slime discounts over masked-out tokens, too, which is the same with gamma 1 alone."""
    params, rows = case["params"], Padded(INPUTS["mask_holes"])
    penalties = params["kl_coef"] * rows.rows(INPUTS["logp"] - INPUTS["ref_logp"])
    every = Padded(torch.arange(6) < INPUTS["lengths"][:, None])
    rewards = token_rewards(INPUTS["adv_seq"], rows.sequences, rows.mask, penalties)
    result = discounted_returns(rewards, every.sequences, every.mask, params["gamma"])
    check_ragged(case, every, {"returns": every.back(result)})
    if params["gamma"] == 1.0:
        ours = Returns(False).compute(INPUTS["adv_seq"], rows.sequences, rows.mask, penalties).values
        torch.testing.assert_close(ours, torch.where(rows.mask, result, 0.0))


@some("verl/adv/reinforce_plus_plus_baseline/")
def test_reinforce_pp_baseline(case: dict) -> None:
    """verl takes a group of one as it is, with its reward."""
    rows, rewards = padded(case), INPUTS[case["inputs"]["token_level_rewards"]].sum(1)
    centred = GroupAdvantage("none", None).compute(rewards, INDEX).values.double()
    centred = torch.where(INDEX == 3, rewards, centred)
    actual = SampleAdvantage(whiten=True).compute(centred, rows.sequences, rows.mask).values
    expected = torch.tensor(case["outputs"]["advantages"], dtype=torch.float64)
    torch.testing.assert_close(rows.back(actual), expected * rows.matrix, rtol=1e-6, atol=1e-6)  # centred in float32


@some("verl/func/masked_whiten/")
def test_whitening(case: dict) -> None:
    rows = padded(case)
    actual = whitened(rows.rows(INPUTS["adv_var"]), rows.mask, shift_mean=case["params"]["shift_mean"])
    expected = torch.tensor(case["outputs"]["out"], dtype=torch.float64)
    close(rows.back(actual)[rows.matrix], expected[rows.matrix], case)


@some("openrlhf/value/")
def test_value_loss(case: dict) -> None:
    rows, values = padded(case), INPUTS["vpreds"].clone().requires_grad_(True)
    others = (rows.rows(INPUTS[name]) for name in ("values", "returns"))
    losses, _ = value_loss(rows.rows(values), *others, rows.mask, case["params"]["clip_eps"])
    check_loss(case, rows.aggregated(losses, "token-mean"), values)


# KL


@some("verl/kl/", "slime/kl/", "openrlhf/kl/", "roll/kl/")
def test_kl_estimates(case: dict) -> None:
    """Names and clamps of each framework."""
    name = next(iter(case["params"].values()))
    framework = case["id"].split("/")[0]
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name.rstrip("+"), name.rstrip("+"))
    clamps = {
        "verl": (20.0, 10.0) if estimator == "k3" else (None, None),
        "openrlhf": (None, 10.0),
        "slime": (None, 10.0) if name == "low_var_kl" else (None, None),
        "roll": (20.0, 10.0) if estimator == "k3" else (None, None),
    }[framework]
    kl = TokenKL(1.0, estimator, "loss", "k2" if name.endswith("+") else "estimator", False, *clamps)
    log_probs = INPUTS["logp"].clone().requires_grad_(True)
    result = kl.penalty(log_probs.flatten(), INPUTS["ref_logp"].flatten())
    tolerance = {"dtype": "float32"} if framework in ("slime", "openrlhf") else case  # they compute in float32
    close(result.reshape(log_probs.shape), case["outputs"]["kl"], tolerance)
    gradient = case["outputs"].get("grad_logprob") or case["outputs"].get("grad_log_probs")
    if gradient:
        result.sum().backward()
        close(log_probs.grad, gradient, tolerance)


# Corrections


@some("verl/rollout_corr/")
def test_corrections_of_verl(case: dict) -> None:
    params, rows = case["params"], padded(case)
    apart = rows.rows(INPUTS["old_logp"] - INPUTS["rollout_logp"])
    bounds = params.get("rollout_is_threshold", params.get("rollout_rs_threshold"))
    level, estimator = params.get("rollout_is"), "k1"
    if "rollout_rs" in params:
        level, _, estimator = params["rollout_rs"].rpartition("_")
        level = {"token": "token", "seq_sum": "sequence", "seq_mean": "sequence_mean"}[level]
    part: OffPolicy
    if estimator != "k1":
        part = KLRejection(level, estimator, float(bounds), None)
    elif isinstance(bounds, str):
        least, most = map(float, bounds.split("_"))
        part = Rejection(level, least, most, level, None)
    else:
        part = Decoupled(level, bounds)
    result = part.correct(apart, rows.sequences, rows.mask)
    if "rollout_rs" in params:
        close(rows.back((~result.rejected & rows.mask).double()), case["outputs"]["mask"], case)
        return
    close(rows.back(result.weights * rows.mask), case["outputs"]["weights"], {"dtype": "float32"})


# Preference


@some("trl/dpo/", "openrlhf/dpo/")
def test_dpo(case: dict) -> None:
    params, mask = case["params"], INPUTS["mask"]
    log_probs = INPUTS["logp"].clone().requires_grad_(True)
    sums = ((log_probs - INPUTS["ref_logp"]) * mask).sum(1)
    kind = params.get("loss_type", "ipo" if params.get("ipo") else "sigmoid")
    divides = kind == "ipo" and case["id"].startswith("trl")
    lengths = mask.sum(1) if divides else torch.ones(len(mask))
    result = preference_loss(
        sums[:5], sums[5:], params["beta"], kind, params.get("label_smoothing", 0.0), (lengths[:5], lengths[5:])
    ).mean()
    close(result, case["outputs"]["loss"], case)
    if "grad_log_prob" in case["outputs"]:
        result.backward()
        close(log_probs.grad, torch.tensor(case["outputs"]["grad_log_prob"]) * mask, case)


@some("verl/seqlen/")
def test_samples_are_shared_out_as_evenly(case: dict) -> None:
    """As many micro-batches as verl has parts, none of them larger than its largest."""
    lengths, parts = case["inputs"]["seqlen_list"], case["params"]["k_partitions"]
    result = pack(lengths, lengths, case["outputs"]["max_sum"], parts)
    assert sorted(sample for rank in result for members in rank for sample in members) == list(range(len(lengths)))
    assert [len(rank) for rank in result] == [1] * parts
    assert max(sum(lengths[sample] for sample in rank[0]) for rank in result) <= case["outputs"]["max_sum"]


def test_every_case_is_tested_or_listed_with_its_reason() -> None:
    assert sorted(set(CASES) - TESTED - {name for name in CASES if listed(name)}) == []
    assert not [pattern for pattern in LISTED if not any(re.match(pattern, name) for name in CASES)]
