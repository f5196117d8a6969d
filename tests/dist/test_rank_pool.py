"""The processes that the tests of this folder run in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import RankError, RankPool


def crash(marker: str, times: int) -> float:
    """Rank 1 dies of a signal the first few times."""
    file = Path(marker)
    seen = int(file.read_text()) if file.exists() else 0
    if dist.get_rank() == 1 and seen < times:
        file.write_text(str(seen + 1))
        os.kill(os.getpid(), signal.SIGSEGV)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.slow
def test_a_crash_in_native_code_is_said_and_forgiven_once(tmp_path: Path) -> None:
    pool = RankPool(2)
    with pytest.warns(UserWarning, match="signal 11"):
        assert pool.run(2, crash, str(tmp_path / "once"), 1) == [2.0, 2.0]
    with pytest.warns(UserWarning, match="signal 11"), pytest.raises(RankError):
        pool.run(2, crash, str(tmp_path / "twice"), 2)
    assert pool.run(2, crash, str(tmp_path / "never"), 0) == [2.0, 2.0]
    pool.close()
