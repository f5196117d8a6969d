"""Folders of tiny reward models of the real classes, with the files and the names of weights that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken

from sfumato.models.diffusion.scratch import build_clip_tokenizer
from tests.tiny_tokenizers import build_tokenizer

INSTRUCTION = "\nRate the image. \nTextual prompt - {text_prompt}\n\n\n\nPlease rate: <|Reward|>\n\nEND\n"
VIDEO_INSTRUCTION = (
    "\nRate the video.\nLooks: <|VQ_reward|>\nEND\nMotion: <|MQ_reward|>\nEND\nPrompt - {text_prompt}\n"
    "Likeness: <|TA_reward|>\nEND\n"
)
VIDEO_SETTINGS: dict[str, Any] = {
    "data_config": {
        "fps": 2.0, "max_frame_pixels": 200704, "num_frames": None, "sample_type": "uniform",
        "prompt_template_type": "detailed_special", "eval_dim": ["VQ", "MQ", "TA"],
    },
    "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special"},
    "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False},
    "inference_config": {
        "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121,
    },
}  # fmt: skip
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def seeded_weights(shapes: dict[str, tuple[int, ...]], std: float = 0.3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal weights; those of norms lie around one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * std + float("norm" in name.lower() and name.endswith("weight"))
        for name, shape in shapes.items()
    }


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Gives every weight a value that matters; new models have zeros and ones in places."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


def write_clip(folder: Path, seed: int = 0) -> Path:
    """A CLIP model for 32x32 pixels with tokenizer and image processor."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    tokenizer = build_clip_tokenizer(("red", "blue"), max_length=12)
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 12, "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id, "hidden_act": "gelu",
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8, "hidden_act": "gelu",
        },
        projection_dim=8,
    )  # fmt: skip
    return _save(folder, CLIPModel(config), seed, tokenizer, _processor(CLIPImageProcessorPil))


def write_siglip(folder: Path) -> Path:
    """A SigLIP model for 32x32 pixels, images only."""
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config={**small, "vocab_size": 8, "max_position_embeddings": 8},
        vision_config={**small, "image_size": 32, "patch_size": 8},
    )
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    return _save(folder, SiglipModel(config), 1, processor)


def write_image_classifier(folder: Path) -> Path:
    """A ViT for 32x32 pixels that tells normal from nsfw."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**small, image_size=32, patch_size=8, id2label={0: "normal", 1: "NSFW"})
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    return _save(folder, ViTForImageClassification(config), 1, processor)


def write_dinov2(folder: Path) -> Path:
    """A DINOv2 model for 32x32 pixels."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=32, patch_size=8
    )
    return _save(folder, Dinov2Model(config), 2, _processor(BitImageProcessorPil))


def head_shapes(num_features: int) -> dict[str, tuple[int, ...]]:
    """Weights of the head that the aesthetic predictor and ImageReward have."""
    widths = (num_features, 1024, 128, 64, 16, 1)
    shapes: dict[str, tuple[int, ...]] = {}
    for place, inputs, outputs in zip((0, 2, 4, 6, 7), widths[:-1], widths[1:], strict=True):
        shapes |= {f"layers.{place}.weight": (outputs, inputs), f"layers.{place}.bias": (outputs,)}
    return shapes


def write_aesthetic(folder: Path) -> Path:
    """A CLIP model with a head beside it."""
    write_clip(folder, seed=3)
    save_file(seeded_weights(head_shapes(8), std=0.1), folder / "aesthetic.safetensors")
    return folder


