"""Row maps to shard files, where a shard's rows lie anywhere in the sources. No Beam in here.

Shards request rows of source row groups; each row group is decoded once, and its rows are served
in pieces; the pieces of a shard are put in order and written.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mixcore import RowMap

from .catalog import Catalog
from .planned import DECODED, Plan
from .registry import read_file
from .shard import Footer, ShardRecord, one_chunk, shard_name
from .writing import BuildError, ShardWriter

T = TypeVar("T")
R = TypeVar("R")

PLACE = np.dtype([("shard", "<i4"), ("row", "<i4")])
"""Where a row belongs: its shard, and its row in there."""
REQUEST = np.dtype([("group", "<i4"), ("row", "<i8"), ("place", PLACE)])
"""A row that is asked for: its source row group, its row in there, and where it belongs."""

Spilled = tuple[str, int, int]
"""Where a message lies on this machine's disk: path, start and size in bytes."""
Served = tuple[bytes, pa.Buffer]
"""Rows on their way: their places, as PLACE, and an Arrow IPC message of one record batch."""
Piece = tuple[bytes, pa.Buffer | bytes | Spilled]
"""The same as it arrives."""

_PIECE_BYTES = 8 << 20
_MAX_OFFSET = 2**31
# Of a row group so much is held in one array: a larger one would overflow Arrow's 32-bit offsets.
_PART_BYTES = 256 << 20
# Of a shard so much is put in order at a time.
_BLOCK_BYTES = 64 << 20

MAX_SHARD_BYTES = 1 << 30
"""Decoded bytes of the largest shard: runners hold what belongs to one key in memory."""
# What a value takes at least, in columns that compress to nothing.
_VALUE_BYTES = 8


def decoded_shard_bytes(plan: Plan) -> int:
    """About how many bytes a shard's rows take when decoded, rather too many than too few.

    Raises:
        BuildError: more than MAX_SHARD_BYTES.
    """
    layout = plan.layout
    rows = int(plan.manifest.document["num_rows"])
    whole = DECODED * plan.estimated_bytes + _VALUE_BYTES * len(plan.schema) * rows
    batch = max(1, whole // layout.num_batches)
    shard = batch * min(layout.batches_per_shard, layout.num_batches)
    if shard > MAX_SHARD_BYTES:
        fitting = MAX_SHARD_BYTES // batch
        way_out = (
            f"set batches_per_shard to at most {fitting}, or shard_bytes to at most "
            f"{MAX_SHARD_BYTES // (2 * DECODED) >> 20}MiB"
            if fitting
            else "set a smaller batch size: one batch alone takes more"
        )
        raise BuildError(
            f"a shard would take about {shard >> 20:,} MiB decoded, and where rows lie anywhere in "
            f"the sources at most {MAX_SHARD_BYTES >> 20:,} MiB can be put in order in memory; "
            + way_out
        )
    return shard


class SourceGroups:
    """The row groups of a catalog's files, numbered in dataset, file and group order."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._files = [(dataset, file) for dataset in catalog.datasets for file in dataset.files]
        groups = [len(file.group_rows) for _, file in self._files]
        rows = np.concatenate([np.array(file.group_rows, np.int64) for _, file in self._files])
        self._file = np.repeat(np.arange(len(groups)), groups)
        # On one axis: the rows of all files, one after another.
        self._starts = np.cumsum(rows) - rows
        file_rows = np.array([file.num_rows for _, file in self._files], np.int64)
        self._file_starts = np.cumsum(file_rows) - file_rows
        firsts = np.cumsum([0, *(len(dataset.files) for dataset in catalog.datasets)])[:-1]
        held_out = np.array([dataset.rows[0] for dataset in catalog.datasets], np.int64)
        self._dataset_starts = self._file_starts[firsts] + held_out

    def __len__(self) -> int:
        return len(self._starts)

    def locate(self, row_map: RowMap) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The group and the row in it of every row of a map, in the map's order."""
        before = np.cumsum(row_map.count) - row_map.count
        first = self._dataset_starts[row_map.dataset] + row_map.start - before
        row = np.repeat(first, row_map.count) + np.arange(row_map.num_rows)
        # Of groups that begin at one row, all but the last are empty.
        group = np.searchsorted(self._starts, row, side="right") - 1
        return group, row - self._starts[group]

    def read(self, group: int, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows ``start`` to below ``stop`` of a group, as batches under the catalog's schema.

        Raises:
            SourceError: the file is gone, damaged, or not the planned one.
        """
        place = self._file[group]
        dataset, file = self._files[place]
        begin = int(self._starts[group] - self._file_starts[place])
        return read_file(self._catalog, dataset, file, begin + start, begin + stop)


def request_rows(
    writer: ShardWriter, groups: SourceGroups, footers: Iterable[Footer]
) -> NDArray[Any]:
    """All rows of some shards as an array of REQUEST, by group and in there by place."""
    parts = []
    for footer in footers:
        group, row = groups.locate(writer.row_map(footer))
        part = np.empty(len(row), REQUEST)
        part["group"], part["row"] = group, row
        part["place"]["shard"], part["place"]["row"] = footer.shard, np.arange(len(row))
        parts.append(part)
    requests = np.concatenate(parts)
    return requests[np.argsort(requests["group"], kind="stable")]


def cut(values: NDArray[Any], keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Values as runs of one key each, with the key."""
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(keys)], strict=True):
        yield int(keys[start]), values[start:stop]


