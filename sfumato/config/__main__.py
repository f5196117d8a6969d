"""Reads a task's configuration before the task is started: ``python -m sfumato.config TASK.py CONFIG.yaml [...]``.

``train.sh`` runs it first, so that ``--help`` and a mistake need neither torch nor transformers, and a mistake is one
message however many processes would have started.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from sfumato.config.base import Section
from sfumato.config.characters import printable
from sfumato.config.load import asks_for_help, parse_config
from sfumato.errors import UserError


class _Deferred:
    """Stands in ``sys.modules`` for a module, and loads it when something of it is used.

    Files of formulas import torch for their functions, while their classes, which a configuration names, do without.
    It is no module object, so that ``inspect`` does not look into it.
    """

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        self.__spec__ = spec

    def __getattr__(self, attribute: str) -> object:
        name = self.__spec__.name
        if sys.modules.get(name) is self:  # else the module has been loaded, and somebody still holds this object
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)


class _LoadedAlready(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of a deferred package that were loaded when one of them was asked for.

    ``import torch.distributed`` looks for the package's path first, which loads the package, and that in turn the
    module; without this it would be loaded once more, which torch ends the process for.
    """

    def __init__(self, package: str) -> None:
        self.prefix = f"{package}."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not (name.startswith(self.prefix) and name in sys.modules):
            return None
        # The loader gives the module's own spec back: importlib writes this one into it meanwhile.
        return importlib.machinery.ModuleSpec(name, self, loader_state=sys.modules[name].__spec__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # the spec that find_spec made of it
        module.__spec__ = module.__spec__.loader_state


def defer(name: str) -> None:
    """Puts off the import of a package until something of it is used; nothing happens where it is not installed."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    if spec is not None and name not in sys.modules:
        sys.modules[name] = _Deferred(spec)  # type: ignore[assignment]
        sys.meta_path.insert(0, _LoadedAlready(name))


def schema_of_script(script: Path) -> type[Section] | None:
    """The configuration's class that a task's last line names, ``run_task(main, CLASS)``.

    None for a script that ends otherwise or defines the class itself: it reads its configuration itself.
    """
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None  # starting it tells why
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    names = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "run_task"]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and names):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == getattr(names[-1], "id", None):
                return getattr(importlib.import_module(str(node.module)), alias.name)
    return None


def main(arguments: list[str]) -> int:
    """Reads the configuration of a task and returns the exit code: 2 for a mistake, which is printed."""
    script, *rest = arguments
    sys.path.insert(0, str(Path(script).parent))  # as for the script itself: classes of one's own may lie there
    schema = schema_of_script(Path(script))
    if schema is None:
        if asks_for_help(rest):
            os.execv(sys.executable, [sys.executable, *arguments])
        return 0
    try:
        parse_config(schema, rest)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    defer("torch")
    sys.exit(main(sys.argv[1:]))
