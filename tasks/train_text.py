"""Pretraining and fine-tuning of language models.

    bash train.sh tasks/train_text.py configs/quickstart/text_sft.yaml --train.lr 1e-4

Plain text or conversations become tokens and packed rows without padding. The loss is the mean over the tokens of the
whole step that its loss mask holds, on any mesh. A step's samples follow from the data, the seed and one integer, so a
run does not depend on the number of processes, on the micro-batch size, or on having been interrupted. A mixture of
experts whose config.json has output_router_logits is trained with the auxiliary loss of its routers besides.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.load import load_maker
from sfumato.config.text import LanguageModelConfig, TrainTextConfig
from sfumato.data.text.loader import Validation, open_text_data
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import decode_text
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.probe import probe
from sfumato.models.language.router_loss import StepRouterLoss
from sfumato.models.language.scores import TokenScores
from sfumato.optim.ema import Ema, averaged_weights, with_averages
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.rollout.text.greedy import answer_greedily
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.samples import SampleRecord
from sfumato.tracking.step_sums import SourceLosses
from sfumato.tracking.task import run_task


def main(config: TrainTextConfig) -> None:
    make_model(config.model)
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_text")

    model = build_language_model(config.model, config.train, False, config.data.data_type, with_router_loss=True)
    check_length(model.plain.config, config.data.max_seq_len)
    flops = FlopCount(model.module, model.vision)
    loader, validation, identity = open_text_data(
        config, model.tokenizer, mesh, run.say, run.watch("tokenise"), flops.count_document, flops.sight
    )

    model.parallelize(mesh, config.train)
    probe(model, config.model, config.train, config.data.max_seq_len, run.say)
    optimizer, schedule = build_optimizer(model.trained, config.train, lambda: loader.total_steps, mesh)
    ema = Ema(model.trained, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    saved = {"balancer": model.balancer, "loader": loader, "identity": identity}
    state = TrainState(model.trained, optimizer, schedule, ema, **saved)
    checkpointer = Checkpointer(config.train, run, mesh, lambda: loader.total_steps)
    checkpointer.resume(state)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    actions = Actions(save=partial(checkpointer.save, state))
    if validation is not None:
        actions.evaluate = with_averages(ema, partial(evaluate, model, validation, mesh))
        actions.sample = with_averages(ema, lambda: answer_prompts(model, validation, config, state.step))
    control = RunControl(run, actions)
    if state.step == 0 and validation is not None:
        with run.timed("evaluate"):
            run.save_samples(0, answer_prompts(model, validation, config, 0))
            metrics = evaluate(model, validation, mesh)
        run.log(0, metrics, show={})

    for step, batches in run.steps(run.waiting("data", loader.steps(from_step=state.step))):
        num_tokens = mesh.sum(sum(batch.num_labels for batch in batches))  # that the loss mask holds, of all ranks
        by_source = SourceLosses(loader.source_names)
        aux_loss = StepRouterLoss(model.router_loss, batches, mesh)
        loss_fn = partial(next_token_loss, num_tokens=num_tokens, by_source=by_source, aux_loss=aux_loss)
        losses = model.forward_backward(batches, loss_fn, step)  # in the order of the pipeline schedule
        pending = losses, by_source.numbers, aux_loss.numbers  # on the device until they are read with the norm
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        balance = model.balance_experts()
        if ema is not None:
            ema.update()
        state.step = step + 1

        metrics = {"loss": mesh.sum(sum(losses), over="loss"), "grad_norm": grad_norm, "lr": lr, "tokens": num_tokens}
        metrics |= by_source.means(mesh) | aux_loss.metrics() | balance
        if validation is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"), averaged_weights(ema):
                metrics |= evaluate(model, validation, mesh)
                run.save_samples(state.step, answer_prompts(model, validation, config, state.step))
        run.count(
            tokens=sum(sum(batch.document_lengths) for batch in batches),
            flops=sum(
                flops.training(batch.document_lengths, batch.image_shapes, batch.num_labels) for batch in batches
            ),
        )
        run.log(state.step, metrics, show={"loss": "loss", "lr": "lr"})
        checkpointer.after_step(state, due=loader.is_epoch_due(config.train.save_epochs))
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def make_model(model: LanguageModelConfig) -> None:
    """Trains the model first, where the configuration says how and it does not exist yet."""
    if model.made_by is not None and not Path(str(model.model_path)).exists():
        main(load_maker(TrainTextConfig, model.made_by, str(model.model_path), "model.model_path"))


def next_token_loss(
    scores: TokenScores, batch: TokenBatch, num_tokens: float, by_source: SourceLosses, aux_loss: StepRouterLoss
) -> torch.Tensor:
    """A micro-batch's part of the step's loss.

    That is the mean cross entropy over the loss mask of the step, which holds ``num_tokens``, plus the auxiliary loss
    of routers times ``router_aux_loss_coef``, which is 0 for most models.
    """
    total, losses = scores.cross_entropy(batch.labels)  # [], [B, T] with 0 outside the loss mask
    by_source.add(losses, batch.source_ids, batch.loss_mask)
    return total / max(num_tokens, 1) + aux_loss.part(scores.router_logits, batch)


@torch.no_grad()
def evaluate(model: LanguageModel, validation: Validation, mesh: Mesh) -> dict[str, float]:
    """Mean loss over the loss mask of the validation set, and how much of it the model predicts.

    ``accuracy`` is the fraction of tokens that are the likeliest ones. ``exact_match`` is the fraction of documents of
    whose loss mask all tokens are, so that greedy decoding would give just these tokens.
    """
    sums = {"loss": 0.0, "tokens": 0.0, "correct": 0.0, "exact": 0.0, "documents": 0.0}
    for scores, batch in model.score(validation.batches):
        labels = batch.labels
        loss_mask = batch.loss_mask
        document_ids = batch.document_ids.flatten()
        is_wrong = loss_mask & (scores.predictions() != labels)
        by_document = torch.zeros(2, len(batch.document_lengths) + 1, device=labels.device)
        by_document[0].index_add_(0, document_ids, is_wrong.flatten().float())
        by_document[1].index_add_(0, document_ids, loss_mask.flatten().float())
        num_wrong, num_tokens = model.sum_over_sequence(by_document)
        sums["loss"] -= float(scores.log_probs(labels).double().sum())
        sums["tokens"] += float(loss_mask.sum())
        sums["correct"] += float((loss_mask & ~is_wrong).sum())
        # the ranks that share a sequence all have its documents now, while each has counted its own tokens only
        sums["exact"] += float(((num_tokens > 0) & (num_wrong == 0)).sum()) / mesh.layout.cp
        sums["documents"] += float((num_tokens > 0).sum()) / mesh.layout.cp
    totals = mesh.sum_dict(mesh.sum_dict(sums, over="loss"), over="pp")  # stages but the last have counted nothing
    return {
        "eval/loss": totals["loss"] / totals["tokens"],
        "eval/accuracy": totals["correct"] / totals["tokens"],
        "eval/exact_match": totals["exact"] / totals["documents"],
    }


def answer_prompts(
    model: LanguageModel, validation: Validation, config: TrainTextConfig, step: int
) -> list[SampleRecord]:
    """Records of greedy answers to the first validation prompts, and whether each is the expected one."""
    tokenizer = model.tokenizer
    prompts = validation.prompts
    inputs = [prompt.input_ids for prompt in prompts]
    images = [prompt.images for prompt in prompts]
    stop = validation.stop_token_ids
    answers = answer_greedily(model, inputs, config.eval.max_new_tokens, stop, images, config.eval.stop)
    return [
        SampleRecord(
            content=decode_text(tokenizer, answer),
            kind="eval",
            prompt=decode_text(tokenizer, prompt.input_ids),
            seed=config.train.seed,
            sample_id=index,
            rewards={"exact_match": float(answer == prompt.answer)},
            total=float(answer == prompt.answer),
            policy_version=step,
        )
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


if __name__ == "__main__":
    run_task(main, TrainTextConfig)
