"""The interface of a diffusion model family. A family is one file beside this one and knows no algorithm.

Shapes: B samples, C H W latent channels, height and width, T tokens, D features.
"""

from __future__ import annotations

import copy
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.lora import merge_adapters, start_magnitudes
from sfumato.parallel.dropout import DropoutKeys, keyed_dropout
from sfumato.parallel.guidance import exchange_branches, share_gradient
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.plan import ParallelPlan
from sfumato.parallel.weights import load_weights

EMBED_BATCH = 8
"""Prompts are always embedded so many at a time: the bits of an embedding would depend on the batch shape."""

MAX_REMEMBERED = 1024
"""Prompts whose embeddings are kept while the encoders are there; T5-XXL's take about 3 MB each."""


@dataclass(frozen=True)
class Conditioning:
    """What a denoiser is conditioned on: tensors with one row per sample."""

    tensors: dict[str, torch.Tensor]
    """Each ``[B, ...]``; the names are the model family's."""
    negative: dict[str, torch.Tensor] | None = None
    """The same for the unconditional branch of classifier-free guidance, ``[1, ...]``, shared by all rows."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: torch.Tensor | Sequence[int] | slice) -> Conditioning:
        """The rows at ``index``; an index may repeat."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, dtype=torch.long)
        return Conditioning({name: each[index] for name, each in self.tensors.items()}, self.negative)

    def repeat_interleave(self, times: int) -> Conditioning:
        """Every row ``times`` times in a row."""
        return Conditioning({k: v.repeat_interleave(times, dim=0) for k, v in self.tensors.items()}, self.negative)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Rows of several, in order; the negative is that of the first."""
        names = parts[0].tensors
        return Conditioning(
            {name: torch.cat([each.tensors[name] for each in parts]) for name in names}, parts[0].negative
        )

    def without_prompt(self, dropped: torch.Tensor) -> Conditioning:
        """The rows where ``dropped`` (bool ``[B]``) is true get the embeddings of the empty prompt."""
        assert self.negative is not None
        tensors = {}
        for name, each in self.tensors.items():
            mask = dropped.to(each.device).reshape(-1, *[1] * (each.ndim - 1))
            tensors[name] = torch.where(mask, self.negative[name].to(each.dtype), each)
        return Conditioning(tensors, self.negative)

    def to(self, device: torch.device | str) -> Conditioning:
        """The same on another device."""
        negative = None if self.negative is None else {name: each.to(device) for name, each in self.negative.items()}
        return Conditioning({name: each.to(device) for name, each in self.tensors.items()}, negative)

    def branch(self, number: int) -> dict[str, torch.Tensor]:
        """Rows of one guidance branch, ``[B, ...]``: 0 is the unconditional one."""
        assert self.negative is not None
        if number == 1:
            return self.tensors
        return {name: self.negative[name].to(each.dtype).expand_as(each) for name, each in self.tensors.items()}

    def with_negative(self) -> dict[str, torch.Tensor]:
        """Rows of both guidance branches, ``[2B, ...]``: the unconditional ones first, as diffusers orders them."""
        assert self.negative is not None
        return {name: torch.cat([each, self.tensors[name]]) for name, each in self.branch(0).items()}


class DiffusionModel(ABC):
    """A diffusers pipeline as a thing that can be trained.

    A subclass states the class attributes and the abstract methods; everything else is shared. The diffusers modules
    are used as they are.
    """

    pipeline_class: ClassVar[str]
    """Name of the diffusers pipeline, as model_index.json has it."""
    parallel_plan: ClassVar[ParallelPlan]
    """The denoiser's repeated blocks, the units of compilation, checkpointing and sharding, and where it is cut."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Linear layers that get an adapter when the configuration names none."""
    denoiser_name: ClassVar[str] = "transformer"
    """Name of the trained component in the pipeline."""
    encoder_names: ClassVar[tuple[str, ...]]
    """Text encoders, which can be freed when all prompts are embedded."""

    def __init__(
        self,
        pipeline: Any,
        max_sequence_length: int = 256,
        autocast_dtype: torch.dtype | None = None,
        source: Path | None = None,
    ) -> None:
        """Wraps a pipeline.

        Args:
            pipeline: the diffusers pipeline with all its components.
            max_sequence_length: tokens of the longest text encoder.
            autocast_dtype: dtype of the denoiser's forward pass under autocast; None leaves autocast off.
            source: the folder that the pipeline was loaded from, if any.
        """
        self.pipeline = pipeline
        self.max_sequence_length = max_sequence_length
        self.autocast_dtype = autocast_dtype
        self.source = source
        self.encoders_freed = False
        self.mesh: Mesh | None = None
        self.device = torch.device("cpu")
        """Where the networks are and the denoiser computes."""
        self._plain_class: type[nn.Module] | None = None
        self._dropout: DropoutKeys | None = None
        self._prompts: dict[str, dict[str, torch.Tensor]] = {}
        for component in self.components.values():
            component.requires_grad_(False).eval()

    @classmethod
    @abstractmethod
    def build(cls, description: dict[str, Any], seed: int) -> Any:
        """A pipeline of this family from a description, with random weights (``config_path``)."""

    @abstractmethod
    def embed_prompts(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        """Runs the text encoders: tensors ``[B, ...]`` by the names that ``denoise`` takes."""

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latent for an image of that size in pixels. Raises ValueError if it does not divide."""

    @abstractmethod
    def encode_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 pixels ``[B, 3, H, W]`` to float32 latents ``[B, *latent_shape]``, the mode of the posterior."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents ``[B, *latent_shape]`` to uint8 pixels ``[B, 3, H, W]``."""

    @abstractmethod
    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> torch.Tensor:
        """The noise levels of a trajectory, from 1 down to 0: float32 ``[num_steps + 1]``."""

    @property
    @abstractmethod
    def shift(self) -> float:
        """The timestep shift of the scheduler, for training."""

    @abstractmethod
    def denoise(self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        """One forward pass of the denoiser: the velocity eps - x0 ``[B, *latent_shape]``."""

    @property
    @abstractmethod
    def probe_size(self) -> int:
        """Side in pixels of a small square image that the autoencoder can take."""

    @property
    def components(self) -> dict[str, nn.Module]:
        """The pipeline's neural networks by name."""
        return {name: each for name, each in self.pipeline.components.items() if isinstance(each, nn.Module)}

    @property
    def denoiser(self) -> nn.Module:
        """What is trained."""
        return getattr(self.pipeline, self.denoiser_name)

    @property
    def trained(self) -> nn.Module:
        """What holds the trained parameters."""
        return self.denoiser

    @property
    def _adapters(self) -> dict[str, Any]:
        """The denoiser's LoRA adapters by name, as peft describes them."""
        return getattr(self.denoiser, "peft_config", None) or {}

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the denoiser on a mesh, as configured; everything else stays whole in each process.

        Raises:
            ConfigError: when it cannot be cut so.
        """
        if mesh.layout.pp > 1 or config.expert_bias_rate > 0:
            field = "expert_bias_rate" if mesh.layout.pp == 1 else "pipeline_parallel_size"
            raise ConfigError(
                f"train.{field} is for language models; {type(self.denoiser).__name__} has no experts and cannot be "
                "cut into pipeline stages: leave it out, and share the model by fsdp2, tensor or sequence parallelism"
            )
        self.mesh = mesh
        self._dropout = keyed_dropout(self.denoiser, config.seed)
        if self._dropout is not None and mesh.layout.cp > 1:
            raise ConfigError(
                "train: dropout (model.lora.dropout) and a sequence that is cut over ranks do not go together, since "
                "image and text tokens cannot be told apart in it; set the dropout to 0"
            )
        self._plain_class = type(self.denoiser)
        parallel = parallelize(self.denoiser, mesh, config, self.parallel_plan, self.autocast_dtype)
        self.set_denoiser(parallel)
        device = torch.device("cpu") if config.enable_fsdp_offload else self.device
        if any(each.is_meta for each in self.denoiser.parameters()):
            from_rank0 = config.broadcast_model_weights_from_rank0
            load_weights(self.denoiser, self.source / self.denoiser_name, mesh, from_rank0, device=device)
            start_magnitudes(self.denoiser)
        self.denoiser.to(device)

    def dropout_of(self, step: int, sample_ids: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, forward and backward pass, what is dropped belongs to (seed, step, sample), not to ranks."""
        return nullcontext() if self._dropout is None else self._dropout.batch(step, sample_ids)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, nothing is dropped out."""
        training = self.denoiser.training
        self.denoiser.eval()
        try:
            yield
        finally:
            self.denoiser.train(training)

    def plain_denoiser(self, adapters: bool = True) -> nn.Module:
        """A module of the denoiser's class, with its adapters or without, on meta: what wrapping has not changed."""
        with torch.device("meta"):
            plain = (self._plain_class or type(self.denoiser)).from_config(self.denoiser.config)
            for name, adapter in self._adapters.items() if adapters else ():
                plain.add_adapter(adapter, name)
        return plain

    def set_denoiser(self, denoiser: nn.Module) -> None:
        """Puts another module in the denoiser's place."""
        setattr(self.pipeline, self.denoiser_name, denoiser)

    def predict_velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning, guidance_scale: float = 1.0
    ) -> torch.Tensor:
        """The velocity eps - x0, with classifier-free guidance in one forward pass of 2B rows.

        Args:
            latents: ``[B, *latent_shape]``.
            sigma: ``[B]`` in [0, 1].
            conditioning: B rows; needs ``negative`` when guidance is on.
            guidance_scale: uncond + scale * (cond - uncond); 1 runs the conditional branch alone.

        Returns:
            float32 ``[B, *latent_shape]``.
        """
        guided = guidance_scale != 1.0
        split = self.mesh is not None and self.mesh.layout.cfg > 1
        embeddings = conditioning.tensors
        if guided and split:
            embeddings = conditioning.branch(self.mesh.rank_in("cfg"))
        elif guided:
            embeddings = conditioning.with_negative()
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            velocity = self.denoise(latents.to(self.input_dtype), sigma, embeddings)
        velocity = velocity.float()
        if guided:
            branches = exchange_branches(velocity, self.mesh) if split else velocity.chunk(2)
            unconditional, conditional = branches
            velocity = unconditional + guidance_scale * (conditional - unconditional)
        elif split:
            velocity = share_gradient(velocity, self.mesh)
        return velocity

    @property
    def input_dtype(self) -> torch.dtype:
        """dtype of the denoiser's weights, in which its inputs are given."""
        return next(self.denoiser.parameters()).dtype

    def encode_prompts(self, prompts: Sequence[str], with_negative: bool = True) -> Conditioning:
        """Conditioning of B prompts; embeddings that are remembered are not computed again.

        Args:
            prompts: B prompts.
            with_negative: add the empty prompt, which guidance and prompt dropout need.

        Returns:
            Conditioning of B rows on the denoiser's device.

        Raises:
            RuntimeError: when the encoders were freed and a prompt was not embedded before.
        """
        if not self.encoders_freed and len(self._prompts) > MAX_REMEMBERED:
            self.forget_prompts()
        self.remember_prompts([*prompts, ""] if with_negative else prompts)
        names = list(self._prompts[prompts[0]])
        tensors = {name: torch.stack([self._prompts[each][name] for each in prompts]) for name in names}
        negative = {name: self._prompts[""][name][None] for name in names} if with_negative else None
        return Conditioning(tensors, negative).to(self.device)

    def remember_prompts(self, prompts: Sequence[str]) -> None:
        """Embeds the prompts, and the empty one, that are not remembered yet; they are kept on the CPU.

        Raises:
            RuntimeError: when the encoders were freed and a prompt was not embedded before.
        """
        missing = [each for each in dict.fromkeys([*prompts, ""]) if each not in self._prompts]
        if missing and self.encoders_freed:
            raise RuntimeError(f"the text encoders were freed and this prompt was not embedded before: {missing[0]!r}")
        for start in range(0, len(missing), EMBED_BATCH):
            chunk = missing[start : start + EMBED_BATCH]
            padding = [chunk[-1]] * (EMBED_BATCH - len(chunk))
            with torch.no_grad():
                embedded = self.embed_prompts(chunk + padding)
            for row, prompt in enumerate(chunk):
                self._prompts[prompt] = {name: each[row].to("cpu", copy=True) for name, each in embedded.items()}

    def forget_prompts(self) -> None:
        """Drops the remembered embeddings."""
        self._prompts.clear()

    def free_encoders(self) -> None:
        """Drops the text encoders from memory. Prompts embedded before stay available; saving leaves them out."""
        for name in self.encoder_names:
            setattr(self.pipeline, name, None)
        self.encoders_freed = True

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the LoRA adapter is switched off: the model is its own reference."""
        self.denoiser.disable_adapters()
        try:
            yield
        finally:
            self.denoiser.enable_adapters()

    def save_export(self, folder: Path, weights: dict[str, torch.Tensor], merge: bool = False) -> None:
        """Writes the LoRA adapter if there is one, else, or with ``merge``, the whole pipeline.

        Args:
            folder: where to.
            weights: the denoiser's whole weights, by name; of an adapter that is written those alone are enough.
            merge: write adapters merged into the weights.
        """
        if self._adapters and not merge:
            self.save_adapter(folder, weights)
        else:
            self.save_pipeline(folder, weights)

    def save_pipeline(self, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Writes the whole pipeline as a standard diffusers folder; freed encoders are copied from ``source``.

        Adapters are merged into the weights.

        Args:
            folder: where to.
            weights: the denoiser's whole weights and buffers, by name; None takes them from a denoiser that is whole.
        """
        weights = self.denoiser.state_dict() if weights is None else weights
        if self._adapters:
            weights = merge_adapters(self.plain_denoiser(), weights)
        plain = self.plain_denoiser(adapters=False)
        plain.load_state_dict(weights, assign=True)
        pipeline = copy.copy(self.pipeline)
        setattr(pipeline, self.denoiser_name, plain)
        pipeline.save_pretrained(folder, safe_serialization=True)
        if not self.encoders_freed:
            return
        assert self.source is not None, "encoders may be freed only when they can be found again"
        index_path = folder / "model_index.json"
        index = json.loads(index_path.read_text(encoding="utf-8"))
        original = json.loads((self.source / "model_index.json").read_text(encoding="utf-8"))
        for name in self.encoder_names:
            if (self.source / name).is_dir():
                shutil.copytree(self.source / name, folder / name)
            index[name] = original.get(name, [None, None])
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @abstractmethod
    def save_adapter(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Writes the LoRA adapter, of the denoiser's whole weights, as diffusers' ``load_lora_weights`` reads it."""


def read_pipeline_class(folder: Path) -> str:
    """The pipeline class name in a folder's model_index.json. Raises FileNotFoundError or ValueError."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'model_index.json'} has no _class_name")
    return name
