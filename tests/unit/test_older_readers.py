"""Names that programs built on transformers 4 read stand in an export, and transformers 5 reads the same as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from sfumato.models.language.model_folder import save_tokenizer
from sfumato.models.older_readers import add_older_config_names, use_older_tokenizer_names
from tests.tiny_tokenizers import build_tokenizer

LLAMA_3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1000000, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "llama": {"rope_theta": 500000.0, "rope_scaling": {**LLAMA_3, "rope_type": "llama3"}},
    "glm4": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "gemma3_text": {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "qwen2_5_vl": {
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "rope_theta": 1000000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]},
        }
    },
}
"""Fields of published config.json files: Qwen3 8B, Llama 3.1 8B, GLM-4 9B, Gemma 3 4B's text, Qwen2.5-VL 7B."""


def _is_among(fields: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a configuration has the fields and those of its parts, perhaps among others."""
    return all(
        _is_among(value, config[name]) if isinstance(value, dict) else config.get(name) == value
        for name, value in fields.items()
    )


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_published_configuration_has_its_fields_again(model_type: str, tmp_path: Path) -> None:
    published = PUBLISHED[model_type]
    AutoConfig.for_model(model_type, **json.loads(json.dumps(published))).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not _is_among(published, written)  # transformers 5 writes other names alone
    before = AutoConfig.from_pretrained(tmp_path)

    add_older_config_names(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    assert _is_among(published, config)
    assert _is_among(written, config)
    after = AutoConfig.from_pretrained(tmp_path)
    assert after.get_text_config().rope_parameters == before.get_text_config().rope_parameters
    assert after.get_text_config().to_dict() == before.get_text_config().to_dict()


def test_layers_that_older_readers_do_not_know_stay_as_they_are(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma4_text").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert set(written["rope_parameters"]) == {"full_attention", "sliding_attention"}

    add_older_config_names(tmp_path)

    assert json.loads((tmp_path / "config.json").read_text()) == written


def test_a_tokenizer_is_read_by_its_older_class(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        model_specific_special_tokens={"image_token": "<|im_start|>"},
    )
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"

    use_older_tokenizer_names(tmp_path)

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_input_names"] == tokenizer.model_input_names
    assert config["additional_special_tokens"] == ["<|im_start|>"]
    assert config["extra_special_tokens"] == {"image_token": "<|im_start|>"}  # a list is an error in transformers 4
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(tokenizer)
    text = "<|im_start|>user\nHi<|im_end|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.image_token == "<|im_start|>"
    assert loaded.all_special_tokens == tokenizer.all_special_tokens


def test_a_sentencepiece_model_and_what_was_added_to_it_stay(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("metaspace")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.model").write_bytes(b"pieces")
    for source, is_copied in ((tmp_path / "source", True), ("", False)):
        out = tmp_path / f"out_{is_copied}"
        tokenizer.name_or_path = str(source)
        save_tokenizer(tokenizer, out)
        assert (out / "tokenizer.model").is_file() == is_copied
        added = json.loads((out / "tokenizer_config.json").read_text()).get("added_tokens_decoder", {})
        end = added.get(str(tokenizer.convert_tokens_to_ids("<|im_end|>")), {})
        assert (end.get("content"), end.get("special")) == (("<|im_end|>", True) if is_copied else (None, None))
        assert AutoTokenizer.from_pretrained(out)("a<|im_end|>")["input_ids"] == tokenizer("a<|im_end|>")["input_ids"]
