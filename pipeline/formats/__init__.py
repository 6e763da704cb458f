"""Source formats: how a file is scanned, and how it is opened at a row.

A format is a module with what :class:`Format` has; :func:`format_of` finds it by the name of the
file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pyarrow import fs

from ..errors import MixError


class SourceError(MixError):
    """A source file cannot be read as what it claims to be."""


class SourceChangedError(SourceError):
    """A source file is no longer the one that was planned."""


class Block(NamedTuple):
    """Consecutive bytes of a file that are decoded as one.

    ``crc32`` of the bytes, None where the format has checksums of its own or none at all.
    """

    start: int
    size: int
    crc32: int | None


class Known(Protocol):
    """What was planned of a file, for those who open it again; see :class:`FileScan`."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def group_rows(self) -> tuple[int, ...]: ...
    @property
    def blocks(self) -> tuple[Block, ...]: ...


@dataclass(frozen=True)
class FileScan:
    """What planning learns of one file.

    ``num_bytes`` is its size, ``column_bytes`` the stored size of each column, by its path or by
    that of what it lies in (an estimate where the format does not say), ``digest`` the hex sha256
    that stands for its content. ``group_rows`` are the rows of each part that is decoded as one: a
    row group, or one of ``blocks``, which are there where the file itself does not say where its
    parts lie.
    ``bad_lines`` counts lines that were left out.
    """

    num_rows: int
    num_bytes: int
    digest: str
    schema: pa.Schema
    column_bytes: dict[str, int]
    group_rows: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    bad_lines: int = 0


@dataclass(frozen=True)
class ReadOptions:
    """What a config says of a dataset's files, where their format leaves it open.

    ``schema`` gives top-level columns a type; a line of text is at most ``max_line_bytes``; one
    that is no item is an error, or left out with ``skip_bad_lines``.
    """

    schema: Mapping[str, pa.DataType] = field(default_factory=dict)
    max_line_bytes: int = 64 << 20
    skip_bad_lines: bool = False


class Format(Protocol):
    """What the catalog and the cursors ask of a format's module."""

    SUFFIXES: tuple[str, ...]

    def opens_anywhere(self, path: str) -> bool:
        """Whether a file is read from a row on without reading all before it."""

    def scan(self, filesystem: fs.FileSystem, path: str, options: ReadOptions) -> FileScan:
        """Read what planning needs: rows, schema, digest. Raises SourceError."""

    def read_from(
        self,
        filesystem: fs.FileSystem,
        path: str,
        known: Known,
        row: int,
        columns: pa.Schema,
        batch_bytes: int,
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of some columns from a row on, each of about ``batch_bytes``.

        ``columns`` are fields named by the path of a column in the file, with the type that it
        will be brought to; a batch holds at least the top-level columns that they lie in, except
        where the file has none such. Nothing that lies wholly before the row is decoded.

        Raises:
            SourceChangedError: the file is not the known one.
        """


def _formats() -> tuple[Format, ...]:
    from . import ipc, jsonl, parquet

    formats: tuple[Any, ...] = (parquet, jsonl, ipc)
    return formats


def format_of(path: str) -> Format | None:
    """The format of a file by its name, None where no format claims it."""
    name = path.lower()
    return next((module for module in _formats() if name.endswith(module.SUFFIXES)), None)


def known_suffixes() -> str:
    """The suffixes that some format claims, for messages."""
    return ", ".join(suffix for module in _formats() for suffix in module.SUFFIXES)


@contextlib.contextmanager
def reading(path: str, form: str, *others: type[Exception]) -> Iterator[None]:
    """Name the file, and what it was read as, in what goes wrong; ``others`` are the form's own.

    Raises:
        SourceError: the file is missing or cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError, *others) as error:
        raise SourceError(f"{path}: cannot be read as {form}: {error}") from error


def changed(path: str, what: str, expected: object, found: object) -> SourceChangedError:
    """The error for a file that is not the planned one."""
    return SourceChangedError(
        f"{path}: has changed since it was planned: expected {what} {expected}, found {found}; "
        "plan again, or restore the file"
    )


def top_level(path: str, names: set[str]) -> str:
    """The top-level column that a path lies in: the path itself where a column has that name."""
    around = [stem for stem in stems(path) if stem in names]
    return around[-1] if around else path.split(".")[0]


def stems(path: str) -> list[str]:
    """What a dotted path may lie in, from its first part to itself."""
    parts = path.split(".")
    return [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
