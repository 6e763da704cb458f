"""Reading a finished mix: every batch, every rank, every restart, every kind of damage."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore import DataBatcher
from pipeline.manifest import (
    FORMAT_VERSION,
    ManifestError,
    bytes_identity,
    identity,
    put_table,
    shards_table,
    to_json,
)
from pipeline.reader import PaddedBatch, ReaderError, ShardReader
from pipeline.shard import (
    Footer,
    Layout,
    ShardError,
    ShardRecord,
    WriterOptions,
    as_read_back,
    describe,
    file_sha256,
    shard_name,
    shard_schema,
    write_shard,
)
from pipeline.storage import Folder

from .mixes import small_mix

WEIGHTS = {"web": 3, "code": 2, "books": 1}
ROWS = {"web": 100, "code": 73, "books": 11}
BATCH, BATCHES = 8, 30
PER_SHARD, PER_GROUP = 7, 3  # groups of 3, 3 and 1 batches; the last shard holds 2
STEP, STEP_BATCHES = 4, 24
SIZES = [3, 1, 5, 1, 4, 2, 7, 1, 1, 6, 2, 3, 9, 1, 2, 4, 5, 1, 3, 8, 2, 1, 2]
"""Rows of 23 batches, which are neither 2 nor 3 ranks' whole steps, nor steps of 6."""
UNEVEN_STEP = 6


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    small_mix(folder, batches_per_shard=PER_SHARD, batches_per_row_group=PER_GROUP)
    return folder


@pytest.fixture(scope="session")
def mix(folder: Path) -> Path:
    """30 batches in shards of 7 and row groups of 3; only read."""
    return folder / "out"


@pytest.fixture(scope="session")
def step_mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 batches in steps of 4, one batch a row group; only read."""
    folder = tmp_path_factory.mktemp("steps")
    out, _ = small_mix(folder, num_batches=24, batches_per_shard=8, batches_per_step=STEP)
    return out


@pytest.fixture(scope="session")
def expected(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of every batch: what the online batcher gives, its payload from the sources."""
    sources = {
        name: [
            row
            for path in sorted((folder / "data" / name).iterdir())
            for row in pq.read_table(path).to_pylist()
        ]
        for name in WEIGHTS
    }
    assert {name: len(rows) for name, rows in sources.items()} == ROWS

    class Items:
        def get_iterator(self, name: str, offset: int = 0) -> Iterator[dict[str, Any]]:
            for place in itertools.count(offset):
                epoch, row = divmod(place, ROWS[name])
                where = {"mix_dataset": name, "mix_row": row, "mix_epoch": epoch}
                yield {**sources[name][row], **where}

    batcher = DataBatcher(Items(), WEIGHTS, BATCH)
    return [[{**item, "mix_batch": n} for item in batcher.next_batch()] for n in range(BATCHES)]


UNEVEN_PAYLOAD = pa.schema(
    [
        ("text", pa.string()),
        ("features", pa.list_(pa.list_(pa.float32(), 2))),
        ("windows", pa.large_list(pa.list_(pa.int16()))),
        ("tokens", pa.list_(pa.int32())),
        ("voiced", pa.list_(pa.bool_())),
    ]
)


def uneven_table(sizes: Sequence[int]) -> pa.Table:
    """Rows of batches of these sizes; every value tells the row's number, some lists are empty."""
    rows = range(sum(sizes))
    longs = [row * 7 % 5 for row in rows]
    columns = [
        [f"row {row}" for row in rows],
        [[[row, i / 2] for i in range(long)] for row, long in zip(rows, longs, strict=True)],
        [[[row, i, -i] for i in range(long)] for row, long in zip(rows, longs, strict=True)],
        [[row + i for i in range(row % 4)] for row in rows],
        [[i == row % 3 for i in range(long)] for row, long in zip(rows, longs, strict=True)],
        np.repeat(np.arange(len(sizes)), sizes),
        ["speech"] * len(rows),
        rows,
        [0] * len(rows),
    ]
    schema = shard_schema(UNEVEN_PAYLOAD)
    arrays = [pa.array(c, kind) for c, kind in zip(columns, schema.types, strict=True)]
    return pa.table(arrays, schema=schema)


def write_uneven(
    out: Path, sizes: Sequence[int], batches_per_step: int | None = None, rows: Any = None
) -> Path:
    """A finished mix of one dataset whose batches have these sizes, as a build would leave it."""
    table = uneven_table(sizes) if rows is None else rows
    layout = Layout(len(sizes), PER_SHARD, 1 if batches_per_step else PER_GROUP, batches_per_step)
    options = WriterOptions("zstd", 1)
    schema = describe(as_read_back(table.schema))
    order_id = identity({"mixture": {"kind": "frame_budget"}, "sizes": list(sizes)})
    bytes_id = bytes_identity(order_id, schema, asdict(layout), asdict(options))
    begins = [0, *itertools.accumulate(sizes)]
    records = []
    (out / "shards").mkdir(parents=True)
    for shard in range(layout.num_shards):
        first, batches = layout.shard(shard)
        path = out / shard_name(shard)
        groups = [
            table.slice(begins[first + a], begins[first + b] - begins[first + a])
            for a, b in layout.groups(batches)
        ]
        footer = Footer(bytes_id, shard, first, batches)
        write_shard(str(path), table.schema, options, footer, groups)
        with path.open("rb") as file:
            digest, size = file_sha256(file)
        held = begins[first + batches] - begins[first]
        records.append(ShardRecord(shard, first, batches, held, size, digest))
    document = {
        "format_version": FORMAT_VERSION,
        "order_id": order_id,
        "bytes_id": bytes_id,
        "layout": asdict(layout),
        "mixture": {
            "kind": "frame_budget",
            "state_kind": "frame_budget",
            "rows_per_batch": None,
        },
        "datasets": [{"name": "speech", "rows": table.num_rows}],
        "schema": schema,
        "writer": asdict(options),
        "tables": {"shards": put_table(Folder.at(str(out)), "shards", shards_table(records))},
    }
    (out / "manifest.json").write_bytes(to_json(document))
    return out


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 batches of 1 to 9 rows in shards of 7 and row groups of 3; only read."""
    return write_uneven(tmp_path_factory.mktemp("uneven") / "out", SIZES)


@pytest.fixture(scope="session")
def uneven_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same batches in steps of 6, one batch a row group; only read."""
    return write_uneven(tmp_path_factory.mktemp("uneven") / "out", SIZES, UNEVEN_STEP)


@pytest.fixture(scope="session")
def sized() -> list[pa.Table]:
    """The batches of the uneven mixes."""
    table, ends = uneven_table(SIZES), itertools.accumulate(SIZES)
    return [table.slice(end - size, size) for size, end in zip(SIZES, ends, strict=True)]


@pytest.fixture
def copy(mix: Path, tmp_path: Path) -> Path:
    """The mix for a test that changes it."""
    return Path(shutil.copytree(mix, tmp_path / "copy"))


def shard_path(out: Path, shard: int) -> Path:
    return out / "shards" / f"shard-{shard:08d}.parquet"


