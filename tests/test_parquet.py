"""Parquet as a source: what a scan learns, opening at any row, and what damage is said to be."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from pipeline.formats import (
    FileScan,
    ReadOptions,
    SourceChangedError,
    SourceError,
    format_of,
    known_suffixes,
)
from pipeline.formats import parquet as module

from .mixes import table

DISK = fs.LocalFileSystem()
ROWS = 60
SCHEMA = table("a", 1).schema
NOTHING = FileScan(0, 0, "", pa.schema([]), {}, ())


def write(path: Path, rows: pa.Table, group: int = 10, **options: Any) -> str:
    pq.write_table(rows, path, row_group_size=group, **{"write_page_checksum": True, **options})
    return str(path)


def scan(path: str | Path) -> Any:
    return module.scan(DISK, str(path), ReadOptions())


def read(
    path: str | Path,
    row: int = 0,
    columns: Sequence[str] | None = None,
    batch_bytes: int = 1 << 20,
    planned: FileScan | None = None,
) -> list[pa.RecordBatch]:
    found = scan(path)
    names = found.schema.names if columns is None else columns
    return list(
        module.read_from(DISK, str(path), planned or found, row, asked(*names), batch_bytes)
    )


def asked(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.null()) for name in names])


def chunk_ranges(path: str, group: int, column: str | None = None) -> list[tuple[int, int]]:
    """Where the pages of a row group lie in the file."""
    metadata = pq.read_metadata(path).row_group(group)
    found = []
    for index in range(metadata.num_columns):
        chunk = metadata.column(index)
        if column is None or chunk.path_in_schema.split(".")[0] == column:
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            found.append((start, start + chunk.total_compressed_size))
    return found


def wipe(path: str, ranges: Sequence[tuple[int, int]]) -> None:
    with open(path, "r+b") as file:
        for start, stop in ranges:
            file.seek(start)
            file.write(b"\xff" * (stop - start))


def message(act: Callable[[], object], kind: type[SourceError] = SourceError) -> str:
    with pytest.raises(SourceError) as caught:
        act()
    assert type(caught.value) is kind
    return str(caught.value)


# Digests


def test_the_digest_is_sha256_of_the_footer_and_the_size(tmp_path):
    data = Path(write(tmp_path / "a.parquet", table("a", 30))).read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    expected = hashlib.sha256(footer + len(data).to_bytes(8, "little")).hexdigest()
    found = scan(tmp_path / "a.parquet")
    assert found.digest == expected
    assert found.num_bytes == len(data)


def test_the_digest_changes_with_rows_and_row_groups_and_not_with_name_or_time(tmp_path):
    rows = table("a", 30)
    path = write(tmp_path / "a.parquet", rows)
    digest = scan(path).digest
    os.utime(path, (1, 1))
    assert scan(path).digest == digest
    os.rename(path, tmp_path / "b.pq")
    assert scan(tmp_path / "b.pq").digest == digest
    assert scan(write(tmp_path / "c.parquet", rows)).digest == digest
    changed = rows.set_column(0, "text", [["changed", *rows["text"].to_pylist()[1:]]])
    others = [
        write(tmp_path / "d.parquet", changed),
        write(tmp_path / "e.parquet", rows, group=15),
        write(tmp_path / "f.parquet", rows.slice(0, 29)),
        write(tmp_path / "g.parquet", rows, compression="zstd"),
    ]
    assert len({digest, *(scan(other).digest for other in others)}) == 5


# Scans


def test_a_scan_tells_rows_schema_and_stored_sizes(tmp_path):
    rows = table("a", ROWS)
    path = write(tmp_path / "a.parquet", rows, group=7)
    found = scan(path)
    assert found.num_rows == ROWS
    assert found.num_bytes == os.path.getsize(path)
    assert found.schema.names == ["text", "tokens"]
    assert found.schema.field("tokens").type == pa.list_(pa.int32())
    for name in ("text", "tokens"):
        ranges = [r for group in range(9) for r in chunk_ranges(path, group, name)]
        stored = sum(stop - start for start, stop in ranges)
        leaf = {"text": "text", "tokens": "tokens.list.element"}[name]
        assert found.column_bytes[leaf] == pytest.approx(stored, rel=0.2)


def test_every_leaf_of_a_struct_is_counted_and_a_dotted_name_as_itself(tmp_path):
    rows = pa.table({"s": [{"a": 1, "b": "x"}] * 50, "dotted.name": list(range(50))})
    path = write(tmp_path / "a.parquet", rows, group=50)
    found = scan(path)
    assert sorted(found.column_bytes) == ["dotted.name", "s.a", "s.b"]
    stored = sum(stop - start for start, stop in chunk_ranges(path, 0))
    assert sum(found.column_bytes.values()) == stored
    assert pa.Table.from_batches(read(path)) == rows
    assert pa.Table.from_batches(read(path, columns=["dotted.name"])) == rows.select([1])


def test_metadata_that_other_libraries_leave_is_dropped(tmp_path):
    rows = table("a", 3).replace_schema_metadata({"pandas": "{}", "huggingface": "{}"})
    assert scan(write(tmp_path / "a.parquet", rows)).schema.metadata is None


@pytest.mark.parametrize("groups", [0, 1])
def test_a_file_without_rows_has_a_schema_and_gives_nothing(tmp_path, groups):
    empty = SCHEMA.empty_table()
    with pq.ParquetWriter(tmp_path / "a.parquet", empty.schema) as writer:
        for _ in range(groups):
            writer.write_table(empty)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == groups
    found = scan(tmp_path / "a.parquet")
    assert (found.num_rows, found.schema) == (0, empty.schema)
    assert read(tmp_path / "a.parquet") == []
    assert read(tmp_path / "a.parquet", row=1) == []


# Opening at a row


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> Callable[[int], str]:
    """A file of ROWS rows for each row-group size."""
    folder = tmp_path_factory.mktemp("grouped")

    def path(group: int) -> str:
        file = folder / f"{group}.parquet"
        return str(file) if file.exists() else write(file, table("a", ROWS), group)

    return path


@settings(deadline=None, max_examples=200)
@given(
    group=st.integers(1, ROWS + 5),
    batch_bytes=st.integers(0, 5000),
    row=st.integers(0, ROWS + 3),
)
def test_reading_from_any_row_gives_the_rest_of_the_table(grouped, group, batch_bytes, row):
    batches = read(grouped(group), row, batch_bytes=batch_bytes)
    assert all(batch.num_rows for batch in batches)
    found = pa.Table.from_batches(batches, SCHEMA)
    assert found.equals(table("a", ROWS).slice(row))


def test_row_groups_of_uneven_size_and_without_rows_are_counted_right(tmp_path):
    sizes, first = [3, 0, 0, 7, 1, 0, 5, 0], 0
    with pq.ParquetWriter(tmp_path / "a.parquet", SCHEMA) as writer:
        for size in sizes:
            writer.write_table(table("a", 16).slice(first, size))
            first += size
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == len(sizes)
    for row in range(17):
        found = pa.Table.from_batches(read(tmp_path / "a.parquet", row), SCHEMA)
        assert found.equals(table("a", 16).slice(row))


@pytest.mark.parametrize("group", [1, 3, 5])
def test_row_groups_that_lie_wholly_before_the_row_are_not_read(tmp_path, group):
    rows = table("a", ROWS)
    path = write(tmp_path / "a.parquet", rows)
    wipe(path, [r for earlier in range(group) for r in chunk_ranges(path, earlier)])
    for row in (10 * group, 10 * group + 4, ROWS - 1):
        assert pa.Table.from_batches(read(path, row)).equals(rows.slice(row))
    for row in (0, 10 * group - 1):
        said = message(lambda row=row: read(path, row))
        assert said.startswith(f"{path}: cannot be read as Parquet: ")


def test_opening_near_the_end_of_a_large_file_reads_little_of_it(tmp_path):
    rows = pa.table({"x": np.random.default_rng(0).integers(0, 2**62, 400_000)})
    path = write(tmp_path / "a.parquet", rows, group=20_000, compression="none")
    found = scan(path)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    for _ in module.read_from(DISK, path, found, 390_000, asked("x"), 1 << 20):
        pass
    assert bytes_read() - before < 0.15 * found.num_bytes


def test_a_flipped_bit_in_a_page_is_caught_by_its_checksum(tmp_path):
    rows = pa.table({"x": np.arange(ROWS)})
    path = write(tmp_path / "a.parquet", rows, compression="none", use_dictionary=False)
    last = chunk_ranges(path, 2)[0][1] - 1
    data = bytearray(Path(path).read_bytes())
    data[last] ^= 1
    Path(path).write_bytes(data)
    assert pq.read_table(path) != rows
    assert "CRC" in message(lambda: read(path, 25))
    assert pa.Table.from_batches(read(path, 30)).equals(rows.slice(30))


# Columns and batches


def test_columns_that_are_not_asked_for_are_not_read(tmp_path):
    rows = table("a", ROWS)
    path = write(tmp_path / "a.parquet", rows)
    wipe(path, [r for group in range(6) for r in chunk_ranges(path, group, "text")])
    assert pa.Table.from_batches(read(path, 5, ["tokens"])).equals(rows.select([1]).slice(5))
    assert message(lambda: read(path, 5, ["text"])).startswith(f"{path}: ")


def test_batches_hold_about_the_bytes_asked_for_and_at_most_8192_rows(tmp_path):
    rows = pa.table({"x": [os.urandom(1000) for _ in range(300)], "y": range(300)})
    path = write(tmp_path / "a.parquet", rows, group=100)
    batches = read(path, batch_bytes=10_000)
    assert 20 <= len(batches) <= 60
    assert max(batch.nbytes for batch in batches) <= 15_000
    small = write(tmp_path / "b.parquet", pa.table({"x": range(20000)}), group=20000)
    assert [batch.num_rows for batch in read(small)] == [8192, 8192, 3616]


def test_a_wide_column_that_is_not_asked_for_does_not_make_batches_short(tmp_path):
    rows = pa.table({"wide": [os.urandom(5000) for _ in range(200)], "label": range(200)})
    path = write(tmp_path / "a.parquet", rows, group=100)
    assert len(read(path, columns=["label"], batch_bytes=10_000)) <= 2
    assert len(read(path, columns=["wide", "label"], batch_bytes=10_000)) >= 50


def test_the_file_is_open_only_while_rows_are_read(tmp_path):
    path = write(tmp_path / "a.parquet", table("a", ROWS))

    def is_open() -> bool:
        return path in [
            os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        ]

    batches = module.read_from(DISK, path, scan(path), 0, asked("text"), 100)
    assert not is_open()
    next(batches)
    assert is_open()
    batches.close()  # type: ignore[attr-defined]
    assert not is_open()
    read(path)
    assert not is_open()


# What is wrong with a file


def test_a_changed_file_is_named_with_both_digests_and_the_way_out(tmp_path):
    path = write(tmp_path / "a.parquet", table("a", 30))
    planned = scan(path)
    write(tmp_path / "a.parquet", table("b", 30))
    said = message(lambda: read(path, planned=planned), SourceChangedError)
    assert said == (
        f"{path}: has changed since it was planned: expected digest {planned.digest[:16]}.., "
        f"found {scan(path).digest[:16]}..; plan again, or restore the file"
    )


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "gone.parquet"
    assert message(lambda: scan(path)) == f"{path}: no such file"
    assert (
        message(lambda: list(module.read_from(DISK, str(path), NOTHING, 0, asked("x"), 1)))
        == f"{path}: no such file"
    )


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.parquet").mkdir()
    said = message(lambda: scan(tmp_path / "a.parquet"))
    assert said.startswith(f"{tmp_path / 'a.parquet'}: cannot be read as Parquet: ")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"PA",
        lambda data: b"PAR1",
        lambda data: data[:-10],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\n",
        lambda data: b'{"text": "not Parquet"}\n',
    ],
    ids=["empty", "2 bytes", "4 bytes", "end cut", "half", "more", "json"],
)
def test_what_does_not_end_as_parquet_is_told_with_its_end_and_size(tmp_path, spoil):
    path = write(tmp_path / "a.parquet", table("a", 30))
    data = spoil(Path(path).read_bytes())
    Path(path).write_bytes(data)
    found = f"ends with {data[-4:]!r} after {len(data)} bytes" if data else "is empty"
    assert message(lambda: scan(path)) == (
        f"{path}: expected a Parquet file (its last bytes are b'PAR1'), but it {found}; "
        "it may be truncated or another format"
    )


def test_a_footer_longer_than_the_file_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"x" * 20 + (5000).to_bytes(4, "little") + b"PAR1")
    assert message(lambda: scan(path)) == (
        f"{path}: footer claims 5000 bytes in a file of 32; truncated?"
    )


def test_a_footer_that_is_no_footer_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"x" * 20 + (20).to_bytes(4, "little") + b"PAR1")
    assert message(lambda: scan(path)).startswith(f"{path}: cannot be read as Parquet: ")


# Names


@pytest.mark.parametrize("name", ["a.parquet", "x/a.PARQUET", "a.snappy.parquet", "a.pq"])
def test_parquet_files_are_known_by_their_names(name):
    assert format_of(name) is module


@pytest.mark.parametrize("name", ["a.parquet.tmp", "parquet", "a.csv", "a.parquet/b", ""])
def test_other_names_are_not_parquet(name):
    assert format_of(name) is not module
    assert ".parquet, .pq" in known_suffixes()


def test_of_a_nested_column_only_the_leaf_that_is_asked_for_is_decoded(tmp_path):
    rows = pa.table({"s": [{"a": {"x": i, "y": "t" * 100}, "b": [i]} for i in range(20)]})
    path = write(tmp_path / "a.parquet", rows)
    for column, kind in (("s.a.x", "struct<a: struct<x: int64>>"), ("s.b", "b: list<element: i")):
        (batch, *_) = read(path, columns=[column])
        assert kind in str(batch.schema.field("s").type)
        assert "y" not in str(batch.schema.field("s").type)
    (batch, *_) = read(path, columns=["nothing"])
    assert batch.num_columns == 0
    assert batch.num_rows > 0
