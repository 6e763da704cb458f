"""The kinds of mixture: what a manifest records of each, and how it is made again from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mixcore import (
    Allocation,
    FrameBudgetMixture,
    FrameBudgetSampler,
    Mixture,
    ReservoirMixture,
    WeightedMixture,
)

from .manifest import MANIFEST, Manifest, ManifestError, count_at, each_at, text_at, value_at
from .storage import Folder

LENGTHS = "lengths"
_LENGTHS_PER_GROUP = 1 << 20
_SAMPLER = ("frame_budget", "pool_size", "max_items", "seed", "stream")
_ORDER = {
    "frame_budget": (*_SAMPLER, "lengths", "on_too_long"),
    "reservoir": ("batch_size", "max_simultaneous", "seed", "endless"),
}


def settings_of(mixture: Mixture) -> dict[str, Any]:
    """The manifest's ``mixture``: all that makes it, beside datasets and tables."""
    found: dict[str, Any] = {
        "kind": mixture.state_kind,
        "state_kind": mixture.state_kind,
        "rows_per_batch": mixture.rows_per_batch,
    }
    if isinstance(mixture, WeightedMixture):
        allocation = mixture.allocation
        return {
            **found,
            "batch_size": allocation.batch_size,
            "repeat": mixture.repeat,
            "arithmetic": allocation.arithmetic,
        }
    if isinstance(mixture, FrameBudgetMixture):
        return {**found, **{name: getattr(mixture.sampler, name) for name in _SAMPLER}}
    assert isinstance(mixture, ReservoirMixture)
    return {
        **found,
        "batch_size": mixture.batch_size,
        "max_simultaneous": mixture.max_simultaneous,
        "seed": mixture.seed,
        "passes": mixture.passes,
        "endless": mixture.passes is None,
    }


def order_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """What of a manifest decides the order of items, beside what its datasets hold."""
    mixture = document["mixture"]
    kind = mixture["kind"]
    if kind == "weighted":
        return {
            "mixture": {"kind": kind},
            "weights": [int(entry["weight"]) for entry in document["datasets"]],
            "batch_size": int(mixture["batch_size"]),
        }
    return {"mixture": {"kind": kind, **{key: mixture[key] for key in _ORDER[kind]}}}


def mixture_of(manifest: Manifest, folder: Folder) -> Mixture:
    """The mixture that decided a mix's order, from its manifest and tables.

    Raises:
        ManifestError: a kind that this version does not know, or a damaged one.
    """
    document = manifest.document
    kind = document["mixture"]["kind"]
    makers = {"weighted": _weighted, "frame_budget": _frame_budget, "reservoir": _reservoir}
    if kind not in makers:
        raise ManifestError(
            f"{folder.root}/{MANIFEST}: its mixture kind {kind!r} is not known here; install a "
            "newer mixshards"
        )
    try:
        return makers[kind](manifest, folder)
    except ManifestError:
        raise
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ManifestError(
            f"{folder.root}/{MANIFEST}: its mixture is damaged: {error}; restore the file, or "
            "build with --overwrite"
        ) from error


def _rows(document: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(
        count_at(document, "datasets", place, "rows") for place in each_at(document, "datasets")
    )


def _weighted(manifest: Manifest, folder: Folder) -> Mixture:
    document = manifest.document
    weights = {
        text_at(document, "datasets", i, "name"): count_at(document, "datasets", i, "weight")
        for i in each_at(document, "datasets")
    }
    return WeightedMixture(
        allocation=Allocation(weights, count_at(document, "mixture", "batch_size")),
        dataset_rows=_rows(document),
        num_batches=manifest.layout.num_batches,
        repeat=bool(value_at(document, "mixture", "repeat")),
    )


def _frame_budget(manifest: Manifest, folder: Folder) -> Mixture:
    settings = manifest.document["mixture"]
    lengths = manifest.table(folder, LENGTHS, ["length"]).column(0).to_numpy()
    return frame_budget(
        manifest.names,
        _rows(manifest.document),
        lengths,
        drop=settings["on_too_long"] == "drop",
        num_batches=manifest.layout.num_batches,
        frame_budget=count_at(manifest.document, "mixture", "frame_budget"),
        pool_size=count_at(manifest.document, "mixture", "pool_size"),
        max_items=None
        if settings["max_items"] is None
        else count_at(manifest.document, "mixture", "max_items"),
        seed=int(settings["seed"]),
        stream=int(settings["stream"]),
    )


def frame_budget(
    names: tuple[str, ...],
    dataset_rows: tuple[int, ...],
    lengths: NDArray[np.int64],
    *,
    drop: bool,
    num_batches: int,
    **parameters: Any,
) -> FrameBudgetMixture:
    """The mixture over items of these lengths; ``drop`` leaves out those past the budget.

    Raises ValueError as FrameBudgetSampler and FrameBudgetMixture do.
    """
    kept = None
    if drop:
        fits = lengths <= parameters["frame_budget"]
        if not fits.all():
            kept = np.flatnonzero(fits)
            lengths = lengths[kept]
    sampler = FrameBudgetSampler(lengths, **parameters)
    return FrameBudgetMixture(sampler, names, dataset_rows, num_batches, kept)


def _reservoir(manifest: Manifest, folder: Folder) -> Mixture:
    document = manifest.document
    table = manifest.table(folder, "sources", ["dataset", "first_row", "rows"]).to_pydict()
    index = {name: place for place, name in enumerate(manifest.names)}
    dataset = np.array([index[name] for name in table["dataset"]], np.int32)
    passes = value_at(document, "mixture", "passes")
    return ReservoirMixture(
        manifest.names,
        *child_ranges(
            dataset,
            np.array(table["first_row"], np.int64),
            np.array(table["rows"], np.int64),
            np.array(_rows(document), np.int64),
        ),
        max_simultaneous=count_at(document, "mixture", "max_simultaneous"),
        seed=int(value_at(document, "mixture", "seed")),
        batch_size=count_at(document, "mixture", "batch_size"),
        num_batches=manifest.layout.num_batches,
        passes=None if passes is None else count_at(document, "mixture", "passes"),
    )


def child_ranges(
    dataset: NDArray[np.int32],
    first_row: NDArray[np.int64],
    rows: NDArray[np.int64],
    dataset_rows: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Every source file as a child: its dataset, first row in the dataset, and rows taken."""
    start = np.maximum(first_row, 0)
    stop = np.minimum(first_row + rows, dataset_rows[dataset])
    return dataset, start, np.maximum(stop - start, 0)


def lengths_table(lengths: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """The lengths table: a row an item, in batches of bounded size."""
    for first in range(0, len(lengths), _LENGTHS_PER_GROUP):
        part = lengths[first : first + _LENGTHS_PER_GROUP]
        yield pa.record_batch([pa.array(part)], names=["length"])


def rows_used(mixture: Mixture, boundaries: list[int]) -> tuple[int, list[int]]:
    """How many rows a mixture gives in all, and of each dataset."""
    if isinstance(mixture, WeightedMixture):
        used = list(mixture.allocation.offsets(mixture.num_batches))
        return sum(used), used
    total = np.zeros(len(mixture.names), np.int64)
    for state, first, stop in zip(
        mixture.states(boundaries[:-1]), boundaries[:-1], boundaries[1:], strict=True
    ):
        part = mixture.rows(state, stop - first)
        # Exact, though weights are floats: a shard's rows stay far below 2^53.
        given = np.bincount(part.dataset, weights=part.count, minlength=len(total))
        total += given.astype(np.int64)
    return int(total.sum()), total.tolist()