def edit(out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads((out / "manifest.json").read_text())
    change(document)
    (out / "manifest.json").write_text(json.dumps(document))
    return out


def built_as(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Make a mix as if it had been built with what is changed, its shards' footers too."""
    document = json.loads((edit(out, change) / "manifest.json").read_text())
    layout, options = Layout(**document["layout"]), WriterOptions(**document["writer"])
    bytes_id = bytes_identity(
        document["order_id"], document["schema"], asdict(layout), document["writer"]
    )
    edit(out, lambda document: document.update(bytes_id=bytes_id))
    for shard in range(layout.num_shards):
        parquet = pq.ParquetFile(shard_path(out, shard))
        groups = [parquet.read_row_group(group) for group in range(parquet.num_row_groups)]
        schema = parquet.schema_arrow.remove_metadata()
        footer = Footer(bytes_id, shard, *layout.shard(shard))
        write_shard(str(shard_path(out, shard)), schema, options, footer, groups)


def spoil(out: Path, spare: set[tuple[int, int]]) -> None:
    """Blank out the pages of all row groups but those (shard, group); footers stay whole."""
    for path in sorted((out / "shards").iterdir()):
        shard = int(path.stem.removeprefix("shard-"))
        metadata = pq.read_metadata(path)
        data = bytearray(path.read_bytes())
        for group in range(metadata.num_row_groups):
            if (shard, group) in spare:
                continue
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                begin = column.dictionary_page_offset or column.data_page_offset
                data[begin : begin + column.total_compressed_size] = bytes(
                    column.total_compressed_size
                )
        path.write_bytes(data)


def numbers(tables: Any) -> list[int]:
    """The batch numbers of whole batches."""
    found = []
    for table in tables:
        number = set(table.column("mix_batch").to_pylist())
        assert len(number) == 1
        assert table.num_rows == BATCH
        found += number
    return found


def read_ahead_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("mixshards-read-ahead")]


def wait_until(what: Callable[[], Any]) -> None:
    for _ in range(500):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to pass within five seconds")


# Whole batches, one process.


def test_len_and_shards_are_those_of_the_layout(mix: Path) -> None:
    reader = ShardReader(str(mix))
    assert len(reader) == BATCHES
    assert reader.num_shards == len(list((mix / "shards").iterdir())) == 5


def test_every_batch_holds_the_rows_that_the_online_batcher_gives(mix: Path, expected: Any) -> None:
    reader = ShardReader(mix)  # a path object will do
    for n in [*range(BATCHES), 0, 29, 14, 13, 28]:  # onwards, then across shards and groups
        assert reader[n].to_pylist() == expected[n], n
    assert [table.to_pylist() for table in reader.batches()] == expected


def test_schema_is_that_of_every_batch(mix: Path) -> None:
    reader = ShardReader(mix)
    assert reader.schema.names == [
        *("text", "tokens"),
        *("mix_batch", "mix_dataset", "mix_row", "mix_epoch"),
    ]
    assert reader.schema.metadata is None
    for table in [reader[0], next(reader.batches())]:
        assert table.schema.remove_metadata() == reader.schema


def test_negative_index_counts_from_the_end_and_outside_is_an_index_error(mix: Path) -> None:
    reader = ShardReader(mix)
    assert reader[-1] == reader[29]
    assert reader[-30] == reader[0]
    for n in (30, -31, 10**30):
        with pytest.raises(IndexError, match=f"batch {n} is outside the mix of 30 batches"):
            reader[n]
    for n in (slice(0, 3), 1.0, None, "3"):
        with pytest.raises(TypeError, match=r"integer as its number.*batches\(start_batch=\.\.\)"):
            reader[n]  # type: ignore[index]


@pytest.mark.parametrize("start", range(6))
def test_start_shard_begins_at_the_first_batch_of_the_shard(mix: Path, start: int) -> None:
    batches = ShardReader(mix).batches(start_shard=start)
    assert len(batches) == max(0, BATCHES - PER_SHARD * start)
    assert numbers(batches) == list(range(min(BATCHES, PER_SHARD * start), BATCHES))


def test_start_batch_begins_there_for_every_batch(mix: Path, expected: Any) -> None:
    reader = ShardReader(mix)
    for start in range(BATCHES + 1):
        batches = reader.batches(start_batch=start, read_ahead=start % 3)
        assert len(batches) == BATCHES - start
        assert [table.to_pylist() for table in batches] == expected[start:]
        assert len(batches) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_shard": 1, "start_batch": 7}, "start_shard or start_batch, not both"),
        ({"start_shard": 6}, r"start_shard 6 is outside 0\.\.5: the mix has 5 shards"),
        ({"start_shard": -1}, r"start_shard -1 is outside 0\.\.5"),
        ({"start_batch": 31}, r"batch 31 is outside 0\.\.30: the mix has 30 batches"),
        ({"start_batch": -1}, r"batch -1 is outside 0\.\.30"),
        ({"start_batch": 1.5}, r"must be an integer, found 1\.5"),
        ({"start_shard": True}, "start_shard must be an integer, found True"),
        ({"rank": 2, "world_size": 2}, r"rank 2 is outside 0\.\.1 \(world_size 2\)"),
        ({"rank": -1}, r"rank -1 is outside 0\.\.0"),
        ({"world_size": 0}, "world_size must be at least 1, not 0"),
        ({"world_size": "8"}, "world_size must be an integer, found '8'"),
        ({"read_ahead": -1}, "read_ahead must be at least 0, not -1"),
        ({"split": "row"}, "split must be 'rows' or 'batches', not 'row'"),
        (
            {"world_size": 3},
            "world_size 3 does not divide the batch of 8 rows; choose a divisor of it, or "
            "uneven=True",
        ),
        ({"columns": ["txt"]}, "no column 'txt'; the mix has text, tokens, mix_batch"),
        ({"columns": "text"}, r"columns must be a list of names, such as \['text'\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(
    mix: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ReaderError, match=message):
        ShardReader(mix).batches(**arguments)


def test_columns_are_projected_in_the_order_asked_for(mix: Path) -> None:
    reader = ShardReader(mix)
    wanted = ["mix_row", "text"]
    for n, table in enumerate(reader.batches(columns=wanted)):
        assert table == reader[n].select(wanted)
    first = next(reader.batches(columns=("tokens",)))
    assert first.schema.names == ["tokens"]


def test_two_iterators_of_one_reader_do_not_disturb_each_other(mix: Path) -> None:
    reader = ShardReader(mix)
    early, late = reader.batches(), reader.batches(start_batch=11)
    pairs = [(next(early), next(late), reader[29 - n]) for n in range(19)]
    assert numbers(pair[0] for pair in pairs) == list(range(19))
    assert numbers(pair[1] for pair in pairs) == list(range(11, 30))
    assert numbers(pair[2] for pair in pairs) == list(range(29, 10, -1))
    assert next(late, None) is None
    assert numbers(early) == list(range(19, 30))


def test_threads_may_share_a_reader(mix: Path, expected: Any) -> None:
    reader = ShardReader(mix)
    asked = [(7 * i) % BATCHES for i in range(240)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: reader[n].to_pylist(), asked))
    assert found == [expected[n] for n in asked]


def test_a_mix_that_was_moved_reads_the_same(copy: Path, mix: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "elsewhere" / "with space")
    shutil.rmtree(copy)
    moved = ShardReader(tmp_path / "elsewhere" / "with space")
    assert list(moved.batches()) == list(ShardReader(mix).batches())


def test_a_relative_path_and_a_uri_name_the_same_mix(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mix.parent)
    assert ShardReader("out")[17] == ShardReader(f"file://{mix}")[17] == ShardReader(mix)[17]


# Ranks that share every batch.


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_that_share_rows_take_every_rth_row_and_make_up_the_batch(
    mix: Path, world_size: int
) -> None:
    reader = ShardReader(mix)
    ranks = [list(reader.batches(rank=r, world_size=world_size)) for r in range(world_size)]
    assert [len(rank) for rank in ranks] == [BATCHES] * world_size
    for n in range(BATCHES):
        rows = reader[n].to_pylist()
        for r in range(world_size):
            assert ranks[r][n].to_pylist() == rows[r::world_size]


