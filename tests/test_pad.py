"""Padding lists of differing length: shapes, values, nulls, and which values fit."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import MixError
from pipeline.pad import PadError, pad_lists, pad_value

LEAVES = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float16(): st.floats(width=16, allow_nan=False).map(np.float16),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
}

Case = tuple[pa.DataType, pa.DataType, list[Any], list[int], Any]


def dtype_name(leaf: pa.DataType) -> str:
    """NumPy's name of a type that Arrow may name as C does."""
    floats = {"halffloat": "float16", "float": "float32", "double": "float64"}
    return floats.get(str(leaf), str(leaf))


def list_of(kind: str, held: pa.DataType, size: int = -1) -> pa.DataType:
    if kind == "fixed":
        return pa.list_(held, size)
    return pa.large_list(held) if kind == "large" else pa.list_(held)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A type and that of its values, rows, the inner lengths, and a value to pad with."""
    leaf = draw(st.sampled_from(list(LEAVES)))
    inner = draw(st.lists(st.integers(0, 3), max_size=2))
    kind, entries = leaf, LEAVES[leaf]
    for size in reversed(inner):
        kind = list_of(draw(st.sampled_from(["list", "large", "fixed"])), kind, size)
        entries = st.lists(entries, min_size=size, max_size=size)
    kind = list_of(draw(st.sampled_from(["list", "large"])), kind)
    rows = draw(st.lists(st.lists(entries, max_size=4), max_size=6))
    return kind, leaf, rows, inner, draw(LEAVES[leaf])


def put_side_by_side(rows: list[Any], inner: list[int], value: Any) -> list[Any]:
    """What padding means, in plain Python."""
    filler = value
    for size in reversed(inner):
        filler = [filler] * size
    longest = max(map(len, rows), default=0)
    return [[*row, *[filler] * (longest - len(row))] for row in rows]


@given(case=cases(), cut=st.tuples(st.integers(0, 6), st.integers(0, 6)), data=st.data())
def test_lists_are_padded_as_plain_python_would(
    case: Case, cut: tuple[int, int], data: st.DataObject
) -> None:
    kind, leaf, rows, inner, value = case
    whole = pa.array(rows, kind)
    begin, end = sorted(cut)
    at = data.draw(st.integers(0, len(rows)))
    chunked = pa.chunked_array([whole.slice(0, at), whole.slice(at)], kind)
    for lists, held in (
        (whole, rows),
        (whole.slice(begin, end - begin), rows[begin:end]),
        (chunked, rows),
        (chunked.slice(begin, end - begin), rows[begin:end]),
    ):
        dense, lengths = pad_lists(lists, value)
        assert lengths.tolist() == list(map(len, held))
        assert dense.dtype.name == dtype_name(leaf)
        assert dense.ndim == 2 + len(inner)
        assert dense.tolist() == put_side_by_side(held, inner, value)
        if any(held) and 0 not in inner:  # below an empty list nothing tells
            assert dense.shape[2:] == tuple(inner)


@pytest.mark.parametrize("kind", ["list", "large", "fixed"])
@pytest.mark.parametrize("rows", [[], [[]], [[], [], []]])
def test_without_entries_the_longest_is_0_and_only_a_type_tells_an_inner_length(
    kind: str, rows: list[Any]
) -> None:
    dense, lengths = pad_lists(pa.array(rows, pa.list_(list_of(kind, pa.int16(), 5))), 7)
    assert dense.shape == (len(rows), 0, 5 if kind == "fixed" else 0)
    assert (dense.dtype, lengths.dtype) == (np.int16, np.int64)
    assert lengths.tolist() == [0] * len(rows)


def test_a_chunked_array_without_chunks_is_padded() -> None:
    dense, lengths = pad_lists(pa.chunked_array([], pa.list_(pa.bool_())), True)
    assert (dense.shape, dense.dtype, lengths.shape) == ((0, 0), np.bool_, (0,))


def test_lists_of_a_fixed_size_come_out_dense_and_have_that_length() -> None:
    lists = pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], pa.list_(pa.uint8(), 3))
    dense, lengths = pad_lists(lists.slice(1), 0)
    assert dense.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert lengths.tolist() == [3, 3]
    assert pad_lists(lists.slice(3), 0)[0].shape == (0, 3)


def test_the_array_is_writable_and_shares_no_memory_with_the_lists() -> None:
    lists = pa.array([[1.0, 2.0], [3.0, 4.0]])  # of one length, so a view would have done
    dense, lengths = pad_lists(lists, 0)
    dense[:] = lengths[:] = 9
    assert lists.to_pylist() == [[1.0, 2.0], [3.0, 4.0]]


NESTED = pa.list_(pa.list_(pa.int32()))
FIXED = pa.list_(pa.list_(pa.int32(), 2))
DEEP = pa.list_(pa.list_(pa.list_(pa.int32())))


@pytest.mark.parametrize(
    ("kind", "rows", "reason"),
    [
        (pa.list_(pa.int32()), [[1], [], None], "the list is null, expected a list"),
        (pa.list_(pa.int32(), 1), [[1], [2], None], "the list is null, expected a list"),
        (pa.list_(pa.int32()), [[1], [], [5, None]], "a value is null, expected int32"),
        (NESTED, [[[1]], [], [[5], None]], "an inner list is null, expected a list"),
        (FIXED, [[[1, 2]], [], [[5, 6], None]], "an inner list is null, expected a list"),
        (NESTED, [[[1, 2]] * 2, [], [[5, None]]], "a value is null, expected int32"),
        (FIXED, [[[1, 2]] * 2, [], [[5, None]]], "a value is null, expected int32"),
        (DEEP, [[[[1], [2]]] * 2, [], [[[3], None]]], "an inner list is null, expected a list"),
        (
            NESTED,
            [[[1, 2]] * 3, [], [[3, 4], [5]]],
            "an inner list has length 1, but those before it 2; expected one length for all inner "
            "lists of a batch",
        ),
        (
            DEEP,
            [[[[1], [2]]] * 3, [], [[[3], [4, 5]]]],
            "an inner list has length 2, but those before it 1; expected one length for all inner "
            "lists of a batch",
        ),
    ],
)
def test_nulls_and_ragged_inner_lists_are_refused_with_their_row(
    kind: pa.DataType, rows: list[Any], reason: str
) -> None:
    lists = pa.array([*rows, rows[0]], kind)
    for array, row in ((lists, 2), (lists.slice(1), 1), (pa.chunked_array([lists, lists]), 2)):
        with pytest.raises(PadError) as caught:
            pad_lists(array, 0)
        assert str(caught.value) == f"row {row}: {reason}"
        assert (caught.value.row, caught.value.reason) == (row, reason)
    assert isinstance(caught.value, MixError)
    assert len(pad_lists(lists.slice(3), 0)[0]) == 1  # what lies outside a slice does not matter
    assert len(pad_lists(lists.slice(0, 2), 0)[0]) == 2


@pytest.mark.parametrize(
    "kind",
    [
        pa.int32(),
        pa.string(),
        pa.list_(pa.string()),
        pa.list_(pa.timestamp("s")),
        pa.list_(pa.decimal128(5)),
        pa.list_(pa.struct([("a", pa.int8())])),
        pa.map_(pa.int8(), pa.int8()),
    ],
)
def test_other_types_than_lists_of_numbers_are_refused(kind: pa.DataType) -> None:
    for refuse in (
        lambda: pad_value(kind, 0),
        lambda: pad_lists(pa.nulls(0, kind), 0),
    ):
        with pytest.raises(PadError) as caught:
            refuse()
        assert str(caught.value) == (
            f"{kind} cannot be padded, expected lists of numbers or booleans"
        )
        assert caught.value.row is None


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (pa.bool_(), True),
        (pa.bool_(), np.False_),
        (pa.int8(), -128),
        (pa.int8(), 3.0),
        (pa.uint64(), 2**64 - 1),
        (pa.int64(), np.uint8(255)),
        (pa.int16(), Fraction(6, 2)),
        (pa.float16(), 65504),
        (pa.float32(), 2**24),
        (pa.float32(), -math.inf),
        (pa.float32(), np.float64(0.5)),
        (pa.float64(), -1e300),
    ],
)
def test_a_value_that_fits_is_kept_exactly(leaf: pa.DataType, value: Any) -> None:
    for kind in (pa.list_(leaf), pa.large_list(pa.list_(leaf, 2))):
        fitted = pad_value(kind, value)
        assert fitted.dtype.name == dtype_name(leaf)
        assert fitted.item() == value
        assert pad_value(kind, fitted) == fitted


def test_a_float_is_rounded_to_the_precision_of_a_column_of_floats() -> None:
    assert pad_value(pa.list_(pa.float32()), -11.512925) == np.float32(-11.512925)
    assert pad_value(pa.list_(pa.float16()), 1e-12) == 0
    for leaf in (pa.float16(), pa.float32(), pa.float64()):
        assert np.isnan(pad_value(pa.list_(leaf), math.nan))


INT8 = "is no int8, expected an integer from -128 to 127"


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        (pa.int8(), 0.5, f"0.5 (float) {INT8}"),
        (pa.int8(), 128, f"128 (int) {INT8}"),
        (pa.int8(), 1e300, f"1e+300 (float) {INT8}"),
        (pa.int8(), math.nan, f"nan (float) {INT8}"),
        (pa.int8(), -math.inf, f"-inf (float) {INT8}"),
        (pa.int8(), Fraction(1, 2), f"Fraction(1, 2) (Fraction) {INT8}"),
        (pa.int8(), None, f"None (NoneType) {INT8}"),
        (pa.int8(), "0", f"'0' (str) {INT8}"),
        (pa.int8(), False, f"False (bool) {INT8}"),
        (pa.int8(), 1j, f"1j (complex) {INT8}"),
        (pa.int8(), [0], f"[0] (list) {INT8}"),
        (pa.uint8(), -1, "-1 (int) is no uint8, expected an integer from 0 to 255"),
        (pa.bool_(), 0, "0 (int) is no bool, expected True or False"),
        (pa.bool_(), None, "None (NoneType) is no bool, expected True or False"),
        (
            pa.float16(),
            65520.0,
            "65520.0 (float) is no float16, expected a number up to 65504; integers exactly",
        ),
        (
            pa.float32(),
            2**24 + 1,
            "16777217 (int) is no float32, expected a number up to 3.40282e+38; integers exactly",
        ),
        (
            pa.float64(),
            "nan",
            "'nan' (str) is no float64, expected a number up to 1.79769e+308; integers exactly",
        ),
        (
            pa.float64(),
            True,
            "True (bool) is no float64, expected a number up to 1.79769e+308; integers exactly",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy 1 says that it would wrap
def test_a_value_that_does_not_fit_is_refused_with_its_type(
    leaf: pa.DataType, value: Any, message: str
) -> None:
    for refuse in (
        lambda: pad_value(pa.list_(leaf), value),
        lambda: pad_lists(pa.array([[]], pa.list_(leaf)), value),
    ):
        with pytest.raises(PadError) as caught:
            refuse()
        assert str(caught.value) == message


def test_an_integer_too_large_for_any_float_is_refused() -> None:
    for value, leaf in itertools.product(
        (10**400, Fraction(10**400)), (pa.float16(), pa.float64())
    ):
        with pytest.raises(PadError, match="is no float"):
            pad_value(pa.list_(leaf), value)
