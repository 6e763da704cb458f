"""A mix as torch datasets: one order for any workers, ranks, restarts and skipped batches."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torch.utils.data import DataLoader  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from pipeline.plan import plan  # noqa: E402
from pipeline.reader import ReaderError, ShardReader  # noqa: E402
from pipeline.shard import ShardError  # noqa: E402
from pipeline.torch import MixedBatches, MixedShards, Padded, Ragged  # noqa: E402
from pipeline.transforms import build  # noqa: E402

from .mixes import config  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*is deprecated, please do not call"),
]

ROWS, BATCHES = 24, 40
BATCH = "mix_batch"


@pytest.fixture(autouse=True)
def _loaders_end_with_their_test() -> Iterator[None]:
    yield
    gc.collect()  # torch raises in whatever runs when it ends a loader whose worker failed


def _table(name: str, rows: int) -> pa.Table:
    places = np.arange(rows)
    return pa.table(
        {
            "text": [f"{name}:{i}" for i in range(rows)],
            "tokens": pa.array([[i] * (i % 5) for i in range(rows)], pa.list_(pa.int32())),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.repeat(places, 4).astype(np.float32)), 4
            ),
            "label": pa.array(places, pa.int64()),
            "score": pa.array([None if i % 7 == 3 else i / 2 for i in range(rows)], pa.float32()),
        }
    )


def _mix(folder: Path, **keys: Any) -> Path:
    for name, rows in {"web": 300, "code": 170, "books": 41}.items():
        (folder / "data" / name).mkdir(parents=True)
        pq.write_table(_table(name, rows), folder / "data" / name / "part.parquet")
    settings = {"batch_size": ROWS, "num_batches": BATCHES, "on_exhausted": "repeat", **keys}
    build(plan(config(folder, {"web": 3, "code": 2, "books": 1}, **settings)))
    return folder / "out"


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 batches of 24 in shards of 7 and row groups of 3."""
    keys = {"batches_per_shard": 7, "batches_per_row_group": 3}
    return _mix(tmp_path_factory.mktemp("torch"), **keys)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 36 of those batches in steps of 12."""
    keys = {"batches_per_shard": 12, "batches_per_step": 12, "num_batches": 36}
    return _mix(tmp_path_factory.mktemp("torch-steps"), **keys)


PLAIN = ["text", "tokens", "vector", "label"]


def numbers(loader: Iterable[Any]) -> list[int]:
    return [batch[BATCH] for batch in loader]


def texts(batches: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [batch["text"] for batch in batches]


def loader(dataset: Any, workers: int = 0, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def stateful(dataset: Any, workers: int = 0, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that a dict of tensors holds."""
    ends = batch["tokens"].offsets.tolist()
    tokens = [batch["tokens"].values[a:b].tolist() for a, b in itertools.pairwise(ends)]
    columns = {name: batch[name] for name in batch if name not in (BATCH, "tokens")}
    plain = {
        name: values if isinstance(values, list) else values.tolist()
        for name, values in columns.items()
    }
    return [
        {"tokens": tokens[i], **{name: values[i] for name, values in plain.items()}}
        for i in range(len(tokens))
    ]


# What a batch is.


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_any_number_of_workers_gives_what_the_reader_does_in_its_order(
    mix: Path, workers: int
) -> None:
    dataset = MixedShards(mix, fill={"score": -1.0})
    found = list(loader(dataset, workers))
    assert len(dataset) == len(loader(dataset, workers)) == len(found) == BATCHES
    for n, (batch, table) in enumerate(zip(found, ShardReader(mix).batches(), strict=True)):
        assert batch[BATCH] == n
        expected = table.drop_columns([BATCH]).to_pylist()
        for row in expected:
            row["score"] = -1.0 if row["score"] is None else row["score"]
        assert rows_of(batch) == expected


@pytest.mark.filterwarnings("error::UserWarning:pipeline")
def test_numbers_are_tensors_over_the_memory_of_the_row_group(mix: Path) -> None:
    first, second = itertools.islice(MixedShards(mix, columns=PLAIN), 2)
    assert list(first) == [BATCH, *PLAIN]
    assert (first["vector"].shape, first["vector"].dtype) == ((ROWS, 4), torch.float32)
    assert (first["label"].shape, first["label"].dtype) == ((ROWS,), torch.int64)
    assert isinstance(first["tokens"], Ragged)
    assert first["label"].data_ptr() + ROWS * 8 == second["label"].data_ptr()


