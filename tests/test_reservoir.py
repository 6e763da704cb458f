"""The reservoir: its draws, its checkpoints, and the plan against the online stream."""

from __future__ import annotations

import json
import pickle
import re
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixcore.mixture import Mixture
from mixcore.reservoir import NoSamples, ReservoirMixture, Setup, total_batches
from mixcore.shuffle import Permutation
from mixcore.streaming import RegistryChild, StreamingDatasetNoIndex

relaxed = settings(deadline=None)  # the machine may be busy


class Numbers:
    """A registry of datasets without end: items (name, 0), (name, 1), .."""

    def get_iterator(self, name, offset=0):
        return ((name, i) for i in range(offset, 2**62))


def online_twin(mixture):
    """The stream that a mixture plans."""
    children = [
        RegistryChild(Numbers(), mixture.names[dataset], start, rows)
        for dataset, start, rows in zip(
            mixture.child_dataset.tolist(),
            mixture.child_start.tolist(),
            mixture.child_rows.tolist(),
            strict=True,
        )
    ]
    return StreamingDatasetNoIndex(
        children, mixture.max_simultaneous, seed=mixture.seed, passes=mixture.passes
    )


def mixture_of(rows, max_simultaneous, batch_size, num_batches, *, seed=0, passes=None):
    """One dataset a child, each child from row 100 on."""
    return ReservoirMixture(
        names=tuple(f"d{i}" for i in range(len(rows))),
        child_dataset=np.arange(len(rows)),
        child_start=np.full(len(rows), 100),
        child_rows=np.array(rows),
        max_simultaneous=max_simultaneous,
        seed=seed,
        batch_size=batch_size,
        num_batches=num_batches,
        passes=passes,
    )


def batches_of(row_map, names, num_batches):
    """The items (name, row) of every batch of a map."""
    columns = (row_map.batch, row_map.dataset, row_map.start, row_map.count, row_map.epoch)
    assert [c.dtype for c in columns] == [np.int64, np.int32, np.int64, np.int64, np.int32]
    assert len({len(c) for c in columns}) == 1
    assert (row_map.count >= 1).all()
    batches = [[] for _ in range(num_batches)]
    for batch, dataset, start, count, _ in zip(*(c.tolist() for c in columns), strict=True):
        batches[batch] += [(names[dataset], start + i) for i in range(count)]
    return batches


@st.composite
def mixtures(draw):
    rows = draw(
        st.lists(st.integers(0, 2) | st.integers(0, 40), min_size=1, max_size=10).filter(any)
    )
    batch_size, passes = draw(st.integers(1, 30)), draw(st.sampled_from([None, None, 1, 2, 3]))
    most = total_batches(rows, batch_size, passes)
    return mixture_of(
        rows,
        draw(st.integers(1, 12)),
        batch_size,
        draw(st.integers(0, 60 if most is None else most)),
        seed=draw(st.integers(0, 2**65)),
        passes=passes,
    )


# The plan and the stream


@relaxed
@given(mixtures())
def test_the_plan_is_what_the_stream_emits_and_states_are_its_checkpoints(mixture):
    online = online_twin(mixture)
    states = list(mixture.states(range(mixture.num_batches + 1)))
    for state in states[:-1]:
        assert state == online.state_dict()
        (size,) = mixture.sizes(state, 1)
        (batch,) = batches_of(mixture.rows(state, 1), mixture.names, 1)
        assert batch == [next(online) for _ in range(size)]
    assert states[-1] == online.state_dict()
    if mixture.num_batches == total_batches(mixture.child_rows, mixture.batch_size, mixture.passes):
        assert list(iter(online.__next__, None)) == []


@relaxed
@given(mixtures(), st.data())
def test_work_from_any_boundary_is_the_rest_of_the_whole_offline_and_online(mixture, data):
    boundary = data.draw(st.integers(0, mixture.num_batches))
    start, state = mixture.states([0, boundary])
    whole = mixture.rows(start, mixture.num_batches)
    batches = batches_of(whole, mixture.names, mixture.num_batches)
    left = mixture.num_batches - boundary
    state = json.loads(json.dumps(state))
    assert batches_of(mixture.rows(state, left), mixture.names, left) == batches[boundary:]
    assert mixture.sizes(state, left).tolist() == [len(batch) for batch in batches[boundary:]]
    online = online_twin(mixture)
    online.load_state_dict(state)
    rest = [item for batch in batches[boundary:] for item in batch]
    assert list(islice(online, len(rest))) == rest


