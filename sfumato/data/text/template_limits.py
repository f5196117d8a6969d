"""Limits of Jinja templates that strangers wrote: steps, seconds, and the size of what they make.

transformers' sandbox keeps a template from reaching Python. It does not keep it from looping 10^10 times or from making
a string of gigabytes. Here loops, calls, filters and operators count, and are refused before they make too much.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE = 2**20
"""Characters of a template; published ones have up to 30,000."""
MAX_STEPS = 1_000_000
"""Passes of loops, calls, filters and operators of one text."""
MAX_SIZE = 2**26
"""Characters of a text, and of all texts in a list, where one that stands twice counts twice."""
MAX_MADE = 2**30
"""Characters of all texts that are made on the way to one."""
MAX_CONSTANT = 2**20
"""Characters of a value that depends on no message, which Jinja computes while it compiles."""
MAX_ITEMS = 2**18
"""Items of a list, counted likewise."""
MAX_BITS = 2**12
"""Bits of a whole number."""
MAX_SECONDS = 30.0
MAX_SEARCHED = 2**17
"""Characters of a text in which a filter searches in steps that grow with its square."""

SEARCHING = ("urlize", "striptags", "wordwrap")
PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "truncate", "batch", "slice")
PADDING += ("tojson", "round", "to_bytes")
"""Methods and filters that make something as long as a number says."""


class TemplateLimitError(SecurityError):
    """A template that does too much; the message goes on after "the template"."""


class _Budget(threading.local):
    steps = 0
    made = 0
    most = MAX_SIZE
    ends = float("inf")
    refusal: TemplateLimitError | None = None


_budget = _Budget()


def _refuse(what: str) -> None:
    _budget.refusal = TemplateLimitError(f"{what}: it is made to exhaust the machine, or broken; take another template")
    raise _budget.refusal


def _count(steps: int = 1) -> None:
    _budget.steps += steps
    if _budget.steps > MAX_STEPS:
        _refuse(f"takes more than {MAX_STEPS:,} steps")
    if _budget.steps % 256 < steps and time.monotonic() > _budget.ends:
        _refuse(f"takes more than {MAX_SECONDS:.0f} s")


def _check_size(size: float) -> None:
    """Looks at a text before it is made."""
    _budget.made += size
    if size > _budget.most or _budget.made > MAX_MADE:
        _refuse(f"makes more than {_budget.most if size > _budget.most else MAX_MADE:,} characters")


EXPRESSION_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, NameError)
"""What the expressions of a template may raise besides Jinja's own errors: an index, a division, a name."""


@contextmanager
def limited_rendering(text: str) -> Iterator[None]:
    """Inside, transformers renders the template with these limits, in this thread.

    Raises:
        TemplateLimitError: when it does too much.
    """
    limit_template(text)
    _budget.steps = 0
    _budget.made = 0
    _budget.ends = time.monotonic() + MAX_SECONDS
    try:
        yield
    except (RecursionError, MemoryError):
        _refuse("calls itself without end")
    finally:
        _budget.steps = 0
        _budget.ends = float("inf")


