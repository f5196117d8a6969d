"""Limits for Jinja templates from strangers: steps, seconds, and the size of the values that they make.

transformers' sandbox keeps a template from reaching Python, but not from looping 10^10 times or making a string of
gigabytes. Here loops, calls, filters and operators are counted, and refused before they make too much.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

MAX_TEMPLATE = 2**20
"""Characters of a template; published ones have up to 30,000."""
MAX_STEPS = 1_000_000
"""Passes of loops, calls, filters and operators while one text is rendered."""
MAX_SIZE = 2**26
"""Characters of a text, or of all texts in a list, where a text that is in it twice counts twice."""
MAX_MADE = 2**30
"""Characters of all texts that are made while one text is rendered."""
MAX_CONSTANT = 2**20
"""Characters of a constant value, which Jinja computes while it compiles."""
MAX_ITEMS = 2**18
"""Items of a list with all lists in it, where a list that is in it twice counts twice."""
MAX_BITS = 2**12
"""Bits of a whole number."""
MAX_SECONDS = 30.0
MAX_SEARCHED = 2**17
"""Characters of a text that a filter of ``SEARCHING`` takes: its time grows with their square."""

SEARCHING = ("urlize", "striptags", "wordwrap")
PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "truncate", "batch", "slice")
PADDING += ("tojson", "round", "to_bytes")
"""Methods and filters whose result is as long as one of their arguments says."""


class TemplateLimitError(SecurityError):
    """A template exceeds a limit. The message continues a sentence that begins with "the template"."""


class _Budget(threading.local):
    """What the template that this thread compiles or renders has used so far, and what it may use."""

    steps = 0
    num_characters: float = 0
    """Characters of all texts that were made."""
    max_size = MAX_SIZE
    """Most characters of one text."""
    deadline = float("inf")
    """By ``time.monotonic``."""
    refusal: TemplateLimitError | None = None
    """The error that was raised, kept since Jinja turns it into another while it computes constants."""


_budget = _Budget()


def _refuse(reason: str) -> NoReturn:
    """Raises TemplateLimitError, and keeps it for ``_Folding``."""
    _budget.refusal = TemplateLimitError(
        f"{reason}: it is made to exhaust the machine, or broken; take another template"
    )
    raise _budget.refusal


def _count(steps: int = 1) -> None:
    """Counts steps. Raises TemplateLimitError when there are too many, or they take too long."""
    _budget.steps += steps
    if _budget.steps > MAX_STEPS:
        _refuse(f"takes more than {MAX_STEPS:,} steps")
    # The clock is read about every 256 steps.
    if _budget.steps % 256 < steps and time.monotonic() > _budget.deadline:
        _refuse(f"takes more than {MAX_SECONDS:.0f} s")


def _check_size(size: float) -> None:
    """Counts the characters of a text before it is made. Raises TemplateLimitError when there are too many."""
    _budget.num_characters += size
    if size > _budget.max_size or _budget.num_characters > MAX_MADE:
        _refuse(f"makes more than {_budget.max_size if size > _budget.max_size else MAX_MADE:,} characters")


EXPRESSION_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, NameError)
"""What expressions of a template may raise besides Jinja's own errors, such as for an index, a division or a name."""


@contextmanager
def limit_rendering(text: str) -> Iterator[None]:
    """A context in which transformers renders the template ``text`` with these limits, in this thread.

    Raises:
        TemplateLimitError: when the template exceeds a limit.
    """
    limit_template(text)
    _budget.steps = 0
    _budget.num_characters = 0
    _budget.deadline = time.monotonic() + MAX_SECONDS
    try:
        yield
    except (RecursionError, MemoryError):
        _refuse("calls itself without end")
    finally:
        _budget.steps = 0
        _budget.deadline = float("inf")


