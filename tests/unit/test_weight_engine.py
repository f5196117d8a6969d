"""An engine that fuses its weights receives them through ``WeightSync``, and is verified by rescoring fixed tokens."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.models.language.rounding import rounding_noise
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.rescoring import Distance, RescoredTexts
from sfumato.runtime.weight_sync.sender import Sent
from sfumato.runtime.weight_sync.sync import WeightSync
from tests.engines.served_model import log_probs, make_model
from tests.fused_engine import TOKENS, Actor, Sampler, expected

RESCORING = Rescoring(TOKENS, tolerance=0.01)  # half precision keeps log-probs within 0.002 here
MEASURED = Rescoring(TOKENS)


def made(fault: str = "", transport: str = "auto", folder=None, rescoring: Rescoring | None = RESCORING):
    mesh = Mesh(Layout(), torch.device("cpu"))
    sampler = Sampler(fault, mesh, None)
    roles = LocalRole(Actor(None, mesh, None)), LocalRole(sampler, "sampler")
    return WeightSync(*roles, transport, bucket_mb=1e-4, folder=folder, rescoring=rescoring), sampler.engine, sampler


@pytest.mark.parametrize("transport", ["auto", "files"])
def test_an_engine_takes_whole_tensors_and_fuses_them(transport, tmp_path):
    sync, engine, sampler = made(transport=transport, folder=tmp_path)
    for version in (1, 2, 5):
        before = engine.rescore(TOKENS)
        report = sync.transfer(version)
        assert torch.equal(engine.rescore(TOKENS), before), (
            "it draws by the version before until the new one is applied"
        )
        sync.apply(version).result()
        assert sampler.version == engine.version == version
        torch.testing.assert_close(engine.rescore(TOKENS), expected(version), rtol=0, atol=0.01)
        assert (engine.rescore(TOKENS) - expected(version + 1)).abs().max() > 0.05, "versions are told apart"
        assert report.num_tensors == report.num_verified == 5, (
            "the embedding is frozen, and not the engine's to describe"
        )
    assert sorted(set(engine.seen)) == ["head.bias", "head.weight", "k.weight", "q.weight", "v.weight"]
    sync.close()


@pytest.mark.parametrize(
    ("fault", "version", "text"),
    [
        ("swaps", 1, r"version 1: the log-probs of fixed tokens .* differ by up to .* nats, 0.01 are allowed"),
        ("nan", 1, "version 1: .* differ by up to inf nats"),
        ("keeps the old ones", 2, r"version 2: .*sequence \d, token \d: .* the engine does not have the weights"),
    ],
)
def test_wrong_weights_are_noticed(fault, version, text):
    sync, _, _ = made(fault)
    for earlier in range(1, version):
        sync.publish(earlier)
    with pytest.raises(WeightSyncError, match=text):
        sync.publish(version)


@pytest.mark.parametrize(
    ("fault", "version", "text"),
    [
        ("", 4, ""),
        ("swaps", 1, r"version 1: .*differ by .* in the mean, .* 3 times what rounding does to this model"),
        ("nan", 1, "version 1: .* by up to inf"),
        ("keeps the old ones", 2, r"version 2: .*differ by .* in the mean"),
    ],
)
def test_what_rounding_does_to_the_model_bounds_the_distance(fault, version, text):
    sync, _, _ = made(fault, rescoring=MEASURED)
    for earlier in range(1, version):
        sync.publish(earlier)
    with pytest.raises(WeightSyncError, match=text) if text else nullcontext():
        sync.publish(version)


def test_a_version_that_is_missed_is_noticed_though_it_is_smaller_than_rounding():
    for fault in ("", "keeps the old ones"):
        sync, _, _ = made(fault, rescoring=MEASURED)
        sync.actor.state.rate = 2e-3  # moves log-probs by a tenth of what half precision does
        sync.publish(1)
        with pytest.raises(WeightSyncError, match="exactly those of version 1") if fault else nullcontext():
            sync.publish(2)


def test_the_engine_of_every_rank_is_compared():
    log_probs = expected(1)
    sent = Sent(3, {}, log_probs, log_probs + 0.01)
    assert RescoredTexts(sent, [log_probs - 0.01, log_probs + 0.02]).problem(None, None, None) == ""
    assert "(rank 1 of the sampler)" in RescoredTexts(sent, [log_probs, log_probs + 0.05]).problem(None, None, None)


@pytest.mark.parametrize(("arrived", "text"), [(1.0, ""), (0.9, ""), (0.6, r"have moved by 59% \(give or take 4%\)")])
def test_a_part_of_the_weights_that_stays_behind_is_noticed(arrived, text):
    generator = torch.Generator().manual_seed(0)
    noise = [0.05 * torch.randn(4, 100, generator=generator) for _ in range(3)]
    before = -3 * torch.rand(4, 100, generator=generator)
    change = 0.1 * torch.randn(4, 100, generator=generator)
    first = RescoredTexts(Sent(1, {"head": 1}, before), [before + noise[0]])
    scores = RescoredTexts(Sent(7, {"head": 2}, before + change, before + change + noise[1]), [])
    scores.engines.append(before + arrived * change + noise[2])
    assert re.search(f"^{text}" if text else "^$", scores.problem(None, None, first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_predicted_in_float32(dtype):
    module = make_model()
    tokens = torch.arange(120).view(4, 30) * 7 % 128
    exact = log_probs(module, tokens)
    with rounding_noise(module, dtype):
        rounding = Distance.measure(log_probs(module, tokens), exact)
    assert torch.equal(log_probs(module, tokens), exact), "nothing is left of it"
    distance = Distance.measure(log_probs(module.to(dtype), tokens), exact)
    assert rounding.mean / 2 < distance.mean < 2 * rounding.mean
    assert distance.is_within(rounding)


def test_log_probs_of_another_shape_are_no_match(monkeypatch):
    sync, engine, _ = made()
    monkeypatch.setattr(engine, "rescore", lambda tokens: torch.zeros(3, 8))
    with pytest.raises(WeightSyncError, match=r"have shape \(3, 8\) instead of \(3, 7\)"):
        sync.publish(1)


def test_what_cannot_be_sent_or_verified_is_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="fixed tokens"):
        made(rescoring=None)[0].transfer(1)
    with pytest.raises(ConfigError, match=r"the sampler lacks v\.weight"):
        made("lacks v")[0].transfer(1)
