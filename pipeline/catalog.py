"""Datasets as planned: which files in which order, how many rows, under which schema."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs

from .errors import MixError
from .formats import FileScan, format_of, known_suffixes
from .schema import unify
from .storage import in_threads, resolve

_GLOB = re.compile(r"[*?\[]")


class CatalogError(MixError):
    """A dataset's files are missing, empty, doubled or of no known format."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset.

    ``path`` is as configured (relative ones start at the config's folder); ``first_row`` is the
    position in the dataset of the file's row 0, negative where the file begins before the rows
    that the dataset takes. So the file's row of dataset position p is ``p - first_row``.
    """

    path: str
    num_bytes: int
    num_rows: int
    first_row: int
    digest: str


@dataclass(frozen=True)
class Dataset:
    """A named, ordered sequence of items.

    ``num_rows`` counts the items taken; ``rows`` are the first and the past-the-last row of the
    files that they are; ``columns`` maps our names to the source's; ``row_bytes`` is about what a
    row takes in storage.
    """

    name: str
    files: tuple[SourceFile, ...]
    num_rows: int
    rows: tuple[int, int]
    columns: Mapping[str, str] | None
    row_bytes: float = 0.0


@dataclass(frozen=True)
class Catalog:
    """All datasets in configured order and the schema that their items share.

    ``base`` is the folder that relative source paths start at.
    """

    datasets: tuple[Dataset, ...]
    schema: pa.Schema
    base: str

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Place of each dataset in configured order."""
        return {dataset.name: place for place, dataset in enumerate(self.datasets)}

    def source_columns(self, dataset: Dataset) -> list[str]:
        """The source's names of the schema's columns, in the schema's order."""
        names: list[str] = self.schema.names
        return [dataset.columns[name] for name in names] if dataset.columns else names


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression for a glob relative to its root: ``**`` crosses folders, ``*`` not."""
    parts = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append("(?:[^/]+/)*")
            continue
        text, place = "", 0
        while place < len(part):
            char = part[place]
            close = part.find("]", place + 2)
            if char == "[" and close > 0:
                inner = part[place + 1 : close].replace("\\", "\\\\")
                text += f"[{'^' + inner[1:] if inner[0] in '!^' else inner}]"
                place = close
            else:
                text += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
            place += 1
        parts.append(text + "/")
    if pattern.endswith("**"):
        parts.append("[^/]+")
    return re.compile("".join(parts).removesuffix("/"))


def _is_data(relative: str) -> bool:
    """Whether a listed file can be data: markers, hidden and checksum files are not."""
    return not relative.endswith(".crc") and not any(
        part.startswith((".", "_")) for part in relative.split("/")
    )


def _expand(dataset: str, written: str, base: str) -> list[str]:
    """The files that one written path names, as configured, in their order.

    Raises:
        CatalogError: nothing is there, or something that no format reads.
    """
    filesystem, full = resolve(written, base)
    info = filesystem.get_file_info(full)
    if info.is_file:
        if format_of(full) is None:
            raise CatalogError(
                f"dataset {dataset!r}: {written}: no format reads this file; "
                f"expected a name that ends in {known_suffixes()}"
            )
        return [written]
    pattern = None
    root, written_root = full, written.rstrip("/")
    if info.type == fs.FileType.NotFound:
        magic = _GLOB.search(written)
        if magic is None:
            raise CatalogError(
                f"dataset {dataset!r}: {written}: no such file or folder (looked at {full})"
            )
        written_root, slash, tail = written[: magic.start()].rpartition("/")
        tail += written[magic.start() :]
        root = resolve((written_root + slash) or ".", base)[1]
        pattern = _glob_pattern(tail)
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    listed = [
        found.path[len(root) :].lstrip("/")
        for found in filesystem.get_file_info(selector)
        if found.is_file
    ]
    names = sorted(
        (n for n in listed if _is_data(n) and (pattern is None or pattern.fullmatch(n))),
        key=lambda name: name.encode("utf-8", "surrogateescape"),
    )
    if not names:
        what = "the folder holds no data file" if pattern is None else "the glob matches no file"
        raise CatalogError(f"dataset {dataset!r}: {written}: {what} (looked at {root})")
    unknown = [name for name in names if format_of(name) is None]
    if unknown:
        raise CatalogError(
            f"dataset {dataset!r}: {written}: {len(unknown)} file(s) that no format reads, first "
            f"{unknown[0]!r}; expected names that end in {known_suffixes()}: name the data files "
            "with a glob such as 'folder/*.parquet'"
        )
    if pattern is None or slash:
        return [f"{written_root}/{name}" for name in names]
    return names


def _files(dataset: str, paths: Sequence[str], base: str) -> list[str]:
    """All files of a dataset: written order, then path order inside a folder or glob.

    Raises:
        CatalogError: one file is named twice.
    """
    seen: dict[str, str] = {}
    files: list[str] = []
    for written in paths:
        for path in _expand(dataset, written, base):
            full = path if "://" in path else os.path.abspath(os.path.join(base, path))
            if full in seen:
                raise CatalogError(
                    f"dataset {dataset!r}: {path} is matched twice, by {seen[full]!r} and by "
                    f"{written!r}; an item may belong to a dataset only once"
                )
            seen[full] = written
            files.append(path)
    return files


def _scan(path: str, base: str) -> FileScan:
    filesystem, full = resolve(path, base)
    module = format_of(full)
    assert module is not None  # _expand has refused all others
    return module.scan(filesystem, full)


def _select(schema: pa.Schema, columns: Mapping[str, str] | None, where: str) -> pa.Schema:
    """The schema as renamed and projected by ``columns``.

    Raises:
        CatalogError: a column is not there, or two have one name.
    """
    doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if doubled:
        raise CatalogError(f"{where}: more than one column is named {doubled[0]!r}")
    if columns is None:
        return schema
    for ours, theirs in columns.items():
        if schema.get_field_index(theirs) < 0:
            raise CatalogError(
                f"{where}: no column {theirs!r} (asked for as {ours!r}); "
                f"the file has {', '.join(schema.names)}"
            )
    return pa.schema([schema.field(theirs).with_name(ours) for ours, theirs in columns.items()])


@dataclass(frozen=True)
class DatasetSpec:
    """What a config says of a dataset's items: paths, rows taken, columns."""

    name: str
    paths: tuple[str, ...]
    rows: tuple[int, int | None] = (0, None)
    columns: Mapping[str, str] | None = None


def scan_datasets(specs: Sequence[DatasetSpec], base: str, threads: int = 16) -> Catalog:
    """Find and scan all files of all datasets, in parallel, and unify their schemas.

    Raises:
        CatalogError: files are missing, unreadable or doubled, or a dataset has no rows.
        SchemaError: the sources have no common schema.
    """
    files = [(spec, path) for spec in specs for path in _files(spec.name, spec.paths, base)]

    def scan(item: tuple[DatasetSpec, str]) -> FileScan:
        spec, path = item
        try:
            return _scan(path, base)
        except MixError as error:
            raise CatalogError(f"dataset {spec.name!r}: {error}") from error

    by_dataset: dict[str, list[tuple[str, FileScan]]] = {spec.name: [] for spec in specs}
    # Thousands of files mostly share one schema, so each is looked at once a dataset.
    schemas: dict[tuple[str, pa.Schema], tuple[str, pa.Schema]] = {}
    for (spec, path), found in zip(files, in_threads(scan, files, threads), strict=True):
        by_dataset[spec.name].append((path, found))
        if (spec.name, found.schema) not in schemas:
            where = f"dataset {spec.name!r}, {path}"
            selected = _select(found.schema, spec.columns, where)
            schemas[spec.name, found.schema] = (where, selected)
    return Catalog(
        datasets=tuple(_dataset(spec, by_dataset[spec.name]) for spec in specs),
        schema=unify(schemas.values()),
        base=base,
    )


def _dataset(spec: DatasetSpec, scans: Sequence[tuple[str, FileScan]]) -> Dataset:
    total = sum(found.num_rows for _, found in scans)
    start, stop = spec.rows[0], total if spec.rows[1] is None else spec.rows[1]
    if total == 0:
        raise CatalogError(
            f"dataset {spec.name!r}: its {len(scans)} file(s) hold no rows, first {scans[0][0]}; "
            "remove the dataset, or give it data"
        )
    if stop > total or start >= stop:
        raise CatalogError(
            f"dataset {spec.name!r}: rows [{start}, {stop}] asked for, but its files hold "
            f"{total} row(s)"
        )
    files, first = [], -start
    for path, found in scans:
        files.append(SourceFile(path, found.num_bytes, found.num_rows, first, found.digest))
        first += found.num_rows
    wanted = None if spec.columns is None else set(spec.columns.values())
    stored = sum(
        size
        for _, found in scans
        for name, size in found.column_bytes.items()
        if wanted is None or name in wanted
    )
    return Dataset(
        name=spec.name,
        files=tuple(files),
        num_rows=stop - start,
        rows=(start, stop),
        columns=spec.columns,
        row_bytes=stored / total,
    )
