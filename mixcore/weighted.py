"""Mixing by integer weights: offline as a row map, online as a batcher; both from one state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .allocation import Allocation, as_integer
from .mixture import RowMap, State

_ROWS_END = 2**60  # so that int64 holds sums of rows
_FIELDS = ("offsets", "remainder_carry")


@dataclass(frozen=True)
class WeightedMixture:
    """The batches of an allocation over datasets of known length.

    ``dataset_rows`` are the rows of each dataset in configured order. With ``repeat`` a dataset
    starts again after its last row: epoch = offset // rows, row = offset % rows. Without it,
    ``rows`` refuses to run past the end. Its states are checkpoints of ``DataBatcher``. Raises
    ValueError for an empty dataset, for numbers of rows that are not one a dataset, and for a
    dataset or a mixture of 2**60 rows or more.
    """

    allocation: Allocation
    dataset_rows: tuple[int, ...]
    num_batches: int
    repeat: bool

    def __post_init__(self) -> None:
        rows = tuple(_checked_rows(self.allocation, self.dataset_rows))
        object.__setattr__(self, "dataset_rows", rows)
        num_rows = as_integer("num_batches", self.num_batches, 0) * self.rows_per_batch
        for what, found in [*zip(self.names, rows, strict=True), ("the mixture", num_rows)]:
            if found >= _ROWS_END:
                raise ValueError(f"{what} must have fewer than 2**60 rows, found {found}")

    @property
    def names(self) -> tuple[str, ...]:
        """Dataset names in configured order."""
        return self.allocation.names

    @property
    def rows_per_batch(self) -> int:
        """The batch size."""
        return self.allocation.batch_size

    @property
    def state_kind(self) -> str:
        """The states are checkpoints of ``DataBatcher``."""
        return "weighted"

    def states(self, boundaries: Iterable[int]) -> Iterator[State]:
        """Checkpoints just before each of the ascending batch numbers, in one scan.

        Raises ValueError for a number that falls, is negative or lies past ``num_batches``.
        """
        return (
            _state(self.names, offsets, carry)
            for block in self.state_arrays(boundaries)
            for offsets, carry in zip(*(part.tolist() for part in block), strict=True)
        )

    def state_arrays(
        self, boundaries: Iterable[int], size: int = 1024
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Offsets and carries of ``states``, as ``Allocation.boundary_arrays`` gives them."""
        at = list(boundaries)
        arrays = self.allocation.boundary_arrays(at, size)
        if at and at[-1] > self.num_batches:
            raise ValueError(f"boundary {at[-1]} is past the mixture's {self.num_batches} batches")
        return arrays

    def rows(self, state: State, num_batches: int) -> RowMap:
        """The row map of the next ``num_batches`` batches from ``state``.

        Raises ValueError for a state that is no checkpoint, for more batches than the mixture
        has, for running past a dataset's rows without ``repeat``, and for 2**31 epochs with it.
        """
        if num_batches > self.num_batches:
            raise ValueError(f"the mixture has {self.num_batches} batches, asked for {num_batches}")
        offsets, carry = _parse_state(self.names, state)
        counts = self.allocation.count_vectors(num_batches, carry)
        totals = counts.sum(axis=0).tolist()
        for name, rows, offset, total in zip(
            self.names, self.dataset_rows, offsets, totals, strict=True
        ):
            if not self.repeat and offset + total > rows:
                raise ValueError(
                    f"dataset {name!r} has {rows} rows, expected at least {offset + total}:"
                    f" {num_batches} batches take {total} from row {offset} on"
                )
            if (offset + total) // rows >= 2**31:
                raise ValueError(
                    f"dataset {name!r} of {rows} rows would be in epoch"
                    f" {(offset + total) // rows}, expected one below 2**31"
                )
        # Epochs are below 2**31 but offsets may pass 2**63: keep whole epochs apart from them.
        whole, position = zip(*map(divmod, offsets, self.dataset_rows), strict=True)
        stop = np.cumsum(counts, axis=0) + np.array(position, np.int64)
        entry = np.flatnonzero(counts)
        batch, dataset = np.divmod(entry, len(self.names))
        count = counts.reshape(-1)[entry]
        length = np.array(self.dataset_rows, np.int64)[dataset]
        epoch, start = np.divmod(stop.reshape(-1)[entry] - count, length)
        if (start + count > length).any():  # what passes ends of epochs becomes an entry for each
            pieces = (start + count - 1) // length + 1
            first = np.repeat(np.cumsum(pieces) - pieces, pieces)
            piece = np.arange(len(first)) - first
            batch, dataset, start, count, epoch, length = (
                np.repeat(column, pieces)
                for column in (batch, dataset, start, count, epoch, length)
            )
            end = np.minimum(start + count, (piece + 1) * length)
            start = np.maximum(start, piece * length)
            count = end - start
            start -= piece * length
            epoch += piece
        return RowMap(
            batch=batch.astype(np.int64, copy=False),
            dataset=dataset.astype(np.int32),
            start=start,
            count=count,
            epoch=(epoch + np.array(whole, np.int64)[dataset]).astype(np.int32),
        )


