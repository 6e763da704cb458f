"""From config and catalog to a mixture: how long it is, and what its datasets give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixcore import (
    Allocation,
    Mixture,
    ReservoirMixture,
    WeightedMixture,
)
from mixcore.frame_budget import batches_in_epochs
from mixcore.reservoir import total_batches
from mixcore.weighted import batches_filled, batches_until_seen, first_unfillable

from .catalog import Catalog
from .config import Config, FrameBudgetConfig, ReservoirConfig, WeightedConfig
from .lengths import scan_lengths, too_long
from .mixtures import child_ranges, frame_budget, settings_of
from .planned import PlanError

_MOST_BATCHES = 10**8


@dataclass(frozen=True)
class Settled:
    """A mixture and what a manifest says of it.

    ``settings`` are the manifest's ``mixture``, ``datasets`` what it says of each dataset beside
    its rows, ``batch_rows`` the mean rows of a batch, ``shares`` the expected part of each dataset.
    ``lengths`` are those of all items where the mixture goes by them.
    """

    mixture: Mixture
    settings: dict[str, Any]
    datasets: list[dict[str, Any]]
    batch_rows: float
    shares: list[float]
    lengths: NDArray[np.int64] | None = field(default=None, repr=False)


def settle(config: Config, catalog: Catalog) -> Settled:
    """The mixture that a config asks for over the datasets of a catalog.

    Raises:
        PlanError: the datasets cannot give it.
        LengthError: they do not say how long their items are.
    """
    if isinstance(config, WeightedConfig):
        return _weighted(config, catalog)
    if isinstance(config, FrameBudgetConfig):
        return _frame_budget(config, catalog)
    return _reservoir(config, catalog)


def _weighted(config: WeightedConfig, catalog: Catalog) -> Settled:
    weights = dict(zip(config.datasets, config.weights, strict=True))
    allocation = Allocation(weights, config.batch_size)
    mixture = WeightedMixture(
        allocation=allocation,
        dataset_rows=tuple(dataset.num_rows for dataset in catalog.datasets),
        num_batches=_length(config, allocation, catalog),
        repeat=config.on_exhausted == "repeat",
    )
    shares = [weight / allocation.total for weight in allocation.weights]
    return Settled(
        mixture,
        settings_of(mixture),
        [
            {"weight": weight, "share_asked": share}
            for weight, share in zip(allocation.weights, shares, strict=True)
        ],
        config.batch_size,
        shares,
    )


def _frame_budget(config: FrameBudgetConfig, catalog: Catalog) -> Settled:
    column = config.length_column or config.length_of
    assert column is not None  # the config has one of the two
    lengths = scan_lengths(catalog, column, of=config.length_column is None)
    over = too_long(catalog, lengths, config.frame_budget)
    if over and config.on_too_long == "error":
        raise PlanError(
            "\n".join(over) + "\nThe way out: a larger frame_budget, or on_too_long: drop, which "
            "leaves them out and counts them"
        )
    if lengths.min() > config.frame_budget:
        raise PlanError(f"every item is longer than frame_budget {config.frame_budget}")
    rows = [dataset.num_rows for dataset in catalog.datasets]
    mixture = frame_budget(
        tuple(dataset.name for dataset in catalog.datasets),
        tuple(rows),
        lengths,
        drop=bool(over),
        num_batches=config.num_batches or 0,
        frame_budget=config.frame_budget,
        pool_size=config.pool_size,
        max_items=config.max_items,
        seed=config.seed,
        stream=config.stream,
    )
    sampler = mixture.sampler
    if config.epochs is not None:
        mixture = replace(mixture, num_batches=batches_in_epochs(sampler, config.epochs))
    of_dataset = np.repeat(np.arange(len(rows)), rows)
    dropped = np.bincount(of_dataset[lengths > config.frame_budget], minlength=len(rows)).tolist()
    how = "column" if config.length_column else "of"
    settings = {
        **settings_of(mixture),
        "lengths": {how: column},
        "on_too_long": config.on_too_long,
    }
    kept = [count - lost for count, lost in zip(rows, dropped, strict=True)]
    return Settled(
        mixture,
        settings,
        [{"rows_dropped": lost} for lost in dropped],
        sampler.num_items / sampler.num_batches(0),
        [count / sampler.num_items for count in kept],
        lengths,
    )


def _reservoir(config: ReservoirConfig, catalog: Catalog) -> Settled:
    files = [
        (place, file.first_row, file.num_rows)
        for place, dataset in enumerate(catalog.datasets)
        for file in dataset.files
    ]
    dataset, first_row, num_rows = np.array(files, np.int64).T
    rows = np.array([dataset.num_rows for dataset in catalog.datasets], np.int64)
    parts = child_ranges(dataset.astype(np.int32), first_row, num_rows, rows)
    num_batches = config.num_batches or total_batches(parts[2], config.batch_size, config.passes)
    assert num_batches is not None  # the config has one of the two
    mixture = ReservoirMixture(
        tuple(dataset.name for dataset in catalog.datasets),
        *parts,
        max_simultaneous=config.max_simultaneous,
        seed=config.seed,
        batch_size=config.batch_size,
        num_batches=num_batches,
        passes=config.passes,
    )
    total = int(rows.sum())
    return Settled(
        mixture,
        settings_of(mixture),
        [{"files": int(count)} for count in np.bincount(dataset, minlength=len(rows))],
        config.batch_size,
        [count / total for count in rows.tolist()],
    )


def _length(config: WeightedConfig, allocation: Allocation, catalog: Catalog) -> int:
    """How many batches the mix has under the config's policy for datasets that run out.

    Raises:
        PlanError: a dataset cannot give what the mix needs of it.
    """
    rows = [dataset.num_rows for dataset in catalog.datasets]
    step = config.batches_per_step or 1
    if config.num_batches is None:
        _check_ends(config, allocation, rows)
    if config.on_exhausted == "repeat":
        if config.num_batches is not None:
            return config.num_batches
        return -(-batches_until_seen(allocation, rows) // step) * step
    if config.on_exhausted == "stop":
        filled = batches_filled(allocation, rows)
        wanted = filled if config.num_batches is None else min(filled, config.num_batches)
        if wanted < step:
            needed = allocation.offsets(step)
            name, has, need = next(
                (name, has, need)
                for name, has, need in zip(allocation.names, rows, needed, strict=True)
                if need > has
            )
            raise PlanError(
                f"dataset {name!r}: has {has} row(s), but the first {step} batch(es) need {need} "
                "of them, so not one step can be filled; give it more data or less weight, or set "
                "on_exhausted: repeat"
            )
        return wanted - wanted % step
    assert config.num_batches is not None  # the config refuses `error` without a length
    first = first_unfillable(allocation, rows, config.num_batches)
    offsets = allocation.offsets(config.num_batches)
    lacking = [
        f"dataset {name!r}: has {has:,} row(s), but {config.num_batches:,} batches need {need:,}; "
        f"the first batch it cannot fill is {batch:,}"
        for name, has, need, batch in zip(allocation.names, rows, offsets, first, strict=True)
        if batch is not None
    ]
    if lacking:
        least = min(batch for batch in first if batch is not None)
        shorter = f"set num_batches to at most {least}, " if least else ""
        raise PlanError(
            "\n".join(lacking)
            + f"\nThe way out: {shorter}give more data or less weight, or choose on_exhausted: "
            "stop (end there) or repeat (begin such a dataset again)"
        )
    return config.num_batches


def _check_ends(config: WeightedConfig, allocation: Allocation, rows: Sequence[int]) -> None:
    """Refuse a mix whose length was left to the data, and is beyond what anybody trains on."""
    batches = [
        count * allocation.total // (allocation.batch_size * weight)
        for count, weight in zip(rows, allocation.weights, strict=True)
    ]
    decides = max if config.on_exhausted == "repeat" else min
    length, name, weight = decides(zip(batches, allocation.names, allocation.weights, strict=True))
    if length > _MOST_BATCHES:
        raise PlanError(
            f"dataset {name!r}: at weight {weight} of {allocation.total} it is used up after about "
            f"{length:,} batches, and only then on_exhausted: {config.on_exhausted} ends the mix; "
            "set num_batches, or give it more weight"
        )
