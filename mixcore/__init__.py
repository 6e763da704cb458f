"""Deterministic dataset mixtures, known in full before any item is read: NumPy only, no I/O."""

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
from .weighted import DataBatcher, DatasetExhausted, WeightedMixture

__all__ = [
    "Allocation",
    "BatchStream",
    "BudgetError",
    "DataBatcher",
    "DatasetExhausted",
    "EpochPlan",
    "FrameBudgetMixture",
    "FrameBudgetSampler",
    "Mixture",
    "RowMap",
    "SamplerPosition",
    "State",
    "WeightedMixture",
]
