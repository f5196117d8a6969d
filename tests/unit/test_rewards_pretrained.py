"""Learned rewards on tiny models of the real classes: published formulas, order, folders, threads, processes."""

import json
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from safetensors.torch import load_file, save_file

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.networks.folder import CutTexts
from sfumato.rewards.pretrained import (
    Aesthetic,
    ClipScore,
    HpsV2,
    HpsV3,
    ImageClass,
    ImageReward,
    ImageSimilarity,
    PickScore,
    PretrainedReward,
    ProcessRewardModel,
    TextRewardModel,
)
from sfumato.rewards.scoring.scorer import Scorer
from tests import tiny_reward_models as tiny

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red cat", "blue", "a blue dog and a red dog and a cat"]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("reward_models")
    return {
        "clip": tiny.write_clip(base / "clip"),
        "siglip": tiny.write_siglip(base / "siglip"),
        "dinov2": tiny.write_dinov2(base / "dinov2"),
        "classifier": tiny.write_image_classifier(base / "classifier"),
        "aesthetic": tiny.write_aesthetic(base / "aesthetic"),
        "image_reward": tiny.write_image_reward(base / "image_reward"),
        "hpsv3": tiny.write_hpsv3(base / "hpsv3"),
        "text": tiny.write_text_reward_model(base / "text"),
    }


def images(count, seed=0):
    """Images of different shapes, smooth enough that scaling keeps something of them."""
    rng = np.random.default_rng(seed)
    shapes = [(40, 56), (32, 32), (64, 33)]
    small = [rng.integers(0, 256, (4, 4, 3), dtype=np.uint8) for _ in range(count)]
    return [np.array(Image.fromarray(picture).resize(shapes[i % 3][::-1])) for i, picture in enumerate(small)]


def samples(count=3, **fields):
    return [
        Sample(image=image, prompt=PROMPTS[i % 3], source=source, group_id=0, **fields)
        for i, (image, source) in enumerate(zip(images(count), images(count, seed=1), strict=True))
    ]


def texts():
    return [
        Sample(text="It is 3.", prompt="What is 1 + 2?", group_id=0),
        Sample(text="No answer, thank you.", prompt="hello", group_id=0),
        Sample(text="abc", prompt="", metadata={"messages": [{"role": "system", "content": "Sort cab."}]}, group_id=0),
    ]


REWARDS = {
    "clip_score": (ClipScore, "clip", samples),
    "pickscore": (PickScore, "clip", samples),
    "hpsv2": (HpsV2, "clip", samples),
    "aesthetic": (Aesthetic, "aesthetic", samples),
    "image_similarity": (ImageSimilarity, "dinov2", samples),
    "image_reward": (ImageReward, "image_reward", samples),
    "image_class": (partial(ImageClass, image_class="nsfw"), "classifier", samples),
    "hpsv3": (HpsV3, "hpsv3", samples),
    "text_reward_model": (TextRewardModel, "text", texts),
}


def build(name, folders, **fields):
    cls, folder, _ = REWARDS[name]
    return cls(model_path=str(folders[folder]), device="cpu", **{"dtype": "fp32", **fields})


# Published formulas


