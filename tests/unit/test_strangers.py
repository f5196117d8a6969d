"""What strangers give (configurations, model folders, run folders, videos, templates, names) and what of it may act."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import sfumato
from sfumato.cli import main
from sfumato.config.base import Variant
from sfumato.config.characters import in_one_line, printable
from sfumato.config.file_checks import path_inside
from sfumato.config.paths import check_pipeline
from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import code_of_configurations, load_pretrained, make_from_config
from sfumato.config.user_functions import import_function
from sfumato.config.writing import write_atomically
from sfumato.data.media.videos import check_video, read_video
from sfumato.errors import ConfigError, DataError, FolderError, UserError
from sfumato.tracking.lock import lock_folder
from sfumato.tracking.page import POLICY
from sfumato.tracking.report import write_report
from sfumato.tracking.samples import step_folder
from tests.tiny import run_task_here, tiny_text_rl_config

PACKAGE = Path(sfumato.__file__).parent
HELPER = PACKAGE / "config" / "trust.py"
OF_MEMORY = {"DDIMScheduler", "WanTransformer3DModel", "RolloutStream", "TextPromptLoader"}
"""What is made of settings in memory, or is no model."""


# code of configurations


def test_no_loader_bypasses_the_helper() -> None:
    """``from_pretrained`` is called in one place; ``from_config`` elsewhere of settings that a module already has."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if path == HELPER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            shown, arguments = ast.unparse(node.func), " ".join(map(ast.unparse, node.args))
            if node.func.attr == "from_pretrained":
                wrong.append(f"{path.name}: {shown}")
            is_copy = arguments.endswith(".config") or shown.split(".")[0] in OF_MEMORY
            if node.func.attr == "from_config" and not is_copy:
                wrong.append(f"{path.name}: {shown}({arguments})")
    assert not wrong


def stranger(folder: Path, mark: Path, kind: str = "config.json") -> Path:
    """A folder whose JSON file names Python code beside it, which would leave a mark."""
    folder.mkdir(parents=True)
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoImageProcessor")
    names = dict.fromkeys((*classes, "AutoFeatureExtractor", "AutoProcessor"), "evil.Evil")
    names["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    about = {"model_type": "evil", "auto_map": names}
    for name in {kind, "config.json"}:
        (folder / name).write_text(json.dumps(about))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": names}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Evil", "auto_map": names}))
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    return folder


AUTO = ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoTokenizer"]
AUTO += ["AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor"]


@pytest.mark.parametrize("name", AUTO)
def test_code_of_a_folder_does_not_run_and_nobody_is_asked(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def asks(*_: object) -> str:
        pytest.fail("somebody was asked")

    monkeypatch.setattr("builtins.input", asks)
    folder = stranger(tmp_path / "model", tmp_path / "mark")
    with pytest.raises((ValueError, OSError, KeyError)):
        load_pretrained(getattr(transformers, name), folder)
    assert not (tmp_path / "mark").exists()


def test_a_class_within_another_asks_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads parts of a model without the argument; then it would ask on stdin."""
    from transformers import AutoConfig

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = stranger(tmp_path / "model", tmp_path / "mark")
    with pytest.raises((ValueError, OSError)):
        load_pretrained(AutoConfig, tmp_path)
    with pytest.raises(ValueError, match="custom code"):
        AutoConfig.from_pretrained(folder)
    assert not (tmp_path / "mark").exists()


def test_models_of_diffusers_take_no_such_argument(recwarn: pytest.WarningsRecorder) -> None:
    from diffusers import AutoencoderKL

    model = make_from_config(AutoencoderKL, AutoencoderKL(block_out_channels=(32,)).config)
    assert "trust_remote_code" not in model.config


@pytest.mark.parametrize("loader", ["load_image_processor", "load_tokenizer", "load_model"])
def test_loaders_of_reward_networks(tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModel

    from sfumato.rewards.networks import folder as networks

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    path = stranger(tmp_path / "network", tmp_path / "mark")
    (path / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, path / "model.safetensors")
    arguments = (AutoModel, path, torch.float32, torch.device("cpu")) if loader == "load_model" else (path,)
    with pytest.raises(ConfigError):
        getattr(networks, loader)(*arguments)
    assert not (tmp_path / "mark").exists()


def test_loaders_of_omni_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sfumato.config.omni import PartConfig
    from sfumato.models.omni.load import load_part

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = stranger(tmp_path / "part", tmp_path / "mark")
    for causal in (True, False):
        with pytest.raises(ConfigError):
            load_part(PartConfig(model_path=str(folder)), "model.encoder", causal)
    assert not (tmp_path / "mark").exists()


def test_a_pipeline_that_names_a_class_which_looks_for_code(tmp_path: Path) -> None:
    stranger(tmp_path / "pipeline" / "text_encoder", tmp_path / "mark")
    with pytest.raises(ConfigError, match="names Python code"):
        check_pipeline(tmp_path / "pipeline", {"text_encoder": ["transformers", "AutoModel"]})


def test_one_switch_for_everything_that_a_configuration_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\ndef f(): pass\n")
    attempts = [
        lambda: import_function(f"{tmp_path / 'own.py'}:f"),
        lambda: import_function("os:getcwd"),
        lambda: Variant("sfumato.algorithms.kl").resolve("own_package:Own"),
        lambda: LanguageModelConfig(model_path="x", trust_remote_code=True),
    ]
    with code_of_configurations(trusted=False):
        for attempt in attempts:
            with pytest.raises(ValueError, match="--trust-code"):
                attempt()
    assert not (tmp_path / "mark").exists()
    assert import_function("os:getcwd") is os.getcwd
    assert LanguageModelConfig(model_path="x", trust_remote_code=True).trust_remote_code


def text_run(folder: Path, **model: object) -> Path:
    """A run folder as a stranger would pack it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model": model, "data": {"train_path": "x.jsonl"}, "train": {"output_dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({"task": "train_text"}))
    return folder


