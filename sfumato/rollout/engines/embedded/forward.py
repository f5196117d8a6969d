"""Forward passes of a transformers module for drawing: in evaluation mode, which leave the module as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from sfumato.algorithms.device import to_device
from sfumato.config.open_mappings import Keywords
from sfumato.data.media.document_media import MediaRefs, MultimodalInputs, Tensors
from sfumato.data.media.vision import Vision
from sfumato.models.language.document_rows import forget_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Forward:
    """Forward passes of a module in evaluation mode, without gradients. Afterwards it is as it was."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[], AbstractContextManager[object]],
        vision: Vision | None = None,
    ) -> None:
        """``around`` makes the context of each forward pass, such as autocast; ``vision`` is of a model that sees."""
        self.module = cast("PreTrainedModel", module)
        self._around = around
        self.vision = vision
        self.arguments = inspect.signature(module.forward).parameters
        self._is_precise = False
        self.gives_positions = False
        """Whether whole sequences come with their positions, which some modules do not hand on by themselves."""
        self.look()

    def look(self) -> None:
        """Lists submodules and configurations of the module anew: adapters may have been added."""
        # Later the dictionaries of attributes are written to: setattr of a module costs a step of a small model a
        # tenth of its time.
        self._module_attributes = [vars(submodule) for submodule in self.module.modules()]
        configs = [
            attributes["config"]
            for attributes in self._module_attributes
            if isinstance(attributes.get("config"), PreTrainedConfig)
        ]
        text_configs = [config.get_text_config() for config in configs]
        if self.vision is not None:  # the encoder keeps its own attention
            configs = []
            text_configs = [self.module.config.get_text_config()]
        # Layers and the whole model usually share one configuration: each object is switched once.
        self._configs = list({id(config): config for config in [*configs, *text_configs]}.values())

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return cast("nn.Embedding", self.module.get_input_embeddings()).weight.device

    @property
    def last_logits(self) -> dict[str, object]:
        """Arguments by which the module computes the logits of the last token alone, where it can."""
        return {"logits_to_keep": 1} if "logits_to_keep" in self.arguments else {}

    def __call__(self, input_ids: Tensor, attention: str | None = None, **arguments: object) -> Tensor:
        """Logits ``[n, q, V]`` of tokens ``[n, q]``.

        Args:
            input_ids: int64 ``[n, q]``.
            attention: transformers' name of an attention that replaces the module's for this pass.
            arguments: further arguments of the module's ``forward``.
        """
        module_attributes = self._module_attributes
        configs = self._configs
        training_flags = [attributes["training"] for attributes in module_attributes]
        attentions = [config._attn_implementation for config in configs]
        for attributes in module_attributes:
            attributes["training"] = False
        if attention is not None:
            for config in configs:
                config._attn_implementation = attention
        try:
            with torch.no_grad(), self._around(), self._autocast():
                return self.module(input_ids=input_ids, **arguments).logits
        finally:
            for attributes, is_training in zip(module_attributes, training_flags, strict=True):
                attributes["training"] = is_training
            for config, name in zip(configs, attentions, strict=True):
                config._attn_implementation = name

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Inside the block, autocast is off, but for weights of several dtypes, which it alone brings together: float32
        adapters beside a model in bf16."""
        dtypes = {weight.dtype for weight in self.module.parameters() if weight.is_floating_point()}
        self._is_precise = len(dtypes) == 1
        try:
            yield
        finally:
            self._is_precise = False

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, enabled=False) if self._is_precise else nullcontext()

    def media_of(self, images: MediaRefs | None) -> Tensors:
        """Tensors that a multimodal model is given for the images of a sequence; empty without images.

        Raises:
            DataError: as ``MediaProcessor.tensors``.
        """
        return {} if self.vision is None or images is None else self.vision.reader.tensors(images)

    def media_arguments(self, input_ids: Tensor, position_ids: Tensor, beside: MultimodalInputs) -> dict[str, Tensor]:
        """Arguments that the ``forward`` of a multimodal model gets beside the tokens, on the device of these.

        Args:
            input_ids: int64 ``[n, q]``.
            position_ids: int64 ``[n, q]``, positions within the sequences.
            beside: tensors of the images, and positions on the rotary axes.
        """
        device = input_ids.device
        arguments = beside.arguments(position_ids.cpu(), self.arguments)
        return {name: to_device(tensor, device) for name, tensor in arguments.items()}

    def last(self, input_ids: Tensor, media: Sequence[Tensors] | None = None) -> Tensor:
        """Logits ``[n, V]`` of the last tokens of whole sequences ``[n, q]``, without a cache.

        ``media`` has for each sequence what ``media_of`` returned.
        """
        return self.some(input_ids, [input_ids.shape[1] - 1], media)[:, 0]

    def some(
        self, input_ids: Tensor, columns: Sequence[int] | None = None, media: Sequence[Tensors] | None = None
    ) -> Tensor:
        """Logits of whole sequences, without a cache.

        Args:
            input_ids: int64 ``[n, q]``.
            columns: positions whose logits are returned; None: all.
            media: for each sequence what ``media_of`` returned.

        Returns:
            ``[n, columns, V]``.
        """
        forget_lengths(self.module)
        picked = None if columns is None else torch.tensor(columns, device=input_ids.device)
        can_pick = picked is not None and "logits_to_keep" in self.arguments
        arguments: Keywords = {"logits_to_keep": picked} if can_pick else {}
        if self.vision is not None:
            count, width = input_ids.shape
            beside = self.vision.multimodal_inputs_of_rows(input_ids.tolist(), media or [{}] * count, width)
            arguments |= self.media_arguments(input_ids, torch.arange(width).expand(count, -1), beside)
        elif self.gives_positions:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            arguments["position_ids"] = positions.expand(input_ids.shape)
        logits = self(input_ids, use_cache=False, **arguments)
        return logits if picked is None or can_pick else logits[:, picked]
