"""Configuration: every mistake is named with its place and its remedy; what is resolved can be run again."""

import dataclasses
import re
import shlex
import sys
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from sfumato.algorithms.windows import AllSteps
from sfumato.config.base import Variant, find_variants
from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig
from sfumato.config.help import attribute_docs, format_help
from sfumato.config.load import load_config, parse_config, parse_overrides
from sfumato.config.recipes import DIFFUSION_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.rl import RLConfig
from sfumato.config.tasks import TASKS, schema_of
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.yaml_text import config_text, read_yaml
from sfumato.errors import ConfigError
from sfumato.rewards.base import Reward
from sfumato.rewards.server.app import RewardServerConfig
from tests.tiny import ROOT

QUICKSTART_RL = Path(__file__).parents[2] / "configs" / "quickstart" / "rl.yaml"
SCHEMAS = [schema_of(task) for task in TASKS]

DIT = """
model: {config_path: model.yaml}
data: {data_type: glyphs}
train: {output_dir: out}
"""

RL = """
model: {config_path: model.yaml}
data: {data_type: glyphs}
rollout: {num_prompts: 4, n: 4, micro_batch_size: 8}
reward:
  rewards:
    - {type: ocr, detect: false}
    - {type: jpeg_compressibility, weight: 0.5}
algorithm:
  recipe: flow_grpo
train: {output_dir: out, max_steps: 3}
"""

CUSTOM = """
from dataclasses import dataclass
from typing import ClassVar

from sfumato.algorithms.dynamics import FlowSDE


@dataclass(frozen=True)
class MyDynamics(FlowSDE):
    type: ClassVar[str] = "mine"
    strength: float = 0.25


@dataclass(frozen=True)
class SameType(FlowSDE):
    type: ClassVar[str] = "sde"


@dataclass(frozen=True)
class NoType(FlowSDE):
    pass


class NoDataclass:
    pass
"""


@pytest.fixture
def rl_file(tmp_path):
    path = tmp_path / "rl.yaml"
    path.write_text(RL)
    return path


@pytest.fixture
def dit_file(tmp_path):
    path = tmp_path / "dit.yaml"
    path.write_text(DIT)
    return path


