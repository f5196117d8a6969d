"""What an object detector found in a picture, and whether it is what a row of GenEval (arXiv 2310.11513) asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import DataError

POSITIONS = ("left of", "right of", "above", "below")
LEAST_OFFSET = 1e-3
"""In pixels."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


@dataclass(frozen=True)
class Detection:
    """One object that a detector found."""

    name: str
    """Its class."""
    score: float
    """Confidence, 0 to 1."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom edge in pixels."""

    @property
    def centre(self) -> np.ndarray:
        """Middle of the box, float64 ``[2]``: x and y."""
        left, top, right, bottom = self.box
        return np.array([(left + right) / 2, (top + bottom) / 2])

    @property
    def extent(self) -> np.ndarray:
        """Width and height of the box, float64 ``[2]``."""
        left, top, right, bottom = self.box
        return np.array([right - left, bottom - top])


@dataclass(frozen=True)
class Requirement:
    """An entry of ``include`` or ``exclude`` of GenEval's rows."""

    name: str
    count: int = 1
    colour: str | None = None
    position: tuple[str, int] | None = None
    """A relation, and the number of the entry of ``include`` that it is to."""


def read_requirements(metadata: JsonObject) -> tuple[list[Requirement], list[Requirement]]:
    """What a row of GenEval's ``evaluation_metadata.jsonl`` includes and excludes.

    Raises:
        DataError: when the row is none of GenEval.
    """
    include = [_read(entry) for entry in metadata.get("include") or ()]
    exclude = [_read(entry) for entry in metadata.get("exclude") or ()]
    if not include:
        raise DataError(
            "no column 'include': geneval takes the rows of GenEval's evaluation_metadata.jsonl, such as "
            '{"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "a photo of two dogs"}'
        )
    for entry in include:
        if entry.position is not None and not 0 <= entry.position[1] < len(include):
            raise DataError(f"'include' names entry {entry.position[1]} of {len(include)}, counted from 0")
    return include, exclude


def _read(entry: object) -> Requirement:
    if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
        raise DataError(f"an entry of 'include' or 'exclude' must be an object with a class, not {entry!r}")
    count = entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(f"count of {entry['class']!r} must be a whole number above 0, not {count!r}")
    position = entry.get("position")
    if position is not None:
        is_read = isinstance(position, Sequence) and len(position) == 2 and position[0] in POSITIONS
        if not is_read or not isinstance(position[1], int):
            raise DataError(f"position of {entry['class']!r} must be one of {', '.join(POSITIONS)} and a number")
        position = (str(position[0]), position[1])
    colour = entry.get("color")
    if colour is not None and colour not in COLOURS:
        raise DataError(f"color of {entry['class']!r} must be one of {', '.join(COLOURS)}, not {colour!r}")
    return Requirement(entry["class"], count, colour, position)


def keep_confident(detections: Sequence[Detection], threshold: float, most: int) -> dict[str, list[Detection]]:
    """Detections above a threshold by class, the most confident first, at most ``most`` of each class."""
    by_name: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        of_class = by_name.setdefault(detection.name, [])
        if detection.score > threshold and len(of_class) < most:
            of_class.append(detection)
    return by_name


def relative_positions(one: Detection, other: Detection, threshold: float) -> set[str]:
    """How one object lies to another, as GenEval's ``relative_position`` says.

    The offset of the centres counts beyond ``threshold`` times the sum of both extents, and a direction when it makes
    more than half of it.
    """
    offset = one.centre - other.centre
    size = one.extent + other.extent
    revised = np.maximum(np.abs(offset) - threshold * size, 0) * np.sign(offset)
    if (np.abs(revised) < LEAST_OFFSET).all():
        return set()
    x, y = revised / np.linalg.norm(offset)
    holds_by_name = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in holds_by_name.items() if holds}


def is_correct(
    include: Sequence[Requirement],
    exclude: Sequence[Requirement],
    by_name: dict[str, list[Detection]],
    colour_of: Callable[[Detection], str],
    position_threshold: float,
) -> bool:
    """Whether detections show what is included and not what is excluded, as GenEval's ``evaluate`` says.

    Args:
        include, exclude: of the prompt's row.
        by_name: of ``keep_confident``.
        colour_of: a function from a detection to the name of its colour.
        position_threshold: of ``relative_positions``.
    """
    matched: list[list[Detection] | None] = []
    correct = True
    for entry in include:
        objects = by_name.get(entry.name, [])[: entry.count]
        is_matched = len(objects) >= entry.count
        if is_matched and entry.colour is not None:
            is_matched = sum(colour_of(detection) == entry.colour for detection in objects) >= entry.count
        if is_matched and entry.position is not None:
            relation, number = entry.position
            targets = matched[number] if number < len(matched) else None
            is_matched = targets is not None and all(
                relation in relative_positions(detection, target, position_threshold)
                for detection in objects
                for target in targets
            )
        correct &= is_matched
        matched.append(objects if is_matched else None)
    return correct and not any(len(by_name.get(entry.name, [])) >= entry.count for entry in exclude)
