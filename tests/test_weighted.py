"""Mixing by weights: row maps against brute force, the batcher against its contract."""

from __future__ import annotations

import pickle
import re
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore import Allocation, DataBatcher, DatasetExhausted, Mixture, WeightedMixture
from mixcore.weighted import batches_filled, batches_until_seen, first_unfillable

relaxed = settings(deadline=None)  # the machine may be busy

WEIGHTS = {"a": 3, "b": 2, "c": 1}


class ListRegistry:
    """Datasets held in lists; remembers what was opened, and what was closed."""

    def __init__(self, datasets):
        self.datasets = datasets
        self.opened = []
        self.closed = []
        self.broken = {}  # name -> exception raised when it is opened

    def get_iterator(self, name, offset=0):
        self.opened.append((name, offset))
        if name in self.broken:
            raise self.broken[name]
        return self.iterate(name, offset)

    def iterate(self, name, offset):
        try:
            yield from self.datasets[name][offset:]
        finally:
            self.closed.append(name)


def numbered(names, rows=1_000):
    return ListRegistry({name: [(name, i) for i in range(rows)] for name in names})


def batcher(weights=WEIGHTS, batch_size=4, rows=1_000):
    return DataBatcher(numbered(weights, rows), weights, batch_size)


def state(offsets, carry, names="abc"):
    return {
        "offsets": dict(zip(names, offsets, strict=True)),
        "remainder_carry": dict(zip(names, carry, strict=True)),
    }


@st.composite
def mixtures(draw):
    weights = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    rows = draw(st.lists(st.integers(1, 30), min_size=len(weights), max_size=len(weights)))
    allocation = Allocation({f"d{i}": w for i, w in enumerate(weights)}, draw(st.integers(1, 50)))
    return WeightedMixture(allocation, tuple(rows), draw(st.integers(0, 25)), repeat=True)


def items_of(row_map, names):
    """(batch, name, row, epoch) of every row of a map."""
    columns = (row_map.batch, row_map.dataset, row_map.start, row_map.count, row_map.epoch)
    assert [c.dtype for c in columns] == [np.int64, np.int32, np.int64, np.int64, np.int32]
    assert len({len(c) for c in columns}) == 1
    assert (row_map.count >= 1).all()
    return [
        (batch, names[dataset], start + i, epoch)
        for batch, dataset, start, count, epoch in zip(*(c.tolist() for c in columns), strict=True)
        for i in range(count)
    ]


