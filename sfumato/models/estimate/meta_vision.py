"""Models that read images or audio, for predictions of their memory: their processor, and what their encoder saves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import make_from_config
from sfumato.data.media.sounds import Sound
from sfumato.data.media.vision import Vision
from sfumato.data.text.format import TextFormat
from sfumato.models.estimate.activation_memory import SavedBytes, count_saved
from sfumato.models.estimate.cuda_autocast import as_on_cuda
from sfumato.models.language.parts import BYTES, build_tokenizer, freeze, read_model_config, source_of
from sfumato.models.language.vision_load import add_image_tokens, build_vision
from sfumato.models.lora import add_lora, language_targets
from sfumato.parallel.plan import find_blocks, language_plan

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedConfig, PreTrainedModel

DEPTHS = ("depth", "num_hidden_layers", "encoder_layers")
"""Names, in configurations, of the number of an encoder's blocks."""


_counted: dict[str, SavedBytes] = {}
"""What encoders save, by all that it depends on: ``sfumato check`` asks again with each setting that may help, and an
encoder that reads sizes of pictures computes on the CPU, which takes seconds."""


def vision_on_meta(config: LanguageModelConfig, module: PreTrainedModel, data_type: TextFormat) -> Vision:
    """Builds the reader of images or audio of a model on meta.

    Args:
        config: the model section.
        module: the model on meta.
        data_type: the format of the data, which limits the size of images.

    Raises:
        ConfigError: as ``build_vision``.
    """
    described = read_model_config(config, sees=True)
    tokenizer = build_tokenizer(config)
    is_made = config.tokenizer_path == BYTES
    if is_made:
        add_image_tokens(tokenizer, described)
    vision = build_vision(described, None if is_made else source_of(config), module, tokenizer)
    return vision.with_reader(data_type.limited(vision.reader))


def freeze_as_configured(module: PreTrainedModel, config: LanguageModelConfig) -> None:
    """Freezes what is not trained of a model, and adds its adapters, as ``build_language_model`` does."""
    if config.lora is not None:
        module.requires_grad_(False)
    freeze(module, config.freeze)
    if config.lora is not None:
        add_lora(module, config.lora, language_targets(module), seed=0)


def encoder_bytes(
    config: LanguageModelConfig,
    module: nn.Module,
    vision: Vision,
    num_tokens: int,
    mode: str,
    dtype: torch.dtype | None,
    on_gpu: bool,
) -> int:
    """Bytes that a model's encoder saves for the backward pass of a number of tokens of images or audio.

    An encoder of two blocks of the real width is run on one picture and on two. The difference gives the bytes of a
    patch, in a block and outside of blocks, from which those of the real numbers of blocks and patches follow. If the
    language model takes outputs of several blocks, the encoder has that many. An encoder of audio reads the longest
    audio that it takes.

    Args:
        config: the model section.
        module: the model on meta, with or without adapters.
        vision: the result of ``vision_on_meta``.
        num_tokens: tokens of images or audio in the language model.
        mode: ``train.activation_checkpointing``.
        dtype: dtype of the computation; None is float32.
        on_gpu: count as on a GPU.

    Its blocks are found by their names, and ``get_image_features`` runs it: see ``refuse_unpredicted``.
    """
    from transformers import AutoModelForMultimodalLM

    with torch.device("meta"):
        small = make_from_config(AutoModelForMultimodalLM, _with_few_blocks(read_model_config(config, sees=True)))
    freeze_as_configured(small, config)
    blocks = _encoder_blocks(small)
    medium = _example_medium(vision)
    measurements = []  # bytes of a block, and outside of blocks, for one medium and for two
    patches = []
    for media in ([medium], [medium, medium]):
        inputs = vision.reader.process_opened(media)
        shapes = [(name, tensor.shape) for name, tensor in inputs.items()]
        trained = [parameter.requires_grad for parameter in small.parameters()]
        key = repr((small.config.to_json_string(use_diff=False), trained, config.lora, shapes, dtype, on_gpu))
        if key not in _counted:
            _fill_encoders(small.train(), dtype or torch.float32)
            with as_on_cuda(on_gpu):
                _counted[key] = count_saved(small, blocks, _encoder_forward(small, inputs, dtype))
        saved = _counted[key]
        measurements.append((saved.bytes_by_block(mode)[-1], saved.before + saved.after))
        patches.append(_num_patches(vision, media))
    bytes_per_block, bytes_outside = (of_two - of_one for of_one, of_two in zip(*measurements, strict=True))
    num_patches = num_tokens / vision.reader.tokens_per_patch
    return round(
        (len(_encoder_blocks(module)) * bytes_per_block + bytes_outside) * num_patches / (patches[1] - patches[0])
    )


