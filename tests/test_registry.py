"""Items from any offset, and cursors that go forward, wrap round, share a bound and stay true."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore import DataBatcher
from pipeline.catalog import Catalog, DatasetSpec, scan_datasets
from pipeline.formats import SourceChangedError, SourceError
from pipeline.registry import Cursor, Cursors, Registry

from .mixes import table, write_dataset, write_sources


def catalog(base: Path, *specs: DatasetSpec) -> Catalog:
    return scan_datasets(specs, str(base))


def spec(name: str, **more: Any) -> DatasetSpec:
    return DatasetSpec(name, (name,), **more)


def items(name: str, files: Sequence[int]) -> list[dict[str, Any]]:
    """What :func:`write_dataset` wrote."""
    found, first = [], 0
    for rows in files:
        found += table(name, rows, first).to_pylist()
        first += rows
    return found


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def circular(rows: list[Any], offset: int, count: int) -> list[Any]:
    return [rows[(offset + i) % len(rows)] for i in range(count)]


def open_files(folder: Path) -> Counter[str]:
    """How often each file below a folder is open in this process."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        path = os.path.realpath(f"/proc/self/fd/{fd}")
        if path.startswith(f"{os.path.realpath(folder)}/"):
            found[path] += 1
    return found


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def failure(act: Callable[[], object], kind: type[SourceError] = SourceError) -> str:
    with pytest.raises(SourceError) as caught:
        act()
    assert type(caught.value) is kind
    return str(caught.value)


# The registry


FILES = [0, 5, 0, 0, 7, 1, 0, 4, 0]
ALL = items("web", FILES)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("small")
    write_dataset(base, "web", FILES, row_group_size=3)
    write_dataset(base, "one", [0, 1])
    return base


def test_an_iterator_gives_all_rows_from_every_offset_across_files(small):
    registry = Registry(catalog(small, spec("web")))
    for offset in range(len(ALL) + 1):
        assert list(registry.get_iterator("web", offset)) == ALL[offset:]
        assert list(registry.get_iterator(name="web", offset=offset)) == ALL[offset:]
    assert list(registry.get_iterator("web")) == ALL


@pytest.mark.parametrize("rows", [(0, 5), (3, None), (5, 13), (6, 12), (12, 13), (16, 17)])
def test_a_range_of_rows_is_all_that_an_iterator_sees(small, rows):
    registry = Registry(catalog(small, spec("web", rows=rows)))
    expected = ALL[rows[0] : rows[1]]
    for offset in range(len(expected) + 1):
        assert list(registry.get_iterator("web", offset)) == expected[offset:]


def test_columns_are_those_asked_for_under_our_names(small):
    columns = {"ids": "tokens", "body": "text", "again": "text"}
    registry = Registry(catalog(small, spec("web", columns=columns)))
    expected = [{"ids": r["tokens"], "body": r["text"], "again": r["text"]} for r in ALL]
    for offset in (0, 4, 11):
        found = list(registry.get_iterator("web", offset))
        assert found == expected[offset:]
        assert list(found[0]) == ["ids", "body", "again"]


def test_with_repeat_a_dataset_begins_again_for_ever(small):
    registry = Registry(catalog(small, spec("web", rows=(2, 16)), spec("one")), repeat=True)
    for offset in (0, 13, 14, 15, 14 * 10**15 + 3):
        found = list(islice(registry.get_iterator("web", offset), 50))
        assert found == circular(ALL[2:16], offset, 50)
    found = list(islice(registry.get_iterator("one", 7), 3000))
    assert found == items("one", [1]) * 3000


def test_the_end_is_an_empty_iterator_and_what_lies_beyond_an_error(small):
    registry = Registry(catalog(small, spec("web", rows=(3, 10))))
    assert list(registry.get_iterator("web", 7)) == []
    for offset in (8, 10**20, -1):
        with pytest.raises(ValueError, match="web") as caught:
            registry.get_iterator("web", offset)
        assert str(caught.value) == f"dataset 'web' has 7 items; it cannot be opened at {offset}"
    repeating = Registry(catalog(small, spec("web")), repeat=True)
    with pytest.raises(ValueError, match="cannot be opened at -1"):
        repeating.get_iterator("web", -1)