def items_by_brute_force(mixture, first, stop):
    allocation = mixture.allocation
    return [
        (n - first, name, offset % rows, offset // rows)
        for n in range(first, stop)
        for name, rows, span in zip(
            allocation.names, mixture.dataset_rows, allocation.ranges(n), strict=True
        )
        for offset in range(*span)
    ]


# WeightedMixture


@relaxed
@given(mixtures(), st.data())
def test_rows_equal_brute_force_also_where_a_batch_spans_epochs(mixture, data):
    first = data.draw(st.integers(0, mixture.num_batches))
    stop = data.draw(st.integers(first, mixture.num_batches))
    (before,) = mixture.states([first])
    row_map = mixture.rows(before, stop - first)
    assert items_of(row_map, mixture.names) == items_by_brute_force(mixture, first, stop)
    assert row_map.num_rows == (stop - first) * mixture.rows_per_batch


@relaxed
@given(mixtures())
def test_the_shards_rows_are_what_the_batcher_emits_and_states_are_its_checkpoints(mixture):
    weights = dict(zip(mixture.names, mixture.allocation.weights, strict=True))
    online = DataBatcher(EndlessRegistry(mixture), weights, mixture.rows_per_batch)
    for before in mixture.states(range(mixture.num_batches)):
        assert before == online.state_dict()
        assert [*before["offsets"]] == [*before["remainder_carry"]] == [*mixture.names]
        items = [item[1:] for item in items_of(mixture.rows(before, 1), mixture.names)]
        assert items == online.next_batch()


class EndlessRegistry:
    """Items (name, row, epoch), repeated for ever."""

    def __init__(self, mixture):
        self.rows = dict(zip(mixture.names, mixture.dataset_rows, strict=True))

    def get_iterator(self, name, offset=0):
        rows = self.rows[name]
        return ((name, i % rows, i // rows) for i in count(offset))


@pytest.mark.parametrize("weights", [[3, 2, 1], [10**30, 7 * 10**29, 3], [999_983, 500_009, 7]])
def test_a_mixture_in_any_arithmetic_gives_the_same_rows_from_any_boundary(weights):
    allocation = Allocation({f"d{i}": w for i, w in enumerate(weights)}, 16)
    mixture = WeightedMixture(allocation, (50, 700, 3), 60, repeat=True)
    states = list(mixture.states([0, 7, 7, 40, 60]))
    whole = items_by_brute_force(mixture, 0, 60)
    assert items_of(mixture.rows(states[0], 60), mixture.names) == whole
    for first, before in zip([0, 7, 7, 40, 60], states, strict=True):
        rest = [(n - first, *item) for n, *item in whole if n >= first]
        assert items_of(mixture.rows(before, 60 - first), mixture.names) == rest


def test_a_mixture_fulfils_the_protocol_and_pickles():
    mixture: Mixture = WeightedMixture(Allocation(WEIGHTS, 4), [9, 9, 9], 5, repeat=False)
    assert mixture.names == ("a", "b", "c")
    assert (mixture.num_batches, mixture.rows_per_batch) == (5, 4)
    assert mixture.state_kind == "weighted"
    assert mixture.dataset_rows == (9, 9, 9)
    assert pickle.loads(pickle.dumps(mixture)) == mixture


def test_datasets_that_give_nothing_to_a_batch_have_no_entry():
    mixture = WeightedMixture(Allocation(WEIGHTS, 4), (9, 9, 9), 2, repeat=False)
    row_map = mixture.rows(next(mixture.states([0])), 2)
    assert row_map.batch.tolist() == [0, 0, 0, 1, 1]
    assert row_map.dataset.tolist() == [0, 1, 2, 0, 1]
    assert row_map.start.tolist() == [0, 0, 0, 2, 1]
    assert row_map.count.tolist() == [2, 1, 1, 2, 2]
    assert row_map.epoch.tolist() == [0] * 5


def test_without_repeat_running_past_a_datasets_rows_names_it():
    mixture = WeightedMixture(Allocation(WEIGHTS, 4), (6, 3, 2), 3, repeat=False)
    start = next(mixture.states([0]))
    assert mixture.rows(start, 2).num_rows == 8
    message = "dataset 'b' has 3 rows, expected at least 4: 3 batches take 4 from row 0 on"
    with pytest.raises(ValueError, match=message):
        mixture.rows(start, 3)


def test_items_past_33_bits_are_the_same_online_and_in_row_maps():
    rows = (2**34 + 5, 2**35)
    mixture = WeightedMixture(Allocation({"a": 3, "b": 2}, 7), rows, 2**33, repeat=True)
    online = DataBatcher(EndlessRegistry(mixture), {"a": 3, "b": 2}, 7)
    # Past 2^33 items of each, and where the first dataset begins its second epoch.
    for batch in (2**33 - 4, rows[0] * 5 // 21 - 1):
        (before,) = mixture.states([batch])
        online.load_state_dict(before)
        assert min(before["offsets"].values()) > 2**33
        for _ in range(3):
            items = [item[1:] for item in items_of(mixture.rows(before, 1), mixture.names)]
            assert items == online.next_batch()
            before = online.state_dict()
    assert {epoch for _, _, epoch in items} == {0, 1}


def test_offsets_past_64_bits_are_exact_and_epochs_past_32_bits_are_refused():
    allocation = Allocation({"a": 1, "b": 1}, 4)
    mixture = WeightedMixture(allocation, (2**40, 2**40 + 1), 3, repeat=True)
    far = {"offsets": {"a": 2**70 + 5, "b": 0}, "remainder_carry": {"a": 0, "b": 0}}
    row_map = mixture.rows(far, 1)
    assert (row_map.start.tolist(), row_map.epoch.tolist()) == ([5, 0], [2**30, 0])
    far["offsets"]["a"] = 2**71
    with pytest.raises(
        ValueError, match="dataset 'a' of 1099511627776 rows would be in epoch 2147"
    ):
        mixture.rows(far, 1)


@pytest.mark.parametrize(
    ("rows", "num_batches", "message"),
    [
        ((9, 9), 1, "expected rows of 3 datasets, found 2"),
        ((9, 0, 9), 1, "rows of dataset 'b' must be an integer of at least 1, found 0"),
        ((9, True, 9), 1, "rows of dataset 'b' must be an integer of at least 1, found True"),
        ((9, 9, 9), -1, "num_batches must be an integer of at least 0, found -1"),
        ((9, 9, 2**60), 1, r"c must have fewer than 2\*\*60 rows, found 1152921504606846976"),
        ((9, 9, 9), 2**58, r"the mixture must have fewer than 2\*\*60 rows, found 115292150460684"),
    ],
)
def test_a_mixture_refuses_lengths_that_are_not_row_counts(rows, num_batches, message):
    with pytest.raises(ValueError, match=message):
        WeightedMixture(Allocation(WEIGHTS, 4), rows, num_batches, repeat=True)


def test_boundaries_and_batches_past_the_end_are_refused():
    mixture = WeightedMixture(Allocation(WEIGHTS, 4), (9, 9, 9), 3, repeat=True)
    with pytest.raises(ValueError, match="boundary 4 is past the mixture's 3 batches"):
        mixture.states([0, 4])
    with pytest.raises(ValueError, match="boundaries must ascend, found 1 after 2"):
        mixture.states([2, 1])
    with pytest.raises(ValueError, match="the mixture has 3 batches, asked for 4"):
        mixture.rows(next(mixture.states([0])), 4)


# Length rules


@relaxed
@given(mixtures())
def test_length_rules_equal_a_search_batch_by_batch(mixture):
    allocation, rows = mixture.allocation, mixture.dataset_rows
    offsets = [(0,) * len(rows)]
    while not all(o > r for o, r in zip(offsets[-1], rows, strict=True)):
        offsets.append(allocation.offsets(len(offsets)))
    filled = max(n for n, at in enumerate(offsets) if all(map(int.__le__, at, rows)))
    seen = min(n for n, at in enumerate(offsets) if all(map(int.__ge__, at, rows)))
    ends = [
        next(n - 1 for n, at in enumerate(offsets) if at[i] > rows[i]) for i in range(len(rows))
    ]
    for _ in range(2):  # with a table, then by scanning
        assert batches_filled(allocation, rows) == filled
        assert batches_until_seen(allocation, rows) == seen
        assert first_unfillable(allocation, rows, len(offsets)) == ends
        limited = [n if n < filled + 2 else None for n in ends]
        assert first_unfillable(allocation, rows, filled + 2) == limited
        allocation._tabled = False


def test_length_rules_are_quick_for_huge_datasets():
    allocation = Allocation(WEIGHTS, 4)
    assert batches_filled(allocation, [10**18, 10**18, 10**18]) == 10**18 // 2
    assert batches_until_seen(allocation, [6 * 10**18, 10**3, 10**3]) == 3 * 10**18
    assert first_unfillable(allocation, [10**18, 10**12, 10], 10**13) == [None, 750 * 10**9, 15]


def test_length_rules_name_an_empty_dataset():
    for rule in (batches_filled, batches_until_seen):
        with pytest.raises(
            ValueError, match="rows of dataset 'b' must be an integer of at least 1"
        ):
            rule(Allocation(WEIGHTS, 4), [1, 0, 1])


# DataBatcher: batches


def test_batches_are_grouped_in_configured_order():
    online = batcher(WEIGHTS, 4)
    assert [online.next_batch() for _ in range(3)] == [
        [("a", 0), ("a", 1), ("b", 0), ("c", 0)],
        [("a", 2), ("a", 3), ("b", 1), ("b", 2)],
        [("a", 4), ("a", 5), ("b", 3), ("c", 1)],
    ]


@relaxed
@given(
    st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1, max_size=7),
    st.integers(1, 40),
)
def test_batches_are_full_and_follow_the_allocation(weights, batch_size):
    online, allocation = batcher(weights, batch_size), Allocation(weights, batch_size)
    for n in range(12):
        batch = online.next_batch()
        assert type(batch) is list
        assert len(batch) == batch_size
        assert batch == [
            (name, i)
            for name, span in zip(weights, allocation.ranges(n), strict=True)
            for i in range(*span)
        ]


@relaxed
@given(
    st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1, max_size=7),
    st.integers(1, 40),
)
def test_resuming_at_any_boundary_equals_the_uninterrupted_run(weights, batch_size):
    whole = batcher(weights, batch_size)
    states, batches = [], []
    for _ in range(10):
        states.append(whole.state_dict())
        batches.append(whole.next_batch())
    for n, before in enumerate(states):
        resumed = batcher(weights, batch_size)
        resumed.load_state_dict(pickle.loads(pickle.dumps(before)))
        for later in range(n, 10):
            assert resumed.state_dict() == states[later]
            assert resumed.next_batch() == batches[later]


def test_nothing_is_opened_before_it_is_needed():
    weights = {"a": 5, "b": 1, "c": 1}
    registry = numbered(weights)
    online = DataBatcher(registry, weights, 1)
    assert registry.opened == []
    online.next_batch()
    online.next_batch()
    assert registry.opened == [("a", 0)]
    online.next_batch()
    assert registry.opened == [("a", 0), ("b", 0)]


def test_each_dataset_is_opened_once():
    registry = numbered(WEIGHTS)
    online = DataBatcher(registry, WEIGHTS, 4)
    for _ in range(20):
        online.next_batch()
    assert registry.opened == [("a", 0), ("b", 0), ("c", 0)]


def test_weights_are_copied_in():
    weights = dict(WEIGHTS)
    online = batcher(weights)
    weights["a"] = 99
    assert online.next_batch() == batcher(WEIGHTS).next_batch()


def test_a_registry_may_return_an_iterable():
    class Lists:
        def get_iterator(self, name, offset=0):
            return [f"{name}{i}" for i in range(offset, 50)]

    online = DataBatcher(Lists(), {"a": 2, "b": 1}, 3)
    assert [online.next_batch(), online.next_batch()] == [["a0", "a1", "b0"], ["a2", "a3", "b1"]]


@pytest.mark.parametrize(
    ("weights", "batch_size", "message"),
    [
        ({}, 4, "weights must map at least one dataset name to an integer, found {}"),
        (["a"], 4, "weights must map at least one dataset name to an integer, found"),
        ({"a": 0}, 4, "weight of 'a' must be an integer of at least 1, found 0"),
        ({"a": 1, "b": True}, 4, "weight of 'b' must be an integer of at least 1, found True"),
        ({"a": 0.5}, 4, r"weight of 'a' must be an integer of at least 1, found 0\.5"),
        ({"a": 1}, 0, "batch_size must be an integer of at least 1, found 0"),
        ({"a": 1}, True, "batch_size must be an integer of at least 1, found True"),
        ({"a": 1}, 4.0, r"batch_size must be an integer of at least 1, found 4\.0"),
    ],
)
def test_weights_and_batch_size_must_be_positive_integers(weights, batch_size, message):
    with pytest.raises(ValueError, match=message):
        DataBatcher(numbered("a"), weights, batch_size)


# DataBatcher: checkpoints


def test_a_checkpoint_is_exactly_offsets_and_carries_in_configured_order():
    online = batcher({"b": 2, "a": 3, "c": 1})
    online.next_batch()
    found = online.state_dict()
    assert found == {
        "offsets": {"b": 1, "a": 2, "c": 1},
        "remainder_carry": {"b": 2, "a": 0, "c": -2},
    }
    assert [*found] == ["offsets", "remainder_carry"]
    assert [*found["offsets"]] == [*found["remainder_carry"]] == ["b", "a", "c"]


def test_checkpoints_are_independent_copies():
    online = batcher()
    online.next_batch()
    taken = online.state_dict()
    kept = pickle.loads(pickle.dumps(taken))
    online.next_batch()
    assert taken == kept
    taken["offsets"]["a"] = 500
    assert online.state_dict()["offsets"]["a"] == 4
    online.load_state_dict(kept)
    kept["offsets"]["a"] = kept["remainder_carry"]["a"] = 500
    expected = batcher()
    expected.next_batch()
    assert online.state_dict() == expected.state_dict()
    assert online.next_batch() == expected.next_batch()


def test_loading_opens_every_dataset_directly_at_its_offset():
    registry = numbered(WEIGHTS)
    online = DataBatcher(registry, WEIGHTS, 4)
    online.next_batch()
    registry.opened.clear()
    online.load_state_dict(state([100, 200, 300], [0, 2, -2]))
    assert registry.opened == [("a", 100), ("b", 200), ("c", 300)]
    assert sorted(registry.closed) == ["a", "b", "c"]
    assert online.next_batch() == [("a", 100), ("a", 101), ("b", 200), ("b", 201)]
    assert len(registry.opened) == 3


def test_checkpoint_keys_may_stand_in_any_order_and_carries_may_be_any_integers():
    online = batcher()
    online.load_state_dict(
        {
            "remainder_carry": {"c": -(10**30), "a": np.int64(-4), "b": 5},
            "offsets": {"b": 2, "c": 0, "a": np.int32(1)},
        }
    )
    assert online.state_dict() == state([1, 2, 0], [-4, 5, -(10**30)])
    assert type(online.state_dict()["offsets"]["a"]) is int
    assert online.next_batch() == [("a", 1), ("a", 2), ("b", 2), ("b", 3)]


GOOD = state([2, 1, 1], [0, 2, -2])
NOT_ALL = "must name exactly the configured datasets"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "a checkpoint must be a dict, found NoneType"),
        ([("offsets", {})], "a checkpoint must be a dict, found list"),
        ("offsets", "a checkpoint must be a dict, found str"),
        ({}, "a checkpoint must have exactly the fields ('offsets', 'remainder_carry'), found []"),
        ({"offsets": GOOD["offsets"]}, "found ['offsets']"),
        ({**GOOD, "version": 1}, "found ['offsets', 'remainder_carry', 'version']"),
        ({**GOOD, "offsets": [2, 1, 1]}, "field 'offsets' must map every dataset to an integer"),
        ({**GOOD, "remainder_carry": None}, "field 'remainder_carry' must map every dataset"),
        ({**GOOD, "offsets": {"a": 1, "b": 1}}, f"{NOT_ALL}; missing: ['c'], unknown: []"),
        ({**GOOD, "remainder_carry": {}}, f"{NOT_ALL}; missing: ['a', 'b', 'c'], unknown: []"),
        (
            {**GOOD, "offsets": {"a": 1, "b": 1, "c": 1, "d": 1}},
            f"{NOT_ALL}; missing: [], unknown: ['d']",
        ),
        (state([2, -1, 1], [0, 2, -2]), "offsets['b'] must be an integer of at least 0, found -1"),
        (state([2, True, 1], [0, 2, -2]), "offsets['b'] must be an integer of at least 0, found T"),
        (state([2, 1.0, 1], [0, 2, -2]), "offsets['b'] must be an integer of at least 0, found 1."),
        (state([2, "1", 1], [0, 2, -2]), "offsets['b'] must be an integer of at least 0, found '1"),
        (state([2, 1, 1], [0, 2, -2.0]), "remainder_carry['c'] must be an integer, found -2.0"),
        (state([2, 1, 1], [0, 2, False]), "remainder_carry['c'] must be an integer, found False"),
        (state([2, 1, 1], [0, 2, None]), "remainder_carry['c'] must be an integer, found None"),
    ],
)
def test_an_invalid_checkpoint_is_refused_before_anything_changes(bad, message):
    registry = numbered(WEIGHTS)
    online, expected = DataBatcher(registry, WEIGHTS, 4), batcher()
    online.next_batch()
    expected.next_batch()
    opened = len(registry.opened)
    with pytest.raises(ValueError, match=re.escape(message)):
        online.load_state_dict(bad)
    assert len(registry.opened) == opened
    assert registry.closed == []
    assert online.state_dict() == expected.state_dict()
    assert online.next_batch() == expected.next_batch()
    mixture = WeightedMixture(Allocation(WEIGHTS, 4), (9, 9, 9), 3, repeat=True)
    with pytest.raises(ValueError, match=re.escape(message)):
        mixture.rows(bad, 1)


