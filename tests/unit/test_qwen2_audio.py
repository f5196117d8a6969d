"""Qwen2-Audio, which hears and sees nothing, against transformers' own processor and model one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sfumato.config.load import load_config, merge
from sfumato.config.text import TrainTextConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.sounds import read_sound
from sfumato.data.text.format import build_transform
from sfumato.data.text.packing import make_batch
from sfumato.errors import ConfigError, DataError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.estimate.meta_models import plan_language_model
from sfumato.models.language.load import build_language_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import find_blocks, language_plan
from sfumato.parallel.shards import trainable_parameters
from sfumato.tracking.json_lines import read_jsonl
from tests.one_by_one import assert_as_transformers, build_reader, inputs_of
from tests.tiny import run_task_here, write_config
from tests.tiny_vision import data_url, picture, sound, sound_row, tiny_sound_config
from tests.unit.test_memory_plan import Saved

pytest.importorskip("soundfile", reason="audio needs soundfile and soxr (extra 'audio')")
pytest.importorskip("soxr", reason="audio needs soundfile and soxr (extra 'audio')")

UNUSED = "audio_tower.embed_positions"
"""Positions of sines, which transformers never trains."""


def build(tmp_path: Path, **changes: Any) -> tuple[Any, Any, Any]:
    """The configuration, the model in one process, and what makes samples of rows."""
    config = tiny_sound_config(tmp_path, **changes)
    return load_config(TrainTextConfig, overrides=config), *build_reader(config)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    return build(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("rows", ["packed", pytest.param("documents", marks=pytest.mark.slow)])
def test_conversations_are_those_of_transformers_one_by_one(rows: str, tmp_path: Path) -> None:
    _, model, transform = build(tmp_path)
    with torch.no_grad():  # biases that are zero would hide what fills audio up
        for weight in trainable_parameters(model.trained).values():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    data_rows = [sound_row(index) for index in range(6)]
    batch, gradients = assert_as_transformers(model, transform, data_rows, rows, tolerance=1e-5, sampling_rate=16000)
    assert [len(media.get("input_features", ())) for media in batch.media] == [0, 1, 2, 0, 1, 2]
    assert any("audio_tower" in name for name in gradients)


def test_bf16_is_float32_but_for_rounding(built: Any, tmp_path: Path) -> None:
    """The encoder reads its table of positions by itself, which autocast does not convert."""
    results = []
    for model in (built[1], build(tmp_path, train={"mixed_precision": "bf16"})[1]):
        (sample,) = built[2](FiledRow(sound_row(2)), "a test")
        batch = make_batch([sample], [0], [0], True, 0, 2, model.vision)
        total = model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())[0]
        assert all(weight.dtype == torch.float32 for weight in model.trained.parameters())
        results.append((total, model.token_log_probs([batch])[0]))
        model.module.zero_grad()
    assert 0 < float((results[0][1] - results[1][1]).abs().max()) < 0.15 and results[0][0] == pytest.approx(
        results[1][0], 0.02
    )


def test_a_batch_without_audio_computes_the_encoder_with_gradients_of_zero(built: Any) -> None:
    _, model, transform = built
    (sample,) = transform(FiledRow(sound_row(0)), "a test")
    batch = make_batch([sample], [0], [0], True, 0, 2, model.vision)
    model.forward_backward([batch], lambda scores, batch: -scores.log_probs(batch.labels).sum())
    names = [name for name in trainable_parameters(model.trained) if "audio_tower" in name or "projector" in name]
    assert len(names) > 20 and not any(UNUSED in name for name in names)
    for name in names:
        assert not trainable_parameters(model.trained)[name].grad.any(), name


def test_operations_are_those_that_torch_counts_of_audio_of_any_length(built: Any) -> None:
    _, model, _ = built
    flops = FlopCount(model.plain, model.vision).encoder
    reader, base = model.vision.reader, model.plain.model
    for seconds, frames in ((0.2, 20), (1.0, 100)):
        sounds = [read_sound(sound(seconds), 16000, 30, "a test")]
        assert reader.place(sounds)[1].tolist() == [[frames, 0, 0]]
        tensors = reader.process_opened(sounds)
        mask = torch.ones(1, 1, 50, 50, dtype=torch.bool)
        set_eager = base.audio_tower.config._attn_implementation
        base.audio_tower.config._attn_implementation = "eager"
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            base.multi_modal_projector(base.audio_tower(tensors["input_features"], mask).last_hidden_state)
        base.audio_tower.config._attn_implementation = set_eager
        assert flops.forward(reader.place(sounds)[1]) == counter.get_total_flops() > 0
    assert flops.training(reader.place(sounds)[1]) == 3 * flops.forward(reader.place(sounds)[1])


def test_blocks_are_whole_layers_and_what_the_encoder_keeps_is_predicted(built: Any) -> None:
    config, model, _ = built
    blocks = find_blocks(model.plain, language_plan(model.plain))
    assert {type(block).__name__ for block in blocks.values()} == {"Qwen2AudioEncoderLayer", "Qwen2DecoderLayer"}
    plan = plan_language_model(config.model, config.data, config.train, Layout(), on_gpu=False)
    reader, module, saved = model.vision.reader, model.plain.model, Saved(model.plain)
    sounds = [read_sound(sound(1.0), 16000, 30, "a test")] * 4
    tokens = sum(text.count("<|AUDIO|>") for text in reader.place(sounds)[0])
    assert tokens == 4 * 25
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda packed: packed):
        features = module.multi_modal_projector(
            module.audio_tower(reader.process_opened(sounds)["input_features"]).last_hidden_state
        )
        features.sum().backward()
    assert plan.encoder_bytes / config.data.max_seq_len * tokens == pytest.approx(saved.total, rel=0.15)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of 4 steps with the encoder's blocks as they were."""
    config = tiny_sound_config(tmp_path_factory.mktemp("run"), train={"max_steps": 4}, eval={"every_steps": 2})
    config["model"]["freeze"] = [r"audio_tower\.layers"]
    return config, run_task_here("train_text", config)


