"""Columns of a row group past what one array with 32-bit offsets holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline import registry, scatter
from pipeline.catalog import DatasetSpec, scan_datasets
from pipeline.errors import MixError
from pipeline.plan import Plan, plan
from pipeline.registry import Cursor
from pipeline.scatter import REQUEST, SourceGroups, serve_group
from pipeline.shard import WriterOptions
from pipeline.transforms import build

OPTIONS = WriterOptions("zstd", 1)


def heavy(folder: Path, **keys: Any) -> Plan:
    """The plan of a mix of texts of 200,000 bytes and small ones, in equal parts."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    for name, size in (("a", 200_000), ("b", 8)):
        texts = [rng.bytes(size // 2).hex() for _ in range(20)]
        rows = pa.table({"text": texts, "tag": ["x"] * 20, "label": [1] * 20})
        pq.write_table(rows, folder / "data" / f"{name}.parquet", use_dictionary=False)
    settings = {
        "output": str(folder / "out"),
        "batch_size": 40,
        "num_batches": 500,
        "batches_per_shard": 500,
        "on_exhausted": "repeat",
        "datasets": {
            name: {"path": str(folder / "data" / f"{name}.parquet"), "weight": 1} for name in "ab"
        },
    }
    return plan({**settings, **keys})


def test_row_groups_of_heavy_rows_hold_about_256_mib_and_at_least_a_batch(tmp_path: Path) -> None:
    # About 4 MB a batch are stored, and 16 MB are expected in memory.
    default = heavy(tmp_path)
    assert 14 <= default.layout.batches_per_row_group <= 18
    assert default.schema.field("text").type == pa.string()


def test_pages_are_measured_after_a_few_values_where_texts_may_be_huge() -> None:
    def values(kind: pa.DataType) -> int | None:
        size: int | None = OPTIONS.for_writer(pa.schema({"x": kind}))["write_batch_size"]
        return size

    assert values(pa.string()) is values(pa.large_list(pa.int32())) is None
    assert values(pa.large_string()) == values(pa.struct([("a", pa.large_binary())])) == 16


def test_columns_that_may_pass_two_gib_in_a_row_group_have_large_types(tmp_path: Path) -> None:
    found = heavy(tmp_path, batches_per_row_group=100)
    assert found.layout.batches_per_row_group == 100
    assert [field.type for field in list(found.schema)[:3]] == [
        pa.large_string(),
        pa.string(),
        pa.int64(),
    ]
    assert Plan.load(found.save().folder).catalog.schema == found.catalog.schema


def test_a_column_too_large_for_its_type_names_itself_the_shard_and_the_way_out(
    tmp_path: Path,
) -> None:
    # A mebibyte of one letter takes no room in storage, so that no plan can foresee it.
    pq.write_table(pa.table({"text": ["x" * 2**20]}), tmp_path / "a.parquet", compression="zstd")
    settings = {
        "output": str(tmp_path / "out"),
        "batch_size": 2100,
        "num_batches": 1,
        "on_exhausted": "repeat",
        "datasets": {"a": {"path": str(tmp_path / "a.parquet"), "weight": 1}},
    }
    with pytest.raises(MixError) as caught:
        build(plan(settings), write_path="gather")
    assert ("shards/shard-00000000.parquet: column 'text' of type string takes 2,202,") in str(
        caught.value
    )
    assert (
        "give it a type that can, with `schema: {text: large_string}` in a dataset, or set fewer "
        "batches_per_row_group"
    ) in str(caught.value)


@pytest.mark.slow
def test_a_row_group_past_two_gib_is_written_and_reads_back(tmp_path: Path) -> None:
    text = "x" * 2**20
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet", compression="zstd")
    given = {"path": str(tmp_path / "a.parquet"), "weight": 1, "schema": {"text": "large_string"}}
    settings = {
        "output": str(tmp_path / "out"),
        "batch_size": 2100,
        "num_batches": 1,
        "on_exhausted": "repeat",
        "datasets": {"a": given},
    }
    build(plan(settings))
    shard = pq.ParquetFile(tmp_path / "out" / "shards" / "shard-00000000.parquet")
    assert shard.num_row_groups == 1
    assert shard.metadata.row_group(0).column(0).total_uncompressed_size > 2**31
    first = next(shard.iter_batches(batch_size=100, columns=["text"]))
    assert pc.all(pc.equal(first.column(0), text)).as_py()


@pytest.mark.parametrize(("start", "count"), [(0, 3), (1, 2), (2, 1), (1, 9), (0, 6), (2, 40)])
def test_a_small_dataset_that_is_read_over_and_over_does_not_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, count: int
) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    catalog = scan_datasets([DatasetSpec("a", ("a.parquet",))], str(tmp_path))
    read = Cursor(catalog, catalog.datasets[0]).read(start, count)
    monkeypatch.setattr(registry, "_MAX_OFFSET", 20)
    bounded = Cursor(catalog, catalog.datasets[0]).read(start, count)
    assert pa.Table.from_batches(bounded).combine_chunks() == pa.Table.from_batches(read)
    if start + count > 3:
        assert len(bounded) > len(read) == 1


def test_rows_that_are_asked_for_many_times_are_served_one_by_one_before_they_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": ["a" * 50, "b", "c"]}), tmp_path / "a.parquet")
    catalog = scan_datasets([DatasetSpec("a", ("a.parquet",))], str(tmp_path))
    asked = np.zeros(9, REQUEST)
    asked["row"] = [0, 0, 2, 0, 1, 0, 0, 0, 2]
    asked["place"]["row"] = np.arange(9)

    def served() -> list[list[str]]:
        return [
            pa.ipc.read_record_batch(message, catalog.schema).column(0).to_pylist()
            for _, (_, message) in serve_group(SourceGroups(catalog), 0, [(None, asked)])
        ]

    (whole,) = served()
    monkeypatch.setattr(scatter, "_MAX_OFFSET", 200)
    one_by_one = served()
    assert [len(piece) for piece in one_by_one] == [1] * 9
    assert [text for piece in one_by_one for text in piece] == whole
    assert whole == [("a" * 50, "b", "c")[row] for row in asked["row"]]
