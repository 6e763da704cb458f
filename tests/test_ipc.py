"""Arrow IPC as a source: files and streams, opening at any row, dictionaries, and damage."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from pyarrow import fs

from pipeline.formats import FileScan, ReadOptions, SourceChangedError, SourceError
from pipeline.formats import ipc as module

from .mixes import table

DISK = fs.LocalFileSystem()
KINDS = ("file", "stream")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1500)


def write(
    path: Path, rows: pa.Table, kind: str, batch: int = 10, compression: str | None = None
) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with make(str(path), rows.schema, options=options) as writer:
        for piece in rows.to_batches(max_chunksize=batch):
            writer.write_batch(piece)
    return path


def scan(path: Path) -> FileScan:
    return module.scan(DISK, str(path), ReadOptions())


def batches(
    path: Path,
    known: FileScan | None = None,
    row: int = 0,
    columns: list[str] | None = None,
    batch_bytes: int = 1 << 20,
) -> Iterator[pa.RecordBatch]:
    known = known or scan(path)
    asked = pa.schema([(name, pa.null()) for name in columns or known.schema.names])
    return module.read_from(DISK, str(path), known, row, asked, batch_bytes)


def read(*args: Any, **kwargs: Any) -> pa.Table:
    return pa.Table.from_batches(list(batches(*args, **kwargs)))


def message(call: Callable[[], Any], kind: type[Exception] = SourceError) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_from_any_row_on_are_those_of_the_file(tmp_path, small_blocks, kind, compression):
    rows = table("a", 137)
    path = write(tmp_path / "a.arrow", rows, kind, compression=compression)
    found = scan(path)
    assert (found.num_rows, found.schema) == (137, rows.schema)
    assert found.num_bytes == path.stat().st_size
    assert len(found.group_rows) == len(found.blocks) > 3
    for row in (0, 1, 9, 10, 77, 136):
        assert read(path, found, row).equals(rows.slice(row))
    assert list(batches(path, found, 137)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_small_batches_make_one_block(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table("a", 1000), kind, batch=1)
    found = scan(path)
    assert found.group_rows == (1000,)
    assert read(path, found, 500).num_rows == 500


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_not_asked_for_are_left_out(tmp_path, kind):
    rows = table("a", 30)
    path = write(tmp_path / "a.arrow", rows, kind)
    assert read(path, columns=["tokens"], row=5).equals(rows.select(["tokens"]).slice(5))
    nested = pa.table({"m": [{"x": 1, "y": 2}], "n": [1]})
    path = write(tmp_path / "b.arrow", nested, kind)
    assert read(path, columns=["m.x"]).equals(nested.select(["m"]))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_about_the_bytes_asked_for(tmp_path, kind):
    rows = pa.table({"x": [os.urandom(1000) for _ in range(200)]})
    path = write(tmp_path / "a.arrow", rows, kind, batch=200)
    found = list(batches(path, batch_bytes=10_000))
    assert {batch.num_rows for batch in found[:-1]} == {9}
    assert pa.Table.from_batches(found).equals(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 7, 0, 3]])
def test_empty_files_and_empty_batches_have_no_rows(tmp_path, small_blocks, kind, sizes):
    schema = pa.schema([("x", pa.int64())])
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    path = tmp_path / "a.arrow"
    with make(str(path), schema) as writer:
        for size in sizes:
            writer.write_batch(pa.record_batch([pa.array(range(size), pa.int64())], schema=schema))
    found = scan(path)
    assert (found.num_rows, found.schema) == (sum(sizes), schema)
    assert [b.num_rows for b in batches(path, found)] == [size for size in sizes if size]


def dictionaries(*words: list[str]) -> list[pa.RecordBatch]:
    return [
        pa.record_batch(
            [pa.array(range(10 * n, 10 * n + len(given))), pa.array(given).dictionary_encode()],
            names=["n", "word"],
        )
        for n, given in enumerate(words)
    ]


@pytest.mark.parametrize("deltas", [False, True])
def test_a_stream_may_change_its_dictionaries(tmp_path, small_blocks, deltas):
    pieces = dictionaries(["a", "b"], ["a", "b", "c"], ["x"], ["x", "y", "x"])
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    with pa.ipc.new_stream(str(path), pieces[0].schema, options=options) as writer:
        for piece in pieces:
            writer.write_batch(piece)
    found = scan(path)
    expected = [item for piece in pieces for item in piece.to_pylist()]
    for row in range(len(expected)):
        got = [item for batch in batches(path, found, row) for item in batch.to_pylist()]
        assert got == expected[row:]


def test_a_file_may_have_a_dictionary_that_grows(tmp_path, small_blocks):
    pieces = dictionaries(["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"])
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(str(path), pieces[0].schema, options=options) as writer:
        for piece in pieces:
            writer.write_batch(piece)
    expected = [item for piece in pieces for item in piece.to_pylist()]
    for row in range(len(expected)):
        got = [item for batch in batches(path, row=row) for item in batch.to_pylist()]
        assert got == expected[row:]


def test_feather_files_are_arrow_files(tmp_path):
    rows = table("a", 50)
    pyarrow.feather.write_feather(rows, str(tmp_path / "a.feather"), chunksize=20)
    assert read(tmp_path / "a.feather", row=30).equals(rows.slice(30))


def test_metadata_of_the_schema_is_dropped(tmp_path):
    rows = table("a", 3).replace_schema_metadata({"huggingface": "{}"})
    assert scan(write(tmp_path / "a.arrow", rows, "stream")).schema.metadata is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_is_of_the_footer_or_of_the_whole_stream(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table("a", 50), kind)
    data = path.read_bytes()
    if kind == "stream":
        expected = hashlib.sha256(data)
    else:
        size = int.from_bytes(data[-10:-6], "little")
        expected = hashlib.sha256(data[-10 - size : -10] + len(data).to_bytes(8, "little"))
    assert scan(path).digest == expected.hexdigest()


def test_scanning_a_file_reads_little_of_it(tmp_path):
    rows = pa.table({"x": np.random.default_rng(0).integers(0, 2**62, 1_000_000)})
    path = write(tmp_path / "a.arrow", rows, "file", batch=100_000)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    found = scan(path)
    assert bytes_read() - before < 0.9 * found.num_bytes  # one block, for the sizes of columns
    before = bytes_read()
    assert next(batches(path, found, 900_000)).num_rows > 0
    assert bytes_read() - before < found.blocks[1].size + 10_000


def test_a_changed_stream_is_named_by_its_block(tmp_path, small_blocks):
    rows = pa.table({"x": np.arange(2000)})
    path = write(tmp_path / "a.arrow", rows, "stream", batch=100)
    found = scan(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert read(path, found, 1900).equals(rows.slice(1900))
    said = message(lambda: read(path, found), SourceChangedError)
    assert said.startswith(f"{path}: has changed since it was planned: expected a block at byte ")


@pytest.mark.parametrize("kind", KINDS)
def test_another_file_in_its_place_is_named(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table("a", 50), kind)
    found = scan(path)
    write(path, table("b", 51), kind)
    said = message(lambda: read(path, found), SourceChangedError)
    assert said.startswith(f"{path}: has changed since it was planned: expected ")
    assert said.endswith("plan again, or restore the file")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.02, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, kind, part):
    path = write(tmp_path / "a.arrow", table("a", 500), kind)
    data = path.read_bytes()
    path.write_bytes(data[: max(6, int(len(data) * part)) - (kind == "stream") * 9])
    assert message(lambda: scan(path)).startswith(f"{path}: expected an Arrow IPC ")


@pytest.mark.parametrize("data", [b"", b"text", b"PAR1" * 10, b"ARROW1", b"\xff" * 40])
def test_what_is_no_arrow_file_is_named(tmp_path, data):
    path = tmp_path / "a.arrow"
    path.write_bytes(data)
    assert message(lambda: scan(path)).startswith(f"{path}: ")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "gone.arrow"
    assert message(lambda: scan(path)) == f"{path}: no such file"


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes_in_heads_never_end_in_another_error_than_ours(tmp_path, kind):
    path = write(tmp_path / "a.arrow", table("a", 40), kind)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data), 150).tolist():
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(SourceError):
            list(batches(path))
