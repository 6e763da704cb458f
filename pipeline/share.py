"""Which batches of a mix a rank takes, and where in their order a run stands. No file is read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .errors import ReaderError
from .manifest import Manifest

Split = Literal["rows", "batches"]
Remainder = Literal["drop", "repeat"]

_STATE = ("order_id", "next_batch", "skip_batches")


@dataclass(frozen=True)
class Skips:
    """Batches that are left out: ranges (first, past the last), ascending, with gaps between."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Any], num_batches: int | None = None) -> Skips:
        """From ranges in any order, which may overlap.

        Raises:
            ReaderError: one is no pair of integers from 0 on, is empty, or goes past the mix's
                number of batches where that is given.
        """
        if not isinstance(ranges, Iterable) or isinstance(ranges, str | bytes | Mapping):
            raise ReaderError(
                f"skip_batches must be ranges such as [(1200, 1208)], found {ranges!r}"
            )
        merged: list[tuple[int, int]] = []
        for first, stop in sorted(map(_range, ranges)):
            if merged and first <= merged[-1][1]:
                first, stop = merged[-1][0], max(merged.pop()[1], stop)
            merged.append((first, stop))
        if merged and num_batches is not None and merged[-1][1] > num_batches:
            first, stop = merged[-1]
            raise ReaderError(
                f"skip_batches ({first}, {stop}) goes past the end: the mix has {num_batches} "
                "batches"
            )
        return cls(tuple(merged))

    def __or__(self, other: Skips) -> Skips:
        return Skips.of(self.ranges + other.ranges)

    def below(self, number: int) -> int:
        """How many batches below a number are left out."""
        return sum(min(stop, number) - first for first, stop in self.ranges if first < number)

    def kept(self, place: int) -> int:
        """The number of a batch, given how many before it are kept."""
        for first, stop in self.ranges:
            if first > place:
                break
            place += stop - first
        return place


