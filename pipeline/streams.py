"""What a gather reads forward, each from one cursor: datasets, or the files of datasets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mixcore import Mixture, ReservoirMixture, RowMap

from .catalog import Catalog, Dataset


@dataclass(frozen=True)
class Streams:
    """Sequences of items that a mixture takes in order, time and again, and where its rows lie.

    ``catalog`` has each of them as a dataset, ``rows`` counts their items. The rows from
    ``begins[s]`` on, numbered over all datasets one after another, are stream s. At most ``active``
    are read at a time, None: all.
    """

    catalog: Catalog
    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    dataset_begins: NDArray[np.int64]
    active: int | None = None

    @classmethod
    def of(cls, catalog: Catalog, mixture: Mixture) -> Streams:
        """What a mixture takes in order: datasets, or in a reservoir each file with rows."""
        active = mixture.max_simultaneous if isinstance(mixture, ReservoirMixture) else None
        dataset_rows = np.array([dataset.num_rows for dataset in catalog.datasets], np.int64)
        if active is not None:
            files = tuple(file for dataset in catalog.datasets for file in _files(dataset))
            catalog = replace(catalog, datasets=files)
        rows = np.array([dataset.num_rows for dataset in catalog.datasets], np.int64)
        return cls(catalog, rows, _begins(rows), _begins(dataset_rows), active)

    def locate(self, rows: RowMap) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Stream and offset of each entry of a row map; an offset counts epochs before it too."""
        place = self.dataset_begins[rows.dataset] + rows.start
        stream = np.searchsorted(self.begins, place, side="right") - 1
        return stream, rows.epoch * self.rows[stream] + place - self.begins[stream]


def _begins(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    begins: NDArray[np.int64] = np.cumsum(rows) - rows
    return begins


def _files(dataset: Dataset) -> list[Dataset]:
    """Each file of a dataset, as far as rows of it are taken, as a dataset of its own."""
    found = []
    for file in dataset.files:
        first = max(0, -file.first_row)
        rows = min(file.num_rows, dataset.num_rows - file.first_row) - first
        if rows > 0:
            found.append(
                replace(
                    dataset,
                    files=(replace(file, first_row=-first),),
                    num_rows=rows,
                    rows=(first, first + rows),
                )
            )
    return found
