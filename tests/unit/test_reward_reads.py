"""What each reward looks at in a sample, as it is seen to, and that the reward says so."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from sfumato.config.base import find_variants
from sfumato.errors import MissingDependencyError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.differentiable import DifferentiableReward
from sfumato.rewards.http import wire
from sfumato.tracking.waveforms import Waveform
from tests import tiny_reward_models as tiny
from tests.unit.test_dpg_bench import CAT, write_table
from tests.unit.test_geneval import folders as folders
from tests.unit.test_reward_wire import SENT
from tests.unit.test_rewards_sound import clap as clap
from tests.unit.test_rewards_sound import whisper as whisper

ALL = find_variants("sfumato.rewards")
FIELDS = {field.name for field in dataclasses.fields(Sample)}


class Watched(Sample):
    """Notes which of its fields are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            Watched.read.add(name)
        return super().__getattribute__(name)


PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
PROMPT = 'a red dot on the left says "AB"'
CODE = {"inputs": ["1"], "outputs": ["2"]}
METADATA: dict[str, Any] = {
    "answer": "3",
    "target": "AB",
    "include": [{"class": "dog", "count": 1}],
    "tests": json.dumps(CODE),
    "reward": 0.5,
    "verification": json.dumps(CODE),
}
TONE = Waveform((np.sin(np.arange(1600) / 3) * 9000).astype(np.int16)[None], 4000)
REASONING: dict[str, Any] = {"task": "chain_sum", "size": 5, "seed": 1, "index": 0, "parameters": {}}
TEXT = "so\n\n<think>x</think>\\boxed{3}"

SAMPLES = {
    "image": {"image": PICTURE, "source": PICTURE[::-1].copy()},
    "video": {"image": np.stack([PICTURE] * 8)},
    "text": {
        "text": TEXT,
        "num_tokens": 7,
        "messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": TEXT}],
    },
    "sound": {"sound": TONE},
}

IMAGE, PROMPTED = {"image"}, {"image", "prompt"}
SHOWN = {"prompt", "metadata", "text", "image", "source"}  # whatever a question has a place for
READ: dict[str, set[str]] = {
    "brightness": IMAGE,
    "sharpness": IMAGE,
    "symmetry": IMAGE,
    "colour": PROMPTED,
    "placement": PROMPTED,
    "jpeg_compressibility": IMAGE,
    "jpeg_incompressibility": IMAGE,
    "aesthetic": IMAGE,
    "image_class": IMAGE,
    "clip_score": PROMPTED,
    "pickscore": PROMPTED,
    "hpsv2": PROMPTED,
    "image_reward": PROMPTED,
    "hpsv3": PROMPTED | {"metadata"},
    "video_reward": PROMPTED | {"metadata"},
    "edit_reward": PROMPTED | {"metadata", "source"},
    "image_similarity": {"image", "source"},
    "ocr": PROMPTED | {"metadata"},
    "geneval": {"image", "metadata"},
    "dpg_bench": FIELDS,  # it copies the sample with another prompt, to show it
    "qwenvl_ocr": SHOWN,
    "unified_reward": SHOWN,
    "rubric": SHOWN,
    "yes_probability": SHOWN,
    "pairwise_preference": SHOWN,
    "exact": {"text", "prompt", "metadata"},
    "multiple_choice": {"text", "prompt", "metadata"},
    "math": {"text", "prompt", "metadata"},
    "code": {"text", "prompt", "metadata"},
    "reasoning_gym": {"text", "prompt", "metadata"},
    "format": {"text"},
    "environment": {"metadata"},
    "length": {"text", "num_tokens"},
    "overlong": {"text", "num_tokens"},
    "text_reward_model": {"text", "messages"},
    "process_reward_model": {"text", "messages"},
    "loudness": {"sound"},
    "silence": {"sound"},
    "clipping": {"sound"},
    "clap": {"sound", "prompt"},
    "heard_words": {"sound", "prompt", "metadata"},
    "http": {"prompt", "metadata", "text", "image", "source", "messages"},
    "remote": {*SENT, "image", "source"},
    "function": FIELDS,
}
"""At most; a question to a judge shows what its template asks for."""


