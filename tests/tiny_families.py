"""Tiny pipelines of every diffusion model family, as descriptions that ``model.config_path`` takes."""

from __future__ import annotations

from typing import Any

from tests.tiny import tiny_pipeline_description


def tiny_sd3() -> dict[str, Any]:
    """Stable Diffusion 3.5 without dual attention, for images of up to 64 pixels."""
    description = tiny_pipeline_description()
    description["transformer"] |= {"pos_embed_max_size": 32}
    return description


def tiny_flux() -> dict[str, Any]:
    """FLUX.1 dev: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens; one block of each kind more than one."""
    return {
        "pipeline": "FluxPipeline",
        "transformer": {
            "patch_size": 1,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "guidance_embeds": True,
            "axes_dims_rope": [2, 2, 4],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4, "scaling_factor": 0.36, "shift_factor": 0.11},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "t5": {"width": 16, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write", '"'], "max_length": 8},
        "scheduler": {"use_dynamic_shifting": True, "shift": 3.0},
    }


def tiny_flux_schnell() -> dict[str, Any]:
    """FLUX.1 schnell: no guidance inside, no shift."""
    description = tiny_flux()
    description["transformer"] = {**description["transformer"], "guidance_embeds": False}
    return {**description, "scheduler": {"shift": 1.0}}


def tiny_flux_kontext() -> dict[str, Any]:
    """FLUX.1 Kontext."""
    return {**tiny_flux(), "pipeline": "FluxKontextPipeline"}


def tiny_flux_fill() -> dict[str, Any]:
    """FLUX.1 Fill."""
    return {**tiny_flux(), "pipeline": "FluxFillPipeline"}


def tiny_stable_diffusion() -> dict[str, Any]:
    """Stable Diffusion 1.5: 16x16 pixels are 4 x 8 x 8 latents; attention at one of two levels."""
    return {
        "pipeline": "StableDiffusionPipeline",
        "unet": {
            "sample_size": 8,
            "block_out_channels": [16, 32],
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": 2,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4, "scaling_factor": 0.18215},
        "text_encoder": {"width": 16, "num_layers": 2, "num_heads": 2},
        "tokenizer": {"words": ["write", '"'], "max_length": 8},
        "scheduler": {"set_alpha_to_one": True},
    }


def tiny_stable_diffusion_2() -> dict[str, Any]:
    """Stable Diffusion 2 as others went on training it: v prediction from pure noise."""
    scheduler = {
        "set_alpha_to_one": True,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    description = tiny_stable_diffusion()
    return {**description, "unet": {**description["unet"], "use_linear_projection": True}, "scheduler": scheduler}


def tiny_stable_diffusion_xl() -> dict[str, Any]:
    """Stable Diffusion XL."""
    return {**tiny_stable_diffusion(), "pipeline": "StableDiffusionXLPipeline"}


def tiny_wan() -> dict[str, Any]:
    """Wan 2.1: 16x16 pixels in 5 frames are 4 x 2 x 4 x 4 latents and 8 tokens."""
    return {
        "pipeline": "WanPipeline",
        "transformer": {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        "vae": {"channels": 8, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write"]},
        "scheduler": {"flow_shift": 3.0},
    }


def tiny_wan_pair() -> dict[str, Any]:
    """Wan 2.2 A14B: two transformers."""
    return {**tiny_wan(), "transformer_2": {}, "boundary_ratio": 0.875}


def tiny_wan_small() -> dict[str, Any]:
    """Wan 2.2 5B: timesteps of tokens, an autoencoder that folds pixels and has shortcuts."""
    return {**tiny_wan(), "expand_timesteps": True, "vae": {"channels": 8, "patch_size": 2, "residual": True}}


def tiny_wan_image() -> dict[str, Any]:
    """Wan 2.1 from a first frame, which CLIP sees too. It needs 512 tokens of text."""
    vision = {"width": 16, "num_layers": 2, "num_heads": 2}
    return {**tiny_wan(), "pipeline": "WanImageToVideoPipeline", "image_encoder": vision}


def tiny_wan_first_last() -> dict[str, Any]:
    """Wan 2.1 from a first and a last frame, which CLIP sees in 5 tokens each."""
    description = tiny_wan_image()
    return {**description, "transformer": {**description["transformer"], "pos_embed_seq_len": 10}}


def tiny_wan_image_pair() -> dict[str, Any]:
    """Wan 2.2 A14B from a first frame."""
    return {**tiny_wan_pair(), "pipeline": "WanImageToVideoPipeline"}


def tiny_wan_image_small() -> dict[str, Any]:
    """Wan 2.2 5B from a first frame."""
    return {**tiny_wan_small(), "pipeline": "WanImageToVideoPipeline"}


def tiny_qwen_image() -> dict[str, Any]:
    """Qwen-Image: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens."""
    return {
        "pipeline": "QwenImagePipeline",
        "transformer": {
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "axes_dims_rope": [2, 2, 4],
        },
        "vae": {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.1]},
        "text_encoder": {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "tokenizer": {"words": ["write", '"']},
        "scheduler": {"use_dynamic_shifting": True, "max_shift": 0.9, "shift_terminal": 0.02},
    }


def tiny_qwen_image_edit() -> dict[str, Any]:
    """Qwen-Image-Edit."""
    return {**tiny_qwen_image(), "pipeline": "QwenImageEditPipeline", "processor": {"min_pixels": 784}}


def tiny_qwen_image_edit_plus() -> dict[str, Any]:
    """Qwen-Image-Edit-2511: the tokens of the given image are modulated as those of a clean one."""
    description = {**tiny_qwen_image_edit(), "pipeline": "QwenImageEditPlusPipeline"}
    description["transformer"] = {**description["transformer"], "zero_cond_t": True}
    return description


def tiny_z_image() -> dict[str, Any]:
    """Z-Image: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens, which it pads to 32; prompts have a token a letter."""
    return {
        "pipeline": "ZImagePipeline",
        "transformer": {
            "dim": 48,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 4,
            "axes_dims": [4, 4, 4],
            "axes_lens": [128, 32, 32],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4, "scaling_factor": 0.36, "shift_factor": 0.11},
        "text_encoder": {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "scheduler": {"shift": 3.0},
    }


def tiny_flux2_klein() -> dict[str, Any]:
    """FLUX.2 klein: 16x16 pixels are 16 x 4 x 4 latents, each of them a token. Its encoder must have 27 layers."""
    return {
        "pipeline": "Flux2KleinPipeline",
        "transformer": {
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "axes_dims_rope": [2, 2, 2, 2],
            "timestep_guidance_channels": 16,
            "guidance_embeds": False,
        },
        "vae": {"channels": [8, 16], "norm_groups": 4},
        "text_encoder": {"width": 16, "num_layers": 27, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"', "user", "assistant", "think"]},
        "scheduler": {"use_dynamic_shifting": True, "shift": 3.0},
    }


def tiny_chroma() -> dict[str, Any]:
    """Chroma: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens."""
    return {
        "pipeline": "ChromaPipeline",
        "transformer": {
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "axes_dims_rope": [2, 2, 4],
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        "vae": {"channels": [8, 16], "norm_groups": 4, "scaling_factor": 0.36, "shift_factor": 0.11},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write"]},
        "scheduler": {"use_dynamic_shifting": True},
    }


def tiny_lumina2() -> dict[str, Any]:
    """Lumina-Image 2: 32x32 pixels are 4 x 4 x 4 latents and 4 tokens, since its pipeline counts on an eighth."""
    return {
        "pipeline": "Lumina2Pipeline",
        "transformer": {
            "sample_size": 4,
            "hidden_size": 48,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": [4, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        "vae": {"channels": [4, 4, 8, 8], "norm_groups": 4, "scaling_factor": 0.36, "shift_factor": 0.11},
        "text_encoder": {"width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", "assistant", "superior", "images", "prompts", "designed", "alignment"]},
    }


def tiny_sana() -> dict[str, Any]:
    """Sana 1.5: 32x32 pixels are 4 x 4 x 4 latents, each of them a token; its pipeline takes multiples of 32."""
    return {
        "pipeline": "SanaPipeline",
        "transformer": {
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 32,
            "qk_norm": "rms_norm_across_heads",
        },
        "vae": {"channels": [8, 8, 8, 16], "scaling_factor": 0.41},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", "prompt", "Enhanced", "description", "details"]},
    }


def tiny_ernie_image() -> dict[str, Any]:
    """ERNIE-Image: 16x16 pixels are 16 x 4 x 4 latents, each of them a token."""
    return {
        "pipeline": "ErnieImagePipeline",
        "transformer": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "rope_axes_dim": [4, 2, 2],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4},
        "text_encoder": {"width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"']},
        "scheduler": {"shift": 3.0},
    }


def tiny_krea2() -> dict[str, Any]:
    """Krea 2: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens."""
    return {
        "pipeline": "Krea2Pipeline",
        "transformer": {
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "timestep_embed_dim": 16,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": [4, 2, 2],
        },
        "vae": {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.1]},
        "text_encoder": {"width": 32, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"']},
        "text_encoder_select_layers": [1, 2],
    }


def tiny_qwen_image21() -> dict[str, Any]:
    """Qwen-Image 2.1: 32x32 pixels are 4 x 2 x 2 latents, each of them a token; its encoder has a place for four."""
    return {
        "pipeline": "QwenImage21Pipeline",
        "transformer": {
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "axes_dims_rope": [2, 2, 4],
        },
        "vae": {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 2.0, 1.1]},
        "text_encoder": {"width": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"']},
        "scheduler": {"use_dynamic_shifting": True, "max_shift": 0.9},
    }


def tiny_ideogram4() -> dict[str, Any]:
    """Ideogram 4: 16x16 pixels are 16 x 4 x 4 latents, each of them a token. Its encoder must have 36 layers."""
    return {
        "pipeline": "Ideogram4Pipeline",
        "transformer": {
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "adaln_dim": 16,
            "mrope_section": [2, 2, 2],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4},
        "text_encoder": {"width": 16, "num_layers": 36, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"', "user", "assistant"]},
    }


def tiny_kandinsky5() -> dict[str, Any]:
    """Kandinsky 5: 32x32 pixels are 4 x 4 x 4 latents and 4 tokens, since its pipeline counts on an eighth."""
    return {
        "pipeline": "Kandinsky5T2IPipeline",
        "transformer": {
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 48,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": [4, 6, 6],
        },
        "vae": {"channels": [4, 4, 8, 8], "norm_groups": 4, "scaling_factor": 0.36},
        "text_encoder": {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "text_encoder_2": {"width": 16, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write", '"']},
        "scheduler": {"shift": 3.0},
    }


def tiny_kandinsky5_image() -> dict[str, Any]:
    """Kandinsky 5 that edits: the source's latents are channels behind those of the picture."""
    description = tiny_kandinsky5()
    return description | {
        "pipeline": "Kandinsky5I2IPipeline",
        "transformer": {**description["transformer"], "visual_cond": True},
    }


def tiny_kandinsky5_video() -> dict[str, Any]:
    """Kandinsky 5 with videos: 32x48 pixels in 5 frames are 4 x 2 x 4 x 6 latents and 12 tokens."""
    description = tiny_kandinsky5()
    return description | {
        "pipeline": "Kandinsky5T2VPipeline",
        "transformer": {**description["transformer"], "visual_cond": True},
        "vae": {"scaling_factor": 0.7},
    }


def tiny_kandinsky5_video_image() -> dict[str, Any]:
    """Kandinsky 5 from a first frame: 32x48 pixels in 17 frames are 4 x 5 x 4 x 6 latents and 30 tokens."""
    return {**tiny_kandinsky5_video(), "pipeline": "Kandinsky5I2VPipeline"}


def tiny_hidream() -> dict[str, Any]:
    """HiDream-I1: 16x16 pixels are 4 x 8 x 8 latents and 16 tokens; other shapes are filled up to 128 tokens."""
    return {
        "pipeline": "HiDreamImagePipeline",
        "transformer": {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "axes_dims_rope": [8, 4, 4],
            "max_resolution": [16, 32],
            "llama_layers": [0, 1],
        },
        "vae": {"channels": [8, 16], "norm_groups": 4, "scaling_factor": 0.36, "shift_factor": 0.11},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "text_encoder_2": {"width": 16, "num_layers": 1, "num_heads": 2},
        "text_encoder_3": {"width": 16, "num_layers": 1, "num_heads": 2},
        "text_encoder_4": {"width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"']},
        "scheduler": {"use_dynamic_shifting": True},
    }


def tiny_flux2() -> dict[str, Any]:
    """FLUX.2 dev: klein with the guidance scale as an input. Its encoder must have 30 layers."""
    description = tiny_flux2_klein()
    words = "user system You are an AI that reasons about image descriptions give structured responses focusing on"
    return description | {
        "pipeline": "Flux2Pipeline",
        "transformer": {**description["transformer"], "guidance_embeds": True},
        "text_encoder": {"width": 16, "num_layers": 30, "num_heads": 2, "num_kv_heads": 1},
        "tokenizer": {"words": ["write", '"', *words.split(), "object", "relationships", "attribution", "speculation"]},
    }


def tiny_sana_video() -> dict[str, Any]:
    """Sana-Video: 32x32 pixels in 5 frames are 4 x 2 x 8 x 8 latents and 32 tokens."""
    transformer = {**tiny_sana()["transformer"], "num_attention_heads": 2, "attention_head_dim": 16}
    return {
        **tiny_sana(),
        "pipeline": "SanaVideoPipeline",
        "transformer": {**transformer, "rope_max_seq_len": 32},
        "vae": {"channels": 8, "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]},
    }


def tiny_cogvideox() -> dict[str, Any]:
    """CogVideoX 5B: 16x16 pixels in 5 frames are 4 x 2 x 4 x 4 latents and 8 tokens."""
    return {
        "pipeline": "CogVideoXPipeline",
        "transformer": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "time_embed_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 7,
            "use_rotary_positional_embeddings": True,
        },
        "vae": {"scaling_factor": 0.7},
        "text_encoder": {"width": 16, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write"]},
    }


def tiny_cogvideox_image() -> dict[str, Any]:
    """CogVideoX 1.5 from a first frame."""
    description = tiny_cogvideox()
    description["transformer"] |= {"ofs_embed_dim": 16}
    description["vae"] |= {"invert_scale_latents": True}
    return {**description, "pipeline": "CogVideoXImageToVideoPipeline"}


def tiny_hunyuan_video15() -> dict[str, Any]:
    """HunyuanVideo 1.5: 16x16 pixels in 5 frames are 4 x 2 x 4 x 4 latents and 32 tokens."""
    return {
        "pipeline": "HunyuanVideo15Pipeline",
        "transformer": {
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "image_embed_dim": 8,
            "rope_axes_dim": [4, 6, 6],
            "task_type": "t2v",
        },
        "vae": {"scaling_factor": 0.7},
        "text_encoder": {"width": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1},
        "text_encoder_2": {"width": 8, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write"]},
        "scheduler": {"shift": 3.0},
    }


def tiny_hunyuan_video15_image() -> dict[str, Any]:
    """HunyuanVideo 1.5 from a first frame."""
    description = tiny_hunyuan_video15()
    del description["transformer"]["image_embed_dim"], description["transformer"]["task_type"]
    vision = {"width": 8, "num_layers": 1, "num_heads": 2}
    return {**description, "pipeline": "HunyuanVideo15ImageToVideoPipeline", "image_encoder": vision}


def tiny_hunyuan_image() -> dict[str, Any]:
    """HunyuanImage 2.1: 16x16 pixels are 4 x 8 x 8 latents, each of them a token."""
    return {
        "pipeline": "HunyuanImagePipeline",
        "transformer": {
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "rope_axes_dim": [8, 8],
        },
        "vae": {"scaling_factor": 0.7},
        "text_encoder": {"width": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1},
        "text_encoder_2": {"width": 8, "num_layers": 1, "num_heads": 2},
        "tokenizer": {"words": ["write"]},
        "scheduler": {"shift": 3.0},
    }


def tiny_ltx2() -> dict[str, Any]:
    """LTX-2: a frame of 32 x 32 pixels is 8 x 8 tokens, and its sound one."""
    return {
        "pipeline": "LTX2Pipeline",
        "transformer": {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
        },
        "text_encoder": {"width": 32},
        "tokenizer": {"words": ["write"]},
    }


def tiny_ltx23() -> dict[str, Any]:
    """LTX-2.3: gated attention, text modulated and projected for each part, and a vocoder in two stages."""
    description = tiny_ltx2()
    description["transformer"] |= {
        "gated_attn": True,
        "audio_gated_attn": True,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "perturbed_attn": True,
        "rope_type": "split",
    }
    return description | {"connectors": {"sound_width": 16}, "vocoder": {"extends_bandwidth": True}}
