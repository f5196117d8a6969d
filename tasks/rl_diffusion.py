"""Reinforcement learning of diffusion models: Flow-GRPO and its relatives.

    bash train.sh tasks/rl_diffusion.py configs/quickstart/rl.yaml --train.max_steps 6

Each iteration samples groups of images per prompt with a stochastic denoising step, scores them while the next ones
are generated, turns rewards into advantages within groups, and replays the trained steps with gradients. All parts
of the algorithm are chosen in the configuration; their formulas stand in ``sfumato/algorithms``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.noise import keyed_permutation
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.prompts import Prompt, PromptLoader, check_prompts, load_prompts
from sfumato.errors import RewardError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.diffusion.reference import Reference
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.data import accumulate
from sfumato.parallel.gradients import check_finite, reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scorer import Scorer, Scores
from sfumato.rollout.batch import RolloutBatch, SampleRequest
from sfumato.rollout.diffusion import (
    check_replay,
    replay_trajectories,
    sample_images,
    sample_trajectories,
    to_images,
)
from sfumato.runtime.roles import Roles, launch_roles
from sfumato.runtime.stream import RolloutStream
from sfumato.tracking.run import Run, run_task, start_run
from sfumato.tracking.samples import SampleRecord

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


@dataclass
class Actor:
    """The policy and what updates it."""

    model: DiffusionModel
    reference: Reference | None
    state: TrainState
    checkpointer: Checkpointer
    mesh: Mesh


def main(config: DiffusionRLConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "rl_diffusion")

    train_prompts = load_prompts(config.data, "train")
    eval_prompts = load_prompts(config.data, "eval", config.eval.num_prompts)
    check_prompts(train_prompts + eval_prompts, [each.check_row for each in config.reward.rewards])
    prompts = PromptLoader(train_prompts, config.rollout.num_prompts, config.rollout.n, config.train.seed)

    roles = launch_roles(actor=lambda: build_actor(config, mesh, run), scorer=lambda: build_scorer(config))
    if not config.model.keep_encoders:
        roles.sampler.call(embed_and_free, [each.text for each in train_prompts + eval_prompts]).result()
    start = roles.actor.call(resume).result()
    run.begin(config.train.max_steps, start, config.train.trackers)
    stream = RolloutStream(
        roles,
        requests=lambda iteration: requests_of(prompts, iteration, mesh),
        generate=lambda actor, requests, iteration, version: generate(actor, requests, iteration, version, config),
        score=score,
        total_steps=config.train.max_steps,
        micro_batch_size=config.rollout.micro_batch_size,
        with_reward=config.rollout.with_reward,
    )

    if start == 0:
        with run.timed("evaluate"):
            metrics, records = evaluate(roles, mesh, eval_prompts, config, step=0)
        run.save_samples(0, records)
        run.log(0, metrics, show=SHOWN)
        run.write_report()

    for step, collected in stream.steps(from_step=start):
        run.add_time("generate", collected.generate_s)
        run.add_time("wait_for_rewards", collected.wait_s)
        batch, scores = RolloutBatch.cat(collected.generated), Scores.cat(collected.scored)
        for failure in scores.failures:
            run.say(f"step {step + 1}: reward failed: {failure}")

        scores = mesh.first(scores, among="copies")  # ranks that made the same samples must learn from the same rewards
        everyone = mesh.gather((scores, [each.group_id for each in batch.requests]))  # rewards of all ranks
        all_scores = Scores.cat([each for each, _ in everyone])
        try:
            roles.scorer.call(Scorer.check_budget, all_scores).result()
        except RewardError:
            roles.actor.call(save).result()  # the finished iterations are not lost
            raise
        group_ids = torch.tensor([group for _, groups in everyone for group in groups])
        all_advantages = config.algorithm.advantage.compute(torch.from_numpy(all_scores.total), group_ids)
        advantages = all_advantages.rows([each.sample_id for each in batch.requests])

        with run.timed("update"):
            metrics = roles.actor.map(update_policy, batch, advantages, config, step).result()
        stream.publish(version=step + 1)
        metrics |= all_scores.metrics("") | all_advantages.metrics
        records = []
        last = step + 1 == config.train.max_steps
        if last or (step + 1) % config.eval.every_steps == 0:
            with run.timed("evaluate"):
                eval_metrics, records = evaluate(roles, mesh, eval_prompts, config, step + 1)
            metrics |= eval_metrics
            run.save_samples(step + 1, records + training_records(batch, scores, advantages, config))
        run.log(step + 1, metrics, show=SHOWN)
        if records:
            run.write_report()
        roles.actor.call(save_if_due).result()
        if config.train.export_steps and (step + 1) % config.train.export_steps == 0:
            roles.actor.call(export, config).result()

    roles.actor.call(export, config).result()
    roles.close()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt")
    if changes := run.changes("eval/reward/"):
        run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
    run.say(f"report: {config.train.output_dir}/report.html")
    run.close()


def build_actor(config: DiffusionRLConfig, mesh: Mesh, run: Run) -> Actor:
    """Loads the policy with its optimiser, its average, and the reference that a KL penalty needs."""
    precision, seed = config.train.mixed_precision, config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.denoiser.eval()  # rollout and replay must be the same function
    reference = Reference(model) if config.algorithm.kl.coef > 0 else None
    model.parallelize(mesh, config.train)
    if reference is not None:
        reference.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, config.train.max_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(model.denoiser, optimizer, schedule, ema, None if reference is None else reference.weights)
    return Actor(model, reference, state, Checkpointer(config.train, run, mesh, config.train.max_steps), mesh)


def resume(actor: Actor) -> int:
    """Loads the checkpoint that the configuration asks for. Returns the number of finished iterations."""
    actor.checkpointer.resume(actor.state)
    return actor.state.step


def save(actor: Actor) -> None:
    """Writes a checkpoint of the finished iterations."""
    actor.checkpointer.save(actor.state)


def save_if_due(actor: Actor) -> None:
    """Writes a checkpoint when it is time; raises PreemptedError after it when the run was asked to stop."""
    actor.checkpointer.after_step(actor.state)


def export(actor: Actor, config: DiffusionRLConfig) -> None:
    """Writes the trained pipeline or adapter to ``hf_ckpt``."""
    export_model(actor.model, actor.state.ema, Path(config.train.output_dir) / "hf_ckpt", actor.mesh)


def build_scorer(config: DiffusionRLConfig) -> Scorer:
    """All rewards, their engines loaded."""
    scorer = Scorer(config.reward.rewards, max_failed_fraction=config.reward.max_failed_fraction)
    scorer.prepare()
    return scorer


def embed_and_free(actor: Actor, prompts: list[str]) -> None:
    """Embeds every prompt of the run, then drops the text encoders."""
    actor.model.remember_prompts(prompts)
    actor.model.free_encoders()


def requests_of(prompts: PromptLoader, iteration: int, mesh: Mesh) -> list[SampleRequest]:
    """This rank's samples of an iteration: whole groups, numbered over all ranks."""
    groups = prompts.groups(iteration)
    return [
        SampleRequest(group * prompts.group_size + member, group, groups[group])
        for group in mesh.share(len(groups))
        for member in range(prompts.group_size)
    ]


