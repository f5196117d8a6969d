"""Parallel plans of the diffusion transformers and UNets: how their layers are cut for tensor and sequence parallelism.

They are diffusers' own plans where those are correct; see docs/parallelism.md. A style that ends in ``?`` is for a
layer that not every model of the family has.
"""

from __future__ import annotations

from dataclasses import replace

from sfumato.parallel.plan import Gather, ParallelPlan, Split

JOINT_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
)
"""Linear layers of a joint attention of text and image: targets of LoRA adapters."""
FLUX_TARGETS = (*JOINT_TARGETS, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
"""The same with the feed-forward layers of image and text."""


HEAD_NORM = "replicated_with_grad_allreduce"
"""Style of a norm of queries or keys within a head."""


def _joint_attention(may_lack: str = "") -> dict[str, str]:
    """Styles of the layers of a joint attention of text and image.

    Args:
        may_lack: "?" marks the norms and the output of the text as layers that not every model has.
    """
    styles = dict.fromkeys(("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"), "colwise")
    styles |= dict.fromkeys(("norm_q", "norm_k", "norm_added_q", "norm_added_k"), f"{HEAD_NORM}{may_lack}")
    styles |= {"to_out.0": "rowwise", "to_add_out": f"rowwise{may_lack}"}
    return _prefix_styles("transformer_blocks.*.attn", styles)


def _attention_styles(place: str, norms: str = HEAD_NORM, may_lack: str = "", **further: str) -> dict[str, str]:
    """Styles of the layers of an attention with its own queries, keys, values and output.

    Args:
        place: name of the attention.
        norms: style of the norms of queries and keys; empty where there are none.
        may_lack: "?" marks all layers as ones that not every model has.
        further: styles of further layers by name.
    """
    styles = dict.fromkeys(("to_q", "to_k", "to_v"), "colwise")
    styles |= {"norm_q": norms, "norm_k": norms} if norms else {}
    styles |= {"to_out.0": "rowwise", **further}
    return _prefix_styles(place, {name: f"{style}{may_lack}" for name, style in styles.items()})


def _feed_forward(place: str, may_lack: str = "") -> dict[str, str]:
    """Styles of the layers of diffusers' ``FeedForward``; ``may_lack`` as for ``_attention_styles``."""
    return {f"{place}.net.0.proj": f"colwise{may_lack}", f"{place}.net.2": f"rowwise{may_lack}"}


def _gated_styles(place: str, gate: str, values: str, output: str, may_lack: str = "") -> dict[str, str]:
    """Styles of a feed-forward layer of three matrices, by their names; ``may_lack`` as for ``_attention_styles``."""
    styles = {gate: "colwise", values: "colwise", output: "rowwise"}
    return _prefix_styles(place, {name: f"{style}{may_lack}" for name, style in styles.items()})


def _prefix_styles(place: str, styles: dict[str, str]) -> dict[str, str]:
    """Styles by the names of layers within a place."""
    return {f"{place}.{name}": style for name, style in styles.items()}


SD3 = ParallelPlan(
    blocks=("JointTransformerBlock",),
    tensor={
        **_joint_attention(may_lack="?"),  # norms, and in the last block the output of the text
        # dual attention: Stable Diffusion 3.5 medium
        **_attention_styles("transformer_blocks.*.attn2", may_lack="?"),
        **_feed_forward("transformer_blocks.*.ff"),
        **_feed_forward("transformer_blocks.*.ff_context", may_lack="?"),
    },
    sequence={
        "pos_embed": {0: Split(1, output=True)},
        "context_embedder": {0: Split(1, output=True)},
        "proj_out": Gather(1),
    },
)

_FLUX_INPUTS: dict[str | int, Split] = {
    "hidden_states": Split(1),
    "encoder_hidden_states": Split(1),
    "img_ids": Split(0),
    "txt_ids": Split(0),
}

FLUX = ParallelPlan(
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    tensor={
        **_joint_attention(),
        **_feed_forward("transformer_blocks.*.ff"),
        **_feed_forward("transformer_blocks.*.ff_context"),
        **dict.fromkeys((f"single_transformer_blocks.*.attn.to_{name}" for name in "qkv"), "colwise"),
        **dict.fromkeys((f"single_transformer_blocks.*.attn.norm_{name}" for name in "qk"), HEAD_NORM),
        # The input of proj_out is the concatenation of the attention's output (one block of features) and that of the
        # feed-forward layer (four blocks). Each block is cut by itself, so proj_mlp must produce its four in shards.
        "single_transformer_blocks.*.proj_mlp": "packed_colwise:4",
        "single_transformer_blocks.*.proj_out": "packed_rowwise:5",
        "single_transformer_blocks.*": "separate_outputs",
    },
    sequence={"": _FLUX_INPUTS, "proj_out": Gather(1)},
)

QWEN_IMAGE = ParallelPlan(
    blocks=("QwenImageTransformerBlock",),
    tensor={
        **_joint_attention(),
        **_feed_forward("transformer_blocks.*.img_mlp"),
        **_feed_forward("transformer_blocks.*.txt_mlp"),
    },
    sequence={
        "pos_embed": {0: Split(0, output=True), 1: Split(0, output=True)},
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1)},
        # Every block gets the mask of the keys and the index of the condition image's tokens for the whole sequence.
        "transformer_blocks.*": {"encoder_hidden_states_mask": Split(1), "modulate_index": Split(1)},
        "proj_out": Gather(1),
    },
)

