"""A user's mistake is one line that names the thing and the remedy."""

import errno
import faulthandler
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml

from sfumato import cli
from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.dit import TrainDitConfig
from sfumato.config.image_data import ImageTextDataConfig
from sfumato.config.load import parse_config
from sfumato.config.parallel import read_launched
from sfumato.config.recipes import TRAJECTORY_RECIPES
from sfumato.config.sections import LoraConfig, ModelConfig, TrainConfig
from sfumato.config.text import LanguageModelConfig, TrainTextConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.images.image_text import open_image_text
from sfumato.errors import CheckpointError, ConfigError, DataError, FolderError, RanksMissingError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.encoded import BadRows
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_language_model
from sfumato.models.lora import add_lora
from sfumato.parallel import rendezvous
from sfumato.parallel.dropout import keyed_dropout
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh, pretended_mesh
from sfumato.parallel.parallelize import parallelize
from sfumato.tracking.exit import ending_of, keep_stacks, name_log
from sfumato.tracking.lock import lock_folder
from tests import tiny_families
from tests.tiny import tiny_language_description, tiny_pipeline_description

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart"


def refusal(kind: type[Exception], call: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """The message of a refusal, which is one line."""
    with pytest.raises(kind) as caught:
        call(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600, message
    return message


def dit(*overrides: str) -> TrainDitConfig:
    return parse_config(TrainDitConfig, [str(QUICKSTART / "pretrain.yaml"), *overrides])


# Values


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--train.betas", "[1.5, 0.9]"], "--train.betas.0: Input should be less than 1 (given: 1.5)"),
        (["--train.seed", str(2**64)], "--train.seed: a whole number must fit into 64 bits"),
        (["--train.output_dir", "a" * 300], "--train.output_dir: a path of 300 bytes with a name of 300"),
        (["--train.output_dir", "''"], "--train.output_dir: a path must not be empty"),
        (["--data.cache_dir", '"a\\0b"'], "--data.cache_dir: a path must not hold control characters"),
        (["--train.cfg_parallel_size", "2"], "both ranks would compute the same; leave it out"),
    ],
)
def test_values_that_no_run_can_have(overrides: list[str], said: str) -> None:
    assert said in refusal(ConfigError, dit, *overrides)


def test_guidance_on_two_ranks_needs_guidance() -> None:
    arguments = [str(QUICKSTART / "rl.yaml"), "--train.cfg_parallel_size", "2"]
    assert "rollout.guidance_scale 1" in refusal(ConfigError, parse_config, TrajectoryRLConfig, arguments)
    parse_config(TrajectoryRLConfig, [*arguments, "--rollout.guidance_scale", "3"])


def test_a_long_value_is_not_repeated_in_full() -> None:
    message = refusal(ConfigError, dit, "--train.lr", "x" * 10_000)
    assert message.startswith("--train.lr: ") and "xxx...xxx" in message


def test_the_home_folder_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = "{config_path: ~/m.yaml, model_path: null}"
    result = dit("--train.output_dir", "~/a", "--data.cache_dir", "'~'", "--model", model)
    assert result.train.output_dir == f"{tmp_path}/a" and result.data.cache_dir == str(tmp_path)
    assert result.model.config_path == f"{tmp_path}/m.yaml"
    overrides = ["--data.synthetic", "null", "--data.train_path", "~/a.jsonl, ~/b.jsonl,c~d"]
    overrides += ["--data.eval_path", "~/held.jsonl"]
    text = parse_config(TrainTextConfig, [str(QUICKSTART / "text_sft.yaml"), *overrides])
    assert text.data.train_path == f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl,c~d"
    assert text.data.eval_path == f"{tmp_path}/held.jsonl"
    overrides = ["--reward.rewards.0", "{type: pickscore, model_path: ~/pick}"]
    rl = parse_config(TrajectoryRLConfig, [str(QUICKSTART / "rl.yaml"), *overrides])
    assert rl.reward.rewards[0].model_path == f"{tmp_path}/pick"


@pytest.mark.parametrize("recipe", ["flow_grpo", "dppo", "ddpo"])
def test_another_recipe_over_a_file_with_parts_of_its_own(recipe: str) -> None:
    arguments = [str(QUICKSTART / "rl.yaml"), "--algorithm.recipe", recipe]
    message = refusal(ConfigError, parse_config, TrajectoryRLConfig, arguments)
    for part in (f"--algorithm.recipe {recipe}", "dynamics, window, advantage, objective", "flow_grpo_fast", "remove"):
        assert part in message


