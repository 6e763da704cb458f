"""Compressed sources on their stage: written once, found again, read anywhere, and removed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.catalog import STAGE, Catalog, staged_name
from pipeline.formats import SourceError, jsonl
from pipeline.plan import plan
from pipeline.progress import Watch
from pipeline.registry import Registry, read_file
from pipeline.stage import stage_file, staged, to_stage, unstage
from pipeline.storage import Folder
from pipeline.transforms import build
from pipeline.verify import verify

from .mixes import digests

ITEMS = {name: [{"text": f"{name}:{n}", "n": n} for n in range(300)] for name in ("a", "b")}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two datasets of compressed lines, in blocks of about 1,000 bytes."""
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 1000)
    datasets: dict[str, Any] = {}
    for name, items in ITEMS.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(b"".join(json.dumps(i).encode() + b"\n" for i in items)))
        datasets[name] = {"path": str(path), "weight": 1}
    return {
        "output": str(tmp_path / "out"),
        "batch_size": 8,
        "num_batches": 60,
        "batches_per_shard": 4,
        "datasets": datasets,
    }


def catalog_at(config: dict[str, Any], path: Path) -> Catalog:
    return replace(plan(config).catalog, stage=Folder.at(str(path)))


def test_a_staged_file_has_a_row_group_a_block_and_is_not_written_twice(config, tmp_path):
    catalog = catalog_at(config, tmp_path / "stage")
    assert [dataset.name for dataset, _ in to_stage(catalog)] == ["a", "b"]
    dataset, file = to_stage(catalog)[0]
    size = stage_file(catalog, dataset, file)
    path = tmp_path / "stage" / staged_name(catalog, dataset, file)
    metadata = pq.read_metadata(path)
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert (path.stat().st_size, tuple(rows)) == (size, file.group_rows)
    assert len(rows) > 5
    before = path.stat().st_mtime_ns
    assert stage_file(catalog, dataset, file) == size
    assert path.stat().st_mtime_ns == before


def test_rows_come_from_the_stage_where_they_are_there_and_else_from_the_source(config, tmp_path):
    catalog = catalog_at(config, tmp_path / "stage")
    dataset, file = to_stage(catalog)[0]

    def items() -> list[dict[str, Any]]:
        batches = read_file(catalog, dataset, file, 123, 131)
        return [item for batch in batches for item in batch.to_pylist()]

    assert items() == ITEMS["a"][123:131]
    stage_file(catalog, dataset, file)
    os.remove(file.path)
    assert items() == ITEMS["a"][123:131]
    unstage(Folder.at(str(tmp_path / "stage")))
    with pytest.raises(SourceError, match=r"^dataset 'a': .*a\.jsonl\.gz: no such file$"):
        items()


def test_without_a_stage_any_offset_is_reached(config):
    registry = Registry(plan(config).catalog)
    assert next(registry.get_iterator("b", 299)) == ITEMS["b"][299]


def test_a_name_on_the_stage_follows_content_columns_and_types(config, tmp_path):
    def names(config: dict[str, Any]) -> list[str]:
        catalog = plan(config).catalog
        return [staged_name(catalog, *pair) for pair in to_stage(catalog)]

    first = names(config)
    assert len(set(first)) == 2
    assert names(config) == first
    typed = {k: {**v, "schema": {"n": "int32"}} for k, v in config["datasets"].items()}
    fewer = {k: {**v, "columns": {"text": "text"}} for k, v in config["datasets"].items()}
    others = [name for d in (typed, fewer) for name in names({**config, "datasets": d})]
    assert not set(first) & set(others)
    assert len({*others}) == 4


def test_a_source_that_changed_is_named_and_nothing_is_left(config, tmp_path):
    catalog = catalog_at(config, tmp_path / "stage")
    dataset, file = to_stage(catalog)[0]
    data = bytearray(Path(file.path).read_bytes())
    data[len(data) // 2] ^= 255
    Path(file.path).write_bytes(data)
    with pytest.raises(SourceError, match=r"^dataset 'a': .*a\.jsonl\.gz: "):
        stage_file(catalog, dataset, file)
    assert [path for path in (tmp_path / "stage").rglob("*") if path.is_file()] == []
    with staged(catalog) as with_stage:
        assert with_stage.stage is not None
        assert len(with_stage.stage.names(STAGE)) == 1  # of b, which is as it was


def test_a_build_removes_its_stage_unless_it_is_to_be_kept(config, tmp_path):
    build(plan(config))
    assert not (tmp_path / "out" / STAGE).exists()
    first = digests(tmp_path / "out")
    build(plan({**config, "output": str(tmp_path / "kept")}), keep_stage=True)
    kept = digests(tmp_path / "kept")
    assert len([name for name in kept if name.startswith(STAGE)]) == 2
    shards = {name: digest for name, digest in first.items() if name.startswith("shards/")}
    assert shards.items() <= kept.items()
    assert verify(tmp_path / "kept", sources=True) == []
    assert verify(tmp_path / "out", sources=True) == []


def test_a_second_build_of_a_whole_mix_stages_nothing(config, tmp_path):
    build(plan(config))
    mix = plan(config)
    for entry in config["datasets"].values():
        os.remove(entry["path"])
    build(mix)


def test_a_build_that_was_killed_finds_what_it_had_staged(config, tmp_path):
    catalog = plan(config).catalog
    names = [staged_name(catalog, *pair) for pair in to_stage(catalog)]
    script = (
        "import json, os, signal, sys\n"
        "from pipeline import stage, transforms\n"
        "from pipeline.formats import jsonl\n"
        "from pipeline.plan import plan\n"
        "jsonl.BLOCK_BYTES = 1000\n"
        "whole = stage.stage_file\n"
        "def stage_file(*args):\n"
        "    whole(*args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "transforms.stage_file = stage_file\n"
        "transforms.build(plan(json.loads(sys.argv[1])), threads=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, json.dumps(config)], check=False)
    assert done.returncode == -9
    out = tmp_path / "out"
    found = [name for name in names if (out / name).exists()]
    assert len(found) == 1
    stamp = (out / found[0]).stat().st_mtime_ns
    build(plan(config), keep_stage=True)
    assert (out / found[0]).stat().st_mtime_ns == stamp
    assert verify(out, sources=True) == []


def test_the_watch_says_how_far_staging_has_come(config, tmp_path, capsys):
    mix = plan(config).save()
    catalog = replace(mix.catalog, stage=mix.folder)
    stage_file(catalog, *to_stage(catalog)[0])
    with Watch(mix, seconds=0.01):
        time.sleep(0.2)
    assert "staged 1/2 compressed files, 0.0 MB" in capsys.readouterr().err
