"""Reinforcement learning with images in the prompts: tasks/rl_text.py with a model that sees."""

from __future__ import annotations

import asyncio
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.config.load import load_config, merge
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.document_media import images_of
from sfumato.data.text.prompt_formats.images import ImagePrompts
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.probe import probe
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.debug.dumps import dump_path, read_dump
from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.embedded.engine import EmbeddedEngine
from sfumato.rollout.engines.embedded.rows import CachedRows, RecomputedRows
from sfumato.rollout.engines.served.http_server import NOT_SENT
from sfumato.rollout.engines.served.vllm_images import RenderedImages, token_runs
from sfumato.rollout.text.packing import pack_samples
from sfumato.rollout.text.policy import build_text_policy, open_prompts
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here
from tests.tiny_vision import picture
from tests.tiny_vision_rl import tiny_vision_rl_config
from tests.token_batches import single_turn

SLOW_KINDS = ("qwen2_vl", "qwen2_5_vl", "internvl", "gemma3", "qwen3_5", "qwen3_5_moe", "glm4v", "gemma4")
SLOW_KINDS += ("llava", "llava_next", "smolvlm", "llava_onevision", "qwen3_vl_moe")
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS]
IMAGE_TOKEN = 261


def values(folder: Path, name: str) -> list[float]:
    """A metric by step."""
    return [line[name] for line in read_jsonl(folder / "metrics.jsonl") if name in line]


def loaded(tmp_path: Path, kind: str = "qwen3_vl", **overrides: Any) -> tuple[Any, list[TextPrompt]]:
    """A policy in one process, and the prompts of its run."""
    config = load_config(TextRLConfig, overrides=tiny_vision_rl_config(tmp_path, kind, **overrides))
    _, prompts, _ = open_prompts(config, print)
    model, _ = build_text_policy(config)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    probe(model, config.model, config.train, config.max_seq_len, print)
    return model, prompts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations that keeps what it drew."""
    settings = {"rollout": {"dump": True}, "train": {"max_steps": 2, "lr": 0.01}}
    config = tiny_vision_rl_config(tmp_path_factory.mktemp("rl"), **settings)
    return run_task_here("rl_text", config, with_report=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[TextPrompt]]:
    """A policy whose weights stay as they are, and the prompts of its run."""
    return loaded(tmp_path_factory.mktemp("seen"))


def by_transformers(model: Any, sequence: TokenSequence) -> torch.Tensor:
    """Log-probabilities of the drawn tokens by transformers' own module, alone, which counts positions itself."""
    tokens, before = torch.from_numpy(sequence.token_ids.astype(np.int64))[None], sequence.token_ids[:-1]
    inputs = model.single_document_inputs(before, sequence.images)
    plain = copy.deepcopy(model.plain).eval()
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        logits = plain(input_ids=tokens[:, :-1], use_cache=False, **inputs).logits[0]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return log_probs[torch.from_numpy(sequence.drawn[1:])]


def draw(model: Any, prompts: list[TextPrompt], most: int = 9, **settings: Any) -> list[TokenSequence]:
    """Three answers to each prompt by the embedded engine."""
    engine = EmbeddedEngine(model.module, vision=model.vision, **settings)
    asked = [prompt for prompt in prompts for _ in range(3)]
    requests = [
        GenerationRequest(sequence.token_ids, seed, most, images=sequence.images) for seed, sequence in enumerate(asked)
    ]
    stop = tuple(model.vision.reader.media_tokens())
    result = complete_requests(engine, requests, Sampling(stop_token_ids=stop))
    assert isinstance(engine._rows, CachedRows if model.row_layout.rows == "packed" else RecomputedRows | CachedRows)
    return [
        TokenSequence(**vars(single_turn(prompt.token_ids, *parts)) | {"images": prompt.images})
        for prompt, output in zip(asked, result, strict=True)
        for parts in [(output.token_ids, output.log_probs, output.versions, output.finish_reason)]
    ]


@pytest.mark.parametrize("kind", ["qwen3_vl", *SLOW_KINDS])
def test_drawn_tokens_have_the_log_probs_of_transformers(kind: str, tmp_path: Path) -> None:
    model, prompts = loaded(tmp_path, kind)
    assert [prompt.images is None for prompt in prompts[:3]] == [True, False, False]
    for number in range(2):
        drawn = draw(model, prompts[:6], max_batch_size=5)
        for sequence in drawn:
            expected = by_transformers(model, sequence)
            assert torch.allclose(torch.from_numpy(sequence.log_probs[sequence.drawn]), expected, atol=1e-5), number
        assert len({tuple(sequence.token_ids) for sequence in drawn[3:6]}) == 3, "the answers of a group differ"
        with torch.no_grad():  # and after weights have changed
            for parameter in model.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


