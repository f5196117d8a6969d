"""A critic: a language model that predicts the return at every token, with an optimiser of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sfumato.config.critic import CriticConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.language.probe import probe
from sfumato.models.language.scalar_head import build_scalar_model
from sfumato.optim.optimizer import build_optimizer
from sfumato.optim.trained import Trained
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh

ValueLoss = Callable[[Tensor, TokenBatch], Tensor]
"""A function from values, float32 ``[B, T]``, and the placed micro-batch to its part of the loss, a scalar that is
divided by the count over all ranks and micro-batches already. Under sequence parallelism both are this rank's part of
the tokens."""


class Critic:
    """Lives in the actor's process, on the same mesh, and is trained on the same micro-batches."""

    def __init__(
        self,
        config: CriticConfig,
        policy: LanguageModelConfig,
        train: Any,
        mesh: Mesh,
        total_steps: int | Callable[[], int],
        max_seq_len: int,
        say: Callable[..., None],
    ) -> None:
        """Builds it, puts it on the mesh and probes it. Every rank must call it.

        Args:
            config: the critic's section.
            policy: the policy's model section, whose folder or description, tokenizer and attention it takes.
            train: the train section, for all but the rate.
            mesh: the ranks.
            total_steps: updates of the critic over which its schedule is laid.
            max_seq_len: tokens of the longest sequence.
            say: logs a line.

        Raises:
            ConfigError: when it cannot be built or cut as configured, or computes something else than transformers.
        """
        self.model_config = config.of_policy(policy)
        changed = {"lr": config.lr, "lr_min": min(train.lr_min, config.lr), "param_groups": []}
        train = train.model_copy(update=changed | {"chunked_loss": False, "expert_bias_rate": 0.0})
        self.mesh, self._max_grad_norm = mesh, train.max_grad_norm
        self.model = build_scalar_model(self.model_config, train, config.head)
        self.model.parallelize(mesh, train)
        probe(self.model, self.model_config, train, max_seq_len, say)
        optimizer, schedule = build_optimizer(self.model.trained, train, total_steps, mesh)
        self.state = Trained(self.model.trained, optimizer, schedule)
        """For ``TrainState.critic``."""

    def values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Values of all tokens without gradients: V(s_t) of what stands up to token t.

        Args:
            batches: this rank's micro-batches, as many on each rank.

        Returns:
            float32 ``[B, T]`` for each, on every rank that shares it, on its device.
        """
        return self.model.values(batches)

    def update(self, batches: Sequence[TokenBatch], loss_fn: ValueLoss, step: int) -> dict[str, float]:
        """One step of the optimiser on this rank's micro-batches, as many as on the other ranks.

        Args:
            batches: the micro-batches, with what the loss needs, such as returns and old values.
            loss_fn: the value loss.
            step: the optimiser's step, to which dropout belongs and which errors name.

        Returns:
            ``critic/loss``, ``critic/grad_norm`` before clipping, ``critic/lr``.

        Raises:
            NonFiniteError: when the loss or the gradient is not finite; nothing has been updated then.
        """
        where, optimizer, schedule = f"critic, step {step + 1}", self.state.optimizer, self.state.schedule
        losses = self.model.forward_backward(batches, loss_fn, step)
        grad_norm = reduce_and_clip(self.model.trained, self._max_grad_norm, self.mesh, where, losses)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = self.mesh.sum(sum(losses), over="loss")
        return {"critic/loss": total, "critic/grad_norm": grad_norm, "critic/lr": lr}
