"""A reward that a reward server computes: ``python -m sfumato.rewards.server CONFIG``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Sample, load_once
from sfumato.rewards.http import wire
from sfumato.rewards.http.caller import HttpError
from sfumato.rewards.http.message_reader import import_msgpack
from sfumato.rewards.http_reward import START_WAIT_S, HttpReward
from sfumato.serving.outgoing import BadAnswerError

AnswerT = TypeVar("AnswerT")

REQUESTS_PER_SERVER = 2
"""On their way at the same time: one that is scored and one that waits for its turn."""


@dataclass(frozen=True, kw_only=True)
class RemoteReward(HttpReward):
    """A reward that one or several reward servers compute."""

    type: ClassVar[str] = "remote"
    takes_video: ClassVar[bool] = True  # whole; which frames of it count is the server's business

    reward: str = ""
    """Label of the reward on the server; empty: the only one that it serves."""
    groupwise: bool = False  # type: ignore[misc]  # the same for all objects of other classes
    """Whether it is a reward of whole groups, as some are; checked against what the server says."""

    @property
    def label(self) -> str:
        """``name``, else the label on the server, else the type."""
        return self.name or self.reward or self.type

    def prepare(self) -> None:
        """Asks every server what it serves.

        Raises:
            ConfigError: a server does not answer, does not serve the reward, or not the same as the others.
            MissingDependencyError: msgpack is not installed.
        """
        try:
            _ask_servers(self)
        except HttpError as error:
            raise ConfigError(
                f"reward {self.label!r} cannot ask its server ({error}): start it with "
                "'python -m sfumato.rewards.server CONFIG', or correct base_urls"
            ) from error

    def check_installed(self) -> str:
        """See ``Reward``."""
        import_msgpack()
        return super().check_installed()

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row cannot be sent."""
        wire.encode_metadata(prompt, metadata)

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """The server's values; a Failure for samples of which it gave none in time."""
        # from before the servers are asked what they serve, which counts as time of the call
        deadline = self.call_deadline()
        served = _ask_servers(self)
        label = self.reward or next(iter(served.rewards))
        # each sample is encoded once, whichever request it goes into; its size decides where requests are cut
        encoded = [wire.encode_sample(sample) for sample in samples]
        sizes = [max(wire.encoded_size(sample), 1) for sample in encoded]

        def ask(piece: range) -> Sequence[float | Failure]:
            if sum(sizes[row] for row in piece) > served.max_request_mib * 2**20:
                unit = "a group" if self.groupwise else "a sample"
                raise HttpError(f"{unit} is larger than max_request_mib {served.max_request_mib} of the server")
            body = wire.encode_request(label, encoded[piece.start : piece.stop])
            parse = _retry_on_wire_error(lambda data: wire.decode_answer(data, len(piece)))
            return self.caller().post("/score", body, wire.MEDIA_TYPE, parse, deadline)

        pieces = [range(len(samples))] if self.groupwise else self._split_rows(samples, sizes, served)
        return self.score_in_pieces(pieces, ask, REQUESTS_PER_SERVER)

    def _split_rows(self, samples: list[Sample], sizes: list[int], served: wire.ServerDescription) -> list[range]:
        """Ranges of samples, one for each request.

        Servers get equally many, within the limits of a request: samples, bytes of the body, decoded pixels.
        """
        max_rows = min(served.max_batch_size, -(-len(samples) // len(self.base_urls)))
        pieces = []
        start = 0
        size = 0
        pixel_bytes = 0
        for row, sample in enumerate(samples):
            is_full = (
                row - start == max_rows
                or size + sizes[row] > served.max_request_mib * 2**20
                or pixel_bytes + wire.pixel_bytes(sample) > wire.MAX_PIXEL_BYTES
            )
            if is_full and row > start:
                pieces.append(range(start, row))
                start = row
                size = 0
                pixel_bytes = 0
            size += sizes[row]
            pixel_bytes += wire.pixel_bytes(sample)
        return [*pieces, range(start, len(samples))]


@load_once
def _ask_servers(reward: RemoteReward) -> wire.ServerDescription:
    """What the servers of a reward serve, asked once per process."""
    deadline = min(time.monotonic() + START_WAIT_S, reward.call_deadline())
    descriptions = {
        url: reward.caller(url).get("/rewards", _retry_on_wire_error(wire.decode_description), deadline)
        for url in reward.base_urls
    }
    for url, description in descriptions.items():
        _check_served(reward, url, description)
    served = list(descriptions.values())
    label = reward.reward or next(iter(served[0].rewards))
    # equal fingerprints mean equal settings and versions, so it does not matter which server answers
    prints = {url: description.rewards[label].fingerprint for url, description in descriptions.items()}
    if len(set(prints.values())) > 1:
        raise ConfigError(
            f"reward {reward.label!r}: the servers {' and '.join(prints)} serve {label!r} with different settings or "
            "versions of sfumato, so a value would depend on who answers: start them with one configuration"
        )
    return wire.ServerDescription(
        rewards={label: served[0].rewards[label]},
        max_batch_size=min(description.max_batch_size for description in served),
        max_request_mib=min(description.max_request_mib for description in served),
    )


def _check_served(reward: RemoteReward, url: str, description: wire.ServerDescription) -> None:
    labels = ", ".join(description.rewards)
    if reward.reward and reward.reward not in description.rewards:
        raise ConfigError(f"{url} serves no reward {reward.reward!r}; it serves: {labels}")
    if not reward.reward and len(description.rewards) != 1:
        raise ConfigError(f"{url} serves several rewards ({labels}): choose one with 'reward'")
    served = description.rewards[reward.reward or labels]
    if served.groupwise != reward.groupwise:
        raise ConfigError(
            f"reward {reward.label!r}: {url} says that groupwise is {str(served.groupwise).lower()}: set it so"
        )


def _retry_on_wire_error(decode: Callable[[bytes], AnswerT]) -> Callable[[bytes], AnswerT]:
    """``decode`` that raises BadAnswerError for a message that it cannot read, so that the caller asks once more."""

    def parse(data: bytes) -> AnswerT:
        try:
            return decode(data)
        except wire.WireError as error:
            raise BadAnswerError(str(error)) from error

    return parse
