"""Tools that a policy may call: a calculator, Python in the sandbox, and functions of the user."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

from sfumato.config.open_mappings import JsonObject
from sfumato.config.user_functions import import_function
from sfumato.errors import ConfigError, UserError
from sfumato.rollout.agents.calculator import CalculationError, calculate
from sfumato.rollout.agents.tool_calls import typed_value, types_of
from sfumato.rollout.agents.user_calls import call_own, describe
from sfumato.sandbox.sandbox import ProgramLimits, Sandbox


@dataclass(frozen=True)
class ToolResult:
    """The result of a call, as the model sees it."""

    text: str
    """The result; why it failed, of a call that did."""
    is_error: bool = False


@dataclass(frozen=True)
class Tool:
    """A tool that calls name."""

    name: str
    schema: JsonObject
    """JSON schema, as chat templates show it."""
    work: Callable[..., Awaitable[object]]
    """Is called with the arguments by name."""

    @property
    def parameters(self) -> list[str]:
        """Names of its arguments."""
        return list(self.schema["function"]["parameters"]["properties"])

    async def call(self, arguments: object, max_output_chars: int) -> ToolResult:
        """Calls the tool. An error becomes the result, so that the model can react to it, unless a person must act.

        Args:
            arguments: by name, as the model gave them, which may be anything that JSON can hold. A text becomes a value
                of the type that the schema asks for.
            max_output_chars: characters of the result that the model sees; the text says how many were cut off.

        Raises:
            UserError: when the tool raises one.
        """
        if not isinstance(arguments, dict):
            return ToolResult(f"Error: the arguments of {self.name} must be a JSON object", True)
        if unknown := sorted(set(arguments) - set(self.parameters)):
            return ToolResult(f"Error: {self.name} has no argument {unknown[0]!r}; it has {self.parameters}", True)
        typed = {}
        for name, value in arguments.items():
            schema = self.schema["function"]["parameters"]["properties"][name]
            # models write numbers in quotes, of which a function may make something else without an error
            typed[name] = typed_value(value, schema) if isinstance(value, str) else value
            if isinstance(typed[name], str) and "string" not in (types := types_of(schema)):
                wanted = " or ".join(sorted(types))
                return ToolResult(f"Error: {name} of {self.name} must be {wanted}, not {value!r:.100}", True)
        try:
            result = _as_text(await self.work(**typed))
        except (UserError, asyncio.CancelledError):
            raise
        except CalculationError as error:
            return ToolResult(cut_text(f"Error: {error}", max_output_chars), True)
        except Exception as error:
            return ToolResult(cut_text(f"Error: {describe(error)}", max_output_chars), True)
        return ToolResult(cut_text(result, max_output_chars))


def cut_text(text: str, max_chars: int) -> str:
    """The first ``max_chars`` characters of a text, with a note of how many are missing."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}… [{len(text) - max_chars} of {len(text)} characters cut off]"


def _as_text(result: object) -> str:
    """The result of a tool as the model reads it: a text as it is, other values as JSON where they can be.

    Raises whatever the object's own ``__str__`` raises, and ValueError for an integer of more than 4300 digits.
    """
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def build_tool(name: str, timeout_s: float) -> Tool:
    """The tool of a configuration.

    Args:
        name: ``calculator``, ``python``, or the import path of a function.
        timeout_s: seconds of one call.

    Raises:
        ConfigError: when there is no such tool, or its function has no annotations or docstring to make a schema of.
        UserError: when programs cannot be contained here.
    """
    if name == "calculator":
        return _build_calculator()
    if name == "python":
        return _build_python(timeout_s)
    if ":" not in name:
        raise ConfigError(
            f"rollout.kind.use: unknown tool {name!r}; known are calculator and python, and functions of your own by "
            "import path, my_module:my_function"
        )
    try:
        return _build_function_tool(import_function(name), name, timeout_s)
    except ConfigError as error:
        raise ConfigError(f"rollout.kind.use: {error}") from error


def _build_calculator() -> Tool:
    async def work(expression: object) -> str:
        return calculate(str(expression))

    return Tool("calculator", _one_text_schema("calculator", "Works out an arithmetic expression.", "expression"), work)


# as many programs at a time as there are processors: more would only make each other run into their time limits
_PROCESSORS = threading.BoundedSemaphore(max(os.cpu_count() or 1, 1))


def _build_python(timeout_s: float) -> Tool:
    sandbox = _checked_sandbox(timeout_s)

    def run(code: str) -> str:
        with _PROCESSORS:
            finished = sandbox.run_python(code)
        printed = finished.stdout.decode("utf-8", "replace")
        if finished.is_success:
            return printed
        errors = finished.stderr.decode("utf-8", "replace").strip()
        return "\n".join(part for part in (printed.rstrip("\n"), errors or f"Error: {finished.describe()}") if part)

    async def work(code: object) -> str:
        return await call_own(run, str(code), timeout_s=None)  # the sandbox has the time limit

    description = "Runs a program of Python and returns what it prints."
    return Tool("python", _one_text_schema("python", description, "code"), work)


@cache
def _checked_sandbox(timeout_s: float) -> Sandbox:
    """A sandbox that is known to work. Raises SandboxError where programs cannot be contained."""
    sandbox = Sandbox(ProgramLimits(wall_s=timeout_s))
    sandbox.check()
    return sandbox


def _build_function_tool(function: Callable[..., object], path: str, timeout_s: float) -> Tool:
    """A tool that calls a function of the user, described to the model by its annotations and docstring."""
    from transformers.utils import get_json_schema  # pyright: ignore[reportPrivateImportUsage]  # it is documented

    if inspect.isclass(function):
        raise ConfigError(f"{path} is a class: a tool is a function")
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers raises several classes for what annotations or docstring lack
        raise ConfigError(
            f"{path} cannot be described to the model: {describe(error)}; give each argument a type, and the function "
            "a docstring with a line for each below 'Args:'"
        ) from error

    async def work(**arguments: object) -> object:
        try:
            return await call_own(function, timeout_s=timeout_s, **arguments)
        except TimeoutError as error:
            raise TimeoutError(describe(error, timeout_s)) from error

    return Tool(schema["function"]["name"], schema, work)


def _one_text_schema(name: str, description: str, parameter: str) -> dict[str, object]:
    """The JSON schema of a tool whose only argument is a text."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
