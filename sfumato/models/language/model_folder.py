"""What a model's folder says beside its weights, carried over from the folder that was trained to its export: how
answers are drawn and where they end, the chat template, the padding token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sfumato.data.text.answer_end import AnswerEnd, answer_end_of, facts_of, read_json_file

GENERATION = "generation_config.json"
LEGACY_TEMPLATE = "chat_template.json"


def save_tokenizer(tokenizer: Any, folder: Path, keeps_pad: bool = False) -> None:
    """Writes a tokenizer with the chat template that the run has used.

    Args:
        tokenizer: with its facts.
        folder: where to.
        keeps_pad: whether a padding token is written that its own folder does not name. A later run that leaves padding
            out of the loss would else leave out the end of texts, which stands in for it.
    """
    pad = tokenizer.pad_token
    if facts_of(tokenizer).is_pad_added and not keeps_pad:
        tokenizer.pad_token = None
    try:
        tokenizer.save_pretrained(folder)
    finally:
        tokenizer.pad_token = pad
    legacy = folder / LEGACY_TEMPLATE  # of processors; it would hide the other
    if legacy.is_file() and isinstance(tokenizer.chat_template, str):
        said = read_json_file(legacy) | {"chat_template": tokenizer.chat_template}
        legacy.write_text(f"{json.dumps(said, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def completed_ends(said: int | list[int] | None, end: AnswerEnd) -> int | list[int] | None:
    """The value of ``eos_token_id`` with the tokens that training taught.

    Args:
        said: the value so far; None: what the folder and the tokenizer declare.
        end: how answers end.

    Returns:
        One number, or a list of several; ``said`` itself where nothing is missing.
    """
    taught = [token.token_id for token in (end.taught, end.taught_after_call) if token is not None]
    before = said if isinstance(said, list) else [] if said is None else [said]
    if before and {*taught} <= {*before}:
        return said
    found = list(dict.fromkeys([*(before or [token.token_id for token in end.declared]), *taught]))
    return None if not found else found[0] if len(found) == 1 else found


def name_ends(config: Any, tokenizer: Any, has_source: bool) -> None:
    """Puts what training taught into ``eos_token_id`` of transformers' configuration of a model.

    Args:
        config: that is written.
        tokenizer: with its facts.
        has_source: whether the configuration is that of a folder. Of a description, whose number is a default of the
            class, it becomes what the tokenizer has.
    """
    from huggingface_hub.errors import StrictDataclassError

    end = answer_end_of(tokenizer)
    text = config.get_text_config()
    for part in [text] if text is config else [text, config]:
        said = getattr(part, "eos_token_id", None)
        if part is not text and said is None:
            continue
        value = completed_ends(said if has_source else None, end)
        try:
            part.eos_token_id = value
        except StrictDataclassError:  # a class that takes one number alone
            part.eos_token_id = end.taught.token_id if end.taught is not None else said


def save_generation_config(folder: Path, source: Path | None, tokenizer: Any) -> None:
    """Writes ``generation_config.json``: all that the source's says, with the tokens that training taught.

    Args:
        folder: of the export, where transformers may have written one that it made of the configuration alone.
        source: the folder that was trained; None: the model was described.
        tokenizer: with its facts.
    """
    said = {} if source is None else read_json_file(source / GENERATION)
    if not said:
        said = read_json_file(folder / GENERATION)
        said.pop("_from_model_config", None)
        said.pop("eos_token_id", None)  # of the configuration, perhaps a default of its class
    value = completed_ends(said.get("eos_token_id"), answer_end_of(tokenizer))
    if value is not None:
        said["eos_token_id"] = value
    pad = None if facts_of(tokenizer).is_pad_added else tokenizer.pad_token_id
    if said.get("pad_token_id") is None and pad is not None:
        said["pad_token_id"] = pad
    (folder / GENERATION).write_text(f"{json.dumps(said, indent=2)}\n", encoding="utf-8")


def describe_export(tokenizer: Any) -> str:
    """What the export's generation_config.json says, as a line for people."""
    source = facts_of(tokenizer).model_folder
    said = {} if source is None else read_json_file(source / GENERATION)
    value = completed_ends(said.get("eos_token_id"), answer_end_of(tokenizer))
    line = f"the export's {GENERATION} names {value} as the end"
    if said.get("eos_token_id") != value:
        line = f"{line}, the folder's {said.get('eos_token_id') if said else 'is not there'}"
    kept = [f"{name} {entry}" for name, entry in said.items() if name not in _NOT_SAID and entry is not None]
    return f"{line}; of the folder's: {', '.join(kept)}" if kept else line


_NOT_SAID = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
