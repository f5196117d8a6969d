"""Wan 2.2's two transformers, one for high noise levels and one for low ones, as one module that is trained.

``WanDenoisers`` is what the families do with them.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sfumato.config.open_mappings import JsonObject
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import FlowSchedule
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from peft import LoraConfig

    from sfumato.models.diffusion.base import DiffusersModule, ModelOptions


class WanPair(nn.Module):
    """Both transformers of Wan 2.2 as one module, in which each row goes to the transformer for its noise level.

    Processes must gather weights and sum gradients together, even if their rows need different transformers. With
    several processes both transformers therefore run in every forward pass with gradients. Without gradients, a
    transformer runs in all processes if one of them needs it; with whole weights (ddp) each process decides for itself.
    A transformer that has no rows in a process runs on a row whose output is not used.
    """

    def __init__(self, transformer: DiffusersModule, transformer_2: DiffusersModule, boundary: float) -> None:
        """
        Args:
            transformer: for high noise levels.
            transformer_2: for low noise levels.
            boundary: the lowest timestep of ``transformer``.
        """
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary
        self.mesh: Mesh | None = None

    @property
    def config(self) -> JsonObject:
        """The argument of ``from_config``."""
        return {name: transformer.config for name, transformer in self.named_children()} | {"boundary": self.boundary}

    @classmethod
    def from_config(cls, config: JsonObject) -> WanPair:
        """A pair with random weights."""
        from diffusers import WanTransformer3DModel

        names = ("transformer", "transformer_2")
        return cls(*(WanTransformer3DModel.from_config(config[name]) for name in names), config["boundary"])  # pyright: ignore[reportCallIssue]

    @property
    def peft_config(self) -> dict[str, LoraConfig]:
        """peft's configurations of the adapters by name, which are the same in both transformers."""
        return self.transformer.peft_config

    def add_adapter(self, config: LoraConfig, name: str = "default") -> None:
        """Adds an adapter to both transformers."""
        for transformer in self.children():
            transformer.add_adapter(config, name)  # pyright: ignore[reportCallIssue]

    def disable_adapters(self) -> None:
        """Switches the adapters of both transformers off."""
        for transformer in self.children():
            transformer.disable_adapters()  # pyright: ignore[reportCallIssue]

    def enable_adapters(self) -> None:
        """Switches the adapters of both transformers on."""
        for transformer in self.children():
            transformer.enable_adapters()  # pyright: ignore[reportCallIssue]

    def forward(self, hidden_states: Tensor, timestep: Tensor, **rows: Tensor) -> tuple[Tensor]:
        """As WanTransformer3DModel with ``return_dict=False``; every tensor has one row per sample."""
        rows = {name: tensor for name, tensor in rows.items() if isinstance(tensor, Tensor)}
        if timestep.is_meta or isinstance(timestep, FakeTensor):  # memory and FLOP counts: there are no values
            return self.transformer(hidden_states, timestep, **rows, return_dict=False)
        high = (timestep >= self.boundary).cpu()
        outputs = []
        unused = 0.0
        for module, is_selected in ((self.transformer, high), (self.transformer_2, ~high)):
            row_indices = is_selected.nonzero().flatten()
            if not self._must_run(len(row_indices) > 0):
                continue
            index = row_indices if len(row_indices) else torch.zeros(1, dtype=torch.long)
            index = slice(None) if len(row_indices) == len(high) else index.to(hidden_states.device)
            module_rows = {name: tensor[index] for name, tensor in rows.items()}
            output = module(hidden_states[index], timestep[index], **module_rows, return_dict=False)[0]
            if len(row_indices):
                outputs.append((row_indices, output))
            else:  # adds nothing to the result, but keeps the module in the backward pass
                unused = output.sum() * 0
        # Outputs are ordered by transformer: bring them back into the order of the rows.
        order = torch.cat([row_indices for row_indices, _ in outputs]).argsort().to(hidden_states.device)
        return (torch.cat([output for _, output in outputs])[order] + unused,)

    def _must_run(self, needed: bool) -> bool:
        """Whether a transformer runs in this process, which has rows for it if ``needed``."""
        if self.mesh is None or self.mesh.size == 1:
            return needed
        if torch.is_grad_enabled():
            return True
        return needed if self.mesh.layout.dp_shard == 1 else self.mesh.any(needed)


class WanDenoisers(FlowSchedule):
    """What Wan's families do with one transformer, or with two as a ``WanPair``."""

    further_denoisers = ("transformer_2",)
    frame_rate = 16.0

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``. Raises ConfigError when a pipeline with two transformers lacks what they need."""
        self.guidance_scale_2: float | None = None
        """Guidance scale of the second of two transformers, for low noise levels; None is that of the first one."""
        first = pipeline.transformer
        second = pipeline.transformer_2
        if second is not None:
            ratio = pipeline.config.boundary_ratio  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            if first is None or ratio is None:
                raise ConfigError(
                    f"{self.pipeline_class}: transformer_2 needs transformer and boundary_ratio in model_index.json"
                )
            boundary = ratio * pipeline.scheduler.config.num_train_timesteps
            pipeline.transformer = WanPair(first, second, boundary)
            pipeline.transformer_2 = None
            self.parallel_plan = plans.WAN_PAIR  # type: ignore[misc]
            self.caches_steps = False  # type: ignore[misc]
        super().__init__(pipeline, **options)
        if pipeline.config.expand_timesteps:  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            self.frame_rate = 24.0  # Wan 2.2 5B

    @property
    def _network(self) -> DiffusersModule:
        """The transformer, or the first of two, whose configuration holds for both."""
        return getattr(self.denoiser, "transformer", self.denoiser)

    def split_denoiser(self, denoiser: nn.Module) -> dict[str, nn.Module]:
        return dict(denoiser.named_children()) if isinstance(denoiser, WanPair) else {self.denoiser_name: denoiser}

    def set_second_guidance(self, scale: float) -> None:
        if not isinstance(self.denoiser, WanPair):
            super().set_second_guidance(scale)
        self.guidance_scale_2 = scale

    def guidance_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        pair = self.denoiser
        if self.guidance_scale_2 is None or not hasattr(pair, "boundary"):
            return scale
        scales = torch.where(self.timestep(sigma) >= pair.boundary, scale, self.guidance_scale_2)
        return scales.reshape(-1, 1, 1, 1, 1)

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        is_pair = isinstance(self.denoiser, WanPair)
        if is_pair:
            if config.enable_forward_prefetch:
                raise ConfigError(
                    "train.enable_forward_prefetch: of Wan's two transformers often only one runs, so the next block "
                    "is not known: set it to false"
                )
            if config.data_parallel_mode == "fsdp1":
                raise ConfigError(
                    "train.data_parallel_mode fsdp1 loses gradients of Wan's two transformers: take fsdp2 or ddp"
                )
            self.denoiser.mesh = mesh  # pyright: ignore[reportArgumentType]
        super().parallelize(mesh, config)
        if is_pair and self._dropout is not None:
            raise ConfigError(
                "model.lora.dropout: the two transformers take rows of a batch apart, so what is dropped cannot follow "
                "the sample: set it to 0"
            )
