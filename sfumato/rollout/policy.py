"""The diffusion model of an RL run, as it is before training."""

from __future__ import annotations

from collections.abc import Callable

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.models.diffusion.base import DiffusionModel, set_output
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.mesh import Mesh


def build_policy(config: DiffusionRLConfig, mesh: Mesh, say: Callable[[str], None]) -> DiffusionModel:
    """Loads the model and tells it what it makes. Rollout and replay must be one function, so it never drops out.

    Args:
        config: of the task.
        mesh: its device is where the model computes.
        say: shows a line to the user.

    Raises:
        ConfigError: when the model cannot make images or videos of that size.
    """
    precision, seed = config.train.mixed_precision, config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.say = say
    set_output(model, config.rollout.size, "rollout")
    if config.rollout.guidance_scale_2 is not None:
        model.set_second_guidance(config.rollout.guidance_scale_2)
    model.denoiser.eval()
    return model
