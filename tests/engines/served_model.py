"""A tiny Qwen3 on disk with a tokenizer, the actor that trains it, and vLLM where there is one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import build_on_meta

VOCABULARY, MAX_LENGTH = 128, 1024
TOKENS = (torch.arange(48).view(3, 16) * 11 + 5) % VOCABULARY
PYTHON_VARIABLE = "SFUMATO_VLLM_PYTHON"

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        PYTHON_VARIABLE not in os.environ,
        reason=f"{PYTHON_VARIABLE} does not name the python of an environment with vLLM (for images torchvision, too)",
    ),
]
"""Marks of tests that run vLLM."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other tests run beside it
    "HF_HUB_OFFLINE": "1",
}


def vllm_program() -> str:
    return str(Path(os.environ[PYTHON_VARIABLE]).parent / "vllm")


def tokens_drawn(engine: Any) -> float:
    """How many a vLLM server has drawn since it was started."""
    text = engine.calls.http.ask("GET", "/metrics")
    return sum(float(value) for value in re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))


def tiny_config(tied: bool = False) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # distributions that differ from token to token
    )


def make_model(seed: int = 0, tied: bool = False) -> nn.Module:
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(tiny_config(tied)).eval()


def adapted_model(version: int = 0) -> nn.Module:
    """The initial model with adapters; those of a version but 0 change what it says."""
    from sfumato.config.sections import LoraConfig
    from sfumato.models.lora import add_lora

    module = make_model()
    module.requires_grad_(False)
    add_lora(module, LoraConfig(rank=4, alpha=8), ["q_proj", "v_proj", "down_proj"], seed=0)
    return moved(version, module)


def adapted_template() -> nn.Module:
    return adapted_model().to("meta")


def template(tied: bool = False) -> nn.Module:
    from transformers import Qwen3ForCausalLM

    return build_on_meta(lambda: Qwen3ForCausalLM(tiny_config(tied)))


def parts(
    model_path: Path | str, folder: Path | str, make: Callable[[], nn.Module] = template
) -> tuple[str, nn.Module, Path]:
    return str(model_path), make(), Path(folder)


def write_model(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(seed, tied).save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "t1", "eos_token": "t2", "unk_token": "t0", "pad_token": "t3"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def write_byte_model(folder: Path) -> Path:
    """A tiny Qwen3 that reads bytes, for runs of ``tasks/rl_text.py``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from sfumato.models.language.load import build_byte_tokenizer
    from tests.tiny import tiny_language_description

    described = {**tiny_language_description("qwen3"), "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    config = CONFIG_MAPPING["qwen3"](**{name: value for name, value in described.items() if name != "model_type"})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def log_probs(module: nn.Module, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Of each token but the first, float32 ``[N, T - 1]``."""
    logits = module(tokens).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def moved(version: int, module: nn.Module | None = None, seed: int = 0, tied: bool = False) -> nn.Module:
    """The model of a version: every trained weight other than in the one before, the initial one for version 0."""
    module = make_model(seed, tied) if module is None else module
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in module.parameters() if version else ():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return module


class Actor:
    """Sends the model of a version. ``damages`` has it send other weights than it rescores with."""

    def __init__(self, frozen: tuple[str, ...] = (), damages: bool = False, has_adapters: bool = False) -> None:
        self.frozen, self.damages, self.has_adapters = frozen, damages, has_adapters
        self.mesh, self.sync = Mesh(Layout(), torch.device("cpu")), None

    def model(self, version: int) -> nn.Module:
        if self.has_adapters:
            return adapted_model(version)
        module = make_model()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return moved(version, module)

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        yield self.model(version)

    @torch.no_grad()
    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        result = log_probs(module, tokens)
        if self.damages:
            module.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.5)
        return result


class Sampler:
    """Receives into an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.version, self.sync = engine, 0, None
        self.mesh = Mesh(Layout(), torch.device("cpu"))
