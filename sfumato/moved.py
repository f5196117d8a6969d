"""Modules that classes of one's own may import, by the names that they had in earlier versions: these work still."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "sfumato.data.messages": "sfumato.data.text.messages",
    "sfumato.data.reasoning_gym": "sfumato.data.synthetic.reasoning_gym",
    "sfumato.data.text_formats": "sfumato.data.text.formats",
    "sfumato.data.text_prompt_formats": "sfumato.data.text.prompt_formats",
    "sfumato.data.text_prompt_formats.base": "sfumato.data.text.prompt_formats.base",
    "sfumato.rollout.agents.turns": "sfumato.rollout.kinds.base",
    "sfumato.rollout.dumps": "sfumato.rollout.debug.dumps",
    "sfumato.rollout.policy": "sfumato.rollout.diffusion.policy",
    "sfumato.rollout.token_colours": "sfumato.rollout.debug.token_colours",
    "sfumato.rollout.turns": "sfumato.rollout.kinds.base",
    "sfumato.rollout.tools": "sfumato.rollout.agents.tools",
}
"""New name by old one."""


class _MovedModules(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {MOVED[spec.name]} now; the old name goes with 0.3", FutureWarning, stacklevel=2)
        module = importlib.import_module(MOVED[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its new name, which Python has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def keep_old_names() -> None:
    """Lets ``import`` find modules by their old names. First of all finders: a module within a package that has moved
    would else be found by the package's path, and run a second time."""
    sys.meta_path.insert(0, _MovedModules())
