"""How many items each dataset gives to each batch: integer shares, and a carry that never drifts.

Weights ``w_i`` sum to ``W``; a batch has ``B`` slots. Every dataset gets ``B*w_i // W`` slots of
every batch and ``B*w_i % W`` is added to its carry. Each leftover slot goes to the dataset with
the greatest current carry (the first configured wins a tie), whose carry then drops by ``W``.
After ``n`` batches ``W*offset_i + carry_i == n*B*w_i``, so offsets give carries.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_INT64_END = 2**63
_BLOCK_ENTRIES = 2**23  # counts held at once by a scan: 64 MB as int64
_EXACT_ENTRIES = 2**16  # the same where a count takes a microsecond: a scan may be stopped early
_TABLE_ENTRIES = 2**22  # offsets kept for one period: 32 MB as int64
_LANE_ENTRIES = 2**16  # carries advanced by one vectorised step: they stay in cache
_LANE_STEPS = 16  # shorter lanes would mostly be run twice
_FEW_STEPS = 16  # up to here plain integers beat setting up a scan


def as_integer(what: str, value: Any, least: int | None = None) -> int:
    """The plain int behind an integer of any type; else, or if too small, a ValueError.

    A bool is no integer. ``what`` names the value in the message.
    """
    expected = "an integer" if least is None else f"an integer of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if (
        number is None
        or isinstance(value, (bool, np.bool_))
        or (least is not None and number < least)
    ):
        raise ValueError(f"{what} must be {expected}, found {value!r}")
    return number


def checked_boundaries(boundaries: Iterable[int], num_batches: int | None = None) -> list[int]:
    """Ascending batch numbers as a list; repeats are allowed.

    ValueError for a number that falls, is negative, or lies past a mixture of ``num_batches``.
    """
    at = [as_integer("boundary", boundary, 0) for boundary in boundaries]
    for before, after in pairwise(at):
        if after < before:
            raise ValueError(f"boundaries must ascend, found {after} after {before}")
    if at and num_batches is not None and at[-1] > num_batches:
        raise ValueError(f"boundary {at[-1]} is past the mixture's {num_batches} batches")
    return at


class Allocation:
    """The count vectors of every batch of a mixture, from integer weights and a batch size.

    ``names`` and ``weights`` stand in configured order, ``total`` is W, and the carries return to
    zero every ``period = W / gcd(W, B*w_1, .., B*w_k)`` batches, not before. Items, batches and
    carries are integers; a carry counts in units of 1/W of an item. ``arithmetic`` says what a
    scan is computed in: "int64" where ``k*W < 2**63``, else "exact" (plain integers); results are
    equal. Weights are used as written: a common factor scales the carries.

    Raises ValueError for empty weights, a name that is no string, and a weight or batch size that
    is no positive integer or, the batch size only, does not fit int64.
    """

    def __init__(self, weights: Mapping[str, int], batch_size: int) -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise ValueError(
                f"weights must map at least one dataset name to an integer, found {weights!r}"
            )
        for name in weights:
            if not isinstance(name, str):
                raise ValueError(f"a dataset name must be a string, found {name!r}")
        self.names = tuple(weights)
        self.weights = tuple(as_integer(f"weight of {n!r}", w, 1) for n, w in weights.items())
        self.batch_size = as_integer("batch_size", batch_size, 1)
        if self.batch_size >= _INT64_END:
            raise ValueError(f"batch_size must be below 2**63, found {batch_size!r}")
        self.total = sum(self.weights)
        self._shares = tuple(self.batch_size * w for w in self.weights)
        self._base, self._remainders = zip(
            *(divmod(share, self.total) for share in self._shares), strict=True
        )
        self._leftover = sum(self._remainders) // self.total
        self._unit = math.gcd(self.total, *self._shares)  # every carry is a multiple of it
        self.period = self.total // self._unit
        fits = len(self.names) * self.total < _INT64_END
        self.arithmetic: Literal["int64", "exact"] = "int64" if fits else "exact"
        self._tabled = (
            self.period * len(self.names) <= _TABLE_ENTRIES
            and self.period * self.batch_size < _INT64_END
        )
        self._table: NDArray[np.int64] | None = None
        self._known: tuple[tuple[int, tuple[int, ...]], ...] = ((0, self._zeros),)

    def __repr__(self) -> str:
        return f"Allocation{self.__reduce__()[1]!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allocation) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:  # workers rebuild the table rather than receive it
        return Allocation, (dict(zip(self.names, self.weights, strict=True)), self.batch_size)

    # One batch.

    def counts(self, n: int) -> tuple[int, ...]:
        """Items that each dataset gives to batch ``n``, in configured order.

        This and ``carry``, ``offsets`` and ``ranges`` are O(1) in ``n`` where a period fits a
        table; elsewhere they go on from the batch asked for last. Negative ``n``: ValueError.
        """
        before, after = self._offsets_around(n)
        return tuple(map(operator.sub, after, before))

    def carry(self, n: int) -> tuple[int, ...]:
        """Carries just before batch ``n``, in units of 1/W of an item; they sum to zero."""
        return self._carry_at(n, self.offsets(n))

    def offsets(self, n: int) -> tuple[int, ...]:
        """Items that each dataset has given before batch ``n``."""
        n = as_integer("batch number", n, 0)
        if self._tabled:
            periods, rest = divmod(n, self.period)
            table = self._prefix_table()
            whole, part = table[-1].tolist(), table[rest].tolist()
            return tuple(periods * w + p for w, p in zip(whole, part, strict=True))
        at, offsets = max(known for known in self._known if known[0] <= n)
        if at == n:
            return offsets
        if n - at <= _FEW_STEPS:
            carry = self._carry_at(at, offsets)
            for _ in range(n - at):
                counts, carry = self.step(carry)
                offsets = tuple(map(operator.add, offsets, counts))
        else:
            for _, block in self.blocks(n - at, self._carry_at(at, offsets)):
                offsets = tuple(map(operator.add, offsets, block.sum(axis=0).tolist()))
        # Two of them, since a batch lies between two points; and zero, to start again from.
        self._known = ((0, self._zeros), self._known[-1], (n, offsets))
        return offsets

    def ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        """The items (start, stop) that each dataset gives to batch ``n``."""
        return tuple(zip(*self._offsets_around(n), strict=True))

    def step(self, carry: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Counts of the batch before which the carries are ``carry``, and the carries after it.

        Slot by slot in plain integers; any integers will do as carries.
        """
        k = len(self.names)
        counts = list(self._base)
        now = [c + r for c, r in zip(self._checked(carry), self._remainders, strict=True)]
        heap = [i - k * c for i, c in enumerate(now)]  # greatest carry first, then first configured
        heapq.heapify(heap)
        for _ in range(self._leftover):
            i = heap[0] % k
            heapq.heapreplace(heap, heap[0] + k * self.total)
            counts[i] += 1
            now[i] -= self.total
        return tuple(counts), tuple(now)

    # Many batches.

    def count_vectors(
        self, num_batches: int, carry: Sequence[int] | None = None
    ) -> NDArray[np.int64]:
        """Counts of ``num_batches`` batches going on from ``carry`` (None: batch 0).

        int64 of shape (num_batches, datasets). ``advance`` gives the carries after them.
        """
        num_batches = as_integer("num_batches", num_batches, 0)
        counts = np.empty((num_batches, len(self.names)), np.int64)
        for first, block in self.blocks(num_batches, carry):
            if len(block) == num_batches:
                return block
            counts[first : first + len(block)] = block
        return counts

    def blocks(
        self, num_batches: int, carry: Sequence[int] | None = None
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """``count_vectors`` in pieces of at most 64 MB: (first batch, counts), in order.

        Batches are numbered from 0 at ``carry``; the arrays are the caller's own.
        """
        num_batches = as_integer("num_batches", num_batches, 0)
        entries = _BLOCK_ENTRIES if self.arithmetic == "int64" else _EXACT_ENTRIES
        rows = max(1, min(entries // len(self.names), (_INT64_END - 1) // self.batch_size))
        cycle = None
        if carry is None and self._tabled and num_batches > self.period:
            cycle = np.diff(self._prefix_table(), axis=0)
        now = self._zeros if carry is None else self._checked(carry)
        for first in range(0, num_batches, rows):
            size = min(rows, num_batches - first)
            if cycle is not None:
                counts = cycle[np.arange(first, first + size) % self.period]
            else:
                counts = self._scan(size, now)
                if first + size < num_batches:
                    now = self.advance(now, size, counts.sum(axis=0).tolist())
            yield first, counts

    def advance(
        self, carry: Sequence[int], num_batches: int, totals: Sequence[int]
    ) -> tuple[int, ...]:
        """Carries after ``num_batches`` batches from ``carry`` on that gave ``totals`` items."""
        num_batches = operator.index(num_batches)
        return tuple(
            c + num_batches * share - self.total * int(total)
            for c, share, total in zip(self._checked(carry), self._shares, totals, strict=True)
        )

    def boundary_states(
        self, boundaries: Iterable[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, carry) just before each of the ascending batch numbers, in one scan.

        Repeats are allowed; a number that is negative or falls is a ValueError.
        """
        return (
            (tuple(offsets), tuple(carry))
            for block in self.boundary_arrays(boundaries)
            for offsets, carry in zip(*(part.tolist() for part in block), strict=True)
        )

    def boundary_arrays(
        self, boundaries: Iterable[int], size: int = 1024
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """``boundary_states`` as arrays of shape (boundaries, datasets), ``size`` boundaries each.

        Of int64, or of plain integers where "exact" arithmetic or offsets past 2**63 ask for it.
        """
        at = checked_boundaries(boundaries)
        fits = self.arithmetic == "int64" and (not at or at[-1] * self.batch_size < _INT64_END)
        dtype = np.dtype(np.int64 if fits else object)
        parts = (np.array(at[i : i + size], dtype) for i in range(0, len(at), size))
        # A table of a whole period is not made for a mix that is shorter.
        tabled = self._tabled and bool(at) and (self._table is not None or at[-1] >= self.period)
        offsets = self._tabled_offsets(parts) if tabled else self._scanned_offsets(parts, dtype)
        return ((part, self._carries(n, part)) for n, part in offsets)

    def first_reaching(self, targets: Sequence[int], limit: int | None = None) -> list[int | None]:
        """The batch during which each dataset's offset reaches its target.

        That is the first ``n`` with ``offsets(n + 1)[i] >= targets[i]``; None where it is not
        below ``limit`` (None: no limit). Targets below 1 are a ValueError. O(log period) where a
        period fits a table, else one scan that stops when all are found.
        """
        surely = self.reached_by(targets)
        targets = [operator.index(target) for target in targets]
        end = max(surely) if limit is None else min(as_integer("limit", limit, 0), max(surely))
        found: list[int | None] = [None] * len(self.names)
        if self._tabled:
            table = self._prefix_table()
            for i, (target, whole) in enumerate(zip(targets, table[-1].tolist(), strict=True)):
                periods, rest = divmod(target - 1, whole)
                n = periods * self.period + bisect_left(table[:, i], rest + 1) - 1
                found[i] = n if n < end else None
            return found
        missing = list(targets)
        open_ = set(range(len(self.names)))
        for first, counts in self.blocks(end):
            reached = np.cumsum(counts, axis=0, out=counts)
            totals = reached[-1].tolist()
            for i in [i for i in open_ if totals[i] >= missing[i]]:
                found[i] = first + int(np.searchsorted(reached[:, i], missing[i]))
                open_.remove(i)
            if not open_:
                break
            missing = list(map(operator.sub, missing, totals))
        return found

    def reached_by(self, targets: Sequence[int]) -> list[int]:
        """Numbers of batches after which each dataset's offset has surely reached its target.

        From the identity and ``carry <= (k - 1)*W``; about ``k`` items above the least number.
        """
        if len(targets) != len(self.names):
            raise ValueError(f"expected {len(self.names)} targets, found {len(targets)}")
        slack = len(self.names) - 1
        return [
            -(-(as_integer(f"target of {name!r}", target, 1) + slack) * self.total // share)
            for name, target, share in zip(self.names, targets, self._shares, strict=True)
        ]

    # Inside.

    @property
    def _zeros(self) -> tuple[int, ...]:
        return (0,) * len(self.names)

    def _key(self) -> tuple[Any, ...]:
        return self.names, self.weights, self.batch_size

    def _checked(self, carry: Sequence[int]) -> tuple[int, ...]:
        if len(carry) != len(self.names):
            raise ValueError(
                f"a carry must hold {len(self.names)} integers, one a dataset, found {len(carry)}"
            )
        return tuple(map(operator.index, carry))

    def _carry_at(self, n: int, offsets: Sequence[int]) -> tuple[int, ...]:
        n = operator.index(n)
        return tuple(n * s - self.total * o for s, o in zip(self._shares, offsets, strict=True))

    def _offsets_around(self, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets(n), self.offsets(n + 1)

    def _carries(self, n: NDArray[Any], offsets: NDArray[Any]) -> NDArray[Any]:
        """``_carry_at`` of many batches; in int64 the terms may wrap, the carries do not."""
        base, remainders = (np.array(part, n.dtype) for part in (self._base, self._remainders))
        carries: NDArray[Any] = n[:, None] * remainders
        carries -= (offsets - n[:, None] * base) * self.total
        return carries

    def _tabled_offsets(
        self, parts: Iterable[NDArray[Any]]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        table = self._prefix_table()
        for n in parts:
            whole = (n // self.period)[:, None] * table[-1].astype(n.dtype)
            yield n, whole + table[(n % self.period).astype(np.int64)]

    def _scanned_offsets(
        self, parts: Iterable[NDArray[Any]], dtype: np.dtype[Any]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        before, carry = np.zeros(len(self.names), dtype), self._zeros
        done = 0
        for n in parts:
            offsets = np.empty((len(n), len(self.names)), dtype)
            offsets[:] = before
            for first, counts in self.blocks(int(n[-1]) - done, carry):
                given = np.cumsum(counts, axis=0, out=counts)
                here = slice(*np.searchsorted(n, (done + first + 1, done + first + len(given) + 1)))
                offsets[here] = before + given[(n[here] - (done + first + 1)).astype(np.int64)]
                before = before + given[-1]
            done = int(n[-1])
            carry = self._carry_at(done, before.tolist())
            yield n, offsets

    def _prefix_table(self) -> NDArray[np.int64]:
        """Offsets before each batch of a period, and after its last."""
        if self._table is None:
            # In units of the carries' common divisor W is the period: small, whatever the weights.
            remainders = [r // self._unit for r in self._remainders]
            lanes = _Lanes(remainders, self.period, len(self.names) * self.period)
            table = np.zeros((self.period + 1, len(self.names)), np.int64)
            np.cumsum(lanes.scan(self.period, self._zeros, self._base), axis=0, out=table[1:])
            self._table = table
        return self._table

    def _scan(self, num_batches: int, carry: tuple[int, ...]) -> NDArray[np.int64]:
        if self.arithmetic == "int64":
            unit = math.gcd(self._unit, *carry)
            total, carry_units = self.total // unit, [c // unit for c in carry]
            # Carries that sum to zero, each above -W, keep so and stay below (k - 1)*W. Of others
            # it is only known that no one falls more than W under the least or the mean.
            peak = len(carry) * total
            if sum(carry) or min(carry) <= -self.total:
                peak = 2 * len(carry) * (max(map(abs, carry_units)) + 3 * total)
            if peak < _INT64_END:
                lanes = _Lanes([r // unit for r in self._remainders], total, peak)
                return lanes.scan(num_batches, carry_units, self._base)
        counts = np.empty((num_batches, len(carry)), np.int64)
        for n in range(num_batches):
            counts[n], carry = self.step(carry)
        return counts


class _Lanes:
    """The leftover slots of many batches at once, in machine integers.

    The batches are cut into lanes, which advance together. A lane starts from a guess: the
    largest remainders of the cumulative total, wrong in a few percent of states. Lanes that the
    lane before does not meet are run again from its end until they join their first run, which
    they soon do, as both differ by whole multiples of W. The guess costs time only, never truth.
    """

    def __init__(self, remainders: Sequence[int], total: int, peak: int) -> None:
        """All carries, with remainders and down to the last slot, stay within ``+-peak``."""
        k = len(remainders)
        # carry*k - index is unique and sorts by carry, then by configured order.
        self.scale = k if k * peak < _INT64_END else 1
        self.tie_break = np.arange(k) if self.scale == k else np.zeros(k, np.int64)
        self.dtype = np.dtype(np.int32 if self.scale * peak < 2**31 else np.int64)
        self.total = total
        self.remainders = remainders
        self.added = np.array([r * self.scale for r in remainders], self.dtype)
        self.drop = self.dtype.type(total * self.scale)
        self.slots = sum(remainders) // total
        self.won_type = np.min_scalar_type(self.slots)

    def scan(
        self, num_batches: int, carry: Sequence[int], base: Sequence[int]
    ) -> NDArray[np.int64]:
        """``base`` plus the leftover slots that each dataset wins: (num_batches, datasets)."""
        k = len(carry)
        if not self.slots or not num_batches:
            return np.tile(base, (num_batches, 1))
        lanes = max(1, min(_LANE_ENTRIES // k, num_batches // _LANE_STEPS))
        steps = -(-num_batches // lanes)
        starts = self._guess(carry, lanes, steps)
        won = np.empty((steps, lanes, k), self.won_type)
        ends = starts.copy()
        for step in range(steps):
            won[step] = self._advance(ends)
        astray = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        while astray.size:
            moved = self._run_again(astray, starts, ends, won)
            after = moved[moved < lanes - 1] + 1
            astray = after[(starts[after] != ends[after - 1]).any(axis=1)]
        counts = np.empty((lanes, steps, k), np.int64)
        np.add(won.transpose(1, 0, 2), base, out=counts)
        return counts.reshape(-1, k)[:num_batches]

    def _guess(self, carry: Sequence[int], lanes: int, steps: int) -> NDArray[Any]:
        k = len(carry)
        left = np.empty((lanes, k), np.int64)  # carry + steps*lane*remainder, modulo W
        left[0] = [c % self.total for c in carry]
        filled = 1
        while filled < lanes:
            size = min(filled, lanes - filled)
            jump = np.array([filled * steps * r % self.total for r in self.remainders])
            left[filled : filled + size] = (left[:size] + jump) % self.total
            filled += size
        slots = (left.sum(axis=1) - sum(carry)) // self.total
        everyone, extra = np.divmod(slots, k)
        wins = np.repeat(everyone[:, None], k, axis=1)
        winners = np.arange(k) < extra[:, None]
        order = np.argsort(-left, axis=1)
        wins[np.nonzero(winners)[0], order[winners]] += 1
        left -= wins * self.total
        left[0] = carry
        return (left * self.scale - self.tie_break).astype(self.dtype)

    def _advance(self, key: NDArray[Any]) -> NDArray[Any]:
        """Move lanes on by a batch, in place; returns the slots won."""
        key += self.added
        won = self._winners(key)
        key -= np.multiply(won, self.drop, dtype=self.dtype)
        return won

    def _winners(self, key: NDArray[Any], rounds: int = 1) -> NDArray[Any]:
        """Slots won by the greatest of key - j*W, j = 0, 1, ..; at first only with j < rounds."""
        lanes, k = key.shape
        bids = key
        if rounds > 1:
            drops = np.arange(rounds, dtype=self.dtype)[:, None] * self.drop
            bids = (key[:, None, :] - drops).reshape(lanes, rounds * k)
        best = np.partition(bids, bids.shape[1] - self.slots, axis=1)[:, -self.slots :]
        least = best[:, :1]
        won = bids >= least
        wins: NDArray[Any] = won.reshape(lanes, rounds, k).sum(axis=1, dtype=self.won_type)
        if self.scale == 1:  # no tie break in the key: of those at the threshold the last lose
            surplus = wins.sum(axis=1, keepdims=True, dtype=np.int64) - self.slots
            tied = (bids == least).reshape(lanes, rounds, k).any(axis=1)
            wins = wins - (tied & (np.cumsum(tied[:, ::-1], axis=1)[:, ::-1] <= surplus))
        if rounds < self.slots:
            more = np.flatnonzero(best.max(axis=1) - self.drop * rounds >= least[:, 0])
            if more.size:
                wins[more] = self._winners(key[more], min(2 * rounds, self.slots))
        return wins

    def _run_again(
        self, lanes: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any], won: NDArray[Any]
    ) -> NDArray[Any]:
        """Run lanes again from the end of the lane before; returns those that end elsewhere now."""
        key = ends[lanes - 1]
        owed = (key - starts[lanes]) // self.drop  # slots to win beyond the first run's, to join it
        starts[lanes] = key
        for step in range(len(won)):
            wins = self._advance(key)
            owed += won[step, lanes]
            owed -= wins
            won[step, lanes] = wins
            apart = owed.any(axis=1)
            if not apart.all():
                lanes, key, owed = lanes[apart], key[apart], owed[apart]
                if not lanes.size:
                    break
        else:
            ends[lanes] = key
        return lanes
