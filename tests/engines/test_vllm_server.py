"""vLLM itself, as a server on this machine's CPU: what it draws, its weights, and what happens when it goes.

Figures of ``docs/text_rl/engines.md`` are what ``pytest -m slow -s tests/engines/test_vllm_server.py`` prints.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.vllm import VllmSettings
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests.engines.served_model import (
    CPU_ENVIRONMENT,
    MAX_LENGTH,
    PYTHON_VARIABLE,
    TOKENS,
    VOCABULARY,
    Actor,
    Sampler,
    adapted_model,
    adapted_template,
    log_probs,
    make_model,
    moved,
    parts,
    tokens_drawn,
    vllm_program,
    write_model,
)

needs_vllm = pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE),
    reason=f"{PYTHON_VARIABLE} does not name the python of an environment with vLLM",
)


pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]

BOUND = 3e-5
"""Nats between vLLM and transformers in float32 on a CPU; what was measured stands on the page."""

PROMPTS = [[5 + number, 6, 7 * number + 3, 9] for number in range(8)]


def settings(**changes):
    vllm_settings = VllmSettings(
        program=vllm_program(),
        arguments=("--enforce-eager",),
        environment=CPU_ENVIRONMENT,
        max_model_len=MAX_LENGTH,
        dtype="float32",
        timeout_s=120,
        max_requests=16,
    )
    return replace(vllm_settings, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    made = settings().build(*parts(model, tmp_path_factory.mktemp("run")))
    yield made
    made.close()
    made.close()


def drawn(engine, requests, sampling=Sampling()):  # noqa: B008
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(request, sampling) for request in requests))

    return asyncio.run(all_of_them())


def requests_of(count, max_new_tokens=48):
    return [GenerationRequest(PROMPTS[index % 8], 1000 + index, max_new_tokens) for index in range(count)]


def differences(requests, completions, module, temperature):
    """Between the log-probs of what was drawn and those of the training forward."""
    actual = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        expected = log_probs(module, tokens, temperature)[0, len(request.prompt_ids) - 1 :]
        actual.append((torch.tensor(completion.log_probs) - expected).abs())
    return torch.cat(actual)


def begin(engine, requests):
    """Requests in a thread of their own, of which some tokens are drawn."""
    before = tokens_drawn(engine)
    loop = asyncio.new_event_loop()

    async def all_of_them():
        waiting = (engine.generate(request, Sampling()) for request in requests)
        return await asyncio.gather(*waiting, return_exceptions=True)

    future = ThreadPoolExecutor(1).submit(loop.run_until_complete, all_of_them())
    while tokens_drawn(engine) < before + 20 * len(requests):
        time.sleep(0.02)
    assert not future.done()
    return future


def sync_of(engine, actor=None, tolerance=1e-3):
    roles = LocalRole(actor or Actor()), LocalRole(Sampler(engine), "sampler")
    return WeightSync(*roles, bucket_mb=0.05, rescoring=Rescoring(TOKENS, tolerance))


def server_processes(engine):
    owner = psutil.Process(engine.calls.http.process.pid)
    return owner.children(recursive=True)


def test_log_probs_are_those_of_the_training_forward_before_and_after_updates(engine):
    sync = sync_of(engine)
    for version in (0, 1, 2):
        if version:
            sync.publish(version)
        for temperature in (1.0, 0.7):
            requests = requests_of(8)
            completions = drawn(engine, requests, Sampling(temperature=temperature))
            result = differences(requests, completions, moved(version), temperature)
            print(
                f"version {version}, temperature {temperature}: {len(result)} tokens, largest {result.max():.2g}, "
                f"mean {result.mean():.2g} nats"
            )
            assert len(result) > 300 and result.max() < BOUND
            assert differences(requests, completions, moved(version + 1), temperature).max() > 0.1, "versions differ"
            assert {version for completion in completions for version in completion.versions} == {version}
        rescored = engine.rescore(TOKENS)
        assert (rescored - log_probs(moved(version), TOKENS)).abs().max() < BOUND
    assert len(list(engine.files.folder.iterdir())) == 2, "versions before the last are removed"
    sync.publish(7)  # for the tests below: versions need not follow each other
    sync.close()


def test_a_completion_depends_on_its_seed_and_prompt_alone(engine):
    requests = requests_of(24)
    together = drawn(engine, requests)
    alone = [drawn(engine, [request])[0] for request in requests[:6]]
    others = drawn(engine, [*requests_of(11, 5)[8:], *reversed(requests)])[3:][::-1]
    same = [a.token_ids == b.token_ids for a, b in zip(together, others, strict=True)]
    worst = max(
        abs(x - y) for a, b in zip(together, others, strict=True) for x, y in zip(a.log_probs, b.log_probs, strict=True)
    )
    print(f"{sum(same)} of {len(same)} completions alike in another batch, log-probs within {worst:.2g}")
    assert all(same) and [sequence.token_ids for sequence in alone] == [sequence.token_ids for sequence in together[:6]]
    assert len({tuple(sequence.token_ids) for sequence in together}) == len(requests), "other seeds draw other tokens"


def test_a_completion_ends_at_a_given_token_alone(engine):
    request = GenerationRequest(PROMPTS[0], 3, 200)
    (free,) = drawn(engine, [request])
    assert free.finish_reason == "length" and len(free.token_ids) == 200
    assert 2 in free.token_ids, "the model's own end is a token as any other"
    stop = free.token_ids[17]
    (stopped,) = drawn(engine, [request], Sampling(stop_token_ids=(stop, free.token_ids[40])))
    end = min(free.token_ids.index(stop), free.token_ids.index(free.token_ids[40])) + 1
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[:end]
    (greedy,) = drawn(engine, [request], Sampling(temperature=0.0))
    tokens = torch.tensor([[*PROMPTS[0], *greedy.token_ids[:20]]])
    with torch.no_grad():
        likeliest = moved(7)(tokens).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
    assert likeliest.tolist() == greedy.token_ids[:20] and set(greedy.log_probs) == {0.0}


def test_top_k_and_top_p_are_in_the_log_probs(engine):
    requests = requests_of(4, 24)
    for sampling in (Sampling(top_k=3), Sampling(top_p=0.5, temperature=0.7)):
        for request, completion in zip(requests, drawn(engine, requests, sampling), strict=True):
            tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = moved(7)(tokens).logits[0, len(request.prompt_ids) - 1 : -1] / sampling.temperature
            ordered, order = logits.sort(-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            left_out = before >= sampling.top_p
            left_out[:, sampling.top_k or VOCABULARY :] = True
            filtered = torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(left_out, -torch.inf))
            chosen = torch.tensor(completion.token_ids)[:, None]
            expected = filtered.log_softmax(-1).gather(-1, chosen)[:, 0]
            assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-4


def test_too_long_and_senseless_requests_are_refused(engine):
    for request, text in (
        (GenerationRequest([5] * 1000, 1, 25), "a prompt of 1000 tokens with max_new_tokens 25 .* the 1024 tokens"),
        (GenerationRequest([], 1, 25), "needs a prompt"),
        (GenerationRequest([5], 2**63, 25), "seed"),
    ):
        with pytest.raises(ConfigError, match=text):
            drawn(engine, [request])
    with pytest.raises(ConfigError, match=r"temperature of 0\.01 where 0\.005"):
        drawn(engine, requests_of(1), Sampling(temperature=0.005))
    with pytest.raises(ConfigError, match="temperature 1 alone"):
        engine.rescore([[1, 2]], 0.7)
    with pytest.raises(ConfigError, match="1024 tokens are to be scored"):
        engine.rescore([[1] * 1024])
    with pytest.raises(EngineError, match=r"400.*(vocab|token)"):
        drawn(engine, [GenerationRequest([VOCABULARY + 1000], 1, 2)])
    with pytest.raises(ConfigError, match="set sleep to true"):
        engine.release()


def test_what_is_kept_goes_on_as_if_nothing_had_been(engine):
    requests = requests_of(4, 600)
    expected = drawn(engine, requests)
    waiting = begin(engine, requests)
    engine.pause("keep")
    paused = tokens_drawn(engine)
    engine.flush()
    time.sleep(0.5)
    assert tokens_drawn(engine) == paused and not waiting.done(), "nothing is drawn while it pauses"
    engine.resume()
    actual = waiting.result()
    assert [sequence.token_ids for sequence in actual] == [sequence.token_ids for sequence in expected]
    assert {output.finish_reason for output in actual} == {"length"}


def test_what_is_aborted_keeps_what_was_drawn(engine):
    requests = requests_of(40, 600)  # more than are drawn at a time
    waiting = begin(engine, requests)
    engine.pause("abort")
    aborted = waiting.result(timeout=60)
    engine.resume()
    assert {output.finish_reason for output in aborted} == {"abort"}
    assert sum(bool(sequence.token_ids) for sequence in aborted) == 16, "others had not begun"
    whole = drawn(engine, requests[:16])
    begun = [sequence for sequence in aborted if sequence.token_ids]
    assert [sequence.token_ids for sequence in begun] == [
        full.token_ids[: len(sequence.token_ids)] for sequence, full in zip(begun, whole, strict=True)
    ]
    rest = [
        replace(
            request,
            prompt_ids=[*request.prompt_ids, *sequence.token_ids],
            first_position=len(sequence.token_ids),
            max_new_tokens=9,
        )
        for request, sequence in zip(requests, begun, strict=False)
    ]
    assert drawn(engine, rest) == drawn(engine, list(reversed(rest)))[::-1], "what goes on has noise of its own"


def test_new_weights_in_the_middle_of_completions(engine):
    sync = sync_of(engine)
    requests = requests_of(4, 800)
    waiting = begin(engine, requests)
    sync.publish(8)
    completions = waiting.result(timeout=120)
    for request, completion in zip(requests, completions, strict=True):
        old, new = completion.versions.count(7), completion.versions.count(8)
        assert old > 0 and new > 0 and completion.versions == [7] * old + [8] * new
        tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        actual, prompt_length = torch.tensor(completion.log_probs), len(request.prompt_ids)
        for version, part in ((7, slice(0, old)), (8, slice(old, None))):
            expected = log_probs(moved(version), tokens)[0, prompt_length - 1 :]
            assert (actual - expected)[part].abs().max() < BOUND, "keys and values of earlier weights are not used"
    sync.close()


def test_frozen_weights_stay_though_vllm_fuses_them_with_trained_ones(engine):
    actor = Actor(frozen=("k_proj", "embed", "gate_proj"))
    sync = sync_of(engine, actor)
    sync.publish(9)
    assert (engine.rescore(TOKENS) - log_probs(actor.model(9), TOKENS)).abs().max() < BOUND
    sync.close()


def test_an_update_that_fails_leaves_nothing_to_the_next(engine, monkeypatch):
    monkeypatch.setattr("sfumato.rollout.engines.served.weight_files.FILE_BYTES", 20_000)  # several files a layer

    def written(version):
        return engine.files.write(
            ((name, parameter.detach()) for name, parameter in moved(version).named_parameters()), version
        )

    folder = written(20)
    with pytest.raises(WeightSyncError, match="version 21 of the weights was not loaded by the vLLM server"):
        engine.take_version(folder, 21)
    assert "has weights of version 20, not 21" in engine.calls.http.process.log.read_text()
    (lost, *_), count = sorted(folder.iterdir())[5:], len(list(folder.iterdir()))
    assert count > 8
    lost.unlink()
    lost.symlink_to("/proc/self/fd/999")  # as after the end of the process that had the memory
    with pytest.raises(WeightSyncError, match="version 20 of the weights was not loaded"):
        engine.take_version(folder, 20)  # the layer in the middle of which it ended has a part of it
    engine.files.remove(folder)
    with pytest.raises(WeightSyncError, match="version 20 of the weights was not loaded"):
        engine.take_version(folder, 20)
    assert f"{folder} has no weights" in engine.calls.http.process.log.read_text()
    folder = written(23)
    engine.take_version(folder, 23)
    assert (engine.rescore(TOKENS) - log_probs(moved(23), TOKENS)).abs().max() < BOUND
    assert drawn(engine, requests_of(2))[0].versions[0] == 23
    engine.files.remove(folder)


def test_wrong_weights_stop_the_run(engine):
    sync = sync_of(engine, Actor(damages=True))
    with pytest.raises(WeightSyncError, match=r"version 10: the log-probs of fixed tokens .* differ by up to"):
        sync.publish(10)
    sync.close()
    (engine.staged or engine.applied).joinpath("model-00001.safetensors").write_bytes(b"broken")
    with pytest.raises(WeightSyncError, match="version 11 of the weights was not loaded by the vLLM server"):
        engine.take_version(engine.applied, 11)


def test_a_server_that_is_killed_is_noticed_and_started_again_with_its_weights(engine):
    with pytest.raises(EngineError):
        engine.restart()  # of the broken file above
    engine.applied = None
    engine.version = 0
    engine.restart()
    sync = sync_of(engine)
    sync.publish(12)
    expected = drawn(engine, requests_of(2))
    waiting = begin(engine, requests_of(4, 900))
    for process in server_processes(engine):
        process.kill()
    results = waiting.result(timeout=60)
    assert all(isinstance(result, EngineError) for result in results)
    assert "ended with code" in str(results[0]) and "the last lines of" in str(results[0])
    with pytest.raises(EngineError, match="ended with code"):
        engine.health()
    engine.restart()
    engine.health()
    again = drawn(engine, requests_of(2))
    assert again == expected and again[0].versions[0] == 12
    sync.close()


def test_a_server_that_hangs_is_noticed_and_can_be_started_again(engine, monkeypatch):
    monkeypatch.setattr("sfumato.rollout.engines.served.vllm_calls.HEALTH_TIMEOUT_S", 1.0)
    monkeypatch.setattr(engine.calls.http, "timeout_s", 2.0)
    stopped = server_processes(engine)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"no complete answer in time \(2 s\)"):
        drawn(engine, requests_of(2))
    with pytest.raises(EngineError, match="no complete answer in time"):
        engine.health()
    monkeypatch.undo()
    engine.restart()
    assert not any(psutil.pid_exists(process.pid) and process.status() != "zombie" for process in stopped)
    engine.health()


def test_one_that_runs_is_used_if_it_is_the_right_one(engine, model, tmp_path, monkeypatch):
    target = engine.calls.http.target
    url = target.base.text
    with pytest.raises(ConfigError, match=r"HTTP status 401.*name the environment variable .*api_key_env"):
        VllmSettings(url=url, dtype="float32").build(*parts(model, tmp_path))
    monkeypatch.setenv("KEY_OF_VLLM", target.headers["Authorization"].removeprefix("Bearer "))
    of_the_url = VllmSettings(url=url, dtype="float32", api_key_env="KEY_OF_VLLM")
    other = write_model(tmp_path / "other", seed=5)
    with pytest.raises(ConfigError, match=rf"has the model {model}, the run {other}"):
        of_the_url.build(*parts(other, tmp_path))
    result = of_the_url.build(*parts(model, tmp_path))
    assert drawn(result, requests_of(2)) == drawn(engine, requests_of(2))
    with pytest.raises(ConfigError, match="was not started by this run"):
        result.restart()
    result.close()
    engine.health()
    with pytest.raises(EngineError, match="is closed"):
        result.health()


def test_adapters_alone_are_sent_where_only_they_are_trained(model, tmp_path):
    engine = settings().build(*parts(model, tmp_path, adapted_template))
    try:
        assert all(".lora_" in name for name in engine.describe())
        before = drawn(engine, requests_of(3))
        assert differences(requests_of(3), before, make_model(), 1.0).max() < BOUND
        sync = sync_of(engine, Actor(has_adapters=True))
        for version in (1, 2):
            report = sync.publish(version)
            assert report.num_bytes < 50_000, "not the model"
            completions = drawn(engine, requests_of(8))
            actual = differences(requests_of(8), completions, adapted_model(version), 1.0)
            print(f"adapters of version {version}: largest {actual.max():.2g}, mean {actual.mean():.2g} nats")
            assert actual.max() < BOUND and completions[0].versions[0] == version
            assert differences(requests_of(8), completions, make_model(), 1.0).max() > 0.1
        expected = drawn(engine, requests_of(2))
        engine.restart()
        assert drawn(engine, requests_of(2)) == expected
        sync.close()
    finally:
        engine.close()


def test_vllm_in_the_environment_of_the_run(tmp_path):
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], "-m", "tests.engines.vllm_in_process", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"


def test_what_cannot_start_says_why(model, tmp_path):
    broken = settings(arguments=("--enforce-eager", "--no-such-option"))
    with pytest.raises(EngineError, match=r"(?s)ended with code 2.*no-such-option"):
        broken.build(*parts(model, tmp_path))
    with pytest.raises(ConfigError, match="/nowhere/vllm is not there"):
        settings(program="/nowhere/vllm").build(*parts(model, tmp_path))
    with pytest.raises(EngineError, match=r"was not ready after 1 s"):
        settings(start_timeout_s=1).build(*parts(model, tmp_path))
    too_much = settings(gpu_memory_utilization=0.999, environment={**CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "900"})
    with pytest.raises(EngineError, match=r"(?s)ended with code .*[Mm]emory"):
        too_much.build(*parts(model, tmp_path))


def test_the_server_ends_with_a_run_that_is_killed(model, tmp_path):
    code = f"""
import signal, os, sys, time
from tests.engines.test_vllm_server import *
engine = settings().build(*parts({str(model)!r}, {str(tmp_path)!r}))
print("pids", *(each.pid for each in server_processes(engine)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ)
    pids = [int(word) for word in done.stdout.split("pids")[1].split()]
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.2)
    assert len(pids) >= 2
