"""Random bits that are a function of a key and a counter: splitmix64 (Steele and others, OOPSLA 2014).

Integer arithmetic alone, so a CPU and a GPU make the same bits, in whatever parts a tensor is computed.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

# Constants above 2^63 as negative int64; products wrap around.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix(state: Tensor) -> Tensor:
    """The finaliser of splitmix64. Its shifts are logical: the sign bits that int64 shifts in are masked off."""
    state = (state ^ ((state >> 30) & (2**34 - 1))) * FIRST
    state = (state ^ ((state >> 27) & (2**37 - 1))) * SECOND
    return state ^ ((state >> 31) & (2**33 - 1))


def key_of(text: str) -> int:
    """A key of 64 bits, as a signed integer, for a text that names what is drawn."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
