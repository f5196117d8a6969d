"""Reinforcement learning of language models in one process: tasks/rl_text.py."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfumato.config.load import load_config, merge
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.rollout.engines.vllm import VllmSettings
from sfumato.rollout.text import policy
from sfumato.rollout.text.packing import gather_token_values
from sfumato.runtime.update import Update
from sfumato.tracking.json_lines import read_jsonl
from tests.resumed import assert_same_run, resume_after_interrupt
from tests.tiny import (
    ROOT,
    load_task,
    run_task_here,
    tiny_text_config,
    tiny_text_rl_config,
    weights_in,
    write_config,
)


def values(folder: Path, name: str) -> list[float]:
    """A metric by step."""
    return [line[name] for line in read_jsonl(folder / "metrics.jsonl") if name in line]


QUICK = ("grpo", "ppo")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(text_recipe, marks=() if text_recipe in QUICK else pytest.mark.slow)
        for text_recipe in sorted(TEXT_RECIPES)
    ],
)
def test_every_recipe_begins_on_policy(recipe: str, whole: Path, tmp_path: Path) -> None:
    settings = {"algorithm": {"recipe": recipe}, "train": {"max_steps": 2, "global_batch_size": 8}}
    if recipe == "distillation":
        settings["algorithm"]["teacher"] = str(whole / "hf_ckpt")
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings), with_report=True)
    assert max(values(folder, "mismatch/log_ratio_max")) < 1e-5
    assert values(folder, "updates") == [2.0, 2.0] and all(norm > 0 for norm in values(folder, "grad_norm"))
    assert all(math.isfinite(value) for line in read_jsonl(folder / "metrics.jsonl") for value in line.values())
    assert (folder / "hf_ckpt/model.safetensors").is_file() and (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_model_that_is_missing_is_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tasks"))  # where python looks when it runs the script
    maker = tiny_text_config(tmp_path / "maker", train={"max_steps": 1})
    made = Path(maker["train"]["output_dir"]) / "hf_ckpt"
    config = tiny_text_rl_config(tmp_path, train={"max_steps": 1})
    path = write_config(maker, tmp_path / "maker.yaml")
    config["model"] = {"model_path": str(made), "made_by": str(path)}
    folder = run_task_here("rl_text", config)
    assert values(folder, "eval/reward/total") and (made / "model.safetensors").is_file()
    before = (made / "model.safetensors").stat().st_mtime_ns
    run_task_here("rl_text", merge(config, {"train": {"output_dir": str(tmp_path / "again")}}))
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_the_reward_rises(tmp_path: Path) -> None:
    settings = {
        "rollout": {"num_prompts": 8, "n": 8, "temperature": 0.8},
        "train": {"max_steps": 12, "lr": 1e-2, "micro_batch_size": 64},
    }
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))
    rewards = values(folder, "reward/total")
    assert rewards[0] < 0.7 and rewards[-1] > rewards[0] + 0.2, rewards
    assert values(folder, "ratio/mean") == [1.0] * 12  # one optimiser step: exactly on policy
    assert max(values(folder, "mismatch/log_ratio_max")) < 1e-5


def test_an_update_is_that_of_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO with a KL to the reference, at a temperature, against plain transformers on one answer after the other."""
    recorded: dict[str, Any] = {}
    task = load_task("rl_text")
    update_policy, reduce_and_clip = task.update_policy, task.reduce_and_clip

    def watched(actor: Any, part: Any, advantages: Any, config: Any, step: int) -> dict[str, float]:
        recorded.update(module=actor.model.plain, part=part, advantages=advantages.values.clone())
        return update_policy(actor, part, advantages, config, step)

    def before(model: Any, *args: Any) -> float:
        recorded["gradients"] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return reduce_and_clip(model, *args)

    monkeypatch.setattr(task, "update_policy", watched)
    monkeypatch.setattr(task, "reduce_and_clip", before)
    settings = {
        "rollout": {"temperature": 0.7},
        "algorithm": {"kl": {"coef": 0.1}},
        "train": {"max_steps": 1, "micro_batch_size": 3, "lr": 1e-9},
    }
    run_task_here(task, tiny_text_rl_config(tmp_path, **settings))
    rollouts, _, ids, _ = recorded["part"]
    sequences = {
        request.sample_id: sequence
        for rollout in rollouts
        for request, (sequence,) in zip(rollout.requests, rollout.sequences, strict=True)
    }
    module, useful = recorded["module"], [number for number in ids if recorded["advantages"][number] != 0]
    module.zero_grad()
    for number in useful:
        sequence, advantage = sequences[number], recorded["advantages"][number]
        tokens, drawn = torch.from_numpy(sequence.token_ids).long(), torch.from_numpy(sequence.drawn)
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1] / 0.7
        log_probs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][drawn[1:]]
        assert torch.allclose(log_probs.detach(), torch.from_numpy(sequence.log_probs)[drawn], atol=1e-5)
        ratio = torch.exp(log_probs - log_probs.detach())
        losses = -advantage * ratio  # the penalty is 0 and flat where policy and reference are one
        (losses.mean() / len(useful)).backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.grad, recorded["gradients"][name], atol=1e-6, rtol=1e-4), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    return run_task_here("rl_text", tiny_text_rl_config(tmp_path_factory.mktemp("whole")))


