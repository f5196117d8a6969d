"""Recipes: published settings as presets of an RL algorithm's parts. Any field can be overridden.

Named after the paper, for Stable Diffusion 3.5 Medium; a suffix names another model. Each entry gives its source and,
where it matters, what else was published with it; settings of model, batch and optimiser stand in the YAML files of
``configs/rl``.
"""

from __future__ import annotations

_NO_KL = {"type": "none"}
_GLOBAL = {"type": "group", "std": "global", "clip": 5.0}
_GROUP = {"type": "group", "std": "group", "clip": 5.0}
_DANCE = {"type": "group", "std": "group", "clip": 5.0, "ddof": 1, "eps": 1e-8}
_FINAL = {"solver": {"type": "euler"}, "sample_with": "policy", "kl": _NO_KL}
_CLIPPED = {"advantage": _GLOBAL, "objective": {"type": "clipped_ratio", "clip_range": 1e-4}, "kl": _NO_KL}

TRAJECTORY_RECIPES: dict[str, dict[str, object]] = {
    # Flow-GRPO, arXiv 2505.05470; flow_grpo config/grpo.py, general_ocr_sd3: 10 steps, guidance 4.5, groups of 24.
    # coef 0.01 for PickScore, 0.02 for CLIPScore
    "flow_grpo": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "all"},
        "kl": {"type": "flow_grpo", "coef": 0.04},
    },
    # Flow-GRPO-Fast: flow_grpo README and config/grpo.py, pickscore_sd3_fast family: a short window, no KL.
    # With guidance 4.5 it is reported to collapse (flow_grpo issues 182, 192, 224); guidance 1 is stable
    "flow_grpo_fast": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "random", "size": 3, "range": [0, 5]},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-5},
    },
    # Flow-CPS, arXiv 2509.05952; flow_grpo config/grpo.py, geneval_sd3_fast_nocfg: 10 steps, guidance 1
    "flow_cps": {
        **_CLIPPED,
        "dynamics": {"type": "cps", "noise_level": 0.8},
        "window": {"type": "random", "size": 3, "range": [0, 5]},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-5},
    },
    # flow_grpo config/grpo.py, pickscore_flux and counting_flux_kontext: 6 steps, guidance 3.5 (Kontext 2.5)
    "flow_grpo_flux": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 0.9},
        "window": {"type": "all"},
    },
    # flow_grpo config/grpo.py, pickscore_qwenimage: 10 steps, guidance 4, groups of 16
    "flow_grpo_qwen_image": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 1.2},
        "window": {"type": "random", "size": 2, "range": [0, 5]},
    },
    # flow_grpo config/grpo.py, counting_qwenimage_edit; _fast has noise 1.5 and a random window of 4 in [0, 5]
    "flow_grpo_qwen_image_edit": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 1.0},
        "window": {"type": "all"},
    },
    # flow_grpo config/grpo.py, general_ocr_wan2_1: 20 steps, guidance 4.5, groups of 4, 240 x 416 x 33 frames, lr 1e-4
    "flow_grpo_wan": {
        "dynamics": {"type": "wan"},
        "window": {"type": "all"},
        "advantage": _GROUP,
        "objective": {"type": "clipped_ratio", "clip_range": 1e-3},
        "kl": {"type": "gaussian", "coef": 0.004},
    },
    # flow_grpo config/grpo.py, geneval_flux_fast: 6 steps, guidance 3.5
    "flow_cps_flux": {
        **_CLIPPED,
        "dynamics": {"type": "cps", "noise_level": 0.8},
        "window": {"type": "random", "size": 3, "range": [0, 3]},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-5},
    },
    # MixGRPO, arXiv 2507.21802; fastvideo/utils/grpo_states.py, for FLUX: 25 steps, of which [0, 23] are slid over,
    # groups of 12, lr 1e-5
    "mix_grpo": {
        **_CLIPPED,
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "sliding", "size": 4, "iters_per_group": 25, "stride": 1, "roll_back": True},
        "advantage": _DANCE,
    },
    # GRPO-Guard, arXiv 2510.22319; flow_grpo config/grpo_guard.py, general_ocr_sd3_rationorm: guidance 4.5, lr 1e-4;
    # clip_range 4e-6 for PickScore
    "grpo_guard": {
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "all"},
        "advantage": _GROUP,
        "objective": {"type": "guard", "clip_range": 2e-6},
        "kl": _NO_KL,
    },
    # DanceGRPO, arXiv 2505.07818; train_grpo_flux.py: 720 x 720, 16 steps, shift 3, groups of 12 from one latent
    # (rollout.same_latent), lr 1e-5. 60 % of the steps are trained; here the others are deterministic, too
    "dance_grpo": {
        **_CLIPPED,
        "dynamics": {"type": "dance", "noise_level": 0.3},
        "window": {"type": "subset", "size": 9},
        "advantage": _DANCE,
    },
    # DanceGRPO for HunyuanVideo: 480 x 480 x 53 frames, 16 steps, shift 5, groups of 24
    "dance_grpo_hunyuan_video": {
        **_CLIPPED,
        "dynamics": {"type": "dance", "noise_level": 0.25},
        "window": {"type": "subset", "size": 9},
        "advantage": {"type": "best_worst", "top": 4, "bottom": 4, "values": "group", "clip": 5.0},
    },
    # Flow-DPPO, arXiv 2606.11025; its threshold with Flow-GRPO's other parts for SD3.5-M
    "dppo": {
        "dynamics": {"type": "sde", "noise_level": 0.7},
        "window": {"type": "all"},
        "advantage": {**_GLOBAL, "ddof": 1},
        "objective": {"type": "dppo", "kl_threshold": 1e-5},
        "kl": _NO_KL,
    },
    # Flow-DPPO; verl-omni examples/flowdppo_trainer/qwen_image: guidance 4, groups of 16, LoRA rank 64
    "dppo_qwen_image": {
        "dynamics": {"type": "sde", "noise_level": 1.2},
        "window": {"type": "random", "size": 2, "range": [0, 5]},
        "advantage": {**_GLOBAL, "ddof": 1},
        "objective": {"type": "dppo", "kl_threshold": 1e-5},
        "kl": _NO_KL,
    },
    # DDPO, arXiv 2305.13301, for Stable Diffusion 1.5: 50 steps of DDIM with eta 1, guidance 5; ddpo-pytorch
    # config/base.py and dgx.py: LoRA, lr 1e-4, or all weights, lr 3e-5. Its statistics of each prompt are those of its
    # last 16 samples; here those of the iteration's, so take groups of 16
    "ddpo": {
        **_CLIPPED,
        "dynamics": {"type": "ddim", "eta": 1.0},
        "window": {"type": "all"},
        "advantage": {"type": "group", "std": "group", "clip": 10.0, "eps": 1e-6},
    },
    # DPOK, arXiv 2305.16381, for Stable Diffusion 1.5; google-research dpok/train_online_pg.py and README: 50 steps of
    # DDIM with eta 1, guidance 7.5, LoRA rank 4, lr 1e-5, max_grad_norm 0.1. Weights 10 of the reward (less a learned
    # value, here the group's mean) and 0.01 of the KL make a coef of 0.001; for many prompts 1000 and 0.1 make 0.0001.
    # The KL is the paper's, of the steps; the code takes the squared difference of the predicted noise for it
    "dpok": {
        "dynamics": {"type": "ddim", "eta": 1.0},
        "window": {"type": "all"},
        "advantage": {"type": "group", "std": "none", "clip": 5.0},
        "objective": {"type": "clipped_ratio", "clip_range": 1e-4},
        "kl": {"type": "gaussian", "coef": 0.001},
    },
}

