"""torch's pipeline stage with the arguments and the autocast of the pipeline that it belongs to.

A file of its own: torch's stages load ``torch._dynamo``, which takes a second that only pipelines should pay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class AutocastStage(PipelineStage):
    """torch's stage, but forward passes run under the pipeline's autocast and with the pipeline's arguments."""

    def __init__(
        self,
        *args: Any,
        autocast: Callable[[], AbstractContextManager[object]],
        arguments_of: Callable[[int, bool], Mapping[str, object]],
        check_output: Callable[[int, Tensor], None],
        **kwargs: Any,
    ) -> None:
        """As torch's stage.

        Args:
            args: of torch's stage.
            autocast: the context of forward passes.
            arguments_of: gives keyword arguments of a micro-batch's pass, by its number and whether the stage is first.
            check_output: is given the stage's number and what it hands to the next one.
            kwargs: of torch's stage.
        """
        super().__init__(*args, **kwargs)
        self._autocast = autocast
        self._arguments_of = arguments_of
        self._check_output = check_output

    def forward_one_chunk(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, fwd_chunk_id: int, args: tuple[object, ...], kwargs: dict[str, object] | None = None, **more: Any
    ) -> Tensor:
        # torch would split keyword arguments over micro-batches along dimension 0, which in media counts images.
        kwargs = dict(self._arguments_of(fwd_chunk_id, self.is_first))
        with self._autocast():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, **more)
        if not self.is_last:
            self._check_output(self.stage_index, output)
        return output
