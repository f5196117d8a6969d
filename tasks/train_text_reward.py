"""Training of reward models: from pairs of answers (Bradley-Terry), or from labels of the steps of an answer.

    bash train.sh tasks/train_text_reward.py configs/text/qwen3_8b_reward.yaml --train.lr 5e-6

A language model with a scalar head gives every token a value. The reward of an answer is the value of its last token,
that of a step the value of the token that ends it. The export is a sequence classifier of transformers, which the
reward `text_reward_model` reads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from sfumato.algorithms.reward_models import bradley_terry_loss, step_loss
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.text_reward import RewardObjectiveConfig, TrainTextRewardConfig
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.probe import probe
from sfumato.models.language.scalar_head import ScalarModel, build_scalar_model, find_scored_tokens
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.step_sums import MeanSums
from sfumato.tracking.task import run_task


def main(config: TrainTextRewardConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_text_reward")

    model = build_scalar_model(config.model, config.train, config.model.head)
    check_length(model.plain.config, config.data.max_seq_len)
    flops = FlopCount(model.module)
    loader, validation, identity = open_text_data(
        config, model.tokenizer, mesh, run.say, run.watch("tokenise"), cost=lambda length: flops.training([length])
    )

    model.parallelize(mesh, config.train)
    probe(model, config.model, config.train, config.data.max_seq_len, run.say)
    optimizer, schedule = build_optimizer(model.trained, config.train, lambda: loader.total_steps, mesh)
    state = TrainState(model.trained, optimizer, schedule, balancer=model.balancer, loader=loader, identity=identity)
    checkpointer = Checkpointer(config.train, run, mesh, lambda: loader.total_steps)
    checkpointer.resume(state)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    actions = Actions(save=partial(checkpointer.save, state))
    if validation is not None:
        actions.evaluate = partial(evaluate, model, validation.batches, config.reward, mesh)
    control = RunControl(run, actions)
    if state.step == 0 and validation is not None:
        with run.timed("evaluate"):
            metrics = evaluate(model, validation.batches, config.reward, mesh)
        run.log(0, metrics, show={})

    unit = "pairs" if config.reward.objective == "bradley_terry" else "steps"
    for step, batches in run.steps(run.waiting("data", loader.steps(from_step=state.step))):
        num_labels = mesh.sum(sum(count_labels(batch, config.reward) for batch in batches))
        sums = MeanSums()
        batches = [mark_scored_tokens(batch, model) for batch in batches]
        loss_fn = partial(reward_loss, model=model, reward=config.reward, num_labels=num_labels, sums=sums)
        losses = model.forward_backward(batches, loss_fn, step)
        pending = losses, sums.numbers  # on the device until they are read with the gradient's norm
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        balance = model.balance_experts()
        state.step = step + 1

        metrics = {"loss": mesh.sum(sum(losses), over=losses_over(config.reward)), "grad_norm": grad_norm, "lr": lr}
        metrics |= {unit: num_labels} | sums.means(mesh, f"{unit}/", over=losses_over(config.reward)) | balance
        if validation is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"):
                metrics |= evaluate(model, validation.batches, config.reward, mesh)
        run.count(
            tokens=sum(sum(batch.document_lengths) for batch in batches),
            flops=sum(flops.training(batch.document_lengths) for batch in batches),
        )
        run.log(state.step, metrics, show={"loss": "loss", "accuracy": f"{unit}/accuracy"})
        checkpointer.after_step(state, due=loader.is_epoch_due(config.train.save_epochs))
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def reward_loss(
    values: torch.Tensor,
    batch: TokenBatch,
    model: ScalarModel,
    reward: RewardObjectiveConfig,
    num_labels: float,
    sums: MeanSums,
) -> torch.Tensor:
    """This micro-batch's part of the mean loss over all pairs, or all steps of answers."""
    if reward.objective == "process":
        return process_loss(values, batch, num_labels, sums)
    assert batch.is_scored is not None
    num_documents = max(len(batch.document_lengths), 2)  # documents 2k and 2k + 1 are a pair, the better one first
    margins = batch.targets.nan_to_num() if batch.targets is not None else torch.zeros_like(values)
    by_token = torch.stack([values * batch.is_scored, margins])  # [2, B, T]
    by_document = by_token.new_zeros(2, num_documents).index_add(1, batch.document_ids.flatten(), by_token.flatten(1))
    rewards, margin = model.sum_over_sequence(by_document)
    if not batch.document_lengths:
        return rewards.sum() * 0.0  # a placeholder: its gradients are zero
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    losses = bradley_terry_loss(chosen, rejected, margin[0::2], reward.center_coef)
    sums.add(
        len(losses),
        loss=losses.detach().sum(),
        accuracy=(chosen > rejected).sum(),
        margin=(chosen - rejected).detach().sum(),
        reward=(chosen + rejected).detach().sum() / 2,
    )
    return losses.sum() / num_labels


def process_loss(values: torch.Tensor, batch: TokenBatch, num_labels: float, sums: MeanSums) -> torch.Tensor:
    """This micro-batch's part of the mean cross entropy at the tokens that end steps.

    Ranks that share a sequence each have the steps that end in their part of it.
    """
    if not batch.document_lengths:
        return values.sum() * 0.0  # a placeholder: its gradients are zero
    assert batch.targets is not None
    ends_step = ~batch.targets.isnan()
    labels = batch.targets.nan_to_num()
    losses = torch.where(ends_step, step_loss(values, labels), 0)
    is_right = labels > 0.5  # False where no step ends
    sums.add(
        ends_step.sum(),
        loss=losses.detach().sum(),
        accuracy=(((values > 0) == is_right) & ends_step).sum(),
        right=is_right.sum(),
        probability=torch.where(ends_step, values.detach().sigmoid(), 0).sum(),
    )
    return losses.sum() / num_labels


def count_labels(batch: TokenBatch, reward: RewardObjectiveConfig) -> int:
    """How many pairs a micro-batch has, or how many steps with a label."""
    if reward.objective == "bradley_terry":
        return len(batch.sample_ids)
    return int((~cast(torch.Tensor, batch.targets).isnan()).sum()) if batch.document_lengths else 0


def mark_scored_tokens(batch: TokenBatch, model: ScalarModel) -> TokenBatch:
    """The micro-batch with ``is_scored``, which marks the token of each document whose value is its reward."""
    return replace(batch, is_scored=find_scored_tokens(batch, model.pad_token_id))


def losses_over(reward: RewardObjectiveConfig) -> str:
    """The ranks over which losses are summed.

    Ranks that share a sequence all compute the losses of its pairs, but each only those of its own steps.
    """
    return "data" if reward.objective == "bradley_terry" else "loss"


@torch.no_grad()
def evaluate(
    model: ScalarModel, batches: list[TokenBatch], reward: RewardObjectiveConfig, mesh: Mesh
) -> dict[str, float]:
    """Loss and accuracy on the validation set."""
    sums = MeanSums()
    for values, batch in model.score([mark_scored_tokens(batch, model) for batch in batches]):
        reward_loss(values, batch, model, reward, num_labels=1, sums=sums)
    return sums.means(mesh, "eval/", over=losses_over(reward))


if __name__ == "__main__":
    run_task(main, TrainTextRewardConfig)