def test_what_an_image_shows_changes_what_is_drawn(seen: tuple[Any, list[TextPrompt]]) -> None:
    model, prompts = seen
    prompt, other = prompts[1], images_of([picture(24, 24, seed=99)], prompts[1].images.shapes, "other")
    assert prompt.images is not None and prompt.images.find() != other.find()
    changed = TextPrompt(prompt.token_ids, prompt.text, prompt.messages, images=other)
    first, second = draw(model, [prompt]), draw(model, [changed])
    assert not np.array_equal(first[0].log_probs, second[0].log_probs)
    one = by_transformers(model, second[0])
    assert torch.allclose(torch.from_numpy(second[0].log_probs[second[0].drawn]), one, atol=1e-5)


def test_a_prompt_is_encoded_once_for_its_group(seen: tuple[Any, list[TextPrompt]]) -> None:
    model, prompts = seen
    draw(model, prompts[1:2])
    counts: list[int] = []
    model.plain.model.visual.register_forward_pre_hook(
        lambda _module, args, kwargs: counts.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    engine = EmbeddedEngine(model.module, max_length=200, vision=model.vision)
    engine._prepared()
    counts.clear()
    requests = [
        GenerationRequest(prompt.token_ids, seed, 4, images=prompt.images) for seed in range(4) for prompt in prompts
    ]
    complete_requests(engine, requests, Sampling())
    assert sum(counts) == sum(len(prompt.images.shapes) for prompt in prompts if prompt.images is not None)


def test_a_drawn_image_token_ends_the_answer_and_is_learned_from(seen: tuple[Any, list[TextPrompt]]) -> None:
    model, prompts = seen
    prompt_ids = prompts[1].token_ids
    tokens = [*prompt_ids, 70, 71, IMAGE_TOKEN]
    drawn = np.arange(len(tokens)) >= len(prompt_ids)
    token_sequence = TokenSequence(
        np.array(tokens, np.int32), drawn, np.zeros(len(tokens), np.float32), drawn - 1, "stop", prompts[1].images
    )
    rollout = TextRollout(requests=[SampleRequest(0, 0, 1)], versions=[0], sequences=[[token_sequence]])
    batch = pack_samples(rollout, model)
    labels = batch.labels
    assert labels[labels != -100].tolist() == [70, 71, IMAGE_TOKEN]
    assert int((batch.input_ids == IMAGE_TOKEN).sum()) == prompt_ids.count(IMAGE_TOKEN) > 0
    actual = model.token_log_probs([batch])[0][batch.loss_mask]
    assert torch.allclose(actual, by_transformers(model, token_sequence), atol=1e-5)


def test_a_run_is_on_policy_and_its_report_shows_the_images(run: Path) -> None:
    assert max(values(run, "mismatch/log_ratio_max")) < 1e-5
    assert all(norm > 0 for norm in values(run, "grad_norm"))
    rows = [row for file in run.glob("samples/*/samples.jsonl") for row in read_jsonl(file)]
    assert any("source" in row for row in rows) and any("source" not in row for row in rows)
    assert (run / "report.html").read_text(encoding="utf-8").count('alt="the images of the prompt"') > 0
    assert (run / "hf_ckpt/preprocessor_config.json").is_file()


@pytest.mark.slow
def test_dumps_are_learned_from_without_the_data(run: Path, tmp_path: Path) -> None:
    dump = read_dump(dump_path(run, 1))
    shapes = [sequence[0].images and sequence[0].images.shapes.tolist() for sequence in dump.rollout.sequences]
    assert any(shapes) and not all(shapes)
    settings = {"rollout": {"load_dump": str(run)}, "train": {"max_steps": 2, "lr": 0.01}}
    again = run_task_here("rl_text", tiny_vision_rl_config(tmp_path, **settings))
    for name in ("loss/policy", "grad_norm", "reward/total", "mismatch/log_ratio_max"):
        assert values(again, name) == values(run, name), name


def rendered(length: int) -> dict[str, Any]:
    """What vLLM's render step answers for one image."""
    places = {"image": [{"offset": 1, "length": length}]}
    return {"features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": places, "kwargs_data": {"image": ["data"]}}}


def test_vllm_is_given_images_scaled_and_at_the_places_of_the_prompt(tmp_path: Path) -> None:
    prompts = loaded(tmp_path)[1]
    template, _, _ = open_prompts(load_config(TextRLConfig, overrides=tiny_vision_rl_config(tmp_path)), print)
    prompt, reader = prompts[1], template.reader
    ((begin, length),) = token_runs(reader.kinds(np.array(prompt.token_ids)) == 1)
    assert set(prompt.token_ids[begin : begin + length]) == {IMAGE_TOKEN} and prompt.token_ids[begin - 1] == 259
    requests: list[list[bytes]] = []

    async def render(images: list[bytes]) -> Any:
        requests.append(images)
        return rendered(length)

    async def all_of(images: RenderedImages) -> list[Any]:
        return await asyncio.gather(*(images.render_features(prompt.token_ids, prompt.images) for _ in range(4)))

    result = asyncio.run(all_of(RenderedImages(reader, render)))
    assert [entry["mm_placeholders"]["image"] for entry in result] == [[{"offset": begin, "length": length}]] * 4
    assert len(requests) == 1, "once for a group"
    _, rows, columns = prompt.images.shapes[0].tolist()
    with Image.open(io.BytesIO(requests[0][0])) as scaled:
        assert scaled.size == (columns * 4, rows * 4)
        tensors = reader.process_opened([scaled.convert("RGB")])
    assert torch.equal(tensors["pixel_values"], reader.tensors(prompt.images)["pixel_values"])

    async def other(_: list[bytes]) -> Any:
        return rendered(length + 1)

    with pytest.raises(EngineError, match=r"--mm-processor-kwargs '\{\"min_pixels\": 64"):
        asyncio.run(all_of(RenderedImages(reader, other)))

    async def ended(_: list[bytes]) -> Any:
        return NOT_SENT

    assert asyncio.run(all_of(RenderedImages(reader, ended))) == [NOT_SENT] * 4


