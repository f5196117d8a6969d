"""Reinforcement learning of diffusion models: Flow-GRPO and its relatives.

    bash train.sh tasks/rl_diffusion.py configs/quickstart/rl.yaml --train.max_steps 6

Each iteration samples groups of images per prompt, scores them while the next ones are generated, turns rewards into
advantages within groups, and learns from them: objectives on trajectories replay the stochastic steps with gradients,
those on final samples noise the images anew. All parts of the algorithm are chosen in the configuration; their
formulas stand in ``sfumato/algorithms``. Where actor, sampler and scorer live is the configuration's matter, too: the
functions below run where the role is that they are given to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.off_policy.mismatch import Mismatch, mismatch_metrics
from sfumato.algorithms.off_policy.trajectory import corrected_loss
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.identity import identify_prompts
from sfumato.data.prompts import Prompt, PromptLoader, check_prompts, load_prompts
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.diffusion.output import set_output
from sfumato.models.diffusion.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.data import accumulate
from sfumato.parallel.gradients import check_finite, reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import Part, RolloutBatch, SampleRequest, join, requests_of, sample_of
from sfumato.rollout.diffusion import check_replay, decode_samples, replay_trajectories, sample_trajectories
from sfumato.rollout.evaluation import sample_evaluation
from sfumato.rollout.final_samples import predict_noised, sample_final
from sfumato.rollout.monitors import group_diversity, velocity_norms
from sfumato.rollout.prompts import check_source_images, encode_prompts, remember_prompts
from sfumato.rollout.proximal import with_proximal_means
from sfumato.rollout.update_order import optimizer_passes
from sfumato.runtime.diffusion_states import Actor, Sampler, build_memory
from sfumato.runtime.evaluate import evaluate, save_samples
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.memory import RoleMemory
from sfumato.runtime.roles import Roles
from sfumato.runtime.stream import RolloutStream
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


RowLosses = tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]
"""Of R rows: losses, penalties if there are any, and sums for the log."""


def main(config: DiffusionRLConfig) -> None:
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_diffusion") as run:
        train_prompts = load_prompts(config.data, "train")
        eval_prompts = load_prompts(config.data, "eval", config.eval.num_prompts)
        check_prompts(train_prompts + eval_prompts, [each.check_row for each in config.reward.rewards])
        identify_prompts(config, train_prompts, eval_prompts)  # refuses a resume with others before roles are built
        prompts = PromptLoader(len(train_prompts), config.rollout.num_prompts, config.rollout.n, config.train.seed)
        builders = {"actor": build_actor, "sampler": build_sampler, "scorer": make_scorer}
        with launch_roles(config, run, **builders) as roles, roles.rescuing(Actor.save):
            train(config, run, roles, prompts)
        run.say(f"trained weights: {config.train.output_dir}/hf_ckpt")
        if changes := run.changes("eval/reward/"):
            run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
        run.say(f"report: {config.train.output_dir}/report.html")
        run.finish()


def train(config: DiffusionRLConfig, run: Run, roles: Roles, prompts: PromptLoader) -> None:
    """The loop: samples with rewards, advantages, an update, and what is logged, evaluated and saved."""
    combiner = build_scorer(config.reward, with_engines=False)  # totals need what all shares scored
    start = roles.actor.call(Actor.resume).result()
    costs = roles.actor.call(Actor.count_costs, config).result()
    rows = roles.actor.call(Actor.probe_rows, config).result()
    run.begin(config.train.max_steps, start, config.train.trackers)
    run.add_environment(rows.environment, rows.message)
    stream = RolloutStream(
        roles,
        requests=lambda iteration, share, num_shares: requests_of(prompts, iteration, share, num_shares),
        generate=partial(generate, config=config),
        score=score,
        total_steps=config.train.max_steps,
        micro_batch_size=config.rollout.micro_batch_size,
        with_reward=config.rollout.with_reward,
        max_pending=config.reward.max_pending,
        max_staleness=config.rollout.staleness,
        offload=config.runtime.offload_idle,
        say=run.say,
    )

    if start == 0:
        with run.timed("evaluate"):
            metrics, evaluated = evaluate(roles, run, draw_evaluation, config, step=0)
            save_samples(roles, run, config, 0, evaluated)
        run.log(0, metrics, show=SHOWN)
        run.write_report()

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
            {each.label: each.weight for each in config.reward.rewards if not each.evaluation_only},
        )

        with run.timed("update"):
            metrics = roles.actor.map(update_policy, batch.parts, advantages, config, step).result()
        run.count(images=batch.num_driven, flops=costs.flops(batch.num_driven, metrics["rows"] * batch.share_driven))
        stream.publish(version=step + 1)
        metrics |= scores.metrics("") | advantages.metrics | batch.staleness(step)
        last = step + 1 == config.train.max_steps
        evaluating = last or (step + 1) % config.eval.every_steps == 0
        if evaluating:
            with run.timed("evaluate"):
                eval_metrics, evaluated = evaluate(roles, run, draw_evaluation, config, step + 1)
                save_samples(roles, run, config, step + 1, evaluated, batch.parts, scores, advantages)
            metrics |= eval_metrics
            del evaluated
        del batch  # memory for the next one
        run.add_events(roles.driver.record.take(), roles.driver.take_timings())
        run.log(step + 1, metrics, show=SHOWN)
        if evaluating:
            run.say_signs_of_hacking()
            run.write_report(if_cheap=not last)
        roles.actor.call(Actor.after_step, run.sync()).result()
        if config.train.export_steps and (step + 1) % config.train.export_steps == 0:
            run.attempt(lambda: roles.actor.call(Actor.export, config).result())

    roles.actor.call(Actor.export, config).result()
    roles.scorer.call(Scorer.close).result()


def make_scorer(config: DiffusionRLConfig, mesh: Mesh, run: Run) -> Scorer:
    """Loads what the rewards need."""
    del mesh, run
    return build_scorer(config.reward)


def build_actor(config: DiffusionRLConfig, mesh: Mesh, run: Run) -> Actor:
    """Loads the policy with its optimiser and its average, and the policies that it is compared with or sampled by."""
    prompts, eval_prompts = (
        load_prompts(config.data, "train"),
        load_prompts(config.data, "eval", config.eval.num_prompts),
    )
    model = build_model(config, mesh)
    model.say = run.say
    keep_previous = config.rollout.staleness > 0
    policies = Policies(model, config.algorithm.other_policies, config.algorithm.sample_with, keep_previous)
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, config.train.max_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(model.denoiser, optimizer, schedule, ema, policies.frozen_weights, policies=policies.saved)
    state.identity = identify_prompts(config, prompts, eval_prompts)
    prepare_prompts(model, prompts + eval_prompts if config.rollout.hybrid_engine else eval_prompts, config)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    actor = Actor(model, mesh, prompts, eval_prompts, policies, state, checkpointer)
    if config.runtime.offload_idle:
        actor.memory, checkpointer.before_save = build_memory(actor), actor.wake_all
    return actor


def build_sampler(config: DiffusionRLConfig, mesh: Mesh, run: Run) -> Sampler:
    """Loads a model that samples only."""
    prompts, model = load_prompts(config.data, "train"), build_model(config, mesh)
    model.say = run.say
    model.parallelize(mesh, config.runtime.sampler_train(config.train))
    prepare_prompts(model, prompts, config)
    memory = RoleMemory(model.denoiser, device=model.device) if config.runtime.offload_idle else None
    sampler = Sampler(model, mesh, prompts, memory)
    sampler.rest()  # until it is sent weights
    return sampler


def build_model(config: DiffusionRLConfig, mesh: Mesh) -> DiffusionModel:
    """The policy as it is before training."""
    precision, seed = config.train.mixed_precision, config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    set_output(model, config.rollout.size, "rollout")
    if config.rollout.guidance_scale_2 is not None:
        model.set_second_guidance(config.rollout.guidance_scale_2)
    model.denoiser.eval()  # rollout and replay must be the same function
    return model


def prepare_prompts(model: DiffusionModel, prompts: list[Prompt], config: DiffusionRLConfig) -> None:
    """Looks at what every prompt of the run needs; embeds them all where the text encoders are not kept."""
    check_source_images(model, prompts)
    if not config.model.keep_encoders:
        remember_prompts(model, prompts, config.rollout.size)
        model.free_encoders()


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, config: DiffusionRLConfig
) -> tuple[RolloutBatch, list[Sample]]:
    """Samples a micro-batch, keeping what the update needs: the window's steps, or the final latents."""
    rollout, algorithm, model = config.rollout, config.algorithm, sampler.model
    prompts = {each.group_id: sampler.prompts[each.prompt_id] for each in requests}  # each is embedded once
    guided = {rollout.guidance_scale, algorithm.reference_guidance_scale or 1.0} != {1.0}
    conditioning, sources = encode_prompts(model, list(prompts.values()), rollout.size, guided)
    rows = [list(prompts).index(each.group_id) for each in requests]
    sample_ids, group_ids = zip(*((each.sample_id, each.group_id) for each in requests), strict=True)
    settings: dict[str, Any] = {
        "size": rollout.size,
        "num_steps": rollout.num_inference_steps,
        "guidance_scale": rollout.guidance_scale,
        "seed": config.train.seed,
        "iteration": iteration,
    }
    with sampler.policy() as policy:
        if algorithm.objective.kind == "trajectory":
            latents, kept = sample_trajectories(
                policy,
                conditioning.rows(rows),
                sample_ids,
                dynamics=algorithm.dynamics,
                trained_steps=algorithm.window.steps(rollout.num_inference_steps, config.train.seed, iteration),
                latent_ids=group_ids if rollout.same_latent else None,
                **settings,
            )
        else:
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
    pictures = decode_samples(model, latents, kept)
    samples = [
        sample_of(prompts[each.group_id], image, each.group_id, sources and sources[row], damage)
        for each, (image, damage), row in zip(requests, pictures, rows, strict=True)
    ]
    damage = [each.damage for each in samples]
    return RolloutBatch.made(requests, kept, conditioning, list(prompts), latents, version, damage), samples


