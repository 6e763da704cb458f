"""Trainers: batches of a finished mix from any shard or batch, for rank r of R."""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .decoder import Decoder, Group
from .errors import ReaderError
from .manifest import Manifest
from .pad import PadError, pad_lists
from .shard import Layout
from .storage import Folder

Split = Literal["rows", "batches"]
Remainder = Literal["drop", "repeat"]


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch whose padded columns are dense arrays.

    ``table`` holds the other columns, and as many rows as there are items. ``dense`` maps each
    padded column to an array of shape [items, longest, inner..] in the column's dtype, writable
    and of its own memory; ``lengths`` to int64 of shape [items], how many entries of each item are
    not padding. The longest is that of this rank's items of this batch.
    """

    table: pa.Table
    dense: dict[str, NDArray[Any]]
    lengths: dict[str, NDArray[np.int64]]


@dataclass
class _Place:
    """The next batch of an iterator; it outlives the iterator, so that a reader can tell it."""

    next_batch: int


class ShardReader:
    """Random and sequential access to the batches of a finished mix.

    ``path`` is a mix's folder, as a path or a URI. ``len`` is the number of batches and
    ``reader[n]`` batch n as a Table. Opening reads the manifest alone; the first batch, wherever
    it lies, needs one row group.

    Raises:
        ManifestError: there is no finished mix, one of a newer format, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder.at(os.fspath(path))
        self.manifest = Manifest.load(self._folder)
        self.manifest.check_bytes_id(self._folder)
        self._decoder = Decoder(self._folder, self.manifest, None)
        self._last: tuple[tuple[int, int], Group] | None = None
        self._start = 0
        self._place = _Place(0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its path and a loaded state: a copy opens files of its own."""
        return _opened, (self._folder.uri, self._start)

    def __len__(self) -> int:
        return self.manifest.layout.num_batches

    @property
    def num_shards(self) -> int:
        """How many shards the mix has."""
        return self.manifest.layout.num_shards

    @property
    def schema(self) -> pa.Schema:
        """Columns of a batch: the payload's, then provenance."""
        return self._decoder.schema(0)

    def __getitem__(self, n: int) -> pa.Table:
        """Batch n, whole. The row group that it lies in is kept for the next call."""
        try:
            n = operator.index(n)
        except TypeError:
            raise TypeError(
                f"a batch has an integer as its number, found {n!r}; for several of them use "
                "batches(start_batch=..)"
            ) from None
        if not -len(self) <= n < len(self):
            raise IndexError(f"batch {n} is outside the mix of {len(self)} batches")
        n %= len(self)
        key = self._decoder.group_of(n)
        # One tuple, taken and set at once, so that threads may share a reader.
        last = self._last
        if last is None or last[0] != key:
            last = self._last = (key, self._decoder.decode(key))
        return last[1].batch(n)

    def batches(
        self,
        start_shard: int | None = None,
        start_batch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        split: Split | None = None,
        columns: Sequence[str] | None = None,
        uneven: bool = False,
        read_ahead: int = 2,
        remainder: Remainder = "drop",
        pad: Mapping[str, object] | None = None,
    ) -> Batches:
        """What rank ``rank`` of ``world_size`` trains on, batch after batch, to the end of the mix.

        Begins at a shard, at a batch, at a loaded state, or else at batch 0. Batches are Tables.

        ``split="rows"``: the rank takes rows r, r + R, .. of every batch, so that it sees nearly
        the mixture; R must divide the batch, or ``uneven=True`` gives some ranks one row more.
        ``split="batches"``: steps of ``batches_per_step`` batches (a key of the mix; R where it
        has none); of each step the rank takes batches r, r + R, .. whole, and R must divide it.
        The default is what the mix was laid out for: "batches" where it has ``batches_per_step``,
        or where batches differ in size and ``uneven`` is not asked for.

        Where whole batches do not make up a last step, ``remainder="drop"`` leaves that step out,
        and ``"repeat"`` fills it up from the mix's beginning (place n of the order holds batch n
        modulo the mix's length, told by its ``mix_batch``), so that every batch is seen. Either
        way all ranks make the same number of steps. Shares of rows have no remainder: there
        ``"repeat"`` is refused.

        ``columns`` projects; ``read_ahead`` row groups are decoded in advance on a thread.

        ``pad`` maps list columns to the value that fills up their lists: each batch is then a
        :class:`PaddedBatch`, not a Table. Columns are lists (of any Arrow kind but views) of
        numbers or booleans, or of lists of these that have one length within the batch. The value
        must fit the column's dtype exactly; in a column of floats a float is rounded to it.

        Raises:
            ReaderError: an argument is out of range, does not divide what it must, or names no
                column or no value of it. While iterating: a null, or inner lists of several
                lengths, in a padded column; the message names column, batch and row.
            ShardError: a shard is gone or damaged; with ``pad`` already at the call, which looks
                up the columns' types in the shard that it begins in.
        """
        if start_shard is not None and start_batch is not None:
            raise ReaderError("give start_shard or start_batch, not both")
        start = self._start if start_batch is None else start_batch
        if start_shard is not None:
            start_shard = _integer("start_shard", start_shard)
            if not 0 <= start_shard <= self.num_shards:
                raise ReaderError(
                    f"start_shard {start_shard} is outside 0..{self.num_shards}: the mix has "
                    f"{self.num_shards} shards"
                )
            start = min(start_shard * self.manifest.layout.batches_per_shard, len(self))
        batches = Batches(
            self._folder,
            self.manifest,
            start,
            rank,
            world_size,
            split,
            columns,
            uneven,
            read_ahead,
            remainder,
            pad,
        )
        if start_shard is None and start_batch is None:
            self._start = 0
        self._place = batches._place
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the latest :meth:`batches` stands: ``order_id`` and the next batch."""
        return {"order_id": self.manifest.order_id, "next_batch": self._place.next_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next :meth:`batches` that is given no start begin at a state.

        Raises:
            ReaderError: it is no state, or of a mix with another order.
        """
        self._start = _next_batch(state, self.manifest)
        self._place = _Place(self._start)


def _opened(path: str, start: int) -> ShardReader:
    reader = ShardReader(path)
    reader._start = start
    return reader


class Batches(Iterator[Any]):
    """Batches of one rank, and the place in the order that they have reached; see ``batches``.

    Each is a Table, or a :class:`PaddedBatch` where ``pad`` was given. ``len`` is how many are
    still to come. A state counts what was handed out, not what was read ahead, and is the same on
    all ranks after the same number of steps. Where ``remainder="repeat"`` fills up the last step
    of a mix with ``batches_per_step``, it counts on past the mix's end; without that key the end
    is the mix's number of batches, from which every world size has nothing left. After an error
    the next call tries the same batch again; a forked process goes on from where its parent stood.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        start: int,
        rank: int,
        world_size: int,
        split: Split | None,
        columns: Sequence[str] | None,
        uneven: bool,
        read_ahead: int,
        remainder: Remainder,
        pad: Mapping[str, object] | None,
    ) -> None:
        layout = manifest.layout
        if split is None:
            differ = manifest.rows_per_batch is None and not uneven
            split = "batches" if layout.batches_per_step or differ else "rows"
        rank, world_size = _integer("rank", rank), _integer("world_size", world_size)
        if world_size < 1:
            raise ReaderError(f"world_size must be at least 1, not {world_size}")
        if not 0 <= rank < world_size:
            raise ReaderError(
                f"rank {rank} is outside 0..{world_size - 1} (world_size {world_size})"
            )
        read_ahead = _integer("read_ahead", read_ahead)
        if read_ahead < 0:
            raise ReaderError(f"read_ahead must be at least 0, not {read_ahead}")
        if remainder not in ("drop", "repeat"):
            raise ReaderError(f"remainder must be 'drop' or 'repeat', not {remainder!r}")
        if remainder == "repeat" and split == "rows":
            raise ReaderError(
                "remainder='repeat' fills up steps of whole batches, but with split='rows' every "
                "batch is a step of its own: use split='batches', or leave remainder out"
            )
        self._manifest = manifest
        self._rank, self._world_size = rank, world_size
        self._stop = layout.num_batches
        if split == "rows":
            rows = manifest.rows_per_batch
            if rows is None and world_size > 1 and not uneven:
                raise ReaderError(
                    "the batches of this mix differ in size: use split='batches', or uneven=True"
                )
            if rows is not None and rows % world_size and not uneven:
                raise ReaderError(
                    f"world_size {world_size} does not divide the batch of {rows} rows; choose a "
                    "divisor of it, or uneven=True for ranks that differ by a row"
                )
            self._stride = 1
        elif split == "batches":
            step = layout.batches_per_step or world_size
            if step % world_size:
                raise ReaderError(
                    f"world_size {world_size} does not divide the mix's batches_per_step {step}; "
                    "choose a divisor of it, or split='rows'"
                )
            self._stride = world_size
            if remainder == "drop":
                self._stop -= self._stop % step
            else:
                self._stop = _filled_up(layout)
        else:
            raise ReaderError(f"split must be 'rows' or 'batches', not {split!r}")
        self._split = split
        # Each stream has one of its own, so that files close with it; this one checks columns.
        self._decoder = Decoder(folder, manifest, columns)
        self._read_ahead = read_ahead
        self._stream: Generator[Any, None, None] | None = None
        self._process = os.getpid()
        self._inherited: Any = None
        self._place = _Place(0)
        self._seek(start)
        at = self._place.next_batch
        self._pad = None if pad is None else self._decoder.pad_values(pad, at)

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return max(0, -(-(self._stop - self._place.next_batch) // self._stride))

    def __next__(self) -> Any:
        if self._process != os.getpid():
            self.close()
        if self._stream is None:
            self._stream = self._batches()
        try:
            batch = next(self._stream)
        except StopIteration:
            raise
        except BaseException:
            # A generator that has raised is at its end: left in place, it would feign the mix's.
            self._stream = None
            raise
        self._place.next_batch = min(self._place.next_batch + self._stride, self._stop)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """``order_id`` of the mix and the number of the next global batch."""
        return {"order_id": self._manifest.order_id, "next_batch": self._place.next_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, at any time; what was read ahead is dropped.

        Raises:
            ReaderError: it is no state, of a mix with another order, or in the middle of a step
                that this world size cannot take up.
        """
        self._seek(_next_batch(state, self._manifest))

    def close(self) -> None:
        """Stop reading ahead and let go of the files; the next call opens them again."""
        if self._process != os.getpid():
            # The thread that reads ahead stayed with the parent, and so may locks that it held.
            self._inherited, self._process = self._stream, os.getpid()
        elif self._stream is not None:
            self._stream.close()
        self._stream = None

    def _seek(self, start: int) -> None:
        start = _integer("a start batch", start)
        if not 0 <= start <= self._last_start:
            layout = self._manifest.layout
            hint = "; remainder='repeat' fills up its last step"
            raise ReaderError(
                f"batch {start} is outside 0..{self._last_start}: the mix has {layout.num_batches} "
                f"batches{hint if 0 < start <= _filled_up(layout) else ''}"
            )
        if start % self._stride and start != self._stop:
            raise ReaderError(
                f"{self._world_size} ranks that take whole batches cannot begin at batch {start}, "
                f"in the middle of a step: choose a world_size that divides {start}, or begin at "
                f"{start - start % self._stride} and take what lies between once more"
            )
        self.close()
        self._place.next_batch = start

    @property
    def _last_start(self) -> int:
        return max(self._stop, self._manifest.layout.num_batches)

    def _batches(self) -> Generator[Any, None, None]:
        first = self._place.next_batch + (self._rank if self._split == "batches" else 0)
        numbers = range(first, first + len(self) * self._stride, self._stride)
        by_rows = self._split == "rows" and self._world_size > 1
        share = (self._rank, self._world_size) if by_rows else (0, 1)
        # Not a method's generator: holding its iterator, it would keep that from being freed.
        return _batches(self._decoder.anew(), numbers, share, self._pad, self._read_ahead)


def _batches(
    decoder: Decoder,
    numbers: range,
    share: tuple[int, int],
    pad: Mapping[str, np.generic] | None,
    read_ahead: int,
) -> Generator[Any, None, None]:
    """The batches of these numbers; past the mix's end they are those of its beginning again.

    Of each only rows r, r + R, .. for a share (r, R), padded where there is ``pad``.
    """
    groups = itertools.groupby((n % decoder.num_batches for n in numbers), decoder.group_of)
    jobs = ((key, list(batches)) for key, batches in groups)
    with contextlib.closing(_ahead(jobs, lambda job: decoder.decode(job[0]), read_ahead)) as ahead:
        for (_, batches), group in ahead:
            for n in batches:
                table = group.batch(n)
                if share != (0, 1):
                    table = table.take(pa.array(np.arange(share[0], table.num_rows, share[1])))
                yield table if pad is None else _padded(table, pad, n, share)


def _padded(
    table: pa.Table, pad: Mapping[str, np.generic], n: int, share: tuple[int, int]
) -> PaddedBatch:
    """A share's rows of batch n with the columns of ``pad`` dense."""
    dense: dict[str, NDArray[Any]] = {}
    lengths: dict[str, NDArray[np.int64]] = {}
    for name, value in pad.items():
        try:
            dense[name], lengths[name] = pad_lists(table.column(name), value)
        except PadError as error:
            rank, world_size = share
            row = "" if error.row is None else f", row {rank + error.row * world_size}"
            raise ReaderError(f"column {name!r} of batch {n}{row}: {error.reason}") from error
    others = [name for name in table.column_names if name not in pad]
    return PaddedBatch(table.select(others), dense, lengths)


def _ahead(
    jobs: Iterable[Any], work: Callable[[Any], Any], window: int
) -> Generator[tuple[Any, Any], None, None]:
    """Each job with its result, in order, ``window`` of them worked on in advance by one thread."""
    if window == 0:
        for job in jobs:
            yield job, work(job)
        return
    jobs = iter(jobs)
    pending: deque[tuple[Any, Future[Any]]] = deque()
    pool = ThreadPoolExecutor(1, "mixshards-read-ahead")
    try:
        for job in itertools.islice(jobs, window):
            pending.append((job, pool.submit(work, job)))
        while pending:
            job, future = pending.popleft()
            result = future.result()
            for following in itertools.islice(jobs, 1):
                pending.append((following, pool.submit(work, following)))
            yield job, result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _integer(what: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ReaderError(f"{what} must be an integer, found {value!r}") from None


def _filled_up(layout: Layout) -> int:
    """Where the last step ends once it is filled up.

    Of a mix without ``batches_per_step`` that is its own end: a step is then one batch a rank, so
    after the last one nothing is left, and the end reads the same for every world size.
    """
    return layout.num_batches + -layout.num_batches % (layout.batches_per_step or 1)


def _next_batch(state: Mapping[str, Any], manifest: Manifest) -> int:
    """What a state says. Only an iterator knows whether it takes one behind the mix's end."""
    if not isinstance(state, Mapping) or set(state) != {"order_id", "next_batch"}:
        raise ReaderError(f"a reader's state has exactly order_id and next_batch, found {state!r}")
    if state["order_id"] != manifest.order_id:
        raise ReaderError(
            f"the state was taken from the order {str(state['order_id'])[:16]}.., but this mix has "
            f"the order {manifest.order_id[:16]}..: other datasets, weights or batch size; resume "
            "from the mix that the state belongs to"
        )
    number = state["next_batch"]
    if not isinstance(number, int) or isinstance(number, bool):
        raise ReaderError(f"next_batch must be an integer, found {number!r}")
    if number < 0:
        raise ReaderError(f"next_batch must be at least 0, found {number}")
    if number > _filled_up(manifest.layout):
        raise ReaderError(
            f"the state's next batch is {number}, but the mix has {manifest.layout.num_batches}: "
            "resume from the longer mix of this order that the state was taken from"
        )
    return number