def test_what_is_exported_is_loaded_by_transformers_and_gives_the_same(run: Any, tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    config, folder = run
    assert [line["loss"] for line in read_jsonl(folder / "metrics.jsonl") if "loss" in line]
    processor = AutoProcessor.from_pretrained(folder / "hf_ckpt")
    plain, info = Qwen2AudioForConditionalGeneration.from_pretrained(folder / "hf_ckpt", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(processor).__name__ == "Qwen2AudioProcessor"
    again = {"model_path": str(folder / "hf_ckpt"), "config_path": None, "tokenizer_path": None, "freeze": []}
    config = load_config(TrainTextConfig, overrides=merge(config, {"model": again}))
    model = build_language_model(config.model, config.train, data_type=config.data.data_type)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), config.train)
    transform = build_transform(config.data, model.tokenizer, model.vision.reader)
    assert model.vision.reader.processor.feature_extractor.chunk_length == 1
    assert not any(UNUSED in name for name in trainable_parameters(model.trained)), "as in a model that is made"
    (sample,) = transform(FiledRow(sound_row(2)), "a test")
    inputs = inputs_of(processor, processor, sound_row(2), sampling_rate=16000)
    assert inputs["input_ids"][0].tolist() == sample.documents[0].input_ids.tolist()
    batch = make_batch([sample], [0], [0], True, 0, 2, model.vision)
    with torch.no_grad():
        theirs = plain(**inputs).logits[0]
        ours = model(model.place_batch(batch, every_token=True))._output[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    described = load_config(TrainTextConfig, overrides=run[0])
    begun = build_language_model(described.model, described.train, data_type=described.data.data_type).plain
    trained = plain.state_dict()
    for name, weight in begun.state_dict().items():
        stays = "audio_tower.layers" in name or UNUSED in name
        assert torch.equal(weight, trained[name]) == stays, name


@pytest.mark.slow
def test_adapters_are_trained_and_a_resumed_run_is_one_that_was_never_ended(tmp_path: Path) -> None:
    train = {"max_steps": 4, "save_steps": 2}
    lora = {"lora": {"rank": 4, "alpha": 8, "init_weights": "default"}}
    whole = run_task_here("train_text", tiny_sound_config(tmp_path / "whole", train=train, model=lora))
    part = tiny_sound_config(tmp_path / "part", train=train, model=lora)
    run_task_here("train_text", merge(part, {"train": {"max_steps": 2}}))
    folder = run_task_here("train_text", merge(part, {"train": {"load_checkpoint_path": "auto"}}))
    losses = [
        {line["step"]: line["loss"] for line in read_jsonl(path / "metrics.jsonl") if "loss" in line}
        for path in (whole, folder)
    ]
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


ASK = {"type": "text", "text": "What?"}
BROKEN = {
    "one token": (
        [{"type": "audio", "audio": data_url(sound(0.05))}, ASK],
        "of 0.05 s: .* on 0.0600625 s",
    ),
    "too long": ([{"type": "audio", "audio": data_url(sound(1.2))}, ASK], "of 1.2 s: at most 1 s"),
    "an image": ([{"type": "image", "image": data_url(picture(16, 16))}, ASK], "neither a text nor audio"),
    "its own": ([{"type": "text", "text": "<|AUDIO|>"}], "1 placeholders .* for 0 audios"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_it_cannot_hear_is_a_broken_row(built: Any, name: str) -> None:
    content, message = BROKEN[name]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]}
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 7.*({message})"):
        built[2](FiledRow(row), "rows.jsonl, line 7")


def test_other_formats_models_and_folders_are_refused_by_name(tmp_path: Path, run: Any) -> None:
    def refused(message: str, **changes: Any) -> None:
        config = load_config(TrainTextConfig, overrides=merge(tiny_sound_config(tmp_path), changes))
        with pytest.raises(ConfigError, match=message):
            build_language_model(config.model, config.train, data_type=config.data.data_type)

    refused("hears, and sees no images: take media_conversation", data={"data_type": {"type": "image_conversation"}})
    refused("takes no videos: remove their limits .fps", data={"data_type": {"type": "media_conversation", "fps": 1.0}})
    refused("takes no images: remove", data={"data_type": {"type": "media_conversation", "min_pixels": 64}})
    for kind in ("voxtral", "glmasr", "granite_speech"):
        description = write_config({"model_type": kind}, tmp_path / f"{kind}.yaml")
        refused(
            f"a model of type {kind} has no encoder of images .*, and of those that hear alone qwen2_audio",
            model={"config_path": str(description)},
        )
    (tmp_path / "voxtral").mkdir()
    (tmp_path / "voxtral" / "config.json").write_text('{"model_type": "voxtral"}')
    refused(
        "transformers' AutoModelForCausalLM knows no voxtral: .* such as media_conversation",
        model={"model_path": str(tmp_path / "voxtral"), "config_path": None},
        data={"data_type": {"type": "conversation"}},
    )
    folder = run[1] / "hf_ckpt"
    path = {"model_path": str(folder), "config_path": None, "tokenizer_path": None}
    refused("qwen2_audio is a model that hears: take", model=path, data={"data_type": {"type": "conversation"}})
    description = tiny_sound_config(tmp_path)["model"]["config_path"]
    text = Path(description).read_text(encoding="utf-8")
    for old, new, message in (
        ("max_source_positions: 50", "max_source_positions: 60", "must be a multiple of 50"),
        ("audio_token_index: 261", "audio_token_index: 260", "tokens of audio are .261., the model's .* 260"),
    ):
        assert old in text
        Path(description).write_text(text.replace(old, new), encoding="utf-8")
        config = load_config(TrainTextConfig, overrides={**tiny_sound_config(tmp_path / "a")})
        config = config.model_copy(update={"model": config.model.model_copy(update={"config_path": Path(description)})})
        with pytest.raises(ConfigError, match=message):
            build_language_model(config.model, config.train, data_type=config.data.data_type)


def test_audio_of_another_length_when_it_is_read_stops_the_run(built: Any) -> None:
    _, model, transform = built
    (sample,) = transform(FiledRow(sound_row(1)), "a test")
    images = sample.documents[0].images
    changed = type(images)(images.shapes + np.array([[1, 0, 0]], np.int32), images.find, images.where)
    with pytest.raises(DataError, match="audio has another size"):
        model.vision.reader.tensors(changed)
