"""Training of an image tokenizer: a VQ model that turns images into codes and codes into images.

    bash train.sh tasks/train_image_tokenizer.py configs/omni/image_tokenizer.yaml

Reconstruction (L1 + L2) and the distance between latents and their codes (VQ-VAE, arXiv 1711.00937). Language models
draw with these codes as tokens (``tasks/train_omni.py``). Large image tokenizers come from a folder; this is for small
ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

from torch.nn.functional import l1_loss, mse_loss

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.omni import TrainImageTokenizerConfig
from sfumato.data.background import read_ahead
from sfumato.data.files.bad_rows import BadRows, bad_row_limit
from sfumato.data.images.identity import identify_images
from sfumato.data.images.image_text import open_image_text
from sfumato.data.loader import IndexLoader
from sfumato.models.diffusion.encoded import read_examples, read_rows
from sfumato.models.omni.hf_vq import build_vq
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import build_mesh
from sfumato.parallel.parallelize import broadcast_parameters
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import start_run
from sfumato.tracking.samples import SampleRecord
from sfumato.tracking.task import run_task


def main(config: TrainImageTokenizerConfig) -> None:
    mesh = build_mesh(config.train)  # the model is whole in each process, whatever the mode
    run = start_run(config, mesh, "train_image_tokenizer")

    dataset = open_image_text(config.data, config.train.seed, run.say)
    loader = IndexLoader(len(dataset), config.train, mesh, say=run.say)
    identity = identify_images(config, dataset, loader.global_batch_size)
    vq = build_vq(config.model, config.train.seed)
    vq.trained.to(mesh.device).train()
    vq.set_size(config.data.height, config.data.width)
    bad_rows = BadRows(bad_row_limit(config.data.max_bad_rows, len(dataset)), run.say)
    examples, captions = read_examples(dataset, 256, bad_rows)
    if config.model.config_path is not None:  # a new model: its codes begin among the latents of these images
        vq.start_codebook(to_device(examples, mesh.device) / 127.5 - 1, config.train.seed)
    broadcast_parameters(vq.trained, mesh)

    optimizer, schedule = build_optimizer(vq.trained, config.train, loader.total_steps)
    state = TrainState(vq.trained, optimizer, schedule, identity=identity)
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
            quantised, commitment, _ = vq.quantise(vq.latents(target))  # gradients pass straight through
            reconstruction = vq.decode(quantised)
            mse = mse_loss(reconstruction, target)
            loss = l1_loss(reconstruction, target) + mse + config.commitment_coef * commitment
            losses.add(loss)
            weight = len(sample_ids) / num_images  # the mean over the images of all ranks
            (loss * weight).backward()
            means = {"loss": loss, "mse": mse, "commitment": commitment}
            sums.add_all(**{name: mean.double() * weight for name, mean in means.items()})
        pending = losses, sums
        grad_norm = reduce_and_clip(vq.trained, config.train.max_grad_norm, mesh, f"step {step + 1}", *pending)
        lr = cast(float, schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        state.step = step + 1
        metrics = mesh.sum_dict({"loss": 0.0, "mse": 0.0, "commitment": 0.0} | sums.sums())
        run.log(state.step, {**metrics, "grad_norm": grad_norm, "lr": lr}, show={"loss": "loss", "mse": "mse"})
        checkpointer.after_step(state)
        control.obey(state.step)

    pictures, num_used = vq.reconstruct(examples)
    run.say(f"{num_used} of {vq.codebook.num_embeddings} codes are used by {len(examples)} images")
    run.save_samples(
        state.step,
        [
            SampleRecord(content, "eval", caption, config.train.seed, index, policy_version=state.step)
            for index, (content, caption) in enumerate(zip(pictures[:12], captions, strict=False))
        ],
    )
    export_model(vq, None, Path(config.train.output_dir) / "hf_ckpt", mesh)
    run.write_report()
    run.say(f"image tokenizer: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
    run.finish()


if __name__ == "__main__":
    run_task(main, TrainImageTokenizerConfig)
