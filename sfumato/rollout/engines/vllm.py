"""vLLM as the engine: in this process, or as a server that is started or runs already.

This file decides what is asked of vLLM and reads the answers; ``vllm_calls.py`` (HTTP) and ``vllm_in_process.py`` make
the calls. Written for and tested with vLLM 0.32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from torch import nn

from sfumato.config.open_mappings import JsonObject
from sfumato.data.media.vision import MediaProcessor
from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.served.engine import ABORTED, DrawnTokens, ServedEngine, seed_of
from sfumato.rollout.engines.served.environment import engine_environment
from sfumato.rollout.engines.served.http_server import NOT_SENT
from sfumato.rollout.engines.served.vllm_calls import ADAPTER, ServerCalls, VllmCalls
from sfumato.rollout.engines.served.vllm_images import RenderedImages, limits_of
from sfumato.rollout.engines.served.vllm_in_process import InProcessCalls, missing_vllm
from sfumato.rollout.engines.served.weight_files import WeightFiles, process_name
from sfumato.rollout.engines.served_settings import ServedSettings

if TYPE_CHECKING:
    from peft import LoraConfig

COLDEST = 0.01
"""vLLM raises lower temperatures than this to it."""


class VllmEngine(ServedEngine):
    """``Engine`` of ``base.py`` and ``Receiver`` on vLLM."""

    def __init__(
        self,
        calls: VllmCalls,
        files: WeightFiles,
        model_path: str,
        can_sleep: bool = False,
        reader: MediaProcessor | None = None,
    ) -> None:
        """vLLM must be ready.

        Args:
            calls: to vLLM.
            files: writes the weights that vLLM loads.
            model_path: folder of the model's own files, as vLLM sees it.
            can_sleep: whether vLLM was started with its sleep mode.
            reader: of the images in prompts, for a server alone; None for prompts of text.
        """
        super().__init__(calls.name, files, calls.max_length)
        # Only a server renders images: ``VllmSettings.takes_images``.
        self._images = None if reader is None else RenderedImages(reader, cast("ServerCalls", calls).render)
        self.calls = calls
        self.model_path = model_path
        self.can_sleep = can_sleep
        self._has_adapter = False

    def flush(self) -> None:
        """See ``Engine``."""
        self.calls.reset_prefix_cache()

    def release(self) -> None:
        """See ``Engine``. Weights are moved to CPU memory.

        Raises:
            ConfigError: without the setting ``sleep``, or on a CPU, where vLLM has no sleep mode.
        """
        if not self.can_sleep:
            raise ConfigError(f"{self.name} gives no memory to others without its sleep mode: set sleep to true")
        self.calls.sleep()

    def restore(self) -> None:
        """See ``Engine``."""
        self.calls.wake_up()

    def health(self) -> None:
        """See ``Engine``."""
        if self._is_closed:
            raise EngineError(f"{self.name} is closed")
        self.calls.health()

    def load_files(self, folder: Path, version: int) -> None:
        """See ``ServedEngine``."""
        if self.files.are_adapters:
            self.calls.load_adapter(str(folder.absolute()))
            self._has_adapter = True
            self.calls.set_version(self.files.label_of(version))
        else:
            places = {"folder": str(folder.absolute()), "base": self.model_path, "version": str(version)}
            self.calls.update_weights(places, self.files.label_of(version))

    async def _generate(self, request: GenerationRequest, sampling: Sampling) -> DrawnTokens:
        features = None
        if request.images is not None:
            assert self._images is not None, "built without a reader of images"
            features = await self._images.render_features(request.prompt_ids, request.images)
            if features is NOT_SENT:
                return ABORTED
        params = sampling_params(request, sampling)
        return await self.calls.generate(list(request.prompt_ids), params, self._adapter, features)

    def _score(self, tokens: list[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        return self.calls.score(tokens, params, self._adapter)

    @property
    def _adapter(self) -> str | None:
        return ADAPTER if self._has_adapter else None

    def _pause(self, mode: Literal["keep", "abort"]) -> None:
        self.calls.pause(mode)

    def _resume(self) -> None:
        self.calls.resume()

    def _restart(self) -> None:
        self._has_adapter = False
        self.calls.restart()

    def _close(self) -> None:
        self.calls.close()


def sampling_params(request: GenerationRequest, sampling: Sampling) -> JsonObject:
    """vLLM's parameters of a request.

    Raises:
        ConfigError: for a temperature that vLLM would change.
    """
    if 0 < sampling.temperature < COLDEST:
        raise ConfigError(
            f"vLLM draws by a temperature of {COLDEST:g} where {sampling.temperature:g} is asked for: take at least "
            f"{COLDEST:g}, or 0 for the likeliest token"
        )
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed_of(request),
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # only the tokens above end a completion
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
    }
    if sampling.stop:
        # vLLM looks for stop texts in what it decodes. It returns all tokens, those of the stop text among them.
        params |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
    return params


@dataclass(frozen=True, kw_only=True)
class VllmSettings(ServedSettings):
    """vLLM. Without url and program it runs in this process and child processes, and must be installed here."""

    type: ClassVar[str] = "vllm"

    program: str = ""
    """vLLM's program in an environment of its own, such as /opt/vllm/bin/vllm: a server is started with it on this
    machine, and ended with the run."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images: only with a server."""
        return bool(self.url or self.program)

    def build(
        self,
        model_path: str,
        template: nn.Module,
        folder: Path,
        max_length: int | None = None,
        reader: MediaProcessor | None = None,
    ) -> VllmEngine:
        """Starts vLLM, or connects to the server at url.

        Args:
            model_path: folder of the model's own files, which the engine loads, too.
            template: transformers' module as the actor has it, on meta, with adapters if adapters alone are trained:
                its names are those that weights are sent by.
            folder: the run folder.
            max_length: tokens of the longest prompt with its completion that will be asked for, where max_model_len
                does not say; None: as many as the engine takes.
            reader: of the images in prompts; None for prompts of text.

        Raises:
            ConfigError: when settings do not go together, the server has another model, or vLLM is not there.
            EngineError: when it does not start.
        """
        model_path = str(Path(model_path).absolute())
        files = self.weight_files(template, folder, model_path)
        rank = max_rank(template) if files.are_adapters else 0
        options = self._options(model_path, rank, max_length)
        if reader is not None:
            options["mm_processor_kwargs"] = limits_of(reader)
        arguments = self._arguments(options)
        inherited = engine_environment(sleeps=self.sleep, tensor_parallel_size=self.tensor_parallel_size)
        if self.url or self.program:
            calls: VllmCalls = ServerCalls(
                url=self.url,
                api_key=self.api_key,
                command=[self.program, "serve", *arguments] if self.program else [],
                inherited=inherited,
                environment=self.environment,
                leftovers=[files.folder],
                model_path=model_path,
                log=folder / f"vllm-{process_name()}.log",
                timeout_s=self.timeout_s,
                start_timeout_s=self.start_timeout_s,
                max_requests=self.max_requests,
                has_adapter=bool(rank),
            )
        else:
            calls = InProcessCalls(arguments, inherited, self.timeout_s, self.start_timeout_s, [files.folder])
        return VllmEngine(calls, files, model_path, self.sleep, reader)

    def check_installed(self) -> str:
        """See ``ServedSettings``."""
        if self.url or self.program:
            return super().check_installed()
        if importlib.util.find_spec("vllm") is None:
            raise missing_vllm("No module named 'vllm'")
        return "whether it takes the model and its arguments"

    def _options(self, model_path: str, rank: int, max_length: int | None) -> dict[str, object]:
        """vLLM's settings, by the names that its Python arguments and its command line share.

        Args:
            model_path: folder of the model.
            rank: of the adapters; 0 without.
            max_length: tokens of the longest sequence, where ``max_model_len`` is not set.
        """
        options: dict[str, object] = {
            "model": model_path,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_num_seqs": self.max_requests,
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled: after temperature and top_p
            "generation_config": "vllm",  # no sampling defaults of the model's folder
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len or max_length,
            "enable_sleep_mode": self.sleep or None,
            "enable_lora": bool(rank) or None,
            "max_lora_rank": rank or None,
            # inside a process of Ray vLLM would ask Ray for processes, which has given its GPUs to this one
            "distributed_executor_backend": "mp" if self.tensor_parallel_size > 1 else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _arguments(self, options: JsonObject) -> list[str]:
        """Arguments of ``vllm serve``: the model first, then options, then those of the configuration."""
        arguments = [options["model"]]
        for name, value in options.items():
            if name != "model":
                arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return [*arguments, *self.arguments]


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for the largest rank of adapters."""


def max_rank(template: nn.Module) -> int:
    """The smallest value of vLLM's ``max_lora_rank`` that the adapters of ``template`` fit into.

    Raises:
        ConfigError: when vLLM does not support such adapters.
    """
    configurations: Mapping[str, LoraConfig] = getattr(template, "peft_config", {})
    (config,) = configurations.values()
    if config.use_dora or config.target_parameters:
        feature = "DoRA" if config.use_dora else "adapters of expert weights (target_parameters)"
        raise ConfigError(
            f"model.lora: vLLM cannot compute with {feature}: leave it out, or take another rollout.engine"
        )
    for rank in LORA_RANKS:
        if config.r <= rank:
            return rank
    raise ConfigError(f"model.lora.rank {config.r} is above {LORA_RANKS[-1]}, the largest that vLLM has room for")
