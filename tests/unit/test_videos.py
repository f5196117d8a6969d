"""Videos beside tokens: against transformers one by one, which frames are taken, broken files, batches without them."""

import json

import numpy as np
import pytest
import torch

from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.clips import VideoProcessor
from sfumato.data.media.pictures import read_image
from sfumato.data.text.packing import make_batch
from sfumato.errors import ConfigError, DataError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.packed_model import RowLayout
from tests.one_by_one import assert_as_transformers, build_reader, samples_of
from tests.tiny import run_task_here
from tests.tiny_vision import clip, data_url, image_row, media_row, picture, tiny_media_config

pytest.importorskip("cv2", reason="videos need opencv-python-headless (extra 'video')")


def build(tmp_path, kind="qwen2_5_vl", **changes):
    tmp_path.mkdir(parents=True, exist_ok=True)
    return build_reader(tiny_media_config(tmp_path, kind, **changes))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A model and what makes samples, which tests leave as they are but for the layout of rows."""
    return build(tmp_path_factory.mktemp("model"))


SLOW = [("qwen2_vl", "packed"), ("qwen2_5_vl", "documents"), ("qwen3_vl", "packed"), ("qwen3_vl_moe", "packed")]
SLOW += [("qwen3_5", "documents"), ("qwen3_5_moe", "documents")]


@pytest.mark.parametrize(
    ("kind", "rows"), [("qwen2_5_vl", "packed"), *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)]
)
def test_documents_with_videos_are_those_of_transformers_one_by_one(tmp_path, kind, rows):
    model, transform = build(tmp_path, kind, data={"max_seq_len": 512})
    batch, _ = assert_as_transformers(model, transform, [media_row(index) for index in range(5)], rows)
    assert len(batch.media) == 5 and "pixel_values_videos" in batch.media[1]


@pytest.mark.parametrize("rows", ["packed", "documents"])
@pytest.mark.parametrize("numbers", [(0, 3), (1,), (0,)])
def test_each_batch_has_an_image_and_a_video_so_that_ranks_compute_alike(built, rows, numbers):
    model, transform = built
    model.set_row_layout("sdpa", RowLayout(rows))
    kinds = {"pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"}
    data_rows = [image_row(number) for number in numbers]
    samples = samples_of(transform, data_rows)
    batch = make_batch(samples, list(numbers), [0] * len(numbers), True, 0, 2, model.vision)
    assert kinds <= {name for tensors in batch.media for name in tensors}
    calls = []
    hook = model.module.base_model.visual.register_forward_hook(lambda *_: calls.append(1))
    model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())
    hook.remove()
    assert len(calls) >= 2 and len(calls) % 2 == 0
    without = make_batch(samples, list(numbers), [0] * len(numbers), True, 0, 2)
    assert batch.document_lengths == without.document_lengths and batch.num_labels == without.num_labels


def processor(by_frame, **changes):
    sizes = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    settings = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "image_mean": (0.5,) * 3}
    return VideoProcessor(**{"by_frame": by_frame, "size": sizes, "image_std": (0.5,) * 3, **settings, **changes})


def test_frames_are_chosen_as_the_processors_of_transformers_choose_them():
    ten_seconds = processor(True).choose(300, 30.0)
    assert ten_seconds == list(range(0, 300, 15))
    assert processor(False).choose(300, 30.0) == np.linspace(0, 299, 20).round().astype(int).tolist()
    assert processor(True).choose(7, 30.0) == [0, 1, 3, 5] and processor(True).choose(2, 30.0) == [0, 1]
    assert len(processor(True, max_frames=9).choose(300, 30.0)) == 8
    assert len(processor(False, max_frames=9).choose(300, 30.0)) == 9
    assert len(processor(True, fps=0.5).choose(300, 30.0)) == 4


@pytest.mark.parametrize(
    "limits", [{"min_frames": 9, "max_frames": 8}, {"min_frames": 800}, {"min_pixels": 80 * 28 * 28}], ids=str
)
def test_limits_of_which_the_least_is_above_the_most_are_refused(limits):
    settings = dict.fromkeys(("fps", "min_frames", "max_frames", "min_pixels", "max_pixels"))
    assert processor(True).limited(**settings) == processor(True)
    with pytest.raises(ConfigError, match=r"the first must not be above the second"):
        processor(True).limited(**settings | limits)


def test_frames_are_scaled_by_the_rule_of_images_or_by_all_their_pixels():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = {"factor": 28, "min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}
    for height, width in ((16, 24), (100, 300), (480, 640), (1080, 1920)):
        assert processor(True).scaled(8, height, width) == smart_resize(height, width, **limits)
        rows, columns = processor(False).scaled(8, height, width)
        assert rows % 28 == 0 == columns % 28 and 8 * rows * columns <= 64 * 28 * 28
    with pytest.raises(ValueError, match="200 times"):
        processor(True).scaled(8, 2, 500)


def test_patches_of_a_still_video_are_those_of_its_image(built):
    model, _ = built
    reader = model.vision.reader
    image = read_image(picture(16, 24), "a test")
    frames = np.stack([np.asarray(image)] * 2)
    of_image = reader.processor.image_processor([image], return_tensors="np")
    patches = reader.processor.video_processor([frames], [None])
    np.testing.assert_allclose(patches["pixel_values_videos"], of_image["pixel_values"], rtol=1e-5, atol=1e-6)
    assert patches["video_grid_thw"].tolist() == of_image["image_grid_thw"].tolist()


def test_operations_of_videos_are_those_of_images_of_as_many_parts(built):
    model, transform = built
    (sample,) = samples_of(transform, [media_row(1)])
    shapes = sample.documents[0].images.shapes
    assert shapes[0, 0] > 1 == shapes[1, 0]  # a video, then an image
    flops = FlopCount(model.plain, model.vision).encoder
    assert flops.forward(shapes) == sum(flops.forward(shape[None]) for shape in shapes) > flops.forward(shapes[:1])


def broken_rows():
    whole = clip(32, 24, 12)
    ask = {"type": "text", "text": "What?"}

    def video(content):
        return [{"type": "video", "video": data_url(content, "video/avi")}, ask]

    return {
        "truncated": (video(whole[: len(whole) // 2]), {}, "broken video"),
        "empty": (video(b""), {}, "broken video"),
        "picture": (video(picture(16, 16)), {}, "the video has 1 frame|broken video"),
        "text": (video(b"no video"), {}, "broken video"),
        "missing": ([{"type": "video", "path": "nowhere.mp4"}, ask], {}, "video file not found: .*nowhere.mp4"),
        "one frame": (video(clip(32, 24, 1)), {}, "has 1 frame; the model takes at least two"),
        "as image": ([{"type": "image", "image": data_url(whole)}, ask], {}, "broken image"),
        "address": ([{"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}], {}, "not downloaded"),
        "too few": ("<video> and <video>?", {"videos": [whole]}, "a video is missing.*'videos' has 1"),
        "too many": ("<video>?", {"videos": [whole] * 3}, "2 of 3 videos in its column have no place"),
        "null": ("<video>?", {"videos": [None]}, "a video of column 'videos' is null"),
        "its own": ([{"type": "text", "text": "<|video_pad|>"}], {}, "1 placeholders .* for 0 images and videos"),
        "audio": ([{"type": "audio", "audio": "a.wav"}], {}, "neither a text nor an image, a video"),
    }


@pytest.fixture(scope="module")
def transform(built):
    return built[1]


@pytest.mark.parametrize("name", broken_rows())
def test_broken_videos_are_named(transform, name):
    content, columns, message = broken_rows()[name]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}], **columns}
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 7.*({message})"):
        transform(FiledRow(row), "rows.jsonl, line 7")


def test_a_video_that_states_an_absurd_number_of_frames_is_refused_before_it_is_read(transform, monkeypatch):
    monkeypatch.setattr("sfumato.data.media.videos.MAX_FRAMES", 10)
    with pytest.raises(DataError, match="of 12 frames of 24x32 pixels: cut"):
        transform.reader.processor.video_processor.read(clip(32, 24, 12), "row 1")


def test_videos_come_from_files_bytes_and_columns_alike(transform, tmp_path):
    content = clip(32, 24, 12)
    (tmp_path / "a.avi").write_bytes(content)
    end = {"role": "assistant", "content": "Yes."}
    ways = [
        ([{"type": "video", "path": "a.avi"}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "video_url", "video_url": {"url": data_url(content)}}, {"type": "text", "text": "What?"}], {}),
        ([{"type": "video"}, {"type": "text", "text": "What?"}], {"videos": [{"bytes": content, "path": None}]}),
        ("<video>What?", {"video": "a.avi"}),
    ]
    results = []
    for message, columns in ways:
        row = FiledRow({"messages": [{"role": "user", "content": message}, end], **columns})
        row.folder = tmp_path
        (sample,) = transform(row, "row 1")
        tensors = transform.reader.tensors(sample.documents[0].images)
        results.append((sample.documents[0].input_ids.tolist(), tensors["pixel_values_videos"]))
    for ids, pixels in results[1:]:
        assert ids == results[0][0] and torch.equal(pixels, results[0][1])


def test_a_run_with_videos_leaves_broken_ones_out_and_writes_their_settings(tmp_path):
    config = tiny_media_config(tmp_path, train={"max_steps": 2, "global_batch_size": 2}, eval={"every_steps": 2})
    rows = [media_row(index) for index in range(4)]
    rows[1]["messages"][0]["content"][0]["video"] = data_url(clip(32, 24, 12)[:2000])
    (tmp_path / "media.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config["data"]["max_bad_rows"] = 1
    run_task_here("train_text", config)
    assert "line 2" in (tmp_path / "run/log.txt").read_text()
    said = json.loads((tmp_path / "run/hf_ckpt/video_preprocessor_config.json").read_text())
    assert said["max_frames"] == 6 and said["video_processor_type"] == "Qwen2VLVideoProcessor"


def test_models_whose_videos_are_not_known_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="videos of InternVLProcessor need torchvision"):
        build(tmp_path, "internvl", data={"data_type": {"min_pixels": None, "max_pixels": None}})
