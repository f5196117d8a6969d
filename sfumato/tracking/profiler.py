"""A profiler trace of some steps, for chrome://tracing and Perfetto, with a table of the operations that took most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NUM_ROWS = 40
"""Operations in the table."""

NUM_ALLOCATIONS = 200_000
"""Most allocations in a snapshot of GPU memory."""


class StepProfiler:
    """Records the steps from ``first`` to ``last``, counted like ``step`` in the metrics: 1 is the first.

    Each rank writes ``rankN.json.gz`` (trace), ``rankN.txt`` (table), and with a GPU ``rankN_memory.pickle``
    (allocations, for https://pytorch.org/memory_viz).
    """

    def __init__(self, first: int, last: int, folder: Path, rank: int) -> None:
        """
        Args:
            first, last: steps that are recorded, both included.
            folder: where to; made when there is something to write.
            rank: this process.
        """
        self.first, self.last, self.folder, self.rank = first, last, folder, rank
        self._on_gpu = torch.cuda.is_available()
        self._profile: Any = None

    def after_step(self, step: int) -> bool:
        """Starts or ends the recording between two steps.

        Args:
            step: finished steps.

        Returns:
            Whether files were written now.
        """
        if self._profile is not None and step >= self.last:
            self.close()
            return True
        if self.first <= step + 1 <= self.last and (self._profile is None or step + 1 == self.first):
            self._stop()  # what was recorded before the first step, such as an evaluation, is dropped
            self._start()
        return False

    def close(self) -> None:
        """Writes what has been recorded, when the run ends before the last step."""
        profile = self._stop()
        if profile is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = self.folder / f"rank{self.rank}"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(f"{name}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        profile.export_chrome_trace(f"{name}.json.gz")
        key = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profile.key_averages(group_by_input_shape=True).table(sort_by=key, row_limit=NUM_ROWS)
        Path(f"{name}.txt").write_text(table + "\n", encoding="utf-8")

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=NUM_ALLOCATIONS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _stop(self) -> Any:
        profile, self._profile = self._profile, None
        if profile is not None:
            if self._on_gpu:
                torch.cuda.synchronize()
            profile.stop()
        return profile
