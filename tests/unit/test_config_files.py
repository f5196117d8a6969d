"""Every shipped YAML file is valid, and no typo in any of its keys goes unnoticed."""

import copy
from pathlib import Path

import pytest
import yaml

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig
from sfumato.config.load import load_config, read_yaml
from sfumato.config.sections import ModelConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model

ROOT = Path(__file__).parents[2]


def is_task(path):
    return "train" in read_yaml(path)


def schema_of(content):
    if "algorithm" in content or "rollout" in content:
        return DiffusionRLConfig
    if "flow" in content or "sample" in content:
        return TrainDitConfig
    return TrainAutoencoderConfig


FILES = sorted((ROOT / "configs").rglob("*.yaml"))
TASKS = [path for path in FILES if is_task(path)]
DESCRIPTIONS = [path for path in FILES if not is_task(path)]


def relative(path):
    return str(path.relative_to(ROOT / "configs"))


def key_paths(node, prefix=()):
    """The path of every key at every depth, lists entered."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(node, dict):
            yield (*prefix, key)
        yield from key_paths(value, (*prefix, key))


def typos(key):
    """The key with two letters swapped, and with one too many."""
    middle = len(key) // 2
    swapped = key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :]
    return [each for each in (f"{key}x", swapped) if each != key]


def renamed(content, path, name):
    content = copy.deepcopy(content)
    node = content
    for part in path[:-1]:
        node = node[part]
    items = [(name if key == path[-1] else key, value) for key, value in node.items()]
    node.clear()
    node.update(items)
    return content


def dotted(path):
    return ".".join(map(str, path))


def mutations(path):
    content = read_yaml(path)
    return [(content, place, typo) for place in key_paths(content) for typo in typos(place[-1])]


def test_the_walk_reaches_every_depth():
    content = {"a": {"b": 1}, "c": [{"dd": 1}, 2]}
    assert list(key_paths(content)) == [("a",), ("a", "b"), ("c",), ("c", 0, "dd")]
    assert renamed(content, ("c", 0, "dd"), "ddx") == {"a": {"b": 1}, "c": [{"ddx": 1}, 2]}
    assert typos("type") == ["typex", "tpye"]


def test_there_are_files_of_both_kinds():
    assert {schema_of(read_yaml(path)) for path in TASKS} == {
        DiffusionRLConfig,
        TrainDitConfig,
        TrainAutoencoderConfig,
    }
    assert DESCRIPTIONS


@pytest.mark.parametrize("path", TASKS, ids=relative)
def test_shipped_configs_load(path):
    load_config(schema_of(read_yaml(path)), path)


@pytest.mark.parametrize("path", TASKS, ids=relative)
def test_no_typo_in_a_shipped_config_goes_unnoticed(path):
    schema = schema_of(read_yaml(path))
    for content, place, typo in mutations(path):
        wrong = (*place[:-1], typo)
        with pytest.raises(ConfigError) as caught:
            load_config(schema, overrides=renamed(content, place, typo))
        message = str(caught.value)
        if place[-1] == "type" and isinstance(place[-2], int):
            # without its type nothing is known about the other keys of a part, so the missing type is the mistake
            assert f"--{dotted(place[:-1])}: needs a key 'type'" in message, message
            continue
        line = next((each for each in message.splitlines() if each.startswith(f"--{dotted(wrong)}: ")), None)
        assert line is not None, f"{dotted(wrong)} is not named in: {message}"
        assert f"unknown key; did you mean {place[-1]!r}?" in line, line


@pytest.mark.parametrize("path", TASKS, ids=relative)
def test_a_typo_in_a_file_is_named_with_the_file(path, tmp_path):
    content, place, typo = mutations(path)[-1]
    copied = tmp_path / "copy.yaml"
    copied.write_text(yaml.safe_dump(renamed(content, place, typo), sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load_config(schema_of(content), copied)
    assert f"{copied}: {dotted((*place[:-1], typo))}: unknown key" in str(caught.value)


def build(content, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path, lambda: build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7))


@pytest.mark.parametrize("path", DESCRIPTIONS, ids=relative)
def test_shipped_model_descriptions_build(path):
    model = build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=7))
    assert 0 < sum(each.numel() for each in model.denoiser.parameters()) < 10_000_000


@pytest.mark.parametrize("path", DESCRIPTIONS, ids=relative)
def test_no_typo_in_a_model_description_goes_unnoticed(path, tmp_path):
    for content, place, typo in mutations(path):
        copied, attempt = build(renamed(content, place, typo), tmp_path)
        with pytest.raises(ConfigError) as caught:
            attempt()
        message = str(caught.value)
        assert str(copied) in message
        if place == ("pipeline",):
            assert "pipeline" in message
            continue
        assert f"{dotted((*place[:-1], typo))}: unknown key; did you mean {place[-1]!r}?" in message, message


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("transformer", None, "transformer: must be a mapping"),
        ("vae", [16, 32], "vae: must be a mapping"),
        ("tokenizer", "clip", "tokenizer: must be a mapping"),
        ("t5", 3, "t5: must be a mapping"),
        ("t5", {"width": 3}, "t5.width: unknown key"),
        ("pipeline", "NoSuchPipeline", "'NoSuchPipeline' is not known; known: StableDiffusion3Pipeline"),
    ],
)
def test_a_wrong_section_of_a_model_description_is_named(tmp_path, section, value, reason):
    content = {**read_yaml(ROOT / "configs/quickstart/tiny_sd3.yaml"), section: value}
    path, attempt = build(content, tmp_path)
    with pytest.raises(ConfigError) as caught:
        attempt()
    assert str(path) in str(caught.value) and reason in str(caught.value)


def test_a_model_description_needs_its_transformer(tmp_path):
    content = read_yaml(ROOT / "configs/quickstart/tiny_sd3.yaml")
    del content["transformer"]
    _, attempt = build(content, tmp_path)
    with pytest.raises(ConfigError, match="transformer: required, but not set"):
        attempt()
