"""Weights reach an engine of another role on Ray, whole, in buckets, while it draws; wrong ones are noticed."""

from __future__ import annotations

import pytest
import torch

from sfumato.config.runtime import PoolConfig
from sfumato.errors import WeightSyncError
from sfumato.runtime.cluster.cluster import Cluster
from sfumato.runtime.weight_sync.rescoring import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests import fused_engine
from tests.ray.test_ray_roles import TRAIN


@pytest.mark.slow
def test_an_engine_on_ray_is_sent_weights_and_verified_by_rescoring(cluster: Cluster) -> None:
    one = PoolConfig(processes=1, cpus=0.5)
    actor = cluster.group("actor", fused_engine.Actor, None, TRAIN, one)
    sampler = cluster.group("sampler", fused_engine.Sampler, "", TRAIN, one)
    cluster.wait_ready()
    rescoring = Rescoring(fused_engine.TOKENS, tolerance=0.01)
    sync = WeightSync(actor, sampler, bucket_mb=1e-4, timeout_s=60.0, rescoring=rescoring)
    for version in (1, 2):
        assert sync.publish(version).transport == "broadcast"
        found = sampler.call(fused_engine.rescored).result()
        torch.testing.assert_close(found, fused_engine.expected(version), rtol=0, atol=0.01)
    sampler.call(fused_engine.break_engine, "swaps").result()
    with pytest.raises(WeightSyncError, match=r"version 3: the log-probs of fixed tokens .* differ"):
        sync.publish(3)
    sync.reconnect()
    for role in (sampler, actor):
        role.close()