@relaxed
@given(mixtures())
def test_a_rows_epoch_is_how_often_its_child_was_begun_before(mixture):
    (start,) = mixture.states([0])
    row_map = mixture.rows(start, mixture.num_batches)
    columns = (row_map.dataset, row_map.start, row_map.count, row_map.epoch)
    begun = [0] * len(mixture.names)
    for child, first, count, epoch in zip(*(c.tolist() for c in columns), strict=True):
        begun[child] += first == 100
        assert epoch == begun[child] - 1
        assert first + count <= 100 + mixture.child_rows[child]


@pytest.mark.parametrize("passes", [None, 2])
@pytest.mark.parametrize(
    ("rows", "max_simultaneous"),
    [([5_000] * 8, 3), ([3] * 7_000, 40), ([20_000, 1, 0, 300], 4), ([40_000], 1)],
)
def test_a_plan_of_many_blocks_equals_the_stream(rows, max_simultaneous, passes):
    mixture = mixture_of(rows, max_simultaneous, 100, 400, seed=1, passes=passes)
    start, middle, end = mixture.states([0, 313, 400])
    online = online_twin(mixture)
    batches = [[next(online) for _ in range(100)] for _ in range(400)]
    assert batches_of(mixture.rows(start, 400), mixture.names, 400) == batches
    assert batches_of(mixture.rows(middle, 87), mixture.names, 87) == batches[313:]
    assert online.state_dict() == end


@pytest.mark.parametrize(
    ("max_simultaneous", "num_batches", "passes"),
    [(16, 1_000, None), (16, 1_000, 1), (70_000, 100, None)],
)
def test_a_hundred_thousand_children_of_one_row_are_planned(max_simultaneous, num_batches, passes):
    mixture = mixture_of([1] * 100_000, max_simultaneous, 100, num_batches, passes=passes)
    (start,) = mixture.states([0])
    row_map = mixture.rows(start, num_batches)
    assert row_map.num_rows == 100 * num_batches
    if passes:
        assert len(np.unique(row_map.dataset)) == row_map.num_rows
        assert not row_map.epoch.any()
    online = online_twin(mixture)
    assert batches_of(row_map, mixture.names, num_batches)[:3] == [
        [next(online) for _ in range(100)] for _ in range(3)
    ]


def test_passes_are_drained_one_by_one():
    mixture = mixture_of([3, 0, 5, 1], 3, 9, 5, passes=5)
    (start,) = mixture.states([0])
    row_map = mixture.rows(start, 5)
    assert row_map.epoch.tolist() == row_map.batch.tolist()
    every = sorted((f"d{i}", 100 + row) for i, n in enumerate((3, 0, 5, 1)) for row in range(n))
    assert [sorted(batch) for batch in batches_of(row_map, mixture.names, 5)] == [every] * 5


def test_children_may_be_ranges_of_one_dataset():
    mixture = ReservoirMixture(
        ("a", "b"), [1, 0, 1], [20, 0, 10], [10, 4, 10], 2, seed=3, batch_size=24, num_batches=1,
        passes=1,
    )  # fmt: skip
    (start,) = mixture.states([0])
    (batch,) = batches_of(mixture.rows(start, 1), mixture.names, 1)
    assert sorted(batch) == [("a", i) for i in range(4)] + [("b", i) for i in range(10, 30)]


def test_rows_that_follow_each_other_in_a_batch_are_one_entry():
    mixture = mixture_of([5, 5], 1, 4, 5)
    (start,) = mixture.states([0])
    row_map = mixture.rows(start, 5)
    assert row_map.count.tolist() == [4, 1, 3, 2, 2, 3, 1, 4]
    assert row_map.batch.tolist() == [0, 1, 1, 2, 2, 3, 3, 4]
    alone = mixture_of([1], 1, 3, 2)
    (start,) = alone.states([0])
    assert alone.rows(start, 2).start.tolist() == [100] * 6
    assert alone.rows(start, 2).epoch.tolist() == [0, 1, 2, 3, 4, 5]


def test_no_batches_are_an_empty_map():
    mixture = mixture_of([0], 1, 3, 0)
    (start,) = mixture.states([0])
    assert batches_of(mixture.rows(start, 0), mixture.names, 0) == []
    assert mixture.sizes(start, 0).tolist() == []


def test_a_mixture_fulfils_the_protocol_and_pickles():
    mixture: Mixture = mixture_of([4, 4], 1, 3, 2, passes=1)
    assert mixture.names == ("d0", "d1")
    assert (mixture.num_batches, mixture.rows_per_batch) == (2, 3)
    assert mixture.state_kind == "reservoir"
    copy = pickle.loads(pickle.dumps(mixture))
    assert list(copy.states([0, 1])) == list(mixture.states([0, 1]))


