"""Which files a path of the configuration names: the right split of a folder, and which of its files are not read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.file_checks import file_problem
from sfumato.data.files.compressed import MAX_LOADED, is_compressed
from sfumato.data.files.urls import is_url, without_secrets
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.files.dataset_info import RowMapping
    from sfumato.data.files.remote import RemoteFile

TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".txt")
"""Endings of files that may be compressed."""
OPENED = (".jsonl", ".parquet", ".arrow", ".tar")
"""Endings of files whose rows are read one by one, when they are asked for; other files are held in memory."""
ENDINGS = [".jsonl", ".json", ".parquet", ".arrow", ".tar", ".csv", ".txt"]
DATASET_INFO = "dataset_info.json"
"""LLaMA-Factory's list of data sets; the library datasets gives a file of its own the same name."""
NOT_DATA = {DATASET_INFO, "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that datasets writes beside the rows."""
DATASETS_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")
"""Results of ``map`` and ``filter``, which datasets keeps beside the rows that they were made of."""
SHARD = re.compile(r"(?P<before>.*?)(?P<number>\d{3,})-of-(?P<total>\d{3,})")
"""How datasets numbers the files of a table, the first from 0: train-00000-of-00002.parquet."""
ABOUT_SHARD = re.compile(r"(_stats\.json|\.parquet)$")
"""Ends of names of what img2dataset writes beside 00000.tar: 00000_stats.json, and a table of addresses."""
NOT_ROWS = re.compile(r"(readme|license|licence|notice)(\..*)?|\..*|.*\.(md|py|lock)", re.IGNORECASE)
"""Files of which nobody expects that they hold rows."""

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words that name a split in the names of files and folders, the same as for datasets, which does not read them in
folders of partitions (``split=test``)."""
_WORD = {
    split: re.compile(rf"(?<![^\W\d_])(?:{'|'.join(words)})(?![^\W\d_])", re.IGNORECASE)  # no letter beside it
    for split, words in SPLITS.items()
}
NAMED = 5
"""Files that a note names; the others are counted."""
OF_RUN = {"config.yaml", "environment.json"}
"""Files of a run folder, which is no data where it lies among data."""


@dataclass(frozen=True)
class FolderFiles:
    """The files of a path that are read, and notes for the user, such as about the others in a folder."""

    files: list[Path]
    notes: list[str] = field(default_factory=list)
    mapping: RowMapping | None = None
    """What gives columns and roles the names that formats know, of a data set of a ``dataset_info.json``."""
    remote: dict[Path, RemoteFile] = field(default_factory=dict)
    """Of files at URLs, by where they lie once they are fetched."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden: ``.ipynb_checkpoints``, ``._a.jpg``, or one that macOS or a NAS adds."""
    return name.startswith((".", "__MACOSX", "@eaDir"))


def data_ending(path: Path) -> str:
    """The ending that tells the format of the rows, without a compression's: ``.jsonl`` of ``rows.jsonl.gz``."""
    inner = Path(path.stem).suffix.lower()
    return inner if is_compressed(path) and inner in TEXT_ENDINGS else path.suffix.lower()


def find_sources(path: str | Path, option: str, held_out: bool = False) -> list[FolderFiles]:
    """The files that ``open_rows`` opens, for each of several paths.

    A path is a file, a folder, a pattern, a URL of any of these, or ``FOLDER:NAME``, a data set of a
    ``dataset_info.json``. Of a folder whose files and subfolders are named for several splits (train, validation, test,
    as datasets reads names) only the training split is read, or with ``held_out`` the validation split, else the test
    split.

    Raises DataError when a file is missing, given twice, or of another kind.
    """
    parts = _find_parts(path, option, held_out)
    refuse_twice([file for part in parts for file in part.files], option)
    for part in parts:
        for file in part.files:
            _check_file(file, option, part.remote.get(file))
    return parts


def _check_file(file: Path, option: str, remote: RemoteFile | None) -> None:
    """Raises DataError for a file that is not of a kind that is read, or too large for it."""
    ending = data_ending(file)
    if ending not in ENDINGS:
        shown = file if remote is None else remote.shown
        raise DataError(f"{option}: {shown} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    most_bytes = None if ending in OPENED and not is_compressed(file) else MAX_LOADED
    if remote is None:
        problem = file_problem(file, most_bytes)
    elif most_bytes is not None and remote.size > most_bytes:
        problem = f"has {remote.size:,} bytes, more than the {most_bytes:,} that are read"
    else:
        problem = None
    if problem:
        hint = ": write the rows as .jsonl or .parquet, which are not held in memory" if "bytes" in problem else ""
        raise DataError(f"{option}: {file if remote is None else remote.shown} {problem}{hint}")


def describe_left_out(path: str | Path | None, option: str, held_out: bool = False) -> list[str]:
    """Lines about files of a folder that are not read, and about subsets that are read together."""
    if path is None or (Path(path).suffix.lower() in (".yaml", ".yml") and not is_url(str(path))):
        return []
    return [f"{option}: {note}" for part in _find_parts(path, option, held_out) for note in part.notes]


def refuse_twice(files: Iterable[Path], option: str) -> None:
    """Raises DataError when a file is given twice, by whatever path: its rows would count double."""
    seen: dict[Path, Path] = {}
    for file in files:
        first = seen.setdefault(file.resolve(), file)
        if first is not file:  # an equal path is another object here, too
            also = "" if str(first) == str(file) else f" ({first})"
            raise DataError(
                f"{option}: {file} is given twice{also}, so that its rows would count double: give it once; the "
                "weights of a .yaml file with sources make rows come more often"
            )


def split_of(path: Path) -> str | None:
    """The split that a file belongs to by its name, or else by the names of its folders, the nearest first.

    Args:
        path: relative to the folder that the configuration names.

    Returns:
        None where no name contains the word of a split.
    """
    for name in (path.name, *(parent.name for parent in path.parents)):
        for split, word in _WORD.items():
            if word.search(name):
                return split
    return None


def split_dataset_name(part: str) -> tuple[Path, str] | None:
    """The list and the name in ``FOLDER:NAME`` or ``FOLDER/dataset_info.json:NAME``; None for any other path.

    The name is empty where a path is the list itself.
    """
    if Path(part).name == DATASET_INFO and Path(part).is_file():
        return Path(part), ""
    before, colon, name = part.rpartition(":")
    if not (colon and before and name) or Path(part).exists():
        return None
    path = Path(before) / DATASET_INFO if Path(before).is_dir() else Path(before)
    return (path, name) if path.name == DATASET_INFO and path.is_file() else None


def _find_parts(path: str | Path, option: str, held_out: bool) -> list[FolderFiles]:
    parts = [str(path)] if Path(path).exists() else [part.strip() for part in str(path).split(",")]
    return [_find_part(part, option, held_out) for part in parts]


def _find_remote(url: str, option: str, held_out: bool) -> FolderFiles:
    """The files at a URL. Raises DataError for none."""
    from sfumato.data.files.remote import list_remote

    is_folder, by_name = list_remote(url, option)
    by_path = {file.path: file for file in by_name.values()}
    notes = [
        f"{file.shown}: its server states no version: a change of equal size is not noticed"
        for file in by_name.values()
        if not file.version
    ][:1]
    if not is_folder:
        return FolderFiles([*by_path], notes, remote=by_path)
    # The names in a folder choose its split: they are those of the URL, and not those of the fetched files.
    folder = Path(without_secrets(url).rstrip("/"))
    names = {folder / name: name for name in by_name if not any(part.startswith(".") for part in Path(name).parts)}
    chosen = _choose_files([*names], folder, option, held_out)
    files = [by_name[names[file]].path for file in chosen.files]
    return FolderFiles(files, [*chosen.notes, *notes], remote=by_path)


def _find_part(part: str, option: str, held_out: bool) -> FolderFiles:
    """The files of one path: a file, a pattern such as ``*/test-*.parquet``, or a folder. Raises DataError for none."""
    if is_url(part):
        return _find_remote(part, option, held_out)
    if dataset := split_dataset_name(part):
        from sfumato.data.files.dataset_info import read_entry

        entry = read_entry(*dataset, option)
        inner = _find_part(str(entry.path), option, held_out)
        return FolderFiles(inner.files, [str(entry.mapping), *inner.notes], entry.mapping)
    path = Path(part)
    if part and not path.exists() and ("*" in part or "?" in part):
        matching = find_matching(part)
        if not matching:
            raise DataError(f"{option}: no file matches {part}")
        return FolderFiles(matching)
    if not part or not path.exists():
        near = difflib.get_close_matches(path.name, [beside.name for beside in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise DataError(f"{option}: file not found: {part or 'an empty path between commas'}{hint}")
    return _find_in_folder(path, option, held_out) if path.is_dir() else FolderFiles([path])


def find_matching(pattern: str) -> list[Path]:
    """The files that a pattern with ``*``, ``?`` or ``**`` (any folders) matches, without hidden ones."""
    return sorted(Path(name) for name in glob(pattern.replace("[", "[[]"), recursive=True) if Path(name).is_file())


def _find_in_folder(folder: Path, option: str, held_out: bool) -> FolderFiles:
    """The files of known endings in a folder and its subfolders, without hidden ones and those of runs.

    Raises DataError for the hub's cache of a data set with several revisions, whose rows would count double.
    """
    revisions = sorted(folder.glob("snapshots/*")) if (folder / "refs").is_dir() else []
    if len(revisions) > 1:
        raise DataError(
            f"{option}: {folder} is the hub's cache of a data set, with {len(revisions)} revisions: give one of them, "
            f"as {revisions[-1]}"
        )
    inside = sorted(
        file
        for file in folder.rglob("*")
        if not file.is_dir() and not any(is_hidden(part) for part in file.relative_to(folder).parts)
    )
    names = {file.parent: set[str]() for file in inside if file.parent != folder}
    for file in inside:
        names.get(file.parent, set()).add(file.name)
    runs = {parent for parent, names_inside in names.items() if names_inside >= OF_RUN}
    inside = [file for file in inside if runs.isdisjoint(file.parents)]
    chosen = _choose_files(inside, folder, option, held_out)
    return replace(chosen, notes=[*chosen.notes, *describe_runs(folder, sorted(runs))])


def describe_runs(folder: Path, runs: Sequence[Path]) -> list[str]:
    """A line about run folders below a folder of data; none where there are none."""
    return [f"run folders in {folder} that are not read: {_name_files(runs, folder)}"] if runs else []


def _choose_files(inside: list[Path], folder: Path, option: str, held_out: bool) -> FolderFiles:
    """Those of the files in a folder that are read; nothing is opened. Raises DataError for none."""
    inside = [file for file in inside if not DATASETS_CACHE.fullmatch(file.name)]
    shards = {file.with_suffix("") for file in inside if file.suffix == ".tar"}
    about_shards = {file for file in inside if file.with_name(ABOUT_SHARD.sub("", file.name)) in shards}
    readable = [
        file
        for file in inside
        if data_ending(file) in ENDINGS and file.name not in NOT_DATA and file not in about_shards
    ]
    if not readable:
        endings = ", ".join(sorted({file.suffix or file.name for file in inside})) or "nothing"
        raise DataError(f"{option}: the folder {folder} has no {' or '.join(ENDINGS)} file; it holds {endings}")
    unread = [
        file
        for file in inside
        if file not in set(readable) and file.name not in NOT_DATA and not NOT_ROWS.fullmatch(file.name)
    ]
    by_split: dict[str | None, list[Path]] = {}
    for file in readable:
        by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
    notes = [f"files of the folder {folder} that are not read: {_name_files(unread, folder)}"] if unread else []
    wanted = ("validation", "test") if held_out else ("train", None)
    split = next((name for name in wanted if name in by_split), None)
    has_held_out = "validation" in by_split or "test" in by_split
    if len(by_split) > 1 and has_held_out and split in by_split:
        left_out = [file for file in readable if file not in set(by_split[split])]
        name = "files that name no split" if split is None else f"its {split} split"
        notes.insert(
            0,
            f"the folder {folder} holds several splits, of which {name} is read "
            f"({_name_files(by_split[split], folder)}); left out: {_name_files(left_out, folder)}",
        )
        readable = by_split[split]
    notes += _check_shards(readable, folder, option)
    subsets = sorted(
        {file.relative_to(folder).parts[0] for file in readable if len(file.relative_to(folder).parts) > 1}
    )
    subsets = [name for name in subsets if name != "data" and split_of(Path(name)) is None]
    if len(subsets) > 1:
        notes.append(
            f"the folder {folder} has the subsets {', '.join(subsets)}, which are read together: name one of them, as "
            f"{folder / subsets[0]}, to read it alone"
        )
    return FolderFiles(readable, notes)


def _check_shards(files: list[Path], folder: Path, option: str) -> list[str]:
    """Notes about tables of which files are missing.

    Raises DataError for files of two tables of one name: of one that was written again in another number of files, as
    datasets leaves those of the first behind, the rows would count double. So they would of several splits of one kind,
    such as train_sft and train_prefs of UltraFeedback, or train and train_1M of OpenMathInstruct-2.
    """
    tables: dict[tuple[Path, str, str], list[tuple[int, int, Path]]] = {}
    for file in files:
        if match := SHARD.match(file.name):
            shard = (int(match["total"]), int(match["number"]), file)
            tables.setdefault((file.parent, match["before"], data_ending(file)), []).append(shard)
    splits: dict[Path, dict[Path, str]] = {}  # by the folder that they lie in: what their names begin with, a pattern
    for (parent, before, _), shards in tables.items():
        in_name = split_of(Path(before)) is not None
        place = parent / before if in_name else parent
        if split_of(Path(place.name)) is not None:
            splits.setdefault(place.parent, {})[place] = f"{place}*{shards[0][2].suffix}" if in_name else str(place)
    for parent, patterns in splits.items():
        if len(patterns) > 1:
            names = ", ".join(place.name.strip("-_.") for place in sorted(patterns))
            raise DataError(
                f"{option}: {parent} holds the splits {names}, which may have the same rows: name those to read, as "
                f"{min(patterns.values())}, with commas between several"
            )
    notes = []
    for shards in tables.values():
        total, _, first = min(shards)
        if len({number for _, number, _ in shards}) < len(shards) or max(shards)[0] != total:
            raise DataError(
                f"{option}: the folder {folder} holds files of one table that was written twice: "
                f"{_name_files([file for _, _, file in shards], folder)}: remove those of the older one"
            )
        if len(shards) < total:
            missing = f"has {len(shards)} of the {total} files of the table of {first.relative_to(folder)}"
            notes.append(f"the folder {folder} {missing}: the rows of the others are not read")
    return notes


def _name_files(files: Sequence[Path], folder: Path) -> str:
    names = ", ".join(str(file.relative_to(folder)) for file in files[:NAMED])
    return names if len(files) <= NAMED else f"{names} and {len(files) - NAMED} more"
