"""Folders of published chat models in small: their special tokens by name and in order, their generation_config.json,
the structure of their chat templates; random weights of a tiny Llama or Qwen3."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

LLAMA = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GEMMA = """{{- bos_token }}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

GLM = """[gMASK]<sop>
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>Current date: ' + strftime_now("%Y-%m-%d") + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

PHI = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""


@dataclass(frozen=True)
class Published:
    """What a published model's folder says."""

    template: str
    trl_name: str
    """Of the same model's template in the package trl."""
    specials: tuple[str, ...]
    """In the order of their numbers."""
    ends: tuple[str, ...]
    """Of generation_config.json."""
    eos: str
    taught: str
    """What ends an answer."""
    bos: str | None = None
    pad: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    """What else generation_config.json says."""


FOLDERS = {
    "llama3_1": Published(
        LLAMA,
        "llama3_1",
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        eos="<|eot_id|>",
        taught="<|eot_id|>",
        bos="<|begin_of_text|>",
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "qwen3": Published(
        QWEN,
        "qwen3",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ends=("<|im_end|>", "<|endoftext|>"),
        eos="<|im_end|>",
        taught="<|im_end|>",
        pad="<|endoftext|>",
        generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    "gemma3": Published(
        GEMMA,
        "gemma3",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        ends=("<eos>", "<end_of_turn>"),
        eos="<eos>",
        taught="<end_of_turn>",
        bos="<bos>",
        pad="<pad>",
        generation={"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
    ),
    "glm4_5": Published(
        GLM,
        "glm4moe",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        eos="<|endoftext|>",
        taught="<|user|>",
        pad="<|endoftext|>",
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95},
    ),
    "gpt_oss": Published(
        GPT_OSS,
        "gptoss",
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        eos="<|return|>",
        taught="<|return|>",
        bos="<|startoftext|>",
        pad="<|endoftext|>",
        generation={"do_sample": True},
    ),
    "phi4_mini": Published(
        PHI,
        "phi3_5",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ends=("<|end|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        taught="<|end|>",
        pad="<|endoftext|>",
    ),
}


def published_templates() -> list[Path]:
    """Those of the package trl; skips where that is not installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the chat templates of the package trl")
    return sorted((Path(spec.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))


def published_template(name: str) -> str:
    """The published one of a model."""
    (path,) = (path for path in published_templates() if path.stem == FOLDERS[name].trl_name)
    return path.read_text(encoding="utf-8")


def build_tokenizer(name: str, template: str | None = None) -> Any:
    """The special tokens of a published tokenizer before the bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    about = FOLDERS[name]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*about.specials, *symbols])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(about.specials))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token=about.eos,
        bos_token=about.bos,
        pad_token=about.pad,
        additional_special_tokens=[
            special for special in about.specials if special not in (about.eos, about.bos, about.pad)
        ],
    )
    tokenizer.chat_template = template or about.template
    return tokenizer


def write_model_folder(name: str, folder: Path, template: str | None = None, filled_up: int = 0) -> Path:
    """A folder with random weights.

    Args:
        name: of ``FOLDERS``.
        folder: where to.
        template: instead of the short one.
        filled_up: rows of the embedding beyond the tokenizer's.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer, about = build_tokenizer(name, template), FOLDERS[name]
    ends = tokenizer.convert_tokens_to_ids(list(about.ends))
    config = Qwen3Config(
        vocab_size=len(tokenizer) + filled_up,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if name == "qwen3" else ends,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    said = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends, **about.generation}
    if about.pad is not None:
        said["pad_token_id"] = tokenizer.pad_token_id
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder
