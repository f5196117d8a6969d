"""Low-rank adapters through peft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError
from sfumato.parallel.weights import real_stand_ins


def add_lora(module: nn.Module, config: LoraConfig, default_targets: Sequence[str], seed: int) -> None:
    """Injects trainable float32 adapters into a diffusers model; its own weights stay frozen.

    Args:
        module: the denoiser (a diffusers model).
        config: rank, alpha, targets.
        default_targets: layer names that are taken when the configuration names none.
        seed: seed of the adapters' initialisation.

    Raises:
        ConfigError: when a target matches no layer.
    """
    from peft import LoraConfig as PeftLoraConfig

    targets = list(config.target_modules or default_targets)
    names = [name for name, _ in module.named_modules()]
    unmatched = [each for each in targets if not any(name == each or name.endswith(f".{each}") for name in names)]
    if unmatched:
        raise ConfigError(f"model.lora.target_modules: {unmatched[0]!r} matches no layer of {type(module).__name__}")
    with torch.random.fork_rng(devices=[]), real_stand_ins(module):
        torch.manual_seed(seed)
        module.add_adapter(
            PeftLoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                lora_dropout=config.dropout,
                target_modules=targets,
                init_lora_weights="gaussian" if config.init_weights == "gaussian" else True,
            )
        )
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
