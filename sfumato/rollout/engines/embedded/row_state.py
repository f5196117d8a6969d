"""State of the embedded engine's rows on the host, as numpy arrays, so that a step needs no Python loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sfumato.rollout.engines.base import Completion, FinishReason, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.token_sampling import DrawSettings, request_noise


@dataclass(eq=False)
class ActiveRequest:
    """A request, and what has been drawn for it so far. While it has a row, the newest tokens are in ``RowState``."""

    request: GenerationRequest
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise = request_noise(self.request)

    @property
    def context(self) -> list[int]:
        """The prompt with the tokens drawn so far."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it may become: prompt and ``max_new_tokens``."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def completion(self, reason: FinishReason) -> Completion:
        """The result for whoever asked."""
        return Completion(self.token_ids, self.log_probs, self.versions, reason)


class RowState:
    """Arrays over S rows, of which the first n are taken. W: the most tokens that one of them may still draw."""

    def __init__(self) -> None:
        self.progress: list[ActiveRequest] = []
        """The requests of the n rows that are taken."""
        self.next_token = np.zeros(0, np.int64)
        """int64 ``[S]``: the last token of each row. The next forward pass computes its keys and values."""
        self.length = np.zeros(0, np.int64)
        """int64 ``[S]``: number of tokens before ``next_token``, which is the position of that."""
        # Every array attribute has the rows as its first dimension: ``_grow`` and ``leave`` find them by ``vars``.
        self._count = np.zeros(0, np.int64)  # tokens drawn since the request took the row
        self._limit = np.zeros(0, np.int64)  # tokens that it may draw in the row
        self._temperature = np.zeros(0, np.float64)
        self._top_p = np.zeros(0, np.float64)
        self._top_k = np.zeros(0, np.int64)
        self._stop = np.zeros((0, 0), np.int64)  # [S, stop tokens], padded with -1, which is no token
        self._noise = np.zeros((0, 0), np.float64)  # [S, W], as the three below
        self._tokens = np.zeros((0, 0), np.int64)
        self._log_probs = np.zeros((0, 0), np.float64)
        self._versions = np.zeros((0, 0), np.int64)
        self._settings: DrawSettings | None = None

    def __len__(self) -> int:
        return len(self.progress)

    def add(self, joining: Sequence[ActiveRequest]) -> None:
        """Gives the next rows to requests."""
        first = len(self)
        count = first + len(joining)
        width = max(len(request.noise) - len(request.token_ids) for request in joining)
        self._grow(count, width, max(len(request.sampling.stop_token_ids) for request in joining))
        for row, request in enumerate(joining, first):
            context = request.context
            sampling = request.sampling
            noise = request.noise[len(request.token_ids) :]
            self.next_token[row] = context[-1]
            self.length[row] = len(context) - 1
            self._count[row] = 0
            self._limit[row] = len(noise)
            self._temperature[row] = sampling.temperature
            self._top_p[row] = sampling.top_p
            self._top_k[row] = sampling.top_k
            self._stop[row] = -1
            self._stop[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
            self._noise[row, : len(noise)] = noise
        self.progress += joining
        self._settings = None

    def _grow(self, num_rows: int, width: int, num_stops: int) -> None:
        """Enlarges all arrays to at least these sizes; they never shrink."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                shape = (num_rows, num_stops if name == "_stop" else width)[: array.ndim]
                padding = [(0, max(needed - size, 0)) for needed, size in zip(shape, array.shape, strict=True)]
                if any(after for _, after in padding):
                    setattr(self, name, np.pad(array, padding, constant_values=-1 if name == "_stop" else 0))

    def settings(self, device: torch.device) -> DrawSettings:
        """Temperature, top_p and top_k of the n rows on the device; kept until rows come or go."""
        if self._settings is None:
            rows = slice(0, len(self))
            self._settings = DrawSettings.from_rows(
                self._temperature[rows], self._top_p[rows], self._top_k[rows], device
            )
        return self._settings

    def uniform(self) -> np.ndarray:
        """The noise of the next tokens: float64 ``[n]``."""
        return self._noise[np.arange(len(self)), self._count[: len(self)]]

    def record_tokens(self, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> np.ndarray:
        """Records the drawn token of each row.

        Args:
            tokens: int64 ``[n]``.
            log_probs: float64 ``[n]``.
            version: of the weights that drew them.

        Returns:
            Which completions have ended by a stop token or their limit: bool ``[n]``.
        """
        count = len(self)
        places = np.arange(count), self._count[:count]
        self._tokens[places] = tokens
        self._log_probs[places] = log_probs
        self._versions[places] = version
        self._count[:count] += 1
        self.length[:count] += 1
        self.next_token[:count] = tokens
        stopped = (self._stop[:count] == tokens[:, None]).any(1)
        return stopped | (self._count[:count] == self._limit[:count])

    def latest(self, row: int, count: int) -> list[int]:
        """The last ``count`` tokens of the completion in a row, or all if there are fewer.

        A stop text may have begun in tokens from before an interruption. These are in the prompt (``first_position``)
        or, when the request lost its row meanwhile, in its ``token_ids``.
        """
        active = self.progress[row]
        taken = int(self._count[row])
        tokens = self._tokens[row, max(taken - count, 0) : taken].tolist()
        if (missing := count - len(tokens)) > 0:
            earlier = active.request.prompt_ids[len(active.request.prompt_ids) - active.request.first_position :]
            tokens = [*[*earlier, *active.token_ids][-missing:], *tokens]
        return tokens

    def leave(self, leaving: np.ndarray) -> tuple[list[ActiveRequest], np.ndarray, np.ndarray]:
        """Frees rows, and moves others into their places, so that the taken rows are the first ones again.

        Args:
            leaving: bool ``[n]``.

        Returns:
            The requests of the freed rows in order, with the tokens drawn for them, and the old and new numbers of the
            rows that moved, int64 ``[k]`` each.
        """
        requests = []
        for row in leaving.nonzero()[0].tolist():
            active = self.progress[row]
            drawn = slice(0, self._count[row])
            active.token_ids += self._tokens[row, drawn].tolist()
            active.log_probs += self._log_probs[row, drawn].tolist()
            active.versions += self._versions[row, drawn].tolist()
            requests.append(active)
        num_staying = len(self) - len(requests)
        # Rows that stay beyond the new end fill the gaps before it: of both there are equally many.
        sources = (~leaving[num_staying:]).nonzero()[0] + num_staying
        targets = leaving[:num_staying].nonzero()[0]
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[targets] = array[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.progress[target] = self.progress[source]
        del self.progress[num_staying:]
        self._settings = None
        return requests, sources, targets