def clip_outputs(folder):
    """Logits and embeddings as transformers itself computes them for pairs of image and prompt."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder).eval()
    batch = samples()
    pixels = CLIPImageProcessorPil.from_pretrained(folder)([sample.image for sample in batch], return_tensors="pt")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tokens = tokenizer([sample.prompt for sample in batch], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return model(**pixels, **tokens), model.logit_scale.exp()


def test_clip_scores_are_the_published_functions_of_the_cosine(folders):
    outputs, _ = clip_outputs(folders["clip"])
    logits = outputs.logits_per_image.diagonal()
    assert logits.std() > 0.1
    expected = {"clip_score": logits / 30, "pickscore": logits / 26}
    for name, values in expected.items():
        np.testing.assert_allclose(build(name, folders).score(samples()), values, **TOLERANCE)


def fitted_by_pillow(image, size):
    """ResizeMaxSize of the package hpsv2: the longer side scaled to ``size``, black at both ends of the shorter one."""
    scale = size / max(image.shape[:2])
    height, width = (round(side * scale) for side in image.shape[:2])
    fitted = np.zeros((size, size, 3), np.float32)
    top, left = (size - height) // 2, (size - width) // 2
    for channel in range(3):
        plane = Image.fromarray(image[..., channel].astype(np.float32) / 255)
        scaled = plane.resize((width, height), Image.Resampling.BICUBIC)
        fitted[top : top + height, left : left + width, channel] = np.asarray(scaled)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return torch.from_numpy((fitted - np.float32(mean)) / np.float32(std)).permute(2, 0, 1)


@pytest.mark.parametrize("shape", [(40, 64), (64, 40), (64, 64), (21, 55), (8, 300), (5, 9), (32, 32), (32, 17)])
def test_hpsv2_fits_the_whole_image(shape):
    from sfumato.rewards.networks.embedder import fit_whole

    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    torch.testing.assert_close(fit_whole(image, 32), fitted_by_pillow(image, 32), atol=1e-4, rtol=1e-4)


def test_hpsv2_is_the_cosine_of_the_whole_image_with_its_prompt(folders):
    from transformers import CLIPModel, CLIPTokenizer

    model, batch = CLIPModel.from_pretrained(folders["clip"]).eval(), samples()
    size = model.config.vision_config.image_size
    pixels = torch.stack([fitted_by_pillow(sample.image, size) for sample in batch])
    tokenizer = CLIPTokenizer.from_pretrained(folders["clip"])
    tokens = tokenizer([sample.prompt for sample in batch], padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        outputs = model(pixel_values=pixels, **tokens)
    expected = outputs.logits_per_image.diagonal() / model.logit_scale.exp()
    actual = build("hpsv2", folders).score(batch)
    np.testing.assert_allclose(actual, expected.detach(), atol=1e-4)
    wide = np.full((32, 96, 3), 200, np.uint8)
    edge = wide.copy()
    edge[:, :16] = 0  # outside of the middle square
    pair = [Sample(image=image, prompt="blue", group_id=0) for image in (wide, edge)]
    first, second = build("hpsv2", folders).score(pair)
    assert abs(first - second) > 1e-4
    cut = build("clip_score", folders).score(pair)
    assert cut[0] == cut[1], "CLIP's own preparation sees the middle alone"


def test_long_prompts_are_cut_off_and_keep_their_end_token(folders):
    reward = build("clip_score", folders)
    (image,) = images(1)
    long = [Sample(image=image, prompt="red blue " * 50 + last, group_id=0) for last in ("cat", "dog")]
    first, second = reward.score(long)
    assert first == second and math.isfinite(first)


@pytest.mark.parametrize("kind", ["clip_score", "image_reward"])
def test_a_prompt_that_is_cut_is_said_once(folders, kind):
    """A run would follow a reward that never sees the end of its prompts."""
    reward = build(kind, folders, batch_size=2)
    network = reward._network()
    network.cut_texts = CutTexts()
    (image,) = images(1)
    short, long = (Sample(image=image, prompt=text, group_id=0) for text in ("red cat", "red blue " * 50 + "dog"))
    assert Scorer([reward]).score([short]).notes == []
    (note,) = Scorer([reward]).score([short, long, long]).notes
    assert note.startswith(f"{reward.label}: its model reads the first ") and "begins with 'red blue red" in note
    assert Scorer([reward]).score([long]).notes == []


def linear_head(features, tensors):
    for place in (0, 2, 4, 6, 7):
        features = features @ tensors[f"layers.{place}.weight"].T + tensors[f"layers.{place}.bias"]
    return features[:, 0]


def test_aesthetic_is_the_linear_head_on_normalised_embeddings(folders):
    outputs, _ = clip_outputs(folders["aesthetic"])
    expected = linear_head(outputs.image_embeds, load_file(folders["aesthetic"] / "aesthetic.safetensors"))
    np.testing.assert_allclose(build("aesthetic", folders).score(samples()), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["clip", "siglip", "dinov2"])
def test_similarity_is_the_cosine_with_the_source_image(folders, kind):
    from transformers import AutoImageProcessor, AutoModel

    reward = ImageSimilarity(model_path=str(folders[kind]), device="cpu")
    model = AutoModel.from_pretrained(folders[kind]).eval()
    processor = AutoImageProcessor.from_pretrained(folders[kind], backend="pil")
    batch = samples()
    with torch.no_grad():
        embeddings = []
        for pictures in ([sample.image for sample in batch], [sample.source for sample in batch]):
            pixels = processor(pictures, return_tensors="pt").pixel_values
            if kind == "dinov2":
                embeddings.append(model(pixels).last_hidden_state[:, 0])
            else:
                pooled = model.vision_model(pixels).pooler_output
                embeddings.append(model.visual_projection(pooled) if kind == "clip" else pooled)
    values = reward.score(batch)
    np.testing.assert_allclose(values, F.cosine_similarity(*embeddings), **TOLERANCE)
    same = [Sample(image=sample.image, source=sample.image, prompt="", group_id=0) for sample in batch]
    np.testing.assert_allclose(reward.score(same), np.ones(3), **TOLERANCE)
    assert max(values) < 0.9999


def attention(queries, keys, values, num_heads, mask=None):
    split = lambda tensor: tensor.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # noqa: E731
    mixed = F.scaled_dot_product_attention(split(queries), split(keys), split(values), attn_mask=mask)
    return mixed.transpose(1, 2).flatten(2)


class Weights:
    """Weights under their published names, applied by name."""

    def __init__(self, tensors, prefix=""):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name):
        return self.tensors[f"{self.prefix}{name}"]

    def linear(self, name, features):
        return F.linear(features, self[f"{name}.weight"], self[f"{name}.bias"])

    def norm(self, name, features, eps):
        return F.layer_norm(features, features.shape[-1:], self[f"{name}.weight"], self[f"{name}.bias"], eps)


def blip_features(tensors, pixels, token_ids):
    """BLIP's image encoder, and its text encoder with cross-attention, written down from their description."""
    w = Weights(tensors, "blip.visual_encoder.")
    patches = F.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16).flatten(2).mT
    seen = torch.cat([w["cls_token"].expand(len(pixels), -1, -1), patches], dim=1) + w["pos_embed"]
    for layer in range(2):
        name = f"blocks.{layer}"
        qkv = w.linear(f"{name}.attn.qkv", w.norm(f"{name}.norm1", seen, 1e-6)).chunk(3, dim=-1)
        seen = seen + w.linear(f"{name}.attn.proj", attention(*qkv, num_heads=1))
        inner = F.gelu(w.linear(f"{name}.mlp.fc1", w.norm(f"{name}.norm2", seen, 1e-6)))
        seen = seen + w.linear(f"{name}.mlp.fc2", inner)
    seen = w.norm("norm", seen, 1e-6)

    w = Weights(tensors, "blip.text_encoder.")
    positions = w["embeddings.position_embeddings.weight"][: token_ids.shape[1]]
    text = w["embeddings.word_embeddings.weight"][token_ids] + positions
    text = w.norm("embeddings.LayerNorm", text, 1e-12)
    for layer in range(2):
        name = f"encoder.layer.{layer}"
        for kind, source in (("attention", None), ("crossattention", seen)):
            source = text if source is None else source
            mixed = attention(
                w.linear(f"{name}.{kind}.self.query", text),
                w.linear(f"{name}.{kind}.self.key", source),
                w.linear(f"{name}.{kind}.self.value", source),
                num_heads=2,
            )
            text = w.norm(
                f"{name}.{kind}.output.LayerNorm", text + w.linear(f"{name}.{kind}.output.dense", mixed), 1e-12
            )
        inner = F.gelu(w.linear(f"{name}.intermediate.dense", text))
        text = w.norm(f"{name}.output.LayerNorm", text + w.linear(f"{name}.output.dense", inner), 1e-12)
    return text[:, 0]