@pytest.fixture
def custom_module(tmp_path, monkeypatch):
    (tmp_path / "my_config_parts.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_config_parts"
    sys.modules.pop("my_config_parts", None)


def rl(path, *overrides):
    return parse_config(TrajectoryRLConfig, [str(path), *overrides])


def dit(path, *overrides):
    return parse_config(TrainDitConfig, [str(path), *overrides])


def refusal(schema, path, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse_config(schema, [str(path), *overrides])
    return str(caught.value)


def edited(path, old, new):
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    return path


# Mistakes; tests/unit/test_config_files.py tries a typo in every key

MISTAKES = [
    # schema, arguments, what the message says
    (TrainDitConfig, ["--model.lora.rnak", "8"], "rnak: unknown key; did you mean 'rank'? (valid here: rank, alpha,"),
    (TrajectoryRLConfig, ["--algorithm.dynamics.type", "sdee"], "unknown type 'sdee'; did you mean 'sde'?"),
    (TrajectoryRLConfig, ["--reward.rewards.0", "orc"], "--reward.rewards.0.type: unknown type 'orc'"),
    (
        TrajectoryRLConfig,
        ["--reward.rewards.0.weight", "much"],
        "valid number (given: 'much')",
    ),
    (TrajectoryRLConfig, ["--algorithm.dynamics.noise_level", "0"], "--algorithm.dynamics: noise_level"),
    (TrajectoryRLConfig, ["--algorithm.dynamics.noise_level", "true"], "noise_level: Input should be a valid number"),
    (TrajectoryRLConfig, ["--train.save_steps", "true"], "save_steps: Input should be a valid integer"),
    (
        TrajectoryRLConfig,
        ["--reward.rewards.3.type", "ocr"],
        "--reward.rewards.3: index 3 is out of range",
    ),
    (TrainDitConfig, ["--model.lora", "null", "--model.lora.rank", "3"], "--model.lora.rank goes into --model.lora"),
    (TrainDitConfig, ["--train.lr"], "override --train.lr has no value"),
    (TrainDitConfig, ["--train.lr", "--train.seed", "1"], "override --train.lr has no value"),
    (TrainDitConfig, ["train.lr=3", "3"], "unexpected argument 'train.lr=3'"),
    (TrainDitConfig, ["-train.lr", "3"], "unexpected argument '-train.lr'"),
    (TrainDitConfig, ["--", "3"], "unexpected argument '--'"),
    (TrainDitConfig, ["--train.output_dir", "runs/a: b"], "quotes within quotes, --train.output_dir '"),
    (TrainDitConfig, ["--train.trackers", "wandb"], "a list is written --train.trackers '[wandb]'"),
    (TrainDitConfig, ["--train.betas", "(0.9,0.95)"], "a list is written --train.betas '[0.9,0.95]'"),
    (TrainDitConfig, ["--train.betas.1", "0.95"], "--train.betas: the file has no list here whose entries could be"),
]


@pytest.mark.parametrize(("schema", "arguments", "said"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_on_the_command_line_is_named(dit_file, rl_file, schema, arguments, said):
    message = refusal(schema, dit_file if schema is TrainDitConfig else rl_file, *arguments)
    assert said in message and "\n" not in message


def test_an_unknown_type_in_the_file_is_named_with_the_nearest(rl_file):
    edited(rl_file, "type: ocr", "type: orc")
    message = refusal(TrajectoryRLConfig, rl_file)
    assert message.startswith(f"{rl_file}: reward.rewards.0.type: unknown type 'orc'; did you mean 'ocr'?")


def test_every_mistake_is_listed_at_once(dit_file):
    edited(dit_file, "output_dir: out", "output_dir: out, sead: 2")
    lines = refusal(TrainDitConfig, dit_file, "--data.hieght", "8", "--train.lr", "-1").splitlines()
    assert len(lines) == 3
    assert {line.split(": ")[0] for line in lines} == {str(dit_file), "--data.hieght", "--train.lr"}


def test_unknown_recipe_lists_the_known_ones_and_nothing_else(rl_file):
    for value in ("flow_grop", "[flow_grpo]"):
        message = refusal(TrajectoryRLConfig, rl_file, "--algorithm.recipe", value)
        assert "algorithm.recipe" in message and "known: flow_grpo, flow_grpo_fast, flow_cps" in message
        assert "\n" not in message


# Values


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "1.E-5", ".1e-4", "0.00001"])
def test_numbers_as_people_write_them(dit_file, text):
    assert dit(dit_file, "--train.lr", text).train.lr == 1e-5
    edited(dit_file, "output_dir: out", f"output_dir: out, lr: {text}")
    config = dit(dit_file)
    assert config.train.lr == 1e-5


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "5.0e-4", "-2e+3", "+.5E2", "3.e0"])
def test_scientific_notation_is_a_number_before_any_field_asks_for_one(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(f"a: {text}\nb: [{text}]\n")
    for value in (*read_yaml(path)["b"], read_yaml(path)["a"], parse_overrides(["--a", text])["a"]):
        assert isinstance(value, float) and value == float(text)


def test_numbers_inside_variants_and_lists(rl_file):
    config = rl(rl_file, "--algorithm.objective.clip_range", "5.0e-4", "--train.betas", "[9e-1, 9.9E-1]")
    assert config.algorithm.objective.clip_range == 5e-4
    assert config.train.betas == (0.9, 0.99)


def test_text_that_looks_a_little_like_a_number_stays_text(dit_file):
    assert dit(dit_file, "--train.output_dir", "1e-5b").train.output_dir == "1e-5b"


def test_a_key_that_stands_twice_is_an_error_with_its_line(dit_file):
    edited(dit_file, "train: {output_dir: out}", "train:\n  output_dir: a\n  seed: 1\n  output_dir: b")
    message = refusal(TrainDitConfig, dit_file)
    assert f"{dit_file}:7: key 'output_dir' stands twice" in message


def test_yaml_anchors_can_be_merged(dit_file):
    edited(dit_file, "{output_dir: out}", "\n  <<: {seed: 3, lr: 1e-3}\n  output_dir: out\n  lr: 2e-3")
    train = dit(dit_file).train
    assert (train.seed, train.lr) == (3, 2e-3)


@pytest.mark.parametrize(("content", "reason"), [("- a\n- b\n", "mapping"), ("a: [1\n", "not valid YAML")])
def test_broken_files_are_named(tmp_path, content, reason):
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    message = refusal(TrainDitConfig, path)
    assert str(path) in message and reason in message


def test_an_empty_file_misses_every_required_field(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert refusal(TrainDitConfig, path).splitlines() == [
        f"{path}: {name}: required, but not set" for name in ("model", "data", "train")
    ]


def test_a_missing_file_suggests_a_near_one(rl_file):
    message = refusal(TrajectoryRLConfig, rl_file.with_name("rll.yaml"))
    assert "configuration file not found" in message and f"did you mean {rl_file}?" in message


@pytest.mark.parametrize("arguments", [[], ["--train.lr", "1e-4"]])
def test_the_first_argument_must_be_a_file(arguments):
    with pytest.raises(ConfigError, match="first argument must be a YAML configuration file; --help"):
        parse_config(TrainDitConfig, arguments)


@pytest.mark.parametrize("text", ["@notes", "*star", "[run 1] a", "%d"])
def test_a_text_that_is_no_yaml_is_shown_as_it_is_written(dit_file, text):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["--train.output_dir", text])
    command = str(caught.value).partition("as a text it is written ")[2]
    overrides = parse_overrides(shlex.split(command))
    assert load_config(TrainDitConfig, dit_file, overrides).train.output_dir == text


def test_overrides_with_an_equals_sign_and_negative_numbers(dit_file):
    config = dit(dit_file, "--flow.logit_mean=-0.5", "--train.output_dir=a=b", "--data.max_bad_rows", "3")
    assert (config.flow.logit_mean, config.train.output_dir, config.data.max_bad_rows) == (-0.5, "a=b", 3)


# Overrides of lists and variants


def test_override_of_a_list_entry_by_index_keeps_the_rest(rl_file):
    rewards = rl(rl_file, "--reward.rewards.0.weight", "2").reward.rewards
    assert [reward.type for reward in rewards] == ["ocr", "jpeg_compressibility"]
    assert (rewards[0].weight, rewards[0].detect, rewards[1].weight) == (2.0, False, 0.5)


def test_an_index_behind_the_last_appends(rl_file):
    rewards = rl(rl_file, "--reward.rewards.2.type", "brightness", "--reward.rewards.2.weight", "3").reward.rewards
    assert [(reward.type, reward.weight) for reward in rewards[1:]] == [
        ("jpeg_compressibility", 0.5),
        ("brightness", 3.0),
    ]


def test_an_override_with_the_same_type_keeps_the_other_fields(rl_file):
    edited(rl_file, "recipe: flow_grpo", "window: {type: random, size: 2, range: [1, 6]}")
    window = rl(rl_file, "--algorithm.window.size", "4").algorithm.window
    assert (window.type, window.size, window.range) == ("random", 4, (1, 6))
    window = rl(rl_file, "--algorithm.window.type", "random").algorithm.window
    assert (window.size, window.range) == (2, (1, 6))


def test_another_type_replaces_the_fields(rl_file):
    edited(rl_file, "recipe: flow_grpo", "dynamics: {type: sde, noise_level: 0.3}")
    assert rl(rl_file).algorithm.dynamics.noise_level == 0.3
    assert rl(rl_file, "--algorithm.dynamics.type", "cps").algorithm.dynamics.noise_level == 0.8
    rewards = rl(rl_file, "--reward.rewards.0.type", "brightness").reward.rewards
    assert rewards[0].type == "brightness" and not hasattr(rewards[0], "detect")


def test_a_plain_name_stands_for_a_variant_with_its_defaults(rl_file):
    assert rl(rl_file, "--algorithm.window", "all").algorithm.window.type == "all"


def test_an_optional_section_is_made_by_overriding_its_field(dit_file):
    assert dit(dit_file).model.lora is None
    assert dit(dit_file, "--model.lora.rank", "8").model.lora.rank == 8


@pytest.mark.parametrize("recipe", sorted(DIFFUSION_RECIPES))
def test_recipes_preset_all_parts(rl_file, recipe):
    schema = TrajectoryRLConfig if recipe in TRAJECTORY_RECIPES else ForwardRLConfig
    overrides = ["--algorithm.recipe", recipe, "--train.micro_batch_size", "4"]
    algorithm = parse_config(schema, [str(rl_file), *overrides]).algorithm
    for part, fields in DIFFUSION_RECIPES[recipe].items():
        built = getattr(algorithm, part)
        if not isinstance(fields, dict):
            assert built == fields
            continue
        assert built.type == fields["type"]
        for name, value in fields.items():
            assert getattr(built, name) == (tuple(value) if isinstance(value, list) else value), (part, name)


def test_fields_override_the_recipe(rl_file):
    overrides = [
        "--algorithm.recipe",
        "flow_grpo_fast",
        "--algorithm.window.size",
        "2",
        "--algorithm.kl.type",
        "gaussian",
    ]
    algorithm = rl(rl_file, *overrides).algorithm
    assert (algorithm.window.type, algorithm.window.size, algorithm.window.range) == ("random", 2, (0, 5))
    assert (algorithm.kl.type, algorithm.kl.coef) == ("gaussian", 0.01)
    assert algorithm.objective.clip_range == 1e-5


# Classes of one's own


def test_a_class_of_your_own_is_named_by_import_path(rl_file, custom_module):
    name = f"{custom_module}:MyDynamics"
    dynamics = rl(rl_file, "--algorithm.dynamics.type", name, "--algorithm.dynamics.strength", "0.5").algorithm.dynamics
    assert type(dynamics).__name__ == "MyDynamics" and (dynamics.strength, dynamics.noise_level) == (0.5, 0.7)
    message = refusal(TrajectoryRLConfig, rl_file, "--algorithm.dynamics", f"{{type: '{name}', strenght: 1}}")
    assert message.startswith("--algorithm.dynamics.strenght: unknown key; did you mean 'strength'?")


@pytest.mark.parametrize("attribute", ["Missing", "NoDataclass"])
def test_a_class_of_your_own_that_cannot_be_used(rl_file, custom_module, attribute):
    message = refusal(TrajectoryRLConfig, rl_file, "--algorithm.dynamics.type", f"{custom_module}:{attribute}")
    assert f"cannot import type '{custom_module}:{attribute}'" in message


@pytest.mark.parametrize("name", ["no_such_module_here:A", "..relative:A", ":A"])
def test_a_module_that_cannot_be_imported(rl_file, name):
    assert f"cannot import type '{name}'" in refusal(TrajectoryRLConfig, rl_file, "--algorithm.dynamics.type", name)


# Dump


def assert_dump_is_stable(config, schema, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(config_text(config))
    again = load_config(schema, first)
    assert again == config
    second.write_text(config_text(again))
    assert first.read_text() == second.read_text()
    return first.read_text()


def test_a_resolved_config_can_be_run_again(rl_file, tmp_path):
    overrides = [
        "--algorithm.recipe",
        "flow_cps",
        "--model.lora.rank",
        "4",
        "--train.lr",
        "1e-5",
        "--train.eps",
        "1e-15",
    ]
    text = assert_dump_is_stable(rl(rl_file, *overrides), TrajectoryRLConfig, tmp_path)
    assert "noise_level: 0.8" in text and "recipe: flow_cps" in text


def test_a_resolved_supervised_config_can_be_run_again(dit_file, tmp_path):
    assert_dump_is_stable(dit(dit_file, "--sample.prompts", '["Straße: \\"x\\"", "{a}"]'), TrainDitConfig, tmp_path)
    config = parse_config(TrainAutoencoderConfig, [str(dit_file), "--kl_coef", "1e-6"])
    assert_dump_is_stable(config, TrainAutoencoderConfig, tmp_path)


@pytest.mark.parametrize("name", ["MyDynamics", "SameType", "NoType"])
def test_a_config_with_a_class_of_your_own_can_be_run_again(rl_file, tmp_path, custom_module, name):
    config = rl(rl_file, "--algorithm.dynamics.type", f"{custom_module}:{name}")
    assert f"type: {custom_module}:{name}" in assert_dump_is_stable(config, TrajectoryRLConfig, tmp_path)


# Combinations that are refused

CROSS_CHECKS = [
    # schema, overrides, what the message names
    (TrainDitConfig, ["--model.model_path", "a"], ["model.model_path", "model.config_path"]),
    (TrainDitConfig, ["--model.config_path", "null"], ["model.model_path", "model.config_path"]),
    (TrainDitConfig, ["--train.lr_min", "1"], ["train.lr_min", "train.lr "]),
    (TrainDitConfig, ["--data.glyphs.template", "a word"], ["template", "{word}"]),
    (TrainDitConfig, ["--data.glyphs.characters", "''"], ["characters"]),
    (TrainDitConfig, ["--data.glyphs.font_sizes", "[]"], ["font_sizes"]),
    (TrainDitConfig, ["--data.data_type", "image_text"], ["data.train_path", "data.data_type"]),
    (TrainDitConfig, ["--data.train_path", "a.jsonl"], ["data.train_path", "data.data_type"]),
    (
        TrainDitConfig,
        ["--train.global_batch_size", "5", "--train.micro_batch_size", "2"],
        ["train.global_batch_size", "train.micro_batch_size"],
    ),
    (
        TrainDitConfig,
        ["--model.keep_encoders", "false", "--model.lora.rank", "4"],
        ["model.keep_encoders", "data.cache_dir"],
    ),
    (
        TrainDitConfig,
        ["--model.keep_encoders", "false", "--data.cache_dir", "cache"],
        ["model.keep_encoders", "model.config_path", "model.model_path"],
    ),
    (TrajectoryRLConfig, ["--data.data_type", "prompts"], ["data.train_path", "data.eval_path", "data.data_type"]),
    (
        TrajectoryRLConfig,
        ["--data.data_type", "prompts", "--data.train_path", "a.txt"],
        ["data.train_path", "data.eval_path", "data.data_type"],
    ),
    (TrajectoryRLConfig, ["--algorithm.dynamics.type", "ode"], ["algorithm.dynamics"]),
    (TrajectoryRLConfig, ["--algorithm.window", "null"], ["algorithm.window", "'type'"]),
    (TrajectoryRLConfig, ["--algorithm.solver", "dpm2"], ["algorithm.solver", "unknown key"]),
    (TrajectoryRLConfig, ["--algorithm.sample_with", "old"], ["algorithm.sample_with", "unknown key"]),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "rwr", "--algorithm.sample_with", "old"],
        ["algorithm.old", "algorithm.sample_with"],
    ),
    (TrajectoryRLConfig, ["--algorithm.objective", "nft"], ["nft", "another task", "tasks/rl_diffusion_forward.py"]),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "diffusion_nft", "--algorithm.dynamics", "sde"],
        ["algorithm.dynamics", "unknown key"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "diffusion_nft", "--algorithm.kl", "gaussian"],
        ["algorithm.kl", "gaussian", "velocity_mse"],
    ),
    (ForwardRLConfig, ["--algorithm.recipe", "awm", "--algorithm.ema", "null"], ["algorithm.ema", "awm"]),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "flow_dpo", "--algorithm.advantage", "best"],
        ["algorithm.advantage", "best", "dpo", "best_worst"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "rwr", "--algorithm.advantage", "group"],
        ["algorithm.advantage", "group", "rwr", "algorithm.objective.temperature"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "diffusion_nft", "--algorithm.timesteps.first", "20"],
        ["algorithm.timesteps", "rollout.num_inference_steps"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "diffusion_nft", "--rollout.same_latent", "true"],
        ["rollout.same_latent", "unknown key"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "dgpo", "--train.micro_batch_size", "3"],
        ["train.micro_batch_size 3", "dgpo", "4 trained samples"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "flow_dpo", "--train.global_batch_size", "2", "--train.micro_batch_size", "2"],
        ["train.global_batch_size 2", "dpo", "rollout.n 4"],
    ),
    (
        ForwardRLConfig,
        ["--algorithm.recipe", "dgpo", "--train.micro_batch_size", "4", "--algorithm.kl.reference_guidance_scale", "3"],
        ["algorithm.kl.reference_guidance_scale", "dgpo"],
    ),
    (TrajectoryRLConfig, ["--train.max_steps", "null"], ["train.max_steps"]),
    (
        TrajectoryRLConfig,
        ["--train.global_batch_size", "5"],
        ["rollout.num_prompts", "rollout.n", "train.global_batch_size"],
    ),
    (
        TrajectoryRLConfig,
        ["--reward.rewards.0.evaluation_only", "true", "--reward.rewards.1.evaluation_only", "true"],
        ["reward.rewards", "evaluation_only"],
    ),
    (TrajectoryRLConfig, ["--model.lora.dropout", "0.1"], ["model.lora.dropout"]),
    (TrajectoryRLConfig, ["--rollout.guidance_scale", "0"], ["rollout.guidance_scale", "without it", "set 1"]),
    (
        TrajectoryRLConfig,
        ["--algorithm.recipe", "flow_grpo_fast", "--rollout.num_inference_steps", "5"],
        ["algorithm.window", "rollout.num_inference_steps"],
    ),
]


