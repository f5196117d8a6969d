"""Where the diffusion transformers are cut. diffusers' own plans where they are right; see docs/parallelism.md."""

from __future__ import annotations

from sfumato.parallel.plan import Gather, ParallelPlan, Split

SD3 = ParallelPlan(
    blocks=("JointTransformerBlock",),
    sequence={
        "pos_embed": {0: Split(1, output=True)},
        "context_embedder": {0: Split(1, output=True)},
        "proj_out": Gather(1),
    },
)

FLUX = ParallelPlan(
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    sequence={
        "": {"hidden_states": Split(1), "encoder_hidden_states": Split(1), "img_ids": Split(0), "txt_ids": Split(0)},
        "proj_out": Gather(1),
    },
)

WAN = ParallelPlan(
    blocks=("WanTransformerBlock",),
    sequence={
        "rope": {0: Split(1, output=True), 1: Split(1, output=True)},
        "blocks.0": {"hidden_states": Split(1)},
        "proj_out": Gather(1),
    },
    replicated_context=("blocks.*.attn2",),
)
