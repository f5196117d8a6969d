"""Models that see: packed documents with images against transformers, one by one; broken images; operations."""

import base64
import io
import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.vision_throughput import balance
from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_data import SyntheticTextConfig, TextDataConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.files.sources import open_sources
from sfumato.data.media.pictures import read_image
from sfumato.data.synthetic.text import SyntheticRows
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_store import build_token_store
from sfumato.errors import ConfigError, DataError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model import check_multimodal
from sfumato.models.language.packed_model import RowLayout
from sfumato.models.language.probe_documents import text_tokens
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.stages import check_added_features
from sfumato.rollout.engines.embedded.row_choice import _plain_tokens
from tests.one_by_one import assert_as_transformers, build_reader, inputs_of, samples_of
from tests.tiny import run_task_here, tiny_language_description, write_config
from tests.tiny_vision import TOKENS, data_url, image_row, picture, tiny_vision_config, tiny_vision_description

PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl", "janus", "llava_onevision")
PACKED += ("llava", "llava_next", "smolvlm", "idefics3")
APART = ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl")
"""Whose documents have rows of their own."""


def build(tmp_path, kind="qwen2_5_vl", **changes):
    model, transform = build_reader(tiny_vision_config(tmp_path, kind, **changes))
    for weight in trainable_parameters(model.trained).values():
        if not weight.any():  # Gemma's projector begins at zero, which would hide its encoder
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return model, transform


WAYS = [(kind, "packed") for kind in PACKED] + [(kind, "documents") for kind in APART]
QUICK = (("qwen3_vl", "packed"), ("gemma3", "documents"))
"""The rest is left to the slow tests."""


@pytest.mark.parametrize(
    ("kind", "rows"), [pytest.param(*way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS]
)
def test_documents_with_images_are_those_of_transformers_one_by_one(tmp_path, kind, rows):
    model, transform = build(tmp_path, kind, data={"max_seq_len": max(512, TOKENS.get(kind, 0))})
    _, gradients = assert_as_transformers(model, transform, [image_row(index) for index in range(5)], rows)
    assert any("vis" in name and bool(gradient.any()) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llava", {"vision_feature_select_strategy": "full"}),
        ("llava_onevision", {"vision_aspect_ratio": "anyres_max_1"}),
    ],
)
def test_a_described_llava_has_the_tokens_that_its_encoder_makes(tmp_path, kind, changes):
    described = write_config(tiny_vision_description(kind) | changes, tmp_path / "changed.yaml")
    model, _ = build(tmp_path, kind, model={"config_path": str(described)})
    inputs = inputs_of(model.vision.reader.processor, model.tokenizer, image_row(1))
    assert "pixel_values" in inputs
    with torch.no_grad():  # transformers refuses another number
        model.plain(**{name: inputs[name] for name in inputs if name != "num_patches"})


def test_llava_onevision_cuts_tiles_of_a_single_image_alone(tmp_path):
    """As its processor does for the images of one conversation."""
    reader = build(tmp_path, "llava_onevision")[0].vision.reader
    image = read_image(picture(32, 32), "a test")
    (alone,), _ = reader.place([image])
    texts, shapes = reader.place([image, image])
    assert [text.count("<|image_pad|>") for text in texts] == [4 * 4 + 1] * 2 and shapes[:, 0].tolist() == [1, 1]
    assert alone.count("<|image_pad|>") > 2 * (4 * 4 + 1)


def test_random_texts_hold_no_token_of_any_medium(tmp_path):
    """Nor of videos, where the data has images alone: positions of three axes looked for the video."""
    model, _ = build(tmp_path, "qwen3_vl")
    assert 262 in model.vision.reader.media_tokens() and 262 not in model.vision.idle_ids
    assert 262 not in text_tokens(model)
    assert 262 not in _plain_tokens(SimpleNamespace(vision=model.vision), 263)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", ["packed", "documents"])
def test_a_batch_without_images_computes_the_encoder_with_gradients_of_zero(tmp_path, rows, packed):
    model, transform = build(tmp_path)
    model.set_row_layout("sdpa", RowLayout(rows))
    samples = samples_of(transform, [image_row(0), image_row(3)])
    batch = make_batch(samples, [0, 1], [0, 0], packed, 0, 2, model.vision)
    without = make_batch(samples, [0, 1], [0, 0], packed, 0, 2)
    assert (
        not batch.image_shapes
        and batch.document_lengths == without.document_lengths
        and batch.num_labels == without.num_labels
    )
    model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())
    for name, weight in trainable_parameters(model.trained).items():
        assert weight.grad is not None and ("visual" not in name or not weight.grad.any()), name
    actual = model.token_log_probs([batch])[0]
    model.vision = None
    model.set_row_layout("sdpa", RowLayout("documents"))
    expected = model.token_log_probs([without])[0]
    size = expected.shape[1]
    torch.testing.assert_close(actual[: len(expected), :size], expected, rtol=1e-5, atol=1e-5)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (*PACKED, *APART[:-1]) if kind != "qwen2_5_vl"]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *SLOW])
