"""Weights that fsdp keeps in CPU memory: weights, buffers and batches meet on the device, in one process, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sfumato.algorithms.device import to_device
from sfumato.config.load import load_config
from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_language_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh, close_mesh
from sfumato.parallel.shards import local_shard, trainable_parameters
from tests import tiny_families
from tests.pretended_device import DEVICE, PretendedDevice, pretend_device
from tests.token_batches import batch, samples
from tests.unit.test_language import describe, sum_of_losses

FAMILIES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "sd3": (tiny_families.tiny_sd3, 7),
    "wan": (tiny_families.tiny_wan, 7),
}
"""Denoisers with buffers: embeddings of positions, frequencies."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "SFUMATO_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pretend_device() as pretended:
        yield pretended
    close_mesh()


def velocities(family: str, folder: Path, mesh: Mesh, **train: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The velocity of two rows, and the gradients of its sum of squares."""
    describe_family, tokens = FAMILIES[family]
    (folder / "tiny.yaml").write_text(yaml.safe_dump(describe_family()))
    torch.manual_seed(0)
    description = ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=tokens)
    model = build_diffusion_model(description, mesh.device)
    model.parallelize(mesh, TrainConfig(output_dir=str(folder), **train))
    latents = torch.randn(2, *model.latent_shape(16, 16), generator=torch.Generator().manual_seed(1))
    example = Conditioning(model.example_embeddings(16, 16)).to(mesh.device).rows([0, 0])
    sigma = torch.tensor([0.2, 0.7])
    velocity = model.predict_velocity(to_device(latents, mesh.device), to_device(sigma, mesh.device), example)
    velocity.square().sum().backward()
    parameters = trainable_parameters(model.denoiser)
    return velocity.detach(), {name: local_shard(weight.grad) for name, weight in parameters.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_a_denoiser_are_where_its_batches_are(family: str, tmp_path: Path, device: PretendedDevice) -> None:
    mesh = build_mesh(TrainConfig(output_dir="unused", device="cpu", enable_fsdp_offload=True))
    assert mesh.device == DEVICE and mesh.size == 1 and mesh.distributed
    velocity, gradients = velocities(family, tmp_path, mesh, enable_fsdp_offload=True)
    assert device.holds(velocity) and not any(map(device.holds, gradients.values()))
    expected, expected_gradients = velocities(family, tmp_path, Mesh(Layout(), torch.device("cpu")), compile=False)
    assert torch.equal(velocity, expected) and gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name])


def test_a_language_model_with_biases_of_routers_waits_in_cpu_memory(tmp_path: Path, device: PretendedDevice) -> None:
    overrides = {"output_dir": "unused", "enable_fsdp_offload": True, "device": "cpu", "expert_bias_rate": 0.1}
    train = load_config(TextTrainConfig, overrides=overrides)
    mesh = build_mesh(train)
    model = build_language_model(LanguageModelConfig(**describe(tmp_path, "deepseek_v3")), train)
    model.parallelize(mesh, train)
    loss = model.forward_backward([batch(samples())], sum_of_losses)[0]
    weights = trainable_parameters(model.trained)
    assert not any(
        device.holds(local_shard(weight)) or device.holds(local_shard(weight.grad)) for weight in weights.values()
    )
    assert device.holds(dict(model.trained.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert loss > 0 and model.balancer.update()


def test_fsdp1_cannot_do_that_in_one_process(device: PretendedDevice) -> None:
    train = TrainConfig(output_dir="unused", device="cpu", data_parallel_mode="fsdp1", enable_fsdp_offload=True)
    with pytest.raises(ConfigError, match=r"needs train\.data_parallel_mode fsdp2"):
        build_mesh(train)
