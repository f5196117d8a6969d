"""Videos with sound: both parts of a latent against diffusers' own pipeline, their loss, their files and their data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from sfumato.algorithms.flow_matching import add_noise, flow_matching_loss
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.dit import TrainDitConfig
from sfumato.config.image_data import ImageTextDataConfig
from sfumato.config.sections import ModelConfig
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.loader import IndexBatch
from sfumato.data.media.sound_tracks import read_sound_track
from sfumato.data.sounds.video_sound import VideoSoundDataset
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.encoded import OnlineEncoder
from sfumato.models.diffusion.encoders import open_encoder
from sfumato.models.diffusion.families.ltx2 import LTX2
from sfumato.models.diffusion.latent_cache import open_cache
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.diffusion.mel_spectrogram import log_mel_spectrogram
from sfumato.models.diffusion.video_with_sound import VideoSoundFamily
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.sound import Loudness
from sfumato.rollout.diffusion.evaluation import sample_images
from sfumato.rollout.diffusion.trajectory_sampler import decode_samples, sample_of
from sfumato.tracking import waveforms
from sfumato.tracking.samples import SampleRecord, read_frames, save_samples
from tests import tiny_families
from tests.family_rows import SEED, STEPS, ltx2_guidance, wake
from tests.tiny_videos import write_video, write_videos

av = pytest.importorskip("av")
pytest.importorskip("cv2")
pytest.importorskip("soundfile")

PROMPTS = ["write a cat", "C"]
FRAMES = 9
SIZE = (32, 32, FRAMES)
ALONE = Mesh(Layout(), torch.device("cpu"))


def tiny_model(folder: Path, describe: Any = tiny_families.tiny_ltx2) -> VideoSoundFamily:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(describe()))
    model = build_diffusion_model(ModelConfig(config_path=str(folder / "tiny.yaml"), max_sequence_length=24))
    assert isinstance(model, VideoSoundFamily)
    wake(model)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VideoSoundFamily:
    return tiny_model(tmp_path_factory.mktemp("ltx2"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"), {"low": 300.0, "high": 1800.0})


def write_description(folder: Path) -> Path:
    """A description of a model of pictures."""
    (folder / "sd3.yaml").write_text(yaml.safe_dump(tiny_families.tiny_sd3()))
    return folder / "sd3.yaml"


def dataset_of(path: Path, **settings: Any) -> VideoSoundDataset:
    values = {"height": 32, "width": 32, "num_frames": FRAMES, "train_path": str(path)} | settings
    dataset = VideoSoundDataset(ImageTextDataConfig(data_type="video_sound_text", **values))
    dataset.take_format(16000, 2, 24.0)
    return dataset


@pytest.mark.parametrize("describe", [tiny_families.tiny_ltx2, tiny_families.tiny_ltx23], ids=["ltx2", "ltx23"])
def test_frames_and_sound_equal_those_of_the_diffusers_pipeline(describe: Any, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, describe)
    pipeline = model.pipeline
    pipeline.set_progress_bar_config(disable=True)
    start = keyed_normal(model.latent_shape(*SIZE), SEED, "latent", 0, [0, 1])
    video, sound = model.split(start)
    audio_vae = pipeline.audio_vae
    sounds = []
    for scale in (1.0, 3.5):
        expected = pipeline(
            prompt=PROMPTS,
            height=32,
            width=32,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            max_sequence_length=24,
            latents=video.mT,
            audio_latents=pipeline._denormalize_audio_latents(sound.mT, audio_vae.latents_mean, audio_vae.latents_std),
            output_type="np",
            **ltx2_guidance(scale),
        )
        drawn = sample_images(
            model,
            model.encode_prompts(PROMPTS),
            [0, 1],
            size=SIZE,
            num_steps=STEPS,
            guidance_scale=scale,
            seed=SEED,
            micro_batch_size=2,
        )
        for index, content in enumerate(drawn):
            assert isinstance(content, waveforms.VideoWithSound)
            assert np.abs(content.frames.astype(float) - 255 * expected.frames[index]).max() <= 1
            waveform = expected.audio[index].numpy() * waveforms.FULL_SCALE
            assert content.sound.samples.shape == waveform.shape
            assert np.abs(content.sound.samples - waveform).max() <= 4
            assert content.sound.samples.std() > 100, "silence proves nothing"
            assert content.frames.std() > 1
        sounds.append(np.stack([content.sound.samples for content in drawn]).astype(int))  # pyright: ignore
    assert np.abs(sounds[0] - sounds[1]).max() > 20, "guidance must matter"


def test_the_loss_is_the_sum_of_the_means_of_both_parts(model: VideoSoundFamily) -> None:
    """As LTX-2's own trainer weighs them: the sound of a video is as important as its frames, whose tokens are many."""
    shape = model.latent_shape(*SIZE)
    latents, noise, velocity = (keyed_normal(shape, SEED, name, 0, [0, 1]) for name in ("latent", "noise", "velocity"))
    loss = flow_matching_loss(velocity, latents, noise, part_lengths=model.part_lengths(shape))
    squares = (velocity - (noise - latents)) ** 2
    sizes = model.sizes_of(shape)
    assert sizes == (3, 8, 8, 9)
    expected = squares[:, :, :192].mean(dim=(1, 2)) + squares[:, :, 192:].mean(dim=(1, 2))
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, 2 * squares.mean(dim=(1, 2)), rtol=1e-3)