def test_without_these_lines_every_recipe_starts(tmp_path: Path) -> None:
    settings = yaml.safe_load((QUICKSTART / "rl.yaml").read_text())
    settings["algorithm"] = {"recipe": "flow_grpo_fast"}
    settings["rollout"]["num_inference_steps"] = 12
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(settings))
    for recipe in TRAJECTORY_RECIPES:
        parse_config(TrajectoryRLConfig, [str(tmp_path / "rl.yaml"), "--algorithm.recipe", recipe])


@pytest.mark.parametrize(
    ("schema", "override", "said"),
    [
        (
            TrajectoryRLConfig,
            "recipe=awm",
            "recipe 'awm' is a recipe of another task: run tasks/rl_diffusion_forward.py",
        ),
        (
            TrajectoryRLConfig,
            "objective=nft",
            "type nft is an objective of another task: run tasks/rl_diffusion_forward.py",
        ),
        (
            ForwardRLConfig,
            "recipe=flow_cps",
            "recipe 'flow_cps' is a recipe of another task: run tasks/rl_diffusion.py",
        ),
        (
            ForwardRLConfig,
            "objective.type=guard",
            "type guard is an objective of another task: run tasks/rl_diffusion.py",
        ),
    ],
)
def test_a_recipe_or_an_objective_of_the_other_task(tmp_path: Path, schema: Any, override: str, said: str) -> None:
    settings = yaml.safe_load((QUICKSTART / "rl.yaml").read_text())
    settings["algorithm"] = {"recipe": "flow_grpo" if schema is TrajectoryRLConfig else "awm"}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(settings))
    parse_config(schema, [str(tmp_path / "rl.yaml")])
    assert said in refusal(ConfigError, parse_config, schema, [str(tmp_path / "rl.yaml"), f"--algorithm.{override}"])


def test_a_typo_beside_another_recipe_is_still_named() -> None:
    arguments = [str(QUICKSTART / "rl.yaml"), "--algorithm.recipe", "flow_cps", "--algorithm.window.sise", "2"]
    message = refusal(ConfigError, parse_config, TrajectoryRLConfig, arguments)
    assert message.startswith("--algorithm.window.sise: unknown key; did you mean 'size'?")


# The environment

START = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set: start several processes with train.sh"),
        ({"MASTER_ADDR": "", "RANK": ""}, "RANK and MASTER_ADDR are not set"),
        ({"RANK": "x"}, "the environment variable RANK must be a whole number from 0, not 'x'"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1, not '0'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number from 1"),
        ({"WORLD_SIZE": "٣"}, "WORLD_SIZE must be a whole number from 1"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK must be a whole number"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT must be a whole number"),
    ],
)
def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], said: str
) -> None:
    for name, value in {**START, **changes}.items():
        monkeypatch.setenv(name, value)
    assert said in refusal(ConfigError, read_launched)
    assert said in refusal(ConfigError, build_mesh, TrainConfig(output_dir="out"))


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        start = {**START, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in start.items():
            monkeypatch.setenv(name, value)
        said = refusal(ConfigError, build_mesh, TrainConfig(output_dir="out"))
    assert said.startswith(f"MASTER_PORT {port} is in use on ") and "set another MASTER_PORT on all nodes" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_said_while_they_are_waited_for_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """A node that was not started, a firewall, variables of another job: the wait was silent for 45 minutes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = {**START, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in start.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.01)
    with pytest.raises(RanksMissingError) as caught:
        rendezvous.join_store(rank, 2, timedelta(seconds=0.1))
    waiting = f"waits for {'rank 0' if rank else 'the other ranks'} at 127.0.0.1:{port}"
    assert waiting in capsys.readouterr().err
    ending = ending_of(caught.value)
    assert waiting in ending.text and "MASTER_PORT and its own NODE_RANK" in ending.text
    assert ending.code == 8 and "Traceback" not in ending.text


@pytest.mark.parametrize("value", ["x", "0", "1.5"])
def test_a_wrong_number_of_processes_is_named_while_the_configuration_is_read(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    assert f"WORLD_SIZE must be a whole number from 1, not '{value}'" in refusal(ConfigError, dit)


# Folders of models


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "model.yaml").write_text(yaml.safe_dump(tiny_pipeline_description()))
    model = build_diffusion_model(ModelConfig(config_path=str(folder / "model.yaml")))
    model.pipeline.save_pretrained(folder / "saved")
    return folder / "saved"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part is gone": (lambda folder: shutil.rmtree(folder / "vae"), "vae is missing: model_index.json names each"),
    "a part is empty": (
        lambda folder: [path.unlink() for path in (folder / "tokenizer").iterdir()],
        "tokenizer is missing",
    ),
    "no vocabulary": (
        lambda folder: (folder / "tokenizer_3" / "tokenizer.json").unlink(),
        "tokenizer_3 has no vocabulary",
    ),
    "another encoder": (
        lambda folder: edit(folder / "text_encoder" / "config.json", intermediate_size=80),
        "text_encoder: text_model.encoder.layers.0.mlp.fc1.bias is [64] in the safetensors files, but [80] by config",
    ),
    "another transformer": (
        lambda folder: edit(folder / "transformer" / "config.json", num_attention_heads=4),
        "expected shape torch.Size(",
    ),
    "no mapping": (lambda folder: (folder / "model_index.json").write_text("[]"), "not a JSON object"),
    "an odd index": (lambda folder: edit(folder / "model_index.json", vae=3), "diffusers cannot load it"),
    "nothing to train": (
        lambda folder: edit(folder / "model_index.json", transformer=[None, None]),
        "it has no transformer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pipeline_folder(pipeline_folder: Path, tmp_path: Path, damage: str) -> None:
    change, said = DAMAGE[damage]
    folder = Path(shutil.copytree(pipeline_folder, tmp_path / "pipeline"))
    change(folder)
    message = refusal(ConfigError, build_diffusion_model, ModelConfig(model_path=str(folder)))
    assert f"model.model_path {folder}: " in message and said in message
    assert "above" not in message and "ignore_mismatched_sizes" not in message


def test_a_language_model_of_other_shapes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    description = tiny_language_description()
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**description))
    module.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", hidden_size=2 * description["hidden_size"])
    config = LanguageModelConfig(model_path=str(tmp_path), tokenizer_path="bytes")
    message = refusal(ConfigError, build_language_model, config, TextTrainConfig(output_dir="out"))
    assert "more weights differ" in message and "by config.json" in message and "above" not in message


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_lora_weights.safetensors"])
def test_adapters_in_the_place_of_a_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    text = LanguageModelConfig(model_path=str(tmp_path), tokenizer_path="bytes")
    for call in (
        lambda: build_diffusion_model(ModelConfig(model_path=str(tmp_path))),
        lambda: build_language_model(text, TextTrainConfig(output_dir="out")),
    ):
        assert "`sfumato export RUN OUT --merge`" in refusal(ConfigError, call)


@pytest.mark.parametrize("exists", [False, True])
def test_an_export_of_what_is_no_run(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "run").write_text("")
    message = refusal(CheckpointError, export_checkpoint, tmp_path / "run", tmp_path / "out")
    assert f"{tmp_path / 'run'} {'is no folder' if exists else 'does not exist'}" in message
    assert "train.output_dir" in message


def test_prompts_of_no_length(tmp_path: Path, pipeline_folder: Path) -> None:
    (tmp_path / "flux.yaml").write_text(yaml.safe_dump(tiny_families.tiny_flux()))
    config = ModelConfig(config_path=str(tmp_path / "flux.yaml"), max_sequence_length=0)
    assert "FluxPipeline" in (message := refusal(ConfigError, build_diffusion_model, config))
    assert "model.max_sequence_length 0" in message and "at least 1" in message
    without, with_one = (
        build_diffusion_model(ModelConfig(model_path=str(pipeline_folder), max_sequence_length=length))
        for length in (0, 1)
    )
    shorter, longer = (model.embed_prompts(["a"])["prompt_embeds"] for model in (without, with_one))
    assert shorter.shape[1] == longer.shape[1] - 1  # Stable Diffusion 3 does without T5, and CLIP's part stays
    assert torch.equal(shorter, longer[:, :-1])


# Folders of runs and caches


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, name: str, pipeline_folder: Path) -> None:
    (tmp_path / "file").write_text("kept")
    folder = tmp_path / name
    message = refusal(FolderError, lock_folder, folder, print)
    assert message.startswith(f"train.output_dir {folder} cannot be made: ")
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline_folder)))
    data = ImageTextDataConfig(data_type="glyphs", height=16, width=16)
    message = refusal(DataError, open_cache, folder, open_image_text(data, 0), model, BadRows(0, print))
    assert f"the cache folder {folder} cannot be made" in message and "data.cache_dir" in message
    assert (tmp_path / "file").read_text() == "kept"


# What does not go together


def small_sd3() -> torch.nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=2, out_channels=2, num_layers=2, num_attention_heads=2,
        attention_head_dim=8, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
        pos_embed_max_size=4,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "shards"), [("ddp", 1), ("fsdp2", 2)])
@pytest.mark.parametrize(("targets", "is_refused"), [(["to_q", "to_out.0"], True), (["to_q", "to_k"], False)])
def test_dropout_of_adapters_whose_input_is_cut(mode: str, shards: int, targets: list[str], is_refused: bool) -> None:
    module = small_sd3()
    add_lora(module, LoraConfig(rank=2, dropout=0.1), targets, seed=0)
    keys = keyed_dropout(module, seed=0)
    assert keys is not None
    train = TrainConfig(output_dir="out", tensor_parallel_size=2, data_parallel_mode=mode)
    with pretended_mesh(Layout(tp=2, dp_shard=shards)) as mesh:
        module = parallelize(module, mesh, train, plans.SD3)
    if not is_refused:
        return keys.check_is_whole(module)
    message = refusal(ConfigError, keys.check_is_whole, module)
    for part in ("model.lora.dropout", "train.tensor_parallel_size", "attn.to_out.0", "set the dropout to 0"):
        assert part in message


def test_stages_and_biases_of_a_diffusion_model(pipeline_folder: Path) -> None:
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline_folder)))
    train = TrainConfig(output_dir="out", pipeline_parallel_size=2)
    message = refusal(ConfigError, model.parallelize, Mesh(Layout(pp=2), torch.device("cpu")), train)
    assert "train.pipeline_parallel_size" in message and "experts" not in message
    train = TrainConfig(output_dir="out", expert_bias_rate=0.1)
    assert "has no experts" in refusal(ConfigError, model.parallelize, Mesh(Layout(), torch.device("cpu")), train)


def test_dropout_is_looked_at_when_a_model_is_put_on_a_mesh(pipeline_folder: Path) -> None:
    lora = LoraConfig(rank=2, dropout=0.1, target_modules=["attn.to_out.0"])
    model = build_diffusion_model(ModelConfig(model_path=str(pipeline_folder), lora=lora))
    train = TrainConfig(output_dir="out", tensor_parallel_size=2)
    with pretended_mesh(Layout(tp=2)) as mesh:
        assert "set the dropout to 0" in refusal(ConfigError, model.parallelize, mesh, train)


def test_a_unet_whose_activations_would_be_shared() -> None:
    module = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
    train = TrainConfig(output_dir="out", tensor_parallel_size=2, sequence_parallel=True)
    with pretended_mesh(Layout(tp=2)) as mesh:
        message = refusal(ConfigError, parallelize, module, mesh, train, plans.UNET)
    assert "train.sequence_parallel" in message and "set it to false" in message and "down_blocks" not in message


@pytest.mark.parametrize(
    ("number", "code", "remedy"),
    [(errno.EACCES, 2, "by the rights"), (errno.ESTALE, 3, "network file system"), (errno.EDQUOT, 3, "make room")],
)
def test_a_file_that_a_run_or_command_cannot_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int, remedy: str
) -> None:
    error = OSError(number, os.strerror(number), "/shared/rows.jsonl")
    ending = ending_of(error)
    assert ending.code == code and "\n" not in ending.text
    assert ending.text.startswith("error: /shared/rows.jsonl: ") and remedy in ending.text

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("sfumato.commands.report.run", fail)
    assert cli.main(["report", "runs/a"]) == 2
    assert remedy in capsys.readouterr().err


def test_the_stacks_of_a_crash_go_to_the_terminal_where_no_file_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files: list[object] = []
    monkeypatch.setenv("SFUMATO_ENDS", str(tmp_path / "gone"))
    monkeypatch.setattr(faulthandler, "enable", files.append)
    monkeypatch.setattr(faulthandler, "register", lambda _, file: files.append(file))
    keep_stacks()
    name_log(tmp_path / "log.txt")
    assert files == [sys.stderr, sys.stderr]
