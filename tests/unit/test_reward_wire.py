"""Messages of the reward server survive the journey unchanged; requests that are scored together stay apart."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

import msgpack
import numpy as np
import pytest

from sfumato.config.load import load_config
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.rewards.http import wire
from sfumato.rewards.pixels import Brightness
from sfumato.rewards.remote import RemoteReward
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.server.app import RewardServerConfig
from sfumato.rewards.server.batching import score_requests
from sfumato.rewards.server.metrics import ServerMetrics
from tests.reward_servers import noise_samples


def test_samples_arrive_as_they_were_sent():
    video, source = (
        np.stack([noise_sample.image for noise_sample in noise_samples(5, size=6)]),
        noise_samples(1, size=4)[0].image,
    )
    sent = [
        dataclasses.replace(noise_samples(1)[0], image=video, source=source),
        dataclasses.replace(
            noise_samples(1)[0],
            image=None,
            text="an answer",
            messages=[{"role": "user", "content": "é"}, {"role": "assistant", "content": [{"type": "text"}]}],
            num_tokens=7,
            is_truncated=True,
        ),
        *noise_samples(3, group_size=2, size=5),
        dataclasses.replace(
            noise_samples(1)[0], metadata={"big": 10**30, "none": None, "number": 0.1, "é": ["\u2028"]}
        ),
    ]
    label, received = wire.decode_request(wire.encode_request("ocr", [wire.encode_sample(sample) for sample in sent]))
    assert label == "ocr"
    for before, after in zip(sent, received, strict=True):
        for name in ("image", "source"):
            then, now = getattr(before, name), getattr(after, name)
            assert now is None if then is None else now.dtype == np.uint8 and np.array_equal(now, then)
        for name in SENT:
            assert getattr(after, name) == getattr(before, name)
    fields = {field.name for field in dataclasses.fields(Sample)}
    # the server opens no files of a prompt and hears no sound; the others are not for rewards
    assert fields == {*SENT, "image", "source"} | {"images", "sound", "frame_rate", "damage", "scores"}


SENT = ("prompt", "metadata", "group_id", "text", "messages", "num_tokens", "is_truncated")


def test_values_arrive_to_the_last_bit_and_failures_with_their_reason():
    values = [0.1, -1e-320, 1e308, 3, math.nan, 1.0]
    reasons = ["", "", "", "", "the row has no target", ""]
    answer = wire.decode_answer(wire.encode_answer(values, reasons), 6)
    assert answer == [0.1, -1e-320, 1e308, 3.0, Failure("the server says: the row has no target"), 1.0]


def test_a_request_is_never_larger_than_it_was_counted():
    samples = [dataclasses.replace(noise_sample, prompt="é🙂" * 300) for noise_sample in noise_samples(20, size=30)]
    encoded = [wire.encode_sample(sample) for sample in samples]
    assert len(wire.encode_request("a reward", encoded)) <= sum(map(wire.encoded_size, encoded))


def test_what_json_cannot_hold_is_named_before_the_run():
    reward = RemoteReward(base_urls=("http://example.com",))
    reward.check_row("a cat", {"target": "x"})
    with pytest.raises(DataError, match="column 'raw' of prompt 'a cat' cannot be sent to a reward server"):
        reward.check_row("a cat", {"target": "x", "raw": b"bytes"})


def test_more_pixels_than_fit_are_refused_before_they_are_decoded(monkeypatch):
    data = wire.encode_request("r", [wire.encode_sample(noise_sample) for noise_sample in noise_samples(3, size=10)])
    monkeypatch.setattr(wire, "MAX_PIXEL_BYTES", 3 * 300)
    wire.decode_request(data)
    monkeypatch.setattr(wire, "MAX_PIXEL_BYTES", 3 * 300 - 1)
    with pytest.raises(
        wire.WireError, match=r"samples\.2: more than .* MiB of pixels in a request: send fewer samples"
    ):
        wire.decode_request(data)


def test_a_failure_in_the_place_of_a_value_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Choosy(Reward):
        type: ClassVar[str] = "choosy"

        def score(self, samples):
            return [1.0, Failure("too dark"), Failure("too dark"), 2.0]

    scores = Scorer([Choosy()]).score(noise_samples(4))
    np.testing.assert_array_equal(scores.total, [1.0, math.nan, math.nan, 2.0])
    assert scores.failures == ["choosy: too dark (2 of 4 samples)"]


@dataclass(frozen=True, kw_only=True)
class Recording(Reward):
    """Remembers the batches that it was given; cannot stand one prompt."""

    type: ClassVar[str] = "recording"
    calls: list = field(default_factory=list)
    curse: str = ""

    def score(self, samples):
        self.calls.append(len(samples))
        if any(sample.prompt == self.curse for sample in samples):
            raise RuntimeError("cursed")
        return [float(sample.image.mean()) for sample in samples]


def test_of_a_video_the_server_scores_frames_unless_its_reward_compares_images():
    video = dataclasses.replace(
        noise_samples(1)[0], image=np.stack([noise_sample.image for noise_sample in noise_samples(5)])
    )
    reward = Recording(frame_step=2)
    ((values, _),) = score_requests(reward, [[video]], max_batch_size=8)
    assert reward.calls == [3] and values == [pytest.approx(video.image[::2].mean())]
    ((values, reasons),) = score_requests(RecordingGroups(), [[video]], max_batch_size=8)
    assert math.isnan(values[0]) and "takes no videos" in reasons[0]


@dataclass(frozen=True, kw_only=True)
class RecordingGroups(Recording):
    """The same for whole groups."""

    groupwise: ClassVar[bool] = True


def test_requests_are_scored_in_calls_of_bounded_size_and_split_again():
    samples = noise_samples(7)
    reward = Recording()
    outcomes = score_requests(reward, [samples[:1], samples[1:4], samples[4:]], max_batch_size=3)
    assert reward.calls == [3, 3, 1]
    assert [len(values) for values, _ in outcomes] == [1, 3, 3]
    assert [value for values, _ in outcomes for value in values] == [float(sample.image.mean()) for sample in samples]


def test_groups_of_different_requests_are_never_joined_or_cut():
    samples = noise_samples(6, group_size=3)
    reward = RecordingGroups()
    score_requests(reward, [samples[:3], samples[:3], samples], max_batch_size=2)
    assert reward.calls == [3, 3, 3, 3]


def test_a_request_that_fails_takes_no_other_with_it():
    samples = noise_samples(4)
    reward = Recording(curse=samples[0].prompt)
    (_, cursed), (values, fine) = score_requests(reward, [samples[:2], samples[2:]], max_batch_size=8)
    assert all("cursed" in reason for reason in cursed) and fine == ["", ""]
    assert values == [float(sample.image.mean()) for sample in samples[2:]]
    assert reward.calls == [4, 2, 2]


def test_the_remote_reward_is_built_from_yaml_and_the_server_from_the_list_of_a_run(tmp_path, monkeypatch):
    path = tmp_path / "server.yaml"
    path.write_text("rewards: [{type: brightness, weight: 2}, {type: ocr, detect: false}]\n")
    config = load_config(RewardServerConfig, path, {"port": 0})
    assert config.rewards[0] == Brightness(weight=2) and config.port == 0
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY, which is not set"):
        load_config(RewardServerConfig, path, {"token_env": "NO_SUCH_KEY"})
    remote = {"type": "remote", "base_urls": ["http://127.0.0.1:1"], "groupwise": True}
    built = load_config(RewardServerConfig, overrides={"rewards": [remote]}).rewards[0]
    assert built == RemoteReward(base_urls=("http://127.0.0.1:1",), groupwise=True) and built.groupwise


def test_counters_in_the_format_of_prometheus():
    metrics = ServerMetrics(['a "b"\\'])
    metrics.count_call('a "b"\\', ["", "why", ""], 0.3)
    metrics.count_request(200, 0.001)
    metrics.count_request(429, 100.0)
    lines = metrics.text(queue_length=2).splitlines()
    for line in (
        'sfumato_requests_total{status="200"} 1',
        'sfumato_requests_total{status="429"} 1',
        'sfumato_samples_total{reward="a \\"b\\"\\\\"} 3',
        'sfumato_failures_total{reward="a \\"b\\"\\\\"} 1',
        "sfumato_queue_length 2",
        'sfumato_request_seconds_bucket{le="0.005"} 1',
        'sfumato_request_seconds_bucket{le="60.0"} 1',
        'sfumato_request_seconds_bucket{le="+Inf"} 2',
        "sfumato_request_seconds_count 2",
        'sfumato_call_seconds_bucket{reward="a \\"b\\"\\\\",le="0.5"} 1',
    ):
        assert line in lines


def test_messages_hold_plain_types_only():
    request = wire.encode_request("r", [wire.encode_sample(noise_samples(1)[0])])
    answer = wire.encode_answer([1.0], [""])

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (str, bytes, int, float, bool)

    assert plain(msgpack.unpackb(request)) and plain(msgpack.unpackb(answer))
