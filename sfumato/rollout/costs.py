"""What drawing and learning from samples takes, in operations of the denoiser."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.flops import denoiser_flops


@dataclass(frozen=True)
class Costs:
    """Operations that the algorithm needs of the denoiser, whatever is computed twice to save memory."""

    sample: int
    """To draw one sample: a forward pass for each denoising step and guidance branch."""
    row: int
    """To learn from one row, a sample at one trained step or noise level: a forward and a backward pass for each branch
    of the trained policy, and a forward pass for each of every policy that it is compared with."""

    def flops(self, samples: int, rows: float) -> dict[str, float]:
        """Operations of an iteration by the part of it."""
        return {"generate": float(samples * self.sample), "update": rows * self.row}


def count_costs(model: DiffusionModel, config: DiffusionRLConfig) -> Costs:
    """The costs of a configured run.

    Text encoders, autoencoder and rewards are left out. Counted though not computed are a policy that just then has the
    trained one's weights, and the adapter (about 1 %) where the reference is the model without it.
    """
    rollout, algorithm = config.rollout, config.algorithm
    forward, training = denoiser_flops(model, rollout.height, rollout.width)

    def branches(scale: float) -> int:
        return 1 if scale == 1.0 or model.embeds_guidance else 2

    own = config.trained_guidance_scale
    row = branches(own) * training
    for policy in algorithm.compared:
        scale = algorithm.reference_guidance_scale if policy == "reference" else None
        row += branches(own if scale is None else scale) * forward
    return Costs(rollout.num_inference_steps * branches(rollout.guidance_scale) * forward, row)
