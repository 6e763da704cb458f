"""Folders and files on a local disk or an object store, through pyarrow.fs.

Stores are asked again with growing waits where a request fails in passing: pyarrow does it for S3
and Google's, :mod:`pipeline.remote` for the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from .remote import EXPECTED, FsspecHandler, StorageError, is_unreachable, remote

__all__ = [
    "Folder",
    "StorageError",
    "in_threads",
    "is_local",
    "is_unreachable",
    "resolve",
    "split_query",
]

T = TypeVar("T")
R = TypeVar("R")

_LOCAL = fs.LocalFileSystem()


def resolve(path: str, base: str | os.PathLike[str] = ".") -> tuple[fs.FileSystem, str]:
    """The file system a path or URI lies on, and the path there; relative ones start at ``base``.

    Raises:
        StorageError: a URI that cannot be opened, or that holds credentials.
    """
    if "://" not in path:
        return _LOCAL, os.path.abspath(os.path.join(base, os.path.expanduser(path)))
    stem, query = split_query(path)
    scheme, _, rest = stem.partition("://")
    if scheme != "file":
        return remote(scheme, rest, query)
    host, slash, inside = rest.partition("/")
    # Blanks, wildcards and letters beyond ASCII may stand in a URI as they are.
    escaped = quote(inside, safe="%/!$&'()*+,:;=@~")
    try:
        filesystem, inner = fs.FileSystem.from_uri(f"{scheme}://{host}{slash}{escaped}{query}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"cannot open {path!r}: {error}; {EXPECTED}") from error
    return filesystem, inner.rstrip("/") or inner


def split_query(path: str) -> tuple[str, str]:
    """A path or URI and its query, which begins where ``name=`` follows a question mark."""
    found = re.search(r"\?[\w-]+=", path) if "://" in path else None
    return (path[: found.start()], path[found.start() :]) if found else (path, "")


def is_local(path: str) -> bool:
    """Whether a path or URI lies on this machine's own file system."""
    return "://" not in path or path.startswith("file://")


