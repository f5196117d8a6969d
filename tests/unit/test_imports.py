"""The house: what imports what, what importing costs, and how large files may be."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "sfumato").rglob("*.py"))
TASKS = sorted((ROOT / "tasks").rglob("*.py"))
HEAVY = ("torch", "diffusers", "transformers", "peft", "datasets", "ray", "PIL", "matplotlib")


def relative(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path, source=None):
    """Every module that a file imports, at its top or inside a function, as dotted names."""
    tree = tree_of(path) if source is None else ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "sfumato":
                yield from (f"sfumato.{name.name}" for name in node.names)
            else:
                yield str(node.module)


def part_of(name):
    """The part of the house that a dotted name belongs to; None for other packages."""
    top, _, rest = name.partition(".")
    if top == "tasks":
        return "tasks"
    return rest.split(".")[0] if top == "sfumato" else None


def loaded_after(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_importing_the_package_loads_nothing_heavy():
    loaded = loaded_after("import sfumato")
    assert "sfumato" in loaded
    assert not set(loaded) & {*HEAVY, "numpy", "pydantic", "yaml"}
    assert [name for name in loaded if name.startswith("sfumato")] == ["sfumato", "sfumato.moved"]


def test_reading_a_config_loads_no_framework():
    loaded = loaded_after(
        "import sfumato.config.load, sfumato.config.sections, sfumato.config.dit, sfumato.config.recipes"
    )
    assert "sfumato.config.load" in loaded and not set(loaded) & {*HEAVY, "numpy"}


def test_no_import_goes_round_in_a_circle():
    """Imports inside functions count too, those for type checkers alone do not: two classes may name each other."""
    modules = {".".join(module_of(path)): path for path in LIBRARY}
    graph = {name: {target for target in targets_of(path, modules) if target != name} for name, path in modules.items()}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == [["a", "b", "c"]]


def targets_of(path, modules):
    """The modules of the library that a file imports, with ``from package import module`` as the module."""
    tree = tree_of(path)
    checkers = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    ignored = {id(node) for block in checkers for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in modules else node.module for name in inside if node.module in modules)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)


ALONE = (
    "rewards/coding/sandbox_worker.py",
    "rewards/coding/verifier.py",
    "rollout/engines/served/owner_process.py",
)
"""Programs that run where sfumato is not: in a sandbox, or by the Python of an engine."""


@pytest.mark.parametrize("file", ALONE)
def test_a_program_that_runs_alone_imports_nothing_of_the_library(file):
    modules = {".".join(module_of(path)): path for path in LIBRARY}
    assert not set(targets_of(ROOT / "sfumato" / file, modules))


def circles(graph):
    """Groups of modules each of which leads to all others of its group."""
    reached = {}
    for name in graph:
        waiting, seen = [name], set()
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return [[*group] for group in sorted(groups) if group]


def test_algorithms_know_only_torch_and_themselves():
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "jaxtyping"}  # the last for type checkers only
    for path in (file for file in LIBRARY if module_of(file)[1:2] == ("algorithms",)):
        for name in imports_of(path):
            assert name.split(".")[0] in allowed or name.startswith("sfumato.algorithms"), f"{relative(path)}: {name}"


TASK_CONFIGS = {"diffusion_rl", "dit", "text", "text_reward", "text_rl"}
"""Modules of sfumato.config that hold the configuration of one modality's tasks."""


def test_rooms_that_all_modalities_share_know_the_configuration_of_none():
    assert {f"{task_config}.py" for task_config in TASK_CONFIGS} <= {
        path.name for path in (ROOT / "sfumato/config").iterdir()
    }
    for path in LIBRARY:
        if {"rewards", "runtime", "data", "tracking"} & set(module_of(path)[1:2]):
            imported_configs = {name.split(".")[2] for name in imports_of(path) if name.startswith("sfumato.config.")}
            assert not imported_configs & TASK_CONFIGS, f"{relative(path)} imports {imported_configs & TASK_CONFIGS}"


def test_the_source_of_the_runtime_names_no_modality():
    """What it imports is the contract's business; words give away what an import would not."""
    words = ("velocity", "latent", "diffusion", "picture", "image of")
    for path in (ROOT / "sfumato/runtime").rglob("*.py"):
        results = [word for word in words if word in path.read_text(encoding="utf-8")]
        assert not results, f"{relative(path)}: {results}"


