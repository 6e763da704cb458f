"""Items by dataset and offset: forward cursors over a catalog, and the registry of iterators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from .catalog import Catalog, Dataset, SourceFile, staged_name
from .formats import SourceChangedError, SourceError, format_of, parquet
from .schema import conform
from .storage import resolve

# A dataset this small is decoded once and kept while its cursor is open.
_KEPT_ROWS = 2048
_KEPT_BYTES = 1 << 20
_MAX_OFFSET = 2**31

# What a cursor decodes at once: less costs more calls, more falls out of the processor's cache.
_BATCH_BYTES = 2 << 20


def read_file(
    catalog: Catalog,
    dataset: Dataset,
    file: SourceFile,
    start: int,
    stop: int,
    batch_bytes: int = _BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Rows ``start`` to below ``stop`` of one file, as batches of about ``batch_bytes``.

    They are under the catalog's schema. No row group outside of the range is decoded.

    Raises:
        SourceError: the file is gone, damaged, or not the planned one.
    """
    where = f"dataset {dataset.name!r}, {file.path}"
    try:
        for batch in _batches(catalog, dataset, file, start, batch_bytes, where):
            batch = batch.slice(0, stop - start)
            if batch.num_rows:
                yield batch
            start += batch.num_rows
            if start == stop:
                return
    except SourceError as error:
        raise type(error)(f"dataset {dataset.name!r}: {error}") from error
    raise SourceChangedError(
        f"{where}: ended at row {start}, expected {file.num_rows} rows; plan again, or restore "
        "the file"
    )


def _batches(
    catalog: Catalog,
    dataset: Dataset,
    file: SourceFile,
    start: int,
    batch_bytes: int,
    where: str,
) -> Iterator[pa.RecordBatch]:
    """Rows of one file from one on, under the catalog's schema."""
    filesystem, path = resolve(file.path, catalog.base)
    module = format_of(path)
    assert module is not None  # the catalog holds no other files
    if catalog.stage is not None and not module.opens_anywhere(path):
        staged = staged_name(catalog, dataset, file)
        if catalog.stage.size(staged) is not None:
            place = catalog.stage.filesystem, catalog.stage.path(staged)
            yield from parquet.read_staged(*place, start, catalog.schema, batch_bytes)
            return
    columns = catalog.source_columns(dataset)
    asked = [
        field.with_name(name)
        for name, field in zip(columns, catalog.schema, strict=True)
        if name is not None
    ]
    nested = dataset.columns is not None
    for batch in module.read_from(filesystem, path, file, start, pa.schema(asked), batch_bytes):
        yield conform(batch, columns, catalog.schema, where, dataset.schema, nested)


