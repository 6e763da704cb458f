"""What a gather reads forward, each from one cursor: datasets, or the files of datasets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mixcore import FrameBudgetMixture, Mixture, ReservoirMixture, RowMap

from .catalog import Catalog, Dataset


@dataclass(frozen=True)
class Streams:
    """Sequences of items that a mixture takes time and again, and where its rows lie.

    ``catalog`` has each of them as a dataset, ``rows`` counts their items. The rows from
    ``begins[s]`` on, numbered over all datasets one after another, are stream s. At most ``active``
    are read at a time, None: all. Where not ``in_order``, rows are taken from anywhere in them.
    """

    catalog: Catalog
    rows: NDArray[np.int64]
    begins: NDArray[np.int64]
    dataset_begins: NDArray[np.int64]
    active: int | None
    in_order: bool

    @classmethod
    def of(cls, catalog: Catalog, mixture: Mixture) -> Streams:
        """The streams of a mixture: datasets, or in a reservoir each file with rows."""
        active = mixture.max_simultaneous if isinstance(mixture, ReservoirMixture) else None
        dataset_rows = np.array([dataset.num_rows for dataset in catalog.datasets], np.int64)
        if active is not None:
            files = tuple(file for dataset in catalog.datasets for file in _files(dataset))
            catalog = replace(catalog, datasets=files)
        rows = np.array([dataset.num_rows for dataset in catalog.datasets], np.int64)
        in_order = not isinstance(mixture, FrameBudgetMixture)
        return cls(catalog, rows, _begins(rows), _begins(dataset_rows), active, in_order)

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
        first, stop = dataset.taken(file)
        if first < stop:
            files = (replace(file, first_row=-first),)
            found.append(replace(dataset, files=files, num_rows=stop - first, rows=(first, stop)))
    return found
