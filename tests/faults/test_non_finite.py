"""NaN in weights, samples and data: named and counted, never trained on, exported or sent."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config
from sfumato.config.sections import ModelConfig, TrainConfig
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.images.image_text import open_image_text
from sfumato.data.loader import IndexBatch
from sfumato.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RewardError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import OnlineEncoder
from sfumato.models.diffusion.frozen_parts import FrozenParts
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_language_model
from sfumato.optim.ema import Ema
from sfumato.parallel.finite import not_finite
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import load_weights
from sfumato.rewards.networks.folder import assign_tensors
from sfumato.rollout.diffusion.trajectory_sampler import LATENTS_NOT_FINITE, PICTURE_NOT_FINITE
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run
from sfumato.tracking.samples import read_samples
from tests.tiny import (
    load_task,
    run_task_here,
    tiny_dit_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    write_tiny_pipeline,
)

ALONE = Mesh(Layout(), torch.device("cpu"))
NAN, INF = math.nan, math.inf


def spoil(path: Path, value: float) -> str:
    """Puts one value into the last tensor of a file; returns the tensor's name."""
    tensors = load_file(path)
    name = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())[-1]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})
    return name


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_among_finite_ones_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    whole = {"largest": torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype), "numbers": torch.arange(4)}
    nothing = {"empty": torch.empty(0, 3, dtype=dtype), "nowhere": torch.empty(2, dtype=dtype, device="meta")}
    spoiled = {f"{value}": torch.zeros(7, 3, dtype=dtype) for value in (NAN, INF, -INF)}
    for value, tensor in spoiled.items():
        tensor[5, 1] = float(value)
    assert not_finite(whole | nothing) == []
    assert not_finite(whole | spoiled | nothing) == list(spoiled)


@pytest.mark.parametrize(("part", "value"), [("transformer", NAN), ("vae", -INF), ("text_encoder", NAN)])
def test_a_pipeline_with_one_bad_weight_is_refused_by_file_and_tensor(tmp_path: Path, part: str, value: float) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    path = next((folder / part).glob("*.safetensors"))
    name = spoil(path, value)
    with pytest.raises(ConfigError, match=r"NaN or infinite.*fetch it again") as caught:
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))
    assert str(path) in str(caught.value) and name in str(caught.value)


def test_weights_that_are_read_where_they_are_needed_are_looked_at_too(tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    name = spoil(next((folder / "transformer").glob("*.safetensors")), NAN)
    model = build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7), init_device="meta")
    with pytest.raises(ConfigError, match=name):
        model.parallelize(ALONE, TrainConfig(output_dir=str(tmp_path), init_device="meta"))


def test_a_language_model_and_a_network_of_a_reward_are_looked_at(tmp_path: Path) -> None:
    config = load_config(TrainTextConfig, overrides=tiny_text_config(tmp_path))
    built = build_language_model(config.model, config.train)
    built.module.save_pretrained(tmp_path / "model")
    name = spoil(tmp_path / "model" / "model.safetensors", INF)
    settings = {"config_path": None, "model_path": str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=rf"model\.safetensors.*{name}"):
        build_language_model(config.model.model_copy(update=settings), config.train)
    head = nn.Linear(2, 1)
    tensors = {"weight": torch.tensor([[1.0, NAN]]), "bias": torch.zeros(1)}
    with pytest.raises(ConfigError, match="weight"):
        assign_tensors(head, tensors, tmp_path)


def test_the_file_among_several_is_named(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"1.weight": torch.zeros(2, 2), "1.bias": torch.tensor([0.0, NAN])}, tmp_path / "model-2.safetensors")
    module, files = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sorted(tmp_path.glob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors: .*1\.bias"):
        load_weights(module, files, ALONE)


@pytest.fixture
def model(tmp_path: Path) -> DiffusionModel:
    folder = write_tiny_pipeline(tmp_path / "pipeline")
    return build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))


