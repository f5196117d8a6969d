"""The policies of an RL run: the one that is trained, and those that it is compared with or sampled by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from sfumato.algorithms.decay import FROZEN, Decay
from sfumato.config.sections import TrainConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.reference import Reference
from sfumato.optim.ema import Ema
from sfumato.parallel.mesh import Mesh


class Policies:
    """The trained model, and the others by name: of old, ema, reference.

    A reference that never moves is the model without its adapter, or a frozen copy. Any other policy is another set of
    the trained weights, put into the model while it is looked at.
    """

    def __init__(self, model: DiffusionModel, decays: Mapping[str, Decay]) -> None:
        """Make it before training and before the model is put on a mesh.

        Args:
            model: the policy that is trained.
            decays: how fast each of the others follows it.
        """
        self.model = model
        self._decays = {name: each for name, each in decays.items() if name != "reference" or each != FROZEN}
        self._frozen = Reference(model) if len(self._decays) < len(decays) else None
        self._is_ahead = False
        self.moving: dict[str, Ema] = {}
        """Those that follow the policy, after ``parallelize``."""

    @property
    def frozen_weights(self) -> nn.Module | None:
        """The frozen copy, if there is one, which a checkpoint must keep."""
        return None if self._frozen is None else self._frozen.weights

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the model and its frozen copy on a mesh; the other policies start as what the model is."""
        self.model.parallelize(mesh, config)
        if self._frozen is not None:
            self._frozen.parallelize(mesh, config)
        self.moving = {name: Ema(self.model.denoiser, decay) for name, decay in self._decays.items()}

    @contextmanager
    def active(self, name: str) -> Iterator[DiffusionModel]:
        """A policy as a model, inside the block; ``policy`` is the trained one.

        No gradient may be under way through the trained one: its weights may be others meanwhile.
        """
        if name == "policy":
            yield self.model
        elif name in self.moving:
            with self.moving[name].applied():
                yield self.model
        else:
            assert name == "reference" and self._frozen is not None, f"there is no policy {name!r}"
            with self._frozen.active() as model:
                yield model

    def equals_trained(self, name: str) -> bool:
        """Whether a policy has the very weights of the trained one just now, so that nothing need be computed."""
        return not self._is_ahead and name in self.moving and self.moving[name].has_caught_up

    def policy_changed(self) -> None:
        """Call it after every optimiser step."""
        self._is_ahead = True

    def follow(self) -> None:
        """Call it at the end of every iteration: the others move towards the trained policy."""
        for each in self.moving.values():
            each.update()
        self._is_ahead = False
