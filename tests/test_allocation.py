"""The carry recurrence: vectors, laws, and the vectorised scan against slot-by-slot arithmetic."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mixcore import Allocation
from mixcore import allocation as module

VECTORS = json.loads((Path(__file__).parent / "data" / "allocation.json").read_text())
INT64_END = 2**63

relaxed = settings(deadline=None)  # the machine may be busy


def named(weights: Any) -> dict[str, int]:
    return {f"d{i}": int(w) for i, w in enumerate(weights)}


def reference(weights, batch_size, num_batches, carry=None):
    """Counts and carries after each batch, slot by slot in plain integers."""
    total = sum(weights)
    carry = list(carry or [0] * len(weights))
    counts, carries = [], []
    for _ in range(num_batches):
        batch = [batch_size * w // total for w in weights]
        carry = [c + batch_size * w % total for c, w in zip(carry, weights, strict=True)]
        for _ in range(batch_size - sum(batch)):
            greatest = carry.index(max(carry))
            batch[greatest] += 1
            carry[greatest] -= total
        counts.append(batch)
        carries.append(carry)
    return counts, carries


def assert_equals_reference(weights, batch_size, num_batches, carry=None):
    allocation = Allocation(named(weights), batch_size)
    counts, carries = reference(weights, batch_size, num_batches, carry)
    # The zero carry is passed so that the scan runs even where a table could answer.
    start = tuple(carry or [0] * len(weights))
    found = allocation.count_vectors(num_batches, start)
    assert found.dtype == np.int64
    assert found.shape == (num_batches, len(weights))
    assert found.tolist() == counts
    if num_batches:
        after = allocation.advance(start, num_batches, found.sum(axis=0).tolist())
        assert after == tuple(carries[-1])


def untabled(weights, batch_size):
    """An allocation that must scan, however short its period."""
    allocation = Allocation(named(weights), batch_size)
    allocation._tabled = False
    return allocation


weight_lists = st.lists(st.integers(1, 60), min_size=1, max_size=9)
batch_sizes = st.integers(1, 70)


# Vectors


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: f"{c['note']}-{len(c['weights'])}")
def test_reproduces_the_conformance_vectors(case):
    weights, num_batches = dict(case["weights"]), len(case["counts"])
    allocation = Allocation(weights, case["batch_size"])
    assert allocation.names == tuple(weights)
    assert allocation.period == case["period"]
    for n in range(num_batches):
        assert list(allocation.counts(n)) == case["counts"][n]
        assert list(allocation.carry(n + 1)) == case["remainder_carry_after"][n]
        assert list(allocation.offsets(n + 1)) == case["offsets_after"][n]
    assert allocation.count_vectors(num_batches).tolist() == case["counts"]
    assert allocation.count_vectors(num_batches, [0] * len(weights)).tolist() == case["counts"]
    for first in range(num_batches):
        rest = allocation.count_vectors(num_batches - first, allocation.carry(first))
        assert rest.tolist() == case["counts"][first:]


def test_golden_digest_of_algorithm_version_1():
    weights = named(1 + i * i * 7919 % 99991 for i in range(37))
    counts = Allocation(weights, 509).count_vectors(20_000)
    digest = hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()
    assert digest == "4bae06cdd8b6268034747b97d6c6dc429228e0c2e8ff4c980c0c3302ea7dd341"


def test_a_dataset_can_win_two_leftover_slots_of_one_batch():
    allocation = Allocation({"a": 5, "b": 1, "c": 1}, 4)
    base = np.array([4 * 5 // 7, 0, 0])
    assert (allocation.count_vectors(7) - base).max() == 2
    assert_equals_reference([5, 1, 1], 4, 5_000)


def test_differs_from_the_largest_remainder_of_the_cumulative_total():
    assert Allocation({"a": 1, "b": 3, "c": 3}, 1).offsets(4) == (1, 2, 1)


def test_a_batch_can_lie_more_than_one_above_the_base():
    assert Allocation({"a": 2, "b": 3, "c": 2}, 9).counts(3) == (2, 5, 2)


def test_a_common_factor_of_the_weights_scales_the_carries_only():
    plain, scaled = Allocation(named([3, 2, 1]), 4), Allocation(named([30, 20, 10]), 4)
    assert plain.count_vectors(9).tolist() == scaled.count_vectors(9).tolist()
    assert plain.carry(1) == (0, 2, -2)
    assert scaled.carry(1) == (0, 20, -20)


# Laws


@relaxed
@given(weight_lists, batch_sizes, st.integers(0, 10**18))
def test_identity_and_zero_sum_hold_before_any_batch(weights, batch_size, n):
    allocation = Allocation(named(weights), batch_size)
    carry, offsets, total = allocation.carry(n), allocation.offsets(n), sum(weights)
    for w, c, o in zip(weights, carry, offsets, strict=True):
        assert total * o + c == n * batch_size * w
        assert -total < c < max(1, len(weights) - 1) * total
    assert sum(carry) == 0
    assert sum(offsets) == n * batch_size


@relaxed
@given(weight_lists, batch_sizes)
def test_carries_return_to_zero_after_the_period_and_not_before(weights, batch_size):
    allocation = Allocation(named(weights), batch_size)
    _, carries = reference(weights, batch_size, allocation.period)
    returns = [not any(carry) for carry in carries]
    assert returns == [False] * (allocation.period - 1) + [True]
    assert allocation.period == sum(weights) // math.gcd(
        sum(weights), *(batch_size * w for w in weights)
    )


@relaxed
@given(weight_lists, batch_sizes, st.integers(0, 200))
def test_one_batch_at_a_time_equals_the_recurrence(weights, batch_size, n):
    counts, carries = reference(weights, batch_size, n + 1)
    given_before = [0] * len(weights)
    for batch in counts[:n]:
        given_before = [a + b for a, b in zip(given_before, batch, strict=True)]
    for allocation in (Allocation(named(weights), batch_size), untabled(weights, batch_size)):
        assert allocation.counts(n) == tuple(counts[n])
        assert sum(allocation.counts(n)) == batch_size
        assert allocation.offsets(n) == tuple(given_before)
        assert allocation.carry(n + 1) == tuple(carries[n])
        assert allocation.ranges(n) == tuple(
            (start, start + count) for start, count in zip(given_before, counts[n], strict=True)
        )
        assert all(type(c) is int for c in allocation.counts(n) + allocation.carry(n))


@relaxed
@given(weight_lists, batch_sizes, st.lists(st.integers(0, 400), max_size=8))
def test_batches_may_be_asked_for_in_any_order(weights, batch_size, order):
    tabled, scanned = Allocation(named(weights), batch_size), untabled(weights, batch_size)
    for n in order:
        assert scanned.offsets(n) == tabled.offsets(n)
        assert scanned.ranges(n) == tabled.ranges(n)


@relaxed
@given(weight_lists, batch_sizes, st.integers(0, 300))
@example([5, 1, 1], 4, 200)
def test_count_vectors_equal_the_recurrence(weights, batch_size, num_batches):
    assert_equals_reference(weights, batch_size, num_batches)
    bulk = Allocation(named(weights), batch_size).count_vectors(num_batches)
    assert bulk.tolist() == reference(weights, batch_size, num_batches)[0]


@pytest.mark.parametrize("size", [3, 100, 10**4, 2**50, 2**59, 2**61, 2**63, 2**70])
def test_any_integers_will_do_as_a_given_carry(size):
    rng = random.Random(size)
    for _ in range(25):
        weights = [rng.randint(1, 60) for _ in range(rng.randint(2, 9))]
        carry = [rng.randint(-size, size) for _ in weights]
        assert_equals_reference(weights, rng.randint(1, 70), 60, carry)


@relaxed
@given(weight_lists, batch_sizes, st.data())
def test_a_step_equals_the_recurrence_from_any_carry(weights, batch_size, data):
    carry = data.draw(
        st.lists(st.integers(-(2**70), 2**70), min_size=len(weights), max_size=len(weights))
    )
    counts, carries = reference(weights, batch_size, 1, carry)
    found = Allocation(named(weights), batch_size).step(carry)
    assert found == (tuple(counts[0]), tuple(carries[0]))


# The scan


@pytest.mark.parametrize("spread", ["even", "wide", "ties"])
@pytest.mark.parametrize("k", [2, 7, 40])
def test_long_scans_equal_the_recurrence(k, spread):
    rng = np.random.default_rng(k)
    weights = {
        "even": rng.integers(1, 10**6, k),
        "wide": 1 + np.exp(rng.uniform(0, 20, k)).astype(np.int64),
        "ties": rng.choice([999_983, 500_009, 7], k),
    }[spread].tolist()
    for num_batches in (1, 15, 16, 33, 4_001):
        assert_equals_reference(weights, 3 * k + 1, num_batches)
    _, carries = reference(weights, 3 * k + 1, 500)
    assert_equals_reference(weights, 3 * k + 1, 2_000, carries[-1])


@pytest.mark.parametrize("k", [300, 1_000])
def test_scans_of_many_datasets_equal_the_recurrence(k):
    weights = np.random.default_rng(k).integers(1, 10**6, k).tolist()
    allocation = Allocation(named(weights), 2 * k)
    carry, found = (0,) * k, allocation.count_vectors(150)
    for counts in found.tolist():
        expected, carry = allocation.step(carry)
        assert tuple(counts) == expected
    assert reference(weights, 2 * k, 3)[0] == found[:3].tolist()


@pytest.mark.parametrize("k", [2, 3, 8, 30])
@pytest.mark.parametrize("bits", [31, 63])
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("side", [-1, 0, 1])
def test_scans_are_exact_where_machine_integers_end(k, bits, factors, side):
    # k*W, and k*k*W for keys with a tie break, just below, about and just above 2**31 and 2**63.
    total = 2**bits // k**factors + side
    rng = np.random.default_rng(bits + k)
    weights = [1 + int(x) for x in rng.integers(0, max(1, total // (2 * k)), k)]
    weights[-1] += total - sum(weights)
    assert sum(weights) == total
    allocation = Allocation(named(weights), 4 * k + 3)
    assert allocation.arithmetic == ("int64" if k * total < INT64_END else "exact")
    assert_equals_reference(weights, 4 * k + 3, 400)
    _, carries = reference(weights, 4 * k + 3, 7)
    assert_equals_reference(weights, 4 * k + 3, 100, carries[-1])


@pytest.mark.parametrize("k", [3, 8, 30])
def test_ties_and_double_wins_are_exact_without_a_tie_break_in_the_key(k):
    # Between k*W and k*k*W; equal weights tie in every batch, one great weight wins twice.
    total = INT64_END // k - 1
    even = [total // (k + 1)] * (k - 1)
    assert_equals_reference([*even, total - sum(even)], 2 * k + 1, 600)
    assert_equals_reference([total - sum(even), *even], 2 * k + 1, 600)
    uneven = [total // (4 * k)] * (k - 1)
    assert_equals_reference([total - sum(uneven), *uneven], 2 * k - 1, 600)
    carry = [(-1) ** i * total // 2 for i in range(k)]
    assert_equals_reference([*even, total - sum(even)], 2 * k + 1, 100, carry)


def test_a_carry_far_from_balance_is_worked_off_exactly():
    weights = [5, 3, 2, 7]
    for carry in ([10_000, 0, 0, -10_000], [500, 500, 500, 500], [-999, 10**6, 3, 0]):
        assert_equals_reference(weights, 11, 3_000, carry)


def test_blocks_join_without_a_seam(monkeypatch):
    weights = named([999_983, 500_009, 7, 123_457])
    allocation = Allocation(weights, 37)
    whole = allocation.count_vectors(1_000)
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 4 * 130)
    blocks = list(Allocation(weights, 37).blocks(1_000))
    assert [first for first, _ in blocks] == list(range(0, 1_000, 130))
    assert np.concatenate([counts for _, counts in blocks]).tolist() == whole.tolist()
    assert Allocation(weights, 37).count_vectors(1_000).tolist() == whole.tolist()
    late = Allocation(weights, 37)
    assert late.offsets(1_000) == tuple(whole.sum(axis=0).tolist())
    blocks = list(allocation.blocks(300, allocation.carry(700)))
    assert np.concatenate([counts for _, counts in blocks]).tolist() == whole[700:].tolist()


def test_blocks_repeat_a_period_that_fits_a_table(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 3 * 50)
    allocation = Allocation(named([5, 1, 1]), 4)
    assert allocation.count_vectors(220).tolist() == reference([5, 1, 1], 4, 220)[0]


def test_a_block_holds_at_most_64_megabytes():
    _, counts = next(Allocation(named(range(1, 11)), 8).blocks(10**15))
    assert 2**25 < counts.nbytes <= 2**26


def test_blocks_are_the_callers_own():
    allocation = Allocation(named([2, 1]), 3)
    for _ in range(2):
        for _, counts in allocation.blocks(5):
            assert counts.tolist() == [[2, 1]] * 5
            counts[:] = 0


def test_a_tie_with_the_second_win_of_an_earlier_dataset_goes_to_that_one():
    # Weights too great for a tie break in the key; W, 0 and 0 stand before two leftover slots.
    weights = [2**56 + 1, 2**56, 2**56]
    total, remainders = sum(weights), [2 * w % sum(weights) for w in weights]
    carry = [now - r for now, r in zip((total, 0, 0), remainders, strict=True)]
    allocation = Allocation(named(weights), 2)
    assert allocation.count_vectors(1, carry).tolist() == [[2, 0, 0]]
    assert allocation.step(carry)[0] == (2, 0, 0)


def test_a_dataset_can_win_more_slots_of_a_batch_than_a_byte_holds():
    k = 601
    weights = [1] * (k - 1) + [2]
    carry = [400 * sum(weights)] + [0] * (k - 1)
    assert_equals_reference(weights, k - 1, 2, carry)
    assert Allocation(named(weights), k - 1).count_vectors(1, carry).max() > 255


def test_lanes_soon_join_their_first_run(monkeypatch):
    steps = []
    winners = module._Lanes._winners
    monkeypatch.setattr(
        module._Lanes,
        "_winners",
        lambda self, key, *a: steps.append(len(key)) or winners(self, key, *a),
    )
    monkeypatch.setattr(module, "_LANE_STEPS", 1_000)
    # Of weights as unlike as these half the guesses are wrong.
    weights = 1 + np.exp(np.random.default_rng(1).uniform(0, 14, 30)).astype(np.int64)
    allocation = Allocation(named(weights), 512)
    assert not allocation._tabled
    allocation.count_vectors(100_000)
    assert 100_000 < sum(steps) < 120_000


# Far and near


@pytest.mark.parametrize("weights", [[3, 2, 1], [5 * 10**40, 10**40, 10**40], [97, 89, 2, 41]])
def test_any_batch_is_answered_at_once_where_a_period_fits_a_table(weights):
    allocation = Allocation(named(weights), 4)
    near = allocation.ranges(10**15 % allocation.period)
    began = time.perf_counter()
    for n in (10**15, 10**15 + 1, 10**30):
        assert allocation.counts(n) == allocation.counts(n % allocation.period)
    assert time.perf_counter() - began < 1
    stride = 10**15 // allocation.period
    per_period = allocation.offsets(allocation.period)
    assert allocation.ranges(10**15) == tuple(
        (start + stride * p, stop + stride * p)
        for (start, stop), p in zip(near, per_period, strict=True)
    )


def test_sequential_access_goes_on_from_the_batch_before(monkeypatch):
    allocation = Allocation(named([999_983, 500_009, 3_000_017]), 7)
    assert not allocation._tabled
    expected = allocation.count_vectors(3_000).tolist()
    steps = []
    step = Allocation.step
    monkeypatch.setattr(Allocation, "step", lambda *args: steps.append(1) or step(*args))
    for n in range(3_000):
        assert allocation.carry(n) == allocation._carry_at(n, allocation.offsets(n))
        assert list(allocation.counts(n)) == expected[n]
        assert [stop - start for start, stop in allocation.ranges(n)] == expected[n]
    assert len(steps) == 3_000


@relaxed
@given(weight_lists, batch_sizes, st.lists(st.integers(0, 300), max_size=12))
def test_boundary_states_equal_offsets_and_carries(weights, batch_size, boundaries):
    boundaries = sorted(boundaries + boundaries[:3])
    plain = Allocation(named(weights), batch_size)
    expected = [(plain.offsets(n), plain.carry(n)) for n in boundaries]
    assert list(plain.boundary_states(boundaries)) == expected
    assert list(untabled(weights, batch_size).boundary_states(iter(boundaries))) == expected


def test_boundary_states_cross_blocks(monkeypatch):
    weights = named([999_983, 500_009, 7])
    boundaries = [0, 0, 1, 49, 50, 50, 51, 100, 149, 300]
    expected = list(Allocation(weights, 37).boundary_states(boundaries))
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 3 * 50)
    assert list(Allocation(weights, 37).boundary_states(boundaries)) == expected
    assert [offsets for offsets, _ in expected] == [
        Allocation(weights, 37).offsets(n) for n in boundaries
    ]


@relaxed
@given(weight_lists, batch_sizes, st.lists(st.integers(0, 300), max_size=12), st.integers(1, 5))
def test_boundary_arrays_are_the_boundary_states_in_parts(weights, batch_size, boundaries, size):
    boundaries.sort()
    allocation = Allocation(named(weights), batch_size)
    parts = list(allocation.boundary_arrays(boundaries, size))
    assert [len(offsets) for offsets, _ in parts[:-1]] == [size] * (len(parts) - 1)
    found = [
        (tuple(offsets), tuple(carry))
        for part in parts
        for offsets, carry in zip(*(array.tolist() for array in part), strict=True)
    ]
    assert found == [(allocation.offsets(n), allocation.carry(n)) for n in boundaries]
    dtype = np.int64 if allocation.arithmetic == "int64" else object
    assert all(array.dtype == dtype for part in parts for array in part)


@pytest.mark.parametrize("weights", [[2**60 + 1, 2**60 - 3], [2**60, 2**60]])
def test_carries_fit_int64_where_the_terms_they_come_of_do_not(weights):
    allocation = Allocation(named(weights), 3)
    assert allocation.arithmetic == "int64"
    ((offsets, carries),) = allocation.boundary_arrays(range(1000))
    assert offsets.dtype == carries.dtype == np.int64
    for n in range(0, 1000, 37):
        exact = [
            n * 3 * w - sum(weights) * o for w, o in zip(weights, offsets[n].tolist(), strict=True)
        ]
        assert carries[n].tolist() == exact


def test_offsets_past_int64_come_as_plain_integers():
    allocation = Allocation(named([1, 2]), 2**62)
    ((offsets, carries),) = allocation.boundary_arrays([1, 9])
    assert offsets.dtype == object
    for place, n in enumerate([1, 9]):
        assert tuple(offsets[place]) == allocation.offsets(n)
        assert tuple(carries[place]) == allocation.carry(n)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 5, 3], "boundaries must ascend, found 3 after 5"),
        ([-1, 5], "boundary must be an integer of at least 0, found -1"),
        ([0, 1.5], r"boundary must be an integer of at least 0, found 1\.5"),
    ],
)
def test_boundaries_must_be_ascending_batch_numbers(boundaries, message):
    with pytest.raises(ValueError, match=message):
        Allocation({"a": 1}, 1).boundary_states(boundaries)


@relaxed
@given(weight_lists, batch_sizes, st.data())
def test_first_reaching_equals_a_search_batch_by_batch(weights, batch_size, data):
    k = len(weights)
    targets = data.draw(st.lists(st.integers(1, 60), min_size=k, max_size=k))
    limit = data.draw(st.none() | st.integers(0, 100))
    allocation, scanned = Allocation(named(weights), batch_size), untabled(weights, batch_size)
    needed = allocation.reached_by(targets)
    counts, _ = reference(weights, batch_size, min(max(needed), limit or max(needed)))
    expected = []
    for i, target in enumerate(targets):
        offsets = accumulate(batch[i] for batch in counts)
        first = next((n for n, offset in enumerate(offsets) if offset >= target), None)
        expected.append(first if limit is None or (first is not None and first < limit) else None)
    assert allocation.first_reaching(targets, limit) == expected
    assert scanned.first_reaching(targets, limit) == expected
    if limit is None:
        assert all(n is not None and n < end for n, end in zip(expected, needed, strict=True))


def test_a_carry_can_exceed_one_item_so_a_target_may_be_reached_a_batch_later_than_due():
    allocation = Allocation(named([21, 10, 21, 10, 6]), 13)
    assert allocation.carry(34)[4] == allocation.total
    due = 34 * 13 * 6 // allocation.total
    assert allocation.offsets(34)[4] == due - 1
    assert allocation.first_reaching([1, 1, 1, 1, due])[4] == 34


def test_first_reaching_is_quick_for_huge_targets_where_a_period_fits_a_table():
    allocation = Allocation(named([3, 2, 1]), 4)
    began = time.perf_counter()
    found = allocation.first_reaching([10**30, 10**15, 1])
    assert time.perf_counter() - began < 1
    for i, n in enumerate(found):
        target = (10**30, 10**15, 1)[i]
        assert allocation.offsets(n)[i] < target <= allocation.offsets(n + 1)[i]


def test_first_reaching_crosses_blocks_and_stops_when_all_are_found(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", 3 * 50)
    allocation = Allocation(named([999_983, 500_009, 800_003]), 7)
    targets = [1_000, 1, 430]
    found = allocation.first_reaching(targets)
    for i, n in enumerate(found):
        assert allocation.offsets(n)[i] < targets[i] <= allocation.offsets(n + 1)[i]
    assert max(found) > 150
    assert allocation.first_reaching(targets, limit=100) == [None, found[1], None]
    # A tiny weight is first served long after the others: an early stop would miss nothing else.
    drawn = []
    scan = Allocation._scan
    monkeypatch.setattr(
        Allocation, "_scan", lambda self, n, carry: drawn.append(n) or scan(self, n, carry)
    )
    allocation.first_reaching([1, 1, 1], limit=10**9)
    assert sum(drawn) <= 50


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([0, 1], "target of 'd0' must be an integer of at least 1, found 0"),
        ([1, True], "target of 'd1' must be an integer of at least 1, found True"),
        ([1], "expected 2 targets, found 1"),
    ],
)
def test_targets_must_be_one_positive_integer_a_dataset(targets, message):
    with pytest.raises(ValueError, match=message):
        Allocation(named([1, 1]), 1).first_reaching(targets)


# Configuration


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "weights must map at least one dataset name to an integer, found {}"),
        ([("a", 1)], "weights must map at least one dataset name to an integer, found"),
        (None, "weights must map at least one dataset name to an integer, found None"),
        ({1: 1}, "a dataset name must be a string, found 1"),
        ({"a": 1, "b": 0}, "weight of 'b' must be an integer of at least 1, found 0"),
        ({"a": -3}, "weight of 'a' must be an integer of at least 1, found -3"),
        ({"a": True}, "weight of 'a' must be an integer of at least 1, found True"),
        ({"a": 1.0}, r"weight of 'a' must be an integer of at least 1, found 1\.0"),
        ({"a": "1"}, "weight of 'a' must be an integer of at least 1, found '1'"),
        ({"a": None}, "weight of 'a' must be an integer of at least 1, found None"),
        ({"a": np.bool_(True)}, "weight of 'a' must be an integer of at least 1, found"),
    ],
)
def test_weights_must_be_positive_integers_by_name(weights, message):
    with pytest.raises(ValueError, match=message):
        Allocation(weights, 4)


@pytest.mark.parametrize("batch_size", [0, -1, True, False, 2.0, "4", None])
def test_the_batch_size_must_be_a_positive_integer(batch_size):
    with pytest.raises(ValueError, match=r"batch_size must be an integer of at least 1, found"):
        Allocation({"a": 1}, batch_size)


def test_a_batch_must_fit_64_bits():
    with pytest.raises(ValueError, match=r"batch_size must be below 2\*\*63, found 9223372036854"):
        Allocation({"a": 1}, 2**63)
    assert (
        Allocation(named([1, 2]), 2**63 - 1).count_vectors(3).sum(axis=1).tolist()
        == [2**63 - 1] * 3
    )


def test_integers_of_other_types_become_plain_ones():
    allocation = Allocation({"a": np.int64(3), "b": np.uint8(1)}, np.int32(4))
    assert (allocation.weights, allocation.batch_size) == ((3, 1), 4)
    assert all(type(x) is int for x in (*allocation.weights, allocation.batch_size))
    assert allocation.counts(np.int64(2)) == (3, 1)
    assert allocation.carry(np.int64(2)) == (0, 0)


@pytest.mark.parametrize("method", ["counts", "carry", "offsets", "ranges", "count_vectors"])
@pytest.mark.parametrize("n", [-1, 0.0, None])
def test_batch_numbers_must_not_be_negative(method, n):
    with pytest.raises(ValueError, match=f"must be an integer of at least 0, found {n}"):
        getattr(Allocation({"a": 1}, 1), method)(n)


def test_a_carry_must_have_one_integer_a_dataset():
    allocation = Allocation(named([1, 2]), 2)
    for use in (allocation.step, lambda carry: allocation.count_vectors(1, carry)):
        with pytest.raises(
            ValueError, match="a carry must hold 2 integers, one a dataset, found 3"
        ):
            use([0, 0, 0])


def test_equal_allocations_compare_hash_and_pickle_without_their_table():
    allocation = Allocation({"a": 3, "b": 1}, 4)
    allocation.counts(7)
    assert repr(allocation) == "Allocation({'a': 3, 'b': 1}, 4)"
    twin = pickle.loads(pickle.dumps(allocation))
    assert twin == allocation
    assert hash(twin) == hash(allocation)
    assert twin._table is None
    assert allocation != Allocation({"b": 1, "a": 3}, 4)
    assert allocation != "Allocation"


def test_weights_are_copied():
    weights = {"a": 3, "b": 1}
    allocation = Allocation(weights, 4)
    weights["a"] = 99
    assert allocation.counts(0) == (3, 1)