def test_an_unknown_name_is_a_key_error_that_says_what_there_is(small):
    registry = Registry(catalog(small, spec("web"), spec("one")))
    with pytest.raises(KeyError) as caught:
        registry.get_iterator("wbe")
    assert caught.value.args == ("no dataset 'wbe'; the catalog has web, one",)


def test_iterators_do_not_disturb_each_other(small):
    registry = Registry(catalog(small, spec("web")))
    one, two = registry.get_iterator("web"), registry.get_iterator("web", 9)
    pairs = list(zip(one, two, strict=False))
    assert pairs == list(zip(ALL, ALL[9:], strict=False))


def test_items_come_under_the_schema_that_all_sources_share(tmp_path):
    narrow = pa.table(
        {
            "n": pa.array([1, 2], pa.int8()),
            "s": pa.array(["a", None]).dictionary_encode(),
            "never": pa.nulls(2),
            "deep": pa.array([[{"a": 1}], None], pa.list_(pa.struct({"a": pa.uint8()}))),
        }
    )
    wide = pa.table(
        {
            "deep": pa.array([[], [{"a": -1}]], pa.list_(pa.struct({"a": pa.int64()}))),
            "never": [1.5, 2.5],
            "s": pa.array(["b", "c"], pa.large_string()),
            "n": [2**40, -1],
        }
    )
    for name, rows in (("narrow", narrow), ("wide", wide)):
        (tmp_path / name).mkdir()
        pq.write_table(rows, tmp_path / name / "a.parquet")
    found = catalog(tmp_path, spec("narrow"), spec("wide"))
    registry = Registry(found)
    for name, rows in (("narrow", narrow), ("wide", wide)):
        got = list(registry.get_iterator(name))
        assert got == rows.select(["n", "s", "never", "deep"]).to_pylist()
        assert [type(item) for item in got] == [dict, dict]
        assert [list(item) for item in got] == [["n", "s", "never", "deep"]] * 2
        (batch,) = Cursor(found, found.datasets[found.index[name]]).read(0, 2)
        assert batch.schema.equals(found.schema, check_metadata=True)
        assert [column.type for column in batch.columns] == found.schema.types
    assert found.schema.field("n").type == pa.int64()
    assert found.schema.field("s").type == pa.large_string()
    assert found.schema.field("never").type == pa.float64()


def test_a_missing_file_fails_when_the_iterator_is_asked_for(tmp_path):
    write_sources(tmp_path, web=[5, 5])
    registry = Registry(catalog(tmp_path, spec("web")))
    gone = tmp_path / "web/part-000.parquet"
    gone.unlink()
    assert (
        failure(lambda: registry.get_iterator("web", 2)) == f"dataset 'web': {gone}: no such file"
    )


def test_a_changed_file_fails_when_the_iterator_is_asked_for(tmp_path):
    write_sources(tmp_path, web=[5, 5])
    registry = Registry(catalog(tmp_path, spec("web")))
    changed = tmp_path / "web/part-001.parquet"
    pq.write_table(table("other", 5), changed)
    said = failure(lambda: registry.get_iterator("web", 7), SourceChangedError)
    start = f"dataset 'web': {changed}: has changed since it was planned: expected digest "
    assert said.startswith(start)
    assert said.endswith("; plan again, or restore the file")


def test_touched_or_moved_data_is_still_the_same(tmp_path):
    write_sources(tmp_path / "a", web=[5, 5])
    planned = catalog(tmp_path / "a", spec("web"))
    os.rename(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b/web/part-000.parquet", (1, 1))
    moved = Catalog(planned.datasets, planned.schema, str(tmp_path / "b"))
    assert list(Registry(moved).get_iterator("web", 3)) == items("web", [5, 5])[3:]


# Cursors


SIZES = {"small": [0, 3, 0, 4], "one": [1], "large": [1000, 0, 1500], "ranged": [3000, 10]}
RANGE = (400, 3005)
EXPECTED = [
    items("small", SIZES["small"]),
    items("one", SIZES["one"]),
    items("large", SIZES["large"]),
    items("ranged", SIZES["ranged"])[slice(*RANGE)],
]


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Catalog:
    """Datasets that are kept whole and ones that are streamed, of many row groups and files."""
    base = tmp_path_factory.mktemp("several")
    for name, files in SIZES.items():
        write_dataset(base, name, files, row_group_size=300)
    return catalog(base, spec("small"), spec("one"), spec("large"), spec("ranged", rows=RANGE))


reads = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 6000) | st.integers(10**14, 10**14 + 6000),
        st.integers(0, 40) | st.integers(0, 3500),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(reads=reads, max_open=st.integers(1, 5), max_bytes=st.sampled_from([0, 50_000, 1 << 28]))
