"""Reinforcement learning of language models: GRPO and its relatives.

    bash train.sh tasks/rl_text.py configs/quickstart/text_rl.yaml --train.max_steps 6

Each iteration draws groups of answers to prompts, scores them, turns rewards into advantages within groups, and learns
from them: the drawn tokens go through the model once more, with gradients, and their probability now is compared with
the one when they were drawn. All parts of the algorithm are chosen in the configuration; their formulas stand in
``sfumato/algorithms``. Where actor, sampler and scorer live is the configuration's matter, too: the functions below run
where the role is that they are given to.
"""

from __future__ import annotations

from functools import partial

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.aggregation import row_weights
from sfumato.algorithms.off_policy import Mismatch, mismatch_metrics
from sfumato.algorithms.sequences import Sequences
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.identity import Identity
from sfumato.checkpoint.state import TrainState
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.identity import identify_text_prompts
from sfumato.data.packing import TextBatch
from sfumato.data.prompt_template import build_prompt_template
from sfumato.data.text_prompts import TextPrompt, TextPromptLoader, check_text_prompts, load_text_prompts
from sfumato.models.flops import FlopCount
from sfumato.models.language import LanguageModel, Tensors
from sfumato.models.language_load import build_tokenizer
from sfumato.models.policies import Policies
from sfumato.models.probe import probe
from sfumato.models.scores import TokenScores
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import check_finite, reduce_and_clip
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import Drawn, Part, SampleRequest, requests_of
from sfumato.rollout.text_policy import TextEngine, build_text_policy, sampling_of, summed
from sfumato.rollout.text_rows import drawn_log_probs, log_probs_of_decisions, pack_samples, token_counts
from sfumato.rollout.tokens import TextRollout
from sfumato.rollout.turns import SampleKeys
from sfumato.runtime.evaluate import evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles
from sfumato.runtime.states import Actor, Sampler
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import MicroBatch, Update
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task

SHOWN = {"reward": "reward/total", "eval": "eval/reward/total", "tokens": "rollout/tokens_per_sample"}


def main(config: TextRLConfig) -> None:
    mesh = main_mesh(config)
    with start_run(config, mesh, "rl_text") as run:
        template = build_prompt_template(config.data, build_tokenizer(config.model))
        config.rollout.kind.prepare(template)
        load = partial(
            load_text_prompts, config.data, template, seed=config.train.seed, tools=config.rollout.kind.tools()
        )
        train_prompts, eval_prompts = load("train", log=run.say), load("eval", limit=config.eval.num_prompts)
        check_text_prompts(train_prompts + eval_prompts, [reward.check_row for reward in config.reward.rewards])
        identity = identify_text_prompts(config, train_prompts, eval_prompts)  # refuses a resume with others
        builders = {
            "actor": partial(build_actor, prompts=train_prompts, eval_prompts=eval_prompts, identity=identity),
            "sampler": partial(build_sampler, prompts=train_prompts),
            "scorer": lambda config, mesh, run: build_scorer(config.reward),
        }
        sizes = config.rollout.num_prompts, config.rollout.n
        loader = TextPromptLoader(train_prompts, *sizes, config.train.seed, config.data.curriculum)
        with launch_roles(config, run, **builders) as roles, roles.rescuing(Actor.save):
            train(config, run, roles, loader)
        run.say(f"trained weights: {config.train.output_dir}/hf_ckpt")
        if changes := run.changes("eval/reward/"):
            run.say(f"mean reward on {len(eval_prompts)} held-out prompts, before and after: {changes}")
        run.say(f"report: {config.train.output_dir}/report.html")
        run.finish()