class Cursor:
    """A place in a dataset that moves forward; rows come as record batches under the schema.

    A read that goes on where the last one stopped decodes nothing twice. Any other offset is
    reached by opening the file there.
    """

    def __init__(self, catalog: Catalog, dataset: Dataset, batch_bytes: int = _BATCH_BYTES) -> None:
        self._catalog = catalog
        self._dataset = dataset
        self._batch_bytes = batch_bytes
        self._stream: Iterator[pa.RecordBatch] | None = None
        self._buffer: pa.RecordBatch | None = None
        self._buffer_start = 0
        self._kept: pa.RecordBatch | None = None
        self.nbytes = 0
        """Bytes of decoded rows that the cursor holds."""
        self._whole = (
            dataset.num_rows <= _KEPT_ROWS
            and dataset.num_rows * dataset.row_bytes <= min(_KEPT_BYTES, batch_bytes)
        )

    @property
    def is_open(self) -> bool:
        """Whether the cursor holds a file open."""
        return self._stream is not None

    def holds(self, offset: int, count: int) -> bool:
        """Whether a read would find all its rows decoded already."""
        if self._kept is not None:
            return True
        begin = offset % self._dataset.num_rows - self._buffer_start
        return self._buffer is not None and 0 <= begin <= self._buffer.num_rows - count

    def close_file(self) -> None:
        """Let go of the open file, but not of what is decoded."""
        self._stream = None

    def close(self) -> None:
        """Let go of the open file and of decoded rows; the next read opens again."""
        self._stream = None
        self._buffer = None
        self._kept = None
        self.nbytes = 0

    def read(self, offset: int, count: int) -> list[pa.RecordBatch]:
        """Rows of ``count`` items from an offset; past the dataset's end it begins again.

        Raises:
            SourceError: a file is gone, damaged, or no longer the planned one.
        """
        rows = self._dataset.num_rows
        start = offset % rows
        if self._whole and self._kept is None:
            self._keep()
        if self._kept is not None:
            if start + count <= rows:
                return [self._kept.slice(start, count)]
            if self._kept.nbytes * (count // rows + 2) < _MAX_OFFSET:
                return [self._kept.take(pa.array((start + np.arange(count)) % rows))]
            # Take would not notice that 32-bit offsets overflow.
            whole, rest = divmod(count - (rows - start), rows)
            pieces = [self._kept.slice(start), *[self._kept] * whole, self._kept.slice(0, rest)]
            return [piece for piece in pieces if piece.num_rows]
        pieces = []
        while count:
            now = min(count, rows - start)
            pieces.extend(self._pieces(start, now))
            count -= now
            start = 0
        return pieces

    def _keep(self) -> None:
        """Decode all rows and hold them, unless they take far more than they do in storage."""
        pieces, held = [], 0
        for piece in self._pieces(0, self._dataset.num_rows):
            pieces.append(piece)
            held += piece.nbytes
            if held > 4 * self._batch_bytes:
                self._whole = False
                self.close()
                return
        self.close()
        self._kept = pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]
        self.nbytes = self._kept.nbytes

    def _pieces(self, start: int, count: int) -> Iterator[pa.RecordBatch]:
        while count:
            begin = start - self._buffer_start
            if self._buffer is None or not 0 <= begin < self._buffer.num_rows:
                self._fill(start)
                continue
            piece = self._buffer.slice(begin, count)
            yield piece
            start += piece.num_rows
            count -= piece.num_rows

    def _fill(self, start: int) -> None:
        """Decode the batch that holds a row: the stream's next one, or a new stream's first."""
        following = None if self._buffer is None else self._buffer_start + self._buffer.num_rows
        stream = self._stream
        if stream is None or start != following:
            stream = self._open(start)
        # What fails is closed and begins anew at the next read; a stale buffer would pass for it.
        self.close()
        self._buffer = next(stream)
        self._stream, self._buffer_start = stream, start
        self.nbytes = self._buffer.nbytes

    def _open(self, start: int) -> Iterator[pa.RecordBatch]:
        """Batches of the dataset from a row on, file after file, up to its last row."""
        dataset = self._dataset
        for file in dataset.files:
            row, (_, stop) = start - file.first_row, dataset.taken(file)
            if row < stop:
                yield from read_file(self._catalog, dataset, file, row, stop, self._batch_bytes)
                start = file.first_row + stop


