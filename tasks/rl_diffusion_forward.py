"""Reinforcement learning of diffusion models on the forward process: DiffusionNFT and its relatives.

    bash train.sh tasks/rl_diffusion_forward.py configs/quickstart/algorithms/diffusion_nft.yaml --train.max_steps 6

Each iteration samples groups of images per prompt with a deterministic solver, scores them while the next ones are
generated, turns rewards into advantages within groups, and learns from them as pretraining does: the final samples are
noised anew, and the losses look at what the policies predict there. All parts of the algorithm are chosen in the
configuration; their formulas are in ``sfumato/algorithms``. The configuration also says in which processes actor,
sampler and scorer run: functions that build or take a role run in that role's processes.

``tasks/rl_diffusion.py`` is the sibling that replays trajectories.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.config.diffusion_rl import ForwardRLConfig
from sfumato.data.images.identity import identify_prompts
from sfumato.data.images.prompts import Prompt, describe_shared_prompts, load_prompts
from sfumato.data.prompt_loader import PromptLoader, check_prompts
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import EvalStats, RankBatch, SampleRequest, requests_of
from sfumato.rollout.diffusion.evaluation import draw_watched_prompts, sample_evaluation
from sfumato.rollout.diffusion.final_samples import predict_noised, sample_final
from sfumato.rollout.diffusion.monitors import group_diversity, velocity_norms
from sfumato.rollout.diffusion.policy import build_policy, count_costs, prepare_prompts
from sfumato.rollout.diffusion.trajectory_sampler import DiffusionRollout, EncodedRequests
from sfumato.runtime.evaluate import control_of, evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles
from sfumato.runtime.states import Actor, Sampler
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import Update
from sfumato.tracking.identity import Identity
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


def main(config: ForwardRLConfig) -> None:
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_diffusion_forward") as run:
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


def train(config: ForwardRLConfig, run: Run, roles: Roles, loader: PromptLoader) -> None:
    """The training loop: takes samples with rewards, computes advantages, updates; logs, evaluates and saves."""
    combiner = build_scorer(config.reward, with_engines=False)  # totals need what all ranks scored
    start = roles.actor.call(Actor.resume, kind="load").result()
    costs = roles.actor.call(count_costs, config).result()
    run.begin(cast(int, config.train.max_steps), start, config.train.trackers)
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
        config.algorithm.check_lowest_advantage(float(advantages.values.min()))
        with run.timed("update"):
            metrics = roles.actor.map(
                update_policy, batch.rank_batches, advantages, config, step, kind="update"
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
    config: ForwardRLConfig,
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


def build_sampler(config: ForwardRLConfig, mesh: Mesh, run: Run, *, prompts: list[Prompt]) -> Sampler:
    """Loads a model that samples only."""
    model = build_policy(config, mesh, run.say)
    model.parallelize(mesh, config.runtime.sampler_train(config.train))
    prepare_prompts(model, prompts, config)
    return Sampler(model, mesh, prompts, config.runtime.offload_idle)


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, config: ForwardRLConfig
) -> tuple[DiffusionRollout, list[Sample]]:
    """Samples a micro-batch and stores its final latents, with the noise levels at which they will be trained."""
    rollout = config.rollout
    algorithm = config.algorithm
    encoded = EncodedRequests(sampler.model, requests, sampler.prompts, config)
    with sampler.policy() as policy:
        final_samples = sample_final(
            policy,
            encoded.conditioning,
            encoded.sample_ids,
            encoded.group_ids,
            solver=algorithm.solver,
            timesteps=algorithm.timesteps,
            shared_noise=algorithm.objective.shared_noise,
            size=rollout.size,
            num_steps=rollout.num_inference_steps,
            guidance_scale=rollout.guidance_scale,
            seed=config.train.seed,
            iteration=iteration,
        )
    return encoded.rollout(final_samples.latents, final_samples, version)


def update_policy(
    actor: Actor, rank_batch: RankBatch, advantages: Advantages, config: ForwardRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's samples. Returns means over the trained rows of all ranks.

    R rows of a micro-batch are its (sample, noise level) pairs.
    """
    algorithm = config.algorithm
    model = actor.model
    mesh = actor.mesh
    update = Update(actor, rank_batch, advantages, config, step)
    for micro_batches in update.optimizer_steps():
        for micro in micro_batches:
            noised = predict_noised(  # the trained policy with gradients, and the policies that it is compared with
                actor.policies,
                micro.samples.kept,
                micro.samples.row_conditioning,
                compared=algorithm.compared,
                guidance_scale=config.rollout.guidance_scale,
                reference_guidance_scale=algorithm.reference_guidance_scale,
                seed=config.train.seed,
                iteration=step,
            )
            losses, sums = algorithm.objective.loss(noised, micro.advantages)
            sums |= velocity_norms(noised.velocity, noised.reference_velocity)
            sums["loss/policy"] = losses.detach().sum()
            if algorithm.kl.coef > 0:
                penalty = algorithm.kl.penalty(noised, micro.advantages)
                losses = losses + algorithm.kl.coef * penalty
                sums["kl/reference"] = penalty.detach().sum()
            loss = micro.mean(losses)
            loss.backward()
            update.record(micro, sums)
        where = f"step {step + 1}"
        grad_norm = reduce_and_clip(model.denoiser, config.train.max_grad_norm, mesh, where, *update.pending)
        actor.step()
        update.grad_norms.append(grad_norm)
    actor.end_update(step + 1)
    return update.metrics() | group_diversity(update.batch, mesh)


def draw_evaluation(actor: Actor, rows: list[int], config: ForwardRLConfig) -> tuple[list[Sample], EvalStats]:
    """An image of each held-out prompt of ``rows``, by the averaged weights, and metrics of its sampling."""
    with actor.evaluated() as model:
        return sample_evaluation(model, [actor.eval_prompts[row] for row in rows], rows, config)


if __name__ == "__main__":
    run_task(main, ForwardRLConfig)
