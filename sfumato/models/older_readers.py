"""What programs built on transformers 4 read in a model's folder by other names than transformers 5 writes.

Without those names such a program takes its own default for rotary positions, so that the model computes something else
without a word, takes another precision, or cannot load the tokenizer. transformers 5 reads them as it reads its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.file_checks import read_json_object

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""The kinds of layers of which transformers 4 knows rotary positions of their own."""

MODELS_WITH_LAYER_TYPES = ("gemma3_text", "gemma3n_text", "olmo3")
"""Model types with rotary positions for each kind of layer that transformers 4 reads from fields of the text's
configuration."""

OWN_FIELDS = ("rope_theta", "partial_rotary_factor")
"""Settings of rotary positions that stand beside ``rope_scaling`` in transformers 4, and not in it."""


def add_older_config_names(folder: Path) -> None:
    """Adds ``rope_theta``, ``rope_scaling``, ``torch_dtype`` and the like to a config.json of transformers 5.

    Args:
        folder: of the model; its config.json is written anew.
    """
    path = folder / "config.json"
    config = read_json_object(path)
    _add_older_names(config)
    _write(config, path)


def _add_older_names(config: dict[str, object]) -> None:
    """Adds the names to a configuration and to those of its parts, such as ``text_config``."""
    for part in [*config.values()]:
        if isinstance(part, dict):
            _add_older_names(part)
    if isinstance(config.get("dtype"), str):
        config["torch_dtype"] = config["dtype"]
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    if config.get("model_type") in MODELS_WITH_LAYER_TYPES and parameters.keys() == LAYER_TYPES:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    if "rope_theta" not in parameters:  # for each kind of layer, of a model that transformers 4 does not know
        return
    config |= {name: parameters[name] for name in OWN_FIELDS if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in OWN_FIELDS}
    if scaling != {"rope_type": "default"}:
        config["rope_scaling"] = scaling


def use_older_tokenizer_names(folder: Path) -> None:
    """Renames the class and the special tokens in the tokenizer_config.json that transformers 5 wrote.

    Args:
        folder: of the tokenizer; its tokenizer_config.json is written anew.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        # in transformers 4 that class gives token types, too, which causal models refuse
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(config.get("extra_special_tokens"), list):  # in transformers 4 a mapping of tokens with names
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if "model_specific_special_tokens" in config:
        config["extra_special_tokens"] = config.pop("model_specific_special_tokens")
    # such as image_token, which processors of transformers 4 find in the mapping alone
    named = {name: text for name, text in config.items() if _names_token(name) and isinstance(text, str)}
    if named:
        config.setdefault("extra_special_tokens", named)
    _write(config, path)


def _names_token(key: str) -> bool:
    """Whether a key of a tokenizer_config.json names a token that transformers' tokenizers have no field of their own
    for."""
    standard_names = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    return key.endswith("_token") and key not in standard_names


def use_older_names_in_pipeline(folder: Path) -> None:
    """Does both for the text encoders and tokenizers that diffusers wrote into a pipeline's folder by transformers 5.

    Args:
        folder: of the pipeline; files of its parts are written anew.
    """
    for part in (path for path in folder.iterdir() if path.is_dir()):
        if (part / "config.json").is_file():
            add_older_config_names(part)
        if (part / "tokenizer_config.json").is_file():
            use_older_tokenizer_names(part)


def _write(config: dict[str, object], path: Path) -> None:
    """Writes a file of settings as transformers does."""
    path.write_text(f"{json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)}\n", encoding="utf-8")


def copy_parts_of_source(folder: Path, source: Path, pipeline: DiffusionPipeline, freed: Iterable[str]) -> None:
    """Puts parts that a run did not change into the folder of an exported pipeline, as they came.

    Tokenizers are written by transformers 5 without the files that the classes of the same names read in transformers
    4. Freed encoders are not in the pipeline any more.

    Args:
        folder: the exported pipeline; its model_index.json is written anew.
        source: the folder from which the pipeline was loaded.
        pipeline: the pipeline that was written.
        freed: names of the encoders that were freed.
    """
    from transformers import PreTrainedTokenizerBase

    index_path = folder / "model_index.json"
    index = read_json_object(index_path)
    original = read_json_object(source / "model_index.json")
    parts = pipeline.components.items()
    names = [name for name, part in parts if isinstance(part, PreTrainedTokenizerBase) and name in original]
    for name in (*names, *freed):
        if (source / name).is_dir():
            if (folder / name).is_dir():  # not of encoders that were freed
                shutil.rmtree(folder / name)
            shutil.copytree(source / name, folder / name)
        index[name] = original.get(name, [None, None])
    index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
