"""What engines outside of the library stand on: files of weights, owned servers, requests that end, settings."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from sfumato.config.base import Variant, find_variants
from sfumato.errors import ConfigError, MissingDependencyError, WeightSyncError
from sfumato.parallel.shards import all_parameters
from sfumato.parallel.weights import build_on_meta
from sfumato.rollout.engines import host_memory
from sfumato.rollout.engines.base import EngineError, GenerationRequest
from sfumato.rollout.engines.served import weight_files
from sfumato.rollout.engines.served.engine import seed_of
from sfumato.rollout.engines.served.environment import engine_environment, replace_environment, visible_devices
from sfumato.rollout.engines.served.http_server import NOT_SENT, HttpServer, RefusedByServerError
from sfumato.rollout.engines.served.server_process import ServerProcess, free_port
from sfumato.rollout.engines.served.vllm_calls import WORKER_FILE
from sfumato.rollout.engines.served.weight_files import WeightFiles, own_folder
from sfumato.rollout.engines.sglang import SglangSettings
from sfumato.rollout.engines.vllm import VllmSettings
from tests.engines.served_model import adapted_model, adapted_template, parts, template
from tests.survey.tiny_configs import tiny_config
from tests.tiny import ROOT, tiny_language_description

# weights


def module_of(kind, tied=False):
    described = {**tiny_language_description(kind), "tie_word_embeddings": tied}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))


def tensors_in(folder):
    results = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            results |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return results


def hrm_text():
    """A model whose own files have in one tensor what transformers has in several."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(tiny_config("hrm_text"))


@pytest.mark.parametrize(
    ("build", "in_memory"),
    [
        (partial(module_of, "qwen3"), True),
        (partial(module_of, "qwen3", tied=True), False),
        (partial(module_of, "qwen3_moe"), True),
        (hrm_text, False),
    ],
)
def test_weights_are_written_as_the_model_s_own_files(build, in_memory, tmp_path, monkeypatch):
    module = build()
    module.save_pretrained(tmp_path / "own")
    monkeypatch.setattr(weight_files, "FILE_BYTES", 20_000)
    files = WeightFiles(build_on_meta(build), torch.float32, tmp_path / "sent", in_memory=in_memory)
    assert {name: spec.shape for name, spec in files.specs.items()} == {
        name: tuple(parameter.shape) for name, parameter in all_parameters(module).items()
    }
    scratch = torch.empty(2**16)

    def through_one_buffer():  # each is valid until the next is asked for
        for name, parameter in all_parameters(module).items():
            scratch[: parameter.numel()] = parameter.detach().flatten()
            yield name, scratch[: parameter.numel()].view(parameter.shape)

    folder = files.write(through_one_buffer(), 3)
    assert len(list(folder.iterdir())) > 2, "several files"
    actual, expected = tensors_in(folder), tensors_in(tmp_path / "own")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    if "moe" in type(module).__name__.lower():
        assert any("experts.3.down_proj" in name for name in actual), "experts one by one"
    files.close()


def version_of_ones(number):
    return iter([("model.norm.weight", torch.full((64,), float(number)))])


def test_versions_in_memory_share_pages_and_do_not_overwrite_one_in_use(tmp_path):
    files = WeightFiles(template(), torch.float32, tmp_path / "sent", in_memory=True)
    first, second = (files.write(version_of_ones(number), number) for number in (1, 2))
    mapped = tensors_in(second)["model.norm.weight"]  # as an engine has it while it loads
    files.remove(first)
    third = files.write(version_of_ones(3), 3)
    assert mapped.eq(2).all() and tensors_in(second)["model.norm.weight"].eq(2).all()
    assert tensors_in(third)["model.norm.weight"].eq(3).all()
    assert len(files._slots) == 2, "the memory of the first serves the third"
    assert not first.exists() and all(path.is_symlink() for path in third.iterdir())
    files.close()
    assert not files.folder.exists() and not os.path.exists(third)


def test_memory_of_weights_ends_with_the_process_that_filled_it(tmp_path):
    reader, writer = os.pipe()
    if not (child := os.fork()):  # which ends by a signal alone
        files = WeightFiles(template(), torch.float32, tmp_path, in_memory=True)
        os.write(writer, str(files.write(version_of_ones(1), 1)).encode())
        time.sleep(600)
    link = Path(os.read(reader, 1000).decode()) / "model-00001.safetensors"
    assert tensors_in(link.parent)["model.norm.weight"].eq(1).all(), "seen by another process"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert link.is_symlink() and not link.exists(), "a name is left, and no memory"