def test_where_a_dataset_cannot_be_opened_loading_changes_nothing():
    registry = numbered(WEIGHTS)
    online, expected = DataBatcher(registry, WEIGHTS, 4), batcher()
    online.next_batch()
    expected.next_batch()
    registry.broken["c"] = OSError("no such bucket")
    with pytest.raises(OSError, match="no such bucket"):
        online.load_state_dict(state([100, 100, 100], [0, 0, 0]))
    assert registry.opened[-3:] == [("a", 100), ("b", 100), ("c", 100)]
    assert online.state_dict() == expected.state_dict()
    assert [online.next_batch() for _ in range(3)] == [expected.next_batch() for _ in range(3)]


def test_where_a_dataset_cannot_be_opened_those_opened_before_are_closed():
    closed = []

    class Closing:
        def __init__(self, name):
            self.name = name

        def __iter__(self):
            return self

        def __next__(self):
            return self.name

        def close(self):
            closed.append(self.name)
            raise RuntimeError("closing fails too")

    class Registry:
        def get_iterator(self, name, offset=0):
            if name == "c":
                raise OSError("no such bucket")
            return Closing(name)

    online = DataBatcher(Registry(), WEIGHTS, 4)
    with pytest.raises(OSError, match="no such bucket"):
        online.load_state_dict(GOOD)
    assert closed == ["a", "b"]


