"""Videos with sound to train a tiny model on, its autoencoders, and rewards that see light and hear a level.

    python docs/examples/clips.py runs/sound/clips

writes short videos that are bright and loud or dark and quiet, with captions (``metadata.jsonl``), ``prompts.jsonl``
and ``eval_prompts.jsonl`` with the light and the level of each, and ``model``, the pipeline of
configs/sound/tiny_ltx2.yaml, whose autoencoders and vocoder are trained on these videos: a random vocoder makes the
same sound of all latents. Two captions of five are the other one, as captions of collected files may be: RL has to mend
what a model learns from them.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, mse_loss

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.config.sections import ModelConfig
from sfumato.data.images.prompts import Prompt
from sfumato.data.sounds.video_sound import VideoSoundDataset
from sfumato.models.diffusion.families.ltx2 import LTX2
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.diffusion.mel_spectrogram import log_mel_spectrogram
from sfumato.rewards.base import Sample
from sfumato.rewards.sound import level_db
from sfumato.rollout.diffusion.trajectory_sampler import decode_samples, sample_of
from sfumato.tracking.waveforms import FULL_SCALE

DESCRIPTION = Path(__file__).parents[2] / "configs" / "sound" / "tiny_ltx2.yaml"

CAPTIONS = {"bright and loud": (0.85, -10.0), "dark and quiet": (0.15, -35.0)}
"""Light of the frames, from 0 to 1, and level of the sound in decibels."""

FRAME_RATE = 24
RATE = 16000
SECONDS = 0.5
SIDE = 16
FRAMES = 5
COPIES = 60
MISLABELLED = 24
"""How many videos of a caption have the other one."""
EVALUATED = 32
"""How many videos of each prompt an evaluation draws."""
RANGE_DB = 25.0
"""How far from the wanted level a sound earns nothing."""
STEPS = 400
"""Updates of the autoencoders and of the vocoder."""


def write_data(folder: Path) -> None:
    """Writes videos, captions and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    rows = []
    for index, (caption, (light, level)) in enumerate(CAPTIONS.items()):
        other = list(CAPTIONS)[1 - index]
        for copy in range(COPIES):
            name = f"{caption.split()[0]}_{copy:02d}.mp4"
            slope = generator.uniform(-0.1, 0.1, 2)
            write_clip(folder / name, light, slope, level + generator.uniform(-2, 2), generator)
            rows.append({"image": name, "text": other if copy < MISLABELLED else caption})
    prompts = [{"prompt": caption, "light": light, "level": level} for caption, (light, level) in CAPTIONS.items()]
    files = {"metadata.jsonl": rows, "prompts.jsonl": prompts, "eval_prompts.jsonl": prompts * EVALUATED}
    for name, lines in files.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_clip(path: Path, light: float, slope: np.ndarray, level: float, generator: np.random.Generator) -> None:
    """Writes frames of a light that changes by ``slope`` from edge to edge, and noise of a level in decibels."""
    import av

    down, across = np.meshgrid(*[np.linspace(-1, 1, 2 * SIDE)] * 2, indexing="ij")
    grey = (255 * (light + slope[0] * down + slope[1] * across)).clip(0, 255).astype(np.uint8)
    noise = 10 ** (level / 20) * generator.standard_normal(round(SECONDS * RATE))
    samples = (FULL_SCALE * noise.clip(-1, 1)).astype(np.int16)
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=Fraction(FRAME_RATE))
        video.width, video.height, video.pix_fmt = 2 * SIDE, 2 * SIDE, "yuv420p"
        audio = container.add_stream("aac", rate=RATE, layout="mono")
        for _ in range(round(SECONDS * FRAME_RATE)):
            frame = np.ascontiguousarray(np.repeat(grey[:, :, None], 3, axis=2))
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode())
        sound = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        sound.sample_rate = RATE
        container.mux(audio.encode(sound))
        container.mux(audio.encode())


def write_model(folder: Path) -> None:
    """Trains the autoencoders and the vocoder of the tiny pipeline on the videos, and writes it to ``folder/model``."""
    model = build_diffusion_model(ModelConfig(config_path=str(DESCRIPTION), max_sequence_length=16))
    assert isinstance(model, LTX2)
    pixels, sounds = read_clips(folder, model)
    train_autoencoders(model, pixels.float() / 127.5 - 1, sounds.float() / FULL_SCALE)
    model.pipeline.save_pretrained(folder / "model")


