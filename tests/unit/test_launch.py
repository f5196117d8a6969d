"""The launcher, and the exit codes of tasks for what a user can do wrong."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.config.__main__ import schema_of_script
from sfumato.config.tasks import TASKS

ROOT = Path(__file__).parents[2]
USAGE = "usage: sfumato launch TASK.py CONFIG.yaml [--section.field VALUE ...]"

ECHO = """
import json, os, sys
names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MKL_CBWR")
line = json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}})
open(os.path.join(os.path.dirname(__file__), f"rank{os.environ.get('RANK', '')}.json"), "w").write(line)
"""

TINY = """
pipeline: StableDiffusion3Pipeline
transformer:
  {sample_size: 4, patch_size: 2, in_channels: 2, out_channels: 2, num_layers: 1, num_attention_heads: 1,
   attention_head_dim: 8, caption_projection_dim: 8, pos_embed_max_size: 4}
vae: {channels: [8, 8], latent_channels: 2}
text_encoder: {width: 8, num_layers: 1, num_heads: 1}
t5: {num_layers: 1, num_heads: 1}
tokenizer: {max_length: 8}
"""

DIT = """
model: {config_path: FOLDER/model.yaml, max_sequence_length: 7}
data: {train_path: FOLDER/data.jsonl, height: 16, width: 16}
train: {output_dir: FOLDER/out, micro_batch_size: 2, max_steps: 2, device: cpu, trackers: []}
sample: {num_prompts: 1, num_inference_steps: 1, guidance_scale: 1.0}
"""

RL = """
model: {config_path: FOLDER/model.yaml, max_sequence_length: 7}
data: {data_type: glyphs, glyphs: {length: 2}}
rollout: {num_prompts: 1, n: 2, micro_batch_size: 2, height: 16, width: 16, num_inference_steps: 2, guidance_scale: 1.0}
reward: {rewards: [{type: ocr}]}
algorithm: {recipe: flow_grpo}
train: {output_dir: FOLDER/out, max_steps: 1, device: cpu, trackers: []}
eval: {num_prompts: 2, num_inference_steps: 1}
"""


def launch(*arguments, **environment):
    """Runs train.sh in a clean environment of one process."""
    removed = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTHONPATH")
    removed += ("MKL_CBWR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    return subprocess.run(
        ["bash", str(ROOT / "train.sh"), *map(str, arguments)],
        env={**inherited, "PYTHON": sys.executable, "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def started(monkeypatch):
    """Calls ``sfumato launch`` in this process and returns the command that it becomes, without Python itself."""
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # else launch adds it for the task
    monkeypatch.setattr(sys, "path", list(sys.path))

    def start(*arguments, **environment):
        commands = []
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(os, "execv", lambda _, command: commands.append(command))
            code = main(["launch", *map(str, arguments)])
        assert (code == 2) == (not commands)
        return commands[0][1:] if commands else []

    return start


@pytest.fixture
def echo(tmp_path):
    path = tmp_path / "echo task.py"
    path.write_text(ECHO)
    return path


@pytest.fixture
def folder(tmp_path):
    """A tiny model and three images with captions."""
    (tmp_path / "model.yaml").write_text(TINY)
    rows = []
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        rows.append(json.dumps({"image": f"{index}.png", "text": f"no {index}"}) + "\n")
    (tmp_path / "data.jsonl").write_text("".join(rows))
    for name, content in (("dit.yaml", DIT), ("rl.yaml", RL)):
        (tmp_path / name).write_text(content.replace("FOLDER", str(tmp_path)))
    return tmp_path


# train.sh


def test_without_arguments_it_says_what_this_machine_would_start(tmp_path):
    gpus = program(tmp_path, "nvidia-smi", ["GPU 0: some GPU", "GPU 1: some GPU"])
    done = launch(NPROC_PER_NODE="", PATH=gpus, NNODES="4")
    assert done.returncode == 0 and done.stdout.startswith(USAGE), done.stderr
    assert "would start 2 processes on each of 4 nodes (NNODES): visible devices of nvidia-smi" in done.stdout


def test_a_missing_task_is_named():
    done = launch("tasks/train_txt.py", "config.yaml")
    assert done.returncode == 2
    assert "error: task not found: tasks/train_txt.py; did you mean 'train_text'?" in done.stderr
    assert USAGE in done.stderr


def test_a_task_that_is_left_out_is_named_with_the_whole_command(folder, started, capsys):
    assert started(folder / "dit.yaml") == []
    command = f"sfumato launch tasks/train_dit.py {folder / 'dit.yaml'}"
    assert f"the task is missing before it: {command}" in capsys.readouterr().err


def test_a_configuration_of_another_task_is_named_with_its_command(folder, started, capsys):
    assert started("train_text", folder / "rl.yaml", "--train.max_steps", "3") == []
    command = f"sfumato launch tasks/rl_diffusion.py {folder / 'rl.yaml'}"
    assert capsys.readouterr().err == f"error: {folder / 'rl.yaml'} is a configuration of another task: {command}\n"


def test_an_environment_without_packages_is_named_with_what_installs_them(tmp_path):
    """As an empty .venv beside the repository is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    python = tmp_path / "empty" / "bin" / "python"
    done = launch("train_text", "configs/quickstart/text_rl_sft.yaml", PYTHON=str(python))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"error: {python} has no yaml, pydantic, torch" in done.stderr and "-m pip install -e" in done.stderr
    done = launch("train_text", "configs/quickstart/text_rl_sft.yaml", PYTHON=str(tmp_path / "nowhere"))
    assert done.returncode == 2 and f"there is no program {tmp_path / 'nowhere'}: make setup" in done.stderr


