"""Deterministic dataset mixtures, known in full before any item is read: NumPy only, no I/O."""

from typing import TYPE_CHECKING

from .allocation import Allocation
from .frame_budget import (
    BatchStream,
    BudgetError,
    EpochPlan,
    FrameBudgetMixture,
    FrameBudgetSampler,
    SamplerPosition,
)
from .mixture import Mixture, RowMap, State
from .reservoir import NoSamples, ReservoirMixture
from .weighted import DataBatcher, DatasetExhausted, WeightedMixture

if TYPE_CHECKING:
    from .streaming import (
        ChildError,
        RegistryChild,
        StreamingDataset,
        StreamingDatasetNoIndex,
    )

__all__ = [
    "Allocation",
    "BatchStream",
    "BudgetError",
    "ChildError",
    "DataBatcher",
    "DatasetExhausted",
    "EpochPlan",
    "FrameBudgetMixture",
    "FrameBudgetSampler",
    "Mixture",
    "NoSamples",
    "RegistryChild",
    "ReservoirMixture",
    "RowMap",
    "SamplerPosition",
    "State",
    "StreamingDataset",
    "StreamingDatasetNoIndex",
    "WeightedMixture",
]


def __getattr__(name: str) -> object:
    """Reach the streaming classes when they are asked for, since they import torch where it is."""
    if name in ("ChildError", "RegistryChild", "StreamingDataset", "StreamingDatasetNoIndex"):
        from . import streaming

        return getattr(streaming, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
