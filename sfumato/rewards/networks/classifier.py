"""Classifiers of conversations with one output, as reward models for text are published."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import ConfigError
from sfumato.rewards.networks.folder import check_folder, load_model, load_tokenizer, loader_of, read_json


class Classifier:
    """Scores conversations."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the model has not one output or its tokenizer no chat template."""
        from transformers import AutoModelForSequenceClassification

        self.lock = threading.Lock()
        self.device = device
        check_folder(folder, "config.json")
        architectures = read_json(folder / "config.json").get("architectures") or []
        if not any(str(architecture).endswith("ForSequenceClassification") for architecture in architectures):
            raise ConfigError(
                f"model_path {folder} holds {', '.join(map(str, architectures)) or 'no named architecture'}, "
                "but a reward model for text is one for sequence classification"
            )
        self.model = load_model(AutoModelForSequenceClassification, folder, dtype, device)
        if self.model.config.num_labels != 1:
            raise ConfigError(f"model_path {folder}: the model has {self.model.config.num_labels} outputs, not one")
        self.tokenizer = load_tokenizer(folder)
        if not self.tokenizer.chat_template:
            raise ConfigError(f"model_path {folder}: the tokenizer has no chat template: add chat_template.jinja")
        text_config = self.model.config.get_text_config()
        self.max_length = getattr(text_config, "max_position_embeddings", None) or math.inf
        self.pad_token = text_config.pad_token_id

    def __call__(self, conversations: list[list[dict[str, Any]]]) -> torch.Tensor:
        """The output for each conversation, float32 [B]; NaN where it is too long."""
        rows = [
            torch.tensor(self.tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False))
            for conversation in conversations
        ]
        scores = torch.full((len(rows),), math.nan)
        fitting = [index for index, row in enumerate(rows) if len(row) <= self.max_length]
        # Without a token for padding the model itself takes one row at a time.
        batches = [fitting] if self.pad_token is not None else [[index] for index in fitting]
        for batch in batches:
            if batch:
                scores[batch] = self._forward([rows[index] for index in batch]).cpu()
        return scores

    def _forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        pad = torch.nn.utils.rnn.pad_sequence
        input_ids = pad(rows, batch_first=True, padding_value=self.pad_token or 0)
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self.model(input_ids=input_ids.to(self.device), attention_mask=mask.to(self.device)).logits
        return logits.float().squeeze(-1)


load_classifier = loader_of(Classifier)
