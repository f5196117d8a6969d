"""Builds language models and diffusion models on meta, and describes them for predictions of their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from sfumato.algorithms.flow_matching import flow_matching_loss
from sfumato.config.open_mappings import Keywords
from sfumato.config.sections import ModelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.config.text_rl import SUM_OF_LENGTHS, TextRLTrainConfig
from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.data.text.format import TextFormat
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.models.diffusion.flops import meta_denoiser, refusing_other_inputs, with_denoiser
from sfumato.models.diffusion.folder_parts import component_class, names_part
from sfumato.models.diffusion.frozen_parts import image_autoencoder
from sfumato.models.diffusion.load import DTYPES, family_of, read_description, read_index
from sfumato.models.estimate.activation_memory import fake_autocast, register_stand_in
from sfumato.models.estimate.memory_plan import Planned, refuse_unpredicted
from sfumato.models.estimate.meta_vision import encoder_bytes, freeze_as_configured, vision_on_meta
from sfumato.models.language.hf_config import attention_by_part, check_length
from sfumato.models.language.model import check_multimodal, check_settings
from sfumato.models.language.parts import check_auto_class, read_model_config
from sfumato.models.language.scalar_head import HEAD, check_classifier, check_head, check_scalar_settings
from sfumato.models.language.scores import TokenScores
from sfumato.models.lora import add_lora
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import CHUNK_TOKENS, cross_entropy_sum, linear_cross_entropy
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, language_plan
from sfumato.parallel.weights import build_on_meta

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from transformers import PreTrainedModel


def language_model_on_meta(
    config: LanguageModelConfig, on_gpu: bool, has_scalar_head: bool = False, sees: bool = False
) -> PreTrainedModel:
    """Builds a language model with its adapters on meta, with the stand-in attention of ``activation_memory``.

    Args:
        config: the model section.
        on_gpu: whether it will run on a GPU, where attention does not repeat keys and values.
        has_scalar_head: build a model with a scalar head, as critics and reward models have.
        sees: build a model that reads images or audio.

    Raises:
        ConfigError: when the folder or description is missing or wrong.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSequenceClassification

    attention = register_stand_in(on_gpu, scores=config.attention == "eager")
    described = read_model_config(config, sees)
    auto_class = AutoModelForMultimodalLM if sees else AutoModelForCausalLM
    if has_scalar_head:
        check_classifier(described, config.trust_remote_code)
        described.num_labels = 1
        auto_class = AutoModelForSequenceClassification
    described.get_text_config().output_router_logits = False  # small beside the rest of a forward pass
    dtype = torch.float32 if config.lora is None else DTYPES[config.dtype]
    cls = cast("type[PreTrainedModel] | None", auto_class._model_mapping.get(type(described), None))
    check_auto_class(auto_class, described, config)
    settings = {
        "attn_implementation": attention_by_part(described, attention, cls),
        "dtype": dtype,
        "trust_remote_code": config.trust_remote_code,
    }
    with torch.device("meta"):  # buffers too: build_on_meta asks for the memory of one weight at a time
        module = make_from_config(auto_class, described, **settings)
        freeze_as_configured(module, config)
        if has_scalar_head:
            check_head(module)
            getattr(module, HEAD).float().requires_grad_(True)
    return module.train()


def plan_language_model(
    model: LanguageModelConfig,
    data: TextDataConfig,
    train: TextTrainConfig,
    layout: Layout,
    on_gpu: bool,
    has_reference: bool = False,
) -> Planned:
    """Describes a language model in training on data, for the prediction of its memory.

    All tokens are taken to be in the loss mask, which gives the most logits, and, for a model that reads images, to be
    tokens of images.

    Args:
        model, data, train: the task's sections.
        layout: the mesh.
        on_gpu: see ``language_model_on_meta``.
        has_reference: whether a frozen reference is kept; with adapters the model is its own reference.

    Raises:
        ConfigError: as ``language_model_on_meta``.
    """
    rows, num_micro_batches = _micro_batches_of_data(data, train, layout)
    media_format = data.data_type if data.data_type.has_images else None
    return _plan_tokens(
        model, rows, data.max_seq_len, num_micro_batches, train, layout, on_gpu, has_reference, media_format
    )


