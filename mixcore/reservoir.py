"""The reservoir: few children open at once, one of them drawn at random for every sample.

One state machine serves both worlds. ``streaming.StreamingDataset`` takes one sample at a time
from it; ``ReservoirMixture`` plans thousands at once and turns to it only where a child ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .allocation import as_integer, checked_boundaries
from .mixture import RowMap, State
from .shuffle import Permutation

_ROWS_END = 2**60  # so that int64 holds sums of rows
_VISITS_END = 2**31  # an epoch is an int32
_DRAWS_END = 2**64
_WORDS = 4096  # of a stream, made ahead
_LEAST_BLOCK, _MOST_BLOCK = 128, 1 << 14  # draws looked at together
_CHILD_STATES = "child_states"


class NoSamples(RuntimeError):
    """Every child was opened since the last sample, and none had one."""

    def __init__(self, children: Sequence[int]) -> None:
        super().__init__(children)
        self.children = children

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.children[:10]))
        more = ", .." if len(self.children) > 10 else ""
        return f"none of {len(self.children)} datasets has a sample: {shown}{more}"


@dataclass(frozen=True)
class Setup:
    """What a stream of samples depends on, beside the children's samples.

    Children are numbered from 0 to ``datasets - 1`` and dealt out in strides over all workers of
    all ranks. Raises ValueError for values that are no integers, for ``datasets``,
    ``max_simultaneous``, ``passes``, ``world_size`` and ``workers`` below 1, for a negative seed,
    and for a rank or worker that is not below its number.
    """

    datasets: int
    max_simultaneous: int
    seed: int = 0
    passes: int | None = None
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "passes" and value is None:
                continue
            least = 0 if field.name in ("seed", "rank", "worker") else 1
            object.__setattr__(self, field.name, as_integer(field.name, value, least))
        for name, among in (("rank", "world_size"), ("worker", "workers")):
            if getattr(self, name) >= getattr(self, among):
                raise ValueError(
                    f"{name} must be below {among} {getattr(self, among)},"
                    f" found {getattr(self, name)}"
                )

    @property
    def children(self) -> range:
        """The children of this worker of this rank."""
        first = self.rank * self.workers + self.worker
        return range(first, self.datasets, self.world_size * self.workers)

    def reservoir(self) -> Reservoir:
        """A reservoir that stands before its first sample."""
        return EndlessReservoir(self) if self.passes is None else PassesReservoir(self)


class Reservoir(ABC):
    """Which child gives the next sample, where the end of a child is found only by reading on.

    ``reservoir`` lists children, the first ``pointer`` of them are open, and ``offsets`` says how
    many samples each of these has given. A child is found to have ended when it is drawn and has
    nothing: such a draw gives no sample, the child is given back, another one is opened.

    Each random choice takes a 64-bit word of the Philox stream of seed, rank and worker: draw k
    picks place ``(word[k] >> 32) * m >> 32`` of m. ``draws`` is the number of words taken.
    """

    def __init__(self, setup: Setup, reservoir: list[int]) -> None:
        self.setup = setup
        self.children = setup.children
        self.limit = min(setup.max_simultaneous, len(self.children))
        self.reservoir = reservoir
        self.pointer = 0
        self.offsets: dict[int, int] = {}
        self.draws = 0
        self._words = _Words(setup)
        self._found_empty: set[int] = set()  # since the last sample

    def swap(self, a: int, b: int) -> None:
        """Exchange the children of two places. Raises ValueError if just one of them is open."""
        if (a < self.pointer) != (b < self.pointer):
            raise ValueError(
                f"places {a} and {b} must both be open or both wait; open are {self.pointer}"
            )
        self.reservoir[a], self.reservoir[b] = self.reservoir[b], self.reservoir[a]

    def fill(self) -> range:
        """Open children until as many are open as may be; the places that were filled.

        Raises NoSamples where every child was found empty since the last sample.
        """
        if self._found_empty and len(self._found_empty) == len(self.children):
            raise NoSamples(self.children)
        before = self.pointer
        self._fill()
        return range(before, self.pointer)

    def sample(self) -> int:
        """Draw an open place. Raises IndexError where none is open."""
        if not self.pointer:
            raise IndexError("no dataset is open")
        return self._draw(self.pointer)

    def undo_sample(self) -> None:
        """Take back the last draw: it will be the next one."""
        self.draws -= 1

    def take(self, child: int) -> None:
        """An open child gave a sample."""
        self.offsets[child] += 1
        if self._found_empty:
            self._found_empty.clear()

    def give_back(self, place: int) -> None:
        """Close the child of an open place. Raises IndexError for a place that is not open."""
        if not 0 <= place < self.pointer:
            raise IndexError(f"place {place} is not open; open are {self.pointer}")
        child = self.reservoir[place]
        if not self.offsets.pop(child):
            self._found_empty.add(child)
        self.swap(place, self.pointer - 1)
        self.pointer -= 1
        self._given_back(child)

    def upcoming(self, count: int) -> NDArray[np.int64]:
        """The next ``count`` places to be drawn if no child ends; they are not drawn yet."""
        return self._words.span(self.draws, count) * self.pointer >> 32

    def state(self, child_states: Mapping[int, Any] | None = None) -> State:
        """A checkpoint between two samples: the setup, and integers and lists of integers.

        ``offsets`` are those of the open children in place order. ``child_states`` are states of
        open children's own, to be stored as they are.
        """
        self._fill()
        state = {
            **asdict(self.setup),
            "draws": self.draws,
            "reservoir": [*self.reservoir],
            "offsets": [self.offsets[child] for child in self.reservoir[: self.pointer]],
            **self._state(),
        }
        if child_states:
            state[_CHILD_STATES] = {str(child): own for child, own in child_states.items()}
        return state

    def load(self, state: Any) -> dict[int, Any]:
        """Go on from a checkpoint of the same setup; gives back the ``child_states`` in it.

        Raises ValueError for anything else; then nothing changes.
        """
        self._check_fields(state)
        draws = as_integer("draws", state["draws"], 0)
        if draws >= _DRAWS_END:
            raise ValueError(f"draws must be below 2**64, found {draws}")
        reservoir = _integers("reservoir", state["reservoir"])
        offsets = _integers("offsets", state["offsets"])
        if len(offsets) > self.limit:
            raise ValueError(
                f"offsets must be of at most {self.limit} open datasets, found {len(offsets)}"
            )
        open_children = reservoir[: len(offsets)]
        own = state.get(_CHILD_STATES, {})
        if not isinstance(own, Mapping) or not {*own} <= {*map(str, open_children)}:
            raise ValueError(f"{_CHILD_STATES} must map open datasets to states, found {own!r}")
        self._load(state, reservoir, len(offsets))
        self.draws = draws
        self.reservoir = reservoir
        self.pointer = len(offsets)
        self.offsets = dict(zip(open_children, offsets, strict=True))
        self._found_empty = set()
        return {child: own[str(child)] for child in open_children if str(child) in own}

    @abstractmethod
    def epoch(self, child: int) -> int:
        """How often an open child was begun before."""

    @abstractmethod
    def samples_left(self, rows: NDArray[np.int64]) -> int | None:
        """How many samples are to come from children of these rows; None without end."""

    @abstractmethod
    def _fill(self) -> None: ...

    @abstractmethod
    def _given_back(self, child: int) -> None:
        """What is done with a child that stands just behind the open ones."""

    @abstractmethod
    def _state(self) -> State:
        """The fields of a checkpoint that only this kind of reservoir has."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any], reservoir: list[int], num_open: int) -> None:
        """Take these fields over, or raise ValueError before anything changes."""

    def _open(self) -> None:
        self.offsets[self.reservoir[self.pointer]] = 0
        self.pointer += 1

    def _draw(self, among: int) -> int:
        word = self._words[self.draws]
        self.draws += 1
        return word * among >> 32

    def _check_fields(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ValueError(f"a checkpoint must be a dict, found {type(state).__name__}")
        setup = asdict(self.setup)
        for name, expected in setup.items():
            found = state.get(name, expected)
            if isinstance(found, bool) or found != expected:
                raise ValueError(f"the checkpoint is for {name} {found!r}, expected {expected!r}")
        expected_fields = [*setup, "draws", "reservoir", "offsets", *self._state()]
        if {*state} - {_CHILD_STATES} != {*expected_fields}:
            raise ValueError(
                f"a checkpoint must have exactly the fields {expected_fields}, found {[*state]}"
            )


class EndlessReservoir(Reservoir):
    """Children are begun again for ever, each time one picked at random among those that wait.

    ``reservoir`` lists all children of this worker, open ones first. A child that was just given
    back is picked again only where no other waits.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, [*setup.children])
        self._visits = [0] * len(self.children)
        self._just_given_back = False

    def epoch(self, child: int) -> int:
        """How often an open child was begun before."""
        return self._visits[self.children.index(child)]

    def samples_left(self, rows: NDArray[np.int64]) -> None:
        """None: there is no end."""

    def _fill(self) -> None:
        while self.pointer < self.limit:
            waiting = len(self.reservoir) - self.pointer
            # What was just given back stands first among those that wait.
            barred = 1 if self._just_given_back and waiting > 1 else 0
            self.swap(self.pointer, self.pointer + barred + self._draw(waiting - barred))
            self._just_given_back = False
            self._open()

    def _given_back(self, child: int) -> None:
        self._visits[self.children.index(child)] += 1
        self._just_given_back = True

    def _state(self) -> State:
        return {"visits": [*self._visits]}  # of all children in ascending order

    def _load(self, state: Mapping[str, Any], reservoir: list[int], num_open: int) -> None:
        visits = _integers("visits", state["visits"])
        if sorted(reservoir) != [*self.children]:
            raise ValueError(f"reservoir must hold each of {self.children} once")
        if num_open != self.limit:
            raise ValueError(f"offsets must be of the {self.limit} open datasets, found {num_open}")
        if len(visits) != len(self.children):
            raise ValueError(
                f"visits must be of all {len(self.children)} datasets, found {len(visits)}"
            )
        if max(visits, default=0) >= _VISITS_END:
            raise ValueError(f"visits must be below 2**31, found {max(visits)}")
        self._visits = visits
        self._just_given_back = False


class PassesReservoir(Reservoir):
    """Every child is opened once a pass, in an order that is shuffled anew for each pass.

    ``reservoir`` lists the open children only, so that a checkpoint never grows past
    ``max_simultaneous`` of them. A pass is drained before the next one begins: epochs never mix,
    and towards the end of each pass fewer children are open.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, [])
        self._passes = setup.passes or 0
        self._begin_pass(0)

    def epoch(self, child: int) -> int:
        """The pass."""
        return self._pass

    def samples_left(self, rows: NDArray[np.int64]) -> int:
        """How many samples are to come from children of these rows."""
        opened = self.children.start + self.children.step * self._order.values(
            np.arange(self._position)
        )
        given = rows[opened].sum() - sum(rows[self.reservoir]) + sum(self.offsets.values())
        mine = rows[self.children.start :: self.children.step].sum()
        return int((self._passes - self._pass) * mine - given)

    def _fill(self) -> None:
        if self.children and not self.pointer and self._position == len(self.children):
            self._begin_pass(self._pass + 1)
        if self._pass == self._passes:
            return
        while self.pointer < self.limit and self._position < len(self.children):
            self.reservoir.append(self.children[self._order.value(self._position)])
            self._position += 1
            self._open()

    def _given_back(self, child: int) -> None:
        self.reservoir.pop()

    def _begin_pass(self, number: int) -> None:
        self._pass = number
        self._position = 0  # how many children were opened in this pass
        self._order = self._order_of(number)

    def _order_of(self, number: int) -> Permutation:
        setup = self.setup
        return Permutation(len(self.children), setup.seed, number, setup.rank, setup.worker)

    def _state(self) -> State:
        return {"pass": self._pass, "position": self._position}

    def _load(self, state: Mapping[str, Any], reservoir: list[int], num_open: int) -> None:
        number = as_integer("pass", state["pass"], 0)
        position = as_integer("position", state["position"], 0)
        size = len(self.children)
        if number > self._passes:
            raise ValueError(f"pass must be at most {self._passes}, found {number}")
        last = 0 if number == self._passes else size
        if position > last:
            raise ValueError(f"position must be at most {last} in pass {number}, found {position}")
        # The reservoir is full unless the pass has no child left, and not empty unless it is over.
        least = min(self.limit, last) if position < last else min(1, last)
        if not least <= num_open <= position or num_open != len(reservoir):
            raise ValueError(
                f"reservoir and offsets must be of {least} to {min(self.limit, position)} open"
                f" datasets at position {position}, found {len(reservoir)} and {num_open}"
            )
        if len({*reservoir}) < num_open:
            raise ValueError(f"reservoir must hold no dataset twice, found {reservoir}")
        order = self._order_of(number)
        for child in reservoir:
            if child not in self.children or order.index(self.children.index(child)) >= position:
                raise ValueError(
                    f"dataset {child} is not among the first {position} of pass {number}"
                )
        self._pass, self._position, self._order = number, position, order