class Handler(BaseHTTPRequestHandler):
    """A judge, a server of numbers, and a reward server, which answer whatever they are asked."""

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        served = {"any": wire.ServedReward(groupwise=False, fingerprint="f")}
        self.answer(
            wire.encode_description(wire.ServerDescription(rewards=served, max_batch_size=8, max_request_mib=8))
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/chat/completions"):
            token = {"token": "Yes", "logprob": -0.1, "top_logprobs": [{"token": "Yes", "logprob": -0.1}]}
            text = "Yes\nScore: 5\nFinal Score: 3\nAnswer: 1"
            choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": [token]}}
            self.answer(json.dumps({"choices": [choice]}).encode())
        elif self.headers["Content-Type"] == wire.MEDIA_TYPE:
            _, samples = wire.decode_request(body)
            self.answer(wire.encode_answer([0.5] * len(samples), [""] * len(samples)))
        else:
            self.answer(json.dumps({"scores": [0.5] * len(json.loads(body)["samples"])}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def take_all(sample: Sample) -> float:
    """A function of the user's that looks at everything."""
    return float(len([getattr(sample, name) for name in FIELDS]))


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "aesthetic": tiny.write_aesthetic,
    "image_class": tiny.write_image_classifier,
    "clip_score": tiny.write_clip,
    "pickscore": tiny.write_clip,
    "hpsv2": tiny.write_clip,
    "image_reward": tiny.write_image_reward,
    "hpsv3": tiny.write_hpsv3,
    "video_reward": tiny.write_video_reward,
    "edit_reward": tiny.write_edit_reward,
    "image_similarity": tiny.write_dinov2,
    "text_reward_model": tiny.write_text_reward_model,
    "process_reward_model": tiny.write_text_reward_model,
}
FURTHER: dict[str, dict[str, Any]] = {
    "image_class": {"image_class": "nsfw"},
    "video_reward": {"frame_rate": 8.0, "dtype": "fp32"},
    "hpsv3": {"dtype": "fp32"},
    "edit_reward": {"dtype": "fp32"},
    "length": {"target": 3},
    "overlong": {"max_length": 9, "buffer": 3},
    "rubric": {"rubric": "Light is good."},
    "environment": {"key": "reward"},
    "format": {"template": "think"},
    "function": {"path": f"{__name__}:take_all", "process": False},
    "ocr": {"engine": "rapidocr"},
    "heard_words": {"max_new_tokens": 8},
}
JUDGES = {name for name, cls in ALL.items() if "model" in {field.name for field in dataclasses.fields(cls)}}


def build(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Reward:
    fields = dict(FURTHER.get(name, {}))
    if name in FOLDERS:
        fields |= {"model_path": str(FOLDERS[name](tmp_path / name)), "device": "cpu"}
    elif name in ("clap", "heard_words"):
        folder = request.getfixturevalue("clap" if name == "clap" else "whisper")
        fields |= {"model_path": str(folder), "device": "cpu"}
    elif name == "geneval":
        fields |= {"detector": str(request.getfixturevalue("folders") / "detector"), "device": "cpu"}
    elif name in JUDGES | {"http", "remote"}:
        fields |= {
            "base_urls": (request.getfixturevalue("url"),),
            "allow_private": True,
            "timeout_s": 20.0,
            "request_timeout_s": 9.0,
            "retry_for_s": 1.0,
        }
        fields |= {"model": "m"} if name in JUDGES else {}
        if name == "dpg_bench":
            fields["questions"] = str(write_table(tmp_path / "table.csv"))
    return ALL[name](**fields)


def sample_for(name: str) -> Watched:
    kinds = {"video_reward": "video", "dpg_bench": "image"}
    kind = kinds.get(name, ALL[name].modality or "image")
    fields = {"prompt": PROMPT, "metadata": METADATA, "group_id": 0, **SAMPLES[kind]}
    if name == "dpg_bench":
        fields["prompt"] = CAT
    if name == "multiple_choice":
        fields["metadata"] = {"answer": "B"}
    if name == "reasoning_gym":
        fields["metadata"] = {"metadata": REASONING, "answer": "3"}
    return Watched(**fields)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_reward_reads_no_more_of_a_sample_than_it_says(name: str, tmp_path: Path, request: Any) -> None:
    assert set(READ) == set(ALL), "a reward that is new here"
    reward = build(name, tmp_path, request)
    try:
        reward.prepare()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    sample = sample_for(name)
    Watched.read = set()
    (value,) = reward.score([sample])
    read, Watched.read = Watched.read, set()
    assert isinstance(value, float) and np.isfinite(value), value
    assert read <= READ[name]
    if READ[name] not in (SHOWN, FIELDS) and name != "http":
        assert read == READ[name]
    if reward.modality and name not in JUDGES:  # these look what kind of sample it is
        others = {"image", "text", "sound"} - {reward.modality}
        assert not read & others
    if reward.modality == "image" and name not in JUDGES:
        assert reward.compares_source == ("source" in read)
    if isinstance(reward, DifferentiableReward):
        pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        values = {reward.score_pixels(pixels, [prompt]).item() for prompt in ("a red cat", "a blue dog and a cat")}
        assert reward.reads_prompt == (len(values) == 2) == ("prompt" in read)