CONTRACTS = {
    "tracking/folder.py": ("sfumato.checkpoint.saving", "An import only goes down"),
    "models/language/critic.py": ("sfumato.checkpoint.state", "An import only goes down"),
    "data/text/loader.py": ("sfumato.models.language.model", "An import only goes down"),
    "data/files/mixing.py": ("sfumato.checkpoint.state", "An import only goes down"),
    "optim/ema.py": ("sfumato.tracking.meters", "An import only goes down"),
    "runtime/update.py": ("sfumato.data.text.packing", "The runtime knows no modality, however far its imports go"),
    "checkpoint/state.py": ("sfumato.data.text.format", "The runtime knows no modality, however far its imports go"),
    "algorithms/noise.py": ("sfumato.errors", "Algorithms know torch and themselves"),
    "rewards/base.py": ("sfumato.algorithms.noise", "Rewards know neither models nor algorithms"),
    "models/diffusion/base.py": (
        "sfumato.models.language.model",
        "Models of diffusion and of language know nothing of each",
    ),
    "data/text/token_source.py": (
        "sfumato.data.images.image_text",
        "Text is read without pictures' datasets, and pictures without",
    ),
    "runtime/weight_sync/sync.py": ("sfumato.checkpoint.saving", "Weights on their way need no checkpoint"),
    "rollout/batch.py": ("ray", "Only the runtime's cluster imports Ray"),
}
"""By file an import that must not be in it, and the contract in pyproject.toml that is broken then."""


