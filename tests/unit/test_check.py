"""``sfumato check``: what it reads, predicts and says, on configurations of every task."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from rich.console import Console

from benchmarks import memory_of_configs
from sfumato.commands import check_host
from sfumato.commands.check_config import DOES_NOT_FIT, FITS, WRONG, Findings, check_config
from sfumato.commands.check_data import FIRST_ROWS, sampled_rows
from sfumato.commands.check_diffusion_rl import DECODING, DRAWING, EMBEDDING
from sfumato.commands.check_model import smallest_number_of_ranks
from sfumato.commands.check_tables import show_findings
from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.load import load_config
from sfumato.config.parallel import ParallelConfig
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.yaml_text import read_yaml
from sfumato.data.files.sources import open_sources
from sfumato.data.text.format import build_transform
from sfumato.data.text.loader import build_text_loader
from sfumato.errors import ConfigError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_tokenizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import pretended_mesh
from sfumato.tracking.lock import lock_folder
from tests.tiny import (
    ROOT,
    load_task,
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_rl_config,
    write_config,
    write_tiny_pipeline,
)
from tests.tiny_families import tiny_flux_kontext, tiny_wan
from tests.unit.test_flops import KINDS


def text_config(
    tmp_path: Path, kind: str = "qwen3", rows: list[Any] | None = None, positions: int | None = None, **more: Any
) -> Path:
    """A run of the tiny model of ``test_flops`` on conversations."""
    described = {"model_type": kind, **KINDS[kind], "vocab_size": 300}
    described |= {"max_position_embeddings": positions} if positions else {}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(described))
    if rows is None:
        rows = [conversation("hello", "world" * (index % 7 + 1)) for index in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = {
        "model": {"config_path": str(tmp_path / "model.yaml"), "tokenizer_path": "bytes"},
        "data": {"train_path": str(tmp_path / "rows.jsonl"), "max_seq_len": 128, **more.pop("data", {})},
        "train": {"output_dir": str(tmp_path / "run"), "device": "cpu", **more.pop("train", {})},
    }
    return write_config(config, tmp_path / "run.yaml")


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def shown(findings: Findings) -> str:
    text = io.StringIO()
    show_findings(findings, Console(file=text, width=200))
    return text.getvalue()


def test_a_mistake_is_described_for_the_task_that_fits_best(tmp_path: Path) -> None:
    path = write_config(tiny_dit_config(tmp_path, flow={"shfit": 2.0}), tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"tasks/train_dit\.py:\n.*flow\.shfit: unknown key; did you mean 'shift'"):
        check_config(path)
    with pytest.raises(ConfigError, match=r"tasks/rl_diffusion\.py"):
        check_config(path, task="rl_diffusion")
    with pytest.raises(ConfigError, match="did you mean 'train_dit'"):
        check_config(path, task="train_dti")


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("deepseek_v32", KINDS["deepseek_v3"] | {"index_n_heads": 4, "index_head_dim": 8}, "TypeError"),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, "KeyError"),
    ],
)
def test_a_model_whose_code_needs_memory_is_not_predicted_and_this_is_said(
    kind: str, more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = text_config(tmp_path)
    described = {"model_type": kind, **more, "vocab_size": 300}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(described))
    findings = check_config(path, with_data=False, num_ranks=1)
    assert findings.problems == [] and findings.model is None
    assert findings.exit_code == FITS
    said = rf"memory of .*model.yaml cannot be predicted, since its code does not run .*{reason}.*: start a run"
    assert any(re.search(said, note) for note in findings.notes)
    assert "cannot be predicted" in shown(findings)


def test_rows_are_counted_and_tokens_estimated(tmp_path: Path) -> None:
    path = text_config(tmp_path, train={"global_batch_size": 2})
    result = check_config(path)
    (source,) = result.data.training
    assert (source.num_rows, source.num_looked_at, source.bad_rows) == (200, 128, [])
    assert result.exit_code == FITS and not result.data.steps_are_exact and not result.data.tokens_are_exact

    config = load_config(TrainTextConfig, path)
    tokenizer = build_tokenizer(config.model)
    transform, sources = build_transform(config.data, tokenizer), open_sources(config.data)
    with pretended_mesh(Layout()) as mesh:
        loader = build_text_loader(
            config.data, config.train, 0, transform, sources, mesh, print, lambda items, count: iter(items)
        )
    assert result.data.tokens == pytest.approx(loader.tokens_per_epoch, rel=0.1)
    assert result.data.num_steps == pytest.approx(loader.total_steps, rel=0.15)
    again = check_config(path)
    assert again.data.steps_are_exact and again.data.tokens_are_exact, "the tokens lie in the run folder now"
    assert (again.data.num_steps, again.data.tokens) == (loader.total_steps, loader.tokens_per_epoch)
    assert "about" in shown(result).split("steps")[0] and "about" not in shown(again).split("Qwen3")[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"messages": []}, "line 3"),
        ({"text": "no conversation"}, "line 3"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        (conversation("long", "x" * 500), "line 3"),
    ],
)
def test_bad_rows_are_named_and_stop_it_or_not(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    rows = [conversation("a", "b") for _ in range(5)]
    rows[2] = bad
    result = check_config(text_config(tmp_path, rows=rows, data={"overlong": "skip"}))
    assert result.exit_code == WRONG
    assert len(result.problems) == 1 and "rows.jsonl" in result.problems[0] and message in result.problems[0]
    assert "data.max_bad_rows leaves such rows out" in result.notes
    result = check_config(text_config(tmp_path, rows=rows, data={"overlong": "skip", "max_bad_rows": 1}))
    assert result.exit_code == FITS and message in result.notes[0]
    assert "1 of the 5 rows that were looked at are bad" in shown(result)


def test_a_row_that_is_too_long_stops_it_unless_it_may_be_left_out(tmp_path: Path) -> None:
    rows = [conversation("a", "b"), conversation("long", "x" * 500)]
    result = check_config(text_config(tmp_path, rows=rows, data={"overlong": "stop", "max_bad_rows": 5}))
    assert result.exit_code == WRONG and "128" in result.problems[0]


def test_files_and_models_that_are_missing_are_named_together(tmp_path: Path) -> None:
    overrides = {
        "model": {"model_path": str(tmp_path / "none"), "config_path": None, "tokenizer_path": "bytes"},
        "data": {"train_path": "nowhere.jsonl"},
    }
    result = check_config(text_config(tmp_path), overrides)
    assert result.exit_code == WRONG and len(result.problems) == 2
    assert "nowhere.jsonl" in result.problems[0] and "is not a model folder" in result.problems[1]
    result = check_config(text_config(tmp_path), {"train": {"trackers": ["tensorbord"]}})
    assert result.exit_code == WRONG and "unknown tracker 'tensorbord'" in result.problems[0]
    result = check_config(text_config(tmp_path), overrides, with_data=False)
    assert len(result.problems) == 1 and result.data is None


def test_what_does_not_fit_is_said_with_what_would_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = text_config(tmp_path, positions=100000)
    path.write_text(path.read_text().replace("max_seq_len: 128", "max_seq_len: 100000"))
    uncompiled = {"train": {"compile": False}}
    enough = check_config(path, uncompiled, device_gib=100)
    total = enough.model.largest.total
    assert enough.exit_code == FITS and not enough.model.advice and enough.needed_bytes > total
    result = check_config(path, uncompiled, device_gib=0.6 * total / 2**30, show=True)
    said = capsys.readouterr()
    assert "check: building the model" in said.err and "check: what would need less memory  step 6/6" in said.err
    assert not said.out
    assert result.exit_code == DOES_NOT_FIT
    advice = dict(result.model.advice)
    assert advice["train.activation_checkpointing full"] < 0.8 * result.needed_bytes
    assert "these together: activation_checkpointing, chunked_loss" in advice
    full = check_config(path, {"train": {"activation_checkpointing": "full", "compile": False}}, device_gib=100)
    assert advice["train.activation_checkpointing full"] == full.needed_bytes
    text = shown(result)
    assert "does not fit" in text and "what would help" in text and "chunked_loss true" in text


def test_host_memory_and_disk_are_predicted_and_compared(tmp_path: Path) -> None:
    path = text_config(tmp_path, train={"max_steps": 1, "save_steps": 1, "export_steps": 1})
    small = check_config(path, device_gib=100, host_gib=1)
    assert small.exit_code == DOES_NOT_FIT and small.host.disk_bytes is None
    assert "does not fit: 3." in shown(small) and "of CPU memory needed, 1.0 GiB there; most by processes" in shown(
        small
    )
    enough = check_config(path, device_gib=100, host_gib=8)
    assert enough.exit_code == FITS and "on disk: checkpoints" in shown(enough)

    result = check_config(path)
    assert result.host.memory_bytes and result.host.disk_bytes and result.exit_code == FITS
    run = run_task_here("train_text", read_yaml(path))
    for name, folder, copies in (("checkpoints", "checkpoints", 4), ("hf_ckpt", "hf_ckpt", 2)):
        written = sum(
            file.stat().st_size for file in (run / folder).rglob("*") if file.suffix in (".distcp", ".safetensors")
        )
        # a tensor of a checkpoint has about 1.5 kB beside its numbers
        assert 1 <= copies * written / result.host.disk[name] < 1.5
    meta = {"train": {"init_device": "meta"}}
    drawn = check_config(path, meta, device_gib=100, with_data=False)
    assert drawn.host.moments["start: rank 0 draws the whole model"] == 4 * drawn.model.num_parameters
    with mock.patch.object(check_host, "LARGEST_IN_SEQUENCE", 100):
        drawn = check_config(path, meta, device_gib=100, with_data=False)
    assert not any(name.startswith("start") and size for name, size in drawn.host.moments.items())


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    result = check_config(text_config(tmp_path, kind="qwen3_moe"))
    model = result.model
    assert model.num_trained == model.num_parameters and model.num_active < model.num_parameters
    lora = check_config(text_config(tmp_path), {"model": {"lora": {"rank": 4}}}).model
    assert lora.num_trained < lora.num_parameters / 2


def test_ranks_are_the_fewest_that_are_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert smallest_number_of_ranks(ParallelConfig(tensor_parallel_size=2, data_parallel_replicate_size=3)) == 6
    assert smallest_number_of_ranks(ParallelConfig(expert_parallel_size=4, ulysses_parallel_size=2)) == 4
    with pytest.raises(ConfigError, match="tensor parallelism"):
        smallest_number_of_ranks(ParallelConfig(tensor_parallel_size=2, expert_parallel_size=2))
    path = text_config(tmp_path, train={"tensor_parallel_size": 2})
    assert check_config(path, with_data=False).layout == Layout(tp=2)
    assert check_config(path, num_ranks=8, with_data=False).layout == Layout(tp=2, dp_shard=4)
    with pytest.raises(ConfigError, match="does not divide 3 processes"):
        check_config(path, num_ranks=3)


def test_a_model_that_cannot_be_cut_is_a_problem_as_in_the_run(tmp_path: Path) -> None:
    result = check_config(text_config(tmp_path, train={"tensor_parallel_size": 3}), num_ranks=3, with_data=False)
    assert result.exit_code == WRONG and "heads" in result.problems[0]
    result = check_config(text_config(tmp_path, train={"expert_parallel_size": 2}), num_ranks=2, with_data=False)
    assert result.exit_code == WRONG and "no experts" in result.problems[0]
    settings = {"pipeline_parallel_size": 2, "chunked_loss": True, "global_batch_size": 4}
    result = check_config(text_config(tmp_path, train=settings), num_ranks=2, with_data=False)
    assert result.exit_code == WRONG and "chunked_loss" in result.problems[0]


def test_stages_are_shown_side_by_side(tmp_path: Path) -> None:
    path = text_config(tmp_path, train={"pipeline_parallel_size": 3, "global_batch_size": 6})
    result = check_config(path, num_ranks=3, device_gib=1, with_data=False)
    assert len(result.model.ranks) == 3 and "stage 2" in shown(result)


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 1.0), ("bf16", 0.5)])
def test_preference_training_has_a_reference(tmp_path: Path, dtype: str, share: float) -> None:
    pair = {"prompt": "1 + 1", "chosen": "2", "rejected": "3"}
    path = text_config(tmp_path, rows=[pair] * 9, data={"data_type": "preference"})
    result = check_config(path, {"model": {"dtype": dtype}})
    parts = result.model.largest.parts
    assert (result.task, result.exit_code) == ("train_text_dpo", FITS)
    assert parts["frozen reference"] == share * parts["gradients"]
    lora = check_config(path, {"model": {"dtype": dtype, "lora": {"rank": 2}}})
    assert "frozen reference" not in lora.model.largest.parts


@pytest.mark.parametrize("task", ["train_dit", "train_dit_dpo", "rl_diffusion"])
def test_diffusion_tasks(tmp_path: Path, task: str) -> None:
    with_kl = {"algorithm": {"kl": {"type": "flow_grpo", "coef": 0.1}}}
    config = {
        "train_dit": lambda: tiny_dit_config(tmp_path),
        "train_dit_dpo": lambda: tiny_dit_dpo_config(tmp_path),
        "rl_diffusion": lambda: tiny_rl_config(tmp_path, **with_kl),
    }[task]()
    result = check_config(write_config(config, tmp_path / "run.yaml"))
    assert (result.task, result.exit_code, result.data.num_steps) == (task, FITS, 6)
    assert result.data.images_per_step == {"train_dit": 4, "train_dit_dpo": 8, "rl_diffusion": 16}[task]
    parts = result.model.largest.parts
    assert parts.get("frozen reference", 0) == (0 if task == "train_dit" else parts["gradients"])
    assert parts["frozen vae"] > 0 and "SD3Transformer2DModel" in shown(result)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_weights_of_a_denoiser_are_counted_in_their_precision(tmp_path: Path, dtype: str, lora: Any) -> None:
    config = tiny_rl_config(tmp_path, model={"dtype": dtype, "lora": lora}, train={"mixed_precision": "bf16"})
    path = write_config(config, tmp_path / "run.yaml")
    parts = check_config(path).model.largest.parts
    denoiser = build_diffusion_model(load_config(TrajectoryRLConfig, path).model).denoiser
    trained = sum(parameter.numel() for parameter in denoiser.parameters() if parameter.requires_grad)
    assert parts["weights"] == sum(parameter.nbytes for parameter in (*denoiser.parameters(), *denoiser.buffers()))
    assert parts["gradients"] == 4 * trained


def test_pairs_of_images(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "chosen": "gone.png", "rejected": "b.png", "better": value} for value in (1, 0.5, 0)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"data_type": "pairs", "train_path": str(tmp_path / "pairs.jsonl"), "label_key": "better"}
    data |= {"eval_path": data["train_path"]}
    result = check_config(write_config(tiny_dit_dpo_config(tmp_path, data=data), tmp_path / "run.yaml"))
    assert (result.task, result.exit_code, result.data.training[0].num_rows) == ("train_dit_dpo", WRONG, 2)
    assert "pairs.jsonl, line 1: image file not found" in result.problems[0]
    lora = check_config(write_config(tiny_dit_dpo_config(tmp_path), tmp_path / "run.yaml"), {"model": {"lora": {}}})
    assert "frozen reference" not in lora.model.largest.parts and lora.exit_code == FITS


def test_a_model_that_is_made_first_is_predicted_from_what_makes_it(tmp_path: Path) -> None:
    maker = text_config(tmp_path)
    config = yaml.safe_load(maker.read_text())
    made = Path(config["train"]["output_dir"]) / "hf_ckpt"
    config["model"] = {"model_path": str(made), "made_by": str(maker)}
    result = check_config(write_config(config, tmp_path / "second.yaml"))
    assert result.exit_code == FITS and result.model.num_parameters == check_config(maker).model.num_parameters


@pytest.mark.parametrize(
    ("train", "code", "said"),
    [
        ({}, WRONG, "holds an unfinished run (step 4 of 8, newest checkpoint of step 4)"),
        ({"load_checkpoint_path": "new"}, FITS, "a start moves it to {run}.1"),
        ({"load_checkpoint_path": "auto"}, FITS, "newest checkpoint of step 4): a start goes on with it"),
        ({"load_checkpoint_path": "auto", "seed": 7}, WRONG, "train.seed was 42, is 7"),
        ({"load_checkpoint_path": "nowhere"}, WRONG, "nowhere does not exist"),
        ({"load_checkpoint_path": "{run}", "output_dir": "{run}_2"}, FITS, "as a fork, from {run}/checkpoints/"),
        ({"load_checkpoint_path": "{run}", "output_dir": "{run}_2", "max_steps": 4}, WRONG, "nothing is left to do"),
        ({"load_checkpoint_path": "auto", "output_dir": "{run}_2"}, FITS, "{run}_2 holds no checkpoint"),
        ({"load_checkpoint_path": "auto"}, WRONG, "is in use by another run"),
    ],
)
def test_a_run_that_stands_in_the_folder_is_met_as_the_start_meets_it(
    tmp_path: Path, train: dict[str, Any], code: int, said: str
) -> None:
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "global_step_4"
    checkpoint.mkdir(parents=True)
    values = {"step": 4, "run_id": "one", "identity": {"train.seed": 42}}
    for path, content in {
        checkpoint / "manifest.json": {"files": {}},
        checkpoint / "state.json": values,
        run / "environment.json": {"run_id": "one", "total_steps": 8},
        run / "metrics.jsonl": {"step": 4},
    }.items():
        path.write_text(f"{json.dumps(content)}\n")
    lock = lock_folder(run, print) if "in use" in said else None
    settings = {name: value.format(run=run) if isinstance(value, str) else value for name, value in train.items()}
    path = text_config(tmp_path, rows=[conversation("a", "b")], train={"max_steps": 8, **settings})
    findings = check_config(path, num_ranks=1, with_data=False)
    assert said.format(run=run) in " ".join([*findings.problems, *findings.notes])
    assert findings.exit_code == code
    if lock is not None:
        lock.release()


def test_findings_are_json(tmp_path: Path) -> None:
    result = check_config(text_config(tmp_path), device_gib=10)
    content = json.loads(result.to_json())
    assert content["exit_code"] == 0 and content["task"] == "train_text"
    assert content["needed_bytes"] > content["model"]["ranks"][0]["parts"]["weights"] > 0


@pytest.mark.parametrize("count", [1, FIRST_ROWS, FIRST_ROWS + 1, 2 * FIRST_ROWS, 10_000])
def test_rows_are_looked_at_from_the_beginning_and_over_the_rest(count: int) -> None:
    rows = sampled_rows(count)
    assert rows == sorted(set(rows)) and rows[0] == 0 and rows[-1] == count - 1
    assert len(rows) == min(count, 2 * FIRST_ROWS)


def test_videos_and_edits(tmp_path: Path) -> None:
    def found_of(described: dict[str, Any], **rollout: Any) -> Findings:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write_tiny_pipeline(folder / "pipeline", described=described)
        settings = {"guidance_scale": 3.0, **rollout}
        return check_config(write_config(tiny_rl_config(folder, rollout=settings), folder / "rl.yaml"))

    few, more = (found_of(tiny_wan(), num_frames=frames) for frames in (5, 9))
    assert few.exit_code == more.exit_code == FITS, more.problems
    assert few.model.largest.total < more.model.largest.total
    wrong = found_of(tiny_wan(), num_frames=6)
    assert wrong.exit_code == WRONG and "rollout.num_frames 6: WanPipeline cannot make that" in wrong.problems[0]
    assert found_of(tiny_flux_kontext()).exit_code == FITS


def test_rl_with_vllm_is_predicted_before_its_model_is_downloaded(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model_type": "qwen3", **KINDS["qwen3"]}))
    settings = tiny_text_rl_config(tmp_path)
    settings["model"] = {"config_path": str(tmp_path / "model.yaml"), "tokenizer_path": "bytes"}
    settings["rollout"] |= {"hybrid_engine": False, "engine": {"type": "vllm", "url": "http://127.0.0.1:9"}}
    path = write_config(settings, tmp_path / "run.yaml")
    result = check_config(path, with_data=False)
    assert result.exit_code == FITS and result.model.largest.parts["weights"] > 0, result.problems
    assert "set model.model_path in the place of model.config_path" in result.notes[-1]
    with pytest.raises(ConfigError, match=r"vllm loads the model from its folder: set model\.model_path"):
        load_task("rl_text").main(load_config(TextRLConfig, path))


def test_a_pipeline_is_predicted_by_its_configuration_files_alone(tmp_path: Path) -> None:
    path = write_config(tiny_rl_config(tmp_path), tmp_path / "run.yaml")
    before = check_config(path, with_data=False).model.largest
    folder = Path(str(load_config(TrajectoryRLConfig, path).model.model_path))
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    result = check_config(path, with_data=False)
    assert result.exit_code == FITS and result.model.largest == before, result.problems
    assert "the run needs weights of" in result.notes[-1] and "transformer" in result.notes[-1]
    assert set(before.phases) == {DRAWING, DECODING, EMBEDDING} and DECODING in shown(result)
    with pytest.raises(ConfigError, match="has no weights: copy or download"):
        build_diffusion_model(load_config(TrajectoryRLConfig, path).model)


def test_a_line_of_the_page_of_all_configurations_is_as_the_page_has_it(tmp_path: Path) -> None:
    line = memory_of_configs.line_of(ROOT / "configs" / "text" / "qwen3_8b_sft.yaml", tmp_path)
    page = memory_of_configs.PAGE.read_text()
    assert line.row() in page and memory_of_configs.filled(page, line) == page, (
        "python -m benchmarks.memory_of_configs --write"
    )
