"""Preference training of diffusion models from existing pairs: Diffusion-DPO (arXiv 2311.12908).

    bash train.sh tasks/train_dit_dpo.py configs/dit/sd35_dpo_pickapic.yaml --dpo.beta 5000

Both images of a pair get the same noise at the same noise level; the policy learns to err less than the reference on
the better one and more on the worse one. The reference is the model before training: with LoRA the model itself without
its adapters, otherwise a frozen copy that is sharded like the model. Everything random is keyed by (seed, step, pair).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.device import to_device
from sfumato.algorithms.flow_matching import draw_sigma
from sfumato.algorithms.forward_process.group_losses import DPO
from sfumato.algorithms.forward_process.noised import NoisedSamples
from sfumato.algorithms.noise import keyed_uniform
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import TrainDitDpoConfig
from sfumato.data.background import read_ahead
from sfumato.data.images.buckets import sort_into_buckets
from sfumato.data.images.identity import identify_images
from sfumato.data.images.image_text import open_held_out_pairs, open_image_pairs
from sfumato.data.images.shared_pairs import describe_shared_pairs
from sfumato.data.loader import IndexBatch, IndexLoader, evaluation_batches
from sfumato.models.diffusion.base import set_output, set_source_images
from sfumato.models.diffusion.encoded import EncodedBatch
from sfumato.models.diffusion.encoders import Encoder, open_encoder
from sfumato.models.diffusion.flops import BatchFlops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema, averaged_weights, with_averages
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.parallel.parallelize import accumulate
from sfumato.rollout.diffusion.evaluation import choose_grid, draw_grid, draw_watched
from sfumato.rollout.diffusion.final_samples import FinalSamples, predict_noised
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.step_sums import PairSums
from sfumato.tracking.task import run_task

EVALUATION = -1
"""The step in the keys of an evaluation's noise, so that the noise is the same in every evaluation."""


