"""Encoders of prompts are run on meta, where values of tokens and positions cannot be looked at."""

import torch

from sfumato.models.estimate.frozen_passes import _encode
from sfumato.models.estimate.peak_memory import peak_bytes


def test_the_encoder_of_qwen_image_2_1_is_run_on_meta():
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    )  # fmt: skip
    with torch.device("meta"):
        encoder = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        short, long = (peak_bytes(lambda length=length: _encode(encoder, length, length)) for length in (100, 400))
    # 64 tokens of the template besides: between linear and quadratic in 164 and 464 tokens
    assert 464 / 164 < long / short < (464 / 164) ** 2
