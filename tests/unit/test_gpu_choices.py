"""What is chosen for GPUs before anything is computed there, as far as a CPU can show it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sfumato.config.sections import TrainConfig
from sfumato.kernels import choose_allocator
from sfumato.models.diffusion import latents
from sfumato.models.diffusion.latents import KLLatents, in_slices
from sfumato.parallel.mesh import build_mesh

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def without_choices(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def test_gpu_memory_grows_in_place():
    assert choose_allocator() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_another_choice_stays(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert choose_allocator() == {name: "max_split_size_mb:128"}


def test_memory_that_other_processes_open_is_left_to_torch():
    assert choose_allocator(shares_memory=True) == {}
    assert not any(name in os.environ for name in NAMES)


def test_attention_has_one_kernel_with_gradients_and_without(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(device))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        build_mesh(TrainConfig(output_dir="run"))
        assert seen == [torch.device("cuda", 0)] and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (2, [2]), (3, [2, 2]), (5, [2, 2, 2]), (6, [2, 2, 2])])
def test_slices_are_of_one_size_and_none_is_larger_than_allowed(monkeypatch, count, sizes):
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 2 * 64 + 1)
    seen = []
    given = torch.arange(float(count))[:, None]
    found = in_slices(lambda part: seen.append(len(part)) or 2 * part, given, 64)
    assert torch.equal(found, 2 * given) and seen == sizes


def test_a_sample_larger_than_allowed_is_decoded_alone(monkeypatch):
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 10)
    seen = []
    in_slices(lambda part: seen.append(len(part)) or part, torch.zeros(3, 1), 64)
    assert seen == [1, 1, 1]


def test_the_autoencoder_decodes_in_slices(monkeypatch):
    """Latents of 4 x 4 are pictures of 8 x 8: two of them at a time."""
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 2 * 64)
    seen = []

    def decode(part, return_dict):
        seen.append(len(part))
        return (part.repeat_interleave(2, -1).repeat_interleave(2, -2),)

    config = SimpleNamespace(shift_factor=0.0, scaling_factor=1.0)
    vae = SimpleNamespace(decode=decode, dtype=torch.float32, config=config)
    model = SimpleNamespace(pipeline=SimpleNamespace(vae=vae, vae_scale_factor=2))
    model._latent_scale = lambda like: KLLatents._latent_scale(model, like)
    given = torch.randn(5, 4, 4, 4)
    found = KLLatents.latents_to_pixels(model, given)
    assert seen == [2, 2, 2] and found.shape == (5, 4, 8, 8)
    assert torch.equal(found[..., ::2, ::2], given)
