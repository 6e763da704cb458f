"""Hold a finished mix against its manifest and its mixture; say what stands in it and whence."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mixcore import Mixture, RowMap, State

from .errors import MixError
from .manifest import (
    ALGORITHM_VERSION,
    FORMAT_VERSION,
    MANIFEST,
    PLAN,
    READING,
    SOURCES_SCHEMA,
    Manifest,
    ManifestError,
    bytes_identity,
    exact,
    order_identity,
    text_at,
)
from .mixtures import LENGTHS, mixture_of, order_settings
from .shard import (
    PROVENANCE,
    SHARDS,
    Footer,
    ShardError,
    ShardRecord,
    as_read_back,
    check_shard,
    describe,
    file_sha256,
    open_shard,
    provenance,
    shard_name,
)
from .storage import Folder, in_threads

if TYPE_CHECKING:
    from .gather import RunWriter


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a mix: the file (relative to the mix) and the reason."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


_TABLES = ("sources", "shards", "states")
_KNOWN = (*_TABLES, LENGTHS)


def verify(path: str | os.PathLike[str], sources: bool = False, threads: int = 2) -> list[Fault]:
    """All faults of a mix, [] for a whole one.

    Checks tables and shards: that they are there, their sizes, digests, page checksums, row counts
    and schema, that nothing else lies among them, that the boundary states are the mixture's, and
    that every row's provenance is what the mixture gives that place, and that the plan, where it
    still lies there, says the same. With ``sources`` every shard is also written anew from the
    source files, where these lie as planned, and its digest compared: that reads all there is.

    Raises:
        ManifestError: there is no finished mix, or its manifest cannot be read.
    """
    folder = Folder.at(os.fspath(path))
    manifest = Manifest.load(folder)
    algorithm = manifest.document.get("algorithm_version")
    if algorithm != ALGORITHM_VERSION:
        raise ManifestError(
            f"{folder.root}/{MANIFEST}: has algorithm_version {algorithm!r}, but this mixshards "
            f"knows {ALGORITHM_VERSION}; verify with the mixshards that built the mix"
        )
    faults: list[Fault] = []
    for kind in dict.fromkeys([*_TABLES, *manifest.document["tables"]]):
        try:
            # Of a table that a newer minor version added, only the bytes are known.
            (manifest.table if kind in _KNOWN else manifest.table_bytes)(folder, kind)
        except MixError as error:
            entry = manifest.document["tables"].get(kind)
            faults.append(Fault(entry["path"] if entry else MANIFEST, str(error)))
            continue
        entry = manifest.document["tables"][kind]
        size = folder.size(entry["path"])
        if entry.get("bytes", size) != size or (kind in _KNOWN and "bytes" not in entry):
            reason = f"has tables.{kind}.bytes {entry.get('bytes')!r}, but the file has {size}"
            faults.append(Fault(MANIFEST, reason))
    if faults:
        return faults
    mixture = mixture_of(manifest, folder)
    if manifest.rows_per_batch != mixture.rows_per_batch:
        reason = (
            f"has mixture.rows_per_batch {manifest.rows_per_batch}, but the mixture gives "
            f"{mixture.rows_per_batch}"
        )
        return [Fault(MANIFEST, reason)]
    faults.extend(_counts(folder, manifest))
    if faults:
        return faults
    faults.extend(_sources(folder, manifest))
    if not faults:
        faults.extend(_identities(folder, manifest))
    faults.extend(_strays(folder, manifest))
    check = _Check(folder, manifest, mixture)
    faults.extend(check.states())
    records = manifest.shards(folder)
    for found in in_threads(check.shard, records, threads):
        faults.extend(found)
    if not faults:
        faults.extend(_plan(folder, manifest))
    if sources:
        faults.extend(_against_sources(folder, records))
    return faults


def _counts(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    """The shards table held against the layout, and the manifest's totals against the table."""
    layout = manifest.layout
    name = manifest.document["tables"]["shards"]["path"]
    try:
        records = manifest.shards(folder)
    except MixError as error:
        yield Fault(name, str(error))
        return
    if len(records) != layout.num_shards:
        yield Fault(
            name,
            f"has {len(records)} rows, but the manifest's layout makes {layout.num_shards} shards",
        )
        return
    files = manifest.table(folder, "shards", ["file"]).column(0).to_pylist()
    for record, file in zip(records, files, strict=True):
        first, batches = layout.shard(record.shard)
        rows = manifest.group_rows(record.shard)
        found = (file, record.first_batch, record.num_batches, record.num_rows)
        expected = (
            shard_name(record.shard),
            first,
            batches,
            record.num_rows if rows is None else sum(rows),
        )
        if found != expected:
            yield Fault(
                name,
                f"row {record.shard} has file, first_batch, num_batches and num_rows {found}, "
                f"by the manifest {expected}",
            )
    totals = {
        "num_shards": len(records),
        "num_rows": sum(record.num_rows for record in records),
        "num_bytes": sum(record.bytes for record in records),
    }
    for key, total in exact(totals).items():
        if manifest.document.get(key) != total:
            yield Fault(
                MANIFEST,
                f"has {key} {manifest.document.get(key)!r}, but the shards table gives {total}",
            )


