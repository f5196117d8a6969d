"""Classifiers of conversations with one output, as reward models for text are published, and of answers' steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError
from sfumato.rewards.networks.folder import Network, find_architecture, load_chat_tokenizer, load_model, loader_of

STEP_CLASSIFIERS = {"SequenceClassification": (1,), "TokenClassification": (1, 2)}
"""Kinds of models of transformers that rate steps, and how many outputs they may have."""


class Classifier(Network):
    """Scores conversations."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the model has not one output or its tokenizer no chat template."""
        from transformers import AutoModelForSequenceClassification

        super().__init__(device, dtype)
        needed = "a reward model for text is one for sequence classification"
        find_architecture(folder, ("SequenceClassification",), needed)
        self.model = load_model(AutoModelForSequenceClassification, folder, dtype, device)
        if self.model.config.num_labels != 1:
            raise ConfigError(f"model_path {folder}: the model has {self.model.config.num_labels} outputs, not one")
        self.tokenizer = load_chat_tokenizer(folder)
        text_config = self.model.config.get_text_config()
        self.max_length = getattr(text_config, "max_position_embeddings", None) or math.inf
        self.pad_token = text_config.pad_token_id

    def __call__(self, conversations: list[list[JsonObject]]) -> torch.Tensor:
        """The output for each conversation, float32 [B] on the CPU; NaN where it is longer than the model reads."""
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


class StepClassifier(Network):
    """Gives the steps of answers probabilities of being right.

    Both kinds of ``STEP_CLASSIFIERS`` are read at the token that ends a step. One output is the logit of being right;
    of two outputs the second one stands for right.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the model is no such classifier or its tokenizer has no chat template."""
        import transformers

        super().__init__(device, dtype)
        needed = "a process reward model is one for sequence or token classification"
        kind = find_architecture(folder, STEP_CLASSIFIERS, needed)
        self.model = load_model(getattr(transformers, f"AutoModelFor{kind}"), folder, dtype, device)
        if self.model.config.num_labels not in STEP_CLASSIFIERS[kind]:
            allowed = " or ".join(map(str, STEP_CLASSIFIERS[kind]))
            num_outputs = self.model.config.num_labels
            raise ConfigError(f"model_path {folder}: the model has {num_outputs} outputs, not {allowed}")
        if not isinstance(getattr(self.model, "score", None), torch.nn.Linear):
            raise ConfigError(f"model_path {folder}: {type(self.model).__name__} has no linear layer 'score'")
        self.tokenizer = load_chat_tokenizer(folder)
        if not self.tokenizer.is_fast:
            raise ConfigError(f"model_path {folder}: the tokenizer does not say where tokens stand: add tokenizer.json")
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = limit or math.inf

    def __call__(self, answers: list[tuple[list[dict[str, object]], list[str]]], separator: str) -> list[torch.Tensor]:
        """The probability of each step of each answer.

        Args:
            answers: the messages before the answer, and its steps.
            separator: what stands between two steps.

        Returns:
            float32 ``[steps]`` of each answer on the CPU; ``[0]`` where there are none, or it is too long.
        """
        rows = []
        ends = []
        for prompt, steps in answers:
            ids, step_ends = self._encode(prompt, [step.strip() for step in steps], separator)
            rows.append(ids)
            ends.append(step_ends)
        step_probabilities = [torch.zeros(0)] * len(rows)
        # rows without steps, or too long, keep their empty tensor: they have no reward, and cost no pass
        fitting = [index for index, row in enumerate(rows) if 0 < len(row) <= self.max_length]
        if fitting:
            probabilities = self._forward([rows[index] for index in fitting]).cpu()
            for place, index in enumerate(fitting):
                step_probabilities[index] = probabilities[place, ends[index]]
        return step_probabilities

    def _encode(self, prompt: list[JsonObject], steps: list[str], separator: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes a conversation and finds the tokens at which its steps end.

        Returns:
            Token ids, int64 ``[L]``, and the position of the token that holds the last character of each step, int64
            ``[steps]``. Both are empty where the answer has no steps, or where the chat template changes a step.
        """
        nothing = torch.zeros(0, dtype=torch.int64)
        step_ends = []
        messages = [*prompt, {"role": "assistant", "content": separator.join(steps)}]
        begin, text = (
            cast("str", self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=chat is prompt))
            for chat in (prompt, messages)
        )
        # Steps are looked for behind the prompt, which may hold the same text. Where the template writes the prompt
        # otherwise when an answer follows, the text of the whole answer is looked for instead, from the end.
        place = len(begin) if text.startswith(begin) else text.rfind(messages[-1]["content"])
        for step in steps:
            begin_of_step = text.find(step, max(place, 0))
            if begin_of_step < 0:
                return nothing, nothing
            place = begin_of_step + len(step)
            step_ends.append(place)
        if not step_ends:
            return nothing, nothing
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = torch.tensor([start for start, _ in encoded["offset_mapping"]])
        # The last token that starts at or before the last character of a step is the one that holds it.
        last_tokens = torch.searchsorted(starts, torch.tensor(step_ends) - 1, right=True) - 1
        return torch.tensor(encoded["input_ids"]), last_tokens

    def _forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The probability of being right at each token, float32 ``[B, L]``.

        The model's body and its head are called apart: a classifier of sequences would give the output of the last
        token alone.
        """
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True).to(self.device)
        base = getattr(self.model, self.model.base_model_prefix)
        hidden = base(input_ids=pad(rows, batch_first=True).to(self.device), attention_mask=mask).last_hidden_state
        logits = cast("torch.nn.Linear", self.model.score)(hidden).float()
        return logits.softmax(-1)[..., 1] if logits.shape[-1] == 2 else logits[..., 0].sigmoid()


load_step_classifier = loader_of(StepClassifier)


def aggregate_steps(probabilities: torch.Tensor, how: str) -> torch.Tensor:
    """The reward of an answer from the probabilities that its steps are right.

    Args:
        probabilities: ``[S]``, at least one.
        how: min, product, mean or last.

    Returns:
        A scalar.
    """
    if how == "last":
        return probabilities[-1]
    return {"min": torch.min, "product": torch.prod, "mean": torch.mean}[how](probabilities)
