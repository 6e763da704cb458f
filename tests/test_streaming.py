"""The streaming datasets: what is drawn, what is open, what fails, and exact resume."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore.reservoir import NoSamples
from mixcore.streaming import (
    ChildError,
    RegistryChild,
    StreamingDataset,
    StreamingDatasetNoIndex,
)

relaxed = settings(deadline=None)  # the machine may be busy


class Plain:
    """Samples (name, 0), (name, 1), ..; to be read from the start only."""

    def __init__(self, name, rows):
        self.name = name
        self.rows = rows

    def __iter__(self):
        return iter([(self.name, i) for i in range(self.rows)])


class AtOffset(Plain):
    """Opens at any offset, and not from the start."""

    def __iter__(self):
        raise AssertionError("get_iterator is there to be used")

    def get_iterator(self, offset):
        assert 0 <= offset <= self.rows
        return iter([(self.name, i) for i in range(offset, self.rows)])


class KeepsPosition(Plain):
    """Keeps its own position; records what it reads, and fails once where it is told to."""

    def __init__(self, name, rows):
        super().__init__(name, rows)
        self.at = self.resume_at = 0
        self.fails_at = None
        self.reads = []

    def __iter__(self):
        self.at, self.resume_at = self.resume_at, 0
        return self.read(self.at)

    def read(self, first):
        for i in range(first, self.rows):
            if i == self.fails_at:
                self.fails_at = None
                raise OSError("no such bucket")
            self.reads.append(i)
            self.at = i + 1
            yield self.name, i

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resume_at = state["at"]


class IteratorKeepsPosition(Plain):
    """Gives iterators that keep their own position."""

    def __iter__(self):
        return Position(self.name, self.rows)


class Position:
    def __init__(self, name, rows):
        self.name = name
        self.rows = rows
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.rows:
            raise StopIteration
        self.at += 1
        return self.name, self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Nested(Plain):
    """A streaming dataset of two, as a child."""

    def __new__(cls, name, rows):
        parts = [Plain((name, "x"), rows // 2), Plain((name, "y"), rows - rows // 2)]
        return StreamingDataset(parts, 1, seed=rows, passes=1)


class Watched(Plain):
    """Counts what is open, and fails where it is told to."""

    open = 0
    most_open = 0

    def __init__(self, name, rows, fails=None):
        super().__init__(name, rows)
        self.fails = fails or {}  # a row, or "open" -> exception, raised once

    def __iter__(self):
        if "open" in self.fails:
            raise self.fails.pop("open")
        return self.read()

    def read(self):
        Watched.open += 1
        Watched.most_open = max(Watched.most_open, Watched.open)
        try:
            for i in range(self.rows):
                if i in self.fails:
                    raise self.fails.pop(i)
                yield self.name, i
        finally:
            Watched.open -= 1


@pytest.fixture
def watched():
    """A maker of watched children, all counts at zero."""
    Watched.open = Watched.most_open = 0
    return lambda *rows: [Watched(i, n) for i, n in enumerate(rows)]


def children(*rows, kind=Plain):
    return [kind(i, n) for i, n in enumerate(rows)]


def first(count, dataset):
    return list(islice(dataset, count))


# What is drawn


def test_samples_carry_the_index_of_their_child_or_not():
    indexed = StreamingDataset(children(3, 4, 5), 2, seed=7)
    bare = StreamingDatasetNoIndex(children(3, 4, 5), 2, seed=7)
    samples = first(50, indexed)
    assert all(index == sample[0] for index, sample in samples)
    assert first(50, bare) == [sample for _, sample in samples]
    assert isinstance(bare, StreamingDataset)


def test_the_order_never_changes():
    samples = first(16, StreamingDatasetNoIndex(children(2, 3, 0, 4), 2, seed=11))
    assert samples == [
        (3, 0),
        (3, 1),
        (3, 2),
        (1, 0),
        (1, 1),
        (3, 3),
        (1, 2),
        (0, 0),
        (3, 0),
        (3, 1),
        (0, 1),
        (3, 2),
        (3, 3),
        (0, 0),
        (0, 1),
        (3, 0),
    ]
    samples = list(StreamingDatasetNoIndex(children(2, 1, 0, 2), 2, seed=11, passes=2))
    assert samples == [
        (0, 0),
        (3, 0),
        (3, 1),
        (1, 0),
        (0, 1),
        (0, 0),
        (0, 1),
        (1, 0),
        (3, 0),
        (3, 1),
    ]


def test_the_stream_is_endless_and_fair_and_a_child_begins_again_at_its_start():
    samples = first(4_000, StreamingDataset(children(5, 5, 5, 5), 2))
    counts = Counter(samples)
    assert len(counts) == 20
    assert all(150 < n < 250 for n in counts.values())
    for child in range(4):
        rows = [i for index, (_, i) in samples if index == child]
        assert rows == [i % 5 for i in range(len(rows))]


def test_passes_give_every_sample_so_many_times_one_pass_after_the_other():
    dataset = StreamingDatasetNoIndex(children(3, 0, 4, 2), 2, passes=3)
    every = sorted((child, i) for child, n in enumerate((3, 0, 4, 2)) for i in range(n))
    samples = list(dataset)
    assert [sorted(samples[i : i + 9]) for i in (0, 9, 18)] == [every] * 3
    assert len({tuple(samples[i : i + 9]) for i in (0, 9, 18)}) == 3
    assert list(dataset) == samples


@pytest.mark.parametrize("passes", [None, 40])
def test_a_seed_is_an_order_and_another_seed_another(passes):
    def order(seed):
        return first(40, StreamingDataset(children(3, 3, 3, 3), 2, seed=seed, passes=passes))

    assert order(5) == order(5)
    assert len({tuple(order(seed)) for seed in (0, 1, 2**32, 2**64, 2**64 + 1)}) == 5


def test_anything_is_a_sample_also_none():
    dataset = StreamingDataset([[None, None], [False, 0]], 1, passes=1)
    assert sorted(dataset, key=str) == [(0, None), (0, None), (1, 0), (1, False)]
    assert None in first(9, StreamingDatasetNoIndex([[None], [None]], 1))


@pytest.mark.parametrize("max_simultaneous", [1, 3, 100])
@pytest.mark.parametrize("passes", [None, 30])
def test_a_child_that_ends_gives_way_to_one_that_waits(max_simultaneous, passes, watched):
    dataset = StreamingDataset(watched(1, 1, 1, 1), max_simultaneous, passes=passes)
    indices = [index for index, _ in first(100, dataset)]
    assert set(indices) == {0, 1, 2, 3}
    assert Watched.most_open == min(max_simultaneous, 4)
    if max_simultaneous == 1 and passes is None:
        assert all(a != b for a, b in pairwise(indices))


def test_one_child_is_read_over_and_over():
    assert first(5, StreamingDatasetNoIndex([[1, 2]], 8)) == [1, 2, 1, 2, 1]
    assert list(StreamingDatasetNoIndex([[1, 2]], 1, passes=2)) == [1, 2, 1, 2]


def test_empty_children_among_others_are_passed_over():
    for passes in (None, 20):
        dataset = StreamingDataset(children(0, 2, 0, 0, 3, 0), 2, passes=passes)
        assert {index for index, _ in first(100, dataset)} == {1, 4}


@pytest.mark.parametrize("passes", [None, 1, 3])
def test_children_that_are_all_empty_are_named_each_time(passes, watched):
    dataset = StreamingDataset(watched(0, 0, 0), 2, passes=passes)
    for _ in range(3):
        with pytest.raises(NoSamples, match="none of 3 datasets has a sample: 0, 1, 2"):
            next(dataset)
        assert Watched.open == 0
    dataset.datasets[1].rows = 2
    assert first(2, dataset) == [(1, (1, 0)), (1, (1, 1))]


def test_of_many_empty_children_a_few_are_named():
    dataset = StreamingDataset([[]] * 1_000, 4)
    with pytest.raises(NoSamples, match=r"none of 1000 datasets .*: 0, 1, .*, 9, \.\.$") as caught:
        next(dataset)
    assert [*pickle.loads(pickle.dumps(caught.value)).children] == [*range(1_000)]


def test_children_that_can_be_read_only_once_are_found_out():
    dataset = StreamingDatasetNoIndex([iter([1]), iter([2])], 2)
    assert sorted(first(2, dataset)) == [1, 2]
    with pytest.raises(NoSamples, match="none of 2 datasets has a sample"):
        next(dataset)


def test_a_hundred_thousand_children_of_one_sample():
    dataset = StreamingDatasetNoIndex([[i] for i in range(100_000)], 16, passes=1)
    samples = first(50_000, dataset)
    state = dataset.state_dict()
    samples += iter(dataset.__next__, None)
    assert sorted(samples) == [*range(100_000)]
    assert samples != sorted(samples)
    assert len(json.dumps(state)) < 500
    dataset.load_state_dict(state)
    assert first(100, dataset) == samples[50_000:50_100]


def test_a_hundred_thousand_children_without_end():
    dataset = StreamingDatasetNoIndex([[i] for i in range(100_000)], 16)
    samples = first(20_000, dataset)
    assert 17_500 < len({*samples}) < 18_700  # of 20,000 picked among 100,000
    state = json.loads(json.dumps(dataset.state_dict()))
    upcoming = [next(dataset) for _ in range(100)]
    dataset.load_state_dict(state)
    assert first(100, dataset) == upcoming


# What is open


@relaxed
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    st.integers(1, 9),
    st.sampled_from([None, 3]),
)
def test_never_more_than_max_simultaneous_children_are_open(rows, max_simultaneous, passes):
    Watched.open = Watched.most_open = 0
    dataset = StreamingDataset(
        [Watched(i, n) for i, n in enumerate(rows)], max_simultaneous, passes=passes
    )
    for _ in islice(dataset, 60):
        assert Watched.open <= len(dataset.iterators) == dataset.reservoir_pointer
        assert {*dataset.iterators} == {*dataset.reservoir[: dataset.reservoir_pointer]}
    assert Watched.most_open <= min(max_simultaneous, len(rows))
    dataset.close()
    assert Watched.open == 0


def test_nothing_is_open_before_the_first_sample_nor_after_the_last(watched):
    dataset = StreamingDataset(watched(2, 2, 2), 2, passes=1)
    iter(dataset)
    assert (Watched.open, dataset.iterators) == (0, {})
    assert len(list(dataset)) == 6
    assert (Watched.open, dataset.iterators, dataset.reservoir_pointer) == (0, {}, 0)


@pytest.mark.parametrize("ends", [iter, lambda d: d.load_state_dict(d.state_dict())])
def test_beginning_anew_and_loading_close_what_was_open(ends, watched):
    dataset = StreamingDataset(watched(9, 9, 9), 3)
    first(5, dataset)
    assert Watched.open > 0
    ends(dataset)
    assert Watched.open == 0


def test_after_close_the_next_sample_is_the_next_one():
    for kind in KINDS:
        whole = first(40, StreamingDataset(children(5, 6, 7, kind=kind), 2))
        dataset = StreamingDataset(children(5, 6, 7, kind=kind), 2)
        assert first(17, dataset) == whole[:17]
        dataset.close()
        assert dataset.iterators == {}
        assert [next(dataset) for _ in range(23)] == whole[17:]


def test_an_iterator_that_cannot_be_closed_does_no_harm():
    class Sticks(Position):
        def close(self):
            raise OSError("will not close")

    class Child(Plain):
        def __iter__(self):
            return Sticks(self.name, self.rows)

    assert len(list(StreamingDataset(children(2, 3, kind=Child), 1, passes=1))) == 5


def test_the_reservoir_can_be_worked_by_hand(watched):
    dataset = StreamingDataset(watched(4, 4, 4, 4), 2, seed=3)
    assert sorted(dataset.reservoir) == sorted(dataset.worker_datasets) == [0, 1, 2, 3]
    assert (dataset.reservoir_pointer, dataset.iterators) == (0, {})
    dataset.fill_reservoir()
    assert dataset.reservoir_pointer == 2
    assert {*dataset.iterators} == {*dataset.reservoir[:2]}
    assert {dataset.sample_reservoir_id() for _ in range(50)} == {0, 1}
    a, b = dataset.reservoir[:2]
    dataset.swap_reservoir(0, 1)
    assert dataset.reservoir[:2] == [b, a]
    dataset.return_dataset(0)
    assert (dataset.reservoir_pointer, dataset.reservoir[:2]) == (1, [a, b])
    assert {*dataset.iterators} == {a}
    dataset.fill_reservoir()
    assert dataset.reservoir_pointer == 2
    assert dataset.reservoir[1] != b
    assert len(first(20, dataset)) == 20


def test_places_that_are_not_open_are_refused():
    dataset = StreamingDataset(children(4, 4, 4, 4), 2)
    with pytest.raises(IndexError, match="no dataset is open"):
        dataset.sample_reservoir_id()
    dataset.fill_reservoir()
    for place in (2, 3, -1):
        with pytest.raises(IndexError, match=f"place {place} is not open; open are 2"):
            dataset.return_dataset(place)
    with pytest.raises(ValueError, match="places 1 and 2 must both be open or both wait"):
        dataset.swap_reservoir(1, 2)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (([], 1), {}, "no datasets are provided, expected at least one"),
        (([[1]], 0), {}, "max_simultaneous must be an integer of at least 1, found 0"),
        (([[1]], True), {}, "max_simultaneous must be an integer of at least 1, found True"),
        (([[1]], 2.0), {}, r"max_simultaneous must be an integer of at least 1, found 2\.0"),
        (([[1]], 1), {"seed": -1}, "seed must be an integer of at least 0, found -1"),
        (([[1]], 1), {"seed": None}, "seed must be an integer of at least 0, found None"),
        (([[1]], 1), {"passes": 0}, "passes must be an integer of at least 1, found 0"),
        (([[1]], 1), {"passes": True}, "passes must be an integer of at least 1, found True"),
        (([[1]], 1), {"rank": 2, "world_size": 2}, "rank must be below world_size 2, found 2"),
        (([[1]], 1), {"world_size": 0}, "world_size must be an integer of at least 1, found 0"),
    ],
)
def test_settings_that_make_no_stream_are_refused(arguments, settings, message):
    for kind in (StreamingDataset, StreamingDatasetNoIndex):
        with pytest.raises(ValueError, match=message):
            kind(*arguments, **settings)


# What fails


@pytest.mark.parametrize("place", ["open", 0, 2, 3])
@pytest.mark.parametrize("passes", [None, 4])
def test_a_childs_error_names_it_and_no_sample_is_lost(place, passes, watched):
    whole = first(60, StreamingDataset(watched(4, 4, 4), 2, passes=passes))[:40]
    datasets = watched(4, 4, 4)
    datasets[1].fails = {place: OSError("no such bucket")}
    dataset = StreamingDataset(datasets, 2, passes=passes)
    samples, errors = [], []
    while len(samples) < 40:
        before = len(samples)
        try:
            samples.append(next(dataset))
        except ChildError as error:
            errors.append(error)
            resumed = StreamingDataset(watched(4, 4, 4), 2, passes=passes)
            resumed.load_state_dict(dataset.state_dict())
            assert first(5, resumed) == whole[before : before + 5]
    assert samples == whole
    (error,) = errors
    assert error.index == 1
    assert str(error) == "dataset 1 raised OSError: no such bucket"
    assert isinstance(error.__cause__, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_child_that_fails_for_good_is_never_passed_over():
    class Broken(Plain):
        def __iter__(self):
            yield "only"
            raise OSError("page checksum")

    dataset = StreamingDataset([Broken(0, 1), [1, 2, 3]], 2, passes=1)
    samples = []
    for _ in range(3):
        with pytest.raises(ChildError, match="dataset 0 raised OSError: page checksum"):
            samples.extend(iter(dataset.__next__, None))
    assert samples.count((0, "only")) == 1


def test_iterators_that_fail_or_fall_short_are_closed():
    closed = []

    class Closes:
        def __init__(self, child):
            self.samples = enumerate([(child.name, i) for i in range(child.rows)])
            self.at = 0

        def __next__(self):
            if self.at == 2 and not closed:
                raise OSError("page checksum")
            self.at, sample = next(self.samples)
            self.at += 1
            return sample

        def __iter__(self):
            return self

        def close(self):
            closed.append(self.at)

    class Child(Plain):
        def __iter__(self):
            return Closes(self)

    dataset = StreamingDataset([Child(0, 5)], 1, passes=1)
    samples = first(2, dataset)
    with pytest.raises(ChildError, match="page checksum"):
        next(dataset)
    assert closed == [2]
    samples += [next(dataset), next(dataset)]
    at_row_4 = dataset.state_dict()
    samples += iter(dataset.__next__, None)
    assert samples == [(0, (0, i)) for i in range(5)]
    assert closed == [2, 5]
    dataset.load_state_dict(at_row_4)
    dataset.datasets[0].rows = 3
    with pytest.raises(ChildError, match="expected at least 4 samples as before, found 3"):
        next(dataset)
    assert closed == [2, 5, 3]


def test_an_interrupt_is_not_wrapped_and_no_sample_is_lost(watched):
    whole = first(20, StreamingDataset(watched(4, 4), 2))
    datasets = watched(4, 4)
    datasets[0].fails = {2: KeyboardInterrupt()}
    dataset = StreamingDataset(datasets, 2)
    samples = []
    with pytest.raises(KeyboardInterrupt):
        samples.extend(next(dataset) for _ in range(20))
    rest = [next(dataset) for _ in range(20)]
    lost = whole.index(rest[0])
    assert rest[: 20 - lost] == whole[lost:]
    assert whole[lost][1] == (0, 2)


def test_a_child_that_became_shorter_than_its_offset_is_named():
    dataset = StreamingDataset(children(9), 1)
    first(6, dataset)
    resumed = StreamingDataset(children(4), 1)
    resumed.load_state_dict(dataset.state_dict())
    message = "dataset 0 raised ValueError: expected at least 6 samples as before, found 4"
    with pytest.raises(ChildError, match=message):
        next(resumed)


# Exact resume

KINDS = [Plain, AtOffset, KeepsPosition, IteratorKeepsPosition, Nested]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [None, 4])
@pytest.mark.parametrize("max_simultaneous", [1, 2, 9])
def test_resume_is_exact_at_every_sample_and_once_more(kind, passes, max_simultaneous):
    def fresh():
        rows = (4, 1, 0, 6) if kind is not Nested else (4, 1, 2, 6)
        return StreamingDataset(children(*rows, kind=kind), max_simultaneous, seed=2, passes=passes)

    dataset = fresh()
    whole, states = [], []
    for sample in dataset:
        whole.append(sample)
        states.append(json.loads(json.dumps(dataset.state_dict())))
        if len(whole) == 44:
            break
    for n, state in enumerate(states[:33], 1):
        resumed = fresh()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert first(4, resumed) == whole[n : n + 4]
        again = fresh()
        again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        assert first(7, again) == whole[n + 4 : n + 11]


def test_a_checkpoint_of_passes_holds_no_more_than_the_open_children():
    dataset = StreamingDataset(children(*[3] * 500), 4, passes=2)
    for _ in dataset:
        state = dataset.state_dict()
        assert len(state["reservoir"]) == len(state["offsets"]) <= 4
    assert (state["pass"], state["position"]) == (1, 500)
    assert dataset.state_dict()["pass"] == 2


def test_a_finished_stream_resumes_as_finished():
    dataset = StreamingDataset(children(2, 2), 2, passes=1)
    assert len(list(dataset)) == 4
    resumed = StreamingDataset(children(2, 2), 2, passes=1)
    resumed.load_state_dict(dataset.state_dict())
    assert list(resumed) == []
    assert len(list(resumed)) == 4


def test_iter_begins_anew_unless_a_checkpoint_was_loaded_since():
    dataset = StreamingDataset(children(5, 5, 5), 2)
    start = dataset.state_dict()
    whole = first(30, dataset)
    assert first(10, dataset) == whole[:10]
    later = dataset.state_dict()
    assert first(10, dataset) == whole[:10]
    dataset.load_state_dict(later)
    assert first(5, dataset) == whole[10:15]
    dataset.load_state_dict(later)
    assert next(dataset) == whole[10]
    assert first(5, dataset) == whole[11:16]
    assert first(5, dataset) == whole[:5]
    dataset.load_state_dict(start)
    assert first(30, dataset) == whole


def test_a_checkpoint_may_be_taken_and_loaded_before_iter():
    fresh = StreamingDataset(children(5, 5, 5), 2)
    state = fresh.state_dict()
    whole = first(10, StreamingDataset(children(5, 5, 5), 2))
    assert [next(fresh) for _ in range(10)] == whole
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert first(10, fresh) == whole


def test_checkpoints_are_independent_copies():
    dataset = StreamingDataset(children(5, 5, 5), 2)
    first(7, dataset)
    state = dataset.state_dict()
    kept = json.loads(json.dumps(state))
    upcoming = [next(dataset) for _ in range(10)]
    assert state == kept
    dataset.load_state_dict(state)
    state["reservoir"].clear()
    state["offsets"].clear()
    assert [next(dataset) for _ in range(10)] == upcoming


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_copy_goes_on_where_the_dataset_stood(kind):
    dataset = StreamingDataset(children(5, 6, 7, kind=kind), 2, seed=4)
    first(9, dataset)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.iterators == {}
    assert [next(copy) for _ in range(30)] == [next(dataset) for _ in range(30)]


def test_states_of_childrens_own_stand_in_the_checkpoint_as_they_are():
    dataset = StreamingDataset([*children(5, 5, kind=KeepsPosition), Plain(2, 5)], 3)
    first(9, dataset)
    state = dataset.state_dict()
    offsets = dict(zip(state["reservoir"], state["offsets"], strict=True))
    assert state["child_states"] == {str(child): {"at": offsets[child]} for child in (0, 1)}
    assert "child_states" not in StreamingDataset(children(5, kind=AtOffset), 1).state_dict()


def test_a_state_of_a_childs_own_spares_it_from_reading_again():
    dataset = StreamingDataset(children(9, kind=KeepsPosition), 1)
    (child,) = dataset.datasets
    first(3, dataset)
    dataset.close()
    next(dataset)
    assert child.reads == [0, 1, 2, 3]
    copy = pickle.loads(pickle.dumps(dataset))
    next(copy)
    assert copy.datasets[0].reads == [0, 1, 2, 3, 4]
    dataset.load_state_dict(copy.state_dict())
    next(dataset)
    assert child.reads == [0, 1, 2, 3, 5]


def test_a_child_that_fails_after_it_was_loaded_goes_on_at_its_offset():
    whole = first(30, StreamingDataset(children(9, 9, kind=KeepsPosition), 2))
    dataset = StreamingDataset(children(9, 9, kind=KeepsPosition), 2)
    first(6, dataset)
    dataset.load_state_dict(dataset.state_dict())
    dataset.datasets[0].fails_at = 6
    samples = []
    with pytest.raises(ChildError, match="dataset 0 raised OSError: no such bucket"):
        samples.extend(iter(dataset.__next__, None))
    samples += [next(dataset) for _ in range(10)]
    assert samples == whole[6 : 6 + len(samples)]


def test_children_are_opened_when_asked_for_and_failing_then_changes_nothing(watched):
    whole = first(20, StreamingDataset(watched(9, 9, 9), 2))
    dataset = StreamingDataset(watched(9, 9, 9), 2)
    first(8, dataset)
    state = dataset.state_dict()
    for child in dataset.datasets:
        child.fails = {"open": OSError("no such bucket")}
    dataset.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ChildError, match="no such bucket"):
            next(dataset)
        assert dataset.state_dict() == state
    assert [next(dataset) for _ in range(5)] == whole[8:13]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": (5, 5)}, "the checkpoint is for datasets 3, expected 2"),
        ({"max_simultaneous": 3}, "the checkpoint is for max_simultaneous 2, expected 3"),
        ({"seed": 6}, "the checkpoint is for seed 5, expected 6"),
        ({"passes": 1}, "the checkpoint is for passes None, expected 1"),
        ({"world_size": 2}, "the checkpoint is for world_size 1, expected 2"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_and_nothing_changes(other, message):
    state = StreamingDataset(children(5, 5, 5), 2, seed=5).state_dict()
    arguments = {"max_simultaneous": 2, "seed": 5, "rows": (5, 5, 5), **other}
    rows = arguments.pop("rows")
    dataset = StreamingDataset(children(*rows), **arguments)
    expected = StreamingDataset(children(*rows), **arguments)
    assert first(4, dataset) == first(4, expected)
    with pytest.raises(ValueError, match=message):
        dataset.load_state_dict(state)
    assert next(dataset) == next(expected)


# Ranks, workers, torch


def test_ranks_share_the_children_out_in_strides():
    for rank in range(3):
        dataset = StreamingDataset(children(*[2] * 8), 2, rank=rank, world_size=3, passes=1)
        assert [*dataset.worker_datasets] == [*range(rank, 8, 3)]
        found = Counter(index for index, _ in dataset)
        assert found == dict.fromkeys(range(rank, 8, 3), 2)
        endless = StreamingDataset(children(*[2] * 8), 2, rank=rank, world_size=3)
        assert {index for index, _ in first(100, endless)} == {*range(rank, 8, 3)}


def test_the_state_of_a_rank_resumes_on_that_rank_only():
    for passes in (None, 20):

        def fresh(rank, passes=passes):
            datasets = children(*[2] * 8)
            return StreamingDataset(datasets, 2, rank=rank, world_size=3, passes=passes)

        dataset = fresh(1)
        first(11, dataset)
        state = dataset.state_dict()
        resumed = fresh(1)
        resumed.load_state_dict(state)
        assert first(20, resumed) == [next(dataset) for _ in range(20)]
        with pytest.raises(ValueError, match="the checkpoint is for rank 1, expected 2"):
            fresh(2).load_state_dict(state)


def test_a_rank_without_children_has_no_samples():
    for passes in (None, 1):
        dataset = StreamingDataset(children(2, 2), 2, rank=2, world_size=3, passes=passes)
        assert list(dataset) == []
        dataset.load_state_dict(dataset.state_dict())
        assert list(dataset) == []
        assert (dataset.worker_datasets, dataset.reservoir) == ({}, [])


def test_without_torch_the_datasets_are_plain_iterables():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mixcore.streaming import StreamingDatasetNoIndex\n"
        "print(list(StreamingDatasetNoIndex([[1], [1]], 1, passes=1)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[1, 1]\n", "")


def test_with_torch_they_are_iterable_datasets():
    data = pytest.importorskip("torch.utils.data")
    for kind in (StreamingDataset, StreamingDatasetNoIndex):
        assert isinstance(kind([[1]], 1), data.IterableDataset)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize(
    ("workers", "context"),
    [
        (0, None),
        (1, "fork"),
        (2, "fork"),
        (5, "fork"),
        pytest.param(2, "spawn", marks=pytest.mark.slow),
    ],
)
def test_loader_workers_share_the_children_out(workers, context):
    data = pytest.importorskip("torch.utils.data")
    dataset = StreamingDataset(children(*[3] * 4), 2, passes=2)
    loader = data.DataLoader(
        dataset,
        batch_size=None,
        collate_fn=tuple,  # as it is
        num_workers=workers,
        multiprocessing_context=context,
    )
    samples = list(loader)
    assert Counter(samples) == Counter(dataset)
    if workers < 2:
        assert samples == list(dataset)


def test_endless_streams_are_mixed_by_two_workers():
    data = pytest.importorskip("torch.utils.data")
    dataset = StreamingDatasetNoIndex([[i] * 3 for i in range(6)], 2, seed=8)
    loader = iter(data.DataLoader(dataset, batch_size=4, num_workers=2))
    even, odd = (batch.tolist() for batch in islice(loader, 2))
    del loader
    assert {i % 2 for i in even} == {0}
    assert {i % 2 for i in odd} == {1}


def test_a_childs_error_reaches_the_trainer_through_the_loader():
    data = pytest.importorskip("torch.utils.data")
    broken = Watched(0, 3, fails={0: OSError("page checksum")})
    loader = data.DataLoader(StreamingDataset([broken], 1), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="dataset 0 raised OSError: page checksum"):
        next(iter(loader))


def test_a_checkpoint_loaded_for_one_worker_goes_to_no_other():
    data = pytest.importorskip("torch.utils.data")
    dataset = StreamingDatasetNoIndex([[0] * 9, [1] * 9, [2] * 9], 2)
    first(5, dataset)
    state = dataset.state_dict()
    expected = [next(dataset) for _ in range(20)]
    dataset.load_state_dict(state)
    loader = data.DataLoader(dataset, batch_size=None, num_workers=1)
    assert first(20, loader) == expected
    loader = data.DataLoader(dataset, batch_size=None, num_workers=2)
    message = "the checkpoint is for worker 0 of 1, this is worker 0 of 2"
    with pytest.raises(ValueError, match=message):
        next(iter(loader))


# RegistryChild


class Letters:
    """A registry of strings that knows what is open."""

    def __init__(self):
        self.opened = []
        self.closed = []

    def get_iterator(self, name, offset=0):
        self.opened.append((name, offset))
        return self.read(name, offset)

    def read(self, name, offset):
        try:
            yield from name[offset:]
        finally:
            self.closed.append(name)


def test_a_registrys_dataset_or_a_part_of_it_is_a_child_that_opens_at_its_offset():
    registry = Letters()
    assert list(RegistryChild(registry, "abcdef")) == [*"abcdef"]
    assert list(RegistryChild(registry, "abcdef", start=2, rows=3)) == [*"cde"]
    assert list(RegistryChild(registry, "abcdef", start=2, rows=3).get_iterator(1)) == [*"de"]
    assert list(RegistryChild(registry, "abcdef", start=4).get_iterator(1)) == ["f"]
    assert registry.opened == [("abcdef", n) for n in (0, 2, 3, 5)]
    assert len(registry.closed) == 4
    assert list(RegistryChild(registry, "abc", start=2, rows=0)) == []
    assert len(registry.opened) == 4


def test_registry_children_resume_without_reading_again_and_are_closed():
    registry = Letters()
    parts = [RegistryChild(registry, "abcdefgh", start, 4) for start in (0, 4)]
    dataset = StreamingDatasetNoIndex(parts, 2, passes=1)
    samples = [next(dataset) for _ in range(5)]
    state = dataset.state_dict()
    registry.opened.clear()
    dataset.load_state_dict(state)
    samples += list(dataset)
    assert sorted(samples) == [*"abcdefgh"]
    assert sorted(registry.opened) == sorted(
        ("abcdefgh", 4 * child + offset)
        for child, offset in zip(state["reservoir"], state["offsets"], strict=True)
        if offset < 4
    )
    assert len(registry.closed) == 2 + len(registry.opened)
