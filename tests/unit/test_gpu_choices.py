"""What is chosen for GPUs before anything is computed there, as far as a CPU can show it."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sfumato.config.sections import TrainConfig
from sfumato.kernels import choose_allocator
from sfumato.models.diffusion import latents
from sfumato.models.diffusion.latents import KLLatents, in_slices
from sfumato.models.language import packed_attention
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.parallel.mesh import build_mesh
from sfumato.tracking.meters import describe_float32
from tests.tiny import run_task_here, tiny_rl_config, tiny_text_config, tiny_text_rl_config, weights_in

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


def test_the_precision_of_float32_is_said_on_gpus(monkeypatch):
    assert not describe_float32(torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    (line,) = describe_float32(gpu)
    assert "products are in full float32, convolutions rounded to TF32" in line and "NVIDIA_TF32_OVERRIDE=0" in line
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert "products are rounded to TF32, convolutions in full float32" in describe_float32(gpu)[0]


@pytest.mark.parametrize("replays", [False, True])
def test_attention_of_rl_has_one_kernel_with_gradients_and_without(monkeypatch, replays):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(device))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        build_mesh(TrainConfig(output_dir="run"), replays)
        assert seen == [torch.device("cuda", 0)] and torch.backends.cuda.cudnn_sdp_enabled() is not replays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_whole_rows_on_a_gpu_share_keys_and_values_among_heads(monkeypatch):
    """Repeated ones would be copies; torch's flash kernel groups heads itself."""
    attend, positions = ALL_ATTENTION_FUNCTIONS[register_packed_attention()], torch.arange(9)[None]
    query, key, value = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    expected = attend(nn.Module(), query, key, value, None, position_ids=positions)[0]
    seen = []
    plain = functional.scaled_dot_product_attention

    def watched(query, key, value, *others, **settings):
        seen.append((key.shape[1], value.shape[1], settings["enable_gqa"]))
        return plain(query, key, value, *others, **settings)

    monkeypatch.setattr(packed_attention, "_has_flash", lambda *_: True)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    actual = attend(nn.Module(), query, key, value, None, position_ids=positions)[0]
    assert seen == [(2, 2, True)]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("train_text", functools.partial(tiny_text_config, kind="qwen3_moe")),
        pytest.param("rl_text", tiny_text_rl_config, marks=pytest.mark.slow),
        pytest.param("rl_diffusion", tiny_rl_config, marks=pytest.mark.slow),
    ],
)
def test_kernels_that_add_in_one_order_suffice_and_change_nothing_on_a_cpu(monkeypatch, tmp_path, task, config):
    """On a GPU torch would raise for an operation that has none; here it shows which are asked for at all."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    usual = run_task_here(task, config(tmp_path / "usual"))
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        chosen = run_task_here(task, config(tmp_path / "chosen", train={"deterministic": True}))
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert (usual / "metrics.jsonl").read_bytes() == (chosen / "metrics.jsonl").read_bytes()
    assert weights_in(usual / "hf_ckpt") == weights_in(chosen / "hf_ckpt")


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (2, [2]), (3, [2, 2]), (5, [2, 2, 2]), (6, [2, 2, 2])])
def test_slices_are_of_one_size_and_none_is_larger_than_allowed(monkeypatch, count, sizes):
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 2 * 64 + 1)
    seen = []
    rows = torch.arange(float(count))[:, None]
    result = in_slices(lambda part: seen.append(len(part)) or 2 * part, rows, 64)
    assert torch.equal(result, 2 * rows) and seen == sizes


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
    model = SimpleNamespace(pipeline=SimpleNamespace(vae=vae), vae_factor=2)
    model._latent_scale = lambda like: KLLatents._latent_scale(model, like)
    latent_rows = torch.randn(5, 4, 4, 4)
    result = KLLatents.latents_to_pixels(model, latent_rows)
    assert seen == [2, 2, 2] and result.shape == (5, 4, 8, 8)
    assert torch.equal(result[..., ::2, ::2], latent_rows)
