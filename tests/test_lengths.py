"""Lengths of items, from one column of the sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.catalog import Catalog, DatasetSpec, scan_datasets
from pipeline.formats import SourceChangedError
from pipeline.lengths import LengthError, scan_lengths, too_long


def catalog(folder: Path, rows: tuple[int, int | None] = (0, None), **columns: Any) -> Catalog:
    """One dataset of two files, the second with the columns reversed."""
    data = pa.table(columns)
    pq.write_table(data, folder / "a.parquet", row_group_size=3)
    pq.write_table(data.take(np.arange(len(data))[::-1]), folder / "b.parquet")
    return scan_datasets([DatasetSpec("d", (str(folder),), rows)], str(folder))


VALUES: dict[str, Any] = {
    "whole numbers": (pa.array([3, 1, 2, 9], pa.uint8()), False),
    "lists": (pa.array([[1] * n for n in (3, 1, 2, 9)]), True),
    "large lists": (pa.array([[1] * n for n in (3, 1, 2, 9)], pa.large_list(pa.int8())), True),
    "characters of text": (pa.array(["é" * n for n in (3, 1, 2, 9)]), True),
    "words of a dictionary": (
        pa.array(["é" * n for n in (3, 1, 2, 9)]).dictionary_encode(),
        True,
    ),
    "bytes": (pa.array([b"x" * n for n in (3, 1, 2, 9)]), True),
}


@pytest.mark.parametrize("kind", VALUES)
def test_lengths_follow_the_order_of_items(kind: str, tmp_path: Path) -> None:
    values, of = VALUES[kind]
    found = scan_lengths(catalog(tmp_path, x=values, other=range(4)), "x", of)
    assert found.dtype == np.int64
    assert found.tolist() == [3, 1, 2, 9, 9, 2, 1, 3]


def test_rows_that_are_held_out_have_no_length(tmp_path: Path) -> None:
    found = catalog(tmp_path, (2, 7), x=[3, 1, 2, 9])
    assert scan_lengths(found, "x").tolist() == [2, 9, 9, 2, 1]
    assert scan_lengths(catalog(tmp_path, (5, 6), x=[3, 1, 2, 9]), "x").tolist() == [2]


def test_the_name_is_that_of_the_shards(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [4, 5]}), tmp_path / "a.parquet")
    spec = DatasetSpec("d", (str(tmp_path),), columns={"frames": "n"})
    found = scan_datasets([spec], str(tmp_path))
    assert scan_lengths(found, "frames").tolist() == [4, 5]


@pytest.mark.parametrize(
    ("values", "of", "message"),
    [
        ([1.0], False, r"length_column: column 'x' is of type double, expected whole numbers; "),
        (["a"], False, r"length_column: column 'x' is of type string, expected whole numbers; "),
        ([1], True, r"length_of: column 'x' is of type int64, expected lists, strings or binary"),
        ([1, None, None], False, r"a\.parquet: 'x' is null in 2 row\(s\), first row 1; every item"),
        ([[1], [], [2]], True, r"a\.parquet: 1 item\(s\) are shorter than 1, first row 1 with len"),
        ([4, -2], False, r"first row 1 with length -2 by 'x'; leave them out of the sources"),
    ],
)
def test_what_is_no_length_is_told(
    values: list[Any], of: bool, message: str, tmp_path: Path
) -> None:
    found = catalog(tmp_path, x=values)
    with pytest.raises(LengthError, match=message):
        scan_lengths(found, "x", of)


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    found = catalog(tmp_path, x=[1], y=[2])
    with pytest.raises(LengthError, match="length_column: no column 'z'; the datasets have x, y"):
        scan_lengths(found, "z")


def test_a_file_that_changed_since_it_was_scanned_is_told(tmp_path: Path) -> None:
    found = catalog(tmp_path, x=[1, 2])
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "b.parquet")
    with pytest.raises(SourceChangedError, match=r"dataset 'd': .*b\.parquet: has changed"):
        scan_lengths(found, "x")


def test_items_past_the_budget_are_told_by_dataset_row_and_length(tmp_path: Path) -> None:
    found = catalog(tmp_path, x=[3, 1, 2, 9])
    assert too_long(found, np.array([3, 1, 2, 9, 9, 2, 1, 3]), 9) == []
    assert too_long(found, np.array([3, 1, 2, 9, 8, 2, 1, 3]), 2) == [
        "dataset 'd': 4 of 8 item(s) are longer than frame_budget 2: row 0 with 3, row 3 with 9, "
        "row 4 with 8, row 7 with 3"
    ]
