"""Preference training of language models from existing pairs: DPO (arXiv 2305.18290), IPO, SLiC, SimPO, ORPO.

    bash train.sh tasks/train_text_dpo.py configs/text/qwen3_8b_dpo.yaml --dpo.beta 0.05

Both answers of a pair go through the model in one packed row. The reference is the model before training: with LoRA the
model itself without its adapters, otherwise a frozen copy that is sharded like the model. SimPO and ORPO have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from sfumato.algorithms.preference import preference_loss
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.text import DpoConfig, TrainTextDpoConfig
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.token_batch import TokenBatch
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
from sfumato.tracking.step_sums import PairSums
from sfumato.tracking.task import run_task


def main(config: TrainTextDpoConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_text_dpo")

    data_type = config.data.data_type
    model = build_language_model(config.model, config.train, data_type=data_type)
    check_length(model.plain.config, config.data.max_seq_len)
    has_copy = config.dpo.has_reference and not config.model.lora
    reference = build_language_model(config.model, config.train, True, data_type) if has_copy else None
    flops = FlopCount(model.module, model.vision)
    loader, validation, identity = open_text_data(
        config, model.tokenizer, mesh, run.say, run.watch("tokenise"), flops.count_document, flops.sight
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
        actions.evaluate = partial(evaluate, model, reference, validation.batches, config.dpo, mesh)
    control = RunControl(run, actions)
    if state.step == 0 and validation is not None:
        with run.timed("evaluate"):
            metrics = evaluate(model, reference, validation.batches, config.dpo, mesh)
        run.log(0, metrics, show={})

    for step, batches in run.steps(run.waiting("data", loader.steps(from_step=state.step))):
        if config.dpo.has_reference:
            with run.timed("reference"):
                batches = add_reference_log_probs(model, reference, batches)
        num_pairs = mesh.sum(sum(len(batch.sample_ids) for batch in batches))
        num_chosen = mesh.sum(sum(chosen_tokens(batch) for batch in batches))
        sums = PairSums()
        loss_fn = partial(dpo_loss, model=model, dpo=config.dpo, num_pairs=num_pairs, num_chosen=num_chosen, sums=sums)
        losses = model.forward_backward(batches, loss_fn, step)  # in the order of the pipeline schedule
        pending = losses, sums.numbers  # on the device until they are read with the gradient's norm
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        balance = model.balance_experts()
        state.step = step + 1

        metrics = {"loss": mesh.sum(sum(losses)), "grad_norm": grad_norm, "lr": lr, "pairs": num_pairs}
        metrics |= sums.means(mesh, "pairs/") | balance
        if validation is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"):
                metrics |= evaluate(model, reference, validation.batches, config.dpo, mesh)
        run.count(
            tokens=sum(sum(batch.document_lengths) for batch in batches),
            flops=sum(
                flops.training(batch.document_lengths, batch.image_shapes, batch.num_labels)
                + config.dpo.has_reference * flops.forward(batch.document_lengths, batch.num_labels, batch.image_shapes)
                for batch in batches
            ),
        )
        run.log(state.step, metrics, show={"loss": "loss", "accuracy": "pairs/accuracy"})
        checkpointer.after_step(state, due=loader.is_epoch_due(config.train.save_epochs))
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def dpo_loss(
    scores: TokenScores,
    batch: TokenBatch,
    model: LanguageModel,
    dpo: DpoConfig,
    num_pairs: float,
    num_chosen: float,
    sums: PairSums,
) -> torch.Tensor:
    """This micro-batch's part of the mean loss over the pairs of the step."""
    log_probs = scores.log_probs(batch.labels)  # [B, T], 0 outside the loss mask
    log_ratios = log_probs - cast(torch.Tensor, batch.reference_log_probs) if dpo.has_reference else log_probs
    by_token = torch.stack([log_probs, log_ratios, batch.loss_mask.to(log_probs)])  # [3, B, T]
    num_documents = max(len(batch.document_lengths), 2)  # documents 2k and 2k + 1 are a pair, the better one first
    by_document = by_token.new_zeros(3, num_documents).index_add(1, batch.document_ids.flatten(), by_token.flatten(1))
    policy, log_ratio, lengths = model.sum_over_sequence(by_document)
    chosen = log_ratio[0::2]
    rejected = log_ratio[1::2]
    if not batch.document_lengths:
        return policy.sum() * 0.0  # a placeholder: its gradients are zero
    pair_lengths = lengths[0::2], lengths[1::2]
    if not dpo.has_reference:  # losses without a reference compare means over tokens
        chosen = chosen / pair_lengths[0]
        rejected = rejected / pair_lengths[1]
    losses = preference_loss(chosen, rejected, dpo.beta, dpo.loss, dpo.label_smoothing, pair_lengths, dpo.gamma)
    sums.add(
        len(losses),
        loss=losses.detach().sum(),
        reward_chosen=dpo.beta * chosen.detach().sum(),
        reward_rejected=dpo.beta * rejected.detach().sum(),
        accuracy=(chosen > rejected).sum(),
    )
    return losses.sum() / num_pairs - dpo.sft_coef * policy[0::2].sum() / max(num_chosen, 1)


def chosen_tokens(batch: TokenBatch) -> int:
    """How many tokens of the better answers of a batch the loss mask holds."""
    return int((batch.loss_mask & (batch.document_ids % 2 == 0)).sum())


def add_reference_log_probs(
    model: LanguageModel, reference: LanguageModel | None, batches: Sequence[TokenBatch]
) -> list[TokenBatch]:
    """Micro-batches with the log-probabilities of their labels by the reference.

    Where ``reference`` is None, it is the model without its adapters.
    """
    without_adapters = reference is None
    log_probs = (model if without_adapters else reference).token_log_probs(batches, reference=without_adapters)
    return [
        replace(batch, reference_log_probs=reference_log_probs)
        for batch, reference_log_probs in zip(batches, log_probs, strict=True)
    ]


@torch.no_grad()
def evaluate(
    model: LanguageModel, reference: LanguageModel | None, batches: list[TokenBatch], dpo: DpoConfig, mesh: Mesh
) -> dict[str, float]:
    """Loss, implicit rewards and accuracy on the validation pairs."""
    sums = PairSums()
    batches = add_reference_log_probs(model, reference, batches) if dpo.has_reference else batches
    for scores, batch in model.score(batches):
        dpo_loss(scores, batch, model, dpo, num_pairs=1, num_chosen=1, sums=sums)
    return sums.means(mesh, "eval/")


if __name__ == "__main__":
    run_task(main, TrainTextDpoConfig)