def test_nothing_is_exported_when_a_weight_an_average_or_another_part_is_bad(
    tmp_path: Path, model: DiffusionModel
) -> None:
    out = tmp_path / "hf_ckpt"
    export_model(model, None, out, ALONE)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    ema = Ema(model.denoiser, 0.9)
    name, average = next(iter(ema.averages.items()))
    average.view(-1)[0] = NAN
    with pytest.raises(NonFiniteError, match=f"{name}.*Nothing was exported"):
        export_model(model, ema, out, ALONE)
    with torch.no_grad():
        next(model.pipeline.vae.parameters()).view(-1)[0] = INF
    with pytest.raises(NonFiniteError, match=r"vae: .*Nothing was exported"):
        export_model(model, None, out, ALONE)
    with torch.no_grad():
        dict(model.denoiser.named_parameters())[name].view(-1)[0] = NAN
    with pytest.raises(NonFiniteError, match=f"{name}.*Nothing was exported"):
        export_model(model, None, out, ALONE)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_bad_weights_neither_replaces_good_ones_nor_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state = TrainState(layer, optimizer, schedule, Ema(layer, 0.9), step=1)
    config = TrainConfig(output_dir=str(tmp_path), max_checkpoints=1, trackers=[])
    run = Run(tmp_path, "test", ALONE)
    run.begin(3, 0, [])
    keeper = Checkpointer(config, run, ALONE, 3)
    keeper.save(state)
    state.step = 2
    with torch.no_grad():
        layer.weight[0, 0] = NAN
    with pytest.raises(NonFiniteError, match=r"after step 2 .*weight.*newest is of step 1"):
        keeper.save(state)
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [1]
    with monkeypatch.context() as patched:  # as an earlier version wrote it
        patched.setattr(Checkpointer, "_find_not_finite", lambda self, state: [])
        keeper.save(state)
    resumed = config.model_copy(update={"load_checkpoint_path": "auto"})
    with pytest.raises(CheckpointError, match=r"global_step_2 .*weight.*Name an earlier checkpoint"):
        Checkpointer(resumed, run, ALONE, 3).resume(state)
    run.close()


def test_weights_that_an_update_has_spoiled_end_rl_of_text_where_it_draws_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil_after_step(optimizer: torch.optim.AdamW, *_: object) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].view(-1)[:] = NAN

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil_after_step)
    with pytest.raises(NonFiniteError, match="logits are not finite while it draws"):
        run_task_here("rl_text", tiny_text_rl_config(tmp_path, train={"max_steps": 2}))


