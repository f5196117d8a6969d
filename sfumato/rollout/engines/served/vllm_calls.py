"""How vLLM is asked: the calls that ``VllmEngine`` needs, over HTTP.

``/inference/v1/generate`` takes and gives token ids (``--enable-scale-out``); pausing, weights and caches have their
paths in development mode (``VLLM_SERVER_DEV_MODE=1``).
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from sfumato import rollout
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import UNEXPECTED_ANSWER, EngineError
from sfumato.rollout.engines.served.engine import ABORTED, DrawnTokens
from sfumato.rollout.engines.served.http_server import NOT_SENT, HttpServer
from sfumato.rollout.engines.served.server_process import ServerProcess, free_port
from sfumato.rollout.engines.served.vllm_images import render_request

BACKEND = "sfumato_files"
"""Of vLLM's weight transfer interface, which ``rollout/inside_vllm.py`` adds to it."""

WORKER_MODULE = "sfumato_inside_vllm"
"""Name of the copy of that file in the server's environment."""

WORKER_FILE = Path(rollout.__file__).parent / "inside_vllm.py"

ADAPTER = "policy"
"""Name of the adapters in vLLM."""

HEALTH_TIMEOUT_S = 20.0
"""In which a server that lives answers."""

FILES_ARGUMENTS = ("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}')

SERVER_ARGUMENTS = (
    "--enable-scale-out",
    *FILES_ARGUMENTS,
    "--worker-extension-cls",
    f"{WORKER_MODULE}.VllmWorkerExtension",
)

SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmCalls(Protocol):
    """What ``VllmEngine`` asks of vLLM. All raise EngineError when it died, refuses or does not answer in time."""

    name: str
    max_length: int
    """Tokens of the longest prompt with its completion."""

    async def generate(
        self, tokens: list[int], params: Mapping[str, Any], adapter: str | None, features: Any = None
    ) -> DrawnTokens:
        """Draws a completion by vLLM's sampling parameters; ``features`` are of the images among the tokens."""
        ...

    def score(self, tokens: list[int], params: Mapping[str, Any], adapter: str | None) -> list[float]:
        """Log-probs of all given tokens but the first."""
        ...

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stops drawing; ``abort`` returns when nothing is under way."""
        ...

    def resume(self) -> None:
        """Goes on."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets keys and values, those of requests under way too."""
        ...

    def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """Loads weights in the phases of the weight transfer interface."""
        ...

    def set_version(self, version: int) -> None:
        """Labels what is drawn from now on."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Loads adapters, in the place of those before."""
        ...

    def sleep(self) -> None:
        """Gives GPU memory to others."""
        ...

    def wake_up(self) -> None:
        """Takes it back."""
        ...

    def health(self) -> None:
        """Raises EngineError when it does not live."""
        ...

    def restart(self) -> None:
        """Ends its processes and starts them again."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


class ServerCalls:
    """A server, started here or by others."""

    def __init__(
        self,
        *,
        url: str,
        api_key: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        model_path: str,
        log: Path,
        timeout_s: float,
        start_timeout_s: float,
        max_requests: int,
        has_adapter: bool,
    ) -> None:
        """Starts the server if there is a command, and waits for it; looks whether it is the right one.

        Args:
            url: of one that runs; empty with a command.
            api_key: of one that runs; one that is started is given a key of its own.
            command: starts one on this machine; empty with a url.
            environment: more variables of the command.
            model_path: folder of the model.
            log: file of the command's output.
            timeout_s: longest that an answer may take.
            start_timeout_s: longest that the start may take.
            max_requests: on their way at a time.
            has_adapter: whether adapters will be loaded.

        Raises:
            ConfigError: when it has another model or lacks what is needed.
            EngineError: when it does not start or answer.
        """
        self.model_path, self._process, self._modules = model_path, None, None
        self.name = f"the vLLM server at {url}" if url else "the vLLM server"
        if command:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            self._modules = tempfile.TemporaryDirectory(prefix="sfumato-vllm-")
            shutil.copy(WORKER_FILE, Path(self._modules.name) / f"{WORKER_MODULE}.py")
            api_key = secrets.token_hex(32)  # by the environment, which others do not see as they do a command
            key = {"VLLM_API_KEY": api_key}
            variables = {**SERVER_ENVIRONMENT, "PYTHONPATH": self._modules.name, **environment, **key}
            arguments = [*command, "--host", "127.0.0.1", "--port", str(port), *SERVER_ARGUMENTS]
            self._process = ServerProcess(self.name, arguments, variables, log, start_timeout_s)
        self.http = HttpServer(
            self.name, url, api_key=api_key, timeout_s=timeout_s, max_requests=max_requests, process=self._process
        )
        try:
            if self._process is not None:
                self._process.start(lambda: self.http.answers("/health"))
            self.max_length = self._identify(has_adapter)
        except BaseException:
            self.close()
            raise

    def _identify(self, has_adapter: bool) -> int:
        """Refuses a server with another model or without what is needed. Returns the tokens that it takes."""
        models = self.http.ask("GET", "/v1/models", timeout_s=HEALTH_TIMEOUT_S)["data"]
        base = next((model for model in models if model.get("parent") is None), models[0])
        if Path(base["root"]) != Path(self.model_path):
            raise ConfigError(
                f"{self.name} has the model {base['root']}, the run {self.model_path}: give both the same folder, "
                "under the same path"
            )
        try:
            self.http.ask("GET", "/is_paused", timeout_s=HEALTH_TIMEOUT_S)
            self.http.ask("POST", "/init_weight_transfer_engine", {"init_info": {}})
            probe = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
            self.http.ask("POST", "/inference/v1/generate", {"token_ids": [0], "sampling_params": probe})
        except EngineError as error:
            needed = " ".join(f"'{argument}'" if "{" in argument else argument for argument in SERVER_ARGUMENTS)
            variables = " ".join(f"{key}={value}" for key, value in SERVER_ENVIRONMENT.items())
            raise ConfigError(
                f"{self.name} lacks what is needed ({error}): start it as the page docs/text_rl/engines.md says, with "
                f"{variables} and {needed} --logprobs-mode processed_logprobs --generation-config vllm"
                + (" --enable-lora" if has_adapter else "")
            ) from error
        return int(base["max_model_len"])

    async def render(self, images: Sequence[bytes]) -> Any:
        """What vLLM's processor makes of PNG files; ``NOT_SENT`` as ``ask_async``."""
        return await self.http.ask_async("POST", "/v1/chat/completions/render", render_request(images))

    async def generate(
        self, tokens: list[int], params: Mapping[str, Any], adapter: str | None, features: Any = None
    ) -> DrawnTokens:
        """See ``VllmCalls``."""
        body = {"token_ids": tokens, "sampling_params": params, **_model(adapter)}
        body |= {} if features is None else {"features": features}
        answer = await self.http.ask_async("POST", "/inference/v1/generate", body)
        if answer is NOT_SENT:
            return ABORTED
        try:
            (choice,) = answer["choices"]
            content = (choice["logprobs"] or {}).get("content") or []
            spans = choice["weight_versions"] or []
            versions = [(span["version"], span["end"] - span["start"]) for span in spans]
            drawn = DrawnTokens(
                choice["token_ids"],
                [token_log_prob["logprob"] for token_log_prob in content],
                versions,
                choice["finish_reason"],
            )
            ids = [token_log_prob["token_id"] for token_log_prob in content]
        except UNEXPECTED_ANSWER as error:
            raise EngineError(f"{self.name} answered in a way that is not known: {str(answer)[:300]}") from error
        if ids != drawn.token_ids:
            raise EngineError(f"{self.name} gave log-probs of other tokens than it drew")
        return drawn

    def score(self, tokens: list[int], params: Mapping[str, Any], adapter: str | None) -> list[float]:
        """See ``VllmCalls``."""
        body = {"token_ids": tokens, "sampling_params": params, **_model(adapter)}
        answer = self.http.ask("POST", "/inference/v1/generate", body)
        try:
            by_token = answer["prompt_logprobs"][1:]
            return [
                float(candidates[str(token)]["logprob"]) for candidates, token in zip(by_token, tokens[1:], strict=True)
            ]
        except UNEXPECTED_ANSWER as error:
            raise EngineError(f"{self.name} answered in a way that is not known: {str(answer)[:300]}") from error

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", f"/pause?mode={mode}")
        if mode == "abort":
            self.http.end_all(lambda: self.http.ask("POST", "/abort_requests", {}))

    def resume(self) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", "/resume")

    def reset_prefix_cache(self) -> None:
        """See ``VllmCalls``."""
        if not self.http.ask("POST", "/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise EngineError(f"{self.name} did not forget the keys and values of earlier weights")

    def update_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", "/start_weight_update")
        self.http.ask("POST", "/update_weights", {"update_info": dict(update_info)})
        self.http.ask("POST", "/finish_weight_update", {"weight_version": str(version)})

    def set_version(self, version: int) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", "/update_weight_version", {"new_version": str(version)})

    def load_adapter(self, folder: str) -> None:
        """See ``VllmCalls``."""
        self.http.ask(
            "POST", "/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True}
        )

    def sleep(self) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", "/sleep?level=1")
        if not self.http.ask("GET", "/is_sleeping")["is_sleeping"]:
            raise EngineError(f"{self.name} does not sleep")

    def wake_up(self) -> None:
        """See ``VllmCalls``."""
        self.http.ask("POST", "/wake_up")

    def health(self) -> None:
        """See ``VllmCalls``."""
        if self._process is not None and (problem := self._process.problem()):
            raise EngineError(problem)
        self.http.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)

    def restart(self) -> None:
        """See ``VllmCalls``."""
        if self._process is None:
            raise ConfigError(f"{self.name} was not started by this run, so it cannot be started again: do it there")
        self._process.start(lambda: self.http.answers("/health"))
        self.http.ask("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def close(self) -> None:
        """See ``VllmCalls``."""
        if self._process is not None:
            self._process.stop()
        self.http.close()
        if self._modules is not None:
            self._modules.cleanup()


def _model(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"model": adapter}
