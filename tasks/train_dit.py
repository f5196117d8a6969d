"""Flow-matching pretraining and fine-tuning of diffusion transformers.

    bash train.sh tasks/train_dit.py configs/quickstart/pretrain.yaml --train.lr 1e-4

Images or videos with captions, or rendered words, become latents and embeddings (online or from a cache), with a
source image where the model edits or animates one; the denoiser learns the velocity eps - x0 at random noise levels.
Images may have several sizes (``data.buckets``), of which each micro-batch has one. Everything random is keyed by
(seed, step, sample), so a run does not depend on the number of processes, on having been interrupted, or, without
buckets, on the micro-batch size.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sfumato.algorithms.device import to_device
from sfumato.algorithms.flow_matching import add_noise, draw_sigma, flow_matching_loss
from sfumato.algorithms.noise import keyed_normal, keyed_uniform
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import FlowConfig, TrainDitConfig
from sfumato.data.background import read_ahead
from sfumato.data.images.buckets import sort_into_buckets
from sfumato.data.images.identity import identify_images
from sfumato.data.loader import IndexLoader
from sfumato.data.sounds.sound_text import open_captioned
from sfumato.models.diffusion.base import DiffusionModel, set_output, set_source_images
from sfumato.models.diffusion.encoded import EncodedBatch
from sfumato.models.diffusion.encoders import open_encoder
from sfumato.models.diffusion.flops import BatchFlops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.optim.ema import Ema, averaged_weights, with_averages
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import build_mesh
from sfumato.parallel.parallelize import accumulate
from sfumato.rollout.diffusion.evaluation import choose_grid, draw_grid, draw_watched
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.task import run_task


def main(config: TrainDitConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "train_dit")

    dataset = open_captioned(config.data, config.train.seed, run.say)
    buckets = sort_into_buckets(dataset, config.data, mesh, run.say)
    loader = IndexLoader(len(dataset), config.train, mesh, buckets, run.say)
    identity = identify_images(config, dataset, loader.global_batch_size, buckets=buckets)
    precision = config.train.mixed_precision
    seed = config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.say = run.say
    set_output(model, dataset.size, "data", config.data.sizes)
    set_source_images(model, config.data.max_source_images)

    encoder = open_encoder(dataset, model, config.data, mesh, run.say, run.watch("encode"), buckets)
    grid_prompts, grid_sources = choose_grid(config.sample, dataset, model.takes_image)
    model.remember_prompts(grid_prompts, grid_sources)
    flops = BatchFlops(model)
    if not config.model.keep_encoders:
        model.free_encoders()

    model.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, loader.total_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(model.denoiser, optimizer, schedule, ema, identity=identity)
    checkpointer = Checkpointer(config.train, run, mesh, loader.total_steps)
    checkpointer.resume(state)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    save = partial(checkpointer.save, state)
    sample = partial(draw_grid, model, grid_prompts, grid_sources, config, state)
    watch = partial(draw_watched, model, config, state)
    control = RunControl(run, Actions(save, sample=with_averages(ema, sample), watch=with_averages(ema, watch)))

    for step, read in run.steps(read_ahead(encoder.read, loader.steps(from_step=state.step))):
        with run.timed("data"):
            # each kind of encoder takes what its own ``read`` has returned
            batches = [encoder.encode(rows) for rows in read]  # pyright: ignore[reportArgumentType]
        own_images = sum(batch.num_images for batch in batches)
        own_flops = sum(batch.num_images * flops.count_image(batch).training for batch in batches)
        run.count(images=own_images, flops=own_flops)
        num_images = mesh.sum(own_images)
        # on the device until they are read with the gradient's norm; the first only has its values checked
        checked = Numbers()
        parts = Numbers()
        for batch in accumulate(model.denoiser, batches):  # gradients are reduced in the last backward pass
            where = f"step {step + 1}, rank {mesh.rank}, samples {batch.sample_ids[0]} to {batch.sample_ids[-1]}"
            with model.dropout_of(step, batch.sample_ids):
                losses = denoising_losses(model, batch, config.flow, config.train.seed, step)  # [B]
                checked.add(losses.detach().double().sum(), where)
                loss = losses[: batch.num_images].sum() / max(num_images, 1)  # the mean over the images of all ranks
                loss.backward()
            parts.add(loss)
        pending = checked, parts
        grad_norm = reduce_and_clip(model.denoiser, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update()
        state.step = step + 1

        if run.is_due(state.step, config.sample.every_steps):
            with run.timed("sample"), averaged_weights(ema):
                run.save_samples(state.step, draw_grid(model, grid_prompts, grid_sources, config, state))
        metrics = {"loss": mesh.sum(sum(parts, 0.0)), "grad_norm": grad_norm, "lr": lr, "images": num_images}
        run.log(state.step, metrics, show={"loss": "loss", "lr": "lr"})
        checkpointer.after_step(state)
        control.obey(state.step)
        if config.train.export_steps and state.step % config.train.export_steps == 0:
            run.attempt(export_model, model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)

    export_model(model, ema, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


def denoising_losses(
    model: DiffusionModel, batch: EncodedBatch, flow: FlowConfig, seed: int, step: int
) -> torch.Tensor:
    """Flow-matching loss of each sample, ``[B]``, at noise and a noise level that are keyed by the sample."""
    shift = model.shift_at(batch.latents.shape[1:]) if flow.shift is None else flow.shift
    uniform = keyed_uniform(seed, "sigma", step, batch.sample_ids)
    levels = draw_sigma(uniform, flow.density(model.timestep_sampling), flow.logit_mean, flow.logit_std, shift)
    sigma = model.training_sigma(to_device(levels, model.device))
    noise = keyed_normal(batch.latents.shape[1:], seed, "noise", step, batch.sample_ids, model.device)
    dropped = keyed_uniform(seed, "prompt dropout", step, batch.sample_ids) < flow.prompt_dropout
    conditioning = model.with_framing(batch.conditioning, batch.framing).without_prompt(dropped)
    velocity = model.predict_velocity(add_noise(batch.latents, noise, sigma), sigma, conditioning)
    part_lengths = model.part_lengths(batch.latents.shape[1:])  # of video and sound
    losses = flow_matching_loss(velocity, batch.latents, noise, batch.loss_weights, part_lengths)
    return losses * model.loss_weight(sigma)


if __name__ == "__main__":
    run_task(main, TrainDitConfig)
