"""Families on several ranks through sfumato's own classes: all of them in one launch for each mode.

The kinds of ``tests.dist.matrix`` are taken apart further; here a family needs no more than its row of ``ROWS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sfumato.algorithms.noise import keyed_normal
from sfumato.config.sections import LoraConfig, TrainConfig
from sfumato.models.diffusion.base import set_output
from sfumato.models.diffusion.load import find_families
from sfumato.models.lora import add_lora
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.parallelize import accumulate
from sfumato.parallel.shards import gather_whole, trainable_parameters
from tests import family_rows, sound_rows
from tests.dist.cases import make_mesh
from tests.dist.ranks import RankPool
from tests.family_rows import wake

ROWS = {
    **family_rows.ROWS,
    **sound_rows.ROWS,
    # what is no square is filled up to the largest number of tokens
    "hidream, wide": replace(family_rows.ROWS["hidream"], size=(16, 24)),
}
TOLERANCE = 2e-5
KANDINSKY = ("kandinsky5", "kandinsky5_image", "kandinsky5_video", "kandinsky5_video_image")
LOOSE = {**dict.fromkeys(KANDINSKY, 1e-3), "krea2": 1e-4}
"""Tolerances of families that round to bfloat16 between layers, where another last bit may become another value, and of
Krea 2, in whose first layers gradients are 1e-8: another last bit of the latents changes them by as much as 6e-5 of the
largest in one process, and ranks by 1.4e-5 on the CPU on which it was measured."""
NO_SEQUENCE = (
    "qwen_image21",
    *KANDINSKY,
    "sana",
    "sana_video",
)
"""Families whose sequence cannot be cut: convolutions, rounding to bfloat16, and in Qwen-Image 2.1 each part of the
sequence sees the parts before it."""
NO_RING = ("ideogram4", "ace_step")
"""Families with masks that differ from query to query, which Ulysses takes."""
NO_TENSOR = ("stable_audio3", *KANDINSKY)
"""Families whose layers cannot be cut: fused matrices, of a number that differs, and rounding to bfloat16."""
QUICK = ("flux2_klein", "krea2", "sana", "ltx2")
"""Families that run always: text in the same sequence and before it, convolutions, two sequences."""
FAMILIES = tuple(
    name
    for name in (
        *("flux2_klein", "flux2_klein_edit", "flux_fill", "lumina2", "cogvideox", "cogvideox_image", "ernie_image"),
        *("ltx2", "ltx23", "ltx2_image", "krea2", "chroma", "ideogram4", "ace_step", "stable_audio3"),
        *("hidream", "hidream, wide", "hunyuan_image", "hunyuan_video15", "hunyuan_video15_image"),
        *NO_SEQUENCE,
    )
    if not ROWS[name].needs or find_spec(ROWS[name].needs)
)
FURTHER = tuple(name for name in FAMILIES if name not in QUICK)
ADAPTED = tuple(name for name in FAMILIES if getattr(ROWS[name], "takes_lora", True))
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel_mode": "ddp"}),
    "fsdp2": (2, {}),
    "tp": (2, {"data_parallel_mode": "ddp", "tensor_parallel_size": 2}),
    "ulysses": (2, {"data_parallel_mode": "ddp", "ulysses_parallel_size": 2}),
    "ring": (2, {"data_parallel_mode": "ddp", "context_parallel_size": 2}),
    "fsdp2, recomputed": (2, {"activation_checkpointing": "full"}),
    "ulysses, recomputed": (2, {"ulysses_parallel_size": 2, "activation_checkpointing": "full"}),
    "fsdp2 x ulysses": (4, {"ulysses_parallel_size": 2}),
    "fsdp2 x ring": (4, {"context_parallel_size": 2}),
    "ulysses x ring": (4, {"data_parallel_mode": "ddp", "ulysses_parallel_size": 2, "context_parallel_size": 2}),
}
"""Ranks and settings of each way to share the work."""
LONGEST_S = 900.0
"""Of two dozen families in one launch, on a machine with other work."""
QUICK_MODES = ("ddp", "fsdp2", "tp", "ulysses")
VIDEO_FRAMES = 5
"""Of videos with sound, whose sound must have a token for each of two ranks."""
PROMPTS = ['write "AB" in red', 'write "C"']


def step_of(name: str, lora: bool, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss, gradient norm and whole gradients of one step with two rows on this process's mesh."""
    row = ROWS[name]
    description = row.describe()
    model = find_families()[description["pipeline"]]
    model = model.with_images() if row.from_images else model
    model = model(model.build(description, seed=0), max_sequence_length=row.tokens)
    wake(model)
    if lora:
        add_lora(model.denoiser, TRAINED_LORA, model.lora_targets, seed=0)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in trainable_parameters(model.denoiser).values():
                parameter.normal_(std=0.2, generator=generator)
    else:
        model.denoiser.requires_grad_(True)
    model.denoiser.train()
    frames = VIDEO_FRAMES if model.makes_video_with_sound else getattr(row, "frames", 1)
    size = (*row.size, frames)
    set_output(model, size, "rollout")
    images = None if not model.takes_image else model.blank_images(len(PROMPTS), *row.size, getattr(row, "sources", 1))
    conditioning = model.encode_prompts(PROMPTS, images=images)
    latents, target = (
        keyed_normal(model.latent_shape(*size), seed, "latent", 0, range(len(PROMPTS))) for seed in (1, 2)
    )
    sigma = torch.tensor([0.9, 0.3])
    mesh, _ = make_mesh(**config)
    model.parallelize(mesh, TrainConfig(output_dir="unused", **config))
    rows = list(mesh.range_of_rank(len(PROMPTS)))
    losses = []
    for index in accumulate(model.denoiser, rows):
        part = slice(index, index + 1)
        velocity = model.predict_velocity(latents[part], sigma[part], conditioning.rows(part))
        loss = (velocity - target[part]).square().mean()
        (loss / len(PROMPTS)).backward()
        losses.append(float(loss.detach()))
    norm = reduce_and_clip(model.denoiser, 1e9, mesh, "step 1")
    outcome = {"norm": torch.tensor(norm), "loss": torch.tensor(mesh.sum(sum(losses), over="data"))}
    for key, parameter in trainable_parameters(model.denoiser).items():
        if parameter.grad is not None:
            outcome[key] = gather_whole(parameter.grad).clone()
    return outcome


