"""Training of models that understand and draw images.

    bash train.sh tasks/train_omni.py configs/omni/numbers.yaml

A vision encoder shows images to a language model, which answers in text and in images. An image is either the codes of
an image tokenizer, which are tokens like others, or a latent that a small transformer denoises, conditioned on the
language model's hidden states (``model.head``). The loss is a weighted sum of the mean over the text tokens of the
whole step that the loss mask holds, and of the mean over codes, or the flow-matching loss of latents; it is the same on
any mesh. Steps and samples are those of ``tasks/train_text.py``.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import cast

import torch

from sfumato.algorithms.device import to_device
from sfumato.algorithms.flow_matching import add_noise, draw_sigma, flow_matching_loss
from sfumato.algorithms.noise import keyed_normal, keyed_uniform
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.load import load_maker
from sfumato.config.omni import OmniModelConfig, TrainImageTokenizerConfig, TrainOmniConfig
from sfumato.data.text.loader import Validation, open_text_data
from sfumato.data.text.prompt_dropout import drop_prompts, is_image
from sfumato.data.text.token_batch import TokenBatch
from sfumato.data.text.token_ids import padding_token
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.hf_config import check_length
from sfumato.models.language.probe import probe
from sfumato.models.language.scores import TokenScores
from sfumato.models.omni.flow_head import predict_velocity
from sfumato.models.omni.load import build_omni_model
from sfumato.models.omni.model import OmniModel
from sfumato.optim.ema import Ema, averaged_weights, with_averages
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.rollout.text.image_generation import draw_prompts, read_prompts
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.samples import SampleRecord
from sfumato.tracking.task import run_task

NUM_NOISES = 4
"""How many noise levels each image of a step is trained at."""


def main(config: TrainOmniConfig) -> None:
    make_image_tokenizer(config.model)
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_omni")

    model = build_omni_model(config)
    check_length(model.plain.config.get_text_config(), config.data.max_seq_len)
    flops = FlopCount(model.module, model.vision)
    flops_of_image = model.flops_of_image()
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
        measured = with_averages(ema, lambda: evaluate(model, validation, config, mesh, state.step))
        actions.evaluate = lambda: measured()[0]
        actions.sample = lambda: measured()[1]
    control = RunControl(run, actions)
    if state.step == 0 and validation is not None:
        with run.timed("evaluate"):
            metrics, samples = evaluate(model, validation, config, mesh, 0)
        run.save_samples(0, samples)
        run.log(0, metrics, show={})

    for step, batches in run.steps(run.waiting("data", loader.steps(from_step=state.step))):
        batches = drop_some_prompts(batches, model, config, step)
        counts = count_tokens(batches, model, mesh)
        losses, loss_sums = forward_backward(model, batches, counts, config, step)
        grad_norm = reduce_and_clip(
            model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", losses, loss_sums
        )
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        balance = model.balance_experts()
        if ema is not None:
            ema.update()
        state.step = step + 1

        metrics = {"loss": mesh.sum(sum(losses), over="loss"), "grad_norm": grad_norm, "lr": lr}
        sums = mesh.sum_dict({"text": 0.0, "image": 0.0} | loss_sums.sums(), over="loss")
        metrics |= {f"loss/{kind}": sums[kind] / counts[kind] for kind in sums if counts[kind]}
        metrics |= {f"tokens/{kind}": count for kind, count in counts.items()} | balance
        if validation is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"), averaged_weights(ema):
                eval_metrics, samples = evaluate(model, validation, config, mesh, state.step)
            metrics |= eval_metrics
            run.save_samples(state.step, samples)
        run.count(
            tokens=sum(sum(batch.document_lengths) for batch in batches),
            flops=sum(flops.training(batch.document_lengths, batch.image_shapes, batch.num_labels) for batch in batches)
            + NUM_NOISES * flops_of_image * sum(model.num_drawn(batch) for batch in batches),
        )
        run.log(state.step, metrics, show={"loss": "loss", "text": "loss/text", "image": "loss/image"})
        checkpointer.after_step(state, due=loader.is_epoch_due(config.train.save_epochs))
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def drop_some_prompts(
    batches: list[TokenBatch], model: OmniModel, config: TrainOmniConfig, step: int
) -> list[TokenBatch]:
    """The micro-batches of a step; some documents that draw an image have lost their prompt, for guidance."""
    return [
        drop_prompts(
            batch,
            model.codes,
            config.draw.prompt_dropout,
            seed=config.train.seed,
            step=step,
            pad_token_id=padding_token(model.tokenizer),
            kept_token_id=model.kept_token,
        )
        for batch in batches
    ]


def make_image_tokenizer(model: OmniModelConfig) -> None:
    """Trains the image tokenizer first, where the configuration says how and it does not exist yet."""
    if model.image_tokenizer_made_by is not None and not Path(cast(str, model.image_tokenizer)).exists():
        recipe = model.image_tokenizer_made_by
        tokenizer_config = load_maker(
            TrainImageTokenizerConfig, recipe, str(model.image_tokenizer), "model.image_tokenizer"
        )
        importlib.import_module("train_image_tokenizer").main(tokenizer_config)  # beside this file


def count_tokens(batches: list[TokenBatch], model: OmniModel, mesh: Mesh) -> dict[str, float]:
    """How many text tokens and how many image tokens the loss mask holds, over all ranks."""
    image = sum(int(is_image(batch.labels, model.codes, model.line_end).sum()) for batch in batches)
    return mesh.sum_dict({"text": float(sum(batch.num_labels for batch in batches) - image), "image": float(image)})


def forward_backward(
    model: OmniModel, batches: list[TokenBatch], counts: dict[str, float], config: TrainOmniConfig, step: int
) -> tuple[Numbers, Numbers]:
    """Forward and backward passes of a step's micro-batches.

    Returns:
        The loss of each micro-batch, and the sums of the losses of text and of images.
    """
    loss_sums = Numbers()
    losses_of = flow_losses if model.has_head else code_losses

    def loss_fn(scores: TokenScores, batch: TokenBatch) -> torch.Tensor:
        """This micro-batch's part of the weighted sum of two means over the step's loss mask."""
        text, image = losses_of(model, scores, batch, config.train.seed, step)
        loss_sums.add_all(text=text.detach().double(), image=image.detach().double())
        return config.text_coef * text / max(counts["text"], 1) + config.image_coef * image / max(counts["image"], 1)

    return model.forward_backward(batches, loss_fn, step), loss_sums


def code_losses(
    model: OmniModel, scores: TokenScores, batch: TokenBatch, _seed: int, _step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of ``-log p`` over the text tokens of a micro-batch's loss mask, and over the codes of its images."""
    losses = -scores.log_probs(batch.labels)  # [B, T], 0 outside the loss mask
    is_code = is_image(batch.labels, model.codes, model.line_end)
    return losses[~is_code].sum(), losses[is_code].sum()


