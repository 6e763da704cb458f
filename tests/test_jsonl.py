"""JSON Lines as a source: types of the whole file, blocks, bad lines, compression, and damage."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from pipeline.formats import FileScan, ReadOptions, SourceChangedError, SourceError, blocks
from pipeline.formats import jsonl as module

DISK = fs.LocalFileSystem()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of about 200 bytes, so that a small file has many."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 200)


def write(path: Path, *lines: Any) -> Path:
    """A file of lines; what is no bytes is written as JSON."""
    text = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    path.write_bytes(compressed(path, text))
    return path


def compressed(path: Path, text: bytes) -> bytes:
    if path.suffix == ".gz":
        return gzip.compress(text)
    return pa.compress(text, codec="zstd", asbytes=True) if path.suffix == ".zst" else text


def scan(path: Path, **options: Any) -> FileScan:
    return module.scan(DISK, str(path), ReadOptions(**options))


def read(
    path: Path,
    known: FileScan | None = None,
    row: int = 0,
    columns: pa.Schema | None = None,
    batch_bytes: int = 1 << 20,
) -> list[dict[str, Any]]:
    known = known or scan(path)
    columns = known.schema if columns is None else columns
    batches = module.read_from(DISK, str(path), known, row, columns, batch_bytes)
    return [item for batch in batches for item in batch.to_pylist()]


def message(call: Callable[[], Any], kind: type[Exception] = SourceError) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return str(raised.value)


# Types


def test_text_that_looks_like_a_time_stays_text(tmp_path):
    items = [{"day": "2024-01-01", "in": {"at": ["2024-01-01T00:00:00Z"]}}]
    path = write(tmp_path / "a.jsonl", *items)
    assert scan(path).schema == pa.schema(
        [("day", pa.string()), ("in", pa.struct([("at", pa.list_(pa.string()))]))]
    )
    assert read(path) == items


def test_types_are_those_of_the_whole_file_with_late_fields_at_the_end(tmp_path, small_blocks):
    items: list[dict[str, Any]] = [{"a": n, "b": None} for n in range(50)]
    items += [{"a": 1.5, "b": {"x": "y"}, "late": [1]}, {"b": {"z": True}}]
    path = write(tmp_path / "a.jsonl", *items)
    found = scan(path)
    assert found.schema == pa.schema(
        [
            ("a", pa.float64()),
            ("b", pa.struct([("x", pa.string()), ("z", pa.bool_())])),
            ("late", pa.list_(pa.int64())),
        ]
    )
    assert len(found.blocks) > 3
    rows = read(path, found)
    assert [row["a"] for row in rows] == [*range(50), 1.5, None]
    assert rows[0] == {"a": 0.0, "b": None, "late": None}
    assert rows[-1] == {"a": None, "b": {"x": None, "z": True}, "late": None}


def test_a_given_type_is_taken_before_what_the_values_look_like(tmp_path):
    path = write(tmp_path / "a.jsonl", {"id": 18446744073709551615, "x": 1, "day": "2024-01-01"})
    given = {"id": pa.uint64(), "x": pa.float32(), "day": pa.date32()}
    found = scan(path, schema=given)
    assert found.schema == pa.schema(list(given.items()))
    # A time is parsed as text, for the cast that every source's columns go through.
    assert read(path, found) == [{"id": 18446744073709551615, "x": 1.0, "day": "2024-01-01"}]


def test_a_given_column_that_no_line_has_is_not_in_the_schema(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a": 1, "b": None})
    found = scan(path, schema={"b": pa.int8(), "c": pa.string()})
    assert found.schema == pa.schema([("a", pa.int64()), ("b", pa.int8())])


def test_a_given_type_that_the_parser_lacks_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a": {"k": 1}})
    said = message(lambda: scan(path, schema={"a": pa.map_(pa.string(), pa.int64())}))
    assert said.startswith(f"{path}: `schema` has a type that JSON Lines cannot be read as: ")
    assert "map<string, int64>" in said


def test_a_value_that_does_not_fit_a_given_type_names_line_and_value(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a": 1}, {"a": 300})
    assert message(lambda: scan(path, schema={"a": pa.int8()})) == (
        f"{path}: line 2 cannot be read: Failed to convert JSON to int8, couldn't parse:300; the "
        "line is '{\"a\": 300}'; repair it, or say on_bad_line: skip to leave such lines out"
    )


@pytest.mark.parametrize(
    ("kind", "good", "bad", "why"),
    [
        (pa.date32(), "2024-01-31", "2024-01-32", "Failed to parse string: '2024-01-32'"),
        (pa.timestamp("us", "UTC"), "2024-01-31T00:00:00Z", "noon", "Failed to parse string: 'no"),
        (pa.list_(pa.float32(), 2), [1, 2], [1, 2, 3], "a list of 3 values is none of 2"),
    ],
)
def test_a_text_that_is_no_value_of_a_given_type_is_a_bad_line_too(
    tmp_path, small_blocks, kind, good, bad, why
):
    path = write(tmp_path / "a.jsonl", *({"a": bad if n == 40 else good} for n in range(60)))
    said = message(lambda: scan(path, schema={"a": kind}))
    assert said.startswith(f"{path}: line 41 cannot be read: {why}")
    found = scan(path, schema={"a": kind}, skip_bad_lines=True)
    assert (found.num_rows, found.bad_lines) == (59, 1)


def test_values_of_two_types_in_one_column_name_the_line(tmp_path, small_blocks):
    items: list[Any] = [{"a": {"b": n}} for n in range(40)]
    items[33] = {"a": {"b": "33"}}
    path = write(tmp_path / "a.jsonl", *items)
    assert message(lambda: scan(path)) == (
        f"{path}: column 'a.b' is string in line 34, but int64 before it; a column has one type: "
        "repair the file, or leave the column out of it"
    )


@pytest.mark.parametrize("apart", [0, 30])
def test_whole_numbers_that_a_float_would_round_are_refused(tmp_path, small_blocks, apart):
    items = [{"a": 2**53 + 1}, *({"a": 1} for _ in range(apart)), {"a": 1.5}]
    path = write(tmp_path / "a.jsonl", *items)
    said = message(lambda: scan(path))
    assert said.startswith(f"{path}: column 'a' is float64, since some of its numbers have a frac")
    assert "it has one of about 90071992547409" in said
    assert "say `schema: {a: ..}`, with float64 if that is right" in said
    found = scan(path, schema={"a": pa.float64()})
    assert read(path, found)[-1] == {"a": 1.5}
    path = write(tmp_path / "b.jsonl", {"n": [{"a": 12345678901234567890}]})
    said = message(lambda: scan(path))
    assert "column 'n[].a' is float64" in said
    assert "of about 1.2345678901234567e+19" in said
    assert "say `schema: {n: ..}`" in said


def test_objects_that_are_always_empty_tell_no_type(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a": {"b": {}}}, {"a": None})
    assert message(lambda: scan(path)) == (
        f"{path}: column 'a.b' holds only empty objects, which tell no type; give column 'a' one "
        "by `schema`, or take it out"
    )
    path = write(tmp_path / "b.jsonl", {"a": {"b": {}}}, {"a": {"b": {"c": None}}})
    kind = pa.struct([("b", pa.struct([("c", pa.int64())]))])
    assert scan(path, schema={"a": kind}).schema == pa.schema([("a", kind)])


def test_fields_of_a_given_type_that_the_file_does_not_have_are_not_in_its_schema(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a": {"x": 1, "y": 2}, "l": [{"z": 1}]})
    given = {
        "a": pa.struct([("x", pa.int8()), ("X", pa.int8())]),
        "l": pa.list_(pa.struct([("q", pa.int8()), ("z", pa.int8())])),
    }
    assert scan(path, schema=given).schema == pa.schema(
        [
            ("a", pa.struct([("x", pa.int8())])),
            ("l", pa.list_(pa.struct([("z", pa.int8())]))),
        ]
    )


@pytest.mark.parametrize(
    "values",
    [
        [[None, 1]],
        [None, [None, "x"], ["y", None]],
        [[None, {"x": [None, 1.5]}]],
        [[None, None, True], [], [False]],
        [[[None, [None, 2]]]],
    ],
)
def test_nulls_before_the_first_value_of_a_list_are_kept(tmp_path, values):
    items = [{"a": value, "b": n} for n, value in enumerate(values)]
    assert read(write(tmp_path / "a.jsonl", *items)) == items


@pytest.mark.parametrize("depth", [70, 5_000])
def test_what_lies_too_deep_is_refused(tmp_path, depth):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": ' + "[" * depth + "]" * depth + "}\n")
    assert re.search(r"lists or objects.* deep inside each other$", message(lambda: scan(path)))


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"PAR1rest", "this looks like Parquet: give the file a name that ends in .parquet"),
        (
            gzip.compress(b"{}", mtime=0),
            "this looks like gzip: give the file a name that ends in .gz",
        ),
        ("{}".encode("utf-16"), "this looks like UTF-16: save it as UTF-8"),
        (b'{\n"a": 1\n}\n', "this looks like an object over several lines: write it on one"),
        (b'[{"a": 1}]', "this looks like one array: write its elements a line each"),
    ],
)
def test_what_is_not_json_lines_is_told_for_what_it_looks_like(tmp_path, data, hint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    assert f"; {hint}; the line is " in message(lambda: scan(path))


# Lines


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"null", "expected one JSON object a line"),
        (b"3", "expected one JSON object a line"),
        (b'"text"', "expected one JSON object a line"),
        (b'[{"a": 1}]', "expected one JSON object a line; this looks like one array"),
        (b'{"a": 1}{"a": 2}', "expected one JSON object a line, found more than one"),
        (b'{"a": 1} null', "expected one JSON object a line, found more than one"),
        (b'{"a": 1} 7', "found number where object was expected"),
        (b'{"a": 1, "b": {"c": [1, "x"]}}', "column 'b.c.[]' has string where number was expected"),
        (b'{"a": 1', "Missing a comma or '}' after an object member."),
        (b'{"a": "\xff"}', "expected UTF-8, found byte 0xff"),
        (b'{"a": 1, "a": 2}', "Column(/a) was specified twice"),
        (b"{'a': 1}", "Missing a name for object member."),
    ],
)
def test_a_line_that_is_no_item_is_named_or_skipped(tmp_path, line, why):
    path = write(tmp_path / "a.jsonl", {"a": 0}, b"", {"a": 1}, line, {"a": 2})
    said = message(lambda: scan(path))
    assert said.startswith(f"{path}: line 4 cannot be read: {why}")
    assert said.endswith("repair it, or say on_bad_line: skip to leave such lines out")
    found = scan(path, skip_bad_lines=True)
    assert (found.num_rows, found.bad_lines) == (3, 1)
    assert read(path, found) == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert read(path, found, row=2) == [{"a": 2}]


def test_blank_lines_marks_and_ends_of_lines_make_no_items(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n {"a": 2}\n\n{"a": 3}')
    assert read(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read(path, row=1) == [{"a": 2}, {"a": 3}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("text", [b"", b"\n\n", b"  \n"])
def test_a_file_without_lines_has_no_rows(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(compressed(path, text))
    found = scan(path)
    assert (found.num_rows, found.blocks, found.schema) == (0, (), pa.schema([]))
    assert read(path, found) == []


@pytest.mark.parametrize("length", [300, 5_000, 3_000_000])
def test_a_line_may_be_as_long_as_allowed_and_no_longer(tmp_path, small_blocks, length):
    long = {"a": "x" * length}
    size = len(json.dumps(long))
    path = write(tmp_path / "a.jsonl", {"a": "1"}, long, {"a": "3"}, long, {"a": "5"})
    assert read(path, scan(path, max_line_bytes=size))[1] == long
    said = message(lambda: scan(path, max_line_bytes=size - 1))
    assert said.startswith(
        f"{path}: line 2 cannot be read: it is longer than max_line_bytes, {size - 1:,}; the line "
        'is \'{"a": "xxx'
    )
    found = scan(path, max_line_bytes=size - 1, skip_bad_lines=True)
    assert (found.num_rows, found.bad_lines) == (3, 2)
    assert read(path, found) == [{"a": "1"}, {"a": "3"}, {"a": "5"}]


def test_many_bad_lines_are_left_out_one_by_one(tmp_path, small_blocks):
    items = [b"bad" if n % 7 == 3 else {"a": n} for n in range(200)]
    path = write(tmp_path / "a.jsonl", *items)
    found = scan(path, skip_bad_lines=True)
    good = [item for item in items if item != b"bad"]
    assert found.bad_lines == 200 - len(good)
    for row in (0, 5, 6, 100, len(good) - 1):
        assert read(path, found, row=row) == good[row:]


# Blocks


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(-(2**62), 2**62) | st.none(), min_size=1, max_size=60),
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=60),
    nested=st.lists(st.none() | st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=60),
    block=st.integers(1, 400),
    batch=st.integers(1, 300),
    ends=st.booleans(),
)
def test_rows_from_any_row_are_what_python_reads(
    tmp_path_factory: Any,
    numbers: list[Any],
    texts: list[str],
    nested: list[Any],
    block: int,
    batch: int,
    ends: bool,
) -> None:
    items = [
        {"n": n, "t": t, "in": {"l": v}} for n, t, v in zip(numbers, texts, nested, strict=False)
    ]
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    text = "\n".join(json.dumps(item, ensure_ascii=ends) for item in items)
    path.write_text(text + ("\n" if ends else ""), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        found = scan(path)
    assert found.num_rows == len(items) == sum(found.group_rows)
    assert len(found.blocks) == len(found.group_rows)
    for row in {0, len(items) // 2, len(items) - 1}:
        assert read(path, found, row=row, batch_bytes=batch) == items[row:]


def test_blocks_do_not_hang_on_how_a_stream_comes(tmp_path, monkeypatch):
    items = [{"a": "x" * (n % 50)} for n in range(500)]
    plain, packed = (write(tmp_path / name, *items) for name in ("a.jsonl", "a.jsonl.gz"))
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    assert scan(plain).blocks == scan(packed).blocks
    before = scan(plain, max_line_bytes=40, skip_bad_lines=True).blocks
    monkeypatch.setattr(module._Hashed, "read", short_reads(module._Hashed.read))
    assert scan(plain, max_line_bytes=40, skip_bad_lines=True).blocks == before


def short_reads(whole: Callable[[Any, int], bytes]) -> Callable[[Any, int], bytes]:
    return lambda self, size=-1: whole(self, min(size, 777))


def test_opening_at_a_row_reads_no_block_before_it(tmp_path, small_blocks):
    items = [{"a": n} for n in range(200)]
    path = write(tmp_path / "a.jsonl", *items)
    found = scan(path)
    data = bytearray(path.read_bytes())
    data[: found.blocks[3].start] = b"?" * found.blocks[3].start
    path.write_bytes(data)
    row = sum(found.group_rows[:3])
    assert read(path, found, row=row) == items[row:]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.ndjson"])
def test_a_compressed_file_gives_the_rows_of_its_text(tmp_path, small_blocks, name):
    items = [{"a": n, "b": "x" * (n % 30)} for n in range(300)]
    path = write(tmp_path / name, *items)
    found = scan(path)
    assert found.num_bytes == path.stat().st_size
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    for row in (0, 17, 299):
        assert read(path, found, row=row, batch_bytes=64) == items[row:]


# Columns


def test_columns_are_read_alone_and_by_paths(tmp_path):
    items = [{"a": 1, "meta": {"body": {"text": "t", "n": 3}, "x": 1}}, {"meta": None}, {}]
    path = write(tmp_path / "a.jsonl", *items)
    asked = pa.schema([("meta.body.text", pa.large_string()), ("meta.x", pa.int64())])
    assert read(path, columns=asked) == [
        {"meta": {"body": {"text": "t"}, "x": 1}},
        {"meta": None},
        {"meta": None},
    ]


def test_a_key_with_a_dot_in_it_is_a_column_of_its_own(tmp_path):
    path = write(tmp_path / "a.jsonl", {"a.b": 1, "c": 2}, {"a.b": 3})
    asked = pa.schema([("a.b", pa.int64())])
    assert [row["a.b"] for row in read(path, columns=asked)] == [1, 3]


def test_sizes_of_columns_follow_what_they_take_compressed(tmp_path):
    items = [{"same": "x" * 200, "text": os.urandom(100).hex()} for _ in range(500)]
    sizes = scan(write(tmp_path / "a.jsonl", *items)).column_bytes
    assert 40_000 < sizes["text"] < 110_000
    assert sizes["same"] < 1_000


# What is wrong with a file


def test_a_changed_file_is_named(tmp_path, small_blocks):
    items = [{"a": n} for n in range(100)]
    path = write(tmp_path / "a.jsonl", *items)
    found = scan(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b": 57}", b": 75}"))
    assert read(path, found, row=90) == items[90:]
    said = message(lambda: read(path, found), SourceChangedError)
    assert said.startswith(f"{path}: has changed since it was planned: expected a block at byte ")
    assert said.endswith("plan again, or restore the file")
    path.write_bytes(data + b"{}\n")
    said = message(lambda: read(path, found), SourceChangedError)
    assert f"expected a size of {len(data):,} bytes, found {len(data) + 3:,}" in said


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_compressed_file_is_named(tmp_path, name):
    path = write(tmp_path / name, *({"a": os.urandom(20).hex()} for _ in range(1000)))
    found = scan(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert message(lambda: scan(path)) == (
        f"{path}: cannot be read as JSON Lines: Truncated compressed stream"
    )
    assert "expected a size of" in message(lambda: read(path, found), SourceChangedError)


def test_other_bytes_under_the_name_of_a_compressed_file_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b'{"a": 1}\n')
    assert message(lambda: scan(path)).startswith(f"{path}: cannot be read as JSON Lines: ")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "gone.jsonl"
    assert message(lambda: scan(path)) == f"{path}: no such file"


def test_checksums_are_those_of_the_blocks(tmp_path, small_blocks):
    path = write(tmp_path / "a.jsonl", *({"a": n} for n in range(100)))
    data = path.read_bytes()
    found = scan(path)
    assert [zlib.crc32(data[b.start : b.start + b.size]) for b in found.blocks] == [
        b.crc32 for b in found.blocks
    ]
    assert sum(block.size for block in found.blocks) == len(data)


def test_no_row_of_a_long_file_is_lost_at_the_edges_of_its_blocks(tmp_path):
    items: Sequence[dict[str, Any]] = [{"a": n, "t": "y" * 400} for n in range(25_000)]
    path = write(tmp_path / "a.jsonl", *items)
    found = scan(path)
    assert len(found.blocks) == 3
    assert blocks.BLOCK_BYTES <= found.blocks[0].size < blocks.BLOCK_BYTES + 500
    assert [row["a"] for row in read(path, found)] == list(range(25_000))
