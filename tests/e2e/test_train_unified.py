"""Published models that see and draw, by tasks/train_omni.py: losses, exports and drawings against transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Emu3ForConditionalGeneration, JanusForConditionalGeneration

from sfumato.config.load import load_config, merge
from sfumato.config.omni import TrainOmniConfig
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.prompt_dropout import is_image
from sfumato.errors import ConfigError
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.omni.load import build_omni_model
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import build_mesh
from sfumato.rollout.text.image_generation import draw_images
from tests.resumed import assert_same_run, resume_after_kill
from tests.tiny import run_task_here, tiny_text_rl_config, weights_in, write_config
from tests.tiny_unified import tiny_unified_config
from tests.tiny_vision import picture

PUBLISHED = {"emu3": Emu3ForConditionalGeneration, "janus": JanusForConditionalGeneration}


@pytest.fixture(scope="module", params=list(PUBLISHED))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """A kind of model, a configuration, and its run."""
    config = tiny_unified_config(tmp_path_factory.mktemp(request.param), request.param, train={"save_steps": 2})
    return request.param, config, run_task_here("train_omni", config)


@pytest.fixture(scope="module")
def exported(trained: tuple[str, dict[str, Any], Path]) -> tuple[Any, Any]:
    """transformers' own model and processor of the export."""
    kind, _, run = trained
    model, info = PUBLISHED[kind].from_pretrained(run / "hf_ckpt", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval(), AutoProcessor.from_pretrained(run / "hf_ckpt", backend="pil")


@pytest.fixture(scope="module")
def again(trained: tuple[str, dict[str, Any], Path], exported: tuple[Any, Any]) -> Any:
    """The export as the model that is trained, on a mesh, with its data; the weights by which Janus draws are larger in
    both, so that it shows which code stands where."""
    _, config, run = trained
    model = {"unified": {"config_path": None, "model_path": str(run / "hf_ckpt")}, "tokenizer_path": None}
    parsed = load_config(TrainOmniConfig, write_config(merge(config, {"model": model}), run / "again.yaml"))
    mesh, built = build_mesh(parsed.train), build_omni_model(parsed)
    flops = FlopCount(built.module, built.vision)
    printing_and_costs = (print, None, flops.count_document, flops.sight)
    loader, validation, _ = open_text_data(parsed, built.tokenizer, mesh, *printing_and_costs)
    built.parallelize(mesh, parsed.train)
    for model in (exported[0], built.plain):
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(model.named_parameters()):
            if "generation_" in name:
                parameter.data.normal_(generator=generator)
    return built, loader, validation


def test_losses_are_those_of_transformers_processor_and_model(trained: Any, exported: Any, again: Any) -> None:
    """Tokens, and the log-probability of each label, of conversations that see, draw, or both."""
    kind, _, _ = trained
    plain, processor = exported
    built, _, validation = again
    compared = set()
    for (scores, placed), batch in zip(built.score(validation.batches), validation.batches, strict=True):
        ours = scores.log_probs(placed.labels)[0]
        for number in range(len(batch.document_lengths)):
            in_document = batch.document_ids[0] == number
            in_document[sum(batch.document_lengths) :] = False
            ids, labels = batch.input_ids[0, in_document], batch.labels[0, in_document]
            row_index = 50 + batch.sample_ids[number]
            tokens, result = REFERENCES[kind](plain, processor, built, row_index, labels)
            assert torch.equal(tokens, ids)
            assert torch.allclose(ours[in_document], result, atol=1e-6, rtol=1e-6)
            compared |= {(row_index % 4, bool(is_image(labels, built.codes).any()))}
    assert compared == {(0, False), (1, False), (2, True), (3, True)}


def _row(index: int, built: Any) -> tuple[str, list[Image.Image], Image.Image | None]:
    """A conversation of ``tests.tiny_omni.omni_row`` as transformers' template renders it, its image that is seen, and
    the one that is drawn, in the size in which it is."""
    seen = [Image.open(io.BytesIO(picture(16, 16, index))).convert("RGB")] if index % 4 in (1, 3) else []
    drawn = None
    if index % 4 in (2, 3):
        size = built.image_tokenizer.width, built.image_tokenizer.height
        drawn = Image.open(io.BytesIO(picture(8, 8, 100 + index))).convert("RGB").resize(size, Image.Resampling.BICUBIC)
    content = [{"type": "image"}] * len(seen) + [{"type": "text", "text": f"What is number {index}?"}]
    answer = [{"type": "image"}] if drawn is not None else [{"type": "text", "text": f"It is {index}."}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return messages, seen, drawn


def _emu3(
    plain: Any, processor: Any, built: Any, index: int, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    messages, seen, drawn = _row(index, built)
    text = processor.apply_chat_template(messages, tokenize=False)
    images = [*seen, *([drawn] if drawn is not None else [])]
    tokens, logits, codes = [], None, []
    for image in images:  # one by one: beside a larger one transformers fills an image up, and its codes are others
        features = processor.image_processor(image, return_tensors="pt")
        codes.append(plain.model.get_image_tokens(**features))
    sizes = [processor.image_processor(image)["image_sizes"][0] for image in images]
    parts = text.split(processor.image_token)
    with_images = parts[0]
    for (height, width), part in zip(sizes, parts[1:], strict=True):
        with_images += processor.replace_image_token({"image_sizes": [[height, width]]}, 0) + part
    tokens = processor.tokenizer(f"{processor.bos_token}{with_images}", return_tensors="pt")["input_ids"]
    if len(images) == 1:  # the whole processor says the same
        whole = processor(text=[text], images=images, return_tensors="pt")
        assert torch.equal(whole["input_ids"], tokens)
        with torch.no_grad():
            logits = plain(**whole).logits
    if codes:
        tokens = tokens.masked_scatter(tokens == processor.image_token_id, torch.cat(codes).long())
    with torch.no_grad():
        result = plain(input_ids=tokens).logits
        assert logits is None or torch.allclose(result, logits, atol=1e-6)
    return tokens[0], _picked(result[0], labels)


def _janus(
    plain: Any, processor: Any, built: Any, index: int, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    messages, seen, drawn = _row(index, built)
    text = processor.apply_chat_template(messages, tokenize=False)
    begin, end = processor.image_start_token, processor.image_end_token
    codes = built.image_tokenizer.encode(drawn) if drawn is not None else []
    head, tail = text, ""
    if drawn is not None:
        head, _, tail = text.rpartition(processor.image_token)
        head, tail = head + begin, end + tail
    inputs = processor(text=[head], images=seen or None, return_tensors="pt")
    begun, rest = inputs["input_ids"][0], processor.tokenizer(tail, add_special_tokens=False)["input_ids"]
    size = plain.config.text_config.vocab_size
    tokens = torch.cat(
        [begun, torch.tensor([size + code for code in codes], dtype=torch.int64), torch.tensor(rest).long()]
    )
    with torch.no_grad():
        parts = [plain.get_input_embeddings()(begun)]
        if seen:
            features = plain.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
            parts[0][begun == plain.config.image_token_id] = features.flatten(0, 1)
        if codes:
            parts.append(plain.prepare_embeddings_for_image_generation(torch.tensor(codes)))
        parts.append(plain.get_input_embeddings()(torch.tensor(rest).long()))
        hidden = plain.model.language_model(inputs_embeds=torch.cat(parts)[None]).last_hidden_state[0]
        of_text = _picked(plain.lm_head(hidden), labels.masked_fill(labels >= size, IGNORED))
        of_codes = _picked(plain.model.generation_head(hidden), torch.where(labels >= size, labels - size, IGNORED))
    certain = (tokens >= size) & (labels == processor.tokenizer.eoi_token_id)  # generate stops after the last code
    assert int(certain.sum()) == (drawn is not None)
    return tokens, of_text.masked_fill(certain, 0) + of_codes


def test_drawings_are_those_of_transformers_generate(trained: Any, exported: Any, again: Any) -> None:
    """The likeliest codes, and the image that they are."""
    kind, _, _ = trained
    plain, processor = exported
    built, _, validation = again
    prompts = [prompt for prompt in validation.prompts if any(token in built.codes for token in prompt.answer)]
    prompt = next(prompt for prompt in prompts if prompt.images is None)
    scale = {"emu3": 1.0, "janus": 3.0}[kind]  # Janus' generate always guides
    (image,) = draw_images(built, [prompt], scale, 0.0, 0)
    codes, pixels = GENERATED[kind](plain, processor, prompt)
    assert len(set(codes)) > 1  # or the test would show little
    (expected,) = built.image_tokenizer.decode([codes])
    assert np.array_equal(image, expected)
    assert np.array_equal(np.asarray(pixels), expected)


@pytest.mark.slow
def test_rl_of_drawing_learns_and_exports_the_model(trained: Any, tmp_path: Path) -> None:
    """Codes are what is learned from; ends of lines are given. The export is transformers' model again."""
    kind, _, run = trained
    folder = str(run / "hf_ckpt")
    size = {"size": [16, 24]} if kind == "emu3" else {}
    rollout = {"kind": {"type": "drawing", "image_tokenizer": folder, **size}, "max_new_tokens": 8}
    config = tiny_text_rl_config(tmp_path)
    config["data"] = {name: value for name, value in config["data"].items() if name != "chat_template"}
    config["data"]["synthetic"] = {"problem": "draw"}
    parts = {"rollout": rollout, "reward": {"rewards": [{"type": "brightness"}]}, "train": {"max_steps": 2}}
    config = merge(config, parts) | {"model": {"model_path": folder}}
    out = run_task_here("rl_text", config)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    number = {"emu3": 6, "janus": 4}[kind]
    assert lines[-1]["step"] == 2 and lines[-1]["rollout/tokens_per_sample"] == number
    assert abs(lines[-1]["mismatch/log_ratio_max"]) < 1e-5
    _, info = PUBLISHED[kind].from_pretrained(out / "hf_ckpt", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = weights_in(run / "hf_ckpt"), weights_in(out / "hf_ckpt")
    changed = {name for name in before if before[name] != after[name]}
    assert changed and not any("vqmodel" in name for name in changed)
    assert kind == "emu3" or any("generation_head" in name for name in changed)
    one, other = (AutoProcessor.from_pretrained(path / "hf_ckpt", backend="pil").to_dict() for path in (run, out))
    assert one == other


def test_what_is_frozen_by_name_stays(trained: Any, tmp_path: Path) -> None:
    kind, config, run = trained
    pattern = {"emu3": "text_model.layers", "janus": "language_model|lm_head|vision_model|aligner"}[kind]
    model = {"unified": {"config_path": None, "model_path": str(run / "hf_ckpt")}, "tokenizer_path": None}
    more = {"model": model | {"freeze": [pattern]}, "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1}}
    before, after = (weights_in(path / "hf_ckpt") for path in (run, run_task_here("train_omni", merge(config, more))))
    trained_parts = {
        "emu3": ("embed_tokens", "lm_head", "text_model.norm", "text_model.model.norm"),
        "janus": ("generation_",),
    }
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(any(part in name for part in trained_parts[kind]) for name in changed)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(trained: Any, tmp_path: Path) -> None:
    _, config, whole = trained
    assert_same_run(resume_after_kill("train_omni", config, tmp_path), whole)


def test_weights_on_meta_are_those_of_the_folder(trained: Any, tmp_path: Path) -> None:
    """Published names of weights are read in shards, too."""
    _, config, run = trained
    model = {"unified": {"config_path": None, "model_path": str(run / "hf_ckpt")}, "tokenizer_path": None}
    train = {"output_dir": str(tmp_path / "run"), "max_steps": 1, "init_device": "meta"}
    again = run_task_here("train_omni", merge(config, {"model": model, "train": train}))
    first, last = (_evaluated(folder, step) for folder, step in ((again, 0), (run, 6)))
    assert first == pytest.approx(last, rel=1e-6)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Each by one line that names it."""
    config = tiny_unified_config(tmp_path, "emu3")
    wrong = {
        "multiples of 8": {"draw": {"size": [20, 24]}},
        "data parallelism": {"train": {"data_parallel_mode": "fsdp1"}},
        "no effect": {"model": {"encoder": {"config_path": "x.yaml"}}},
        "is missing": {"model": {"unified": None}},
    }
    for match, more in wrong.items():
        with pytest.raises(ConfigError, match=match):
            run_task_here("train_omni", merge(merge(config, {"train": {"output_dir": str(tmp_path / match)}}), more))
    for kind, more, match in (
        ("janus", {"draw": {"size": [16, 24]}}, "16 x 16 pixels alone"),
        ("janus", {"train": {"chunked_loss": True}}, "chunked_loss"),
        ("chameleon", {}, "not trained to draw"),
    ):
        config = merge(tiny_unified_config(tmp_path / kind, kind), more)
        with pytest.raises(ConfigError, match=match):
            run_task_here("train_omni", config)


def _evaluated(run: Path, step: int) -> dict[str, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(
        {name: line[name] for name in line if name.startswith("eval/")} for line in lines if line["step"] == step
    )


def _emu3_generated(plain: Any, processor: Any, prompt: Any) -> tuple[list[int], Any]:
    """As on the model's page of transformers: a prefix with the size, then only what its place in the image allows."""
    text = processor.tokenizer.decode(prompt.input_ids[1:])  # the processor begins it anew
    inputs = processor(
        text=[text], return_for_image_generation=True, ratio="3:2", image_area=16 * 24, return_tensors="pt"
    )
    assert inputs["input_ids"][0, : len(prompt.input_ids)].tolist() == prompt.input_ids
    height, width = inputs.pop("image_sizes")[0]
    mapping, begun = plain.vocabulary_mapping, inputs["input_ids"].shape[1]

    def allowed(_batch: int, ids: torch.Tensor) -> list[int]:
        place = len(ids) - begun
        return [mapping.eol_token_id] if place % (width + 1) == width else list(mapping.image_tokens)

    number = height * (width + 1)
    result = plain.generate(**inputs, max_new_tokens=number, do_sample=False, prefix_allowed_tokens_fn=allowed)
    drawn = torch.cat([result[:, begun:], torch.zeros(1, 3, dtype=torch.int64)], dim=1)  # end of frame, image and text
    image = plain.decode_image_tokens(image_tokens=drawn, height=height, width=width)
    (pixels,) = processor.postprocess(list(image.float()), return_tensors="PIL.Image.Image")["pixel_values"]
    codes = mapping.convert_bpe2img(result[:, begun:].view(1, height, width + 1))
    return codes.flatten().tolist(), pixels


def _janus_generated(plain: Any, processor: Any, prompt: Any) -> tuple[list[int], Any]:
    text = processor.tokenizer.decode(prompt.input_ids)
    inputs = processor(text=[text], generation_mode="image", return_tensors="pt")
    assert inputs["input_ids"][0, :-1].tolist() == prompt.input_ids
    codes = plain.generate(**inputs, generation_mode="image", do_sample=False, guidance_scale=3.0)
    image = plain.decode_image_tokens(codes).permute(0, 3, 1, 2)
    (pixels,) = processor.postprocess(list(image.float().detach()), return_tensors="PIL.Image.Image")["pixel_values"]
    return codes[0].tolist(), pixels


GENERATED = {"emu3": _emu3_generated, "janus": _janus_generated}

REFERENCES = {"emu3": _emu3, "janus": _janus}


def _picked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    result = logits.float().log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return result.masked_fill(labels == IGNORED, 0)
