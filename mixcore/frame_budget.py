"""Batches of items of similar length within a budget of frames: online, and as a mixture.

An epoch visits every item once. One generator, ``default_rng([seed, stream, epoch])``, draws a
permutation of the items and then one of the batches. In between the items are cut into pools,
each pool is sorted by length (ties keep the drawn order) and packed greedily: a batch is closed
where one more item would make ``items * longest`` pass the budget, or ``items`` pass the cap.
"""

from __future__ import annotations

import hashlib
import json
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .allocation import as_integer, checked_boundaries
from .mixture import RowMap, State

_INT32_END, _INT64_END = 2**31, 2**63
_BLOCK_ITEMS = 2**17  # packed at once where pools are smaller: temporaries stay in cache
_DIGEST_ITEMS = 2**20  # lengths hashed at once
_WINDOW = 2**16  # positions whose batch starts are found at once
_STEPS = 2**11  # in plain Python, of a window: more of them are left to doubled jumps
_PLACE = ("epoch", "batch_index")
_NOTHING = np.empty(0, np.int64)


class BudgetError(ValueError):
    """An item is longer than the frame budget: it would have to be split or dropped."""


@dataclass(frozen=True)
class SamplerPosition:
    """A place in the sequence of epochs: the next batch is ``batch_index`` of ``epoch``."""

    epoch: int = 0
    batch_index: int = 0


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Every batch of one epoch, flat.

    ``items`` are the item indices as they were packed. The items of batch b, as the epoch gives
    them, are ``items[starts[p]:starts[p + 1]]`` with ``p = order[b]``. ``starts`` has one entry
    more than there are batches. Three read-only arrays of int32, or int64 from 2**31 items on.
    """

    epoch: int
    items: NDArray[np.integer[Any]]
    starts: NDArray[np.integer[Any]]
    order: NDArray[np.integer[Any]]

    def __post_init__(self) -> None:
        for column in (self.items, self.starts, self.order):
            column.setflags(write=False)

    @property
    def num_batches(self) -> int:
        """How many batches the epoch has."""
        return len(self.order)

    def batch(self, index: int) -> NDArray[np.integer[Any]]:
        """The item indices of one batch, a view. IndexError for a batch that there is not."""
        if index < 0:
            raise IndexError(f"batch {index} of epoch {self.epoch}: expected at least 0")
        packed = self.order[index]
        items: NDArray[np.integer[Any]] = self.items[self.starts[packed] : self.starts[packed + 1]]
        return items

    def sizes(self, first: int, stop: int) -> NDArray[np.int64]:
        """How many items each of the batches ``first`` to ``stop - 1`` holds.

        IndexError for batches that there are not.
        """
        if not 0 <= first <= stop <= self.num_batches:
            raise IndexError(
                f"batches {first} to {stop} of epoch {self.epoch}, which has {self.num_batches}"
            )
        packed = self.order[first:stop]
        sizes: NDArray[np.int64] = (self.starts[packed + 1] - self.starts[packed]).astype(np.int64)
        return sizes

    def batches(self, first: int, stop: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
        """Batches ``first`` to ``stop - 1``: the items of all, one after another, and ``sizes``.

        IndexError for batches that there are not.
        """
        sizes = self.sizes(first, stop)
        ends = np.cumsum(sizes)
        place = np.arange(ends[-1] if len(ends) else 0)
        place += np.repeat(self.starts[self.order[first:stop]] - (ends - sizes), sizes)
        return self.items[place], sizes


class FrameBudgetSampler:
    """The batches of every epoch over items of known length, deterministic and resumable.

    ``lengths`` are the frames of every item in dataset order, integers of at least 1 and below
    2**63; an array of any integer dtype is taken without a copy and must not be changed any
    more. ``frame_budget`` bounds a batch's longest item times its items, ``max_items`` (None: no
    bound) its items. ``pool_size`` items are sorted together: more make lengths alike, fewer are
    more random. ``stream`` keeps apart draws that share a seed, say of training and evaluation.

    ``seed``, ``stream`` and ``epoch`` should stay below 2**32: NumPy spells larger numbers as
    several words, so that seed 2**32 of stream 0 draws what seed 0 of stream 1 draws.

    The plan of the epoch asked for last is kept: 4 bytes an item and 8 a batch below 2**31 items.
    Threads may share a sampler. Samplers of equal lengths and parameters are equal.

    Raises ValueError for no lengths, a length or parameter that is no integer of its range (a
    bool or float is none), and BudgetError for an item longer than ``frame_budget``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.integer[Any]],
        *,
        frame_budget: int,
        seed: int,
        pool_size: int,
        max_items: int | None = None,
        stream: int = 0,
    ) -> None:
        self.frame_budget = as_integer("frame_budget", frame_budget, 1)
        self.seed = as_integer("seed", seed, 0)
        self.pool_size = as_integer("pool_size", pool_size, 1)
        self.max_items = None if max_items is None else as_integer("max_items", max_items, 1)
        self.stream = as_integer("stream", stream, 0)
        self._lengths = _checked_lengths(lengths, self.frame_budget)
        self._longest = int(self._lengths.max())
        self._lock = threading.Lock()
        self._plan: EpochPlan | None = None
        self._counts: dict[int, int] = {}  # batches of every epoch that was planned

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self._parameters.items())
        return f"FrameBudgetSampler(<{self.num_items} lengths>, {parameters})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FrameBudgetSampler)
            and self._parameters == other._parameters
            and np.array_equal(self._lengths, other._lengths)
        )

    def __hash__(self) -> int:
        return hash((self.num_items, *self._parameters.values()))

    def __getstate__(self) -> dict[str, Any]:  # workers plan for themselves
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_plan")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _plan=None)

    @property
    def num_items(self) -> int:
        """How many items an epoch visits."""
        return len(self._lengths)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of all parameters and lengths, in hex; the dtype of the lengths is no matter."""
        header = json.dumps({"num_items": self.num_items, **self._parameters}, sort_keys=True)
        digest = hashlib.sha256(header.encode())
        for first in range(0, self.num_items, _DIGEST_ITEMS):
            block = self._lengths[first : first + _DIGEST_ITEMS]
            digest.update(block.astype("<i8").tobytes())
        return digest.hexdigest()

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch as item indices, each item once; the lists are the caller's.

        Built anew at each call: ask ``plan`` for some batches of many.
        """
        plan = self.plan(epoch)
        items, sizes = plan.batches(0, plan.num_batches)
        indices = items.tolist()
        return [indices[a:b] for a, b in pairwise(accumulate(sizes.tolist(), initial=0))]

    def num_batches(self, epoch: int) -> int:
        """How many batches an epoch has; it is planned where it never was."""
        epoch = as_integer("epoch", epoch, 0)
        if epoch not in self._counts:
            self.plan(epoch)
        return self._counts[epoch]

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; of threads that ask at once one plans and the others wait.

        A negative epoch is a ValueError.
        """
        epoch = as_integer("epoch", epoch, 0)
        with self._lock:
            if self._plan is None or self._plan.epoch != epoch:
                self._plan = None  # never two plans in memory
                self._plan = self._planned(epoch)
                self._counts[epoch] = self._plan.num_batches
            return self._plan

    def padding(self, epoch: int) -> float:
        """The part of an epoch's padded frames, ``items * longest`` a batch, that no item fills."""
        plan = self.plan(epoch)
        lengths = self._lengths[plan.items]
        first = plan.starts[:-1]
        # Floats, since the sum of products may pass 63 bits.
        longest = np.maximum.reduceat(lengths, first).astype(np.float64)
        padded = float((longest * np.diff(plan.starts)).sum())
        return 1.0 - float(lengths.sum(dtype=np.float64)) / padded

    # Inside.

    @property
    def _parameters(self) -> dict[str, int | None]:
        names = ("frame_budget", "seed", "pool_size", "max_items", "stream")
        return {name: getattr(self, name) for name in names}

    def _planned(self, epoch: int) -> EpochPlan:
        rng = np.random.default_rng([self.seed, self.stream, epoch])
        drawn = np.arange(self.num_items)  # int64 is what NumPy shuffles fastest
        rng.shuffle(drawn)  # the draws of rng.permutation
        items = drawn.astype(np.int32 if self.num_items < _INT32_END else np.int64, copy=False)
        del drawn
        starts = np.empty(self.num_items + 1, items.dtype)  # memory is taken where it is written
        count = 0
        for first, ends in self._packed(items):
            found = _orbit(ends)
            np.add(found, first, out=starts[count : count + len(found)], casting="same_kind")
            count += len(found)
        starts[count] = self.num_items
        starts.resize(count + 1, refcheck=False)
        order = np.arange(count, dtype=items.dtype)
        rng.shuffle(order)
        return EpochPlan(epoch, items, starts, order)

    def _packed(self, items: NDArray[np.integer[Any]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Sort the pools in place, a block at a time: (first item, where batches would end)."""
        pool = min(self.pool_size, self.num_items)
        whole = self.num_items // pool * pool
        step = max(1, _BLOCK_ITEMS // pool) * pool
        for first in range(0, whole, step):
            block = items[first : min(first + step, whole)]
            yield first, self._batch_ends(block.reshape(-1, pool))
        if whole < self.num_items:
            yield whole, self._batch_ends(items[whole:].reshape(1, -1))

    def _batch_ends(self, pools: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Sort each row by length, in place; where a batch begun at each position would end.

        With ``C[j]`` the most items of a batch whose longest is j, j can join one begun at s
        exactly where ``s >= D[j] = j + 1 - C[j]``. D rises, so the end is ``#{j : D[j] <= s}``.
        """
        count, width = pools.shape
        lengths = self._sorted_lengths(pools)
        most = width if self.max_items is None else min(width, self.max_items)
        # No batch can pass longest * most, so a larger budget is the same; it may pass int64.
        budget = min(self.frame_budget, self._longest * most)
        if budget < _INT64_END:
            bounds = np.floor_divide(budget, lengths, out=lengths)
        else:
            exact = np.minimum(budget // lengths.astype(object), most)
            bounds = exact.astype(np.int64)
        np.minimum(bounds, most, out=bounds)
        joins = np.subtract(np.arange(1, width + 1), bounds, out=bounds)
        np.maximum(joins, 0, out=joins)  # a batch begins in its own pool
        joins += np.arange(0, count * width, width)[:, None]
        ends = np.bincount(joins.reshape(-1), minlength=count * width)
        return np.cumsum(ends, out=ends)

    def _sorted_lengths(self, pools: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Sort each row by length, in place and stable; the lengths in that order, a new array."""
        count, width = pools.shape
        lengths = self._lengths.take(pools)
        bits = (width - 1).bit_length()
        key_bits = self._longest.bit_length() + bits
        if key_bits > 63:
            places = np.argsort(lengths, axis=1, kind="stable")
            lengths = np.take_along_axis(lengths, places, axis=1)
        else:  # unique keys, length then place, need no stable sort; small ones sort faster
            keys = lengths.astype(np.uint32 if key_bits <= 32 else np.int64, copy=False)
            keys <<= keys.dtype.type(bits)
            keys |= np.arange(width, dtype=keys.dtype)
            keys.sort(axis=1)
            places = (keys & keys.dtype.type((1 << bits) - 1)).astype(np.int64, copy=False)
            keys >>= keys.dtype.type(bits)
            lengths = keys
        places += np.arange(0, count * width, width)[:, None]
        pools[:] = pools.take(places)
        return lengths.astype(np.int64, copy=False)


class BatchStream:
    """Batches without end, epoch after epoch, resumable at any of them.

    ``position`` may be None: batch 0 of epoch 0.
    """

    def __init__(
        self, sampler: FrameBudgetSampler, position: SamplerPosition | None = None
    ) -> None:
        self._sampler = sampler
        self._epoch = self._batch_index = 0
        if position is not None:
            self.set_position(position)

    @property
    def position(self) -> SamplerPosition:
        """Where the stream is; after an epoch's last batch at the end of that epoch."""
        return SamplerPosition(self._epoch, self._batch_index)

    def set_position(self, position: SamplerPosition) -> None:
        """Jump to a position. ValueError for a batch past the end of the epoch."""
        self._epoch, self._batch_index = _checked_place(
            self._sampler, position.epoch, position.batch_index
        )

    def next_batch(self) -> list[int]:
        """The item indices of the next batch; after an epoch's last comes the next epoch."""
        epoch, index = self._place()
        batch: list[int] = self._sampler.plan(epoch).batch(index).tolist()
        self._epoch, self._batch_index = epoch, index + 1
        return batch

    def state_dict(self) -> State:
        """A checkpoint: ``epoch``, ``batch_index`` and the sampler's ``fingerprint``.

        A place has one name: the end of an epoch is batch 0 of the next.
        """
        return {**_state(*self._place()), "fingerprint": self._sampler.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint of a stream, or from a boundary state of its mixture.

        ``fingerprint`` may be missing, as in a boundary state; where it is there it must be the
        sampler's. The end of an epoch may be named as such or as the beginning of the next.
        Raises ValueError for other fields, for values that are no integers of their range and
        for a checkpoint of another plan; then the stream stays where it was.
        """
        self._epoch, self._batch_index = _parse_state(self._sampler, state)

    def _place(self) -> tuple[int, int]:
        """Epoch and index of the next batch."""
        # An epoch has a batch, so that its beginning is told without a plan.
        if self._batch_index and self._batch_index == self._sampler.num_batches(self._epoch):
            return self._epoch + 1, 0
        return self._epoch, self._batch_index


@dataclass(frozen=True)
class FrameBudgetMixture:
    """The batches of a sampler over the rows of several datasets, as a mixture.

    The sampler's items are the rows of all datasets, one dataset after another as in ``names``,
    ``dataset_rows`` of each; with ``kept`` only those of these ascending places, an integer array.
    Its states are checkpoints of ``BatchStream``; epochs are the sampler's. Raises ValueError for
    names that are no distinct strings, for an empty dataset, for rows that are not one number a
    dataset or do not add up to the sampler's items, and for ``kept`` that is not a place an item.
    """

    sampler: FrameBudgetSampler
    names: tuple[str, ...]
    dataset_rows: tuple[int, ...]
    num_batches: int
    kept: NDArray[np.integer[Any]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        names, rows = tuple(self.names), tuple(self.dataset_rows)
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"a dataset name must be a string, found {name!r}")
        if len(set(names)) < len(names):
            raise ValueError(f"dataset names must differ, found {names}")
        if len(rows) != len(names):
            raise ValueError(f"expected rows of {len(names)} datasets, found {len(rows)}")
        rows = tuple(
            as_integer(f"rows of dataset {name!r}", count, 1)
            for name, count in zip(names, rows, strict=True)
        )
        kept, items = self.kept, self.sampler.num_items
        if kept is None and sum(rows) != items:
            raise ValueError(f"the datasets have {sum(rows)} rows, the sampler {items} items")
        if kept is not None and (
            len(kept) != items
            or not 0 <= kept[0] <= kept[-1] < sum(rows)
            or (kept[1:] <= kept[:-1]).any()
        ):
            raise ValueError(
                f"kept must be {items} ascending places below {sum(rows)}, one an item,"
                f" found {len(kept)} from {kept[:1]} to {kept[-1:]}"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dataset_rows", rows)
        object.__setattr__(self, "num_batches", as_integer("num_batches", self.num_batches, 0))

    @property
    def rows_per_batch(self) -> None:
        """Batches differ."""
        return None

    @property
    def state_kind(self) -> str:
        """The states are checkpoints of ``BatchStream``."""
        return "frame_budget"

    def states(self, boundaries: Iterable[int]) -> Iterator[State]:
        """Checkpoints just before each of the ascending batch numbers, in one scan of epochs.

        Raises ValueError for a number that falls, is negative or lies past ``num_batches``.
        """
        at = checked_boundaries(boundaries, self.num_batches)
        return (_state(*place) for place in _places(self.sampler, at))

    def rows(self, state: State, num_batches: int) -> RowMap:
        """The row map of the next ``num_batches`` batches from ``state``: an entry an item.

        Raises ValueError for a state that is no checkpoint of the sampler, for more batches than
        the mixture has, and for 2**31 epochs.
        """
        items: list[NDArray[Any]] = [_NOTHING]
        sizes = [_NOTHING]
        epochs, counts = [], []
        for epoch, first, stop in self._spans(state, num_batches):
            some, their_sizes = self.sampler.plan(epoch).batches(first, stop)
            items.append(some)
            sizes.append(their_sizes)
            epochs.append(epoch)
            counts.append(len(some))
        item = np.concatenate(items)
        if self.kept is not None:
            item = self.kept[item]
        rows = np.array(self.dataset_rows, np.int64)
        ends = np.cumsum(rows)
        dataset = np.searchsorted(ends, item, side="right")
        return RowMap(
            batch=np.repeat(np.arange(num_batches), np.concatenate(sizes)),
            dataset=dataset.astype(np.int32),
            start=item - (ends - rows)[dataset],
            count=np.ones(len(item), np.int64),
            epoch=np.repeat(np.array(epochs, np.int32), counts),
        )

    def sizes(self, state: State, num_batches: int) -> NDArray[np.int64]:
        """How many rows each of the next ``num_batches`` batches from ``state`` holds.

        Raises ValueError where ``rows`` does.
        """
        sizes = [_NOTHING]
        for epoch, first, stop in self._spans(state, num_batches):
            sizes.append(self.sampler.plan(epoch).sizes(first, stop))
        return np.concatenate(sizes)

    def padding(self) -> float:
        """The part of the first epoch's padded frames that no item fills."""
        return self.sampler.padding(0)

    def _spans(self, state: State, num_batches: int) -> Iterator[tuple[int, int, int]]:
        """The next batches as (epoch, first batch, batch after the last), an epoch each."""
        left = as_integer("num_batches", num_batches, 0)
        if left > self.num_batches:
            raise ValueError(f"the mixture has {self.num_batches} batches, asked for {left}")
        epoch, first = _parse_state(self.sampler, state)
        while left:
            if epoch >= _INT32_END:
                raise ValueError(f"epochs must stay below 2**31, found {epoch}")
            stop = min(first + left, self.sampler.num_batches(epoch))
            if first < stop:
                yield epoch, first, stop
            left -= stop - first
            epoch, first = epoch + 1, 0


def batches_in_epochs(sampler: FrameBudgetSampler, epochs: int) -> int:
    """How many batches the first ``epochs`` epochs have together; each is planned once."""
    return sum(map(sampler.num_batches, range(as_integer("epochs", epochs, 0))))


def position_of_batch(sampler: FrameBudgetSampler, number: int) -> SamplerPosition:
    """The position of a batch that is numbered from 0 over all epochs."""
    (place,) = _places(sampler, [as_integer("batch number", number, 0)])
    return SamplerPosition(*place)


# Checkpoints.


def _state(epoch: int, batch_index: int) -> State:
    return {"epoch": epoch, "batch_index": batch_index}


def _parse_state(sampler: FrameBudgetSampler, state: State) -> tuple[int, int]:
    """Epoch and batch index, or a ValueError that says what is wrong."""
    if not isinstance(state, dict):
        raise ValueError(f"a checkpoint must be a dict, found {type(state).__name__}")
    if {*state} - {"fingerprint"} != {*_PLACE}:
        raise ValueError(
            f"a checkpoint must have the fields {_PLACE}, and may have 'fingerprint' beside"
            f" them, found {[*state]}"
        )
    epoch, batch_index = (as_integer(name, state[name], 0) for name in _PLACE)
    if "fingerprint" in state and state["fingerprint"] != sampler.fingerprint:
        raise ValueError(
            f"the checkpoint is of another plan: expected fingerprint {sampler.fingerprint!r},"
            f" found {state['fingerprint']!r}; some length or parameter is not that of {sampler!r}"
        )
    return _checked_place(sampler, epoch, batch_index)


def _checked_place(sampler: FrameBudgetSampler, epoch: int, batch_index: int) -> tuple[int, int]:
    epoch, batch_index = as_integer("epoch", epoch, 0), as_integer("batch_index", batch_index)
    count = sampler.num_batches(epoch)
    if not 0 <= batch_index <= count:
        raise ValueError(f"batch_index {batch_index} outside 0..{count} for epoch {epoch}")
    return epoch, batch_index


def _places(sampler: FrameBudgetSampler, at: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Epoch and batch index of ascending batch numbers."""
    epoch = first = 0
    for n in at:
        # An epoch has a batch, so that its beginning is told without a plan.
        while n > first and n - first >= sampler.num_batches(epoch):
            first += sampler.num_batches(epoch)
            epoch += 1
        yield epoch, n - first


# Planning.


def _checked_lengths(lengths: Any, frame_budget: int) -> NDArray[np.integer[Any]]:
    """Lengths as an array of integers from 1 to the budget, without a copy where they are one."""
    if hasattr(lengths, "__array__"):
        array = np.asarray(lengths)
        if array.ndim != 1:
            raise ValueError(f"lengths must have one dimension, found shape {array.shape}")
        if array.dtype.kind == "O":
            array = _integers(array.tolist())
        elif array.dtype.kind not in "iu" and array.size:
            _refuse_length(0, array[0])
    else:
        array = _integers(lengths)
    if not array.size:
        raise ValueError("cannot sample from an empty dataset")
    if array.min() < 1:
        first = int(np.argmax(array < 1))
        _refuse_length(first, array[first])
    longest = int(array.max())
    if longest > frame_budget:
        over = np.flatnonzero(array > frame_budget)
        raise BudgetError(
            f"{len(over)} item(s) exceed frame_budget={frame_budget}; "
            f"first: item {over[0]} with {array[over[0]]} frames"
        )
    if longest >= _INT64_END:
        raise ValueError(f"every length must be below 2**63, found {longest}")
    return array


def _integers(values: Sequence[Any]) -> NDArray[Any]:
    """An int64 array; where a value does not fit, one of Python's integers."""
    try:
        if {bool, np.bool_} & {*map(type, values)}:
            raise TypeError("a bool is no integer")
        return np.fromiter(map(operator.index, values), np.int64, len(values))
    except OverflowError:
        return np.array([*map(operator.index, values)], object)
    except TypeError:
        for index, value in enumerate(values):
            try:
                as_integer("length", value)
            except ValueError:
                _refuse_length(index, value)
        raise


def _refuse_length(index: int, value: object) -> NoReturn:
    raise ValueError(
        f"length of item {index} must be an integer of at least 1,"
        f" found {value} of type {type(value).__name__}"
    ) from None


def _orbit(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, following[0], following[following[0]], .. below the length; every step leads forward."""
    found = []
    first = 0
    while first < len(following):
        jump = following[first : first + _WINDOW] - first
        end = len(jump)
        steps = end * end // (int(jump.sum()) - end * (end - 1) // 2)  # if all jumps were average
        jump = np.append(np.minimum(jump, end), end)  # the window's end leads to itself
        jumps = [jump]
        while steps > _STEPS:
            jumps.append(jumps[-1].take(jumps[-1]))
            steps //= 2
        far = jumps.pop().data
        at, places = 0, []
        while at < end:
            places.append(at)
            at = far[at]
        passed = np.array(places)
        for jump in reversed(jumps):  # puts in, behind each, the one that half a jump leads to
            passed = np.stack([passed, jump[passed]], axis=1).reshape(-1)
        passed = passed[passed < end] + first
        found.append(passed)
        first = int(following[passed[-1]])
    return np.concatenate(found)
