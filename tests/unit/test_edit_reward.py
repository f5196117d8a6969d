"""EditReward on a tiny model: the published inference in a plain loop, folders and samples that do not fit."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.edit_reward import EditReward
from tests import tiny_reward_models as tiny

PROMPTS = ["make it red", "add a blue dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_edit_reward(tmp_path_factory.mktemp("edit_reward") / "model")


def build(folder):
    return EditReward(model_path=str(folder), device="cpu", dtype="fp32")


def samples():
    rng = np.random.default_rng(0)
    shapes = [(40, 56), (32, 32), (64, 33), (20, 90)]
    small = [Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)) for _ in shapes]
    images = [np.array(image.resize(shape[::-1])) for image, shape in zip(small, shapes, strict=True)]
    return [
        Sample(image=images[number], source=images[number + 2], prompt=PROMPTS[number], group_id=0)
        for number in range(2)
    ]


def published_scores(folder):
    """One sample and one head at a time, with transformers' own model of the conversation, its source image first."""
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    config.text_config.vocab_size = len(tokenizer)
    model = Qwen2_5_VLModel(config).eval()
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name[6:]: tensor for name, tensor in weights.items() if name.startswith("model.")})
    scores = []
    for sample in samples():
        ratings = []
        for number, question in enumerate(tiny.EDIT_INSTRUCTIONS.values()):
            # both at about 448 x 448 pixels
            images = [Image.fromarray(picture) for picture in (sample.source, sample.image)]
            pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 200704, "longest_edge": 200704})(
                images, return_tensors="pt"
            )
            seen = "".join(
                f"<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
                for grid in pixels.image_grid_thw
            )
            text = f"<|im_start|>user\n{seen}{question.format(text_prompt=sample.prompt)}<|im_end|>\n"
            token_ids = torch.tensor([tokenizer(f"{text}<|im_start|>assistant\n").input_ids])
            with torch.no_grad():
                features = model.visual(pixels.pixel_values, grid_thw=pixels.image_grid_thw).pooler_output
                embeddings = model.get_input_embeddings()(token_ids)
                embeddings[token_ids == config.image_token_id] = features
                positions = torch.arange(token_ids.shape[1]).expand(3, 1, -1)
                hidden = model.language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
                hidden = hidden[0, token_ids[0].tolist().index(len(tokenizer) - 1)]
                for layer in (0, 3, 5):
                    name = f"rm_heads.head_{number}.{layer}"
                    hidden = weights[f"{name}.weight"] @ hidden + weights[f"{name}.bias"]
                    hidden = hidden.relu() if layer < 5 else hidden
            ratings.append(hidden[0].item())
        scores.append(sum(ratings) / 2)
    return scores


def test_scores_are_those_of_the_published_inference(folder):
    expected = published_scores(folder)
    assert abs(expected[0] - expected[1]) > 1e-3
    np.testing.assert_allclose(build(folder).score(samples()), expected, rtol=1e-4, atol=1e-5)
    exchanged = [
        Sample(image=sample.source, source=sample.image, prompt=sample.prompt, group_id=0) for sample in samples()
    ]
    assert not np.allclose(build(folder).score(exchanged), expected, rtol=1e-4)


def test_samples_that_do_not_fit_are_named(folder):
    with pytest.raises(DataError, match="'make it red' has none: it is for editing"):
        build(folder).score([Sample(image=samples()[0].image, prompt="make it red", group_id=0)])
    with pytest.raises(DataError, match=r"take <\|Reward\|> out"):
        build(folder).check_row("a <|Reward|>", {})


def test_folders_that_do_not_fit_are_named(tmp_path, folder):
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "chat_template.jinja").write_text(tiny.CHAT)
    with pytest.raises(ConfigError, match="no chat template that takes images"):
        build(copied).prepare()
    (copied / "chat_template.jinja").write_text(tiny.EDIT_CHAT)
    weights = load_file(copied / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "head_1.5.bias" not in name}, copied / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"missing keys: head_1\.5\.bias"):
        build(copied).prepare()
    (copied / "quality.txt").unlink()
    with pytest.raises(ConfigError, match=r"has no quality\.txt"):
        build(copied).prepare()
    with pytest.raises(ConfigError, match="of type 'qwen2_vl', but this reward needs qwen2_5_vl"):
        build(tiny.write_hpsv3(tmp_path / "hpsv3")).prepare()
