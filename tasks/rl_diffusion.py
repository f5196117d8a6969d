"""Reinforcement learning of diffusion models: Flow-GRPO and its relatives.

    bash train.sh tasks/rl_diffusion.py configs/quickstart/rl.yaml --train.max_steps 6

Each iteration samples groups of images per prompt, scores them while the next ones are generated, turns rewards into
advantages within groups, and learns from them: objectives on trajectories replay the stochastic steps with gradients,
those on final samples noise the images anew. All parts of the algorithm are chosen in the configuration; their
formulas stand in ``sfumato/algorithms``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.prompts import Prompt, PromptLoader, check_prompts, load_prompts
from sfumato.errors import RewardError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.diffusion.output import set_output
from sfumato.models.diffusion.policies import Policies
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.data import accumulate
from sfumato.parallel.gradients import check_finite, reduce_and_clip
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import RolloutBatch, SampleRequest, requests_of
from sfumato.rollout.costs import count_costs
from sfumato.rollout.diffusion import check_replay, replay_trajectories, sample_trajectories, to_images
from sfumato.rollout.evaluation import sample_evaluation
from sfumato.rollout.final_samples import predict_noised, sample_final
from sfumato.rollout.monitors import group_diversity, velocity_norms
from sfumato.rollout.prompts import check_source_images, encode_prompts, remember_prompts
from sfumato.rollout.update_order import micro_batches, optimizer_batches
from sfumato.runtime.roles import Roles, launch_roles
from sfumato.runtime.stream import RolloutStream
from sfumato.tracking.run import Run, run_task, start_run
from sfumato.tracking.samples import SampleRecord

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


RowLosses = tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]
"""Of R rows: losses, penalties if there are any, and sums for the log."""


@dataclass
class Actor:
    """The policy and what updates it."""

    model: DiffusionModel
    policies: Policies
    state: TrainState
    checkpointer: Checkpointer
    mesh: Mesh

    def resume(self) -> int:
        """Loads the checkpoint that the configuration asks for. Returns the number of finished iterations."""
        self.checkpointer.resume(self.state)
        return self.state.step

    def save(self) -> None:
        """Writes a checkpoint of the finished iterations."""
        self.checkpointer.save(self.state)

    def after_step(self) -> None:
        """Writes a checkpoint when it is time; raises PreemptedError after it when the run was asked to stop."""
        self.checkpointer.after_step(self.state)

    def export(self, config: DiffusionRLConfig) -> None:
        """Writes the trained pipeline or adapter to ``hf_ckpt``."""
        export_model(self.model, self.state.ema, Path(config.train.output_dir) / "hf_ckpt", self.mesh)


def main(config: DiffusionRLConfig) -> None:
    mesh = build_mesh(config.train)
    run = start_run(config, mesh, "rl_diffusion")

    train_prompts = load_prompts(config.data, "train")
    eval_prompts = load_prompts(config.data, "eval", config.eval.num_prompts)
    check_prompts(train_prompts + eval_prompts, [each.check_row for each in config.reward.rewards])
    prompts = PromptLoader(train_prompts, config.rollout.num_prompts, config.rollout.n, config.train.seed)

    roles = launch_roles(
        actor=lambda: build_actor(config, mesh, run),
        scorer=lambda: build_scorer(config.reward),
        num_scorers=config.reward.num_workers,
    )
    roles.sampler.call(prepare_prompts, train_prompts + eval_prompts, config).result()
    start = roles.actor.call(Actor.resume).result()
    costs = roles.actor.call(lambda actor: count_costs(actor.model, config)).result()
    run.begin(config.train.max_steps, start, config.train.trackers)
    stream = RolloutStream(
        roles,
        requests=lambda iteration: requests_of(prompts, iteration, mesh),
        generate=lambda actor, requests, iteration, version: generate(actor, requests, iteration, version, config),
        score=score,
        total_steps=config.train.max_steps,
        micro_batch_size=config.rollout.micro_batch_size,
        with_reward=config.rollout.with_reward,
        max_pending=config.reward.max_pending,
    )

    if start == 0:
        with run.timed("evaluate"):
            metrics, records = evaluate(roles, run, eval_prompts, config, step=0)
        run.save_samples(0, records)
        run.log(0, metrics, show=SHOWN)
        run.write_report()

    for step, collected in stream.steps(from_step=start):
        run.add_time("generate", collected.generate_s)
        run.add_time("wait_for_rewards", collected.wait_s)
        batch, scores = RolloutBatch.cat(collected.generated), Scores.cat(collected.scored)
        run.add_timings(scores.timings(collected.wait_s))
        del collected  # else the samples would be kept twice

        scores = mesh.first(scores, among="copies")  # ranks that made the same samples must learn from the same rewards
        everyone = mesh.gather((scores, [each.group_id for each in batch.requests]))  # rewards of all ranks
        group_ids = [group for _, groups in everyone for group in groups]
        all_scores = Scores.cat([each for each, _ in everyone])
        all_scores = roles.scorer.call(Scorer.finish, all_scores, group_ids).result()
        say_messages(run, all_scores, f"step {step + 1}")
        try:
            roles.scorer.call(Scorer.check_budget, all_scores).result()
        except RewardError:
            roles.actor.call(Actor.save).result()  # the finished iterations are not lost
            raise
        all_advantages = config.algorithm.advantage.compute(
            torch.from_numpy(all_scores.total),
            torch.tensor(group_ids),
            {name: torch.from_numpy(values) for name, values in all_scores.components.items()},
            {each.label: each.weight for each in config.reward.rewards if not each.evaluation_only},
        )
        mine = [each.sample_id for each in batch.requests]
        scores, advantages = all_scores.rows(mine), all_advantages.rows(mine)

        with run.timed("update"):
            metrics = roles.actor.map(update_policy, batch, advantages, config, step).result()
        run.count(images=len(batch), flops=costs.flops(len(batch), metrics["rows"] / mesh.data_size))
        stream.publish(version=step + 1)
        metrics |= all_scores.metrics("") | all_advantages.metrics
        records, last = [], step + 1 == config.train.max_steps
        if last or (step + 1) % config.eval.every_steps == 0:
            with run.timed("evaluate"):
                eval_metrics, records = evaluate(roles, run, eval_prompts, config, step + 1)
            metrics |= eval_metrics
            run.save_samples(step + 1, records + batch.records(scores, advantages.values, config.train.seed))
        del batch  # memory for the next one
        run.log(step + 1, metrics, show=SHOWN)
        if records:
            run.say_signs_of_hacking()
            run.write_report()
        roles.actor.call(Actor.after_step).result()
        if config.train.export_steps and (step + 1) % config.train.export_steps == 0:
            roles.actor.call(Actor.export, config).result()

    roles.actor.call(Actor.export, config).result()
    roles.scorer.call(Scorer.close).result()
    roles.close()
    run.say(f"trained weights: {config.train.output_dir}/hf_ckpt")
    if changes := run.changes("eval/reward/"):
        run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
    run.say(f"report: {config.train.output_dir}/report.html")
    run.close()


def build_actor(config: DiffusionRLConfig, mesh: Mesh, run: Run) -> Actor:
    """Loads the policy with its optimiser and its average, and the policies that it is compared with or sampled by."""
    precision, seed = config.train.mixed_precision, config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    set_output(model, config.rollout.size, "rollout")
    if config.rollout.guidance_scale_2 is not None:
        model.set_second_guidance(config.rollout.guidance_scale_2)
    model.denoiser.eval()  # rollout and replay must be the same function
    policies = Policies(model, config.algorithm.other_policies)
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, config.train.max_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    frozen, moving = policies.frozen_weights, policies.moving
    state = TrainState(model.denoiser, optimizer, schedule, ema, frozen, policies=moving)
    return Actor(model, policies, state, Checkpointer(config.train, run, mesh, config.train.max_steps), mesh)


def prepare_prompts(actor: Actor, prompts: list[Prompt], config: DiffusionRLConfig) -> None:
    """Looks at what every prompt of the run needs; embeds them all where the text encoders are not kept."""
    check_source_images(actor.model, prompts)
    if not config.model.keep_encoders:
        remember_prompts(actor.model, prompts, config.rollout.size)
        actor.model.free_encoders()


def generate(
    actor: Actor, requests: list[SampleRequest], iteration: int, version: int, config: DiffusionRLConfig
) -> RolloutBatch:
    """Samples a micro-batch, keeping what the update needs: the window's steps, or the final latents."""
    rollout, algorithm = config.rollout, config.algorithm
    group_prompts = {each.group_id: each.prompt for each in requests}  # each prompt is embedded and kept once
    guided = {rollout.guidance_scale, algorithm.reference_guidance_scale or 1.0} != {1.0}
    conditioning, sources = encode_prompts(actor.model, list(group_prompts.values()), rollout.size, guided)
    rows = [list(group_prompts).index(each.group_id) for each in requests]
    sample_ids, group_ids = zip(*((each.sample_id, each.group_id) for each in requests), strict=True)
    settings: dict[str, Any] = {
        "size": rollout.size,
        "num_steps": rollout.num_inference_steps,
        "guidance_scale": rollout.guidance_scale,
        "seed": config.train.seed,
        "iteration": iteration,
    }
    if algorithm.objective.kind == "trajectory":
        latents, kept = sample_trajectories(
            actor.model,
            conditioning.rows(rows),
            sample_ids,
            dynamics=algorithm.dynamics,
            trained_steps=algorithm.window.steps(rollout.num_inference_steps, config.train.seed, iteration),
            latent_ids=group_ids if rollout.same_latent else None,
            **settings,
        )
    else:
        with actor.policies.active(algorithm.sample_with) as policy:
            kept = sample_final(
                policy,
                conditioning.rows(rows),
                sample_ids,
                group_ids,
                solver=algorithm.solver,
                timesteps=algorithm.timesteps,
                shared_noise=algorithm.objective.shared_noise,
                **settings,
            )
        latents = kept.latents
    images = to_images(actor.model.decode(latents))
    sources = sources and [sources[row] for row in rows]
    return RolloutBatch(requests, kept, conditioning, rows, images, sources, latents, version)


