"""An engine that draws by the weights of a policy in the same process, whatever mesh that is on."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sfumato.models.language.model import LanguageModel
from sfumato.parallel.weights import each_whole_weight
from sfumato.rollout.engines.base import Engine


class PolicyEngine:
    """The embedded engine of a policy. Where a rank holds all weights, the engine draws by these; else by a copy of the
    whole model in the dtype of its forward passes, which is gathered when they have changed, tensor by tensor."""

    def __init__(self, model: LanguageModel, build: Callable[[nn.Module], Engine]) -> None:
        """Makes nothing yet.

        Args:
            model: the policy, on its mesh.
            build: makes an engine of transformers' module.
        """
        self.model = model
        self._build = build
        self._engine: Engine | None = None
        self._copy: nn.Module | None = None
        self._weights: Hashable = None

    def ready(self, weights: Hashable, version: int) -> Engine:
        """The engine, with the current weights of the policy. Every rank that shares the policy must call it.

        Args:
            weights: a key of the weights; nothing is gathered when it equals that of the last call.
            version: of the policy, with which drawn tokens are labelled.
        """
        if self._engine is None or self._weights != weights:
            self._take_weights()
            self._weights = weights
        assert self._engine is not None
        self._engine.version = version
        return self._engine

    def _take_weights(self) -> None:
        """Builds the engine, or has it forget keys and values of earlier weights; gathers the weights where needed."""
        model = self.model
        if is_whole(model.module):
            if self._engine is None:
                self._engine = self._build(model.plain)
            else:
                self._engine.flush()
            return
        # as fsdp gathers them for a forward pass, so that the copy computes what the policy does in half the memory
        compute_dtype = model.autocast_dtype
        if self._engine is None or self._copy is None:
            copies = dict(each_whole_weight(model.trained, model.mesh, compute_dtype))
            # transformers wraps the method, of which its annotations lose the instance
            copied = cast("nn.Module", model.plain_with(copies))
            self._copy = copied.to(model.mesh.device).requires_grad_(False)
            self._engine = self._build(self._copy)
            return
        places = self._copy.state_dict()
        for name, tensor in each_whole_weight(model.trained, model.mesh, compute_dtype, with_frozen=False):
            if name in places:
                places[name].copy_(tensor)
        self._engine.flush()

    def close(self) -> None:
        """Ends the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()


def is_whole(module: nn.Module) -> bool:
    """Whether this rank holds every weight of a module as ``parallelize`` returned it."""
    wrapped = (FSDPModule, FullyShardedDataParallel)
    return not any(isinstance(submodule, wrapped) for submodule in module.modules()) and not any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    )
