"""Rollouts in files: the same when read, and an update learns the same from them."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sfumato.algorithms.advantages import Advantages
from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import DataError
from sfumato.models.language_load import build_byte_tokenizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rollout import dumps
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.dumps import RolloutDump, RolloutDumps, dump_path, read_dump, write_dump
from sfumato.rollout.token_colours import write_token_page
from sfumato.rollout.tokens import FinishReason, TextRollout, TokenSequence
from tests.tiny import ROOT, load_task, run_task_here, tiny_text_rl_config, weights_in
from tests.unit.test_report import Page


def sequence(length: int, drawn: Sequence[int], reason: FinishReason = "stop", seed: int = 0) -> TokenSequence:
    generator = np.random.default_rng(seed)
    mask = np.isin(np.arange(length), drawn)
    log_probs = np.where(mask, -generator.random(length) * 30, 0).astype(np.float32)
    tokens = generator.integers(0, 2**31 - 1, length).astype(np.int32)
    return TokenSequence(tokens, mask, log_probs, np.where(mask, seed, -1).astype(np.int32), reason)


def example() -> tuple[TextRollout, Advantages]:
    """Four samples: one of a turn, one of two sequences, one that drew nothing, one that has no sequence."""
    own = [
        [sequence(5, [3, 4])],
        [sequence(6, [1, 2, 5], "length", 1), sequence(3, [2], "abort", 2)],
        [sequence(2, [], "length", 3)],
        [],
    ]
    requests = [SampleRequest(10 + row, row // 2, 7 - row, is_first=row % 2 == 0) for row in range(4)]
    rollout = TextRollout(requests=requests, versions=[3, 3, 2, 3], sequences=own)
    fields = {"advantages": torch.randn(6), "proximal_log_probs": torch.tensor([-0.0, -1e-38, -80.0, 1.0, 2.0, 3.0])}
    flags = [torch.tensor([row == place for row in range(4)]) for place in range(3)]
    return rollout.with_fields(**fields), Advantages(torch.tensor([0.25, -1 / 3, 0.0, 1e-30]), *flags, {"x": 1.0})


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def assert_equal(found: RolloutDump, rollout: TextRollout, advantages: Advantages) -> None:
    assert found.rollout.requests == rollout.requests and found.rollout.versions == rollout.versions
    for some, others in zip(found.rollout.sequences, rollout.sequences, strict=True):
        for one, other in zip(some, others, strict=True):
            for name in ("token_ids", "drawn", "log_probs", "versions"):
                assert same(getattr(one, name), getattr(other, name)), name
            assert one.finish_reason == other.finish_reason
    assert found.rollout.fields is not None and rollout.fields is not None
    for known, expected in zip(found.rollout.fields, rollout.fields, strict=True):
        assert set(known) == set(expected)
        assert all(same(known[name].numpy(), expected[name].numpy()) for name in expected)
    for name in ("values", "failed", "no_spread", "left_out"):
        assert same(getattr(found.advantages, name).numpy(), getattr(advantages, name).numpy()), name


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    rollout, advantages = example()
    path = dump_path(tmp_path, 10, 3)
    write_dump(path, rollout, advantages, step=10, data_rank=3)
    assert path.relative_to(tmp_path) == Path("rollouts/step_000010.rank3.safetensors")
    found = read_dump(path)
    assert_equal(found, rollout, advantages)
    assert found.step == 10 and found.part[2] == {10: 0, 11: 1, 12: 2, 13: 3}
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_a_rank_without_samples_writes_none(tmp_path: Path) -> None:
    rollout, advantages = example()
    empty = rollout.rows([])
    write_dump(dump_path(tmp_path, 1), empty, advantages.rows([]), step=1)
    assert len(read_dump(dump_path(tmp_path, 1)).rollout) == 0


def test_an_update_learns_the_same_from_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "rollout": {"dump": True, "temperature": 0.8},
        "algorithm": {"kl": {"coef": 0.1}},
        "train": {"max_steps": 1, "global_batch_size": 8, "micro_batch_size": 3},
    }
    config = tiny_text_rl_config(tmp_path, **settings)
    drawn = read_dump(dump_path(run_task_here("rl_text", config), 1))
    assert len(drawn.rollout) == 16 and drawn.advantages.values.any()
    assert {"rollout_log_probs", "reference_log_probs", "proximal_log_probs", "advantages"} <= set(drawn.rollout.known)

    task, learned = load_task("rl_text"), []
    update_policy, draw = task.update_policy, task.generate

    def of_dump(actor: Any, part: Any, advantages: Any, config: Any, step: int) -> dict[str, float]:
        learned.append(part)
        given = TextRollout(
            requests=drawn.rollout.requests, versions=drawn.rollout.versions, sequences=drawn.rollout.sequences
        )  # all that the update computes itself is computed again
        return update_policy(actor, ([given], *drawn.part[1:]), drawn.advantages, config, step)

    def other_noise(state: Any, requests: Any, iteration: int, version: int, config: Any) -> Any:
        return draw(state, requests, iteration + 100, version, config)

    monkeypatch.setattr(task, "update_policy", of_dump)
    monkeypatch.setattr(task, "generate", other_noise)
    config["train"]["output_dir"] = str(tmp_path / "again")
    again = run_task_here(task, config)
    tokens = [each.token_ids.tolist() for rollout in learned[0][0] for own in rollout.sequences for each in own]
    assert tokens != [each.token_ids.tolist() for own in drawn.rollout.sequences for each in own]
    first, second = weights_in(tmp_path / "run/hf_ckpt"), weights_in(again / "hf_ckpt")
    assert first == second
    assert_equal(read_dump(dump_path(again, 1)), drawn.rollout, drawn.advantages)


def test_broken_dumps_are_refused(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    with pytest.raises(DataError, match=r"is missing: a run writes its rollouts with rollout\.dump"):
        read_dump(path)
    write_dump(path, *example(), step=1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match=r"step_000001\.rank0\.safetensors cannot be read"):
        read_dump(path)
    tensors = {name: torch.zeros(3) for name in ("advantages", "sample_ids")}
    path.write_bytes(dumps.save(tensors))
    with pytest.raises(DataError, match="is no rollout: its format is None"):
        read_dump(path)
    path.write_bytes(dumps.save(tensors, {"format": dumps.FORMAT, "step": "1"}))
    with pytest.raises(DataError, match="does not hold together: KeyError"):
        read_dump(path)
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        names, metadata = file.keys(), file.metadata()
        tensors = {name: file.get_tensor(name) for name in names}
    path.write_bytes(dumps.save(tensors | {"num_sequences": tensors["num_sequences"] + 1}, metadata))
    with pytest.raises(DataError, match="does not hold together"):
        read_dump(path)


def test_a_full_disk_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, rollout={"dump": True}))
    writer = RolloutDumps(config, Mesh(Layout(), torch.device("cpu")), said.append)
    real = dumps.write_atomically

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dumps, "write_atomically", full)
    for step in (1, 2, 3):
        writer.write(*example(), step)
    folder = tmp_path / "run/rollouts"
    assert said == [f"{folder} cannot be written: No space left on device; the run goes on"]
    monkeypatch.setattr(dumps, "write_atomically", real)
    writer.write(*example(), 4)
    assert said[1:] == [f"{folder} can be written again"] and read_dump(dump_path(tmp_path / "run", 4)).step == 4


def test_a_run_that_resumes_removes_what_it_makes_again(tmp_path: Path) -> None:
    config = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, rollout={"dump": True}))
    folder, mesh = tmp_path / "run", Mesh(Layout(), torch.device("cpu"))
    for step in (1, 2, 3):
        for rank in (0, 1):
            write_dump(dump_path(folder, step, rank), *example(), step, rank)
    writer = RolloutDumps(config, mesh, print)
    writer.write(*example(), 2)
    names = sorted(path.name.removesuffix(".safetensors") for path in (folder / "rollouts").iterdir())
    assert names == ["step_000001.rank0", "step_000001.rank1", "step_000002.rank0"]


def test_a_run_that_does_not_ask_writes_none(tmp_path: Path) -> None:
    config = load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path))
    RolloutDumps(config, Mesh(Layout(), torch.device("cpu")), print).write(*example(), 1)
    assert not (tmp_path / "run").exists()


def test_tokens_in_colours(tmp_path: Path) -> None:
    sequences = [[TokenSequence(*(np.array(each) for each in tokens))] for tokens in COLOURED]
    requests = [SampleRequest(4, 0, 0), SampleRequest(5, 0, 0)]
    rollout = TextRollout(requests=requests, versions=[0, 0], sequences=sequences).with_fields(
        advantages=torch.tensor([0.5, 1.0, -0.25]),
        rollout_log_probs=torch.tensor([-1.0, -2.0, -3.0]),
        proximal_log_probs=torch.tensor([-1.0, -2.5, -2.75]),
    )
    flags = [torch.zeros(2, dtype=torch.bool)] * 3
    dump = RolloutDump(rollout, Advantages(torch.tensor([0.75, -0.25]), *flags, {}), step=7)
    texts = {1: "question", 2: "<script>alert(1)</script>", 3: '"', 4: "\x00"}
    page = Page(write_token_page(tmp_path / "tokens.html", dump, texts.__getitem__).read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.tags} and not page.open
    for text in ("Rollout of step 7", "sample 4 · advantage +0.75", texts[2], "⟨U+0000⟩", "question"):
        assert text in page.text
    assert "advantage: strongest colour at ±1 · log-prob difference: strongest colour at ±0.5" in page.text
    assert page.values("title", "b") == ["+0.5", "+1", "+0", "-0.5", "-0.25", "+0.25"]
    much = [style.split("--much:")[1] for style in page.values("style", "b")]
    assert much == ["0.35", "0.70", "0.00", "0.70", "0.17", "0.35"]
    one = Page(write_token_page(tmp_path / "one.html", dump, texts.__getitem__, [5]).read_text(encoding="utf-8"))
    assert "sample 5" in one.text and "sample 4" not in one.text
    with pytest.raises(ValueError, match=r"samples \[9\] are not among the 2 of this dump"):
        write_token_page(tmp_path / "one.html", dump, texts.__getitem__, [9])
    nothing = torch.tensor([float("nan"), 1.0, -0.25])
    known = {"advantages": nothing, "proximal_log_probs": torch.tensor([-1.0, -2.5, 0.0])}
    dump = RolloutDump(rollout.with_fields(**known), dump.advantages, step=7)
    page = Page(write_token_page(tmp_path / "tokens.html", dump, texts.__getitem__).read_text(encoding="utf-8"))
    assert "log-prob difference: this sample is not learned from" in page.text
    assert page.values("title", "b") == ["+nan", "+1", "+0", "-0.5", "-0.25"]
    assert page.values("style", "b")[0] == "--hue:205,45,45;--much:1.00"


COLOURED = (
    ([1, 2, 3], [False, True, True], [0.0, -1.0, -2.0], [-1, 0, 0]),
    ([1, 4], [False, True], [0.0, -3.0], [-1, 0]),
)


def test_the_page_is_true(tmp_path: Path) -> None:
    """The examples of docs/text_rl/debugging.md run, and its table names what a file holds."""
    text = (ROOT / "docs" / "text_rl" / "debugging.md").read_text(encoding="utf-8")
    read, coloured = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = write_example(tmp_path)
    names: dict[str, Any] = {"output_dir": tmp_path, "tokenizer": build_byte_tokenizer()}
    exec(read, names)
    assert names["dump"].step == 1 and len(names["known"]["advantages"]) == 6
    exec(coloured.replace('"tokens.html"', repr(str(tmp_path / "tokens.html"))), names)
    assert "sample 10" in (tmp_path / "tokens.html").read_text(encoding="utf-8")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) - set(re.findall(r"`([\w.]+)`", text)) == set()


def write_example(folder: Path) -> Path:
    path = dump_path(folder, 1)
    rollout, advantages = example()
    write_dump(path, rollout.with_fields(rollout_log_probs=torch.zeros(6)), advantages, step=1)
    return path
