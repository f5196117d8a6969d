"""Folders of pictures with captions in files beside them or in a table; files that are not used are named."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from sfumato.data.files.bad_rows import parse_json
from sfumato.data.files.compressed import read_text
from sfumato.data.files.file_rows import MAX_LINE, file_fingerprint
from sfumato.data.files.folders import OF_RUN, SPLITS, describe_runs, is_hidden
from sfumato.data.files.row_table import FiledRows
from sfumato.data.media.kinds import IMAGE_ENDINGS, VIDEO_ENDINGS
from sfumato.errors import DataError

METADATA = ("metadata.jsonl", "metadata.parquet", "metadata.csv")
"""Names of a folder's table, as in Hugging Face's image folders; only the first of these that exists is read."""

CAPTION_ENDINGS = (".txt", ".caption", ".json")
"""Endings of files with a picture's caption; the first of these that exists counts."""

CAPTION_FIELDS = ("caption", "text", "prompt", "description")
"""Fields of a .json file that may hold the caption, after the one that data.text_key names; the first that is set
counts."""

UNREAD_ENDINGS = {
    ".heic", ".heif", ".jxl", ".jp2", ".svg", ".psd", ".pdf", ".ico", ".tga", ".eps", ".ppm", ".pgm", ".qoi",
    ".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf",
    ".m4a", ".aac", ".wma", ".ape", ".amr", ".mka",
}  # fmt: skip
"""Endings of pictures and sounds that are not read."""

SHOWN = 3
"""Files that a line names; the others are counted."""

REPEATS = re.compile(r"(\d{1,3})_.+")
"""Names of folders that kohya's scripts read as many times in an epoch as the number says."""


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders, sorted, without hidden ones and those of runs."""
    return list_files_and_runs(folder)[0]


def list_files_and_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of ``visible_files``, and the run folders among the subfolders. A linked folder is read once."""
    files = []
    runs = []
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if OF_RUN.issubset(names) and Path(root) != folder:
            folders.clear()
            runs.append(Path(root))
            continue
        seen.add(os.path.realpath(root))  # a link to a folder above would be followed for ever
        folders[:] = sorted(
            name for name in folders if not is_hidden(name) and os.path.realpath(f"{root}/{name}") not in seen
        )
        files += [Path(root, name) for name in names if not is_hidden(name)]
    return sorted(files), sorted(runs)


def choose_split(folder: Path, endings: Set[str], held_out: bool = False) -> tuple[Path, list[str]]:
    """The subfolder with the split that is read, of a folder of pictures that has several, as ``find_sources`` chooses.

    Such a folder has one subfolder ``train`` and one of held-out pictures, by a word of ``SPLITS`` for each, and no
    table and no pictures beside them.

    Args:
        folder: of the configuration.
        endings: of pictures.
        held_out: whether the pictures are for evaluation.

    Returns:
        The folder itself where it has no splits; and a line about what is left out.
    """
    entries = [path for path in sorted(folder.iterdir()) if not is_hidden(path.name)]
    is_table = any(path.name in METADATA or path.suffix.lower() in endings for path in entries)
    by_split: dict[str, list[Path]] = {}
    for path in entries if not is_table else ():
        split = next((split for split, words in SPLITS.items() if path.name.lower() in words), None)
        if split is not None and path.is_dir():
            by_split.setdefault(split, []).append(path)
    if "train" not in by_split or len(by_split) == 1 or any(len(folders) > 1 for folders in by_split.values()):
        return folder, []
    wanted = ("validation", "test") if held_out else ("train",)
    chosen = next(by_split[split][0] for split in wanted if split in by_split)
    left_out = ", ".join(path.name for path in entries if path.is_dir() and path != chosen)
    return chosen, [f"the folder {folder} holds several splits, of which {chosen.name} is read; left out: {left_out}"]


def find_metadata(folder: Path) -> list[Path]:
    """The tables of a folder of pictures: one in the folder itself, or else one in each of its subfolders."""
    tables: dict[Path, Path] = {}
    for path in sorted(folder.glob("*")) if not any((folder / name).is_file() for name in METADATA) else [folder]:
        if path.is_dir() and not (path != folder and is_hidden(path.name)):
            table = next((path / name for name in METADATA if (path / name).is_file()), None)
            if table is not None:
                tables[path] = table
    return list(tables.values())