def test_operations_of_the_encoder_are_those_that_torch_counts(tmp_path, kind):
    model, transform = build(tmp_path, kind, data={"max_seq_len": max(512, TOKENS.get(kind, 0))})
    plain, flops = model.plain, FlopCount(model.plain, model.vision)
    plain.set_attn_implementation("eager")
    (sample,) = samples_of(transform, [image_row(2)])
    images = sample.documents[0].images
    tensors = model.vision.reader.tensors(images)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain.base_model.get_image_features(**tensors)
    near = {"gemma4": 0.06}.get(kind, 1e-9)  # which averages patches by a product of matrices
    assert flops.encoder.forward(images.shapes) == pytest.approx(counter.get_total_flops(), rel=near)
    with_images = flops.training([sample.num_tokens], [images.shapes])
    assert with_images == flops.training([sample.num_tokens]) + flops.encoder.training(images.shapes)
    assert flops.encoder.training(images.shapes) == pytest.approx(3 * flops.encoder.forward(images.shapes))


def saved(image, kind="PNG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def broken_rows():
    from PIL import Image

    whole, plain = picture(64, 64), Image.new("RGB", (16, 16), "red")
    head = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + whole[24:29]
    bomb = whole[:12] + head + zlib.crc32(head).to_bytes(4, "big") + whole[33:]
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    ask = [{"type": "text", "text": "What?"}]
    plain_file = saved(plain)
    return {
        "truncated": ([{"type": "image", "image": data_url(whole[:-400])}, *ask], {}, "broken image"),
        "empty": ([{"type": "image", "image": "data:image/png;base64,"}, *ask], {}, "broken image"),
        "bomb": ([{"type": "image", "image": data_url(bomb)}, *ask], {}, "pixels: scale it down"),
        "missing": ([{"type": "image", "path": "nowhere.png"}, *ask], {}, "image file not found: .*nowhere.png"),
        "thin": (
            [{"type": "image", "image": data_url(picture(1, 400))}, *ask],
            {},
            "refuses an image: absolute aspect",
        ),
        "animated": ([{"type": "image", "image": data_url(animated)}, *ask], {}, "animated, with 2 frames"),
        "text": ([{"type": "image", "image": data_url(b"no image")}, *ask], {}, "it is no PNG"),
        "base64": ([{"type": "image", "base64": "%%%"}, *ask], {}, "no valid base64"),
        "address": ([{"type": "image", "url": "https://example.org/a.png"}, *ask], {}, "not downloaded"),
        "none": (
            "<image>What?",
            {"images": []},
            "<image> stands for an image, and the row's column 'images' holds none",
        ),
        "another column": ("<image>What?", {"picture": "a.png"}, "column 'images' holds none"),
        "Qwen-VL": (
            "<img>a.png</img>What?",
            {},
            "<img>a.png</img>, as in data of MMMU or for the first Qwen-VL, is not",
        ),
        "MMMU": ("<image 1>What?", {"image_1": "a.png"}, "<image 1>, as in data of .*: write <image> there"),
        "another key": ([{"type": "text", "value": "What?"}], {}, "a part of type 'text' has no text under 'text'"),
        "nested": ([{"type": "image", "source": {"data": "="}}, *ask], {}, r"names no file \(image, path, url, bytes"),
        "Qwen-Audio": ("<audio>a.wav</audio>What?", {}, "write <audio> there, and the file in the column 'audios'"),
        "its own limit": (
            [{"type": "image", "image": data_url(plain_file), "max_pixels": 64}, *ask],
            {},
            "max_pixels of a single part cannot be followed",
        ),
        "its own times": (
            [{"type": "image", "image": data_url(plain_file), "start": 0.5, "end": 1.0}, *ask],
            {},
            "start of a single part cannot be followed",
        ),
        "video in a column": (
            "<video>What?",
            {"videos": ["a.mp4"]},
            "which is not read here: take data.data_type media",
        ),
        "too few": ("<image> and <image>?", {"images": [saved(plain)]}, "an image is missing.*has 1"),
        "too many": ("<image>?", {"images": [saved(plain)] * 3}, "2 of 3 images in its column have no place"),
        "null": ("<image>?", {"images": [None]}, "is null"),
        "two columns": ("<image>?", {"images": [saved(plain)], "image": saved(plain)}, "both columns 'images' and 'im"),
        "empty beside it": (
            "What?",
            {"images": [], "image": saved(plain)},
            "1 of 1 images in its column have no place",
        ),
        "boxes": ("<image>Find <bbox>", {"images": [saved(plain)], "objects": {"bbox": []}}, "<bbox> stands for"),
        "order": (
            [{"type": "image", "index": number} for number in (1, 0)],
            {"images": [saved(plain)] * 2},
            "of index 1 stands where that of index 0 would",
        ),
        "its own": ([*ask, {"type": "text", "text": "<|image_pad|>"}], {}, "1 placeholders .* for 0 images"),
        "of another kind": ([*ask, {"type": "text", "text": "<|video_pad|>"}], {}, r"a text holds <\|video_pad\|>"),
        "video": ([{"type": "video", "video": "a.mp4"}], {}, "neither a text nor an image"),
    }


@pytest.mark.parametrize("name", broken_rows())
def test_broken_images_are_named(transform, name):
    content, columns, message = broken_rows()[name]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}], **columns}
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 7.*{message}"):
        transform(FiledRow(row), "rows.jsonl, line 7")