def test_padded_columns_are_dense_with_lengths(mix: Path) -> None:
    tables = ShardReader(mix).batches(columns=["tokens"])
    dataset = MixedShards(mix, columns=["label", "tokens"], pad={"tokens": -1})
    for batch, table in zip(dataset, tables, strict=True):
        lists = table["tokens"].to_pylist()
        assert isinstance(batch["tokens"], Padded)
        assert batch["tokens"].lengths.tolist() == [len(tokens) for tokens in lists]
        longest = max(map(len, lists))
        assert batch["tokens"].values.tolist() == [
            tokens + [-1] * (longest - len(tokens)) for tokens in lists
        ]


def test_the_number_is_there_whatever_columns_are_asked_for(mix: Path) -> None:
    for columns in (["label"], [BATCH, "label"], ("label",)):
        batch = next(iter(MixedShards(mix, columns=columns)))
        assert list(batch) == [BATCH, "label"]
        assert batch[BATCH] == 0
    assert list(next(iter(MixedShards(mix, columns=[])))) == [BATCH]


def test_a_dict_that_collate_makes_goes_between_processes_as_our_own_do(mix: Path) -> None:
    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        return {"number": batch[BATCH], "twice": batch["label"] * 2}

    dataset = MixedShards(mix, columns=["label"], collate=collate)
    for here, there in zip(dataset, loader(dataset, 1), strict=True):
        assert type(here) is type(there) is dict
        assert not there["twice"].untyped_storage().is_shared()  # as it would be by torch's way
        assert there["number"] == here["number"]
        assert there["twice"].tolist() == here["twice"].tolist()


def test_collate_makes_the_batch_and_an_error_in_it_loses_none(mix: Path) -> None:
    trouble = iter([False, True, False])

    def collate(batch: dict[str, Any]) -> tuple[int, int]:
        if next(trouble, False):
            raise RuntimeError("out of luck")
        return batch[BATCH], int(batch["label"].sum())

    dataset = MixedShards(mix, columns=["label"], collate=collate)
    stream = iter(dataset)
    expected = [int(np.sum(t["label"].to_numpy())) for t in ShardReader(mix).batches()]
    assert next(stream) == (0, expected[0])
    with pytest.raises(RuntimeError, match="out of luck"):
        next(stream)
    assert dataset.state_dict()["next_batch"] == 1
    assert list(stream) == list(enumerate(expected))[1:]


