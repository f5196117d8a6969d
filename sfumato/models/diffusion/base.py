"""The interface of a diffusion model family. A family is one file in ``families``, and knows no algorithm.

Shapes: B samples, C H W latent channels, height and width, T tokens, D features.
"""

from __future__ import annotations

import copy
import inspect
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn

from sfumato.config.file_checks import read_json_object
from sfumato.config.sections import SOUND, TrainConfig
from sfumato.errors import ConfigError, NonFiniteError
from sfumato.models.diffusion.adapter_files import fold_scale, save_for_comfyui, save_for_diffusers
from sfumato.models.diffusion.conditioning import Conditioning, exchange_branches, share_gradient
from sfumato.models.diffusion.frozen_parts import FrozenParts, check_frozen_parts
from sfumato.parallel.dropout import keyed_dropout
from sfumato.parallel.finite import list_first
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import move_to_devices, parallelize, weights_device
from sfumato.parallel.plan import ParallelPlan
from sfumato.parallel.weights import load_weights, weights_not_finite

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from peft import LoraConfig

    from sfumato.models.diffusion.described import Blueprint
    from sfumato.parallel.keyed_dropout import DropoutKeys

    class DiffusersModule(nn.Module):
        """A network of diffusers, for type checkers: a module with ModelMixin, ConfigMixin and PeftAdapterMixin."""

        config: Any
        """diffusers' FrozenDict, whose entries are attributes too."""

        def __getattr__(self, name: str) -> Any: ...
        @classmethod
        def from_config(cls, config: object) -> DiffusersModule: ...
        def add_adapter(self, adapter_config: LoraConfig, adapter_name: str = "default") -> None: ...
        def disable_adapters(self) -> None: ...
        def enable_adapters(self) -> None: ...


ADAPTER_FOLDER = "adapter"
"""Folder of an export with the adapters as peft reads them, where diffusers cannot."""


class ModelOptions(TypedDict, total=False):
    """Arguments of ``DiffusionModel`` besides the pipeline, which a family with an ``__init__`` of its own hands on."""

    max_sequence_length: int
    autocast_dtype: torch.dtype | None
    source: Path | None


