"""Row maps to shard files, where a shard takes contiguous slices of sources. No Beam in here."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .planned import Plan
from .registry import Cursors
from .scatter import SourceGroups, collect
from .shard import Footer, ShardRecord, file_sha256, one_chunk
from .writing import ShardWriter

# Below this many bytes a slice, one index over larger slices is cheaper than the slices themselves.
_SLICE_BYTES = 256

# Of one worker, shared out among its crews.
_OPEN_FILES = 240
_DECODED_BYTES = 256 << 20
_AHEAD_BYTES = 256 << 20


def assemble(
    cursors: Cursors,
    stream: NDArray[np.integer[Any]],
    offset: NDArray[np.int64],
    count: NDArray[np.int64],
    slice_rows: float,
) -> pa.Table:
    """The payload rows of run-length pieces, in the order of the pieces.

    The pieces of one stream must follow on each other, as those of consecutive batches do. Long
    ones are sliced; where they have fewer than ``slice_rows`` rows on average, each stream gives
    one slice and an index does the rest.

    Raises:
        ColumnSizeError: a column of the rows is too large to be held in one array.
    """
    if count.sum() >= slice_rows * len(count):
        slices: list[pa.RecordBatch] = []
        for piece in zip(stream.tolist(), offset.tolist(), count.tolist(), strict=True):
            slices.extend(cursors.read(*piece))
        return pa.Table.from_batches(slices)
    order = np.argsort(stream, kind="stable")
    starts = np.flatnonzero(np.diff(stream[order], prepend=-1))
    totals = np.add.reduceat(count[order], starts)
    firsts = order[starts]
    slices = []
    for piece in zip(
        stream[firsts].tolist(), offset[firsts].tolist(), totals.tolist(), strict=True
    ):
        slices.extend(cursors.read(*piece))
    # Where each piece lies among the slices, and from there where each of its rows does.
    place = np.empty_like(count)
    place[order] = np.cumsum(count[order]) - count[order]
    begin = np.cumsum(count) - count
    index = np.repeat(place - begin, count) + np.arange(int(count.sum()))
    # Each row is taken once, so what fits in one chunk before fits after: take does not notice.
    return one_chunk(pa.Table.from_batches(slices)).take(pa.array(index))


def _ahead(
    tables: Iterator[pa.Table], max_bytes: int, done: Callable[[], None]
) -> Iterator[pa.Table]:
    """The tables, of which up to ``max_bytes`` are fetched in advance; ``done`` after the last."""
    ready: deque[pa.Table] = deque()
    held = 0
    for table in tables:
        ready.append(table)
        held += table.nbytes
        while held > max_bytes:
            held -= ready[0].nbytes
            yield ready.popleft()
    done()
    while ready:
        yield ready.popleft()


@dataclass
class _Run:
    """Shards that a crew writes from one set of cursors; they are taken in order."""

    shards: Iterator[int]
    cursors: Cursors
    ahead_bytes: int
    """How much of a shard is assembled before it is encoded, so that another can take its turn."""
    turn: threading.Lock = field(default_factory=threading.Lock)


class RunWriter:
    """Writes runs of consecutive shards of one plan; one a worker, shared by its ``crews``."""

    def __init__(self, plan: Plan, crews: int = 1) -> None:
        self._writer = ShardWriter(plan)
        self._streams = plan.streams
        # Open files and decoded rows are bounded for the worker, so its crews share them out.
        self._crews = crews
        self._max_open = max(32, _OPEN_FILES // crews)
        if plan.streams.active is not None:
            self._max_open = min(self._max_open, plan.streams.active)
        self._max_bytes = max(64 << 20, _DECODED_BYTES // crews)
        datasets = plan.catalog.datasets
        rows = sum(dataset.num_rows for dataset in datasets)
        row_bytes = sum(d.row_bytes * d.num_rows for d in datasets) / rows
        self._slice_rows = _SLICE_BYTES / max(1.0, row_bytes)
        # Where rows lie anywhere, every shard asks all row groups for its own.
        self._sources = None if plan.streams.in_order else SourceGroups(plan.catalog)

    def write(
        self, start: int, stop: int, threads: int = 1, cancelled: threading.Event | None = None
    ) -> list[ShardRecord]:
        """Write the shards ``start`` to ``stop`` that do not stand yet; a record of every one.

        Source row groups are decoded once a run. The crew's ``threads`` take turns at decoding
        and encode side by side; one more thread reads back, hashes and puts shards in place. Once
        ``cancelled`` is set, no further shard is begun.

        Raises:
            SourceError: a source is gone, damaged, or not the planned one.
            BuildError: a shard did not read back as planned.
        """
        cancelled = cancelled or threading.Event()
        # A thread that has no other to make way for holds one row group and no more.
        ahead = _AHEAD_BYTES // (self._crews * threads) if threads > 1 else 0
        run = _Run(iter(range(start, stop)), self._cursors(), ahead)
        records: list[ShardRecord] = []
        with ThreadPoolExecutor(1) as finish, ThreadPoolExecutor(threads) as crew:
            try:
                work = [crew.submit(self._work, run, finish, cancelled) for _ in range(threads)]
                for part in work:
                    records += part.result()
            except BaseException:
                cancelled.set()
                raise
            finally:
                crew.shutdown()
                run.cursors.close()
        return sorted(records, key=lambda record: record.shard)

    def _work(
        self, run: _Run, finish: ThreadPoolExecutor, cancelled: threading.Event
    ) -> list[ShardRecord]:
        """What each thread of a crew does: take the next shard, write it, and so on."""
        writer = self._writer
        records: list[ShardRecord] = []
        pending: Future[ShardRecord] | None = None
        try:
            while not cancelled.is_set():
                # The turn ends where all rows of the shard are assembled, at the latest here.
                with contextlib.ExitStack() as turn:
                    turn.enter_context(run.turn)
                    shard = next(run.shards, None)
                    if shard is None:
                        break
                    footer = writer.footer(shard)
                    found = writer.standing(footer)
                    if found is not None:
                        records.append(found)
                        continue
                    groups = self._groups(footer, run.cursors)
                    scratch = writer.write(footer, _ahead(groups, run.ahead_bytes, turn.close))
                if pending is not None:
                    records.append(pending.result())
                pending = finish.submit(writer.finish, scratch, footer)
            if pending is not None:
                records.append(pending.result())
        except BaseException:
            cancelled.set()
            raise
        return records

    def _cursors(self) -> Cursors:
        streams = self._streams
        return Cursors(streams.catalog, self._max_open, self._max_bytes, streams.active)

    def rehash(self, start: int, stop: int) -> Iterator[tuple[int, str]]:
        """The digests that shards ``start`` to ``stop`` have when written anew from the sources.

        Raises:
            SourceError: a source is gone, damaged, or not the planned one.
        """
        cursors = self._cursors()
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/shard.parquet"
            for shard in range(start, stop):
                footer = self._writer.footer(shard)
                self._writer.encode(path, footer, self._groups(footer, cursors))
                with open(path, "rb") as file:
                    yield shard, file_sha256(file)[0]

    def _groups(self, footer: Footer, cursors: Cursors) -> Iterator[pa.Table]:
        if self._sources is not None:
            yield from collect(self._writer, self._sources, footer)
            return
        row_map = self._writer.row_map(footer)
        for group in self._writer.groups(footer, row_map):
            stream, offset = self._streams.locate(group)
            rows = assemble(cursors, stream, offset, group.count, self._slice_rows)
            yield self._writer.table(footer, group, rows)
