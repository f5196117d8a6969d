"""Pairs of answers to prompts with images: DPO of models that see, against transformers one conversation at a time."""

import base64
import copy
import json
import math

import pytest
import torch

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig, TrainTextDpoConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.pictures import read_image
from sfumato.data.text.format import build_transform
from sfumato.data.text.packing import make_batch
from sfumato.errors import DataError
from sfumato.models.language.hf_config import set_attention
from sfumato.models.language.load import build_language_model, build_reader
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from tests.tiny import merge, run_task_here
from tests.tiny_vision import data_url, image_row, media_row, picture, tiny_media_config, tiny_vision_config


def pair(index):
    """A row with 0, 1 or 2 pictures in its prompt."""
    prompt = image_row(index)["messages"][:1]
    return {"prompt": prompt, "chosen": f"It is {index}.", "rejected": f"I cannot see {index} there."}


def settings(tmp_path, **overrides):
    result = tiny_vision_config(tmp_path, "qwen3_vl")
    for name, start, count in (("rows", 0, 12), ("held_out", 50, 5)):
        lines = [json.dumps(pair(start + index)) for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result["data"]["data_type"]["type"] = "image_preference"
    result["eval"] = {"every_steps": 0, "num_rows": 5}
    return merge(result, overrides)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    config = load_config(TrainTextDpoConfig, overrides=settings(tmp_path_factory.mktemp("pairs")))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    return model, build_transform(config.data, model.tokenizer, model.vision.reader)


def log_prob_alone(model, plain, row, answer):
    """What transformers' processor and model say of one answer."""
    messages = [*copy.deepcopy(row["prompt"]), {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    pictures = [part.pop("image") for part in messages[0]["content"] if part["type"] == "image"]
    render = model.tokenizer.apply_chat_template
    text = render(messages, tokenize=False)
    before = render(messages[:1], tokenize=False, add_generation_prompt=True)
    opened = [read_image(base64.b64decode(url.partition(",")[2]), "a test") for url in pictures] or None
    inputs = model.vision.reader.processor(text=[text], images=opened, return_tensors="pt")
    start = model.vision.reader.processor(text=[before], images=opened, return_tensors="pt")["input_ids"].shape[1]
    end = len(model.tokenizer(text[: text.rindex("<|im_end|>") + len("<|im_end|>")])["input_ids"]) - len(
        model.tokenizer(text)["input_ids"]
    )
    ids = inputs["input_ids"][0]
    with torch.no_grad():
        scores = torch.log_softmax(plain(**inputs).logits[0].float(), -1)
    stop = len(ids) + end
    return sum(float(scores[place - 1, ids[place]]) for place in range(start, stop))


def test_log_probs_of_pairs_are_those_of_transformers_one_by_one(built):
    model, transform = built
    rows = [pair(index) for index in range(3)]
    samples = [transform(FiledRow(row), f"row {index}")[0] for index, row in enumerate(rows)]
    batch = make_batch(samples, [0, 1, 2], [0, 0, 0], True, 0, 2, model.vision)
    (log_probs,) = model.token_log_probs([batch])
    mask = batch.labels != IGNORED
    plain = copy.deepcopy(model.module)
    set_attention(plain, "eager")
    for number, row in enumerate(rows):
        for place, answer in ((2 * number, row["chosen"]), (2 * number + 1, row["rejected"])):
            result = float(log_probs[mask & (batch.document_ids == place)].sum())
            assert result == pytest.approx(log_prob_alone(model, plain, row, answer), abs=2e-5), (number, answer)


def test_both_documents_have_the_images_of_the_prompt(built):
    (sample,) = built[1](FiledRow(pair(2)), "row 2")
    chosen, rejected = (document.images for document in sample.documents)
    assert len(chosen.shapes) == len(rejected.shapes) == 2
    assert list(chosen.find()) == list(rejected.find()) == built[1].files(FiledRow(pair(2)), "row 2")
    swapped = {
        **pair(1),
        "chosen": [{"role": "assistant", "content": [{"type": "image", "image": data_url(picture(16, 24))}]}],
    }
    with pytest.raises(DataError, match="row 1: an image stands in the answer of chosen"):
        built[1](FiledRow(swapped), "row 1")


def test_pairs_of_other_programs_are_those_of_ours(built):
    """Rows of LLaMA-Factory, whose tags stand for the pictures of another column."""
    row = {
        "conversations": [{"from": "human", "value": "<image>How many?"}],
        "chosen": {"from": "gpt", "value": "It is 1."},
        "rejected": {"from": "gpt", "value": "I cannot see 1 there."},
        "images": [{"bytes": base64.b64decode(data_url(picture(16, 24)).partition(",")[2])}],
    }
    image = {"type": "image", "image": data_url(picture(16, 24))}
    prompt = [{"role": "user", "content": [image, {"type": "text", "text": "How many?"}]}]
    (theirs,) = built[1](FiledRow(row), "row 0")
    (ours,) = built[1](FiledRow({**pair(1), "prompt": prompt}), "row 0")
    for document, expected in zip(theirs.documents, ours.documents, strict=True):
        assert list(document.input_ids) == list(expected.input_ids)
        assert [tuple(shape) for shape in document.images.shapes] == [tuple(shape) for shape in expected.images.shapes]


def test_a_run_begins_at_the_loss_of_a_coin(tmp_path):
    run_task_here("train_text_dpo", settings(tmp_path, train={"max_steps": 4}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[-1]["loss"] < lines[1]["loss"]


def test_pairs_with_videos_are_the_conversations_of_their_answers(tmp_path):
    """Documents and tensors are those of media_conversation, which is compared with transformers elsewhere."""
    rows, limits = [], tiny_media_config(tmp_path / "alone", "qwen3_vl")["data"]["data_type"]
    for index in range(8):
        messages = media_row(index)["messages"]
        rows.append({"prompt": messages[:1], "chosen": f"It is {index}.", "rejected": "It is not."})
    data = {"data_type": {**limits, "type": "media_preference"}, "max_seq_len": 256}
    config = settings(tmp_path, data=data, train={"max_steps": 3})
    for name in ("rows", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = load_config(TrainTextDpoConfig, overrides=config)
    reader = build_reader(section.model, section.train, section.data.data_type)
    alone = load_config(TrainTextConfig, overrides=tiny_media_config(tmp_path / "alone", "qwen3_vl"))
    pairs = build_transform(section.data, *reader)
    conversations = build_transform(alone.data, *reader)
    assert pairs.fingerprint != conversations.fingerprint
    for index, row in enumerate(rows):
        (sample,) = pairs(FiledRow(row), "a row")
        for document, answer in zip(sample.documents, (row["chosen"], row["rejected"]), strict=True):
            messages = [*row["prompt"], {"role": "assistant", "content": answer}]
            (expected,) = conversations(FiledRow({"messages": messages}), "a row")[0].documents
            assert document.input_ids.tolist() == expected.input_ids.tolist()
            assert document.loss_mask.tolist() == expected.loss_mask.tolist()
            results = [{} if side.images is None else reader[1].tensors(side.images) for side in (document, expected)]
            assert results[0].keys() == results[1].keys()
            assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
            assert ("pixel_values_videos" in results[0]) == bool(index % 3)
    answered = {**rows[1], "chosen": [{"role": "assistant", "content": rows[1]["prompt"][0]["content"]}]}
    with pytest.raises(DataError, match="a video stands in the answer of chosen: videos belong to the prompt"):
        pairs(FiledRow(answered), "a row")
    run_task_here("train_text_dpo", config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6) and lines[-1]["loss"] < lines[1]["loss"]