def test_any_reads_in_any_order_give_the_rows_that_stand_there(several, reads, max_open, max_bytes):
    cursors = Cursors(several, max_open, max_bytes)
    for dataset, offset, count in reads:
        batches = cursors.read(dataset, offset, count)
        assert rows_of(batches) == circular(EXPECTED[dataset], offset, count)
        assert all(batch.schema.equals(several.schema) for batch in batches)
    cursors.close()
    assert not open_files(Path(several.base))


@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    start=st.integers(0, 5000),
    batch_bytes=st.sampled_from([0, 1000, 1 << 20]),
)
def test_reading_on_gives_row_after_row_past_the_end_and_round_again(
    several, steps, start, batch_bytes
):
    cursor = Cursor(several, several.datasets[2], batch_bytes)
    offset = start
    for count in steps:
        assert rows_of(cursor.read(offset, count)) == circular(EXPECTED[2], offset, count)
        offset += count


def numbers(base: Path, rows: int, files: int = 1, group: int = 10_000, **more: Any) -> Catalog:
    """A dataset "web" of rows that cannot be compressed and are the place times 2**32 and noise."""
    (base / "web").mkdir()
    noise = np.random.default_rng(0).integers(0, 2**32, rows)
    x = np.arange(rows, dtype=np.int64) * 2**32 + noise
    for number, part in enumerate(np.array_split(x, files)):
        pq.write_table(
            pa.table({"x": part}),
            base / "web" / f"{number}.parquet",
            row_group_size=group,
            use_dictionary=False,
            **more,
        )
    return catalog(base, spec("web"))


def places(batches: Sequence[pa.RecordBatch]) -> list[int]:
    return [x >> 32 for batch in batches for x in batch.column("x").to_pylist()]


def test_going_forward_reads_each_row_group_once(tmp_path):
    found = numbers(tmp_path, 200_000, files=2)
    stored = sum(file.num_bytes for file in found.datasets[0].files)
    cursor = Cursor(found, found.datasets[0])
    cursor.read(0, 1)
    before, offset = bytes_read(), 1
    while offset < 200_000:
        count = min(97, 200_000 - offset)
        assert places(cursor.read(offset, count)) == list(range(offset, offset + count))
        offset += count
    # Each read on its own would come to 2,000 row groups, 100 times the files.
    assert bytes_read() - before < 1.2 * stored


def test_a_small_dataset_goes_round_right_at_every_place(several):
    cursor = Cursor(several, several.datasets[0])
    for offset in range(8):
        for count in range(16):
            expected = circular(EXPECTED[0], offset, count)
            assert rows_of(cursor.read(offset, count)) == expected


def test_a_small_dataset_is_read_once_however_often_it_goes_round(tmp_path):
    found = numbers(tmp_path, 500)
    cursor = Cursor(found, found.datasets[0])
    assert places(cursor.read(400, 1700)) == [i % 500 for i in range(400, 2100)]
    os.rename(tmp_path / "web", tmp_path / "away")
    for offset in (0, 499, 10**12 + 1):
        expected = [(offset + i) % 500 for i in range(1200)]
        assert places(cursor.read(offset, 1200)) == expected
    assert not open_files(tmp_path)


def test_few_rows_that_are_far_larger_than_they_look_are_not_kept_whole(tmp_path):
    (tmp_path / "web").mkdir()
    rows = pa.table({"x": [f"{i:04d}" + "x" * 200_000 for i in range(200)]})
    pq.write_table(rows, tmp_path / "web/a.parquet", row_group_size=10, compression="zstd")
    found = catalog(tmp_path, spec("web"))
    assert found.datasets[0].row_bytes < 1000
    cursor = Cursor(found, found.datasets[0])
    for offset, count in ((0, 3), (3, 2), (150, 60)):
        got = [x[:4] for b in cursor.read(offset, count) for x in b.column("x").to_pylist()]
        assert got == [f"{(offset + i) % 200:04d}" for i in range(count)]
        assert cursor.nbytes < 8 << 20


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> Catalog:
    """Five datasets that are too large to be kept whole, so that reading them holds a file open."""
    base = tmp_path_factory.mktemp("five")
    for place in range(5):
        (base / f"d{place}").mkdir()
        rows = pa.table({"x": np.arange(5000) + 10_000 * place})
        pq.write_table(rows, base / f"d{place}/a.parquet", row_group_size=1000)
    return catalog(base, *(spec(f"d{place}") for place in range(5)))


