"""The page headers of a shard, held against its footer, since no checksum covers them.

A damaged header can change a page's values, or cut off the last of them, and yet be decoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_HEADER_BYTES = 256
_LONG_HEADER_BYTES = 64 << 10  # with the bounds of long texts in it
_DATA, _DICTIONARY = 0, 2
_CHECKSUM = 4  # the field's number
_RLE = 3
_ENCODINGS = {
    0: "PLAIN",
    2: "PLAIN_DICTIONARY",
    5: "DELTA_BINARY_PACKED",
    6: "DELTA_LENGTH_BYTE_ARRAY",
    7: "DELTA_BYTE_ARRAY",
    8: "RLE_DICTIONARY",
    9: "BYTE_STREAM_SPLIT",
}
# A header as it nearly always is, with bounds of four or eight bytes if any; others are read field
# by field, which takes ten times as long.
_NUMBER = rb"([\x80-\xff]{0,4}[\x00-\x7f])"
_BOUND = rb"(?:[\x18\x28\x38\x48\x58](?:\x04.{4}|\x08.{8}))"
_BOUNDS = (
    rb"(?:\x1c" + _BOUND + rb"{0,2}(?:[\x16\x26\x36][\x00-\x7f])?" + _BOUND + rb"{0,2}"
    rb"[\x11\x12]{0,2}\x00)?"
)
_USUAL = re.compile(
    rb"\x15[\x00\x04]\x15" + _NUMBER + rb"\x15" + _NUMBER + rb"\x15[\x80-\xff]{0,4}[\x00-\x7f]"
    rb"(?:\x1c\x15" + _NUMBER + rb"\x15([\x00-\x7f])\x15\x06\x15\x06" + _BOUNDS + rb"\x00|"
    rb"\x3c\x15[\x80-\xff]{0,4}[\x00-\x7f]\x15\x00\x12?\x00)\x00",
    re.DOTALL,
).match


class PageError(ValueError):
    """Page headers and footer do not agree."""


def check_pages(
    file: pa.NativeFile, footer: pq.FileMetaData, group: int, columns: Sequence[str] | None
) -> None:
    """Hold the page headers of a row group's columns (None: of all) against a footer that is whole.

    The pages of a column must fill its place in the file, and make up its size and values.

    Raises:
        PageError: they do not; the text names the column.
    """
    if group >= footer.num_row_groups:
        raise PageError(f"the shard has only {footer.num_row_groups} row groups")
    rows = footer.row_group(group)
    for index in range(rows.num_columns):
        column = rows.column(index)
        name = column.path_in_schema
        if columns is not None and not any(f"{name}.".startswith(f"{c}.") for c in columns):
            continue
        try:
            _check_column(file, column)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise PageError(f"column {name!r}: its page headers are damaged: {error}") from error


def _check_column(file: pa.NativeFile, column: pq.ColumnChunkMetaData) -> None:
    encodings = column.encodings
    begin = column.data_page_offset
    if column.has_dictionary_page:
        begin = min(begin, column.dictionary_page_offset)
    end = begin + column.total_compressed_size
    at, size, values = begin, 0, 0
    while at < end:
        header, length = _header(file, at, end)
        kind, unpacked, packed = header[1], header[2], header[3]
        if min(unpacked, packed) < 0 or _CHECKSUM not in header:
            raise ValueError(f"the page at byte {at} has no checksum, or a size below 0")
        if kind == _DATA:
            page = header[5]
            values += page[1]
            if _ENCODINGS.get(page[2]) not in encodings or not page[3] == page[4] == _RLE:
                raise ValueError(
                    f"the page at byte {at} is of an encoding that is not its column's"
                )
        elif kind != _DICTIONARY or at != begin:
            raise ValueError(f"a page of type {kind} stands at byte {at}")
        at += length + packed
        size += length + unpacked
    found = (at, size, values)
    expected = (end, column.total_uncompressed_size, column.num_values)
    if found != expected:
        raise ValueError(f"end, size and values are {found}, expected {expected}")


def _header(file: pa.NativeFile, at: int, end: int) -> tuple[dict[int, Any], int]:
    """Fields of the page header at a place, by number, and how many bytes it takes."""
    data = file.read_at(min(_HEADER_BYTES, end - at), at)
    usual = _USUAL(data)
    if usual is not None:
        unpacked, packed, values, encoding = usual.groups()
        kind = data[1] >> 1
        fields: dict[int, Any] = {1: kind, 2: _signed(unpacked), 3: _signed(packed), _CHECKSUM: 0}
        # A dictionary's header says nothing that is looked at, and a data page's must fit its kind.
        if kind == _DATA and values is not None:
            fields[5] = {1: _signed(values), 2: encoding[0] >> 1, 3: _RLE, 4: _RLE}
            return fields, usual.end()
        if kind == _DICTIONARY and values is None:
            return fields, usual.end()
    try:
        return _struct(data, 0)
    except IndexError:
        return _struct(file.read_at(min(_LONG_HEADER_BYTES, end - at), at), 0)


def _signed(text: bytes) -> int:
    value = 0
    for shift, byte in enumerate(text):
        value |= (byte & 127) << 7 * shift
    return value >> 1 ^ -(value & 1)


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol: fields by number, and where it ends.

    Of numbers it has the values; what else a page header may hold is passed over.
    """
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        if head < 16:
            raise ValueError(f"no field begins with byte {head:#x}")
        number += head >> 4
        kind = head & 15
        at += 1
        if kind == 5 or kind == 6:  # int32, int64
            value, at = _varint(data, at)
            fields[number] = value >> 1 ^ -(value & 1)
        elif kind == 12:  # struct
            fields[number], at = _struct(data, at)
        elif kind == 8:  # binary
            length, at = _varint(data, at)
            at += length
        elif kind > 2:  # 1 is true, 2 is false
            raise ValueError(f"no field is of type {kind}")
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    shift = 7
    while (byte := data[at := at + 1]) > 127:
        value |= (byte & 127) << shift
        shift += 7
    return value | byte << shift, at + 1
