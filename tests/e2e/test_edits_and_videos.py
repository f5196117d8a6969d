"""Edits, videos and image-to-video through the same tasks as images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.config.load import merge
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import read_pipeline_class
from sfumato.rewards.base import Sample
from sfumato.rewards.pixels import Brightness
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples, step_folder
from tests import tiny_families
from tests.resumed import assert_same_run, resume_after_interrupt
from tests.tiny import (
    load_task,
    rl_task,
    run_task_here,
    tiny_dit_config,
    tiny_rl_config,
    weights_in,
    write_tiny_pipeline,
)


@dataclass(frozen=True)
class Case:
    """A family with what its runs need."""

    describe: Callable[[], dict[str, Any]]
    size: tuple[int, int, int] = (16, 16, 1)
    tokens: int = 7
    rollout: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


CASES = {
    "flux_kontext": Case(tiny_families.tiny_flux_kontext, rollout={"guidance_scale": 2.5}),
    "qwen_image_edit": Case(tiny_families.tiny_qwen_image_edit, (32, 64, 1), 24, needs="torchvision"),
    "qwen_image_edit_plus": Case(tiny_families.tiny_qwen_image_edit_plus, (32, 64, 1), 40, needs="torchvision"),
    "wan": Case(tiny_families.tiny_wan, (16, 16, 5), rollout={"guidance_scale": 3.0}),
    "wan_pair": Case(
        tiny_families.tiny_wan_pair, (16, 16, 5), rollout={"guidance_scale": 3.0, "guidance_scale_2": 2.0}
    ),
    "wan_image": Case(tiny_families.tiny_wan_image, (16, 16, 5), 512),
    "wan_image_small": Case(tiny_families.tiny_wan_image_small, (32, 32, 5)),
    "hunyuan_video15_image": Case(tiny_families.tiny_hunyuan_video15_image, (16, 16, 5), 80),
    "kandinsky5_image": Case(tiny_families.tiny_kandinsky5_image, (32, 48, 1), 24, needs="torchvision"),
    "kandinsky5_video_image": Case(tiny_families.tiny_kandinsky5_video_image, (32, 48, 5), 24, needs="torchvision"),
}

OTHERS = {
    "flux2_klein": Case(tiny_families.tiny_flux2_klein, tokens=24),
    "flux_fill": Case(tiny_families.tiny_flux_fill, rollout={"guidance_scale": 2.5}),
    "wan_image_pair": Case(tiny_families.tiny_wan_image_pair, (16, 16, 5)),
    "wan_first_last": Case(tiny_families.tiny_wan_first_last, (16, 16, 5), 512),
}
"""Cases of single tests."""


def case_of(name: str) -> Case:
    return OTHERS[name] if name in OTHERS else CASES[name]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folders of tiny pipelines, made once each."""
    root = tmp_path_factory.mktemp("pipelines")

    def folder_of(name: str) -> Path:
        if case_of(name).needs:
            pytest.importorskip(case_of(name).needs)
        return write_tiny_pipeline(root / name, described=case_of(name).describe())

    return folder_of


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ("", False)
    monkeypatch.setattr("sfumato.tracking.report.curve_sections", lambda series: nothing)  # most of a report's time


