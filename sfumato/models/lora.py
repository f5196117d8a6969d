"""Low-rank adapters through peft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError


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
    from peft.tuners.lora import LoraLayer

    targets = list(config.target_modules or default_targets)
    names = [name for name, _ in module.named_modules()]
    unmatched = [each for each in targets if not any(name == each or name.endswith(f".{each}") for name in names)]
    if unmatched:
        raise ConfigError(f"model.lora.target_modules: {unmatched[0]!r} matches no layer of {type(module).__name__}")
    init_weights = "gaussian" if config.init_weights == "gaussian" else True
    module.add_adapter(
        PeftLoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=targets,
            init_lora_weights=init_weights,
        )
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                for each in (layer.lora_A, layer.lora_B):
                    each.to_empty(device="cpu").float()  # the layer itself may be on meta
                layer.reset_lora_parameters("default", init_weights)