@pytest.mark.parametrize("learned", [True, False])
def test_an_image_in_an_answer_is_in_no_loss(transform, learned):
    shown = [{"type": "text", "text": "This:"}, {"type": "image", "image": data_url(picture(16, 16))}]
    said = [{"role": "user", "content": "Show it."}, {"role": "assistant", "content": shown, "loss_mask": int(learned)}]
    said += [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]
    if learned:
        with pytest.raises(DataError, match="stands in an answer that is learned, but this model is not trained"):
            transform(FiledRow({"messages": said}), "row 1")
        return
    document = transform(FiledRow({"messages": said}), "row 1")[0].documents[0]
    assert transform.reader.tokenizer.decode(document.input_ids[document.loss_mask].tolist()) == "A cat.<|im_end|>"


def test_an_empty_name_of_an_image_is_none(transform):
    """As rows of text have it among LLaVA's."""
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Yes."}]
    assert transform(FiledRow({"messages": said, "image": ""}), "row 1")[0].documents[0].images is None


def test_a_mark_that_is_only_mentioned_stays_text(transform):
    mention = "docker run <image>"
    said = [
        {"role": "user", "content": [{"type": "text", "text": mention}]},
        {"role": "assistant", "content": mention},
    ]
    (sample,) = transform(FiledRow({"messages": said, "images": []}), "row 1")
    text = transform.reader.tokenizer.decode(sample.documents[0].input_ids.tolist())
    assert text.count(mention) == 2 and sample.documents[0].images is None


@pytest.fixture(scope="module")
def transform(tmp_path_factory):
    return build(tmp_path_factory.mktemp("transform"))[1]


def test_images_come_from_files_bytes_and_columns_alike(transform, tmp_path):
    content = picture(16, 24, 1)
    (tmp_path / "a.png").write_bytes(content)
    end = {"role": "assistant", "content": "Yes."}
    ways = [
        ([{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "image", "image": data_url(content)}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "image_url", "image_url": {"url": data_url(content)}}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "image", "base64": base64.b64encode(content).decode()}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "image"}, {"type": "text", "text": "What?"}], {"images": [{"bytes": content, "path": None}]}),
        ([{"type": "image", "index": 0, "text": None}, {"type": "text", "text": "What?"}], {"images": [content]}),
        ("<image>What?", {"images": [content]}),
        ("<image>What?", {"image": "a.png"}),
    ]
    results = []
    for message, columns in ways:
        row = FiledRow({"messages": [{"role": "user", "content": message}, end], **columns})
        row.folder = tmp_path
        (sample,) = transform(row, "row 1")
        document = sample.documents[0]
        pixels = transform.reader.tensors(document.images)["pixel_values"]
        results.append((document.input_ids.tolist(), document.loss_mask.tolist(), pixels))
    for ids, mask, pixels in results[1:]:
        assert (ids, mask) == results[0][:2] and torch.equal(pixels, results[0][2])


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "P", "I;16"])
def test_pixels_of_any_format_are_read(transform, mode):
    from PIL import Image

    kind = "TIFF" if mode == "CMYK" else "PNG"
    image = Image.fromarray(np.full((16, 16), 40_000, np.uint16)) if mode == "I;16" else Image.new(mode, (16, 16))
    if mode == "RGBA":
        image.putalpha(255)
    content = [{"type": "image", "image": data_url(saved(image, kind))}, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]}
    (sample,) = transform(FiledRow(row), "row 1")
    assert (
        transform.reader.tensors(sample.documents[0].images)["pixel_values"].shape[0] == sample.image_shapes[0].prod()
    )


def test_broken_rows_are_left_out_up_to_their_number(tmp_path):
    rows = [image_row(index) for index in range(4)]
    rows[2]["messages"][0]["content"][0]["image"] = data_url(picture(16, 16)[:-30])
    config = tiny_vision_config(tmp_path, train={"max_steps": 1, "global_batch_size": 1}, eval={"every_steps": 0})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: .*broken image"):
        run_task_here("train_text", config)
    config["data"]["max_bad_rows"] = 1
    run_task_here("train_text", config)
    assert "line 3" in (tmp_path / "run/log.txt").read_text()


