"""Reinforcement learning of diffusion models on their trajectories: Flow-GRPO and its relatives.

    bash train.sh tasks/rl_diffusion.py configs/quickstart/rl.yaml --train.max_steps 6

Each iteration samples groups of images per prompt, some of their denoising steps at random, scores them while the next
ones are generated, turns rewards into advantages within groups, and learns from them: the random steps are replayed
with gradients, and their probability now is compared with the one when they were drawn. All parts of the algorithm are
chosen in the configuration; their formulas are in ``sfumato/algorithms``. The configuration also says in which
processes actor, sampler and scorer run: functions that build or take a role run in that role's processes.

``tasks/rl_diffusion_forward.py`` is the sibling that learns from final samples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.dynamics import GaussianStep
from sfumato.algorithms.mismatch import Mismatch, mismatch_metrics
from sfumato.algorithms.off_policy import old_policy
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.data.images.identity import identify_prompts
from sfumato.data.images.prompts import Prompt, describe_shared_prompts, load_prompts
from sfumato.data.prompt_loader import PromptLoader, check_prompts
from sfumato.models.diffusion.base import Conditioning
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import EvalStats, RankBatch, SampleRequest, requests_of
from sfumato.rollout.diffusion.evaluation import draw_watched_prompts, sample_evaluation
from sfumato.rollout.diffusion.monitors import group_diversity, velocity_norms
from sfumato.rollout.diffusion.policy import build_policy, count_costs, prepare_prompts
from sfumato.rollout.diffusion.self_check import Replay, RowProbe, probe_rows
from sfumato.rollout.diffusion.trajectories import (
    Trajectories,
    replay_trajectories,
    sample_trajectories,
    sampled_by_other_graphs,
    sampled_on_policy,
    with_proximal_means,
)
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout, EncodedRequests
from sfumato.runtime.evaluate import control_of, evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles
from sfumato.runtime.states import Actor, Sampler
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import Update, note_rows
from sfumato.tracking.identity import Identity
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


def main(config: TrajectoryRLConfig) -> None:
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_diffusion") as run:
        if run.report_if_complete():
            return
        train_prompts = load_prompts(config.data, "train")
        eval_prompts = load_prompts(config.data, "eval", config.eval.num_prompts)
        check_prompts(train_prompts + eval_prompts, [reward.check_row for reward in config.reward.rewards])
        for line in describe_shared_prompts(train_prompts, eval_prompts):
            run.say(line)
        identity = identify_prompts(config, train_prompts, eval_prompts)  # refuses a resume with others
        builders = {  # which get the prompts, wherever they run: no role opens the files again
            "actor": partial(build_actor, prompts=train_prompts, eval_prompts=eval_prompts, identity=identity),
            "sampler": partial(build_sampler, prompts=train_prompts),
            "scorer": lambda config, mesh, run: build_scorer(config.reward),
        }
        loader = PromptLoader(len(train_prompts), config.rollout.num_prompts, config.rollout.n, config.train.seed)
        with launch_roles(config, run, **builders) as roles, roles.rescuing(Actor.save):
            train(config, run, roles, loader)
        run.say(f"trained weights: {config.train.output_dir}/hf_ckpt")
        if changes := run.changes("eval/reward/"):
            run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
        run.say(f"report: {config.train.output_dir}/report.html")
        run.finish()


def train(config: TrajectoryRLConfig, run: Run, roles: Roles, loader: PromptLoader) -> None:
    """The training loop: takes samples with rewards, computes advantages, updates; logs, evaluates and saves."""
    combiner = build_scorer(config.reward, with_engines=False)  # totals need what all ranks scored
    start = roles.actor.call(Actor.resume, kind="load").result()
    costs = roles.actor.call(count_costs, config).result()
    probe = roles.actor.call(probe_rows, config).result()
    run.begin(cast(int, config.train.max_steps), start, config.train.trackers)
    run.add_environment(probe.environment, probe.message)
    stream = RolloutStream.from_config(
        config,
        roles,
        run.say,
        requests=partial(requests_of, loader),
        generate=partial(generate, config=config),
        score=partial(Scorer.score, objective_only=True),  # the others are left to the evaluation
    )
    if start == 0:
        run.log(0, evaluate(roles, run, draw_evaluation, config, step=0), show=SHOWN)
        run.write_report()
    control = control_of(run, roles, config, draw_evaluation, draw_watched_prompts)

    for step, batch in run.steps(stream.steps(from_step=start)):
        run.add_time("generate", batch.generate_s)
        run.add_time("wait_for_rewards", batch.wait_s)
        run.add_timings(batch.scores.timings(batch.wait_s))
        scores = combiner.finish(batch.scores, batch.group_ids)
        for text in scores.messages:
            run.say(f"step {step + 1}: reward {text}")
        combiner.check_budget(scores)
        advantages = config.algorithm.advantage.compute(
            torch.tensor(scores.total),
            torch.tensor(batch.group_ids),
            {name: torch.tensor(values) for name, values in scores.components.items()},
            {reward.label: reward.weight for reward in config.reward.rewards if not reward.evaluation_only},
        )
        with run.timed("update"):
            metrics = roles.actor.map(
                update_policy, batch.rank_batches, advantages, config, step, probe, kind="update"
            ).result()
        run.count(images=batch.num_driven, flops=costs.flops(batch.num_driven, metrics["rows"] * batch.fraction_driven))
        stream.publish(version=step + 1)

        metrics |= scores.metrics("") | advantages.metrics | batch.staleness(step)
        last = step + 1 == config.train.max_steps
        evaluating = last or (step + 1) % config.eval.every_steps == 0
        if evaluating:
            metrics |= evaluate(roles, run, draw_evaluation, config, step + 1, batch.rank_batches, scores, advantages)
        del batch  # memory for the next one
        run.add_events(roles.driver.record.pop_events(), roles.driver.take_timings())
        run.log(step + 1, metrics, show=SHOWN)
        if evaluating:
            run.say_signs_of_hacking()
            run.write_report(if_cheap=not last)
        roles.actor.call(Actor.after_step, run.sync(), kind="save").result()
        control.obey(step + 1)
        if config.train.export_steps and (step + 1) % config.train.export_steps == 0:
            run.attempt(lambda: roles.actor.call(Actor.export, config, kind="save").result())

    roles.actor.call(Actor.export, config, kind="save").result()
    roles.scorer.call(Scorer.close).result()


def build_actor(
    config: TrajectoryRLConfig,
    mesh: Mesh,
    run: Run,
    *,
    prompts: list[Prompt],
    eval_prompts: list[Prompt],
    identity: Identity,
) -> Actor:
    """Loads the policy, its optimiser, its averaged weights, and the policies that it is compared with or drawn by."""
    assert config.train.max_steps is not None
    model = build_policy(config, mesh, run.say)
    # a sampler that lags behind draws with the weights before the last update
    keep_previous = config.rollout.staleness > 0
    policies = Policies(model, config.algorithm.other_policies, config.algorithm.sample_with, keep_previous)
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, config.train.max_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(
        model.denoiser, optimizer, schedule, ema, policies.frozen_weights, policies=policies.saved, identity=identity
    )
    # the sampler embeds the training prompts where it has a model of its own
    prepare_prompts(model, prompts + eval_prompts if config.rollout.hybrid_engine else eval_prompts, config)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    return Actor(model, mesh, prompts, eval_prompts, policies, state, checkpointer, config.runtime.offload_idle)


def build_sampler(config: TrajectoryRLConfig, mesh: Mesh, run: Run, *, prompts: list[Prompt]) -> Sampler:
    """Loads a model that samples only."""
    model = build_policy(config, mesh, run.say)
    model.parallelize(mesh, config.runtime.sampler_train(config.train))
    prepare_prompts(model, prompts, config)
    return Sampler(model, mesh, prompts, config.runtime.offload_idle)


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, config: TrajectoryRLConfig
) -> tuple[DiffusionRollout, list[Sample]]:
    """Samples a micro-batch and stores the trained steps of its trajectories."""
    rollout = config.rollout
    algorithm = config.algorithm
    encoded = EncodedRequests(sampler.model, requests, sampler.prompts, config)
    with sampler.policy() as policy:
        latents, trajectories = sample_trajectories(
            policy,
            encoded.conditioning,
            encoded.sample_ids,
            dynamics=algorithm.dynamics,
            trained_steps=algorithm.window.steps(rollout.num_inference_steps, config.train.seed, iteration),
            latent_ids=encoded.group_ids if rollout.same_latent else None,
            size=rollout.size,
            num_steps=rollout.num_inference_steps,
            guidance_scale=rollout.guidance_scale,
            seed=config.train.seed,
            iteration=iteration,
        )
    return encoded.rollout(latents, trajectories, version)


def update_policy(
    actor: Actor, rank_batch: RankBatch, advantages: Advantages, config: TrajectoryRLConfig, step: int, probe: RowProbe
) -> dict[str, float]:
    """Optimiser steps on one iteration's trajectories. Returns means over the trained rows of all ranks.

    R rows of a micro-batch are its (sample, trained denoising step) pairs.
    """
    algorithm = config.algorithm
    objective = algorithm.objective
    model = actor.model
    mesh = actor.mesh
    update = Update(actor, rank_batch, advantages, config, step)
    mismatch = Mismatch()
    replay = Replay()
    update.pending.append(mismatch.numbers)
    is_on_policy = sampled_on_policy(update.batch, config, mesh, step)
    rounds_apart = sampled_by_other_graphs(update.batch, config, mesh, step, model.device.type)
    update.batch = with_proximal_means(model, update.batch, update.passes, config, is_on_policy, rounds_apart)
    for micro_batches in update.optimizer_steps():
        for micro in micro_batches:
            sampled = micro.samples.kept
            conditioning = micro.samples.row_conditioning
            reference = replay_reference(actor, sampled, conditioning, config)
            new = replay_trajectories(model, sampled, conditioning, algorithm.dynamics, config.rollout.guidance_scale)
            behaviour = sampled.sampled_steps()  # by the policy that drew them
            if micro.is_first:
                replay = probe.compare(new, micro.samples, model, config, step)
                update.pending.append(replay.errors)
            # until the update's first optimiser step the policy is the proximal one itself
            means = sampled.proximal_rows if actor.policies.is_ahead else new.mean
            proximal = None if means is None else replace(new, mean=means.detach())  # at the start of this update
            if rounds_apart and proximal is not None:  # so that the ratio is that of the weights alone
                behaviour = replace(behaviour, means=proximal.mean)
            counted = mismatch if micro.is_counted else None  # a pass for other ranks is in no metric
            old, weights = old_policy(
                objective, algorithm.off_policy, behaviour, proximal, micro.sample_of_row, counted
            )
            ratio = objective.ratio(new, old)  # log-ratios with gradients, exactly 0 where both are one policy
            losses, sums = objective.loss(ratio, micro.advantages)
            note_rows(update.decisions, micro, objective, ratio, trained_steps=sampled.steps)
            losses = losses * weights
            sums |= velocity_norms(new.velocity, None if reference is None else reference.velocity)
            sums["loss/policy"] = losses.detach().sum()
            if reference is not None:
                penalty = algorithm.kl.penalty(new, reference)
                losses = losses + algorithm.kl.coef * penalty
                sums["kl/reference"] = penalty.detach().sum()
            loss = micro.mean(losses)
            loss.backward()
            update.record(micro, sums)
        where = f"step {step + 1}"
        grad_norm = reduce_and_clip(model.denoiser, config.train.max_grad_norm, mesh, where, *update.pending)
        replay.check()  # before anything has been updated
        actor.step()
        update.grad_norms.append(grad_norm)
    actor.end_update(step + 1)
    replayed = {"ratio/replay_error": mesh.max(replay.check())}
    replayed |= mismatch_metrics(mesh.sum_dict(mismatch.sums), mesh.max(mismatch.largest))
    return update.metrics(replayed) | group_diversity(update.batch, mesh)


def replay_reference(
    actor: Actor, sampled: Trajectories, conditioning: Conditioning, config: TrajectoryRLConfig
) -> GaussianStep | None:
    """The reference's distribution of the R trained steps, without gradients; None where nothing compares with it."""
    algorithm = config.algorithm
    if "reference" not in algorithm.compared:
        return None
    scale = algorithm.reference_guidance_scale or config.rollout.guidance_scale
    with torch.no_grad(), actor.policies.active("reference") as model:
        return replay_trajectories(model, sampled, conditioning, algorithm.dynamics, scale)


def draw_evaluation(actor: Actor, rows: list[int], config: TrajectoryRLConfig) -> tuple[list[Sample], EvalStats]:
    """An image of each held-out prompt of ``rows``, by the averaged weights, and metrics of its sampling."""
    with actor.evaluated() as model:
        return sample_evaluation(model, [actor.eval_prompts[row] for row in rows], rows, config)


if __name__ == "__main__":
    run_task(main, TrajectoryRLConfig)
