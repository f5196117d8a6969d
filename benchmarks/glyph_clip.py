"""A tiny CLIP model that reads the quickstart's words, made in code: a reward with a gradient for small experiments.

    python benchmarks/glyph_clip.py runs/quickstart/clip [--steps 1200]

It learns pictures of training words with captions: ``write "ABC"`` and ``Sharp. write "ABC"`` for a clean picture,
``Blurred. write "ABC"`` for a spoilt one, which is blurred, mixed with another word and noisy. All words of a batch are
made of few letters, so that each has neighbours that differ in one. Held-out words are never shown. Writes a folder
that ``clip_score`` reads, and prints which share of held-out words it tells from all words that differ in one letter.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path

import torch
from torch.nn.functional import conv2d, cross_entropy, normalize, pad
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.sections import GlyphConfig
from sfumato.data.synthetic.glyphs import caption_of, default_font, held_out_words, is_held_out, render_word
from sfumato.models.diffusion.scratch import build_clip_tokenizer
from sfumato.rewards.networks.embedder import PIXEL_MEAN, PIXEL_STD

GLYPHS = GlyphConfig(font_sizes=[13, 14], jitter=1)
"""As in the configurations of the quickstart."""
SIDE = 32
LETTERS = 4
"""Letters of a batch at each of the three places."""
LENGTH = 12
"""Tokens of a caption, start and end included."""


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = build_clip_tokenizer(("write", "sharp", "blurred"), max_length=LENGTH)
    model = CLIPModel(describe_model(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=options.steps, pct_start=0.1)
    started = time.perf_counter()
    for step in range(options.steps):
        images, captions = make_batch(step)
        image_embeddings = embed_images(model, images)
        text_embeddings = embed_texts(model, tokenizer, captions)
        logits = model.logit_scale.exp() * image_embeddings @ text_embeddings.T
        rows = torch.arange(len(logits))
        loss = (cross_entropy(logits, rows) + cross_entropy(logits.T, rows)) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        if step % 50 == 49:
            print(f"step {step + 1}  loss {loss:.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    print(f"held-out words told from all neighbours: {share_of_words_told(model, tokenizer):.3f}")
    options.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    sides = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size=sides, crop_size=sides).save_pretrained(options.folder)


def describe_model(tokenizer: object) -> CLIPConfig:
    """Of 0.6 M parameters."""
    text = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return CLIPConfig(
        text_config={**text, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": LENGTH},
        vision_config={**vision, "image_size": SIDE, "patch_size": 8},
        projection_dim=64,
    )


def make_batch(step: int) -> tuple[torch.Tensor, list[str]]:
    """Clean and spoilt pictures of words with their captions: float32 ``[B, 3, 32, 32]`` from 0 to 1, and B texts."""
    generator = keyed_generator(0, "glyph clip", step)
    letters = [
        [GLYPHS.characters[place] for place in torch.randperm(len(GLYPHS.characters), generator=generator)[:LETTERS]]
        for _ in range(GLYPHS.length)
    ]
    words = [word for word in map("".join, itertools.product(*letters)) if not is_held_out(word, GLYPHS)]
    clean = render_words(words, generator)
    others = clean[torch.randperm(len(words), generator=generator)]
    strength = torch.rand(3, generator=generator).tolist()
    spoilt = clean.lerp(others, 0.5 * strength[0])
    spoilt = blur(spoilt, 0.6 + strength[1])
    images = torch.cat([clean, spoilt])
    images = images + 0.15 * strength[2] * torch.randn(images.shape, generator=generator)
    captions = [caption_of(word, GLYPHS) for word in words]
    is_plain = torch.rand(len(words), generator=generator) < 0.5
    of_clean = [caption if plain else f"Sharp. {caption}" for caption, plain in zip(captions, is_plain, strict=True)]
    return images.clamp(0, 1), of_clean + [f"Blurred. {caption}" for caption in captions]


def blur(images: torch.Tensor, width: float) -> torch.Tensor:
    """Pictures ``[B, 3, H, W]`` after a Gaussian of ``width`` pixels, cut off after two pixels."""
    kernel = torch.exp(-(torch.arange(-2, 3) ** 2) / (2 * width**2))
    kernel = torch.outer(kernel, kernel) / kernel.sum() ** 2
    return conv2d(pad(images, (2, 2, 2, 2), mode="replicate"), kernel.expand(3, 1, 5, 5), groups=3)


def render_words(words: list[str], generator: torch.Generator) -> torch.Tensor:
    """Pictures in sizes and places as the quickstart's, float32 ``[B, 3, 32, 32]`` from 0 to 1."""
    sizes = torch.randint(len(GLYPHS.font_sizes), (len(words),), generator=generator).tolist()
    shifts = torch.randint(-GLYPHS.jitter, GLYPHS.jitter + 1, (len(words), 2), generator=generator).tolist()
    pictures = [
        render_word(word, default_font(GLYPHS.font_sizes[size]), SIDE, SIDE, shift)
        for word, size, shift in zip(words, sizes, shifts, strict=True)
    ]
    return torch.stack(pictures).float() / 255


def embed_images(model: CLIPModel, images: torch.Tensor) -> torch.Tensor:
    """Of pictures ``[B, 3, 32, 32]`` from 0 to 1, float32 ``[B, 64]`` of length 1."""
    mean, std = torch.tensor([PIXEL_MEAN, PIXEL_STD])[:, :, None, None]
    return normalize(model.get_image_features(pixel_values=(images - mean) / std).pooler_output, dim=-1)  # pyright: ignore[reportAttributeAccessIssue]


def embed_texts(model: CLIPModel, tokenizer: object, texts: list[str]) -> torch.Tensor:
    """Float32 ``[B, 64]`` of length 1, padded as ``clip_score`` pads them."""
    assert callable(tokenizer)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    features = model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)  # pyright: ignore[reportAttributeAccessIssue]
    return normalize(features.pooler_output, dim=-1)  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def share_of_words_told(model: CLIPModel, tokenizer: object, num_words: int = 64) -> float:
    """Share of held-out words whose picture is nearer to their caption than to those of all 75 words one letter off."""
    words = held_out_words(GLYPHS, num_words)
    images = embed_images(model, render_words(words, keyed_generator(0, "held-out pictures")))
    told = 0
    for image, word in zip(images, words, strict=True):
        neighbours = [
            word[:place] + letter + word[place + 1 :]
            for place in range(len(word))
            for letter in GLYPHS.characters
            if letter != word[place]
        ]
        texts = embed_texts(model, tokenizer, [caption_of(text, GLYPHS) for text in [word, *neighbours]])
        told += int((texts @ image).argmax()) == 0
    return told / num_words


if __name__ == "__main__":
    main()
