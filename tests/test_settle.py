"""From config and catalog to a mixture: lengths of mixes, dropped items, files as children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mixcore import FrameBudgetMixture, FrameBudgetSampler, ReservoirMixture
from pipeline.lengths import LengthError
from pipeline.plan import Plan, plan
from pipeline.settle import PlanError

LENGTHS = {"a": [5, 9, 2, 7, 30], "b": [4, 4, 31]}


def frames(folder: Path, **keys: Any) -> Plan:
    """A frame-budget plan over two datasets whose lengths are ``LENGTHS``."""
    for name, lengths in LENGTHS.items():
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": lengths}), folder / "data" / name / "x.parquet")
    return plan(
        {
            "mixture": "frame_budget",
            "output": str(folder / "out"),
            "frame_budget": 31,
            "pool_size": 4,
            "length_column": "n",
            "datasets": {name: {"path": str(folder / "data" / name)} for name in LENGTHS},
            **keys,
        }
    )


def files(folder: Path, counts: list[int], **keys: Any) -> Plan:
    """A reservoir plan over one dataset of files with so many rows."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(counts):
        data = pa.table({"x": np.arange(rows)})
        pq.write_table(data, folder / "data" / f"{number:03d}.parquet")
    return plan(
        {
            "mixture": "reservoir",
            "output": str(folder / "out"),
            "batch_size": 3,
            "max_simultaneous": 2,
            "datasets": {"d": {"path": str(folder / "data")}},
            **keys,
        }
    )


def test_epochs_make_the_length_of_a_frame_budget_mix(tmp_path: Path) -> None:
    sampler = FrameBudgetSampler(
        [*LENGTHS["a"], *LENGTHS["b"]], frame_budget=31, seed=0, pool_size=4
    )
    found = frames(tmp_path, epochs=3)
    assert found.layout.num_batches == sum(sampler.num_batches(epoch) for epoch in range(3))
    document = found.manifest.document
    assert document["num_rows"] == 3 * 8
    assert [entry["rows_used"] for entry in document["datasets"]] == [15, 9]
    assert [entry["epochs"] for entry in document["datasets"]] == [3, 3]
    assert document["mixture"]["rows_per_batch"] is None


def test_a_frame_budget_mix_may_end_within_an_epoch(tmp_path: Path) -> None:
    found = frames(tmp_path, num_batches=2)
    assert found.layout.num_batches == 2
    used = sum(entry["rows_used"] for entry in found.manifest.document["datasets"])
    assert used == found.manifest.document["num_rows"] < 8


def test_items_past_the_budget_are_an_error_that_names_them_all(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        frames(tmp_path, frame_budget=8)
    assert str(error.value) == (
        "dataset 'a': 2 of 5 item(s) are longer than frame_budget 8: row 1 with 9, row 4 with 30\n"
        "dataset 'b': 1 of 3 item(s) are longer than frame_budget 8: row 2 with 31\n"
        "The way out: a larger frame_budget, or on_too_long: drop, which leaves them out and "
        "counts them"
    )


def test_dropped_items_are_counted_and_warned_of(tmp_path: Path) -> None:
    found = frames(tmp_path, frame_budget=8, on_too_long="drop")
    dropped = [entry["rows_dropped"] for entry in found.manifest.document["datasets"]]
    assert dropped == [2, 1]
    assert found.manifest.document["num_rows"] == 5
    assert (
        "dataset 'a': 2 of 5 items are longer than frame_budget and left out"
        in (found.preview()["warnings"])
    )
    assert isinstance(found.mixture, FrameBudgetMixture)
    assert found.mixture.kept is not None
    assert found.mixture.kept.tolist() == [0, 2, 3, 5, 6]


def test_a_budget_that_no_item_fits_is_refused_even_where_items_are_dropped(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="every item is longer than frame_budget 1"):
        frames(tmp_path, frame_budget=1, on_too_long="drop")


def test_a_length_column_outside_of_the_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LengthError, match="length_column: no column 'frames'; the datasets have n"):
        frames(tmp_path, length_column="frames")


def test_each_file_is_a_child_also_an_empty_one(tmp_path: Path) -> None:
    found = files(tmp_path, [4, 0, 1], passes=2)
    assert isinstance(found.mixture, ReservoirMixture)
    assert found.mixture.child_rows.tolist() == [4, 0, 1]
    assert found.layout.num_batches == 4  # ten rows, three a batch
    assert found.manifest.rows_per_batch is None
    (entry,) = found.manifest.document["datasets"]
    assert (entry["files"], entry["rows_used"]) == (3, 10)


def test_held_out_rows_shorten_the_children(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    dataset = {"path": str(tmp_path / "data"), "rows": [2, 5]}
    found = files(tmp_path, [4, 0, 3, 2], num_batches=2, datasets={"d": dataset})
    assert isinstance(found.mixture, ReservoirMixture)
    assert found.mixture.child_rows.tolist() == [2, 0, 1, 0]
    assert found.mixture.child_start.tolist() == [0, 2, 2, 5]
    assert found.manifest.rows_per_batch == 3


def test_many_files_of_one_row_are_planned(tmp_path: Path) -> None:
    found = files(tmp_path, [1] * 300, passes=1, max_simultaneous=16)
    assert found.manifest.document["num_rows"] == 300


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"epochs": 2}, True),
        ({"batches_per_shard": 1}, True),
        ({"seed": 1}, False),
        ({"stream": 1}, False),
        ({"pool_size": 5}, False),
        ({"frame_budget": 32}, False),
        ({"max_items": 2}, False),
    ],
)
def test_what_decides_the_order_of_a_frame_budget_mix_is_in_its_identity(
    change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    one, other = frames(tmp_path), frames(tmp_path, **change)
    assert (one.manifest.order_id == other.manifest.order_id) is same


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"passes": 2}, True),
        ({"seed": 1}, False),
        ({"max_simultaneous": 1}, False),
        ({"batch_size": 2}, False),
        ({"passes": None, "num_batches": 1}, False),
    ],
)
def test_what_decides_the_order_of_a_reservoir_is_in_its_identity(
    change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    one = files(tmp_path, [4, 3], passes=1)
    other = files(tmp_path, [4, 3], **{"passes": 1, **change})
    assert (one.manifest.order_id == other.manifest.order_id) is same