def test_the_task_computes_the_loss_and_gradients_of_the_plain_loop(tmp_path: Path, videos: Path) -> None:
    from tasks.train_dit import denoising_losses

    model = tiny_model(tmp_path)
    encoder = OnlineEncoder(dataset_of(videos), model, BadRows(0, print))
    batch = encoder.batch(IndexBatch([0, 3], [5, 6]))
    config = TrainDitConfig.model_validate(
        {
            "model": {"config_path": str(tmp_path / "tiny.yaml")},
            "data": {"data_type": "video_sound_text", "train_path": str(videos), "num_frames": FRAMES},
            "train": {"output_dir": str(tmp_path / "run")},
            "flow": {"prompt_dropout": 0.0},
        }
    )
    transformer = model.pipeline.transformer.requires_grad_(True)
    denoising_losses(model, batch, config.flow, seed=1, step=0).mean().backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in transformer.named_parameters() if parameter.grad is not None
    }
    transformer.zero_grad()

    noise = keyed_normal(batch.latents.shape[1:], 1, "noise", 0, [5, 6])
    from sfumato.algorithms.flow_matching import draw_sigma
    from sfumato.algorithms.noise import keyed_uniform

    shift = math.exp(0.95 + (192 - 1024) * (2.05 - 0.95) / (4096 - 1024))  # of the tokens of the video alone
    sigma = draw_sigma(keyed_uniform(1, "sigma", 0, [5, 6]), "logit_normal", 0.0, 1.0, shift)
    noisy = add_noise(batch.latents, noise, sigma)
    tensors = batch.conditioning.tensors
    outputs = transformer(
        hidden_states=noisy[:, :, :192].mT,
        audio_hidden_states=noisy[:, :, 192:].mT,
        encoder_hidden_states=tensors["prompt_embeds"],
        audio_encoder_hidden_states=tensors["sound_prompt_embeds"],
        timestep=1000 * sigma,
        sigma=1000 * sigma,
        encoder_attention_mask=tensors["prompt_mask"],
        audio_encoder_attention_mask=tensors["prompt_mask"],
        num_frames=3,
        height=8,
        width=8,
        audio_num_frames=9,
        use_cross_timestep=True,
        return_dict=False,
    )
    target = (noise - batch.latents).mT
    loss = (outputs[0] - target[:, :192]).square().mean() + (outputs[1] - target[:, 192:]).square().mean()
    loss.backward()
    assert len(gradients) > 100
    for name, parameter in transformer.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_a_video_starts_from_its_own_first_frame(tmp_path: Path, videos: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_families.tiny_ltx2()))
    config = ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=24, from_images=True)
    model = build_diffusion_model(config)
    model.frames = FRAMES
    batch = OnlineEncoder(dataset_of(videos), model, BadRows(0, print)).batch(IndexBatch([0, 3], [5, 6]))
    first_frame = batch.conditioning.tensors["image_tokens"]
    torch.testing.assert_close(first_frame, batch.latents[:, :, :64], atol=1e-4, rtol=1e-4)
    assert first_frame.std() > 0.01


def test_two_sizes_with_equally_many_tokens_are_refused(model: VideoSoundFamily) -> None:
    model.latent_shape(32, 64, 5)
    with pytest.raises(ValueError, match="equally many tokens"):
        model.latent_shape(64, 32, 5)


