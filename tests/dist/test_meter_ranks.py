"""Rates over several ranks."""

import torch

from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.meters import Meter


def rates(layout: Layout) -> dict[str, float]:
    mesh = Mesh(layout, torch.device("cpu"), torch.distributed.get_rank())
    meter = Meter(mesh, peak_flops=100.0)
    meter.count(tokens=10 * (mesh.data_rank + 1), flops=0.0 if mesh.data_rank else 800.0)
    return meter.rates(2.0)


def test_samples_of_data_parallel_ranks_are_added_and_shared_ones_counted_once(ranks):
    result = ranks.run(4, rates, Layout(dp_shard=2, tp=2))
    assert result == [result[0]] * 4
    assert result[0] == {
        "throughput/tokens_per_s": 15,
        "throughput/tokens_per_s_per_device": 3.75,
        "throughput/flops_per_s": 400,
        "throughput/mfu": 1.0,
    }