def test_weights_go_to_the_folder_where_memory_has_no_room_or_a_person_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    template_and_folders = (template(), tmp_path, "/models/tiny")
    in_memory = VllmSettings(program="/bin/vllm").weight_files(*template_and_folders)
    elsewhere = VllmSettings(url="http://a:1").weight_files(*template_and_folders)
    forced = VllmSettings(program="/bin/vllm", weights_folder=str(tmp_path / "w")).weight_files(*template_and_folders)
    assert [files.in_memory for files in (in_memory, elsewhere, forced)] == [True, False, False]
    monkeypatch.setattr(weight_files, "free_host_bytes", lambda: 10_000)
    folder = in_memory.write(version_of_ones(1), 1)
    assert not (folder / "model-00001.safetensors").is_symlink()
    assert "two versions in memory need" in caplog.text and "1e-05 GB that are free" in caplog.text
    for files in (in_memory, elsewhere, forced):
        files.close()


def test_a_limit_of_the_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    machine = host_memory.free_host_bytes()
    for name, text in (("max", "max"), ("current", "1000"), ("stat", "inactive_file 200\nanon 5\n")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert host_memory.free_host_bytes() > machine / 2
    (tmp_path / "memory.max").write_text("5000\n")
    assert host_memory.free_host_bytes() == 4200


def test_adapters_are_written_as_peft_reads_them(tmp_path):
    from peft import PeftModel

    from tests.engines.served_model import log_probs, make_model

    module = adapted_model(2)
    files = WeightFiles(adapted_template(), torch.bfloat16, tmp_path, "/models/base")
    sent = {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}
    assert files.specs.keys() == sent.keys() and {spec.dtype for spec in files.specs.values()} == {torch.float32}
    folder = files.write(iter(sent.items()), 2)
    tokens = torch.arange(12).view(1, 12)
    loaded = PeftModel.from_pretrained(make_model(), folder).eval()
    torch.testing.assert_close(log_probs(loaded, tokens), log_probs(module.eval(), tokens), rtol=0, atol=1e-5)
    assert "/models/base" in (folder / "adapter_config.json").read_text()


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"version 4 of the weights could not be written .* weights_folder"):
        WeightFiles(template(), torch.float32, tmp_path / "file").write(iter([("a", torch.ones(1))]), 4)

    def broken():
        yield "model.norm.weight", torch.ones(64)
        raise OSError("no space left")

    files = WeightFiles(template(), torch.float32, tmp_path / "sent")
    with pytest.raises(WeightSyncError, match="no space left"):
        files.write(broken(), 4)
    assert list((tmp_path / "sent").iterdir()) == []


def test_processes_that_share_a_folder_have_parts_of_their_own(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = own_folder(tmp_path)
    host, secret = socket.gethostname(), mine.name.rpartition("-")[2]
    of_dead_process = tmp_path / f"{host}-{gone.pid}-{secret}"
    other, elsewhere = tmp_path / f"{host}-{os.getppid()}-{secret}", tmp_path / "another-host-7"
    for folder in (of_dead_process, other, elsewhere, mine):
        folder.mkdir()
    assert own_folder(tmp_path) == mine
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, other.name, elsewhere.name}


# processes

SERVER = """
import http.server, os, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("children", child.pid, os.environ.get("COLOUR"), os.environ.get("TAKEN"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("out of memory", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
    log_message = lambda *_: None
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def started(tmp_path, code=SERVER, **changes):
    port = free_port()
    environment = {"COLOUR": "blue"}
    settings = {"command": [sys.executable, "-c", code, str(port)], "environment": environment, "start_timeout_s": 60.0}
    process = ServerProcess("the server", log=tmp_path / "a" / "server.log", **{**settings, **changes})
    http = HttpServer("the server", f"http://127.0.0.1:{port}", timeout_s=20, process=process)
    process.start(lambda: http.answers("/"))
    return process, http


def pids_of(process):
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def wait_for_end(pids):
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_server_and_its_children_end_and_start_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TAKEN", "yes")
    process, http = started(tmp_path)
    first = pids_of(process)
    assert len(first) == 2 and process.problem() == ""
    assert "blue None" in process.log.read_text()
    with pytest.raises(
        EngineError, match=r"(?s)GET /die: .*the server ended with code 3; the last lines.*out of memory"
    ):
        http.ask("GET", "/die")
    wait_for_end(first)
    process.start(lambda: http.answers("/"))
    second = pids_of(process)
    for pid in second:
        os.kill(pid, signal.SIGSTOP)
    process.stop()
    process.stop()
    wait_for_end(second)
    assert process.problem() == "the server was ended"


STUBBORN = (
    """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    + SERVER
)


