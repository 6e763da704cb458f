"""The Beam pipeline: one mix has one set of bytes, however it is built."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.parquet as pq
import pytest

from pipeline.gather import RunWriter
from pipeline.manifest import Manifest, ManifestError
from pipeline.plan import Plan, plan
from pipeline.shard import shard_name
from pipeline.storage import Folder
from pipeline.transforms import (
    BuildMix,
    PublishManifest,
    SpansOfShards,
    WriteShards,
    build,
    runs_of,
)
from pipeline.writing import BuildError

from .mixes import WEIGHTS, config, digests, small_mix, table, write_sources


@pytest.fixture(scope="module")
def undisturbed(sources: Path) -> dict[str, str]:
    build(planned(sources, "undisturbed"))
    return digests(sources / "undisturbed")


def planned(sources: Path, output: str, **keys: object) -> Plan:
    settings = {"num_batches": 50, "on_exhausted": "repeat", "output": str(sources / output)}
    return plan(config(sources, WEIGHTS, **{**settings, **keys}))


def shards_of(found: dict[str, str]) -> dict[str, str]:
    """All but what holds the names of folders: plan, manifest and the table of source paths."""
    return {
        name: digest
        for name, digest in found.items()
        if not name.endswith(".json") and "sources-" not in name
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("one thread", {"threads": 1}),
        ("many threads", {"threads": 7}),
        ("runs of one shard", {"run_shards": 1}),
        ("runs of two shards", {"run_shards": 2, "threads": 2}),
        ("one run of all shards", {"run_shards": 1000}),
        ("scattered", {"write_path": "scatter"}),
        ("scattered in waves", {"write_path": "scatter", "memory_limit": 1, "threads": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_digests_are_the_same_however_the_work_is_cut(
    sources: Path,
    undisturbed: dict[str, str],
    name: str,
    settings: dict[str, Any],
) -> None:
    output = name.replace(" ", "-")
    build(planned(sources, output), **settings)
    assert shards_of(digests(sources / output)) == shards_of(undisturbed)
    assert list((sources / output / "_mix" / "tmp").iterdir()) == []


def test_the_order_in_which_files_came_to_the_disk_changes_nothing(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    (tmp_path / "data" / "web").mkdir(parents=True)
    for part, rows, first in ((2, 60, 40), (1, 0, 40), (0, 40, 0)):
        path = tmp_path / "data" / "web" / f"part-{part:03d}.parquet"
        pq.write_table(table("web", rows, first), path, row_group_size=17)
    write_sources(tmp_path / "data", books=[11], code=[50, 23])
    build(planned(tmp_path, "out"))
    assert shards_of(digests(tmp_path / "out")) == shards_of(undisturbed)


def test_a_second_build_writes_nothing_anew(sources: Path, undisturbed: dict[str, str]) -> None:
    build(planned(sources, "twice"))
    before = {path: path.stat().st_mtime_ns for path in (sources / "twice").rglob("*.*")}
    build(planned(sources, "twice"))
    assert {path: path.stat().st_mtime_ns for path in (sources / "twice").rglob("*.*")} == before


def test_a_rebuild_mends_damaged_and_missing_shards_and_tables(
    sources: Path, undisturbed: dict[str, str]
) -> None:
    build(planned(sources, "mended"))
    out = sources / "mended"
    whole = digests(out)
    (out / shard_name(1)).unlink()
    (out / shard_name(2)).write_bytes(b"")
    flipped = bytearray((out / shard_name(3)).read_bytes())
    flipped[100] ^= 1
    (out / shard_name(3)).write_bytes(flipped)
    os.replace(out / shard_name(4), out / shard_name(5))
    next((out / "_mix").glob("states-*")).write_bytes(b"no table")
    assert digests(out) != whole
    build(planned(sources, "mended"))
    assert digests(out) == whole


def test_a_longer_mix_keeps_the_shards_of_the_shorter_one(sources: Path) -> None:
    build(planned(sources, "longer", num_batches=48))
    kept = sources / "longer" / shard_name(11)
    before = kept.stat().st_mtime_ns
    longer = planned(sources, "longer", num_batches=80)
    with pytest.raises(Exception, match=r"num_batches: 48 there, 80 here.*--overwrite"):
        build(longer)
    build(longer, overwrite=True)
    build(planned(sources, "longer-anew", num_batches=80))
    assert shards_of(digests(sources / "longer")) == shards_of(digests(sources / "longer-anew"))
    assert kept.stat().st_mtime_ns == before


def test_overwrite_replaces_another_mix_and_leaves_no_stray(sources: Path) -> None:
    build(planned(sources, "replaced", num_batches=60))
    build(planned(sources, "replaced", num_batches=20, batch_size=5), overwrite=True)
    build(planned(sources, "direct", num_batches=20, batch_size=5))
    assert shards_of(digests(sources / "replaced")) == shards_of(digests(sources / "direct"))


def test_steps_compose_in_a_pipeline_of_the_users_own(
    sources: Path, undisturbed: dict[str, str]
) -> None:
    saved = planned(sources, "composed").save()
    path, shards = str(sources / "composed"), saved.layout.num_shards
    with beam.Pipeline("FnApiRunner") as pipeline:
        records = (
            pipeline
            | SpansOfShards(shards, span_shards=5, run_shards=2)
            | WriteShards(path, threads=2)
        )
        records | PublishManifest(path)
    assert shards_of(digests(sources / "composed")) == shards_of(undisturbed)


def test_runs_cover_a_span_exactly() -> None:
    assert list(runs_of((3, 10, 4))) == [(3, 7), (7, 10)]


def test_the_whole_build_is_one_transform_over_a_saved_plan(sources: Path) -> None:
    saved = planned(sources, "whole").save()
    with beam.Pipeline("FnApiRunner") as pipeline:
        spans, path = SpansOfShards(saved.layout.num_shards, 4, 2), str(sources / "whole")
        pipeline | BuildMix(path, spans, WriteShards(path, threads=2))
    assert Manifest.load(saved.folder).layout.num_shards == 13


# What is refused before a runner starts.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--direct_running_mode=multi_threading"], r"multi_threading is refused.*lose elements"),
        (["--direct_running_mode", "multi_threading"], r"multi_threading is refused"),
        (
            ["--runner=DataflowRunner"],
            r"runner DataflowRunner may work on other machines, but '.*out",
        ),
        (["--runner", "FlinkRunner"], r"--shared-filesystem"),
        (["--runner=FooRunner"], r"--runner FooRunner cannot be used: .*Valid values are Dataflow"),
        (["--direct_num_workers=-1"], r"--direct_num_workers must be at least 0, found -1"),
        (["--treads=4"], r"--treads=4: neither an option of `mixshards build` nor one of Beam"),
        (["--direct_num_workers=two"], r"does not fit: .*direct_num_workers.*'two'"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_reason(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    write_sources(tmp_path / "data", web=[40], code=[30], books=[11])
    refused = planned(tmp_path, "out")
    with pytest.raises(BuildError, match=message):
        build(refused, flags)
    assert not (tmp_path / "out").exists()


def test_two_builds_at_once_into_one_folder_are_refused(sources: Path) -> None:
    lock = sources / "locked" / "_mix" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"locked: another build is writing there"):
            build(planned(sources, "locked"))
    build(planned(sources, "locked"))


def test_a_worker_with_another_pyarrow_refuses(sources: Path) -> None:
    saved = planned(sources, "versions").save()
    options = dataclasses.replace(saved.options, pyarrow="1.2.3")
    with pytest.raises(BuildError, match=r"made with 1\.2\.3.*install pyarrow==1\.2\.3"):
        RunWriter(dataclasses.replace(saved, options=options))


# What goes wrong while building.


def test_a_source_changed_after_planning_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[40, 30], code=[30], books=[11])
    stale = planned(tmp_path, "out")
    changed = tmp_path / "data" / "web" / "part-001.parquet"
    pq.write_table(table("other", 30), changed)
    with pytest.raises(BuildError, match=r"part-001\.parquet: has changed since it was planned"):
        build(stale)
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(
        Exception, match=r"differs in source file .*part-001\.parquet, which has cha"
    ):
        build(planned(tmp_path, "out"))


def test_a_source_that_vanishes_while_building_is_named(tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[400, 300], code=[300], books=[110])
    gone = tmp_path / "data" / "web" / "part-001.parquet"
    mix = planned(tmp_path, "out", num_batches=2000, batches_per_shard=2)

    def remove_once_begun() -> None:
        while not (tmp_path / "out" / shard_name(3)).exists():
            time.sleep(0.001)
        gone.unlink()

    remover = threading.Thread(target=remove_once_begun)
    remover.start()
    with pytest.raises(BuildError, match=r"part-001\.parquet: no such file"):
        build(mix, threads=1, run_shards=1)
    remover.join()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_folder_with_foreign_files_among_the_shards_is_refused(sources: Path) -> None:
    stray = sources / "stray" / "shards" / "notes.txt"
    stray.parent.mkdir(parents=True)
    stray.write_text("mine")
    with pytest.raises(Exception, match=r"shards/notes\.txt.*no place in this mix"):
        build(planned(sources, "stray"))
    with pytest.raises(Exception, match=r"shards/notes\.txt is no shard.*move it away"):
        build(planned(sources, "stray"), overwrite=True)
    assert stray.read_text() == "mine"


# Kills.


def build_from(path: Path) -> None:
    build(plan(json.loads(path.read_text())), threads=2, run_shards=3)


@pytest.fixture(scope="module")
def server() -> multiprocessing.context.ForkServerContext:
    """Starts real processes that have Beam imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_transforms"])
    return context


