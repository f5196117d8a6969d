"""Solvers against known solutions, stochastic steps against the marginals they must keep, noise levels and decays."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sfumato.algorithms.decay import Constant, Linear, Refresh, WarmUp
from sfumato.algorithms.dynamics import CPS, DDIM, DanceSDE, EulerODE, FlowSDE, WanSDE
from sfumato.algorithms.solvers import DPMSolver2, Euler
from sfumato.algorithms.timesteps import LogitNormalTimesteps, SamplerGrid, UniformTimesteps

STOCHASTIC = [FlowSDE(0.7), CPS(0.8), DanceSDE(0.3), WanSDE(), DDIM(0.7)]


DATA_STD = 0.5


def variance(sigma: float) -> float:
    """Of x_sigma for x0 ~ N(0, DATA_STD^2): the exact path keeps x / sqrt(variance), its velocity is linear in x."""
    return (1 - sigma) ** 2 * DATA_STD**2 + sigma**2


def velocity_at(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    return latents * (sigma - (1 - sigma) * DATA_STD**2) / variance(sigma)


def solve(solver: object, num_steps: int, ends: tuple[float, float] = (1, 0), forget: bool = False) -> float:
    """Error at the end of the schedule."""
    sigmas, start = torch.linspace(*ends, num_steps + 1), torch.linspace(-2, 2, 9).reshape(1, -1)
    latents, memory = start, None
    for index, sigma in enumerate(sigmas[:-1].tolist()):
        velocity = velocity_at(latents, sigma)
        latents, memory = solver.step(velocity, latents, sigmas, index, None if forget else memory)
    return float((latents - start * math.sqrt(variance(ends[1]) / variance(ends[0]))).abs().max())


def test_order_of_convergence() -> None:
    for solver, order in ((Euler(), 1), (DPMSolver2(), 2)):
        errors = [solve(solver, num_steps, (0.8, 0.3)) for num_steps in (20, 40, 80)]
        assert [math.log2(a / b) for a, b in itertools.pairwise(errors)] == pytest.approx([order] * 2, abs=0.1)
    assert solve(DPMSolver2(), 10) < solve(Euler(), 10) / 3


def test_without_memory_the_second_order_solver_is_eulers() -> None:
    assert solve(DPMSolver2(), 10, forget=True) == solve(Euler(), 10)


def test_euler_is_the_step_outside_the_window_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    velocity, latents = (torch.randn((3, 2, 4, 4), generator=generator) for _ in range(2))
    sigmas = torch.tensor([1.0, 0.7, 0.2, 0.0])
    for index in range(3):
        sigma, sigma_next = sigmas[index].expand(3), sigmas[index + 1].expand(3)
        step = EulerODE().step(velocity, latents, sigma, sigma_next, 0.7)
        assert torch.equal(Euler().step(velocity, latents, sigmas, index)[0], step.mean)


@pytest.mark.parametrize("dynamics", [CPS(0.8), DDIM(0.7)], ids=lambda dynamics: dynamics.type)
def test_the_noise_level_of_the_schedule_is_kept(dynamics: object) -> None:
    """x' holds 1 - sigma' of x0 and sigma' of noise, of which a part is new."""
    sigma, sigma_next = torch.tensor([0.8]), torch.tensor([0.5])
    step = dynamics.step(torch.ones(1, 1), torch.tensor([[0.8]]), sigma, sigma_next, 0.9)  # x0 = 0, x1 = 1
    assert float(step.mean**2 + step.std**2) == pytest.approx(0.5**2, rel=1e-6)
    step = dynamics.step(-torch.ones(1, 1), torch.tensor([[0.2]]), sigma, sigma_next, 0.9)  # x0 = 1, x1 = 0
    assert float(step.mean) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    "dynamics", [dynamics for dynamics in STOCHASTIC if dynamics.type != "cps"], ids=lambda dynamics: dynamics.type
)
def test_many_stochastic_steps_keep_the_distribution_of_the_data(dynamics: object) -> None:
    """x0 ~ N(0, 0.5^2), the exact velocity: whatever the noise, samples must come out with that deviation."""
    generator, num_steps = torch.Generator().manual_seed(1), 200
    sigmas = torch.linspace(1, 0, num_steps + 1)
    latents = torch.randn((1, 20_000), generator=generator)
    for index in range(num_steps - 1):  # the last step is never stochastic
        sigma, sigma_next = (sigmas[place].expand(1) for place in (index, index + 1))
        velocity = velocity_at(latents, float(sigma))
        step = dynamics.step(velocity, latents, sigma, sigma_next, float(sigmas[1]))
        latents = step.draw(torch.randn(latents.shape, generator=generator))
    assert float(latents.std()) == pytest.approx(DATA_STD, rel=0.05)


