"""vLLM in the environment of the run, which must have this library's dependencies too: a program with checks.

``python -m tests.engines.vllm_in_process FOLDER``, with the python of an environment with vLLM.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.vllm import VllmSettings
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests.engines.served_model import MAX_LENGTH, TOKENS, Actor, Sampler, log_probs, moved, parts, write_model

BOUND = 3e-5


def requests_of(count: int, length: int = 48) -> list[GenerationRequest]:
    return [GenerationRequest([5 + index, 6, 9], 77 + index, length) for index in range(count)]


def processes_of_vllm() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "resource_tracker" not in str(child.cmdline())]


def main(folder: Path) -> None:
    model = write_model(folder / "model")
    settings = VllmSettings(
        dtype="float32", max_model_len=MAX_LENGTH, timeout_s=120, max_requests=16, arguments=("--enforce-eager",)
    )
    engine = settings.build(*parts(model, folder / "run"))
    try:
        sync = WeightSync(
            LocalRole(Actor()), LocalRole(Sampler(engine), "sampler"), bucket_mb=0.05, rescoring=Rescoring(TOKENS, 1e-3)
        )
        for version in (0, 1, 2):
            if version:
                sync.publish(version)
            for temperature in (1.0, 0.7):
                check_log_probs(engine, version, temperature)
        assert (
            complete_requests(engine, requests_of(2), Sampling())
            == complete_requests(engine, requests_of(9), Sampling())[:2]
        )
        check_updates_and_aborts(engine, sync)
        check_death(engine)
    finally:
        engine.close()
    deadline = time.monotonic() + 30
    while remaining := processes_of_vllm():
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)
    print("all checks passed", flush=True)


def check_log_probs(engine, version, temperature):
    actual = []
    requests = requests_of(8)
    for request, completion in zip(
        requests, complete_requests(engine, requests, Sampling(temperature=temperature)), strict=True
    ):
        assert completion.versions == [version] * 48
        tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        expected = log_probs(moved(version), tokens, temperature)[0, 2:]
        actual.append((torch.tensor(completion.log_probs) - expected).abs())
    differences = torch.cat(actual)
    print(
        f"in process, version {version}, temperature {temperature}: {len(differences)} tokens, largest "
        f"{differences.max():.2g}, mean {differences.mean():.2g} nats"
    )
    assert differences.max() < BOUND


def check_updates_and_aborts(engine, sync):
    waiting = ThreadPoolExecutor(1).submit(complete_requests, engine, requests_of(4, 900), Sampling())
    while len(engine.calls._open) < 4:
        time.sleep(0.01)
    time.sleep(0.3)
    engine.pause("keep")
    sync.publish(3)  # which scores tokens, though it pauses
    time.sleep(0.3)
    assert not waiting.done() and len(engine.calls._open) == 4
    engine.resume()
    for completion in waiting.result():
        assert completion.versions == sorted(completion.versions) and completion.versions[-1] == 3
    waiting = ThreadPoolExecutor(1).submit(complete_requests, engine, requests_of(30, 900), Sampling())
    while len(engine.calls._open) < 30:
        time.sleep(0.01)
    time.sleep(0.3)
    engine.pause("abort")
    aborted = waiting.result(timeout=60)
    engine.resume()
    assert {output.finish_reason for output in aborted} == {"abort"}
    (again,) = complete_requests(engine, requests_of(1, 60), Sampling())
    assert again.token_ids[: len(aborted[0].token_ids)] == aborted[0].token_ids[:60]


def check_death(engine):
    (before,) = complete_requests(engine, requests_of(1), Sampling())
    waiting = ThreadPoolExecutor(1).submit(complete_requests, engine, requests_of(4, 900), Sampling())
    time.sleep(0.3)
    for process in processes_of_vllm():
        process.kill()
    try:
        waiting.result(timeout=60)
    except EngineError as error:
        print(f"killed: {error}")
    else:
        raise AssertionError("its death was not noticed")
    try:
        engine.health()
    except EngineError:
        pass
    else:
        raise AssertionError("it is dead and healthy")
    engine.restart()
    assert complete_requests(engine, requests_of(1), Sampling()) == [before], "it has the weights of before"


if __name__ == "__main__":
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE"), "give vLLM a size for keys and values"
    main(Path(sys.argv[1]))