@pytest.mark.slow
def test_a_server_whose_owner_is_killed_ends_and_starts_again_elsewhere(tmp_path):
    process, http = started(tmp_path, STUBBORN)  # SIGTERM is all that a killed owner leaves to its server
    first = pids_of(process)
    os.kill(process.pid, signal.SIGKILL)
    assert "ended with code -9" in process.problem(10)
    wait_for_end(first)
    with pytest.raises(EngineError):
        http.ask("GET", "/")
    process.start(lambda: http.answers("/"), ["more"], {"TAKEN": "now"})
    assert "blue now" in process.log.read_text()
    second = pids_of(process)
    assert len(second) == 2 and not set(first) & set(second)
    os.kill(process.pid, signal.SIGKILL)
    process.stop()  # the end of a run
    wait_for_end(second)


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(ConfigError, match="/nowhere/python is not there"):
        started(tmp_path, command=["/nowhere/python"])
    with pytest.raises(EngineError, match=r"(?s)ended with code 1; the last lines of .*ModuleNotFoundError"):
        started(tmp_path, code="import not_there")
    with pytest.raises(EngineError, match=r"was not ready after 0\.5 s: raise start_timeout_s"):
        started(tmp_path, code="import time; time.sleep(600)", start_timeout_s=0.5)


@pytest.mark.slow
def test_a_server_ends_with_a_run_that_is_killed(tmp_path):
    code = (
        "import os, pathlib, psutil, sys\n"
        "from sfumato.rollout.engines.served.server_process import ServerProcess\n"
        f"log = pathlib.Path({str(tmp_path)!r}, 'log')\n"
        f"command = [sys.executable, '-c', {SERVER!r}, '{free_port()}']\n"
        "server = ServerProcess('it', command, dict(os.environ), log, 60)\n"
        "server.start(lambda: log.exists() and 'children' in log.read_text())\n"
        "children = psutil.Process(server.pid).children(recursive=True)\n"
        "print(*(each.pid for each in children), flush=True)\n"
        "[child.kill() for child in psutil.Process().children()]\n"  # as Ray does with what it ends
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2, done.stderr
    wait_for_end(pids)


# requests


class Slow(BaseHTTPRequestHandler):
    release, num_asked = threading.Event(), 0

    def do_POST(self):
        type(self).num_asked += 1
        self.release.wait(30)
        status = 400 if self.path == "/refused" else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"error": "no such token"}' if status == 400 else b"plain")

    def log_message(self, *_):
        pass


@pytest.fixture
def slow():
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Slow,), {"release": threading.Event()}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_requests_are_asked_side_by_side_and_ended(slow):
    http = HttpServer("it", f"http://127.0.0.1:{slow.server_port}", timeout_s=20, max_requests=3)
    handler = slow.RequestHandlerClass

    async def all_of_them():
        asked = asyncio.gather(*(http.ask_async("POST", "/", {}) for _ in range(8)))
        while handler.num_asked < 3:
            await asyncio.sleep(0.01)
        http.end_all(handler.release.set)
        return await asked, await http.ask_async("POST", "/", {})

    ended, after = asyncio.run(all_of_them())
    assert ended == ["plain"] * 3 + [NOT_SENT] * 5 and after == "plain"
    with pytest.raises(RefusedByServerError, match=r"it: POST /refused: .*400.*no such token"):
        http.ask("POST", "/refused", {})
    handler.release.clear()
    with pytest.raises(EngineError, match=r"no complete answer in time \(0\.2 s\)"):
        http.ask("POST", "/", timeout_s=0.2)
    handler.release.set()
    http.close()


class OneAtATime(BaseHTTPRequestHandler):
    """Draws each completion in half a second, one after the other, and hangs on what comes after ``num_drawn``."""

    room, num_drawn = threading.Lock(), 4

    def do_POST(self):
        with self.room:
            type(self).num_drawn -= 1
            time.sleep(0.5 if self.num_drawn >= 0 else 3)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_completion_that_waits_in_the_engine_is_not_late():
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneAtATime)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    http = HttpServer("it", f"http://127.0.0.1:{server.server_port}", timeout_s=1)

    async def drawn(count):
        return await asyncio.gather(*(http.ask_async("POST", "/", {}) for _ in range(count)), return_exceptions=True)

    assert asyncio.run(drawn(4)) == [None] * 4, "the last waits for 1.5 s"
    started = time.monotonic()
    assert all(isinstance(answer, EngineError) for answer in asyncio.run(drawn(2)))
    assert time.monotonic() - started < 2, "an engine that ends nothing is late"
    server.shutdown()
    server.server_close()


