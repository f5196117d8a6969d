"""Reinforcement learning with videos and audio in the prompts, of models that see and hear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.config.load import load_config, merge
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.media.document_media import images_of
from sfumato.data.media.kinds import AudioFile, VideoFile
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.probe import probe
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.debug.dumps import dump_path, read_dump
from sfumato.rollout.text.packing import pack_samples
from sfumato.rollout.text.policy import build_text_policy, open_prompts
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from tests.tiny import run_task_here
from tests.tiny_vision import sound
from tests.tiny_vision_rl import tiny_media_rl_config
from tests.unit.test_rl_vision import by_transformers, draw, values

pytest.importorskip("soundfile", reason="audio needs soundfile and soxr (extra 'audio')")
pytest.importorskip("soxr", reason="audio needs soundfile and soxr (extra 'audio')")
pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")

OMNI = "qwen2_5_omni_thinker"
SLOW = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker")


def loaded(tmp_path: Path, kind: str) -> tuple[Any, list[TextPrompt]]:
    """A policy in one process, and the prompts of its run."""
    config = load_config(TextRLConfig, overrides=tiny_media_rl_config(tmp_path, kind))
    _, prompts, _ = open_prompts(config, print)
    model, _ = build_text_policy(config)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    probe(model, config.model, config.train, config.max_seq_len, print)
    return model, prompts


def of_kind(prompts: list[TextPrompt], kind: type) -> list[TextPrompt]:
    """Prompts that have a video, or audio."""
    return [
        prompt for prompt in prompts if prompt.images and any(isinstance(one, kind) for one in prompt.images.find())
    ]


@pytest.mark.parametrize(
    "kind", ["qwen2_audio", "qwen3_vl", OMNI, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_drawn_tokens_have_the_log_probs_of_transformers(kind: str, tmp_path: Path) -> None:
    model, prompts = loaded(tmp_path, kind)
    heard, seen = of_kind(prompts, AudioFile), of_kind(prompts, VideoFile)
    assert bool(heard) == (kind not in ("qwen3_vl", *SLOW[:3])) and bool(seen) == (kind != "qwen2_audio")
    assert len(heard) + len(seen) > 2 and any(prompt.images is None for prompt in prompts)
    for number in range(2):
        drawn = draw(model, prompts[:5], max_batch_size=5)
        for sequence in drawn:
            actual, expected = torch.from_numpy(sequence.log_probs[sequence.drawn]), by_transformers(model, sequence)
            assert torch.allclose(actual, expected, atol=1e-5), (number, (actual - expected).abs().max())
        assert len({tuple(sequence.token_ids) for sequence in drawn[3:6]}) == 3, "the answers of a group differ"
        requests = [SampleRequest(index // 3, index % 3, 1) for index in range(len(drawn))]
        rollout = TextRollout(requests=requests, versions=[0] * len(drawn), sequences=[[one] for one in drawn])
        batch = pack_samples(rollout, model)  # as an update packs them
        again = model.token_log_probs([batch])[0][batch.loss_mask]
        before = torch.cat([torch.from_numpy(sequence.log_probs[sequence.drawn]) for sequence in drawn])
        assert torch.allclose(again, before, atol=1e-5)
        with torch.no_grad():  # and after weights have changed
            for parameter in model.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


def test_what_is_heard_changes_what_is_drawn(tmp_path: Path) -> None:
    model, prompts = loaded(tmp_path, "qwen2_audio")
    prompt = of_kind(prompts, AudioFile)[0]
    seconds = prompt.images.shapes[0, 0] / 100
    other = images_of([AudioFile(sound(seconds, seed=99))], prompt.images.shapes, "other")
    changed = TextPrompt(prompt.token_ids, prompt.text, prompt.messages, images=other)
    first, second = draw(model, [prompt]), draw(model, [changed])
    assert not np.array_equal(first[0].log_probs, second[0].log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OMNI, "qwen3_omni_moe_thinker"])
def test_a_drawn_token_by_which_media_are_found_ends_the_answer(kind: str, tmp_path: Path) -> None:
    model, prompts = loaded(tmp_path, kind)
    begins = {259, 263}
    assert begins <= model.vision.reader.media_tokens()
    prompt = of_kind(prompts, AudioFile)[0]
    for begin in begins:
        tokens = [*prompt.token_ids, 70, 71, begin]
        drawn = np.arange(len(tokens)) >= len(prompt.token_ids)
        numbers = np.zeros(len(tokens), np.float32)
        token_sequence = TokenSequence(np.array(tokens, np.int32), drawn, numbers, drawn - 1, "stop", prompt.images)
        rollout = TextRollout(requests=[SampleRequest(0, 0, 1)], versions=[0], sequences=[[token_sequence]])
        batch = pack_samples(rollout, model)
        result = model.token_log_probs([batch])[0][batch.loss_mask]
        assert torch.allclose(result, by_transformers(model, token_sequence), atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations that keeps what it drew."""
    settings = {"rollout": {"dump": True}, "train": {"max_steps": 2, "lr": 0.01}}
    return run_task_here("rl_text", tiny_media_rl_config(tmp_path_factory.mktemp("rl"), OMNI, **settings))


