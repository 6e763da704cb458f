"""Parquet as a source."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from . import FileScan, Known, ReadOptions, SourceError, changed, reading, stems

SUFFIXES: tuple[str, ...] = (".parquet", ".pq")

# A default reader holds as much as a row group; with a small buffer it holds a few pages.
_BUFFER_BYTES = 64 << 10
# A file's end is read in one go, as far as its footer is likely to reach.
_TAIL_BYTES = 64 << 10
# A store's requests are slow: from there so many decoded batches' worth of bytes come at a time.
_FETCH_BATCHES = 4
_MAX_BATCH_ROWS = 8192


def _footer(file: pa.NativeFile, path: str) -> tuple[pq.FileMetaData, str]:
    """The footer, and the sha256 of it and the size: what rows, pages and statistics hang on.

    Raises:
        SourceError: the file does not end as a Parquet file does.
    """
    size = file.size()
    tail = file.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if size < 12 or bytes(tail[-4:]) != b"PAR1":
        found = "is empty" if size == 0 else f"ends with {bytes(tail[-4:])!r} after {size} bytes"
        raise SourceError(
            f"{path}: expected a Parquet file (its last bytes are b'PAR1'), but it {found}; "
            "it may be truncated or another format"
        )
    length = int.from_bytes(tail[-8:-4], "little")
    if length > size - 12:
        raise SourceError(f"{path}: footer claims {length} bytes in a file of {size}; truncated?")
    if length > len(tail) - 8:
        tail = file.read_at(length + 8, size - 8 - length)
    digest = hashlib.sha256(tail[-8 - length : -8] + size.to_bytes(8, "little")).hexdigest()
    return pq.read_metadata(pa.BufferReader(tail)), digest


@contextlib.contextmanager
def _opened(
    filesystem: fs.FileSystem, path: str
) -> Iterator[tuple[pa.NativeFile, pq.FileMetaData, str]]:
    """The open file, its footer and its digest."""
    with reading(path, "Parquet"), filesystem.open_input_file(path) as file:
        yield file, *_footer(file, path)


def _decoder(
    filesystem: fs.FileSystem, file: pa.NativeFile, metadata: pq.FileMetaData, batch_bytes: int
) -> pq.ParquetFile:
    """What decodes an open file."""
    buffer_bytes, whole = _fetch(metadata, filesystem.type_name == "local", batch_bytes)
    return pq.ParquetFile(
        file,
        metadata=metadata,
        buffer_size=buffer_bytes,
        pre_buffer=whole,
        page_checksum_verification=True,
    )


def _fetch(metadata: pq.FileMetaData, local: bool, batch_bytes: int) -> tuple[int, bool]:
    """How many bytes of a column are read at a time, or whether row groups are read as a whole."""
    if local:
        return _BUFFER_BYTES, False
    bound = _FETCH_BATCHES * batch_bytes
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    whole = max((group.total_byte_size for group in groups), default=0) <= bound
    return max(_BUFFER_BYTES, bound // max(1, metadata.num_columns)), whole


def _columns(group: pq.RowGroupMetaData) -> Iterator[pq.ColumnChunkMetaData]:
    """The leaf columns of a row group."""
    return map(group.column, range(group.num_columns))


def opens_anywhere(path: str) -> bool:
    """Always."""
    return True


def scan(filesystem: fs.FileSystem, path: str, options: ReadOptions) -> FileScan:
    """Rows, schema and stored column sizes, all from the footer.

    Raises:
        SourceError: the file is missing, truncated or no Parquet.
    """
    with _opened(filesystem, path) as (file, metadata, digest):
        column_bytes: dict[str, int] = {}
        # One row group stands for all: walking every one of a wide file costs more than it tells.
        if metadata.num_row_groups:
            group = metadata.row_group(0)
            scale = metadata.num_rows / max(1, group.num_rows)
            for column in _columns(group):
                column_bytes[column.path_in_schema] = int(column.total_compressed_size * scale)
        return FileScan(
            num_rows=metadata.num_rows,
            num_bytes=file.size(),
            digest=digest,
            schema=metadata.schema.to_arrow_schema().remove_metadata(),
            column_bytes=column_bytes,
            group_rows=tuple(
                metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)
            ),
        )


def read_from(
    filesystem: fs.FileSystem,
    path: str,
    known: Known,
    row: int,
    columns: pa.Schema,
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on; row groups that lie wholly before it are not read.

    Raises:
        SourceChangedError: the footer or the size is not what the digest was taken of.
        SourceError: the file cannot be read or a page is damaged.
    """
    with _opened(filesystem, path) as (file, metadata, found):
        if found != known.digest:
            raise changed(path, "digest", f"{known.digest[:16]}..", f"{found[:16]}..")
        parquet = _decoder(filesystem, file, metadata, batch_bytes)
        yield from _rows_from(parquet, row, columns, batch_bytes)


def read_staged(
    filesystem: fs.FileSystem, path: str, row: int, columns: pa.Schema, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on of a file of ours, whose name stands for what is in it.

    Raises:
        SourceError: the file cannot be read or a page is damaged.
    """
    with _opened(filesystem, path) as (file, metadata, _):
        parquet = _decoder(filesystem, file, metadata, batch_bytes)
        yield from _rows_from(parquet, row, columns, batch_bytes)


def _rows_from(
    parquet: pq.ParquetFile, row: int, columns: pa.Schema, batch_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Record batches of an open file from a row on, as :func:`read_from`."""
    metadata = parquet.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    stops = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
    first = int(np.searchsorted(stops, row, side="right"))
    if first == len(groups):
        return
    skip = row - int(stops[first] - groups[first].num_rows)
    row_bytes = max(g.total_byte_size / max(1, g.num_rows) for g in groups[first:])
    asked = set(columns.names)
    sizes = [
        (not asked.isdisjoint(stems(column.path_in_schema)), column.total_uncompressed_size)
        for column in _columns(groups[first])
    ]
    row_bytes *= sum(size for taken, size in sizes if taken) / max(1, sum(s for _, s in sizes))
    for group in range(first, len(groups)):
        # A group at a time: Arrow cannot join nested dictionaries of two of them.
        batches = parquet.iter_batches(
            batch_size=int(min(_MAX_BATCH_ROWS, max(1, batch_bytes / max(1.0, row_bytes)))),
            row_groups=[group],
            columns=list(dict.fromkeys(columns.names)),
            use_threads=False,
        )
        for batch in batches:
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield batch.slice(skip)
            skip = 0
