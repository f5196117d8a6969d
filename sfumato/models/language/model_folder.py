"""The files of an export's folder: the weights, and what is taken over from the folder that was trained, such as
generation settings with the tokens that end an answer, the chat template, the padding token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.data.text.answer_end import AnswerEnd, answer_end_of, facts_of, read_json_file
from sfumato.models.language.hf_config import give_weights
from sfumato.models.language.source_folder import float32_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

GENERATION = "generation_config.json"
SENTENCEPIECE = "tokenizer.model"
OTHER_TEMPLATES = ("chat_template.json", "processor_config.json")
"""Files in which processors once kept a chat template, which hides the tokenizer's."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, keeps_pad: bool = False) -> None:
    """Writes a tokenizer with the chat template that the run has used.

    Args:
        tokenizer: with its facts (``TokenizerFacts``).
        folder: where to write.
        keeps_pad: whether to write a padding token that the tokenizer's own folder does not name. By default it is left
            out: the end of texts stands in for it, and a later run that leaves padding out of the loss would leave out
            the end of texts, too.
    """
    from sfumato.models.older_readers import use_older_tokenizer_names

    pad = tokenizer.pad_token  # the run goes on with it after this export
    if facts_of(tokenizer).is_pad_added and not keeps_pad:
        tokenizer.pad_token = None
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.pad_token = pad
    use_older_tokenizer_names(folder)
    if type(tokenizer).__module__.startswith("transformers."):
        _forget_code(folder)
    _copy_sentencepiece(tokenizer, folder)
    for file in (folder / name for name in OTHER_TEMPLATES):
        fields = read_json_file(file) if file.is_file() else {}
        if "chat_template" in fields and isinstance(tokenizer.chat_template, str):
            fields["chat_template"] = tokenizer.chat_template
            file.write_text(f"{json.dumps(fields, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def save_plain(
    plain: PreTrainedModel,
    weights: dict[str, Tensor],
    folder: Path,
    autocast_dtype: torch.dtype | None,
    source: Path | None,
) -> None:
    """Writes transformers' own module with these weights.

    Args:
        plain: whose weights are on meta.
        weights: by its names; the dictionary is emptied.
        folder: where to write.
        autocast_dtype: of forward passes, which float32 weights get, except for those that stay float32
            (``float32_names``).
        source: the folder that was trained; None where the model was described.
    """
    from sfumato.models.older_readers import add_older_config_names

    dtype = autocast_dtype or torch.float32
    for name in weights.keys() - float32_names(plain, source):
        if weights[name].dtype == torch.float32:
            weights[name] = weights[name].to(dtype)
    give_weights(plain, weights)
    plain.config.dtype = dtype
    plain.save_pretrained(folder)
    add_older_config_names(folder)


def _forget_code(folder: Path) -> None:
    """Removes the name of Python code that transformers' own class stands in for: the export has not its file."""
    path = folder / "tokenizer_config.json"
    config = read_json_file(path)
    if config.pop("auto_map", None) is not None:
        path.write_text(f"{json.dumps(config, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def _copy_sentencepiece(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Copies the SentencePiece model beside which a tokenizer lay, which transformers 5 writes no more.

    llama.cpp's converter needs it for Gemma, Phi-3 and others, and tokens that were added to it from
    tokenizer_config.json, where transformers 4 has written them.
    """
    source = Path(tokenizer.name_or_path) / SENTENCEPIECE
    if not tokenizer.name_or_path or not source.is_file():
        return
    shutil.copyfile(source, folder / SENTENCEPIECE)
    path = folder / "tokenizer_config.json"
    config = read_json_file(path)
    added = tokenizer.added_tokens_decoder.items()
    config["added_tokens_decoder"] = {str(token_id): token.__getstate__() for token_id, token in added}
    path.write_text(f"{json.dumps(config, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def completed_ends(eos_token_id: int | list[int] | None, end: AnswerEnd) -> int | list[int] | None:
    """The value of ``eos_token_id`` with the tokens added that training teaches as the end of an answer.

    Args:
        eos_token_id: the value so far; None stands for the tokens that the folder and the tokenizer declare.
        end: how answers end.

    Returns:
        One number, or a list of several; the argument itself where nothing is missing.
    """
    # only tokens that training teaches are added: those that are declared stay in the order of the folder
    taught = [token.token_id for token in (end.taught, end.taught_after_call) if token is not None]
    declared = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
    if declared and {*taught} <= {*declared}:
        return eos_token_id
    token_ids = list(dict.fromkeys([*(declared or [token.token_id for token in end.declared]), *taught]))
    return None if not token_ids else token_ids[0] if len(token_ids) == 1 else token_ids


def name_ends(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, has_source: bool) -> None:
    """Adds the tokens that training teaches as the end of an answer to ``eos_token_id`` of a model's configuration.

    Args:
        config: transformers' configuration, which is changed.
        tokenizer: with its facts.
        has_source: whether the configuration comes from a folder. In one that was described the number is only a
            default of the configuration's class, and the tokenizer's tokens replace it.
    """
    from huggingface_hub.errors import StrictDataclassError

    end = answer_end_of(tokenizer)
    text = config.get_text_config()
    for part in [text] if text is config else [text, config]:
        eos_token_id = getattr(part, "eos_token_id", None)
        if part is not text and eos_token_id is None:  # the whole of a model with several parts need not name any
            continue
        value = completed_ends(eos_token_id if has_source else None, end)
        try:
            part.eos_token_id = value
        except StrictDataclassError:  # this configuration's class accepts one number, no list
            part.eos_token_id = end.taught.token_id if end.taught is not None else eos_token_id


def save_generation_config(folder: Path, source: Path | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes ``generation_config.json``: the source's settings, with the tokens that training teaches as the end.

    Args:
        folder: of the export, where transformers may have written a file derived from the configuration alone.
        source: the folder that was trained; None where the model was described.
        tokenizer: with its facts.
    """
    generation = {} if source is None else read_json_file(source / GENERATION)
    # transformers' own version, derived from the configuration, is better than none
    if not generation:
        generation = read_json_file(folder / GENERATION)
        generation.pop("_from_model_config", None)
        generation.pop("eos_token_id", None)  # of the configuration, perhaps a default of its class
    value = completed_ends(generation.get("eos_token_id"), answer_end_of(tokenizer))
    if value is not None:
        generation["eos_token_id"] = value
    pad = None if facts_of(tokenizer).is_pad_added else tokenizer.pad_token_id
    if generation.get("pad_token_id") is None and pad is not None:
        generation["pad_token_id"] = pad
    (folder / GENERATION).write_text(f"{json.dumps(generation, indent=2)}\n", encoding="utf-8")


def describe_export(tokenizer: PreTrainedTokenizerBase) -> str:
    """One line for the log about the contents of the export's ``generation_config.json``."""
    source = facts_of(tokenizer).model_folder
    generation = {} if source is None else read_json_file(source / GENERATION)
    value = completed_ends(generation.get("eos_token_id"), answer_end_of(tokenizer))
    line = f"the export's {GENERATION} names {value} as the end"
    if generation.get("eos_token_id") != value:
        line = f"{line}, the folder's {generation.get('eos_token_id') if generation else 'is not there'}"
    copied = [
        f"{name} {entry}" for name, entry in generation.items() if name not in _NOT_DESCRIBED and entry is not None
    ]
    return f"{line}; of the folder's: {', '.join(copied)}" if copied else line


_NOT_DESCRIBED = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
