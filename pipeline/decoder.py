"""Row groups of a finished mix as tables, each held against the manifest before it is used."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import ReaderError
from .manifest import Manifest
from .pad import PadError, pad_value
from .pages import PageError, check_pages, leaves_of
from .shard import (
    MIX_BATCH,
    Footer,
    Shard,
    ShardError,
    check_shard,
    describe,
    open_shard,
    shard_name,
)
from .storage import Folder, is_unreachable

_MEND = "`mixshards verify` lists all faults, and building again mends them"


class Group(NamedTuple):
    """A decoded row group: batch ``first + i`` is rows ``edges[i]`` to ``edges[i + 1]``."""

    table: pa.Table
    first: int
    edges: Sequence[int]

    def batch(self, n: int) -> pa.Table:
        """Batch n of the mix, which lies in this group."""
        place = n - self.first
        start, stop = self.edges[place], self.edges[place + 1]
        return self.table.slice(start, stop - start)


def checked_columns(columns: Sequence[str] | None, manifest: Manifest) -> Sequence[str]:
    """The names of columns that are asked for; None asks for all.

    Raises:
        ReaderError: they are no names, or none of the mix's.
    """
    known = manifest.columns
    if columns is None:
        return known
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ReaderError(
            f"columns must be a list of names, such as [{known[0]!r}], found {columns!r}"
        )
    names = list(columns)
    for name in names:
        if name not in known:
            raise ReaderError(f"no column {name!r}; the mix has {', '.join(known)}")
    return names


class Decoder:
    """Decodes row groups of a mix. One open shard, one thread."""

    def __init__(self, folder: Folder, manifest: Manifest, columns: Sequence[str] | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._layout = manifest.layout
        names = checked_columns(columns, manifest)
        self._columns = self._decoded = None if columns is None else list(names)
        if self._columns is not None and manifest.rows_per_batch is None:
            # Where batches differ in size, this column says where each begins.
            self._decoded = [*self._columns, MIX_BATCH]
        self._last: tuple[tuple[int, int], Group] | None = None
        self._open: tuple[tuple[int, int], Shard] | None = None
        self._leaves: Container[int] = ()  # of the decoded columns, the same in every shard

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with no shard open."""
        return Decoder, (self._folder, self._manifest, self._columns)

    def anew(self) -> Decoder:
        """The same with no shard open."""
        return Decoder(self._folder, self._manifest, self._columns)

    @property
    def local(self) -> bool:
        """Whether shards lie on this machine's file system."""
        return self._folder.local

    def schema(self, n: int) -> pa.Schema:
        """All columns, as the shard of batch n has them."""
        return self._shard(self.group_of(n)[0]).parquet.schema_arrow.remove_metadata()

    def pad_values(self, pad: Mapping[str, object], n: int) -> dict[str, np.generic]:
        """The value of each padded column in its dtype, which the shard of batch n tells.

        Raises:
            ReaderError: there is no such column, or its type or value is none to pad with.
            ShardError: the shard is gone, damaged or not the one that belongs there.
        """
        if not isinstance(pad, Mapping):
            raise ReaderError(
                f"pad must map names of columns to values, such as {{'features': 0.0}}, "
                f"found {pad!r}"
            )
        known = self._manifest.columns
        for name in pad:
            if name not in known:
                raise ReaderError(f"pad: no column {name!r}; the mix has {', '.join(known)}")
            if self._columns is not None and name not in self._columns:
                raise ReaderError(f"pad: column {name!r} is not among columns={self._columns}")
        # Another decoder, so that its shard closes at once.
        schema = self.anew().schema(n)
        values = {}
        for name, value in pad.items():
            kind = schema.field(name).type
            try:
                values[name] = pad_value(kind, value)
            except PadError as error:
                raise ReaderError(f"pad: column {name!r} of type {kind}: {error}") from error
        return values

    def group_of(self, n: int) -> tuple[int, int]:
        """Shard and row group in which batch n lies."""
        shard, place = divmod(n, self._layout.batches_per_shard)
        return shard, place // self._layout.batches_per_row_group

    def batch(self, n: int) -> pa.Table:
        """Batch n, whole. The row group that it lies in is kept for the next call.

        Raises:
            ShardError: as ``decode`` does.
        """
        key = self.group_of(n)
        # One tuple, taken and set at once, so that threads may share a reader.
        last = self._last
        if last is None or last[0] != key:
            last = self._last = (key, self.decode(key))
        return last[1].batch(n)

    def decode(self, key: tuple[int, int]) -> Group:
        """A row group as a table, and where its batches begin.

        Raises:
            ShardError: the shard is gone, damaged or not the one that belongs there.
        """
        shard, group = key
        opened = self._shard(shard)
        try:
            footer = opened.parquet.metadata
            if group >= footer.num_row_groups:
                raise PageError(f"the shard has only {footer.num_row_groups} row groups")
            held = footer.row_group(group)
            if self._folder.local:  # elsewhere a request a page, and a store has its own checksums
                schema = opened.parquet.schema
                check_pages(opened.file, opened.pages, schema, group, self._leaves)
            table = opened.parquet.read_row_group(group, columns=self._decoded)
            if table.num_rows != held.num_rows:
                raise PageError(f"{table.num_rows} rows can be read, expected {held.num_rows}")
        except (pa.ArrowException, OSError, PageError) as error:
            where = self._where(key)
            if is_unreachable(error):
                raise ShardError(f"{where} cannot be read: {error}") from error
            raise ShardError(f"{where} is damaged: {error}; {_MEND}") from error
        first, batches = self._layout.shard(shard)
        begin = first + group * self._layout.batches_per_row_group
        end = min(begin + self._layout.batches_per_row_group, first + batches)
        rows = self._manifest.rows_per_batch
        if rows is not None:
            edges: Sequence[int] = range(0, (end - begin + 1) * rows, rows)
        else:
            numbers = np.from_dlpack(table.column(MIX_BATCH).combine_chunks())
            places = np.searchsorted(numbers, np.arange(begin, end + 1))
            expected = np.repeat(np.arange(begin, end), np.diff(places))
            # Elsewhere the number of rows tells; here only this column does.
            if not np.array_equal(numbers, expected):
                raise ShardError(
                    f"{self._where(key)} holds other rows than batches {begin} to {end}; {_MEND}"
                )
            edges = places.tolist()
        return Group(table if self._columns is None else table.select(self._columns), begin, edges)

    def _where(self, key: tuple[int, int]) -> str:
        shard, group = key
        return f"{self._folder.root}/{shard_name(shard)}: row group {group}"

    def _shard(self, shard: int) -> Shard:
        last = self._open
        key = os.getpid(), shard  # a forked process opens files of its own
        if last is not None and last[0] == key:
            return last[1]
        name = shard_name(shard)
        where = f"{self._folder.root}/{name}"
        try:
            file = self._folder.open(name)
        except OSError as error:
            mend = "" if is_unreachable(error) else f"; {_MEND}"
            raise ShardError(f"{where}: cannot be opened: {error}{mend}") from error
        try:
            opened = open_shard(
                file, where, pre_buffer=not self._folder.local, page_checksum_verification=True
            )
            first, batches = self._layout.shard(shard)
            expected = Footer(self._manifest.bytes_id, shard, first, batches)
            check_shard(opened, expected, self._manifest.group_rows(shard), where)
        except ShardError as error:
            if error.__cause__ is not None and is_unreachable(error.__cause__):
                raise
            raise ShardError(f"{error}; {_MEND}") from error
        self._check_schema(opened.parquet, where)
        self._leaves = leaves_of(opened.parquet.schema, self._decoded)
        self._open = (key, opened)
        return opened

    def _check_schema(self, parquet: pq.ParquetFile, where: str) -> None:
        """Hold a shard's columns against the manifest."""
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