def test_only_the_last_batch_of_passes_may_be_shorter():
    assert total_batches([4, 4], 3, None) is None
    assert total_batches([4, 4], 3, 1) == 3
    assert total_batches([4, 5], 3, 1) == 3
    assert mixture_of([4, 4], 1, 3, 3, passes=1).rows_per_batch is None
    assert mixture_of([4, 5], 1, 3, 3, passes=1).rows_per_batch == 3
    assert mixture_of([4, 4], 1, 3, 999).rows_per_batch == 3
    mixture = mixture_of([4, 4], 2, 3, 6, passes=2)
    states = list(mixture.states(range(7)))
    assert mixture.sizes(states[0], 6).tolist() == [3, 3, 3, 3, 3, 1]
    assert mixture.sizes(states[4], 2).tolist() == [3, 1]
    assert mixture.sizes(states[5], 1).tolist() == [1]
    for state, left in ((states[5], 1), (states[6], 0)):
        for work in (mixture.rows, mixture.sizes):
            with pytest.raises(ValueError, match=f"{left} batches are left, asked for 3"):
                work(state, 3)


def test_a_checkpoint_with_states_of_childrens_own_is_planned_from_by_its_offsets():
    mixture = mixture_of([9, 9, 9], 2, 4, 10)
    (state,) = mixture.states([5])
    with_own = {**state, "child_states": {str(state["reservoir"][0]): {"at": "anywhere"}}}
    expected = batches_of(mixture.rows(state, 5), mixture.names, 5)
    assert batches_of(mixture.rows(with_own, 5), mixture.names, 5) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"child_rows": [1.0, 2.0]}, "child_rows must be a one-dimensional array of integers"),
        ({"child_rows": [[1, 2]]}, "found 2 dimensions of int64"),
        ({"child_rows": [1, -1]}, r"child_rows must be from 0 to below 2\*\*60, found -1 to 1"),
        ({"child_start": [0, 2**60]}, r"child_start must be from 0 to below 2\*\*60, found 0 to"),
        ({"child_rows": [1]}, "child_rows must have a value for each of 2 children, found 1"),
        ({"child_dataset": [0, 2]}, "child_dataset must be below 2, the number of datasets, f"),
        ({"child_rows": [0, 0]}, "all 2 children are empty"),
        ({"passes": 3, "num_batches": 9}, "num_batches must be at most 8, all that the children"),
        ({"passes": 2**60}, r"passes must have fewer than 2\*\*60 rows, found 576460752303423"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, found 0"),
        ({"num_batches": True}, "num_batches must be an integer of at least 0, found True"),
        ({"max_simultaneous": 0}, "max_simultaneous must be an integer of at least 1, found 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, found -1"),
        ({"passes": 0}, "passes must be an integer of at least 1, found 0"),
    ],
)
def test_a_mixture_refuses_what_cannot_be_planned(change, message):
    arguments = {
        "names": ("a", "b"),
        "child_dataset": [0, 1],
        "child_start": [0, 0],
        "child_rows": [2, 3],
        "max_simultaneous": 2,
        "seed": 0,
        "batch_size": 2,
        "num_batches": 3,
    }
    assert ReservoirMixture(**arguments).num_batches == 3
    with pytest.raises(ValueError, match=message):
        ReservoirMixture(**{**arguments, **change})


def test_a_mixture_without_children_is_refused():
    with pytest.raises(ValueError, match="datasets must be an integer of at least 1, found 0"):
        ReservoirMixture((), [], [], [], 1, seed=0, batch_size=1, num_batches=0)


def test_boundaries_and_batches_past_the_end_are_refused():
    mixture = mixture_of([9, 9], 2, 4, 3)
    with pytest.raises(ValueError, match="boundary 4 is past the mixture's 3 batches"):
        mixture.states([0, 4])
    with pytest.raises(ValueError, match="boundaries must ascend, found 1 after 2"):
        mixture.states([2, 1])
    with pytest.raises(ValueError, match="boundary must be an integer of at least 0, found -1"):
        mixture.states([-1])
    with pytest.raises(ValueError, match="the mixture has 3 batches, asked for 4"):
        mixture.rows(next(mixture.states([0])), 4)


def test_a_checkpoint_past_a_childs_rows_is_refused():
    (state,) = mixture_of([9, 9], 2, 12, 1).states([1])
    mixture = mixture_of([2, 2], 2, 4, 3)
    with pytest.raises(ValueError, match=r"child \d has 2 rows, the checkpoint has it at offset"):
        mixture.rows(state, 1)


# The state machine


