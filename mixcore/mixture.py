"""What the pipeline knows of a mixture: boundary states, and which item stands in which row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

State = dict[str, Any]
"""All that is needed to go on from a boundary: JSON-able, and the online twin's checkpoint."""


@dataclass(frozen=True)
class RowMap:
    """Which item stands in which row of consecutive batches, run-length encoded in row order.

    Entry j says: the next ``count[j]`` rows belong to batch ``batch[j]`` (numbered from 0 at the
    state the map begins at) and are the items ``start[j], start[j] + 1, ..`` of dataset
    ``dataset[j]`` (an index into the configured order), in that dataset's epoch ``epoch[j]``.
    Five arrays of one length; every count is at least 1.
    """

    batch: NDArray[np.int64]
    dataset: NDArray[np.int32]
    start: NDArray[np.int64]
    count: NDArray[np.int64]
    epoch: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """How many rows the map describes."""
        return int(self.count.sum())

    def between(self, start: int, stop: int) -> RowMap:
        """The part of the batches from ``start`` to below ``stop``, numbered as they were."""
        part = slice(*np.searchsorted(self.batch, (start, stop)))
        return RowMap(
            self.batch[part],
            self.dataset[part],
            self.start[part],
            self.count[part],
            self.epoch[part],
        )


class Mixture(Protocol):
    """A deterministic sequence of batches that is known in full before any item is read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Dataset names in configured order."""

    @property
    def num_batches(self) -> int:
        """Length of the mixture in batches."""

    @property
    def rows_per_batch(self) -> int | None:
        """Rows in every batch, or None where batches differ."""

    @property
    def state_kind(self) -> str:
        """Which online class a state restores."""

    def states(self, boundaries: Iterable[int]) -> Iterator[State]:
        """States just before each of the ascending batch numbers, in one scan."""

    def rows(self, state: State, num_batches: int) -> RowMap:
        """The row map of the next ``num_batches`` batches; work begins at the state, never at 0."""
