"""From config and sources to a plan: length, layout, identities, preview, and refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import ConfigError
from pipeline.manifest import order_identity
from pipeline.mixtures import order_settings
from pipeline.plan import Plan, PlanError, plan
from pipeline.shard import ShardError
from pipeline.storage import Folder

from .mixes import WEIGHTS, config, table, write_sources


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
    datasets = [("ä", {"text": "body"}, (10, 90), files), ("no", None, (0, 60), files[:1])]
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
    assert loaded.catalog == saved.catalog
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
    with pytest.raises(ShardError, match=r"column named 'mix_row'.*columns: \{my_mix_row: mix_row"):
        plan(config(tmp_path, {"a": 1}, num_batches=2))


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
