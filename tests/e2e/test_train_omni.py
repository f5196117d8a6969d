"""tasks/train_omni.py from start to end: what its losses are, what it exports, a kill, guidance."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import VQModel
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration

from sfumato.commands.export_checkpoint import export_checkpoint
from sfumato.config.load import load_config, merge
from sfumato.config.omni import TrainOmniConfig
from sfumato.data.media.image_answers import CODE
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.prompt_dropout import drop_prompts, is_image
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError
from sfumato.models.omni.load import build_omni_model
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import build_mesh
from sfumato.rollout.engines.base import Sampling
from sfumato.rollout.kinds.base import LengthLimits, SampleKeys
from sfumato.rollout.kinds.image_rollout import DrawingKind
from sfumato.rollout.text.image_generation import draw_images
from tests.resumed import assert_same_run, resume_after_kill
from tests.scripted_engine import ScriptedEngine
from tests.tiny import run_task_here, tiny_text_rl_config, weights_in, write_config
from tests.tiny_omni import tiny_omni_config


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return tiny_omni_config(tmp_path_factory.mktemp("omni"), train={"save_steps": 2})


@pytest.fixture(scope="module")
def whole(settings: dict) -> Path:
    return run_task_here("train_omni", settings)


def test_each_part_of_the_export_is_what_its_library_loads(whole: Path) -> None:
    folder = whole / "hf_ckpt"
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    foundation, info = AutoModelForCausalLM.from_pretrained(folder / "foundation", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    settings = json.loads((folder / "foundation/config.json").read_text())
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(foundation(input_ids=tokens).logits, model(input_ids=tokens).logits)
        encoder, pixels = AutoModel.from_pretrained(folder / "encoder"), torch.rand(1, 3, 16, 16)
        assert torch.equal(encoder(pixels).last_hidden_state, model.model.vision_tower(pixels).last_hidden_state)
    assert (folder / "encoder/preprocessor_config.json").is_file()  # how pixels are normalised


def test_a_later_export_is_that_of_the_run(whole: Path, tmp_path: Path) -> None:
    export_checkpoint(whole, tmp_path / "later")
    names = ("config.json", "generation_config.json", "chat_template.jinja")
    for name in [*names, *(f"foundation/{name}" for name in names)]:
        assert (tmp_path / "later" / name).read_text() == (whole / "hf_ckpt" / name).read_text(), name


def test_the_loss_is_two_means_and_codes_are_what_the_image_tokenizer_says(settings: dict, tmp_path: Path) -> None:
    """The first step's losses are those of transformers' LLaVA, one document after the other."""
    train = {"max_steps": 1, "output_dir": str(tmp_path / "run"), "global_batch_size": 8}
    config = merge(settings, {"train": train, "text_coef": 0.5, "image_coef": 2.0, "draw": {"prompt_dropout": 0.0}})
    config["draw"]["guidance_scale"] = 1.0
    logged = [json.loads(line) for line in (run_task_here("train_omni", config) / "metrics.jsonl").open()][-1]

    parsed = load_config(TrainOmniConfig, write_config(config, tmp_path / "config.yaml"))
    mesh, model = build_mesh(parsed.train), build_omni_model(parsed)
    printing_and_costs = (print, None, lambda length: float(length))
    loader, _, _ = open_text_data(parsed, model.tokenizer, mesh, *printing_and_costs, sight=_sight(model))
    (_, batches) = next(iter(loader.steps(from_step=0)))
    sums, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for batch in batches:
        for number in range(len(batch.document_lengths)):
            in_document = batch.document_ids[0] == number
            in_document[sum(batch.document_lengths) :] = False
            ids, labels = batch.input_ids[0, in_document], batch.labels[0, in_document]
            with torch.no_grad():
                logits = model.module.eval()(input_ids=ids[None], **batch.media[number]).logits[0]
            losses = -logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            for kind in (True, False):
                wanted = (labels != IGNORED) & (is_image(labels, model.codes) == kind)
                sums[kind] += float(losses[wanted].sum())
                counts[kind] += int(wanted.sum())
    assert counts[True] % model.image_tokenizer.num_codes == 0 and counts[True] > 0
    assert logged["loss/image"] == pytest.approx(sums[True] / counts[True], rel=1e-5)
    assert logged["loss/text"] == pytest.approx(sums[False] / counts[False], rel=1e-5)
    assert logged["loss"] == pytest.approx(2 * logged["loss/image"] + 0.5 * logged["loss/text"], rel=1e-6)


def test_hidden_prompts_and_guidance(settings: dict, tmp_path: Path) -> None:
    """A hidden prompt is padding up to the answer; guidance 0 draws what no prompt draws, whatever the prompt."""
    parsed = load_config(TrainOmniConfig, write_config(settings, tmp_path / "config.yaml"))
    mesh, model = build_mesh(parsed.train), build_omni_model(parsed)
    printing_and_costs = (print, None, lambda length: float(length))
    loader, validation, _ = open_text_data(parsed, model.tokenizer, mesh, *printing_and_costs, sight=_sight(model))
    model.parallelize(mesh, parsed.train)
    (_, batches) = next(iter(loader.steps(from_step=0)))
    for batch in batches:
        actual = drop_prompts(batch, model.codes, 1.0, 0, 0, 0).input_ids
        before, labels, kinds = (getattr(batch, name) for name in ("input_ids", "labels", "modality_ids"))
        for number in range(len(batch.document_lengths)):
            in_document = batch.document_ids[0] == number
            in_document[sum(batch.document_lengths) :] = False
            draws = is_image(labels[0, in_document], model.codes).any()
            prompt = (labels[0, in_document] != IGNORED).cumsum(0) - (labels[0, in_document] != IGNORED).long() == 0
            expected = torch.where(prompt & (kinds[0, in_document] == 0) & draws, 0, before[0, in_document])
            assert torch.equal(actual[0, in_document], expected)
    drawing = [prompt for prompt in validation.prompts if any(token in model.codes for token in prompt.answer)]
    drawing = [prompt for prompt in drawing if prompt.images is None]
    one, other = drawing[0], drawing[-1]
    assert one.input_ids != other.input_ids and len(one.input_ids) == len(other.input_ids)
    free, guided = (draw_images(model, [one, other], scale, 0.0, 0) for scale in (0.0, 1.0))
    assert np.array_equal(free[0], free[1]) and not np.array_equal(guided[0], free[0])


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(settings: dict, whole: Path, tmp_path: Path) -> None:
    assert_same_run(resume_after_kill("train_omni", settings, tmp_path), whole)


def test_parts_of_an_export_and_its_projector_are_the_model_again(settings: dict, whole: Path, tmp_path: Path) -> None:
    folder = whole / "hf_ckpt"
    model = {
        "foundation": {"config_path": None, "model_path": str(folder / "foundation")},
        "encoder": {"config_path": None, "model_path": str(folder / "encoder")},
        "projector": str(folder),
        "tokenizer_path": None,
        "image_tokenizer": str(folder / "image_tokenizer"),
        "freeze": ["language_model|lm_head", "vision_tower"],
    }
    config = merge(settings, {"model": model, "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1}})
    again = run_task_here("train_omni", config)
    first, last = (_evaluated(run, step) for run, step in ((again, 0), (whole, 6)))
    assert first == last
    before, after = (weights_in(run / "hf_ckpt") for run in (whole, again))
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all("projector" in name for name in changed)


@pytest.mark.slow
def test_what_is_drawn_in_rl_is_rewarded_as_an_image(whole: Path, tmp_path: Path) -> None:
    """Codes are the tokens that are learned from; an answer among which are others is a blank image."""
    folder = whole / "hf_ckpt"
    base = tiny_text_rl_config(tmp_path)
    rollout = {"kind": {"type": "drawing", "image_tokenizer": str(folder / "image_tokenizer")}, "max_new_tokens": 4}
    parts = {"rollout": rollout, "reward": {"rewards": [{"type": "brightness"}]}}
    data = {"data": {"synthetic": {"problem": "draw"}, "chat_template": None}, "train": {"max_steps": 2}}
    config = merge(base, parts | data)
    config["model"] = {"model_path": str(folder / "foundation")}
    config["data"].pop("chat_template")
    config["data"]["synthetic"].pop("max_length")
    lines = [json.loads(line) for line in (run_task_here("rl_text", config) / "metrics.jsonl").open()]
    assert lines[-1]["step"] == 2 and 0 <= lines[-1]["reward/brightness"] <= 1

    tokenizer = AutoTokenizer.from_pretrained(folder / "foundation")
    first = tokenizer.convert_tokens_to_ids(CODE.format(0))
    codes = [3, 0, 7, 5]
    kind = DrawingKind(image_tokenizer=rollout["kind"]["image_tokenizer"])
    template = SimpleNamespace(tokenizer=tokenizer, reader=None)
    kind.prepare(template)
    prompt = TextPrompt((5, 6), "Draw it.", None)
    texts = ["".join(CODE.format(code) for code in codes), CODE.format(0) * 2 + "a" + CODE.format(0)]
    other = tokenizer("a")["input_ids"][0]
    for token_ids, is_whole in (([first + code for code in codes], True), ([first, first, other, first], False)):
        engine, keys, limits = ScriptedEngine(tokenizer, [texts.pop(0)]), SampleKeys(0, 0, 0), LengthLimits(8, 64)
        drawn = asyncio.run(kind.draw(engine, prompt, keys, Sampling(), template, limits))
        (sequence,) = drawn.sequences
        assert sequence.token_ids[sequence.drawn].tolist() == token_ids
        model = VQModel.from_pretrained(folder / "image_tokenizer")
        latents = model.quantize.get_codebook_entry(torch.tensor(codes), (1, 2, 2, 4))
        pixels = model.decode(latents, force_not_quantize=True).sample[0].permute(1, 2, 0).detach()
        expected = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().numpy() if is_whole else 255
        image = drawn.sample(prompt, 0).image
        assert image.shape == (8, 8, 3) and (image == expected).all()
    with pytest.raises(ConfigError, match="at least 4"):
        asyncio.run(kind.draw(engine, prompt, keys, Sampling(), template, LengthLimits(3, 64)))


def _evaluated(run: Path, step: int) -> dict[str, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(
        {name: line[name] for name in line if name.startswith("eval/")} for line in lines if line["step"] == step
    )


def _sight(model):
    from sfumato.models.estimate.flops import FlopCount

    return FlopCount(model.module, model.vision).sight
