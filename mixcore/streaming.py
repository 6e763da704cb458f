"""Samples of many children, few of them open at once: torch datasets where torch is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from .mixture import State
from .reservoir import NoSamples, Reservoir, Setup
from .weighted import Registry

__all__ = [
    "ChildError",
    "NoSamples",
    "OpensAtOffset",
    "RegistryChild",
    "StreamingDataset",
    "StreamingDatasetNoIndex",
]

Sample = TypeVar("Sample")
Sample_co = TypeVar("Sample_co", covariant=True)

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:

    class IterableDataset(Generic[Sample_co]):  # type: ignore[no-redef]
        """Stands in for torch's, which asks for no more than ``__iter__``."""

    def get_worker_info() -> None:
        """There are no workers without torch."""


class OpensAtOffset(Protocol[Sample_co]):
    """A child that is restored without reading what was read before."""

    def get_iterator(self, offset: int) -> Iterable[Sample_co]:
        """The child's samples from the one numbered ``offset`` on; none at its end."""


class ChildError(RuntimeError):
    """A child failed to open or to give its next sample; ``index`` is its number."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(index, what)
        self.index = index
        self.what = what

    def __str__(self) -> str:
        return f"dataset {self.index} {self.what}"


class RegistryChild(Generic[Sample]):
    """Items ``start .. start + rows - 1`` of a registry's dataset, or all from ``start`` on."""

    def __init__(
        self, registry: Registry, name: str, start: int = 0, rows: int | None = None
    ) -> None:
        self.registry = registry
        self.name = name
        self.start = start
        self.rows = rows

    def __iter__(self) -> Iterator[Sample]:
        return self.get_iterator(0)

    def get_iterator(self, offset: int) -> Iterator[Sample]:
        """The items from the one numbered ``offset`` on, counted from ``start``."""
        left = None if self.rows is None else self.rows - offset
        if left == 0:
            return
        items = self.registry.get_iterator(self.name, offset=self.start + offset)
        try:
            yield from islice(items, left)
        finally:
            _close(items)


class _Samples(Iterator[Any]):
    """A dataset that is being read: iter() of this goes on, iter() of the dataset begins anew."""

    def __init__(self, dataset: Iterator[Any]) -> None:
        self._dataset = dataset

    def __next__(self) -> Any:
        return next(self._dataset)