class FolderRows:
    """A folder of images or videos, each with its caption in a file of the same name beside it."""

    def __init__(self, folder: Path, image_key: str, text_key: str, endings: Set[str] = IMAGE_ENDINGS) -> None:
        self.root = folder
        self.image_key = image_key
        self.text_key = text_key
        files, runs = list_files_and_runs(folder)
        self._files = [path for path in files if path.suffix.lower() in endings]
        captions = {
            _path_without_suffix(path) + path.suffix.lower(): path
            for path in files
            if path.suffix.lower() in CAPTION_ENDINGS
        }
        self._captions = [
            next(
                (
                    captions[_path_without_suffix(path) + ending]
                    for ending in CAPTION_ENDINGS
                    if _path_without_suffix(path) + ending in captions
                ),
                None,
            )
            for path in self._files
        ]
        self.unused = [*self._describe_unused(files), *describe_runs(folder, runs)]
        """Lines about files that are in no row, or in a broken one, and about run folders."""

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, object]:
        caption = self._captions[index]
        if caption is None:
            expected = self._files[index].with_suffix(".txt")
            raise DataError(
                f"{self.describe(index)}: no caption: {expected} does not exist (and there is no {METADATA[0]})"
            )
        text = read_text(caption, MAX_LINE).strip()
        if caption.suffix.lower() == ".json":
            text = self._caption_of(parse_json(text, str(caption)), caption)
        return {self.image_key: str(self._files[index].relative_to(self.root)), self.text_key: text}

    def describe(self, index: int) -> str:
        return str(self._files[index])

    def folder(self, index: int) -> Path:
        return self.root

    def fingerprint(self) -> str:
        """All images and captions with their sizes and times."""
        return file_fingerprint(self.files())

    def files(self) -> list[Path]:
        """The files of all images and captions."""
        return [*self._files, *(path for path in self._captions if path is not None)]

    def _caption_of(self, content: object, where: Path) -> str:
        """The caption in the parsed content of a .json file. Raises DataError when it has none."""
        fields = content if isinstance(content, dict) else {}
        key = next((name for name in (self.text_key, *CAPTION_FIELDS) if fields.get(name)), None)
        if key is None:
            raise DataError(f"{where}: no caption in any of its fields {self.text_key}, {', '.join(CAPTION_FIELDS)}")
        return fields[key]

    def _describe_unused(self, files: Iterable[Path]) -> list[str]:
        used = {*self.files()}
        unused = [path for path in files if path not in used]
        pictured = {_path_without_suffix(path) for path in self._files}
        lonely = [
            path for path in unused if path.suffix.lower() == ".txt" and _path_without_suffix(path) not in pictured
        ]
        missing = [path for path, caption in zip(self._files, self._captions, strict=True) if caption is None]
        unread = [path for path in unused if path.suffix.lower() in UNREAD_ENDINGS | IMAGE_ENDINGS | VIDEO_ENDINGS]
        stems = Counter(_path_without_suffix(path) for path in self._files)
        same = [path for path in self._files if stems[_path_without_suffix(path)] > 1]
        return [
            *_describe_files(missing, self.root, "pictures without a caption, which are broken rows"),
            *_describe_files(lonely, self.root, "captions without a picture or video that is read"),
            *_describe_files(unread, self.root, "pictures, videos or sounds of kinds that are not read here"),
            *_describe_files(same, self.root, "pictures that share their caption with another of the same name"),
            *_describe_repeats(self._files, self.root),
        ]


def describe_unlisted(
    folder: Path, rows: FiledRows, image_keys: Callable[[dict[str, object]], Sequence[str]], endings: set[str]
) -> list[str]:
    """Lines about the pictures of a folder that its table does not name, and about captions beside those that it names;
    none where there are none.

    Args:
        folder: of the pictures and the table.
        rows: of the table.
        image_keys: gives the columns of a row's pictures, that of its own first.
        endings: of pictures.
    """
    named = set()
    for index in range(len(rows)):
        try:
            row = rows[index]
        except DataError:  # the broken row is named when it is read for training
            continue
        values = [row.get(key) for key in image_keys(row)]
        if not isinstance(values[0], str):  # the table holds the pictures itself
            return []
        paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
        named.update(
            _compose_letters(os.path.normpath(rows.folder(index) / path)) for path in paths if isinstance(path, str)
        )
    if not named:
        return []
    files, runs = list_files_and_runs(folder)
    unlisted = [
        path
        for path in files
        if path.suffix.lower() in endings and _compose_letters(os.path.normpath(path)) not in named
    ]
    stems = {os.path.splitext(path)[0] for path in named}
    captions = [
        path
        for path in files
        if path.suffix.lower() in (".txt", ".caption") and os.path.normpath(_path_without_suffix(path)) in stems
    ]
    return [
        *_describe_files(unlisted, folder, "pictures that its table does not name"),
        *_describe_files(captions, folder, "captions that are not read, since its table has others"),
        *describe_runs(folder, runs),
    ]


def _describe_files(paths: list[Path], root: Path, description: str) -> list[str]:
    """A line about files; none where there are none."""
    if not paths:
        return []
    endings = Counter(path.suffix.lower() for path in paths)
    counts = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common())
    shown = ", ".join(json.dumps(str(path.relative_to(root)), ensure_ascii=False) for path in paths[:SHOWN])
    more = ", ..." if len(paths) > SHOWN else ""
    return [f"{root}: {len(paths):,} {description} ({counts}): {shown}{more}"]


def _describe_repeats(files: Iterable[Path], root: Path) -> list[str]:
    """A line about folders whose names give kohya's scripts different repeats; none where there are none."""
    folders = sorted({path.parent.name for path in files if path.parent != root})
    repeats = {match[1]: name for name in folders if (match := REPEATS.fullmatch(name))}
    if len(repeats) < 2:
        return []
    shown = ", ".join([*repeats.values()][:SHOWN])
    return [
        f"{root}: the numbers of folders such as {shown}, by which kohya's scripts repeat pictures, say nothing here: "
        "each picture comes once in an epoch"
    ]


def _path_without_suffix(path: Path) -> str:
    """The path without its ending, as of ``_compose_letters``."""
    return _compose_letters(str(path.with_suffix("")))


def _compose_letters(path: str) -> str:
    """The path with composed letters (NFC): macOS writes names with decomposed ones."""
    return unicodedata.normalize("NFC", path)