@pytest.mark.parametrize("world_size", [3, 5, 11])
def test_uneven_ranks_differ_by_a_row_and_make_up_the_batch(mix: Path, world_size: int) -> None:
    reader = ShardReader(mix)
    for n in (0, 13, 29):
        ranks = [
            next(reader.batches(start_batch=n, rank=r, world_size=world_size, uneven=True))
            for r in range(world_size)
        ]
        assert {rank.num_rows for rank in ranks} <= {BATCH // world_size, BATCH // world_size + 1}
        rows = reader[n].to_pylist()
        assert [rank.to_pylist() for rank in ranks] == [
            rows[r::world_size] for r in range(world_size)
        ]


# Ranks that take whole batches.


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_that_take_whole_batches_share_every_step(step_mix: Path, world_size: int) -> None:
    reader = ShardReader(step_mix)
    ranks = [reader.batches(rank=r, world_size=world_size) for r in range(world_size)]
    assert {len(rank) for rank in ranks} == {STEP_BATCHES // world_size}
    for step in range(STEP_BATCHES // STEP):
        taken = [numbers(itertools.islice(rank, STEP // world_size)) for rank in ranks]
        assert sorted(itertools.chain(*taken)) == list(range(STEP * step, STEP * (step + 1)))
        assert {rank.state_dict()["next_batch"] for rank in ranks} == {STEP * (step + 1)}
        for r, batches in enumerate(taken):
            assert {n % world_size for n in batches} == {r}
    assert [next(rank, None) for rank in ranks] == [None] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_rank_decodes_a_row_group_of_another(
    step_mix: Path, tmp_path: Path, world_size: int
) -> None:
    for r in range(world_size):
        out = Path(shutil.copytree(step_mix, tmp_path / f"rank-{r}"))
        mine = range(r, STEP_BATCHES, world_size)
        spoil(out, {divmod(n, 8) for n in mine})
        assert numbers(ShardReader(out).batches(rank=r, world_size=world_size)) == list(mine)
        with pytest.raises(ShardError):  # so that the trap is known to be one
            list(ShardReader(out).batches(rank=(r + 1) % world_size, world_size=world_size))


def test_a_last_step_that_is_not_full_is_left_out_on_every_rank(mix: Path, copy: Path) -> None:
    built_as(copy, lambda document: document["layout"].update(batches_per_step=4))
    for path, world_size, used in ((copy, 2, 28), (copy, 4, 28), (copy, 1, 28), (mix, 4, 28)):
        reader = ShardReader(path)
        for r in range(world_size):
            batches = reader.batches(rank=r, world_size=world_size, split="batches")
            assert len(batches) == used // world_size
            assert numbers(batches) == list(range(r, used, world_size))
            assert batches.state_dict()["next_batch"] == used
    past = ShardReader(copy).batches(start_batch=28)
    assert (len(past), list(past)) == (0, [])


def test_world_size_must_divide_the_step_or_share_rows(step_mix: Path) -> None:
    reader = ShardReader(step_mix)
    for world_size in (3, 8):
        with pytest.raises(
            ReaderError,
            match=f"world_size {world_size} does not divide the mix's batches_per_step 4; choose "
            "a divisor of it, or split='rows'",
        ):
            reader.batches(world_size=world_size)
    assert next(reader.batches(world_size=8, split="rows")).num_rows == 1


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations([1, 2, 4], 2)))
def test_at_a_step_boundary_another_world_size_goes_on_with_the_same_batches(
    step_mix: Path, before: int, after: int
) -> None:
    reader = ShardReader(step_mix)
    batches = reader.batches(rank=before - 1, world_size=before)
    for _ in range(2 * STEP // before):
        next(batches)
    state = batches.state_dict()
    rest = []
    for r in range(after):
        resumed = ShardReader(step_mix)
        resumed.load_state_dict(state)
        rest += numbers(resumed.batches(rank=r, world_size=after))
    assert sorted(rest) == list(range(2 * STEP, STEP_BATCHES))


def test_in_the_middle_of_a_step_a_world_size_goes_on_exactly_or_is_refused(
    step_mix: Path,
) -> None:
    reader = ShardReader(step_mix)
    batches = reader.batches(rank=1, world_size=2)
    next(batches)
    state = batches.state_dict()
    assert state["next_batch"] == 2
    rest = []
    for r in range(2):
        reader.load_state_dict(state)
        rest += numbers(reader.batches(rank=r, world_size=2))
    assert sorted(rest) == list(range(2, STEP_BATCHES))
    reader.load_state_dict(state)
    with pytest.raises(
        ReaderError,
        match="4 ranks that take whole batches cannot begin at batch 2, in the middle of a step: "
        "choose a world_size that divides 2, or begin at 0",
    ):
        reader.batches(rank=0, world_size=4)


# States.


def order_of(path: Path) -> str:
    return str(json.loads((path / "manifest.json").read_text())["order_id"])


@settings(deadline=None, max_examples=30)
@given(legs=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 4, 8])), max_size=5))
def test_resuming_again_and_again_gives_every_row_once(
    mix: Path, legs: list[tuple[int, int]]
) -> None:
    whole = list(ShardReader(mix).batches(columns=["text"]))
    found: list[list[str]] = []
    state = None
    for steps, world_size in [*legs, (BATCHES, 1)]:
        ranks = []
        for r in range(world_size):
            reader = ShardReader(mix)
            if state is not None:
                reader.load_state_dict(json.loads(json.dumps(state)))
            batches = reader.batches(rank=r, world_size=world_size, columns=["text"])
            ranks.append([t["text"].to_pylist() for t in itertools.islice(batches, steps)])
            after = reader.state_dict()
        state = after
        for parts in zip(*ranks, strict=True):
            found.append([row for rows in zip(*parts, strict=True) for row in rows])
    assert found == [table["text"].to_pylist() for table in whole]


def test_a_state_is_the_order_and_the_next_batch_and_nothing_else(mix: Path) -> None:
    reader = ShardReader(mix)
    assert reader.state_dict() == {
        "order_id": order_of(mix),
        "next_batch": 0,
        "skip_batches": [],
    }
    batches = reader.batches(start_batch=9)
    assert batches.state_dict() == reader.state_dict()
    assert reader.state_dict()["next_batch"] == 9  # before iter, after no batch
    iter(batches)
    assert reader.state_dict()["next_batch"] == 9
    next(batches)
    assert reader.state_dict()["next_batch"] == 10  # what was read ahead does not count
    list(batches)
    assert reader.state_dict()["next_batch"] == BATCHES
    assert json.loads(json.dumps(reader.state_dict())) == reader.state_dict()


def test_a_state_taken_right_after_loading_is_the_loaded_one(mix: Path) -> None:
    state = {"order_id": order_of(mix), "next_batch": 17, "skip_batches": [[20, 22]]}
    reader = ShardReader(mix)
    reader.load_state_dict(state)
    assert reader.state_dict() == state
    batches = reader.batches()
    assert batches.state_dict() == reader.state_dict() == state
    assert numbers(batches) == [17, 18, 19, *range(22, BATCHES)]
    # The next pass begins at the beginning again.
    assert numbers(reader.batches()) == list(range(BATCHES))


def test_a_loaded_state_is_kept_as_it_was(mix: Path) -> None:
    state: dict[str, Any] = {"order_id": order_of(mix), "next_batch": 5, "skip_batches": []}
    reader = ShardReader(mix)
    reader.load_state_dict(state)
    state["skip_batches"].append([5, 9])
    assert numbers(reader.batches()) == list(range(5, BATCHES))


def test_a_state_without_skipped_batches_is_one_too(mix: Path) -> None:
    reader = ShardReader(mix)
    reader.load_state_dict({"order_id": order_of(mix), "next_batch": 28})
    assert numbers(reader.batches()) == [28, 29]


def test_skipped_batches_are_left_out_on_every_rank_and_stay_so_after_a_restart(mix: Path) -> None:
    whole = list(ShardReader(mix).batches(columns=["text"]))
    kept = [whole[n]["text"].to_pylist() for n in range(BATCHES) if not 4 <= n < 9 and n != 20]
    found: list[list[str]] = []
    state: dict[str, Any] | None = None
    for world_size, steps in [(2, 5), (4, 10), (1, BATCHES)]:
        ranks = []
        for rank in range(world_size):
            reader = ShardReader(mix)
            skip = [(20, 21), (4, 9)] if state is None else []
            if state is not None:
                reader.load_state_dict(json.loads(json.dumps(state)))
            batches = reader.batches(
                rank=rank, world_size=world_size, columns=["text"], skip_batches=skip
            )
            ranks.append([t["text"].to_pylist() for t in itertools.islice(batches, steps)])
        state = reader.state_dict()
        assert state["skip_batches"] == [[4, 9], [20, 21]]
        for parts in zip(*ranks, strict=True):
            found.append([row for rows in zip(*parts, strict=True) for row in rows])
    assert found == kept


def test_steps_of_whole_batches_close_up_over_what_is_skipped(step_mix: Path) -> None:
    reader = ShardReader(step_mix)
    kept = [n for n in range(STEP_BATCHES) if n not in (2, 3, 4)]
    for world_size in (1, 2, 4):
        ranks = [
            numbers(reader.batches(rank=rank, world_size=world_size, skip_batches=[(2, 5)]))
            for rank in range(world_size)
        ]
        # Of 21 batches left the last is no whole step.
        assert sorted(itertools.chain(*ranks)) == kept[:20]
        assert [ranks[n % world_size][n // world_size] for n in range(20)] == kept[:20]


def test_a_range_to_skip_that_was_trained_on_is_refused(mix: Path) -> None:
    reader = ShardReader(mix)
    state = {"order_id": order_of(mix), "next_batch": 17, "skip_batches": [[3, 5]]}
    reader.load_state_dict(state)
    with pytest.raises(
        ReaderError,
        match=r"skip_batches \(3, 6\): the state's next batch is 17, so batches of this range were "
        "trained on already; resume from a state at or before batch 3, or leave the range out",
    ):
        reader.batches(skip_batches=[(3, 6)])
    batches = reader.batches(skip_batches=[(3, 5), (18, 20)])  # the recorded one may be said again
    assert numbers(batches) == [17, *range(20, BATCHES)]
    with pytest.raises(ReaderError, match=r"skip_batches \(3, 5\): the state's next batch is 17"):
        batches.load_state_dict({**state, "skip_batches": []})


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_are_strided_parts_of_a_ranks_rows(
    mix: Path, micro_batches: int, world_size: int
) -> None:
    reader = ShardReader(mix)
    for rank in range(world_size):
        asked: dict[str, Any] = {"rank": rank, "world_size": world_size}
        whole = [table.to_pylist() for table in reader.batches(**asked)]
        parts = list(reader.batches(**asked, micro_batches=micro_batches))
        assert [[part.to_pylist() for part in batch] for batch in parts] == [
            [rows[part::micro_batches] for part in range(micro_batches)] for rows in whole
        ]


def test_micro_batches_may_be_uneven_and_padded(uneven: Path) -> None:
    reader = ShardReader(uneven)
    asked: dict[str, Any] = {"uneven": True, "columns": ["text", "tokens"]}
    whole = [table.to_pylist() for table in reader.batches(**asked)]
    parts = list(reader.batches(**asked, micro_batches=3, pad={"tokens": -1}))
    for rows, batch in zip(whole, parts, strict=True):
        assert [part.table["text"].to_pylist() for part in batch] == [
            [row["text"] for row in rows[part::3]] for part in range(3)
        ]
        for number, part in enumerate(batch):
            lists = [row["tokens"] for row in rows[number::3]]
            assert part.lengths["tokens"].tolist() == [len(tokens) for tokens in lists]
            for tokens, line in zip(lists, part.dense["tokens"].tolist(), strict=True):
                assert line[: len(tokens)] == tokens


def test_micro_batches_that_do_not_divide_are_refused(mix: Path, uneven: Path) -> None:
    with pytest.raises(
        ReaderError, match="micro_batches 3 does not divide the 4 rows that a rank takes of a batch"
    ):
        ShardReader(mix).batches(world_size=2, micro_batches=3)
    with pytest.raises(ReaderError, match="batches of this mix differ in size: use uneven=True"):
        ShardReader(uneven).batches(split="batches", micro_batches=2)
    with pytest.raises(ReaderError, match="micro_batches must be at least 1, not 0"):
        ShardReader(mix).batches(micro_batches=0)


def test_a_state_of_the_end_gives_no_batch(mix: Path) -> None:
    reader = ShardReader(mix)
    list(reader.batches())
    again = ShardReader(mix)
    again.load_state_dict(reader.state_dict())
    assert list(again.batches()) == []
    assert again.state_dict()["next_batch"] == BATCHES


def test_a_loaded_state_waits_for_a_call_that_succeeds_and_gives_no_start(mix: Path) -> None:
    reader = ShardReader(mix)
    reader.load_state_dict({"order_id": order_of(mix), "next_batch": 12})
    with pytest.raises(ReaderError):
        reader.batches(rank=8, world_size=8)
    assert reader.state_dict()["next_batch"] == 12
    assert numbers(reader.batches(start_batch=29)) == [29]
    assert numbers(reader.batches()) == list(range(12, BATCHES))


def test_an_iterator_takes_a_state_before_amid_and_after_iterating(mix: Path) -> None:
    batches = ShardReader(mix).batches(rank=1, world_size=2)
    for at in (5, 21, 0, 30, 14):
        batches.load_state_dict({"order_id": order_of(mix), "next_batch": at})
        assert batches.state_dict()["next_batch"] == at
        assert len(batches) == BATCHES - at
        for n, table in enumerate(itertools.islice(batches, 3), at):
            assert set(table.column("mix_batch").to_pylist()) == {n}
        assert batches.state_dict()["next_batch"] == min(at + 3, BATCHES)


def test_the_readers_state_outlives_the_iterator(mix: Path) -> None:
    reader = ShardReader(mix)
    for n, _ in enumerate(reader.batches()):
        if n == 4:
            break
    gc.collect()
    assert reader.state_dict()["next_batch"] == 5


def test_the_same_order_under_another_compression_resumes(mix: Path, tmp_path: Path) -> None:
    other, _ = small_mix(tmp_path, compression="snappy", batches_per_shard=5)
    reader = ShardReader(mix)
    first = list(itertools.islice(reader.batches(), 11))
    resumed = ShardReader(other)
    assert resumed.manifest.bytes_id != reader.manifest.bytes_id
    resumed.load_state_dict(reader.state_dict())
    assert [*first, *resumed.batches()] == list(ShardReader(mix).batches())


def test_a_state_of_another_order_is_refused_by_name(mix: Path, copy: Path) -> None:
    built_as(copy, lambda document: document.update(order_id="f" * 64))
    reader = ShardReader(mix)
    state = ShardReader(copy).state_dict()
    for target in (reader, reader.batches()):
        with pytest.raises(ReaderError) as caught:
            target.load_state_dict(state)
        assert "f" * 16 in str(caught.value)
        assert order_of(mix)[:16] in str(caught.value)
        assert "resume from the mix that the state belongs to" in str(caught.value)
        assert target.state_dict()["next_batch"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: None,
            "skip_batches, and nothing else; found None",
        ),
        (
            lambda state: [state],
            "skip_batches, and nothing else; found",
        ),
        (
            lambda state: {},
            r"skip_batches, and nothing else; found \{\}",
        ),
        (
            lambda state: {"next_batch": 3},
            "has order_id, next_batch and skip_batches, and nothing else",
        ),
        (
            lambda state: {**state, "rank": 0},
            "skip_batches, and nothing else; found .*'rank'",
        ),
        (lambda state: {**state, "order_id": None}, r"taken from the order None\.\."),
        (lambda state: {**state, "next_batch": "3"}, "next_batch must be an integer, found '3'"),
        (lambda state: {**state, "next_batch": 3.0}, r"must be an integer, found 3\.0"),
        (lambda state: {**state, "next_batch": True}, "must be an integer, found True"),
        (lambda state: {**state, "next_batch": -1}, "next_batch must be at least 0, found -1"),
        (
            lambda state: {**state, "next_batch": 31},
            "next batch is 31, but the mix has 30: resume from the longer mix of this order",
        ),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(
    mix: Path, change: Callable[[Any], Any], message: str
) -> None:
    reader = ShardReader(mix)
    batches = reader.batches(start_batch=6)
    next(batches)
    for target in (reader, batches):
        with pytest.raises(ReaderError, match=message):
            target.load_state_dict(change(reader.state_dict()))
    assert numbers(batches) == list(range(7, BATCHES))


# Reading ahead.


@pytest.mark.parametrize("read_ahead", [0, 1, 5, 1000])
def test_reading_ahead_changes_nothing_but_the_time(
    mix: Path, expected: Any, read_ahead: int
) -> None:
    found = [table.to_pylist() for table in ShardReader(mix).batches(read_ahead=read_ahead)]
    assert found == expected


sees_open_files = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs a system that lists open files"
)


@sees_open_files
@pytest.mark.parametrize(("read_ahead", "opened"), [(0, 0), (1, 0), (2, 0), (5, 1), (8, 2)])
def test_reading_ahead_goes_no_further_than_asked(copy: Path, read_ahead: int, opened: int) -> None:
    batches = ShardReader(copy).batches(read_ahead=read_ahead)
    next(batches)
    name = shard_path(copy, opened).name
    wait_until(lambda: any(name in fd for fd in open_files()))
    time.sleep(0.1)  # time enough to open the shard after it, were it asked for
    shutil.rmtree(copy / "shards")
    last = PER_SHARD * (opened + 1)  # an open file can be read to its end
    assert numbers(itertools.islice(batches, last - 1)) == list(range(1, last))
    with pytest.raises(ShardError, match=f"shard-{opened + 1:08d}.parquet: cannot be opened"):
        next(batches)
    assert batches.state_dict()["next_batch"] == last


def open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return found


@sees_open_files
@pytest.mark.parametrize("end", ["close", "del", "exhaust", "seek", "break"])
def test_threads_and_files_go_when_the_iterator_does(copy: Path, end: str) -> None:
    wait_until(lambda: not read_ahead_threads())
    gc.disable()  # letting go is not left to the collector of cycles
    try:
        reader = ShardReader(copy)
        batches = reader.batches(read_ahead=2)
        next(batches)
        assert len(read_ahead_threads()) == 2
        if end == "close":
            batches.close()
            batches.close()  # twice is fine
        elif end == "exhaust":
            list(batches)
        elif end == "seek":
            batches.load_state_dict(reader.state_dict())
        elif end == "break":
            for _ in batches:
                break
            del batches, _
        else:
            del batches
        wait_until(lambda: not read_ahead_threads())
        wait_until(lambda: not any(str(copy) in fd for fd in open_files()))
    finally:
        gc.enable()


def test_a_closed_iterator_goes_on_where_it_stands(mix: Path) -> None:
    batches = ShardReader(mix).batches()
    assert numbers(itertools.islice(batches, 9)) == list(range(9))
    batches.close()
    assert numbers(batches) == list(range(9, BATCHES))


@pytest.mark.parametrize("read_ahead", [0, 2, 5])
def test_an_error_of_the_read_ahead_thread_comes_at_its_batch_and_can_be_mended(
    copy: Path, mix: Path, read_ahead: int
) -> None:
    spoil(copy, {(s, g) for s in range(5) for g in range(3)} - {(2, 1)})
    batches = ShardReader(copy).batches(read_ahead=read_ahead)
    first = 2 * PER_SHARD + PER_GROUP
    assert numbers(itertools.islice(batches, first)) == list(range(first))
    for _ in range(2):  # asking again is no way to slip past it
        with pytest.raises(ShardError) as caught:
            next(batches)
        assert f"{shard_path(copy, 2)}: row group 1 is damaged" in str(caught.value)
        assert "`mixshards verify`" in str(caught.value)
        assert batches.state_dict()["next_batch"] == first
    shutil.copy(shard_path(mix, 2), shard_path(copy, 2))
    assert numbers(batches) == list(range(first, BATCHES))


def test_the_first_batch_at_any_depth_decodes_one_row_group(mix: Path, tmp_path: Path) -> None:
    for n in (0, 6, 12, 17, 29):
        out = Path(shutil.copytree(mix, tmp_path / f"at-{n}"))
        shard, group = n // PER_SHARD, n % PER_SHARD // PER_GROUP
        spoil(out, {(shard, group)})
        for other in set(range(5)) - {shard}:
            shard_path(out, other).unlink()
        assert numbers([ShardReader(out)[n]]) == [n]
        for read_ahead in (0, 2):
            batches = ShardReader(out).batches(start_batch=n, read_ahead=read_ahead)
            assert numbers([next(batches)]) == [n]


# Damage.


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard_path(copy, 3).unlink()
    reader = ShardReader(copy)
    with pytest.raises(ShardError, match=r"shard-00000003\.parquet: cannot be opened"):
        reader[21]
    assert numbers([reader[20], reader[28]]) == [20, 28]


@pytest.mark.parametrize("kept", [0, 3, 4, 100, 0.5, 0.99, -8, -1])
def test_a_truncated_shard_is_named(copy: Path, kept: float) -> None:
    data = shard_path(copy, 1).read_bytes()
    size = int(kept * len(data)) if isinstance(kept, float) else kept % len(data)
    shard_path(copy, 1).write_bytes(data[:size])
    with pytest.raises(ShardError, match=r"shard-00000001.parquet: cannot be opened as Parquet"):
        ShardReader(copy)[7]


def test_a_shard_in_anothers_place_is_named_with_both(copy: Path) -> None:
    shutil.copy(shard_path(copy, 1), shard_path(copy, 2))
    with pytest.raises(
        ShardError,
        match=r"shard-00000002\.parquet: holds batches 7 to 14 as shard 1; "
        "expected batches 14 to 21 as shard 2",
    ):
        ShardReader(copy)[14]


def test_a_shard_of_another_build_is_named_with_both(copy: Path, tmp_path: Path) -> None:
    other, _ = small_mix(tmp_path, batches_per_shard=PER_SHARD)
    shutil.copy(shard_path(other, 2), shard_path(copy, 2))
    with pytest.raises(
        ShardError, match=r"shard-00000002.* another build: its bytes_id .*, expected"
    ):
        ShardReader(copy)[14]


def test_a_parquet_file_that_is_no_shard_is_named(copy: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), shard_path(copy, 0))
    with pytest.raises(ShardError, match=r"00000000\.parquet: is a Parquet file, but no shard"):
        ShardReader(copy)[0]


def test_no_flipped_bit_of_a_shard_gives_a_wrong_row(copy: Path) -> None:
    """Every second byte of the footer and every fifth of the pages, one bit each."""
    path = shard_path(copy, 4)
    good = path.read_bytes()
    wanted = [ShardReader(copy)[n] for n in (28, 29)]
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    refused = kept = 0
    places = [*range(0, footer, 5), *range(footer, len(good), 2)]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << (at // 2 % 8)
        path.write_bytes(bad)
        reader = ShardReader(copy)
        try:
            found = [reader[28], reader[29]]
        except ShardError as error:
            refused += path.name in str(error)
            continue
        kept += 1
        assert found == wanted, at
        assert found[0].schema == wanted[0].schema, at
    assert refused + kept == len(places)  # every refusal names the shard
    assert refused > 0.6 * len(places)


# The manifest.


def test_folders_without_a_finished_mix_say_what_they_are(copy: Path, tmp_path: Path) -> None:
    hint = "expected the output folder of `mixshards build`"
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty", copy / "manifest.json"):
        with pytest.raises(ManifestError) as caught:
            ShardReader(path)
        assert str(caught.value).startswith(f"{path}: no manifest.json, so no finished mix")
        assert hint in str(caught.value)
    (copy / "manifest.json").unlink()
    with pytest.raises(ManifestError, match="a build was begun there and has not finished: run"):
        ShardReader(copy)
    (copy / "manifest.json").mkdir()
    with pytest.raises(ManifestError, match=r"manifest\.json: cannot be read: "):
        ShardReader(copy)


def test_a_newer_major_format_is_refused_and_a_newer_minor_one_is_read(copy: Path) -> None:
    edit(copy, lambda document: document.update(format_version="3.0"))
    with pytest.raises(
        ManifestError, match=r"format_version 3\.0, but .* reads up to 2\.0; install a newer"
    ):
        ShardReader(copy)
    edit(
        copy,
        lambda document: (
            document.update(format_version="2.99", hue="green"),
            document["layout"].update(depth=3),
            document["tables"].update(hues={"path": "_mix/hues.bin", "sha256": "0" * 64}),
        ),
    )
    assert numbers(ShardReader(copy).batches()) == list(range(BATCHES))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["layout"].update(batches_per_step=2),
        lambda d: d["layout"].update(batches_per_row_group="20"),
        lambda d: d["layout"].update(batches_per_shard=10),
        lambda d: d["schema"][0].update(nullable=False),
        lambda d: d["writer"].update(compression="lz4"),
        lambda d: d.update(order_id="0" * 64),
        lambda d: d.update(bytes_id="0" * 64),
    ],
)
def test_a_layout_that_is_not_that_of_the_shards_is_refused_at_once(
    uneven: Path, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    """Where batches differ in size, no row group tells how many of them it should hold."""
    out = edit(Path(shutil.copytree(uneven, tmp_path / "copy")), change)
    with pytest.raises(
        ManifestError,
        match=r"manifest\.json: is damaged: its bytes_id is not that of .*--overwrite",
    ):
        ShardReader(out)


@pytest.mark.parametrize("version", ["1.1", "1", "0.9"])
def test_a_mix_whose_shards_are_sealed_in_another_way_is_refused_with_the_way_out(
    copy: Path, version: str
) -> None:
    edit(copy, lambda document: document.update(format_version=version))
    with pytest.raises(
        ManifestError, match=f"format_version {version}, but .* from 2.0 on, .*with --overwrite"
    ):
        ShardReader(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format_version": "x"}', "\xff"])
def test_what_is_no_manifest_is_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match=r"manifest\.json: is no manifest of a mix"):
        ShardReader(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("order_id"), "order_id is missing"),
        (lambda d: d["layout"].pop("num_batches"), r"layout\.num_batches is missing"),
        (lambda d: d["layout"].update(batches_per_shard=0), "must be an integer above 0, found 0"),
        (lambda d: d["datasets"][1].pop("name"), r"datasets\[1\]\.name is missing"),
        (lambda d: d.update(schema={}), "schema must be a list"),
        (lambda d: d.pop("writer"), "writer is missing"),
        (lambda d: d["tables"].update(shards=3), r"tables\.shards\.path is missing"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_key(
    copy: Path, change: Callable[[Any], Any], message: str
) -> None:
    edit(copy, change)
    with pytest.raises(ManifestError, match=f"manifest.json: is damaged: .*{message}.*--overwrite"):
        ShardReader(copy)


# Batches that differ in size.


def places(batches: Any) -> list[int]:
    """The batch numbers of whole batches of any size."""
    found = []
    for table in batches:
        [number] = set(table["mix_batch"].to_pylist())
        found.append(number)
    return found


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_batches_that_differ_in_size_are_cut_by_their_number(
    uneven: Path, uneven_step: Path, sized: list[pa.Table], read_ahead: int
) -> None:
    asked: dict[str, Any] = {"split": "rows", "read_ahead": read_ahead}
    for path in (uneven, uneven_step):
        reader = ShardReader(path)
        assert list(reader.batches(**asked)) == sized
        assert [reader[n] for n in range(-len(sized), 0)] == sized
        for columns in (["text"], ["tokens", "mix_batch", "text"]):
            rest = reader.batches(start_batch=5, columns=columns, **asked)
            assert list(rest) == [table.select(columns) for table in sized[5:]]


def test_a_batch_without_rows_is_an_empty_table(tmp_path: Path) -> None:
    reader = ShardReader(write_uneven(tmp_path / "out", [0, 2, 0, 0, 1, 0]))
    assert [table.num_rows for table in reader.batches()] == [0, 2, 0, 0, 1, 0]
    assert [reader[n]["text"].to_pylist() for n in (4, 1)] == [["row 2"], ["row 0", "row 1"]]
    shapes = [b.dense["features"].shape for b in reader.batches(pad={"features": 0})]
    assert shapes[0] == shapes[5] == (0, 0, 2)


def test_ranks_take_whole_batches_where_these_differ_in_size(uneven: Path) -> None:
    reader = ShardReader(uneven)
    for world_size in (1, 2, 3):
        ranks = [reader.batches(rank=r, world_size=world_size) for r in range(world_size)]
        used = len(SIZES) - len(SIZES) % world_size
        assert [len(rank) for rank in ranks] == [used // world_size] * world_size
        assert list(map(places, ranks)) == [
            list(range(r, used, world_size)) for r in range(world_size)
        ]


def test_shares_of_rows_of_batches_that_differ_in_size_must_be_asked_for(
    uneven: Path, sized: list[pa.Table]
) -> None:
    reader = ShardReader(uneven)
    with pytest.raises(ReaderError, match="differ in size: use split='batches', or uneven=True"):
        reader.batches(world_size=2, split="rows")
    for asked in ({"split": "rows", "uneven": True}, {"uneven": True}):
        for world_size in (1, 2, 3):
            ranks = [
                list(reader.batches(rank=r, world_size=world_size, **asked))
                for r in range(world_size)
            ]
            for n, whole in enumerate(sized):
                assert [rank[n].to_pylist() for rank in ranks] == [
                    whole.to_pylist()[r::world_size] for r in range(world_size)
                ]


@pytest.mark.parametrize("held", [[0, 0, 1, 2, 3], [0, 1, 2, 2, 1], [-1, 0, 1, 2, 2]])
def test_a_row_group_with_rows_of_other_batches_is_named(tmp_path: Path, held: list[int]) -> None:
    rows = uneven_table([1, 1, 3])
    column = rows.schema.get_field_index("mix_batch")
    rows = rows.set_column(column, rows.schema.field(column), pa.array(held, pa.int64()))
    out = write_uneven(tmp_path / "out", [1, 1, 3], rows=rows)
    with pytest.raises(
        ShardError,
        match=r"00000000\.parquet: row group 0 holds other rows than batches 0 to 3; `mix",
    ):
        ShardReader(out)[1]


def test_a_shard_that_lacks_a_row_group_is_named(uneven: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(uneven, tmp_path / "copy"))
    parquet = pq.ParquetFile(shard_path(out, 1))
    footer = Footer.decode(parquet.metadata.metadata, "")
    groups = [parquet.read_row_group(g) for g in range(2)]
    schema = parquet.schema_arrow.remove_metadata()
    write_shard(str(shard_path(out, 1)), schema, WriterOptions("zstd", 1), footer, groups)
    assert places([ShardReader(out)[12]]) == [12]
    with pytest.raises(ShardError, match=r"shard-00000001\.parquet: row group 2 is damaged"):
        ShardReader(out)[13]


# A last step that is not full.


@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 24, 50])
def test_a_last_step_is_filled_up_from_the_beginning_of_the_mix(
    uneven: Path, world_size: int, read_ahead: int
) -> None:
    reader = ShardReader(uneven)
    steps = -(-len(SIZES) // world_size)
    order = [n % len(SIZES) for n in range(steps * world_size)]
    for r in range(world_size):
        batches = reader.batches(
            rank=r,
            world_size=world_size,
            split="batches",
            remainder="repeat",
            read_ahead=read_ahead,
            columns=["mix_batch"],
        )
        assert len(batches) == steps
        assert places(batches) == order[r::world_size]
        assert len(batches) == 0
        assert batches.state_dict()["next_batch"] == len(SIZES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_last_step_of_a_mix_with_steps_is_filled_up_whatever_the_world_size(
    uneven_step: Path, world_size: int
) -> None:
    reader = ShardReader(uneven_step)
    found = [
        places(reader.batches(rank=r, world_size=world_size, remainder="repeat"))
        for r in range(world_size)
    ]
    assert [n for step in zip(*found, strict=True) for n in step] == [*range(23), 0]
    assert reader.state_dict()["next_batch"] == 24


def test_full_steps_leave_nothing_to_repeat(step_mix: Path) -> None:
    for remainder in ("drop", "repeat"):
        batches = ShardReader(step_mix).batches(rank=1, world_size=2, remainder=remainder)
        assert numbers(batches) == list(range(1, STEP_BATCHES, 2))
        assert batches.state_dict()["next_batch"] == STEP_BATCHES


def test_a_repeated_batch_is_the_batch_itself(uneven: Path, sized: list[pa.Table]) -> None:
    batches = ShardReader(uneven).batches(rank=2, world_size=4, remainder="repeat", start_batch=20)
    assert list(batches) == [sized[22]]
    batches = ShardReader(uneven).batches(rank=3, world_size=4, remainder="repeat", start_batch=20)
    assert list(batches) == [sized[0]]


def repeating(path: Path, state: Any, world_size: int) -> list[int]:
    """The batches that ranks which start from a state take, in order, step after step."""
    ranks = []
    for r in range(world_size):
        reader = ShardReader(path)
        reader.load_state_dict(json.loads(json.dumps(state)))
        batches = reader.batches(rank=r, world_size=world_size, remainder="repeat", split="batches")
        assert reader.state_dict() == batches.state_dict() == state
        left = len(batches)
        ranks.append(places(batches))
        assert len(ranks[-1]) == left
    return [n for step in zip(*ranks, strict=True) for n in step]


WORLD_SIZES = list(itertools.product([1, 2, 3, 6], repeat=2))


@pytest.mark.parametrize(("before", "after"), WORLD_SIZES)
def test_a_filled_last_step_of_the_mix_goes_on_with_another_world_size(
    uneven_step: Path, before: int, after: int
) -> None:
    order = [*range(23), 0]
    batches = ShardReader(uneven_step).batches(world_size=before, remainder="repeat")
    for at in range(0, 25, before):
        state = batches.state_dict()
        assert state["next_batch"] == at
        if at % after:
            with pytest.raises(ReaderError, match="in the middle of a step: choose a world_size"):
                repeating(uneven_step, state, after)
        else:
            assert repeating(uneven_step, state, after) == order[at:]
        assert (next(batches, None) is None) == (at == 24)


@pytest.mark.parametrize(("before", "after"), WORLD_SIZES)
def test_a_last_step_of_one_batch_a_rank_is_filled_up_for_the_ranks_that_take_it(
    uneven: Path, before: int, after: int
) -> None:
    asked: dict[str, Any] = {"world_size": before, "split": "batches", "remainder": "repeat"}
    batches = ShardReader(uneven).batches(**asked)
    filled = [*range(23), *range(-23 % after)]
    for at in [*range(0, 23, before), 23]:
        state = batches.state_dict()
        assert state["next_batch"] == at
        if at == 23:
            assert repeating(uneven, state, after) == []
        elif at % after:
            with pytest.raises(ReaderError, match="in the middle of a step: choose a world_size"):
                repeating(uneven, state, after)
        else:
            assert repeating(uneven, state, after) == filled[at:]
        assert (next(batches, None) is None) == (at == 23)


def test_a_state_in_a_filled_last_step_asks_for_the_same_remainder(uneven_step: Path) -> None:
    reader = ShardReader(uneven_step)
    list(reader.batches(remainder="repeat"))
    state = reader.state_dict()
    assert state["next_batch"] == 24
    for split in ("batches", "rows"):
        resumed = ShardReader(uneven_step)
        resumed.load_state_dict(state)
        with pytest.raises(
            ReaderError,
            match=r"batch 24 is outside 0\.\.23: the mix has 23 batches; remainder='repeat' fills "
            "up its last step",
        ):
            resumed.batches(split=split)
        assert list(resumed.batches(remainder="repeat")) == []
    with pytest.raises(ReaderError, match="next batch is 25, but the mix has 23: resume from the"):
        reader.load_state_dict({**state, "next_batch": 25})
    with pytest.raises(ReaderError, match=r"batch 25 is outside 0\.\.24: the mix has 23 batches$"):
        reader.batches(start_batch=25, remainder="repeat")


def test_a_remainder_is_one_of_whole_batches(mix: Path) -> None:
    reader = ShardReader(mix)
    for asked in ({}, {"split": "rows", "world_size": 2}):
        with pytest.raises(
            ReaderError,
            match=r"remainder='repeat' fills up steps of whole batches.*: use split='batches', or",
        ):
            reader.batches(remainder="repeat", **asked)
        assert len(reader.batches(remainder="drop", **asked)) == BATCHES
    with pytest.raises(ReaderError, match="remainder must be 'drop' or 'repeat', not 'keep'"):
        reader.batches(remainder="keep")  # type: ignore[arg-type]


# Padding.

PAD = {"features": -1.5, "tokens": -100, "voiced": True, "windows": 0}


def check_padded(batch: PaddedBatch, rows: list[dict[str, Any]], pad: dict[str, Any]) -> None:
    """Hold a padded batch against its rows, value by value."""
    assert batch.table.num_rows == len(rows)
    assert batch.table.to_pylist() == [
        {name: value for name, value in row.items() if name not in pad} for row in rows
    ]
    assert list(batch.dense) == list(batch.lengths) == list(pad)
    for name, value in pad.items():
        dense, lengths = batch.dense[name], batch.lengths[name]
        assert lengths.dtype == np.int64
        assert lengths.tolist() == [len(row[name]) for row in rows]
        assert dense.shape[:2] == (len(rows), max(lengths, default=0))
        for item, row in zip(dense, rows, strict=True):
            assert item[: len(row[name])].tolist() == row[name]
            assert (item[len(row[name]) :] == value).all()


@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("split", ["rows", "batches"])
def test_padded_batches_hold_what_the_plain_ones_do(
    uneven: Path, sized: list[pa.Table], split: Any, world_size: int, read_ahead: int
) -> None:
    asked = {"split": split, "uneven": True, "world_size": world_size, "read_ahead": read_ahead}
    for r in range(world_size):
        batches = list(ShardReader(uneven).batches(rank=r, pad=PAD, **asked))
        if split == "rows":
            expected = [table.to_pylist()[r::world_size] for table in sized]
        else:
            used = len(SIZES) - len(SIZES) % world_size
            expected = [sized[n].to_pylist() for n in range(r, used, world_size)]
        assert len(batches) == len(expected)
        for batch, rows in zip(batches, expected, strict=True):
            check_padded(batch, rows, PAD)


def test_padded_columns_keep_their_dtype_and_inner_lengths(uneven: Path) -> None:
    batch = ShardReader(uneven).batches(start_batch=12, pad=PAD)
    shapes = {name: (dense.dtype.name, dense.shape) for name, dense in next(batch).dense.items()}
    assert shapes == {
        "features": ("float32", (9, 4, 2)),
        "windows": ("int16", (9, 4, 3)),
        "tokens": ("int32", (9, 3)),
        "voiced": ("bool", (9, 4)),
    }


def test_padding_goes_with_columns_resume_and_a_repeated_last_step(
    uneven: Path, sized: list[pa.Table]
) -> None:
    pad = {"tokens": 0}
    asked: dict[str, Any] = {
        "rank": 1,
        "world_size": 2,
        "pad": pad,
        "columns": ["tokens", "mix_batch"],
        "remainder": "repeat",
    }
    reader = ShardReader(uneven)
    found = list(itertools.islice(reader.batches(**asked), 5))
    again = ShardReader(uneven)
    again.load_state_dict(reader.state_dict())
    found += again.batches(**asked)
    order = [*range(1, 23, 2), 0]
    assert len(found) == len(order)
    for n, batch in zip(order, found, strict=True):
        check_padded(batch, sized[n].select(["tokens", "mix_batch"]).to_pylist(), pad)
    only = next(ShardReader(uneven).batches(columns=["tokens"], pad=pad))
    assert (only.table.num_columns, only.table.num_rows) == (0, SIZES[0])


def test_without_a_column_to_pad_a_padded_batch_is_its_table(
    uneven: Path, sized: list[pa.Table]
) -> None:
    for batch, table in zip(ShardReader(uneven).batches(pad={}), sized, strict=True):
        assert (batch.table, batch.dense, batch.lengths) == (table, {}, {})


def test_batches_of_one_size_are_padded_too(mix: Path, expected: Any) -> None:
    batches = ShardReader(mix).batches(rank=1, world_size=2, pad={"tokens": -1})
    for batch, rows in zip(batches, expected, strict=True):
        check_padded(batch, rows[1::2], {"tokens": -1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pad": {"feature": 0}}, "pad: no column 'feature'; the mix has text, features, windows"),
        (
            {"pad": {"tokens": 0}, "columns": ["text"]},
            r"pad: column 'tokens' is not among columns=\['text'\]",
        ),
        ({"pad": "tokens"}, r"pad must map .* such as \{'features': 0\.0\}, found 'tokens'"),
        ({"pad": ["tokens"]}, r"pad must map names of columns to values, .* found \['tokens'\]"),
        (
            {"pad": {"tokens": 0.5}},
            r"pad: column 'tokens' of type list<element: int32>: 0\.5 \(float\) is no int32, "
            "expected an integer from -2147483648 to 2147483647",
        ),
        (
            {"pad": {"voiced": True, "windows": None}},
            r"pad: column 'windows' of type .*int16.*: None \(NoneType\) is no int16",
        ),
        ({"pad": {"features": "0"}}, r"column 'features' of type .*: '0' \(str\) is no float32"),
        ({"pad": {"voiced": 0}}, r"column 'voiced' of type .*: 0 \(int\) is no bool"),
        (
            {"pad": {"text": ""}},
            "pad: column 'text' of type string: string cannot be padded, expected lists of",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused_at_once(
    uneven: Path, arguments: dict[str, Any], message: str
) -> None:
    reader = ShardReader(uneven)
    reader.load_state_dict({**reader.state_dict(), "next_batch": 9})
    with pytest.raises(ReaderError, match=message):
        reader.batches(**arguments)
    assert places([next(reader.batches())]) == [9]  # the loaded state still waits


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", None, "the list is null, expected a list"),
        ("tokens", [1, None], "a value is null, expected int32"),
        ("windows", [[1, 2], None], "an inner list is null, expected a list"),
        ("windows", [[1, 2, 3], [4, 5]], "an inner list has length 2, but those before it 3"),
    ],
)
def test_a_null_or_a_ragged_inner_list_is_named_when_its_batch_comes(
    tmp_path: Path, column: str, value: Any, message: str
) -> None:
    sizes = [2, 2, 4, 2]
    rows = uneven_table(sizes)
    at = rows.schema.get_field_index(column)
    values = rows.column(at).to_pylist()
    values[7] = value  # row 3 of batch 2
    rows = rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.types[at]))
    reader = ShardReader(write_uneven(tmp_path / "out", sizes, rows=rows))
    for asked, before in (
        ({}, 2),
        ({"split": "rows", "uneven": True, "rank": 1, "world_size": 2}, 2),
        ({"rank": 0, "world_size": 2}, 1),
    ):
        batches = reader.batches(pad={column: 0}, **asked)
        assert len(list(itertools.islice(batches, before))) == before
        for _ in range(2):
            with pytest.raises(ReaderError) as caught:
                next(batches)
            assert str(caught.value).startswith(f"column {column!r} of batch 2, row 3: {message}")
        assert batches.state_dict()["next_batch"] == 2
    assert len(list(reader.batches(start_batch=3, pad={column: 0}))) == 1


@sees_open_files
def test_padding_looks_into_the_shard_it_begins_in_and_lets_go_of_it(
    uneven: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(uneven, tmp_path / "copy"))
    for shard in (0, 1, 3):
        shard_path(out, shard).unlink()
    reader = ShardReader(out)
    batches = reader.batches(start_shard=2, pad=PAD)
    assert not any(str(out) in fd for fd in open_files())
    assert len(list(itertools.islice(batches, PER_SHARD))) == PER_SHARD
    with pytest.raises(ShardError, match=r"shard-00000001\.parquet: cannot be opened"):
        reader.batches(start_shard=1, pad=PAD)


# Processes.


def test_a_fresh_process_reads_and_loads_nothing_of_what_building_needs(mix: Path) -> None:
    code = (
        "import json, sys; from pipeline.reader import ShardReader; import pipeline.verify\n"
        "found = [t['mix_batch'][0].as_py() for t in ShardReader(sys.argv[1]).batches(3)]\n"
        "print(json.dumps([found, [*sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(mix)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    found, modules = json.loads(done.stdout)
    assert found == list(range(3 * PER_SHARD, BATCHES))
    assert {"pipeline.reader", "pyarrow"} <= set(modules)
    building = {"apache_beam", "torch", "yaml", "ruamel", "pydantic", "click", "rich"}
    assert not building & {name.partition(".")[0] for name in modules}
    assert not {f"pipeline.{name}" for name in ("config", "plan", "gather")} & set(modules)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on_with_readers_and_iterators_of_its_parent(mix: Path) -> None:
    reader = ShardReader(mix)
    reader[4]
    begun = reader.batches(read_ahead=3)
    next(begun)  # its thread will be missing in the child
    fresh = reader.batches(start_batch=20)
    context = multiprocessing.get_context("fork")
    source, sink = context.Pipe(duplex=False)

    def go_on() -> None:
        sink.send([numbers(begun), numbers(fresh), numbers(reader[n] for n in (4, 5, 25))])

    child = context.Process(target=go_on)
    child.start()
    try:
        assert source.poll(60), "the child hangs"
        assert source.recv() == [list(range(1, 30)), list(range(20, 30)), [4, 5, 25]]
    finally:
        child.kill()
        child.join()
    assert numbers(begun) == list(range(1, 30))  # the parent's own is where it was
    assert numbers(fresh) == list(range(20, 30))


def test_a_reader_is_pickled_with_the_state_that_it_was_given(tmp_path: Path) -> None:
    out, _ = small_mix(tmp_path)
    reader = ShardReader(str(out))
    reader.load_state_dict({"order_id": reader.manifest.order_id, "next_batch": 7})
    copy = pickle.loads(pickle.dumps(reader))
    assert next(copy.batches()) == reader[7]
