"""Counters of a reward server in the text format of Prometheus."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Histogram:
    """How many observations were at most so many seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one."""
        # the first bucket whose bound is not exceeded; ``lines`` adds them up, as Prometheus counts
        self.counts[sum(seconds > bound for bound in BUCKETS_S)] += 1
        self.sum_s += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The samples of a metric; ``labels`` such as ``reward="ocr"`` may be empty."""
        more = f"{labels}," if labels else ""
        braces = f"{{{labels}}}" if labels else ""
        for bound, count in zip([*BUCKETS_S, "+Inf"], itertools.accumulate(self.counts), strict=True):
            yield f'{name}_bucket{{{more}le="{bound}"}} {count}'
        yield f"{name}_sum{braces} {self.sum_s:.6f}"
        yield f"{name}_count{braces} {sum(self.counts)}"


class ServerMetrics:
    """Counters of a server since its start; used by its event loop alone.

    Args:
        labels: the rewards.
    """

    def __init__(self, labels: list[str]) -> None:
        self.requests: Counter[int] = Counter()
        """Answers to POST /score by status."""
        self.request_s = Histogram()
        self.samples: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.call_s = {label: Histogram() for label in labels}
        self.bytes_received = 0

    def count_request(self, status: int, seconds: float) -> None:
        """An answer to POST /score."""
        self.requests[status] += 1
        self.request_s.observe(seconds)

    def count_call(self, label: str, reasons: list[str], seconds: float) -> None:
        """A batch that a reward has scored: why each sample failed, "" where it did not."""
        self.samples[label] += len(reasons)
        self.failures[label] += sum(map(bool, reasons))
        self.call_s[label].observe(seconds)

    def text(self, queue_length: int) -> str:
        """All of it as GET /metrics shows it."""
        return "\n".join([*self._render_lines(queue_length), ""])

    def _render_lines(self, queue_length: int) -> Iterator[str]:
        yield "# TYPE sfumato_requests_total counter"
        for status, count in sorted(self.requests.items()):
            yield f'sfumato_requests_total{{status="{status}"}} {count}'
        for name, counts in (("samples", self.samples), ("failures", self.failures)):
            yield f"# TYPE sfumato_{name}_total counter"
            for label in self.call_s:
                yield f"sfumato_{name}_total{{reward={_quote_label(label)}}} {counts[label]}"
        yield "# TYPE sfumato_received_bytes_total counter"
        yield f"sfumato_received_bytes_total {self.bytes_received}"
        yield "# TYPE sfumato_queue_length gauge"
        yield f"sfumato_queue_length {queue_length}"
        yield "# TYPE sfumato_request_seconds histogram"
        yield from self.request_s.lines("sfumato_request_seconds", "")
        yield "# TYPE sfumato_call_seconds histogram"
        for label, histogram in self.call_s.items():
            yield from histogram.lines("sfumato_call_seconds", f"reward={_quote_label(label)}")


def _quote_label(label: str) -> str:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
