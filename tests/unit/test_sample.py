"""``sfumato sample``: what a run's checkpoints and exports draw, beside each other, as files and a page."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers import StableDiffusion3Pipeline
from diffusers.configuration_utils import FrozenDict
from PIL import Image
from safetensors.torch import load_file, save_file

from sfumato.cli import main
from sfumato.config.load import merge
from sfumato.errors import ConfigError
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.pictures import PictureModel, default_settings, read_prompts_file
from sfumato.evaluation.samples_folder import NamedSample, SamplesFolder
from sfumato.models.diffusion.adapter_files import ADAPTER_FILE, load_from_diffusers
from sfumato.models.diffusion.load import find_families
from sfumato.rewards.base import Sample
from sfumato.rollout.engines.embedded import engine
from sfumato.tracking.samples import read_samples, step_folder
from sfumato.tracking.waveforms import Waveform
from tests.tiny import run_task_here, tiny_dit_config, tiny_rl_config, tiny_text_config, tiny_text_rl_config

LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"lr": 0.02}}


def sample(*arguments):
    return main(["sample", *map(str, arguments)])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def by_model(folder):
    rows = {}
    for row in rows_of(folder):
        rows.setdefault(row["model"], []).append(row)
    return rows


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))


def run_pictures(run, step):
    """The pictures that a run's evaluation has saved, by number of the prompt."""
    rows = [row for row in read_samples(run)[step] if row["kind"] == "eval"]
    return {row["sample_id"]: pixels(step_folder(run, step) / row["file"]) for row in rows}


@pytest.fixture(scope="module")
def rl_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    settings = {"train": {"max_steps": 2, "lr": 0.05}, "eval": {"every_steps": 1, "num_prompts": 2}}
    return run_task_here("rl_diffusion", tiny_rl_config(folder, **merge(LORA, settings)))


def test_pictures_of_a_run_are_those_of_its_evaluations_to_the_bit(rl_run, tmp_path, capsys):
    assert sample(rl_run, "--out", tmp_path / "out") == 0
    rows = by_model(tmp_path / "out")
    assert [*rows] == ["base", "step 2"]
    for model, step in (("base", 0), ("step 2", 2)):
        expected = run_pictures(rl_run, step)
        assert len(rows[model]) == len(expected) == 2
        for row in rows[model]:
            np.testing.assert_array_equal(pixels(tmp_path / "out" / row["file"]), expected[row["sample_id"]])
            assert row["seed"] == 1234
    assert any(
        (pixels(tmp_path / "out" / base["file"]) != pixels(tmp_path / "out" / trained["file"])).any()
        for base, trained in zip(rows["base"], rows["step 2"], strict=True)
    )
    assert "written: " in capsys.readouterr().out


def test_the_page_shows_every_picture_beside_the_base_and_loads_nothing(rl_run, tmp_path):
    sample(rl_run, "--out", tmp_path / "out", "--num-prompts", 2, "--samples", 2)
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert text.count("<img") == 2 * 2 * 2
    assert ">base</th>" in text and ">step 2</th>" in text
    assert "seed 1234" in text and "seed 1235" in text
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text


def test_an_export_draws_what_its_checkpoint_does(rl_run, tmp_path):
    sample(rl_run / "hf_ckpt", "--no-base", "--out", tmp_path / "export")
    sample(rl_run / "checkpoints" / "global_step_2", "--no-base", "--out", tmp_path / "checkpoint")
    exported, stored = rows_of(tmp_path / "export"), rows_of(tmp_path / "checkpoint")
    assert [row["prompt"] for row in exported] == [row["prompt"] for row in stored]
    for entry, other in zip(exported, stored, strict=True):
        left = pixels(tmp_path / "export" / entry["file"]).astype(int)
        right = pixels(tmp_path / "checkpoint" / other["file"]).astype(int)
        assert abs(left - right).max() <= 1  # the adapter's scale is folded into its weights


def test_grids_of_pretraining_and_all_checkpoints(tmp_path):
    settings = {"train": {"max_steps": 2, "save_steps": 1, "lr": 0.05}, "sample": {"every_steps": 1}}
    run = run_task_here("train_dit", tiny_dit_config(tmp_path, **settings))
    assert sample(run / "checkpoints", "--out", tmp_path / "out") == 0
    rows = by_model(tmp_path / "out")
    assert [*rows] == ["base", "step 1", "step 2"]
    for step in (1, 2):
        for row in rows[f"step {step}"]:
            np.testing.assert_array_equal(
                pixels(tmp_path / "out" / row["file"]), run_pictures(run, step)[row["sample_id"]]
            )
    sample(run / "hf_ckpt", "--no-base", "--prompt", rows["step 2"][0]["prompt"], "--out", tmp_path / "export")
    (row,) = rows_of(tmp_path / "export")
    np.testing.assert_array_equal(pixels(tmp_path / "export" / row["file"]), run_pictures(run, 2)[0])