def test_each_contract_is_broken_by_the_import_that_it_forbids(tmp_path):
    shutil.copytree(ROOT / "sfumato", tmp_path / "sfumato", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (module, _) in CONTRACTS.items():
        with (tmp_path / "sfumato" / file).open("a", encoding="utf-8") as source:
            source.write(f"\n\ndef late():\n    import {module}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    settings = ["--no-cache", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    reports = done.stdout.partition("Broken contracts")[2]
    assert reports, done.stdout
    sections = re.split(r"\n([A-Z].*)\n-+\n", reports)  # the name of a contract is underlined
    broken = dict(zip(sections[1::2], sections[2::2], strict=True))
    for file, (module, contract) in CONTRACTS.items():
        importer = ".".join(module_of(ROOT / "sfumato" / file))
        (report,) = [lines for name, lines in broken.items() if name.startswith(contract)]
        assert f"{importer} -> {module} (l." in report, f"{contract}: {report}"


def test_the_configuration_that_all_rl_tasks_share_knows_no_modality():
    imported = set(imports_of(ROOT / "sfumato/config/rl.py"))
    assert not imported & {
        f"sfumato.config.{task_config}" for task_config in TASK_CONFIGS | {"recipes", "image_data", "text_data"}
    }


def test_the_walk_sees_every_kind_of_import():
    source = "import ray\ndef f():\n    from sfumato.models.lora import x\nfrom sfumato import data\nimport a.b as c\n"
    assert set(imports_of(Path("x.py"), source)) == {"ray", "sfumato.models.lora", "sfumato.data", "a.b"}
    assert len(LIBRARY) > 40 and len(TASKS) >= 3


def test_no_file_has_an_empty_name():
    forbidden = {"util", "helper", "misc", "common", "manager"}
    for path in [*LIBRARY, *TASKS, *sorted((ROOT / "tests").rglob("*.py"))]:
        for part in path.relative_to(ROOT).with_suffix("").parts:
            words = part.lower().split("_")
            assert not {word.removesuffix("s") for word in words} & forbidden, f"{relative(path)}: name what it does"


def test_files_are_small_enough_to_be_read():
    for limit, paths in ((600, LIBRARY), (400, TASKS)):
        for path in paths:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= limit, f"{relative(path)} has {lines} lines, more than {limit}"


MOST_LINES = {
    "rl_diffusion": 30_200,
    "rl_diffusion_direct": 29_300,
    "rl_diffusion_forward": 29_700,
    "rl_text": 29_900,
    "train_autoencoder": 21_700,
    "train_dit": 24_800,
    "train_dit_dpo": 26_150,
    "train_image_tokenizer": 27_700,
    "train_omni": 38_100,
    "train_text": 28_350,
    "train_text_dpo": 28_100,
    "train_text_kto": 28_250,
    "train_text_reward": 27_750,
}
"""Lines of the library and the task that importing a task may load: what every run of it needs. What a run may switch
on is imported where that is chosen, when its parts are built."""

SWITCHED_ON = {
    "config.help",
    "data.files.remote",
    "data.media.vision",
    "models.language.vision_load",
    "optim.muon",
    "parallel.expert",
    "parallel.memory",
    "parallel.pipeline",
    "parallel.sequence",
    "parallel.tensor",
    "rewards.scoring.workers",
    "rollout.debug.dumps",
    "rollout.engines.served.engine",
    "rollout.oversampling.partial",
    "runtime.weight_sync.sync",
    "tracking.services",
}
"""Modules that a run of text or of its RL loads where its configuration asks for them."""


def test_a_task_loads_no_more_than_every_run_of_it_needs():
    modules = {".".join(module_of(path)): path for path in [*LIBRARY, *TASKS]}
    assert set(MOST_LINES) == {path.stem for path in TASKS}
    loaded = {task: loaded_at_once(f"tasks.{task}", modules) for task in MOST_LINES}
    for task, most in MOST_LINES.items():
        lines = sum(len(modules[name].read_text(encoding="utf-8").splitlines()) for name in loaded[task])
        assert lines <= most, f"tasks/{task}.py loads {lines} lines: import what a run may lack where it is chosen"
    switched_on = {f"sfumato.{name}" for name in SWITCHED_ON}
    assert switched_on <= modules.keys()
    assert not switched_on & (loaded["rl_text"] | loaded["train_text"])
    # what Python says: the modules are counted by the text of their imports
    counted = {name for name in loaded_after("import tasks.rl_text") if name in modules}
    assert loaded["rl_text"] == counted


def loaded_at_once(task, modules):
    """The modules that importing a task loads, packages included: by imports that stand in no function."""
    waiting, loaded = [task], {task}
    while waiting:
        statements = [*tree_of(modules[waiting.pop()]).body]
        targets = set()
        while statements:
            node = statements.pop()
            if isinstance(node, ast.ImportFrom):
                inside = {f"{node.module}.{name.name}" for name in node.names}
                targets |= (inside & modules.keys()) | {str(node.module)}
            elif isinstance(node, ast.Import):
                targets |= {name.name for name in node.names}
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                statements += node.orelse
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                statements += [
                    child_node for child_node in ast.iter_child_nodes(node) if isinstance(child_node, ast.stmt)
                ]
        names = [target.split(".") for target in targets if target in modules]
        new = {".".join(parts[:count]) for parts in names for count in range(1, len(parts) + 1)} & modules.keys()
        waiting += new - loaded
        loaded |= new
    return loaded


def class_names(path):
    return [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]


SAME_NAME = {
    "Access": "what each transport of weights is given to reach the receivers",
    "Receiving": "each transport of weights has one, behind one protocol",
    "Sending": "each transport of weights has one, behind one protocol",
    "SampleMSE": "a penalty on decisions and one on final samples, chosen by the same type",
    "VelocityMSE": "as SampleMSE",
}
"""Public classes of one name in several modules, and why."""


def test_a_class_name_means_one_thing():
    counter = Counter(
        name for path in [*LIBRARY, *TASKS] for name in set(class_names(path)) if not name.startswith("_")
    )
    twice = {name for name, count in counter.items() if count > 1}
    assert counter["Sample"] == counter["Prompt"] == 1
    assert twice - set(SAME_NAME) == set(), "rename one of each"
    assert set(SAME_NAME) - twice == set(), "these names are no longer in several modules: take them off the list"


def test_a_module_of_a_package_that_was_put_off_is_loaded_once():
    """A part of one's own may import torch.distributed while its name is read; twice would end the process."""
    code = (
        "from sfumato.config.__main__ import defer\ndefer('torch')\n"
        "import torch.distributed as dist, torch, sys\n"
        "assert dist is sys.modules['torch.distributed'] is torch.distributed and dist.__spec__.origin\n"
        "print(float(torch.ones(2).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "2.0", done.stderr
