"""Row maps to shard files: the right rows, each source row group decoded once a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.catalog import Catalog, DatasetSpec, scan_datasets
from pipeline.formats import parquet
from pipeline.gather import RunWriter, _ahead, assemble
from pipeline.plan import plan
from pipeline.registry import Cursors
from pipeline.shard import shard_name
from pipeline.writing import BuildError

from .mixes import config, digests, write_sources

ROWS = {"a": 57, "b": 9, "c": 1}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("sources")
    paths = write_sources(folder, a=[30, 27], b=[9], c=[1])
    specs = [DatasetSpec(name, (str(path),)) for name, path in paths.items()]
    return scan_datasets(specs, str(folder))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(0, 200),
)
def test_slices_and_one_index_give_the_same_rows(
    catalog: Catalog, pieces: list[tuple[int, int]], start: int
) -> None:
    dataset = np.array([place for place, _ in pieces], np.int32)
    count = np.array([rows for _, rows in pieces], np.int64)
    # The pieces of one dataset follow on each other.
    offset, reached = np.empty_like(count), dict.fromkeys(range(3), start)
    for j, (place, rows) in enumerate(pieces):
        offset[j] = reached[place]
        reached[place] += rows
    names = list(ROWS)
    expected = [
        f"{names[place]}:{(int(offset[j]) + i) % ROWS[names[place]]}"
        for j, (place, rows) in enumerate(pieces)
        for i in range(rows)
    ]
    for slice_rows in (0, 10**9):
        found = assemble(Cursors(catalog), dataset, offset, count, slice_rows)
        assert [text.rsplit(":", 1)[0] for text in found["text"].to_pylist()] == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_row_groups_are_decoded_once_a_run(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, read_from = [], parquet.read_from

    def counted(*arguments: Any) -> Iterator[pa.RecordBatch]:
        for batch in read_from(*arguments):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet, "read_from", counted)
    write_sources(tmp_path / "data", web=[4000], code=[2000])
    saved = plan(
        config(
            tmp_path, {"web": 2, "code": 1}, num_batches=250, batches_per_shard=25, batch_size=24
        )
    ).save()
    RunWriter(saved).write(0, 10, threads)
    assert sum(decoded) == 6000


def test_shards_that_stand_are_kept_and_torn_ones_written_again(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400], code=[300])
    saved = plan(config(tmp_path, {"web": 3, "code": 2}, num_batches=32)).save()
    RunWriter(saved).write(0, 8)
    whole = digests(tmp_path / "out" / "shards")
    torn = tmp_path / "out" / shard_name(5)
    torn.write_bytes(torn.read_bytes()[:-10])
    stamps = {path: path.stat().st_mtime_ns for path in torn.parent.iterdir()}
    records = RunWriter(saved).write(0, 8)
    assert [record.shard for record in records] == list(range(8))
    assert digests(tmp_path / "out" / "shards") == whole
    changed = [path for path in stamps if path.stat().st_mtime_ns != stamps[path]]
    assert changed == [torn]


def test_a_journal_of_another_plan_keeps_nothing(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400], code=[300])
    settings_a = config(tmp_path, {"web": 3, "code": 2}, num_batches=32)
    RunWriter(plan(settings_a).save()).write(0, 8)
    (tmp_path / "out" / "_mix" / "plan.json").unlink()
    other = plan({**settings_a, "compression": "lz4"}).save()
    RunWriter(other).write(0, 8)
    found = digests(tmp_path / "out" / "shards")
    elsewhere = plan({**settings_a, "compression": "lz4", "output": str(tmp_path / "b")}).save()
    RunWriter(elsewhere).write(0, 8)
    assert digests(tmp_path / "b" / "shards") == found


def test_what_cannot_be_written_names_the_shard_and_leaves_no_scratch(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400])
    saved = plan(config(tmp_path, {"web": 1}, num_batches=8)).save()
    # A folder stands where the shard belongs, so it cannot be put in place.
    (tmp_path / "out" / shard_name(1) / "in-the-way").mkdir(parents=True)
    with pytest.raises(
        BuildError, match=r"shard-00000001\.parquet: cannot be written: .*same build"
    ):
        RunWriter(saved).write(0, 2)
    assert [name for name in os.listdir(tmp_path / "out/_mix/tmp") if ".part" in name] == []


def test_a_cancelled_run_begins_no_further_shard(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400])
    saved = plan(config(tmp_path, {"web": 1}, num_batches=40)).save()
    cancelled = threading.Event()
    cancelled.set()
    assert RunWriter(saved).write(0, 10, cancelled=cancelled) == []
    assert not (tmp_path / "out" / "shards").exists()


def test_tables_are_fetched_in_advance_up_to_a_bound() -> None:
    table = pa.table({"x": np.arange(8)})
    fetched: list[int] = []
    done: list[int] = []

    def tables() -> Iterator[pa.Table]:
        for number in range(5):
            fetched.append(number)
            yield table

    seen = [
        (len(fetched), len(done))
        for _ in _ahead(tables(), 2 * table.nbytes, lambda: done.append(len(fetched)))
    ]
    assert seen == [(3, 0), (4, 0), (5, 0), (5, 1), (5, 1)]
    assert done == [5]


def test_an_error_in_one_thread_of_a_crew_ends_the_others(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[4000])
    saved = plan(config(tmp_path, {"web": 1}, num_batches=100)).save()
    (tmp_path / "out" / shard_name(1) / "in-the-way").mkdir(parents=True)
    cancelled = threading.Event()
    with pytest.raises(BuildError, match=r"shard-00000001\.parquet: cannot be written"):
        RunWriter(saved).write(0, 25, 4, cancelled)
    assert cancelled.is_set()
    written = [name for name in os.listdir(tmp_path / "out/shards") if name != "shard-00000001"]
    assert len(written) < 25


def test_threads_share_a_writer(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[900], code=[700])
    saved = plan(config(tmp_path, {"web": 3, "code": 2}, num_batches=100)).save()
    writer = RunWriter(saved)
    threads = [threading.Thread(target=writer.write, args=(i, i + 5)) for i in range(0, 25, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = digests(tmp_path / "out" / "shards")
    assert len(together) == 25
    alone = plan(
        config(tmp_path, {"web": 3, "code": 2}, num_batches=100, output=str(tmp_path / "alone"))
    ).save()
    RunWriter(alone).write(0, 25)
    assert digests(tmp_path / "alone" / "shards") == together