@pytest.mark.parametrize("max_open", [1, 2, 4])
def test_no_more_files_are_open_than_allowed_and_the_latest_stay(five, max_open):
    cursors = Cursors(five, max_open)
    base = Path(five.base)
    order = [0, 1, 2, 3, 4, 1, 1, 0, 3]
    for step, dataset in enumerate(order):
        start = 2400 * step % 4900  # never among the rows that are decoded already
        (batch,) = cursors.read(dataset, start, 10)
        expected = [10_000 * dataset + start + i for i in range(10)]
        assert batch.column("x").to_pylist() == expected
        latest = list(dict.fromkeys(reversed(order[: step + 1])))[:max_open]
        assert open_files(base) == {f"{base.resolve()}/d{d}/a.parquet": 1 for d in latest}
    cursors.close()
    assert not open_files(base)
    (batch,) = cursors.read(2, 7, 1)
    assert batch.column("x").to_pylist() == [20_007]
    cursors.close()


def test_a_file_that_had_to_close_is_opened_again_only_after_what_is_decoded(five):
    cursors = Cursors(five, max_open=1)
    base = Path(five.base)
    for dataset in (0, 1):
        cursors.read(dataset, 0, 10)
    (batch,) = cursors.read(0, 10, 10)
    assert batch.column("x").to_pylist() == list(range(10, 20))
    assert open_files(base) == {f"{base.resolve()}/d1/a.parquet": 1}
    rows = pa.Table.from_batches(cursors.read(0, 20, 4900))
    assert rows.column("x").to_pylist() == list(range(20, 4920))
    assert open_files(base) == {f"{base.resolve()}/d0/a.parquet": 1}
    cursors.close()


def test_decoded_bytes_are_bounded_though_rows_are_larger_than_they_look(tmp_path):
    for name in "abcd":
        (tmp_path / name).mkdir()
        rows = pa.table({"x": [name * 200] * 5000})
        pq.write_table(rows, tmp_path / name / "a.parquet", row_group_size=2500)
    found = catalog(tmp_path, *(spec(name) for name in "abcd"))
    cursors = Cursors(found, max_bytes=1_200_000)  # two row groups, not three
    order = "abcdbbacbd"
    for step, name in enumerate(order):
        (batch,) = cursors.read("abcd".index(name), 10 * step, 10)
        assert batch.column("x").to_pylist() == [name * 200] * 10
        latest = list(dict.fromkeys(reversed(order[: step + 1])))[:2]
        assert set(open_files(tmp_path)) == {f"{tmp_path.resolve()}/{d}/a.parquet" for d in latest}
    cursors.close()


def test_the_one_in_use_stays_open_however_tight_the_bound(five):
    tight = Cursors(five, max_open=5, max_bytes=1)
    for step in range(3):
        for dataset in range(5):
            (batch,) = tight.read(dataset, step, 1)
            assert batch.column("x").to_pylist() == [10_000 * dataset + step]
            assert len(open_files(Path(five.base))) == 1
    tight.close()


def test_a_closed_cursor_holds_nothing_and_reads_on(five):
    cursor = Cursor(five, five.datasets[0])
    cursor.read(0, 5)
    assert cursor.nbytes > 0
    assert len(open_files(Path(five.base))) == 1
    cursor.close()
    assert cursor.nbytes == 0
    assert not open_files(Path(five.base))
    (batch,) = cursor.read(5, 2)
    assert batch.column("x").to_pylist() == [5, 6]


# Sources that change under way


