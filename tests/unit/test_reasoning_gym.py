"""Problems of reasoning-gym by the name of a task, and their own verifiers as a reward, in the sandbox."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.data.prompt_loader import check_prompts
from sfumato.data.synthetic.reasoning_gym import load
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import load_text_prompts
from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.rewards.base import Sample
from sfumato.rewards.reasoning import ReasoningGym, _package_folders, verifier
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.sandbox.sandbox import SandboxError


@pytest.fixture
def gym(monkeypatch):
    """reasoning-gym, installed or in the folder that SFUMATO_REASONING_GYM names (pip install --target)."""
    folder = os.environ.get("SFUMATO_REASONING_GYM", "")
    if folder and (Path(folder) / "reasoning_gym").is_dir():
        monkeypatch.setattr(sys, "path", [*sys.path, folder])
    _package_folders.cache_clear()
    return pytest.importorskip(
        "reasoning_gym",
        reason="reasoning-gym is not installed: set SFUMATO_REASONING_GYM to the folder of pip --target",
    )


@pytest.fixture
def reward(gym):
    made = ReasoningGym()
    try:
        made.prepare()
    except SandboxError as error:
        pytest.skip(f"programs cannot be contained here: {error}")
    return made


def sample(row, text):
    metadata = {name: value for name, value in row.items() if name != "question"}
    return Sample(text=text, prompt=row["question"], metadata=json.loads(json.dumps(metadata)), group_id=0)


def test_problems_are_a_function_of_their_arguments(gym):
    rows = load("basic_arithmetic", 5, 3, {"max_digits": 2})
    assert (
        rows == load("basic_arithmetic", 5, 3, {"max_digits": 2}) != load("basic_arithmetic", 5, 4, {"max_digits": 2})
    )
    assert [row["metadata"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(isinstance(row["question"], str) and int(row["answer"]) is not None for row in rows)


def test_problems_that_each_process_would_make_otherwise_are_refused(monkeypatch):
    flags = SimpleNamespace(hash_randomization=1)
    monkeypatch.setattr("sfumato.data.synthetic.reasoning_gym.sys", SimpleNamespace(flags=flags))
    with pytest.raises(ConfigError, match=r"'word_ladder' .* export PYTHONHASHSEED=0 before the run"):
        load("word_ladder", 1, 1)


def test_problems_of_a_fixed_hash_seed_are_made_again(reward):
    program = "import json, sys; from sfumato.data.synthetic.reasoning_gym import load; sys.path[:] = sys.argv[1:]; "
    program += "print(json.dumps(load('word_ladder', 1, 1)))"
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    (row,) = json.loads(subprocess.check_output([sys.executable, "-c", program, *sys.path], env=environment))
    assert reward.score([sample(row, f"<answer>{row['answer']}</answer>")]) == [1.0]


def test_tasks_and_parameters_that_are_not_there_are_refused_by_name(gym):
    with pytest.raises(ConfigError, match="did you mean basic_arithmetic"):
        load("basic_arithmetics", 5, 3)
    with pytest.raises(ConfigError, match="no parameter 'max_digit'"):
        load("basic_arithmetic", 5, 3, {"max_digit": 2})
    with pytest.raises(ConfigError, match="refuses"):
        load("basic_arithmetic", 5, 3, {"max_digits": -1})
    with pytest.raises(ConfigError, match="size"):
        load("basic_arithmetic", 0, 3)


def test_verifiers_score_right_wrong_and_missing_answers(reward):
    rows = [*load("basic_arithmetic", 2, 3), *load("countdown", 1, 3), *load("spiral_matrix", 1, 3)]
    samples = []
    for row in rows:
        reward.check_row(row["question"], {name: row[name] for name in ("answer", "metadata")})
        samples += [sample(row, f"<answer>{row['answer']}</answer>"), sample(row, f"{row['answer']}")]
    samples.append(sample(rows[0], "<answer>no</answer>"))
    scores = Scorer([reward]).score(samples)
    assert not scores.failed
    assert scores.total[:-1].tolist() == [1.0, 0.0] * 4 and scores.total[-1] < 0.1


def test_an_answer_that_a_verifier_evaluates_reaches_nothing(reward, tmp_path):
    """spiral_matrix evaluates what looks like a list."""
    row = load("spiral_matrix", 1, 3)[0]
    attack = f"[__import__('os').system('touch {tmp_path}/escaped; touch /tmp/left'), 1]"
    other = "[__import__('os').path.exists('/tmp/left') and 1 / 0]"
    scores = Scorer([reward]).score(
        [sample(row, f"<answer>{text}</answer>") for text in (attack, row["answer"], other)]
    )
    assert not (tmp_path / "escaped").exists() and not Path("/tmp/left").exists()
    assert scores.total[1] == 1.0


def test_the_verifier_stays_and_answers_leave_no_processes(reward):
    """spiral_matrix evaluates what looks like a list; what it begins ends with it, whatever it tries."""
    row, scorer = load("spiral_matrix", 1, 3)[0], Scorer([reward])
    assert scorer.score([sample(row, f"<answer>{row['answer']}</answer>")]).total.tolist() == [1.0]
    program = verifier._program

    def answer(condition):  # a list that is right has 0.1
        return sample(row, f"<answer>{row['answer']!r}.split() if {condition} else []</answer>")

    system, parent = "__import__('os').system", "/proc/%d' % __import__('os').getppid()"
    alone = "len([each for each in __import__('os').listdir('/proc') if each.isdigit()]) == 3"
    attacks = [
        f"{system}('setsid sleep 1000 > /dev/null 2>&1 &') == 0",
        f"open('{parent} + '/fd/1', 'w').write('[1.0, 1.0, 1.0, 1.0, 1.0]\\n')",
        f"open('{parent} + '/mem', 'r+b')",
    ]
    scores = scorer.score([*map(answer, (*attacks, alone)), sample(row, f"<answer>{row['answer']}</answer>")])
    assert scores.total.tolist() == [0.1, 0.0, 0.0, 0.1, 1.0]
    again = scorer.score([answer(alone), answer("1 / 0"), sample(row, f"<answer>{row['answer']}</answer>")])
    assert again.total.tolist() == [0.1, 0.0, 1.0]
    assert verifier._program is program


def test_a_verifier_that_is_lost_costs_a_batch_and_is_started_again(reward):
    row, scorer = load("basic_arithmetic", 1, 3)[0], Scorer([reward])
    asked = [sample(row, f"<answer>{row['answer']}</answer>")]
    assert scorer.score(asked).total.tolist() == [1.0]
    verifier._program._running.end()
    lost = scorer.score(asked)
    assert math.isnan(lost.total[0]) and "the verifier of reasoning-gym gave no scores" in next(iter(lost.failed))
    assert scorer.score(asked).total.tolist() == [1.0]


def test_what_cannot_be_scored_has_no_value(reward):
    row = load("basic_arithmetic", 1, 3)[0]
    changed = {**row, "answer": "another"}
    scores = Scorer([reward]).score([sample(changed, "<answer>1</answer>"), sample(row, "<answer>1</answer>")])
    assert math.isnan(scores.total[0]) and not math.isnan(scores.total[1])
    assert "makes another problem" in next(iter(scores.failed))
    for metadata in ({}, {"metadata": {}}, {"metadata": {**row["metadata"], "seed": "3"}, "answer": "1"}):
        with pytest.raises(DataError, match="'metadata'"):
            reward.check_row("p", metadata)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingDependencyError, match=r"sfumato\[environments\]"):
        load("basic_arithmetic", 1, 1)


def test_prompts_of_a_task(gym):
    data_type = {"type": "reasoning_gym", "task": "basic_arithmetic", "size": 200, "num_eval": 20}
    data_type["parameters"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = TextPromptDataConfig(data_type=data_type)
    template = build_prompt_template(config, build_byte_tokenizer())
    train, held_out = (load_text_prompts(config, template, split, seed=3) for split in ("train", "eval"))
    assert len(held_out) == 20 and 100 < len(train) < 200, "problems with one digit repeat"
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}
    check_prompts([*train, *held_out], [ReasoningGym().check_row])
    again = load("basic_arithmetic", 200, 6, data_type["parameters"])
    for prompt in train[:20]:
        row = again[prompt.metadata["metadata"]["index"]]
        assert (prompt.text, prompt.metadata["answer"]) == (row["question"], row["answer"])
    assert train[0].where.startswith("reasoning-gym basic_arithmetic problem ")