def test_a_task_is_found_by_its_name_and_a_shipped_configuration_from_anywhere(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, config = started("train_text", "configs/quickstart/text_rl_sft.yaml", NPROC_PER_NODE="1")
    assert (task, config) == (
        str(ROOT / "tasks" / "train_text.py"),
        str(ROOT / "configs" / "quickstart" / "text_rl_sft.yaml"),
    )


def test_one_process_is_plain_python_and_arguments_pass_through(echo, tmp_path):
    arguments = ["a config.yaml", "--sample.prompts", '["a b", "c"]', "--x", "", "$HOME", "*"]
    done = launch(echo, *arguments)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "rank.json").read_text())
    place = {"WORLD_SIZE": None, "RANK": None, "LOCAL_RANK": None, "MASTER_ADDR": None}
    assert seen == {"argv": arguments, **place, "MKL_CBWR": "AUTO,STRICT"}


def test_a_choice_of_kernels_that_is_set_stays(echo, tmp_path):
    launch(echo, "c.yaml", MKL_CBWR="COMPATIBLE")
    assert json.loads((tmp_path / "rank.json").read_text())["MKL_CBWR"] == "COMPATIBLE"


def test_the_exit_code_is_the_tasks(tmp_path):
    path = tmp_path / "task.py"
    path.write_text("raise SystemExit(143)")
    assert launch(path).returncode == 143


def test_two_processes_know_their_places(echo, tmp_path):
    done = launch(echo, "a config.yaml", "--train.lr", "1e-4", NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [(entry["WORLD_SIZE"], entry["RANK"], entry["LOCAL_RANK"]) for entry in seen] == [
        ("2", "0", "0"),
        ("2", "1", "1"),
    ]
    assert all(entry["argv"] == ["a config.yaml", "--train.lr", "1e-4"] for entry in seen)


def program(folder: Path, name: str, lines: list[str]) -> str:
    """A program that prints lines, and a PATH that finds it first."""
    (folder / "bin").mkdir()
    made = folder / "bin" / name
    made.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    made.chmod(0o755)
    return f"{made.parent}:{os.environ['PATH']}"


def started_ranks(called: list[str]) -> int:
    """Ranks that the launcher was asked for; 1 where there was no launcher."""
    return int(called[3]) if called[:3] == ["-m", "sfumato.launcher", "--nproc-per-node"] else 1


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_without_a_number_there_is_one_process_per_gpu(echo, tmp_path, started, gpus):
    path = program(tmp_path, "nvidia-smi", [f"GPU {i}: some GPU" for i in range(gpus)])
    launcher = ["-m", "sfumato.launcher", "--nproc-per-node", "3"] if gpus == 3 else []
    assert started(echo, "c.yaml", PATH=path) == [*launcher, str(echo), "c.yaml"]


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [
        ("", 1),
        ("-1", 1),
        ("5", 1),
        ("0,1", 2),
        ("6, 7", 2),
        ("0,1,-1,3", 2),
        ("0,9,1", 1),
        ("GPU-8f2c,GPU-11aa,MIG-0b1d", 3),
    ],
)
def test_only_the_gpus_that_are_visible_count(echo, tmp_path, started, visible, ranks):
    path = program(tmp_path, "nvidia-smi", [f"GPU {i}: some GPU" for i in range(8)])
    assert started_ranks(started(echo, "c.yaml", PATH=path, CUDA_VISIBLE_DEVICES=visible)) == ranks


