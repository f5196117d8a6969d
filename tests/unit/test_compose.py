"""Joining an encoder and a language model: what the language model says within the whole is what it says alone."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from sfumato.errors import ConfigError
from sfumato.models.omni.load import compose

TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 1.0,
}


def encoder() -> SiglipVisionModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=8, vision_use_head=False))


@pytest.mark.parametrize("attention", ["packed", "eager"])
def test_another_kernel_for_attention_is_no_other_model(attention: str) -> None:
    """In a deep model logits near 0 move by more than a fraction of themselves."""
    torch.manual_seed(0)
    module, make = compose(encoder(), LlamaForCausalLM(LlamaConfig(**TEXT)), 299, attention)
    assert set(module.state_dict()) == set(make().state_dict())


def test_a_model_whose_class_scales_its_logits_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="GraniteForCausalLM computes other logits without its own class"):
        compose(encoder(), GraniteForCausalLM(GraniteConfig(**TEXT, logits_scaling=4.0)), 299, "packed")