@pytest.mark.parametrize(("length", "channels"), [(667, 1), (5043, 2)])
def test_the_spectrogram_is_that_of_transformers(length: int, channels: int) -> None:
    sound = torch.randn(2, channels, length, generator=torch.Generator().manual_seed(1)) * 0.2
    ours = log_mel_spectrogram(sound, 16000, 160, 64)
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    theirs = spectrogram(
        sound[1, 0].numpy().astype(np.float64),
        window_function(1024, "hann"),
        1024,
        160,
        power=1.0,
        mel_filters=filters,
        mel_floor=1e-5,
        log_mel="log",
    )
    assert ours.shape == (2, channels, 1 + length // 160, 64)
    torch.testing.assert_close(ours[1, 0].double(), torch.from_numpy(theirs.T).double(), atol=2e-4, rtol=1e-3)


def test_frames_are_taken_at_the_models_rate_with_their_sound(tmp_path: Path) -> None:
    """Of a video of 48 frames a second every second one, of one of 12 each twice, and the sound of the same time."""
    rows = []
    for rate in (12, 24, 48):
        write_video(tmp_path / f"{rate}.mp4", seconds=1.0, frame_rate=rate, frequency=500.0)
        rows.append({"image": f"{rate}.mp4", "text": "a"})
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = dataset_of(tmp_path / "metadata.jsonl")
    slow, plain, fast = (dataset.picture(index) for index in range(3))
    assert plain.pixels.shape == fast.pixels.shape == (3, FRAMES, 32, 32)
    assert (plain.pixels.float() - fast.pixels.float()).abs().mean() < 6  # of another compression
    assert torch.equal(slow.pixels[:, 1], slow.pixels[:, 2])
    for picture in (slow, plain, fast):
        assert picture.sound is not None
        assert picture.sound.shape == (2, 375 * 16)
        spectrum = np.abs(np.fft.rfft(picture.sound[0].numpy().astype(float)))
        assert abs(spectrum.argmax() / 0.375 - 500) < 6


def test_the_sound_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    write_video(tmp_path / "silent.mp4", frequency=None)
    samples = (np.sin(np.arange(8000) * 2 * np.pi * 700 / 8000) * 9000).astype(np.int16)
    (tmp_path / "tone.wav").write_bytes(waveforms.Waveform(samples[None], 8000).wav())
    row = {"image": "silent.mp4", "audio": "tone.wav", "text": "a"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    dataset = dataset_of(tmp_path / "metadata.jsonl")
    assert len(dataset.files(0)) == 2
    sound = dataset.picture(0).sound
    assert sound is not None
    assert abs(np.abs(np.fft.rfft(sound[0].numpy().astype(float))).argmax() / 0.375 - 700) < 6


def test_rewards_of_the_example_see_light_and_hear_level() -> None:
    from docs.examples.clips import RANGE_DB, hears_level, sees_light

    frames = np.full((5, 16, 16, 3), 204, np.uint8)  # a light of 0.8
    samples = np.full((2, 680), round(0.1 * waveforms.FULL_SCALE), np.int16)  # -20 decibels
    sample = Sample(
        image=frames,
        sound=waveforms.Waveform(samples, 4000),
        frame_rate=24.0,
        prompt="bright and loud",
        metadata={"light": 0.85, "level": -10.0},
        group_id=0,
    )
    assert sees_light(sample) == pytest.approx(0.95, abs=1e-6)
    assert hears_level(sample) == pytest.approx(1 - 10 / RANGE_DB, abs=1e-3)
    sample.metadata["level"] = -50.0
    assert hears_level(sample) == 0.0


def test_the_example_trains_autoencoders_whose_latents_have_mean_0_and_deviation_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from docs.examples import clips

    monkeypatch.setattr(clips, "COPIES", 3)
    monkeypatch.setattr(clips, "MISLABELLED", 1)
    monkeypatch.setattr(clips, "STEPS", 4)
    clips.write_data(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert [row["image"].split("_")[0] == row["text"].split()[0] for row in rows] == [False, True, True] * 2
    model = build_diffusion_model(ModelConfig(config_path=str(clips.DESCRIPTION), max_sequence_length=16))
    assert isinstance(model, LTX2)
    pixels, sounds = clips.read_clips(tmp_path, model)
    light = pixels.float().mean(dim=(1, 2, 3, 4)) / 255
    assert (light[:3] - 0.85).abs().max() < 0.05 and (light[3:] - 0.15).abs().max() < 0.05
    before = model.pipeline.vocoder.conv_out.weight.clone()
    clips.train_autoencoders(model, pixels.float() / 127.5 - 1, sounds.float() / waveforms.FULL_SCALE)
    assert not torch.equal(before, model.pipeline.vocoder.conv_out.weight)
    for part in model.split(model.encode_pixels(pixels, sounds)):
        features = part.transpose(0, 1).flatten(1)
        torch.testing.assert_close(features.mean(dim=1), torch.zeros(4), atol=1e-3, rtol=0)
        torch.testing.assert_close(features.std(dim=1), torch.ones(4), atol=1e-3, rtol=0)


def spoil(path: Path, kind: str) -> Path:
    """A video file that is broken in one way."""
    settings: dict[str, Any] = {
        "no sound": {"frequency": None},
        "silent": {"level": 0.0},
        "short": {"seconds": 0.2},
        "short sound": {"seconds": 0.5},
    }
    write_video(path, **settings.get(kind, {}))
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    if kind == "empty":
        path.write_bytes(b"")
    if kind == "text":
        path.write_text("not a video")
    if kind == "image":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + content[:50])
    if kind == "zeros":
        path.write_bytes(content[:100] + bytes(len(content) - 100))
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no sound", "without sound: leave it out, or give its sound in data.sound_key"),
        ("silent", "that is silent"),
        ("short", r"a video of 0.21 s for 9 frames of 24 per second, which are 0.38 s"),
        ("truncated", "broken|cannot be read|no frame"),
        ("empty", "is empty|broken"),
        ("text", "broken"),
        ("image", "broken"),
        ("zeros", "broken"),
    ],
)
def test_broken_videos_are_named(kind: str, message: str, tmp_path: Path) -> None:
    spoil(tmp_path / "clip.mp4", kind)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"image": "clip.mp4", "text": "a"}) + "\n")
    with pytest.raises(DataError, match=message) as error:
        dataset_of(tmp_path / "metadata.jsonl").picture(0)
    assert "metadata.jsonl, line 1" in str(error.value)


