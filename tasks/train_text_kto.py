"""Preference training of language models from answers that are good or bad: KTO (arXiv 2402.01306).

    bash train.sh tasks/train_text_kto.py configs/text/qwen3_8b_kto.yaml --kto.beta 0.05

How far the policy is from its reference is estimated at each step, from every prompt with the answer to another one.
The reference is the model before training: with LoRA the model itself without its adapters, otherwise a frozen copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from sfumato.algorithms.preference import kto_loss
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.text import KtoConfig, TrainTextKtoConfig
from sfumato.data.files.mismatched import mismatch_answers
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import padding_token
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe import probe
from sfumato.models.language.scores import TokenScores
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.step_sums import MeanSums
from sfumato.tracking.task import run_task


def main(config: TrainTextKtoConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_text_kto")

    model = build_language_model(config.model, config.train)
    check_length(model.plain.config, config.data.max_seq_len)
    reference = None if config.model.lora else build_language_model(config.model, config.train, frozen=True)
    flops = FlopCount(model.module)
    loader, validation, identity = open_text_data(
        config, model.tokenizer, mesh, run.say, run.watch("tokenise"), cost=lambda length: flops.training([length])
    )

    model.parallelize(mesh, config.train)
    probe(model, config.model, config.train, config.data.max_seq_len, run.say)
    if reference is not None:
        reference.parallelize(mesh, config.train)
        reference.set_row_layout(model.attention, model.row_layout)
    optimizer, schedule = build_optimizer(model.trained, config.train, lambda: loader.total_steps, mesh)
    state = TrainState(model.trained, optimizer, schedule, balancer=model.balancer, loader=loader, identity=identity)
    checkpointer = Checkpointer(config.train, run, mesh, lambda: loader.total_steps)
    checkpointer.resume(state)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    actions = Actions(save=partial(checkpointer.save, state))
    if validation is not None:
        actions.evaluate = partial(evaluate, model, reference, validation.batches, config, mesh)
    control = RunControl(run, actions)
    if state.step == 0 and validation is not None:
        with run.timed("evaluate"):
            metrics = evaluate(model, reference, validation.batches, config, mesh)
        run.log(0, metrics, show={})

    for step, batches in run.steps(run.waiting("data", loader.steps(from_step=state.step))):
        num_answers = mesh.sum(sum(len(batch.sample_ids) for batch in batches))
        with run.timed("reference"):
            batches = add_reference_log_probs(model, reference, batches)
            mismatched_batches = mismatch_answers(
                batches, mesh, config.data.max_seq_len, padding_token(model.tokenizer)
            )
            kl = estimate_kl(model, reference, mismatched_batches, num_answers, mesh)
        answers = Answers()
        loss_fn = partial(answer_loss, model=model, kto=config.kto, kl=kl, num_answers=num_answers, answers=answers)
        losses = model.forward_backward(batches, loss_fn, step)  # in the order of the pipeline schedule
        pending = losses, *answers.numbers  # on the device until they are read with the gradient's norm
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        balance = model.balance_experts()
        state.step = step + 1

        metrics = {"loss": mesh.sum(sum(losses)), "grad_norm": grad_norm, "lr": lr, "answers": num_answers, "kl": kl}
        metrics |= answers.means(mesh, "answers/") | balance
        if validation is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"):
                metrics |= evaluate(model, reference, validation.batches, config, mesh)
        run.count(
            tokens=sum(sum(batch.document_lengths) for batch in batches),
            flops=sum(flops.training(batch.document_lengths, num_outputs=batch.num_labels) for batch in batches)
            + sum(flops.forward(batch.document_lengths, batch.num_labels) for batch in batches)
            + 2 * sum(flops.forward(batch.document_lengths, batch.num_labels) for batch in mismatched_batches),
        )
        run.log(state.step, metrics, show={"loss": "loss", "kl": "kl"})
        checkpointer.after_step(state, due=loader.is_epoch_due(config.train.save_epochs))
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


class Answers:
    """Sums for the log over the answers of a step or an evaluation: over all, the good, and the bad ones."""

    def __init__(self) -> None:
        self.all = MeanSums()
        self.good = MeanSums()
        self.bad = MeanSums()

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """The sums, which are not read from the device yet."""
        return self.all.numbers, self.good.numbers, self.bad.numbers

    def means(self, mesh: Mesh, prefix: str) -> dict[str, float]:
        """Means over the answers of all ranks."""
        metrics = self.all.means(mesh, prefix)
        return metrics | self.good.means(mesh, f"{prefix}good_") | self.bad.means(mesh, f"{prefix}bad_")


def answer_loss(
    scores: TokenScores,
    batch: TokenBatch,
    model: LanguageModel,
    kto: KtoConfig,
    kl: float,
    num_answers: float,
    answers: Answers,
) -> torch.Tensor:
    """This micro-batch's part of the mean loss over the answers of the step."""
    assert batch.reference_log_probs is not None
    log_ratios = scores.log_probs(batch.labels) - batch.reference_log_probs
    # ``targets`` holds the label, 1 or 0, at the last token of each answer, and NaN elsewhere
    targets = cast(torch.Tensor, batch.targets)
    labels = targets.nan_to_num() if batch.document_lengths else torch.zeros_like(log_ratios)
    by_token = torch.stack([log_ratios, labels.to(log_ratios)])  # [2, B, T]
    num_documents = max(len(batch.document_lengths), 1)
    by_document = by_token.new_zeros(2, num_documents).index_add(1, batch.document_ids.flatten(), by_token.flatten(1))
    log_ratio, label = model.sum_over_sequence(by_document)
    if not batch.document_lengths:
        return log_ratio.sum() * 0.0  # a placeholder: its gradients are zero
    losses = kto_loss(log_ratio, label, kl, kto.beta, kto.desirable_weight, kto.undesirable_weight)
    rewards = kto.beta * log_ratio.detach()
    is_good = label > 0.5
    answers.all.add(len(losses), loss=losses.detach().sum())
    for sums, mask in ((answers.good, is_good), (answers.bad, ~is_good)):
        sums.add(mask.sum(), reward=torch.where(mask, rewards, 0).sum())
    return losses.sum() / num_answers


