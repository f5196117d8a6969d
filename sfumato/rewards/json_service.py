"""A JSON service of one's own as a reward."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.http.wire import encode_metadata, encode_png
from sfumato.rewards.http_reward import HttpReward
from sfumato.serving.bounded_json import load_json
from sfumato.serving.outgoing import BadAnswerError

REQUESTS_PER_SERVER = 2
"""Requests that are on their way to each server, so that it need not wait for the next."""


@dataclass(frozen=True, kw_only=True)
class JsonServiceReward(HttpReward):
    """Values that a JSON service of your own gives: POST of ``{"samples": [...]}``, answer ``{"scores": [...]}``."""

    type: ClassVar[str] = "http"

    url_path: str = "/score"
    """Path behind each of base_urls."""
    batch_size: int = 16
    """Most samples of a request."""
    groupwise: bool = False  # type: ignore[misc]  # the same for all objects of other classes
    """Send all samples of a group in one request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("batch_size")
        if not self.url_path.startswith("/"):
            raise ConfigError(f"url_path of reward {self.label!r} must begin with a slash, not {self.url_path!r}")

    def prepare(self) -> None:
        """Makes the caller. Raises ConfigError when the variable of the key is not set."""
        self.caller()

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row cannot be sent."""
        encode_metadata(prompt, metadata)

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """The service's values; a Failure for samples of which it gave none in time."""
        deadline = self.call_deadline()

        def ask(batch: list[Sample]) -> list[float | Failure]:
            body = json.dumps({"samples": [encode_sample(sample) for sample in batch]}).encode()
            return self.caller().post(
                self.url_path, body, "application/json", lambda data: decode_scores(data, len(batch)), deadline
            )

        size = len(samples) if self.groupwise else self.batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        return self.score_in_pieces(batches, ask, REQUESTS_PER_SERVER)


def encode_sample(sample: Sample) -> dict[str, object]:
    """A sample as JSON: prompt, metadata, and ``text`` or ``image``; perhaps ``source``, ``messages``."""
    encoded: dict[str, object] = {"prompt": sample.prompt, "metadata": sample.metadata}
    if sample.text is not None:
        encoded["text"] = sample.text
    for name, pixels in (("image", sample.image), ("source", sample.source)):
        if pixels is not None:
            encoded[name] = base64.b64encode(encode_png(pixels)).decode("ascii")
    if sample.messages is not None:
        encoded["messages"] = sample.messages
    return encoded


def decode_scores(data: bytes, num_samples: int) -> list[float | Failure]:
    """Numbers of an answer; null is a sample that cannot be scored. Raises BadAnswerError for any other answer."""
    try:
        answer = load_json(data, max_values=2 * num_samples + 16)
    except ValueError as error:
        raise BadAnswerError(f"the answer is no JSON of {num_samples} scores: {error}") from error
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != num_samples:
        raise BadAnswerError(f'the answer must be {{"scores": [...]}} with {num_samples} numbers, not {data[:80]!r}')
    wrong = [score for score in scores if score is not None and (isinstance(score, bool | str | list | dict))]
    if wrong:
        raise BadAnswerError(f"a score must be a number or null, not {str(wrong[0])[:40]!r}")
    # whoever calls score checks them: one beyond the largest float costs its own sample alone
    return [Failure("the service gave null") if score is None else score for score in scores]