def test_a_run_that_was_ended_goes_on_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    config = tiny_text_rl_config(tmp_path, train={"save_steps": 1})
    assert_same_run(resume_after_interrupt("rl_text", config, 2), whole)


def test_a_sampler_of_its_own_draws_the_same(whole: Path, tmp_path: Path) -> None:
    apart = run_task_here("rl_text", tiny_text_rl_config(tmp_path, rollout={"hybrid_engine": False}))
    assert_same_run(apart, whole)


@pytest.mark.slow
def test_a_critic_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    settings = {"algorithm": {"recipe": "ppo"}, "critic": {"lr": 1e-3, "head": "random"}}
    settings["train"] = {"save_steps": 2, "max_steps": 4}
    whole = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "whole", **settings))
    assert values(whole, "critic/loss")[-1] < values(whole, "critic/loss")[0]
    checkpoint = str(whole / "checkpoints/global_step_2")
    config = tiny_text_rl_config(tmp_path / "more", **merge(settings, {"train": {"load_checkpoint_path": checkpoint}}))
    more = run_task_here("rl_text", config)
    lines = [(folder / "metrics.jsonl").read_text().splitlines()[-2:] for folder in (whole, more)]
    assert lines[0] == lines[1] and weights_in(whole / "hf_ckpt") == weights_in(more / "hf_ckpt")


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(whole: Path, tmp_path: Path) -> None:
    """On-policy distillation: the KL of the policy's own answers to what the teacher says falls."""
    settings = {
        "rollout": {"num_prompts": 8, "n": 8},
        "algorithm": {"recipe": "distillation", "teacher": str(whole / "hf_ckpt")},
        "train": {"max_steps": 15, "lr": 3e-3, "micro_batch_size": 64, "seed": 7},
    }
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))
    distance = values(folder, "kl/reference")
    assert distance[0] > 0.2 and distance[-1] < 0.6 * distance[0], distance


def test_dynamic_sampling_replaces_groups_without_spread(tmp_path: Path) -> None:
    settings = {
        "reward": {"rewards": [{"type": "tests.text_rewards:FirstIsAscii"}]},
        "rollout": {"n": 2, "max_extra_groups": 8},
        "train": {"max_steps": 3},
    }
    with_more = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "more", **settings))
    settings["rollout"] = {"n": 2}
    without = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "less", **settings))
    assert sum(values(with_more, "rollout/extra_groups")) > 0 == sum(values(without, "rollout/extra_groups"))
    assert sum(values(with_more, "rows")) > sum(values(without, "rows"))


