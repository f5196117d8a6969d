"""Training from answers that are good or bad, and from pairs without a reference, end to end."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sfumato.config.load import load_config, merge
from sfumato.config.text import TrainTextDpoConfig, TrainTextKtoConfig
from sfumato.errors import ConfigError
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_text_config

KTO = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.8}


def word(generator, good):
    """Four letters: of the first half of the alphabet when good, else of the second."""
    return "".join(generator.choice("abcdefghijklm" if good else "nopqrstuvwxyz") for _ in range(4))


def answer(generator):
    label = generator.random() < 0.4
    return {"prompt": f"Say {word(generator, True)}.", "completion": word(generator, label), "label": label}


def settings(folder, **overrides):
    """A run on answers of a file; held-out ones have other words. A model made by one step of training is the base."""
    folder.mkdir(exist_ok=True)
    for name, seed, count in (("train", 0, 300), ("eval", 1, 8)):
        generator = random.Random(seed)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(answer(generator)) + "\n" for _ in range(count)))
    base = run_task_here("train_text", tiny_text_config(folder / "base", train={"max_steps": 1}))
    config = tiny_text_config(
        folder,
        model={"model_path": str(base / "hf_ckpt"), "config_path": None, "tokenizer_path": None},
        data={
            "data_type": "unpaired",
            "synthetic": None,
            "train_path": str(folder / "train.jsonl"),
            "eval_path": str(folder / "eval.jsonl"),
        },
        train={"max_steps": 30, "lr": 3.0e-3, "global_batch_size": 8, "micro_batch_size": 4},
    )
    return merge(config, {"kto": KTO, **overrides})


def log_ratios(policy, reference, tokenizer, prompts, answers):
    """Of each answer to each prompt, in plain transformers."""
    actual = []
    for prompt, text in zip(prompts, answers, strict=True):
        begin = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids, prompt_ids = (
            tokenizer(words, return_tensors="pt")["input_ids"] for words in (f"{begin}{text}<|im_end|>", begin)
        )
        with torch.no_grad():
            sums = [
                model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[prompt_ids.shape[1] - 1 :].sum()
                for model in (policy, reference)
            ]
        actual.append(sums[0] - sums[1])
    return torch.stack(actual)


def test_good_answers_become_likelier_and_the_numbers_are_those_of_the_paper(tmp_path):
    config = settings(tmp_path)
    run = run_task_here("train_text_kto", config)
    lines = read_jsonl(run / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    rows = read_jsonl(tmp_path / "eval.jsonl")
    labels = torch.tensor([row["label"] for row in rows])
    weights = torch.where(labels, 1.5, 0.8)
    assert first["eval/kl"] == 0.0 and first["eval/loss"] == pytest.approx(0.5 * float(weights.mean()), rel=1e-6)
    assert last["eval/good_reward"] > last["eval/bad_reward"] + 0.5 and last["eval/loss"] < 0.8 * first["eval/loss"]

    tokenizer = AutoTokenizer.from_pretrained(run / "hf_ckpt")
    folders = (run / "hf_ckpt", config["model"]["model_path"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    prompts, answers = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    models = (policy, reference, tokenizer)
    kl = log_ratios(*models, prompts, [answers[-1], *answers[:-1]]).mean().clamp(min=0)
    assert last["eval/kl"] == pytest.approx(float(kl), rel=1e-4, abs=1e-5)
    ratios = log_ratios(*models, prompts, answers)
    losses = weights * (1 - torch.sigmoid(0.5 * torch.where(labels, ratios - kl, kl - ratios)))
    assert last["eval/loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert last["eval/good_reward"] == pytest.approx(0.5 * float(ratios[labels].mean()), rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_a_resumed_run_is_the_undisturbed_one(tmp_path, lora):
    config = settings(tmp_path, model={"lora": lora}, train={"max_steps": 6, "save_steps": 3})
    whole = run_task_here("train_text_kto", config)
    place = {"output_dir": str(tmp_path / "resumed"), "load_checkpoint_path": str(whole / "checkpoints/global_step_3")}
    resumed = run_task_here("train_text_kto", merge(config, {"train": place}))
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    assert (resumed / "metrics.jsonl").read_text().splitlines() == lines[4:]


@pytest.mark.parametrize(
    ("loss", "more"),
    [("simpo", {"gamma": 0.5}), pytest.param("orpo", {"sft_coef": 1.0}, marks=pytest.mark.slow)],
)
def test_pairs_are_learned_without_a_reference(tmp_path, loss, more):
    config = settings(tmp_path, data={"data_type": "preference"}, dpo={"loss": loss, "beta": 2.0, **more})
    del config["kto"]
    for name, seed in (("train", 0), ("eval", 1)):
        generator = random.Random(seed)
        rows = [
            {"prompt": "Say a word.", "chosen": word(generator, True), "rejected": word(generator, False)}
            for _ in range(200 if name == "train" else 8)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_task_here("train_text_dpo", config)
    lines = read_jsonl(run / "metrics.jsonl")
    assert lines[-1]["eval/accuracy"] == 1.0 and lines[-1]["eval/loss"] < 0.8 * lines[0]["eval/loss"]


def refused(schema, tmp_path, **sections):
    config = {"model": {"model_path": "m"}, "train": {"output_dir": "out"}}
    data = {"synthetic": {}, "data_type": "preference" if schema is TrainTextDpoConfig else "unpaired"}
    with pytest.raises(ConfigError) as caught:
        load_config(schema, overrides=merge({**config, "data": data}, sections))
    return str(caught.value)


def test_what_does_not_go_together_is_refused(tmp_path):
    assert "set dpo.sft_coef" in refused(TrainTextDpoConfig, tmp_path, dpo={"loss": "orpo"})
    assert "dpo.gamma" in refused(TrainTextDpoConfig, tmp_path, dpo={"gamma": 0.5})
    assert "nothing is frozen" in refused(TrainTextDpoConfig, tmp_path, dpo={"loss": "simpo"}, model={"dtype": "bf16"})
    assert "must be unpaired" in refused(TrainTextKtoConfig, tmp_path, data={"data_type": "conversation"})
