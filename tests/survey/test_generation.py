"""The embedded engine draws with every architecture of the survey as training computes it, or says why it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.errors import ConfigError
from sfumato.models.language.hf_config import can_set_attention
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe import probe
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import Completion, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from tests.survey.survey import LARGEST_LOG_PROB, MAX_SEQ_LEN, MODES, NAMES, _build, _configs, _module, _with_attention

pytestmark = pytest.mark.slow

PROMPTS, NEW = (17, 3, 30, 1), 20

NOT_TRAINED = {"cpmant", "git", "reformer", "mixtral jitter", "phimoe jitter", "gpt2 dropout", "seed_oss dropout"}
"""Training refuses them in its first mode."""
LOOK_AHEAD = {"doge", "prophetnet", "xlm"}
"""They look at later tokens, count padding among them (xlm), or choose keys among equals by the length of the row."""
STRETCHED = {"llama dynamic rope", "phi3 longrope"}
"""Their rotary positions depend on the length of the text, from 16 tokens on."""
IN_ROWS = {
    *(
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "mixtral",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "olmo3",
        "glm4",
    ),
    *("deepseek_v3", "phi3", "granite", "smollm3", "cohere2"),
}
"""At least these keep keys and values in rows, the fastest way."""
NOT_AS_THEIR_FORWARD = {
    *("bart", "blenderbot", "blenderbot-small", "blt", "camembert", "data2vec-text", "marian", "mbart", "pegasus"),
    *("plbart", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "moshi", "zamba2 adapters"),
    *("xlnet", "xlstm"),
}
"""Their ``generate`` counts positions otherwise than their forward pass, forces tokens, or fails."""


def _as_in_a_run(name: str) -> LanguageModel:
    model = _build(name, MODES[0], _module(name))
    config, train = _configs(MODES[0])
    model.parallelize(Mesh(Layout(), torch.device("cpu")), train)
    probe(model, config, train, MAX_SEQ_LEN, lambda *_: None)
    return model


def _training_log_probs(model: LanguageModel, request: GenerationRequest, drawn: Completion) -> torch.Tensor:
    tokens = np.array([*request.prompt_ids, *drawn.token_ids], np.int32)
    sample = TextSample((Document(tokens, np.arange(len(tokens)) >= len(request.prompt_ids)),))
    batch = make_batch([sample], [0], [0], True, 0, 1)
    return model.token_log_probs([batch])[0][batch.labels != IGNORED]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_is_what_training_computes(name: str) -> None:
    if name in NOT_TRAINED:
        with pytest.raises(ConfigError):
            _as_in_a_run(name)
        return
    model = _as_in_a_run(name)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, 250, size=length).tolist() for length in PROMPTS]
    requests = [GenerationRequest(prompt, seed, NEW) for seed, prompt in enumerate(2 * prompts)]
    if name in STRETCHED:
        with pytest.raises(ConfigError, match="above 16 tokens: beyond these all rotary positions"):
            EmbeddedEngine(model.plain, max_length=MAX_SEQ_LEN)
        return
    engine = EmbeddedEngine(model.plain, max_length=MAX_SEQ_LEN, around=model.autocast)
    if name in LOOK_AHEAD:
        with pytest.raises(ConfigError, match="how many tokens follow"):
            complete_requests(engine, requests, Sampling())
        return
    result = complete_requests(engine, requests, Sampling())
    for request, one in zip(requests, result, strict=True):
        far = (_training_log_probs(model, request, one) - torch.tensor(one.log_probs)).abs().max()
        assert float(far) < LARGEST_LOG_PROB
    few = EmbeddedEngine(model.plain, max_length=MAX_SEQ_LEN, around=model.autocast, max_batch_size=3)
    assert [sequence.token_ids for sequence in complete_requests(few, requests, Sampling())] == [
        sequence.token_ids for sequence in result
    ]
    assert name not in IN_ROWS or type(engine._rows).__name__ == "CachedRows"
    if name not in NOT_AS_THEIR_FORWARD:
        greedy = complete_requests(engine, requests[: len(prompts)], Sampling(temperature=0.0))
        assert [sequence.token_ids for sequence in greedy] == [_generated(name, model, prompt) for prompt in prompts]


def _generated(name: str, model: LanguageModel, prompt: list[int]) -> list[int]:
    # a model with an attention of its own has others, too, which need not agree with each other
    attention = "eager" if can_set_attention(model.plain) else model.attention
    plain = _with_attention(name, _module(name), attention).eval()
    plain.generation_config = GenerationConfig()  # no token is forced, or kept from ending a text
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    prompt_ids = torch.tensor([prompt])
    result = plain.generate(
        prompt_ids, attention_mask=torch.ones_like(prompt_ids), generation_config=GenerationConfig(**settings)
    )
    return result[0, len(prompt) :].tolist()
