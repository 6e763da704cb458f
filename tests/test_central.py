"""Offline equals online: shards hold what the online class emits, resumed at every boundary."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mixcore import BatchStream, DataBatcher, FrameBudgetSampler
from mixcore.streaming import StreamingDatasetNoIndex
from pipeline.manifest import Manifest
from pipeline.plan import Plan, plan
from pipeline.reader import ShardReader
from pipeline.registry import Registry, children
from pipeline.shard import PROVENANCE
from pipeline.storage import Folder
from pipeline.transforms import build
from pipeline.verify import origins, verify

from .mixes import config, write_sources


@dataclass(frozen=True)
class Case:
    """Rows of the files of each dataset, weights, and further keys of the config."""

    files: dict[str, list[int]]
    weights: dict[str, Any]
    keys: dict[str, Any]


CASES = {
    "the worked example": Case(
        {"a": [60], "b": [40], "c": [20]},
        {"a": 3, "b": 2, "c": 1},
        {"batch_size": 4, "num_batches": 25},
    ),
    "two leftover slots for one dataset": Case(
        {"big": [30, 1, 0, 60], "x": [15], "y": [14]},
        {"big": 5, "x": 1, "y": 1},
        {"batch_size": 4, "num_batches": 23},
    ),
    "decimal weights, ends with the first exhausted": Case(
        {"a": [50, 50], "b": [31], "c": [77]},
        {"a": 0.45, "b": 0.25, "c": 0.3},
        {"batch_size": 7, "on_exhausted": "stop"},
    ),
    "a batch spans several epochs of a tiny dataset": Case(
        {"one": [1], "three": [2, 1], "many": [120]},
        {"one": 5, "three": 4, "many": 9},
        {"batch_size": 17, "on_exhausted": "repeat", "num_batches": 19},
    ),
    "until each was seen once": Case(
        {"a": [64], "b": [5], "c": [33]},
        {"a": 1, "b": 1, "c": 1},
        {"batch_size": 5, "on_exhausted": "repeat", "batches_per_shard": 3},
    ),
    "weights past 64 bits": Case(
        {"a": [90], "b": [60], "c": [30]},
        {"a": 3 * 10**30 + 1, "b": 2 * 10**30, "c": 10**30 + 7},
        {"batch_size": 6, "num_batches": 26},
    ),
    "held-out rows and one batch a shard": Case(
        {"a": [50], "b": [10, 40]},
        {"a": 2, "b": 1},
        {"batch_size": 3, "num_batches": 14, "batches_per_shard": 1, "held_out": 9},
    ),
    "one dataset, steps of two": Case(
        {"only": [41]},
        {"only": 7},
        {"batch_size": 4, "on_exhausted": "stop", "batches_per_step": 2},
    ),
    "forty datasets, most give nothing to a batch": Case(
        {f"d{i:02d}": [3 + i] for i in range(40)},
        {f"d{i:02d}": 1 + i * i for i in range(40)},
        {"batch_size": 9, "on_exhausted": "repeat", "num_batches": 50, "batches_per_row_group": 2},
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def mix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Path]:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("mix")
    write_sources(folder / "data", **case.files)
    keys = dict(case.keys)
    held_out = keys.pop("held_out", 0)
    settings = config(folder, case.weights, **keys)
    if held_out:
        for dataset in settings["datasets"].values():
            dataset["rows"] = [held_out, None]
    planned = plan(settings)
    build(planned)
    return planned, folder / "out"


def batcher(planned: Plan) -> DataBatcher:
    mixture = planned.manifest.document["mixture"]
    return DataBatcher(
        Registry(planned.catalog, repeat=mixture["repeat"]),
        {entry["name"]: int(entry["weight"]) for entry in planned.manifest.document["datasets"]},
        mixture["batch_size"],
    )


def payload(table: pa.Table) -> list[dict[str, Any]]:
    return table.drop_columns(PROVENANCE.names).to_pylist()


def test_shards_hold_batch_for_batch_what_the_online_batcher_emits(mix: tuple[Plan, Path]) -> None:
    planned, out = mix
    online, reader = batcher(planned), ShardReader(str(out))
    assert len(reader) > 5
    for n, table in enumerate(reader.batches()):
        assert payload(table) == online.next_batch(), f"batch {n}"
    assert n + 1 == len(reader)


def test_online_batcher_goes_on_from_every_boundary_where_the_shard_starts(
    mix: tuple[Plan, Path],
) -> None:
    planned, out = mix
    reader = ShardReader(str(out))
    folder = Folder.at(str(out))
    states = Manifest.load(folder).states(folder)
    assert len(states) == reader.num_shards + 1
    for shard in range(reader.num_shards):
        online = batcher(planned)
        online.load_state_dict(states[shard])
        for table in reader.batches(start_shard=shard):
            assert payload(table) == online.next_batch()
        assert online.state_dict() == states[reader.num_shards]


def test_every_kind_of_column_comes_through(tmp_path: Path) -> None:
    rows = 40
    nested = pa.list_(pa.dictionary(pa.int8(), pa.string()))
    data = pa.table(
        {
            "map": pa.array([[("k", i)] for i in range(rows)], pa.map_(pa.string(), pa.int16())),
            "words": pa.array([["a", "b" * (i % 3)] for i in range(rows)], nested),
            "label": pa.array([f"l{i % 3}" for i in range(rows)]).dictionary_encode(),
            "struct": [{"x": i, "y": [None, i]} for i in range(rows)],
            "box": pa.array([[i, i + 1] for i in range(rows)], pa.list_(pa.float32(), 2)),
            "price": pa.array([Decimal(i) / 4 for i in range(rows)], pa.decimal128(9, 2)),
            "when": pa.array(range(rows), pa.timestamp("us", "UTC")),
            "blob": [bytes([i]) * i for i in range(rows)],
            "nothing": pa.nulls(rows),
            "maybe": [i if i % 2 else None for i in range(rows)],
        }
    )
    (tmp_path / "data" / "a").mkdir(parents=True)
    pq.write_table(data, tmp_path / "data" / "a" / "x.parquet", row_group_size=7)
    planned = plan(config(tmp_path, {"a": 1}, num_batches=8, on_exhausted="repeat", batch_size=9))
    build(planned)
    assert verify(str(tmp_path / "out"), sources=True) == []
    expected = data.to_pylist()
    for n, table in enumerate(ShardReader(str(tmp_path / "out")).batches()):
        assert payload(table) == [expected[(9 * n + i) % rows] for i in range(9)]


def test_provenance_tells_where_each_row_lies_in_its_source(mix: tuple[Plan, Path]) -> None:
    planned, out = mix
    rows = {
        dataset.name: list(Registry(planned.catalog).get_iterator(dataset.name))
        for dataset in planned.catalog.datasets
    }
    seen = dict.fromkeys(rows, 0)
    for n, table in enumerate(ShardReader(str(out)).batches()):
        for row in table.to_pylist():
            name = row["mix_dataset"]
            epoch, position = divmod(seen[name], len(rows[name]))
            assert (row["mix_batch"], row["mix_epoch"], row["mix_row"]) == (n, epoch, position)
            assert {"text": row["text"], "tokens": row["tokens"]} == rows[name][position]
            seen[name] += 1


# Frame budgets and reservoirs.

FRAME_BUDGETS = {
    "lengths in a column": {"length_column": "frames", "frame_budget": 60, "pool_size": 40},
    "lengths of lists, two epochs": {
        "length_of": "tokens", "frame_budget": 40, "pool_size": 16, "epochs": 2, "max_items": 5,
    },
    "lengths of texts, ends within an epoch": {
        "length_of": "text", "frame_budget": 90, "pool_size": 1000, "num_batches": 37,
    },
    "one item a batch": {
        "length_column": "frames", "frame_budget": 60, "pool_size": 9, "max_items": 1, "seed": 4,
    },
    "items past the budget left out": {
        "length_column": "frames", "frame_budget": 9, "pool_size": 30, "on_too_long": "drop",
        "epochs": 2,
    },
}  # fmt: skip


def write_frames(folder: Path, **files: list[int]) -> None:
    """Datasets with a column of lengths beside lists and texts that are never empty."""
    for name, counts in files.items():
        (folder / name).mkdir(parents=True)
        for number, rows in enumerate(counts):
            frames = np.random.default_rng([number, rows]).integers(1, 14, rows)
            data = pa.table(
                {
                    "text": [f"{name}:{number}:{i}:" + "é" * int(n) for i, n in enumerate(frames)],
                    "tokens": [[i] * int(n) for i, n in enumerate(frames)],
                    "frames": pa.array(frames, pa.int16()),
                }
            )
            pq.write_table(data, folder / name / f"{number}.parquet", row_group_size=7)


@pytest.fixture(scope="module", params=FRAME_BUDGETS, ids=str)
def budgeted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Path]:
    folder = tmp_path_factory.mktemp("budgeted")
    write_frames(folder / "data", a=[31, 0, 12], b=[1], c=[25, 8])
    keys = {"mixture": "frame_budget", "batches_per_shard": 2}
    settings = config(folder, {"a": 1, "b": 1, "c": 1}, **keys)
    del settings["batch_size"]
    for dataset in settings["datasets"].values():
        del dataset["weight"]
    settings["datasets"]["a"]["rows"] = [5, None]
    planned = plan({**settings, **FRAME_BUDGETS[request.param]})
    build(planned)
    return planned, folder / "out"


def sampler_and_items(planned: Plan) -> tuple[FrameBudgetSampler, list[dict[str, Any]]]:
    """The online sampler over items that are read and measured here, one by one."""
    settings = planned.manifest.document["mixture"]
    registry = Registry(planned.catalog)
    items = [item for name in planned.mixture.names for item in registry.get_iterator(name)]
    (how, column), *_ = settings["lengths"].items()
    measure = {"column": lambda value: value, "of": len}[how]
    items = [item for item in items if measure(item[column]) <= settings["frame_budget"]]
    parameters = ("frame_budget", "pool_size", "max_items", "seed", "stream")
    sampler = FrameBudgetSampler(
        [measure(item[column]) for item in items], **{key: settings[key] for key in parameters}
    )
    return sampler, items


def test_shards_hold_what_the_online_sampler_gives_from_every_boundary(
    budgeted: tuple[Plan, Path],
) -> None:
    planned, out = budgeted
    sampler, items = sampler_and_items(planned)
    reader = ShardReader(str(out))
    folder = Folder.at(str(out))
    states = Manifest.load(folder).states(folder)
    assert reader.num_shards > 5
    for shard in range(reader.num_shards):
        online = BatchStream(sampler)
        online.load_state_dict(states[shard])
        for table in reader.batches(start_shard=shard):
            assert payload(table) == [items[i] for i in online.next_batch()]
        online_end = online.state_dict()
        assert {key: online_end[key] for key in states[reader.num_shards]} == states[
            reader.num_shards
        ]


RESERVOIRS: dict[str, dict[str, Any]] = {
    "two passes, a shorter last batch": {"max_simultaneous": 3, "passes": 2},
    "endless": {"max_simultaneous": 4, "num_batches": 60, "seed": 2**62},
    "one at a time": {"max_simultaneous": 1, "num_batches": 25},
    "more places than files": {"max_simultaneous": 100, "passes": 3},
}


@pytest.fixture(scope="module", params=RESERVOIRS, ids=str)
def reservoir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Path]:
    folder = tmp_path_factory.mktemp("reservoir")
    write_sources(folder / "data", a=[9, 0, 14, 1], b=[1], c=[20, 3, 11])
    keys = {"mixture": "reservoir", "batch_size": 5, "batches_per_shard": 3}
    settings = config(folder, {"a": 1, "b": 1, "c": 1}, **keys)
    for dataset in settings["datasets"].values():
        del dataset["weight"]
    settings["datasets"]["c"]["rows"] = [4, None]
    planned = plan({**settings, **RESERVOIRS[request.param]})
    build(planned)
    return planned, folder / "out"


def test_shards_hold_what_the_online_stream_gives_from_every_boundary(
    reservoir: tuple[Plan, Path],
) -> None:
    planned, out = reservoir
    settings = planned.manifest.document["mixture"]
    reader = ShardReader(str(out))
    folder = Folder.at(str(out))
    states = Manifest.load(folder).states(folder)
    assert reader.num_shards > 5
    for shard in range(reader.num_shards):
        online = StreamingDatasetNoIndex(
            children(planned.catalog),
            settings["max_simultaneous"],
            seed=int(settings["seed"]),
            passes=settings["passes"],
        )
        online.load_state_dict(states[shard])
        samples = iter(online)
        for table in reader.batches(start_shard=shard):
            assert payload(table) == list(islice(samples, 5))
        assert online.state_dict() == states[reader.num_shards]
    assert settings["passes"] is None or list(samples) == []


def test_frame_budgets_are_whole_and_tell_where_their_rows_lie(budgeted: tuple[Plan, Path]) -> None:
    check_whole(*budgeted)


def test_reservoirs_are_whole_and_tell_where_their_rows_lie(reservoir: tuple[Plan, Path]) -> None:
    check_whole(*reservoir)


def check_whole(planned: Plan, out: Path) -> None:
    """Hold a mix against its sources, row for row by its provenance."""
    assert verify(str(out), sources=True) == []
    rows = {
        dataset.name: list(Registry(planned.catalog).get_iterator(dataset.name))
        for dataset in planned.catalog.datasets
    }
    folder = Folder.at(str(out))
    manifest = Manifest.load(folder)
    for n, table in enumerate(ShardReader(str(out)).batches()):
        found = table.to_pylist()
        for row in found:
            place = {name: row.pop(name) for name in PROVENANCE.names}
            assert place["mix_batch"] == n
            assert row == rows[place["mix_dataset"]][place["mix_row"]]
        assert sum(piece.count for piece in origins(folder, manifest, n, 1)) == len(found)
