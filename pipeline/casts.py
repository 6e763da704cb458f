"""Arrays brought to another type, exactly or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .arrow_types import is_list, is_list_view, plain


def why_not(found: pa.DataType, kind: pa.DataType) -> str | None:
    """Why no value of a type, save null, can be brought to another; None where some may."""
    found = plain(found)
    if found == kind or pa.types.is_null(found):
        return None
    if pa.types.is_struct(found) and pa.types.is_struct(kind):
        theirs = {field.name: field.type for field in found}
        inner = [(theirs[field.name], field.type) for field in kind if field.name in theirs]
        if not inner:
            return f"it has no field of {kind}"
        return next((why for pair in inner if (why := why_not(*pair))), None)
    if pa.types.is_map(found) and pa.types.is_map(kind):
        return why_not(found.key_type, kind.key_type) or why_not(found.item_type, kind.item_type)
    if _is_any_list(found) and _is_any_list(kind):
        sizes = {k.list_size for k in (found, kind) if pa.types.is_fixed_size_list(k)}
        if len(sizes) > 1:
            return "the lists differ in size"
        return why_not(found.value_type, kind.value_type)
    if pa.types.is_nested(found) or pa.types.is_nested(kind):
        return f"{found} is nothing like {kind}"
    if pa.types.is_timestamp(found) and pa.types.is_time(kind):
        return "the date would be lost"
    try:
        cast(pa.nulls(1, found), kind)
    except pa.ArrowException as error:
        return str(error)
    return None


def unknown_fields(path: str, kind: pa.DataType, found: Sequence[pa.DataType]) -> list[str]:
    """Paths of what a type has at a path, itself or inside of structs, and none of some types."""
    if not found:
        return [path]
    if any(map(pa.types.is_null, found)):
        return []
    if pa.types.is_struct(kind):
        structs = [other for other in found if pa.types.is_struct(other)]
        return [
            unknown
            for field in kind
            for unknown in unknown_fields(
                f"{path}.{field.name}",
                field.type,
                [s.field(field.name).type for s in structs if s.get_field_index(field.name) >= 0],
            )
        ]
    if _is_any_list(kind):
        lists = [other.value_type for other in found if _is_any_list(other)]
        return unknown_fields(path, kind.value_type, lists or found)
    return []


def cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as a plain type. Fields of structs go by name; those that are lacking are null.

    Floating point is rounded to what the type has, but not to infinity; nothing else changes.

    Raises:
        pa.ArrowException: a value does not fit, or the types have nothing in common.
    """
    # pyarrow's own cast gives broken arrays where nulls lie inside of lists and structs, and loses
    # values of list views, so what is nested is taken apart here.
    if pa.types.is_dictionary(array.type):
        # Below a null, an index may point into a dictionary that has no words at all.
        words = len(array.dictionary)
        array = array.dictionary_decode() if words else pa.nulls(len(array), array.type.value_type)
    # Equal types may still differ in how they name a list's elements.
    if array.type.equals(kind, check_metadata=True):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if len(array) == 0:
        return pa.array([], kind)
    found = array.type
    if pa.types.is_struct(found) and pa.types.is_struct(kind):
        # What lies below a null may be anything; flatten makes it null too.
        theirs = dict(zip((field.name for field in found), array.flatten(), strict=True))
        children = [
            cast(theirs[field.name], field.type)
            if field.name in theirs
            else pa.nulls(len(array), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=_mask(array))
    if pa.types.is_map(found) and pa.types.is_map(kind):
        starts, first, stop = _starts(array)
        keys = cast(array.keys.slice(first, stop - first), kind.key_type)
        items = cast(array.items.slice(first, stop - first), kind.item_type)
        starts = pa.array(starts, pa.int32())
        return pa.MapArray.from_arrays(starts, keys, items, type=kind, mask=_mask(array))
    if _is_any_list(found) and _is_any_list(kind):
        return _cast_list(array, kind)
    return _cast_flat(array, kind)


def _is_any_list(kind: pa.DataType) -> bool:
    return is_list(kind) or is_list_view(kind) or bool(pa.types.is_fixed_size_list(kind))


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _starts(array: pa.Array) -> tuple[NDArray[np.integer[Any]], int, int]:
    """Where each list starts, counted from 0, and which of the values below are of these lists."""
    offsets = array.offsets.to_numpy()
    return offsets - offsets[0], int(offsets[0]), int(offsets[-1])


def _cast_list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return _cast_fixed(array, kind)
    if is_list(array.type) and not array.null_count:
        starts, first, stop = _starts(array)
        values = array.values.slice(first, stop - first)
    else:
        counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        values = array.flatten()
    wide = pa.types.is_large_list(kind)
    list_array = pa.LargeListArray if wide else pa.ListArray
    return list_array.from_arrays(
        pa.array(starts, pa.int64() if wide else pa.int32()),
        cast(values, kind.value_type),
        type=kind,
        mask=_mask(array),
    )


def _cast_fixed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    size = kind.list_size
    counts = pc.list_value_length(array)
    wrong = pc.not_equal(counts, size)
    if pc.any(wrong).as_py():
        found = counts.filter(wrong)[0]
        raise pa.ArrowInvalid(f"a list of {found} values is none of {size}")
    if pa.types.is_fixed_size_list(array.type) and not array.null_count:
        values = array.values.slice(array.offset * size, len(array) * size)
    else:
        # Below a null list there are as many values as below any other.
        valid = np.repeat(array.is_valid().to_numpy(zero_copy_only=False), size)
        values = array.flatten().take(pa.array(np.cumsum(valid) - 1, mask=~valid))
    values = cast(values, kind.value_type)
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=_mask(array))


def _cast_flat(array: pa.Array, kind: pa.DataType) -> pa.Array:
    found, result = array.type, pc.cast(array, kind)
    lost = None
    if pa.types.is_floating(kind) and (pa.types.is_floating(found) or pa.types.is_decimal(found)):
        # Arrow lets what is too large become infinite.
        lost = pc.is_inf(result)
        if pa.types.is_floating(found):
            lost = pc.and_(lost, pc.is_finite(array))
    elif (pa.types.is_boolean(kind) and pa.types.is_primitive(found)) or (
        pa.types.is_date(kind) and pa.types.is_timestamp(found)
    ):
        # It makes True of every number but 0, and a date of every time of a day.
        lost = pc.not_equal(pc.cast(result, found), array)
    if lost is not None and pc.any(lost).as_py():
        value = array.filter(lost)[0]
        raise pa.ArrowInvalid(f"{value} cannot be told in it")
    return result
