"""Parquet as a source."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from . import FileScan, SourceChangedError, SourceError

SUFFIXES: tuple[str, ...] = (".parquet", ".pq")

# A default reader holds as much as a row group; with a small buffer it holds a few pages.
_BUFFER_BYTES = 64 << 10
_MAX_BATCH_ROWS = 8192


def _digest(file: pa.NativeFile, path: str) -> str:
    """Sha256 of the footer and the size: what a file's rows, pages and statistics hang on.

    Raises:
        SourceError: the file does not end as a Parquet file does.
    """
    size = file.size()
    tail = file.read_at(8, max(0, size - 8))
    if size < 12 or bytes(tail[4:]) != b"PAR1":
        found = "is empty" if size == 0 else f"ends with {bytes(tail[-4:])!r} after {size} bytes"
        raise SourceError(
            f"{path}: expected a Parquet file (its last bytes are b'PAR1'), but it {found}; "
            "it may be truncated or another format"
        )
    length = int.from_bytes(tail[:4], "little")
    if length > size - 12:
        raise SourceError(f"{path}: footer claims {length} bytes in a file of {size}; truncated?")
    footer = file.read_at(length, size - 8 - length)
    return hashlib.sha256(footer + size.to_bytes(8, "little")).hexdigest()


@contextlib.contextmanager
def _opened(filesystem: fs.FileSystem, path: str) -> Iterator[tuple[pq.ParquetFile, str, int]]:
    """The open file, its digest and its size in bytes."""
    try:
        with filesystem.open_input_file(path) as file:
            digest = _digest(file, path)
            parquet = pq.ParquetFile(
                file,
                buffer_size=_BUFFER_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            yield parquet, digest, file.size()
    except FileNotFoundError as error:
        raise SourceError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: cannot be read as Parquet: {error}") from error


def _columns(
    group: pq.RowGroupMetaData, schema: pa.Schema
) -> Iterator[tuple[str, pq.ColumnChunkMetaData]]:
    """The leaf columns of a row group, each with the name of its top-level column."""
    names = set(schema.names)
    for index in range(group.num_columns):
        column = group.column(index)
        path = column.path_in_schema
        yield path if path in names else path.split(".")[0], column


def scan(filesystem: fs.FileSystem, path: str) -> FileScan:
    """Rows, schema and stored column sizes, all from the footer.

    Raises:
        SourceError: the file is missing, truncated or no Parquet.
    """
    with _opened(filesystem, path) as (parquet, digest, size):
        metadata, schema = parquet.metadata, parquet.schema_arrow
        column_bytes: dict[str, int] = {}
        # One row group stands for all: walking every one of a wide file costs more than it tells.
        if metadata.num_row_groups:
            group = metadata.row_group(0)
            scale = metadata.num_rows / max(1, group.num_rows)
            for name, column in _columns(group, schema):
                stored = int(column.total_compressed_size * scale)
                column_bytes[name] = column_bytes.get(name, 0) + stored
        return FileScan(
            num_rows=metadata.num_rows,
            num_bytes=size,
            digest=digest,
            schema=schema.remove_metadata(),
            column_bytes=column_bytes,
            group_rows=tuple(
                metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)
            ),
        )


def read_from(
    filesystem: fs.FileSystem,
    path: str,
    digest: str,
    row: int,
    columns: Sequence[str],
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on; row groups that lie wholly before it are not read.

    Raises:
        SourceChangedError: the footer or the size is not what the digest was taken of.
        SourceError: the file cannot be read or a page is damaged.
    """
    with _opened(filesystem, path) as (parquet, found, _):
        if found != digest:
            raise SourceChangedError(
                f"{path}: has changed since it was planned: expected digest {digest[:16]}.., "
                f"found {found[:16]}..; plan again, or restore the file"
            )
        metadata = parquet.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        stops = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        first = int(np.searchsorted(stops, row, side="right"))
        if first == len(groups):
            return
        skip = row - int(stops[first] - groups[first].num_rows)
        row_bytes = max(g.total_byte_size / max(1, g.num_rows) for g in groups[first:])
        sizes = [
            (name in columns, column.total_uncompressed_size)
            for name, column in _columns(groups[first], parquet.schema_arrow)
        ]
        row_bytes *= sum(size for asked, size in sizes if asked) / max(1, sum(s for _, s in sizes))
        for group in range(first, len(groups)):
            # A group at a time: Arrow cannot join nested dictionaries of two of them.
            batches = parquet.iter_batches(
                batch_size=int(min(_MAX_BATCH_ROWS, max(1, batch_bytes / max(1.0, row_bytes)))),
                row_groups=[group],
                columns=list(dict.fromkeys(columns)),
                use_threads=False,
            )
            for batch in batches:
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                yield batch.slice(skip)
                skip = 0
