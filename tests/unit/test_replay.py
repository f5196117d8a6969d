"""``sfumato replay``: a saved sample is drawn again, and the proof is in the bits."""

import asyncio
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sfumato.cli import main
from sfumato.config.load import merge
from sfumato.data.text.token_ids import token_decoder
from sfumato.studio.app import Studio, build_app
from sfumato.studio.control import Control
from sfumato.studio.thumbnails import Thumbnails
from sfumato.tracking.samples import read_samples, step_folder
from tests.role_runs import ONE_STEP_OFF, SEPARATE
from tests.studio_runs import HOST, TOKEN
from tests.tiny import (
    run_task_here,
    run_task_process,
    tiny_dit_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    write_config,
)

WATCHED = ['write "AB"', 'write "BA"']

LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"lr": 0.02}}


def run_watched(task, config):
    """Runs a task that draws watched prompts with every evaluation from the first step on."""
    control = Path(config["train"]["output_dir"]) / "control"
    control.mkdir(parents=True)
    (control / "watched_prompts.txt").write_text("\n".join(WATCHED), encoding="utf-8")
    return run_task_here(task, config)


@pytest.fixture(scope="module")
def rl_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    settings = {"train": {"max_steps": 2, "lr": 0.05, "save_steps": 1}, "eval": {"every_steps": 1, "num_prompts": 2}}
    return run_watched("rl_diffusion", tiny_rl_config(folder, **merge(LORA, settings)))


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    settings = {"train": {"max_steps": 2, "lr": 0.05, "save_steps": 1}, "eval": {"every_steps": 1, "num_saved": 4}}
    return run_watched("rl_text", tiny_text_rl_config(folder, **settings))


