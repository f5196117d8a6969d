"""VideoReward on tiny models: the published inference in plain loops, its adapter, frames, folders that do not fit."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sfumato.config.base import find_variants
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.networks.qwen2_vl import scaled_size
from sfumato.rewards.networks.video_reward import LEAST_PIXELS, choose_frames
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.video_reward import VideoReward
from tests import tiny_reward_models as tiny

PROMPTS = ["a red cat", "a blue dog and a red dog"]
MEANS_STDS = ((3.6757, 2.2476), (1.1646, 1.3811), (2.8105, 2.5121))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_video_reward(tmp_path_factory.mktemp("video_reward") / "whole")


def build(folder, **fields):
    return VideoReward(model_path=str(folder), device="cpu", **{"dtype": "fp32", "frame_rate": 16.0, **fields})


def videos():
    """Of 13 and 33 frames, of different shapes."""
    rng = np.random.default_rng(0)
    small = [rng.integers(0, 256, (frames, 4, 4, 3), dtype=np.uint8) for frames in (13, 33)]
    shapes = [(40, 56), (64, 33)]
    return [
        np.stack([np.array(Image.fromarray(frame).resize(shape[::-1])) for frame in video])
        for video, shape in zip(small, shapes, strict=True)
    ]


def samples():
    return [Sample(image=video, prompt=prompt, group_id=0) for video, prompt in zip(videos(), PROMPTS, strict=True)]


def patches_of(frames):
    """Qwen2-VL's patches of [F, H, W, 3] frames in loops: two frames by 14 by 14 pixels, by blocks of two by two."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = (frames / 255 - mean) / std
    count, height, width, _ = pixels.shape
    patches = []
    for time in range(0, count, 2):
        for top in range(0, height, 28):
            for left in range(0, width, 28):
                for down in (0, 14):
                    for right in (0, 14):
                        y, x = top + down, left + right
                        block = pixels[time : time + 2, y : y + 14, x : x + 14]
                        patches.append(block.transpose(3, 0, 1, 2).reshape(-1))
    return torch.tensor(np.stack(patches), dtype=torch.float32), [count // 2, height // 14, width // 14]


def published_scores(folder, chosen=((0, 4, 8, 12), (0, 11, 21, 32)), sides=((280, 392), (448, 252))):
    """The published inference with the adapter beside its matrices, one video at a time, standardised [2, 3]."""
    from transformers import AutoTokenizer

    model = tiny.build_video_reward().base_model.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]})
    rows = []
    for sample, indices, (height, width) in zip(samples(), chosen, sides, strict=True):
        scaled = [
            np.asarray(Image.fromarray(sample.image[index]).resize((width, height), Image.Resampling.BICUBIC))
            for index in indices
        ]
        patches, grid = patches_of(np.stack(scaled))
        question = tiny.VIDEO_INSTRUCTION.format(text_prompt=sample.prompt)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{'<|video_pad|>' * (len(patches) // 4)}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        token_ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            seen = model.model.visual(patches, grid_thw=torch.tensor([grid])).pooler_output
            embeddings = model.get_input_embeddings()(token_ids)
            embeddings[token_ids == model.config.video_token_id] = seen
            positions = torch.arange(token_ids.shape[1]).expand(3, 1, -1)
            hidden = model.model.language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
            logits = model.rm_head(hidden)[0, :, 0]
        places = [token_ids[0].tolist().index(len(tokenizer) - 3 + number) for number in range(3)]
        rows.append(
            [(logits[place].item() - mean) / std for place, (mean, std) in zip(places, MEANS_STDS, strict=True)]
        )
    return np.array(rows)


def test_scores_are_those_of_the_published_inference(folder):
    expected = published_scores(folder)
    assert (expected.std(axis=0) > 1e-3).all()
    np.testing.assert_allclose(build(folder, batch_size=2).score(samples()), expected.sum(axis=1), rtol=1e-4, atol=1e-4)
    for number, dimension in enumerate(("VQ", "MQ", "TA")):
        single = build(folder, dimensions=(dimension,)).score(samples())
        np.testing.assert_allclose(single, expected[:, number], rtol=1e-4, atol=1e-4)


def test_an_adapter_beside_the_base_model_scores_alike(folder, tmp_path):
    adapter = tiny.write_video_reward(tmp_path / "adapter", form="adapter")
    np.testing.assert_allclose(build(adapter).score(samples()), build(folder).score(samples()), rtol=1e-5, atol=1e-6)


def test_three_outputs_are_read_each_at_its_token(folder, tmp_path):
    copied = tiny.write_video_reward(tmp_path / "three")
    weights = load_file(copied / "VideoReward.safetensors")
    name = "base_model.model.rm_head.weight"
    weights[name] = torch.cat([weights[name], 2 * weights[name], 3 * weights[name]])
    save_file(weights, copied / "VideoReward.safetensors")
    settings = {**tiny.VIDEO_SETTINGS, "inference_config": None}  # scores as the head gives them
    (copied / "model_config.json").write_text(json.dumps(settings))
    raw = published_scores(folder) * [std for _, std in MEANS_STDS] + [mean for mean, _ in MEANS_STDS]
    expected = (raw * [1, 2, 3]).sum(axis=1)
    np.testing.assert_allclose(build(copied).score(samples()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("total", "frame_rate", "fps", "expected"),
    [
        (81, 16, 2.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # 10.125 frames, of which an even number
        (121, 24, 2.0, [0, 13, 27, 40, 53, 67, 80, 93, 107, 120]),
        (9, 16, 2.0, [0, 3, 5, 8]),  # at least four
        (3, 16, 2.0, [0, 2]),
        (2, 30, 2.0, [0, 1]),
        (5, 1, 4.0, [0, 1, 3, 4]),  # no more than there are
    ],
)
def test_frames_are_chosen_evenly(total, frame_rate, fps, expected):
    assert choose_frames(total, frame_rate, fps) == expected


@pytest.mark.parametrize(
    ("size", "scaled"),
    [((480, 832), (336, 588)), ((448, 448), (448, 448)), ((240, 416), (252, 420)), ((40, 56), (280, 392))],
)
def test_frames_are_scaled_to_the_published_numbers_of_pixels(size, scaled):
    assert scaled_size(*size, least_pixels=LEAST_PIXELS, most_pixels=200704) == scaled


def test_videos_have_the_frame_rate_of_the_sample_unless_one_is_set(folder):
    from sfumato.tracking.waveforms import Waveform

    sound = Waveform(np.zeros((1, 100), np.int16), 8000)
    video = videos()[1]
    silent = Sample(image=video, prompt="a red cat", group_id=0)
    with_sound = Sample(image=video, prompt="a red cat", sound=sound, frame_rate=2.0, group_id=0)
    unset = build(folder, frame_rate=None)
    assert unset.score([with_sound]) == build(folder, frame_rate=2.0).score([silent])
    assert build(folder).score([with_sound]) == build(folder).score([silent]) != unset.score([with_sound])
    with pytest.raises(DataError, match="set its frame_rate"):
        unset.score([silent])


def test_it_is_found_by_its_type_and_scored_by_the_scorer(folder):
    assert find_variants("sfumato.rewards")["video_reward"] is VideoReward
    scorer = Scorer([build(folder)])
    try:
        scores = scorer.score(samples())
    finally:
        scorer.close()
    np.testing.assert_allclose(scores.components["video_reward"], build(folder).score(samples()), rtol=1e-6)


def test_what_is_no_video_is_refused(folder):
    with pytest.raises(ConfigError, match="scores videos and no single images: remove it, or raise"):
        build(folder).check_picture()
    picture = Sample(image=videos()[0][0], prompt="a red cat", group_id=0)
    with pytest.raises(DataError, match="'a red cat' is a picture"):
        build(folder).score([picture])
    with pytest.raises(DataError, match=r"take <\|MQ_reward\|> out"):
        build(folder).check_row("a <|MQ_reward|>", {})


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"frame_rate": 0.0}, "frame_rate"), ({"frame_rate": math.nan}, "frame_rate"),
     ({"dimensions": ()}, "dimensions"), ({"dimensions": ("VQ", "VQ")}, "dimensions")],
)  # fmt: skip
def test_fields_are_checked(folder, fields, named):
    with pytest.raises(ConfigError, match=f"^{named} of reward 'video_reward' must be"):
        build(folder, **fields)