def limit_template(text: str) -> None:
    """Puts the limits into the compiled template of a text, which transformers caches.

    Raises:
        TemplateLimitError: when the text is too long or nested too deeply, or a constant in it is too large.
        jinja2.TemplateSyntaxError: when it is not valid Jinja.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _budget.steps = 0
    _budget.num_characters = 0
    _budget.refusal = None
    try:
        # Constants first: compiling computes them, which is what they could exhaust the machine by.
        check_constants(text, _compile_jinja_template("").environment)
        compiled = _compile_jinja_template(text)
        limit_compiled(compiled, text)
    except (RecursionError, MemoryError):
        _refuse("is nested too deep")


def limit_compiled(compiled: Template, text: str) -> None:
    """Compiles the template ``text`` again with steps that are counted, and puts the code into ``compiled``."""
    environment = compiled.environment
    if "_counted" in environment.filters:  # limited already
        return
    _limit_environment(cast("SandboxedEnvironment", environment))
    tree = _Counting().visit(environment.parse(text))
    tree.set_environment(environment)
    limited = environment.from_string(tree)
    render = limited.root_render_func
    compiled.root_render_func = lambda context: _yield_bounded(render(context))
    compiled.blocks = limited.blocks


@functools.lru_cache
def check_constants(text: str, environment: Environment) -> None:
    """Raises TemplateLimitError when a constant, which Jinja computes while it compiles, is too large or too costly."""
    if len(text) > MAX_TEMPLATE:
        _refuse(f"has {len(text):,} characters, more than {MAX_TEMPLATE:,}")
    if "_counted" not in environment.filters:
        _limit_environment(cast("SandboxedEnvironment", environment))
    _budget.max_size = MAX_CONSTANT
    try:
        _Folding(nodes.EvalContext(environment)).visit(environment.parse(text))
    except ValueError as error:  # a number with more digits than Python converts
        _refuse(str(error))
    finally:
        _budget.max_size = MAX_SIZE


class _Folding(NodeTransformer):
    """Computes constants as Jinja's compiler would, innermost first, and refuses one that is too large."""

    def __init__(self, context: nodes.EvalContext) -> None:
        self._context = context

    def generic_visit(self, node: nodes.Node, *_: object, **__: object) -> nodes.Node:
        """Returns the node, or the constant that replaces it."""
        super().generic_visit(node)
        if not isinstance(node, nodes.Expr) or (isinstance(node, nodes.Literal) and not hasattr(node, "items")):
            return node
        try:
            return nodes.Const(check_size(self._fold_value(node)), lineno=node.lineno)
        except TemplateLimitError:
            raise
        except Exception:  # no constant, or it fails, which is reported when it is rendered
            if _budget.refusal is not None:
                raise _budget.refusal from None
            return node

    def _fold_value(self, node: nodes.Expr) -> object:
        if isinstance(node, nodes.BinExpr) and node.operator in OPERATORS:
            return OPERATORS[node.operator](node.left.as_const(self._context), node.right.as_const(self._context))
        if isinstance(node, nodes.Concat):
            return concatenate(part.as_const(self._context) for part in node.nodes)
        return node.as_const(self._context)


