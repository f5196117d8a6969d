"""Evaluation with fewer computed steps: MagCache (arXiv 2506.09045), as diffusers has it.

Between denoising steps the blocks of a transformer together add nearly the same to the image tokens, times a factor
that hardly depends on the prompt. Where the factors since the last computed step are near 1, that step's sum is added
again and the blocks are not run. The factors are measured on one sample of each rank, all steps computed, and averaged
over ranks, so all ranks leave out the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel


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
        self.model, self.threshold, self.num_steps = model, threshold, num_steps
        self._ratios: list[float] | None = None
        self._left_out: list[bool] = []
        self._errors: list[float] = []
        if not model.caches_steps:
            raise ConfigError(
                f"eval.step_cache: diffusers' MagCache does not fit {type(model.denoiser).__name__} of "
                f"{model.pipeline_class}; it fits the transformers of Stable Diffusion 3, FLUX, Qwen-Image, and Wan "
                "with one transformer: set it to 0"
            )
        if not (blocks := self._blocks()) or not all(_registered(type(block)) for block in blocks):
            raise ConfigError(
                "eval.step_cache: diffusers' MagCache cannot reach the blocks behind train.data_parallel_mode fsdp1: "
                "set it to 0, or take fsdp2 or ddp"
            )

    def measured(self, draw: Callable[[], np.ndarray]) -> np.ndarray:
        """Runs ``draw``, all steps computed, and keeps the factors. Every rank calls it.

        Args:
            draw: makes one image, in ``num_steps`` steps.

        Returns:
            The image.
        """
        from diffusers import MagCacheConfig

        # one step more than there are: after the last one diffusers would print the factors and forget them
        config = MagCacheConfig(num_inference_steps=self.num_steps + 1, calibrate=True)
        with self._hooked(config) as state:
            image = draw()
            own = state().calibration_ratios
        mesh = self.model.mesh
        everyone = [own] if mesh is None else mesh.gather(own, over="world")
        self._ratios = [sum(ratios) / len(ratios) for ratios in zip(*everyone, strict=True)]
        return image

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, and after ``measured``, samples are denoised with steps left out; whole trajectories only."""
        from diffusers import MagCacheConfig

        assert self._ratios is not None, "measure first"
        config = MagCacheConfig(self.threshold, num_inference_steps=self.num_steps, mag_ratios=self._ratios)
        with self._hooked(config) as state:
            note = self.model.denoiser.register_forward_hook(
                lambda *_: self._left_out.append(not state().should_compute)
            )
            try:
                yield
            finally:
                note.remove()

    def compare(self, exact: np.ndarray, cached: np.ndarray) -> None:
        """Notes the error of an image, uint8, made with steps left out."""
        self._errors.append(float(np.abs(exact.astype(np.float64) - cached).mean()) / 255)

    def metrics(self) -> dict[str, float]:
        """Share of steps left out; mean error of pixels, of 1, over the compared image of each rank."""
        errors = [self._errors] if self.model.mesh is None else self.model.mesh.gather(self._errors, over="world")
        errors = [error for of_rank in errors for error in of_rank]
        return {
            "eval/cached_steps": sum(self._left_out) / max(len(self._left_out), 1),
            "eval/cache_error": sum(errors) / max(len(errors), 1),
        }

    def _blocks(self) -> list[nn.Module]:
        """Those that diffusers puts hooks on."""
        stacks = [child for child in self.model.denoiser.children() if isinstance(child, nn.ModuleList)]
        return [block for stack in stacks for block in stack]

    @contextmanager
    def _hooked(self, config: Any) -> Iterator[Callable[[], Any]]:
        """Inside, the hooks are on the blocks; yields what looks at their memory. Afterwards no trace is left."""
        from diffusers.hooks import apply_mag_cache

        for cls in {type(block) for block in self._blocks()}:
            _register(cls)
        modules = list(self.model.denoiser.modules())
        forwards = {module: vars(module)["forward"] for module in modules if "forward" in vars(module)}
        try:
            apply_mag_cache(self.model.denoiser, config)
            (head, *_) = self._blocks()[0]._diffusers_hook.hooks.values()
            yield head.state_manager.get_state
        finally:
            for module in modules:
                if vars(module).pop("_diffusers_hook", None) is not None:
                    vars(module).pop("forward", None)
                    vars(module).update({"forward": forwards[module]} if module in forwards else {})


def _registered(cls: type[nn.Module]) -> Any:
    """What diffusers knows of a class of blocks, or of one that it was made from by wrapping; None is nothing."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    for base in cls.__mro__:
        try:
            return TransformerBlockRegistry.get(base)
        except ValueError:
            continue
    return None


def _register(cls: type[nn.Module]) -> None:
    """Tells diffusers that a wrapped class of blocks (fsdp2's) takes and returns what the class below it does."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    if (found := _registered(cls))._cls is not cls:
        TransformerBlockRegistry.register(cls, replace(found))
