"""Reinforcement learning of language models: GRPO and its relatives.

    bash train.sh tasks/rl_text.py configs/quickstart/text_rl.yaml --train.max_steps 6

Each iteration draws groups of answers to prompts, scores them, and learns: the drawn tokens go through the model once
more, with gradients, and their probability now is compared with that when they were drawn. The configuration chooses
the algorithm part by part (formulas: ``sfumato/algorithms``). It also says in which processes the roles run: functions
that build or take a role run in that role's processes.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import cast

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.mismatch import Mismatch, mismatch_metrics
from sfumato.algorithms.row_losses import value_loss
from sfumato.algorithms.sequences import Sequences
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompt_identity import identify_text_prompts
from sfumato.data.text.prompts import TextPrompt, TextPromptLoader
from sfumato.data.text.token_batch import TokenBatch
from sfumato.models.language.model import LanguageModel
from sfumato.models.policies import Policies
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import RankBatch, SampleRequest, requests_of
from sfumato.rollout.debug.dump_writer import RolloutDumps
from sfumato.rollout.oversampling.dynamic_sampling import dynamic_sampling, sampling_metrics
from sfumato.rollout.text.packing import (
    add_values,
    gather_token_values,
    gather_values,
    group_by_step,
    mark_rows,
    pack_update,
    subtract_penalties,
    token_counts,
)
from sfumato.rollout.text.policy import (
    TextGenerator,
    answer_held_out,
    beginnings_of,
    build_critic,
    build_teacher,
    build_text_policy,
    open_prompts,
    probe_policies,
    sum_over_ranks,
)
from sfumato.rollout.text.tokens import TextRollout
from sfumato.rollout.text.watched import answer_watched
from sfumato.runtime.decisions import rows_with_gradient
from sfumato.runtime.evaluate import control_of, evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles
from sfumato.runtime.states import Actor, Sampler
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import MicroBatch, Update
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.tracking.identity import Identity
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total", "tokens": "rollout/tokens_per_sample"}


def main(config: TextRLConfig) -> None:
    config.refuse_described_model()
    if config.model.made_by is not None:
        importlib.import_module("train_text").make_model(config.model)  # beside this file
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_text") as run:
        if run.report_if_complete():
            return
        template, train_prompts, eval_prompts = open_prompts(config, run.say)
        identity = identify_text_prompts(config, train_prompts, eval_prompts)  # refuses a resume with others
        builders = {
            "actor": partial(build_actor, prompts=train_prompts, eval_prompts=eval_prompts, identity=identity),
            "sampler": partial(build_sampler, prompts=train_prompts, eval_prompts=eval_prompts),
            "scorer": lambda config, mesh, run: build_scorer(config.reward),
        }
        loader = TextPromptLoader.from_config(train_prompts, config)
        rescoring = Rescoring(beginnings_of(train_prompts, template), config.rollout.tolerance)
        with launch_roles(config, run, **builders, rescoring=rescoring) as roles, roles.rescuing(Actor.save):
            train(config, run, roles, loader)
        if changes := run.changes("eval/reward/"):
            run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
        run.say(f"trained weights: {config.train.output_dir}/hf_ckpt   report: {config.train.output_dir}/report.html")
        run.finish()


def train(config: TextRLConfig, run: Run, roles: Roles, loader: TextPromptLoader) -> None:
    """The training loop: takes samples with rewards, computes advantages, updates; logs, evaluates and saves."""
    combiner = build_scorer(config.reward, with_engines=False)  # totals need what all ranks scored
    start = roles.actor.call(Actor.resume, kind="load").result()
    run.begin(cast(int, config.train.max_steps), start, config.train.trackers)
    stream = RolloutStream.from_config(
        config,
        roles,
        run.say,
        requests=partial(requests_of, loader),
        generate=generate,
        score=partial(Scorer.score, objective_only=True),  # the others are left to the evaluation
        more_groups=dynamic_sampling(config, loader, config.rollout.max_extra_groups),
    )
    if start == 0:
        run.log(0, evaluate(roles, run, answer_held_out, config, step=0, stream=stream), show=SHOWN)
        run.write_report()
    control = control_of(run, roles, config, answer_held_out, answer_watched, stream)

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
                update_policy, batch.rank_batches, advantages, config, step, kind="update"
            ).result()
        flops = {part: metrics.pop(f"flops/{part}") * batch.fraction_driven for part in ("generate", "update")}
        run.count(tokens=metrics["rollout/tokens"] * batch.fraction_driven, flops=flops)
        stream.publish(version=step + 1)

        metrics = scores.metrics("") | batch.staleness(step) | metrics
        metrics |= sampling_metrics(batch.group_ids, config.rollout.num_prompts)
        last = step + 1 == config.train.max_steps
        evaluating = last or (step + 1) % config.eval.every_steps == 0
        if evaluating:
            metrics |= evaluate(
                roles, run, answer_held_out, config, step + 1, batch.rank_batches, scores, advantages, stream
            )
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
    config: TextRLConfig,
    mesh: Mesh,
    run: Run,
    *,
    prompts: list[TextPrompt],
    eval_prompts: list[TextPrompt],
    identity: Identity,
) -> Actor[LanguageModel]:
    """Loads the policy, its optimiser, its averaged weights, and the policies that it is compared with."""
    assert config.train.max_steps is not None
    model, flops = build_text_policy(config)
    # a sampler that lags behind draws with the weights before the last update
    keep_previous = config.rollout.staleness > 0
    policies = Policies(
        model, config.algorithm.other_policies, keep_previous=keep_previous, reference=build_teacher(config, model)
    )
    policies.parallelize(mesh, config.train)
    probe_policies(config, policies, run.say)
    optimizer, schedule = build_optimizer(model.trained, config.train, config.train.max_steps, mesh)
    ema = Ema(model.trained, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    critic = build_critic(config, mesh, run.say)
    engine = TextGenerator(config, mesh, model, flops)
    dumps = RolloutDumps(config, mesh, run.say, model.tokenizer)
    saved = {"policies": policies.saved, "identity": identity, "balancer": model.balancer, "loader": engine.unfinished}
    saved |= {"critic": critic.state} if critic is not None else {}
    state = TrainState(model.trained, optimizer, schedule, ema, policies.frozen_weights, **saved)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    offload = config.runtime.offload_idle
    return Actor(model, mesh, prompts, eval_prompts, policies, state, checkpointer, offload, engine, critic, dumps)


def build_sampler(config: TextRLConfig, mesh: Mesh, run: Run, **prompts: list[TextPrompt]) -> Sampler[LanguageModel]:
    """Loads a model that only draws texts, or starts an engine with weights of its own."""
    model = None if config.rollout.engine.type != "embedded" else build_text_policy(config)[0]
    if model is not None:
        model.parallelize(mesh, config.runtime.sampler_train(config.train))
    engine = TextGenerator(config, mesh, model, served=model is None)
    offload = config.runtime.offload_idle
    return Sampler(cast(LanguageModel, model), mesh, offload_idle=offload, engine=engine, **prompts)  # pyright: ignore[reportArgumentType]


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, *unfinished: object
) -> tuple[TextRollout, list[Sample], *tuple[object, ...]]:
    """Draws the answers to all requests at the same time.

    With oversampling, the ``unfinished`` groups of the iteration before go on, and those that this one leaves are
    returned, too.
    """
    with sampler.policy():
        return sampler.engine.draw_requests(requests, sampler.prompts, iteration, version, *unfinished)


def update_policy(
    actor: Actor, rank_batch: RankBatch, advantages: Advantages, config: TextRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's answers. Returns means over the trained tokens of all ranks.

    A micro-batch is a packed row of T tokens, of which the loss mask holds those that the policy drew.
    """
    model = actor.model
    mesh = actor.mesh
    where = f"step {step + 1}"
    critic_metrics: dict[str, float] = {}
    update = Update(actor, rank_batch, advantages, config, step)
    mismatch = Mismatch()
    update.pending.append(mismatch.numbers)
    packed = pack_update(update.batch, update.passes, config, model)  # once, for the passes of all models
    packed = add_log_probs(packed, update)
    packed = add_advantages(packed, update)
    dump_update(packed, update)
    for micro_batches, batches in zip(update.optimizer_steps(), group_by_step(packed, update.passes), strict=True):
        for micro, batch in zip(micro_batches, map(model.place_batch, batches), strict=True):
            scores = model(batch)
            log_probs, entropy = scores.log_probs_and_entropy(batch.labels, config.rollout.temperature)  # [1, T]
            loss = policy_loss(log_probs, entropy, batch, micro, update, mismatch)
            loss.backward()
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, where, *update.pending)
        if actor.critic is not None:
            loss_fn = partial(critic_loss, clip_range=config.algorithm.value_clip_range)
            critic_metrics = actor.critic.update(batches, loss_fn, step)
        actor.step()
        model.balance_experts()
        update.grad_norms.append(grad_norm)
    actor.end_update(step + 1)
    metrics = mismatch_metrics(mesh.sum_dict(mismatch.sums, over="loss"), mesh.max(mismatch.largest, over="loss"))
    metrics |= token_counts(update.batch, actor.engine.flops, len(config.algorithm.other_policies), mesh)
    metrics |= critic_metrics | actor.engine.store_unfinished(rank_batch.unfinished) | update.advantages.metrics
    return update.metrics(metrics)


def policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    batch: TokenBatch,
    micro: MicroBatch,
    update: Update,
    mismatch: Mismatch,
) -> torch.Tensor:
    """A micro-batch's part of the loss, from ``log p`` and entropy of its tokens, ``[1, T]`` with gradients."""
    model = update.actor.model
    algorithm = cast(TextRLConfig, update.config).algorithm
    assert batch.rollout_log_probs is not None and batch.sample_index is not None
    assert batch.advantages is not None and batch.loss_weights is not None
    # [1, T] becomes [T]: a packed batch is one row
    log_probs = log_probs.flatten()
    entropy = entropy.flatten()
    mask = batch.loss_mask.flatten()
    rollout_log_probs = batch.rollout_log_probs.flatten()
    sequences = Sequences(batch.sample_index.flatten(), len(batch.sample_ids), model.sum_for_rows)

    # in an update of a single optimiser step the policy is the proximal one itself
    proximal = log_probs.detach() if batch.proximal_log_probs is None else batch.proximal_log_probs.flatten()
    correction = algorithm.off_policy.correct(proximal - rollout_log_probs, sequences, mask)
    old = proximal if algorithm.off_policy.uses_proximal else rollout_log_probs
    losses, sums = algorithm.objective.loss(log_probs - old, batch.advantages.flatten(), mask, sequences)
    if update.decisions.is_wanted and micro.is_counted:
        note_decisions(update, batch, log_probs - old, mask, sequences)
    losses = losses * correction.weights
    if algorithm.kl.coef > 0:
        assert batch.reference_log_probs is not None
        penalty = algorithm.kl.penalty(log_probs, batch.reference_log_probs.flatten(), log_probs - old)
        losses = losses if algorithm.kl_in_reward else losses + algorithm.kl.coef * penalty
        sums["kl/reference"] = torch.where(mask, penalty.detach(), 0).sum()
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * entropy
    micro.note(losses)

    if not batch.is_placeholder:
        mismatch.add(proximal - rollout_log_probs, correction, mask=mask)
    sums |= {"loss/policy": torch.where(mask, losses.detach(), 0).sum(), "entropy": entropy.detach().sum()}
    # ranks that share a sequence have parts of its tokens, and must record the same sums
    whole_sums = model.sum_over_sequence(torch.stack([value.double() for value in sums.values()]))
    update.record(micro, dict(zip(sums, whole_sums, strict=True)))
    return (losses * batch.loss_weights.flatten()).sum()


