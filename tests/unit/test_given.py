"""What is given is used, refused, or said: nothing in a configuration is ignored in silence."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import pytest

from sfumato.cli import main
from sfumato.commands.check_config import check_config
from sfumato.config.base import Section, Variant, find_variants
from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig, TrainDitDpoConfig
from sfumato.config.load import load_config, merge
from sfumato.config.sections import ModelConfig
from sfumato.config.text import TrainTextConfig, TrainTextDpoConfig
from sfumato.config.text_data import TextDataConfig
from sfumato.config.yaml_text import config_text
from sfumato.data.files.rows import open_rows
from sfumato.data.files.sources import open_sources
from sfumato.data.prompt_loader import PromptLoader
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.hf_config import check_length
from sfumato.rewards.server.app import RewardServerConfig
from tests import tiny_families
from tests.tiny import run_task_here, tiny_dit_config, tiny_text_config, write_config
from tests.token_rows import index_loader

SECTIONS: dict[type[Section], dict[str, Any]] = {
    TrainTextConfig: {"data": {"train_path": "d.jsonl"}},
    TrainTextDpoConfig: {"data": {"train_path": "d.jsonl", "data_type": "preference"}},
    TrainDitConfig: {"data": {"data_type": "glyphs"}},
    TrainDitDpoConfig: {"data": {"data_type": "glyphs"}},
    TrainAutoencoderConfig: {"data": {"data_type": "glyphs"}},
    TrajectoryRLConfig: {
        "data": {"data_type": "glyphs"},
        "rollout": {"num_prompts": 4, "n": 4, "micro_batch_size": 8},
        "reward": {"rewards": ["brightness"]},
        "train": {"max_steps": 3},
    },
}
SECTIONS[ForwardRLConfig] = SECTIONS[TrajectoryRLConfig]
"""The least that each task must be given besides a model and an output_dir."""


def configured(schema: type[Section], *overrides: dict[str, Any]) -> Any:
    """A configuration of a task with that much and what is laid over it."""
    content: dict[str, Any] = {"model": {"model_path": "m"}, "train": {"output_dir": "out"}}
    for layer in (SECTIONS[schema], *overrides):
        content = merge(content, layer)
    return load_config(schema, None, content)


def nested(path: str, value: Any) -> dict[str, Any]:
    """``a.b`` and a value as mappings."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def refusal(schema: type[Section], *overrides: dict[str, Any]) -> str:
    """The message with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        configured(schema, *overrides)
    return str(caught.value)


def inside(annotation: Any) -> typing.Iterator[Any]:
    """An annotation and everything in it."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from inside(part)