@pytest.mark.parametrize(("schema", "overrides", "names"), CROSS_CHECKS, ids=lambda value: str(value)[:60])
def test_impossible_combinations_are_refused_naming_the_fields(
    dit_file, rl_file, monkeypatch, schema, overrides, names
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if schema is ForwardRLConfig:
        edited(rl_file, "recipe: flow_grpo", "recipe: diffusion_nft")
    path = rl_file if issubclass(schema, RLConfig) else dit_file
    parse_config(schema, [str(path)])  # without the overrides it is fine
    message = refusal(schema, path, *overrides)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_the_batch_must_divide_over_the_processes(dit_file, monkeypatch):
    overrides = ["--train.global_batch_size", "6", "--train.micro_batch_size", "2"]
    dit(dit_file, *overrides)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 x 2 data-parallel processes = 4" in refusal(TrainDitConfig, dit_file, *overrides)


def test_a_reward_of_whole_groups_needs_whole_groups(rl_file, tmp_path, monkeypatch):
    (tmp_path / "my_group_reward.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from sfumato.rewards.base import Reward\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class GroupReward(Reward):\n"
        "    type: ClassVar[str] = 'together'\n"
        "    groupwise: ClassVar[bool] = True\n\n"
        "    def score(self, samples):\n"
        "        return [0.0] * len(samples)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["--reward.rewards.2.type", "my_group_reward:GroupReward"]
    assert rl(rl_file, *overrides).reward.rewards[2].label == "together"
    message = refusal(TrajectoryRLConfig, rl_file, *overrides, "--rollout.micro_batch_size", "6")
    for name in ("'together'", "rollout.micro_batch_size 6", "rollout.n 4"):
        assert name in message


# Help, and the size of the surface


def fields_of(schema, prefix=""):
    """(path, variant or None, field) of every field, sections entered."""
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        nested = list(annotated_parts(field.annotation))
        section = next((part for part in nested if isinstance(part, type) and issubclass(part, BaseModel)), None)
        variant = next((part for part in [*field.metadata, *nested] if isinstance(part, Variant)), None)
        yield path, variant, section, field
        if section is not None:
            yield from fields_of(section, f"{path}.")


def annotated_parts(annotation):
    """An annotation and everything inside it, the metadata of ``Annotated`` included."""
    yield annotation
    for part in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from annotated_parts(part)


def test_the_walk_finds_what_is_known_to_be_there():
    results = {path: (variant, section) for path, variant, section, _ in fields_of(TrajectoryRLConfig)}
    assert results["reward.rewards"][0] == Variant("sfumato.rewards")
    assert results["algorithm.dynamics"][0] == Variant("sfumato.algorithms.dynamics")
    assert "model.lora.rank" in results and "data.glyphs.held_out" in results and results["model.lora"][1] is not None


@pytest.mark.parametrize("schema", [*SCHEMAS, RewardServerConfig], ids=lambda schema: schema.__name__)
def test_help_lists_every_field_with_a_sentence_and_its_default(schema):
    lines = format_help(schema).splitlines()
    for path, variant, section, field in fields_of(schema):
        if section is not None:
            header = next(line for line in lines if line.startswith(f"[{path}]"))
            assert len(header.removeprefix(f"[{path}]").split()) >= 3, path
            if not field.is_required() and field.default is None:
                assert f"  --{path} section  (default: null)" in lines
            continue
        number = next(i for i, line in enumerate(lines) if line.startswith(f"  --{path} "))
        default = "required" if field.is_required() else field.default
        shown = "null" if default is None else str(default)
        *parents, name = path.split(".")
        preset = schema.presets({})
        for parent in parents:
            preset = preset.get(parent, {})
        shown = f"{preset[name]}, from the recipe" if name in preset else shown
        assert lines[number].endswith(f"(default: {shown})"), path
        assert len(lines[number + 1].split()) >= 2, f"{path} has no sentence"
        assert " ".join(field.description.split())[:40] in lines[number + 1].strip(), path
        for cls in find_variants(variant.source).values() if variant else []:
            start = next(i for i in range(number, len(lines)) if lines[i].startswith(f"      type: {cls.type}  "))
            assert len(lines[start].split()) >= 5, f"{cls} has no sentence"
            below = lines[start : start + 1 + len(dataclasses.fields(cls))]
            entry = f"{path}.0" if "list" in str(field.annotation) else path
            for setting in dataclasses.fields(cls):
                line = next(line for line in below if line.startswith(f"        {entry}.{setting.name} = "))
                value, _, text = line.partition(" = ")[2].partition("  ")
                made = setting.default_factory is not dataclasses.MISSING
                default = setting.default_factory() if made else setting.default
                assert value == ("required" if default is dataclasses.MISSING else str(default)), line
                assert len(text.split()) >= 2, f"{cls.__name__}.{setting.name} has no sentence"
                assert text == attribute_docs(cls)[setting.name]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["config.yaml", "--help"]])
