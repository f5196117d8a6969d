"""Digests that identify encoders: of weights, configurations and tokenizers, and of their output for an example."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.models.diffusion.base import DiffusionModel

UNSAID = {"transformers_version"}
"""Entries of configurations that do not change what a module computes; so do names that begin with ``_``, such as that
of the folder."""

THREADS = 4
"""Tensors that are hashed at the same time."""


@dataclass(frozen=True)
class EncoderIdentity:
    """Digests of the encoders of a model."""

    latents: str
    """Of the autoencoder, which makes latents."""
    prompts: str
    """Of the text encoders and tokenizers, which make embeddings of prompts."""


def identify_encoders(model: DiffusionModel) -> EncoderIdentity:
    """Identifies the encoders of a model by everything that can change their output.

    The output for an example changes with kernels and precision. The weights are hashed too, since the example does not
    reach all of them, such as the embedding of a token that was added.
    """
    probe = model.probe_content()
    image = probe[0].permute(1, 2, 0).numpy() if model.takes_image else None
    if image is not None and model.least_source_images > 1:
        image = np.stack([image] * model.least_source_images)
    latents = [_digest_tensor(model.encode_pixels(probe))]
    # The empty prompt, too: what stands for it may be a setting of the pipeline, as of Stable Diffusion XL.
    embedded = [
        model.encode_prompts([prompt], False, None if image is None else [image]).tensors for prompt in ("a probe", "")
    ]
    prompts = [[name, _digest_tensor(tensor)] for tensors in embedded for name, tensor in sorted(tensors.items())]
    modules = model.components
    autoencoder = {name: _describe_module(modules[name]) for name in model.autoencoder_names if name in modules}
    encoders = {name: _describe_module(modules[name]) for name in model.encoder_names if name in modules}
    processors = {
        name: _describe_processor(part)
        for name, part in sorted(model.pipeline.components.items())
        if part is not None and not isinstance(part, nn.Module) and ("tokenizer" in name or "processor" in name)
    }
    # Models that take an image keep the latents of the source image among the embeddings of the prompt.
    source_encoder = autoencoder if model.takes_image else {}
    family = type(model).__name__
    limit = model.max_sequence_length
    return EncoderIdentity(
        _digest_value([family, latents, autoencoder]),
        _digest_value([family, limit, prompts, encoders, processors, source_encoder]),
    )


def _describe_module(module: nn.Module) -> list[object]:
    """Configuration, names of tensors and their digests, as values that JSON takes."""
    config: Any = getattr(module, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    settings = {name: str(value) for name, value in sorted(settings.items()) if name not in UNSAID and name[0] != "_"}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with ThreadPoolExecutor(THREADS) as pool:
        return [settings, [*tensors], [*pool.map(_digest_tensor, tensors.values())]]


def _describe_processor(part: Any) -> list[object]:
    """Class and contents of a tokenizer or image processor, as values that JSON takes."""
    backend = getattr(part, "backend_tokenizer", None)
    if backend is not None:
        settings = json.loads(backend.to_str())
        # Padding and truncation are those of the last call, and not part of the tokenizer.
        settings |= {"padding": None, "truncation": None}
        return [type(part).__name__, settings, part.model_max_length, str(part.special_tokens_map)]
    if hasattr(part, "get_vocab"):
        return [type(part).__name__, sorted(part.get_vocab().items()), str(part.special_tokens_map)]
    return [type(part).__name__, part.to_json_string() if hasattr(part, "to_json_string") else ""]


def _digest_tensor(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype}{tuple(tensor.shape)}{hashlib.blake2b(content, digest_size=16).hexdigest()}"  # pyright: ignore[reportArgumentType]  (an array is a buffer)


def _digest_value(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
