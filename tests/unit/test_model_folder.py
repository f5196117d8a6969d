"""What an export carries beside weights, compared with the folder that was trained and with plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sfumato.commands.check_config import check_config
from sfumato.commands.check_data import check_text_prompt_data
from sfumato.commands.check_tables import show_findings
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.answer_end import AnswerEnd, EndToken
from sfumato.data.text.chat import build_chat_template
from sfumato.models.language.load import build_tokenizer as build_tokenizer_of
from sfumato.models.language.model_folder import completed_ends, name_ends
from tests.model_folders import FOLDERS, published_template, write_model_folder
from tests.tiny import run_task_here, tiny_text_rl_config, write_config
from tests.tiny_tokenizers import build_tokenizer
from tests.tiny_vision import tiny_vision_config

WORDS = ("ab", "cd", "ef", "gh")


def rows():
    """Conversations of two answers each."""
    for word in WORDS:
        asked = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
        more = [{"role": "user", "content": "again"}, {"role": "assistant", "content": word + word}]
        yield {"messages": asked + more}


def pairs():
    """A better and a worse answer each."""
    for word in WORDS:
        yield {"prompt": f"say {word}", "chosen": word, "rejected": "no"}


def text_config(tmp_path, folder, data=(), model=(), train=(), made=rows, evaluated=True):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, made())), encoding="utf-8")
    held_out = {"eval_path": str(path)} if evaluated else {}
    return {
        "model": {"model_path": str(folder), **dict(model)},
        "data": {"train_path": str(path), **held_out, "max_seq_len": 512, **dict(data)},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "lr": 5e-3,
            "lr_decay_style": "constant",
            "micro_batch_size": 4,
            "global_batch_size": 4,
            "save_steps": 1,
            "device": "cpu",
            "mixed_precision": "no",
            **dict(train),
        },
    } | ({"eval": {"num_samples": 1, "max_new_tokens": 2}} if evaluated and made is rows else {})


def said(folder, name="generation_config.json"):
    return json.loads((Path(folder) / name).read_text(encoding="utf-8"))


def base_folder(folder, ends=(0,)):
    """A base model: a tokenizer without a chat template, and a generation_config.json that knows no turns."""
    write_model_folder("qwen3", folder)
    tokenizer = build_tokenizer()
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    described = said(folder, "config.json") | {"vocab_size": len(tokenizer), "eos_token_id": ends[0]}
    (folder / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends), "max_new_tokens": 2048}))
    return folder


@pytest.mark.parametrize(
    ("name", "published"),
    [("glm4_5", False), ("gpt_oss", False)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in FOLDERS if name not in ("glm4_5", "gpt_oss")]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in FOLDERS],
)
def test_plain_transformers_ends_where_training_taught_it(name, published, tmp_path):
    template = published_template(name) if published else FOLDERS[name].template
    folder = write_model_folder(name, tmp_path / "model", template)
    run = run_task_here("train_text", text_config(tmp_path, folder, train={"max_steps": 150, "save_steps": 0}))
    out = run / "hf_ckpt"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == template
    assert said(out)["eos_token_id"] == said(folder)["eos_token_id"] == model.generation_config.eos_token_id
    assert all(said(out)[key] == value for key, value in said(folder).items())
    for word in WORDS[:2]:
        question = [{"role": "user", "content": f"say {word}"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(output).endswith(word + FOLDERS[name].taught), tokenizer.decode(output)


TASKS = {
    "train_text": {},
    "train_text, adapters": {"model": {"lora": {"rank": 2}}},
    "train_text_dpo": {"data": {"data_type": "preference"}, "made": pairs},
    "train_text_kto": {"data": {"data_type": "unpaired"}, "made": pairs},
}
CHATS = [("train_text", "chatml"), ("train_text, adapters", "hermes")]
SLOW_CHATS = [(name, template) for name in TASKS for template in ("chatml", "hermes") if (name, template) not in CHATS]


@pytest.mark.parametrize(
    ("name", "template"), [*CHATS, *(pytest.param(*slow_chat, marks=pytest.mark.slow) for slow_chat in SLOW_CHATS)]
)
def test_chatml_on_a_base_model_is_exported_and_ends(name, template, tmp_path):
    folder, overrides = base_folder(tmp_path / "model"), dict(TASKS[name])
    overrides["data"] = {**overrides.get("data", {}), "chat_template": template}
    config = text_config(tmp_path, folder, **overrides)
    run = run_task_here(name.partition(",")[0], config)
    export_checkpoint(run, tmp_path / "exported")
    export_checkpoint(run, tmp_path / "merged", merge=True)
    for out in (run / "hf_ckpt", tmp_path / "exported", tmp_path / "merged"):
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert "<|im_start|>" in tokenizer.chat_template and ("tools" in tokenizer.chat_template) == (
            template == "hermes"
        )
        assert tokenizer.pad_token is None, "the base has none"
        assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 2]
        assert said(out) == {"eos_token_id": [0, 2], "max_new_tokens": 2048}
        if (out / "config.json").is_file():
            assert said(out, "config.json")["eos_token_id"] == [0, 2]
            assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [0, 2]
    assert (tmp_path / "merged" / "config.json").is_file()


def test_a_tool_chat_keeps_its_tools_in_the_next_stage(tmp_path):
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def made():
        return [{"messages": messages, "tools": [tool]}] * 4

    folder = write_model_folder("qwen3", tmp_path / "model")
    config = text_config(tmp_path, folder, {"chat_template": "hermes"}, made=made, evaluated=False)
    out = run_task_here("train_text", config) / "hf_ckpt"
    tokenizer = AutoTokenizer.from_pretrained(out)
    shown = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "<tools>" in shown and '"name": "look", "arguments"' in shown


def test_named_templates_of_a_folder_stay(tmp_path):
    folder = write_model_folder("qwen3", tmp_path / "model")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(FOLDERS["qwen3"].template + "{# tools #}")
    out = run_task_here("train_text", text_config(tmp_path, folder)) / "hf_ckpt"
    before, after = (AutoTokenizer.from_pretrained(path).chat_template for path in (folder, out))
    assert isinstance(before, dict) and set(before) == {"default", "tool_use"} and before == after


def test_a_reward_model_scores_with_the_template_that_it_was_trained_with(tmp_path):
    from sfumato.rewards.networks.classifier import Classifier

    folder = write_model_folder("glm4_5", tmp_path / "model")
    template = tmp_path / "other.jinja"
    template.write_text(FOLDERS["glm4_5"].template.replace("[gMASK]<sop>", "[gMASK]<sop>Judge."))
    data = {"data_type": "preference", "chat_template": str(template)}
    config = text_config(tmp_path, folder, data, made=pairs) | {"reward": {"objective": "bradley_terry"}}
    run = run_task_here("train_text_reward", config)
    export_checkpoint(run, tmp_path / "exported")
    conversation = [{"role": "user", "content": "say ab"}, {"role": "assistant", "content": "ab"}]
    scores = []
    for out in (run / "hf_ckpt", tmp_path / "exported"):
        classifier = Classifier(out, torch.device("cpu"), torch.float32)
        text = "[gMASK]<sop>Judge.<|user|>\nsay ab<|assistant|>\nab"  # what training saw: no end is appended
        ids = torch.tensor([classifier.tokenizer(text, add_special_tokens=False)["input_ids"]])
        (score,) = classifier([conversation])
        torch.testing.assert_close(score, classifier.model(input_ids=ids).logits[0, 0].detach())
        assert classifier.model.config.pad_token_id == classifier.tokenizer.pad_token_id is not None
        scores.append(score)
    torch.testing.assert_close(*scores, rtol=0, atol=0)


def test_plain_text_carries_what_the_folder_says(tmp_path):
    folder = write_model_folder("gemma3", tmp_path / "model")
    made = [{"text": "some words"}] * 4
    config = text_config(tmp_path, folder, {"data_type": "plaintext"}, made=lambda: made, evaluated=False)
    out = run_task_here("train_text", config) / "hf_ckpt"
    assert said(out) == said(folder) and said(out, "config.json")["eos_token_id"] == [1, 4]
    assert AutoTokenizer.from_pretrained(out).chat_template == FOLDERS["gemma3"].template


def test_a_described_model_names_the_ends_of_its_tokenizer(tmp_path):
    described = {"model_type": "llama", "vocab_size": 259, "hidden_size": 16, "intermediate_size": 32}
    described |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
    path = write_config(described, tmp_path / "llama.yaml")
    model = {"model_path": None, "config_path": str(path), "tokenizer_path": "bytes"}
    out = run_task_here("train_text", text_config(tmp_path, "", model=model)) / "hf_ckpt"
    assert said(out)["eos_token_id"] == said(out, "config.json")["eos_token_id"] == [0, 2]


def test_rl_exports_the_template_that_it_drew_with(tmp_path):
    folder = base_folder(tmp_path / "model")
    config = tiny_text_rl_config(tmp_path, data={"synthetic": {"num_rows": 400}})
    config["model"] = {"model_path": str(folder)}
    config["data"]["chat_template"] = "chatml"
    config["train"]["max_steps"], config["eval"] = 1, {"num_prompts": 2, "every_steps": 1, "max_new_tokens": 2}
    out = run_task_here("rl_text", config) / "hf_ckpt"
    assert said(out) == {"eos_token_id": [0, 2], "max_new_tokens": 2048}
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.slow
def test_a_model_that_sees_keeps_all_that_its_folder_says(tmp_path):
    config = tiny_vision_config(tmp_path, "qwen2_5_vl", train={"max_steps": 1, "lr_warmup_steps": 0, "save_steps": 1})
    folder = run_task_here("train_text", config) / "hf_ckpt"
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "temperature": 0.7}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))  # as older processors have it
    other = tmp_path / "other.jinja"
    other.write_text("{# other #}" + template, encoding="utf-8")
    config["model"], config["data"]["chat_template"] = {"model_path": str(folder)}, str(other)
    config["train"]["output_dir"] = str(tmp_path / "next")
    run = run_task_here("train_text", config)
    export_checkpoint(run, tmp_path / "exported")
    for out in (run / "hf_ckpt", tmp_path / "exported"):
        assert said(out) == {"eos_token_id": [0, 2], "temperature": 0.7, "pad_token_id": 0}
        assert said(out, "config.json")["text_config"]["eos_token_id"] == [0, 2]
        assert AutoTokenizer.from_pretrained(out).chat_template == other.read_text(encoding="utf-8")
        assert said(out, "chat_template.json") == {"chat_template": other.read_text(encoding="utf-8")}


def end(*declared, taught=None):
    tokens = [EndToken(number, f"<{number}>", "a file") for number in declared]
    return AnswerEnd(tuple(tokens), None if taught is None else EndToken(taught, f"<{taught}>", "a template"))


@pytest.mark.parametrize(
    ("before", "ends", "after"),
    [(5, end(5, taught=5), 5), ([5], end(5, taught=5), [5]), ([5, 3], end(5, 3, taught=3), [5, 3]),
     (5, end(5, taught=7), [5, 7]), ([5, 3], end(5, taught=7), [5, 3, 7]), (None, end(5, taught=7), [5, 7]),
     (None, end(5), 5), (None, end(), None), ([9, 9], end(taught=9), [9, 9]), ([], end(3), 3)],
)  # fmt: skip
def test_a_list_of_ends_is_completed_and_nothing_else_changes(before, ends, after):
    assert completed_ends(before, ends) == after


@pytest.mark.parametrize(("kind", "named"), [("inkling_text", 2), ("llama", [0, 2]), ("gpt2", [0, 2])])
def test_a_class_that_takes_one_number_is_given_what_was_taught(kind, named):
    tokenizer = build_tokenizer()
    build_chat_template("chatml", tokenizer).adopt()
    config = CONFIG_MAPPING[kind](eos_token_id=0)
    name_ends(config, tokenizer, has_source=True)
    assert config.eos_token_id == named and type(config)(eos_token_id=named)


def test_a_broken_generation_config_stops_the_run_by_name(tmp_path):
    folder = write_model_folder("qwen3", tmp_path / "model")
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    config = text_config(tmp_path, folder)
    result = check_config(write_config(config, tmp_path / "c.yaml"))
    assert result.exit_code == 2 and "generation_config.json: cannot be read" in result.problems[0]


def test_check_says_how_answers_end(tmp_path, capsys):
    folder = write_model_folder("glm4_5", tmp_path / "model")
    path = write_config(text_config(tmp_path, folder), tmp_path / "c.yaml")
    show_findings(check_config(path), Console(width=200))
    shown = capsys.readouterr().out
    assert "answers end with <|user|> (4): the next message begins with it, and learning appends it" in shown
    assert "calls of tools end with <|observation|> (6)" in shown
    assert "drawing stops at <|endoftext|> (0) of generation_config.json and the tokenizer, <|user|> (4)" in shown
    assert "names [0, 4, 6] as the end; of the folder's: do_sample True, temperature 0.6, top_p 0.95" in shown


def test_check_of_rl_says_it_with_the_texts(tmp_path):
    config = tiny_text_rl_config(
        tmp_path, rollout={"stop": ["Q:"]}, data={"synthetic": {"num_rows": 400}, "chat_template": "chatml"}
    )
    config["model"] = {"model_path": str(base_folder(tmp_path / "model"))}
    loaded = load_config(TextRLConfig, overrides=config)
    answers = check_text_prompt_data(loaded, build_tokenizer_of(loaded.model)).answers
    assert answers[0].startswith("answers end with <|im_end|> (2)")
    assert "drawing stops at the texts 'Q:', too" in answers
    line = "the export's generation_config.json names [0, 2] as the end, the folder's [0]; of the folder's: "
    assert f"{line}max_new_tokens 2048" in answers
    assert any(line.startswith("the tokenizer has no padding token") for line in answers)


def test_check_of_a_reward_model_says_nothing_of_ends(tmp_path):
    folder = write_model_folder("qwen3", tmp_path / "model")
    config = text_config(tmp_path, folder, {"data_type": "preference"}, made=pairs, evaluated=False)
    config["reward"] = {"objective": "bradley_terry"}
    result = check_config(write_config(config, tmp_path / "c.yaml"))
    assert not result.problems and result.data.answers == []