def compute_reference_log_probs(
    model: LanguageModel, reference: LanguageModel | None, batches: Sequence[TokenBatch]
) -> list[torch.Tensor]:
    """Log-probabilities of the labels of each micro-batch by the reference, ``[B, T]``.

    Where ``reference`` is None, it is the model without its adapters.
    """
    without_adapters = reference is None
    return (model if without_adapters else reference).token_log_probs(batches, reference=without_adapters)


def add_reference_log_probs(
    model: LanguageModel, reference: LanguageModel | None, batches: Sequence[TokenBatch]
) -> list[TokenBatch]:
    """Micro-batches with the log-probabilities of ``compute_reference_log_probs``."""
    log_probs = compute_reference_log_probs(model, reference, batches)
    return [
        replace(batch, reference_log_probs=reference_log_probs)
        for batch, reference_log_probs in zip(batches, log_probs, strict=True)
    ]


def estimate_kl(
    model: LanguageModel,
    reference: LanguageModel | None,
    mismatched_batches: list[TokenBatch],
    num_answers: float,
    mesh: Mesh,
) -> float:
    """The mean log-ratio of policy to reference over all ranks, of prompts with the answers to other prompts.

    It is at least 0, and 0 where the step has a single answer, which no other prompt can get.
    """
    log_probs = model.token_log_probs(mismatched_batches)
    reference_log_probs = compute_reference_log_probs(model, reference, mismatched_batches)
    pairs = zip(log_probs, reference_log_probs, strict=True)
    parts = Numbers(*((of_policy - of_reference).double().sum() for of_policy, of_reference in pairs))
    return max(mesh.sum(sum(parts, 0.0)) / num_answers, 0.0) if num_answers > 1 else 0.0


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    reference: LanguageModel | None,
    batches: list[TokenBatch],
    config: TrainTextKtoConfig,
    mesh: Mesh,
) -> dict[str, float]:
    """Loss, KL and implicit rewards on the validation answers."""
    num_answers = mesh.sum(sum(len(batch.sample_ids) for batch in batches))
    mismatched_batches = mismatch_answers(batches, mesh, config.data.max_seq_len, padding_token(model.tokenizer))
    kl = estimate_kl(model, reference, mismatched_batches, num_answers, mesh)
    answers = Answers()
    for scores, batch in model.score(add_reference_log_probs(model, reference, batches)):
        answer_loss(scores, batch, model, config.kto, kl, num_answers=1, answers=answers)
    return {"eval/kl": kl} | answers.means(mesh, "eval/")


if __name__ == "__main__":
    run_task(main, TrainTextKtoConfig)
