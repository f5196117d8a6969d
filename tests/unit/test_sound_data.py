"""Files of sound as data to train on: real ones, broken ones, and what is said of those that are cut or filled up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import soundfile

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.data.media.mp3_length import count_mp3_samples
from sfumato.data.media.waveform_files import read_waveform
from sfumato.data.sounds.sound_text import SoundTextDataset, open_captioned
from sfumato.errors import DataError
from tests.tiny_sound import tone, write_tones

SCIPY = Path(scipy.io.__file__).parent / "tests" / "data"
"""WAV files that the package ships, from several programs."""

SHIPPED = {
    "test-44100Hz-2ch-32bit-float-be.wav": (44100, 2),
    "test-44100Hz-2ch-32bit-float-le.wav": (44100, 2),
    "test-48000Hz-2ch-64bit-float-le-wavex.wav": (48000, 2),
    "test-44100Hz-be-1ch-4bytes.wav": (44100, 1),
    "test-44100Hz-le-1ch-4bytes.wav": (44100, 1),
    "test-44100Hz-le-1ch-4bytes-rf64.wav": (44100, 1),
    "test-8000Hz-le-2ch-1byteu.wav": (8000, 2),
    "test-8000Hz-le-1ch-1byte-ulaw.wav": (8000, 1),
}

WRITTEN = {
    "wav": "PCM_24",
    "flac": "PCM_16",
    "mp3": "MPEG_LAYER_III",
    "ogg": "VORBIS",
    "aiff": "PCM_16",
    "au": "PCM_16",
    "caf": "ALAC_16",
    "w64": "FLOAT",
}
"""Formats and encodings that libsndfile writes."""


@pytest.mark.parametrize("name", SHIPPED)
def test_files_that_a_package_ships(name: str) -> None:
    rate, channels = SHIPPED[name]
    expected, file_rate = soundfile.read(SCIPY / name, dtype="float64", always_2d=True)
    assert (file_rate, expected.shape[1]) == (rate, channels)
    milliseconds = max(len(expected) * 1000 // rate, 1)
    waveform, length = read_waveform(SCIPY / name, rate, channels, milliseconds, "here")
    count = milliseconds * rate // 1000
    assert waveform.shape == (channels, count)
    assert length == milliseconds
    assert np.abs(waveform.T / 32767 - expected[:count].clip(-1, 1)).max() <= 0.51 / 32767


@pytest.mark.parametrize("kind", WRITTEN)
def test_other_formats_rates_and_channels_become_the_models(kind: str, tmp_path: Path) -> None:
    """A tone stays the tone, at another rate and number of channels, also from the bytes of a table."""
    wave = np.stack([tone(440.0, seconds=1.0, rate=22050).mono] * 2, axis=1)
    path = tmp_path / f"tone.{kind}"
    soundfile.write(path, wave, 22050, WRITTEN[kind])
    waveform, milliseconds = read_waveform(path, 16000, 1, 800, "here")
    assert waveform.shape == (1, 12800)
    assert abs(milliseconds - 1000) <= 60  # of MP3 with its padding
    spectrum = np.abs(np.fft.rfft(waveform[0] * np.hanning(12800)))
    assert abs(np.argmax(spectrum) * 16000 / 12800 - 440) <= 2
    assert 0.4 < np.abs(waveform).max() / 32767 < 0.6
    assert np.array_equal(read_waveform(path.read_bytes(), 16000, 1, 800, "here")[0], waveform)


def sound_file(samples: np.ndarray, rate: int = 8000, kind: str = "WAV", subtype: str = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, subtype, format=kind)
    return buffer.getvalue()


WAVE = tone(440.0, seconds=1.0, rate=8000).mono


def not_finite() -> np.ndarray:
    wave = WAVE.copy()
    wave[100] = np.nan
    return wave


def flac_of_a_pipe() -> bytes:
    """Whose head says 0 for the number of its samples."""
    content = bytearray(sound_file(WAVE, kind="FLAC", subtype="PCM_16"))
    content[22:26] = bytes(4)
    return bytes(content)


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "broken audio"),
    "truncated WAV": (lambda: sound_file(WAVE)[:-9000], "it is truncated"),
    "truncated FLAC": (lambda: sound_file(WAVE, kind="FLAC", subtype="PCM_16")[:3000], "broken audio"),
    "head alone": (lambda: sound_file(WAVE)[:44], "broken audio|it is truncated"),
    "a text": (lambda: b"not a sound at all, but a line of text\n" * 20, "broken audio"),
    "a web page": (lambda: b"<!doctype html><html>404</html>" * 20, "broken audio"),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(500), "broken audio"),
    "FLAC of a pipe": (flac_of_a_pipe, "does not say how long it is, as FLAC files .*: write it anew"),
    "no samples": (lambda: sound_file(WAVE[:0]), "0 of 0 samples can be read"),
    "NaN": (lambda: sound_file(not_finite()), "not finite"),
    "silent": (lambda: sound_file(np.zeros(8000, np.float32)), "that is silent"),
    "scaled to 32768": (lambda: sound_file(WAVE * 32768), "scale it to -1 to 1"),
    "far too short": (lambda: sound_file(WAVE[:200]), r"of 0.03 s for 1 s: at least 10%"),
    "six channels": (lambda: sound_file(np.stack([WAVE] * 6, axis=1)), r"row 3: sound \([^()]*\) of 6 channels: mix"),
    "opposite channels": (
        lambda: sound_file(np.stack([WAVE, -WAVE], axis=1)),
        "silent: its two channels are each other",
    ),
    "hardly a sound": (lambda: sound_file(WAVE * 1e-5), "become silent: all of its samples are below 1/65534"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_named(kind: str, tmp_path: Path) -> None:
    content, message = BROKEN[kind]
    path = tmp_path / "sound.wav"
    path.write_bytes(content())
    for source in (path, path.read_bytes()):
        with pytest.raises(DataError, match=message) as caught:
            read_waveform(source, 8000, 1, 1000, "table.jsonl, row 3")
        assert str(caught.value).startswith("table.jsonl, row 3: ")


@pytest.mark.parametrize("kind", ["WAV", "RF64", "W64", "AIFF", "AU"])
def test_truncated_files_of_every_kind_that_states_its_size_are_refused(kind: str) -> None:
    content = sound_file(WAVE, kind=kind, subtype="PCM_16")
    assert read_waveform(content, 8000, 1, 1000, "row 3")[1] == 1000
    with pytest.raises(DataError, match=f"{len(content) - 9000} of {len(content)} bytes are there; it is truncated"):
        read_waveform(content[:-9000], 8000, 1, 1000, "row 3")


@pytest.mark.parametrize("size", [2**32 - 1, 0x7FFFF024])
def test_files_from_a_pipe_do_not_state_their_size(size: int) -> None:
    content = sound_file(WAVE)
    data = content.index(b"data") + 4
    sizes = [number.to_bytes(4, "little") for number in (size, size - 36 if size < 2**31 else size)]
    piped = content[:4] + sizes[0] + content[8:data] + sizes[1] + content[data + 4 :]
    whole, milliseconds = read_waveform(piped, 8000, 1, 1000, "row 3")
    assert milliseconds == 1000 and (whole == read_waveform(content, 8000, 1, 1000, "row 3")[0]).all()


def variable_mp3(loud: np.ndarray, quiet: np.ndarray, folder: Path) -> bytes:
    """An MP3 file whose bit rate changes, and without the frame whose table says its length."""
    path = folder / "variable.mp3"
    soundfile.write(
        path, np.concatenate([loud, quiet]), 44100, "MPEG_LAYER_III", bitrate_mode="VARIABLE", compression_level=0.5
    )
    content = path.read_bytes()
    place = max(content.find(b"Xing"), content.find(b"Info"))
    assert place > 0
    return content[:place] + b"none" + content[place + 4 :]


@pytest.mark.parametrize("is_loud_first", [True, False])
def test_an_mp3_file_that_does_not_say_its_length_is_refused(is_loud_first: bool, tmp_path: Path) -> None:
    """libsndfile takes the bit rate of its first frame for that of all, and reads no further."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 3 * 44100).astype(np.float32)
    parts = [noise, tone(440.0, seconds=3.0, rate=44100).mono]
    content = variable_mp3(*(parts if is_loud_first else parts[::-1]), tmp_path)
    for source in (content, tmp_path / "cut.mp3"):
        (tmp_path / "cut.mp3").write_bytes(content)
        with pytest.raises(
            DataError, match=r"row 3: audio \([^()]*\) of 6\.[01] s, of which \S+ s would be read.*Xing"
        ):
            read_waveform(source, 16000, 1, 1000, "row 3")
    # a tag before the sound, and the file as it was written
    whole = (tmp_path / "variable.mp3").read_bytes()
    assert read_waveform(b"ID3\4\0\0\0\0\1\0" + bytes(128) + whole, 16000, 1, 6000, "here")[1] == 6000