def test_a_run_is_on_policy_and_is_exported_with_what_it_heard_by(run: Path) -> None:
    assert max(values(run, "mismatch/log_ratio_max")) < 1e-5
    assert all(norm > 0 for norm in values(run, "grad_norm"))
    said = json.loads((run / "hf_ckpt/preprocessor_config.json").read_text(encoding="utf-8"))
    assert said["feature_size"] == 8 and (run / "hf_ckpt/video_preprocessor_config.json").is_file()


@pytest.mark.slow
def test_dumps_are_learned_from_without_the_data(run: Path, tmp_path: Path) -> None:
    dump = read_dump(dump_path(run, 1))
    kinds = {
        type(file) for sequence in dump.rollout.sequences if sequence[0].images for file in sequence[0].images.find()
    }
    assert kinds == {bytes, AudioFile, VideoFile}
    settings = {"rollout": {"load_dump": str(run)}, "train": {"max_steps": 2, "lr": 0.01}}
    again = run_task_here("rl_text", tiny_media_rl_config(tmp_path, OMNI, **settings))
    for name in ("loss/policy", "grad_norm", "reward/total", "mismatch/log_ratio_max"):
        assert values(again, name) == values(run, name), name


def test_broken_media_are_named_with_file_and_row(tmp_path: Path) -> None:
    config = tiny_media_rl_config(tmp_path, "qwen2_audio")
    path = Path(config["data"]["train_path"])
    rows = path.read_text(encoding="utf-8").splitlines()
    (tmp_path / "cut.wav").write_bytes(sound(0.3)[:5000])
    video = {"type": "video", "video": "a.mp4"}
    (tmp_path / "a.mp4").write_bytes(b"x")
    broken = [
        ({"prompt": "<audio>What?", "audios": ["cut.wav"]}, "broken audio .*cut.wav.*truncated"),
        ({"prompt": "<audio>What?", "audios": ["none.wav"]}, "none.wav"),
        ({"prompt": "What?", "audio": "cut.wav"}, "no place in a message"),
        ({"prompt": [{"role": "user", "content": [video]}]}, "a video: Qwen2AudioProcessor takes audio alone"),
        ({"prompt": "<image>What?", "images": ["none.png"]}, "none.png"),
    ]
    for row, named in broken:
        path.write_text("\n".join([rows[0], json.dumps(row | {"answer": "1"})]), encoding="utf-8")
        with pytest.raises(DataError, match=f"prompts.jsonl.*2.*{named}"):
            open_prompts(load_config(TextRLConfig, overrides=config), print)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"rollout": {"engine": {"type": "vllm", "program": "x"}, "hybrid_engine": False}},
            "rollout.engine vllm takes no videos and audio .*media_prompts has: take one that does, such as embedded",
        ),
        (
            {"rollout": {"engine": {"type": "sglang", "url": "http://x"}, "hybrid_engine": False}},
            "sglang takes no videos",
        ),
        ({"rollout": {"kind": "tools"}}, "rollout.kind tools"),
        ({"algorithm": {"recipe": "ppo"}}, "token_advantage gae"),
        ({"data": {"data_type": {"type": "media_prompts", "max_frames": 1}}}, "max_frames must be at least 2"),
    ],
)
def test_parts_that_take_neither_refuse_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = merge(tiny_media_rl_config(tmp_path, "qwen3_vl"), settings)
    if "engine" in settings.get("rollout", {}):
        config["model"] = {"model_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=named):
        load_config(TextRLConfig, overrides=config)
