"""A finished mix's folder is read as it is by others: same rows, same order, same shares."""

from __future__ import annotations

import importlib
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.plan import plan
from pipeline.reader import ShardReader
from pipeline.transforms import build

from .mixes import WEIGHTS, config, table

FILES = "out/shards/*.parquet"


def with_numbers(rows: pa.Table) -> pa.Table:
    """Rows with a fixed-size list and a float beside the text and the ragged list."""
    rng = np.random.default_rng(rows.num_rows)
    vectors = pa.array(rng.random(3 * rows.num_rows, dtype=np.float32))
    return rows.append_column(
        "vector", pa.FixedSizeListArray.from_arrays(vectors, 3)
    ).append_column("score", pa.array(rng.random(rows.num_rows)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a mix of thirteen shards, in which a dataset repeats, lies in ``out``."""
    folder = tmp_path_factory.mktemp("ecosystem")
    for name, rows in (("web", 100), ("code", 73), ("books", 11)):
        (folder / "data" / name).mkdir(parents=True)
        path = folder / "data" / name / "part.parquet"
        pq.write_table(with_numbers(table(name, rows)), path, row_group_size=17)
    settings = {"num_batches": 50, "on_exhausted": "repeat", "batches_per_row_group": 3}
    build(plan(config(folder, WEIGHTS, **settings)))
    return folder


@pytest.mark.skipif(not os.environ.get("CI"), reason="elsewhere what is missing is skipped")
@pytest.mark.parametrize(
    "package", ["datasets", "duckdb", "grain", "polars", "torch", "torchdata.stateful_dataloader"]
)
def test_continuous_integration_lacks_none_of_them(package: str) -> None:
    assert importlib.import_module(package)


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def rows(folder: Path) -> pa.Table:
    """All rows, as ours gives them."""
    reader = ShardReader(folder / "out")
    assert reader.num_shards == 13
    return pa.concat_tables(reader.batches())


@pytest.fixture(scope="module")
def rows_used(folder: Path) -> dict[str, int]:
    """Rows of each dataset, as the manifest says."""
    datasets = ShardReader(folder / "out").manifest.document["datasets"]
    used = {dataset["name"]: int(dataset["rows_used"]) for dataset in datasets}
    assert sum(used.values()) == 400
    return used


_HUGGING_FACE = """
import json
from datasets import load_dataset

files = "out/shards/*.parquet"
stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
loaded = load_dataset("parquet", data_files=files, split="train")
print(json.dumps([list(stream), list(loaded)]))
"""


def test_hugging_face_datasets_streams_and_loads_all_rows_in_order(
    rows: pa.Table, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    # In a process of its own, since these are read when it is imported.
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment = {**os.environ, **offline, "USE_TORCH": "0"}  # importing it takes seconds
    command = [sys.executable, "-c", _HUGGING_FACE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    streamed, loaded = json.loads(done.stdout)
    assert streamed == rows.to_pylist()
    assert loaded == rows.to_pylist()


def test_polars_scans_all_rows_in_order_and_counts_what_the_manifest_says(
    rows: pa.Table, rows_used: dict[str, int]
) -> None:
    pl = pytest.importorskip("polars")
    frame = pl.scan_parquet(FILES)
    found = frame.collect()
    assert found.to_dicts() == rows.to_pylist()
    assert found.schema["vector"] == pl.Array(pl.Float32, 3)
    counted = frame.group_by("mix_dataset").len().collect()
    assert dict(counted.iter_rows()) == rows_used
    for name, used in rows_used.items():
        kept = frame.filter(pl.col("mix_dataset") == name)
        assert kept.select(pl.len()).collect().item() == used


def test_duckdb_reads_all_rows_in_order_and_counts_what_the_manifest_says(
    rows: pa.Table, rows_used: dict[str, int]
) -> None:
    # Older ones cannot read integers in lists, as shards encode them.
    duckdb = pytest.importorskip("duckdb", minversion="2.0")
    counted = duckdb.sql(
        "select mix_dataset, count(*) from 'out/shards/*.parquet' group by 1"
    ).fetchall()
    assert dict(counted) == rows_used
    found = duckdb.sql(f"select * from '{FILES}'")
    assert found.columns == rows.column_names
    assert found.fetchall() == [tuple(row.values()) for row in rows.to_pylist()]


def test_pyarrow_dataset_reads_all_rows_in_order(rows: pa.Table, rows_used: dict[str, int]) -> None:
    ds = pytest.importorskip("pyarrow.dataset")
    found = ds.dataset("out/shards")
    assert found.schema.equals(rows.schema)
    assert pa.Table.from_batches(found.to_batches()).equals(rows)
    for name, used in rows_used.items():
        assert found.count_rows(filter=ds.field("mix_dataset") == name) == used


# What a batch is mapped to, in worker processes too.
as_dict = operator.methodcaller("to_pydict")


def test_grain_maps_over_the_reader_and_resumes_twice_from_a_state() -> None:
    grain = pytest.importorskip("grain")
    reader = ShardReader("out/")
    assert isinstance(reader, grain.sources.RandomAccessDataSource)
    expected = [batch.to_pydict() for batch in reader.batches()]
    threads = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)

    def opened() -> Any:
        source = grain.MapDataset.source(ShardReader("out/"))
        return iter(source.map(as_dict).to_iter_dataset(threads))

    assert list(opened()) == expected
    found, state = [], opened().get_state()
    for batches in (17, 8, len(expected) - 25):
        iterator = opened()
        iterator.set_state(json.loads(json.dumps(state)))
        found += [next(iterator) for _ in range(batches)]
        state = iterator.get_state()
    assert found == expected
    assert next(iterator, None) is None


def test_grain_shuffles_batches_of_the_reader() -> None:
    grain = pytest.importorskip("grain")
    reader = ShardReader("out/")
    shuffled = grain.MapDataset.source(reader).shuffle(seed=1).map(as_dict)
    numbers = [batch["mix_batch"][0] for batch in shuffled.to_iter_dataset()]
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(50))
    assert list(shuffled) == [reader[n].to_pydict() for n in numbers]


def test_grain_reads_in_worker_processes() -> None:
    grain = pytest.importorskip("grain")
    reader = ShardReader("out/")
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    source = grain.MapDataset.source(reader).map(as_dict).to_iter_dataset()
    found = list(source.mp_prefetch(workers))
    assert found == [batch.to_pydict() for batch in reader.batches()]


def test_a_state_of_grains_data_loader_is_taken_by_a_reader_of_the_same_mix() -> None:
    grain = pytest.importorskip("grain")
    expected = [batch.to_pydict() for batch in ShardReader("out/").batches()]

    def opened() -> Any:
        reader = ShardReader("out/")
        sampler = grain.samplers.SequentialSampler(len(reader), grain.sharding.NoSharding())
        loader = grain.DataLoader(data_source=reader, sampler=sampler, operations=[])
        return iter(loader)

    first, second = opened(), opened()
    found = [next(first).to_pydict() for _ in range(17)]
    # It names its source by repr, and refuses a state that names another.
    second.set_state(first.get_state())
    assert found + [batch.to_pydict() for batch in second] == expected
