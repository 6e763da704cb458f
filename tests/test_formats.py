"""One mix from each format: the same rows in the same order, online and from the shards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mixcore import DataBatcher
from pipeline.formats import ipc, jsonl
from pipeline.manifest import Manifest
from pipeline.plan import plan
from pipeline.reader import ShardReader
from pipeline.registry import Registry
from pipeline.storage import Folder
from pipeline.transforms import build
from pipeline.verify import verify

from .mixes import FORMS, WEIGHTS, config, digests, table, write_as

FILES = {"web": [40, 60], "code": [50, 23], "books": [11]}
MIXTURES: dict[str, dict[str, Any]] = {
    "weighted": {"num_batches": 30, "on_exhausted": "repeat", "rows": True},
    "frame_budget": {
        "mixture": "frame_budget",
        "batch_size": None,
        "frame_budget": 200,
        "pool_size": 30,
        "length_of": "text",
    },
    "reservoir": {"mixture": "reservoir", "max_simultaneous": 2, "passes": 2},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ipc, jsonl):
        monkeypatch.setattr(module, "BLOCK_BYTES", 700)


def settings(folder: Path, form: str, mixture: str) -> dict[str, Any]:
    """Sources in one form, and a config over them."""
    for name, files in FILES.items():
        first = 0
        for number, rows in enumerate(files):
            path = folder / "data" / name / f"part-{number}.{form}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_as(path, table(name, rows, first), form)
            first += rows
    keys = dict(MIXTURES[mixture])
    held_out = keys.pop("rows", False)
    made = config(folder, WEIGHTS, **keys)
    for entry in made["datasets"].values():
        if mixture != "weighted":
            del entry["weight"]
        if held_out:
            entry["rows"] = [3, None]
        if "json" in form:
            entry["schema"] = {"tokens": "list<int32>"}
    return {key: value for key, value in made.items() if value is not None}


@pytest.fixture(scope="module")
def from_parquet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    """The rows of each mixture over Parquet."""
    found = {}
    for mixture in MIXTURES:
        folder = tmp_path_factory.mktemp(mixture)
        build(plan(settings(folder, "parquet", mixture)))
        found[mixture] = pa.concat_tables(ShardReader(str(folder / "out")).batches())
    return found


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("form", FORMS[1:])
def test_a_mix_holds_the_rows_that_it_holds_over_parquet(tmp_path, from_parquet, form, mixture):
    made = settings(tmp_path, form, mixture)
    planned = plan(made)
    assert sum(len(f.group_rows) for d in planned.catalog.datasets for f in d.files) > 5
    manifest = build(planned)
    out = tmp_path / "out"
    assert pa.concat_tables(ShardReader(str(out)).batches()).equals(from_parquet[mixture])
    assert verify(out, sources=True) == []
    if form in ("jsonl.gz", "arrow"):
        before = digests(out)
        shutil.rmtree(out)
        other = "gather" if planned.write_path == "scatter" else "scatter"
        build(plan(made), write_path=other)
        assert digests(out) == before
    if mixture == "weighted":
        _resumes(planned, manifest, from_parquet[mixture])


def _resumes(planned: Any, manifest: Manifest, expected: pa.Table) -> None:
    """The online class goes on from each boundary, over the same files."""
    rows = expected.select(["text", "tokens"]).to_pylist()
    states = manifest.states(Folder.at(planned.folder.uri))
    for shard in range(0, manifest.layout.num_shards, 3):
        batcher = DataBatcher(Registry(planned.catalog, repeat=True), WEIGHTS, 8)
        batcher.load_state_dict(states[shard])
        first = manifest.layout.shard(shard)[0] * 8
        assert batcher.next_batch() == rows[first : first + 8]


def test_datasets_of_one_mix_may_have_different_formats(tmp_path, from_parquet):
    made = settings(tmp_path, "parquet", "weighted")
    for name, form in (("web", "jsonl.gz"), ("code", "stream.arrow")):
        shutil.rmtree(tmp_path / "data" / name)
        first = 0
        for number, rows in enumerate(FILES[name]):
            (tmp_path / "data" / name).mkdir(exist_ok=True)
            path = tmp_path / "data" / name / f"part-{number}.{form}"
            write_as(path, table(name, rows, first), form)
            first += rows
    made["datasets"]["web"]["schema"] = {"tokens": "list<int32>"}
    build(plan(made))
    found = pa.concat_tables(ShardReader(str(tmp_path / "out")).batches())
    assert found.equals(from_parquet["weighted"])


def test_lines_that_are_left_out_are_counted_in_the_manifest_and_told(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"a": 2}\n{"a": 3}\n[]\n')
    made = {
        "output": str(tmp_path / "out"),
        "batch_size": 3,
        "on_exhausted": "stop",
        "datasets": {"lines": {"path": str(path), "weight": 1, "on_bad_line": "skip"}},
    }
    planned = plan(made)
    assert planned.preview()["warnings"] == [
        "dataset 'lines': 2 line(s) that cannot be read are left out"
    ]
    manifest = build(planned)
    assert manifest.document["datasets"][0]["bad_lines"] == 2
    assert ShardReader(str(tmp_path / "out"))[0]["a"].to_pylist() == [1, 2, 3]
    assert verify(tmp_path / "out", sources=True) == []


def test_types_of_lines_that_disagree_with_other_files_can_be_given(tmp_path):
    write_as(tmp_path / "a.parquet", pa.table({"x": [1.5, 2.5], "day": ["a", "b"]}), "parquet")
    (tmp_path / "b.jsonl").write_text('{"x": 1, "day": "2024-01-01"}\n{"x": 2, "day": null}\n')
    made = {
        "output": str(tmp_path / "out"),
        "batch_size": 4,
        "on_exhausted": "stop",
        "datasets": {
            "a": {"path": str(tmp_path / "a.parquet"), "weight": 1},
            "b": {"path": str(tmp_path / "b.jsonl"), "weight": 1, "schema": {"x": "double"}},
        },
    }
    build(plan(made))
    batch = ShardReader(str(tmp_path / "out"))[0]
    assert batch["x"].to_pylist() == [1.5, 2.5, 1.0, 2.0]
    assert batch["day"].to_pylist() == ["a", "b", "2024-01-01", None]


def test_what_datasets_saves_to_disk_is_a_folder_of_sources(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    write_as(folder / "data-00000-of-00001.arrow", table("a", 20), "stream.arrow")
    (folder / "state.json").write_text('{\n  "_data_files": []\n}')
    (folder / "dataset_info.json").write_text("{\n}")
    made = {
        "output": str(tmp_path / "out"),
        "batch_size": 4,
        "on_exhausted": "stop",
        "datasets": {"saved": {"path": str(folder), "weight": 1}},
    }
    assert plan(made).catalog.datasets[0].num_rows == 20