def generate(
    actor: Actor, requests: list[SampleRequest], iteration: int, version: int, config: DiffusionRLConfig
) -> RolloutBatch:
    """Samples a micro-batch from the policy, keeping what the update needs of the window's steps."""
    rollout, algorithm = config.rollout, config.algorithm
    group_prompts = {each.group_id: each.prompt.text for each in requests}  # each prompt is embedded and kept once
    conditioning = actor.model.encode_prompts(list(group_prompts.values()), rollout.guidance_scale != 1.0)
    rows = [list(group_prompts).index(each.group_id) for each in requests]
    latents, trajectories = sample_trajectories(
        actor.model,
        conditioning.rows(rows),
        [each.sample_id for each in requests],
        dynamics=algorithm.dynamics,
        trained_steps=algorithm.window.steps(rollout.num_inference_steps, config.train.seed, iteration),
        size=(rollout.height, rollout.width),
        num_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        seed=config.train.seed,
        iteration=iteration,
        latent_ids=[each.group_id for each in requests] if rollout.same_latent else None,
    )
    images = to_images(actor.model.decode(latents))
    return RolloutBatch(requests, trajectories, conditioning, rows, images, version)


def score(scorer: Scorer, batch: RolloutBatch) -> Scores:
    """Rewards of a micro-batch; evaluation-only ones are left to the evaluation."""
    return scorer.score([batch.sample(row) for row in range(len(batch))], objective_only=True)


