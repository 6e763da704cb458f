"""Hold a finished mix against its manifest and its mixture; say what stands in it and whence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mixcore import RowMap

from .errors import MixError
from .manifest import Manifest, ManifestError
from .shard import (
    PROVENANCE,
    SHARDS,
    Footer,
    ShardError,
    ShardRecord,
    check_shard,
    describe,
    file_sha256,
    open_shard,
    provenance,
    shard_name,
)
from .storage import Folder, in_threads


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a mix: the file (relative to the mix) and the reason."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def verify(path: str, sources: bool = False, threads: int = 2) -> list[Fault]:
    """All faults of a mix, [] for a whole one.

    Checks tables and shards: that they are there, their sizes, digests, page checksums, row counts
    and schema, that nothing else lies among them, that the boundary states are the mixture's, and
    that every row's provenance is what the mixture gives that place. With ``sources`` every shard
    is also written anew from the source files, where these still lie as planned, and its digest
    compared: that reads all there is.

    Raises:
        ManifestError: there is no finished mix, or its manifest cannot be read.
    """
    folder = Folder.at(path)
    manifest = Manifest.load(folder)
    faults: list[Fault] = []
    for kind in manifest.document["tables"]:
        try:
            manifest.table_bytes(folder, kind)
        except MixError as error:
            faults.append(Fault(manifest.document["tables"][kind]["path"], str(error)))
    if faults:
        return faults
    faults.extend(_strays(folder, manifest))
    records = manifest.shards(folder)
    if len(records) != manifest.layout.num_shards:
        raise ManifestError(
            f"{folder.root}: the shards table has {len(records)} rows, "
            f"the manifest says {manifest.layout.num_shards}"
        )
    check = _Check(folder, manifest)

    faults.extend(check.states())
    for found in in_threads(check.shard, records, threads):
        faults.extend(found)
    if sources:
        faults.extend(_against_sources(folder, records))
    return faults


def _against_sources(folder: Folder, records: list[ShardRecord]) -> Iterator[Fault]:
    # Only this needs what building needs, so a trainer's install can do all the rest.
    from .gather import RunWriter
    from .plan import Plan

    writer = RunWriter(Plan.load(folder))
    for shard, sha256 in writer.rehash(0, len(records)):
        if sha256 != records[shard].sha256:
            yield Fault(
                shard_name(shard),
                f"is not what its sources give: written anew it has sha256 {sha256}, "
                f"recorded is {records[shard].sha256}",
            )


def _strays(folder: Folder, manifest: Manifest) -> Iterator[Fault]:
    names = {shard_name(shard) for shard in range(manifest.layout.num_shards)}
    for name in folder.names(SHARDS):
        if f"{SHARDS}/{name}" not in names:
            yield Fault(f"{SHARDS}/{name}", "is a stray: the manifest names no such file")


class _Check:
    """Checks shards of one mix; used from several threads."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._states = manifest.states(folder)
        self._mixture = manifest.mixture()
        self._names = pa.array(manifest.names, pa.string())

    def states(self) -> Iterator[Fault]:
        """Boundary states that are not the mixture's."""
        name = self._manifest.document["tables"]["states"]["path"]
        boundaries = self._manifest.layout.boundaries()
        for boundary, expected in enumerate(self._mixture.states(boundaries)):
            if boundary >= len(self._states):
                yield Fault(name, f"ends before boundary {boundary}")
                return
            found = self._states[boundary]
            if found != expected:
                yield Fault(name, f"boundary {boundary} is {found}, the mixture's is {expected}")

    def shard(self, record: ShardRecord) -> list[Fault]:
        """Faults of one shard."""
        return list(self._shard(record))

    def _shard(self, record: ShardRecord) -> Iterator[Fault]:
        name = shard_name(record.shard)
        try:
            with self._folder.open(name) as file:
                sha256, size = file_sha256(file)
                if size != record.bytes:
                    yield Fault(name, f"has {size} bytes, expected {record.bytes}")
                elif sha256 != record.sha256:
                    yield Fault(name, f"has sha256 {sha256}, expected {record.sha256}")
                file.seek(0)
                self._rows(file, record, name)
        except FileNotFoundError:
            yield Fault(name, "is missing")
        except (MixError, pa.ArrowException, OSError) as error:
            yield Fault(name, str(error).removeprefix(f"{name}: "))

    def _rows(self, file: pa.NativeFile, record: ShardRecord, name: str) -> None:
        """Decode a shard and hold every row's provenance against the mixture. Raises ShardError."""
        parquet, footer = open_shard(file, name, page_checksum_verification=True, pre_buffer=False)
        manifest, layout = self._manifest, self._manifest.layout
        first, batches = layout.shard(record.shard)
        expected = Footer(manifest.bytes_id, record.shard, first, batches)
        check_shard(parquet, footer, expected, manifest.group_rows(record.shard), name)
        columns = describe(parquet.schema_arrow)
        if columns != manifest.document["schema"]:
            raise ShardError(f"{name}: has schema {columns}, expected that of the manifest")
        rows = self._mixture.rows(self._states[record.shard], batches)
        for group, (start, stop) in enumerate(layout.groups(batches)):
            part = slice(*np.searchsorted(rows.batch, (start, stop)))
            planned = provenance(
                rows.batch[part] + first,
                rows.dataset[part],
                rows.start[part],
                rows.count[part],
                rows.epoch[part],
                self._names,
            )
            table = parquet.read_row_group(group, use_threads=False)
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
    """
    layout = manifest.layout
    if first_batch < 0 or num_batches < 1 or first_batch + num_batches > layout.num_batches:
        raise IndexError(
            f"batches {first_batch} to {first_batch + num_batches} are not all in the mix of "
            f"{layout.num_batches}"
        )
    shard = first_batch // layout.batches_per_shard
    start, _ = layout.shard(shard)
    state = manifest.states(folder)[shard]
    row_map = manifest.mixture().rows(state, first_batch - start + num_batches)
    sources = manifest.table(folder, "sources").to_pydict()
    files: dict[str, list[tuple[int, int, str]]] = {}
    for name, path, rows, first in zip(
        sources["dataset"], sources["path"], sources["rows"], sources["first_row"], strict=True
    ):
        files.setdefault(name, []).append((first, first + rows, path))
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
