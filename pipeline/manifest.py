"""What a finished mix is: the manifest and its tables, written, published and read back."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mixcore import Mixture, State, WeightedMixture

from .errors import MixError
from .formats import Block
from .shard import Layout, ShardRecord, shard_name
from .storage import Folder

FORMAT_VERSION = "2.0"
ALGORITHM_VERSION = 1
MANIFEST = "manifest.json"
PLAN = "_mix/plan.json"
SCRATCH = "_mix/tmp"
LOCK = "_mix/lock"

_MAJOR = int(FORMAT_VERSION.split(".")[0])
_STATES_PER_GROUP = 1024
_MEND = "restore the file, or build with --overwrite"

SOURCES_SCHEMA = pa.schema(
    [
        ("dataset", pa.string()),
        ("path", pa.string()),
        ("bytes", pa.int64()),
        ("rows", pa.int64()),
        ("first_row", pa.int64()),
        ("digest", pa.string()),
        ("group_rows", pa.list_(pa.int64())),
        ("blocks", pa.list_(pa.struct([(name, pa.int64()) for name in Block._fields]))),
    ]
)
SHARDS_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("first_batch", pa.int64()),
        ("num_batches", pa.int64()),
        ("num_rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
    ]
)


class ManifestError(MixError):
    """A folder holds no finished mix, a newer one, or one whose tables are damaged."""


def exact(value: Any) -> Any:
    """The value with integers past 2^53 as strings, since JSON readers round them."""
    if isinstance(value, Mapping):
        return {key: exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [exact(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value)
    return value


def identity(value: Any) -> str:
    """Hex sha256 of a value's canonical JSON: sorted keys, no spaces, exact integers."""
    text = json.dumps(exact(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


READING = ("schema", "on_bad_line")
"""Keys of a dataset's entry, there only where set, that say how its files are read."""

DatasetIdentity = tuple[
    str, Mapping[str, str] | None, Sequence[int], Sequence[tuple[str, int]], Mapping[str, Any]
]
"""Of a dataset what its items depend on: name, columns, row range, (digest, rows) of each file, and
those of READING that are set."""


def order_identity(settings: Mapping[str, Any], datasets: Iterable[DatasetIdentity]) -> str:
    """What decides the order of items, as one digest.

    Length, and what happens at a dataset's end, only say where the order stops: neither is in it.
    """
    return identity(
        {
            "algorithm_version": ALGORITHM_VERSION,
            **settings,
            "datasets": [
                {
                    "name": name,
                    "columns": columns and list(columns.items()),
                    "rows": rows,
                    "files": files,
                    **reading,
                }
                for name, columns, rows, files, reading in datasets
            ],
        }
    )


def bytes_identity(
    order_id: str,
    schema: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    writer: Mapping[str, Any],
) -> str:
    """What decides the bytes of a shard that holds all its batches, as one digest."""
    shape = {key: value for key, value in layout.items() if key != "num_batches"}
    return identity(
        {
            "order_id": order_id,
            "format_version": FORMAT_VERSION,
            "schema": schema,
            "layout": shape,
            "writer": writer,
        }
    )


def to_json(value: Any) -> bytes:
    """JSON for people, in the order given, and the same bytes for the same value."""
    return (json.dumps(exact(value), indent=2, ensure_ascii=False) + "\n").encode()


def put_table(folder: Folder, kind: str, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
    """Store a table under ``_mix/``, its digest in its name; what the manifest says of it."""
    sink = io.BytesIO()
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        if writer is None:
            writer = pq.ParquetWriter(
                sink, batch.schema, compression="zstd", write_page_checksum=True
            )
        writer.write_batch(batch, row_group_size=max(1, batch.num_rows))
    assert writer is not None  # every table has at least one batch
    writer.close()
    data = sink.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    name = f"_mix/{kind}-{digest[:16]}.parquet"
    if folder.size(name) != len(data) or folder.read(name) != data:
        folder.put(name, data, flush=False)
    return {"path": name, "bytes": len(data), "sha256": digest}


def shards_table(records: Iterable[ShardRecord]) -> Iterator[pa.RecordBatch]:
    """The shards table in batches of bounded size."""
    records = iter(records)
    while block := list(islice(records, 1 << 16)):
        yield pa.RecordBatch.from_pydict(
            {
                "file": [shard_name(record.shard) for record in block],
                "first_batch": [record.first_batch for record in block],
                "num_batches": [record.num_batches for record in block],
                "num_rows": [record.num_rows for record in block],
                "bytes": [record.bytes for record in block],
                "sha256": [record.sha256 for record in block],
            },
            schema=SHARDS_SCHEMA,
        )


def states_table(mixture: Mixture, boundaries: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """The states table: a row a boundary, in batches of bounded size."""
    if isinstance(mixture, WeightedMixture):
        names = ["state_kind", "offsets", "remainder_carry"]
        wide = mixture.allocation.arithmetic != "int64"
        carry_type = pa.string() if wide else pa.int64()
        for offsets, carries in mixture.state_arrays(boundaries, _STATES_PER_GROUP):
            lists = [_lists(offsets, pa.int64()), _lists(carries, carry_type)]
            yield pa.record_batch([_kind(mixture, len(offsets)), *lists], names=names)
        return
    states = mixture.states(boundaries)
    while block := list(islice(states, _STATES_PER_GROUP)):
        texts = [json.dumps(state, sort_keys=True) for state in block]
        columns = [_kind(mixture, len(block)), pa.array(texts)]
        yield pa.record_batch(columns, names=["state_kind", "state"])


def _kind(mixture: Mixture, rows: int) -> pa.Array:
    return pa.array([mixture.state_kind] * rows)


def _lists(rows: NDArray[Any], type_: pa.DataType) -> pa.Array:
    """The rows of a matrix as lists, in a type that all its integers fit, or as decimal strings."""
    values: Any = rows.reshape(-1)
    if pa.types.is_string(type_):
        values = list(map(str, values.tolist()))
    ends = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(values, type_))


def value_at(document: Any, *path: str | int) -> Any:
    """What stands at a key path. Raises ValueError, which names the path, where nothing does."""
    value = document
    for place, key in enumerate(path):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{_path_text(path[: place + 1])} is missing") from None
    return value


def _path_text(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path).removeprefix(".")


def text_at(document: Any, *path: str | int) -> str:
    value = value_at(document, *path)
    if not isinstance(value, str):
        raise ValueError(f"{_path_text(path)} must be a string, found {value!r:.100}")
    return value


def count_at(document: Any, *path: str | int) -> int:
    """An integer of at least 1; past 2^53 it is written as a string."""
    value = value_at(document, *path)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{_path_text(path)} must be an integer above 0, found {value!r:.100}")
    return value


def each_at(document: Any, *path: str | int) -> range:
    """Places of a list that may not be empty."""
    value = value_at(document, *path)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{_path_text(path)} must be a list with entries, found {value!r:.100}")
    return range(len(value))


def _check(document: Any) -> None:
    """Hold what every reader relies on against its type. Raises ValueError, which names the key."""
    for key in ("order_id", "bytes_id"):
        text_at(document, key)
    for key in ("num_batches", "batches_per_shard", "batches_per_row_group"):
        count_at(document, "layout", key)
    if document["layout"].get("batches_per_step") is not None:
        count_at(document, "layout", "batches_per_step")
    text_at(document, "mixture", "kind")
    if value_at(document, "mixture", "rows_per_batch") is not None:
        count_at(document, "mixture", "rows_per_batch")
    for place in each_at(document, "datasets"):
        text_at(document, "datasets", place, "name")
    for place in each_at(document, "schema"):
        text_at(document, "schema", place, "name")
        text_at(document, "schema", place, "type")
    text_at(document, "writer", "pyarrow")
    tables = value_at(document, "tables")
    if not isinstance(tables, Mapping):
        raise ValueError(f"tables must map kinds to files, found {tables!r:.100}")
    for kind in tables:
        text_at(document, "tables", kind, "path")
        text_at(document, "tables", kind, "sha256")


@dataclass(frozen=True)
class Manifest:
    """A finished (or, while it is being built, planned) mix.

    ``document`` is the whole JSON; ``tables`` says of each table its path, bytes and sha256.
    ``rows_per_batch`` is None where batches differ.
    """

    document: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Folder) -> Manifest:
        """The manifest of a finished mix.

        Raises:
            ManifestError: there is none, it is damaged, or of a newer major format.
        """
        try:
            text = folder.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError) as error:
            unfinished = folder.size(PLAN) is not None
            hint = (
                "a build was begun there and has not finished: run `mixshards build` again"
                if unfinished
                else "expected the output folder of `mixshards build`"
            )
            raise ManifestError(
                f"{folder.root}: no {MANIFEST}, so no finished mix; {hint}"
            ) from error
        except OSError as error:
            raise ManifestError(f"{folder.root}/{MANIFEST}: cannot be read: {error}") from error
        return cls.decode(text, f"{folder.root}/{MANIFEST}")

    @classmethod
    def decode(cls, text: bytes, where: str) -> Manifest:
        """From JSON text.

        Raises:
            ManifestError: it is no manifest, or of an older or a newer major format.
        """
        try:
            document = json.loads(text)
            version = str(document["format_version"])
            major, *_ = map(int, version.split("."))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError(
                f"{where}: is no manifest of a mix ({error!r:.200}); {_MEND}"
            ) from error
        if major < _MAJOR:
            raise ManifestError(
                f"{where}: has format_version {version}, but this mixshards reads from {_MAJOR}.0 "
                "on, whose shards are sealed in another way; build the mix again, with --overwrite"
            )
        if major > _MAJOR:
            raise ManifestError(
                f"{where}: has format_version {version}, but this mixshards reads up to "
                f"{FORMAT_VERSION}; install a newer mixshards"
            )
        try:
            _check(document)
        except ValueError as error:
            raise ManifestError(f"{where}: is damaged: {error}; {_MEND}") from None
        return cls(document)

    def check_bytes_id(self, folder: Folder) -> None:
        """Hold layout, columns and writer options against ``bytes_id``, which shards hold too.

        Raises:
            ManifestError: one of them was changed.
        """
        document = self.document
        if document["format_version"] != FORMAT_VERSION:
            return  # another minor version may make it of other things
        made = bytes_identity(
            self.order_id, document["schema"], asdict(self.layout), document["writer"]
        )
        if made != self.bytes_id:
            raise ManifestError(
                f"{folder.root}/{MANIFEST}: is damaged: its bytes_id is not that of its order_id, "
                f"schema, layout and writer; {_MEND}"
            )

    @property
    def order_id(self) -> str:
        """Identity of the order of items: equal ids, equal batches."""
        return str(self.document["order_id"])

    @property
    def bytes_id(self) -> str:
        """Identity of the shards' bytes."""
        return str(self.document["bytes_id"])

    @property
    def rows_per_batch(self) -> int | None:
        """Rows in every batch, or None where batches differ."""
        rows = self.document["mixture"]["rows_per_batch"]
        return None if rows is None else int(rows)

    @functools.cached_property
    def layout(self) -> Layout:
        """How batches fall into shards and row groups."""
        shape = self.document["layout"]
        step = shape.get("batches_per_step")
        # Integers past 2^53 come as strings.
        return Layout(
            int(shape["num_batches"]),
            int(shape["batches_per_shard"]),
            int(shape["batches_per_row_group"]),
            None if step is None else int(step),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Dataset names in configured order."""
        return tuple(dataset["name"] for dataset in self.document["datasets"])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the shards' columns: the payload's, then provenance."""
        return tuple(column["name"] for column in self.document["schema"])

    def group_rows(self, shard: int) -> list[int] | None:
        """Rows of each row group of a shard, None where batches differ in size."""
        if self.rows_per_batch is None:
            return None
        _, batches = self.layout.shard(shard)
        return [(stop - start) * self.rows_per_batch for start, stop in self.layout.groups(batches)]

    def table(self, folder: Folder, kind: str, columns: list[str] | None = None) -> pa.Table:
        """One of the mix's tables, held against its digest.

        Raises:
            ManifestError: it is missing or damaged.
        """
        data = self.table_bytes(folder, kind)
        try:
            # No threads of Arrow's: one that is still at work when Python ends aborts it.
            file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
            return file.read(columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise self._no_table(folder, kind, error) from error

    def _no_table(self, folder: Folder, kind: str, error: Exception) -> ManifestError:
        path = self.document["tables"][kind]["path"]
        return ManifestError(
            f"{folder.root}/{path}: is no table of {kind}: {error!r:.200}; {_MEND}"
        )

    def table_bytes(self, folder: Folder, kind: str) -> bytes:
        """A table's file, held against its digest.

        Raises:
            ManifestError: it is missing or damaged.
        """
        if kind not in self.document["tables"]:
            raise ManifestError(f"{folder.root}/{MANIFEST}: is damaged: tables.{kind} is missing")
        entry = self.document["tables"][kind]
        try:
            data = folder.read(entry["path"])
        except (OSError, ValueError, MixError) as error:
            raise ManifestError(
                f"{folder.root}/{entry['path']}: cannot be read, as the manifest's table of "
                f"{kind}: {error}; {_MEND}"
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != entry["sha256"]:
            raise ManifestError(
                f"{folder.root}/{entry['path']}: is damaged: sha256 {found[:16]}.., the manifest "
                f"says {entry['sha256'][:16]}..; {_MEND}"
            )
        return data

    def shards(self, folder: Folder) -> list[ShardRecord]:
        """A record a shard, from the shards table.

        Raises:
            ManifestError: the table is missing or damaged.
        """
        table = self.table(folder, "shards")
        if table.schema != SHARDS_SCHEMA or any(c.null_count for c in table.columns):
            raise self._no_table(folder, "shards", ValueError("other columns, or nulls in them"))
        columns = table.to_pydict()
        try:
            return [
                ShardRecord(shard, *row)
                for shard, row in enumerate(
                    zip(*(columns[name] for name in SHARDS_SCHEMA.names[1:]), strict=True)
                )
            ]
        except ValueError as error:
            raise self._no_table(folder, "shards", error) from error

    def states(self, folder: Folder) -> States:
        """The states at all boundaries.

        Raises:
            ManifestError: the table is missing or damaged.
        """
        data = self.table_bytes(folder, "states")
        try:
            return States(self.names, data)
        except (pa.ArrowException, OSError) as error:
            raise self._no_table(folder, "states", error) from error


class States:
    """The states at a mix's boundaries by shard number; one row group is decoded at a time.

    May be shared by threads.
    """

    def __init__(self, names: tuple[str, ...], data: bytes) -> None:
        self._names = names
        self._file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        self._lock = threading.Lock()
        self._group = -1
        self._rows: pa.Table = None

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, boundary: int) -> State:
        """State just before a shard; the last boundary is the end of the mix.

        Raises:
            IndexError: there is no such boundary.
            ManifestError: what stands there is no state.
        """
        if not 0 <= boundary < len(self):
            raise IndexError(f"boundary {boundary} is outside 0..{len(self) - 1}")
        try:
            return self._state(*divmod(boundary, _STATES_PER_GROUP))
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
            raise ManifestError(
                f"the states table holds no state at boundary {boundary}: {error!r:.200}; restore "
                "the mix's files, or build with --overwrite"
            ) from error

    def _state(self, group: int, place: int) -> State:
        with self._lock:
            if group != self._group:
                self._rows = self._file.read_row_group(group, use_threads=False)
                self._group = group
            row = self._rows.slice(place, 1).to_pylist()[0]
        if "state" in row:
            state: State = json.loads(row["state"])
            return state
        carries = map(int, row["remainder_carry"])
        return {
            "offsets": dict(zip(self._names, row["offsets"], strict=True)),
            "remainder_carry": dict(zip(self._names, carries, strict=True)),
        }
