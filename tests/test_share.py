"""The laws of shares: what ranks take together, where they go on, and what is left out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ReaderError
from pipeline.share import Share, Skips

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


@given(ranges, st.integers(0, 80))
def test_skips_count_and_number_as_a_set_of_numbers_does(
    pairs: list[tuple[int, int]], number: int
) -> None:
    skips = Skips.of(pairs)
    out = {n for first, stop in pairs for n in range(first, stop)}
    assert skips == Skips.of(reversed(pairs))
    assert skips.below(number) == sum(n < number for n in out)
    kept = [n for n in range(200) if n not in out]
    assert [skips.kept(place) for place in range(len(kept))] == kept
    gaps = itertools.pairwise(skips.ranges)
    assert all(before < after for (_, before), (after, _) in gaps)
    assert Skips.of(pairs[:3]) | Skips.of(pairs[3:]) == skips


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (5, r"skip_batches must be ranges such as \[\(1200, 1208\)\], found 5"),
        ("12", "skip_batches must be ranges"),
        ({1: 2}, "skip_batches must be ranges"),
        ([7], "7 is no range, expected the first batch and the one past the last"),
        ([(1, 2, 3)], r"\(1, 2, 3\) is no range"),
        ([(1.0, 2)], r"a number in skip_batches must be an integer, found 1.0"),
        ([(True, 2)], r"a number in skip_batches must be an integer, found True"),
        ([(-1, 2)], r"skip_batches \(-1, 2\) is no range of batches: the first must be at least 0"),
        ([(3, 3)], r"skip_batches \(3, 3\) is no range of batches"),
        ([(0, 2), (5, 11)], r"skip_batches \(5, 11\) goes past the end: the mix has 10 batches"),
    ],
)
def test_what_is_no_range_is_refused(pairs: Any, message: str) -> None:
    with pytest.raises(ReaderError, match=message):
        Skips.of(pairs, 10)


def dealt(share: Share, start: int, steps: int | None = None) -> list[list[int]]:
    """The batches of each global step of all ranks, from a number on."""
    ranks = []
    for rank in range(share.world_size):
        own = replace(share, rank=rank)
        ranks.append([own.batch(place) for place in own.places(own.begin(start))][:steps])
    assert len({len(batches) for batches in ranks}) == 1
    return [list(step) for step in zip(*ranks, strict=True)]


@given(
    num_batches=st.integers(1, 60),
    pairs=ranges,
    step=st.sampled_from([1, 2, 4, 12]),
    remainder=st.sampled_from(["drop", "repeat"]),
    data=st.data(),
)
def test_any_world_size_deals_the_same_batches_from_any_place_it_may_begin_at(
    num_batches: int, pairs: list[tuple[int, int]], step: int, remainder: Any, data: st.DataObject
) -> None:
    skips = Skips.of(pairs)
    out = {n for first, stop in pairs for n in range(first, stop)}
    kept = [n for n in range(num_batches) if n not in out]
    if not kept:
        return
    share = Share(num_batches, step, split="batches", remainder=remainder, skips=skips)
    whole = kept[: len(kept) - len(kept) % step]
    if remainder == "repeat":
        whole = [kept[place % len(kept)] for place in range(-(-len(kept) // step) * step)]
    at = 0
    while at < len(whole):
        sizes = [r for r in range(1, step + 1) if step % r == 0 and at % r == 0]
        size = data.draw(st.sampled_from(sizes))
        ranks = replace(share, world_size=size)
        steps = data.draw(st.integers(1, len(whole) // size))
        given_out = dealt(ranks, share.number(at), steps)
        flat = list(itertools.chain(*given_out))
        assert flat == whole[at : at + len(flat)]
        # Whichever rank tells, the next step is the same.
        numbers = [ranks.number(at + place) for place in range(len(flat))]
        at += len(flat)
        assert {ranks.after(n) for n in numbers[-size:]} == {ranks.number(at)}


@given(num_batches=st.integers(1, 60), pairs=ranges)
def test_places_and_numbers_lead_to_each_other(
    num_batches: int, pairs: list[tuple[int, int]]
) -> None:
    share = Share(num_batches, 8, split="batches", remainder="repeat", skips=Skips.of(pairs))
    if not share.num_kept:
        return
    for place in range(share.stop + 1):
        assert share.place(share.number(place)) == place
    out = {n for first, stop in pairs for n in range(first, stop)}
    for number in range(num_batches):
        assert (share.number(share.place(number)) == number) == (number not in out)


def test_turns_taken_make_up_a_ranks_whole_share() -> None:
    share = Share(23, None, 1, 2, "batches")
    whole = list(share.places(4))
    for parts in (1, 2, 3, 20):
        turns = [share.places(min(4 + part * 2, share.stop), parts) for part in range(parts)]
        dealt_out = [list(turn) for turn in turns]
        assert [n for row in itertools.zip_longest(*dealt_out) for n in row if n is not None] == (
            whole
        )


@pytest.mark.parametrize("number", [-1, 3, 10, 12])
def test_a_batch_that_no_rank_is_given_has_nothing_after_it(number: int) -> None:
    share = Share(10, None, skips=Skips.of([(2, 4)]))
    with pytest.raises(
        ReaderError,
        match=f"no rank is given batch {number}: the order has batches 0 to 9 but those skipped",
    ):
        share.after(number)


def test_the_rows_of_micro_batches_are_those_of_the_rank_in_turn() -> None:
    rows = list(range(24))
    for rank in range(3):
        share = Share(1, None, rank, 3, "rows", micro_batches=4)
        own = rows[rank::3]
        assert [rows[first::distance] for first, distance in share.rows] == [
            own[part::4] for part in range(4)
        ]
    assert Share(1, None, 1, 3, "batches", micro_batches=2).rows == [(0, 2), (1, 2)]