def serve_group(
    groups: SourceGroups, group: int, asked: Sequence[tuple[R, NDArray[Any]]]
) -> Iterator[tuple[R, Served]]:
    """The pieces of one group for all who ask for rows of it, each an array of REQUEST.

    The group is decoded once, and held no more than 256 MiB at a time. A piece takes at most about
    8 MiB, or one row.

    Raises:
        SourceError: the file is gone, damaged, or not the planned one.
    """
    rows = [requests["row"] for _, requests in asked]
    begin = min(int(row.min()) for row in rows)
    stop = max(int(row.max()) for row in rows) + 1
    for part in _parts(groups.read(group, begin, stop)):
        for who, requests in asked:
            row = requests["row"] - begin
            here = (row >= 0) & (row < part.num_rows)
            for batch, places in _pieces(part, row[here], requests["place"][here]):
                yield who, (places.tobytes(), batch.serialize())
        begin += part.num_rows


def _parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Consecutive batches as larger ones."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= _PART_BYTES:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def _pieces(
    part: pa.RecordBatch, rows: NDArray[np.int64], places: NDArray[Any]
) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
    step = max(1, _PIECE_BYTES * part.num_rows // max(1, part.nbytes))
    for at in range(0, len(rows), step):
        stop = min(at + step, len(rows))
        size = 1 if _may_overflow(part, rows[at:stop]) else step
        for begin in range(at, stop, size):
            end = min(begin + size, stop)
            yield from _bounded(part.take(pa.array(rows[begin:end])), places[begin:end])


def _may_overflow(part: pa.RecordBatch, rows: NDArray[np.int64]) -> bool:
    """Whether 32-bit offsets may not do for rows asked for more than once; take does not notice."""
    if part.nbytes * len(rows) < _MAX_OFFSET:
        return False
    return bool(part.nbytes * np.unique(rows, return_counts=True)[1].max() >= _MAX_OFFSET)


def _bounded(
    batch: pa.RecordBatch, places: NDArray[Any]
) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
    """A batch in as many pieces as it takes, since rows differ in size."""
    half = batch.num_rows // 2
    if half and batch.nbytes > _PIECE_BYTES:
        yield from _bounded(batch.slice(0, half), places[:half])
        yield from _bounded(batch.slice(half), places[half:])
    else:
        yield batch, places


class Spill:
    """A new file in a folder of this machine for messages on their way; close it to read them.

    A runner in this machine's processes would hold them in memory, in several copies.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path = f"{folder}/{uuid.uuid4().hex}.part"
        self._file = open(self._path, "wb")  # noqa: SIM115 (closed by whoever opened the spill)
        self._size = 0

    def put(self, message: pa.Buffer) -> Spilled:
        """Write a message; where it lies.

        Raises:
            BuildError: the disk is full, or cannot be written to.
        """
        with self._writing():
            self._file.write(message)
        self._size += message.size
        return self._path, self._size - message.size, message.size

    def close(self) -> None:
        """End the file.

        Raises:
            BuildError: the disk is full, or cannot be written to.
        """
        with self._writing():
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BuildError(
                f"{self._path}: rows cannot be kept there on their way: {error}; free some space, "
                "and the same build goes on from the shards that stand"
            ) from error


class _Arrived(NamedTuple):
    """A piece's part for one shard: rows in the shard, ascending, and what belongs there."""

    rows: NDArray[np.int32]
    batch: pa.RecordBatch


def write_shards(
    writer: ShardWriter,
    footers: Sequence[Footer],
    pieces: Iterable[Piece],
    known: Mapping[int, ShardRecord],
    threads: int = 1,
) -> list[ShardRecord]:
    """Write shards from all their pieces; a record of every one.

    Those ``known`` to stand, or found standing now, are not written. Shards are written side by
    side by ``threads``; one more reads back, hashes and puts them in place.

    Raises:
        BuildError: not exactly one row came for each place of a shard, or a shard cannot be written
            or did not read back as planned.
    """
    arrived = _by_shard(pieces, writer.plan.catalog.schema)

    def write(footer: Footer) -> Future[ShardRecord] | ShardRecord:
        found = known.get(footer.shard) or writer.standing(footer)
        if found is not None:
            return found
        scratch = writer.write(footer, _tables(writer, footer, arrived.pop(footer.shard, [])))
        return finish.submit(writer.finish, scratch, footer)

    with ThreadPoolExecutor(1) as finish:
        written = list(side_by_side(write, footers, threads))
        return [part if isinstance(part, ShardRecord) else part.result() for part in written]


def collect(writer: ShardWriter, groups: SourceGroups, footer: Footer) -> Iterator[pa.Table]:
    """One shard's row groups, from all source row groups that it takes rows of.

    Raises:
        SourceError: a file is gone, damaged, or not the planned one.
    """
    requests = request_rows(writer, groups, [footer])
    pieces = (
        piece
        for group, asked in cut(requests, requests["group"])
        for _, piece in serve_group(groups, group, [(None, asked)])
    )
    arrived = _by_shard(pieces, writer.plan.catalog.schema)
    yield from _tables(writer, footer, arrived.pop(footer.shard, []))


def _by_shard(pieces: Iterable[Piece], schema: pa.Schema) -> dict[int, list[_Arrived]]:
    arrived: dict[int, list[_Arrived]] = {}
    mapped: dict[str, pa.Buffer] = {}
    for places, message in pieces:
        batch = pa.ipc.read_record_batch(_buffer(message, mapped), schema)
        place = np.frombuffer(places, PLACE)
        begin = 0
        for shard, part in cut(place, place["shard"]):
            rows = _Arrived(part["row"], batch.slice(begin, len(part)))
            arrived.setdefault(shard, []).append(rows)
            begin += len(part)
    return arrived


def _buffer(message: pa.Buffer | bytes | Spilled, mapped: dict[str, pa.Buffer]) -> pa.Buffer:
    """A message's bytes, without a copy of them; files are mapped once."""
    if not isinstance(message, tuple):
        return pa.py_buffer(message)
    path, start, size = message
    if path not in mapped:
        mapped[path] = pa.memory_map(path).read_buffer()
    return mapped[path].slice(start, size)


def _tables(writer: ShardWriter, footer: Footer, arrived: Sequence[_Arrived]) -> Iterator[pa.Table]:
    """The row groups of a shard, put in order block by block."""
    row_map = writer.row_map(footer)
    groups = writer.groups(footer, row_map)
    row = np.concatenate([np.empty(0, np.int32), *(part.rows for part in arrived)])
    _check_places(footer, row_map.num_rows, row)
    group_ends = np.cumsum([group.num_rows for group in groups])
    row_bytes = sum(part.batch.nbytes for part in arrived) / row_map.num_rows
    group_block = (group_ends * row_bytes // _BLOCK_BYTES).astype(np.int64)
    block_ends = group_ends[np.flatnonzero(np.diff(group_block, append=-1))]
    blocks: list[list[_Arrived]] = [[] for _ in block_ends]
    for part in arrived:
        cuts = [0, *np.searchsorted(part.rows, block_ends).tolist()]
        for block, start, stop in zip(blocks, cuts[:-1], cuts[1:], strict=True):
            if start < stop:
                block.append(_Arrived(part.rows[start:stop], part.batch.slice(start, stop - start)))
    rest = iter(groups)
    for block in blocks:
        # Each row is taken once, so what fits in one chunk before fits after: take does not notice.
        rows = one_chunk(pa.Table.from_batches([part.batch for part in block]))
        order = pa.array(np.argsort(np.concatenate([part.rows for part in block])))
        at = 0
        while at < len(order):
            group = next(rest)
            taken = rows.take(order.slice(at, group.num_rows))
            yield writer.table(footer, group, taken)
            at += group.num_rows


def _check_places(footer: Footer, planned: int, row: NDArray[np.int32]) -> None:
    """Hold the rows that came for a shard against those planned: each exactly once.

    Raises:
        BuildError: rows are lacking, came twice, or are beyond the shard.
    """
    times = np.bincount(row, minlength=planned)
    if len(times) == planned and (times == 1).all():
        return
    wrong = {
        "lacking": np.flatnonzero(times[:planned] == 0),
        "double": np.flatnonzero(times[:planned] > 1),
        "beyond its end": planned + np.flatnonzero(times[planned:]),
    }
    listed = "; ".join(
        f"{len(rows):,} {what}, first row {', '.join(map(str, rows[:3].tolist()))}"
        for what, rows in wrong.items()
        if len(rows)
    )
    raise BuildError(
        f"{shard_name(footer.shard)}: the runner brought {len(row):,} rows of {planned:,} planned: "
        f"{listed}; build again, and the shards that stand are kept"
    )


def side_by_side(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Map with threads, results in the order of the items, no more at a time than threads."""
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
