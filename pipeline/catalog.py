"""Datasets as planned: which files in which order, how many rows, under which schema."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from .arrow_types import Missing
from .errors import MixError
from .formats import Block, FileScan, ReadOptions, format_of, known_suffixes, stems
from .schema import Source, taken, unify
from .storage import Folder, in_threads, is_local, resolve, split_query

STAGE = "_mix/stage"
_SHOWN = 20
_SAVED_NOTES = ("dataset_info.json", "state.json")
_GLOB = re.compile(r"[*?\[]")


class CatalogError(MixError):
    """A dataset's files are missing, empty, doubled or of no known format."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset.

    ``path`` is as configured (relative ones start at the config's folder); ``first_row`` is the
    position in the dataset of the file's row 0, negative where the file begins before the rows
    that the dataset takes. So the file's row of dataset position p is ``p - first_row``.
    ``group_rows`` are the rows of each row group, or of each of the ``blocks`` that stand for them
    in other formats.
    """

    path: str
    num_bytes: int
    num_rows: int
    first_row: int
    digest: str
    group_rows: tuple[int, ...]
    blocks: tuple[Block, ...] = ()

    @functools.cached_property
    def blocks_sha256(self) -> str:
        """What stands for the blocks, of which a file may have very many."""
        return hashlib.sha256(repr(self.blocks).encode()).hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A named, ordered sequence of items.

    ``num_rows`` counts the items taken; ``rows`` are the first and the past-the-last row of the
    files that they are; ``columns`` maps our names to the source's; ``row_bytes`` is about what a
    row takes in storage; ``schema`` are the types that top-level columns of the source are given;
    ``bad_lines`` counts lines of its files that are left out; ``column_bytes`` are the parts of
    ``row_bytes``, while planning.
    """

    name: str
    files: tuple[SourceFile, ...]
    num_rows: int
    rows: tuple[int, int]
    columns: Mapping[str, str] | None
    row_bytes: float = 0.0
    schema: Mapping[str, pa.DataType] | None = None
    bad_lines: int = 0
    column_bytes: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def taken(self, file: SourceFile) -> tuple[int, int]:
        """First and past-the-last row that the dataset takes of one of its files; may be equal."""
        first = max(0, -file.first_row)
        return first, max(first, min(file.num_rows, self.num_rows - file.first_row))


@dataclass(frozen=True)
class Catalog:
    """All datasets in configured order and the schema that their items share.

    ``base`` is the folder that relative source paths start at; ``stage`` is the folder
    of a mix in which files that open only at their beginning may lie as Parquet too. ``dropped``
    are columns that are left out, since not all sources have them; known while planning.
    """

    datasets: tuple[Dataset, ...]
    schema: pa.Schema
    base: str
    stage: Folder | None = None
    dropped: tuple[str, ...] = field(default=(), compare=False)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Place of each dataset in configured order."""
        return {dataset.name: place for place, dataset in enumerate(self.datasets)}

    def source_columns(self, dataset: Dataset) -> list[str | None]:
        """The source's paths of the schema's columns, in the schema's order.

        None is a column that the dataset does not take; nor does each of its files have all others.
        """
        names: list[str] = self.schema.names
        return [dataset.columns.get(name) for name in names] if dataset.columns else list(names)


def staged_name(catalog: Catalog, dataset: Dataset, file: SourceFile) -> str:
    """Where a file lies when staged: a name that stands for its content, blocks and types."""
    sha256 = hashlib.sha256(catalog.schema.serialize())
    reading = dict(dataset.schema or {}).items()
    for part in (file.digest, file.blocks_sha256, catalog.source_columns(dataset), reading):
        sha256.update(repr(part).encode())
    return f"{STAGE}/{sha256.hexdigest()[:32]}.parquet"


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


def _data_alone(names: Iterable[str]) -> list[str]:
    """The names without those of the notes that ``datasets`` leaves beside its Arrow files."""
    found = list(names)
    saved = {name.rpartition("/")[0] for name in found if name.endswith(".arrow")}
    if not saved:
        return found
    notes = {f"{folder}/{note}".lstrip("/") for folder in saved for note in _SAVED_NOTES}
    return [name for name in found if name not in notes]


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
        _data_alone(name for name in _listing(place.filesystem, place.root) if place.takes(name)),
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
    real = functools.cache(os.path.realpath)  # thousands of files lie in few folders
    for written in paths:
        try:
            found = _expand(written, base)
        except (MixError, OSError, pa.ArrowException) as error:
            raise CatalogError(f"dataset {dataset!r}: {error}") from error
        for path in found:
            place = resolve(path, base)[1]
            scheme = path.partition("://")[0]
            full = f"{scheme}://{place}"
            if is_local(path):
                folder, name = os.path.split(place)
                full = os.path.join(real(folder), name)
                full = os.path.realpath(full) if os.path.islink(full) else full
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


def _scan(spec: DatasetSpec, path: str, base: str) -> FileScan:
    filesystem, full = resolve(path, base)
    module = format_of(full)
    assert module is not None  # _expand has refused all others
    options = ReadOptions(spec.schema or {}, spec.max_line_bytes, spec.on_bad_line == "skip")
    return module.scan(filesystem, full, options)


@dataclass(frozen=True)
class DatasetSpec:
    """What a config says of a dataset's items: paths, rows taken, columns, and how to read them.

    ``schema`` are the types that columns of the source are given; the last two are for lines.
    """

    name: str
    paths: tuple[str, ...]
    rows: tuple[int, int | None] = (0, None)
    columns: Mapping[str, str] | None = None
    schema: Mapping[str, pa.DataType] | None = None
    max_line_bytes: int = 64 << 20
    on_bad_line: Literal["error", "skip"] = "error"


def scan_datasets(
    specs: Sequence[DatasetSpec],
    base: str,
    threads: int = 16,
    missing_columns: Missing = "error",
    scanned: Callable[[int, int], None] | None = None,
) -> Catalog:
    """Find and scan all files of all datasets, in parallel, and unify their schemas.

    ``scanned`` is told how many files are scanned, of how many.

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

    done = itertools.count(1)

    def scan(item: tuple[DatasetSpec, str]) -> FileScan | str:
        spec, path = item
        try:
            return _scan(spec, path, base)
        except MixError as error:
            return f"dataset {spec.name!r}: {error}"
        finally:
            if scanned is not None:
                scanned(next(done), len(files))

    scans = in_threads(scan, files, threads)
    problems += [found for found in scans if isinstance(found, str)]
    _raise_all(problems)
    by_dataset: dict[str, list[tuple[str, FileScan]]] = {spec.name: [] for spec in specs}
    # Thousands of files mostly share one schema, so each is looked at once a dataset.
    schemas: dict[str, dict[pa.Schema, Source]] = {spec.name: {} for spec in specs}
    for (spec, path), found in zip(files, scans, strict=True):
        assert not isinstance(found, str)  # those were raised above
        by_dataset[spec.name].append((path, found))
        where = f"dataset {spec.name!r}, {path}"
        # A file without a line says nothing of its columns.
        if found.num_rows or found.schema.names:
            schemas[spec.name].setdefault(found.schema, Source(where, found.schema))
    datasets: list[Dataset] = []
    sources: list[Source] = []
    for spec in specs:
        asked = spec.columns, spec.schema, missing_columns
        try:
            datasets.append(_dataset(spec, by_dataset[spec.name]))
            sources += taken(spec.name, list(schemas[spec.name].values()), *asked)
        except MixError as error:
            problems.append(str(error))
    _raise_all(problems)
    schema = unify(sources, missing_columns)
    if not schema.names:
        raise CatalogError(
            f"the sources have no columns, first {sources[0].where}; a mix needs at least one"
        )
    names = dict.fromkeys(name for source in sources for name in source.schema.names)
    dropped = tuple(name for name in names if name not in schema.names)
    catalog = Catalog(tuple(datasets), schema, base, dropped=dropped)
    sized = (_sized(catalog, dataset, by_dataset[dataset.name]) for dataset in datasets)
    return replace(catalog, datasets=tuple(sized))


def _sized(catalog: Catalog, dataset: Dataset, scans: Sequence[tuple[str, FileScan]]) -> Dataset:
    """The dataset with about what each of its columns takes in storage."""
    stored: Counter[str] = Counter()
    for _, found in scans:
        stored.update(found.column_bytes)
    rows = sum(found.num_rows for _, found in scans)
    paths = dict(zip(catalog.schema.names, catalog.source_columns(dataset), strict=True))
    takers: dict[str, list[str]] = {}
    for name, path in paths.items():
        if path is not None:
            takers.setdefault(path, []).append(name)
    sizes: Counter[str] = Counter()
    for column, size in stored.items():
        for name in (name for stem in stems(column) for name in takers.get(stem, ())):
            sizes[name] += size
    # Where a format does not know more, all that a column lies in stands for it.
    for path, names in takers.items():
        around = [stored[stem] for stem in stems(path) if stem in stored]
        sizes.update({name: around[-1] for name in names if around and name not in sizes})
    return replace(
        dataset,
        row_bytes=round(sum(sizes.values()) / rows, 3),
        column_bytes={name: size / rows for name, size in sizes.items()},
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
        bad = sum(found.bad_lines for _, found in scans)
        left_out = f" but {bad:,} line(s) that cannot be read" if bad else ""
        raise CatalogError(
            f"dataset {spec.name!r}: its {len(scans)} file(s) hold no rows{left_out}, first "
            f"{scans[0][0]}; remove the dataset, or give it data"
        )
    if start < 0 or stop > total or start >= stop:
        raise CatalogError(
            f"dataset {spec.name!r}: rows [{start}, {'null' if spec.rows[1] is None else stop}] "
            f"asked for, but its {len(scans)} file(s) hold {total} row(s); "
            f"choose a range with rows in it, within [0, {total}]"
        )
    files, first = [], -start
    for path, found in scans:
        files.append(
            SourceFile(
                path,
                found.num_bytes,
                found.num_rows,
                first,
                found.digest,
                found.group_rows,
                found.blocks,
            )
        )
        first += found.num_rows
    return Dataset(
        name=spec.name,
        files=tuple(files),
        num_rows=stop - start,
        rows=(start, stop),
        columns=spec.columns,
        schema=spec.schema,
        bad_lines=sum(found.bad_lines for _, found in scans),
    )