def read_clips(folder: Path, model: LTX2) -> tuple[Tensor, Tensor]:
    """The videos as training reads them: uint8 pixels ``[B, 3, F, H, W]`` and int16 sounds ``[B, 2, N]``."""
    settings = {"train_path": str(folder), "height": SIDE, "width": SIDE, "num_frames": FRAMES}
    config = ImageTextDataConfig.model_validate({"data_type": "video_sound_text"} | settings)
    dataset = VideoSoundDataset(config)
    dataset.take_format(model.encoded_rate, model.num_channels, model.frame_rate)
    pictures = [dataset.picture(index) for index in range(len(dataset))]
    sounds = [picture.sound for picture in pictures if picture.sound is not None]
    return torch.stack([picture.pixels for picture in pictures]), torch.stack(sounds)


def train_autoencoders(model: LTX2, pixels: Tensor, sounds: Tensor) -> None:
    """Trains on pixels ``[B, 3, F, H, W]`` in -1 to 1 and sounds ``[B, 2, N]``, and sets the latents' statistics."""
    vae, audio_vae, vocoder = (getattr(model.pipeline, name) for name in ("vae", "audio_vae", "vocoder"))
    settings = audio_vae.config
    length = audio_vae.temporal_compression_ratio * (model.sound_tokens(pixels.shape[2]) - 1) + 1
    mel = log_mel_spectrogram(sounds, settings.sample_rate, settings.mel_hop_length, settings.mel_bins)[:, :, :length]
    hop = settings.mel_hop_length
    power = avg_pool1d(sounds[:, :, : length * hop].square(), hop)
    parts = [vae, audio_vae, vocoder]
    weights = [weight.requires_grad_(True) for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        rows = torch.randint(len(pixels), (16,), generator=generator)
        video = vae.decode(vae.encode(pixels[rows]).latent_dist.mode(), return_dict=False)[0]
        decoded = audio_vae.decode(audio_vae.encode(mel[rows]).latent_dist.mode(), return_dict=False)[0]
        wave = vocoder(decoded)
        levels = avg_pool1d(wave.square(), wave.shape[2] // length)
        errors = [
            mse_loss(video, pixels[rows]),
            mse_loss(decoded, mel[rows]),
            mse_loss(torch.log(levels + 1e-6), torch.log(power[rows] + 1e-6)),
        ]
        torch.stack(errors).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"autoencoders, step {step + 1}: errors of frames, spectrogram, level", *(f"{e:.3f}" for e in errors))
    for part in parts:
        part.requires_grad_(False)
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode()
        set_statistics(vae, latents.transpose(0, 1).flatten(1).T)
        packed = model.pipeline._pack_audio_latents(audio_vae.encode(mel).latent_dist.mode())
        set_statistics(audio_vae, packed.flatten(0, 1))


def set_statistics(vae: torch.nn.Module, rows: Tensor) -> None:
    """Sets mean and deviation of latents, by which they are normalised, to those of ``[N, C]``."""
    vae.get_buffer("latents_mean").copy_(rows.mean(dim=0))
    vae.get_buffer("latents_std").copy_(rows.std(dim=0).clamp(min=1e-3))


def print_decoded_rewards(folder: Path) -> None:
    """Prints what the videos themselves earn by their true captions, encoded and decoded by the trained parts."""
    model = build_diffusion_model(ModelConfig(model_path=str(folder / "model"), max_sequence_length=16))
    assert isinstance(model, LTX2)
    decoded = decode_samples(model, model.encode_pixels(*read_clips(folder, model)))
    prompts = [
        Prompt(caption, {"light": light, "level": level}, "docs/examples/clips.py")
        for caption, (light, level) in CAPTIONS.items()
        for _ in range(COPIES)
    ]
    samples = [sample_of(prompt, content, 0, None) for prompt, (content, _) in zip(prompts, decoded, strict=True)]
    for reward in (sees_light, hears_level):
        print(f"{reward.__name__} of the videos, encoded and decoded: {np.mean([*map(reward, samples)]):.3f}")


def sees_light(sample: Sample) -> float:
    """1 minus the distance of the frames' mean from the light in the column ``light``, from 0 to 1."""
    return 1 - abs(float(sample.frames.mean()) / 255 - sample.metadata["light"])


def hears_level(sample: Sample) -> float:
    """1 minus the distance of the sound's level from the column ``level``, in units of ``RANGE_DB``, from 0 to 1."""
    return max(0.0, 1 - abs(level_db(sample.waveform.mono) - sample.metadata["level"]) / RANGE_DB)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
    write_model(Path(sys.argv[1]))
    print_decoded_rewards(Path(sys.argv[1]))