def main(config: TrainDitDpoConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_dit_dpo")

    dataset = open_image_pairs(config.data, config.train.seed, run.say)
    held_out = open_held_out_pairs(config.data, config.train.seed, config.eval.num_rows)
    for line in describe_shared_pairs(dataset, held_out):
        run.say(line)
    buckets = sort_into_buckets(dataset, config.data, mesh, run.say)
    eval_buckets = None if held_out is None else sort_into_buckets(held_out, config.data, mesh, run.say)
    loader = IndexLoader(len(dataset), config.train, mesh, buckets, run.say)
    identity = identify_images(config, dataset, loader.global_batch_size, held_out, buckets)
    precision = config.train.mixed_precision
    seed = config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.say = run.say
    set_output(model, dataset.size, "data", config.data.sizes)
    set_source_images(model, config.data.max_source_images)

    to_encode = {"config": config.data, "mesh": mesh, "say": run.say, "watch": run.watch("encode")}
    encoder = open_encoder(dataset, model, **to_encode, buckets=buckets)
    eval_encoder = None if held_out is None else open_encoder(held_out, model, **to_encode, buckets=eval_buckets)
    eval_batches = evaluation_batches(len(held_out or ()), config.train.micro_batch_size, mesh, eval_buckets)
    grid_prompts, grid_sources = choose_grid(config.sample, dataset, model.takes_image)
    model.remember_prompts(grid_prompts, grid_sources)
    if not config.model.keep_encoders:
        model.free_encoders()

    policies = Policies(model, {"reference": FROZEN})
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, loader.total_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(model.denoiser, optimizer, schedule, ema, policies.frozen_weights, identity=identity)
    checkpointer = Checkpointer(config.train, run, mesh, loader.total_steps)
    checkpointer.resume(state)
    objective = DPO(config.dpo.beta, config.dpo.loss, config.dpo.label_smoothing)
    flops = BatchFlops(model)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    save = partial(checkpointer.save, state)
    sample = partial(draw_grid, model, grid_prompts, grid_sources, config, state)
    watch = partial(draw_watched, model, config, state)
    actions = Actions(save, sample=with_averages(ema, sample), watch=with_averages(ema, watch))
    if eval_encoder is not None:
        measure = partial(evaluate, policies, eval_encoder, eval_batches, objective, config, mesh)
        actions.evaluate = with_averages(ema, measure)
    control = RunControl(run, actions)
    if state.step == 0 and eval_encoder is not None:
        with run.timed("evaluate"):
            metrics = evaluate(policies, eval_encoder, eval_batches, objective, config, mesh)
        run.log(0, metrics, show={})

    for step, read in run.steps(read_ahead(encoder.read, loader.steps(from_step=state.step))):
        with run.timed("data"):
            # each kind of encoder takes what its own ``read`` has returned
            batches = [encoder.encode(rows) for rows in read]  # pyright: ignore[reportArgumentType]
        own_pairs = sum(batch.num_images for batch in batches)
        # of each image of a pair, with the reference's forward pass
        own_flops = sum(2 * batch.num_images * sum(flops.count_image(batch)) for batch in batches)
        run.count(images=2 * own_pairs, flops=own_flops)
        num_pairs = mesh.sum(own_pairs)
        losses, sums = forward_backward(policies, batches, objective, config, mesh, step, num_pairs)
        pending = losses, sums.numbers  # on the device until they are read with the gradient's norm
        grad_norm = reduce_and_clip(model.denoiser, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        state.step = step + 1

        means = sums.means(mesh, "pairs/")
        metrics = {"loss": means.pop("pairs/loss"), "grad_norm": grad_norm, "lr": lr, "pairs": num_pairs, **means}
        if eval_encoder is not None and run.is_due(state.step, config.eval.every_steps):
            with run.timed("evaluate"), averaged_weights(ema):
                metrics |= evaluate(policies, eval_encoder, eval_batches, objective, config, mesh)
        if run.is_due(state.step, config.sample.every_steps):
            with run.timed("sample"), averaged_weights(ema):
                run.save_samples(state.step, draw_grid(model, grid_prompts, grid_sources, config, state))
        run.log(state.step, metrics, show={"loss": "loss", "accuracy": "pairs/accuracy"})
        checkpointer.after_step(state)
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def forward_backward(
    policies: Policies,
    batches: list[EncodedBatch],
    objective: DPO,
    config: TrainDitDpoConfig,
    mesh: Mesh,
    step: int,
    num_pairs: float,
) -> tuple[Numbers, PairSums]:
    """Forward and backward passes of this rank's micro-batches of a step with ``num_pairs`` pairs on all ranks.

    Returns:
        The losses, whose values are to be checked, and the sums over pairs for the log.
    """
    model = policies.model
    sums = PairSums()
    checked = Numbers()
    for batch in accumulate(model.denoiser, batches):  # gradients are reduced in the last backward pass
        where = f"step {step + 1}, rank {mesh.rank}, pairs {batch.sample_ids[0]} to {batch.sample_ids[-1]}"
        image_ids = [pair for pair in batch.sample_ids for _ in range(2)]
        with model.dropout_of(step, image_ids):
            noised = predict_pairs(policies, batch, config, step)
            losses = pair_losses(objective, noised)  # [B]
            checked.add(losses.detach().double().sum(), where)
            count_pairs(sums, objective, noised, losses, torch.arange(batch.num_images))
            loss = losses[: batch.num_images].sum() / max(num_pairs, 1)  # the mean over the pairs of all ranks
            loss.backward()
    return checked, sums


def predict_pairs(policies: Policies, batch: EncodedBatch, config: TrainDitDpoConfig, step: int) -> NoisedSamples:
    """The velocities of policy and reference for B pairs: 2B rows, each pair's better image first.

    Both images of a pair have the same noise and noise level.
    """
    model = policies.model
    flow = config.flow
    seed = config.train.seed
    ids = batch.sample_ids
    shift = model.shift_at(batch.latents.shape[2:]) if flow.shift is None else flow.shift
    uniform = keyed_uniform(seed, "sigma", step, ids)
    pair_levels = draw_sigma(uniform, flow.density(model.timestep_sampling), flow.logit_mean, flow.logit_std, shift)
    conditioning = batch.conditioning
    if step != EVALUATION:
        dropped = keyed_uniform(seed, "prompt dropout", step, ids) < flow.prompt_dropout
        conditioning = conditioning.without_prompt(dropped)
    levels = model.training_sigma(to_device(pair_levels, model.device)).repeat_interleave(2)[:, None]
    pair_ids = torch.tensor(ids).repeat_interleave(2)
    framing = None if batch.framing is None else batch.framing.flatten(0, 1)  # of both images
    return predict_noised(
        policies,
        FinalSamples(batch.latents.flatten(0, 1), levels, noise_ids=pair_ids, group_ids=pair_ids),
        model.with_framing(conditioning.repeat_interleave(2), framing),
        compared={"reference"},
        guidance_scale=1.0,
        reference_guidance_scale=None,
        seed=seed,
        iteration=step,
    )


def pair_losses(objective: DPO, noised: NoisedSamples) -> torch.Tensor:
    """The loss of each pair ``[B]``."""
    is_better = torch.tensor([1.0, -1.0]).repeat(len(noised.x0) // 2)
    is_better = to_device(is_better, noised.x0.device, remember=True)
    losses, _ = objective.loss(noised, is_better)
    return losses[0::2]  # the rows of a pair have the same loss


@torch.no_grad()
def count_pairs(
    sums: PairSums, objective: DPO, noised: NoisedSamples, losses: torch.Tensor, counted: torch.Tensor
) -> None:
    """Adds the metrics of pairs to ``sums``.

    Args:
        sums: of the step or the evaluation.
        objective: gives the implicit rewards.
        noised: of B pairs.
        losses: float ``[B]``.
        counted: int64 ``[C]``, the positions of the pairs that count; others only fill the batch up.
    """
    counted = to_device(counted, losses.device)
    reward = objective.implicit_reward(noised)
    error = noised.error(noised.velocity)
    reference_error = noised.error(noised.velocity_of("reference"))
    values_by_name = {"loss": losses, "accuracy": (reward[0::2] > reward[1::2]).float()}
    for name, values in {"reward": reward, "error": error, "reference_error": reference_error}.items():
        values_by_name |= {f"{name}_chosen": values[0::2], f"{name}_rejected": values[1::2]}
    sums.add(len(counted), **{name: values[counted].sum() for name, values in values_by_name.items()})


@torch.no_grad()
def evaluate(
    policies: Policies,
    encoder: Encoder,
    batches: list[IndexBatch],
    objective: DPO,
    config: TrainDitDpoConfig,
    mesh: Mesh,
) -> dict[str, float]:
    """Loss, implicit rewards and accuracy on the held-out pairs, always with the same noise."""
    sums = PairSums()
    with policies.model.evaluating():
        for batch in map(encoder.batch, batches):
            noised = predict_pairs(policies, batch, config, EVALUATION)
            counted = torch.tensor(batch.sample_ids[: batch.num_images]) >= 0
            count_pairs(sums, objective, noised, pair_losses(objective, noised), counted.nonzero()[:, 0])
    return sums.means(mesh, "eval/")


if __name__ == "__main__":
    run_task(main, TrainDitDpoConfig)