def score(scorer: Scorer, samples: list[Sample]) -> Scores:
    """Rewards of a micro-batch; evaluation-only ones are left to the evaluation."""
    return scorer.score(samples, objective_only=True)


def update_policy(
    actor: Actor, part: Part, all_advantages: Advantages, config: DiffusionRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's samples. Returns means over the trained rows of all ranks.

    A row is a (sample, denoising step) or (sample, noise level) pair.
    """
    algorithm, mesh = config.algorithm, actor.mesh
    denoiser, state = actor.model.denoiser, actor.state
    batch = join(part, actor.model.device)
    advantages = all_advantages.rows(batch.sample_ids)
    actor.begin_update()
    losses_of = {"trajectory": trajectory_losses, "sample": sample_losses}[algorithm.objective.kind]
    useful = advantages.useful(keep_no_spread=not algorithm.drop_no_spread)
    sums: dict[str, float] = {}
    rows_total, grad_norms, replay_errors = 0.0, [], []
    lr = state.schedule.get_last_lr()[0]
    passes = optimizer_passes(batch.requests, useful, batch.kept.rows_per_sample, config, mesh, step)
    batch, mismatch = with_proximal_means(actor.model, batch, passes, config, mesh, step), Mismatch()
    for num_rows, parts in passes:
        for micro, rows in enumerate(accumulate(denoiser, parts)):
            adds = len(rows) > 0  # else a pass that only keeps the other ranks company
            index = rows if adds else torch.zeros(1, dtype=torch.long)
            part = batch.rows(index)
            row_advantages = (advantages.values[index] * adds).repeat_interleave(batch.kept.rows_per_sample)
            counted = mismatch if adds else None
            checked = micro == 0 and not grad_norms and adds  # the policy is the one that sampled, if it is on-policy
            losses, penalty, stats = losses_of(actor, part, row_advantages, config, step, checked, counted)
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
        actor.step()
        rows_total += num_rows
    actor.policies.follow()
    state.schedule.step()
    state.step = step + 1
    means = {name: value / rows_total for name, value in mesh.sum_dict(sums).items()}
    grad_norm = sum(grad_norms) / max(len(grad_norms), 1)
    errors = {}
    if algorithm.objective.kind == "trajectory":
        errors["ratio/replay_error"] = mesh.max(max(replay_errors, default=0.0))
        errors |= mismatch_metrics(mesh.sum_dict(mismatch.sums), mesh.max(mismatch.largest))
    counts = {"rows": rows_total, "updates": float(len(grad_norms))}
    return {**means, "grad_norm": grad_norm, "lr": lr, **errors, **counts, **group_diversity(batch, mesh)}


def trajectory_losses(
    actor: Actor,
    batch: RolloutBatch,
    advantages: torch.Tensor,
    config: DiffusionRLConfig,
    step: int,
    checked: bool,
    mismatch: Mismatch | None,
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
    old, errors = sampled.sampled_steps(), {}
    if checked:
        log_ratio, dtype = algorithm.objective.log_ratio(new, old).detach(), actor.model.compute_dtype
        is_own = algorithm.self_check and set(batch.versions) == {step}
        bound = actor.rows.bound(len(log_ratio), algorithm.objective.replay_tolerance, dtype) if is_own else None
        error = check_replay(log_ratio, sampled.steps, dtype, bound)
        errors = {"ratio/replay_error": torch.tensor(error)}
    is_proximal = not actor.policies.is_ahead  # of itself at the start of this update
    proximal = new.mean.detach() if is_proximal else sampled.proximal_rows
    of_sample = torch.arange(len(batch)).repeat_interleave(sampled.rows_per_sample)
    losses, stats = corrected_loss(
        algorithm.objective,
        algorithm.off_policy,
        new,
        old,
        advantages.to(new.mean.device),
        of_sample,
        proximal,
        mismatch,
    )
    stats |= velocity_norms(new.velocity, None if reference is None else reference.velocity)
    penalty = None if reference is None else algorithm.kl.penalty(new, reference)
    return losses, penalty, {**stats, **errors}


def sample_losses(
    actor: Actor, batch: RolloutBatch, advantages: torch.Tensor, config: DiffusionRLConfig, step: int, *_: Any
) -> RowLosses:
    """Noises the samples of a micro-batch anew. Nothing is replayed, so nothing can differ."""
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


def draw_evaluation(
    actor: Actor, rows: list[int], config: DiffusionRLConfig
) -> tuple[list[Sample], tuple[list[float], dict[str, float]]]:
    """An image of each held-out prompt, from the averaged weights; norms of velocities, what left out steps cost."""
    with actor.evaluated() as model:
        samples, norms, cached = sample_evaluation(model, [actor.eval_prompts[row] for row in rows], rows, config)
    return samples, (norms, cached)


if __name__ == "__main__":
    run_task(main, DiffusionRLConfig)
