"""The policies of an RL run: the trained one, and others that draw samples or that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, Self, TypeVar

from torch import nn

from sfumato.algorithms.decay import FROZEN, Constant, Decay
from sfumato.config.sections import TrainConfig
from sfumato.models.exportable import Exportable, has_adapters
from sfumato.optim.ema import Ema
from sfumato.parallel.mesh import Mesh

FOLLOWS = Constant(0.0)
"""The decay of a moving average that is a plain copy of the latest weights."""


class PolicyModel(Exportable, Protocol):
    """A model of any modality that reinforcement learning can train."""

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the trained module on a mesh."""
        ...

    def frozen_copy(self) -> Self:
        """A model with a copy of ``trained`` that needs no gradients; modules that are not trained are shared."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """Inside, the model's low-rank adapter is switched off."""
        ...


Model = TypeVar("Model", bound=PolicyModel)


class Policies(Generic[Model]):
    """The trained model (``policy``) and other policies by name: some of old, ema and reference.

    A reference that never moves is the model without its adapter, or a frozen copy. Any other policy is a second set of
    the trained weights, which ``active`` puts into the model for as long as it is used.
    """

    def __init__(
        self,
        model: Model,
        decays: Mapping[str, Decay],
        sample_with: str = "policy",
        keep_previous: bool = False,
        reference: Model | None = None,
    ) -> None:
        """Make it before training, and before the model is put on a mesh: a frozen copy has the initial weights.

        Args:
            model: the policy that is trained.
            decays: by name of each other policy, how fast it follows the trained one.
            sample_with: name of the policy that draws samples.
            keep_previous: keep the weights that drew samples before the last update, for a sampler that lags behind.
            reference: another model, frozen, that is the reference, such as a teacher.
        """
        self.model = model
        self.sample_with = sample_with
        self._keep_previous = keep_previous
        self._previous: Ema | None = None
        # a reference that never moves needs no moving average
        self._decays = {name: decay for name, decay in decays.items() if name != "reference" or decay != FROZEN}
        self._has_frozen = len(self._decays) < len(decays)
        self._copy = reference
        self._is_own_copy = reference is None and self._has_frozen and not has_adapters(model.trained)
        if self._is_own_copy:
            self._copy = model.frozen_copy()
        self._is_ahead = False
        self.moving: dict[str, Ema] = {}
        """Moving averages of the trained weights by policy, after ``parallelize``."""

    @property
    def frozen_copy(self) -> Model | None:
        """The reference, where it is a frozen copy of the policy."""
        return self._copy if self._is_own_copy else None

    @property
    def other_model(self) -> Model | None:
        """The reference, where it is another model than the policy."""
        return None if self._is_own_copy else self._copy

    @property
    def frozen_weights(self) -> nn.Module | None:
        """The weights of the frozen copy, if there is one, which a checkpoint must hold."""
        return None if self.frozen_copy is None else self.frozen_copy.trained

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the model and its frozen copy on a mesh; all other policies start with the model's weights."""
        self.model.parallelize(mesh, config)
        if self._copy is not None:
            self._copy.parallelize(mesh, config)
        self.moving = {name: Ema(self.model.trained, decay) for name, decay in self._decays.items()}
        if self._keep_previous:
            self._previous = Ema(self.model.trained, FOLLOWS)

    @contextmanager
    def active(self, name: str) -> Iterator[Model]:
        """Inside, a policy as a model; the name ``policy`` is the trained one.

        There must be no graph of the trained model that still waits for its backward pass, since the block may exchange
        the weights.
        """
        if name == "policy":
            yield self.model
        elif name in self.moving:
            with self.moving[name].applied():
                yield self.model
        else:
            assert name == "reference" and self._has_frozen, f"there is no policy {name!r}"
            if self._copy is not None:
                yield self._copy
                return
            # with adapters the base weights are the reference, and no copy is needed
            with self.model.without_adapter():
                yield self.model

    @property
    def saved(self) -> dict[str, Ema]:
        """The moving averages that a checkpoint must hold besides the frozen copy, after ``parallelize``."""
        return self.moving | ({} if self._previous is None else {"previous": self._previous})

    def begin(self) -> None:
        """Call it when a run begins or has been resumed, perhaps from a checkpoint without the previous policy."""
        # no updates: neither this process nor a checkpoint has kept a previous policy yet
        if self._previous is not None and self._previous.num_updates == 0:
            self.snapshot_previous()

    def snapshot_previous(self) -> None:
        """Call it before an update: keeps the weights that have drawn samples until now."""
        if self._previous is not None:
            # inside, the model has the sampling policy's weights, of which the average with decay 0 becomes a copy
            with self.active(self.sample_with):
                self._previous.update()

    @contextmanager
    def sampling(self, previous: bool = False) -> Iterator[Model]:
        """Inside, the policy that draws samples, or with ``previous`` the one that did before the last update."""
        if not previous:
            with self.active(self.sample_with) as model:
                yield model
            return
        assert self._previous is not None, "the policy before the last update was not kept"
        with self._previous.applied():
            yield self.model

    @property
    def is_ahead(self) -> bool:
        """Whether the trained policy has changed since the last iteration ended."""
        return self._is_ahead

    def equals_trained(self, name: str) -> bool:
        """Whether a policy currently has exactly the weights of the trained one, so that its results are known."""
        # after an optimiser step the trained policy is ahead of all others until they follow
        return not self._is_ahead and name in self.moving and self.moving[name].has_caught_up

    def policy_changed(self) -> None:
        """Call it after every optimiser step."""
        self._is_ahead = True

    def update_averages(self) -> None:
        """Call it at the end of every iteration: the other policies move towards the trained one."""
        for average in self.moving.values():
            average.update()
        self._is_ahead = False
