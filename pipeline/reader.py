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
import pyarrow.parquet as pq

from .errors import MixError
from .manifest import Manifest
from .shard import MIX_BATCH, Footer, ShardError, check_shard, describe, open_shard, shard_name
from .storage import Folder

Split = Literal["rows", "batches"]

_MEND = "`mixshards verify` lists all faults, and building again mends them"


class ReaderError(MixError, ValueError):
    """A mix cannot be read in the way asked for."""


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
        ManifestError: there is no finished mix, or one of a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder.at(os.fspath(path))
        self.manifest = Manifest.load(self._folder)
        self._decoder = _Decoder(self._folder, self.manifest, None)
        self._last: tuple[tuple[int, int], pa.Table] | None = None
        self._start = 0
        self._place = _Place(0)

    def __len__(self) -> int:
        return self.manifest.layout.num_batches

    @property
    def num_shards(self) -> int:
        """How many shards the mix has."""
        return self.manifest.layout.num_shards

    @property
    def schema(self) -> pa.Schema:
        """Columns of a batch: the payload's, then provenance."""
        return self._decoder.schema

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
        return self._decoder.batch(last[1], key, n)

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
    ) -> Batches:
        """What rank ``rank`` of ``world_size`` trains on, batch after batch, to the end of the mix.

        Begins at a shard, at a batch, at a loaded state, or else at batch 0.

        ``split="rows"``: the rank takes rows r, r + R, .. of every batch, so that it sees nearly
        the mixture; R must divide the batch, or ``uneven=True`` gives some ranks one row more.
        ``split="batches"``: steps of ``batches_per_step`` batches (a key of the mix; R where it
        has none); of each step the rank takes batches r, r + R, .. whole, and R must divide it.
        A last step that is not full is left out, so that every rank makes the same number of steps.
        The default is what the mix was laid out for.

        ``columns`` projects; ``read_ahead`` row groups are decoded in advance on a thread.

        Raises:
            ReaderError: an argument is out of range, or does not divide what it must.
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
            self._folder, self.manifest, start, rank, world_size, split, columns, uneven, read_ahead
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


class Batches(Iterator[pa.Table]):
    """Batches of one rank, and the place in the order that they have reached; see ``batches``.

    ``len`` is how many are still to come. A state counts what was handed out, not what was read
    ahead, and is the same on all ranks after the same number of steps. After an error the next
    call tries the same batch again; a forked process goes on from where its parent stood.
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
    ) -> None:
        layout = manifest.layout
        split = split or ("batches" if layout.batches_per_step else "rows")
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
            self._stop -= self._stop % step
        else:
            raise ReaderError(f"split must be 'rows' or 'batches', not {split!r}")
        self._split = split
        # Each stream has one of its own, so that files close with it; this one checks columns.
        self._decoder = _Decoder(folder, manifest, columns)
        self._read_ahead = read_ahead
        self._stream: Generator[pa.Table, None, None] | None = None
        self._process = os.getpid()
        self._inherited: Any = None
        self._place = _Place(0)
        self._seek(start)

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        return max(0, -(-(self._stop - self._place.next_batch) // self._stride))

    def __next__(self) -> pa.Table:
        if self._process != os.getpid():
            self.close()
        if self._stream is None:
            self._stream = self._tables()
        try:
            table = next(self._stream)
        except StopIteration:
            raise
        except BaseException:
            # A generator that has raised is at its end: left in place, it would feign the mix's.
            self._stream = None
            raise
        self._place.next_batch += self._stride
        return table

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
        total = self._manifest.layout.num_batches
        if not 0 <= start <= total:
            raise ReaderError(f"batch {start} is outside 0..{total}: the mix has {total} batches")
        if start % self._stride:
            raise ReaderError(
                f"{self._world_size} ranks that take whole batches cannot begin at batch {start}, "
                f"in the middle of a step: choose a world_size that divides {start}, or begin at "
                f"{start - start % self._stride}"
            )
        self.close()
        self._place.next_batch = start

    def _tables(self) -> Generator[pa.Table, None, None]:
        first = self._place.next_batch + (self._rank if self._split == "batches" else 0)
        numbers = range(first, self._stop, self._stride)
        by_rows = self._split == "rows" and self._world_size > 1
        share = (self._rank, self._world_size) if by_rows else None
        # Not a method's generator: holding its iterator, it would keep that from being freed.
        return _tables(self._decoder.anew(), numbers, share, self._read_ahead)


def _tables(
    decoder: _Decoder, numbers: range, share: tuple[int, int] | None, read_ahead: int
) -> Generator[pa.Table, None, None]:
    """The batches of these numbers; of each only every R-th row from r on, for a share (r, R)."""
    groups = itertools.groupby(numbers, decoder.group_of)
    jobs = ((key, list(batches)) for key, batches in groups)
    with contextlib.closing(_ahead(jobs, lambda job: decoder.decode(job[0]), read_ahead)) as ahead:
        for (key, batches), group in ahead:
            for n in batches:
                table = decoder.batch(group, key, n)
                if share is not None:
                    table = table.take(pa.array(np.arange(share[0], table.num_rows, share[1])))
                yield table


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


def _next_batch(state: Mapping[str, Any], manifest: Manifest) -> int:
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
    if number > manifest.layout.num_batches:
        raise ReaderError(
            f"the state's next batch is {number}, but the mix has {manifest.layout.num_batches}: "
            "resume from the longer mix of this order that the state was taken from"
        )
    return number


class _Decoder:
    """Decodes row groups of a mix and cuts batches out of them. One open shard, one thread."""

    def __init__(self, folder: Folder, manifest: Manifest, columns: Sequence[str] | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._layout = manifest.layout
        known = [column["name"] for column in manifest.document["schema"]]
        if isinstance(columns, str):
            raise ReaderError(f"columns must be a list of names, such as [{columns!r}]")
        for name in columns or ():
            if name not in known:
                raise ReaderError(f"no column {name!r}; the mix has {', '.join(known)}")
        self._columns = self._decoded = None if columns is None else list(columns)
        if self._columns is not None and manifest.rows_per_batch is None:
            # Where batches differ in size, this column says where each begins.
            self._decoded = [*self._columns, MIX_BATCH]
        self._open: tuple[int, pq.ParquetFile] | None = None

    def anew(self) -> _Decoder:
        """The same with no shard open."""
        return _Decoder(self._folder, self._manifest, self._columns)

    @property
    def schema(self) -> pa.Schema:
        return self._shard(0).schema_arrow.remove_metadata()

    def group_of(self, n: int) -> tuple[int, int]:
        """Shard and row group in which batch n lies."""
        shard, place = divmod(n, self._layout.batches_per_shard)
        return shard, place // self._layout.batches_per_row_group

    def decode(self, key: tuple[int, int]) -> pa.Table:
        """A row group as a table.

        Raises:
            ShardError: the shard is gone, damaged or not the one that belongs there.
        """
        shard, group = key
        parquet = self._shard(shard)
        try:
            table = parquet.read_row_group(group, columns=self._decoded)
        except (pa.ArrowException, OSError) as error:
            raise ShardError(
                f"{self._folder.root}/{shard_name(shard)}: row group {group} is damaged: {error}; "
                f"{_MEND}"
            ) from error
        return table

    def batch(self, table: pa.Table, key: tuple[int, int], n: int) -> pa.Table:
        """Batch n of the decoded row group that holds it."""
        shard, group = key
        first = shard * self._layout.batches_per_shard + group * self._layout.batches_per_row_group
        rows = self._manifest.rows_per_batch
        if rows is None:
            numbers = table.column(MIX_BATCH).to_numpy()
            start, stop = np.searchsorted(numbers, (n, n + 1))
        else:
            start, stop = (n - first) * rows, (n - first + 1) * rows
        table = table.slice(start, stop - start)
        return table if self._columns is None else table.select(self._columns)

    def _shard(self, shard: int) -> pq.ParquetFile:
        opened = self._open
        if opened is not None and opened[0] == shard:
            return opened[1]
        name = shard_name(shard)
        where = f"{self._folder.root}/{name}"
        try:
            file = self._folder.open(name)
        except OSError as error:
            raise ShardError(f"{where}: cannot be opened: {error}") from error
        parquet, footer = open_shard(
            file, where, pre_buffer=not self._folder.local, page_checksum_verification=True
        )
        first, batches = self._layout.shard(shard)
        expected = Footer(self._manifest.bytes_id, shard, first, batches)
        check_shard(parquet, footer, expected, self._manifest.group_rows(shard), where)
        self._check_schema(parquet, where)
        self._open = (shard, parquet)
        return parquet

    def _check_schema(self, parquet: pq.ParquetFile, where: str) -> None:
        """Hold a shard's columns against the manifest, since no checksum covers its footer."""
        planned = self._manifest.document["schema"]
        try:
            found = describe(parquet.schema_arrow)
        except (pa.ArrowException, ValueError) as error:
            raise ShardError(f"{where}: its schema is damaged: {error}; {_MEND}") from error
        names = [column["name"] for column in found]
        # Another pyarrow may write the same type with other words.
        same = self._manifest.document["writer"]["pyarrow"] == pa.__version__
        if (same and found != planned) or names != [column["name"] for column in planned]:
            raise ShardError(f"{where}: has columns {found}, expected {planned}; {_MEND}")