def rl_config(name: str, pipeline: Path, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    case = case_of(name)
    (tmp_path / "pipeline").symlink_to(pipeline)
    height, width, frames = case.size
    config = tiny_rl_config(
        tmp_path,
        model={"max_sequence_length": case.tokens, "lora": {"rank": 4, "alpha": 8}},
        rollout={"num_prompts": 2, "height": height, "width": width, "num_frames": frames, **case.rollout},
        reward={"rewards": [{"type": "brightness", "frame_step": 2}]},
        train={"max_steps": 2, "micro_batch_size": 4, "global_batch_size": 8, "lr_warmup_steps": 0},
        eval={"every_steps": 2},
    )
    return merge(config, overrides)


def dit_config(name: str, pipeline: Path, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    case = case_of(name)
    (tmp_path / "pipeline").symlink_to(pipeline)
    height, width, frames = case.size
    config = tiny_dit_config(
        tmp_path,
        model={"max_sequence_length": case.tokens},
        data={"height": height, "width": width, "num_frames": frames},
        train={"max_steps": 3},
    )
    return merge(config, overrides)


@pytest.mark.parametrize("recipe", ["flow_grpo_fast", pytest.param("diffusion_nft", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_rl(name: str, recipe: str, pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    pipeline = pipelines(name)
    config = rl_config(name, pipeline, tmp_path)
    if recipe == "diffusion_nft":
        config["algorithm"] = {"recipe": recipe}
        config["rollout"] |= {"guidance_scale": 1.0, "guidance_scale_2": None}
    run = run_task_here(rl_task(recipe), config, with_report=True)

    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
        assert line["rows"] > 0 and line["grad_norm"] > 0 and line["advantage/groups_without_spread"] == 0
        assert line.get("ratio/replay_error", 0) < 1e-5
    assert_samples(run, name, step=2)
    loaded = getattr(diffusers, read_pipeline_class(pipeline)).from_pretrained(pipeline)
    if hasattr(loaded, "load_lora_weights"):
        loaded.load_lora_weights(run / "hf_ckpt")
    else:
        loaded.transformer.load_lora_adapter(run / "hf_ckpt", weight_name="pytorch_lora_weights.safetensors")


def assert_samples(run: Path, name: str, step: int) -> None:
    """Files of videos have all frames, edits stand beside their source, and the report shows both."""
    height, width, frames = case_of(name).size
    takes_image = ("image" in name and name != "qwen_image") or "kontext" in name
    page = (run / "report.html").read_text()
    rows = read_samples(run)[step]
    for row in rows:
        with Image.open(step_folder(run, step) / row["file"]) as image:
            assert (image.size, getattr(image, "n_frames", 1)) == ((width, height), frames)
        assert ("source" in row) == takes_image
        if takes_image:
            with Image.open(step_folder(run, step) / row["source"]) as image:
                assert image.size == (width, height) and np.ptp(np.asarray(image)) > 100, "a word is written there"
    assert page.count("data:image/webp") == (0 if frames == 1 else page.count("data:image/") - page.count("source: "))
    assert (page.count('alt="source: ') > 0) == takes_image


@pytest.mark.parametrize("name", CASES)
def test_supervised_training_online_and_from_a_cache(
    name: str, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    config = dit_config(name, pipelines(name), tmp_path)
    online = run_task_here("train_dit", config, with_report=True)
    lines = read_jsonl(online / "metrics.jsonl")
    assert len(lines) == 3 and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert_samples(online, name, step=3)
    cached = merge(
        config,
        {
            "train": {"output_dir": str(tmp_path / "cached")},
            "data": {"cache_dir": str(tmp_path / "cache")},
            "model": {"keep_encoders": False},
        },
    )
    assert weights_in(run_task_here("train_dit", cached) / "hf_ckpt" / "transformer") == weights_in(
        online / "hf_ckpt" / "transformer"
    )


# Data in files


def write_edits(folder: Path, count: int = 4, **changed: dict[str, Any]) -> dict[str, str]:
    """Edits with their source images beside the file, for RL; ``changed`` replaces rows (``row2=...``)."""
    rows = []
    for index in range(count):
        Image.fromarray(np.full((20, 24, 3), 40 * index, np.uint8)).save(folder / f"{index}.png")
        row = {"prompt": f'write "{"ABCD"[index]}"', "source_image": f"{index}.png", "target": "A"}
        rows.append(changed.get(f"row{index}", row))
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data_type": "prompts", "train_path": str(path), "eval_path": str(path)}


def write_several(folder: Path, counts: list[int], column: str = "image") -> Path:
    """Edits of which row k has ``counts[k]`` source images, beside the file."""
    for index in range(max(counts) + 1):
        Image.fromarray(np.full((20, 24, 3), 40 * index, np.uint8)).save(folder / f"{index}.png")
    rows = [
        {
            column: "0.png",
            "text": f'write "{"ABCD"[row % 4]}"',
            "source_image": [f"{k}.png" for k in range(1, count + 1)],
        }
        for row, count in enumerate(counts)
    ]
    path = folder / "several.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_edits_of_several_images_are_trained_and_sampled(tmp_path: Path, pipelines: Callable[[str], Path]) -> None:
    path = write_several(tmp_path, [1, 2, 3, 1, 2, 3])
    config = dit_config("flux2_klein", pipelines("flux2_klein"), tmp_path)
    config["model"]["from_images"] = True
    config["data"] = {
        "data_type": "image_text",
        "train_path": str(path),
        "height": 16,
        "width": 16,
        "max_source_images": 3,
    }
    config["train"] |= {"micro_batch_size": 2, "global_batch_size": 4}
    config["sample"] |= {"num_prompts": 3}
    run = run_task_here("train_dit", config, with_report=True)
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in read_jsonl(run / "metrics.jsonl"))
    assert read_pipeline_class(run / "hf_ckpt") == "Flux2KleinPipeline"
    for row, count in zip(read_samples(run)[3], [1, 2, 3], strict=True):
        with Image.open(step_folder(run, 3) / row["source"]) as image:
            assert image.size == (16 * count, 16), "source images stand side by side"
    drawn = []
    pipeline = pipelines("flux2_klein")
    for model in (run, run / "hf_ckpt", pipeline):
        out = tmp_path / "drawn" / str(len(drawn))
        options = (
            f"--image {tmp_path}/1.png --image {tmp_path}/2.png --steps 2 --height 16 --width 16 --seed 3 --no-base"
        )
        options += " --guidance-scale 1" + " --max-sequence-length 24" * (model == pipeline)
        assert main(["sample", str(model), "--prompt", 'write "B"', *options.split(), "--out", str(out)]) == 0
        (row,) = read_jsonl(out / "samples.jsonl")
        drawn.append([np.asarray(Image.open(out / str(row[name])).convert("RGB")) for name in ("file", "source")])
    for of_run, of_export in zip(*drawn[:2], strict=True):
        np.testing.assert_array_equal(of_run, of_export)
    assert drawn[0][1].shape == (16, 32, 3)
    assert not np.array_equal(drawn[0][0], drawn[2][0]), "trained and untrained differ"


def test_pictures_are_filled_by_masks(tmp_path: Path, pipelines: Callable[[str], Path]) -> None:
    """Supervised, with the loss inside the mask alone, from a cache as online; sampled; and by RL."""
    rows = []
    for index in range(4):
        Image.fromarray(np.full((20, 20, 3), 60 * index, np.uint8)).save(tmp_path / f"{index}.png")
        mask = np.zeros((20, 20), np.uint8)
        mask[:, 4 * index : 4 * index + 6] = 255
        Image.fromarray(mask).save(tmp_path / f"mask{index}.png")
        rows.append(
            {
                "image": f"{index}.png",
                "source_image": [f"{index}.png", f"mask{index}.png"],
                "mask": f"mask{index}.png",
                "text": f'write "{index}"',
                "prompt": f'write "{index}"',
            }
        )
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_type": "image_text", "train_path": str(path), "max_source_images": 2, "mask_key": "mask"}
    config = dit_config("flux_fill", pipelines("flux_fill"), tmp_path, data=data)
    run = run_task_here("train_dit", config)
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in read_jsonl(run / "metrics.jsonl"))
    with Image.open(step_folder(run, 3) / str(read_samples(run)[3][1]["source"])) as image:
        assert image.size == (32, 16), "the picture and its mask"
    cached = {"train": {"output_dir": str(tmp_path / "cached")}, "data": {"cache_dir": str(tmp_path / "cache")}}
    again = run_task_here("train_dit", merge(config, merge(cached, {"model": {"keep_encoders": False}})))
    assert weights_in(again / "hf_ckpt" / "transformer") == weights_in(run / "hf_ckpt" / "transformer")
    diffusers.FluxFillPipeline.from_pretrained(run / "hf_ckpt")
    config["data"]["max_source_images"] = 1
    config["train"]["output_dir"] = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="1 source images, and FluxFillPipeline takes a picture and its mask"):
        run_task_here("train_dit", config)
    prompts = {"data_type": "prompts", "train_path": str(path), "eval_path": str(path), "max_source_images": 2}
    (tmp_path / "pipeline").unlink()
    rl = rl_config("flux_fill", pipelines("flux_fill"), tmp_path, data=prompts)
    rl["train"]["output_dir"] = str(tmp_path / "rl")
    lines = read_jsonl(run_task_here("rl_diffusion", rl) / "metrics.jsonl")[1:]
    assert all(line["rows"] > 0 and line["grad_norm"] > 0 and line["ratio/replay_error"] < 1e-5 for line in lines)


@dataclass(frozen=True, kw_only=True)
class ComparesSource(Brightness):
    compares_source: ClassVar[bool] = True


def test_rl_of_edits_of_several_images(tmp_path: Path, pipelines: Callable[[str], Path]) -> None:
    path = write_several(tmp_path, [2, 2, 2, 2])
    rows = [{**json.loads(line), "prompt": f"edit {number}"} for number, line in enumerate(path.open())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_type": "prompts", "train_path": str(path), "eval_path": str(path), "max_source_images": 2}
    config = rl_config("flux2_klein", pipelines("flux2_klein"), tmp_path, data=data, model={"from_images": True})
    run = run_task_here("rl_diffusion", config)
    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert all(line["rows"] > 0 and line["grad_norm"] > 0 and line["ratio/replay_error"] < 1e-5 for line in lines)
    for row in read_samples(run)[2]:
        with Image.open(step_folder(run, 2) / row["source"]) as image:
            assert image.size == (32, 16)
    config["train"]["output_dir"] = str(tmp_path / "other")
    rows[3]["source_image"] = "1.png"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"numbers of source images differ: 1 \(.*line 4\), 2 \(.*line 1\)"):
        run_task_here("rl_diffusion", config)
    config["reward"]["rewards"] = [{"type": f"{__name__}:ComparesSource"}]
    with pytest.raises(
        ConfigError, match=r"brightness compares with one source image, and data.max_source_images is 2"
    ):
        run_task_here("rl_diffusion", config)
    config["data"]["max_source_images"] = 1
    config["reward"]["rewards"] = [{"type": "brightness"}]
    with pytest.raises(DataError, match=r"line 1: column 'source_image' holds 2 source images: at most 1"):
        run_task_here("rl_diffusion", config)
    config["model"]["from_images"] = False
    config["data"]["max_source_images"] = 2
    with pytest.raises(ConfigError, match=r"data.max_source_images 2: Flux2KleinPipeline takes no source images"):
        run_task_here("rl_diffusion", config)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("flux_kontext", {}, r"data.max_source_images 2: 2 source images, and this FluxKontextPipeline takes 1"),
        ("wan", {"from_images": True}, r"model.from_images: WanPipeline makes samples from text alone here"),
    ],
)
def test_several_images_are_refused_where_they_cannot_be(
    name: str, model: dict[str, Any], message: str, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    data = {"data_type": "image_text", "train_path": str(write_several(tmp_path, [1])), "max_source_images": 2}
    config = dit_config(name, pipelines(name), tmp_path, model=model, data={**data, "num_frames": 1})
    with pytest.raises(ConfigError, match=message):
        run_task_here("train_dit", config)


def test_rewards_see_the_source_of_an_edit(pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    class Watched(Brightness):
        def score(self, samples: list[Sample]) -> list[float]:
            seen.extend(samples)
            return super().score(samples)

    seen: list[Sample] = []
    config = rl_config("flux_kontext", pipelines("flux_kontext"), tmp_path, data=write_edits(tmp_path))
    task = load_task("rl_diffusion")
    task.build_scorer = lambda config, with_engines=True: Scorer([Watched()])
    run_task_here(task, config)
    assert len(seen) == 2 * 8 + 2 * 2
    for sample in seen:
        letter = "ABCD".index(sample.prompt.split('"')[1])
        assert sample.source.shape == (16, 16, 3) and (sample.source == 40 * letter).all()
        assert sample.metadata == {"target": "A"}


@pytest.mark.parametrize("kind", ["column", "file", "broken"])
def test_a_source_image_that_is_missing_stops_before_sampling(
    kind: str, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    row = {"prompt": "x"} if kind == "column" else {"prompt": "x", "source_image": f"{kind}.png"}
    (tmp_path / "broken.png").write_bytes(b"junk")
    data = write_edits(tmp_path, row2=row)
    message = {
        "column": "no source image, which this model needs with every prompt",
        "file": f"image file not found: {tmp_path / 'file.png'}",
        "broken": f"broken image \\({tmp_path / 'broken.png'}\\)",
    }
    with pytest.raises(DataError, match=rf"edits.jsonl, line 3: {message[kind]}"):
        run_task_here("rl_diffusion", rl_config("flux_kontext", pipelines("flux_kontext"), tmp_path, data=data))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flux_kontext", {"num_frames": 5}, r"rollout\.num_frames 5: FluxKontextPipeline cannot make that: .*single"),
        ("wan", {"num_frames": 6}, r"rollout\.num_frames 6: .* such as 5 or 9"),
        ("wan", {"height": 20}, r"rollout\.height 20, .* must be multiples of"),
        ("wan", {"guidance_scale_2": 2.0}, r"rollout\.guidance_scale_2: this WanPipeline has no second transformer"),
        ("flux_kontext", {"guidance_scale_2": 2.0}, r"FluxKontextPipeline has no second transformer"),
        ("wan_pair", {"guidance_scale": 1.0}, r"guidance_scale_2 means nothing when rollout\.guidance_scale is 1"),
    ],
)
def test_what_a_model_cannot_make_is_refused(
    name: str, changes: dict[str, Any], message: str, pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_task_here("rl_diffusion", rl_config(name, pipelines(name), tmp_path, rollout=changes))


def test_rewards_that_compare_images_take_no_videos(pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    config = rl_config("wan", pipelines("wan"), tmp_path, rollout={"micro_batch_size": 8})
    config["reward"]["rewards"] = [{"type": "tests.unit.test_rewards_scorer:RankInGroup"}]
    with pytest.raises(ConfigError, match=r"reward .RankInGroup. compares the images of a group and takes no videos"):
        run_task_here("rl_diffusion", config)


def test_frames_are_refused_by_an_image_model_in_supervised_training(
    pipelines: Callable[[str], Path], tmp_path: Path
) -> None:
    config = dit_config("flux_kontext", pipelines("flux_kontext"), tmp_path, data={"num_frames": 5})
    with pytest.raises(ConfigError, match=r"data\.num_frames 5: FluxKontextPipeline cannot make that"):
        run_task_here("train_dit", config)


def test_videos_and_their_first_frames_from_files(pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    """Rows with a source image of their own and without; a short and a broken video are left out and named."""
    clips, rows = tmp_path / "clips", []
    clips.mkdir()
    for index in range(4):
        frames = [Image.fromarray(np.full((32, 32, 3), 20 * index + 5 * f, np.uint8)) for f in range(9)]
        clip_frames = frames[:3] if index == 2 else frames
        clip_frames[0].save(clips / f"{index}.webp", save_all=True, append_images=clip_frames[1:], lossless=True)
        rows.append({"video": f"{index}.webp", "text": f'write "{index}"'})
    (clips / "3.webp").write_bytes(b"junk")
    frames[0].save(clips / "first.png")
    rows[1]["source_image"] = "first.png"
    (clips / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_type": "image_text", "train_path": str(clips / "rows.jsonl"), "image_key": "video", "max_bad_rows": 2}
    config = dit_config("wan_image_small", pipelines("wan_image_small"), tmp_path, data=data)
    run = run_task_here("train_dit", config)
    log = (run / "log.txt").read_text()
    assert "rows.jsonl, line 3: the video has 3 frames, 5 are wanted (data.num_frames)" in log
    assert "rows.jsonl, line 4: broken image" in log
    shown = read_samples(run)[3]
    assert [row["prompt"] for row in shown] == ['write "0"', 'write "1"']
    for row, shade in zip(shown, (0, 60), strict=True):
        with Image.open(step_folder(run, 3) / row["source"]) as image:
            assert (np.asarray(image) == shade).all()
    config["data"]["max_bad_rows"] = 1
    config["train"]["output_dir"] = str(tmp_path / "strict")
    with pytest.raises(DataError, match=r"rows.jsonl, line [34]: "):
        run_task_here("train_dit", config)


@pytest.mark.parametrize("name", ["wan_image_pair", "wan_first_last"])
def test_videos_between_a_first_and_a_last_frame(name: str, pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    """Frames of the videos themselves, and of their own; with a cache as without."""
    rows = []
    for index in range(4):
        frames = [Image.fromarray(np.full((32, 32, 3), 40 * index + 10 * f, np.uint8)) for f in range(5)]
        frames[0].save(tmp_path / f"{index}.webp", save_all=True, append_images=frames[1:], lossless=True)
        rows.append({"video": f"{index}.webp", "text": f'write "{index}"'})
    for name_of_frame, frame in (("a", frames[0]), ("b", frames[-1])):
        frame.save(tmp_path / f"{name_of_frame}.png")
    rows[1]["source_image"] = ["a.png", "b.png"]
    if name == "wan_image_pair":  # whose transformers take a first frame alone, too
        rows[2]["source_image"] = "a.png"
        rows[3]["source_image"] = "b.png"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_type": "image_text", "train_path": str(tmp_path / "rows.jsonl"), "image_key": "video"}
    config = dit_config(name, pipelines(name), tmp_path, data={**data, "max_source_images": 2})
    config["sample"] |= {"num_prompts": 4}
    run = run_task_here("train_dit", config)
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in read_jsonl(run / "metrics.jsonl"))
    shades = [[0, 40], [120, 160]] + ([[120], [160]] if name == "wan_image_pair" else [[80, 120], [120, 160]])
    for row, expected in zip(read_samples(run)[3], shades, strict=True):
        with Image.open(step_folder(run, 3) / row["source"]) as image:
            pixels = np.asarray(image)
        assert [int(part.mean()) for part in np.split(pixels, len(expected), axis=1)] == expected
    cached = {"train": {"output_dir": str(tmp_path / "cached")}, "data": {"cache_dir": str(tmp_path / "cache")}}
    again = run_task_here("train_dit", merge(config, merge(cached, {"model": {"keep_encoders": False}})))
    for part in sorted((run / "hf_ckpt").glob("transformer*")):
        assert weights_in(again / "hf_ckpt" / part.name) == weights_in(part)


@pytest.mark.parametrize("name", ["wan_image_small", "kandinsky5_video_image"])
def test_a_video_run_resumes_exactly(name: str, pipelines: Callable[[str], Path], tmp_path: Path) -> None:
    config = rl_config(name, pipelines(name), tmp_path, train={"max_steps": 3})
    whole = run_task_here("rl_diffusion", config)
    part = {"train": {"output_dir": str(tmp_path / "part"), "save_steps": 1}}
    assert_same_run(resume_after_interrupt("rl_diffusion", merge(config, part), 2), whole)