def score(scorer: Scorer, batch: RolloutBatch) -> Scores:
    """Rewards of a micro-batch; evaluation-only ones are left to the evaluation."""
    return scorer.score([batch.sample(row) for row in range(len(batch))], objective_only=True)


def update_policy(
    actor: Actor, batch: RolloutBatch, advantages: Advantages, config: DiffusionRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's samples. Returns means over the trained rows of all ranks.

    A row is a (sample, denoising step) or (sample, noise level) pair.
    """
    algorithm, mesh = config.algorithm, actor.mesh
    denoiser, state = actor.model.denoiser, actor.state
    losses_of = {"trajectory": trajectory_losses, "sample": sample_losses}[algorithm.objective.kind]
    useful = advantages.useful(keep_no_spread=not algorithm.drop_no_spread)
    sums: dict[str, float] = {}
    rows_total, grad_norms, replay_errors = 0.0, [], []
    lr = state.schedule.get_last_lr()[0]
    for units in optimizer_batches(batch.requests, useful, config, step):
        num_rows = mesh.sum(sum(len(each) for each in units) * batch.kept.rows_per_sample)
        if num_rows == 0:
            continue  # no sample of this part has anything to teach, on any rank
        for micro, rows in enumerate(accumulate(denoiser, micro_batches(units, config, mesh))):
            adds = len(rows) > 0  # else a pass that only keeps the other ranks company
            index = rows if adds else torch.zeros(1, dtype=torch.long)
            part = batch.rows(index)
            row_advantages = (advantages.values[index] * adds).repeat_interleave(batch.kept.rows_per_sample)
            untrained = micro == 0 and not grad_norms and adds  # the policy is still the one that sampled
            losses, penalty, stats = losses_of(actor, part, row_advantages, config, step, untrained)
            if "ratio/replay_error" in stats:
                replay_errors.append(float(stats.pop("ratio/replay_error")))
            stats["loss/policy"] = losses.detach().sum()
            if penalty is not None:
                losses = losses + algorithm.kl.coef * penalty
                stats["kl/reference"] = penalty.detach().sum()
            check_finite(losses, f"step {step + 1}, rank {mesh.rank}, samples {part.sample_ids}")
            loss = losses.sum() * adds / num_rows  # the mean over the rows of all ranks and micro-batches
            loss.backward()
            for name, value in stats.items():
                sums[name] = sums.get(name, 0.0) + float(value) * adds
        grad_norms.append(reduce_and_clip(denoiser, config.train.max_grad_norm, mesh, f"step {step + 1}"))
        state.optimizer.step()
        state.optimizer.zero_grad()
        actor.policies.policy_changed()
        rows_total += num_rows
        if state.ema is not None:
            state.ema.update()
    actor.policies.follow()
    state.schedule.step()
    state.step = step + 1
    means = {name: value / rows_total for name, value in mesh.sum_dict(sums).items()}
    grad_norm = sum(grad_norms) / max(len(grad_norms), 1)
    errors = {}
    if algorithm.objective.kind == "trajectory":
        errors["ratio/replay_error"] = mesh.max(max(replay_errors, default=0.0))
    counts = {"rows": rows_total, "updates": float(len(grad_norms))}
    return {**means, "grad_norm": grad_norm, "lr": lr, **errors, **counts, **group_diversity(batch, mesh)}


def trajectory_losses(
    actor: Actor, batch: RolloutBatch, advantages: torch.Tensor, config: DiffusionRLConfig, step: int, untrained: bool
) -> RowLosses:
    """Replays the trained steps of a micro-batch."""
    algorithm, guidance = config.algorithm, config.rollout.guidance_scale
    sampled, conditioning = batch.kept, batch.row_conditioning
    reference = None
    if "reference" in algorithm.compared:
        scale = algorithm.reference_guidance_scale or guidance
        with torch.no_grad(), actor.policies.active("reference") as model:
            reference = replay_trajectories(model, sampled, conditioning, algorithm.dynamics, scale)
    new = replay_trajectories(actor.model, sampled, conditioning, algorithm.dynamics, guidance)
    old, checked = sampled.sampled_steps(), {}
    if untrained:
        bound = algorithm.objective.replay_tolerance if algorithm.self_check and batch.policy_version == step else None
        log_ratio = algorithm.objective.log_ratio(new, old).detach()
        error = check_replay(log_ratio, sampled.steps, actor.model.input_dtype, bound)
        checked = {"ratio/replay_error": torch.tensor(error)}
    losses, stats = algorithm.objective.loss(new, old, advantages.to(new.mean.device))
    stats |= velocity_norms(new.velocity, None if reference is None else reference.velocity)
    penalty = None if reference is None else algorithm.kl.penalty(new, reference)
    return losses, penalty, {**stats, **checked}


def sample_losses(
    actor: Actor, batch: RolloutBatch, advantages: torch.Tensor, config: DiffusionRLConfig, step: int, untrained: bool
) -> RowLosses:
    """Noises the samples of a micro-batch anew."""
    del untrained  # nothing is replayed, so nothing can differ
    algorithm = config.algorithm
    noised = predict_noised(
        actor.policies,
        batch.kept,
        batch.row_conditioning,
        compared=algorithm.compared,
        guidance_scale=config.rollout.guidance_scale,
        reference_guidance_scale=algorithm.reference_guidance_scale,
        seed=config.train.seed,
        iteration=step,
    )
    advantages = advantages.to(noised.x0.device)
    losses, stats = algorithm.objective.loss(noised, advantages)
    stats |= velocity_norms(noised.velocity, noised.reference_velocity)
    penalty = algorithm.kl.sample_penalty(noised, advantages) if algorithm.kl.coef > 0 else None
    return losses, penalty, stats


def say_messages(run: Run, scores: Scores, where: str) -> None:
    """Says what of all ranks' samples could not be scored, and what else their rewards have to say."""
    for text in dict.fromkeys([*(f"failed: {each}" for each in scores.failures), *scores.notes]):
        run.say(f"{where}: reward {text}")


def evaluate(
    roles: Roles, run: Run, prompts: list[Prompt], config: DiffusionRLConfig, step: int
) -> tuple[dict[str, float], list[SampleRecord]]:
    """Metrics and kept samples of one image per held-out prompt; each rank makes its share."""
    mesh = run.mesh
    mine = list(mesh.share(len(prompts)))
    drawn = mine + [mine[-1]] * (int(mesh.max(len(mine))) - len(mine))  # ranks compute together
    evaluated = [prompts[index] for index in drawn]
    made, norms, cached = roles.sampler.call(draw_evaluation, evaluated, drawn, config).result()
    samples = made[: len(mine)]
    size = config.rollout.micro_batch_size
    parts = [roles.scorer.call(Scorer.score, samples[at : at + size]) for at in range(0, len(samples), size)]
    scores = mesh.first(Scores.cat([each.result() for each in parts]), among="copies")
    records = [
        scores.record(row, sample, kind="eval", seed=config.eval.seed, sample_id=sample.group_id, policy_version=step)
        for row, sample in enumerate(samples)
        if sample.group_id < config.eval.num_saved
    ]
    gathered = mesh.gather((scores, records, norms[: len(mine)]))
    all_scores = Scores.cat([each for each, _, _ in gathered])
    say_messages(run, all_scores, f"evaluation at step {step}")
    metrics = all_scores.metrics("eval/") | cached
    metrics["eval/velocity/rms"] = sum(norm for _, _, some in gathered for norm in some) / len(prompts)
    return metrics, [record for _, some, _ in gathered for record in some]


def draw_evaluation(
    actor: Actor, prompts: list[Prompt], ids: list[int], config: DiffusionRLConfig
) -> tuple[list[Sample], list[float], dict[str, float]]:
    """One image per prompt, from the averaged weights, with norms of velocities and the costs of leaving out steps."""
    with averaged_weights(actor.state.ema):
        return sample_evaluation(actor.model, prompts, ids, config)


if __name__ == "__main__":
    run_task(main, DiffusionRLConfig)
