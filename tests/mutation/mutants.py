"""What a line can be changed into so that it is wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "+",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "clamp_min": "clamp_max", "floor": "ceil"}
TALK = {"print", "say", "message", "warn", "warning", "info", "debug"}
"""Calls whose loss nobody computes with."""
ASSURANCES = {"strict", "ignore_errors", "exist_ok", "missing_ok", "daemon", "check"}
"""Arguments that make a difference only where something else is wrong already."""


@dataclass(frozen=True)
class Mutant:
    """One change of one place."""

    path: str
    """Of the file, below the root of the project."""
    line: int
    start: int
    """Offset in bytes of what is replaced."""
    end: int
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    @property
    def change(self) -> str:
        """In one line, for people."""
        return " ".join(f"{self.before} -> {self.after}".split())


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every change that can be made to a file, by place."""
    tree = ast.parse(source)
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    results = []
    for node, after in _changes(tree):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        if callable(after):
            after = after(before, lambda inner: _text(source.decode(), inner))
        if after is not None and after != before:
            results.append(Mutant(path, node.lineno, start, end, before, after))
    return sorted(results, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _text(source: str, node: ast.AST) -> str:
    """The text of a part of an expression; its brackets, which belong to nobody, are put back."""
    text = str(ast.get_source_segment(source, node))
    is_one_thing = isinstance(node, (ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.Subscript))
    return text if is_one_thing else f"({text})"


def _changes(node: ast.AST) -> Iterator[tuple]:
    """Pairs of a node and the text that takes its place, or a function that makes it."""
    if isinstance(node, (ast.Compare, ast.BinOp, ast.BoolOp, ast.Constant, ast.Call, ast.UnaryOp)):
        yield from _expression(node)
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield node, _joined(node.target, f"{ARITHMETIC[type(node.op)]}=", node.value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node.value) not in TALK:
        yield node, "pass"
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield node, "pass"
        return  # what stands in its message is not computed with
    if isinstance(node, (ast.Continue, ast.Break)):
        yield node, "break" if isinstance(node, ast.Continue) else "continue"
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "keywords") and not isinstance(
            node, ast.Call
        ):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST) and not _is_silent(child):
                yield from _changes(child)


def _expression(node: ast.AST) -> Iterator[tuple]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield node, _joined(node.left, COMPARISONS[type(node.ops[0])], node.comparators[0])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield node, _joined(node.left, ARITHMETIC[type(node.op)], node.right)
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield node, lambda _, text: "(" + other.join(text(value) for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, lambda _, text: f"({text(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield node, repr(node.value * 2 if node.value else 1.0)
    elif isinstance(node, ast.Call) and _called(node) in CALLS:
        name = _called(node)
        yield node.func, lambda before, _: before.removesuffix(name) + CALLS[name]


def _joined(left: ast.AST, operator: str, right: ast.AST):
    def made(_, text):
        text_left, text_right = text(left), text(right)
        is_statement = operator.endswith("=") and operator not in ("<=", ">=", "==", "!=")
        return f"{text_left} {operator} {text_right}" if is_statement else f"({text_left} {operator} {text_right})"

    return made


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _is_text(node: ast.BinOp) -> bool:
    """Joining of strings, and unions of types."""
    sides = (node.left, node.right)
    is_type = isinstance(node.op, ast.BitOr) and any(
        (isinstance(side, ast.Constant) and side.value is None)
        or (isinstance(side, ast.Name) and side.id in ("str", "int", "float", "bool", "Path"))
        for side in sides
    )
    return is_type or any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _is_silent(node: ast.AST) -> bool:
    """Whether nothing is computed in it: imports for types, talk, texts."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Call) and _called(node) in {*TALK, "Field", "TypeVar"}:
        return True
    if isinstance(node, ast.keyword) and node.arg in ASSURANCES:
        return True
    return isinstance(node, ast.JoinedStr)