class _Counting(NodeTransformer):
    """Puts filters into a template that count each pass of a loop, and measure each list and joined text."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (jinja's names)
        self.generic_visit(node)
        node.iter = _filter_node(cast(nodes.Expr, node.iter), "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # Joined by a filter of ours, since Jinja's own code for ``~`` would make the text before it could be measured.
        return _filter_node(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def _fold_literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        # A list or tuple that is assigned to is no value.
        return node if getattr(node, "ctx", "load") != "load" else _filter_node(node, "_measured")

    visit_List = visit_Tuple = visit_Dict = _fold_literal  # noqa: N815


def _filter_node(node: nodes.Expr, name: str) -> nodes.Filter:
    """The expression ``node | name``."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Counted:
    """The items of a loop, each of which counts as a step."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        for item in self._items:
            _count()
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _check_whole(size: int) -> None:
    if size > _budget.max_size:
        _refuse(f"makes more than {_budget.max_size:,} characters")


def check_size(value: object) -> Any:
    """Returns the value. Raises TemplateLimitError when it, with everything in it, is too large."""
    if isinstance(value, (str, bytes)):
        _check_whole(len(value))
    elif isinstance(value, (list, tuple, dict, Namespace)):
        num_items = 0
        size = 0
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, (str, bytes)):
                size += len(item)
                continue
            if isinstance(item, Namespace):
                item = item._Namespace__attrs  # pyright: ignore[reportAttributeAccessIssue]
            parts = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            num_items += len(parts)
            if num_items > MAX_ITEMS:
                _refuse(f"makes lists of more than {MAX_ITEMS:,} items")
            pending += [part for part in parts if isinstance(part, (str, bytes, list, tuple, dict, Namespace))]
        _check_whole(size)
        _count(num_items // 64)
    return value


def concatenate(values: Iterable[object]) -> str:
    """Joins the texts of all values. Raises TemplateLimitError when the result would be too long."""
    _count()
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _yield_bounded(pieces: Iterable[str]) -> Iterator[str]:
    """Yields the pieces of a rendered text. Raises TemplateLimitError when it becomes too long."""
    size = 0
    for piece in pieces:
        size += len(piece)
        _check_whole(size)
        _count()
        yield piece


def _multiply(first: Any, second: Any) -> object:
    _count()
    if isinstance(first, int) and isinstance(second, int):
        if first.bit_length() + second.bit_length() > MAX_BITS:
            _refuse(f"makes a number of more than {MAX_BITS:,} bits")
        return first * second
    for many, times in ((first, second), (second, first)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_size(len(many) * times)
    return check_size(first * second)


def _add(first: object, second: object) -> object:
    _count()
    for kind in (str, bytes):
        if isinstance(first, kind) and isinstance(second, kind):
            _check_size(len(first) + len(second))
    return check_size(cast(Any, first) + second)


def _bounded_power(first: Any, second: Any) -> object:
    _count()
    if isinstance(first, int) and isinstance(second, int) and first.bit_length() * abs(second) > MAX_BITS:
        _refuse(f"makes a number of more than {MAX_BITS:,} bits")
    return first**second


def _bounded_modulo(first: Any, second: Any) -> object:
    _count()
    if isinstance(first, (str, bytes)):
        _check_format(first, second.values() if isinstance(second, Mapping) else second, "%", "*")
    return first % second


OPERATORS: dict[str, Callable[[Any, Any], object]] = {
    "*": _multiply,
    "+": _add,
    "**": _bounded_power,
    "%": _bounded_modulo,
    "-": operator.sub,
}


def _check_format(text: str | bytes, values: object, mark: str, width: str) -> None:
    """Raises TemplateLimitError when a formatted text could be too long.

    Args:
        text: the format.
        values: what is put into it.
        mark: begins each place for a value.
        width: marks a format in which values may be widths.
    """
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    longest = max((len(value) if isinstance(value, (str, bytes)) else len(str(value)) for value in values), default=0)
    if width in text:
        longest += max((abs(value) for value in values if isinstance(value, int)), default=0)
    # Twelve digits are beyond every limit already, and converting a longer number could take long.
    widths = sum(int(digits[:12]) for digits in re.findall(r"[0-9]+", text))
    _check_size(len(text) + widths + text.count(mark) * longest)


def _check_call(name: str, subject: Any, arguments: tuple[object, ...], named: Mapping[str, object]) -> None:
    """Raises TemplateLimitError when a method or filter of this name would make its subject too large."""
    everything: tuple[Any, ...] = (*arguments, *named.values())
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
        values = everything[0].values() if name == "format_map" and isinstance(everything[0], Mapping) else everything  # pyright: ignore[reportGeneralTypeIssues]
        is_nested = re.search(r"\{[^{}]*\{", cast(str, subject)) is not None
        _check_format(cast(str, subject), list(values), "{", "{" if is_nested else "\0")


def _is_length(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _limit_environment(environment: SandboxedEnvironment) -> None:
    """Puts the limits into an environment, for templates that are compiled afterwards."""
    call = environment.call

    def call_within_limits(context: Any, function: Any, *arguments: Any, **named: object) -> object:
        _count()
        method = getattr(function, "__wrapped__", function)
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(subject, (str, bytes, int, float)):
            if name == "join" and arguments and isinstance(subject, (str, bytes)):
                # A list, since looking at an iterator would use it up.
                arguments = (list(arguments[0]), *arguments[1:])
                sizes = [len(part) for part in arguments[0] if isinstance(part, (str, bytes))]
                _check_size(sum(sizes) + len(subject) * len(sizes))
            _check_call(name, subject, arguments, named)
        return check_size(call(context, function, *arguments, **named))

    environment.call = call_within_limits
    environment.concat = lambda pieces: "".join(_yield_bounded(pieces))  # pyright: ignore[reportAttributeAccessIssue]
    environment.globals.pop("lipsum", None)  # makes as many paragraphs as its argument says
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _limit_filter(name, function)
    environment.filters |= {"_counted": _Counted, "_concatenated": concatenate, "_measured": check_size}
    # The sandbox looks up intercepted operators in its table; the others become plain operators of Python.
    environment.intercepted_binops = frozenset(OPERATORS)
    environment.binop_table = {**environment.binop_table, **OPERATORS}


def _limit_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """A filter that checks its arguments and its result."""
    # Jinja passes its context, environment or evaluation context to such filters as the first argument.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited(*arguments: object, **named: object) -> object:
        _count()
        values = arguments[first:]
        subject = values[0] if values else None
        if name == "join" and not isinstance(subject, Undefined):
            separator = str(values[1] if len(values) > 1 else named.get("d", ""))
            items = list(cast(Iterable[object], subject))
            arguments = (*arguments[:first], items, *values[1:])
            _check_size(sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items))
            check_size(items)
        elif name == "format":
            format_values = [*values[1:], *named.values()]
            _check_format(str(subject), format_values, "%", "*")
        else:
            _check_call(name, subject, values[1:], named)
        return check_size(function(*arguments, **named))

    return limited
