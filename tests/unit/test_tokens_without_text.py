"""What a model may draw and nobody can read: placeholders of images, and numbers beyond the tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.loader import open_text_data
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.language.load import build_language_model
from sfumato.models.language.probe import probe
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.debug.dumps import read_dump
from sfumato.rollout.kinds.base import DrawnText
from sfumato.rollout.text.greedy import answer_greedily
from sfumato.rollout.text.policy import build_text_template, open_prompts, stop_tokens
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import (
    load_task,
    run_task_here,
    tiny_language_description,
    tiny_text_config,
    tiny_text_rl_config,
    write_config,
)
from tests.tiny_vision import tiny_vision_config
from tests.token_batches import single_turn

ALONE = Mesh(Layout(), torch.device("cpu"))
VISION_START, IMAGE, VIDEO = 259, 261, 262


def prefer(model: Any, token: int) -> Any:
    """Has the output layer take one token for the likeliest."""

    def raise_logit(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1000.0 * (torch.arange(logits.shape[-1]) == token)

    return model.module.get_output_embeddings().register_forward_hook(raise_logit)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("token", [VISION_START, IMAGE, VIDEO])
def test_a_placeholder_ends_a_greedy_answer_of_a_model_that_sees(tmp_path: Path, kind: str, token: int) -> None:
    config = load_config(TrainTextConfig, overrides=tiny_vision_config(tmp_path, kind))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    flops = FlopCount(model.module, model.vision)
    data = open_text_data(config, model.tokenizer, ALONE, print, None, flops.count_document, flops.sight)
    model.parallelize(ALONE, config.train)
    probe(model, config.model, config.train, config.data.max_seq_len, print)
    validation = data.validation
    assert any(prompt.images is not None for prompt in validation.prompts)
    handle = prefer(model, token)
    records = load_task("train_text").answer_prompts(model, validation, config, 0)
    handle.remove()
    assert [record.total for record in records] == [0.0] * len(validation.prompts)
    inputs, images = (
        [prompt.input_ids for prompt in validation.prompts],
        [prompt.images for prompt in validation.prompts],
    )
    handle = prefer(model, token)
    length = 1 if token in model.vision.reader.media_tokens() else 5  # some models find images by what begins one
    assert answer_greedily(model, inputs, 5, (), images) == [[token] * length] * len(inputs)
    assert length == 1 or token == VISION_START
    handle.remove()


def larger(tmp_path: Path, size: int) -> str:
    """A description whose embedding has more rows than the tokenizer of bytes has tokens."""
    described = tiny_language_description() | {"vocab_size": size}
    return str(write_config(described, tmp_path / "larger.yaml"))


def test_a_greedy_answer_ends_where_the_tokenizer_has_no_token(tmp_path: Path) -> None:
    config = tiny_text_config(tmp_path)
    config["model"]["config_path"] = larger(tmp_path, 272)
    config = load_config(TrainTextConfig, overrides=config)
    model = build_language_model(config.model, config.train)
    model.parallelize(ALONE, config.train)
    prefer(model, 270)
    assert answer_greedily(model, [[5, 9], [7]], 5, (2,)) == [[270], [270]]


def test_what_is_drawn_beyond_the_tokenizer_has_no_reward_and_is_not_learned(tmp_path: Path) -> None:
    config = tiny_text_rl_config(tmp_path, data={"synthetic": {"num_rows": 400}}, rollout={"dump": True})
    config["train"]["max_steps"] = 2
    config["model"]["config_path"] = larger(tmp_path, 270)
    config["reward"]["max_failed_fraction"] = 1.0
    run, strange = run_task_here("rl_text", config), 0
    for path in sorted((run / "rollouts").rglob("*rank0*")):
        dump = read_dump(path)
        for row, (sequence,) in enumerate(dump.rollout.sequences):
            drawn = sequence.token_ids[sequence.drawn]
            assert (drawn[:-1] < 259).all(), "such a token is the last"
            is_strange = bool(drawn[-1] >= 259)
            values = [float(component[row]) for component in dump.advantages.components.values()]
            assert np.isnan(values).all() == is_strange
            assert (float(dump.advantages.values[row]) == 0.0) or not is_strange
            strange += is_strange
    assert strange
    assert (
        "it drew the token" in (run / "log.txt").read_text()
        and "which the tokenizer has not" in (run / "log.txt").read_text()
    )
    assert all(np.isfinite(line["loss/policy"]) for line in read_jsonl(run / "metrics.jsonl") if "loss/policy" in line)


def test_drawing_stops_at_them_whatever_the_engine(tmp_path: Path) -> None:
    config = tiny_text_rl_config(tmp_path)
    config["model"]["config_path"] = larger(tmp_path, 262)
    loaded = load_config(TextRLConfig, overrides=config)
    template, _, _ = open_prompts(loaded, lambda text: None)
    assert stop_tokens(template) == (0, 2, 259, 260, 261)
    exact = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path))
    assert stop_tokens(build_text_template(exact, template.tokenizer, None)) == (0, 2)


def test_a_sample_that_is_damaged_says_why() -> None:
    drawn = DrawnText([single_turn([1], [5, 300], [-1.0, -1.0], [0, 0], "stop")], "a")
    assert (
        drawn.mark_unknown_tokens(frozenset({300, 301})).damage == "it drew the token 300, which the tokenizer has not"
    )
    assert drawn.mark_unknown_tokens(frozenset({301})) is drawn
    prompt = DrawnText([single_turn([300], [5], [-1.0], [0], "stop")], "a")
    assert prompt.mark_unknown_tokens(frozenset({300})) is prompt, "what it was given is not drawn"
