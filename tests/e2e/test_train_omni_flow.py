"""tasks/train_omni.py with a flow head: what its losses are, what it exports, a kill, RL of what it exports."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration

from sfumato.algorithms.flow_matching import draw_sigma
from sfumato.algorithms.noise import keyed_normal, keyed_uniform
from sfumato.config.load import load_config, merge
from sfumato.config.omni import TrainOmniConfig
from sfumato.config.sections import ModelConfig
from sfumato.data.media.pictures import read_image
from sfumato.data.text.loader import open_text_data
from sfumato.data.text.prompt_dropout import is_image
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.estimate.flops import FlopCount
from sfumato.models.omni.load import build_omni_model
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import build_mesh
from sfumato.rollout.text.image_generation import draw_images
from tests.resumed import assert_same_run, resume_after_kill
from tests.tiny import run_task_here, tiny_rl_config, weights_in, write_config
from tests.tiny_omni import tiny_flow_config, tiny_omni_config
from tests.tiny_vision import data_url, picture

FAMILY = "sfumato.models.omni.pipeline:LanguageToImage"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return tiny_flow_config(tmp_path_factory.mktemp("flow"), train={"save_steps": 2})


@pytest.fixture(scope="module")
def whole(settings: dict) -> Path:
    return run_task_here("train_omni", settings)


def opened(settings: dict, folder: Path):
    parsed = load_config(TrainOmniConfig, write_config(settings, folder / "config.yaml"))
    mesh, model = build_mesh(parsed.train), build_omni_model(parsed)
    printing_and_costs = (print, None, lambda length: float(length))
    data = open_text_data(
        parsed, model.tokenizer, mesh, *printing_and_costs, sight=FlopCount(model.module, model.vision).sight
    )
    return parsed, mesh, model, data


def test_the_loss_is_flow_matching_told_hidden_states_of_transformers(settings: dict, tmp_path: Path) -> None:
    """The first step's losses are those of LLaVA and the head, one document after the other."""
    train = {"max_steps": 1, "output_dir": str(tmp_path / "run"), "global_batch_size": 8}
    config = merge(settings, {"train": train, "text_coef": 0.5, "image_coef": 2.0, "draw": {"prompt_dropout": 0.0}})
    logged = [json.loads(line) for line in (run_task_here("train_omni", config) / "metrics.jsonl").open()][-1]

    parsed, _, model, (loader, _, _) = opened(config, tmp_path)
    (_, batches) = next(iter(loader.steps(from_step=0)))
    vae = AutoencoderKL.from_pretrained(parsed.model.image_tokenizer)
    text, images, count, tokens = 0.0, [], 0, 0
    for batch in batches:
        for number, sample_id in enumerate(batch.sample_ids):
            in_document = batch.document_ids[0] == number
            in_document[sum(batch.document_lengths) :] = False
            ids, labels = batch.input_ids[0, in_document], batch.labels[0, in_document]
            media = {name: value for name, value in batch.media[number].items() if name != "drawn_latents"}
            with torch.no_grad():
                result = model.module.eval()(input_ids=ids[None], output_hidden_states=True, **media)
            drawn = is_image(labels, model.codes)
            written = (labels != IGNORED) & ~drawn
            losses = -result.logits[0].log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            text, tokens = text + float(losses[written].sum()), tokens + int(written.sum())
            for index, latents in enumerate(batch.media[number].get("drawn_latents", ())):
                assert latents.shape == (vae.config.latent_channels, 2, 2)
                for key in ([4 * (1024 * sample_id + index) + noise] for noise in range(4)):
                    uniform = keyed_uniform(parsed.train.seed, "sigma", 0, key)
                    sigma = draw_sigma(uniform, "logit_normal", 0.0, 1.0, 1.0)
                    noise = keyed_normal(latents.shape, parsed.train.seed, "noise", 0, key, latents.device)[0]
                    hidden = result.hidden_states[-1][:, drawn]
                    head_inputs = ((1 - sigma) * latents + sigma * noise)[None], hidden, hidden.mean(1), sigma * 1000
                    with torch.no_grad():
                        velocity = model.module.flow_head(*head_inputs, return_dict=False)[0][0]
                    images.append(float(((velocity - (noise - latents)) ** 2).mean()) / 4)
                count += 1
    assert count > 1
    assert logged["loss/image"] == pytest.approx(sum(images) / count, rel=1e-5)
    assert logged["loss/text"] == pytest.approx(text / tokens, rel=1e-5)
    assert logged["loss"] == pytest.approx(2 * logged["loss/image"] + 0.5 * logged["loss/text"], rel=1e-6)


@pytest.mark.slow
def test_latents_are_those_of_the_images_that_are_drawn(settings: dict, tmp_path: Path) -> None:
    _, _, model, (loader, _, _) = opened(settings, tmp_path)
    results = [media["drawn_latents"] for _, batches in loader.steps(from_step=0) for batch in batches
             for media in batch.media if "drawn_latents" in media]  # fmt: skip
    assert len({tuple(tensor.flatten().tolist()) for tensor in results}) > 3  # each picture has its own
    pictures = model.image_tokenizer.decode(results[0])
    assert pictures.shape == (len(results[0]), 8, 8, 3) and pictures.dtype == np.uint8


