"""Sounds of a run: WAV files and pictures of their spectrum, in the run folder, its report, and `sfumato sample`."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import anyio.from_thread
import numpy as np
import pytest
import yaml
from PIL import Image

from sfumato.config.diffusion_rl import ForwardRLConfig
from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config, parse_overrides
from sfumato.rewards.base import Sample
from sfumato.tracking.samples import SampleRecord, read_samples, save_samples_and_grids, step_folder
from sfumato.tracking.waveforms import Waveform, spectrum_picture
from tasks import rl_diffusion_forward, train_dit
from tests.tiny_sound import tiny_stable_audio3, tone, write_tones


def test_a_wav_file_holds_the_samples() -> None:
    samples = np.random.default_rng(0).integers(-32768, 32768, (2, 500), dtype=np.int16)
    with wave.open(io.BytesIO(Waveform(samples, 44100).wav())) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 44100, 2)
        assert np.array_equal(np.frombuffer(file.readframes(500), "<i2").reshape(-1, 2).T, samples)


@pytest.mark.parametrize("frequency", [250.0, 1000.0, 1750.0])
def test_the_brightest_row_of_a_picture_is_the_tone(frequency: float) -> None:
    picture = spectrum_picture(tone(frequency, seconds=0.5))
    row = picture.sum(axis=(1, 2)).argmax()
    assert (127.5 - row) / 128 * 2000 == pytest.approx(frequency, abs=2000 / 128 * 1.5)


def test_silence_and_very_short_sounds_have_pictures() -> None:
    assert not spectrum_picture(Waveform(np.zeros((1, 900), np.int16), 4000)).any()
    assert spectrum_picture(Waveform(np.full((2, 1), 9, np.int16), 4000)).shape == (128, 64, 3)


def test_a_sound_is_no_picture() -> None:
    sample = Sample(sound=tone(300.0), prompt="x", group_id=0)
    assert sample.shown.shape[-1] == 3
    with pytest.raises(AssertionError):
        _ = sample.pixels
    with pytest.raises(AssertionError):
        Sample(sound=tone(300.0), text="t", prompt="x", group_id=0)
    with pytest.raises(ValueError, match=r"int16 \[channels, N\]"):
        Waveform(np.zeros(5, np.int16), 4000)


def test_samples_are_files_that_the_report_plays(tmp_path: Path) -> None:
    from sfumato.tracking.report_samples import evaluation_grid

    records = [
        SampleRecord(content=tone(300.0 * (1 + index)), kind="eval", prompt=f"p{index}", seed=1, sample_id=index)
        for index in range(2)
    ]
    save_samples_and_grids(tmp_path, 3, records)
    folder = step_folder(tmp_path, 3)
    (first, second) = read_samples(tmp_path)[3]
    assert (first["file"], first["sound"]) == ("eval_0000.png", "eval_0000.wav")
    assert (folder / str(second["sound"])).read_bytes() == tone(600.0).wav()
    assert Image.open(folder / "grid_eval.png").size[0] > 64
    html = evaluation_grid(tmp_path, read_samples(tmp_path))
    assert html.count("<audio controls") == 2
    assert "data:audio/wav;base64," in html
    long = SampleRecord(content=tone(300.0, seconds=100.0), kind="eval", prompt="p", seed=1, sample_id=0)
    save_samples_and_grids(tmp_path, 4, [long])
    assert 'src="samples/step_000004/eval_0000.wav"' in evaluation_grid(tmp_path, read_samples(tmp_path))
    (folder / "samples.jsonl").write_text(json.dumps({**first, "sound": "../../../secret.wav"}) + "\n")
    assert "<audio" not in evaluation_grid(tmp_path, {3: read_samples(tmp_path)[3]})


def config_of(schema: Any, path: Path, sections: dict[str, Any]) -> Any:
    path.write_text(yaml.safe_dump(sections))
    return load_config(schema, str(path), parse_overrides([]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps on tones, one of which is too long and one broken."""
    folder = tmp_path_factory.mktemp("run")
    table = write_tones(folder / "tones", {"low": 1000.0, "high": 2000.0}, copies=2, rate=8000, seconds=0.1)
    (folder / "tones" / "low_1.wav").write_bytes(tone(1000.0, seconds=0.3, rate=16000).wav())
    (folder / "tones" / "high_1.wav").write_bytes(b"RIFF")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_stable_audio3()))
    config = config_of(
        TrainDitConfig,
        folder / "config.yaml",
        {
            "model": {"config_path": str(folder / "tiny.yaml")},
            "data": {
                "data_type": "sound_text",
                "train_path": str(table),
                "seconds": 0.1,
                "max_bad_rows": 1,
                "cache_dir": str(folder / "cache"),
            },
            "train": {"output_dir": str(folder / "run"), "micro_batch_size": 2, "max_steps": 2, "num_threads": 1},
            "sample": {"num_prompts": 2, "num_inference_steps": 2},
        },
    )
    train_dit.main(config)
    return folder / "run"


def test_a_run_trains_on_sounds(run: Path) -> None:
    log = (run / "log.txt").read_text()
    assert "sounds become 0.1 s of 8,000 Hz, 2 channel(s)" in log
    assert "1 of 3 sounds so far are longer than 0.1 s (data.seconds) and are cut there" in log
    assert "high_1.wav" in log
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert 0.5 < losses[0] < 10
    assert "<audio controls" in (run / "report.html").read_text()