def test_batches_keep_their_form_where_they_are_pinned(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    # Pinning itself needs an accelerator; what torch does around it does not.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    options: dict[str, Any] = {"columns": PLAIN, "micro_batches": 2}
    for pad in (None, {"tokens": 0}):
        batch = next(iter(MixedShards(mix, **options, pad=pad)))
        pinned = pin_memory(batch)
        assert str(pinned) == str(batch)
        assert type(pinned[0]["tokens"]) is (Ragged if pad is None else Padded)
        assert pinned[1]["label"].data_ptr() != batch[1]["label"].data_ptr()


# Ranks.


def test_the_world_may_change_at_any_batch(mix: Path) -> None:
    whole = texts(MixedShards(mix, columns=["text"]))
    found: list[list[str]] = []
    state: dict[str, Any] | None = None
    for world_size, count in [(8, 5), (6, 7), (4, 1), (3, 12), (8, 2), (1, BATCHES)]:
        ranks = []
        states = []
        for rank in range(world_size):
            dataset = MixedShards(mix, columns=["text"], rank=rank, world_size=world_size)
            if state is not None:
                dataset.load_state_dict(json.loads(json.dumps(state)))
            batches = list(itertools.islice(dataset, count))
            ranks.append(texts(batches))
            states.append(dataset.state_after(batches[-1][BATCH]))
            assert states[-1] == dataset.state_dict()
        assert all(other == states[0] for other in states)
        state = states[0]
        for parts in zip(*ranks, strict=True):
            found.append([row for rows in zip(*parts, strict=True) for row in rows])
    assert found == whole


def test_the_world_may_change_between_steps_of_whole_batches(steps: Path) -> None:
    found: list[int] = []
    state: dict[str, Any] | None = None
    for world_size in (6, 4, 3):
        ranks = []
        for rank in range(world_size):
            dataset = MixedShards(steps, columns=["label"], rank=rank, world_size=world_size)
            if state is not None:
                dataset.load_state_dict(state)
            assert len(dataset) == (36 - len(found)) // world_size
            ranks.append(numbers(itertools.islice(dataset, 12 // world_size)))
        state = dataset.state_after(ranks[0][-1])  # any rank's last number tells the same
        assert state == dataset.state_after(ranks[-1][-1])
        found += itertools.chain(*zip(*ranks, strict=True))
    assert found == list(range(36))


def test_micro_batches_are_strided_parts_of_the_ranks_rows(mix: Path) -> None:
    for rank in range(2):
        asked: dict[str, Any] = {"columns": ["text"], "rank": rank, "world_size": 2}
        whole = texts(MixedShards(mix, **asked))
        parts = list(loader(MixedShards(mix, **asked, micro_batches=3), 2))
        assert [texts(batch) for batch in parts] == [
            [rows[part::3] for part in range(3)] for rows in whole
        ]
        assert [numbers(batch) for batch in parts] == [[n] * 3 for n in range(BATCHES)]


def test_rank_and_world_size_are_found(mix: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def first_of(**given: Any) -> list[str]:
        rows: list[str] = next(iter(MixedShards(mix, columns=["text"], **given)))["text"]
        return rows

    whole = first_of()
    assert len(whole) == ROWS
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ReaderError, match="the environment has RANK=2 and WORLD_SIZE=None"):
        first_of()
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ReaderError, match="RANK=2 and WORLD_SIZE=four, expected two integers"):
        first_of()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert first_of() == whole[2::4]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert first_of() == whole
        assert first_of(rank=1, world_size=3) == whole[1::3]
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ReaderError, match="rank 1 and world_size None: give both, or neither"):
        first_of(rank=1)


# States.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_again_and_again(mix: Path, workers: int) -> None:
    found: list[int] = []
    state = None
    for count in (0, 3, 1, 0, 6, 2, BATCHES):
        batches = stateful(MixedShards(mix, columns=["label"]), workers)
        if state is not None:
            batches.load_state_dict(pickle.loads(pickle.dumps(state)))
        right_after = batches.state_dict()
        found += numbers(itertools.islice(batches, count)) if count else []
        state = batches.state_dict() if count else right_after
    assert found == list(range(BATCHES))
    # What follows the end is the next pass, whole.
    assert numbers(batches) == list(range(BATCHES))


@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {}), (2, {"persistent_workers": 1})])
def test_the_pass_after_a_resumed_one_begins_at_the_beginning(
    mix: Path, workers: int, options: dict[str, Any]
) -> None:
    dataset = MixedShards(mix, columns=["label"])
    batches = loader(dataset, workers, **options)
    dataset.load_state_dict(dataset.state_after(30))
    assert len(batches) == 9
    assert numbers(batches) == list(range(31, BATCHES))
    assert len(batches) == BATCHES
    assert numbers(batches) == list(range(BATCHES))


def test_a_plain_loader_resumes_by_number_with_any_workers(mix: Path) -> None:
    found: list[int] = []
    state = None
    for workers, count in [(2, 5), (0, 4), (3, 8), (1, BATCHES)]:
        dataset = MixedShards(mix, columns=["label"])
        if state is not None:
            dataset.load_state_dict(state)
        batches = itertools.islice(loader(dataset, workers, **_prefetch(workers)), count)
        found += numbers(batches)
        state = dataset.state_after(found[-1])
        assert state["next_batch"] == found[-1] + 1
    assert found == list(range(BATCHES))


def _prefetch(workers: int) -> dict[str, int]:
    return {"prefetch_factor": 4} if workers else {}


