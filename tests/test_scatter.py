"""Rows from anywhere to shard files: the bytes of a gather, each source row group decoded once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixcore import RowMap
from pipeline import scatter
from pipeline.catalog import Catalog, DatasetSpec, scan_datasets
from pipeline.cli import main
from pipeline.formats import SourceChangedError, parquet
from pipeline.plan import Plan, plan
from pipeline.scatter import (
    PLACE,
    REQUEST,
    SourceGroups,
    Spill,
    decoded_shard_bytes,
    request_rows,
    serve_group,
    side_by_side,
    write_shards,
)
from pipeline.shard import shard_name
from pipeline.transforms import (
    AssembleShards,
    PublishManifest,
    RequestRows,
    ScatterShards,
    ServeRows,
    SpansOfShards,
    available_memory,
    build,
)
from pipeline.writing import BuildError, ShardWriter

from .mixes import WEIGHTS, config, digests, table, write_dataset, write_sources
from .test_transforms import planned, shards_of

# From rows to groups, and from groups to pieces.


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("sources")
    paths = write_sources(folder, a=[30, 0, 1, 27], b=[9], c=[1])
    held_out = {"a": (20, 55), "b": (0, None), "c": (0, 1)}
    specs = [DatasetSpec(name, (str(paths[name]),), held_out[name]) for name in paths]
    return scan_datasets(specs, str(folder))


TEXTS = {
    (dataset, row): f"{name}:{first + row}:"
    for dataset, (name, first, rows) in enumerate([("a", 20, 35), ("b", 0, 9), ("c", 0, 1)])
    for row in range(rows)
}


def texts(batch: pa.RecordBatch | pa.Table) -> list[str]:
    """The part of each text that tells dataset and row."""
    return [text.rstrip("x") for text in batch["text"].to_pylist()]


def decoded(message: bytes, catalog: Catalog) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(message), catalog.schema)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from(sorted(TEXTS)), min_size=1, max_size=80), st.integers(1, 7))
def test_rows_from_anywhere_come_with_their_places(
    catalog: Catalog, items: list[tuple[int, int]], shards: int
) -> None:
    groups = SourceGroups(catalog)
    ones = np.ones(len(items), np.int64)
    dataset, start = (np.array(column) for column in zip(*items, strict=True))
    row_map = RowMap(0 * ones, dataset.astype(np.int32), start, ones, ones.astype(np.int32))
    requests = np.empty(len(items), REQUEST)
    requests["group"], requests["row"] = groups.locate(row_map)
    requests["place"]["shard"] = np.arange(len(items)) % shards
    requests["place"]["row"] = np.arange(len(items)) // shards
    found: dict[tuple[int, int], str] = {}
    for group in np.unique(requests["group"]).tolist():
        asked = requests[requests["group"] == group]
        for who, (places, message) in serve_group(groups, group, [("all", asked)]):
            assert who == "all"
            arrived = np.frombuffer(places, PLACE).tolist()
            found.update(zip(arrived, texts(decoded(message, catalog)), strict=True))
    assert found == {(j % shards, j // shards): TEXTS[item] for j, item in enumerate(items)}


def test_runs_of_rows_are_located_across_groups_files_and_empty_files(catalog: Catalog) -> None:
    groups = SourceGroups(catalog)
    assert len(groups) == 2 + 1 + 1 + 2 + 1 + 1  # the empty file has an empty one
    row_map = RowMap(
        np.zeros(3, np.int64),
        np.array([1, 0, 1], np.int32),
        np.array([2, 0, 0]),
        np.array([3, 35, 9]),
        np.zeros(3, np.int32),
    )
    group, row = groups.locate(row_map)
    found = [
        texts(batch)[0]
        for g, r in zip(group.tolist(), row.tolist(), strict=True)
        for batch in groups.read(g, r, r + 1)
    ]
    items = [*((1, 2 + i) for i in range(3)), *((0, i) for i in range(35))]
    assert found == [TEXTS[item] for item in [*items, *((1, i) for i in range(9))]]


def ask(rows: list[int]) -> np.ndarray[Any, Any]:
    requests = np.zeros(len(rows), REQUEST)
    requests["row"] = rows
    requests["place"]["row"] = np.arange(len(rows))
    return requests


def test_pieces_are_bounded_where_rows_differ_in_size(tmp_path: Path) -> None:
    sizes = [10, 20 << 20, *[1 << 20] * 30, 5]
    pq.write_table(pa.table({"text": ["x" * size for size in sizes]}), tmp_path / "a.parquet")
    catalog = scan_datasets([DatasetSpec("a", ("a.parquet",))], str(tmp_path))
    asked = ask([*range(len(sizes)), *range(len(sizes))])
    pieces = [piece for _, piece in serve_group(SourceGroups(catalog), 0, [(0, asked)])]
    for places, message in pieces:
        assert len(message) < (8 << 20) + 1024 or len(places) == PLACE.itemsize
    arrived = [text for _, message in pieces for text in decoded(message, catalog)["text"]]
    assert [len(text.as_py()) for text in arrived] == sizes * 2


def test_a_row_group_too_large_for_one_array_is_served_in_parts(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, rows = SourceGroups(catalog), [8, 0, 3, 3, 7]
    whole = list(serve_group(groups, 6, [("x", ask(rows)), ("y", ask([1]))]))
    monkeypatch.setattr(scatter, "_PART_BYTES", 1)
    monkeypatch.setattr(scatter, "read_file", in_single_rows)
    parts = list(serve_group(groups, 6, [("x", ask(rows)), ("y", ask([1]))]))
    assert (len(whole), len(parts)) == (2, 5)

    def by_place(pieces: list[Any]) -> dict[Any, str]:
        return {
            (who, place): text
            for who, (places, message) in pieces
            for place, text in zip(
                np.frombuffer(places, PLACE)["row"].tolist(),
                texts(decoded(message, catalog)),
                strict=True,
            )
        }

    expected = {("x", place): f"b:{row}:" for place, row in enumerate(rows)}
    assert by_place(whole) == by_place(parts) == {**expected, ("y", 0): "b:1:"}


def in_single_rows(*arguments: Any) -> Iterator[pa.RecordBatch]:
    from pipeline.registry import read_file

    for batch in read_file(*arguments):
        yield from (batch.slice(row, 1) for row in range(batch.num_rows))


def test_a_source_changed_since_it_was_planned_names_dataset_and_file(tmp_path: Path) -> None:
    write_dataset(tmp_path, "web", [20, 20])
    catalog = scan_datasets([DatasetSpec("web", ("web",))], str(tmp_path))
    pq.write_table(table("other", 20), tmp_path / "web" / "part-001.parquet", row_group_size=17)
    groups = SourceGroups(catalog)
    assert len(list(serve_group(groups, 1, [(0, ask([0]))]))) == 1
    with pytest.raises(
        SourceChangedError, match=r"dataset 'web': .*part-001\.parquet: has changed since"
    ):
        list(serve_group(groups, 2, [(0, ask([0]))]))


def test_side_by_side_keeps_the_order_and_runs_little_ahead_of_its_reader() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (5 - item % 5))
        return item

    for threads in (1, 3):
        begun.clear()
        found = []
        for result in side_by_side(work, iter(range(20)), threads):
            found.append(result)
            assert len(begun) <= len(found) + threads
        assert found == list(range(20))


# From pieces to shards.


@pytest.fixture
def saved(tmp_path: Path) -> Plan:
    write_sources(tmp_path / "data", web=[40, 0, 60], code=[50, 23], books=[11])
    return planned(tmp_path, "out").save()


def pieces_of(writer: ShardWriter, shards: range) -> list[scatter.Piece]:
    groups = SourceGroups(writer.plan.catalog)
    requests = request_rows(writer, groups, [writer.footer(shard) for shard in shards])
    return [
        piece
        for group, part in scatter.cut(requests, requests["group"])
        for _, piece in serve_group(groups, group, [(None, part)])
    ]


def test_pieces_may_come_in_any_order(saved: Plan, tmp_path: Path) -> None:
    writer = ShardWriter(saved)
    pieces = pieces_of(writer, range(13))
    random.Random(5).shuffle(pieces)
    write_shards(writer, [writer.footer(shard) for shard in range(13)], pieces, {}, threads=3)
    build(planned(tmp_path, "gathered"), write_path="gather")
    assert digests(tmp_path / "out/shards") == digests(tmp_path / "gathered/shards")


def test_shards_that_are_put_in_order_in_many_blocks_are_the_same(
    saved: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "_BLOCK_BYTES", 200)
    writer = ShardWriter(saved)
    footers = [writer.footer(shard) for shard in range(13)]
    write_shards(writer, footers, pieces_of(writer, range(13)), {})
    build(planned(tmp_path, "gathered"), write_path="gather")
    assert digests(tmp_path / "out/shards") == digests(tmp_path / "gathered/shards")


def test_lost_and_doubled_pieces_are_told_and_nothing_is_written(saved: Plan) -> None:
    writer = ShardWriter(saved)
    first, second, *rest = pieces_of(writer, range(2, 3))
    lost = np.frombuffer(first[0], PLACE)["row"]
    double = np.frombuffer(second[0], PLACE)["row"]
    with pytest.raises(BuildError) as caught:
        write_shards(writer, [writer.footer(2)], [second, second, *rest], {})
    assert str(caught.value) == (
        f"shards/shard-00000002.parquet: the runner brought {32 - len(lost) + len(double)} rows "
        f"of 32 planned: {len(lost)} lacking, first row {', '.join(map(str, lost[:3]))}; "
        f"{len(double)} double, first row {', '.join(map(str, double[:3]))}; "
        "build again, and the shards that stand are kept"
    )
    assert not (Path(saved.folder.root) / "shards").exists()
    with pytest.raises(BuildError, match=r"brought 0 rows of 32 planned: 32 lacking, .* 0, 1, 2;"):
        write_shards(writer, [writer.footer(2)], [], {})


def test_rows_beyond_a_shards_end_are_told(saved: Plan) -> None:
    writer = ShardWriter(saved)
    pieces = pieces_of(writer, range(2, 3))
    places = np.frombuffer(pieces[0][0], PLACE).copy()
    places["row"][0] = 40
    with pytest.raises(BuildError, match=r"32 rows of 32 planned: 1 lacking.*; 1 beyond.* row 40;"):
        write_shards(
            writer, [writer.footer(2)], [(places.tobytes(), pieces[0][1]), *pieces[1:]], {}
        )


# The whole way: the bytes of a gather.


def memory_for(shards: int, mix: Plan) -> int:
    """What a build holds in memory of so many shards: six times what tells where rows belong."""
    rows = int(mix.manifest.document["num_rows"]) * mix.layout.batches_per_shard
    return shards * 6 * (REQUEST.itemsize + PLACE.itemsize) * (rows // mix.layout.num_batches)


UNEVEN = {"web": [40, 0, 60, 1], "code": [50, 1, 1, 23], "books": [11]}
MIXES: dict[str, dict[str, Any]] = {
    "held-out rows": {"rows": {"web": [7, 95], "books": [3, 4]}, "on_exhausted": "repeat"},
    "epochs inside a batch": {"batch_size": 90, "num_batches": 9, "on_exhausted": "repeat"},
    "stop": {"num_batches": None, "on_exhausted": "stop"},
    "steps": {"batches_per_step": 2, "num_batches": 48, "on_exhausted": "repeat"},
    "row groups of one batch": {"batches_per_row_group": 1, "on_exhausted": "repeat"},
    "one shard": {"batches_per_shard": 99, "on_exhausted": "repeat"},
}


@pytest.mark.parametrize(
    ("name", "row_group_size"),
    [*((name, 17) for name in MIXES), ("held-out rows", 1), ("epochs inside a batch", 1000)],
)
def test_a_scatter_gives_the_bytes_of_a_gather(
    tmp_path: Path, name: str, row_group_size: int
) -> None:
    for dataset, files in UNEVEN.items():
        write_dataset(tmp_path / "data", dataset, files, row_group_size)
    rows = MIXES[name].get("rows", {})
    keys = {"num_batches": 50, **{k: v for k, v in MIXES[name].items() if k != "rows"}}

    def built(output: str, waves: bool = False, **how: Any) -> dict[str, str]:
        written = config(tmp_path, WEIGHTS, output=str(tmp_path / output), **keys)
        for dataset, taken in rows.items():
            written["datasets"][dataset]["rows"] = taken
        mix = plan(written)
        if waves:
            how["memory_limit"] = memory_for(5, mix)
        build(mix, **how)
        assert list((tmp_path / output / "_mix" / "tmp").iterdir()) == []
        return shards_of(digests(tmp_path / output))

    gathered = built("gathered", write_path="gather")
    assert built("scattered", write_path="scatter", threads=1) == gathered
    assert built("waves", write_path="scatter", threads=3, waves=True) == gathered


@pytest.mark.parametrize(
    "mixture",
    [
        {"mixture": "frame_budget", "frame_budget": 90, "pool_size": 31, "length_of": "text"},
        {"mixture": "reservoir", "max_simultaneous": 2, "batch_size": 8, "passes": 2, "seed": 7},
    ],
    ids=lambda mixture: mixture["mixture"],
)
def test_shuffled_mixes_have_one_set_of_bytes_too(tmp_path: Path, mixture: dict[str, Any]) -> None:
    for dataset, files in UNEVEN.items():
        write_dataset(tmp_path / "data", dataset, files)
    found = []
    for how in ({"write_path": "gather"}, {"write_path": "scatter", "threads": 2}):
        written = config(tmp_path, WEIGHTS, output=str(tmp_path / how["write_path"]), **mixture)
        if "frame_budget" in mixture:
            del written["batch_size"]
        for dataset in written["datasets"].values():
            del dataset["weight"]
        build(plan(written), **how)
        found.append(shards_of(digests(tmp_path / how["write_path"])))
    assert len(found[0]) > 5
    assert found[0] == found[1]


def test_all_kinds_of_columns_come_through(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for dataset in ("web", "code"):
        (tmp_path / "data" / dataset).mkdir(parents=True)
        for number in range(2):
            rows = 200
            values = rng.integers(0, 9, rows).tolist()
            columns = {
                "nulls": pa.array([v if v % 3 else None for v in values]),
                "void": pa.nulls(rows),
                "names": pa.array([f"n{v}" for v in values]).dictionary_encode(),
                "nested": pa.array([[{"a": v, "b": None}] * v if v else None for v in values]),
                "large": pa.array([b"y" * v for v in values], pa.large_binary()),
                "fixed": pa.array([[v, v] for v in values], pa.list_(pa.float32(), 2)),
                "flags": pa.array([v > 4 for v in values]),
            }
            path = tmp_path / "data" / dataset / f"{number}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=30)
    weights, keys = {"web": 2, "code": 1}, {"num_batches": 60, "on_exhausted": "repeat"}
    for path in ("gather", "scatter"):
        output = str(tmp_path / path)
        build(plan(config(tmp_path, weights, output=output, **keys)), write_path=path)
    assert digests(tmp_path / "gather/shards") == digests(tmp_path / "scatter/shards")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("waves", [1, 4])
def test_row_groups_are_decoded_once_a_wave(
    threads: int, waves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []
    read_from = parquet.read_from

    def counted(filesystem: Any, path: str, digest: str, row: int, *rest: Any) -> Any:
        opened.append((path, row // 17))
        return read_from(filesystem, path, digest, row, *rest)

    monkeypatch.setattr(parquet, "read_from", counted)
    write_sources(tmp_path / "data", web=[40, 60], code=[70])
    # Every shard takes rows of every group.
    keys = {"batch_size": 510, "num_batches": 8, "batches_per_shard": 2, "on_exhausted": "repeat"}
    mix = plan(config(tmp_path, {"web": 2, "code": 1}, **keys))
    limit = memory_for(4 // waves, mix)
    build(mix, write_path="scatter", threads=threads, memory_limit=limit)
    assert len(set(opened)) == 3 + 4 + 5
    assert sorted(opened) == sorted(list(set(opened)) * waves)


def test_shards_that_stand_are_neither_asked_for_nor_written_again(
    tmp_path: Path, saved: Plan
) -> None:
    build(planned(tmp_path, "out"), write_path="scatter")
    whole = digests(tmp_path / "out")
    (tmp_path / "out" / shard_name(5)).write_bytes(b"torn")
    (tmp_path / "out" / shard_name(11)).unlink()
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/shards").iterdir()}
    build(planned(tmp_path, "out"), write_path="scatter", memory_limit=1)
    assert digests(tmp_path / "out") == whole
    changed = [path.name for path in stamps if path.stat().st_mtime_ns != stamps[path]]
    assert changed == ["shard-00000005.parquet"]
    # Nothing is left to decode, so sources that are gone are not missed.
    build_of_all = planned(tmp_path, "out")
    for path in (tmp_path / "data").rglob("*.parquet"):
        path.unlink()
    build(build_of_all, write_path="scatter")
    assert digests(tmp_path / "out") == whole


def test_steps_compose_and_tell_what_a_runner_lost(sources: Path) -> None:
    path = str(sources / "composed")
    saved = planned(sources, "composed").save()
    shards = saved.layout.num_shards
    with pytest.raises(Exception, match=r"0002\.parquet: .* \d+ lacking, first row 0"):  # noqa: PT012, SIM117
        with beam.Pipeline("FnApiRunner") as pipeline:
            pieces = (
                pipeline
                | SpansOfShards(shards, span_shards=5, run_shards=2)
                | RequestRows(path, task_groups=2)
                | "ByTask" >> beam.GroupByKey()
                | ServeRows(path)
                | beam.Filter(
                    lambda served: (2, 0) not in np.frombuffer(served[1][1][0], PLACE).tolist()
                )
            )
            pieces | "ByRun" >> beam.GroupByKey() | AssembleShards(path) | PublishManifest(path)
    assert not (sources / "composed" / "manifest.json").exists()
    with beam.Pipeline("FnApiRunner") as pipeline:
        records = pipeline | SpansOfShards(shards, 5, 2) | ScatterShards(path, 2, threads=2)
        records | PublishManifest(path)
    build(planned(sources, "gathered"), write_path="gather")
    assert shards_of(digests(sources / "composed")) == shards_of(digests(sources / "gathered"))


def test_shards_too_large_to_put_in_order_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "data" / "web" / "a.parquet"
    path.parent.mkdir(parents=True)
    incompressible = np.random.default_rng(1).integers(0, 256, (64, 1 << 16), np.uint8)
    pq.write_table(pa.table({"x": [row.tobytes() for row in incompressible]}), path)
    keys = {"num_batches": 4096, "batch_size": 4, "on_exhausted": "repeat"}
    large = plan(config(tmp_path, {"web": 1}, batches_per_shard=1100, **keys))
    message = (
        r"a shard would take about 1,1\d\d MiB decoded, .*at most 1,024 MiB.*; set "
        r"batches_per_shard to at most (10\d\d), or shard_bytes to at most 128MiB"
    )
    with pytest.raises(BuildError, match=message) as caught:
        build(large, write_path="scatter")
    assert not (tmp_path / "out").exists()
    fitting = int(str(caught.value).split("at most ")[2].split(",")[0])
    for shard, refused in ((fitting, False), (fitting + 1, True)):
        again = plan(config(tmp_path, {"web": 1}, batches_per_shard=shard, **keys))
        with pytest.raises(BuildError) if refused else contextlib.nullcontext():
            decoded_shard_bytes(again)
    keys["batch_size"] = 1 << 13
    huge = plan(config(tmp_path, {"web": 1}, batches_per_shard=1, **keys))
    with pytest.raises(BuildError, match="set a smaller batch size: one batch alone takes more"):
        build(huge, write_path="scatter")


def test_a_build_that_fails_leaves_no_rows_on_their_way_behind(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400, 300], code=[300], books=[110])
    mix = planned(tmp_path, "out", num_batches=120)
    path = tmp_path / "data" / "web" / "part-001.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BuildError, match=r"^dataset 'web': .*part-001\.parquet: .*truncated"):
        build(mix, write_path="scatter")
    assert list((tmp_path / "out" / "_mix" / "tmp").iterdir()) == []
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_full_disk_is_told_with_the_way_out(tmp_path: Path, size: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(  # noqa: PT012 (small messages are written when the file is closed)
            BuildError, match=r"\.part: rows cannot be kept there on their way: .*free some space"
        ):
            spill = Spill(str(tmp_path))
            spill.put(pa.py_buffer(bytes(size)))
            spill.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < available_memory() <= whole


# From the command line.


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_takes_path_and_memory_and_counts_what_it_kept(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[40, 60], code=[50, 23], books=[11])
    written = tmp_path / "mix.yaml"
    written.write_text(json.dumps(config(tmp_path, WEIGHTS, num_batches=24, on_exhausted="repeat")))
    limits = ("--memory-limit", "60kB", "--threads=2", "--run-shards=1")
    done = command("build", written, "--write-path", "scatter", *limits)
    assert done.exit_code == 0, done.output
    assert re.search(r"^built .*/out: 6 shards, 192 rows, ", done.stdout, re.MULTILINE)
    before = digests(tmp_path / "out")
    (tmp_path / "out" / shard_name(2)).unlink()
    done = command("build", written, "--write-path=scatter", "--memory-limit=1")
    assert "6 shards (5 stood whole and were kept)" in done.stdout
    assert digests(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--memory-limit=much", "expected a whole number of bytes, at least 1, or a size such as"),
        ("--memory-limit=0", "expected a whole number of bytes, at least 1"),
        ("--write-path=strew", "'strew' is not one of 'gather', 'scatter'"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, option: str, message: str) -> None:
    done = command("build", tmp_path / "mix.yaml", option)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


# Kills.


def scatter_from(path: Path) -> None:
    mix = plan(json.loads(path.read_text()))
    build(mix, write_path="scatter", threads=2, memory_limit=memory_for(8, mix))


@pytest.mark.slow
def test_killed_in_the_middle_a_second_build_gives_the_bytes_of_a_gather(tmp_path: Path) -> None:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.test_scatter"])
    write_sources(tmp_path / "data", web=[4000, 6000], code=[7300], books=[1100])
    keys = {"num_batches": 160, "on_exhausted": "repeat", "batch_size": 96}

    def mix(output: str) -> dict[str, Any]:
        return config(tmp_path, WEIGHTS, output=str(tmp_path / output), **keys)

    build(plan(mix("gathered")), write_path="gather")
    expected = shards_of(digests(tmp_path / "gathered"))
    killed_amid_shards = 0
    for kill in range(4):
        out = tmp_path / f"killed-{kill}"
        written = tmp_path / f"{out.name}.json"
        written.write_text(json.dumps(mix(out.name)))
        child = server.Process(target=scatter_from, args=(written,))
        child.start()
        assert child.pid is not None
        # At once after a number of shards, so that it is in the middle however slow the machine.
        while child.is_alive() and not (out / shard_name(9 * kill + 2)).exists():
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):  # it may have ended before
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        if child.exitcode == -signal.SIGKILL:
            assert not (out / "manifest.json").exists()
            killed_amid_shards += 1
        again = server.Process(target=scatter_from, args=(written,))
        again.start()
        again.join()
        assert shards_of(digests(out)) == expected
        assert list((out / "_mix" / "tmp").iterdir()) == []
    assert killed_amid_shards >= 2
