"""The SGLang engine against answers in the form of SGLang's documented interface; SGLang itself needs a GPU."""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.sglang import SglangSettings
from sfumato.runtime.roles import LocalRole
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests.engines.served_model import TOKENS, Actor, Sampler, log_probs, moved, parts
from tests.engines.sglang_protocol import serve

MODEL = "/models/tiny"


@pytest.fixture
def served(request, tmp_path):
    opened = []

    def start(*faults, **changes):
        url, scheduler, server = serve(MODEL, *faults)
        opened.append(server)
        settings = SglangSettings(url=url, dtype="float32", timeout_s=changes.pop("timeout_s", 30), **changes)
        engine = settings.build(*parts(MODEL, tmp_path))
        opened.append(engine)
        return engine, scheduler

    yield start
    for engine_or_server in reversed(opened):
        if hasattr(engine_or_server, "rescore"):
            engine_or_server.close()
        else:
            engine_or_server.shutdown()
            engine_or_server.server_close()


def drawn(engine, requests, sampling=Sampling()):  # noqa: B008
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(request, sampling) for request in requests))

    return asyncio.run(all_of_them())


def requests_of(count, length=6):
    return [GenerationRequest([5, index, 9], 2**62 + index, length) for index in range(count)]


def begin(engine, scheduler, requests):
    """Each request draws two tokens, and goes on when the engine has paused."""
    scheduler.waits_after = 2
    future = ThreadPoolExecutor(1).submit(drawn, engine, requests)
    while scheduler.num_waiting < min(len(requests), engine.http._threads._max_workers):
        time.sleep(0.01)
    return future


def test_requests_and_answers_are_in_the_documented_form(served):
    engine, scheduler = served()
    for temperature in (1.0, 0.7):
        for request, completion in zip(
            requests_of(3), drawn(engine, requests_of(3), Sampling(temperature=temperature)), strict=True
        ):
            tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            expected = log_probs(scheduler.module, tokens, temperature)[0, 2:]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-5)
            assert completion.versions == [0] * 6 and completion.finish_reason == "length"
    sent = next(body for path, body in scheduler.seen if path == "/generate" and body["input_ids"] == [5, 0, 9])
    assert sent["return_logprob"] is True and sent["stream"] is False
    params = sent["sampling_params"]
    assert params["max_new_tokens"] == 6 and params["ignore_eos"] is True and params["top_k"] == -1
    assert 0 <= params["sampling_seed"] < 2**31
    seeds = {body["sampling_params"]["sampling_seed"] for path, body in scheduler.seen if path == "/generate"}
    assert len(seeds) == 3, "each request has its own"
    (free,) = drawn(engine, requests_of(1))
    (stopped,) = drawn(engine, requests_of(1), Sampling(stop_token_ids=(free.token_ids[2],)))
    assert stopped.token_ids == free.token_ids[:3] and stopped.finish_reason == "stop"
    (greedy,) = drawn(engine, requests_of(1), Sampling(temperature=0.0))
    assert greedy.log_probs == [0.0] * 6
    (rest,) = drawn(engine, [GenerationRequest([5, 0, 9, *free.token_ids[:4]], 2**62, 2, first_position=4)])
    assert rest.token_ids == free.token_ids[4:], "noise is keyed by the position in the sequence"


def test_weights_are_loaded_from_files_and_verified(served):
    engine, scheduler = served()
    roles = LocalRole(Actor()), LocalRole(Sampler(engine), "sampler")
    sync = WeightSync(*roles, bucket_mb=0.05, rescoring=Rescoring(TOKENS, 1e-4))
    waiting = begin(engine, scheduler, requests_of(3, 60))
    engine.pause("keep")
    sync.publish(4)  # which scores tokens, though it pauses
    engine.resume()
    for request, completion in zip(requests_of(3, 60), waiting.result(), strict=True):
        old = completion.versions.count(0)
        assert completion.versions == [0] * old + [4] * (60 - old) and old < 60
        tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        expected = log_probs(moved(4), tokens)[0, 2 + old :]
        torch.testing.assert_close(torch.tensor(completion.log_probs[old:]), expected, rtol=0, atol=1e-5)
    paths = [path for path, _ in scheduler.seen if path != "/generate"]
    assert paths[1:5] == ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]
    assert paths[5:] == ["/pause_generation", "/continue_generation"]
    assert ("/pause_generation", {"mode": "retract"}) in scheduler.seen
    scheduler.faults.add("old weights")
    with pytest.raises(WeightSyncError, match="version 5: the log-probs of fixed tokens"):
        sync.publish(5)
    sync.close()
    scheduler.faults.add("no update")
    with pytest.raises(WeightSyncError, match=r"version 6 of the weights was not loaded .* weights iterator"):
        engine.take_version(engine.applied, 6)
    scheduler.faults.clear()
    engine.take_version(engine.applied, 7)
    assert drawn(engine, requests_of(1, 3))[0].versions == [7] * 3, "it goes on with weights that could be loaded"


