"""Source formats: how a file is scanned, and how it is opened at a row.

A format is a module with ``SUFFIXES``, ``scan`` and ``read_from``; :func:`format_of` finds it by
the name of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyarrow import fs

from ..errors import MixError


class SourceError(MixError):
    """A source file cannot be read as what it claims to be."""


class SourceChangedError(SourceError):
    """A source file is no longer the one that was planned."""


@dataclass(frozen=True)
class FileScan:
    """What planning learns of one file.

    ``num_bytes`` is its size, ``column_bytes`` the stored size of each top-level column (an
    estimate where the format does not say), ``digest`` the hex sha256 that stands for its content.
    ``group_rows`` are the rows of each part that is decoded as one (a row group).
    """

    num_rows: int
    num_bytes: int
    digest: str
    schema: pa.Schema
    column_bytes: dict[str, int]
    group_rows: tuple[int, ...]


class Format(Protocol):
    """What the catalog and the cursors ask of a format's module."""

    SUFFIXES: tuple[str, ...]

    def scan(self, filesystem: fs.FileSystem, path: str) -> FileScan:
        """Read what planning needs: rows, schema, digest. Raises SourceError."""

    def read_from(
        self,
        filesystem: fs.FileSystem,
        path: str,
        digest: str,
        row: int,
        columns: Sequence[str],
        batch_bytes: int,
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of the named columns from a row on, each of about ``batch_bytes``.

        Reads nothing that lies wholly before the row. Raises SourceChangedError where the file is
        not the one with this digest.
        """


def format_of(path: str) -> Format | None:
    """The format of a file by its name, None where no format claims it."""
    from . import parquet

    module: Format
    for module in (parquet,):
        if path.lower().endswith(module.SUFFIXES):
            return module
    return None


def known_suffixes() -> str:
    """The suffixes that some format claims, for messages."""
    from . import parquet

    return ", ".join(parquet.SUFFIXES)
