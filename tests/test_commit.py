"""Nothing is published unless every planned shard stands, once, with its planned rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pipeline.commit import commit
from pipeline.gather import RunWriter
from pipeline.manifest import Manifest
from pipeline.plan import Plan, plan
from pipeline.shard import ShardRecord, shard_name
from pipeline.writing import BuildError

from .mixes import config, write_sources


@pytest.fixture
def written(tmp_path: Path) -> tuple[Plan, list[ShardRecord]]:
    """A plan whose shards all stand, and their records; the manifest is yet to be published."""
    write_sources(tmp_path / "data", web=[40], code=[30])
    settings = config(tmp_path, {"web": 3, "code": 2}, num_batches=8, batches_per_shard=2)
    saved = plan(settings).save()
    return saved, RunWriter(saved).write(0, 4)


def refused(saved: Plan, records: list[ShardRecord], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        commit(saved, records)
    assert not Path(saved.folder.path("manifest.json")).exists()


def test_records_in_any_order_and_more_than_once_publish_one_manifest(
    written: tuple[Plan, list[ShardRecord]],
) -> None:
    saved, records = written
    commit(saved, [*reversed(records), *records])
    first = Path(saved.folder.path("manifest.json")).read_bytes()
    commit(saved, records)
    assert Path(saved.folder.path("manifest.json")).read_bytes() == first
    assert Manifest.load(saved.folder).shards(saved.folder) == records
    assert saved.folder.names("_mix/tmp") == []


def test_lost_shards_are_named(written: tuple[Plan, list[ShardRecord]]) -> None:
    saved, records = written
    refused(saved, records[:1] + records[2:3], r"lost 2 of 4 shards, first 1, 3; nothing was publ")


def test_a_shard_delivered_twice_and_not_alike_is_named(
    written: tuple[Plan, list[ShardRecord]],
) -> None:
    saved, records = written
    other = dataclasses.replace(records[2], sha256="0" * 64)
    refused(saved, [*records, other], r"shard-00000002\.parquet: was written twice and not alike")


def test_a_shard_with_other_rows_than_planned_is_named(
    written: tuple[Plan, list[ShardRecord]],
) -> None:
    saved, records = written
    records[1] = dataclasses.replace(records[1], num_rows=15)
    refused(saved, records, r"shard-00000001.*expected batches 2 to 4 with 16 rows.*num_rows=15")


def test_shards_of_no_plan_are_named(written: tuple[Plan, list[ShardRecord]]) -> None:
    saved, records = written
    refused(saved, [*records, dataclasses.replace(records[0], shard=9)], r"not planned: 9")


def test_strays_and_vanished_shards_are_named(written: tuple[Plan, list[ShardRecord]]) -> None:
    saved, records = written
    stray = Path(saved.folder.path("shards/shard-00000007.parquet"))
    stray.write_bytes(b"")
    Path(saved.folder.path(shard_name(2))).unlink()
    refused(
        saved,
        records,
        r"1 file\(s\) that no plan names, first shards/shard-00000007\.parquet; "
        r"1 file\(s\) gone since written, first shards/shard-00000002\.parquet",
    )