def replay(capsys, run, step, sample_id, *options):
    code = main(["replay", str(run), "--step", str(step), "--sample", str(sample_id), "--json", *map(str, options)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if result["verdict"] == "identical" else 1)
    return result


def names(result):
    return [part["name"] for part in result["parts"]]


def change_row(run, step, kind, sample_id, change):
    path = step_folder(run, step) / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if (row["kind"], row["sample_id"]) == (kind, sample_id):
            change(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.mark.exact
@pytest.mark.parametrize("step", [0, 1, 2])
def test_pictures_of_evaluations_are_equal_to_the_bit(rl_run, capsys, step):
    result = replay(capsys, rl_run, step, 1)
    assert result["verdict"] == "identical", result
    assert names(result) == ["picture", "reward brightness"]


@pytest.mark.exact
@pytest.mark.parametrize("step", [1, 2])
def test_pictures_that_were_learned_from_are_equal_to_the_bit(rl_run, capsys, step):
    for row in [row for row in read_samples(rl_run)[step] if row["kind"] == "train"][1::5]:
        result = replay(capsys, rl_run, step, row["sample_id"], "--kind", "train")
        assert result["verdict"] == "identical", result
        assert names(result) == ["picture", "reward brightness"]


@pytest.mark.exact
def test_watched_prompts_are_equal_to_the_bit(rl_run, text_run, capsys):
    for run, part, options in ((rl_run, "picture", ()), (text_run, "text", ("--trust-code",))):
        rows = [row for row in read_samples(run)[2] if row["kind"] == "watched"]
        assert [row["prompt"] for row in rows] == WATCHED
        for row in rows:
            result = replay(capsys, run, 2, row["sample_id"], "--kind", "watched", *options)
            assert result["verdict"] == "identical" and names(result)[0] == part, result


@pytest.mark.exact
@pytest.mark.slow
def test_so_are_those_of_another_policy_than_the_trained_one(tmp_path, capsys):
    settings = {"algorithm": {"recipe": "diffusion_nft"}, "train": {"max_steps": 2, "lr": 0.05, "save_steps": 1}}
    config = tiny_rl_config(tmp_path, **merge(settings, {"eval": {"every_steps": 1, "num_prompts": 2}}))
    config["algorithm"] = settings["algorithm"]
    run = run_task_here("rl_diffusion_forward", config)
    rows = [row for row in read_samples(run)[2] if row["kind"] == "train"]
    result = replay(capsys, run, 2, rows[-1]["sample_id"], "--kind", "train")
    assert result["verdict"] == "identical", result


@pytest.mark.exact
def test_answers_are_equal_with_their_tokens_and_log_probabilities(text_run, capsys):
    for step in (0, 2):
        assert replay(capsys, text_run, step, 1, "--trust-code")["verdict"] == "identical"
    for row in [row for row in read_samples(text_run)[2] if row["kind"] == "train"][1::9]:
        result = replay(capsys, text_run, 2, row["sample_id"], "--kind", "train", "--trust-code")
        assert result["verdict"] == "identical", result
        assert names(result)[:3] == ["text", "tokens", "log-probabilities"]
        assert "".join(row["tokens"]).startswith(row["text"]) and len(row["tokens"]) == len(row["log_ratio"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two ranks", "two ranks, text", "Ray", "Ray, one-step-off"])
def test_samples_of_several_processes(tmp_path, capsys, name):
    task = "rl_text" if "text" in name else "rl_diffusion"
    settings = {"train": {"max_steps": 3, "save_steps": 1}, "eval": {"every_steps": 1, "num_saved_groups": 4}}
    config = (tiny_text_rl_config if "text" in name else tiny_rl_config)(tmp_path, **settings)
    if "Ray" in name:
        config = merge(config, ONE_STEP_OFF if "one-step" in name else SEPARATE)
    ranks = 2 if "ranks" in name else 1
    done = run_task_process(task, write_config(config, tmp_path / "run.yaml"), num_processes=ranks, timeout_s=400)
    assert done.returncode == 0, done.output
    rows = read_samples(done.output_dir)[3]
    rows = [row for row in rows if row["kind"] == "eval"] + [row for row in rows if row["kind"] == "train"][::5]
    assert {row["policy_version"] for row in rows} == ({1, 3} if "one-step" in name else {2, 3})
    for row in rows:
        result = replay(capsys, done.output_dir, 3, row["sample_id"], "--kind", row["kind"], "--trust-code")
        assert result["verdict"] == "identical", (row["kind"], row["sample_id"], result)


@pytest.mark.exact
@pytest.mark.slow
def test_grids_and_answers_of_supervised_runs(tmp_path, capsys):
    settings = {"train": {"max_steps": 1, "save_steps": 1, "lr": 0.05}, "sample": {"every_steps": 1}}
    run = run_task_here("train_dit", tiny_dit_config(tmp_path / "dit", **settings))
    assert replay(capsys, run, 1, 1)["verdict"] == "identical"
    run = run_task_here("train_text", tiny_text_config(tmp_path / "text", train={"max_steps": 2, "lr": 0.02}))
    result = replay(capsys, run, 2, 0)
    assert result["verdict"] == "identical" and names(result) == ["text"]
    assert any("exact_match" in note for note in result["notes"])


def test_a_changed_picture_token_or_reward_is_told(rl_run, text_run, tmp_path, capsys):
    run = shutil.copytree(rl_run, tmp_path / "pictures")
    file = step_folder(run, 2) / "eval_0001.png"
    pixels = np.array(Image.open(file))
    pixels[3, 2, 1] ^= 16
    Image.fromarray(pixels).save(file)
    result = replay(capsys, run, 2, 1)
    assert result["verdict"] == "different"
    assert "0.1% of the values of 16 x 16 pixels differ, by 16 of 255 at most" in result["text"]
    change_row(run, 2, "eval", 0, lambda row: row["rewards"].update(brightness=0.5))
    result = replay(capsys, run, 2, 0)
    assert result["verdict"] == "different" and "reward brightness: 0.5 then" in result["text"]
    texts = shutil.copytree(text_run, tmp_path / "texts")
    row = next(row for row in read_samples(texts)[2] if row["kind"] == "train" and len(row["token_ids"]) > 1)
    change_row(texts, 2, "train", row["sample_id"], lambda row: row["token_ids"].__setitem__(1, 0))
    result = replay(capsys, texts, 2, row["sample_id"], "--kind", "train", "--trust-code")
    assert "tokens: they differ from token 1 of" in result["text"] and "text" in result["text"]


def test_without_its_checkpoint_it_is_no_proof(rl_run, tmp_path, capsys):
    run = shutil.copytree(rl_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "global_step_2")
    result = replay(capsys, run, 2, 1)
    assert result["verdict"] == "other weights"
    assert "drawn after 2 updates" in result["text"] and "again after 1" in result["text"]
    next((run / "checkpoints" / "global_step_1").rglob("*.distcp")).write_bytes(b"damaged")
    result = replay(capsys, run, 2, 1)
    assert "again after 0" in result["text"] and any("passed over" in note for note in result["notes"])


def test_another_machine_is_named(rl_run, tmp_path, capsys):
    run = shutil.copytree(rl_run, tmp_path / "run")
    path = run / "environment.json"
    environment = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(environment | {"device": "NVIDIA H100", "cpu_threads": 1}), encoding="utf-8")
    change_row(run, 2, "eval", 1, lambda row: row["rewards"].update(brightness=0.5))
    assert "a reason may be device: NVIDIA H100 in the run, cpu here" in replay(capsys, run, 2, 1)["notes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 7, "--sample", 0), "no samples of step 7; it has those of 0, 1, 2"),
        (
            ("--step", 1, "--sample", 99),
            "no eval sample 99; it has 0, 1; it has samples of --kind train and watched, too",
        ),
        (
            ("--step", 1, "--sample", 7, "--kind", "watched"),
            "no watched sample 7; it has 0, 1; it has samples of --kind eval and train, too",
        ),
    ],
)
def test_what_is_not_there_is_named(rl_run, capsys, arguments, message):
    assert main(["replay", str(rl_run), *map(str, arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_and_changed_prompts(rl_run, tmp_path, capsys):
    assert main(["replay", str(tmp_path), "--step", "0", "--sample", "0"]) == 2
    assert "no samples" in capsys.readouterr().err
    run = shutil.copytree(rl_run, tmp_path / "run")
    change_row(run, 1, "eval", 0, lambda row: row.update(prompt="another"))
    assert main(["replay", str(run), "--step", "1", "--sample", "0"]) == 2
    assert "put the data back" in capsys.readouterr().err


def test_code_of_the_run_needs_trust(text_run, capsys):
    assert main(["replay", str(text_run), "--step", "2", "--sample", "0"]) == 2
    assert "add --trust-code to this command" in capsys.readouterr().err
    assert main(["playground", str(text_run), "--json"]) == 2
    assert "add --trust-code to this command" in capsys.readouterr().out


def test_the_picture_is_kept_where_it_is_asked_for(rl_run, tmp_path, capsys):
    result = replay(capsys, rl_run, 1, 0, "--out", tmp_path / "out", "--no-rewards")
    assert result["file"].endswith("replay_step1_eval_0000.png")
    np.testing.assert_array_equal(
        np.asarray(Image.open(result["file"])), np.asarray(Image.open(step_folder(rl_run, 1) / "eval_0000.png"))
    )
    assert "rewards were not computed again" in result["notes"]


@pytest.fixture
def page(rl_run, tmp_path):
    control_runs = rl_run.parent
    studio = Studio(control_runs, Thumbnails(tmp_path / "thumbnails"))
    control = Control(studio.runs, True)
    app = build_app(studio, TOKEN, more=control.routes())
    client = TestClient(app, base_url=HOST)
    client.get("/", params={"token": TOKEN})
    yield client
    asyncio.run(control.close())
    assert control.outputs is not None and not control.outputs.exists()


@pytest.mark.slow
def test_a_page_has_a_sample_made_again(rl_run, page):
    assert page.get("/api/settings").json()["replay"] is True
    answer = page.post("/api/replay", json={"run": rl_run.name, "step": 2, "kind": "eval", "id": 1})
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert result["verdict"] == "identical" and result["text"].startswith("equal to the bit: picture")
    assert "file" not in result and "/tmp" not in json.dumps(result)
    picture = page.get(result["picture"])
    assert picture.headers["content-type"] == "image/png"
    saved = np.asarray(Image.open(step_folder(rl_run, 2) / "eval_0001.png"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture.content))), saved)
    answer = page.post("/api/replay", json={"run": rl_run.name, "step": 2, "kind": "eval", "id": 77})
    assert answer.status_code == 404


def test_tokens_keep_the_space_before_them():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"▁a": 0, "▁red": 1, "bird": 2, "▁": 3, "<end>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    text_of = token_decoder(fast)
    assert fast.decode([1]) == "red"  # which would stand without its space
    assert [text_of(token) for token in (0, 1, 2)] == [" a", " red", "bird"]
    assert text_of(4).strip() == "<end>"
