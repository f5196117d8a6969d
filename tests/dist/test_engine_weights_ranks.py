"""Weights for engines of several ranks on one machine: one rank takes and writes them, all load the same."""

from pathlib import Path

import pytest
import torch

from sfumato.errors import RoleLostError, WeightSyncError
from sfumato.rollout.engines.base import EngineError
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.sync import Rescoring, WeightSync
from tests.dist.process_roles import ProcessRoles
from tests.engines.file_engine import RankActor, RankSampler, rescored, restarted, weights_held
from tests.engines.served_model import TOKENS, log_probs, moved

RESCORING = Rescoring(TOKENS, 1e-5)


def expected(version: int) -> torch.Tensor:
    with torch.no_grad():
        return log_probs(moved(version), TOKENS)


@pytest.mark.parametrize(("transport", "in_memory"), [("broadcast", True), ("ipc", True), ("files", False)])
def test_one_rank_of_a_machine_takes_weights_for_all(transport, in_memory, ranks, tmp_path):
    with ProcessRoles(ranks, tmp_path, actor=1, sampler=2) as roles:
        roles.actor.build(RankActor)
        roles.sampler.build(RankSampler, tmp_path / "weights", in_memory)
        sync = WeightSync(roles.actor, roles.sampler, transport, 0.05, tmp_path, 30.0, rescoring=RESCORING)
        for version in (1, 2, 3):
            sync.publish(version)
            for used, scores in roles.sampler.all(rescored, TOKENS):
                assert used == version
                torch.testing.assert_close(scores, expected(version), rtol=0, atol=1e-5)
        (taken, written), (others, others_written) = roles.sampler.all(weights_held)
        assert others == 0 and not others_written, "the other rank holds none"
        assert len(written) == 2 and (0 < taken < 2 * 2**20 * 1.5 if in_memory else taken == 0)
        for scores in roles.sampler.all(restarted, TOKENS):
            torch.testing.assert_close(scores, expected(3), rtol=0, atol=1e-5)
        sync.close()


def in_turns(folder: Path) -> tuple[int, list[str], list[torch.Tensor]]:
    """Actor and sampler in the same processes, as without Ray."""
    sampler = RankSampler(folder, True)
    sync = WeightSync(
        LocalRole(RankActor()), LocalRole(sampler, "sampler"), "local", bucket_mb=0.05, rescoring=RESCORING
    )
    scores = []
    for version in (1, 2):
        sync.publish(version)
        scores.append(sampler.engine.rescore(TOKENS))
    held = weights_held(sampler)
    sampler.mesh.barrier()
    sync.close()
    return *held, scores


def test_without_roles_of_their_own_one_rank_takes_weights_for_all(ranks, tmp_path):
    (first, written, scores), (second, none_written, other_scores) = ranks.run(2, in_turns, tmp_path)
    assert first > 0 and len(written) == 2 and second == 0 and not none_written
    for version, score, other in zip((1, 2), scores, other_scores, strict=True):
        torch.testing.assert_close(score, expected(version), rtol=0, atol=1e-5)
        torch.testing.assert_close(other, expected(version), rtol=0, atol=1e-5)


def lose_engine_of_second_rank(folder: Path, losses: list[str], max_restarts: int | None) -> tuple[object, int]:
    """An error, or the scores of version 2, and how often the engine of this rank was started anew."""
    sampler = RankSampler(folder, True)
    sync = WeightSync(
        LocalRole(RankActor()), LocalRole(sampler, "sampler"), "local", bucket_mb=0.05, rescoring=RESCORING
    )
    sync.publish(1)
    num_restarts = 0

    def restart(error: EngineError) -> None:
        nonlocal num_restarts
        if num_restarts == max_restarts:
            raise RoleLostError("engine", (), str(error))
        num_restarts += 1
        sampler.engine.restart()

    if max_restarts is not None:
        sampler.engine.on_loss = restart
    if sampler.mesh.rank == 1:
        sampler.engine.losses = list(losses)
    try:
        sync.publish(2)
        result: object = sampler.engine.rescore(TOKENS)
    except (RoleLostError, WeightSyncError) as error:
        result = f"{type(error).__name__}: {error}"
    sampler.mesh.barrier()
    return result, num_restarts


@pytest.mark.parametrize("losses", [["load"], ["score"], ["load", "score"]], ids="-".join)
def test_an_engine_that_dies_while_it_takes_weights_is_started_anew(losses, ranks, tmp_path):
    (scores, num), (other_scores, num_of_lost) = ranks.run(2, lose_engine_of_second_rank, tmp_path, losses, len(losses))
    assert (num, num_of_lost) == (0, len(losses))
    for actual in (scores, other_scores):
        torch.testing.assert_close(actual, expected(2), rtol=0, atol=1e-5)


def test_every_rank_hears_of_an_engine_that_is_lost_for_good(ranks, tmp_path):
    (other, _), (lost, num) = ranks.run(2, lose_engine_of_second_rank, tmp_path, ["load"], 0)
    assert lost == "RoleLostError: engine: the engine has died in load" and num == 0
    assert other == f"RoleLostError: engine: of another rank: {lost.partition(': ')[2]}"
    (other, _), (lost, _) = ranks.run(2, lose_engine_of_second_rank, tmp_path, ["load"], None)
    assert lost.startswith("WeightSyncError: version 2 of the weights was not loaded by the engine: ")
    assert other.startswith("WeightSyncError: another rank's engine could not take its weights: version 2")
