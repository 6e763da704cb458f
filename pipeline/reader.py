"""Trainers: batches of a finished mix from any shard or batch, for rank r of R."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .decoder import Decoder, Group
from .errors import ReaderError
from .manifest import Manifest
from .pad import PadError, pad_lists
from .share import Remainder, Share, Skips, Split, batch_number, integer, read_state, state
from .storage import Folder


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
class Stand:
    """Where an iterator stands; it outlives the iterator, so that a reader can tell it."""

    share: Share
    place: int


class ShardReader:
    """Random and sequential access to the batches of a finished mix.

    ``path`` is a mix's folder, as a path or a URI. ``len`` is the number of batches and
    ``reader[n]`` batch n as a Table. Opening reads the manifest alone; the first batch, wherever
    it lies, needs one row group.

    Raises:
        ManifestError: there is no finished mix, one of a newer format, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Folder.at(os.fspath(path))
        self.manifest = Manifest.load(self.folder)
        self.manifest.check_bytes_id(self.folder)
        self._decoder = Decoder(self.folder, self.manifest, None)
        self._loaded: dict[str, Any] | None = None
        self.stand = Stand(Share.whole(self.manifest, Skips()), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its path and a loaded state: a copy opens files of its own."""
        return _opened, (self.folder.uri, self._loaded)

    def __repr__(self) -> str:
        return f"ShardReader({self.folder.uri!r}, order_id={self.manifest.order_id[:16]!r})"

    def __len__(self) -> int:
        return self.manifest.layout.num_batches

    @property
    def num_shards(self) -> int:
        """How many shards the mix has."""
        return self.manifest.layout.num_shards

    @property
    def schema(self) -> pa.Schema:
        """Columns of a batch: the payload's, then provenance."""
        return self._decoder.anew().schema(0)

    def __getitem__(self, n: int) -> pa.Table:
        """Batch n, whole. The row group that it lies in is kept for the next call."""
        return self._decoder.batch(batch_number(n, len(self)))

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
        skip_batches: Iterable[tuple[int, int]] = (),
        micro_batches: int | None = None,
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

        ``columns`` projects; ``read_ahead`` row groups are decoded in advance, by two threads where
        shards lie on a disk.

        ``pad`` maps list columns to the value that fills up their lists: each batch is then a
        :class:`PaddedBatch`, not a Table. Columns are lists (of any Arrow kind but views) of
        numbers or booleans, or of lists of these that have one length within the batch. The value
        must fit the column's dtype exactly; in a column of floats a float is rounded to it.

        ``skip_batches`` leaves batches out on every rank: ranges (first, past the last) of batch
        numbers. What follows moves up: steps of whole batches are made of those that are left. A
        state records them, and those of a loaded state are left out too.

        ``micro_batches=m`` gives, instead of each batch, a list of m parts of it for accumulating
        gradients: part j has every m-th of the rank's rows from row j on, so that each sees nearly
        the mixture. m must divide the rank's rows, unless ``uneven=True``.

        Raises:
            ReaderError: an argument is out of range, does not divide what it must, or names no
                column or no value of it. While iterating: a null, or inner lists of several
                lengths, in a padded column; the message names column, batch and row.
            ShardError: a shard is gone or damaged; with ``pad`` already at the call, which looks
                up the columns' types in the shard that it begins in.
        """
        if start_shard is not None and start_batch is not None:
            raise ReaderError("give start_shard or start_batch, not both")
        skips = asked = Skips.of(skip_batches, len(self))
        start = 0 if start_batch is None else start_batch
        if start_shard is not None:
            start_shard = integer("start_shard", start_shard)
            if not 0 <= start_shard <= self.num_shards:
                raise ReaderError(
                    f"start_shard {start_shard} is outside 0..{self.num_shards}: the mix has "
                    f"{self.num_shards} shards"
                )
            start = min(start_shard * self.manifest.layout.batches_per_shard, len(self))
        loaded = self._loaded if start_shard is None and start_batch is None else None
        if loaded is not None:
            start, skips = read_state(loaded, self.manifest, asked)
        share = Share.of(
            self.manifest, rank, world_size, split, uneven, remainder, micro_batches, skips
        )
        batches = Batches(
            self.folder,
            self.manifest,
            share,
            start,
            asked,
            columns,
            read_ahead,
            pad,
            micro_batches is not None,
        )
        if loaded is not None:
            self._loaded = None
        self.stand = batches.stand
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Where the latest :meth:`batches` stands: ``order_id``, next batch, skipped batches."""
        return state(self.manifest, self.stand.share, self.stand.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next :meth:`batches` that is given no start begin at a state.

        Raises:
            ReaderError: it is no state, or of a mix with another order.
        """
        number, skips = read_state(state, self.manifest, Skips())
        share = Share.whole(self.manifest, skips)
        self.stand = Stand(share, share.place(number))
        self._loaded = self.state_dict()  # not what was given, which its owner may change


def _opened(path: str, loaded: dict[str, Any] | None) -> ShardReader:
    reader = ShardReader(path)
    if loaded is not None:
        reader.load_state_dict(loaded)
    return reader


class Batches(Iterator[Any]):
    """Batches of one rank, and the place in the order that they have reached; see ``batches``.

    Each is a Table, a :class:`PaddedBatch` where ``pad`` was given, or with ``micro_batches`` a
    list of these. ``len`` is how many are still to come. A state counts what was handed out, not
    what was read ahead, and is the same on all ranks after the same number of steps. Where
    ``remainder="repeat"`` fills up the last step of a mix with ``batches_per_step``, it counts on
    past the mix's end; without that key the end is the mix's number of batches, from which every
    world size has nothing left. After an error the next call tries the same batch again; a forked
    process goes on from where its parent stood.

    With ``turn=(w, W)`` it is the w-th of W that take turns: it has every W-th batch from the w-th
    on, and its state says where it stands itself. ``convert`` makes something else of each batch.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        share: Share,
        start: int,
        asked: Skips,
        columns: Sequence[str] | None,
        read_ahead: int,
        pad: Mapping[str, object] | None,
        in_micro_batches: bool,
        turn: tuple[int, int] = (0, 1),
        convert: Callable[[Part], Any] | None = None,
    ) -> None:
        read_ahead = integer("read_ahead", read_ahead)
        if read_ahead < 0:
            raise ReaderError(f"read_ahead must be at least 0, not {read_ahead}")
        self._manifest = manifest
        self.asked = asked
        # Each stream has one of its own, so that files close with it; this one checks columns.
        self._decoder = Decoder(folder, manifest, columns)
        self._read_ahead = read_ahead
        self._in_micro_batches = in_micro_batches
        self._turn = turn
        self._convert = convert
        self._stream: Generator[Any, None, None] | None = None
        self._process = os.getpid()
        self._inherited: Any = None
        self.stand = Stand(share, 0)
        self._seek(share, start, turn[0])
        at = share.batch(self.stand.place)
        self._pad = None if pad is None else self._decoder.pad_values(pad, at)

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return len(self._places)

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
        self.stand.place = self.stand.share.later(self.stand.place, self._turn[1])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """``order_id`` of the mix, the number of the next global batch, and what is skipped."""
        return state(self._manifest, self.stand.share, self.stand.place)

    def load_state_dict(self, state: Mapping[str, Any], own: bool = False) -> None:
        """Go on from a state, at any time; what was read ahead is dropped.

        With ``own`` it says where this one stands in its turn, not where all of them begin.

        Raises:
            ReaderError: it is no state, of a mix with another order, or in the middle of a step
                that this world size cannot take up.
        """
        number, skips = read_state(state, self._manifest, self.asked)
        share = replace(self.stand.share, skips=skips)
        self._seek(share, number, 0 if own else self._turn[0])

    def close(self) -> None:
        """Stop reading ahead and let go of the files; the next call opens them again."""
        if self._process != os.getpid():
            # The thread that reads ahead stayed with the parent, and so may locks that it held.
            self._inherited, self._process = self._stream, os.getpid()
        elif self._stream is not None:
            self._stream.close()
        self._stream = None

    def _seek(self, share: Share, start: int, ahead: int) -> None:
        place = share.later(share.begin(start), ahead)
        self.close()
        self.stand.share, self.stand.place = share, place

    @property
    def _places(self) -> range:
        return self.stand.share.places(self.stand.place, self._turn[1])

    def _batches(self) -> Generator[Any, None, None]:
        # Not a method's generator: holding its iterator, it would keep that from being freed.
        return _batches(
            self._decoder,
            self.stand.share,
            self._places,
            self._read_ahead,
            self._pad,
            self._convert,
            self._in_micro_batches,
        )


class Part(NamedTuple):
    """Rows of batch n of the mix, of which the order tells the number: row ``first`` and so on.

    From one to the next it is ``distance`` rows of the batch. ``rows`` is a Table, or a
    :class:`PaddedBatch`.
    """

    number: int
    n: int
    first: int
    distance: int
    rows: Any

    def cell(self, column: str, row: int | None) -> str:
        """A place in it as messages name it."""
        where = f"column {column!r} of batch {self.n}"
        return where if row is None else f"{where}, row {self.first + row * self.distance}"


def _batches(
    decoder: Decoder,
    share: Share,
    places: range,
    read_ahead: int,
    pad: Mapping[str, np.generic] | None,
    convert: Callable[[Part], Any] | None,
    in_micro_batches: bool,
) -> Generator[Any, None, None]:
    """What a share has of the batch at each place, padded and converted."""
    pairs = ((place, share.batch(place)) for place in places)
    groups = itertools.groupby(pairs, lambda pair: decoder.group_of(pair[1]))
    jobs = ((key, list(batches)) for key, batches in groups)
    rows = share.rows
    # Two row groups at once keep the cores busy where one of them waits for its largest column. The
    # second thread opens shards of its own, which on a store would be requests of its own.
    threads = 2 if decoder.local else 1
    own = threading.local()

    def decode(job: tuple[tuple[int, int], Any]) -> Group:
        if not hasattr(own, "decoder"):
            own.decoder = decoder.anew()
        return cast(Decoder, own.decoder).decode(job[0])

    with contextlib.closing(_ahead(jobs, decode, read_ahead, threads)) as ahead:
        for (_, batches), group in ahead:
            for place, n in batches:
                number = share.number(place)
                tables = zip(rows, _strided(group.batch(n), rows), strict=True)
                parts = [Part(number, n, *chosen, table) for chosen, table in tables]
                if pad is not None:
                    parts = [padded(part, pad) for part in parts]
                given = [part.rows if convert is None else convert(part) for part in parts]
                yield given if in_micro_batches else given[0]


def _strided(table: pa.Table, rows: Sequence[tuple[int, int]]) -> list[pa.Table]:
    """For each (first, distance) every so many rows of a table from the first on."""
    if list(rows) == [(0, 1)]:
        return [table]
    chosen = [np.arange(first, table.num_rows, distance) for first, distance in rows]
    taken = copied(table, np.concatenate(chosen))
    ends = np.cumsum([len(part) for part in chosen]).tolist()
    return [taken.slice(end - len(part), len(part)) for end, part in zip(ends, chosen, strict=True)]


def copied(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a table, in memory of their own."""
    # From its buffer, since pa.array imports pandas first, where it is installed.
    places = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
    return table.take(places)


def padded(part: Part, pad: Mapping[str, np.generic]) -> Part:
    """The same with the columns of ``pad`` dense.

    Raises:
        ReaderError: a null, or inner lists of several lengths, in such a column.
    """
    table = part.rows
    dense: dict[str, NDArray[Any]] = {}
    lengths: dict[str, NDArray[np.int64]] = {}
    for name, value in pad.items():
        try:
            dense[name], lengths[name] = pad_lists(table.column(name), value)
        except PadError as error:
            raise ReaderError(f"{part.cell(name, error.row)}: {error.reason}") from error
    others = [name for name in table.column_names if name not in pad]
    return part._replace(rows=PaddedBatch(table.select(others), dense, lengths))


def _ahead(
    jobs: Iterable[Any], work: Callable[[Any], Any], window: int, threads: int
) -> Generator[tuple[Any, Any], None, None]:
    """Each job with its result, in order, ``window`` of them worked on in advance by threads."""
    if window == 0:
        for job in jobs:
            yield job, work(job)
        return
    jobs = iter(jobs)
    pending: deque[tuple[Any, Future[Any]]] = deque()
    pool = ThreadPoolExecutor(min(threads, window), "mixshards-read-ahead")
    try:
        # The first is worked on alone, since someone waits for it.
        pending.extend((job, pool.submit(work, job)) for job in itertools.islice(jobs, 1))
        while pending:
            job, future = pending.popleft()
            result = future.result()
            for following in itertools.islice(jobs, window - len(pending)):
                pending.append((following, pool.submit(work, following)))
            yield job, result
    finally:
        if not sys.is_finalizing():  # then it is shut down, and so is what shutting down needs
            pool.shutdown(wait=False, cancel_futures=True)
