"""What requests of a page may ask for: parameters that are looked at before anything is done, and refusals in JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from starlette.responses import Response

from sfumato.serving.requests import RefusedRequestError
from sfumato.studio.runs import RunReader, RunsFolder
from sfumato.studio.tail import Record
from sfumato.tracking.json_lines import MOST_STEPS, strict_json

if TYPE_CHECKING:
    from starlette.requests import Request

LONGEST_VALUE = 1000
"""Characters of a parameter."""
MOST_VALUES = 64
"""Values of one parameter that may be given several times."""


def text_parameter(request: Request, name: str) -> str:
    """A parameter that must be given once. Raises RefusedRequestError (400) where it is not, or is too long."""
    values = request.query_params.getlist(name)
    if len(values) != 1 or not values[0] or len(values[0]) > LONGEST_VALUE:
        raise RefusedRequestError(400, f"give {name} once, with 1 to {LONGEST_VALUE} characters")
    return values[0]


def text_parameters(request: Request, name: str) -> list[str]:
    """A parameter that may be given several times. Raises RefusedRequestError (400) for none, or too many."""
    values = request.query_params.getlist(name)
    if not 0 < len(values) <= MOST_VALUES or any(len(value) > LONGEST_VALUE for value in values):
        raise RefusedRequestError(400, f"give {name} 1 to {MOST_VALUES} times, each of at most {LONGEST_VALUE} letters")
    return values


def number_parameter(
    request: Request, name: str, default: int | None = None, least: int = 0, most: int = MOST_STEPS - 1
) -> int:
    """A whole number. Raises RefusedRequestError (400) for another value, or where it is missing without a default."""
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    if text is None or re.fullmatch("-?[0-9]{1,19}", text) is None or not least <= int(text) <= most:
        raise RefusedRequestError(400, f"{name} must be a whole number from {least} to {most}")
    return int(text)


def number_list(request: Request, name: str, most: int) -> list[int]:
    """Whole numbers with commas between them. Raises RefusedRequestError (400) for other values, or too many."""
    parts = text_parameter(request, name).split(",")
    if len(parts) > most or not all(len(part) <= 16 and part.isascii() and part.isdecimal() for part in parts):
        raise RefusedRequestError(400, f"{name} must be at most {most} whole numbers with commas between them")
    return [int(part) for part in parts]


def find_run(runs: RunsFolder, name: str) -> RunReader:
    """The run of that name, with what it has written until now. Raises RefusedRequestError (404) for another name."""
    reader = runs.reader(name)
    if reader is None:
        raise RefusedRequestError(404, f"there is no run {name[:100]!r}")
    reader.refresh()
    return reader


def find_sample(reader: RunReader, step: int, kind: str, sample_id: int) -> Record:
    """The row of a sample. Raises RefusedRequestError (404) where there is none."""
    row = reader.samples.sample(step, kind, sample_id)
    if row is None:
        raise RefusedRequestError(404, f"{reader.name} has no sample {kind} {sample_id} of step {step}")
    return row


def parse_body(body: bytes | bytearray, names: frozenset[str]) -> dict[str, object]:
    """The JSON object of a request's body. Raises RefusedRequestError (400) for anything else, or other names."""
    from sfumato.serving.bounded_json import load_json

    try:
        value = load_json(bytes(body), max_values=10_000, max_depth=10)
    except ValueError as error:
        raise RefusedRequestError(400, f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict) or not set(value) <= names:
        raise RefusedRequestError(
            400, f"the body must be an object with no other names than {', '.join(sorted(names))}"
        )
    return value


def json_response(value: object) -> Response:
    """An answer in JSON, with null for numbers that are not finite."""
    return Response(strict_json(value), media_type="application/json")


def refuse_request(status: int, text: str) -> Response:
    """An answer that says why a request was refused."""
    return Response(json.dumps({"error": text}), status, media_type="application/json")
