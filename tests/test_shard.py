"""What a shard file is: schema, name, footer, row groups, canonical bytes."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shard import (
    ColumnSizeError,
    Footer,
    Layout,
    ShardError,
    WriterOptions,
    check_shard,
    one_chunk,
    open_shard,
    shard_name,
    shard_schema,
    write_shard,
)

from .mixes import table

OPTIONS = WriterOptions("zstd", 1)
FOOTER = Footer("b" * 64, 3, 12, 4)


def write(path: Path, *groups: pa.Table, options: WriterOptions = OPTIONS) -> bytes:
    write_shard(str(path), groups[0].schema, options, FOOTER, groups)
    return path.read_bytes()


def test_names_sort_as_their_numbers() -> None:
    assert shard_name(7) == "shards/shard-00000007.parquet"
    assert sorted(map(shard_name, (10, 9, 99_999_999))) == list(
        map(shard_name, (9, 10, 99_999_999))
    )


def test_bytes_do_not_depend_on_chunks(tmp_path: Path) -> None:
    whole = table("a", 100)
    cut = pa.concat_tables([whole.slice(0, 33), whole.slice(33, 1), whole.slice(34)])
    sliced = pa.concat_tables([table("b", 50), whole]).slice(50)
    expected = write(tmp_path / "whole", whole)
    assert write(tmp_path / "cut", cut) == expected
    assert write(tmp_path / "sliced", sliced) == expected


def test_every_table_is_one_row_group(tmp_path: Path) -> None:
    write(tmp_path / "x", table("a", 40), table("b", 1), table("c", 7))
    metadata = pq.read_metadata(tmp_path / "x")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [40, 1, 7]


def test_numbers_in_lists_are_byte_stream_split_and_the_rest_uses_dictionaries(
    tmp_path: Path,
) -> None:
    rows = pa.table(
        {
            "label": ["x", "y"] * 500,
            "number": pa.array(range(1000), pa.int64()),
            "tokens": pa.array([[i, 2 * i] for i in range(1000)], pa.list_(pa.int32())),
            "features": pa.array([[0.5, i] for i in range(1000)], pa.list_(pa.float32(), 2)),
            "words": pa.array([["a", "b"]] * 1000),
        }
    )
    write(tmp_path / "x", rows)
    group = pq.read_metadata(tmp_path / "x").row_group(0)
    encodings = {
        column.path_in_schema.split(".")[0]: set(column.encodings)
        for column in map(group.column, range(group.num_columns))
    }
    assert all("BYTE_STREAM_SPLIT" in encodings[name] for name in ("tokens", "features"))
    assert all("RLE_DICTIONARY" in encodings[name] for name in ("label", "number", "words"))
    assert pq.read_table(tmp_path / "x").equals(rows)


@pytest.mark.parametrize("compression", ["zstd", "lz4", "snappy", "gzip", "none"])
def test_every_compression_reads_back(tmp_path: Path, compression: str) -> None:
    rows = table("a", 50)
    write(tmp_path / "x", rows, options=WriterOptions(compression, None))
    assert pq.read_table(tmp_path / "x").equals(rows)


def test_pages_carry_checksums(tmp_path: Path) -> None:
    rows = table("a", 500)
    data = bytearray(write(tmp_path / "x", rows, options=WriterOptions("none", None)))
    data[data.index(b"a:250:")] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()


def test_footer_tells_which_shard_of_which_build_it_is(tmp_path: Path) -> None:
    write(tmp_path / "x", table("a", 5))
    shard = open_shard(str(tmp_path / "x"), "x")
    assert shard.footer == FOOTER
    check_shard(shard, FOOTER, [5], "x")
    with pytest.raises(ShardError, match=r"x: belongs to another build: its bytes_id is bbbb"):
        check_shard(shard, Footer("c" * 64, 3, 12, 4), [5], "x")
    with pytest.raises(ShardError, match=r"x: holds batches 12 to 16 as shard 3; expected .* 4"):
        check_shard(shard, Footer("b" * 64, 4, 16, 4), [5], "x")
    with pytest.raises(ShardError, match=r"x: has 5 rows in 1 row groups, expected 6 in 2"):
        check_shard(shard, FOOTER, [3, 3], "x")


def test_other_parquet_files_are_no_shards(tmp_path: Path) -> None:
    pq.write_table(table("a", 5), tmp_path / "x")
    with pytest.raises(ShardError, match="x: is a Parquet file, but no shard of a mix"):
        open_shard(str(tmp_path / "x"), "x")
    (tmp_path / "y").write_bytes(b"nothing")
    with pytest.raises(ShardError, match="y: cannot be opened as Parquet"):
        open_shard(str(tmp_path / "y"), "y")


@pytest.mark.parametrize(("groups", "reads"), [(3, 1), (110, 2), (400, 2)])
def test_footer_and_seal_take_one_read_or_two_that_give_no_byte_twice(
    tmp_path: Path, groups: int, reads: int
) -> None:
    class Noted(io.FileIO):
        """A file that notes what is read of it."""

        def read(self, size: int | None = -1) -> bytes:
            taken.append(range(self.tell(), self.tell() + (size or 0)))
            return super().read(size)

    taken: list[range] = []
    columns = pa.table({f"column {number}": [number] for number in range(5)})
    data = write(tmp_path / "x", *[columns] * groups)
    shard = open_shard(pa.PythonFile(Noted(tmp_path / "x")), "x")
    assert len(shard.pages) == 2 * 5 * groups
    assert len(taken) == reads
    assert taken[0] == range(max(0, len(data) - (64 << 10)), len(data))
    for later, earlier in itertools.pairwise(taken):
        assert earlier.stop == later.start
    footer = int.from_bytes(data[-8:-4], "little")
    assert sum(map(len, taken)) <= max(64 << 10, 2 * footer + 64)


def test_an_error_while_writing_leaves_no_file_that_opens(tmp_path: Path) -> None:
    def groups() -> object:
        yield table("a", 5)
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        write_shard(str(tmp_path / "x"), table("a", 1).schema, OPTIONS, FOOTER, groups())
    with pytest.raises(ShardError):
        open_shard(str(tmp_path / "x"), "x")


def test_provenance_columns_follow_the_payload_and_have_no_nulls() -> None:
    schema = shard_schema(table("a", 1).schema)
    assert schema.names == ["text", "tokens", "mix_batch", "mix_dataset", "mix_row", "mix_epoch"]
    assert not any(field.nullable for field in list(schema)[2:])


def test_a_payload_column_named_like_provenance_is_refused() -> None:
    with pytest.raises(ShardError, match=r"named 'mix_row'.*columns: \{my_mix_row: mix_row"):
        shard_schema(pa.schema({"mix_row": pa.int64()}))


@pytest.mark.parametrize(
    ("kind", "value", "large"),
    [
        (pa.string(), "x" * 2**20, "large_string"),
        (pa.binary(), b"x" * 2**20, "large_binary"),
        (pa.list_(pa.int8()), [0] * 2**20, "large_list<element: int8>"),
        (pa.struct([("a", pa.string())]), {"a": "x" * 2**20}, "struct<a: large_string>"),
    ],
)
def test_what_one_array_cannot_hold_is_refused_before_a_file_follows_its_chunks(
    tmp_path: Path, kind: pa.DataType, value: object, large: str
) -> None:
    one = pa.table({"n": [1], "x": pa.array([value], kind)})
    rows = pa.concat_tables([one] * 2049)
    with pytest.raises(ColumnSizeError) as caught:
        write(tmp_path / "x", rows)
    assert str(caught.value).startswith(f"column 'x' of type {kind} takes 2,148,")
    assert "in 2,049 rows that are held together" in str(caught.value)
    assert f"`schema: {{x: {large}}}` in a dataset, or set fewer" in str(caught.value)
    fits = one_chunk(rows.slice(0, 3))
    assert [column.num_chunks for column in fits.columns] == [1, 1]
    assert fits == rows.slice(0, 3)


@given(st.integers(1, 10**12), st.integers(1, 1000), st.integers(1, 50), st.integers(0, 10**6))
def test_layout_covers_every_batch_once(
    batches: int, per_shard: int, per_group: int, seed: int
) -> None:
    layout = Layout(batches, per_shard, per_group)
    shard = seed % layout.num_shards
    first, held = layout.shard(shard)
    assert first == shard * per_shard
    assert 1 <= held <= per_shard
    assert held == per_shard or shard == layout.num_shards - 1
    assert (
        layout.shard(layout.num_shards - 1)[0] + layout.shard(layout.num_shards - 1)[1] == batches
    )
    groups = layout.groups(held)
    assert [batch for start, stop in groups for batch in range(start, stop)] == list(range(held))
    assert all(stop - start == per_group for start, stop in groups[:-1])
