"""The judge of the benchmarks: it takes the time it is told to, for several batches at once, and scores brightness."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sfumato.rewards.base import Sample
from sfumato.rewards.remote import RemoteReward
from tests.tiny import ROOT

LATENCY_S = 0.4


def test_batches_overlap_and_scores_are_brightness() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "judge_latency_server.py", "--latency-s", str(LATENCY_S)]
    process = subprocess.Popen([*command, "--concurrency", "4"], stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        reward = RemoteReward(base_urls=(url,), allow_private=True)
        reward.prepare()
        samples = [Sample(image=np.full((8, 8, 3), 51 * row, np.uint8), prompt="", group_id=0) for row in range(6)]
        started = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            result = list(pool.map(reward.score, [samples] * 4))
        took_s = time.monotonic() - started
        np.testing.assert_allclose(result, [np.linspace(0, 1, 6)] * 4, atol=1e-12)
        assert LATENCY_S <= took_s < 3 * LATENCY_S, "one after the other they would take four times the latency"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and output.startswith("4 requests, 24 samples, ")
    finally:
        process.kill()
