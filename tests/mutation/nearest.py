"""Files of tests that lie nearest to a module by what they import: for lines that only processes run which keep no
record, such as Ray's workers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def nearest_test_files(path: str, root: Path, most: int = 3) -> list[str]:
    """Test files that reach a module over the fewest imports, at most ``most``.

    Args:
        path: of the module, below the root of the project.
        root: of the project.
    """
    seen, level = {path}, {path}
    results: list[str] = []
    while level and len(results) < most:
        level = {importer for imported in level for importer in _importers(root).get(imported, ())} - seen
        seen |= level
        results += sorted(name for name in level if Path(name).name.startswith("test_"))
    return results[:most]


@cache
def _importers(root: Path) -> dict[str, set[str]]:
    """Files that import each file."""
    importers: dict[str, set[str]] = {}
    for folder in ("sfumato", "tests", "tasks"):
        for path in sorted((root / folder).rglob("*.py")):
            for imported in _imports(path):
                for target in (f"{imported}.py", f"{imported}/__init__.py"):
                    if (root / target).is_file():
                        importers.setdefault(target, set()).add(str(path.relative_to(root)))
    for path in (root / "tasks").glob("*.py"):
        importers.setdefault(f"tasks/{path.name}", set()).add("tests/tiny.py")  # which loads a task by its name
    return importers


def _imports(path: Path) -> set[str]:
    """Modules that a file imports, as paths without ending."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.replace(".", "/") for name in names}