def _plan(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    """Where the plan that the mix was built by says otherwise; a mix may have come without it."""
    try:
        saved = json.loads(folder.read(PLAN))
        text = saved["schema"]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
        planned, _ = saved["manifest"], text_at(saved, "base")
        columns = describe(as_read_back(pa.schema([*schema, *PROVENANCE])))
        again = base64.b64encode(schema.serialize().to_pybytes()).decode()
        # Another pyarrow may write the same with other words.
        if manifest.document["writer"]["pyarrow"] == pa.__version__ and (
            columns != manifest.document["schema"] or again != text
        ):
            raise ValueError(f"it has the columns {columns}")
        found = {**manifest.document, "tables": dict(manifest.document["tables"])}
        del found["tables"]["shards"], found["num_bytes"]  # known only once all is written
        differing = [*_differing(planned, found, "")]
    except FileNotFoundError:
        return
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        pa.ArrowException,
    ) as error:
        yield Fault(PLAN, f"is no plan of this mix: {_told(error)}; build again, which mends it")
        return
    for path, there, here in differing[:1]:
        yield Fault(
            MANIFEST,
            f"has {path} {here!r:.100}, but {PLAN}, by which it was built, has {there!r:.100}; "
            "build again, which mends both",
        )


def _differing(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Key paths at which two JSON values differ, and what is there."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            inner = f"{path}.{key}" if path else key
            if key in a and key in b:
                yield from _differing(a[key], b[key], inner)
            else:
                yield inner, a.get(key, "no such key"), b.get(key, "no such key")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, pair in enumerate(zip(a, b, strict=True)):
            yield from _differing(*pair, f"{path}[{place}]")
    elif a != b or type(a) is not type(b):
        yield path, a, b


def _against_sources(folder: Folder, records: list[ShardRecord]) -> Iterator[Fault]:
    # Only this needs what building needs, so a trainer's install can do all the rest.
    from .gather import RunWriter
    from .planned import Plan
    from .stage import staged

    with contextlib.ExitStack() as stack:
        try:
            plan = Plan.load(folder)
            catalog = stack.enter_context(staged(plan.catalog))
            writer = RunWriter(replace(plan, catalog=catalog))
        except Exception as error:  # whatever a damaged plan brings forth
            yield Fault(PLAN, f"cannot be used to write the shards anew: {_told(error)}")
            return
        yield from _written_anew(writer, records)


def _written_anew(writer: RunWriter, records: list[ShardRecord]) -> Iterator[Fault]:
    """The shards that are not what their sources give."""
    failed: dict[str, list[int]] = {}
    shard = 0
    while shard < len(records):
        try:
            for at, sha256 in writer.rehash(shard, len(records)):
                if sha256 != records[at].sha256:
                    yield Fault(
                        shard_name(at),
                        f"is not what its sources give: written anew it has sha256 {sha256}, "
                        f"recorded is {records[at].sha256}",
                    )
                shard = at + 1
        except Exception as error:
            failed.setdefault(_told(error), []).append(shard)
            shard += 1
    for reason, shards in failed.items():
        more = f" (and {len(shards) - 1} more shards)" if len(shards) > 1 else ""
        yield Fault(shard_name(shards[0]), f"cannot be written anew{more}: {reason}")


def _told(error: Exception) -> str:
    """What a person reads of an error; of one that is not ours, its kind as well."""
    return str(error) if isinstance(error, MixError | OSError) else repr(error)


def _sources(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    """Where the sources table does not give each dataset the rows that the manifest says."""
    name = manifest.document["tables"]["sources"]["path"]
    table = manifest.table(folder, "sources")
    if table.schema != SOURCES_SCHEMA:
        yield Fault(name, f"has columns {table.schema.names}, expected {SOURCES_SCHEMA.names}")
        return
    files: dict[str, list[tuple[int, int]]] = {}
    for row in table.select(["dataset", "first_row", "rows"]).to_pylist():
        files.setdefault(row["dataset"], []).append((row["first_row"], row["rows"]))
    if tuple(files) != manifest.names:
        yield Fault(name, f"has the datasets {[*files]}, the manifest {[*manifest.names]}")
        return
    for entry in manifest.document["datasets"]:
        try:
            start, stop = map(int, entry["row_range"])
            ends = list(itertools.accumulate(rows for _, rows in files[entry["name"]]))
            begins = [begin for begin, _ in files[entry["name"]]]
            whole = begins == [end - start for end in [0, *ends[:-1]]] and stop <= ends[-1]
            if not whole or stop - start != int(entry["rows"]):
                raise MixError(f"rows {start} to {stop} are asked of files that hold {ends[-1]}")
        except (MixError, LookupError, TypeError, ValueError) as error:
            reason = (
                f"dataset {entry['name']!r}: its files do not give its rows as the manifest has "
            )
            reason += f"them: {_told(error)}"
            yield Fault(name, reason)


def _identities(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    """Where the manifest's identities are not those of what it says."""
    document = manifest.document
    files: dict[str, list[tuple[str, int]]] = {}
    for row in manifest.table(folder, "sources", ["dataset", "digest", "rows"]).to_pylist():
        files.setdefault(row["dataset"], []).append((row["digest"], row["rows"]))
    try:
        order_id = order_identity(
            order_settings(document),
            [
                (
                    entry["name"],
                    entry["columns"],
                    [int(row) for row in entry["row_range"]],
                    files[entry["name"]],
                    {key: entry[key] for key in READING if key in entry},
                )
                for entry in document["datasets"]
            ],
        )
        layout, writer = asdict(manifest.layout), document["writer"]
        bytes_id = bytes_identity(order_id, document["schema"], layout, writer)
        if document["format_version"] != FORMAT_VERSION:
            bytes_id = manifest.bytes_id  # another minor version may make it of other things
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        yield Fault(MANIFEST, f"its identities cannot be computed: {error!r}")
        return
    for key, expected in (("order_id", order_id), ("bytes_id", bytes_id)):
        if document[key] != expected:
            yield Fault(MANIFEST, f"has {key} {document[key]}, but what it says makes {expected}")


def _strays(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    names = {shard_name(shard) for shard in range(manifest.layout.num_shards)}
    for name in folder.names(SHARDS):
        if f"{SHARDS}/{name}" not in names:
            yield Fault(f"{SHARDS}/{name}", "is a stray: the manifest names no such file")


class _Check:
    """Checks shards of one mix; used from several threads."""

    def __init__(self, folder: Folder, manifest: Manifest, mixture: Mixture) -> None:
        self._folder = folder
        self._manifest = manifest
        self._states = manifest.states(folder)
        self._mixture = mixture
        self._true_states: dict[int, State] = {}
        self._names = pa.array(manifest.names, pa.string())

    def states(self) -> Iterator[Fault]:
        """Boundary states that are not the mixture's."""
        name = self._manifest.document["tables"]["states"]["path"]
        boundaries = self._manifest.layout.boundaries()
        for boundary, expected in enumerate(self._mixture.states(boundaries)):
            try:
                found: State | str = self._states[boundary]
            except (MixError, IndexError) as error:
                found = f"unknown ({error})"
            if found != expected:
                # Shards are held against the mixture's own, so that each fault is told once.
                self._true_states[boundary] = expected
                reason = f"boundary {boundary} is {found}, the mixture's is {expected}"
                yield Fault(name, f"{reason}, by the manifest")
        count = self._manifest.layout.num_shards + 1
        if len(self._states) > count:
            yield Fault(name, f"has {len(self._states)} boundaries, expected {count}")

    def shard(self, record: ShardRecord) -> list[Fault]:
        """Faults of one shard."""
        return list(self._shard(record))

    def _shard(self, record: ShardRecord) -> Iterator[Fault]:
        name = shard_name(record.shard)
        try:
            # A store's requests are slow, so a shard comes from there in one.
            local = self._folder.local
            with self._folder.open(name) if local else self._fetched(name) as file:
                sha256, size = file_sha256(file)
                if size != record.bytes:
                    yield Fault(name, f"has {size} bytes, expected {record.bytes}")
                elif sha256 != record.sha256:
                    yield Fault(name, f"has sha256 {sha256}, expected {record.sha256}")
                file.seek(0)
                self._rows(file, record, name)
        except FileNotFoundError:
            yield Fault(name, "is missing")
        except Exception as error:  # whatever a decoder makes of damaged bytes
            yield Fault(name, _told(error).removeprefix(f"{name}: "))

    def _fetched(self, name: str) -> pa.NativeFile:
        return pa.BufferReader(self._folder.read(name))

    def _rows(self, file: pa.NativeFile, record: ShardRecord, name: str) -> None:
        """Decode a shard and hold every row's provenance against the mixture. Raises ShardError."""
        shard = open_shard(file, name, page_checksum_verification=True, pre_buffer=False)
        manifest, layout = self._manifest, self._manifest.layout
        first, batches = layout.shard(record.shard)
        expected = Footer(manifest.bytes_id, record.shard, first, batches)
        check_shard(shard, expected, manifest.group_rows(record.shard), name)
        columns = describe(shard.parquet.schema_arrow)
        if columns != manifest.document["schema"]:
            raise ShardError(f"{name}: has schema {columns}, expected that of the manifest")
        state = self._true_states.get(record.shard) or self._states[record.shard]
        rows = self._mixture.rows(state, batches)
        for group, (start, stop) in enumerate(layout.groups(batches)):
            planned = provenance(rows.between(start, stop), first, self._names)
            table = shard.parquet.read_row_group(group, use_threads=False)
            for field, column in zip(PROVENANCE, planned, strict=True):
                if not table.column(field.name).combine_chunks().equals(column):
                    raise ShardError(
                        f"{name}: row group {group}: column {field.name} is not what the mixture "
                        f"gives batches {first + start} to {first + stop}"
                    )


@dataclass(frozen=True)
class Origin:
    """Where rows of a batch come from: ``count`` rows from ``first_row`` on of a source file."""

    batch: int
    dataset: str
    epoch: int
    path: str
    first_row: int
    count: int


def origins(folder: Folder, manifest: Manifest, first_batch: int, num_batches: int) -> list[Origin]:
    """Which rows of which source files make up batches, from the manifest's tables alone.

    Raises:
        IndexError: the batches are not all in the mix.
        ManifestError: the tables are damaged, or are not those of this mix.
    """
    layout = manifest.layout
    if first_batch < 0 or num_batches < 1 or first_batch + num_batches > layout.num_batches:
        raise IndexError(
            f"batches {first_batch} to {first_batch + num_batches} are not all in the mix of "
            f"{layout.num_batches}"
        )
    shard = first_batch // layout.batches_per_shard
    start, _ = layout.shard(shard)
    states = manifest.states(folder)
    try:
        row_map = mixture_of(manifest, folder).rows(
            states[shard], first_batch - start + num_batches
        )
    except (IndexError, ValueError) as error:
        raise ManifestError(
            f"{folder.root}: its states and its mixture do not agree: {error}; `mixshards verify` "
            "lists all faults"
        ) from error
    sources = manifest.table(folder, "sources").to_pydict()
    files: dict[str, list[tuple[int, int, str]]] = {}
    for name, path, rows, first in zip(
        sources["dataset"], sources["path"], sources["rows"], sources["first_row"], strict=True
    ):
        files.setdefault(name, []).append((first, first + rows, path))
    lacking = [name for name in manifest.names if name not in files]
    if lacking:
        raise ManifestError(f"{folder.root}: its sources table has no file of {lacking[0]!r}")
    return list(_pieces(row_map, start, first_batch, manifest.names, files))


def _pieces(
    row_map: RowMap,
    start: int,
    first_batch: int,
    names: tuple[str, ...],
    files: dict[str, list[tuple[int, int, str]]],
) -> Iterator[Origin]:
    columns = (row_map.batch, row_map.dataset, row_map.start, row_map.count, row_map.epoch)
    for batch, dataset, at, count, epoch in zip(*(c.tolist() for c in columns), strict=True):
        if batch + start < first_batch:
            continue
        name = names[dataset]
        for begin, end, path in files[name]:
            low, high = max(at, begin), min(at + count, end)
            if low < high:
                yield Origin(batch + start, name, epoch, path, low - begin, high - low)
