"""Every parallel mode against one plain process: losses, gradient norms and weights of three training steps."""

import functools

import pytest
import torch

from tests.dist.cases import Outcome, difference, train
from tests.dist.matrix import KINDS, MODES, PAGE, PAIRS, page, reason
from tests.dist.ranks import RankError

TOLERANCE = 1e-5


@functools.cache
def truth(kind: str, lora: bool = False, dtype: torch.dtype | None = None) -> Outcome:
    return train(kind, lora, dtype)


LATER = ("flux", "wan", "qwen_image", "z_image")
"""Kinds whose cells are nearly all left to the slow tests."""
FURTHER = (
    "fsdp1, hybrid",
    "tp 4",
    "ring 4",
    "fsdp2 x tp + sequence parallel",
    "fsdp2 x ulysses x ep",
    "fsdp2, reduced every micro-batch",
    "ulysses x ring",
    "fsdp2 x ring",
    "tp x pp",
    "hsdp",
)
"""Modes in which only the dense language model is tested always."""
BASIC = ("fsdp2", "tp", "ulysses", "fsdp2 x tp")
"""Modes in which adapters are tested always."""
COMMON = ("ddp", "fsdp2", "tp", "ulysses", "ring", "pp, 1f1b")
"""Modes in which the first diffusion transformer is tested always."""


def is_slow(mode: str, kind: str, lora: bool) -> bool:
    """Whether a cell is left to the slow tests, since others of its row and column are close to it."""
    if kind in LATER:
        return lora or mode not in ("fsdp2" if kind in ("flux", "wan") else "ulysses x ring", "tp")
    if lora:
        return mode not in BASIC or kind != "dense"
    if kind == "sd3":
        return mode not in COMMON
    return mode in FURTHER and kind != "dense"


CELLS = [
    pytest.param(mode, kind, lora, marks=pytest.mark.slow if is_slow(mode, kind, lora) else ())
    for mode in MODES
    for kind in KINDS
    for lora in (False, True)
    if not (lora and kind in MODES[mode].refused)
]


@pytest.mark.parametrize(("mode", "kind", "lora"), CELLS)
def test_equals_one_process(mode, kind, lora, ranks):
    cell = MODES[mode]
    run = functools.partial(ranks.run, cell.ranks, functools.partial(train, kind, lora, **cell.config))
    if kind in cell.refused:
        with pytest.raises(RankError, match=f"ConfigError: .*{cell.refused[kind]}"):
            run()
        return
    for outcome in run():
        assert difference(outcome, truth(kind, lora)) < TOLERANCE
        assert set(outcome.without_gradient) <= set(truth(kind, lora).without_gradient)
        for name, value in truth(kind, lora).frozen.items():
            assert torch.equal(outcome.frozen[name], value), f"{name} was frozen"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in LATER else ()) for kind in KINDS]
)
def test_bf16_is_as_near_to_float32_as_bf16_of_one_process(kind, lora, ranks):
    exact, plain = truth(kind, lora), truth(kind, lora, torch.bfloat16)
    for outcome in ranks.run(2, functools.partial(train, kind, lora, torch.bfloat16)):
        assert 0 < difference(outcome, exact) < 2 * difference(plain, exact)
        assert outcome.losses[0] == pytest.approx(plain.losses[0], rel=1e-7), "the forward pass is the same"
        assert outcome.losses == pytest.approx(plain.losses, rel=2e-3)
        assert outcome.norms == pytest.approx(plain.norms, rel=4e-2)  # 2.2 % with the bf16 units of another CPU
        assert difference(outcome, plain) < 6e-2


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_are_refused(name):
    assert reason(*PAIRS[name])


def test_the_page_shows_what_is_tested():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m tests.dist.matrix"
