"""From config and sources to a plan: length, layout, identities, preview, and refusals."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import ConfigError
from pipeline.errors import MixError
from pipeline.manifest import order_identity
from pipeline.mixtures import order_settings
from pipeline.plan import Plan, PlanError, plan
from pipeline.reader import ShardReader
from pipeline.schema import SchemaError
from pipeline.storage import Folder
from pipeline.transforms import build
from pipeline.verify import verify

from .mixes import WEIGHTS, config, digests, table, write_sources


def planned(sources: Path, weights: dict[str, Any] = WEIGHTS, **keys: Any) -> Plan:
    return plan(config(sources, weights, **{"num_batches": 8, **keys}))


# Length.


def test_error_names_each_dataset_that_is_too_short_and_the_way_out(sources: Path) -> None:
    with pytest.raises(PlanError) as caught:
        planned(sources, num_batches=1000)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "dataset 'web': has 100 row(s), but 1,000 batches need 4,000; "
        "the first batch it cannot fill is 25"
    )
    assert lines[2] == (
        "dataset 'books': has 11 row(s), but 1,000 batches need 1,333; "
        "the first batch it cannot fill is 8"
    )
    assert "set num_batches to at most 8, give more data" in lines[3]
    assert planned(sources, num_batches=8).layout.num_batches == 8
    with pytest.raises(PlanError, match="first batch it cannot fill is 8"):
        planned(sources, num_batches=9)


def test_stop_ends_with_the_last_batch_that_every_dataset_can_fill(sources: Path) -> None:
    stopped = planned(sources, num_batches=None, on_exhausted="stop")
    assert stopped.layout.num_batches == 8
    assert planned(sources, num_batches=5, on_exhausted="stop").layout.num_batches == 5
    assert planned(sources, num_batches=500, on_exhausted="stop").layout.num_batches == 8


def test_stop_refuses_a_mix_of_which_not_one_step_can_be_filled(sources: Path) -> None:
    with pytest.raises(PlanError, match=r"dataset 'books': has 11 row.* need 13 .*repeat"):
        planned(sources, num_batches=None, on_exhausted="stop", batch_size=80)


def test_repeat_without_a_length_ends_when_each_was_seen_once_in_full(sources: Path) -> None:
    # code is the last: 73 rows at 8/3 a batch.
    seen = planned(sources, num_batches=None, on_exhausted="repeat")
    assert seen.layout.num_batches == 28
    used = {entry["name"]: entry["rows_used"] for entry in seen.preview()["datasets"]}
    assert used == {"web": 112, "code": 75, "books": 37}


def test_a_length_that_a_light_dataset_makes_absurd_is_refused_at_once(sources: Path) -> None:
    with pytest.raises(PlanError, match=r"'books': at weight 1 .* about 13,750,0\d\d,\d+ ba"):
        planned(
            sources,
            {"web": 9_999_999_999, "books": 1},
            num_batches=None,
            on_exhausted="repeat",
        )
    stopped = planned(
        sources, {"web": 9_999_999_999, "books": 1}, num_batches=None, on_exhausted="stop"
    )
    assert stopped.layout.num_batches == 12


def test_lengths_are_whole_steps(sources: Path) -> None:
    keys = {"num_batches": None, "batches_per_step": 3, "batches_per_shard": 3}
    assert planned(sources, **keys, on_exhausted="stop").layout.num_batches == 6
    assert planned(sources, **keys, on_exhausted="repeat").layout.num_batches == 30


# Layout.


def test_row_groups_hold_about_two_thousand_rows_unless_told_otherwise(sources: Path) -> None:
    assert planned(sources, batches_per_shard=1000).layout.batches_per_row_group == 256
    assert planned(sources, batches_per_shard=4).layout.batches_per_row_group == 4
    assert planned(sources, batches_per_row_group=2).layout.batches_per_row_group == 2


def test_steps_make_one_batch_a_row_group_and_whole_steps_a_shard(sources: Path) -> None:
    layout = planned(sources, batches_per_step=2, batches_per_shard=4).layout
    assert (layout.batches_per_row_group, layout.batches_per_step) == (1, 2)


def test_shard_bytes_become_a_constant_number_of_batches(sources: Path) -> None:
    small = planned(sources, batches_per_shard=None, shard_bytes=3000)
    large = planned(sources, batches_per_shard=None, shard_bytes=300_000)
    assert 1 < small.layout.batches_per_shard < large.layout.batches_per_shard
    estimated = small.estimated_bytes / small.layout.num_batches * small.layout.batches_per_shard
    assert 1500 < estimated <= 3000
    longer = planned(
        sources, batches_per_shard=None, shard_bytes=3000, num_batches=80, on_exhausted="repeat"
    )
    assert longer.layout.batches_per_shard == small.layout.batches_per_shard


# Identities.


def test_length_paths_output_layout_and_compression_leave_the_order_as_it_is(
    sources: Path, tmp_path: Path
) -> None:
    one = planned(sources).manifest
    write_sources(tmp_path / "data", web=[40, 0, 60], code=[50, 23], books=[11])
    for other in (
        planned(sources, num_batches=5).manifest,
        planned(sources, output=str(tmp_path / "elsewhere")).manifest,
        planned(sources, batches_per_shard=2).manifest,
        planned(sources, compression="lz4").manifest,
        planned(sources, on_exhausted="repeat").manifest,
        planned(tmp_path).manifest,
    ):
        assert other.order_id == one.order_id
    assert planned(tmp_path).manifest.bytes_id == one.bytes_id
    assert planned(sources, num_batches=5).manifest.bytes_id == one.bytes_id
    assert planned(sources, batches_per_shard=2).manifest.bytes_id != one.bytes_id
    assert planned(sources, compression="lz4").manifest.bytes_id != one.bytes_id


def test_weights_batch_size_rows_columns_names_and_content_change_the_order(
    sources: Path, tmp_path: Path
) -> None:
    write_sources(tmp_path / "data", web=[40, 0, 60], code=[50, 23], books=[12])
    held_out = config(sources, WEIGHTS, num_batches=8)
    held_out["datasets"]["web"]["rows"] = [1, None]
    projected = config(sources, WEIGHTS, num_batches=8)
    for dataset in projected["datasets"].values():
        dataset["columns"] = {"text": "text"}
    renamed = config(sources, WEIGHTS, num_batches=8)
    renamed["datasets"]["tomes"] = renamed["datasets"].pop("books")
    ids = [
        planned(sources).manifest.order_id,
        planned(sources, {"web": 6, "code": 4, "books": 2}).manifest.order_id,
        planned(sources, {"code": 2, "web": 3, "books": 1}).manifest.order_id,
        planned(sources, batch_size=7).manifest.order_id,
        *(plan(changed).manifest.order_id for changed in (held_out, projected, renamed)),
        planned(tmp_path).manifest.order_id,
    ]
    assert len(set(ids)) == len(ids)


def test_order_identity_of_this_algorithm_version_is_what_it_was() -> None:
    # Fixed digests stand in for files, so that the identity hangs on our own rules alone.
    files = [("0" * 64, 60), ("1" * 64, 40)]
    datasets = [("ä", {"text": "body"}, (10, 90), files, {}), ("no", None, (0, 60), files[:1], {})]
    document = {
        "mixture": {"kind": "weighted", "batch_size": 512, "repeat": True},
        "datasets": [{"weight": str(2**70)}, {"weight": 3}],
    }
    assert order_identity(order_settings(document), datasets) == (
        "6be1f3c3474b326b5ef559d026bbd18ee147faa82b1309bdd8a8968b9b1e7370"
    )


# Saving and loading.


def test_a_saved_plan_loads_as_what_was_saved(sources: Path, tmp_path: Path) -> None:
    saved = planned(sources, output=str(tmp_path / "out")).save()
    loaded = Plan.load(Folder.at(str(tmp_path / "out")))
    assert loaded.catalog == replace(saved.catalog, stage=saved.folder)
    assert loaded.schema == saved.schema
    assert loaded.options == saved.options
    assert loaded.layout == saved.layout
    assert loaded.manifest.document == json.loads(json.dumps(saved.manifest.document))


def test_another_plan_in_the_folder_is_refused_and_what_differs_is_named(
    sources: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    planned(sources, output=out).save()
    for changed, difference in (
        (planned(sources, {**WEIGHTS, "web": 4}, output=out), r"dataset 'web': weight 3 there, 4"),
        (planned(sources, batch_size=4, output=out), r"batch_size: 8 there, 4 here"),
        (planned(sources, compression="lz4", output=out), r"compression: 'zstd' there, 'lz4'"),
        (planned(sources, batches_per_shard=2, output=out), r"batches_per_shard: 4 there, 2"),
        (planned(sources, {"web": 3, "code": 2}, output=out), r"3 datasets there, 2 here"),
    ):
        with pytest.raises(PlanError, match=rf"it differs in .*{difference}.*--overwrite"):
            changed.save()
    planned(sources, output=out).save()


def test_output_among_the_sources_is_refused(sources: Path) -> None:
    with pytest.raises(PlanError, match=r"dataset 'web'.*lies inside the output folder"):
        planned(sources, output=str(sources / "data"))


@pytest.mark.parametrize("path", ["data", "data/**/*.parquet", "**", "out*/shards/*.parquet"])
def test_output_that_would_become_a_source_is_refused_before_the_first_build(
    tmp_path: Path, path: str
) -> None:
    write_sources(tmp_path / "data", web=[40])
    write_sources(tmp_path / "out-of-last-year", shards=[40])
    output = "data/out" if path.startswith("data") else "out"
    settings = config(tmp_path, {}, num_batches=2, output=str(tmp_path / output))
    settings["datasets"] = {"web": {"path": str(tmp_path / path), "weight": 1}}
    with pytest.raises(PlanError, match=r"'web': .* would take the shards in .*out for data"):
        plan(settings)
    settings["output"] = str(tmp_path / "data" / "_out")
    assert plan(settings).layout.num_batches == 2


def test_plan_takes_a_file_a_mapping_or_a_config(sources: Path, tmp_path: Path) -> None:
    mapping = config(sources, WEIGHTS, num_batches=8)
    path = tmp_path / "mix.yaml"
    path.write_text(json.dumps(mapping))
    assert plan(path).manifest.bytes_id == plan(mapping).manifest.bytes_id
    with pytest.raises(ConfigError, match="batch_size"):
        plan({**mapping, "batch_size": "many"})


def test_paths_are_relative_to_the_config_file(sources: Path) -> None:
    path = sources / "relative.yaml"
    path.write_text(
        "output: relative-out\nbatch_size: 8\nnum_batches: 2\n"
        "datasets: {web: {path: data/web, weight: 1}}\n"
    )
    assert plan(path).folder.root == str(sources / "relative-out")


def test_a_column_named_like_provenance_is_refused_with_the_way_out(tmp_path: Path) -> None:
    rows = table("a", 30).append_column("mix_row", pa.array(range(30)))
    (tmp_path / "data" / "a").mkdir(parents=True)
    pq.write_table(rows, tmp_path / "data" / "a" / "x.parquet")
    settings = config(tmp_path, {"a": 1}, num_batches=2)
    with pytest.raises(SchemaError, match=r"'mix_row' in dataset 'a'.*columns: \{my_mix_row: mix_"):
        plan(settings)
    settings["datasets"]["a"]["columns"] = {"text": "text", "my_mix_row": "mix_row"}
    assert plan(settings).catalog.schema.names == ["text", "my_mix_row"]


# Rows held out.


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 101], r"rows \[0, 101\] asked for, but its 3 file\(s\) hold 100 row\(s\); .*100\]"),
        ([100, None], r"rows \[100, null\] asked for, but .* within \[0, 100\]"),
        ([-1, None], r"datasets.web.rows: start: expected a whole number of at least 0, found -1"),
    ],
)
def test_rows_that_are_not_there_are_refused(
    sources: Path, rows: list[int | None], said: str
) -> None:
    settings = config(sources, WEIGHTS, num_batches=2)
    settings["datasets"]["web"]["rows"] = rows
    with pytest.raises(MixError, match=said):
        plan(settings)


def test_rows_say_nothing_of_files_that_are_missing(sources: Path) -> None:
    settings = config(sources, WEIGHTS, num_batches=2)
    there = str(sources / "data" / "web" / "part-000.parquet")
    settings["datasets"]["web"].update(path=[there, f"{there}.gone.parquet"], rows=[0, 10])
    with pytest.raises(MixError, match=r"'web': .*gone.parquet: no such file or folder"):
        plan(settings)


def test_what_is_held_out_is_read_from_the_middle_of_files(sources: Path, tmp_path: Path) -> None:
    settings = config(sources, {"web": 1}, num_batches=6, output=str(tmp_path / "out"))
    settings["datasets"]["web"]["rows"] = [30, 78]
    build(plan(settings))
    rows = pa.concat_tables(ShardReader(settings["output"]).batches()).to_pylist()
    assert [row["mix_row"] for row in rows] == list(range(48))
    assert [int(row["text"].split(":")[1]) for row in rows] == list(range(30, 78))


# Sources that disagree.


def disagreeing(folder: Path) -> dict[str, Any]:
    """A config over files that go together by widening, and by what is said of missing columns."""
    web = pa.table(
        {
            "id": pa.array([0, 1, 2], pa.int32()),
            "text": pa.array(["a", None, "c"]).dictionary_encode(),
            "meta": pa.array([{"n": 1}, None, {"n": 3}], pa.struct([("n", pa.int8())])),
            "only": [0.5, 1.5, 2.5],
        }
    )
    more = pa.table(
        {
            "meta": pa.array(
                [{"s": "x", "n": 300}], pa.struct([("s", pa.string()), ("n", pa.int16())])
            ),
            "text": pa.array(["d"], pa.large_string()),
            "id": pa.array([3], pa.int64()),
        }
    )
    inner = pa.struct([("text", pa.string()), ("unused", pa.int64())])
    code = pa.table(
        {
            "number": ["10", "11"],
            "info": pa.array(
                [{"body": {"text": "e", "unused": 1}}, {"body": None}],
                pa.struct([("body", inner), ("tags", pa.list_(pa.string()))]),
            ),
            "note": pa.array([None, None], pa.null()),
        }
    )
    for name, rows in (("web-0", web), ("web-1", more), ("code", code)):
        pq.write_table(rows, folder / f"{name}.parquet", row_group_size=2)
    return {
        "output": str(folder / "out"),
        "batch_size": 3,
        "num_batches": 4,
        "on_exhausted": "repeat",
        "batches_per_shard": 3,
        "datasets": {
            "web": {"path": str(folder / "web-*.parquet"), "weight": 2},
            "code": {
                "path": str(folder / "code.parquet"),
                "weight": 1,
                "columns": {"id": "number", "text": "info.body.text", "note": "note"},
                "schema": {"number": "int16"},
            },
        },
    }


def test_what_only_some_sources_have_is_one_error_that_shows_both_sides(tmp_path: Path) -> None:
    with pytest.raises(SchemaError) as caught:
        plan(disagreeing(tmp_path))
    web = [f"dataset 'web', {tmp_path}/web-{number}.parquet" for number in (0, 1)]
    code = f"dataset 'code', {tmp_path}/code.parquet"
    assert str(caught.value).splitlines() == [
        "the sources do not have one schema:",
        f"  column 'meta' is struct<n: int8> in {web[0]}, but missing in {code}, "
        "which has id, text, note",
        f"  column 'only' is double in {web[0]}, but missing in {web[1]}, which has meta, text, id",
        f"  column 'note' is null in {code}, but missing in {web[0]}, "
        "which has id, text, meta, only",
        "Choose common columns with `columns`, set missing_columns: null (null there) or drop "
        "(left out), give a column of one side another type with `schema`, or convert one side.",
    ]


WEB = [
    (0, "a", {"n": 1}, 0.5),
    (1, None, None, 1.5),
    (2, "c", {"n": 3}, 2.5),
    (3, "d", "both", None),
]
CODE = [(10, "e"), (11, None)]


@pytest.mark.parametrize("missing", [None, "drop"])
def test_a_mix_over_sources_that_disagree_holds_every_value(
    tmp_path: Path, missing: str | None
) -> None:
    settings = {**disagreeing(tmp_path), "missing_columns": missing}
    planned = plan(settings)
    assert planned.preview()["warnings"] == (
        []
        if missing is None
        else [
            "missing_columns: drop leaves out 'meta', 'only', 'note': not every source file has "
            "them"
        ]
    )
    build(planned)
    found = pa.concat_tables(ShardReader(settings["output"]).batches())
    assert found.schema.field("text").type == pa.large_string()
    assert found.schema.field("id").type == pa.int64()
    rows = found.to_pylist()
    assert len(rows) == 12
    for row in rows:
        if row["mix_dataset"] == "code":
            id, text = CODE[row["mix_row"]]
            expected = {"id": id, "text": text, "meta": None, "only": None, "note": None}
        else:
            id, text, meta, only = WEB[row["mix_row"]]
            if meta == "both":
                meta = {"n": 300, "s": "x"}
            elif meta:
                meta = {**meta, "s": None}
            expected = {"id": id, "text": text, "meta": meta, "only": only, "note": None}
        if missing == "drop":
            expected = {"id": id, "text": text}
        assert {name: row[name] for name in row if not name.startswith("mix_")} == expected
    assert {row["mix_row"] for row in rows if row["mix_dataset"] == "web"} == {0, 1, 2, 3}
    assert verify(settings["output"]) == []


def test_both_ways_of_bringing_rows_together_agree_on_sources_that_disagree(
    tmp_path: Path,
) -> None:
    settings = {**disagreeing(tmp_path), "missing_columns": None}
    build(plan(settings), write_path="gather")
    other = {**settings, "output": str(tmp_path / "other")}
    build(plan(other), write_path="scatter")
    ours, theirs = digests(tmp_path / "out"), digests(tmp_path / "other")
    shards = [name for name in ours if name.startswith("shards/")]
    assert len(shards) == 2
    assert all(ours[name] == theirs[name] for name in shards)


def test_a_value_that_does_not_fit_its_given_type_ends_the_build_and_is_named(
    tmp_path: Path,
) -> None:
    settings = {**disagreeing(tmp_path), "missing_columns": "drop"}
    settings["datasets"]["web"]["schema"] = {"id": "int8", "meta": "struct<n: int8>"}
    plan(settings)
    settings["missing_columns"] = "null"
    with pytest.raises(MixError) as caught:
        build(plan(settings))
    assert (
        f"dataset 'web', {tmp_path}/web-1.parquet: column 'meta' of type "
        "struct<s: string, n: int16> cannot be brought to struct<n: int8>: "
    ) in str(caught.value)
    assert "300" in str(caught.value)


def test_types_that_are_given_enter_the_order_and_are_known_to_workers(tmp_path: Path) -> None:
    settings = {**disagreeing(tmp_path), "missing_columns": "null"}
    settings["datasets"]["code"]["schema"] = {"number": "float64"}
    settings["datasets"]["web"]["schema"] = {"id": "float64"}
    one = plan(settings)
    assert plan({**settings, "missing_columns": "drop"}).manifest.order_id == one.manifest.order_id
    settings["datasets"]["web"]["schema"] = {"id": "float64", "only": "float32"}
    other = plan(settings)
    assert other.catalog.schema.field("id").type == pa.float64()
    assert other.manifest.order_id != one.manifest.order_id
    web, code = other.save().manifest.document["datasets"]
    assert web["schema"] == {"id": "double", "only": "float"}
    assert code["schema"] == {"number": "double"}
    loaded = Plan.load(other.folder)
    assert [d.schema for d in loaded.catalog.datasets] == [
        {"id": pa.float64(), "only": pa.float32()},
        {"number": pa.float64()},
    ]
    with pytest.raises(PlanError, match=r"'web': schema \{.*'only': 'float'\} there, \{.* here"):
        one.save()


def test_what_is_set_of_bad_lines_enters_the_order(sources: Path) -> None:
    settings = config(sources, WEIGHTS, num_batches=8)
    one = plan(settings).manifest
    settings["datasets"]["web"]["max_line_bytes"] = "1MiB"
    assert plan(settings).manifest.order_id == one.order_id
    settings["datasets"]["web"]["on_bad_line"] = "skip"
    assert plan(settings).manifest.order_id != one.order_id
    assert "on_bad_line" not in one.document["datasets"][0]


# The preview.


def test_preview_says_what_each_dataset_gives_and_when_it_first_appears(sources: Path) -> None:
    preview = planned(
        sources, {"web": 1000, "code": 50, "books": 1}, num_batches=12, batches_per_shard=5
    ).preview()
    web, code, books = preview["datasets"]
    assert (web["rows"], web["weight"], web["first_batch"]) == (100, 1000, 0)
    assert web["share_asked"] == 1000 / 1051
    assert web["share_given"] == web["rows_used"] / 96
    assert web["rows_used"] + code["rows_used"] + books["rows_used"] == 96
    assert code["first_batch"] == 1
    assert (books["first_batch"], books["rows_used"]) == (None, 0)
    assert books["about_batch"] == -(-1051 // 16)
    assert preview["num_shards"] == 3
    assert preview["warnings"] == [
        "dataset 'books' gets no row: at weight 1 of 1051 its first item is due about batch 66, "
        "and the mix ends at 12"
    ]


def test_preview_writes_nothing(sources: Path, tmp_path: Path) -> None:
    planned(sources, output=str(tmp_path / "out")).preview()
    assert list(tmp_path.iterdir()) == []


def test_ten_thousand_million_batches_plan_at_once(sources: Path) -> None:
    begun = time.monotonic()
    huge = planned(
        sources, num_batches=10**7, on_exhausted="repeat", batches_per_shard=10**5
    ).preview()
    assert huge["datasets"][0]["rows_used"] == 4 * 10**7
    assert time.monotonic() - begun < 20


def test_five_thousand_datasets_plan(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(table("a", 10), tmp_path / "data" / "rows.parquet")
    path = str(tmp_path / "data" / "rows.parquet")
    wide = plan(
        {
            "output": str(tmp_path / "out"),
            "batch_size": 512,
            "num_batches": 100,
            "on_exhausted": "repeat",
            "datasets": {f"d{i}": {"path": path, "weight": 1 + i % 7} for i in range(5000)},
        }
    )
    assert sum(entry["rows_used"] for entry in wide.preview()["datasets"]) == 51_200


def test_a_mix_that_stop_cuts_short_is_a_warning_that_names_the_dataset(sources: Path) -> None:
    seen = planned(sources, num_batches=50, on_exhausted="stop").preview()
    assert seen["warnings"] == [
        "on_exhausted: stop ends the mix after 8 of 50 batches: dataset 'books' cannot fill batch 8"
    ]
    steps = {"batches_per_step": 3, "batches_per_shard": 3}
    stepped = planned(sources, num_batches=None, on_exhausted="stop", **steps)
    assert stepped.layout.num_batches == 6
    assert stepped.preview()["warnings"] == [
        "2 more batch(es) could be filled, but make no whole step of 3"
    ]
    assert planned(sources, num_batches=8, on_exhausted="stop").preview()["warnings"] == []