class StreamingDataset(IterableDataset[tuple[int, Sample]], Generic[Sample]):
    """Samples ``(child's index, sample)`` of many children, at most ``max_simultaneous`` open.

    Each sample comes from an open child picked at random. A child that ends is returned to the
    reservoir and another one is opened in its stead, for ever, or with ``passes`` until each has
    been read so many times, pass by pass. Children are dealt out in strides over ranks and
    DataLoader workers; a worker without children has no samples. Any sample is one, also None.
    Random choices follow from ``seed``, rank and worker alone (see ``reservoir.Reservoir``).

    ``iter()`` of the dataset begins anew, unless a checkpoint was loaded since the last one; what
    it returns goes on, and so does ``next()`` of the dataset. A checkpoint is exact between any two
    samples. It holds offsets, and children that are ``OpensAtOffset`` are opened at theirs. A child
    that has ``state_dict`` and ``load_state_dict``, or else its iterator, stores and loads a state
    of its own; when a child has loaded one, its next ``iter()`` must go on from there. All others
    are read from the start, and what comes before the offset is dropped.

    ``datasets`` are all children, ``worker_datasets`` this worker's by index, ``iterators`` the
    open ones, ``reservoir`` indices, the first ``reservoir_pointer`` of them open.

    Raises ValueError if no datasets are provided, and for what ``reservoir.Setup`` refuses.
    """

    def __init__(
        self,
        datasets: Collection[Iterable[Sample] | OpensAtOffset[Sample]],
        max_simultaneous: int,
        *,
        seed: int = 0,
        passes: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.datasets = [*datasets]
        if not self.datasets:
            raise ValueError("no datasets are provided, expected at least one")
        setup = Setup(len(self.datasets), max_simultaneous, seed, passes, rank, world_size)
        self.max_simultaneous = setup.max_simultaneous
        self.iterators: dict[int, Iterator[Sample]] = {}
        self._child_states: dict[int, Any] = {}  # for children that are to be opened
        self._go_on = False  # at the next iter()
        self._begin(_here(setup).reservoir())

    @property
    def reservoir(self) -> list[int]:
        """Indices of this worker's children, the open ones first; with ``passes`` only these."""
        return self._reservoir.reservoir

    @property
    def reservoir_pointer(self) -> int:
        """How many children are open."""
        return self._reservoir.pointer

    def __iter__(self) -> Iterator[tuple[int, Sample]]:
        """Begin anew, or go on from a checkpoint that was loaded since the last ``iter()``.

        Raises ValueError where that was loaded for another DataLoader worker.
        """
        loaded = self._reservoir.setup
        here = _here(loaded)
        if not self._go_on:
            self._close_all()
            self._begin(here.reservoir())
        elif loaded != here:
            raise ValueError(
                f"the checkpoint is for worker {loaded.worker} of {loaded.workers},"
                f" this is worker {here.worker} of {here.workers}"
            )
        self._go_on = False
        return _Samples(self)

    def __next__(self) -> tuple[int, Sample]:
        """The next sample, with the index of its child.

        Raises ChildError, from the child's own exception, where a child cannot be opened or read.
        No sample is skipped then: a further call opens that child again at its offset. Raises
        NoSamples once every child was found empty.
        """
        reservoir = self._reservoir
        while True:
            if len(self.iterators) < reservoir.limit or not reservoir.limit:
                self.fill_reservoir()
                if not reservoir.pointer:
                    raise StopIteration
            place = self.sample_reservoir_id()
            child = reservoir.reservoir[place]
            try:
                sample = next(self.iterators[child])
            except StopIteration:
                self.return_dataset(place)
                continue
            except BaseException as error:
                # A generator that has raised would look like one that has ended.
                reservoir.undo_sample()
                _close(self.iterators.pop(child))
                if isinstance(error, Exception):
                    raise _child_error(child, error) from error
                raise
            reservoir.take(child)
            return child, sample

    def swap_reservoir(self, a: int, b: int) -> None:
        """Exchange two places. Raises ValueError if the child of just one of them is open."""
        self._reservoir.swap(a, b)

    def fill_reservoir(self) -> None:
        """Open children until as many are open as may be.

        Raises ChildError for one that cannot be opened; a further call tries it again. Raises
        NoSamples where every child was found empty since the last sample.
        """
        reservoir = self._reservoir
        places = reservoir.fill()
        if len(self.iterators) + len(places) < reservoir.pointer:  # some were to be opened before
            places = range(reservoir.pointer)
        for place in places:
            child = reservoir.reservoir[place]
            if child not in self.iterators:
                try:
                    self.iterators[child] = self._open(child, reservoir.offsets[child])
                except Exception as error:
                    raise _child_error(child, error) from error
                self._child_states.pop(child, None)

    def sample_reservoir_id(self) -> int:
        """Draw an open place. Raises IndexError where none is open."""
        return self._reservoir.sample()

    def return_dataset(self, reservoir_id: int) -> None:
        """Close the child at an open place, and put it behind the open ones.

        Raises IndexError for a place that is not open.
        """
        child = self.reservoir[reservoir_id]
        self._reservoir.give_back(reservoir_id)
        self._child_states.pop(child, None)
        _close(self.iterators.pop(child, None))

    def state_dict(self) -> State:
        """A checkpoint: integers and lists, and the states of children that have their own."""
        return self._reservoir.state(self._states_of_children())

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint of as many children under the same settings.

        Children are opened when the next sample is asked for. Raises ValueError for anything but
        a checkpoint of the same settings, rank and worker; then the dataset stays as it was.
        """
        reservoir = _here(self._reservoir.setup).reservoir()
        child_states = reservoir.load(state)
        self._close_all()
        self._begin(reservoir)
        self._child_states = child_states
        self._go_on = True

    def close(self) -> None:
        """Close the open children; ``next()`` would open them again where they were."""
        self._child_states = self._states_of_children()
        self._close_all()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but the open iterators, which the copy opens again."""
        return {**self.__dict__, "iterators": {}, "_child_states": self._states_of_children()}

    def _begin(self, reservoir: Reservoir) -> None:
        self._reservoir = reservoir
        self.worker_datasets = {child: self.datasets[child] for child in reservoir.children}
        self._child_states = {}

    def _open(self, child: int, offset: int) -> Iterator[Sample]:
        dataset = self.worker_datasets[child]
        if hasattr(dataset, "get_iterator"):
            return iter(dataset.get_iterator(offset))
        if child in self._child_states:
            if hasattr(dataset, "load_state_dict"):
                dataset.load_state_dict(self._child_states[child])
                return iter(dataset)
            stateful: Any = iter(dataset)
            stateful.load_state_dict(self._child_states[child])
            return stateful  # type: ignore[no-any-return]
        iterator = iter(dataset)
        try:
            dropped = sum(1 for _ in islice(iterator, offset))
            if dropped < offset:
                raise ValueError(f"expected at least {offset} samples as before, found {dropped}")
        except BaseException:
            _close(iterator)
            raise
        return iterator

    def _states_of_children(self) -> dict[int, Any]:
        states = {**self._child_states}
        for child, iterator in self.iterators.items():
            dataset = self.worker_datasets[child]
            if hasattr(dataset, "get_iterator"):
                continue
            for source in (dataset, iterator):
                if hasattr(source, "state_dict"):
                    states[child] = source.state_dict()
                    break
        return states

    def _close_all(self) -> None:
        while self.iterators:
            _close(self.iterators.popitem()[1])


class StreamingDatasetNoIndex(StreamingDataset[Sample]):
    """The samples of a ``StreamingDataset`` without the indices of their children."""

    def __iter__(self) -> Iterator[Sample]:  # type: ignore[override]
        """As in ``StreamingDataset``."""
        samples: Iterator[Any] = super().__iter__()
        return samples

    def __next__(self) -> Sample:  # type: ignore[override]
        """The next sample; raises as in ``StreamingDataset``."""
        return super().__next__()[1]


def _here(setup: Setup) -> Setup:
    """The setup of the DataLoader worker that runs this."""
    info = get_worker_info()
    if info is None:
        return replace(setup, worker=0, workers=1)
    return replace(setup, worker=info.id, workers=info.num_workers)


def _child_error(child: int, error: Exception) -> ChildError:
    return ChildError(child, f"raised {type(error).__name__}: {error}")


def _close(iterator: Any) -> None:
    if hasattr(iterator, "close"):
        with suppress(Exception):  # nobody reads on, and a first error must not be hidden
            iterator.close()
