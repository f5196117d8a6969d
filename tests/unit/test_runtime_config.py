"""Where roles live, in the configuration: what goes together, and what is refused by which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sfumato.config.diffusion_rl import ForwardRLConfig, TrajectoryRLConfig
from sfumato.config.load import parse_config
from sfumato.errors import ConfigError
from tests.tiny import tiny_rl_config, write_config

RAY = ["--runtime.backend", "ray"]
APART = ["--rollout.hybrid_engine", "false"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    return write_config(tiny_rl_config(folder), folder / "rl.yaml")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def parse(path: Path, *overrides: str) -> TrajectoryRLConfig:
    return parse_config(TrajectoryRLConfig, [str(path), *overrides])


@pytest.mark.parametrize(("strategy", "staleness"), [("sync", 0), ("one-step-off", 1), ("fully-async", 4)])
def test_strategies_preset_the_staleness(path: Path, strategy: str, staleness: int) -> None:
    assert parse(path, *APART, "--rollout.async_strategy", strategy).rollout.staleness == staleness


def test_the_staleness_of_fully_async_can_be_given(path: Path) -> None:
    arguments = ["--rollout.async_strategy", "fully-async", "--rollout.max_staleness", "2"]
    assert parse(path, *APART, *arguments).rollout.staleness == 2


def test_a_sampler_may_be_cut_otherwise_than_the_actor(path: Path) -> None:
    config = parse(path, *RAY, *APART, "--runtime.pools.sampler", "{processes: 2, parallel: {tensor_parallel_size: 2}}")
    cut = config.runtime.sampler_train(config.train)
    assert (cut.tensor_parallel_size, config.train.tensor_parallel_size, cut.lr) == (2, 1, config.train.lr)
    assert parse(path, *APART).runtime.sampler_train(config.train) is config.train


HALVES = ["--runtime.pools.actor", "{processes: 2, gpus: 0.5}", "--runtime.pools.sampler", "{processes: 2, gpus: 0.5}"]


def test_actor_and_sampler_share_gpus(path: Path) -> None:
    assert parse(path, *RAY, *APART, *HALVES).runtime.pools.shared_gpus
    for gpus, processes in ((0, 2), (0.6, 2), (1, 2), (0.5, 1)):
        other = [
            "--runtime.pools.actor",
            "{gpus: 0.5}",
            "--runtime.pools.sampler",
            f"{{processes: {processes}, gpus: {gpus}}}",
        ]
        if 0 < gpus < 1 < processes:
            with pytest.raises(
                ConfigError, match=r"pools\.sampler: several of its 2 processes .* or let actor and sampler"
            ):
                parse(path, *RAY, *APART, *other)
        else:
            assert parse(path, *RAY, *APART, *other).runtime.pools.shared_gpus == (gpus == 0.5)


REFUSED = [
    ([*RAY, *APART, *HALVES, "--runtime.weight_sync", "broadcast"], ["runtime.weight_sync", "leave it out"]),
    ([*RAY, "--runtime.pools.actor", "{processes: 2, gpus: 0.5}"], ["runtime.pools.actor", "come onto one GPU"]),
    (["--rollout.async_strategy", "one-step-off"], ["rollout.async_strategy", "hybrid_engine to false"]),
    ([*APART, "--rollout.max_staleness", "2"], ["rollout.max_staleness", "fully-async"]),
    ([*APART, "--rollout.async_strategy", "one-step-off", "--rollout.max_staleness", "2"], ["leave max_staleness out"]),
    (["--runtime.pools.actor.processes", "2"], ["runtime.pools", "runtime.backend to ray"]),
    (["--runtime.address", "auto"], ["runtime.address", "runtime.backend to ray"]),
    ([*RAY, "--runtime.pools.sampler.processes", "2"], ["runtime.pools.sampler", "hybrid_engine"]),
    ([*RAY, "--runtime.pools.scorer.parallel", "{tensor_parallel_size: 2}"], ["runtime.pools.scorer.parallel"]),
    ([*RAY, *APART, "--runtime.pools.sampler.parallel", "{tensor_paralel_size: 2}"], ["tensor_paralel_size"]),
    (
        [*RAY, *APART, "--runtime.pools.sampler", "{processes: 3, parallel: {tensor_parallel_size: 2}}"],
        ["runtime.pools.sampler.processes 3", "2 processes that share a sample"],
    ),
    ([*RAY, *APART, "--runtime.pools.sampler.processes", "8"], ["rollout.num_prompts 4", "8 data-parallel"]),
    ([*RAY, *APART, "--runtime.pools.sampler.processes", "3"], ["rollout.num_prompts 4", "data_parallel_mode: ddp"]),
    ([*RAY, "--runtime.pools.actor.processes", "5"], ["num_prompts", "5 data-parallel processes"]),
    (
        [*APART, "--rollout.async_strategy", "one-step-off", "--runtime.offload_idle", "true"],
        ["runtime.offload_idle", "rollout.async_strategy one-step-off"],
    ),
    ([*RAY, "--runtime.pool.actor.processes", "5"], ["runtime.pool", "did you mean 'pools'"]),
]


@pytest.mark.parametrize(("overrides", "names"), REFUSED, ids=lambda value: str(value)[:70])
def test_what_does_not_go_together_is_refused_by_name(path: Path, overrides: list[str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(path, *overrides)
    for name in names:
        assert name in str(caught.value)


def test_roles_on_ray_are_not_started_by_torchrun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="not with torchrun"):
        parse(path, *RAY)


def test_corrections_of_older_samples_need_probabilities(tmp_path: Path) -> None:
    described = tiny_rl_config(tmp_path) | {"algorithm": {"recipe": "diffusion_nft"}}
    nft = write_config(described, tmp_path / "nft.yaml")
    parse_config(ForwardRLConfig, [str(nft)])
    with pytest.raises(ConfigError, match=r"algorithm\.off_policy: unknown key"):
        parse_config(ForwardRLConfig, [str(nft), "--algorithm.off_policy.type", "decoupled"])
