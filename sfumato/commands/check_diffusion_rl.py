"""Memory of RL of diffusion models at other times than in its update: while it draws, decodes and embeds prompts."""

from __future__ import annotations

from sfumato.commands.check_text_rl import PASSING
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.models.estimate.frozen_passes import decoding_bytes, encoding_bytes
from sfumato.models.estimate.memory_plan import Planned, RankMemory, count_drawing
from sfumato.models.estimate.meta_models import num_bytes
from sfumato.parallel.layout import Layout

DRAWING = "while samples are drawn"
DECODING = "while samples are decoded"
EMBEDDING = "while prompts are embedded"
"""Names of the phases."""

OFFLOADED = ("optimiser state", "moving average", "other policies", "frozen reference")
"""Parts that wait in CPU memory outside of an update with ``runtime.offload_idle``."""


def add_phases(memory: RankMemory, config: DiffusionRLConfig, planned: Planned, layout: Layout) -> None:
    """Adds the bytes of a rank of the actor in the other phases; it draws evaluations even with another sampler.

    Args:
        memory: of the rank, with the parts of an update.
        config: of the task.
        planned: the model.
        layout: the mesh.
    """
    model = planned.diffusion
    assert model is not None
    size = config.rollout.size[:2]
    away = {*PASSING, "gradients", *(OFFLOADED if config.runtime.offload_idle else ())}
    resident = sum(num for name, num in memory.parts.items() if name not in away)

    def bytes_of(names: tuple[str, ...]) -> int:
        return sum(num_bytes(model.components[name]) for name in names if name in model.components)

    encoders = bytes_of(model.encoder_names)
    comes_for_it = planned.frozen_idle or not config.model.keep_encoders
    gathered = memory.parts.get("gathered weights", 0)
    memory.phases |= {
        DRAWING: resident + gathered + count_drawing(planned, config.train, layout) // planned.shares_samples,
        DECODING: resident
        + (bytes_of(model.autoencoder_names) if planned.frozen_idle else 0)
        + decoding_bytes(model, size),
    }
    embedding = resident + (encoders if comes_for_it else 0) + encoding_bytes(model, size)
    if not config.model.keep_encoders:  # before the first step, which makes the optimiser's state
        embedding -= memory.parts.get("optimiser state", 0) if not config.runtime.offload_idle else 0
    memory.phases[EMBEDDING] = embedding
