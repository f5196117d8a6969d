"""End-to-end runs that take seconds: a pipeline of a few thousand parameters, and configurations of tasks on it.

Everything is made in code. A configuration is the nested mapping that a YAML file would hold; sections given as
keyword arguments are laid over it:

    config = tiny_dit_config(tmp_path, train={"max_steps": 4, "ema_decay": 0.9})
    run_task_here("train_dit", config)                                        # in this process, errors rise here
    result = run_task_process("train_dit", write_config(config, tmp_path / "run.yaml"), kill_after=2)

One CPU thread is used throughout, so that runs in this process and in others agree to the bit.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import yaml
from diffusers.configuration_utils import ConfigMixin
from safetensors.torch import load_file

from sfumato.config.load import load_config, merge, parse_overrides
from sfumato.config.recipes import FORWARD_RECIPES
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion import flops
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.flops import DenoiserFlops, denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.diffusion import differentiable, policy
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.lock import release_locks
from sfumato.tracking.run import Run
from tests.forked import ForkedScript

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
TEMPORARY = tempfile.gettempdir()
"""Where temporary files lie, whatever a test says later."""

DEVICE = os.environ.get("SFUMATO_TEST_DEVICE", "cpu")
MESH_DEVICE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
"""That of a mesh, which names the GPU of its rank."""
"""Where runs compute, and the tests that ask for it: cpu, or cuda on a machine that has a GPU."""


def tiny_pipeline_description() -> dict[str, Any]:
    """An SD3 pipeline of width 32 with two layers: 16x16 pixels are 8x8 latents and 16 image tokens."""
    return {
        "pipeline": "StableDiffusion3Pipeline",
        "transformer": {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        "vae": {"channels": [8, 16], "latent_channels": 4, "norm_groups": 4},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "t5": {"num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write", '"'], "max_length": 8},
        "scheduler": {"shift": 1.0},
    }


def write_tiny_pipeline(folder: Path, seed: int = 0, described: dict[str, Any] | None = None, tokens: int = 7) -> Path:
    """Saves a tiny pipeline as a diffusers folder and returns it; one that is there already is left alone.

    What starts at zero (output projection, modulations) gets small random weights: as in a trained model, gradients
    then reach every layer from the first step.

    Args:
        folder: where to.
        seed: of the weights.
        described: the pipeline, such as those of ``tests/tiny_families.py``.
        tokens: model.max_sequence_length.
    """
    if not (folder / "model_index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        description = yaml.safe_dump(described or tiny_pipeline_description())
        folder.with_name(f"{folder.name}.yaml").write_text(description, encoding="utf-8")
        made = _made_pipeline(description, seed, tokens)
        shutil.copytree(made, folder, copy_function=shutil.copy, dirs_exist_ok=True)
    return folder


@functools.cache
def _made_pipeline(description: str, seed: int, tokens: int) -> Path:
    """A folder with the pipeline, which a process makes once, since that takes twenty times as long as copying it."""
    made = Path(tempfile.mkdtemp(prefix="sfumato_tiny_", dir=TEMPORARY))
    atexit.register(_remove, made, os.getpid())
    path = made / "description.yaml"
    path.write_text(description, encoding="utf-8")
    model = build_diffusion_model(ModelConfig(config_path=str(path), max_sequence_length=tokens), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.denoiser.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    model.save_pipeline(made / "pipeline")
    return made / "pipeline"


def _remove(folder: Path, maker: int) -> None:
    """Of a process that was forked the folder is not."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def tiny_dit_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_dit.py`` run of 6 steps of 4 glyph images; its folder is ``tmp_path/run``."""
    base = {
        "model": {"model_path": str(write_tiny_pipeline(tmp_path / "pipeline")), "max_sequence_length": 7},
        "data": {"data_type": "glyphs", "height": 16, "width": 16, "glyphs": _glyphs()},
        "train": {**_train(tmp_path), "micro_batch_size": 2, "global_batch_size": 4},
        "sample": {"num_prompts": 2, "num_inference_steps": 2, "guidance_scale": 1.0},
    }
    return merge(base, overrides)


def tiny_dit_dpo_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_dit_dpo.py`` run of 6 steps of 4 glyph pairs, with 4 held-out ones; in ``tmp_path/run``."""
    settings = {"dpo": {"beta": 100.0}, "eval": {"every_steps": 3, "num_rows": 4}}
    return merge(tiny_dit_config(tmp_path), merge(settings, overrides))


def tiny_rl_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A ``tasks/rl_diffusion.py`` run of 6 iterations of 4 prompts x 4 samples, 2 updates each; in ``tmp_path/run``.

    The reward is the brightness of the image, so no OCR engine is needed.
    """
    base = {
        "model": {"model_path": str(write_tiny_pipeline(tmp_path / "pipeline")), "max_sequence_length": 7},
        "data": {"data_type": "glyphs", "glyphs": _glyphs()},
        "rollout": {
            "num_prompts": 4,
            "n": 4,
            "micro_batch_size": 8,  # = train.micro_batch_size x window size: rollout and replay have one batch shape
            "height": 16,
            "width": 16,
            "num_inference_steps": 4,
            "guidance_scale": 1.0,
        },
        "reward": {"rewards": [{"type": "brightness"}]},
        "algorithm": {
            "recipe": "flow_grpo_fast",
            "window": {"type": "random", "size": 2, "range": [0, 3]},
            "objective": {"clip_range": 1.0e-3},
        },
        "train": {**_train(tmp_path), "micro_batch_size": 4, "global_batch_size": 8},
        "eval": {"every_steps": 3, "num_prompts": 2, "num_inference_steps": 2},
    }
    return merge(base, overrides)


