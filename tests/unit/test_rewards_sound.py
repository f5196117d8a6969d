"""Rewards that hear, against what transformers computes, on tiny networks made in code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.sound import (
    Clap,
    Clipping,
    HeardWords,
    Loudness,
    Silence,
    spoken_words,
    word_error_rate,
    words_of,
)
from sfumato.tracking.waveforms import Waveform
from tests.tiny_sound import tone


def sample(sound: Waveform, prompt: str = "a tone") -> Sample:
    return Sample(sound=sound, prompt=prompt, group_id=0)


def test_signs_of_empty_sound() -> None:
    loud = tone(440.0, level=1.0)
    quiet = tone(440.0, level=0.1)
    silence = Waveform(np.zeros((1, 1600), np.int16), 4000)
    half = Waveform(np.concatenate([loud.samples, silence.samples], axis=1), 4000)
    levels = Loudness().score([sample(sound) for sound in (loud, quiet, silence, half)])
    assert levels == pytest.approx([-3.01, -23.01, -100.0, -6.02], abs=0.01)
    assert Silence().score([sample(loud), sample(silence), sample(half)]) == [0.0, 1.0, 0.5]
    square = Waveform(np.where(loud.samples > 0, 32767, -32768).astype(np.int16), 4000)
    assert Clipping().score([sample(square), sample(quiet)]) == [1.0, 0.0]


def test_words_and_their_error_rate() -> None:
    assert words_of("It's TWO, two-three!") == ["it's", "two", "two", "three"]
    assert word_error_rate("one too three", "One two three.") == pytest.approx(1 / 3)
    assert word_error_rate("", "one two") == 1.0
    assert word_error_rate("one and two and", "one two") == 1.0
    assert spoken_words('say "hello there"', {}) == "hello there"
    assert spoken_words("x", {"target": "bye"}) == "bye"
    for prompt, metadata in (("say hello", {}), ("x", {"target": "..."}), ("x", {"target": 3})):
        with pytest.raises(DataError, match="finds no words for prompt"):
            spoken_words(prompt, metadata)


def test_words_of_other_writings() -> None:
    """Vowel signs make words, writing without spaces counts by characters, and apostrophes are of one kind."""
    assert word_error_rate("मैं किताब", "मैं कीताब") == 0.5
    assert word_error_rate("今天天气很好", "今天天气真好。") == pytest.approx(1 / 6)
    assert word_error_rate("Don't go", "don\u2019t 'go'") == 0.0
    assert words_of("Cafe\u0301 _ 東京 2") == ["café", "東", "京", "2"]


@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel

    from tests.tiny_tokenizers import build_tokenizer

    folder = tmp_path_factory.mktemp("clap")
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    audio = {
        "spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "patch_embeds_hidden_size": 8,
        "depths": [1, 1], "num_attention_heads": [2, 2], "window_size": 4, "num_hidden_layers": 2, "hidden_size": 16,
        "num_classes": 4,
    }  # fmt: skip
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "max_position_embeddings": 66, "pad_token_id": 1}  # fmt: skip
    torch.manual_seed(0)
    ClapModel(ClapConfig(audio_config=audio, text_config=text, projection_dim=8)).save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=16, sampling_rate=8000, max_length_s=1, hop_length=100, fft_window_size=256, frequency_max=4000,
        truncation="rand_trunc", padding="repeatpad",
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


SOUNDS = [tone(300.0, seconds=0.5), tone(900.0, seconds=1.0), tone(1500.0, seconds=2.3)]
PROMPTS = ["low", "a tone in the middle", "high"]


def test_clap_is_the_cosine_of_transformers(clap: Path) -> None:
    """Of a sound of one window; of a longer one it is the mean over its windows, and no number is drawn."""
    import soxr
    from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

    reward = Clap(model_path=str(clap), device="cpu")
    reward.prepare()
    values = reward.score([sample(*pair) for pair in zip(SOUNDS, PROMPTS, strict=True)])
    model = ClapModel.from_pretrained(clap).eval()
    extractor = ClapFeatureExtractor.from_pretrained(clap)
    tokenizer = AutoTokenizer.from_pretrained(clap)
    expected = []
    for sound, prompt in zip(SOUNDS, PROMPTS, strict=True):
        samples = soxr.resample(sound.mono, 4000, 8000)
        parts = [samples[start : start + 8000] for start in range(0, len(samples), 8000)]
        tokens = tokenizer([prompt], return_tensors="pt")
        cosines = []
        for part in parts:
            features = extractor(part, sampling_rate=8000, return_tensors="pt").input_features
            with torch.no_grad():
                heard = model.get_audio_features(input_features=features, is_longer=torch.zeros(1, 1)).pooler_output
                read = model.get_text_features(**tokens).pooler_output
            cosines.append(torch.nn.functional.cosine_similarity(heard, read).item())
        expected.append(np.mean(cosines))
    assert values == pytest.approx(expected, abs=1e-5)
    assert np.ptp(values) > 1e-4
    assert reward.score([sample(*pair) for pair in zip(SOUNDS, PROMPTS, strict=True)]) == values


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from tests.tiny_tokenizers import build_tokenizer

    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer), num_mel_bins=16, d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
            max_source_positions=50, max_target_positions=40, decoder_start_token_id=2, pad_token_id=0,
            bos_token_id=2, eos_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip
    model.generation_config.forced_decoder_ids = None
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, sampling_rate=8000, hop_length=80, chunk_length=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_heard_words_are_those_that_transformers_transcribes(whisper: Path) -> None:
    """A reward of 1 for the very words that the tiny network hears, and less where one of them is another."""
    from sfumato.rewards.networks.hearing import load_whisper

    network = load_whisper(str(whisper), "cpu", "fp32")
    with torch.inference_mode():
        alone = [network.transcribe([sound], "", 8)[0] for sound in SOUNDS]
        assert network.transcribe(SOUNDS, "", 8) == alone
    reward = HeardWords(model_path=str(whisper), device="cpu", max_new_tokens=8)
    targets = [words if words_of(words) else "nothing" for words in alone]
    rows = [
        Sample(sound=sound, prompt="x", metadata={"target": target}, group_id=0)
        for sound, target in zip(SOUNDS, targets, strict=True)
    ]
    expected = [max(1 - word_error_rate(words, target), 0.0) for words, target in zip(alone, targets, strict=True)]
    assert reward.score(rows) == pytest.approx(expected)


def test_folders_of_other_models_are_refused(clap: Path, whisper: Path) -> None:
    with pytest.raises(ConfigError, match="holds a model of type 'whisper', but this reward needs clap"):
        Clap(model_path=str(whisper)).prepare()
    with pytest.raises(ConfigError, match="holds a model of type 'clap', but this reward needs whisper"):
        HeardWords(model_path=str(clap)).prepare()
    with pytest.raises(ConfigError, match="is not a folder"):
        Clap(model_path="no/such").prepare()