@pytest.mark.slow
def test_each_part_of_the_export_is_what_its_library_loads(settings: dict, whole: Path, tmp_path: Path) -> None:
    folder = whole / "hf_ckpt"
    for cls, part in ((LlavaForConditionalGeneration, ""), (AutoModelForCausalLM, "foundation")):
        _, info = cls.from_pretrained(folder / part, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again = {"head": {"model_path": str(folder / "drawing" / "transformer"), "config_path": None}}
    again |= {"foundation": {"model_path": str(folder / "foundation"), "config_path": None}, "tokenizer_path": None}
    again |= {"encoder": {"model_path": str(folder / "encoder"), "config_path": None}, "projector": str(folder)}
    again |= {"image_tokenizer": str(folder / "image_tokenizer")}
    parsed, mesh, model, (_, validation, _) = opened(merge(settings, {"model": again}), tmp_path)
    model.parallelize(mesh, parsed.train)
    drawing = [prompt for prompt in validation.prompts if any(token in model.codes for token in prompt.answer)]
    # one image, which is the one that is drawn
    prompt = next(prompt for prompt in drawing if len(prompt.images.shapes) == 1)
    text = model.tokenizer.decode(prompt.input_ids, skip_special_tokens=True).split("user\n")[1].split("\n")[0]

    config = ModelConfig(model_path=str(folder / "drawing"), family=FAMILY)
    alone = build_diffusion_model(config)
    conditioning = alone.encode_prompts([text], with_negative=False)
    noise = keyed_normal(alone.latent_shape(8, 8), 3, "drawn latents", 0, [0], alone.device)
    sigmas, latents = torch.linspace(1, 0, 21), noise
    with torch.no_grad():
        for now, then in pairwise(sigmas):
            latents = latents + alone.predict_velocity(latents, now[None], conditioning) * (then - now)
    expected = draw_images(model, [prompt], 1.0, 1.0, 3)[0].astype(int)
    assert np.abs(alone.decode(latents)[0].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1
    with pytest.raises(ValueError, match="8 x 8 pixels alone"):
        alone.latent_shape(16, 16)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(settings: dict, whole: Path, tmp_path: Path) -> None:
    assert (whole / "hf_ckpt/drawing/transformer").is_dir()
    assert_same_run(resume_after_kill("train_omni", settings, tmp_path), whole)


@pytest.mark.slow
def test_what_draws_is_trained_by_rl_on_trajectories(whole: Path, tmp_path: Path) -> None:
    config = tiny_rl_config(tmp_path)
    folder = whole / "hf_ckpt" / "drawing"
    config["model"] = {"model_path": str(folder), "family": FAMILY}
    config["rollout"] |= {"height": 8, "width": 8, "guidance_scale": 1.0}
    run = run_task_here("rl_diffusion", config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert lines[-1]["step"] > 1
    assert [line["ratio/replay_error"] < 1e-5 for line in lines if line["step"]] == [True] * lines[-1]["step"]
    for part, changes in (("transformer", True), ("text_encoder", False), ("vae", False)):
        before, after = weights_in(folder / part), weights_in(run / "hf_ckpt" / part)
        assert (before != after) == changes, part


WRONG = {
    "another autoencoder": ({"model": {"image_tokenizer": "VQ"}}, "AutoencoderKL"),
    "a head of other latents": ({"model": {"head": {"in_channels": 8}}}, "its in_channels is 8, but must be 4"),
    "an unknown key": ({"model": {"head": {"layers": 8}}}, "unknown key"),
    "a temperature": ({"draw": {"temperature": 0.5}}, "draw.temperature is of codes"),
    "fsdp1": ({"train": {"data_parallel_mode": "fsdp1"}}, "fsdp1 cannot gather model.head"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(settings: dict, tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    config = merge(settings, {})
    changes = json.loads(json.dumps(changes))
    if changes.get("model", {}).get("image_tokenizer"):
        changes["model"]["image_tokenizer"] = str(tmp_path)
    if head := changes.get("model", {}).pop("head", None):
        described = tiny_flow_config(tmp_path / "other")["model"]["head"]["config_path"]
        text = Path(described).read_text(encoding="utf-8")
        Path(described).write_text(text + "".join(f"{key}: {value}\n" for key, value in head.items()), encoding="utf-8")
        changes["model"]["head"] = {"config_path": described}
    with pytest.raises(ConfigError, match=message):
        build_omni_model(load_config(TrainOmniConfig, overrides=merge(config, changes)))


@pytest.mark.parametrize("make", [tiny_omni_config, pytest.param(tiny_flow_config, marks=pytest.mark.slow)])
def test_images_that_are_seen_after_one_is_drawn_are_those(tmp_path: Path, make) -> None:
    """Of rows that are tokenised before, and read again when a batch is made."""
    config, pictures = make(tmp_path), [data_url(picture(16, 16, seed)) for seed in range(3)]
    drawn, seen, last = ({"type": "image", "image": picture} for picture in pictures)
    messages = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [drawn]}]
    messages += [
        {"role": "user", "content": [seen, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [last]},
    ]
    row = json.dumps({"messages": messages})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 4, encoding="utf-8")
    _, _, model, (loader, _, _) = opened(config, tmp_path)
    batch = next(iter(loader.steps(from_step=0)))[1][0]
    expected = model.vision.reader.process_opened(
        [read_image(base64.b64decode(pictures[1].partition(",")[2]), "a test")]
    )
    assert torch.equal(batch.media[0]["pixel_values"], expected["pixel_values"])
    if model.has_head:
        assert len(batch.media[0]["drawn_latents"]) == 2
