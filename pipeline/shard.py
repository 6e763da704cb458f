"""What a shard file is: its schema, name, footer and row groups, for all who write or read one."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mixcore import RowMap

from .arrow_types import large
from .errors import MixError
from .pages import HEADER_BYTES, PageHeader, decode_index, index_pages

MIX_BATCH, MIX_DATASET, MIX_ROW, MIX_EPOCH = "mix_batch", "mix_dataset", "mix_row", "mix_epoch"

PROVENANCE = pa.schema(
    [
        pa.field(MIX_BATCH, pa.int64(), nullable=False),
        pa.field(MIX_DATASET, pa.string(), nullable=False),
        pa.field(MIX_ROW, pa.int64(), nullable=False),
        pa.field(MIX_EPOCH, pa.int32(), nullable=False),
    ]
)
"""Where a row comes from: batch, dataset, position in the dataset, how often it was read before."""

SHARDS = "shards"
MAX_SHARDS = 10**8
_FOOTER_KEY = b"mixshards"
_SEAL = b"MIXSEAL2"
_COUNT_BYTES = 8
_SEAL_BYTES = len(_SEAL) + _COUNT_BYTES + hashlib.sha256().digest_size
_END_BYTES = 8  # length of the footer, and the magic
_TAIL_BYTES = 64 << 10  # read at once, since mostly the footer lies in it
# A page is measured only once so many values are in it, 1,024 by default, and at 2 GiB it fails;
# texts of these types may have many megabytes each.
_FEW_VALUES = 16
_LONG = ("large_string", "large_binary")
_SPREAD = ("INT32", "INT64", "FLOAT", "DOUBLE")


class ShardError(MixError):
    """A shard is missing, damaged, or not the one that stands at its place."""


class ColumnSizeError(ShardError):
    """A column of a row group takes more than one array of its type can hold."""


def shard_name(index: int) -> str:
    """Name of a shard in its mix."""
    return f"{SHARDS}/shard-{index:08d}.parquet"


def shard_schema(payload: pa.Schema) -> pa.Schema:
    """Payload columns, then provenance.

    Raises:
        ShardError: a payload column has a provenance column's name.
    """
    taken = [name for name in payload.names if name in PROVENANCE.names]
    if taken:
        raise ShardError(
            f"the sources have a column named {taken[0]!r}, which the shards use for provenance; "
            f"give it another name with `columns: {{my_{taken[0]}: {taken[0]}, ..}}`"
        )
    return pa.schema([*payload, *PROVENANCE])


def describe(schema: pa.Schema) -> list[dict[str, Any]]:
    """The schema as JSON for people: name, type and nullability of each column."""
    return [
        {"name": field.name, "type": str(field.type), "nullable": field.nullable}
        for field in schema
    ]


@dataclass(frozen=True)
class Layout:
    """How batches fall into shards and row groups."""

    num_batches: int
    batches_per_shard: int
    batches_per_row_group: int
    batches_per_step: int | None = None

    @property
    def num_shards(self) -> int:
        """How many shards; only the last may hold fewer batches."""
        return -(-self.num_batches // self.batches_per_shard)

    def shard(self, index: int) -> tuple[int, int]:
        """First batch of a shard, and how many it holds."""
        first = index * self.batches_per_shard
        return first, min(self.batches_per_shard, self.num_batches - first)

    def boundaries(self) -> Iterable[int]:
        """First batch of every shard, and the end of the mix."""
        yield from range(0, self.num_batches, self.batches_per_shard)
        yield self.num_batches

    def groups(self, num_batches: int) -> list[tuple[int, int]]:
        """Batches (first, past the last) of each row group of a shard, numbered in the shard."""
        size = self.batches_per_row_group
        return [(at, min(at + size, num_batches)) for at in range(0, num_batches, size)]


@dataclass(frozen=True)
class WriterOptions:
    """All that decides how rows become bytes, besides the rows."""

    compression: str
    compression_level: int | None
    pyarrow: str = pa.__version__

    def for_writer(self, schema: pa.Schema) -> dict[str, Any]:
        """Arguments of ParquetWriter.

        Numbers inside lists (tokens, features) are byte-stream-split: on real tokens that is a
        quarter smaller than a dictionary under the same zstd level, and written faster. Text and
        lists have no statistics: in a mix no row group could be passed over for them.
        """
        plain, split = _leaves(schema)
        told = [field.name for field in schema if _has_order(field.type)]
        long = any(kind in str(field.type) for field in schema for kind in _LONG)
        return {
            "write_batch_size": _FEW_VALUES if long else None,
            "compression": self.compression,
            "compression_level": self.compression_level,
            "use_dictionary": plain,
            "use_byte_stream_split": split,
            "write_statistics": [*told, MIX_DATASET],
            "write_page_checksum": True,
            "version": "2.6",
            "data_page_version": "1.0",
        }


@functools.lru_cache(maxsize=8)
def _empty(schema: pa.Schema) -> pq.ParquetFile:
    """A Parquet file of the schema, without rows."""
    sink = io.BytesIO()
    pq.ParquetWriter(sink, schema).close()
    return pq.ParquetFile(io.BytesIO(sink.getvalue()))


def as_read_back(schema: pa.Schema) -> pa.Schema:
    """The schema that Parquet gives back: it has its own names for what lies inside a map."""
    return _empty(schema).schema_arrow.remove_metadata()


def _has_order(kind: pa.DataType) -> bool:
    """Whether a column is flat and of a fixed width, so that its bounds are cheap and small."""
    return bool(pa.types.is_primitive(kind))


def _leaves(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """Parquet paths of the leaf columns: those left to dictionaries, those byte-stream-split."""
    columns = _empty(schema).metadata.schema
    plain: list[str] = []
    split: list[str] = []
    for column in map(columns.column, range(len(columns))):
        spread = column.max_repetition_level > 0 and column.physical_type in _SPREAD
        (split if spread else plain).append(column.path)
    return plain, split


@dataclass(frozen=True)
class Footer:
    """What a shard says of itself."""

    bytes_id: str
    shard: int
    first_batch: int
    num_batches: int

    def encode(self) -> dict[bytes, bytes]:
        """As Parquet key-value metadata."""
        return {_FOOTER_KEY: json.dumps(asdict(self), sort_keys=True).encode()}

    @classmethod
    def decode(cls, metadata: Mapping[bytes, bytes] | None, where: str) -> Footer:
        """From Parquet key-value metadata.

        Raises:
            ShardError: the file is no shard.
        """
        try:
            return cls(**json.loads((metadata or {})[_FOOTER_KEY]))
        except (KeyError, TypeError, ValueError) as error:
            raise ShardError(f"{where}: is a Parquet file, but no shard of a mix") from error


@dataclass(frozen=True)
class ShardRecord:
    """A shard that stands in its place: a row of the shards table.

    ``bytes`` is the file's size and ``sha256`` (hex) its digest.
    """

    shard: int
    first_batch: int
    num_batches: int
    num_rows: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if len(self.sha256) != 64:
            raise ValueError(f"a sha256 has 64 hex digits, not {self.sha256!r}")


def one_chunk(table: pa.Table) -> pa.Table:
    """The table with one chunk a column at most: Parquet bytes follow the chunking.

    Raises:
        ColumnSizeError: a column takes more than one array of its type can hold.
    """
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.num_chunks > 1:
            try:
                # A table's own combine_chunks leaves two chunks of text where one would overflow.
                column = pa.chunked_array([column.combine_chunks()], field.type)
            except pa.ArrowInvalid as error:
                raise ColumnSizeError(
                    f"column {field.name!r} of type {field.type} takes {column.nbytes:,} bytes in "
                    f"{table.num_rows:,} rows that are held together, and one array of that type "
                    f"cannot hold them; give it a type that can, with `schema: {{{field.name}: "
                    f"{large(field.type)}}}` in a dataset, or set fewer batches_per_row_group"
                ) from error
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)


def write_shard(
    path: str, schema: pa.Schema, options: WriterOptions, footer: Footer, groups: Iterable[pa.Table]
) -> None:
    """Write tables as a shard's row groups, one each.

    Each table is brought to one chunk a column first.

    Raises:
        ColumnSizeError: a column of a table is too large for that.
        PageError: what was written is not made of pages with checksums.
    """
    with pq.ParquetWriter(path, schema, **options.for_writer(schema)) as writer:
        for table in groups:
            writer.write_table(one_chunk(table), row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata(footer.encode())
    index = index_pages(path)
    with open(path, "r+b") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(size - _END_BYTES)
        begin = size - _END_BYTES - int.from_bytes(file.read(4), "little")
        file.seek(begin)
        tail = file.read()
        file.seek(begin)
        file.write(_seal(index, tail[:-_END_BYTES], size + len(index) + _SEAL_BYTES) + tail)


def _seal(index: bytes, footer: bytes, size: int) -> bytes:
    """What stands before the footer in a shard of a size: page index, mark, pages, digest."""
    digest = hashlib.sha256(index + footer + size.to_bytes(8, "little")).digest()
    count = len(index) // HEADER_BYTES
    return index + _SEAL + count.to_bytes(_COUNT_BYTES, "little") + digest


def _sealed(file: pa.NativeFile, where: str) -> tuple[bytes, bytes]:
    """The page index of a shard, and its end from the footer on, held against their seal.

    Raises:
        ShardError: the file is truncated, damaged or no shard.
    """
    size = file.size()
    tail = _longer_tail(file, size, b"", _TAIL_BYTES)
    length = int.from_bytes(tail[-8:-4], "little") + _END_BYTES
    if tail[-4:] != b"PAR1" or length + _SEAL_BYTES > size:
        raise ShardError(
            f"{where}: cannot be opened as Parquet: {size} bytes that end with {tail[-8:]!r}"
        )
    sealed = length + _SEAL_BYTES
    if sealed > len(tail):  # an index is mostly smaller than the footer
        tail = _longer_tail(file, size, tail, sealed + length)
    if not tail.startswith(_SEAL, len(tail) - sealed):
        raise ShardError(f"{where}: is a Parquet file, but no shard of a mix")
    at = len(tail) - sealed + len(_SEAL)
    whole = sealed + HEADER_BYTES * int.from_bytes(tail[at : at + _COUNT_BYTES], "little")
    if whole <= size:
        tail = _longer_tail(file, size, tail, whole)
        index, end = tail[-whole:-sealed], tail[-length:]
        if tail[-whole:-length] == _seal(index, end[:-_END_BYTES], size):
            return index, end
    raise ShardError(f"{where}: is damaged: its footer or page index is not what was sealed")


def _longer_tail(file: pa.NativeFile, size: int, tail: bytes, count: int) -> bytes:
    """The end of a file of which some bytes are known: ``count`` or more, if it has so many."""
    lacking = min(size, count) - len(tail)
    if lacking <= 0:
        return tail
    return bytes(file.read_at(lacking, size - len(tail) - lacking)) + tail


class Shard(NamedTuple):
    """A shard open for reading, and what its seal vouches for."""

    file: pa.NativeFile
    parquet: pq.ParquetFile
    footer: Footer
    pages: list[PageHeader]


def open_shard(file: pa.NativeFile | str, where: str, **options: Any) -> Shard:
    """A shard for reading, its footer and page index read and held against its seal.

    Raises:
        ShardError: the file is truncated, damaged or no shard.
    """
    try:
        file = pa.OSFile(file) if isinstance(file, str) else file
        index, end = _sealed(file, where)
        # A footer that is damaged never comes to Arrow, which some of them bring down.
        metadata = pq.read_metadata(pa.BufferReader(end))
        parquet = pq.ParquetFile(file, metadata=metadata, **options)
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ShardError(f"{where}: cannot be opened as Parquet: {error}") from error
    footer = Footer.decode(metadata.metadata, where)
    return Shard(file, parquet, footer, decode_index(index))


def check_shard(shard: Shard, expected: Footer, group_rows: list[int] | None, where: str) -> None:
    """Hold an open shard's footer and row groups (None: of unknown sizes) against the plan.

    Raises:
        ShardError: it is another plan's, stands in another place, or has other row groups.
    """
    found = shard.footer
    if found.bytes_id != expected.bytes_id:
        raise ShardError(
            f"{where}: belongs to another build: its bytes_id is {found.bytes_id[:16]}.., "
            f"expected {expected.bytes_id[:16]}.."
        )
    if found != expected:
        raise ShardError(
            f"{where}: holds batches {found.first_batch} to "
            f"{found.first_batch + found.num_batches} as shard {found.shard}; expected batches "
            f"{expected.first_batch} to {expected.first_batch + expected.num_batches} "
            f"as shard {expected.shard}"
        )
    metadata = shard.parquet.metadata
    rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if group_rows is not None and rows != group_rows:
        raise ShardError(
            f"{where}: has {sum(rows)} rows in {len(rows)} row groups, "
            f"expected {sum(group_rows)} in {len(group_rows)}"
        )


def file_sha256(file: Any) -> tuple[str, int]:
    """Hex sha256 and size of an open file, read in pieces of 1 MiB."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def provenance(rows: RowMap, first_batch: int, names: pa.Array) -> list[pa.Array]:
    """The provenance columns of rows whose batch 0 is numbered ``first_batch`` in the mix.

    ``names`` are the datasets' in configured order.
    """
    count = rows.count
    ends = np.cumsum(count)
    row = np.arange(rows.num_rows) + np.repeat(rows.start - (ends - count), count)
    return [
        pa.array(np.repeat(rows.batch + first_batch, count)),
        names.take(pa.array(np.repeat(rows.dataset, count))),
        pa.array(row),
        pa.array(np.repeat(rows.epoch, count)),
    ]