class DiffusionModel(FrozenParts):
    """A diffusers pipeline whose denoiser can be trained.

    A subclass states the class attributes and the abstract methods; everything else is shared. The diffusers modules
    are used as they are.
    """

    parallel_plan: ClassVar[ParallelPlan]
    """The denoiser's repeated blocks, the units of compilation, checkpointing and sharding, and where it is cut."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Linear layers that get an adapter when the configuration names none."""
    denoiser_name: ClassVar[str] = "transformer"
    """Name of the trained component in the pipeline."""
    further_denoisers: ClassVar[tuple[str, ...]] = ()
    """Denoisers that a pipeline may have for other noise levels; they are then trained as parts of ``denoiser``."""
    shortest_prompt: ClassVar[int] = 1
    """Smallest ``model.max_sequence_length`` that is allowed."""
    image_family: ClassVar[str | None] = None
    """Name of the class in the same file that makes samples from source images with the same components."""
    timestep_sampling: ClassVar[str] = "logit_normal"
    """Density of the random numbers that ``training_sigma`` maps to noise levels, where a run states none."""
    caches_steps: ClassVar[bool] = False
    """Whether diffusers' MagCache, which skips blocks of a denoising step, works with the denoiser."""

    def __init__(
        self,
        pipeline: DiffusionPipeline,
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

        Raises:
            ConfigError: when a component cannot be used, or the scheduler's noise levels cannot be reproduced here.
        """
        super().__init__(pipeline)
        self.max_sequence_length = max_sequence_length
        self.autocast_dtype = autocast_dtype
        self.source = source
        self.frames = 1
        """Frames of a sample. Set it before prompts are embedded where a video starts from an image."""
        self.milliseconds = 0
        """Length of a sound, of a family that makes sound. Set it before prompts are embedded."""
        self.mesh: Mesh | None = None
        # The class before ``parallelize``: fully_shard replaces the class of a module by a subclass of its own.
        self._plain_class: type[DiffusersModule] | None = None
        self._dropout: DropoutKeys | None = None
        self.check_components()
        self.check_scheduler()
        check_frozen_parts(pipeline)
        if hasattr(pipeline, self.denoiser_name):  # one of a scheduler alone has none, and gives noise levels
            self.prepare_denoiser(self.denoiser)

    @classmethod
    def with_images(cls) -> type[DiffusionModel]:
        """The class named ``image_family``."""
        return getattr(sys.modules[cls.__module__], str(cls.image_family))

    @classmethod
    def needed_parts(cls) -> list[str]:
        """Names of the components, besides the denoiser, without which a pipeline folder cannot be used."""
        names = [name for name in (*cls.encoder_names, *cls.autoencoder_names) if name not in cls.optional_parts]
        tokenizers = [name.replace("text_encoder", "tokenizer") for name in names if name.startswith("text_encoder")]
        accepted = inspect.signature(cls.pipeline_type().__init__).parameters
        return [name for name in (*names, "scheduler", *tokenizers) if name in accepted]

    @classmethod
    def blueprint(cls) -> Blueprint:
        """Of what a pipeline consists that ``build`` makes. Raises ValueError of a family that is loaded alone."""
        raise ValueError(f"{cls.__name__} has no blueprint: give model.model_path")

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Makes a pipeline of this family with random weights from a description (``model.config_path``).

        Args:
            description: sections by name: those of ``build_pipeline``, unless a family states others.
            seed: seed of the weights.

        Raises:
            ValueError: for an unknown section or key, or when a section that is needed is missing.
        """
        from sfumato.models.diffusion.described import build_pipeline

        return build_pipeline(cls.pipeline_type(), cls.blueprint(), description, seed)

    @abstractmethod
    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latent, ``(C, H, W)``, or ``(C, F, H, W)`` of a family that makes videos.

        Args:
            height, width: in pixels; of a sound 1, and its length in milliseconds.
            frames: of a video; 1 is an image.

        Raises:
            ValueError: when the size or the number of frames does not divide.
        """

    @property
    def longest_side(self) -> int | None:
        """Most pixels along a side of a sample, of a network with a limited number of positions."""
        return None

    @abstractmethod
    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels of a trajectory: float32 ``[num_steps + 1]``, from the schedule's first one (at most 1) to 0."""

    def check_components(self) -> None:
        """Raises ConfigError for components of the pipeline, or settings of them, that cannot be used here."""

    def check_scheduler(self) -> None:
        """Raises ConfigError when the pipeline's scheduler has settings that training or sampling here would ignore."""

    def start(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The first latents of a trajectory.

        Args:
            noise: standard normal, ``[B, *latent_shape]``.
            sigma: the first noise level, ``[]``.
        """
        return noise

    def training_sigma(self, sigma: Tensor) -> Tensor:
        """Maps random numbers ``[B]`` in [0, 1] to noise levels for training, along the model's own schedule if any."""
        return sigma

    def with_framing(self, conditioning: Conditioning, framing: Tensor | None) -> Conditioning:
        """Adds the original sizes and crops of the images to a conditioning, for models that take them as input.

        Args:
            conditioning: B rows.
            framing: int32 ``[B, 4]``: height and width before the image was scaled, and the rows and columns of the
                scaled image that were cut off at the top and left; None where they are not known.
        """
        return conditioning

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Weight ``[B]`` of each sample's squared error of the velocity: 1, except for networks that predict noise."""
        return torch.ones_like(sigma)

    @property
    @abstractmethod
    def shift(self) -> float:
        """The timestep shift of the scheduler, for training."""

    def shift_at(self, latent_shape: Sequence[int]) -> float:
        """The timestep shift for training at a resolution: ``shift`` unless the scheduler's depends on the size."""
        return self.shift

    def part_lengths(self, latent_shape: Sequence[int]) -> tuple[int, ...]:
        """Lengths of the parts of a latent along its last dimension, such as video and sound; empty for a single one.

        The loss of flow matching is the sum of the parts' means.
        """
        return ()

    @property
    def embeds_guidance(self) -> bool:
        """Whether the denoiser takes the guidance scale as an input, ``embeddings["guidance"]``, instead of running an
        unconditional branch."""
        return False

    @property
    def default_guidance(self) -> float | None:
        """The guidance scale of the pipeline's own call in diffusers, counted as here; None where it states none.

        Of distilled models that are made for it 1.
        """
        guider = getattr(self.pipeline, "guider", None)
        scales = [getattr(guider, "guidance_scale", None)]
        scales += [self.call_default(name) for name in ("guidance_scale", "true_cfg_scale")]
        return next((float(scale) for scale in scales if isinstance(scale, int | float)), None)

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance of two velocities ``[B, *latent_shape]``, float32."""
        return unconditional + scale * (conditional - unconditional)

    def guidance_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        """The guidance scale at noise levels ``[B]``: a number, or one for each row where it depends on the level."""
        return scale

    def set_second_guidance(self, scale: float) -> None:
        """Sets the guidance scale of a second denoiser. Raises ConfigError where there is none."""
        raise ConfigError(f"rollout.guidance_scale_2: this {self.pipeline_class} has no second transformer: remove it")

    @abstractmethod
    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """One forward pass of the denoiser: the velocity eps - x0 ``[B, *latent_shape]``."""

    @property
    def denoiser(self) -> DiffusersModule:
        """The network that is trained."""
        return getattr(self.pipeline, self.denoiser_name)

    @property
    def trained(self) -> nn.Module:
        """The module that holds the trained parameters."""
        return self.denoiser

    @property
    def _adapters(self) -> dict[str, LoraConfig]:
        """peft's configurations of the denoiser's LoRA adapters, by name."""
        return getattr(self.denoiser, "peft_config", None) or {}

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Distributes the denoiser over a mesh, as configured; everything else stays whole in each process.

        Raises:
            ConfigError: when the denoiser does not support the configured parallelism.
        """
        name = type(self.denoiser).__name__
        if mesh.layout.pp > 1:
            raise ConfigError(
                f"train.pipeline_parallel_size is for language models; {name} cannot be cut into pipeline stages: "
                "leave it out, and share the model by fsdp2, tensor or sequence parallelism"
            )
        if config.expert_bias_rate > 0:
            raise ConfigError(f"train.expert_bias_rate is for language models; {name} has no experts: leave it out")
        self.mesh = mesh
        self._dropout = keyed_dropout(self.denoiser, config.seed)
        if self._dropout is not None and mesh.layout.cp > 1:
            raise ConfigError(
                "train: dropout (model.lora.dropout) and a sequence that is cut over ranks do not go together, since "
                "image and text tokens cannot be told apart in it; set the dropout to 0"
            )
        self._plain_class = type(self.denoiser)
        parallel = parallelize(self.denoiser, mesh, config, self.parallel_plan, self.autocast_dtype)
        if self._dropout is not None:
            self._dropout.check_is_whole(parallel)
        self.set_denoiser(parallel)
        if any(parameter.is_meta for parameter in self.denoiser.parameters()):
            from_rank0 = config.broadcast_model_weights_from_rank0
            assert self.source is not None, "weights on meta are read from the folder of the pipeline"
            device = weights_device(mesh, config)
            for name, part in self.split_denoiser(self.denoiser).items():
                load_weights(part, self.source / name, mesh, from_rank0, device=device)
            from sfumato.models.lora import start_magnitudes

            start_magnitudes(self.denoiser)
        move_to_devices(self.denoiser, mesh, config)

    def dropout_of(self, step: int, sample_ids: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, dropout masks of forward and backward pass depend on (seed, step, sample), and not on ranks."""
        return nullcontext() if self._dropout is None else self._dropout.batch(step, sample_ids)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the denoiser is in evaluation mode: no dropout."""
        training = self.denoiser.training
        self.denoiser.eval()
        try:
            yield
        finally:
            self.denoiser.train(training)

    def plain_denoiser(self, adapters: bool = True) -> DiffusersModule:
        """A new module on meta of the class that the denoiser had before ``parallelize``.

        Args:
            adapters: add the denoiser's LoRA adapters.
        """
        with torch.device("meta"):
            plain = (self._plain_class or type(self.denoiser)).from_config(self.denoiser.config)
            for name, adapter in self._adapters.items() if adapters else ():
                # values come later, and there are no weights of which singular values could be taken
                plain.add_adapter(replace(adapter, init_lora_weights=False) if _is_pissa(adapter) else adapter, name)
        return plain

    def split_denoiser(self, denoiser: nn.Module) -> dict[str, nn.Module]:
        """The pipeline components that a denoiser consists of, by name; more than one for Wan 2.2."""
        return {self.denoiser_name: denoiser}

    def comfyui_name(self, layer: str) -> str:
        """ComfyUI's name of a layer with an adapter; the name in diffusers where ComfyUI knows that one."""
        return layer

    def set_denoiser(self, denoiser: nn.Module) -> None:
        """Replaces the denoiser by another module."""
        setattr(self.pipeline, self.denoiser_name, denoiser)
        self.prepare_denoiser(denoiser)

    def prepare_denoiser(self, denoiser: nn.Module) -> None:
        """Gives a denoiser the hooks that its family needs; it may have them already."""

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance_scale: float = 1.0
    ) -> Tensor:
        """The velocity eps - x0, with classifier-free guidance in one forward pass of 2B rows.

        With CFG parallelism each of two ranks computes one branch of B rows instead, and both exchange the results.

        Args:
            latents: ``[B, *latent_shape]``.
            sigma: ``[B]`` in [0, 1].
            conditioning: B rows; needs ``negative`` when guidance is on.
            guidance_scale: uncond + scale * (cond - uncond), or as the family guides; 1 runs the conditional branch
                alone. Where the family embeds guidance it is an input of the denoiser, 1 included.

        Returns:
            float32 ``[B, *latent_shape]``.
        """
        guided = guidance_scale != 1.0 and not self.embeds_guidance
        scale = self.guidance_at(guidance_scale, sigma)
        cfg_mesh = self.mesh if self.mesh is not None and self.mesh.layout.cfg > 1 else None
        embeddings = conditioning.tensors
        if guided and cfg_mesh is not None:
            embeddings = conditioning.branch(cfg_mesh.rank_in("cfg"))
        elif guided:
            embeddings = conditioning.with_negative()
            latents = torch.cat([latents, latents])
            sigma = torch.cat([sigma, sigma])
        if self.embeds_guidance:
            embeddings = {**embeddings, "guidance": torch.full_like(sigma, guidance_scale, dtype=torch.float32)}
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            velocity = self.denoise(latents.to(self.input_dtype), sigma, embeddings)
        # Before guidance, which multiplies the small difference of two velocities.
        velocity = velocity.float()
        if guided:
            if cfg_mesh is not None:
                unconditional, conditional = exchange_branches(velocity, cfg_mesh)
            else:
                unconditional, conditional = velocity.chunk(2)
            velocity = self.guide(unconditional, conditional, scale)
        elif cfg_mesh is not None:
            # Both ranks computed the same velocity: halve the gradient, which is summed over them later.
            velocity = share_gradient(velocity, cfg_mesh)
        return velocity

    @property
    def input_dtype(self) -> torch.dtype:
        """dtype of the denoiser's inputs: that of its weights."""
        return next(self.denoiser.parameters()).dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the denoiser's matrix products."""
        return self.autocast_dtype or next(self.denoiser.parameters()).dtype

    def frozen_copy(self) -> Self:
        """The same model with a copy of the denoiser that needs no gradients. Make it before ``parallelize``."""
        frozen = copy.copy(self)
        frozen.pipeline = copy.copy(self.pipeline)  # the autoencoder stays shared
        frozen.free_encoders()  # else they would stay in memory when the model frees its own
        frozen.set_denoiser(copy.deepcopy(self.denoiser).requires_grad_(False).eval())
        return frozen

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the LoRA adapter is switched off, so that the model is the frozen reference."""
        self.denoiser.disable_adapters()
        try:
            yield
        finally:
            self.denoiser.enable_adapters()

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes the LoRA adapter if there is one; otherwise, or with ``merge``, the whole pipeline.

        Args:
            folder: the folder to write to.
            weights: the denoiser's whole weights, by name; the adapter's weights are enough to write an adapter.
            merge: write adapters merged into the weights.
        """
        if self._adapters and not merge:
            self.save_adapter(folder, weights)
            return
        if self.exports_merged:
            target = folder / ADAPTER_FOLDER
            target.mkdir(parents=True)
            from sfumato.models.lora import save_adapter

            save_adapter(self.denoiser, weights, target)
        self.save_pipeline(folder, weights)

    @property
    def exports_merged(self) -> bool:
        """Whether an export is the whole pipeline with its adapters merged, beside files for peft: diffusers loads no
        adapters but LoRA's, and those of PiSSA fit changed weights alone."""
        return any(adapter.peft_type != "LORA" or _is_pissa(adapter) for adapter in self._adapters.values())

    def save_pipeline(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Writes the whole pipeline as a standard diffusers folder; freed encoders and tokenizers are copied from
        ``source``.

        Adapters are merged into the weights.

        Args:
            folder: the folder to write to.
            weights: the denoiser's whole weights and buffers, by name; None takes those of an unsharded denoiser.

        Raises:
            NonFiniteError: when another component has weights that are not finite.
        """
        from sfumato.models.older_readers import copy_parts_of_source, use_older_names_in_pipeline

        weights = self.denoiser.state_dict() if weights is None else weights
        if self._adapters:
            from sfumato.models.lora import merge_adapters

            weights = merge_adapters(self.plain_denoiser(), weights)
        plain = self.plain_denoiser(adapters=False)
        plain.load_state_dict(weights, assign=True)
        for name, component in self.components.items():
            bad_weights = [] if component is self.denoiser else weights_not_finite(component)
            if bad_weights:
                raise NonFiniteError(
                    f"{name}: weights are NaN or infinite: {list_first(bad_weights)}. Nothing was exported"
                )
        pipeline = copy.copy(self.pipeline)
        pipeline.register_modules(**self.split_denoiser(plain))
        pipeline.save_pretrained(folder, safe_serialization=True)
        use_older_names_in_pipeline(folder)
        assert self.source is not None or not self.encoders_freed, "encoders are freed only if they can be found again"
        # A folder that is gone by the end of a run costs no export that can do without it.
        if self.source is not None and (self.encoders_freed or (self.source / "model_index.json").is_file()):
            freed = self.encoder_names if self.encoders_freed else ()
            copy_parts_of_source(folder, self.source, self.pipeline, freed)

    def save_adapter(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes the LoRA adapter as diffusers reads it (``save_for_diffusers``), given the denoiser's whole weights.

        ComfyUI reads the same file, or a second one beside it where it does not know diffusers' names of the layers
        (``sfumato.models.diffusion.adapter_files``). DoRA is exported for diffusers alone, since versions of ComfyUI
        compute it differently.

        The adapter of a second transformer goes to the folder ``transformer_2`` within ``folder``; diffusers reads it
        with ``load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)``.
        """
        from peft.utils import get_peft_model_state_dict

        parts = self.split_denoiser(self.plain_denoiser())
        for name, plain in parts.items():
            prefix = f"{name}." if len(parts) > 1 else ""
            own_weights = {
                key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)
            }
            target = folder if name == self.denoiser_name else folder / name
            layers = get_peft_model_state_dict(plain, own_weights)
            adapter = self._adapters["default"]
            folded, metadata = fold_scale(layers, adapter)
            save_for_diffusers(self.pipeline, self.denoiser_name, target, folded, metadata)
            if adapter.use_dora:
                self.say(
                    f"{target}: adapters of variant dora are for diffusers; for others export a whole model (--merge)"
                )
            elif self.comfyui_name("x") != "x":
                save_for_comfyui(target, layers, adapter, self.comfyui_name)


def _is_pissa(adapter: LoraConfig) -> bool:
    """Whether an adapter began as the largest singular values of the weights, which lack them since."""
    return getattr(adapter, "init_lora_weights", None) == "pissa"


def read_pipeline_class(folder: Path) -> str:
    """The pipeline class name in a folder's model_index.json. Raises FileNotFoundError or ValueError."""
    name = read_json_object(folder / "model_index.json").get("_class_name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'model_index.json'} has no _class_name")
    return name


def set_source_images(model: DiffusionModel, count: int) -> None:
    """Sets how many images a sample starts from at most. Raises ConfigError when the model takes fewer."""
    if count > 1 and not model.takes_image:
        raise ConfigError(
            f"data.max_source_images {count}: {model.pipeline_class} takes no source images: leave it out"
        )
    problem = model.source_problem(count)
    if problem and model.takes_image:
        raise ConfigError(f"data.max_source_images {count}: {problem}")
    model.max_source_images = count


def set_output(
    model: DiffusionModel, size: tuple[int, int, int], section: str, buckets: Sequence[tuple[int, int]] = ()
) -> None:
    """Checks that a model can make outputs of a size, and sets its number of frames. Call it before embedding prompts.

    Args:
        model: its ``frames`` are set, or the length of its sounds.
        size: height and width in pixels, and frames; 1 is an image. Of a sound 1, its length in milliseconds, and 1.
        section: name of the section of the configuration, for messages.
        buckets: heights and widths of the other sizes that the model is trained on.

    Raises:
        ConfigError: when the model cannot make one of the sizes.
    """
    height, width, frames = size
    options = f"{section}.height {height}, {section}.width {width}, {section}.num_frames {frames}"
    if height == SOUND:
        options = f"{section}.seconds {width / 1000:g}"
        if not model.makes_sound:
            raise ConfigError(f"{options}: {model.pipeline_class} makes no sound: set height and width instead")
        model.milliseconds = width
    _check_output(model, size, options)
    for height, width in buckets:
        _check_output(model, (height, width, 1), f"{section}.buckets: {height} x {width} (height x width)")
    model.frames = frames


def _check_output(model: DiffusionModel, size: tuple[int, int, int], options: str) -> None:
    try:
        model.latent_shape(*size)
    except ValueError as error:
        raise ConfigError(f"{options}: {model.pipeline_class} cannot make that: {error}") from error
