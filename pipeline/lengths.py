"""How long every item is, from one column of the sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .catalog import Catalog, Dataset, SourceFile
from .errors import MixError
from .registry import read_file
from .storage import in_threads

_BATCH_BYTES = 8 << 20
_SHOWN = 5


class LengthError(MixError):
    """The sources do not say how long their items are."""


def scan_lengths(
    catalog: Catalog, column: str, of: bool = False, threads: int = 8
) -> NDArray[np.int64]:
    """Length of every item, dataset after dataset in configured order, an int64 array.

    The column holds whole numbers; or, with ``of``, what is to be measured: of a list the elements
    count, of binary the bytes, and of a string the characters. Nothing else is read.

    Raises:
        LengthError: there is no such column, it has no lengths, or some are null or below 1.
        SourceError: a file is gone, damaged, or not the planned one.
    """
    measure = _measure(catalog, column, of)
    alone = replace(catalog, schema=pa.schema([catalog.schema.field(column)]))
    jobs = [
        (dataset, file)
        for dataset in catalog.datasets
        for file in dataset.files
        if range(*dataset.taken(file))
    ]

    def read(job: tuple[Dataset, SourceFile]) -> NDArray[np.int64]:
        return _file_lengths(alone, *job, column, measure)

    return np.concatenate(in_threads(read, jobs, threads))


def _measure(catalog: Catalog, column: str, of: bool) -> Callable[[pa.Array], pa.Array]:
    """What makes lengths of the column's values."""
    key = "length_of" if of else "length_column"
    if column not in catalog.schema.names:
        raise LengthError(
            f"{key}: no column {column!r}; the datasets have {', '.join(catalog.schema.names)}"
        )
    kind = catalog.schema.field(column).type
    if not of:
        if pa.types.is_integer(kind):
            return lambda values: values
        raise LengthError(
            f"length_column: column {column!r} is of type {kind}, expected whole numbers; "
            "length_of takes the length of lists, strings and binary"
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return lambda values: pc.utf8_length(values)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return lambda values: pc.binary_length(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return lambda values: pc.list_value_length(values)
    raise LengthError(
        f"length_of: column {column!r} is of type {kind}, expected lists, strings or binary; "
        "length_column takes whole numbers as they are"
    )


def _file_lengths(
    catalog: Catalog,
    dataset: Dataset,
    file: SourceFile,
    column: str,
    measure: Callable[[pa.Array], pa.Array],
) -> NDArray[np.int64]:
    first, stop = dataset.taken(file)
    batches = read_file(catalog, dataset, file, first, stop, _BATCH_BYTES)
    lengths = pa.chunked_array(
        [measure(batch.column(0)).cast(pa.int64()) for batch in batches], pa.int64()
    )
    where = f"dataset {dataset.name!r}, {file.path}"
    if lengths.null_count:
        row = first + pc.index(lengths.is_null(), True).as_py()
        raise LengthError(
            f"{where}: {column!r} is null in {lengths.null_count} row(s), first row {row}; every "
            "item needs a length"
        )
    values: NDArray[np.int64] = lengths.to_numpy()
    short = np.flatnonzero(values < 1)
    if len(short):
        raise LengthError(
            f"{where}: {len(short)} item(s) are shorter than 1, first row {first + short[0]} with "
            f"length {values[short[0]]} by {column!r}; leave them out of the sources"
        )
    return values


def too_long(catalog: Catalog, lengths: NDArray[np.int64], budget: int) -> list[str]:
    """A line a dataset that has items longer than the budget: how many, which rows, how long."""
    found, first = [], 0
    for dataset in catalog.datasets:
        own = lengths[first : first + dataset.num_rows]
        first += dataset.num_rows
        rows = np.flatnonzero(own > budget)
        if len(rows):
            shown = ", ".join(f"row {row} with {own[row]}" for row in rows[:_SHOWN].tolist())
            more = ", .." if len(rows) > _SHOWN else ""
            found.append(
                f"dataset {dataset.name!r}: {len(rows)} of {dataset.num_rows} item(s) are longer "
                f"than frame_budget {budget}: {shown}{more}"
            )
    return found
