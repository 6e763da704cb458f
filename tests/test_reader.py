"""Reading a finished mix: every batch, every rank, every restart, every kind of damage."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore import DataBatcher
from pipeline.manifest import ManifestError
from pipeline.reader import ReaderError, ShardReader
from pipeline.shard import ShardError

from .mixes import small_mix

WEIGHTS = {"web": 3, "code": 2, "books": 1}
ROWS = {"web": 100, "code": 73, "books": 11}
BATCH, BATCHES = 8, 30
PER_SHARD, PER_GROUP = 7, 3  # groups of 3, 3 and 1 batches; the last shard holds 2
STEP, STEP_BATCHES = 4, 24


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
    edit(copy, lambda document: document["layout"].update(batches_per_step=4))
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
    assert reader.state_dict() == {"order_id": order_of(mix), "next_batch": 0}
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
    state = {"order_id": order_of(mix), "next_batch": 17}
    reader = ShardReader(mix)
    reader.load_state_dict(state)
    assert reader.state_dict() == state
    batches = reader.batches()
    assert batches.state_dict() == reader.state_dict() == state
    assert numbers(batches) == list(range(17, BATCHES))
    # The next pass begins at the beginning again.
    assert numbers(reader.batches()) == list(range(BATCHES))


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
    edit(copy, lambda document: document.update(order_id="f" * 64))
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
        (lambda state: None, "exactly order_id and next_batch, found None"),
        (lambda state: [state], "exactly order_id and next_batch, found"),
        (lambda state: {}, r"exactly order_id and next_batch, found \{\}"),
        (lambda state: {"next_batch": 3}, "exactly order_id and next_batch"),
        (lambda state: {**state, "rank": 0}, "exactly order_id and next_batch, found .*'rank'"),
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
        assert len(read_ahead_threads()) == 1
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
    edit(copy, lambda document: document.update(format_version="2.0"))
    with pytest.raises(
        ManifestError, match=r"format_version 2\.0, but .* reads up to 1\.0; install a newer"
    ):
        ShardReader(copy)
    edit(
        copy,
        lambda document: (
            document.update(format_version="1.99", hue="green"),
            document["layout"].update(depth=3),
            document["tables"].update(hues={"path": "_mix/hues.bin", "sha256": "0" * 64}),
        ),
    )
    assert numbers(ShardReader(copy).batches()) == list(range(BATCHES))


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


def test_batches_of_unknown_size_are_cut_by_their_number(copy: Path, mix: Path) -> None:
    edit(copy, lambda document: document["mixture"].update(rows_per_batch=None))
    reader, whole = ShardReader(copy), ShardReader(mix)
    for n, table in enumerate(reader.batches()):
        assert table == whole[n] == reader[n]
    for columns in (["text"], ["tokens", "mix_batch", "text"]):
        for n, table in enumerate(reader.batches(start_batch=5, columns=columns), 5):
            assert table == whole[n].select(columns)
    with pytest.raises(ReaderError, match="differ in size: use split='batches', or uneven=True"):
        reader.batches(world_size=2)
    halves = [reader.batches(rank=r, world_size=2, uneven=True) for r in range(2)]
    assert [next(half).num_rows for half in halves] == [4, 4]
    taken = [numbers(reader.batches(rank=r, world_size=2, split="batches")) for r in range(2)]
    assert taken == [list(range(r, BATCHES, 2)) for r in range(2)]


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