# Each part of the sequence has keys of its own, so that it cannot be cut.
QWEN_IMAGE21 = ParallelPlan(
    blocks=("QwenImage21TransformerBlock",),
    tensor={
        **_attention_styles("transformer_blocks.*.attn"),
        **_gated_styles("transformer_blocks.*.img_mlp", "gate_layer", "proj", "out"),
    },
)

Z_IMAGE = ParallelPlan(
    blocks=("ZImageTransformerBlock",),
    tensor={
        layer: style
        for stack in ("layers", "noise_refiner", "context_refiner")
        for layer, style in {
            **_attention_styles(f"{stack}.*.attention", norms=f"{HEAD_NORM}?"),
            **_gated_styles(f"{stack}.*.feed_forward", "w1", "w3", "w2"),
        }.items()
    },
    sequence={
        "layers.0": {"x": Split(1)},
        "layers.*": {"attn_mask": Split(1), "freqs_cis": Split(1)},
        "all_final_layer.2-1": Gather(1),
    },
    replicated_context=("noise_refiner.*.attention", "context_refiner.*.attention"),  # run before the sequence is cut
)

_WAN_IMAGE = {"add_k_proj": "colwise?", "add_v_proj": "colwise?", "norm_added_k": "norm_across_heads?"}
"""Layers for what an image encoder sees, which models from text lack."""

WAN = ParallelPlan(
    blocks=("WanTransformerBlock",),
    tensor={
        **_attention_styles("blocks.*.attn1", "norm_across_heads", **_WAN_IMAGE),
        **_attention_styles("blocks.*.attn2", "norm_across_heads", **_WAN_IMAGE),
        **_feed_forward("blocks.*.ffn"),
    },
    sequence={
        "rope": {0: Split(1, output=True), 1: Split(1, output=True)},
        "blocks.0": {"hidden_states": Split(1)},
        "proj_out": Gather(1),
    },
    replicated_context=("blocks.*.attn2",),
)

WAN_PAIR = replace(WAN, parts=("transformer", "transformer_2"))

UNET = ParallelPlan(
    blocks=("BasicTransformerBlock", "ResnetBlock2D"),
    tensor={
        f"{place}.transformer_blocks.*.{layer}": f"{style}?"  # not every level of a UNet has attention
        for place in ("down_blocks.*.attentions.*", "mid_block.attentions.*", "up_blocks.*.attentions.*")
        for layer, style in {
            **_attention_styles("attn1", norms=""),
            **_attention_styles("attn2", norms=""),
            "ff.net.0.proj": "packed_colwise:2",  # values and gates
            "ff.net.2": "rowwise",
        }.items()
    },
)

FLUX2 = ParallelPlan(
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    tensor={
        **_joint_attention(),
        "transformer_blocks.*.ff.linear_in": "packed_colwise:2",  # gates and values
        "transformer_blocks.*.ff.linear_out": "rowwise",
        "transformer_blocks.*.ff_context.linear_in": "packed_colwise:2",
        "transformer_blocks.*.ff_context.linear_out": "rowwise",
        # Queries, keys and values, and gates and values of a feed-forward layer that is three times as wide.
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj": "packed_colwise:9",
        **dict.fromkeys((f"single_transformer_blocks.*.attn.norm_{name}" for name in "qk"), HEAD_NORM),
        "single_transformer_blocks.*.attn.to_out": "packed_rowwise:4",
    },
    sequence=FLUX.sequence,
)

CHROMA = ParallelPlan(
    blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    tensor={name: style for name, style in FLUX.tensor.items() if style != "separate_outputs"},
    sequence={
        "": {**_FLUX_INPUTS, "attention_mask": Split(1, parts=(".encoder_hidden_states", ".hidden_states"))},
        "proj_out": Gather(1),
    },
    masks="pairs",
)