def test_image_reward_is_blip_with_the_published_head_and_scale(folders):
    from sfumato.rewards.networks.image_reward import prepare_pixels

    tensors = load_file(folders["image_reward"] / "ImageReward.safetensors")
    token_ids = {"a red cat": [2, 5, 6, 8, 3], "blue": [2, 7, 3]}  # of a vocabulary of ten words; no padding
    token_ids[PROMPTS[2]] = [2, 5, 7, 9, 1, 5, 6, 9, 1, 5, 8, 3]
    expected = []
    for sample in samples():
        features = blip_features(
            tensors, prepare_pixels(sample.image, 32)[None], torch.tensor([token_ids[sample.prompt]])
        )
        head = {name.removeprefix("mlp."): tensor for name, tensor in tensors.items() if name.startswith("mlp.")}
        expected.append((linear_head(features, head).item() - 0.16717362830052426) / 1.0333394966054072)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(build("image_reward", folders).score(samples()), expected, **TOLERANCE)


def test_pixels_of_image_reward_are_scaled_cut_and_normalised():
    from sfumato.rewards.networks.image_reward import prepare_pixels

    image = np.zeros((20, 61, 3), np.uint8)
    image[:, 20:41] = 255  # the middle third, more than the cut keeps
    pixels = prepare_pixels(image, 10)
    assert pixels.shape == (3, 10, 10) and pixels.dtype == torch.float32
    white = (1 - torch.tensor([0.48145466, 0.4578275, 0.40821073])) / torch.tensor([0.26862954, 0.26130258, 0.27577711])
    torch.testing.assert_close(pixels[:, 5, 5], white)