def test_a_file_that_vanishes_between_reads_is_named_and_rows_stay_true_when_it_returns(tmp_path):
    found = numbers(tmp_path, 6000, files=3)
    second, away = tmp_path / "web/1.parquet", tmp_path / "away"
    cursors = Cursors(found)
    assert places(cursors.read(0, 1990, 5)) == list(range(1990, 1995))
    second.rename(away)
    for _ in range(2):
        said = failure(lambda: cursors.read(0, 1995, 10))
        assert said == f"dataset 'web': {second}: no such file"
    away.rename(second)
    assert places(cursors.read(0, 1995, 10)) == list(range(1995, 2005))
    assert places(cursors.read(0, 2005, 3995)) == list(range(2005, 6000))


def test_a_small_dataset_whose_file_vanished_is_not_kept_in_part(tmp_path):
    found = numbers(tmp_path, 60, files=3)
    last, away = tmp_path / "web/2.parquet", tmp_path / "away"
    last.rename(away)
    cursor = Cursor(found, found.datasets[0])
    for _ in range(2):
        assert failure(lambda: cursor.read(0, 5)) == f"dataset 'web': {last}: no such file"
    away.rename(last)
    assert places(cursor.read(30, 40)) == [i % 60 for i in range(30, 70)]


def test_a_file_replaced_by_a_shorter_one_between_reads_is_a_changed_source(tmp_path):
    found = numbers(tmp_path, 6000, files=2)
    second = tmp_path / "web/1.parquet"
    cursor = Cursor(found, found.datasets[0])
    cursor.read(0, 10)
    pq.write_table(pq.read_table(second).slice(0, 100), second)
    said = failure(lambda: cursor.read(2990, 20), SourceChangedError)
    assert said.startswith(f"dataset 'web': {second}: has changed since it was planned: ")


def test_a_file_that_gives_fewer_rows_than_planned_is_a_changed_source(tmp_path):
    found = numbers(tmp_path, 6000, files=2)
    (web,) = found.datasets
    more = tuple(
        type(file)(file.path, file.num_bytes, 4000, 4000 * place, file.digest, (4000,))
        for place, file in enumerate(web.files)
    )
    longer = type(web)("web", more, 8000, (0, 8000), None, web.row_bytes)
    cursor = Cursor(Catalog((longer,), found.schema, found.base), longer)
    assert failure(lambda: cursor.read(2990, 20), SourceChangedError) == (
        "dataset 'web', web/0.parquet: ended at row 3000, expected 4000 rows; "
        "plan again, or restore the file"
    )


def test_a_file_cut_short_while_it_is_open_is_named(tmp_path):
    found = numbers(tmp_path, 200_000, compression="none")
    path = tmp_path / "web/0.parquet"
    cursor = Cursor(found, found.datasets[0])
    cursor.read(0, 10)
    os.truncate(path, path.stat().st_size // 2)
    said = failure(lambda: cursor.read(10, 199_000))
    assert said.startswith(f"dataset 'web': {path}: cannot be read as Parquet: ")


def test_a_damaged_page_is_named_with_its_dataset(tmp_path):
    found = numbers(tmp_path, 9000, files=3, write_page_checksum=True, compression="none")
    path = tmp_path / "web/1.parquet"
    chunk = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    cursor = Cursor(found, found.datasets[0])
    assert places(cursor.read(2000, 1000)) == list(range(2000, 3000))
    said = failure(lambda: cursor.read(5500, 600))
    assert said.startswith(f"dataset 'web': {path}: cannot be read as Parquet: ")
    assert places(cursor.read(6000, 10)) == list(range(6000, 6010))


# With the batcher


@pytest.mark.parametrize("stop", [0, 1, 7, 30])
def test_a_batcher_over_the_registry_mixes_and_resumes(small, stop):
    found = catalog(small, spec("web"), spec("one"))
    weights = {"web": 3, "one": 2}
    registry = Registry(found, repeat=True)
    whole = DataBatcher(registry, weights, 4)
    batches = [whole.next_batch() for _ in range(40)]
    one = items("one", [1])
    webs = [item for batch in batches for item in batch if item not in one]
    assert [len(batch) for batch in batches] == [4] * 40
    assert webs == circular(ALL, 0, 96)
    before = DataBatcher(registry, weights, 4)
    for _ in range(stop):
        before.next_batch()
    after = DataBatcher(Registry(found, repeat=True), weights, 4)
    after.load_state_dict(before.state_dict())
    assert [after.next_batch() for _ in range(40 - stop)] == batches[stop:]