class Cursors:
    """Cursors over all datasets, with bounds on what they hold together.

    At most ``max_open`` files are open, and decoded rows take about ``max_bytes``; those least
    recently read are let go first. Where no more than ``active`` are read at a time, these share
    the bounds. A cursor whose file was closed gives what it has decoded, and
    opens the file again after that.
    """

    def __init__(
        self,
        catalog: Catalog,
        max_open: int = 120,
        max_bytes: int = 256 << 20,
        active: int | None = None,
    ) -> None:
        self._max_open = max_open
        self._max_bytes = max_bytes
        # A reader holds some megabytes of pages besides, and thrice its batch while it decodes:
        # so the more there are, the less each decodes at once.
        count = min(active or len(catalog.datasets), len(catalog.datasets))
        share = max(64 << 10, min(_BATCH_BYTES, max_bytes // (count * max(4, count // 8))))
        self._cursors = [Cursor(catalog, dataset, share) for dataset in catalog.datasets]
        # Least recently read first: cursors with open files, and the bytes that cursors hold.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._held: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0

    def read(self, dataset: int, offset: int, count: int) -> list[pa.RecordBatch]:
        """As :meth:`Cursor.read`, for the dataset at a place of the configured order."""
        cursor = self._cursors[dataset]
        if cursor.holds(offset, count):
            self._held.move_to_end(dataset)
            if cursor.is_open:
                self._open.move_to_end(dataset)
            return cursor.read(offset, count)
        self._open.pop(dataset, None)
        if not cursor.is_open:
            while len(self._open) >= self._max_open:
                self._cursors[self._open.popitem(last=False)[0]].close_file()
        self._bytes -= self._held.pop(dataset, 0)
        pieces = cursor.read(offset, count)
        if cursor.is_open:
            self._open[dataset] = None
        self._held[dataset] = cursor.nbytes
        self._bytes += cursor.nbytes
        while len(self._held) > 1 and self._bytes > self._max_bytes:
            oldest, held = self._held.popitem(last=False)
            self._cursors[oldest].close()
            self._open.pop(oldest, None)
            self._bytes -= held
        return pieces

    def close(self) -> None:
        """Close all of them."""
        for dataset in self._held:
            self._cursors[dataset].close()
        self._open.clear()
        self._held.clear()
        self._bytes = 0


class Registry:
    """Opens an iterator over a dataset's items at any offset; an item is a dict under the schema.

    With ``repeat`` a dataset begins again after its last item, for ever.
    """

    def __init__(self, catalog: Catalog, repeat: bool = False) -> None:
        self._catalog = catalog
        self._repeat = repeat

    def get_iterator(self, name: str, offset: int = 0) -> Iterator[dict[str, Any]]:
        """Items of the dataset from the zero-based offset on.

        No row group that lies wholly before the offset is read. The first rows are decoded here,
        so that a bad name, offset or file is known at once.

        Raises:
            KeyError: no such dataset.
            ValueError: a negative offset, or without ``repeat`` one past the dataset's end.
            SourceError: the file is gone, damaged, or no longer the planned one.
        """
        if name not in self._catalog.index:
            raise KeyError(f"no dataset {name!r}; the catalog has {', '.join(self._catalog.index)}")
        dataset = self._catalog.datasets[self._catalog.index[name]]
        if offset < 0 or (offset > dataset.num_rows and not self._repeat):
            raise ValueError(
                f"dataset {name!r} has {dataset.num_rows} items; it cannot be opened at {offset}"
            )
        cursor = Cursor(self._catalog, dataset)
        if self._repeat or offset < dataset.num_rows:
            cursor.read(offset, 1)
        return self._items(cursor, dataset, offset)

    def _items(self, cursor: Cursor, dataset: Dataset, offset: int) -> Iterator[dict[str, Any]]:
        while self._repeat or offset < dataset.num_rows:
            left = dataset.num_rows - offset % dataset.num_rows
            for batch in cursor.read(offset, min(left, 256)):
                yield from batch.to_pylist()
                offset += batch.num_rows


class FileItems:
    """The items of one source file, as far as its dataset takes them: a child of a reservoir."""

    def __init__(self, catalog: Catalog, dataset: Dataset, file: SourceFile) -> None:
        self._catalog, self._dataset, self._file = catalog, dataset, file
        self._first, self._stop = dataset.taken(file)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.get_iterator(0)

    def get_iterator(self, offset: int) -> Iterator[dict[str, Any]]:
        """Items from the zero-based offset on; no row group that lies before it is decoded.

        Raises:
            SourceError: the file is gone, damaged, or not the planned one.
        """
        if self._first + offset >= self._stop:
            return
        rows = self._first + offset, self._stop
        for batch in read_file(self._catalog, self._dataset, self._file, *rows):
            yield from batch.to_pylist()


def children(catalog: Catalog) -> list[FileItems]:
    """Every source file in dataset and file order, as the children of a reservoir mixture."""
    return [
        FileItems(catalog, dataset, file) for dataset in catalog.datasets for file in dataset.files
    ]