def test_a_dataset_that_cannot_be_opened_leaves_the_batch_to_be_asked_for_again():
    registry = numbered(WEIGHTS)
    online = DataBatcher(registry, WEIGHTS, 4)
    registry.broken["c"] = OSError("no such bucket")
    with pytest.raises(OSError, match="no such bucket"):
        online.next_batch()
    assert online.state_dict() == state([0, 0, 0], [0, 0, 0])
    del registry.broken["c"]
    assert online.next_batch() == [("a", 0), ("a", 1), ("b", 0), ("c", 0)]


# DataBatcher: datasets that end or fail


def test_a_dataset_that_ends_inside_a_batch_is_named_and_the_batch_is_not_begun():
    registry = numbered(WEIGHTS)
    registry.datasets["b"] = registry.datasets["b"][:2]
    online = DataBatcher(registry, WEIGHTS, 4)
    first = online.next_batch()
    before = online.state_dict()
    message = (
        "dataset 'b' is exhausted: the batch needs 2 items from offset 1 on, the dataset gave 1"
    )
    for _ in range(2):
        with pytest.raises(DatasetExhausted, match=message) as caught:
            online.next_batch()
        error = caught.value
        assert (error.name, error.offset, error.needed, error.given) == ("b", 1, 2, 1)
        assert online.state_dict() == before
    registry.datasets["b"] += [("b", 2)]  # more has arrived: what was drawn is not lost
    assert first + online.next_batch() == [
        *[("a", 0), ("a", 1), ("b", 0), ("c", 0)],
        *[("a", 2), ("a", 3), ("b", 1), ("b", 2)],
    ]