def update_policy(
    actor: Actor, batch: RolloutBatch, advantages: Advantages, config: DiffusionRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's samples. Returns means over the trained (sample, step) rows of all ranks."""
    algorithm, mesh = config.algorithm, actor.mesh
    denoiser, state = actor.model.denoiser, actor.state
    useful = advantages.useful(keep_no_spread=not algorithm.drop_no_spread)
    on_policy = batch.policy_version == step
    bound = algorithm.objective.replay_tolerance if algorithm.self_check and on_policy else None
    sums: dict[str, float] = {}
    rows_total, grad_norms, replay_error = 0.0, [], 0.0
    lr = state.schedule.get_last_lr()[0]
    for update, part in enumerate(optimizer_batches(batch, useful, config, step)):
        num_rows = mesh.sum(len(part) * len(batch.trajectories.steps))
        if num_rows == 0:
            continue  # no sample of this part has anything to teach, on any rank
        num_passes = int(mesh.max(math.ceil(len(part) / config.train.micro_batch_size)))  # ranks compute together
        for micro, rows in enumerate(accumulate(denoiser, part.tensor_split(num_passes))):
            adds = len(rows) > 0  # else a pass that only keeps the other ranks company
            index = rows if adds else torch.zeros(1, dtype=torch.long)
            samples = [batch.requests[row].sample_id for row in index.tolist()]
            sampled, conditioning = batch.trajectories.rows(index), batch.conditioning_of(index)
            replay = (sampled, conditioning, algorithm.dynamics, config.rollout.guidance_scale)
            if actor.reference is not None:
                with torch.no_grad(), actor.reference.active() as reference:
                    reference_step = replay_trajectories(reference, *replay)
            new, old = replay_trajectories(actor.model, *replay), sampled.sampled_steps()
            if update == 0 and micro == 0 and adds:  # before any update the policy is the one that sampled
                log_ratio = algorithm.objective.log_ratio(new, old).detach()
                replay_error = check_replay(log_ratio, sampled.steps, actor.model.input_dtype, bound)
            row_advantages = advantages.values[index].to(new.mean.device).repeat_interleave(len(sampled.steps))
            losses, stats = algorithm.objective.loss(new, old, row_advantages)
            stats["loss/policy"] = losses.detach().sum()
            if actor.reference is not None:
                penalty = algorithm.kl.penalty(new, reference_step)
                losses = losses + algorithm.kl.coef * penalty
                stats["kl/reference"] = penalty.detach().sum()
            check_finite(losses, f"step {step + 1}, rank {mesh.rank}, samples {samples}")
            loss = losses.sum() * adds / num_rows  # the mean over the rows of all ranks and micro-batches
            loss.backward()
            for name, value in stats.items():
                sums[name] = sums.get(name, 0.0) + float(value) * adds
        grad_norms.append(reduce_and_clip(denoiser, config.train.max_grad_norm, mesh, f"step {step + 1}"))
        state.optimizer.step()
        state.optimizer.zero_grad()
        rows_total += num_rows
        if state.ema is not None:
            state.ema.update()
    state.schedule.step()
    state.step = step + 1
    means = {name: value / rows_total for name, value in mesh.sum_dict(sums).items()}
    grad_norm = sum(grad_norms) / max(len(grad_norms), 1)
    counts = {"rows": rows_total, "updates": float(len(grad_norms))}
    return {**means, "grad_norm": grad_norm, "lr": lr, "ratio/replay_error": replay_error, **counts}


def optimizer_batches(
    batch: RolloutBatch, useful: torch.Tensor, config: DiffusionRLConfig, step: int
) -> Iterator[torch.Tensor]:
    """This rank's rows of ``batch`` for each optimiser step: the samples of all ranks, shuffled, in equal parts."""
    num_samples = config.rollout.num_prompts * config.rollout.n
    row_of = {each.sample_id: row for row, each in enumerate(batch.requests)}
    order = keyed_permutation(num_samples, config.train.seed, "update", step)
    for part in order.split(config.train.global_batch_size or num_samples):
        rows = [row_of[each] for each in part.tolist() if each in row_of and useful[row_of[each]]]
        yield torch.tensor(rows, dtype=torch.long)


def evaluate(
    roles: Roles, mesh: Mesh, prompts: list[Prompt], config: DiffusionRLConfig, step: int
) -> tuple[dict[str, float], list[SampleRecord]]:
    """Metrics and kept samples of one image per held-out prompt; each rank makes its share."""
    mine = list(mesh.share(len(prompts)))
    drawn = mine + [mine[-1]] * (int(mesh.max(len(mine))) - len(mine))  # ranks compute together
    images = roles.sampler.call(draw_evaluation, [prompts[index].text for index in drawn], drawn, config).result()
    samples = [
        Sample(image=image, prompt=prompts[index].text, metadata=prompts[index].metadata, group_id=index)
        for index, image in zip(mine, images, strict=False)
    ]
    scores = mesh.first(roles.scorer.call(Scorer.score, samples).result(), among="copies")
    records = [
        scores.record(row, sample, kind="eval", seed=config.eval.seed, sample_id=sample.group_id, policy_version=step)
        for row, sample in enumerate(samples)
        if sample.group_id < config.eval.num_saved
    ]
    gathered = mesh.gather((scores, records))
    all_scores = Scores.cat([each for each, _ in gathered])
    return all_scores.metrics("eval/"), [record for _, some in gathered for record in some]


def draw_evaluation(actor: Actor, prompts: list[str], ids: list[int], config: DiffusionRLConfig) -> list[np.ndarray]:
    """One image per prompt, without noise, from the averaged weights, always from the same latents."""
    guidance = config.rollout.guidance_scale if config.eval.guidance_scale is None else config.eval.guidance_scale
    with averaged_weights(actor.state.ema):
        return sample_images(
            actor.model,
            actor.model.encode_prompts(prompts, guidance != 1.0),
            ids,
            size=(config.rollout.height, config.rollout.width),
            num_steps=config.eval.num_inference_steps,
            guidance_scale=guidance,
            seed=config.eval.seed,
            micro_batch_size=config.rollout.micro_batch_size,
        )


def training_records(
    batch: RolloutBatch, scores: Scores, advantages: Advantages, config: DiffusionRLConfig
) -> list[SampleRecord]:
    """The first two groups of this rank's iteration, for the report."""
    groups = list(dict.fromkeys(each.group_id for each in batch.requests))[:2]
    return [
        scores.record(
            row,
            batch.sample(row),
            kind="train",
            seed=config.train.seed,
            sample_id=request.sample_id,
            policy_version=batch.policy_version,
            advantage=float(advantages.values[row]),
        )
        for row, request in enumerate(batch.requests)
        if request.group_id in groups
    ]


if __name__ == "__main__":
    run_task(main, DiffusionRLConfig)
