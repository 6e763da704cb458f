"""Columns of a batch as torch tensors, which share the memory of Arrow where they can."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from .errors import MixError
from .pad import first_null, is_list, one_array


class Ragged(NamedTuple):
    """Lists of differing length: list i is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` is int64 of shape [lists + 1] and begins at 0. ``values`` is a tensor, or for lists
    of such lists a Ragged itself.
    """

    values: Any
    offsets: torch.Tensor


class Padded(NamedTuple):
    """Lists side by side, filled up behind their ends.

    ``values`` has shape [lists, longest, inner..]; ``lengths``, int64 of shape [lists], says how
    much of each is no padding.
    """

    values: torch.Tensor
    lengths: torch.Tensor


class NullError(MixError, ValueError):
    """A tensor would have to hold a null. ``row`` is the place of the row that it lies in."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} is or holds a null")
        self.row = row


def as_tensors(column: pa.Array | pa.ChunkedArray) -> Any:
    """A column as what a trainer takes.

    Numbers and booleans become a tensor of shape [rows]; times, dates and durations one of the
    integers that Arrow keeps for them; lists of one fixed size [rows, size, ..]; binaries of a
    fixed width uint8 of [rows, width]; other lists of these a :class:`Ragged`; a struct a dict of
    its fields. Anything else (text, binaries, decimals, maps, ..) is a list of Python objects.

    Tensors share the column's memory, but for booleans. Writing into one writes into the column.

    Raises:
        NullError: a tensor would have to hold a null.
    """
    column = one_array(column)
    kind = column.type
    if pa.types.is_struct(kind):
        _no_null(column)
        fields = zip(kind, column.flatten(), strict=True)
        return {field.name: as_tensors(values) for field, values in fields}
    return _tensor(column) if _holds_numbers(kind) else column.to_pylist()


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    while is_list(kind):
        kind = kind.value_type
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_fixed_size_binary(kind)
        or _is_time(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) and not pa.types.is_interval(kind))


def _tensor(array: pa.Array) -> Any:
    kind, rows = array.type, len(array)
    _no_null(array)
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        try:
            values = _tensor(array.flatten())
        except NullError as error:
            raise NullError(error.row // size) from error
        if isinstance(values, Ragged):
            return Ragged(values, torch.arange(rows + 1) * size)
        return values.reshape(rows, size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = from_dlpack(array.offsets).long()
        offsets = offsets - offsets[0]
        try:
            values = _tensor(array.flatten())
        except NullError as error:
            row = int(torch.searchsorted(offsets, error.row, right=True)) - 1
            raise NullError(row) from error
        return Ragged(values, offsets)
    if pa.types.is_boolean(kind):
        return from_dlpack(array.cast(pa.uint8())).bool()
    if pa.types.is_fixed_size_binary(kind):
        width, data = kind.byte_width, array.buffers()[1]
        octets = pa.Array.from_buffers(
            pa.uint8(), rows * width, [None, data], offset=array.offset * width
        )
        return from_dlpack(octets).reshape(rows, width)
    if _is_time(kind):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return from_dlpack(array)


def _no_null(array: pa.Array) -> None:
    if array.null_count:
        raise NullError(first_null(array))