def test_help_is_printed_and_ends_the_program(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainDitConfig, arguments)
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: bash train.sh TASK.py CONFIG.yaml") and "--train.lr float" in output


def test_the_whole_surface_stays_small():
    everywhere = set()
    for schema in [*SCHEMAS, RewardServerConfig]:
        sections, parts, modality = set(), set(), getattr(schema, "modality", "")
        for path, variant, section, _ in fields_of(schema):
            if section is None:
                sections.add(re.sub(r"pools\.\w+", "pools.role", path))  # every role has the same pool
            for cls in find_variants(variant.source).values() if variant else []:
                if modality and getattr(cls, "modality", "") not in ("", modality):
                    continue  # which this task refuses
                declared = {(declaring_class(cls, field.name), field.name) for field in dataclasses.fields(cls)}
                special = [name for declaring, name in declared if declaring is not Reward]
                assert len(special) <= 14, f"{cls.__name__} has {len(special)} fields"
                parts |= {(variant.source, field.name) for field in dataclasses.fields(cls)}  # one name, one meaning
        limit = 280 if schema is TextRLConfig else 250
        assert len(sections) + len(parts) < limit, f"{schema.__name__}: {len(sections)} fields, {len(parts)} of parts"
        everywhere |= sections
    assert 150 < len(everywhere) < 285, f"{len(everywhere)} fields in the sections of all tasks"