def image_reward_weights(vision: int = 64, text: int = 32, num_words: int = 40) -> dict[str, torch.Tensor]:
    """ImageReward's weights under their published names: two layers each, 32x32 pixels in patches of 16."""
    shapes: dict[str, tuple[int, ...]] = {
        "visual_encoder.cls_token": (1, 1, vision),
        "visual_encoder.pos_embed": (1, 5, vision),
        "visual_encoder.patch_embed.proj.weight": (vision, 3, 16, 16),
        "visual_encoder.patch_embed.proj.bias": (vision,),
        **_norm("visual_encoder.norm", vision),
        "vision_proj.weight": (256, vision),
        "vision_proj.bias": (256,),
        "text_proj.weight": (256, text),
        "text_proj.bias": (256,),
        "text_encoder.embeddings.word_embeddings.weight": (num_words, text),
        "text_encoder.embeddings.position_embeddings.weight": (64, text),
        **_norm("text_encoder.embeddings.LayerNorm", text),
    }
    for layer in range(2):
        block = f"visual_encoder.blocks.{layer}"
        shapes |= _norm(f"{block}.norm1", vision) | _norm(f"{block}.norm2", vision)
        shapes |= _linear(f"{block}.attn.qkv", vision, 3 * vision) | _linear(f"{block}.attn.proj", vision, vision)
        shapes |= _linear(f"{block}.mlp.fc1", vision, 4 * vision) | _linear(f"{block}.mlp.fc2", 4 * vision, vision)
        block = f"text_encoder.encoder.layer.{layer}"
        for kind, width in (("attention", text), ("crossattention", vision)):
            shapes |= _linear(f"{block}.{kind}.self.query", text, text)
            shapes |= _linear(f"{block}.{kind}.self.key", width, text)
            shapes |= _linear(f"{block}.{kind}.self.value", width, text)
            shapes |= _linear(f"{block}.{kind}.output.dense", text, text)
            shapes |= _norm(f"{block}.{kind}.output.LayerNorm", text)
        shapes |= _linear(f"{block}.intermediate.dense", text, 2 * text)
        shapes |= _linear(f"{block}.output.dense", 2 * text, text)
        shapes |= _norm(f"{block}.output.LayerNorm", text)
    weights = {f"blip.{name}": tensor for name, tensor in seeded_weights(shapes, std=0.15).items()}
    head = seeded_weights(head_shapes(text), std=0.1, seed=1)
    return weights | {f"mlp.{name}": tensor for name, tensor in head.items()}


def write_image_reward(folder: Path) -> Path:
    """ImageReward with its published names of files and weights."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "cat", "dog"]
    folder.mkdir(parents=True)
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    weights = image_reward_weights()
    save_file(weights, folder / "ImageReward.safetensors")
    described = {
        "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 64, "model_type": "bert", "num_attention_heads": 2,
        "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 40, "encoder_width": 768,
        "add_cross_attention": True,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(described))
    return folder


def write_hpsv3(folder: Path) -> Path:
    """Qwen2-VL with HPSv3's head, under the names that its published file has; the tokenizer lacks the reward token."""
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLModel

    tokenizer, config = _qwen2_vl_parts(num_reward_tokens=1)
    model = Qwen2VLModel(config)
    randomise(model)
    published = {
        (name if name.startswith("visual.") else f"model.{name.removeprefix('language_model.')}"): tensor
        for name, tensor in model.state_dict().items()
    }
    shapes = {**_linear("0", 32, 1024), **_linear("3", 1024, 16), **_linear("5", 16, 2)}
    head = {f"rm_head.{name}": tensor for name, tensor in seeded_weights(shapes, std=0.1).items()}
    folder.mkdir(parents=True)
    save_file({**published, **head, "lm_head.weight": torch.zeros(4, 32)}, folder / "HPSv3.safetensors")
    config.text_config.vocab_size = len(tokenizer)  # the folder of the base model does not know the reward token
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    (folder / "instruction.txt").write_bytes(INSTRUCTION.encode())
    return folder