def limit_template(text: str) -> None:
    """Puts limits into the compiled template that transformers keeps of a text.

    Raises:
        TemplateLimitError: when the text is too long, nested too deep, or makes too much already while it is compiled.
        jinja2.TemplateSyntaxError: when it is no Jinja.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _budget.steps = 0
    _budget.made = 0
    _budget.refusal = None
    try:
        check_constants(text, _compile_jinja_template("").environment)
        compiled = _compile_jinja_template(text)
        limit_compiled(compiled, text)
    except (RecursionError, MemoryError):
        _refuse("is nested too deep")


def limit_compiled(compiled: Template, text: str) -> None:
    """Compiles a template anew, with steps that count, and puts the code into ``compiled``."""
    environment = compiled.environment
    if "_counted" in environment.filters:
        return
    _limit_environment(environment)
    tree = _Counting().visit(environment.parse(text))
    tree.set_environment(environment)
    limited = environment.from_string(tree)
    render = limited.root_render_func
    compiled.root_render_func = lambda context: _bounded(render(context))
    compiled.blocks = limited.blocks


@functools.lru_cache
def check_constants(text: str, environment: Environment) -> None:
    """Looks at what Jinja computes while it compiles: values that depend on no message."""
    if len(text) > MAX_TEMPLATE:
        _refuse(f"has {len(text):,} characters, more than {MAX_TEMPLATE:,}")
    if "_counted" not in environment.filters:
        _limit_environment(environment)
    _budget.most = MAX_CONSTANT
    try:
        _Folding(nodes.EvalContext(environment)).visit(environment.parse(text))
    except ValueError as error:  # a number of more digits than Python reads
        _refuse(str(error))
    finally:
        _budget.most = MAX_SIZE


class _Folding(NodeTransformer):
    """Computes constants as Jinja's compiler would, the innermost first, and refuses one that is too large."""

    def __init__(self, context: nodes.EvalContext) -> None:
        self._context = context

    def generic_visit(self, node: nodes.Node, *_: Any, **__: Any) -> nodes.Node:
        """The node, or the constant in its place."""
        super().generic_visit(node)
        if not isinstance(node, nodes.Expr) or (isinstance(node, nodes.Literal) and not hasattr(node, "items")):
            return node
        try:
            return nodes.Const(measured(self._value(node)), lineno=node.lineno)
        except TemplateLimitError:
            raise
        except Exception:  # it depends on messages, or fails, which is said when it is rendered
            if _budget.refusal is not None:
                raise _budget.refusal from None
            return node

    def _value(self, node: nodes.Expr) -> Any:
        if isinstance(node, nodes.BinExpr) and node.operator in OPERATORS:
            return OPERATORS[node.operator](node.left.as_const(self._context), node.right.as_const(self._context))
        if isinstance(node, nodes.Concat):
            return concatenated(part.as_const(self._context) for part in node.nodes)
        return node.as_const(self._context)


class _Counting(NodeTransformer):
    """Has each pass of a loop counted, and each list and joined text measured."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (jinja's names)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filter(node, "_measured")

    visit_List = visit_Tuple = visit_Dict = _literal  # noqa: N815


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Counted:
    """What a loop goes over."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _count()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _check_whole(size: int) -> None:
    if size > _budget.most:
        _refuse(f"makes more than {_budget.most:,} characters")


def measured(value: Any) -> Any:
    """The value. Raises TemplateLimitError when it is too large with all that is in it."""
    if isinstance(value, (str, bytes)):
        _check_whole(len(value))
    elif isinstance(value, (list, tuple, dict, Namespace)):
        items = 0
        size = 0
        rest = [value]
        while rest:
            inside = rest.pop()
            if isinstance(inside, (str, bytes)):
                size += len(inside)
                continue
            if isinstance(inside, Namespace):
                inside = inside._Namespace__attrs
            parts = [*inside.keys(), *inside.values()] if isinstance(inside, dict) else inside
            items += len(parts)
            if items > MAX_ITEMS:
                _refuse(f"makes lists of more than {MAX_ITEMS:,} items")
            rest += [part for part in parts if isinstance(part, (str, bytes, list, tuple, dict, Namespace))]
        _check_whole(size)
        _count(items // 64)
    return value


def concatenated(values: Iterable[Any]) -> str:
    """The texts of all values as one."""
    _count()
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_whole(size)
        _count()
        yield piece


def _multiply(left: Any, right: Any) -> Any:
    _count()
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            _refuse(f"makes a number of more than {MAX_BITS:,} bits")
        return left * right
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_size(len(many) * times)
    return measured(left * right)


def _add(left: Any, right: Any) -> Any:
    _count()
    for kind in (str, bytes):
        if isinstance(left, kind) and isinstance(right, kind):
            _check_size(len(left) + len(right))
    return measured(left + right)


def _power(left: Any, right: Any) -> Any:
    _count()
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        _refuse(f"makes a number of more than {MAX_BITS:,} bits")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    _count()
    if isinstance(left, (str, bytes)):
        _check_format(left, right.values() if isinstance(right, Mapping) else right, "%", "*")
    return left % right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": _multiply,
    "+": _add,
    "**": _power,
    "%": _modulo,
    "-": operator.sub,
}