def rl_task(recipe: str) -> str:
    """The task that runs a recipe."""
    return "rl_diffusion_forward" if recipe in FORWARD_RECIPES else "rl_diffusion"


def tiny_language_description(kind: str = "qwen3") -> dict[str, Any]:
    """A language model of width 32 with two layers for the tokenizer of bytes.

    Args:
        kind: llama, qwen2, qwen3, qwen3_moe, deepseek_v2 or deepseek_v3.
    """
    base = {
        "model_type": kind,
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
    }
    moe = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    if kind in ("qwen3", "qwen3_moe"):
        base |= {"head_dim": 8}
    if kind == "qwen3_moe":
        base |= moe | {"num_experts": 4, "norm_topk_prob": True}
    if kind.startswith("deepseek"):
        base |= moe | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "kv_lora_rank": 16}
        base |= {"q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        base |= {"first_k_dense_replace": 1, "n_group": 2 if kind == "deepseek_v3" else 1, "topk_group": 1}
    return base


def tiny_text_config(tmp_path: Path, kind: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """A ``tasks/train_text.py`` run of 6 steps of 4 rows of 64 tokens; its folder is ``tmp_path/run``."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    description = write_config(tiny_language_description(kind), tmp_path / f"{kind}.yaml")
    base = {
        "model": {"config_path": str(description), "tokenizer_path": "bytes"},
        "data": {
            "data_type": "conversation",
            "synthetic": {"problem": "reverse", "max_length": 4, "num_rows": 200},
            "max_seq_len": 64,
        },
        "train": {**_train(tmp_path), "micro_batch_size": 1, "global_batch_size": 4},
        "eval": {"every_steps": 3, "num_rows": 8, "num_samples": 1, "max_new_tokens": 4},
    }
    if overrides.get("data", {}).get("data_type") in ("preference", "unpaired"):  # which answers no prompts
        base["eval"] = {"every_steps": 3, "num_rows": 8}
    return merge(base, overrides)


def tiny_text_rl_config(tmp_path: Path, kind: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """A ``tasks/rl_text.py`` run of 4 iterations of 4 prompts x 4 answers of up to 8 bytes, rewarded for ASCII."""
    base = tiny_text_config(tmp_path, kind)
    base = {
        "model": base["model"],
        "data": {
            "synthetic": {"problem": "add", "max_length": 2, "num_rows": 400},  # a start encodes all prompts
            "max_prompt_tokens": 64,
            "chat_template": "none",
        },
        "rollout": {"num_prompts": 4, "n": 4, "max_new_tokens": 8},
        "reward": {"rewards": [{"type": "tests.text_rewards:Ascii"}]},
        "algorithm": {"recipe": "grpo"},
        "train": {**base["train"], "max_steps": 4, "micro_batch_size": 8, "lr_warmup_steps": 0},
        "eval": {"every_steps": 2, "num_prompts": 4, "num_saved": 2},
    }
    base["train"].pop("global_batch_size")
    return merge(base, overrides)


class Position:
    """What a data loader knows of where it is."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state(self) -> dict[str, Any]:
        return dict(self.values)

    def restore(self, state: dict[str, Any]) -> None:
        self.values = state


def write_config(config: dict[str, Any], path: Path) -> Path:
    """Writes a configuration as the YAML file that a task reads."""
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def load_task(task: str) -> ModuleType:
    """A fresh copy of the module ``tasks/<task>.py``, whose names a test may replace."""
    spec = importlib.util.spec_from_file_location(f"tiny_{task}", ROOT / "tasks" / f"{task}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_task_here(task: str | ModuleType, config: dict[str, Any], with_report: bool = False) -> Path:
    """Runs a task in this process; its errors rise here, where ``python tasks/X.py`` would make exit codes of them.

    Args:
        task: a name in ``tasks/``, or a module of ``load_task``.
        config: the configuration.
        with_report: write ``report.html``, too, whose curves may take longer than the rest of a tiny run.

    Returns:
        The run folder.
    """
    module = load_task(task) if isinstance(task, str) else task
    schema = typing.get_type_hints(module.main)["config"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.ExitStack() as stack:
            for counting in (differentiable, flops, policy):
                stack.enter_context(mock.patch.object(counting, "denoiser_flops", flops_counted_once))
            if not with_report:
                stack.enter_context(mock.patch.object(Run, "write_report"))
            module.main(load_config(schema, overrides=config))
    finally:  # a run listens to signals, and holds its folder, for as long as its process lives
        release_locks()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Path(config["train"]["output_dir"])


def flops_counted_once(
    model: DiffusionModel, height: int, width: int, conditioning: Mapping[str, torch.Tensor] | None = None
) -> DenoiserFlops:
    """``denoiser_flops``, which takes as long as the rest of a tiny run, once for each kind of model in a process."""
    example = model.example_embeddings(height, width) if conditioning is None else conditioning
    sizes = {name: tuple(value.shape[1:]) for name, value in example.items()}
    latents = model.latent_shape(height, width, model.frames)
    configs = [
        {name: value for name, value in module.config.items() if name != "_name_or_path"}
        for module in model.denoiser.modules()
        if isinstance(module, ConfigMixin)
    ]
    weights = [
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.denoiser.named_parameters()
    ]
    key = str((type(model), latents, sizes, configs, weights))
    if key not in _FLOPS:
        _FLOPS[key] = denoiser_flops(model, height, width, conditioning)
    return _FLOPS[key]


_FLOPS: dict[str, DenoiserFlops] = {}


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """What came of a task in a process of its own."""

    returncode: int
    """Exit code; minus the number of the signal that ended it."""
    output: str
    """stdout and stderr together."""
    output_dir: Path
    """The run folder."""

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``."""
        return read_jsonl(self.output_dir / "metrics.jsonl")


def run_task_process(
    task: str,
    config_path: Path,
    *overrides: str,
    kill_after: int | None = None,
    kill_signal: signal.Signals = signal.SIGKILL,
    num_processes: int = 1,
    env: dict[str, str] | None = None,
    timeout_s: float = 180,
) -> TaskResult:
    """Runs ``python tasks/<task>.py``, or with several processes ``train.sh``, and waits for its end.

    Args:
        task: a name in ``tasks/``.
        config_path: the YAML file.
        overrides: further arguments, such as ``"--train.lr", "1e-4"``.
        kill_after: send ``kill_signal`` as soon as metrics.jsonl holds the line of this step. The run must still be
            going on then, so give it steps enough.
        kill_signal: SIGKILL, or SIGTERM to be stopped in good order.
        num_processes: data-parallel processes.
        env: environment variables laid over this process's own. One process is a copy of one that has imported what it
            needs (``tests/forked.py``); a new python on a GPU, where imports have started CUDA, and with a variable
            that MKL reads while it is loaded.
        timeout_s: seconds after which the run is killed and the test fails.
    """
    settings = merge(yaml.safe_load(config_path.read_text(encoding="utf-8")), parse_overrides(list(overrides)))
    output_dir = Path(settings["train"]["output_dir"])
    arguments = [f"tasks/{task}.py", str(config_path), *overrides]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHON": sys.executable,
        "NPROC_PER_NODE": str(num_processes),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    log = config_path.with_suffix(".log")
    earlier_log = _inode(output_dir / "metrics.jsonl")  # a run that begins or resumes replaces the file
    with log.open("wb") as file:
        is_copy = num_processes == 1 and DEVICE == "cpu" and not any(name.startswith("MKL_") for name in env or {})
        if is_copy:
            process = ForkedScript(arguments, ROOT, environment, log)
        else:
            command = [sys.executable, *arguments] if num_processes == 1 else ["bash", "train.sh", *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"tasks/{task}.py ran for {timeout_s} s; its output:\n{log.read_text()}")
                has_begun = _inode(output_dir / "metrics.jsonl") not in (0, earlier_log)
                if kill_after is not None and has_begun and kill_after <= _last_logged_step(output_dir):
                    process.send_signal(kill_signal)
                    process.wait(timeout=60)
                    break
                time.sleep(0.003 if kill_after is not None else 0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return TaskResult(process.wait(), log.read_text(encoding="utf-8", errors="replace"), output_dir)


def weights_in(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of every safetensors file below a folder: dtype, shape and bytes. There must be at least one.

    Files are not compared as they stand, since safetensors writes several entries of metadata in random order.
    """
    results = {
        f"{path.relative_to(folder)}:{name}": (str(value.dtype), list(value.shape), value.numpy().tobytes())
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }
    assert results, f"no weights in {folder}"
    return results


def _glyphs() -> dict[str, Any]:
    # 36 words, of which AE and DC are held out
    return {"characters": "ABCDEF", "length": 2, "font_sizes": [8], "jitter": 1, "num_images": 10}


def _train(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 6,
        "lr": 1.0e-3,
        "lr_warmup_steps": 2,
        "lr_decay_style": "cosine",
        "device": DEVICE,
        "num_threads": 1,
        "trackers": [],
    }


def _inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


def _last_logged_step(output_dir: Path) -> int:
    lines = read_jsonl(output_dir / "metrics.jsonl")
    return lines[-1]["step"] if lines else -1
