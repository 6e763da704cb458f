"""Kinds of mixture: what a saved plan says makes the same mixture again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixcore import RowMap
from pipeline.manifest import Manifest, ManifestError
from pipeline.mixtures import mixture_of, rows_used
from pipeline.plan import Plan, plan
from pipeline.storage import Folder

from .mixes import WEIGHTS, config, write_sources

KINDS: dict[str, dict[str, Any]] = {
    "weighted": {"num_batches": 9},
    "frame_budget": {"frame_budget": 60, "pool_size": 30, "length_of": "text", "num_batches": 17},
    "dropping": {"frame_budget": 12, "pool_size": 30, "length_of": "text", "on_too_long": "drop"},
    "reservoir": {"batch_size": 7, "max_simultaneous": 2, "passes": 3, "seed": 2**61},
    "endless": {"batch_size": 7, "max_simultaneous": 2, "num_batches": 30},
}


def planned(folder: Path, kind: str) -> Plan:
    write_sources(folder / "data", web=[40, 0, 60], code=[50, 23], books=[31])
    settings = config(folder, WEIGHTS)
    if kind != "weighted":
        del settings["batch_size"]
        for dataset in settings["datasets"].values():
            del dataset["weight"]
        settings["mixture"] = "reservoir" if kind in ("reservoir", "endless") else "frame_budget"
    return plan({**settings, **KINDS[kind]}).save()


def same(a: RowMap, b: RowMap) -> bool:
    fields = ("batch", "dataset", "start", "count", "epoch")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_plan_makes_the_same_mixture_again(kind: str, tmp_path: Path) -> None:
    plan_ = planned(tmp_path, kind)
    loaded = Plan.load(plan_.folder)
    assert loaded.mixture.num_batches == plan_.mixture.num_batches > 8
    boundaries = list(plan_.layout.boundaries())
    states = list(plan_.mixture.states(boundaries))
    assert list(loaded.mixture.states(boundaries)) == states
    kept = plan_.manifest.states(plan_.folder)
    for shard, state in enumerate(states[:-1]):
        assert kept[shard] == state
        batches = boundaries[shard + 1] - boundaries[shard]
        assert same(loaded.mixture.rows(state, batches), plan_.mixture.rows(state, batches))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_used_are_those_of_the_row_maps(kind: str, tmp_path: Path) -> None:
    mixture = planned(tmp_path, kind).mixture
    (state,) = mixture.states([0])
    rows = mixture.rows(state, mixture.num_batches)
    expected = [int(rows.count[rows.dataset == place].sum()) for place in range(3)]
    total, used = rows_used(mixture, [0, 3, 4, mixture.num_batches])
    assert used == expected
    assert total == rows.num_rows


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("weighted", {"kind": "curriculum"}, "'curriculum' is not known here; install a newer"),
        ("frame_budget", {"pool_size": 0}, r"mixture\.pool_size must be an integer above 0"),
        ("frame_budget", {"seed": -1}, "seed must be .* found -1"),
        ("reservoir", {"max_simultaneous": "x"}, r"mixture\.max_simultaneous must be an integer"),
        ("reservoir", {"passes": 1}, "num_batches must be at most 30"),
    ],
)
def test_a_damaged_mixture_is_told(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plan_ = planned(tmp_path, kind)
    document = dict(plan_.manifest.document)
    document["mixture"] = {**document["mixture"], **change}
    with pytest.raises(ManifestError, match=message):
        mixture_of(Manifest(document), plan_.folder)


def test_lengths_that_are_gone_or_damaged_are_told(tmp_path: Path) -> None:
    plan_ = planned(tmp_path, "frame_budget")
    path = tmp_path / "out" / plan_.manifest.document["tables"]["lengths"]["path"]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ManifestError, match=r"lengths-\w+\.parquet: is damaged: sha256"):
        mixture_of(plan_.manifest, Folder.at(str(tmp_path / "out")))
    path.unlink()
    with pytest.raises(ManifestError, match=r"lengths-\w+\.parquet: cannot be read"):
        Plan.load(plan_.folder)
