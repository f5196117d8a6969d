"""Reinforcement learning of diffusion models by the gradient of their reward: DRaFT, AlignProp, ReFL, SRPO.

    bash train.sh tasks/rl_diffusion_direct.py configs/quickstart/draft.yaml --algorithm.steps.k 2

Each iteration draws images, decodes them, and scores their pixels with rewards that have a gradient. It flows back
through reward, autoencoder and the last denoising steps to the weights. Nothing is compared within groups, and rewards
without a gradient can be watched in the evaluation, against reward hacking.

``tasks/rl_diffusion.py`` and ``tasks/rl_diffusion_forward.py`` are the siblings for any reward.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from sfumato.algorithms.reading import Numbers
from sfumato.algorithms.reward_gradients import reward_loss
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.config.direct_rl import DirectRLConfig
from sfumato.data.images.identity import identify_prompts
from sfumato.data.images.prompts import Prompt, describe_shared_prompts, load_prompts
from sfumato.data.prompt_loader import PromptLoader, check_prompts
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate
from sfumato.rewards.base import Sample
from sfumato.rewards.differentiable import score_differentiably
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import EvalStats, SampleRequest, requests_of
from sfumato.rollout.diffusion.differentiable import draw_differentiably, iteration_flops, split_requests
from sfumato.rollout.diffusion.evaluation import draw_watched_prompts, sample_evaluation
from sfumato.rollout.diffusion.policy import build_policy, encode_prompts, prepare_prompts
from sfumato.runtime.evaluate import control_of, evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles, label_calls
from sfumato.runtime.states import Actor, Sampler
from sfumato.tracking.identity import Identity
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total"}


def main(config: DirectRLConfig) -> None:
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_diffusion_direct") as run:
        if run.report_if_complete():
            return
        train_prompts = load_prompts(config.data, "train")
        eval_prompts = load_prompts(config.data, "eval", config.eval.num_prompts)
        check_prompts(train_prompts + eval_prompts, [reward.check_row for reward in config.reward.rewards])
        for line in describe_shared_prompts(train_prompts, eval_prompts):
            run.say(line)
        identity = identify_prompts(config, train_prompts, eval_prompts)  # refuses a resume with others
        builders = {
            "actor": partial(build_actor, prompts=train_prompts, eval_prompts=eval_prompts, identity=identity),
            "sampler": refuse_sampler,
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


def train(config: DirectRLConfig, run: Run, roles: Roles, loader: PromptLoader) -> None:
    """The training loop: updates the policy; logs, evaluates and saves."""
    max_steps = cast(int, config.train.max_steps)
    start = roles.actor.call(Actor.resume, kind="load").result()
    run.begin(max_steps, start, config.train.trackers)
    if start == 0:
        run.log(0, evaluate(roles, run, draw_evaluation, config, step=0), show=SHOWN)
        run.write_report()
    control = control_of(run, roles, config, draw_evaluation, draw_watched_prompts)

    for step in run.steps(range(start, max_steps)):
        requests = [requests_of(loader, step, rank, roles.actor.num_data_ranks) for rank in roles.actor.data_ranks]
        with label_calls(roles.driver.record, step + 1), run.timed("update"):
            metrics, flops = roles.actor.map(update_policy, requests, config, step, kind="update").result()
        run.count(images=sum(map(len, requests)), flops=flops)
        last = step + 1 == max_steps
        evaluating = last or (step + 1) % config.eval.every_steps == 0
        if evaluating:
            metrics |= evaluate(roles, run, draw_evaluation, config, step + 1)
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
    config: DirectRLConfig,
    mesh: Mesh,
    run: Run,
    *,
    prompts: list[Prompt],
    eval_prompts: list[Prompt],
    identity: Identity,
) -> Actor:
    """Loads the policy, its optimiser, its averaged weights, and with a penalty the reference."""
    assert config.train.max_steps is not None
    model = build_policy(config, mesh, run.say)
    model.recompute_autoencoder(config.train.activation_checkpointing != "none")
    policies = Policies(model, config.algorithm.other_policies)
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.denoiser, config.train, config.train.max_steps)
    ema = Ema(model.denoiser, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    state = TrainState(
        model.denoiser, optimizer, schedule, ema, policies.frozen_weights, policies=policies.saved, identity=identity
    )
    prepare_prompts(model, prompts + eval_prompts, config)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    return Actor(model, mesh, prompts, eval_prompts, policies, state, checkpointer)


def refuse_sampler(config: DirectRLConfig, mesh: Mesh, run: Run) -> Sampler:
    """Is never called: the actor draws, since the graph of a sample cannot leave its process."""
    raise AssertionError("a sampler of its own would draw without gradient")


def update_policy(
    actor: Actor, requests: list[SampleRequest], config: DirectRLConfig, step: int
) -> tuple[dict[str, float], dict[str, float]]:
    """One optimiser step on samples of the policy. Returns metrics over all ranks' samples, and this rank's operations.

    B is the number of samples of a micro-batch.
    """
    algorithm = config.algorithm
    rollout = config.rollout
    model = actor.model
    mesh = actor.mesh
    num_scored = rollout.num_prompts * rollout.n * algorithm.num_passes
    differentiated = algorithm.steps.steps(rollout.num_inference_steps, config.train.seed, step)
    checked = Numbers()
    sums = Numbers()
    lr = float(actor.state.schedule.get_last_lr()[0])
    actor.begin_update()
    for micro_batch in accumulate(model.denoiser, split_requests(requests, config.train.micro_batch_size)):
        prompts = [actor.prompts[request.prompt_id] for request in micro_batch]
        sample_ids = [request.sample_id for request in micro_batch]
        conditioning, _ = encode_prompts(model, prompts, rollout.size, rollout.guidance_scale != 1.0)
        for samples in draw_differentiably(actor.policies, conditioning, sample_ids, config, step):
            pixels = model.decode_differentiably(samples.latents)
            texts = [prompt.text for prompt in prompts]
            rewards_B, values = score_differentiably(
                config.optimised_rewards, pixels, texts, samples.control_words, samples.gains
            )
            losses_B = reward_loss(rewards_B, algorithm.reward_limit)
            sums.add_all(**{"reward/total": rewards_B.sum(), "loss/policy": losses_B.sum()})
            sums.add_all(**{f"reward/{label}": value.sum() for label, value in values.items()})
            if samples.reference_distances is not None:
                losses_B = losses_B + algorithm.kl_coef * samples.reference_distances
                sums.add_all(**{"kl/reference": samples.reference_distances.sum()})
            checked.add(losses_B.double().sum(), f"step {step + 1}, rank {mesh.rank}, samples {sample_ids}")
            loss = losses_B.sum() / num_scored  # the mean over the samples of all ranks
            loss.backward()
    grad_norm = reduce_and_clip(model.denoiser, config.train.max_grad_norm, mesh, f"step {step + 1}", checked, sums)
    actor.step()
    actor.end_update(step + 1)
    metrics = {name: value / num_scored for name, value in mesh.sum_dict(sums.sums()).items()}
    metrics |= {"grad_norm": grad_norm, "lr": lr, "rollout/differentiated_steps": float(len(differentiated))}
    return metrics, iteration_flops(model, len(requests), differentiated, config)


def draw_evaluation(actor: Actor, rows: list[int], config: DirectRLConfig) -> tuple[list[Sample], EvalStats]:
    """An image of each held-out prompt of ``rows``, by the averaged weights, and metrics of its sampling."""
    with actor.evaluated() as model:
        return sample_evaluation(model, [actor.eval_prompts[row] for row in rows], rows, config)


if __name__ == "__main__":
    run_task(main, DirectRLConfig)
