"""One schema for all sources: safe widening only, and rows brought under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from .arrow_types import Missing, nullable, plain_field, widen_fields
from .casts import cast, unknown_fields, why_not
from .errors import MixError
from .shard import PROVENANCE


class SchemaError(MixError):
    """Sources disagree about a column, or do not have what is asked of them."""


class Source(NamedTuple):
    """Files of one schema: a dataset and one of its files, for messages, and the schema."""

    where: str
    schema: pa.Schema


def find(fields: Sequence[pa.Field] | pa.Schema, path: str) -> list[int] | None:
    """Where a path leads: the place of a column, then of fields inside of structs; None: nowhere.

    Its parts are joined by dots; a name that itself has dots goes before what lies inside others.
    What is of type null stands for all that could lie in it.
    """
    names = [field.name for field in fields]
    if path in names:
        return [names.index(path)]
    for place, field in enumerate(fields):
        if not path.startswith(f"{field.name}."):
            continue
        if pa.types.is_null(field.type):
            return [place]
        if pa.types.is_struct(field.type):
            inner = find(list(field.type), path[len(field.name) + 1 :])
            if inner is not None:
                return [place, *inner]
    return None


def _field_at(schema: pa.Schema, place: Sequence[int]) -> pa.Field:
    """The field at a place; it is null too where what it lies in is."""
    field = schema.field(place[0])
    for step in place[1:]:
        inner = field.type.field(step)
        field = inner.with_nullable(inner.nullable or field.nullable)
    return field


def _not_found(source: Source, ours: str, path: str) -> tuple[str, bool]:
    """What is said of a path that leads nowhere in a source, and whether it may elsewhere."""
    parts = path.split(".")
    said = f"{source.where}: no column {path!r} (asked for as {ours!r}); "
    for stop in range(len(parts) - 1, 0, -1):
        stem = ".".join(parts[:stop])
        place = find(source.schema, stem)
        if place is None:
            continue
        kind = _field_at(source.schema, place).type
        if not pa.types.is_struct(kind):
            return said + f"{stem!r} is {kind}, and a path leads into structs alone", False
        return said + f"{stem!r} has {_listed(field.name for field in kind)}", True
    return said + f"the file has {_listed(source.schema.names)}", True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns"


def taken(
    dataset: str,
    sources: Sequence[Source],
    columns: Mapping[str, str] | None,
    types: Mapping[str, pa.DataType] | None,
    missing: Missing = "error",
) -> list[Source]:
    """What a dataset takes of its files: the columns asked for, of the types they are given.

    ``columns`` maps our names to paths in the source, None takes all; ``types`` are given to
    top-level columns of the source. What only some files lack is left to :func:`unify`, unless
    ``missing`` is an error.

    Raises:
        SchemaError: a column is lacking, or cannot be given its type; it lists every one.
    """
    types = types or {}
    problems: list[str] = []
    result: list[Source] = []
    lacking: dict[str, list[str]] = {}
    for where, schema in sources:
        doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if doubled:
            raise SchemaError(f"{where}: more than one column is named {doubled[0]!r}")
        for name, kind in types.items():
            place = schema.get_field_index(name)
            if place < 0:
                continue
            reason = why_not(schema.field(place).type, nullable(kind))
            if reason is not None:
                problems.append(
                    f"{where}: column {name!r} of type {schema.field(place).type} can never be "
                    f"brought to {kind}, which `schema` gives it: {reason}"
                )
            schema = schema.set(place, schema.field(place).with_type(nullable(kind)))
        source = Source(where, schema)
        fields = list(schema) if columns is None else []
        for ours, path in (columns or {}).items():
            found = find(schema, path)
            if found is not None:
                fields.append(_field_at(schema, found).with_name(ours))
                continue
            said, may_lack = _not_found(source, ours, path)
            if may_lack:
                lacking.setdefault(ours, []).append(said)
            else:
                problems.append(said)
        result.append(Source(where, pa.schema(fields)))
    for name, kind in types.items():
        found_types = [s.field(name).type for _, s in sources if name in s.names]
        unknown = unknown_fields(name, kind, found_types)
        if unknown:
            have = dict.fromkeys(column for _, schema in sources for column in schema.names)
            problems.append(
                f"dataset {dataset!r}: `schema` gives a type to {_listed(map(repr, unknown))}, "
                f"but no file has it; the files have {_listed(have)}"
            )
    for each in lacking.values():
        if missing == "error" or len(each) == len(sources):
            problems.append(each[0])
    if problems:
        raise SchemaError("\n".join(problems))
    return result


def unify(sources: Iterable[tuple[str, pa.Schema]], missing: Missing = "error") -> pa.Schema:
    """One schema for sources given as (description, schema), columns as they first appear.

    What some sources lack is an error, null there, or dropped everywhere.

    Raises:
        SchemaError: a column is missing, two types have no safe common one, or a name is taken; it
            lists every such column with both types and both descriptions.
    """
    listed = [(where, {f.name: plain_field(f) for f in schema}) for where, schema in sources]
    merged: list[pa.Field] = []
    problems: list[str] = []
    lacked = False
    names = dict.fromkeys(name for _, fields in listed for name in fields)
    for name in names:
        have = [(where, fields[name]) for where, fields in listed if name in fields]
        lacking = next((source for source in listed if name not in source[1]), None)
        if lacking is not None and missing == "drop":
            continue
        if name in PROVENANCE.names:
            problems.append(
                f"column {name!r} in {have[0][0]} has a name that the shards use for where a row "
                f"comes from; give it another with `columns: {{my_{name}: {name}, ..}}`"
            )
        elif lacking is not None and missing == "error":
            lacked = True
            problems.append(
                f"column {name!r} is {have[0][1].type} in {have[0][0]}, but missing in "
                f"{lacking[0]}, which has {_listed(lacking[1])}"
            )
        else:
            field = _merged(have, missing, problems)
            merged.append(field if lacking is None else field.with_nullable(True))
    if names and not merged and not problems:
        problems.append(
            f"no column is in all of them: {listed[0][0]} has {_listed(listed[0][1])}; the first "
            "that lacks one is "
            + next(where for where, fields in listed if fields.keys() != names.keys())
        )
    if problems:
        way_out = "set missing_columns: null (null there) or drop (left out), " if lacked else ""
        raise SchemaError(
            "the sources do not have one schema:\n  "
            + "\n  ".join(problems)
            + f"\nChoose common columns with `columns`, {way_out}give a column of one side another "
            "type with `schema`, or convert one side."
        )
    return pa.schema(merged)


def _merged(
    have: Sequence[tuple[str, pa.Field]], missing: Missing, problems: list[str]
) -> pa.Field:
    """The common field of all that have one, or the first; what stands against it is noted."""
    origin, field = have[0]
    stated = field.type
    for where, other in have[1:]:
        if other == field:
            continue
        both = widen_fields(field, other, missing)
        if both is None:
            problems.append(
                f"column {field.name!r} is {stated} in {origin}, but {other.type} in {where}"
                + _hint(field.name, stated, other.type)
            )
            return field
        if both.type != field.type:
            origin, stated = where, other.type
        field = both
    return field


def _hint(name: str, a: pa.DataType, b: pa.DataType) -> str:
    """The type that `schema` could give to one side, where there is an obvious one."""
    pair = (a, b)
    kind = None
    if all(pa.types.is_integer(k) or pa.types.is_floating(k) for k in pair):
        kind = "float64" if any(map(pa.types.is_floating, pair)) else "int64"
    elif all(map(pa.types.is_timestamp, pair)):
        kind = str(a if a.tz else b)
    elif any(map(pa.types.is_string, pair)) and any(map(pa.types.is_primitive, pair)):
        kind = "string"
    if kind is None:
        return ""
    return f" (`schema: {{{name}: {kind}}}`, with the source's own name, gives one side that type)"


def conform(
    batch: pa.RecordBatch,
    columns: Sequence[str | None],
    schema: pa.Schema,
    where: str,
    types: Mapping[str, pa.DataType] | None = None,
    nested: bool = True,
) -> pa.RecordBatch:
    """A batch as it was read, under the common schema.

    ``columns`` are the paths in the batch of the schema's columns, names of columns alone unless
    ``nested``; what is None or not there is null. ``types`` are given to columns of the batch
    before they are brought to the schema's own.

    Raises:
        SchemaError: a value does not fit, for instance a null in a column without nulls.
    """
    arrays = []
    for path, field in zip(columns, schema, strict=True):
        place = None if path is None else _place(batch.schema, path, nested)
        if place is None:
            array = pa.nulls(batch.num_rows, field.type)
        else:
            array = batch.column(place[0])
            given = _given(batch.schema, place, types or {})
            if len(place) > 1:
                array = pc.struct_field(array, place[1:])
            if given is not None and not pa.types.is_null(array.type):
                array = _brought(array, given, f"{where}: column {field.name!r}")
            array = _brought(array, field.type, f"{where}: column {field.name!r}")
        if array.null_count and not field.nullable:
            raise SchemaError(
                f"{where}: column {field.name!r} has {array.null_count} null(s), but its schema "
                "says that it has none; repair the file"
            )
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _place(schema: pa.Schema, path: str, nested: bool) -> list[int] | None:
    column = schema.get_field_index(path)
    if column >= 0:
        return [column]
    return find(schema, path) if nested else None


def _given(
    schema: pa.Schema, place: Sequence[int], types: Mapping[str, pa.DataType]
) -> pa.DataType | None:
    """The type that is given to what stands at a place, from that of its top-level column."""
    field = schema.field(place[0])
    kind = types.get(field.name)
    if kind is None:
        return None
    for step in place[1:]:
        field = field.type.field(step)
        kind = kind.field(field.name).type
    return nullable(kind)


def _brought(array: pa.Array, kind: pa.DataType, what: str) -> pa.Array:
    try:
        return cast(array, kind)
    except pa.ArrowException as error:
        raise SchemaError(
            f"{what} of type {array.type} cannot be brought to {kind}: {error}"
        ) from error
