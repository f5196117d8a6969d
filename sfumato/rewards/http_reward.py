"""What rewards that ask HTTP servers have in common: their fields, and a caller that is shared by equal settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Reward, load_once
from sfumato.rewards.http.caller import HttpCaller, HttpError
from sfumato.serving.outgoing import parse_base_url

ItemT = TypeVar("ItemT")
PieceT = TypeVar("PieceT", bound=Sized)
AnswerT = TypeVar("AnswerT")

START_WAIT_S = 60.0
"""How long the first step waits for a server that is still loading."""


@dataclass(frozen=True, kw_only=True)
class HttpReward(Reward):
    """Base of rewards that one or several equal servers compute.

    Raises ConfigError when an address is none, or when a time does not fit into ``timeout_s``.
    """

    base_urls: tuple[str, ...]
    """Addresses such as http://127.0.0.1:8642 of servers that give equal answers; the load is spread over them."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key (bearer token); empty: none is sent."""
    request_timeout_s: float = 120.0
    """Seconds that one attempt may take, from the connection to the last byte."""
    retry_for_s: float = 300.0
    """Seconds for which requests are tried again when no server answers, before samples count as failed."""
    allow_private: bool = False
    """Also connect to this machine and to private networks, which an address from elsewhere must not reach."""
    timeout_s: float = 600.0
    """Seconds that one call may take, all requests and retries included; after that its samples have no reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_urls:
            raise ConfigError(f"base_urls of reward {self.label!r} is empty: list at least one server")
        if self.process:
            raise ConfigError(f"process of reward {self.label!r}: it waits for servers, which a thread does as well")
        for url in self.base_urls:
            parse_base_url(url)
        for name, low in (("request_timeout_s", 1e-3), ("retry_for_s", 0.0)):
            value = getattr(self, name)
            if not low <= value < self.timeout_s:
                raise ConfigError(
                    f"{name} {value:g} of reward {self.label!r} must be from {low:g} to below its timeout_s "
                    f"{self.timeout_s:g}"
                )

    def check_installed(self) -> str:
        """See ``Reward``."""
        self.caller()
        return f"whether {' and '.join(self.base_urls)} answer"

    def call_deadline(self) -> float:
        """Value of ``time.monotonic()`` by which a call of ``score`` that begins now should return by itself.

        It lies a little before ``timeout_s``: at the timeout the whole call is lost, with the answers that have
        arrived.
        """
        return time.monotonic() + 0.95 * self.timeout_s

    def caller(self, *base_urls: str) -> HttpCaller:
        """The caller of these servers, or of all; the same object for equal settings, so that counts add up.

        Raises ConfigError when the environment variable of the key is not set.
        """
        key = ""
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "").strip()
            # what is not printable ASCII cannot stand in a header
            if not (key.isascii() and key.isprintable() and key):
                raise ConfigError(
                    f"reward {self.label!r} takes its key from the environment variable {self.api_key_env}, which is "
                    "not set or holds no key: export it before the run"
                )
        return _build_caller(
            base_urls or self.base_urls,
            api_key=key,
            retry_for_s=self.retry_for_s,
            request_timeout_s=self.request_timeout_s,
            allow_private=self.allow_private,
        )

    def take_notes(self) -> list[str]:
        """Requests that were tried again, or given up, since this was last asked."""
        failures = self.caller().take_failures()
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(failures.items()))
        return [f"attempts that {' or '.join(self.base_urls)} did not answer: {kinds}"] if failures else []

    def score_in_pieces(
        self,
        pieces: Sequence[PieceT],
        ask: Callable[[PieceT], Sequence[float | Failure]],
        requests_per_server: int,
    ) -> list[float | Failure]:
        """The values of samples that are sent in pieces, so many requests to each server at a time.

        Where a piece has no answer, each of its samples has the Failure.
        """
        answers = self.ask_each(pieces, ask, requests_per_server * len(self.base_urls))
        return [
            value
            for piece, answer in zip(pieces, answers, strict=True)
            for value in ([answer] * len(piece) if isinstance(answer, Failure) else answer)
        ]

    def ask_each(
        self, items: Sequence[ItemT], ask: Callable[[ItemT], AnswerT], concurrency: int
    ) -> list[AnswerT | Failure]:
        """Calls ``ask`` for every item, ``concurrency`` of them at a time.

        Returns:
            The answers in the order of the items; a Failure for an item whose ``ask`` raised HttpError.
        """

        def answer(item: ItemT) -> AnswerT | Failure:
            try:
                return ask(item)
            except HttpError as error:
                return Failure(str(error))

        with ThreadPoolExecutor(min(concurrency, len(items)), thread_name_prefix=self.label) as pool:
            return list(pool.map(answer, items))


@load_once
def _build_caller(base_urls: tuple[str, ...], **settings: Any) -> HttpCaller:
    return HttpCaller(base_urls, **settings)