def test_prompts_of_the_command_line_and_of_a_file(rl_run, tmp_path):
    settings = ("--no-base", "--steps", 1, "--seed", 7, "--height", 32)
    sample(rl_run, "--prompt", 'write "AB"', "--prompt", "b", *settings, "--out", tmp_path / "typed")
    rows = rows_of(tmp_path / "typed")
    assert [(row["prompt"], row["seed"]) for row in rows] == [('write "AB"', 7), ("b", 7)]
    assert pixels(tmp_path / "typed" / rows[0]["file"]).shape == (32, 16, 3)
    (tmp_path / "prompts.txt").write_text('write "AB"\nb\n', encoding="utf-8")
    sample(rl_run, "--prompts", tmp_path / "prompts.txt", *settings, "--out", tmp_path / "filed")
    for row, other in zip(rows, rows_of(tmp_path / "filed"), strict=True):
        np.testing.assert_array_equal(
            pixels(tmp_path / "typed" / row["file"]), pixels(tmp_path / "filed" / other["file"])
        )


def test_answers_of_a_run_are_those_of_its_evaluation(tmp_path, monkeypatch):
    settings = {"train": {"max_steps": 2, "lr": 0.05}, "eval": {"num_saved": 4}}
    run = run_task_here("rl_text", tiny_text_rl_config(tmp_path, **settings))
    tried = []
    choose = engine.choose_rows
    monkeypatch.setattr(engine, "choose_rows", lambda *arguments: (tried.append(1), choose(*arguments))[1])
    assert sample(run, "--trust-code", "--out", tmp_path / "out") == 0
    assert tried == [1]  # the engine of the base is that of the checkpoint
    rows = by_model(tmp_path / "out")
    saved = read_samples(run)
    for model, step in (("base", 0), ("step 2", 2)):
        expected = {row["sample_id"]: row["text"] for row in saved[step] if row["kind"] == "eval"}
        assert {row["sample_id"]: row["text"] for row in rows[model]} == expected
        assert (tmp_path / "out" / rows[model][0]["file"]).read_text(encoding="utf-8") == rows[model][0]["text"]
    assert [row["text"] for row in rows["base"]] != [row["text"] for row in rows["step 2"]]


def test_answers_of_fine_tuning_and_of_its_adapters(tmp_path, monkeypatch, capsys):
    base = run_task_here("train_text", tiny_text_config(tmp_path / "base", train={"max_steps": 2, "lr": 0.02}))
    model = {"model_path": str(base / "hf_ckpt"), "config_path": None, "tokenizer_path": None}
    settings = merge(LORA, {"model": model, "train": {"max_steps": 3, "lr": 0.1}})
    run = run_task_here("train_text", tiny_text_config(tmp_path / "tuned", **settings))
    sample(run, "--out", tmp_path / "run")
    rows = by_model(tmp_path / "run")
    assert len(rows["base"]) == 1 and rows["base"][0]["prompt"] == rows["step 3"][0]["prompt"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "reverse abc"}\n{"prompt": "reverse xy"}\n', encoding="utf-8")
    for name, source in (("adapter", run / "hf_ckpt"), ("checkpoint", run), ("plain", base / "hf_ckpt")):
        options = ("--no-base", "--temperature", 0, "--max-new-tokens", 6, "--prompts", prompts)
        assert sample(source, *options, "--out", tmp_path / name) == 0
    texts = {name: [row["text"] for row in rows_of(tmp_path / name)] for name in ("adapter", "checkpoint", "plain")}
    assert texts["adapter"] == texts["checkpoint"] != texts["plain"]
    assert sample(base / "hf_ckpt", "--prompt", "a", "--image", tmp_path / "a.png", "--out", tmp_path / "seen") == 2
    assert "--image: this model sees no images" in capsys.readouterr().err
    monkeypatch.setattr("sfumato.evaluation.texts.build_language_model", None)  # refused before a model is loaded
    shutil.copytree(base / "hf_ckpt", tmp_path / "of nobody")
    assert sample(tmp_path / "of nobody", "--no-base") == 2 and "no prompts of its own" in capsys.readouterr().err