@pytest.mark.parametrize(
    ("ending", "codecs", "channels"),
    [("mkv", ("mpeg4", "libmp3lame"), 2), ("webm", ("libvpx", "libopus"), 1), ("mov", ("mpeg4", "aac"), 6)],
)
def test_sound_of_other_containers(ending: str, codecs: tuple[str, str], channels: int, tmp_path: Path) -> None:
    rate = 48000
    path = tmp_path / f"clip.{ending}"
    write_video(path, rate=rate, channels=channels, codecs=codecs)
    track = read_sound_track(path, 0.375, "row 1")
    assert track.rate == rate
    assert track.samples.shape == (18000, min(channels, 2))
    assert track.seconds == pytest.approx(0.5, abs=0.05)
    assert read_sound_track(path.read_bytes(), 0.375, "row 1").samples.shape == track.samples.shape


def test_what_follows_a_gap_in_the_sound_stays_with_its_pictures(tmp_path: Path) -> None:
    """As of recordings that lost sound for a while: 0.3 s are missing before a tone begins."""
    rate, begin = 8000, 3200
    with av.open(str(tmp_path / "clip.mkv"), "w") as container:
        video = container.add_stream("mpeg4", rate=25)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = container.add_stream("pcm_s16le", rate=rate, layout="mono")
        for _ in range(15):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        container.mux(video.encode())
        for start, level in ((0, 0), (begin, 9000)):
            sound = av.AudioFrame.from_ndarray(np.full((1, 800), level, np.int16), format="s16", layout="mono")
            sound.sample_rate, sound.pts = rate, start
            container.mux(audio.encode(sound))
        container.mux(audio.encode())
    samples = read_sound_track(tmp_path / "clip.mkv", 0.6, "row 1").samples[:, 0]
    assert np.flatnonzero(samples)[0] == begin and len(samples) == begin + 800
    assert len(read_sound_track(tmp_path / "clip.mkv", 0.25, "row 1").samples) == 2000


def test_a_cache_gives_the_latents_of_the_online_encoder(model: VideoSoundFamily, videos: Path, tmp_path: Path) -> None:
    rows = IndexBatch([0, 2], [7, 8])
    online = OnlineEncoder(dataset_of(videos), model, BadRows(0, print)).batch(rows)
    cache = open_cache(tmp_path / "cache", dataset_of(videos), model, BadRows(0, print))
    cached = cache.batch(rows)
    torch.testing.assert_close(cached.latents, online.latents, atol=1e-5, rtol=1e-5)
    sound = model.split(online.latents)[1]
    assert (sound[0] - sound[1]).abs().max() > 0.05, "the tones must be told apart"
    torch.testing.assert_close(
        model.encode_pixels(
            *(
                torch.stack([getattr(dataset_of(videos).picture(index), part) for index in (0, 2)])
                for part in ("pixels", "sound")
            )
        ),
        online.latents,
        atol=1e-5,
        rtol=1e-5,
    )


