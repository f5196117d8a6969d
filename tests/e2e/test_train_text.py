"""Training of language models end to end: it learns, it can be looked at, and transformers loads what comes out."""

import json
import math

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from sfumato.config.load import merge
from sfumato.config.text_data import SyntheticTextConfig
from sfumato.data.synthetic.text import SyntheticRows
from sfumato.errors import ConfigError
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples
from tests.tiny import ROOT, run_task_here, run_task_process, tiny_language_description, tiny_text_config, write_config

SHORT = {"problem": "reverse", "min_length": 2, "max_length": 2, "num_rows": 600}
"""Words of two letters, which a tiny model learns in seconds."""


def learner(tmp_path, **overrides):
    """A model of width 64 that answers after 200 steps of 1024 tokens."""
    base = {
        "data": {"synthetic": SHORT, "max_seq_len": 128},
        "train": {"max_steps": 200, "lr": 3.0e-3, "lr_warmup_steps": 20, "global_batch_size": 8, "micro_batch_size": 8},
        "eval": {"every_steps": 100, "num_rows": 32, "num_samples": 3, "max_new_tokens": 8},
    }
    config = tiny_text_config(tmp_path, **merge(base, overrides))
    wider = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.05}
    description = tiny_language_description() | wider | {"tie_word_embeddings": True}
    write_config(description, tmp_path / "qwen3.yaml")
    return config