def flow_losses(
    model: OmniModel, scores: TokenScores, batch: TokenBatch, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of ``-log p`` over the text tokens, and the sum of the flow-matching losses of images, each times K.

    K are the tokens of an image, so that both losses are sums over tokens. Each image is noised ``NUM_NOISES`` times,
    since the head costs less than the language model (arXiv 2406.11838, section 4.1). Noise and noise levels, which are
    sigmoids of a normal variable, are keyed by the sample.
    """
    is_patch = is_image(batch.labels, model.codes)
    text = -scores.log_probs(batch.labels.masked_fill(is_patch, IGNORED)).sum()
    hidden, latents, keys = model.flow_head_inputs(scores, is_patch, batch)  # [N, K, H], [N, C, h, w]
    hidden, latents = (tensor.repeat_interleave(NUM_NOISES, dim=0) for tensor in (hidden, latents))
    keys = [NUM_NOISES * key + index for key in keys for index in range(NUM_NOISES)]
    uniform = keyed_uniform(seed, "sigma", step, keys)
    sigma = to_device(draw_sigma(uniform, "logit_normal", 0.0, 1.0, 1.0), latents.device)
    noise = keyed_normal(latents.shape[1:], seed, "noise", step, keys, latents.device)
    with model.head() as head:
        velocity = predict_velocity(head, add_noise(latents, noise, sigma), sigma, hidden)
    losses = flow_matching_loss(velocity, latents, noise).view(-1, NUM_NOISES).mean(1)  # [N], the last of a blank image
    return text, losses[:-1].sum() * model.image_tokenizer.num_codes + 0.0 * losses[-1]


@torch.no_grad()
def evaluate(
    model: OmniModel, validation: Validation, config: TrainOmniConfig, mesh: Mesh, step: int
) -> tuple[dict[str, float], list[SampleRecord]]:
    """Losses on the validation set of text and of images, and answers to its first prompts.

    ``eval/read`` is the share of text answers without a mistake, ``eval/draw`` the mean reward of the images drawn.
    """
    names = ("loss/text", "loss/image", "text", "image")
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    losses_of = flow_losses if model.has_head else code_losses
    for scores, batch in model.score(validation.batches):
        is_code = is_image(batch.labels, model.codes, model.line_end)
        losses = losses_of(model, scores, batch, config.train.seed, 0)  # always the same noise
        batch_sums = *losses, (batch.loss_mask & ~is_code).sum(), is_code.sum()
        sums = {name: sums[name] + float(value) for name, value in zip(names, batch_sums, strict=True)}
    totals = mesh.sum_dict(sums, over="loss")
    metrics = {f"eval/loss/{kind}": totals[f"loss/{kind}"] / totals[kind] for kind in ("text", "image") if totals[kind]}

    has_image_answer = [any(token in model.codes for token in prompt.answer) for prompt in validation.prompts]
    image_prompts, text_prompts = (
        [prompt for prompt, is_drawn in zip(validation.prompts, has_image_answer, strict=True) if is_drawn == kind]
        for kind in (True, False)
    )
    image_records = draw_prompts(model, image_prompts[: config.draw.num_prompts], config.draw, config.train.seed, step)
    answer_records = read_prompts(model, text_prompts, validation.stop_token_ids, config.eval, config.train.seed, step)
    for name, records in (("read", answer_records), ("draw", image_records)):
        values = [record.total for record in records if record.total == record.total]  # NaN: it has no reward
        metrics |= {f"eval/{name}": sum(values) / len(values)} if values else {}
    return metrics, image_records + answer_records


if __name__ == "__main__":
    run_task(main, TrainOmniConfig)