def test_gpus_of_amd_count_too(echo, tmp_path, started):
    path = program(tmp_path, "rocm-smi", ["device,GUID", "card0,1", "card1,2", "card2,3"])
    assert started_ranks(started(echo, "c.yaml", PATH=path)) == 3
    assert started_ranks(started(echo, "c.yaml", PATH=path, HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="0")) == 2
    assert started_ranks(started(echo, "c.yaml", PATH=path, ROCR_VISIBLE_DEVICES="1,2")) == 2


def test_a_visible_gpu_without_a_driver_is_none(echo, tmp_path, started):
    path = program(tmp_path, "nvidia-smi", ["No devices were found"])
    assert started_ranks(started(echo, "c.yaml", PATH=path, CUDA_VISIBLE_DEVICES="0,1")) == 1


@pytest.mark.parametrize(
    ("yaml", "arguments", "is_driver"),
    [
        ("runtime:\n  backend: ray\n", [], True),
        ("runtime: {backend: ray, address: auto}\n", [], True),
        ("a: 1\n", ["--runtime.backend", "ray"], True),
        ("a: 1\n", ["--runtime.backend=ray"], True),
        ("runtime:\n  backend : 'ray'\n", [], True),
        ("a: 1\n", ["--runtime", "{backend: ray}"], True),
        ("runtime:\n  backend: ray\n", ["--runtime.backend", "in_process"], False),
        ("runtime: {backend: in_process}  # backend: ray\n", [], False),
        ("data: {backend: rays}\n", [], False),
    ],
)
def test_with_roles_on_ray_there_is_one_driver(echo, tmp_path, started, yaml, arguments, is_driver):
    path = program(tmp_path, "nvidia-smi", ["GPU 0", "GPU 1"])
    config = tmp_path / "c.yaml"
    config.write_text(yaml)
    called = started(echo, str(config), *arguments, PATH=path)
    assert called[-2 - len(arguments) :] == [str(echo), str(config), *arguments]
    assert ("sfumato.launcher" in called) != is_driver


def test_several_nodes(echo, started):
    called = started(echo, "c.yaml", NNODES="2", NODE_RANK="1", NPROC_PER_NODE="4", MASTER_ADDR="node0")
    options = dict(zip(called[2:-2:2], called[3:-2:2], strict=True))
    assert called[:2] == ["-m", "sfumato.launcher"] and called[-2:] == [str(echo), "c.yaml"]
    assert (options["--nnodes"], options["--node-rank"], options["--nproc-per-node"]) == ("2", "1", "4")
    assert (options["--master-addr"], options["--master-port"]) == ("node0", "29500")


def test_processes_within_those_of_another_launcher_are_refused(echo, started, capsys):
    """Kubeflow's PyTorchJob sets WORLD_SIZE and RANK for its pods: each would have trained a run of its own."""
    others = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    assert started(echo, "c.yaml", NPROC_PER_NODE="2", **others) == []
    said = capsys.readouterr().err
    assert "WORLD_SIZE is 2 in the environment" in said and "set NNODES=$WORLD_SIZE and NODE_RANK=$RANK" in said
    assert started_ranks(started(echo, "c.yaml", NPROC_PER_NODE="2", NNODES="2", NODE_RANK="1", **others)) == 2
    assert started_ranks(started(echo, "c.yaml", NPROC_PER_NODE="1", **others)) == 1


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_several_nodes_need_the_address_of_the_first_and_their_numbers(echo, started, capsys, missing):
    environment = {"NNODES": "2", "MASTER_ADDR": "node0", "NODE_RANK": "0"}
    assert not started(echo, "c.yaml", **{**environment, missing: ""})
    assert f"error: NNODES is 2: set {missing} to" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("NPROC_PER_NODE", "gpu"), ("NPROC_PER_NODE", "0"), ("NNODES", "two")])
def test_a_number_of_processes_that_is_none_is_refused(echo, started, capsys, name, value):
    assert not started(echo, "c.yaml", **{name: value})
    assert f"{name} must be a whole number above 0, not '{value}'" in capsys.readouterr().err


# Exit codes of tasks


def assert_refused(done, *parts):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    for part in parts:
        assert str(part) in message


def test_an_unknown_key_exits_with_2(folder):
    done = launch(ROOT / "tasks/train_dit.py", folder / "dit.yaml", "--train.learning_rat", "1")
    assert_refused(done, "error: --train.learning_rat: unknown key")
    assert not (folder / "out").exists()


def test_a_missing_config_file_exits_with_2(folder):
    done = launch(ROOT / "tasks/rl_diffusion.py", folder / "rll.yaml")
    assert_refused(
        done, f"error: configuration file not found: {folder / 'rll.yaml'}; did you mean {folder / 'rl.yaml'}?"
    )


