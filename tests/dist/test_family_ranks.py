"""Denoisers on several ranks that are not one transformer of text and latents: Wan's two, from an image, and UNets."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.dist.cases import Outcome, build, difference, make_mesh, train, video_row
from tests.dist.matrix import MODES
from tests.dist.ranks import RankError, RankPool

TOLERANCE = 1e-5
CELLS = {
    "wan_pair": ("ddp", "fsdp2", "tp", "ulysses", "ring"),
    "wan_image": ("fsdp2", "tp", "ulysses", "ring"),
    "unet": ("ddp", "fsdp1", "fsdp2", "tp", "fsdp2 x tp"),
}
SLOW = ("ddp", "fsdp1", "ring", "fsdp2 x tp")


@functools.cache
def truth(kind: str, lora: bool) -> Outcome:
    return train(kind, lora)


@pytest.mark.parametrize(
    ("kind", "mode", "lora"),
    [
        pytest.param(kind, mode, lora, marks=pytest.mark.slow if lora or mode in SLOW or kind == "wan_image" else ())
        for kind, modes in CELLS.items()
        for mode in modes
        for lora in (False, True)
    ],
)
def test_equals_one_process(kind: str, mode: str, lora: bool, ranks: RankPool) -> None:
    for outcome in ranks.run(MODES[mode].ranks, functools.partial(train, kind, lora, **MODES[mode].config)):
        assert difference(outcome, truth(kind, lora)) < TOLERANCE


@pytest.mark.parametrize("kind", CELLS)
def test_recomputed_blocks_equal_one_process(kind: str, ranks: RankPool) -> None:
    config = {"activation_checkpointing": "full"}
    for outcome in ranks.run(2, functools.partial(train, kind, **config)):
        assert difference(outcome, truth(kind, False)) < TOLERANCE


def test_the_rows_belong_to_both_transformers() -> None:
    levels = [float(video_row(index)["sigma"]) for index in range(12)]
    assert {level >= 0.5 for level in levels[:4]} == {True, False}
    assert 0 < sum(level >= 0.5 for level in levels) < len(levels)


def sampled(high: tuple[bool, ...]) -> tuple[torch.Tensor, list[str]]:
    """A velocity without gradients where each rank has a row of one transformer; and which of them ran."""
    from sfumato.models.diffusion import plans
    from sfumato.parallel.parallelize import parallelize

    mesh, config = make_mesh()
    module = build("wan_pair").requires_grad_(False)
    row, ran = video_row(0), []
    for name, part in module.named_children():
        part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    module.mesh = mesh
    module = parallelize(module, mesh, config, plans.WAN_PAIR)
    timestep = torch.tensor([900.0 if high[mesh.rank] else 100.0])
    with torch.no_grad():
        velocity = module(hidden_states=row["latents"], timestep=timestep, encoder_hidden_states=row["text"])[0]
    return velocity, ran


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        ((True, True), ["transformer"]),
        ((False, False), ["transformer_2"]),
        ((True, False), ["transformer", "transformer_2"]),
    ],
)
def test_ranks_run_a_transformer_together_or_not_at_all(
    high: tuple[bool, bool], expected: list[str], ranks: RankPool
) -> None:
    for rank, (velocity, ran) in enumerate(ranks.run(2, sampled, high)):
        assert ran == expected
        torch.testing.assert_close(velocity, sampled((high[rank],))[0])


def drawn_alone(counts: tuple[int, ...]) -> list[str]:
    """Which transformers ran where ranks with whole weights make different numbers of forward passes."""
    mesh, _ = make_mesh(data_parallel_mode="ddp")
    module, ran, row = build("wan_pair"), [], video_row(0)
    for name, part in module.named_children():
        part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    module.mesh = mesh
    with torch.no_grad():
        for _ in range(counts[mesh.rank]):
            module(hidden_states=row["latents"], timestep=torch.tensor([900.0]), encoder_hidden_states=row["text"])
    mesh.barrier()
    return ran


def test_ranks_with_whole_weights_sample_by_themselves(ranks: RankPool) -> None:
    assert ranks.run(2, drawn_alone, (2, 1)) == [["transformer"] * 2, ["transformer"]]


def test_attention_of_a_unet_is_not_shared(ranks: RankPool) -> None:
    config: dict[str, Any] = MODES["ulysses"].config
    with pytest.raises(RankError, match="ConfigError: UNet2DConditionModel is no transformers model"):
        ranks.run(2, functools.partial(train, "unet", **config))