def answers_in_plain_transformers(folder, prompts):
    """Greedy answers of an exported folder, without sfumato."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    results = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**ids, max_new_tokens=12, do_sample=False)
        results.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return results


def held_out(config, count):
    rows = SyntheticRows(SyntheticTextConfig(**config), seed=0, held_out=True)
    return [rows[index] for index in range(count)]


def test_it_learns_what_it_was_not_shown(tmp_path):
    config = learner(tmp_path)
    run = run_task_here("train_text", config, with_report=True)
    scores = {
        line["step"]: line["eval/exact_match"] for line in read_jsonl(run / "metrics.jsonl") if "eval/loss" in line
    }
    assert list(scores) == [0, 100, 200]
    assert scores[0] < 0.1 and scores[200] > 0.9, scores
    rows = held_out(SHORT, 8)
    answers = answers_in_plain_transformers(run / "hf_ckpt", [row["prompt"] for row in rows])
    assert sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) >= 7
    shown = read_samples(run)[200]
    assert [entry["text"].removesuffix("<|im_end|>") for entry in shown] == answers[:3]
    assert "exact_match" in (run / "report.html").read_text()
    rates = read_jsonl(run / "timings.jsonl")[-1]
    assert 0 <= rates["time/data_s"] < rates["time/step_s"]
    assert rates["throughput/tokens_per_s"] > 0 and rates["throughput/flops_per_s"] > 0


def test_a_model_that_is_missing_is_made_first(tmp_path):
    first = learner(tmp_path / "first", data={"data_type": "plaintext"}, train={"max_steps": 3})
    path = write_config(first, tmp_path / "first.yaml")
    made = tmp_path / "first/run/hf_ckpt"
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(made), "made_by": str(path)}
    config = learner(tmp_path / "second", model=model, train={"max_steps": 2})
    run = run_task_here("train_text", config)
    assert made.is_dir() and (run / "hf_ckpt/config.json").is_file()
    before = (made / "model.safetensors").stat().st_mtime_ns
    run_task_here("train_text", merge(config, {"train": {"load_checkpoint_path": "new"}}))
    assert (made / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_dpo_makes_the_better_answers_likelier(tmp_path):
    sft = run_task_here("train_text", learner(tmp_path / "sft"))
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(sft / "hf_ckpt")}
    config = learner(
        tmp_path / "dpo",
        model=model,
        data={"data_type": "preference"},
        train={"max_steps": 40, "lr": 1.0e-3},
        eval={"every_steps": 0},
    )
    for name in ("num_samples", "max_new_tokens"):
        del config["eval"][name]  # preference training writes no answers
    run = run_task_here("train_text_dpo", config | {"dpo": {"beta": 0.5}})
    lines = read_jsonl(run / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    assert first["eval/loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference
    assert last["eval/accuracy"] > 0.9 and last["eval/loss"] < 0.4 and last["eval/margin"] > 0.5


def test_adapters_learn_and_are_exported(tmp_path):
    base = run_task_here("train_text", learner(tmp_path / "base", train={"max_steps": 1}))
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(base / "hf_ckpt")}
    model["lora"] = {"rank": 8, "alpha": 16, "init_weights": "default"}
    run = run_task_here("train_text", learner(tmp_path / "lora", model=model, train={"max_steps": 4}))
    adapter = AutoModelForCausalLM.from_pretrained(run / "hf_ckpt")
    assert any("lora" in name for name, _ in adapter.named_parameters())
    plain = AutoModelForCausalLM.from_pretrained(base / "hf_ckpt")
    ids = torch.tensor([[1, 9, 30]])
    assert not torch.allclose(adapter(ids).logits, plain(ids).logits)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_end(tmp_path):
    config = learner(tmp_path, train={"max_steps": 40, "save_steps": 5, "global_batch_size": 1})
    whole = run_task_here("train_text", config)
    path = write_config(merge(config, {"train": {"output_dir": str(tmp_path / "killed")}}), tmp_path / "run.yaml")
    assert run_task_process("train_text", path, kill_after=12).returncode < 0
    resumed = run_task_process("train_text", path, "--train.load_checkpoint_path", "auto")
    assert resumed.returncode == 0, resumed.output
    assert (resumed.output_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    left, right = (path / "hf_ckpt/model.safetensors" for path in (whole, resumed.output_dir))
    assert left.read_bytes()[-1000:] == right.read_bytes()[-1000:]


def test_bad_rows_stop_the_run_with_file_and_row(tmp_path):
    rows = [{"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    config = tiny_text_config(tmp_path, data={"synthetic": None, "train_path": str(data), "eval_path": str(data)})
    result = run_task_process("train_text", write_config(config, tmp_path / "run.yaml"))
    assert result.returncode == 2
    message = result.output.strip().splitlines()[-1]
    assert message.startswith("error: ") and f"{data}, line 1" in message and "usr" in message, result.output


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    """The shipped configurations, in a folder of their own."""
    paths = {}
    for name in ("text_pretrain", "text_sft"):
        config = yaml.safe_load((ROOT / f"configs/quickstart/{name}.yaml").read_text())
        config["train"]["output_dir"] = str(tmp_path / name)
        paths[name] = tmp_path / f"{name}.yaml"
        if name == "text_sft":
            config["model"] = {
                "model_path": str(tmp_path / "text_pretrain/hf_ckpt"),
                "made_by": str(paths["text_pretrain"]),
            }
        write_config(config, paths[name])
    result = run_task_process("train_text", paths["text_sft"], timeout_s=1500)
    assert result.returncode == 0, result.output
    scores = [line["eval/exact_match"] for line in result.metrics() if "eval/exact_match" in line]
    assert scores[0] < 0.05 and scores[-1] > 0.95, scores
    rows = held_out(yaml.safe_load(paths["text_sft"].read_text())["data"]["synthetic"], 20)
    answers = answers_in_plain_transformers(tmp_path / "text_sft/hf_ckpt", [row["prompt"] for row in rows])
    assert sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) >= 18


MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "expand": 2,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "vocab_size": 259,
}


def recurrent(tmp_path, **overrides):
    config = tiny_text_config(tmp_path, **overrides)
    config["model"]["config_path"] = str(write_config(MAMBA2, tmp_path / "mamba2.yaml"))
    return config


def test_documents_of_a_recurrent_model_get_rows_of_their_own(tmp_path):
    """It says so, and the numbers of the run are those of a document a row."""
    run = run_task_here("train_text", recurrent(tmp_path / "auto"))
    assert "model.rows documents" in (run / "log.txt").read_text()
    chosen = run_task_here(
        "train_text", recurrent(tmp_path / "chosen", model={"rows": "documents", "attention": "eager"})
    )
    assert read_jsonl(chosen / "metrics.jsonl") == read_jsonl(run / "metrics.jsonl")


def test_the_reference_of_a_recurrent_model_sees_documents_as_the_model_does(tmp_path):
    """Before the first update the two are one model, so that no pair has a margin."""
    run = run_task_here("train_text_dpo", recurrent(tmp_path, data={"data_type": "preference"}))
    first = read_jsonl(run / "metrics.jsonl")[0]
    assert first["eval/margin"] == 0.0 and first["eval/loss"] == pytest.approx(math.log(2), rel=1e-6), first


def test_a_model_that_is_not_causal_is_refused_before_the_first_step(tmp_path):
    config = tiny_text_config(tmp_path)
    described = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    described |= {"intermediate_size": 48, "vocab_size": 259, "is_decoder": False}
    described |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config["model"]["config_path"] = str(write_config(described, tmp_path / "bert.yaml"))
    with pytest.raises(ConfigError, match="a token notices what comes after it"):
        run_task_here("train_text", config)
