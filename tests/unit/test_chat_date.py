"""Chat templates that write today's date: a run goes on the next day with the same tokens."""

import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import chat_template_utils

from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompt_identity import identify_text_prompts
from sfumato.models.language.parts import build_byte_tokenizer
from sfumato.rollout.text.policy import open_prompts
from sfumato.tracking import folder
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.folder import read_environment, run_date
from tests.tiny import run_task_here, tiny_text_config, tiny_text_rl_config, weights_in

DATED = """{{- '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MONDAY, TUESDAY = datetime.date(2025, 3, 3), datetime.date(2025, 3, 4)


class Clock(datetime.datetime):
    """Of transformers, which asks it for today."""

    today_is = MONDAY

    @classmethod
    def now(cls, tz=None):
        return cls.combine(cls.today_is, datetime.time(11, 30))


@pytest.fixture
def day(monkeypatch):
    """Sets the date, here and for transformers."""
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    def set_day(date):
        Clock.today_is = date
        monkeypatch.setattr(folder, "_today", lambda output_dir: date, raising=False)

    return set_day


def template_file(tmp_path):
    path = tmp_path / "dated.jinja"
    path.write_text(DATED, encoding="utf-8")
    return str(path)


def rl_config(tmp_path, steps):
    config = tiny_text_rl_config(tmp_path, data={"synthetic": {"num_rows": 400}}, train={"max_steps": steps})
    config["data"]["chat_template"] = template_file(tmp_path)
    config["train"] |= {"save_steps": 1, "load_checkpoint_path": "auto"}
    return config


def test_prompts_of_a_run_are_those_of_its_first_day(tmp_path, day):
    day(MONDAY)
    config = load_config(TextRLConfig, overrides=rl_config(tmp_path, 1))
    said = []
    before = identify_text_prompts(config, *open_prompts(config, said.append)[1:])
    assert any("the chat template writes the date of the run's first start, 2025-03-03" in line for line in said)
    folder = Path(config.train.output_dir)
    folder.mkdir()
    (folder / "environment.json").write_text('{"date": "2025-03-03"}')
    day(TUESDAY)
    _, prompts, held_out = open_prompts(config, lambda text: None)
    assert "03 Mar 2025" in text_of(prompts[0])
    assert identify_text_prompts(config, prompts, held_out) == before
    new = config.model_copy(update={"train": config.train.model_copy(update={"load_checkpoint_path": "new"})})
    assert "04 Mar 2025" in text_of(open_prompts(new, lambda text: None)[1][0])


@pytest.mark.slow
def test_a_run_of_rl_goes_on_the_next_day(tmp_path, day):
    day(MONDAY)
    run = run_task_here("rl_text", rl_config(tmp_path, 1))
    day(TUESDAY)
    assert run_task_here("rl_text", rl_config(tmp_path, 2)) == run
    assert max(list_checkpoints(run / "checkpoints")) == 2
    assert read_environment(run)["date"] == "2025-03-03"


def text_of(prompt):
    return build_byte_tokenizer().decode(list(prompt.token_ids))


@pytest.mark.parametrize("kind", ["mapping", "iterable"])
def test_supervised_training_goes_on_the_next_day_with_the_same_tokens(tmp_path, day, kind):
    digests = {}
    for name, days in (("whole", (MONDAY,)), ("parts", (MONDAY, TUESDAY))):
        for number, date in enumerate(days, start=1):
            day(date)
            last = 2 if name == "whole" else number
            rows = tmp_path / "rows.jsonl"
            said = '{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "x"}]}\n'
            rows.write_text("".join(said % index for index in range(40)))
            config = tiny_text_config(tmp_path, data={"chat_template": template_file(tmp_path)})
            config["data"] = {"train_path": str(rows), "chat_template": template_file(tmp_path), "datasets_type": kind}
            config["data"]["max_seq_len"] = 128
            config.pop("eval", None)
            config["train"] |= {"output_dir": str(tmp_path / name), "max_steps": last, "save_steps": 1}
            config["train"] |= {"load_checkpoint_path": "auto", "lr_decay_style": "constant", "lr_warmup_steps": 0}
            run = run_task_here("train_text", config)
        digests[name] = weights_in(run / "hf_ckpt")
    assert digests["whole"] == digests["parts"]


def test_whose_date_a_run_has(tmp_path):
    today = datetime.date.today()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text('{"date": "2024-05-06"}')

    def date(path, output_dir="run"):
        return run_date(SimpleNamespace(output_dir=str(tmp_path / output_dir), load_checkpoint_path=path))

    assert date("auto") == datetime.date(2024, 5, 6)
    assert date(str(tmp_path / "run" / "checkpoints" / "global_step_3"), "fork") == datetime.date(2024, 5, 6)
    assert date("new") == date(None) == date("auto", "another") == today
    (tmp_path / "run" / "environment.json").write_text('{"date": "yesterday"}')
    assert date("auto") == today
    (tmp_path / "run" / "environment.json").write_text("{}")
    assert date("auto") == today, "of a run that was begun before dates were kept"
