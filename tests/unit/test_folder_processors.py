"""The processor of a model's folder: which class it is, and what of an image it has to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import is_torchvision_available

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.chat import build_chat_template
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.language.load import build_language_model
from sfumato.models.language.model_folder import save_tokenizer
from sfumato.models.language.parts import build_byte_tokenizer
from sfumato.models.language.vision_load import _processor_class, add_image_tokens, build_processor, build_vision
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import whole_weights
from tests.tiny_unified import tiny_seeing_config
from tests.tiny_vision import tiny_vision_description

AYA = (
    "<image>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "TILE_GLOBAL",
    *(f"TILE_{n}" for n in range(9)),
)


def tiny_config(kind: str, like: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of one kind with the parts of the description of another."""
    described = tiny_vision_description(like) | changes
    described.pop("model_type")
    described["text_config"] = described["text_config"] | {"vocab_size": 2000}
    return CONFIG_MAPPING[kind](**described)


def tokenizer_with(*tokens: str) -> PreTrainedTokenizerBase:
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *tokens]})
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


def vision_of(folder: Path, config: PreTrainedConfig, processor: Any) -> Any:
    processor.save_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    return build_vision(config, folder, module, processor.tokenizer)


def test_a_folder_names_the_class_of_its_processor_as_pixtral_12b_does_for_llava(tmp_path: Path) -> None:
    described = tiny_config("llava", "llava")
    assert _processor_class(described, tmp_path) is transformers.LlavaProcessor
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"processor_class": "LlavaOnevisionProcessor"}))
    assert _processor_class(described, tmp_path) is transformers.LlavaOnevisionProcessor
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"processor_class": "LlavaNextProcessor"}))
    assert _processor_class(described, tmp_path) is transformers.LlavaNextProcessor
    for other in ("OfItsOwnCode", "PreTrainedModel", 3):
        (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": other}))
        assert _processor_class(described, tmp_path) is transformers.LlavaNextProcessor
    (tmp_path / "processor_config.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"processor_config\.json: "):
        _processor_class(described, tmp_path)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"PixtralProcessor requires the Torchvision .*sfumato\[editing\]"):
        _processor_class(CONFIG_MAPPING["mistral3"](), tmp_path)


def test_tiles_are_counted_by_the_token_that_the_model_replaces(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(*AYA)
    token = tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>")
    config = tiny_config("aya_vision", "llava", image_token_index=token)
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
    )
    processor = transformers.AyaVisionProcessor(images, tokenizer, patch_size=4, img_size=16, downsample_factor=2)
    vision = vision_of(tmp_path, config, processor)
    texts, shapes = vision.reader.place([Image.new("RGB", (16, 16)), Image.new("RGB", (64, 16))])
    assert [text.count("<|IMG_PATCH|>") for text in texts] == [4 * tiles for tiles in shapes[:, 0]]
    assert shapes.tolist() == [[1, 4, 4], [5, 4, 4]]
    assert vision.reader.tokens_per_patch == 0.25


def test_only_tokens_that_the_model_replaces_stand_for_an_image_of_idefics3(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = tiny_config("idefics3", "idefics3", image_token_id=token)
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    vision = vision_of(tmp_path, config, transformers.Idefics3Processor(images, tokenizer, image_seq_len=4))
    (text,), shapes = vision.reader.place([Image.new("RGB", (64, 16))])
    input_ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert ((vision.reader.kinds(input_ids) == 1) == (input_ids == token)).all()
    assert (input_ids == token).sum() == 4 * shapes[0, 0] == 12


def paligemma(tokenizer: PreTrainedTokenizerBase) -> Any:
    images = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    return transformers.PaliGemmaProcessor(images, tokenizer)


def idefics2(tokenizer: PreTrainedTokenizerBase) -> Any:
    return transformers.Idefics2Processor(transformers.Idefics2ImageProcessorPil(), tokenizer, image_seq_len=4)


@pytest.mark.parametrize(
    ("kind", "build", "reason"),
    [
        ("paligemma", paligemma, "it gives labels, a value for each token"),
        ("idefics2", idefics2, "it does not say which tokens stand for it"),
    ],
)
def test_images_that_are_not_supported_are_refused_with_the_reason(
    kind: str, build: Callable[[PreTrainedTokenizerBase], Any], reason: str, tmp_path: Path
) -> None:
    processor = build(tokenizer_with("<image>"))
    config = CONFIG_MAPPING[kind](
        image_token_id=processor.image_token_id,
        text_config={"model_type": "gemma" if kind == "paligemma" else "mistral", "vocab_size": 2000},
    )
    with pytest.raises(ConfigError, match=rf"{reason}.*, or images of {kind} are not supported"):
        vision_of(tmp_path, config, processor)


def test_an_export_of_a_folder_with_its_settings_of_images_within_others_holds_them_once(tmp_path: Path) -> None:
    """Limits of the run stood in one of two files, of which transformers 5 reads one and other programs the other."""
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 2048})
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = tokenizer_with(*named.values())
    tokenizer.save_pretrained(tmp_path)
    settings = {"image_processor": json.loads(images.to_json_string()), "processor_class": "Qwen2VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    config = tiny_config("qwen2_vl", "qwen2_vl", image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(config)
    reader = build_vision(config, tmp_path, module, tokenizer).reader.limited(None, 512)
    (tmp_path / "export").mkdir()
    reader.save(tmp_path / "export", tmp_path)
    for file in ("preprocessor_config.json", "processor_config.json"):
        saved = json.loads((tmp_path / "export" / file).read_text())
        assert saved.get("image_processor", saved)["size"] == {"shortest_edge": 64, "longest_edge": 2048}, file


@pytest.mark.parametrize("is_described", [True, False])
def test_an_export_has_the_chat_template_of_the_run_alone(is_described: bool, tmp_path: Path) -> None:
    described = tiny_config("internvl", "internvl", image_token_id=261)
    tokenizer = build_byte_tokenizer()
    add_image_tokens(tokenizer, described)
    reader = MediaProcessor(build_processor(described, None, tokenizer), (), (4, 1.0))
    source = None if is_described else tmp_path / "source"
    if source is not None:  # as processors wrote it for a while
        source.mkdir()
        (source / "processor_config.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    tokenizer.chat_template = "{# of the run #}" + str(tokenizer.chat_template)
    (tmp_path / "out").mkdir()
    reader.save(tmp_path / "out", source)
    save_tokenizer(tokenizer, tmp_path / "out")
    read = transformers.InternVLProcessor.get_processor_dict(tmp_path / "out")[0]
    assert read["chat_template"] == tokenizer.chat_template
    kept = json.loads((tmp_path / "out/processor_config.json").read_text())
    assert ("chat_template" in kept) == (not is_described)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"patch_size": 8}, "patch_size of images is 8 .* patch_size of the encoder is 4"),
        ({"temporal_patch_size": 1}, "temporal_patch_size of images is 1"),
        ({"merge_size": 4}, "merge_size of images is 4 .* spatial_merge_size of the encoder is 2"),
    ],
)
def test_patches_of_another_models_processor_are_refused(setting: dict[str, int], named: str, tmp_path: Path) -> None:
    described = tiny_config("qwen2_5_vl", "qwen2_5_vl")
    tokenizer = build_byte_tokenizer()
    add_image_tokens(tokenizer, described)
    processor = build_processor(described, None, tokenizer)
    for name, value in setting.items():
        setattr(processor.image_processor, name, value)
    processor.image_processor.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = AutoModelForImageTextToText.from_config(described)
    with pytest.raises(ConfigError, match=f"{named}.* not of one model"):
        build_vision(described, tmp_path, module, tokenizer)