# Samples


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch):
    """Spoils every so-manieth picture that is decoded."""

    def spoil_every(period: int) -> None:
        decode, seen = DiffusionModel.decode_marked, [0]

        def spoiled(self: DiffusionModel, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            to_pixels = type(self).latents_to_pixels

            def some(model: DiffusionModel, latents: torch.Tensor) -> torch.Tensor:
                pixels = to_pixels(model, latents).clone()
                for row in range(len(pixels)):
                    if seen[0] % period == 0:
                        pixels[row, 0, 0, 0] = NAN
                    seen[0] += 1
                return pixels

            with monkeypatch.context() as patched:
                patched.setattr(type(self), "latents_to_pixels", some)
                return decode(self, latents)

        monkeypatch.setattr(FrozenParts, "decode_marked", spoiled)

    return spoil_every


def final_sample_config(tmp_path: Path, **more: object) -> dict:
    config = tiny_rl_config(tmp_path, **more)
    config["algorithm"] = {"recipe": "diffusion_nft"}
    return config


@pytest.mark.parametrize("kind", ["trajectory", "sample"])
def test_pictures_that_are_not_finite_are_left_out_and_counted(tmp_path: Path, decoder, kind: str) -> None:
    decoder(4)
    make = tiny_rl_config if kind == "trajectory" else final_sample_config
    task = "rl_diffusion" if kind == "trajectory" else "rl_diffusion_forward"
    folder = run_task_here(task, make(tmp_path, train={"max_steps": 2}, eval={"every_steps": 2}))
    lines = read_jsonl(folder / "metrics.jsonl")
    trained = [line for line in lines if "reward/failed" in line]
    assert [line["reward/failed"] for line in trained] == [0.25, 0.25]
    assert all(math.isfinite(line["diversity/latents"]) and math.isfinite(line["grad_norm"]) for line in trained)
    said = (folder / "log.txt").read_text()
    assert f"step 1: reward failed: not scored: {PICTURE_NOT_FINITE} (4 of 16 samples)" in said
    assert lines[0]["eval/reward/failed"] == 0.5
    assert f"evaluation at step 0: reward failed: not scored: {PICTURE_NOT_FINITE} (1 of 2 samples)" in said
    rows = [row for some in read_samples(folder).values() for row in some]
    assert {row["total"] is None for row in rows if "damage" in row} == {True}
    assert any("damage" in row for row in rows) and not all("damage" in row for row in rows)


@pytest.mark.parametrize("kind", ["trajectory", "sample"])
def test_latents_that_are_not_finite_are_left_out_of_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Prompts whose embeddings overflow."""
    embed = FrozenParts._keep

    def keep(self: FrozenParts, keys, embedded) -> None:
        embed(self, keys, embedded)
        for key in keys:
            if '"A' in key[0] or '"B' in key[0]:
                self._prompts[key] = {name: torch.full_like(value, NAN) for name, value in self._prompts[key].items()}

    monkeypatch.setattr(FrozenParts, "_keep", keep)
    make = tiny_rl_config if kind == "trajectory" else final_sample_config
    config = make(tmp_path, train={"max_steps": 3}, eval={"every_steps": 3})
    folder = run_task_here("rl_diffusion" if kind == "trajectory" else "rl_diffusion_forward", config)
    said, lines = (folder / "log.txt").read_text(), read_jsonl(folder / "metrics.jsonl")
    failed = [line["reward/failed"] for line in lines if "reward/failed" in line]
    assert any(0 < share < 1 for share in failed), failed
    assert f"not scored: {LATENTS_NOT_FINITE}" in said
    assert not any(None in (line["grad_norm"], line["loss/policy"]) for line in lines if "grad_norm" in line)


def test_a_broken_decoder_stops_the_run_as_a_reward_does(tmp_path: Path, decoder) -> None:
    decoder(1)
    with pytest.raises(RewardError, match=r"16 of 16 samples have no reward.*set model.dtype fp32") as caught:
        run_task_here("rl_diffusion", tiny_rl_config(tmp_path, train={"max_steps": 2}))
    assert caught.value.exit_code == 5
    assert not (tmp_path / "run" / "hf_ckpt").exists()


def test_the_grid_of_supervised_training_says_what_it_cannot_show(tmp_path: Path, decoder) -> None:
    decoder(2)
    folder = run_task_here("train_dit", tiny_dit_config(tmp_path, train={"max_steps": 1}))
    assert f"samples of step 1: 1 of 2 cannot be shown: {PICTURE_NOT_FINITE}" in (folder / "log.txt").read_text()


# Data


@pytest.mark.parametrize("what", ["latents", "embeddings"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_row_that_encodes_to_nan_is_a_bad_row(
    tmp_path: Path, model: DiffusionModel, monkeypatch: pytest.MonkeyPatch, cached: bool, what: str
) -> None:
    config = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path))
    data = open_image_text(config.data, 0)
    black, caption = data.pixels(2), data.caption(2)
    if what == "latents":
        encode = model.encode_pixels

        def spoiled(pixels: torch.Tensor) -> torch.Tensor:
            latents = encode(pixels)
            for row, picture in enumerate(pixels):
                if torch.equal(picture, black):
                    latents[row].view(-1)[3] = NAN
            return latents

        monkeypatch.setattr(model, "encode_pixels", spoiled)
    else:
        embed = model._keep

        def keep(keys, embedded) -> None:
            embed(keys, embedded)
            for key in keys:
                if key[0] == caption:
                    next(iter(model._prompts[key].values())).view(-1)[0] = NAN

        monkeypatch.setattr(model, "_keep", keep)
    bad = {index for index in range(len(data)) if what == "embeddings" and data.caption(index) == caption} | {2}
    said: list[str] = []

    def encoder(limit: int) -> object:
        rows = BadRows(limit, said.append)
        return open_cache(tmp_path / f"cache{limit}", data, model, rows) if cached else OnlineEncoder(data, model, rows)

    indices = list(range(len(data)))
    batch = encoder(len(bad)).batch(IndexBatch(indices, [10 + index for index in indices]))
    assert batch.sample_ids == [10 + index for index in indices if index not in bad]
    assert batch.num_images == len(batch.latents) == len(batch.conditioning) == len(indices) - len(bad)
    assert batch.latents.isfinite().all() and all(
        tensor.isfinite().all() for tensor in batch.conditioning.tensors.values()
    )
    assert any(data.describe(2) in line and "NaN or infinite" in line for line in said)
    alone = encoder(len(bad)).batch(IndexBatch([2], [5]))
    assert alone.num_images == 0 and alone.sample_ids == [5] and alone.latents.isfinite().all()
    with pytest.raises(DataError, match="NaN or infinite"):
        encoder(len(bad) - 1).batch(IndexBatch(indices, indices))


def test_a_cache_that_holds_nan_is_damaged(tmp_path: Path, model: DiffusionModel) -> None:
    data = open_image_text(load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path)).data, 0)
    open_cache(tmp_path / "cache", data, model, BadRows(0, print))
    (path,) = (tmp_path / "cache").rglob("latents.bin")
    values = np.fromfile(path, np.float32)
    values[0] = NAN
    values.tofile(path)
    cache = open_cache(tmp_path / "cache", data, model, BadRows(0, print))
    with pytest.raises(DataError, match=r"damaged latent cache: .*delete its folder"):
        cache.batch(IndexBatch([0, 1], [0, 1]))


def test_the_whole_run_is_refused_at_its_start(tmp_path: Path) -> None:
    config = tiny_rl_config(tmp_path)
    name = spoil(next((tmp_path / "pipeline" / "transformer").glob("*.safetensors")), NAN)
    with pytest.raises(ConfigError, match=name):
        run_task_here(load_task("rl_diffusion"), config)
    assert not (tmp_path / "run" / "hf_ckpt").exists()