def test_a_class_has_the_probability_that_transformers_gives_it(folders):
    from transformers import AutoImageProcessor, pipeline

    folder = str(folders["classifier"])
    # where torchvision is installed, transformers would scale pictures by it
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    classify = pipeline("image-classification", model=folder, image_processor=processor, device="cpu")
    expected = [
        next(entry["score"] for entry in classify(Image.fromarray(image)) if entry["label"] == "NSFW")
        for image in images(3)
    ]
    assert len({round(value, 4) for value in expected}) == 3
    assert build("image_class", folders).score(samples()) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(
        ConfigError, match=r"'violence' of reward 'image_class' is no class of .*; there are normal, nsfw"
    ):
        build("image_class", folders, image_class="violence").prepare()


DIFFERENTIABLE = ("clip_score", "pickscore", "hpsv2", "aesthetic", "image_reward")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_pixels_with_gradient_have_the_same_score(folders, name):
    reward = build(name, folders)
    for sample in samples():
        pixels = torch.from_numpy(sample.image.copy()).permute(2, 0, 1)[None].float() / 255
        pixels.requires_grad_()
        (value,) = reward.score_pixels(pixels, [sample.prompt])
        (wanted,) = reward.score([sample])
        assert float(value.detach()) == pytest.approx(wanted, rel=0.02, abs=0.01)  # the others round scaled pictures
        (gradient,) = torch.autograd.grad(value, pixels)
        assert torch.isfinite(gradient).all() and float(gradient.abs().sum()) > 0
        step = 1e-3 * gradient / gradient.norm()
        with torch.no_grad():
            ends = [reward.score_pixels(pixels + sign * step, [sample.prompt]) for sign in (1, -1)]
        assert float(ends[0] - ends[1]) == pytest.approx(2e-3 * float(gradient.norm()), rel=0.05, abs=2e-6)


