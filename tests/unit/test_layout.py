"""The arithmetic of axes: who shares what with whom, for any number of processes, without starting any."""

import itertools

import pytest

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.layout import AXES, VIEWS, Layout


def layout(world_size: int, **config) -> Layout:
    return Layout.resolve(ParallelConfig(**config), world_size)


def groups(of: Layout, axis: str) -> list[list[int]]:
    """The ranks of each group of an axis or view, in its order."""
    axes = VIEWS.get(axis, (axis,))
    results: dict[tuple[int, ...], list[int]] = {}
    for rank in range(of.size):
        others = tuple(of.rank_in(axis, rank) for axis in AXES if axis not in axes)
        results.setdefault(others, []).append(rank)
    return [sorted(value, key=lambda rank: of.rank_in(axis, rank)) for value in results.values()]


def test_what_is_left_over_is_data_parallel():
    result = layout(1024, tensor_parallel_size=8, pipeline_parallel_size=4, ulysses_parallel_size=2)
    assert (result.data, result.dp_shard, result.dp_replicate, result.size) == (16, 16, 1, 1024)
    assert layout(64, data_parallel_replicate_size=4).dp_shard == 16
    assert layout(8, data_parallel_mode="ddp").dp_replicate == 8


def test_neighbours_are_as_documented():
    result = layout(16, tensor_parallel_size=2, ulysses_parallel_size=2, pipeline_parallel_size=2)
    assert groups(result, "tp")[:2] == [[0, 1], [2, 3]]
    assert groups(result, "ulysses")[:2] == [[0, 2], [1, 3]]
    assert groups(result, "dp_shard")[0] == [0, 4]
    assert groups(result, "pp")[0] == [0, 8]
    assert groups(result, "fsdp")[0] == [0, 2, 4, 6]
    assert groups(result, "copies")[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("axis", [*AXES, *VIEWS])
def test_groups_partition_the_ranks(axis):
    result = layout(
        96, tensor_parallel_size=2, context_parallel_size=2, ulysses_parallel_size=3, data_parallel_replicate_size=2
    )
    parts = groups(result, axis)
    assert sorted(itertools.chain(*parts)) == list(range(96))
    assert {len(part) for part in parts} == {result.size_of(axis)}
    for part in parts:
        assert [result.rank_in(axis, rank) for rank in part] == list(range(len(part)))


def test_experts_lie_inside_a_replica():
    result = layout(16, data_parallel_replicate_size=2, ulysses_parallel_size=2, expert_parallel_size=4)
    assert (result.fsdp, result.ep, result.efsdp) == (8, 4, 2)
    places = [(result.rank_in("efsdp", rank), result.rank_in("ep", rank)) for rank in range(8)]
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("world_size", "config", "message"),
    [
        (6, {"tensor_parallel_size": 4}, "train.tensor_parallel_size 4 = 4 does not divide 6 processes: 6 / 4 = 1.5"),
        (
            4,
            {"ulysses_parallel_size": 2, "pipeline_parallel_size": 4},
            "train.pipeline_parallel_size 4 x train.ulysses_parallel_size 2 = 8 does not divide 4",
        ),
        (6, {"data_parallel_replicate_size": 4}, "data_parallel_replicate_size 4 does not divide the 6 data-parallel"),
        (4, {"expert_parallel_size": 3}, "expert_parallel_size 3 does not divide the 4 ranks of a replica"),
        (2, {"sequence_parallel": True}, "set train.tensor_parallel_size above 1"),
        (2, {"data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}, "remove one of them"),
        (2, {"data_parallel_mode": "fsdp1", "tensor_parallel_size": 2}, "take fsdp2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(world_size, config, message):
    with pytest.raises(ConfigError) as error:
        layout(world_size, **config)
    assert message in str(error.value)