def test_rl_scores_the_sounds_and_sample_draws_them(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"tone {name}"}) + "\n" for name in ("low", "high")))
    config = config_of(
        ForwardRLConfig,
        tmp_path / "rl.yaml",
        {
            "model": {"model_path": str(run / "hf_ckpt")},
            "data": {"train_path": str(prompts), "eval_path": str(prompts)},
            "rollout": {
                "num_prompts": 2,
                "n": 2,
                "micro_batch_size": 4,
                "seconds": 0.1,
                "num_inference_steps": 2,
                "guidance_scale": 1.0,
            },
            "reward": {"rewards": [{"type": "loudness"}, {"type": "silence", "weight": -1.0}]},
            "algorithm": {"recipe": "diffusion_nft"},
            "train": {"output_dir": str(tmp_path / "rl"), "micro_batch_size": 2, "max_steps": 1, "num_threads": 1},
            "eval": {"num_prompts": 2, "num_inference_steps": 2, "num_saved": 2},
        },
    )
    rl_diffusion_forward.main(config)
    rows = read_samples(tmp_path / "rl")[1]
    assert {row["kind"] for row in rows} == {"eval", "train"}
    assert all(-100 <= row["rewards"]["loudness"] <= 0 for row in rows)  # type: ignore[index]
    assert all(str(row["sound"]).endswith(".wav") for row in rows)

    from sfumato.cli import main

    assert (
        main(["sample", str(tmp_path / "rl"), "--prompt", "tone low", "--seconds", "0.2", "--out", str(tmp_path / "o")])
        == 0
    )
    files = list((tmp_path / "o").glob("*/*.wav"))
    assert len(files) == 2, "of the model before and after"
    with wave.open(str(files[0])) as opened:
        assert opened.getnframes() == 1600
    assert "<audio controls" in (tmp_path / "o" / "index.html").read_text()


@pytest.mark.slow
def test_the_playground_of_the_studio_answers_with_a_sound_and_its_spectrum(run: Path, tmp_path: Path) -> None:
    client_of = pytest.importorskip("starlette.testclient").TestClient
    from sfumato.studio.app import Studio, build_app
    from sfumato.studio.control import Control
    from sfumato.studio.thumbnails import Thumbnails
    from tests.studio_runs import HOST, TOKEN

    studio = Studio(run.parent, Thumbnails(tmp_path / "thumbnails"))
    control = Control(studio.runs, True)
    client = client_of(build_app(studio, TOKEN, more=control.routes()), base_url=HOST)
    with anyio.from_thread.start_blocking_portal() as portal:
        client.portal = portal
        client.get("/", params={"token": TOKEN})
        question = {"run": run.name, "prompt": "tone low", "steps": 2, "with_base": True}
        answers = client.post("/api/playground", json=question).json()["answers"]
        assert [answer["label"] for answer in answers] == ["base", "step 2"]
        for answer in answers:
            sound = client.get(answer["sound"])
            assert sound.headers["content-type"] == "audio/wav"
            with wave.open(io.BytesIO(sound.content)) as opened:
                assert (opened.getnframes(), opened.getnchannels()) == (800, 2)
                content = np.frombuffer(opened.readframes(800), "<i2").reshape(800, 2).T
            spectrum = np.asarray(Image.open(io.BytesIO(client.get(answer["spectrum"]).content)))
            np.testing.assert_array_equal(spectrum, spectrum_picture(Waveform(content, 8000)))
            assert "picture" not in answer
        portal.call(control.close)


def test_rewards_of_pictures_are_refused(tmp_path: Path) -> None:
    from sfumato.errors import ConfigError

    sections = {
        "model": {"model_path": "x"},
        "data": {"train_path": "x", "eval_path": "x"},
        "rollout": {"num_prompts": 2, "n": 2, "micro_batch_size": 4, "seconds": 0.1},
        "reward": {"rewards": [{"type": "brightness"}]},
        "algorithm": {"recipe": "diffusion_nft"},
        "train": {"output_dir": str(tmp_path / "rl"), "micro_batch_size": 2, "max_steps": 1},
    }
    with pytest.raises(ConfigError, match=r"brightness scores samples of another kind \(image\) than this task"):
        config_of(ForwardRLConfig, tmp_path / "rl.yaml", sections)
    sections["rollout"] = {"num_prompts": 2, "n": 2, "micro_batch_size": 4}
    sections["reward"] = {"rewards": [{"type": "loudness"}]}
    with pytest.raises(ConfigError, match=r"loudness scores samples of another kind \(sound\)"):
        config_of(ForwardRLConfig, tmp_path / "rl.yaml", sections)


def test_the_example_writes_tones_that_its_reward_hears(tmp_path: Path) -> None:
    from docs.examples.tones import COPIES, KEYS, hears_tone, write_data
    from sfumato.data.media.waveform_files import read_waveform

    write_data(tmp_path)
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(list(tmp_path.glob("*.wav"))) == COPIES * len(KEYS)
    for key in KEYS:
        sound = Waveform(read_waveform(tmp_path / f"{key}_00.wav", 4000, 1, 400, "")[0], 4000)
        heard = [hears_tone(Sample(sound=sound, prompt=row["prompt"], metadata=row, group_id=0)) for row in prompts]
        assert [row["prompt"] for row, value in zip(prompts, heard, strict=True) if value > 0.9] == [f"key {key}"]
        assert sorted(heard)[-2] < 0.01