def in_threads(
    function: Callable[[T], R], items: list[T], threads: int = 16, window: int = 256
) -> list[R]:
    """Map with threads, results in the order of the items, at most ``window`` waiting."""
    results: list[R] = []
    waiting: list[Future[R]] = []
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= window:
                    results.append(waiting.pop(0).result())
            results.extend(future.result() for future in waiting)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Name the file in an error of a store, where it does not do so itself."""
    try:
        yield
    except OSError as error:
        told, (bucket, _, key) = str(error), path.partition("/")
        if path in told or (f"'{bucket}'" in told and f"'{key}" in told):
            raise
        raise type(error)(f"{path}: {error}") from error


def _put(filesystem: fs.FileSystem, path: str, data: bytes | pa.Buffer) -> None:
    """Write an object: it is there in full or not at all."""
    if isinstance(filesystem, fs.PyFileSystem) and isinstance(filesystem.handler, FsspecHandler):
        filesystem.handler.put(path, bytes(data))
        return
    stream = filesystem.open_output_stream(path, compression=None)
    try:
        stream.write(data)
        stream.close()
    except BaseException:
        # A stream that is let go publishes what it has got, so this one is held for good.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
        raise


@dataclass(frozen=True)
class Folder:
    """A folder of a mix; names are relative, with ``/`` between parts."""

    filesystem: fs.FileSystem
    root: str
    uri: str
    _process: int = field(default_factory=os.getpid, repr=False, compare=False)

    @classmethod
    def at(cls, path: str, base: str | os.PathLike[str] = ".") -> Folder:
        """The folder a path or URI names."""
        filesystem, root = resolve(path, base)
        return cls(filesystem, root, root if is_local(path) else path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its URI: another process has a client of its own."""
        return Folder.at, (self.uri,)

    @property
    def local(self) -> bool:
        """Whether names can be opened and renamed by the operating system."""
        return bool(self.filesystem.type_name == "local")

    def path(self, name: str) -> str:
        """Full path on the file system; a name that leads out of the folder is refused.

        Raises:
            StorageError: an absolute name, or one with ``..`` in it.
        """
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise StorageError(f"{name!r} leads out of {self.root}; names in a mix are relative")
        return f"{self.root}/{name}" if name else self.root

    def _here(self) -> fs.FileSystem:
        """The file system; a fork that shared its parent's client would get the other's answers."""
        if self.local or self._process == os.getpid():
            return self.filesystem
        return resolve(self.uri)[0]

    def size(self, name: str) -> int | None:
        """Size in bytes of a file, None where there is no such file."""
        path = self.path(name)
        with self._errors(path):
            info = self._here().get_file_info(path)
        return int(info.size) if info.is_file else None

    def names(self, name: str = "") -> list[str]:
        """Names of all files below a folder, relative to it, sorted; [] where it is missing.

        Raises:
            StorageError: a file stands where the folder should.
        """
        top = self.path(name)
        selector = fs.FileSelector(top, recursive=True, allow_not_found=True)
        try:
            with self._errors(top):
                found = self._here().get_file_info(selector)
        except NotADirectoryError as error:
            raise StorageError(f"{top}: expected a folder, found a file; move it away") from error
        return sorted(info.path[len(top) :].lstrip("/") for info in found if info.is_file)

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for reading at random places."""
        path = self.path(name)
        with self._errors(path):
            return self._here().open_input_file(path)

    def read(self, name: str) -> bytes:
        """All bytes of a small file."""
        with self.open(name) as file, self._errors(self.path(name)):
            return bytes(file.read())

    def put(self, name: str, data: bytes | pa.Buffer, flush: bool = True) -> None:
        """Write a whole file in one step: it is there in full or not at all.

        Without ``flush`` that holds for a process that dies, but not for a machine that does; call
        :meth:`flush` before anything depends on the file.

        Raises:
            StorageError: a local disk does not take it; the text names it.
            OSError: a store does not, whose text names it too.
        """
        if self.local:
            scratch = self.scratch(name)
            try:
                with open(scratch, "wb") as file:
                    file.write(data)
                self.place(scratch, name, flush)
            except BaseException as error:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(scratch)
                if isinstance(error, OSError):  # a full disk names no file
                    reason = error.strerror or error
                    path = self.path(name)
                    raise StorageError(f"{path}: cannot be written: {reason}") from error
                raise
            return
        path = self.path(name)
        with self._errors(path):
            _put(self._here(), path, data)

    def scratch(self, name: str) -> str:
        """A fresh path on a local disk, from which :meth:`place` can put a file into the folder."""
        tmp = self.path("_mix/tmp") if self.local else tempfile.gettempdir()
        os.makedirs(tmp, exist_ok=True)
        return f"{tmp}/{os.path.basename(name)}.{uuid.uuid4().hex}.part"

    def flush(self, name: str) -> None:
        """Have a file of a local folder on its disk; an object that was put is stored already."""
        if self.local:
            with open(self.path(name), "rb") as file:
                os.fsync(file.fileno())

    def place(self, scratch: str, name: str, flush: bool = True) -> None:
        """Put a scratch file at its final name in one step: flush and rename, or one put."""
        with open(scratch, "rb") as file:
            if not self.local:
                with pa.memory_map(scratch) as mapped:
                    self.put(name, mapped.read_buffer())
                os.remove(scratch)
                return
            if flush:
                os.fsync(file.fileno())
        final = self.path(name)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        os.replace(scratch, final)

    def delete(self, name: str) -> None:
        """Remove a file; one that is gone already is fine."""
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError), self._errors(path):
            self._here().delete_file(path)

    def delete_tree(self, name: str) -> None:
        """Remove all that lies below a folder; one that is gone already is fine."""
        path = self.path(name)
        with self._errors(path):
            self._here().delete_dir_contents(path, missing_dir_ok=True)

    def _errors(self, path: str) -> contextlib.AbstractContextManager[None]:
        """A local disk names its files in errors; a store may not."""
        return contextlib.nullcontext() if self.local else _named(path)

    def free_bytes(self) -> int | None:
        """Free space where the folder lies (or will lie), None where it has no such bound."""
        if not self.local:
            return None
        path = self.root
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        stat: Any = os.statvfs(path)
        return int(stat.f_bavail * stat.f_frsize)
