"""Deterministic dataset mixtures, known in full before any item is read: NumPy only, no I/O."""

from .allocation import Allocation
from .mixture import Mixture, RowMap, State
from .weighted import DataBatcher, DatasetExhausted, WeightedMixture

__all__ = [
    "Allocation",
    "DataBatcher",
    "DatasetExhausted",
    "Mixture",
    "RowMap",
    "State",
    "WeightedMixture",
]