def build_video_reward() -> Any:
    """Qwen2-VL with VideoReward's head and an adapter on its language model, by peft as published."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2VLForConditionalGeneration

    _, config = _qwen2_vl_parts(num_reward_tokens=3)
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config)
    model.rm_head = torch.nn.Linear(32, 1, bias=False)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "language_model" in name
    ]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    randomise(model)
    return model.eval()


def write_video_reward(folder: Path, form: str = "whole") -> Path:
    """VideoReward under its published names: ``whole`` as in model.pth, or as an ``adapter`` beside the base model."""
    from transformers import Qwen2VLImageProcessorPil

    tokenizer, config = _qwen2_vl_parts(num_reward_tokens=3)
    published = {
        name.replace("model.model.language_model.", "model.model.").replace("model.model.visual.", "model.visual."): (
            tensor.clone()
        )
        for name, tensor in build_video_reward().state_dict().items()
    }
    folder.mkdir(parents=True)
    if form == "whole":
        save_file(published, folder / "VideoReward.safetensors")
    else:
        adapter = {name.replace(".default.", "."): value for name, value in published.items() if ".lora_" in name}
        trained = {name: value for name, value in published.items() if "rm_head" in name or "visual.merger" in name}
        base = {
            name.removeprefix("base_model.model.").replace(".base_layer.", "."): value
            for name, value in published.items()
            if ".lora_" not in name and "rm_head" not in name
        }
        base = {name: torch.zeros_like(value) if "visual.merger" in name else value for name, value in base.items()}
        save_file(base, folder / "model.safetensors")
        save_file(trained, folder / "non_lora_state_dict.safetensors")
        save_file(adapter, folder / "adapter_model.safetensors")
    config.text_config.vocab_size = len(tokenizer)  # the folder of the base model does not know the reward tokens
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    (folder / "instruction.txt").write_bytes(VIDEO_INSTRUCTION.encode())
    (folder / "model_config.json").write_text(json.dumps(VIDEO_SETTINGS))
    return folder


def _qwen2_vl_parts(num_reward_tokens: int) -> tuple[Any, Any]:
    """A tokenizer without the reward's tokens, and the configuration of a model that has them."""
    from transformers import Qwen2VLConfig

    tokenizer = build_tokenizer("qwen", pad_token="<|endoftext|>")
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"][: 3 + (num_reward_tokens > 1)]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    start, end, *pads = tokenizer.convert_tokens_to_ids(marks)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + num_reward_tokens, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
        vision_start_token_id=start, vision_end_token_id=end,
        **dict(zip(("image_token_id", "video_token_id"), pads, strict=False)),
    )  # fmt: skip
    return tokenizer, config


EDIT_INSTRUCTIONS = {
    "following.txt": "Was it done?\nInstruction - {text_prompt}\nNow: <|Reward|>\nEND\n",
    "quality.txt": "Is it nice?\nInstruction - {text_prompt}\nNow: <|Reward|>\nEND\n",
}
EDIT_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_edit_reward(folder: Path) -> Path:
    """Qwen2.5-VL with EditReward's two heads, under the names of transformers 4.56."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLImageProcessorPil

    tokenizer, base = _qwen2_vl_parts(num_reward_tokens=1)
    config = Qwen2_5_VLConfig(
        text_config=base.text_config.to_dict() | {"model_type": "qwen2_5_vl_text"},
        vision_config={
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
            "window_size": 112, "fullatt_block_indexes": [1],
        },
        image_token_id=base.image_token_id, vision_start_token_id=base.vision_start_token_id,
        vision_end_token_id=base.vision_end_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLModel(config)
    randomise(model)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    shapes = {**_linear("0", 32, 1024), **_linear("3", 1024, 16), **_linear("5", 16, 2)}
    for number in range(2):
        head = seeded_weights(shapes, std=0.1, seed=number)
        weights |= {f"rm_heads.head_{number}.{name}": tensor for name, tensor in head.items()}
    folder.mkdir(parents=True)
    save_file({**weights, "lm_head.weight": torch.zeros(4, 32)}, folder / "model.safetensors")
    config.text_config.vocab_size = len(tokenizer)
    config.save_pretrained(folder)
    tokenizer.chat_template = EDIT_CHAT
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    for name, text in EDIT_INSTRUCTIONS.items():
        (folder / name).write_text(text)
    return folder


def write_text_reward_model(folder: Path, **changes: Any) -> Path:
    """A Qwen2 classifier with one output and a chat template."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = build_tokenizer(pad_token="<|endoftext|>", chat_template=CHAT)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    return _save(folder, Qwen2ForSequenceClassification(Qwen2Config(**{**settings, **changes})), 4, tokenizer)


def _processor(processor_class: Any) -> Any:
    return processor_class(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _save(folder: Path, model: torch.nn.Module, seed: int, *others: Any) -> Path:
    randomise(model, seed)
    for part in (model, *others):
        part.save_pretrained(folder)
    return folder


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
