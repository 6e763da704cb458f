"""The page headers of a shard, which no checksum of Parquet covers.

A damaged one can change a page's values, or cut off the last of them, and yet be decoded. So they
are indexed when the shard is written, and held against that index when it is read.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from bisect import bisect_left
from collections.abc import Container, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import MixError

_PACKED, _CHECKSUM = 3, 4  # fields of a page header: bytes of the page that follows, and its crc32
_LAYOUT = struct.Struct("<IqII")
HEADER_BYTES = _LAYOUT.size
"""What a page header takes in an index."""

PageHeader = tuple[int, int, int, int]
"""Column chunk that a page belongs to, where its header begins, the header's bytes, their crc32.

Chunks are numbered from 0 through the file, row group after row group.
"""


class PageError(MixError):
    """A page header is not what it has to be."""


def index_pages(path: str) -> bytes:
    """The index of a Parquet file: all its page headers in file order, HEADER_BYTES for each.

    Raises:
        PageError: a column's pages have no checksums, or do not fill its place in the file.
    """
    footer = pq.read_metadata(path)
    width = footer.num_columns
    index = bytearray()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for chunk in range(footer.num_row_groups * width):
            column = footer.row_group(chunk // width).column(chunk % width)
            at = column.data_page_offset
            if column.has_dictionary_page:
                at = min(at, column.dictionary_page_offset)
            end = at + column.total_compressed_size
            try:
                while at < end:
                    fields, stop = _struct(data, at)
                    if _CHECKSUM not in fields:
                        raise ValueError(f"the page at byte {at} has no checksum")
                    index += _LAYOUT.pack(chunk, at, stop - at, zlib.crc32(data[at:stop]))
                    at = stop + fields[_PACKED]
                if at != end:
                    raise ValueError(f"its pages end at byte {at}, expected {end}")
            except (IndexError, KeyError, ValueError) as error:
                raise _damaged(column.path_in_schema, str(error)) from error
    return bytes(index)


def decode_index(index: bytes) -> list[PageHeader]:
    """The page headers of an index."""
    return list(_LAYOUT.iter_unpack(index))


def leaves_of(schema: pq.ParquetSchema, columns: Sequence[str] | None) -> Container[int]:
    """Numbers of the Parquet columns that make up some of a shard's (None: all)."""
    if columns is None:
        return range(len(schema))
    names = tuple(f"{name}." for name in columns)
    return {leaf for leaf in range(len(schema)) if f"{schema.column(leaf).path}.".startswith(names)}


def check_pages(
    file: pa.NativeFile,
    index: Sequence[PageHeader],
    schema: pq.ParquetSchema,
    group: int,
    leaves: Container[int],
) -> None:
    """Hold the page headers of some Parquet columns of a row group against the index of its file.

    Raises:
        PageError: one was changed; the text names its column.
    """
    first = group * len(schema)
    start, stop = (bisect_left(index, (at, 0, 0, 0)) for at in (first, first + len(schema)))
    for chunk, begin, length, crc32 in index[start:stop]:
        leaf = chunk - first
        if leaf in leaves and zlib.crc32(file.read_at(length, begin)) != crc32:
            reason = f"that at byte {begin} is not the one that was written"
            raise _damaged(schema.column(leaf).path, reason)


def _damaged(column: str, reason: str) -> PageError:
    return PageError(f"column {column!r}: its page headers are damaged: {reason}")


def _struct(data: mmap.mmap, at: int) -> tuple[dict[int, int], int]:
    """A struct of Thrift's compact protocol: its integers by field, and where it ends.

    What else a page header holds is passed over.
    """
    fields: dict[int, int] = {}
    number = 0
    while head := data[at]:
        number += head >> 4
        kind = head & 15
        at += 1
        if kind in (5, 6, 8):  # int32, int64, binary
            value = byte = data[at]
            at += 1
            shift = 0
            while byte > 127:
                byte = data[at]
                at += 1
                shift += 7
                value += (byte - 1) << shift  # takes back the bit that said that more follow
            if kind == 8:
                at += value
            else:
                fields[number] = value >> 1  # zigzag; none that counts here is below 0
        elif kind == 12:  # struct
            _, at = _struct(data, at)
        elif kind > 2:  # 1 is true, 2 is false
            raise ValueError(f"no field begins with byte {head:#x}")
    return fields, at + 1
