"""Every field of every section, part and reward with hostile values: accepted, or refused in lines that people read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sfumato.config.base import Section
from sfumato.config.load import MOST_SHOWN, load_config, parse_config
from sfumato.config.secrets import secret_problem
from sfumato.config.tasks import TASKS, schema_of
from sfumato.config.yaml_text import config_text
from sfumato.errors import ConfigError
from sfumato.rewards.server.app import RewardServerConfig
from tests.hostile_values import TEXTS, hostile_arguments

SCHEMAS: dict[str, type[Section]] = {**{task: schema_of(task) for task in TASKS}, "server": RewardServerConfig}
TEXT = {"config_path": "m.yaml", "tokenizer_path": "bytes"}
PART = {"config_path": "m.yaml"}
GLYPHS = {"model": {"config_path": "m.yaml"}, "data": {"data_type": "glyphs"}, "train": {"output_dir": "out"}}
BASES: dict[str, dict[str, Any]] = {
    "train_text": {"model": TEXT, "data": {"synthetic": {}}, "train": {"output_dir": "out"}},
    "train_text_dpo": {
        "model": TEXT,
        "data": {"synthetic": {}, "data_type": "preference"},
        "train": {"output_dir": "out"},
    },
    "train_text_kto": {
        "model": TEXT,
        "data": {"synthetic": {}, "data_type": "unpaired"},
        "train": {"output_dir": "out"},
    },
    "train_text_reward": {
        "model": TEXT,
        "data": {"synthetic": {}, "data_type": "preference"},
        "reward": {"objective": "bradley_terry"},
        "train": {"output_dir": "out"},
    },
    "train_dit": GLYPHS,
    "train_dit_dpo": GLYPHS,
    "train_autoencoder": GLYPHS,
    "train_image_tokenizer": GLYPHS,
    "train_omni": {
        "model": {"foundation": PART, "encoder": PART, "image_tokenizer": "vq", "tokenizer_path": "bytes"},
        "data": {"synthetic": {"problem": "read_or_draw"}, "data_type": "omni_conversation"},
        "train": {"output_dir": "out"},
    },
    "rl_diffusion": {
        **GLYPHS,
        "rollout": {"num_prompts": 4, "n": 4, "micro_batch_size": 8},
        "reward": {"rewards": [{"type": "brightness"}]},
        "train": {"output_dir": "out", "max_steps": 3},
    },
    "rl_diffusion_forward": {
        **GLYPHS,
        "rollout": {"num_prompts": 4, "n": 4, "micro_batch_size": 8},
        "reward": {"rewards": [{"type": "brightness"}]},
        "train": {"output_dir": "out", "max_steps": 3},
    },
    "rl_diffusion_direct": {
        **GLYPHS,
        "rollout": {"num_prompts": 4},
        "reward": {"rewards": [{"type": "brightness"}]},
        "train": {"output_dir": "out", "max_steps": 3},
    },
    "rl_text": {
        "model": TEXT,
        "data": {"synthetic": {}},
        "rollout": {"num_prompts": 4, "n": 4},
        "reward": {"rewards": [{"type": "exact"}]},
        "train": {"output_dir": "out", "max_steps": 3},
    },
    "server": {"rewards": [{"type": "brightness"}]},
}
SLOWEST_S = 5.0


def try_all(schema: type[Section], path: Path, every: int) -> tuple[int, int]:
    """How many inputs were tried, and how many were accepted."""
    tried = accepted = 0
    for arguments in hostile_arguments(schema, every):
        tried += 1
        accepted += try_one(schema, path, arguments)
    return tried, accepted


def try_one(schema: type[Section], path: Path, arguments: list[str]) -> bool:
    started = time.process_time()
    try:
        config = parse_config(schema, [str(path), *arguments])
    except ConfigError as error:
        lines = str(error).split("\n")
        assert len(lines) <= MOST_SHOWN + 1, arguments
        for line in lines:
            assert line and line.isprintable() and len(line) < 2500, (arguments, line)
        config = None
    assert time.process_time() - started < SLOWEST_S, arguments
    if config is not None:
        path.with_name("dumped.yaml").write_text(config_text(config))
        assert load_config(schema, path.with_name("dumped.yaml")) == config, arguments
    return config is not None


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(BASES[request.param]))
    return path


@pytest.mark.parametrize(("task", "base"), [(task, task) for task in SCHEMAS], indirect=["base"])
def test_some_hostile_values_in_some_fields(task: str, base: Path) -> None:
    tried, accepted = try_all(SCHEMAS[task], base, every=211)
    assert tried > 20 and 0 < accepted < 0.3 * tried


@pytest.mark.slow
@pytest.mark.parametrize(("task", "base"), [(task, task) for task in SCHEMAS], indirect=["base"])
def test_all_hostile_values_in_every_field(task: str, base: Path) -> None:
    tried, accepted = try_all(SCHEMAS[task], base, every=1)
    print(f"{task}: {tried} inputs, {accepted} accepted", file=sys.stderr)
    assert tried > 2000 and 0 < accepted < 0.3 * tried


@pytest.mark.parametrize("base", ["train_dit"], indirect=True)
def test_broken_yaml_and_odd_command_lines(base: Path) -> None:
    schema = SCHEMAS["train_dit"]
    for text in TEXTS:
        forms = [[f"--train.seed={text}"], ["--train.seed", text], [f"--{text}=1"], [text], [f"--model={text}"]]
        for arguments in (*forms, [f"--train.{text}=1"]):
            assert not try_one(schema, base, arguments), arguments
        base.with_name("broken.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert not try_one(schema, base.with_name("broken.yaml"), [])
    numbers = ["1" * 5000, "0x" + "f" * 9000, "1:" + "59:" * 3000 + "1", "!!int a", "!!timestamp a", "2020-13-45"]
    odd = ["--..=1", "--train..seed=1", "--=1", "--train=5", "--", "-", "", "--\x1b[31m=1"]
    odd.append(f"--{'.'.join('a' * 3000)}=1")
    for argument in (*odd, *(f"--train.seed={number}" for number in numbers)):
        assert not try_one(schema, base, [argument]), argument


@pytest.mark.parametrize("base", ["rl_diffusion"], indirect=True)
def test_a_class_of_another_kind_cannot_stand_for_a_part(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base.parent / "odd_parts.py").write_text(
        "from dataclasses import dataclass\nfrom sfumato.rewards.base import Reward\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Abstract(Reward):\n    pass\n"
    )
    (base.parent / "odd_module.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(base.parent)
    for argument, said in (
        ("--algorithm.window=sfumato.algorithms.kl:NoKL", "it has no check, steps, as all types that can stand here"),
        ("--algorithm.kl=sfumato.rewards.pixels:JpegCompressibility", "it has no coef"),
        ("--reward.rewards.0=odd_parts:Abstract", "cannot make Abstract: Can't instantiate abstract class"),
        ("--reward.rewards.0=odd_module:Reward", "cannot import type 'odd_module:Reward': not today"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(SCHEMAS["rl_diffusion"], [str(base), argument])
        assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rewards.0.api_key_env", "sk-proj-0123456789abcdefghij"),
        ("rewards.0.api_key_env", "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"),
        ("rewards.0.api_key_env", "a3f5c9d2e8b14f6a9c7d3e5f1a2b4c6d8e9f0a1b"),
        ("rewards.0.api_key_env", "swordfish with spaces"),
        ("token_env", "ghp_0123456789abcdefghijABCDEFGHIJ"),
        ("rewards.0.base_urls", '["http://x/?k=sk-0123456789abcdefghij"]'),
        ("rewards.0.HF_TOKEN", "swordfish"),
        ("rewards.0.api-key", "swordfish"),
        ("host", "x -----BEGIN RSA PRIVATE KEY-----swordfish"),
    ],
)
def test_a_secret_in_a_configuration_is_refused_and_not_repeated(tmp_path, name, value):
    path = tmp_path / "server.yaml"
    path.write_text('rewards: [{type: remote, base_urls: ["http://127.0.0.1:1"]}]\n')
    with pytest.raises(ConfigError) as caught:
        parse_config(RewardServerConfig, [str(path), f"--{name}", value])
    said = str(caught.value)
    assert name in said and "environment variable" in said
    assert not any(part in said for part in ("swordfish", "0123456789"))


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "my_key", "HF_TOKEN", "KEY_OF_THE_REWARD_SERVER_2"])
def test_names_of_environment_variables_are_no_secrets(name):
    assert secret_problem(("reward", "api_key_env"), name) == ""
    assert secret_problem(("model", "image_token"), "<image>") == ""