def note_decisions(
    update: Update, batch: TokenBatch, log_ratio: torch.Tensor, mask: torch.Tensor, sequences: Sequences
) -> None:
    """Notes the log-ratios ``[T]`` of the tokens that the policy drew, since samples are saved after the update."""
    assert batch.advantages is not None and batch.sample_index is not None
    if update.actor.mesh.size != update.actor.mesh.data_size:
        return  # ranks may have parts of a sequence each
    advantages = batch.advantages.flatten()
    objective = cast(TextRLConfig, update.config).algorithm.objective
    has_gradient = rows_with_gradient(
        lambda values: objective.loss(values, advantages, mask, sequences)[0], log_ratio, advantages
    )
    # other tokens belong to no sample: choosing by a mask here would wait for the device
    samples = torch.where(mask, batch.sample_index.flatten(), -1)
    update.decisions.add(batch.sample_ids, samples, log_ratio, has_gradient)


def critic_loss(values: torch.Tensor, batch: TokenBatch, clip_range: float | None) -> torch.Tensor:
    """A micro-batch's part of the critic's loss, from its values ``[1, T]``, each of the text up to a token."""
    assert batch.values is not None and batch.returns is not None and batch.loss_weights is not None
    old_values = batch.values.flatten()
    returns = batch.returns.flatten()
    mask = batch.loss_mask.flatten()
    losses, _ = value_loss(values.flatten(), old_values, returns, mask, clip_range)
    return (losses * batch.loss_weights.flatten()).sum()