def train(config: TextRLConfig, run: Run, roles: Roles, loader: TextPromptLoader) -> None:
    """The loop: samples with rewards, advantages, an update, and what is logged, evaluated and saved."""
    combiner = build_scorer(config.reward, with_engines=False)  # totals need what all ranks scored
    start = roles.actor.call(Actor.resume, kind="load").result()
    run.begin(config.train.max_steps, start, config.train.trackers)
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
            metrics = roles.actor.map(update_policy, batch.parts, advantages, config, step, kind="update").result()
        flops = {part: metrics.pop(f"flops/{part}") * batch.fraction_driven for part in ("generate", "update")}
        run.count(tokens=metrics["rollout/tokens"] * batch.fraction_driven, flops=flops)
        stream.publish(version=step + 1)

        metrics |= scores.metrics("") | advantages.metrics | batch.staleness(step)
        last = step + 1 == config.train.max_steps
        evaluating = last or (step + 1) % config.eval.every_steps == 0
        if evaluating:
            metrics |= evaluate(roles, run, draw_evaluation, config, step + 1, batch.parts, scores, advantages)
        del batch  # memory for the next one
        run.add_events(roles.driver.record.take(), roles.driver.take_timings())
        run.log(step + 1, metrics, show=SHOWN)
        if evaluating:
            run.say_signs_of_hacking()
            run.write_report(if_cheap=not last)
        roles.actor.call(Actor.after_step, run.sync(), kind="save").result()
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
    """Loads the policy with its optimiser and its average, and the policies that it is compared with."""
    model = build_text_policy(config)
    flops = FlopCount(model.module)
    policies = Policies(model, config.algorithm.other_policies, keep_previous=config.rollout.staleness > 0)
    policies.parallelize(mesh, config.train)
    probe(model, config.model, config.train, config.max_seq_len, run.say)
    optimizer, schedule = build_optimizer(model.trained, config.train, config.train.max_steps, mesh)
    ema = Ema(model.trained, config.train.ema_decay, config.train.ema_interval) if config.train.ema_decay else None
    others = {"policies": policies.saved, "identity": identity, "balancer": model.balancer}
    state = TrainState(model.trained, optimizer, schedule, ema, policies.frozen_weights, **others)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    engine = TextEngine(config, build_prompt_template(config.data, model.tokenizer), model, flops)
    idle = config.runtime.offload_idle
    return Actor(model, mesh, prompts, eval_prompts, policies, state, checkpointer, idle, engine)


def build_sampler(config: TextRLConfig, mesh: Mesh, run: Run, *, prompts: list[TextPrompt]) -> Sampler[LanguageModel]:
    """Loads a model that draws texts only."""
    model = build_text_policy(config)
    model.parallelize(mesh, config.runtime.sampler_train(config.train))
    engine = TextEngine(config, build_prompt_template(config.data, model.tokenizer), model)
    return Sampler(model, mesh, prompts, config.runtime.offload_idle, engine)


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, config: TextRLConfig
) -> tuple[TextRollout, list[Sample]]:
    """Draws answers, all requests at the same time."""
    rollout = config.rollout
    prompts = [sampler.prompts[request.prompt_id] for request in requests]
    keys = [SampleKeys(config.train.seed, iteration, request.sample_id) for request in requests]
    sampling = sampling_of(sampler.engine.template, rollout.temperature, rollout.top_p, rollout.top_k)
    with sampler.policy():
        drawn = sampler.engine.draw(("rollout", version), version, prompts, keys, sampling, rollout.max_new_tokens)
    groups = [request.group_id for request in requests]
    samples = [each.sample(prompt, group) for each, prompt, group in zip(drawn, prompts, groups, strict=True)]
    sequences = [each.sequences for each in drawn]
    return TextRollout(requests=requests, versions=[version] * len(requests), sequences=sequences), samples


def update_policy(
    actor: Actor, part: Part, advantages: Advantages, config: TextRLConfig, step: int
) -> dict[str, float]:
    """Optimiser steps on one iteration's answers. Returns means over the trained tokens of all ranks."""
    model, mesh = actor.model, actor.mesh
    update, mismatch = Update(actor, part, advantages, config, step), Mismatch()
    update.batch = with_advantages(actor, update, advantages, config)
    for micro_batches in update.optimizer_steps():
        micros = list(micro_batches)
        batches = [pack_samples(micro.samples, model, decisions_of(micro, config)) for micro in micros]
        micro_of = {id(batch): micro for batch, micro in zip(batches, micros, strict=True)}
        loss_of = partial(policy_loss, micro_of=micro_of, model=model, config=config, update=update, mismatch=mismatch)
        model.forward_backward(batches, loss_of, step)
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, mesh, f"step {step + 1}")
        actor.step()
        model.balance_experts()
        update.grad_norms.append(grad_norm)
    actor.end_update(step + 1)
    found = mismatch_metrics(mesh.sum_dict(mismatch.sums, over="loss"), mesh.max(mismatch.largest, over="loss"))
    passes = len(config.algorithm.other_policies)
    return update.metrics(found | token_counts(update.batch, actor.engine.flops, passes, mesh))