def declaring_class(cls, name):
    """The base of a dataclass that states a field first."""
    return next(base for base in reversed(cls.__mro__) if name in vars(base).get("__annotations__", {}))


def test_a_type_that_only_names_the_preset_keeps_the_fields_of_the_file(tmp_path: Path) -> None:
    text = QUICKSTART_RL.read_text().replace("noise_level: 0.7", "noise_level: 0.5")
    assert "noise_level: 0.5" in text
    (tmp_path / "rl.yaml").write_text(text)
    config = load_config(
        TrajectoryRLConfig, tmp_path / "rl.yaml", parse_overrides(["--algorithm.dynamics.type", "sde"])
    )
    assert config.algorithm.dynamics.noise_level == 0.5


def test_another_type_replaces_a_part_that_the_file_wrote_without_its_type() -> None:
    config = load_config(TrajectoryRLConfig, QUICKSTART_RL, parse_overrides(["--algorithm.window.type", "all"]))
    assert config.algorithm.window == AllSteps()


@pytest.mark.parametrize("field", ["rollout.num_prompts", "eval.num_prompts"])
def test_every_process_needs_a_prompt(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    overrides = ["--train.global_batch_size", "null", f"--{field}", "3"]
    with pytest.raises(ConfigError, match=rf"{field} 3 .* 4 data-parallel processes"):
        load_config(TrajectoryRLConfig, QUICKSTART_RL, parse_overrides(overrides))


def test_preference_training_refuses_a_moving_average(tmp_path):
    from sfumato.config.text import TrainTextDpoConfig

    sections = {
        "model": {"model_path": "m"},
        "data": {"data_type": "preference", "train_path": "d.jsonl"},
        "train": {"output_dir": str(tmp_path), "ema_decay": 0.9},
    }
    with pytest.raises(ConfigError, match=r"train\.ema_decay"):
        load_config(TrainTextDpoConfig, overrides=sections)


def test_a_field_without_its_section_or_in_another_is_named_with_it():
    tiny = ROOT / "configs" / "tiny" / "train_text.yaml"
    for overrides, message in (
        (["--lr", "1e-4"], "--lr: unknown key; did you mean --train.lr?"),
        (["--model.max_steps", "3"], "--model.max_steps: unknown key; did you mean --train.max_steps?"),
        (["--train.lrr", "3"], "--train.lrr: unknown key; did you mean 'lr'?"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(schema_of("train_text"), tiny, parse_overrides(overrides))
        assert str(error.value).startswith(message)


def test_null_for_a_field_takes_what_belongs_to_it_along(tmp_path):
    """The tokenizer of bytes would else be that of a model with a vocabulary of its own."""
    tiny = ROOT / "configs" / "tiny" / "train_text.yaml"
    other = ["--model.config_path", "null", "--model.model_path", str(tmp_path)]
    assert load_config(schema_of("train_text"), tiny, parse_overrides(other)).model.tokenizer_path is None
    named = [*other, "--model.tokenizer_path", "bytes"]
    assert load_config(schema_of("train_text"), tiny, parse_overrides(named)).model.tokenizer_path == "bytes"
    files = tmp_path / "files.yaml"
    files.write_text(
        tiny.read_text().replace(
            "synthetic: {problem: reverse, max_length: 4, num_rows: 50}", "train_path: a\n  eval_path: b"
        )
    )
    synthetic = ["--data.train_path", "null", "--data.synthetic.problem", "sort"]
    assert load_config(schema_of("train_text"), files, parse_overrides(synthetic)).data.eval_path is None
