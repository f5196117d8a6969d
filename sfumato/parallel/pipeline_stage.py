"""torch's pipeline stage with the arguments and the autocast of the pipeline that it belongs to.

A file of its own: torch's stages load ``torch._dynamo``, which takes a second that only pipelines should pay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

if TYPE_CHECKING:
    from sfumato.parallel.pipeline import Pipeline


class AutocastStage(PipelineStage):
    """torch's stage, but forward passes run under the pipeline's autocast and with the pipeline's arguments."""

    def __init__(self, pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeline = pipeline

    def forward_one_chunk(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, object] | None = None, **more: Any
    ) -> Tensor:
        # torch would split keyword arguments over micro-batches along dimension 0, which in media counts images.
        pipeline = self._pipeline
        kwargs = pipeline._arguments(pipeline._batches[fwd_chunk_id], self.is_first)
        with pipeline._autocast():
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, **more)
        if not self.is_last:
            pipeline._check_dtype(self.stage_index, output)
        return output
