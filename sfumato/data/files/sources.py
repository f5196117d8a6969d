"""The sources of text data: one table, several tables with weights, or problems that are made in code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section
from sfumato.config.load import load_config
from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.folders import find_matching, refuse_twice, split_dataset_name
from sfumato.data.files.late_rows import LateRows
from sfumato.data.files.row_blocks import Table
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.rows import RowFile, find_row_files, join_rows
from sfumato.data.files.urls import is_url, without_secrets
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Sources:
    """Tables, and how they are mixed."""

    names: list[str]
    rows: list[RowTable]
    """A table for each source; empty for data that is streamed from files."""
    weights: list[float] | None
    """Shares of the sources, of any sum; None joins the sources and shuffles them as one."""
    level: Literal["sample", "token"] = "sample"
    """What the weights are shares of."""
    stopping: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """When an epoch ends."""
    files: list[list[RowFile]] | None = None
    """The files of each source of data that is streamed, not opened yet; None for other data."""

    @property
    def mixing(self) -> list[object] | None:
        """Weights, level and stopping, as JSON can hold them; None without weights."""
        return None if self.weights is None else [self.weights, self.level, self.stopping]

    @property
    def tables(self) -> Sequence[Sequence[Table]]:
        """The tables or unopened files of each source."""
        return [[rows] for rows in self.rows] if self.files is None else self.files


class ScheduleEntry(Section):
    """Weights of the sources."""

    schedule_type: Literal["const"]
    """Only weights that stay the same."""
    weights: list[Weight]
    """Shares of the sources, in their order, of any sum."""


class SourcesFile(Section):
    """A YAML file with several sources, as VeOmni has them."""

    sources: list[str] = Field(min_length=1)
    """Files or folders, relative to the YAML file, else to the working directory; or URLs."""
    names: list[str] | None = None
    """Names in messages and metrics; null takes the paths."""
    schedule: list[ScheduleEntry] | None = Field(None, min_length=1, max_length=1)
    """One entry with the weights; null joins the sources without weights."""
    level: Literal["sample", "token"] = "sample"
    """Whether the weights are shares of samples or of tokens."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """Whether an epoch ends with the first source that is used up, or with the last, the others starting again."""

    @model_validator(mode="after")
    def _check_lengths(self) -> SourcesFile:
        for field_name, values in (("names", self.names), ("weights", self.schedule and self.schedule[0].weights)):
            if values is not None and len(values) != len(self.sources):
                raise ValueError(f"{len(values)} {field_name} for {len(self.sources)} sources")
        names = self.names or self.sources
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources need different names; twice there is {', '.join(twice)}")
        return self


def open_sources(config: TextDataConfig) -> Sources:
    """Training data: the files of ``train_path``, or problems made in code.

    Files of the kind ``iterable`` are only listed.

    Raises:
        ConfigError: when a YAML file with sources is wrong.
        DataError: when a file is missing, empty or broken.
    """
    if config.synthetic is not None:
        return _make_synthetic(config, held_out=False)
    return _open(str(config.train_path), config, "data.train_path", config.datasets_type == "iterable")


def open_sources_once(config: TextDataConfig, mesh: Mesh) -> Sources:
    """As ``open_sources``, but rank 0 alone opens the files; other ranks open each when they first read a row of it.

    Every rank must call it.

    Raises:
        UserError: on every rank, what ``open_sources`` raises on rank 0.
    """
    if mesh.size == 1 or config.synthetic is not None or config.datasets_type == "iterable":
        return open_sources(config)
    opened: list[Sources] = []

    def describe() -> tuple[Sources, list[list[RowFile]], list[list[int]], list[str]]:
        listing = _list_files(str(config.train_path), config, "data.train_path")
        sources = _open_listed(*listing, is_streamed=False)
        opened.append(sources)
        lengths = [[len(part) for part in getattr(rows, "parts", [rows])] for rows in sources.rows]
        fingerprints = [rows.fingerprint() for rows in sources.rows]
        return replace(sources, rows=[]), listing[1], lengths, fingerprints

    mixture, files, lengths, fingerprints = mesh.value_of_first(describe)
    if opened:
        return opened[0]
    rows: list[RowTable] = [LateRows(*source) for source in zip(files, lengths, fingerprints, strict=True)]
    return replace(mixture, rows=rows)


def open_validation(config: TextDataConfig) -> Sources | None:
    """Validation data: the files of ``eval_path``, or problems that training never shows; None when there is none.

    Raises as ``open_sources``.
    """
    if config.synthetic is not None:
        return _make_synthetic(config, held_out=True)
    return None if config.eval_path is None else _open(config.eval_path, config, "data.eval_path", False, held_out=True)


def _make_synthetic(config: TextDataConfig, held_out: bool) -> Sources:
    """Problems made in code, as ``data.synthetic`` says."""
    from sfumato.data.synthetic.text import SyntheticRows

    assert config.synthetic is not None
    return Sources(["synthetic"], [SyntheticRows(config.synthetic, seed=0, held_out=held_out)], None)


def _open(path: str, config: TextDataConfig, option: str, is_streamed: bool, held_out: bool = False) -> Sources:
    return _open_listed(*_list_files(path, config, option, held_out), is_streamed)


def _list_files(
    path: str, config: TextDataConfig, option: str, held_out: bool = False
) -> tuple[SourcesFile, list[list[RowFile]]]:
    """How the sources of a path are mixed, and the files of each. Raises as ``open_sources``."""
    if Path(path).suffix.lower() not in (".yaml", ".yml") or is_url(path):
        name = Path(without_secrets(path)).stem
        file = SourcesFile(sources=[path], names=[name])  # pyright: ignore[reportCallIssue]  # has a default
        places = [(path, option)]
    else:
        file = load_config(SourcesFile, path)
        places = [*_iterate_places(path, file.sources)]
    column = config.text_keys[0] if config.text_keys else "text"  # the only one of a .txt file
    files = [find_row_files(place, column, entry, held_out) for place, entry in places]
    refuse_twice([file.path for source in files for file in source], path)
    return file, files


def _open_listed(file: SourcesFile, files: list[list[RowFile]], is_streamed: bool) -> Sources:
    weights = file.schedule[0].weights if file.schedule and len(files) > 1 else None
    mixture = (weights, file.level, file.stopping_strategy)
    rows: list[RowTable] = [] if is_streamed else [join_rows([file.open() for file in source]) for source in files]
    return Sources(file.names or file.sources, rows, *mixture, files if is_streamed else None)


def _iterate_places(path: str, sources: list[str]) -> Iterator[tuple[str, str]]:
    """The paths of each source of a YAML file, and what messages call it."""
    for number, source in enumerate(sources):
        entry = f"{path}: sources.{number}"
        if Path(source).suffix.lower() in (".yaml", ".yml") and not is_url(source):
            raise DataError(f"{entry}: {source} is a YAML file; sources are data files and folders")
        yield _resolve_paths(path, source), entry


def _resolve_paths(path: str, source: str) -> str:
    """The paths of a source, with commas between; a path that exists beside the YAML file is taken from there.

    A whole source that exists is not split: its name may contain commas.
    """
    yaml_folder = Path(path).parent
    parts = [source] if (yaml_folder / source).exists() else [part.strip() for part in source.split(",")]
    return ",".join(_beside(yaml_folder, part) for part in parts)


def _beside(folder: Path, part: str) -> str:
    """A path, a pattern or a data set of a list, in ``folder`` where it leads to something there."""
    inside = str(folder / part)
    leads = part and (Path(inside).exists() or split_dataset_name(inside) or find_matching(inside))
    return inside if leads else part
