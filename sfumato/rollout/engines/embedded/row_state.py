"""What the host knows of each row of the embedded engine, in arrays: a step costs no loop over rows in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sfumato.rollout.engines.base import Completion, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.token_sampling import DrawSettings, request_noise
from sfumato.rollout.text.tokens import FinishReason


@dataclass(eq=False)
class ActiveRequest:
    """A request, and what has been drawn for it so far."""

    request: GenerationRequest
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise = request_noise(self.request)

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def completion(self, reason: FinishReason) -> Completion:
        """What has been drawn."""
        return Completion(self.token_ids, self.log_probs, self.versions, reason)


class RowState:
    """Arrays over S rows; those from 0 on are taken. W: the most tokens that one of them may still draw."""

    def __init__(self) -> None:
        self.progress: list[ActiveRequest] = []
        """Of the rows that are taken."""
        self.next_token = np.zeros(0, np.int64)
        """``[S]``: the last token of each row, whose keys and values are not known yet."""
        self.length = np.zeros(0, np.int64)
        """``[S]``: tokens before that one."""
        self._count = np.zeros(0, np.int64)  # drawn since it took the row
        self._limit = np.zeros(0, np.int64)
        self._temperature = np.zeros(0, np.float64)
        self._top_p = np.zeros(0, np.float64)
        self._top_k = np.zeros(0, np.int64)
        self._stop = np.zeros((0, 0), np.int64)  # padded with -1
        self._noise = np.zeros((0, 0), np.float64)
        self._tokens = np.zeros((0, 0), np.int64)
        self._log_probs = np.zeros((0, 0), np.float64)
        self._versions = np.zeros((0, 0), np.int64)
        self._settings: DrawSettings | None = None

    def __len__(self) -> int:
        return len(self.progress)

    def add(self, joining: Sequence[ActiveRequest]) -> None:
        """Gives the next rows to requests."""
        first, count = len(self), len(self) + len(joining)
        width = max(len(request.noise) - len(request.token_ids) for request in joining)
        self._grow(count, width, max(len(request.sampling.stop_token_ids) for request in joining))
        for row, request in enumerate(joining, first):
            context, sampling, noise = request.context, request.sampling, request.noise[len(request.token_ids) :]
            self.next_token[row], self.length[row] = context[-1], len(context) - 1
            self._count[row], self._limit[row] = 0, len(noise)
            self._temperature[row], self._top_p[row] = sampling.temperature, sampling.top_p
            self._top_k[row], self._stop[row] = sampling.top_k, -1
            self._stop[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
            self._noise[row, : len(noise)] = noise
        self.progress += joining
        self._settings = None

    def _grow(self, num_rows: int, width: int, num_stops: int) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                shape = (num_rows, num_stops if name == "_stop" else width)[: array.ndim]
                padding = [(0, max(needed - size, 0)) for needed, size in zip(shape, array.shape, strict=True)]
                if any(after for _, after in padding):
                    setattr(self, name, np.pad(array, padding, constant_values=-1 if name == "_stop" else 0))

    def settings(self, device: torch.device) -> DrawSettings:
        """How the next tokens are drawn."""
        if self._settings is None:
            rows = slice(0, len(self))
            self._settings = DrawSettings.of(self._temperature[rows], self._top_p[rows], self._top_k[rows], device)
        return self._settings

    def uniform(self) -> np.ndarray:
        """The noise of the next tokens: float64 ``[n]``."""
        return self._noise[np.arange(len(self)), self._count[: len(self)]]

    def take(self, tokens: np.ndarray, log_probs: np.ndarray, version: int) -> np.ndarray:
        """Notes a drawn token for each row. Returns which completions have ended, bool ``[n]``."""
        count = len(self)
        places = np.arange(count), self._count[:count]
        self._tokens[places], self._log_probs[places], self._versions[places] = tokens, log_probs, version
        self._count[:count] += 1
        self.length[:count] += 1
        self.next_token[:count] = tokens
        stopped = (self._stop[:count] == tokens[:, None]).any(1)
        return stopped | (self._count[:count] == self._limit[:count])

    def latest(self, row: int, count: int) -> list[int]:
        """The last ``count`` tokens that were drawn for the request of a row, or all."""
        active, taken = self.progress[row], int(self._count[row])
        tokens = self._tokens[row, max(taken - count, 0) : taken].tolist()
        if (missing := count - len(tokens)) > 0:
            earlier = active.request.prompt_ids[len(active.request.prompt_ids) - active.request.first_position :]
            tokens = [*[*earlier, *active.token_ids][-missing:], *tokens]
        return tokens

    def leave(self, leaving: np.ndarray) -> tuple[list[ActiveRequest], np.ndarray, np.ndarray]:
        """Takes rows back, and moves others into their place, so that those that are taken are the first.

        Args:
            leaving: bool ``[n]``.

        Returns:
            The requests that left, with what was drawn for them, in the order of their rows; rows that moved, and where
            to, int64 ``[k]`` each.
        """
        requests = []
        for row in leaving.nonzero()[0].tolist():
            active, drawn = self.progress[row], slice(0, self._count[row])
            active.token_ids += self._tokens[row, drawn].tolist()
            active.log_probs += self._log_probs[row, drawn].tolist()
            active.versions += self._versions[row, drawn].tolist()
            requests.append(active)
        num_staying = len(self) - len(requests)
        sources, targets = (~leaving[num_staying:]).nonzero()[0] + num_staying, leaving[:num_staying].nonzero()[0]
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[targets] = array[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.progress[target] = self.progress[source]
        del self.progress[num_staying:]
        self._settings = None
        return requests, sources, targets