def steps_of(names: tuple[str, ...], lora: bool, config: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """``step_of`` for several families, by name."""
    torch.set_num_threads(1)
    return {name: step_of(name, lora, config) for name in names}


TRAINED_LORA = LoraConfig(rank=4, alpha=8)


@dataclass(frozen=True)
class Truth:
    """What one process computes."""

    lora: bool
    steps: dict[str, dict[str, torch.Tensor]]
    """``step_of``'s outcomes by family."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((False, QUICK), id="full"),
        pytest.param((False, FURTHER), id="full, further families", marks=pytest.mark.slow),
        pytest.param((True, ADAPTED), id="lora", marks=pytest.mark.slow),
    ],
)
def truth(request: pytest.FixtureRequest) -> Truth:
    lora, names = request.param
    return Truth(lora, steps_of(names, lora, {}))


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in QUICK_MODES else pytest.mark.slow) for mode in MODES]
)
def test_a_step_equals_that_of_one_process(mode: str, truth: Truth, ranks: RankPool) -> None:
    refused = {
        *(NO_SEQUENCE if "ulysses" in mode or "ring" in mode else ()),
        *(NO_RING if "ring" in mode else ()),
        *(NO_TENSOR if mode == "tp" else ()),
    }
    names = tuple(name for name in truth.steps if name not in refused)
    num_ranks, config = MODES[mode]
    for outcomes in ranks.run(num_ranks, steps_of, names, truth.lora, config, timeout=LONGEST_S):
        for name in names:
            assert outcomes[name].keys() == truth.steps[name].keys(), name
            # a gradient that cancels out, as of Krea 2's attention over layers, is rounded like the terms of its sum
            floor = 0.01 * float(truth.steps[name]["norm"])
            for key, tensor in truth.steps[name].items():
                difference = (outcomes[name][key] - tensor).norm() / tensor.norm().clamp_min(floor)
                assert difference < LOOSE.get(name, TOLERANCE), (name, key, float(difference))


@pytest.mark.parametrize("name", [name for name in NO_SEQUENCE if name in FAMILIES])
def test_a_sequence_that_cannot_be_cut_is_refused(name: str, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: .*give its plan a sequence"):
        ranks.run(2, step_of, name, False, MODES["ulysses"][1])


@pytest.mark.parametrize("name", NO_RING)
def test_masks_that_a_ring_cannot_take_are_refused(name: str, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: .*unknown to a ring"):
        ranks.run(2, step_of, name, False, MODES["ring"][1])


@pytest.mark.parametrize("name", [name for name in NO_TENSOR if name in FAMILIES])
def test_layers_that_cannot_be_cut_are_refused(name: str, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"ConfigError: .*tensor_parallel"):
        ranks.run(2, step_of, name, False, MODES["tp"][1])
