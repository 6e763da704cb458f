"""Lists of differing length as one dense array, vectorised over any Arrow list array."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .errors import MixError


class PadError(MixError, ValueError):
    """Lists cannot be padded. ``row`` is the place of the list at fault, None where it is no one's.

    ``reason`` is the text without the row, for callers that number rows in another way.
    """

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason if row is None else f"row {row}: {reason}")
        self.reason = reason
        self.row = row


def pad_value(kind: pa.DataType, value: object) -> np.generic:
    """The value as a scalar of the dtype that lists of this Arrow type are padded in.

    It must be that dtype's exactly, but for floats in lists of floats: they are rounded to the
    lists' precision, as the lists' own values were. Booleans are no numbers.

    Raises:
        PadError: the type is no list of numbers or booleans, or the value does not fit.
    """
    dtype = _dtype(kind)
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, numbers.Real) and isinstance(number, bool) == (dtype.kind == "b"):
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            with np.errstate(over="ignore"):
                fitted: np.generic = dtype.type(number)
            # A finite float that became infinite was not rounded but lost.
            rounded = (
                dtype.kind == "f"
                and isinstance(number, float)
                and np.isinf(fitted) == math.isinf(number)
            )
            if rounded or fitted.item() == number:
                return fitted
    raise PadError(f"{value!r} ({type(value).__name__}) is no {dtype}, expected {_range(dtype)}")


def pad_lists(
    lists: pa.Array | pa.ChunkedArray, value: object
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Lists side by side in one dense array, filled up with ``value`` behind their ends.

    ``lists`` is an array (sliced and chunked ones too) of list, large_list or fixed_size_list over
    numbers or booleans, or over lists of these that all have one length, to any depth.

    Returns ``dense``, shape [lists, longest, inner..], in the values' dtype, writable and sharing
    no memory; and ``lengths``, int64 of shape [lists]. Without any list the longest is 0; so is an
    inner length that neither the type nor any inner list tells.

    Raises:
        PadError: as ``pad_value``, or a list, an inner list or a value is null, or inner lists
            differ in length; the row is named. A null list is refused since a length of 0 could
            not be told from that of an empty list.
    """
    fill = pad_value(lists.type, value)
    lists = one_array(lists)
    if lists.null_count:
        raise PadError("the list is null, expected a list", first_null(lists))
    lengths = _lengths(lists)
    longest = int(lengths.max(initial=0))
    if pa.types.is_fixed_size_list(lists.type):
        longest = lists.type.list_size
    inner: list[int] = []

    def row(place: int) -> int:
        """The list that holds a place of ``values``, at the depth reached."""
        return int(np.searchsorted(np.cumsum(lengths), place // math.prod(inner), "right"))

    values = lists.flatten()
    while is_list(values.type):
        if values.null_count:
            raise PadError("an inner list is null, expected a list", row(first_null(values)))
        sizes = _lengths(values)
        size = int(sizes[0]) if len(sizes) else 0
        if pa.types.is_fixed_size_list(values.type):
            size = values.type.list_size
        others = np.flatnonzero(sizes != size)
        if len(others):
            raise PadError(
                f"an inner list has length {sizes[others[0]]}, but those before it {size}; "
                "expected one length for all inner lists of a batch",
                row(int(others[0])),
            )
        inner.append(size)
        values = values.flatten()
    if values.null_count:
        raise PadError(f"a value is null, expected {fill.dtype}", row(first_null(values)))
    dense = np.full((len(lists), longest, *inner), fill)
    if dense.size:
        # An entry with all that lies in it is copied as one opaque piece: several times faster.
        piece = np.dtype((np.void, math.prod(inner) * dense.itemsize))
        held = np.arange(longest) < lengths[:, None]
        lines = dense.reshape(len(lists), -1).view(piece)
        lines[held] = values.to_numpy(zero_copy_only=False).view(piece)
    return dense, lengths


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array, without a copy where it has one chunk."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list that can be flattened: of any or of a fixed length, and no view."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    """What lists of this type hold at their depth. Raises PadError where these are no numbers."""
    held = kind
    while is_list(held):
        held = held.value_type
    number = pa.types.is_integer(held) or pa.types.is_floating(held) or pa.types.is_boolean(held)
    if held is kind or not number:
        raise PadError(f"{kind} cannot be padded, expected lists of numbers or booleans")
    dtype: np.dtype[Any] = pa.array([], held).to_numpy(zero_copy_only=False).dtype
    return dtype


def _range(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "b":
        return "True or False"
    if dtype.kind == "f":
        return f"a number up to {np.finfo(dtype).max:.6g}; integers exactly"
    return f"an integer from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = lists.value_lengths().to_numpy().astype(np.int64)
    return lengths


def first_null(array: pa.Array) -> int:
    """The place of the first null of an array that has one."""
    return int(array.is_null().index(True).as_py())
