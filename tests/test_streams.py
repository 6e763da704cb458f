"""What a gather reads forward: datasets, or in a reservoir the files of datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mixcore import Allocation, Mixture, ReservoirMixture, RowMap, WeightedMixture
from pipeline.catalog import Catalog, DatasetSpec, scan_datasets
from pipeline.registry import Cursors
from pipeline.streams import Streams

from .mixes import write_sources

FILES = {"a": [4, 0, 6], "b": [5]}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    paths = write_sources(tmp_path, **FILES)
    rows: dict[str, tuple[int, int | None]] = {"a": (1, 9), "b": (0, None)}
    specs = [DatasetSpec(name, (str(path),), rows[name]) for name, path in paths.items()]
    return scan_datasets(specs, str(tmp_path))


def weighted() -> Mixture:
    return WeightedMixture(Allocation({"a": 1, "b": 1}, 2), (8, 5), 3, repeat=True)


def reservoir() -> Mixture:
    return ReservoirMixture(
        ("a", "b"),
        np.array([0, 0, 0, 1], np.int32),
        np.array([0, 3, 3, 0]),
        np.array([3, 0, 5, 5]),
        max_simultaneous=2,
        seed=0,
        batch_size=2,
        num_batches=3,
    )


def row_map(*entries: tuple[int, int, int, int]) -> RowMap:
    """Entries of dataset, start, count and epoch."""
    dataset, start, count, epoch = np.array(entries).T
    return RowMap(np.zeros(len(entries), np.int64), dataset.astype(np.int32), start, count, epoch)


def test_datasets_are_the_streams_where_weights_decide(catalog: Catalog) -> None:
    streams = Streams.of(catalog, weighted())
    stream, offset = streams.locate(row_map((0, 7, 1, 2), (1, 0, 3, 1)))
    assert stream.tolist() == [0, 1]
    assert offset.tolist() == [2 * 8 + 7, 5]
    assert streams.active is None


def test_files_with_rows_are_the_streams_of_a_reservoir(catalog: Catalog) -> None:
    streams = Streams.of(catalog, reservoir())
    assert streams.rows.tolist() == [3, 5, 5]
    stream, offset = streams.locate(row_map((0, 2, 1, 0), (0, 3, 2, 4), (1, 4, 1, 1)))
    assert stream.tolist() == [0, 1, 2]
    assert offset.tolist() == [2, 4 * 5, 5 + 4]
    assert streams.active == 2


@pytest.mark.parametrize("mixture", [weighted, reservoir])
def test_a_streams_rows_are_those_of_its_place_in_the_dataset(
    mixture: Callable[[], Mixture], catalog: Catalog
) -> None:
    streams = Streams.of(catalog, mixture())
    cursors = Cursors(streams.catalog)
    for name, dataset, rows in (("a", 0, 8), ("b", 1, 5)):
        for row in range(rows):
            stream, offset = streams.locate(row_map((dataset, row, 1, 3)))
            found = pa.Table.from_batches(cursors.read(int(stream[0]), int(offset[0]), 1))
            first = 1 if name == "a" else 0
            assert found["text"][0].as_py().startswith(f"{name}:{first + row}:")
    cursors.close()
