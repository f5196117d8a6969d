"""Training of reward models end to end: they learn what is preferred, go on to the bit, transformers reads them."""

import json
import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sfumato.commands.check_config import FITS, check_config
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config, merge
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.errors import ConfigError
from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import ProcessRewardModel
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_text_config, write_config

STEPS = 40


def word(generator, good):
    """Four letters: of the first half of the alphabet when good, else of the second."""
    return "".join(generator.choice("abcdefghijklm" if good else "nopqrstuvwxyz") for _ in range(4))


def pair(generator):
    return {"prompt": "Say a word.", "chosen": word(generator, True), "rejected": word(generator, False), "margin": 0.5}


def solution(generator):
    labels = [generator.random() < 0.5 for _ in range(generator.randint(1, 3))]
    return {"prompt": "Solve it.", "completions": [word(generator, label) for label in labels], "labels": labels}


def settings(folder, objective="bradley_terry", data_type=None, **overrides):
    """A run on rows of a file; held-out rows have other words."""
    folder.mkdir(exist_ok=True)
    make = pair if objective == "bradley_terry" else solution
    for name, seed, count in (("train", 0, 300), ("eval", 1, 32)):
        generator = random.Random(seed)
        rows = "".join(json.dumps(make(generator)) + "\n" for _ in range(count))
        (folder / f"{name}.jsonl").write_text(rows)
    config = tiny_text_config(
        folder,
        data={
            "data_type": data_type or {"bradley_terry": "preference", "process": "process"}[objective],
            "synthetic": None,
            "train_path": str(folder / "train.jsonl"),
            "eval_path": str(folder / "eval.jsonl"),
        },
        train={"max_steps": STEPS, "lr": 3.0e-3, "global_batch_size": 8, "micro_batch_size": 4},
    )
    config["eval"] = {"every_steps": 20, "num_rows": 32}
    return merge(merge(config, {"reward": {"objective": objective}}), overrides)


@pytest.mark.parametrize("data_type", ["preference", pytest.param("preference_margin", marks=pytest.mark.slow)])
def test_the_better_answers_get_higher_rewards(tmp_path, data_type):
    config = settings(tmp_path, data_type=data_type, reward={"center_coef": 0.01})
    run = run_task_here("train_text_reward", config)
    lines = read_jsonl(run / "metrics.jsonl")
    scores = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    assert list(scores) == [0, 20, 40]
    assert scores[0] < 0.9 and scores[40] == 1.0, scores
    assert lines[-1]["eval/loss"] < 0.3 < lines[0]["eval/loss"] and lines[-1]["eval/margin"] > 1.0

    model = AutoModelForSequenceClassification.from_pretrained(run / "hf_ckpt").eval()
    exported = json.loads((run / "hf_ckpt/config.json").read_text())
    assert exported["rope_theta"] == exported["rope_parameters"]["rope_theta"]
    tokenizer = AutoTokenizer.from_pretrained(run / "hf_ckpt")
    rows = read_jsonl(tmp_path / "eval.jsonl")
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
        for row in rows
        for name in ("chosen", "rejected")
    ]
    rewards = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            rewards.append(float(model(**ids).logits))
    chosen, rejected = torch.tensor(rewards[0::2]), torch.tensor(rewards[1::2])
    assert float((chosen - rejected).mean()) == pytest.approx(lines[-1]["eval/margin"], rel=1e-4)
    margin = 0.5 if data_type == "preference_margin" else 0.0
    losses = -torch.nn.functional.logsigmoid(chosen - rejected - margin) + 0.01 * (chosen + rejected) ** 2
    assert float(losses.mean()) == pytest.approx(lines[-1]["eval/loss"], rel=1e-4)


def test_right_steps_get_higher_probabilities(tmp_path):
    run = run_task_here("train_text_reward", settings(tmp_path, "process"))
    lines = read_jsonl(run / "metrics.jsonl")
    rows = read_jsonl(tmp_path / "eval.jsonl")
    labels = [label for row in rows for label in row["labels"]]
    assert lines[-1]["eval/right"] == pytest.approx(sum(labels) / len(labels))
    assert lines[-1]["eval/accuracy"] > 0.95 and lines[-1]["eval/loss"] < 0.3, lines[-1]
    assert lines[0]["eval/accuracy"] < 0.9

    samples = [
        Sample(text="\n\n".join(row["completions"][: count + 1]), prompt=row["prompt"], group_id=0)
        for row in rows
        for count in range(len(row["completions"]))
    ]
    reward = ProcessRewardModel(model_path=str(run / "hf_ckpt"), device="cpu", aggregation="last")
    probabilities = torch.tensor(reward.score(samples))
    assert float(probabilities.mean()) == pytest.approx(lines[-1]["eval/probability"], rel=1e-4)
    assert (probabilities > 0.5).tolist() == labels or lines[-1]["eval/accuracy"] < 1.0


def test_an_untrained_head_of_zeros_knows_nothing(tmp_path):
    config = settings(tmp_path, model={"head": "zero"}, train={"max_steps": 1})
    first = read_jsonl(run_task_here("train_text_reward", config) / "metrics.jsonl")[0]
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-6) and first["eval/margin"] == 0.0


@pytest.mark.parametrize(
    ("objective", "lora"),
    [
        ("process", None),
        pytest.param("bradley_terry", None, marks=pytest.mark.slow),
        pytest.param("bradley_terry", {"rank": 4, "alpha": 8}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path, objective, lora):
    config = settings(tmp_path, objective, model={"lora": lora}, train={"max_steps": 6, "save_steps": 3})
    whole = run_task_here("train_text_reward", merge(config, {"train": {"max_checkpoints": 9}}))
    place = {"output_dir": str(tmp_path / "resumed"), "load_checkpoint_path": str(whole / "checkpoints/global_step_3")}
    resumed = run_task_here("train_text_reward", merge(config, {"train": place}))
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    assert (resumed / "metrics.jsonl").read_text().splitlines() == lines[4:]
    weights = [(path / "hf_ckpt/model.safetensors").read_bytes() for path in (whole, resumed)]
    assert weights[0] == weights[1]
    export_checkpoint(whole, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights[0]


def test_a_configuration_is_checked(tmp_path):
    result = check_config(write_config(settings(tmp_path, "process"), tmp_path / "run.yaml"))
    assert (result.task, result.exit_code, result.problems) == ("train_text_reward", FITS, [])
    assert result.model.kind == "Qwen3ForSequenceClassification" and result.data.training[0].num_learned > 0


@pytest.mark.parametrize(
    ("objective", "overrides", "reason"),
    [
        ("process", {"data": {"data_type": "preference"}}, "set data.data_type to process"),
        ("bradley_terry", {"data": {"data_type": "process"}}, "set data.data_type to preference"),
        ("bradley_terry", {"train": {"chunked_loss": True}}, "a scalar head makes none"),
        ("process", {"reward": {"center_coef": 0.1}}, "with reward.objective process: remove it"),
        ("bradley_terry", {"eval": {"num_samples": 2}}, "writes none"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, objective, overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(TrainTextRewardConfig, overrides=settings(tmp_path, objective, **overrides))