def test_hpsv3_rates_at_its_token_with_plainly_counted_positions(folders):
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLImageProcessorPil, Qwen2VLModel

    from sfumato.rewards.networks.hpsv3 import resize_image

    folder = folders["hpsv3"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    config = Qwen2VLConfig.from_pretrained(folder)
    config.text_config.vocab_size = len(tokenizer)
    model = Qwen2VLModel(config).eval()
    tensors = load_file(folder / "HPSv3.safetensors")
    body = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    model.language_model.load_state_dict(body)
    model.visual.load_state_dict(
        {name.removeprefix("visual."): tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    )
    w = Weights(tensors, "rm_head.")
    expected = []
    for sample in samples():
        pixels = Qwen2VLImageProcessorPil()(resize_image(sample.image), return_tensors="pt")
        count = int(pixels.image_grid_thw.prod()) // 4
        question = tiny.INSTRUCTION.format(text_prompt=sample.prompt)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{'<|image_pad|>' * count}<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        token_ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            seen = model.visual(pixels.pixel_values, grid_thw=pixels.image_grid_thw).pooler_output
            embeddings = model.get_input_embeddings()(token_ids)
            embeddings[token_ids == config.image_token_id] = seen
            positions = torch.arange(token_ids.shape[1]).expand(3, 1, -1)
            hidden = model.language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
            inner = F.relu(w.linear("0", hidden[0, token_ids[0].tolist().index(len(tokenizer) - 1)]))
            expected.append(w.linear("5", F.relu(w.linear("3", inner)))[0].item())
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(build("hpsv3", folders).score(samples()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "scaled"),
    [((512, 512), (448, 448)), ((256, 256), (448, 448)), ((448, 448), (448, 448)), ((720, 1280), (336, 588)),
     ((30, 40), (392, 532))],
)  # fmt: skip
def test_hpsv3_scales_images_to_about_200704_pixels(size, scaled):
    from sfumato.rewards.networks.hpsv3 import resize_image

    assert resize_image(np.zeros((*size, 3), np.uint8)).size == scaled[::-1]


def test_hpsv3_refuses_prompts_that_hold_tokens_of_the_model(folders):
    for prompt in ("a <|Reward|>", "<|image_pad|> cat"):
        with pytest.raises(DataError, match=r"take <\|\w+\|> out"):
            build("hpsv3", folders).check_row(prompt, {})


def test_text_reward_is_the_logit_of_the_whole_conversation(folders):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folders["text"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders["text"])
    rendered = [
        "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n",
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nNo answer, thank you.<|im_end|>\n",
        "<|im_start|>system\nSort cab.<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n",
    ]
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in rendered]
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(build("text_reward_model", folders).score(texts()), expected, **TOLERANCE)


def test_a_text_longer_than_the_model_reads_has_no_score(folders):
    values = build("text_reward_model", folders).score([*texts()[:1], Sample(text="abc " * 99, prompt="", group_id=0)])
    assert math.isfinite(values[0]) and math.isnan(values[1])


def test_a_text_model_without_padding_reads_one_at_a_time(tmp_path):
    folder = tiny.write_text_reward_model(tmp_path / "text", pad_token_id=None)
    reward = TextRewardModel(model_path=str(folder), device="cpu")
    np.testing.assert_allclose(reward.score(texts()), [reward.score([text])[0] for text in texts()], **TOLERANCE)


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_step_probabilities_are_read_where_steps_end(tmp_path, kind, num_labels):
    import transformers

    folder = tiny.write_text_reward_model(tmp_path / "text", num_labels=num_labels)
    if kind == "Token":
        model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
        tiny.randomise(model, 5)
        model.save_pretrained(folder)
    reward = {
        how: ProcessRewardModel(model_path=str(folder), device="cpu", aggregation=how, steps_by="line")
        for how in ("min", "product", "mean", "last")
    }
    if kind == "Sequence" and num_labels == 2:
        refusal(reward["min"], "2 outputs, not 1")
        return
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    expected = []
    with torch.no_grad():
        for text in ("It is", "It is\n3.", "It is\n3.\nabc cba"):
            ids = tokenizer(begin + text, return_tensors="pt")["input_ids"]
            logits = model.score(model.model(ids).last_hidden_state[0, -1])
            expected.append(float(logits.softmax(-1)[1] if num_labels == 2 else logits[0].sigmoid()))
    assert np.std(expected) > 0.001
    answer = {"prompt": "What is 1 + 2?", "group_id": 0}
    samples_with_steps = [Sample(text="It is\n3.\n\nabc cba", **answer), Sample(text=" \n", **answer), texts()[1]]
    actual = {how: value.score(samples_with_steps) for how, value in reward.items()}
    wanted = {"min": min(expected), "product": math.prod(expected), "mean": np.mean(expected), "last": expected[-1]}
    for how, value in wanted.items():
        assert actual[how][0] == pytest.approx(value, rel=1e-5), how
        assert math.isnan(actual[how][1]) and math.isfinite(actual[how][2])
        assert reward[how].score(samples_with_steps[2:]) == pytest.approx(actual[how][2:], rel=1e-5)


def test_the_last_answer_of_several_turns_is_scored_with_all_of_them(folders):
    chat = [{"role": "user", "content": "Sort cab."}, {"role": "assistant", "content": "abc"}]
    whole = [*chat, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is 3."}]
    reward = build("text_reward_model", folders)
    long = Sample(text="It is 3.", prompt="Sort cab.", messages=whole, group_id=0)
    same = Sample(text="It is 3.", prompt="", metadata={"messages": whole[:3]}, group_id=0)
    short = Sample(text="It is 3.", prompt="Sort cab.", group_id=0)
    values = reward.score([long, same, short])
    assert values[0] == pytest.approx(values[1], rel=1e-5) and values[0] != pytest.approx(values[2], rel=1e-4)


# All of them


@pytest.mark.parametrize("name", REWARDS)
def test_scores_depend_neither_on_the_order_nor_on_the_batch(folders, name):
    batch = REWARDS[name][2]()
    alone = build(name, folders, batch_size=1).score(batch)
    assert len(set(alone)) == 3 and all(math.isfinite(value) for value in alone)
    together = build(name, folders, batch_size=8).score(batch[::-1] + batch[:1])
    np.testing.assert_allclose(together, [*alone[::-1], alone[0]], rtol=2e-5, atol=1e-5)


def test_threads_share_one_model_and_agree(tmp_path, folders):
    folder = tmp_path / "clip"  # not loaded yet: the threads meet in the loading, too
    shutil.copytree(folders["clip"], folder)
    rewards = [cls(model_path=str(folder), device="cpu", batch_size=2) for cls in (ClipScore, PickScore, HpsV2)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda i: rewards[i % 3].score(samples(5)), range(12)))
        networks = list(pool.map(lambda i: rewards[i % 3]._network(), range(6)))
    assert all(network is networks[0] for network in networks)
    assert results[:3] * 4 == results


@pytest.mark.slow
def test_another_process_gives_the_same_to_the_bit(folders):
    code = (
        "import sys, torch\n"
        "torch.set_num_threads(int(sys.argv[1]))\n"
        "from tests.unit.test_rewards_pretrained import REWARDS, build, samples\n"
        "folders = {'clip': sys.argv[2], 'image_reward': sys.argv[3]}\n"
        "print([build(name, folders).score(samples()) for name in ('clip_score', 'image_reward')])\n"
    )
    command = [sys.executable, "-c", code, str(torch.get_num_threads()), folders["clip"], folders["image_reward"]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    expected = [build(name, folders).score(samples()) for name in ("clip_score", "image_reward")]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_video_has_the_mean_of_the_frames_that_are_looked_at(folders):
    frames = np.stack([np.array(Image.fromarray(image).resize((40, 40))) for image in images(6)])
    reward = build("clip_score", folders, frame_step=2)
    expected = np.mean([reward.score([Sample(image=frame, prompt="red", group_id=0)]) for frame in frames[::2]])
    total = Scorer([reward]).score([Sample(image=frames, prompt="red", group_id=0)]).total
    np.testing.assert_allclose(total, [expected], **TOLERANCE)


def test_a_text_reaches_its_reward_through_the_scorer(folders):
    reward = build("text_reward_model", folders)
    np.testing.assert_allclose(Scorer([reward]).score(texts()).total, reward.score(texts()), **TOLERANCE)


def test_half_precision_changes_scores_a_little(folders):
    exact, rounded = (build("clip_score", folders, dtype=dtype).score(samples()) for dtype in ("fp32", "bf16"))
    assert exact != rounded
    np.testing.assert_allclose(rounded, exact, rtol=0.1, atol=0.1)


# Folders that do not fit


def refusal(reward, match):
    with pytest.raises(ConfigError, match=match) as caught:
        reward.prepare()
    assert str(caught.value).startswith(f"reward '{reward.label}': ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "missing", "named"),
    [
        ("clip_score", "config.json", r"has no config\.json"),
        ("clip_score", "preprocessor_config.json", "preprocessor_config"),
        ("clip_score", "model.safetensors", r"has no \*\.safetensors"),
        ("aesthetic", "aesthetic.safetensors", r"has no aesthetic\.safetensors"),
        ("image_reward", "med_config.json", r"has no med_config\.json"),
        ("hpsv3", "instruction.txt", r"has no instruction\.txt"),
    ],
)
def test_a_missing_file_is_named(tmp_path, folders, name, missing, named):
    folder = tmp_path / "model"
    shutil.copytree(folders[REWARDS[name][1]], folder)
    (folder / missing).unlink()
    assert str(folder) in refusal(REWARDS[name][0](model_path=str(folder), device="cpu"), named)


def test_a_folder_without_tokenizer_is_named(tmp_path, folders):
    folder = tmp_path / "model"
    shutil.copytree(folders["clip"], folder, ignore=shutil.ignore_patterns("token*", "vocab*", "merges*"))
    refusal(ClipScore(model_path=str(folder), device="cpu"), r"has no tokenizer\.json")
    ImageSimilarity(model_path=str(folder), device="cpu").prepare()  # which needs none


def test_models_of_another_kind_are_refused(folders):
    refusal(ClipScore(model_path=str(folders["siglip"]), device="cpu"), "type 'siglip', but this reward needs clip")
    refusal(ImageSimilarity(model_path=str(folders["text"]), device="cpu"), "type 'qwen2', but")
    refusal(TextRewardModel(model_path=str(folders["clip"]), device="cpu"), "CLIPModel, but a reward model for text")
    refusal(HpsV3(model_path="some/hub-name", device="cpu"), "is not a folder")


def test_a_classifier_of_several_classes_is_refused(tmp_path):
    folder = tiny.write_text_reward_model(tmp_path / "text", num_labels=3)
    refusal(TextRewardModel(model_path=str(folder), device="cpu"), "3 outputs, not one")


def test_a_tokenizer_without_chat_template_is_refused(tmp_path, folders):
    folder = tmp_path / "text"
    shutil.copytree(folders["text"], folder, ignore=shutil.ignore_patterns("chat_template*"))
    refusal(TextRewardModel(model_path=str(folder), device="cpu"), "no chat template")


@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("clip_score", "model.safetensors", "visual_projection.weight"),
        ("aesthetic", "aesthetic.safetensors", "layers.4.bias"),
        ("image_reward", "ImageReward.safetensors", "blip.text_encoder.encoder.layer.1.output.dense.bias"),
        ("hpsv3", "HPSv3.safetensors", "rm_head.3.weight"),
    ],
)
def test_missing_weights_are_refused_rather_than_drawn_at_random(tmp_path, folders, name, file, key):
    folder = tmp_path / "model"
    shutil.copytree(folders[REWARDS[name][1]], folder)
    tensors = load_file(folder / file)
    removed = tensors.pop(key)
    save_file(tensors, folder / file, {"format": "pt"})
    reward = REWARDS[name][0](model_path=str(folder), device="cpu")
    refusal(reward, "missing keys")
    save_file({**tensors, key: removed.repeat(2, *[1] * (removed.ndim - 1))}, folder / file, {"format": "pt"})
    refusal(reward, "mismatched keys|size mismatch|ignore_mismatched_sizes")
    (folder / file).write_bytes(b"not a tensor")
    refusal(reward, "transformers cannot load it|no readable safetensors file")


