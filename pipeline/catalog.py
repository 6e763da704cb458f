"""Datasets as planned: which files in which order, how many rows, under which schema."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from .errors import MixError
from .formats import FileScan, format_of, known_suffixes
from .schema import unify
from .storage import Folder, in_threads, is_local, resolve, split_query

_SHOWN = 20
_GLOB = re.compile(r"[*?\[]")


class CatalogError(MixError):
    """A dataset's files are missing, empty, doubled or of no known format."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset.

    ``path`` is as configured (relative ones start at the config's folder); ``first_row`` is the
    position in the dataset of the file's row 0, negative where the file begins before the rows
    that the dataset takes. So the file's row of dataset position p is ``p - first_row``.
    ``group_rows`` are the rows of each row group.
    """

    path: str
    num_bytes: int
    num_rows: int
    first_row: int
    digest: str
    group_rows: tuple[int, ...]


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

    def taken(self, file: SourceFile) -> tuple[int, int]:
        """First and past-the-last row that the dataset takes of one of its files; may be equal."""
        first = max(0, -file.first_row)
        return first, max(first, min(file.num_rows, self.num_rows - file.first_row))


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


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path fit those of a glob: ``**`` crosses folders, ``*`` not."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        rest = pattern[1:] or ["*"]
        return any(_matches(parts[skip:], rest) for skip in range(len(parts)))
    # The shell's way to say "none of these" is as good as fnmatch's own.
    wanted = pattern[0].replace("[^", "[!")
    return bool(parts) and fnmatchcase(parts[0], wanted) and _matches(parts[1:], pattern[1:])


def _globbed(name: str, pattern: Sequence[str]) -> bool:
    """Whether a glob takes a file: by its own name, or by that of a folder that is named as data.

    Spark and Dask write one data set as a folder ``x.parquet/`` of part files.
    """
    parts = name.split("/")
    return _matches(parts, pattern) or any(
        format_of(parts[depth - 1]) is not None and _matches(parts[:depth], pattern)
        for depth in range(1, len(parts))
    )


def _is_data(relative: str) -> bool:
    """Whether a listed file can be data: markers, hidden and checksum files are not."""
    return not relative.endswith(".crc") and not any(
        part.startswith((".", "_")) for part in relative.split("/")
    )


def _listing(filesystem: fs.FileSystem, root: str) -> Iterator[str]:
    """Names of all files below a folder, relative to it; none where there is no such folder.

    Raises:
        CatalogError: a link leads round in a circle.
    """
    if filesystem.type_name == "local":
        # A link that leads nowhere is listed too, so that its file is missed and not passed over.
        for folder, _, names in os.walk(root, onerror=_raise_unless_missing, followlinks=True):
            if os.path.islink(folder) and f"{folder}/".startswith(f"{os.path.realpath(folder)}/"):
                raise CatalogError(f"{folder} links to a folder that it lies in; remove the link")
            inside = folder[len(root) :].strip("/")
            yield from (f"{inside}/{name}" if inside else name for name in names)
        return
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    for found in filesystem.get_file_info(selector):
        if found.is_file:
            yield found.path[len(root) :].lstrip("/")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(frozen=True)
class _Place:
    """Where the files of a written folder or glob (the one with a pattern) are looked for.

    A file found at a name below ``root`` is written ``prefix + name + query``.
    """

    filesystem: fs.FileSystem
    root: str
    prefix: str
    query: str
    pattern: Sequence[str] | None

    def takes(self, name: str) -> bool:
        """Whether a file at a name below the root is one of the dataset's."""
        return _is_data(name) and (self.pattern is None or _globbed(name, self.pattern))


def _place(written: str, base: str) -> _Place | None:
    """Where a written path looks for files, None where it is one file.

    Raises:
        CatalogError: nothing is there, and it is no glob.
    """
    filesystem, full = resolve(written, base)
    info = filesystem.get_file_info(full)
    if info.is_file:
        return None
    stem, query = split_query(written)
    if info.type != fs.FileType.NotFound:
        return _Place(filesystem, full, stem.rstrip("/") + "/", query, None)
    magic = _GLOB.search(stem)
    if magic is None:
        raise CatalogError(
            f"{written}: no such file or folder (looked at {full}); "
            "a relative path starts at the config's folder"
        )
    written_root, slash, tail = stem[: magic.start()].rpartition("/")
    tail += stem[magic.start() :]
    root = resolve((written_root + slash + query) or ".", base)[1]
    pattern = (unquote(tail) if "://" in written else tail).split("/")
    return _Place(filesystem, root, written_root + slash, query, pattern)


def would_take(written: str, base: str, folder: Folder, name: str) -> bool:
    """Whether a written path would take a file of another folder, once it lies there."""
    place = _place(written, base)
    if place is None or not folder.root.startswith(place.root.rstrip("/") + "/"):
        return False
    inside = folder.root[len(place.root.rstrip("/")) + 1 :]
    return bool(place.filesystem == folder.filesystem) and place.takes(f"{inside}/{name}")


def _expand(written: str, base: str) -> list[str]:
    """The files that one written path names, as configured, in their order.

    Raises:
        CatalogError: nothing is there, or something that no format reads.
    """
    place = _place(written, base)
    if place is None:
        if format_of(split_query(written)[0]) is None:
            raise CatalogError(
                f"{written}: no format reads this file; "
                f"expected a name that ends in {known_suffixes()}"
            )
        return [written]
    names = sorted(
        (name for name in _listing(place.filesystem, place.root) if place.takes(name)),
        key=lambda name: name.encode("utf-8", "surrogateescape"),
    )
    if not names:
        folder = place.pattern is None
        what = "the folder holds no data file" if folder else "the glob matches no file"
        raise CatalogError(
            f"{written}: {what} (looked at {place.root}; hidden files and names that begin "
            "with '_' are passed over)"
        )
    strange = [name for name in names if name != name.encode(errors="replace").decode()]
    if strange:
        raise CatalogError(f"{written}: file name {strange[0]!r} is not UTF-8; rename the file")
    unknown = [name for name in names if format_of(name) is None]
    if unknown:
        raise CatalogError(
            f"{written}: {len(unknown)} file(s) that no format reads, first "
            f"{unknown[0]!r}; expected names that end in {known_suffixes()}: name the data files "
            "with a glob such as 'folder/*.parquet'"
        )
    uri = "://" in written
    return [f"{place.prefix}{quote(name) if uri else name}{place.query}" for name in names]


def _files(dataset: str, paths: Sequence[str], base: str) -> list[str]:
    """All files of a dataset: written order, then path order inside a folder or glob.

    Raises:
        CatalogError: a path names no data, or one file is named twice.
    """
    seen: dict[str, tuple[str, str]] = {}
    files: list[str] = []
    for written in paths:
        try:
            found = _expand(written, base)
        except (MixError, OSError, pa.ArrowException) as error:
            raise CatalogError(f"dataset {dataset!r}: {error}") from error
        for path in found:
            full = os.path.realpath(resolve(path, base)[1]) if is_local(path) else path
            if full in seen:
                other, by = seen[full]
                same = "" if other == path else f" (it is the same file as {other})"
                raise CatalogError(
                    f"dataset {dataset!r}: {path} is matched twice, by {by!r} and by "
                    f"{written!r}{same}; an item may belong to a dataset only once"
                )
            seen[full] = path, written
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
    files: list[tuple[DatasetSpec, str]] = []
    problems: list[str] = []
    for spec in specs:
        try:
            files += [(spec, path) for path in _files(spec.name, spec.paths, base)]
        except CatalogError as error:
            problems.append(str(error))

    def scan(item: tuple[DatasetSpec, str]) -> FileScan | str:
        spec, path = item
        try:
            return _scan(path, base)
        except MixError as error:
            return f"dataset {spec.name!r}: {error}"

    scans = in_threads(scan, files, threads)
    problems += [found for found in scans if isinstance(found, str)]
    _raise_all(problems)
    by_dataset: dict[str, list[tuple[str, FileScan]]] = {spec.name: [] for spec in specs}
    # Thousands of files mostly share one schema, so each is looked at once a dataset.
    schemas: dict[tuple[str, pa.Schema], tuple[str, pa.Schema]] = {}
    for (spec, path), found in zip(files, scans, strict=True):
        assert not isinstance(found, str)  # those were raised above
        by_dataset[spec.name].append((path, found))
        if (spec.name, found.schema) not in schemas:
            where = f"dataset {spec.name!r}, {path}"
            selected = _select(found.schema, spec.columns, where)
            schemas[spec.name, found.schema] = (where, selected)
    datasets: list[Dataset] = []
    for spec in specs:
        try:
            datasets.append(_dataset(spec, by_dataset[spec.name]))
        except CatalogError as error:
            problems.append(str(error))
    _raise_all(problems)
    return Catalog(
        datasets=tuple(datasets),
        schema=unify(schemas.values()),
        base=base,
    )


def _raise_all(problems: list[str]) -> None:
    """Raise one error for all that is wrong; of very many the first are enough."""
    if not problems:
        return
    shown = problems[:_SHOWN]
    if len(problems) > len(shown):
        shown.append(f".. and {len(problems) - len(shown)} more")
    raise CatalogError("\n".join(shown))


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
            f"dataset {spec.name!r}: rows [{start}, {'null' if spec.rows[1] is None else stop}] "
            f"asked for, but its {len(scans)} file(s) hold {total} row(s); "
            f"choose a range with rows in it, within [0, {total}]"
        )
    files, first = [], -start
    for path, found in scans:
        files.append(
            SourceFile(path, found.num_bytes, found.num_rows, first, found.digest, found.group_rows)
        )
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
        row_bytes=round(stored / total, 3),
    )
