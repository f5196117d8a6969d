"""Forward passes of a transformers module for drawing: in evaluation mode, and without a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from sfumato.algorithms.device import to_device
from sfumato.data.media.vision import Images, MultimodalInputs, Tensors, Vision
from sfumato.models.language.document_rows import forget_lengths


class Forward:
    """Forward passes of a module in evaluation mode, without gradients. Afterwards it is as it was."""

    def __init__(
        self,
        module: nn.Module,
        around: Callable[[], AbstractContextManager[object]],
        vision: Vision | None = None,
    ) -> None:
        """``around`` makes the context of each forward pass, such as autocast; ``vision`` is of a model that sees."""
        self.module, self._around, self.vision = module, around, vision
        self.arguments = inspect.signature(module.forward).parameters
        self._is_precise = False
        self.gives_positions = False
        """Whether whole sequences come with their positions, which some modules do not hand on by themselves."""
        self.look()

    def look(self) -> None:
        """Looks again at what the module is made of: adapters may have come."""
        # vars, not setattr, which costs a step of a small model a tenth of its time
        self._module_attributes = [vars(submodule) for submodule in self.module.modules()]
        configs = [attributes["config"] for attributes in self._module_attributes if isinstance(attributes.get("config"), PreTrainedConfig)]
        texts = [config.get_text_config() for config in configs]
        if self.vision is not None:  # the encoder keeps its own attention
            configs, texts = [], [self.module.config.get_text_config()]
        self._configs = list({id(config): config for config in [*configs, *texts]}.values())

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        return self.module.get_input_embeddings().weight.device

    def __call__(self, input_ids: Tensor, attention: str | None = None, **arguments: object) -> Tensor:
        """Logits of tokens ``[n, q]``, with the module's attention or another one."""
        modules, configs = self._module_attributes, self._configs
        training_flags = [attributes["training"] for attributes in modules]
        attentions = [config._attn_implementation for config in configs]
        for attributes in modules:
            attributes["training"] = False
        if attention is not None:
            for config in configs:
                config._attn_implementation = attention
        try:
            with torch.no_grad(), self._around(), self._precision():
                return self.module(input_ids=input_ids, **arguments).logits
        finally:
            for attributes, is_training in zip(modules, training_flags, strict=True):
                attributes["training"] = is_training
            for config, name in zip(configs, attentions, strict=True):
                config._attn_implementation = name

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Inside, autocast is off."""
        self._is_precise = True
        try:
            yield
        finally:
            self._is_precise = False

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, enabled=False) if self._is_precise else nullcontext()

    def media_of(self, images: Images | None) -> Tensors:
        """What a model that sees is given for the images of a sequence; raises DataError as ``ImageReader.tensors``."""
        return {} if self.vision is None or images is None else self.vision.reader.tensors(images)

    def beside(self, input_ids: Tensor, position_ids: Tensor, beside: MultimodalInputs) -> dict[str, Tensor]:
        """Arguments of the module for tokens ``[n, q]`` of a model that sees."""
        device = input_ids.device
        arguments = beside.arguments(position_ids.cpu(), self.arguments)
        return {name: to_device(tensor, device) for name, tensor in arguments.items()}

    def last(self, input_ids: Tensor, media: Sequence[Tensors] | None = None) -> Tensor:
        """Logits of the last tokens ``[n, V]`` of whole sequences ``[n, q]``, nothing cached.

        ``media`` is of each sequence what ``media_of`` gave.
        """
        return self.some(input_ids, [input_ids.shape[1] - 1], media)[:, 0]

    def some(
        self, input_ids: Tensor, columns: Sequence[int] | None = None, media: Sequence[Tensors] | None = None
    ) -> Tensor:
        """Logits of some tokens, or all, of whole sequences ``[n, q]``, nothing cached: ``[n, columns, V]``."""
        forget_lengths(self.module)
        picked = None if columns is None else torch.tensor(columns, device=input_ids.device)
        can_pick = picked is not None and "logits_to_keep" in self.arguments
        arguments: dict[str, object] = {"logits_to_keep": picked} if can_pick else {}
        if self.vision is not None:
            count, width = input_ids.shape
            beside = self.vision.beside_rows(input_ids.tolist(), media or [{}] * count, width)
            arguments |= self.beside(input_ids, torch.arange(width).expand(count, -1), beside)
        elif self.gives_positions:
            arguments["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        logits = self(input_ids, use_cache=False, **arguments)
        return logits if picked is None or can_pick else logits[:, picked]
