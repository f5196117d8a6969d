"""``sfumato new`` and ``sfumato recipes``: what comes with sfumato, listed and copied."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.cli import main
from sfumato.commands.shipped_files import config_files, recipes_of, summary_of_config, task_files
from sfumato.config.load import load_config
from sfumato.config.recipes import FORWARD_RECIPES, TRAJECTORY_RECIPES
from sfumato.config.shipped import find_beside
from sfumato.config.tasks import TASKS, schema_of
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.yaml_text import read_yaml
from tests.tiny import ROOT


def run_the_projects_test(project: Path) -> subprocess.CompletedProcess[str]:
    """From a folder above, as the README says, without a configuration of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), project.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=project.parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_project_is_complete_and_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "a/my_project", "--task", "rl_diffusion", "--config", "flow_grpo_sd35_ocr"]) == 0
    project = Path("a/my_project")
    names = {"rl_diffusion.py", "config.yaml", "tiny.yaml", "sd3.yaml", "README.md", "test_rl_diffusion.py"}
    assert {path.name for path in project.iterdir()} == names
    schema = schema_of("rl_diffusion")
    assert load_config(schema, project / "config.yaml") == load_config(
        schema, ROOT / "configs/rl/flow_grpo_sd35_ocr.yaml"
    )
    assert "sfumato launch a/my_project/rl_diffusion.py a/my_project/config.yaml" in (project / "README.md").read_text()
    # from another folder, too: what the YAML names is found beside it
    monkeypatch.chdir("/")
    tiny = load_config(schema, tmp_path / project / "tiny.yaml")
    assert Path(tiny.model.config_path or "") == tmp_path / project / "sd3.yaml"


def test_files_that_a_configuration_names_come_along_with_all_that_they_name(tmp_path: Path) -> None:
    project = tmp_path / "agents"
    assert main(["new", str(project), "--config", "text_rl/agent"]) == 0
    config = load_config(schema_of("rl_text"), project / "config.yaml")
    assert config.model.made_by == str(project / "calculator_sft.yaml")
    assert config.rollout.kind.path == f"{project}/calculating_agent.py:solve"
    maker = load_config(schema_of("train_text"), project / "calculator_sft.yaml")
    assert maker.model.config_path == str(project / "tiny_qwen3_2_layers.yaml")
    assert f"sfumato launch train_text {project}/calculator_sft.yaml" in (project / "calculator_sft.yaml").read_text()
    assert not any("train.sh" in path.read_text() for path in project.glob("*.yaml"))


def test_commands_of_a_project_can_be_pasted_whatever_its_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "it's mine", "--config", "quickstart/text_sft"]) == 0
    words = ["sfumato", "launch", "it's mine/train_text.py", "it's mine/config.yaml"]
    commands = [capsys.readouterr().out.splitlines()[-1]]
    commands += [line for line in (tmp_path / "it's mine/README.md").read_text().splitlines() if "launch" in line][:1]
    commands += [line[1:] for line in (tmp_path / "it's mine/config.yaml").read_text().splitlines() if "launch" in line]
    assert [shlex.split(command) for command in commands] == [words] * 3


def test_a_folder_that_exists_and_names_that_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["here", "--task", "train_text"], "here exists: name a folder that does not"),
        (["file/project", "--task", "train_text"], "file/project cannot be made: Not a directory"),
        (["new", "--task", "train_txt"], "there is no such task; did you mean 'train_text'?"),
        (["new", "--config", "qwen3_8b_stf"], "did you mean 'qwen3_8b_sft'? (`sfumato recipes` lists them)"),
        (["new", "--config", "autoencoder"], "several of that name: omni/autoencoder, quickstart/autoencoder"),
        (["new", "--task", "train_text", "--config", "quickstart/rl"], "is a configuration of rl_diffusion"),
        (["new"], "name --task, --config or both"),
    ):
        assert main(["new", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err
        assert not (tmp_path / "new").exists() and not list((tmp_path / "here").iterdir())


def test_what_is_listed_is_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed["tasks"]) == set(TASKS) == set(task_files())
    yaml_files = {path for path in (ROOT / "configs").rglob("*.yaml") if "train" in read_yaml(path)}
    assert set(config_files().values()) == yaml_files
    for task, recipes in (
        ("rl_diffusion", TRAJECTORY_RECIPES),
        ("rl_diffusion_forward", FORWARD_RECIPES),
        ("rl_text", TEXT_RECIPES),
    ):
        assert list(recipes_of(task)) == list(recipes)
    sentences = [sentence for entries in listed.values() for sentence in entries.values()]
    assert all(len(sentence) > 8 for sentence in sentences)
    assert main(["recipes", "DPPO"]) == 0
    assert "configurations:\n  quickstart/algorithms/dppo" in capsys.readouterr().out
    assert main(["recipes", "no such thing"]) == 2


def test_a_sentence_ends_where_it_does(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "# SFT of Llama 3.1 8B (arXiv 2407.21783) on 8 GPUs:\n# one epoch. More of it.\n#   a command\nx: 1\n"
    )
    assert summary_of_config(path) == "SFT of Llama 3.1 8B (arXiv 2407.21783) on 8 GPUs: one epoch"


def test_files_beside_a_configuration_are_found_where_the_call_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "model.yaml").write_text("")
    (tmp_path / "project" / "rewards.py").write_text("")
    data = {
        "model": {"config_path": "model.yaml"},
        "reward": {"rewards": [{"path": "rewards.py:score"}, {"path": "x"}]},
    }
    beside = find_beside(data, "project/run.yaml")
    assert beside["model"] == {"config_path": "project/model.yaml"}
    assert beside["reward"] == {"rewards": [{"path": "project/rewards.py:score"}, {"path": "x"}]}
    (tmp_path / "model.yaml").write_text("")
    assert find_beside(data, "project/run.yaml")["model"] == {"config_path": "model.yaml"}
    # those of shipped configurations are named from the folder that holds configs/
    shipped = ROOT / "configs" / "quickstart" / "text_sft.yaml"
    maker = find_beside(read_yaml(shipped), shipped)["model"]["made_by"]
    assert maker == str(ROOT / "configs" / "quickstart" / "text_pretrain.yaml")


def test_the_test_of_a_project_passes_and_notices_a_broken_script(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    assert main(["new", str(project), "--task", "train_text"]) == 0
    done = run_the_projects_test(project)
    assert done.returncode == 0, done.stdout
    script = project / "train_text.py"
    script.write_text(script.read_text().replace("def main(", "def renamed(", 1))
    done = run_the_projects_test(project)
    assert done.returncode == 1 and "name 'main' is not defined" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"train_text"}))
def test_the_test_of_every_tasks_project_passes(task: str, tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "mine"), "--task", task]) == 0
    done = run_the_projects_test(tmp_path / "mine")
    assert done.returncode == 0, done.stdout