def test_skipped_batches_are_left_out_and_recorded(mix: Path) -> None:
    dataset = MixedShards(mix, columns=["label"], skip_batches=[(10, 12), (3, 6)])
    batches = iter(loader(dataset, 2))
    assert [next(batches)[BATCH] for _ in range(5)] == [0, 1, 2, 6, 7]
    state = json.loads(json.dumps(dataset.state_after(7)))
    assert state["skip_batches"] == [[3, 6], [10, 12]]
    # The loss rises at 20: what was skipped stays so, and more is.
    again = MixedShards(mix, columns=["label"], skip_batches=[(20, 24)])
    again.load_state_dict(state)
    rest = [8, 9, *range(12, 20), *range(24, BATCHES)]
    assert len(again) == len(rest)
    assert numbers(loader(again, 2)) == rest
    assert again.state_after(12)["skip_batches"] == [[3, 6], [10, 12], [20, 24]]
    assert again.state_after(19)["next_batch"] == 24
    with pytest.raises(ReaderError, match="no rank is given batch 21: the order has"):
        again.state_after(21)
    late = MixedShards(mix, skip_batches=[(5, 8)])
    with pytest.raises(
        ReaderError, match=r"skip_batches \(5, 8\): the state's next batch is 8, so"
    ):
        late.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_keeps_what_is_skipped(mix: Path, workers: int) -> None:
    first = stateful(MixedShards(mix, columns=["label"], skip_batches=[(3, 6)]), workers)
    assert numbers(itertools.islice(first, 5)) == [0, 1, 2, 6, 7]
    second = stateful(MixedShards(mix, columns=["label"]), workers)
    second.load_state_dict(first.state_dict())
    assert numbers(second) == list(range(8, BATCHES))
    # In later passes too, and in the states of this process.
    assert numbers(second) == [0, 1, 2, *range(6, BATCHES)]
    assert len(second.dataset) == BATCHES - 3
    assert second.dataset.state_after(7)["skip_batches"] == [[3, 6]]
    # Until another state is loaded.
    second.dataset.load_state_dict(MixedShards(mix).state_after(1))
    assert second.dataset.state_after(4)["skip_batches"] == []


def test_one_state_serves_all_ranks_and_the_reader_and_is_small(mix: Path) -> None:
    dataset = MixedShards(mix, rank=3, world_size=4)
    state = dataset.state_after(11)
    assert state == {
        "order_id": ShardReader(mix).manifest.order_id,
        "next_batch": 12,
        "skip_batches": [],
    }
    assert len(json.dumps(state)) < 150
    reader = ShardReader(mix)
    reader.load_state_dict(state)
    assert next(reader.batches())[BATCH][0].as_py() == 12


def test_the_state_of_another_order_is_refused_by_name(mix: Path, steps: Path) -> None:
    other = MixedShards(steps).state_after(3)
    MixedShards(mix).load_state_dict(other)  # the same order, laid out otherwise
    other["order_id"] = "f" * 64
    dataset = MixedShards(mix, columns=["label"])
    with pytest.raises(ReaderError, match=r"from the order f{16}\.\., but this mix has the order"):
        dataset.load_state_dict(other)
    assert numbers(dataset) == list(range(BATCHES))


def test_a_workers_state_goes_on_in_its_turn_alone(mix: Path) -> None:
    batches = stateful(MixedShards(mix, columns=["label"]), 2)
    next(iter(batches))
    snapshot = batches.state_dict()["_snapshot"]["_worker_snapshots"]["worker_1"]
    state = snapshot["dataset_state"]
    with pytest.raises(
        ReaderError,
        match=r"that of one of several DataLoader workers, {'number': 1, 'of': 2, 'step': 1}, and "
        r"does not go on in {'number': 0, 'of': 1, 'step': 1}: a StatefulDataLoader needs as many",
    ):
        MixedShards(mix).load_state_dict(state)


@pytest.mark.slow
def test_workers_refuse_a_state_of_other_steps(steps: Path) -> None:
    def batches(rank: int, world_size: int, **options: Any) -> Any:
        ranks = {"rank": rank, "world_size": world_size}
        return stateful(MixedShards(steps, columns=["label"], **ranks, **options), 2)

    first = batches(0, 2)
    assert numbers(itertools.islice(first, 3)) == [0, 2, 4]
    state = first.state_dict()
    again = batches(1, 2)
    again.load_state_dict(state)
    assert numbers(itertools.islice(again, 3)) == [7, 9, 11]
    for world_size, split in [(1, "batches"), (4, "batches"), (2, "rows")]:
        other = batches(0, world_size, split=split)
        other.load_state_dict(state)
        with pytest.raises(ReaderError, match="needs as many workers as its state has, and with"):
            next(iter(other))


