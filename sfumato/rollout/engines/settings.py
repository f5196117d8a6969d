"""Settings of the embedded engine, which a configuration chooses by ``rollout.engine``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfumato.data.text.token_ids import whole_decode
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from sfumato.models.language.model import LanguageModel
    from sfumato.rollout.engines.base import Engine


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Draws with transformers' module in the process of the actor or the sampler."""

    type: ClassVar[str] = "embedded"
    is_server: ClassVar[bool] = False
    takes_images: ClassVar[bool] = True
    takes_other_media: ClassVar[bool] = True

    max_batch_size: int = 256
    """Sequences that are drawn at a time."""
    cache_gb: float | None = None
    """Memory for keys and values in GiB; null is half of what is free."""

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size {self.max_batch_size} must be at least 1")
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise ConfigError(f"cache_gb {self.cache_gb} must be above 0, or null")

    def check_installed(self) -> str:
        """See ``ServedSettings``: it needs nothing."""
        return ""

    def build_for_module(
        self, module: nn.Module, model: LanguageModel, max_length: int, is_for_training: bool = True
    ) -> Engine:
        """Builds the engine of a module that is whole in this process.

        Args:
            module: draws the tokens.
            model: the policy, for the precision of its passes.
            max_length: tokens of the longest sample, prompt included.
            is_for_training: whether what is drawn is learned from: see ``choose_rows``.
        """
        from sfumato.rollout.engines.embedded.engine import EmbeddedEngine

        cache_bytes = None if self.cache_gb is None else int(self.cache_gb * 2**30)

        @contextmanager
        def forward_pass() -> Iterator[None]:
            # ``whole_output``: training with a chunked loss takes the output layer out of the module.
            with model.autocast(), model.whole_output():
                yield

        return EmbeddedEngine(
            module,
            around=forward_pass,
            vision=model.vision,
            decode=whole_decode(model.tokenizer),
            max_length=max_length,
            max_batch_size=self.max_batch_size,
            cache_bytes=cache_bytes,
            is_for_training=is_for_training,
        )
