"""The calls of vLLM that ``VllmEngine`` needs, and their implementation over HTTP.

``/inference/v1/generate`` takes and returns token ids (``--enable-scale-out``); the paths for pausing, weights and
caches exist in development mode alone (``VLLM_SERVER_DEV_MODE=1``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from sfumato import rollout
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import UNEXPECTED_ANSWER, EngineError
from sfumato.rollout.engines.served.engine import ABORTED, DrawnTokens
from sfumato.rollout.engines.served.http_server import LOOPBACK, NOT_SENT, HttpServer, RefusedByServerError
from sfumato.rollout.engines.served.server_process import ServerProcess
from sfumato.rollout.engines.served.versions import find_release
from sfumato.rollout.engines.served.vllm_images import render_request

LOGGER = logging.getLogger(__name__)

BACKEND = "sfumato_files"
"""Name of the backend that ``rollout/inside_vllm.py`` adds to vLLM's weight transfer interface."""

WORKER_MODULE = "sfumato_inside_vllm"
"""Module name of the copy of WORKER_FILE that a started server imports."""

WORKER_FILE = Path(rollout.__file__).parent / "inside_vllm.py"

ADAPTER = "policy"
"""Name of the adapters in vLLM."""

HEALTH_TIMEOUT_S = 20.0
"""Within which a live server answers."""

INIT_INFO = {"names_versions": True}
"""What ``rollout/inside_vllm.py`` is told at the start."""

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
    """The calls that ``VllmEngine`` makes. All raise EngineError when vLLM died, refuses or does not answer in time."""

    name: str
    max_length: int
    """Tokens of the longest prompt with its completion."""

    async def generate(
        self, tokens: list[int], params: Mapping[str, object], adapter: str | None, features: object = None
    ) -> DrawnTokens:
        """Draws a completion.

        Args:
            tokens: the prompt.
            params: vLLM's sampling parameters.
            adapter: name of the adapters that are applied; None: the plain model.
            features: what ``RenderedImages`` made of the images in the prompt; None without images.
        """
        ...

    def score(self, tokens: list[int], params: Mapping[str, object], adapter: str | None) -> list[float]:
        """Log-probs of all tokens but the first."""
        ...

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stops drawing; with ``abort`` it returns when no request is open."""
        ...

    def resume(self) -> None:
        """Resumes drawing."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drops keys and values, those of open requests too."""
        ...

    def update_weights(self, update_info: Mapping[str, object], version: int) -> None:
        """Loads weights in the phases of the weight transfer interface."""
        ...

    def set_version(self, version: int) -> None:
        """Labels tokens that are drawn from now on with this version."""
        ...

    def load_adapter(self, folder: str) -> None:
        """Loads adapters in place of the earlier ones."""
        ...

    def sleep(self) -> None:
        """Frees GPU memory."""
        ...

    def wake_up(self) -> None:
        """Allocates the GPU memory again."""
        ...

    def health(self) -> None:
        """Raises EngineError when vLLM does not answer."""
        ...

    def restart(self) -> None:
        """Ends vLLM's processes and starts them again."""
        ...

    def close(self) -> None:
        """Ends the processes that were started."""
        ...