def _example_medium(vision: Vision) -> Image.Image | Sound:
    """A picture, or audio of the greatest length for an encoder of audio."""
    from PIL import Image

    if vision.reader.sees:
        return Image.new("RGB", (224, 224), "white")
    audio = vision.reader.processor.feature_extractor
    return Sound(np.zeros(audio.chunk_length * audio.sampling_rate, np.float32))


def _num_patches(vision: Vision, media: Sequence[Image.Image | Sound]) -> int:
    """Number of patches of pictures, or of tokens of audio."""
    texts, shapes = vision.reader.place(media)
    if vision.reader.sees:
        return int(shapes.prod(axis=1).sum())
    return int((vision.reader.kinds(np.array(vision.reader.tokenizer("".join(texts))["input_ids"])) != 0).sum())


def _encoder_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks outside of the language model, by name."""
    plan = language_plan(module)
    blocks = find_blocks(module, plan)
    lists = {name.rpartition(".")[0] for name in blocks if not name.startswith(f"{plan.decoder}.")}
    return {name: block for name, block in blocks.items() if name.rpartition(".")[0] in lists and name[-1].isdigit()}


def _encoder_forward(
    module: PreTrainedModel, inputs: dict[str, Tensor], dtype: torch.dtype | None
) -> Callable[[], Tensor]:
    """A function that runs the encoder on images or audio and returns a sum of its outputs."""
    if "input_features" in inputs:
        base = module.base_model

        def hear() -> Tensor:
            hidden = base.audio_tower(inputs["input_features"].to(dtype or torch.float32)).last_hidden_state  # pyright: ignore[reportCallIssue]
            return base.multi_modal_projector(hidden).float().sum()  # pyright: ignore[reportCallIssue]

        return hear
    accepted = inspect.signature(module.get_image_features).parameters  # pyright: ignore[reportArgumentType]
    images = {name: tensor for name, tensor in inputs.items() if name in accepted}
    images["pixel_values"] = images["pixel_values"].to(dtype or torch.float32)

    def run() -> Tensor:
        features = tree_leaves(dict(module.get_image_features(**images)))  # pyright: ignore[reportCallIssue]
        return torch.stack([leaf.float().sum() for leaf in features if isinstance(leaf, Tensor)]).sum()

    return run


def _fill_encoders(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replaces all weights and buffers, except those of the language model, by zeros on the CPU."""
    decoder = language_plan(module).decoder
    head = module.get_output_embeddings()
    for name, owner in module.named_modules():
        if name == decoder or name.startswith(f"{decoder}.") or owner is head:
            continue
        for key, weight in owner._parameters.items():
            if weight is not None:
                zeros = torch.zeros(weight.shape, dtype=dtype)
                owner._parameters[key] = nn.Parameter(zeros, requires_grad=weight.requires_grad)
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _with_few_blocks(described: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a model's configuration with few blocks in each encoder."""
    described = copy.deepcopy(described)
    text = described.get_text_config()
    for name in described.sub_configs:
        part = getattr(described, name)
        if part is text:
            continue
        # Blocks whose output later layers of the language model take, too.
        deepstack_blocks = getattr(part, "deepstack_visual_indexes", None)
        if deepstack_blocks is not None:
            part.deepstack_visual_indexes = list(range(len(deepstack_blocks)))
        for depth in DEPTHS:
            if isinstance(getattr(part, depth, None), int):
                setattr(part, depth, max(2, len(deepstack_blocks or ())))
    return described
