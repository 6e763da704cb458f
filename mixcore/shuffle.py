"""A shuffled ``range`` of any length that needs no memory, readable both ways."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .allocation import as_integer

_ROUNDS = 6
_TABLED = 256  # a Feistel network over fewer points is far from uniform, and a table is small
_CHUNK = 1 << 16  # so that the arrays of a round stay in cache, and a walk has few steps
_FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_WORD = 2**64 - 1


class Permutation:
    """A permutation of ``range(size)``, the same for ever for one ``seed`` and ``stream``.

    Both ways cost the same constant time and memory, whatever the size. Streams (any further
    integers, such as an epoch) give one seed permutations that are independent of each other.
    Raises ValueError for a size that is no integer from 0 to 2**62, and for negative keys.
    """

    def __init__(self, size: int, seed: int, *stream: int) -> None:
        self.size = as_integer("size", size, 0)
        if self.size > 2**62:
            raise ValueError(f"size must be at most 2**62, found {size}")
        words = np.random.SeedSequence(
            as_integer("seed", seed, 0),
            spawn_key=tuple(as_integer("stream", part, 0) for part in stream),
        )
        if self.size <= _TABLED:
            keys = words.generate_state(self.size, np.uint64)
            self._table = np.argsort(keys, kind="stable").astype(np.int64)
            return
        self._keys = words.generate_state(_ROUNDS, np.uint64).tolist()
        bits = (self.size - 1).bit_length()
        # The halves by turns: even rounds change the upper bits, odd rounds the lower ones.
        self._low = bits // 2
        self._drop = (64 - (bits - self._low), 64 - self._low)

    def value(self, index: int) -> int:
        """The value at an index. Raises IndexError for an index outside ``range(size)``."""
        return self._follow(index, backwards=False)

    def index(self, value: int) -> int:
        """Where a value stands. Raises IndexError for a value outside ``range(size)``."""
        return self._follow(value, backwards=True)

    def values(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The value at each index, in the shape of ``indices``; raises as ``value`` does."""
        return self._follow_all(indices, backwards=False)

    def indices(self, values: ArrayLike) -> NDArray[np.int64]:
        """Where each value stands, in the shape of ``values``; raises as ``index`` does."""
        return self._follow_all(values, backwards=True)

    def _follow(self, point: int, backwards: bool) -> int:
        if not 0 <= point < self.size:
            raise IndexError(f"{point} is not in range({self.size})")
        if self.size <= _TABLED:
            return int((np.argsort(self._table) if backwards else self._table)[point])
        while True:  # a walk along the cycle of a greater permutation, until it is inside again
            halves = [point >> self._low, point & ((1 << self._low) - 1)]
            for turn in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
                mixed = (halves[1 - turn % 2] + self._keys[turn]) * _FIRST & _WORD
                mixed = (mixed ^ mixed >> 32) * _SECOND & _WORD
                halves[turn % 2] ^= mixed >> self._drop[turn % 2]
            point = halves[0] << self._low | halves[1]
            if point < self.size:
                return point

    def _follow_all(self, points: ArrayLike, backwards: bool) -> NDArray[np.int64]:
        given = np.asarray(points)
        if given.dtype.kind not in "iu" and given.size:
            raise IndexError(f"expected integers, found {given.dtype}")
        outside = (given < 0) | (given >= self.size)
        if outside.any():
            raise IndexError(f"{given[outside][0]} is not in range({self.size})")
        if self.size <= _TABLED:
            table = np.argsort(self._table) if backwards else self._table
            return table[given.astype(np.intp)]
        moved = given.astype(np.uint64).reshape(-1)
        for first in range(0, len(moved), _CHUNK):
            chunk = moved[first : first + _CHUNK]
            chunk[:] = self._permute(chunk, backwards)
            walking = np.flatnonzero(chunk >= self.size)
            while len(walking):
                chunk[walking] = self._permute(chunk[walking], backwards)
                walking = walking[chunk[walking] >= self.size]
        return moved.astype(np.int64).reshape(given.shape)

    def _permute(self, points: NDArray[np.uint64], backwards: bool) -> NDArray[np.uint64]:
        low = np.uint64(self._low)
        halves = [points >> low, points & np.uint64((1 << self._low) - 1)]
        for turn in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
            mixed = halves[1 - turn % 2] + np.uint64(self._keys[turn])
            mixed *= np.uint64(_FIRST)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(_SECOND)
            mixed >>= np.uint64(self._drop[turn % 2])
            halves[turn % 2] ^= mixed
        permuted: NDArray[np.uint64] = halves[0] << low | halves[1]
        return permuted