def batches_filled(allocation: Allocation, dataset_rows: Sequence[int]) -> int:
    """The most batches that no dataset is too short for.

    The largest N with ``allocation.offsets(N)[i] <= dataset_rows[i]`` for every i.
    """
    beyond = [rows + 1 for rows in _checked_rows(allocation, dataset_rows)]
    found = allocation.first_reaching(beyond, limit=min(allocation.reached_by(beyond)))
    return min(n for n in found if n is not None)


def batches_until_seen(allocation: Allocation, dataset_rows: Sequence[int]) -> int:
    """The fewest batches after which every row of every dataset has been given.

    The smallest N with ``allocation.offsets(N)[i] >= dataset_rows[i]`` for every i.
    """
    found = allocation.first_reaching(_checked_rows(allocation, dataset_rows))
    return 1 + max(n for n in found if n is not None)


def first_unfillable(
    allocation: Allocation, dataset_rows: Sequence[int], num_batches: int
) -> list[int | None]:
    """The first of ``num_batches`` batches that each dataset is too short for, or None."""
    beyond = [rows + 1 for rows in _checked_rows(allocation, dataset_rows)]
    return allocation.first_reaching(beyond, limit=num_batches)


class Registry(Protocol):
    """What opens the datasets of a ``DataBatcher``."""

    def get_iterator(self, name: str, offset: int = 0) -> Iterator[Any]:
        """An iterator over a dataset's items, beginning at the item numbered ``offset``."""


class DatasetExhausted(RuntimeError):
    """A dataset ended inside a batch: it gave ``given`` of ``needed`` items from ``offset`` on."""

    def __init__(self, name: str, offset: int, needed: int, given: int) -> None:
        super().__init__(name, offset, needed, given)
        self.name = name
        self.offset = offset
        self.needed = needed
        self.given = given

    def __str__(self) -> str:
        return (
            f"dataset {self.name!r} is exhausted: the batch needs {self.needed} items from offset"
            f" {self.offset} on, the dataset gave {self.given}"
        )