def test_draw_k_is_word_k_of_the_philox_stream():
    reservoir = Setup(5, 5, seed=9, rank=0).reservoir()
    reservoir.fill()
    assert reservoir.draws == 5
    key = np.random.SeedSequence(9, spawn_key=(0, 0))
    words = np.random.Philox(key).random_raw(10_000).tolist()
    expected = [(word >> 32) * 5 >> 32 for word in words[5:]]
    assert reservoir.upcoming(9_995).tolist() == expected
    assert [reservoir.sample() for _ in range(9_995)] == expected
    assert (reservoir.draws, {*expected}) == (10_000, {*range(5)})


@pytest.mark.parametrize("draws", [6, 4_099, 2**40 + 3, 2**64 - 9])
def test_any_draw_is_reached_at_once(draws):
    reservoir = Setup(3, 2, seed=1).reservoir()
    reservoir.load({**reservoir.state(), "draws": draws - draws % 4})
    expected = [reservoir.sample() for _ in range(7)]
    reservoir.load({**reservoir.state(), "draws": draws})
    assert [reservoir.sample() for _ in range(3)] == expected[draws % 4 :][:3]
    reservoir.undo_sample()
    assert reservoir.sample() == expected[draws % 4 + 2]


def test_each_waiting_child_is_as_likely_to_be_opened_but_the_one_just_given_back():
    counts = np.zeros(5, int)
    for seed in range(3_000):
        reservoir = Setup(6, 2, seed=seed).reservoir()
        assert reservoir.fill() == range(2)
        returned = reservoir.reservoir[0]
        reservoir.give_back(0)
        assert reservoir.fill() == range(1, 2)
        opened = reservoir.reservoir[1]
        assert opened != returned
        counts[(opened - returned) % 6 - 1] += 1
    assert (abs(counts - 600) < 120).all()


def test_children_found_empty_before_the_last_sample_do_not_count():
    reservoir = Setup(2, 1).reservoir()
    for samples in (0, 1, 1, 0):  # of each child in turn
        reservoir.fill()
        for _ in range(samples):
            reservoir.take(reservoir.reservoir[0])
        reservoir.give_back(0)
    reservoir.fill()
    reservoir.give_back(0)
    with pytest.raises(NoSamples, match="none of 2 datasets has a sample: 0, 1"):
        reservoir.fill()


def test_children_are_opened_in_the_order_of_the_passs_permutation():
    reservoir = Setup(600, 1, seed=4, passes=2, rank=1, world_size=2).reservoir()
    for number in range(2):
        order = Permutation(300, 4, number, 1, 0).values(np.arange(300))
        for position in order.tolist():
            reservoir.fill()
            (child,) = reservoir.reservoir
            assert child == 1 + 2 * position
            assert reservoir.epoch(child) == number
            reservoir.take(child)
            reservoir.give_back(0)
    assert reservoir.fill() == range(0)


def test_a_checkpoint_names_all_that_it_depends_on():
    setup = {
        "datasets": 5,
        "max_simultaneous": 2,
        "seed": 3,
        "passes": None,
        "rank": 1,
        "world_size": 2,
        "worker": 0,
        "workers": 1,
    }
    state = Setup(**setup).reservoir().state()
    assert {name: state[name] for name in setup} == setup
    position = {name: value for name, value in state.items() if name not in setup}
    assert position == {"draws": 2, "reservoir": [1, 3], "offsets": [0, 0], "visits": [0, 0]}
    setup["passes"] = 4
    state = Setup(**setup).reservoir().state()
    assert sorted(state.pop("reservoir")) == [1, 3]
    position = {name: value for name, value in state.items() if name not in setup}
    assert position == {"draws": 0, "offsets": [0, 0], "pass": 0, "position": 2}


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"datasets": 0}, "datasets must be an integer of at least 1, found 0"),
        ({"world_size": 2, "rank": 2}, "rank must be below world_size 2, found 2"),
        ({"workers": 2, "worker": 3}, "worker must be below workers 2, found 3"),
        ({"workers": 2, "worker": -1}, "worker must be an integer of at least 0, found -1"),
    ],
)
def test_a_setup_refuses_places_that_do_not_exist(setup, message):
    with pytest.raises(ValueError, match=message):
        Setup(**{"datasets": 4, "max_simultaneous": 2, **setup})


def endless():
    """A reservoir of four children, two of them open, and its state after some samples."""
    mixture = mixture_of([5, 5, 5, 5], 2, 7, 3)
    return Setup(4, 2).reservoir(), list(mixture.states(range(4)))[3]


def in_passes():
    """The same in the second of three passes."""
    mixture = mixture_of([5, 5, 5, 5], 2, 23, 2, passes=3)
    return Setup(4, 2, passes=3).reservoir(), list(mixture.states(range(2)))[1]


