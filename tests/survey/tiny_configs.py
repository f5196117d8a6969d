"""A small configuration of every architecture that transformers knows as a causal language model."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCABULARY = 259

# Values of fields that many configurations share. A field whose default is None or a switch keeps its default,
# unless it is one of ``ALSO_WHEN_NONE``: None there commonly turns a feature off.
COMMON: dict[str, Any] = {
    # Sizes
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 24,
    "word_embed_proj_dim": 24,
    "input_embedding_size": 16,
    "output_embedding_size": 24,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "feed_forward_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dim_ff": 48,
    "d_inner": 48,
    "dff": 48,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "max_position_embeddings": 128,
    "model_max_length": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "max_target_positions": 128,
    "max_source_positions": 16,
    "context_length": 128,
    # Layers
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    # Attention
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "d_head": 8,
    "dim_head": 8,
    "kv_channels": 8,
    "attention_head_size": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "rotary_dim": 4,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "local_attention": 8,
    "attention_chunk_size": 8,
    "query_pre_attn_scalar": 16,
    "index_n_heads": 16,  # the scores of few heads are often exactly 0 together, and topk may choose any of them
    "index_head_dim": 8,
    "index_topk": 8,
    "d_rel": 4,
    "rel_extent": 8,
    "log_scaling_n_floor": 8,
    "floor_scale": 8,
    # Experts
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 2,
    "hc_mult": 2,
    "hc_count": 2,
    # Recurrent layers
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 16,
    "time_step_rank": 4,
    "chunk_size": 16,
    "lru_width": 32,
    "attention_hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    # Soft caps, which at their usual size would hardly bend the logits of a small model
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "output_logit_soft_cap": 3.0,
    "gate_soft_cap": 3.0,
    # Ids
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "eod_token_id": 0,
    "sep_token_id": 0,
    "cls_token_id": 0,
    "mask_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 0,
    # Spread of the first weights: a usual 0.02 leaves a small model nearly linear
    "initializer_range": 0.2,
    "init_std": 0.2,
    "embed_init_std": 0.2,
    "embedding_initializer_range": 0.2,
    # Randomness
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    # Towers of other inputs, which stay unused
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 8,
}
ALSO_WHEN_NONE = ("pad_token_id", "bos_token_id", "eos_token_id", "num_key_value_heads", "head_dim")


def layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


def mlps(*kinds: str) -> dict[str, Any]:
    return {"mlp_layer_types": list(kinds)}


SLIDING_FULL = layers("sliding_attention", "full_attention")
FULL_SLIDING = layers("full_attention", "sliding_attention")
LINEAR_FULL = layers("linear_attention", "full_attention")
DENSE_SPARSE = mlps("dense", "sparse")
MLA = {"num_key_value_heads": 4}  # every head has its own keys and values, made from one latent
GROUPS = {"n_group": 2, "topk_group": 1}  # experts are chosen within one of two groups
MUP = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "afmoe": SLIDING_FULL | {"num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 2.0, "mup_enabled": True},
    "aria_text": {"moe_num_shared_experts": 1},
    "axk1": MLA | DENSE_SPARSE | GROUPS | {"n_routed_experts": 8},
    "axk2": MLA | DENSE_SPARSE | {"gated_norm_rank": 4},
    "bailing_hybrid": MLA | LINEAR_FULL | DENSE_SPARSE | GROUPS | {"num_local_experts": 8, "num_mtp_layers": 0},
    "bamba": {"attn_layer_indices": [1]},
    "beam": SLIDING_FULL | DENSE_SPARSE | GROUPS | {"num_experts": 8},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "patch_size": 4,
        "patching_threshold": 5.1,
        "local_attention_window_len": 8,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": SLIDING_FULL | {"logit_scale": 0.25},
    "cohere2_moe": SLIDING_FULL | DENSE_SPARSE | {"logit_scale": 0.25, "num_shared_experts": 1},
    "cohere_compass_text": SLIDING_FULL
    | {
        "logit_scale": 0.25,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "full_attention": None,
        },
    },
    "cpmant": {
        "position_bias_num_buckets": 16,
        "position_bias_max_distance": 32,
        "prompt_types": 4,
        "prompt_length": 4,
        "segment_types": 4,
    },
    "cwm": FULL_SLIDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": MLA | {"num_experts_per_tok": 2, "routed_scaling_factor": 2.0},
    "deepseek_v3": MLA | GROUPS | {"n_routed_experts": 8, "num_mtp_layers": 0},
    "deepseek_v32": MLA | DENSE_SPARSE | GROUPS | {"n_routed_experts": 8},
    "deepseek_v4": layers("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention")
    | mlps("hash_moe", "moe", "moe")
    | {
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "doge": {"keep_window_size": 8},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "max_window_layers": 1,
    }
    | FULL_SLIDING,
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {"downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": MLA
    | DENSE_SPARSE
    | layers("indexed_attention", "sliding_attention")
    | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 24}
    | {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "head_dim": 16, "sliding_window": 8},
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "exaone4": SLIDING_FULL,
    "exaone_moe": SLIDING_FULL | DENSE_SPARSE | GROUPS | {"num_experts": 8, "num_shared_experts": 1},
    "falcon_h1": {
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.7, 1.5],
        "key_multiplier": 0.4,
        "attention_out_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.3],
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.6,
    },
    "flint": FULL_SLIDING | {"mlp_only_layers": [0]},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma2": SLIDING_FULL,
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    "gemma3_text": SLIDING_FULL,
    "gemma3n_text": layers("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    | {
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4": {"vision_config": None, "audio_config": None},
    "gemma4_text": layers("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    | {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_unified": {"vision_config": None, "audio_config": None},
    "gemma4_unified_text": layers("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    | {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 3.0,
    },
    "glm4_moe": {"use_qk_norm": True, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    "glm4_moe_lite": MLA | DENSE_SPARSE,
    "glm_moe_dsa": MLA
    | mlps("dense", "sparse", "sparse")
    | {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
    "got_ocr2": {
        "vision_config": {"output_channels": 8, "mlp_dim": 48, "global_attn_indexes": [1], "window_size": 1},
        "text_config": {"model_type": "qwen2"},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_oss": SLIDING_FULL,
    "granite": MUP,
    "granite_swa": MUP | FULL_SLIDING | {"layer_rope_theta": [10000.0, 0.0]},
    "granitemoe": MUP,
    "granitemoe_swa": MUP | FULL_SLIDING | {"layer_rope_theta": [10000.0, 0.0]},
    "granitemoehybrid": MUP | LINEAR_FULL | {"position_embedding_type": "rope"},
    "granitemoeshared": MUP,
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2, "embedding_scale": 5.0},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "hy_v3": DENSE_SPARSE,
    "hy_v4": mlps("dense", "sparse", "sparse") | {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
    "hyperclovax": MUP,
    "inkling2_text": layers("hybrid_sliding", "hybrid")
    | {"n_layers_per_attn_res_block": 1, "qk_l2_clip_threshold": 2.0, "rel_l2_clip_threshold": 1.0},
    "inkling_text": layers("hybrid_sliding", "hybrid")
    | DENSE_SPARSE
    | {"logits_mup_width_multiplier": 2.0, "log_scaling_n_floor": 8, "n_shared_experts": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": MLA
    | LINEAR_FULL
    | DENSE_SPARSE
    | {"linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}},
    "kolibri1": SLIDING_FULL,
    "laguna": FULL_SLIDING
    | DENSE_SPARSE
    | {"num_attention_heads_per_layer": [4, 8], "moe_routed_scaling_factor": 2.0, "moe_router_logit_softcapping": 3.0},
    "lfm2": layers("conv", "full_attention") | {"block_multiple_of": 16},
    "lfm2_moe": layers("conv", "full_attention"),
    "lfm3": layers("conv", "full_attention", "sliding_attention"),
    "llama4_text": layers("chunked_attention", "full_attention")
    | {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "longcat_flash": MLA | {"num_layers": 1, "num_hidden_layers": 2, "qk_head_dim": 16, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mellum": FULL_SLIDING | mlps("dense", "sparse"),
    "mimo_v2_flash": FULL_SLIDING | DENSE_SPARSE | {"v_head_dim": 4},
    "minicpm3": MLA | {"scale_emb": 3, "dim_model_base": 16},
    "minimax": LINEAR_FULL
    | {
        "block_size": 8,
        "full_attn_alpha_factor": 3.5,
        "linear_attn_alpha_factor": 3.5,
        "mlp_alpha_factor": 3.5,
    },
    "minimax_m3_vl_text": DENSE_SPARSE
    | {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "ministral": SLIDING_FULL,
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "modernbert-decoder": FULL_SLIDING,
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "mpt": {"expansion_ratio": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "n_groups": 2,
        "use_mamba_kernels": False,
    },
    "olmo": {"clip_qkv": 2.0},
    "olmo3": SLIDING_FULL,
    "olmo_hybrid": LINEAR_FULL,
    "phi4_multimodal": {
        "vision_config": {"crop_size": 16},
        "audio_config": {
            "num_blocks": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "bias_max_distance": 16,
            "input_size": 8,
        },
    },
    "prophetnet": {"num_buckets": 8, "relative_max_distance": 16},
    "qwen2_moe": {"mlp_only_layers": [0], "sliding_window": None},
    "qwen3_5_moe_text": LINEAR_FULL,
    "qwen3_5_text": LINEAR_FULL,
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": LINEAR_FULL | {"mlp_only_layers": [0]},
    "qwen4_exp_text": LINEAR_FULL  # the full layers choose keys by an indexer
    | {
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {  # with axial positions every document in training has to be as long as their grid
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCABULARY,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 8},
    "vaultgemma": SLIDING_FULL,
    "whisper": {"begin_suppress_tokens": None},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"num_hidden_layers": 2, "num_blocks": 2, "chunk_size": 16, "ffn_round_up_to_multiple_of": 8},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
        "use_mem_rope": True,
    },
    "zaya": layers("hybrid", "hybrid_sliding")
    | {"num_experts_per_tok": 1, "sliding_window": 8, "router_hidden_size": 16},
}

NOT_BUILT: dict[str, str] = {
    "gemma3n": "Its tower for images comes from the package timm and cannot be left out; gemma3n_text is built.",
    "gemma4_assistant": "It drafts for another model, whose embeddings and keys and values it has to be given.",
    "gemma4_unified_assistant": "It drafts for another model, whose embeddings and keys and values it has to be given.",
    "musicgen": "Its decoder reads several codebooks of sound at once and answers with logits of each codebook.",
    "musicgen_melody": "Its decoder reads several codebooks of sound at once and answers with logits of each codebook.",
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon alibi": ("falcon", {"alibi": True}),
    "falcon new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon rw": ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    "llama dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "yarn rope": ("llama", {"rope_parameters": YARN}),
    "phi3 longrope": (
        "phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "phi3 sliding": ("phi3", {"sliding_window": 8}),
    "mixtral jitter": ("mixtral", {"router_jitter_noise": 0.1}),
    "phimoe jitter": ("phimoe", {"router_jitter_noise": 0.1}),
    "gpt2 dropout": ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "seed_oss dropout": ("seed_oss", {"attention_dropout": 0.1}),
    "mistral sliding": ("mistral", {"sliding_window": 8}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "qwen2 sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} | FULL_SLIDING,
    ),
    "qwen3 sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} | FULL_SLIDING,
    ),
    "cohere qk norm": ("cohere", {"use_qk_norm": True}),
    "deepseek_v2 groups": ("deepseek_v2", GROUPS | {"n_routed_experts": 8, "topk_method": "group_limited_greedy"}),
    "deepseek_v2 lite": ("deepseek_v2", {"q_lora_rank": None}),
    "opt post norm": ("opt", {"do_layer_norm_before": False}),
    "zamba2 adapters": ("zamba2", {"use_shared_attention_adapter": True, "num_key_value_heads": 4}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of this architecture with at most about 200 thousand weights and a vocabulary of 259."""
    model_type, changes = VARIANTS.get(model_type, (model_type, {}))
    if model_type in NOT_BUILT:
        raise ValueError(f"{model_type}: {NOT_BUILT[model_type]}")
    return _tiny(CONFIG_MAPPING[model_type], changes)


def _tiny(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    values: dict[str, Any] = {}
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    for name, default in fields.items():
        if name in COMMON:
            size = isinstance(default, int | float | list | tuple) and not isinstance(default, bool)
            if size or (default is None and name in ALSO_WHEN_NONE):
                values[name] = COMMON[name]
        elif name == "is_decoder":
            values[name] = True
        elif any(word in name for word in ("dropout", "pdrop", "layerdrop")) and isinstance(default, int | float):
            values[name] = type(default)(0)
    values |= copy.deepcopy(OVERRIDES.get(config_class.model_type, {})) | copy.deepcopy(changes)
    for name, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        within = values.get(name, {})
        if within is None:
            continue
        if sub_class is AutoConfig:
            if "model_type" not in within:
                continue  # a part that the model for text does not build
            sub_class = CONFIG_MAPPING[within.pop("model_type")]
        values[name] = _tiny(sub_class, within)
    return config_class(**values)