def test_vllm_is_given_images_of_the_qwen_models_alone(tmp_path: Path) -> None:
    for kind in ("internvl", "glm4v"):
        reader = loaded(tmp_path, kind)[0].vision.reader
        with pytest.raises(ConfigError, match="of the Qwen models alone"):
            RenderedImages(reader, None)


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": [{"role": "user", "content": "<image>What?"}], "reward_model": {"ground_truth": "7"}},
        {"question": "<image>What?", "answer": "It is\n#### 7"},
        {"instruction": "<image>What?", "output": "7"},
        {
            "messages": [
                {"role": "user", "content": "<image>What?"},
                {"role": "assistant", "content": [{"type": "text", "text": "7"}]},
            ]
        },
    ],
    ids=["verl's geo3k", "gsm8k", "alpaca", "messages"],
)
def test_rows_with_images_are_told_by_their_columns_as_those_without(columns: dict[str, Any]) -> None:
    row = FiledRow({**columns, "images": [{"bytes": picture(16, 16), "path": None}]})
    prompt = ImagePrompts().read(row, "row 1")
    assert prompt.metadata["answer"] == "7" and "images" not in prompt.metadata
    assert not isinstance(prompt.content, str) and len(prompt.images) == 1
    assert [part["type"] for part in prompt.content[-1]["content"]] == ["image", "text"]


def test_broken_images_are_named_with_file_and_row(tmp_path: Path) -> None:
    config = tiny_vision_rl_config(tmp_path)
    path = Path(config["data"]["train_path"])
    rows = path.read_text(encoding="utf-8").splitlines()
    (tmp_path / "cut.png").write_bytes(picture(16, 16)[:60])
    broken = [
        ({"prompt": "<image>What?", "images": ["cut.png"]}, "cut.png"),
        ({"prompt": "<image>What?", "images": ["none.png"]}, "none.png"),
        ({"prompt": "What?", "images": ["cut.png"]}, "no place in a message"),
        ({"prompt": "<image>What?"}, "column 'images' holds none"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "video"),
        ({"prompt": [{"role": "user", "content": []}]}, "not nothing"),
    ]
    for row, named in broken:
        path.write_text("\n".join([rows[0], json.dumps(row | {"answer": "1"})]), encoding="utf-8")
        with pytest.raises(DataError, match=f"prompts.jsonl.*2.*{named}"):
            open_prompts(load_config(TextRLConfig, overrides=config), print)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"rollout": {"kind": "tools"}},
            "rollout.kind tools",
        ),
        ({"rollout": {"kind": {"type": "agent", "path": "a:b"}}}, "rollout.kind agent"),
        ({"rollout": {"engine": {"type": "vllm"}, "hybrid_engine": False}, "model": {"model_path": "x"}}, "vllm"),
        ({"rollout": {"engine": {"type": "sglang"}, "hybrid_engine": False}, "model": {"model_path": "x"}}, "sglang"),
        ({"algorithm": {"recipe": "ppo"}}, "token_advantage gae"),
        ({"data": {"data_type": "image_prompts", "synthetic": {"problem": "add"}}}, "need each other"),
        ({"data": {"data_type": {"type": "image_prompts", "min_pixels": 0}}}, "min_pixels must be at least 1"),
    ],
)
def test_parts_that_take_no_images_refuse_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = merge(tiny_vision_rl_config(tmp_path), settings)
    if "model" in settings:
        config["model"] = {"model_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=named):
        load_config(TextRLConfig, overrides=config)


def test_a_model_that_sees_nothing_and_long_prompts_are_refused(tmp_path: Path) -> None:
    config = tiny_vision_rl_config(tmp_path, data={"max_prompt_tokens": 46, "overlong": "truncate_left"})
    with pytest.raises(DataError, match="could lose an image"):
        open_prompts(load_config(TextRLConfig, overrides=config), print)
    said: list[str] = []
    config["data"]["overlong"], config["eval"]["num_prompts"] = "drop", 1
    prompts = open_prompts(load_config(TextRLConfig, overrides=config), said.append)[1]
    assert prompts and all(prompt.images is None for prompt in prompts) and "longer" in said[-1]
    assert Sample(prompt="x", group_id=0, text="y").images is None