def replaced(**sections):
    """The settings with some fields of their sections replaced."""
    changed = {name: {**(tiny.VIDEO_SETTINGS[name] or {}), **fields} for name, fields in sections.items()}
    return json.dumps({**tiny.VIDEO_SETTINGS, **changed})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no data_config: take the file beside VideoReward's checkpoint"),
        (replaced(data_config={"prompt_template_type": "simple"}), "prompt_template_type is 'simple', but only"),
        (replaced(data_config={"num_frames": 12}), "num_frames is 12, but only None"),
        (replaced(data_config={"fps": "fast"}), "fps must be a number, not 'fast'"),
        (replaced(model_config={"use_special_tokens": False}), "use_special_tokens is False"),
        (replaced(inference_config={"MQ_std": 0}), "MQ_std must be above 0, not 0"),
        (replaced(peft_lora_config={"lora_r": None}), "lora_r must be a number, not None"),
    ],
)
def test_settings_of_another_kind_are_refused(tmp_path, folder, settings, named):
    copied = copy_of(folder, tmp_path)
    (copied / "model_config.json").write_text(settings)
    with pytest.raises(ConfigError, match=named):
        build(copied).prepare()


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_files_that_do_not_fit_are_named(tmp_path, folder):
    copied = copy_of(folder, tmp_path)
    instruction = copied / "instruction.txt"
    instruction.write_text("{text_prompt} <|MQ_reward|> <|VQ_reward|> <|TA_reward|>")
    with pytest.raises(ConfigError, match="in this order"):
        build(copied).prepare()
    instruction.write_text("{text_prompt} <|VQ_reward|> <|TA_reward|>")
    with pytest.raises(ConfigError, match=r"must hold <\|MQ_reward\|> exactly once"):
        build(copied).prepare()
    instruction.unlink()
    with pytest.raises(ConfigError, match=r"has no instruction\.txt"):
        build(copied).prepare()
    instruction.write_text(tiny.VIDEO_INSTRUCTION)
    path = copied / "VideoReward.safetensors"
    weights = load_file(path)
    for name, refusal in (
        ("base_model.model.rm_head.weight", "missing keys: weight"),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight", "for the adapter of language_model"),
        ("base_model.model.visual.merger.mlp.2.bias", "missing keys: visual.merger.mlp.2.bias"),
    ):
        save_file({key: weight for key, weight in weights.items() if key != name}, path)
        with pytest.raises(ConfigError, match=refusal):
            build(copied).prepare()
    path.rename(copied / "model.pth")  # what is published, before it is converted
    with pytest.raises(ConfigError, match=r"convert weights .*model\.pth .*VideoReward\.safetensors"):
        build(copied).prepare()
