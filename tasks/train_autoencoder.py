"""Training of the image autoencoder of a pipeline that is made from scratch.

    bash train.sh tasks/train_autoencoder.py configs/quickstart/autoencoder.yaml

Reconstruction (L1 + L2) with a small KL term; afterwards the latents' shift and scale are measured, so that the
denoiser sees zero mean and unit variance. The exported pipeline is complete: its denoiser is still random, and
``tasks/train_dit.py`` trains it. Large autoencoders come from a pipeline folder; this is for small ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import l1_loss, mse_loss

from sfumato.algorithms.device import to_device
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.dit import TrainAutoencoderConfig
from sfumato.data.background import read_ahead
from sfumato.data.files.bad_rows import BadRows, bad_row_limit
from sfumato.data.images.identity import identify_images
from sfumato.data.images.image_text import open_image_text
from sfumato.data.loader import IndexLoader
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import read_examples, read_rows
from sfumato.models.diffusion.frozen_parts import image_autoencoder
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import build_mesh
from sfumato.parallel.parallelize import broadcast_parameters
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.samples import SampleRecord
from sfumato.tracking.task import run_task

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL


def main(config: TrainAutoencoderConfig) -> None:
    mesh = build_mesh(config.train)  # the autoencoder is whole in each process, whatever the mode
    run = start_run(config, mesh, "train_autoencoder")

    dataset = open_image_text(config.data, config.train.seed, run.say)
    loader = IndexLoader(len(dataset), config.train, mesh, say=run.say)
    identity = identify_images(config, dataset, loader.global_batch_size)
    model = build_diffusion_model(config.model, mesh.device, config.train.mixed_precision, config.train.seed)
    vae = image_autoencoder(model.pipeline).float().requires_grad_(True).train()
    broadcast_parameters(vae, mesh)
    bad_rows = BadRows(bad_row_limit(config.data.max_bad_rows, len(dataset)), run.say)

    optimizer, schedule = build_optimizer(vae, config.train, loader.total_steps)
    state = TrainState(vae, optimizer, schedule, identity=identity)
    checkpointer = Checkpointer(config.train, run, mesh, loader.total_steps)
    checkpointer.resume(state)
    run.begin(loader.total_steps, state.step, config.train.trackers)
    control = RunControl(run, Actions(save=partial(checkpointer.save, state)))

    for step, read in run.steps(read_ahead(partial(read_rows, dataset), loader.steps(from_step=state.step))):
        batches = [batch for rows in read if (batch := rows.usable(bad_rows)) is not None]
        num_images = mesh.sum(sum(len(sample_ids) for _, sample_ids in batches))
        # on the device until they are read with the gradient's norm
        losses = Numbers()
        sums = Numbers()
        for pixels, sample_ids in batches:
            target = to_device(pixels, mesh.device) / 127.5 - 1  # from uint8 to -1 ... 1
            posterior = vae.encode(target).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
            # not the posterior's own ``sample``: this noise depends on the image alone, not on batch or rank
            noise = keyed_normal(
                posterior.mean.shape[1:], config.train.seed, "posterior", step, sample_ids, mesh.device
            )
            reconstruction = vae.decode(posterior.mean + posterior.std * noise, return_dict=False)[0]
            mse = mse_loss(reconstruction, target)
            kl = posterior.kl().mean() / noise[0].numel()
            loss = l1_loss(reconstruction, target) + mse + config.kl_coef * kl
            losses.add(loss)
            weight = len(sample_ids) / num_images  # the mean over the images of all ranks
            (loss * weight).backward()
            sums.add_all(loss=loss.double() * weight, mse=mse.double() * weight, kl=kl.double() * weight)
        pending = losses, sums
        grad_norm = reduce_and_clip(vae, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = cast(float, schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        state.step = step + 1
        means = mesh.sum_dict({"loss": 0.0, "mse": 0.0, "kl": 0.0} | sums.sums())
        run.log(state.step, {**means, "grad_norm": grad_norm, "lr": lr}, show={"loss": "loss", "mse": "mse"})
        checkpointer.after_step(state)
        control.obey(state.step)

    vae.eval()
    examples, captions = read_examples(dataset, 512, bad_rows)  # images that the latents' scale is measured on
    set_latent_scale(vae, examples)
    size = config.data.height, config.data.width  # by which a flow head draws; diffusers' tiles need one number
    vae.register_to_config(sample_size=size[0] if size[0] == size[1] else size)
    run.save_samples(state.step, reconstruct(model, examples[:12], captions, config.train.seed, state.step))
    export_model(model, None, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    folder = config.train.output_dir
    run.say(f"pipeline with the trained autoencoder: {folder}/hf_ckpt   report: {folder}/report.html")
    run.finish()


@torch.no_grad()
def reconstruct(
    model: DiffusionModel, examples: torch.Tensor, captions: list[str], seed: int, step: int
) -> list[SampleRecord]:
    """Records of images, uint8 ``[B, 3, H, W]``, each with its reconstruction to the right of it."""
    reconstructed = model.decode(model.encode_pixels(examples)).cpu()
    return [
        SampleRecord(
            content=torch.cat([before, after], dim=2).permute(1, 2, 0).numpy(),
            kind="eval",
            prompt=caption,
            seed=seed,
            sample_id=index,
            policy_version=step,
        )
        for index, (before, after, caption) in enumerate(zip(examples, reconstructed, captions, strict=False))
    ]


@torch.no_grad()
def set_latent_scale(vae: AutoencoderKL, pixels: torch.Tensor) -> None:
    """Sets the autoencoder's shift_factor and scaling_factor to the latents' mean and 1 / standard deviation.

    ``pixels`` are uint8 ``[N, 3, H, W]``.
    """
    device = next(vae.parameters()).device
    posteriors = (
        vae.encode(part.to(device) / 127.5 - 1).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        for part in pixels.split(64)
    )
    means = [posterior.mode() for posterior in posteriors]
    latents = torch.cat(means).double()
    vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std(correction=0)))


if __name__ == "__main__":
    run_task(main, TrainAutoencoderConfig)
