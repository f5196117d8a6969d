"""A language model that reads and draws images: what it adds to one that reads images, and its export."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sfumato.algorithms.device import to_device
from sfumato.data.media.document_media import MediaRefs
from sfumato.data.media.image_answers import DRAWN
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.hf_config import give_weights
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.model_folder import name_ends, save_generation_config, save_tokenizer
from sfumato.models.language.packed_model import Tensors
from sfumato.models.language.scores import TokenScores
from sfumato.models.omni.flow_head import NAME, LatentTokenizer, head_flops
from sfumato.models.omni.image_tokenizer import ImageTokenizer
from sfumato.models.omni.pipeline import save_drawing
from sfumato.parallel.weights import build_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from sfumato.models.diffusion.base import DiffusersModule

PARTS = ("foundation", "encoder", "image_tokenizer")
"""Folders within an export that hold a part of the model in the format of its own library."""

MAX_DRAWN = 1024
"""More images than a conversation draws: keys of the noise of two samples are at least this far apart."""


class OmniModel(LanguageModel):
    """A language model that reads and draws images."""

    image_tokenizer: ImageTokenizer | LatentTokenizer
    codes: range
    """Tokens of the codes of images."""
    line_end: int | None = None
    """The token that ends a line of codes, of models that have one."""
    kept_token: int | None = None
    """The token that begins a text, of models in which it stays when the prompt is hidden for guidance."""
    head_class: type[DiffusersModule] | None = None
    """The class of the flow head before ``parallelize``: fsdp2 replaces it by a subclass."""

    @property
    def has_head(self) -> bool:
        """Whether images are drawn as latents, by a flow head."""
        return hasattr(self.plain, NAME)

    @contextmanager
    def head(self) -> Iterator[nn.Module]:
        """Inside, the flow head has whole weights, and autocast is on.

        With gradients, use it right after the forward pass of the model, when the weights are still gathered.
        """
        head = getattr(self.plain, NAME)
        is_sharded = isinstance(self.module, FSDPModule)
        gathered = is_sharded and not torch.is_grad_enabled()
        if gathered:
            self.module.unshard()  # pyright: ignore[reportCallIssue]
        try:
            with self.autocast():
                yield head
        finally:
            if gathered:
                self.module.reshard()  # pyright: ignore[reportCallIssue]

    def flow_head_inputs(
        self, scores: TokenScores, wanted: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Inputs of the flow head for the N - 1 images that a micro-batch draws, and for a blank one.

        The blank image is not part of the loss; with it every rank runs the head, whether it has images or not.

        Args:
            scores: of the micro-batch.
            wanted: bool ``[B, T]``, tokens whose labels are those of images.
            batch: the micro-batch.

        Returns:
            Hidden states ``[N, K, H]``, latents ``[N, C, h, w]``, and N integers, made from sample ids, that key the
            noise of the images.
        """
        hidden = scores.hidden(wanted).unflatten(0, (-1, self.image_tokenizer.num_codes))
        drawn_latents = []
        keys = []
        for sample_id, media in zip(batch.sample_ids, batch.media, strict=False):  # rows of padding have no media
            for index, latents in enumerate(media.get(DRAWN, ())):
                drawn_latents.append(latents)
                keys.append(sample_id * MAX_DRAWN + index)
        latents = torch.stack([*drawn_latents, torch.zeros(self.image_tokenizer.latent_shape)])  # pyright: ignore[reportAttributeAccessIssue]  (a head has latents)
        blank = hidden.new_zeros(1, *hidden.shape[1:])
        return torch.cat([hidden, blank]), to_device(latents, self.mesh.device), [*keys, 0]

    def num_drawn(self, batch: TokenBatch) -> int:
        """Number of images that a micro-batch draws as latents."""
        return sum(len(media[DRAWN]) for media in batch.media if DRAWN in media)

    def flops_of_image(self) -> int:
        """Operations of the flow head for an image, forward and backward; 0 without a head. Call it before
        ``parallelize``."""
        if not self.has_head:
            return 0
        tokenizer = self.image_tokenizer
        return head_flops(getattr(self.plain, NAME), tokenizer.latent_shape, tokenizer.num_codes)  # pyright: ignore[reportAttributeAccessIssue]  (a head has latents)

    def single_document_inputs(self, input_ids: np.ndarray, images: MediaRefs | None) -> Tensors:
        """As ``PackedModel.single_document_inputs``, without latents, which transformers' module does not take."""
        inputs = super().single_document_inputs(input_ids, images)
        return {name: tensor for name, tensor in inputs.items() if name != DRAWN}

    def __call__(self, batch: TokenBatch) -> TokenScores:
        """As ``LanguageModel.__call__``, without latents of images that are drawn, which only the flow head takes."""
        media = [
            {name: tensor for name, tensor in sample_media.items() if name != DRAWN} for sample_media in batch.media
        ]
        return super().__call__(replace(batch, media=media))

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes the whole model as transformers' LLaVA, and each part into a folder of its own (``PARTS``).

        With a flow head, it also writes a diffusers pipeline of the parts that draw, ``drawing``.
        """
        from sfumato.models.older_readers import add_older_config_names

        heads = {name: weights.pop(name) for name in [*weights] if name.startswith(f"{NAME}.")}
        whole = dict(weights)
        with self._without_head():
            super().save_export(folder, weights, merge)
        config = cast("PreTrainedConfig", self.plain.config)
        dtype = self.autocast_dtype or torch.float32
        encoder = _build_empty(config.vision_config, False)
        foundation = _build_empty(config.text_config, True)
        names = foundation_names(foundation)
        prefix = "model.vision_tower."
        encoder_weights = {
            name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)
        }
        give_weights(encoder, {name: tensor.to(dtype) for name, tensor in encoder_weights.items()})
        foundation_weights = {names[name]: tensor.to(dtype) for name, tensor in whole.items() if name in names}
        give_weights(foundation, foundation_weights)
        for module, part in ((foundation, "foundation"), (encoder, "encoder")):
            module.config.dtype = dtype
            if part == "foundation":
                name_ends(module.config, self.tokenizer, has_source=False)
            module.save_pretrained(folder / part)
            add_older_config_names(folder / part)
        save_tokenizer(self.tokenizer, folder / "foundation")
        save_generation_config(folder / "foundation", None, self.tokenizer)
        assert self.vision is not None
        self.vision.reader.processor.image_processor.save_pretrained(folder / "encoder")
        self.image_tokenizer.save(folder / "image_tokenizer")
        if heads:
            assert self.head_class is not None
            with torch.device("meta"):
                head = self.head_class.from_config(getattr(self.plain, NAME).config)
            head.load_state_dict({name.removeprefix(f"{NAME}."): tensor for name, tensor in heads.items()}, assign=True)
            save_drawing(folder / "drawing", head, self.image_tokenizer.vae, foundation, self.tokenizer)  # pyright: ignore[reportAttributeAccessIssue]  (a head has latents)

    @contextmanager
    def _without_head(self) -> Iterator[None]:
        """Inside, ``_build`` makes modules without a head, which transformers' format has no place for."""
        build = self._build
        self._build = getattr(build, "without_head", build)
        try:
            yield
        finally:
            self._build = build


def foundation_names(foundation: PreTrainedModel) -> dict[str, str]:
    """The name of each weight in the language model alone, by its name in the whole model. Raises ConfigError."""
    prefix = f"{foundation.base_model_prefix}."
    output = foundation.get_output_embeddings()
    if not isinstance(output, nn.Linear) or output.bias is not None:
        raise ConfigError(f"model.foundation: {type(foundation).__name__} has no linear output layer without a bias")
    head = next(name for name, module in foundation.named_modules() if module is output)
    names = [name for name, _ in foundation.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in foundation.named_buffers() if name in foundation.state_dict()]
    name_in_foundation = {
        f"model.language_model.{name.removeprefix(prefix)}": name for name in names if name.startswith(prefix)
    }
    return name_in_foundation | {"lm_head.weight": f"{head}.weight"}


def _build_empty(config: PreTrainedConfig, causal: bool) -> PreTrainedModel:
    """A module of a configuration on meta, which weights are then given to."""
    from transformers import AutoModel, AutoModelForCausalLM

    auto_class = AutoModelForCausalLM if causal else AutoModel
    build = partial(auto_class.from_config, copy.deepcopy(config), attn_implementation="eager")
    return cast("PreTrainedModel", build_on_meta(build))