@pytest.mark.slow
def test_workers_refuse_a_state_with_too_many_skips_to_tell_of(mix: Path) -> None:
    first = stateful(MixedShards(mix, columns=["label"]), 2)
    next(iter(first))
    state = first.state_dict()
    skips = [[n, n + 1] for n in range(100, 2200, 2)]
    for worker in state["_snapshot"]["_worker_snapshots"].values():
        worker["dataset_state"]["skip_batches"] = skips
    other = stateful(MixedShards(mix, columns=["label"]), 2)
    other.load_state_dict(state)
    with pytest.raises(ReaderError, match=r"skips 1050 ranges of batches, and at most 1000 can"):
        next(iter(other))


@pytest.mark.slow
def test_workers_refuse_to_skip_more_than_their_state_does(mix: Path) -> None:
    first = stateful(MixedShards(mix, columns=["label"], skip_batches=[(2, 3)]), 2)
    assert numbers(itertools.islice(first, 3)) == [0, 1, 3]
    again = stateful(MixedShards(mix, columns=["label"], skip_batches=[(2, 3)]), 2)
    again.load_state_dict(first.state_dict())
    assert numbers(itertools.islice(again, 2)) == [4, 5]
    more = stateful(MixedShards(mix, columns=["label"], skip_batches=[(4, 9)]), 2)
    more.load_state_dict(first.state_dict())
    with pytest.raises(
        ReaderError,
        match=r"skip_batches asks for more than \[\(2, 3\)\], .* a state of state_after",
    ):
        next(iter(more))


@pytest.mark.slow
def test_persistent_workers_do_not_pass_over_a_state_in_silence(mix: Path) -> None:
    dataset = MixedShards(mix, columns=["label"])
    batches = loader(dataset, 1, persistent_workers=True)
    assert numbers(itertools.islice(batches, 3)) == [0, 1, 2]
    dataset.load_state_dict(dataset.state_after(6))
    with pytest.raises(ReaderError, match="persistent workers keep what they started with: make"):
        next(iter(batches))
    assert next(iter(loader(dataset, 1)))[BATCH] == 7


def test_a_loaded_state_is_kept_as_it_was(mix: Path) -> None:
    dataset = MixedShards(mix, columns=["label"])
    state = dataset.state_after(5)
    dataset.load_state_dict(state)
    state["skip_batches"].append([6, 9])
    assert next(iter(dataset))[BATCH] == 6


@pytest.mark.parametrize("state", [None, [1], "{}", 5, {}, {"next_batch": 1}])
def test_what_is_no_state_is_refused(mix: Path, state: Any) -> None:
    with pytest.raises(ReaderError, match="a reader's state has order_id, next_batch and skip"):
        MixedShards(mix).load_state_dict(state)


