"""Rollouts in files: the same when read, and an update learns the same from them."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sfumato.algorithms.advantages import Advantages
from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.errors import ConfigError, DataError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rollout.batch import SampleRequest
from sfumato.rollout.debug import dumps
from sfumato.rollout.debug.dump_writer import RolloutDumps
from sfumato.rollout.debug.dumps import RolloutDump, dump_path, read_dump, write_dump
from sfumato.rollout.debug.replay import DumpedRollouts
from sfumato.rollout.debug.token_colours import write_token_page
from sfumato.rollout.engines.base import FinishReason
from sfumato.rollout.text.tokens import TextRollout, TokenSequence
from sfumato.tracking.json_lines import read_jsonl
from tests.text_rewards import Ascii
from tests.tiny import ROOT, load_task, run_task_here, tiny_text_rl_config, weights_in
from tests.unit.test_report import Page


def sequence(length: int, drawn: Sequence[int], reason: FinishReason = "stop", seed: int = 0) -> TokenSequence:
    generator = np.random.default_rng(seed)
    mask = np.isin(np.arange(length), drawn)
    log_probs = np.where(mask, -generator.random(length) * 30, 0).astype(np.float32)
    tokens = generator.integers(0, 2**31 - 1, length).astype(np.int32)
    return TokenSequence(tokens, mask, log_probs, np.where(mask, seed, -1).astype(np.int32), reason)


def example() -> tuple[TextRollout, Advantages, dict[str, torch.Tensor]]:
    """Four samples: one of a turn, one of two sequences, one that drew nothing, one that has no sequence."""
    sequences_of_samples = [
        [sequence(5, [3, 4])],
        [sequence(6, [1, 2, 5], "length", 1), sequence(3, [2], "abort", 2)],
        [sequence(2, [], "length", 3)],
        [],
    ]
    requests = [SampleRequest(10 + row, row // 2, 7 - row, is_first=row % 2 == 0) for row in range(4)]
    rollout = TextRollout(requests=requests, versions=[3, 3, 2, 3], sequences=sequences_of_samples)
    fields = {"advantages": torch.randn(6), "proximal_log_probs": torch.tensor([-0.0, -1e-38, -80.0, 1.0, 2.0, 3.0])}
    flags = [torch.tensor([row == place for row in range(4)]) for place in range(3)]
    rewards = torch.tensor([0.5, 1 / 3, torch.nan, 0.0], dtype=torch.float64)
    settings = {"rewards": rewards, "components": {"length": rewards * 2, "a.b": rewards - 1}}
    values = torch.tensor([0.25, -1 / 3, 0.0, 1e-30])
    return rollout, Advantages(values, *flags, {"x": 1.0}, **settings), fields


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def assert_equal(
    rollout_dump: RolloutDump, rollout: TextRollout, advantages: Advantages, token_values: dict[str, torch.Tensor]
) -> None:
    assert rollout_dump.rollout.requests == rollout.requests and rollout_dump.rollout.versions == rollout.versions
    for some, others in zip(rollout_dump.rollout.sequences, rollout.sequences, strict=True):
        for output, other in zip(some, others, strict=True):
            for name in ("token_ids", "drawn", "log_probs", "versions"):
                assert same(getattr(output, name), getattr(other, name)), name
            assert output.finish_reason == other.finish_reason
    assert set(rollout_dump.token_values) == set(token_values)
    assert all(same(rollout_dump.token_values[name].numpy(), token_values[name].numpy()) for name in token_values)
    assert set(rollout_dump.advantages.components) == set(advantages.components)
    for name, expected in advantages.components.items():
        assert same(rollout_dump.advantages.components[name].numpy(), expected.numpy())
    for name in ("values", "failed", "no_spread", "left_out", "rewards"):
        assert same(getattr(rollout_dump.advantages, name).numpy(), getattr(advantages, name).numpy()), name


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    rollout, advantages, token_values = example()
    path = dump_path(tmp_path, 10, 3)
    write_dump(path, rollout, advantages, token_values, step=10, data_rank=3)
    assert path.relative_to(tmp_path) == Path("rollouts/step_000010.rank3.safetensors")
    dump = read_dump(path)
    assert_equal(dump, rollout, advantages, token_values)
    assert dump.step == 10 and dump.rank_batch.sample_ids == {10: 0, 11: 1, 12: 2, 13: 3}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_a_rank_without_samples_writes_none(tmp_path: Path) -> None:
    rollout, advantages, _ = example()
    empty = rollout.rows([])
    write_dump(dump_path(tmp_path, 1), empty, advantages.rows([]), {}, step=1)
    assert len(read_dump(dump_path(tmp_path, 1)).rollout) == 0


@pytest.mark.slow
def test_an_update_learns_the_same_from_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "rollout": {"dump": True, "temperature": 0.8},
        "algorithm": {"kl": {"coef": 0.1}},
        "train": {"max_steps": 1, "global_batch_size": 8, "micro_batch_size": 3},
    }
    config = tiny_text_rl_config(tmp_path, **settings)
    drawn = read_dump(dump_path(run_task_here("rl_text", config), 1))
    assert len(drawn.rollout) == 16 and drawn.advantages.values.any()
    assert {"rollout_log_probs", "reference_log_probs", "proximal_log_probs", "advantages"} <= set(drawn.token_values)

    task, learned = load_task("rl_text"), []
    update_policy, draw = task.update_policy, task.generate

    def of_dump(actor: Any, part: Any, advantages: Any, config: Any, step: int) -> dict[str, float]:
        learned.append(part)
        text_rollout = TextRollout(
            requests=drawn.rollout.requests, versions=drawn.rollout.versions, sequences=drawn.rollout.sequences
        )  # all that the update computes itself is computed again
        return update_policy(actor, drawn.rank_batch._replace(rollouts=[text_rollout]), drawn.advantages, config, step)

    def other_noise(state: Any, requests: Any, iteration: int, version: int) -> Any:
        return draw(state, requests, iteration + 100, version)

    monkeypatch.setattr(task, "update_policy", of_dump)
    monkeypatch.setattr(task, "generate", other_noise)
    config["train"]["output_dir"] = str(tmp_path / "again")
    again = run_task_here(task, config)
    tokens = [
        answer.token_ids.tolist() for rollout in learned[0][0] for sequence in rollout.sequences for answer in sequence
    ]
    assert tokens != [answer.token_ids.tolist() for sequence in drawn.rollout.sequences for answer in sequence]
    first, second = weights_in(tmp_path / "run/hf_ckpt"), weights_in(again / "hf_ckpt")
    assert first == second
    assert_equal(read_dump(dump_path(again, 1)), drawn.rollout, drawn.advantages, dict(drawn.token_values))


@pytest.mark.slow
def test_a_run_from_dumps_has_the_bits_of_the_run_that_drew_them(tmp_path: Path) -> None:
    settings = {"rollout": {"dump": True, "temperature": 0.8}, "algorithm": {"kl": {"coef": 0.1}}}
    settings["train"] = {"max_steps": 3, "global_batch_size": 8}
    drawn = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "drawn", **settings))
    settings["rollout"] |= {"load_dump": str(drawn)}
    settings["reward"] = {"rewards": [{"type": "tests.text_rewards:FirstIsAscii", "name": "ascii"}]}  # for evaluation
    learned = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "learned", **settings))
    lines = [
        [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in read_jsonl(path)]
        for path in (drawn / "metrics.jsonl", learned / "metrics.jsonl")
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 4
    assert weights_in(drawn / "hf_ckpt") == weights_in(learned / "hf_ckpt")
    for step in (1, 2, 3):
        first = read_dump(dump_path(drawn, step))
        assert_equal(read_dump(dump_path(learned, step)), first.rollout, first.advantages, dict(first.token_values))


@pytest.mark.slow
def test_drawing_alone_and_learning_alone(tmp_path: Path) -> None:
    only = {"rollout": {"rollout_only": True, "micro_batch_size": 8}, "train": {"max_steps": 2}}
    drawn = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "drawn", **only))
    lines = [line for line in read_jsonl(drawn / "metrics.jsonl") if line["step"]]
    assert [(line["rows"], line["updates"]) for line in lines] == [(0.0, 0.0)] * 2
    dumps = [read_dump(dump_path(drawn, step)) for step in (1, 2)]
    assert dumps[0].rollout.requests[0].prompt_id != dumps[1].rollout.requests[0].prompt_id
    for line, dump in zip(lines, dumps, strict=True):
        assert not dump.token_values and dump.temperature == 1.0
        assert {
            int(version) for sequence in dump.rollout.sequences for one in sequence for version in one.versions
        } == {-1, 0}
        assert float(dump.advantages.rewards.mean()) == pytest.approx(line["reward/total"])
        assert torch.equal(dump.advantages.components["ascii"], dump.advantages.rewards)

    settings = {"rollout": {"load_dump": str(drawn)}, "train": {"max_steps": 2}, "algorithm": {"recipe": "rloo"}}
    learned = run_task_here("rl_text", tiny_text_rl_config(tmp_path / "learned", **settings))
    again = [line for line in read_jsonl(learned / "metrics.jsonl") if line["step"]]
    assert [line["reward/total"] for line in again] == [line["reward/total"] for line in lines]
    assert [line["staleness/max"] for line in again] == [0.0, 1.0]  # both were drawn before the first update
    assert again[0]["mismatch/log_ratio_max"] < 1e-5 < 1e-3 < again[1]["mismatch/log_ratio_max"]
    assert all(line["rows"] > 0 and line["updates"] == 1 for line in again)
    assert weights_in(learned / "hf_ckpt") != weights_in(drawn / "hf_ckpt")


def dumped(folder: Path, rollout: TextRollout, advantages: Advantages, rank: int = 0, **more: Any) -> DumpedRollouts:
    write_dump(dump_path(folder, 1, rank), rollout, advantages, {}, 1, rank, **more)
    template = build_prompt_template(TextPromptDataConfig(synthetic={"problem": "add"}), build_byte_tokenizer())
    return DumpedRollouts(folder, template, temperature=0.8)


def test_samples_are_found_in_the_dumps_of_all_ranks(tmp_path: Path) -> None:
    rollout, advantages, _ = example()
    for sequence in rollout.sequences:
        for answer in sequence:
            answer.token_ids[:] = 65 + answer.token_ids % 20
    dumped(tmp_path, rollout.rows([0, 1]), advantages.rows([0, 1]))
    source = dumped(tmp_path, rollout.rows([2, 3]), advantages.rows([2, 3]), rank=1, temperature=0.8)
    wanted = [rollout.requests[row] for row in (3, 1)]
    actual, samples = source.draw(wanted, 0)
    assert actual.requests == wanted and actual.versions == [3, 3]
    assert [len(sequence) for sequence in actual.sequences] == [0, 2] and samples[1].num_tokens == 4
    assert samples[1].scores == {"length": pytest.approx(2 / 3), "a.b": pytest.approx(-2 / 3)}
    assert samples[0].text == "" and len(samples[1].text) == 4 and samples[1].group_id == 0
    with pytest.raises(DataError, match="have no sample 77"):
        source.draw([SampleRequest(77, 0, 0)], 0)
    # of a run with a smaller rollout.n: other prompts' answers would be compared with this one
    moved = replace(wanted[1], group_id=wanted[1].group_id + 1)
    with pytest.raises(DataError, match=rf"sample {moved.sample_id} in another group: rollout\.num_prompts"):
        source.draw([moved], 0)
    with pytest.raises(DataError, match="is missing"):
        source.draw(wanted, 1)


def test_dumps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rollout, advantages, _ = example()
    wanted = rollout.requests[:1]
    with pytest.raises(DataError, match=r"token \d+, which the tokenizer of"):
        dumped(tmp_path / "tokens", rollout, advantages).draw(wanted, 0)
    with pytest.raises(ConfigError, match=r"rollout\.temperature 0\.8: .* was drawn with 0\.5"):
        dumped(tmp_path / "warm", rollout, advantages, temperature=0.5).draw(wanted, 0)
    with pytest.raises(ConfigError, match=r"rollout\.load_dump: .* was drawn with another tokenizer"):
        dumped(tmp_path / "words", rollout, advantages, vocabulary="of another").draw(wanted, 0)
    without = replace(advantages, components={})
    with pytest.raises(DataError, match="holds no rewards"):
        dumped(tmp_path / "old", rollout, without).draw(wanted, 0)
    with pytest.raises(ConfigError, match="has no folder rollouts"):
        DumpedRollouts(tmp_path, None, 1.0)  # type: ignore[arg-type]
    scorer = Scorer([Ascii()])
    sample = Sample(prompt="", group_id=0, text="", scores={"other": 1.0})
    with pytest.raises(DataError, match="no value of the reward 'ascii'"):
        scorer.score([sample])
    assert scorer.score([replace(sample, scores={"ascii": 0.25})]).total.tolist() == [0.25]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"load_dump": "x", "rollout_only": True}}, "remove one of them"),
        ({"rollout": {"load_dump": "x", "over_sampling_batch_size": 8}}, "remove one of them"),
        ({"rollout": {"load_dump": "x", "hybrid_engine": False}}, "no engine nor sampler"),
        ({"rollout": {"load_dump": "x"}, "runtime": {"backend": "ray"}}, "in_process"),
        ({"rollout": {"rollout_only": True}, "train": {"load_checkpoint_path": "auto"}}, "nothing to go on from"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TextRLConfig, overrides=tiny_text_rl_config(tmp_path, **settings))


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
    sequences = [[TokenSequence(*(np.array(token) for token in tokens))] for tokens in COLOURED]
    requests = [SampleRequest(4, 0, 0), SampleRequest(5, 0, 0)]
    rollout = TextRollout(requests=requests, versions=[0, 0], sequences=sequences)
    token_values = {
        "advantages": torch.tensor([0.5, 1.0, -0.25]),
        "rollout_log_probs": torch.tensor([-1.0, -2.0, -3.0]),
        "proximal_log_probs": torch.tensor([-1.0, -2.5, -2.75]),
    }
    flags = [torch.zeros(2, dtype=torch.bool)] * 3
    dump = RolloutDump(rollout, Advantages(torch.tensor([0.75, -0.25]), *flags, {}), 7, token_values=token_values)
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
    token_values |= {"advantages": nothing, "proximal_log_probs": torch.tensor([-1.0, -2.5, 0.0])}
    dump = RolloutDump(rollout, dump.advantages, 7, token_values=token_values)
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
    assert names["dump"].step == 1 and len(names["token_values"]["advantages"]) == 6
    exec(coloured.replace('"tokens.html"', repr(str(tmp_path / "tokens.html"))), names)
    assert "sample 10" in (tmp_path / "tokens.html").read_text(encoding="utf-8")
    with safe_open(path, "pt") as file:
        named = {re.sub(r"^rewards\..*", "rewards.NAME", name) for name in file.keys()}  # noqa: SIM118
    assert named - set(re.findall(r"`([\w.]+)`", text)) == set() and "rewards.NAME" in named


def write_example(folder: Path) -> Path:
    path = dump_path(folder, 1)
    rollout, advantages, token_values = example()
    write_dump(path, rollout, advantages, token_values | {"rollout_log_probs": torch.zeros(6)}, step=1)
    return path
