"""The critic: values, updates of its own, and a state that goes on to the bit beside the policy's."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from sfumato.algorithms.row_losses import value_loss
from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.config.critic import CriticConfig
from sfumato.config.load import load_config
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.errors import CheckpointError, ConfigError, NonFiniteError
from sfumato.models.language.critic import Critic
from sfumato.models.language.load import build_language_model
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.tiny import tiny_language_description
from tests.token_batches import batch, samples

ALONE = Mesh(Layout(), torch.device("cpu"))
NUM_UPDATES = 4


def make(tmp_path, critic=True, **settings):
    """A policy and, perhaps, its critic in one state."""
    path = tmp_path / "qwen3.yaml"
    path.write_text(yaml.safe_dump(tiny_language_description()))
    overrides = {"output_dir": "unused", "num_threads": 1, "lr_decay_style": "linear", "chunked_loss": True, "seed": 3}
    train = load_config(TextTrainConfig, overrides=overrides)
    model = LanguageModelConfig(config_path=str(path), tokenizer_path="bytes")
    policy = build_language_model(model, train)
    policy.parallelize(ALONE, train)
    optimizer, schedule = build_optimizer(policy.trained, train, NUM_UPDATES, ALONE)
    state = TrainState(policy.trained, optimizer, schedule)
    if not critic:
        return state, None
    config = CriticConfig(**{"lr": 3e-3, "head": "random", **settings})
    critic = Critic(config, model, train, ALONE, NUM_UPDATES, max_seq_len=64, say=print)
    state.critic = critic.state
    return state, critic


def micro_batches():
    """Two micro-batches with returns: whether the token is even."""
    batches = [batch(samples()[:4]), batch(samples()[4:])]
    return [replace(batch, returns=(batch.input_ids % 2).float()) for batch in batches]


def run(critic, num_updates, first=0):
    """The clipped loss over the loss masks, old values being those before each update."""
    batches = micro_batches()
    count = sum(micro_batch.num_labels for micro_batch in batches)
    metrics = []

    def loss(values, batch):
        old_values, returns, mask = batch.values.flatten(), batch.returns.flatten(), batch.loss_mask.flatten()
        losses, _ = value_loss(values.flatten(), old_values, returns, mask, 0.5)
        return losses.sum() / count

    for step in range(first, first + num_updates):
        old = critic.values(batches)
        with_values = [replace(batch, values=values) for batch, values in zip(batches, old, strict=True)]
        metrics.append(critic.update(with_values, loss, step))
    return metrics


def tensors(critic):
    results = {name: parameter.detach().clone() for name, parameter in critic.model.module.named_parameters()}
    for index, fields in critic.state.optimizer.state_dict()["state"].items():
        results |= {f"{index}/{name}": torch.as_tensor(value).clone() for name, value in fields.items()}
    return results


def save(state, root):
    saving = Saving(root, state, ALONE)
    saving.write()
    saving.finish(keep=1)
    return StoredCheckpoint(root / f"global_step_{state.step}")


def test_updates_are_those_of_adamw_on_the_clipped_loss(tmp_path):
    """Against the same steps in plain torch; the loss falls and the policy stays."""
    state, critic = make(tmp_path)
    policy = copy.deepcopy(state.model.state_dict())
    plain = critic.model.plain_with({name: weight.clone() for name, weight in critic.model.module.state_dict().items()})
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.0)
    metrics = run(critic, NUM_UPDATES)
    assert metrics[0]["critic/lr"] == 3e-3 and metrics[1]["critic/lr"] == pytest.approx(3e-3 * 3 / 4)
    assert metrics[-1]["critic/loss"] < 0.7 * metrics[0]["critic/loss"]
    assert all(torch.equal(value, policy[name]) for name, value in state.model.state_dict().items())
    batches = micro_batches()
    count = sum(micro_batch.num_labels for micro_batch in batches)
    loss = 0.0
    for micro_batch in batches:
        hidden = plain.model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids).last_hidden_state
        values = plain.score(hidden)[..., 0]
        loss = loss + (0.5 * (values - micro_batch.returns).square())[micro_batch.loss_mask].sum() / count
    loss.backward()
    assert metrics[0]["critic/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert metrics[0]["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    optimizer.step()
    _, once = make(tmp_path)
    run(once, 1)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(once.model.module.get_parameter(name), parameter, rtol=1e-3, atol=1e-5)


def test_going_on_from_a_checkpoint_changes_no_bit(tmp_path):
    _, undisturbed = make(tmp_path)
    expected = run(undisturbed, NUM_UPDATES)
    state, critic = make(tmp_path)
    begin = run(critic, 2)
    stored = save(state, tmp_path / "checkpoints")
    resumed_state, resumed = make(tmp_path, head="zero")
    load_state(resumed_state, stored, ALONE)
    assert begin + run(resumed, NUM_UPDATES - 2, first=2) == expected
    ours, theirs = tensors(resumed), tensors(undisturbed)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_with_a_critic_is_none_without(tmp_path):
    state, critic = make(tmp_path)
    run(critic, 1)
    alone, _ = make(tmp_path, critic=False)
    with pytest.raises(CheckpointError, match="has one critic, but this configuration wants none"):
        load_state(alone, save(state, tmp_path / "with"), ALONE)
    with pytest.raises(CheckpointError, match="has no critic, but this configuration wants one"):
        load_state(state, save(alone, tmp_path / "without"), ALONE)


def test_a_critic_may_begin_from_a_reward_model(tmp_path):
    _, critic = make(tmp_path)
    run(critic, 1)
    folder = tmp_path / "reward_model"
    folder.mkdir()
    critic.model.save_export(
        folder, {name: weight.clone() for name, weight in critic.model.module.state_dict().items()}
    )
    _, other = make(tmp_path, model_path=str(folder), lora={"rank": 2, "alpha": 4})
    batches = micro_batches()
    assert torch.equal(other.values(batches)[0], critic.values(batches)[0])
    before = other.values(batches)[0]
    run(other, 1)
    assert not torch.equal(other.values(batches)[0], before)


def test_a_critic_that_reads_other_tokens_than_the_policy_is_refused(tmp_path):
    """As many tokens, but in another order: values would be those of other texts."""
    _, critic = make(tmp_path)
    folder = tmp_path / "reward_model"
    folder.mkdir()
    critic.model.save_export(folder, dict(critic.model.module.state_dict()))
    saved = json.loads((folder / "tokenizer.json").read_text())
    first, second, *_ = vocabulary = saved["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"critic\.model_path .*: its tokenizer has other tokens than the policy's"):
        make(tmp_path, model_path=str(folder))


def test_a_critic_with_fewer_positions_than_a_sample_has_tokens_is_refused(tmp_path):
    _, critic = make(tmp_path)
    folder = tmp_path / "reward_model"
    folder.mkdir()
    critic.model.save_export(folder, dict(critic.model.module.state_dict()))
    described = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"critic\.model_path: a sample's length 64 is above the 16 positions"):
        make(tmp_path, model_path=str(folder))


def test_a_return_that_is_not_finite_stops_before_the_update(tmp_path):
    _, critic = make(tmp_path)
    before = tensors(critic)
    batches = micro_batches()
    batches[0].returns[0, 3] = np.nan
    with pytest.raises(NonFiniteError, match="critic, step 8"):
        critic.update(batches, lambda values, batch: (values - batch.returns).square().sum(), 7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(critic).items())