def add_log_probs(batches: list[TokenBatch], update: Update) -> list[TokenBatch]:
    """Micro-batches with values of their tokens by other models, as far as the algorithm needs them.

    These are log-probabilities by the reference and by the policy at the start of the update, and values by the critic.
    """
    config = cast(TextRLConfig, update.config)
    actor = update.actor
    algorithm = config.algorithm
    temperature = config.rollout.temperature
    if algorithm.kl.coef > 0:
        with actor.policies.active("reference") as reference:
            log_probs = reference.token_log_probs(batches, temperature=temperature)
        batches = add_values(batches, reference_log_probs=log_probs)
    if len(update.passes) > 1 or algorithm.kl_in_reward:  # else the trained policy has them itself
        log_probs = actor.model.token_log_probs(batches, temperature=temperature)
        batches = add_values(batches, proximal_log_probs=log_probs)
    if actor.critic is not None:
        batches = add_values(batches, values=actor.critic.values(batches))
    return batches


def add_advantages(batches: list[TokenBatch], update: Update) -> list[TokenBatch]:
    """Micro-batches with the advantage of each token that the policy drew, and its return, which a critic learns.

    With ``kl_before_baseline`` the samples' advantages in ``update`` are replaced by those less the penalties.
    """
    config = cast(TextRLConfig, update.config)
    algorithm = config.algorithm
    mesh = update.actor.mesh
    rollout = update.batch
    penalties = None
    sequences = Sequences.of_lengths(torch.tensor(rollout.num_rows))
    trained = sequences.spread(mark_rows([part for passes in update.passes for part in passes.parts], len(rollout)))
    if algorithm.kl_in_reward:
        proximal = gather_values(batches, "proximal_log_probs", rollout)  # float32 [R], of all tokens that were drawn
        penalties = algorithm.kl.penalty(proximal, gather_values(batches, "reference_log_probs", rollout))
        penalties = penalties * algorithm.kl.coef
    if algorithm.kl_before_baseline:
        assert penalties is not None
        update.advantages = subtract_penalties(update.advantages, rollout, penalties, sequences, trained, config, mesh)
        penalties = None  # they are in the rewards now
    values = None if update.actor.critic is None else gather_values(batches, "values", rollout)
    tokens = algorithm.token_advantage.compute(
        update.advantages.values, sequences, trained, penalties, values, sum_over_ranks(mesh)
    )
    return add_values(
        batches,
        advantages=[batch.scatter_to_labels(tokens.values) for batch in batches],
        returns=[batch.scatter_to_labels(tokens.returns) for batch in batches],
    )


def dump_update(batches: list[TokenBatch], update: Update) -> None:
    """Writes the iteration's answers with the values of their tokens, where the run asks for it."""
    dumps = update.actor.dumps
    rollout = update.batch
    token_values = gather_token_values(batches, rollout) if dumps.needs_token_values else {}
    dumps.write(rollout, update.advantages, token_values, update.step + 1)


if __name__ == "__main__":
    run_task(main, TextRLConfig)
