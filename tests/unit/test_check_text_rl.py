"""Predicted memory of RL of language models, against what a run of a tiny model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sfumato.commands.check_model import build_planned_model, check_model
from sfumato.commands.check_text_rl import add_previous, drawn_at_a_time
from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.models.estimate.kv_memory import COPY, KEYS_AND_VALUES, cached_bytes_per_token, drawing_bytes
from sfumato.models.estimate.memory_plan import RankMemory, count_activations
from sfumato.models.language.scores import TokenScores
from sfumato.parallel.layout import Layout
from tests.tiny import load_task, run_task_here, tiny_text_rl_config
from tests.unit.test_flops import KINDS
from tests.unit.test_memory_plan import LENGTH, Saved, real

PPO = {
    "algorithm": {"recipe": "ppo"},
    "data": {"max_prompt_tokens": 24},
    "train": {"max_steps": 1, "global_batch_size": 16, "chunked_loss": True},
}


def test_a_critic_and_the_engine_take_what_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_text_rl_config(tmp_path, **PPO)
    result = check_model(load_config(TextRLConfig, overrides=settings), Layout(), on_gpu=False, limit=None).largest
    task, seen = load_task("rl_text"), []
    update = task.update_policy

    def update_policy(actor: Any, *args: Any) -> dict[str, float]:
        cache = actor.engine._policy._engine._rows._cache
        seen.append((actor, sum(tensor.nbytes for layer in cache.layers for tensor in layer._allocated_tensors())))
        return update(actor, *args)

    monkeypatch.setattr(task, "update_policy", update_policy)
    run_task_here(task, settings)
    ((actor, cache_bytes),) = seen

    def held(module: Any, optimizer: Any) -> tuple[int, int]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return sum(parameter.nbytes for parameter in module.parameters()), sum(state.nbytes for state in states)

    policy, state = held(actor.model.module, actor.state.optimizer)
    critic, its_state = held(actor.critic.state.module, actor.critic.state.optimizer)
    assert (result.parts["optimiser state"], result.parts["critic: optimiser state"]) == (state, its_state)
    assert (result.parts["gradients"], result.parts["critic: gradients"]) == (policy, critic)
    assert result.parts["weights"] == pytest.approx(policy, rel=0.01)  # buffers are part of it
    assert result.parts["critic: weights"] == pytest.approx(critic, rel=0.01)
    assert result.parts[KEYS_AND_VALUES] == cache_bytes  # which the engine keeps during the update
    assert COPY not in result.parts  # a single rank draws by the weights that it trains


@pytest.mark.parametrize("chunked", [False, True])
def test_entropies_are_part_of_what_waits_for_the_backward_pass(chunked: bool, tmp_path: Path) -> None:
    description = tmp_path / "described.yaml"
    description.write_text(yaml.safe_dump({"model_type": "qwen3", **KINDS["qwen3"]}))
    model = {"config_path": str(description), "tokenizer_path": "bytes"}
    settings = tiny_text_rl_config(tmp_path, rollout={"max_new_tokens": LENGTH // 2})
    settings |= {"model": model, "data": {**settings["data"], "max_prompt_tokens": LENGTH // 2}}
    settings["train"] |= {"micro_batch_size": 1, "chunked_loss": chunked, "mixed_precision": "no"}
    config = load_config(TextRLConfig, overrides=settings)
    activations = count_activations(build_planned_model(config, Layout(), on_gpu=False), config.train, Layout())
    module = real("qwen3")
    saved, ids, head = Saved(module), torch.zeros(1, LENGTH, dtype=torch.int64), module.get_output_embeddings()
    if chunked:
        head.forward = lambda hidden: hidden
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
        output = module(input_ids=ids, position_ids=torch.arange(LENGTH)[None], use_cache=False).logits
        TokenScores(output, (1, LENGTH), head=head if chunked else None).log_probs_and_entropy(ids)
    assert activations.before + activations.after + activations.copies + sum(
        activations.bytes_by_block("none")
    ) == pytest.approx(saved.total, rel=0.1)


def test_keys_and_values_are_those_of_transformers_cache(tmp_path: Path) -> None:
    for kind in ("llama", "qwen3_moe", "deepseek_v3"):
        description = tmp_path / f"{kind}.yaml"
        description.write_text(yaml.safe_dump({"model_type": kind, **KINDS[kind]}))
        settings = tiny_text_rl_config(tmp_path) | {
            "model": {"config_path": str(description), "tokenizer_path": "bytes"}
        }
        config = load_config(TextRLConfig, overrides=settings)
        module = real(kind)
        with torch.no_grad():
            cache = module(input_ids=torch.zeros(1, 5, dtype=torch.int64), use_cache=True).past_key_values
        expected = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 5
        assert cached_bytes_per_token(build_planned_model(config, Layout(), on_gpu=False)) == expected, kind


def test_what_an_actor_draws_follows_from_where_the_sampler_is(tmp_path: Path) -> None:
    """With a sampler of its own it evaluates alone; where weights are cut it has a copy of the whole model."""
    rollout_settings = {"engine": {"type": "embedded", "cache_gb": 1e-5}, "hybrid_engine": False}
    settings = {"data": {"max_prompt_tokens": 24}, "eval": {"num_prompts": 6, "max_new_tokens": 20}}
    apart = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, rollout=rollout_settings, **settings))
    two = Layout(dp_shard=2)
    drawn = drawn_at_a_time(apart, two)
    assert (drawn.num_sequences, drawn.length) == (3, 44)
    more = {"over_sampling_batch_size": 6, "engine": {"type": "embedded", "max_batch_size": 20}}
    together = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, rollout=more, **settings))
    assert [drawn_at_a_time(together, layout).num_sequences for layout in (Layout(), two)] == [20, 12]
    memory, late = RankMemory({"gradients": 12}), {"rollout": {**rollout_settings, "async_strategy": "one-step-off"}}
    add_previous(memory, apart)
    assert list(memory.parts) == ["gradients"]
    add_previous(memory, load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, **late)))
    assert memory.parts["policy before the last update"] == 12
    planned = build_planned_model(apart, two, on_gpu=False)
    result = drawing_bytes(planned, drawn, two, "fsdp2")
    assert result[COPY] == sum(parameter.nbytes for parameter in planned.build().parameters()) + sum(
        buffer.nbytes for buffer in planned.build().buffers()
    )
    assert result[KEYS_AND_VALUES] == int(1e-5 * 2**30)  # the setting bounds them
    assert COPY not in drawing_bytes(planned, drawn, two, "ddp")
