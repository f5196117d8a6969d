"""Tokens that a chat template writes and that no training has shaped, which adapters leave as they are.

Base models reserve tokens for chats (``<|im_start|>``, ``<|eot_id|>``) whose embeddings are all zero or equal, and
transformers' ``resize_token_embeddings`` makes new ones of the mean of all others. Full fine-tuning learns them.
Adapters beside frozen embeddings do not: the model reads the turns' markers as one and the same token, and with tied
weights gives the end of an answer the logit of an average token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from sfumato.models.language.source_folder import EMBEDDINGS, find_matrices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCKS, BLOCK_ROWS = 64, 64
"""Blocks of rows, evenly over the vocabulary, and rows of each, by which the mean of all embeddings is estimated. The
mean of 4,096 rows is off by 1/64 of the distance that rows have from it."""
NEAR = 0.05
"""Largest distance between two embeddings that are one and the same, as a fraction of the distance that rows have from
their mean; and largest norm of one that is zero, as a fraction of their norm."""
NAMED = 4


def describe_untrained_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The line about tokens of the chat template that frozen embeddings do not tell apart; none where all are trained.

    Args:
        folder: of the model, with safetensors files.
        tokenizer: with the chat template that training uses.
    """
    tokens = untrained_tokens(folder, tokenizer)
    if not tokens:
        return []
    others = f" and {len(tokens) - NAMED} more" if len(tokens) > NAMED else ""
    return [
        f"the chat template writes {', '.join(tokens[:NAMED])}{others}, whose embeddings in {folder} were never "
        "trained (zero, equal, or the mean of all), and adapters leave them so: take the model's chat version, train "
        "without model.lora first, or take a chat template of trained tokens"
    ]


def untrained_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that the chat template names whose embeddings are zero, equal to another's, or the mean of all."""
    template = tokenizer.chat_template
    text = "".join(template.values()) if isinstance(template, dict) else template or ""
    ids = {
        token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content in text
    }
    path_of = find_matrices(folder, EMBEDDINGS)
    if not ids or len(path_of) != 1:
        return []  # of several embeddings it is not known which one reads the text
    (name, path), *_ = path_of.items()
    with safe_open(path, framework="pt") as file, torch.device("cpu"):
        rows = file.get_slice(name)
        num_rows = rows.get_shape()[0]
        ids = {token: token_id for token, token_id in ids.items() if token_id < num_rows}
        if not ids:
            return []
        starts = torch.linspace(0, max(num_rows - BLOCK_ROWS, 0), BLOCKS).int().unique().tolist()
        sampled = torch.cat([rows[start : start + BLOCK_ROWS] for start in starts]).float()  # [N, H]
        looked_at = torch.cat([rows[token_id : token_id + 1] for token_id in ids.values()]).float()  # [K, H]
    return [token for token, is_new in zip(ids, _are_untrained(looked_at, sampled), strict=True) if is_new]


def _are_untrained(embeddings: Tensor, sampled: Tensor) -> list[bool]:
    """For each of K embeddings ``[K, H]`` whether it is zero, one of the others, or the mean of those ``sampled``."""
    mean = sampled.mean(dim=0)
    spread = (sampled - mean).norm(dim=1).median()
    others = torch.cat([embeddings, mean[None]])
    # by matrix products equal rows of a large norm would have a distance
    distances = torch.cdist(embeddings, others, compute_mode="donot_use_mm_for_euclid_dist")  # [K, K + 1]
    distances.fill_diagonal_(torch.inf)
    is_zero = embeddings.norm(dim=1) < NEAR * sampled.norm(dim=1).median()
    return (is_zero | (distances.amin(dim=1) < NEAR * spread)).tolist()