def floats_of(schema: type[Section], prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    """Fields that take a number with a fraction, with a value of their form around the number."""
    for name, field in schema.model_fields.items():
        parts = list(inside(field.annotation))
        section = next((part for part in parts if isinstance(part, type) and issubclass(part, Section)), None)
        if section is not None and list not in (typing.get_origin(part) for part in parts):
            yield from floats_of(section, f"{prefix}{name}.")
        elif section is not None:
            yield from ((f"{prefix}{name}", lambda x, at=at: [nested(at, x)]) for at, _ in floats_of(section))
        elif tuple in (typing.get_origin(part) for part in parts) and float in parts:
            yield f"{prefix}{name}", lambda x: [x, 0.5]
        elif float in parts:
            yield f"{prefix}{name}", lambda x: x


@pytest.mark.parametrize("schema", SECTIONS, ids=lambda schema: schema.__name__)
def test_a_number_that_is_not_finite_is_refused_everywhere(schema: type[Section]) -> None:
    configured(schema)
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
    tried += not_finite_of("sfumato.rewards") + not_finite_of("sfumato.rewards.scoring.combinations")
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
            assert (field.name,) in [
                error["loc"] for error in caught.value.context["errors"] if "finite" in error["msg"]
            ]
            tried += 1
    return tried


def test_a_norm_without_limit_is_written_and_read_again(tmp_path: Path) -> None:
    config = configured(TrainDitConfig, {"train": {"max_grad_norm": math.inf}})
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_config(TrainDitConfig, tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"rewards.0: weight|rewards.0.weight"):
        load_config(RewardServerConfig, None, {"rewards": [{"type": "brightness", "weight": math.inf}]})


GLYPH_PATHS = "has no effect when data.data_type is glyphs"
WITHOUT_EFFECT: list[tuple[type[Section], str, Any, dict[str, Any], str]] = [
    (TrajectoryRLConfig, "data.train_path", "gone.txt", {}, GLYPH_PATHS),
    (TrajectoryRLConfig, "data.eval_path", "gone.txt", {}, GLYPH_PATHS),
    (
        TrajectoryRLConfig,
        "reward.max_pending",
        3,
        {"rollout": {"with_reward": False}},
        "with rollout.with_reward false",
    ),
    (TrajectoryRLConfig, "runtime.heartbeat_s", 5.0, {}, "runtime.heartbeat_s is for roles on Ray"),
    (TrajectoryRLConfig, "runtime.call_timeout_s", 5.0, {}, "runtime.call_timeout_s is for roles on Ray"),
    (TrajectoryRLConfig, "runtime.max_restarts", 5, {}, "runtime.max_restarts is for roles on Ray"),
    (
        TrajectoryRLConfig,
        "runtime.object_store_gb",
        1.0,
        {"runtime": {"backend": "ray", "address": "auto"}},
        "that of runtime.address has its own",
    ),
    (
        ForwardRLConfig,
        "algorithm.ema",
        {"type": "constant", "value": 0.5},
        {"algorithm": {"recipe": "diffusion_nft"}},
        "algorithm.ema has no effect: neither objective nft nor algorithm.kl",
    ),
    (
        TrajectoryRLConfig,
        "algorithm.reference",
        {"type": "refresh", "every": 4},
        {"algorithm": {"kl": {"type": "none"}}},
        "algorithm.reference has no effect: neither objective clipped_ratio nor algorithm.kl",
    ),
    (TrainDitConfig, "train.lr_min", 1e-6, {}, "with train.lr_decay_style constant"),
    (TrainDitConfig, "train.lr_decay_ratio", 0.5, {}, "with train.lr_decay_style constant"),
    (TrainDitConfig, "train.ema_interval", 4, {}, "without train.ema_decay"),
    (TrainDitConfig, "train.profile_steps", [8, 9], {"train": {"max_steps": 7}}, "after the last of train.max_steps 7"),
    (TrainDitConfig, "train.pipeline_schedule", "gpipe", {}, "with train.pipeline_parallel_size 1"),
    (TrainDitConfig, "train.broadcast_model_weights_from_rank0", True, {}, "with train.init_device cpu"),
    (TrainDitConfig, "train.enable_fsdp_offload", True, {"train": {"data_parallel_mode": "ddp"}}, "mode ddp"),
    (TrainDitConfig, "train.enable_reshard_after_forward", False, {"train": {"data_parallel_mode": "ddp"}}, "mode ddp"),
    (TrainDitConfig, "train.enable_forward_prefetch", True, {"train": {"data_parallel_mode": "ddp"}}, "mode ddp"),
    (
        TrainDitConfig,
        "train.enable_reduce_every_micro_batch",
        True,
        {"train": {"data_parallel_mode": "fsdp1"}},
        "mode fsdp1",
    ),
    (TrainDitConfig, "flow.logit_mean", 1.0, {"flow": {"timestep_sampling": "uniform"}}, "timestep_sampling uniform"),
    (TrainDitConfig, "sample.num_prompts", 3, {"sample": {"prompts": ["a"]}}, "beside the 1 prompts"),
    (TrainDitDpoConfig, "dpo.label_smoothing", 0.1, {"dpo": {"loss": "hinge"}}, "with dpo.loss hinge"),
    (
        TrainDitDpoConfig,
        "eval.num_rows",
        4,
        {"data": {"data_type": "pairs", "train_path": "d.jsonl"}},
        "without data.eval_path",
    ),
    (TrainAutoencoderConfig, "model.lora", {"rank": 4}, {}, "where the autoencoder alone is trained"),
    (TrainAutoencoderConfig, "data.cache_dir", "cache", {}, "where the autoencoder alone is trained"),
    (TrainAutoencoderConfig, "train.ema_decay", 0.9, {}, "where the autoencoder alone is trained"),
    (TrainAutoencoderConfig, "train.mixed_precision", "bf16", {}, "where the autoencoder alone is trained"),
    (TrainAutoencoderConfig, "train.compile", True, {}, "where the autoencoder alone is trained"),
    (TrainTextConfig, "model.dtype", "bf16", {}, "without model.lora, since nothing is frozen"),
    (TrainTextConfig, "data.chat_template", "chatml", {"data": {"data_type": "plaintext"}}, "data_type plaintext"),
    (TrainTextConfig, "data.overlong", "skip", {"data": {"data_type": "plaintext"}}, "data_type plaintext"),
    (
        TrainTextConfig,
        "data.cache_dir",
        "tokens",
        {"data": {"datasets_type": "iterable"}, "train": {"max_steps": 2}},
        "with data.datasets_type iterable",
    ),
    (
        TrainTextConfig,
        "data.num_workers",
        2,
        {"data": {"datasets_type": "iterable"}, "train": {"max_steps": 2}},
        "with data.datasets_type iterable",
    ),
    (
        TrainTextConfig,
        "data.shuffle_buffer",
        5,
        {"data": {"datasets_type": "iterable", "shuffle": False}, "train": {"max_steps": 2}},
        "without data.shuffle",
    ),
    (TrainTextConfig, "eval.num_rows", 5, {}, "without data.eval_path"),
    (TrainTextConfig, "eval.max_new_tokens", 5, {}, "without data.eval_path"),
    (TrainTextDpoConfig, "eval.num_samples", 5, {"data": {"eval_path": "e.jsonl"}}, "preference training"),
    (TrainTextDpoConfig, "dpo.label_smoothing", 0.1, {"dpo": {"loss": "ipo"}}, "with dpo.loss ipo"),
]


@pytest.mark.parametrize(("schema", "field", "value", "others", "message"), WITHOUT_EFFECT)
def test_a_field_that_another_leaves_without_effect_is_refused(
    schema: type[Section], field: str, value: Any, others: dict[str, Any], message: str
) -> None:
    configured(schema, others)
    refused = refusal(schema, others, nested(field, value))
    assert field in refused and message in refused and "\n" not in refused


def test_a_reward_that_is_only_watched_has_no_weight() -> None:
    rewards = ["brightness", {"type": "jpeg_compressibility", "evaluation_only": True, "weight": 2.0}]
    message = refusal(TrajectoryRLConfig, {"reward": {"rewards": rewards}})
    assert "reward.rewards.1.weight has no effect, since 'jpeg_compressibility' is evaluation_only" in message


@pytest.mark.parametrize(
    ("schema", "overrides", "message"),
    [
        (TrajectoryRLConfig, {"runtime": {"backend": "ray", "object_store_gb": 0.05}}, "equal to 0.074"),
        (TrainDitConfig, {"data": {"height": 100_000}}, "--data.height: Input should be less than or equal to 16384"),
        (TrajectoryRLConfig, {"rollout": {"width": 100_000}}, "--rollout.width: Input should be less than or equal"),
        (
            TrainDitConfig,
            {"data": {"height": 9000, "width": 9000, "num_frames": 81}},
            "6,561,000,000 pixels, more than",
        ),
        (TrajectoryRLConfig, {"rollout": {"num_frames": 10**9}}, "pixels, more than 268,435,456: lower one of them"),
        (TrajectoryRLConfig, {"rollout": {"n": 10**8}}, "400,000,000 samples of one iteration, more than 1,048,576"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused(schema: type[Section], overrides: dict[str, Any], message: str) -> None:
    assert message in refusal(schema, overrides)


def described(**fields: Any) -> Any:
    """A configuration of a language model, without the model."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields.pop("model_type", "qwen2")](max_position_embeddings=256, **fields)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (described(), 256),
        (described(model_type="gpt2"), 256),
        (described(**rope("linear", factor=4.0)), 1024),
        (described(**rope("yarn", factor=4.0, original_max_position_embeddings=256)), 1024),
        (described(**rope("yarn", factor=4.0, original_max_position_embeddings=64)), 256),
        (described(model_type="llama", **rope("default")), 256),
    ],
)
def test_samples_longer_than_the_positions_of_the_model_are_refused(config: Any, positions: int) -> None:
    check_length(config, positions)
    with pytest.raises(ConfigError, match=f"max_seq_len {positions + 1} is above the {positions} positions"):
        check_length(config, positions + 1)


def test_a_run_refuses_samples_that_are_longer_than_its_model(tmp_path: Path) -> None:
    config = tiny_text_config(tmp_path, data={"max_seq_len": 300})
    with pytest.raises(ConfigError, match=r"data\.max_seq_len 300 is above the 256 positions"):
        run_task_here("train_text", config)
    result = check_config(write_config(config, tmp_path / "run.yaml"), task="train_text", with_data=False)
    assert "data.max_seq_len 300 is above the 256 positions" in result.problems[0]


def test_a_warm_up_that_never_ends_is_said(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"max_steps": 1, "lr_warmup_steps": 40})
    run_task_here("train_dit", config)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "train.lr_warmup_steps 40 is more than the 1 steps of the run: the learning rate ends at 2.5% of" in log


def test_the_same_file_twice_is_refused_by_whatever_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    twice = [f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl,{tmp_path}/a.jsonl", f"{tmp_path}/a.jsonl,{tmp_path}/link.jsonl"]
    for path in [*twice, str(tmp_path)]:
        with pytest.raises(DataError, match=r"data\.train_path: .*jsonl is given twice.* give it once"):
            open_rows(path, "text", "data.train_path")
    assert len(open_rows(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "text", "data.train_path")) == 2
    (tmp_path / "sources.yaml").write_text("sources: [a.jsonl, b.jsonl, link.jsonl]\n")
    config = TextDataConfig(train_path=str(tmp_path / "sources.yaml"), data_type="plaintext")
    with pytest.raises(DataError, match=r"sources\.yaml: .*link\.jsonl is given twice"):
        open_sources(config)


def test_a_step_that_takes_each_row_a_thousand_times_is_refused(tmp_path: Path) -> None:
    index_loader(300, 30_000, 4, steps=1)
    message = r"train\.global_batch_size would make one step of 100,000,000 samples, .* of the 300 .* 333,333 times"
    with pytest.raises(DataError, match=message):
        index_loader(300, 10**8, 4, steps=1)
    with pytest.raises(DataError, match=r"rollout\.num_prompts would make one step of 5,000 samples"):
        PromptLoader(4, 5000, 4, 0)
    config = tiny_text_config(tmp_path, train={"global_batch_size": 10**8})
    with pytest.raises(DataError, match=r"train\.global_batch_size would make one step of"):
        run_task_here("train_text", config)


@pytest.mark.parametrize("size", ["-80", "0", "nan", "inf", "eighty", "1e9"])
def test_a_memory_that_no_device_has_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "run.yaml", f"--device-memory={size}"])
    assert caught.value.code == 2 and "is no number of GiB above 0" in capsys.readouterr().err


FAMILIES = {
    "sd3": (tiny_families.tiny_sd3, 64),
    "sd3 without T5": (tiny_families.tiny_sd3, 0),
    "sd3 with a T5 that reads no word": (tiny_families.tiny_sd3, 1),
    "flux": (tiny_families.tiny_flux, 64),
    "sd15": (tiny_families.tiny_stable_diffusion, 77),
    "sdxl": (tiny_families.tiny_stable_diffusion_xl, 77),
    "wan": (tiny_families.tiny_wan, 64),
    "z_image": (tiny_families.tiny_z_image, 128),
    "qwen_image": (tiny_families.tiny_qwen_image, 64),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_are_cut_are_said_once(tmp_path: Path, family: str) -> None:
    described, tokens = FAMILIES[family]
    path = write_config(described(), tmp_path / "model.yaml")
    model = build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=tokens))
    said: list[str] = []
    model.say = said.append
    short, long = "a", "write " * 600
    model.encode_prompts([short], with_negative=True)
    assert said == []
    model.encode_prompts([long, long + "b", long + "c", long])
    assert len(said) == 1 and f"the model reads the first {model.prompt_limit} tokens of a prompt" in said[0]
    model.forget_prompts()
    model.encode_prompts([long, long + "b", long + "c", long + "d"])
    assert len(said) == 1, "once in a run"