def test_an_exhausted_dataset_is_a_runtime_error_that_pickles():
    error = pickle.loads(pickle.dumps(DatasetExhausted("b", 10, 4, 1)))
    assert isinstance(error, RuntimeError)
    assert str(error) == str(DatasetExhausted("b", 10, 4, 1))
    assert error.name == "b"


def test_an_empty_dataset_is_exhausted_at_once():
    online = DataBatcher(ListRegistry({"a": []}), {"a": 1}, 2)
    message = "dataset 'a' is exhausted: the batch needs 2 items from offset 0 on, the dataset gave"
    with pytest.raises(DatasetExhausted, match=f"{message} 0"):
        online.next_batch()


@pytest.mark.parametrize("error", [OSError("page checksum"), KeyboardInterrupt()])
def test_a_dataset_that_fails_inside_a_batch_leaves_the_batcher_before_it(error):
    failing = {"on": True}

    class Flaky(ListRegistry):
        def iterate(self, name, offset):
            for item in self.datasets[name][offset:]:
                if failing["on"] and item == ("c", 1):
                    raise error
                yield item

    registry = Flaky(numbered(WEIGHTS).datasets)
    online, expected = DataBatcher(registry, WEIGHTS, 4), batcher()
    for _ in range(2):
        assert online.next_batch() == expected.next_batch()
    with pytest.raises(type(error)):
        online.next_batch()
    assert online.state_dict() == expected.state_dict()
    failing["on"] = False
    for _ in range(3):
        assert online.next_batch() == expected.next_batch()
    assert registry.opened[-3:] == [("a", 4), ("b", 3), ("c", 1)]
