"""The engine that draws with a transformers module in this process: the one that is trained, or a copy.

One thread: requests wait in coroutines of an event loop, and a task of the same loop computes one token for all of
them at a time and lets the loop run in between. Rows are those of ``rows.py``: a request takes one when there is
room, and leaves it when its completion ends; what does not fit waits, or is taken out and computed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import nn

from sfumato.data.media.vision import Vision
from sfumato.data.text.stop_strings import Decode, completes_stop, num_looked_at
from sfumato.errors import ConfigError, NonFiniteError
from sfumato.models.language.document_rows import group_documents
from sfumato.models.language.hf_config import changing_positions, max_positions
from sfumato.rollout.engines.base import Completion, EngineError, FinishReason, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.forward import Forward
from sfumato.rollout.engines.embedded.row_choice import choose_rows
from sfumato.rollout.engines.embedded.row_state import ActiveRequest, RowState
from sfumato.rollout.engines.embedded.rows import CachedRows, Rows, rounded_up
from sfumato.rollout.engines.embedded.token_sampling import draw
from sfumato.rollout.engines.host_memory import free_host_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGGER = logging.getLogger(__name__)

SOON = 256
"""Room for so many new tokens is allocated at once when a request takes a row, where memory allows."""

LONGEST_TRIED = 4096
"""Tokens of the longest sequence that the ways to compute logits are compared with."""


@dataclass(eq=False)
class _AwaitedRequest(ActiveRequest):
    """An active request with the future that its caller awaits."""

    future: asyncio.Future[Completion] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, reason: FinishReason) -> None:
        """Resolves the future with the tokens drawn so far, unless the caller was cancelled."""
        if not self.future.done():
            self.future.set_result(self.completion(reason))


class EmbeddedEngine:
    """``Engine`` of ``base.py`` on a module in this process, on the CPU or one GPU."""

    def __init__(
        self,
        module: nn.Module,
        *,
        max_length: int | None = None,
        max_batch_size: int = 256,
        cache_bytes: int | None = None,
        max_prefill_tokens: int = 8192,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        vision: Vision | None = None,
        decode: Decode | None = None,
        is_for_training: bool = True,
    ) -> None:
        """
        Args:
            module: a causal model of transformers, whole in this process. Its weights may change in place; ``flush``
                must follow.
            max_length: tokens of the longest prompt with its completion; None: as many as the model has positions.
            max_batch_size: sequences that are drawn at a time.
            cache_bytes: memory for keys and values; None: half of what is free when the first request comes.
            max_prefill_tokens: tokens of prompts in one forward pass.
            around: makes the context of each forward pass, such as ``LanguageModel.autocast``.
            vision: of a model that sees: opens the images of prompts.
            decode: makes texts of tokens, for ``Sampling.stop``.
            is_for_training: whether what is drawn is learned from: see ``choose_rows``.

        Raises:
            ConfigError: when the model has fewer positions than ``max_length``.
        """
        self.version = 0
        self.max_length = _max_length(module, max_length)
        self._forward = Forward(module, around, vision)
        self._max_batch_size = max_batch_size
        self._cache_bytes = cache_bytes
        self._max_prefill_tokens = max_prefill_tokens
        self._decode = decode
        self._is_for_training = is_for_training
        self._rows: Rows | None = None
        self._capacity = (0, 0)  # rows and columns that there is memory for
        self._waiting: deque[_AwaitedRequest] = deque()
        self._state = RowState()
        self._num_tried = 0  # sequences of the last step, or that it had no memory for
        self._driver: asyncio.Task[None] | None = None
        self._is_paused = self._is_closed = False
        # Whether any request so far has stop texts: only then the rows are decoded one by one after each token.
        self._has_texts = False
        self._has_listeners = False

    # The interface of ``Engine``.

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """See ``Engine``."""
        self.health()
        self._check(request, sampling)
        self._has_texts |= bool(sampling.stop)
        self._has_listeners |= request.on_token is not None
        awaited = _AwaitedRequest(request, sampling)
        self._waiting.append(awaited)
        self._ensure_driver()
        try:
            return await awaited.future
        except asyncio.CancelledError:
            self._drop_request(awaited)
            raise

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """See ``Engine``."""
        self._is_paused = True
        if mode == "abort":
            self.flush()  # puts the requests that have rows into the queue, too
            for awaited in self._waiting:
                awaited.end("abort")
            self._waiting.clear()

    def resume(self) -> None:
        """See ``Engine``."""
        self._is_paused = False
        self._ensure_driver()

    def flush(self) -> None:
        """See ``Engine``."""
        self._requeue_rows(0)

    def rescore(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]:
        """See ``Engine``."""
        return [log_probs for log_probs, _ in self.score(sequences, temperature, with_likeliest=False)]

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0, with_likeliest: bool = True
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """How likely given tokens are, and whether each is the likeliest after those before it.

        Args:
            sequences: token ids.
            temperature: divides the logits.
            with_likeliest: False leaves the second tensor empty.

        Returns:
            For each sequence of L tokens, of all but the first: float32 ``[L - 1]`` and bool ``[L - 1]``.
        """
        scored = [(torch.zeros(0), torch.zeros(0, dtype=torch.bool))] * len(sequences)
        same_length = not isinstance(self._prepared(), CachedRows)
        # ``group_documents`` names each sequence by the offset at which it would begin if all were concatenated.
        offsets = np.cumsum([0, *map(len, sequences)])[:-1].tolist()
        for starts, lengths in group_documents([len(tokens) for tokens in sequences], same_length):
            if max(lengths) < 2:
                continue  # nothing follows their only token
            indices = [offsets.index(start) for start in starts]
            input_ids = torch.zeros(len(starts), max(lengths), dtype=torch.int64)
            for row, index in enumerate(indices):
                input_ids[row, : lengths[row]] = torch.tensor(sequences[index])
            # nothing is asked after the last token, so it may stand one place beyond the model's last position
            logits = self._forward.some(input_ids[:, :-1].to(self._forward.device)).float() / temperature
            targets = input_ids[:, 1:].to(logits.device)
            log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].cpu()
            is_likeliest = (logits.argmax(-1) == targets).cpu() if with_likeliest else torch.zeros_like(targets).cpu()
            for row, index in enumerate(indices):
                end = lengths[row] - 1
                scored[index] = log_probs[row, :end].clone(), is_likeliest[row, :end].clone()
        return scored

    def release(self) -> None:
        """See ``Engine``. The module is left where it is."""
        if self._num_open:
            raise EngineError(f"{self._num_open} requests are under way: wait for them, or pause with abort")
        if self._rows is not None:
            self._rows.clear()
            self._capacity = (0, 0)

    def restore(self) -> None:
        """See ``Engine``. Memory is taken when requests need it."""

    def health(self) -> None:
        """See ``Engine``."""
        if self._is_closed:
            raise EngineError("the engine is closed")

    def close(self) -> None:
        """See ``Engine``. Requests under way end with EngineError."""
        if not self._is_closed:
            self._fail_all(EngineError("the engine was closed"))
            self.release()
            self._is_closed = True

    # The decoding loop.

    @property
    def _num_open(self) -> int:
        return len(self._waiting) + len(self._state)

    def _ensure_driver(self) -> None:
        """Starts the task that decodes, in the event loop of the waiting requests, unless it runs already."""
        if self._is_paused or not self._num_open:
            return
        loop = self._open_requests()[0].future.get_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._run())

    async def _run(self) -> None:
        """Decodes token after token until no request is left or the engine is paused."""
        self._forward.look()
        while self._num_open and not self._is_paused:
            try:
                self._step()
            except torch.OutOfMemoryError as error:
                self._halve_batch(error)
            except Exception as error:
                failure = EngineError(f"drawing failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._fail_all(failure)
            await asyncio.sleep(0)  # lets the callers of ended requests run, whose next ones may join the next step

    def _step(self) -> None:
        """Draws one token for each request that there is memory for.

        Raises:
            NonFiniteError: when logits are not finite.
        """
        rows = self._prepared()
        state = self._state
        device = self._forward.device
        # Rows that are in use come first: new ones would take the memory that these are about to need.
        self._make_room(rows)
        self._admit(rows)
        count = len(state)
        if not count:
            return
        logits = rows.step(torch.from_numpy(state.next_token[:count]).to(device), state.length[:count])
        uniform = torch.from_numpy(state.uniform()).to(device)
        tokens, log_probs = (values.cpu().numpy() for values in draw(logits, uniform, state.settings(device)))
        if not np.isfinite(log_probs).all():
            raise NonFiniteError("logits are not finite while it draws: look at the weights, or lower train.lr")
        ended = state.record_tokens(tokens, log_probs, self.version)
        for row, active in enumerate(state.progress if self._has_listeners else ()):
            if active.request.on_token is not None:
                active.request.on_token(int(tokens[row]))
        stopped = self._stopped_by_text()
        ended |= stopped
        if ended.any():
            reasons: list[FinishReason] = []
            for row in ended.nonzero()[0].tolist():
                is_stop = stopped[row] or int(tokens[row]) in state.progress[row].sampling.stop_token_ids
                reasons.append("stop" if is_stop else "length")
            self._leave(rows, ended, reasons)

    def _stopped_by_text(self) -> np.ndarray:
        """Which rows have completed one of their stop texts with their last token: bool ``[n]``."""
        is_stopped = np.zeros(len(self._state), bool)
        for row, active in enumerate(self._state.progress if self._has_texts else ()):
            if stop := active.sampling.stop:
                assert self._decode is not None
                is_stopped[row] = completes_stop(self._state.latest(row, num_looked_at(stop)), stop, self._decode)
        return is_stopped

    def _make_room(self, rows: Rows) -> None:
        """Makes rows longer where the next token needs it. Without memory for all, the last rows are requeued."""
        while count := len(self._state):
            needed = int(self._state.length[:count].max()) + 1
            if needed <= self._capacity[1]:
                return
            columns = rounded_up(needed)
            if self._fits_memory(count, columns):
                # A quarter more than needed: enlarging the cache copies it, which should happen rarely.
                more = min(needed + needed // 4, max(active.longest for active in self._state.progress))
                columns = rounded_up(more) if self._fits_memory(count, rounded_up(more)) else columns
                self._resize_rows(rows, count, columns)
                return
            self._requeue_rows(count - 1)

    def _admit(self, rows: Rows) -> None:
        """Gives rows to waiting requests in the order in which they came; drops those that were cancelled."""
        joining: list[_AwaitedRequest] = []
        first = len(self._state)
        columns = self._capacity[1] if first else 0
        num_looked_at = 0
        for awaited in self._waiting:
            if first + len(joining) >= self._max_batch_size:
                break
            # In their order, even if a shorter one behind would fit: else a long request could wait for ever.
            if not awaited.future.done():
                wider = max(columns, rounded_up(len(awaited.context)))
                if not self._fits_memory(first + len(joining) + 1, wider):
                    break
                joining.append(awaited)
                columns = wider
            num_looked_at += 1
        self._num_tried = count = first + len(joining)
        if joining:
            more = rounded_up(max(min(awaited.longest, len(awaited.context) + SOON) for awaited in joining))
            columns = max(columns, more) if self._fits_memory(count, max(columns, more)) else columns
            if count > self._capacity[0] or columns > self._capacity[1]:
                self._resize_rows(rows, count, columns)
            self._state.add(joining)
        # Only now: what fails before, as without memory for so many rows, must find them in the queue.
        for _ in range(num_looked_at):
            self._waiting.popleft()
        if joining:
            rows.begin(first, [awaited.context for awaited in joining], [awaited.request.images for awaited in joining])

    def _fits_memory(self, num_rows: int, num_columns: int) -> bool:
        assert self._rows is not None and self._cache_bytes is not None
        return num_rows * num_columns * self._rows.bytes_per_token <= self._cache_bytes

    def _resize_rows(self, rows: Rows, num_rows: int, num_columns: int) -> None:
        rows.resize(num_rows, num_columns)
        self._capacity = (num_rows, num_columns)

    def _leave(
        self, rows: Rows, leaving: np.ndarray, reasons: Sequence[FinishReason] | None = None
    ) -> list[_AwaitedRequest]:
        """Frees the rows for which ``leaving``, bool ``[n]``, is true. Returns their requests, which end if there are
        reasons."""
        # Before ``leave``, which moves lengths into other rows.
        longest = int(self._state.length[: len(self._state)].max())
        requests, sources, targets = self._state.leave(leaving)
        # Before other rows move: that takes memory, and without it nobody would know these requests any more.
        for awaited, reason in zip(requests, reasons or (), strict=reasons is not None):
            cast(_AwaitedRequest, awaited).end(reason)
        if len(sources):
            rows.move(sources, targets, longest)
        return cast("list[_AwaitedRequest]", requests)

    def _requeue_rows(self, first: int) -> None:
        """Puts the requests of all rows from ``first`` on back to the head of the queue, with the tokens drawn so far.
        Keys and values are computed again when they get a row."""
        if self._rows is not None and len(self._state) > first:
            self._waiting.extendleft(reversed(self._leave(self._rows, np.arange(len(self._state)) >= first)))

    def _drop_request(self, awaited: _AwaitedRequest) -> None:
        """Removes a request whose caller was cancelled."""
        if awaited in self._waiting:
            self._waiting.remove(awaited)
        elif awaited in self._state.progress and self._rows is not None:
            self._leave(self._rows, np.array([active is awaited for active in self._state.progress]))

    def _halve_batch(self, error: torch.OutOfMemoryError) -> None:
        """After an out-of-memory error: halves the number of sequences at a time, and begins with empty caches."""
        count = self._num_tried
        if count <= 1:
            self._fail_all(EngineError(f"one sequence does not fit into the device's memory: {error}"))
            return
        assert self._rows is not None
        self._max_batch_size = count // 2
        self.flush()
        self._rows.clear()
        self._capacity = (0, 0)
        LOGGER.warning("out of memory with %d sequences at a time: %d from now on", count, count // 2)

    def _open_requests(self) -> list[_AwaitedRequest]:
        """All requests that have not ended: those with rows, then those that wait."""
        return [*cast("list[_AwaitedRequest]", self._state.progress), *self._waiting]

    def _fail_all(self, error: Exception) -> None:
        """Ends all requests with an error."""
        self.flush()
        for awaited in self._waiting:
            if not awaited.future.done():
                awaited.future.set_exception(error)
        self._waiting.clear()

    # Preparation, and checks of requests.

    def _prepared(self) -> Rows:
        """The rows. The first call chooses their kind by trying, and measures the free memory."""
        if self._rows is None:
            longest = min(self.max_length, LONGEST_TRIED)
            self._rows, why_not = choose_rows(self._forward, longest, self._max_prefill_tokens, self._is_for_training)
            if why_not is not None:
                LOGGER.warning("drawing will be slow, with %s: %s", type(self._rows).__name__, why_not)
            if self._cache_bytes is None:
                self._cache_bytes = free_bytes(self._forward.device) // 2
        return self._rows

    def _check(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Raises ConfigError for a request that this engine cannot draw."""
        length = len(request.prompt_ids)
        size = cast("nn.Embedding", self._forward.module.get_input_embeddings()).num_embeddings
        if length + request.max_new_tokens > self.max_length:
            raise ConfigError(
                f"a prompt of {length} tokens and max_new_tokens {request.max_new_tokens} are longer than the "
                f"{self.max_length} tokens that the engine can take"
            )
        if length < 1 or request.max_new_tokens < 1 or not 0 <= request.first_position < length:
            raise ConfigError("a request needs a prompt of at least one token, and max_new_tokens of at least 1")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < size:
            raise ConfigError(f"a prompt has token ids outside of 0 to {size - 1}, the model's vocabulary")
        if request.images is not None and self._forward.vision is None:
            raise ConfigError("a prompt has images, and the engine was given a model that sees none")
        if sampling.stop and self._decode is None:
            raise ConfigError("texts that end a completion (stop) need an engine that was given a tokenizer's decode")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ConfigError(f"temperature and top_k must be at least 0, and top_p above 0 and at most 1: {sampling}")
        rows = self._prepared()
        needed = rounded_up(length + request.max_new_tokens) * rows.bytes_per_token
        if not self._fits_memory(1, rounded_up(length + request.max_new_tokens)):
            raise ConfigError(
                f"keys and values of one sequence of {length + request.max_new_tokens} tokens take {needed} bytes, and "
                f"cache_bytes is {self._cache_bytes}"
            )


def _max_length(module: nn.Module, wanted: int | None) -> int:
    """Tokens of the longest sequence: ``wanted``, or as many as the model has positions.

    Raises:
        ConfigError: when the model has fewer positions than wanted, or no limit and none was given.
    """
    config = cast("PreTrainedModel", module).config
    positions = max_positions(config.get_text_config())
    stretched = changing_positions(config)
    if stretched is not None:
        positions = min(stretched, positions or stretched)
    if wanted is None:
        if positions is None:
            raise ConfigError(f"{type(module).__name__} knows any number of positions: give the engine a max_length")
        return positions
    if stretched is not None and wanted > stretched:
        raise ConfigError(
            f"max_length {wanted} is above {stretched} tokens: beyond these all rotary positions of this model depend "
            "on the length of the text, so that training could not say again what was drawn"
        )
    if positions is not None and wanted > positions:
        raise ConfigError(f"max_length {wanted} is above the {positions} positions that the model knows")
    return wanted


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the machine for its CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
