"""Evaluation with fewer computed steps: MagCache (arXiv 2506.09045), as diffusers has it.

What the blocks of a transformer together add to the image tokens changes little from one denoising step to the next,
but for a factor that hardly depends on the prompt. Where the factors since the last computed step are near 1, the sum
of that step is added again and the blocks are not run. The factors are measured on one sample of each rank with all
steps computed, and averaged over ranks, so that all ranks leave out the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import nn

from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel

if TYPE_CHECKING:
    from diffusers.hooks.mag_cache import MagCacheConfig


class StepCache:
    """Leaves out denoising steps of one model in one evaluation."""

    def __init__(self, model: DiffusionModel, threshold: float, num_steps: int) -> None:
        """
        Args:
            model: on its mesh.
            threshold: the accumulated distance of the factors from 1 up to which steps are left out.
            num_steps: denoising steps of every sample.

        Raises:
            ConfigError: when diffusers' hooks do not fit the model or its parallelism.
        """
        self.model = model
        self.threshold = threshold
        self.num_steps = num_steps
        self._ratios: list[float] | None = None
        self._left_out: list[bool] = []
        self._errors: list[float] = []
        if not model.caches_steps:
            raise ConfigError(
                f"eval.step_cache: diffusers' MagCache does not fit {type(model.denoiser).__name__} of "
                f"{model.pipeline_class}; it fits the transformers of Stable Diffusion 3, FLUX, Qwen-Image, and Wan "
                "with one transformer: set it to 0"
            )
        if not (blocks := self._hooked_blocks()) or not all(_block_metadata(type(block)) for block in blocks):
            raise ConfigError(
                "eval.step_cache: diffusers' MagCache cannot reach the blocks behind train.data_parallel_mode fsdp1: "
                "set it to 0, or take fsdp2 or ddp"
            )

    def measure(self, draw: Callable[[], np.ndarray]) -> np.ndarray:
        """Runs ``draw`` with all steps computed, and remembers the factors. Every rank calls it.

        Args:
            draw: makes one image, in ``num_steps`` steps.

        Returns:
            The image.
        """
        from diffusers import MagCacheConfig  # pyright: ignore[reportPrivateImportUsage]

        # one step more than there are: after the last step diffusers would print the factors and forget them
        config = MagCacheConfig(num_inference_steps=self.num_steps + 1, calibrate=True)
        with self._hook_blocks(config) as state:
            image = draw()
            rank_ratios = state().calibration_ratios
        mesh = self.model.mesh
        everyone = [rank_ratios] if mesh is None else mesh.gather(rank_ratios, over="world")
        self._ratios = [sum(ratios) / len(ratios) for ratios in zip(*everyone, strict=True)]
        return image

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, samples are denoised with steps left out. ``measure`` must have been called.

        Only whole trajectories may be denoised inside: diffusers counts their steps.
        """
        from diffusers import MagCacheConfig  # pyright: ignore[reportPrivateImportUsage]

        assert self._ratios is not None, "measure first"
        config = MagCacheConfig(self.threshold, num_inference_steps=self.num_steps, mag_ratios=self._ratios)
        with self._hook_blocks(config) as state:
            hook = self.model.denoiser.register_forward_hook(
                lambda *_: self._left_out.append(not state().should_compute)
            )
            try:
                yield
            finally:
                hook.remove()

    def compare(self, exact: np.ndarray, cached: np.ndarray) -> None:
        """Records the mean absolute error of an image, uint8, that was drawn with steps left out."""
        self._errors.append(float(np.abs(exact.astype(np.float64) - cached).mean()) / 255)

    def metrics(self) -> dict[str, float]:
        """The share of steps that were left out, and the mean error of pixels, from 0 to 1, over the images that the
        ranks compared."""
        errors = [self._errors] if self.model.mesh is None else self.model.mesh.gather(self._errors, over="world")
        errors = [error for of_rank in errors for error in of_rank]
        return {
            "eval/cached_steps": sum(self._left_out) / max(len(self._left_out), 1),
            "eval/cache_error": sum(errors) / max(len(errors), 1),
        }

    def _hooked_blocks(self) -> list[nn.Module]:
        """The blocks that diffusers puts hooks on."""
        stacks = [child for child in self.model.denoiser.children() if isinstance(child, nn.ModuleList)]
        return [block for stack in stacks for block in stack]

    @contextmanager
    def _hook_blocks(self, config: MagCacheConfig) -> Iterator[Callable[[], Any]]:
        """Puts diffusers' hooks on the blocks inside the block; yields a function that gives their state.

        Afterwards all modules have the ``forward`` and the attributes that they had before.
        """
        from diffusers.hooks import apply_mag_cache  # pyright: ignore[reportPrivateImportUsage]

        for cls in {type(block) for block in self._hooked_blocks()}:
            _register(cls)
        # diffusers replaces ``forward`` on the instances: those that had one there already get it back
        modules = list(self.model.denoiser.modules())
        forwards = {module: vars(module)["forward"] for module in modules if "forward" in vars(module)}
        try:
            apply_mag_cache(self.model.denoiser, config)
            (head, *_) = cast(Any, self._hooked_blocks()[0])._diffusers_hook.hooks.values()
            yield head.state_manager.get_state
        finally:
            for module in modules:
                if vars(module).pop("_diffusers_hook", None) is not None:
                    vars(module).pop("forward", None)
                    vars(module).update({"forward": forwards[module]} if module in forwards else {})


def _block_metadata(cls: type[nn.Module]) -> Any:
    """diffusers' ``TransformerBlockMetadata`` of a class of blocks or of a base of it; None where it has none."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    for base in cls.__mro__:
        try:
            return TransformerBlockRegistry.get(base)
        except ValueError:
            continue
    return None


def _register(cls: type[nn.Module]) -> None:
    """Registers a class of blocks that fsdp2 has derived, with the metadata of the class that it derives from."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    if (metadata := _block_metadata(cls))._cls is not cls:
        TransformerBlockRegistry.register(cls, replace(metadata))