def test_nothing_is_overwritten_and_folders_are_numbered(rl_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = rl_run.absolute()
    for _ in range(2):
        assert sample(run, "--no-base", "--num-prompts", 1) == 0
    assert (tmp_path / "samples-1" / "index.html").is_file() and (tmp_path / "samples-2" / "index.html").is_file()
    assert sample(run, "--out", tmp_path / "samples-1") == 2
    assert "samples-1 exists and is not empty" in capsys.readouterr().err


WRONG = {
    "a folder that does not exist": (["nowhere"], "nowhere does not exist"),
    "an empty folder": (["empty"], "holds no model: give a run folder"),
    "a file": (["file"], "file is a file; give a run folder"),
    "an image without a prompt": (["run", "--image", "file"], "--image is for --prompt"),
    "a file and a prompt": (["run", "--prompt", "a", "--prompts", "file"], "leave --prompt and --image out"),
    "prompts that do not exist": (["run", "--prompts", "nothing.txt"], "nothing.txt"),
    "a size that the model cannot make": (["run", "--height", "17"], "cannot make that"),
    "weights without prompts": (["pipeline"], "give --prompt TEXT or --prompts FILE"),
    "a setting of texts": (["run", "--top-k", "3"], "--top-k has no effect on models that draw pictures"),
    "a setting of folders": (["run", "--dtype", "bf16"], "--dtype has no effect on a run"),
    "adapters of nobody": (["adapters", "--prompt", "a"], "give its pipeline folder as --base"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_sampled_is_said(name, rl_run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no picture", encoding="utf-8")
    shutil.copytree(rl_run / "hf_ckpt", tmp_path / "adapters")
    places = {"run": rl_run, "pipeline": rl_run.parent / "pipeline"}
    words, message = WRONG[name]
    below_tmp_path = ("empty", "file", "adapters", "nowhere", "nothing.txt")
    arguments = [places.get(word, tmp_path / word if word in below_tmp_path else word) for word in words]
    assert sample(*arguments, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_passed_over_or_refused(rl_run, tmp_path, capsys):
    run = shutil.copytree(rl_run, tmp_path / "run")
    path = run / "checkpoints" / "global_step_2" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert sample(path.parent, "--out", tmp_path / "out") == 3
    assert "bytes instead of" in capsys.readouterr().err


def test_videos_are_played_by_browsers_and_other_programs(tmp_path):
    cv2 = pytest.importorskip("cv2", reason="the extra video")
    video = np.zeros((9, 48, 64, 3), np.uint8)
    video[..., 0] = 200
    video[1, :, :, 1] = 20  # equal frames are stored as one
    folder = SamplesFolder(tmp_path)
    shown = Sample(
        image=video, prompt="<b>red</b>", group_id=0, source=np.full((48, 64, 3), 90, np.uint8), frame_rate=8.0
    )
    folder.add(NamedSample("base", 0, 1, shown))
    folder.write_page([])
    (row,) = rows_of(tmp_path)
    capture = cv2.VideoCapture(str(tmp_path / row["file"]))
    assert capture.get(cv2.CAP_PROP_FPS) == 8.0
    with Image.open((tmp_path / row["file"]).with_suffix(".webp")) as animation:
        animation.seek(1)
        animation.load()
        assert animation.info["duration"] == 125
    frames = [capture.read() for _ in range(10)]
    assert [is_read for is_read, _ in frames] == [True] * 9 + [False]
    assert frames[0][1][..., 2].mean() == pytest.approx(200, abs=8) and frames[0][1][..., :2].mean() < 8
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/webp") == 1 and page.count("data:image/png") == 1 and "<b>red" not in page


@pytest.mark.parametrize(("package", "has_sound"), [("cv2", False), ("av", True)])
def test_videos_without_mp4_are_said(package, has_sound, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    frames = np.zeros((3, 32, 32, 3), np.uint8)
    waveform = Waveform(np.zeros((1, 8000), np.int16), 16000) if has_sound else None
    folder = SamplesFolder(tmp_path)
    video = Sample(image=frames, prompt="red", group_id=0, sound=waveform, frame_rate=6.0 if has_sound else 0.0)
    folder.add(NamedSample("base", 0, 1, video))
    assert "pip install 'sfumato[video]'" in folder.left_out
    (row,) = rows_of(tmp_path)
    assert row["file"].endswith(".webp") and (tmp_path / row["file"]).is_file()
    assert not list(tmp_path.rglob("*.mp4"))


def test_an_interruption_leaves_what_was_finished(rl_run, tmp_path, monkeypatch, capsys):
    draw = PictureModel.draw
    calls = []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(self, *arguments)

    monkeypatch.setattr(PictureModel, "draw", interrupted)
    assert sample(rl_run, "--out", tmp_path / "out") == 130
    assert {row["model"] for row in rows_of(tmp_path / "out")} == {"base"}
    assert "interrupted: 2 samples are written" in capsys.readouterr().err
    assert "samples are missing" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "None"])
def test_prompts_of_a_file_without_a_name_are_an_error_of_the_option(name):
    with pytest.raises(ConfigError, match=f"--prompts '{name}'"):
        read_prompts_file(name, None, None)


@pytest.mark.parametrize(
    ("name", "other"), [("attn.to_q", "attn.to_query"), ("transformer.", ""), (".lora_A", ".alpha")]
)
def test_adapters_that_the_model_has_no_place_for_are_refused(rl_run, tmp_path, name, other):
    """They were left out without a word, or ended in a traceback."""
    stored = load_file(rl_run / "hf_ckpt" / ADAPTER_FILE)
    (tmp_path / "adapter").mkdir()
    save_file(
        {key.replace(name, other, 1): value for key, value in stored.items()}, tmp_path / "adapter" / ADAPTER_FILE
    )
    model = StableDiffusion3Pipeline.from_pretrained(rl_run.parent / "pipeline")
    with pytest.raises(ConfigError, match=r"cannot be loaded into this StableDiffusion3Pipeline: .*Give the model"):
        load_from_diffusers(model, tmp_path / "adapter")


OWN_GUIDANCE = [
    ("StableDiffusion3Pipeline", {}, 7.0),
    ("QwenImagePipeline", {}, 4.0),
    ("FluxPipeline", {"guidance_embeds": True}, 3.5),
    ("FluxPipeline", {"guidance_embeds": False}, 1.0),
    ("Flux2KleinPipeline", {"is_distilled": False}, 4.0),
    ("Flux2KleinPipeline", {"is_distilled": True}, 1.0),
    ("Krea2Pipeline", {"is_distilled": False}, 5.5),
    ("Krea2Pipeline", {"is_distilled": True}, 1.0),
    ("ZImagePipeline", {}, 6.0),
    ("Ideogram4Pipeline", {}, 7.0),
    ("HunyuanVideo15Pipeline", {}, 6.0),
]


@pytest.mark.parametrize(("name", "settings", "scale"), OWN_GUIDANCE)
def test_folders_are_drawn_with_the_guidance_of_their_pipeline(name, settings, scale):
    family = find_families()[name]
    model = object.__new__(family)
    model.pipeline = object.__new__(family.pipeline_type())
    model.pipeline.register_to_config(**settings)
    model.pipeline.guider = SimpleNamespace(guidance_scale=6.0) if name.startswith("Hunyuan") else None
    model.pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**settings))
    assert model.default_guidance == scale


@pytest.mark.parametrize(
    ("name", "denoiser", "size", "frames", "tokens"),
    [
        ("StableDiffusionPipeline", {"sample_size": 96}, (768, 768), 1, 256),
        ("CogVideoXPipeline", {"sample_height": 60, "sample_width": 90, "sample_frames": 49}, (480, 720), 49, 226),
        ("FluxPipeline", {"guidance_embeds": True}, (1024, 1024), 1, 512),
        ("WanPipeline", {}, (480, 832), 81, 512),
    ],
)
def test_folders_are_drawn_in_the_size_of_their_pipeline(name, denoiser, size, frames, tokens):
    family = find_families()[name]
    model = object.__new__(family)
    model.pipeline = object.__new__(family.pipeline_type())
    model.pipeline.guider = None
    model.pipeline.vae_scale_factor = 8
    if name == "FluxPipeline":
        model.pipeline.default_sample_size = 128
    setattr(model.pipeline, family.denoiser_name, SimpleNamespace(config=FrozenDict(denoiser)))
    settings = default_settings(model, GenerationOptions())
    assert (settings.height, settings.width, settings.num_frames) == (*size, frames)
    assert family.prompt_length(None) == tokens
