"""Reinforcement learning of a policy over integers: bash train.sh tests/toy_modality/task.py CONFIG.yaml"""

from __future__ import annotations

from functools import partial

import torch

from sfumato.algorithms.advantages import Advantages
from sfumato.algorithms.decay import FROZEN
from sfumato.algorithms.objectives import Ratio
from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.state import TrainState
from sfumato.data.images.identity import identify_prompts
from sfumato.data.images.prompts import Prompt, load_prompts
from sfumato.data.prompt_loader import PromptLoader
from sfumato.models.policies import Policies
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, build_scorer
from sfumato.rollout.batch import EvalStats, RankBatch, SampleRequest, requests_of
from sfumato.runtime.evaluate import evaluate
from sfumato.runtime.launch import launch_roles, main_mesh
from sfumato.runtime.roles import Roles
from sfumato.runtime.states import Actor, Sampler
from sfumato.runtime.stream import RolloutStream
from sfumato.runtime.update import Update
from sfumato.tracking.identity import Identity
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import run_task
from tests.toy_modality.integers import IntegerModel, IntegerRLConfig, Sequences, draw, replay

Config = IntegerRLConfig


def main(config: IntegerRLConfig) -> None:
    with start_run(config, main_mesh(config), "integers") as run:
        prompts, held_out = load_prompts(config.data, "train"), load_prompts(config.data, "eval")
        identity = identify_prompts(config, prompts, held_out)
        loader = PromptLoader(len(prompts), config.rollout.num_prompts, config.rollout.n, config.train.seed)
        builders = {
            "actor": partial(build_actor, prompts=prompts, held_out=held_out, identity=identity),
            "sampler": partial(build_sampler, prompts=prompts),
            "scorer": lambda config, mesh, run: build_scorer(config.reward),
        }
        with launch_roles(config, run, **builders) as roles, roles.rescuing(Actor.save):
            train(config, run, roles, loader)
        run.finish()


def train(config: Config, run: Run, roles: Roles, loader: PromptLoader) -> None:
    combiner = build_scorer(config.reward, with_engines=False)
    start = roles.actor.call(Actor.resume).result()
    run.begin(config.train.max_steps, start, config.train.trackers)
    functions = {"generate": partial(generate, config=config), "score": Scorer.score}
    stream = RolloutStream.from_config(config, roles, run.say, requests=partial(requests_of, loader), **functions)
    for step, batch in run.steps(stream.steps(from_step=start)):
        scores = combiner.finish(batch.scores, batch.group_ids)
        advantages = config.algorithm.advantage.compute(torch.tensor(scores.total), torch.tensor(batch.group_ids))
        metrics = roles.actor.map(update_policy, batch.rank_batches, advantages, config, step).result()
        stream.publish(version=step + 1)
        metrics |= scores.metrics("") | advantages.metrics | batch.staleness(step)
        if (step + 1) % config.eval.every_steps == 0:
            metrics |= evaluate(roles, run, draw_evaluation, config, step + 1, batch.rank_batches, scores, advantages)
        run.log(step + 1, metrics, show={"reward": "reward/total"})
        roles.actor.call(Actor.after_step, run.sync()).result()
    roles.actor.call(Actor.export, config).result()
    roles.scorer.call(Scorer.close).result()
    run.write_report()


def build_actor(
    config: Config, mesh: Mesh, run: Run, *, prompts: list[Prompt], held_out: list[Prompt], identity: Identity
) -> Actor[IntegerModel]:
    model = IntegerModel(config.model, mesh.device, config.train.seed)
    policies = Policies(model, {"reference": FROZEN}, keep_previous=config.rollout.staleness > 0)
    policies.parallelize(mesh, config.train)
    optimizer, schedule = build_optimizer(model.trained, config.train, config.train.max_steps)
    others = {"reference": policies.frozen_weights, "policies": policies.saved, "identity": identity}
    state = TrainState(model.trained, optimizer, schedule, **others)
    checkpointer = Checkpointer(config.train, run, mesh, config.train.max_steps)
    return Actor(model, mesh, prompts, held_out, policies, state, checkpointer, config.runtime.offload_idle)


def build_sampler(config: Config, mesh: Mesh, run: Run, *, prompts: list[Prompt]) -> Sampler[IntegerModel]:
    model = IntegerModel(config.model, mesh.device, config.train.seed)
    model.parallelize(mesh, config.runtime.sampler_train(config.train))
    return Sampler(model, mesh, prompts, config.runtime.offload_idle)


def generate(
    sampler: Sampler | Actor, requests: list[SampleRequest], iteration: int, version: int, config: Config
) -> tuple[Sequences, list[Sample]]:
    prompts = [sampler.prompts[request.prompt_id] for request in requests]
    groups, ids = [request.group_id for request in requests], [request.sample_id for request in requests]
    with sampler.policy() as model:
        integers, log_probs = draw(model, prompts, config.model.length, config.train.seed, iteration, ids)
    drawn = {"integers": integers, "log_probs": log_probs, "versions": [version] * len(requests)}
    return Sequences(requests=requests, **drawn), samples_of(prompts, groups, integers)


def samples_of(prompts: list[Prompt], groups: list[int], integers: torch.Tensor) -> list[Sample]:
    texts = [" ".join(map(str, sequence[1:])) for sequence in integers.tolist()]
    return [
        Sample(text=text, prompt=prompt.text, metadata=prompt.metadata, group_id=group)
        for text, prompt, group in zip(texts, prompts, groups, strict=True)
    ]


def update_policy(
    actor: Actor, rank_batch: RankBatch, advantages: Advantages, config: Config, step: int
) -> dict[str, float]:
    algorithm, model = config.algorithm, actor.model
    update = Update(actor, rank_batch, advantages, config, step)
    for micro_batches in update.optimizer_steps():
        for micro in micro_batches:
            log_probs = replay(model, micro.samples)
            log_ratio = log_probs - micro.samples.log_probs.flatten()
            losses, sums = algorithm.objective.loss(Ratio(log_ratio), micro.advantages)
            if algorithm.kl_coef > 0:
                with torch.no_grad(), actor.policies.active("reference") as reference:
                    of_reference = replay(reference, micro.samples)
                penalty = torch.expm1(of_reference - log_probs) - (of_reference - log_probs)
                losses = losses + algorithm.kl_coef * penalty
            micro.mean(losses).backward()
            update.record(micro, sums)
        where = f"step {step + 1}"
        grad_norm = reduce_and_clip(model.trained, config.train.max_grad_norm, actor.mesh, where, *update.pending)
        actor.step()
        update.grad_norms.append(grad_norm)
    actor.end_update(step + 1)
    return update.metrics()


def draw_evaluation(actor: Actor, rows: list[int], config: Config) -> tuple[list[Sample], EvalStats]:
    prompts = [actor.eval_prompts[row] for row in rows]
    with actor.evaluated() as model:
        integers, log_probs = draw(model, prompts, config.model.length, config.eval.seed, 0, rows)
    return samples_of(prompts, rows, integers), EvalStats({"eval/log_prob": log_probs.mean(dim=1).tolist()})


if __name__ == "__main__":
    run_task(main, IntegerRLConfig)
