"""SGLang as the engine: a server that is started or runs already, through its documented HTTP interface.

It was written after SGLang's documentation and tested against answers of that form, not against SGLang itself, which
needs a GPU. Its deterministic mode is required, which keys noise by (seed, position in the sequence).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import UNEXPECTED_ANSWER, EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.served.engine import ABORTED, DrawnTokens, ServedEngine
from sfumato.rollout.engines.served.environment import engine_environment
from sfumato.rollout.engines.served.http_server import LOOPBACK, NOT_SENT, HttpServer
from sfumato.rollout.engines.served.server_process import ServerProcess
from sfumato.rollout.engines.served.weight_files import WeightFiles, process_name
from sfumato.rollout.engines.served_settings import ServedSettings

HEALTH_TIMEOUT_S = 30.0
"""Within which a live server draws a token."""

MEMORY = ["kv_cache", "weights"]
"""SGLang's tags of the memory that ``release`` frees."""


class SglangServer(ServedEngine):
    """``Engine`` of ``base.py`` and ``Receiver`` on an SGLang server."""

    def __init__(self, http: HttpServer, files: WeightFiles, model_path: str) -> None:
        """Starts the server if there is a process, waits for it, and checks that it is the right one.

        Args:
            http: client of the server, whose process, if it has one, is not started yet.
            files: writes the weights that it loads.
            model_path: folder of the model, as the server sees it.

        Raises:
            ConfigError: when the server has another model, or was started without options that are needed.
            EngineError: when it does not start or answer.
        """
        self.http = http
        self.model_path = model_path
        self.can_sleep = False
        self._num_loads = 0  # weight updates, by which a request sees that one came while it was open
        super().__init__(http.name, files, 0)
        try:
            if http.process is not None:
                self._start()
            self._identify()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.http.start("/health_generate", HEALTH_TIMEOUT_S)

    def _identify(self) -> None:
        """Reads the server's limits. Raises ConfigError when it has another model or lacks options."""
        info = self.http.ask("GET", "/get_server_info", timeout_s=HEALTH_TIMEOUT_S)
        model = info.get("model_path")
        length = info.get("max_req_input_len") or info.get("context_length")
        if Path(str(model)) != Path(self.model_path):
            raise ConfigError(
                f"{self.name} has the model {model}, the run {self.model_path}: give both the same folder, under the "
                "same path"
            )
        if not info.get("enable_deterministic_inference"):
            raise ConfigError(
                f"{self.name} does not draw by the seed of each request: start it with --enable-deterministic-inference"
            )
        if not isinstance(length, int):
            raise ConfigError(
                f"{self.name} does not say how long a sequence may be: start it with --context-length, a number"
            )
        self.max_length = length
        self.can_sleep = bool(info.get("enable_memory_saver"))

    def flush(self) -> None:
        """See ``Engine``."""
        self.http.ask("POST", "/flush_cache")

    def release(self) -> None:
        """See ``Engine``.

        Raises:
            ConfigError: when the server was started without its memory saver.
        """
        if not self.can_sleep:
            raise ConfigError(f"{self.name} gives no memory to others: start it with --enable-memory-saver")
        self.http.ask("POST", "/release_memory_occupation", {"tags": MEMORY})

    def restore(self) -> None:
        """See ``Engine``. Weights are loaded again from the files of the version in use."""
        self.http.ask("POST", "/resume_memory_occupation", {"tags": MEMORY})
        self.load_files(self.applied or Path(self.model_path), self.version)

    def health(self) -> None:
        """See ``Engine``. The check draws a token."""
        if self._is_closed:
            raise EngineError(f"{self.name} is closed")
        if self.http.process is not None and (problem := self.http.process.problem()):
            raise EngineError(problem)
        self.http.ask("GET", "/health_generate", timeout_s=HEALTH_TIMEOUT_S)

    def load_files(self, folder: Path, version: int) -> None:
        """See ``ServedEngine``."""
        self._num_loads += 1
        label = self.files.label_of(version)
        body = {"model_path": str(folder.absolute()), "weight_version": label, "flush_cache": True}
        answer = self.http.ask("POST", "/update_weights_from_disk", body)
        if not answer.get("success"):
            raise EngineError(f"{self.name}: /update_weights_from_disk: {answer.get('message')}")

    async def _generate(self, request: GenerationRequest, sampling: Sampling) -> DrawnTokens:
        num_loads = self._num_loads
        body = {"input_ids": list(request.prompt_ids), "sampling_params": sampling_params(request, sampling)}
        answer = await self.http.ask_async("POST", "/generate", {**body, "return_logprob": True, "stream": False})
        if answer is NOT_SENT:
            return ABORTED
        try:
            meta = answer["meta_info"]
            tokens = [(int(token), float(log_prob)) for log_prob, token, *_ in meta["output_token_logprobs"]]
            spans = meta.get("weight_versions")
            reason = (meta["finish_reason"] or {})["type"]
            label = meta["weight_version"]
        except UNEXPECTED_ANSWER as error:
            raise EngineError(f"{self.name} answered in a way that is not known: {str(answer)[:300]}") from error
        if spans is None and num_loads != self._num_loads:
            raise EngineError(
                f"{self.name} does not say by which weights each token was drawn, which changed meanwhile: take a "
                "newer SGLang, or abort what is under way before weights change"
            )
        if spans is None:
            versions = [(label, len(tokens))]
        else:
            versions = [(span["version"], span["end"] - span["start"]) for span in spans]
        return DrawnTokens([token for token, _ in tokens], [log_prob for _, log_prob in tokens], versions, reason)

    def _score(self, tokens: list[int]) -> list[float]:
        params = {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0}
        body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        scored = self.http.ask("POST", "/generate", body)["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in scored] != tokens:
            raise EngineError(f"{self.name} scored other tokens than it was given")
        return [float(log_prob) for log_prob, *_ in scored[1:]]

    def _pause(self, mode: Literal["keep", "abort"]) -> None:
        """The mode ``retract`` drops keys and values, which would be those of earlier weights."""
        self.http.ask("POST", "/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})
        if mode == "abort":
            self.http.end_all(lambda: self.http.ask("POST", "/abort_request", {"abort_all": True}))

    def _resume(self) -> None:
        self.http.ask("POST", "/continue_generation", {})

    def _restart(self) -> None:
        self._start()
        self._identify()

    def _close(self) -> None:
        self.http.close()


def sampling_params(request: GenerationRequest, sampling: Sampling) -> JsonObject:
    """SGLang's parameters of a request.

    Raises:
        ConfigError: for top_p and top_k, which SGLang's log-probs do not include.
    """
    if sampling.top_p != 1 or sampling.top_k:
        raise ConfigError(
            "SGLang gives log-probs from before top_p and top_k, not those that tokens were drawn with: set top_p to 1 "
            "and top_k to 0, or take another rollout.engine"
        )
    key = hashlib.blake2b(str(request.seed).encode(), digest_size=8).digest()
    params = {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": int.from_bytes(key, "little") >> 33,  # 31 bits, which every kernel takes
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only the tokens above end a completion
        "skip_special_tokens": False,
    }
    return params | ({"stop": list(sampling.stop)} if sampling.stop else {})


@dataclass(frozen=True, kw_only=True)
class SglangSettings(ServedSettings):
    """SGLang as a server. Not tested with SGLang itself: see the page."""

    type: ClassVar[str] = "sglang"

    program: str = ""
    """Python of an environment with SGLang, such as /opt/sglang/bin/python: a server is started with it on this
    machine, and ended with the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.url or self.program):
            raise ConfigError("rollout.engine: sglang needs either the url of a server or the program that starts one")

    def build(self, model_path: str, template: nn.Module, folder: Path, max_length: int | None = None) -> SglangServer:
        """Starts the server, or connects to the one at url.

        Args:
            model_path: folder of the model's own files, which the engine loads, too.
            template: transformers' module as the actor has it, on meta, with adapters if adapters alone are trained:
                its names are those that weights are sent by.
            folder: the run folder.
            max_length: tokens of the longest prompt with its completion that will be asked for, where max_model_len
                does not say; None: as many as the engine takes.

        Raises:
            ConfigError: when settings do not go together, adapters alone are trained, or the server is another one.
            EngineError: when it does not start.
        """
        key = self.api_key
        model_path = str(Path(model_path).absolute())
        files = self.weight_files(template, folder, model_path)
        if files.are_adapters:
            raise ConfigError(
                "SGLang cannot put adapters in the place of others that requests are drawn by: train without "
                "model.lora, or take another rollout.engine"
            )
        process = None
        url = self.url
        if self.program:
            url = LOOPBACK
            arguments = self._arguments(model_path, self.max_model_len or max_length)
            command = [self.program, *arguments, *self.arguments]
            # The server has an environment of its own, which must not import from this one's paths.
            inherited = engine_environment(sleeps=self.sleep, tensor_parallel_size=self.tensor_parallel_size)
            environment = {**inherited, "PYTHONPATH": "", **self.environment}
            log = folder / f"sglang-{process_name()}.log"
            leftovers = [files.folder]
            process = ServerProcess("the SGLang server", command, environment, log, self.start_timeout_s, leftovers)
        name = f"the SGLang server at {url}" if self.url else "the SGLang server"
        http = HttpServer(
            name, url, api_key=key, timeout_s=self.timeout_s, max_requests=self.max_requests, process=process
        )
        return SglangServer(http, files, model_path)

    def _arguments(self, model_path: str, max_length: int | None) -> Sequence[str]:
        if max_length is None:
            raise ConfigError("rollout.engine.max_model_len is needed for the SGLang server that is started")
        arguments = [
            "-m",
            "sglang.launch_server",
            "--model-path",
            model_path,
            "--host",
            "127.0.0.1",
        ]
        arguments += ["--dtype", self.dtype, "--tp-size", str(self.tensor_parallel_size)]
        arguments += ["--max-running-requests", str(self.max_requests), "--context-length", str(max_length)]
        if self.gpu_memory_utilization is not None:
            arguments += ["--mem-fraction-static", str(self.gpu_memory_utilization)]
        return [*arguments, "--enable-deterministic-inference", *(["--enable-memory-saver"] if self.sleep else [])]