LUMINA2 = ParallelPlan(
    blocks=("Lumina2TransformerBlock",),
    tensor={
        layer: style
        for stack in ("layers", "noise_refiner", "context_refiner")
        for layer, style in {
            **_attention_styles(f"{stack}.*.attn"),
            **_gated_styles(f"{stack}.*.feed_forward", "linear_1", "linear_3", "linear_2"),
        }.items()
    },
    sequence={
        "layers.0": {"hidden_states": Split(1)},
        "layers.*": {"attention_mask": Split(1), "image_rotary_emb": Split(1)},
        "norm_out": Gather(1),
    },
    replicated_context=("noise_refiner.*.attn", "context_refiner.*.attn"),  # run before the sequence is cut
)

SANA = ParallelPlan(
    blocks=("SanaTransformerBlock",),
    tensor={
        **_attention_styles("transformer_blocks.*.attn1", norms="norm_across_heads?"),  # norms: Sana 1.5
        **_attention_styles("transformer_blocks.*.attn2", norms="norm_across_heads?"),
    },
)

ERNIE_IMAGE = ParallelPlan(
    blocks=("ErnieImageSharedAdaLNBlock",),
    tensor={
        **_attention_styles("layers.*.self_attention"),
        **_gated_styles("layers.*.mlp", "gate_proj", "up_proj", "linear_fc2"),
    },
    sequence={  # hidden states and modulation are [tokens, batch, features]
        "layers.0": {"x": Split(0)},
        "layers.*": {"rotary_pos_emb": Split(1), "temb": Split(0), "attention_mask": Split(3)},
        "final_linear": Gather(0),
    },
)

KREA2 = ParallelPlan(
    blocks=("Krea2TransformerBlock", "Krea2TextFusionBlock"),
    tensor={
        **_attention_styles("transformer_blocks.*.attn", to_gate="colwise"),
        **_gated_styles("transformer_blocks.*.ff", "gate", "up", "down"),
    },
    sequence={
        "transformer_blocks.0": {"hidden_states": Split(1)},
        "transformer_blocks.*": {"image_rotary_emb": Split(0), "attention_mask": Split(3)},
        "transformer_blocks.-1": Gather(1, is_cut_again=True),  # then the text is dropped
        "final_layer": {"hidden_states": Split(1)},
        "final_layer.linear": Gather(1),
    },
    replicated_context=("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn"),
)

IDEOGRAM4 = ParallelPlan(
    blocks=("Ideogram4TransformerBlock",),
    tensor={
        **_attention_styles("layers.*.attention"),
        **_gated_styles("layers.*.feed_forward", "w1", "w3", "w2"),
    },
    sequence={
        "layers.0": {"hidden_states": Split(1)},
        "layers.*": {"image_rotary_emb": Split(1)},
        "final_layer": Gather(1),
    },
    masks="whole",  # padding sees padding
)

# Rounding to bfloat16 between layers makes sums in another order differ by more than the last bits.
KANDINSKY5 = ParallelPlan(
    blocks=("Kandinsky5TransformerEncoderBlock", "Kandinsky5TransformerDecoderBlock"),
)

_HIDREAM_BLOCK = {
    **{f"attn1.to_{name}": "colwise" for name in "qkv"},
    "attn1.q_rms_norm": "norm_across_heads",
    "attn1.k_rms_norm": "norm_across_heads",
    "attn1.to_out": "rowwise",
    **{f"attn1.to_{name}_t": "colwise?" for name in "qkv"},  # of the text, which single blocks do not tell apart
    "attn1.q_rms_norm_t": "norm_across_heads?",
    "attn1.k_rms_norm_t": "norm_across_heads?",
    "attn1.to_out_t": "rowwise?",
    # models without experts have one feed-forward layer
    **_gated_styles("ff_i", "w1", "w3", "w2", may_lack="?"),
    **_gated_styles("ff_i.experts.*", "w1", "w3", "w2", may_lack="?"),
    **_gated_styles("ff_i.shared_experts", "w1", "w3", "w2", may_lack="?"),
    **_gated_styles("ff_t", "w1", "w3", "w2", may_lack="?"),
}

HIDREAM = ParallelPlan(
    blocks=("HiDreamImageTransformerBlock", "HiDreamImageSingleTransformerBlock"),
    tensor={
        f"{stack}.*.block.{layer}": style
        for stack in ("double_stream_blocks", "single_stream_blocks")
        for layer, style in _HIDREAM_BLOCK.items()
    },
    # Picture and texts are cut where they are embedded, so that a block drops this rank's part of the text it has read.
    sequence={
        "x_embedder": {0: Split(1, output=True)},
        "caption_projection.*": {0: Split(1, output=True)},
        "pe_embedder": {"ids": Split(1, parts=("x_embedder.0",))},
        "double_stream_blocks.*": {"hidden_states_masks": Split(1)},
        "single_stream_blocks.*": {"hidden_states_masks": Split(1, parts=("x_embedder.0",))},
        "final_layer": Gather(1),
    },
)

