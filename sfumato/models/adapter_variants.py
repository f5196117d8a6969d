"""Adapters other than LoRA, through peft: Kronecker and Hadamard products, and rotations of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig

NEVER_SKIPPED = -1.0
"""peft's layers of LoKr and LoHa skip themselves where a random number from 0 to 1 is not above the module dropout."""


def variant_config(config: LoraConfig, targets: Sequence[str], module: nn.Module) -> PeftConfig:
    """peft's configuration of a variant other than LoRA.

    Raises:
        ConfigError: when the blocks of rotations do not divide a layer's input.
    """
    from peft import LoHaConfig, LoKrConfig, OFTConfig

    if config.variant == "oft":
        for name, layer in module.named_modules():
            is_target = any(name == target or name.endswith(f".{target}") for target in targets)
            if isinstance(layer, nn.Linear) and is_target and layer.in_features % config.rank:
                raise ConfigError(
                    f"model.lora.rank {config.rank} is the block size of variant oft, and does not divide the "
                    f"{layer.in_features} inputs of {name}: change it, or leave the layer out of target_modules"
                )
        return OFTConfig(r=0, oft_block_size=config.rank, target_modules=list(targets))
    cls = LoKrConfig if config.variant == "lokr" else LoHaConfig
    # peft divides alpha by the rank: any number will do
    return cls(r=config.rank, alpha=config.alpha, target_modules=list(targets))  # pyright: ignore[reportArgumentType]


def never_skip(layers: Sequence[object], adapter: str) -> None:
    """Makes passes of LoKr and LoHa layers independent of torch's random numbers, of which peft draws one each."""
    for layer in layers:
        dropout = getattr(layer, "module_dropout", None)
        if isinstance(dropout, dict):
            dropout[adapter] = NEVER_SKIPPED


class _Delta(nn.Module):
    """What a layer of LoKr or LoHa adds to its weight, as a forward pass, so that any tensors can take part."""

    def __init__(self, layer: nn.Module, adapter: str) -> None:
        super().__init__()
        self.layer: Any = layer
        self.adapter = adapter

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight(self.adapter)


def merge_variant(layer: Any, adapter: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight of a layer with its adapter merged into it.

    Args:
        layer: peft's layer; its own tensors may be on meta and are not read.
        adapter: the adapter's name.
        weight: float32 ``[out, in]``.
        tensors: the adapter's, float32, by their names within the layer.
    """
    rotations = getattr(layer, "oft_R", None)
    if rotations is None:
        return weight + functional_call(
            _Delta(layer, adapter), {f"layer.{name}": value for name, value in tensors.items()}, ()
        )
    from peft.tuners.oft.layer import OFTRotationModule

    described = rotations[adapter]
    (values,) = tensors.values()
    rotation = OFTRotationModule(  # anew, since that of a model on meta has its indices on meta, too
        described.r,
        described.n_elements,
        described.block_size,
        described.in_features,
        use_cayley_neumann=described.use_cayley_neumann,
        num_cayley_neumann_terms=described.num_cayley_neumann_terms,
    ).to(values.device)
    with torch.no_grad():
        rotation.weight.copy_(values)
        return weight @ rotation.get_weight().mT