def test_rows_without_any_image_are_kept_and_read_again(tmp_path, transform):
    rows = [{"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = open_sources(TextDataConfig(train_path=str(tmp_path / "rows.jsonl")))
    store = build_token_store(sources, transform, tmp_path / "stores", 1, 0, print)
    assert len(store) == 2 and len(store.image_shapes(1)) == 0 and store.sample(1).documents[0].images is None


def test_numbers_to_read_stand_in_their_pictures(transform):
    rows = SyntheticRows(SyntheticTextConfig(problem="read", max_length=3, num_rows=8), seed=0, held_out=False)
    for index in range(4):
        row = rows[index]
        (sample,) = transform(FiledRow(row), rows.describe(index))
        document = sample.documents[0]
        assert row["images"][0] == rows[index]["images"][0] and len(sample.image_shapes[0]) == 1
        ids = document.input_ids[document.loss_mask].tolist()
        assert transform.reader.tokenizer.decode(ids) == f"{row['answer']}<|im_end|>"
    data = {"data_type": "conversation", "synthetic": {"problem": "read"}, "max_seq_len": 64}
    with pytest.raises(ConfigError, match="need each other"):
        load_config(TextDataConfig, overrides=data)


def test_an_image_that_has_changed_since_is_noticed(tmp_path, transform):
    (tmp_path / "a.png").write_bytes(picture(16, 24))
    row = FiledRow({"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes."}]})
    row["image"], row.folder = "a.png", tmp_path
    (sample,) = transform(row, "row 1")
    (tmp_path / "a.png").write_bytes(picture(32, 24))
    with pytest.raises(DataError, match="row 1: an image has another size"):
        transform.reader.tensors(sample.documents[0].images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"freeze": ["vizual"]}}, "'vizual' takes no trained weight"),
        ({"model": {"freeze": ["."]}}, "leaves nothing to train"),
        ({"data": {"data_type": {"min_pixels": 4096}}}, "min_pixels must not be above max_pixels"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, message):
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path, **changes))

    def put() -> None:
        model = build_language_model(config.model, config.train, data_type=config.data.data_type)
        model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)

    with pytest.raises(ConfigError, match=message):
        put()


@pytest.mark.parametrize(
    ("kind", "cut", "message"),
    [
        ("qwen3_5", {"pp": 2}, r"pipeline_parallel_size: Qwen3_5.* has layers of linear_attention.* set it to 1"),
        ("gemma3", {"pp": 2}, "pipeline_parallel_size: Gemma3.* lets the tokens of an image see each other"),
        ("gemma4", {"pp": 2}, "pipeline_parallel_size: Gemma4.* lets the tokens of an image see each other"),
        ("qwen3_vl", {"pp": 2, "ulysses": 2}, "pipeline_parallel_size and train.ulysses_parallel_size or context"),
        ("qwen3_vl", {"pp": 2, "ring": 2}, "pipeline_parallel_size and train.ulysses_parallel_size or context"),
        ("janus", {"pp": 2}, r"pipeline_parallel_size: Janus.* has parts that draw \(.*vqmodel"),
        ("gemma4", {"tp": 2}, r"tensor_parallel_size: Gemma4.* \(hidden_size_per_layer_input\)"),
    ],
)
def test_meshes_that_cannot_be_are_refused(tmp_path, kind, cut, message):
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path, kind, train={"init_device": "meta"}))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    with pytest.raises(ConfigError, match=message):
        check_multimodal(model.plain, Mesh(Layout(**cut), torch.device("cpu")))


def test_features_of_later_layers_must_lie_in_the_first_stage(tmp_path):
    described = tiny_vision_description("qwen3_vl")
    described["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path, "qwen3_vl"))
    write_config(described, tmp_path / "qwen3_vl.yaml")
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    check_added_features(model.plain, 2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: .* first 2 layers .* the first stage has 1"):
        check_added_features(model.plain, 1)


def test_text_and_sight_meet_their_models(tmp_path):
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path))
    with pytest.raises(ConfigError, match="model_type"):
        build_language_model(config.model, config.train)
    blind = str(write_config(tiny_language_description(), tmp_path / "blind.yaml"))
    blind_model = config.model.model_copy(update={"config_path": blind})
    with pytest.raises(ConfigError, match="model_type"):
        build_language_model(blind_model, config.train, data_type=config.data.data_type)


def test_encoders_work_is_shared_out_with_the_rest():
    lost = balance(4)
    assert lost["by all operations"] < 0.5 * min(lost["by tokens"], lost["in their order"])
