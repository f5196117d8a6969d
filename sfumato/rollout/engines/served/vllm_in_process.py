"""vLLM in this process: its engine process is a child of this one, without a server between them."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.served.deadlines import CompletionDeadlines
from sfumato.rollout.engines.served.engine import DrawnTokens
from sfumato.rollout.engines.served.environment import replace_environment
from sfumato.rollout.engines.served.server_folder import ServerFolder
from sfumato.rollout.engines.served.server_process import OwnerProcess
from sfumato.rollout.engines.served.vllm_calls import ADAPTER, FILES_ARGUMENTS, HEALTH_TIMEOUT_S

LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")

EXTENSION = "sfumato.rollout.inside_vllm.VllmWorkerExtension"


def missing_vllm(why: object) -> MissingDependencyError:
    """The error of a run that would start vLLM in this environment, where it cannot be imported."""
    return MissingDependencyError(
        f"vLLM cannot be imported here ({why}): install it beside sfumato, or into an environment of its own "
        "and give its program in rollout.engine.program; docs/text_rl/engines.md says how"
    )


class InProcessCalls:
    """``VllmCalls`` on vLLM's ``AsyncLLM``, which has an event loop of its own in a thread."""

    name = "vLLM"

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        start_timeout_s: float,
        leftovers: Sequence[Path] = (),
    ) -> None:
        """Starts vLLM and waits until it is ready.

        Args:
            arguments: of ``vllm serve``, the model first; those of the engine alone.
            environment: variables that its processes start with.
            leftovers: folders of this process that are removed with the engine if this process dies.
            timeout_s: longest that an answer may take; of completions, see ``CompletionDeadlines``.
            start_timeout_s: longest that the start may take.

        Raises:
            ConfigError: when vLLM does not know an argument.
            MissingDependencyError: when vLLM is not installed here.
            EngineError: when it does not start.
        """
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise missing_vllm(error) from error
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING=0 would have vLLM change this process: unset it")
        self._arguments = list(arguments)
        self._environment = {"VLLM_NO_USAGE_STATS": "1", **environment}
        self.timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._numbers = itertools.count()
        self._deadlines = CompletionDeadlines(timeout_s)
        self._open: set[str] = set()
        """Names of open requests; changed by the event loop's thread alone."""
        self._llm: Any = None
        self._leftovers = [str(folder.absolute()) for folder in leftovers]
        self._folder: ServerFolder | None = None
        self._owner: OwnerProcess | None = None
        """vLLM's processes do not notice that this one is killed."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        # where vllm is not installed, the checker takes engines/vllm.py for it
        from vllm import AsyncEngineArgs  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        arguments = ["--model", *self._arguments, *FILES_ARGUMENTS, "--worker-extension-cls", EXTENSION]
        try:
            parsed = parser.parse_args(arguments)
        except (SystemExit, argparse.ArgumentError) as error:
            raise ConfigError(f"vLLM does not take its arguments {' '.join(arguments)} ({error})") from error
        # This process must not take the engine's folder for its own temporary files.
        tempfile.gettempdir()
        self._folder = ServerFolder(self._environment)
        self._owner = OwnerProcess([], self._folder, self._leftovers, None, self._environment)
        LOGGER.info("starting %s in this environment", self.name)
        started = time.monotonic()
        temporary = self._folder.temporary_variables(self._environment)
        with replace_environment({**self._environment, **temporary, "VLLM_RPC_BASE_PATH": temporary["TMPDIR"]}):
            self._llm = self._run(self._create_llm(AsyncEngineArgs.from_cli_args(parsed)), self._start_timeout_s)
        LOGGER.info("%s is ready after %.0f s", self.name, time.monotonic() - started)
        self.max_length = int(self._llm.model_config.max_model_len)

    async def _create_llm(self, arguments: object) -> Any:
        """Builds ``AsyncLLM`` inside the event loop that will run its requests."""
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments)

    async def generate(
        self, tokens: list[int], params: Mapping[str, object], adapter: str | None, features: object = None
    ) -> DrawnTokens:
        """See ``VllmCalls``."""
        assert features is None, "prompts with images are for a server"
        work = self._until_late(self._final_output(tokens, params, adapter))
        output = await asyncio.wrap_future(self._start_coroutine(work, None))
        (completion,) = output.outputs
        # For each position a dictionary by token id; with ``logprobs`` 0 it holds the drawn token alone.
        log_probs = [
            candidates[token].logprob
            for candidates, token in zip(completion.logprobs or [], completion.token_ids, strict=True)
        ]
        versions = [(span.version, span.end - span.start) for span in completion.weight_versions or []]
        return DrawnTokens(list(completion.token_ids), log_probs, versions, str(completion.finish_reason))

    def score(self, tokens: list[int], params: Mapping[str, object], adapter: str | None) -> list[float]:
        """See ``VllmCalls``."""
        prompt_log_probs = self._run(self._final_output(tokens, params, adapter)).prompt_logprobs[1:]
        return [candidates[token].logprob for candidates, token in zip(prompt_log_probs, tokens[1:], strict=True)]

    async def _final_output(self, tokens: list[int], params: Mapping[str, object], adapter: str | None) -> Any:
        """vLLM's ``RequestOutput`` of a finished request."""
        from vllm import SamplingParams, TokensPrompt  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        lora = None if adapter is None else LoRARequest(adapter, 1, self._adapter_folder)
        final = None
        prompt = TokensPrompt(prompt_token_ids=tokens)
        request_id = f"sfumato-{next(self._numbers)}"
        self._open.add(request_id)
        try:
            async for output in self._llm.generate(prompt, sampling, request_id, lora_request=lora):
                final = output
        finally:
            self._open.discard(request_id)
        if final is None:
            raise EngineError(f"{self.name} gave no answer")
        return final

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.pause_generation(mode=mode))
        deadline = time.monotonic() + self.timeout_s
        while mode == "abort" and self._open:
            self._run(self._llm.abort(list(self._open)))
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: {len(self._open)} requests were aborted and do not end")
            time.sleep(0.02)

    def resume(self) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.resume_generation())

    def reset_prefix_cache(self) -> None:
        """See ``VllmCalls``."""
        if not self._run(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError(f"{self.name} did not forget the keys and values of earlier weights")

    def update_weights(self, update_info: Mapping[str, object], version: int) -> None:
        """See ``VllmCalls``."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._run(self._llm.start_weight_update())
        self._run(self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info))))
        self._run(self._llm.finish_weight_update(str(version)))

    def set_version(self, version: int) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.update_weight_version(str(version)))

    def load_adapter(self, folder: str) -> None:
        """See ``VllmCalls``."""
        from vllm.lora.request import LoRARequest

        self._adapter_folder = folder
        self._run(self._llm.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True)))

    def sleep(self) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.sleep(1))

    def wake_up(self) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.wake_up())

    def health(self) -> None:
        """See ``VllmCalls``."""
        self._run(self._llm.check_health(), HEALTH_TIMEOUT_S)
        self._run(self._llm.is_paused(), HEALTH_TIMEOUT_S)  # which its engine process answers

    def restart(self) -> None:
        """See ``VllmCalls``."""
        self._shut_down()
        self._start()

    def close(self) -> None:
        """See ``VllmCalls``."""
        self._shut_down()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _shut_down(self) -> None:
        llm, owner, folder = self._llm, self._owner, self._folder
        self._llm = self._owner = self._folder = None
        if llm is not None:
            llm.shutdown()
        if owner is not None:
            owner.end()
        if folder is not None:
            folder.remove()

    async def _until_late(self, work: Coroutine[object, object, Result]) -> Result:
        """Awaits a completion. Raises EngineError at its deadline."""
        with self._deadlines.begin() as deadline:
            task = asyncio.ensure_future(work)
            try:
                while not task.done():
                    if (remaining_s := deadline() - time.monotonic()) <= 0:
                        raise EngineError(f"{self.name} ended no completion in {self.timeout_s:g} s")
                    await asyncio.wait({task}, timeout=remaining_s)
                return task.result()
            finally:
                task.cancel()

    def _start_coroutine(self, work: Coroutine[object, object, Result], timeout_s: float | None) -> Future[Result]:
        """Starts a coroutine in the event loop of vLLM's thread."""
        return asyncio.run_coroutine_threadsafe(self._await_llm(work, timeout_s), self._loop)

    def _run(self, work: Coroutine[object, object, Result], timeout_s: float | None = None) -> Result:
        """Runs a coroutine in the event loop of vLLM's thread and waits for its result."""
        return self._start_coroutine(work, timeout_s or self.timeout_s).result()

    async def _await_llm(self, work: Coroutine[object, object, Result], timeout_s: float | None) -> Result:
        """Awaits a call of vLLM; whatever it raises, or a timeout, becomes an EngineError."""
        try:
            return await asyncio.wait_for(work, timeout_s)
        except TimeoutError as error:
            within = "" if timeout_s is None else f" in {timeout_s:g} s"
            raise EngineError(f"{self.name} gave no answer{within}") from error
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{self.name} failed: {type(error).__name__}: {error}") from error