@pytest.mark.parametrize(("kind", "name"), [("internvl", "start_image_token"), ("gemma3", "boi_token")])
def test_exports_name_the_tokens_that_processors_ask_for(kind: str, name: str, tmp_path: Path) -> None:
    described = tiny_config(kind, kind)
    tokenizer = build_byte_tokenizer()
    add_image_tokens(tokenizer, described)
    save_tokenizer(tokenizer, tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    token = getattr(tokenizer, name)
    assert (getattr(read, name), getattr(read, f"{name}_id")) == (token, tokenizer.convert_tokens_to_ids(token))
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())["extra_special_tokens"]
    assert named[name] == token  # where transformers 4 looks for it


def test_an_export_of_emu3_has_the_chat_template_of_the_run(tmp_path: Path) -> None:
    config = load_config(TrainTextConfig, overrides=tiny_seeing_config(tmp_path, "emu3"))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    template = str(model.hf_tokenizer.chat_template)
    chat = build_chat_template(None, model.tokenizer)
    assert chat.text == "{{- bos_token }}" + template  # its processor adds the token, too
    chat.adopt()
    model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    model.save_export(tmp_path / "out", whole_weights(model.trained, model.mesh))
    assert (tmp_path / "out/chat_template.jinja").read_text(encoding="utf-8") == template


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content[0].text }}</s>{% endfor %}", None])
def test_chats_begin_as_the_processor_begins_them(template: str | None, tmp_path: Path) -> None:
    """Templates of LLaVA leave the token that begins a text to the tokenizer, which their processors let add it."""
    tokenizer = tokenizer_with("<s>", "</s>", "<image>")
    tokenizer.bos_token = "<s>"
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer._tokenizer.post_processor = begin
    tokenizer.chat_template = (
        template or "{{ bos_token }}{% for m in messages %}{{ m.content[0].text }}</s>{% endfor %}"
    )
    config = tiny_config("llava", "llava", image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    settings = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = transformers.LlavaProcessor(images, tokenizer, **settings, chat_template=tokenizer.chat_template)
    vision_of(tmp_path, config, processor)
    messages = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    expected = processor.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"][0]
    chat = build_chat_template(None, tokenizer)
    text = chat.render(messages, "row", prompt=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    chat.adopt()
    assert ("bos_token" in str(tokenizer.chat_template)) == (template is None)
