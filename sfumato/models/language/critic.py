"""A critic: a language model that predicts the return at every token, with an optimiser of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from sfumato.config.critic import CriticConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.parts import build_tokenizer, refuse_other_tokens
from sfumato.models.language.probe import probe
from sfumato.models.language.scalar_head import build_scalar_model
from sfumato.optim.optimizer import build_optimizer
from sfumato.optim.trained import Trained
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from sfumato.config.text_rl import TextRLTrainConfig

ValueLoss = Callable[[Tensor, TokenBatch], Tensor]
"""Takes the values, float32 ``[B, T]``, and the micro-batch as ``place_batch`` returns it, and returns the share of the
loss that this micro-batch has: a scalar already divided by the number of terms over all ranks and micro-batches. Under
sequence parallelism both arguments hold this rank's tokens only."""


class Critic:
    """The value model beside a policy. It lives in the actor's process, on the same mesh, and trains on the same
    micro-batches."""

    def __init__(
        self,
        config: CriticConfig,
        policy: LanguageModelConfig,
        train: TextRLTrainConfig,
        mesh: Mesh,
        total_steps: int | Callable[[], int],
        max_seq_len: int,
        say: Callable[..., None],
    ) -> None:
        """Builds the model, puts it on the mesh and probes it. Every rank must call it.

        Args:
            config: the critic's section.
            policy: the policy's model section; the critic takes its folder or description, tokenizer and attention.
            train: the train section of the run; all of it but the learning rate holds for the critic, too.
            mesh: the ranks.
            total_steps: number of updates of the critic, over which its learning rate schedule runs.
            max_seq_len: tokens of the longest sequence.
            say: logs a line.

        Raises:
            ConfigError: when it cannot be built or sharded as configured, computes something else than transformers,
                has too few positions, or its folder has a tokenizer with other tokens than the policy's.
        """
        self.model_config = config.derive_from(policy)
        # param_groups name weights of the policy; a scalar head makes no logits that a chunked loss could take
        changed = {"lr": config.lr, "lr_min": min(train.lr_min, config.lr), "param_groups": []}
        train = train.model_copy(update=changed | {"chunked_loss": False, "expert_bias_rate": 0.0})
        self.mesh = mesh
        self._max_grad_norm = train.max_grad_norm
        self.model = build_scalar_model(self.model_config, train, config.head)
        check_length(self.model.plain.config.get_text_config(), max_seq_len, "critic.model_path: a sample's length")
        # a folder may hold weights alone
        if config.model_path is not None and (Path(config.model_path) / "tokenizer_config.json").is_file():
            tokenizer = build_tokenizer(self.model_config.model_copy(update={"tokenizer_path": None}))
            refuse_other_tokens(f"critic.model_path {config.model_path}", tokenizer, self.model.tokenizer)
        self.model.parallelize(mesh, train)
        probe(self.model, self.model_config, train, max_seq_len, say)
        optimizer, schedule = build_optimizer(self.model.trained, train, total_steps, mesh)
        self.state = Trained(self.model.trained, optimizer, schedule)
        """For ``TrainState.critic``."""

    def values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Values of all tokens without gradients: V(s_t), where the state s_t is the text up to and with token t.

        Args:
            batches: this rank's micro-batches, the same number on every rank.

        Returns:
            For each micro-batch float32 ``[B, T]`` on the device, on every rank that shares the micro-batch.
        """
        return self.model.values(batches)

    def update(self, batches: Sequence[TokenBatch], loss_fn: ValueLoss, step: int) -> dict[str, float]:
        """One optimiser step over this rank's micro-batches, the same number on every rank.

        Args:
            batches: the micro-batches, with the fields that the loss reads, such as returns and old values.
            loss_fn: the value loss.
            step: number of the optimiser step, which keys dropout and is named in errors.

        Returns:
            ``critic/loss``, ``critic/grad_norm`` before clipping, ``critic/lr``.

        Raises:
            NonFiniteError: when the loss or the gradient is not finite; nothing has been updated then.
        """
        where = f"critic, step {step + 1}"
        optimizer = self.state.optimizer
        schedule = self.state.schedule
        losses = self.model.forward_backward(batches, loss_fn, step)
        # it reads the losses, too, and raises before anything is updated when one is not finite
        grad_norm = reduce_and_clip(self.model.trained, self._max_grad_norm, self.mesh, where, losses)
        lr = cast("float", schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # losses are divided by the number of terms over all ranks already: their sum is the mean
        total = self.mesh.sum(sum(losses), over="loss")
        return {"critic/loss": total, "critic/grad_norm": grad_norm, "critic/lr": lr}
