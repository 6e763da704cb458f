"""Sources that open only at their beginning, written once as Parquet, so that all can open them.

A staged file lies under a name that stands for what is in it, and is there in full or not at all.
So a build that starts again finds what an earlier one staged. What is not staged is read slowly.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from .catalog import STAGE, Catalog, Dataset, SourceFile, staged_name
from .formats import SourceError, format_of
from .registry import read_file
from .storage import Folder, split_query

_NAME = b"mixshards.staged"


def to_stage(catalog: Catalog) -> list[tuple[Dataset, SourceFile]]:
    """The files of a catalog that are to be staged: those with rows that open at their beginning.

    Of files with the same name on the stage only the first is listed.
    """
    found: dict[str, tuple[Dataset, SourceFile]] = {}
    for dataset in catalog.datasets:
        for file in dataset.files:
            path = split_query(file.path)[0]
            module = format_of(path)
            if module is not None and file.num_rows and not module.opens_anywhere(path):
                found.setdefault(staged_name(catalog, dataset, file), (dataset, file))
    return list(found.values())


def stage_file(catalog: Catalog, dataset: Dataset, file: SourceFile) -> int:
    """Write a file to the catalog's stage, a row group for each of its blocks; its bytes there.

    Raises:
        SourceError: the file is gone, damaged, or not the planned one.
    """
    folder, name = catalog.stage, staged_name(catalog, dataset, file)
    assert folder is not None  # the caller has given the catalog one
    size = folder.size(name)
    if size is not None and _is_whole(folder, name):
        return size
    scratch = folder.scratch(name)
    try:
        with pq.ParquetWriter(
            scratch, catalog.schema, compression="zstd", compression_level=1,
            write_page_checksum=True, write_statistics=False,
        ) as writer:  # fmt: skip
            for block in _blocks(replace(catalog, stage=None), dataset, file):
                writer.write_table(block, row_group_size=block.num_rows)
            writer.add_key_value_metadata({_NAME: name.encode()})
        size = os.path.getsize(scratch)
        folder.place(scratch, name, flush=False)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(scratch)
        raise
    return size


def _is_whole(folder: Folder, name: str) -> bool:
    """Whether a staged file was written under its name, and can be read through.

    One that a crash of the machine tore, or that stands in another's place, is written again.
    """
    try:
        with folder.open(name) as file:
            parquet = pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
            if (parquet.metadata.metadata or {}).get(_NAME) != name.encode():
                return False
            for group in range(parquet.num_row_groups):
                parquet.read_row_group(group, use_threads=False)
    except (pa.ArrowException, OSError):
        return False
    return True


def _blocks(catalog: Catalog, dataset: Dataset, file: SourceFile) -> Iterator[pa.Table]:
    """The rows of each block of a file that has some, read from its beginning to its end."""
    pieces: list[pa.RecordBatch] = []
    wanted = iter([rows for rows in file.group_rows if rows])
    rows = next(wanted)
    for batch in read_file(catalog, dataset, file, 0, file.num_rows):
        while batch.num_rows:
            pieces.append(batch.slice(0, rows))
            batch = batch.slice(rows)
            rows -= pieces[-1].num_rows
            if not rows:
                yield pa.Table.from_batches(pieces)
                pieces, rows = [], next(wanted, 0)


@contextlib.contextmanager
def staged(catalog: Catalog) -> Iterator[Catalog]:
    """The catalog with a stage of its own, on a local disk, for as long as it is entered.

    What cannot be staged is left to those who read it, and who then say why.
    """
    with tempfile.TemporaryDirectory() as path:
        catalog = replace(catalog, stage=Folder.at(path))
        for dataset, file in to_stage(catalog):
            with contextlib.suppress(SourceError):
                stage_file(catalog, dataset, file)
        yield catalog


def unstage(folder: Folder) -> None:
    """Remove all that is staged in a mix's folder."""
    folder.delete_tree(STAGE)
    if folder.local:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder.path(STAGE))
