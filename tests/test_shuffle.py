"""A keyed permutation: one to one, the same for ever, and fair."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore.shuffle import Permutation

relaxed = settings(deadline=None)  # the machine may be busy

sizes = st.one_of(st.integers(0, 300), st.integers(500, 1_030), st.integers(4_000, 4_100))
keys = st.integers(0, 2**70)


@relaxed
@given(sizes, keys, st.lists(keys, max_size=2))
def test_every_value_stands_once_and_both_ways_are_inverse(size, seed, stream):
    permutation = Permutation(size, seed, *stream)
    values = permutation.values(np.arange(size))
    assert values.dtype == np.int64
    assert sorted(values.tolist()) == [*range(size)]
    assert permutation.indices(values).tolist() == [*range(size)]


@relaxed
@given(st.integers(1, 2**62), keys, st.data())
def test_one_at_a_time_equals_many_at_once_at_any_size(size, seed, data):
    permutation = Permutation(size, seed)
    points = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    values = permutation.values(points)
    assert [permutation.value(i) for i in points] == values.tolist()
    assert [permutation.index(v) for v in values.tolist()] == points
    assert permutation.indices(values).tolist() == points
    assert ((values >= 0) & (values < size)).all()


def test_the_greatest_size_has_all_its_values():
    permutation = Permutation(2**62, 3)
    values = permutation.values([0, 1, 2**62 - 1])
    assert permutation.indices(values).tolist() == [0, 1, 2**62 - 1]
    assert values.max() > 2**60


def test_many_values_at_once_pass_the_ends_of_chunks():
    permutation = Permutation(200_001, 3)
    values = permutation.values(np.arange(200_001))
    assert np.array_equal(np.sort(values), np.arange(200_001))
    some = [0, 65_535, 65_536, 131_072, 200_000]
    assert values[some].tolist() == [permutation.value(i) for i in some]


@pytest.mark.parametrize(
    ("size", "key", "values"),
    [
        (5, (0,), [4, 2, 3, 1, 0]),
        (256, (7,), [28, 213, 251, 93, 1, 242]),
        (257, (7,), [14, 0, 206, 236, 163, 109]),
        (1000, (0, 1), [676, 163, 645, 678, 942, 298]),
        (
            1000000000,
            (1099511627776, 3),
            [396086122, 310043635, 145143776, 34660047, 897095629, 536213134],
        ),
        (
            4611686018427387904,
            (1, 2, 3),
            [
                3378309755989210669,
                4026330053848690495,
                3580548927339817140,
                966893267213028413,
                1870247336348278266,
                2275276783165077763,
            ],
        ),
    ],
)
def test_the_order_never_changes(size, key, values):
    permutation = Permutation(size, *key)
    assert permutation.values(range(len(values))).tolist() == values


def test_another_seed_or_stream_is_another_order():
    every = {
        tuple(Permutation(size, *key).values(range(20)).tolist())
        for size in (100, 1_000)
        for key in [(0,), (1,), (2**32,), (2**64,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    }
    assert len(every) == 16


@pytest.mark.parametrize("size", [6, 257, 600])
def test_every_value_is_equally_likely_at_every_index(size):
    keys = 3_000
    found = np.array([Permutation(size, key).values([0, 1, size - 1]) for key in range(keys)])
    apart = (found[:, 0] - found[:, 1]) % size - 1  # never the same
    for column, among in [*((column, size) for column in found.T), (apart, size - 1)]:
        expected = keys / among
        chi_square = ((np.bincount(column, minlength=among) - expected) ** 2 / expected).sum()
        assert abs(chi_square - (among - 1)) < 5 * np.sqrt(2 * (among - 1))


def test_results_have_the_shape_of_what_was_asked():
    permutation = Permutation(1_000, 1)
    assert permutation.values(np.zeros((2, 3), np.int32)).shape == (2, 3)
    assert permutation.values(np.uint8(7)).shape == ()
    assert permutation.values([]).shape == (0,)
    assert Permutation(9, 1).indices([]).dtype == np.int64


def test_a_permutation_pickles():
    permutation = Permutation(1_000, 1, 2)
    assert pickle.loads(pickle.dumps(permutation)).value(5) == permutation.value(5)


@pytest.mark.parametrize("size", [7, 700])
def test_what_lies_outside_is_refused(size):
    permutation = Permutation(size, 1)
    for scalar in (permutation.value, permutation.index):
        for point in (-1, size):
            with pytest.raises(IndexError, match=rf"{point} is not in range\({size}\)"):
                scalar(point)
    for vector in (permutation.values, permutation.indices):
        with pytest.raises(IndexError, match=rf"{size} is not in range\({size}\)"):
            vector([0, size])
        with pytest.raises(IndexError, match=rf"-1 is not in range\({size}\)"):
            vector([0, -1])
        with pytest.raises(IndexError, match="expected integers, found float64"):
            vector([0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "size must be an integer of at least 0, found -1"),
        ((2.0, 0), r"size must be an integer of at least 0, found 2\.0"),
        ((2**62 + 1, 0), r"size must be at most 2\*\*62, found 4611686018427387905"),
        ((5, -1), "seed must be an integer of at least 0, found -1"),
        ((5, True), "seed must be an integer of at least 0, found True"),
        ((5, 0, -2), "stream must be an integer of at least 0, found -2"),
    ],
)
def test_sizes_and_keys_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Permutation(*arguments)
