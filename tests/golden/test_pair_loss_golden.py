"""The loss of ``tasks/train_dit_dpo.py`` on one batch, against the published formula written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.forward_process.group_losses import DPO
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.dit import TrainDitDpoConfig
from sfumato.config.load import load_config
from sfumato.models.diffusion.encoded import EncodedBatch
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests import tiny_families
from tests.tiny import load_task, tiny_dit_dpo_config, write_config

BETA, STEP, IDS = 500.0, 3, [7, 2]
TASK = load_task("train_dit_dpo")


@pytest.fixture(params=["sd3", "stable_diffusion"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Policies, EncodedBatch, dict[str, Any]]:
    """A policy that has moved away from its reference, two pairs, and the configuration."""
    config = tiny_dit_dpo_config(tmp_path, flow={"prompt_dropout": 0.0})
    described = write_config(getattr(tiny_families, f"tiny_{request.param}")(), tmp_path / "tiny.yaml")
    config["model"] = {"config_path": str(described), "max_sequence_length": 7}
    loaded = load_config(TrainDitDpoConfig, overrides=config)
    model = build_diffusion_model(loaded.model, seed=1)
    policies = Policies(model, {"reference": FROZEN})
    policies.parallelize(Mesh(Layout(), torch.device("cpu")), loaded.train)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    latents = torch.randn(2, 2, *model.latent_shape(16, 16), generator=generator)
    return policies, EncodedBatch(latents, model.encode_prompts(["write A", "write B"]), IDS, 2, (16, 16)), config


def losses_of(policies: Policies, batch: EncodedBatch, config: dict[str, Any], **dpo: Any) -> torch.Tensor:
    """The losses of the pairs under a configuration."""
    noised = TASK.predict_pairs(policies, batch, load_config(TrainDitDpoConfig, overrides=config), STEP)
    return TASK.pair_losses(DPO(**{"beta": BETA, **dpo}), noised)


def test_the_loss_of_a_batch(pairs: tuple[Policies, EncodedBatch, dict[str, Any]]) -> None:
    """-log sigmoid(-beta/2 ((e_w - e_w_ref) - (e_l - e_l_ref))), with e the error of eps for a network of noise."""
    policies, batch, config = pairs
    noised = TASK.predict_pairs(policies, batch, load_config(TrainDitDpoConfig, overrides=config), STEP)
    losses = TASK.pair_losses(DPO(beta=BETA), noised)
    assert torch.equal(noised.sigma[0::2], noised.sigma[1::2]) and noised.sigma[0] != noised.sigma[2]
    noise = keyed_normal(batch.latents.shape[2:], config["train"].get("seed", 42), "noise 0", STEP, IDS)
    predicts_noise = "UNet" in type(policies.model.denoiser).__name__
    for pair in range(2):
        sigma, errors = noised.sigma[2 * pair], {}
        for side in range(2):
            x0 = batch.latents[pair, side]
            noisy = ((1 - sigma) * x0 + sigma * noise[pair])[None]
            for name in ("policy", "reference"):
                with policies.active(name) as network, torch.no_grad():
                    velocity = network.predict_velocity(noisy, sigma[None], batch.conditioning.rows([pair]))[0]
                error = velocity - (noise[pair] - x0)
                if predicts_noise:  # eps = x + (1 - sigma) v
                    error = noisy[0] + (1 - sigma) * velocity - noise[pair]
                errors[name, side] = error.square().mean()
        change = [errors["policy", side] - errors["reference", side] for side in range(2)]
        assert float(min(map(abs, change))) > 1e-5
        expected = -functional.logsigmoid(-BETA / 2 * (change[0] - change[1]))
        torch.testing.assert_close(losses[pair], expected, rtol=2e-3, atol=1e-3)


def test_every_setting_of_the_loss_is_used(pairs: tuple[Policies, EncodedBatch, dict[str, Any]]) -> None:
    policies, batch, config = pairs
    base = losses_of(policies, batch, config)
    assert torch.equal(losses_of(policies, batch, config), base)
    by_model = policies.model.timestep_sampling
    for name, value in (
        ("timestep_sampling", "uniform" if by_model == "logit_normal" else "logit_normal"),
        ("shift", 3.0),
        ("logit_mean", 0.5),
        ("prompt_dropout", 0.99),
    ):
        changed = {**config, "flow": {**config["flow"], name: value}}
        assert not torch.equal(losses_of(policies, batch, changed), base), name
    for dpo in ({"beta": 100.0}, {"label_smoothing": 0.2}, {"form": "hinge"}):
        assert not torch.equal(losses_of(policies, batch, config, **dpo), base), dpo


def test_prompts_are_dropped_for_both_images_of_a_pair(pairs: tuple[Policies, EncodedBatch, dict[str, Any]]) -> None:
    policies, batch, config = pairs
    empty = batch.conditioning.without_prompt(torch.tensor([True, True]))
    without = EncodedBatch(batch.latents, empty, IDS, 2, (16, 16))
    dropped = {**config, "flow": {"prompt_dropout": 0.999}}
    assert torch.equal(losses_of(policies, batch, dropped), losses_of(policies, without, config))
