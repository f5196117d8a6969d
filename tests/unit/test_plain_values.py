"""What ranks exchange: any plain value arrives as it was, and nothing that acts."""

import collections
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.parallel.plain_values import from_bytes, to_bytes


@dataclass(frozen=True)
class Record:
    name: str
    values: np.ndarray


Pair = collections.namedtuple("Pair", "left right")


def test_plain_values_arrive_as_they_were():
    values = [None, True, 2**70, 0.1, float("inf"), "é", b"\0", (1, [2]), {3: {4}}, frozenset({5}), Pair(1, "b"),
              torch.float32, torch.Size([2, 3]), np.float32(1.5), collections.Counter("aab"), Path("/a/b"), slice(1, 2),
              range(3)]  # fmt: skip
    arrived = from_bytes(to_bytes(values))
    assert arrived == values and [type(value) for value in arrived] == [type(value) for value in values]
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    record = from_bytes(to_bytes(Record("x", array)))
    assert record.name == "x" and np.array_equal(record.values, array) and record.values.dtype == np.int16
    for tensor in (
        torch.randn(3, 2),
        torch.ones(4, dtype=torch.bfloat16)[1:],
        torch.tensor(3),
        torch.nn.Parameter(torch.ones(2)),
    ):
        again = from_bytes(to_bytes(tensor))
        assert torch.equal(again, tensor) and again.dtype == tensor.dtype and type(again) is type(tensor)


class Bomb:
    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize(
    "value",
    [
        Bomb(os.system, "touch /tmp/bomb"),
        Bomb(eval, "1"),
        Bomb(getattr, "", "x"),
        Bomb(__import__, "this"),
        Bomb(torch.load, "x"),
        Bomb(np.load, "x"),
        Bomb(pickle.loads, b""),
        [{"a": (Bomb(exec, "1"),)}],
    ],
)
def test_what_acts_when_it_is_made_is_refused(value):
    with pytest.raises(ConfigError, match="which is no plain value"):
        from_bytes(to_bytes(value))


def test_names_of_modules_that_are_not_loaded_are_not_imported():
    for name in (b"this\nc", b"antigravity\nfly", b"builtins\neval", b"os\nsystem", b"builtins\nobject.__subclasses__"):
        with pytest.raises(ConfigError, match="no plain value"):
            from_bytes(b"c" + name + b"\n.")
