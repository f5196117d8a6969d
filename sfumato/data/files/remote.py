"""Files at URLs that fsspec reads (``s3://``, ``gs://``, ``hdfs://``, ...), fetched into a folder of this machine.

A file is fetched once and kept by its URL, size and version (ETag, or the time of its last change): one that has
changed is another file here. Credentials are those that the package of the protocol finds in its usual places.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from sfumato.config.writing import open_lock, replace_file
from sfumato.data.files.urls import URL, without_secrets
from sfumato.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime", "created")
"""Keys of what file systems say of a file that change with its content."""
CACHE = "SFUMATO_CACHE"
"""Environment variable that names the folder for fetched files."""
BLOCK = 2**22


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL."""

    url: str
    size: int
    """In bytes."""
    version: str
    """What the file system says that changes with the content; empty where it says nothing."""

    @property
    def shown(self) -> str:
        """The URL for messages."""
        return without_secrets(self.url)

    @cached_property
    def path(self) -> Path:
        """Where it lies once it is fetched."""
        digest = hashlib.blake2b(f"{self.shown}\0{self.size}\0{self.version}".encode(), digest_size=16).hexdigest()
        root = os.environ.get(CACHE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "sfumato")
        return Path(root).expanduser() / "remote" / digest / self.shown.rstrip("/").rpartition("/")[2]

    def fetch(self) -> Path:
        """Fetches the file unless it is there. Processes of a machine wait for the one that fetches it.

        Raises:
            DataError: when it cannot be read, or there is no room for it.
        """
        if self.path.is_file():
            return self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_lock(self.path.parent / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self.path.is_file():
                    self._download()
        except OSError as error:
            raise DataError(
                f"{self.shown} cannot be fetched to {self.path.parent}: {describe(error)} (the environment variable "
                f"{CACHE} names another folder)"
            ) from error
        return self.path

    def _download(self) -> None:
        with replace_file(self.path) as target:
            with _errors_of(self.shown):
                file_system, path = open_file_system(self.url)
                with file_system.open(path, "rb") as source:
                    shutil.copyfileobj(cast("IO[bytes]", source), target, BLOCK)
            if target.tell() != self.size:
                raise DataError(f"{self.shown} has {target.tell()} bytes, not the {self.size} of a moment ago")
            target.flush()
            # A fixed time, so that caches know a file that was fetched again; the path tells versions apart.
            os.utime(target.fileno(), (0, 0))


def open_file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path there.

    Raises:
        DataError: for a protocol that nobody knows, or a URL with a password.
        MissingDependencyError: when the package of the protocol is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    match = URL.match(url)
    protocol = match[1].lower() if match else ""
    authority = url.partition("://")[2].partition("/")[0]
    if "::" in url or ("@" in authority and ":" in authority.partition("@")[0]):
        raise DataError(
            f"{protocol}://…: a URL must hold no password, and no other URL: credentials come from the environment or "
            "the files that the package of the protocol reads"
        )
    query = url.partition("?")[2]
    if re.search(r"(?i)(^|&)[^=]*(sig|token|key|secret|credential)[^=]*=", query):
        raise DataError(
            f"{without_secrets(url)}?…: a signed URL is a key, which would be written with the configuration: let the "
            "package of the protocol sign requests, or fetch the file yourself"
        )
    if protocol not in {*known_implementations, *fsspec.available_protocols()}:
        raise DataError(f"{without_secrets(url)}: fsspec knows no protocol {protocol}")
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        s3, gs = "'sfumato[s3]' (s3fs)", "'sfumato[gs]' (gcsfs)"
        package = {"s3": s3, "s3a": s3, "gs": gs, "gcs": gs, "hdfs": "pyarrow", "abfs": "adlfs", "az": "adlfs"}
        package |= {"oss": "ossfs", "http": "aiohttp", "https": "aiohttp"}
        name = package.get(protocol)
        hint = f"pip install {name}" if name else str(known_implementations.get(protocol, {}).get("err", error))
        raise MissingDependencyError(f"{protocol}:// needs a package that is not installed: {hint}") from error
    except OSError as error:
        # pyarrow loads both when the file system is opened, and says the second time only that it failed before
        if protocol != "hdfs" or not re.search("libhdfs|libjvm", str(error)):
            raise
        raise MissingDependencyError(
            "hdfs:// needs Hadoop's client on this machine beside pyarrow: Java and libhdfs.so, by JAVA_HOME, "
            f"HADOOP_HOME and CLASSPATH=$(hadoop classpath --glob); {describe(error)}"
        ) from error
    return file_system, str(path)


def list_remote(url: str, option: str) -> tuple[bool, dict[str, RemoteFile]]:
    """The files at a URL: a file, a pattern such as ``s3://bucket/*/test-*.parquet``, or all files below a folder.

    Args:
        url: of them.
        option: the configuration field that holds it, for messages.

    Returns:
        Whether it is a folder; and the files in the order of their names, by their path in the folder.

    Raises:
        DataError: when nothing is there, or it cannot be listed.
    """
    shown = f"{option}: {without_secrets(url)}"
    with _errors_of(shown):
        file_system, path = open_file_system(url)
        folder = path.rpartition("/")[0]
        is_folder = False
        if ("*" in path or "?" in path) and not url.startswith(("http://", "https://")):
            matching = cast("dict[str, dict[str, object]]", file_system.glob(path, detail=True))
            paths = [file for file, info in matching.items() if info["type"] == "file"]
        elif _is_file(file_system, path):
            paths = [path]
        else:
            is_folder = True
            folder = path.rstrip("/")
            paths = list(file_system.find(path))
        if not paths:
            raise DataError(f"{shown}: nothing is there")
        files = {file: _describe_file(file_system, file, url) for file in sorted(map(str, paths))}
        return is_folder, {file.removeprefix(folder).lstrip("/"): described for file, described in files.items()}


def _is_file(file_system: AbstractFileSystem, path: str) -> bool:
    try:
        return file_system.info(path)["type"] == "file"
    except FileNotFoundError:  # a folder of an object store is nothing but the beginning of names
        return False


def _describe_file(file_system: AbstractFileSystem, path: str, url: str) -> RemoteFile:
    info = file_system.info(path)
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    size = info.get("size")
    if not isinstance(size, int):
        raise DataError(f"{without_secrets(url)}: the server does not say how large the file is: fetch it yourself")
    is_same = file_system._strip_protocol(url) == path
    return RemoteFile(url if is_same else file_system.unstrip_protocol(path), size, version)


@contextlib.contextmanager
def _errors_of(shown: str) -> Iterator[None]:
    """Whatever a file system raises, as a DataError about ``shown``."""
    try:
        yield
    except (DataError, MissingDependencyError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{shown}: not found") from error
    except Exception as error:  # packages of protocols raise errors of their own
        if isinstance(error, OSError) and error.errno is not None and isinstance(error.filename, str | os.PathLike):
            raise  # of this machine's disk
        raise DataError(f"{shown}: cannot be read: {describe(error)}") from error


def describe(error: Exception) -> str:
    """An error in one line, without what may be secret in a URL of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://)[^\s/@]*@", r"\1", re.sub(r"\?[^\s'\"]*", "", text))
    return f"{type(error).__name__}: {text[:300]}"