class _Words:
    """The upper halves of the words of a Philox stream, read from any place on."""

    def __init__(self, setup: Setup) -> None:
        self._key = np.random.SeedSequence(setup.seed, spawn_key=(setup.rank, setup.worker))
        self._first = 0
        self._made = np.empty(0, np.int64)

    def __getitem__(self, number: int) -> int:
        at = number - self._first
        if not 0 <= at < len(self._made):
            return self.span(number, 1).item()
        return self._made.item(at)

    def span(self, first: int, count: int) -> NDArray[np.int64]:
        """``count`` integers below 2**32 from word ``first`` on; a view, not to be changed."""
        at = first - self._first
        if at < 0 or at + count > len(self._made):
            generator = np.random.Philox(self._key)
            generator.advance(first // 4)  # a step of its counter makes four words
            words = generator.random_raw(first % 4 + max(count, _WORDS))[first % 4 :]
            self._made = (words >> np.uint64(32)).astype(np.int64)
            self._first, at = first, 0
        return self._made[at : at + count]


@dataclass(frozen=True, eq=False)
class ReservoirMixture:
    """The batches of a reservoir stream over children of known length.

    Child c is the rows ``child_start[c] ..`` of dataset ``child_dataset[c]`` (an index into
    ``names``), ``child_rows[c]`` of them; three integer arrays of one length.
    A batch is the next ``batch_size`` samples that a ``StreamingDataset`` over these children
    gives on one rank without workers; with ``passes`` the last one may be shorter. Its states are
    checkpoints of ``StreamingDataset``. Raises ValueError for the setups that ``Setup`` refuses,
    for children that are no ranges of the datasets, for a child or ``passes`` of 2**60 rows or
    more, and for batches that the children cannot fill.
    """

    names: tuple[str, ...]
    child_dataset: NDArray[np.int32]
    child_start: NDArray[np.int64]
    child_rows: NDArray[np.int64]
    max_simultaneous: int
    seed: int
    batch_size: int
    num_batches: int
    passes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        for field in ("child_dataset", "child_start", "child_rows"):
            values = _column(field, getattr(self, field))
            if len(values) != len(self.child_dataset):
                raise ValueError(
                    f"{field} must have a value for each of {len(self.child_dataset)} children,"
                    f" found {len(values)}"
                )
            object.__setattr__(self, field, values)
        for field, least in (("batch_size", 1), ("num_batches", 0)):
            object.__setattr__(self, field, as_integer(field, getattr(self, field), least))
        self._reservoir()  # refuses no children, and what else makes no stream
        if self.child_dataset.max() >= len(self.names):
            raise ValueError(
                f"child_dataset must be below {len(self.names)}, the number of datasets,"
                f" found {self.child_dataset.max()}"
            )
        object.__setattr__(self, "child_dataset", self.child_dataset.astype(np.int32))
        most = total_batches(self.child_rows, self.batch_size, self.passes)
        if most is not None and self.num_batches > most:
            raise ValueError(
                f"num_batches must be at most {most}, all that the children have in"
                f" {self.passes} passes, found {self.num_batches}"
            )
        if self.num_batches and not self.child_rows.any():
            raise ValueError(f"all {len(self.child_rows)} children are empty")

    @property
    def rows_per_batch(self) -> int | None:
        """The batch size, or None where the last batch is shorter."""
        return self.batch_size if self._samples(self.num_batches) % self.batch_size == 0 else None

    @property
    def state_kind(self) -> str:
        """The states are checkpoints of ``StreamingDataset``."""
        return "reservoir"

    def states(self, boundaries: Iterable[int]) -> Iterator[State]:
        """Checkpoints just before each of the ascending batch numbers, in one scan.

        Raises ValueError for a number that falls, is negative or lies past ``num_batches``.
        """
        at = checked_boundaries(boundaries, self.num_batches)
        return self._states(at)

    def rows(self, state: State, num_batches: int) -> RowMap:
        """The row map of the next ``num_batches`` batches from ``state``, in stream order.

        A row's epoch is how often its child was begun before. What a batch takes from one child
        in a row is one entry. Raises ValueError as ``sizes`` does.
        """
        reservoir = self._restored(state)
        sizes = self._sizes(reservoir, num_batches)
        end = np.cumsum(sizes)
        num_rows = int(sizes.sum())
        nothing = (np.empty(0, np.int64),) * 3
        blocks = _Plan(reservoir, self.child_rows).blocks(num_rows)
        child, offset, epoch = map(np.concatenate, zip(nothing, *blocks, strict=True))
        begins = np.ones(num_rows, np.bool_)
        begins[1:] = (child[1:] != child[:-1]) | (offset[1:] == 0)
        begins[end[:-1]] = True
        entry = np.flatnonzero(begins)
        child = child[entry]
        return RowMap(
            batch=np.searchsorted(end, entry, side="right"),
            dataset=self.child_dataset[child],
            start=self.child_start[child] + offset[entry],
            count=np.diff(entry, append=num_rows),
            epoch=epoch[entry].astype(np.int32),
        )

    def sizes(self, state: State, num_batches: int) -> NDArray[np.int64]:
        """Rows in each of the next ``num_batches`` batches from ``state``, as int64.

        Raises ValueError for a state that is no checkpoint of this mixture, and for more batches
        than the mixture has or than are left.
        """
        return self._sizes(self._restored(state), num_batches)

    def _reservoir(self) -> Reservoir:
        setup = Setup(len(self.child_rows), self.max_simultaneous, self.seed, self.passes)
        return setup.reservoir()

    def _samples(self, num_batches: int) -> int:
        """How many samples the first batches hold."""
        samples = num_batches * self.batch_size
        if self.passes is None:
            return samples
        return min(samples, self.passes * int(self.child_rows.sum()))

    def _states(self, boundaries: Sequence[int]) -> Iterator[State]:
        plan = _Plan(self._reservoir(), self.child_rows)
        given = 0
        for boundary in boundaries:
            for _ in plan.blocks(self._samples(boundary) - given):
                pass
            given = self._samples(boundary)
            yield plan.state()

    def _restored(self, state: State) -> Reservoir:
        reservoir = self._reservoir()
        reservoir.load(state)
        for child, offset in reservoir.offsets.items():
            if offset > self.child_rows[child]:
                raise ValueError(
                    f"child {child} has {self.child_rows[child]} rows,"
                    f" the checkpoint has it at offset {offset}"
                )
        return reservoir

    def _sizes(self, reservoir: Reservoir, num_batches: int) -> NDArray[np.int64]:
        if num_batches > self.num_batches:
            raise ValueError(f"the mixture has {self.num_batches} batches, asked for {num_batches}")
        sizes = np.full(num_batches, self.batch_size, np.int64)
        left = reservoir.samples_left(self.child_rows)
        if left is not None and num_batches * self.batch_size > left:
            batches_left = -(-left // self.batch_size)
            if num_batches > batches_left:
                raise ValueError(f"{batches_left} batches are left, asked for {num_batches}")
            sizes[-1] = left - (num_batches - 1) * self.batch_size
        return sizes


def total_batches(
    child_rows: NDArray[np.int64] | Sequence[int], batch_size: int, passes: int | None
) -> int | None:
    """How many batches the passes have, the last one perhaps shorter; None without ``passes``.

    Raises ValueError for passes of 2**60 rows or more.
    """
    if passes is None:
        return None
    samples = passes * int(np.sum(child_rows, dtype=np.int64))
    if samples >= _ROWS_END:
        raise ValueError(f"{passes} passes must have fewer than 2**60 rows, found {samples}")
    return -(-samples // batch_size)


class _Plan:
    """Takes samples from a reservoir over children of known rows, many at once.

    The draws of a block are grouped by place, so that the first one of a place to find its child
    at the end is known at once. There the reservoir itself goes on, and the rest is put right: two
    places have another child, and a word that chose it is no draw. Python runs once for each end
    of a child, never for a sample.
    """

    def __init__(self, reservoir: Reservoir, rows: NDArray[np.int64]) -> None:
        self._reservoir = reservoir
        self._rows = rows
        # Of the open children in place order: their numbers, rows left, and epochs.
        self._child, self._left, self._epoch = np.zeros((3, reservoir.limit), np.int64)
        self._length = _MOST_BLOCK
        reservoir.fill()
        self._seat(range(reservoir.pointer))

    def blocks(self, count: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """The next ``count`` samples, or all that are left: arrays of child, offset and epoch."""
        while count and self._reservoir.pointer:
            block = self._block(min(count, self._length))
            count -= len(block[0])
            yield block

    def state(self) -> State:
        """The online checkpoint at this place."""
        reservoir = self._reservoir
        offsets = self._rows[self._child] - self._left
        for place in range(reservoir.pointer):
            reservoir.offsets[reservoir.reservoir[place]] = offsets.item(place)
        return reservoir.state()

    def _seat(self, places: Iterable[int]) -> None:
        for place in places:
            child = self._reservoir.reservoir[place]
            self._child[place] = child
            self._left[place] = self._rows[child] - self._reservoir.offsets[child]
            self._epoch[place] = self._reservoir.epoch(child)

    def _block(self, size: int) -> tuple[NDArray[np.int64], ...]:
        reservoir, rows = self._reservoir, self._rows
        first, num_open = reservoir.draws, reservoir.pointer
        last = num_open - 1
        # Draws are numbered from 0 in the block; ``at`` is where one stands when they are grouped
        # by place.
        place_of = reservoir.upcoming(size)
        narrow = place_of.astype(np.uint16) if num_open <= 2**16 else place_of  # a radix sort
        draw_at = np.argsort(narrow, kind="stable")
        place_at = place_of[draw_at]
        at_of = np.empty(size, np.int64)
        at_of[draw_at] = np.arange(size)
        gives_at = np.ones(size, np.bool_)

        # A sitting is a child's time at a place: whence it lasts, and what stands there then.
        begin = np.flatnonzero(np.diff(place_at, prepend=-1))
        place = place_at[begin]
        sittings = [begin, place, self._child[place], self._left[place], self._epoch[place]]
        later: list[tuple[int, int, int, int, int]] = []

        # The draws that find a child at its end, the next one first.
        end = begin + self._left[place]
        inside = end < np.append(begin[1:], size)
        ends = dict(zip(place[inside].tolist(), end[inside].tolist(), strict=True))
        due = [(draw_at.item(at), place, at) for place, at in ends.items()]
        heapify(due)
        last_at = int(np.searchsorted(place_at, last))
        ends[last] = last_at + self._left.item(last)

        def expect_end(place: int, at: int) -> None:
            ends[place] = at
            if at < size and place_at[at] == place:
                heappush(due, (draw_at.item(at), place, at))

        def sit(place: int, at: int, left: int) -> None:
            child = reservoir.reservoir[place]
            later.append((at, place, child, left, reservoir.epoch(child)))
            expect_end(place, at + left)

        draws = memoryview(draw_at.data)
        filled = range(0)
        while due:
            draw, seat, at = heappop(due)
            if ends[seat] != at:
                continue  # it was put off
            gives_at[at] = False
            last_at = bisect_right(draws, draw, last_at)
            last_left = ends[last] - last_at
            child = reservoir.reservoir[seat]
            reservoir.offsets[child] = rows.item(child)
            reservoir.draws = first + draw + 1
            reservoir.give_back(seat)
            filled = reservoir.fill()
            if seat != last:
                sit(seat, at + 1, last_left)
            if reservoir.pointer != num_open:  # words mean other places from here on
                gives_at[draw_at > draw] = False
                break
            sit(last, last_at, rows.item(reservoir.reservoir[last]))
            for spent_at in at_of[draw + 1 : reservoir.draws - first].tolist():
                gives_at[spent_at] = False
                spent = place_at.item(spent_at)
                if spent in ends:
                    expect_end(spent, ends[spent] + 1)

        if later:
            columns = np.array(later, np.int64).T
            sittings = [np.concatenate(pair) for pair in zip(sittings, columns, strict=True)]
            in_order = np.lexsort((sittings[1], sittings[0]))
            sittings = [column[in_order] for column in sittings]
        begin, place, sitter, left, epoch = sittings
        given = np.concatenate(([0], np.cumsum(gives_at)))  # before each ``at``
        self._child[place], self._epoch[place] = sitter, epoch  # the last one of a place stays
        self._left[place] = left - (given[np.append(begin[1:], size)] - given[begin])
        if reservoir.pointer != num_open:
            self._seat(filled)
            self._length = max(_LEAST_BLOCK, self._length // 2 + draw)
        else:
            reservoir.draws = max(reservoir.draws, first + size)
            self._length = min(_MOST_BLOCK, 2 * self._length)

        at = at_of[gives_at[at_of]]
        sitting = np.repeat(np.arange(len(begin)), np.diff(begin, append=size))[at]
        offset = rows[sitter] - left - given[begin]
        return sitter[sitting], offset[sitting] + given[at], epoch[sitting]


def _integers(field: str, values: Any) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{field} must be a list of integers, found {type(values).__name__}")
    return [as_integer(f"{field}[{i}]", value, 0) for i, value in enumerate(values)]


def _column(field: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"{field} must be a one-dimensional array of integers,"
            f" found {array.ndim} dimensions of {array.dtype}"
        )
    if array.size and (array.min() < 0 or array.max() >= _ROWS_END):
        raise ValueError(
            f"{field} must be from 0 to below 2**60, found {array.min()} to {array.max()}"
        )
    return array.astype(np.int64)