def _check_format(text: str | bytes, values: Any, mark: str, width: str) -> None:
    """Whether a text with values in its places is too long; ``width`` says that a value is a width."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    longest = max((len(value) if isinstance(value, (str, bytes)) else len(str(value)) for value in values), default=0)
    if width in text:
        longest += max((abs(value) for value in values if isinstance(value, int)), default=0)
    widths = sum(int(digits[:12]) for digits in re.findall(r"[0-9]+", text))
    _check_size(len(text) + widths + text.count(mark) * longest)


def _check_call(name: str, subject: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Whether a method or a filter of this name would make too much of its subject."""
    everything = (*arguments, *named.values())
    if name in PADDING:
        lines = subject.count("\n") + subject.count("\t") + 1 if isinstance(subject, str) else 1
        longest = [len(value) if isinstance(value, str) else abs(value) for value in everything if _is_length(value)]
        items = len(subject) if isinstance(subject, (list, tuple, dict)) and name == "tojson" else 0
        _check_size(max(longest, default=0) * (lines + items))
    if name in SEARCHING and isinstance(subject, str) and len(subject) > MAX_SEARCHED:
        _refuse(f"has {name} search more than {MAX_SEARCHED:,} characters")
    if name == "replace" and len(everything) > 1:
        text = str(subject)
        old = str(everything[0])
        new = str(everything[1])
        _check_size(len(text) + text.count(old) * len(new))
    if name == "translate" and everything and isinstance(everything[0], Mapping):
        longest = [len(value) for value in everything[0].values() if isinstance(value, str)]
        _check_size(len(subject) * max(longest, default=1))
    if name in ("format", "format_map"):
        values = everything[0].values() if name == "format_map" and isinstance(everything[0], Mapping) else everything
        is_nested = re.search(r"\{[^{}]*\{", subject) is not None
        _check_format(subject, list(values), "{", "{" if is_nested else "\0")


def _is_length(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _limit_environment(environment: Environment) -> None:
    """Puts the limits into an environment, whose templates are compiled afterwards."""
    call = environment.call

    def limited_call(context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        _count()
        method = getattr(function, "__wrapped__", function)
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(subject, (str, bytes, int, float)):
            if name == "join" and arguments and isinstance(subject, (str, bytes)):
                arguments = (list(arguments[0]), *arguments[1:])
                sizes = [len(part) for part in arguments[0] if isinstance(part, (str, bytes))]
                _check_size(sum(sizes) + len(subject) * len(sizes))
            _check_call(name, subject, arguments, named)
        return measured(call(context, function, *arguments, **named))

    environment.call = limited_call
    environment.concat = lambda pieces: "".join(_bounded(pieces))
    environment.globals.pop("lipsum", None)
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _limited_filter(name, function)
    environment.filters |= {"_counted": _Counted, "_concatenated": concatenated, "_measured": measured}
    environment.intercepted_binops = frozenset(OPERATORS)
    environment.binop_table = {**environment.binop_table, **OPERATORS}


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        _count()
        values = arguments[first:]
        subject = values[0] if values else None
        if name == "join" and not isinstance(subject, Undefined):
            between = str(values[1] if len(values) > 1 else named.get("d", ""))
            items = list(subject)
            arguments = (*arguments[:first], items, *values[1:])
            _check_size(sum(len(item) for item in items if isinstance(item, str)) + len(between) * len(items))
            measured(items)
        elif name == "format":
            places = [*values[1:], *named.values()]
            _check_format(str(subject), places, "%", "*")
        else:
            _check_call(name, subject, values[1:], named)
        return measured(function(*arguments, **named))

    return limited