def test_data_without_sound_is_refused(model: VideoSoundFamily, videos: Path) -> None:
    from sfumato.data.images.image_text import ImageTextDataset

    config = ImageTextDataConfig(height=32, width=32, num_frames=FRAMES, train_path=str(videos))
    with pytest.raises(ConfigError, match=r"data.data_type image_text: LTX2Pipeline makes videos with sound"):
        open_encoder(ImageTextDataset(config), model, config, ALONE, print, lambda loop, _: loop)
    other = build_diffusion_model(ModelConfig(config_path=str(write_description(videos.parent)), max_sequence_length=7))
    with pytest.raises(ConfigError, match=r"StableDiffusion3Pipeline makes no videos with sound: take image_text"):
        open_encoder(dataset_of(videos), other, dataset_of(videos).config, ALONE, print, lambda loop, _: loop)
    with pytest.raises(Exception, match=r"data.num_frames: the frames of a video are required"):
        dataset_of(videos, num_frames=1)
    with pytest.raises(Exception, match=r"data\.mask_key"):
        dataset_of(videos, mask_key="mask")


def test_a_sound_that_is_not_finite_has_no_reward(model: VideoSoundFamily) -> None:
    shape = model.latent_shape(*SIZE)
    latents = keyed_normal(shape, SEED, "latent", 0, [0, 1])
    latents[1, 0, -1] = math.nan  # of the last token of the sound
    marked = decode_samples(model, latents)
    assert marked[0][1] == ""
    assert "NaN" in marked[1][1]


def test_rewards_hear_the_sound_once_and_see_the_frames(model: VideoSoundFamily) -> None:
    content = decode_samples(model, keyed_normal(model.latent_shape(*SIZE), SEED, "latent", 0, [0]))[0][0]
    sample = sample_of(_Prompt(), content, 0, None)  # pyright: ignore[reportArgumentType]
    (heard,) = Loudness().seen(sample)
    assert heard.image is None
    assert -60 < Loudness().score([heard])[0] < 0
    assert sample.frames.shape == (FRAMES, 32, 32, 3)
    with pytest.raises(AssertionError):
        Sample(prompt="", group_id=0, image=sample.image, sound=sample.sound)


class _Prompt:
    text = "write a cat"
    metadata: dict[str, object] = {}


def test_samples_are_written_with_their_sound(model: VideoSoundFamily, tmp_path: Path) -> None:
    from sfumato.evaluation.samples_folder import write_sounding_video

    content = decode_samples(model, keyed_normal(model.latent_shape(*SIZE), SEED, "latent", 0, [0]))[0][0]
    assert isinstance(content, waveforms.VideoWithSound)
    folder = save_samples(tmp_path, 3, [SampleRecord(content=content, kind="eval", prompt="a", seed=1, sample_id=0)])
    row = json.loads((folder / "samples.jsonl").read_text())
    assert (row["file"], row["sound"]) == ("eval_0000.webp", "eval_0000.wav")
    assert (folder / row["sound"]).read_bytes() == content.sound.wav()
    assert read_frames(folder / row["file"]).shape == (FRAMES, 32, 32, 3)
    assert write_sounding_video(content, tmp_path / "one.mp4")
    with av.open(str(tmp_path / "one.mp4")) as container:
        assert len(list(container.decode(container.streams.video[0]))) == FRAMES
        assert float(container.streams.video[0].average_rate) == 24.0
        assert container.streams.audio[0].channels == 2


def test_a_reader_that_dies_costs_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "clip.mp4")

    from sfumato.data.media import sound_tracks

    real_run = subprocess.run
    monkeypatch.setattr(
        sound_tracks.subprocess,
        "run",
        lambda *_, **__: real_run([sys.executable, "-c", "import os; os.abort()"], capture_output=True, check=False),
    )
    with pytest.raises(DataError, match=r"ends the reader of its sound \(exit -6\)"):
        read_sound_track(tmp_path / "clip.mp4", 0.3, "row 1")