def test_an_iterator_left_at_the_end_of_the_process_says_nothing(mix: Path) -> None:
    script = (
        "import sys; from pipeline.torch import MixedShards\n"
        "batches = iter(MixedShards(sys.argv[1], columns=['label'])); next(batches)"
    )
    command = [sys.executable, "-c", script, str(mix)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.slow
def test_workers_that_are_spawned_see_the_state_and_the_next_pass(mix: Path) -> None:
    dataset = MixedShards(mix, columns=["label"])
    dataset.load_state_dict(dataset.state_after(20))
    batches = loader(dataset, 1, multiprocessing_context="spawn")
    assert numbers(batches) == list(range(21, BATCHES))
    assert numbers(batches) == list(range(BATCHES))


def test_a_pickled_dataset_is_the_same(mix: Path) -> None:
    dataset = MixedShards(mix, columns=["text"], rank=1, world_size=2)
    dataset.load_state_dict(dataset.state_after(37))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.state_dict() == dataset.state_dict()
    assert texts(copy) == texts(dataset)


# By number.


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_by_number_are_those_of_the_order(mix: Path, workers: int) -> None:
    batches = MixedBatches(mix, columns=["text"])
    assert len(batches) == BATCHES
    assert texts(loader(batches, workers)) == texts(MixedShards(mix, columns=["text"]))
    order = [7, 39, 0, 8, 8, 1]
    assert numbers(loader(batches, workers, sampler=order)) == order
    assert batches[-1][BATCH] == BATCHES - 1
    assert texts([pickle.loads(pickle.dumps(batches))[5]]) == texts([batches[5]])
    with pytest.raises(IndexError, match="batch 40 is outside the mix of 40 batches"):
        batches[40]
    with pytest.raises(TypeError, match="a batch has an integer as its number, found 'a'"):
        batches["a"]


def test_what_is_done_to_a_batch_does_not_change_the_mix(mix: Path) -> None:
    batches = MixedBatches(mix, columns=["label", "vector"], pad=None)
    before = batches[4]["label"].tolist()
    batches[4]["label"].zero_()
    batches[4]["vector"].zero_()
    assert batches[4]["label"].tolist() == before
    assert batches[4]["vector"].sum() > 0


def test_batches_by_number_are_padded_filled_and_collated(mix: Path) -> None:
    def collate(batch: dict[str, Any]) -> Any:
        return batch["tokens"].values.shape[0], float(batch["score"].min())

    columns = ["tokens", "score"]
    batches = MixedBatches(
        mix, columns=columns, pad={"tokens": 0}, fill={"score": -5}, collate=collate
    )
    assert {batches[n] for n in range(3)} == {(ROWS, -5.0)}


# Errors.


def test_a_null_in_a_column_of_tensors_is_named_with_a_way_out(mix: Path) -> None:
    scores = ShardReader(mix)[0]["score"].to_pylist()
    for rank in range(2):
        dataset = MixedShards(mix, columns=["score"], rank=rank, world_size=2)
        row = next(row for row in range(rank, ROWS, 2) if scores[row] is None)
        with pytest.raises(
            ReaderError,
            match=f"column 'score' of batch 0, row {row} is null or holds one, and a tensor "
            r"cannot: use fill=\{'score': \.\.\} or columns= without it",
        ):
            next(iter(dataset))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["nope"]}, "no column 'nope'; the mix has text, tokens"),
        ({"columns": "label"}, r"columns must be a list of names, such as \['text'\], found"),
        ({"columns": 5}, r"columns must be a list of names, such as \['text'\], found 5"),
        ({"columns": [1], "fill": {}}, "no column 1; the mix has text"),
        ({"uneven": "no"}, "uneven must be True or False, not 'no'"),
        ({"pad": {"label": 0}}, "pad: column 'label' of type int64"),
        ({"fill": {"nope": 0}}, "fill: no column 'nope'; asked for are text, tokens"),
        ({"fill": {"score": 0}, "columns": ["text"]}, "no column 'score'; asked for are text"),
        ({"fill": 0}, r"fill must map names of columns to values, .* found 0"),
        ({"fill": {"label": 0.5}}, "fill: 0.5 is no value for column 'label' of type int64"),
        ({"fill": {"label": None}}, "fill: None is no value for column 'label'"),
        ({"fill": {"tokens": [0]}}, r"fill: \[0\] is no value for column 'tokens' of type list"),
        ({"collate": 3}, "collate must be a function of a batch, found 3"),
        ({"read_ahead": -1}, "read_ahead must be at least 0, not -1"),
        ({"start_batch": 41}, r"batch 41 is outside 0\.\.40: the mix has 40 batches"),
        ({"micro_batches": 5}, "micro_batches 5 does not divide the 24 rows"),
        ({"rank": 0, "world_size": 5}, "world_size 5 does not divide the batch of 24 rows"),
        ({"skip_batches": [(0, 40)]}, "skip_batches leaves none of the mix's 40 batches"),
        (
            {"skip_batches": [(3, 40)], "rank": 0, "world_size": 4, "split": "batches"},
            "3 batches are less than one step of 4, so no rank would be given any",
        ),
        ({"skip_batches": [(38, 41)]}, r"skip_batches \(38, 41\) goes past the end"),
    ],
)
def test_wrong_arguments_are_told_when_the_dataset_is_made(
    mix: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ReaderError, match=message):
        MixedShards(mix, **options)


def test_a_lost_shard_is_named_by_the_worker_that_misses_it(tmp_path: Path) -> None:
    out = _mix(tmp_path, batches_per_shard=7)
    (out / "shards" / "shard-00000003.parquet").unlink()
    found = iter(loader(MixedShards(out, columns=["label"]), 2))
    assert numbers(itertools.islice(found, 21)) == list(range(21))
    with pytest.raises(ShardError, match=r"shard-00000003\.parquet: cannot be .* mends them"):
        next(found)
