"""Where the diffusion transformers are cut. diffusers' own plans where they are right; see docs/parallelism.md."""

from __future__ import annotations

from sfumato.parallel.plan import Gather, ParallelPlan, Split

SD3 = ParallelPlan(
    blocks=("JointTransformerBlock",),
    tensor={
        "transformer_blocks.*.attn.to_q": "colwise",
        "transformer_blocks.*.attn.to_k": "colwise",
        "transformer_blocks.*.attn.to_v": "colwise",
        "transformer_blocks.*.attn.norm_q": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn.norm_k": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn.to_out.0": "rowwise",
        "transformer_blocks.*.attn.add_q_proj": "colwise",
        "transformer_blocks.*.attn.add_k_proj": "colwise",
        "transformer_blocks.*.attn.add_v_proj": "colwise",
        "transformer_blocks.*.attn.norm_added_q": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn.norm_added_k": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn.to_add_out": "rowwise?",  # not in the last block
        "transformer_blocks.*.attn2.to_q": "colwise?",  # dual attention: Stable Diffusion 3.5 medium
        "transformer_blocks.*.attn2.to_k": "colwise?",
        "transformer_blocks.*.attn2.to_v": "colwise?",
        "transformer_blocks.*.attn2.norm_q": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn2.norm_k": "replicated_with_grad_allreduce?",
        "transformer_blocks.*.attn2.to_out.0": "rowwise?",
        "transformer_blocks.*.ff.net.0.proj": "colwise",
        "transformer_blocks.*.ff.net.2": "rowwise",
        "transformer_blocks.*.ff_context.net.0.proj": "colwise?",
        "transformer_blocks.*.ff_context.net.2": "rowwise?",
    },
    sequence={
        "pos_embed": {0: Split(1, output=True)},
        "context_embedder": {0: Split(1, output=True)},
        "proj_out": Gather(1),
    },
)

FLUX = ParallelPlan(
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    tensor={
        "transformer_blocks.*.attn.to_q": "colwise",
        "transformer_blocks.*.attn.to_k": "colwise",
        "transformer_blocks.*.attn.to_v": "colwise",
        "transformer_blocks.*.attn.norm_q": "replicated_with_grad_allreduce",
        "transformer_blocks.*.attn.norm_k": "replicated_with_grad_allreduce",
        "transformer_blocks.*.attn.to_out.0": "rowwise",
        "transformer_blocks.*.attn.add_q_proj": "colwise",
        "transformer_blocks.*.attn.add_k_proj": "colwise",
        "transformer_blocks.*.attn.add_v_proj": "colwise",
        "transformer_blocks.*.attn.norm_added_q": "replicated_with_grad_allreduce",
        "transformer_blocks.*.attn.norm_added_k": "replicated_with_grad_allreduce",
        "transformer_blocks.*.attn.to_add_out": "rowwise",
        "transformer_blocks.*.ff.net.0.proj": "colwise",
        "transformer_blocks.*.ff.net.2": "rowwise",
        "transformer_blocks.*.ff_context.net.0.proj": "colwise",
        "transformer_blocks.*.ff_context.net.2": "rowwise",
        "single_transformer_blocks.*.attn.to_q": "colwise",
        "single_transformer_blocks.*.attn.to_k": "colwise",
        "single_transformer_blocks.*.attn.to_v": "colwise",
        "single_transformer_blocks.*.attn.norm_q": "replicated_with_grad_allreduce",
        "single_transformer_blocks.*.attn.norm_k": "replicated_with_grad_allreduce",
        # proj_out takes attention (one block of features) and feed-forward (four) side by side: each block is cut,
        # and proj_mlp makes the pieces of the four
        "single_transformer_blocks.*.proj_mlp": "packed_colwise:4",
        "single_transformer_blocks.*.proj_out": "packed_rowwise:5",
        "single_transformer_blocks.*": "separate_outputs",
    },
    sequence={
        "": {"hidden_states": Split(1), "encoder_hidden_states": Split(1), "img_ids": Split(0), "txt_ids": Split(0)},
        "proj_out": Gather(1),
    },
)

WAN = ParallelPlan(
    blocks=("WanTransformerBlock",),
    tensor={
        f"blocks.*.{attention}.{layer}": style
        for attention in ("attn1", "attn2")
        for layer, style in {
            "to_q": "colwise",
            "to_k": "colwise",
            "to_v": "colwise",
            "norm_q": "norm_across_heads",
            "norm_k": "norm_across_heads",
            "to_out.0": "rowwise",
            "add_k_proj": "colwise?",  # image to video
            "add_v_proj": "colwise?",
            "norm_added_k": "norm_across_heads?",
        }.items()
    }
    | {"blocks.*.ffn.net.0.proj": "colwise", "blocks.*.ffn.net.2": "rowwise"},
    sequence={
        "rope": {0: Split(1, output=True), 1: Split(1, output=True)},
        "blocks.0": {"hidden_states": Split(1)},
        "proj_out": Gather(1),
    },
    replicated_context=("blocks.*.attn2",),
)