def test_all_requests_are_aborted_with_what_they_have(served):
    engine, scheduler = served(max_requests=4)
    waiting = begin(engine, scheduler, requests_of(10, 400))
    engine.pause("abort")
    aborted = waiting.result(timeout=30)
    assert {output.finish_reason for output in aborted} == {"abort"}
    assert [bool(sequence.token_ids) for sequence in aborted] == [True] * 4 + [False] * 6
    engine.resume()
    again = drawn(engine, requests_of(4, len(aborted[0].token_ids)))
    assert again[0].token_ids == aborted[0].token_ids


def test_memory_is_given_away_and_weights_are_loaded_again(served, tmp_path):
    engine, _ = served()
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        engine.release()
    engine, scheduler = served("memory saver")
    engine.release()
    assert scheduler.seen[-1] == ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    engine.staged = engine.files.write(iter(moved(3).named_parameters()), 3)
    engine.apply(3)
    engine.restore()
    path, body = scheduler.seen[-1]
    assert path == "/update_weights_from_disk" and "version_000003" in body["model_path"]
    assert body["weight_version"] == engine.files.label_of(3)


def test_what_does_not_fit_is_refused(served, tmp_path):
    engine, _ = served()
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=5)):
        with pytest.raises(ConfigError, match="from before top_p and top_k"):
            drawn(engine, requests_of(1), sampling)
    with pytest.raises(ConfigError, match="longer than the 1024 tokens"):
        drawn(engine, [GenerationRequest([1] * 1000, 1, 100)])
    with pytest.raises(ConfigError, match="--enable-deterministic-inference"):
        served("no seeds")
    url = engine.http.target.base.text
    with pytest.raises(ConfigError, match=f"has the model {MODEL}, the run /models/other"):
        SglangSettings(url=url).build(*parts("/models/other", tmp_path))
    with pytest.raises(ConfigError, match="either the url of a server or the program"):
        SglangSettings()
    with pytest.raises(ConfigError, match="was not started by this run"):
        engine.restart()
    with pytest.raises(ConfigError, match="url: 'sglang:30000'"):
        SglangSettings(url="sglang:30000").build(*parts(MODEL, tmp_path))


def test_a_server_that_fails_is_noticed(served):
    engine, scheduler = served(timeout_s=0.5)
    scheduler.faults.add("out of memory")
    with pytest.raises(EngineError, match=r"500.*out of memory"):
        drawn(engine, requests_of(1))
    scheduler.faults = {"hangs"}
    with pytest.raises(EngineError, match=r"no complete answer in time \(0\.5 s\)"):
        drawn(engine, requests_of(1))
    scheduler.faults = {"no spans"}
    assert drawn(engine, requests_of(1))[0].versions == [0] * 6
    for label in ("somebody's", "3", "00c0ffee-3"):
        scheduler.version = label
        engine.applied = None
        assert drawn(engine, requests_of(1))[0].versions == [0] * 6, "an earlier run's, before this one's first"
        engine.applied = engine.files.folder
        with pytest.raises(EngineError, match=f"weights called .{label}.*give each run a server of its own"):
            drawn(engine, requests_of(1))
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        drawn(engine, requests_of(1))


def test_an_answer_that_cannot_be_is_an_error(served, monkeypatch):
    engine, scheduler = served()

    def draw_and_abort(*_):
        scheduler.num_aborts += 1
        return 5, -1.0

    for answer in ((5, math.nan), (5, 0.5), (-1, -1.0)):
        monkeypatch.setattr(scheduler, "draw", lambda *_, answer=answer: answer)
        with pytest.raises(EngineError, match="tokens or log-probs that cannot be"):
            drawn(engine, requests_of(1))
    monkeypatch.setattr(scheduler, "draw", draw_and_abort)
    with pytest.raises(EngineError, match="that nobody asked it to end"):
        drawn(engine, requests_of(1))
    monkeypatch.setattr(engine, "_is_pausing", True)  # another thread has it abort what is under way
    assert drawn(engine, requests_of(1))[0].finish_reason == "abort"
