"""What is written into run folders, caches and exports, where another user or a stranger's folder has left a link."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import sfumato
from sfumato.config.writing import open_lock, open_new, open_to_append, replace_file

PACKAGE = Path(sfumato.__file__).parent

WRITES = {
    "write_text", "write_bytes", "touch", "save_file", "savez", "savez_compressed", "save_pretrained", "savefig",
    "copyfile", "copytree", "copy2", "symlink_to", "symlink", "mkstemp", "mktemp", "mkdtemp", "NamedTemporaryFile",
    "TemporaryFile", "TemporaryDirectory", "gettempdir", "export_chrome_trace", "_dump_snapshot", "to_parquet",
    "to_csv", "write_table", "memmap", "FileHandler",
}  # fmt: skip
"""Names of functions that write to a path, whatever module they are of."""
WRITES_OF_MODULES = {"np.save", "numpy.save", "torch.save", "torch.from_file", "shutil.copy", "os.open", "os.mkfifo"}

IN_A_NEW_FOLDER = "into an empty folder that make_new_folder has made"
INTO_AN_OPEN_FILE = "into a file that is open already, or into memory"
PRIVATE = "into a folder that mkdtemp made, with mode 0700"
READS = "opens to read"
EXCEPTIONS = {
    "config/writing.py": "is the helper",
    "commands/doctor_findings.py": PRIVATE,
    "commands/export_checkpoint.py": IN_A_NEW_FOLDER,
    "commands/export_formats.py": IN_A_NEW_FOLDER,
    "studio/control.py": PRIVATE,
    "studio/tail.py": READS,
    "studio/thumbnails.py": PRIVATE,
    "tracking/control_files.py": READS,
    "tracking/model_card.py": INTO_AN_OPEN_FILE,
    "tracking/samples.py": IN_A_NEW_FOLDER,
    "data/images/buckets.py": INTO_AN_OPEN_FILE,
    "data/files/file_digests.py": INTO_AN_OPEN_FILE,
    "data/synthetic/keypad.py": INTO_AN_OPEN_FILE,
    "data/media/cache.py": INTO_AN_OPEN_FILE,
    "data/media/processor_files.py": IN_A_NEW_FOLDER,
    "data/files/row_store.py": READS,
    "data/text/token_store.py": READS,
    "evaluation/replay.py": PRIVATE,
    "evaluation/samples_folder.py": INTO_AN_OPEN_FILE,
    "launcher.py": PRIVATE,
    "models/diffusion/adapter_files.py": IN_A_NEW_FOLDER,
    "models/diffusion/base.py": IN_A_NEW_FOLDER,
    "models/diffusion/cached_rows.py": INTO_AN_OPEN_FILE,
    "models/language/model.py": IN_A_NEW_FOLDER,
    "models/lora.py": IN_A_NEW_FOLDER,
    "models/language/model_folder.py": IN_A_NEW_FOLDER,
    "models/older_readers.py": IN_A_NEW_FOLDER,
    "models/language/streamed_export.py": IN_A_NEW_FOLDER,
    "models/omni/": IN_A_NEW_FOLDER,
    "models/smollm2.py": IN_A_NEW_FOLDER,
    "rewards/code.py": "opens /dev/null",
    "rewards/coding/": "within the sandbox, whose file systems nobody else sees",
    "rewards/convert.py": "a file that the person names and that must not exist",
    "rewards/scoring/worker_process.py": INTO_AN_OPEN_FILE,
    "rollout/engines/served/owner_process.py": PRIVATE,
    "rollout/engines/served/server_folder.py": PRIVATE,
    "rollout/engines/served/vllm_in_process.py": PRIVATE,
    "rollout/engines/served/weight_files.py": IN_A_NEW_FOLDER,
    "runtime/cluster/token.py": "opens with O_EXCL, O_NOFOLLOW and mode 0600",
    "runtime/weight_sync/transports/files.py": IN_A_NEW_FOLDER,
    "runtime/weight_sync/transports/ipc.py": "a file of a name that nobody can guess, which torch makes with mode 0600",
    "sandbox/": "the sandbox's own file systems, before a program runs in them",
    "tracking/atomic_folders.py": READS,
    "tracking/charts.py": INTO_AN_OPEN_FILE,
    "tracking/exit.py": PRIVATE,
    "tracking/lock.py": "opens with O_EXCL or O_NOFOLLOW",
    "tracking/meters.py": IN_A_NEW_FOLDER,
    "tracking/terminal.py": "opens /dev/null",
    "tracking/waveforms.py": INTO_AN_OPEN_FILE,
}
"""Files and folders of files that write by themselves, and why no link can lie there."""


def find_writers() -> Iterator[tuple[str, str]]:
    """Files of the library that write to a path, and the calls by which they do."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and writes(node):
                yield str(path.relative_to(PACKAGE)), f"line {node.lineno}: {ast.unparse(node)}"


def writes(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in WRITES or ast.unparse(function) in WRITES_OF_MODULES:
        return True
    if name not in ("open", "fdopen"):
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [
        argument.value
        for argument in arguments
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return any(set(mode) <= set("rwxab+t") and set(mode) & set("wxa+") for mode in modes)


def test_whatever_writes_does_so_by_the_helper_or_has_a_reason() -> None:
    by_themselves = dict(find_writers())
    reasons = {file: [prefix for prefix in EXCEPTIONS if file.startswith(prefix)] for file in by_themselves}
    assert {file: by_themselves[file] for file, prefixes in reasons.items() if not prefixes} == {}, (
        "write by sfumato/config/writing.py, or say here why no link can lie there"
    )
    used = {prefix for prefixes in reasons.values() for prefix in prefixes}
    assert set(EXCEPTIONS) - used == set(), "these write nothing by themselves any more"


def test_the_walk_sees_every_kind_of_writer() -> None:
    source = (
        "open(p, 'w'); p.open('rb+'); p.write_text('x'); torch.save(x, p); open(p, mode='a'); open(p); p.open('rb')"
    )
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert [ast.unparse(call) for call in calls if writes(call)] == source.split("; ")[:5]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """What somebody's link points to, and nothing may change."""
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "file").write_text("before")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"] and (folder / "file").read_text() == "before"


def test_a_file_that_is_replaced_is_never_the_one_that_a_link_names(secret: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret / "file")
    with replace_file(link) as file:
        file.write(b"after")
    assert not link.is_symlink() and link.read_bytes() == b"after"
    with contextlib.suppress(KeyboardInterrupt), replace_file(link) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert link.read_bytes() == b"after" and sorted(path.name for path in tmp_path.iterdir()) == ["link", "secret"]


def test_links_pipes_and_devices_are_neither_appended_to_nor_locked(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(secret / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("link", "pipe", "device"):
        for write in (open_to_append, open_lock, open_new):
            with pytest.raises(OSError):
                write(tmp_path / name).close()