FORWARD_RECIPES: dict[str, dict[str, object]] = {
    # DiffusionNFT, arXiv 2509.16117; config/nft.py, sd3_geneval and sd3_pickscore: 10 steps, guidance 1, 48 groups of
    # 24, LoRA 32 / 64, lr 3e-4. OCR: beta 0.1 and old {slope 0.0075, limit 0.999, start 75}; several rewards: beta 0.1
    "diffusion_nft": {
        **_FINAL,
        "solver": {"type": "dpm2"},
        "advantage": _GLOBAL,
        "objective": {"type": "nft", "beta": 1.0, "advantage_clip": 5.0, "advantage_mode": "all"},
        "timesteps": {"type": "sampler_grid", "num": 9},
        "kl": {"type": "velocity_mse", "coef": 1e-4},
        "old": {"type": "linear", "slope": 0.001, "limit": 0.5},
        "sample_with": "old",
    },
    # AWM, arXiv 2509.25050; config/dgx_awm.py, ocr_sd3_no_cfg: 14 steps of SA-Solver, guidance 1, groups of 24,
    # lr 3e-4; PickScore: kl coef 1e-4 and first 0. SA-Solver is replaced by DPM-Solver++
    "awm": {
        **_FINAL,
        "solver": {"type": "dpm2"},
        "advantage": _GLOBAL,
        "objective": {"type": "awm", "weighting": "ghuber", "power": 0.25, "clip_range": 1.0, "ema_coef": 1.0},
        "timesteps": {"type": "sampler_grid", "num": 6, "first": 1, "fraction": 0.9, "stratified": True},
        "kl": {"type": "velocity_mse", "coef": 0.003},
        "old": {"type": "constant", "value": 0.0},
        "ema": {"type": "linear", "slope": 0.001, "limit": 0.3},
    },
    # Flow-DPO online; flow_grpo scripts/train_sd3_dpo.py, config/dpo.py: 40 steps, guidance 4.5, groups of 24
    "flow_dpo": {
        **_FINAL,
        "advantage": {"type": "best_worst", "top": 1, "bottom": 1},
        "objective": {"type": "dpo", "beta": 100.0},
        "timesteps": {"type": "logit_normal", "num": 1},
        "reference": {"type": "refresh", "every": 40},
    },
    # Diffusion-DPO, arXiv 2311.12908, here from the policy's own pairs: the reference never moves, beta is
    # Flow-Factory's default for flows
    "diffusion_dpo": {
        **_FINAL,
        "advantage": {"type": "best_worst", "top": 1, "bottom": 1},
        "objective": {"type": "dpo", "beta": 2000.0},
        "timesteps": {"type": "logit_normal", "num": 1},
    },
    # DGPO, arXiv 2510.08425; its config/dgpo.py, pickscore_sd3_4gpu, as Flow-Factory gives it: 10 steps, guidance 4.5,
    # 24 groups of 24, LoRA 64 / 128, lr 3e-4
    "dgpo": {
        **_FINAL,
        "advantage": _GLOBAL,
        "objective": {"type": "dgpo", "beta": 10.0, "clip_range": 5e-2},
        "timesteps": {"type": "sampler_grid", "num": 4, "fraction": 0.7},
        "kl": {"type": "velocity_mse", "coef": 0.001},
        "old": {"type": "linear", "slope": 0.001, "limit": 0.3},
    },
    # CRD, arXiv 2603.14128, table 3 (OCR), as Flow-Factory examples/crd gives it: 10 steps, guidance 1, 48 groups of
    # 24, two updates, lr 3e-4. Its sampling policy has a decay of its own, here in the place of the averaged one
    "crd": {
        **_FINAL,
        "advantage": _GLOBAL,
        "objective": {"type": "crd", "beta": 1.0, "form": "mse", "adaptive": True, "advantage_clip": 5.0},
        "timesteps": {"type": "sampler_grid", "num": 9},
        "kl": {"type": "velocity_mse", "coef": 0.1, "floor": 1e-4, "reference_guidance_scale": 4.5},
        "old": {"type": "linear", "first": 0.25, "slope": 0.005, "limit": 0.999},
        "ema": {"type": "linear", "start": 75, "slope": 0.0075, "limit": 0.999},
        "sample_with": "ema",
    },
    # Reward-weighted regression; flow_grpo scripts/train_sd3_sft.py, algorithm rwr: 40 steps, guidance 4.5. Its config
    # has a KL factor of 100
    "rwr": {
        **_FINAL,
        "advantage": {"type": "raw"},
        "objective": {"type": "rwr"},
        "timesteps": {"type": "logit_normal", "num": 1},
        "kl": {"type": "velocity_mse", "coef": 100.0},
        "drop_no_spread": False,
    },
    # Best-of-n SFT; flow_grpo scripts/train_sd3_sft.py, config/sft.py: 40 steps, guidance 4.5, groups of 24
    "sft": {
        **_FINAL,
        "advantage": {"type": "best", "leave_out": False},
        "objective": {"type": "sft"},
        "timesteps": {"type": "logit_normal", "num": 1},
        "kl": {"type": "velocity_mse", "coef": 100.0},
        "drop_no_spread": False,
    },
}

