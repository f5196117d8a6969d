"""Groups are delivered and asked for while an iteration is under way, by processes on Ray."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.config.runtime import PoolConfig
from sfumato.rewards.scoring.scores import Scores
from sfumato.runtime.cluster.cluster import Cluster
from sfumato.runtime.roles import Roles
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests import fused_engine
from tests.ray import role_functions
from tests.ray.test_ray_roles import TRAIN, TWO
from tests.unit.test_stream import Request, requests_of, scores_of
from tests.unit.test_stream_groups import drawn_by, until_enough


def generate(state: Any, requests: list[Request], iteration: int, version: int) -> tuple:
    assert state.version == version and len({request.group_id for request in requests}) == 1
    ids = [request.sample_id for request in requests]
    return ("kept", iteration, version, ids), ids


def score(state: Any, seen: list[int]) -> Scores:
    return scores_of(seen)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_more_groups_are_drawn_by_the_version_of_their_iteration(cluster: Cluster, staleness: int) -> None:
    actor = cluster.group("actor", fused_engine.Actor, None, TRAIN, PoolConfig(processes=1, cpus=0.5))
    sampler = cluster.group("sampler", fused_engine.Sampler, "", TRAIN, TWO)
    scorer = cluster.pool("scorer", role_functions.build, "scorers", TRAIN, TWO)
    cluster.wait_ready()
    weights = WeightSync(actor, sampler, timeout_s=60.0, rescoring=Rescoring(fused_engine.TOKENS, tolerance=0.01))
    shown: list = []
    stream = RolloutStream(
        Roles(actor=actor, sampler=sampler, scorer=scorer, weights=weights, driver=cluster),
        requests_of,
        generate,
        score,
        total_steps=3,
        micro_batch_size=1,
        max_staleness=staleness,
        more_groups=lambda *args: until_enough(*args, shown),
    )
    groups = [group for group in range(6) for _ in range(2)]
    assert [drawn[:3] for drawn in drawn_by(stream)] == [
        (step, groups, [max(step - staleness, 0)] * 12) for step in range(3)
    ]
    assert [(len(entry[1]), entry[2]) for entry in shown] == [(1, 3), (2, 4), (3, 5), (4, 5), (5, 5), (6, 6)] * 3
    for role in (sampler, scorer, actor):
        role.close()