@pytest.mark.slow
def test_killed_at_twenty_random_moments_a_second_build_gives_the_undisturbed_bytes(
    tmp_path: Path, server: multiprocessing.context.ForkServerContext
) -> None:
    write_sources(tmp_path / "data", web=[4000, 6000], code=[7300], books=[1100])
    moments = random.Random(20)
    keys = {"num_batches": 400, "on_exhausted": "repeat", "batch_size": 96}

    def process(output: str) -> multiprocessing.process.BaseProcess:
        settings = tmp_path / f"{output}.json"
        settings.write_text(
            json.dumps(config(tmp_path, WEIGHTS, output=str(tmp_path / output), **keys))
        )
        child = server.Process(target=build_from, args=(settings,))
        child.start()
        return child

    process("warm").join()
    begun = time.monotonic()
    process("undisturbed").join()
    seconds = time.monotonic() - begun
    expected = shards_of(digests(tmp_path / "undisturbed"))
    assert len(expected) > 100
    killed_amid_shards = 0
    for kill in range(20):
        child = process(f"killed-{kill}")
        time.sleep(moments.uniform(0.1, 0.95) * seconds)
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended before
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        out = tmp_path / f"killed-{kill}"
        if child.exitcode == -signal.SIGKILL and not (out / "manifest.json").exists():
            with pytest.raises(ManifestError, match="no finished mix"):
                Manifest.load(Folder.at(str(out)))
            killed_amid_shards += any((out / "shards").glob("*")) if out.exists() else False
        process(f"killed-{kill}").join()
        assert shards_of(digests(out)) == expected
        assert list((out / "_mix" / "tmp").iterdir()) == []
    assert killed_amid_shards >= 5


def test_small_mix_helper_builds_a_finished_mix(tmp_path: Path) -> None:
    out, manifest = small_mix(tmp_path)
    assert Manifest.load(Folder.at(str(out))).document == manifest.document
