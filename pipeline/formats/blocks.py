"""Parts of files that do not say where theirs lie: found once, read back by place and checksum."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from . import Block, Known, changed

BLOCK_BYTES = 4 << 20
"""A block ends at the first place where an item does, once it has this many bytes."""


def from_row(known: Known, row: int) -> Iterator[tuple[Block, int]]:
    """The blocks of a file from the one that holds a row on, and how many rows to skip in each."""
    for block, rows, stop in zip(
        known.blocks, known.group_rows, accumulate(known.group_rows), strict=True
    ):
        if rows and stop > row:
            yield block, max(0, row - (stop - rows))


def check(data: bytes | pa.Buffer, block: Block, path: str) -> None:
    """Hold a block's bytes against its size and checksum.

    Raises:
        SourceChangedError: they are others.
    """
    place = f"at byte {block.start:,}"
    if len(data) != block.size:
        raise changed(path, "a block of", f"{block.size:,} bytes {place}", f"{len(data):,}")
    if block.crc32 is not None and zlib.crc32(data) != block.crc32:
        raise changed(path, "a block", f"{place} with checksum {block.crc32:08x}", "other bytes")


def stored_bytes(sample: pa.Table, num_rows: int) -> dict[str, int]:
    """About what each column of a file takes in storage, from how a sample of it compresses."""
    if not sample.num_rows or not sample.num_columns:
        return {}
    sink = io.BytesIO()
    # Field by field, since one that Parquet cannot store is an error of the schema, not of here.
    result: dict[str, int] = {}
    for name in sample.schema.names:
        sink.seek(0)
        sink.truncate()
        column = sample.select([name])
        try:
            pq.write_table(column, sink, compression="zstd", compression_level=1)
        except pa.ArrowException:
            size = column.nbytes
        else:
            group = pq.read_metadata(sink).row_group(0)
            size = sum(
                group.column(leaf).total_compressed_size for leaf in range(group.num_columns)
            )
        result[name] = int(size * num_rows / sample.num_rows)
    return result