@dataclass(frozen=True)
class Share:
    """What one rank of several takes of a mix: a list of places, a step after another.

    Place p holds the p-th batch that is not skipped. Places past the last of these, which only
    ``remainder="repeat"`` has, hold the first ones again and are numbered on from the mix's end.
    Make it with :meth:`of`, which checks.
    """

    num_batches: int
    batches_per_step: int | None
    rank: int = 0
    world_size: int = 1
    split: Split = "rows"
    remainder: Remainder = "drop"
    micro_batches: int = 1
    skips: Skips = Skips()

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        rank: int,
        world_size: int,
        split: Split | None,
        uneven: bool,
        remainder: Remainder,
        micro_batches: int | None,
        skips: Skips,
    ) -> Share:
        """The share of a rank of a mix; the arguments are those of ``ShardReader.batches``.

        Raises:
            ReaderError: one of them is out of range, or does not divide what it must.
        """
        layout, rows = manifest.layout, manifest.rows_per_batch
        if split is None:
            differ = rows is None and not uneven
            split = "batches" if layout.batches_per_step or differ else "rows"
        if split not in ("rows", "batches"):
            raise ReaderError(f"split must be 'rows' or 'batches', not {split!r}")
        rank, world_size = integer("rank", rank), integer("world_size", world_size)
        if world_size < 1:
            raise ReaderError(f"world_size must be at least 1, not {world_size}")
        if not 0 <= rank < world_size:
            raise ReaderError(
                f"rank {rank} is outside 0..{world_size - 1} (world_size {world_size})"
            )
        micro_batches = 1 if micro_batches is None else integer("micro_batches", micro_batches)
        if micro_batches < 1:
            raise ReaderError(f"micro_batches must be at least 1, not {micro_batches}")
        if remainder not in ("drop", "repeat"):
            raise ReaderError(f"remainder must be 'drop' or 'repeat', not {remainder!r}")
        if remainder == "repeat" and split == "rows":
            raise ReaderError(
                "remainder='repeat' fills up steps of whole batches, but with split='rows' every "
                "batch is a step of its own: use split='batches', or leave remainder out"
            )
        step = layout.batches_per_step
        if split == "batches" and step is not None and step % world_size:
            raise ReaderError(
                f"world_size {world_size} does not divide the mix's batches_per_step {step}; "
                "choose a divisor of it, or split='rows'"
            )
        if not isinstance(uneven, bool):
            raise ReaderError(f"uneven must be True or False, not {uneven!r}")
        ranks = world_size if split == "rows" else 1
        _check_even(rows, ranks, micro_batches, uneven)
        share = cls(
            layout.num_batches, step, rank, world_size, split, remainder, micro_batches, skips
        )
        _check_any_kept(share)
        if not share.stop:
            raise ReaderError(
                f"{share.num_kept} batches are less than one step of {step or world_size}, so no "
                "rank would be given any: use remainder='repeat' to fill it up, or split='rows'"
            )
        return share

    @classmethod
    def whole(cls, manifest: Manifest, skips: Skips) -> Share:
        """All of a mix for a single rank."""
        return cls(manifest.layout.num_batches, manifest.layout.batches_per_step, skips=skips)

    @cached_property
    def num_kept(self) -> int:
        """How many batches of the mix are not skipped."""
        return self.num_batches - self.skips.below(self.num_batches)

    @property
    def stride(self) -> int:
        """Places that all ranks together take at a time."""
        return self.world_size if self.split == "batches" else 1

    @property
    def offset(self) -> int:
        """This rank's place among those."""
        return self.rank if self.split == "batches" else 0

    @cached_property
    def stop(self) -> int:
        """The place behind the last step."""
        kept = self.num_kept
        if self.split == "rows":
            return kept
        if self.remainder == "drop":
            return kept - kept % (self.batches_per_step or self.world_size)
        return kept + self._missing

    @property
    def _missing(self) -> int:
        """Batches that the last step lacks.

        Of a mix without ``batches_per_step`` none: a step is then one batch a rank, so after the
        last one nothing is left, and the end reads the same for every world size.
        """
        return -self.num_kept % (self.batches_per_step or 1)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """First row and distance of the rows of a batch, for each micro-batch."""
        first, ranks = (self.rank, self.world_size) if self.split == "rows" else (0, 1)
        micro = self.micro_batches
        return [(first + ranks * part, ranks * micro) for part in range(micro)]

    def batch(self, place: int) -> int:
        """The batch of the mix that a place holds."""
        return self.skips.kept(place % self.num_kept)

    def number(self, place: int) -> int:
        """The number of a place in the order: its batch's, or past the mix's end counted on."""
        kept = self.num_kept
        return self.skips.kept(place) if place < kept else self.num_batches + place - kept

    def place(self, number: int) -> int:
        """The place of a number, or of the next that is not skipped."""
        past = max(0, number - self.num_batches)
        return number - past - self.skips.below(number - past) + past

    def begin(self, number: int) -> int:
        """The place to begin at for a run whose next batch has a number.

        Raises:
            ReaderError: it lies outside the order, or in the middle of a step.
        """
        number = integer("a start batch", number)
        last = max(self.number(self.stop), self.num_batches)
        if not 0 <= number <= last:
            filled = 0 < number <= self.num_batches + self._missing
            hint = "; remainder='repeat' fills up its last step" if filled else ""
            raise ReaderError(
                f"batch {number} is outside 0..{last}: the mix has {self.num_batches} batches{hint}"
            )
        place = self.place(number)
        if place % self.stride and place != self.stop:
            # With skipped batches no number tells by itself which world sizes divide its place.
            divisor = f"choose a world_size that divides {place}, or " * (not self.skips.ranges)
            earlier = self.number(place - place % self.stride)
            raise ReaderError(
                f"{self.world_size} ranks that take whole batches cannot begin at batch {number}, "
                f"in the middle of a step: {divisor}begin at {earlier} and take what lies between "
                "once more"
            )
        return place

    def places(self, start: int, every: int = 1) -> range:
        """This rank's places from the step at ``start`` on, of every so many steps the first."""
        step = self.stride * every
        count = max(0, -(-(self.stop - start) // step))
        first = start + self.offset
        return range(first, first + count * step, step)

    def later(self, place: int, steps: int) -> int:
        """The place so many steps on, but not past the last step."""
        return min(place + steps * self.stride, max(self.stop, place))

    def after(self, number: int) -> int:
        """The number that comes next for all ranks once one has done a batch.

        Raises:
            ReaderError: no rank is given a batch of that number.
        """
        number = integer("a batch number", number)
        place = self.place(number) if number >= 0 else -1
        last = self.stop + -self.stop % self.stride
        if not 0 <= place < last or self.number(place) != number:
            raise ReaderError(
                f"no rank is given batch {number}: the order has batches 0 to "
                f"{self.number(last - 1)}" + (" but those skipped" if self.skips.ranges else "")
            )
        return self.number(self.later(place - place % self.stride, 1))


def read_state(state: Mapping[str, Any], manifest: Manifest, asked: Skips) -> tuple[int, Skips]:
    """The next batch of a state, and what is skipped: what it says so of, and what is ``asked``.

    Raises:
        ReaderError: it is no state, of another order or a longer mix, or does not leave out a
            batch that is asked to be left out and lies behind it.
    """
    if not isinstance(state, Mapping) or not {*_STATE[:2]} <= set(state) <= {*_STATE}:
        raise ReaderError(
            "a reader's state has order_id, next_batch and skip_batches, and nothing else; "
            f"found {state!r}"
        )
    if state["order_id"] != manifest.order_id:
        raise ReaderError(
            f"the state was taken from the order {str(state['order_id'])[:16]}.., but this mix has "
            f"the order {manifest.order_id[:16]}..: other datasets, weights or batch size; resume "
            "from the mix that the state belongs to"
        )
    number = integer("next_batch", state["next_batch"])
    if number < 0:
        raise ReaderError(f"next_batch must be at least 0, found {number}")
    recorded = Skips.of(state.get("skip_batches", ()))
    skips = recorded | asked
    _check_any_kept(Share.whole(manifest, skips))
    share = Share.whole(manifest, recorded)
    if number > share.num_batches + share._missing:
        raise ReaderError(
            f"the state's next batch is {number}, but the mix has {share.num_batches}: "
            "resume from the longer mix of this order that the state was taken from"
        )
    for first, stop in asked.ranges:
        done = min(stop, number)
        if first < done and recorded.below(done) - recorded.below(first) < done - first:
            raise ReaderError(
                f"skip_batches ({first}, {stop}): the state's next batch is {number}, so batches "
                f"of this range were trained on already; resume from a state at or before batch "
                f"{first}, or leave the range out"
            )
    return number, skips


def state(manifest: Manifest, share: Share, place: int) -> dict[str, Any]:
    """The state of a run whose next step begins at a place, the same on every rank, as JSON."""
    values = manifest.order_id, share.number(place), [list(pair) for pair in share.skips.ranges]
    return dict(zip(_STATE, values, strict=True))


def batch_number(n: Any, num_batches: int) -> int:
    """The number of a batch, given one that may count from the end.

    Raises TypeError and IndexError as sequences do.
    """
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(
            f"a batch has an integer as its number, found {n!r}; for several of them use "
            "batches(start_batch=..)"
        ) from None
    if not -num_batches <= n < num_batches:
        raise IndexError(f"batch {n} is outside the mix of {num_batches} batches")
    return int(n) % num_batches


def integer(what: str, value: Any) -> int:
    """A value as an int. Raises ReaderError where it is none, or a boolean."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ReaderError(f"{what} must be an integer, found {value!r}") from None


def _check_any_kept(share: Share) -> None:
    if not share.num_kept:
        raise ReaderError(f"skip_batches leaves none of the mix's {share.num_batches} batches")


def _range(pair: Any) -> tuple[int, int]:
    try:
        first, stop = pair
    except (TypeError, ValueError):
        raise ReaderError(
            f"skip_batches: {pair!r} is no range, expected the first batch and the one past the "
            "last, such as (1200, 1208)"
        ) from None
    first, stop = (integer("a number in skip_batches", number) for number in (first, stop))
    if not 0 <= first < stop:
        raise ReaderError(
            f"skip_batches ({first}, {stop}) is no range of batches: the first must be at least 0 "
            "and below the one past the last"
        )
    return first, stop


def _check_even(rows: int | None, ranks: int, micro_batches: int, uneven: bool) -> None:
    """Raise ReaderError where batches do not fall into equal parts and need to."""
    if uneven or ranks * micro_batches == 1:
        return
    if rows is None:
        way = "use split='batches', or uneven=True" if ranks > 1 else "use uneven=True"
        raise ReaderError(f"the batches of this mix differ in size: {way}")
    if rows % ranks:
        raise ReaderError(
            f"world_size {ranks} does not divide the batch of {rows} rows; choose a "
            "divisor of it, or uneven=True for ranks that differ by a row"
        )
    if rows // ranks % micro_batches:
        raise ReaderError(
            f"micro_batches {micro_batches} does not divide the {rows // ranks} rows that a rank "
            "takes of a batch; choose a divisor of it, or uneven=True for parts that differ by a "
            "row"
        )