def plan_text_policy(
    model: LanguageModelConfig,
    max_seq_len: int,
    samples_per_step: int,
    train: TextRLTrainConfig,
    layout: Layout,
    on_gpu: bool,
    has_reference: bool = False,
    data_type: TextFormat | None = None,
    learns_entropy: bool = False,
) -> Planned:
    """Describes the policy in an update of RL, with samples of the greatest length, for the prediction of its memory.

    Keys and values while tokens are drawn (``kv_memory.py``) and a critic are not included.

    Args:
        model, train: the task's sections.
        max_seq_len: tokens of the longest sample, with its prompt.
        samples_per_step: samples of an optimiser step, in all ranks together.
        layout: the mesh.
        on_gpu: see ``language_model_on_meta``.
        has_reference: whether a reference policy is kept; with adapters the model is its own reference.
        data_type: the format of the prompts; with images, the model reads images.
        learns_entropy: whether the loss contains entropies.

    Raises:
        ConfigError: as ``language_model_on_meta``.
    """
    rows, num_micro_batches = _micro_batches(max_seq_len, samples_per_step, train, layout)
    media_format = data_type if data_type is not None and data_type.has_images else None
    return _plan_tokens(
        model,
        rows,
        max_seq_len,
        num_micro_batches,
        train,
        layout,
        on_gpu,
        has_reference,
        media_format,
        2 + learns_entropy,
    )


def _plan_tokens(
    model: LanguageModelConfig,
    rows: int,
    length: int,
    num_micro_batches: int,
    train: TextTrainConfig | TextRLTrainConfig,
    layout: Layout,
    on_gpu: bool,
    has_reference: bool,
    media_format: TextFormat | None = None,
    loss_copies: int = 2,
) -> Planned:
    """Describes a language model that predicts tokens.

    Args:
        model, train, layout, on_gpu, has_reference: as for ``plan_language_model``.
        rows: rows of a micro-batch.
        length: tokens of a row.
        num_micro_batches: micro-batches of a step of a data-parallel rank.
        media_format: the format of data with images or audio; None for text alone.
        loss_copies: tensors of the size of the logits that the loss needs besides those that it saves.
    """
    sees = media_format is not None
    mesh = Mesh(layout, torch.device("cpu"))
    module = language_model_on_meta(model, on_gpu, sees=sees)
    check_settings(module, mesh, train, train.chunked_loss)
    length_name = (SUM_OF_LENGTHS,) if isinstance(train, TextRLTrainConfig) else ()
    check_length(module.config.get_text_config(), length, *length_name)
    if train.rmpad_with_pos_ids:  # one packed row
        length = rows * length
        rows = 1
    dtype = DTYPES[train.mixed_precision]
    chunked = train.chunked_loss

    def run(module: PreTrainedModel) -> Tensor:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        positions = torch.arange(length).expand(rows, length)
        head = cast("nn.Linear", module.get_output_embeddings())
        if chunked:  # the loss takes hidden states, and computes logits of a chunk at a time
            head.forward = lambda hidden: hidden  # pyright: ignore[reportAttributeAccessIssue]
        with fake_autocast(dtype):
            if sees:
                embedded = {"inputs_embeds": module.get_input_embeddings()(ids), "position_ids": positions}
                output = head(module.get_decoder()(**embedded, use_cache=False).last_hidden_state)
            else:
                output = module(input_ids=ids, position_ids=positions, use_cache=False).logits
            if isinstance(train, TextRLTrainConfig):
                scores = TokenScores(output, (rows, length), head=head if chunked else None)
                return sum(values.sum() for values in scores.log_probs_and_entropy(ids))  # pyright: ignore[reportReturnType]
            if chunked:
                return linear_cross_entropy(output, head.weight, ids, head.bias)[0]
            return cross_entropy_sum(output, ids)

    vocabulary, width = cast("nn.Linear", module.get_output_embeddings()).weight.shape
    # the logits, which their scores hold, and in float32 gradients of log-probabilities, logits, entropies
    loss_bytes = rows * length * vocabulary * ((dtype or torch.float32).itemsize + 4 * loss_copies)
    if chunked:
        chunk = min(CHUNK_TOKENS, rows * length)
        loss_bytes = 4 * (vocabulary * (3 * chunk + width) + rows * length * width)
    vision = None
    encoder = 0
    if media_format is not None:
        check_multimodal(module, mesh)
        vision = vision_on_meta(model, module, media_format)
        mode = train.activation_checkpointing
        with refuse_unpredicted(type(module).__name__, "its encoder has an unknown form"):
            encoder = encoder_bytes(model, module, vision, rows * length, mode, dtype, on_gpu)
    return Planned(
        build=lambda: language_model_on_meta(model, on_gpu, sees=sees),
        encoder_bytes=encoder,
        vision=vision,
        plan=language_plan(module),
        dtype=dtype,
        run=run,
        loss_bytes=loss_bytes,
        num_micro_batches=num_micro_batches,
        reference=DTYPES[model.dtype] if has_reference and model.lora is None else None,
        shares_samples=layout.cp,
        on_gpu=on_gpu,
    )