DIRECT_RECIPES: dict[str, dict[str, object]] = {
    # DRaFT-1, arXiv 2309.17400: 50 steps of DDIM, guidance 7.5, LoRA, batch 4, lr 4e-4 with decay; k 1 of K in 1, 5, 10
    # was the best
    "draft": {"steps": {"type": "last", "k": 1}, "solver": {"type": "euler"}},
    # AlignProp, arXiv 2310.03739: 50 steps, K uniform in 0 to 50, guidance 7.5, LoRA, batch 128, lr 1e-3
    "align_prop": {"steps": {"type": "random_last", "max_k": 50}, "solver": {"type": "euler"}},
    # ReFL, arXiv 2304.05977; ImageReward ImageReward/ReFL.py: 40 steps, one of the last 10, loss max(2 - reward, 0)
    # times 1e-3, lr 1e-5, beside the loss of pretraining on images
    "refl": {"steps": {"type": "predicted", "last": 10}, "solver": {"type": "euler"}, "reward_limit": 2.0},
    # SRPO, arXiv 2509.06942; Tencent-Hunyuan/SRPO scripts/finetune/SRPO_training_hpsv2.sh: FLUX.1, all weights, 720 x
    # 720, 25 steps, lr 5e-6, gradients clipped at 0.1, 32 samples, loss max(0.7 - reward, 0) with HPSv2.1
    "srpo": {
        "steps": {"type": "direct_align"},
        "solver": {"type": "euler"},
        "reward_limit": 0.7,
        "control_words": ["Realistic photo.", "CG render."],
    },
}

DIFFUSION_RECIPES = TRAJECTORY_RECIPES | FORWARD_RECIPES
