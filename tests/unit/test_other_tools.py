"""Options of other tools: what the error for an unknown key says of them, and that what it says exists."""

import re

import pytest
import yaml

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import TrainDitConfig
from sfumato.config.help import FIRST, NUM_FIRST, describe_sections, format_help
from sfumato.config.load import help_part, load_config, parse_overrides
from sfumato.config.other_tools import has_field, read_table
from sfumato.config.text import TrainTextConfig, TrainTextDpoConfig, TrainTextKtoConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import ConfigError
from tests.page_commands import ROOT

SCHEMAS = (
    TextRLConfig,
    TrainTextConfig,
    TrainTextDpoConfig,
    TrainTextKtoConfig,
    TrainTextRewardConfig,
    TrainDitConfig,
    DiffusionRLConfig,
)
PAGE = (ROOT / "docs" / "text_rl" / "migration.md").read_text(encoding="utf-8")


def test_names_of_ours_exist_and_notes_name_what_exists():
    for tool, options in read_table().items():
        for option, (names, note) in options.items():
            assert names or note, (tool, option)
            assert all(any(has_field(schema, name) for schema in SCHEMAS) for name in names), (tool, option, names)
            mentioned = re.findall(r"\b(?:train|data|model|rollout|algorithm|eval|reward)\.[a-z_.]+[a-z_]", note)
            assert all(any(has_field(schema, name) for schema in SCHEMAS) for name in mentioned), (tool, option, note)


def test_the_page_and_the_table_agree():
    """Where both have an option with one name of ours, it is the same."""
    compared = 0
    for tool, heading in (("verl", "## verl"), ("TRL", "## TRL"), ("slime", "## slime")):
        section = PAGE[PAGE.index(heading) :].split("\n## ")[1 if PAGE.startswith(heading) else 0]
        short = {}
        for option, value in read_table()[tool].items():
            short.setdefault(option.rpartition(".")[2], value)
        for line in section.splitlines():
            cells = line.strip("|").split(" | ")
            theirs = re.findall(r"`-?-?([a-z][\w.-]+)`", cells[0])  # not RLOOConfig's
            ours = re.findall(r"`([a-z_]+\.[\w.]+)`", cells[1]) if len(cells) > 1 else []
            if len(theirs) == 1 and len(ours) == 1:
                names, note = short.get(theirs[0].replace("-", "_").rpartition(".")[2], ((), ""))
                assert not names or ours[0] in names or ours[0] in note, (tool, theirs, ours, names)
                compared += bool(names)
    assert compared > 20


def refusal(schema, text="", arguments=(), tmp_path=None):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(schema, path, parse_overrides([*arguments]))
    return str(error.value)


SAID = [
    (TrainTextConfig, "learning_rate: 1.0e-5", "TRL's and LLaMA-Factory's learning_rate is --train.lr 1e-05 here"),
    (TrainTextConfig, "train: {learning_rate: 1.0e-5}", "learning_rate is --train.lr 1e-05 here"),
    (TrainTextConfig, "cutoff_len: 512", "LLaMA-Factory's cutoff_len is --data.max_seq_len 512 here"),
    (TrainTextConfig, "lora_r: 8", "TRL's lora_r is --model.lora.rank 8 here"),
    (TrainTextConfig, "per_device_train_batch_size: 4", "is train.micro_batch_size here: samples of a process; times"),
    (TrainTextConfig, "num_train_epochs: 3", "num_train_epochs is train.num_train_epochs here"),
    (TextRLConfig, "num_train_epochs: 3", "num_train_epochs is train.max_steps here"),
    (TextRLConfig, "kl_coef: 0.01", "is algorithm.kl.coef here: with algorithm.kl.where reward"),
    (
        TextRLConfig,
        "actor_rollout_ref: {actor: {optim: {lr: 1.0e-6}, ppo_mini_batch_size: 64}}",
        "verl's lr is --train.lr 1e-06 here; verl's ppo_mini_batch_size is train.global_batch_size here: answers, not",
    ),
    (TextRLConfig, "beta: 0.1", "TRL's beta is algorithm.kl.coef here"),
    (TrainTextDpoConfig, "beta: 0.1", "TRL's beta is dpo.beta here"),
    (TrainDitConfig, "network: {linear: 16}", "ai-toolkit's linear is --model.lora.rank 16 here"),
    (
        TrainDitConfig,
        "config: {process: [{training_folder: out, datasets: [{folder_path: cats}]}]}",
        "ai-toolkit's training_folder is --train.output_dir out here; ai-toolkit's folder_path is --data.train_path",
    ),
    (TrainDitConfig, "sample: {sample_every: 250}", "ai-toolkit's sample_every is --sample.every_steps 250 here"),
    (TextRLConfig, "algorithm: {objective: {type: ppo_clip, epsilon: 0.1}}", "is algorithm.objective.clip_range here"),
]


def test_an_option_of_another_tool_is_not_said_to_be_a_name_that_looks_like_it(tmp_path):
    said = refusal(TrainTextConfig, "train: {learning_rate: 1.0e-5}", tmp_path=tmp_path)
    assert said.endswith("unknown key; TRL's and LLaMA-Factory's learning_rate is --train.lr 1e-05 here")


@pytest.mark.parametrize(("schema", "text", "said"), SAID)
def test_an_option_of_another_tool_is_named_by_ours(schema, text, said, tmp_path):
    assert said in refusal(schema, text, tmp_path=tmp_path)
    assert yaml.safe_load(text), "a file that could be somebody's"


def test_options_of_the_command_line_and_of_nobody(tmp_path):
    said = refusal(TextRLConfig, arguments=["--rollout-batch-size", "8", "--nobodys_option", "1"], tmp_path=tmp_path)
    assert "slime's rollout_batch_size is --rollout.num_prompts 8 here" in said
    (line,) = [line for line in said.splitlines() if "nobodys_option" in line]
    assert line.endswith("eval, runtime, critic"), "nothing is made up"


@pytest.mark.parametrize("schema", SCHEMAS)
def test_help_shows_twenty_options_first_and_every_other_by_section(schema):
    sections = describe_sections(schema)
    fields = [field.path for section in sections for field in section.fields]
    first = format_help(schema, "")
    shown = re.findall(r"^  --([\w.]+) ", first, re.M)
    assert [name for name in FIRST if name in fields][:NUM_FIRST] == [name for name in shown if name in fields]
    assert sum(name in fields for name in shown) == NUM_FIRST and f"{NUM_FIRST} of {len(fields)} options" in first
    by_section = "\n".join(
        format_help(schema, name)
        for name in dict.fromkeys(section.path.split(".")[0] for section in sections if section.path)
    )
    assert set(re.findall(r"^  --([\w.]+) ", by_section, re.M)) == set(fields)
    assert set(re.findall(r"^  --([\w.]+) ", format_help(schema), re.M)) == set(fields)
    assert len(first.splitlines()) < 90 < len(format_help(schema).splitlines())


def test_help_of_one_option_and_of_none():
    assert format_help(TextRLConfig, "train.lr").startswith("  --train.lr float")
    with pytest.raises(ConfigError, match=r"--help rolout: no section or field of that name; did you mean rollout\?"):
        format_help(TextRLConfig, "rolout")
    assert help_part(["--help", "train"]) == "train" and help_part(["-h"]) == "" == help_part(["a.yaml", "--help"])
    assert help_part(["--help", "a.yaml"]) == "" == help_part(["--help", "--train.lr", "1"])
