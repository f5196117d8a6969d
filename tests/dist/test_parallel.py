"""Every parallel mode against one plain process: losses, gradient norms and weights of three training steps."""

import functools
from typing import Any

import pytest

from tests.dist.cases import CASES, Outcome, difference, train

TOLERANCE = 1e-5

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"data_parallel_mode": "ddp"}),
    "fsdp1": (2, {"data_parallel_mode": "fsdp1"}),
    "fsdp2": (4, {}),
    "hsdp": (4, {"data_parallel_replicate_size": 2}),
}


@functools.cache
def truth(kind: str, lora: bool = False) -> Outcome:
    return train(kind, lora)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(mode, kind, lora, ranks):
    num_ranks, config = MODES[mode]
    for outcome in ranks.run(num_ranks, functools.partial(train, kind, lora, **config)):
        assert difference(outcome, truth(kind, lora)) < TOLERANCE