EVERY = [
    (None, "a checkpoint must be a dict, found NoneType"),
    ("draws", "a checkpoint must be a dict, found str"),
    ({"seed": 1}, "the checkpoint is for seed 1, expected 0"),
    ({"workers": True}, "the checkpoint is for workers True, expected 1"),
    ({"datasets": "4"}, "the checkpoint is for datasets '4', expected 4"),
    ({"draws": -1}, "draws must be an integer of at least 0, found -1"),
    ({"draws": True}, "draws must be an integer of at least 0, found True"),
    ({"draws": 2**64}, "draws must be below 2**64, found 18446744073709551616"),
    ({"draws": 1.0}, "draws must be an integer of at least 0, found 1.0"),
    ({"more": 1}, "a checkpoint must have exactly the fields ['datasets', 'max_simultaneous', "),
    ({"reservoir": None}, "reservoir must be a list of integers, found NoneType"),
    ({"reservoir": "0123"}, "reservoir must be a list of integers, found str"),
    ({"offsets": [0, -1]}, "offsets[1] must be an integer of at least 0, found -1"),
    ({"offsets": [False, 1]}, "offsets[0] must be an integer of at least 0, found False"),
    ({"offsets": [1, 1, 1]}, "offsets must be of at most 2 open datasets, found 3"),
    ({"child_states": []}, "child_states must map open datasets to states, found []"),
    ({"child_states": {"9": 1}}, "child_states must map open datasets to states, found {'9': 1}"),
]


@pytest.mark.parametrize(
    ("made", "bad", "message"),
    [
        *[(made, *case) for made in (endless, in_passes) for case in EVERY],
        (endless, {"reservoir": [0, 1, 2, 2]}, "must hold each of range(0, 4) once"),
        (endless, {"reservoir": [0, 1, 2]}, "must hold each of range(0, 4) once"),
        (endless, {"reservoir": [0, 1, 2, 4]}, "must hold each of range(0, 4) once"),
        (endless, {"offsets": [1]}, "offsets must be of the 2 open datasets, found 1"),
        (endless, {"visits": [0, 0, 0]}, "visits must be of all 4 datasets, found 3"),
        (endless, {"visits": [0, 0, 0, 2**31]}, "visits must be below 2**31, found 2147483648"),
        (endless, {"visits": [0, 0, 0, -1]}, "visits[3] must be an integer of at least 0"),
        (in_passes, {"passes": 4}, "the checkpoint is for passes 4, expected 3"),
        (in_passes, {"passes": None}, "the checkpoint is for passes None, expected 3"),
        (in_passes, {"pass": 4}, "pass must be at most 3, found 4"),
        (in_passes, {"pass": True}, "pass must be an integer of at least 0, found True"),
        (in_passes, {"pass": 3}, "position must be at most 0 in pass 3, found 2"),
        (in_passes, {"position": 5}, "position must be at most 4 in pass 1, found 5"),
        (in_passes, {"position": 1}, "must be of 2 to 1 open datasets at position 1, found 2 and"),
        (in_passes, {"offsets": [1]}, "must be of 2 to 2 open datasets at position 2, found 2 and"),
        (in_passes, {"position": 4, "reservoir": [], "offsets": []}, "must be of 1 to 2 open"),
        (in_passes, {"reservoir": [0, 0]}, "reservoir must hold no dataset twice, found [0, 0]"),
        (in_passes, {"reservoir": [9, 8]}, "dataset 9 is not among the first 2 of pass 1"),
    ],
)
def test_an_invalid_checkpoint_is_refused_before_anything_changes(made, bad, message):
    reservoir, good = made()
    reservoir.load(good)
    with pytest.raises(ValueError, match=re.escape(message)):
        reservoir.load({**good, **bad} if isinstance(bad, dict) else bad)
    assert reservoir.state() == good
    assert good["offsets"] != [0, 0]


@pytest.mark.parametrize("made", [endless, in_passes])
def test_a_checkpoint_lacks_no_field(made):
    reservoir, good = made()
    for name in good:
        lacking = {field: value for field, value in good.items() if field != name}
        with pytest.raises(ValueError, match="a checkpoint must have exactly the fields"):
            reservoir.load(lacking)


def test_a_child_that_a_pass_opens_later_is_refused():
    reservoir, good = in_passes()
    later = sorted({0, 1, 2, 3} - {*good["reservoir"]})
    with pytest.raises(ValueError, match=f"dataset {later[0]} is not among the first 2 of pass 1"):
        reservoir.load({**good, "reservoir": later})
