"""What is given is used, refused, or said: nothing in a configuration is ignored in silence."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.base import Section, Variant, find_variants
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig
from sfumato.config.dit_dpo import TrainDitDpoConfig
from sfumato.config.load import dump_config, load_config, merge
from sfumato.config.reward_server import RewardServerConfig
from sfumato.config.text import TrainTextConfig, TrainTextDpoConfig
from sfumato.errors import ConfigError

SECTIONS: dict[type[Section], dict[str, Any]] = {
    TrainTextConfig: {"data": {"train_path": "d.jsonl"}},
    TrainTextDpoConfig: {"data": {"train_path": "d.jsonl", "data_type": "preference"}},
    TrainDitConfig: {"data": {"data_type": "glyphs"}},
    TrainDitDpoConfig: {"data": {"data_type": "glyphs"}},
    TrainAutoencoderConfig: {"data": {"data_type": "glyphs"}},
    DiffusionRLConfig: {
        "data": {"data_type": "glyphs"},
        "rollout": {"num_prompts": 4, "n": 4, "micro_batch_size": 8},
        "reward": {"rewards": ["brightness"]},
        "train": {"max_steps": 3},
    },
}
"""The least that each task must be given besides a model and an output_dir."""


def given(schema: type[Section], *overrides: dict[str, Any]) -> Any:
    """A configuration of a task with that much and what is laid over it."""
    content: dict[str, Any] = {"model": {"model_path": "m"}, "train": {"output_dir": "out"}}
    for each in (SECTIONS[schema], *overrides):
        content = merge(content, each)
    return load_config(schema, None, content)


def nested(path: str, value: Any) -> dict[str, Any]:
    """``a.b`` and a value as mappings."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def refusal(schema: type[Section], *overrides: dict[str, Any]) -> str:
    """The message with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        given(schema, *overrides)
    return str(caught.value)


def inside(annotation: Any) -> typing.Iterator[Any]:
    """An annotation and everything in it."""
    yield annotation
    for each in typing.get_args(annotation):
        yield from inside(each)


def floats_of(schema: type[Section], prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    """Fields that take a number with a fraction, with a value of their form around the number."""
    for name, field in schema.model_fields.items():
        parts = list(inside(field.annotation))
        section = next((each for each in parts if isinstance(each, type) and issubclass(each, Section)), None)
        if section is not None and list not in (typing.get_origin(each) for each in parts):
            yield from floats_of(section, f"{prefix}{name}.")
        elif section is not None:
            yield from ((f"{prefix}{name}", lambda x, at=at: [nested(at, x)]) for at, _ in floats_of(section))
        elif tuple in (typing.get_origin(each) for each in parts) and float in parts:
            yield f"{prefix}{name}", lambda x: [x, 0.5]
        elif float in parts:
            yield f"{prefix}{name}", lambda x: x


@pytest.mark.parametrize("schema", SECTIONS, ids=lambda schema: schema.__name__)
def test_a_number_that_is_not_finite_is_refused_everywhere(schema: type[Section]) -> None:
    given(schema)
    fields = dict(floats_of(schema))
    assert len(fields) > 12 and {"train.lr", "train.betas", "train.param_groups"} <= set(fields)
    for path, form in fields.items():
        for value in (math.inf, -math.inf, math.nan):
            if (path, value) == ("train.max_grad_norm", math.inf):
                continue
            assert f"--{path}" in refusal(schema, nested(path, form(value))), path


def test_numbers_of_parts_and_rewards_that_are_not_finite_are_refused() -> None:
    tried = 0
    for source in (
        "advantages",
        "objectives",
        "kl",
        "dynamics",
        "windows",
        "solvers",
        "timesteps",
        "decay",
        "off_policy",
    ):
        tried += not_finite_of(f"sfumato.algorithms.{source}")
    tried += not_finite_of("sfumato.rewards") + not_finite_of("sfumato.rewards.combinations")
    assert tried > 60


def not_finite_of(source: str) -> int:
    """Gives every number of the classes of a kind a value that is not finite; returns how many there are."""
    tried = 0
    for name, cls in find_variants(source).items():
        for field in dataclasses.fields(cls):
            if not field.init or "float" not in str(field.type) or "dict" in str(field.type):
                continue
            with pytest.raises(Exception, match="wrong fields of") as caught:
                Variant(source).validate({"type": name, field.name: math.inf})
            assert (field.name,) in [each["loc"] for each in caught.value.context["errors"] if "finite" in each["msg"]]
            tried += 1
    return tried


def test_a_norm_without_limit_is_written_and_read_again(tmp_path: Path) -> None:
    config = given(TrainDitConfig, {"train": {"max_grad_norm": math.inf}})
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(TrainDitConfig, tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"rewards.0: weight|rewards.0.weight"):
        load_config(RewardServerConfig, None, {"rewards": [{"type": "brightness", "weight": math.inf}]})