def test_devices_and_sizes_are_checked(folders):
    for fields, named in (({"device": "gpu"}, "device"), ({"batch_size": 0}, "batch_size")):
        with pytest.raises(ConfigError, match=f"^{named} of reward 'clip_score'"):
            ClipScore(model_path=str(folders["clip"]), **fields)
    if not torch.cuda.is_available():
        reward = ClipScore(model_path=str(folders["clip"]), device="cuda:1")
        refusal(reward, "device cuda:1: torch finds 0 GPUs")
        assert ClipScore(model_path=str(folders["clip"]))._network().device.type == "cpu"


def test_similarity_without_a_source_image_names_the_prompt(folders):
    with pytest.raises(DataError, match="'a red cat'"):
        build("image_similarity", folders).score([Sample(image=images(1)[0], prompt="a red cat", group_id=0)])


def test_text_reward_of_an_image_names_the_prompt(folders):
    with pytest.raises(DataError, match="'a red cat'"):
        build("text_reward_model", folders).score(samples(1))


def test_a_reward_of_your_own_without_a_loader_is_refused_before_anything_is_loaded(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Mine(PretrainedReward):
        type: ClassVar[str] = "mine"

        def load(self, path, device, dtype):  # which was its name in an earlier version
            raise AssertionError

        def score_batch(self, network, samples):
            raise AssertionError

    with pytest.raises(ConfigError, match="Mine must set loader, the import path of the function"):
        Mine(model_path=str(tmp_path))