def test_a_pipeline_of_an_unknown_class_exits_with_2(folder):
    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "model_index.json").write_text('{"_class_name": "SomeOtherPipeline"}')
    overrides = ["--model.config_path", "null", "--model.model_path", folder / "pipeline"]
    done = launch(ROOT / "tasks/train_dit.py", folder / "dit.yaml", *overrides)
    assert_refused(done, folder / "pipeline", "'SomeOtherPipeline' is not known; known: ")


@pytest.mark.slow
def test_a_missing_pipeline_folder_exits_with_2(folder):
    overrides = ["--model.config_path", "null", "--model.model_path", folder / "nowhere"]
    done = launch(ROOT / "tasks/train_dit.py", folder / "dit.yaml", *overrides)
    assert_refused(done, f"model.model_path {folder / 'nowhere'} is not a pipeline folder", "model_index.json")


def test_a_corrupt_image_exits_with_2_naming_the_row(folder):
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:-300])
    done = launch(ROOT / "tasks/train_dit.py", folder / "dit.yaml")
    assert_refused(done, f"{folder / 'data.jsonl'}, line 2: broken image ({folder / '1.png'})", "data.max_bad_rows")


def test_an_ocr_engine_that_is_not_installed_exits_with_2(folder):
    (folder / "fakes" / "rapidocr").mkdir(parents=True)
    (folder / "fakes" / "rapidocr" / "__init__.py").write_text("raise ImportError('not here')")
    done = launch(ROOT / "tasks/rl_diffusion.py", folder / "rl.yaml", PYTHONPATH=str(folder / "fakes"))
    assert_refused(done, "rapidocr", "pip install rapidocr onnxruntime")


# The configuration is read before the task starts


def read_first(*arguments):
    """Runs ``python -m sfumato.config`` as ``train.sh`` does; also returns which packages it has loaded."""
    code = (
        "import runpy, sys\nsys.argv[0] = 'x'\n"
        "try:\n    runpy.run_module('sfumato.config', run_name='__main__')\n"
        "finally:\n    print({name.partition('.')[0] for name in sys.modules if '.' in name}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, set(ast.literal_eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    ("task", "arguments", "code"),
    [
        ("rl_diffusion", ["--help"], 0),
        ("rl_diffusion_forward", ["configs/quickstart/algorithms/diffusion_nft.yaml"], 0),
        ("train_text", ["configs/quickstart/text_sft.yaml", "--train.sead", "1"], 2),
    ],
)
def test_a_configuration_is_read_without_the_frameworks(task, arguments, code):
    done, loaded = read_first(f"tasks/{task}.py", *arguments)
    assert done.returncode == code, done.stderr
    assert "sfumato" in loaded and not loaded & {"torch", "diffusers", "transformers", "peft", "matplotlib"}
    assert ("--train.lr float" in done.stdout) == ("--help" in arguments)
    assert ("error: --train.sead: unknown key; did you mean 'seed'?" in done.stderr) == (code == 2)


def test_every_task_says_which_configuration_it_reads():
    for task, (module, name) in TASKS.items():
        schema = schema_of_script(ROOT / "tasks" / f"{task}.py")
        assert schema is getattr(importlib.import_module(module), name), task


def test_a_class_of_your_own_beside_the_task_is_found_and_may_use_torch(tmp_path, folder):
    (tmp_path / "task.py").write_text((ROOT / "tasks/rl_diffusion.py").read_text())
    (tmp_path / "beside.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom torch import nn\n"
        "from sfumato.rewards.base import Reward\n"
        "SIZE = torch.zeros(2).numel() + nn.Identity()(torch.ones(1)).numel()\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Beside(Reward):\n    size: int = SIZE\n"
        "    def score(self, samples):\n        return [0.0] * len(samples)\n"
    )
    mistake = ["--reward.rewards.0.type", "beside:Beside", "--reward.rewards.0.size", "big"]
    done, loaded = read_first(tmp_path / "task.py", folder / "rl.yaml", *mistake)
    assert done.returncode == 2 and "torch" in loaded, done.stderr
    assert "error: --reward.rewards.0.size: Input should be a valid integer" in done.stderr


def test_several_processes_give_one_message(folder):
    done = launch(
        ROOT / "tasks/train_dit.py", folder / "dit.yaml", "--train.global_batch_size", "6", NPROC_PER_NODE="2"
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "2 x 2 data-parallel processes = 4" in done.stderr


def test_help_of_a_task_that_defines_its_configuration_itself(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from sfumato.config.base import Section\nfrom sfumato.config.load import parse_config\n"
        "class Own(Section):\n    size: int = 3\n    'How large.'\nparse_config(Own)\n"
    )
    done = launch(path, "--help", PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and done.stdout.count("--size int") == 1, done.stderr
