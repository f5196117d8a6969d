"""tasks/train_text.py of published models that see images as codes: tokens and losses against transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, ChameleonForConditionalGeneration, Emu3ForConditionalGeneration

from sfumato.config.load import load_config, merge
from sfumato.config.text import TrainTextConfig
from sfumato.data.text.loader import open_text_data
from sfumato.errors import ConfigError, DataError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.load import build_language_model
from sfumato.models.language.probe import probe
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import build_mesh
from tests.tiny import run_task_here, tiny_text_rl_config, weights_in, write_config
from tests.tiny_omni import omni_row
from tests.tiny_unified import tiny_seeing_config
from tests.tiny_vision import picture

PUBLISHED = {"emu3": Emu3ForConditionalGeneration, "chameleon": ChameleonForConditionalGeneration}


@pytest.mark.parametrize("kind", list(PUBLISHED))
def test_losses_are_those_of_transformers_processor_and_model(kind: str, tmp_path: Path) -> None:
    """transformers encodes the pixels in its forward pass; here the codes are tokens, made with the data."""
    config = tiny_seeing_config(tmp_path, kind, train={"max_steps": 2}, data={"max_seq_len": 256})
    run = run_task_here("train_text", config)
    plain, info = PUBLISHED[kind].from_pretrained(run / "hf_ckpt", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain, processor = plain.eval(), AutoProcessor.from_pretrained(run / "hf_ckpt", backend="pil")

    model = {"config_path": None, "model_path": str(run / "hf_ckpt"), "tokenizer_path": None}
    parsed = load_config(TrainTextConfig, write_config(merge(config, {"model": model}), tmp_path / "again.yaml"))
    mesh = build_mesh(parsed.train)
    built = build_language_model(parsed.model, parsed.train, data_type=parsed.data.data_type)
    flops = FlopCount(built.module, built.vision)
    _, validation, _ = open_text_data(parsed, built.tokenizer, mesh, print, None, flops.count_document, flops.sight)
    built.parallelize(mesh, parsed.train)
    probe(built, parsed.model, parsed.train, 256, print)  # Chameleon has a row for each document
    compared = set()
    for (scores, placed), batch in zip(built.score(validation.batches), validation.batches, strict=True):
        ours = scores.log_probs(placed.labels)[0]
        for number in range(len(batch.document_lengths)):
            in_document = batch.document_ids[0] == number
            in_document[sum(batch.document_lengths) :] = False
            ids, labels = batch.input_ids[0, in_document], batch.labels[0, in_document]
            actual = 50 + batch.sample_ids[number]
            sizes = [(16 + 8 * (actual % 3), 24 + 8 * index) for index in range(actual % 3)]
            images = [Image.open(io.BytesIO(picture(*size, actual))).convert("RGB") for size in sizes]
            if len(images) == 2 and kind == "emu3":  # transformers fills the smaller one up, and its codes are others
                continue
            content = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"What is number {actual}?"}]
            messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"It is {actual}."}]
            messages[1]["content"] = [{"type": "text", "text": messages[1]["content"]}]
            text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
            more = {"return_for_text_completion": True} if kind == "chameleon" else {}
            inputs = processor(text=[text], images=images or None, return_tensors="pt", **more)
            assert len(ids) == len(inputs["input_ids"][0])
            seen = ids != inputs["input_ids"][0]
            assert (inputs["input_ids"][0][seen] == processor.image_token_id).all()
            assert bool(seen.any()) == bool(images)
            with torch.no_grad():
                logits = plain(**inputs).logits[0]
            expected = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            assert torch.allclose(ours[in_document], expected.masked_fill(labels == IGNORED, 0), atol=1e-6, rtol=1e-6)
            compared.add(len(images))
    assert compared >= {0, 1}
    first = weights_in(run / "hf_ckpt")
    again = run_task_here("train_text", merge(config, {"model": model, "train": {"output_dir": str(tmp_path / "two")}}))
    changed = {name for name, value in weights_in(again / "hf_ckpt").items() if first[name] != value}
    assert changed and not any("vqmodel" in name for name in changed)


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    """Chameleon's forward pass leaves no probability to codes, so neither answers nor RL could learn them."""
    (tmp_path / "drawn.jsonl").write_text(json.dumps(omni_row(2)) + "\n")
    drawn = tiny_seeing_config(tmp_path / "drawn", "chameleon", data={"train_path": str(tmp_path / "drawn.jsonl")})
    with pytest.raises(DataError, match="not trained to draw"):
        run_task_here("train_text", drawn)
    run = run_task_here("train_text", tiny_seeing_config(tmp_path / "sft", "chameleon", train={"max_steps": 1}))
    config = tiny_text_rl_config(tmp_path)
    config["rollout"] |= {"kind": {"type": "drawing", "image_tokenizer": str(run / "hf_ckpt")}}
    config |= {"model": {"model_path": str(run / "hf_ckpt")}, "reward": {"rewards": [{"type": "brightness"}]}}
    with pytest.raises(ConfigError, match="chameleon cannot be trained to draw"):
        run_task_here("rl_text", config)
