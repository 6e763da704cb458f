"""Arrow types: made plain, enlarged, and the narrowest that holds two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pyarrow as pa

Missing = Literal["error", "null", "drop"]
"""What is done about a column, or a field of a struct, that some sources lack."""

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())
_UNITS = ("s", "ms", "us", "ns")
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
# Bits of a decimal, the most digits that it has, and what makes it.
_DECIMALS = (
    (32, 9, pa.decimal32),
    (64, 18, pa.decimal64),
    (128, 38, pa.decimal128),
    (256, 76, pa.decimal256),
)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list of any length, laid out by offsets."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_list_view(kind: pa.DataType) -> bool:
    """Whether it is a list of any length, laid out by offsets and sizes."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def plain(kind: pa.DataType) -> pa.DataType:
    """The type with dictionaries decoded, views made plain and field metadata dropped, throughout.

    Parquet bytes follow how a dictionary happens to be laid out, so no payload keeps one; and
    dates become days, as Parquet stores them.
    """
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_date64(kind):
        return pa.date32()
    return _rebuilt(kind, plain_field)


def plain_field(field: pa.Field) -> pa.Field:
    """The field with a plain type and no metadata."""
    return pa.field(field.name, plain(field.type), field.nullable)


def nullable(kind: pa.DataType) -> pa.DataType:
    """The plain type with nulls allowed throughout."""

    def field(inner: pa.Field) -> pa.Field:
        return pa.field(inner.name, nullable(inner.type))

    return _rebuilt(plain(kind), field)


def large(kind: pa.DataType) -> pa.DataType:
    """The plain type with 64-bit offsets throughout: one array of it may hold more than 2 GiB."""

    def field(inner: pa.Field) -> pa.Field:
        return inner.with_type(large(inner.type))

    kind = _rebuilt(kind, field)
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else _LARGE.get(kind, kind)


def _rebuilt(kind: pa.DataType, field: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """The type with its fields replaced; lists that are views become lists."""
    if pa.types.is_struct(kind):
        return pa.struct([field(inner) for inner in kind])
    if pa.types.is_map(kind):
        key = field(kind.key_field).with_nullable(False)
        return pa.map_(key, field(kind.item_field), kind.keys_sorted)
    if not pa.types.is_nested(kind) or not hasattr(kind, "value_field"):
        return kind
    # Writers disagree on "item" or "element"; Parquet's own word is kept for all.
    element = field(kind.value_field).with_name("element")
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(element, kind.list_size)
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(element)
    return pa.list_(element)


def widen(a: pa.DataType, b: pa.DataType, missing: Missing = "error") -> pa.DataType | None:
    """The narrowest type that holds every value of two plain types exactly, or None.

    Times of a finer unit hold those of a coarser one, as far as they reach; bringing a value there
    is an error where it lies beyond. ``missing`` is for fields that one of two structs lacks.
    """
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
    if _LARGE.get(a) == b or _LARGE.get(b) == a:
        return _LARGE.get(a, a)
    if pa.types.is_decimal(a) and pa.types.is_decimal(b):
        return _widen_decimals(a, b)
    for same in (pa.types.is_timestamp, pa.types.is_duration, pa.types.is_time):
        if same(a) and same(b):
            zones = getattr(a, "tz", None), getattr(b, "tz", None)
            finer = max(a, b, key=lambda kind: _UNITS.index(kind.unit))
            return finer if zones[0] == zones[1] else None
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return _widen_structs(a, b, missing)
    if pa.types.is_map(a) and pa.types.is_map(b):
        key, item = (
            widen(a.key_type, b.key_type, missing),
            widen_fields(a.item_field, b.item_field, missing),
        )
        ordered = a.keys_sorted and b.keys_sorted
        return None if key is None or item is None else pa.map_(key, item, ordered)
    if is_list(a) and is_list(b):
        element = widen_fields(a.value_field, b.value_field, missing)
        if element is None:
            return None
        wide = pa.types.is_large_list(a) or pa.types.is_large_list(b)
        return pa.large_list(element) if wide else pa.list_(element)
    if pa.types.is_fixed_size_list(a) and pa.types.is_fixed_size_list(b):
        element = widen_fields(a.value_field, b.value_field, missing)
        if element is not None and a.list_size == b.list_size:
            return pa.list_(element, a.list_size)
    return None


def widen_fields(a: pa.Field, b: pa.Field, missing: Missing = "error") -> pa.Field | None:
    """The same for two fields, of which either may allow nulls; the name is the first one's."""
    kind = widen(a.type, b.type, missing)
    return None if kind is None else pa.field(a.name, kind, a.nullable or b.nullable)


def _widen_decimals(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    scale = max(a.scale, b.scale)
    digits = max(a.precision - a.scale, b.precision - b.scale) + scale
    for bits, most, decimal in _DECIMALS:
        if bits >= max(a.bit_width, b.bit_width) and digits <= most:
            return decimal(digits, scale)
    return None


def _widen_structs(a: pa.StructType, b: pa.StructType, missing: Missing) -> pa.StructType | None:
    ours, theirs = ({field.name: field for field in kind} for kind in (a, b))
    if len(ours) < len(a) or len(theirs) < len(b):
        return None  # two fields of one name
    if missing == "error" and ours.keys() != theirs.keys():
        return None
    fields = [
        widen_fields(field, theirs[name], missing) if name in theirs else field.with_nullable(True)
        for name, field in ours.items()
        if name in theirs or missing == "null"
    ]
    if missing == "null":
        fields += [f.with_nullable(True) for name, f in theirs.items() if name not in ours]
    if any(field is None for field in fields) or (not fields and (ours or theirs)):
        return None
    return pa.struct(fields)