@pytest.mark.parametrize("dynamics", STOCHASTIC, ids=lambda dynamics: dynamics.type)
def test_steps_are_float32_finite_at_pure_noise_and_each_row_by_itself(dynamics: object) -> None:
    generator = torch.Generator().manual_seed(2)
    velocity, latents = (torch.randn((3, 2, 4, 4), generator=generator) for _ in range(2))
    sigma, sigma_next = torch.tensor([1.0, 0.8, 0.3]), torch.tensor([0.9, 0.5, 0.1])
    step = dynamics.step(velocity.to(torch.bfloat16), latents.double(), sigma, sigma_next, 0.9)
    exact = dynamics.step(velocity.to(torch.bfloat16).float(), latents, sigma, sigma_next, 0.9)
    drawn = step.draw(torch.randn(latents.shape, generator=generator))
    for name in ("mean", "std", "diffusion", "weight", "log_norm", "velocity"):
        assert getattr(step, name).dtype == torch.float32 and torch.isfinite(getattr(step, name)).all()
        assert torch.equal(getattr(step, name), getattr(exact, name))
    assert torch.isfinite(step.log_prob(drawn)).all()
    alone = dynamics.step(velocity[1:2].to(torch.bfloat16), latents[1:2], sigma[1:2], sigma_next[1:2], 0.9)
    assert torch.equal(alone.mean, step.mean[1:2])


def test_levels_of_the_samplers_grid() -> None:
    sigmas = torch.linspace(1, 0, 11)
    drawn = SamplerGrid(num=9).draw(sigmas, 0, 3, range(50))
    assert drawn.shape == (50, 9) and drawn.dtype == torch.float32
    assert all(len(set(row.tolist())) == 9 for row in drawn), "no level twice"
    assert set(drawn.flatten().tolist()) == set(sigmas[:-1].tolist())
    assert SamplerGrid(num=99).draw(sigmas, 0, 3, [0]).shape == (1, 10)
    noisy = SamplerGrid(num=4, first=1, fraction=0.7).draw(sigmas, 0, 3, range(50))
    assert set(noisy.flatten().tolist()) == set(sigmas[1:7].tolist())
    with pytest.raises(ValueError, match="no level is left"):
        SamplerGrid(first=5, fraction=0.5).draw(sigmas, 0, 0, [0])


def test_stratified_levels_take_one_of_each_piece() -> None:
    sigmas = torch.linspace(1, 0, 13)
    drawn = SamplerGrid(num=4, stratified=True).draw(sigmas, 0, 0, range(200))
    for piece in range(4):
        assert set(drawn[:, piece].tolist()) == set(sigmas[3 * piece : 3 * piece + 3].tolist())
    uniform = UniformTimesteps(num=5, low=0.2, high=0.7).draw(sigmas, 0, 0, range(200))
    edges = torch.linspace(0.2, 0.7, 6)
    assert (uniform >= edges[:-1] - 1e-6).all() and (uniform <= edges[1:] + 1e-6).all()
    normal = torch.logit(LogitNormalTimesteps(num=4, mean=0.5, std=0.8).draw(sigmas, 0, 0, range(2000)).double())
    assert float(normal.mean()) == pytest.approx(0.5, abs=0.02) and float(normal.std()) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("timesteps", [SamplerGrid(num=3), UniformTimesteps(num=3), LogitNormalTimesteps(num=3)])
def test_levels_belong_to_seed_iteration_and_id(timesteps: object) -> None:
    sigmas = torch.linspace(1, 0, 11)
    base = timesteps.draw(sigmas, 1, 2, [3, 4, 5])
    torch.manual_seed(0)
    assert torch.equal(base[1:], timesteps.draw(sigmas, 1, 2, [4, 5]))
    assert torch.equal(timesteps.draw(sigmas, 1, 2, [7, 7])[0], timesteps.draw(sigmas, 1, 2, [7, 7])[1])
    for other in (timesteps.draw(sigmas, 2, 2, [3, 4, 5]), timesteps.draw(sigmas, 1, 3, [3, 4, 5])):
        assert not torch.equal(base, other)


def test_decays() -> None:
    assert [Constant(0.25).at(step) for step in (0, 99)] == [0.25, 0.25]
    assert [Linear(slope=0.005, limit=0.999, first=0.25).at(step) for step in (0, 10, 999)] == [0.25, 0.3, 0.999]
    assert [Linear(start=2, slope=0.5, limit=0.9).at(step) for step in range(5)] == [0, 0, 0, 0.5, 0.9]
    assert [Linear(start=2, first=0.9, limit=0.5).at(step) for step in (1, 2)] == [0.9, 0.5], "it may also fall"
    assert [Refresh(3).at(step) for step in range(7)] == [1, 1, 0, 1, 1, 0, 1]
    for wrong in (lambda: Constant(1.5), lambda: Linear(limit=2), lambda: WarmUp(1.0), lambda: Refresh(0)):
        with pytest.raises(ValueError, match=r"must be|limit"):
            wrong()
