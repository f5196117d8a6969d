"""Wan 2.2's two transformers, one for high noise levels and one for low ones, as one module that is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sfumato.parallel.mesh import Mesh


class WanPair(nn.Module):
    """Both transformers of Wan 2.2 as one: each row goes to the one for its noise level.

    With several processes both run for every forward pass that is trained, and otherwise both wherever one process
    needs them, if necessary on a row that does not count: processes must gather weights and sum gradients together.
    Where those with different samples have whole weights (ddp), each samples by itself, perhaps more often than others.
    """

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        """
        Args:
            transformer: for high noise.
            transformer_2: for low noise.
            boundary: timestep from which on the former is used.
        """
        super().__init__()
        self.transformer, self.transformer_2, self.boundary = transformer, transformer_2, boundary
        self.mesh: Mesh | None = None

    @property
    def config(self) -> dict[str, Any]:
        """What ``from_config`` takes."""
        return {name: transformer.config for name, transformer in self.named_children()} | {"boundary": self.boundary}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WanPair:
        """A pair with random weights."""
        from diffusers import WanTransformer3DModel

        names = ("transformer", "transformer_2")
        return cls(*(WanTransformer3DModel.from_config(config[name]) for name in names), config["boundary"])

    @property
    def peft_config(self) -> dict[str, Any]:
        """Adapters by name, the same in both."""
        return self.transformer.peft_config

    def add_adapter(self, config: Any, name: str = "default") -> None:
        """Adds an adapter to both."""
        for transformer in self.children():
            transformer.add_adapter(config, name)

    def disable_adapters(self) -> None:
        """Switches the adapters of both off."""
        for transformer in self.children():
            transformer.disable_adapters()

    def enable_adapters(self) -> None:
        """Switches the adapters of both on."""
        for transformer in self.children():
            transformer.enable_adapters()

    def forward(self, hidden_states: Tensor, timestep: Tensor, **rows: Any) -> tuple[Tensor]:
        """As WanTransformer3DModel with ``return_dict=False``; every tensor has one row per sample."""
        rows = {name: tensor for name, tensor in rows.items() if isinstance(tensor, Tensor)}
        if timestep.is_meta or isinstance(timestep, FakeTensor):  # memory and FLOP counts: nothing is known
            return self.transformer(hidden_states, timestep, **rows, return_dict=False)
        high = (timestep >= self.boundary).cpu()
        outputs, unused = [], 0.0
        for module, is_selected in ((self.transformer, high), (self.transformer_2, ~high)):
            row_indices = is_selected.nonzero().flatten()
            if not self._runs(len(row_indices) > 0):
                continue
            index = row_indices if len(row_indices) else torch.zeros(1, dtype=torch.long)
            index = slice(None) if len(row_indices) == len(high) else index.to(hidden_states.device)
            module_rows = {name: tensor[index] for name, tensor in rows.items()}
            output = module(hidden_states[index], timestep[index], **module_rows, return_dict=False)[0]
            if len(row_indices):
                outputs.append((row_indices, output))
            else:
                unused = output.sum() * 0
        order = torch.cat([row_indices for row_indices, _ in outputs]).argsort().to(hidden_states.device)
        return (torch.cat([output for _, output in outputs])[order] + unused,)

    def _runs(self, needed: bool) -> bool:
        if self.mesh is None or self.mesh.size == 1:
            return needed
        if torch.is_grad_enabled():
            return True
        return needed if self.mesh.layout.dp_shard == 1 else self.mesh.any(needed)
