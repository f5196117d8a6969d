"""Audio beside tokens: an omni model against transformers one by one, rates and formats, broken files, operations."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.sounds import read_sound
from sfumato.data.text.packing import make_batch
from sfumato.errors import DataError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.load import build_language_model
from sfumato.models.language.packed_model import RowLayout
from sfumato.parallel.shards import trainable_parameters
from tests.one_by_one import assert_as_transformers, build_reader, samples_of
from tests.tiny import run_task_here
from tests.tiny_vision import (
    audio_row,
    clip,
    data_url,
    image_row,
    picture,
    sound,
    tiny_vision_config,
    tiny_vision_description,
    write_image_rows,
)

pytest.importorskip("soundfile", reason="audio needs soundfile and soxr (extra 'audio')")
pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")
pytest.importorskip("soxr", reason="audio needs soundfile and soxr (extra 'audio')")

KIND = "qwen2_5_omni_thinker"
QWEN3 = "qwen3_omni_moe_thinker"
LEAST = {KIND: 0.15, QWEN3: 1.0}
"""Seconds of the shortest audio."""


def omni_config(tmp_path, kind=KIND, **changes):
    tmp_path.mkdir(parents=True, exist_ok=True)
    config = tiny_vision_config(tmp_path, kind, **changes)
    config["data"]["data_type"] |= {"type": "media_conversation", "video_min_pixels": 64, "video_max_pixels": 2048}
    config["data"]["max_seq_len"] = 512
    for name, start in (("train_path", 0), ("eval_path", 50)):
        row = partial(audio_row, least=LEAST[kind])
        config["data"][name] = str(write_image_rows(tmp_path / f"{name}.jsonl", 8, start, row))
    return config


def build(tmp_path, kind=KIND, **changes):
    return build_reader(omni_config(tmp_path, kind, **changes))


@pytest.mark.parametrize("rows", ["packed", pytest.param("documents", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [KIND, pytest.param(QWEN3, marks=pytest.mark.slow)])
def test_documents_with_audio_are_those_of_transformers_one_by_one(tmp_path, kind, rows):
    model, transform = build(tmp_path, kind)
    with torch.no_grad():  # biases that are zero would hide what audio of other lengths does to it
        for name, weight in trainable_parameters(model.trained).items():
            if weight.ndim == 1 and "audio_tower" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    data_rows = [audio_row(index, LEAST[kind]) for index in range(5)]
    video = {"type": "video", "video": data_url(clip(32, 24, 14), "video/avi")}
    data_rows[3]["messages"][0]["content"].insert(0, video)
    data_rows[2]["messages"][0]["content"].insert(1, video)
    batch, gradients = assert_as_transformers(model, transform, data_rows, rows)
    assert len(batch.media) == 5 and "input_features" in batch.media[1]
    assert any("audio_tower" in name for name in gradients)


def test_a_batch_without_audio_computes_its_encoder_with_gradients_of_zero(tmp_path):
    model, transform = build(tmp_path)
    model.set_row_layout("sdpa", RowLayout("packed"))
    batch = make_batch(samples_of(transform, [image_row(1)]), [0], [0], True, 0, 2, model.vision)
    model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())
    for name, weight in trainable_parameters(model.trained).items():
        if "audio_tower" in name and "bos_eos" not in name:  # a weight that nothing uses
            assert weight.grad is not None and not weight.grad.any(), name


@pytest.mark.parametrize(
    ("kind", "seconds", "frames"),
    [
        (KIND, 0.2, 20),
        *(pytest.param(QWEN3, value, round(100 * value), marks=pytest.mark.slow) for value in (1.0, 3.0)),
    ],
)
def test_operations_of_audio_are_those_that_torch_counts(tmp_path, kind, seconds, frames):
    model, transform = build(tmp_path, kind)
    flops = FlopCount(model.plain, model.vision).encoder
    row = {"messages": [{"role": "user", "content": "<audio>?"}, {"role": "assistant", "content": "Yes."}]}
    row["audio"] = sound(seconds)  # of Qwen2.5-Omni one window
    (sample,) = samples_of(transform, [row])
    shapes = sample.documents[0].images.shapes
    assert shapes.tolist() == [[frames, 0, 0]]
    tensors = model.vision.reader.tensors(sample.documents[0].images)
    model.plain.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.plain.get_audio_features(**tensors)
    assert flops.forward(shapes) == counter.get_total_flops() > 0
    assert flops.training(shapes) == 3 * flops.forward(shapes)


@pytest.fixture(scope="module")
def transform(tmp_path_factory):
    return build(tmp_path_factory.mktemp("transform"))[1]


def test_audio_of_any_rate_and_format_becomes_one_channel_of_the_rate_of_the_model(tmp_path):
    import soundfile

    times = np.arange(44100) / 44100
    tone = np.stack([np.sin(2 * np.pi * 440 * times), np.zeros(44100)], axis=1) / 2
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) / 4
    for kind, near in (("wav", 1e-3), ("flac", 1e-3), ("mp3", 0.05), ("ogg", 0.05)):
        soundfile.write(tmp_path / f"a.{kind}", tone, 44100)
        samples = read_sound(tmp_path / f"a.{kind}", 16000, 30, "a test").samples
        assert samples.dtype == np.float32 and abs(len(samples) - 16000) < 1200
        np.testing.assert_allclose(samples[2000:14000], expected[2000:14000], atol=near)
    samples = read_sound(file_of(tone.mean(axis=1), "GSM610", 44100), 16000, 30, "a test").samples  # of voice mails
    np.testing.assert_allclose(samples[2000:14000], expected[2000:14000], atol=0.1)


def file_of(samples, subtype, rate=16000):
    import soundfile

    soundfile.write(file := io.BytesIO(), samples, rate, subtype, format="WAV")
    return file.getvalue()


def broken_rows():
    whole = sound(0.3)
    scaled = file_of(np.full(4800, 9830.4, np.float32), "FLOAT")
    ask = {"type": "text", "text": "What?"}

    def audio(content):
        return [{"type": "audio", "audio": data_url(content, "audio/wav")}, ask]

    return {
        "truncated": (audio(whole[: len(whole) // 2]), {}, "broken audio .*truncated"),
        "truncated flac": (audio(sound(0.3, kind="FLAC")[:2000]), {}, "broken audio"),
        "empty": (audio(b""), {}, "broken audio"),
        "m4a": (audio(b"\0\0\0\x20ftypM4A \0\0\0\0"), {}, "of a kind that is not read, such as AAC in M4A: write"),
        "adts": (audio(b"\xff\xf1" + bytes(range(200)) * 4), {}, "broken audio .*If a player plays it, write it"),
        "scaled to 32768": (audio(scaled), {}, "with samples of up to .*: scale it to -1 to 1"),
        "no samples": (audio(sound(0.0)), {}, "0 of 0 samples"),
        "picture": (audio(picture(16, 16)), {}, "broken audio"),
        "too long": (audio(sound(31.0, rate=1000)), {}, "of 31.0 s: at most 30 s"),
        "missing": ([{"type": "audio", "path": "nowhere.wav"}, ask], {}, "audio file not found: .*nowhere.wav"),
        "as image": ([{"type": "image", "image": data_url(whole)}, ask], {}, "broken image"),
        "too few": ("<audio> and <audio>?", {"audios": [whole]}, "audio is missing.*'audios' has 1"),
        "too many": ("<audio>?", {"audios": [whole] * 3}, "2 of 3 audios in its column have no place"),
        "its own": (
            [{"type": "text", "text": "<|audio_pad|>"}],
            {},
            "1 placeholders .* for 0 images and videos and audios",
        ),
        "a beginning": (
            [*audio(whole), {"type": "text", "text": "<|vision_start|>"}],
            {},
            r"<\|vision_start\|> and <\|audio_bos\|> stand 2 times in a conversation of 1 images, videos and audios",
        ),
        "speech": ([{"type": "speech", "speech": "a.wav"}], {}, "neither a text nor an image, a video, audio"),
    }


@pytest.mark.parametrize("name", broken_rows())
def test_broken_audio_is_named(transform, name):
    content, columns, message = broken_rows()[name]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}], **columns}
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 7.*({message})"):
        transform(FiledRow(row), "rows.jsonl, line 7")


@pytest.mark.parametrize("kind", [KIND, pytest.param(QWEN3, marks=pytest.mark.slow)])
def test_an_omni_model_is_trained_exported_and_goes_on_with_parts_frozen(tmp_path, kind):
    from transformers import AutoModelForImageTextToText

    train = {"max_steps": 2, "global_batch_size": 2, "param_groups": [{"match": "visual", "lr_scale": 0.1}]}
    config = omni_config(tmp_path, kind, train=train, eval={"every_steps": 2}, model={"freeze": ["audio_tower"]})
    folder = run_task_here("train_text", config) / "hf_ckpt"
    assert (folder / "preprocessor_config.json").is_file()
    again = {"model_path": str(folder), "config_path": None, "tokenizer_path": None}
    config = load_config(TrainTextConfig, overrides={**config, "model": again})
    reader = build_language_model(config.model, config.train, data_type=config.data.data_type).vision.reader
    assert reader.processor.feature_extractor.feature_size == 8 and reader.media == ("image", "video", "audio")
    assert reader.processor.image_processor.patch_size == 4
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.slow
def test_audio_that_is_computed_otherwise_beside_a_longer_one_is_refused(tmp_path):
    _, transform = build(tmp_path, QWEN3)
    with pytest.raises(DataError, match=r"a test: audio of 0.35 s: this model is trained on 1 s or more"):
        transform(FiledRow(audio_row(2)), "a test")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KIND, QWEN3])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_thinker_of_a_whole_omni_model_is_trained_and_exported_alone(tmp_path, kind, device):
    import transformers
    from safetensors.torch import load_file, save_file

    described = tiny_vision_description(kind)
    described.pop("model_type")
    model, _ = build(tmp_path / "processor", kind)
    name = "Qwen2_5Omni" if kind == KIND else "Qwen3OmniMoe"
    whole = getattr(transformers, f"{name}Config")(thinker_config=described, enable_audio_output=False)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(whole)
    folder = tmp_path / "whole"
    whole.save_pretrained(folder)
    speaks = {"talker.lm_head.weight": torch.ones(4, 4), "token2wav.a": torch.ones(4), "code2wav.a": torch.ones(4)}
    stored = load_file(folder / "model.safetensors") | {
        text: tensor for text, tensor in speaks.items() if not text.startswith("token2wav" if kind == QWEN3 else "code")
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model.tokenizer.save_pretrained(folder)
    model.vision.reader.save(folder, None)
    config = omni_config(tmp_path, kind, train={"max_steps": 1, "init_device": device, "lr": 1.0e-9})
    config["model"] = {"model_path": str(folder)}
    exported = run_task_here("train_text", config) / "hf_ckpt"
    cls = getattr(transformers, f"{name}ThinkerForConditionalGeneration")
    again, info = cls.from_pretrained(exported, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = again.state_dict()
    for name, weight in whole.thinker.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-7)
