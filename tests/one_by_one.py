"""Language models that see or hear against transformers: a batch of documents, and each of them by itself."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.pictures import read_image
from sfumato.data.media.sounds import read_sound
from sfumato.data.text.format import build_transform
from sfumato.data.text.packing import make_batch
from sfumato.models.language.hf_config import set_attention
from sfumato.models.language.load import build_language_model
from sfumato.models.language.packed_model import RowLayout
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import whole_weights

NOT_FOR_THE_MODEL = ("num_patches", "video_metadata")
"""What processors return besides the arguments of a forward pass."""


def build_reader(config: dict[str, Any]) -> tuple[Any, Any]:
    """The model of a ``tasks/train_text.py`` run in one process, and what makes samples of rows."""
    parsed = load_config(TrainTextConfig, overrides=config)
    model = build_language_model(parsed.model, parsed.train, data_type=parsed.data.data_type)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), parsed.train)
    return model, build_transform(parsed.data, model.tokenizer, model.vision.reader)


def samples_of(transform: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """What the run makes of rows."""
    return [sample for index, row in enumerate(rows) for sample in transform(FiledRow(row), f"row {index}")]


def inputs_of(processor: Any, renderer: Any, row: dict[str, Any], **settings: Any) -> Any:
    """What transformers' processor makes of a conversation, whose media are data URLs, by itself.

    Args:
        processor: of the model.
        renderer: what has the chat template: the tokenizer, or the processor.
        row: the conversation.
        settings: further arguments of the processor.
    """
    messages = []
    contents: dict[str, list[bytes]] = {"image": [], "audio": [], "video": []}
    for message in row["messages"]:
        parts = message["content"]
        parts = parts if isinstance(parts, list) else [{"type": "text", "text": parts}]
        for part in parts:
            if part["type"] != "text":
                contents[part["type"]].append(base64.b64decode(part[part["type"]].partition(",")[2]))
        shown = [{key: part[key] for key in part if key not in contents} for part in parts]
        messages.append({"role": message["role"], "content": shown})
    if contents["image"]:
        settings["images"] = [[read_image(content, "a test") for content in contents["image"]]]  # of one text
    if contents["audio"]:
        settings["audio"] = [read_sound(content, 16000, 30, "a test").samples for content in contents["audio"]]
    clips = [processor.video_processor.read(content, "a test") for content in contents["video"]]
    if clips:
        settings |= {"videos": [clip.frames for clip in clips], "video_metadata": [clip.metadata for clip in clips]}
    text = renderer.apply_chat_template(messages, tokenize=False)
    inputs = processor(text=[text], return_tensors="pt", **settings)
    if "video_second_per_grid" in inputs:  # of the rate of the frames that were chosen
        inputs["video_second_per_grid"] = torch.tensor([2 / clip.metadata.sampled_fps for clip in clips])
    return inputs


def assert_as_transformers(
    model: Any, transform: Any, data_rows: list[dict[str, Any]], rows: str, tolerance: float = 1e-4, **settings: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Log-probabilities, loss and gradients of a batch are those of its documents, which transformers reads alone.

    Args:
        model: of ``build_reader``.
        transform: of ``build_reader``, too.
        data_rows: the conversations.
        rows: ``model.rows``, packed or documents.
        tolerance: of gradients, as a share of their norm.
        settings: further arguments of the processor.

    Returns:
        The batch, and the gradients by name.
    """
    model.set_row_layout("sdpa" if rows == "documents" else model.attention, RowLayout(rows))
    samples = samples_of(transform, data_rows)
    batch = make_batch(samples, list(range(len(samples))), [0] * len(samples), True, 0, 2, model.vision)
    plain = model.plain_with(whole_weights(model.trained, model.mesh)).train()
    set_attention(plain, "eager")
    total = model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())[0]
    actual = model.token_log_probs([batch])[0][0].split([sample.num_tokens for sample in samples])
    expected = torch.zeros(())
    for row, sample, log_probs in zip(data_rows, samples, actual, strict=True):
        inputs = inputs_of(model.vision.reader.processor, model.tokenizer, row, **settings)
        document = sample.documents[0]
        assert inputs["input_ids"][0].tolist() == document.input_ids.tolist()
        arguments = {name: inputs[name] for name in inputs if name not in NOT_FOR_THE_MODEL}
        logits = plain(**arguments, use_cache=False).logits[0]
        labels, mask = inputs["input_ids"][0, 1:], torch.from_numpy(document.loss_mask[1:])
        alone = logits[:-1].log_softmax(-1).gather(-1, labels[:, None])[:, 0] * mask
        torch.testing.assert_close(log_probs[: len(alone)], alone, rtol=1e-5, atol=1e-5)
        expected = expected - alone.sum()
    expected.backward()
    assert total == pytest.approx(expected.item(), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    trained = trainable_parameters(model.trained)
    ours = {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm()) <= tolerance * float(gradient.norm()) + 1e-6, name
    return batch, ours
