"""Base of the engines outside of this library: checks of requests, versions, and weights that are loaded from files."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NoReturn, overload

import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.shards import Shards, Spec
from sfumato.rollout.engines.base import Completion, EngineError, FinishReason, GenerationRequest, Sampling
from sfumato.rollout.engines.served.weight_files import WeightFiles

INITIAL = 0
"""Version of the weights of the model's own files."""


@dataclass(frozen=True)
class DrawnTokens:
    """An engine's answer to a request, before it is checked."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[tuple[str, int]]
    """Runs of consecutive tokens: the label of the weights that drew them, and how many they are."""
    finish_reason: str


ABORTED = DrawnTokens([], [], [], "abort")
"""The answer of a request that ended before a token was drawn."""


def seed_of(request: GenerationRequest) -> int:
    """The seed of a request for an engine whose random generators cannot start at a later position.

    At the beginning of a completion it is the request's own seed. A completion that goes on after an abort gets another
    seed, which depends on the own seed and on the position, so that the result is the same whenever it is interrupted
    there.
    """
    if not request.first_position:
        return request.seed
    key = hashlib.blake2b(f"{request.seed} {request.first_position}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1


class ServedEngine(ABC):
    """``Engine`` (``base.py``) that computes in other processes with weights of its own, and the ``Receiver``
    (``runtime/weight_sync/receiver.py``) of these weights."""

    rescores: ClassVar[bool] = True
    shards: ClassVar[Shards | None] = None
    takes_for_machine: ClassVar[bool] = True

    def __init__(self, name: str, files: WeightFiles, max_length: int) -> None:
        """
        Args:
            name: what messages call it.
            files: writes the weights that it loads.
            max_length: tokens of the longest prompt with its completion.
        """
        self.name = name
        self.max_length = max_length
        self.version = INITIAL
        self.files = files
        self.staged: Path | None = None
        """Folder of a version that was written but not applied yet."""
        self.applied: Path | None = None
        """Folder of the version in use; it stays so that a restarted engine can load it."""
        self._replaced: Path | None = None
        """Folder of the version before that in use, from which engines of other ranks may still load."""
        self.on_loss: Callable[[EngineError], None] | None = None
        """Calls ``restart``, or raises what is to end the run, when processes are lost that take weights or score."""
        self._is_paused = self._is_closed = False
        self._waits_for_weights = False

    @property
    def weights(self) -> ServedEngine:
        """The ``Receiver`` of weights: the engine itself."""
        return self

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """See ``Engine``."""
        self._check(request, sampling)
        drawn = await self._generate(request, sampling)  # checked below: the answer comes from another program
        if drawn.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self.name} ended a completion with {drawn.finish_reason!r}, which is not known")
        reason: FinishReason = drawn.finish_reason  # type: ignore[assignment]
        versions = [_version_number(label) for label, count in drawn.versions for _ in range(count)]
        lengths = {len(drawn.token_ids), len(drawn.log_probs), len(versions)}
        if len(lengths) > 1 or len(versions) > request.max_new_tokens:
            raise EngineError(
                f"{self.name} gave {len(drawn.token_ids)} tokens, {len(drawn.log_probs)} log-probs and {len(versions)} "
                f"versions of them, for at most {request.max_new_tokens} tokens"
            )
        # A greedy token is certain, whatever distribution the server gives a log-prob of.
        log_probs = drawn.log_probs if sampling.temperature else [0.0] * len(drawn.token_ids)
        return Completion(drawn.token_ids, log_probs, versions, reason)

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """See ``Engine``."""
        self._pause(mode)
        self._is_paused = True
        self._waits_for_weights = False

    def resume(self) -> None:
        """See ``Engine``."""
        self._resume()
        self._is_paused = False

    @abstractmethod
    def flush(self) -> None:
        """See ``Engine``."""

    @overload
    def rescore(self, sequences: torch.Tensor, temperature: float = 1.0) -> torch.Tensor: ...

    @overload
    def rescore(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]: ...

    def rescore(
        self, sequences: torch.Tensor | Sequence[Sequence[int]], temperature: float = 1.0
    ) -> torch.Tensor | list[torch.Tensor]:
        """See ``Engine``; for a tensor ``[N, T]`` it returns a tensor ``[N, T - 1]``, as ``Receiver`` asks for.

        Raises:
            ConfigError: for a temperature other than 1, at which no server scores prompts, or a sequence too long.
        """
        if temperature != 1:
            raise ConfigError(f"{self.name} scores given tokens at temperature 1 alone, not {temperature:g}")
        if isinstance(sequences, torch.Tensor):
            return torch.stack(self.rescore(sequences.tolist(), temperature))
        for sequence in sequences:
            if len(sequence) >= self.max_length:
                raise ConfigError(
                    f"{len(sequence)} tokens are to be scored by {self.name}, which takes {self.max_length - 1}"
                )
        while True:
            try:
                log_probs = self._score_all(sequences)
                break
            except EngineError as error:
                if not self._is_restarted(error):
                    raise
        for sequence, log_probs_of_sequence in zip(sequences, log_probs, strict=True):
            if len(log_probs_of_sequence) != len(sequence) - 1:
                raise EngineError(f"{self.name} gave {len(log_probs_of_sequence)} log-probs of {len(sequence)} tokens")
        return [torch.tensor(log_probs_of_sequence, dtype=torch.float32) for log_probs_of_sequence in log_probs]

    def _score_all(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """``_score`` of each; a paused engine scores nothing, so its open requests go on for a moment."""
        if self._is_paused:
            self._resume()
        try:
            return [self._score(list(sequence)) if len(sequence) > 1 else [] for sequence in sequences]
        finally:
            if self._is_paused:
                self._pause("keep")

    @abstractmethod
    def release(self) -> None:
        """See ``Engine``."""

    @abstractmethod
    def restore(self) -> None:
        """See ``Engine``."""

    @abstractmethod
    def health(self) -> None:
        """See ``Engine``."""

    def restart(self) -> None:
        """Ends the engine's processes and starts them again, with the weights in use. Open requests fail, and can be
        made again.

        Raises:
            ConfigError: when this run did not start them.
            EngineError: when they do not start, or the engine is closed.
        """
        if self._is_closed:
            raise EngineError(f"{self.name} is closed")
        self._restart()
        self._is_paused = self._waits_for_weights = False
        if self.applied is not None:
            self.load_files(self.applied, self.version)

    def close(self) -> None:
        """See ``Engine``."""
        if not self._is_closed:
            self._is_closed = True
            self._close()
            self.files.close()

    def describe(self) -> dict[str, Spec]:
        """See ``Receiver``."""
        return self.files.specs

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """See ``Receiver``. The engine goes on drawing by its current weights."""
        for folder in (self.staged, self._replaced):
            self.files.remove(folder)
        self.staged = self._replaced = None
        self.staged = self.files.write(tensors, version)

    def place(self) -> str:
        """See ``Receiver``: the folder of the version that was loaded."""
        return "" if self.staged is None else str(self.staged.absolute())

    def load_from(self, place: str) -> None:
        """See ``Receiver``."""
        self.staged = Path(place)

    def apply(self, version: int) -> None:
        """See ``Receiver``."""
        assert self.staged is not None, "load a version first"
        self.take_version(self.staged, version)
        # Only now: when loading fails, the engine is restarted with what ``applied`` still names.
        self._replaced = self.applied
        self.applied = self.staged
        self.staged = None

    def checksums(self, names: Iterable[str]) -> NoReturn:
        """Never called, since ``rescores`` is true."""
        raise NotImplementedError(f"{self.name} is verified by rescoring, not by checksums")

    def take_version(self, folder: Path, version: int) -> None:
        """Loads the weights in a folder and draws by them from now on. Open requests wait meanwhile, then go on.

        Raises:
            WeightSyncError: when it cannot load them, and is not lost or nobody starts it anew.
        """
        resumes = not self._is_paused or self._waits_for_weights
        while True:
            try:
                if not self._is_paused:
                    self.pause("keep")
                # An engine whose weights could not be loaded holds parts of two versions: it stays paused until some
                # can be.
                self._waits_for_weights = resumes
                self.load_files(folder, version)
                self.flush()
                break
            except EngineError as error:
                if not self._is_restarted(error):
                    raise WeightSyncError(
                        f"version {version} of the weights was not loaded by {self.name}: {error}"
                    ) from error
        self.version = version
        self._waits_for_weights = False
        if resumes:
            self.resume()

    def _is_restarted(self, error: EngineError) -> bool:
        """Whether the engine was lost and has been started anew, so that what failed can be done again; False for one
        that lives, which would fail again, and where nobody restarts it."""
        if self.on_loss is None or self._is_closed:
            return False
        try:
            self.health()
        except EngineError:
            self.on_loss(error)
            return True
        return False

    @abstractmethod
    def load_files(self, folder: Path, version: int) -> None:
        """Has the paused engine load weights from a folder, and label tokens with that version."""

    @abstractmethod
    async def _generate(self, request: GenerationRequest, sampling: Sampling) -> DrawnTokens: ...

    @abstractmethod
    def _score(self, tokens: list[int]) -> list[float]:
        """Log-probs of all tokens but the first."""

    @abstractmethod
    def _pause(self, mode: Literal["keep", "abort"]) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...

    @abstractmethod
    def _restart(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _check(self, request: GenerationRequest, sampling: Sampling) -> None:
        if self._is_closed:
            raise EngineError(f"{self.name} is closed")
        total = len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids or request.max_new_tokens < 1:
            raise ConfigError(f"{self.name} needs a prompt and room for a token")
        if total > self.max_length:
            raise ConfigError(
                f"a prompt of {len(request.prompt_ids)} tokens with max_new_tokens {request.max_new_tokens} is longer "
                f"than the {self.max_length} tokens that {self.name} takes"
            )
        if not 0 <= request.seed < 2**63:
            raise ConfigError(f"seed {request.seed} is not from 0 to 2^63 - 1")


def _version_number(label: str) -> int:
    """The version that a label stands for. A server calls the weights of the model's own files ``default``."""
    if label == "default":
        return INITIAL
    if not label.isdecimal():
        raise EngineError(f"tokens were drawn by weights called {label!r}, which this run did not send")
    return int(label)