class ServerCalls:
    """``VllmCalls`` on a server, which was started here or runs already."""

    def __init__(
        self,
        *,
        url: str,
        api_key: str,
        command: Sequence[str],
        inherited: Mapping[str, str],
        environment: Mapping[str, str],
        leftovers: Sequence[Path],
        model_path: str,
        log: Path,
        timeout_s: float,
        start_timeout_s: float,
        max_requests: int,
        has_adapter: bool,
    ) -> None:
        """Starts the server if there is a command, waits for it, and checks that it is the right one.

        Args:
            url: of a server that runs already; empty with a command.
            api_key: of a server that runs already; a started server gets a key of its own.
            command: starts a server on this machine; empty with a url.
            inherited: environment variables of the command.
            environment: further ones, which win over those that the server needs.
            leftovers: folders that are removed with the server if this process dies.
            model_path: folder of the model.
            log: file of the command's output.
            timeout_s: longest that an answer may take.
            start_timeout_s: longest that the start may take.
            max_requests: most requests that are sent at a time.
            has_adapter: whether adapters will be loaded.

        Raises:
            ConfigError: when the server has another model, or was started without options that are needed.
            EngineError: when it does not start or answer.
        """
        self.model_path = model_path
        process = None
        self.name = f"the vLLM server at {url}" if url else "the vLLM server"
        if command:
            url = LOOPBACK
            # The server has an environment of its own, which must not import from this one's paths.
            variables = {**inherited, **SERVER_ENVIRONMENT, "PYTHONPATH": "", **environment}
            arguments = [*command, "--host", "127.0.0.1", *SERVER_ARGUMENTS]
            modules = {WORKER_MODULE: WORKER_FILE}
            process = ServerProcess(self.name, arguments, variables, log, start_timeout_s, leftovers, modules)
        self.http = HttpServer(
            self.name, url, api_key=api_key, timeout_s=timeout_s, max_requests=max_requests, process=process
        )
        try:
            if self.http.process is not None:
                self._start()
            self.max_length = self._identify(has_adapter)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.http.start("/health", key_variable="VLLM_API_KEY")

    def _identify(self, has_adapter: bool) -> int:
        """Checks a server's model and options.

        Returns:
            Tokens of the longest sequence that it takes.

        Raises:
            ConfigError: when it has another model, or was started without options that are needed.
        """
        version = str(self.http.ask("GET", "/version", timeout_s=HEALTH_TIMEOUT_S)["version"])
        if find_release("vLLM", version) is None:
            LOGGER.warning("%s is vLLM %s, which is not known to this version of sfumato", self.name, version)
        try:
            models = self.http.ask("GET", "/v1/models", timeout_s=HEALTH_TIMEOUT_S)["data"]
        except RefusedByServerError as error:
            raise ConfigError(
                f"{self.name} does not tell which model it has ({error}): where it asks for a key, name the "
                "environment variable that holds it in rollout.engine.api_key_env"
            ) from error
        # Adapters are listed as models, too, with the model that they belong to as parent.
        base = next((model for model in models if model.get("parent") is None), models[0])
        if Path(base["root"]) != Path(self.model_path):
            raise ConfigError(
                f"{self.name} has the model {base['root']}, the run {self.model_path}: give both the same folder, "
                "under the same path"
            )
        try:
            self.http.ask("GET", "/is_paused", timeout_s=HEALTH_TIMEOUT_S)
            self.http.ask("POST", "/init_weight_transfer_engine", {"init_info": INIT_INFO})
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

    async def render(self, images: Sequence[bytes]) -> object:
        """The answer of vLLM's processor for PNG files; ``NOT_SENT`` as ``ask_async``."""
        return await self.http.ask_async("POST", "/v1/chat/completions/render", render_request(images))

    async def generate(
        self, tokens: list[int], params: Mapping[str, object], adapter: str | None, features: object = None
    ) -> DrawnTokens:
        """See ``VllmCalls``."""
        body = {"token_ids": tokens, "sampling_params": params, **_model_field(adapter)}
        body |= {} if features is None else {"features": features}
        answer = await self.http.ask_async("POST", "/inference/v1/generate", body)
        if answer is NOT_SENT:
            return ABORTED
        try:
            (choice,) = answer["choices"]
            content = (choice["logprobs"] or {}).get("content") or []
            spans = choice["weight_versions"] or []
            versions = [(span["version"], span["end"] - span["start"]) for span in spans]
            log_probs = [token["logprob"] for token in content]
            drawn = DrawnTokens(choice["token_ids"], log_probs, versions, choice["finish_reason"])
            ids = [token["token_id"] for token in content]
        except UNEXPECTED_ANSWER as error:
            raise EngineError(f"{self.name} answered in a way that is not known: {str(answer)[:300]}") from error
        if ids != drawn.token_ids:
            raise EngineError(f"{self.name} gave log-probs of other tokens than it drew")
        return drawn

    def score(self, tokens: list[int], params: Mapping[str, object], adapter: str | None) -> list[float]:
        """See ``VllmCalls``."""
        body = {"token_ids": tokens, "sampling_params": params, **_model_field(adapter)}
        answer = self.http.ask("POST", "/inference/v1/generate", body)
        try:
            by_position = answer["prompt_logprobs"][1:]  # the first token has none
            return [
                float(candidates[str(token)]["logprob"])
                for candidates, token in zip(by_position, tokens[1:], strict=True)
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

    def update_weights(self, update_info: Mapping[str, object], version: int) -> None:
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
        if self.http.process is not None and (problem := self.http.process.problem()):
            raise EngineError(problem)
        self.http.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)

    def restart(self) -> None:
        """See ``VllmCalls``."""
        self._start()
        self.http.ask("POST", "/init_weight_transfer_engine", {"init_info": INIT_INFO})

    def close(self) -> None:
        """See ``VllmCalls``."""
        self.http.close()


def _model_field(adapter: str | None) -> dict[str, str]:
    """The field of a request that names adapters, if there are some."""
    return {} if adapter is None else {"model": adapter}