def test_constant_bit_rates_have_the_length_of_their_frames(tmp_path: Path) -> None:
    for rate in (44100, 22050, 8000):
        path = tmp_path / f"{rate}.mp3"
        wave = tone(440.0, seconds=2.0, rate=rate).mono
        soundfile.write(path, wave, rate, "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5)
        content = path.read_bytes()
        place = max(content.find(b"Xing"), content.find(b"Info"))
        plain = content[:place] + b"none" + content[place + 4 :] if place > 0 else content
        counted = count_mp3_samples(plain)
        assert counted is not None and abs(counted / rate - 2.0) < 0.4
        read_waveform(plain, 16000, 1, 1000, "here")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.wav", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            read_waveform(path, 8000, 1, 1000, "here")


def open_sounds(path: Path, **settings: Any) -> SoundTextDataset:
    config = ImageTextDataConfig(data_type="sound_text", train_path=str(path), **{"seconds": 0.4, **settings})
    dataset = open_captioned(config, 0)
    assert isinstance(dataset, SoundTextDataset)
    dataset.take_format(4000, 2)
    return dataset


def test_tables_and_folders(tmp_path: Path) -> None:
    table = write_tones(tmp_path / "tones", {"low": 300.0, "high": 900.0}, copies=1)
    by_table = open_sounds(table)
    assert by_table.caption(0) == "tone low"
    picture = by_table.picture(1)
    assert picture.pixels.shape == (2, 1600)
    assert picture.framing.tolist() == [1, 400, 0, 0]
    by_folder = open_sounds(tmp_path / "tones")
    assert by_folder.picture(1).pixels.equal(picture.pixels)
    table.unlink()
    for name in ("low_0", "high_0"):
        (tmp_path / "tones" / f"{name}.txt").write_text(f"a {name}")
    beside = open_sounds(tmp_path / "tones")
    assert [beside.caption(row) for row in range(2)] == ["a high_0", "a low_0"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no sounds"):
        open_sounds(tmp_path / "none")


def test_columns_that_name_a_part_of_a_file_are_said_to_have_no_effect(tmp_path: Path) -> None:
    """As in the manifests of NeMo, of which all rows of a file would be its beginning, with other captions."""
    rows = [{"audio": "a.wav", "text": "a"}, {"audio": "a.wav", "text": "b", "Offset": 4.0, "duration": 2.0}]
    for limit, num_said in ((2, 1), (1, 0)):
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:limit]))
        said = open_sounds(tmp_path / "t.jsonl").unused_files()
        assert ["column 'Offset' has no effect" in line for line in said] == [True] * num_said
    config = ImageTextDataConfig(data_type="image_text", train_path=str(tmp_path / "t.jsonl"), height=8, width=8)
    assert open_captioned(config, 0).unused_files() == []
    with pytest.raises(DataError, match=r"sound file not found: .*a\.wav"):
        open_sounds(tmp_path / "t.jsonl").picture(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_type": "sound_text"}, "data.seconds is required"),
        ({"data_type": "sound_text", "seconds": 1.0, "height": 64}, "data.height has no effect on sounds"),
        ({"seconds": 1.0}, "data.seconds has no effect with data.data_type image_text"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTextDataConfig(train_path="x", **settings)


def test_hugging_face_folders_and_columns(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(tone(500.0).wav())
    rows = [{"file_name": "a.wav", "text": "t"}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_sounds(tmp_path).picture(0).pixels.shape == (2, 1600)
    (tmp_path / "other.jsonl").write_text(json.dumps({"clip": "a.wav", "text": "t"}) + "\n")
    assert open_sounds(tmp_path / "other.jsonl", sound_key="clip").picture(0).pixels.any()