def plan_scalar_model(
    model: LanguageModelConfig, data: TextDataConfig, train: TextTrainConfig, layout: Layout, on_gpu: bool
) -> Planned:
    """Describes a model with a scalar head, for the prediction of its memory; arguments as for ``plan_language_model``.

    Raises:
        ConfigError: as ``language_model_on_meta``.
    """
    rows, num_micro_batches = _micro_batches_of_data(data, train, layout)
    return _plan_values(model, rows, data.max_seq_len, num_micro_batches, train, layout, on_gpu)


def plan_critic(
    model: LanguageModelConfig,
    max_seq_len: int,
    samples_per_step: int,
    train: TextRLTrainConfig,
    layout: Layout,
    on_gpu: bool,
) -> Planned:
    """Describes a critic, for the prediction of its memory. It learns from the micro-batches of ``plan_text_policy``.

    Args:
        model: the model section of the critic.
        max_seq_len, samples_per_step, train, layout, on_gpu: as for ``plan_text_policy``.

    Raises:
        ConfigError: as ``language_model_on_meta``.
    """
    rows, num_micro_batches = _micro_batches(max_seq_len, samples_per_step, train, layout)
    return _plan_values(model, rows, max_seq_len, num_micro_batches, train, layout, on_gpu)


def _micro_batches_of_data(data: TextDataConfig, train: TextTrainConfig, layout: Layout) -> tuple[int, int]:
    """Documents of a micro-batch of training on data, and micro-batches of a step of a data-parallel rank."""
    per_rank = (train.global_batch_size or train.micro_batch_size * layout.data) / layout.data
    # With dyn_bsz the samples of a step seldom fill the micro-batches of each rank exactly: one more may be needed.
    may_need_one_more = train.dyn_bsz and layout.data > 1
    rows = train.micro_batch_size * data.data_type.documents_per_sample
    return rows, -int(-per_rank // train.micro_batch_size) + may_need_one_more


def _micro_batches(
    max_seq_len: int, samples_per_step: int, train: TextRLTrainConfig, layout: Layout
) -> tuple[int, int]:
    """Samples of a micro-batch of RL, and micro-batches of an optimiser step of a data-parallel rank."""
    rows = train.micro_batch_size
    if train.max_tokens_per_micro_batch is not None:
        rows = max(1, train.max_tokens_per_micro_batch // max_seq_len)
    return rows, -(-samples_per_step // (layout.data * rows))


def _plan_values(
    model: LanguageModelConfig,
    rows: int,
    length: int,
    num_micro_batches: int,
    train: TextTrainConfig | TextRLTrainConfig,
    layout: Layout,
    on_gpu: bool,
) -> Planned:
    """Describes a model with a scalar head; arguments as for ``_plan_tokens``."""
    module = language_model_on_meta(model, on_gpu, has_scalar_head=True)
    check_scalar_settings(Mesh(layout, torch.device("cpu")), train)
    check_length(module.config, length)
    if train.rmpad_with_pos_ids:  # one packed row
        length = rows * length
        rows = 1

    def run(module: PreTrainedModel) -> Tensor:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        positions = torch.arange(length).expand(rows, length)
        base = getattr(module, module.base_model_prefix)
        with fake_autocast(DTYPES[train.mixed_precision]):
            hidden = base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            return (hidden.float() @ getattr(module, HEAD).weight.float().T).sum()

    return Planned(
        build=lambda: language_model_on_meta(model, on_gpu, has_scalar_head=True),
        plan=language_plan(module),
        dtype=DTYPES[train.mixed_precision],
        run=run,
        loss_bytes=2 * rows * length * 4,  # values and their gradients
        num_micro_batches=num_micro_batches,
        shares_samples=layout.cp,
        on_gpu=on_gpu,
    )


def diffusion_model_on_meta(config: ModelConfig, mixed_precision: str) -> DiffusionModel:
    """Builds a pipeline whose networks are all on meta; tokenizers and scheduler are loaded.

    Raises:
        ConfigError: when the folder or description is missing or of an unknown family.
    """
    dtype = DTYPES[config.dtype]
    family = family_of(config, needs_weights=False)
    if config.config_path is not None:
        description = read_description(config.config_path)
        try:
            pipeline = cast("DiffusionPipeline", build_on_meta(lambda: family.build(description, seed=0)))  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{config.config_path}: cannot build {family.pipeline_class}: {error}") from error
    else:
        pipeline = _pipeline_on_meta(Path(str(config.model_path)), family)
    length = family.prompt_length(config.max_sequence_length)
    model = family(pipeline, max_sequence_length=length, autocast_dtype=DTYPES[mixed_precision])
    model.device = torch.device("meta")
    for name, component in model.components.items():
        component.to(torch.float32 if name == family.denoiser_name and config.lora is None else dtype)
        for module in component.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to("meta")
    if config.lora is not None:
        add_lora(model.denoiser, config.lora, model.lora_targets, seed=0)
    else:
        model.denoiser.requires_grad_(True)
    return model


def plan_diffusion_model(
    model: DiffusionModel,
    layout: Layout,
    rows: int,
    size: tuple[int, int],
    guidance_scale: float = 1.0,
    num_micro_batches: int = 1,
    has_reference: bool = False,
    num_policies: int = 0,
    keep_encoders: bool = True,
    offload_idle: bool = False,
    on_gpu: bool = False,
    drawn: tuple[int, float] | None = None,
) -> Planned:
    """Describes a diffusion model in training, for the prediction of its memory.

    Args:
        model: the result of ``diffusion_model_on_meta``.
        layout: the mesh.
        rows: rows of one forward pass: samples, in RL times the trained steps or noise levels of each.
        size: height and width in pixels; a video has ``model.frames`` frames.
        guidance_scale: the guidance scale; other than 1 it takes two branches.
        num_micro_batches: micro-batches of a step of one data-parallel rank.
        has_reference: whether RL keeps a frozen reference; with adapters the model is its own reference.
        num_policies: copies of the trained weights that RL keeps as other policies.
        keep_encoders: ``model.keep_encoders``.
        offload_idle: ``model.offload_idle``.
        on_gpu: see ``Planned``.
        drawn: of RL, samples that are drawn together, and their guidance scale.

    Raises:
        ConfigError: when the size does not fit the model.
    """
    try:
        latent_shape = model.latent_shape(*size, model.frames)
    except ValueError as error:
        raise ConfigError(f"height and width: {error}") from error
    embeddings = model.embedding_shapes(*size)

    def predict(module: nn.Module, rows: int, guidance_scale: float) -> Tensor:
        shadow = with_denoiser(model, module)
        shadow.device = torch.device("cpu")
        shadow.mesh = None
        tensors = {name: torch.empty(rows, *row_shape, dtype=dtype) for name, (row_shape, dtype) in embeddings.items()}
        negative = tensors if model.takes_image else {name: tensor[:1] for name, tensor in tensors.items()}
        scale = guidance_scale if layout.cfg == 1 else 1.0
        latents = torch.empty(rows, *latent_shape)
        conditioning = Conditioning(tensors, negative, model.takes_image)
        with refusing_other_inputs(model):
            return shadow.predict_velocity(latents, torch.empty(rows), conditioning, scale)

    def run(module: nn.Module) -> Tensor:
        velocity = predict(module, rows, guidance_scale)
        return flow_matching_loss(velocity, torch.empty_like(velocity), torch.empty_like(velocity)).sum()

    not_frozen = {model.denoiser_name, *(() if keep_encoders else model.encoder_names)}
    return Planned(
        build=lambda: _build_denoiser(model),
        plan=model.parallel_plan,
        dtype=model.autocast_dtype,
        run=run,
        loss_bytes=0,
        num_micro_batches=num_micro_batches,
        reference=torch.float32 if has_reference and not getattr(model.denoiser, "peft_config", None) else None,
        frozen_bytes=_frozen_bytes(model, not_frozen),
        frozen_idle=offload_idle,
        shares_samples=layout.cp,
        num_policies=num_policies,
        on_gpu=on_gpu,
        diffusion=model,
        draw=None if drawn is None else lambda module: predict(module, *drawn),
    )


def _build_denoiser(model: DiffusionModel) -> nn.Module:
    """A denoiser on meta whose tensors have the dtypes of the model's: frozen weights may be bf16."""
    plain = meta_denoiser(model)
    dtypes = {name: tensor.dtype for name, tensor in _named_tensors(model.denoiser)}
    for name, tensor in _named_tensors(plain):
        tensor.data = tensor.data.to(dtypes[name])
    return plain


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def plan_autoencoder(model: DiffusionModel, rows: int, size: tuple[int, int]) -> Planned:
    """Describes an image autoencoder in training, which is whole in each process, for the prediction of its memory.

    Args:
        model: the result of ``diffusion_model_on_meta``.
        rows: images of one forward pass.
        size: height and width of the images in pixels.

    Raises:
        ConfigError: as ``image_autoencoder``.
    """
    vae = image_autoencoder(model.pipeline).float().requires_grad_(True)

    def run(module: AutoencoderKL) -> Tensor:
        posterior = module.encode(torch.empty(rows, 3, *size)).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        noisy = posterior.mean + posterior.std * torch.empty_like(posterior.mean)
        return (module.decode(noisy, return_dict=False)[0] - torch.empty(rows, 3, *size)).square().mean()

    return Planned(
        build=lambda: copy.deepcopy(vae),
        plan=ParallelPlan(blocks=(type(vae).__name__,)),
        dtype=None,
        run=run,
        loss_bytes=0,
        frozen_bytes=_frozen_bytes(model, {"vae"}),
    )


def num_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _frozen_bytes(model: DiffusionModel, without: set[str]) -> dict[str, int]:
    """Bytes of the pipeline's networks by name, without some of them."""
    components = model.components.items()
    return {f"frozen {name}": num_bytes(component) for name, component in components if name not in without}


def _pipeline_on_meta(folder: Path, family: type[DiffusionModel]) -> DiffusionPipeline:
    """Loads a pipeline folder with its networks on meta. Raises ConfigError."""
    pipeline_type = family.pipeline_type()
    index = read_index(folder)
    components: Keywords = {}
    for name, value in index.items():
        if value == [None, None]:
            components[name] = None
        elif names_part(value) and (build := _component_builder(folder / name, *value)) is not None:
            components[name] = build_on_meta(build)
    try:
        return load_pretrained(pipeline_type, folder, use_safetensors=True, **components)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"model.model_path {folder}: diffusers cannot read it: {error}") from error


def _component_builder(folder: Path, library: str, class_name: str) -> Callable[[], nn.Module] | None:
    """A function that builds a network from its configuration; None for tokenizers and schedulers."""
    import transformers

    cls = component_class(library, class_name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return None
    if issubclass(cls, transformers.PreTrainedModel):
        config_class = cls.config_class
        return lambda: cls(load_pretrained(config_class, folder))
    return lambda: make_from_config(cls, cls.load_config(folder))  # pyright: ignore[reportAttributeAccessIssue]