def test_an_engine_has_nothing_of_the_run_s_process_group(monkeypatch):
    group = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "TORCHELASTIC_USE_AGENT_STORE": "1"}
    ours = {"LOCAL_STORE": "x", "NCCL_DEBUG": "WARN", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name, value in {**group, **ours}.items():
        monkeypatch.setenv(name, value)
    environment = engine_environment(sleeps=False, tensor_parallel_size=1)
    assert not group.keys() & environment.keys() and ours.items() <= environment.items()
    environment = engine_environment(sleeps=True, tensor_parallel_size=1)
    assert "PYTORCH_ALLOC_CONF" not in environment
    with replace_environment(environment):
        os.environ["SET_INSIDE"] = "stays"
        assert not group.keys() & os.environ.keys()
    assert {**group, **ours, "SET_INSIDE": "stays"}.items() <= os.environ.items()
    del os.environ["SET_INSIDE"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert visible_devices(1) == {"CUDA_VISIBLE_DEVICES": "1"} and visible_devices(8) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert visible_devices(1) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: each rank starts an engine"):
        visible_devices(2)


def test_a_completion_that_goes_on_has_noise_of_its_own():
    requests = [GenerationRequest([1], seed, 5, first) for seed in (0, 7, 2**63 - 1) for first in (0, 1, 2)]
    seeds = [seed_of(request) for request in requests]
    assert seeds[0::3] == [0, 7, 2**63 - 1] and len(set(seeds)) == 9 and all(0 <= seed < 2**63 for seed in seeds)


# settings


def test_engines_are_found_by_type():
    assert {"embedded", "vllm", "sglang"} <= find_variants("sfumato.rollout.engines").keys()
    engine = Variant("sfumato.rollout.engines").validate(
        {"type": "vllm", "program": "/opt/vllm/bin/vllm", "arguments": ["--enforce-eager"], "environment": {"A": "1"}}
    )
    assert engine.arguments == ("--enforce-eager",) and engine.is_server


def test_settings_that_do_not_go_together_are_refused(tmp_path, monkeypatch):
    model_and_folders = parts("/models/tiny", tmp_path)
    for fields, text in (
        ({"url": "http://a:1", "program": "/bin/vllm"}, "url and program"),
        ({"environment": {"A": "1"}}, "environment is for the server that program starts"),
        ({"url": "http://a:1", "arguments": ("--x",)}, "arguments are for an engine that is started"),
        ({"program": "/bin/vllm", "api_key_env": "KEY"}, "api_key_env is for the server at url"),
        ({"program": "/bin/vllm", "arguments": ("--api-key", "x")}, "everybody on the machine sees a key there"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size 0 must be at least 1"),
        ({"max_requests": 0}, "max_requests 0 must be at least 1"),
        ({"max_model_len": 0}, "max_model_len 0 must be at least 1"),
        ({"timeout_s": float("inf")}, "timeout_s inf must be a number of seconds above 0"),
        ({"start_timeout_s": -1.0}, r"start_timeout_s -1\.0 must be"),
        ({"gpu_memory_utilization": 1.5}, "must be above 0 and at most 1"),
    ):
        for kind in (VllmSettings, SglangSettings):
            with pytest.raises(ConfigError, match=text):
                kind(**fields)
    for settings, text in (
        (VllmSettings(url="http://a:1", api_key_env="NOT_SET"), "NOT_SET is not set"),
        (VllmSettings(url="a:1"), "url: 'a:1' must be of the form"),
    ):
        with pytest.raises(ConfigError, match=text):
            settings.build(*model_and_folders)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingDependencyError, match=r"rollout.engine.program"):
        VllmSettings().build(*model_and_folders)


def test_the_command_of_a_server(tmp_path):
    settings = VllmSettings(tensor_parallel_size=2, gpu_memory_utilization=0.5, sleep=True, arguments=("--x", "1"))
    arguments = settings._arguments(settings._options("/models/tiny", 16, 2048))
    text = " ".join(arguments)
    assert text.startswith("/models/tiny --dtype bfloat16 --tensor-parallel-size 2 --max-num-seqs 256")
    for part in ("--max-model-len 2048", "--enable-lora --max-lora-rank 16", "--enable-sleep-mode"):
        assert part in text
    assert text.endswith("--distributed-executor-backend mp --x 1"), "what a person gives comes last, and wins"
    assert "--logprobs-mode processed_logprobs --generation-config vllm" in text
    for kind, wrong in (("use_dora", True), ("target_parameters", ["mlp.experts.down_proj"]), ("r", 1000)):
        module = adapted_template()
        setattr(module.peft_config["default"], kind, wrong)
        with pytest.raises(ConfigError, match=r"model\.lora"):
            VllmSettings(url="http://127.0.0.1:1").build(*parts("/models/tiny", tmp_path, lambda module=module: module))


def test_what_runs_inside_vllm_stands_alone():
    source = WORKER_FILE.read_text()
    assert "import sfumato" not in source and "from sfumato" not in source