def policy_loss(
    scores: TokenScores,
    row: Tensors,
    batch: TextBatch,
    micro_of: dict[int, MicroBatch],
    model: LanguageModel,
    config: TextRLConfig,
    update: Update,
    mismatch: Mismatch,
) -> torch.Tensor:
    """A micro-batch's part of the loss. R are the tokens of its packed row; the mask holds those that were drawn."""
    micro = micro_of[id(batch)]
    algorithm, row = config.algorithm, {name: tensor.flatten() for name, tensor in row.items()}
    mask, drawn = row["labels"] != IGNORED, row["rollout_log_probs"]
    log_probs, entropy = scores.log_probs_and_entropy(row["labels"][None], config.rollout.temperature)
    log_probs, entropy = log_probs.flatten(), entropy.flatten()
    sequences = Sequences(row["samples"], len(micro.samples), model.sum_for_rows)

    proximal = row.get("proximal_log_probs", log_probs.detach())  # the policy at the start of this update
    correction = algorithm.off_policy.correct(proximal - drawn, sequences, mask)
    old = proximal if algorithm.off_policy.uses_proximal else drawn
    losses, sums = algorithm.objective.loss(log_probs - old, row["advantages"], mask, sequences)
    losses = losses * correction.weights
    if "reference_log_probs" in row and algorithm.kl.where == "loss":
        penalty = algorithm.kl.penalty(log_probs, row["reference_log_probs"], log_probs - old)
        losses = losses + algorithm.kl.coef * penalty
    if algorithm.entropy_coef:
        losses = losses - algorithm.entropy_coef * entropy
    check_finite(losses, micro.where)

    if micro.is_counted:
        mismatch.add(proximal - drawn, correction, mask=mask)
    sums |= {"loss/policy": losses.detach()[mask].sum(), "entropy": entropy.detach().sum()}
    together = model.sum_over_sequence(torch.stack([each.double() for each in sums.values()]))
    update.record(micro, dict(zip(sums, together, strict=True)))
    return (losses * row["weights"]).sum()


def with_advantages(actor: Actor, update: Update, advantages: Advantages, config: TextRLConfig) -> TextRollout:
    """The samples with what must be known of each drawn token before the first optimiser step, float32 ``[R]``."""
    algorithm, rollout, temperature = config.algorithm, update.batch, config.rollout.temperature
    parts = [part for passes in update.passes for part in passes.parts]
    known = {"rollout_log_probs": drawn_log_probs(rollout)}
    if "reference" in algorithm.other_policies:
        with actor.policies.active("reference") as reference:
            known["reference_log_probs"] = log_probs_of_decisions(reference, rollout, parts, temperature)
    in_reward = algorithm.kl.coef > 0 and algorithm.kl.where == "reward"
    if len(update.passes) > 1 or in_reward:  # in a single optimiser step the policy says so itself
        known["proximal_log_probs"] = log_probs_of_decisions(actor.model, rollout, parts, temperature)
    penalties = None
    if in_reward:
        penalty = algorithm.kl.penalty(known["proximal_log_probs"], known["reference_log_probs"])
        penalties = algorithm.kl.coef * penalty
    sequences = Sequences.of_lengths(torch.tensor(rollout.num_rows))
    trained = torch.zeros(len(rollout)).index_fill(0, torch.cat(parts), 1.0) > 0
    known["advantages"] = algorithm.token_advantage.compute(
        update.advantages.values, sequences, sequences.spread(trained), penalties, reduce=summed(actor.mesh)
    ).values
    return rollout.with_fields(**known)


def decisions_of(micro: MicroBatch, config: TextRLConfig) -> Tensors:
    """Values ``[R]`` of a micro-batch's drawn tokens, among them their weights in the loss of the optimiser step."""
    rollout, lengths = micro.samples, torch.tensor(micro.samples.num_rows)
    weights = row_weights(
        config.algorithm.aggregation,
        lengths.repeat_interleave(lengths),
        micro.rows_in_step,
        micro.samples_in_step,
        config.rollout.max_new_tokens,
    )
    known = {name: rollout.field(name) for name in rollout.fields[0]}
    return known | {"weights": weights * micro.is_counted}


def draw_evaluation(actor: Actor, rows: list[int], config: TextRLConfig) -> tuple[list[Sample], Drawn]:
    """An answer to each held-out prompt, from the averaged weights; how long they are."""
    prompts = [actor.eval_prompts[row] for row in rows]
    keys = [SampleKeys(config.eval.seed, 0, row, "evaluation") for row in rows]
    sampling = sampling_of(actor.engine.template, config.eval.temperature)
    longest = config.eval.max_new_tokens or config.rollout.max_new_tokens
    with actor.evaluated():
        drawn = actor.engine.draw(("evaluation", actor.state.step), actor.state.step, prompts, keys, sampling, longest)
    samples = [each.sample(prompt, row) for each, prompt, row in zip(drawn, prompts, rows, strict=True)]
    return samples, Drawn({"eval/tokens": [float(each.num_tokens) for each in drawn]})


if __name__ == "__main__":
    run_task(main, TextRLConfig)