class DataBatcher:
    """Batches of items mixed by integer weights, resumable exactly.

    ``batch_size`` items a batch, grouped by dataset in the order of ``weights``, in the numbers
    that ``Allocation`` gives. Nothing is opened before it is needed. Raises ValueError for the
    weights and batch sizes that ``Allocation`` refuses.
    """

    def __init__(self, registry: Registry, weights: dict[str, int], batch_size: int) -> None:
        self._registry = registry
        self._allocation = Allocation(weights, batch_size)
        self._offsets = self._carry = (0,) * len(weights)
        self._iterators: dict[str, Iterator[Any]] = {}

    def next_batch(self) -> list[Any]:
        """The items of the next batch: a list of exactly ``batch_size``.

        Raises DatasetExhausted where a dataset ends inside the batch. Then, as after any error
        of a dataset, the batcher stands before this batch still and no item is lost.
        """
        counts, carry = self._allocation.step(self._carry)
        batch: list[Any] = []
        try:
            for name, offset, count in zip(
                self._allocation.names, self._offsets, counts, strict=True
            ):
                if count == 0:
                    continue
                if name not in self._iterators:
                    self._iterators[name] = self._open(name, offset)
                before = len(batch)
                batch.extend(islice(self._iterators[name], count))
                if len(batch) - before < count:
                    raise DatasetExhausted(name, offset, count, len(batch) - before)
        except BaseException:
            # Items drawn for this batch are not given: the iterators are past the true offsets.
            _close(self._iterators)
            self._iterators = {}
            raise
        self._offsets = tuple(map(operator.add, self._offsets, counts))
        self._carry = carry
        return batch

    def state_dict(self) -> State:
        """A checkpoint: ``offsets`` and ``remainder_carry``, each an integer for every dataset."""
        return _state(self._allocation.names, self._offsets, self._carry)

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint of a batcher with the same ordered weights and batch size.

        Every dataset is opened at its offset. Raises ValueError for anything but exactly the two
        fields with an integer for every dataset, offsets not negative; then, and where a dataset
        cannot be opened, the batcher stays as it was.
        """
        names = self._allocation.names
        offsets, carry = _parse_state(names, state)
        opened: dict[str, Iterator[Any]] = {}
        try:
            for name, offset in zip(names, offsets, strict=True):
                opened[name] = self._open(name, offset)
        except BaseException:
            _close(opened)
            raise
        replaced, self._iterators = self._iterators, opened
        self._offsets, self._carry = offsets, carry
        _close(replaced)

    def _open(self, name: str, offset: int) -> Iterator[Any]:
        return iter(self._registry.get_iterator(name, offset=offset))


def _close(iterators: Mapping[str, Iterator[Any]]) -> None:
    for iterator in iterators.values():
        if hasattr(iterator, "close"):
            with suppress(Exception):  # nobody reads on, and a first error must not be hidden
                iterator.close()


def _state(names: Sequence[str], offsets: Sequence[int], carry: Sequence[int]) -> State:
    fields = (dict(zip(names, values, strict=True)) for values in (offsets, carry))
    return dict(zip(_FIELDS, fields, strict=True))


def _parse_state(names: Sequence[str], state: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and carries of a checkpoint in configured order."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a checkpoint must be a dict, found {type(state).__name__}")
    if set(state) != set(_FIELDS):
        raise ValueError(f"a checkpoint must have exactly the fields {_FIELDS}, found {[*state]}")
    for field in _FIELDS:
        if not isinstance(state[field], Mapping):
            raise ValueError(
                f"checkpoint field {field!r} must map every dataset to an integer,"
                f" found {type(state[field]).__name__}"
            )
        if set(state[field]) != set(names):
            missing = [name for name in names if name not in state[field]]
            unknown = [name for name in state[field] if name not in names]
            raise ValueError(
                f"checkpoint field {field!r} must name exactly the configured datasets;"
                f" missing: {missing}, unknown: {unknown}"
            )
    offsets, carry = (
        tuple(as_integer(f"{field}[{name!r}]", state[field][name], least) for name in names)
        for field, least in zip(_FIELDS, (0, None), strict=True)
    )
    return offsets, carry


def _checked_rows(allocation: Allocation, dataset_rows: Sequence[int]) -> list[int]:
    if len(dataset_rows) != len(allocation.names):
        raise ValueError(
            f"expected rows of {len(allocation.names)} datasets, found {len(dataset_rows)}"
        )
    return [
        as_integer(f"rows of dataset {name!r}", rows, 1)
        for name, rows in zip(allocation.names, dataset_rows, strict=True)
    ]