SANA_VIDEO = replace(SANA, blocks=("SanaVideoTransformerBlock",))

COGVIDEOX = ParallelPlan(
    blocks=("CogVideoXBlock",),
    tensor={
        **_attention_styles("transformer_blocks.*.attn1"),
        **_feed_forward("transformer_blocks.*.ff"),
    },
    sequence={
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1)},
        "transformer_blocks.*": {"image_rotary_emb": Split(0)},
        "proj_out": Gather(1),
    },
)

HUNYUAN_VIDEO15 = ParallelPlan(
    blocks=("HunyuanVideo15TransformerBlock",),
    tensor={
        **_joint_attention(),
        **_feed_forward("transformer_blocks.*.ff"),
        **_feed_forward("transformer_blocks.*.ff_context"),
    },
    sequence={
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1)},
        "transformer_blocks.*": {"attention_mask": Split(1), "freqs_cis": Split(0)},
        "proj_out": Gather(1),
    },
    replicated_context=("context_embedder.token_refiner.refiner_blocks.*.attn",),  # run before the sequence is cut
    masks="pairs",
)

_IMAGE_AND_TEXT = ("transformer_blocks.0.hidden_states", "transformer_blocks.0.encoder_hidden_states")

HUNYUAN_IMAGE = ParallelPlan(
    blocks=("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock"),
    tensor=FLUX.tensor,
    sequence={
        "transformer_blocks.0": {"hidden_states": Split(1), "encoder_hidden_states": Split(1)},
        **{
            f"{blocks}.*": {
                "attention_mask": Split(3, parts=_IMAGE_AND_TEXT),
                "image_rotary_emb": Split(0),
            }
            for blocks in ("transformer_blocks", "single_transformer_blocks")
        },
        "proj_out": Gather(1),
    },
    replicated_context=("context_embedder.token_refiner.refiner_blocks.*.attn",),  # run before the sequence is cut
)

# Tensor parallelism is refused: how many matrices a projection holds depends on the model.
STABLE_AUDIO3 = ParallelPlan(
    blocks=("StableAudio3DiTBlock",),
    sequence={
        "transformer_blocks.0": {"hidden_states": Split(1)},
        "transformer_blocks.*": {"rope": Split(0)},
        "transformer_blocks.-1": Gather(1, is_cut_again=True),  # then the memory tokens are dropped
        "proj_out": ({"input": Split(1)}, Gather(1)),
        "postprocess_conv": ({"input": Split(2)}, Gather(2)),
    },
    replicated_context=("transformer_blocks.*.cross_attn",),
)

LTX2 = ParallelPlan(
    blocks=("LTX2VideoTransformerBlock",),
    tensor={
        # Rotary embeddings come with all heads.
        **dict.fromkeys(("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope"), "cut_heads"),
        **{
            layer: style
            for name in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
            for layer, style in _attention_styles(
                f"transformer_blocks.*.{name}",
                "norm_across_heads",
                to_gate_logits="colwise?",  # LTX-2.3: a number for each head
            ).items()
        },
        **_feed_forward("transformer_blocks.*.ff"),
        **_feed_forward("transformer_blocks.*.audio_ff"),
    },
    # Video and sound are cut each by itself. Both read the whole text, and the parts of each other from all ranks.
    sequence={
        "": {"timestep": Split(1, may_lack=True)},  # a given first frame has a noise level of its own
        "transformer_blocks.0": {"hidden_states": Split(1), "audio_hidden_states": Split(1)},
        "transformer_blocks.*": {
            name: Split(-2)  # [B, heads, tokens, D] or [B, tokens, heads D]
            for name in ("video_rotary_emb", "audio_rotary_emb", "ca_video_rotary_emb", "ca_audio_rotary_emb")
        },
        "proj_out": Gather(1),
        "audio_proj_out": Gather(1),
    },
    replicated_context=("transformer_blocks.*.attn2", "transformer_blocks.*.audio_attn2"),
)

ACE_STEP = ParallelPlan(
    blocks=("AceStepTransformerBlock",),
    tensor={
        **_attention_styles("layers.*.self_attn"),
        **_attention_styles("layers.*.cross_attn"),
        **_gated_styles("layers.*.mlp", "gate_proj", "up_proj", "down_proj"),
    },
    sequence={
        "layers.0": {"hidden_states": Split(1)},
        "layers.*": {"position_embeddings": Split(0)},
        "proj_out_conv": Gather(2),
    },
    replicated_context=("layers.*.cross_attn",),
    masks="whole",  # every second block attends to a window of the sound
)
