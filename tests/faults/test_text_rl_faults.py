"""What goes wrong in RL of language models, each through ``tasks/rl_text.py``: how a run goes on, or how it ends."""

from __future__ import annotations

import json
import os
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sfumato.config.load import merge
from sfumato.errors import DataError, RewardError, RoleLostError, WeightSyncError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rollout.debug.dumps import dump_path, read_dump
from sfumato.rollout.text.policy import TextGenerator
from sfumato.tracking.exit import ending_of
from sfumato.tracking.json_lines import read_jsonl
from tests.engines.sglang_program import engine_settings
from tests.many_ends import partial_config
from tests.tiny import run_task_here, tiny_language_description, tiny_text_rl_config, weights_in

HERE = __name__


def values(folder: Path, name: str) -> list[float]:
    """A metric by step."""
    return [line[name] for line in read_jsonl(folder / "metrics.jsonl") if name in line]


def config_of(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return tiny_text_rl_config(tmp_path, **merge({"train": {"max_steps": 2}, "eval": {"num_prompts": 2}}, settings))


# Rewards: a FunctionReward calls these in a process of its own


def passes_first_evaluation() -> bool:
    """Whether this sample is one of the two of the first evaluation, which would end a run that it fails as a whole.

    Counted in a file, since a process that hangs is replaced.
    """
    with Path(os.environ["SCORED_SAMPLES"]).open("ab") as file:
        file.write(b".")
        return file.tell() <= 2


def raises(sample: Any) -> float:
    if passes_first_evaluation():
        return 0.0
    raise ZeroDivisionError("by zero")


def hangs(sample: Any) -> float:
    if passes_first_evaluation():
        return 0.0
    time.sleep(600)
    return 0.0


def garbage(sample: Any) -> Any:
    return 0.0 if passes_first_evaluation() else "much"


def not_a_number(sample: Any) -> float:
    return 0.0 if passes_first_evaluation() else float("nan")


def raises_for_some(sample: Any) -> float:
    if len(sample.text) % 3 == 0:
        raise ZeroDivisionError("by zero")
    return sum(character.isascii() for character in sample.text) / len(sample.text)


def same(sample: Any) -> float:
    return 1.0


FAILURES = {
    "raises": "ZeroDivisionError: by zero",
    "hangs": "timed out|took longer|did not return|timeout",
    "garbage": "returned a str, not a number",
    "not_a_number": "nan",
}


@pytest.mark.parametrize(
    "how", [pytest.param(failure, marks=() if failure == "raises" else pytest.mark.slow) for failure in FAILURES]
)
def test_a_reward_that_fails_for_all_ends_the_run_with_what_was_done_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("SCORED_SAMPLES", str(tmp_path / "scored"))
    reward = {"type": "function", "path": f"{HERE}:{how}", "timeout_s": 1.0, "process": how == "hangs"}
    with pytest.raises(RewardError, match=rf"(?i)16 of 16 samples have no reward, .*({FAILURES[how]})") as caught:
        run_task_here("rl_text", config_of(tmp_path, reward={"rewards": [reward]}))
    assert ending_of(caught.value).code == 5
    assert (tmp_path / "run/checkpoints/global_step_0/manifest.json").is_file()


def test_samples_whose_reward_failed_are_left_out(tmp_path: Path) -> None:
    reward = {"type": "function", "path": f"{HERE}:raises_for_some", "process": False}
    settings = {"reward": {"rewards": [reward], "max_failed_fraction": 0.9}, "eval": {"every_steps": 1}}
    folder = run_task_here("rl_text", config_of(tmp_path, **settings))
    failed = values(folder, "reward/failed")
    assert len(failed) == 2 and 0 < failed[0] < 0.9
    assert values(folder, "rows")[0] < values(folder, "rollout/tokens")[0]


# Groups, prompts and answers


def test_an_iteration_without_spread_changes_nothing_and_is_no_warning(tmp_path: Path) -> None:
    reward = {"type": "function", "path": f"{HERE}:same", "process": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's scheduler warns where no optimiser step was before
        folder = run_task_here("rl_text", config_of(tmp_path, reward={"rewards": [reward]}))
    assert values(folder, "updates") == [0.0, 0.0] and values(folder, "advantage/groups_without_spread") == [1.0, 1.0]
    assert values(folder, "grad_norm") == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("overlong", "message"), [("error", "has 14 tokens, more than data.max_prompt_tokens 5"),
                                                   ("drop", "no prompt|usable prompts")])  # fmt: skip
def test_prompts_that_are_longer_than_the_limit_end_the_run_before_it_begins(
    tmp_path: Path, overlong: str, message: str
) -> None:
    config = config_of(tmp_path, data={"max_prompt_tokens": 5, "overlong": overlong})
    with pytest.raises(DataError, match=message):
        run_task_here("rl_text", config)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def write_model(folder: Path, always: int | None = None) -> dict[str, Any]:
    """``model`` of a run on files; ``always`` is the only token that the model says."""
    described = {name: value for name, value in tiny_language_description("qwen3").items() if name != "model_type"}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3"](**described))
    if always is not None:
        with torch.no_grad():
            module.model.embed_tokens.weight.fill_(1.0)
            for name, parameter in module.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
            module.lm_head.weight.zero_()
            module.lm_head.weight[always] = 1.0  # a logit of 32 against 0
    module.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return {"config_path": None, "tokenizer_path": None, "model_path": str(folder)}


@pytest.mark.slow
def test_empty_answers_are_answers(tmp_path: Path) -> None:
    config = config_of(tmp_path, model=write_model(tmp_path / "model", always=2))
    folder = run_task_here("rl_text", config, with_report=True)
    assert values(folder, "rollout/tokens") == [16.0, 16.0] and values(folder, "updates") == [0.0, 0.0]
    rows = [json.loads(line) for line in (folder / "samples/step_000002/samples.jsonl").read_text().splitlines()]
    assert {row["text"] for row in rows} == {""} and "empty" in (folder / "report.html").read_text()


LOUD = "x" * 100_000_000 + "\ud800"


class Loud:
    """An environment that says a hundred megabytes, which end in half of a character."""

    def reset(self, prompt: Any) -> str:
        return f"\udc00 {prompt.text}"

    def step(self, action: str) -> tuple[str, float, bool]:
        return LOUD, float(action[:1].isascii()), False


@pytest.mark.slow
def test_a_hundred_megabytes_of_an_environment_are_cut(tmp_path: Path) -> None:
    kind = {"type": "environment", "path": f"{HERE}:Loud", "max_turns": 2, "max_output_chars": 10}
    settings = {"rollout": {"kind": kind, "max_new_tokens": 100}, "reward": {"rewards": [{"type": "environment"}]}}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = run_task_here("rl_text", config_of(tmp_path, data={"max_prompt_tokens": 100}, **settings))
    assert len(values(folder, "updates")) == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024, "KiB"


# Engines with weights of their own: a server in a process of its own, which a run starts


def served_config(tmp_path: Path, model: dict[str, Any], name: str, **engine: Any) -> dict[str, Any]:
    rollout = {"hybrid_engine": False, "engine": engine_settings(tmp_path, **engine), "tolerance": 1e-3}
    train = {"max_steps": 3, "lr": 1e-2, "output_dir": str(tmp_path / name)}
    return config_of(tmp_path, model=model, rollout=rollout, train=train)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A model in files, and a run of it that nothing disturbed."""
    folder = tmp_path_factory.mktemp("served")
    model = write_model(folder / "model")
    return model, run_task_here("rl_text", served_config(folder, model, "undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "hangs", "out of memory"])
def test_an_engine_that_is_lost_in_the_middle_of_a_batch_is_started_anew(
    served: tuple[dict[str, Any], Path], tmp_path: Path, fault: str
) -> None:
    model, undisturbed = served
    more = {"timeout_s": 20.0} if fault == "hangs" else {}
    folder = run_task_here("rl_text", served_config(tmp_path, model, "run", fault=f"{fault}:24", **more))
    assert (tmp_path / "happened").exists(), "in the second iteration"
    assert not [child for child in psutil.Process().children(recursive=True) if "sglang" in " ".join(child.cmdline())]
    assert (folder / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    assert weights_in(folder / "hf_ckpt") == weights_in(undisturbed / "hf_ckpt")


@pytest.mark.slow
def test_evaluations_are_drawn_by_the_server_and_change_nothing_else(
    served: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One iteration ahead, where the next one is still to be drawn by the weights before those that are evaluated."""
    late = {"rollout": {"async_strategy": "one-step-off"}, "train": {"max_steps": 3}}
    here = run_task_here(
        "rl_text", config_of(tmp_path, model=served[0], eval={"every_steps": 1}, train={"max_steps": 1})
    )
    monkeypatch.setattr(TextGenerator, "_embedded", None)  # the actor draws nothing
    lines = []
    for every in (1, 100):
        config = merge(
            served_config(tmp_path, served[0], f"every {every}"), merge(late, {"eval": {"every_steps": every}})
        )
        lines.append(read_jsonl(run_task_here("rl_text", config) / "metrics.jsonl"))
    often, seldom = ([{k: v for k, v in line.items() if "eval/" not in k} for line in of_run] for of_run in lines)
    assert often == seldom and [entry["staleness/max"] for entry in often[1:]] == [0.0, 1.0, 1.0]
    assert lines[0][-1]["eval/reward/total"] == lines[1][-1]["eval/reward/total"]
    assert lines[0][0]["eval/reward/total"] == pytest.approx(values(here, "eval/reward/total")[0])


@pytest.mark.slow
def test_answers_go_on_in_a_server_under_new_weights_also_in_one_that_was_lost(tmp_path: Path) -> None:
    """Whose noise is of seed and position, as SGLang's is; vLLM's is another where an answer goes on."""
    server = {"hybrid_engine": False, "tolerance": 1e-3, "dump": True}
    train = {"max_steps": 3, "lr": 1e-2}
    here = run_task_here("rl_text", partial_config(tmp_path, train={**train, "output_dir": str(tmp_path / "here")}))
    runs = []
    for name, fault in (("undisturbed", ""), ("lost", "killed:60")):
        rollout = {**server, "engine": engine_settings(tmp_path, fault=fault)}
        config = partial_config(tmp_path, rollout=rollout, train={**train, "output_dir": str(tmp_path / name)})
        runs.append(run_task_here("rl_text", config))
    assert (tmp_path / "happened").exists()
    assert (runs[0] / "metrics.jsonl").read_bytes() == (runs[1] / "metrics.jsonl").read_bytes()
    assert weights_in(runs[0] / "hf_ckpt") == weights_in(runs[1] / "hf_ckpt")
    assert values(runs[0], "rollout/kept_groups") == values(here, "rollout/kept_groups") == [3.0, 3.0, 3.0]
    assert values(runs[0], "staleness/max")[0] == 0 < max(values(runs[0], "staleness/max")) <= 2
    first, *_ = values(runs[0], "mismatch/log_ratio_max")
    assert first < 1e-4, "one version of the weights drew it"
    versions = [
        sequence.versions[sequence.drawn]
        for step in (2, 3)
        for (sequence,) in read_dump(dump_path(runs[0], step)).rollout.sequences
    ]
    assert any(len(set(version)) > 1 for version in versions) and all(
        (np.diff(version) >= 0).all() for version in versions
    )


@pytest.mark.slow
def test_an_engine_that_is_always_lost_ends_the_run_with_what_was_done_saved(
    served: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    config = served_config(tmp_path, served[0], "run", fault="killed:18", once=False)
    config["rollout"]["num_prompts"] = 6  # of which no iteration gets through
    with pytest.raises(RoleLostError, match=r"(?s)engine: .*ended with code 137.*3 times already") as caught:
        run_task_here("rl_text", config)
    assert ending_of(caught.value).code == 8
    assert (tmp_path / "run/checkpoints/global_step_0/manifest.json").is_file()


@pytest.mark.slow
def test_an_engine_with_other_weights_ends_the_run(served: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="version 1: the log-probs of fixed tokens") as caught:
        run_task_here("rl_text", served_config(tmp_path, served[0], "run", fault="old weights:8"))
    assert ending_of(caught.value).code == 7
    assert (tmp_path / "run/checkpoints/global_step_1/manifest.json").is_file()


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_the_run(served: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config = served_config(tmp_path, served[0], "run")
    (tmp_path / "program/sglang/launch_server.py").write_text("raise MemoryError('no room for keys and values')\n")
    with pytest.raises(RoleLostError, match=r"(?s)engine: .*ended with code 1.*no room for keys and values") as caught:
        run_task_here("rl_text", config)
    assert ending_of(caught.value).code == 8
