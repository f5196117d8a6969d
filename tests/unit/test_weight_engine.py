"""An engine that fuses its weights receives them through ``WeightSync``, and is verified by rescoring fixed tokens."""

from __future__ import annotations

import pytest
import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.sync import Rescoring, WeightSync
from tests.fused_engine import TOKENS, Actor, Sampler, expected

RESCORING = Rescoring(TOKENS, tolerance=0.01)  # half precision keeps log-probs within 0.002 here


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