@pytest.mark.parametrize("recipe", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_kl_in_the_reward_comes_before_the_baseline(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages of the second iteration, when policy and reference differ, by verl's and TRL's formulas."""
    seen: dict[int, Any] = {}
    task = load_task("rl_text")
    add_advantages = task.add_advantages

    def watched(batches: list[TokenBatch], update: Update) -> list[TokenBatch]:
        before = update.advantages
        batches = add_advantages(batches, update)
        seen[update.step] = update.batch, gather_token_values(batches, update.batch), before, update.advantages
        return batches

    monkeypatch.setattr(task, "add_advantages", watched)
    kl = {"coef": 0.5, "estimator": "k1", "where": "reward"}
    algorithm = {"recipe": recipe, "kl": kl, "drop_no_spread": False}
    folder = run_task_here(task, tiny_text_rl_config(tmp_path, algorithm=algorithm, train={"max_steps": 2}))
    rollout, token_values, before, after = seen[1]
    by_answer = {name: values.split(rollout.num_rows) for name, values in token_values.items()}
    rewards = before.rewards.clone()
    for row, (proximal, reference) in enumerate(
        zip(*(by_answer[f"{name}_log_probs"] for name in ("proximal", "reference")), strict=True)
    ):
        rewards[row] -= 0.5 * float((proximal - reference).sum())
    groups = rewards.view(4, 4)
    assert float((groups - before.rewards.view(4, 4)).abs().max()) > 1e-3
    if recipe == "grpo":
        expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    else:
        expected = groups - (groups.sum(1, keepdim=True) - groups) / 3
    assert torch.allclose(after.values.double(), expected.flatten(), atol=1e-5)
    assert torch.equal(after.rewards, before.rewards)
    for values, advantage in zip(by_answer["advantages"], after.values, strict=True):
        assert torch.equal(values, advantage.expand_as(values))
    assert [line["advantage/abs_mean"] for line in read_jsonl(folder / "metrics.jsonl") if line["step"]][
        1
    ] == pytest.approx(float(expected.abs().mean()), rel=1e-4)


def test_adapters_are_trained_and_are_their_own_reference(tmp_path: Path) -> None:
    settings = {"model": {"lora": {"rank": 4}}, "train": {"max_steps": 3, "lr": 0.01}}
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))
    assert (folder / "hf_ckpt/adapter_model.safetensors").is_file()
    assert max(values(folder, "mismatch/log_ratio_max")) < 1e-5  # the engine sees adapters that have changed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"top_p": 0.9}, "algorithm": {"off_policy": "none"}}, "draw from another distribution"),
        ({"algorithm": {"recipe": "grpo", "token_advantage": "returns"}}, "set algorithm.advantage to raw"),
        ({"algorithm": {"kl": {"where": "reward"}}}, "drop_no_spread to false"),
        (
            {"algorithm": {"kl": {"where": "reward"}, "drop_no_spread": False, "advantage": "best"}},
            "algorithm.advantage: a penalty in the reward",
        ),
        ({"algorithm": {"recipe": "flow_grpo"}}, "recipe"),
        ({"train": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"algorithm": {"recipe": "distillation"}}, "algorithm.teacher"),
        ({"algorithm": {"teacher": "folder", "kl": {"coef": 0.0}}}, "kl.coef above 0"),
        ({"critic": {"lr": 1e-3}}, "take gae"),
        ({"rollout": {"engine": "vllm"}}, "hybrid_engine to false"),
        ({"rollout": {"n": 1}}, "group compares the samples of a group"),
        ({"rollout": {"n": 1}, "algorithm": {"recipe": "ppo", "drop_no_spread": True}}, "drop_no_spread leaves out"),
        ({"rollout": {"max_extra_groups": 2}, "algorithm": {"recipe": "ppo"}}, "set one of them back"),
        ({"reward": {"rewards": [{"type": "brightness"}]}}, r"brightness scores samples of another kind \(image\)"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, **settings))


def test_an_engine_that_takes_too_few_tokens_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = {"hybrid_engine": False, "engine": {"type": "vllm", "url": "http://127.0.0.1:1"}}
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(tmp_path)}
    config = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, rollout=rollout, model=model))
    ended = []
    built = SimpleNamespace(max_length=71, close=lambda: ended.append(True))
    monkeypatch.setattr(VllmSettings, "build", lambda *_: built)
    described = SimpleNamespace(can_be_served=True, vision=None, module=None)
    monkeypatch.setattr(policy, "build_language_model", lambda *_, **__: described)
    with pytest.raises(ConfigError, match=r"the engine takes 71 tokens, .* may have 72"):
        policy.build_served(config)
    assert ended
    built.max_length = 72
    assert policy.build_served(config) is built
