"""Every tiny configuration is small, and its model gives finite logits for one token and for a short document."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.survey.tiny_configs import NOT_BUILT, VARIANTS, VOCABULARY, tiny_config

pytestmark = pytest.mark.slow

KNOWN = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]  # an older transformers knows fewer
NAMES = [name for name in KNOWN if name not in NOT_BUILT] + [name for name in VARIANTS if VARIANTS[name][0] in KNOWN]
LARGEST = 300_000


@pytest.mark.parametrize("name", NAMES)
def test_model_is_small_and_gives_finite_logits(name: str) -> None:
    config = tiny_config(name)
    with torch.device("meta"):  # a size that is wrong must not fill the memory
        shapes = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert sum(weight.numel() for weight in shapes.parameters()) <= LARGEST
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager").eval()
        for length in (1, 24):
            ids = torch.randint(1, VOCABULARY, (1, length))
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits
            assert logits.shape == (1, length, VOCABULARY)
            assert torch.isfinite(logits).all()


def test_every_architecture_is_built_or_listed() -> None:
    assert not [name for name in KNOWN if name not in NOT_BUILT and name not in CONFIG_MAPPING]
    with pytest.raises(ValueError, match="codebooks"):
        tiny_config("musicgen")