def test_export_does_not_obey_the_configuration_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger(tmp_path / "model", tmp_path / "mark")
    run = text_run(tmp_path / "run", model_path=str(tmp_path / "model"), trust_remote_code=True)
    monkeypatch.setattr("sfumato.commands.export_checkpoint._find", lambda *_: (run, run))
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "model.trust_remote_code" in said
    assert "--trust-code" in said
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("command", ["check", "preprocess"])
def test_commands_that_read_a_configuration_import_nothing_that_it_names(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "named_by_yaml.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    config = tmp_path / "config.yaml"
    config.write_text("model: {family: 'named_by_yaml:Own'}\nreward: {rewards: [{type: 'named_by_yaml:Own'}]}\n")
    assert main([command, str(config)]) == 2
    assert not (tmp_path / "mark").exists()
    assert "Traceback" not in capsys.readouterr().err


# run folders


def folder_of_a_run(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("train: {max_steps: 2}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    samples = step_folder(folder, 1)
    samples.mkdir(parents=True)
    (samples / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROW = {"kind": "eval", "prompt": "p", "seed": 1, "sample_id": 1, "total": 0.5}


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    run = folder_of_a_run(tmp_path / "run", ROW)
    target = tmp_path / "authorized_keys"
    target.write_text("mine")
    for name in ("report.html", "report.html.tmp"):
        (run / name).symlink_to(target)
    assert "<h1>run</h1>" in page_of(run)
    assert target.read_text() == "mine"
    assert not (run / "report.html").is_symlink()
    write_atomically(run / "report.html.tmp", b"x")
    assert target.read_text() == "mine"
    assert sorted(path.name for path in run.iterdir() if path.suffix == ".tmp") == ["report.html.tmp"]


@pytest.mark.parametrize("name", ["../../../private.png", "/private.png", "link.png", "outer/private.png", "a\0.png"])
@pytest.mark.parametrize("field", ["file", "source"])
def test_pictures_outside_of_the_samples_are_not_embedded(tmp_path: Path, name: str, field: str) -> None:
    private = tmp_path / "private.png"
    Image.fromarray(np.full((9, 9, 3), 77, np.uint8)).save(private)
    name = str(private) if name.startswith("/") else name
    run = folder_of_a_run(tmp_path / "run", ROW | {field: name})
    (step_folder(run, 1) / "link.png").symlink_to(private)
    (step_folder(run, 1) / "outer").symlink_to(tmp_path)
    assert "data:image" not in page_of(run)


@pytest.mark.parametrize("name", ["config.yaml", "log.txt", "environment.json", "metrics.jsonl", "timeline.jsonl"])
def test_texts_that_are_links_to_elsewhere_pipes_or_devices_are_refused(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("SECRET: 1\n")
    for make in (lambda path: path.symlink_to(secret), os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        run = tmp_path / "run"
        if not run.exists():
            folder_of_a_run(run, ROW)
        (run / name).unlink(missing_ok=True)
        make(run / name)
        with pytest.raises(UserError, match=name):
            write_report(run)
        assert not (run / "report.html").exists()


def test_samples_that_are_a_link_to_elsewhere_are_left_out(tmp_path: Path) -> None:
    other = folder_of_a_run(tmp_path / "other", ROW | {"prompt": "SECRET"})
    run = folder_of_a_run(tmp_path / "run", ROW)
    step_folder(run, 1).rename(tmp_path / "moved")
    step_folder(run, 1).symlink_to(step_folder(other, 1))
    assert "SECRET" not in page_of(run)


BAD = "<script>alert(1)</script>\"'>\x1b]0;x\x07\u202e"


@pytest.mark.parametrize("field", ["prompt", "text", "damage", "file", "source"])
def test_every_text_of_a_row_is_escaped(tmp_path: Path, field: str) -> None:
    page = page_of(folder_of_a_run(tmp_path / "run", ROW | {field: BAD}, ROW | {field: BAD, "kind": "train"}))
    assert "<script" not in page
    assert not set("\x1b\x07\u202e") & set(page)
    assert POLICY in page


@pytest.mark.parametrize("field", ["seed", "sample_id", "total", "rewards", "prompt", "file", "advantage", "kind"])
@pytest.mark.parametrize("value", [BAD, [1], {"a": BAD}, True, 10**400])
def test_a_value_of_another_type_is_named(tmp_path: Path, field: str, value: object) -> None:
    if isinstance(value, str) and field in ("prompt", "file", "kind"):
        return
    run = folder_of_a_run(tmp_path / "run", ROW, ROW | {field: value})
    with pytest.raises(DataError, match=rf"samples.jsonl, row 2: {field} is "):
        write_report(run)


def test_names_of_metrics_roles_and_rewards_are_escaped(tmp_path: Path) -> None:
    run = folder_of_a_run(tmp_path / "run", ROW | {"rewards": {BAD: 1.0}}, ROW | {"kind": "train", "rewards": {BAD: 1}})
    lines = [{"step": step, BAD: 1.0, f"eval/reward/{BAD}": 0.1, "diversity/$\\x$": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"role": "run", "rank": 0, "kind": "step", "start": 0.0, "end": 1.0, "step": 1},
        {"role": f"$\\frac{BAD}", "rank": 0, "kind": BAD, "start": 0.1, "end": 0.9, "step": 1},
    ]
    (run / "timeline.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "environment.json").write_text(json.dumps({BAD: BAD}))
    (run / "log.txt").write_text(f"step 1: reward failed: {BAD} (1 of 2 samples)\n")
    page = page_of(run)
    assert "<script" not in page
    assert not set("\x1b\x07\u202e") & set(page)


NUMBERS = {
    "a huge number": '{"step": 1, "loss": 1' + "0" * 400 + "}",
    "no number": '{"step": 1, "loss": NaN, "other": Infinity}',
    "a huge step": '{"step": 1' + "0" * 400 + ', "loss": 1.0}',
    "a step that is true": '{"step": true, "loss": 1.0}',
    "a step below 0": '{"step": -1, "loss": 1.0}',
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_cannot_be_drawn(tmp_path: Path, name: str) -> None:
    run = folder_of_a_run(tmp_path / "run", ROW)
    (run / "metrics.jsonl").write_text(NUMBERS[name] + '\n{"step": 2, "loss": 1.0}\n')
    assert "<h1>run</h1>" in page_of(run)


@pytest.mark.parametrize("deep", ["metrics.jsonl", "environment.json", "config.yaml", "timeline.jsonl"])
def test_depth_is_no_traceback(tmp_path: Path, deep: str) -> None:
    run = folder_of_a_run(tmp_path / "run", ROW)
    (run / deep).write_text('{"step": ' + "[" * 200_000 + "\n" + '{"step": 1}\n')
    if deep in ("metrics.jsonl", "timeline.jsonl"):
        with pytest.raises(DataError, match=deep):
            write_report(run)
    else:
        assert "<h1>run</h1>" in page_of(run)


def test_broken_and_gigantic_pictures_are_said_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.tracking.samples.MOST_PIXELS", 100)
    run = folder_of_a_run(tmp_path / "run", ROW | {"file": "broken.png"}, ROW | {"file": "large.png", "sample_id": 2})
    (step_folder(run, 1) / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    Image.new("RGB", (20, 20)).save(step_folder(run, 1) / "large.png")
    assert page_of(run).count(" is broken") == 2


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_a_lock_that_no_run_has_made_is_refused_at_once(tmp_path: Path, make: object) -> None:
    make(tmp_path / "run.lock")
    with pytest.raises(FolderError, match="remove it"):
        lock_folder(tmp_path, print)


def test_paths_inside(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "folder").symlink_to(tmp_path / "a")
    assert path_inside(tmp_path, "folder/x") == tmp_path / "a" / "x"
    for name in ("..", "/etc/passwd", "a/../../x", "x\0"):
        assert path_inside(tmp_path, name) is None


# terminals


def test_what_acts_on_a_terminal_stands_by_its_number() -> None:
    assert printable("a\x1b[2Jb\x9b\x07\r\u202ec\u2028") == "a⟨U+001B⟩[2Jb⟨U+009B⟩⟨U+0007⟩⟨U+000D⟩⟨U+202E⟩c⟨U+2028⟩"
    for text in ("plain\n\ttext", "größer 漢字 🙂 عربى", ""):
        assert printable(text) == text
    assert in_one_line("a\nb\x85c") == "a b⟨U+0085⟩c"


def test_errors_of_commands_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "a\x1b]0;title\x07")]) == 2
    assert main(["check", str(tmp_path / "a\x1b[2J.yaml")]) == 2
    assert not set("\x1b\x07") & set(capsys.readouterr().err)


# videos

STREAMS = {
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\n"
    "a=rtpmap:96 H264/90000\n",
    "sdp behind another mark": "G\nc=IN IP4 127.0.0.1\nm=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n",
    "hls of a file": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><BaseURL>http://127.0.0.1:{port}/'
    "</BaseURL></Period></MPD>",
    "concat": "ffconcat version 1.0\nfile /etc/passwd\n",
    "asx": '<asx version="3.0"><entry><ref href="http://127.0.0.1:{port}/"/></entry></asx>',
    "ffmetadata": ";FFMETADATA1\ntitle=x\n",
    "smil": '<smil><body><video src="http://127.0.0.1:{port}/"/></body></smil>',
    "rtsp": "[Reference]\nRef1=http://127.0.0.1:{port}/\n",
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("ending", [None, ".mp4", ".ts", ".mpg"])
def test_descriptions_of_streams_are_no_videos(tmp_path: Path, name: str, ending: str | None) -> None:
    pytest.importorskip("cv2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        content = STREAMS[name].replace("{port}", str(server.getsockname()[1])).encode()
        source = content
        if ending is not None:
            source = tmp_path / f"a{ending}"
            source.write_bytes(content)
        with pytest.raises(DataError, match="no frame can be read"):
            check_video(source, "row 1")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "OPENCV_FFMPEG_CAPTURE_OPTIONS" not in os.environ


def test_videos_are_still_read_and_what_was_asked_of_ffmpeg_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setenv("OPENCV_FFMPEG_CAPTURE_OPTIONS", "probesize;1000000")
    for ending, code in ((".mp4", "mp4v"), (".avi", "MJPG"), (".mkv", "mp4v"), (".ts", "mp4v")):
        path = tmp_path / f"a{ending}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*code), 10, (64, 64))
        for shade in range(0, 100, 20):
            writer.write(np.full((64, 64, 3), shade, np.uint8))
        writer.release()
        for source in (path, path.read_bytes()):
            assert read_video(source, "row 1", lambda head: range(head.num_frames)).total == 5
    assert os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] == "probesize;1000000"


@pytest.mark.slow
def test_a_process_that_asks_for_code_gets_no_answer_from_stdin(tmp_path: Path) -> None:
    """As a person would meet it: a folder with code, and "y" typed ahead."""
    stranger(tmp_path / "network", tmp_path / "mark")
    (tmp_path / "network" / "tokenizer.json").write_text("{}")
    program = (
        "from pathlib import Path; from sfumato.rewards.networks.folder import load_tokenizer;"
        f"load_tokenizer(Path({str(tmp_path / 'network')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], input="y\ny\n", capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "[y/N]" not in done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()


def test_a_run_says_in_its_log_what_code_its_configuration_names(tmp_path: Path) -> None:
    """The rewards of tiny runs are a class of the tests, named by its import path."""
    run = run_task_here("rl_text", tiny_text_rl_config(tmp_path, train={"max_steps": 1}))
    (line,) = [line for line in (run / "log.txt").read_text().splitlines() if "runs code of yours" in line]
    assert "type tests.text_rewards:Ascii" in line
