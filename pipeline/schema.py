"""One schema for all sources: safe widening only, and rows brought under it."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from .errors import MixError


class SchemaError(MixError):
    """Sources disagree about a column in a way that no safe widening settles."""


def plain(kind: pa.DataType) -> pa.DataType:
    """The type with dictionaries decoded, views made plain and field metadata dropped, throughout.

    Parquet bytes follow how a dictionary happens to be laid out, so no payload keeps one.
    """
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain(kind.key_type), _plain_field(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_element(kind), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_element(kind))
    if pa.types.is_list(kind):
        return pa.list_(_element(kind))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, plain(field.type), field.nullable)


def _element(kind: pa.DataType) -> pa.Field:
    # Writers disagree on "item" or "element"; Parquet's own word is kept for all.
    return pa.field("element", plain(kind.value_type), kind.value_field.nullable)


_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())


def widen(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds every value of two plain types exactly, or None."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    for family in (_SIGNED, _UNSIGNED, _FLOATS):
        if a in family and b in family:
            return max(a, b, key=family.index)
    signed, unsigned = (a, b) if a in _SIGNED else (b, a)
    if signed in _SIGNED and unsigned in _UNSIGNED[:3]:
        return _SIGNED[max(_SIGNED.index(signed), _UNSIGNED.index(unsigned) + 1)]
    for small, large in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if {a, b} == {small, large}:
            return large
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return _widen_struct(a, b)
    if _is_list(a) and _is_list(b):
        element = _widen_field(a.value_field, b.value_field)
        if element is None:
            return None
        large = pa.types.is_large_list(a) or pa.types.is_large_list(b)
        return pa.large_list(element) if large else pa.list_(element)
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        element = _widen_field(a.value_field, b.value_field)
        if element is not None and a.list_size == b.list_size:
            return pa.list_(element, a.list_size)
    return None


def _widen_field(a: pa.Field, b: pa.Field) -> pa.Field | None:
    kind = widen(a.type, b.type)
    return None if kind is None else pa.field(a.name, kind, a.nullable or b.nullable)


def _widen_struct(a: pa.StructType, b: pa.StructType) -> pa.StructType | None:
    names = {field.name for field in a}
    if names != {field.name for field in b} or not len(names) == len(a) == len(b):
        return None
    fields = [_widen_field(field, b.field(field.name)) for field in a]
    return None if any(field is None for field in fields) else pa.struct(fields)


def unify(sources: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """One schema for sources given as (description, schema), columns in the first one's order.

    Raises:
        SchemaError: a column is missing somewhere, or two types have no safe common one; it lists
            every such column with both types and both descriptions.
    """
    merged: dict[str, pa.Field] = {}
    origin: dict[str, str] = {}
    first = ""
    problems: dict[str, str] = {}
    for position, (description, schema) in enumerate(sources):
        if position == 0:
            first = description
        for name in merged:
            if schema.get_field_index(name) < 0:
                problems.setdefault(
                    name,
                    f"column {name!r} is {origin[name]}, but missing in {description}, "
                    f"which has {', '.join(schema.names) or 'no columns'}",
                )
        for field in map(_plain_field, schema):
            given = f"{field.type} in {description}"
            if field.name not in merged:
                if position == 0:
                    merged[field.name], origin[field.name] = field, given
                else:
                    problems.setdefault(
                        field.name, f"column {field.name!r} is {given}, but missing in {first}"
                    )
                continue
            both = _widen_field(merged[field.name], field)
            if both is None:
                problems.setdefault(
                    field.name, f"column {field.name!r} is {origin[field.name]}, but {given}"
                )
            else:
                if both.type != merged[field.name].type:
                    origin[field.name] = given
                merged[field.name] = both
    if problems:
        raise SchemaError(
            "the sources do not have one schema:\n  "
            + "\n  ".join(problems.values())
            + "\nChoose common columns with `columns`, or convert one side."
        )
    return pa.schema(list(merged.values()))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The values as a type that their own widens to.

    Lists and structs are taken apart here, since pyarrow's cast gives broken arrays where nulls
    lie inside of them.
    """
    if pa.types.is_dictionary(array.type):
        # Below a null, an index may point into a dictionary that has no words at all.
        words = len(array.dictionary)
        array = array.dictionary_decode() if words else pa.nulls(len(array), array.type.value_type)
    # Equal types may still differ in how they name a list's elements.
    if array.type.equals(kind, check_metadata=True):
        return array
    if len(array) == 0:
        return pa.array([], kind)
    found, mask = array.type, array.is_null() if array.null_count else None
    if pa.types.is_struct(found) and pa.types.is_struct(kind):
        children = [_cast(array.field(field.name), field.type) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_fixed_size_list(found) and pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = _cast(array.values.slice(array.offset * size, len(array) * size), kind.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    if _is_list(found) and _is_list(kind):
        large = pa.types.is_large_list(kind)
        offsets = array.offsets.to_numpy()
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        starts = pa.array(offsets - offsets[0], pa.int64() if large else pa.int32())
        list_array = pa.LargeListArray if large else pa.ListArray
        return list_array.from_arrays(starts, _cast(values, kind.value_type), type=kind, mask=mask)
    return pc.cast(array, kind)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def conform(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """The batch's columns, positionally, under a schema that its own widens to.

    Raises:
        SchemaError: a value does not fit, for instance a null in a column without nulls.
    """
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        try:
            column = _cast(column, field.type)
        except pa.ArrowException as error:
            raise SchemaError(
                f"{where}: column {field.name!r} of type {column.type} cannot be brought to "
                f"{field.type}: {error}"
            ) from error
        if column.null_count and not field.nullable:
            raise SchemaError(
                f"{where}: column {field.name!r} has {column.null_count} null(s), but its schema "
                "says that it has none; repair the file"
            )
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)
