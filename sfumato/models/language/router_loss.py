"""The auxiliary loss that balances a mixture of experts' routers, where config.json has ``output_router_logits``.

transformers' own functions compute it. For one forward pass, with E experts of which k are chosen for each token,

    aux_loss = E * sum over experts e of  f[e] * P[e]

where f[e] is how often tokens chose expert e and P[e] the mean probability that the router gave it, both over all
tokens of the pass but padding and over all layers (Switch Transformer, arXiv 2101.03961, equations 4 to 6).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.router_config import COEFFICIENTS, FUNCTION, REMEDY
from sfumato.models.language.scores import RouterLogits
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Parameters of that function in most families."""


class RouterLoss:
    """The auxiliary loss of one model's routers."""

    def __init__(self, module: PreTrainedModel) -> None:
        """``module`` is transformers' plain model; its weights may be on meta.

        Raises:
            ConfigError: when transformers computes the loss of this family in another way than that of most families.
        """
        function = family_function(type(module))
        coefficient = _read_setting(module, *COEFFICIENTS)
        num_experts = _read_setting(module, "num_experts")
        top_k = _read_setting(module, "num_experts_per_tok")
        if function is None or coefficient is None or num_experts is None or top_k is None:
            raise ConfigError(
                f"output_router_logits: the auxiliary loss of {type(module).__name__}'s routers is not computed here, "
                f"since transformers computes it otherwise than that of most families: {REMEDY}"
            )
        self._function = function
        self.coefficient = float(coefficient)
        self._num_experts = int(num_experts)
        self._top_k = int(top_k)

    def compute(self, logits: RouterLogits, is_token: Tensor) -> Tensor:
        """The loss of a forward pass without its coefficient, a scalar with graph.

        Args:
            logits: of the routers.
            is_token: bool ``[B, T]`` on the CPU, false for padding.
        """
        is_counted = is_token.flatten()
        if logits.places is not None:
            is_counted = (logits.places >= 0) & is_counted[logits.places.clamp(min=0)]
        # transformers' function takes a shorter way where there is no padding
        mask = None if bool(is_counted.all()) else to_device(is_counted.long(), logits.layers[0].device)
        return self._function(logits.layers, self._num_experts, self._top_k, mask)


def _read_setting(module: PreTrainedModel, *names: str) -> float | None:
    """The first of these attributes that transformers' causal model has, or else the configuration of its text; None
    where neither has any."""
    for holder in (module, module.config.get_text_config()):
        for name in names:
            if getattr(holder, name, None) is not None:
                return getattr(holder, name)
    return None


def family_function(cls: type[nn.Module]) -> Callable[..., Tensor] | None:
    """transformers' function of the loss for the family of a class; None without one, or with other parameters."""
    # an inherited ``forward`` calls the function of the file that it stands in
    for base in cls.__mro__:
        function = getattr(sys.modules.get(base.__module__), FUNCTION, None)
        if function is not None:
            return function if list(inspect.signature(function).parameters) == PARAMETERS else None
    return None


def check_router_settings(layout: Layout, is_compiled: bool) -> None:
    """Checks that the routers' logits of a forward pass are whole on one rank, and seen by transformers' hooks.

    Args:
        layout: of the mesh.
        is_compiled: whether blocks are compiled, where the hooks give logits of the wrong layers.

    Raises:
        ConfigError: for settings under which they are not.
    """
    if is_compiled:
        raise ConfigError(
            "train.compile and the routers' auxiliary loss (output_router_logits in config.json) exclude each other, "
            f"since transformers' hooks do not see the routers in compiled blocks: set it to false; or {REMEDY}"
        )
    sizes = {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "ulysses_parallel_size or context_parallel_size": layout.cp,
        "expert_parallel_size": layout.ep,
    }
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"train.{name} and the routers' auxiliary loss (output_router_logits in config.json) exclude each "
                f"other, since it is computed over the tokens of whole forward passes: set it to 1; or {REMEDY}"
            )


class StepRouterLoss:
    """The auxiliary loss of an optimiser step: the mean over all ranks' micro-batches, weighted by their tokens."""

    def __init__(self, loss: RouterLoss | None, batches: Sequence[TokenBatch], mesh: Mesh) -> None:
        """Call it on every rank.

        Args:
            loss: None for a model without the loss; then all parts are 0, and there is no metric.
            batches: this rank's micro-batches.
            mesh: the ranks.
        """
        self._loss = loss
        self._mesh = mesh
        self.numbers = Numbers()
        """This rank's parts of the loss, without the coefficient, which stay on the device until they are read."""
        if loss is not None:  # a collective sum, for which no rank may be missing
            self._num_tokens = mesh.sum(sum(sum(batch.document_lengths) for batch in batches))

    def part(self, logits: RouterLogits | None, batch: TokenBatch) -> Tensor | float:
        """``coefficient * aux_loss * (tokens of this micro-batch / tokens of the step)``, a scalar with graph.

        All tokens of documents count, in the loss mask or not, as in transformers.

        Args:
            logits: of the routers in this micro-batch's forward pass; None for a model without the loss.
            batch: the micro-batch.
        """
        if self._loss is None or not batch.document_lengths:  # a placeholder has no documents
            return 0.0
        assert logits is not None
        share = sum(batch.document_lengths) / self._num_tokens
        aux_loss = self._loss.compute(logits, batch.token_mask()) * share
        self.numbers.add(aux_loss)
        return self._loss.coefficient * aux_loss

    def metrics(self) -> dict[str, float]:
        """``aux_loss`` of the step over all ranks, without the coefficient; nothing for a model without the loss."""
        return {} if self._loss is None else {"aux_loss": self._mesh.sum(sum(self.numbers))}
