"""The probe of a starting run: whether rows depend on their batch, and what the self-check then asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config, merge
from sfumato.errors import SelfCheckError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.parallel import memory
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.diffusion import trajectories
from sfumato.rollout.diffusion.policy import build_policy
from sfumato.rollout.diffusion.self_check import RowProbe, batch_sizes, compare_rows, velocity_distances
from sfumato.rollout.diffusion.trajectories import Trajectories, sampled_by_other_graphs
from tests.role_runs import SEPARATE
from tests.rows import ROUNDING
from tests.tiny import load_task, run_task_here, run_task_process, tiny_rl_config, write_config, write_tiny_pipeline
from tests.tiny_families import tiny_flux_schnell

pytestmark = pytest.mark.exact
ALONE = Mesh(Layout(), torch.device("cpu"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("model") / "pipeline")


@pytest.fixture(autouse=True)
def one_pipeline_for_all(tmp_path: Path, pipeline: Path) -> None:
    (tmp_path / "pipeline").symlink_to(pipeline)


def config_with(tmp_path: Path, **changes: Any) -> TrajectoryRLConfig:
    return load_config(TrajectoryRLConfig, overrides=tiny_rl_config(tmp_path, **changes))


def model_of(config: TrajectoryRLConfig) -> DiffusionModel:
    return build_policy(config, ALONE, print)


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_guidance_of_a_model_that_diffusers_draws_without_is_told(tmp_path: Path, scale: float) -> None:
    schnell = write_tiny_pipeline(tmp_path / "schnell", described=tiny_flux_schnell())
    config = config_with(tmp_path, model={"model_path": str(schnell)}, rollout={"guidance_scale": scale})
    said: list[str] = []
    build_policy(config, ALONE, said.append)
    assert [line for line in said if "guidance" in line] == (
        ["rollout.guidance_scale is 4.5; diffusers draws this FluxPipeline without guidance: 1"] * (scale > 1)
    )


def depend_on_the_batch(model: DiffusionModel, name: str, amount: float) -> None:
    """A layer whose rows are another sum in every size of batch, as kernels do that are chosen by it."""
    layer = model.denoiser.get_submodule(name)
    layer.register_forward_hook(lambda _module, _given, output: output + amount * len(output))


def test_the_sizes_are_those_of_the_run(tmp_path: Path) -> None:
    config = config_with(tmp_path)  # 4 prompts x 4, micro-batches of 8; replays of 4 and of 1 sample x 2 steps
    assert batch_sizes(config, 1) == ([8], [2, 8])
    assert batch_sizes(config, 3) == ([4, 8], [2, 8])
    assert batch_sizes(config_with(tmp_path, rollout={"micro_batch_size": 6}), 1) == ([4, 6], [2, 8])


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_rows_of_a_real_model_are_independent(tmp_path: Path, guidance_scale: float) -> None:
    config = config_with(tmp_path, rollout={"guidance_scale": guidance_scale})
    result = compare_rows(model_of(config), config, ALONE)
    assert set(result.differences) == {2, 8} and max(result.differences.values()) <= ROUNDING
    assert result.is_exact is (max(result.differences.values()) == 0.0) and (result.is_exact or ROUNDING)


def test_a_layer_whose_rows_depend_on_the_batch_is_named(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    model = model_of(config)
    # the first that computes: where the CPU's own kernels make rows differ, none does before it
    depend_on_the_batch(model, "time_text_embed.timestep_embedder.linear_1", 1e-4)
    before = torch.get_rng_state()
    result = compare_rows(model, config, ALONE)
    assert torch.equal(torch.get_rng_state(), before), "the numbers of the run are those without a probe"
    assert result.is_exact is False and result.differences[2] > 0
    assert result.layer == "time_text_embed.timestep_embedder.linear_1 (Linear)" and result.layer in result.message
    assert result.environment["row_probe"]["rows_independent_of_batch"] is False
    hooks = [forward_hook for module in model.denoiser.modules() for forward_hook in module._forward_hooks]
    assert len(hooks) == 1, "of the probe none is left"


def test_what_the_self_check_asks_for() -> None:
    exact = RowProbe({3: 0.0, 8: 0.0, 12: 2e-7}, sampled=(8,))
    assert exact.bound(8, 1e-5, torch.float32) == exact.bound(3, 1e-5, torch.bfloat16) == 0.0
    for rows in (12, 7):  # rows depend on this size, or it was not looked at
        assert exact.bound(rows, 1e-3, torch.float32) == pytest.approx(3.05e-5, rel=1e-2)
        assert exact.bound(rows, 1e-5, torch.float32) == 1e-5, "never more than a tenth of the clip range"
        assert exact.bound(rows, 1e-5, torch.bfloat16) == 1e-5
    assert RowProbe({3: 0.0, 8: 1e-7}, sampled=(8,)).bound(3, 1e-3, torch.float32) > 0
    assert RowProbe(reason="two transformers").bound(8, 1e-4, torch.float32) == 1e-4 and not RowProbe().message
    assert exact.largest_distance is None
    assert RowProbe(rounding=0.01).largest_distance == pytest.approx(0.02)
    assert RowProbe(rounding=0.0).largest_distance == pytest.approx(7.6e-6, rel=1e-2)


def test_where_nothing_can_be_compared_the_reason_is_told(tmp_path: Path) -> None:
    config = config_with(tmp_path, **SEPARATE)
    result = compare_rows(model_of(config), config, ALONE).environment["row_probe"]
    assert result == {"rows_independent_of_batch": None, "reason": "another process samples"}


def compiled_by(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Compiled blocks are the plain ones, whose outputs are off by a relative error in a direction of their own; an
    actual compiler takes minutes."""
    monkeypatch.setattr(memory, "_compiler_works", lambda *_: True)
    stance = torch.compiler.set_stance
    uncompiled = [False]

    @contextmanager
    def taken(name: str) -> Iterator[None]:
        uncompiled[0] = name == "force_eager"
        with stance(name):
            yield
        uncompiled[0] = False

    def compile_block(run: Callable[..., Any], backend: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if uncompiled[0]:
                return result
            off = error * (2.0 if torch.is_grad_enabled() else 1.0)  # graphs with gradients round otherwise
            return tuple(None if part is None else part * (1 + off * part.detach().cos()) for part in result)

        return call

    monkeypatch.setattr(torch.compiler, "set_stance", taken)
    monkeypatch.setattr(memory, "_compile", compile_block)


def test_what_compiling_changes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(tmp_path, train={"compile": True}, rollout={"guidance_scale": 3.0})
    probes = {}
    for error in (1e-6, 1e-3):
        with monkeypatch.context() as patch:
            compiled_by(patch, error)
            model = model_of(config)
            model.parallelize(ALONE, config.train)
            probes[error] = compare_rows(model, config, ALONE)
    rounding = {error: probe.rounding for error, probe in probes.items()}
    assert 1e-7 < rounding[1e-6] < 1e-4 and 300 < rounding[1e-3] / rounding[1e-6] < 3000
    entry = probes[1e-3].environment["row_probe"]
    assert entry["compiled_velocities_differ_by"] == rounding[1e-3] and entry["rows_independent_of_batch"] is None
    assert "compiled blocks change velocities by" in probes[1e-3].message and "decoupled" not in probes[1e-3].message


def test_a_model_that_still_gives_zero_is_as_far_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(tmp_path, train={"compile": True})
    compiled_by(monkeypatch, 1e-3)
    model = model_of(config)
    for parameter in model.denoiser.proj_out.parameters():
        torch.nn.init.zeros_(parameter)
    model.parallelize(ALONE, config.train)
    assert compare_rows(model, config, ALONE).rounding == 0.0
    torch.nn.init.constant_(next(model.denoiser.proj_out.parameters()), torch.nan)
    with pytest.raises(SelfCheckError, match="velocity is not finite before anything was trained"):
        compare_rows(model, config, ALONE)


def test_compiled_blocks_that_compute_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by(monkeypatch, 3.0)
    with pytest.raises(SelfCheckError, match=r"compute something else .* set train.compile false"):
        run_task_here("rl_diffusion", tiny_rl_config(tmp_path, train={"max_steps": 1, "compile": True}))


@pytest.mark.parametrize(
    ("changes", "versions", "others"),
    [
        ({"train": {"compile": True}}, [3, 3], True),
        ({"train": {"compile": True}}, [3, 2], False),  # of older weights: the ratio is to those
        ({"train": {"compile": False}}, [3, 3], False),
        (merge(SEPARATE, {"train": {"compile": True}}), [3, 3], True),
        (
            merge(SEPARATE, {"train": {"compile": True}, "algorithm": {"off_policy": {"type": "decoupled"}}}),
            [3, 3],
            False,  # the correction takes the proximal policy by itself
        ),
    ],
)
def test_whose_graphs_have_drawn(tmp_path: Path, changes: dict[str, Any], versions: list[int], others: bool) -> None:
    batch = SimpleNamespace(versions=versions)
    assert sampled_by_other_graphs(batch, config_with(tmp_path, **changes), ALONE, 3, "cpu") is others


@pytest.mark.parametrize("dynamics", ["sde", "cps", "dance", "wan", "ddim"])
def test_the_distance_of_velocities_is_found_from_means(tmp_path: Path, dynamics: str) -> None:
    config = config_with(tmp_path, algorithm={"dynamics": {"type": dynamics}, "window": {"type": "all"}})
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.linspace(1.0, 0.0, 5)
    x, v = (torch.randn(2, 3, 4, 8, 8, generator=generator) for _ in range(2))
    sampled = Trajectories([0, 1, 2], sigmas, x, x, x, torch.zeros(2, 3))
    step = config.algorithm.dynamics.step(v.flatten(0, 1), *sampled.levels())
    sampled = replace(sampled, means=step.mean.unflatten(0, (2, 3)))
    off = v.flatten(0, 1) * (1 + 0.02 * torch.tensor([0, 1, 2, 3, 4, 5.0]).reshape(6, 1, 1, 1))
    new = config.algorithm.dynamics.step(off, *sampled.levels())
    distances = velocity_distances(new, sampled, config.algorithm.dynamics)
    expected = [0.02 * row / (1 + 0.02 * row) for row in range(6)]
    torch.testing.assert_close(distances, torch.tensor(expected), atol=1e-5, rtol=1e-4)
    still = config.algorithm.dynamics.step(0 * off, *sampled.levels())
    of_zero = replace(sampled, means=still.mean.unflatten(0, (2, 3)))
    assert not velocity_distances(still, of_zero, config.algorithm.dynamics).any()


def test_where_nothing_is_replayed_nothing_is_probed(tmp_path: Path) -> None:
    config = tiny_rl_config(tmp_path, train={"max_steps": 1}) | {"algorithm": {"recipe": "diffusion_nft"}}
    run = run_task_here("rl_diffusion_forward", config)
    assert "row_probe" not in json.loads((run / "environment.json").read_text())


def test_a_run_whose_rows_are_independent_must_replay_exactly(tmp_path: Path) -> None:
    if ROUNDING:
        pytest.skip("rows depend on their batch on this CPU")
    task, config = load_task("rl_diffusion"), tiny_rl_config(tmp_path, train={"max_steps": 1})
    replay = task.replay_trajectories

    def nudged(model: DiffusionModel, sampled: Any, *arguments: Any) -> Any:
        step = replay(model, sampled, *arguments)
        object.__setattr__(step, "mean", step.mean * (1 + 2e-7))
        return step

    task.replay_trajectories = nudged
    with pytest.raises(SelfCheckError, match=r"allowed: 0\.00e\+00"):
        run_task_here(task, config)
    result = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert result["row_probe"] == {"rows_independent_of_batch": True, "differences": {"2 rows": 0.0, "8 rows": 0.0}}
    assert result["cpu_kernels"]["MKL_CBWR"]


@pytest.mark.parametrize(
    ("error", "wrong", "updates"),
    [(1e-4, 0.0, 1), (1e-4, 0.1, 1), pytest.param(1e-4, 0.0, 2, marks=pytest.mark.slow)],
)
def test_compiled_graphs_may_differ_by_rounding_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, wrong: float, updates: int
) -> None:
    compiled_by(monkeypatch, error)
    train = {"max_steps": 1, "compile": True, "global_batch_size": 16 // updates}
    task, config = load_task("rl_diffusion"), tiny_rl_config(tmp_path, train=train)
    replay, passes = trajectories.replay_trajectories, []

    def counted(model: DiffusionModel, sampled: Any, *arguments: Any) -> Any:
        step = replay(model, sampled, *arguments)
        if torch.is_grad_enabled():
            passes.append(len(step.mean))
            if wrong:  # a noise level that is off
                object.__setattr__(sampled, "sigmas", sampled.sigmas * (1 - wrong))
                step = replay(model, sampled, *arguments)
        return step

    monkeypatch.setattr(task, "replay_trajectories", counted)
    monkeypatch.setattr(trajectories, "replay_trajectories", counted)
    if wrong:
        with pytest.raises(SelfCheckError, match=r"differ at denoising step \d by .* of the velocity \(allowed: "):
            run_task_here(task, config)
        return
    run = run_task_here(task, config)
    (line,) = [line for text in (run / "metrics.jsonl").read_text().splitlines() if (line := json.loads(text))["step"]]
    assert line["ratio/replay_error"] > 0
    assert len(passes) == (4 if updates == 1 else 6), "one for each micro-batch, and another for the second update's"
    if updates == 1:
        assert line["ratio/mean"] == 1.0, "the ratio is taken to what the same graph says"


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the setting is that of MKL")
def test_on_a_cpu_without_avx2_a_run_says_that_its_rows_depend_on_the_batch(tmp_path: Path) -> None:
    config = write_config(tiny_rl_config(tmp_path, train={"max_steps": 1}), tmp_path / "run.yaml")
    done = run_task_process("rl_diffusion", config, env={"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"})
    assert done.returncode == 0, done.output
    result = json.loads((done.output_dir / "environment.json").read_text())["row_probe"]
    assert result["rows_independent_of_batch"] is False and result["layer"].endswith("(Linear)")
    assert "replay and rollout agree up to rounding on this machine" in (done.output_dir / "log.txt").read_text()
    assert done.metrics()[1]["ratio/replay_error"] < 3.1e-5
